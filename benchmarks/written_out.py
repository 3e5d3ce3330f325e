"""Attention as users of PyTorch write it out where no function of theirs has a word for it."""

import math
from collections.abc import Callable

import torch

__all__ = ["written_out"]


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    hidden: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """Return a function of no arguments that computes softmax(Q Kᵀ) V, all in the input's dtype.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]; its heads are repeated.
        value: [B, Hkv, Sk, Dv].
        hidden: boolean, broadcastable to the scores: what is not seen; None for nothing.
        softcap: of the scores; 0 is none.
        sinks: [Hq], a logit of each head that joins the denominator.
    """
    group = query.shape[1] // key.shape[1]

    def run() -> torch.Tensor:
        keys, values = (
            item.repeat_interleave(group, 1) if group > 1 else item for item in (key, value)
        )
        scores = (query @ keys.mT) / math.sqrt(query.shape[3])
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is None:
            return torch.softmax(scores, dim=-1) @ values
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)
        return weights[..., :-1] @ values

    return run
