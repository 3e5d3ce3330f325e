"""The gradients of keys and values alone on the device: one block of keys of one head.

    p = exp(s - lse);  dv = p^T do;  dp = do v^T;  ds = p (dp - delta);  dk = ds^T q

Where one kernel for all has no registers left, above 128 columns and beside most masks, and where
grouped heads have short blocks. A block of 64 keys loops over the tiles of 64 query rows that see
it, of all query heads of its key head. With 256 columns the sums of dk and dv are 128 registers a
thread each, so that each has a warpgroup of its own, and the product that it is made of: the first
computes scores, weights and dv, the second dp, ds and dk. Scores are transposed, so that p^T and
ds^T are left operands from registers; weights go from the first to the second through shared
memory, in 16 bits.

Each warpgroup issues the product that it sums and behind it the next tile's, then waits for both:
nothing is in flight over the back edge of its loop, and a stage is in use for little more than the
time of one tile. Gradients of queries are another kernel's
(`adaattn.backends.hopper.backward_queries`): nothing is added in memory, so that equal calls have
equal bits. Rows of a tile of scores are keys here, so that keys behind the last need no mask: what
is computed for them is not stored.
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

from adaattn.backends.device.barriers import FREED_BY, meet, two_barriers
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
from adaattn.backends.hopper.gradient_order import begun, next_tile, packed_keys, row_tiles
from adaattn.backends.hopper.gradient_scores import (
    SPLIT_TILE,
    capped,
    hide_at_edges,
    slope_of,
    weighed,
)
from adaattn.backends.hopper.places import corner
from adaattn.backends.hopper.scores import ADDITIVE, Sizes, numbers


@aggregate
class BackwardKeys:
    """What every function reads: tensors, sizes, stages with their barriers, choices.

    As in `backward.Backward`; stages of upstream gradients have barriers of their own.
    """

    query: tma.tensor_descriptor
    key: tma.tensor_descriptor
    value: tma.tensor_descriptor
    upstream: tma.tensor_descriptor
    row_terms: tma.tensor_descriptor
    key_gradient: tma.tensor_descriptor
    value_gradient: tma.tensor_descriptor
    slopes: gl.tensor
    mask: Mask
    scale: gl.tensor
    natural: gl.tensor
    cap: gl.tensor
    sizes: Sizes
    batch: gl.tensor
    key_head: gl.tensor
    first_head: gl.tensor
    last_head: gl.tensor
    start_q: gl.tensor
    start_k: gl.tensor
    first_key: gl.tensor
    first_tile: gl.tensor
    end_tile: gl.tensor
    first_slot: gl.tensor
    skipped: gl.tensor
    visits: gl.tensor
    q: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    KEYS: gl.constexpr
    ROW_AXIS: gl.constexpr
    BLOCK_D: gl.constexpr
    BLOCK_V: gl.constexpr
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
    score_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, query, key, value, upstream, row_terms, key_gradient, value_gradient, slopes, mask,
        scale, natural, cap, sizes, batch, key_head, first_head, last_head, start_q, start_k,
        first_key, first_tile, end_tile, first_slot, skipped, visits, q, o, k, v, p, lse, delta,
        kv_full, q_full, o_full, BLOCK_D, BLOCK_V, IS_GROUPED, HAS_RIGHT, HAS_LEFT, IS_ALIGNED,
        HAS_SOFTCAP, FAST_TANH, HAS_ALIBI, IS_PACKED,
    ):  # fmt: skip
        set_fields(self, locals())
        self.ROWS = gl.constexpr(SPLIT_TILE)
        self.KEYS = gl.constexpr(SPLIT_TILE)
        self.ROW_AXIS = gl.constexpr(1)
        self.IS_RAGGED = gl.constexpr(False)
        self.IS_ORDERED = gl.constexpr(False)
        self.score_layout = gl.constexpr(mma_layout(64))


# Named barriers: of the two stages of queries, of those of upstream gradients, and of weights; and
# where values are no longer read.
QUERY_STAGES = gl.constexpr(0)
UPSTREAM_STAGES = gl.constexpr(2)
PASSED_WEIGHTS = gl.constexpr(4)
VALUES_READ = gl.constexpr(6)


@gluon.jit
def block_corner(c):
    """Where the block of keys stands."""
    return corner(c, c.batch, c.key_head, c.start_k, c.first_key, c.sizes.len_k, 0)


@gluon.jit
def query_producer(c):
    """Copies keys once, then queries of tiles of rows, with their log-sum-exps.

    Terms of rows have four places, two more than tiles: no barrier tells when they have been read,
    but what frees the second tile behind theirs does.
    """
    copy(c.key, c.kv_full.index(0), c.k, block_corner(c))
    tile, slot, head = begun(c)
    for visit in range(c.visits):
        stage = visit & 1
        place = corner(c, c.batch, head, c.start_q, tile * c.ROWS, c.sizes.len_q, 0)
        if visit > 1:
            meet(QUERY_STAGES + stage, "sync", FREED_BY)
        copy(c.query, c.q_full.index(stage), c.q.index(stage), place)
        terms = slot * (2 * c.ROWS)
        copy(c.row_terms, c.q_full.index(stage), c.lse.index(visit & 3), (terms,))
        tile, slot, head = next_tile(c, tile, slot, head)


@gluon.jit
def upstream_producer(c):
    """The same of values, upstream gradients and deltas.

    A warp of its own: they are freed before queries of the same tile, and one warp would wait.
    """
    copy(c.value, c.kv_full.index(1), c.v, block_corner(c))
    tile, slot, head = begun(c)
    for visit in range(c.visits):
        stage = visit & 1
        place = corner(c, c.batch, head, c.start_q, tile * c.ROWS, c.sizes.len_q, 0)
        if visit > 1:
            meet(UPSTREAM_STAGES + stage, "sync", FREED_BY)
        copy(c.upstream, c.o_full.index(stage), c.o.index(stage), place)
        terms = slot * (2 * c.ROWS) + c.ROWS
        copy(c.row_terms, c.o_full.index(stage), c.delta.index(visit & 3), (terms,))
        tile, slot, head = next_tile(c, tile, slot, head)


@gluon.jit
def row_numbers(c, places, visit):
    """A number of each row of a tile."""
    return places.index(visit & 3).load(gl.SliceLayout(0, c.score_layout))


@gluon.jit
def pass_weights(c, s, lse, mask, visit, head, first_row, IS_FIRST: gl.constexpr):
    """The weights of a tile as a left operand.

    The other warpgroup gets them, times the softcap's derivative. No barrier tells that it has read
    those of two tiles before: it has, since the tile's queries are there, in the place of theirs,
    which it frees behind the product made of them.
    """
    s, tangent = capped(c, s)
    p = weighed(
        c, s, base_of(c, lse, mask), slope_of(c, head), c.first_key, first_row,
        c.mask.KIND == ADDITIVE,
    )  # fmt: skip
    if IS_FIRST or c.IS_GROUPED or not c.IS_ALIGNED:
        p = hide_at_edges(c, p, c.first_key, first_row)
    p = kept(c, p, mask)
    passed = p
    if c.HAS_SOFTCAP:
        passed = p * (1.0 - tangent * tangent)
    c.p.index(visit & 1).store(passed.to(c.p.dtype))
    meet(PASSED_WEIGHTS + (visit & 1), "arrive", 256)
    left: gl.constexpr = gl.DotOperandLayout(0, mma_layout(c.BLOCK_V), 2)
    return gl.convert_layout(p.to(c.p.dtype), left)


@gluon.jit
def value_gradients(c):
    """The first warpgroup: scores, weights, and the gradients of values."""
    dv = gl.zeros([c.KEYS, c.BLOCK_V], gl.float32, mma_layout(c.BLOCK_V))
    tile, slot, head = begun(c)
    mbarrier.wait(c.kv_full.index(0), 0)
    mbarrier.wait(c.q_full.index(0), 0)
    s_async = product(c.k, c.q.index(0).permute([1, 0]), c.KEYS, c.ROWS, c.score_layout)
    lse = row_numbers(c, c.lse, 0)
    mask = load_tile(c, mask_of(c, head), c.first_key, tile * c.ROWS, True)
    s = warpgroup_mma_wait(0, deps=[s_async])
    meet(QUERY_STAGES, "arrive", FREED_BY)
    p = pass_weights(c, s, lse, mask, gl.to_tensor(0), head, tile * c.ROWS, True)
    for visit in range(c.visits - 1):
        stage = visit & 1
        mbarrier.wait(c.o_full.index(stage), (visit >> 1) & 1)
        dv_async = warpgroup_mma(p, c.o.index(stage), dv, is_async=True)
        tile, slot, head = next_tile(c, tile, slot, head)
        mbarrier.wait(c.q_full.index(stage ^ 1), ((visit + 1) >> 1) & 1)
        q = c.q.index(stage ^ 1).permute([1, 0])
        s_async = product(c.k, q, c.KEYS, c.ROWS, c.score_layout)
        lse = row_numbers(c, c.lse, visit + 1)
        mask = load_tile(c, mask_of(c, head), c.first_key, tile * c.ROWS, True)
        dv = warpgroup_mma_wait(1, deps=[dv_async])
        meet(UPSTREAM_STAGES + stage, "arrive", FREED_BY)
        s = warpgroup_mma_wait(0, deps=[s_async])
        meet(QUERY_STAGES + (stage ^ 1), "arrive", FREED_BY)
        p = pass_weights(c, s, lse, mask, visit + 1, head, tile * c.ROWS, False)
    last = c.visits - 1
    mbarrier.wait(c.o_full.index(last & 1), (last >> 1) & 1)
    dv_async = warpgroup_mma(p, c.o.index(last & 1), dv, is_async=True)
    dv = warpgroup_mma_wait(0, deps=[dv_async])
    meet(VALUES_READ, "sync", 256)
    store_gradient(c, c.value_gradient, c.v, dv)


@gluon.jit
def score_gradients(c, dp, delta, visit):
    """The gradients of a tile's scores as a left operand, from weights that are passed on."""
    meet(PASSED_WEIGHTS + (visit & 1), "sync", 256)
    p = numbers(c.p.index(visit & 1).load(c.score_layout))
    ds = p * (dp - gl.expand_dims(delta, 0))
    left: gl.constexpr = gl.DotOperandLayout(0, mma_layout(c.BLOCK_D), 2)
    return gl.convert_layout(ds.to(c.p.dtype), left)


@gluon.jit
def key_gradients(c):
    """The second warpgroup: gradients of weights and of scores, and those of keys."""
    dk = gl.zeros([c.KEYS, c.BLOCK_D], gl.float32, mma_layout(c.BLOCK_D))
    mbarrier.wait(c.kv_full.index(1), 0)
    mbarrier.wait(c.o_full.index(0), 0)
    dp_async = product(c.v, c.o.index(0).permute([1, 0]), c.KEYS, c.ROWS, c.score_layout)
    delta = row_numbers(c, c.delta, 0)
    dp = warpgroup_mma_wait(0, deps=[dp_async])
    meet(UPSTREAM_STAGES, "arrive", FREED_BY)
    ds = score_gradients(c, dp, delta, gl.to_tensor(0))
    for visit in range(c.visits - 1):
        stage = visit & 1
        mbarrier.wait(c.q_full.index(stage), (visit >> 1) & 1)
        dk_async = warpgroup_mma(ds, c.q.index(stage), dk, is_async=True)
        mbarrier.wait(c.o_full.index(stage ^ 1), ((visit + 1) >> 1) & 1)
        o = c.o.index(stage ^ 1).permute([1, 0])
        dp_async = product(c.v, o, c.KEYS, c.ROWS, c.score_layout)
        delta = row_numbers(c, c.delta, visit + 1)
        dk = warpgroup_mma_wait(1, deps=[dk_async])
        meet(QUERY_STAGES + stage, "arrive", FREED_BY)
        dp = warpgroup_mma_wait(0, deps=[dp_async])
        meet(UPSTREAM_STAGES + (stage ^ 1), "arrive", FREED_BY)
        ds = score_gradients(c, dp, delta, visit + 1)
    meet(VALUES_READ, "arrive", 256)
    last = c.visits - 1
    mbarrier.wait(c.q_full.index(last & 1), (last >> 1) & 1)
    dk_async = warpgroup_mma(ds, c.q.index(last & 1), dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=[dk_async])
    # Keys have been read by the first warpgroup: it passed the weights of the last tile on.
    store_gradient(c, c.key_gradient, c.k, dk * c.natural)


@gluon.jit
def store_gradient(c, descriptor, buffer, gradient):
    """Keys or values, which nobody reads any more, make room for their gradients.

    TMA clips what is behind the last key and column.
    """
    buffer.store(gradient.to(buffer.dtype))
    fence_async_shared()
    barrier()
    tma_store(descriptor, block_corner(c), shaped_as(buffer, descriptor))
    tma.store_wait(0)


@gluon.jit
def backward_keys(
    query, key, value, upstream, row_terms, key_gradient, value_gradient, slopes,
    scale, natural, cap, len_q, len_k, offset, left, right, num_heads, group_size, key_blocks,
    tiles_per_head, slopes_stride, num_sequences, zero, starts_q, starts_k, mask, mask_stride_b,
    mask_stride_h, mask_stride_m, mask_stride_n, counts, indices, list_width, list_stride_b,
    BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr, IS_GROUPED: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_LEFT: gl.constexpr, IS_ALIGNED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, FAST_TANH: gl.constexpr, HAS_ALIBI: gl.constexpr,
    IS_PACKED: gl.constexpr, TO_END: gl.constexpr, MASK: gl.constexpr,
    MASK_HAS_ROWS: gl.constexpr, MASK_IS_DENSE: gl.constexpr, HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """Stages and barriers made ready, then two producer warps beside two consumer warpgroups.

    Arguments are those of `backward.backward`; tiles have 64 rows, and blocks 64 keys. Blocks of a
    head follow one another, so that those that run at a time read the same rows in the L2 cache.
    """
    dtype: gl.constexpr = query.dtype
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SPLIT_TILE, BLOCK_D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SPLIT_TILE, BLOCK_V], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SPLIT_TILE, SPLIT_TILE], dtype)
    q = gl.allocate_shared_memory(dtype, [2, SPLIT_TILE, BLOCK_D], d_layout)
    o = gl.allocate_shared_memory(dtype, [2, SPLIT_TILE, BLOCK_V], v_layout)
    k = gl.allocate_shared_memory(dtype, [SPLIT_TILE, BLOCK_D], d_layout)
    v = gl.allocate_shared_memory(dtype, [SPLIT_TILE, BLOCK_V], v_layout)
    p = gl.allocate_shared_memory(dtype, [2, SPLIT_TILE, SPLIT_TILE], p_layout)
    lse = gl.allocate_shared_memory(gl.float32, [4, SPLIT_TILE], row_terms.layout)
    delta = gl.allocate_shared_memory(gl.float32, [4, SPLIT_TILE], row_terms.layout)
    kv_full = two_barriers(1)
    q_full = two_barriers(2)
    o_full = two_barriers(2)
    fence_async_shared()
    head = gl.program_id(0) // key_blocks
    block = gl.program_id(0) - head * key_blocks
    kv_heads = num_heads // group_size
    batch = head // kv_heads
    key_head = head - batch * kv_heads
    first_head = key_head * group_size
    sizes = Sizes(len_q, len_k, offset, left, right)
    first_key = block * SPLIT_TILE
    start_q = gl.to_tensor(0)
    start_k = gl.to_tensor(0)
    first_tile = gl.to_tensor(0)
    if IS_PACKED:
        start_q, own_q, start_k, own_k, first_tile, first_key = packed_keys(
            block, starts_q, starts_k, num_sequences, sizes, False, SPLIT_TILE, SPLIT_TILE, False,
            False,
        )  # fmt: skip
        if TO_END:
            offset = own_k - own_q
        sizes = Sizes(own_q, own_k, offset, left, right)
    first, behind = row_tiles(sizes, first_key, SPLIT_TILE, SPLIT_TILE, HAS_RIGHT, HAS_LEFT)
    if IS_PACKED:
        # A block without keys visits one tile, and stores nothing.
        behind = gl.where(first_key < sizes.len_k, behind, first + 1)
    if HAS_LISTS:
        number = batch * list_stride_b + block
        first, behind = listed_range(counts + number, indices, number, list_width, first, behind)
    skipped = tiles_per_head - (behind - first)
    first_slot = (batch * num_heads + first_head) * tiles_per_head + first_tile + first
    visits = behind - first
    if IS_GROUPED:
        visits = visits * group_size
    masked = Mask(
        mask, mask_stride_b, mask_stride_h, mask_stride_m, mask_stride_n, MASK, MASK_HAS_ROWS,
        MASK_IS_DENSE,
    )  # fmt: skip
    c = BackwardKeys(
        query, key, value, upstream, row_terms, key_gradient, value_gradient,
        slopes + batch * slopes_stride, masked, scale, natural, cap, sizes, batch, key_head,
        first_head, first_head + group_size - 1, start_q, start_k, first_key, first, behind,
        first_slot, skipped, visits, q, o, k, v, p, lse, delta, kv_full, q_full, o_full, BLOCK_D,
        BLOCK_V, IS_GROUPED, HAS_RIGHT, HAS_LEFT, IS_ALIGNED, HAS_SOFTCAP, FAST_TANH, HAS_ALIBI,
        IS_PACKED,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (value_gradients, (c,)),
            (key_gradients, (c,)),
            (query_producer, (c,)),
            (upstream_producer, (c,)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
