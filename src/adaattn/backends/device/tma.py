"""Launches of kernels in Gluon whose tensors TMA copies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import torch
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adaattn.backends.device.launch import View

__all__ = ["TYPES", "Launcher", "descriptor_type"]

_MOST_KEPT: Final = 2048
"""Descriptions of tensors that a kernel keeps, of half a KiB each: of all layouts together."""

TYPES: Final = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "i16": gl.int16}
"""What TMA copies, by Triton's names."""


class Launcher:
    """Launches a compiled kernel on the current device with what it takes when it runs.

    Triton's own launch describes tensors for TMA anew at each call, and is handed every constant.

    Args:
        built: Triton's compiled kernel. Nobody else may launch it.
    """

    def __init__(self, built: Any) -> None:
        self._metas = tuple(built.metadata.tensordesc_meta or ())
        # Triton makes the launch of these two: for it descriptors are ready, and constants gone.
        built.src = SimpleNamespace(
            constants={}, signature=dict(enumerate(_launched_types(built.src.signature.values())))
        )
        built.metadata = built.metadata._replace(tensordesc_meta=None)
        built._init_handles()
        self._run = built.run
        self._given = (built.function, built.packed_metadata, None, None, None)
        self._places = count()
        self._known: dict[tuple[int, int], list[Any]] = {}

    def bind(self, views: Sequence[View]) -> Callable[..., None]:
        """Return the launch for tensors that lie in some way.

        It takes the number of blocks, the stream, the tensors that TMA copies, which are the
        kernel's first arguments, and the other arguments in order, addresses as numbers.

        Args:
            views: of those tensors: shape and strides.
        """
        run, given, known = self._run, self._given, self._known
        both = zip(views, self._metas, strict=True)
        places = [(next(self._places), view, meta) for view, meta in both]

        def launch(
            num_blocks: int, stream: int, copied: Sequence[torch.Tensor], *others: Any
        ) -> None:
            described: list[Any] = []
            for (place, view, meta), tensor in zip(places, copied, strict=True):
                at = place, tensor.data_ptr()
                found = known.get(at)
                if found is None:
                    if len(known) >= _MOST_KEPT:
                        known.clear()
                    found = known[at] = make_tensordesc_arg(_described(tensor, view), meta)
                described += found
            run(num_blocks, 1, 1, stream, *given, *described, *others)

        return launch


def _launched_types(types: Iterable[str]) -> Iterator[str]:
    """Yield Triton's names of the types that a launch hands over, addresses as numbers."""
    for name in types:
        if name.startswith("tensordesc"):
            rank = name.split("]")[0].count(",") + 1
            yield from ("nvTmaDesc", *["i32"] * rank, *["i64"] * rank)
        elif name != "constexpr":
            yield "i64" if name.startswith("*") else name


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
