"""A boolean mask read once, on the device, for kernels that read it for each head.

A caller's mask is mostly a pattern: causal order beside padding, documents, a window. Its tiles are
packed, a bit for each score, as the threads of a warpgroup hold a tile of scores; and of what is
packed, blocks in which anything is seen are listed, since the others need not be computed.
"""

import triton
import triton.language as tl

__all__ = ["list_blocks", "pack_tiles"]

_TILE = tl.constexpr(64)
_THREADS = tl.constexpr(128)
_UPPER = tl.constexpr(0x33333333)
"""Bits of the first of the two rows of a thread."""


@triton.jit(do_not_specialize=("line_tiles", "other_tiles", "width"))
def list_blocks(
    words_ptr,
    counts_ptr,
    indices_ptr,
    sees_ptr,
    line_tiles,
    other_tiles,
    width,
    LINES: tl.constexpr,
    OTHERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """List the blocks in which a block of lines sees anything, in rising order.

    Lines are the mask's rows and others its columns, or the other way round. One program for each
    block of lines and sequence.

    Args:
        words_ptr: int32 [B, tiles of lines, tiles of others, 128], of `pack_tiles`.
        counts_ptr: int32 [B, blocks of lines], how many are listed.
        indices_ptr: int32 [B, blocks of lines, width], their numbers.
        sees_ptr: int8 [B, blocks of lines, 64 x LINES], whether each line sees anything.
        line_tiles: how many tiles of lines there are.
        other_tiles: how many of others.
        width: of a list.
        LINES: tiles of a block.
        OTHERS: tiles of a block.
        AT_ONCE: tiles of others that are read at once, a multiple of ``OTHERS``.
    """
    list_number = tl.program_id(0)
    blocks = tl.cdiv(line_tiles, LINES)
    sequence = list_number // blocks
    tiles = list_number % blocks * LINES + tl.arange(0, LINES)
    lines = (sequence * line_tiles + tiles).to(tl.int64) * other_tiles
    places = tl.arange(0, AT_ONCE * _THREADS)
    listed_ptr = indices_ptr + list_number.to(tl.int64) * width
    count = 0
    seen = tl.zeros([LINES, AT_ONCE * _THREADS], tl.int32)
    for first in range(0, other_tiles, AT_ONCE):
        others = first + places // _THREADS
        is_there = (tiles < line_tiles)[:, None] & (others < other_tiles)[None, :]
        at = (lines + first)[:, None] * _THREADS + places[None, :]
        words = tl.load(words_ptr + at, mask=is_there, other=0)
        seen |= words
        any_seen = tl.max((words != 0).to(tl.int32), 0)
        found = tl.max(tl.reshape(any_seen, (AT_ONCE // OTHERS, OTHERS * _THREADS)), 1)
        numbers = first // OTHERS + tl.arange(0, AT_ONCE // OTHERS)
        tl.store(listed_ptr + count + tl.cumsum(found, 0) - 1, numbers, mask=found != 0)
        count += tl.sum(found, 0)
    tl.store(counts_ptr + list_number, count)
    of_lines = tl.arange(0, LINES)[:, None, None] * _TILE
    of_lines += tl.arange(0, 4)[None, :, None] * 16 + tl.arange(0, 8)[None, None, :]
    of_lines += list_number.to(tl.int64) * (LINES * _TILE)
    for half in tl.static_range(2):
        bits = ((seen >> (2 * half) & _UPPER) != 0).to(tl.int8)
        # Tiles of others, and the four threads of a row, are the same line.
        of_tiles = tl.max(tl.reshape(bits, (LINES, AT_ONCE, 4, 8, 4)), 4)
        tl.store(sees_ptr + of_lines + half * 8, tl.max(of_tiles, 1))


@triton.jit(
    do_not_specialize=(
        *("stride_b", "stride_m", "stride_n", "num_rows", "num_columns", "stride_h", "num_heads"),
    )
)
def pack_tiles(
    mask_ptr,
    words_ptr,
    stride_b,
    stride_m,
    stride_n,
    num_rows,
    num_columns,
    stride_h,
    num_heads,
    BY_ROWS: tl.constexpr,
    IS_DENSE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Pack a tile of 64 x 64: a word for each thread of a warpgroup, with its 32 scores.

    As products leave them, thread 32 w + 4 r + q has the lines 16 w + 8 h + r and the others
    8 j + 2 q + e of a tile: bit 4 j + 2 h + e. One program for each tile, head and sequence.

    Args:
        mask_ptr: bytes, 0 where a key is hidden, [B, H, rows, columns]; behind the last row and
            column nothing is seen.
        words_ptr: int32 [B, H, tiles of lines, tiles of others, 128].
        stride_b: of the mask, and so the two that follow.
        stride_m: from row to row.
        stride_n: from column to column.
        num_rows: of the mask.
        num_columns: likewise.
        stride_h: of the mask, from head to head.
        num_heads: of the mask.
        BY_ROWS: lines are the mask's rows, and others its columns; else the other way round.
        IS_DENSE: columns are adjacent.
        ALIGNMENT: what the columns, and the mask's strides but the last, are multiples of.
    """
    num_columns = num_columns // ALIGNMENT * ALIGNMENT  # so many are there or not together
    down = tl.cdiv(num_rows, _TILE)
    across = tl.cdiv(num_columns, _TILE)
    plane = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    others = across if BY_ROWS else down
    line = tile // others
    other = tile % others
    in_rows = tl.arange(0, _TILE)
    in_columns = tl.arange(0, _TILE)
    rows = (line if BY_ROWS else other) * _TILE + in_rows
    columns = (other if BY_ROWS else line) * _TILE + in_columns
    start_ptr = mask_ptr + plane // num_heads * tl.multiple_of(stride_b.to(tl.int64), ALIGNMENT)
    start_ptr += plane % num_heads * tl.multiple_of(stride_h.to(tl.int64), ALIGNMENT)
    start_ptr += rows[:, None] * tl.multiple_of(stride_m.to(tl.int64), ALIGNMENT)
    places = columns if IS_DENSE else columns * stride_n.to(tl.int64)
    is_there = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    seen = (tl.load(start_ptr + places[None, :], mask=is_there, other=0) != 0).to(tl.int32)
    words_ptr += tl.program_id(0).to(tl.int64) * _THREADS
    threads = tl.arange(0, _THREADS)
    # Each sum takes the bits of a word together along one part of a line's or other's number.
    if BY_ROWS:
        bits = (in_rows // 8 % 2 * 2)[:, None] + (in_columns // 8 * 4 + in_columns % 2)[None, :]
        parts = tl.reshape(seen << bits, (4, 2, 8, 8, 4, 2))
        words = tl.sum(tl.sum(tl.sum(parts, 5), 3), 1)  # warp, row, quarter
        tl.store(words_ptr + threads, tl.reshape(words, (_THREADS,)))
    else:
        bits = (in_rows // 8 * 4 + in_rows % 2)[:, None] + (in_columns // 8 % 2 * 2)[None, :]
        parts = tl.reshape(seen << bits, (8, 4, 2, 4, 2, 8))
        words = tl.sum(tl.sum(tl.sum(parts, 4), 2), 0)  # quarter, warp, row
        places = threads % 32 * 4 + threads // 32
        tl.store(words_ptr + places, tl.reshape(words, (_THREADS,)))
