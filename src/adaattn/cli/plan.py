"""``adaattn plan``: the decision for a call described by its sizes, with every reason."""

import math
import re
from dataclasses import dataclass, replace

from adaattn.backends import capabilities
from adaattn.cli.console import STDOUT, check_outputs, refusal, write_json
from adaattn.cli.machines import facts_of
from adaattn.errors import ArgumentError, DTypeError, PlanError, ShapeError
from adaattn.planning import decide
from adaattn.policies import resolve_policy
from adaattn.spec import Align, AttentionProblem, Decision, HardwareFacts, Policy, Precision

__all__ = ["PlanRequest", "decision_for", "problem_of", "run_plan"]

_DTYPES = {
    "float64": Precision.FP64,
    "float32": Precision.FP32,
    "bfloat16": Precision.BF16,
    "float16": Precision.FP16,
}
_DTYPES |= {precision.label: precision for precision in _DTYPES.values()}

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of the command, as typed."""

    shape: str
    dtype: str = "float32"
    is_causal: bool = False
    window: str = "-1,-1"
    align: str = "top_left"
    dilation: int = 1
    softcap: float = 0.0
    policy: str = "quality"
    device: str = "auto"
    error_budget: float | None = None
    memory_budget: str | None = None
    backward: bool = False
    explains: bool = False


def run_plan(request: PlanRequest, *, json_path: str | None) -> None:
    """Print a decision as text, or write it as JSON; a refused plan is JSON too.

    Raises:
        AdaAttnError: an option cannot be understood, or nothing can serve the call.
    """
    check_outputs(json_path)
    try:
        problem, hardware, decision = decision_for(request)
    except PlanError as error:
        if json_path is not None:
            write_json(json_path, refusal(error))
        raise
    if json_path is not None:
        write_json(json_path, decision.to_dict() | {"device": hardware.name})
    if json_path == STDOUT:
        return
    rates = hardware.rates.source
    print(f"{hardware.name or hardware.device_type} (rates: {rates})")
    print(f"workspace {decision.workspace_bytes / 1e6:.3f} MB")
    print(decision.explain() if request.explains else decision)
    if decision.plan.error_budget and problem.len_k:
        print("  note: approximations are judged on the tensors themselves, which a plan by")
        print("        shape has not; call adaattn.scaled_dot_product_attention(return_aux=True)")


def decision_for(request: PlanRequest) -> tuple[AttentionProblem, HardwareFacts, Decision]:
    """Return problem, device and decision of a request.

    Raises:
        AdaAttnError: an option cannot be understood, or nothing can serve the call.
    """
    hardware = facts_of(request.device)
    problem = problem_of(request, hardware.device_type)
    policy = _policy(request)
    problem = replace(problem, batch_invariant=policy.batch_invariant)
    decision = decide(problem, None, hardware, policy, capabilities())
    return problem, hardware, decision


def problem_of(request: PlanRequest, device_type: str) -> AttentionProblem:
    """Return the problem that the options describe.

    Raises:
        AdaAttnError: one of them cannot be understood.
    """
    batch, heads, kv_heads, len_q, len_k, head_dim, value_dim = _sizes(request.shape)
    if request.dtype not in _DTYPES:
        raise DTypeError.got("dtype", f"one of {', '.join(_DTYPES)}", request.dtype)
    names = {align.name.lower(): align for align in Align}
    if request.align not in names:
        raise ArgumentError.got("align", " or ".join(names), request.align)
    if request.dilation < 1:
        raise ArgumentError.got("dilation", "at least 1", request.dilation)
    if not (math.isfinite(request.softcap) and request.softcap >= 0):
        raise ArgumentError.got("softcap", "0 or a positive number", request.softcap)
    return AttentionProblem(
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        len_q=len_q,
        len_k=len_k,
        head_dim=head_dim,
        value_dim=value_dim,
        precision=_DTYPES[request.dtype],
        device_type=device_type,
        scale=head_dim**-0.5,
        is_causal=request.is_causal,
        align=names[request.align],
        window=_window(request.window),
        dilation=request.dilation,
        softcap=request.softcap,
        requires_grad=request.backward,
    )


def _sizes(shape: str) -> tuple[int, int, int, int, int, int, int]:
    """Return B, Hq, Hkv, Sq, Sk, D, Dv."""
    parts = [part.strip() for part in shape.split(",")]
    if len(parts) not in (6, 7) or not all(part.isdecimal() for part in parts):
        raise ShapeError.got("shape", "B,Hq,Hkv,Sq,Sk,D or B,Hq,Hkv,Sq,Sk,D,Dv", shape)
    sizes = [int(part) for part in parts]
    if min(sizes) < 1:
        raise ShapeError.got("shape", "sizes of at least 1", shape)
    batch, heads, kv_heads, len_q, len_k, head_dim = sizes[:6]
    if heads % kv_heads:
        raise ShapeError.got("Hq", f"a multiple of Hkv ({kv_heads})", heads)
    return batch, heads, kv_heads, len_q, len_k, head_dim, sizes[-1]


def _window(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(-1|\d+)\s*,\s*(-1|\d+)\s*", text)
    if found is None:
        raise ArgumentError.got("window", "LEFT,RIGHT, each -1 or at least 0", text)
    return int(found[1]), int(found[2])


def _policy(request: PlanRequest) -> Policy:
    policy = resolve_policy(request.policy)
    if request.error_budget is not None:
        policy = replace(policy, error_budget=request.error_budget)
    if request.memory_budget is not None:
        policy = replace(policy, memory_budget_bytes=_bytes(request.memory_budget))
    return policy


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ArgumentError.got(
            "memory budget", "bytes, or a number with kB, MB, GB, MiB or GiB", text
        )
    return int(float(found[1]) * _UNITS[found[2].lower()])
