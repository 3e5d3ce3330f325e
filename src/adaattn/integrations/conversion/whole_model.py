"""Attention of a whole model replaced in place, by what each of its layers allows.

    from adaattn import convert

    report = convert(model)
    print(report)
    report.undo()

``torch.nn.MultiheadAttention`` becomes a module of ours; models of Transformers get an
``attn_implementation``; what calls PyTorch's attention by name, as timm, diffusers and most
hand-written models do, calls ours; a few classes of torchvision and timm that write the scores
out have adapters here, and yours can have one each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from adaattn.attention.base import BaseAttention
from adaattn.errors import ArgumentTypeError
from adaattn.integrations.conversion.adapters import (
    AdaptedModule,
    AdaptedProcessor,
    Setting,
    class_reason,
    is_adapted,
)
from adaattn.integrations.conversion.calls import calling_methods
from adaattn.integrations.conversion.change import Change
from adaattn.integrations.conversion.first_calls import Adapter
from adaattn.integrations.conversion.implementation import (
    Implementation,
    is_pretrained,
    reads_registry,
    reasons_against_model,
)
from adaattn.integrations.conversion.multihead import (
    Multihead,
    built,
    check_settings,
    module_class,
    reasons_to_leave,
)
from adaattn.integrations.conversion.vision import known_adapter
from adaattn.policies import resolve_policy
from adaattn.spec import Policy

__all__ = ["ConversionReport", "convert"]

_POLICIES: Final = {"ada": "balanced", "dense": "quality"}
"""Policies of what is no module of ours, by kind."""


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
    _changes: tuple[Change, ...] = field(default=(), repr=False, compare=False)

    def undo(self) -> tuple[str, ...]:
        """Put back what was replaced, with the parameters that it has by now; twice is harmless.

        Copies of the converted model stay converted.

        Returns:
            Names of modules that somebody else replaced or gave another class since: they stay.
        """
        left: list[str] = []
        first: BaseException | None = None
        for change in reversed(self._changes):
            try:
                left += change.undo()
            except Exception as error:  # noqa: BLE001 - the others are undone all the same
                first = first or error
        if first is not None:
            raise first
        return tuple(left)

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
    model: nn.Module,
    kind: str | type[BaseAttention] = "ada",
    *,
    adapter: Mapping[type[nn.Module], Adapter] | None = None,
    **settings: Any,
) -> ConversionReport:
    """Return what was replaced, after replacing the attention layers of a model in place.

    The default is not exact: the policy ``"balanced"`` allows each head's output a relative
    error of 1 %. ``policy="quality"``, or the kind ``"dense"``, is exact.

    - ``torch.nn.MultiheadAttention``, those inside ``nn.TransformerEncoderLayer``,
      ``nn.TransformerDecoderLayer`` and ``nn.Transformer`` among them, becomes a module of ours
      with the very same parameters and hooks, the training flag, ``batch_first``, and weights
      returned unless ``need_weights=False`` is passed. One instance under two names stays one.
      Encoders make no nested tensors any more; what they return at padded positions is then as
      in training.
    - Models of Hugging Face Transformers get an ``attn_implementation`` of their own.
    - Modules whose methods call ``F.scaled_dot_product_attention`` by name (timm, most
      hand-written models), and processors of diffusers that do or that call its dispatcher, keep
      their code; that call is ours. Calls in other functions, in decorated methods or by
      ``super()`` are not seen.
    - Swin and MaxViT of torchvision and Swin of timm have adapters here.

    Args:
        model: any module.
        kind: ``"ada"`` (`AdaAttention`), ``"adaptive_rank"``, ``"adaptive_precision"``,
            ``"dense"``, or a subclass of `BaseAttention`. The others than ``"ada"`` and
            ``"dense"`` are for ``torch.nn.MultiheadAttention`` alone, unless a policy is given.
        adapter: for each class of yours, a function of the module, of ``attend`` (which takes
            what `adaattn.scaled_dot_product_attention` takes) and of the arguments of the
            module's ``forward``, which returns what that returns. Its first call is compared
            with the module's own result.
        **settings: keywords of the kind's class that say how it computes, such as ``policy``;
            those that say what is computed come from the module replaced.

    Raises:
        ArgumentTypeError: ``model`` is no module, ``kind`` no name or class, an adapter no
            function, or a setting is unknown. Nothing is replaced then.
        ArgumentError: an unknown name, or a setting that would change what is computed.
        ShapeError, ArgumentTypeError, ArgumentError: later, at the first call of a module whose
            adapter returns another shape, structure or other numbers; the module is put back.

    Example:
        >>> import torch
        >>> from adaattn import convert
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> print(convert(layer, "dense"))
        replaced 1 of 1 attention layers
          + self_attn  DenseAttention(64, 4, dropout=0.1, layer=0)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError.got("model", "a torch.nn.Module", type(model).__name__)
    make = module_class(kind)
    check_settings(make, settings)
    work = _Work(model, make, settings, _policy(kind, settings), _checked(adapter))
    work.look()
    return work.finish()


def _policy(kind: object, settings: Mapping[str, Any]) -> Policy | str | None:
    """Return the policy of what is no module of ours, None being ambient; or why it has none."""
    if others := sorted(set(settings) - {"policy"}):
        return f"the settings {others} are for torch.nn.MultiheadAttention alone; pass a policy"
    if "policy" in settings:
        named = settings["policy"]
        return None if named is None else resolve_policy(named)
    if not isinstance(kind, str) or kind not in _POLICIES:
        return "this kind is for torch.nn.MultiheadAttention alone; pass a policy"
    return resolve_policy(_POLICIES[kind])


def _checked(adapter: object) -> Mapping[type[nn.Module], Adapter]:
    """Return the caller's adapters, all of them functions of classes of modules."""
    wanted = "a mapping from classes of modules to functions"
    if adapter is None:
        return {}
    if not isinstance(adapter, Mapping):
        raise ArgumentTypeError.got("adapter", wanted, repr(adapter))
    for cls, function in adapter.items():
        fits = isinstance(cls, type) and issubclass(cls, nn.Module) and callable(function)
        if not fits:
            raise ArgumentTypeError.got("adapter", wanted, f"{cls!r}: {function!r}")
    return adapter


class _Work:
    """One conversion: what is to be changed, found before anything changes.

    Args:
        model: the model.
        make: class of the modules that replace ``torch.nn.MultiheadAttention``.
        settings: keywords of that class.
        policy: of everything else, or why nothing else is converted.
        adapters: the caller's.
    """

    def __init__(
        self,
        model: nn.Module,
        make: type[BaseAttention],
        settings: dict[str, Any],
        policy: Policy | str | None,
        adapters: Mapping[type[nn.Module], Adapter],
    ) -> None:
        self._model = model
        self._make = make
        self._settings = settings
        self._why_not = policy if isinstance(policy, str) else ""
        self._policy = None if isinstance(policy, str) else policy
        self._adapters = adapters
        self._multihead: dict[nn.Module, BaseAttention] = {}
        self._names: dict[nn.Module, str] = {}
        self._changes: list[Change] = []
        self._replaced: list[tuple[str, str]] = []
        self._left: list[tuple[str, str]] = []
        self._models: set[nn.Module] = set()
        self._layers = 0

    def look(self) -> None:
        """Decide for each module what to do with it."""
        reasons: dict[nn.Module, str] = {}
        for name, module in self._model.named_modules():
            if is_pretrained(module) and module not in self._models:
                reasons |= self._set_implementation(name, module)
            if type(module) in self._adapters:
                self._adapt(name, module, self._adapters[type(module)])
            elif isinstance(module, nn.MultiheadAttention):
                self._replace(name, module)
            elif module in reasons:
                self._note_layer(name, module, reasons[module])
            else:
                self._consider(name, module)
        present = {type(module) for module in self._model.modules()}
        for cls in self._adapters.keys() - present:
            self._left.append((f"adapter of {cls.__name__}", "the model has no such module"))

    def finish(self) -> ConversionReport:
        """Make all changes, or none where one fails, and return what was done."""
        if self._multihead:
            self._changes.append(Multihead(self._model, self._multihead, self._names))
        report = ConversionReport(
            model=self._multihead.get(self._model, self._model),
            replaced=tuple(self._replaced),
            left=tuple(self._left),
            _changes=tuple(self._changes),
        )
        try:
            for change in self._changes:
                change.apply()
        except BaseException:
            report.undo()
            raise
        return report

    def _replace(self, name: str, module: nn.MultiheadAttention) -> None:
        """Replace one module of PyTorch's by one of ours."""
        if reasons := list(reasons_to_leave(module)):
            self._left.append((name, "; ".join(reasons)))
            return
        new = built(self._make, module, self._next(), self._settings)
        self._multihead[module] = new
        self._names[module] = name
        self._replaced.append((name, f"{type(new).__name__}({new.extra_repr()})"))

    def _set_implementation(self, name: str, model: nn.Module) -> dict[nn.Module, str]:
        """Let a model of Transformers take its attention from here.

        Returns the layers that this is about, each with why it is left, "" where it is not.
        """
        self._models.update(part for part in model.modules() if is_pretrained(part))
        parts = [part for part in model.modules() if not is_pretrained(part)]
        readers = [part for part in parts if reads_registry(part)]
        against = reasons_against_model(model)
        against += [self._why_not] if self._why_not else []
        if readers and not against:
            self._changes.append(Implementation(name, model, self._policy))
        own = [part for part in parts if type(part).__module__.startswith("transformers.")]
        layers = readers or [part for part in own if _looks_like_attention(part)]
        return dict.fromkeys(layers, "; ".join(against))

    def _note_layer(self, name: str, layer: nn.Module, reason: str) -> None:
        """Report a layer of a model of Transformers."""
        if reason:
            self._left.append((name, reason))
            return
        self._layers += 1
        self._replaced.append((name, f"{type(layer).__name__}, by its model"))

    def _consider(self, name: str, module: nn.Module) -> None:
        """Adapt a module that attends by code of its own, or say why not."""
        known = known_adapter(type(module))
        processor = getattr(module, "processor", None)
        if known is not None:
            self._adapt(name, module, known)
        elif calling_methods(type(module)):
            self._adapt(name, module, None)
        elif processor is not None and calling_methods(type(processor)):
            self._adapt_processor(name, module, processor)
        elif _looks_like_attention(module):
            self._left.append((name, self._reason_to_leave(module) or _why_left(module)))

    def _adapt(self, name: str, module: nn.Module, adapter: Adapter | None) -> None:
        """Change the class of a module."""
        reason = self._reason_to_leave(module) or class_reason(type(module))
        if reason:
            self._left.append((name, reason))
            return
        switches: dict[str, object] = {}
        if adapter is None and getattr(module, "fused_attn", None) is False:
            switches["fused_attn"] = True  # timm's own switch, without which it calls nothing
        setting = Setting(self._policy, self._next(), name)
        self._changes.append(AdaptedModule(module, setting, adapter, switches))
        way = "its own code" if adapter is None else "an adapter"
        self._replaced.append((name, f"{type(module).__name__}, {way} with our attention"))

    def _adapt_processor(self, name: str, module: nn.Module, processor: object) -> None:
        """Give a module of diffusers another processor."""
        reason = self._reason_to_leave(module) or class_reason(type(processor))
        if isinstance(processor, nn.Module):
            reason = reason or "its processor has parameters of its own"
        if reason:
            self._left.append((name, reason))
            return
        self._changes.append(AdaptedProcessor(module, Setting(self._policy, self._next(), name)))
        kind = f"{type(module).__name__} by {type(processor).__name__}"
        self._replaced.append((name, f"{kind}, its own code with our attention"))

    def _reason_to_leave(self, module: nn.Module) -> str:
        """Return why a module cannot be adapted; "" if it can."""
        if isinstance(module, BaseAttention):
            return f"it is already of the class {type(module).__name__}"
        if is_adapted(module) or is_adapted(getattr(module, "processor", None)):
            return "it is adapted already"
        if isinstance(module, torch.jit.ScriptModule):
            return "it is scripted; convert the model before torch.jit"
        if "forward" in vars(module):
            return "its forward was replaced on the instance"
        if module._compiled_call_impl is not None:
            return "it was compiled by itself; convert the model first, then compile"
        if nn.utils.parametrize.is_parametrized(module):
            return "its parameters are parametrised; remove the parametrisation first"
        return self._why_not

    def _next(self) -> int:
        """Return the number of the next layer."""
        self._layers += 1
        return self._layers - 1


def _looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module calls itself attention, and none inside it does."""
    return _is_named_so(module) and not any(
        _is_named_so(inner) for inner in module.modules() if inner is not module
    )


def _is_named_so(module: nn.Module) -> bool:
    """Return whether a class that is not PyTorch's own has attention in its name."""
    cls = type(module)
    name = getattr(module, "original_name", cls.__name__).lower()
    is_own = cls.__module__.startswith("torch.") and not isinstance(module, torch.jit.ScriptModule)
    return not is_own and ("attention" in name or "attn" in name)


def _why_left(module: nn.Module) -> str:
    """Return why what looks like attention stays as it is."""
    name = type(module).__name__
    if type(module).__module__.partition(".")[0] == "transformers":
        return f"{name} is a layer of Transformers; convert the model that it belongs to"
    return (
        f"{name} computes attention by code of its own; pass adapter={{{name}: function}}, or use "
        "adaattn.patch_sdpa() where it calls PyTorch's function in other code"
    )
