"""``torch.nn.MultiheadAttention`` replaced by modules that adapt.

Parameters stay the very objects that they were, so optimisers, tied weights and checkpoints
go on as before; only what computes with them changes.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from adaattn.attention._hooks import bound_hooks, move_hooks
from adaattn.attention.base import BaseAttention
from adaattn.attention.config import AttentionOptions
from adaattn.errors import ArgumentError, ArgumentTypeError

__all__ = ["Multihead", "built", "check_settings", "module_class", "reasons_to_leave"]

_KINDS: Final = {
    "ada": ("adaattn.attention.adaattn", "AdaAttention"),
    "adaptive_precision": ("adaattn.attention.adaptive_precision", "AdaptivePrecisionAttention"),
    "adaptive_rank": ("adaattn.attention.adaptive_rank", "AdaptiveRankAttention"),
    "dense": ("adaattn.attention.dense", "DenseAttention"),
}
_SHAPE: Final = frozenset(
    {"self", "embed_dim", "num_heads", "dropout", "bias", *AttentionOptions.__annotations__}
)
_PARAMETERS: Final = frozenset(
    {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
    | {"bias_k", "bias_v"}
)


class Multihead:
    """All replacements of one model's ``torch.nn.MultiheadAttention``.

    Args:
        model: the model.
        new_modules: what stands in the place of each.
        names: of the modules.
    """

    def __init__(
        self,
        model: nn.Module,
        new_modules: dict[nn.Module, BaseAttention],
        names: dict[nn.Module, str],
    ) -> None:
        self._names = names
        self._classes = {new: type(new) for new in new_modules.values()}
        self._model = model
        self._new = new_modules
        self._nested: list[nn.TransformerEncoder] = []
        self._is_applied = False

    def apply(self) -> None:
        """Move parameters and hooks, and put the new modules under every name of the old ones."""
        self._is_applied = True
        for old, new in self._new.items():
            _move(old, new)
        _install(self._model, dict(self._new))
        present = set(self._new.values())
        for encoder in self._model.modules():
            # Its inference path would hand nested tensors to the layers.
            if isinstance(encoder, nn.TransformerEncoder) and present.intersection(
                encoder.modules()
            ):
                self._nested += [encoder] if encoder.use_nested_tensor else []
                encoder.use_nested_tensor = False

    def undo(self) -> list[str]:
        """Put the old modules back, with what the new ones hold by now.

        Those that somebody parametrised or gave another class since stay, and are named.
        """
        if not self._is_applied:
            return []
        self._is_applied = False
        back: dict[Any, Any] = {}
        for old, new in self._new.items():
            if type(new) is not self._classes[new]:
                continue
            back[new] = old
            for name in old._parameters:
                old._parameters[name] = new._parameters.get(name)
            old._modules["out_proj"] = new._modules["out_proj"]
            old.training = new.training
            vars(old)["dropout"] = new.dropout
            move_hooks(new, old)
        _install(self._model, back)
        for encoder in self._nested:
            encoder.use_nested_tensor = not set(self._classes).intersection(encoder.modules())
        return [self._names[old] for old, new in self._new.items() if new not in back]


def module_class(kind: object) -> type[BaseAttention]:
    """Return the class that a name stands for.

    Args:
        kind: a name, or the class itself.

    Raises:
        ArgumentError, ArgumentTypeError: it is neither.
    """
    if isinstance(kind, str):
        if kind not in _KINDS:
            raise ArgumentError.got("kind", f"one of {sorted(_KINDS)}", repr(kind))
        home, name = _KINDS[kind]
        kind = getattr(importlib.import_module(home), name)
    if isinstance(kind, type) and issubclass(kind, BaseAttention) and not inspect.isabstract(kind):
        return kind
    wanted = "a name, or a subclass of BaseAttention that can be made"
    raise ArgumentTypeError.got("kind", wanted, repr(kind))


def check_settings(make: type[BaseAttention], settings: dict[str, Any]) -> None:
    """Refuse settings that the class does not have, or that the module replaced decides.

    Args:
        make: the class.
        settings: keywords for it.

    Raises:
        ArgumentError: one that says what is computed.
        ArgumentTypeError: an unknown one.
    """
    if decided := sorted(_SHAPE & set(settings)):
        raise ArgumentError.got(
            "settings",
            "none that says what is computed, which the module replaced decides",
            decided,
            "build the module itself for another shape",
        )
    parameters = inspect.signature(make).parameters.values()
    named = {item.name for item in parameters if item.kind is not item.VAR_KEYWORD}
    allowed = named - _SHAPE
    if unknown := sorted(set(settings) - allowed):
        raise ArgumentTypeError.got(
            f"settings of {make.__name__}", f"some of {sorted(allowed)}", unknown
        )


def reasons_to_leave(module: nn.MultiheadAttention) -> Iterator[str]:
    """Yield each thing that a replacement would lose.

    Args:
        module: the module to replace.
    """
    if reason := _class_reason(module):
        yield reason
        return
    if "forward" in vars(module):
        yield "its forward was replaced on the instance"
    if module._compiled_call_impl is not None:
        yield "it was compiled by itself; convert the model first, then compile"
    if strange := sorted(_strange_members(module)):
        yield f"it holds more or less than the parameters of its class: {strange}"
    if bound := bound_hooks(module):
        yield f"it has hooks that are bound to it: {bound}"


def _class_reason(module: nn.MultiheadAttention) -> str:
    """Return why the very class of a module speaks against replacing it; "" if nothing does."""
    cls = type(module)
    if nn.utils.parametrize.is_parametrized(module):
        return "its parameters are parametrised; remove the parametrisation first"
    if cls.__module__.startswith("torch.ao.") or getattr(module, "qconfig", None) is not None:
        return "it is quantised, or prepared for it; convert the model before that"
    if cls is not nn.MultiheadAttention:
        return f"{cls.__name__} is a subclass that may compute something else"
    return ""


def _strange_members(module: nn.MultiheadAttention) -> set[str]:
    """Return the names of parameters, buffers and children that are not as they were made."""
    present = {name for name, item in module._parameters.items() if item is not None}
    packed = "in_proj_weight" in present
    wanted = {"in_proj_weight"} if packed else {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    optional = {"in_proj_bias", "bias_k", "bias_v"}
    strange = (
        (present - _PARAMETERS) | (wanted - present) | (present & _PARAMETERS - wanted - optional)
    )
    strange |= set(module._buffers) | (set(module._modules) - {"out_proj"})
    out_proj = module._modules.get("out_proj")
    plain = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
    if out_proj is None or type(out_proj) not in plain:
        return strange | {"out_proj"}
    return strange if set(out_proj._parameters) == {"weight", "bias"} else strange | {"out_proj"}


def built(
    make: type[BaseAttention], old: nn.MultiheadAttention, layer: int, settings: dict[str, Any]
) -> BaseAttention:
    """Return a new module of the same shape; random numbers are drawn as if it were not made.

    Args:
        make: its class.
        old: the module to replace.
        layer: number of the layer.
        settings: keywords for the class.
    """
    weight = old.out_proj.weight
    devices = [weight.device] if weight.is_cuda else []
    has_bias, has_out_bias = old.in_proj_bias is not None, old.out_proj.bias is not None
    with torch.random.fork_rng(devices=devices):
        # mypy sees the abstract class, whose runner every real one makes itself.
        concrete: Any = make
        new: BaseAttention = concrete(
            old.embed_dim,
            old.num_heads,
            old.dropout,
            has_bias,
            out_bias=None if has_out_bias == has_bias else has_out_bias,
            add_bias_kv=old.bias_k is not None,
            add_zero_attn=bool(old.add_zero_attn),
            kdim=None if old.kdim == old.embed_dim else old.kdim,
            vdim=None if old.vdim == old.embed_dim else old.vdim,
            batch_first=old.batch_first,
            device=weight.device,
            dtype=weight.dtype,
            layer=layer,
            **settings,
        )
    return new


def _move(old: nn.Module, new: BaseAttention) -> None:
    """Give the new module what the old one holds: the same objects."""
    for name, parameter in old._parameters.items():
        if parameter is not None:
            new._parameters[name] = parameter
    new._modules["out_proj"] = old._modules["out_proj"]
    new.need_weights_by_default = True
    new.training = old.training
    move_hooks(old, new)
    for name, value in vars(old).items():
        vars(new).setdefault(name, value)


def _install(model: nn.Module, instead: dict[Any, Any]) -> None:
    """Put modules under every name of others."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in instead:
                parent._modules[name] = instead[child]
