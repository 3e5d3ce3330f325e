"""What one module remembers of its calls: running statistics, the way of each head, plans."""

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final

import torch

from adaattn._events import AttentionEvent
from adaattn.attention._digest import final_ways
from adaattn.errors import ArgumentError, ArgumentTypeError, expected_got
from adaattn.spec import (
    AttentionProblem,
    Decision,
    Earlier,
    History,
    TensorStats,
    Way,
)

__all__ = ["CallMemory", "is_recomputing"]

_PROBLEMS: Final = 8
"""Problems (shapes, masks) that are remembered, the least recent forgotten first."""

_FORWARDS: Final = 64
"""Forward passes whose decisions are kept for a backward that recomputes them."""


@dataclass(slots=True)
class _Entry:
    """What is known of one problem."""

    stats: TensorStats
    ways: tuple[Way, ...]
    age: int


class CallMemory:
    """A module's running statistics; planning reads them as an `adaattn.spec.History`.

    Args:
        measure_every: calls of one problem from one measurement to the next; 1 measures each.
        momentum: share of the old value in each running number, 0 (the newest alone) to
            below 1. A running error is never below the newest.

    Raises:
        ArgumentError: a number is out of range.
        ArgumentTypeError: ``momentum`` is no number.
    """

    def __init__(self, *, measure_every: int = 8, momentum: float = 0.5) -> None:
        if type(measure_every) is not int or measure_every < 1:
            raise ArgumentError(
                expected_got("measure_every", "an integer of at least 1", measure_every)
            )
        if not isinstance(momentum, (int, float)):
            raise ArgumentTypeError(expected_got("momentum", "a number", repr(momentum)))
        if not 0.0 <= momentum < 1.0:
            raise ArgumentError(expected_got("momentum", "a number in [0, 1)", momentum))
        self.measure_every = measure_every
        self.momentum = momentum
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._entries: OrderedDict[AttentionProblem, _Entry] = OrderedDict()
        self._forwards: deque[tuple[object, Decision]] = deque(maxlen=_FORWARDS)
        self._history: History | None = None

    def history(self) -> History:
        """Return what planning is told: statistics that are still fresh, and each head's way."""
        if self._history is None:
            self._history = History(
                entries=tuple(
                    Earlier(
                        problem=problem,
                        stats=entry.stats if entry.age < self.measure_every else None,
                        ways=entry.ways,
                    )
                    for problem, entry in self._entries.items()
                ),
                calls_per_measurement=self.measure_every,
            )
        return self._history

    def learn(self, event: AttentionEvent, mark: object) -> None:
        """Take in one call.

        Args:
            event: the call.
            mark: its inputs' fingerprint, by which a recomputation finds its decision; None
                where there will be none.
        """
        if mark is not None:
            self._forwards.append((mark, event.decision))
        entry = self._entries.get(event.problem)
        if event.stats is not None:
            stats = event.stats
            if entry is not None:
                stats = running_stats(entry.stats, stats, self.momentum)
            entry = self._entries[event.problem] = _Entry(stats, (), 0)
            if len(self._entries) > _PROBLEMS:
                self._entries.popitem(last=False)
        if entry is None:
            return
        self._entries.move_to_end(event.problem)
        entry.age += 1
        ways = final_ways(event)
        if event.repaired_heads:
            entry.stats = _barred(entry.stats, event.repaired_heads)
        changed = event.stats is not None or bool(event.repaired_heads) or ways != entry.ways
        if changed or entry.age == self.measure_every:
            self._history = None
        entry.ways = ways

    def learns_from(self, event: AttentionEvent) -> bool:
        """Return whether a call was measured, or its problem was before.

        The others are decided by static facts: a recomputation decides them alike.
        """
        return event.stats is not None or event.problem in self._entries

    def recalled(self, mark: object) -> Decision | None:
        """Return the decision of the forward pass that had these inputs, the newest first."""
        for known, decision in reversed(self._forwards):
            if known == mark:
                return decision
        return None


def is_recomputing() -> bool:
    """Return whether a backward pass is running: what is called in it counts as recomputed.

    That is activation checkpointing. A module that is called in backward on purpose, as by an
    implicit layer, is not told apart: it counts as recomputed and learns nothing.
    """
    return bool(torch._C._current_graph_task_id() != -1)


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

    sparse = {mass: (densities, errors) for mass, densities, errors in old.block_sparse}
    return replace(
        new,
        entropy_bits=mean(old.entropy_bits, new.entropy_bits),
        pooled_entropy_bits=by_key(old.pooled_entropy_bits, new.pooled_entropy_bits, mean),
        effective_ranks=mean(old.effective_ranks, new.effective_ranks),
        value_spreads=mean(old.value_spreads, new.value_spreads),
        score_tails=by_key(old.score_tails, new.score_tails, mean),
        value_tails=by_key(old.value_tails, new.value_tails, mean),
        precision_errors=by_key(old.precision_errors, new.precision_errors, error),
        low_rank_errors=_falling(by_key(old.low_rank_errors, new.low_rank_errors, error)),
        block_sparse=tuple(
            (
                mass,
                mean(sparse.get(mass, ((), ()))[0], densities),
                error(sparse.get(mass, ((), ()))[1], errors),
            )
            for mass, densities, errors in new.block_sparse
        ),
    )


def _falling(errors: tuple[tuple[Any, tuple[float, ...]], ...]) -> tuple[Any, ...]:
    """Return errors by rank, none above that of a lower rank: an old one may be out of date."""
    found: list[tuple[Any, tuple[float, ...]]] = []
    for ranks, values in sorted(errors):
        lower = found[-1][1] if found else values
        found.append((ranks, tuple(map(min, values, lower))))
    return tuple(found)


def _barred(stats: TensorStats, heads: tuple[int, ...]) -> TensorStats:
    """Return statistics in which no approximation serves some heads, until they are measured."""

    def infinite(errors: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(float("inf") if h in heads else error for h, error in enumerate(errors))

    return replace(
        stats,
        precision_errors=tuple((key, infinite(item)) for key, item in stats.precision_errors),
        low_rank_errors=tuple((key, infinite(item)) for key, item in stats.low_rank_errors),
        block_sparse=tuple(
            (mass, densities, infinite(item)) for mass, densities, item in stats.block_sparse
        ),
    )
