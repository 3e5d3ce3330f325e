"""The one rule that decides whether numbers are right, and the one for approximations.

Same mathematics, other code: the error against the float64 oracle is at most twice the
error that eager PyTorch makes in the same dtype, plus a band for rounding. Errors are
taken per head, so that a wrong head cannot hide behind another's larger numbers. For a
head whose numbers, or the terms that cancel in them, reach a magnitude M, with u the unit
roundoff of the dtype, a the one it accumulates in and n summands,

    bound = 2 * max |eager - exact| + (2 u + a sqrt(n)) * M

The band is what two roundings of the result, and the random walk of a differently
ordered sum, may add even where eager PyTorch happens to be lucky. For float64 the oracle
rounds as much as what it judges, so the band counts twice.

Deliberate approximation: the relative Frobenius error of each head is within its budget.
"""

import math
from dataclasses import dataclass, fields, replace

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.interface import Result

__all__ = [
    "Comparison",
    "assert_matches",
    "assert_results_match",
    "assert_within_budget",
    "compare",
    "head_errors",
]

_YARDSTICK_FACTOR = 2.0
_ROUNDINGS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a tensor is from the oracle.

    Args:
        problems: one sentence for each thing that is wrong; empty when all is right.
        worst_index: where the error is largest relative to its bound.
        worst_error: the absolute error there.
        worst_bound: the error allowed there.
        share_failing: share of elements beyond their bound.
    """

    problems: tuple[str, ...] = ()
    worst_index: tuple[int, ...] = ()
    worst_error: float = 0.0
    worst_bound: float = 0.0
    share_failing: float = 0.0


def compare(
    actual: torch.Tensor,
    reference: torch.Tensor,
    yardstick: torch.Tensor,
    *,
    summands: int = 1,
    terms: torch.Tensor | None = None,
) -> Comparison:
    """Return how ``actual`` compares with the oracle, judged by eager PyTorch's own error.

    Args:
        actual: the tensor under test.
        reference: the oracle's, float64.
        yardstick: eager PyTorch's, in the dtype of ``actual``.
        summands: terms in the longest sum behind an element; 1 allows for no reordering.
        terms: size of the terms behind each element, where they may cancel; None if not.
    """
    problems = []
    if actual.shape != reference.shape:
        problems.append(f"shape: expected {tuple(reference.shape)}, got {tuple(actual.shape)}")
    if actual.dtype != yardstick.dtype:
        problems.append(f"dtype: expected {yardstick.dtype}, got {actual.dtype}")
    if reference.dtype is not torch.float64:
        problems.append(f"reference: expected torch.float64, got {reference.dtype}")
    if problems or not actual.numel():
        return Comparison(problems=tuple(problems))

    got, exact, eager = (x.detach().double().cpu() for x in (actual, reference, yardstick))
    rounded = exact.to(actual.dtype).double()
    strange = ~torch.isfinite(rounded)
    same = torch.where(rounded.isnan(), got.isnan(), got == rounded)
    wrong = torch.where(strange, ~same, ~torch.isfinite(got))
    error = (got - exact).abs().masked_fill(strange | wrong, 0.0)
    sizes = exact if terms is None else torch.maximum(exact.abs(), terms.detach().double().cpu())
    magnitude = _head_maximum(sizes.abs().masked_fill(strange, 0.0))
    bound = _eager_bound(exact, eager, strange) + _band(actual.dtype, summands) * magnitude
    error = error.masked_fill(wrong, math.inf)
    failing = error > bound
    excess = torch.where(error > 0, error / bound.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    worst = int(excess.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), exact.shape))
    comparison = Comparison(
        worst_index=index,
        worst_error=float(error[index]),
        worst_bound=float(bound[index]),
        share_failing=float(failing.double().mean()),
    )
    if not failing.any():
        return comparison
    sentence = (
        f"{comparison.share_failing:.3%} of {exact.numel()} elements are beyond their bound; "
        f"worst at {index}: expected {float(exact[index]):.9g}, got {float(got[index]):.9g}, "
        f"error {comparison.worst_error:.3g}, bound {comparison.worst_bound:.3g}"
    )
    return replace(comparison, problems=(sentence,))


def assert_matches(
    actual: torch.Tensor,
    reference: torch.Tensor,
    yardstick: torch.Tensor,
    *,
    name: str = "tensor",
    summands: int = 1,
    terms: torch.Tensor | None = None,
) -> None:
    """Raise AssertionError unless ``actual`` is as right as eager PyTorch is.

    Args:
        actual: the tensor under test.
        reference: the oracle's, float64.
        yardstick: eager PyTorch's, in the dtype of ``actual``.
        name: what the message calls it.
        summands: terms in the longest sum behind an element; 1 allows for no reordering.
        terms: size of the terms behind each element, where they may cancel; None if not.
    """
    problems = compare(actual, reference, yardstick, summands=summands, terms=terms).problems
    if problems:
        raise AssertionError("\n".join(f"{name}: {problem}" for problem in problems))


def assert_results_match(
    actual: Result,
    reference: Result,
    yardstick: Result,
    *,
    summands: int = 1,
    lse: torch.Tensor | None = None,
) -> None:
    """Raise AssertionError unless the output and every auxiliary output match.

    Args:
        actual: what the executor under test returned.
        reference: the oracle's, float64.
        yardstick: eager PyTorch's, in the dtype of ``actual``.
        summands: terms in the longest sum behind an element.
        lse: the oracle's log-sum-exp [B, H, Sq]: an entropy is it less a mean of scores, so that
            rounding is of its size where entropies are nearly 0. None holds them to the largest of
            all heads of a sequence.
    """
    for field in fields(Result):
        got, exact, eager = (getattr(r, field.name) for r in (actual, reference, yardstick))
        if (got is None) != (exact is None):
            state = "a tensor" if got is None else "None"
            raise AssertionError(f"{field.name}: expected {state}, got the other")
        if got is not None and field.name == "dropped_mass":
            if (got > 1.0).any():
                raise AssertionError(f"dropped_mass: expected at most 1, got {float(got.max())}")
            got = torch.where(got > exact, exact.to(got.dtype), got)  # a bound may be larger
        if got is not None:
            terms = None
            if field.name == "entropy" and lse is not None:
                terms = LOG2_E * lse.abs().masked_fill(~torch.isfinite(lse), 0.0)[..., None]
                got, exact, eager = (item[..., None] for item in (got, exact, eager))
            assert_matches(got, exact, eager, name=field.name, summands=summands, terms=terms)


def head_errors(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the relative Frobenius error of each head: [B, H] float64.

    A head whose exact output is zero has error 0 if the actual one is zero too, else inf.

    Args:
        actual: [B, H, S, Dv].
        exact: the same shape, preferably float64.
    """
    got, truth = actual.detach().double(), exact.detach().double()
    error = torch.linalg.vector_norm(got - truth, dim=(-2, -1))
    size = torch.linalg.vector_norm(truth, dim=(-2, -1))
    return torch.where(error == 0, 0.0, error / size)


def assert_within_budget(actual: torch.Tensor, exact: torch.Tensor, budget: float) -> None:
    """Raise AssertionError unless each head's relative Frobenius error keeps the budget.

    Rounding the output to its dtype may add at most its unit roundoff, which is allowed.

    Args:
        actual: [B, H, S, Dv], what an approximating executor returned.
        exact: the same shape, the oracle's float64 output.
        budget: the allowed error.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"shape: expected {tuple(exact.shape)}, got {tuple(actual.shape)}")
    errors = head_errors(actual, exact)
    allowed = budget + _roundoff(actual.dtype)
    within = errors <= allowed
    if not bool(within.all()):
        worst = torch.nan_to_num(errors, nan=math.inf).flatten().argmax()
        index = tuple(int(i) for i in torch.unravel_index(worst, errors.shape))
        raise AssertionError(
            f"head {index}: expected a relative error of at most {allowed:.3g}, "
            f"got {float(errors[index]):.3g}; {int((~within).sum())} of {errors.numel()} heads fail"
        )


def _eager_bound(exact: torch.Tensor, eager: torch.Tensor, strange: torch.Tensor) -> torch.Tensor:
    """Return twice the error of eager PyTorch in each head, in the shape of ``exact``."""
    error = (eager - exact).abs()
    error = error.masked_fill(strange | ~torch.isfinite(error), 0.0)
    return (_YARDSTICK_FACTOR * _head_maximum(error)).expand_as(exact)


def _band(dtype: torch.dtype, summands: int) -> float:
    """Return the relative error that rounding alone may make."""
    roundoff = _roundoff(dtype)
    accumulation = min(roundoff, _roundoff(torch.float32))
    band = _ROUNDINGS * roundoff + accumulation * math.sqrt(summands)
    return 2 * band if dtype is torch.float64 else band


def _head_maximum(values: torch.Tensor) -> torch.Tensor:
    """Return the maximum over the last two dimensions, or over all of a small tensor."""
    dims = (-2, -1) if values.ndim > 2 else tuple(range(values.ndim))
    return values.amax(dims, keepdim=True) if dims else values


def _roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff: half the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps) / 2
