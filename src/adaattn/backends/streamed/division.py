"""The kernel behind products with weights that are not yet divided by their sums."""

import triton
import triton.language as tl

from adaattn.backends.device.rows import times
from adaattn.backends.device.scores import LOG2_E, log2_or_nothing
from adaattn.backends.streamed.softmax import lines_of

__all__ = ["divide"]


@triton.jit(do_not_specialize=["num_heads", "len_q", "first_plane", "first_row", "num_rows",
                               "num_lines", "stride_ob", "stride_oh", "stride_om"])  # fmt: skip
def divide(
    products_ptr,
    totals_ptr,
    references_ptr,
    output_ptr,
    lse_ptr,
    stride_ob,
    stride_oh,
    stride_om,
    num_heads,
    len_q,
    first_plane,
    first_row,
    num_rows,
    num_lines,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the result of BLOCK_M lines of a chunk, and their log-sum-exp where it is asked for.

    Args, beyond their names:
        products_ptr: fp32 [lines, Dv].
        totals_ptr: fp32 [lines], sums of weights.
        references_ptr: likewise, what their exponents are less than scores, in units of log 2.
        output_ptr: [B, Hq, Sq, Dv], columns dense.
        lse_ptr: fp32 [B, Hq, Sq], natural, or None.
        first_plane: of the chunk, among the B * Hkv of all.
        first_row: of each head in the chunk.
        num_rows: of each head in the chunk.
        num_lines: planes times GROUP times num_rows.
        BLOCK_DV: columns that are read at once.
    """
    lines = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_line = lines < num_lines
    batch, head, row = lines_of(
        lines, num_lines, first_plane, first_row, num_rows, num_heads, GROUP
    )
    total = tl.load(totals_ptr + lines, mask=is_line, other=0.0)
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    starts = lines.to(tl.int64) * DV
    places = times(batch, stride_ob, 8) + times(head, stride_oh, 8) + times(row, stride_om, 8)
    for START in tl.static_range(0, DV, BLOCK_DV):
        columns = START + tl.arange(0, BLOCK_DV)
        inside = is_line[:, None] & (columns < DV)[None, :]
        found = tl.load(products_ptr + starts[:, None] + columns[None, :], mask=inside, other=0.0)
        found *= factor[:, None]
        pointers = output_ptr + places[:, None] + columns[None, :]
        tl.store(pointers, found.to(output_ptr.dtype.element_ty), mask=inside)
    if lse_ptr is not None:
        reference = tl.load(references_ptr + lines, mask=is_line, other=0.0)
        row_of_all = (batch.to(tl.int64) * num_heads + head) * len_q + row
        lse = log2_or_nothing(total, reference) / LOG2_E
        tl.store(lse_ptr + row_of_all, lse, mask=is_line)
