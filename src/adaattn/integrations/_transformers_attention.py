"""The attention function that layers of Transformers call, in terms of the public call.

Shape legend in `adaattn.spec`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from adaattn.call.history import History
from adaattn.call.outputs import AuxRequest
from adaattn.errors import ArgumentTypeError, ShapeError, UnsupportedError, expected_got
from adaattn.functional import scaled_dot_product_attention
from adaattn.integrations._transformers_visibility import masked, packed, unmasked, with_bias
from adaattn.spec import Policy

__all__ = ["IGNORED_KEYWORDS", "attention_forward"]

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
        raise ShapeError.got("query", "[B, Hq, Sq, D]", tuple(shape))
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
    # Keywords are compared with those of the last call: what says nothing is left out.
    options: dict[str, Any] = {"history": history, "policy": policy, **seen.options()}
    layer = _layer(module)
    if layer >= 0:
        options["layer"], options["tag"] = layer, f"layer{layer}"
    if scaling is not None:
        options["scale"] = scaling
    if shape[1] != kv_heads:
        options["enable_gqa"] = True
    if softcap is not None:
        options["softcap"] = softcap
    if sinks is not None:
        options["sinks"] = _head_sinks(sinks, shape[1])
    if output_attentions:
        options["return_aux"] = AuxRequest(weights=True)
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen.mask,
        dropout_p=dropout if module.training else 0.0,
        is_causal=seen.is_causal,
        **options,
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
        raise ArgumentTypeError.got(
            "keyword of the attention layer",
            "one that AdaAttn honours or knows to leave attention as it is",
            repr(name),
            'drop it, or use attn_implementation="eager" for this model',
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
