"""Tensors as TMA sees them: shape and strides of its descriptions."""

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import torch

from adaattn._constants import TMA_WRAP
from adaattn._guards import guards
from adaattn.backends.device.launch import View
from adaattn.backends.hopper.launch import Sizes, mask_bytes
from adaattn.backends.masks import broadcast_strides, with_rank
from adaattn.spec import AttentionProblem

__all__ = [
    "ALIGNMENT",
    "Layouts",
    "head_view",
    "is_elsewhere",
    "is_staged",
    "made_readable",
    "mask_view",
    "packed_view",
    "readable",
]

_T = TypeVar("_T")

ALIGNMENT: Final = 16
"""Bytes of which addresses and strides are multiples."""

_STEP: Final = 8
"""Numbers that strides are multiples of: 16 bytes."""

_MOST_KEPT: Final = 4096
"""Layouts of a problem."""

_MOST_PLACES: Final = 0x7FFF0000
"""Of a dimension that a tensor's description does not bound."""


def packed_view(shape: Sizes, strides: Sizes) -> tuple[Sizes, Sizes]:
    """Return packed rows as TMA sees them, so that it knows where a sequence ends.

    With W = 2^30, (W, e, h, W - n) is row e - n of head h, and the fourth dimension ends behind n
    rows: TMA fills those beyond with zeros, and stores none. The first dimension takes W rows back:
    W times 2^34 elements are no distance in addresses of 64 bits. Triton's ``tools/ragged_tma.py``
    has it so. A description that begins before the tensor instead reads memory there that need not
    be: an illegal access, now and then (H200, November 2026).

    Args:
        shape: [1, H, T, D].
        strides: its strides.

    Returns:
        Shape and strides.
    """
    _, heads, _, columns = shape
    _, by_head, by_row, _ = strides
    return (
        (_MOST_PLACES, _MOST_PLACES, heads, TMA_WRAP, columns),
        ((TMA_WRAP << 4) - by_row, by_row, by_head, by_row, 1),
    )


def head_view(tensor: torch.Tensor, *, is_packed: bool) -> View:
    """Return [B, H, S, D] as TMA sees it: strides over one element may be anything, so they are."""
    shape = tuple(tensor.shape)
    strides = tuple(
        stride if size > 1 or place == 3 else max(shape[3], 8)
        for place, (size, stride) in enumerate(zip(shape, tensor.stride(), strict=True))
    )
    return packed_view(shape, strides) if is_packed else (shape, strides)


def is_staged(problem: AttentionProblem, mask: torch.Tensor) -> bool:
    """Return whether TMA can read a mask: its rows begin at multiples of 16 bytes.

    Booleans are read in pairs, of which a packed sequence may begin with the second.
    """
    full = with_rank(mask, 4)
    num_bytes = mask_bytes(problem)
    rows = zip(full.shape[:3], full.stride(), strict=False)
    halves = full.dtype is torch.bool and (problem.num_sequences > 0 or full.shape[3] % 2 == 1)
    return (
        not halves
        and full.shape[3] == problem.len_k
        and full.element_size() == num_bytes
        and full.stride(3) == 1
        and full.stride(2) > 0
        and full.data_ptr() % ALIGNMENT == 0
        and not any(stride * num_bytes % ALIGNMENT for size, stride in rows if size > 1)
    )


def mask_view(mask: torch.Tensor) -> View:
    """Return a mask as TMA sees it; two booleans are one number of 16 bits.

    What one mask serves, expanded or not, is one place: the kernel's coordinate there is 0.
    """
    full = with_rank(mask, 4)
    strides = broadcast_strides(full)
    shape = [size if step else 1 for size, step in zip(full.shape, strides, strict=True)]
    steps = [step or full.stride(2) for step in strides[:3]]
    if mask.dtype is torch.bool:
        steps = [step // 2 for step in steps]
        shape[3] //= 2
    return tuple(shape), (*steps, 1)


class Layouts(Generic[_T]):
    """What is worked out once for each layout of the tensors of a problem that TMA reads.

    Args:
        clean: makes a tensor readable.
    """

    def __init__(self, clean: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._clean = clean
        self._known: dict[Any, _T] = {}
        self._last: tuple[_T, Callable[..., bool] | None] | None = None

    def again(
        self,
        tensors: tuple[torch.Tensor, ...],
        layout_of: Callable[..., Any],
        mask: torch.Tensor | None = None,
        *beside: torch.Tensor | None,
    ) -> _T | None:
        """Return what was kept for tensors that can be read as they are; None for others.

        A layout that comes twice in a row is compared with by guards from then on, which make no
        shapes: where caches are cold those take ten times as long.

        Args:
            tensors: as in `find`.
            layout_of: likewise.
            mask: first of what is beside them, which is to begin where TMA can read it, too.
            beside: likewise, tensors; the same are None at each call.
        """
        given = tensors if mask is None else (*tensors, mask)
        if not _are_aligned(given):
            return None
        for item in beside:
            if item is not None:
                given = (*given, item)
        last = self._last
        if last is not None and last[1] is not None and last[1](*given):
            return last[0]
        found = self._known.get(layout_of(*tensors, mask, *beside))
        if found is not None:
            if last is None or last[0] is not found:
                self._last = found, None
            elif last[1] is None:  # else what differs is nothing that a launch depends on
                self._last = found, guards(given)
        return found

    def find(
        self, tensors: tuple[torch.Tensor, ...], layout_of: Callable[..., Any], *beside: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any, _T | None]:
        """Return the tensors, made readable, their layout, and what was kept for it, or None.

        Args:
            tensors: that TMA is to read.
            layout_of: returns from them and ``beside`` what a launch takes for granted.
            beside: what else that depends on.
        """
        layout = layout_of(*tensors, *beside)
        # What something was kept for is readable but for where it begins.
        found = self._known.get(layout) if _are_aligned(tensors) else None
        if found is None:
            tensors = tuple(map(self._clean, tensors))
            layout = layout_of(*tensors, *beside)
            found = self._known.get(layout)
        return tensors, layout, found

    def keep(self, layout: Any, found: _T) -> None:
        """Keep what was worked out for a layout."""
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[layout] = found


def is_elsewhere(query: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU that is not the current one."""
    return query.is_cuda and query.get_device() != torch._C._cuda_getDevice()


def _are_aligned(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether tensors begin where TMA can read them."""
    places = 0
    for item in tensors:
        places |= item.data_ptr()
    return places % ALIGNMENT == 0


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that TMA can read: a copy if it is expanded, or not aligned to 16 bytes."""
    if 0 in tensor.stride() or tensor.data_ptr() % ALIGNMENT:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def made_readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same of a tensor whose strides nobody knew, as in a graph."""
    sizes = zip(tensor.shape[:3], tensor.stride(), strict=False)
    odd = any(step % _STEP for size, step in sizes if size > 1)
    if odd or tensor.stride(3) != 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    return readable(tensor)
