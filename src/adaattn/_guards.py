"""Tensors compared as PyTorch's compiler guards its graphs: in C++, without making shapes."""

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards

__all__ = ["guards"]

_Dims = Sequence[Sequence[int | None]]
"""Of each tensor."""


def guards(
    given: Sequence[torch.Tensor], sizes: _Dims | None = None, strides: _Dims | None = None
) -> Callable[..., bool]:
    """Return what says whether tensors are like those that are given; where they are is not asked.

    Compared are type, dtype, device, shape, strides, whether gradients are followed, and which
    modes see them. Guards take no tensor twice, as in ``attend(x, x, x)``: they see it once, and
    the places where it stood are compared beside them.

    Args:
        given: tensors.
        sizes: theirs, or others; None stands for any.
        strides: likewise.
    """
    sizes = sizes or [list(item.shape) for item in given]
    strides = strides or [list(item.stride()) for item in given]
    first = [next(at for at, other in enumerate(given) if other is item) for item in given]
    seen = sorted(set(first))
    made = TensorGuards(
        *(given[at] for at in seen),
        dynamic_dims_sizes=[list(sizes[at]) for at in seen],  # type: ignore[misc]  # None: any
        dynamic_dims_strides=[list(strides[at]) for at in seen],  # type: ignore[misc]
    )
    check: Callable[..., bool] = made.check
    if len(seen) == len(given):
        return check
    repeats = [(at, before) for at, before in enumerate(first) if at != before]

    def check_repeated(*tensors: torch.Tensor) -> bool:
        if any(tensors[at] is not tensors[before] for at, before in repeats):
            return False
        return check(*[tensors[at] for at in seen])

    return check_repeated
