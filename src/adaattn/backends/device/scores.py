"""Device functions of scores: which keys a row sees, what a score becomes, what is read off a row.

Scores are kept in units of log 2, so that exp2 needs no further product. A backward pass makes the
weights anew from the log-sum-exp:

    w = exp(s - lse);  dv = w^T do;  dw = do v^T;  ds = w (dw - delta);  dq = ds k;  dk = ds^T q

with delta = sum(do * o) of a row, less the gradient that arrives at its log-sum-exp.
"""

import triton
import triton.language as tl

from adaattn import _constants

__all__ = [
    "LOG2_E",
    "add_bias",
    "exp2_sum",
    "is_kept",
    "log2_or_nothing",
    "lse_rest",
    "scores_of",
    "seen",
    "share_kept",
    "soft_capped",
    "weights_of",
    "with_sink",
]

LOG2_E = tl.constexpr(_constants.LOG2_E)
_LEAST = tl.constexpr(-1e4)
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def seen(
    positions,
    keys,
    high,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Return which keys are seen from which positions, of shapes that broadcast to a tile."""
    ahead = keys - positions
    # In the shape of both: `ahead < high - positions` holds more registers, and spills.
    visible = (keys < high) & (ahead == ahead)
    if HAS_LEFT:
        visible = visible & (ahead >= -left)
    if HAS_RIGHT:
        visible = visible & (ahead <= right)
    return visible


@triton.jit
def soft_capped(scores, cap, FAST: tl.constexpr, MAY_BE_NONE: tl.constexpr):
    """Return cap * tanh(scores); where a cap of 0 MAY_BE_NONE, the scores as they are.

    FAST is PTX's own tanh, right to 2^-11: below what rounding scores to bf16 would cost. Else
    below 0.25 the difference of exponentials would cancel, and a series of five terms is right to
    rounding.
    """
    if FAST:
        tangent = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [scores], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))
        large = (1.0 - decay) / (1.0 + decay)
        square = scores * scores
        series = 1.0 + square * (
            -1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))
        )
        tangent = tl.where(scores < 0, -large, large)
        tangent = tl.where(tl.abs(scores) < 0.25, scores * series, tangent)
    if MAY_BE_NONE:
        return tl.where(cap > 0.0, cap * tangent, scores)
    return cap * tangent


@triton.jit
def add_bias(scores, slope, positions, keys):
    """Return scores with ALiBi: less by the slope for each step of distance.

    Args:
        scores: of a tile.
        slope: of its head, or of each row; all that follow broadcast to the tile.
        positions: of rows.
        keys: their numbers.
    """
    steps = tl.abs(positions - keys)
    return scores - slope * steps.to(tl.float32)


@triton.jit
def exp2_sum(scores, reference, HAS_ENTROPY: tl.constexpr):
    """Return exp2(scores - reference), its row sums, and the sums of that times the exponent."""
    exponents = scores - reference[:, None]
    if HAS_ENTROPY:
        exponents = tl.maximum(exponents, _LEAST)  # 0 * inf is no number
        weights = tl.exp2(exponents)
        return weights, tl.sum(weights, 1), tl.sum(weights * exponents, 1)
    weights = tl.exp2(exponents)
    total = tl.sum(weights, 1)
    return weights, total, total


@triton.jit
def log2_or_nothing(total, reference):
    """Return log2(total) + reference, -inf where the total is 0."""
    return tl.where(total == 0.0, _NOTHING, tl.log2(tl.where(total == 0.0, 1.0, total)) + reference)


@triton.jit
def lse_rest(total, reference, lse):
    """Return what log2(total) + reference has beyond a rounded log-sum-exp in natural units.

    fp32 keeps 1e-5 of one at 300: weights computed anew from it would be as wrong. A product that
    is not rounded takes it away again, here and in the backward pass.
    """
    is_seen = total > 0.0
    known = tl.where(is_seen, lse, 0.0)
    beyond = tl.fma(-known, LOG2_E, tl.where(is_seen, reference, 0.0))
    return beyond + tl.log2(tl.where(is_seen, total, 1.0))


@triton.jit
def with_sink(largest, total, product, sink):
    """Return (reference, total, product, decay) of rows with a sink's weight, exp2(sink), added.

    Rows that see nothing stay as they were. What was summed before is to be multiplied by decay.
    """
    is_seen = total > 0.0
    reference = tl.where(is_seen, tl.maximum(largest, sink), 0.0)
    moved = tl.where(is_seen, largest - reference, 0.0)
    decay = tl.exp2(moved)
    exponent = tl.where(is_seen, tl.maximum(sink - reference, _LEAST), _LEAST)
    weight = tl.exp2(exponent)
    product = decay * (product + total * moved) + weight * exponent
    return reference, total * decay + weight, product, decay


@triton.jit
def is_kept(seed, row_of_all, keys, dropout_p):
    """Return which weights dropout keeps, by Philox of the weight's own place.

    Args:
        seed: int64.
        row_of_all: number of the row among all rows of all heads, int64; broadcasts to the tile.
        keys: key numbers, likewise.
        dropout_p: probability of dropping.
    """
    zeros = row_of_all.to(tl.uint32) * 0 + keys.to(tl.uint32) * 0
    low = zeros + row_of_all.to(tl.uint32)
    high = zeros + (row_of_all >> 32).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, zeros + keys.to(tl.uint32), low, high, zeros)
    return tl.uint_to_uniform_float(bits) >= dropout_p


@triton.jit
def share_kept(dropout_p):
    """Return the share of weights that dropout keeps; where it keeps none the least that it may be.

    Weights of 0 are divided by it.
    """
    return tl.maximum(1.0 - dropout_p, 2.0**-24)


@triton.jit
def scores_of(
    raw,
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
):
    """Return (scores of a tile, tanh of the cap's argument).

    Args, beyond their names:
        raw: products of queries and keys.
        positions: of rows among keys; all that follow broadcast to the tile.
        keys: their numbers.
        entries: of the mask: booleans where MASK is 1, numbers to add where it is 2.
        high: keys from this one on are not seen, where AT_EDGE.
        scale: factor of products before the cap; the rest of the way to units of log 2 is in
            softcap.
        softcap: factor behind it.
        slope: of ALiBi, in units of log 2.
        left: keys that are seen before a position, where AT_EDGE and HAS_LEFT.
        right: behind it, likewise.
        MAY_BE_UNCAPPED: a softcap of 0 is none.
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
    return scores, tangent


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

    Args, beyond those of `scores_of`:
        lse: of rows, broadcastable to the tile; inf where nothing is seen.
        rest: what rounding took from it, in units of log 2, where HAS_REST.
    """
    scores, tangent = scores_of(
        raw,
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
        MAY_BE_UNCAPPED,
        AT_EDGE,
    )
    exponents = tl.fma(-lse, LOG2_E, scores)
    if HAS_REST:
        exponents -= rest
    return tl.exp2(exponents), tangent
