"""Low rank: randomised SVD, principal components, effective rank, and bounds on what they cost.

Sums are kept in float32 (float64 for float64 input) unless a function says otherwise. The
bounds of the SVD follow Halko, Martinsson and Tropp, "Finding structure with randomness"
(https://arxiv.org/abs/0909.4061).

Every basis is orthonormal. Singular and principal vectors are defined up to sign, and up to a
rotation where values repeat: differentiate functions that do not depend on that choice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from adaattn.errors import ArgumentError
from adaattn.linalg._checks import (
    accumulation_dtype,
    require_finite,
    require_matrix,
    seeded_generator,
)
from adaattn.linalg._spectral import (
    exp_entropy,
    gram_matrix,
    largest_magnitude,
    symmetric_eigen,
    thin_triplets,
)
from adaattn.linalg.bounds import (
    dropped_mass,
    dropped_mass_bound,
    low_rank_score_bound,
    output_error_bound,
    value_radius,
)

__all__ = [
    "PrincipalComponents",
    "RandomizedSVD",
    "dropped_mass",
    "dropped_mass_bound",
    "effective_rank",
    "expected_sketch_error",
    "low_rank_score_bound",
    "output_error_bound",
    "principal_components",
    "randomized_svd",
    "residual_norms",
    "value_radius",
]

_PROBES = 10
"""Random vectors of the spectral bound; it fails with probability 10^-probes (Halko, eq. 4.3)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomizedSVD:
    """A matrix's leading singular triplets and how far they are from it.

    It unpacks as what ``torch.svd_lowrank`` returns: ``U, S, V = randomized_svd(matrix, 8)``.

    Args:
        u: [..., m, r], orthonormal columns.
        s: [..., r], largest first.
        vh: [..., r, n], orthonormal rows.
        frobenius_error: [...] ``||A - u s vh||_F``, measured; no gradient.
        spectral_bound: [...] upper bound of ``||A - u s vh||_2``; it fails with probability
            1e-10 over the random vectors; no gradient.
    """

    u: torch.Tensor
    s: torch.Tensor
    vh: torch.Tensor
    frobenius_error: torch.Tensor
    spectral_bound: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return U, S and V, [..., n, r], one after another."""
        return iter((self.u, self.s, self.vh.mT))

    def reconstruct(self) -> torch.Tensor:
        """Return the approximation ``u s vh``, [..., m, n]."""
        return (self.u * self.s[..., None, :]) @ self.vh


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrincipalComponents:
    """The directions along which tokens vary most.

    Args:
        basis: [..., D, r], orthonormal columns, most energy first.
        mean: [..., 1, D] of the tokens; zeros when they were not centred.
        residual_norms: [..., S], length of what each centred token has outside the basis.
        energy: [..., D] sums of squares along all principal directions, largest first.
    """

    basis: torch.Tensor
    mean: torch.Tensor
    residual_norms: torch.Tensor
    energy: torch.Tensor

    @property
    def kept_energy(self) -> torch.Tensor:
        """Share of the energy that the basis keeps, [...]; 1 for tokens that are all zero."""
        total = self.energy.sum(-1)
        kept = self.energy[..., : self.basis.shape[-1]].sum(-1)
        return torch.where(total == 0.0, 1.0, kept / torch.where(total == 0.0, 1.0, total))

    def project(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the coordinates of ``tokens - mean`` in the basis, [..., S, r]."""
        return (tokens.to(self.basis.dtype) - self.mean) @ self.basis

    def reconstruct(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return the tokens that have these coordinates, [..., S, D]."""
        return coordinates @ self.basis.mT + self.mean


def randomized_svd(
    matrix: torch.Tensor,
    rank: int,
    *,
    oversample: int = 8,
    power_iterations: int = 2,
    generator: torch.Generator | None = None,
) -> RandomizedSVD:
    """Return the leading singular triplets of a matrix, by a random sketch of its range.

    Halko, Martinsson and Tropp, algorithms 4.4 and 5.1 (https://arxiv.org/abs/0909.4061). The
    error is the norm of a residual that is formed, not ``sqrt(||A||^2 - sum s^2)``, which is
    the same number but loses half of its digits to cancellation.

    The gradient is that of the thin decomposition with ``rank + oversample`` triplets: exact
    for matrices whose rank is at most that, otherwise off by the squared ratio of the first
    singular value left out to those differentiated. Singular values of zero get no gradient.

    Args:
        matrix: [..., m, n], floating point.
        rank: triplets wanted, 1 to min(m, n).
        oversample: columns of the sketch beyond the rank.
        power_iterations: multiplications by ``A A^T`` that sharpen a slowly falling spectrum.
        generator: draws the sketch; None draws the same one each time.

    Raises:
        ArgumentTypeError: no tensor.
        ShapeError: fewer than two dimensions.
        DTypeError: the dtype is not floating point.
        ArgumentError: the rank, oversample or power_iterations is out of range.
        NonFiniteError: an element is NaN or infinite.

    Example:
        >>> import torch
        >>> matrix = torch.ones(6, 4)
        >>> torch.allclose(randomized_svd(matrix, 1).reconstruct(), matrix)
        True
    """
    require_matrix(matrix, "matrix")
    rows, columns = matrix.shape[-2:]
    if not 1 <= rank <= min(rows, columns):
        raise ArgumentError.got("rank", f"1 to {min(rows, columns)}", rank)
    if oversample < 0 or power_iterations < 0:
        got = (oversample, power_iterations)
        raise ArgumentError.got("oversample and power_iterations", "at least 0", got)
    require_finite(matrix, "matrix")
    generator = seeded_generator(generator)
    matrix = matrix.to(accumulation_dtype(matrix.dtype))
    unit = largest_magnitude(matrix)
    matrix = matrix / unit
    with torch.no_grad():
        size = min(rank + oversample, rows, columns)
        basis = _range_basis(matrix, size, power_iterations, generator)
        small = basis.mT @ matrix
        left, values, right = torch.linalg.svd(small, full_matrices=False)
        residual = matrix - basis @ small
        dropped = values[..., rank:]
        frobenius = torch.linalg.vector_norm(residual, dim=(-2, -1)).square()
        frobenius = (frobenius + dropped.square().sum(-1)).sqrt()
        spectral = _spectral_bound(residual, dropped, generator)
        length = torch.linalg.vector_norm(matrix, dim=(-2, -1))
        noise = torch.finfo(matrix.dtype).eps * size * length
    left, values, right = thin_triplets(matrix, basis @ left, values, right)
    unit = unit[..., 0]
    return RandomizedSVD(
        u=left[..., :rank],
        s=values[..., :rank] * unit,
        vh=right[..., :rank, :],
        frobenius_error=frobenius * unit[..., 0],
        spectral_bound=(torch.minimum(spectral, frobenius) + noise) * unit[..., 0],
    )


def expected_sketch_error(
    singular_values: torch.Tensor, rank: int, oversample: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bounds of the expected Frobenius and spectral error of a sketch, given the spectrum.

    Halko, Martinsson and Tropp, theorems 10.5 and 10.6, for ``||A - Q Q^T A||`` with Q from
    ``rank + oversample`` random vectors and no power iteration.

    Args:
        singular_values: [..., n], largest first.
        rank: r, at least 1.
        oversample: p, at least 2.

    Returns:
        Two tensors [...].

    Raises:
        ArgumentError: the rank or oversample is out of range.
    """
    if rank < 1 or oversample < 2:
        got = (rank, oversample)
        raise ArgumentError.got("rank and oversample", "at least 1 and 2", got)
    tail = singular_values[..., rank:]
    energy = torch.linalg.vector_norm(tail, dim=-1)
    largest = tail[..., 0] if tail.shape[-1] else torch.zeros_like(energy)
    ratio = rank / (oversample - 1)
    spread = math.e * math.sqrt(rank + oversample) / oversample
    return math.sqrt(1.0 + ratio) * energy, (1.0 + math.sqrt(ratio)) * largest + spread * energy


def effective_rank(
    matrix: torch.Tensor, *, compute_dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return exp of the entropy of the normalised singular values, between 1 and min(m, n).

    Roy and Vetterli, "The effective rank" (EUSIPCO 2007,
    https://www.eurasip.org/Proceedings/Eusipco/Eusipco2007/Papers/a5p-h05.pdf). The singular
    values come from the Gram matrix of the shorter side, so a [S, D] matrix costs S D^2 and one
    D x D eigenvalue problem. Squaring hides singular values below ``sqrt(eps)`` of the largest
    (eps that of ``compute_dtype``); they count as zero. A zero or empty matrix gives 0.

    Args:
        matrix: [..., m, n], floating point.
        compute_dtype: dtype of the Gram matrix; float32 is faster on GPUs.

    Returns:
        [...] in ``compute_dtype``.

    Raises:
        ArgumentTypeError: no tensor.
        ShapeError: fewer than two dimensions.
        DTypeError: the dtype is not floating point.
        ArgumentError: ``compute_dtype`` is not float32 or float64.
        NonFiniteError: an element is NaN or infinite.

    Example:
        >>> import torch
        >>> round(effective_rank(torch.eye(5)).item(), 6)
        5.0
    """
    require_matrix(matrix, "matrix")
    _require_compute_dtype(compute_dtype)
    require_finite(matrix, "matrix")
    if matrix.shape[-2] < matrix.shape[-1]:
        matrix = matrix.mT
    if matrix.shape[-1] == 0:
        return matrix.new_zeros(matrix.shape[:-2], dtype=compute_dtype)
    unit = largest_magnitude(matrix)
    values, _ = symmetric_eigen(gram_matrix(matrix, unit, compute_dtype))
    floor = values[..., :1] * torch.finfo(compute_dtype).eps * values.shape[-1]
    present = values > floor.detach()
    sigma = torch.where(present, torch.where(present, values, 1.0).sqrt(), 0.0)
    return exp_entropy(sigma)


def principal_components(
    tokens: torch.Tensor,
    rank: int,
    *,
    center: bool = True,
    compute_dtype: torch.dtype = torch.float64,
) -> PrincipalComponents:
    """Return the leading principal directions of tokens and each token's distance from them.

    Args:
        tokens: [..., S, D], floating point.
        rank: directions to keep, 0 to D. Beyond the tokens' own rank they are arbitrary.
        center: subtract the mean token first.
        compute_dtype: dtype of the D x D eigenvalue problem; float32 is faster on GPUs.

    Raises:
        ArgumentTypeError: no tensor.
        ShapeError: fewer than two dimensions.
        DTypeError: the dtype is not floating point.
        ArgumentError: the rank is out of range, or ``compute_dtype`` is not float32 or float64.
        NonFiniteError: an element is NaN or infinite.

    Example:
        >>> import torch
        >>> line = torch.arange(4.0)[:, None] * torch.tensor([3.0, 4.0])
        >>> principal_components(line, 1).residual_norms.max().item() < 1e-5
        True
    """
    require_matrix(tokens, "tokens")
    length, dim = tokens.shape[-2:]
    if not 0 <= rank <= dim:
        raise ArgumentError.got("rank", f"0 to {dim}", rank)
    _require_compute_dtype(compute_dtype)
    require_finite(tokens, "tokens")
    tokens = tokens.to(accumulation_dtype(tokens.dtype))
    mean = tokens.sum(-2, keepdim=True) / max(length, 1)
    mean = mean if center else torch.zeros_like(mean)
    centred = tokens - mean
    unit = largest_magnitude(centred)
    values, vectors = symmetric_eigen(gram_matrix(centred, unit, compute_dtype))
    basis = vectors[..., :rank].to(tokens.dtype)
    return PrincipalComponents(
        basis=basis,
        mean=mean,
        residual_norms=residual_norms(centred, basis),
        energy=values.clamp_min(0.0).to(tokens.dtype) * unit[..., 0].square(),
    )


def residual_norms(tokens: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return the length of what each token has outside the span of an orthonormal basis.

    Args:
        tokens: [..., S, D].
        basis: [..., D, r], orthonormal columns.

    Returns:
        [..., S] in the dtype of the basis.
    """
    tokens = tokens.to(basis.dtype)
    outside = tokens - (tokens @ basis) @ basis.mT
    lengths: torch.Tensor = torch.linalg.vector_norm(outside, dim=-1)
    return lengths


def _range_basis(
    matrix: torch.Tensor, size: int, power_iterations: int, generator: torch.Generator
) -> torch.Tensor:
    """Return [..., m, size]: orthonormal columns that span most of the matrix's range."""
    basis: torch.Tensor = torch.linalg.qr(matrix @ _gaussian(matrix, size, generator)).Q
    for _ in range(power_iterations):
        basis = torch.linalg.qr(matrix.mT @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    return basis


def _spectral_bound(
    residual: torch.Tensor, dropped: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return a bound of the spectral norm of the residual plus the dropped triplets."""
    images = residual @ _gaussian(residual, _PROBES, generator)
    longest = torch.linalg.vector_norm(images, dim=-2).amax(-1)
    outside = 10.0 * math.sqrt(2.0 / math.pi) * longest
    # The two parts have orthogonal ranges, so their squares add.
    inside = dropped[..., 0] if dropped.shape[-1] else torch.zeros_like(outside)
    return torch.hypot(outside, inside)


def _gaussian(matrix: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return [n, count] independent normal numbers on the matrix's device."""
    shape = (matrix.shape[-1], count)
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=matrix.dtype)
    return drawn.to(matrix.device, non_blocking=True)


def _require_compute_dtype(dtype: torch.dtype) -> None:
    """Refuse dtypes that no eigenvalue solver takes."""
    if dtype not in (torch.float32, torch.float64):
        raise ArgumentError.got("compute_dtype", "float32 or float64", dtype)
