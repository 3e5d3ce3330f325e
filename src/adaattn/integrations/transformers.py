"""Attention of Hugging Face Transformers models through AdaAttn.

``register()`` adds an attention function and a mask function to Transformers' public
registries, so that ``attn_implementation="adaattn"`` works for every model that follows
them, and returns a handle that takes both out again. Nothing is patched. Models that do not
follow the registries are refused while they are built (by a registration hook of PyTorch), or
at the latest when they ask for a mask.

Shape legend in `adaattn.spec`. A layer passes q [B, Hq, Sq, D] and unrepeated k, v
[B, Hkv, Sk, D]; it gets [B, Sq, Hq, Dv] and the weights or None. Rows that see no key are
zeros here; Transformers' eager attention gives such rows (padding) the mean of all values.

Not covered: continuous batching (it keeps its own paged cache), and the learned sparse
indices of DeepSeek V3.2 and its kin. Both end in an error, never in another result.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from adaattn._packages import import_package
from adaattn.attention.statistics import AttentionStatistics
from adaattn.call.history import History
from adaattn.errors import ArgumentError, UnsupportedError, expected_got
from adaattn.integrations._transformers_attention import IGNORED_KEYWORDS, attention_forward
from adaattn.integrations._transformers_masks import make_mask
from adaattn.integrations._transformers_support import module_check, unsupported_reasons
from adaattn.policies import PolicyLike, resolve_policy
from adaattn.spec import Policy

__all__ = [
    "IGNORED_KEYWORDS",
    "Registration",
    "register",
    "unregister",
    "unsupported_reasons",
]

MINIMUM_VERSION = (5, 0)

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


class Registration:
    """A handle on an attention implementation added to Transformers; also a context manager.

    Args:
        name: what to pass as ``attn_implementation``.
        policy: policy of every call through this name; None follows ``adaattn.use_policy``.
        registries: Transformers' attention and mask registries, and what is put into each.
        history: what the calls teach, layer by layer.
        earlier: the registration whose name this one takes over.
    """

    def __init__(
        self,
        name: str,
        policy: Policy | None,
        registries: tuple[tuple[Any, Callable[..., Any]], ...],
        history: History,
        earlier: "Registration | None",
    ) -> None:
        self._history = history
        self._statistics = AttentionStatistics()
        history.watch = self._statistics.record
        self.name = name
        self.policy = policy
        self._registries = registries
        self._hook: RemovableHandle | None = None  # PyTorch's, on the check of models being built
        self._earlier = earlier
        self._is_entered = self._is_undone = False
        if earlier is not None:
            earlier._take_out()
            if not earlier._is_entered:
                earlier._earlier = None
        self._put_in()

    @property
    def is_active(self) -> bool:
        """True until `undo`, and while nobody replaced what was registered."""
        return all(_entry(registry, self.name) is made for registry, made in self._registries)

    def statistics(self) -> AttentionStatistics:
        """Return what the calls through this name were, all models and layers together.

        Layers are named ``layer0``, ``layer1``, ... as in modules. What activation checkpointing
        runs again counts again, and what ``torch.compile`` has compiled counts nowhere.
        """
        served = list(self._history.served())
        whole = AttentionStatistics.merge([self._statistics])
        for counter in served:
            if counter.calls:
                whole.record(counter.event, counter.calls)
        return whole

    def undo(self) -> None:
        """Take the implementation out of Transformers again; doing it twice is harmless.

        Models that still use the name raise Transformers' own error at their next call.
        """
        self._is_undone = True
        self._take_out()

    def _put_in(self) -> None:
        """Put the implementation into Transformers."""
        for registry, made in self._registries:
            registry.register(self.name, made)
        self._hook = register_module_module_registration_hook(module_check(self.name))
        _REGISTRATIONS[self.name] = self

    def _take_out(self) -> None:
        """Take it out, where nobody replaced it."""
        if self._hook is not None:
            self._hook.remove()
        for registry, made in self._registries:
            if _entry(registry, self.name) is made:
                del registry._global_mapping[self.name]
        if _REGISTRATIONS.get(self.name) is self:
            del _REGISTRATIONS[self.name]

    def __enter__(self) -> "Registration":
        """Return the handle itself."""
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        """Undo the registration, and put back the one that it replaced, unless that was undone."""
        was_active = self.is_active
        self.undo()
        earlier, self._earlier = self._earlier, None
        if was_active and earlier is not None and not earlier._is_undone:
            earlier._put_in()

    def __repr__(self) -> str:
        """Return the name and whether it is still registered."""
        return f"Registration(name={self.name!r}, is_active={self.is_active})"


_REGISTRATIONS: dict[str, Registration] = {}
"""The handles of the names that Transformers' registries hold by our doing."""


def register(name: str = "adaattn", *, policy: PolicyLike | None = None) -> Registration:
    """Return a handle after making ``attn_implementation=name`` work in Transformers.

    Doing it again replaces the earlier registration, whose handle then undoes nothing; after a
    ``with`` block the earlier one is back, unless it was undone.

    Args:
        name: letters, digits, ``_``, ``.`` and ``-``. Not "flash...", which Transformers takes
            for FlashAttention, nor "org/name", which it looks up on the hub.
        policy: policy of every call through this name. None follows ``adaattn.use_policy``, so
            that one registration serves all policies; several names can hold one each.

    Raises:
        ArgumentError: the name is unsuitable, or taken by others.
        PolicyError: no policy has that name.
        AssetError: Transformers is not installed.
        UnsupportedError: Transformers is older than 5.0.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from adaattn.integrations.transformers import register
        >>> config = LlamaConfig(
        ...     vocab_size=32,
        ...     hidden_size=16,
        ...     intermediate_size=32,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> with register():
        ...     model = LlamaForCausalLM(config)
        ...     model.set_attn_implementation("adaattn")
        ...     tuple(model(torch.arange(8)[None]).logits.shape)
        (1, 8, 32)
    """
    if _NAME.fullmatch(name) is None or "flash" in name.lower():
        raise ArgumentError.got(
            "name",
            "letters, digits, '_', '.' and '-', without 'flash'",
            repr(name),
            "Transformers reads other names as FlashAttention or as a kernel on the hub",
        )
    attention_registry, mask_registry = _registries()
    resolved = None if policy is None else resolve_policy(policy)
    earlier = _REGISTRATIONS.get(name)
    own = {} if earlier is None else dict(earlier._registries)
    for registry in (attention_registry, mask_registry):
        entry = _entry(registry, name)
        if name == "eager" or (entry is not None and entry is not own.get(registry)):
            raise ArgumentError.got(
                "name", "one that Transformers does not know yet", repr(name), "choose another name"
            )

    history = History()
    attend = partial(attention_forward, policy=resolved, history=history)
    mask = partial(make_mask)  # an object of its own, by which undoing knows it
    made = ((attention_registry, attend), (mask_registry, mask))
    return Registration(name, resolved, made, history, earlier)


def unregister(name: str = "adaattn") -> bool:
    """Return whether there was a registration of this name, after undoing it.

    Args:
        name: the name that was passed to `register`.
    """
    registration = _REGISTRATIONS.get(name)
    if registration is not None:
        registration.undo()
    return registration is not None


def is_registered(name: str | None) -> bool:
    """Return whether an ``attn_implementation`` is one of ours.

    Args:
        name: as a configuration holds it.
    """
    return name in _REGISTRATIONS


def _registries() -> tuple[Any, Any]:
    """Return Transformers' attention and mask registries."""
    transformers = import_package("transformers")
    version = str(transformers.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        raise UnsupportedError(
            "transformers",
            [expected_got("version", f"{wanted} or later", version)],
            "pip install --upgrade 'adaattn[hf]'",
        )
    return transformers.AttentionInterface, transformers.AttentionMaskInterface


def _entry(registry: Any, name: str) -> Any:
    """Return what a registry holds under a name, or None."""
    return registry._global_mapping.get(name)
