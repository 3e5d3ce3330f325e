"""What goes wrong in a benchmark: whose fault it was, a device that is lost, a call that hangs."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import torch

__all__ = ["FailedError", "RefusedError", "blamed", "is_lost", "time_limit"]

_LONGEST_TEXT = 600


class RefusedError(Exception):
    """What was asked for is not offered; the text says why."""


class FailedError(Exception):
    """One side raised, or was wrong.

    Args:
        side: whose fault it was.
        text: how.
    """

    def __init__(self, side: str, text: str) -> None:
        super().__init__(text)
        self.side = side


@contextlib.contextmanager
def blamed(side: str) -> Iterator[None]:
    """Turn whatever is raised inside into a `FailedError` of a side."""
    try:
        yield
    except FailedError:
        raise
    except Exception as error:  # it is written into the row, and the run goes on
        text = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
        if isinstance(error, RefusedError):
            text = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            text = "out of memory"
        raise FailedError(side, text) from error


def is_lost(device: str) -> bool:
    """Return whether an error has ended this process's use of the GPU."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@contextlib.contextmanager
def time_limit(seconds: float, at_end: Callable[[], object]) -> Iterator[None]:
    """End the process with status 3 if the block takes longer: a kernel that hangs never returns.

    Args:
        seconds: how long the block may take.
        at_end: called before the end, in another thread; it must not touch the device.
    """

    def end() -> None:
        try:
            at_end()
        finally:
            os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
