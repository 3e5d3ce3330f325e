"""The gradients of queries alone on the device: 128 query rows of one head.

    p = exp(s - lse);  dp = do v^T;  ds = p (dp - delta);  dq = ds k

Two consumer warpgroups of 64 rows each, whose queries and upstream gradients stay in shared memory;
they loop over the blocks of 64 keys that their rows see, from the last to the first. ds is a left
operand from registers. Keys have two stages, values one: a block of values is in use for the time
of one product, its keys for that of three.

Each issues the product that it sums, then both of the next block, and computes weights while the
second of them runs. Nothing is in flight over the back edge of its loop.
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

from adaattn.backends.device.barriers import FREED_BY, meet, meet_late, sum_in_thread, two_barriers
from adaattn.backends.device.gluon import aggregate, barrier, shaped_as, tma_store
from adaattn.backends.device.stages import copy, mma_layout, product, set_fields
from adaattn.backends.hopper.gradient_masks import (
    Mask,
    base_of,
    kept,
    listed_range,
    load_tile,
    mask_of,
)
from adaattn.backends.hopper.gradient_scores import (
    SPLIT_TILE,
    capped,
    hide_at_edges,
    slope_of,
    weighed,
)
from adaattn.backends.hopper.places import bounds, corner, seen_blocks, sequence_of
from adaattn.backends.hopper.scores import ADDITIVE, Sizes


@aggregate
class BackwardQueries:
    """What every function reads: tensors, sizes, stages with their barriers, choices.

    ``start`` to ``end`` are the blocks of keys that the rows of both warpgroups see. ``row_terms``
    are those of the 64 rows from ``first_row`` on, and behind them those of the next 64.
    """

    query: tma.tensor_descriptor
    key: tma.tensor_descriptor
    value: tma.tensor_descriptor
    upstream: tma.tensor_descriptor
    query_gradient: tma.tensor_descriptor
    row_terms: gl.tensor
    slopes: gl.tensor
    mask: Mask
    scale: gl.tensor
    natural: gl.tensor
    cap: gl.tensor
    zero: gl.tensor
    sizes: Sizes
    batch: gl.tensor
    head: gl.tensor
    last_head: gl.tensor
    key_head: gl.tensor
    start_q: gl.tensor
    start_k: gl.tensor
    first_row: gl.tensor
    start: gl.tensor
    end: gl.tensor
    q: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    KEYS: gl.constexpr
    ROW_AXIS: gl.constexpr
    BLOCK_D: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_LEFT: gl.constexpr
    IS_RAGGED: gl.constexpr
    IS_ALIGNED: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    FAST_TANH: gl.constexpr
    HAS_ALIBI: gl.constexpr
    IS_PACKED: gl.constexpr
    score_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, query, key, value, upstream, query_gradient, row_terms, slopes, mask, scale, natural,
        cap, zero, sizes, batch, head, last_head, key_head, start_q, start_k, first_row, start, end,
        q, o, k, v, q_full, o_full, k_full, v_full, BLOCK_D, HAS_RIGHT, HAS_LEFT, IS_RAGGED,
        IS_ALIGNED, HAS_SOFTCAP, FAST_TANH, HAS_ALIBI, IS_PACKED,
    ):  # fmt: skip
        set_fields(self, locals())
        self.ROWS = gl.constexpr(SPLIT_TILE)
        self.KEYS = gl.constexpr(SPLIT_TILE)
        self.ROW_AXIS = gl.constexpr(0)
        self.score_layout = gl.constexpr(mma_layout(64))


# Named barriers: of the two stages of keys, and of values.
KEY_STAGES = gl.constexpr(0)
VALUE_STAGE = gl.constexpr(2)


@gluon.jit
def queries_producer(c):
    """Copies queries and upstream gradients once, then blocks of keys and of values."""
    for visit in range(c.end - c.start):
        stage = visit & 1
        block = (c.end - 1 - visit) * c.KEYS
        place = corner(c, c.batch, c.key_head, c.start_k, block, c.sizes.len_k, 0)
        if visit > 1:
            meet(KEY_STAGES + stage, "sync", FREED_BY)
        copy(c.key, c.k_full.index(stage), c.k.index(stage), place)
        if visit == 0:
            for w in gl.static_range(2):
                row = c.first_row + w * c.ROWS
                rows = corner(c, c.batch, c.head, c.start_q, row, c.sizes.len_q, 0)
                copy(c.query, c.q_full.index(w), c.q.index(w), rows)
                copy(c.upstream, c.o_full.index(w), c.o.index(w), rows)
        else:
            meet(VALUE_STAGE, "sync", FREED_BY)
        copy(c.value, c.v_full, c.v.index(0), place)


@gluon.jit
def pass_blocks(c, first, last):
    """Frees blocks that the other warpgroup's rows see and this one's do not."""
    for visit in range(first, last):
        mbarrier.wait(c.k_full.index(visit & 1), (visit >> 1) & 1)
        meet(KEY_STAGES + (visit & 1), "arrive", FREED_BY)
        mbarrier.wait(c.v_full, visit & 1)
        meet(VALUE_STAGE, "arrive", FREED_BY)


@gluon.jit
def row_weights(c, s, lse, slope, mask, first_key, first_row, IS_FIRST: gl.constexpr):
    """The weights of a block of keys, times the softcap's derivative.

    Where rows see all keys but those to the right of an edge between blocks, only the first block
    that they visit has hidden keys, or keys that are not there.
    """
    s, tangent = capped(c, s)
    base = base_of(c, lse, mask)
    p = weighed(c, s, base, slope, first_key, first_row, c.mask.KIND == ADDITIVE)
    if c.HAS_SOFTCAP:
        p = p * (1.0 - tangent * tangent)
    if IS_FIRST or not c.IS_ALIGNED:
        p = hide_at_edges(c, p, first_key, first_row)
    return kept(c, p, mask)


@gluon.jit
def query_gradients(c, w: gl.constexpr):
    """One warpgroup: 64 rows."""
    of_rows: gl.constexpr = gl.SliceLayout(1, c.score_layout)
    of_left: gl.constexpr = gl.DotOperandLayout(0, mma_layout(c.BLOCK_D), 2)
    dtype: gl.constexpr = c.q.dtype
    first_row = c.first_row + w * c.ROWS
    start, end = c.start, c.end
    if c.HAS_RIGHT or c.HAS_LEFT:
        start, end = seen_blocks(c.sizes, first_row, c.ROWS, c.KEYS, c.HAS_RIGHT, c.HAS_LEFT)
        end = gl.minimum(gl.maximum(end, c.start + 1), c.end)
        start = gl.minimum(start, end - 1)
    within = gl.arange(0, c.ROWS, layout=of_rows)
    is_row = first_row + within < c.sizes.len_q
    terms = c.row_terms + w * (2 * c.ROWS) + within
    lse = gl.load(terms, mask=is_row, other=0.0)
    delta = gl.expand_dims(gl.load(terms + c.ROWS, mask=is_row, other=0.0), 1)
    slope = slope_of(c, c.head)
    start_of_mask = mask_of(c, c.head)
    dq = gl.zeros([c.ROWS, c.BLOCK_D], gl.float32, mma_layout(c.BLOCK_D))
    q = c.q.index(w)
    o = c.o.index(w)
    # The same behind an index that the compiler does not know: else what describes them to the
    # first products stays in registers throughout the loop, and that of values likewise.
    first_q = c.q.index(w + c.zero)
    first_o = c.o.index(w + c.zero)
    begin = c.end - end
    stop = c.end - start
    pass_blocks(c, 0, begin)
    mbarrier.wait(c.q_full.index(w), 0)
    mbarrier.wait(c.k_full.index(begin & 1), (begin >> 1) & 1)
    k = c.k.index(begin & 1).permute([1, 0])
    s_async = product(first_q, k, c.ROWS, c.KEYS, c.score_layout)
    mbarrier.wait(c.o_full.index(w), 0)
    mbarrier.wait(c.v_full, begin & 1)
    v = c.v.index(0).permute([1, 0])
    dp_async = product(first_o, v, c.ROWS, c.KEYS, c.score_layout)
    key = (end - 1) * c.KEYS
    mask = load_tile(c, start_of_mask, key, first_row, c.IS_RAGGED or c.HAS_LEFT)
    s = warpgroup_mma_wait(1, deps=[s_async])
    p = row_weights(c, s, lse, slope, mask, key, first_row, True)
    dp = warpgroup_mma_wait(0, deps=[dp_async])
    meet(VALUE_STAGE, "arrive", FREED_BY)
    ds = gl.convert_layout((p * (dp - delta)).to(dtype), of_left)
    for visit in range(begin, stop - 1):
        stage = visit & 1
        ahead = visit + 1
        dq_async = warpgroup_mma(ds, c.k.index(stage), dq, is_async=True)
        mbarrier.wait(c.k_full.index(stage ^ 1), (ahead >> 1) & 1)
        k = c.k.index(stage ^ 1).permute([1, 0])
        s_async = product(q, k, c.ROWS, c.KEYS, c.score_layout)
        mbarrier.wait(c.v_full, ahead & 1)
        v = c.v.index(visit & c.zero).permute([1, 0])
        dp_async = product(o, v, c.ROWS, c.KEYS, c.score_layout)
        key = (c.end - 1 - ahead) * c.KEYS
        mask = load_tile(c, start_of_mask, key, first_row, False)
        dq, s = warpgroup_mma_wait(1, deps=[dq_async, s_async])
        p = row_weights(c, s, lse, slope, mask, key, first_row, False)
        # Once weights are there: else the assembler puts them behind the wait for the product.
        sums = sum_in_thread(p)
        if c.HAS_SOFTCAP:
            sums = gl.abs(sums)  # a derivative may be rounded to less than 0
        meet_late(KEY_STAGES + stage, sums, FREED_BY)
        dp = warpgroup_mma_wait(0, deps=[dp_async])
        meet(VALUE_STAGE, "arrive", FREED_BY)
        ds = gl.convert_layout((p * (dp - delta)).to(dtype), of_left)
    last = stop - 1
    dq_async = warpgroup_mma(ds, c.k.index(last & 1), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq_async])
    meet(KEY_STAGES + (last & 1), "arrive", FREED_BY)
    q.store((dq * c.natural).to(dtype))  # queries make room for their gradients
    fence_async_shared()
    barrier()
    place = corner(c, c.batch, c.head, c.start_q, first_row, c.sizes.len_q, 0)
    tma_store(c.query_gradient, place, shaped_as(q, c.query_gradient))
    pass_blocks(c, stop, c.end - c.start)
    tma.store_wait(0)


@gluon.jit
def backward_queries(
    query, key, value, upstream, query_gradient, row_terms, slopes,
    scale, natural, cap, len_q, len_k, offset, left, right, num_heads, group_size, row_blocks,
    tiles_per_head, slopes_stride, num_sequences, zero, starts_q, starts_k, mask, mask_stride_b,
    mask_stride_h, mask_stride_m, mask_stride_n, counts, indices, list_width, list_stride_b,
    BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr, IS_RAGGED: gl.constexpr, IS_ALIGNED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, FAST_TANH: gl.constexpr, HAS_ALIBI: gl.constexpr,
    IS_PACKED: gl.constexpr, TO_END: gl.constexpr, MASK: gl.constexpr,
    MASK_HAS_ROWS: gl.constexpr, MASK_IS_DENSE: gl.constexpr, HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """Stages and barriers made ready, then one producer warp beside two consumer warpgroups.

    The last rows of a head come first: in causal order they take longest.

    Args, beyond those of `backward.backward`:
        row_terms: of tiles of 64 rows.
        row_blocks: blocks of 128 rows of a head; of packed sequences, those of
            `places.sequence_of`.
        tiles_per_head: tiles of 64 rows of it.
    """
    dtype: gl.constexpr = query.dtype
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SPLIT_TILE, BLOCK_D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SPLIT_TILE, BLOCK_V], dtype)
    single: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(dtype, [2, SPLIT_TILE, BLOCK_D], d_layout)
    o = gl.allocate_shared_memory(dtype, [2, SPLIT_TILE, BLOCK_V], v_layout)
    k = gl.allocate_shared_memory(dtype, [2, SPLIT_TILE, BLOCK_D], d_layout)
    v = gl.allocate_shared_memory(dtype, [1, SPLIT_TILE, BLOCK_V], v_layout)
    q_full = two_barriers(1)
    o_full = two_barriers(1)
    k_full = two_barriers(1)
    v_full = gl.allocate_shared_memory(gl.int64, [1], single)
    mbarrier.init(v_full, count=1)
    fence_async_shared()
    head = gl.program_id(0) // row_blocks
    block = (head + 1) * row_blocks - 1 - gl.program_id(0)
    batch = head // num_heads
    head = head - batch * num_heads
    sizes = Sizes(len_q, len_k, offset, left, right)
    first_row = block * (2 * SPLIT_TILE)
    start_q = gl.to_tensor(0)
    start_k = gl.to_tensor(0)
    first_tile = gl.to_tensor(0)
    if IS_PACKED:
        sequence, first_row = sequence_of(block, starts_q, num_sequences, 2 * SPLIT_TILE)
        start_q, own_q = bounds(starts_q + sequence, len_q)
        start_k, own_k = bounds(starts_k + sequence, len_k)
        if TO_END:
            offset = own_k - own_q
        sizes = Sizes(own_q, own_k, offset, left, right)
        first_row = gl.where(first_row < 0, own_q, gl.minimum(first_row, own_q))
        first_tile = start_q // SPLIT_TILE + sequence
    start, end = seen_blocks(sizes, first_row, 2 * SPLIT_TILE, SPLIT_TILE, HAS_RIGHT, HAS_LEFT)
    if IS_PACKED:
        # A block without rows visits one block of keys, and stores nothing.
        end = gl.where(first_row < sizes.len_q, end, start + 1)
    if HAS_LISTS:
        number = batch * list_stride_b + block
        start, end = listed_range(counts + number, indices, number, list_width, start, end)
    slot = (batch * num_heads + head) * tiles_per_head + first_tile + first_row // SPLIT_TILE
    row_terms += slot.to(gl.int64) * (2 * SPLIT_TILE)
    masked = Mask(
        mask, mask_stride_b, mask_stride_h, mask_stride_m, mask_stride_n, MASK, MASK_HAS_ROWS,
        MASK_IS_DENSE,
    )  # fmt: skip
    c = BackwardQueries(
        query, key, value, upstream, query_gradient, row_terms, slopes + batch * slopes_stride,
        masked, scale, natural, cap, zero, sizes, batch, head, num_heads - 1, head // group_size,
        start_q, start_k, first_row, start, end, q, o, k, v, q_full, o_full, k_full, v_full,
        BLOCK_D, HAS_RIGHT, HAS_LEFT, IS_RAGGED, IS_ALIGNED, HAS_SOFTCAP, FAST_TANH, HAS_ALIBI,
        IS_PACKED,
    )  # fmt: skip
    gl.warp_specialize(
        [(query_gradients, (c, 0)), (query_gradients, (c, 1)), (queries_producer, (c,))],
        [4, 1],
        [240, 24],
    )
