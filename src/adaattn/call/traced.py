"""The public call inside ``torch.compile``: exact attention that Inductor sees.

Exact attention is traced through to PyTorch's function, or to the definition where that has no
words for it. No executor is chosen by its times: a graph is made once for many lengths. A given
plan is followed, and not audited. Under an error budget one operator makes the eager call when it
runs (`adaattn.call.operator`); a graph that trains, or wants more than the output, is exact.
"""

from dataclasses import replace
from typing import Any

import torch

from adaattn.backends import Result, capability_named, run_group
from adaattn.backends.reference import attention, visible_keys
from adaattn.backends.sdpa_call import fused_attention
from adaattn.call.arguments import Arguments
from adaattn.call.audit import Outcome
from adaattn.call.describe import Call, build_call, without_autocast
from adaattn.call.key import Choices
from adaattn.call.operator import asks_for_invariance, decided_at_run_time, policy_token
from adaattn.call.outputs import AuxOutput, requested_flags
from adaattn.call.run import check_plan, run_plan
from adaattn.errors import UnsupportedError
from adaattn.spec import Align, HeadGroup, HeadTerm, MaskKind, Method, Plan, Policy, Scheme

__all__ = ["traced"]


def traced(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    choice: Choices,
) -> Any:
    """Return what the public call returns, in one graph.

    Args:
        query: [..., Hq, Sq, D].
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        arguments: what is to be computed.
        choice: a plan is followed, a backend too.
    """
    policy, plan, _, backend, layer, return_aux = choice
    # A policy's own fields are read here: PyTorch 2.11 takes no object for a constant.
    given = policy if isinstance(policy, Policy) else None
    invariant = asks_for_invariance(policy) if given is None else given.batch_invariant
    if arguments.batch_invariant or invariant:
        found = ["a graph's products are its compiler's, which follow the size of the batch"]
        raise UnsupportedError(
            "torch.compile with batch_invariant", found, "Call it outside of the compiled function."
        )
    call = build_call(query, key, value, arguments, requested_flags(return_aux))
    if plan is not None:
        outcome = run_plan(call, plan)
    else:
        may_lose = _may_lose(call, backend) and (given is None or given.allows_loss)
        token = policy_token(policy) if may_lose else ""
        result = _lossy(call, token, layer) if token else _exact(call, backend)
        outcome = Outcome(result=result, decision=None)
    output = call.restore(outcome.result.output)
    if not return_aux:
        return output
    result, problem = outcome.result, call.problem
    errors = torch.zeros(problem.batch, problem.num_heads, device=output.device)
    known = errors if plan is None or plan.is_exact else None
    return output, AuxOutput.of(result, None, known, call.restore)


def _may_lose(call: Call, backend: str) -> bool:
    """Return whether one operator could make the eager call: it has an output and no gradient."""
    problem = call.problem
    plain = not (problem.requires_grad or problem.dropout_p or problem.aux or problem.num_sequences)
    plain = plain and not (problem.has_blocks or problem.head_terms.value)
    return backend == "auto" and plain


def _lossy(call: Call, token: str, layer: int) -> Result:
    """Return what the eager call returns, by an operator that decides when it runs."""
    problem, tensors = call.problem, call.tensors
    output = decided_at_run_time(
        tensors.query,
        tensors.key,
        tensors.value,
        tensors.mask,
        tensors.sinks,
        tensors.alibi_slopes,
        problem.scale,
        problem.softcap,
        problem.is_causal,
        problem.align is Align.BOTTOM_RIGHT,
        list(problem.window),
        problem.dilation,
        token,
        layer,
    )
    return Result(output=output)


def _exact(call: Call, backend: str) -> Result:
    """Return exact attention by operations that a graph can hold, whatever its lengths.

    Order and windows become a mask of the graph's own, in the place of SDPA's flag where it has
    none for them; what SDPA cannot say at all is written out.
    """
    problem, tensors = call.problem, call.tensors
    with without_autocast(problem.device_type):
        if backend == "unfused":
            return attention(tensors, problem)
        if backend not in ("auto", "flash"):
            if capability_named(backend).method is not Method.EXACT:
                found = ["a graph measures nothing; pass the plan that plan_attention gives"]
                raise UnsupportedError(f"backend {backend!r}", found)
            own = HeadGroup(capability=backend, scheme=Scheme.of(problem.precision))
            check_plan(call, Plan(groups=(own,), num_heads=problem.num_heads))
            return run_group(tensors, problem, own)
        written_out = problem.softcap or problem.has_sinks or problem.has_alibi or problem.aux
        windows = problem.head_terms.value == HeadTerm.WINDOW.value
        written_out = written_out or (problem.head_terms.value and not windows)
        beyond = problem.num_sequences or problem.has_blocks or problem.dilation > 1 or windows
        if backend == "flash" and (written_out or beyond):
            found = ["a graph has SDPA's kernels alone, which lack what this call asks for"]
            raise UnsupportedError("backend 'flash'", found)
        if written_out:
            return attention(tensors, problem)
        corner = problem.align is Align.BOTTOM_RIGHT or problem.mask is not MaskKind.NONE
        by_mask = problem.window != (-1, -1) or bool(beyond)
        # SDPA's causal order is NaN for a scale of 0 or less.
        by_mask = by_mask or (problem.is_causal and (corner or problem.scale <= 0))
        mask = tensors.mask
        if by_mask:
            seen = visible_keys(replace(tensors, blocks=None), problem)
            if tensors.blocks is not None:
                seen = seen & tensors.blocks.seen(range(problem.len_q), range(problem.len_k))
            additive = mask is not None and mask.dtype != torch.bool
            mask = mask.masked_fill(~seen, float("-inf")) if mask is not None and additive else seen
        in_order = problem.is_causal and not by_mask
        output = fused_attention(
            tensors.query, tensors.key, tensors.value, mask, problem, is_causal=in_order
        )
        return Result(output=output)
