"""Calls that take the slower way while a faster one is not compiled yet.

Each adds its loss, as a share of what compiling takes. Calls that wait for one executor whose
kernels serve many problems add to one sum: layers of a model wait for the same kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from adaattn import hardware
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

_MOST_WAITS: Final = 4096
_WAITS: Final[dict[tuple[AttentionProblem, HeadGroup], "Wait"]] = {}
hardware.on_clear(_WAITS.clear)


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
    """Calls of one problem that wait for one executor; all bound calls of it share this.

    Args:
        problem: of the calls.
        group: what they wait for.
        share: of what compiling takes, that each of them loses.
        lost: where losses add up, by executor.
        forwards: while one is pending, those after it wait on, so that all are run again alike.
        seen: how many kernels had been noted as compiled when it last looked.
        is_done: nothing waits any more.
    """

    problem: AttentionProblem
    group: HeadGroup
    share: float
    lost: dict[str, float]
    forwards: Forwards = field(default_factory=Forwards)
    seen: int = field(default_factory=num_noted)
    is_done: bool = False
    _is_over: bool = False

    @classmethod
    def of(cls, problem: AttentionProblem, decision: Decision) -> "Wait | None":
        """Return what calls of a decision wait for; None where nothing, or where it is there."""
        if decision.later is None or decision.calls_before == 0:
            return None
        group = decision.later.groups[0]
        known = _WAITS.get((problem, group))
        if known is None:
            if _AT_ONCE or is_ready(problem, group):
                return None
            lost = _LOST if capability_named(group.capability).compile_ms else {}
            known = cls(problem=problem, group=group, share=1.0 / decision.calls_before, lost=lost)
            if len(_WAITS) >= _MOST_WAITS:
                _WAITS.clear()
            _WAITS[problem, group] = known
        elif known.is_done:
            return None
        return known

    def goes_on(self) -> bool:
        """Return whether the call that asks waits; if so, it is lost."""
        joins = self.forwards.joins() if self.problem.requires_grad else None
        if not self._is_over:
            self._look()
        if not self.is_done and self._is_over:
            self.is_done = joins is False or not self.forwards.are_pending()
        # A call that nothing runs again need not wait for those that may be.
        return not (self.is_done or (self._is_over and joins is None))

    def _look(self) -> None:
        """See whether compiling is paid for, or was done elsewhere; if not, a call is lost."""
        name = self.group.capability
        lost = self.lost.get(name, 0.0)
        if lost >= _ALL or _AT_ONCE:
            self.lost[name] = 0.0
            self._is_over = True
            return
        self.lost[name] = lost + self.share
        if self.seen != num_noted():
            self.seen = num_noted()
            self._is_over = is_ready(self.problem, self.group)
