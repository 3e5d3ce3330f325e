"""Puts attention modules in the place of those that a model has.

    from adaattn import convert

    report = convert(model)
    print(report)

Parameters stay the very objects that they were, so optimisers, tied weights and checkpoints
go on as before; only what computes with them changes.
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from adaattn.attention._hooks import bound_hooks, move_hooks
from adaattn.attention.base import BaseAttention
from adaattn.attention.config import AttentionOptions
from adaattn.errors import ArgumentError, ArgumentTypeError, expected_got

__all__ = ["ConversionReport", "convert"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What `convert` replaced, and what it left and why; prints as text.

    Args:
        model: the converted model; another object than the one given only where that was
            itself a ``torch.nn.MultiheadAttention``.
        replaced: (name, what stands there now).
        left: (name, why).
    """

    model: nn.Module
    replaced: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return a line for each attention layer that was found."""
        total = len(self.replaced) + len(self.left)
        names = [name or "(the model itself)" for name, _ in (*self.replaced, *self.left)]
        width = max((len(name) for name in names), default=0)
        sentences = [text for _, text in self.replaced]
        sentences += [f"left: {reason}" for _, reason in self.left]
        signs = "+" * len(self.replaced) + "-" * len(self.left)
        lines = [f"replaced {len(self.replaced)} of {total} attention layers"]
        for sign, name, sentence in zip(signs, names, sentences, strict=True):
            lines.append(f"  {sign} {name:<{width}}  {sentence}")
        return "\n".join(lines)


def convert(
    model: nn.Module, kind: str | type[BaseAttention] = "ada", **settings: Any
) -> ConversionReport:
    """Return what was replaced, after replacing each ``torch.nn.MultiheadAttention`` in place.

    The default is not exact: `AdaAttention` under the policy ``"balanced"``, which allows each
    head's output a relative error of 1 %. ``policy="quality"``, or the kind ``"dense"``, is
    exact.

    Those inside ``nn.TransformerEncoderLayer``, ``nn.TransformerDecoderLayer`` and
    ``nn.Transformer`` are among them. The new modules hold the very same parameters and
    hooks, the training flag, and the behaviour of the old ones where it differs from ours:
    ``batch_first``, and weights returned unless ``need_weights=False`` is passed. One
    instance under two names stays one. Encoders that hold a replaced layer make no nested
    tensors any more, which their layers could not take; what they return at padded
    positions, zeros where PyTorch's inference path was taken, is then as in training.

    Args:
        model: any module.
        kind: ``"ada"`` (`AdaAttention`), ``"adaptive_rank"``, ``"adaptive_precision"``,
            ``"dense"``, or a subclass of `BaseAttention`.
        **settings: keywords of that class that say how it computes, such as ``policy``; those
            that say what is computed come from the module replaced.

    Raises:
        ArgumentTypeError: ``model`` is no module, ``kind`` no name or class, or a setting is
            unknown. Nothing is replaced then.
        ArgumentError: an unknown name, or a setting that would change what is computed.

    Example:
        >>> import torch
        >>> from adaattn.attention.replace import convert
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> print(convert(layer, "dense"))
        replaced 1 of 1 attention layers
          + self_attn  DenseAttention(64, 4, dropout=0.1, layer=0)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(expected_got("model", "a torch.nn.Module", type(model).__name__))
    make = _module_class(kind)
    _check_settings(make, settings)
    new_modules: dict[nn.Module, BaseAttention] = {}
    replaced, left = [], []
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            left += [(name, reason) for reason in _other_attention(module)]
        elif reasons := list(_reasons_to_leave(module)):
            left.append((name, "; ".join(reasons)))
        else:
            new = _built(make, module, len(new_modules), settings)
            new_modules[module] = new
            replaced.append((name, f"{type(new).__name__}({new.extra_repr()})"))
    # Nothing has changed so far: whatever is wrong was raised before.
    for old, new in new_modules.items():
        _move(old, new)
    _install(model, new_modules)
    return ConversionReport(
        model=new_modules.get(model, model), replaced=tuple(replaced), left=tuple(left)
    )


def _module_class(kind: object) -> type[BaseAttention]:
    """Return the class that a name stands for."""
    if isinstance(kind, str):
        if kind not in _KINDS:
            raise ArgumentError(expected_got("kind", f"one of {sorted(_KINDS)}", repr(kind)))
        home, name = _KINDS[kind]
        kind = getattr(importlib.import_module(home), name)
    if isinstance(kind, type) and issubclass(kind, BaseAttention) and not inspect.isabstract(kind):
        return kind
    wanted = "a name, or a subclass of BaseAttention that can be made"
    raise ArgumentTypeError(expected_got("kind", wanted, repr(kind)))


def _check_settings(make: type[BaseAttention], settings: dict[str, Any]) -> None:
    """Refuse settings that the class does not have, or that the module replaced decides."""
    if decided := sorted(_SHAPE & set(settings)):
        raise ArgumentError(
            expected_got(
                "settings",
                "none that says what is computed, which the module replaced decides",
                decided,
                "build the module itself for another shape",
            )
        )
    parameters = inspect.signature(make).parameters.values()
    named = {item.name for item in parameters if item.kind is not item.VAR_KEYWORD}
    allowed = named - _SHAPE
    if unknown := sorted(set(settings) - allowed):
        raise ArgumentTypeError(
            expected_got(f"settings of {make.__name__}", f"some of {sorted(allowed)}", unknown)
        )


def _other_attention(module: nn.Module) -> Iterator[str]:
    """Yield why a module that is no ``nn.MultiheadAttention``, yet attention, is left."""
    if isinstance(module, BaseAttention):
        yield f"it is {_with_article(type(module).__name__)} already"
    elif isinstance(module, torch.jit.ScriptModule):
        if getattr(module, "original_name", "") == "MultiheadAttention":
            yield "it is scripted; convert the model before torch.jit"
    elif _is_from_transformers(module) and not any(
        _is_from_transformers(inner) for inner in module.modules() if inner is not module
    ):
        yield (
            f"{type(module).__name__} is of Hugging Face Transformers, no "
            "torch.nn.MultiheadAttention; adaattn.integrations.transformers.register serves it"
        )


def _with_article(name: str) -> str:
    """Return a name after "a" or "an"."""
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _is_from_transformers(module: nn.Module) -> bool:
    """Return whether a module is an attention layer of Transformers."""
    cls = type(module)
    return cls.__module__.partition(".")[0] == "transformers" and "Attention" in cls.__name__


def _reasons_to_leave(module: nn.MultiheadAttention) -> Iterator[str]:
    """Yield each thing that a replacement would lose."""
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


def _built(
    make: type[BaseAttention], old: nn.MultiheadAttention, layer: int, settings: dict[str, Any]
) -> BaseAttention:
    """Return a new module of the same shape; random numbers are drawn as if it were not made."""
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


def _install(model: nn.Module, new_modules: dict[nn.Module, BaseAttention]) -> None:
    """Put the new modules under every name of the old ones."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new_modules:
                parent._modules[name] = new_modules[child]
    present = set(new_modules.values())
    for encoder in model.modules():
        # Its inference path would hand nested tensors to the layers.
        if isinstance(encoder, nn.TransformerEncoder) and present.intersection(encoder.modules()):
            encoder.use_nested_tensor = False
