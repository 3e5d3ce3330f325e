"""What kernels of a backward pass are told: numbers of a problem, and the order of its heads."""

from typing import Final

from adaattn._constants import LOG2_E
from adaattn.backends.common import never_hides
from adaattn.backends.hopper.gradient_launch import BLOCK_KEYS, GradientVariant
from adaattn.backends.hopper.launch import edges, tiles_of
from adaattn.spec import AttentionProblem, MaskKind

__all__ = ["num_block_heads", "num_key_tiles", "numbers_of", "split_numbers_of"]

_BLOCKS_APART: Final = 264
"""Blocks of other heads that start between two of a head, over the tiles that a block visits.

Two for each processor. Each then starts about two tiles behind the one before it, instead of with
it. Where sums are ordered it waits for it at none, and else both seldom add to one tile at a time.
"""

_GROUPS_TOGETHER: Final = 8
"""Key heads whose blocks visit several heads are at least so many together: in causal order the
longest of all begin first. 0.98 to 1.4 times as fast as fewer (`gradients_placed_h200.json`)."""

_DESCENDING: Final = {64: {34: 8, 66: 4}, 128: {34: 8, 130: 4}}
"""Heads at the end, half of all at most, that do not ascend, by columns of a tile and by the tiles
that a block visits in the mean. With more of them tiles leave the L2 cache: at 64 columns over 16K
tokens 8 are 0.98 times as fast as 4, at 128 columns 0.83 times (`gradients_rising_5_h200.json`); 16
over 8K and 16K 0.83 to 0.98 times as fast as 8 (`gradients_rising_2_h200.json`)."""

_LEAST_DESCENDING: Final = 2
_LONGEST: Final = {64: 130, 128: 258}
"""So many do not ascend where blocks visit fewer tiles: over 32K tokens 1.02 to 1.08 times as fast
as if none ascended (`gradients_adders_long_h200.json`, `gradients_adders_confirmed_h200.json`; two
equal forms differ by 2 % there). One descending is no better or worse; 4 of them are 1.04 times as
fast at 64 columns, and 0.97 times at 128. Not of packed sequences, 0.96 times. Where blocks visit
more none ascend: nobody timed it."""

_MANY_TOGETHER: Final = 16
"""Where none ascend over long sequences at least so many are together, and wait less for one
another: 0.97 to 1.06 times as fast as any order over 16K and 32K tokens, as before 0.90 to 1.00; of
those heads of packed sequences alone do so since
(`gradients_rising_1_h200.json`, `gradients_rising_2_h200.json`, `gradients_rising_5_h200.json`).
Of grouped heads no more, of as many as if blocks visited one head: at 128 columns 1.03 times as
fast over 2K and 8K tokens as 8, elsewhere the same (`gradients_rising_5_h200.json`)."""

_FEW_TOGETHER: Final = 4
"""Of grouped heads no fewer: fewer were not timed in a fixed order over more than 16K tokens. Nor
where nothing is hidden: at 128 columns over 8K 1.025 times as fast as 2, which wait for one
another, over 16K as fast (`gradients_adders_long_h200.json`,
`gradients_adders_confirmed_h200.json`); beside a mask over 8K 1.01 to 1.03 times
(`gradients_masks_fixed_h200.json`)."""

_MOST_MASKED: Final = 130
"""Tiles beside a mask for that, at 128 columns: 8K tokens. More were not timed, nor 64 columns."""

_CACHE_BYTES: Final = 50 * 2**20
"""The L2 cache of an H100 or H200."""


def num_block_heads(problem: AttentionProblem, variant: GradientVariant) -> int:
    """Return how many heads have blocks of keys, of all sequences."""
    return problem.batch * (problem.num_heads if variant.heads_apart else problem.num_kv_heads)


def num_key_tiles(problem: AttentionProblem, variant: GradientVariant) -> int:
    """Return the tiles, as many rows as those of queries have, of the keys of one head."""
    return tiles_of(problem, problem.len_k, variant.block_n) * variant.block_n // variant.block_m


def numbers_of(
    problem: AttentionProblem, variant: GradientVariant, slopes_stride: int
) -> tuple[int | float, ...]:
    """Return the numbers of the main kernel, in its order.

    Args:
        problem: of the call.
        variant: its kernels.
        slopes_stride: from the slopes of one sequence to those of the next.
    """
    heads = num_block_heads(problem, variant)
    return (
        *_numbers(problem, variant),
        tiles_of(problem, problem.len_k, BLOCK_KEYS),
        tiles_of(problem, problem.len_q, variant.block_m),
        slopes_stride,
        heads,
        *_order_of_heads(problem, variant, heads),
        0,
        problem.num_sequences,
    )


def split_numbers_of(
    problem: AttentionProblem, variant: GradientVariant, slopes_stride: int, num_blocks: int
) -> tuple[int | float, ...]:
    """Return the numbers of one of the split kernels, in its order.

    Args:
        problem: of the call.
        variant: its kernels.
        slopes_stride: from the slopes of one sequence to those of the next.
        num_blocks: of keys of a head, or of rows.
    """
    tiles = tiles_of(problem, problem.len_q, variant.block_m)
    numbers = _numbers(problem, variant)
    return (*numbers, num_blocks, tiles, slopes_stride, problem.num_sequences, 0)


def _numbers(problem: AttentionProblem, variant: GradientVariant) -> tuple[int | float, ...]:
    """Return the numbers that all kernels begin with."""
    right, left = edges(problem)
    scale = problem.scale * LOG2_E
    if problem.softcap > 0:
        # The kernel's tanh takes the score itself, or the exponent of its own exponential.
        scale = (problem.scale if variant.has_fast_tanh else 2.0 * scale) / problem.softcap
    # A window beyond all positions is one to the last: beside a position it is an int32.
    most = problem.len_q + problem.len_k
    return (
        scale,
        problem.scale,
        problem.softcap * LOG2_E,
        problem.len_q,
        problem.len_k,
        0 if variant.is_packed else problem.offset,
        min(left, most),
        min(right, most),
        problem.num_heads,
        problem.group_size,
    )


def _order_of_heads(
    problem: AttentionProblem, variant: GradientVariant, heads: int
) -> tuple[int, int, int]:
    """Return how many heads with blocks are worked on together, how many ascend, and together.

    What may not depend on a batch has no heads that ascend. Packed sequences whose lengths nobody
    knows count as if they were of one length and hid no later keys.
    """
    right, left = edges(problem)
    pairs = problem.visible_pairs
    if problem.num_sequences:
        pairs = min(pairs, problem.len_q * problem.len_k / problem.num_sequences)
    tiles = pairs / (variant.block_m * max(problem.len_k, 1))
    in_turns = problem.group_size if variant.is_grouped else 1
    together = max(round(_BLOCKS_APART / (1 + tiles * in_turns)), 1)
    if not variant.goes_both_ways:
        has_few = problem.mask is MaskKind.NONE or (variant.block_d == 128 and tiles < _MOST_MASKED)
        is_full = never_hides(problem) and has_few
        least = _GROUPS_TOGETHER if variant.is_grouped else 1
        if variant.is_grouped and variant.is_ordered and right >= 0 > left:
            least = max(min(round(_BLOCKS_APART / (1 + tiles)), _MANY_TOGETHER), _FEW_TOGETHER)
        elif variant.is_ordered and is_full and not problem.num_sequences:
            least = max(least, _FEW_TOGETHER)
        return _equal_parts(heads, max(together, least)), 0, 0
    descending = next(
        (few for most, few in _DESCENDING[variant.block_d].items() if tiles < most), 0
    )
    if not (descending or problem.batch_invariant or problem.num_sequences):
        descending = _LEAST_DESCENDING if tiles < _LONGEST[variant.block_d] else 0
    if not descending and _fits_cache(problem, variant, heads):
        descending = heads
    if problem.batch_invariant or not descending:
        least = 1 if descending else _MANY_TOGETHER
        return _equal_parts(heads, max(together, least)), 0, 0
    descending = min(descending, -(-heads // 2))
    ascending = heads - descending
    return descending, ascending, _equal_parts(ascending, together)


def _fits_cache(problem: AttentionProblem, variant: GradientVariant, heads: int) -> bool:
    """Return whether q, the upstream gradient and sums of dq of so many heads fit an L2 cache."""
    return heads * problem.len_q * variant.block_d * (2 + 2 + 4) <= _CACHE_BYTES


def _equal_parts(count: int, size: int) -> int:
    """Return the size of nearly equal parts, two thirds of what is asked to half as many more."""
    return -(-count // max((2 * count + size - 1) // (2 * size), 1))
