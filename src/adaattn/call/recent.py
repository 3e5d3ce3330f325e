"""The last bound call of a layer and shape, found again without its whole key.

PyTorch's compiler guards its graphs with comparisons in C++: of a tensor its type, dtype, device,
shape, strides, whether gradients are followed, and which modes see it; of the process its threads,
grad mode, autocast and determinism. They hold all that a key has of these. The rest are the words
that the caller wrote, which are few: neither defaults nor groups of arguments are made for them. A
call takes 1 us less so, and 6 us where the caches are cold (docs/kernel-notes.md).

Only what a key found is kept here, and only when the same was found twice in a row for tensors of
the same shapes: over a growing cache, whose shapes never come again, each comparison would fail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

from adaattn import hardware
from adaattn.call.bound import Bound
from adaattn.call.history import History
from adaattn.call.outputs import AuxRequest
from adaattn.policies import AMBIENT
from adaattn.spec import Align, Plan, Policy

__all__ = ["TENSORS", "Found", "Miss", "again", "note"]

_KEPT: Final = 4096
_MOST_MISSED: Final = 8
"""Times in a row that something else was found, after which nobody looks for a while."""
_LOOKED_AGAIN: Final = 256
"""Calls of that while, counted from the first miss."""

_EQUAL: Final = frozenset((str, int, float, tuple, Align, AuxRequest))
"""Types of options that are the same ones where they are equal, and of one type."""
_SAME: Final = (bool, type(None), Policy, Plan, History)
"""Types of those that are the same ones where they are one object."""
TENSORS: Final = ("sinks", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
"""Options that are tensors, in the order of a bound call."""
_TENSOR, _ANY, _ABSENT = object(), object(), object()
"""Stand for any tensor, for any value, and for an option that was not given."""
_flash = torch._C._get_flash_sdp_enabled
_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn = torch._C._get_cudnn_sdp_enabled
_ambient = AMBIENT.get

Options = dict[str, Any]
"""The keywords that the caller wrote."""

Place = tuple[object, ...]
"""What has one last call: a shape, and who calls."""


class Miss(Enum):
    """Why a call was not found."""

    NOTE = auto()
    """It is not the last one of its place: `note` is to be told which it is."""
    SKIP = auto()
    """None like it is kept here, or nobody looks at its place for a while."""


class Found(NamedTuple):
    """A bound call that its key found, and what it is given."""

    bound: Bound
    given: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Guard:
    """What a call is compared with."""

    dropout_p: float
    options: Options
    names: tuple[str, ...]
    ambient: Policy
    kernels: tuple[bool, ...]
    state: Callable[[], bool]
    tensors: Callable[..., bool]


@dataclass(slots=True, eq=False)
class _Recent:
    """A bound call, for tensors of which shapes, and how often another was found in a row."""

    bound: Bound
    shapes: list[torch.Size]
    missed: int
    guard: _Guard | None = None


_RECENT: Final[dict[object, _Recent]] = {}
hardware.on_clear(_RECENT.clear)


def again(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    options: Options,
    place: Place | None = None,
) -> Bound | Miss:
    """Return the bound call if it is the last one of its layer and shape.

    Numbers that are tensors are compared with none.

    Args:
        query: as in `scaled_dot_product_attention`.
        key: likewise.
        value: likewise.
        mask: likewise.
        dropout_p: likewise.
        is_causal: likewise.
        options: the other keywords that were given.
        place: what has one last call, where it is not that of the public call.
    """
    try:
        found = _RECENT.get(place or _place(query.shape, mask, is_causal, options))
        if found is None:
            return Miss.NOTE
        guard = found.guard
        if guard is None:
            if found.missed < _MOST_MISSED:
                return Miss.NOTE
            found.missed = (found.missed + 1) % _LOOKED_AGAIN
            return Miss.SKIP
        if (
            ((options or guard.options) and not _has(options, guard.options))
            or (dropout_p is not guard.dropout_p and not _equal(dropout_p, guard.dropout_p))
            or _ambient() is not guard.ambient
            or not guard.state()
            or (_flash(), _efficient(), _math(), _cudnn()) != guard.kernels
        ):
            return Miss.NOTE
        others = map(options.__getitem__, guard.names) if guard.names else ()
        if mask is None:
            known = guard.tensors(query, key, value, *others)
        else:
            known = guard.tensors(query, key, value, mask, *others)
        return found.bound if known else Miss.NOTE
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        return Miss.SKIP  # no tensors, no numbers: binding says which


def note(
    bound: Bound,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    options: Options,
    place: Place | None = None,
    ignored: frozenset[str] = frozenset(),
) -> None:
    """Have `again` return a bound call that a key found, once it was found twice in a row.

    Args:
        bound: what the key found.
        query: this and what follows as in `again`.
        key: likewise.
        value: likewise.
        mask: likewise.
        dropout_p: likewise.
        is_causal: likewise.
        options: likewise.
        place: likewise.
        ignored: options that may have any value.
    """
    kept = _kept(options, ignored)
    if kept is None or not _equal(dropout_p, dropout_p) or type(is_causal) is not bool:
        return
    names = _compared(options)
    given = [
        query,
        key,
        value,
        *([] if mask is None else [mask]),
        *(options[name] for name in names),
    ]
    place = place or _place(query.shape, mask, is_causal, options)
    last = _RECENT.get(place)
    missed = 0 if last is None else last.missed + 1
    shapes = [tensor.shape for tensor in given]
    if len(_RECENT) >= _KEPT:
        _RECENT.clear()
    made = _RECENT[place] = _Recent(bound, shapes, missed)
    if last is None or last.bound is not bound or last.shapes != shapes or missed >= _MOST_MISSED:
        return
    if last.guard is None:  # else one tensor is two of them, or modes differ that no key knows
        made.missed = 0
    guards = TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    kernels = _flash(), _efficient(), _math(), _cudnn()
    made.guard = _Guard(
        dropout_p=dropout_p,
        options=kept,
        names=names,
        ambient=_ambient(),
        kernels=kernels,
        state=GlobalStateGuard().check,
        tensors=guards.check,
    )


def _place(
    shape: torch.Size, mask: torch.Tensor | None, is_causal: bool, options: Options
) -> Place:
    """Return what has one last call of the public function."""
    if not options:
        return shape, mask is None, is_causal
    layer = id(options.get("history")), options.get("layer")
    if "cu_seqlens_k" in options:
        return shape, mask is None, is_causal, *layer, _shares_starts(options)
    return shape, mask is None, is_causal, *layer


def _compared(options: Options) -> tuple[str, ...]:
    """Return which options are tensors to compare. Guards know none that stands for two."""
    names = TENSORS[:-1] if _shares_starts(options) else TENSORS
    return tuple(name for name in names if isinstance(options.get(name), torch.Tensor))


def _shares_starts(options: Options) -> bool:
    """Return whether the bounds of keys are those of queries."""
    return options.get("cu_seqlens_k") is options.get("cu_seqlens_q")


def _kept(options: Options, ignored: frozenset[str]) -> Options | None:
    """Return the options that a call is compared with; None where one is to be read each time."""
    found: Options = {}
    for name, value in options.items():
        if name in ignored:
            found[name] = _ANY
        elif name in TENSORS and isinstance(value, torch.Tensor):
            found[name] = _TENSOR
        elif isinstance(value, _SAME) or _equal(value, value):
            found[name] = value
        else:
            return None
    return found


def _has(options: Options, kept: Options) -> bool:
    """Return whether options are those that were kept."""
    if len(options) != len(kept):
        return False
    for name, value in kept.items():
        given = options.get(name, _ABSENT)
        if given is value or (value is _ANY and given is not _ABSENT):
            continue
        if not (isinstance(given, torch.Tensor) if value is _TENSOR else _equal(given, value)):
            return False
    return True


def _equal(given: object, other: object) -> bool:
    """Return whether two numbers, names or windows are equal and of one type."""
    kind = type(other)
    if kind not in _EQUAL or type(given) is not kind or given != other:
        return False
    return kind is not tuple or all(type(edge) is int for edge in given)  # type: ignore[attr-defined]
