"""Projections of queries, keys and values that keep attention's products.

The best rank-r approximation of the score matrix Q K^T follows from two D x D Gram
matrices, whatever the sequence length: with R = (K^T K)^(1/2) and R (Q^T Q) R = V S^2 V^T,
the pair A = R V_r S_r^(-1/2), B = R^(-1) V_r S_r^(1/2) gives (Q A)(K B)^T, the truncated
SVD of Q K^T (Eckart and Young, 1936), by two symmetric eigenproblems.
"""

from dataclasses import dataclass

import torch

from adaattn.linalg._spectral import exp_entropy

__all__ = ["ScoreProjections", "score_projections", "value_basis"]

_RELATIVE_FLOOR = 1e-7


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
