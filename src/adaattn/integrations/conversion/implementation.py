"""Models of Hugging Face Transformers, which take their attention from a registry by name."""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from adaattn.integrations.transformers import Registration, register, unsupported_reasons
from adaattn.spec import Policy

__all__ = ["Implementation", "attention_layers", "is_pretrained", "reasons_to_leave_model"]

_NUMBERS = itertools.count()


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of Transformers.

    Args:
        module: any module; where Transformers is not imported there is none.
    """
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def reasons_to_leave_model(model: nn.Module) -> list[str]:
    """Return why a model, or one inside it, cannot take a registered attention function.

    Args:
        model: a model of Transformers.
    """
    classes = dict.fromkeys(type(part) for part in model.modules() if is_pretrained(part))
    return [reason for cls in classes for reason in unsupported_reasons(cls)]


def attention_layers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the class of each attention layer of a model of Transformers.

    Args:
        model: the model.
    """
    found = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__ and not is_pretrained(module)
    }
    for name, kind in found.items():
        if not any(other.startswith(f"{name}.") for other in found):
            yield name, kind


class Implementation:
    """The ``attn_implementation`` of one model.

    Args:
        model: a model of Transformers.
        policy: policy of its calls; None follows ``adaattn.use_policy``.
    """

    def __init__(self, model: Any, policy: Policy | None) -> None:
        self._model = model
        self._policy = policy
        self._registration: Registration | None = None
        self._before: list[tuple[Any, str | None]] = []

    def apply(self) -> None:
        """Register a name of its own for the model, and let the model use it."""
        name = f"adaattn_convert_{next(_NUMBERS)}"
        self._registration = register(name, policy=self._policy)
        parts = [part for part in self._model.modules() if is_pretrained(part)]
        configs = {id(config): config for part in parts for config in _nested(part.config)}
        self._before = [(config, config._attn_implementation) for config in configs.values()]
        self._model.set_attn_implementation(name)

    def undo(self) -> None:
        """Let the model use what it used before, and take the name out again."""
        if self._registration is not None:
            for config, name in self._before:  # the outer ones first, which set those inside too
                config._attn_implementation = name
            self._registration.undo()
            self._registration = None


def _nested(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it, the outer ones first."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _nested(inner)
