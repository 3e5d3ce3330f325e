"""What is made once of a boolean mask: lists of blocks that it shows at all, and packed tiles."""

from collections.abc import Callable
from math import gcd
from typing import Any, Final, NamedTuple, TypeVar

import torch

from adaattn.backends.device.launch import Launch
from adaattn.backends.hopper.gradient_launch import ROW_BLOCK, SPLIT_TILE
from adaattn.backends.hopper.launch import MASK_BLOCK
from adaattn.backends.masks import as_bytes, kept_beside, with_rank

__all__ = ["Lists", "Tiles", "tiles_both_ways", "tiles_of_rows"]

_T = TypeVar("_T", bound=torch.Tensor | tuple[torch.Tensor, ...])

Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Counts int32 [B or 1, 1, blocks], numbers of blocks int32 [B or 1, 1, blocks, most], and whether
each line sees anything, int8 [B or 1, blocks, lines of one]: unfilled where lines are columns."""


class Tiles(NamedTuple):
    """A mask as kernels read it.

    Args:
        words: its bits: int32 [B or 1, Hq or 1, tiles of lines, 128 x tiles of a line], ordered as
            by `pack_tiles`.
        counts: int32 [B or 1, 1, blocks], how many tiles or blocks of others are seen by blocks of
            lines; None without lists.
        indices: int32 [B or 1, 1, blocks, most], their numbers; likewise.
        sees: int8 [B or 1, blocks, lines of one], whether each row sees anything; likewise.
    """

    words: torch.Tensor
    counts: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    sees: torch.Tensor | None = None


_AT_ONCE: Final = 256
_WORDS: Final = 128
_ALIGNMENT: Final = 16
_MOST_KEPT: Final = 4
"""Of a kind, of one tensor: views of it are masks of their own."""


def tiles_of_rows(mask: torch.Tensor) -> Tiles:
    """Return a mask's packed tiles, and which blocks of keys each block of query rows sees.

    Args:
        mask: boolean [Sq, Sk] or [B or 1, 1, Sq, Sk]; its blocks are of `MASK_BLOCK`.
    """
    return Tiles(*_kept(mask, ("rows",), _of_rows))


def tiles_both_ways(mask: torch.Tensor, *, has_lists: bool) -> tuple[Tiles, Tiles]:
    """Return a mask's packed tiles turned, with keys in lines, and as they are.

    Args:
        mask: boolean [Sq, Sk] or [B or 1, Hq or 1, Sq, Sk]; where it is listed one for all heads.
        has_lists: tiles that are seen are listed too: by tiles of keys, and by `ROW_BLOCK` rows.
    """
    found = _kept(mask, ("tiles", has_lists), _both_ways, has_lists)
    half = len(found) // 2
    return Tiles(*found[:half]), Tiles(*found[half:])


def _of_rows(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what `Tiles` of the forward pass have."""
    return _words(mask), *_listed(mask, *MASK_BLOCK, False)


def _both_ways(mask: torch.Tensor, has_lists: bool) -> tuple[torch.Tensor, ...]:
    """Return what both `Tiles` have, one after the other."""
    turned, straight = _packed(mask, True), _words(mask)
    if not has_lists:
        return turned, straight
    of_keys = _listed(mask, SPLIT_TILE, SPLIT_TILE, True)
    return turned, *of_keys, straight, *_listed(mask, ROW_BLOCK, SPLIT_TILE, False)


def _words(mask: torch.Tensor) -> torch.Tensor:
    """Return the words of a mask as `_own`, with rows in lines: both passes read them."""
    return _kept(mask, ("words",), _packed, False)


def _kept(mask: torch.Tensor, what: tuple[object, ...], make: Callable[..., _T], *rest: Any) -> _T:
    """Return what is made of a mask, kept while it lives and is not written to: `kept_beside`."""
    # It belongs to the tensor that the caller holds, not to a view of this call.
    given = mask if mask._base is None else mask._base
    facts = (*what, mask.data_ptr(), mask.shape, mask.stride())
    return kept_beside(given, facts, lambda: make(_own(mask), *rest), most=_MOST_KEPT)


def _own(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask [B or 1, Hq or 1, Sq, Sk]; of an expanded one what it was expanded from."""
    mask = with_rank(mask, 4)
    mask = mask[:1] if mask.stride(0) == 0 else mask
    return mask[:, :1] if mask.stride(1) == 0 else mask


def _listed(mask: torch.Tensor, lines: int, others: int, by_columns: bool) -> Lists:
    """Return the lists of a mask as `_own`."""
    sequences, num_lines, num_others = mask.shape[0], *_lengths(mask, by_columns)
    blocks, width = -(-num_lines // lines), -(-num_others // others)
    counts = mask.new_empty((sequences, 1, blocks), dtype=torch.int32)
    indices = mask.new_empty((sequences, 1, blocks, width), dtype=torch.int32)
    sees = mask.new_empty((sequences, blocks, lines), dtype=torch.int8)
    numbers = (num_lines, num_others, width)
    constants = (lines, others, max(_AT_ONCE, others))
    made = counts, indices, sees
    _launch("list_blocks", blocks * sequences, mask, made, numbers, constants,
            by_columns=by_columns, warps=8)  # fmt: skip
    return made


def _packed(mask: torch.Tensor, by_columns: bool) -> torch.Tensor:
    """Return the words of a mask as `_own`; `mask_tiles.pack_tiles` says how they are ordered."""
    planes = mask.shape[:2]
    lines, others = (-(-length // SPLIT_TILE) for length in _lengths(mask, by_columns))
    words = mask.new_empty((*planes, lines, others * _WORDS), dtype=torch.int32)
    numbers = (*mask.shape[2:], mask.stride(1), planes[1])
    _launch("pack_tiles", lines * others * planes.numel(), mask, (words,), numbers, (),
            by_columns=by_columns, warps=4)  # fmt: skip
    return words


def _lengths(mask: torch.Tensor, by_columns: bool) -> tuple[int, int]:
    """Return how many lines a mask has, and how many others."""
    rows, columns = mask.shape[2:]
    return (columns, rows) if by_columns else (rows, columns)


def _launch(
    name: str,
    programs: int,
    mask: torch.Tensor,
    made: tuple[torch.Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
    *,
    by_columns: bool,
    warps: int,
) -> None:
    """Launch a function of `mask_tiles` over a mask as `_own`."""
    stride_b, _, stride_m, stride_n = mask.stride()
    lying = (not by_columns, stride_n == 1, gcd(_ALIGNMENT, *mask.stride()[:3]))
    launch = Launch(
        module="device.mask_tiles",
        name=name,
        grid=(programs, 1, 1),
        numbers=(stride_b, stride_m, stride_n, *numbers),
        constants=(*constants, *lying),
        options=(("num_warps", warps),),
    )
    launch(as_bytes(mask), *made)
