"""Lists of the blocks that a boolean mask shows at all, made once for a mask."""

from math import gcd
from typing import Final

import torch

from adaattn.backends.device.launch import Launch
from adaattn.backends.masks import as_bytes, kept_beside, with_rank

__all__ = ["Lists", "listed_blocks"]

Lists = tuple[torch.Tensor, torch.Tensor]
"""Counts int32 [B or 1, 1, blocks], and numbers of blocks int32 [B or 1, 1, blocks, most]."""

_AT_ONCE: Final = 256
_WARPS: Final = 8
_ALIGNMENT: Final = 16


def listed_blocks(
    mask: torch.Tensor, lines: int, others: int, *, by_columns: bool = False
) -> Lists:
    """Return which blocks of others each block of lines sees, the numbers rising.

    They are kept while the mask lives and is not written to; see `kept_beside`.

    Args:
        mask: boolean [Sq, Sk] or [B or 1, 1, Sq, Sk].
        lines: of a block; lines are query rows.
        others: of a block; others are keys.
        by_columns: lines are keys, and others rows.
    """
    # What is kept belongs to the tensor that the caller holds, not to a view of this call.
    given = mask if mask._base is None else mask._base
    facts = ("lists", mask.data_ptr(), mask.shape, mask.stride(), lines, others, by_columns)

    def make() -> Lists:
        return _made(with_rank(mask, 4), lines, others, by_columns=by_columns)

    return kept_beside(given, facts, make)


def _made(mask: torch.Tensor, lines: int, others: int, *, by_columns: bool) -> Lists:
    """Return the lists of a mask [B or 1, 1, Sq, Sk]."""
    sequences, _, *sizes = mask.shape
    num_lines, num_others = reversed(sizes) if by_columns else sizes
    blocks, width = -(-num_lines // lines), -(-num_others // others)
    counts = mask.new_empty((sequences, 1, blocks), dtype=torch.int32)
    indices = mask.new_empty((sequences, 1, blocks, width), dtype=torch.int32)
    stride_b, _, stride_m, stride_n = mask.stride()
    launch = Launch(
        module="device.listing",
        name="list_blocks",
        grid=(blocks, sequences, 1),
        numbers=(stride_b, stride_m, stride_n, num_lines, num_others, width),
        constants=(
            *(lines, others, max(_AT_ONCE, others)),
            *(not by_columns, stride_n == 1, gcd(_ALIGNMENT, stride_b, stride_m)),
        ),
        options=(("num_warps", _WARPS),),
    )
    launch(as_bytes(mask), counts, indices)
    return counts, indices
