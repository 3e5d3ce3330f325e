"""Modules that compute attention by code of their own, made to compute it with ours.

An adapted module stays the object that it was, with its parameters, hooks and name; only its
class is another, which is derived from the old one. Its ``forward`` is either the old one, where
that calls PyTorch's attention by name (`calls`), or an adapter:

    def adapter(module, attend, x):
        q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return module.proj(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

An adapter's first call is compared with what the old class computes.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from adaattn.call.history import History
from adaattn.errors import ArgumentError, ArgumentTypeError, ShapeError, expected_got
from adaattn.functional import scaled_dot_product_attention
from adaattn.integrations.conversion.calls import calls_attention, with_attention
from adaattn.integrations.conversion.change import Attend
from adaattn.integrations.pytorch import sdpa_like
from adaattn.spec import Policy

__all__ = ["AdaptedModule", "AdaptedProcessor", "Adapter", "Setting", "has_own_calls", "is_adapted"]

Adapter = Callable[..., Any]
"""Takes the module, ``attend`` and the module's own arguments; returns what the module returns."""

_BUDGETS: Final = 4.0
"""A module's output may differ by this many error budgets; heads mix in its projections."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How one module attends.

    Args:
        policy: of its calls; None follows ``adaattn.use_policy``.
        layer: its number in the model.
        tag: its name in events.
    """

    policy: Policy | None
    layer: int
    tag: str

    def attend(self) -> Attend:
        """Return the public call for one module, which learns from its own calls."""
        return functools.partial(
            scaled_dot_product_attention,
            policy=self.policy,
            history=History(),
            layer=self.layer,
            tag=self.tag,
        )

    def sdpa(self) -> Attend:
        """Return the same with PyTorch's signature; what we do not take goes to PyTorch."""
        return sdpa_like(self.policy, History(), layer=self.layer, tag=self.tag)


def has_own_calls(owner: object, method: str = "forward") -> bool:
    """Return whether a method of an object's class calls PyTorch's attention by name.

    Args:
        owner: a module, or a processor of diffusers.
        method: ``"forward"`` or ``"__call__"``.
    """
    return calls_attention(getattr(type(owner), method, None))


def is_adapted(owner: object) -> bool:
    """Return whether an object's class is one of ours.

    Args:
        owner: a module, or a processor of diffusers.
    """
    return hasattr(type(owner), _BASE)


@dataclass(slots=True)
class AdaptedModule:
    """A module whose class is changed.

    Args:
        module: the module.
        setting: how it attends.
        adapter: what it computes; None runs its own ``forward``.
        switches: attributes to set meanwhile, so that its own code takes the right branch.
    """

    module: nn.Module
    setting: Setting
    adapter: Adapter | None = None
    switches: dict[str, object] = field(default_factory=dict)
    _before: type | None = None
    _switched: dict[str, object] = field(default_factory=dict)

    def apply(self) -> None:
        """Give the module its new class."""
        base = type(self.module)
        self._switched = {name: getattr(self.module, name) for name in self.switches}
        self.module.__class__ = _derived(base, "forward", self.setting, self.adapter)
        self._before = base
        for name, value in self.switches.items():
            setattr(self.module, name, value)

    def undo(self) -> None:
        """Give it the old one, unless somebody else changed it since."""
        before = self._before
        if before is not None and getattr(type(self.module), _BASE, None) is before:
            self.module.__class__ = cast("type[nn.Module]", before)
            for name, value in self._switched.items():
                setattr(self.module, name, value)
        self._before = None


@dataclass(slots=True)
class AdaptedProcessor:
    """A module of diffusers whose processor is another: processors may be shared, modules not.

    Args:
        module: has a ``processor`` whose ``__call__`` calls attention.
        setting: how it attends.
    """

    module: Any
    setting: Setting
    _before: object = None
    _made: object = None

    def apply(self) -> None:
        """Put a copy of the processor in its place, with a new class."""
        self._before = self.module.processor
        made: Any = copy.copy(self._before)
        made.__class__ = _derived(type(made), "__call__", self.setting, None)
        self.module.processor = self._made = made

    def undo(self) -> None:
        """Put the old one back, unless somebody else changed it since."""
        if self._made is not None and self.module.processor is self._made:
            self.module.processor = self._before
        self._made = None


_BASE: Final = "_adaattn_base"
_MADE: Final = "_adaattn_made"


def _derived(base: type, method: str, setting: Setting, adapter: Adapter | None) -> type:
    """Return a class that computes a method with our attention; it goes by the old name."""
    if adapter is None:
        function: Callable[..., Any] = with_attention(getattr(base, method), setting.sdpa())
    else:
        function = _adapted(base, adapter, setting)
    members = {
        method: function,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduced,
        _BASE: base,
        _MADE: (method, setting, adapter),
    }
    return type(base.__name__, (base,), members)


def _reduced(self: Any, protocol: int) -> tuple[Any, ...]:
    """Return how a copy is made, or a pickle read: by the old class, which has a name."""
    del protocol
    cls = type(self)
    return _revived, (getattr(cls, _BASE), *getattr(cls, _MADE)), self.__dict__


def _revived(base: type, method: str, setting: Setting, adapter: Adapter | None) -> object:
    """Return an empty object of the class that an adapted one had."""
    made: object = object.__new__(_derived(base, method, setting, adapter))
    return made


def _adapted(base: type, adapter: Adapter, setting: Setting) -> Callable[..., Any]:
    """Return a ``forward`` that runs an adapter; its first result is compared with the module's."""
    original: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    attend = setting.attend()
    is_new = True

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        nonlocal is_new
        result = adapter(self, attend, *args, **keywords)
        if is_new and not torch.compiler.is_compiling():
            try:
                _compare(self, original, result, args, keywords, setting)
            except (ShapeError, ArgumentError, ArgumentTypeError):
                self.__class__ = base
                raise
            is_new = False
        return result

    return forward


def _compare(
    module: nn.Module,
    original: Callable[..., Any],
    result: Any,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    setting: Setting,
) -> None:
    """Raise unless an adapter's result is like the module's own: structure, shapes, numbers.

    In training dropout may differ, so that only shapes count then.
    """
    found, structure = tree_flatten(result)
    devices = {item.device for item in found if isinstance(item, torch.Tensor) and item.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        wanted, wanted_structure = tree_flatten(original(module, *args, **keywords))
    name = f"what the adapter of {type(module).__name__} returns"
    hint = "the module computes as before; mend the adapter and convert again"
    if structure != wanted_structure:
        raise ArgumentTypeError(expected_got(name, wanted_structure, structure, hint))
    for mine, theirs in zip(found, wanted, strict=True):
        if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
            if type(mine) is not type(theirs):
                raise ArgumentTypeError(
                    expected_got(name, type(theirs).__name__, type(mine).__name__, hint)
                )
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            wanted_kind, kind = (f"{tuple(t.shape)} {t.dtype}" for t in (theirs, mine))
            raise ShapeError(expected_got(name, wanted_kind, kind, hint))
        if not module.training and theirs.is_floating_point():
            _compare_numbers(mine.detach(), theirs, setting, name, hint)


def _compare_numbers(
    mine: torch.Tensor, theirs: torch.Tensor, setting: Setting, name: str, hint: str
) -> None:
    """Raise if two tensors differ by more than rounding and an error budget explain."""
    budget = 0.0 if setting.policy is None else setting.policy.error_budget
    allowed = float(torch.finfo(theirs.dtype).eps) ** 0.5 + _BUDGETS * budget
    size = float(theirs.double().norm())
    error = float((mine.double() - theirs.double()).norm())
    if not error <= allowed * size:
        wanted = f"the module's own output within {allowed:.1e} of its norm"
        relative = error / size if size else error
        raise ArgumentError(expected_got(name, wanted, f"{relative:.1e} of it", hint))
