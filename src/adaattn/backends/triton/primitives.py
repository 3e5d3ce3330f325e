"""Device functions of the portable kernels: which rows and keys a tile meets, and how they lie."""

import triton
import triton.language as tl

from adaattn.backends.device.rows import load_rows
from adaattn.backends.device.scores import LOG2_E

__all__ = [
    "WEIGHT_SCALE",
    "added_rows",
    "bounds",
    "find_sequence",
    "halved_product",
    "halves",
    "head_factors",
    "head_window",
    "key_ranges",
    "least_and_most",
    "lengths_of",
    "level_of",
    "load_entries",
    "load_parts",
    "place_of",
    "power_of_two",
    "product_of_halves",
    "row_products",
    "step_of",
    "store_rows",
]

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
    return product_of_halves(weights, weights_low, high, low)


@triton.jit
def product_of_halves(left, left_low, right, right_low):
    """Return a product of numbers in halves without that of the low ones: fp32 sums."""
    product = tl.dot(left_low, right)
    product = tl.dot(left, right_low, product)
    return tl.dot(left, right, product)


@triton.jit
def load_parts(
    base_ptr,
    low_ptr,
    lifts_ptr,
    start,
    row_of_all,
    rows,
    row_stride,
    num_rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return rows of a matrix, or their high and low halves and the power of two of each.

    Args, beyond those of `load_rows`:
        base_ptr: the matrix, or its high halves.
        low_ptr: its low halves; None where it is not taken apart.
        lifts_ptr: fp32, the power of two of each of its rows; None likewise.
        start: element at which the rows begin.
        row_of_all: of each row, among those of all heads.
    """
    high = load_rows(base_ptr + start, rows, row_stride, num_rows, COLUMNS, BLOCK, MASKED)
    low = high
    lift = rows
    if low_ptr is not None:
        low = load_rows(low_ptr + start, rows, row_stride, num_rows, COLUMNS, BLOCK, MASKED)
        lift = tl.load(lifts_ptr + row_of_all, mask=rows < num_rows, other=0.0)
    return high, low, lift


@triton.jit
def row_products(rows, rows_low, lift, others, others_low, others_lift, DOT: tl.constexpr):
    """Return the products of rows [R, D] and others [N, D], of their halves where DOT says so.

    They are as right as those of the forward kernel, which has such halves, too.
    """
    if DOT == "halves":
        found = product_of_halves(rows, rows_low, tl.trans(others), tl.trans(others_low))
        found *= tl.exp2(lift)[:, None]
        found *= tl.exp2(others_lift)[None, :]
    else:
        found = tl.dot(rows, tl.trans(others), input_precision=DOT)
    return found


@triton.jit
def added_rows(total, weights, rows, rows_low, lift, DOT: tl.constexpr):
    """Return a total [R, D] with sums of rows [N, D] added, by weights [R, N].

    Tensor cores cut off what does not fit beside a sum: of halves each product begins at 0, and is
    added by an instruction that rounds.

    Args:
        total: the sum so far.
        weights: fp32.
        rows: as they are, or their high halves.
        rows_low: their low halves.
        lift: their powers of two, which go into the weights before those are taken apart: a row's
            size counts by its weight alone.
        DOT: the arithmetic.
    """
    if DOT == "halves":
        weights *= tl.exp2(lift)[None, :]
        scale, weights_lift = power_of_two(tl.max(tl.abs(weights), 1), 1)
        weights, weights_low = halves(weights * scale[:, None])
        found = product_of_halves(weights, weights_low, rows, rows_low)
        total += found * tl.exp2(weights_lift)[:, None]
    else:
        total = tl.dot(weights.to(rows.dtype), rows, total, input_precision=DOT)
    return total


@triton.jit
def store_rows(row_ptrs, numbers, is_row, COLUMNS: tl.constexpr):
    """Write rows of numbers [R, BLOCK] to where each begins, without columns beyond the last."""
    columns = tl.arange(0, numbers.shape[1])
    inside = is_row[:, None] & (columns < COLUMNS)[None, :]
    numbers = numbers.to(row_ptrs.dtype.element_ty)
    tl.store(row_ptrs[:, None] + columns[None, :], numbers, mask=inside)


@triton.jit
def step_of(stride, dilation, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """Return the elements from one row of a class to the next: int64 where WIDE."""
    step = stride // ALIGN * ALIGN
    if WIDE:
        step = step.to(tl.int64)
    return step * dilation
