import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.errors import ShapeError
from adaattn.linalg.bounds import (
    dropped_mass,
    dropped_mass_bound,
    low_rank_score_bound,
    output_error_bound,
    value_radius,
)
from adaattn.linalg.low_rank import principal_components, residual_norms

ROUNDING = 1e3 * torch.finfo(torch.double).eps


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.double)


@settings(deadline=None, max_examples=25)
@given(
    rank=st.integers(0, 8), size=st.floats(0.1, 3.0), group=st.integers(1, 3), seed=st.integers(0)
)
def test_no_score_and_no_output_moves_more_than_its_bound_at_low_rank(
    rank: int, size: float, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    query = size * normal(generator, 2, 2 * group, 7, 8)
    key, value = size * normal(generator, 2, 2, 11, 8), normal(generator, 2, 2, 11, 5)
    found = principal_components(key, rank)
    basis = found.basis.repeat_interleave(group, 1)
    keys = (key - found.mean).repeat_interleave(group, 1)
    values = value.repeat_interleave(group, 1)
    scores = 0.3 * query @ keys.mT
    projected = 0.3 * (query @ basis) @ (keys @ basis).mT
    epsilon = low_rank_score_bound(residual_norms(query, basis), found.residual_norms, -0.3)
    assert epsilon.shape == (2, 2 * group, 7)
    assert ((scores - projected).abs().amax(-1) <= epsilon + ROUNDING).all()
    exact, approximate = scores.softmax(-1) @ values, projected.softmax(-1) @ values
    bound = output_error_bound(epsilon, value_radius(values)[..., None])
    moved = torch.linalg.vector_norm(exact - approximate, dim=-1)
    assert (moved <= bound + ROUNDING).all()
    assert rank < 8 or (bound <= ROUNDING).all()


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 4.0])
def test_the_output_bound_is_reached_by_the_worst_case(epsilon: float) -> None:
    """Two keys whose scores move apart by epsilon each way, values at opposite ends."""
    scores = torch.tensor([0.5, -0.5], dtype=torch.double) * epsilon
    value = torch.tensor([[1.0], [-1.0]], dtype=torch.double)
    moved = (3 * scores).softmax(-1) @ value - scores.softmax(-1) @ value
    swing = scores.softmax(-1) @ value - (-scores).softmax(-1) @ value
    bound = output_error_bound(torch.tensor(epsilon, dtype=torch.double), value_radius(value))
    assert moved.abs() <= bound
    assert (swing.abs() - bound).abs() <= ROUNDING


@settings(deadline=None, max_examples=25)
@given(tiles=st.integers(1, 5), size=st.floats(0.0, 8.0), seed=st.integers(0, 2**31))
def test_dropped_tiles_hold_less_than_the_bounded_mass(tiles: int, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = size * normal(generator, 2, 6, tiles, 4)
    value = normal(generator, 2, 4 * tiles, 3)
    kept = torch.rand(2, 6, tiles, generator=generator) < 0.5
    hidden = scores.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    lse_kept = hidden.logsumexp(-1)
    weights = scores.flatten(-2).softmax(-1)
    true = weights.unflatten(-1, (tiles, 4)).sum(-1).masked_fill(kept, 0.0).sum(-1)
    tile_max = scores.amax(-1).masked_fill(kept, -torch.inf)
    mass = dropped_mass(tile_max, 4, lse_kept)
    assert (true <= mass + ROUNDING).all()
    assert (mass <= 1).all()
    assert not mass[kept.all(-1)].any()
    assert (mass[~kept.any(-1)] == 1).all()
    some = kept.any(-1)
    moved = (weights @ value - hidden.softmax(-1).nan_to_num(0.0) @ value).norm(dim=-1)
    bound = dropped_mass_bound(mass, value_radius(value)[..., None])
    assert (moved[some] <= bound[some] + ROUNDING).all()


def test_equal_scores_make_the_dropped_mass_exact() -> None:
    mass = dropped_mass(torch.zeros(1, 3), torch.tensor([2.0, 1.0, 1.0]), torch.zeros(1))
    assert mass.item() == pytest.approx(4 / 5)


def test_value_radius_is_the_farthest_value_from_the_mean() -> None:
    value = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 4.0], [0.0, -4.0]]) + 100
    assert value_radius(value).item() == 4
    assert value_radius(torch.zeros(2, 0, 3)).tolist() == [0, 0]


def test_without_keys_no_score_can_move() -> None:
    assert not low_rank_score_bound(torch.ones(2, 4, 3), torch.ones(2, 2, 0), 1.0).any()


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="key_residual: expected a number of heads that divides 4"):
        low_rank_score_bound(torch.ones(4, 3), torch.ones(3, 5), 1.0)
