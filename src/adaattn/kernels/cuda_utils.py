"""Device facts, kernel selection, and three ways to ask for attention by what it should be.

`fused_scaled_dot_product_attention` wants a fused kernel, `adaptive_attention_kernel` a rank
and a number format, `memory_efficient_attention` a memory limit. All of them plan and run as
`adaattn.scaled_dot_product_attention` does. Tensors are [B, H, S, D]; legend in
`adaattn.spec`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from adaattn.attention.precision_mode import in_precision, named_precision
from adaattn.call.describe import Arguments, build_call
from adaattn.call.keywords import refuse_unknown
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.functional import plan_attention, scaled_dot_product_attention
from adaattn.kernels._cuda_manager import CUDAManager
from adaattn.kernels._kernel_manager import (
    AttentionKernelManager,
    CacheInfo,
    KernelChoice,
    KernelInfo,
)
from adaattn.policies import PolicyLike, resolve_policy
from adaattn.spec import (
    Decision,
    HeadGroup,
    LowRank,
    Method,
    Plan,
    Policy,
    Precision,
    Scheme,
    TraceEntry,
)

__all__ = [
    "AttentionKernelManager",
    "CUDAManager",
    "CacheInfo",
    "KernelChoice",
    "KernelInfo",
    "adaptive_attention_kernel",
    "fused_scaled_dot_product_attention",
    "memory_efficient_attention",
]

_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_LOW_RANK: Final = "low_rank"

_ASKED: Final = "its rank was given by the caller, and no error budget is checked"


def fused_scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    backend: str = "flash",
) -> torch.Tensor:
    """Return attention by a fused kernel, [B, Hq, Sq, Dv], or say every reason why none serves.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]; Hkv divides Hq.
        value: [B, Hkv, Sk, Dv].
        attn_mask: broadcastable to [B, Hq, Sq, Sk]; boolean (True = attend) or added.
        dropout_p: probability of dropping a weight.
        is_causal: key j is seen from row i only if j <= i.
        scale: factor of the scores; None is 1 / sqrt(D).
        backend: ``"flash"`` is the cheapest fused kernel that can serve; an executor's name is
            that one; ``"auto"`` steps down to SDPA and matrix products where none can.

    Raises:
        UnsupportedError: the kernel asked for cannot serve; every reason is listed.
        AdaAttnError: as `adaattn.scaled_dot_product_attention`.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 4, 32, 16)
        >>> tuple(fused_scaled_dot_product_attention(q, k, v, is_causal=True).shape)
        (1, 4, 32, 16)
    """
    output: torch.Tensor = scaled_dot_product_attention(
        *(query, key, value, attn_mask, dropout_p, is_causal),
        scale=scale,
        enable_gqa=True,
        backend=backend,
    )
    return output


def adaptive_attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rank: int | None = None,
    precision: Precision | str | None = None,
    policy: PolicyLike | None = "balanced",
    return_decision: bool = False,
    **semantics: Any,
) -> torch.Tensor | tuple[torch.Tensor, Decision]:
    """Return attention at a rank and in a number format, [B, Hq, Sq, Dv].

    What is None is decided by the policy, on numbers measured from the call, and audited as
    the policy says. What is given is done and not audited: a plan at a given rank has no error
    budget, and its decision names the policy ``"given"``. Compare `adaattn.linalg.bounds`, or
    leave it to the policy.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]; Hkv divides Hq.
        value: [B, Hkv, Sk, Dv].
        rank: columns that q and k are projected to, and v if Dv is larger; 1 to D. D is exact.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"``, or a `adaattn.Precision`, of the products.
        policy: decides what is None; ``None`` is the ambient policy.
        return_decision: return the decision too.
        **semantics: keywords of `adaattn.scaled_dot_product_attention` that say what is to be
            computed, such as ``is_causal``; unknown ones are refused.

    Returns:
        The output in the dtype of the query, or ``(output, decision)``.

    Raises:
        ArgumentError: a rank out of range, an unknown precision.
        ArgumentTypeError: a rank that is no integer, an unknown keyword.
        UnsupportedError: no executor computes that; every reason is listed.
        AdaAttnError: as `adaattn.scaled_dot_product_attention`.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 4, 64, 32)
        >>> out, decision = adaptive_attention_kernel(
        ...     q, k, v, rank=8, precision="fp32", return_decision=True)
        >>> decision.plan.groups[0].label
        'low_rank/fp32 rank=8,8'
    """
    known = tuple(Arguments.__dataclass_fields__)
    if unknown := set(semantics) - set(known):
        refuse_unknown(unknown, known)
    wanted = None if precision is None else named_precision(precision)
    chosen = resolve_policy(policy)
    semantics = {"enable_gqa": True} | semantics
    inputs = (query, key, value)
    if rank is not None:
        head_dim = build_call(*inputs, Arguments(**semantics)).problem.head_dim
        if _checked_rank(rank, head_dim) < head_dim:
            found = _at_rank(inputs, rank, wanted, chosen, semantics)
            return found if return_decision else found[0]
        chosen = replace(chosen, methods=(Method.EXACT,))
    found = _at_own_rank(inputs, wanted, chosen, semantics)
    return found if return_decision else found[0]


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    is_causal: bool = False,
    memory_budget_bytes: int | None = None,
) -> torch.Tensor:
    """Return exact attention, [B, Hq, Sq, Dv], a chunk of query rows at a time.

    For long sequences where nothing fused serves; the scores of one chunk are all that is
    kept, and the backward pass computes them again. The call is like xFormers', but heads
    come before tokens.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]; Hkv divides Hq.
        value: [B, Hkv, Sk, Dv].
        attn_bias: broadcastable to [B, Hq, Sq, Sk]; boolean (True = attend) or added.
        p: probability of dropping a weight.
        scale: factor of the scores; None is 1 / sqrt(D).
        is_causal: key j is seen from row i only if j <= i.
        memory_budget_bytes: most workspace beside inputs and output; None is what `auto` takes.

    Raises:
        PlanError: one query row does not fit the budget.
        ArgumentError, ArgumentTypeError: the budget is negative, or no integer.
        AdaAttnError: as `adaattn.scaled_dot_product_attention`.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 2, 256, 16)
        >>> out = memory_efficient_attention(q, k, v, memory_budget_bytes=1 << 20)
        >>> tuple(out.shape)
        (1, 2, 256, 16)
    """
    policy = Policy(name="memory_efficient", memory_budget_bytes=memory_budget_bytes)
    output: torch.Tensor = scaled_dot_product_attention(
        *(query, key, value, attn_bias, p, is_causal),
        scale=scale,
        enable_gqa=True,
        policy=policy,
        backend="chunked",
    )
    return output


def _at_own_rank(
    inputs: _Inputs, precision: Precision | None, policy: Policy, semantics: dict[str, Any]
) -> tuple[torch.Tensor, Decision]:
    """Return (output, decision) at the rank that the policy finds."""
    if precision is not None:
        policy = replace(policy, precisions=())

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        output, aux = scaled_dot_product_attention(
            query, key, value, policy=policy, return_aux=True, **semantics
        )
        return output, aux.decision

    return _in_precision(inputs, precision, run)


def _at_rank(
    inputs: _Inputs,
    rank: int,
    precision: Precision | None,
    policy: Policy,
    semantics: dict[str, Any],
) -> tuple[torch.Tensor, Decision]:
    """Return (output, decision) at a given rank, in the format that the policy finds or a given."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        problem = build_call(query, key, value, Arguments(**semantics)).problem
        exact: tuple[HeadGroup, ...]
        exact = (HeadGroup(capability=_LOW_RANK, scheme=Scheme.of(problem.precision)),)
        note = "rank and precision were given with the call; nothing was measured"
        if precision is None:
            note = f"the rank was given with the call; policy {policy.name!r} chose the format"
            only = replace(policy, methods=(Method.EXACT,))
            exact = plan_attention(query, key, value, policy=only, **semantics).plan.groups
        plan = Plan(
            groups=tuple(_lowered(group, rank, problem.value_dim) for group in exact),
            num_heads=problem.num_heads,
            error_budget=None,
        )
        output = scaled_dot_product_attention(query, key, value, plan=plan, **semantics)
        trace = tuple(
            TraceEntry(candidate=group.label, accepted=True, reason=_ASKED, heads=group.heads)
            for group in plan.groups
        )
        return output, Decision(plan=plan, trace=trace, policy="given", notes=(note,))

    return _in_precision(inputs, precision, run)


def _in_precision(
    inputs: _Inputs, precision: Precision | None, run: Callable[..., Any]
) -> tuple[torch.Tensor, Decision]:
    """Return what ``run`` gives for the inputs in a format; None is their own.

    Raises:
        UnsupportedError: no executor computes in the format.
    """
    request = "" if precision is None else f"precision {precision.label!r}"
    (output, decision), note = in_precision(request, precision, *inputs, run)
    return output, replace(decision, notes=(*decision.notes, note)) if note else decision


def _lowered(group: HeadGroup, rank: int, value_dim: int) -> HeadGroup:
    """Return a group that projects q, k and v to fewer columns, for the same heads and format."""
    return HeadGroup(
        capability=_LOW_RANK,
        heads=group.heads,
        method=LowRank(rank=rank, value_rank=rank if rank < value_dim else 0),
        scheme=group.scheme,
    )


def _checked_rank(rank: int, head_dim: int) -> int:
    """Return a rank from 1 to the head dimension."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise ArgumentTypeError.got("rank", "None or an integer", repr(rank))
    if not 1 <= rank <= head_dim:
        expected = f"1 to the head dimension, {head_dim}"
        raise ArgumentError.got("rank", expected, rank, "None lets the policy decide")
    return rank
