"""The last bound call of a layer and shape, found again without its whole key.

PyTorch's compiler guards its graphs with comparisons in C++: of a tensor its type, dtype, device,
shape, strides, whether gradients are followed, and which modes see it; of the process its threads,
grad mode, autocast and determinism. They hold all that a key has of these, and take a fifth of the
time that it takes to make a key and look it up, less where other code has emptied the caches.

Only what a key found is kept here, and only when the same was found twice in a row for tensors of
the same shapes: over a growing cache, whose shapes never come again, each comparison would fail.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

from adaattn import hardware
from adaattn.backends.common import is_aligned
from adaattn.call.arguments import Companions
from adaattn.call.bound import Bound
from adaattn.call.key import Choices
from adaattn.policies import AMBIENT

__all__ = ["again", "note"]

_KEPT: Final = 4096
_MOST_MISSED: Final = 8
"""Times in a row that something else was found, after which nobody looks any more."""
_CAUSAL: Final = 3
_DILATION: Final = 6
"""Places among the settings; a dilation of 2.0 equals 2, and is none."""

_flash = torch._C._get_flash_sdp_enabled
_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn = torch._C._get_cudnn_sdp_enabled
_ambient = AMBIENT.get


class _Recent:
    """What a call is compared with, and the bound call that it then is; never changed once made."""

    __slots__ = (
        "aligned",
        "ambient",
        "bound",
        "choice",
        "kernels",
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
) -> Bound | bool | None:
    """Return the bound call if it is the last one of its layer and shape; arguments as `key_of`'s.

    Returns:
        None if it is another, False if to look here is of no use.
    """
    mask, sinks, slopes, starts_q, starts_k, blocks, terms = companions
    if not (sinks is slopes is starts_q is starts_k is blocks is terms is None):
        return False
    try:
        found = _RECENT.get((choice[4], query.shape, mask is None, settings[_CAUSAL]))
        if found is None:
            return None
        if found.tensors is None:
            return None if found.missed <= _MOST_MISSED else False
        if (
            settings != found.settings
            or type(settings[_DILATION]) is not int
            or (window is not found.window and not _same(window, found.window))
            or choice != found.choice
            or (choice[0] is None and _ambient() is not found.ambient)
            or not found.state()
            or (_flash(), _efficient(), _math(), _cudnn()) != found.kernels
        ):
            return None
        if mask is None:
            return found.bound if found.tensors(query, key, value) else None
        same = found.tensors(query, key, value, mask)
        return found.bound if same and is_aligned(mask) is found.aligned else None
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False  # no tensors, no numbers: binding says which


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
    mask = companions[0]
    place = choice[4], query.shape, mask is None, settings[_CAUSAL]
    shapes = key.shape, None if mask is None else mask.shape
    last = _RECENT.get(place)
    if len(_RECENT) >= _KEPT:
        _RECENT.clear()
    missed = 0 if last is None else last.missed + 1
    is_other = last is None or last.bound is not bound or last.shapes != shapes
    if is_other or missed > _MOST_MISSED:
        _RECENT[place] = _Recent(bound, shapes, missed)
        return
    if not (type(window) is tuple and _same(window, window) and type(settings[_DILATION]) is int):
        return
    # Tensors that are one tensor, and modes that no key knows, differ each time.
    made = _Recent(bound, shapes, missed if last.tensors else 0)
    made.settings, made.window, made.choice = settings, window, choice
    made.ambient, made.aligned = _ambient(), mask is None or is_aligned(mask)
    made.kernels = _flash(), _efficient(), _math(), _cudnn()
    made.state = GlobalStateGuard().check
    given = (query, key, value) if mask is None else (query, key, value, mask)
    made.tensors = TensorGuards(
        *given, dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check
    _RECENT[place] = made


def _same(window: object, other: object) -> bool:
    """Return whether windows are equal, and of integers."""
    return type(window) is tuple and window == other and all(type(edge) is int for edge in window)
