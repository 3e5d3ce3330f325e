"""The last bound call of a layer and shape, found again without its whole key.

PyTorch's compiler guards its graphs with comparisons in C++: of a tensor its type, dtype, device,
shape, strides, whether gradients are followed, and which modes see it, autocast too. The rest are
the modes of the process that a key has, and the words that the caller wrote, which are few: neither
defaults nor groups of arguments are made for them. A kernel that reads some MB empties the caches,
and a call that makes no shape of a tensor takes 15 us less then (docs/kernel-notes.md): so the last
call of all is tried first, with comparisons alone.

Only what a key found is kept here, and only when the same was found twice in a row for tensors of
the same shapes. Of a growing cache that is decoded over, the length may be another within what its
key says; where other lengths never come again, each comparison would fail, and none is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final, NamedTuple

import torch

from adaattn import hardware
from adaattn._guards import guards
from adaattn.call.bound import Bound
from adaattn.call.found import outside_autocast
from adaattn.call.key import (
    DECODE_ROWS,
    PROCESS_MODES,
    alignment,
    autocast_dtype,
    may_grow,
    process_modes,
)
from adaattn.call.options import (
    Options,
    has_options,
    is_equal,
    kept_options,
    shares_starts,
    tensor_names,
)
from adaattn.policies import AMBIENT

__all__ = ["Miss", "again", "note"]

_KEPT: Final = 4096
_MOST_MISSED: Final = 8
"""Times in a row that something else was found, after which nobody looks for a while."""
_LOOKED_AGAIN: Final = 256
"""Calls of that while, counted from the first miss."""

_ambient = AMBIENT.get
_dtype_of_autocast = torch.get_autocast_dtype
_flash, _efficient, _math, _cudnn, _deterministic, _threads, _grad = PROCESS_MODES

Place = tuple[object, ...]
"""What has one last call, or the part of it that says who calls."""


class Miss(Enum):
    """Why a call was not found."""

    NOTE = auto()
    """It is not the last one of its place: `note` is to be told which it is."""
    SKIP = auto()
    """None like it is kept here, or nobody looks at its place for a while."""


class _Growing(NamedTuple):
    """Which lengths of a growing cache are alike: above the first, up to the second.

    All tensors without gaps have one alignment, that of a row.
    """

    above: int
    most: int
    has_no_gaps: bool
    alignment: int


class _Known(NamedTuple):
    """A bound call, and whether a call is that one."""

    bound: Bound
    is_like: Callable[..., bool]


@dataclass(slots=True, eq=False)
class _Recent:
    """A bound call, for tensors of which sizes, and how often another was found in a row."""

    bound: Bound
    sizes: list[list[int | None]]
    missed: int


_KNOWN: Final[dict[Place, _Known]] = {}
_RECENT: Final[dict[Place, _Recent]] = {}
_LAST: Final[dict[object, _Known]] = {}
"""The last call of all that one caller made, whatever its shape."""


def _forget() -> None:
    """Drop every call."""
    _KNOWN.clear()
    _RECENT.clear()
    _LAST.clear()


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
        who = place or (id(options.get("history")) if options else 0)
        last = _LAST.get(who)
        if last and last.is_like(query, key, value, mask, dropout_p, is_causal, options):
            return last.bound
        length = key.shape[-2]
        if type(length) is not int:
            return Miss.SKIP  # a symbol of a graph
        place = _place(query, length, place or (mask is None, is_causal, _caller(options)))
        found = _KNOWN.get(place)
        if found is None:
            return _missed(place)
        if not found.is_like(query, key, value, mask, dropout_p, is_causal, options):
            return Miss.NOTE
        _LAST[who] = found
        return found.bound
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        return Miss.SKIP  # no tensors, no numbers: binding says which


def _comparison(
    tensors: Callable[..., bool],
    *,
    has_mask: bool,
    is_causal: bool,
    dropout_p: float,
    kept: Options,
    names: tuple[str, ...],
    growing: _Growing | None,
    device_type: str,
) -> Callable[..., bool]:
    """Return the function that says whether a call is the one that is known, by the same caller.

    What it compares with is its own: fields of an object would be looked up at each call. Whether
    autocast is enabled is what guards of tensors compare; its dtype they do not.
    """
    ambient, autocast, is_bare = _ambient(), autocast_dtype(device_type), not kept
    flash, efficient, math, cudnn, deterministic, threads, grad = process_modes()

    def is_like(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        options: Options,
    ) -> bool:
        if (
            causal is not is_causal
            or (dropout is not dropout_p and not is_equal(dropout, dropout_p))
            or (options if is_bare else not has_options(options, kept))
        ):
            return False
        others = map(options.__getitem__, names) if names else ()
        if mask is None:
            alike = not has_mask and tensors(query, key, value, *others)
        else:
            alike = has_mask and tensors(query, key, value, mask, *others)
        return (
            alike
            and (growing is None or _is_within(growing, key, value, mask))
            and (autocast is None or _dtype_of_autocast(device_type) is autocast)
            and _ambient() is ambient
            and _grad() is grad
            and _threads() == threads
            and _deterministic() is deterministic
            and _flash() is flash
            and _cudnn() is cudnn
            and _efficient() is efficient
            and _math() is math
        )

    return is_like


def _is_within(
    growing: _Growing, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Return whether a cache has a length that is alike, and lies so."""
    above, most, has_no_gaps, aligned = growing
    if has_no_gaps:
        alike = key.is_contiguous() and value.is_contiguous()
    else:
        alike = alignment(key, value) == aligned
    length = key.shape[-2]
    alike = alike and above < length <= most and value.shape[-2] == length
    return alike and (mask is None or mask.shape[-1] == length)


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
    kept = kept_options(options, ignored)
    if kept is None or not is_equal(dropout_p, dropout_p) or type(is_causal) is not bool:
        return
    names = tensor_names(options)
    given = [
        query,
        key,
        value,
        *([] if mask is None else [mask]),
        *(options[name] for name in names),
    ]
    who = place or (id(options.get("history")) if options else 0)
    place = _place(query, key.shape[-2], place or (mask is None, is_causal, _caller(options)))
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
    if known is None:  # else modes differ that no key knows, or which tensors are one
        made.missed = 0
    device_type = query.device.type
    compared = partial(
        _comparison,
        has_mask=mask is not None,
        is_causal=is_causal,
        dropout_p=dropout_p,
        kept=kept,
        names=names,
        device_type=device_type,
    )
    is_like = compared(guards(given, sizes, strides), growing=growing)
    if autocast_dtype(device_type) is not None:
        bound = partial(outside_autocast, device_type, bound)
    found = _KNOWN[place] = _Known(bound, is_like)
    if growing is not None:  # the same length may come again, and is compared in less time
        found = found._replace(is_like=compared(guards(given), growing=None))
    _LAST[who] = found


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


def _place(query: torch.Tensor, length: int, caller: Place) -> Place:
    """Return what has one last call: a shape, how many keys, and who calls.

    Of a growing cache each power of two has one, and each length below, so that the next sequence
    finds them all.
    """
    return query.shape, -length if length <= DECODE_ROWS else (length - 1).bit_length(), caller


def _caller(options: Options) -> Place | None:
    """Return what of the options has a last call of its own."""
    if not options:
        return None
    layer = id(options.get("history")), options.get("layer")
    return (*layer, shares_starts(options)) if "cu_seqlens_k" in options else layer
