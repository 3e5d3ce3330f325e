"""The gradients of queries, keys and values on the device: one block of keys of one head.

    p = exp(s - lse);  dv = p^T do;  dp = do v^T;  ds = p (dp - delta);  dq = ds k;  dk = ds^T q

A block of 128 keys loops over the tiles of query rows that see it, of all query heads of its key
head: dk and dv stay in registers, 64 keys in each of two warpgroups. Scores are computed
transposed, so that p^T and ds^T are left operands from registers; ds passes through shared memory
for dq, which leaves one pass later as a sum in fp32 in global memory, added by TMA.
`adaattn.backends.hopper.gradient_rows` makes what a row needs, and the gradient of queries of those
sums. Tiles of scores are [keys of a warpgroup, BLOCK_M].

Heads of a group have one block in turn, or where HEADS_APART each its own, which adds dk and dv to
sums of the key head: more blocks for a card that few would not fill.

What a stage holds is freed once for queries, upstream gradients and terms of rows together. Of a
packed boolean mask it has the words of both warpgroups; blocks that hide all are left out.

What is summed in memory has no fixed order, or where IS_ORDERED that of
`adaattn.backends.hopper.gradient_order`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from adaattn.backends.device.barriers import two_barriers
from adaattn.backends.device.gluon import aggregate, barrier, shaped_as, tma_add, tma_store
from adaattn.backends.device.stages import copy, mma_layout, product, set_fields
from adaattn.backends.hopper.gradient_masks import listed_range
from adaattn.backends.hopper.gradient_order import (
    begun,
    gradient_adder,
    head_and_block,
    next_tile,
    packed_keys,
    row_tiles,
)
from adaattn.backends.hopper.gradient_scores import (
    beside,
    capped,
    hide_at_edges,
    slope_of,
    weighed,
)
from adaattn.backends.hopper.mask_bits import copied_words, shown
from adaattn.backends.hopper.places import corner
from adaattn.backends.hopper.scores import Sizes


@aggregate
class Backward:
    """What every function reads: tensors, sizes, stages with their barriers, choices.

    Rows are counted in tiles of all heads: ``first_slot`` is the first that the block visits. Those
    of packed sequences, and their keys, begin at ``start_q`` and ``start_k``. In a fixed order
    ``block`` is its place among those of its head. The block one place before it visits the tiles
    before ``shared_edge``, or where GOES_BOTH_WAYS those from ``shared_edge`` on.
    """

    query: tma.tensor_descriptor
    key: tma.tensor_descriptor
    value: tma.tensor_descriptor
    upstream: tma.tensor_descriptor
    row_terms: tma.tensor_descriptor
    key_gradient: tma.tensor_descriptor
    value_gradient: tma.tensor_descriptor
    sums: tma.tensor_descriptor
    words: tma.tensor_descriptor
    of_batch: gl.tensor
    of_head: gl.tensor
    slopes: gl.tensor
    turns: gl.tensor
    before: gl.tensor
    scale: gl.tensor
    natural: gl.tensor
    cap: gl.tensor
    zero: gl.tensor
    sizes: Sizes
    batch: gl.tensor
    key_head: gl.tensor
    first_head: gl.tensor
    last_head: gl.tensor
    start_q: gl.tensor
    start_k: gl.tensor
    heads_before: gl.tensor
    key_sums: gl.tensor
    block: gl.tensor
    first_key: gl.tensor
    first_tile: gl.tensor
    end_tile: gl.tensor
    first_slot: gl.tensor
    shared_edge: gl.tensor
    step: gl.tensor
    skipped: gl.tensor
    tiles_per_head: gl.tensor
    visits: gl.tensor
    q: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    r: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    caps: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    m: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    end: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    ROW_AXIS: gl.constexpr
    BLOCK_D: gl.constexpr
    KEYS: gl.constexpr
    IS_GROUPED: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_LEFT: gl.constexpr
    IS_RAGGED: gl.constexpr
    IS_ALIGNED: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    FAST_TANH: gl.constexpr
    HAS_ALIBI: gl.constexpr
    IS_ORDERED: gl.constexpr
    IS_PACKED: gl.constexpr
    HAS_MASK: gl.constexpr
    HAS_LISTS: gl.constexpr
    HEADS_APART: gl.constexpr
    HAS_ADDERS: gl.constexpr
    GOES_BOTH_WAYS: gl.constexpr
    KEEPS_KEYS: gl.constexpr
    score_layout: gl.constexpr
    sum_layout: gl.constexpr
    query_layout: gl.constexpr
    left_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, query, key, value, upstream, row_terms, key_gradient, value_gradient, sums, words,
        of_batch, of_head, slopes, turns, before, scale, natural, cap, zero, sizes, batch, key_head,
        first_head, last_head, start_q, start_k, heads_before, key_sums, block, first_key,
        first_tile, end_tile, first_slot, shared_edge, step, skipped, tiles_per_head, visits, q, o,
        r, k, v, ds, caps, dq, m, q_full, o_full, q_empty, kv_full, ds_full, dq_full, dq_empty, end,
        BLOCK_M, BLOCK_N, BLOCK_D, IS_GROUPED, HAS_RIGHT, HAS_LEFT, IS_RAGGED, IS_ALIGNED,
        HAS_SOFTCAP, FAST_TANH, HAS_ALIBI, IS_ORDERED, IS_PACKED, HAS_MASK, HAS_LISTS, HEADS_APART,
        HAS_ADDERS, GOES_BOTH_WAYS,
    ):  # fmt: skip
        set_fields(self, locals(), "BLOCK_M", "BLOCK_N")
        self.ROWS = gl.constexpr(BLOCK_M)
        self.ROW_AXIS = gl.constexpr(1)
        self.KEYS = gl.constexpr(BLOCK_N // 2)
        has_more = HAS_ADDERS or IS_GROUPED or HAS_SOFTCAP or HAS_ALIBI or HAS_MASK
        has_edges = not IS_ALIGNED and (HAS_RIGHT or HAS_LEFT or IS_RAGGED)
        # What describes keys to products, in registers throughout the loop of tiles.
        self.KEEPS_KEYS = gl.constexpr(not has_more and not has_edges)
        # A warpgroup's share of dq is 64 rows x 64 columns: of columns, or else of rows.
        self.score_layout = gl.constexpr(mma_layout(BLOCK_M))
        self.sum_layout = gl.constexpr(mma_layout(BLOCK_D))
        self.query_layout = gl.constexpr(mma_layout(64))
        self.left_layout = gl.constexpr(
            gl.DotOperandLayout(operand_index=0, parent=mma_layout(BLOCK_D), k_width=2)
        )


@gluon.jit
def gradient_producer(c):
    """Copies keys and values once, then tiles of rows, one less of the upstream gradient.

    Consumers compute scores one tile ahead: those behind the last serve nothing, and what TMA finds
    no rows for it fills with zeros.
    """
    block = corner(c, c.batch, c.key_head, c.start_k, c.first_key, c.sizes.len_k, 0)
    copy(c.key, c.kv_full.index(0), c.k.index(0), block)
    copy(c.value, c.kv_full.index(1), c.v, block)
    tile, slot, head = begun(c)
    for visit in range(c.visits + 1):
        stage = visit & 1
        row = tile * c.ROWS
        if c.IS_PACKED and c.IS_ORDERED:  # the tile before the first is another sequence's
            row = gl.maximum(row, 0)
        place = corner(c, c.batch, head, c.start_q, row, c.sizes.len_q, 0)
        mbarrier.wait(c.q_empty.index(stage), ((visit >> 1) & 1) ^ 1)
        copy(c.query, c.q_full.index(stage), c.q.index(stage), place)
        copy(c.row_terms, c.q_full.index(stage), c.r.index(stage), (slot * (2 * c.ROWS),))
        if c.HAS_MASK:
            lines = c.first_key // c.KEYS
            for w in gl.static_range(2):
                of_mask = (c.batch * c.of_batch, head * c.of_head, lines + w, tile * (2 * c.ROWS))
                copy(c.words, c.q_full.index(stage), c.m.index(2 * stage + w), of_mask)
        if visit < c.visits:
            copy(c.upstream, c.o_full.index(stage), c.o.index(stage), place)
        tile, slot, head = next_tile(c, tile, slot, head)


@gluon.jit
def keep_slope(c, w: gl.constexpr, tangent):
    """Keeps the derivative of a softcap in shared memory: there are no registers left for it."""
    c.caps.index(w).store((1.0 - tangent * tangent).to(c.caps.dtype))


@gluon.jit
def weights_of(c, w: gl.constexpr, s, lse, slope, first_key, first_row):
    """The weights of a tile, of hidden keys too."""
    s, tangent = capped(c, s)
    if c.HAS_SOFTCAP:
        keep_slope(c, w, tangent)
    return weighed(c, s, beside(c, lse), slope, first_key, first_row, False)


@gluon.jit
def hide_ahead(c, w: gl.constexpr, p, first_key, first_row):
    """The same for the tile behind a visit's.

    Where the edge begins with a tile, what is hidden is in the first tile, and in the second one of
    the other warpgroup: what hides takes registers from all of a loop.
    """
    if not c.IS_ALIGNED or (c.ROWS == 64 and w == 1):
        p = hide_at_edges(c, p, first_key, first_row)
    return p


@gluon.jit
def kept_ahead(c, w: gl.constexpr, p, stage):
    """Weights of keys that a boolean mask lets rows see, else 0; none behind the last key."""
    if c.HAS_MASK:
        p = shown(p, copied_words(c.m.index(2 * stage + w)), 0.0)
    return p


@gluon.jit
def lay_out(c, w: gl.constexpr, found):
    """64 x 64 numbers to be added to sums, 16 bytes of each thread behind one another.

    Sums may lie in any order: `gradient_rows.finish` knows it.
    """
    # [warp, row / 8, row % 8, column / 8, pair of columns, column]
    parts = found.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    c.dq.index(w).store(parts.reshape([16, 256]))
    fence_async_shared()


@gluon.jit
def hand_over(c, w: gl.constexpr, parity, found):
    """Leaves such numbers to the warp that adds, when the copy before has been read."""
    mbarrier.wait(c.dq_empty.index(w), parity)
    lay_out(c, w, found)
    mbarrier.arrive(c.dq_full.index(w))


@gluon.jit
def begin_to_add(c, w: gl.constexpr, place, parity, found):
    """Begins to add such numbers to sums, when the copy before has been read."""
    if c.HAS_ADDERS:
        hand_over(c, w, parity, found)
    else:
        tma.store_wait(0)
        lay_out(c, w, found)
        barrier()
        tma_add(c.sums, [place * 16, 0], c.dq.index(w))


@gluon.jit
def add_block(c, w: gl.constexpr, dk, dv):
    """Leaves dk and dv to warps that add, 64 columns at a time, in the order of `share_of`."""
    for which in gl.static_range(2):
        found = dk
        if which == 1:
            found = dv
        if c.BLOCK_D == 64:
            hand_over(c, w, (c.visits + 1 + which) & 1, found)
        else:
            halves = found.reshape([c.KEYS, 2, c.BLOCK_D // 2]).permute([0, 2, 1])
            first, second = gl.split(halves)
            hand_over(c, w, (c.visits & 1) ^ 1, first)
            hand_over(c, w, c.visits & 1, second)


@gluon.jit
def store_block(c, w: gl.constexpr, dk, dv):
    """Keys and values make room for their gradients: the first warpgroup stores dk, the other dv.

    TMA clips what is behind the last key and column.
    """
    mbarrier.arrive(c.end.index(0))
    mbarrier.wait(c.end.index(0), 0)  # both have read what is overwritten
    dtype: gl.constexpr = c.k.dtype
    c.k.index(0).slice(w * c.KEYS, c.KEYS, dim=0).store((dk * c.natural).to(dtype))
    c.v.slice(w * c.KEYS, c.KEYS, dim=0).store(dv.to(dtype))
    fence_async_shared()
    mbarrier.arrive(c.end.index(1))
    mbarrier.wait(c.end.index(1), 0)  # both have written
    place = corner(c, c.batch, c.key_head, c.start_k, c.first_key, c.sizes.len_k, 0)
    if w == 0:
        tma_store(c.key_gradient, place, shaped_as(c.k.index(0), c.key_gradient))
    else:
        tma_store(c.value_gradient, place, shaped_as(c.v, c.value_gradient))
    tma.store_wait(0)


@gluon.jit
def gradient_consumer(c, w: gl.constexpr):
    """One warpgroup: 64 keys of the block, and half of each dq."""
    rows: gl.constexpr = c.ROWS
    half: gl.constexpr = c.KEYS
    of_scores: gl.constexpr = c.score_layout
    of_left: gl.constexpr = c.left_layout
    of_rows: gl.constexpr = gl.SliceLayout(0, of_scores)
    dtype: gl.constexpr = c.k.dtype
    # Terms of rows are read behind the wait where that leaves fewer registers in use.
    late: gl.constexpr = c.BLOCK_D == 64
    dk = gl.zeros([half, c.BLOCK_D], gl.float32, c.sum_layout)
    dv = gl.zeros([half, c.BLOCK_D], gl.float32, c.sum_layout)
    dq = gl.zeros([64, 64], gl.float32, c.query_layout)
    v = c.v.slice(w * half, half, dim=0)
    first_k = c.k.index(0).slice(w * half, half, dim=0)
    first_key = c.first_key + w * half
    tile, slot, head = begun(c)
    slot_before = c.first_slot - 1
    mbarrier.wait(c.kv_full.index(0), 0)
    mbarrier.wait(c.q_full.index(0), 0)
    s_async = product(first_k, c.q.index(0).permute([1, 0]), half, rows, of_scores)
    lse = c.r.index(0).slice(0, rows).load(of_rows)
    mbarrier.wait(c.kv_full.index(1), 0)
    s = warpgroup_mma_wait(0, deps=[s_async])
    p = weights_of(c, w, s, lse, slope_of(c, head), first_key, tile * rows)
    p = hide_at_edges(c, p, first_key, tile * rows)
    p = kept_ahead(c, w, p, 0)
    for visit in range(c.visits):
        # No product is in flight here: across the back edge the assembler would serialise all.
        stage = visit & 1
        q = c.q.index(stage)
        o = c.o.index(stage)
        ds_all = c.ds.index(stage)
        # 0, which the compiler is not to know where it would keep what describes keys, and spill
        # other registers. Where nothing else needs them it takes 1 % to work it out anew.
        all_k = c.k.index(0 if c.KEEPS_KEYS else visit & c.zero)
        k = all_k.slice(w * half, half, dim=0)
        if rows == 64:
            all_k = all_k.slice(w * 64, 64, dim=1)
        if visit > 0:
            begin_to_add(c, w, slot_before * 2 + w, stage, dq)
        mbarrier.wait(c.o_full.index(stage), (visit >> 1) & 1)
        dp_async = product(v, o.permute([1, 0]), half, rows, of_scores)
        dv_async = warpgroup_mma(gl.convert_layout(p.to(dtype), of_left), o, dv, is_async=True)
        if not late:
            delta = c.r.index(stage).slice(rows, rows).load(of_rows)
        dp = warpgroup_mma_wait(1, deps=[dp_async])
        if late:
            delta = c.r.index(stage).slice(rows, rows).load(of_rows)
        ds = p * (dp - gl.expand_dims(delta, 0))
        if c.HAS_SOFTCAP:
            ds = ds * c.caps.index(w).load(of_scores).to(gl.float32)
        ds = ds.to(dtype)
        ds_all.slice(w * half, half, dim=0).store(ds)  # dq needs those of both warpgroups
        fence_async_shared()
        mbarrier.arrive(c.ds_full.index(stage))
        dk_async = warpgroup_mma(gl.convert_layout(ds, of_left), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv_async])
        mbarrier.wait(c.q_full.index(stage ^ 1), ((visit + 1) >> 1) & 1)
        s_async = product(k, c.q.index(stage ^ 1).permute([1, 0]), half, rows, of_scores)
        if rows != 64:
            ds_all = ds_all.slice(w * 64, 64, dim=1)
        mbarrier.wait(c.ds_full.index(stage), (visit >> 1) & 1)
        dq_async = product(ds_all.permute([1, 0]), all_k, 64, 64, c.query_layout)
        if not late:
            lse = c.r.index(stage ^ 1).slice(0, rows).load(of_rows)
        s, dk = warpgroup_mma_wait(1, deps=[s_async, dk_async])
        if late:
            lse = c.r.index(stage ^ 1).slice(0, rows).load(of_rows)
        mbarrier.arrive(c.q_empty.index(stage))
        slot_before = slot + 0
        tile, slot, head = next_tile(c, tile, slot, head)
        if not c.IS_GROUPED:
            # Numbers that need not stay in registers; a tile by its step would take more of them.
            slot_before = c.first_slot + visit
            if not c.IS_ORDERED:
                tile = c.first_tile + visit + 1
        p = weights_of(c, w, s, lse, slope_of(c, head), first_key, tile * rows)
        p = hide_ahead(c, w, p, first_key, tile * rows)
        p = kept_ahead(c, w, p, stage ^ 1)
        # With weights among what is waited for, a part of the exponentials stays before the wait.
        dq, p = warpgroup_mma_wait(0, deps=[dq_async, p])
    if c.IS_PACKED:
        if c.visits > 0:
            begin_to_add(c, w, slot_before * 2 + w, c.visits & 1, dq)
    else:
        begin_to_add(c, w, slot_before * 2 + w, c.visits & 1, dq)
    if c.HEADS_APART:
        add_block(c, w, dk, dv)
    else:
        store_block(c, w, dk, dv)


@gluon.jit
def backward(
    query, key, value, upstream, row_terms, key_gradient, value_gradient, sums, words, slopes,
    turns, scale, natural, cap, len_q, len_k, offset, left, right, num_heads, group_size,
    key_blocks, tiles_per_head, slopes_stride, key_heads, heads_together, ascending_heads,
    ascending_together, zero, num_sequences, starts_q, starts_k, of_batch, of_head, counts, indices,
    before, list_width, list_stride_b,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    IS_GROUPED: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_LEFT: gl.constexpr,
    IS_RAGGED: gl.constexpr, IS_ALIGNED: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    FAST_TANH: gl.constexpr, HAS_ALIBI: gl.constexpr, IS_ORDERED: gl.constexpr,
    IS_PACKED: gl.constexpr, TO_END: gl.constexpr, HAS_MASK: gl.constexpr, HAS_LISTS: gl.constexpr,
    HEADS_APART: gl.constexpr, HAS_ADDERS: gl.constexpr, GOES_BOTH_WAYS: gl.constexpr,
):  # fmt: skip
    """Stages and barriers made ready, then one producer warp beside two consumer warpgroups.

    Args, beyond those of the forward kernel:
        row_terms: fp32, per tile of rows BLOCK_M log-sum-exps in units of log 2, inf of rows that
            see nothing, then BLOCK_M sums of products of output and gradient.
        sums: fp32 [2 * tiles * 16, 256], zeros unless IS_ORDERED: of gradients of queries in the
            order of `lay_out`; behind them where HEADS_APART those of keys and values, block by
            block.
        words: where HAS_MASK, its packed tiles with keys in lines: int32 [B or 1, Hq or 1, tiles of
            keys, tiles of rows x 128].
        of_batch: 1 where sequences have masks of their own, else 0.
        of_head: the same of heads.
        counts: where HAS_LISTS, how many tiles of rows each block of keys is seen by.
        indices: their numbers.
        before: where IS_ORDERED too, int32 [B or 1, blocks of keys, tiles of rows]: the last block
            before this one that visits a tile, counted from 1; 0 where there is none.
        turns: int32, zeros, where IS_ORDERED: for both halves of the sums of each tile of rows the
            block of keys whose turn it is to add to them, and for those of keys the head.
        natural: factor of the gradient of keys.
        key_blocks: of a head; of packed sequences, those of `places.sequence_of`, as are the tiles.
        key_heads: of all sequences; where HEADS_APART all heads.
        heads_together: of those worked on at a time.
        ascending_heads: where GOES_BOTH_WAYS, how many heads ascend.
        ascending_together: of those that are worked on at a time.
        zero: 0, which the compiler is not to know.
    """
    dtype: gl.constexpr = query.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    q = gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_D], q_layout)
    o = gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_D], q_layout)
    r = gl.allocate_shared_memory(gl.float32, [2, 2 * BLOCK_M], row_terms.layout)
    k = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_D], k_layout)
    v = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], k_layout)
    dq = gl.allocate_shared_memory(gl.float32, [2, 16, 256], sums.layout)
    ds = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], ds_layout)
    # Without a softcap there is no such place: what stands for it is never touched.
    caps = ds
    if HAS_SOFTCAP:
        caps = gl.allocate_shared_memory(dtype, [2, BLOCK_N // 2, BLOCK_M], ds_layout)
    # Nor without a mask, whose words are two copies more.
    m = r
    q_full = two_barriers(4 if HAS_MASK else 2)
    if HAS_MASK:
        m = gl.allocate_shared_memory(words.dtype, [4, 2 * BLOCK_M], row_terms.layout)
    else:
        words = query
    o_full = two_barriers(1)
    q_empty = two_barriers(2)
    kv_full = two_barriers(1)
    ds_full = two_barriers(2)
    # Without warps that add, what stands for their barriers is never touched.
    dq_full = ds_full
    dq_empty = ds_full
    if HAS_ADDERS:
        dq_full = two_barriers(1)
        dq_empty = two_barriers(1)
    # Heads apart add what they found: nobody stores, nor waits before.
    end = ds_full
    if not HEADS_APART:
        end = two_barriers(2)
    fence_async_shared()
    head, block, ascends = head_and_block(
        key_blocks, key_heads, heads_together, ascending_heads, ascending_together, GOES_BOTH_WAYS
    )
    kv_heads = num_heads // group_size
    batch = head // kv_heads
    key_head = head - batch * kv_heads
    first_head = key_head * group_size
    heads_before = gl.to_tensor(0)
    key_sums = gl.to_tensor(0)
    if HEADS_APART:
        batch = head // num_heads
        first_head = head - batch * num_heads
        key_head = first_head // group_size
        heads_before = first_head - key_head * group_size
        # A share of sums is 16 lines, 64 x 64 numbers.
        shares: gl.constexpr = BLOCK_D // 32
        key_sums = gl.num_programs(0) // key_blocks * tiles_per_head * 2
        key_sums += (head // group_size * key_blocks + block) * (2 * shares)
    sizes = Sizes(len_q, len_k, offset, left, right)
    first_key = block * BLOCK_N
    start_q = gl.to_tensor(0)
    start_k = gl.to_tensor(0)
    first_tile = gl.to_tensor(0)
    if IS_PACKED:
        start_q, own_q, start_k, own_k, first_tile, first_key = packed_keys(
            block, starts_q, starts_k, num_sequences, sizes, ascends, BLOCK_M, BLOCK_N, IS_ORDERED,
            GOES_BOTH_WAYS,
        )  # fmt: skip
        if TO_END:
            offset = own_k - own_q
        sizes = Sizes(own_q, own_k, offset, left, right)
        block = first_key // BLOCK_N
    first, behind = row_tiles(sizes, first_key, BLOCK_M, BLOCK_N, HAS_RIGHT, HAS_LEFT)
    if HAS_LISTS:
        number = batch * list_stride_b + block
        first, behind = listed_range(counts + number, indices, number, list_width, first, behind)
        before += number.to(gl.int64) * list_width
    visits = behind - first
    skipped = tiles_per_head - visits
    begin = first
    shared_edge = gl.to_tensor(0)
    step = gl.to_tensor(1)
    if IS_ORDERED:
        if GOES_BOTH_WAYS:
            after, _ = row_tiles(sizes, first_key + BLOCK_N, BLOCK_M, BLOCK_N, HAS_RIGHT, HAS_LEFT)
            shared_edge = gl.where(ascends, after, 0)
            last_block = gl.cdiv(sizes.len_k, BLOCK_N) - 1
            block = gl.where(ascends, last_block - block, block)
            step = gl.where(ascends, 1, -1)
            begin = gl.where(ascends, first, behind - 1)
        else:
            begin = behind - 1
            if not HAS_LISTS:
                last_key = gl.maximum(block - 1, 0) * BLOCK_N
                _, ended = row_tiles(sizes, last_key, BLOCK_M, BLOCK_N, HAS_RIGHT, HAS_LEFT)
                shared_edge = gl.where(block > 0, ended, 0)
        skipped = (group_size - 1) * tiles_per_head + 1
    first_slot = (batch * num_heads + first_head) * tiles_per_head + first_tile + begin
    if IS_PACKED:
        visits = gl.where(first_key < sizes.len_k, visits, 0)
    if IS_GROUPED:
        visits = visits * group_size
    c = Backward(
        query, key, value, upstream, row_terms, key_gradient, value_gradient, sums, words, of_batch,
        of_head, slopes + batch * slopes_stride, turns, before, scale, natural, cap, zero, sizes,
        batch, key_head, first_head, first_head + group_size - 1, start_q, start_k, heads_before,
        key_sums, block, first_key, begin, behind, first_slot, shared_edge, step, skipped,
        tiles_per_head, visits, q, o, r, k, v, ds, caps, dq, m, q_full, o_full, q_empty, kv_full,
        ds_full, dq_full, dq_empty, end, BLOCK_M, BLOCK_N, BLOCK_D, IS_GROUPED, HAS_RIGHT, HAS_LEFT,
        IS_RAGGED, IS_ALIGNED, HAS_SOFTCAP, FAST_TANH, HAS_ALIBI, IS_ORDERED, IS_PACKED, HAS_MASK,
        HAS_LISTS, HEADS_APART, HAS_ADDERS, GOES_BOTH_WAYS,
    )  # fmt: skip
    if HAS_ADDERS:
        gl.warp_specialize(
            [
                (gradient_consumer, (c, 0)),
                (gradient_consumer, (c, 1)),
                (gradient_producer, (c,)),
                (gradient_adder, (c, 0)),
                (gradient_adder, (c, 1)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [(gradient_consumer, (c, 0)), (gradient_consumer, (c, 1)), (gradient_producer, (c,))],
            [4, 1],
            [240, 24],
        )
