"""What is made once of a boolean mask: lists of blocks that it shows at all, and packed tiles."""

from collections.abc import Callable
from math import gcd
from typing import Any, Final, NamedTuple, TypeVar

import torch

from adaattn.backends.allocation import unfilled
from adaattn.backends.device.launch import Launch
from adaattn.backends.masks import as_bytes, kept_beside, with_rank

__all__ = ["Tiles", "packed_tiles", "turns_of"]

_T = TypeVar("_T", bound=torch.Tensor | tuple[torch.Tensor, ...])


class Tiles(NamedTuple):
    """A mask as kernels read it.

    Args:
        words: its bits: int32 [B or 1, Hq or 1, tiles of lines, 128 x tiles of a line], ordered as
            by `pack_tiles`; or a mask that is read as it is; None without one.
        counts: int32 [B or 1, 1, blocks], how many tiles or blocks of others are seen by blocks of
            lines; None without lists.
        indices: int32 [B or 1, 1, blocks, most], their numbers; likewise.
        sees: int8 [B or 1, blocks, lines of one], whether each line sees anything; likewise.
    """

    words: torch.Tensor | None
    counts: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    sees: torch.Tensor | None = None


_TILE: Final = 64
_AT_ONCE: Final = 16
"""Tiles of a line that are looked at together."""

_WORDS: Final = 128
_ALIGNMENT: Final = 16
_MOST_KEPT: Final = 4
"""Of a kind, of one tensor: views of it are masks of their own."""


def packed_tiles(
    mask: torch.Tensor, block: tuple[int, int] | None, *, by_columns: bool = False
) -> Tiles:
    """Return a mask's packed tiles, and which blocks of others each block of lines sees.

    Args:
        mask: boolean [Sq, Sk] or [B or 1, Hq or 1, Sq, Sk]; where it is listed one for all heads.
        block: lines and others of a block, multiples of 64; None lists none.
        by_columns: its columns are lines, and its rows the others; else the other way round.
    """
    return Tiles(*_kept(mask, ("tiles", by_columns, block), _tiles, by_columns, block))


def _tiles(
    mask: torch.Tensor, by_columns: bool, block: tuple[int, int] | None
) -> tuple[torch.Tensor, ...]:
    """Return what `Tiles` has, of a mask as `_own`."""
    # Both passes, and blocks of any size, read the same words.
    words = _kept(mask, ("words", by_columns), _packed, by_columns)
    return (words,) if block is None else (words, *_listed(words, *block))


def turns_of(mask: torch.Tensor, tiles: Tiles, block: tuple[int, int]) -> torch.Tensor:
    """Return whom a block of keys waits for at each tile of rows, where sums have a fixed order.

    That is the last block before it that visits the tile, counted from 1, 0 where there is none:
    int32 [B or 1, 1, blocks, tiles]. A block visits what is between the first and the last tile
    that it sees, the first of all where it sees none.

    Args:
        mask: as in `packed_tiles`.
        tiles: of its columns, with lists.
        block: keys and rows of those.
    """
    return _kept(mask, ("turns", block), lambda own: _turns(tiles))


def _turns(tiles: Tiles) -> torch.Tensor:
    """Return `turns_of` a mask."""
    _, counts, indices, _ = tiles
    assert counts is not None and indices is not None
    blocks, width = indices.shape[2:]
    places = torch.arange(width, device=indices.device)
    last = indices.gather(-1, (counts - 1).clamp_min(0)[..., None].long())
    first, last = (where * (counts > 0)[..., None] for where in (indices[..., :1], last))
    visited = (places >= first) & (places <= last)
    numbers = torch.arange(1, blocks + 1, device=indices.device)[:, None]
    found = (visited * numbers).cummax(2).values
    return torch.nn.functional.pad(found, (0, 0, 1, 0))[:, :, :-1].int().contiguous()


def _kept(mask: torch.Tensor, what: tuple[object, ...], make: Callable[..., _T], *rest: Any) -> _T:
    """Return what is made of a mask, kept while it lives and is not written to: `kept_beside`."""
    # It belongs to the tensor that the caller holds, not to a view of this call.
    given = mask if mask._base is None else mask._base
    facts = (what, mask.data_ptr(), mask.shape, mask.stride())
    return kept_beside(given, facts, lambda: make(_own(mask), *rest), most=_MOST_KEPT)


def _own(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask [B or 1, Hq or 1, Sq, Sk]; of an expanded one what it was expanded from."""
    mask = with_rank(mask, 4)
    mask = mask[:1] if mask.stride(0) == 0 else mask
    return mask[:, :1] if mask.stride(1) == 0 else mask


def _listed(words: torch.Tensor, lines: int, others: int) -> tuple[torch.Tensor, ...]:
    """Return counts, indices and what sees anything, as in `Tiles`, of packed tiles of one head."""
    sequences, _, line_tiles, columns = words.shape
    other_tiles = columns // _WORDS
    of_line, of_other = lines // _TILE, others // _TILE
    blocks, width = -(-line_tiles // of_line), -(-other_tiles // of_other)
    counts = unfilled(words, (sequences, 1, blocks))
    indices = unfilled(words, (sequences, 1, blocks, width))
    sees = unfilled(words, (sequences, blocks, lines), dtype=torch.int8)
    launch = Launch(
        module="device.mask_tiles",
        name="list_blocks",
        grid=(blocks * sequences, 1, 1),
        numbers=(line_tiles, other_tiles, width),
        constants=(of_line, of_other, _AT_ONCE),
        options=(("num_warps", 8),),
    )
    launch(words, counts, indices, sees)
    return counts, indices, sees


def _packed(mask: torch.Tensor, by_columns: bool) -> torch.Tensor:
    """Return the words of a mask as `_own`; `mask_tiles.pack_tiles` says how they are ordered."""
    planes, lengths = mask.shape[:2], mask.shape[2:]
    lines, others = (-(-length // _TILE) for length in lengths[:: -1 if by_columns else 1])
    words = unfilled(mask, (*planes, lines, others * _WORDS), dtype=torch.int32)
    stride_b, stride_h, stride_m, stride_n = mask.stride()
    aligned = gcd(_ALIGNMENT, stride_b, stride_h, stride_m, lengths[1])
    launch = Launch(
        module="device.mask_tiles",
        name="pack_tiles",
        grid=(lines * others * planes.numel(), 1, 1),
        numbers=(stride_b, stride_m, stride_n, *lengths, stride_h, planes[1]),
        constants=(not by_columns, stride_n == 1, aligned),
        options=(("num_warps", 4),),
    )
    launch(as_bytes(mask), words)
    return words
