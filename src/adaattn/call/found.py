"""A bound call that was found, and how it runs where autocast is enabled."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from adaattn.call.bound import Bound

__all__ = ["Found", "outside_autocast"]

_T = TypeVar("_T")


class Found(NamedTuple):
    """A bound call that its key found.

    Args:
        bound: the call.
        given: what it is given.
        autocast: type of the device where autocast is enabled, which leaves the tensors alone.
    """

    bound: Bound
    given: tuple[Any, ...]
    autocast: str = ""

    def run(self) -> Any:
        """Return the call's result."""
        if self.autocast:
            return outside_autocast(self.autocast, self.bound, *self.given)
        return self.bound(*self.given)


def outside_autocast(device_type: str, function: Callable[..., _T], *given: Any) -> _T:
    """Return a function's result where autocast is enabled; a context takes ten times as long.

    Args:
        device_type: for which it is.
        function: runs without.
        *given: what it takes.
    """
    torch.set_autocast_enabled(device_type, False)
    try:
        return function(*given)
    finally:
        torch.set_autocast_enabled(device_type, True)
