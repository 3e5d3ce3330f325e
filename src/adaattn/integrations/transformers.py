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
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from adaattn.attention.statistics import AttentionStatistics
from adaattn.call.history import History
from adaattn.call.outputs import AuxRequest
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    AssetError,
    ShapeError,
    UnsupportedError,
    expected_got,
)
from adaattn.functional import scaled_dot_product_attention
from adaattn.integrations._transformers_masks import make_mask
from adaattn.integrations._transformers_support import module_check, unsupported_reasons
from adaattn.integrations._transformers_visibility import masked, packed, unmasked, with_bias
from adaattn.policies import resolve_policy
from adaattn.spec import Policy

__all__ = [
    "IGNORED_KEYWORDS",
    "Registration",
    "register",
    "unregister",
    "unsupported_reasons",
]

MINIMUM_VERSION = (5, 0)

IGNORED_KEYWORDS = frozenset(
    {
        "cache_position",
        "deterministic",  # FlashAttention's switch; PyTorch's own is honoured
        "kernel_options",  # tuning of FlexAttention
        "logits_to_keep",
        "max_length_k",  # implied by cu_seq_lens_k
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",  # already applied to q and k
        "position_ids",  # likewise; packed positions come back in the mask
        "return_dict",
        "seq_idx",  # for state-space layers; attention gets cu_seq_lens
        "use_cache",
    }
)
"""Keywords that Transformers passes to layers and that do not change attention."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


class Registration:
    """A handle on an attention implementation added to Transformers; also a context manager.

    Args:
        name: what to pass as ``attn_implementation``.
        policy: policy of every call through this name; None follows ``adaattn.use_policy``.
        registries: Transformers' attention and mask registries, and what was put into each.
        hook: PyTorch's handle on the check of models that are being built.
        history: what the calls teach, layer by layer.
    """

    def __init__(
        self,
        name: str,
        policy: Policy | None,
        registries: tuple[tuple[Any, Callable[..., Any]], ...],
        hook: RemovableHandle,
        history: History,
    ) -> None:
        self._history = history
        self._statistics = AttentionStatistics()
        history.watch = self._statistics.record
        self.name = name
        self.policy = policy
        self._registries = registries
        self._hook = hook

    @property
    def is_active(self) -> bool:
        """True until `undo`, and while nobody replaced what was registered."""
        return all(_entry(registry, self.name) is made for registry, made in self._registries)

    def statistics(self) -> AttentionStatistics:
        """Return what the calls through this name were, all models and layers together.

        Layers are named ``layer0``, ``layer1``, ... as in modules. What activation checkpointing
        runs again counts again.
        """
        whole = AttentionStatistics.merge([self._statistics])
        for served in self._history.served():
            if served.calls:
                whole.record(served.event, served.calls)
        return whole

    def undo(self) -> None:
        """Take the implementation out of Transformers again; doing it twice is harmless.

        Models that still use the name raise Transformers' own error at their next call.
        """
        self._hook.remove()
        for registry, made in self._registries:
            if _entry(registry, self.name) is made:
                del registry._global_mapping[self.name]
        if _REGISTRATIONS.get(self.name) is self:
            del _REGISTRATIONS[self.name]

    def __enter__(self) -> "Registration":
        """Return the handle itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo the registration."""
        self.undo()

    def __repr__(self) -> str:
        """Return the name and whether it is still registered."""
        return f"Registration(name={self.name!r}, is_active={self.is_active})"


_REGISTRATIONS: dict[str, Registration] = {}
"""The handles of the names that Transformers' registries hold by our doing."""


def register(name: str = "adaattn", *, policy: Policy | str | float | None = None) -> Registration:
    """Return a handle after making ``attn_implementation=name`` work in Transformers.

    Doing it again replaces the earlier registration, whose handle then undoes nothing.

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
        raise ArgumentError(
            expected_got(
                "name",
                "letters, digits, '_', '.' and '-', without 'flash'",
                repr(name),
                "Transformers reads other names as FlashAttention or as a kernel on the hub",
            )
        )
    attention_registry, mask_registry = _registries()
    resolved = None if policy is None else resolve_policy(policy)
    earlier = _REGISTRATIONS.get(name)
    if earlier is not None:
        earlier.undo()
    for registry in (attention_registry, mask_registry):
        if name == "eager" or _entry(registry, name) is not None:
            raise ArgumentError(
                expected_got(
                    "name",
                    "one that Transformers does not know yet",
                    repr(name),
                    "choose another name",
                )
            )

    history = History()
    attend = partial(attention_forward, policy=resolved, history=history)
    mask = partial(make_mask)  # an object of its own, by which undoing knows it
    attention_registry.register(name, attend)
    mask_registry.register(name, mask)
    made = ((attention_registry, attend), (mask_registry, mask))
    hook = register_module_module_registration_hook(module_check(name))
    _REGISTRATIONS[name] = Registration(name, resolved, made, hook, history)
    return _REGISTRATIONS[name]


def unregister(name: str = "adaattn") -> bool:
    """Return whether there was a registration of this name, after undoing it.

    Args:
        name: the name that was passed to `register`.
    """
    registration = _REGISTRATIONS.get(name)
    if registration is not None:
        registration.undo()
    return registration is not None


def _registries() -> tuple[Any, Any]:
    """Return Transformers' attention and mask registries."""
    try:
        import transformers
    except ImportError as error:
        raise AssetError(
            expected_got(
                "transformers", "an installed package", "none", "pip install 'adaattn[hf]'"
            )
        ) from error
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


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    output_attentions: bool | None = None,
    *,
    policy: Policy | None = None,
    history: History | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what a layer of Transformers expects: ([B, Sq, Hq, Dv], weights or None).

    Args:
        module: the attention layer; its ``is_causal``, ``layer_idx`` and ``training`` are read.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D], unrepeated.
        value: [B, Hkv, Sk, Dv], unrepeated.
        attention_mask: boolean or additive [B, 1 or Hq, Sq, Sk]; it then says all that there is
            to say, as in eager attention, and causality and window are not applied again.
        dropout: probability of dropping a weight, in training.
        scaling: factor of the scores; None is 1/sqrt(D).
        is_causal: overrules the layer's own.
        sliding_window: keys that a query sees, itself included; for calls without a mask.
        softcap: c in c*tanh(s/c).
        position_bias: added to the scores, [B or 1, Hq, Sq, Sk].
        s_aux: [Hq] sink logits.
        sinks: the same by another name.
        cu_seq_lens_q: starts of packed sequences and their end, [N + 1], with B = 1.
        cu_seq_lens_k: the same for keys.
        output_attentions: return the weights [B, Hq, Sq, Sk] too, before dropout.
        policy: policy of the call; None follows ``adaattn.use_policy``.
        history: what earlier calls taught, layer by layer; `register` keeps one.
        **kwargs: anything in `IGNORED_KEYWORDS`; other names must be None.

    Raises:
        ArgumentTypeError: a keyword is unknown and may change attention.
        ShapeError: q is not 4-D, or a mask is not.
        UnsupportedError: sinks that differ by token.
    """
    if not kwargs.keys() <= IGNORED_KEYWORDS:
        _refuse_unknown(kwargs)
    shape = query.shape
    if len(shape) != 4:
        raise ShapeError(expected_got("query", "[B, Hq, Sq, D]", tuple(shape)))
    _, kv_heads, len_k, _ = key.shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        starts = (cu_seq_lens_q, cu_seq_lens_k)
        seen = packed(attention_mask, starts, causal, sliding_window, query, len_k)
    elif attention_mask is None:
        seen = unmasked(causal, sliding_window, shape[2], len_k)
    else:
        seen = masked(attention_mask, len_k, query.dtype)
    if position_bias is not None:
        seen = with_bias(seen, position_bias, query.dtype)
    if seen.num_keys < len_k:
        key, value = key[:, :, : seen.num_keys], value[:, :, : seen.num_keys]
    if sinks is None:
        sinks = s_aux
    layer = _layer(module)
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen.mask,
        dropout_p=dropout if module.training else 0.0,
        is_causal=seen.is_causal,
        scale=scaling,
        enable_gqa=shape[1] != kv_heads,
        align=seen.align,
        window=seen.window,
        softcap=softcap,
        sinks=None if sinks is None else _head_sinks(sinks, shape[1]),
        cu_seqlens_q=seen.cu_seqlens_q,
        cu_seqlens_k=seen.cu_seqlens_k,
        policy=policy,
        return_aux=AuxRequest(weights=True) if output_attentions else None,
        tag="" if layer < 0 else f"layer{layer}",
        layer=layer,
        history=history,
    )
    if not output_attentions:
        return result.transpose(1, 2).contiguous(), None
    output, aux = result
    weights = torch.nn.functional.pad(aux.weights, (0, len_k - seen.num_keys))
    return output.transpose(1, 2).contiguous(), weights.to(query.dtype)


def _refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    """Raise for keywords that may change attention and are not known here."""
    for name, value in kwargs.items():
        if name in IGNORED_KEYWORDS or value is None:
            continue
        if name == "cache":
            raise UnsupportedError(
                "adaattn",
                ["continuous batching passes its own paged cache, which is not read here"],
                'use attn_implementation="sdpa" for continuous batching',
            )
        raise ArgumentTypeError(
            expected_got(
                "keyword of the attention layer",
                "one that AdaAttn honours or knows to leave attention as it is",
                repr(name),
                'drop it, or use attn_implementation="eager" for this model',
            )
        )


def _head_sinks(sinks: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return sinks as [Hq]."""
    if sinks.numel() != num_heads:
        raise UnsupportedError(
            "adaattn",
            [expected_got("sinks", f"one logit a head, [{num_heads}]", tuple(sinks.shape))],
            'use attn_implementation="eager" for this model',
        )
    return sinks.reshape(num_heads)


def _layer(module: torch.nn.Module) -> int:
    """Return the number of the layer, -1 if it has none."""
    index = getattr(module, "layer_idx", None)
    return -1 if index is None else int(index)
