"""Device functions of the portable kernels: which keys a row meets, what a score becomes.

Scores are kept in units of log 2, so that exp2 needs no further product.
"""

import triton
import triton.language as tl

from adaattn import _constants

__all__ = [
    "LOG2_E",
    "WEIGHT_SCALE",
    "add_bias",
    "bounds",
    "exp2_sum",
    "find_sequence",
    "halved_product",
    "halves",
    "head_factors",
    "head_window",
    "is_kept",
    "key_ranges",
    "least_and_most",
    "lengths_of",
    "level_of",
    "load_entries",
    "load_rows",
    "log2_or_nothing",
    "lse_rest",
    "place_of",
    "power_of_two",
    "seen",
    "soft_capped",
    "store_rows",
    "times",
    "with_sink",
]

LOG2_E = tl.constexpr(_constants.LOG2_E)
WEIGHT_SCALE = tl.constexpr(16384.0)
"""Weights are at most 1: so scaled, their low halves keep their bits."""
_LEAST = tl.constexpr(-1e4)
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def bounds(starts_ptr, total):
    """Return the start and length of a packed sequence, inside of the tensor whatever they say.

    Nobody has checked starts that are on a GPU; those that decrease are empty sequences.
    """
    start = tl.minimum(tl.maximum(tl.load(starts_ptr), 0), total)
    end = tl.minimum(tl.maximum(tl.load(starts_ptr + 1), start), total)
    return start, end - start


@triton.jit
def find_sequence(starts_ptr, tile, num_sequences, BLOCK_M: tl.constexpr):
    """Return the packed sequence of a tile, and the tile's place in it.

    Sequence n has the tiles from ``starts[n] // BLOCK_M + n`` on: enough for its rows whatever
    the starts are, and known without a sum over the sequences before it. A tile may be empty.
    """
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(starts_ptr + middle) // BLOCK_M + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle - 1)
    return low, tile - (tl.load(starts_ptr + low) // BLOCK_M + low)


@triton.jit
def lengths_of(
    tile,
    starts_ptr,
    starts_q_ptr,
    starts_k_ptr,
    total_q,
    total_k,
    left,
    right,
    dilation,
    num_sequences,
    num_tiles,
    BLOCK: tl.constexpr,
    TO_END: tl.constexpr,
    IS_DILATED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_REVERSED: tl.constexpr,
):
    """Return which rows and keys a tile of a head may meet.

    Args, beyond those of `forward`:
        tile: its number among ``num_tiles`` of a head, the classes of a dilation one after another.
        starts_ptr: of what the tile has BLOCK of: queries or keys.
        IS_REVERSED: the last tiles come first, where there are no classes and sequences.

    Returns:
        (tile of its sequence and class, class, first row and first key among all, numbers of rows
        and keys, position of row 0 among the keys, left and right), the last five in steps of the
        dilation.
    """
    start_q = 0
    start_k = 0
    len_q = total_q
    len_k = total_k
    residue = 0
    if IS_DILATED:
        per_class = num_tiles // dilation
        residue = tile // per_class
        tile = tile % per_class
    elif IS_REVERSED and not IS_PACKED:
        tile = num_tiles - 1 - tile
    if IS_PACKED:
        sequence, tile = find_sequence(starts_ptr, tile, num_sequences, BLOCK)
        start_q, len_q = bounds(starts_q_ptr + sequence, total_q)
        start_k, len_k = bounds(starts_k_ptr + sequence, total_k)
    offset = 0
    if TO_END:
        offset = len_k - len_q
    if IS_DILATED:
        # One class: rows start_q + dilation * m, keys start_k + dilation * n.
        first_row = ((residue - offset) % dilation + dilation) % dilation
        len_q = tl.maximum(len_q - first_row + dilation - 1, 0) // dilation
        len_k = tl.maximum(len_k - residue + dilation - 1, 0) // dilation
        offset = (first_row + offset - residue) // dilation
        left = left // dilation
        right = right // dilation
        start_q += first_row
        start_k += residue
    return tile, residue, start_q, start_k, len_q, len_k, offset, left, right


@triton.jit
def head_window(window_ptr, heads, dilation, left, right):
    """Return the window of heads in steps of a dilation; below 0 the most that there is.

    Args:
        window_ptr: [Hq, 2].
        heads: one head, or those of the rows of a tile, [BLOCK_M, 1].
        dilation: 1 is none.
        left: the most in such steps.
        right: likewise, 0 where order is causal.
    """
    own_left = tl.load(window_ptr + heads * 2)
    own_right = tl.load(window_ptr + heads * 2 + 1)
    own_left = tl.where(own_left < 0, left, tl.minimum(own_left // dilation, left))
    own_right = tl.where(own_right < 0, right, tl.minimum(own_right // dilation, right))
    return own_left.to(tl.int32), own_right.to(tl.int32)


@triton.jit
def least_and_most(edge, BY_ROW: tl.constexpr):
    """Return the least and the largest edge of the windows of a tile: of one, or of each row."""
    if BY_ROW:
        return tl.min(tl.min(edge, 1), 0), tl.max(tl.max(edge, 1), 0)
    else:
        return edge, edge


@triton.jit
def head_factors(scales_ptr, softcaps_ptr, heads, scale, softcap):
    """Return what products of heads are multiplied by before the cap and after it: 0 without one.

    Args:
        scales_ptr: [Hq], or None.
        softcaps_ptr: likewise.
        heads: one head, or those of the rows of a tile, [BLOCK_M, 1].
        scale: factor of all heads before the cap.
        softcap: after it, where it is one for all.
    """
    if scales_ptr is not None:
        scale = scale * tl.load(scales_ptr + heads).to(tl.float32)
    if softcaps_ptr is not None:
        cap = tl.load(softcaps_ptr + heads).to(tl.float32)
        cap = tl.where(cap > 0.0, cap, 0.0)
        scale = tl.where(cap > 0.0, scale / tl.where(cap > 0.0, cap, 1.0), scale * LOG2_E)
        softcap = cap * LOG2_E
    return scale, softcap


@triton.jit
def key_ranges(
    first_position,
    last_position,
    begin,
    end,
    left,
    least_left,
    right,
    least_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the keys of a tile of rows in blocks: those that need a mask, and those that do not.

    Args:
        first_position: position of the tile's first row.
        last_position: of its last.
        begin: first key that may be read.
        end: one behind the last.
        left: keys that some row sees before its position, where HAS_LEFT.
        least_left: keys that all rows see before theirs.
        right: keys that some row sees after its position, where HAS_RIGHT.
        least_right: likewise.
        HAS_LEFT: whether there is such a limit.
        HAS_RIGHT: likewise.
        IS_ALIGNED: blocks begin at multiples of BLOCK_N.
        BLOCK_N: keys in a block.

    Returns:
        (low, number of masked blocks from there, number of whole blocks behind them, number of
        masked blocks at the end, one behind the last key that any row sees).
    """
    low = begin
    whole_low = begin
    high = end
    whole_high = end
    if HAS_LEFT:
        low = tl.maximum(low, first_position - left)
        whole_low = tl.maximum(low, last_position - least_left)
        if IS_ALIGNED:
            low = low // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        high = tl.minimum(high, last_position + right + 1)
        whole_high = tl.minimum(high, first_position + least_right + 1)
    before = tl.maximum(tl.cdiv(tl.minimum(whole_low, high) - low, BLOCK_N), 0)
    middle = low + before * BLOCK_N
    whole = tl.maximum(whole_high - middle, 0) // BLOCK_N
    after = tl.cdiv(tl.maximum(high - middle - whole * BLOCK_N, 0), BLOCK_N)
    return low, before, whole, after, high


@triton.jit
def place_of(block, before, whole, AT_EDGE: tl.constexpr):
    """Return where a block of a phase stands among all: the edges are at both ends."""
    if AT_EDGE:
        return block + tl.where(block < before, 0, whole)
    return block + before


@triton.jit
def times(number, stride, ALIGN: tl.constexpr):
    """Return number * stride as int64, with the stride a multiple of ALIGN that is seen."""
    return number.to(tl.int64) * (stride // ALIGN * ALIGN)


@triton.jit
def load_rows(
    base_ptr,
    rows,
    row_stride,
    num_rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return rows of a matrix as [len(rows), BLOCK]; 0 beyond its rows and columns.

    Args:
        base_ptr: the first row's first element.
        rows: row numbers.
        row_stride: elements between rows.
        num_rows: rows from this one on are not read, where MASKED.
        COLUMNS: columns of the matrix.
        BLOCK: columns of the tile.
        MASKED: whether rows may be beyond the end.
    """
    columns = tl.arange(0, BLOCK)
    pointers = base_ptr + (rows * row_stride)[:, None] + columns[None, :]
    if MASKED and COLUMNS != BLOCK:
        inside = (rows < num_rows)[:, None] & (columns < COLUMNS)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
    elif COLUMNS != BLOCK:
        return tl.load(pointers, mask=(columns < COLUMNS)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_entries(base_ptr, start, step, offsets, within, high, MASKED: tl.constexpr):
    """Return a block of a mask, [1 or BLOCK_M, BLOCK_N].

    Args:
        base_ptr: the tile's first row, key 0.
        start: the block's first key.
        step: elements between keys.
        offsets: of the block's entries from its first.
        within: [BLOCK_N] keys from the first.
        high: keys from this one on are not read, where MASKED.
        MASKED: whether there may be such.
    """
    pointers = base_ptr + start.to(tl.int64) * step + offsets
    if MASKED:
        return tl.load(pointers, mask=(start + within < high)[None, :], other=0)
    return tl.load(pointers)


@triton.jit
def power_of_two(largest, STEP: tl.constexpr):
    """Return (scale, -log2(scale)): a power of two that brings magnitudes below 2^15.

    Its exponent is a multiple of STEP: magnitudes are 2^(15 - STEP) at least then, those beyond
    2^-111 excepted. fp16 holds numbers below 2^16, and all bits of those from 2^-14 on.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    shift = (127 + 14 - exponent + 128 * STEP) // STEP * STEP - 128 * STEP
    shift = tl.minimum(tl.maximum(shift, -126), 126)
    scale = ((127 + shift) << 23).to(tl.float32, bitcast=True)
    return scale, -shift.to(tl.float32)


@triton.jit
def level_of(bounds_ptr, plane, num_blocks, CHUNK: tl.constexpr):
    """Return whether all rows of a matrix have one power of two, and its exponent.

    Args:
        bounds_ptr: fp32 [num_blocks], the least exponent of each block of rows; the largest ones
            stand ``plane`` numbers behind them.
        plane: see there.
        num_blocks: of this head.
        CHUNK: how many are read at a time.
    """
    places = tl.arange(0, CHUNK)
    low = tl.full([CHUNK], float("inf"), tl.float32)
    high = tl.full([CHUNK], _NOTHING, tl.float32)
    for first in range(0, num_blocks, CHUNK):
        inside = first + places < num_blocks
        low = tl.minimum(low, tl.load(bounds_ptr + first + places, mask=inside, other=float("inf")))
        more = tl.load(bounds_ptr + plane + first + places, mask=inside, other=_NOTHING)
        high = tl.maximum(high, more)
    least = tl.min(low, 0)
    most = tl.max(high, 0)
    return least >= most, tl.where(most == _NOTHING, 0.0, most)


@triton.jit
def halves(numbers):
    """Return fp32 numbers as the sum of two in fp16: 22 bits of them."""
    high = numbers.to(tl.float16)
    return high, (numbers - high.to(tl.float32)).to(tl.float16)


@triton.jit
def halved_product(
    weights,
    weights_low,
    base_ptr,
    plane,
    rows,
    row_stride,
    num_rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return weights times rows of values, all in halves: three products of fp16, fp32 sums.

    The low halves of the values stand ``plane`` behind the high ones; the rest is as in
    `load_rows`.
    """
    high = load_rows(base_ptr, rows, row_stride, num_rows, COLUMNS, BLOCK, MASKED)
    low = load_rows(base_ptr + plane, rows, row_stride, num_rows, COLUMNS, BLOCK, MASKED)
    product = tl.dot(weights_low, high)
    product = tl.dot(weights, low, product)
    return tl.dot(weights, high, product)


@triton.jit
def store_rows(row_ptrs, numbers, is_row, COLUMNS: tl.constexpr):
    """Write rows of numbers [R, BLOCK] to where each begins, without columns beyond the last."""
    columns = tl.arange(0, numbers.shape[1])
    inside = is_row[:, None] & (columns < COLUMNS)[None, :]
    numbers = numbers.to(row_ptrs.dtype.element_ty)
    tl.store(row_ptrs[:, None] + columns[None, :], numbers, mask=inside)


@triton.jit
def seen(
    positions,
    keys,
    high,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Return which keys are seen from which positions, of shapes that broadcast to a tile."""
    ahead = keys - positions
    # In the shape of both: `ahead < high - positions` holds more registers, and spills.
    visible = (keys < high) & (ahead == ahead)
    if HAS_LEFT:
        visible = visible & (ahead >= -left)
    if HAS_RIGHT:
        visible = visible & (ahead <= right)
    return visible


@triton.jit
def soft_capped(scores, cap, FAST: tl.constexpr, MAY_BE_NONE: tl.constexpr):
    """Return cap * tanh(scores); where a cap of 0 MAY_BE_NONE, the scores as they are.

    FAST is PTX's own tanh, right to 2^-11: below what rounding scores to bf16 would cost. Else
    below 0.25 the difference of exponentials would cancel, and a series of five terms is right to
    rounding.
    """
    if FAST:
        tangent = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [scores], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))
        large = (1.0 - decay) / (1.0 + decay)
        square = scores * scores
        series = 1.0 + square * (
            -1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))
        )
        tangent = tl.where(scores < 0, -large, large)
        tangent = tl.where(tl.abs(scores) < 0.25, scores * series, tangent)
    if MAY_BE_NONE:
        return tl.where(cap > 0.0, cap * tangent, scores)
    return cap * tangent


@triton.jit
def add_bias(scores, slope, positions, keys):
    """Return scores with ALiBi: less by the slope for each step of distance.

    Args:
        scores: of a tile.
        slope: of its head, or of each row; all that follow broadcast to the tile.
        positions: of rows.
        keys: their numbers.
    """
    steps = tl.abs(positions - keys)
    return scores - slope * steps.to(tl.float32)


@triton.jit
def exp2_sum(scores, reference, HAS_ENTROPY: tl.constexpr):
    """Return exp2(scores - reference), its row sums, and the sums of that times the exponent."""
    exponents = scores - reference[:, None]
    if HAS_ENTROPY:
        exponents = tl.maximum(exponents, _LEAST)  # 0 * inf is no number
        weights = tl.exp2(exponents)
        return weights, tl.sum(weights, 1), tl.sum(weights * exponents, 1)
    weights = tl.exp2(exponents)
    total = tl.sum(weights, 1)
    return weights, total, total


@triton.jit
def log2_or_nothing(total, reference):
    """Return log2(total) + reference, -inf where the total is 0."""
    return tl.where(total == 0.0, _NOTHING, tl.log2(tl.where(total == 0.0, 1.0, total)) + reference)


@triton.jit
def lse_rest(total, reference, lse):
    """Return what log2(total) + reference has beyond a rounded log-sum-exp in natural units.

    fp32 keeps 1e-5 of one at 300: weights computed anew from it would be as wrong. A product that
    is not rounded takes it away again, here and in the backward pass.
    """
    is_seen = total > 0.0
    known = tl.where(is_seen, lse, 0.0)
    beyond = tl.fma(-known, LOG2_E, tl.where(is_seen, reference, 0.0))
    return beyond + tl.log2(tl.where(is_seen, total, 1.0))


@triton.jit
def with_sink(largest, total, product, sink):
    """Return (reference, total, product, decay) of rows with a sink's weight, exp2(sink), added.

    Rows that see nothing stay as they were. What was summed before is to be multiplied by decay.
    """
    is_seen = total > 0.0
    reference = tl.where(is_seen, tl.maximum(largest, sink), 0.0)
    moved = tl.where(is_seen, largest - reference, 0.0)
    decay = tl.exp2(moved)
    exponent = tl.where(is_seen, tl.maximum(sink - reference, _LEAST), _LEAST)
    weight = tl.exp2(exponent)
    product = decay * (product + total * moved) + weight * exponent
    return reference, total * decay + weight, product, decay


@triton.jit
def is_kept(seed, row_of_all, keys, dropout_p):
    """Return which weights dropout keeps, by Philox of the weight's own place.

    Args:
        seed: int64.
        row_of_all: number of the row among all rows of all heads, int64; broadcasts to the tile.
        keys: key numbers, likewise.
        dropout_p: probability of dropping.
    """
    zeros = row_of_all.to(tl.uint32) * 0 + keys.to(tl.uint32) * 0
    low = zeros + row_of_all.to(tl.uint32)
    high = zeros + (row_of_all >> 32).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, zeros + keys.to(tl.uint32), low, high, zeros)
    return tl.uint_to_uniform_float(bits) >= dropout_p
