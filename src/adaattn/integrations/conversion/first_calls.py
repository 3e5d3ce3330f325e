"""An adapter's first calls, held against what the module itself computes.

Both run on copies of module and arguments, so that caches and counters see one call. Numbers are
compared with exact attention and in float32 at least, outside of training alone, where dropout does
not tell the two apart.
"""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from adaattn._events import no_events
from adaattn.attention._hooks import HOOK_DICTIONARIES
from adaattn.errors import ArgumentError, ArgumentTypeError, ShapeError
from adaattn.functional import scaled_dot_product_attention
from adaattn.integrations.conversion.change import Attend

__all__ = ["Adapter", "FirstCalls"]

Adapter = Callable[..., Any]
"""Takes the module, ``attend`` and the module's own arguments; returns what the module returns."""

_LOGGER = logging.getLogger("adaattn")
_HALF: Final = (torch.float16, torch.bfloat16)
_HINT: Final = "the module computes as before; mend the adapter and convert again"
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class FirstCalls:
    """The first calls of one module's adapter; over once numbers were compared.

    Args:
        base: the module's own class.
        original: its ``forward``.
        adapter: what is to take its place.
    """

    def __init__(self, base: type, original: Callable[..., Any], adapter: Adapter) -> None:
        self._base = base
        self._original = original
        self._adapter = adapter
        self._knows_shapes = self._knows_numbers = False

    def is_over(self, module: nn.Module) -> bool:
        """Return whether nothing is left to compare in such a call, or nothing can be.

        Args:
            module: in training or not.
        """
        known = self._knows_shapes if module.training else self._knows_numbers
        return known or _is_recorded()

    def run(self, module: nn.Module, attend: Attend, args: tuple[Any, ...], keywords: Any) -> Any:
        """Return the adapter's result, after comparing it with the module's own.

        Args:
            module: the adapted module; where the adapter fails it gets its own class back.
            attend: attention for the adapter.
            args: of the call.
            keywords: of the call.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: the adapter returns something else.
        """
        try:
            copies = [self._copied(module, args, keywords) for _ in range(3)]
        except Exception:
            _LOGGER.warning(
                "the adapter of %s is not compared: module or arguments cannot be copied",
                self._base.__name__,
                exc_info=True,
            )
            self._knows_shapes = self._knows_numbers = True
            return self._adapter(module, attend, *args, **keywords)
        with torch.no_grad():
            wanted = self._run(copies[0], self._original)
        try:
            result = self._adapter(module, attend, *args, **keywords)
            self._compare_forms(result, wanted)
            if not module.training:
                self._compare_numbers(copies[1], copies[2])
        except BaseException:
            module.__class__ = self._base
            raise
        self._knows_shapes = True
        self._knows_numbers = self._knows_numbers or not module.training
        return result

    def _copied(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[nn.Module, _Arguments]:
        """Return the module as it was, without hooks, and its arguments."""
        made = copy.deepcopy(module)
        made.__class__ = self._base
        for part in made.modules():
            for name in HOOK_DICTIONARIES:
                if name.startswith(("_forward_hooks", "_backward")):
                    getattr(part, name).clear()
        return made, tree_map(_copied_leaf, (args, keywords))

    @staticmethod
    def _run(copied: tuple[nn.Module, _Arguments], forward: Callable[..., Any]) -> Any:
        """Return what a function of a copied module returns; random states stay as they are."""
        module, (args, keywords) = copied
        leaves = tree_flatten((args, keywords))[0]
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        on_gpu = [device for device in devices if device.type == "cuda"]
        with torch.random.fork_rng(devices=on_gpu), no_events():
            return forward(module, *args, **keywords)

    def _compare_forms(self, result: Any, wanted: Any) -> None:
        """Raise unless structure, types, shapes and dtypes are the same."""
        name = self._name()
        (found, shape), (expected, wanted_shape) = tree_flatten(result), tree_flatten(wanted)
        if shape != wanted_shape:
            raise ArgumentTypeError.got(name, wanted_shape, shape, _HINT)
        for mine, theirs in zip(found, expected, strict=True):
            if type(mine) is not type(theirs):
                kinds = type(theirs).__name__, type(mine).__name__
                raise ArgumentTypeError.got(name, *kinds, _HINT)
            if not isinstance(theirs, torch.Tensor):
                continue
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                kinds = _form(theirs), _form(mine)
                raise ShapeError.got(name, *kinds, _HINT)

    @torch.no_grad()
    def _compare_numbers(
        self, one: tuple[nn.Module, _Arguments], other: tuple[nn.Module, _Arguments]
    ) -> None:
        """Raise unless the adapter computes with exact attention what the module computes."""
        exactly = functools.partial(scaled_dot_product_attention, policy="quality")
        one, other = (_widened(copied) for copied in (one, other))
        kinds = {item.device.type for item in one[0].parameters()} or {"cpu"}
        with torch.autocast(kinds.pop(), enabled=False):
            wanted = tree_flatten(self._run(one, self._original))[0]
            adapter = self._adapter
            found = tree_flatten(
                self._run(other, lambda module, *a, **k: adapter(module, exactly, *a, **k))
            )[0]
        for mine, theirs in zip(found, wanted, strict=True):
            if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
                self._compare_floats(mine, theirs)
                continue
            plain = isinstance(theirs, bool | int | float | str)
            same = mine == theirs if plain else True
            if isinstance(theirs, torch.Tensor):
                same = torch.equal(mine, theirs)
            if not same:
                raise ArgumentError.got(self._name(), theirs, mine, _HINT)

    def _compare_floats(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Raise if numbers differ by more than rounding, where the module's own are finite."""
        finite = theirs.isfinite()
        mine, theirs = mine[finite].double(), theirs[finite].double()
        allowed = float(torch.finfo(torch.float32).eps) ** 0.5
        error, size = float((mine - theirs).norm()), float(theirs.norm())
        if not error <= allowed * size:
            wanted = f"the module's own output within {allowed:.1e} of its norm"
            relative = error / size if size else error
            raise ArgumentError.got(self._name(), wanted, f"{relative:.1e} of it", _HINT)

    def _name(self) -> str:
        return f"what the adapter of {self._base.__name__} returns"


def _is_recorded() -> bool:
    """Return whether somebody records or transforms what runs, so that no number can be read."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _copied_leaf(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _widened(copied: tuple[nn.Module, _Arguments]) -> tuple[nn.Module, _Arguments]:
    """Return module and arguments with 16-bit numbers in float32."""

    def wide(leaf: Any) -> Any:
        half = isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF
        return leaf.float() if half else leaf

    module, arguments = copied
    if any(item.dtype in _HALF for item in (*module.parameters(), *module.buffers())):
        module = module.float()
    return module, tree_map(wide, arguments)


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
