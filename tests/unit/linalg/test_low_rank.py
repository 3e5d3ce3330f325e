import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    DTypeError,
    NonFiniteError,
    ShapeError,
)
from adaattn.linalg.low_rank import (
    effective_rank,
    expected_sketch_error,
    principal_components,
    randomized_svd,
    residual_norms,
)
from adaattn.testing import assert_matches

EPS = torch.finfo(torch.double).eps


def planted(
    rows: int, columns: int, rank: int, *, noise: float = 0.0, seed: int = 0
) -> torch.Tensor:
    """A matrix of the given rank, plus normal noise."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.double)

    return draw(rows, rank) @ draw(rank, columns) + noise * draw(rows, columns)


def with_spectrum(rows: int, columns: int, values: torch.Tensor) -> torch.Tensor:
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.double)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.double)).Q
    return (left * values) @ right.mT


def frobenius(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(matrix, dim=(-2, -1))


def rounding(matrix: torch.Tensor) -> torch.Tensor:
    """What the rounding of a few products with this matrix may add to a norm."""
    return 8 * sum(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps * frobenius(matrix)


def test_it_unpacks_as_the_one_of_pytorch() -> None:
    matrix = torch.randn(2, 9, 3) @ torch.randn(2, 3, 7)
    left, values, right = randomized_svd(matrix, 3)
    for ours, theirs in zip((left, values, right), torch.svd_lowrank(matrix, 3), strict=True):
        assert ours.shape == theirs.shape
    torch.testing.assert_close(left @ values.diag_embed() @ right.mT, matrix)


@pytest.mark.parametrize("shape", [(50, 30), (30, 50), (7, 7), (100, 3), (1, 9), (9, 1)])
def test_a_full_sketch_gives_the_singular_values_of_lapack(shape: tuple[int, int]) -> None:
    matrix = torch.randn(2, *shape)
    rank = min(shape)
    found = randomized_svd(matrix, rank)
    exact = torch.linalg.svdvals(matrix.double())
    assert_matches(found.s, exact, torch.linalg.svdvals(matrix), summands=sum(shape) ** 2)
    assert_matches(found.reconstruct(), matrix.double(), matrix, summands=sum(shape) ** 2)


@pytest.mark.parametrize("power_iterations", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_planted_low_rank_is_recovered(dtype: torch.dtype, power_iterations: int) -> None:
    matrix = planted(203, 65, 5).to(dtype)
    found = randomized_svd(matrix, 8, power_iterations=power_iterations)
    wide = matrix.to(found.s.dtype)
    if dtype is torch.bfloat16:
        least = torch.linalg.svdvals(wide)[8:].square().sum().sqrt()
        assert found.frobenius_error <= 2 * least
    else:
        assert frobenius(found.reconstruct() - wide) <= rounding(wide)
        assert found.frobenius_error <= rounding(wide)
        assert found.spectral_bound <= rounding(wide)
        assert (found.s[5:] <= rounding(wide)).all()


def test_factors_are_orthonormal_even_beyond_the_rank_of_the_matrix() -> None:
    for matrix in (planted(40, 30, 3), torch.zeros(40, 30, dtype=torch.double)):
        found = randomized_svd(matrix, 10)
        eye = torch.eye(10, dtype=torch.double)
        assert frobenius(found.u.mT @ found.u - eye) <= rounding(matrix.new_ones(40, 30))
        assert frobenius(found.vh @ found.vh.mT - eye) <= rounding(matrix.new_ones(40, 30))
        assert (found.s.diff() <= 0).all()


def test_the_frobenius_error_is_the_true_one_and_keeps_its_digits() -> None:
    """With noise of 1e-10, sqrt(||A||^2 - sum s^2) would not hold a single digit."""
    matrix = planted(120, 40, 4, noise=1e-10)
    found = randomized_svd(matrix, 4)
    true = frobenius(matrix - found.reconstruct())
    assert (found.frobenius_error - true).abs() <= rounding(matrix)
    assert true > 100 * rounding(matrix)
    total = (matrix.square().sum() - found.s.square().sum()).clamp_min(0).sqrt()
    assert (total - true).abs() > rounding(matrix)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    rank=st.integers(1, 40),
    oversample=st.integers(0, 6),
    decay=st.floats(0.0, 3.0),
    power_iterations=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_error_bounds_always_hold(
    rows: int,
    columns: int,
    rank: int,
    oversample: int,
    decay: float,
    power_iterations: int,
    seed: int,
) -> None:
    small = min(rows, columns)
    generator = torch.Generator().manual_seed(seed)
    values = torch.arange(1, small + 1, dtype=torch.double) ** -decay
    drawn = torch.randn(rows, columns, generator=generator, dtype=torch.double)
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    matrix = (left * values) @ right
    found = randomized_svd(
        matrix,
        min(rank, small),
        oversample=oversample,
        power_iterations=power_iterations,
        generator=generator,
    )
    residual = matrix - found.reconstruct()
    assert (frobenius(residual) - found.frobenius_error).abs() <= rounding(matrix)
    assert torch.linalg.matrix_norm(residual, 2) <= found.spectral_bound + rounding(matrix)
    assert found.spectral_bound <= found.frobenius_error + rounding(matrix)
    least = values[min(rank, small) :].square().sum().sqrt()
    assert found.frobenius_error >= least - rounding(matrix)


def test_the_spectral_bound_holds_for_residuals_of_rank_one() -> None:
    """Random vectors nearly orthogonal to the one direction left must not fool it."""
    matrix = with_spectrum(12, 6, torch.linspace(2, 1, 6, dtype=torch.double))
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        found = randomized_svd(matrix, 5, oversample=0, power_iterations=0, generator=generator)
        residual = matrix - found.reconstruct()
        assert torch.linalg.matrix_norm(residual, 2) <= found.spectral_bound


def test_the_error_never_grows_with_the_rank() -> None:
    matrix = with_spectrum(60, 45, torch.linspace(0, -6, 45, dtype=torch.double).exp())
    errors = torch.stack([randomized_svd(matrix, rank).frobenius_error for rank in range(1, 46)])
    assert (errors.diff() <= rounding(matrix)).all()
    assert errors[-1] <= rounding(matrix)


def test_power_iterations_bring_the_error_to_the_least_possible() -> None:
    values = torch.arange(1, 61, dtype=torch.double) ** -0.5
    matrix = with_spectrum(80, 60, values)
    least = values[10:].square().sum().sqrt()
    plain, sharp = (
        randomized_svd(matrix, 10, oversample=2, power_iterations=count).frobenius_error / least
        for count in (0, 3)
    )
    assert 1 <= sharp < plain


def test_the_mean_sketch_error_is_within_halkos_theorems() -> None:
    values = torch.arange(1, 41, dtype=torch.double) ** -1.0
    matrix = with_spectrum(50, 40, values)
    rank, oversample = 6, 4
    generator = torch.Generator().manual_seed(0)
    whole, worst = [], []
    for _ in range(50):
        found = randomized_svd(
            matrix, rank + oversample, oversample=0, power_iterations=0, generator=generator
        )
        residual = matrix - found.u @ (found.u.mT @ matrix)
        whole.append(frobenius(residual))
        worst.append(torch.linalg.matrix_norm(residual, 2))
    bound, spectral_bound = expected_sketch_error(values, rank, oversample)
    tail = values[rank:].square().sum().sqrt()
    assert bound.item() == pytest.approx(math.sqrt(1 + 6 / 3) * tail.item())
    assert values[rank + oversample :].square().sum().sqrt() <= torch.stack(whole).mean() <= bound
    assert torch.stack(worst).mean() <= spectral_bound


@pytest.mark.parametrize("shape", [(5, 4), (4, 5)])
def test_reconstructions_and_values_of_complete_sketches_pass_gradcheck(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda a: randomized_svd(a, 2, oversample=2).reconstruct(), matrix
    )
    assert torch.autograd.gradcheck(lambda a: randomized_svd(a, 3).s, matrix)


def test_gradients_stay_right_when_the_matrix_has_less_rank_than_asked_for() -> None:
    """PyTorch's own backward divides by the gaps between the zero singular values."""
    matrix = planted(9, 7, 2).requires_grad_()
    weight = torch.randn(9, 7, dtype=torch.double)
    (randomized_svd(matrix, 4).reconstruct() * weight).sum().backward()
    left, values, right = torch.linalg.svd(matrix.detach())
    onto_left, onto_right = left[:, :2] @ left[:, :2].mT, right[:2].mT @ right[:2]
    tangent = onto_left @ weight + weight @ onto_right - onto_left @ weight @ onto_right
    condition = values[0] / values[1]
    assert frobenius(matrix.grad - tangent) <= condition * rounding(weight)


def test_gradients_of_singular_values_are_outer_products_of_their_vectors() -> None:
    matrix = planted(40, 30, 4, noise=1e-3).requires_grad_()
    found = randomized_svd(matrix, 4)
    found.s.sum().backward()
    expected = (found.u @ found.vh).detach()
    assert frobenius(matrix.grad - expected) <= rounding(torch.ones(40, 30, dtype=torch.double))


@pytest.mark.parametrize("exponent", [-30, 30])
def test_very_large_and_very_small_matrices_keep_their_digits(exponent: int) -> None:
    matrix = planted(20, 10, 3).float()
    unit = 2.0 ** (3 * exponent)
    plain, scaled = randomized_svd(matrix, 3), randomized_svd(matrix * unit, 3)
    assert torch.equal(scaled.s, plain.s * unit)
    assert torch.equal(effective_rank(matrix * unit), effective_rank(matrix))
    assert scaled.frobenius_error.isfinite()


def test_batches_and_views_are_treated_matrix_by_matrix() -> None:
    matrix = torch.randn(2, 3, 10, 20, dtype=torch.double).mT
    found = randomized_svd(matrix, 4)
    alone = randomized_svd(matrix[1, 2].contiguous(), 4)
    assert found.s.shape == (2, 3, 4)
    assert (found.s[1, 2] - alone.s).abs().max() <= rounding(matrix[1, 2])
    assert found.spectral_bound.shape == (2, 3)
    assert effective_rank(matrix).shape == (2, 3)
    assert randomized_svd(matrix[:0], 4).s.shape == (0, 3, 4)


def test_the_same_sketch_is_drawn_each_time_without_touching_the_global_state() -> None:
    matrix = torch.randn(30, 20)
    before = torch.get_rng_state()
    assert torch.equal(randomized_svd(matrix, 3).u, randomized_svd(matrix, 3).u)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (1, 5), (3, 100, 17)])
def test_effective_rank_is_that_of_the_singular_values(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape)

    def textbook(matrix: torch.Tensor) -> torch.Tensor:
        values = torch.linalg.svdvals(matrix)
        return torch.special.entr(values / values.sum(-1, keepdim=True)).sum(-1).exp()

    actual = effective_rank(matrix)
    exact = textbook(matrix.double())
    assert_matches(actual, exact, exact, summands=math.prod(shape))
    fast = effective_rank(matrix, compute_dtype=torch.float32)
    assert_matches(fast, exact, textbook(matrix), summands=math.prod(shape) ** 2)


def test_effective_rank_is_the_rank_where_singular_values_are_equal() -> None:
    values = torch.tensor([2.0, 2.0, 2.0, 2.0], dtype=torch.double)
    matrix = with_spectrum(5000, 30, values)
    assert effective_rank(matrix).item() == pytest.approx(4, abs=rounding(matrix).item())
    assert effective_rank(torch.zeros(4, 4)).item() == 0
    assert effective_rank(torch.zeros(2, 0, 4)).tolist() == [0, 0]


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 20), columns=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_effective_rank_lies_between_one_and_the_shorter_side(
    rows: int, columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    found = effective_rank(torch.randn(rows, columns, generator=generator)).item()
    slack = 1 + rows * columns * EPS
    assert 1 / slack <= found <= min(rows, columns) * slack


def test_effective_rank_differentiates_also_where_values_are_zero_or_repeat() -> None:
    matrix = torch.randn(6, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(effective_rank, matrix)
    for special in (torch.eye(5), planted(9, 6, 2).float(), torch.zeros(3, 3)):
        special.requires_grad_()
        effective_rank(special).backward()
        assert special.grad.isfinite().all()


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("shape", [(50, 8), (3, 2, 17, 9), (4, 16), (5000, 3)])
def test_principal_components_are_those_of_the_singular_value_decomposition(
    shape: tuple[int, ...], center: bool
) -> None:
    tokens = torch.randn(shape) + 3
    found = principal_components(tokens, 3, center=center)

    def textbook(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        centred = tokens - tokens.mean(-2, keepdim=True) if center else tokens
        _, values, right = torch.linalg.svd(centred, full_matrices=False)
        kept = right[..., :3, :]
        outside = centred - centred @ kept.mT @ kept
        energy = torch.nn.functional.pad(values.square(), (0, shape[-1] - values.shape[-1]))
        return torch.linalg.vector_norm(outside, dim=-1), energy

    for actual, exact, eager in zip(
        (found.residual_norms, found.energy),
        textbook(tokens.double()),
        textbook(tokens),
        strict=True,
    ):
        assert_matches(actual, exact, eager, summands=math.prod(shape[-2:]) ** 2)


def test_planted_tokens_lie_in_their_basis_and_rebuild_exactly() -> None:
    tokens = planted(300, 24, 5) + torch.randn(1, 24, dtype=torch.double)
    found = principal_components(tokens, 5)
    assert found.residual_norms.max() <= rounding(tokens)
    assert frobenius(found.reconstruct(found.project(tokens)) - tokens) <= rounding(tokens)
    assert (1 - found.kept_energy).abs() <= 300 * EPS
    assert frobenius(found.mean - tokens.mean(-2, keepdim=True)) <= rounding(tokens)
    uncentred = principal_components(tokens, 6, center=False)
    assert not uncentred.mean.any()
    assert uncentred.residual_norms.max() <= rounding(tokens)


def test_residuals_and_kept_energy_follow_the_rank() -> None:
    tokens = torch.randn(2, 40, 12)
    found = [principal_components(tokens, rank) for rank in range(13)]
    errors = torch.stack([frobenius(item.residual_norms[..., None]) for item in found])
    assert (errors.diff(dim=0) <= rounding(tokens)).all()
    assert (errors[-1] <= rounding(tokens)).all()
    dropped = 1 - found[4].kept_energy
    share = errors[4].square() / errors[0].square()
    assert ((dropped - share).abs() <= 40 * 12 * torch.finfo(torch.float).eps).all()


def test_residual_norms_of_other_tokens_use_the_basis_as_given() -> None:
    basis = torch.eye(5)[:, :2]
    tokens = torch.tensor([[9.0, 9.0, 3.0, 0.0, 4.0], [1.0, 2.0, 0.0, 0.0, 0.0]])
    assert residual_norms(tokens, basis).tolist() == [5.0, 0.0]


def test_principal_components_differentiate_also_where_energies_repeat() -> None:
    tokens = torch.randn(7, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: principal_components(x, 2).residual_norms, tokens)
    assert torch.autograd.gradcheck(lambda x: principal_components(x, 2).energy, tokens)
    for special in (torch.zeros(5, 4), planted(9, 6, 2).float(), torch.eye(4)):
        special.requires_grad_()
        found = principal_components(special, 3)
        found.reconstruct(found.project(special)).sum().backward()
        assert special.grad.isfinite().all()


def test_tokens_without_length_or_dimension_have_empty_components() -> None:
    found = principal_components(torch.zeros(2, 0, 4), 2)
    assert found.basis.shape == (2, 4, 2)
    assert found.residual_norms.shape == (2, 0)
    assert found.kept_energy.tolist() == [1, 1]
    assert principal_components(torch.zeros(2, 5, 0), 0).residual_norms.tolist() == [[0] * 5] * 2


def test_bad_arguments_are_refused_with_a_sentence() -> None:
    matrix = torch.ones(4, 3)
    broken = torch.tensor([[1.0, torch.nan], [torch.inf, 0.0]])
    with pytest.raises(ArgumentError, match="rank: expected 1 to 3, got 4"):
        randomized_svd(matrix, 4)
    with pytest.raises(ArgumentError, match="oversample and power_iterations: expected at least"):
        randomized_svd(matrix, 2, oversample=-1)
    with pytest.raises(ArgumentError, match="rank: expected 0 to 3, got 4"):
        principal_components(matrix, 4)
    with pytest.raises(ArgumentError, match=r"compute_dtype: expected float32 or float64"):
        effective_rank(matrix, compute_dtype=torch.float16)
    with pytest.raises(ArgumentError, match="rank and oversample: expected at least 1 and 2"):
        expected_sketch_error(torch.ones(3), 1, 1)
    with pytest.raises(ShapeError, match="matrix: expected a tensor of at least 2 dimensions"):
        randomized_svd(matrix[0], 1)
    with pytest.raises(ArgumentTypeError, match=r"matrix: expected a torch\.Tensor, got list"):
        randomized_svd([1], 2)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="dtype of tokens: expected float64"):
        principal_components(matrix.int(), 1)
    for call in (
        lambda: randomized_svd(broken, 1),
        lambda: effective_rank(broken),
        lambda: principal_components(broken, 1),
    ):
        with pytest.raises(NonFiniteError, match="expected finite elements, got 2 NaN"):
            call()
