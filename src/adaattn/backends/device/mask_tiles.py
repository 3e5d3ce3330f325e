"""A boolean mask read once, on the device, for kernels that read it for each head.

A caller's mask is mostly a pattern: causal order beside padding, documents, a window. Blocks of it
in which anything is seen are listed, since the others need not be computed; and its tiles are
packed, a bit for each score, as the threads of a warpgroup hold a tile of scores.
"""

import triton
import triton.language as tl

__all__ = ["list_blocks", "pack_tiles"]

_STRIDES = ("stride_b", "stride_m", "stride_n")
_TILE = tl.constexpr(64)
_THREADS = tl.constexpr(128)
_BITS = tl.constexpr(32)


@triton.jit
def _seen(
    start_ptr, rows, columns, is_there, stride_m, stride_n, IS_DENSE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Return which pairs of rows and columns a mask shows; none where there are none."""
    places = columns if IS_DENSE else columns * stride_n.to(tl.int64)
    step_m = tl.multiple_of(stride_m.to(tl.int64), ALIGNMENT)
    return tl.load(start_ptr + rows * step_m + places, mask=is_there, other=0) != 0


@triton.jit(do_not_specialize=(*_STRIDES, "num_lines", "num_others", "width"))
def list_blocks(
    mask_ptr,
    counts_ptr,
    indices_ptr,
    sees_ptr,
    stride_b,
    stride_m,
    stride_n,
    num_lines,
    num_others,
    width,
    LINES: tl.constexpr,
    OTHERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BY_ROWS: tl.constexpr,
    IS_DENSE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """List the blocks in which a block of lines sees anything, in rising order.

    Lines are the mask's rows and others its columns, or the other way round. One program for each
    block of lines and sequence.

    Args:
        mask_ptr: bytes, 0 where a key is hidden, [B, rows, columns].
        counts_ptr: int32 [B, blocks of lines], how many are listed.
        indices_ptr: int32 [B, blocks of lines, width], their numbers.
        sees_ptr: int8 [B, blocks of lines, LINES], whether each row sees anything; of ``BY_ROWS``.
        stride_b: of the mask, and so the two that follow.
        stride_m: from row to row.
        stride_n: from column to column.
        num_lines: how many lines there are.
        num_others: how many others.
        width: of a list.
        LINES: of a block.
        OTHERS: of a block.
        AT_ONCE: others that are read at once, a multiple of ``OTHERS``.
        BY_ROWS: lines are rows.
        IS_DENSE: columns are adjacent.
        ALIGNMENT: what the mask's strides but the last are multiples of.
    """
    list_number = tl.program_id(0)
    blocks = tl.cdiv(num_lines, LINES)
    sequence = list_number // blocks
    block = list_number % blocks
    lines = block * LINES + tl.arange(0, LINES)
    others = tl.arange(0, AT_ONCE)
    start_ptr = mask_ptr + sequence * tl.multiple_of(stride_b.to(tl.int64), ALIGNMENT)
    listed_ptr = indices_ptr + list_number.to(tl.int64) * width
    count = 0
    sees = tl.zeros([LINES], tl.int32)
    for first in range(0, num_others, AT_ONCE):
        if BY_ROWS:
            rows = lines[:, None]
            columns = first + others[None, :]
            is_there = (rows < num_lines) & (columns < num_others)
        else:
            rows = first + others[:, None]
            columns = lines[None, :]
            is_there = (rows < num_others) & (columns < num_lines)
        seen = _seen(start_ptr, rows, columns, is_there, stride_m, stride_n, IS_DENSE, ALIGNMENT)
        if BY_ROWS:
            sees = tl.maximum(sees, tl.max(seen.to(tl.int32), 1))
        of_others = tl.max(seen.to(tl.int32), 0 if BY_ROWS else 1)
        found = tl.max(tl.reshape(of_others, (AT_ONCE // OTHERS, OTHERS)), 1)
        numbers = first // OTHERS + tl.arange(0, AT_ONCE // OTHERS)
        tl.store(listed_ptr + count + tl.cumsum(found, 0) - 1, numbers, mask=found != 0)
        count += tl.sum(found, 0)
    tl.store(counts_ptr + list_number, count)
    if BY_ROWS:
        tl.store(
            sees_ptr + list_number.to(tl.int64) * LINES + tl.arange(0, LINES), sees.to(tl.int8)
        )


@triton.jit(do_not_specialize=(*_STRIDES, "num_rows", "num_columns", "stride_h", "num_heads"))
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

    As products leave them, thread 32 w + 4 r + q has the rows 16 w + 8 h + r and the columns
    8 j + 2 q + e of a tile: bit 4 j + 2 h + e. One program for each tile, head and sequence.

    Args:
        mask_ptr: this and what follows as in `list_blocks`; behind the last row and column nothing
            is seen.
        words_ptr: int32 [B, H, tiles, 128], the tiles of rows one after another, or of columns.
        stride_b: of the mask.
        stride_m: likewise.
        stride_n: likewise.
        num_rows: of the mask.
        num_columns: likewise.
        stride_h: of the mask, from head to head.
        num_heads: of the mask.
        BY_ROWS: tiles have the mask's rows; else they are turned, and its columns come first.
        IS_DENSE: columns are adjacent.
        ALIGNMENT: as in `list_blocks`.
    """
    down = tl.cdiv(num_rows, _TILE)
    across = tl.cdiv(num_columns, _TILE)
    plane = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    others = across if BY_ROWS else down
    line = tile // others
    other = tile % others
    threads = tl.arange(0, _THREADS)
    bits = tl.arange(0, _BITS)
    of_threads = threads // 32 * 16 + threads % 32 // 4
    in_lines = line * _TILE + of_threads[:, None] + (bits // 2 % 2 * 8)[None, :]
    in_others = other * _TILE + (threads % 4 * 2)[:, None] + (bits // 4 * 8 + bits % 2)[None, :]
    rows = in_lines if BY_ROWS else in_others
    columns = in_others if BY_ROWS else in_lines
    start_ptr = mask_ptr + plane // num_heads * tl.multiple_of(stride_b.to(tl.int64), ALIGNMENT)
    start_ptr += plane % num_heads * tl.multiple_of(stride_h.to(tl.int64), ALIGNMENT)
    is_there = (rows < num_rows) & (columns < num_columns)
    # Read where each bit stands: a tile that is turned and taken apart instead came out with half
    # of its words twice (Triton 3.6 on an H200).
    seen = _seen(start_ptr, rows, columns, is_there, stride_m, stride_n, IS_DENSE, ALIGNMENT)
    words = tl.sum(seen.to(tl.int32) << bits[None, :], 1)
    tl.store(words_ptr + tl.program_id(0).to(tl.int64) * _THREADS + threads, words)
