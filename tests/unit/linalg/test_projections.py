"""Projections of queries, keys and values against the decompositions that they stand for."""

import pytest
import torch

from adaattn.linalg.low_rank import effective_rank
from adaattn.linalg.projections import score_projections, value_basis

SHAPES = [(20, 30, 8), (30, 20, 8), (8, 8, 8), (3, 40, 8), (40, 3, 8), (1, 1, 4)]


def draw(len_q: int, len_k: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (2, 3)
    return (
        torch.randn(*shape, len_q, dim, dtype=torch.float64),
        torch.randn(*shape, len_k, dim, dtype=torch.float64),
    )


def rounding(*tensors: torch.Tensor) -> float:
    """Return what fp64 loses through Gram matrices: the root of its unit, for each column."""
    size = max(float(torch.linalg.matrix_norm(tensor, 2).amax()) for tensor in tensors) ** 2
    return size * (torch.finfo(torch.float64).eps * tensors[0].shape[-1]) ** 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_are_those_of_the_scores(shape: tuple[int, int, int]) -> None:
    query, key = draw(*shape)
    found = score_projections(query, key, 1).singular_values
    exact = torch.linalg.svdvals(query @ key.mT)
    count = min(exact.shape[-1], shape[2])
    assert found.shape == (2, 3, shape[2])
    assert (found.diff(dim=-1) <= 0).all()
    assert (found[..., :count] - exact[..., :count]).abs().amax() < rounding(query, key)
    assert found[..., count:].abs().sum() <= shape[2] * rounding(query, key)


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_projected_scores_are_the_best_of_their_rank(
    shape: tuple[int, int, int], rank: int
) -> None:
    query, key = draw(*shape)
    found = score_projections(query, key, rank)
    projected = (query @ found.query_factor) @ (key @ found.key_factor).mT
    left, values, right = torch.linalg.svd(query @ key.mT, full_matrices=False)
    best = left[..., :rank] * values[..., None, :rank] @ right[..., :rank, :]
    assert (projected - best).abs().amax() < rounding(query, key)
    lost = (projected - query @ key.mT).norm(dim=(-2, -1)) / values.norm(dim=-1)
    assert (found.relative_error(rank) - lost).abs().amax() < rounding(query, key)


def test_the_effective_rank_is_that_of_the_score_matrix() -> None:
    query, key = draw(20, 30, 8)
    found = score_projections(query, key, 1).effective_rank()
    exact = effective_rank(query @ key.mT)
    assert found.shape == (2, 3)
    assert (found - exact).abs().amax() < 8 * rounding(query, key)


def test_equal_singular_values_count_one_each() -> None:
    query = torch.eye(8, dtype=torch.float64)[:, :6] * 3.0
    found = score_projections(query, query, 1)
    assert found.effective_rank().item() == pytest.approx(6, abs=rounding(query))


@pytest.mark.parametrize("what", ["query", "key"])
def test_zeros_have_no_effective_rank(what: str) -> None:
    query, key = draw(5, 6, 4)
    zeros = {"query": torch.zeros_like(query), "key": torch.zeros_like(key)}
    tensors = {"query": query, "key": key} | {what: zeros[what]}
    found = score_projections(tensors["query"], tensors["key"], 2)
    assert found.effective_rank().eq(0).all()
    assert found.query_factor.isfinite().all() and found.key_factor.isfinite().all()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_planted_rank_is_the_whole_of_the_scores(rank: int) -> None:
    query = torch.randn(16, rank, dtype=torch.float64) @ torch.randn(rank, 8, dtype=torch.float64)
    key = torch.randn(24, 8, dtype=torch.float64)
    found = score_projections(query, key, rank)
    assert found.relative_error(rank).item() < rounding(query, key)
    assert found.effective_rank().item() <= rank + 8 * 24 * rounding(query, key)
    if rank > 1:
        assert found.relative_error(rank - 1).item() > 1e3 * rounding(query, key) / query.norm()


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_the_basis_holds_the_leading_directions_of_the_values(rank: int) -> None:
    value = torch.randn(2, 20, 8, dtype=torch.float64)
    basis = value_basis(value, rank)
    identity = torch.eye(rank, dtype=torch.float64).expand(2, rank, rank)
    assert (basis.mT @ basis - identity).abs().amax() < rounding(value)
    kept = (value @ basis).square().sum((-2, -1))
    best = torch.linalg.svdvals(value)[..., :rank].square().sum(-1)
    assert (kept - best).abs().amax() < rounding(value)
