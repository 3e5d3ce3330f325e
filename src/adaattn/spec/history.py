"""What a caller learnt from its earlier calls, as planning reads it."""

from dataclasses import dataclass

from adaattn.spec.enums import Method, Precision
from adaattn.spec.facts import AttentionProblem, TensorStats
from adaattn.spec.plan import Decision

__all__ = ["Earlier", "History", "Way"]

Way = tuple[Method, Precision]
"""How a head was computed: by which method, in which number format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What earlier calls of one problem taught.

    Args:
        problem: the calls' static facts.
        stats: numbers measured then, to be used instead of measuring now; None measures.
        ways: how each head was computed the last time. A head stays with its way while that
            keeps the budget, and leaves it only for one that is clearly better.
    """

    problem: AttentionProblem
    stats: TensorStats | None = None
    ways: tuple[Way, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The earlier calls that a caller remembers. Attention modules keep one each.

    Args:
        entries: one for each problem.
        calls_per_measurement: how many calls share the cost of one measurement.
        repeat: a decision to be followed again as it was, when a forward pass is recomputed.
    """

    entries: tuple[Earlier, ...] = ()
    calls_per_measurement: int = 1
    repeat: Decision | None = None

    def of(self, problem: AttentionProblem) -> Earlier | None:
        """Return what is known of a problem."""
        return next((entry for entry in self.entries if entry.problem == problem), None)
