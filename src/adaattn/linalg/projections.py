"""Projections of queries, keys and values that keep attention's products.

The best rank-r approximation of the score matrix Q K^T follows from two D x D Gram
matrices, whatever the sequence length: with R = (K^T K)^(1/2) and R (Q^T Q) R = V S^2 V^T,
the pair A = R V_r S_r^(-1/2), B = R^(-1) V_r S_r^(1/2) gives (Q A)(K B)^T, the truncated
SVD of Q K^T (Eckart and Young, 1936), by two symmetric eigenproblems.

An eigenproblem of a large D takes a GPU longer than attention. `range_bases` has none: a random
sketch with one power iteration (Halko, Martinsson and Tropp, SIAM Review 2011) and a shifted
Cholesky QR (Fukaya et al., SIAM J. Sci. Comput. 2020) give a basis of the leading row directions
of K alone, without a number that the host reads.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from adaattn._transfer import on_device
from adaattn.linalg._spectral import exp_entropy

__all__ = ["ScoreProjections", "range_bases", "score_projections", "value_basis"]

_RELATIVE_FLOOR = 1e-7

_SHIFT: Final = 1e-12
"""What is added to the diagonal of a sketch's Gram matrix, over its trace.

The factorisation's own rounding stays below a hundredth of it up to rank 1024, so that zeros and an
exact low rank have a factor too. Directions below its root, 1e-6 of the sketch, are shortened.
"""

_KEPT_MATRICES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreProjections:
    """A pair of projections with Q A (K B)^T close to Q K^T.

    Args:
        query_factor: A, [..., D, r].
        key_factor: B, [..., D, r].
        singular_values: [..., D] those of Q K^T, in descending order.
    """

    query_factor: torch.Tensor
    key_factor: torch.Tensor
    singular_values: torch.Tensor

    def relative_error(self, rank: int) -> torch.Tensor:
        """Return ||Q K^T - its rank-r part|| / ||Q K^T|| in the Frobenius norm, [...]."""
        energy = self.singular_values.square()
        total = energy.sum(-1)
        return (energy[..., rank:].sum(-1) / total.clamp_min(1e-300)).sqrt()

    def effective_rank(self) -> torch.Tensor:
        """Return exp of the entropy of the scores' singular values, [...]; between 1 and D.

        Roy and Vetterli, "The effective rank" (EUSIPCO 2007).
        """
        return exp_entropy(self.singular_values)


def score_projections(query: torch.Tensor, key: torch.Tensor, rank: int) -> ScoreProjections:
    """Return the projections to ``rank`` columns that keep the scores best.

    Args:
        query: [..., Sq, D]; leading dimensions as key's.
        key: [..., Sk, D].
        rank: r, at most D.

    Example:
        >>> import torch
        >>> low = torch.randn(32, 4)
        >>> q, k = low @ torch.randn(4, 16), low @ torch.randn(4, 16)
        >>> found = score_projections(q, k, 4)
        >>> bool(found.relative_error(4) < 1e-4)
        True
    """
    key_root, key_inverse = _roots(_gram(key))
    squares, right = torch.linalg.eigh(key_root @ _gram(query) @ key_root)
    values = squares.flip(-1).clamp_min(0).sqrt()
    kept = right.flip(-1)[..., :rank]
    leading = values[..., :rank]
    seen = leading > leading[..., :1] * _RELATIVE_FLOOR
    shared = torch.where(seen, leading, 1.0).sqrt()
    dtype = query.dtype
    return ScoreProjections(
        query_factor=(key_root @ kept * (seen / shared).unsqueeze(-2)).to(dtype),
        key_factor=(key_inverse @ kept * (seen * shared).unsqueeze(-2)).to(dtype),
        singular_values=values,
    )


def value_basis(value: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the orthonormal columns [..., Dv, r] that hold most of the values' energy.

    Args:
        value: [..., Sk, Dv].
        rank: r, at most Dv.
    """
    _, vectors = torch.linalg.eigh(_gram(value))
    basis: torch.Tensor = vectors.flip(-1)[..., :rank].to(value.dtype)
    return basis


def range_bases(*tokens: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
    """Return near-orthonormal columns [..., D, r] that hold most of each tensor's energy.

    They span the leading row directions as far as these stand out: with one power iteration the
    rest is damped by the square of the ratio of singular values. Where fewer than r directions
    hold anything, columns that are left over are shorter than 1. Equal input gives equal columns
    in each process. Products are in the input's dtype, the orthonormalisation is in fp64 and one
    for all tensors of a width; nothing is read on the host.

    Args:
        *tokens: [..., S, D] each, with equal leading dimensions.
        rank: r, at most D.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 3) @ torch.randn(3, 16)
        >>> (basis,) = range_bases(x, rank=4)
        >>> bool(torch.dist(x @ basis @ basis.mT, x) < 1e-4 * x.norm())
        True
    """
    sketches = [_sketch(item, rank) for item in tokens]
    if len({sketch.shape for sketch in sketches}) == 1:
        stacked: torch.Tensor = _orthonormal(torch.stack(sketches))
        return stacked.unbind(0)
    return tuple(map(_orthonormal, sketches))


def _sketch(tokens: torch.Tensor, rank: int) -> torch.Tensor:
    """Return X^T X times a random matrix, [..., D, r]."""
    key = (tokens.shape[-1], rank, tokens.dtype, tokens.device)
    mixed = tokens @ _random_matrix(*key)
    if tokens.dtype is torch.float16:  # a sum over tokens may exceed its range
        largest = mixed.abs().amax((-2, -1), keepdim=True)
        mixed = mixed / largest.clamp_min(torch.finfo(mixed.dtype).tiny) / tokens.shape[-2]
    sketch: torch.Tensor = tokens.mT @ mixed
    return sketch


def _random_matrix(dim: int, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return fixed normal numbers [D, r] of variance 1 / D, drawn on the host."""
    return _drawn(dim, rank, dtype, device)


# What `torch.compiler.assume_constant_result` does; it would load the compiler at import.
_random_matrix._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=_KEPT_MATRICES)
def _drawn(dim: int, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what `_random_matrix` does; the host does not wait for the copy.

    While a CUDA graph is captured it is refused: what would be kept has no numbers yet.
    """
    generator = torch.Generator().manual_seed(dim)
    numbers = torch.randn(dim, rank, generator=generator, dtype=torch.float64) / dim**0.5
    return on_device(numbers.to(dtype), device)


def _orthonormal(sketch: torch.Tensor) -> torch.Tensor:
    """Return the columns of [..., D, r] made orthonormal, in its dtype; see `_SHIFT`."""
    wide = sketch.double()
    tiny = torch.finfo(torch.float64).tiny
    wide = wide / wide.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    gram = wide.mT @ wide
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += _SHIFT * diagonal.sum(-1, keepdim=True) + tiny
    factor, _ = torch.linalg.cholesky_ex(gram, check_errors=False)
    basis: torch.Tensor = torch.linalg.solve_triangular(factor.mT, wide, upper=True, left=False)
    return basis.to(sketch.dtype)


def _gram(tokens: torch.Tensor) -> torch.Tensor:
    """Return X^T X, summed in fp32 (fp64 for fp64) and decomposed in fp64.

    Directions below `_RELATIVE_FLOOR` of the largest eigenvalue are rounding errors of the sum.
    """
    wide = tokens.to(torch.float32 if tokens.dtype != torch.float64 else torch.float64)
    return (wide.mT @ wide).double()


def _roots(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the symmetric square root of a Gram matrix and the pseudo-inverse of that root."""
    values, vectors = torch.linalg.eigh(gram)
    floor = values[..., -1:].clamp_min(0) * _RELATIVE_FLOOR
    kept = values > floor
    roots = torch.where(kept, values, 0.0).sqrt()
    inverses = torch.where(kept, 1 / torch.where(kept, values, 1.0).sqrt(), 0.0)
    return (vectors * roots.unsqueeze(-2)) @ vectors.mT, (
        vectors * inverses.unsqueeze(-2)
    ) @ vectors.mT
