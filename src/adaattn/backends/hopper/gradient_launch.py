"""How a backward pass is cut into tiles: a frozen choice from sizes alone."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from adaattn.backends.hopper.launch import edges, lists_mask, mask_dtype
from adaattn.spec import Align, AttentionProblem, MaskKind, Precision

__all__ = [
    "BLOCK_KEYS",
    "ROW_BLOCK",
    "SPLIT_TILE",
    "TILE_NUMBERS",
    "GradientVariant",
    "choose_gradients",
]

BLOCK_KEYS: Final = 128
"""Keys of a block of the kernel for all gradients: 64 for each of two warpgroups."""

ROW_BLOCK: Final = 128
"""Query rows of a block of the kernel of queries alone."""

SPLIT_TILE: Final = 64
"""Rows of a tile and keys of a block of split kernels."""

TILE_NUMBERS: Final = 8192
"""Rows times columns of a tile of queries; with more, sums and scores have no registers."""

_MOST_COLUMNS: Final = 128
"""Of one kernel for all gradients."""

_LEAST_PACKED: Final = 512
"""Rows and keys of a boolean mask from which on packing it, two launches more, is not felt."""

_PROCESSORS: Final = 132
"""Of an H100 or H200 with SXM: blocks of threads of the kernel for all gradients at a time."""

_BLOCK_TILES: Final = 3
"""Tiles of rows that could be visited in the time in which a block begins and ends."""

_APART_TILES: Final = {False: 4, True: 6}
"""The same where it adds what it found for keys and values; in a fixed order it waits, too."""

_APART_ORDERED: Final = 1.15
"""What a visit with heads apart takes of one with heads in turns, in a fixed order, at 128
columns; at 64 as much."""

_ORDERED_KEYS: Final = {64: range(512, 513), 128: range(512, 1025)}
"""Over so many keys a fixed order of sums is the faster one, by columns of a tile: who is the
first to add stores, and nobody clears. 1.03 to 1.10 times as fast at 128 columns over 512 and 1024
tokens, 1.02 to 1.05 at 64 over 512 (`ops_cuda_backward_9.json`, `ops_cuda_backward_10.json`); over
512 in full order 1.06 times since warps add there in any order (`gradients_adders_h200.json`)."""

_ORDERED_CAUSAL: Final = {64: range(512, 1025), 128: range(512, 2049)}
"""The same in causal order without ALiBi, where most heads ascend: at 128 columns 1.05 times as
fast over 1K tokens, 1.02 over 2K and 0.97 to 1.00 over 4K and 8K (`gradients_adders_h200.json`,
`gradients_adders_long_h200.json`), at 64 1.025 over 1K; beside ALiBi 0.98 times
(`gradients_rising_3_h200.json`, `gradients_rising_4_h200.json`)."""

_ORDERED_BLOCKS: Final = {False: 2048, True: 512}
"""The fewest blocks of keys for that, of heads alone and of groups: few that begin together wait.
The fewest measured at 128 columns; at 64 twice as many."""

_WORTH_SUMS: Final = 0.97
"""Share of the time of taking turns below which another way is taken."""

_SPLIT_VISIT: Final = 0.4
"""What a visit of a split kernel takes of one of the kernel for all gradients, at 64 columns."""


class Sharing(Enum):
    """How grouped heads share blocks of keys."""

    TURNS = "a block visits the tiles of all heads, one head after another"
    APART = "each head has blocks of its own, and sums have gradients of keys and values"
    SPLIT = "a kernel visits likewise for keys and values alone, another for queries"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientVariant:
    """All that the compiled kernels of a backward pass depend on.

    Args:
        block_d: columns of q and k in tiles; TMA fills those that are not there with zeros. 64 or
            128 as those of v, or else each 128 or 256.
        block_v: columns of v.
        precision: bf16 or fp16.
        is_grouped: several query heads have one key head, whose blocks they visit in turn.
        heads_apart: each of them has blocks of its own, and gradients of keys and values are summed
            as those of queries are.
        has_right: rows do not see all later keys: causal order, a window.
        has_left: rows do not see all earlier keys.
        is_ragged: the last block of keys is not full; the bits of a packed mask hide what is not
            there.
        is_aligned: later keys are hidden, nothing else is, and a block of keys begins where a tile
            of the rows begins that see its first key. Not beside ALiBi, where looking at fewer
            tiles took more registers (Triton 3.7), nor beside warps that add at 128 columns, unless
            heads are apart: it makes the loop of one warpgroup alone shorter, and is 1 to 4 %
            slower, but apart 2 to 4 % faster (`gradients_adders_h200.json`,
            `gradients_adders_confirmed_h200.json`). Nor where sums are ordered, whose tiles may
            come in the opposite order.
            Of split kernels also where nothing is hidden: in either case rows have hidden keys in
            the first block that they visit alone.
        has_softcap: as in the problem.
        has_alibi: likewise.
        has_lse_gradient: one arrives at the log-sum-exp.
        slopes_dtype: Triton's name of the type of slopes.
        is_ordered: what is summed in memory is summed in a fixed order: the same each time, and in
            any batch where the problem asks for that. Taken unasked where it is faster. Split
            kernels sum nothing in memory.
        is_packed: sequences are packed; their bounds are on the device.
        to_end: packed sequences are aligned at their ends.
        mask: kind of the mask.
        mask_dtype: Triton's name of its numbers' type; of packed tiles, of their words.
        mask_has_rows: it differs from row to row.
        mask_is_dense: its columns are adjacent.
        mask_is_aligned: its address and all other strides are multiples of `MASK_ALIGNMENT`.
        packs_mask: tiles of a boolean mask are packed before.
        has_lists: those before the first and behind the last that it shows are left out.
        is_split: gradients of queries have a kernel of their own.
    """

    block_d: int
    block_v: int
    precision: Precision = Precision.BF16
    is_grouped: bool = False
    heads_apart: bool = False
    has_right: bool = False
    has_left: bool = False
    is_ragged: bool = False
    is_aligned: bool = False
    has_softcap: bool = False
    has_alibi: bool = False
    has_lse_gradient: bool = False
    slopes_dtype: str = "fp32"
    is_ordered: bool = False
    is_packed: bool = False
    to_end: bool = False
    mask: MaskKind = MaskKind.NONE
    mask_dtype: str = "i8"
    mask_has_rows: bool = False
    mask_is_dense: bool = True
    mask_is_aligned: bool = True
    packs_mask: bool = False
    has_lists: bool = False
    is_split: bool = False

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return SPLIT_TILE if self.is_split else TILE_NUMBERS // self.block_d

    @property
    def block_n(self) -> int:
        """Keys of a block."""
        return SPLIT_TILE if self.is_split else BLOCK_KEYS

    @property
    def has_adders(self) -> bool:
        """Whether warps of their own add to sums, while those that compute go on.

        Faster where heads are apart, by 2 to 6 % (November 2026; `docs/kernel-notes.md`), and at
        128 columns, where registers are few: in full and causal order by 2 to 11 % from 2K tokens
        on, below 0.5 % slower to 1 % faster, beside softcaps 2 % faster, in groups and beside ALiBi
        up to 1 %. So are packed sequences, but their loops then spill. In windows and beside masks
        it is 2 % slower, at 64 columns 3 % slower to 1 % faster (`gradients_adders_h200.json`,
        `gradients_adders_features_h200.json`).
        """
        seen = self.has_left, self.is_packed, self.mask
        return self.is_ordered or self.heads_apart or _gains_by_adders(self.block_d, *seen)

    @property
    def goes_both_ways(self) -> bool:
        """Whether heads may begin with their last blocks, and those with their first tiles.

        Not heads in turns: ascending they are 0.67 to 1.03 times as fast as in any order
        (`gradients_rising_1_h200.json`, `gradients_rising_2_h200.json`).
        """
        is_left_out = self.has_left or self.has_lists or self.is_grouped
        return self.is_ordered and self.has_right and not is_left_out

    @property
    def has_fast_tanh(self) -> bool:
        """Whether the softcap's tanh is the forward pass's one instruction."""
        return self.has_softcap and self.precision is Precision.BF16


def choose_gradients(
    problem: AttentionProblem, *, has_lse_gradient: bool = False, slopes_dtype: str = "fp32"
) -> GradientVariant:
    """Return the kernels for a problem.

    Args:
        problem: of the call; sizes, precision and features are read.
        has_lse_gradient: one arrives at the log-sum-exp.
        slopes_dtype: Triton's name of the type of slopes.

    Example:
        >>> from adaattn.testing import make_problem
        >>> choose_gradients(make_problem(head_dim=80, precision=Precision.BF16)).block_m
        64
    """
    right, left = edges(problem)
    block_d, block_v = _columns(problem)
    packs = _packs_mask(problem)
    sharing = _fastest_sharing(problem, block_d)
    is_split = max(block_d, block_v) > _MOST_COLUMNS or _splits_mask(problem, packs)
    is_split = is_split or sharing is Sharing.SPLIT
    block_n = SPLIT_TILE if is_split else BLOCK_KEYS
    heads_apart = not is_split and sharing is Sharing.APART
    is_grouped = problem.group_size > 1 and not heads_apart
    is_packed = problem.num_sequences > 0
    is_ragged = is_packed or (problem.len_k % block_n != 0 and not packs)
    asked = problem.deterministic or problem.batch_invariant
    is_ordered = not is_split and (asked or _gains_by_order(problem, block_d, sharing))
    # Of packed sequences that may not depend on one another, whether all are square is another's.
    is_square = problem.packed_square and not problem.batch_invariant
    to_end = is_packed and problem.align is Align.BOTTOM_RIGHT and not is_square
    edge = right if is_packed else problem.offset + right
    is_aligned = right >= 0 and left < 0 and not problem.has_alibi and edge % block_n == 0
    if is_split:
        is_aligned = (is_aligned and not to_end) or (right < 0 and left < 0)
    else:
        adds = not heads_apart and _gains_by_adders(block_d, left >= 0, is_packed, problem.mask)
        is_aligned = is_aligned and not (is_grouped or is_ragged or is_ordered or adds)
    return GradientVariant(
        block_d=block_d,
        block_v=block_v,
        precision=problem.precision,
        is_grouped=is_grouped,
        heads_apart=heads_apart,
        has_right=right >= 0,
        has_left=left >= 0,
        is_ragged=is_ragged,
        is_aligned=is_aligned,
        has_softcap=problem.softcap > 0,
        has_alibi=problem.has_alibi,
        has_lse_gradient=has_lse_gradient,
        slopes_dtype=slopes_dtype,
        is_ordered=is_ordered,
        is_packed=is_packed,
        to_end=to_end,
        mask=problem.mask,
        mask_dtype="i32" if packs else mask_dtype(problem),
        mask_has_rows=problem.mask_shape[-2:-1] not in ((), (1,)),
        packs_mask=packs,
        has_lists=packs and lists_mask(problem, _LEAST_PACKED),
        is_split=is_split,
    )


def _gains_by_adders(block_d: int, has_left: bool, is_packed: bool, mask: MaskKind) -> bool:
    """Return whether warps of their own add the faster where sums may come in any order."""
    return block_d == _MOST_COLUMNS and not (has_left or is_packed or mask is not MaskKind.NONE)


def _gains_by_order(problem: AttentionProblem, block_d: int, sharing: Sharing) -> bool:
    """Return whether a fixed order of sums is the faster one."""
    length = problem.len_k
    if problem.num_sequences or problem.mask is not MaskKind.NONE or sharing is not Sharing.TURNS:
        return False
    blocks = problem.batch * problem.num_kv_heads * -(-length // BLOCK_KEYS)
    right, left = edges(problem)
    lengths = _ORDERED_KEYS.get(block_d, range(0))
    if right == 0 > left and problem.group_size == 1 and not problem.has_alibi:
        lengths = _ORDERED_CAUSAL.get(block_d, lengths)
    return (
        length == problem.len_q
        and length in lengths
        and blocks >= _ORDERED_BLOCKS[problem.group_size > 1]
    )


def _splits_mask(problem: AttentionProblem, packs: bool) -> bool:
    """Return whether a mask makes gradients of queries another kernel's.

    There are registers for the bits of a packed one beside the sums of one kernel for all, and for
    no other; not beside a window's bounds, nor memory beside a softcap's derivatives.
    """
    if problem.mask is MaskKind.NONE:
        return False
    _, left = edges(problem)
    return not packs or problem.softcap > 0 or left >= 0


def _fastest_sharing(problem: AttentionProblem, block_d: int) -> Sharing:
    """Return how grouped heads share blocks of keys.

    Blocks that visit the tiles of all heads of a group may be too few for a card, or too long to
    end together. Those of one head add to sums, which take twice the memory. Two kernels have
    blocks of half as many keys, and for queries those of all heads; they compute more, but a short
    block costs next to nothing. Of 56 problems on an H200 that were run in all three ways this
    names the fastest, or one 0.93 times as fast at least, and of 99 that were run in the first two
    one 0.94 times as fast (`gradients_ways_h200.json`, `gradients_short_h200.json`;
    `gradients_apart_h200.json`). Of 53 since heads begin side by side, one 0.92 times as fast, in a
    fixed order 0.91 (`gradients_placed_h200.json`).
    """
    if problem.group_size == 1 or problem.num_sequences or problem.batch_invariant:
        return Sharing.TURNS
    key_heads, group = problem.batch * problem.num_kv_heads, problem.group_size
    by_keys = problem.len_k, problem.len_q
    sizes, part = (BLOCK_KEYS, TILE_NUMBERS // block_d), _SPLIT_VISIT * block_d / 64
    apart = _APART_ORDERED if problem.deterministic and block_d > _MOST_COLUMNS // 2 else 1.0
    added = _APART_TILES[problem.deterministic]
    times = {
        Sharing.TURNS: _WORTH_SUMS
        * _time_of(problem, by_keys, sizes, key_heads, group, _BLOCK_TILES),
        Sharing.APART: apart * _time_of(problem, by_keys, sizes, key_heads * group, 1, added),
        Sharing.SPLIT: _time_of(problem, by_keys, (SPLIT_TILE, SPLIT_TILE), key_heads, group * part)
        + _time_of(problem, by_keys[::-1], (ROW_BLOCK, SPLIT_TILE), key_heads * group, part),
    }
    return min(times, key=times.__getitem__)


def _time_of(
    problem: AttentionProblem,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    heads: int,
    visit: float,
    beside: float = 0.0,
) -> float:
    """Return the time that a kernel takes on a card.

    Args:
        problem: what rows see is read.
        lengths: of what is cut into blocks, and of what a block visits.
        sizes: of a block, and of a tile that it visits.
        heads: that have blocks.
        visit: time of one tile.
        beside: time of a block beside its visits.
    """
    right, left = edges(problem)
    of_head, tiles = (
        max(-(-length // size), 1) for length, size in zip(lengths, sizes, strict=True)
    )
    most = visit * tiles + beside
    rounds = -(-heads * of_head // _PROCESSORS)
    if right < 0 and left < 0:
        return rounds * most
    seen = problem.visible_pairs / (sizes[0] * sizes[1] * of_head)
    mean = visit * min(seen + 1.0, tiles) + beside
    longest = mean if right >= 0 and left >= 0 else most
    if rounds == 1:
        return longest
    return heads * of_head * mean / _PROCESSORS + longest / 2


def _packs_mask(problem: AttentionProblem) -> bool:
    """Return whether a boolean mask is read once before the kernels, as bits.

    Each thread then has a word for a tile, in place of 32 bytes of the mask itself.
    """
    lengths = problem.len_q, problem.len_k
    return (
        problem.mask is MaskKind.BOOLEAN
        and tuple(problem.mask_shape[-2:]) == lengths
        and min(lengths) >= _LEAST_PACKED
        and not (problem.num_sequences or problem.batch_invariant)
    )


def _columns(problem: AttentionProblem) -> tuple[int, int]:
    """Return the columns of tiles of q and k, and of v."""
    sizes = problem.head_dim, problem.value_dim
    if max(sizes) <= _MOST_COLUMNS:
        return (64, 64) if max(sizes) <= 64 else (128, 128)
    block_d, block_v = (256 if size > _MOST_COLUMNS else 128 for size in sizes)
    return block_d, block_v
