"""Calls that take the slower way while a faster one is not compiled yet.

Each adds its loss, as a share of what compiling takes. Calls that wait for one executor whose
kernels serve many problems add to one sum: layers of a model wait for the same kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from adaattn.backends import capability_named, is_ready
from adaattn.backends.compiled_before import num_noted
from adaattn.call.recomputing import Forwards
from adaattn.spec import AttentionProblem, Decision, HeadGroup

__all__ = ["Wait", "without_waiting"]

_LOST: Final[dict[str, float]] = {}
"""What calls have lost while they waited for an executor."""

_ALL: Final = 1.0 - 1e-9

_AT_ONCE: Final[set[object]] = set()
"""Who asked that nothing waits."""


@contextmanager
def without_waiting() -> Iterator[None]:
    """Compile what calls would wait for at once; in all threads, for backward has its own."""
    asked = object()
    _AT_ONCE.add(asked)
    try:
        yield
    finally:
        _AT_ONCE.discard(asked)


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """One kind of calls that waits.

    Args:
        problem: of the calls.
        group: what they wait for.
        share: of what compiling takes, that each of them loses.
        lost: where losses add up, by executor.
        forwards: while one is pending it goes on waiting, so that it is run again as it was.
        seen: how many kernels had been noted as compiled when it last looked.
    """

    problem: AttentionProblem
    group: HeadGroup
    share: float
    lost: dict[str, float]
    forwards: Forwards
    seen: int = field(default_factory=num_noted)

    @classmethod
    def of(cls, problem: AttentionProblem, decision: Decision, forwards: Forwards) -> "Wait | None":
        """Return what calls of a decision wait for; None where nothing, or where it is there."""
        if decision.later is None:
            return None
        group = decision.later.groups[0]
        if decision.calls_before == 0 or _AT_ONCE or is_ready(problem, group):
            return None
        lost = _LOST if capability_named(group.capability).compile_ms else {}
        share = 1.0 / decision.calls_before
        return cls(problem=problem, group=group, share=share, lost=lost, forwards=forwards)

    def is_over(self) -> bool:
        """Return whether compiling is paid for, or was done elsewhere; if not, a call is lost."""
        name = self.group.capability
        lost = self.lost.get(name, 0.0)
        is_held = self.problem.requires_grad and self.forwards.are_pending()
        is_paid = not is_held and (lost >= _ALL or bool(_AT_ONCE))
        self.lost[name] = 0.0 if is_paid else lost + self.share
        if is_paid or is_held or self.seen == num_noted():
            return is_paid
        self.seen = num_noted()
        return is_ready(self.problem, self.group)
