"""What became of each candidate, in words."""

from collections.abc import Sequence

from adaattn.planning.candidates import Candidate
from adaattn.planning.evidence import DISPLACES
from adaattn.spec import TraceEntry, Variant, Why

__all__ = [
    "format_ms",
    "measured_beside",
    "seems_faster",
    "shown_time",
    "trace_of",
    "when_compiled",
]


def trace_of(
    judged: Sequence[Candidate],
    chosen: Sequence[Candidate],
    exact: Candidate | None,
    why_exact: str,
    variants: tuple[Variant, ...] = (),
) -> tuple[TraceEntry, ...]:
    """Return one entry for each candidate, in the order they were tried.

    Args:
        judged: every candidate.
        chosen: the candidate of each head.
        exact: the candidate that loses nothing and was preferred to the other such ones.
        why_exact: why it was.
        variants: how each head was computed the last time.
    """
    # What is waited for is what the others would have to beat.
    rival = next((item for item in judged if item.is_exact and item.why is Why.WAITING), exact)
    return tuple(_entry(item, chosen, exact, rival, why_exact, variants) for item in judged)


def format_ms(value: float) -> str:
    """Return milliseconds with three significant digits, never as a power of ten.

    Example:
        >>> format_ms(0.01234), format_ms(5678.9)
        ('0.0123 ms', '5679 ms')
    """
    return f"{value:.3g} ms" if value < 999.5 else f"{value:.0f} ms"


def _entry(
    item: Candidate,
    chosen: Sequence[Candidate],
    exact: Candidate | None,
    rival: Candidate | None,
    why_exact: str,
    variants: tuple[Variant, ...],
) -> TraceEntry:
    """Return the entry of one candidate."""
    heads = tuple(head for head, other in enumerate(chosen) if other.group == item.group)
    accepted = bool(heads)
    why = item.why
    if accepted:
        reason = _accepted_reason(item, heads, len(chosen), exact, why_exact)
    elif item.refusal:
        reason = item.refusal
    else:
        reason, why = _slower_reason(item, chosen, exact, rival, variants), Why.SLOWER
    return TraceEntry(
        candidate=item.name,
        accepted=accepted,
        reason=reason,
        why=why,
        num_reasons=item.num_reasons,
        heads=heads if len(heads) < len(chosen) else (),
        cost=item.cost,
        error_estimate=_largest_error(item, heads),
        time_ms=None if item.cost is None else _best_ms(item),
        source="" if item.cost is None else _source(item),
    )


def _largest_error(item: Candidate, heads: Sequence[int]) -> float | None:
    """Return the largest estimated error of the heads that a candidate serves, or of all."""
    if not item.errors:
        return None
    return max(item.errors[head] for head in heads) if heads else max(item.errors)


def _accepted_reason(
    item: Candidate,
    heads: Sequence[int],
    num_heads: int,
    exact: Candidate | None,
    why_exact: str,
) -> str:
    """Return why a candidate was taken."""
    served = "all heads" if len(heads) == num_heads else _named(heads)
    words = f"taken for {served}: {_heads_ms(item, heads, num_heads)}"
    if item.errors:
        worst = max(item.errors[head] for head in heads)
        budget = min(item.budgets[head] for head in heads)
        words += f", estimated error {worst:.2g} of {budget:g} allowed"
    if item.densities:
        kept = sum(item.densities[head] for head in heads) / len(heads)
        words += f", {kept:.0%} of blocks kept"
    if item is exact:
        return f"{words}, {why_exact}"
    if exact is None:
        return words + "; it was asked for by name"
    theirs = format_ms(exact.time_ms) + measured_beside(exact)
    return words + f"; {exact.name} would take {theirs} for all"


def _heads_ms(item: Candidate, heads: Sequence[int], num_heads: int) -> str:
    """Return the time of the heads it serves, and where it is from."""
    if item.measured is not None and len(heads) == num_heads:
        return shown_time(item)
    total = format_ms(sum(item.head_ms(head) for head in heads))
    return f"{total}{'' if len(heads) == num_heads else ' for its heads'} (estimated)"


def shown_time(item: Candidate) -> str:
    """Return the time of all heads, measured if anybody measured it, and its source."""
    return f"{format_ms(_best_ms(item))} ({_source(item)})"


def seems_faster(item: Candidate, other: Candidate) -> bool:
    """Return whether a caller would wait for less by the times that are shown.

    They may be of simpler problems, and of two the device's may be the other's.
    """
    if item.measured is None or other.measured is None:
        return False
    return item.measured.wall_ms < DISPLACES * other.measured.wall_ms


def measured_beside(item: Candidate) -> str:
    """Return what follows an estimated time of all heads: the measured one where there is one."""
    return "" if item.measured is None else f" (estimated), {shown_time(item)}"


def when_compiled(item: Candidate, calls: int, compile_ms: float) -> str:
    """Return from which call on a candidate is taken that has to be compiled first."""
    price = format_ms(compile_ms)
    words = f"taken from call {calls + 1} on, when calls have lost the {price} of compiling it"
    return f"{words}: {shown_time(item)}"


def _best_ms(item: Candidate) -> float:
    """Return the time of all heads, measured if anybody measured it."""
    if item.measured is not None:
        return item.measured.wall_ms
    return sum(item.head_costs_ms) if item.head_costs_ms else item.time_ms


def _source(item: Candidate) -> str:
    """Return where that time is from."""
    if item.measured is None:
        return "estimated"
    return item.source if item.measured.settled else f"{item.source}, not settled"


def _slower_reason(
    item: Candidate,
    chosen: Sequence[Candidate],
    exact: Candidate | None,
    rival: Candidate | None,
    variants: tuple[Variant, ...],
) -> str:
    """Return why a usable candidate was not taken, compared on the heads that it may serve."""
    if item.is_exact and rival is not None and all(other is exact for other in chosen):
        times = f"{shown_time(item)}, {rival.name} {shown_time(rival)}"
        if item.measured is None or rival.measured is None:
            return f"nobody measured that it is faster here: {times}"
        word = "surely faster" if seems_faster(item, rival) else "faster by enough"
        return f"not {word}: {times}"
    heads = [head for head in range(len(chosen)) if item.may_serve(head, variants)]
    mine = sum(item.head_ms(head) for head in heads)
    theirs = sum(chosen[head].head_ms(head) for head in heads)
    names = " and ".join(dict.fromkeys(chosen[head].name for head in heads))
    word = "slower" if mine > theirs else "not faster by enough"
    if mine == theirs:
        word = "no faster"
    if len(heads) < len(chosen):
        return f"{word} for {_named(heads)}: {format_ms(mine)}, {names} {format_ms(theirs)}"
    beside = measured_beside(chosen[0]) if len({id(other) for other in chosen}) == 1 else ""
    mine_shown = f"{format_ms(mine)}{measured_beside(item)}"
    return f"{word}: {mine_shown}, {names} {format_ms(theirs)}{beside}"


def _named(heads: Sequence[int]) -> str:
    """Return head numbers as short spans, such as ``head 5`` or ``heads 0-3, 7``."""
    spans: list[list[int]] = []
    for head in heads:
        if spans and head == spans[-1][-1] + 1:
            spans[-1][1:] = [head]
        else:
            spans.append([head])
    shown = ", ".join("-".join(str(end) for end in span) for span in spans)
    return f"head{'s' if len(heads) > 1 else ''} {shown}"
