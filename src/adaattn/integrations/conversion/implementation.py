"""Models of Hugging Face Transformers, which take their attention from a registry by name."""

import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from adaattn.integrations.transformers import (
    Registration,
    is_registered,
    register,
    unsupported_reasons,
)
from adaattn.spec import Policy

__all__ = ["Implementation", "is_pretrained", "reads_registry", "reasons_against_model"]

_REGISTRY: Final = "ALL_ATTENTION_FUNCTIONS"
_NUMBERS = itertools.count()
_REGISTERED: dict[Policy | None, Registration] = {}
"""One name for each policy, which stays: copies of converted models go on by it."""


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of Transformers.

    Args:
        module: any module; where Transformers is not imported there is none.
    """
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def reads_registry(module: nn.Module) -> bool:
    """Return whether a module's own code looks attention up in Transformers' registry.

    Args:
        module: any module.
    """
    methods = (getattr(type(module), name, None) for name in dir(type(module)))
    return any(
        isinstance(method, types.FunctionType) and _REGISTRY in method.__code__.co_names
        for method in methods
    )


def reasons_against_model(model: Any) -> list[str]:
    """Return why a model, or one inside it, cannot take another attention function.

    Args:
        model: a model of Transformers.
    """
    parts = {type(part): part for part in model.modules() if is_pretrained(part)}
    reasons = [reason for cls in parts for reason in unsupported_reasons(cls)]
    for cls, part in parts.items():
        if is_registered(part.config._attn_implementation):
            reasons.append(f"{cls.__name__} takes its attention from here already")
        elif not part._can_set_attn_implementation():
            reasons.append(f"{cls.__name__}: Transformers cannot set its attention implementation")
    return list(dict.fromkeys(reasons))


class Implementation:
    """The ``attn_implementation`` of one model.

    Args:
        name: of the model inside the one that is converted.
        model: a model of Transformers.
        policy: policy of its calls; None follows ``adaattn.use_policy``.
    """

    def __init__(self, name: str, model: Any, policy: Policy | None) -> None:
        self._name = name
        self._model = model
        self._policy = policy
        self._chosen = ""
        self._before: list[tuple[Any, str | None]] = []

    def apply(self) -> None:
        """Let the model use the name of its policy."""
        registration = _REGISTERED.get(self._policy)
        if registration is None or not registration.is_active:
            name = f"adaattn_convert_{next(_NUMBERS)}"
            registration = _REGISTERED[self._policy] = register(name, policy=self._policy)
        parts = [part for part in self._model.modules() if is_pretrained(part)]
        configs = {id(config): config for part in parts for config in _nested(part.config)}
        self._before = [(config, config._attn_implementation) for config in configs.values()]
        self._chosen = registration.name
        self._model.set_attn_implementation(self._chosen)

    def undo(self) -> list[str]:
        """Let the model use what it used before, where nobody chose something else since."""
        ours = [config._attn_implementation == self._chosen for config, _ in self._before]
        for (config, name), is_ours in zip(self._before, ours, strict=True):
            if is_ours:  # the outer ones first, which set those inside too
                config._attn_implementation = name
        before, self._before = self._before, []
        return [] if any(ours) or not before else [self._name]


def _nested(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it, the outer ones first."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _nested(inner)
