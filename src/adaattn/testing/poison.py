"""Fresh memory filled with NaN, so that an output element that nobody wrote shows.

PyTorch's own ``fill_uninitialized_memory`` needs deterministic mode, which changes what
is planned; this changes nothing but the memory. Allocations that a compiled kernel of
PyTorch makes for itself are not seen.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["poisoned_memory"]

_ALLOCATORS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


class _PoisonMode(TorchDispatchMode):
    """Fills what the allocating operators return."""

    looks_inside = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator; poison its result if it is fresh memory."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS:
            _poison(result)
        return result


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill ``torch.empty`` and its relatives with NaN (integers: their maximum) inside the block.

    Example:
        >>> import torch
        >>> with poisoned_memory():
        ...     torch.empty(2)
        tensor([nan, nan])
    """
    with _PoisonMode():  # type: ignore[no-untyped-call]
        yield


def _poison(tensor: torch.Tensor) -> None:
    """Fill one tensor with what no computation would leave there."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
