"""The mask of a tile of scores in the split backward kernels, loaded by each thread.

Tiles are those of `adaattn.backends.hopper.gradient_scores`, in either orientation. A mask is
loaded before the product is waited for to whose scores it belongs. Additive ones join the
log-sum-exp, so that scores take no operation more; booleans hide weights, those of packed tiles
(`adaattn.backends.device.mask_tiles`) a word of bits for each thread. Gradients of masks are not
computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaattn.backends.device.gluon import aggregate
from adaattn.backends.device.stages import set_fields
from adaattn.backends.hopper.gradient_scores import beside
from adaattn.backends.hopper.mask_bits import BITS, load_words, shown
from adaattn.backends.hopper.scores import ADDITIVE, BOOLEAN, LOG2_E, NO_MASK, numbers


@aggregate
class Mask:
    """Where a mask lies; strides of 0 where one number stands for all."""

    start: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_m: gl.tensor
    stride_n: gl.tensor
    KIND: gl.constexpr
    HAS_ROWS: gl.constexpr
    IS_DENSE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, start, stride_b, stride_h, stride_m, stride_n, KIND, HAS_ROWS, IS_DENSE):
        set_fields(self, locals())


@gluon.jit
def mask_of(c, head):
    """Where the mask of a query head begins, at the first row and key of its sequence."""
    x = c.mask
    start = x.start
    if x.KIND != NO_MASK:
        start += c.batch.to(gl.int64) * x.stride_b + head.to(gl.int64) * x.stride_h
        start += c.start_q.to(gl.int64) * x.stride_m + c.start_k.to(gl.int64) * x.stride_n
    return start


@gluon.jit
def listed_range(count, indices, number, width, first, behind):
    """The first of the tiles that a mask shows, and behind the last; one at least.

    Args:
        count: points to how many there are.
        indices: of all lists.
        number: of the list.
        width: of a list.
        first: of the tiles that there are.
        behind: the last of them.
    """
    there = gl.load(count)
    entries = indices + number.to(gl.int64) * width
    low = gl.load(entries, mask=there > 0, other=0)
    high = gl.load(entries + (there - 1), mask=there > 0, other=0)
    return gl.maximum(low, first), gl.minimum(gl.maximum(high, low) + 1, behind)


@gluon.jit
def load_tile(c, start, first_key, first_row, EDGE: gl.constexpr):
    """The mask of a tile, of its keys alone where all rows have the same; without one nothing.

    Where EDGE, rows and keys behind the last have none. Elsewhere there are no such keys, and one
    row at least, whose mask those behind it have.
    """
    x = c.mask
    found = first_key
    if x.KIND == BITS:
        row_tile, key_tile = first_row // c.ROWS, first_key // c.KEYS
        if c.ROW_AXIS == 1:
            number = key_tile * gl.cdiv(c.sizes.len_q, c.ROWS) + row_tile
        else:
            # A warpgroup may be behind the last row, and what rows see in a window behind all keys.
            row_tile = gl.minimum(row_tile, (c.sizes.len_q - 1) // c.ROWS)
            across = gl.cdiv(c.sizes.len_k, c.KEYS)
            number = row_tile * across + gl.minimum(key_tile, across - 1)
        found = load_words(start, number)
    elif x.KIND != NO_MASK:
        keys = first_key + gl.arange(0, c.KEYS, layout=gl.SliceLayout(c.ROW_AXIS, c.score_layout))
        inside = keys < c.sizes.len_k
        places = keys
        if not x.IS_DENSE:
            places = keys.to(gl.int64) * x.stride_n
        if x.HAS_ROWS:
            rows = first_row + gl.arange(
                0, c.ROWS, layout=gl.SliceLayout(1 - c.ROW_AXIS, c.score_layout)
            )
            lines = start + gl.minimum(rows, c.sizes.len_q - 1).to(gl.int64) * x.stride_m
            # [KEYS, ROWS] or [ROWS, KEYS]
            pointers = gl.expand_dims(lines, 1 - c.ROW_AXIS) + gl.expand_dims(places, c.ROW_AXIS)
            if EDGE:
                there = gl.expand_dims(rows < c.sizes.len_q, 1 - c.ROW_AXIS)
                found = gl.load(pointers, mask=gl.expand_dims(inside, c.ROW_AXIS) & there, other=0)
            else:
                found = gl.load(pointers)
        elif EDGE:
            found = gl.load(start + places, mask=inside, other=0)
        else:
            found = gl.load(start + places)
    return found


@gluon.jit
def along_tile(c, mask):
    """A loaded mask as a tile, or a line of one number for each key."""
    if not c.mask.HAS_ROWS:
        mask = gl.expand_dims(mask, c.ROW_AXIS)
    return mask


@gluon.jit
def base_of(c, lse, mask):
    """What scores are held to: a row's log-sum-exp, less what an additive mask adds to them."""
    base = beside(c, lse)
    if c.mask.KIND == ADDITIVE:
        base = base - numbers(along_tile(c, mask)) * LOG2_E
    return base


@gluon.jit
def kept(c, p, mask):
    """Weights of keys that a boolean mask lets rows see, else 0."""
    if c.mask.KIND == BOOLEAN:
        p = gl.where(along_tile(c, mask) != 0, p, 0.0)
    if c.mask.KIND == BITS:
        p = shown(p, mask, 0.0)
    return p
