"""The last bound call of a layer and shape, found again without its whole key.

PyTorch's compiler guards its graphs with comparisons in C++: of a tensor its type, dtype, device,
shape, strides, whether gradients are followed, and which modes see it; of the process its threads,
grad mode, autocast and determinism. They hold all that a key has of these. The rest are the words
that the caller wrote, which are few: neither defaults nor groups of arguments are made for them. A
call takes 1 us less so, and 6 us where the caches are cold (docs/kernel-notes.md).

Only what a key found is kept here, and only when the same was found twice in a row for tensors of
the same shapes. Of a growing cache that is decoded over, the length may be another within what its
key says; where other lengths never come again, each comparison would fail, and none is made.
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
from adaattn.call.key import DECODE_ROWS, alignment, may_grow
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
"""What has one last call, or the part of it that says who calls."""


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


class _Growing(NamedTuple):
    """Which lengths of a growing cache are alike: above the first, up to the second.

    All tensors without gaps have one alignment, that of a row.
    """

    above: int
    most: int
    has_no_gaps: bool
    alignment: int


class _Known(NamedTuple):
    """A bound call, and what a call is compared with: one piece of memory, read from its start."""

    bound: Bound
    dropout_p: float
    options: Options
    ambient: Policy
    state: Callable[[], bool]
    kernels: tuple[bool, ...]
    tensors: Callable[..., bool]
    names: tuple[str, ...]
    growing: _Growing | None


@dataclass(slots=True, eq=False)
class _Recent:
    """A bound call, for tensors of which sizes, and how often another was found in a row."""

    bound: Bound
    sizes: list[list[int | None]]
    missed: int


_KNOWN: Final[dict[Place, _Known]] = {}
_RECENT: Final[dict[Place, _Recent]] = {}


def _forget() -> None:
    """Drop every call."""
    _KNOWN.clear()
    _RECENT.clear()


hardware.on_clear(_forget)


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
        place: who calls, where that is not the public call.
    """
    try:
        # As `_place`, without the call.
        caller = place or (mask is None, is_causal, _caller(options) if options else None)
        length = key.shape[-2]
        if type(length) is not int:
            return Miss.SKIP  # a symbol of a graph
        place = query.shape, -length if length <= DECODE_ROWS else (length - 1).bit_length(), caller
        found = _KNOWN.get(place)
        if found is None:
            return _missed(place)
        bound, dropout, kept, ambient, state, kernels, tensors, names, growing = found
        if (
            ((options or kept) and not _has(options, kept))
            or (dropout_p is not dropout and not _equal(dropout_p, dropout))
            or _ambient() is not ambient
            or not state()
            or (_flash(), _efficient(), _math(), _cudnn()) != kernels
        ):
            return Miss.NOTE
        others = map(options.__getitem__, names) if names else ()
        if mask is None:
            known = tensors(query, key, value, *others)
        else:
            known = tensors(query, key, value, mask, *others)
        if known and growing is not None:
            above, most, has_no_gaps, aligned = growing
            if has_no_gaps:
                known = key.is_contiguous() and value.is_contiguous()
            else:
                known = alignment(key, value) == aligned
            known = known and above < length <= most and value.shape[-2] == length
            known = known and (mask is None or mask.shape[-1] == length)
        return bound if known else Miss.NOTE
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        return Miss.SKIP  # no tensors, no numbers: binding says which


def _missed(place: Place) -> Miss:
    """Return whether a call of a place where none is known is to be noted."""
    last = _RECENT.get(place)
    if last is None or last.missed < _MOST_MISSED:
        return Miss.NOTE
    last.missed = (last.missed + 1) % _LOOKED_AGAIN
    return Miss.SKIP


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
    reaches: tuple[int, ...] = (),
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
        reaches: numbers of keys up to which, or from which on, the options mean something else.
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
    place = _place(query, key, place or (mask is None, is_causal, _caller(options)))
    last = _RECENT.get(place)
    growing = None
    sizes: list[list[int | None]] = [list(tensor.shape) for tensor in given]
    strides: list[list[int | None]] = [list(tensor.stride()) for tensor in given]
    if may_grow(query, key, options.get("cu_seqlens_q")) and (mask is None or _is_row(mask)):
        growing = _growing(key, value, reaches)
        for size, steps in zip(sizes[1:3], strides[1:3], strict=True):
            size[-2] = None
            steps[:-2] = [None] * (len(steps) - 2)
        if mask is not None:
            sizes[3][-1] = None
            strides[3][:-1] = [None] * (len(strides[3]) - 1)
    missed = 0 if last is None else last.missed + 1
    if len(_RECENT) >= _KEPT:
        _forget()
    made = _RECENT[place] = _Recent(bound, sizes, missed)
    known = _KNOWN.pop(place, None)
    if last is None or last.bound is not bound or last.sizes != sizes or missed >= _MOST_MISSED:
        return
    if known is None:  # else one tensor is two of them, or modes differ that no key knows
        made.missed = 0
    guards = TensorGuards(
        *given,
        dynamic_dims_sizes=sizes,  # type: ignore[arg-type]  # a list for each tensor
        dynamic_dims_strides=strides,  # type: ignore[arg-type]
    )
    _KNOWN[place] = _Known(
        bound=bound,
        dropout_p=dropout_p,
        options=kept,
        ambient=_ambient(),
        state=GlobalStateGuard().check,
        kernels=(_flash(), _efficient(), _math(), _cudnn()),
        tensors=guards.check,
        names=names,
        growing=growing,
    )


def _growing(key: torch.Tensor, value: torch.Tensor, reaches: tuple[int, ...]) -> _Growing:
    """Return which lengths of a cache are alike: as its key says, and on one side of each reach."""
    length = key.shape[-2]
    most = 1 << (length - 1).bit_length()
    above = most // 2
    for reach in reaches:
        if reach >= length:
            most = min(most, reach)
        else:
            above = max(above, reach)
    has_no_gaps = key.is_contiguous() and value.is_contiguous()
    return _Growing(above, most, has_no_gaps, alignment(key, value))


def _is_row(mask: torch.Tensor) -> bool:
    """Return whether a mask has a column for each key, and one row for all queries."""
    return mask.dim() > 1 and mask.shape[-2] == 1 < mask.shape[-1]


def _place(query: torch.Tensor, key: torch.Tensor, caller: Place) -> Place:
    """Return what has one last call: a shape, how many keys, and who calls.

    Of a growing cache each power of two has one, and each length below, so that the next sequence
    finds them all.
    """
    length = key.shape[-2]
    return query.shape, -length if length <= DECODE_ROWS else (length - 1).bit_length(), caller


def _caller(options: Options) -> Place | None:
    """Return what of the options has a last call of its own."""
    if not options:
        return None
    layer = id(options.get("history")), options.get("layer")
    return (*layer, _shares_starts(options)) if "cu_seqlens_k" in options else layer


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
