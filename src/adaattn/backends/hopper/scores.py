"""What happens to a tile of scores on the device: scale, softcap, ALiBi, masks, positions.

    t = scale * s;  t = cap * tanh(t / cap);  t = t - slope * |p - j| + mask;  hidden: -inf

Scale and softcap are of all heads, or of each one. In units of log 2, on tiles [64, BLOCK_N] in
the layout of the product that made them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaattn import _constants
from adaattn.backends.device.gluon import aggregate
from adaattn.backends.device.stages import set_fields
from adaattn.backends.hopper.mask_bits import BITS, WORDS, load_words, shown

NOTHING = gl.constexpr(-float("inf"))
LOG2_E = gl.constexpr(_constants.LOG2_E)
NO_MASK = gl.constexpr(0)
BOOLEAN = gl.constexpr(1)
ADDITIVE = gl.constexpr(2)
# One unit in the last place; the exact division takes eight instructions.
# A relative error of 2^-11, where eager PyTorch rounds scores to 8 bits: for bf16 alone.
TANH = gl.constexpr("tanh.approx.f32 $0, $1;")
# Two bf16 numbers of one register as fp32: two instructions, where a conversion takes three.
UNPACK = gl.constexpr(
    "{.reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t;}"
)
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@aggregate
class Sizes:
    """The lengths that positions depend on, what row 0 stands at among the keys, and the window.

    A row sees ``left`` keys before its own and ``right`` behind it.
    """

    len_q: gl.tensor
    len_k: gl.tensor
    offset: gl.tensor
    left: gl.tensor
    right: gl.tensor

    @gluon.constexpr_function
    def __init__(self, len_q, len_k, offset, left, right):
        set_fields(self, locals())


@aggregate
class Terms:
    """What the scores depend on beside q and k."""

    scale: gl.tensor
    cap: gl.tensor
    sinks: gl.tensor
    slopes: gl.tensor
    slopes_stride: gl.tensor
    mask: gl.tensor
    mask_stride_b: gl.tensor
    mask_stride_h: gl.tensor
    mask_stride_m: gl.tensor
    mask_stride_n: gl.tensor
    head_scales: gl.tensor
    head_windows: gl.tensor
    head_softcaps: gl.tensor
    HAS_RIGHT: gl.constexpr
    HAS_UNALIGNED_RIGHT: gl.constexpr
    HAS_LEFT: gl.constexpr
    IS_RAGGED: gl.constexpr
    MAY_HIDE: gl.constexpr
    IS_MODIFIED: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    FAST_TANH: gl.constexpr
    HAS_SINKS: gl.constexpr
    HAS_ALIBI: gl.constexpr
    MASK: gl.constexpr
    MASK_HAS_ROWS: gl.constexpr
    MASK_IS_DENSE: gl.constexpr
    MASK_IS_STAGED: gl.constexpr
    HAS_HEAD_SCALES: gl.constexpr
    HAS_HEAD_WINDOWS: gl.constexpr
    HAS_HEAD_SOFTCAPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, scale, cap, sinks, slopes, slopes_stride, mask, mask_stride_b, mask_stride_h,
        mask_stride_m, mask_stride_n, head_scales, head_windows, head_softcaps, HAS_RIGHT,
        HAS_UNALIGNED_RIGHT, HAS_LEFT, IS_RAGGED, MAY_HIDE, HAS_SOFTCAP, FAST_TANH, HAS_SINKS,
        HAS_ALIBI, MASK, MASK_HAS_ROWS, MASK_IS_DENSE, MASK_IS_FIRST, MASK_IS_STAGED,
        HAS_HEAD_SCALES, HAS_HEAD_WINDOWS, HAS_HEAD_SOFTCAPS,
    ):  # fmt: skip
        set_fields(self, locals(), "MASK_IS_FIRST")
        added_last = MASK == 2 and not MASK_IS_FIRST
        scaled_first = HAS_SOFTCAP or HAS_ALIBI or HAS_HEAD_SCALES
        self.IS_MODIFIED = gl.constexpr(scaled_first or added_last)


@gluon.jit
def terms_of(x, head, num_heads, start_q, start_k):
    """What a tile's head needs.

    Its slope, where the mask of its sequence begins, and its unit; then what products are
    multiplied by before the cap, and behind it: 0 without one.
    """
    batch = head // num_heads
    head = head % num_heads
    slope = x.scale
    if x.HAS_ALIBI:
        slope = gl.load(x.slopes + batch * x.slopes_stride + head).to(gl.float32) * LOG2_E
    mask = x.mask
    if x.MASK != NO_MASK:
        mask += batch.to(gl.int64) * x.mask_stride_b + head.to(gl.int64) * x.mask_stride_h
        mask += start_q.to(gl.int64) * x.mask_stride_m + start_k.to(gl.int64) * x.mask_stride_n
    # A mask joins the scores before their scale where it may: one operation less.
    unit = slope
    if x.MASK == ADDITIVE:
        unit = x.scale * 0.0 + LOG2_E if x.IS_MODIFIED else LOG2_E / x.scale
    scale = x.scale
    cap = x.cap
    if x.HAS_HEAD_SCALES:
        scale = scale * gl.load(x.head_scales + head).to(gl.float32)
    if x.HAS_HEAD_SOFTCAPS:
        cap = gl.load(x.head_softcaps + head).to(gl.float32)
        before: gl.constexpr = 1.0 if x.FAST_TANH else 2.0 * LOG2_E
        capped = scale * before / gl.where(cap > 0.0, cap, 1.0)
        scale = gl.where(cap > 0.0, capped, scale * LOG2_E)
        cap = gl.where(cap > 0.0, cap, 0.0) * LOG2_E
    return slope, mask, unit, scale, cap


@gluon.jit
def load_mask(
    x, sizes, row_terms, first_row, block, BLOCK_N: gl.constexpr, layout: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """The mask's tile, early, so that its latency passes behind the products; else nothing."""
    found = block
    if x.MASK == BITS:
        tile = block * (BLOCK_N // 64)
        # Rows and keys behind the last are hidden elsewhere; a warpgroup may have no others.
        row_tile = gl.minimum(first_row, sizes.len_q - 1) // 64
        across = (x.mask_stride_m // WORDS).to(gl.int32)
        found = load_words(row_terms[1], row_tile * across + tile)
        if BLOCK_N == 128:
            tile = gl.minimum(tile + 1, across - 1)
            found = gl.join(found, load_words(row_terms[1], row_tile * across + tile))
    elif x.MASK != NO_MASK and not x.MASK_IS_STAGED:
        start = block * BLOCK_N
        cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        inside = cols < sizes.len_k - start
        places = cols
        base = row_terms[1] + start
        if not x.MASK_IS_DENSE:
            places = cols.to(gl.int64) * x.mask_stride_n
            base = row_terms[1] + start.to(gl.int64) * x.mask_stride_n
        if x.MASK_HAS_ROWS:
            rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
            rows = gl.minimum(rows, sizes.len_q - 1).to(gl.int64) * x.mask_stride_m
            # [64, BLOCK_N]
            pointers = gl.expand_dims(base + rows, 1) + gl.expand_dims(places, 0)
            if EDGE:
                inside = gl.expand_dims(inside, 0) & (gl.expand_dims(rows, 1) >= 0)
                found = gl.load(pointers, mask=inside, other=0)
            else:
                found = gl.load(pointers)
        elif EDGE:
            found = gl.load(base + places, mask=inside, other=0)
        else:
            found = gl.load(base + places)
    return found


@gluon.jit
def split_columns(COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Numbers of a tile's columns, [1, COLUMNS]: a thread's own part, and one that is known.

    Of what a product leaves, a thread has columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9, ...: the first
    part is 2 t, one number, and the second 0, 1, 8, 9, ..., which instructions hold. Added up, each
    would take a register or be added anew. COLUMNS is a power of two.
    """
    columns = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    return columns & 6, columns & (COLUMNS - 7)


@gluon.jit
def modify(x, sizes, s, first_row, block, row_terms, mask, BLOCK_N: gl.constexpr):
    """Scores after softcap, ALiBi and mask; in units of log 2 where one comes after the scale."""
    layout: gl.constexpr = s.type.layout
    if x.HAS_SOFTCAP:
        cap = row_terms[4]
        scaled = s * row_terms[3]
        if x.FAST_TANH:
            # One special function for two: they are what limits this kernel.
            s = cap * gl.inline_asm_elementwise(
                TANH, "=f,f", [scaled], dtype=gl.float32, is_pure=True, pack=1
            )
        else:
            # tanh(y) = 1 - 2 / (1 + exp(2 y)); the scale is 2 log2(e) scale / cap here.
            growth = gl.exp2(scaled) + 1.0
            inverse = gl.inline_asm_elementwise(
                RECIPROCAL, "=f,f", [growth], dtype=gl.float32, is_pure=True, pack=1
            )
            s = cap - 2.0 * cap * inverse
        if x.HAS_HEAD_SOFTCAPS:
            s = gl.where(cap > 0.0, s, scaled)
    elif x.IS_MODIFIED:
        s = s * row_terms[3]
    if x.HAS_ALIBI:
        rows = first_row + sizes.offset + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        own, known = split_columns(BLOCK_N, layout)
        behind = (gl.expand_dims(rows, 1) - block * BLOCK_N - own).to(gl.float32)
        s = s - row_terms[0] * gl.abs(behind - known.to(gl.float32))
    if x.MASK == BOOLEAN:
        if x.MASK_IS_STAGED:
            left, right = gl.split(gl.reshape(s, [64, BLOCK_N // 2, 2]))
            left = gl.where((mask & 0xFF) != 0, left, NOTHING)
            right = gl.where((mask & 0xFF00) != 0, right, NOTHING)
            s = gl.convert_layout(gl.reshape(gl.join(left, right), [64, BLOCK_N]), layout)
        else:
            s = gl.where(seen_by(x, mask) != 0, s, NOTHING)
    if x.MASK == BITS:
        s = shown(s, mask, NOTHING)
    if x.MASK == ADDITIVE:
        s = s + numbers(seen_by(x, mask)) * row_terms[2]
    return s


@gluon.jit
def numbers(mask):
    """The numbers of an additive mask in fp32."""
    if mask.dtype == gl.bfloat16:
        mask = gl.inline_asm_elementwise(
            UNPACK, "=f,=f,r", [mask], dtype=gl.float32, is_pure=True, pack=2
        )
    return mask.to(gl.float32)


@gluon.jit
def seen_by(x, mask):
    """The loaded mask as [64, BLOCK_N], or [1, BLOCK_N] where it has no rows."""
    if not x.MASK_HAS_ROWS:
        mask = gl.expand_dims(mask, 0)
    return mask


@gluon.jit
def hide(x, sizes, t, first_row, block, BLOCK_N: gl.constexpr):
    """-inf for keys that a row's position does not see, or beyond the last."""
    layout: gl.constexpr = t.type.layout
    rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    own, known = split_columns(BLOCK_N, layout)
    start = block * BLOCK_N + own
    last = rows * 0 + sizes.len_k - 1
    if x.HAS_RIGHT:
        if x.IS_RAGGED or x.HAS_LEFT:
            last = gl.minimum(last, rows + (sizes.offset + sizes.right))
        else:
            last = rows + (sizes.offset + sizes.right)
    t = gl.where(known <= gl.expand_dims(last, 1) - start, t, NOTHING)
    if x.HAS_LEFT:
        first = rows + (sizes.offset - sizes.left)
        t = gl.where(known >= gl.expand_dims(first, 1) - start, t, NOTHING)
    return t
