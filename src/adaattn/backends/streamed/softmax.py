"""The softmax of written-out scores: one pass from products of queries and keys to weights.

    s = raw * scale, capped, biased, masked;   w = exp(s - lse)

A chunk of scores is fp32 [planes, GROUP * rows, keys]: the heads of a group that share a key head
stand behind one another as rows of one matrix, which is a plane. Its rows are ``pitch`` numbers
apart, a multiple of 8: what stands between, behind the last key, is read as 0.
"""

import triton
import triton.language as tl

from adaattn.backends.device.rows import times
from adaattn.backends.device.scores import (
    LOG2_E,
    exp2_sum,
    is_kept,
    log2_or_nothing,
    lse_rest,
    scores_of,
    share_kept,
    with_sink,
)

__all__ = ["NUMBERS", "entries_of", "lines_of", "on_the_grid", "softmax", "summed"]

_NOTHING = tl.constexpr(float("-inf"))
_AT_ONCE = tl.constexpr(8)

NUMBERS = (
    *("scale", "softcap", "dropout_p"),
    *("stride_mb", "stride_mh", "stride_mm", "stride_mn", "stride_slope"),
    *("num_heads", "len_q", "offset", "left", "right", "dilation"),
    *("first_plane", "first_row", "num_rows", "first_key", "high", "pitch", "num_lines"),
)
"""No value of these makes another kernel."""


@triton.jit
def lines_of(lines, num_lines, first_plane, first_row, num_rows, num_heads, GROUP: tl.constexpr):
    """Return (batch, query head, row of the head) of a chunk's lines; of the last beyond it."""
    inside = tl.minimum(lines, num_lines - 1)
    plane = first_plane + inside // (num_rows * GROUP)
    kv_heads = num_heads // GROUP
    head = plane % kv_heads * GROUP + inside // num_rows % GROUP
    return plane // kv_heads, head, first_row + inside % num_rows


@triton.jit
def entries_of(
    mask_ptr,
    batch,
    head,
    row,
    keys,
    high,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    MASK: tl.constexpr,
    MASK_STEP: tl.constexpr,
    MASK_ALIGN: tl.constexpr,
):
    """Return the mask's entries [BLOCK_M, BLOCK_N] of lines and keys; 0 where there is no mask.

    Args, beyond their names:
        MASK: 0 none, 1 bytes, 2 numbers to add.
        MASK_STEP: its stride over keys where that is 0 or 1, else 2.
        MASK_ALIGN: its other strides are multiples of it.
    """
    entries = 0.0
    if MASK != 0:
        starts = times(batch, stride_mb, MASK_ALIGN) + times(head, stride_mh, MASK_ALIGN)
        starts += times(row, stride_mm, MASK_ALIGN)
        if MASK_STEP == 2:
            steps = keys.to(tl.int64) * stride_mn
        else:
            steps = keys * MASK_STEP
        pointers = mask_ptr + starts[:, None] + steps[None, :]
        entries = tl.load(pointers, mask=(keys < high)[None, :], other=0)
    return entries


@triton.jit
def on_the_grid(positions, keys, dilation, IS_DILATED: tl.constexpr):
    """Return whether keys are whole steps of a dilation away from positions."""
    if IS_DILATED:
        found = (positions - keys) % dilation == 0
    else:
        found = keys == keys
    return found


@triton.jit
def summed(base_ptr, places, inside, part, SPLITS: tl.constexpr):
    """Return numbers that are sums of SPLITS parts, each ``part`` numbers behind the one before.

    _AT_ONCE parts are one load, so that none waits for another.
    """
    if SPLITS == 1:
        total = tl.load(base_ptr + places, mask=inside, other=0.0)
    else:
        total = tl.zeros(places.shape, tl.float32)
        within = tl.arange(0, _AT_ONCE)[:, None, None]
        for FIRST in tl.static_range(0, SPLITS, _AT_ONCE):
            splits = FIRST + within
            wanted = (splits < SPLITS) & inside[None, :, :]
            pointers = base_ptr + splits * part + places[None, :, :]
            total += tl.sum(tl.load(pointers, mask=wanted, other=0.0), 0)
    return total


@triton.jit
def block_of(
    scores_ptr,
    mask_ptr,
    part,
    starts,
    start,
    batch,
    head,
    row,
    offset,
    first_key,
    high,
    width,
    is_line,
    scale,
    softcap,
    slope,
    left,
    right,
    dilation,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_DILATED: tl.constexpr,
    MASK: tl.constexpr,
    MASK_STEP: tl.constexpr,
    MASK_ALIGN: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return scores of a block of keys [BLOCK_M, BLOCK_N], -inf of those that are not seen."""
    columns = start + tl.arange(0, BLOCK_N)
    inside = is_line[:, None] & (columns < width)[None, :]
    raw = summed(scores_ptr, starts[:, None] + columns[None, :], inside, part, SPLITS)
    keys = first_key // 16 * 16 + columns
    raw = tl.where((keys < high)[None, :], raw, 0.0)
    positions = (row + offset)[:, None]
    entries = entries_of(
        mask_ptr, batch, head, row, keys, high, stride_mb, stride_mh, stride_mm, stride_mn,
        MASK, MASK_STEP, MASK_ALIGN,
    )  # fmt: skip
    scores, _ = scores_of(
        raw,
        positions,
        keys[None, :],
        entries,
        high,
        scale,
        softcap,
        slope[:, None],
        left,
        right,
        HAS_LEFT,
        HAS_RIGHT,
        MASK,
        HAS_ALIBI,
        HAS_SOFTCAP,
        FAST_TANH,
        False,
        True,
    )
    return tl.where(on_the_grid(positions, keys[None, :], dilation, IS_DILATED), scores, _NOTHING)


@triton.jit
def store_weights(
    weights_ptr,
    starts,
    start,
    numbers,
    seed,
    row_of_all,
    first_key,
    width,
    is_line,
    dropout_p,
    BLOCK_N: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Write weights of a block of keys, without those that dropout drops."""
    columns = start + tl.arange(0, BLOCK_N)
    if HAS_DROPOUT:
        kept = is_kept(seed, row_of_all[:, None], (first_key + columns)[None, :], dropout_p)
        numbers = tl.where(kept, numbers, 0.0)
    inside = is_line[:, None] & (columns < width)[None, :]
    pointers = weights_ptr + starts[:, None] + columns[None, :]
    tl.store(pointers, numbers.to(weights_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def softmax(
    scores_ptr,
    weights_ptr,
    lse_ptr,
    row_max_ptr,
    entropy_ptr,
    lse_rest_ptr,
    mask_ptr,
    sinks_ptr,
    slopes_ptr,
    seed_ptr,
    scale,
    softcap,
    dropout_p,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_slope,
    num_heads,
    len_q,
    offset,
    left,
    right,
    dilation,
    first_plane,
    first_row,
    num_rows,
    first_key,
    high,
    pitch,
    num_lines,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    IS_HELD: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_DILATED: tl.constexpr,
    MASK: tl.constexpr,
    MASK_STEP: tl.constexpr,
    MASK_ALIGN: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Write the weights of BLOCK_M lines of a chunk, and what is asked of their rows.

    Args, beyond their names:
        scores_ptr: products of queries and keys, fp32, ``pitch`` apart from line to line.
        weights_ptr: where they go, in the input's dtype, ``pitch`` apart too; in fp32 the scores'
            own place.
        lse_ptr: fp32 [B, Hq, Sq], natural, or None; the following likewise.
        entropy_ptr: bits.
        lse_rest_ptr: what rounding took from the log-sum-exp.
        scale: factor of products before the cap; the rest of the way to units of log 2 is in
            softcap.
        offset: position of row 0 among the keys.
        first_plane: of the chunk, among the B * Hkv of all.
        first_row: of each head in the chunk.
        num_rows: of each head in the chunk.
        first_key: of the chunk, a multiple of 16.
        high: one behind its last key.
        num_lines: planes times GROUP times num_rows.
        IS_HELD: all keys are one block, which is read once.
        SPLITS: scores are sums of so many parts, each behind all lines of the one before.
        IS_CHAINED: it is launched before what it waits for has ended, and what follows likewise.
    """
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lines = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_line = lines < num_lines
    batch, head, row = lines_of(
        lines, num_lines, first_plane, first_row, num_rows, num_heads, GROUP
    )
    row_of_all = (batch.to(tl.int64) * num_heads + head) * len_q + row
    starts = times(lines, pitch, 8)
    part = times(num_lines, pitch, 8)
    width = pitch // 8 * 8
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + batch * stride_slope + head).to(tl.float32) * LOG2_E
    seed = 0
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    largest = tl.full([BLOCK_M], _NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    product = tl.zeros([BLOCK_M], tl.float32)
    if IS_HELD:
        scores = block_of(
            scores_ptr, mask_ptr, part, starts, 0, batch, head, row, offset, first_key, high,
            width, is_line, scale, softcap, slope, left, right, dilation, stride_mb, stride_mh,
            stride_mm, stride_mn, BLOCK_N, HAS_LEFT, HAS_RIGHT, IS_DILATED, MASK, MASK_STEP,
            MASK_ALIGN, HAS_ALIBI, HAS_SOFTCAP, FAST_TANH, SPLITS,
        )  # fmt: skip
        largest = tl.max(scores, 1)
        reference = tl.where(largest == _NOTHING, 0.0, largest)
        weights, total, product = exp2_sum(scores, reference, HAS_ENTROPY)
    else:
        for start in range(0, width, BLOCK_N):
            scores = block_of(
                scores_ptr, mask_ptr, part, starts, start, batch, head, row, offset, first_key,
                high, width, is_line, scale, softcap, slope, left, right, dilation, stride_mb,
                stride_mh, stride_mm, stride_mn, BLOCK_N, HAS_LEFT, HAS_RIGHT, IS_DILATED, MASK,
                MASK_STEP, MASK_ALIGN, HAS_ALIBI, HAS_SOFTCAP, FAST_TANH, SPLITS,
            )  # fmt: skip
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(new_largest == _NOTHING, 0.0, new_largest)
            _, more, more_product = exp2_sum(scores, base, HAS_ENTROPY)
            decay = tl.exp2(largest - base)
            if HAS_ENTROPY:
                moved = tl.where(total > 0.0, largest - base, 0.0)
                product = decay * (product + total * moved) + more_product
            total = total * decay + more
            largest = new_largest
        reference = tl.where(largest == _NOTHING, 0.0, largest)

    denominator = reference
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        denominator, total, product, factor = with_sink(largest, total, product, sink)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    factor *= inverse
    if HAS_DROPOUT:
        factor /= share_kept(dropout_p)
    if IS_HELD:
        store_weights(
            weights_ptr, starts, 0, weights * factor[:, None], seed, row_of_all, first_key, width,
            is_line, dropout_p, BLOCK_N, HAS_DROPOUT,
        )  # fmt: skip
    else:
        for start in range(0, width, BLOCK_N):
            scores = block_of(
                scores_ptr, mask_ptr, part, starts, start, batch, head, row, offset, first_key,
                high, width, is_line, scale, softcap, slope, left, right, dilation, stride_mb,
                stride_mh, stride_mm, stride_mn, BLOCK_N, HAS_LEFT, HAS_RIGHT, IS_DILATED, MASK,
                MASK_STEP, MASK_ALIGN, HAS_ALIBI, HAS_SOFTCAP, FAST_TANH, SPLITS,
            )  # fmt: skip
            weights = tl.exp2(scores - reference[:, None]) * factor[:, None]
            store_weights(
                weights_ptr, starts, start, weights, seed, row_of_all, first_key, width,
                is_line, dropout_p, BLOCK_N, HAS_DROPOUT,
            )  # fmt: skip

    if lse_ptr is not None:
        lse = log2_or_nothing(total, denominator) / LOG2_E
        tl.store(lse_ptr + row_of_all, lse, mask=is_line)
        if lse_rest_ptr is not None:
            tl.store(lse_rest_ptr + row_of_all, lse_rest(total, denominator, lse), mask=is_line)
    if row_max_ptr is not None:
        tl.store(row_max_ptr + row_of_all, largest / LOG2_E, mask=is_line)
    if HAS_ENTROPY:
        bits = log2_or_nothing(total, total * 0.0) - product * inverse
        tl.store(entropy_ptr + row_of_all, tl.where(total == 0.0, 0.0, bits), mask=is_line)
