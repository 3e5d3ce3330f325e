"""Changes of keys and queries that attention does not see, and that quantise better."""

import math

import torch

from adaattn._dtypes import precision_of
from adaattn.errors import ShapeError
from adaattn.linalg._checks import accumulation_dtype, require_matrix

__all__ = ["hadamard_rotate", "smooth_keys"]


def smooth_keys(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys without their mean, and the mean that was subtracted.

    Softmax does not see it: every score of query q falls by ``scale * q . mean``, which is
    also what a log-sum-exp must get back. Channel outliers, which most keys share, vanish
    (SageAttention, https://arxiv.org/abs/2410.02367).

    Args:
        key: [..., Sk, D].

    Returns:
        [..., Sk, D] in the dtype of the key, and [..., 1, D] in float32 (float64 for float64).
    """
    require_matrix(key, "key")
    mean = key.sum(-2, keepdim=True, dtype=accumulation_dtype(key.dtype)) / max(key.shape[-2], 1)
    return (key - mean).to(key.dtype), mean


def hadamard_rotate(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor times the orthonormal Hadamard matrix of its last dimension.

    ``(q H)(k H)^T = q k^T``, so scores stay, while an outlier in one channel is spread over
    all of them (QuaRot, https://arxiv.org/abs/2404.00456). It is its own inverse. Computed by
    the fast transform, D log2 D sums a row, in float32 (float64 for float64).

    Args:
        tensor: [..., D] with D a power of two.

    Raises:
        ShapeError: D is not a power of two.
    """
    precision_of(tensor.dtype, subject="tensor")
    dim = tensor.shape[-1] if tensor.ndim else 0
    if dim < 1 or dim & (dim - 1):
        hint = "pad the last dimension with zeros"
        raise ShapeError.got("last dimension", "a power of two", dim, hint)
    values = tensor.to(accumulation_dtype(tensor.dtype))
    half = 1
    while half < dim:
        pairs = values.reshape(*tensor.shape[:-1], dim // (2 * half), 2, half)
        low, high = pairs.unbind(-2)
        values = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return (values / math.sqrt(dim)).to(tensor.dtype)
