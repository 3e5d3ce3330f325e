"""Modules that compute attention by code of their own, made to compute it with ours.

An adapted module stays the object that it was, with its parameters, hooks and name; only its
class is another, which is derived from the old one. What differs in it are the methods that call
PyTorch's attention by name (`calls`), or its ``forward``, which is an adapter:

    def adapter(module, attend, x):
        q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return module.proj(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

An adapter's first calls are compared with what the old class computes (`first_calls`).
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from torch import nn

from adaattn.call.history import History
from adaattn.functional import scaled_dot_product_attention
from adaattn.integrations.conversion.calls import calling_methods, method_with_attention
from adaattn.integrations.conversion.change import Attend
from adaattn.integrations.conversion.first_calls import Adapter, FirstCalls
from adaattn.integrations.pytorch import sdpa_like
from adaattn.spec import Policy

__all__ = [
    "AdaptedModule",
    "AdaptedProcessor",
    "Setting",
    "class_reason",
    "is_adapted",
]


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


def is_adapted(owner: object) -> bool:
    """Return whether an object's very class is one of ours.

    Args:
        owner: a module, or a processor of diffusers.
    """
    return _MADE in vars(type(owner))


def class_reason(cls: type) -> str:
    """Return why no class can be derived from another without a trace; "" if one can.

    Args:
        cls: class of a module, or of a processor.
    """
    own = {"__reduce__", "__reduce_ex__"}
    if any(own & vars(base).keys() for base in cls.__mro__ if base is not object):
        return "its class copies and pickles in a way of its own"
    if any("__init_subclass__" in vars(base) for base in cls.__mro__ if base is not object):
        return "its class wants to know of every class derived from it"
    return ""


_ABSENT: Final = object()


@dataclass(slots=True)
class AdaptedModule:
    """A module whose class is changed.

    Args:
        module: the module.
        setting: how it attends.
        adapter: what it computes; None runs its own code.
        switches: attributes to set meanwhile, so that its own code takes the right branch.
    """

    module: nn.Module
    setting: Setting
    adapter: Adapter | None = None
    switches: dict[str, object] = field(default_factory=dict)
    _before: type | None = field(default=None, init=False)
    _made: type | None = field(default=None, init=False)
    _switched: dict[str, object] = field(default_factory=dict, init=False)

    def apply(self) -> None:
        """Give the module its new class."""
        for name, value in self.switches.items():
            own = vars(self.module).get(name, _ABSENT)
            setattr(self.module, name, value)
            self._switched[name] = own
        self._before = type(self.module)
        self._made = _derived(self._before, self.setting, self.adapter)
        self.module.__class__ = cast("type[nn.Module]", self._made)

    def undo(self) -> list[str]:
        """Give it the old one, unless somebody else changed it since; return its name then."""
        if self._made is not None and type(self.module) is not self._made:
            is_old = type(self.module) is self._before  # an adapter's first call put it back
            self._made = None
            return [] if is_old else [self.setting.tag]
        if self._made is not None:
            self.module.__class__ = cast("type[nn.Module]", self._before)
            self._made = None
        for name, own in self._switched.items():
            if own is _ABSENT:
                vars(self.module).pop(name, None)
            else:
                setattr(self.module, name, own)
        self._switched = {}
        return []


@dataclass(slots=True)
class AdaptedProcessor:
    """A module of diffusers whose processor is another: processors may be shared, modules not.

    Args:
        module: has a ``processor`` whose ``__call__`` calls attention.
        setting: how it attends.
    """

    module: Any
    setting: Setting
    _before: object = field(default=None, init=False)
    _made: object = field(default=None, init=False)

    def apply(self) -> None:
        """Put a copy of the processor in its place, with a new class."""
        self._before = self.module.processor
        made: Any = copy.copy(self._before)
        made.__class__ = _derived(type(made), self.setting, None)
        self.module.processor = self._made = made

    def undo(self) -> list[str]:
        """Put the old one back, unless somebody else changed it since; return its name then."""
        if self._made is None:
            return []
        is_ours = self.module.processor is self._made
        self._made = None
        if is_ours:
            self.module.processor = self._before
        return [] if is_ours else [self.setting.tag]


_MADE: Final = "_adaattn_made"


def _derived(base: type, setting: Setting, adapter: Adapter | None) -> type:
    """Return a class that computes attention by us; it goes by the old name."""
    methods: dict[str, Callable[..., Any]]
    if adapter is None:
        attend = setting.sdpa()
        names = calling_methods(base)
        methods = {name: method_with_attention(base, name, attend) for name in names}
    else:
        methods = {"forward": _adapted(base, adapter, setting)}
    members = {
        **methods,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduced,
        _MADE: (base, setting, adapter),
    }
    return type(base.__name__, (base,), members)


def _reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Return how a copy is made, or a pickle read: by the old class, which has a name."""
    cls = next(cls for cls in type(self).__mro__ if _MADE in vars(cls))
    plain: Any = object.__reduce_ex__(self, protocol)
    return _revived, vars(cls)[_MADE], *plain[2:]


def _revived(base: type, setting: Setting, adapter: Adapter | None) -> object:
    """Return an empty object of the class that an adapted one had."""
    made: object = object.__new__(_derived(base, setting, adapter))
    return made


def _adapted(base: type, adapter: Adapter, setting: Setting) -> Callable[..., Any]:
    """Return a ``forward`` that runs an adapter; its first calls are compared with the module's."""
    original: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    attend = setting.attend()
    first_calls = FirstCalls(base, original, adapter)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if first_calls.is_over(self):
            return adapter(self, attend, *args, **keywords)
        return first_calls.run(self, attend, args, keywords)

    return forward
