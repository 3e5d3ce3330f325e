"""Device functions for lists of blocks: which of a tile's listed blocks need a mask, and where.

Numbers of a list that nobody has checked never lead outside of the tensors: they are clamped.
"""

import triton
import triton.language as tl

__all__ = ["dropped_share", "is_listed", "listed_ranges", "listed_start"]

_AT_ONCE = tl.constexpr(128)


@triton.jit
def _number(list_ptr, place, is_dense):
    """Return the block at a place of the list, the place itself where all blocks are seen."""
    listed = tl.load(list_ptr + place, mask=is_dense == 0, other=0)
    return tl.where(is_dense, place, tl.maximum(listed, 0))


@triton.jit
def listed_ranges(
    list_ptr,
    num_listed,
    is_dense,
    low,
    whole_low,
    whole_high,
    high,
    LIST_KEYS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Return the pieces of a tile's listed blocks: those that need a mask, and those that do not.

    Args:
        list_ptr: int32, the tile's listed blocks, ascending.
        num_listed: how many.
        is_dense: all blocks are seen, and the list is not looked at.
        low: first key that any row of the tile sees.
        whole_low: first key from which on all rows do.
        whole_high: one behind the last key that all rows see.
        high: one behind the last key that any row sees.
        LIST_KEYS: keys of a block.
        PIECES: tiles of keys in a block.

    Returns:
        (first piece, number of masked pieces from there, number of whole ones behind them, number
        of masked ones at the end).
    """
    behind = 0
    early = 0
    whole_end = 0
    end = 0
    for start in range(0, num_listed, _AT_ONCE):
        places = start + tl.arange(0, _AT_ONCE)
        inside = places < num_listed
        blocks = tl.maximum(tl.load(list_ptr + places, mask=inside & (is_dense == 0), other=0), 0)
        first = tl.where(is_dense, places, blocks) * LIST_KEYS
        behind += tl.sum((inside & (first + LIST_KEYS <= low)).to(tl.int32), 0)
        early += tl.sum((inside & (first < whole_low)).to(tl.int32), 0)
        whole_end += tl.sum((inside & (first + LIST_KEYS <= whole_high)).to(tl.int32), 0)
        end += tl.sum((inside & (first < high)).to(tl.int32), 0)
    early = tl.minimum(tl.maximum(early, behind), tl.maximum(end, behind))
    whole_end = tl.minimum(tl.maximum(whole_end, early), tl.maximum(end, early))
    after = tl.maximum(end - whole_end, 0)
    return (
        behind * PIECES,
        (early - behind) * PIECES,
        (whole_end - early) * PIECES,
        after * PIECES,
    )


@triton.jit
def listed_start(
    list_ptr, piece, is_dense, last_block, LIST_KEYS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the first key of a piece of the list.

    Args:
        list_ptr: int32, the tile's listed blocks.
        piece: number of BLOCK_N keys among the listed ones.
        is_dense: all blocks are seen.
        last_block: the last block that may be read.
        LIST_KEYS: keys of a block.
        BLOCK_N: keys of a piece.
    """
    pieces: tl.constexpr = LIST_KEYS // BLOCK_N
    block = tl.minimum(_number(list_ptr, piece // pieces, is_dense), last_block)
    return tl.maximum(block, 0) * LIST_KEYS + piece % pieces * BLOCK_N


@triton.jit
def is_listed(list_ptr, place, num_listed, is_dense, block):
    """Return (whether a block is listed, the place to look from for the one behind it).

    Args:
        list_ptr: int32, the tile's listed blocks, ascending.
        place: of the first listed block that is not before the one asked for last.
        num_listed: how many.
        is_dense: all blocks are seen.
        block: the one asked for: that of the last time, or the next.
    """
    is_there = (place < num_listed) & (is_dense == 0)
    found = tl.load(list_ptr + place, mask=is_there, other=0)
    place += (is_there & (found < block)).to(tl.int32)
    is_there = (place < num_listed) & (is_dense == 0)
    found = tl.load(list_ptr + place, mask=is_there, other=-1)
    return is_dense | (found == block), place


@triton.jit
def dropped_share(dropped_max, dropped_sum, kept_max, kept_sum):
    """Return dropped / (dropped + kept) of two sums in units of exp2 of their references."""
    has_any = dropped_sum > 0.0
    kept = tl.where(kept_sum > 0.0, kept_sum * tl.exp2(kept_max - dropped_max), 0.0)
    return tl.where(has_any, 1.0 / (1.0 + kept / tl.where(has_any, dropped_sum, 1.0)), 0.0)
