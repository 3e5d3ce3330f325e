"""Bases from random sketches: orthonormal, near the leading directions, without a host read."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaattn.linalg.projections import _SHIFT, _sketch, range_bases

RANK = 8
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "_linalg_check_errors"}


def planted(rank: int, *lead: int, tokens: int = 100, dim: int = 40) -> torch.Tensor:
    left = torch.randn(*lead, tokens, rank, dtype=torch.float64)
    return left @ torch.randn(*lead, rank, dim, dtype=torch.float64) / rank**0.5


def basis_of(tokens: torch.Tensor, rank: int = RANK) -> torch.Tensor:
    (basis,) = range_bases(tokens, rank=rank)
    return basis


def lost(tokens: torch.Tensor, basis: torch.Tensor) -> float:
    """Return the share of the norm that the basis leaves out."""
    wide, columns = tokens.double(), basis.double()
    return float((wide - wide @ columns @ columns.mT).norm() / wide.norm())


def allowed(tokens: torch.Tensor, rank: int) -> float:
    """Return what a basis may lose of tokens of a rank: to its shift, and to rounding.

    A direction that has a share s^2 of the sketch's energy is shortened by `_SHIFT` / s^2. Rounding
    of a sum over RANK columns turns it by as many units over s.
    """
    values = torch.linalg.svdvals(_sketch(tokens.double(), RANK))[..., :rank]
    ratio = float((values.norm(dim=-1) / values[..., -1]).amax())
    return _SHIFT * ratio**2 + RANK * torch.finfo(tokens.dtype).eps * ratio


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_columns_are_orthonormal_up_to_rounding(lead: tuple[int, ...], dtype: torch.dtype) -> None:
    """Entries are at most 1, so a product of two columns loses two units for each row of them.

    In fp64 the shift counts too: 1e-12 over the least share of the sketch that a column has, which
    is above 1e-3 of it here.
    """
    basis = basis_of(torch.randn(*lead, 200, 40, dtype=torch.float64).to(dtype)).double()
    identity = torch.eye(RANK, dtype=torch.float64).expand(*lead, RANK, RANK)
    allowed = 2 * torch.finfo(dtype).eps + 1e-12 / 1e-3
    assert basis.shape == (*lead, 40, RANK)
    assert torch.linalg.matrix_norm(basis.mT @ basis - identity).amax() < RANK * allowed


@pytest.mark.parametrize("rank", [1, 4, RANK])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_planted_rank_is_the_whole_of_the_tokens(rank: int, dtype: torch.dtype) -> None:
    tokens = planted(rank, 2).to(dtype)
    assert lost(tokens, basis_of(tokens)) < allowed(tokens, rank)


def test_it_loses_hardly_more_than_the_best_basis() -> None:
    """Noise of 1 %: one power iteration damps it by the square of its ratio to the rest."""
    tokens = planted(RANK - 2, tokens=400)
    tokens = tokens + 0.01 * torch.randn_like(tokens)
    values = torch.linalg.svdvals(tokens)
    best = float(values[RANK:].norm() / values.norm())
    noise = float(values[RANK - 2 :].norm() / values.norm())
    assert best <= lost(tokens, basis_of(tokens)) < (1 + 0.01) * noise


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_have_zeros(dtype: torch.dtype) -> None:
    assert not basis_of(torch.zeros(2, 30, 40, dtype=dtype)).any()


@pytest.mark.parametrize("tokens", [1, 3, RANK - 1])
def test_fewer_tokens_than_columns_are_kept_whole(tokens: int) -> None:
    found = torch.randn(2, tokens, 40, dtype=torch.float64)
    basis = basis_of(found)
    assert basis.isfinite().all()
    assert lost(found, basis) < allowed(found, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.25, 1e-3])
def test_large_and_small_numbers_do_not_leave_the_range(dtype: torch.dtype, share: float) -> None:
    """A sum of squares over tokens is beyond fp16."""
    size = share * 1e4
    tokens = (size * planted(4, tokens=3000)).to(dtype)
    assert lost(tokens, basis_of(tokens)) < allowed(tokens, 4)


def test_the_same_tokens_have_the_same_basis_alone_and_beside_others() -> None:
    first, second = torch.randn(2, 50, 40), torch.randn(2, 70, 40)
    both = range_bases(first, second, rank=RANK)
    assert torch.equal(both[0], basis_of(first)) and torch.equal(both[1], basis_of(second))
    torch.manual_seed(5)
    assert torch.equal(basis_of(first), both[0])


def test_tensors_of_other_widths_have_bases_of_their_own() -> None:
    first, second = torch.randn(2, 50, 40), torch.randn(2, 50, 24)
    narrow = range_bases(first, second, rank=RANK)[1]
    assert narrow.shape == (2, 24, RANK) and torch.equal(narrow, basis_of(second))


def test_nothing_is_read_on_the_host() -> None:
    """Operators that hand a number to the host would make a GPU's caller wait."""
    called: set[str] = set()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    tokens = torch.randn(2, 50, 40)
    basis_of(tokens)  # its random matrix is drawn
    with Noting():
        range_bases(tokens, tokens, rank=RANK)
    assert "linalg_cholesky_ex" in called and not called & READS
