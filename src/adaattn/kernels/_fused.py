"""The chain of ``auto``, logged: a call that no fused kernel serves is logged with the reasons."""

import logging
from typing import Any, Final

import torch

from adaattn.backends import capabilities
from adaattn.functional import scaled_dot_product_attention
from adaattn.spec import Decision

__all__ = ["FLASH", "FUSED_NAMES", "attend", "step_down_reasons"]

FLASH: Final = "flash"
"""What a caller writes for "any fused kernel, and an error if none can serve"."""

FUSED_NAMES: Final = frozenset(item.name for item in capabilities() if item.is_fused)

_LOGGER = logging.getLogger("adaattn")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    semantics: dict[str, Any],
    settings: dict[str, Any],
) -> Any:
    """Return what `scaled_dot_product_attention` returns; a step down is logged at INFO.

    Args:
        query: [..., Hq, Sq, D].
        key: [..., Hkv, Sk, D]; Hkv divides Hq.
        value: [..., Hkv, Sk, Dv].
        semantics: its keywords that say what is to be computed.
        settings: its keywords policy, backend, return_aux and tag.

    Raises:
        AdaAttnError: as `scaled_dot_product_attention`.
    """
    semantics = semantics | {"enable_gqa": True}
    wanted = settings.get("return_aux")
    silent = torch.compiler.is_compiling() or not _LOGGER.isEnabledFor(logging.INFO)
    if settings.get("backend", "auto") != "auto" or silent:
        return scaled_dot_product_attention(query, key, value, **semantics, **settings)
    settings = settings | {"return_aux": wanted or True}
    output, aux = scaled_dot_product_attention(query, key, value, **semantics, **settings)
    if why := step_down_reasons(aux.decision):
        names = ", ".join(dict.fromkeys(group.capability for group in aux.decision.plan.groups))
        _LOGGER.info("no fused kernel served this call, %s did: %s", names, "; ".join(why))
    return (output, aux) if wanted else output


def step_down_reasons(decision: Decision) -> tuple[str, ...]:
    """Return why no fused kernel serves a decision, one sentence for each; () if one does.

    Example:
        >>> import torch, adaattn
        >>> x = torch.randn(1, 2, 8, 16)
        >>> step_down_reasons(adaattn.plan_attention(x, x, x, backend="reference"))
        ('no fused kernel was allowed',)
    """
    if any(group.capability in FUSED_NAMES for group in decision.plan.groups):
        return ()
    found = [
        f"{entry.candidate}: {entry.reason}"
        for entry in decision.trace
        if entry.candidate.split("/")[0] in FUSED_NAMES
    ]
    return tuple(found) or ("no fused kernel was allowed",)
