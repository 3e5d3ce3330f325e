"""What a tile of the Hopper kernel leaves: its part of the result, row outputs, and notes.

A row whose sum a fixed reference does not serve is noted, so that its tile is computed again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from adaattn import _constants
from adaattn.backends.device.gluon import barrier, shaped_as, tma_store
from adaattn.backends.hopper.mask_bits import BITS
from adaattn.backends.hopper.places import (
    corner,
    flag_place,
    number_of,
    row_of,
    sizes_of,
    starts_of,
)
from adaattn.backends.hopper.scores import LOG2_E, NOTHING

LN_2 = gl.constexpr(_constants.LN_2)
# Row sums that a fixed reference may leave: beyond, the tile is computed again.
LEAST_SUM = gl.constexpr(2.0**-60)
LARGEST_SUM = gl.constexpr(2.0**100)
ROUNDING = gl.constexpr(2.0**-22)


@gluon.jit
def store_part(c, w: gl.constexpr, part, tile, first_row, column):
    """Registers, stmatrix, TMA: rows beyond the last are clipped, and so are padding columns."""
    number = number_of(c, tile)
    tma.store_wait(0)
    barrier()
    buffer = c.o.index(w)
    buffer.store(part.to(buffer.dtype))
    fence_async_shared()
    if number >= 0:
        batch = (number >> c.tile_bits) // c.num_heads
        head = (number >> c.tile_bits) - batch * c.num_heads
        start, _ = starts_of(c, tile)
        place = corner(c, batch, head, start, first_row, sizes_of(c, tile).len_q, column)
        tma_store(c.out, place, shaped_as(buffer, c.out))


@gluon.jit
def store_parts(c, w: gl.constexpr, part, tile, first_row, column, PARTS: gl.constexpr):
    """The same in 1, 2 or 4 parts, the left half first."""
    if PARTS == 1:
        store_part(c, w, part, tile, first_row, column)
    else:
        half: gl.constexpr = part.shape[1] // 2
        left, right = gl.split(gl.permute(gl.reshape(part, [64, 2, half]), [0, 2, 1]))
        store_parts(c, w, left, tile, first_row, column, PARTS // 2)
        store_parts(c, w, right, tile, first_row, column + half, PARTS // 2)


@gluon.jit
def finish_tile(
    c, w: gl.constexpr, tile, slot, accumulator, row_sum, moment, reference, FIXED: gl.constexpr
):
    """Divide, store, and note the rows that a fixed reference does not serve."""
    x = c.terms
    layout: gl.constexpr = gl.SliceLayout(1, c.out_layout)
    total = gl.convert_layout(gl.sum(row_sum, 1), layout)
    reference = gl.convert_layout(reference, layout)
    number = number_of(c, tile)
    sizes = sizes_of(c, tile)
    first_row = row_of(c, tile) + w * 64
    head = gl.maximum(number, 0) >> c.tile_bits  # before the first tile there is none to read for
    rows = first_row + gl.arange(0, 64, layout=layout)
    inside = (rows < sizes.len_q) & (number >= 0)
    if FIXED:
        bad = inside & ((total > LEAST_SUM) & (total < LARGEST_SUM) == False)  # noqa: E712
        if x.HAS_RIGHT or x.HAS_LEFT or c.IS_PACKED or c.LIST_RATIO:
            top = rows * 0 + sizes.len_k - 1
            bottom = rows * 0
            if x.HAS_RIGHT:
                top = gl.minimum(top, rows + sizes.offset + sizes.right)
            if x.HAS_LEFT:
                bottom = gl.maximum(rows + sizes.offset - sizes.left, 0)
            if c.LIST_RATIO:
                bottom = gl.maximum(bottom, tile.first_key)
            bad = bad & (top >= bottom)
        if x.MASK == BITS:
            # A row that sees nothing is right as it is.
            line = (head // c.num_heads) * c.lists.stride_b * c.lists.rows
            bad = bad & (gl.load(c.lists.sees + line + rows, mask=bad, other=0) != 0)
        gl.store(flag_place(c) + rows * 0, 1, mask=bad)
        gl.store(flag_place(c) + 1 + slot + rows * 0, 1, mask=bad)
    unseen = total == 0.0
    maximum = reference
    if x.HAS_SINKS:
        sink = gl.load(x.sinks + head % c.num_heads).to(gl.float32) * LOG2_E
        maximum = gl.maximum(reference, sink)
        maximum = gl.where(unseen | (maximum == NOTHING), 0.0, maximum)
        down = gl.where(unseen, 1.0, gl.exp2(reference - maximum))
        extra = gl.exp2(sink - maximum)
        denominator = total * down + extra
    else:
        down = rows * 0 + 1.0
        denominator = total
    if c.HAS_LSE or c.HAS_ENTROPY or c.HAS_ROW_MAX:
        start, _ = starts_of(c, tile)
        place = head.to(gl.int64) * c.sizes.len_q + start + rows
        if c.HAS_LSE:
            lse = (maximum + gl.log2(denominator)) * LN_2
            gl.store(c.lse + place, gl.where(unseen, NOTHING, lse), mask=inside)
        if c.HAS_ROW_MAX:
            gl.store(c.row_max + place, gl.where(unseen, NOTHING, reference * LN_2), mask=inside)
        if c.HAS_ENTROPY:
            first = gl.convert_layout(gl.sum(moment, 1), layout)
            if x.HAS_SINKS:
                first = (first + total * (reference - maximum)) * down
                first += gl.where(extra > 0.0, extra * (sink - maximum), 0.0)
            bits = gl.log2(denominator) - first / denominator
            # What rounding makes of a row with one key: 0 bits, not 1e-7.
            noise = (1.0 + gl.abs(maximum) + gl.abs(gl.log2(denominator))) * ROUNDING
            bits = gl.where(unseen | (bits < noise), 0.0, bits)
            gl.store(c.entropy + place, bits, mask=inside)
    accumulator = accumulator * gl.expand_dims(gl.where(unseen, 0.0, down / denominator), 1)
    store_parts(c, w, accumulator, tile, first_row, 0, c.OUT_PARTS)
