"""The bounds of packed sequences, checked where the host can read them without waiting.

On a GPU only their form is checked, as FlashAttention does: numbers that do not rise from 0 to
the number of tokens give undefined results there. ``ADAATTN_DEBUG=1`` waits and checks them too.
"""

from itertools import pairwise

import torch

from adaattn._settings import is_debugging
from adaattn.call.canonical import described
from adaattn.errors import ArgumentError, DeviceError, DTypeError, ShapeError

__all__ = ["longest", "packed_bounds", "sequence_lengths"]


def packed_bounds(
    starts_q: torch.Tensor | None,
    starts_k: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bounds of queries and keys on the host; () when not packed, or on a GPU.

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
        raise ArgumentError.got("cu_seqlens_q and cu_seqlens_k", "both or neither", "one of them")
    if query.shape[0] != 1:
        raise ShapeError.got("packed tensors", "[1, H, T, D]", f"batch {query.shape[0]}")
    bounds_q = _bounds("cu_seqlens_q", starts_q, query)
    bounds_k = _bounds("cu_seqlens_k", starts_k, key)
    if len(starts_q) != len(starts_k):
        raise ShapeError.got(
            "cu_seqlens_k", f"{len(starts_q)} entries as cu_seqlens_q", len(starts_k)
        )
    return bounds_q, bounds_k


def _bounds(name: str, starts: torch.Tensor, tokens: torch.Tensor) -> tuple[int, ...]:
    """Return the bounds on the host, checked; () on a GPU and in a graph, which cannot wait.

    Debugging checks those on a GPU, and returns () all the same: it must not change the plan.
    """
    if not isinstance(starts, torch.Tensor) or starts.dtype != torch.int32 or starts.dim() != 1:
        hint = "cast it with .int()" if getattr(starts, "dtype", None) is torch.int64 else ""
        raise DTypeError.got(name, "an int32 tensor [N + 1]", described(starts), hint)
    if starts.device != tokens.device:
        raise DeviceError.got(name, f"device {tokens.device}", starts.device)
    if starts.shape[0] < 2:
        raise ArgumentError.got(name, "at least two numbers, [N + 1]", described(starts))
    if torch.compiler.is_compiling():
        return ()
    if starts.is_cuda and (not is_debugging() or torch.cuda.is_current_stream_capturing()):
        return ()
    bounds = tuple(starts.tolist())
    length = tokens.shape[2]
    rising = all(a <= b for a, b in pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != length or not rising:
        hint = ""
        if bounds[0] > 0 and sum(bounds) == length:
            hint = "of lengths they are F.pad(lengths.cumsum(0), (1, 0)).int()"
        elif bounds[0] == 0 and bounds[-1] == tokens.shape[1]:
            hint = "are q, k and v [T, H, D]? Then pass x.transpose(0, 1)"
        raise ArgumentError.got(name, f"rising numbers from 0 to {length}", list(bounds)[:8], hint)
    return () if starts.is_cuda else bounds


def longest(name: str, given: int | None, bounds: tuple[int, ...], length: int) -> int:
    """Return the longest packed sequence, or the best bound of it that needs no device read.

    Args:
        name: of the caller's argument.
        given: what the caller says, ``max_seqlen_q`` or ``max_seqlen_k``.
        bounds: on the host; () if unknown.
        length: tokens of all sequences.

    Raises:
        ArgumentError: it is no integer from the longest sequence to ``length``.
    """
    least = max(sequence_lengths(bounds), default=0)
    if given is None:
        return least or length
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= length:
        too_many = isinstance(given, int) and given > length
        hint = "packed tensors are [1, H, T, D] or [H, T, D]" if too_many else ""
        wanted = f"an integer from {least} to {length}"
        raise ArgumentError.got(name, wanted, repr(given), hint)
    return given


def sequence_lengths(bounds: tuple[int, ...]) -> list[int]:
    """Return the length of each packed sequence."""
    return [b - a for a, b in pairwise(bounds)]
