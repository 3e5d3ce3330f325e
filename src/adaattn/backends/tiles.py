"""Masks of rectangular tiles that follow from positions alone, kept between calls.

A caller of SDPA makes such a mask once and passes it to each call; so does this. 64 MiB of them
are kept in all, the least recently used go first. Nothing is kept of what a trace, a transform, a
CUDA graph or another stream could see.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import torch

from adaattn.backends.common import visible_tile
from adaattn.backends.masks import additive_mask, may_keep
from adaattn.spec import AttentionProblem

__all__ = ["kept", "kept_tile", "made_tile", "seen_tile", "tile_key"]

_KEPT_TILES: Final = 64
_KEPT_BYTES: Final = 64 << 20

_TILES: OrderedDict[object, tuple[torch.Tensor, object]] = OrderedDict()
_LOCK: Final = threading.Lock()


def seen_tile(
    problem: AttentionProblem, rows: range, cols: range, query: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return which keys position lets some rows see: [R, C], kept for calls like this one.

    Args:
        problem: one whose positions hide something.
        rows: the query rows.
        cols: the keys.
        query: tells the device, and whether this call may keep anything.
        dtype: boolean, or a floating-point dtype for what is added to the scores.
    """

    def make() -> torch.Tensor:
        return made_tile(problem, rows, cols, query.device, dtype)

    return kept_tile((), problem, rows, cols, query, dtype, make) if may_keep(query) else make()


def kept_tile(
    more: tuple[object, ...],
    problem: AttentionProblem,
    rows: range,
    cols: range,
    query: torch.Tensor,
    dtype: torch.dtype,
    make: Callable[[], torch.Tensor],
    owner: object = None,
) -> torch.Tensor:
    """Return a tile that was made before for the same positions, or make and keep it.

    Args:
        more: what it depends on beside positions.
        problem: says how positions hide keys.
        rows: the query rows.
        cols: the keys.
        query: tells the device.
        dtype: of the tile.
        make: makes it.
        owner: kept beside it, so that its identity in ``more`` is not reused.
    """
    return kept((more, tile_key(problem, rows, cols, query, dtype)), make, owner)


def tile_key(
    problem: AttentionProblem, rows: range, cols: range, query: torch.Tensor, dtype: torch.dtype
) -> tuple[object, ...]:
    """Return what a tile depends on of positions, dtype and device."""
    stream = torch.cuda.current_stream(query.device).cuda_stream if query.is_cuda else 0
    first = rows.start + problem.offset - cols.start
    right = 0 if problem.is_causal else problem.window[1]
    pattern = (first, len(rows), len(cols), problem.window[0], right, problem.dilation)
    return (*pattern, dtype, query.device, stream)


def kept(key: object, make: Callable[[], torch.Tensor], owner: object = None) -> torch.Tensor:
    """Return the tile of a key that was made before, or make and keep it; see `kept_tile`."""
    with _LOCK:
        known = _TILES.get(key)
        if known is not None:
            _TILES.move_to_end(key)
            return known[0]
    with torch.inference_mode(False):
        made = make()
    with _LOCK:
        _TILES[key] = (made, owner)
        while len(_TILES) > _KEPT_TILES or sum(t.nbytes for t, _ in _TILES.values()) > _KEPT_BYTES:
            _TILES.popitem(last=False)
    return made


def made_tile(
    problem: AttentionProblem, rows: range, cols: range, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the mask of one tile by position alone, newly made."""
    numbers = torch.arange(rows.start, rows.stop, device=device)
    keys = torch.arange(cols.start, cols.stop, device=device)
    visible = visible_tile(problem, numbers, keys)
    assert visible is not None
    mask = visible if dtype == torch.bool else additive_mask(visible, dtype)
    assert mask is not None
    return mask
