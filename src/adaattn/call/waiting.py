"""Calls that take the slower way while a faster one is not compiled yet.

Each adds its loss, as a share of what compiling takes. Calls that wait for one executor whose
kernels serve many problems add to one sum: layers of a model wait for the same kernel.
"""

from dataclasses import dataclass, field
from typing import Final

from adaattn.backends import capability_named, is_ready
from adaattn.backends.compiled_before import num_noted
from adaattn.spec import AttentionProblem, Decision, HeadGroup

__all__ = ["Wait"]

_LOST: Final[dict[str, float]] = {}
"""What calls have lost while they waited for an executor."""

_ALL: Final = 1.0 - 1e-9


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """One kind of calls that waits.

    Args:
        problem: of the calls.
        group: what they wait for.
        share: of what compiling takes, that each of them loses.
        lost: where losses add up, by executor.
        seen: how many kernels had been noted as compiled when it last looked.
    """

    problem: AttentionProblem
    group: HeadGroup
    share: float
    lost: dict[str, float]
    seen: int = field(default_factory=num_noted)

    @classmethod
    def of(cls, problem: AttentionProblem, decision: Decision) -> "Wait | None":
        """Return what calls of a decision wait for; None where nothing, or where it is there."""
        if decision.later is None:
            return None
        group = decision.later.groups[0]
        if decision.calls_before == 0 or is_ready(problem, group):
            return None
        lost = _LOST if capability_named(group.capability).compile_ms else {}
        share = 1.0 / decision.calls_before
        return cls(problem=problem, group=group, share=share, lost=lost)

    def is_over(self) -> bool:
        """Return whether compiling is paid for, or was done elsewhere; if not, a call is lost."""
        name = self.group.capability
        lost = self.lost.get(name, 0.0)
        self.lost[name] = 0.0 if lost >= _ALL else lost + self.share
        if lost >= _ALL:
            return True
        if self.seen == num_noted():
            return False
        self.seen = num_noted()
        return is_ready(self.problem, self.group)
