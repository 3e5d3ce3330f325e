"""A packed boolean mask on the device: a word of bits for each thread and 64 x 64 scores.

`adaattn.backends.device.mask_tiles` says how its bits are ordered: as a product leaves scores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A kind of mask beside those of `scores`.
BITS = gl.constexpr(3)
WORDS = gl.constexpr(128)
# Written out, since the assembler then takes seven bits at once to predicates: 1.3 instructions for
# a score. Triton's own comparison and choice are 2 to 3.
SHOWN = gl.constexpr(
    "{.reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, $4, p;}"
)


# A word for each thread of a warpgroup.
OF_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def load_words(start, number):
    """Each thread's word of a tile, by the tile's number."""
    threads = gl.arange(0, WORDS, layout=OF_THREADS)
    return gl.load(start + number.to(gl.int64) * WORDS + threads)


@gluon.jit
def copied_words(place):
    """Each thread's word of a tile, or two of tiles beside one another, from shared memory."""
    found = place.slice(0, WORDS).load(OF_THREADS)
    if place.shape[0] == 2 * WORDS:
        found = gl.join(found, place.slice(WORDS, WORDS).load(OF_THREADS))
    return found


@gluon.jit
def shown(x, words, HIDDEN: gl.constexpr):
    """A tile of numbers, or two beside one another, with others in place of what is hidden.

    No number moves: a thread's word has the bits of what it holds of a tile, in an order that the
    compiler knows.

    Args:
        x: fp32 [64, 64] or [64, 128], as a product leaves them.
        words: int32 [128] or [128, 2].
        HIDDEN: the number in place of those.
    """
    layout: gl.constexpr = x.type.layout
    columns: gl.constexpr = x.shape[1]
    tiles: gl.constexpr = columns // 64
    # Rows in warps, halves and threads, and columns in tiles, eights, threads and pairs.
    apart = gl.reshape(gl.zeros([64, columns], gl.int32, layout), [4, 2, 8, tiles, 8, 4, 2])
    words = gl.permute(gl.reshape(words, [4, 8, 4, tiles]), [0, 1, 3, 2])
    words = gl.reshape(words, [4, 1, 8, tiles, 1, 4, 1])
    words, _ = gl.broadcast(gl.convert_layout(words, apart.type.layout), apart)
    words = gl.convert_layout(gl.reshape(words, [64, columns]), layout)
    of_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) // 8 % 2 * 2
    places = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))
    of_columns = places // 8 % 8 * 4 + places % 2
    bits = 1 << (gl.expand_dims(of_rows, 1) + gl.expand_dims(of_columns, 0))
    hidden = gl.full([64, columns], HIDDEN, gl.float32, layout)
    return gl.inline_asm_elementwise(
        SHOWN, "=f,f,r,r,f", [x, words, bits, hidden], dtype=gl.float32, is_pure=True, pack=1
    )
