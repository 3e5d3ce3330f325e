"""``adaattn plan``: the decision for a call described by its sizes, with every reason."""

import re
from dataclasses import dataclass, replace

import torch

from adaattn._dtypes import torch_dtype
from adaattn.backends import capabilities, capability_named
from adaattn.call.arguments import Arguments
from adaattn.call.choose import decide_exactly
from adaattn.call.describe import build_call
from adaattn.cli.console import STDOUT, check_outputs, refusal, write_json
from adaattn.cli.machines import CARDS, facts_of
from adaattn.errors import ArgumentError, DTypeError, PlanError, ShapeError
from adaattn.hardware.probe import resolve
from adaattn.planning import decide, reasons
from adaattn.policies import resolve_policy
from adaattn.spec import AttentionProblem, Decision, HardwareFacts, Policy, Precision

__all__ = ["PlanRequest", "decision_for", "problem_of", "run_plan"]

_DTYPES = {
    "float64": Precision.FP64,
    "float32": Precision.FP32,
    "bfloat16": Precision.BF16,
    "float16": Precision.FP16,
}
_DTYPES |= {precision.label: precision for precision in _DTYPES.values()}

_MOST = 2**31 - 1
"""Of a size; tensors of more numbers than its square cannot be described."""

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
    attn_mask: str | None = None
    alibi_slopes: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    cu_seqlens_q: str | None = None
    cu_seqlens_k: str | None = None
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
        beside = {"device": hardware.name, "sdpa_default": _asked(problem)}
        write_json(json_path, decision.to_dict() | beside)
    if json_path == STDOUT:
        return
    rates = hardware.rates.source
    print(f"{hardware.name or hardware.device_type} (rates: {rates})")
    print(f"workspace {decision.workspace_bytes / 1e6:.3f} MB")
    print(f"F.scaled_dot_product_attention: {_in_words(problem)}")
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
    if request.device.lower() not in CARDS:
        device = resolve(None if request.device == "auto" else request.device)
        problem = replace(problem, sdpa_default=_described(request, device).sdpa_default)
    policy = _policy(request)
    problem = replace(problem, batch_invariant=policy.batch_invariant)
    # None: only a lower format can serve, which shapes alone do not allow.
    decision = decide_exactly(problem, hardware, policy, "auto") or decide(
        problem, None, hardware, policy, capabilities()
    )
    return problem, hardware, decision


def problem_of(request: PlanRequest, device_type: str) -> AttentionProblem:
    """Return the problem that the options describe; what SDPA would choose is not asked.

    Raises:
        AdaAttnError: one of them cannot be understood.
    """
    problem = _described(request, torch.device("cpu")).without_layout()
    return replace(problem, device_type=device_type, sdpa_default="")


def _described(request: PlanRequest, device: torch.device) -> AttentionProblem:
    """Return the problem of a call with such tensors on a device, none of which takes memory."""
    batch, heads, kv_heads, len_q, len_k, head_dim, value_dim = _sizes(request.shape)
    if request.dtype not in _DTYPES:
        raise DTypeError.got("dtype", f"one of {', '.join(_DTYPES)}", request.dtype)
    dtype, grad = torch_dtype(_DTYPES[request.dtype]), request.backward

    def tensor(*shape: int, grad: bool = grad, dtype: torch.dtype = dtype) -> torch.Tensor:
        row = torch.empty(shape[-1:], dtype=dtype, device=device, requires_grad=grad)
        return row.expand(shape)

    mask = None
    if request.attn_mask is not None:
        is_bool, shape = _mask(request.attn_mask, (len_q, len_k))
        mask = tensor(*shape, grad=False, dtype=torch.bool if is_bool else dtype)
    starts_q = _starts("cu_seqlens_q", request.cu_seqlens_q, device)
    starts_k = _starts("cu_seqlens_k", request.cu_seqlens_k, device)
    arguments = Arguments(
        attn_mask=mask,
        dropout_p=request.dropout_p,
        is_causal=request.is_causal,
        enable_gqa=heads != kv_heads,
        align=request.align,
        window=_window(request.window),
        dilation=request.dilation,
        softcap=request.softcap,
        sinks=tensor(heads) if request.sinks else None,
        alibi_slopes=tensor(heads, grad=False) if request.alibi_slopes else None,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_q if starts_k is None else starts_k,
    )
    query = tensor(batch, heads, len_q, head_dim)
    key, value = (tensor(batch, kv_heads, len_k, dim) for dim in (head_dim, value_dim))
    return build_call(query, key, value, arguments).problem


def _asked(problem: AttentionProblem) -> str | None:
    """Return the kernel that SDPA would choose; "" if unknown, None where it has no such call."""
    return None if _unsaid(problem) else problem.sdpa_default


def _in_words(problem: AttentionProblem) -> str:
    """Return what PyTorch's own function would do with a call."""
    if unsaid := _unsaid(problem):
        return f"no such call ({'; '.join(unsaid)})"
    return problem.sdpa_default or "unknown, it tells on the device itself"


def _unsaid(problem: AttentionProblem) -> tuple[str, ...]:
    """Return what of a call PyTorch's function has no keyword for; () for nothing."""
    return reasons(capability_named("sdpa.math"), problem, None)


def _sizes(shape: str) -> tuple[int, int, int, int, int, int, int]:
    """Return B, Hq, Hkv, Sq, Sk, D, Dv."""
    parts = [part.strip() for part in shape.split(",")]
    if len(parts) not in (6, 7) or not all(part.isdecimal() for part in parts):
        raise ShapeError.got("shape", "B,Hq,Hkv,Sq,Sk,D or B,Hq,Hkv,Sq,Sk,D,Dv", shape)
    sizes = [int(part) for part in parts]
    if min(sizes) < 1:
        raise ShapeError.got("shape", "sizes of at least 1", shape)
    batch, heads, kv_heads, len_q, len_k, head_dim = sizes[:6]
    numbers = batch * heads * max(len_q, len_k) * max(head_dim, sizes[-1], len_k)
    if max(sizes) > _MOST or numbers > _MOST**2:
        raise ShapeError.got("shape", f"sizes up to {_MOST}, scores up to its square", shape)
    if heads % kv_heads:
        raise ShapeError.got("Hq", f"a multiple of Hkv ({kv_heads})", heads)
    return batch, heads, kv_heads, len_q, len_k, head_dim, sizes[-1]


def _window(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(-1|\d+)\s*,\s*(-1|\d+)\s*", text)
    if found is None:
        raise ArgumentError.got("window", "LEFT,RIGHT, each -1 or at least 0", text)
    return int(found[1]), int(found[2])


def _mask(text: str, usual: tuple[int, ...]) -> tuple[bool, tuple[int, ...]]:
    """Return whether a mask is boolean, and its shape."""
    found = re.fullmatch(r"\s*(bool|float)\s*(?::\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)\s*)?", text)
    if found is None:
        wanted = "bool or float, with a shape such as bool:1,1,1,512 where it is not Sq,Sk"
        raise ArgumentError.got("attn_mask", wanted, text)
    return found[1] == "bool", usual if found[2] is None else tuple(map(int, found[2].split(",")))


def _starts(name: str, text: str | None, device: torch.device) -> torch.Tensor | None:
    """Return the bounds of packed sequences."""
    if text is None:
        return None
    if re.fullmatch(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*", text) is None:
        raise ArgumentError.got(name, "bounds of sequences such as 0,300,1024", text)
    return torch.tensor([int(part) for part in text.split(",")], dtype=torch.int32, device=device)


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
