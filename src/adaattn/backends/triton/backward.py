"""The portable backward kernels: gradients of what `forward` computed, from its log-sum-exp.

    w = exp(s - lse);  dv = w^T do;  dw = do v^T;  ds = w (dw - delta);  dq = ds k;  dk = ds^T q

with delta = sum(do * o) of a row, less the gradient that arrives at its log-sum-exp. One kernel has
the gradients of a block of keys, of all heads and rows that see it; one has those of a block of
rows; one has those of an added mask. Nothing is added up by atomics: equal inputs give equal bits.
Scores are computed anew in each, as in `forward`, and nothing of the size of the scores is stored.

Positions, classes of a dilation and lists are those of `forward`. Tiles of the first kernel are
[keys, rows], of the others [rows, keys].
"""

import triton
import triton.language as tl

from adaattn.backends.triton.primitives import (
    LOG2_E,
    add_bias,
    load_rows,
    seen,
    soft_capped,
    times,
)

__all__ = ["load_lse", "load_number", "row_sums", "step_of", "weights_of"]

_NOTHING = tl.constexpr(float("-inf"))
_EVERYTHING = tl.constexpr(float("inf"))


@triton.jit
def weights_of(
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
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    MAY_BE_UNCAPPED: tl.constexpr,
    AT_EDGE: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Return (weights of the softmax, tanh of the cap's argument) of a tile.

    Args, beyond those of `forward`:
        raw: products of queries and keys.
        lse: of rows, broadcastable to the tile; inf where nothing is seen.
        rest: what rounding took from it, in units of log 2, where HAS_REST.
        positions: of rows among keys, likewise.
        keys: their numbers, likewise.
        entries: of the mask, likewise.
        high: keys from this one on are not seen, where AT_EDGE.
    """
    scores = raw * scale
    tangent = scores
    if HAS_SOFTCAP:
        scores = soft_capped(scores, softcap, FAST_TANH, MAY_BE_UNCAPPED)
        if MAY_BE_UNCAPPED:
            tangent = tl.where(softcap > 0.0, scores / tl.where(softcap > 0.0, softcap, 1.0), 0.0)
        else:
            tangent = scores / softcap
    if HAS_ALIBI:
        scores = add_bias(scores, slope, positions, keys)
    if MASK == 1:
        scores = tl.where(entries != 0, scores, _NOTHING)
    elif MASK == 2:
        scores += entries.to(tl.float32) * LOG2_E
    if AT_EDGE:
        visible = seen(positions, keys, high, left, right, HAS_LEFT, HAS_RIGHT)
        scores = tl.where(visible, scores, _NOTHING)
    exponents = tl.fma(-lse, LOG2_E, scores)
    if HAS_REST:
        exponents -= rest
    return tl.exp2(exponents), tangent


@triton.jit
def step_of(stride, dilation, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """Return the elements from one row of a class to the next: int64 where WIDE."""
    step = stride // ALIGN * ALIGN
    if WIDE:
        step = step.to(tl.int64)
    return step * dilation


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
    """
    num_tiles = tl.cdiv(total_q, BLOCK_M)
    rows = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(0) // num_tiles % num_heads
    batch = tl.program_id(0) // num_tiles // num_heads
    inside = rows < total_q
    output_ptr += times(batch, stride_ob, 1) + times(head, stride_oh, 1)
    gradient_ptr += times(batch, stride_gb, 1) + times(head, stride_gh, 1)
    output = load_rows(output_ptr, rows.to(tl.int64), stride_om, total_q, DV, BLOCK_DV, True)
    gradient = load_rows(gradient_ptr, rows.to(tl.int64), stride_gm, total_q, DV, BLOCK_DV, True)
    total = tl.sum(output.to(tl.float32) * gradient.to(tl.float32), 1)
    places = (batch * num_heads + head).to(tl.int64) * total_q + rows
    if lse_gradient_ptr is not None:
        total -= load_number(lse_gradient_ptr, places, inside, 0.0)
    tl.store(delta_ptr + places, total, mask=inside)
