"""A bound call that was found, and how it runs where autocast is enabled."""

from functools import wraps
from typing import Any, NamedTuple

import torch

from adaattn.call.bound import Bound

__all__ = ["Found", "outside_autocast"]


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
        bound = outside_autocast(self.bound, self.autocast) if self.autocast else self.bound
        return bound(*self.given)


def outside_autocast(bound: Bound, device_type: str) -> Bound:
    """Return a bound call as it runs where autocast is enabled; a context takes ten times as long.

    Args:
        bound: the call.
        device_type: of its tensors.
    """

    @wraps(bound)
    def outside(*given: Any) -> Any:
        torch.set_autocast_enabled(device_type, False)
        try:
            return bound(*given)
        finally:
            torch.set_autocast_enabled(device_type, True)

    return outside
