"""What became of each candidate, in words."""

from collections.abc import Sequence

from adaattn.planning.candidates import Candidate
from adaattn.spec import TraceEntry

__all__ = ["trace_of"]


def trace_of(
    judged: Sequence[Candidate], chosen: Sequence[Candidate], exact: Candidate | None
) -> tuple[TraceEntry, ...]:
    """Return one entry for each candidate, in the order they were tried.

    Args:
        judged: every candidate.
        chosen: the candidate of each head.
        exact: the cheapest candidate that loses nothing.
    """
    return tuple(_entry(item, chosen, exact) for item in judged)


def _entry(item: Candidate, chosen: Sequence[Candidate], exact: Candidate | None) -> TraceEntry:
    """Return the entry of one candidate."""
    heads = tuple(head for head, other in enumerate(chosen) if other.group == item.group)
    accepted = bool(heads)
    if accepted:
        reason = _accepted_reason(item, heads, len(chosen), exact)
    elif item.refusal:
        reason = item.refusal
    else:
        reason = _slower_reason(item, chosen, exact)
    return TraceEntry(
        candidate=item.name,
        accepted=accepted,
        reason=reason,
        heads=heads if len(heads) < len(chosen) else (),
        cost=item.cost,
        error_estimate=max(item.errors) if item.errors else None,
    )


def _accepted_reason(
    item: Candidate, heads: Sequence[int], num_heads: int, exact: Candidate | None
) -> str:
    """Return why a candidate was taken."""
    served = "all heads" if len(heads) == num_heads else f"heads {_spans(heads)}"
    words = f"taken for {served}: {_milliseconds(item, heads, num_heads)}"
    if item.errors:
        worst = max(item.errors[head] for head in heads)
        budget = min(item.budgets[head] for head in heads)
        words += f", estimated error {worst:.2g} of {budget:g} allowed"
    if item.densities:
        kept = sum(item.densities[head] for head in heads) / len(heads)
        words += f", {kept:.0%} of blocks kept"
    if item is exact:
        return words + ", the fastest that loses nothing"
    if exact is None:
        return words + "; it was asked for by name"
    return words + f"; {exact.name} would take {exact.time_ms:.3g} ms for all"


def _milliseconds(item: Candidate, heads: Sequence[int], num_heads: int) -> str:
    """Return the predicted time of the heads it serves."""
    total = sum(item.head_ms(head) for head in heads)
    return f"{total:.3g} ms" if len(heads) == num_heads else f"{total:.3g} ms for its heads"


def _slower_reason(item: Candidate, chosen: Sequence[Candidate], exact: Candidate | None) -> str:
    """Return why a usable candidate was not taken."""
    taken = {other.name: other for other in chosen}
    best = min(taken.values(), key=lambda other: other.time_ms)
    if item.is_exact:
        return f"slower: {item.time_ms:.3g} ms, {best.name} {best.time_ms:.3g} ms"
    allowed = [head for head in range(len(chosen)) if item.allows(head)]
    cost = sum(item.head_ms(head) for head in allowed) / max(len(allowed), 1) * len(chosen)
    return f"slower: {cost:.3g} ms for all heads, {best.name} {best.time_ms:.3g} ms"


def _spans(heads: Sequence[int]) -> str:
    """Return head numbers as short spans, such as ``0-3, 7``."""
    spans: list[list[int]] = []
    for head in heads:
        if spans and head == spans[-1][-1] + 1:
            spans[-1][1:] = [head]
        else:
            spans.append([head])
    return ", ".join("-".join(str(end) for end in span) for span in spans)
