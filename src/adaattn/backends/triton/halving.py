"""fp32 matrices as sums of two fp16 numbers, so that products run at fp16's rate.

    x = (high + low) * inverse

22 bits of each number are kept, as by three tf32 products. One power of two for each head brings
its largest number to 2^14: fp16 holds no number from 2^16 on.
"""

import triton
import triton.language as tl

from adaattn.backends.triton.primitives import halves, load_rows, power_of_two, times

__all__ = ["halve", "largest_of_blocks"]


@triton.jit(do_not_specialize=("stride_b", "stride_h", "stride_n", "num_heads", "num_rows"))
def largest_of_blocks(
    matrix_ptr,
    largest_ptr,
    stride_b,
    stride_h,
    stride_n,
    num_heads,
    num_rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write the largest magnitude of ROWS rows of a head, fp32 [B, H, blocks].

    Args, beyond their names:
        matrix_ptr: fp32 [B, H, num_rows, COLUMNS].
    """
    head = tl.program_id(0)
    block = tl.program_id(1)
    base = matrix_ptr + times(head // num_heads, stride_b, ALIGN)
    base += times(head % num_heads, stride_h, ALIGN) + times(block * ROWS, stride_n, ALIGN)
    step = stride_n // ALIGN * ALIGN
    tile = load_rows(base, tl.arange(0, ROWS), step, num_rows - block * ROWS, COLUMNS, BLOCK, True)
    largest = tl.max(tl.max(tl.abs(tile), 1), 0)
    tl.store(largest_ptr + head.to(tl.int64) * tl.num_programs(1) + block, largest)


@triton.jit(do_not_specialize=("stride_b", "stride_h", "stride_n", "num_heads", "num_rows"))
def halve(
    matrix_ptr,
    halves_ptr,
    inverses_ptr,
    largest_ptr,
    stride_b,
    stride_h,
    stride_n,
    num_heads,
    num_rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write ROWS rows as sums of two fp16 numbers, scaled by a power of two for each head.

    Args, beyond their names:
        matrix_ptr: fp32 [B, H, num_rows, COLUMNS].
        halves_ptr: fp16 [2, B, H, num_rows, COLUMNS]: high halves, then low ones.
        inverses_ptr: fp32 [B, H]; what undoes the scale.
        largest_ptr: of `largest_of_blocks`.
        BLOCKS: a power of two, as many as there are blocks at least.
    """
    head = tl.program_id(0)
    block = tl.program_id(1)
    blocks = tl.arange(0, BLOCKS)
    largest = tl.load(
        largest_ptr + head.to(tl.int64) * tl.num_programs(1) + blocks,
        mask=blocks < tl.num_programs(1),
        other=0.0,
    )
    scale, inverse = power_of_two(tl.max(largest, 0))
    if block == 0:
        tl.store(inverses_ptr + head, inverse)
    base = matrix_ptr + times(head // num_heads, stride_b, ALIGN)
    base += times(head % num_heads, stride_h, ALIGN) + times(block * ROWS, stride_n, ALIGN)
    step = stride_n // ALIGN * ALIGN
    rows = tl.arange(0, ROWS)
    left = num_rows - block * ROWS
    high, low = halves(load_rows(base, rows, step, left, COLUMNS, BLOCK, True) * scale)
    columns = tl.arange(0, BLOCK)
    inside = (rows < left)[:, None] & (columns < COLUMNS)[None, :]
    place = (head.to(tl.int64) * num_rows + block * ROWS) * COLUMNS
    pointers = halves_ptr + place + rows[:, None] * COLUMNS + columns[None, :]
    plane = tl.num_programs(0).to(tl.int64) * num_rows * COLUMNS
    tl.store(pointers, high, mask=inside)
    tl.store(pointers + plane, low, mask=inside)
