"""Which tiles of query rows a block of keys visits and in which order; and sums in a fixed one.

Sums of gradients of queries come from many blocks of keys, and those of keys and values from heads
that have blocks of their own. Some heads are worked on together, block by block: blocks of one head
that begin together would add to the same tiles at the same time.

Where HAS_ADDERS warps of their own add what a block found for a tile; where IS_ORDERED, when a
number in memory says that the blocks before it have, and then tell the next. All blocks of a head
go from the last rows to the first, or all from the first to the last, and wait only for programs of
a lower number, which the card starts before them, as CUB's scans take for granted too: none waits
for ever, however few run at a time.

Where later keys are hidden and nothing else is, the blocks of a head that begins with its first,
the longest, wait for one another where they begin together, and then end together, so that the next
ones begin together. Where GOES_BOTH_WAYS most heads ascend instead: they begin with the last block,
and each goes on from the first rows that see it, one tile behind the block before from the start.
Their longest blocks end late, beside those of the last heads, which do not ascend.

Where lists say which tiles a block visits, a table says whom it waits for at each
(`mask_lists.turns_of`). Who waits for nobody stores instead of adding, so that nobody clears sums.

TMA adds in the L2 cache, which all processors share. That its sums are complete is said to who
waits for them alone: another processor that was told so by a relaxed write may still add before
them, in up to 3 of 100 backward passes, and what was stored may be lost, in 6 to 8. A release
before that write keeps the order. PTX asks for an acquire where the turn is found, and for a fence
between proxies behind it: left out, since an addition is done in L2 and cannot begin before that
load has come back. None of 6000 passes had other bits, and with a fence that acquires too they take
1 to 11 % longer at 128 columns (H200, November 2026; `docs/kernel-notes.md`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from adaattn.backends.device.barriers import release_writes, wait_for_writes
from adaattn.backends.device.gluon import barrier, tma_add, tma_store
from adaattn.backends.hopper.places import bounds, sequence_of


@gluon.jit
def row_tiles(
    sizes, first_key, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
):  # fmt: skip
    """The tiles of query rows that see a block of keys: the first, and behind the last.

    There is one at least, whose rows then see nothing.
    """
    first = gl.to_tensor(0)
    end = sizes.len_q
    if HAS_RIGHT:
        first = gl.maximum(first_key - sizes.offset - sizes.right, 0) // BLOCK_M
    if HAS_LEFT:
        last_key = gl.minimum(first_key + BLOCK_N, sizes.len_k) - 1
        end = gl.minimum(end, gl.maximum(last_key - sizes.offset + sizes.left + 1, 0))
    first = gl.minimum(first, (sizes.len_q - 1) // BLOCK_M)
    return first, gl.maximum(gl.cdiv(end, BLOCK_M), first + 1)


@gluon.jit
def head_and_block(key_blocks, num_heads, heads_together, ascending_heads, ascending_together,
                   GOES_BOTH_WAYS: gl.constexpr):  # fmt: skip
    """Head that has blocks (a key head, or where HEADS_APART any) and block of keys of a program.

    A block that starts finds the one before it, of its head, already ahead. The first heads ascend.

    Returns:
        Head, block, and whether the head ascends.
    """
    place = gl.program_id(0)
    before = gl.to_tensor(0)
    ascends = place < ascending_heads * key_blocks
    if GOES_BOTH_WAYS:
        before = gl.where(ascends, 0, ascending_heads)
        num_heads = gl.where(ascends, ascending_heads, num_heads)
        heads_together = gl.where(ascends, ascending_together, heads_together)
        place -= before * key_blocks
    size = heads_together * key_blocks
    first_head = before + place // size * heads_together
    heads = gl.minimum(heads_together, num_heads - first_head)
    place = place % size
    block = place // heads
    if GOES_BOTH_WAYS:
        block = gl.where(ascends, key_blocks - 1 - block, block)
    return first_head + place % heads, block, ascends


@gluon.jit
def packed_keys(number, starts_q, starts_k, num_sequences, sizes, ascends, BLOCK_M: gl.constexpr,
                BLOCK_N: gl.constexpr, IS_ORDERED: gl.constexpr,
                GOES_BOTH_WAYS: gl.constexpr):  # fmt: skip
    """Where a block of keys of packed sequences stands, by its number among all of a head.

    Of starts that fall a sequence may lack its first blocks, or its last. Where others would wait
    for them they have no keys.

    Returns:
        Start and length of the sequence's queries, and of its keys; its first tile of query rows
        among those of a head; and the block's first key, behind the last if it has none.
    """
    sequence, first_key = sequence_of(number, starts_k, num_sequences, BLOCK_N)
    start_q, len_q = bounds(starts_q + sequence, sizes.len_q)
    start_k, len_k = bounds(starts_k + sequence, sizes.len_k)
    if IS_ORDERED:
        number -= first_key // BLOCK_N
        if GOES_BOTH_WAYS:
            number += gl.where(ascends, gl.maximum(gl.cdiv(len_k, BLOCK_N) - 1, 0), 0)
        found, _ = sequence_of(number, starts_k, num_sequences, BLOCK_N)
        first_key = gl.where((number >= 0) & (found == sequence), first_key, len_k)
    first_key = gl.where(first_key < 0, len_k, gl.minimum(first_key, len_k))
    return start_q, len_q, start_k, len_k, start_q // BLOCK_M + sequence, first_key


@gluon.jit
def begun(c):
    """The tile of query rows that a block visits first, of the first head."""
    return c.first_tile + 0, c.first_slot + 0, c.first_head + 0


@gluon.jit
def step_of(c):
    """From one tile of query rows to the next where sums are ordered."""
    if c.GOES_BOTH_WAYS:
        step = c.step
    else:
        step = gl.to_tensor(-1)
    return step


@gluon.jit
def next_tile(c, tile, slot, head):
    """The next tile of query rows: behind the last that see the block, the next head's first.

    Where sums are ordered the next head's, and behind the last head's the first head's before it;
    of heads that ascend, which are not grouped, the next.
    """
    if c.IS_ORDERED:
        if c.IS_GROUPED:
            is_over = head == c.last_head
            tile = gl.where(is_over, tile - 1, tile)
            slot = gl.where(is_over, slot - c.skipped, slot + c.tiles_per_head)
            head = gl.where(is_over, c.first_head, head + 1)
        else:
            tile += step_of(c)
            slot += step_of(c)
    else:
        tile += 1
        slot += 1
        if c.IS_GROUPED:
            is_over = tile == c.end_tile
            tile = gl.where(is_over, c.first_tile, tile)
            slot = gl.where(is_over, slot + c.skipped, slot)
            head = gl.where(is_over, head + 1, head)
    return tile, slot, head


@gluon.jit
def turn_of(c, tile, place, is_visited):
    """Whose turn it was when asked to add to a tile's sums, and whom this block waits for there.

    Blocks count from 1, in the order in which those of a head add: it waits for 0 where it is the
    first. No number is waited for here, so that what comes next need not wait for it.
    """
    turn = gl.load(c.turns + place, mask=is_visited, other=0, volatile=True)
    if c.HAS_LISTS:
        due = gl.load(c.before + tile, mask=is_visited, other=0)
    elif c.GOES_BOTH_WAYS:
        due = gl.where(tile >= c.shared_edge, c.block, 0)
    else:
        due = gl.where(tile < c.shared_edge, c.block, 0)
    return turn, due


@gluon.jit
def await_number(place, turn, due):
    """Waits until a number in memory, as read before, is so large.

    A load that stays in a register: what an atomic operation returns would pass through shared
    memory and a barrier.
    """
    while turn < due:
        turn = gl.load(place, volatile=True)


@gluon.jit
def add_half(c, w: gl.constexpr, place, parity, before):
    """Adds what a warpgroup has laid out, and says that it has been read.

    ``parity`` is that of how often it has laid out before. Who is the first to add in a fixed
    order, as ``before`` is 0 says, has nothing to add to and stores, so that nobody need clear the
    sums. Sequences whose starts fall may share a tile, whose sums are then anything.
    """
    mbarrier.wait(c.dq_full.index(w), parity)
    if c.IS_ORDERED and before == 0:
        tma_store(c.sums, [place * 16, 0], c.dq.index(w))
    else:
        tma_add(c.sums, [place * 16, 0], c.dq.index(w))
    tma.store_wait(0)
    mbarrier.arrive(c.dq_empty.index(w))


@gluon.jit
def pass_on(c, place, number):
    """Tells the next block, when all that was added is in memory and seen by all."""
    wait_for_writes()
    barrier()  # whoever writes below has what another thread added behind it
    release_writes()
    if c.IS_PACKED:  # sequences whose starts fall may share a tile: no turn is taken back
        gl.atomic_max(c.turns + place, number + 1, sem="relaxed", scope="gpu")
    else:
        gl.atomic_xchg(c.turns + place, number + 1, sem="relaxed", scope="gpu")


@gluon.jit
def gradient_adder(c, w: gl.constexpr):
    """Adds what a warpgroup found for queries, where IS_ORDERED in its turn, and passes it on.

    Each half of a tile's sums has turns of its own. Whose turn it is at the next tile is on its way
    while sums are. Then likewise what a head that has blocks of its own found for keys and values,
    behind the heads before.
    """
    tile, slot, head = begun(c)
    turn = gl.to_tensor(0)
    due = gl.to_tensor(0)
    if c.IS_ORDERED:
        turn, due = turn_of(c, tile, slot * 2 + w, c.visits > 0)
    for visit in range(c.visits):
        place = slot * 2 + w
        if c.IS_ORDERED:
            await_number(c.turns + place, turn, due)
        add_half(c, w, place, visit & 1, due)
        tile, slot, head = next_tile(c, tile, slot, head)
        if c.IS_ORDERED:
            turn, due = turn_of(c, tile, slot * 2 + w, visit + 1 < c.visits)
            pass_on(c, place, c.block)
    if c.HEADS_APART:
        turns_place = c.key_sums + w
        if c.IS_ORDERED:
            await_number(c.turns + turns_place, gl.to_tensor(0), c.heads_before)
        parts: gl.constexpr = c.BLOCK_D // 64
        for number in gl.static_range(2 * parts):
            place = share_of(c, w, number // parts, number % parts)
            add_half(c, w, place, (c.visits + number) & 1, c.heads_before)
        if c.IS_ORDERED:
            pass_on(c, turns_place, c.heads_before)


@gluon.jit
def share_of(c, w: gl.constexpr, which: gl.constexpr, columns: gl.constexpr):
    """Which 64 x 64 sums are those of a warpgroup's keys (or values: 1), and 64 of the columns."""
    parts: gl.constexpr = c.BLOCK_D // 64
    return c.key_sums + (which * 2 + w) * parts + columns
