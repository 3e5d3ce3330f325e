"""Keywords that nobody here knows: the nearest of ours, and what other libraries call it."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final, NoReturn

from adaattn.errors import ArgumentTypeError

__all__ = ["refuse_unknown"]

_ELSEWHERE: Final = {
    "alibi": "alibi_slopes",
    "attention_dropout": "dropout",
    "attention_mask": "attn_mask",
    "attn_bias": "attn_mask",
    "bias": "attn_mask",
    "block_mask": "blocks, or window and is_causal",
    "bottom_right": 'align="bottom_right"',
    "causal": "is_causal",
    "cu_seq_lens_k": "cu_seqlens_k",
    "cu_seq_lens_q": "cu_seqlens_q",
    "d_model": "embed_dim",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "dim": "embed_dim",
    "dropout": "dropout_p",
    "error_budget": "policy, a number is an error budget",
    "gqa": "enable_gqa",
    "hidden_size": "embed_dim",
    "is_bottom_right": 'align="bottom_right"',
    "key_padding_mask": "attn_mask=~key_padding_mask[:, None, None, :], as True says attend",
    "kv_heads": "num_kv_heads",
    "logit_scale": "scale",
    "logits_soft_cap": "softcap",
    "mask": "attn_mask",
    "max_length_k": "max_seqlen_k",
    "max_length_q": "max_seqlen_q",
    "n_heads": "num_heads",
    "need_weights": "return_aux=AuxRequest(weights=True)",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "op": "backend",
    "output_attentions": "return_aux=AuxRequest(weights=True)",
    "p": "dropout_p",
    "precision": "policy=Policy(precisions=...)",
    "return_attn_probs": "return_aux=AuxRequest(weights=True)",
    "return_attn_weights": "return_aux=AuxRequest(weights=True)",
    "return_lse": "return_aux=AuxRequest(lse=True)",
    "return_softmax": "return_aux=AuxRequest(weights=True)",
    "s_aux": "sinks",
    "scaling": "scale",
    "sliding_window": "window=(W - 1, 0), of W keys with the query's own",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "tolerance": "policy, a number is an error budget",
    "training": "dropout_p, 0.0 in evaluation",
    "window_size": "window",
}
"""What flash-attn, xFormers, FlexAttention, vLLM and Transformers call it, and what it is here."""


def refuse_unknown(unknown: Iterable[str], known: Sequence[str]) -> NoReturn:
    """Raise for keywords, with what was probably meant.

    Args:
        unknown: their names.
        known: those that exist, the most likely ones first.

    Raises:
        ArgumentTypeError: always.
    """
    names = sorted(unknown)
    hints = []
    for name in names:
        meant = _ELSEWHERE.get(name.lower(), "")
        if meant.isidentifier() and meant not in known:
            meant = ""
        near = [] if meant else get_close_matches(name, known, n=1, cutoff=0.7)
        if meant or near:
            hints.append(f"{name!r} is {meant or near[0]} here")
    raise ArgumentTypeError.got(
        "keyword arguments", f"some of {list(known)}", names, ", ".join(hints)
    )
