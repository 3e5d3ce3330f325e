"""The decision: problem, statistics, hardware, policy and capabilities to a plan and its trace."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from adaattn.errors import PlanError
from adaattn.planning.assignment import (
    MARGIN,
    assign_heads,
    group_heads,
    mixed_cost,
    with_inertia,
    without_mixing,
)
from adaattn.planning.candidates import Candidate, enumerate_candidates, with_stats
from adaattn.planning.cost import measuring_ms
from adaattn.planning.precision import UNKNOWN_RATES, rates_are_guessed
from adaattn.planning.simplify import simplify
from adaattn.planning.trace import format_ms, trace_of
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Cost,
    Decision,
    HardwareFacts,
    Method,
    Plan,
    Policy,
    Precision,
    TensorStats,
    Way,
)

__all__ = ["MARGIN", "TIE", "decide", "head_budgets", "worth_measuring"]

TIE: Final = 0.15
"""Predicted times of exact candidates that differ by less are called equal."""

_VARIANTS: Final = {Method.EXACT: 2, Method.LOW_RANK: 5, Method.BLOCK_SPARSE: 8}
"""What measuring a method costs, in computations of the sampled rows.

Two CPU cores, 9 heads of D 64, 2048 keys (2026-11): 5 ms for the rows, 8 more for one format,
18 for ranks with their spectra, 31 for block selection at three masses; the exact kernel takes
28 ms.
"""

DROPOUT_HIDES: Final = "dropout hides errors of this size, so they cannot be checked"

_SAFETY: Final = 4
"""Output errors of a format are taken to stay below this many of its rounding errors."""

_LOSES_NOTHING = "it approximates, and the error budget is 0"
_NOT_EXACT = "it approximates, and no exact one could take over where an audit finds too much"


def decide(
    problem: AttentionProblem,
    stats: TensorStats | None,
    hardware: HardwareFacts,
    policy: Policy,
    capabilities: tuple[Capability, ...],
    *,
    layer: int = -1,
    forced: bool = False,
    ways: tuple[Way, ...] = (),
) -> Decision:
    """Return the cheapest plan that keeps the policy, with every candidate's fate.

    Args:
        problem: what is to be computed.
        stats: numbers measured on the tensors; None decides without (approximations are then
            refused with the reason why nothing was measured).
        hardware: the device.
        policy: what may be lost.
        capabilities: what the executors declare.
        layer: which layer's budgets to take from a calibrated policy.
        forced: the capabilities hold approximations alone, asked for by name: whether they pay
            is not asked, whether they keep the budget is.
        ways: how the caller's last such call computed each head; () is the first.

    Raises:
        PlanError: nothing can serve the problem within the memory budget.
    """
    problem = simplify(problem)
    candidates = enumerate_candidates(problem, hardware, policy, capabilities)
    exact = _cheapest_exact(candidates, problem.sdpa_default, hardware)
    if exact is None and not (forced and stats is not None):
        raise PlanError(
            f"no executor can serve this call under policy {policy.name!r}; "
            "raise the memory budget, or drop the feature that no executor has",
            [f"{item.name}: {item.refusal or _NOT_EXACT}" for item in candidates],
        )
    budgets = head_budgets(policy, problem.num_heads, layer)
    if stats is None:
        assert exact is not None
        return _exact_decision(problem, exact, candidates, hardware, policy)
    judged = with_stats(candidates, problem, stats, hardware, policy, budgets)
    if forced or exact is None:
        ways = ()  # there is nothing to stay with
    judged = with_inertia(judged, ways)
    chosen = assign_heads(judged, exact, problem.num_heads, ways)
    groups = group_heads(chosen)
    cost = mixed_cost(groups, judged, problem, hardware)
    if exact is not None and _mixes_in_vain(chosen, exact, cost, policy, ways):
        judged = without_mixing(judged, exact, cost.time_ms)
        chosen = [exact] * problem.num_heads
        groups = group_heads(chosen)
        assert exact.cost is not None
        cost = exact.cost
    plan = Plan(
        groups=groups,
        num_heads=problem.num_heads,
        error_budget=max(budgets),
        audit_rows=policy.audit_rows,
        estimated_ms=cost.time_ms,
        workspace_bytes=cost.workspace_bytes,
    )
    return Decision(
        plan=plan,
        trace=trace_of(judged, chosen, exact, ways),
        policy=policy.name,
        cost=cost,
        exact_cost=exact.cost if exact else None,
    )


def _mixes_in_vain(
    chosen: Sequence[Candidate],
    exact: Candidate,
    cost: Cost,
    policy: Policy,
    ways: tuple[Way, ...],
) -> bool:
    """Return whether heads shared out gain too little, or need too much memory."""
    if len({id(item) for item in chosen}) == 1:
        return False
    limit = policy.memory_budget_bytes
    stays = ways == tuple((item.group.method, item.group.precision) for item in chosen)
    bar = exact.time_ms * (1.0 if stays else 1 - MARGIN)
    return (limit is not None and cost.workspace_bytes > limit) or cost.time_ms > bar


@lru_cache(maxsize=1024)
def worth_measuring(
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
    capabilities: tuple[Capability, ...],
    *,
    forced: bool = False,
    fp16_safe: bool = True,
    calls_per_measurement: int = 1,
) -> tuple[tuple[Method, Precision], ...]:
    """Return the (method, precision) pairs that could beat the exact path at their very best.

    At best means: the smallest rank and the lowest density have no error. The time of
    measuring counts. A lower format that will surely hold the budget raises the bar for the
    rest. Empty when nothing is worth a look, so that nothing is measured.

    Args:
        problem: as for `decide`.
        hardware: likewise.
        policy: likewise.
        capabilities: likewise.
        forced: likewise.
        fp16_safe: no element of q, k or v is too large for fp16.
        calls_per_measurement: how many calls share its cost; the audit is paid by each.
    """
    if not policy.allows_loss:
        return ()
    problem = simplify(problem)
    candidates = enumerate_candidates(problem, hardware, policy, capabilities)
    if forced:
        usable = [item for item in candidates if not item.refusal]
        return tuple(sorted({(item.group.method, item.group.precision) for item in usable}))
    exact = _cheapest_exact(candidates, problem.sdpa_default, hardware)
    if exact is None:
        return ()
    rows = policy.audit_rows
    if rows == 0 or problem.len_q < 4 * rows or problem.num_sequences or problem.dropout_p:
        return ()
    bar = exact.time_ms
    pays: list[tuple[Method, Precision]] = []
    budgets = (policy.error_budget, *(budget for *_, budget in policy.head_budgets))
    strictest = min(budget for budget in budgets if budget > 0)
    for item in _lower_precisions(candidates):
        if item.group.precision is Precision.FP16 and not fp16_safe:
            continue
        if (
            item.time_ms + _overhead_ms(item, problem, hardware, policy, calls_per_measurement)
            < (1 - MARGIN) * bar
        ):
            pays.append((Method.EXACT, item.group.precision))
            if _SAFETY * item.group.precision.unit_roundoff <= strictest:
                bar = item.time_ms
    for item in candidates:
        if item.refusal or item.group.method is Method.EXACT or rates_are_guessed(hardware):
            continue
        if (
            item.time_ms + _overhead_ms(item, problem, hardware, policy, calls_per_measurement)
            < (1 - MARGIN) * bar
        ):
            pays.append((item.group.method, item.group.precision))
    return tuple(sorted(set(pays)))


def _lower_precisions(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the exact method's candidates in lower formats, the most accurate first."""
    found = [
        item
        for item in candidates
        if not (item.refusal or item.is_exact) and item.group.method is Method.EXACT
    ]
    return sorted(found, key=lambda item: (item.group.precision.unit_roundoff, item.time_ms))


def _overhead_ms(
    item: Candidate,
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
    num_calls: int,
) -> float:
    """Return what measuring a candidate, once in some calls, and auditing it add to a call."""
    variants = _VARIANTS[item.group.method]
    rows = policy.audit_rows
    audit_ms = measuring_ms(problem, hardware, rows, 0)
    return audit_ms + (measuring_ms(problem, hardware, rows, variants) - audit_ms) / num_calls


def head_budgets(policy: Policy, num_heads: int, layer: int) -> tuple[float, ...]:
    """Return each head's error budget: the calibrated one, else the policy's."""
    budgets = [policy.error_budget] * num_heads
    for entry_layer, head, budget in policy.head_budgets:
        if entry_layer == layer and 0 <= head < num_heads:
            budgets[head] = budget
    return tuple(budgets)


def _cheapest_exact(
    candidates: Sequence[Candidate], default: str, hardware: HardwareFacts
) -> Candidate | None:
    """Return the fastest candidate that changes nothing, or None.

    Predictions closer than `TIE` (a third of it where the rates were measured on this very
    CPU) are no reason to leave the kernel that PyTorch would take.
    """
    measured = hardware.device_type == "cpu" and hardware.rates.source == "measured"
    tie = TIE / 3 if measured else TIE
    usable = [item for item in candidates if item.is_exact and not item.refusal]
    best = min(usable, key=lambda item: item.time_ms, default=None)
    for item in usable:
        if best and item.group.capability == default and item.time_ms <= (1 + tie) * best.time_ms:
            return item
    return best


def _exact_decision(
    problem: AttentionProblem,
    exact: Candidate,
    candidates: Sequence[Candidate],
    hardware: HardwareFacts,
    policy: Policy,
) -> Decision:
    """Return the decision made without statistics."""
    why = _why_unmeasured(problem, hardware, policy, exact)
    guessed = rates_are_guessed(hardware) and policy.allows_loss
    judged = [
        item
        if item.is_exact or item.refusal
        else replace(
            item,
            refusal=UNKNOWN_RATES if guessed and item.group.method is not Method.EXACT else why,
        )
        for item in candidates
    ]
    plan = Plan(
        groups=(exact.group,),
        num_heads=problem.num_heads,
        error_budget=policy.error_budget,
        audit_rows=0,
        estimated_ms=exact.time_ms,
        workspace_bytes=exact.workspace_bytes,
    )
    chosen = [exact] * max(problem.num_heads, 1)
    return Decision(
        plan=plan,
        trace=trace_of(judged, chosen, exact),
        policy=policy.name,
        cost=exact.cost,
        exact_cost=exact.cost,
    )


def _why_unmeasured(
    problem: AttentionProblem, hardware: HardwareFacts, policy: Policy, exact: Candidate
) -> str:
    """Return the sentence for approximations that nobody measured."""
    rows = policy.audit_rows
    if not policy.allows_loss:
        return _LOSES_NOTHING
    if rows == 0:
        return "it must be checked on sampled rows, and the policy audits none"
    if problem.dropout_p:
        return DROPOUT_HIDES
    if problem.num_sequences:
        return "errors are not measured on packed sequences yet; call it for each sequence"
    if problem.len_q < 4 * rows:
        return f"checking it takes {rows} sampled rows of at least {4 * rows}, got {problem.len_q}"
    overhead = measuring_ms(problem, hardware, rows, _VARIANTS[Method.EXACT])
    return (
        f"even at its best, with {format_ms(overhead)} of measuring, it would not beat "
        f"{exact.name} at {format_ms(exact.time_ms)}"
    )
