"""Kernels in Gluon compiled, and launched with tensors that TMA copies."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

import torch
from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adaattn.backends.device.gluon import GluonASTSource
from adaattn.backends.device.launch import View, bare

__all__ = ["TYPES", "Launcher", "compiled", "constants_of", "descriptor_type", "signature_of"]

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


def constants_of(function: Any, *sources: Any, **others: Any) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel, whose names are in capitals.

    Args:
        function: of the source.
        sources: have most of them as attributes of these names in small letters.
        **others: those that they have not, by name; what a kernel does not take is left out.
    """
    found = {}
    for name in filter(str.isupper, function.arg_names):
        if name in others:
            found[name] = others[name]
        else:
            source = next(source for source in sources if hasattr(source, name.lower()))
            found[name] = getattr(source, name.lower())
    return found


def signature_of(function: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    """Return Triton's names of the types of all arguments.

    Args:
        function: of the source.
        types: of arguments that are not int32; what a kernel does not take is left out.
        constants: compile-time arguments by name.
    """
    return {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }


def compiled(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    alignments: dict[str, int] | None = None,
    registers: int | None = None,
) -> Any:
    """Return Triton's compiled kernel for sm_90a; its loading waits for the first launch.

    Args:
        function: of the source.
        types: as for `signature_of`.
        constants: likewise.
        alignments: what Triton may take for granted that arguments are multiples of.
        registers: of a thread at entry: what all warps together may hold before the producer
            gives its own up.
    """
    place = function.arg_names.index
    source = GluonASTSource(
        function,
        signature=signature_of(function, types, constants),
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs={
            (place(name),): [["tt.divisibility", step]] for name, step in (alignments or {}).items()
        },
    )
    options = {"num_warps": 4} | ({} if registers is None else {"maxnreg": registers})
    return compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)
