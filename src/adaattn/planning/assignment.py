"""Which head is computed by which candidate, with inertia: heads do not flicker."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from adaattn.errors import PlanError
from adaattn.planning.candidates import ENTER_ERROR, Candidate
from adaattn.planning.cost import copied_bytes, estimate
from adaattn.planning.trace import format_ms, measured_beside
from adaattn.spec import AttentionProblem, Cost, HardwareFacts, HeadGroup, Variant, Why

__all__ = [
    "ENTER_ERROR",
    "MARGIN",
    "assign_heads",
    "group_heads",
    "mixed_cost",
    "with_inertia",
    "without_mixing",
]

MARGIN: Final = 0.05
"""How much faster than a more accurate candidate a less accurate one must be predicted."""


def with_inertia(judged: Sequence[Candidate], variants: tuple[Variant, ...]) -> list[Candidate]:
    """Return the candidates, those refused that are within budget for no head that may change.

    Args:
        judged: candidates with their errors.
        variants: how each head was computed the last time; () is the first time.
    """
    return [
        replace(item, refusal=_held_reason(item, variants), why=Why.OVER_BUDGET)
        if _is_held(item, variants)
        else item
        for item in judged
    ]


def assign_heads(
    judged: Sequence[Candidate],
    exact: Candidate | None,
    num_heads: int,
    variants: tuple[Variant, ...] = (),
) -> list[Candidate]:
    """Return the cheapest allowed candidate of each head, the most accurate among equals.

    A head that was computed by some variant before stays with it while it keeps the budget and is
    not slower; it takes another only with an error clearly below the budget (`ENTER_ERROR`)
    and a clear gain in time (`MARGIN`).

    Raises:
        PlanError: a head has none.
    """
    chosen = []
    ordered = sorted(judged, key=lambda item: max(item.errors, default=0.0))
    for head in range(num_heads):
        best = exact
        bar = exact.head_ms(head) if exact else float("inf")
        mine = variants[head] if variants else None
        for item in sorted(ordered, key=lambda item: item.variant != mine):
            if item.refusal or item.is_exact or not item.may_serve(head, variants):
                continue
            margin = 0.0 if item.variant == mine and best is exact else MARGIN
            if item.head_ms(head) < bar * (1 - margin):
                best, bar = item, item.head_ms(head)
        if best is None:
            raise PlanError(
                f"head {head} has no approximation within its error budget",
                [f"{item.name}: {item.refusal or 'over budget for some heads'}" for item in judged],
            )
        chosen.append(best)
    return chosen


def group_heads(chosen: Sequence[Candidate]) -> tuple[HeadGroup, ...]:
    """Return one group for each candidate in use; a single one serves all heads."""
    if len({id(item) for item in chosen}) == 1:
        return (chosen[0].group,)
    members: dict[int, list[int]] = {}
    by_id = {id(item): item for item in chosen}
    for head, item in enumerate(chosen):
        members.setdefault(id(item), []).append(head)
    return tuple(replace(by_id[key].group, heads=tuple(heads)) for key, heads in members.items())


def without_mixing(
    judged: Sequence[Candidate], exact: Candidate, mixed_ms: float
) -> list[Candidate]:
    """Return the candidates, those refused that beat the exact path on some heads alone."""
    why = (
        f"faster for some heads, but too little is gained: {format_ms(mixed_ms)} with heads "
        f"shared out, {exact.name} {format_ms(exact.time_ms)}{measured_beside(exact)} for all"
    )
    heads = range(exact.num_heads)
    return [
        replace(item, refusal=why, why=Why.SLOWER)
        if not (item.refusal or item.is_exact)
        and any(item.allows(h) and item.head_ms(h) < exact.head_ms(h) for h in heads)
        else item
        for item in judged
    ]


def mixed_cost(
    groups: Sequence[HeadGroup],
    judged: Sequence[Candidate],
    problem: AttentionProblem,
    hardware: HardwareFacts,
) -> Cost:
    """Return what the groups need, run one after another."""
    by_group = {item.group: item for item in judged}
    flops, moved, workspace, time_ms = 0.0, 0.0, 0, 0.0
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
        flops += cost.flops
        moved += cost.bytes_moved + 2 * copied
        time_ms += cost.time_ms + 2e3 * copied / max(hardware.rates.bandwidth, 1.0)
        workspace = max(workspace, cost.workspace_bytes + copied)
    return Cost(flops=flops, bytes_moved=moved, workspace_bytes=workspace, time_ms=time_ms)


def _is_held(item: Candidate, variants: tuple[Variant, ...]) -> bool:
    """Return whether a candidate keeps the budget for some heads, and inertia bars them all."""
    if not variants or item.refusal or not item.errors:
        return False
    heads = range(item.num_heads)
    return any(item.allows(head) for head in heads) and not any(
        item.may_serve(head, variants) for head in heads
    )


def _held_reason(item: Candidate, variants: tuple[Variant, ...]) -> str:
    """Return why a candidate within budget is not taken up."""
    head = min(
        (head for head in range(item.num_heads) if item.allows(head)),
        key=lambda head: item.errors[head],
    )
    return (
        f"error {item.errors[head]:.2g} is within the {item.budgets[head]:g} allowed, but a head "
        f"takes a new way only below {ENTER_ERROR:g} of it"
    )
