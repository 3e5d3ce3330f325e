"""One call from facts to result: plan (cached), execute, audit, step down if something breaks."""

import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import torch

from adaattn import hardware
from adaattn._events import AttentionEvent, emit, has_sinks, wants_timing
from adaattn.backends import Result, capabilities, capability_named, execute
from adaattn.errors import AdaAttnError, ArgumentError, PlanError, UnsupportedError, expected_got
from adaattn.measure import Sample, audit, check_finite, measure
from adaattn.planning import FP16_SAFE, decide, head_budgets, reasons, worth_measuring
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Decision,
    HardwareFacts,
    HeadGroup,
    Method,
    Plan,
    Policy,
    TensorStats,
)
from adaattn.validation import Call, without_autocast

__all__ = [
    "DECODE_ROWS",
    "FALLBACKS",
    "Outcome",
    "check_plan",
    "decide_call",
    "is_lossy",
    "run_call",
    "run_given",
    "run_plan",
]

_LOGGER = logging.getLogger("adaattn")
DECODE_ROWS: Final = 8
"""Up to this many query rows inputs are not scanned for NaN: reading k and v is the whole cost."""

FALLBACKS: Counter[str] = Counter()
"""Steps down taken by ``backend="auto"`` in this process, by the executor that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call gave.

    Args:
        result: the executor's outputs.
        decision: plan and reasons; None when the plan was given.
        head_errors: [B, Hq] error on sampled rows, or None where nothing was approximated.
        fallbacks: each step down, as a sentence.
    """

    result: Result
    decision: Decision | None
    head_errors: torch.Tensor | None = None
    fallbacks: tuple[str, ...] = ()


def run_call(call: Call, policy: Policy, backend: str, tag: str) -> Outcome:
    """Return the outcome of planning and running a call, and emit its event.

    Raises:
        UnsupportedError: an explicit backend cannot serve it.
        PlanError: nothing can.
        NonFiniteError: q, k or v is not finite under an error budget.
    """
    timed = has_sinks() and wants_timing()
    start = _now(call) if timed else 0.0
    layer = _layer_of(tag)
    with without_autocast(call.problem.device_type):
        decision, sample, stats = _decide(call, policy, backend, layer)
        outcome = _run_decision(call, decision, sample, policy, backend, layer)
    if has_sinks():
        _emit(call, outcome, stats, tag, _now(call) - start if timed else None)
    return outcome


def decide_call(call: Call, policy: Policy, backend: str, layer: int) -> Decision:
    """Return the decision for a call without running it; measures if the policy allows a loss."""
    with without_autocast(call.problem.device_type):
        return _decide(call, policy, backend, layer)[0]


def run_given(call: Call, plan: Plan, tag: str) -> Outcome:
    """Return the outcome of a plan that the caller made, and emit its event.

    Raises:
        ArgumentError: it was made for another number of heads.
        UnsupportedError: one of its executors cannot serve the call.
    """
    check_plan(call, plan)
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
    """Return what ``plan`` computes; traceable by ``torch.compile``."""
    with without_autocast(call.problem.device_type):
        return Outcome(result=execute(call.tensors, call.problem, plan), decision=None)


def is_lossy(plan: Plan, problem: AttentionProblem) -> bool:
    """Return whether a plan loses anything that the input's own precision would keep."""
    return not plan.is_exact or any(g.precision is not problem.precision for g in plan.groups)


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
    if plan.num_heads != call.problem.num_heads:
        raise ArgumentError(
            expected_got(
                "plan", f"one for {call.problem.num_heads} heads", f"one for {plan.num_heads}"
            )
        )
    facts = hardware.probe(call.tensors.query.device)
    for group in plan.groups:
        part = replace(call.problem, precision=group.precision)
        found = reasons(capability_named(group.capability), part, facts)
        if found:
            raise UnsupportedError(f"the plan's executor {group.capability}", found)


@lru_cache(maxsize=256)
def _selected(backend: str) -> tuple[Capability, ...]:
    """Return the capabilities that a backend argument means."""
    if backend == "auto":
        return capabilities()
    found = tuple(item for item in capabilities() if backend in (item.name, item.backend))
    return found or (capability_named(backend),)


@lru_cache(maxsize=1024)
def _decide_cached(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
) -> Decision:
    """Return the decision that needs no statistics."""
    return decide(problem, None, facts, policy, allowed, layer=layer)


def _decide(
    call: Call, policy: Policy, backend: str, layer: int
) -> tuple[Decision, Sample | None, TensorStats | None]:
    """Return the decision, and the exact rows and statistics if some were measured."""
    problem = call.problem
    facts = hardware.probe(call.tensors.query.device)
    allowed = _selected(backend)
    if backend != "auto":
        _check_backend(problem, facts, policy, backend, allowed)
    lossy = policy.error_budget > 0 or bool(policy.head_budgets)
    forced = all(item.method is not Method.EXACT for item in allowed)
    if not lossy:
        return _decide_cached(problem, facts, policy, allowed, layer), None, None
    magnitude = check_finite(call.tensors) if problem.len_q > DECODE_ROWS else 0.0
    safe = magnitude <= FP16_SAFE
    wanted = worth_measuring(problem, facts, policy, allowed, forced=forced, fp16_safe=safe)
    try:
        if not wanted:
            return _decide_cached(problem, facts, policy, allowed, layer), None, None
        stats, sample = measure(
            call.tensors, problem, wanted, policy.audit_rows, max_magnitude=magnitude
        )
        decision = decide(problem, stats, facts, policy, allowed, layer=layer, forced=forced)
    except PlanError as error:
        if backend == "auto":
            raise
        raise UnsupportedError(f"backend {backend!r}", error.trace) from error
    return decision, sample, stats


def _check_backend(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    backend: str,
    allowed: tuple[Capability, ...],
) -> None:
    """Refuse an explicit backend that cannot serve, with every reason."""
    found: list[str] = []
    lossy = policy.error_budget > 0 or bool(policy.head_budgets)
    lower = [p for p in policy.precisions if lossy and p.bits < problem.precision.bits]
    for item in allowed:
        against = list(reasons(item, problem, facts))
        if any(not reasons(item, replace(problem, precision=p), facts) for p in lower):
            against = []
        if item.method is not Method.EXACT and not lossy:
            against.append(
                f"it approximates, and policy {policy.name!r} has an error budget of 0; "
                "pass policy='balanced' or a Policy(error_budget=...)"
            )
        if item.method not in policy.methods:
            against.append(f"policy {policy.name!r} does not use this method")
        if not against:
            return
        found += [f"{item.name}: {reason}" for reason in against]
    raise UnsupportedError(
        f"backend {backend!r}", found, "Pass backend='auto' to let another one serve."
    )


def _run_decision(
    call: Call,
    decision: Decision,
    sample: Sample | None,
    policy: Policy,
    backend: str,
    layer: int,
) -> Outcome:
    """Return the outcome of a decision; ``auto`` steps down where an executor fails."""
    failed: list[str] = []
    excluded: set[str] = set()
    while True:
        try:
            result = execute(call.tensors, call.problem, decision.plan)
            break
        except RuntimeError as error:
            if isinstance(error, AdaAttnError):
                raise
            names = {group.capability for group in decision.plan.groups}
            if backend != "auto" or names <= excluded:
                raise
            excluded |= names
            failed.append(_step_down(sorted(names), error))
            left = tuple(item for item in capabilities() if item.name not in excluded)
            facts = hardware.probe(call.tensors.query.device)
            exact_only = replace(policy, methods=(Method.EXACT,), precisions=())
            try:
                decision = decide(call.problem, None, facts, exact_only, left, layer=layer)
            except PlanError:
                raise error from None
            decision = replace(decision, notes=(*decision.notes, *failed))
    if sample is None:
        return Outcome(result=result, decision=decision, fallbacks=tuple(failed))
    budgets = head_budgets(policy, call.problem.num_heads, layer)
    return _audited(call, result, decision, (sample, budgets), tuple(failed))


def _step_down(names: list[str], error: RuntimeError) -> str:
    """Log and count an executor's failure; return it as a sentence."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    sentence = f"{', '.join(names)} failed ({first}); the next candidate was tried"
    FALLBACKS.update(names)
    _LOGGER.warning("%s", sentence)
    return sentence


def _audited(
    call: Call,
    result: Result,
    decision: Decision,
    held_against: tuple[Sample, tuple[float, ...]],
    failed: tuple[str, ...],
) -> Outcome:
    """Return the outcome with its errors on the sample; heads over budget are computed exactly."""
    if not is_lossy(decision.plan, call.problem):
        return Outcome(result=result, decision=decision, fallbacks=failed)
    sample, budgets = held_against
    errors = audit(_without_dropout(call, result, decision.plan), sample)
    worst = errors.amax(0).tolist()
    over = tuple(head for head, error in enumerate(worst) if not error <= budgets[head])
    if not over:
        return Outcome(result=result, decision=decision, head_errors=errors, fallbacks=failed)
    result = _repaired(call, result, over)
    shown = ", ".join(str(head) for head in over)
    sentence = (
        f"audit: heads {shown} had errors up to {max(worst[head] for head in over):.2g}, "
        f"{min(budgets[head] for head in over):g} allowed; they were computed exactly"
    )
    _LOGGER.info("%s", sentence)
    FALLBACKS.update(["audit"])
    decision = replace(decision, notes=(*decision.notes, sentence))
    return Outcome(
        result=result,
        decision=decision,
        head_errors=errors.index_fill(1, torch.tensor(over, device=errors.device), 0.0),
        fallbacks=(*failed, sentence),
    )


def _without_dropout(call: Call, result: Result, plan: Plan) -> torch.Tensor:
    """Return the output to audit: with dropout, which is no error, the plan's output without."""
    if call.problem.dropout_p == 0.0:
        return result.output
    with torch.no_grad():
        return execute(call.tensors, replace(call.problem, dropout_p=0.0), plan).output


def _repaired(call: Call, result: Result, heads: tuple[int, ...]) -> Result:
    """Return the result with some heads replaced by exact ones."""
    chunk = HeadGroup(capability="chunked", precision=call.problem.precision, chunk_rows=256)
    rest = tuple(h for h in range(call.problem.num_heads) if h not in heads)
    if not rest:
        plan = Plan(groups=(chunk,), num_heads=call.problem.num_heads)
        return execute(call.tensors, call.problem, plan)
    plan = Plan(
        groups=(replace(chunk, heads=heads), replace(chunk, heads=rest)),
        num_heads=call.problem.num_heads,
    )
    exact = execute(call.tensors, call.problem, plan)
    index = torch.tensor(heads, device=result.output.device)
    output = result.output.index_copy(1, index, exact.output.index_select(1, index))
    return replace(result, output=output)


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
    errors: tuple[float, ...] = ()
    if outcome.head_errors is not None:
        errors = tuple(outcome.head_errors.amax(0).tolist())
    emit(
        AttentionEvent(
            problem=call.problem,
            decision=decision,
            workspace_bytes=decision.plan.workspace_bytes,
            fallbacks=outcome.fallbacks,
            error_estimate=max(errors) if errors else None,
            head_errors=errors,
            entropy_bits=stats.entropy_bits if stats else (),
            time_ms=time_ms,
            tag=tag,
        )
    )
