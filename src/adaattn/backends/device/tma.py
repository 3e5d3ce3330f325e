"""Launches of kernels in Gluon whose tensors TMA copies."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

import torch
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adaattn.backends.device.launch import View, bare

__all__ = ["TYPES", "Launcher", "descriptor_type"]

_MOST_KEPT: Final = 2048
"""Descriptions of tensors that a kernel keeps, of half a KiB each, and lists of them: of all
layouts together."""

TYPES: Final = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "i16": gl.int16}
"""What TMA copies, by Triton's names."""


class Launcher:
    """Launches a compiled kernel on the current device with what it takes when it runs.

    Triton's own launch describes tensors for TMA anew at each call, and is handed every constant.

    Args:
        built: Triton's compiled kernel.
    """

    def __init__(self, built: Any) -> None:
        self._metas = tuple(built.metadata.tensordesc_meta or ())
        self._run, self._given = bare(built)
        self._places = count()
        self._known: dict[tuple[int, int], list[Any]] = {}
        self._together: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def bind(self, views: Sequence[View]) -> Callable[..., None]:
        """Return the launch for tensors that lie in some way.

        It takes the number of blocks, the stream, the tensors that TMA copies, which are the
        kernel's first arguments, and the other arguments in order, addresses as numbers.

        Args:
            views: of those tensors: shape and strides.
        """
        run, given, together = self._run, self._given, self._together
        address = torch.Tensor.data_ptr
        number = next(self._places)
        places = [(next(self._places), *both) for both in zip(views, self._metas, strict=True)]

        def launch(
            num_blocks: int, stream: int, copied: Sequence[torch.Tensor], *others: Any
        ) -> None:
            at = (number, *map(address, copied))
            described = together.get(at)
            if described is None:
                described = self._describe(places, copied)
                together[at] = described
            run(num_blocks, 1, 1, stream, *given, *described, *others)

        return launch

    def _describe(
        self, places: Sequence[tuple[int, View, Any]], copied: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """Return what tensors are described with; each is described once where it lies."""
        known = self._known
        found: list[Any] = []
        if max(len(known), len(self._together)) >= _MOST_KEPT:
            known.clear()
            self._together.clear()
        for (place, view, meta), tensor in zip(places, copied, strict=True):
            at = place, tensor.data_ptr()
            described = known.get(at)
            if described is None:  # what another thread takes out meanwhile stays described
                described = known[at] = make_tensordesc_arg(_described(tensor, view), meta)
            found += described
        return tuple(found)


def _described(tensor: torch.Tensor, view: View) -> Any:
    """Return a tensor as Triton has it described for TMA, unchecked: the caller has checked."""
    made = object.__new__(TensorDescriptor)
    made.shape, made.strides = view
    made.base = tensor
    return made


def descriptor_type(dtype: str, tile: list[int]) -> str:
    """Return Triton's name of the type of a tensor that TMA copies in such tiles."""
    layout = gl.NVMMASharedLayout.get_default_for(tile, TYPES[dtype])
    return f"tensordesc<{dtype}[{','.join(map(str, tile))}],{layout!r}>"
