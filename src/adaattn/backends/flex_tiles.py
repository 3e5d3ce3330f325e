"""Which tiles of FlexAttention's are seen in part, and which as a whole."""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from adaattn.backends.block_list import BlockList
from adaattn.spec import AttentionProblem

__all__ = ["BLOCK", "Packing", "listed_tiles", "tiles_by_position", "written_tiles"]

BLOCK: Final = 128
"""Side of FlexAttention's blocks."""

_MASK_ELEMENTS: Final = 1 << 22
"""Decisions of a mask that are written out at once, about 20 bytes each with their distances."""


class Packing(NamedTuple):
    """Where packed sequences start, int32 [N + 1]; each token's sequence and place, int32 [T]."""

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    sequence_q: torch.Tensor
    sequence_k: torch.Tensor
    position_q: torch.Tensor
    position_k: torch.Tensor


def tiles_by_position(
    problem: AttentionProblem, device: torch.device, packing: Packing | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles are seen in part, and which as a whole: boolean [1, 1, Nq, Nk] both.

    From the edges of tiles and packed sequences alone. A tile in which several sequences meet is
    said to be seen in part, though a window may hide all of it.

    Args:
        problem: it has the lengths and what is seen by position.
        device: where the answer is.
        packing: of packed sequences.
    """
    left, right = problem.window
    right = 0 if problem.is_causal else right
    dilation = problem.dilation
    row, last_row = (item[:, None] for item in _edges(problem.len_q, device))
    key, last_key = _edges(problem.len_k, device)
    whole = (last_row - row == BLOCK - 1) & (last_key - key == BLOCK - 1)
    meet, several = torch.ones_like(whole), torch.zeros_like(whole)
    if packing is None:
        least, most = row + problem.offset - last_key, last_row + problem.offset - key
    else:
        starts_q, starts_k, sequence_q, sequence_k, position_q, position_k = packing
        whole &= sequence_q[row] == sequence_q[last_row]
        whole &= sequence_k[key] == sequence_k[last_key]
        first = torch.maximum(sequence_q[row], sequence_k[key]).long()
        last = torch.minimum(sequence_q[last_row], sequence_k[last_key])
        rows = _part(starts_q, problem.len_q, first, row, last_row)
        keys = _part(starts_k, problem.len_k, first, key, last_key)
        meet, several = first <= last, first < last
        for begin, end in (rows, keys):
            meet = meet & (begin <= end)
        (row, last_row), (key, last_key) = (
            (places[begin.clamp(max=len(places) - 1)], places[end.clamp(min=0)])
            for places, (begin, end) in ((position_q, rows), (position_k, keys))
        )
        least, most = row - last_key, last_row - key
    lowest = least.clamp(min=-right) if right >= 0 else least
    highest = most.clamp(max=left) if left >= 0 else most
    highest = highest.div(dilation, rounding_mode="floor") * dilation
    full = whole & meet & (lowest == least) & (highest == most) & (dilation == 1)
    seen = several | (meet & (lowest <= highest))
    return (seen & ~full)[None, None], full[None, None]


def _edges(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last token of each tile."""
    first = torch.arange(0, length, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=length - 1)


def _part(
    starts: torch.Tensor,
    length: int,
    sequence: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last of a tile's tokens that are a packed sequence's."""
    bounds = F.pad(starts.long(), (0, 1), value=length)
    return torch.maximum(bounds[sequence], first), torch.minimum(bounds[sequence + 1] - 1, last)


def written_tiles(
    mask_mod: Callable[..., torch.Tensor], shape: tuple[int, int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles are seen in part, and which as a whole: boolean [B, H, Nq, Nk] both.

    Some rows of tiles are written out at a time: ``create_block_mask`` writes out all Sq x Sk
    decisions at once, 8 bytes each while it sums them up: 34 GB at 64K tokens.

    Args:
        mask_mod: whether query i of batch b and head h sees key j, for index tensors.
        shape: (B, H, Sq, Sk).
        device: where the mask is made.
    """
    batch, heads, len_q, len_k = shape
    blocks_q = -(-len_q // BLOCK)
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    j = torch.arange(len_k, device=device)
    step = max(_MASK_ELEMENTS // (batch * heads * max(len_k, 1) * BLOCK), 1)
    seen, whole = [], []
    for first in range(0, blocks_q, step):
        rows = range(first * BLOCK, min((first + step) * BLOCK, len_q))
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        part = mask_mod(b, h, i, j).expand(batch, heads, len(rows), len_k)
        part = F.pad(part, (0, -len_k % BLOCK, 0, -len(rows) % BLOCK))
        tiles = part.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        counts = tiles.sum(dim=(3, 5), dtype=torch.int32)
        whole.append(counts == BLOCK * BLOCK)
        seen.append((counts > 0) & ~whole[-1])
    return torch.cat(seen, dim=2), torch.cat(whole, dim=2)


def listed_tiles(blocks: BlockList, problem: AttentionProblem) -> torch.Tensor:
    """Return which tiles are in listed blocks, which consist of whole tiles."""
    listed = blocks.to_mask(-(-problem.len_k // blocks.block_k))
    listed = listed.repeat_interleave(blocks.block_q // BLOCK, 2)
    listed = listed.repeat_interleave(blocks.block_k // BLOCK, 3)
    return listed[:, :, : -(-problem.len_q // BLOCK), : -(-problem.len_k // BLOCK)]
