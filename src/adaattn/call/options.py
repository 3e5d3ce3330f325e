"""The keywords that callers wrote, compared with those of an earlier call.

Few are written, and no defaults are made for the others. Numbers in tensors are equal to none.
"""

from typing import Any, Final

import torch

from adaattn.call.history import History
from adaattn.call.outputs import AuxRequest
from adaattn.spec import Align, Plan, Policy

__all__ = [
    "TENSORS",
    "Options",
    "has_options",
    "is_equal",
    "kept_options",
    "shares_starts",
    "tensor_names",
]

_EQUAL: Final = frozenset((str, int, float, tuple, Align, AuxRequest))
"""Types of options that are the same ones where they are equal, and of one type."""
_SAME: Final = (bool, type(None), Policy, Plan, History)
"""Types of those that are the same ones where they are one object."""
TENSORS: Final = ("sinks", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
"""Options that are tensors, in the order of a bound call."""
_TENSOR, _ANY, _ABSENT = object(), object(), object()
"""Stand for any tensor, for any value, and for an option that was not given."""
Options = dict[str, Any]
"""The keywords that the caller wrote."""


def tensor_names(options: Options) -> tuple[str, ...]:
    """Return which options are tensors to compare."""
    return tuple(name for name in TENSORS if isinstance(options.get(name), torch.Tensor))


def shares_starts(options: Options) -> bool:
    """Return whether the bounds of keys are those of queries."""
    return options.get("cu_seqlens_k") is options.get("cu_seqlens_q")


def kept_options(options: Options, ignored: frozenset[str]) -> Options | None:
    """Return the options that a call is compared with; None where one is to be read each time."""
    found: Options = {}
    for name, value in options.items():
        if name in ignored:
            found[name] = _ANY
        elif name in TENSORS and isinstance(value, torch.Tensor):
            found[name] = _TENSOR
        elif isinstance(value, _SAME) or is_equal(value, value):
            found[name] = value
        else:
            return None
    return found


def has_options(options: Options, kept: Options) -> bool:
    """Return whether options are those that were kept."""
    if len(options) != len(kept):
        return False
    for name, value in kept.items():
        given = options.get(name, _ABSENT)
        if given is value or (value is _ANY and given is not _ABSENT):
            continue
        if not (isinstance(given, torch.Tensor) if value is _TENSOR else is_equal(given, value)):
            return False
    return True


def is_equal(given: object, other: object) -> bool:
    """Return whether two numbers, names or windows are equal and of one type."""
    kind = type(other)
    if kind not in _EQUAL or type(given) is not kind or given != other:
        return False
    return kind is not tuple or all(type(edge) is int for edge in given)  # type: ignore[attr-defined]
