"""What a caller's calls taught: running statistics, the way of each head, plans to follow again."""

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Final

from adaattn._events import AttentionEvent
from adaattn._numbers import require_integer, require_number
from adaattn.spec import (
    AttentionProblem,
    Decision,
    MethodErrors,
    Policy,
    TensorStats,
    Variant,
)

__all__ = ["Entry", "History", "Served", "Watch"]

Watch = Callable[[AttentionEvent, int], None]
"""Takes an event and how many calls were like it."""

_PROBLEMS: Final = 256
"""Problems and layers that are remembered, the least recent forgotten first."""

_FORWARDS: Final = 64
"""Forward passes whose decisions are kept for a backward that recomputes them."""


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of one problem in one layer.

    Args:
        stats: running statistics; None before the first measurement.
        variants: how each head was computed the last time.
        age: calls since the last measurement.
        calls: all calls; seeds the rows that are audited where no number of the call may.
        arriving: what was measured or audited on a GPU and has not arrived yet.
        barred: heads that a late audit found over their budget: exact from then on.
        decided: the last decision by measured numbers, with what it was made from.
    """

    stats: TensorStats | None = None
    variants: tuple[Variant, ...] = ()
    age: int = 0
    calls: int = 0
    arriving: deque[Any] = field(default_factory=deque)
    barred: frozenset[int] = frozenset()
    decided: tuple[object, Decision] | None = None

    def learn(self, stats: TensorStats, momentum: float) -> None:
        """Take in a measurement."""
        self.stats = stats if self.stats is None else running_stats(self.stats, stats, momentum)
        self.age = 0
        self.bar(tuple(self.barred))

    def bar(self, heads: tuple[int, ...], *, for_good: bool = False) -> None:
        """Keep approximations off some heads until they are measured anew, or for good."""
        if for_good:
            self.barred |= frozenset(heads)
        if self.stats is not None and heads:
            self.stats = _barred(self.stats, heads)


class History:
    """What earlier calls taught: statistics measured on one call serve the next ones.

    A head keeps its method until another is clearly better, and a forward pass that activation
    checkpointing runs again in backward follows the plan that it had the first time. Attention
    modules keep one each, `adaattn.integrations.transformers.register` one for a model's
    layers, and the function one for the process.

    Args:
        measure_every: calls of one problem from one measurement to the next; 1 measures each.
        momentum: share of the old value in each running number, 0 (the newest alone) to
            below 1. A running error is never below the newest.

    Raises:
        ArgumentError: a number is out of range.
        ArgumentTypeError: ``momentum`` is no number.

    Attributes:
        resets: how often it has forgotten everything.
        watch: takes the events of calls that may lose something; exact ones are counted by
            `serve`.
        may_be_recomputed: gradients are not followed in this call, and may be wanted of a
            recomputation, as in the forward pass of a reentrant checkpoint.
    """

    def __init__(self, *, measure_every: int = 8, momentum: float = 0.5) -> None:
        require_integer("measure_every", measure_every, least=1)
        require_number("momentum", momentum, least=0, below=1)
        self.measure_every = measure_every
        self.momentum = momentum
        self.may_be_recomputed = False
        self.watch: Watch | None = None
        self._served: dict[int, Served] = {}
        self._finished: deque[Served] = deque()
        self.resets = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.resets += 1
        self._entries: OrderedDict[tuple[object, ...], Entry] = OrderedDict()
        self._forwards: deque[tuple[object, Decision]] = deque(maxlen=_FORWARDS)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: the settings; what was learnt belongs to a process."""
        return {"measure_every": self.measure_every, "momentum": self.momentum}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the settings, and begin with nothing learnt."""
        self.__init__(**state)  # type: ignore[misc]

    def entry(self, problem: AttentionProblem, layer: int, policy: Policy, backend: str) -> Entry:
        """Return what is known of a problem in a layer, to be read and written."""
        key = (problem.without_layout(), layer, policy, backend)
        known = self._entries.pop(key, None) or Entry()
        self._entries[key] = known
        while len(self._entries) > _PROBLEMS:
            self._entries.popitem(last=False)
        return known

    def serve(self, owner: object, event: AttentionEvent) -> "Served":
        """Return a counter of calls that are all alike; it is added up when its owner is gone.

        Args:
            owner: what counts; garbage collection tells when it has stopped.
            event: what each of the calls is.
        """
        self._take_in()
        tag = event.tag or ("" if event.layer < 0 else f"layer{event.layer}")
        served = Served(replace(event, tag=tag))
        self._served[id(served)] = served
        weakref.finalize(owner, self._gone, served).atexit = False
        return served

    def _gone(self, served: "Served") -> None:
        """Note that a counter has stopped; garbage collection runs anywhere, and does no more."""
        if self._served.pop(id(served), None) is not None:
            self._finished.append(served)

    def _take_in(self) -> None:
        """Hand over what counters had counted that have stopped."""
        while self._finished:
            served = self._finished.popleft()
            if self.watch is not None and served.calls:
                self.watch(served.event, served.calls)

    def served(self) -> Iterator["Served"]:
        """Yield the counters of calls that are all alike; those that stopped go to `watch`."""
        self._take_in()
        yield from list(self._served.values())

    def keep(self, mark: object, decision: Decision) -> None:
        """Keep the decision of a forward pass for its recomputation."""
        self._forwards.append((mark, decision))

    def recalled(self, mark: object) -> Decision | None:
        """Return the decision of the forward pass that had these inputs, the newest first."""
        for known, decision in reversed(self._forwards):
            if known == mark:
                return decision
        return None


@dataclass(slots=True, eq=False)
class Served:
    """Calls that are all alike.

    Args:
        event: what each of them is.
        calls: how many there were.
    """

    event: AttentionEvent
    calls: int = 0


def running_stats(old: TensorStats, new: TensorStats, momentum: float) -> TensorStats:
    """Return statistics averaged over calls; errors at least as large as the newest.

    Args:
        old: the running statistics.
        new: just measured.
        momentum: share of the old.
    """

    def mean(before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
        if len(before) != len(now):
            return now
        pairs = zip(before, now, strict=True)
        # A head that an audit barred has an infinite error until it is measured anew.
        return tuple(momentum * a + (1 - momentum) * b if isfinite(a) else b for a, b in pairs)

    def error(before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(max(a, b) for a, b in zip(mean(before, now), now, strict=True))

    def by_key(before: tuple[Any, ...], now: tuple[Any, ...], join: Any) -> tuple[Any, ...]:
        known = dict(before)
        return tuple((key, join(known.get(key, ()), values)) for key, values in now)

    return replace(
        new,
        entropy_bits=mean(old.entropy_bits, new.entropy_bits),
        pooled_entropy_bits=by_key(old.pooled_entropy_bits, new.pooled_entropy_bits, mean),
        effective_ranks=mean(old.effective_ranks, new.effective_ranks),
        value_spreads=mean(old.value_spreads, new.value_spreads),
        score_tails=by_key(old.score_tails, new.score_tails, mean),
        value_tails=by_key(old.value_tails, new.value_tails, mean),
        precision_errors=by_key(old.precision_errors, new.precision_errors, error),
        method_errors=_falling(
            [
                replace(
                    now,
                    errors=error(before.errors if before else (), now.errors),
                    densities=mean(before.densities if before else (), now.densities),
                )
                for now in new.method_errors
                for before in (old.errors_of(now.capability, now.method),)
            ],
            new,
        ),
    )


def _falling(found: list[MethodErrors], new: TensorStats) -> tuple[MethodErrors, ...]:
    """Return errors, none above that of cheaper parameters but as it was just measured.

    An average may be out of date where parameters were left out of later measurements.
    """
    least: dict[str, tuple[float, ...]] = {}
    falling = []
    for item, now in zip(found, new.method_errors, strict=True):
        cheaper = map(min, item.errors, least.get(item.capability, item.errors))
        least[item.capability] = tuple(map(max, cheaper, now.errors))
        falling.append(replace(item, errors=least[item.capability]))
    return tuple(falling)


def _barred(stats: TensorStats, heads: tuple[int, ...]) -> TensorStats:
    """Return statistics in which no approximation serves some heads, until they are measured."""

    def infinite(errors: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(float("inf") if h in heads else error for h, error in enumerate(errors))

    return replace(
        stats,
        precision_errors=tuple((key, infinite(item)) for key, item in stats.precision_errors),
        method_errors=tuple(
            replace(item, errors=infinite(item.errors)) for item in stats.method_errors
        ),
    )
