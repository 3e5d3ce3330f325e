"""The decision: problem, statistics, hardware, policy and capabilities to a plan and its trace.

What runs exactly is PyTorch's choice unless a measured time says better. What approximates is
taken up by prediction and sampled errors, and stays only if the clock agrees: `dropped` holds
the ways that it did not.
"""

import math
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
from adaattn.planning.evidence import DISPLACES, DISPLACES_ON_A_CPU, fastest, ratio
from adaattn.planning.order import behind, default_of, first_in_order, incumbent_of
from adaattn.planning.simplify import simplify
from adaattn.planning.trace import seems_faster, trace_of, when_compiled
from adaattn.planning.unmeasured import could_pay, rivals_of, why_unchecked, why_unmeasured
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Cost,
    Decision,
    HardwareFacts,
    Method,
    Plan,
    Policy,
    TensorStats,
    Variant,
    Why,
)

__all__ = ["MARGIN", "decide", "head_budgets", "measuring_cost_ms", "worth_measuring"]

_FORMAT_COST: Final = 2
"""What measuring number formats costs, in computations of the sampled rows.

Two CPU cores, 9 heads of D 64, 2048 keys (2026-11): 5 ms for the rows, 8 more for one format, 18
for ranks with their spectra (5 by `Capability.sampling_cost`), 31 for block selection at three
masses (8); the exact kernel takes 28 ms.
"""

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
    variants: tuple[Variant, ...] = (),
    dropped: frozenset[Variant] = frozenset(),
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
        variants: how the caller's last such call computed each head; () is the first.
        dropped: variants that were measured to take longer than exact attention.

    Raises:
        PlanError: nothing can serve the problem within the memory budget.
    """
    problem = simplify(problem)
    candidates = enumerate_candidates(problem, hardware, policy, capabilities)
    ranked = _best_exact(candidates, problem, hardware)
    exact = ranked[0] if ranked else None
    if exact is None and not (forced and stats is not None):
        raise PlanError(
            f"no executor can serve this call under policy {policy.name!r}; "
            "raise the memory budget, or drop the feature that no executor has",
            [f"{item.name}: {item.refusal or _NOT_EXACT}" for item in candidates],
        )
    budgets = head_budgets(policy, problem.num_heads, layer)
    if stats is None:
        assert exact is not None
        return _exact_decision(problem, ranked, candidates, hardware, policy, budgets)
    left = _without(candidates, dropped)
    given = problem, hardware, policy
    rivals = {} if forced or exact is None else rivals_of(left, exact, *given)
    judged = with_stats(
        *(left, problem, stats, hardware, policy, budgets),
        lambda item: why_unmeasured(item, rivals.get(item.group), *given, budgets),
    )
    if forced or exact is None:
        variants = ()  # there is nothing to stay with
    judged = with_inertia(judged, variants)
    chosen = assign_heads(judged, exact, problem.num_heads, variants)
    groups = group_heads(chosen)
    cost = mixed_cost(groups, judged, problem, hardware)
    if exact is not None and _mixes_in_vain(chosen, exact, cost, policy, variants):
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
    )
    return Decision(
        plan=plan,
        trace=trace_of(judged, chosen, exact, _why_exact(exact, problem, judged), variants),
        policy=policy.name,
        cost=cost,
        exact_cost=exact.cost if exact else None,
    )


def _without(judged: Sequence[Candidate], dropped: frozenset[Variant]) -> list[Candidate]:
    """Return the candidates, those refused that the clock has found slower than exact attention."""
    why = "it was tried, and took longer than exact attention"
    return [
        replace(item, refusal=why, why=Why.SLOWER)
        if item.variant in dropped and not (item.refusal or item.is_exact)
        else item
        for item in judged
    ]


def _mixes_in_vain(
    chosen: Sequence[Candidate],
    exact: Candidate,
    cost: Cost,
    policy: Policy,
    variants: tuple[Variant, ...],
) -> bool:
    """Return whether heads shared out gain too little, or need too much memory."""
    if len({id(item) for item in chosen}) == 1:
        return False
    limit = policy.memory_budget_bytes
    stays = variants == tuple(item.variant for item in chosen)
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
    dropped: frozenset[Variant] = frozenset(),
) -> tuple[Variant, ...]:
    """Return the (method, precision) pairs that could beat the exact path at their very best.

    At best means: the smallest rank and the lowest density have no error, and measuring costs
    nothing, since many calls share it. A lower format that will surely hold the budget raises
    the bar for the rest. Empty when nothing is worth a look, so that nothing is measured. This
    prunes; whether anything pays is for the clock to say.

    Args:
        problem: as for `decide`.
        hardware: likewise.
        policy: likewise.
        capabilities: likewise.
        forced: likewise.
        dropped: as for `decide`.
    """
    if not policy.allows_loss:
        return ()
    problem = simplify(problem)
    candidates = enumerate_candidates(problem, hardware, policy, capabilities)
    if forced:
        usable = [item for item in candidates if not item.refusal]
        return tuple(sorted({item.variant for item in usable}))
    ranked = _best_exact(candidates, problem, hardware)
    if not ranked or why_unchecked(problem, policy):
        return ()
    given = problem, hardware, policy
    left = _without(candidates, dropped)
    rivals = rivals_of(left, ranked[0], *given)
    usable = [item for item in left if item.group in rivals]
    pays = [it.variant for it in usable if could_pay(it, rivals[it.group], *given)]
    return tuple(sorted(set(pays)))


def measuring_cost_ms(
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
    capabilities: tuple[Capability, ...],
    wanted: Sequence[Variant],
) -> float:
    """Return what measuring some variants on one call should cost.

    Args:
        problem: as for `decide`.
        hardware: likewise.
        policy: says how many rows are sampled.
        capabilities: those that can serve the problem.
        wanted: from `worth_measuring`.
    """
    methods = {method for method, _ in wanted}
    computations = _FORMAT_COST * any(method is Method.EXACT for method in methods)
    computations += sum(
        item.sampling_cost
        for item in capabilities
        if item.method in methods and item.method is not Method.EXACT
    )
    return measuring_ms(problem, hardware, policy.audit_rows, computations)


def head_budgets(policy: Policy, num_heads: int, layer: int) -> tuple[float, ...]:
    """Return each head's error budget: the calibrated one, else the policy's."""
    budgets = [policy.error_budget] * num_heads
    for entry_layer, head, budget in policy.head_budgets:
        if entry_layer == layer and 0 <= head < num_heads:
            budgets[head] = budget
    return tuple(budgets)


def _best_exact(
    candidates: Sequence[Candidate], problem: AttentionProblem, hardware: HardwareFacts
) -> tuple[Candidate, ...]:
    """Return (what to run, what to run until then); () where no executor can serve.

    The incumbent is what PyTorch would run, else what its user would write. Only a measured
    time displaces it. The second is there where the first has to be compiled for longer than it:
    until calls have lost as much as that costs.
    """
    if problem.batch_invariant:
        return first_in_order(candidates, problem)
    usable = [item for item in candidates if item.is_exact and not item.refusal]
    if not usable:
        return ()
    by_name = {item.group.capability: item for item in usable}
    incumbent = incumbent_of(usable, problem)
    if hardware.timings is None:
        return (incumbent,)
    own, writes_scores = incumbent.group.capability, not incumbent.capability.is_fused
    shares = {
        name: ratio(
            hardware.timings,
            problem,
            name,
            own,
            by_stand_in=writes_scores and item.capability.is_one_kernel,
            splits_keys=item.capability.splits_keys,
        )
        for name, item in by_name.items()
        if name != own
    }
    below = DISPLACES_ON_A_CPU if problem.device_type == "cpu" else DISPLACES
    faster = {name: share for name, share in shares.items() if share and share < below}
    ready = {name: share for name, share in faster.items() if not _compile_ms(by_name[name])}
    now = by_name[fastest(hardware.timings, problem, ready)] if ready else incumbent
    best = by_name[fastest(hardware.timings, problem, faster)] if faster else incumbent
    return (best,) if best is now or not _calls_before(best, now) else (best, now)


def _why_exact(
    exact: Candidate | None, problem: AttentionProblem, candidates: Sequence[Candidate]
) -> str:
    """Return why an exact candidate was preferred to the other exact ones."""
    if exact is None:
        return ""
    if problem.batch_invariant:
        return "the first in a fixed order whose results do not depend on the batch"
    if exact.group.capability == default_of(problem):
        return "what PyTorch would run, and nothing exact is surely faster"
    rivals = [item for item in candidates if item.is_exact and not item.refusal]
    if exact.measured is None or any(seems_faster(item, exact) for item in rivals):
        return "the usual way where SDPA cannot serve, serves by math, or was not asked"
    return "by measurement the fastest that loses nothing"


def _compile_ms(item: Candidate) -> float:
    """Return what compiling a candidate costs, by measurement."""
    return item.measured.compile_ms if item.measured else 0.0


def _calls_before(best: Candidate, meanwhile: Candidate) -> int:
    """Return after how many calls the loss reaches the price of compiling."""
    if best.measured is None or meanwhile.measured is None:
        return 0
    price = best.measured.compile_ms
    if meanwhile.capability.compiles:  # it would be compiled first, and then the other
        price -= meanwhile.measured.compile_ms
    # Times of the two may come from different cells; their ratio in the same ones was below this.
    least = (1.0 - DISPLACES) * meanwhile.measured.wall_ms
    gain = max(meanwhile.measured.wall_ms - best.measured.wall_ms, least)
    return math.ceil(max(price, 0.0) / max(gain, 1e-6))


def _exact_decision(
    problem: AttentionProblem,
    ranked: tuple[Candidate, ...],
    candidates: Sequence[Candidate],
    hardware: HardwareFacts,
    policy: Policy,
    budgets: tuple[float, ...],
) -> Decision:
    """Return the decision made without statistics."""
    exact, given = ranked[-1], (problem, hardware, policy)
    rivals = rivals_of(candidates, ranked[0], *given)
    judged = [
        item
        if item.is_exact or item.refusal
        else item.refused(*why_unmeasured(item, rivals.get(item.group), *given, budgets))
        for item in candidates
    ]
    if problem.batch_invariant:
        judged = behind(judged, exact)
    later, calls = None, 0
    if len(ranked) > 1:
        later, calls = _plan_of(ranked[0], problem, policy), _calls_before(*ranked)
        wait = when_compiled(ranked[0], calls, _compile_ms(ranked[0]))
        judged = [
            replace(item, refusal=wait, why=Why.WAITING) if item.group == ranked[0].group else item
            for item in judged
        ]
    return Decision(
        plan=_plan_of(exact, problem, policy),
        trace=trace_of(
            *(judged, [exact] * max(problem.num_heads, 1), exact),
            _why_exact(exact, problem, judged),
        ),
        policy=policy.name,
        later=later,
        calls_before=calls,
        cost=exact.cost,
        exact_cost=exact.cost,
    )


def _plan_of(item: Candidate, problem: AttentionProblem, policy: Policy) -> Plan:
    """Return the plan that computes every head in one exact way."""
    return Plan(groups=(item.group,), num_heads=problem.num_heads, error_budget=policy.error_budget)
