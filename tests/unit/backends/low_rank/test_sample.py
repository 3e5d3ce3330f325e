"""Entropies, effective ranks and spectra of a call, against the plain definitions in float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends import Tensors, capabilities
from adaattn.backends.low_rank.ranks import methods, tail_ranks
from adaattn.call.measure import ENTROPY_SCALES, measure, sample_rows
from adaattn.spec import AttentionProblem, Method, Policy, Precision, TensorStats
from adaattn.testing import make_problem, make_tensors, with_tensors

LOW_RANK = ((Method.LOW_RANK, Precision.FP64),)
PROBLEMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "grouped heads": {"num_kv_heads": 2},
    "a batch": {"batch": 2, "num_heads": 2},
    "narrow values": {"value_dim": 16},
    "wide values": {"value_dim": 48},
    "another scale": {"scale": 1.5},
    "sinks": {"has_sinks": True},
    "an odd length": {"len_q": 101, "len_k": 101},
}


def draw(**options: Any) -> tuple[Tensors, AttentionProblem]:
    values = {"num_heads": 4, "len_q": 128, "head_dim": 32, "precision": Precision.FP64} | options
    problem = make_problem(**values)
    tensors = make_tensors(problem)
    return replace(tensors, query=2 * tensors.query), problem


def measured(tensors: Tensors, problem: AttentionProblem, **options: Any) -> TensorStats:
    return measure(tensors, problem, LOW_RANK, 64, allowed=capabilities(), **options)


def wide(numbers: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def rounding(problem: AttentionProblem) -> float:
    """Return what squares lose to fp64: roots of sums are good to the root of its unit."""
    unit = torch.finfo(torch.float64).eps * (problem.len_k + problem.head_dim)
    return math.sqrt(unit)


def singular_values(tensors: Tensors, problem: AttentionProblem) -> torch.Tensor:
    """Return those of the scores of each key head, its query heads stacked: [B, Hkv, D]."""
    folded = tensors.query.reshape(problem.batch, problem.num_kv_heads, -1, problem.head_dim)
    return torch.linalg.svdvals(problem.scale * folded @ tensors.key.mT)[..., : problem.head_dim]


def per_head(values: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """Return the worst over the batch, once for each query head."""
    return values.amax(0).repeat_interleave(problem.group_size)


@pytest.mark.parametrize("name", PROBLEMS)
def test_score_tails_are_what_the_best_approximation_leaves_out(name: str) -> None:
    tensors, problem = draw(**PROBLEMS[name])
    stats = measured(tensors, problem)
    values = singular_values(tensors, problem)
    pairs = problem.group_size * problem.len_q * problem.len_k
    ranks = [rank for rank, _ in stats.score_tails]
    assert set(tail_ranks(problem)) <= set(ranks)
    assert ranks == sorted(set(ranks))
    for rank, tails in stats.score_tails:
        expected = per_head((values[..., rank:].square().sum(-1) / pairs).sqrt(), problem)
        assert (wide(tails) - expected).abs().amax() < rounding(problem)


@pytest.mark.parametrize("name", PROBLEMS)
def test_value_tails_are_the_share_that_the_leading_directions_leave_out(name: str) -> None:
    tensors, problem = draw(**PROBLEMS[name])
    stats = measured(tensors, problem)
    energies = torch.linalg.svdvals(tensors.value).square()
    assert [rank for rank, _ in stats.value_tails] == [rank for rank, _ in stats.score_tails]
    for rank, tails in stats.value_tails:
        share = (energies[..., rank:].sum(-1) / energies.sum(-1)).sqrt()
        assert (wide(tails) - per_head(share, problem)).abs().amax() < rounding(problem)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_effective_rank_is_that_of_the_scores(name: str) -> None:
    tensors, problem = draw(**PROBLEMS[name])
    stats = measured(tensors, problem)
    values = singular_values(tensors, problem)
    shares = values / values.sum(-1, keepdim=True)
    expected = per_head(torch.special.entr(shares).sum(-1).exp(), problem)
    assert (wide(stats.effective_ranks) - expected).abs().amax() < 32 * rounding(problem)
    assert all(1 < rank < 32 for rank in stats.effective_ranks)


@pytest.mark.parametrize("name", PROBLEMS)
def test_entropies_are_those_of_pooled_weights(name: str) -> None:
    tensors, problem = draw(**PROBLEMS[name])
    stats = measured(tensors, problem)
    rows = sample_rows(tensors, problem, 64, seed=0).index
    keys = tensors.key.repeat_interleave(problem.group_size, dim=1)
    scores = problem.scale * tensors.query @ keys.mT
    if problem.is_causal:
        hidden = torch.ones(problem.len_q, problem.len_k, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if tensors.sinks is not None:
        logits = tensors.sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([logits.to(scores.dtype), scores], dim=-1)
    weights = scores.softmax(-1)[:, :, rows]
    sinks = torch.zeros(weights.shape[:3], dtype=torch.float64)
    if tensors.sinks is not None:
        sinks, weights = torch.special.entr(weights[..., 0]), weights[..., 1:]
    found = {1: stats.entropy_bits} | dict(stats.pooled_entropy_bits)
    assert tuple(found) == ENTROPY_SCALES
    for scale, entropies in found.items():
        pools = [part.sum(-1) for part in weights.split(scale, dim=-1)]
        bits = (torch.special.entr(torch.stack(pools, -1)).sum(-1) + sinks) / math.log(2)
        assert (wide(entropies) - bits.mean((0, 2))).abs().amax() < rounding(problem)


def test_pooling_tells_smooth_heads_from_those_that_pick_single_keys() -> None:
    """Flat weights lose log2 of the scale, and those on single keys nothing."""
    problem = make_problem(num_heads=2, len_q=64, head_dim=64, precision=Precision.FP64, scale=1.0)
    keys = torch.eye(64, dtype=torch.float64).expand(1, 2, 64, 64)
    size = torch.tensor([0.0, 1000.0], dtype=torch.float64)[:, None, None]
    tensors = Tensors.of(keys * size, keys, torch.randn(1, 2, 64, 64).double())
    stats = measured(tensors, problem)
    found = {1: stats.entropy_bits} | dict(stats.pooled_entropy_bits)
    for scale, (flat, peaked) in found.items():
        assert flat == pytest.approx(6 - math.log2(scale), abs=rounding(problem))
        assert peaked == 0.0


@pytest.mark.parametrize("rank", [1, 5, 8])
def test_spectra_end_at_a_planted_rank(rank: int) -> None:
    problem = make_problem(num_heads=3, len_q=128, head_dim=32, precision=Precision.FP64)
    q, k, v = (
        torch.randn(1, 3, 128, rank, dtype=torch.float64)
        @ torch.randn(1, 3, rank, 32, dtype=torch.float64)
        for _ in range(3)
    )
    stats = measured(Tensors.of(q, k, v), problem)
    for tails in (stats.score_tails, stats.value_tails):
        for at, errors in tails:
            assert (max(errors) < rounding(problem) * 32) is (at >= rank)
    noise = torch.special.entr(wide((rounding(problem),))).item() * problem.head_dim
    assert max(stats.effective_ranks) < rank + noise
    assert rank == 1 or min(stats.effective_ranks) > 1


def test_tails_fall_with_the_rank() -> None:
    tensors, problem = draw()
    stats = measured(tensors, problem)
    for tails in (stats.score_tails, stats.value_tails):
        columns = wide(tuple(zip(*(errors for _, errors in tails), strict=True)))
        assert (columns.diff(dim=-1) <= 0).all()
        assert (columns > 0).all()


@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_zeros_have_no_tails_and_no_rank(what: str) -> None:
    tensors, problem = draw()
    empty = with_tensors(tensors, **{what: torch.zeros_like(getattr(tensors, what))})
    stats = measured(empty, problem)
    tails = stats.value_tails if what == "value" else stats.score_tails
    assert {error for _, errors in tails for error in errors} == {0.0}
    if what != "value":
        assert stats.effective_ranks == (0.0,) * problem.num_heads


def test_without_low_rank_only_entropies_are_measured() -> None:
    tensors, problem = draw()
    stats = measure(tensors, problem, ((Method.EXACT, Precision.BF16),), 64, allowed=capabilities())
    full = measured(tensors, problem)
    assert stats.entropy_bits == full.entropy_bits
    assert stats.pooled_entropy_bits == full.pooled_entropy_bits
    assert (stats.effective_ranks, stats.score_tails, stats.value_tails) == ((), (), ())


def test_a_head_too_narrow_for_any_rank_has_entropies_alone() -> None:
    tensors, problem = draw(head_dim=8)
    assert methods(problem, Policy()) == ()
    stats = measured(tensors, problem)
    assert stats.score_tails == stats.method_errors == ()
    assert len(stats.entropy_bits) == problem.num_heads
