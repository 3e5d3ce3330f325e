"""What planning returns: a plan, and the reasons for it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from adaattn.spec.enums import Why
from adaattn.spec.plan import Plan

__all__ = ["Cost", "Decision", "TraceEntry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a candidate needs, from first principles.

    Args:
        flops: floating-point operations of its products.
        bytes_moved: bytes read and written in main memory.
        workspace_bytes: memory beside inputs and output.
        time_ms: roofline time on the given hardware.
    """

    flops: float
    bytes_moved: float
    workspace_bytes: int
    time_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One candidate and what became of it.

    Args:
        candidate: the executor and what it changes.
        accepted: it is in the plan.
        reason: one sentence: expected and got.
        why: the same for programs.
        num_reasons: how many things stand against it.
        heads: query heads that it serves; empty means all when accepted.
        cost: what it would need; None when it was refused before that mattered.
        error_estimate: largest estimated error over the heads that it serves; over all heads
            when it serves none.
        time_ms: of all heads, measured where anybody measured it; None where it has none.
        source: where that number is from: measured here, a table of such a device, estimated.
    """

    candidate: str
    accepted: bool
    reason: str
    why: Why = Why.CHOSEN
    num_reasons: int = 1
    heads: tuple[int, ...] = ()
    cost: Cost | None = None
    error_estimate: float | None = None
    time_ms: float | None = None
    source: str = ""

    @property
    def executor(self) -> str:
        """The executor's name alone."""
        return self.candidate.split("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan and why it is that one.

    Args:
        plan: what to run.
        trace: every candidate once.
        policy: name of the policy that was asked for; ``"given"`` where the caller gave a rank.
        notes: remarks that concern no single candidate.
        unmeasured: why nothing could be measured on this very call, which is exact for that; it is
            among the notes too. "" where that was no hindrance.
        later: the plan that takes over where it has to be compiled first, else None.
        calls_before: how many calls lose by then what compiling costs.
        cost: what the plan needs; None for a plan that was given.
        exact_cost: what the cheapest exact candidate needs; None if there is none.
    """

    plan: Plan
    trace: tuple[TraceEntry, ...] = ()
    policy: str = ""
    notes: tuple[str, ...] = ()
    unmeasured: str = ""
    later: Plan | None = None
    calls_before: int = 0
    cost: Cost | None = None
    exact_cost: Cost | None = None

    @property
    def workspace_bytes(self) -> int:
        """Predicted memory beside inputs and output."""
        return self.cost.workspace_bytes if self.cost else 0

    def __str__(self) -> str:
        """Return the trace in short: what is in the plan, then the others in order of time.

        Candidates of one executor that were refused for one kind of reason share a line, which
        is the fastest one's. What runs on other devices, or is not installed, shares the last.
        `explain` has every candidate.
        """
        here = [entry for entry in self.trace if entry.why is not Why.ELSEWHERE]
        here.sort(key=lambda entry: math.inf if entry.time_ms is None else entry.time_ms)
        lines = _shared(
            here, lambda entry: entry.candidate if entry.accepted else (entry.executor, entry.why)
        )
        elsewhere = dict.fromkeys(e.executor for e in self.trace if e.why is Why.ELSEWHERE)
        if elsewhere:
            lines.append((False, "elsewhere", f"{', '.join(elsewhere)}: {_ELSEWHERE}"))
        return self._text(lines)

    def explain(self) -> str:
        """Return the whole trace as text, the accepted candidates first.

        Candidates of one executor share a line only where they share the very reason.
        """
        return self._text(_shared(self.trace, lambda entry: (entry.executor, entry.reason)))

    def _text(self, lines: Sequence[tuple[bool, str, str]]) -> str:
        """Return lines (accepted, name, reason) below the policy, with the notes."""
        width = max((len(name) for _, name, _ in lines), default=0)
        text = [f"policy {self.policy or 'none'} ({self.plan.shown_budget})"]
        for accepted, name, reason in lines:
            text.append(f"  {'+' if accepted else '-'} {name:<{width}}  {reason}")
        return "\n".join([*text, *(f"  note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain JSON values."""
        return {
            "policy": self.policy,
            "plan": self.plan.to_dict(),
            "trace": [{**asdict(entry), "why": entry.why.value} for entry in self.trace],
            "notes": list(self.notes),
            "unmeasured": self.unmeasured,
            "later": None if self.later is None else self.later.to_dict(),
            "calls_before": self.calls_before,
            "cost": None if self.cost is None else asdict(self.cost),
            "exact_cost": None if self.exact_cost is None else asdict(self.exact_cost),
        }


_ELSEWHERE: Final = "another device, or not installed"


def _shared(
    entries: Sequence[TraceEntry], kind: Callable[[TraceEntry], object]
) -> list[tuple[bool, str, str]]:
    """Return lines (accepted, names, the first one's reason), one for each kind of entry."""
    kinds: dict[object, list[TraceEntry]] = {}
    for entry in sorted(entries, key=lambda entry: not entry.accepted):
        kinds.setdefault((entry.accepted, kind(entry)), []).append(entry)
    return [
        (alike[0].accepted, _counted([entry.candidate for entry in alike]), alike[0].reason)
        for alike in kinds.values()
    ]


def _counted(names: list[str]) -> str:
    """Return the first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
