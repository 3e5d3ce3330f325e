"""Masks of rectangular tiles that follow from positions alone, kept between calls.

A caller of SDPA makes such a mask once and passes it to each call; so does this. 64 MiB of them
are kept on a CPU, a 32nd of its memory on a GPU; the least recently used go first. Nothing is kept
of what a trace, a transform, a CUDA graph or another stream could see.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import torch

from adaattn.backends.common import visible_tile
from adaattn.backends.masks import aligned_bias, may_keep, stream_of
from adaattn.spec import AttentionProblem

__all__ = [
    "CPU_BYTES",
    "forget",
    "identity",
    "kept",
    "made_tile",
    "most_bytes",
    "seen_tile",
    "tile_key",
]

_KEPT_TILES: Final = 64
CPU_BYTES: Final = 64 << 20
_GPU_SHARE: Final = 32
_SMALL_BYTES: Final = 1 << 16
"""Tensors that a tile is made from, and which it keeps alive, are no larger."""

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

    if not may_keep(query):
        return make()
    return kept((tile_key(problem, rows, cols, query, dtype), stream_of(query)), make)


def identity(tensors: tuple[torch.Tensor, ...]) -> tuple[object, object] | None:
    """Return (what tells the numbers of small tensors that the host cannot read, whom to keep).

    The owners are to be kept beside what is made, so that their identities are not reused. None
    where nothing may be kept. A write that PyTorch does not count is missed; see `kept_beside`.
    """
    owners = [tensor if tensor._base is None else tensor._base for tensor in tensors]
    if any(own.is_inference() or own.untyped_storage().nbytes() > _SMALL_BYTES for own in owners):
        return None
    places = [
        (id(own), own._version, tensor.data_ptr(), tensor.shape, tensor.stride())
        for own, tensor in zip(owners, tensors, strict=True)
    ]
    return tuple(places), owners


def tile_key(
    problem: AttentionProblem, rows: range, cols: range, query: torch.Tensor, dtype: torch.dtype
) -> tuple[object, ...]:
    """Return what a tile depends on of positions, dtype and device; its stream comes beside it."""
    first = rows.start + problem.offset - cols.start
    right = 0 if problem.is_causal else problem.window[1]
    pattern = (first, len(rows), len(cols), problem.window[0], right, problem.dilation)
    return (*pattern, dtype, query.device)


def kept(key: object, make: Callable[[], torch.Tensor], owner: object = None) -> torch.Tensor:
    """Return the tile of a key that was made before, or make and keep it.

    Args:
        key: everything that it depends on, on a GPU the stream too.
        make: makes it.
        owner: kept beside it, so that its identity in the key is not reused.
    """
    with _LOCK:
        known = _TILES.get(key)
        if known is not None:
            _TILES.move_to_end(key)
            return known[0]
    # Leaving inference mode would turn gradients on: a kept tile has no graph.
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    limit = most_bytes(made.device)
    if made.nbytes > limit or type(made) is not torch.Tensor:  # a mode's, a fake one for instance
        return made
    with _LOCK:
        _TILES[key] = (made, owner)
        while len(_TILES) > _KEPT_TILES:
            _TILES.popitem(last=False)
        sizes = {key: _TILES[key][0].nbytes for key in _keys_on(made.device)}
        held = sum(sizes.values())
        for oldest, size in sizes.items():
            if held <= limit:
                break
            del _TILES[oldest]
            held -= size
    return made


def _keys_on(device: torch.device) -> list[object]:
    """Return the keys of the tiles on a device, the least recently used first."""
    return [key for key, (tile, _) in _TILES.items() if tile.device == device]


def forget(device: torch.device) -> None:
    """Drop the tiles of a device, whose memory is wanted."""
    with _LOCK:
        for key in _keys_on(device):
            del _TILES[key]


def most_bytes(device: torch.device) -> int:
    """Return the bytes of tiles that are kept on a device.

    Args:
        device: a CPU, or a GPU, whose memory is asked.
    """
    if device.type != "cuda":
        return CPU_BYTES
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total // _GPU_SHARE


def made_tile(
    problem: AttentionProblem, rows: range, cols: range, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the mask of one tile by position alone, newly made."""
    numbers = torch.arange(rows.start, rows.stop, device=device)
    keys = torch.arange(cols.start, cols.stop, device=device)
    visible = visible_tile(problem, numbers, keys)
    assert visible is not None
    return visible if dtype == torch.bool else aligned_bias(visible, dtype)
