"""A call under an error budget: exact, or approximate where the clock and sampled rows agree.

Where the host may wait, on a CPU and under ``check="always"``, this very call is measured,
checked on sampled rows and repaired. On a GPU nothing waits: numbers are measured on one call,
arrive later and serve the calls after it; results are audited every few calls, and a head that
an audit finds over its budget is exact from then on.
"""

import logging
import time
import zlib
from dataclasses import replace
from typing import Final

import torch

from adaattn import hardware
from adaattn.call.audit import (
    AUDIT_EVERY,
    Outcome,
    audited,
    audited_later,
    is_lossy,
    over_budget,
    with_earlier,
)
from adaattn.call.choice import Choice, Place, as_it_runs, place_of
from adaattn.call.describe import Call
from adaattn.call.history import Entry, History
from adaattn.call.measure import check_finite, measure, measure_later
from adaattn.call.recomputing import is_recomputing
from adaattn.call.run import run_decision
from adaattn.errors import NonFiniteError, PlanError, UnsupportedError
from adaattn.planning import (
    FP16_SAFE,
    decide,
    head_budgets,
    measuring_cost_ms,
    worth_measuring,
)
from adaattn.spec import (
    Decision,
    Method,
    Precision,
    TensorStats,
    Variant,
)

__all__ = [
    "PROCESS",
    "adapted",
    "decide_approximately",
    "is_settled",
    "is_transformed",
    "repeated",
]

_LOGGER = logging.getLogger("adaattn")

PROCESS: Final = History()
"""What calls without a history of their own taught."""

hardware.on_clear(PROCESS.reset)

_NOT_FINITE: Final = "the input was not finite, so nothing could be measured"
_FOR_ONCE: Final = "exact for once, to compare the times of approximations with"

_EXACT_CALLS: Final = 16
"""Calls that run without a look, at most: times and numbers that have arrived wait so long."""

_CAPTURING: Final = "a CUDA graph is being captured, in which nothing can be measured"


def is_transformed(*tensors: torch.Tensor) -> bool:
    """Return whether a transform of ``torch.func`` hides the numbers that measuring reads."""
    hidden = torch._C._functorch.is_functorch_wrapped_tensor
    return any(hidden(item) for item in tensors)


def is_settled(call: Call, choice: Choice) -> bool:
    """Return whether calls like this one run exactly whatever they hold."""
    policy, problem = choice.policy, call.problem
    if problem.batch_invariant or not any(head_budgets(policy, problem.num_heads, choice.layer)):
        return True
    facts = hardware.probe(call.tensors.query.device)
    return not worth_measuring(problem, facts, policy, choice.allowed, forced=choice.is_forced)


def adapted(call: Call, choice: Choice, history: History) -> Outcome:
    """Return the outcome of a call that may lose something.

    Raises:
        NonFiniteError: q, k or v is not finite, an approximation was asked for by name.
        UnsupportedError: an approximation asked for by name is over its budget.
        PlanError: nothing can serve.
    """
    if is_recomputing():
        return _again(call, choice, history)
    policy, problem, device = choice.policy, call.problem, call.tensors.query.device
    if _is_capturing(call):
        if choice.exact is None:
            raise UnsupportedError(f"backend {choice.backend!r}", [_CAPTURING])
        return run_decision(call, choice.exact, policy, choice.backend)
    place = place_of(call, choice, history)
    ledger, entry = place.ledger, place.entry
    entry.calls += 1
    ledger.collect()
    arrived = _take_in(entry, choice, problem.num_heads, history.momentum)
    wanted = _wanted(choice, place)
    stats, unmeasured = _looked_at(call, choice, place, history, wanted)
    entry.age += 1
    exact_for_once = not choice.is_forced and ledger.wants_exact()
    decision, note = choice.exact, unmeasured
    start = time.perf_counter()
    if decision is not None and exact_for_once and entry.stats is not None and wanted:
        note = note or _FOR_ONCE
    elif decision is None or (entry.stats is not None and wanted):
        decision = _decided(choice, place, entry)
        if choice.exact is not None:
            decision = as_it_runs(decision, choice.exact)
        variants = _lossy_variants(decision, problem.precision)
        if variants and not choice.is_forced and not ledger.may_try(variants):
            assert choice.exact is not None
            decision = choice.exact
    if note:
        decision = replace(decision, notes=(*decision.notes, note), unmeasured=unmeasured)
    if not is_lossy(decision.plan, problem):
        with ledger.timing(device, "exact"):
            outcome = run_decision(call, decision, policy, choice.backend)
        entry.variants = outcome.variants(problem.precision)
        left = 0 if exact_for_once or note else _exact_calls_next(call, choice, place, stats)
        entry.age += left
        ledger.count_exact(left)
        outcome = with_earlier(outcome, *arrived, "exact from now on")
        saved_ms = ledger.take_saved()
        return replace(outcome, stats=stats, saved_ms=saved_ms, exact_calls_next=left)
    variants = _lossy_variants(decision, problem.precision)
    chose_ms = 1e3 * (time.perf_counter() - start)
    with ledger.timing(device, "approximate", variants, chose_ms):
        sums = _sums(call) if problem.may_wait else []
        outcome = run_decision(call, decision, policy, choice.backend)
        outcome = _checked(call, outcome, choice, entry, sums)
    entry.variants = outcome.variants(problem.precision)
    entry.bar(outcome.repaired_heads)
    if torch.is_grad_enabled() or history.may_be_recomputed:
        assert outcome.decision is not None
        history.keep(_mark(call, sums, choice.layer), outcome.decision)
    outcome = with_earlier(outcome, *arrived, "exact from now on")
    return replace(outcome, stats=stats, saved_ms=ledger.take_saved())


def _looked_at(
    call: Call, choice: Choice, place: Place, history: History, wanted: tuple[Variant, ...]
) -> tuple[TensorStats | None, str]:
    """Return `_measured` of a call where it is time to, and exact calls have paid for it."""
    ledger, entry = place.ledger, place.entry
    is_due = entry.stats is None or entry.age >= history.measure_every
    if not wanted or not is_due or entry.arriving:
        return None, ""
    cost_ms = measuring_cost_ms(call.problem, place.facts, choice.policy, place.able, wanted)
    if not (choice.is_forced or ledger.may_measure(cost_ms, frozenset(wanted))):
        return None, ""
    with ledger.timing(call.tensors.query.device, "measuring", frozenset(wanted)):
        stats, note = _measured(call, choice, place, wanted, strict=history is PROCESS)
    if stats is not None:
        entry.learn(stats, history.momentum)
    return stats, note


def _exact_calls_next(call: Call, choice: Choice, place: Place, stats: TensorStats | None) -> int:
    """Return how many calls may run exactly now that one had to: nothing could be decided else."""
    ledger, entry = place.ledger, place.entry
    if choice.is_forced or entry.arriving or stats is not None:
        return 0
    wanted = _wanted(choice, place)
    if not wanted or entry.stats is not None:
        return _EXACT_CALLS if ledger.exact_ms < float("inf") else 0
    cost_ms = measuring_cost_ms(call.problem, place.facts, choice.policy, place.able, wanted)
    return min(ledger.calls_to_wait(cost_ms, frozenset(wanted)), _EXACT_CALLS)


def decide_approximately(call: Call, choice: Choice, history: History) -> Decision:
    """Return the decision that numbers measured on this call give, without running it.

    Raises:
        NonFiniteError: q, k or v is not finite.
        PlanError, UnsupportedError: nothing can serve.
    """
    place = place_of(call, choice, history)
    entry = place.entry
    if entry.stats is None:
        entry = replace(entry, stats=_stats_now(call, choice, place, _wanted(choice, place)))
    return _decided(choice, place, entry)


def _wanted(choice: Choice, place: Place) -> tuple[Variant, ...]:
    """Return the approximations that could pay, without those that were dropped."""
    dropped = place.ledger.dropped
    known = place.wanted.get(dropped)
    if known is None:
        known = place.wanted[dropped] = worth_measuring(
            place.problem,
            place.facts,
            choice.policy,
            choice.allowed,
            forced=choice.is_forced,
            dropped=dropped,
        )
    return known


def repeated(call: Call, choice: Choice, history: History, decision: Decision) -> Outcome:
    """Return the outcome of a decision made before, audited as others are where nothing waits."""
    outcome = run_decision(call, decision, choice.policy, choice.backend)
    if is_recomputing() or _is_capturing(call):
        return outcome
    entry = place_of(call, choice, history).entry
    entry.calls += 1
    arrived = _take_in(entry, choice, call.problem.num_heads, history.momentum)
    outcome = _checked(call, outcome, choice, entry, [])
    return with_earlier(outcome, *arrived, "exact from the next step on")


def _is_capturing(call: Call) -> bool:
    """Return whether a CUDA graph records the call."""
    return call.problem.device_type == "cuda" and torch.cuda.is_current_stream_capturing()


def _again(call: Call, choice: Choice, history: History) -> Outcome:
    """Return the outcome of a recomputed forward pass: what it was the first time."""
    sums = _sums(call) if call.problem.may_wait else []
    decision = history.recalled(_mark(call, sums, choice.layer)) or choice.exact
    if decision is None:
        decision = decide_approximately(call, choice, history)
    outcome = run_decision(call, decision, choice.policy, choice.backend)
    return _checked(call, outcome, choice, None, sums)


def _measured(
    call: Call, choice: Choice, place: Place, wanted: tuple[Variant, ...], *, strict: bool
) -> tuple[TensorStats | None, str]:
    """Return numbers measured on this call; None where they arrive later, or cannot be had and why.

    Input that is not finite is an error for a caller of the function. Modules and models compute
    it exactly: training skips such steps itself, and one rank that raised would hang the others.
    """
    if not call.problem.may_wait:
        later = measure_later(
            call.tensors,
            call.problem,
            wanted,
            choice.policy,
            allowed=place.able,
            budgets=_budgets(choice, place),
        )
        place.entry.arriving.append(later)
        return None, ""
    try:
        return _stats_now(call, choice, place, wanted), ""
    except NonFiniteError as error:
        if strict or choice.backend != "auto":
            raise
        return None, f"{_NOT_FINITE}: {error}"


def _stats_now(
    call: Call, choice: Choice, place: Place, wanted: tuple[Variant, ...]
) -> TensorStats:
    """Return numbers measured on this call; the host waits for them."""
    problem, policy = call.problem, choice.policy
    magnitude = check_finite(call.tensors)
    if magnitude > FP16_SAFE:
        wanted = tuple(variant for variant in wanted if variant[1] is not Precision.FP16)
    return measure(
        call.tensors,
        problem,
        wanted,
        max(policy.audit_rows, 1),
        max_magnitude=magnitude,
        policy=policy,
        allowed=place.able,
        budgets=_budgets(choice, place),
    )


def _budgets(choice: Choice, place: Place) -> tuple[float, ...]:
    """Return the budgets that errors are held against; () for an approximation asked for."""
    if choice.is_forced:
        return ()
    return head_budgets(choice.policy, place.problem.num_heads, choice.layer)


def _decided(choice: Choice, place: Place, entry: Entry) -> Decision:
    """Return the decision by an entry's numbers; the last one, where nothing has changed."""
    dropped = place.ledger.dropped
    made_from = (id(entry.stats), entry.stats, entry.variants, dropped)
    if entry.decided is not None and entry.decided[0] == made_from:
        return entry.decided[1]
    try:
        decision = decide(
            place.problem,
            entry.stats,
            place.facts,
            choice.policy,
            choice.allowed,
            layer=choice.layer,
            forced=choice.is_forced,
            variants=entry.variants,
            dropped=dropped,
        )
    except PlanError as error:
        if choice.backend == "auto":
            raise
        raise UnsupportedError(f"backend {choice.backend!r}", error.trace) from error
    entry.decided = (made_from, decision)
    return decision


def _checked(
    call: Call, outcome: Outcome, choice: Choice, entry: Entry | None, sums: list[float]
) -> Outcome:
    """Return the outcome, audited and repaired now, or with an audit that will arrive later.

    Without an entry, as where a forward pass is run again, nothing arrives later.
    """
    policy, problem = choice.policy, call.problem
    assert outcome.decision is not None
    if policy.audit_rows == 0 or not is_lossy(outcome.decision.plan, problem):
        return outcome
    if problem.may_wait:
        return audited(
            call,
            outcome,
            head_budgets(policy, problem.num_heads, choice.layer),
            policy.audit_rows,
            seed=_seed(sums),
            memory_budget_bytes=policy.memory_budget_bytes,
            backend=choice.backend,
        )
    if entry is not None and entry.calls % AUDIT_EVERY == 0:
        entry.arriving.append(audited_later(call, outcome, policy.audit_rows, entry.calls))
    return outcome


def _take_in(
    entry: Entry, choice: Choice, num_heads: int, momentum: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Take in what has arrived: measurements, and audits whose heads are exact from now on.

    Returns:
        The largest errors by head that audits found, () if none has arrived, and the budgets.
    """
    errors: tuple[float, ...] = ()
    budgets = head_budgets(choice.policy, num_heads, choice.layer)
    while entry.arriving and entry.arriving[0].is_here():
        found = entry.arriving.popleft().value()
        if isinstance(found, TensorStats):
            if found.max_magnitude < float("inf"):
                entry.learn(found, momentum)
            continue
        pairs = zip(errors or found, found, strict=True)
        errors = tuple(a if a != a or b <= a else b for a, b in pairs)  # NaN stays
        entry.bar(over_budget(found, budgets), for_good=True)
    return errors, budgets


def _lossy_variants(decision: Decision, own: Precision) -> frozenset[Variant]:
    """Return the variants of a plan that lose something."""
    variants = {group.variant for group in decision.plan.groups}
    return frozenset(variants - {(Method.EXACT, own)})


def _seed(sums: list[float]) -> int:
    """Return a seed above 0 for the audited rows: other numbers in q, k or v give other rows."""
    return 1 + zlib.crc32(repr(sums).encode()) % 65536


def _sums(call: Call) -> list[float]:
    """Return one number for each tensor, into which every element goes."""
    items = (call.tensors.query, call.tensors.key, call.tensors.value)
    sums = [item.detach().sum(dtype=torch.float64) for item in items]
    found: list[float] = torch.stack(sums).tolist()
    return found


def _mark(call: Call, sums: list[float], layer: int) -> tuple[object, ...]:
    """Return what a recomputed call knows its forward pass by: its problem and its numbers."""
    return (replace(call.problem.without_layout(), requires_grad=False), layer, *sums)
