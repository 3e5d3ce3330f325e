"""Device functions of rows: where they stand, what is read of them, sums over their columns."""

import triton
import triton.language as tl

__all__ = ["load_lse", "load_number", "load_rows", "row_sums", "times"]

_NOTHING = tl.constexpr(float("-inf"))
_EVERYTHING = tl.constexpr(float("inf"))


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
def load_number(base_ptr, places, inside, OTHER: tl.constexpr):
    """Return one number of each row, OTHER of those that are not there."""
    return tl.load(base_ptr + places, mask=inside, other=OTHER)


@triton.jit
def load_lse(base_ptr, places, inside):
    """Return the log-sum-exp of rows; inf where nothing is seen, or no row is."""
    lse = load_number(base_ptr, places, inside, _EVERYTHING)
    return tl.where(lse == _NOTHING, _EVERYTHING, lse)


@triton.jit(do_not_specialize=["stride_ob", "stride_oh", "stride_om", "stride_gb", "stride_gh",
                               "stride_gm", "num_heads", "total_q"])  # fmt: skip
def row_sums(
    output_ptr,
    gradient_ptr,
    lse_gradient_ptr,
    delta_ptr,
    stride_ob,
    stride_oh,
    stride_om,
    stride_gb,
    stride_gh,
    stride_gm,
    num_heads,
    total_q,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write sum(do * o) of each row, less the gradient of its log-sum-exp: fp32 [B, Hq, Sq].

    Args, beyond their names:
        output_ptr: [B, Hq, Sq, Dv], columns dense.
        gradient_ptr: likewise, by its own strides.
        lse_gradient_ptr: fp32 [B, Hq, Sq], or None.
        delta_ptr: fp32 [B, Hq, Sq].
        BLOCK_DV: columns that are read at once.
    """
    num_tiles = tl.cdiv(total_q, BLOCK_M)
    rows = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(0) // num_tiles % num_heads
    batch = tl.program_id(0) // num_tiles // num_heads
    inside = rows < total_q
    output_ptr += times(batch, stride_ob, 1) + times(head, stride_oh, 1)
    gradient_ptr += times(batch, stride_gb, 1) + times(head, stride_gh, 1)
    rows_wide = rows.to(tl.int64)
    total = tl.zeros([BLOCK_M], tl.float32)
    for START in tl.static_range(0, DV, BLOCK_DV):
        output = load_rows(
            output_ptr + START, rows_wide, stride_om, total_q, DV - START, BLOCK_DV, True
        )
        gradient = load_rows(
            gradient_ptr + START, rows_wide, stride_gm, total_q, DV - START, BLOCK_DV, True
        )
        total += tl.sum(output.to(tl.float32) * gradient.to(tl.float32), 1)
    places = (batch * num_heads + head).to(tl.int64) * total_q + rows
    if lse_gradient_ptr is not None:
        total -= load_number(lse_gradient_ptr, places, inside, 0.0)
    tl.store(delta_ptr + places, total, mask=inside)
