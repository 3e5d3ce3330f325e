"""The decision: problem, statistics, hardware, policy and capabilities to a plan and its trace."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from adaattn.errors import PlanError
from adaattn.planning.candidates import Candidate, enumerate_candidates, with_stats
from adaattn.planning.cost import copied_bytes, estimate, measuring_ms
from adaattn.planning.precision import UNKNOWN_RATES, rates_are_guessed
from adaattn.planning.simplify import simplify
from adaattn.planning.trace import format_ms, trace_of
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Decision,
    HardwareFacts,
    HeadGroup,
    Method,
    Plan,
    Policy,
    Precision,
    TensorStats,
)

__all__ = ["MARGIN", "TIE", "decide", "head_budgets", "worth_measuring"]

MARGIN = 0.05
"""How much faster than a more accurate candidate a less accurate one must be predicted."""

TIE = 0.15
"""Predicted times of exact candidates that differ by less are called equal."""

_VARIANTS: Final = {Method.EXACT: 1, Method.LOW_RANK: 4, Method.BLOCK_SPARSE: 5}
"""How often measuring a method computes the sampled rows again."""

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
    chosen = _assign_heads(judged, exact, problem.num_heads)
    groups = _groups(chosen)
    total_ms, workspace = _mixed_cost(groups, judged, problem, hardware)
    mixed = len({id(item) for item in chosen}) > 1
    limit = policy.memory_budget_bytes
    too_large = limit is not None and workspace > limit
    if exact is not None and mixed and (too_large or total_ms > (1 - MARGIN) * exact.time_ms):
        judged = _without_mixing(judged, exact, total_ms)
        chosen = [exact] * problem.num_heads
        groups = _groups(chosen)
        total_ms, workspace = exact.time_ms, exact.workspace_bytes
    plan = Plan(
        groups=groups,
        num_heads=problem.num_heads,
        error_budget=max(budgets),
        audit_rows=policy.audit_rows,
        estimated_ms=total_ms,
        workspace_bytes=workspace,
    )
    return Decision(plan=plan, trace=trace_of(judged, chosen, exact), policy=policy.name)


@lru_cache(maxsize=1024)
def worth_measuring(
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
    capabilities: tuple[Capability, ...],
    *,
    forced: bool = False,
    fp16_safe: bool = True,
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
    """
    if _allows_no_loss(policy):
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
        if item.time_ms + _overhead_ms(item, problem, hardware, policy) < (1 - MARGIN) * bar:
            pays.append((Method.EXACT, item.group.precision))
            if _SAFETY * item.group.precision.unit_roundoff <= strictest:
                bar = item.time_ms
    for item in candidates:
        if item.refusal or item.group.method is Method.EXACT or rates_are_guessed(hardware):
            continue
        if item.time_ms + _overhead_ms(item, problem, hardware, policy) < (1 - MARGIN) * bar:
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
    item: Candidate, problem: AttentionProblem, hardware: HardwareFacts, policy: Policy
) -> float:
    """Return what measuring a candidate adds to the call."""
    variants = _VARIANTS[item.group.method]
    return measuring_ms(problem, hardware, policy.audit_rows, variants)


def head_budgets(policy: Policy, num_heads: int, layer: int) -> tuple[float, ...]:
    """Return each head's error budget: the calibrated one, else the policy's."""
    budgets = [policy.error_budget] * num_heads
    for entry_layer, head, budget in policy.head_budgets:
        if entry_layer == layer and 0 <= head < num_heads:
            budgets[head] = budget
    return tuple(budgets)


def _allows_no_loss(policy: Policy) -> bool:
    """Return whether every head's budget is 0."""
    return policy.error_budget == 0.0 and not any(budget for *_, budget in policy.head_budgets)


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
    guessed = rates_are_guessed(hardware) and not _allows_no_loss(policy)
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
    return Decision(plan=plan, trace=trace_of(judged, chosen, exact), policy=policy.name)


def _why_unmeasured(
    problem: AttentionProblem, hardware: HardwareFacts, policy: Policy, exact: Candidate
) -> str:
    """Return the sentence for approximations that nobody measured."""
    rows = policy.audit_rows
    if _allows_no_loss(policy):
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


def _assign_heads(
    judged: Sequence[Candidate], exact: Candidate | None, num_heads: int
) -> list[Candidate]:
    """Return the cheapest allowed candidate of each head, the most accurate among equals.

    Raises:
        PlanError: a head has none.
    """
    chosen = []
    ordered = sorted(judged, key=lambda item: max(item.errors, default=0.0))
    for head in range(num_heads):
        best = exact
        bar = exact.head_ms(head) * (1 - MARGIN) if exact else float("inf")
        for item in ordered:
            if item.refusal or item.is_exact or not item.allows(head):
                continue
            if item.head_ms(head) < bar:
                best, bar = item, item.head_ms(head) * (1 - MARGIN)
        if best is None:
            raise PlanError(
                f"head {head} has no approximation within its error budget",
                [f"{item.name}: {item.refusal or 'over budget for some heads'}" for item in judged],
            )
        chosen.append(best)
    return chosen


def _groups(chosen: Sequence[Candidate]) -> tuple[HeadGroup, ...]:
    """Return one group for each candidate in use; a single one serves all heads."""
    if len({id(item) for item in chosen}) == 1:
        return (chosen[0].group,)
    members: dict[int, list[int]] = {}
    by_id = {id(item): item for item in chosen}
    for head, item in enumerate(chosen):
        members.setdefault(id(item), []).append(head)
    return tuple(replace(by_id[key].group, heads=tuple(heads)) for key, heads in members.items())


def _without_mixing(
    judged: Sequence[Candidate], exact: Candidate, mixed_ms: float
) -> list[Candidate]:
    """Return the candidates, those refused that beat the exact path on some heads alone."""
    why = (
        f"faster for some heads, but too little is gained: {format_ms(mixed_ms)} with heads "
        f"shared out, {exact.name} {format_ms(exact.time_ms)} for all"
    )
    heads = range(exact.num_heads)
    return [
        replace(item, refusal=why)
        if not (item.refusal or item.is_exact)
        and any(item.allows(h) and item.head_ms(h) < exact.head_ms(h) for h in heads)
        else item
        for item in judged
    ]


def _mixed_cost(
    groups: Sequence[HeadGroup],
    judged: Sequence[Candidate],
    problem: AttentionProblem,
    hardware: HardwareFacts,
) -> tuple[float, int]:
    """Return (milliseconds, workspace bytes) of the groups run one after another."""
    by_group = {item.group: item for item in judged}
    time_ms, workspace = 0.0, 0
    for group in groups:
        item = by_group[replace(group, heads=())]
        heads = group.heads or tuple(range(problem.num_heads))
        part = problem
        if group.heads:
            kv_heads = len({head // problem.group_size for head in heads})
            whole = len(heads) == kv_heads * problem.group_size
            part = replace(
                problem, num_heads=len(heads), num_kv_heads=kv_heads if whole else len(heads)
            )
        density = sum(item.density(head) for head in heads) / len(heads)
        cost = estimate(part, item.capability, group, hardware, density=density)
        copied = copied_bytes(part) if group.heads else 0
        time_ms += cost.time_ms + 2e3 * copied / max(hardware.rates.bandwidth, 1.0)
        workspace = max(workspace, cost.workspace_bytes + copied)
    return time_ms, workspace
