"""Weights of wide heads on Hopper, made where their scores are: those are never in memory.

    SUMS:     p = exp2(scale * q k^T - reference);  total = sum p
    GIVEN:    p = exp(scale * q k^T - lse)
    CHANGES:  ds = p * (do v^T - delta)

The first is of a forward pass, the others of a backward pass, which knows the log-sum-exp.
A block has 128 lines of a plane, 64 for each of two consumer warpgroups, which hold their queries
in registers, up to 576 columns of them. A producer copies keys, 128 x 64 numbers a stage; blocks of
keys are visited from the last to the first. While one warpgroup makes weights of its scores, the
other one has the units for products.

The reference is the maximum of the first block visited. bf16 has exponents of 8 bits, so nothing is
lost unless a later score exceeds it by 2^60; such a block of lines is noted, and its weights are
written anew with the maximum of all, which another pass finds. What the products with values make
of the weights is divided by the totals later.
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

from adaattn import _constants
from adaattn.backends.device.barriers import meet, sum_in_thread, wait_for_writes
from adaattn.backends.device.gluon import aggregate, barrier, shaped_as, tma_store
from adaattn.backends.device.stages import advance, copy, mma_layout, set_fields

LINES = gl.constexpr(128)
KEYS = gl.constexpr(128)
COLUMNS = gl.constexpr(64)
SUMS = gl.constexpr(0)
GIVEN = gl.constexpr(1)
CHANGES = gl.constexpr(2)
# Two consumer warpgroups, and the producer's.
THREADS = gl.constexpr(384)
NO_SCORE = gl.constexpr(-float("inf"))
# Totals that a reference may leave: beyond, the lines are computed again.
LEAST_TOTAL = gl.constexpr(2.0**-60)
LARGEST_TOTAL = gl.constexpr(2.0**60)
LOG2_E = gl.constexpr(_constants.LOG2_E)


@aggregate
class Weights:
    """What every function reads: tensors, sizes, stages with their barriers."""

    query: tma.tensor_descriptor
    key: tma.tensor_descriptor
    out: tma.tensor_descriptor
    read: tma.tensor_descriptor
    totals: gl.tensor
    references: gl.tensor
    noted: gl.tensor
    scale: gl.tensor
    num_lines: gl.tensor
    num_rows: gl.tensor
    len_k: gl.tensor
    first: gl.tensor
    plane: gl.tensor
    line: gl.tensor
    k: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    KIND: gl.constexpr
    PARTS: gl.constexpr
    STAGES: gl.constexpr
    IS_CAUSAL: gl.constexpr
    TURNS: gl.constexpr
    layout: gl.constexpr
    query_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, query, key, out, read, totals, references, noted, scale, num_lines, num_rows, len_k,
        first, plane, line, k, o, p, k_full, p_full, done, KIND, PARTS, STAGES, IS_CAUSAL,
    ):  # fmt: skip
        set_fields(self, locals())
        self.TURNS = gl.constexpr(3 if KIND == SUMS else 1)
        self.layout = gl.constexpr(mma_layout(128))
        self.query_layout = gl.constexpr(
            gl.DotOperandLayout(operand_index=0, parent=mma_layout(128), k_width=2)
        )


@gluon.jit
def num_blocks(c):
    """How many blocks of keys the lines of this block see: one at least."""
    count = gl.cdiv(c.len_k, KEYS)
    if c.IS_CAUSAL:
        row = c.line % c.num_rows
        last = gl.where(row + LINES > c.num_rows, c.num_rows, row + LINES) - 1
        count = gl.minimum(count, gl.maximum(last + c.first, 0) // KEYS + 1)
    return count


@gluon.jit
def produce(c, count, fills, stage):
    """Copies the keys of one pass, and beside them the weights whose changes are wanted."""
    for i in range(count):
        for part in gl.static_range(c.PARTS):
            if fills >= c.STAGES:
                meet(stage, "sync", THREADS)
            place = c.plane, (count - 1 - i) * KEYS, part * COLUMNS
            copy(c.key, c.k_full.index(stage), c.k.index(stage), place)
            stage = (stage + 1) % c.STAGES
            fills += 1
        if c.KIND == CHANGES:
            for w in gl.static_range(2):
                if i > 0:
                    meet(c.STAGES + w, "sync", 256)
                place = c.plane, c.line + w * 64, (count - 1 - i) * KEYS
                copy(c.read, c.p_full.index(w), c.p.index(w), place)
    return fills, stage


@gluon.jit
def producer(c):
    """Copies queries into the first stages, then keys, again for what is computed again."""
    count = num_blocks(c)
    for part in gl.static_range(c.PARTS):
        place = c.plane, c.line, part * COLUMNS
        copy(c.query, c.k_full.index(part), c.k.index(part), place)
    fills = gl.to_tensor(c.PARTS)
    stage = gl.to_tensor(c.PARTS % c.STAGES)
    for turn in range(c.TURNS):
        if turn == 1:
            mbarrier.wait(c.done, 0)
            count = count * gl.load(c.noted)
        fills, stage = produce(c, count, fills, stage)


@gluon.jit
def scores(c, q, stage, phase):
    """Products of queries and a block of keys: [64, 128]."""
    s = gl.zeros([64, KEYS], gl.float32, c.layout)
    before = stage
    for part in gl.static_range(c.PARTS):
        mbarrier.wait(c.k_full.index(stage), phase)
        k = c.k.index(stage).permute([1, 0])
        s = warpgroup_mma(q[part], k, s, use_acc=part > 0, is_async=True)
        if part > 0:
            s = warpgroup_mma_wait(1, deps=[s])
            meet(before, "arrive", THREADS)
        before = stage
        stage, phase = advance(stage, phase, c.STAGES)
    s = warpgroup_mma_wait(0, deps=[s])
    meet(before, "arrive", THREADS)
    return s, stage, phase


@gluon.jit
def positions(c, w: gl.constexpr):
    """Where lines of a warpgroup stand among the chunk's keys: [64]."""
    lines = c.line + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, c.layout))
    return lines % c.num_rows + c.first


@gluon.jit
def hide(c, w: gl.constexpr, s, block):
    """Scores of keys that are not seen are -inf."""
    keys = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, c.layout))
    places = positions(c, w)
    last = places * 0 + c.len_k - 1
    if c.IS_CAUSAL:
        last = gl.minimum(last, places)
    return gl.where(gl.expand_dims(keys, 0) <= gl.expand_dims(last, 1), s, NO_SCORE)


@gluon.jit
def write(c, w: gl.constexpr, p, block):
    """Registers, stmatrix, TMA: lines and keys beyond the last are clipped."""
    tma.store_wait(0)
    barrier()
    buffer = c.o.index(w)
    buffer.store(p.to(buffer.dtype))
    fence_async_shared()
    place = c.plane, c.line + w * 64, block * KEYS
    tma_store(c.out, place, shaped_as(buffer, c.out))


@gluon.jit
def change(c, w: gl.constexpr, s, delta, i):
    """Changes of scores: what is hidden has no weight, and none."""
    mbarrier.wait(c.p_full.index(w), i & 1)
    p = c.p.index(w).load(c.layout).to(gl.float32)
    # A barrier does not wait for what is being read: TMA would write over it.
    fence_async_shared()
    meet(c.STAGES + w, "arrive", 256)
    return p * (s - gl.expand_dims(delta, 1))


@gluon.jit
def keep(c, w: gl.constexpr, reference, total, NOTES: gl.constexpr):
    """Stores what rows leave, and notes the lines whose reference does not serve."""
    layout: gl.constexpr = gl.SliceLayout(1, c.layout)
    total = gl.convert_layout(gl.sum(total, 1), layout)
    lines = c.line + w * 64 + gl.arange(0, 64, layout=layout)
    inside = lines < c.num_lines
    place = c.plane.to(gl.int64) * c.num_lines + lines
    gl.store(c.totals + place, total, mask=inside)
    gl.store(c.references + place, reference, mask=inside)
    if NOTES:
        bad = inside & ((total > LEAST_TOTAL) & (total < LARGEST_TOTAL) == False)  # noqa: E712
        if c.IS_CAUSAL:
            bad = bad & (positions(c, w) >= 0)
        gl.store(c.noted + lines * 0, 1, mask=bad)


@gluon.jit
def given(c, w: gl.constexpr):
    """What each row's scores are less, in units of log 2, or its products: as they are given."""
    lines = c.line + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, c.layout))
    place = c.plane.to(gl.int64) * c.num_lines + lines
    found = gl.load(c.references + place, mask=lines < c.num_lines, other=0.0)
    if c.KIND == GIVEN:
        # A row that sees nothing has a log-sum-exp of -inf, as its scores.
        found = gl.where(found == NO_SCORE, 0.0, found * LOG2_E)
    return found


@gluon.jit
def first_block(c, w: gl.constexpr, s, block):
    """Scores of the first block visited, and the reference of each row: their maximum.

    A row that sees none of this block is held to what it does not see; its total tells.
    """
    raw = gl.max(s, 1) * c.scale
    raw = gl.where(gl.abs(raw) < float("inf"), raw, 0.0)
    s = hide(c, w, s, block)
    reference = gl.max(s, 1) * c.scale
    return s, gl.where(reference == NO_SCORE, raw, reference)


@gluon.jit
def masked_blocks(c, w: gl.constexpr, count):
    """How many of the blocks visited hide keys from some lines: those come first."""
    masked = gl.to_tensor(1)
    if c.IS_CAUSAL:
        row = (c.line + w * 64) % c.num_rows
        row = gl.where(row + 64 > c.num_rows, 0, row)
        plain = gl.maximum(row + c.first + 1, 0) // KEYS
        masked = gl.maximum(count - plain, 1)
    return masked


@gluon.jit
def visit(c, q, w: gl.constexpr, turn, count, visits, masked, reference, total, stage, phase):
    """The blocks of one turn, from the last to the first."""
    for i in range(visits):
        block = count - 1 - i
        s, stage, phase = scores(c, q, stage, phase)
        if c.KIND == CHANGES:
            # What is hidden has no weight, and no change.
            write(c, w, change(c, w, s, reference, i), block)
        else:
            if turn + i == 0:
                if c.KIND == SUMS:
                    s, reference = first_block(c, w, s, block)
                else:
                    s = hide(c, w, s, block)
            elif i < masked:
                s = hide(c, w, s, block)
            if turn == 1:
                reference = gl.maximum(reference, gl.max(s, 1) * c.scale)
            else:
                p = gl.exp2(s * c.scale - gl.expand_dims(reference, 1))
                if c.KIND == SUMS:
                    total = total + sum_in_thread(p)
                write(c, w, p, block)
    return reference, total, stage, phase


@gluon.jit
def consumer(c, w: gl.constexpr):
    """One consumer warpgroup.

    A block is visited in one loop that branches: a copy of the products for each case took four
    times as long to compile. Turns after the first are for lines that were noted: one finds the
    maximum of their rows, one writes their weights anew.
    """
    count = num_blocks(c)
    zeros = gl.zeros([64, KEYS], gl.float32, c.layout)
    if c.IS_CAUSAL:
        for block in range(count, gl.cdiv(c.len_k, KEYS)):
            write(c, w, zeros, block)
    q = ()
    for part in gl.static_range(c.PARTS):
        mbarrier.wait(c.k_full.index(part), 0)
        q = q + (c.k.index(part).slice(w * 64, 64, dim=0).load(c.query_layout),)  # noqa: RUF005
        fence_async_shared()
        meet(part, "arrive", THREADS)
    stage = gl.to_tensor(c.PARTS % c.STAGES)
    phase = gl.to_tensor(c.PARTS // c.STAGES)
    masked = masked_blocks(c, w, count)
    total = sum_in_thread(zeros)
    # What a row's scores, or products, are less.
    reference = gl.zeros([64], gl.float32, gl.SliceLayout(1, c.layout))
    if c.KIND != SUMS:
        reference = given(c, w)
    visits = count
    for turn in range(c.TURNS):
        reference, total, stage, phase = visit(
            c, q, w, turn, count, visits, masked, reference, total, stage, phase
        )
        if c.KIND == SUMS:
            if turn == 0:
                visits = count * finish(c, w, reference, total)
                reference = reference * 0.0 + NO_SCORE
                total = sum_in_thread(zeros)
            elif turn == 1:
                reference = gl.where(reference == NO_SCORE, 0.0, reference)
            elif visits > 0:
                keep(c, w, reference, total, False)
    tma.store_wait(0)


@gluon.jit
def finish(c, w: gl.constexpr, reference, total):
    """Keeps what rows leave; 1 where some reference did not serve, and 0 otherwise."""
    keep(c, w, reference, total, True)
    # What is stored again must come behind what was stored before.
    wait_for_writes()
    barrier()
    mbarrier.arrive(c.done)
    mbarrier.wait(c.done, 0)
    return gl.load(c.noted)


@gluon.jit
def weights(
    query, key, out, read, totals, references, noted, scale,
    num_lines, num_rows, tiles, together, len_k, first,
    KIND: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Stages and barriers made ready, then one producer beside two consumers.

    Args, beyond their names:
        query: [planes, lines, D], copied 128 x 64 at a time; of CHANGES the output's gradient.
        key: [planes, keys, D], likewise; of CHANGES values.
        out: weights or changes, [planes, lines, keys], written 64 x 128 at a time.
        read: weights, likewise, for CHANGES.
        totals: fp32 [planes, lines], written by SUMS.
        references: likewise, in units of log 2; of GIVEN the log-sum-exp that is read, of CHANGES
            delta.
        noted: int32 [blocks], for SUMS.
        scale: above 0, in those units.
        num_rows: of each head in the chunk: lines are rows of one head after another's.
        tiles: blocks of a plane.
        together: planes whose blocks take turns: all or one.
        len_k: keys of the chunk.
        first: position of row 0 among them, negative where it sees none.
        PARTS: times 64 columns.
    """
    dtype: gl.constexpr = query.dtype
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLUMNS], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, KEYS], dtype)
    single: gl.constexpr = mbarrier.MBarrierLayout()
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, COLUMNS], k_layout)
    o = gl.allocate_shared_memory(dtype, [2, 64, KEYS], p_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], single)
    done = gl.allocate_shared_memory(gl.int64, [1], single)
    # Weights that are not read have no place: what stands for it is never touched.
    source = out
    p = o
    p_full = k_full
    if KIND == CHANGES:
        source = read
        p = gl.allocate_shared_memory(dtype, [2, 64, KEYS], p_layout)
        p_full = gl.allocate_shared_memory(gl.int64, [2, 1], single)
        for i in gl.static_range(2):
            mbarrier.init(p_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(done, count=2)
    fence_async_shared()
    block = gl.program_id(0)
    # Of some planes together the last lines begin, which have most to do in causal order.
    of_planes = block // (together * tiles)
    within = block % (together * tiles)
    plane = of_planes * together + within % together
    line = (tiles - 1 - within // together) * LINES
    c = Weights(
        query, key, out, source, totals, references, noted + block, scale, num_lines, num_rows,
        len_k, first, plane, line, k, o, p, k_full, p_full, done, KIND, PARTS, STAGES, IS_CAUSAL,
    )  # fmt: skip
    if KIND == SUMS:
        lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(c.noted + lanes * 0, lanes * 0)
    barrier()
    gl.warp_specialize(
        [(producer, (c,)), (consumer, (c, 0)), (consumer, (c, 1))], [4, 4], [240, 240]
    )
