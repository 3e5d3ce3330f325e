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
    bounds,
    find_sequence,
    load_rows,
    seen,
    soft_capped,
    times,
)

__all__ = ["lengths_of", "load_lse", "load_number", "row_sums", "weights_of"]

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


@triton.jit
def lengths_of(
    tile,
    starts_ptr,
    starts_q_ptr,
    starts_k_ptr,
    total_q,
    total_k,
    left,
    right,
    dilation,
    num_sequences,
    num_tiles,
    BLOCK: tl.constexpr,
    TO_END: tl.constexpr,
    IS_DILATED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_REVERSED: tl.constexpr,
):
    """Return which rows and keys a tile of a head may meet.

    Args, beyond those of `forward`:
        tile: its number among ``num_tiles`` of a head, the classes of a dilation one after another.
        starts_ptr: of what the tile has BLOCK of: queries or keys.
        IS_REVERSED: the last tiles come first, where there are no classes and sequences.

    Returns:
        (tile of its sequence and class, class, first row and first key among all, numbers of rows
        and keys, position of row 0 among the keys, left and right), the last five in steps of the
        dilation.
    """
    start_q = 0
    start_k = 0
    len_q = total_q
    len_k = total_k
    residue = 0
    if IS_DILATED:
        per_class = num_tiles // dilation
        residue = tile // per_class
        tile = tile % per_class
    elif IS_REVERSED and not IS_PACKED:
        tile = num_tiles - 1 - tile
    if IS_PACKED:
        sequence, tile = find_sequence(starts_ptr, tile, num_sequences, BLOCK)
        start_q, len_q = bounds(starts_q_ptr + sequence, total_q)
        start_k, len_k = bounds(starts_k_ptr + sequence, total_k)
    offset = 0
    if TO_END:
        offset = len_k - len_q
    if IS_DILATED:
        # One class: rows start_q + dilation * m, keys start_k + dilation * n.
        first_row = ((residue - offset) % dilation + dilation) % dilation
        len_q = tl.maximum(len_q - first_row + dilation - 1, 0) // dilation
        len_k = tl.maximum(len_k - residue + dilation - 1, 0) // dilation
        offset = (first_row + offset - residue) // dilation
        left = left // dilation
        right = right // dilation
        start_q += first_row
        start_k += residue
    return tile, residue, start_q, start_k, len_q, len_k, offset, left, right
