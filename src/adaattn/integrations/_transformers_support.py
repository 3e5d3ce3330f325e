"""Which models of Transformers take their attention from its registry, and which do not.

An architecture that computes attention by code of its own never calls a registered function.
Some still ask the mask registry for masks, and would read one that is meant for another function
as if it were theirs. So they are refused: while they are built, and when they ask for a mask.

Transformers knows the difference by ``_supports_attention_backend`` and
``_can_set_attn_implementation()``, which reads the modelling code. There is no list of names.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from adaattn.errors import UnsupportedError

__all__ = ["expects_additive_masks", "module_check", "unsupported_reasons"]


def unsupported_reasons(model_class: type) -> list[str]:
    """Return why a model class cannot use a registered attention function; empty if it can.

    Args:
        model_class: a class of model, such as ``transformers.BloomModel``. Only its own modelling
            code is judged: models inside it, such as a vision tower, have classes of their own.

    Example:
        >>> from transformers import BertModel, BloomModel
        >>> from adaattn.integrations.transformers import unsupported_reasons
        >>> unsupported_reasons(BertModel)
        []
        >>> len(unsupported_reasons(BloomModel))
        1
    """
    ancestors: list[Any] = [base for base in reversed(model_class.__mro__) if _is_model(base)]
    reasons = []
    follows = getattr(model_class, "_supports_attention_backend", False)
    if not follows and not all(base._can_set_attn_implementation() for base in ancestors):
        reasons.append(
            f"{model_class.__name__}: its modelling code computes attention itself and never calls "
            "Transformers' attention registry"
        )
    for name in dict.fromkeys(table for base in ancestors for table in _own_tables(base)):
        reasons.append(
            f"{model_class.__name__}: its modelling code takes attention classes from {name}, "
            "a table of its own, and not from Transformers' attention registry"
        )
    return reasons


def module_check(name: str) -> Callable[[torch.nn.Module, str, torch.nn.Module | None], None]:
    """Return a hook that refuses unsupported models as soon as they get their first submodule.

    Args:
        name: the ``attn_implementation`` whose models are checked.
    """

    def check(module: torch.nn.Module, _: str, __: torch.nn.Module | None) -> None:
        model_class: type = type(module)
        # Models slice lists of layers at each forward pass, which registers them anew.
        if model_class is not torch.nn.ModuleList and _is_model(model_class):
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == name:
                _raise_if(_cached_reasons(model_class), name)

    return check


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def expects_additive_masks(config_class: type, name: str) -> bool:
    """Return whether the modelling code behind a configuration may add masks to scores.

    Code that serves SDPA knows boolean masks. Other code was written for the masks of eager
    attention.

    Args:
        config_class: the class of the configuration that asks for a mask.
        name: its ``attn_implementation``, for the message.

    Raises:
        UnsupportedError: models of this configuration would misread the mask, or are unknown.
    """
    models = _models_of(config_class)
    _raise_if(next(filter(None, (_cached_reasons(model) for model in models)), []), name)
    return not all(getattr(model, "_supports_sdpa", False) for model in models)


def _raise_if(reasons: list[str], name: str) -> None:
    """Raise UnsupportedError if there are reasons."""
    if reasons:
        hint = 'use attn_implementation="eager" for this model'
        raise UnsupportedError(f'attn_implementation="{name}"', reasons, hint)


@functools.cache
def _cached_reasons(model_class: type) -> list[str]:
    """Return `unsupported_reasons`, read from the modelling code once."""
    return unsupported_reasons(model_class)


@functools.cache
def _models_of(config_class: type) -> tuple[type, ...]:
    """Return the classes of the models that have this class of configuration.

    Raises:
        UnsupportedError: there is none, so that nobody knows who will read the mask.
    """
    from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

    models = tuple(_descendants(PreTrainedModel))
    for base in config_class.__mro__:
        if base is PreTrainedConfig:
            break
        if found := tuple(model for model in models if model.config_class is base):
            return found
    try:
        mapped = MODEL_MAPPING.get(config_class, ())
    except ValueError:  # the mapping names a class that this release does not have
        mapped = ()
    if mapped:
        return tuple(mapped) if isinstance(mapped, (list, tuple)) else (mapped,)
    # A part of a model may have a configuration that no class of model names.
    package = config_class.__module__.rpartition(".")[0]
    found = tuple(m for m in models if package and m.__module__.rpartition(".")[0] == package)
    if not found:
        raise UnsupportedError(
            f"a mask for {config_class.__name__}",
            ["no model class of this configuration is known, nor how it would read the mask"],
            'use attn_implementation="eager" for this model',
        )
    return found


def _descendants(model_class: Any) -> Iterator[Any]:
    """Return every subclass that exists by now, a base before those derived from it."""
    for child in model_class.__subclasses__():
        yield child
        yield from _descendants(child)


def _is_model(model_class: Any) -> bool:
    """Return whether a class is a model of Transformers, the common base class excluded."""
    from transformers import PreTrainedModel

    return issubclass(model_class, PreTrainedModel) and model_class is not PreTrainedModel


def _own_tables(model_class: type) -> list[str]:
    """Return the names of a modelling file's tables from implementation to attention class."""
    names: Mapping[str, object] = getattr(sys.modules.get(model_class.__module__), "__dict__", {})
    return [
        name
        for name, table in names.items()
        if type(table) is dict
        and isinstance(table.get("eager"), type)
        and issubclass(table["eager"], torch.nn.Module)
    ]
