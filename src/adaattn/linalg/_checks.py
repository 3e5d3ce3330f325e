"""Argument checks and numeric facts that the files of this package share."""

import torch

from adaattn._dtypes import precision_of
from adaattn.errors import ArgumentTypeError, NonFiniteError, ShapeError


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def require_matrix(tensor: torch.Tensor, subject: str) -> None:
    """Refuse what is not a floating-point tensor of at least two dimensions.

    Raises:
        ArgumentTypeError: no tensor.
        ShapeError: fewer than two dimensions.
        DTypeError: not float64, float32, bfloat16 or float16.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError.got(subject, "a torch.Tensor", type(tensor).__name__)
    precision_of(tensor.dtype, subject=subject)
    if tensor.ndim < 2:
        raise ShapeError.got(subject, "a tensor of at least 2 dimensions", tuple(tensor.shape))


def require_finite(tensor: torch.Tensor, subject: str) -> None:
    """Refuse NaN and infinity. Reads one value from the device.

    Raises:
        NonFiniteError: an element is NaN or infinite.
    """
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        count = tensor.numel() - int(finite.sum())
        raise NonFiniteError.got(subject, "finite elements", f"{count} NaN or infinite ones")


def seeded_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return the generator, or a fresh one with seed 0 so that no global state is consumed."""
    return torch.Generator().manual_seed(0) if generator is None else generator
