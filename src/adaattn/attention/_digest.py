"""What statistics keep of one event: a few counts, made once for each decision."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from adaattn._events import AttentionEvent
from adaattn.call.run import why_not_fused
from adaattn.spec import AttentionProblem, Decision, LowRank, Variant

_KEPT: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The countable facts of one decision for one problem.

    Args:
        decision: kept, so that its identity is not reused.
        numbers: what adds up over calls: ``flash_calls``, ``flops_saved``, ...
        kinds: what is counted by name, the name of the statistic first.
        variants: how each head is computed.
        ranks: rank of each head; 0 is full.
        errors: estimated error of each accepted candidate.
    """

    decision: Decision
    numbers: tuple[tuple[str, float], ...]
    kinds: tuple[tuple[str, str, int], ...]
    variants: tuple[Variant, ...]
    ranks: tuple[int, ...]
    errors: tuple[float, ...]


_DIGESTS: Final[dict[tuple[int, AttentionProblem], Digest]] = {}


def digest_of(event: AttentionEvent) -> Digest:
    """Return the digest of an event's decision; computed once for each of the last 256."""
    key = (id(event.decision), event.problem)
    known = _DIGESTS.get(key)
    if known is None:
        if len(_DIGESTS) >= _KEPT:
            _DIGESTS.clear()
        known = _DIGESTS[key] = _made(event)
    return known


def _made(event: AttentionEvent) -> Digest:
    """Return a new digest."""
    decision, problem = event.decision, event.problem
    kinds: Counter[tuple[str, str]] = Counter()
    heads = problem.num_heads
    ranks = [0] * heads
    for group in decision.plan.groups:
        rank = group.method.rank if isinstance(group.method, LowRank) else 0
        for head in group.heads or range(heads):
            ranks[head] = rank
            kinds["heads_by_method", group.method.kind.name.lower()] += 1
            kinds["heads_by_precision", group.scheme.label] += 1
            if rank:
                kinds["heads_by_rank", str(rank)] += 1
        kinds["calls_by_executor", group.capability] += 1
    kinds["calls_by_plan", _plan_text(decision)] += 1
    numbers = {"calls": 1.0}
    reason = _why_not_fused(event)
    if reason is None:
        numbers["approximate_calls"] = 1.0
    elif reason:
        numbers["fallback_calls"] = 1.0
        kinds["fallback_reasons", reason] += 1
    else:
        numbers["flash_calls"] = 1.0
    cost, exact = decision.cost, decision.exact_cost
    if cost is not None:
        exact = exact or cost
        numbers |= {"flops": cost.flops, "bytes_moved": cost.bytes_moved}
        numbers |= {"flops_exact": exact.flops, "bytes_moved_exact": exact.bytes_moved}
    return Digest(
        decision=decision,
        numbers=tuple(numbers.items()),
        kinds=tuple((*key, count) for key, count in kinds.items()),
        variants=decision.plan.variants(problem.precision),
        ranks=tuple(ranks),
        errors=tuple(
            entry.error_estimate
            for entry in decision.trace
            if entry.accepted and entry.error_estimate is not None
        ),
    )


def _plan_text(decision: Decision) -> str:
    """Return who computes which heads, such as ``heads 0,2: low_rank/fp32 rank=16,16``."""
    parts = []
    for group in decision.plan.groups:
        shown = ",".join(str(head) for head in group.heads)
        parts.append(f"heads {shown}: {group.label}" if shown else group.label)
    return "; ".join(parts)


def _why_not_fused(event: AttentionEvent) -> str | None:
    """Return why exact heads were not served by a fused kernel; "" if they were, None if none."""
    reason = why_not_fused(event.decision)
    # An audit sends heads back, and says so last; a step down sends the call.
    stepped = event.fallbacks[: len(event.fallbacks) - bool(event.repaired_heads)]
    return stepped[-1] if reason and stepped else reason
