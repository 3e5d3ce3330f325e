"""What the backward kernel of Hopper GPUs needs of rows, and what it leaves of them, on the device.

Before it: log-sum-exp and sum(do * o) of each row, less the gradient of its log-sum-exp, by tiles;
and zeros where gradients are summed, or in a fixed order turns. Behind it: those sums, scaled and
rounded. One program for each tile, of query rows of one head, whose columns times rows are 8192, or
64 rows where there are no sums. Those of gradients of keys and values, where there are any, are cut
into tiles likewise.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaattn.backends.hopper.places import bounds, sequence_of
from adaattn.backends.hopper.scores import LOG2_E, NOTHING


@gluon.constexpr_function
def tile_layout(num_columns):
    """A tile in four warps, 8 columns a thread: 16 bytes of 16-bit numbers."""
    return gl.BlockedLayout([1, 8], [256 // num_columns, num_columns // 8], [4, 1], [1, 0])


@gluon.jit
def tile_places(number, starts, num_sequences, num_heads, len_q, tiles_per_head, columns,
                layout: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
                IS_PACKED: gl.constexpr):  # fmt: skip
    """Batch, head, rows and columns of a tile, and which rows, and which of both, are there."""
    head = number // tiles_per_head
    tile = number - head * tiles_per_head
    batch = head // num_heads
    first_row = tile * BLOCK_M
    if IS_PACKED:
        sequence, first_row = sequence_of(tile, starts, num_sequences, BLOCK_M)
        start, length = bounds(starts + sequence, len_q)
        len_q = gl.where(first_row < 0, 0, start + length)
        first_row += start
    rows = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    is_row = (rows >= 0) & (rows < len_q)
    inside = gl.expand_dims(is_row, 1) & gl.expand_dims(cols < columns, 0)
    return batch, head - batch * num_heads, rows, cols, is_row, inside


@gluon.jit
def places_of(batch, head, rows, cols, stride_b, stride_h, stride_m):
    """Where the numbers of a tile stand: int64 [BLOCK_M, BLOCK_D]."""
    start = batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    return start + gl.expand_dims(rows.to(gl.int64) * stride_m, 1) + gl.expand_dims(cols, 0)


@gluon.jit
def prepare_rows(
    output, upstream, lse, lse_upstream, row_terms, sums, turns, starts, num_sequences,
    stride_ob, stride_oh, stride_om, stride_ub, stride_uh, stride_um,
    num_heads, len_q, tiles_per_head, columns, num_sums,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, HAS_LSE_GRADIENT: gl.constexpr,
    HAS_SUMS: gl.constexpr, IS_ORDERED: gl.constexpr, IS_PACKED: gl.constexpr,
):  # fmt: skip
    """Write the terms of a tile's rows, as `backward.backward` takes them; zeros for sums or turns.

    Args, beyond their names:
        output: [B, Hq, Sq, Dv], adjacent columns.
        upstream: its gradient.
        lse: fp32 [B, Hq, Sq].
        lse_upstream: its gradient, where HAS_LSE_GRADIENT.
        columns: Dv.
        num_sums: tiles of sums, where HAS_SUMS.
        turns: of both halves of each, where IS_ORDERED.
        starts: int32 [N + 1], of packed sequences, where IS_PACKED.
    """
    layout: gl.constexpr = tile_layout(BLOCK_D)
    number = gl.program_id(0)
    batch, head, rows, cols, is_row, inside = tile_places(
        number, starts, num_sequences, num_heads, len_q, tiles_per_head, columns, layout, BLOCK_M,
        BLOCK_D, IS_PACKED,
    )  # fmt: skip
    of_output = places_of(batch, head, rows, cols, stride_ob, stride_oh, stride_om)
    of_upstream = places_of(batch, head, rows, cols, stride_ub, stride_uh, stride_um)
    o = gl.load(output + of_output, mask=inside, other=0.0).to(gl.float32)
    do = gl.load(upstream + of_upstream, mask=inside, other=0.0).to(gl.float32)
    delta = gl.sum(o * do, 1)
    places = (batch * num_heads + head).to(gl.int64) * len_q + rows
    base = gl.load(lse + places, mask=is_row, other=NOTHING)
    if HAS_LSE_GRADIENT:
        delta = delta - gl.load(lse_upstream + places, mask=is_row, other=0.0)
    sees_nothing = base == NOTHING
    terms = row_terms + number.to(gl.int64) * (2 * BLOCK_M)
    within = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    gl.store(terms + within, gl.where(sees_nothing, -NOTHING, base * LOG2_E))
    gl.store(terms + BLOCK_M + within, gl.where(sees_nothing, 0.0, delta))
    if HAS_SUMS:
        for tile in range(number, num_sums, gl.num_programs(0)):
            if IS_ORDERED:
                gl.store(turns + 2 * tile, 0)
                gl.store(turns + 2 * tile + 1, 0)
            else:
                flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
                place = gl.to_tensor(tile).to(gl.int64) * (BLOCK_M * BLOCK_D)
                place += gl.arange(0, BLOCK_M * BLOCK_D, layout=flat)
                gl.store(sums + place, gl.zeros([BLOCK_M * BLOCK_D], gl.float32, flat))


@gluon.jit
def finish(
    sums, gradient, key_gradient, value_gradient, turns, starts, num_sequences, scale,
    stride_b, stride_h, stride_m, num_heads, length, tiles_per_head, columns,
    stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm, num_kv_heads, len_k,
    tiles_of_keys, columns_of_values, num_tiles,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, IS_PACKED: gl.constexpr,
    HEADS_APART: gl.constexpr, IS_ORDERED: gl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile's queries; where HEADS_APART of keys and values as well.

    Where IS_ORDERED nobody has written sums of queries whose turn never came: those are 0.

    Args, beyond their names:
        sums: fp32, as `backward.lay_out` leaves them.
        turns: where IS_ORDERED, as the blocks of keys leave them.
        gradient: [B, Hq, Sq, D], adjacent columns.
        starts: of packed sequences, where IS_PACKED.
        scale: factor of those of queries and keys.
        length: Sq; then of keys and values Sk, as the other sizes and strides are theirs then.
        columns: D.
        tiles_of_keys: of a key head.
        num_tiles: of queries, of all heads.
    """
    layout: gl.constexpr = tile_layout(BLOCK_D)
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    number = gl.program_id(0)
    all_of_it = gl.arange(0, BLOCK_M * BLOCK_D, layout=flat)
    found = gl.load(sums + number.to(gl.int64) * (BLOCK_M * BLOCK_D) + all_of_it)
    if IS_ORDERED:
        is_written = (gl.load(turns + 2 * number) > 0) | (number >= num_tiles)
        found = gl.where(is_written, found, 0.0)
    if HEADS_APART:
        if number >= num_tiles:
            # A block's tiles of keys, then its tiles of values.
            of_block: gl.constexpr = BLOCK_D // 64
            place = number - num_tiles
            pair = place // (2 * of_block)
            place -= pair * (2 * of_block)
            gradient = key_gradient
            stride_b, stride_h, stride_m = stride_kb, stride_kh, stride_km
            num_heads, length, tiles_per_head = num_kv_heads, len_k, tiles_of_keys
            if place >= of_block:
                place -= of_block
                gradient = value_gradient
                stride_b, stride_h, stride_m = stride_vb, stride_vh, stride_vm
                columns, scale = columns_of_values, 1.0
            number = pair * of_block + place
    # [half, column / 8, warp, row % 8, pair of columns, row / 8, column]
    parts = gl.reshape((found * scale).to(gradient.dtype.element_ty), [2, 8, 4, 8, 4, 2, 2])
    if BLOCK_M == 64:
        parts = gl.permute(parts, [2, 5, 3, 0, 1, 4, 6])
    else:
        parts = gl.permute(parts, [0, 2, 5, 3, 1, 4, 6])
    made = gl.convert_layout(gl.reshape(parts, [BLOCK_M, BLOCK_D]), layout)
    batch, head, rows, cols, _, inside = tile_places(
        number, starts, num_sequences, num_heads, length, tiles_per_head, columns, layout, BLOCK_M,
        BLOCK_D, IS_PACKED,
    )  # fmt: skip
    gl.store(
        gradient + places_of(batch, head, rows, cols, stride_b, stride_h, stride_m),
        made,
        mask=inside,
    )
