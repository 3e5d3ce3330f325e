"""Launches of a Triton function that look nothing up twice.

Triton's own launch works out at each call what is compiled for it: 20 to 40 us with fifty
arguments. Here that is done once for each signature; then the compiled kernel is launched.
"""

import importlib
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from adaattn.backends.masks import stream_of
from adaattn.backends.own_kernels import compiling
from adaattn.errors import ExecutorError
from adaattn.hardware import on_clear

__all__ = ["Launch", "View"]

View = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor as TMA sees it."""

_ALIGNED_BYTES: Final = 16
_INT32: Final = 2**31
_COMPILED: Final[dict[tuple[Any, ...], Any]] = {}
"""Kernels by signature, as Triton keeps them too; None under its interpreter, or why not."""

on_clear(_COMPILED.clear)


@dataclass(slots=True, kw_only=True, eq=False)
class Launch:
    """One function of the kernels with all that its calls have in common.

    Args:
        module: where it is below `adaattn.backends`, such as ``"triton.forward"``; imported when it
            first runs.
        name: of the function.
        grid: programs.
        numbers: arguments behind the tensors, for which no kernel is made.
        constants: those behind them, for which one is.
        options: warps, and stages.
    """

    module: str
    name: str
    grid: tuple[int, int, int]
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, int], ...]
    _kernels: dict[int, Any] = field(default_factory=dict, init=False)
    """What is compiled for calls without some of the tensors, whose places are bits of a key."""

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch it.

        Args:
            tensors: the pointers, in the function's order; None where there is none. The first is
                on the device that is meant. Their dtypes are those of the first call.

        Raises:
            ExecutorError: it cannot be compiled here.
        """
        first = tensors[0]
        assert first is not None
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                self(*tensors)
            return
        places = missing = 0
        for item in tensors:
            missing <<= 1
            if item is None:
                missing |= 1
            else:
                places |= item.data_ptr()
        if places % _ALIGNED_BYTES:
            self._by_triton(tensors)
            return
        kernel = self._kernels.get(missing)
        if kernel is None:
            self._kernels[missing] = self._known_or_compiled(tensors)
            return
        head = (*self.grid, stream_of(first), kernel.function, kernel.packed_metadata)
        # As `kernel[grid]` does, but for profilers' hooks, which are called even where none is set.
        kernel.run(*head, None, None, None, *tensors, *self.numbers, *self.constants)

    def _known_or_compiled(self, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        """Launch it for the first time; return what was compiled for its signature."""
        if max(self.numbers) >= _INT32:
            self._by_triton(tensors)
            return None
        assert tensors[0] is not None
        dtypes = (None if item is None else item.dtype for item in tensors)
        key = (tensors[0].device, self.module, self.name, self.options, self.constants, *dtypes)
        known = _COMPILED.get(key)
        if isinstance(known, ExecutorError):
            raise known
        if known is not None:
            known[self.grid](*tensors, *self.numbers, *self.constants)
            return known
        try:
            known = _COMPILED[key] = self._by_triton(tensors)
        except ExecutorError as error:
            _COMPILED[key] = error.with_traceback(None)  # it would fail for seconds again
            raise
        return known

    def _by_triton(self, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        """Launch it by Triton's own way, and return what it compiled."""
        with compiling("the Triton kernel"):
            module = importlib.import_module(f"adaattn.backends.{self.module}")
            function = getattr(module, self.name)[self.grid]
            return function(*tensors, *self.numbers, *self.constants, **dict(self.options))
