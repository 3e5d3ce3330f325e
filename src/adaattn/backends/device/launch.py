"""Launches of a Triton function that look nothing up twice.

Triton's own launch works out at each call what is compiled for it: 20 to 40 us with fifty
arguments. Here that is done once for each signature; then the compiled kernel is launched.
"""

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import torch

from adaattn.backends.masks import stream_of
from adaattn.backends.own_kernels import compiling
from adaattn.errors import ExecutorError
from adaattn.hardware import on_clear

__all__ = ["Launch", "View", "address_of", "bare"]

View = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor as TMA sees it."""

_Bare = tuple[Callable[..., None], tuple[Any, ...]]
"""A compiled kernel's launch, and what it takes between the stream and the kernel's arguments."""

_ALIGNED_BYTES: Final = 16
_INT32: Final = 2**31
_COMPILED: Final[dict[tuple[Any, ...], _Bare | ExecutorError]] = {}
"""Kernels by signature, or why there is none."""

on_clear(_COMPILED.clear)

_LOADED: Final[dict[Any, _Bare]] = {}
"""Launches by Triton's kernel, which lives as long: what is on a card is not loaded again."""


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
    _kernels: dict[int, _Bare] = field(default_factory=dict, init=False)
    """What is compiled for calls without some of the tensors, whose places are bits of a key."""

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch it.

        Args:
            tensors: the pointers, in the function's order; None where there is none. All are on
                the device that is meant. Their dtypes are those of the first call.

        Raises:
            ExecutorError: it cannot be compiled here.
        """
        first = tensors[0]
        assert first is not None
        if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(first.device):
                self(*tensors)
            return
        addresses = []
        places = missing = 0
        for item in tensors:
            missing += missing
            if item is None:
                missing += 1
            else:
                address = item.data_ptr()
                addresses.append(address)
                places |= address
        if places % _ALIGNED_BYTES:
            self._by_triton(tensors)
            return
        kernel = self._kernels.get(missing)
        if kernel is None:
            kernel = self._known_or_compiled(tensors)
            if kernel is None:
                self._by_triton(tensors)
                return
            self._kernels[missing] = kernel
        run, given = kernel
        run(*self.grid, stream_of(first), *given, *addresses, *self.numbers)

    def _known_or_compiled(self, tensors: tuple[torch.Tensor | None, ...]) -> _Bare | None:
        """Return what is compiled for tensors of such dtypes; None where only Triton launches it.

        That is under its interpreter, and where a number has more than 32 bits.
        """
        if max(self.numbers) >= _INT32:
            return None
        assert tensors[0] is not None
        devices = {item.device for item in tensors if item is not None}
        if len(devices) > 1:
            raise ExecutorError(f"expected tensors on one device, got {sorted(map(str, devices))}")
        dtypes = (None if item is None else item.dtype for item in tensors)
        key = (tensors[0].device, self.module, self.name, self.options, self.constants, *dtypes)
        known = _COMPILED.get(key)
        if isinstance(known, ExecutorError):
            raise known
        if known is None:
            try:
                known = self._compiled(tensors)
            except ExecutorError as error:
                _COMPILED[key] = error.with_traceback(None)  # it would fail for seconds again
                raise
            if known is not None:
                _COMPILED[key] = known
        return known

    def _compiled(self, tensors: tuple[torch.Tensor | None, ...]) -> _Bare | None:
        """Return what Triton compiles; None under its interpreter."""
        with compiling("the Triton kernel"):
            given = (*tensors, *self.numbers, *self.constants)
            kernel = self._function().warmup(*given, grid=self.grid, **dict(self.options))
            if hasattr(kernel, "result"):  # of another thread
                kernel = kernel.result()
            if kernel is None or kernel in _LOADED:
                return _LOADED.get(kernel)
            handed = len(list(_launched_types(kernel.src.signature.values())))
            given_over = sum(item is not None for item in tensors) + len(self.numbers)
            assert handed == given_over, "Triton made a number a constant"
            return _LOADED.setdefault(kernel, bare(kernel))

    def _by_triton(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Launch it by Triton's own way."""
        with compiling("the Triton kernel"):
            function = self._function()[self.grid]
            function(*tensors, *self.numbers, *self.constants, **dict(self.options))

    def _function(self) -> Any:
        """Return the function of the kernels."""
        return getattr(importlib.import_module(f"adaattn.backends.{self.module}"), self.name)


def address_of(tensor: torch.Tensor | None) -> int:
    """Return where a tensor begins: a number is launched faster than the tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def bare(kernel: Any) -> _Bare:
    """Return a launch of a compiled kernel that is handed no constants, and addresses as numbers.

    Triton's own looks up each tensor's address, which the driver checks: 8.8 us of the host for
    6.2 (H200's host, Triton 3.6). Profilers' hooks are not called, which Triton calls even where
    none is set.

    Args:
        kernel: as Triton compiled it; it stays as it is.
    """
    made = copy.copy(kernel)
    made.module = made._run = None
    # Triton makes the launch of this: for it descriptors are ready, and constants gone.
    types = _launched_types(kernel.src.signature.values())
    made.src = SimpleNamespace(constants={}, signature=dict(enumerate(types)))
    if getattr(made.metadata, "tensordesc_meta", None):
        made.metadata = made.metadata._replace(tensordesc_meta=None)
    made._init_handles()
    return _without_launcher(made.run, (made.function, made.packed_metadata, None, None, None))


def _without_launcher(launcher: Any, given: tuple[Any, ...]) -> _Bare:
    """Return the function that a launcher of Triton's calls, with what it hands over.

    A launcher asks at each call what memory a kernel needs beside its own: 1 to 2 us of the host.
    What it hands over differs between versions, so it is called once with a stand-in for that
    function. One that asks for memory, or does something else, stays as it is.
    """
    launch, stand_in = getattr(launcher, "launch", None), copy.copy(launcher)
    if launch is None or stand_in is launcher:
        return launcher, given
    marks = tuple(object() for _ in range(6))  # a grid, a stream, two arguments
    handed: list[Any] = []
    stand_in.launch = lambda *everything: handed.extend(everything)
    with suppress(Exception):  # memory, for one, is a product of the grid's sizes
        stand_in(*marks[:4], *given, *marks[4:])
    if tuple(handed[:4]) != marks[:4]:
        return launcher, given
    if tuple(handed[-2:]) == marks[4:]:
        return launch, tuple(handed[4:-2])
    if handed[-1] == marks[4:]:  # as one tuple
        before = tuple(handed[4:-1])
        return (lambda x, y, z, stream, *rest: launch(x, y, z, stream, *before, rest)), ()
    return launcher, given


def _launched_types(types: Iterable[str]) -> Iterator[str]:
    """Yield Triton's names of the types that a launch hands over."""
    for name in types:
        if name.startswith("tensordesc"):
            rank = name.split("]")[0].count(",") + 1
            yield from ("nvTmaDesc", *["i32"] * rank, *["i64"] * rank)
        elif name != "constexpr":
            yield "i64" if name.startswith("*") else name
