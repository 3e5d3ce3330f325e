"""What entropies and spectra say of every rank at once, before any rank is tried.

Two Gram matrices and their eigenvalues give, for each rank, how much of the scores and of the
values it leaves out; `adaattn.planning.rank` turns that and the entropies into predicted ranks.
"""

from typing import Final

import torch

from adaattn.backends import Tensors
from adaattn.backends.projected import Projected, project
from adaattn.planning.rank import tail_ranks
from adaattn.spec import AttentionProblem, TensorStats

__all__ = [
    "ENTROPY_SCALES",
    "entropy_stats",
    "entropy_stats_of",
    "project_widely",
    "spectral_stats",
]

ENTROPY_SCALES: Final = (1, 4, 16)
"""How many neighbouring keys are added up for each entropy of the sampled rows' weights."""


def project_widely(
    tensors: Tensors, problem: AttentionProblem, ranks: tuple[tuple[int, int], ...]
) -> Projected:
    """Return the tensors at the largest rank that anybody will look at; factors are nested."""
    largest = tail_ranks(problem, ranks)[-1]
    return project(tensors.query, tensors.key, tensors.value, largest, largest)


def entropy_stats(entropies: torch.Tensor) -> TensorStats:
    """Return statistics that hold the entropies alone; one host read.

    Args:
        entropies: [E, Hq] bits, a row for each of `ENTROPY_SCALES`.
    """
    return entropy_stats_of(entropies.tolist())


def entropy_stats_of(rows: list[list[float]]) -> TensorStats:
    """Return the same from numbers on the host."""
    return TensorStats(entropy_bits=tuple(rows[0]), pooled_entropy_bits=_pooled(rows))


def spectral_stats(
    projected: Projected,
    tensors: Tensors,
    problem: AttentionProblem,
    entropies: torch.Tensor,
    candidates: tuple[tuple[int, int], ...],
) -> TensorStats:
    """Return entropies, effective ranks and tails of each head, worst over the batch.

    Query heads that share a key head share its projection and so these numbers; one host read.

    Args:
        projected: from `project_widely`.
        tensors: canonical.
        problem: describes them.
        entropies: [E, Hq] bits.
        candidates: ranks that may be tried.
    """
    ranks = tail_ranks(problem, candidates)
    assert projected.scores is not None
    energies = projected.scores.singular_values.square()
    pairs = problem.group_size * problem.len_q * problem.len_k
    columns = projected.value.double().square().sum(-2)
    whole = tensors.value.double().square().sum((-2, -1))
    mean = tensors.value.double().mean(-2).square().sum(-1) * problem.len_k
    spread = (1 - mean / whole.clamp_min(1e-300)).clamp(0.0, 1.0)
    found = [projected.scores.effective_rank(), spread]
    found += [abs(problem.scale) * (energies[..., rank:].sum(-1) / pairs).sqrt() for rank in ranks]
    for rank in ranks:
        left = (whole - columns[..., :rank].sum(-1)).clamp_min(0.0)
        found.append((left / whole.clamp_min(1e-300)).sqrt())
    worst = torch.stack(found).amax(1).repeat_interleave(problem.group_size, dim=-1)
    rows = torch.cat([entropies.to(worst.dtype), worst]).tolist()
    count = len(entropies)
    tails = [tuple(row) for row in rows[count + 2 :]]
    return TensorStats(
        entropy_bits=tuple(rows[0]),
        pooled_entropy_bits=_pooled(rows[:count]),
        effective_ranks=tuple(rows[count]),
        value_spreads=tuple(rows[count + 1]),
        score_tails=tuple(zip(ranks, tails[: len(ranks)], strict=True)),
        value_tails=tuple(zip(ranks, tails[len(ranks) :], strict=True)),
    )


def _pooled(rows: list[list[float]]) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return the entropies of the scales above 1."""
    named = zip(ENTROPY_SCALES[1:], rows[1:], strict=True)
    return tuple((scale, tuple(row)) for scale, row in named)
