"""One call from facts to result: plan (cached), execute, audit, step down if something breaks."""

import logging
import time
from dataclasses import replace
from functools import lru_cache
from typing import Final

import torch

from adaattn import hardware
from adaattn._events import AttentionEvent, emit, has_sinks, wants_timing
from adaattn.auditing import FALLBACKS, Outcome, audited, is_lossy
from adaattn.backends import (
    capabilities,
    capabilities_asked_for,
    capability_named,
    execute,
)
from adaattn.errors import AdaAttnError, ArgumentError, PlanError, UnsupportedError, expected_got
from adaattn.measure import check_finite, measure
from adaattn.planning import FP16_SAFE, decide, head_budgets, reasons, worth_measuring
from adaattn.planning.plan import DROPOUT_HIDES
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Decision,
    HardwareFacts,
    History,
    Method,
    Plan,
    Policy,
    TensorStats,
    Way,
)
from adaattn.validation import Call, without_autocast

__all__ = [
    "DECODE_ROWS",
    "FALLBACKS",
    "Outcome",
    "check_plan",
    "decide_call",
    "is_lossy",
    "is_transformed",
    "run_call",
    "run_given",
    "run_plan",
]

is_compiling = torch.compiler.is_compiling
_LOGGER = logging.getLogger("adaattn")
DECODE_ROWS: Final = 8
"""Up to this many query rows inputs are not scanned for NaN: reading k and v is the whole cost."""

_TRANSFORMED: Final = "inside a torch.func transform nothing can be measured; it ran exactly"


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
        NonFiniteError: q, k or v is not finite under an error budget.
    """
    timed = has_sinks() and wants_timing()
    start = _now(call) if timed else 0.0
    layer = _layer_of(tag)
    with without_autocast(call.problem.device_type):
        decision, stats = _decide(call, policy, backend, layer, history)
        outcome = _run_decision(call, decision, policy, backend, layer)
    if has_sinks():
        _emit(call, outcome, stats, tag, _now(call) - start if timed else None)
    return outcome


def decide_call(
    call: Call, policy: Policy, backend: str, layer: int, history: History | None = None
) -> Decision:
    """Return the decision for a call without running it; measures if the policy allows a loss."""
    with without_autocast(call.problem.device_type):
        return _decide(call, policy, backend, layer, history)[0]


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


def _decide_cached(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
) -> Decision:
    """Return the decision that needs no statistics.

    A decoding step is decided for the next power of two of keys: a growing cache would
    otherwise be decided anew at each token.
    """
    if problem.len_q <= DECODE_ROWS < problem.len_k and not problem.num_sequences:
        keys = 1 << (problem.len_k - 1).bit_length()
        mask_shape = tuple(
            keys if place == 3 and size > 1 else size
            for place, size in enumerate(problem.mask_shape)
        )
        problem = replace(problem, len_k=keys, mask_shape=mask_shape)
    return _decide_whole(problem, facts, policy, allowed, layer)


@lru_cache(maxsize=1024)
def _decide_whole(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
) -> Decision:
    """Return the decision for exactly this problem."""
    return decide(problem, None, facts, policy, allowed, layer=layer)


@lru_cache(maxsize=256)
def _decide_measured(
    problem: AttentionProblem,
    stats: TensorStats,
    facts: HardwareFacts,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
    ways: tuple[Way, ...],
) -> Decision:
    """Return the decision from numbers that an earlier call measured."""
    return decide(problem, stats, facts, policy, allowed, layer=layer, ways=ways)


def _decide(
    call: Call, policy: Policy, backend: str, layer: int, history: History | None
) -> tuple[Decision, TensorStats | None]:
    """Return the decision, and the statistics if some were measured on this call."""
    if history is not None and history.repeat is not None:
        return history.repeat, None
    problem = call.problem
    facts = hardware.probe(call.tensors.query.device)
    allowed = capabilities_asked_for(backend)
    if backend != "auto":
        _check_backend(problem, facts, policy, backend, allowed)
    lossy = policy.error_budget > 0 or bool(policy.head_budgets)
    forced = all(item.method is not Method.EXACT for item in allowed)
    if not lossy:
        return _decide_cached(problem, facts, policy, allowed, layer), None
    if is_transformed(call.tensors.query, call.tensors.key, call.tensors.value):
        decision = _decide_cached(problem, facts, policy, allowed, layer)
        return replace(decision, notes=(*decision.notes, _TRANSFORMED)), None
    scanned = problem.len_q > DECODE_ROWS or forced
    magnitude = check_finite(call.tensors) if scanned else 0.0
    safe = magnitude <= FP16_SAFE
    wanted = worth_measuring(
        problem,
        facts,
        policy,
        allowed,
        forced=forced,
        fp16_safe=safe,
        calls_per_measurement=history.calls_per_measurement if history else 1,
    )
    try:
        if not wanted:
            return _decide_cached(problem, facts, policy, allowed, layer), None
        earlier = history.of(problem) if history else None
        ways = earlier.ways if earlier else ()
        if earlier is not None and earlier.stats is not None and not forced:
            known = replace(earlier.stats, max_magnitude=0.0 if safe else magnitude)
            return _decide_measured(problem, known, facts, policy, allowed, layer, ways), None
        stats, _ = measure(
            call.tensors,
            problem,
            wanted,
            max(policy.audit_rows // 2, 1),
            max_magnitude=magnitude,
            policy=policy,
            budgets=() if forced else head_budgets(policy, problem.num_heads, layer),
        )
        decision = decide(
            problem, stats, facts, policy, allowed, layer=layer, forced=forced, ways=ways
        )
    except PlanError as error:
        if backend == "auto":
            raise
        raise UnsupportedError(f"backend {backend!r}", error.trace) from error
    return decision, stats


def is_transformed(*tensors: torch.Tensor) -> bool:
    """Return whether a transform of ``torch.func`` hides the numbers that measuring reads."""
    hidden = torch._C._functorch.is_functorch_wrapped_tensor
    return any(hidden(item) for item in tensors)


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
        if item.method is not Method.EXACT and problem.dropout_p > 0:
            against.append(DROPOUT_HIDES)
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
    return audited(call, outcome, policy, backend, layer)


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
            repaired_heads=outcome.repaired_heads,
            stats=stats,
            time_ms=time_ms,
            tag=tag,
        )
    )
