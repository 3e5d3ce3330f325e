"""What is made once of a boolean mask: lists of blocks that it shows at all, and packed tiles."""

from collections.abc import Callable
from math import gcd
from typing import Any, Final, TypeVar

import torch

from adaattn.backends.device.launch import Launch
from adaattn.backends.masks import as_bytes, kept_beside, with_rank

__all__ = ["Lists", "listed_blocks", "packed_tiles"]

_T = TypeVar("_T", bound=torch.Tensor | tuple[torch.Tensor, ...])

Lists = tuple[torch.Tensor, torch.Tensor]
"""Counts int32 [B or 1, 1, blocks], and numbers of blocks int32 [B or 1, 1, blocks, most]."""

_AT_ONCE: Final = 256
_TILE: Final = 64
_WORDS: Final = 128
_ALIGNMENT: Final = 16
_MOST_KEPT: Final = 16
"""Of a kind, of one tensor: views of it are masks of their own."""


def listed_blocks(
    mask: torch.Tensor, lines: int, others: int, *, by_columns: bool = False
) -> Lists:
    """Return which blocks of others each block of lines sees, the numbers rising.

    Args:
        mask: boolean [Sq, Sk] or [B or 1, 1, Sq, Sk].
        lines: of a block; lines are query rows.
        others: of a block; others are keys.
        by_columns: lines are keys, and others rows.
    """
    return _kept(mask, (f"lists {lines} {others}", by_columns), _listed, lines, others, by_columns)


def packed_tiles(mask: torch.Tensor, *, by_columns: bool = False) -> torch.Tensor:
    """Return a mask as bits, int32 [B or 1, tiles, 128]; `mask_tiles.pack_tiles` has their order.

    Args:
        mask: as in `listed_blocks`.
        by_columns: tiles are turned: their rows are keys.
    """
    return _kept(mask, ("tiles", by_columns), _packed, by_columns)


def _kept(mask: torch.Tensor, what: tuple[object, ...], make: Callable[..., _T], *rest: Any) -> _T:
    """Return what is made of a mask, kept while it lives and is not written to: `kept_beside`."""
    # It belongs to the tensor that the caller holds, not to a view of this call.
    given = mask if mask._base is None else mask._base
    facts = (*what, mask.data_ptr(), mask.shape, mask.stride())
    return kept_beside(given, facts, lambda: make(_own(mask), *rest), most=_MOST_KEPT)


def _own(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask [B or 1, 1, Sq, Sk]; of one that is expanded over sequences that of one."""
    mask = with_rank(mask, 4)
    return mask[:1] if mask.stride(0) == 0 else mask


def _listed(mask: torch.Tensor, lines: int, others: int, by_columns: bool) -> Lists:
    """Return the lists of a mask as `_own`."""
    sequences, num_lines, num_others = _sizes(mask, by_columns)
    blocks, width = -(-num_lines // lines), -(-num_others // others)
    counts = mask.new_empty((sequences, 1, blocks), dtype=torch.int32)
    indices = mask.new_empty((sequences, 1, blocks, width), dtype=torch.int32)
    numbers = (num_lines, num_others, width)
    constants = (lines, others, max(_AT_ONCE, others))
    _launch("list_blocks", (blocks, sequences, 1), mask, (counts, indices), numbers, constants,
            by_columns=by_columns, warps=8)  # fmt: skip
    return counts, indices


def _packed(mask: torch.Tensor, by_columns: bool) -> torch.Tensor:
    """Return the tiles of a mask as `_own`."""
    sequences, *lengths = _sizes(mask, by_columns)
    lines, others = (-(-length // _TILE) for length in lengths)
    words = mask.new_empty((sequences, lines * others, _WORDS), dtype=torch.int32)
    _launch("pack_tiles", (lines, others, sequences), mask, (words,), tuple(mask.shape[2:]), (),
            by_columns=by_columns, warps=4)  # fmt: skip
    return words


def _sizes(mask: torch.Tensor, by_columns: bool) -> tuple[int, int, int]:
    """Return how many sequences a mask has, how many lines, and how many others."""
    sequences, _, rows, columns = mask.shape
    return (sequences, columns, rows) if by_columns else (sequences, rows, columns)


def _launch(
    name: str,
    grid: tuple[int, int, int],
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
    lying = (not by_columns, stride_n == 1, gcd(_ALIGNMENT, stride_b, stride_m))
    launch = Launch(
        module="device.mask_tiles",
        name=name,
        grid=grid,
        numbers=(stride_b, stride_m, stride_n, *numbers),
        constants=(*constants, *lying),
        options=(("num_warps", warps),),
    )
    launch(as_bytes(mask), *made)
