"""Adds up the parts that programs computed over different keys of the same rows."""

import triton
import triton.language as tl

from adaattn.backends.device.scores import LOG2_E, log2_or_nothing, lse_rest, with_sink

__all__ = ["combine"]

_NOTHING = tl.constexpr(float("-inf"))


@triton.jit(
    do_not_specialize=(
        *("stride_ob", "stride_oh", "stride_om"),
        *("num_splits", "num_heads", "len_q", "num_rows"),
    )
)
def combine(
    output_ptr,
    lse_ptr,
    row_max_ptr,
    entropy_ptr,
    parts_ptr,
    sums_ptr,
    maxima_ptr,
    products_ptr,
    sinks_ptr,
    lse_rest_ptr,
    stride_ob,
    stride_oh,
    stride_om,
    num_splits,
    num_heads,
    len_q,
    num_rows,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ROW_MAX: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Add the parts of one row: the weighted sum of what `forward` wrote for each split.

    Args, beyond their names:
        parts_ptr: fp32 [splits, B, Hq, Sq, Dv], unnormalised; the others [splits, B, Hq, Sq].
        num_rows: B * Hq * Sq.
        SPLITS: a power of two, num_splits at least.
        FOLLOWS: it is launched before `forward` has ended.
    """
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    is_split = splits < num_splits
    places = splits.to(tl.int64) * num_rows + row
    maxima = tl.load(maxima_ptr + places, mask=is_split, other=_NOTHING)
    sums = tl.load(sums_ptr + places, mask=is_split, other=0.0)
    largest = tl.max(maxima, 0)
    reference = tl.where(largest == _NOTHING, 0.0, largest)
    factors = tl.exp2(maxima - reference)
    total = tl.sum(sums * factors, 0)
    columns = tl.arange(0, BLOCK_DV)
    inside = is_split[:, None] & (columns < DV)[None, :]
    parts = tl.load(parts_ptr + places[:, None] * DV + columns[None, :], mask=inside, other=0.0)
    output = tl.sum(parts * factors[:, None], 0)
    product = total * 0.0
    if HAS_ENTROPY:
        products = tl.load(products_ptr + places, mask=is_split, other=0.0)
        moved = tl.where(sums > 0.0, maxima - reference, 0.0)
        product = tl.sum(factors * (products + sums * moved), 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + (row // len_q) % num_heads).to(tl.float32) * LOG2_E
        reference, total, product, decay = with_sink(largest, total, product, sink)
        output = output * decay
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    place = row // len_q // num_heads * stride_ob + (row // len_q) % num_heads * stride_oh
    place += row % len_q * stride_om
    result = (output * inverse).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + place + columns, result, mask=columns < DV)
    if HAS_LSE:
        lse = log2_or_nothing(total, reference) / LOG2_E
        tl.store(lse_ptr + row, lse)
        if lse_rest_ptr is not None:
            tl.store(lse_rest_ptr + row, lse_rest(total, reference, lse))
    if HAS_ROW_MAX:
        tl.store(row_max_ptr + row, largest / LOG2_E)
    if HAS_ENTROPY:
        bits = log2_or_nothing(total, total * 0.0) - product * inverse
        tl.store(entropy_ptr + row, tl.where(total == 0.0, 0.0, bits))
