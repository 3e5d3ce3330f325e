"""The attention function that layers of Transformers call, in terms of the public call.

Shape legend in `adaattn.spec`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from adaattn.call.bound import Bound
from adaattn.call.found import Found
from adaattn.call.history import History
from adaattn.call.outputs import AuxRequest
from adaattn.call.recent import Miss, Place, again, note
from adaattn.errors import ArgumentTypeError, ShapeError, UnsupportedError, expected_got
from adaattn.functional import bind_attention, is_traced, scaled_dot_product_attention
from adaattn.integrations._transformers_structure import MaskStructure, StructuredMask
from adaattn.integrations._transformers_support import expects_additive_masks
from adaattn.integrations._transformers_visibility import (
    Visibility,
    joined,
    masked,
    packed,
    selected,
    unmasked,
    with_bias,
)
from adaattn.spec import Policy

try:  # hooks of Transformers 5 wait for weights, of which few layers tell this function
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _collector: Callable[[], Any] = dict
else:
    _collector = _active_collector.get

__all__ = ["IGNORED_KEYWORDS", "attention_forward"]

IGNORED_KEYWORDS = frozenset(
    {
        "cache_position",
        "deterministic",  # FlashAttention's switch; PyTorch's own is honoured
        "ignore_index",  # the loss reads it
        "input_ids",
        "kernel_options",  # tuning of FlexAttention
        "label_smoothing",  # the loss reads it
        "length",  # a tokenizer's, as are the others for which the model has no name
        "logits_to_keep",
        "max_length_k",  # implied by cu_seq_lens_k
        "max_length_q",
        "mm_token_type_ids",  # of a tokenizer; where they shape the mask, it has them
        "num_items_in_batch",
        "output_cross_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "pixel_values",
        "position_embeddings",  # already applied to q and k
        "position_ids",  # likewise; packed positions come back in the mask
        "return_dict",
        "return_loss",
        "seq_idx",  # for state-space layers; attention gets cu_seq_lens
        "shift_labels",  # the loss reads it
        "special_tokens_mask",
        "token_type_ids",  # of a tokenizer; where they shape the mask, it has them
        "use_cache",
    }
)
"""Keywords that Transformers passes to layers and that do not change attention."""

_UNCOMPARED = IGNORED_KEYWORDS | {"position_bias"}
"""Keywords whose values are not compared with those of the last call: a bias stands as a mask."""


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *positional: Any,
    policy: Policy | None = None,
    history: History | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what a layer of Transformers expects: ([B, Sq, Hq, Dv], weights or None).

    The last call of a layer and shape is found again by the layer's own words.

    Args:
        module: the attention layer; its ``is_causal``, ``layer_idx`` and ``training`` are read.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D], unrepeated.
        value: [B, Hkv, Sk, Dv], unrepeated.
        attention_mask: boolean or additive [B, 1 or Hq, Sq, Sk]; it then says all that there is
            to say, as in eager attention, and causality and window are not applied again.
        *positional: the first of the other arguments, as `_described` names them.
        policy: policy of the call; None follows ``adaattn.use_policy``.
        history: what earlier calls taught, layer by layer; `register` keeps one.
        **keywords: the other arguments, and anything in `IGNORED_KEYWORDS`.

    Raises:
        ArgumentTypeError: a keyword is unknown and may change attention.
        ShapeError: q is not 4-D, or a mask is not.
        UnsupportedError: sinks that differ by token.
    """
    layer = getattr(module, "layer_idx", None)
    tag = "" if layer is None else f"layer{layer}"
    mask: torch.Tensor | None = attention_mask
    structure: object = None
    place: Place | None = None
    known: Bound | Miss = Miss.SKIP
    traced = is_traced()
    if not traced and (wanted := _collector()) and any("attentions" in it for it in wanted):
        keywords["output_attentions"] = True
    if not (positional or traced):
        if keywords.get("s_aux") is not None and keywords.get("sinks") is None:
            keywords["sinks"] = keywords.pop("s_aux")
        if isinstance(mask, StructuredMask) and mask._dense is None:
            structure, mask = mask.structure, None
            # Of another object for each length of a growing cache.
            if isinstance(structure, MaskStructure) and structure.starts is None:
                cut = key.shape[2] - structure.num_keys
                # A window that reaches all keys is none, so that others are alike at any length.
                structure = structure if cut else (structure.is_causal, structure.window)
        bias = keywords.get("position_bias")
        if bias is not None and mask is None:
            mask = bias
        elif bias is not None and mask is not None and _may_join(bias, mask):
            attention_mask = mask = joined(keywords.pop("position_bias"), mask)
            bias = None
        # Two layers may have one number, as an encoder's and a decoder's, and alternate.
        own = id(module), layer, getattr(module, "is_causal", True), module.training
        place = *own, structure, mask is None, bias is None, mask is bias, history
        keywords["policy"] = policy
        known = again(query, key, value, mask, 0.0, True, keywords, place)
        if not isinstance(known, Miss):
            sinks = keywords.get("sinks")
            output = known(query, key, value, mask, sinks, None, None, None, None, None, tag)
            return output.transpose(1, 2).contiguous(), None
        del keywords["policy"]
    call = _described(module, query, key, value, attention_mask, *positional, **keywords)
    if query.is_meta:
        return _unwritten(query, key, value, has_weights="return_aux" in call.options)
    options = {"policy": policy, "history": history, "tag": tag, **call.options}
    if layer is not None:
        options["layer"] = int(layer)
    given = query, key, value, mask
    if place is None or not _is_as_given(call, given, structure, keywords.get("sinks")):
        result = scaled_dot_product_attention(*call.tensors, **options)
    else:
        result = bind_attention(*call.tensors, **options)
        if isinstance(result, Found):
            if known is Miss.NOTE:
                keywords["policy"] = policy
                window = keywords.get("sliding_window")
                reaches = () if window is None else (window,)
                note(result.bound, *given, 0.0, True, keywords, place, _UNCOMPARED, reaches)
            result = result.run()
    if "return_aux" not in options:
        return result.transpose(1, 2).contiguous(), None
    output, aux = result
    weights = torch.nn.functional.pad(aux.weights, (0, key.shape[2] - call.tensors[1].shape[2]))
    return output.transpose(1, 2).contiguous(), weights.to(query.dtype)


def _unwritten(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, has_weights: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what a layer expects, on device meta: shapes that autograd follows, no numbers."""
    grouped = query.shape[1] != key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)
    weights = query.new_empty((*query.shape[:3], key.shape[2])) if has_weights else None
    return output.transpose(1, 2).contiguous(), weights


def _may_join(bias: torch.Tensor, mask: torch.Tensor) -> bool:
    """Return whether a bias and a mask [B, 1 or Hq, Sq, Sk] are of the same keys."""
    return bias.dim() == mask.dim() == 4 and bias.shape[-1] == mask.shape[-1]


class _Call(NamedTuple):
    """A layer's call in terms of the public one."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: dict[str, Any]


def _is_as_given(
    call: _Call,
    given: tuple[torch.Tensor | None, ...],
    structure: object,
    sinks: torch.Tensor | None,
) -> bool:
    """Return whether a call takes the layer's own tensors, and what else it takes are words.

    Sequences are packed by other tensors in each forward pass.
    """
    taken = (*call.tensors, call.options["attn_mask"], call.options.get("sinks"))
    return (
        all(one is other for one, other in zip(taken, (*given, sinks), strict=True))
        and isinstance(structure, MaskStructure | tuple | None)
        and call.options.keys().isdisjoint(("cu_seqlens_q", "return_aux"))
    )


def _described(
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
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> _Call:
    """Return a layer's call in terms of the public one.

    Args:
        module: as in `attention_forward`, and so the tensors.
        query: likewise.
        key: likewise.
        value: likewise.
        attention_mask: likewise.
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
        indices: of the keys that each query sees at most, [B, Sq, k].
        **kwargs: anything in `IGNORED_KEYWORDS`; other names must be None.
    """
    if not kwargs.keys() <= IGNORED_KEYWORDS:
        _refuse_unknown(kwargs)
    shape = query.shape
    if len(shape) != 4:
        raise ShapeError.got("query", "[B, Hq, Sq, D]", tuple(shape))
    _, kv_heads, len_k, _ = key.shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        starts = (cu_seq_lens_q, cu_seq_lens_k)
        seen = packed(attention_mask, starts, causal, sliding_window, query, len_k)
    elif attention_mask is not None:
        seen = masked(attention_mask, len_k, query.dtype)
    elif causal and _reads_masks_alone(module):
        seen = Visibility(num_keys=len_k)
    else:
        seen = unmasked(causal, sliding_window, shape[2], len_k)
    if indices is not None:
        seen = selected(seen, indices, len_k)
    if position_bias is not None:
        seen = with_bias(seen, position_bias, query.dtype)
    if seen.num_keys < len_k:
        key, value = key[:, :, : seen.num_keys], value[:, :, : seen.num_keys]
    # Keywords are compared with those of the last call: what says nothing is left out.
    options: dict[str, Any] = {
        "attn_mask": seen.mask,
        "dropout_p": dropout if module.training else 0.0,
        "is_causal": seen.is_causal,
        **seen.options(),
    }
    if scaling is not None:
        options["scale"] = scaling
    if shape[1] != kv_heads:
        options["enable_gqa"] = True
    if softcap is not None:
        options["softcap"] = softcap
    sinks = s_aux if sinks is None else sinks
    if sinks is not None:
        options["sinks"] = _head_sinks(sinks, shape[1])
    if output_attentions:
        options["return_aux"] = AuxRequest(weights=True)
    return _Call((query, key, value), options)


def _reads_masks_alone(module: torch.nn.Module) -> bool:
    """Return whether a layer was written for eager attention alone, to which no mask hides nothing.

    Such a one gets a mask wherever there is causal order.
    """
    config = getattr(module, "config", None)
    try:
        return config is not None and expects_additive_masks(type(config), "adaattn")
    except UnsupportedError:  # of no known model
        return False


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
        raise ArgumentTypeError.got(
            "keyword of the attention layer",
            "one that AdaAttn honours or knows to leave attention as it is",
            repr(name),
            'drop it, or use attn_implementation="eager" for this model',
        )


def _head_sinks(sinks: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return sinks as [Hq]."""
    if sinks.shape == (num_heads,):
        return sinks
    if sinks.numel() != num_heads:
        raise UnsupportedError(
            "adaattn",
            [expected_got("sinks", f"one logit a head, [{num_heads}]", tuple(sinks.shape))],
            'use attn_implementation="eager" for this model',
        )
    return sinks.reshape(num_heads)
