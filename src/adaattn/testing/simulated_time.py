"""Threads that take turns in simulated time: the same order on every machine, and no time lost.

One of them runs at a time, until it sleeps or waits; then whoever's time comes first. So a test of
code that runs in parallel depends on the delays that it gives, not on the processor or what else it
does, and a thread that nobody can wake any more is seen at once.
"""

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["SimulatedTime", "Waiters"]


class _Stopped(BaseException):
    """Ends a thread when another one has failed."""


class _Task:
    """A thread that gets its turns."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.waiters: Waiters = []


Waiters = list[_Task]
"""Those who wait for something to happen."""


class SimulatedTime:
    """The clock of some threads, which start, sleep and wait by its methods alone."""

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, _Task]] = []
        self._waiting: set[_Task] = set()
        self._running = 0
        self._error: BaseException | None = None
        self._current = self._caller = _Task()

    def run(self, functions: Sequence[Callable[[], object]]) -> None:
        """Run functions at the same time, until all have ended; call it once.

        Raises:
            TimeoutError: all who have not ended wait for one another.
            BaseException: what the first of them that failed has raised.
        """
        started = [self.start(function) for function in functions]
        for task in started:
            self.join(task)
        while self._running:
            self.sleep(0.0)
        if self._error is not None:
            raise self._error

    def start(self, function: Callable[[], object]) -> _Task:
        """Return a thread that runs a function from now on."""
        task = _Task()
        self._running += 1
        threading.Thread(target=self._run, args=(task, function), daemon=True).start()
        self._later(task, 0.0)
        return task

    def sleep(self, seconds: float) -> None:
        """Let others run for some time."""
        self._later(self._current, seconds)
        self._pass_on()

    def wait(self, waiters: Waiters) -> None:
        """Let others run until one of them calls `wake`."""
        waiters.append(self._current)
        self._waiting.add(self._current)
        self._pass_on()

    def wake(self, waiters: Waiters) -> None:
        """Let all who wait go on."""
        for task in waiters:
            if task in self._waiting:
                self._waiting.remove(task)
                self._later(task, 0.0)
        waiters.clear()

    def join(self, task: _Task) -> None:
        """Wait until a thread has ended."""
        if task.waiters is not _ENDED:
            self.wait(task.waiters)

    def _run(self, task: _Task, function: Callable[[], object]) -> None:
        """Run a thread's function when its turn comes, then pass the turn on."""
        task.turn.acquire()
        try:
            if self._error is None:
                function()
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 raised again by `run`
            self._fail(error)
        self._running -= 1
        self.wake(task.waiters)
        task.waiters = _ENDED
        self._next().turn.release()

    def _later(self, task: _Task, seconds: float) -> None:
        """Have a thread run in some time."""
        heapq.heappush(self._queue, (self._now + seconds, next(self._numbers), task))

    def _pass_on(self) -> None:
        """Give the turn to whoever is next; return when it is one's own again."""
        own, following = self._current, self._next()
        if following is not own:
            following.turn.release()
            own.turn.acquire()
        if self._error is not None and own is not self._caller:
            raise _Stopped

    def _next(self) -> _Task:
        """Return whose turn it is; if it is nobody's, all wait for ever."""
        if not self._queue:
            self._fail(TimeoutError("all who are left wait for one another"))
        self._now, _, self._current = heapq.heappop(self._queue)
        return self._current

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and let all threads end."""
        self._error = self._error or error
        for task in self._waiting:
            self._later(task, 0.0)
        self._waiting.clear()


_ENDED: Final[Waiters] = []
