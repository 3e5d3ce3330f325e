"""What became of each candidate, in words."""

from collections.abc import Sequence

from adaattn.planning.candidates import Candidate
from adaattn.spec import TraceEntry, Way

__all__ = ["format_ms", "trace_of"]


def trace_of(
    judged: Sequence[Candidate],
    chosen: Sequence[Candidate],
    exact: Candidate | None,
    ways: tuple[Way, ...] = (),
) -> tuple[TraceEntry, ...]:
    """Return one entry for each candidate, in the order they were tried.

    Args:
        judged: every candidate.
        chosen: the candidate of each head.
        exact: the cheapest candidate that loses nothing.
        ways: how each head was computed the last time.
    """
    usable = [item.time_ms for item in judged if item.is_exact and not item.refusal]
    why = "the fastest that loses nothing"
    if exact is not None and exact.time_ms > min(usable, default=exact.time_ms):
        why = "PyTorch's own choice, and nothing exact is faster by enough"
    return tuple(_entry(item, chosen, exact, why, ways) for item in judged)


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
    why_exact: str,
    ways: tuple[Way, ...],
) -> TraceEntry:
    """Return the entry of one candidate."""
    heads = tuple(head for head, other in enumerate(chosen) if other.group == item.group)
    accepted = bool(heads)
    if accepted:
        reason = _accepted_reason(item, heads, len(chosen), exact, why_exact)
    elif item.refusal:
        reason = item.refusal
    else:
        reason = _slower_reason(item, chosen, ways)
    return TraceEntry(
        candidate=item.name,
        accepted=accepted,
        reason=reason,
        heads=heads if len(heads) < len(chosen) else (),
        cost=item.cost,
        error_estimate=_largest_error(item, heads),
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
    return words + f"; {exact.name} would take {format_ms(exact.time_ms)} for all"


def _heads_ms(item: Candidate, heads: Sequence[int], num_heads: int) -> str:
    """Return the predicted time of the heads it serves."""
    total = sum(item.head_ms(head) for head in heads)
    return format_ms(total) + ("" if len(heads) == num_heads else " for its heads")


def _slower_reason(item: Candidate, chosen: Sequence[Candidate], ways: tuple[Way, ...]) -> str:
    """Return why a usable candidate was not taken, compared on the heads that it may serve."""
    heads = [head for head in range(len(chosen)) if item.may_serve(head, ways)]
    mine = sum(item.head_ms(head) for head in heads)
    theirs = sum(chosen[head].head_ms(head) for head in heads)
    names = " and ".join(dict.fromkeys(chosen[head].name for head in heads))
    word = "slower" if mine > theirs else "not faster by enough"
    if mine == theirs:
        word = "no faster"
    where = "" if len(heads) == len(chosen) else f" for {_named(heads)}"
    return f"{word}{where}: {format_ms(mine)}, {names} {format_ms(theirs)}"


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
