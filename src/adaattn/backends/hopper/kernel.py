"""Exact attention forward for Hopper: one producer and two or three consumer warpgroups.

    s = scale * q k^T;  p = exp(s - m);  out = (sum p v) / sum p;  lse = m + log(sum p)

A persistent block walks a list of tiles of 64 rows a warpgroup. The producer copies keys and
values into rings of stages; a consumer issues the product of the next scores, then that of the
weights before them, and computes the softmax behind both, in turns with the other consumers
where that pays (as in FlashAttention-3, arXiv 2407.08608). Blocks of keys are visited from the last
to the first. Scores are in units of log 2.

Two references of the exponentials: the running maximum, always right, and a fixed one: the
maximum of the first block visited. Weights and their sums have exponents of 8 bits, so that the
second loses nothing until a later score exceeds it by 2^100; such tiles are noted, and the block
computes them again with the running maximum once its list is done.

Packed sequences: a tile has rows of one sequence, whose bounds are read on the device. TMA fills
rows behind its end with zeros and stores none of them, so that nothing of a neighbour is read but
queries whose rows are dropped. Lists of blocks: the listed blocks of keys are visited, which are
the same for all warpgroups of a tile; a tile that sees none visits one, hidden.

Where a bound of what lists leave out is asked for, a last pass takes the scores of those blocks
(`adaattn.backends.hopper.dropped`).

Heads may have windows, scales and softcaps of their own: their tiles read those on the device.

Layouts: q, k, v, out are [B, H, S, D] in any order of strides; row outputs are [B, Hq, Sq].
"""

# Device code: a tile's shape stands above it, and the names of sizes are those of the papers.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from adaattn.backends.device.barriers import sum_in_thread, wait_for_writes
from adaattn.backends.device.gluon import barrier
from adaattn.backends.device.stages import advance
from adaattn.backends.hopper.dropped import bound_tiles
from adaattn.backends.hopper.mask_bits import BITS
from adaattn.backends.hopper.pipeline import (
    Call,
    Lists,
    Packing,
    arrive,
    arrive_late,
    pass_mask,
    pass_turn,
    producer,
    read_mask,
    score_product,
    take_turn,
    wait_for_mask,
)
from adaattn.backends.hopper.places import (
    flag_place,
    is_wanted,
    key_blocks,
    listed_block,
    no_tile,
    num_tiles_to_do,
    number_of,
    own_tile,
    row_of,
    sizes_of,
    starts_of,
)
from adaattn.backends.hopper.results import finish_tile
from adaattn.backends.hopper.scores import (
    ADDITIVE,
    BOOLEAN,
    NOTHING,
    Sizes,
    Terms,
    hide,
    load_mask,
    modify,
    terms_of,
)

# Of a fixed one beside an additive mask: keys that finite numbers hide must not be what others are
# held to.
LEAST_REFERENCE = gl.constexpr(-60.0)


@gluon.jit
def moment_of(c, p, t, HIDES: gl.constexpr):
    """The sum of p t that the entropy needs; hidden scores are -inf, and their p is 0."""
    if HIDES or c.terms.MASK != 0:
        t = gl.maximum(t, -16384.0)
    return sum_in_thread(p * t)


@gluon.jit
def held_to(x, t, factor, base, FIXED: gl.constexpr):
    """Exponents of scores: times a factor, less the reference of their rows.

    That is one instruction which does not round the product, as it was for the reference: beside
    numbers of -1e10 that a mask adds before the factor, they could be above 0 by hundreds.
    """
    t = t * factor - gl.expand_dims(base, 1)
    if x.MASK == ADDITIVE and not x.IS_MODIFIED and not FIXED:
        t = gl.minimum(t, 0.0)
    return t


@gluon.jit
def key_step(
    c, sizes, s, first_row, block, row_terms, mask, accumulator_scale, row_sum, moment, reference,
    MASK: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Weights of one more block of keys, and the row's numbers with them."""
    x = c.terms
    t = modify(x, sizes, s, first_row, block, row_terms, mask, c.BLOCK_N)
    if MASK:
        t = hide(x, sizes, t, first_row, block, c.BLOCK_N)
    factor = 1.0 if x.IS_MODIFIED else x.scale
    base = reference
    if not FIXED:
        largest = gl.maximum(reference, gl.max(t, 1) * factor)
        base = largest
        if x.MAY_HIDE:
            base = gl.where(largest == NOTHING, 0.0, largest)
        shift = reference - base
        if x.MAY_HIDE:
            shift = gl.where(reference == NOTHING, 0.0, shift)
        accumulator_scale = gl.exp2(shift)
        reference = largest
        of_sums: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
        scale_sums = gl.expand_dims(gl.convert_layout(accumulator_scale, of_sums), 1)
        if c.HAS_ENTROPY:
            shift_sums = gl.expand_dims(gl.convert_layout(shift, of_sums), 1)
            moment = (moment + shift_sums * row_sum) * scale_sums
        row_sum = row_sum * scale_sums
    t = held_to(x, t, factor, base, FIXED)
    p = gl.exp2(t)
    row_sum = row_sum + sum_in_thread(p)
    if c.HAS_ENTROPY:
        moment = moment + moment_of(c, p, t, MASK)
    weights = gl.convert_layout(p.to(c.query.dtype), c.weight_layout)
    return weights, accumulator_scale, row_sum, moment, reference


@gluon.jit
def attend_blocks(
    c, w: gl.constexpr, tile, sizes, q, q_place, first_row, last_block, row_terms, begin, end,
    count, weights, accumulator, row_sum, moment, reference,
    stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
    MASK: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Visits ``begin`` to ``end`` of a tile's ``count``: scores of one, values of that before."""
    if c.LIST_RATIO:
        next_block = listed_block(c, tile, begin)
    if c.terms.MASK == BITS:
        next_mask = load_mask(
            c.terms, sizes, row_terms, first_row, next_block, c.BLOCK_N, c.score_layout, False
        )
    for i in range(begin, end):
        block = last_block - i
        if c.LIST_RATIO:
            block = next_block
            next_block = listed_block(c, tile, i + 1)
        mbarrier.wait(c.k_full.index(stage_k), phase_k)
        take_turn(c, w)
        s_async = score_product(c, q, stage_k)
        mbarrier.wait(c.v_full.index(held_v), held_phase)
        sum_async = warpgroup_mma(weights, c.v.index(held_v), accumulator, is_async=True)
        pass_turn(c, w)
        if c.terms.MASK == BITS:
            # A block ahead: a word from memory takes longer than the product.
            mask = next_mask
            next_mask = load_mask(
                c.terms, sizes, row_terms, first_row, next_block, c.BLOCK_N, c.score_layout, False
            )
        else:
            mask = load_mask(
                c.terms, sizes, row_terms, first_row, block, c.BLOCK_N, c.score_layout, False
            )
            mask = read_mask(c, w, mask, stage_k, phase_k)
        s = warpgroup_mma_wait(1, deps=[s_async])
        if not c.LATE:
            arrive(c, stage_k)
        if c.STAGES_Q == 1:
            if i + 1 == count:
                mbarrier.arrive(c.q_empty.index(q_place))
        scale = reference
        weights, scale, row_sum, moment, reference = key_step(
            c, sizes, s, first_row, block, row_terms, mask, scale, row_sum, moment, reference,
            MASK, FIXED,
        )  # fmt: skip
        if c.LATE:
            arrive_late(c, stage_k, row_sum)
        accumulator = warpgroup_mma_wait(0, deps=[sum_async])
        arrive(c, c.STAGES_K + held_v)
        held_v = stage_v
        held_phase = phase_v
        stage_v, phase_v = advance(stage_v, phase_v, c.STAGES_V)
        stage_k, phase_k = advance(stage_k, phase_k, c.STAGES_K)
        if not FIXED:
            of_out: gl.constexpr = gl.SliceLayout(1, c.out_layout)
            accumulator = accumulator * gl.expand_dims(gl.convert_layout(scale, of_out), 1)
    return (
        weights, accumulator, row_sum, moment, reference,
        stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
    )  # fmt: skip


@gluon.jit
def skip_blocks(c, w: gl.constexpr, count, stage_k, phase_k, stage_v, phase_v):
    """Frees stages that other warpgroups need and this one does not, and passes its turns."""
    for _ in range(count):
        take_turn(c, w)
        pass_turn(c, w)
        mbarrier.wait(c.k_full.index(stage_k), phase_k)
        arrive(c, stage_k)
        mbarrier.wait(c.v_full.index(stage_v), phase_v)
        arrive(c, c.STAGES_K + stage_v)
        if c.terms.MASK_IS_STAGED:
            pass_mask(c, wait_for_mask(c, w, stage_k, phase_k), "arrive")
        stage_k, phase_k = advance(stage_k, phase_k, c.STAGES_K)
        stage_v, phase_v = advance(stage_v, phase_v, c.STAGES_V)
    return stage_k, phase_k, stage_v, phase_v


@gluon.jit
def attend_tile(
    c, w: gl.constexpr, tile, slot, tile_before, slot_before, visits,
    weights, accumulator, row_sum, moment, reference,
    stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
    FIXED: gl.constexpr, REPAIR: gl.constexpr,
):  # fmt: skip
    """One tile. The last product of the tile before is issued with the first one of this."""
    x = c.terms
    has_before = number_of(c, tile_before) >= 0
    # Three warpgroups have 160 registers each: there the tile before ends ahead of the softmax.
    early: gl.constexpr = c.NUM_WARPGROUPS == 3
    tile_row = row_of(c, tile)
    first_row = tile_row + w * 64
    sizes = sizes_of(c, tile)
    start, end = key_blocks(c, sizes, tile_row, c.BLOCK_M)
    behind = 0
    if (x.HAS_RIGHT or x.HAS_LEFT) and not c.LIST_RATIO:
        own_start, own_end = key_blocks(c, sizes, first_row, 64)
        own_end = gl.minimum(gl.maximum(own_end, start + 1), end)
        own_start = gl.minimum(own_start, own_end - 1)
        stage_k, phase_k, stage_v, phase_v = skip_blocks(
            c, w, end - own_end, stage_k, phase_k, stage_v, phase_v
        )
        behind = own_start - start
        start = own_start
        end = own_end
    count = end - start
    first_block = end - 1
    if c.LIST_RATIO:
        count = tile.end - tile.begin
        first_block = listed_block(c, tile, 0)
    q_place = (visits % c.STAGES_Q) * c.NUM_WARPGROUPS + w
    q = c.q.index(q_place)
    start_q, start_k = starts_of(c, tile)
    row_terms = terms_of(x, number_of(c, tile) >> c.tile_bits, c.num_heads, start_q, start_k)
    mbarrier.wait(c.q_full.index(q_place), (visits // c.STAGES_Q) & 1)
    mbarrier.wait(c.k_full.index(stage_k), phase_k)
    take_turn(c, w)
    s_async = score_product(c, q, stage_k)
    if has_before:
        mbarrier.wait(c.v_full.index(held_v), held_phase)
    sum_async = warpgroup_mma(weights, c.v.index(held_v), accumulator, is_async=True)
    pass_turn(c, w)
    mask = load_mask(
        x, sizes, row_terms, first_row, first_block, c.BLOCK_N, c.score_layout,
        x.IS_RAGGED or x.HAS_LEFT,
    )  # fmt: skip
    mask = read_mask(c, w, mask, stage_k, phase_k)
    if early:
        s, accumulator = warpgroup_mma_wait(0, deps=[s_async, sum_async])
        arrive(c, stage_k)
        if has_before:
            arrive(c, c.STAGES_K + held_v)
        finish_tile(
            c, w, tile_before, slot_before, accumulator, row_sum, moment, reference,
            FIXED and not REPAIR,
        )  # fmt: skip
    else:
        s = warpgroup_mma_wait(1, deps=[s_async])
    t = modify(x, sizes, s, first_row, first_block, row_terms, mask, c.BLOCK_N)
    if x.HAS_RIGHT or x.HAS_LEFT or x.IS_RAGGED:
        t = hide(x, sizes, t, first_row, first_block, c.BLOCK_N)
    factor = 1.0 if x.IS_MODIFIED else x.scale
    largest = gl.max(t, 1) * factor
    base = largest
    if x.MAY_HIDE:
        base = gl.where(largest == NOTHING, 0.0, largest)
    if FIXED and not REPAIR and x.MASK == ADDITIVE:
        base = gl.maximum(base, LEAST_REFERENCE)
    t = held_to(x, t, factor, base, FIXED and not REPAIR)
    p = gl.exp2(t)
    new_sum = sum_in_thread(p)
    new_moment = moment
    if c.HAS_ENTROPY:
        new_moment = moment_of(c, p, t, True)
    if not early:
        arrive_late(c, stage_k, new_sum)
        accumulator = warpgroup_mma_wait(0, deps=[sum_async])
        if has_before:
            arrive(c, c.STAGES_K + held_v)
        finish_tile(
            c, w, tile_before, slot_before, accumulator, row_sum, moment, reference,
            FIXED and not REPAIR,
        )  # fmt: skip
    reference = base if FIXED and not REPAIR else largest
    row_sum = new_sum
    moment = new_moment
    weights = gl.convert_layout(p.to(c.query.dtype), c.weight_layout)
    accumulator = gl.zeros([64, c.BLOCK_V], gl.float32, c.out_layout)
    held_v = stage_v
    held_phase = phase_v
    stage_v, phase_v = advance(stage_v, phase_v, c.STAGES_V)
    stage_k, phase_k = advance(stage_k, phase_k, c.STAGES_K)
    if c.STAGES_Q == 1:
        if count == 1:
            mbarrier.arrive(c.q_empty.index(q_place))
    # Blocks at either edge hide keys from some rows; those between them need no mask.
    masked_end = gl.to_tensor(1)
    plain_end = count
    if x.HAS_UNALIGNED_RIGHT:
        plain = gl.maximum(first_row + sizes.offset + sizes.right + 1, 0) // c.BLOCK_N
        masked_end = gl.minimum(gl.maximum(end - plain, 1), count)
    if x.HAS_LEFT:
        last_row = gl.minimum(first_row + 64, sizes.len_q) - 1
        hidden = gl.cdiv(gl.maximum(last_row + sizes.offset - sizes.left, 0), c.BLOCK_N)
        plain_end = gl.maximum(count - gl.maximum(hidden - start, 0), masked_end)
    if REPAIR:
        masked_end = count
    if x.HAS_UNALIGNED_RIGHT or REPAIR:
        (
            weights, accumulator, row_sum, moment, reference,
            stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
        ) = attend_blocks(
            c, w, tile, sizes, q, q_place, first_row, end - 1, row_terms, 1, masked_end, count,
            weights, accumulator, row_sum, moment, reference,
            stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
            x.HAS_RIGHT or x.HAS_LEFT, FIXED and not REPAIR,
        )  # fmt: skip
    if not REPAIR:
        (
            weights, accumulator, row_sum, moment, reference,
            stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
        ) = attend_blocks(
            c, w, tile, sizes, q, q_place, first_row, end - 1, row_terms, masked_end, plain_end,
            count, weights, accumulator, row_sum, moment, reference,
            stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
            False, FIXED,
        )  # fmt: skip
        if x.HAS_LEFT:
            (
                weights, accumulator, row_sum, moment, reference,
                stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
            ) = attend_blocks(
                c, w, tile, sizes, q, q_place, first_row, end - 1, row_terms, plain_end, count,
                count, weights, accumulator, row_sum, moment, reference,
                stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
                True, FIXED,
            )  # fmt: skip
    if c.STAGES_Q == 2:
        mbarrier.arrive(c.q_empty.index(q_place))
    if x.HAS_LEFT and not c.LIST_RATIO:
        stage_k, phase_k, stage_v, phase_v = skip_blocks(
            c, w, behind, stage_k, phase_k, stage_v, phase_v
        )
    return (
        tile, slot, visits + 1, weights, accumulator, row_sum, moment, reference,
        stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
    )  # fmt: skip


@gluon.jit
def attend_tiles(
    c, w: gl.constexpr, visits, stage_k, phase_k, stage_v, phase_v,
    FIXED: gl.constexpr, REPAIR: gl.constexpr,
):  # fmt: skip
    """All tiles of this block's list, or those that the first pass noted."""
    zeros = gl.zeros([64, c.BLOCK_N], gl.float32, c.score_layout)
    weights = gl.convert_layout(zeros.to(c.query.dtype), c.weight_layout)
    row_sum = sum_in_thread(zeros)
    moment = sum_in_thread(zeros)
    reference = gl.zeros([64], gl.float32, gl.SliceLayout(1, c.score_layout))
    accumulator = gl.zeros([64, c.BLOCK_V], gl.float32, c.out_layout)
    held_v = 0
    held_phase = 0
    tile_before = no_tile(c)
    slot_before = 0
    count = num_tiles_to_do(c, REPAIR)
    next_tile = own_tile(c, 0)
    for slot in range(count):
        tile = next_tile
        next_tile = own_tile(c, gl.minimum(slot + 1, count - 1))
        if is_wanted(c, tile, slot, REPAIR):
            (
                tile_before, slot_before, visits, weights, accumulator, row_sum, moment, reference,
                stage_k, phase_k, stage_v, phase_v, held_v, held_phase,
            ) = attend_tile(
                c, w, tile, slot, tile_before, slot_before, visits,
                weights, accumulator, row_sum, moment, reference,
                stage_k, phase_k, stage_v, phase_v, held_v, held_phase, FIXED, REPAIR,
            )  # fmt: skip
    if number_of(c, tile_before) >= 0:
        mbarrier.wait(c.v_full.index(held_v), held_phase)
        sum_async = warpgroup_mma(weights, c.v.index(held_v), accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(0, deps=[sum_async])
        arrive(c, c.STAGES_K + held_v)
        finish_tile(
            c, w, tile_before, slot_before, accumulator, row_sum, moment, reference,
            FIXED and not REPAIR,
        )  # fmt: skip
    return visits, stage_k, phase_k, stage_v, phase_v


@gluon.jit
def consumer(c, w: gl.constexpr, FIXED: gl.constexpr):
    """One consumer warpgroup: both passes, and that over blocks that are not listed."""
    zero = gl.to_tensor(0)
    # The first turn is the first warpgroup's, where each pass over tiles leaves it again.
    if w == c.NUM_WARPGROUPS - 1:
        pass_turn(c, w)
    visits, stage_k, phase_k, stage_v, phase_v = attend_tiles(
        c, w, zero, zero, zero, zero, zero, FIXED, False
    )
    if FIXED:
        # What is stored again must come behind what was stored before.
        wait_for_writes()
        mbarrier.arrive(c.done)
        mbarrier.wait(c.done, 0)
        visits, stage_k, phase_k, _, _ = attend_tiles(
            c, w, visits, stage_k, phase_k, stage_v, phase_v, FIXED, True
        )
    if c.HAS_DROPPED:
        bound_tiles(c, w, visits, stage_k, phase_k)
    tma.store_wait(0)


@gluon.jit
def forward(
    query, key, value, out, staged, lse, row_max, entropy, tiles, flags, mask, sinks, slopes,
    scale, cap,
    len_q, len_k, num_tiles, tiles_per_head, tile_bits, tiles_per_block, num_heads, group_size,
    offset, left, right, slopes_stride, mask_stride_b, mask_stride_h, mask_stride_m, mask_stride_n,
    starts_q, starts_k, counts, indices, sees, num_sequences, list_stride_b, list_stride_h,
    list_rows, list_width, list_most, list_blocks, head_scales, head_windows, head_softcaps,
    dropped,
    NUM_WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_V: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, STAGES_Q: gl.constexpr,
    STAGES_M: gl.constexpr, OUT_PARTS: gl.constexpr, LATE: gl.constexpr, IN_TURNS: gl.constexpr,
    FIXED: gl.constexpr, HAS_TILES: gl.constexpr, IS_PACKED: gl.constexpr, TO_END: gl.constexpr,
    LIST_RATIO: gl.constexpr, HAS_LSE: gl.constexpr, HAS_ROW_MAX: gl.constexpr,
    HAS_ENTROPY: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_UNALIGNED_RIGHT: gl.constexpr, HAS_LEFT: gl.constexpr,
    IS_RAGGED: gl.constexpr, MAY_HIDE: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    FAST_TANH: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_ALIBI: gl.constexpr, MASK: gl.constexpr,
    MASK_HAS_ROWS: gl.constexpr, MASK_IS_DENSE: gl.constexpr, MASK_IS_FIRST: gl.constexpr,
    HAS_HEAD_SCALES: gl.constexpr, HAS_HEAD_WINDOWS: gl.constexpr,
    HAS_HEAD_SOFTCAPS: gl.constexpr, HAS_DROPPED: gl.constexpr,
):  # fmt: skip
    """Stages, barriers and flags made ready, then one producer beside the consumers."""
    dtype: gl.constexpr = query.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_D], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_V], dtype)
    part: gl.constexpr = BLOCK_V // OUT_PARTS
    o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, part], dtype)
    places: gl.constexpr = STAGES_Q * NUM_WARPGROUPS
    single: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(dtype, [places, 64, BLOCK_D], q_layout)
    k = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, BLOCK_D], k_layout)
    v = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, BLOCK_V], v_layout)
    o = gl.allocate_shared_memory(dtype, [NUM_WARPGROUPS, 64, part], o_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [places, 1], single)
    q_empty = gl.allocate_shared_memory(gl.int64, [places, 1], single)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], single)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], single)
    # Without a second pass nobody waits for the end of the first.
    done = k_full
    if FIXED:
        done = gl.allocate_shared_memory(gl.int64, [1], single)
        mbarrier.init(done, count=NUM_WARPGROUPS)
    # A mask that is not staged has no place: what stands for it is never touched.
    source = query
    m = q
    m_full = q_full
    if STAGES_M > 0:
        source = staged
        columns: gl.constexpr = BLOCK_N // 2 if MASK == BOOLEAN else BLOCK_N
        m_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, columns], staged.dtype)
        of_mask: gl.constexpr = NUM_WARPGROUPS * STAGES_M
        m = gl.allocate_shared_memory(staged.dtype, [of_mask, 64, columns], m_layout)
        m_full = gl.allocate_shared_memory(gl.int64, [of_mask, 1], single)
        for i in gl.static_range(of_mask):
            mbarrier.init(m_full.index(i), count=1)
    for i in gl.static_range(places):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES_K):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    x = Terms(
        scale, cap, sinks, slopes, slopes_stride, mask, mask_stride_b, mask_stride_h,
        mask_stride_m, mask_stride_n, head_scales, head_windows, head_softcaps, HAS_RIGHT,
        HAS_UNALIGNED_RIGHT, HAS_LEFT, IS_RAGGED, MAY_HIDE, HAS_SOFTCAP, FAST_TANH, HAS_SINKS,
        HAS_ALIBI, MASK, MASK_HAS_ROWS, MASK_IS_DENSE, MASK_IS_FIRST, STAGES_M > 0,
        HAS_HEAD_SCALES, HAS_HEAD_WINDOWS, HAS_HEAD_SOFTCAPS,
    )  # fmt: skip
    packing = Packing(starts_q, starts_k, num_sequences)
    lists = Lists(
        counts, indices, sees, list_stride_b, list_stride_h, list_rows, list_width, list_most,
        list_blocks,
    )  # fmt: skip
    c = Call(
        query, key, value, out, source, lse, row_max, entropy, tiles, flags, x,
        Sizes(len_q, len_k, offset, left, right), packing, lists, num_tiles, tiles_per_head,
        tile_bits, tiles_per_block, num_heads, group_size, q, k, v, o, m, q_full, q_empty, k_full,
        v_full, m_full, done, NUM_WARPGROUPS, BLOCK_N, BLOCK_V, STAGES_K, STAGES_V, STAGES_Q,
        STAGES_M, OUT_PARTS, LATE, IN_TURNS, HAS_TILES, IS_PACKED, TO_END, LIST_RATIO, HAS_LSE,
        HAS_ROW_MAX, HAS_ENTROPY, dropped, HAS_DROPPED,
    )  # fmt: skip
    if FIXED:
        lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        for start in range(0, tiles_per_block + 1, 128):
            inside = start + lanes < tiles_per_block + 1
            gl.store(flag_place(c) + start + lanes, lanes * 0, mask=inside)
    barrier()
    if NUM_WARPGROUPS == 2:
        gl.warp_specialize(
            [(producer, (c, FIXED)), (consumer, (c, 0, FIXED)), (consumer, (c, 1, FIXED))],
            [4, 4],
            [240, 240],
        )
    else:
        gl.warp_specialize(
            [
                (producer, (c, FIXED)),
                (consumer, (c, 0, FIXED)),
                (consumer, (c, 1, FIXED)),
                (consumer, (c, 2, FIXED)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )
