"""One operator that decides at run time, for graphs under an error budget.

A graph holds it whole: when it runs, the eager call is made, measures, adapts and remembers as
anywhere else. It has no gradient: a graph that trains computes exactly.
"""

from typing import Final

import torch

from adaattn.call.arguments import Arguments
from adaattn.call.bind import bind, find
from adaattn.call.key import key_of
from adaattn.policies import PRESETS, PolicyLike, resolve_policy
from adaattn.spec import Align, Policy

__all__ = ["asks_for_invariance", "decided_at_run_time", "policy_token"]

_POLICIES: Final[dict[str, Policy]] = dict(PRESETS)
"""Policies of graphs by token: an operator takes no objects."""


def policy_token(policy: PolicyLike | None) -> str:
    """Return a name for a policy that an operator can take; "" where nothing may be lost.

    Read while a graph is made: the ambient policy of that moment is the graph's.
    """
    chosen = resolve_policy(policy)
    if not chosen.allows_loss:
        return ""
    token = chosen.name if PRESETS.get(chosen.name) is chosen else f"{chosen.name}-{id(chosen)}"
    _POLICIES[token] = chosen
    return token


def asks_for_invariance(policy: PolicyLike | None) -> bool:
    """Return whether a policy asks for results that do not depend on the batch; read likewise."""
    return resolve_policy(policy).batch_invariant


# What torch.compiler.assume_constant_result sets; that imports all of the compiler.
policy_token._dynamo_marked_constant = True  # type: ignore[attr-defined]
asks_for_invariance._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch.library.custom_op("adaattn::attention", mutates_args=())
def decided_at_run_time(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    scale: float,
    softcap: float,
    is_causal: bool,
    to_end: bool,
    window: list[int],
    dilation: int,
    policy: str,
    layer: int,
) -> torch.Tensor:
    """Return what the eager call returns, [B, Hq, Sq, Dv].

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        mask: boolean or added, broadcastable to [B, Hq, Sq, Sk].
        sinks: [Hq].
        slopes: [B or 1, Hq].
        scale: factor of the scores.
        softcap: 0 is none.
        is_causal: key j is seen from position p only if j <= p.
        to_end: positions count from the last key.
        window: left and right.
        dilation: 1 sees all.
        policy: from `policy_token`.
        layer: index of the caller's layer.
    """
    align = Align.BOTTOM_RIGHT if to_end else Align.TOP_LEFT
    companions = (
        mask,
        sinks,
        None if slopes is None else slopes.expand(query.shape[:2]),
        None,
        None,
        None,
        None,
    )
    if is_causal and mask is not None:
        is_causal, window = False, [window[0], 0]
    grouped = query.shape[1] != key.shape[1]
    settings = (scale, softcap, 0.0, is_causal, grouped, align, dilation, None, None, False)
    choice = (_POLICIES[policy], None, None, "auto", layer, None)
    known_by = key_of(query, key, value, companions, settings, tuple(window), choice)
    known = find(known_by)
    if known is None:
        arguments = Arguments.of(companions, settings, tuple(window))
        known = bind(query, key, value, arguments, choice, known_by)
    output: torch.Tensor = known(query, key, value, *companions, "")
    return output.contiguous()


@decided_at_run_time.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: object) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[-1]))
