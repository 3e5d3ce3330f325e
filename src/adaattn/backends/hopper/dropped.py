"""What the blocks of keys that a list leaves out would weigh: a bound for each row of a tile.

    dropped = sum over blocks of n exp(max s);  share = dropped / (dropped + exp(lse))

It takes the products of their scores again, one exponential a row and block, and no values. The
log-sum-exp of the listed keys is what the passes before have stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from adaattn.backends.device.gluon import barrier
from adaattn.backends.device.stages import advance
from adaattn.backends.hopper.pipeline import arrive, score_product
from adaattn.backends.hopper.places import (
    is_listed,
    key_blocks,
    num_own_tiles,
    own_tile,
    row_of,
    sizes_by_head,
    starts_of,
)
from adaattn.backends.hopper.scores import LOG2_E, NOTHING, hide, load_mask, modify, terms_of


@gluon.jit
def bound_block(c, sizes, s, first_row, block, row_terms, largest, total):
    """The sum and its reference with one more block: each key weighs as the largest, at most."""
    x = c.terms
    mask = load_mask(x, sizes, row_terms, first_row, block, c.BLOCK_N, c.score_layout, True)
    t = modify(x, sizes, s, first_row, block, row_terms, mask, c.BLOCK_N)
    t = hide(x, sizes, t, first_row, block, c.BLOCK_N)
    factor = 1.0 if x.IS_MODIFIED else x.scale
    own = gl.max(t, 1) * factor
    most = gl.maximum(largest, own)
    base = gl.where(most == NOTHING, 0.0, most)
    num_keys = gl.minimum(sizes.len_k - block * c.BLOCK_N, c.BLOCK_N).to(gl.float32)
    total = total * gl.exp2(largest - base) + num_keys * gl.exp2(own - base)
    return most, total


@gluon.jit
def bound_tile(c, w: gl.constexpr, tile, sizes, visits, largest, total, stage_k, phase_k):
    """All blocks that a tile's rows could see and that are not listed."""
    first_row = row_of(c, tile) + w * 64
    start, end = key_blocks(c, sizes, row_of(c, tile), c.BLOCK_M)
    start_q, start_k = starts_of(c, tile)
    head = tile.number >> c.tile_bits
    row_terms = terms_of(c.terms, head, c.num_heads, start_q, start_k)
    q_place = (visits % c.STAGES_Q) * c.NUM_WARPGROUPS + w
    mbarrier.wait(c.q_full.index(q_place), (visits // c.STAGES_Q) & 1)
    place = tile.begin // c.LIST_RATIO
    for i in range(end - start):
        block = start + i
        is_kept, place = is_listed(c, tile, place, block)
        if is_kept == 0:
            mbarrier.wait(c.k_full.index(stage_k), phase_k)
            s_async = score_product(c, c.q.index(q_place), stage_k)
            s = warpgroup_mma_wait(0, deps=[s_async])
            arrive(c, stage_k)
            largest, total = bound_block(c, sizes, s, first_row, block, row_terms, largest, total)
            stage_k, phase_k = advance(stage_k, phase_k, c.STAGES_K)
    mbarrier.arrive(c.q_empty.index(q_place))
    return largest, total, stage_k, phase_k


@gluon.jit
def bound_tiles(c, w: gl.constexpr, visits, stage_k, phase_k):
    """The shares of all tiles of this block; 0 where a tile's list is of all blocks."""
    layout: gl.constexpr = gl.SliceLayout(1, c.score_layout)
    barrier()  # other threads of the warpgroup stored the log-sum-exp
    for slot in range(num_own_tiles(c)):
        tile = own_tile(c, slot)
        sizes = sizes_by_head(c, tile.number)
        total = gl.zeros([64], gl.float32, layout)
        largest = total + NOTHING
        if tile.num >= 0:
            largest, total, stage_k, phase_k = bound_tile(
                c, w, tile, sizes, visits, largest, total, stage_k, phase_k
            )
            visits += 1
        rows = row_of(c, tile) + w * 64 + gl.arange(0, 64, layout=layout)
        inside = rows < sizes.len_q
        place = (tile.number >> c.tile_bits).to(gl.int64) * sizes.len_q + rows
        kept = gl.load(c.lse + place, mask=inside, other=0.0) * LOG2_E
        has_any = total > 0.0
        ratio = gl.exp2(kept - gl.where(has_any, largest, 0.0)) / gl.where(has_any, total, 1.0)
        share = gl.where(has_any, 1.0 / (1.0 + ratio), 0.0)
        gl.store(c.dropped + place, share, mask=inside)
