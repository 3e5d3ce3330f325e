"""Matrix products of few rows and many columns, cut so that a card fills.

`partial_products` splits what is summed over: each program writes its own part, and who reads them
adds them up in order. `slice_products` splits the result's columns. fp32 is computed as three
products of tf32 numbers, added up in registers.
"""

import triton
import triton.language as tl

from adaattn.backends.device.rows import times

__all__ = ["partial_products", "slice_products"]


@triton.jit
def row_starts(
    plane,
    rows,
    num_rows,
    kv_heads,
    stride_b,
    stride_h,
    stride_m,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Return where rows of a plane begin in a tensor [B, GROUP * kv_heads, num_rows, D]: int64.

    Rows of the GROUP heads of a plane stand behind one another.
    """
    head = plane % kv_heads * GROUP + rows // num_rows
    starts = times(plane // kv_heads, stride_b, ALIGN) + times(head, stride_h, ALIGN)
    return starts + times(rows % num_rows, stride_m, ALIGN)


@triton.jit
def load_tile(base_ptr, starts, is_row, columns, num_columns, ALIGN: tl.constexpr):
    """Return columns of rows that begin anywhere; 0 beyond the matrix."""
    inside = is_row[:, None] & (columns < num_columns // ALIGN * ALIGN)[None, :]
    return tl.load(base_ptr + starts[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit(
    do_not_specialize=(
        *("stride_lb", "stride_lh", "stride_lm", "stride_rb", "stride_rh", "stride_rm"),
        *("kv_heads", "left_rows", "right_rows", "num_columns", "split_columns", "pitch", "unit"),
    )
)
def partial_products(
    left_ptr,
    right_ptr,
    parts_ptr,
    stride_lb,
    stride_lh,
    stride_lm,
    stride_rb,
    stride_rh,
    stride_rm,
    kv_heads,
    left_rows,
    right_rows,
    num_columns,
    split_columns,
    pitch,
    unit,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    DOT: tl.constexpr,
    FOLLOWS: tl.constexpr,
    IS_FOLLOWED: tl.constexpr,
):
    """Write the part of left @ right^T that one split of the columns has, of BLOCK_M lines.

    Args, beyond their names:
        left_ptr: [B, GROUP * kv_heads, left_rows, D], columns dense.
        right_ptr: [B, kv_heads, right_rows, D].
        parts_ptr: fp32 [splits, B * kv_heads, GROUP * left_rows, pitch]; zeros behind the last
            row of the right.
        split_columns: of a split, a multiple of BLOCK_D.
        unit: 1; products times it are added up in registers, not in the matrix unit.
        BLOCK_N: right_rows at least, pitch too.
        ALIGN: D and strides are multiples of it.
        FOLLOWS: it is launched before what it waits for has ended.
        IS_FOLLOWED: the same of what comes next.
    """
    if IS_FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()
    num_lines = left_rows * GROUP
    blocks = tl.cdiv(num_lines, BLOCK_M)
    plane = tl.program_id(0) // blocks
    lines = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    is_line = lines < num_lines
    left_starts = row_starts(
        plane, tl.minimum(lines, num_lines - 1), left_rows, kv_heads, stride_lb, stride_lh,
        stride_lm, GROUP, ALIGN,
    )  # fmt: skip
    right_starts = row_starts(
        plane, tl.minimum(keys, right_rows - 1), right_rows, kv_heads, stride_rb, stride_rh,
        stride_rm, 1, ALIGN,
    )  # fmt: skip
    first = tl.program_id(1) * (split_columns // BLOCK_D * BLOCK_D)
    last = tl.minimum(first + split_columns, num_columns)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        left = load_tile(left_ptr, left_starts, is_line, columns, num_columns, ALIGN)
        right = load_tile(right_ptr, right_starts, keys < right_rows, columns, num_columns, ALIGN)
        if DOT == "tf32x3":
            product = tl.dot(left, tl.trans(right), input_precision=DOT)
            total = tl.fma(product, unit, total)
        else:
            total = tl.dot(left, tl.trans(right), total)
    split = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // blocks) + plane
    starts = times(split * num_lines + lines, pitch, 8)
    inside = is_line[:, None] & (keys < pitch // 8 * 8)[None, :]
    tl.store(parts_ptr + starts[:, None] + keys[None, :], total, mask=inside)


@triton.jit(
    do_not_specialize=(
        *("stride_rb", "stride_rh", "stride_rm", "stride_ob", "stride_oh", "stride_om"),
        *("kv_heads", "line_rows", "key_rows", "num_columns", "scale", "pitch"),
    )
)
def slice_products(
    weights_ptr,
    right_ptr,
    out_ptr,
    stride_rb,
    stride_rh,
    stride_rm,
    stride_ob,
    stride_oh,
    stride_om,
    kv_heads,
    line_rows,
    key_rows,
    num_columns,
    scale,
    pitch,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    ALIGN: tl.constexpr,
    DOT: tl.constexpr,
    FOLLOWS: tl.constexpr,
    IS_FOLLOWED: tl.constexpr,
):
    """Write BLOCK_D columns of scale * weights @ right, of BLOCK_M rows of a plane.

    Args, beyond their names:
        weights_ptr: [B * kv_heads, GROUP * line_rows, pitch], zeros behind ``key_rows``.
        right_ptr: [B, kv_heads, key_rows, D]; where IS_TRANSPOSED [B, GROUP * kv_heads, line_rows,
            D], and the weights are taken transposed.
        out_ptr: [B, GROUP * kv_heads, line_rows, D], or [B, kv_heads, key_rows, D].
        BLOCK_K: rows of the right at least.
        FOLLOWS: it is launched before what it waits for, which makes the weights, has ended.
    """
    if IS_FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
    OUT_GROUP: tl.constexpr = 1 if IS_TRANSPOSED else GROUP
    RIGHT_GROUP: tl.constexpr = GROUP if IS_TRANSPOSED else 1
    out_of_head = key_rows if IS_TRANSPOSED else line_rows
    right_of_head = line_rows if IS_TRANSPOSED else key_rows
    out_rows = out_of_head * OUT_GROUP
    right_rows = right_of_head * RIGHT_GROUP
    num_lines = line_rows * GROUP
    blocks = tl.cdiv(out_rows, BLOCK_M)
    plane = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_row = rows < out_rows
    right_starts = row_starts(
        plane, tl.minimum(inner, right_rows - 1), right_of_head, kv_heads, stride_rb, stride_rh,
        stride_rm, RIGHT_GROUP, ALIGN,
    )  # fmt: skip
    # It does not depend on what is waited for.
    right = load_tile(right_ptr, right_starts, inner < right_rows, columns, num_columns, ALIGN)
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()
    width = pitch // 8 * 8
    if IS_TRANSPOSED:
        starts = times(plane * num_lines + inner, pitch, 8)
        inside = (inner < num_lines)[:, None] & (rows < width)[None, :]
        weights = tl.load(weights_ptr + starts[:, None] + rows[None, :], mask=inside, other=0.0)
        weights = tl.trans(weights)
    else:
        starts = times(plane * num_lines + rows, pitch, 8)
        inside = is_row[:, None] & (inner < width)[None, :]
        weights = tl.load(weights_ptr + starts[:, None] + inner[None, :], mask=inside, other=0.0)
    product = tl.dot(weights, right, input_precision=DOT) * scale
    out_starts = row_starts(
        plane, tl.minimum(rows, out_rows - 1), out_of_head, kv_heads, stride_ob, stride_oh,
        stride_om, OUT_GROUP, ALIGN,
    )  # fmt: skip
    inside = is_row[:, None] & (columns < num_columns // ALIGN * ALIGN)[None, :]
    pointers = out_ptr + out_starts[:, None] + columns[None, :]
    tl.store(pointers, product.to(out_ptr.dtype.element_ty), mask=inside)
