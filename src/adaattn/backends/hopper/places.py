"""Which tile a block of the Hopper kernel computes, and where its rows and keys stand.

A tile is its number: its head above ``tile_bits``, its place among the head's rows below. Those of
packed sequences, and of lists of blocks, are looked up beside it. Producer and consumers ask the
same functions: what one copies the others take.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaattn import _constants
from adaattn.backends.device.gluon import aggregate
from adaattn.backends.device.stages import set_fields
from adaattn.backends.hopper.scores import Sizes

WRAP = gl.constexpr(_constants.TMA_WRAP)


@aggregate
class PackedTile:
    """A tile of a packed sequence: its first row there, and where the sequence lies."""

    number: gl.tensor
    first_row: gl.tensor
    start_q: gl.tensor
    len_q: gl.tensor
    start_k: gl.tensor
    len_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, number, first_row, start_q, len_q, start_k, len_k):
        set_fields(self, locals())


@aggregate
class ListedTile:
    """A tile whose blocks of keys are listed.

    ``num`` entries of its list are there, all blocks where it is -1. ``begin`` to ``end`` are those
    that its rows see, counted in blocks of the kernel. ``len_k`` is 0 where there are none: then
    one block is visited, and hidden.
    """

    number: gl.tensor
    entries: gl.tensor
    num: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    first_key: gl.tensor
    len_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, number, entries, num, begin, end, first_key, len_k):
        set_fields(self, locals())


@gluon.jit
def num_own_tiles(c):
    """How many tiles this block has: of its list, or of the static order."""
    if c.HAS_TILES:
        count = gl.load(c.tiles + gl.program_id(0) * (c.tiles_per_block + 1))
    else:
        last = c.tiles_per_block - 1
        count = last + (static_tile(last) < c.num_tiles).to(gl.int32)
    return count


@gluon.jit
def static_tile(slot):
    """Forwards and backwards in turn, so that a list of falling costs is shared out evenly."""
    blocks = gl.num_programs(0)
    block = gl.program_id(0)
    return slot * blocks + gl.where(slot % 2 == 0, block, blocks - 1 - block)


@gluon.jit
def own_tile(c, slot):
    """A tile of this block, by its place in the block's list or in the static order."""
    if c.HAS_TILES:
        tile = gl.load(c.tiles + gl.program_id(0) * (c.tiles_per_block + 1) + 1 + slot)
    else:
        number = static_tile(slot)
        head = number // c.tiles_per_head
        tile = (head << c.tile_bits) | (number - head * c.tiles_per_head)
    if c.IS_PACKED:
        tile = packed_tile(c, tile)
    elif c.LIST_RATIO:
        tile = listed_tile(c, tile)
    return tile


@gluon.jit
def no_tile(c):
    """What stands before a block's first tile."""
    tile = gl.to_tensor(-1)
    if c.IS_PACKED:
        zero = gl.to_tensor(0)
        tile = PackedTile(tile, zero, zero, zero, zero, zero)
    elif c.LIST_RATIO:
        zero = gl.to_tensor(0)
        tile = ListedTile(tile, c.lists.indices, zero, zero, zero, zero, zero)
    return tile


@gluon.jit
def number_of(c, tile):
    """A tile's number; below 0 for none."""
    if c.IS_PACKED or c.LIST_RATIO:
        number = tile.number
    else:
        number = tile
    return number


@gluon.jit
def row_of(c, tile):
    """A tile's first row, counted in its sequence."""
    if c.IS_PACKED:
        row = tile.first_row
    else:
        row = (number_of(c, tile) & ((1 << c.tile_bits) - 1)) * c.BLOCK_M
    return row


@gluon.jit
def sizes_of(c, tile):
    """The lengths that the positions of a tile depend on, and the window of its head."""
    sizes = sizes_by_head(c, number_of(c, tile))
    if c.IS_PACKED:
        offset = c.sizes.offset
        if c.TO_END:
            offset = tile.len_k - tile.len_q
        sizes = Sizes(tile.len_q, tile.len_k, offset, sizes.left, sizes.right)
    elif c.LIST_RATIO:
        sizes = Sizes(sizes.len_q, tile.len_k, sizes.offset, sizes.left, sizes.right)
    return sizes


@gluon.jit
def sizes_by_head(c, number):
    """The sizes of a call with the window of a tile's head; below 0 the most that there is."""
    sizes = c.sizes
    if c.terms.HAS_HEAD_WINDOWS:
        head = (gl.maximum(number, 0) >> c.tile_bits) % c.num_heads
        left = gl.load(c.terms.head_windows + head * 2)
        right = gl.load(c.terms.head_windows + head * 2 + 1)
        left = gl.where(left < 0, sizes.left, gl.minimum(left, sizes.left)).to(gl.int32)
        right = gl.where(right < 0, sizes.right, gl.minimum(right, sizes.right)).to(gl.int32)
        sizes = Sizes(sizes.len_q, sizes.len_k, sizes.offset, left, right)
    return sizes


@gluon.jit
def starts_of(c, tile):
    """Where a tile's sequence begins among all query rows, and among all keys."""
    start_q = gl.to_tensor(0)
    start_k = gl.to_tensor(0)
    if c.IS_PACKED:
        start_q = tile.start_q
        start_k = tile.start_k
    return start_q, start_k


@gluon.jit
def corner(c, batch, head, start, row, length, column):
    """TMA's coordinates of some rows, which stand at ``row`` of a sequence of a length.

    Those of packed tensors are of `views.packed_view`: TMA fills rows beyond the sequence's end
    with zeros, and stores none.
    """
    if c.IS_PACKED:
        return WRAP, start + length, head, WRAP - length + row, column
    else:
        return batch, head, row, column


@gluon.jit
def flag_place(c):
    """Where this block notes that tiles are to be computed again: any, then each."""
    return c.flags + gl.program_id(0) * (c.tiles_per_block + 1)


@gluon.jit
def num_tiles_to_do(c, REPAIR: gl.constexpr):
    """All tiles of the list; for the second pass none where the first noted nothing."""
    count = num_own_tiles(c)
    if REPAIR:
        count = gl.where(gl.load(flag_place(c)) != 0, count, 0)
    return count


@gluon.jit
def is_wanted(c, tile, slot, REPAIR: gl.constexpr):
    """Whether a tile is computed in this pass: one of a packed sequence may have no rows."""
    wanted = True
    if REPAIR:
        wanted = gl.load(flag_place(c) + 1 + slot) != 0
    if c.IS_PACKED:
        has_rows = (tile.first_row >= 0) & (tile.first_row < tile.len_q)
        if REPAIR:
            wanted = wanted & has_rows
        else:
            wanted = has_rows
    return wanted


@gluon.jit
def key_blocks(c, sizes, first_row, num_rows: gl.constexpr):
    """The blocks of keys that some rows see: the first, and behind the last. One at least."""
    return seen_blocks(sizes, first_row, num_rows, c.BLOCK_N, c.terms.HAS_RIGHT, c.terms.HAS_LEFT)


@gluon.jit
def seen_blocks(
    sizes, first_row, num_rows: gl.constexpr, BLOCK_N: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
):  # fmt: skip
    """The same, of a kernel whose blocks of keys have a size."""
    end = sizes.len_k
    if HAS_RIGHT:
        last_row = gl.minimum(first_row + num_rows, sizes.len_q) - 1
        end = gl.minimum(end, gl.maximum(last_row + sizes.offset + sizes.right + 1, 0))
    start = gl.to_tensor(0)
    if HAS_LEFT:
        start = gl.maximum(first_row + sizes.offset - sizes.left, 0) // BLOCK_N
    return start, gl.maximum(gl.cdiv(end, BLOCK_N), start + 1)


@gluon.jit
def bounds(starts, total):
    """The start and length of a packed sequence, inside of the tensor whatever they say."""
    start = gl.minimum(gl.maximum(gl.load(starts), 0), total)
    end = gl.minimum(gl.maximum(gl.load(starts + 1), start), total)
    return start, end - start


@gluon.jit
def sequence_of(tile, starts, num_sequences, BLOCK: gl.constexpr):
    """The sequence of a tile, and its first row: n has tiles from ``starts[n] // BLOCK + n`` on.

    That is enough for its rows whatever the starts are; the last ones may have no rows, nor those
    before the first sequence.
    """
    low = gl.to_tensor(0)
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = gl.load(starts + middle) // BLOCK + middle
        low = gl.where(first <= tile, middle, low)
        high = gl.where(first <= tile, high, middle - 1)
    return low, (tile - (gl.load(starts + low) // BLOCK + low)) * BLOCK


@gluon.jit
def packed_tile(c, number):
    """A tile of a packed sequence, by its number among all tiles."""
    tile = number & ((1 << c.tile_bits) - 1)
    packing = c.packing
    low, first_row = sequence_of(tile, packing.starts_q, packing.num_sequences, c.BLOCK_M)
    start_q, len_q = bounds(packing.starts_q + low, c.sizes.len_q)
    start_k, len_k = bounds(packing.starts_k + low, c.sizes.len_k)
    return PackedTile(number, first_row, start_q, len_q, start_k, len_k)


@gluon.jit
def entry(c, entries, num, place):
    """A number of a list, inside of the keys whatever it says; all blocks where ``num`` is -1."""
    inside = (place >= 0) & (place < num)
    found = gl.load(entries + place, mask=inside, other=0)
    found = gl.minimum(gl.maximum(found, 0), c.lists.num_blocks - 1)
    return gl.where(num < 0, place, found)


@gluon.jit
def num_below(c, entries, num, count, limit):
    """How many of a list's rising numbers are below a limit. Usually all are."""
    is_above = entry(c, entries, num, count - 1) >= limit
    low = gl.where(is_above, 0, count)
    high = count
    while low < high:
        middle = (low + high) // 2
        is_below = entry(c, entries, num, middle) < limit
        low = gl.where(is_below, middle + 1, low)
        high = gl.where(is_below, high, middle)
    return low


@gluon.jit
def listed_tile(c, number):
    """The list of a tile's rows, without the blocks that order and windows hide from them all."""
    lists = c.lists
    head = number >> c.tile_bits
    batch = head // c.num_heads
    head = head - batch * c.num_heads
    first_row = (number & ((1 << c.tile_bits) - 1)) * c.BLOCK_M
    line = batch * lists.stride_b + head * lists.stride_h + first_row // lists.rows
    num = gl.minimum(gl.maximum(gl.load(lists.counts + line), -1), lists.most)
    entries = lists.indices + line.to(gl.int64) * lists.width
    start, end = key_blocks(c, sizes_by_head(c, number), first_row, c.BLOCK_M)
    last = gl.where(num < 0, lists.num_blocks, num)
    first = gl.to_tensor(0)
    if c.terms.HAS_RIGHT:
        last = num_below(c, entries, num, last, gl.cdiv(end, c.LIST_RATIO))
    if c.terms.HAS_LEFT:
        first = num_below(c, entries, num, last, start // c.LIST_RATIO)
    begin = first * c.LIST_RATIO
    stop = last * c.LIST_RATIO
    lowest = gl.to_tensor(0)
    # Each look into a list is a wait before the tile: none where nothing can come of it.
    if c.terms.HAS_RIGHT or c.terms.HAS_LEFT:
        lowest = entry(c, entries, num, first) * c.LIST_RATIO
        begin += gl.maximum(start - lowest, 0)
    if c.terms.HAS_RIGHT or c.LIST_RATIO > 1:
        highest = (entry(c, entries, num, last - 1) + 1) * c.LIST_RATIO
        stop -= gl.maximum(highest - end, 0)
    is_seen = begin < stop
    return ListedTile(
        number,
        entries,
        num,
        gl.where(is_seen, begin, 0),
        gl.where(is_seen, stop, 1),
        gl.maximum(lowest, start) * c.BLOCK_N,
        gl.where(is_seen, c.sizes.len_k, 0),
    )


@gluon.jit
def listed_block(c, tile, visit):
    """The block of keys of a visit, the last ones first; only the first may end behind the keys."""
    place = tile.end - 1 - visit
    which = place // c.LIST_RATIO
    block = entry(c, tile.entries, tile.num, which) * c.LIST_RATIO + place - which * c.LIST_RATIO
    first_visit = gl.cdiv(c.sizes.len_k, c.BLOCK_N)
    most = gl.where(visit == 0, first_visit, c.sizes.len_k // c.BLOCK_N)
    return gl.maximum(gl.minimum(block, most - 1), 0)


@gluon.jit
def is_listed(c, tile, place, block):
    """Whether a block of keys is listed, and the place to look from for the one behind it.

    ``place`` is that of the first entry that is not before the block asked for last.
    """
    wanted = block // c.LIST_RATIO
    inside = place < tile.num
    found = gl.load(tile.entries + place, mask=inside, other=0)
    place += (inside & (found < wanted)).to(gl.int32)
    found = gl.load(tile.entries + place, mask=place < tile.num, other=-1)
    return (found == wanted).to(gl.int32), place
