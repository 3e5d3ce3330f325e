"""fp32 rows as sums of two fp16 numbers, so that products run at fp16's rate.

    x = (high + low) * 2^lift

22 bits are kept of the largest numbers of a row, as by three tf32 products, and of those down to
2^-9 of them; what is lost of smaller ones is below 2^-32 of the largest. Each row, a key or a
value, has a power of two of its own, so that one that is hidden or far larger than others changes
nothing of theirs: fp16 holds no number from 2^16 on. Exponents go in steps of 8, so that the rows
of a head mostly share one, and the bounds of each block tell whether they do.
"""

import triton
import triton.language as tl

from adaattn.backends.device.rows import load_rows, times
from adaattn.backends.triton.primitives import halves, power_of_two

__all__ = ["halve"]

LIFT_STEP = tl.constexpr(8)
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=("stride_b", "stride_h", "stride_n", "num_heads", "num_rows"))
def halve(
    matrix_ptr,
    halves_ptr,
    lifts_ptr,
    bounds_ptr,
    stride_b,
    stride_h,
    stride_n,
    num_heads,
    num_rows,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write ROWS rows as sums of two fp16 numbers.

    Args, beyond their names:
        matrix_ptr: fp32 [B, H, num_rows, COLUMNS].
        halves_ptr: fp16 [2, B, H, num_rows, WIDTH]: high halves, then low ones; zeros behind
            COLUMNS.
        lifts_ptr: fp32 [B, H, num_rows]; -inf for a row of zeros, which any would serve.
        bounds_ptr: fp32 [2, B * H, blocks], least and largest lift of each block of rows.
    """
    blocks = tl.cdiv(num_rows, ROWS)
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    base = matrix_ptr + times(head // num_heads, stride_b, ALIGN)
    base += times(head % num_heads, stride_h, ALIGN) + times(block * ROWS, stride_n, ALIGN)
    rows = tl.arange(0, ROWS)
    left = num_rows - block * ROWS
    step = stride_n // ALIGN * ALIGN
    tile = load_rows(base, rows.to(tl.int64), step, left, COLUMNS, BLOCK, True)
    largest = tl.max(tl.abs(tile), 1)
    scale, lift = power_of_two(largest, LIFT_STEP)
    lift = tl.where(largest == 0.0, _NOTHING, lift)
    least = tl.min(tl.where(largest == 0.0, float("inf"), lift), 0)
    tl.store(bounds_ptr + tl.program_id(0), least)
    tl.store(bounds_ptr + tl.num_programs(0) + tl.program_id(0), tl.max(lift, 0))
    high, low = halves(tile * scale[:, None])
    first = head.to(tl.int64) * num_rows + block * ROWS
    tl.store(lifts_ptr + first + rows, lift, mask=rows < left)
    columns = tl.arange(0, BLOCK)
    inside = (rows < left)[:, None] & (columns < WIDTH)[None, :]
    pointers = halves_ptr + first * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    plane = (tl.num_programs(0) // blocks).to(tl.int64) * num_rows * WIDTH
    tl.store(pointers, high, mask=inside)
    tl.store(pointers + plane, low, mask=inside)
