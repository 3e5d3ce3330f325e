"""The public call: attention as PyTorch defines it, by the cheapest way that keeps the policy.

    from adaattn import scaled_dot_product_attention

Shape legend in `adaattn.spec`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from adaattn._events import wants_timing
from adaattn.deciding import decide_call
from adaattn.dispatch import (
    Outcome,
    is_lossy,
    run_call,
    run_given,
    run_plan,
)
from adaattn.errors import ArgumentError, ArgumentTypeError, expected_got
from adaattn.outputs import AuxOutput, AuxRequest, requested_flags
from adaattn.policies import resolve_policy
from adaattn.shortcuts import Key, are_plain, find, remember, shortcut_key
from adaattn.spec import Align, Aux, Decision, History, Plan, Policy
from adaattn.validation import Arguments, Call, build_call

__all__ = ["plan_attention", "scaled_dot_product_attention"]

is_compiling = torch.compiler.is_compiling


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    align: str | Align = "top_left",
    window: Sequence[int] = (-1, -1),
    dilation: int = 1,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    policy: Policy | str | None = None,
    plan: Plan | None = None,
    backend: str = "auto",
    return_aux: AuxRequest | bool | None = None,
    tag: str = "",
    history: History | None = None,
) -> Any:
    """Return attention of the inputs, [..., Hq, Sq, Dv].

    The positional part and the result are those of
    ``torch.nn.functional.scaled_dot_product_attention`` (its math path), except that rows
    which see no key are zeros. The order of things is: scale, softcap, ALiBi and additive
    mask, hidden keys, sinks, softmax, dropout.

    Args:
        query: [..., Hq, Sq, D], 2-D to 5-D; float64, float32, bfloat16 or float16.
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        attn_mask: broadcastable to [..., Hq, Sq, Sk]; boolean (True = attend) or added to the
            scores; a causal bias of ``torch.nn.attention.bias`` too.
        dropout_p: probability of dropping a weight.
        is_causal: key j is seen from position p only if j <= p.
        scale: factor of the scores; None is 1 / sqrt(D).
        enable_gqa: Hq may be a multiple of Hkv.
        align: query i stands at key position p = i (``"top_left"``) or p = i + Sk - Sq
            (``"bottom_right"``); causal order, window, dilation and ALiBi count from p.
        window: ``(left, right)``; key j is seen when p - left <= j <= p + right; -1 is unlimited.
        dilation: only keys with p - j divisible by it are seen.
        softcap: c in c * tanh(s / c), applied before masks; None or 0 is none.
        sinks: [Hq] logits that join the softmax denominator.
        alibi_slopes: [Hq] or [B, Hq]; adds -slope * abs(p - j).
        cu_seqlens_q: int32 [N + 1], bounds of N sequences packed along [1, Hq, T, D]; its
            numbers are read on the host once for each tensor.
        cu_seqlens_k: the same for key and value.
        policy: a `Policy`, a preset (``"quality"``, ``"balanced"``, ``"speed"``) or a policy
            file; None is the one set by `use_policy`, else ``"quality"``.
        plan: run this and plan nothing; the form for ``torch.compile(fullgraph=True)``.
        backend: ``"auto"``; ``"flash"``, any fused kernel; ``"unfused"``, scores written out; or
            the name of an executor. What is asked for never falls back on anything else.
        return_aux: an `AuxRequest`, or True for the decision alone.
        tag: a name for this call in events, such as a layer's.
        history: what earlier calls taught, so that not every call is measured and heads do not
            flicker between methods; attention modules keep one.

    Returns:
        The output, or ``(output, AuxOutput)`` when ``return_aux`` is given.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError, ArgumentTypeError: bad input.
        PolicyError: an unknown policy or a broken policy file.
        NonFiniteError: NaN or infinity in q, k or v, where an error budget was to be used.
        UnsupportedError: an explicit backend or plan cannot serve; every reason is listed.
        PlanError: nothing fits the memory budget.

    Example:
        >>> import torch, adaattn
        >>> q, k, v = (torch.randn(1, 4, 128, 64) for _ in range(3))
        >>> out, aux = adaattn.scaled_dot_product_attention(
        ...     q, k, v, is_causal=True, window=(31, 0),
        ...     return_aux=adaattn.AuxRequest(lse=True))
        >>> tuple(out.shape), tuple(aux.lse.shape)
        ((1, 4, 128, 64), (1, 4, 128))
    """
    fast_key: Key | None = None
    plain = plan is None and return_aux is None and cu_seqlens_q is None and type(dilation) is int
    plain = plain and (history is None or history.repeat is None)
    if plain and are_plain(scale, softcap, dropout_p) and not is_compiling():
        try:
            fast_key = shortcut_key(
                query,
                key,
                value,
                (attn_mask, sinks, alibi_slopes),
                (dropout_p, is_causal, scale, enable_gqa, align, dilation, softcap),
                window,
                (policy, backend, history.calls_per_measurement if history else 1),
            )
            known = find(fast_key)
        except (AttributeError, IndexError, TypeError, RuntimeError):
            # No tensor, a nested one, no number, too few: build_call says which.
            fast_key = known = None
        if known is not None and not wants_timing():
            return known(query, key, value, attn_mask, sinks, alibi_slopes, tag)
    arguments = Arguments(
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        align=align,
        window=window,
        dilation=dilation,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    call = build_call(query, key, value, arguments, requested_flags(return_aux))
    if plan is not None and (policy is not None or backend != "auto" or history is not None):
        raise ArgumentError(
            expected_got(
                "policy, backend and history with a plan",
                "none of them",
                f"{policy!r}, {backend!r}, {history!r}",
            )
        )
    if plan is not None:
        return _with_plan(call, plan, return_aux, tag)
    if fast_key is not None and not _is_as_given(call, query, key, value, attn_mask):
        fast_key = None
    # Planning reads numbers on the host: a graph breaks here and goes on behind.
    planned = torch.compiler.disable(_planned) if is_compiling() else _planned
    return planned(call, policy, backend, return_aux, tag, fast_key, history)


def plan_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    policy: Policy | str | None = None,
    backend: str = "auto",
    layer: int = -1,
    history: History | None = None,
    **semantics: Any,
) -> Decision:
    """Return the decision that a call with these arguments would follow, without running it.

    Its ``plan`` can be passed to `scaled_dot_product_attention` for tensors of the same
    shapes, and is the way to use it inside ``torch.compile(fullgraph=True)``.

    Args:
        query: as in `scaled_dot_product_attention`.
        key: likewise.
        value: likewise.
        attn_mask: likewise.
        dropout_p: likewise.
        is_causal: likewise.
        policy: likewise.
        backend: likewise.
        layer: which layer's budgets to take from a calibrated policy.
        history: what earlier calls taught.
        **semantics: the other keywords of `scaled_dot_product_attention` that say what is to
            be computed; unknown ones are refused.

    Raises:
        ArgumentTypeError: an unknown keyword.
        AdaAttnError: as `scaled_dot_product_attention`.

    Example:
        >>> import torch, adaattn
        >>> q = k = v = torch.randn(1, 2, 64, 32)
        >>> decision = adaattn.plan_attention(q, k, v, is_causal=True)
        >>> decision.plan.is_exact
        True
    """
    known = set(Arguments.__dataclass_fields__)
    if unknown := sorted(set(semantics) - known):
        raise ArgumentTypeError(
            expected_got("keyword arguments", f"some of {sorted(known)}", unknown)
        )
    arguments = Arguments(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **semantics
    )
    call = build_call(query, key, value, arguments)
    return decide_call(call, resolve_policy(policy), backend, layer, history).decision


def _planned(
    call: Call,
    policy: Policy | str | None,
    backend: str,
    return_aux: AuxRequest | bool | None,
    tag: str,
    fast_key: tuple[object, ...] | None,
    history: History | None,
) -> Any:
    """Return the result of a call that has to be decided."""
    resolved = resolve_policy(policy)
    outcome = run_call(call, resolved, backend, tag, history)
    output = call.restore(outcome.result.output)
    if return_aux is None or return_aux is False:
        if fast_key is not None and outcome.is_settled and not outcome.fallbacks:
            assert outcome.decision is not None
            remember(fast_key, call, outcome.decision, resolved, policy)
        return output
    return output, _aux_output(call, outcome)


def _with_plan(call: Call, plan: Plan, return_aux: AuxRequest | bool | None, tag: str) -> Any:
    """Return the result of a given plan; its event is emitted unless the call is traced."""
    outcome = run_plan(call, plan) if is_compiling() else run_given(call, plan, tag)
    output = call.restore(outcome.result.output)
    if return_aux is None or return_aux is False:
        return output
    aux = _aux_output(call, outcome)
    if is_lossy(plan, call.problem):
        aux = replace(aux, error_estimate=None)
    return output, aux


def _is_as_given(call: Call, *given: torch.Tensor | None) -> bool:
    """Return whether q, k and v were neither broadcast nor cast, and no mask became a flag."""
    tensors, (query, key, value, mask) = call.tensors, given
    whole = tensors.query is query and tensors.key is key and tensors.value is value
    return whole and (tensors.mask is None) == (mask is None)


def _aux_output(call: Call, outcome: Outcome) -> AuxOutput:
    """Return the auxiliary outputs in the caller's leading dimensions."""
    result, problem = outcome.result, call.problem
    errors = outcome.head_errors
    if errors is None:
        errors = torch.zeros(problem.batch, problem.num_heads, device=result.output.device)

    def restore(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else call.restore(tensor)

    return AuxOutput(
        decision=outcome.decision,
        lse=restore(result.lse if Aux.LSE in problem.aux else None),
        row_max=restore(result.row_max),
        entropy=restore(result.entropy),
        weights=restore(result.weights),
        error_estimate=call.restore(errors.float()),
    )
