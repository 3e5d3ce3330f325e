"""What exact and approximate calls of one problem really took: the clock that approximations obey.

An approximation is on probation. It may be tried, and its errors measured, only while all that
costs stays below `SHARE` of the time that exact attention has taken so far; it stays only while
its median, choosing and checking included, is below that of exact attention. On a CPU times are
wall clock. On a GPU they are events, read when they have arrived and never waited for.
"""

import math
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from adaattn import hardware
from adaattn.spec import AttentionProblem, Policy, Way

__all__ = ["SHARE", "Ledger", "ledger_of"]

SHARE: Final = 0.02
"""Share of the time of exact calls that trying and measuring may cost."""

_KEPT: Final = 9
"""Calls whose median counts."""

_CLEARLY: Final = 1.25
"""A first try that takes this much longer than exact attention is the last."""

_FRESH_EVERY: Final = 64
"""Calls after which exact attention is timed again, so that both are compared as of now."""

_LEDGERS: Final[OrderedDict[tuple[object, ...], "Ledger"]] = OrderedDict()
_KEPT_LEDGERS: Final = 256

hardware.on_clear(_LEDGERS.clear)

Ways = frozenset[Way]


class _Running(NamedTuple):
    """A call on a GPU whose events have not arrived; ``ways`` is empty for an exact one."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    ways: Ways
    kind: str


class Ledger:
    """The times of one problem under one policy, shared by all layers that have it.

    Attributes:
        dropped: ways that took longer than exact attention.
        saved_ms: measured time saved, less what trying and measuring cost, since `take_saved`.
    """

    def __init__(self) -> None:
        self.dropped: Ways = frozenset()
        self.saved_ms = 0.0
        self._exact: deque[float] = deque(maxlen=_KEPT)
        self._by_ways: dict[Ways, deque[float]] = {}
        self._measuring: deque[float] = deque(maxlen=_KEPT)
        self._exact_total_ms = 0.0
        self._spent_ms = 0.0
        self._calls = 0
        self._running: deque[_Running] = deque()
        self._warmed: set[tuple[str, Ways]] = set()

    @property
    def exact_ms(self) -> float:
        """Median time of an exact call; infinite before the first was timed."""
        return statistics.median(self._exact) if self._exact else math.inf

    def may_spend(self, estimated_ms: float, *, tries: int) -> bool:
        """Return whether exact calls have paid for a measurement and some tries.

        Args:
            estimated_ms: of the measurement; what earlier ones took counts more.
            tries: calls that may take twice as long as exact ones.
        """
        if not self._exact:
            return False
        known = statistics.median(self._measuring) if self._measuring else estimated_ms
        wanted = known + tries * self.exact_ms
        return self._spent_ms + wanted <= SHARE * self._exact_total_ms

    def wants_exact(self) -> bool:
        """Return whether this call should be exact, to compare with."""
        self._calls += 1
        return self._calls % _FRESH_EVERY == 0

    @contextmanager
    def timing(self, device: torch.device, kind: str, ways: Ways = frozenset()) -> Iterator[None]:
        """Time the block.

        Args:
            device: where its work runs.
            kind: ``"exact"``, ``"approximate"`` or ``"measuring"``.
            ways: of an approximate call, the ways that lose something.
        """
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self.record(1e3 * (time.perf_counter() - start), kind, ways)
            return
        if (kind, ways) not in self._warmed:
            # Events span what the host does between them: libraries plan kernels at first calls.
            self._warmed.add((kind, ways))
            yield
            return
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        yield
        end_event.record()
        self._running.append(_Running(start_event, end_event, ways, kind))

    def collect(self) -> None:
        """Take in the times that have arrived; waits for nothing."""
        while self._running and self._running[0].end.query():
            done = self._running.popleft()
            self.record(done.start.elapsed_time(done.end), done.kind, done.ways)

    def record(self, taken_ms: float, kind: str, ways: Ways = frozenset()) -> None:
        """Take in the time of one call; drop its ways if they do not pay."""
        if kind == "exact":
            self._exact.append(taken_ms)
            self._exact_total_ms += taken_ms
            return
        if kind == "measuring":
            self._measuring.append(taken_ms)
            self._spend(taken_ms)
            return
        if not self._exact:
            return  # asked for by name: there is nothing to compare with
        times = self._by_ways.setdefault(ways, deque(maxlen=_KEPT))
        times.append(taken_ms)
        exact = self.exact_ms
        if taken_ms > exact:
            self._spend(taken_ms - exact)
        else:
            self.saved_ms += exact - taken_ms
            self._exact_total_ms += taken_ms
        clearly = len(times) == 1 and taken_ms > _CLEARLY * exact
        if clearly or (len(times) > 1 and statistics.median(times) >= exact):
            self.dropped |= ways
            times.clear()

    def take_saved(self) -> float:
        """Return the milliseconds saved since the last call of this, negative for a loss."""
        saved, self.saved_ms = self.saved_ms, 0.0
        return saved

    def _spend(self, taken_ms: float) -> None:
        """Count time that exact attention alone would not have taken."""
        self._spent_ms += taken_ms
        self.saved_ms -= taken_ms


def ledger_of(problem: AttentionProblem, policy: Policy, backend: str) -> Ledger:
    """Return the ledger of a problem; the least recently used of 256 is forgotten."""
    key = (problem, policy, backend)
    known = _LEDGERS.get(key)
    if known is None:
        known = _LEDGERS[key] = Ledger()
        while len(_LEDGERS) > _KEPT_LEDGERS:
            _LEDGERS.popitem(last=False)
    else:
        _LEDGERS.move_to_end(key)
    return known
