"""A decision run: executed, stepped down where an executor is out of memory, its event emitted."""

import logging
import time
from dataclasses import replace
from functools import lru_cache
from typing import Final

import torch

from adaattn import hardware
from adaattn._events import AttentionEvent, emit, listeners
from adaattn.backends import capabilities, capability_named, execute, forget_tiles
from adaattn.call.audit import FALLBACKS, Outcome, audited, is_lossy
from adaattn.call.describe import Call, without_autocast
from adaattn.call.history import Watch
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutorError,
    PlanError,
    UnsupportedError,
)
from adaattn.planning import decide, reasons
from adaattn.spec import AttentionProblem, Decision, Method, Plan, Policy, Scheme, Why

__all__ = [
    "GIVEN",
    "check_plan",
    "log_unfused",
    "now_ms",
    "run_decision",
    "run_plan",
    "tell",
    "why_not_fused",
]

is_compiling = torch.compiler.is_compiling
_LOGGER = logging.getLogger("adaattn")
_PLAN_HINT: Final = "a Decision of plan_attention has one in .plan"


def run_decision(call: Call, decision: Decision, policy: Policy, backend: str) -> Outcome:
    """Return the outcome of a decision; ``auto`` steps down where an executor gives up.

    That is where memory runs out, and where it says `ExecutorError`. Other errors are raised.

    Args:
        call: checked and canonical.
        decision: for this call.
        policy: its memory budget holds for what is tried instead.
        backend: ``"auto"``, or what was asked for: that one, or its error.
    """
    failed: list[str] = []
    excluded: set[str] = set()
    while True:
        try:
            with without_autocast(call.problem.device_type):
                result = execute(call.tensors, call.problem, decision.plan)
            return Outcome(result=result, decision=decision, fallbacks=tuple(failed))
        except (torch.OutOfMemoryError, ExecutorError) as error:
            names = {group.capability for group in decision.plan.groups}
            if backend != "auto" or names <= excluded or call.problem.batch_invariant:
                raise  # another executor has other bits, and a smaller batch may have found room
            forget_tiles(call.tensors.query.device)
            failed.append(_step_down(sorted(names), error))
            smaller = None
            if isinstance(error, torch.OutOfMemoryError):
                smaller = _smaller(call, policy, excluded, error)
            if smaller is None or not _takes_fewer_rows(smaller.plan, decision.plan):
                excluded |= names
                smaller = _smaller(call, policy, excluded, error)
            decision = replace(smaller, notes=(*smaller.notes, *failed))


def _takes_fewer_rows(plan: Plan, failed: Plan) -> bool:
    """Return whether a plan has the executors of one that failed, with fewer rows at once."""
    if [group.capability for group in plan.groups] != [group.capability for group in failed.groups]:
        return False
    pairs = zip(plan.groups, failed.groups, strict=True)
    return any(new.launch.chunk_rows < old.launch.chunk_rows for new, old in pairs)


def run_plan(call: Call, plan: Plan) -> Outcome:
    """Return what a given plan computes, checked, and audited if it says so.

    Traceable by ``torch.compile``; there nothing is audited.

    Raises:
        ArgumentTypeError: it is none.
        ArgumentError: it was made for another number of heads.
        UnsupportedError: one of its executors cannot serve the call, or computes in a format
            that loses what the plan does not allow to lose.
    """
    check_plan(call, plan)
    with without_autocast(call.problem.device_type):
        result = execute(call.tensors, call.problem, plan)
    decision = None if is_compiling() else Decision(plan=plan, notes=(GIVEN,))
    outcome = Outcome(result=result, decision=decision)
    checked = plan.audit_rows and is_lossy(plan, call.problem) and call.problem.may_wait
    if is_compiling() or not checked or call.problem.num_sequences or call.problem.dropout_p:
        return outcome
    return audited(call, outcome, plan.budgets, plan.audit_rows)


GIVEN: Final = "the plan was given with the call"


def check_plan(call: Call, plan: Plan) -> None:
    """Refuse what is no plan, or one that does not fit the call; see `run_plan`."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError.got("plan", "None or a Plan", type(plan).__name__, _PLAN_HINT)
    problem = call.problem
    if plan.num_heads != problem.num_heads:
        raise ArgumentError.got(
            "plan", f"one for {problem.num_heads} heads", f"one for {plan.num_heads}"
        )
    facts = None if is_compiling() else hardware.probe(call.tensors.query.device)
    for group in plan.groups:
        scheme = group.scheme
        part = replace(problem, precision=scheme.inputs, may_wait=True)
        capability = capability_named(group.capability)
        found = [*reasons(capability, part, facts)]
        if capability.method is not group.method.kind:
            asked, own = group.method.kind.name.lower(), capability.method.name.lower()
            found.append(f"its method is {own}, the plan asks for {asked}")
        if scheme != Scheme.of(scheme.inputs):
            found.append(f"it computes in one format, the plan asks for {scheme.label}")
        other = scheme.inputs is not problem.precision
        if plan.error_budget == 0.0 and other and not scheme.keeps(problem.precision):
            found.append(
                f"the plan computes in {scheme.label} and allows no error, "
                f"the input is {problem.precision.label}"
            )
        if problem.batch_invariant and other:
            found.append("its error is audited on the whole batch, which batch_invariant excludes")
        if found:
            raise UnsupportedError(f"the plan's executor {group.capability}", found)


def _smaller(call: Call, policy: Policy, excluded: set[str], error: RuntimeError) -> Decision:
    """Return an exact decision within the memory that is free, without some executors."""
    device = call.tensors.query.device
    free = None if isinstance(error, ExecutorError) else hardware.free_memory_bytes(device)
    # A tenth is left to fragments.
    limits = [policy.memory_budget_bytes, None if free is None else int(0.9 * free)]
    known = [limit for limit in limits if limit is not None]
    policy = replace(policy, methods=(Method.EXACT,), precisions=())
    policy = replace(policy, memory_budget_bytes=min(known)) if known else policy
    left = tuple(item for item in capabilities() if item.name not in excluded)
    try:
        return decide(call.problem, None, hardware.probe(device), policy, left)
    except PlanError:
        raise error from None


def log_unfused(problem: AttentionProblem, decision: Decision) -> None:
    """Log why no fused kernel serves calls of a problem, once in this process."""
    if _LOGGER.isEnabledFor(logging.INFO) and (why := why_not_fused(decision)):
        names = dict.fromkeys(group.capability for group in decision.plan.groups)
        _log_unfused(problem.without_layout(), ", ".join(names), why)


@lru_cache(maxsize=1024)
def _log_unfused(problem: AttentionProblem, names: str, why: str) -> None:
    """Log one sentence."""
    shape = [problem.batch, problem.num_heads, problem.len_q, problem.head_dim]
    text = "no fused kernel serves queries %s over %d keys, %s does: %s"
    _LOGGER.info(text, shape, problem.len_k, names, why)


hardware.on_clear(_log_unfused.cache_clear)


def why_not_fused(decision: Decision) -> str | None:
    """Return why no fused kernel serves exact heads; "" if one does.

    None where no head is exact: an approximation is no fallback.
    """
    groups = decision.plan.groups
    exact = [group for group in groups if group.method.kind is Method.EXACT]
    if not exact:
        return None
    slow = [group for group in exact if not capability_named(group.capability).is_fused]
    if not slow:
        return ""
    fused = {item.name for item in capabilities() if item.is_fused}
    against: list[tuple[int, int, int, str]] = []
    for place, entry in enumerate(decision.trace):
        name = entry.executor
        if entry.accepted or name not in fused:
            continue
        if entry.why is Why.SLOWER:
            against.append((0, 0, place, f"{name} was not faster than {slow[0].capability}"))
            continue
        # The nearest to serving: it could run here, and the fewest things stand against it.
        kind = 2 if entry.why is Why.ELSEWHERE else 1
        against.append((kind, entry.num_reasons, place, f"{name}: {entry.reason}"))
    if against:
        return min(against)[-1]
    return f"{slow[0].capability} was asked for by name, which is no fused kernel"


def _step_down(names: list[str], error: RuntimeError) -> str:
    """Log and count an executor's failure; return it as a sentence."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    sentence = f"{', '.join(names)} failed ({first}); the next candidate was tried"
    FALLBACKS.update(names)
    _LOGGER.warning("%s", sentence)
    return sentence


def now_ms(device: torch.device) -> float:
    """Return the wall clock in milliseconds once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * time.perf_counter()


def tell(
    call: Call,
    outcome: Outcome,
    tag: str,
    layer: int,
    time_ms: float | None,
    watch: Watch | None = None,
) -> None:
    """Emit the event of a call, if anybody listens, and hand it to who watches these calls."""
    if watch is None and not listeners():
        return
    decision = outcome.decision
    assert decision is not None
    errors = outcome.worst_errors
    event = AttentionEvent(
        problem=call.problem,
        decision=decision,
        workspace_bytes=decision.workspace_bytes,
        fallbacks=outcome.fallbacks,
        error_estimate=max(errors) if errors else None,
        head_errors=errors,
        earlier_errors=outcome.earlier_errors,
        earlier_over=outcome.earlier_over,
        repaired_heads=outcome.repaired_heads,
        stats=outcome.stats,
        saved_ms=outcome.saved_ms,
        time_ms=time_ms,
        tag=tag,
        layer=layer,
    )
    emit(event)
    if watch is not None:
        watch(event, 1)
