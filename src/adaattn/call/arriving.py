"""Numbers on their way from a device, for which nobody waits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Arriving"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arriving:
    """Numbers on their way from a GPU to the host, for which nobody waits.

    Args:
        host: [R, C] fp64 in pinned memory.
        event: after the copy.
        read: makes a value of the rows.
    """

    host: torch.Tensor
    event: torch.cuda.Event
    read: Callable[[list[list[float]]], Any]

    @classmethod
    def of(cls, rows: torch.Tensor, read: Callable[[list[list[float]]], Any]) -> "Arriving":
        """Return the numbers [R, C] of a device, their copy begun."""
        host = torch.empty(rows.shape, dtype=torch.float64, pin_memory=True)
        host.copy_(rows.detach().double(), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(rows.device))
        return cls(host=host, event=event, read=read)

    def is_here(self) -> bool:
        """Return whether the copy is done."""
        return bool(self.event.query())

    def value(self) -> Any:
        """Return what the numbers mean."""
        return self.read(self.host.tolist())
