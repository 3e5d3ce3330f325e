"""Single attention problems by AdaAttn and as a PyTorch user would write them, in one run.

Each side is called once for its output and its memory, and once more to be warm; outputs are
compared; then both are timed in turns, so that a machine that slows down slows both. What
loses is returned like what wins.

Not covered: training, and other policies than the exact one (`evaluate` measures them on a
model, where their errors mean something).
"""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch

from adaattn._events import AttentionEvent, record_events
from adaattn.backends.sdpa_call import sdpa
from adaattn.evaluation.assets import Progress
from adaattn.evaluation.case_list import CASES, Call, Case, Inputs, Shape
from adaattn.evaluation.results import Comparison
from adaattn.functional import scaled_dot_product_attention
from adaattn.hardware import free_memory_bytes, peak_memory, return_freed_memory
from adaattn.spec import Plan, Policy

__all__ = ["compare_cases"]

_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
_CASE_S: Final = 1.5
"""Rounds after the first few end when they have taken so long."""

_TURN_MS: Final = 10.0
"""Shorter calls are repeated within a turn: clocks and interrupts disturb them less then."""


def compare_cases(
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    *,
    cases: Sequence[Case] = CASES,
) -> tuple[Comparison, ...]:
    """Return each case's times and memory, ours and PyTorch's.

    Args:
        device: a CPU or CUDA device.
        dtype: of the tensors; None is float32 on a CPU and bfloat16 on a GPU.
        progress: called with ("compare", cases done, cases in all).
        cases: what to compute.

    Example:
        >>> from adaattn.evaluation.cases import compare_cases
        >>> compare_cases("cpu")[0].error < 1e-4  # doctest: +SKIP
        True
    """
    chosen = torch.device(device)
    kind = dtype or (torch.bfloat16 if chosen.type == "cuda" else torch.float32)
    report = progress or (lambda stage, done, total: None)
    report("compare", 0, len(cases))
    found = []
    # Not inference mode: what is made from its tensors cannot be kept for the next call.
    with torch.no_grad():
        _begin(chosen, kind)
        for number, case in enumerate(cases, start=1):
            found.append(_compare(case, chosen, kind))
            report("compare", number, len(cases))
    return_freed_memory()
    return tuple(found)


def _begin(device: torch.device, dtype: torch.dtype) -> None:
    """Call both sides once: code that is loaded and threads that start are no case's memory."""
    small = torch.ones(1, 2, 1, 64, device=device, dtype=dtype)
    scaled_dot_product_attention(small, small[:, :1], small[:, :1], enable_gqa=True)
    sdpa(small, small[:, :1], small[:, :1], enable_gqa=True)


def _compare(case: Case, device: torch.device, dtype: torch.dtype) -> Comparison:
    """Return what one case took."""
    inputs = _inputs(case.shape(device), device, dtype)
    peer = case.peer_for(device)
    need = inputs.shape.num_scores * dtype.itemsize if peer.needs_scores else 0
    why_not = _too_much(need, inputs.shape, device)
    ours, (output, ours_bytes, chosen) = _ours(case, inputs)
    calls, peer_bytes, error = [ours], need or None, None
    if not why_not:
        theirs, kept = peer.make(inputs)
        expected, added = _first(theirs, device)
        peer_bytes = None if added is None else added + (0 if kept is None else kept.nbytes)
        error = _difference(output, expected)
        why_not = _too_different(error, dtype)
        calls += [] if why_not else [theirs]
        del expected
    del output
    times = _timed_in_turns(calls, device)
    name = str(dtype).removeprefix("torch.")
    return Comparison(
        name=case.name,
        detail=f"{inputs.shape.words()}, {name}",
        peer=peer.words,
        chosen=chosen,
        ours_ms=times[0],
        peer_ms=None if why_not else times[1],
        ours_bytes=ours_bytes,
        peer_bytes=peer_bytes,
        error=error,
        why_not=why_not,
    )


def _inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return random normal tensors, the same in each run."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, length: int) -> torch.Tensor:
        size = (1, heads, length, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    return Inputs(
        shape=shape,
        query=normal(shape.heads, shape.len_q),
        key=normal(shape.kv_heads, shape.len_k),
        value=normal(shape.kv_heads, shape.len_k),
    )


def _ours(case: Case, inputs: Inputs) -> tuple[Call, tuple[torch.Tensor, int | None, str]]:
    """Return AdaAttn's call, and of the first one: output, memory added, label of what ran."""
    keywords = case.keywords(inputs)
    if inputs.shape.budget_bytes is not None:
        budget = inputs.shape.budget_bytes
        keywords["policy"] = Policy(name="quality", memory_budget_bytes=budget)

    def call() -> torch.Tensor:
        found: torch.Tensor = scaled_dot_product_attention(
            inputs.query, inputs.key, inputs.value, **keywords
        )
        return found

    events: list[AttentionEvent] = []
    with record_events(events.append):
        output, added_bytes = _first(call, inputs.query.device)
    decision = events[-1].decision
    if decision.later is None:
        return call, (output, added_bytes, _labels(decision.plan))
    # What is compiled takes over after some calls. The peer is compiled before it is timed.
    keywords = {name: item for name, item in keywords.items() if name != "policy"}
    keywords["plan"] = decision.later
    call()
    output, added_bytes = _first(call, inputs.query.device)
    calls = f"from call {decision.calls_before + 1} on, {_labels(decision.plan)} before"
    return call, (output, added_bytes, f"{_labels(decision.later)} ({calls})")


def _labels(plan: Plan) -> str:
    return ", ".join(dict.fromkeys(group.label for group in plan.groups))


def _first(call: Call, device: torch.device) -> tuple[torch.Tensor, int | None]:
    """Return the output of a first call, and the most memory that it added."""
    return_freed_memory()
    with peak_memory(device) as peak:
        output = call()
        _wait(device)
    return output, peak.added_bytes


def _too_much(need: int, shape: Shape, device: torch.device) -> str:
    """Return why a peer that holds so many bytes is not run, or ""."""
    budget, free = shape.budget_bytes, free_memory_bytes(device)
    holds = f"it holds a number for each score, {_megabytes(need)}"
    if budget is not None and need > budget:
        return f"{holds}, and the budget is {_megabytes(budget)}"
    if free is not None and need > free:
        return f"{holds}, and {_megabytes(free)} are free"
    return ""


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 10e6 else f"{count / 1e6:.2g} MB"


def _difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference over the largest absolute value."""
    wide = torch.promote_types(expected.dtype, torch.float32)
    largest = (output.to(wide) - expected.to(wide)).abs().max()
    return float(largest / expected.to(wide).abs().max())


def _too_different(error: float, dtype: torch.dtype) -> str:
    """Return why times are not compared: results that agree in less than half of their digits."""
    allowed = math.sqrt(torch.finfo(dtype).eps)
    if error <= allowed:
        return ""
    return f"the results differ by {error:.1e} of the largest value, more than {allowed:.1e}"


def _timed_in_turns(calls: Sequence[Call], device: torch.device) -> tuple[float, ...]:
    """Return the median milliseconds of each call; another one begins each round."""
    once = [_milliseconds(call, 1, device) for call in calls]
    counts = [max(1, math.ceil(_TURN_MS / max(first, 1e-3))) for first in once]
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.perf_counter() + _CASE_S
    for number in range(_MAX_ROUNDS):
        if number >= _MIN_ROUNDS and time.perf_counter() > deadline:
            break
        order = range(len(calls)) if number % 2 == 0 else reversed(range(len(calls)))
        for place in order:
            times[place].append(_milliseconds(calls[place], counts[place], device))
    return tuple(statistics.median(values) for values in times)


def _milliseconds(call: Call, count: int, device: torch.device) -> float:
    """Return the milliseconds of one of some calls, the device's time included."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return 1e3 * (time.perf_counter() - start) / count


def _wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
