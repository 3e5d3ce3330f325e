"""What a call may lose and who asks, and where what is learnt of its problem is kept."""

from dataclasses import dataclass, field, replace
from typing import Final

from adaattn import hardware
from adaattn.backends import capabilities_asked_for
from adaattn.call.describe import Call
from adaattn.call.history import Entry, History
from adaattn.call.ledger import Ledger, ledger_of
from adaattn.planning import serving
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Decision,
    HardwareFacts,
    Method,
    Policy,
    Variant,
)

__all__ = ["Choice", "Place", "as_it_runs", "place_of"]

_PLACES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a call may lose, and who asks.

    Args:
        policy: what may be lost.
        backend: ``"auto"``, or what was asked for.
        layer: which layer's budgets, and whose history; -1 is none.
        exact: the decision that loses nothing.
        places: where what is learnt of a problem is kept, by the problem's identity.
    """

    policy: Policy
    backend: str
    layer: int
    exact: Decision | None
    places: dict[int, "Place"] = field(default_factory=dict, compare=False)

    @property
    def allowed(self) -> tuple[Capability, ...]:
        """The executors that were asked for."""
        return capabilities_asked_for(self.backend)

    @property
    def is_forced(self) -> bool:
        """Whether only approximations were asked for: they are on no probation."""
        return self.exact is None or all(i.method is not Method.EXACT for i in self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where what is learnt of one problem is kept, found once for a bound call.

    Args:
        problem: kept, so that its identity is not reused.
        history: of which the entry is, and how often it was reset.
        facts: of the device.
        able: which of the allowed executors can serve the problem.
        ledger: of the problem.
        entry: of the problem in its layer.
        wanted: approximations that could pay, by the variants that were dropped.
    """

    problem: AttentionProblem
    history: tuple[History, int]
    facts: HardwareFacts
    able: tuple[Capability, ...]
    ledger: Ledger
    entry: Entry
    wanted: dict[frozenset[Variant], tuple[Variant, ...]] = field(default_factory=dict)


def place_of(call: Call, choice: Choice, history: History) -> Place:
    """Return where what is learnt of a call is kept."""
    problem = call.problem
    known = choice.places.get(id(problem))
    if known is not None and known.history == (history, history.resets):
        return known
    if len(choice.places) >= _PLACES:
        choice.places.clear()
    device = call.tensors.query.device
    facts = hardware.probe(device)
    made = Place(
        problem=problem,
        history=(history, history.resets),
        facts=facts,
        able=serving(problem, facts, choice.allowed),
        ledger=ledger_of(problem, choice.policy, choice.backend, device),
        entry=history.entry(problem, choice.layer, choice.policy, choice.backend),
    )
    choice.places[id(problem)] = made
    return made


def as_it_runs(decision: Decision, exact: Decision) -> Decision:
    """Return a decision with the plan that exact calls do not wait for any more."""
    if decision.later is None or decision.later != exact.plan:
        return decision
    return replace(decision, plan=decision.later, later=None)
