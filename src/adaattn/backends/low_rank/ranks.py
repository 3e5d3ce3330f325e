"""Which ranks are worth trying, which are predicted to do, and which were measured to.

The prediction costs two spectra and no product of the sampled rows. With S the scores and
E what their best approximation of rank r leaves out, the output of a row changes to first
order by P * (E - <E>_P) V. The mean m of the values drops out of that, but not of the output:
with n keys in effect, s^2 the energy of the values around m and t^2 what rank r leaves of them,

    output^2 ~ m^2 + s^2 / n        error(r)^2 ~ ((1 - 1/n) * mean(E^2) * s^2 + t^2) / n

n is 2 to the row entropy. The prediction is averaged over the scales at which that was pooled,
since neighbours whose weights move together count as fewer. It screens; errors measured on
sampled rows decide.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from adaattn.spec import AttentionProblem, HeadMethod, LowRank, Policy, TensorStats

__all__ = [
    "SCREEN",
    "methods",
    "predicted_error",
    "predicted_ranks",
    "ranks_to_measure",
    "sketch_methods",
    "tail_ranks",
    "why_unmeasured",
]

_FRACTIONS: Final = (8, 4, 2)
"""Ranks are D/8, D/4 and D/2: below, products waste their tiles; above, nothing is saved."""

_MIN_RANK: Final = 8

_SKETCHED: Final = (64, 128, 256)

_TAILS: Final = 16
"""Spectra are read at this many ranks up to D."""

SCREEN: Final = 4.0
"""A rank is measured where its predicted error is within this many budgets.

Over planted and decaying spectra (D 64 and 128, 512 and 2048 keys, row entropies from 2 to 11
bits, with and without causality; fp32, 2026-11) measured errors below 0.3 were 0.55 to 3.2
times the predicted ones, 1.10 in the median.
"""


def methods(problem: AttentionProblem, policy: Policy) -> tuple[LowRank, ...]:
    """Return each rank of q, k and v to try, the smallest first; empty when D is too small.

    Args:
        problem: gives the head dimensions.
        policy: its ``ranks``, where it names them; else a few fractions of D.
    """
    width = max(problem.head_dim, problem.value_dim)
    ranks = policy.ranks or [max(width // fraction, _MIN_RANK) for fraction in _FRACTIONS]
    return _below(min(problem.head_dim, problem.value_dim), ranks)


def sketch_methods(problem: AttentionProblem, policy: Policy) -> tuple[LowRank, ...]:
    """Return the same for sketches: ranks for which fused kernels are made, up to D/4."""
    width = min(problem.head_dim, problem.value_dim)
    return _below(width, policy.ranks or [rank for rank in _SKETCHED if rank <= width // 4])


def _below(width: int, ranks: Iterable[int]) -> tuple[LowRank, ...]:
    """Return the ranks below a width, each for q, k and v, in ascending order."""
    usable = sorted({rank for rank in ranks if rank < width})
    return tuple(LowRank(rank=rank, value_rank=rank) for rank in usable)


def tail_ranks(problem: AttentionProblem, candidates: tuple[LowRank, ...] = ()) -> tuple[int, ...]:
    """Return the ranks at which spectra are read: the candidates, and steps of D/16 below D."""
    width = min(problem.head_dim, problem.value_dim)
    step = max(max(problem.head_dim, problem.value_dim) // _TAILS, 1)
    return tuple(sorted({method.rank for method in candidates} | set(range(step, width, step))))


def predicted_error(stats: TensorStats, rank: int, head: int) -> float:
    """Return the relative error that a rank is expected to have for one head.

    Reads the spectrum at the largest rank up to ``rank`` at which it was taken; infinite
    below the smallest.
    """
    known = [at for at, _ in stats.score_tails if at <= rank]
    if not known:
        return float("inf")
    score = dict(stats.score_tails)[known[-1]][head]
    value = dict(stats.value_tails)[known[-1]][head]
    spread = stats.value_spreads[head] if stats.value_spreads else 1.0
    entropies = [stats.entropy_bits, *(bits for _, bits in stats.pooled_entropy_bits)]
    total = 0.0
    for bits in entropies:
        share = 2.0 ** -bits[head]
        lost = (1.0 - share) * score**2 * spread + value**2
        size = 1.0 - spread + spread * share
        total += lost * share / size if size else lost
    return float((total / len(entropies)) ** 0.5)


@lru_cache(maxsize=64)
def predicted_ranks(
    stats: TensorStats, problem: AttentionProblem, budgets: tuple[float, ...]
) -> tuple[int, ...]:
    """Return the rank that each head is predicted to need for its budget; D if all of it.

    Empty when no spectrum was measured.
    """
    if not stats.score_tails:
        return ()
    ranks = [rank for rank, _ in stats.score_tails]
    full = max(problem.head_dim, problem.value_dim)
    return tuple(
        next((rank for rank in ranks if predicted_error(stats, rank, head) <= budget), full)
        for head, budget in enumerate(budgets)
    )


def ranks_to_measure(
    stats: TensorStats, candidates: tuple[LowRank, ...], budgets: tuple[float, ...]
) -> tuple[LowRank, ...]:
    """Return the ranks that may hold some head's budget, by prediction."""
    return tuple(
        method
        for method in candidates
        if any(
            predicted_error(stats, method.rank, head) <= SCREEN * budget
            for head, budget in enumerate(budgets)
            if budget > 0.0
        )
    )


def why_unmeasured(
    problem: AttentionProblem, stats: TensorStats, method: HeadMethod, budgets: tuple[float, ...]
) -> str:
    """Return what was predicted of a rank; "" without spectra."""
    if not (isinstance(method, LowRank) and stats.score_tails):
        return ""
    expected = min(predicted_error(stats, method.rank, head) for head in range(problem.num_heads))
    needed = predicted_ranks(stats, problem, budgets)
    return (
        f"predicted error {expected:.2g} or more, {max(budgets):g} allowed: heads are expected "
        f"to need rank {_span(needed)} (effective rank {_span(stats.effective_ranks)}, row "
        f"entropy {_span(stats.entropy_bits)} bits)"
    )


def _span(values: Sequence[float]) -> str:
    """Return the smallest and the largest number, once if they look alike."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
