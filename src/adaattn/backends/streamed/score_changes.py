"""The gradients of written-out scores, and the weights again, from the log-sum-exp.

    w = exp(s - lse);   ds = w (dw - delta)

Chunks lie as in `softmax`; every score is taken by itself.
"""

import triton
import triton.language as tl

from adaattn.backends.device.rows import load_lse, load_number, times
from adaattn.backends.device.scores import LOG2_E, is_kept, share_kept, weights_of
from adaattn.backends.streamed.softmax import (
    NUMBERS,
    entries_of,
    lines_of,
    on_the_grid,
    summed,
)

__all__ = ["score_changes"]


@triton.jit(do_not_specialize=NUMBERS)
def score_changes(
    scores_ptr,
    products_ptr,
    weights_ptr,
    changes_ptr,
    lse_ptr,
    delta_ptr,
    lse_gradient_ptr,
    lse_rest_ptr,
    mask_ptr,
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
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_DILATED: tl.constexpr,
    MASK: tl.constexpr,
    MASK_STEP: tl.constexpr,
    MASK_ALIGN: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    SPLITS: tl.constexpr,
    PRODUCT_SPLITS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Write weights and gradients of BLOCK_N scores of BLOCK_M lines of a chunk.

    Args, beyond those of `softmax`:
        products_ptr: products of the output's gradient and values, fp32.
        weights_ptr: where weights go, as dropout left them; in fp32 the scores' own place.
        changes_ptr: where gradients of scores go, less the factor of products; in fp32 the
            products' own place.
        lse_ptr: fp32 [B, Hq, Sq]; the following likewise.
        delta_ptr: sums over columns of output and its gradient, less the log-sum-exp's gradient.
            Where not HAS_DELTA they are written, from all keys of a line, which are one tile then.
        lse_gradient_ptr: the log-sum-exp's gradient, or None.
        PRODUCT_SPLITS: products are sums of so many parts, as scores of SPLITS.
    """
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    width = pitch // 8 * 8
    tiles = tl.maximum(tl.cdiv(width, BLOCK_N), 1)
    lines = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_line = lines < num_lines
    inside = is_line[:, None] & (columns < width)[None, :]
    batch, head, row = lines_of(
        lines, num_lines, first_plane, first_row, num_rows, num_heads, GROUP
    )
    row_of_all = (batch.to(tl.int64) * num_heads + head) * len_q + row
    places = times(lines, pitch, 8)[:, None] + columns[None, :]
    keys = (first_key // 16 * 16 + columns)[None, :]
    positions = (row + offset)[:, None]
    lse = load_lse(lse_ptr, row_of_all, is_line)[:, None]
    rest = lse
    if lse_rest_ptr is not None:
        rest = load_number(lse_rest_ptr, row_of_all, is_line, 0.0)[:, None]
    part = times(num_lines, pitch, 8)
    slope = lse
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + batch * stride_slope + head).to(tl.float32)
        slope = (slopes * LOG2_E)[:, None]
    entries = entries_of(
        mask_ptr, batch, head, row, first_key // 16 * 16 + columns, high, stride_mb, stride_mh,
        stride_mm, stride_mn, MASK, MASK_STEP, MASK_ALIGN,
    )  # fmt: skip
    raw = tl.where(keys < high, summed(scores_ptr, places, inside, part, SPLITS), 0.0)
    weights, tangent = weights_of(
        raw,
        lse,
        rest,
        positions,
        keys,
        entries,
        high,
        scale,
        softcap,
        slope,
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
        lse_rest_ptr is not None,
    )
    weights = tl.where(on_the_grid(positions, keys, dilation, IS_DILATED), weights, 0.0)
    change = summed(products_ptr, places, inside, part, PRODUCT_SPLITS)
    change = tl.where(keys < high, change, 0.0)
    left_over = weights
    if HAS_DROPOUT:
        inverse = 1.0 / share_kept(dropout_p)
        kept = is_kept(tl.load(seed_ptr), row_of_all[:, None], keys, dropout_p)
        change = tl.where(kept, change * inverse, 0.0)
        left_over = tl.where(kept, weights * inverse, 0.0)
    if HAS_DELTA:
        delta = load_number(delta_ptr, row_of_all, is_line, 0.0)
    else:
        delta = tl.sum(weights * change, 1)
        if lse_gradient_ptr is not None:
            delta -= load_number(lse_gradient_ptr, row_of_all, is_line, 0.0)
        tl.store(delta_ptr + row_of_all, delta, mask=is_line)
    change = weights * (change - delta[:, None])
    if HAS_SOFTCAP:
        change *= 1.0 - tangent * tangent
    tl.store(weights_ptr + places, left_over.to(weights_ptr.dtype.element_ty), mask=inside)
    tl.store(changes_ptr + places, change.to(changes_ptr.dtype.element_ty), mask=inside)
