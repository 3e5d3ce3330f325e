"""What exact and approximate calls of one problem really took: the clock that approximations obey.

An approximation is on probation. It may be tried, and its errors measured, only while all that
costs stays below `SHARE` of the time that exact attention has taken so far; it stays only while
its median, choosing and checking included, is below that of exact attention. On a CPU times are
wall clock. On a GPU they are events, read when they have arrived and never waited for.
"""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from adaattn import hardware
from adaattn.spec import AttentionProblem, Policy, Variant

__all__ = ["SHARE", "Ledger", "ledger_of"]

SHARE: Final = 0.02
"""Share of the time of exact calls that trying and measuring may cost."""

_KEPT: Final = 9
_KEPT_EXACT: Final = 3
"""Calls whose median counts; of exact ones only the newest, since few come once one is taken."""

_CLEARLY: Final = 1.25
"""A first try that takes this much longer than exact attention is the last."""

_FRESH_EVERY: Final = 32
"""Calls after which exact attention is timed again, so that both are compared as of now."""

_LOCK: Final = threading.Lock()

Variants = frozenset[Variant]


class _Running(NamedTuple):
    """A call on a GPU whose events have not arrived; ``variants`` is empty for an exact one."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    variants: Variants
    kind: str


class Ledger:
    """The times of one problem under one policy, shared by all layers that have it.

    Attributes:
        dropped: variants that took longer than exact attention.
        saved_ms: measured time saved, less what trying and measuring cost, since `take_saved`.
    """

    def __init__(self) -> None:
        self.dropped: Variants = frozenset()
        self.saved_ms = 0.0
        self._exact: deque[float] = deque(maxlen=_KEPT_EXACT)
        self._by_variants: dict[Variants, deque[float]] = {}
        self._measuring: dict[Variants, deque[float]] = {}
        self._exact_total_ms = 0.0
        self._spent_ms = 0.0
        self._calls = 0
        self._running: deque[_Running] = deque()
        self._warmed: set[tuple[str, Variants]] = set()

    @property
    def exact_ms(self) -> float:
        """Median time of an exact call; infinite before the first was timed."""
        return statistics.median(self._exact) if self._exact else math.inf

    def may_measure(self, estimated_ms: float, variants: Variants) -> bool:
        """Return whether exact calls have paid for a measurement and a try after it.

        Args:
            estimated_ms: of the measurement; what earlier ones took counts more.
            variants: what is to be measured.
        """
        known = self._measuring.get(variants)
        return self._may_spend(statistics.median(known) if known else estimated_ms)

    def may_try(self, variants: Variants) -> bool:
        """Return whether these variants were tried before, or exact calls have paid for a try."""
        return bool(self._by_variants.get(variants)) or self._may_spend(0.0)

    def calls_to_wait(self, estimated_ms: float, variants: Variants) -> int:
        """Return how many more exact calls will have paid for a measurement; see `may_measure`."""
        if not self._exact:
            return 0
        known = self._measuring.get(variants)
        more_ms = statistics.median(known) if known else estimated_ms
        needed_ms = (self._spent_ms + more_ms + self.exact_ms) / SHARE - self._exact_total_ms
        return max(math.ceil(needed_ms / self.exact_ms), 0)

    def count_exact(self, calls: int) -> None:
        """Count exact calls that nobody times as the timed ones."""
        if self._exact:
            self._exact_total_ms += calls * self.exact_ms

    def _may_spend(self, more_ms: float) -> bool:
        """Return whether there is room for some time and a call twice as long as an exact one."""
        if not self._exact:
            return False
        wanted = self._spent_ms + more_ms + self.exact_ms
        return wanted <= SHARE * self._exact_total_ms

    def wants_exact(self) -> bool:
        """Return whether this call should be exact, to compare with."""
        self._calls += 1
        return self._calls % _FRESH_EVERY == 0

    @contextmanager
    def timing(
        self,
        device: torch.device,
        kind: str,
        variants: Variants = frozenset(),
        chose_ms: float = 0.0,
    ) -> Iterator[None]:
        """Time the block.

        Args:
            device: where its work runs.
            kind: ``"exact"``, ``"approximate"`` or ``"measuring"``.
            variants: of an approximate call, those that lose something; of a measurement, all.
            chose_ms: host time of choosing before the block; on a GPU work hides it.
        """
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self.record(chose_ms + 1e3 * (time.perf_counter() - start), kind, variants)
            return
        if (kind, variants) not in self._warmed:
            # Events span what the host does between them: libraries plan kernels at first calls.
            self._warmed.add((kind, variants))
            yield
            return
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        start_event.record(stream)
        yield
        end_event.record(stream)
        self._running.append(_Running(start_event, end_event, variants, kind))

    def collect(self) -> None:
        """Take in the times that have arrived; waits for nothing."""
        while self._running and self._running[0].end.query():
            done = self._running.popleft()
            self.record(done.start.elapsed_time(done.end), done.kind, done.variants)

    def record(self, taken_ms: float, kind: str, variants: Variants = frozenset()) -> None:
        """Take in the time of one call; drop its variants if they do not pay."""
        if kind == "exact":
            self._exact.append(taken_ms)
            self._exact_total_ms += taken_ms
            return
        if kind == "measuring":
            self._measuring.setdefault(variants, deque(maxlen=_KEPT)).append(taken_ms)
            self._spend(taken_ms)
            return
        if not self._exact:
            return  # asked for by name: there is nothing to compare with
        times = self._by_variants.setdefault(variants, deque(maxlen=_KEPT))
        times.append(taken_ms)
        exact = self.exact_ms
        if taken_ms > exact:
            self._spend(taken_ms - exact)
        else:
            self.saved_ms += exact - taken_ms
            self._exact_total_ms += taken_ms
        clearly = len(times) == 1 and taken_ms > _CLEARLY * exact
        if clearly or (len(times) > 1 and _usual(times) >= exact):
            self.dropped |= variants
            times.clear()

    def take_saved(self) -> float:
        """Return the milliseconds saved since the last call of this, negative for a loss."""
        saved, self.saved_ms = self.saved_ms, 0.0
        return saved

    def _spend(self, taken_ms: float) -> None:
        """Count time that exact attention alone would not have taken."""
        self._spent_ms += taken_ms
        self.saved_ms -= taken_ms


def _usual(times: deque[float]) -> float:
    """Return what calls usually take: the median, or the mean without the slowest if larger."""
    rest = sorted(times)[: len(times) - (len(times) > 2)]
    return max(statistics.median(times), statistics.mean(rest))


def ledger_of(
    problem: AttentionProblem, policy: Policy, backend: str, device: torch.device
) -> Ledger:
    """Return the ledger of a problem; the least recently used of 256 is forgotten."""
    with _LOCK:  # two threads that begin at once share one
        return _kept(problem.without_layout(), policy, backend, device)


@lru_cache(maxsize=256)
def _kept(*_: object) -> Ledger:
    """Return a new ledger, once for each key."""
    return Ledger()


hardware.on_clear(_kept.cache_clear)
