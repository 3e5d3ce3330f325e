"""The bounds of packed sequences, checked and read on the host once."""

import threading
import weakref
from collections import OrderedDict
from itertools import pairwise
from typing import Final

import torch

from adaattn.canonical import described
from adaattn.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    expected_got,
)

__all__ = ["packed_bounds", "sequence_lengths"]


def packed_bounds(
    starts_q: torch.Tensor | None,
    starts_k: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bounds of queries and keys on the host; empty when not packed.

    Args:
        starts_q: int32 [N + 1], or None.
        starts_k: the same for keys.
        query: [1, Hq, T, D].
        key: [1, Hkv, T, D].

    Raises:
        ArgumentError: one of them is missing, or the numbers do not rise from 0 to T.
        ShapeError: a batch, or different numbers of sequences.
        DTypeError: not int32.
        DeviceError: on another device than the query.
    """
    if starts_q is None and starts_k is None:
        return (), ()
    if starts_q is None or starts_k is None:
        raise ArgumentError(
            expected_got("cu_seqlens_q and cu_seqlens_k", "both or neither", "one of them")
        )
    if query.shape[0] != 1:
        raise ShapeError(expected_got("packed tensors", "[1, H, T, D]", f"batch {query.shape[0]}"))
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "torch.compile",
            ["the bounds of packed sequences are read on the host, which a graph cannot do"],
            "Call it outside the compiled function, or compile without fullgraph.",
        )
    bounds_q = _bounds("cu_seqlens_q", starts_q, query.shape[2], query.device)
    bounds_k = _bounds("cu_seqlens_k", starts_k, key.shape[2], query.device)
    if len(bounds_q) != len(bounds_k):
        raise ShapeError(
            expected_got("cu_seqlens_k", f"{len(bounds_q)} entries as cu_seqlens_q", len(bounds_k))
        )
    return bounds_q, bounds_k


_HOST_BOUNDS: OrderedDict[int, tuple[weakref.ref[torch.Tensor], int, tuple[int, ...]]] = (
    OrderedDict()
)
_KEPT_BOUNDS: Final = 64
_LOCK: Final = threading.Lock()


def _host_values(starts: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's numbers on the host.

    From a GPU they are read once while the tensor lives and its version stays: a write that
    PyTorch does not see (by a kernel of the caller's, say) is not noticed.
    """
    if not starts.is_cuda or starts.is_inference():
        return tuple(starts.tolist())
    known = _HOST_BOUNDS.get(id(starts))
    if known is not None and known[0]() is starts and known[1] == starts._version:
        return known[2]
    values = tuple(starts.tolist())
    with _LOCK:
        _HOST_BOUNDS[id(starts)] = (weakref.ref(starts), starts._version, values)
        while len(_HOST_BOUNDS) > _KEPT_BOUNDS:
            _HOST_BOUNDS.popitem(last=False)
    return values


def _bounds(name: str, starts: torch.Tensor, length: int, device: torch.device) -> tuple[int, ...]:
    """Return the bounds on the host, checked."""
    if not isinstance(starts, torch.Tensor) or starts.dtype != torch.int32 or starts.dim() != 1:
        raise DTypeError(expected_got(name, "an int32 tensor [N + 1]", described(starts)))
    if starts.device != device:
        raise DeviceError(expected_got(name, f"device {device}", starts.device))
    bounds = _host_values(starts)
    rising = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length or not rising:
        raise ArgumentError(
            expected_got(name, f"rising numbers from 0 to {length}", list(bounds)[:8])
        )
    return bounds


def sequence_lengths(bounds: tuple[int, ...]) -> list[int]:
    """Return the length of each packed sequence."""
    return [b - a for a, b in pairwise(bounds)]
