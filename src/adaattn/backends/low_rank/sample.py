"""What spectra say of every rank at once, and what sampled rows say of those worth a try.

Two Gram matrices and their eigenvalues give, for each rank, how much of the scores and of the
values it leaves out; `adaattn.backends.low_rank.ranks` turns that and the entropies of the rows
into predicted ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from adaattn.backends.common import grouped_product
from adaattn.backends.keys_values import KeysValues
from adaattn.backends.low_rank.projected import Projected, project
from adaattn.backends.low_rank.ranks import ranks_to_measure, tail_ranks
from adaattn.backends.sampling import Estimate, Sampled, row_weights
from adaattn.spec import HeadMethod, LowRank, TensorStats

__all__ = ["estimate", "sample"]


def sample(
    sampled: Sampled,
    methods: Sequence[HeadMethod],
    stats: TensorStats,
    budgets: tuple[float, ...],
) -> tuple[TensorStats, list[Estimate]]:
    """Return the spectra, and errors of the ranks that are not predicted to be far off.

    A `Sampler`. The factors are nested: one projection, at the largest rank, serves all.
    """
    tried = tuple(method for method in methods if isinstance(method, LowRank))
    tensors, problem = sampled.tensors, sampled.problem
    ranks = tail_ranks(problem, tried)
    projected = project(tensors.query, tensors.key, tensors.value, ranks[-1], ranks[-1])
    stats = _spectral_stats(projected, sampled, stats, ranks)
    if budgets:
        tried = ranks_to_measure(stats, tried, budgets)
    return stats, [estimate(sampled, projected, method) for method in tried]


def estimate(sampled: Sampled, projected: Projected, method: LowRank) -> Estimate:
    """Return the errors of one rank, by its first columns of what was projected."""
    part = replace(
        sampled.tensors,
        query=projected.query[..., : method.rank],
        kv=KeysValues(
            key=projected.key[..., : method.rank], value=projected.value[..., : method.value_rank]
        ),
    )
    weights = row_weights(part, sampled.problem, sampled.index)
    output = grouped_product(weights, part.value.to(weights.dtype))
    if projected.basis is not None:
        basis = projected.basis[..., : method.value_rank].mT.to(weights.dtype)
        output = grouped_product(output, basis)
    return Estimate(method=method, errors=sampled.errors(output))


def _spectral_stats(
    projected: Projected, sampled: Sampled, stats: TensorStats, ranks: tuple[int, ...]
) -> TensorStats:
    """Return ``stats`` with effective ranks and tails of each head, worst over the batch.

    Query heads that share a key head share its projection and so these numbers; one host read.
    """
    tensors, problem = sampled.tensors, sampled.problem
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
    rows = [tuple(row) for row in worst.tolist()]
    score_tails, value_tails = rows[2 : 2 + len(ranks)], rows[2 + len(ranks) :]
    return replace(
        stats,
        effective_ranks=rows[0],
        value_spreads=rows[1],
        score_tails=tuple(zip(ranks, score_tails, strict=True)),
        value_tails=tuple(zip(ranks, value_tails, strict=True)),
    )
