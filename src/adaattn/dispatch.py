"""One call from facts to result: plan (cached), execute, audit, step down if something breaks."""

import logging
import time
from dataclasses import replace

import torch

from adaattn import hardware
from adaattn._events import AttentionEvent, emit, has_sinks, wants_timing
from adaattn.auditing import FALLBACKS, Outcome, audited, is_lossy
from adaattn.backends import (
    capabilities,
    capability_named,
    execute,
)
from adaattn.deciding import Decided, decide_call
from adaattn.errors import AdaAttnError, ArgumentError, PlanError, UnsupportedError, expected_got
from adaattn.planning import decide, reasons
from adaattn.spec import (
    Decision,
    History,
    Method,
    Plan,
    Policy,
    TensorStats,
)
from adaattn.validation import Call, without_autocast

__all__ = [
    "FALLBACKS",
    "Outcome",
    "check_plan",
    "is_lossy",
    "run_call",
    "run_given",
    "run_plan",
]

is_compiling = torch.compiler.is_compiling
_LOGGER = logging.getLogger("adaattn")


def run_call(
    call: Call, policy: Policy, backend: str, tag: str, history: History | None = None
) -> Outcome:
    """Return the outcome of planning and running a call, and emit its event.

    Args:
        call: checked and canonical.
        policy: what may be lost.
        backend: ``"auto"`` or an executor.
        tag: name of the call in events.
        history: what the caller's earlier calls taught.

    Raises:
        UnsupportedError: an explicit backend cannot serve it.
        PlanError: nothing can.
        NonFiniteError: q, k or v is not finite, and an approximation was to be measured.
    """
    timed = has_sinks() and wants_timing()
    start = _now(call) if timed else 0.0
    layer = _layer_of(tag)
    with without_autocast(call.problem.device_type):
        decided = decide_call(call, policy, backend, layer, history)
        outcome = _run_decision(call, decided, policy, backend, layer)
    if has_sinks():
        _emit(call, outcome, decided.stats, tag, _now(call) - start if timed else None)
    return replace(outcome, is_settled=decided.is_settled)


def run_given(call: Call, plan: Plan, tag: str) -> Outcome:
    """Return the outcome of a plan that the caller made, and emit its event.

    Raises:
        ArgumentError: it was made for another number of heads.
        UnsupportedError: one of its executors cannot serve the call.
    """
    if not has_sinks():
        return run_plan(call, plan)
    timed = wants_timing()
    start = _now(call) if timed else 0.0
    outcome = run_plan(call, plan)
    time_ms = _now(call) - start if timed else None
    decision = Decision(plan=plan, notes=("the plan was given with the call",))
    _emit(call, replace(outcome, decision=decision), None, tag, time_ms)
    return outcome


def run_plan(call: Call, plan: Plan) -> Outcome:
    """Return what ``plan`` computes, checked; traceable by ``torch.compile``."""
    check_plan(call, plan)
    with without_autocast(call.problem.device_type):
        return Outcome(result=execute(call.tensors, call.problem, plan), decision=None)


def _layer_of(tag: str) -> int:
    """Return the number in a tag such as ``"layer12"``; -1 if there is none."""
    digits = tag.removeprefix("layer")
    return int(digits) if digits != tag and digits.isdigit() else -1


def check_plan(call: Call, plan: Plan) -> None:
    """Refuse a plan that does not fit the call.

    Raises:
        ArgumentError: it was made for another number of heads.
        UnsupportedError: one of its executors cannot serve the call.
    """
    problem = call.problem
    if plan.num_heads != problem.num_heads:
        raise ArgumentError(
            expected_got("plan", f"one for {problem.num_heads} heads", f"one for {plan.num_heads}")
        )
    facts = None if is_compiling() else hardware.probe(call.tensors.query.device)
    for group in plan.groups:
        part = replace(problem, precision=group.precision)
        found = reasons(capability_named(group.capability), part, facts)
        if plan.error_budget == 0.0 and group.precision.value > problem.precision.value:
            found = (
                *found,
                f"the plan computes in {group.precision.label} and allows no error, "
                f"the input is {problem.precision.label}",
            )
        if found:
            raise UnsupportedError(f"the plan's executor {group.capability}", found)


def _run_decision(
    call: Call,
    decided: Decided,
    policy: Policy,
    backend: str,
    layer: int,
) -> Outcome:
    """Return the outcome of a decision; ``auto`` steps down where an executor fails."""
    decision = decided.decision
    failed: list[str] = []
    excluded: set[str] = set()
    while True:
        try:
            result = execute(call.tensors, call.problem, decision.plan)
            break
        except RuntimeError as error:
            if isinstance(error, (AdaAttnError, torch.AcceleratorError)):
                raise
            names = {group.capability for group in decision.plan.groups}
            if backend != "auto" or names <= excluded:
                raise
            excluded |= names
            failed.append(_step_down(sorted(names), error))
            left = tuple(item for item in capabilities() if item.name not in excluded)
            facts = hardware.probe(call.tensors.query.device)
            exact_only = replace(policy, methods=(Method.EXACT,), precisions=())
            if isinstance(error, torch.OutOfMemoryError):
                exact_only = _within_free_memory(exact_only, call.tensors.query.device)
            try:
                decision = decide(call.problem, None, facts, exact_only, left, layer=layer)
            except PlanError:
                raise error from None
            decision = replace(decision, notes=(*decision.notes, *failed))
    outcome = Outcome(result=result, decision=decision, fallbacks=tuple(failed))
    if policy.audit_rows == 0 or not is_lossy(decision.plan, call.problem):
        return outcome
    return audited(call, outcome, policy, backend, layer, decided.audit_seed)


def _within_free_memory(policy: Policy, device: torch.device) -> Policy:
    """Return the policy with a memory budget of what is free, less a tenth for fragments."""
    free = hardware.free_memory_bytes(device)
    limits = [policy.memory_budget_bytes, None if free is None else int(0.9 * free)]
    known = [limit for limit in limits if limit is not None]
    return replace(policy, memory_budget_bytes=min(known)) if known else policy


def _step_down(names: list[str], error: RuntimeError) -> str:
    """Log and count an executor's failure; return it as a sentence."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    sentence = f"{', '.join(names)} failed ({first}); the next candidate was tried"
    FALLBACKS.update(names)
    _LOGGER.warning("%s", sentence)
    return sentence


def _now(call: Call) -> float:
    """Return the wall clock in milliseconds once the device is idle."""
    if call.tensors.query.is_cuda:
        torch.cuda.synchronize(call.tensors.query.device)
    return 1e3 * time.perf_counter()


def _emit(
    call: Call, outcome: Outcome, stats: TensorStats | None, tag: str, time_ms: float | None
) -> None:
    """Emit the event of a call."""
    decision = outcome.decision
    assert decision is not None
    errors = outcome.worst_errors
    emit(
        AttentionEvent(
            problem=call.problem,
            decision=decision,
            workspace_bytes=decision.plan.workspace_bytes,
            fallbacks=outcome.fallbacks,
            error_estimate=max(errors) if errors else None,
            head_errors=errors,
            repaired_heads=outcome.repaired_heads,
            stats=stats,
            time_ms=time_ms,
            tag=tag,
        )
    )
