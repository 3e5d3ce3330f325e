"""What activation checkpointing runs again: it must save what the forward pass saved."""

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

import torch

__all__ = ["Forwards", "is_recomputing"]

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]

_hooks: Final[Callable[[bool], _Hooks | None]] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None
)
"""Returns what packs and unpacks saved tensors, or None; PyTorch 2.8 and later tell it."""

_CHECKPOINT: Final = "torch.utils.checkpoint"


def is_recomputing() -> bool:
    """Return whether a backward pass is running: what is called in it counts as recomputed.

    That is activation checkpointing. A module that is called in backward on purpose, as by an
    implicit layer, is not told apart: it counts as recomputed and learns nothing.
    """
    return bool(torch._C._current_graph_task_id() != -1)


class Forwards:
    """Checkpointed forward passes of one kind of calls that may still be run again.

    Each is known by the hook that unpacks what it saved, which lives as long as its graph holds
    anything. Reentrant checkpoints have no hooks, and need none: they save nothing. Checkpoints
    of other libraries than PyTorch are not known.
    """

    def __init__(self) -> None:
        self._unpacking: WeakSet[Callable[..., Any]] = WeakSet()

    def are_pending(self) -> bool:
        """Return whether there are any."""
        return bool(self._unpacking)

    def joins(self) -> bool | None:
        """Return whether this call is checkpointed while others are pending, and note it.

        None says that it is not checkpointed: it is neither run again nor the running again of
        another.
        """
        hooks = _hooks(True)
        if hooks is None or getattr(hooks[1], "__module__", "") != _CHECKPOINT:
            return None
        pending = bool(self._unpacking)
        self._unpacking.add(hooks[1])
        return pending
