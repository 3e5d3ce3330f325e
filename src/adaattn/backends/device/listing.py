"""Which blocks of a boolean mask hide nothing at all, listed on the device.

A caller's mask is mostly a pattern: causal order beside padding, documents, a window. Tiles of
scores that it hides whole need not be computed.
"""

import triton
import triton.language as tl

__all__ = ["list_blocks"]

_NUMBERS = (
    "stride_b",
    "stride_m",
    "stride_n",
    "num_lines",
    "num_others",
    "width",
)


@triton.jit(do_not_specialize=_NUMBERS)
def list_blocks(
    mask_ptr,
    counts_ptr,
    indices_ptr,
    stride_b,
    stride_m,
    stride_n,
    num_lines,
    num_others,
    width,
    LINES: tl.constexpr,
    OTHERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BY_ROWS: tl.constexpr,
    IS_DENSE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """List the blocks in which a block of lines sees anything, in rising order.

    Lines are the mask's rows and others its columns, or the other way round. One program for each
    block of lines and sequence.

    Args:
        mask_ptr: bytes, 0 where a key is hidden, [B, rows, columns].
        counts_ptr: int32 [B, blocks of lines], how many are listed.
        indices_ptr: int32 [B, blocks of lines, width], their numbers.
        stride_b: of the mask, and so the two that follow.
        stride_m: from row to row.
        stride_n: from column to column.
        num_lines: how many lines there are.
        num_others: how many others.
        width: of a list.
        LINES: of a block.
        OTHERS: of a block.
        AT_ONCE: others that are read at once, a multiple of ``OTHERS``.
        BY_ROWS: lines are rows.
        IS_DENSE: columns are adjacent.
        ALIGNMENT: what the mask's address and strides but the last are multiples of.
    """
    block = tl.program_id(0)
    sequence = tl.program_id(1)
    list_number = sequence * tl.num_programs(0) + block
    lines = block * LINES + tl.arange(0, LINES)
    others = tl.arange(0, AT_ONCE)
    step_m = tl.multiple_of(stride_m.to(tl.int64), ALIGNMENT)
    start_ptr = mask_ptr + sequence * tl.multiple_of(stride_b.to(tl.int64), ALIGNMENT)
    listed_ptr = indices_ptr + list_number.to(tl.int64) * width
    count = 0
    for first in range(0, num_others, AT_ONCE):
        if BY_ROWS:
            rows = lines[:, None]
            columns = first + others[None, :]
            is_there = (rows < num_lines) & (columns < num_others)
        else:
            rows = first + others[:, None]
            columns = lines[None, :]
            is_there = (rows < num_others) & (columns < num_lines)
        places = columns if IS_DENSE else columns * stride_n.to(tl.int64)
        seen = tl.load(start_ptr + rows * step_m + places, mask=is_there, other=0) != 0
        of_others = tl.max(seen.to(tl.int32), 0 if BY_ROWS else 1)
        found = tl.max(tl.reshape(of_others, (AT_ONCE // OTHERS, OTHERS)), 1)
        numbers = first // OTHERS + tl.arange(0, AT_ONCE // OTHERS)
        tl.store(listed_ptr + count + tl.cumsum(found, 0) - 1, numbers, mask=found != 0)
        count += tl.sum(found, 0)
    tl.store(counts_ptr + list_number, count)
