"""Fused kernels asked for as such: the cheapest that can serve a call, or every reason why not."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import torch

from adaattn import hardware
from adaattn.backends import capabilities
from adaattn.errors import PlanError, UnsupportedError
from adaattn.functional import scaled_dot_product_attention
from adaattn.outputs import AuxRequest, requested_flags
from adaattn.planning import decide
from adaattn.policies import PRESETS
from adaattn.spec import AttentionProblem, Decision, HardwareFacts
from adaattn.validation import Arguments, build_call

__all__ = ["FLASH", "FUSED_NAMES", "UNFUSED", "attend", "first_that_serves", "step_down_reasons"]

FLASH: Final = "flash"
"""What a caller writes for "any fused kernel, and an error if none can serve"."""

FUSED_NAMES: Final = frozenset(item.name for item in capabilities() if item.is_fused)

UNFUSED: Final = ("sdpa.math", "reference")
"""The chain with fused kernels taken out: PyTorch's matrix products, then the definition."""

_HINT: Final = "Pass backend='auto' to let another executor serve."
_LOGGER = logging.getLogger("adaattn")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    semantics: dict[str, Any],
    settings: dict[str, Any],
) -> Any:
    """Return what `scaled_dot_product_attention` returns, for ``backend="flash"`` too.

    Args:
        query: [..., Hq, Sq, D].
        key: [..., Hkv, Sk, D]; Hkv divides Hq.
        value: [..., Hkv, Sk, Dv].
        semantics: its keywords that say what is to be computed.
        settings: its keywords policy, backend, return_aux and tag.

    Raises:
        UnsupportedError: an explicit backend cannot serve; every reason is listed.
        AdaAttnError: as `scaled_dot_product_attention`.
    """
    semantics = semantics | {"enable_gqa": True}
    backend = settings.get("backend", "auto")
    wanted = settings.get("return_aux")
    if backend == FLASH:
        name = _fused_name(query, key, value, semantics, wanted)
        settings = settings | {"backend": name}
    silent = torch.compiler.is_compiling() or not _LOGGER.isEnabledFor(logging.INFO)
    if backend != "auto" or silent:
        return scaled_dot_product_attention(query, key, value, **semantics, **settings)
    settings = settings | {"return_aux": wanted or True}
    output, aux = scaled_dot_product_attention(query, key, value, **semantics, **settings)
    _log_step_down(aux.decision)
    return (output, aux) if wanted else output


def first_that_serves(names: Sequence[str], run: Callable[[str], Any]) -> Any:
    """Return ``run(name)`` of the first executor that can serve; a step down is logged.

    Raises:
        UnsupportedError: none can; the reasons are the last one's.
    """
    for name in names[:-1]:
        try:
            return run(name)
        except UnsupportedError as error:
            _LOGGER.info("%s cannot serve this call: %s", name, "; ".join(error.reasons))
    return run(names[-1])


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


def _fused_name(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    semantics: dict[str, Any],
    wanted: AuxRequest | bool | None,
) -> str:
    """Return the cheapest fused kernel that serves a call."""
    call = build_call(query, key, value, Arguments(**semantics), requested_flags(wanted))
    try:
        decision = _decide_fused(call.problem, hardware.probe(query.device))
    except PlanError as error:
        raise UnsupportedError("backend 'flash'", error.trace, _HINT) from error
    return decision.plan.groups[0].capability


@lru_cache(maxsize=256)
def _decide_fused(problem: AttentionProblem, facts: HardwareFacts) -> Decision:
    """Return the exact decision among fused kernels alone."""
    fused = tuple(item for item in capabilities() if item.is_fused)
    return decide(problem, None, facts, PRESETS["quality"], fused)


def _log_step_down(decision: Decision) -> None:
    """Log a call that no fused kernel served, with the reasons."""
    if why := step_down_reasons(decision):
        names = ", ".join(dict.fromkeys(group.capability for group in decision.plan.groups))
        _LOGGER.info("no fused kernel served this call, %s did: %s", names, "; ".join(why))
