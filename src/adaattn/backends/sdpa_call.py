"""PyTorch's own function, and how executors call it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from adaattn.backends.interface import Direct
from adaattn.backends.masks import additive_mask, stored_columns, with_rank
from adaattn.spec import AttentionProblem

__all__ = [
    "above_sinks",
    "beside_sinks",
    "careful_sdpa",
    "fused_attention",
    "needs_care",
    "sdpa",
    "sdpa_keywords",
    "with_masks",
]

sdpa = F.scaled_dot_product_attention
"""PyTorch's own function, as it was at import: a caller may put ours in its place."""


def sdpa_keywords(problem: AttentionProblem) -> dict[str, Any]:
    """Return the keywords of `sdpa` for a problem, beside q, k, v, mask and causal order.

    What is its default is left out: parsing it costs a microsecond.
    """
    found: dict[str, Any] = {}
    if problem.dropout_p:
        found["dropout_p"] = problem.dropout_p
    # A quarter of all dimensions have another number each way, and callers write either.
    if problem.scale not in (1 / problem.head_dim**0.5, problem.head_dim**-0.5):
        found["scale"] = problem.scale
    if problem.group_size > 1:
        found["enable_gqa"] = True
    return found


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    problem: AttentionProblem,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return SDPA's output for tensors of any length, zeros in rows that a mask blinds."""
    return careful_sdpa(
        query,
        key,
        value,
        mask,
        dropout_p=problem.dropout_p,
        is_causal=is_causal,
        scale=problem.scale,
    )


def careful_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Return SDPA's output; what its kernels get wrong is said in other words.

    On a GPU rows that a boolean mask blinds are means of all values, or NaN. A mask of one column
    for all keys is refused, or read at misaligned addresses, which ends the process's use of the
    GPU. A scale of 0 or less beside a mask gives NaN gradients there (H200, PyTorch 2.11, cuDNN
    9.19, 2026-11), and NaN beside causal order on a CPU too.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        mask: boolean (True = attend) or added, broadcastable to [B, Hq, Sq, Sk].
        scale: factor of the scores.
        is_causal: top-left aligned.
        dropout_p: probability of dropping a weight.
    """
    mask = additive_mask(mask, query.dtype) if query.is_cuda else mask
    if query.is_cuda and mask is not None:
        mask = stored_columns(mask, key.shape[2])
    if scale <= 0 and (query.is_cuda or is_causal):
        query, scale = (-query, -scale) if scale < 0 else (0.0 * query, 1.0)
    return sdpa(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        # Heads may be symbols in a graph: what is compared is then no bool until it is asked.
        **({"enable_gqa": True} if query.shape[1] != key.shape[1] else {}),
    )


def with_masks(call: Callable[..., Any], *, has_more: bool = False) -> Direct:
    """Return the short function of masks of up to four dimensions.

    Args:
        call: takes q, k, v, the mask in four dimensions, and as the caller gave it.
        has_more: it returns the output and more, not the output.
    """

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *rest: None,
    ) -> torch.Tensor:
        seen = None if mask is None else with_rank(mask, 4)
        found = call(query, key, value, seen, mask)
        output: torch.Tensor = found[0] if has_more else found
        return output

    return run


def above_sinks(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return by how much log-sum-exps [B, Hq, Sq] or [Hq, T] are above sinks [Hq], one column."""
    return (lse - sinks.to(lse.dtype)[:, None]).unsqueeze(-1)


def beside_sinks(output: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Return a kernel's output times the share of each row that is not its sink's, in its place.

    A sink adds exp(sink) to the denominator of a row and nothing to the numerator.

    Args:
        output: [B, Hq, Sq, Dv], of a kernel that knows no sinks.
        above: as `above_sinks` returns it; inf where a row sees no key and its output is 0.
    """
    return output.mul_(torch.sigmoid(above))


def needs_care(problem: AttentionProblem) -> bool:
    """Return whether a call of SDPA alone would get the scale wrong; see `careful_sdpa`."""
    return problem.device_type == "cuda" and problem.scale <= 0
