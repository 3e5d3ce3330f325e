"""The public call inside ``torch.compile``: what Inductor can see it sees, the rest is one operator.

Exact attention that SDPA can say is traced through to PyTorch's function; other exact attention
to the products of `adaattn.backends.chunked` in one chunk, or FlexAttention on a GPU. Nothing is
measured and no executor is chosen by its times: a graph is made once for many lengths. A given
plan is followed. Under an error budget one opaque operator makes the eager call at run time.
"""

from typing import Any

import torch

from adaattn.backends import Result, run_group
from adaattn.backends.common import sdpa
from adaattn.call.arguments import Arguments
from adaattn.call.audit import Outcome
from adaattn.call.describe import Call, build_call, without_autocast
from adaattn.call.outputs import AuxOutput, AuxRequest, requested_flags
from adaattn.call.run import run_plan
from adaattn.spec import Align, Aux, HeadGroup, MaskKind, Plan, Policy

__all__ = ["traced"]


def traced(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    *,
    policy: Policy | str | None,
    plan: Plan | None,
    backend: str,
    layer: int,
    return_aux: AuxRequest | bool | None,
) -> Any:
    """Return what the public call returns, in one graph."""
    call = build_call(query, key, value, arguments, requested_flags(return_aux))
    if plan is not None:
        outcome = run_plan(call, plan)
    else:
        outcome = Outcome(result=_exact(call, backend), decision=None)
    output = call.restore(outcome.result.output)
    if not return_aux:
        return output
    result, problem = outcome.result, call.problem
    errors = torch.zeros(problem.batch, problem.num_heads, device=output.device)
    return output, AuxOutput(
        decision=None,
        lse=None if result.lse is None else call.restore(result.lse),
        row_max=None if result.row_max is None else call.restore(result.row_max),
        entropy=None if result.entropy is None else call.restore(result.entropy),
        weights=None if result.weights is None else call.restore(result.weights),
        error_estimate=call.restore(errors) if plan is None or plan.is_exact else None,
    )


def _exact(call: Call, backend: str) -> Result:
    """Return exact attention by operations that a graph can hold."""
    problem, tensors = call.problem, call.tensors
    plain = (
        problem.window == (-1, -1)
        and problem.dilation == 1
        and problem.softcap == 0
        and not (problem.has_sinks or problem.has_alibi)
        and problem.aux is Aux.NONE
        and not (problem.is_causal and problem.align is Align.BOTTOM_RIGHT)
        and not (problem.is_causal and problem.mask is not MaskKind.NONE)
        and backend in ("auto", "flash")
    )
    with without_autocast(problem.device_type):
        if plain:
            return Result(
                output=sdpa(
                    tensors.query,
                    tensors.key,
                    tensors.value,
                    attn_mask=tensors.mask,
                    dropout_p=problem.dropout_p,
                    is_causal=problem.is_causal,
                    scale=problem.scale,
                    enable_gqa=problem.group_size > 1,
                )
            )
        name = "chunked" if backend == "auto" else backend
        return run_group(tensors, problem, HeadGroup(capability=name, precision=problem.precision))
