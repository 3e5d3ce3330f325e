"""Every way of computing a problem that the capabilities and the policy give rise to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from adaattn.planning.cost import estimate
from adaattn.planning.evidence import interpolated
from adaattn.planning.precision import (
    PrecisionChoice,
    choose_precisions,
    lower_precisions,
)
from adaattn.planning.support import reasons
from adaattn.spec import (
    METHODS,
    AttentionProblem,
    Capability,
    Cost,
    HardwareFacts,
    HeadGroup,
    Launch,
    Measured,
    Method,
    Policy,
    Precision,
    Scheme,
    TensorStats,
    Variant,
    Why,
)
from adaattn.spec.evidence import problem_class

__all__ = [
    "ENTER_ERROR",
    "Candidate",
    "enumerate_candidates",
    "with_stats",
]

ENTER_ERROR: Final = 0.8
"""Share of its budget below which an error must be before a head takes a new way.

Errors are estimated on a few rows and drift during training; a head whose error lies at its
budget would change its way at every measurement. It leaves a way only above the budget itself.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One way of computing all heads, and what stands against it.

    Args:
        group: what would run.
        capability: which executor.
        cost: for all heads; None when refused before that mattered.
        head_costs_ms: time of each head when heads differ (sparse densities), else ().
        errors: estimated error of each head; () when it is exact.
        budgets: what each head may lose; () when it is exact.
        densities: kept share of blocks of each head, else ().
        refusal: why it cannot be used at all; "" if it can.
        why: the same for programs.
        num_reasons: how many things stand against it.
        measured: what it takes by measured times; None where nobody measured.
        source: where those times are from.
    """

    group: HeadGroup
    capability: Capability
    cost: Cost | None = None
    head_costs_ms: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
    budgets: tuple[float, ...] = ()
    densities: tuple[float, ...] = ()
    refusal: str = ""
    why: Why = Why.CHOSEN
    num_reasons: int = 1
    measured: Measured | None = None
    source: str = ""
    own_scheme: Scheme = field(default_factory=Scheme)
    num_heads: int = 1

    @property
    def name(self) -> str:
        """The label shown in traces."""
        return self.group.label

    @property
    def is_exact(self) -> bool:
        """True when neither the method nor the arithmetic loses anything."""
        return self.group.method.kind is Method.EXACT and self.group.scheme == self.own_scheme

    @property
    def time_ms(self) -> float:
        """Predicted time of all heads; infinite when it was not estimated."""
        return self.cost.time_ms if self.cost else float("inf")

    @property
    def workspace_bytes(self) -> int:
        """Predicted workspace of all heads."""
        return self.cost.workspace_bytes if self.cost else 0

    def head_ms(self, head: int) -> float:
        """Return the predicted time of one head."""
        if self.head_costs_ms:
            return self.head_costs_ms[head]
        return self.time_ms / max(self.num_heads, 1)

    def density(self, head: int) -> float:
        """Return the kept share of blocks of one head."""
        return self.densities[head] if self.densities else 1.0

    def allows(self, head: int) -> bool:
        """Return whether a head's estimated error is within its budget; a budget of 0 is exact."""
        return not self.errors or 0.0 < self.budgets[head] >= self.errors[head]

    @property
    def variant(self) -> Variant:
        """How it computes."""
        return self.group.variant

    def refused(self, refusal: str, why: Why) -> "Candidate":
        """Return the candidate with what stands against it, in words and for programs."""
        return replace(self, refusal=refusal, why=why)

    def may_serve(self, head: int, variants: tuple[Variant, ...]) -> bool:
        """Return whether a head may be computed so, given how each was before; () is the first."""
        if not self.allows(head):
            return False
        if not variants or not self.errors or self.variant == variants[head]:
            return True
        return self.errors[head] <= ENTER_ERROR * self.budgets[head]


@lru_cache(maxsize=512)
def enumerate_candidates(
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
    capabilities: tuple[Capability, ...],
) -> tuple[Candidate, ...]:
    """Return every candidate once, costed at its best, refused where facts forbid it.

    A capability that cannot serve the problem at all appears once, with all its reasons,
    whatever its precisions and parameters.
    """
    found: list[Candidate] = []
    lower = lower_precisions(problem, hardware, policy)
    for capability in capabilities:
        own = _own_group(capability, problem, policy)
        methods = capability.methods_for(problem, policy)
        variants = [replace(own, method=method) for method in methods]
        against = reasons(capability, problem, hardware)
        refusal, why = "; ".join(against), Why.UNSUPPORTED
        if capability.unavailable or problem.device_type not in capability.device_types:
            why = Why.ELSEWHERE
        if not refusal and capability.method not in policy.methods:
            refusal, why = f"policy {policy.name!r} does not use this method", Why.POLICY
        if not refusal and not variants:
            dims = f"D {problem.head_dim}, Dv {problem.value_dim}"
            refusal = f"expected head dimensions and ranks for which it gains something, got {dims}"
        precisions = [] if refusal else [problem.precision]
        if refusal:
            refused = _candidate(own, capability, problem, refusal, why)
            found.append(replace(refused, num_reasons=max(len(against), 1)))
        if capability.method in policy.methods:
            precisions += _precisions_below(capability, lower, problem, hardware)
        for group in variants:
            for precision in precisions:
                variant = replace(group, scheme=Scheme.of(precision))
                found.append(_costed(variant, capability, problem, hardware, policy))
    return (*found, *_untried_precisions(lower, found, problem))


def _precisions_below(
    capability: Capability,
    lower: Sequence[PrecisionChoice],
    problem: AttentionProblem,
    hardware: HardwareFacts,
) -> list[Precision]:
    """Return the lower formats to try with a capability, the most accurate first.

    Some executors take those alone. One that materialises scores is not tried in them: it is
    the slow way already.
    """
    if capability.materialises_scores:
        return []
    usable = [
        item.precision
        for item in lower
        if not item.refusal
        and not reasons(capability, replace(problem, precision=item.precision), hardware)
    ]
    return sorted(usable, key=lambda precision: precision.unit_roundoff)


def _untried_precisions(
    lower: Sequence[PrecisionChoice], found: Sequence[Candidate], problem: AttentionProblem
) -> list[Candidate]:
    """Return one refused entry for each lower format that no candidate computes in."""
    tried = {item.group.scheme.inputs for item in found}
    nobody = Capability(name="any executor", backend="")
    return [
        _candidate(
            HeadGroup(capability=nobody.name, scheme=Scheme.of(choice.precision)),
            nobody,
            problem,
            choice.refusal or "no executor that can serve this call takes it and gains",
            Why.POLICY,
        )
        for choice in lower
        if choice.precision not in tried
    ]


def with_stats(
    candidates: Sequence[Candidate],
    problem: AttentionProblem,
    stats: TensorStats,
    hardware: HardwareFacts,
    policy: Policy,
    budgets: tuple[float, ...],
    why_unmeasured: Callable[[Candidate], tuple[str, Why]],
) -> list[Candidate]:
    """Return the candidates judged by measured numbers: errors, densities, head costs.

    Args:
        candidates: each once.
        problem: as for `adaattn.planning.decide`.
        stats: likewise.
        hardware: likewise.
        policy: likewise.
        budgets: of each head.
        why_unmeasured: why there are no numbers of one, where no executor says that.
    """
    choices = {item.precision: item for item in choose_precisions(problem, stats, hardware, policy)}
    judged = []
    for item in candidates:
        if item.refusal or item.is_exact:
            judged.append(item)
            continue
        choice = choices[item.group.scheme.inputs]
        if choice.refusal:
            judged.append(item.refused(choice.refusal, Why.UNMEASURED))
        elif not choice.is_measured:
            judged.append(item.refused(*why_unmeasured(item)))
        else:
            errors = choice.errors
            judged.append(_judge(item, problem, stats, hardware, errors, budgets, why_unmeasured))
    return judged


def _judge(
    item: Candidate,
    problem: AttentionProblem,
    stats: TensorStats,
    hardware: HardwareFacts,
    precision_errors: tuple[float, ...],
    budgets: tuple[float, ...],
    why_unmeasured: Callable[[Candidate], tuple[str, Why]],
) -> Candidate:
    """Return an approximate candidate with its measured errors, refused if no head may use it."""
    method = item.group.method
    errors: tuple[float, ...] = (0.0,) * problem.num_heads
    densities: tuple[float, ...] = ()
    if method.kind is not Method.EXACT:
        found = stats.errors_of(item.capability.name, method)
        if found is None or not found.errors:
            said = item.capability.why_unmeasured(problem, stats, method, budgets)
            return item.refused(*((said, Why.UNMEASURED) if said else why_unmeasured(item)))
        errors, densities = found.errors, found.densities
    if precision_errors:
        errors = tuple(a + b for a, b in zip(errors, precision_errors, strict=True))
    head_costs: tuple[float, ...] = ()
    if densities:
        heads = problem.num_heads
        known = {
            density: estimate(
                problem, item.capability, item.group, hardware, density=density
            ).time_ms
            for density in set(densities)
        }
        head_costs = tuple(known[density] / heads for density in densities)
    judged = replace(
        item, errors=errors, budgets=budgets, densities=densities, head_costs_ms=head_costs
    )
    if any(judged.allows(head) for head in range(problem.num_heads)):
        return judged
    if max(budgets) == 0.0:
        refusal = "it approximates, and the error budget is 0"
        return judged.refused(refusal, Why.POLICY)
    low, high = min(errors), max(errors)
    span = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g} over heads"
    refusal = f"expected an error of at most {max(budgets):g}, got {span}"
    return judged.refused(refusal, Why.OVER_BUDGET)


def _own_group(capability: Capability, problem: AttentionProblem, policy: Policy) -> HeadGroup:
    """Return the group that computes in the input's own precision."""
    return HeadGroup(
        capability=capability.name,
        method=METHODS[capability.method](),
        scheme=Scheme.of(problem.precision),
        launch=Launch(chunk_rows=capability.chunk_rows(problem, policy.memory_budget_bytes)),
    )


def _candidate(
    group: HeadGroup,
    capability: Capability,
    problem: AttentionProblem,
    refusal: str = "",
    why: Why = Why.CHOSEN,
) -> Candidate:
    """Return a candidate that was never costed."""
    return Candidate(
        group=group,
        capability=capability,
        refusal=refusal,
        why=why,
        own_scheme=Scheme.of(problem.precision),
        num_heads=problem.num_heads,
    )


def _costed(
    group: HeadGroup,
    capability: Capability,
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
) -> Candidate:
    """Return a candidate with its cost at best, refused if it needs too much memory."""
    cost = estimate(problem, capability, group, hardware, density=capability.best_density)
    item = replace(_candidate(group, capability, problem), cost=cost)
    if item.is_exact and hardware.timings is not None:
        found = interpolated(hardware.timings, problem, capability.name)
        if found is not None:
            measured, known, source = found
            borrowed = f", of {known}" if known != problem_class(problem) else ""
            item = replace(item, measured=measured, source=source + borrowed)
    limit = policy.memory_budget_bytes
    if limit is None:
        limit = hardware.memory_bytes or cost.workspace_bytes
    if cost.workspace_bytes <= limit:
        return item
    refusal = f"expected at most {_size(limit)} of workspace, got {_size(cost.workspace_bytes)}"
    return item.refused(refusal, Why.MEMORY)


def _size(count: float) -> str:
    """Return bytes in the largest unit that leaves a number of at least 1."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:g} byte" if count == 1 else f"{count:g} bytes"
