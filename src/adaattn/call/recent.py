"""The last bound call of a layer and shape, found again without its whole key.

PyTorch's compiler guards its graphs with comparisons in C++: of a tensor its type, dtype, device,
shape, strides, whether gradients are followed, and which modes see it; of the process its threads,
grad mode, autocast and determinism. They hold all that a key has of these, and take half of the
time that it takes to make a key and look it up (1.8 us for 3.5; AMD EPYC, PyTorch 2.13, 2026-11).

Only what a key found is kept here, and only when the same was found twice in a row for tensors of
the same shapes: over a growing cache, whose shapes never come again, each comparison would fail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

from adaattn import hardware
from adaattn.call.arguments import Companions
from adaattn.call.bound import Bound
from adaattn.call.key import Choices
from adaattn.policies import AMBIENT
from adaattn.spec import Policy

__all__ = ["Miss", "again", "note"]

_KEPT: Final = 4096
_MOST_MISSED: Final = 8
"""Times in a row that something else was found, after which nobody looks for a while."""
_LOOKED_AGAIN: Final = 256
"""Calls of that while, counted from the first miss."""
_SCALE, _SOFTCAP, _CAUSAL, _DILATION = 0, 1, 3, 6
"""Places among the settings; a dilation of 2.0 equals 2, and is none."""

_flash = torch._C._get_flash_sdp_enabled
_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn = torch._C._get_cudnn_sdp_enabled
_ambient = AMBIENT.get


class Miss(Enum):
    """Why a call was not found."""

    NOTE = auto()
    """It is not the last one of its place: `note` is to be told which it is."""
    SKIP = auto()
    """None like it is kept here, or nobody looks at its place for a while."""


@dataclass(frozen=True, slots=True, eq=False)
class _Guard:
    """What a call is compared with."""

    settings: tuple[Any, ...]
    window: object
    choice: Choices
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
    companions: Companions,
    settings: tuple[Any, ...],
    window: Sequence[int] | torch.Tensor,
    choice: Choices,
) -> Bound | Miss:
    """Return the bound call if it is the last one of its layer and shape.

    Its arguments are those of `key_of`. Numbers that are tensors are compared with none.
    """
    try:
        given, beside = _given(query, key, value, companions)
        if beside is None:
            return Miss.SKIP
        found = _RECENT.get(_place(query.shape, beside, settings, choice))
        if found is None:
            return Miss.NOTE
        guard = found.guard
        if guard is None:
            if found.missed < _MOST_MISSED:
                return Miss.NOTE
            found.missed = (found.missed + 1) % _LOOKED_AGAIN
            return Miss.SKIP
        if (
            settings != guard.settings
            or type(settings[_DILATION]) is not int
            or (window is not guard.window and not _same(window, guard.window))
            or choice != guard.choice
            or type(choice[0]) is not type(guard.choice[0])
            or (choice[0] is None and _ambient() is not guard.ambient)
            or not guard.state()
            or (_flash(), _efficient(), _math(), _cudnn()) != guard.kernels
        ):
            return Miss.NOTE
        return found.bound if guard.tensors(*given) else Miss.NOTE
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        return Miss.SKIP  # no tensors, no numbers: binding says which


def note(
    bound: Bound,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    companions: Companions,
    settings: tuple[Any, ...],
    window: Sequence[int] | torch.Tensor,
    choice: Choices,
) -> None:
    """Have `again` return a bound call that a key found, once it was found twice in a row."""
    given, beside = _given(query, key, value, companions)
    place = _place(query.shape, beside, settings, choice)
    last = _RECENT.get(place)
    missed = 0 if last is None else last.missed + 1
    shapes = [tensor.shape for tensor in given]
    if len(_RECENT) >= _KEPT:
        _RECENT.clear()
    made = _RECENT[place] = _Recent(bound, shapes, missed)
    if last is None or last.bound is not bound or last.shapes != shapes or missed >= _MOST_MISSED:
        return
    if not (_same(window, window) and type(settings[_DILATION]) is int):
        return
    if last.guard is None:  # else one tensor is two of them, or modes differ that no key knows
        made.missed = 0
    guards = TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    kernels = _flash(), _efficient(), _math(), _cudnn()
    state = GlobalStateGuard().check
    made.guard = _Guard(settings, window, choice, _ambient(), kernels, state, guards.check)


def _given(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, companions: Companions
) -> tuple[tuple[torch.Tensor, ...], object]:
    """Return the tensors that are compared, and which they are; None where others would have to be.

    Guards know no tensor that stands for two.
    """
    mask, sinks, slopes, starts_q, starts_k, blocks, terms = companions
    if blocks is not None or terms is not None:
        return (), None
    if sinks is slopes is starts_q is starts_k is None:
        return ((query, key, value), 3) if mask is None else ((query, key, value, mask), 4)
    others = mask, sinks, slopes, starts_q, None if starts_k is starts_q else starts_k
    given = (query, key, value, *[item for item in others if item is not None])
    absent = [item is None for item in (mask, sinks, slopes, starts_q, starts_k)]
    return given, (*absent, starts_k is starts_q)


def _place(
    shape: torch.Size, beside: object, settings: tuple[Any, ...], choice: Choices
) -> tuple[object, ...]:
    """Return what has one last call; a number that is a tensor is at no place of another."""
    scale, softcap = type(settings[_SCALE]), type(settings[_SOFTCAP])
    return choice[4], id(choice[2]), shape, beside, settings[_CAUSAL], scale, softcap


def _same(window: object, other: object) -> bool:
    """Return whether windows are equal, and of integers."""
    return type(window) is tuple and window == other and all(type(edge) is int for edge in window)
