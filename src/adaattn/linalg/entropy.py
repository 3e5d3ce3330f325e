"""Entropy of attention rows in bits: exact, sampled, and at several pooled scales.

Shape legend as in `adaattn.spec`. Sums are kept in float32 (float64 for float64 input), and
results have that dtype. Not covered: softcap, sinks and ALiBi; give their scores to
`row_entropy` instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from adaattn._constants import LOG2_E
from adaattn._dtypes import precision_of
from adaattn.errors import ArgumentError
from adaattn.linalg._checks import accumulation_dtype, seeded_generator
from adaattn.linalg._rows import (
    broadcast_mask,
    check_query_key,
    pick_rows,
    pool_tokens,
    scale_or_default,
    score_rows,
)
from adaattn.spec import Align

__all__ = [
    "EntropyEstimate",
    "MultiScaleEntropy",
    "attention_entropy",
    "attention_sparsity",
    "keys_for_mass",
    "multi_scale_entropy",
    "row_entropy",
    "sampled_attention_entropy",
    "weight_entropy",
]

# Score-sized tensors alive at once in `row_entropy`: scores, shifted scores, exponentials,
# their product, and the boolean masks counted as one.
_TEMPORARIES = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntropyEstimate:
    """Mean row entropy of each head, and how sure it is.

    Args:
        mean: [B, Hq] bits.
        standard_error: [B, Hq] bits, of sampling without replacement; 0 when every row was used.
        num_rows: query rows that it rests on.
    """

    mean: torch.Tensor
    standard_error: torch.Tensor
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiScaleEntropy:
    """Mean row entropy of each head after pooling queries and keys.

    Args:
        bits: [B, Hq, scales] mean row entropy in bits.
        normalised: [B, Hq, scales] the same divided by that of uniform rows, 0 to 1; 0 where
            no row sees more than one key.
        scales: tokens averaged into one, in the order of the last dimension.
    """

    bits: torch.Tensor
    normalised: torch.Tensor
    scales: tuple[int, ...]


def row_entropy(scores: torch.Tensor) -> torch.Tensor:
    """Return the entropy in bits of ``softmax(scores, -1)``, without forming the softmax.

    With ``z = s - max(s)`` it is ``log(sum e^z) - sum(e^z z) / sum e^z``; no term is negative,
    so nothing cancels. Keys at -inf count as absent, a row without keys gives 0, and all
    gradients are finite. NaN and +inf give NaN, as softmax does.

    Args:
        scores: [..., Sq, Sk], floating point.

    Returns:
        [..., Sq] bits.

    Example:
        >>> import torch
        >>> row_entropy(torch.zeros(1, 8)).item()
        3.0
    """
    precision_of(scores.dtype, subject="scores")
    scores = scores.to(accumulation_dtype(scores.dtype))
    if scores.shape[-1] == 0:
        return scores.sum(-1)
    seen = scores != -torch.inf
    largest = scores.detach().amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    shifted = torch.where(seen, scores, largest) - largest
    # The difference of two finite scores may overflow; 0 * -inf below would be NaN.
    shifted = shifted.clamp_min(torch.finfo(scores.dtype).min)
    weights = torch.where(seen, shifted.exp(), 0.0)
    total = weights.sum(-1)
    total = torch.where(total == 0.0, 1.0, total)
    return (total.log() - (weights * shifted).sum(-1) / total) * LOG2_E


def weight_entropy(weights: torch.Tensor) -> torch.Tensor:
    """Return the entropy in bits of rows of attention weights.

    Rows are divided by their sum first, so that the rounding of half-precision weights does
    not count. Entries that are not positive count as absent; a row of zeros gives 0; all
    gradients are finite.

    Args:
        weights: [..., Sq, Sk], floating point, not negative.

    Returns:
        [..., Sq] bits.

    Example:
        >>> import torch
        >>> weight_entropy(torch.tensor([[0.5, 0.5, 0.0, 0.0]])).item()
        1.0
    """
    precision_of(weights.dtype, subject="weights")
    weights = weights.to(accumulation_dtype(weights.dtype))
    absent = weights <= 0.0
    weights = torch.where(absent, 0.0, weights)
    total = weights.sum(-1, keepdim=True)
    share = weights / torch.where(total == 0.0, 1.0, total)
    return -(share * torch.where(share == 0.0, 1.0, share).log2()).sum(-1)


def attention_entropy(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    align: Align = Align.TOP_LEFT,
    mask: torch.Tensor | None = None,
    max_chunk_bytes: int = 64 << 20,
) -> torch.Tensor:
    """Return the exact entropy in bits of every attention row, in bounded memory.

    Rows are computed in chunks, and computed again in backward, so that no pass holds all
    Sq x Sk scores.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]; Hkv divides Hq.
        scale: factor of the scores; None is 1/sqrt(D).
        is_causal: key j is seen from position p only if j <= p.
        align: where the positions count from.
        mask: boolean (True = attend) or added to the scores; broadcastable to [B, Hq, Sq, Sk].
        max_chunk_bytes: workspace to stay below, unless a single row needs more.

    Returns:
        [B, Hq, Sq] bits; 0 for rows that see nothing.

    Raises:
        ShapeError: the shapes do not fit one another.
        DTypeError: the dtypes differ or are not floating point.
        DeviceError: the tensors are on different devices.
    """
    check_query_key(query, key)
    mask = broadcast_mask(mask, query, key)
    scale = scale_or_default(scale, query)
    batch, heads, len_q, _ = query.shape
    len_k = key.shape[-2]
    offset = len_k - len_q if align is Align.BOTTOM_RIGHT else 0
    key = key.to(accumulation_dtype(key.dtype))
    row_bytes = max(batch * heads * len_k * key.element_size() * _TEMPORARIES, 1)
    num_rows = max(1, max_chunk_bytes // row_bytes)
    recompute = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (query, key, mask)
    )
    parts = [query.new_zeros((batch, heads, 0), dtype=key.dtype)]
    for start in range(0, len_q, num_rows):
        rows = torch.arange(start, min(start + num_rows, len_q), device=query.device)
        seen_k = max(0, min(len_k, start + num_rows + offset)) if is_causal else len_k
        limits = rows + offset if is_causal else None
        chunk_mask = None if mask is None else mask[:, :, start : start + num_rows, :seen_k]
        args = (query[:, :, start : start + num_rows], key[:, :, :seen_k], scale)
        args_all = (*args, limits, chunk_mask)
        if recompute:
            parts.append(
                checkpoint(
                    _entropy_of_rows, *args_all, use_reentrant=False, preserve_rng_state=False
                )
            )
        else:
            parts.append(_entropy_of_rows(*args_all))
    return torch.cat(parts, dim=-1)


def sampled_attention_entropy(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    rows: int = 64,
    scale: float | None = None,
    is_causal: bool = False,
    align: Align = Align.TOP_LEFT,
    mask: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> EntropyEstimate:
    """Return the mean row entropy of each head, estimated from some of its rows.

    The rows are drawn without replacement, the same ones for all heads; each is computed
    exactly. The standard error holds the finite-population factor ``1 - rows / Sq``.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]; Hkv divides Hq.
        rows: query rows to compute, at least 2; all of them when Sq is smaller.
        scale: factor of the scores; None is 1/sqrt(D).
        is_causal: key j is seen from position p only if j <= p.
        align: where the positions count from.
        mask: boolean (True = attend) or added to the scores; broadcastable to [B, Hq, Sq, Sk].
        generator: draws the rows; None draws the same ones each time.

    Raises:
        ArgumentError: fewer than 2 rows are asked for.
        ShapeError: the shapes do not fit one another.
        DTypeError: the dtypes differ or are not floating point.
        DeviceError: the tensors are on different devices.

    Example:
        >>> import torch
        >>> q, k = torch.zeros(1, 4, 100, 16), torch.zeros(1, 2, 64, 16)
        >>> sampled_attention_entropy(q, k, rows=10).mean
        tensor([[6., 6., 6., 6.]])
    """
    check_query_key(query, key)
    mask = broadcast_mask(mask, query, key)
    len_q, len_k = query.shape[-2], key.shape[-2]
    offset = len_k - len_q if align is Align.BOTTOM_RIGHT else 0
    picked = pick_rows(len_q, rows, generator, query.device)
    bits = _entropy_of_rows(
        query.index_select(-2, picked),
        key.to(accumulation_dtype(key.dtype)),
        scale_or_default(scale, query),
        picked + offset if is_causal else None,
        None if mask is None else mask.index_select(-2, picked),
    )
    return _estimate(bits, len_q)


def multi_scale_entropy(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scales: Sequence[int] = (1, 2, 4, 8, 16),
    scale: float | None = None,
    is_causal: bool = False,
    align: Align = Align.TOP_LEFT,
    rows: int | None = None,
    generator: torch.Generator | None = None,
) -> MultiScaleEntropy:
    """Return each head's mean row entropy with queries and keys averaged over 1, 2, 4, ... tokens.

    A head whose entropy hardly falls from one scale to the next attends smoothly; one whose
    normalised entropy jumps picks single tokens. With causality a pooled key is seen when any
    of its tokens is seen by any query of the pooled row; at scale 1 that is the definition.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]; Hkv divides Hq.
        scales: tokens averaged into one, each at least 1; a last incomplete group is averaged
            over the tokens it has.
        scale: factor of the scores; None is 1/sqrt(D).
        is_causal: key j is seen from position p only if j <= p.
        align: where the positions count from.
        rows: pooled rows sampled at each scale, at least 2; None takes all.
        generator: draws the rows; None draws the same ones each time.

    Raises:
        ArgumentError: no scale is given, one is below 1, or rows is below 2.
        ShapeError: the shapes do not fit one another.
        DTypeError: the dtypes differ or are not floating point.
        DeviceError: the tensors are on different devices.
    """
    check_query_key(query, key)
    if not scales or min(scales) < 1:
        raise ArgumentError.got("scales", "at least one, each 1 or more", tuple(scales))
    factor = scale_or_default(scale, query)
    len_q, len_k = query.shape[-2], key.shape[-2]
    offset = len_k - len_q if align is Align.BOTTOM_RIGHT else 0
    generator = seeded_generator(generator)
    bits, normalised = [], []
    for step in scales:
        pooled_query, pooled_key = pool_tokens(query, step), pool_tokens(key, step)
        num_keys = pooled_key.shape[-2]
        num_rows = pooled_query.shape[-2]
        picked = pick_rows(num_rows, rows or max(num_rows, 2), generator, query.device)
        last_seen = ((picked + 1) * step).clamp_max(len_q) - 1 + offset
        limits = last_seen.div(step, rounding_mode="floor")
        entropy = _entropy_of_rows(
            pooled_query.index_select(-2, picked),
            pooled_key,
            factor,
            limits if is_causal else None,
            None,
        )
        seen = (limits + 1).clamp(0, num_keys) if is_causal else torch.full_like(limits, num_keys)
        uniform = seen.clamp_min(1).to(entropy.dtype).log2().sum()
        bits.append(_mean_rows(entropy))
        normalised.append(entropy.sum(-1) / torch.where(uniform == 0.0, 1.0, uniform))
    return MultiScaleEntropy(
        bits=torch.stack(bits, dim=-1),
        normalised=torch.stack(normalised, dim=-1),
        scales=tuple(scales),
    )


def keys_for_mass(weights: torch.Tensor, mass: float) -> torch.Tensor:
    """Return how many of its largest weights each row needs to reach a share of its sum.

    Args:
        weights: [..., Sq, Sk], not negative.
        mass: the share, above 0 and at most 1.

    Returns:
        [..., Sq] int64; 0 for rows of zeros.

    Raises:
        ArgumentError: ``mass`` is out of range.
    """
    if not 0.0 < mass <= 1.0:
        raise ArgumentError.got("mass", "a number in (0, 1]", mass)
    precision_of(weights.dtype, subject="weights")
    ordered = weights.detach().double().sort(dim=-1, descending=True).values
    reached = ordered.cumsum(-1)
    before = reached - ordered
    return ((before < mass * reached[..., -1:]) & (ordered > 0.0)).sum(-1)


def attention_sparsity(weights: torch.Tensor, mass: float = 0.95) -> torch.Tensor:
    """Return the mean share of keys that rows could lose and still keep ``mass`` of their weight.

    Args:
        weights: [..., Sq, Sk], not negative.
        mass: the share of each row's sum to keep, above 0 and at most 1.

    Returns:
        [...] float64, 0 for uniform rows, near 1 for rows that attend to one key.

    Raises:
        ArgumentError: ``mass`` is out of range.
    """
    kept = keys_for_mass(weights, mass).double()
    return 1.0 - _mean_rows(kept) / max(weights.shape[-1], 1)


def _entropy_of_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    limits: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return [B, Hq, R] bits for some query rows; row r sees keys up to ``limits[r]``."""
    return row_entropy(score_rows(query, key, scale, limits, mask))


def _estimate(bits: torch.Tensor, population: int) -> EntropyEstimate:
    """Return mean and standard error over the last dimension, drawn from ``population`` rows."""
    num_rows = bits.shape[-1]
    mean = _mean_rows(bits)
    error = torch.zeros_like(mean).detach()
    if num_rows < population:
        error = (bits.detach().var(-1) * (1.0 - num_rows / population) / num_rows).sqrt()
    return EntropyEstimate(mean=mean, standard_error=error, num_rows=num_rows)


def _mean_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over the last dimension; 0 when it is empty."""
    return values.sum(-1) / max(values.shape[-1], 1)
