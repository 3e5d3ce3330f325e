"""Singular and eigenvalue decompositions whose gradients stay finite when values repeat.

PyTorch's backward of `svd` and `eigh` divides by the gaps between values, and gives NaN or
enormous numbers when two coincide, as the zeros of a low-rank matrix do. Here a gap that
rounding alone could close contributes nothing, which is exact for every function that does not
depend on the choice of vectors inside a repeated value (projections, residuals, the values
themselves). Gradients are of first order only.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

_GRAM_ROWS = 4096
"""Rows converted to the Gram matrix's dtype at once, so that no full copy is made."""


def largest_magnitude(matrix: torch.Tensor) -> torch.Tensor:
    """Return [..., 1, 1]: the largest absolute element, without gradient; 1 for zeros.

    Dividing by it keeps squares from overflow and underflow.
    """
    if matrix.numel() == 0:
        return matrix.new_ones((*matrix.shape[:-2], 1, 1))
    largest = matrix.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where(largest == 0.0, 1.0, largest)


def gram_matrix(matrix: torch.Tensor, unit: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``A.T @ A`` for ``A = matrix / unit``, accumulated in ``dtype``.

    Args:
        matrix: [..., m, n].
        unit: [..., 1, 1], see `largest_magnitude`.
        dtype: dtype of the result, [..., n, n].
    """
    columns = matrix.shape[-1]
    total = matrix.new_zeros((*matrix.shape[:-2], columns, columns), dtype=dtype)
    for part in matrix.split(_GRAM_ROWS, dim=-2):
        converted = part.to(dtype) / unit.to(dtype)
        total = total + converted.mT @ converted
    return total


def symmetric_eigen(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues, largest first, and eigenvectors as columns, of symmetric matrices."""
    with torch.no_grad():
        values, vectors = torch.linalg.eigh(matrix)
    values, vectors = _SymmetricEigen.apply(  # type: ignore[no-untyped-call]
        matrix, values.flip(-1), vectors.flip(-1)
    )
    return values, vectors


def exp_entropy(values: torch.Tensor) -> torch.Tensor:
    """Return exp of the entropy of singular values [..., n] divided by their sum; 0 for zeros."""
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total == 0.0, 1.0, total)
    entropy = -(share * torch.where(share == 0.0, 1.0, share).log()).sum(-1)
    return torch.where(total[..., 0] == 0.0, 0.0, entropy.exp())


def thin_triplets(
    matrix: torch.Tensor, left: torch.Tensor, values: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the given singular triplets of a matrix, with a gradient into the matrix.

    The gradient is that of the thin decomposition, so it takes what the triplets leave of the
    matrix as zero; it is wrong by the squared ratio of the first value left out to the value
    differentiated, and exact when the triplets are complete. Values that are rounding noise,
    whose vectors are arbitrary, get none.

    Args:
        matrix: [..., m, n].
        left: [..., m, l], orthonormal columns.
        values: [..., l], largest first.
        right: [..., l, n], orthonormal rows.
    """
    left, values, right = _ThinTriplets.apply(  # type: ignore[no-untyped-call]
        matrix, left, values, right
    )
    return left, values, right


class _SymmetricEigen(torch.autograd.Function):
    """Passes a decomposition through and differentiates it."""

    @staticmethod
    def forward(
        ctx: Any, matrix: torch.Tensor, values: torch.Tensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = values.clone(), vectors.clone()
        ctx.save_for_backward(values, vectors)
        return values, vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_values, grad_vectors = grads
        values, vectors = ctx.saved_tensors
        inner = _inverse_gaps(values, values) * (vectors.mT @ grad_vectors)
        grad = vectors @ (inner + torch.diag_embed(grad_values)) @ vectors.mT
        return 0.5 * (grad + grad.mT), None, None


class _ThinTriplets(torch.autograd.Function):
    """Passes singular triplets through and differentiates them."""

    @staticmethod
    def forward(
        ctx: Any,
        matrix: torch.Tensor,
        left: torch.Tensor,
        values: torch.Tensor,
        right: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, values, right = left.clone(), values.clone(), right.clone()
        ctx.save_for_backward(left, values, right)
        return left, values, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_left, grad_values, grad_right = grads[0], grads[1], grads[2].mT
        left, values, right = ctx.saved_tensors
        right = right.mT
        gaps = _inverse_gaps(values, values.square())
        turn_left, turn_right = left.mT @ grad_left, right.mT @ grad_right
        inner = gaps * (turn_left - turn_left.mT) * values[..., None, :]
        inner = inner + values[..., :, None] * gaps * (turn_right - turn_right.mT)
        present = values > _noise_floor(values)
        inner = inner + torch.diag_embed(torch.where(present, grad_values, 0.0))
        inverse = _safe_inverse(values, values)[..., None, :]
        outside_left = (grad_left - left @ turn_left) * inverse
        outside_right = (grad_right - right @ turn_right) * inverse
        grad = left @ inner @ right.mT + outside_left @ right.mT + left @ outside_right.mT
        return grad, None, None, None


def _noise_floor(values: torch.Tensor) -> torch.Tensor:
    """Return [..., 1]: the size below which differences of ``values`` are rounding."""
    largest = values.abs().amax(-1, keepdim=True)
    return largest * (torch.finfo(values.dtype).eps * values.shape[-1])


def _safe_inverse(values: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return 1 / denominator, and 0 where the values are rounding noise."""
    noise = values.abs() <= _noise_floor(values)
    return torch.where(noise, 0.0, 1.0 / torch.where(noise, 1.0, denominator))


def _inverse_gaps(values: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
    """Return 1 / (compared_j - compared_i) at [i, j], and 0 where the values coincide."""
    distance = (values[..., None, :] - values[..., :, None]).abs()
    noise = distance <= _noise_floor(values)[..., None]
    gaps = compared[..., None, :] - compared[..., :, None]
    return torch.where(noise, 0.0, 1.0 / torch.where(noise, 1.0, gaps))
