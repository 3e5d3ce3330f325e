"""Memory that kernels write as a whole, and nobody else has to."""

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

__all__ = [
    "Place",
    "adjacent",
    "output_layout",
    "output_like",
    "place_of",
    "placed",
    "unfilled",
    "unfilled_all",
]

_Sizes = tuple[int, ...]

Place = tuple[_Sizes, _Sizes, torch.dtype]
"""Shape, strides in elements and dtype of memory: both as tuples, not as `torch.Size`."""

_is_deterministic = torch._C._get_deterministic_algorithms
_fills = torch._C._get_deterministic_fill_uninitialized_memory
_modes_in_use = torch._C._len_torch_dispatch_stack
_empty_on_gpu: Final[Callable[..., torch.Tensor] | None] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)
"""What Inductor's code allocates with: 1.1 us of the host, 2.3 as an operator (H100's host)."""


def unfilled(
    like: torch.Tensor,
    shape: _Sizes,
    strides: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return memory whose every element a kernel writes, or nobody, on a tensor's device.

    Rows of no packed sequence are nobody's: they hold what was there before.

    ``torch.empty`` fills it with NaN first where deterministic algorithms are asked for
    (``torch.utils.deterministic.fill_uninitialized_memory``): 0.1 ms of a backward pass of 0.5 ms
    (H200, 16K tokens of 2048 columns, November 2026).

    Args:
        like: it has the device, and the dtype if no other is given.
        shape: of the memory.
        strides: in elements, of all that there is; those of adjacent elements if not given.
        dtype: of the memory.
    """
    dtype = dtype or like.dtype
    if _modes_in_use():
        if strides is None:
            return like.new_empty(shape, dtype=dtype)
        return like.new_empty_strided(shape, strides, dtype=dtype)
    strides = strides or adjacent(shape)
    if (
        _empty_on_gpu is not None
        and like.is_cuda
        and like.get_device() == torch._C._cuda_getDevice()
    ):
        return _empty_on_gpu(tuple(shape), tuple(strides), dtype)  # of tuples alone
    if not (_is_deterministic() and _fills()):
        return like.new_empty_strided(shape, strides, dtype=dtype)
    storage = torch.UntypedStorage(math.prod(shape) * dtype.itemsize, device=like.device)
    return like.new_empty(0, dtype=dtype).set_(storage, 0, shape, strides)


def placed(shape: _Sizes, dtype: torch.dtype) -> Place:
    """Return what memory of adjacent elements is allocated by."""
    return tuple(shape), adjacent(shape), dtype


def place_of(tensor: torch.Tensor) -> Place:
    """Return what memory that lies as a tensor is allocated by."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def unfilled_all(like: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    """Return `unfilled` memory for each place: what is asked of the device is asked once."""
    if (
        _empty_on_gpu is None
        or _modes_in_use()
        or not like.is_cuda
        or like.get_device() != torch._C._cuda_getDevice()
    ):
        return [unfilled(like, *place) for place in places]
    return [_empty_on_gpu(*place) for place in places]


def adjacent(shape: _Sizes) -> tuple[int, ...]:
    """Return the strides of adjacent elements."""
    if len(shape) == 1:
        return (1,)
    steps, number = [], 1
    for size in reversed(shape):
        steps.append(number)
        number *= max(size, 1)
    return tuple(steps[::-1])


def output_layout(query: torch.Tensor, columns: int) -> tuple[_Sizes, _Sizes]:
    """Return shape and strides of an output whose dimensions lie in the order of the query's.

    That of an expanded query is contiguous. A graph takes them for granted.
    """
    *sizes, _ = query.shape
    *steps, _ = query.stride()
    number = columns
    # Of equal strides the last is the smallest: all but one are of one element.
    for dim in (2, 1, 0) if 0 in steps else sorted((2, 1, 0), key=steps.__getitem__):
        steps[dim] = number
        number = number * sizes[dim]
    return (*sizes, columns), (*steps, 1)


def output_like(query: torch.Tensor, columns: int) -> torch.Tensor:
    """Return an empty output of that layout."""
    return unfilled(query, *output_layout(query, columns))
