"""Which approximations could pay by estimate, and why nobody measured one, as code and words."""

from collections.abc import Sequence
from typing import Final

from adaattn.planning.assignment import MARGIN
from adaattn.planning.candidates import Candidate
from adaattn.planning.cost import measuring_ms
from adaattn.planning.trace import format_ms, measured_beside
from adaattn.spec import AttentionProblem, HardwareFacts, HeadGroup, Method, Policy, Why

__all__ = ["DROPOUT_HIDES", "could_pay", "rivals_of", "why_unchecked", "why_unmeasured"]

DROPOUT_HIDES: Final = "dropout hides errors of this size, so they cannot be checked"

_LOSES_NOTHING: Final = "it approximates, and the error budget is 0"
_MEASURES_THE_BATCH: Final = (
    "its error is measured on the whole batch, which batch_invariant excludes"
)

_SAFETY: Final = 4
"""Output errors of a format are taken to stay below this many of its rounding errors."""


def rivals_of(
    candidates: Sequence[Candidate],
    exact: Candidate,
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
) -> dict[HeadGroup, Candidate]:
    """Return what each usable approximation has to beat by estimate.

    That is the exact way, or a lower format that beats it and will surely hold the budget.

    Args:
        candidates: each way of computing the problem.
        exact: the exact way.
        problem: as for `adaattn.planning.decide`.
        hardware: likewise.
        policy: likewise.
    """
    budgets = (policy.error_budget, *(budget for *_, budget in policy.head_budgets))
    strictest = min((budget for budget in budgets if budget > 0), default=0.0)
    usable = [item for item in candidates if not (item.refusal or item.is_exact)]
    formats = [item for item in usable if item.group.method.kind is Method.EXACT]
    formats.sort(key=lambda item: (item.group.scheme.inputs.unit_roundoff, item.time_ms))
    rival, found = exact, {}
    for item in formats:
        found[item.group] = rival
        holds = _SAFETY * item.group.scheme.inputs.unit_roundoff <= strictest
        if holds and could_pay(item, rival, problem, hardware, policy):
            rival = item
    return {item.group: rival for item in usable} | found


def could_pay(
    item: Candidate,
    rival: Candidate,
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
) -> bool:
    """Return whether an approximation at its best gains by estimate, its check included."""
    check_ms = measuring_ms(problem, hardware, policy.audit_rows, 0)
    return item.time_ms + check_ms < (1 - MARGIN) * rival.time_ms


def why_unchecked(problem: AttentionProblem, policy: Policy) -> str:
    """Return why errors of this problem cannot be seen on sampled rows; "" if they can."""
    rows = policy.audit_rows
    if problem.batch_invariant:
        return _MEASURES_THE_BATCH
    if rows == 0:
        return "it must be checked on sampled rows, and the policy audits none"
    if problem.dropout_p:
        return DROPOUT_HIDES
    if problem.num_sequences:
        return "errors are not measured on packed sequences yet; call it for each sequence"
    if problem.len_q < 4 * rows:
        return (
            f"checked on {rows} rows, it takes {4 * rows} at least; this call has {problem.len_q}"
        )
    return ""


def why_unmeasured(
    item: Candidate,
    rival: Candidate | None,
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
    budgets: tuple[float, ...],
) -> tuple[str, Why]:
    """Return the sentence for an approximation that nobody measured, and the same for programs.

    Args:
        item: the approximation.
        rival: what it has to beat, from `rivals_of`; None where it was asked for by name.
        problem: as for `adaattn.planning.decide`.
        hardware: likewise.
        policy: likewise.
        budgets: of each head.
    """
    if not (problem.batch_invariant or any(budgets)):
        return _LOSES_NOTHING, Why.POLICY
    if reason := why_unchecked(problem, policy):
        return reason, Why.UNMEASURED
    if rival is None:
        return "its error was not measured", Why.UNMEASURED
    check = format_ms(measuring_ms(problem, hardware, policy.audit_rows, 0))
    mine, theirs = format_ms(item.time_ms), format_ms(rival.time_ms) + measured_beside(rival)
    times = f"{mine} at its best and {check} of checking, {rival.name} {theirs}"
    if could_pay(item, rival, problem, hardware, policy):
        return f"it is tried when exact calls have paid for a try: by estimate {times}", Why.WAITING
    return f"no gain by estimate: {times}", Why.SLOWER
