"""The last bound call of a layer and shape, found again without its whole key.

PyTorch's compiler guards its graphs with comparisons in C++: of a tensor its type, dtype, device,
shape, strides, whether gradients are followed, and which modes see it; of the process its threads,
grad mode, autocast and determinism. They hold all that a key has of these, and take half of the
time that it takes to make a key and look it up (1.8 us for 3.5; AMD EPYC, PyTorch 2.13, 2026-11).

Only what a key found is kept here, and only when the same was found twice in a row for tensors of
the same shapes: over a growing cache, whose shapes never come again, each comparison would fail.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

from adaattn import hardware
from adaattn.call.arguments import Companions
from adaattn.call.bound import Bound
from adaattn.call.key import Choices
from adaattn.policies import AMBIENT

__all__ = ["again", "note"]

_KEPT: Final = 4096
_MOST_MISSED: Final = 8
"""Times in a row that something else was found, after which nobody looks for a while."""
_LOOKED_AGAIN: Final = 256
"""Calls of that while."""
_CAUSAL: Final = 3
_DILATION: Final = 6
"""Places among the settings; a dilation of 2.0 equals 2, and is none."""

_flash = torch._C._get_flash_sdp_enabled
_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn = torch._C._get_cudnn_sdp_enabled
_ambient = AMBIENT.get


class _Recent:
    """What a call is compared with, and the bound call that it then is."""

    __slots__ = (
        "ambient",
        "bound",
        "choice",
        "kernels",
        "kind",
        "missed",
        "settings",
        "shapes",
        "state",
        "tensors",
        "window",
    )

    def __init__(self, bound: Bound, shapes: object, missed: int) -> None:
        self.bound, self.shapes, self.missed = bound, shapes, missed
        self.tensors: Any = None


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
) -> Bound | None:
    """Return the bound call if it is the last one of its layer and shape, else None.

    Its arguments are those of `key_of`; no setting is a tensor.
    """
    mask, sinks, slopes, starts_q, starts_k, blocks, terms = companions
    if not (sinks is slopes is starts_q is starts_k is blocks is terms is None):
        return None
    try:
        place = choice[4], query.shape, mask is None, settings[_CAUSAL], id(choice[2])
        found = _RECENT.get(place)
        if (
            found is None
            or found.tensors is None
            or settings != found.settings
            or type(settings[_DILATION]) is not int
            or (window is not found.window and not _same(window, found.window))
            or choice != found.choice
            or type(choice[0]) is not found.kind
            or (choice[0] is None and _ambient() is not found.ambient)
            or not found.state()
            or (_flash(), _efficient(), _math(), _cudnn()) != found.kernels
        ):
            return None
        given = (query, key, value) if mask is None else (query, key, value, mask)
        return found.bound if found.tensors(*given) else None
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # no tensors, no numbers: binding says which


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
    mask, *others = companions
    place = choice[4], query.shape, mask is None, settings[_CAUSAL], id(choice[2])
    last = _RECENT.get(place)
    missed = 0 if last is None else last.missed + 1
    if last is not None and _MOST_MISSED < missed < _LOOKED_AGAIN:
        last.missed, last.tensors = missed, None
        return
    if any(other is not None for other in others):
        return
    missed %= _LOOKED_AGAIN
    shapes = key.shape, None if mask is None else mask.shape
    if len(_RECENT) >= _KEPT:
        _RECENT.clear()
    made = _RECENT[place] = _Recent(bound, shapes, missed)
    if last is None or last.bound is not bound or last.shapes != shapes:
        return
    if not (_same(window, window) and type(settings[_DILATION]) is int):
        return
    # Tensors that are one tensor, and modes that no key knows, differ each time.
    made.missed = missed if last.tensors else 0
    made.settings, made.window, made.choice = settings, window, choice
    made.kind, made.ambient = type(choice[0]), _ambient()
    made.kernels = _flash(), _efficient(), _math(), _cudnn()
    made.state = GlobalStateGuard().check
    given = (query, key, value) if mask is None else (query, key, value, mask)
    guards = TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    made.tensors = guards.check


def _same(window: object, other: object) -> bool:
    """Return whether windows are equal, and of integers."""
    return type(window) is tuple and window == other and all(type(edge) is int for edge in window)
