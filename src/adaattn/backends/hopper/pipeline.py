"""What all warps of the Hopper kernel share: its arguments and stages; and the producer.

A stage of keys or values is filled by TMA, which tells of it through an mbarrier, and freed through
one of the hardware's named barriers: those of keys, of values, of places of a mask, and then those
at which consumers wait for their turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from adaattn.backends.device.barriers import meet, meet_late
from adaattn.backends.device.gluon import aggregate
from adaattn.backends.device.stages import copy, mma_layout, set_fields
from adaattn.backends.hopper.places import (
    corner,
    is_listed,
    is_wanted,
    key_blocks,
    listed_block,
    num_own_tiles,
    num_tiles_to_do,
    number_of,
    own_tile,
    row_of,
    sizes_by_head,
    sizes_of,
    starts_of,
)
from adaattn.backends.hopper.scores import BOOLEAN, Sizes, Terms


@aggregate
class Packing:
    """Where packed sequences begin."""

    starts_q: gl.tensor
    starts_k: gl.tensor
    num_sequences: gl.tensor

    @gluon.constexpr_function
    def __init__(self, starts_q, starts_k, num_sequences):
        set_fields(self, locals())


@aggregate
class Lists:
    """The blocks of keys that each block of query rows sees, ``rows`` of them.

    Lists stand ``width`` numbers apart; ``most`` of them count. There are ``num_blocks`` of keys.
    Of a packed mask ``sees`` tells which rows see anything.
    """

    counts: gl.tensor
    indices: gl.tensor
    sees: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    rows: gl.tensor
    width: gl.tensor
    most: gl.tensor
    num_blocks: gl.tensor

    @gluon.constexpr_function
    def __init__(self, counts, indices, sees, stride_b, stride_h, rows, width, most, num_blocks):
        set_fields(self, locals())


@aggregate
class Call:
    """What every function reads: tensors, sizes, stages with their barriers, choices."""

    query: tma.tensor_descriptor
    key: tma.tensor_descriptor
    value: tma.tensor_descriptor
    out: tma.tensor_descriptor
    mask: tma.tensor_descriptor
    lse: gl.tensor
    row_max: gl.tensor
    entropy: gl.tensor
    tiles: gl.tensor
    flags: gl.tensor
    terms: Terms
    sizes: Sizes
    packing: Packing
    lists: Lists
    num_tiles: gl.tensor
    tiles_per_head: gl.tensor
    tile_bits: gl.tensor
    tiles_per_block: gl.tensor
    num_heads: gl.tensor
    group_size: gl.tensor
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    m: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    m_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    NUM_WARPGROUPS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_V: gl.constexpr
    STAGES_K: gl.constexpr
    STAGES_V: gl.constexpr
    STAGES_Q: gl.constexpr
    STAGES_M: gl.constexpr
    OUT_PARTS: gl.constexpr
    LATE: gl.constexpr
    IN_TURNS: gl.constexpr
    HAS_TILES: gl.constexpr
    IS_PACKED: gl.constexpr
    TO_END: gl.constexpr
    LIST_RATIO: gl.constexpr
    HAS_LSE: gl.constexpr
    HAS_ROW_MAX: gl.constexpr
    HAS_ENTROPY: gl.constexpr
    dropped: gl.tensor
    HAS_DROPPED: gl.constexpr
    score_layout: gl.constexpr
    out_layout: gl.constexpr
    weight_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, query, key, value, out, mask, lse, row_max, entropy, tiles, flags, terms, sizes,
        packing, lists, num_tiles, tiles_per_head, tile_bits, tiles_per_block, num_heads,
        group_size, q, k, v, o, m, q_full, q_empty, k_full, v_full, m_full, done, NUM_WARPGROUPS,
        BLOCK_N, BLOCK_V, STAGES_K, STAGES_V, STAGES_Q, STAGES_M, OUT_PARTS, LATE, IN_TURNS,
        HAS_TILES, IS_PACKED, TO_END, LIST_RATIO, HAS_LSE, HAS_ROW_MAX, HAS_ENTROPY, dropped,
        HAS_DROPPED,
    ):  # fmt: skip
        set_fields(self, locals())
        self.BLOCK_M = gl.constexpr(64 * NUM_WARPGROUPS)
        self.score_layout = gl.constexpr(mma_layout(BLOCK_N))
        self.out_layout = gl.constexpr(mma_layout(BLOCK_V))
        self.weight_layout = gl.constexpr(
            gl.DotOperandLayout(operand_index=0, parent=mma_layout(BLOCK_V), k_width=2)
        )


@gluon.jit
def arrive(c, stage):
    """Frees a stage, without a wait."""
    meet(stage, "arrive", 128 * (c.NUM_WARPGROUPS + 1))


@gluon.jit
def arrive_late(c, stage, row_sum):
    """Frees a stage once the row sums are there."""
    meet_late(stage, row_sum, 128 * (c.NUM_WARPGROUPS + 1))


@gluon.jit
def take(c, stage):
    """Waits until all consumers have freed a stage."""
    meet(stage, "sync", 128 * (c.NUM_WARPGROUPS + 1))


@gluon.jit
def take_turn(c, w: gl.constexpr):
    """Waits until a warpgroup may begin its next products.

    One has its exponentials while another has its products; by themselves they may fall into step.
    Each takes a turn for every block that is copied, skipped ones too, or all would stop.
    """
    if c.IN_TURNS:
        meet(turn_number(c, w), "sync", 256)


@gluon.jit
def pass_turn(c, w: gl.constexpr):
    """Lets the next warpgroup begin its products."""
    if c.IN_TURNS:
        meet(turn_number(c, (w + 1) % c.NUM_WARPGROUPS), "arrive", 256)


@gluon.jit
def turn_number(c, w: gl.constexpr):
    """A warpgroup's barrier of turns: behind those of stages, and of places of the mask."""
    return gl.to_tensor(c.STAGES_K + c.STAGES_V + c.STAGES_M * c.NUM_WARPGROUPS + w)


@gluon.jit
def mask_place(c, w: gl.constexpr, stage_k):
    """Where a warpgroup's tile of the mask stands: one place for each, or one for each stage."""
    place = gl.to_tensor(w)
    if c.STAGES_M > 1:
        place += stage_k * c.NUM_WARPGROUPS
    return place


@gluon.jit
def pass_mask(c, place, OPERATION: gl.constexpr):
    """Frees a place of the mask ("arrive"), which one warpgroup reads, or waits for it ("sync")."""
    meet(c.STAGES_K + c.STAGES_V + place, OPERATION, 256)


@gluon.jit
def wait_for_mask(c, w: gl.constexpr, stage_k, phase_k):
    """Waits for a staged tile of the mask and returns its place.

    Places are filled as often as stages of keys are, whose ring tells the phase.
    """
    place = mask_place(c, w, stage_k)
    phase = phase_k
    if c.STAGES_M == 1:
        phase = (phase_k * c.STAGES_K + stage_k) & 1
    mbarrier.wait(c.m_full.index(place), phase)
    return place


@gluon.jit
def read_mask(c, w: gl.constexpr, mask, stage_k, phase_k):
    """The staged tile of the mask, and its place freed; else what was loaded.

    Booleans of two neighbouring keys are one number of 16 bits.
    """
    if c.terms.MASK_IS_STAGED:
        place = wait_for_mask(c, w, stage_k, phase_k)
        if c.terms.MASK == BOOLEAN:
            scores = gl.zeros([64, c.BLOCK_N], gl.float32, c.score_layout)
            left, _ = gl.split(gl.reshape(scores, [64, c.BLOCK_N // 2, 2]))
            mask = c.m.index(place).load(left.type.layout).to(gl.int32)
        else:
            mask = c.m.index(place).load(c.score_layout)
        # A barrier does not wait for what is being read: TMA would write over it.
        fence_async_shared()
        pass_mask(c, place, "arrive")
    return mask


@gluon.jit
def score_product(c, q, stage):
    """Begins q k^T of one block of keys: [64, BLOCK_N]."""
    zeros = gl.zeros([64, c.BLOCK_N], gl.float32, c.score_layout)
    k = c.k.index(stage).permute([1, 0])
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def copy_queries(c, batch, head, start_q, first_row, len_q, visits):
    """Begins the copies of a tile's queries, once the places of an earlier tile's are free."""
    for w in gl.static_range(c.NUM_WARPGROUPS):
        q_place = (visits % c.STAGES_Q) * c.NUM_WARPGROUPS + w
        mbarrier.wait(c.q_empty.index(q_place), ((visits // c.STAGES_Q) & 1) ^ 1)
        rows = first_row + w * 64
        q_corner = corner(c, batch, head, start_q, rows, len_q, 0)
        copy(c.query, c.q_full.index(q_place), c.q.index(q_place), q_corner)


@gluon.jit
def produce(c, REPAIR: gl.constexpr, visits, fills, stage_k, stage_v):
    """Copies what each tile of this pass needs, in the order in which consumers take it."""
    count = num_tiles_to_do(c, REPAIR)
    next_tile = own_tile(c, 0)
    for slot in range(count):
        tile = next_tile
        next_tile = own_tile(c, gl.minimum(slot + 1, count - 1))
        if is_wanted(c, tile, slot, REPAIR):
            first_row = row_of(c, tile)
            head = number_of(c, tile) >> c.tile_bits
            batch = head // c.num_heads
            head = head - batch * c.num_heads
            sizes = sizes_of(c, tile)
            start_q, start_k = starts_of(c, tile)
            start, end = key_blocks(c, sizes, first_row, c.BLOCK_M)
            key_head = head // c.group_size
            if c.LIST_RATIO:
                start = tile.begin
                end = tile.end
                next_block = listed_block(c, tile, 0)
            for i in range(end - start):
                row = (end - 1 - i) * c.BLOCK_N
                if c.LIST_RATIO:
                    row = next_block * c.BLOCK_N
                    next_block = listed_block(c, tile, i + 1)
                place = corner(c, batch, key_head, start_k, row, sizes.len_k, 0)
                if fills >= c.STAGES_K:
                    take(c, stage_k)
                copy(c.key, c.k_full.index(stage_k), c.k.index(stage_k), place)
                if i == 0:
                    copy_queries(c, batch, head, start_q, first_row, sizes.len_q, visits)
                if c.terms.MASK_IS_STAGED:
                    # 0 in dimensions that one mask serves, whose stride is 0.
                    mask_batch = gl.where(c.terms.mask_stride_b != 0, batch, 0)
                    mask_head = gl.where(c.terms.mask_stride_h != 0, head, 0)
                    for w in gl.static_range(c.NUM_WARPGROUPS):
                        mask_row = start_q + first_row + w * 64
                        column = start_k + row
                        if c.terms.MASK == BOOLEAN:
                            column = column // 2  # two are one number of 16 bits
                        mask_corner = mask_batch, mask_head, mask_row, column
                        at = mask_place(c, w, stage_k)
                        if fills >= c.STAGES_M:
                            pass_mask(c, at, "sync")
                        copy(c.mask, c.m_full.index(at), c.m.index(at), mask_corner)
                if fills >= c.STAGES_V:
                    take(c, c.STAGES_K + stage_v)
                copy(c.value, c.v_full.index(stage_v), c.v.index(stage_v), place)
                stage_k = (stage_k + 1) % c.STAGES_K
                stage_v = (stage_v + 1) % c.STAGES_V
                fills += 1
            visits += 1
    return visits, fills, stage_k, stage_v


@gluon.jit
def produce_dropped(c, visits, fills, stage_k):
    """Copies queries, and the keys of blocks that are not listed, tile by tile."""
    for slot in range(num_own_tiles(c)):
        tile = own_tile(c, slot)
        if tile.num >= 0:
            head = tile.number >> c.tile_bits
            batch = head // c.num_heads
            head = head - batch * c.num_heads
            sizes = sizes_by_head(c, tile.number)
            first_row = row_of(c, tile)
            start, end = key_blocks(c, sizes, first_row, c.BLOCK_M)
            copy_queries(c, batch, head, 0, first_row, sizes.len_q, visits)
            place = tile.begin // c.LIST_RATIO
            for block in range(start, end):
                is_kept, place = is_listed(c, tile, place, block)
                if is_kept == 0:
                    if fills >= c.STAGES_K:
                        take(c, stage_k)
                    corner_k = batch, head // c.group_size, block * c.BLOCK_N, 0
                    copy(c.key, c.k_full.index(stage_k), c.k.index(stage_k), corner_k)
                    stage_k = (stage_k + 1) % c.STAGES_K
                    fills += 1
            visits += 1


@gluon.jit
def producer(c, FIXED: gl.constexpr):
    """The producer's warps: both passes, and that over blocks that are not listed."""
    zero = gl.to_tensor(0)
    visits, fills, stage_k, stage_v = produce(c, False, zero, zero, zero, zero)
    if FIXED:
        mbarrier.wait(c.done, 0)
        visits, fills, stage_k, stage_v = produce(c, True, visits, fills, stage_k, stage_v)
    if c.HAS_DROPPED:
        produce_dropped(c, visits, fills, stage_k)
