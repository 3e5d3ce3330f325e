"""The weights of a tile in the backward kernels, from its scores and the log-sum-exps of its rows.

    t = scale * s;  t = cap * tanh(t / cap);  t = t - slope * |p - j|;  w = exp2(t - lse)

Tiles are [KEYS, ROWS] where ROW_AXIS is 1, [ROWS, KEYS] where it is 0, of one warpgroup. All is in
units of log 2. What rows may not see is hidden by weights of 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaattn.backends.hopper.scores import LOG2_E, RECIPROCAL, TANH, split_columns

# Rows of a tile, and keys of a block, where keys and queries have kernels of their own.
SPLIT_TILE = gl.constexpr(64)


@gluon.jit
def slope_of(c, head):
    """ALiBi's slope of a query head, in units of log 2."""
    slope = c.scale
    if c.HAS_ALIBI:
        # Behind the last tile there is no head, but scores are computed.
        slope = gl.load(c.slopes + gl.minimum(head, c.last_head)).to(gl.float32) * LOG2_E
    return slope


@gluon.jit
def capped(c, s):
    """Scores under the softcap, and the tanh of which they are made; else scaled alone, twice."""
    s = s * c.scale
    tangent = s
    if c.HAS_SOFTCAP:
        if c.FAST_TANH:
            tangent = gl.inline_asm_elementwise(
                TANH, "=f,f", [s], dtype=gl.float32, is_pure=True, pack=1
            )
        else:
            # tanh(y) = 1 - 2 / (1 + exp(2 y)); the scale is 2 log2(e) scale / cap here.
            growth = gl.exp2(s) + 1.0
            inverse = gl.inline_asm_elementwise(
                RECIPROCAL, "=f,f", [growth], dtype=gl.float32, is_pure=True, pack=1
            )
            tangent = 1.0 - 2.0 * inverse
        s = c.cap * tangent
    return s, tangent


@gluon.jit
def beside(c, numbers):
    """A number of each row, along the tile's rows."""
    return gl.expand_dims(numbers, 1 - c.ROW_AXIS)


@gluon.jit
def positions(c, first_key, first_row):
    """Where lines of a tile stand among its columns, and the known part of the columns' numbers.

    The first less the second is a key's place less a row's, or where ROW_AXIS is 0 the reverse.
    """
    height: gl.constexpr = c.KEYS if c.ROW_AXIS == 1 else c.ROWS
    width: gl.constexpr = c.ROWS if c.ROW_AXIS == 1 else c.KEYS
    lines = gl.expand_dims(gl.arange(0, height, layout=gl.SliceLayout(1, c.score_layout)), 1)
    own, known = split_columns(width, c.score_layout)
    ahead = first_key - first_row - c.sizes.offset
    if c.ROW_AXIS == 0:
        ahead = -ahead
    return lines + ahead - own, known


@gluon.jit
def weighed(c, s, base, slope, first_key, first_row, IS_BOUNDED: gl.constexpr):
    """The weights of scores that are scaled and capped, of hidden keys too.

    Where IS_BOUNDED none is above 1: beside numbers of -1e12 rounding may leave a base that would
    make them infinite.
    """
    if c.HAS_ALIBI:
        ahead, known = positions(c, first_key, first_row)
        s = s - slope * gl.abs(ahead.to(gl.float32) - known.to(gl.float32))
    s = s - base
    if IS_BOUNDED:
        s = gl.minimum(s, 0.0)
    return gl.exp2(s)


@gluon.jit
def is_edge(c, first_key, first_row):
    """Whether a row of a tile may not see a key of it."""
    edge = first_key + c.KEYS > c.sizes.len_k
    position = first_row + c.sizes.offset
    if c.HAS_RIGHT:
        edge = edge | (first_key + c.KEYS - 1 > position + c.sizes.right)
    if c.HAS_LEFT:
        edge = edge | (first_key < position + c.ROWS - 1 - c.sizes.left)
    return edge


@gluon.jit
def seen_part(c, p, first_key, first_row):
    """0 for keys that a row's position does not see, or beyond the last."""
    ahead, known = positions(c, first_key, first_row)
    keys_left = c.sizes.len_k - first_key
    if c.IS_RAGGED:
        if c.ROW_AXIS == 1:
            lines = gl.arange(0, c.KEYS, layout=gl.SliceLayout(1, c.score_layout))
            p = gl.where(gl.expand_dims(lines < keys_left, 1), p, 0.0)
        else:
            own, _ = split_columns(c.KEYS, c.score_layout)
            p = gl.where(known < keys_left - own, p, 0.0)
    if c.HAS_RIGHT:
        if c.ROW_AXIS == 1:
            p = gl.where(known >= ahead - c.sizes.right, p, 0.0)
        else:
            p = gl.where(known <= ahead + c.sizes.right, p, 0.0)
    if c.HAS_LEFT:
        if c.ROW_AXIS == 1:
            p = gl.where(known <= ahead + c.sizes.left, p, 0.0)
        else:
            p = gl.where(known >= ahead - c.sizes.left, p, 0.0)
    return p


@gluon.jit
def hide_at_edges(c, p, first_key, first_row):
    """The same, where a tile has such keys."""
    if c.HAS_RIGHT or c.HAS_LEFT or c.IS_RAGGED:
        if is_edge(c, first_key, first_row):
            p = seen_part(c, p, first_key, first_row)
    return p
