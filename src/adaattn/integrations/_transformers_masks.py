"""The mask function that Transformers calls: structure where there is some, else its own mask.

Transformers describes a mask by a function of index pairs. Plain causality, sliding windows
and packed sequences need no B x Sq x Sk booleans: they are recognised here and travel as a
`StructuredMask`, which the attention function reads and which turns into the ordinary mask as
soon as anybody else computes with it: additive for architectures that have only eager attention,
else boolean. Whatever is not recognised, and every mask with padding, is left to Transformers'
``sdpa_mask``.

``None`` is returned for one query only, since layers disagree whether it means causal order.
Architectures that never call the attention function are refused.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import is_fake

from adaattn.integrations._transformers_structure import (
    UNLIMITED,
    MaskStructure,
    StructuredMask,
)
from adaattn.integrations._transformers_support import expects_additive_masks

__all__ = ["make_mask"]

is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_is_inference = torch.is_inference_mode_enabled
_WORDS = frozenset((int, bool, str, type(None), torch.device, torch.dtype, FunctionType))


def make_mask(**request: Any) -> torch.Tensor | None:
    """Return the mask of one kind of layer, as Transformers' mask interface asks for it.

    Args:
        **request: what Transformers passes: batch_size, q_length, kv_length, q_offset,
            kv_offset, mask_function, attention_mask (2-D padding, True = a real token),
            allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap, device, config and more.

    Returns:
        ``None``, a `StructuredMask`, or booleans [B, 1, Sq, Sk] (True = attend).

    Raises:
        UnsupportedError: the architecture would misread the mask.
    """
    if is_compiling() or _tracing_state() is not None:
        return _traced_mask(request)
    words = None
    if request.get("q_length") != 1:
        config = request.pop("config", None)
        words = type(config), _is_inference(), *request, *request.values()
        try:
            known = _UNTOUCHED.get(words)
        except TypeError:  # a number of a trace
            known = None
        if known is not None and known._dense is None and sys.getrefcount(known) <= _OWN_REFERENCES:
            return known
        words = words if _are_words(request) else None
        request["config"] = config
    is_additive = _is_additive(request.get("config"))
    pattern = _recognise(request)
    num_keys = None if pattern is None else _num_keys(pattern, request)
    if pattern is None or num_keys is None or _is_padded(num_keys, request):
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        seen = _boolean_mask({**request, **skips})
        assert seen is not None
        if not is_additive:
            return seen
        return StructuredMask(seen, tuple(seen.shape), seen.device, _dtype(request))
    if request["q_length"] == 1 and not is_additive:
        if _may_skip(pattern, num_keys, request):
            return None
        if not request.get("allow_is_causal_skip", True):
            # A compiled graph may take it, and a row of booleans is cheap.
            return _boolean_mask(request)
    shape = (request["batch_size"], 1, request["q_length"], request["kv_length"])
    dtype = _dtype(request) if is_additive else torch.bool
    structure = _structure(pattern, num_keys)
    mask = StructuredMask(structure, shape, request.get("device", "cpu"), dtype)
    if words is not None:
        if len(_UNTOUCHED) >= _KEPT:
            _UNTOUCHED.pop(next(iter(tuple(_UNTOUCHED))), None)  # the oldest
        _UNTOUCHED[words] = mask
    return mask


def _traced_mask(request: Mapping[str, Any]) -> torch.Tensor | None:
    """Return Transformers' own mask: a graph cannot hold a structure."""
    config = request.get("config")
    name = str(getattr(config, "_attn_implementation", None))
    if config is None or not expects_additive_masks(type(config), name):
        return _boolean_mask(request)
    return _additive_mask({**request, "allow_is_bidirectional_skip": False})


def _is_additive(config: object) -> bool:
    """Return whether the models of a configuration may add masks to scores."""
    kind = type(config)
    known = config is not None and _ADDITIVE.get(kind)
    if known is None:
        name = str(getattr(config, "_attn_implementation", None))
        known = _ADDITIVE[kind] = expects_additive_masks(kind, name)
    return known


_ADDITIVE: dict[type, bool] = {}
"""The same by class: it reads modelling code, and a configuration takes long to answer."""


def _dtype(request: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a mask that is added to scores."""
    dtype: torch.dtype = request.get("dtype", torch.float32)
    return dtype


def _are_words(request: Mapping[str, Any]) -> bool:
    """Return whether the mask of a request depends on words and numbers alone.

    A number may be a tensor, or one of a trace, and a function may have captured some.
    """
    return (
        request.get("attention_mask") is None
        and not request.get("use_vmap")
        and _is_plain(request.get("mask_function"))
        and _WORDS.issuperset(map(type, request.values()))
    )


def _references() -> int:
    """Return how often what one variable and a dictionary hold is held where that is asked."""
    alone = object()
    kept = {0: alone}
    count = sys.getrefcount(alone)
    kept.clear()
    return count


_OWN_REFERENCES: Final = _references()

_KEPT = 64
_UNTOUCHED: dict[object, StructuredMask] = {}
"""Masks by the words of their requests, given again while nobody holds or has changed them.

Making a tensor takes longer than the rest of a request."""


def _boolean_mask(request: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the mask that Transformers makes for SDPA."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**request)  # type: ignore[no-any-return]


def _additive_mask(request: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the mask that Transformers makes for eager attention."""
    from transformers.masking_utils import eager_mask

    return eager_mask(**request)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pattern:
    """The intersection of the mask functions that were recognised."""

    is_causal: bool = False
    left: int = UNLIMITED
    right: int = UNLIMITED
    segments: torch.Tensor | None = None


def _recognise(request: Mapping[str, Any]) -> _Pattern | None:
    """Return the pattern behind a mask function, or None where it is more than a pattern."""
    # Releases of Transformers that pass positions as a tensor are left to their own mask.
    if request.get("use_vmap") or not {"q_length", "kv_length", "mask_function"} <= request.keys():
        return None
    function = request["mask_function"]
    return _plain_pattern_of(function) if _is_plain(function) else _pattern_of(function)


def _is_plain(function: object) -> bool:
    """Return whether a mask function holds nothing that would be kept with it."""
    return isinstance(function, FunctionType) and function.__closure__ is None


def _pattern_of(function: Callable[..., Any]) -> _Pattern | None:
    """Return the pattern of a mask function, or None where it is unknown."""
    leaves = _leaves(function)
    if leaves is None:
        return None
    is_causal, left, right, segments = False, UNLIMITED, UNLIMITED, None
    for name, cells in leaves:
        if name == "causal_mask_function":
            is_causal = True
        elif name == "sliding_window_overlay" and cells["sliding_window"] > 0:
            left = _narrower(left, cells["sliding_window"] - 1)
        elif name == "sliding_window_bidirectional_overlay" and cells["sliding_window"] >= 0:
            left = _narrower(left, cells["sliding_window"])
            right = _narrower(right, cells["sliding_window"])
        elif name == "packed_sequence_mask_function":
            segments = cells["packed_sequence_mask"]
        elif name != "bidirectional_mask_function":
            return None
    return _Pattern(is_causal=is_causal, left=left, right=right, segments=segments)


_plain_pattern_of = lru_cache(maxsize=_KEPT)(_pattern_of)
"""The same of functions without captured values."""


def _leaves(function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the (maker, captured values) of each function in an intersection; None if unknown."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    name = function.__qualname__.split(".", 1)[0]
    names = function.__code__.co_freevars
    cells = dict(
        zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )
    if name == "and_masks":
        nested = [_leaves(inner) for inner in cells["mask_functions"]]
    elif name == "remap_positions_for_packed_sequence":
        # Positions count from each sequence's start: within a sequence differences are the same.
        nested = [_leaves(cells["mask_function"])]
    else:
        return [(name, cells)]
    if any(part is None for part in nested):
        return None
    return [leaf for part in nested if part is not None for leaf in part]


def _narrower(one: int, other: int) -> int:
    """Return the smaller of two reaches, -1 being unlimited."""
    return other if one == UNLIMITED else min(one, other)


def _num_keys(pattern: _Pattern, request: Mapping[str, Any]) -> int | None:
    """Return how many keys a pattern in rows and columns shows, or None where it is none there."""
    len_q, len_k = request["q_length"], request["kv_length"]
    offset = request.get("q_offset", 0)
    if isinstance(offset, torch.Tensor):
        if len_q == 1 or not _is_readable(offset):  # it would stop the device once a token
            return None
        offset = int(offset)
    # Key position of the first query, counted from the first key that there is.
    first = offset - request.get("kv_offset", 0)
    num_keys: int = first + len_q if pattern.is_causal else len_k
    if first < 0 or num_keys > len_k:
        return None
    if not pattern.is_causal and first + len_q != len_k:
        is_limited = pattern.left != UNLIMITED or pattern.right != UNLIMITED
        if is_limited or pattern.segments is not None:
            return None
    segments = pattern.segments
    if segments is not None and (segments.shape != (1, len_q) or num_keys != len_q):
        return None
    return num_keys if segments is None or _is_readable(segments) else None


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has numbers; not on device meta, nor in a `FakeTensorMode`."""
    return not (tensor.is_meta or is_fake(tensor))


def _structure(pattern: _Pattern, num_keys: int) -> MaskStructure:
    """Return the pattern in terms of rows and columns."""
    left = pattern.left if pattern.left < num_keys - 1 else UNLIMITED
    right = pattern.right if pattern.right < num_keys - 1 else UNLIMITED
    if pattern.segments is None:
        return _unpacked(pattern.is_causal, (left, right), num_keys)
    starts = _starts_of(pattern.segments[0])
    return MaskStructure(
        is_causal=pattern.is_causal, window=(left, right), num_keys=num_keys, starts=starts
    )


@lru_cache(maxsize=1024)
def _unpacked(is_causal: bool, window: tuple[int, int], num_keys: int) -> MaskStructure:
    """Return the one structure of these facts, by which a layer knows a call again."""
    return MaskStructure(is_causal=is_causal, window=window, num_keys=num_keys)


def _starts_of(segments: torch.Tensor) -> torch.Tensor:
    """Return where the numbers of packed sequences change, and both ends: int32 [N + 1]."""
    starts = torch.nonzero(torch.diff(segments)).flatten() + 1
    ends = (starts.new_zeros(1), starts, starts.new_full((1,), segments.shape[0]))
    return torch.cat(ends).to(torch.int32)


def _is_padded(num_keys: int, request: Mapping[str, Any]) -> bool:
    """Return whether a key that is shown is padding, or may be. Reads the device once."""
    padding = request.get("attention_mask")
    if padding is None:
        return False
    start = request.get("kv_offset", 0)
    visible = padding[:, start : start + num_keys]
    return visible.shape[-1] < num_keys or not (_is_readable(visible) and bool(visible.all()))


def _may_skip(pattern: _Pattern, num_keys: int, request: Mapping[str, Any]) -> bool:
    """Return whether one query sees every key, and no layer knows a window that hides some."""
    if num_keys != request["kv_length"] or pattern.segments is not None:
        return False
    if -1 < pattern.left < num_keys - 1 or -1 < pattern.right < num_keys - 1:
        return False
    allowed = "allow_is_causal_skip" if pattern.is_causal else "allow_is_bidirectional_skip"
    if not request.get(allowed, True):
        return False
    # Some layers pass the window on although their mask shows all keys; None would let it act.
    window = getattr(request.get("config"), "sliding_window", None)
    return not (isinstance(window, int) and window < num_keys)
