"""Which ranks are worth trying, and which of the measured ones hold a budget."""

from typing import Final

from adaattn.spec import AttentionProblem, TensorStats

__all__ = ["candidate_ranks", "rank_errors"]

_FRACTIONS: Final = (8, 4, 2)
"""Ranks are D/8, D/4 and D/2: below, products waste their tiles; above, nothing is saved."""

_MIN_RANK: Final = 8


def candidate_ranks(problem: AttentionProblem) -> tuple[tuple[int, int], ...]:
    """Return (rank of q and k, rank of v), the smallest first; empty when D is too small."""
    width = max(problem.head_dim, problem.value_dim)
    ranks = {max(width // fraction, _MIN_RANK) for fraction in _FRACTIONS}
    usable = sorted(rank for rank in ranks if rank < min(problem.head_dim, problem.value_dim))
    return tuple((rank, rank) for rank in usable)


def rank_errors(stats: TensorStats, ranks: tuple[int, int]) -> tuple[float, ...]:
    """Return the measured error of each query head at ``ranks``; () when it was not measured."""
    return dict(stats.low_rank_errors).get(ranks, ())
