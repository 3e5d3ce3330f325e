"""Losses and divergences of next-token predictions, in bounded memory.

Shape legend: ``N`` scored tokens, ``V`` vocabulary.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["LogitComparison", "compare_logits", "paired_summary", "quartiles", "token_losses"]

# Above this difference of two logits the weight of a token that underflowed in fp32 may no
# longer be negligible; such rows are computed in float64. exp(16 - 103) is far below an ulp.
_SAFE_DIFFERENCE = 16.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitComparison:
    """One run against the exact run, token by token.

    Args:
        loss_difference: [N] float64, loss of the run minus loss of the exact run, in nat.
        divergence: [N] float64, KL(exact || run) over the vocabulary, in nat.
    """

    loss_difference: torch.Tensor
    divergence: torch.Tensor


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each target in nat, [N] float64.

    Args:
        logits: [N, V]; half precision is computed in float32.
        targets: [N] int64.

    Example:
        >>> import torch
        >>> round(token_losses(torch.zeros(1, 4), torch.tensor([2])).item(), 4)
        1.3863
    """
    scores = _at_least_fp32(logits)
    picked = scores.gather(-1, targets[:, None])[:, 0]
    return (torch.logsumexp(scores, -1) - picked).double()


def compare_logits(
    exact: torch.Tensor, others: Iterable[torch.Tensor], targets: torch.Tensor
) -> tuple[LogitComparison, ...]:
    """Return loss differences and divergences of several runs against one.

    With ``d = x - y`` (exact minus other logits) and ``p = softmax(x)``, the normalisers
    differ by ``c = log(sum p e^-d) = log1p(sum p expm1(-d))`` and KL is ``sum p d + c``. That
    keeps differences of 1e-9 nat in float32, where two separate log-softmaxes would leave
    noise of 1e-6.

    Args:
        exact: [N, V] logits of the exact run.
        others: [N, V] logits of each other run; a generator keeps one alive at a time.
        targets: [N] int64.
    """
    scores = _at_least_fp32(exact)
    weights = torch.softmax(scores, -1)
    return tuple(_compare(scores, weights, _at_least_fp32(other), targets) for other in others)


def paired_summary(differences: torch.Tensor) -> tuple[float, float, float]:
    """Return mean, standard error of the mean, and mean absolute value of differences.

    Args:
        differences: [N] float64; the standard error is 0 for fewer than two.
    """
    if differences.numel() == 0:
        return 0.0, 0.0, 0.0
    count = differences.numel()
    error = float(differences.std()) / count**0.5 if count > 1 else 0.0
    return float(differences.mean()), error, float(differences.abs().mean())


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile of at least one value.

    Example:
        >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0])
        (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _compare(
    scores: torch.Tensor, weights: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
) -> LogitComparison:
    index = targets[:, None]
    difference = scores - other
    picked = difference.gather(-1, index)[:, 0].double()
    largest = torch.maximum(difference.amax(-1), -difference.amin(-1))
    mean = torch.linalg.vecdot(weights, difference).double()
    shifted = difference.neg_().expm1_()
    normaliser = torch.log1p(torch.linalg.vecdot(weights, shifted).double())
    loss = normaliser + picked
    divergence = mean + normaliser
    # A NaN (both logits at minus infinity) also lands here.
    unsafe = ~(largest <= _SAFE_DIFFERENCE)
    if bool(unsafe.any()):
        loss[unsafe], divergence[unsafe] = _compare_in_float64(
            scores[unsafe], other[unsafe], targets[unsafe]
        )
    return LogitComparison(loss_difference=loss, divergence=divergence)


def _compare_in_float64(
    scores: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.log_softmax(scores.double(), -1)
    second = torch.log_softmax(other.double(), -1)
    weights = first.exp()
    terms = torch.where(weights > 0, weights * (first - second), 0.0)
    index = targets[:, None]
    loss = (first.gather(-1, index) - second.gather(-1, index))[:, 0]
    return loss, terms.sum(-1)


def _at_least_fp32(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
