"""How a problem is cut into tiles: a frozen choice from sizes alone.

Under ``batch_invariant`` no length is looked at, which of packed sequences is another's; nor where
a mask's rows begin. A tile is rows of one sequence and head, so that what is computed again in the
second pass is its own affair, too.
"""

from dataclasses import dataclass, replace
from typing import Final

from adaattn.spec import Align, AttentionProblem, Aux, HeadTerm, MaskKind, Precision

__all__ = [
    "MASK_ALIGNMENT",
    "MASK_BLOCK",
    "ROWS",
    "Tiling",
    "Variant",
    "box_rows",
    "choose",
    "edges",
    "is_listed",
    "key_blocks",
    "listed",
    "lists_mask",
    "mask_bytes",
    "mask_dtype",
    "may_list_mask",
    "tile_bits",
    "tiles_of",
]

Sizes = tuple[int, ...]

ROWS: Final = 64
"""Rows of one warpgroup: what one wgmma instruction takes."""

MASK_ALIGNMENT: Final = 16
"""Bytes of a mask's address, and numbers of its strides."""


MASK_BLOCK: Final = (128, 128)
"""Rows and keys of the blocks of a mask that are listed."""

_LEAST_LISTED: Final = 1024
_LEAST_HEADS: Final = 4
"""Rows, keys and heads from which on a boolean mask is listed, and its tiles packed.

Below, what is read once is little and the wait for a tile's list long: over 512 tokens lists alone
took 14 % behind padding (H200, 2026-11).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The shape of a tile and of the pipeline that feeds it.

    Args:
        warpgroups: consumers, 64 query rows each; 2 have 240 registers a thread, 3 have 160.
        block_n: keys of a block.
        block_d: columns of q and k, a power of two.
        block_v: columns of v, likewise.
        stages_k: blocks of keys on their way.
        stages_v: the same for values.
        stages_q: tiles of queries on their way.
        out_parts: in how many parts a tile's result passes through shared memory.
        late: a stage of keys is freed behind the softmax, which keeps the wait for the product
            of the values behind it too.
        in_turns: warpgroups begin their products in turns.
        stages_m: blocks of a mask on their way: none, one, or as many as of keys.
        mask_bytes: of a number of the mask; 0 where it does not pass through shared memory.
    """

    warpgroups: int
    block_n: int
    block_d: int
    block_v: int
    stages_k: int
    stages_v: int
    stages_q: int = 1
    out_parts: int = 1
    late: bool = True
    in_turns: bool = False
    stages_m: int = 0
    mask_bytes: int = 0

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return ROWS * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        """Shared memory of all stages and results; a block has 227 KiB, barriers included."""
        rows = self.stages_q * self.block_m * self.block_d
        keys = self.stages_k * self.block_n * self.block_d
        values = self.stages_v * self.block_n * self.block_v
        result = self.block_m * self.block_v // self.out_parts
        mask = self.stages_m * self.mask_bytes * self.block_m * self.block_n
        return 2 * (rows + keys + values + result) + mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """All that a compiled kernel depends on.

    Args:
        tiling: shapes.
        precision: bf16 or fp16.
        fixed: a fixed reference with a second pass, instead of the running maximum.
        has_tiles: tiles come from a list, not in the static order.
        is_packed: sequences are packed; their bounds are on the device.
        to_end: packed sequences are aligned at their ends.
        list_ratio: blocks of keys of the kernel in a block of a list; 0 where there are none.
        has_lse: the log-sum-exp is stored.
        has_row_max: the row maximum is.
        has_entropy: the row entropy is.
        has_dropped: a bound of what blocks that are not listed would weigh is.
        has_right: rows do not see all later keys: causal order, a window.
        has_unaligned_right: their last key is not that of a block for the last row of a tile.
        has_left: rows do not see all earlier keys.
        is_ragged: the last block of keys is not full.
        may_hide: a row may see nothing of the first block visited.
        has_softcap: as in the problem.
        has_sinks: likewise.
        has_alibi: likewise.
        mask: kind of the mask.
        mask_dtype: Triton's name of its numbers' type.
        mask_has_rows: it differs from row to row.
        mask_is_dense: its columns are adjacent.
        packs_mask: its tiles are packed before, and its blocks listed.
        mask_is_first: it is added before the scale, in the scores' unit.
        mask_is_aligned: its address and all other strides are multiples of `MASK_ALIGNMENT`.
        sinks_dtype: Triton's name of the type of sinks.
        slopes_dtype: the same of slopes.
        head_terms: which of scale, window and softcap each head has its own of.
        scales_dtype: Triton's name of the type of scales of heads.
        windows_dtype: the same of windows.
        softcaps_dtype: the same of softcaps.
    """

    tiling: Tiling
    precision: Precision = Precision.BF16
    fixed: bool = False
    has_tiles: bool = False
    is_packed: bool = False
    to_end: bool = False
    list_ratio: int = 0
    has_lse: bool = False
    has_row_max: bool = False
    has_entropy: bool = False
    has_dropped: bool = False
    has_right: bool = False
    has_unaligned_right: bool = False
    has_left: bool = False
    is_ragged: bool = False
    may_hide: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    has_alibi: bool = False
    mask: MaskKind = MaskKind.NONE
    mask_dtype: str = "i8"
    mask_has_rows: bool = False
    mask_is_dense: bool = True
    packs_mask: bool = False
    mask_is_first: bool = False
    mask_is_aligned: bool = True
    sinks_dtype: str = "fp32"
    slopes_dtype: str = "fp32"
    head_terms: HeadTerm = HeadTerm.NONE
    scales_dtype: str = "fp32"
    windows_dtype: str = "i32"
    softcaps_dtype: str = "fp32"

    @property
    def has_fast_tanh(self) -> bool:
        """Whether the softcap's tanh may be one instruction: it has 11 bits, more than bf16's 8."""
        return self.has_softcap and self.precision is Precision.BF16

    def by_head(self, term: HeadTerm) -> bool:
        """Return whether each head has its own number."""
        return bool(self.head_terms & term)


def choose(problem: AttentionProblem, *, staged: bool | None = None) -> Variant:
    """Return the kernel for a problem.

    Args:
        problem: what to compute; sizes, precision and features are read.
        staged: whether TMA can read the mask; None: if its rows lie one behind the other.
    """
    # What a mask has no list of, it hides: tiles without blocks are no doubt.
    in_doubt = problem.num_sequences > 0 or problem.has_blocks or problem.batch_invariant
    packs = lists_mask(problem)
    problem = listed(problem)
    right, left = edges(problem)
    fixed, blind = _is_fixed(problem, packs=packs), problem.batch_invariant
    has_rows = problem.mask_shape[-2:-1] not in ((), (1,))
    has_dropped = bool(problem.aux & Aux.DROPPED_MASS)
    if staged is None or blind or has_dropped:
        staged = problem.mask_is_aligned and not blind and not has_dropped
    kind = MaskKind.NONE if packs else problem.mask
    tiling = _tiling(replace(problem, mask=kind), fixed=fixed, staged=staged and has_rows)
    is_packed = problem.num_sequences > 0
    on_device = is_packed or problem.has_blocks
    is_square = problem.packed_square and not blind
    to_end = is_packed and problem.align is Align.BOTTOM_RIGHT and not is_square
    edge = right if is_packed else problem.offset + right
    # Warpgroups whose tile has a list visit all of its blocks, also those behind their own edge.
    apart = to_end or (problem.has_blocks and tiling.block_n < tiling.block_m)
    own_windows = problem.by_head(HeadTerm.WINDOW)
    unaligned = own_windows or (right >= 0 and (apart or blind or edge % tiling.block_n != 0))
    hides_late = right >= 0 and (unaligned or edge < 0)
    has_left = own_windows or left >= 0
    return Variant(
        tiling=tiling,
        precision=problem.precision,
        fixed=fixed,
        # Where their costs differ and the host knows them.
        has_tiles=(right >= 0 or left >= 0) and not on_device,
        is_packed=is_packed,
        to_end=to_end,
        list_ratio=problem.block_size[1] // tiling.block_n,
        has_lse=has_dropped or bool(problem.aux & Aux.LSE),
        has_row_max=bool(problem.aux & Aux.ROW_MAX),
        has_entropy=bool(problem.aux & Aux.ENTROPY),
        has_dropped=has_dropped,
        has_right=own_windows or right >= 0,
        has_unaligned_right=unaligned,
        has_left=has_left,
        is_ragged=in_doubt or problem.len_k % tiling.block_n != 0,
        may_hide=in_doubt or hides_late or has_left or problem.mask is not MaskKind.NONE,
        has_softcap=problem.has_softcap,
        has_sinks=problem.has_sinks,
        has_alibi=problem.has_alibi,
        mask=problem.mask,
        mask_dtype="i32" if packs else mask_dtype(problem),
        mask_has_rows=has_rows,
        packs_mask=packs,
        mask_is_first=_is_first(problem),
        head_terms=problem.head_terms,
    )


def may_list_mask(problem: AttentionProblem) -> bool:
    """Return whether blocks that a mask hides whole may be left out, by lists made of it.

    One boolean mask serves all heads, so that reading it once more takes little time; what hides
    keys by their position beside it would have to be followed, too.
    """
    return (
        problem.mask is MaskKind.BOOLEAN
        and problem.num_heads >= _LEAST_HEADS
        and edges(problem) == (-1, -1)
        and not (problem.has_blocks or problem.num_sequences or problem.batch_invariant)
        and not (problem.head_terms.value or problem.aux & Aux.DROPPED_MASS)
    )


def is_listed(shape: Sizes, len_q: int, len_k: int, least: int | None = None) -> bool:
    """Return whether lists are made of masks of a shape, where they may be.

    Args:
        shape: of the mask, of two to four dimensions.
        len_q: query rows.
        len_k: keys.
        least: rows and keys there are; None is what pays in the forward pass.
    """
    least = _LEAST_LISTED if least is None else least
    is_shared = tuple(shape[-3:-2]) in ((), (1,))
    return is_shared and tuple(shape[-2:]) == (len_q, len_k) and min(len_q, len_k) >= least


def lists_mask(problem: AttentionProblem, least: int | None = None) -> bool:
    """Return whether lists are made of a problem's mask; see `is_listed`."""
    shape, lengths = problem.mask_shape, (problem.len_q, problem.len_k)
    return may_list_mask(problem) and is_listed(shape, *lengths, least)


def listed(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with the lists that are made of its mask, if any are."""
    return replace(problem, block_size=MASK_BLOCK) if lists_mask(problem) else problem


def edges(problem: AttentionProblem) -> tuple[int, int]:
    """Return how many later and earlier keys a row sees beside its own; -1 is all.

    Windows of single heads are in tensors: here they hide nothing.
    """
    left, right = problem.window
    return (0 if problem.is_causal else right), left


def _is_fixed(problem: AttentionProblem, *, packs: bool) -> bool:
    """Return whether the first block's maximum may stay the reference of a row.

    Not in fp16, whose weights have 5 bits of exponent, nor for the row maximum, which only a
    running one knows. Rows that see nothing are computed again with their tile, but where a packed
    mask tells of them: not with other boolean masks, of which those may be all that padding hides.
    """
    return (
        problem.precision is Precision.BF16
        and (packs or problem.mask is not MaskKind.BOOLEAN)
        and not problem.aux & Aux.ROW_MAX
    )


def _is_first(problem: AttentionProblem) -> bool:
    """Return whether an additive mask may be divided by the scale: not where that overflows."""
    alone = problem.mask is MaskKind.ADDITIVE and not _is_modified(problem)
    return alone and 2.0**-20 <= problem.scale <= 2.0**20


def _is_modified(problem: AttentionProblem) -> bool:
    """Return whether scores are more than products times one scale, masks aside."""
    return problem.has_alibi or problem.has_softcap or problem.by_head(HeadTerm.SCALE)


def _tiling(problem: AttentionProblem, *, fixed: bool, staged: bool) -> Tiling:
    """Return the shapes for head sizes and what is done to the scores.

    H200, torch 2.11, Triton 3.6, November 2026, 16K tokens, hidden 2048; speed over cuDNN of the
    choice and of what was dropped for it.

    - D 64, full: three warpgroups 1.24 at 2K, two 1.02 at 16K in the first probe; but where
      tiles of 192 rows leave more rows empty than tiles of 128 do, two 1.14 for 1.07 at 512.
    - D 64, causal: two warpgroups with blocks of 64 keys 1.08 and 1.09 for 0.80 and 0.88 at 512
      and 1K, with blocks of 128 keys 1.10 for 1.06 at 2K and 1.17 for 1.15 at 4K.
    - D 128, causal: blocks of 64 keys 1.04 and 1.16 for 0.92 and 1.07 at 512 and 1K, but 1.17
      for 1.19 at 2K; not causal 1.02 for 1.12 at 1K.
    - A stage of keys freed late pays at D 128 and 256 with a fixed reference, and at D 64 below
      8K keys and beside a softcap.
    - Products begun in turns take, of the time without: D 64, causal, 0.89 at 2K, 0.84 at 4K, 0.95
      at 8K, 0.97 at 16K; D 128, full 0.95 at 512, 0.98 at 2K, windows 0.89. What is done to the
      scores at D 64 takes longer so (a softcap 1.05, a bias 1.06), and D 32 does (1.04).

    Where lengths have no say it is the tiling of long sequences, with two warpgroups.
    """
    block_d, block_v = _columns(problem.head_dim), _columns(problem.value_dim)
    widest = max(block_d, block_v)
    masked = problem.mask is not MaskKind.NONE
    modified = masked or _is_modified(problem)
    sees_all = edges(problem) == (-1, -1) and not problem.by_head(HeadTerm.WINDOW)
    len_q, len_k = problem.longest
    blind = problem.batch_invariant
    short = not sees_all and len_k <= 1024 and not blind
    narrow = problem.block_size[1] % 128 != 0
    if staged and masked and (widest <= 128 or mask_bytes(problem) < 4):
        return _staged(problem, block_d, block_v, fixed=fixed)
    if widest > 128:
        return Tiling(
            warpgroups=2, block_n=64, block_d=block_d, block_v=block_v, stages_k=2, stages_v=2,
            out_parts=2 if block_v == 256 else 1, late=fixed,
        )  # fmt: skip
    if (short or narrow) and not modified:
        return Tiling(
            warpgroups=2, block_n=64, block_d=block_d, block_v=block_v,
            stages_k=4, stages_v=4, stages_q=2, late=fixed, in_turns=widest >= 64,
        )  # fmt: skip
    if widest == 128:
        return Tiling(
            warpgroups=2, block_n=64 if masked or narrow else 128, block_d=block_d, block_v=block_v,
            stages_k=2, stages_v=3 if fixed else 2, late=fixed, in_turns=True,
        )  # fmt: skip
    # Three have no registers left for the entropy's sums, nor for windows that differ from head to
    # head: they would spill in the loop.
    three = not (
        blind
        or modified
        or problem.aux & Aux.ENTROPY
        or problem.has_blocks
        or problem.by_head(HeadTerm.WINDOW)
    ) and (_rows(len_q, 192) <= 1.06 * _rows(len_q, 128))
    if not sees_all and problem.window[0] < 0:
        three = three and len_k > 4096
    return Tiling(
        warpgroups=3 if three else 2, block_n=64 if narrow else 128, block_d=block_d,
        block_v=block_v, stages_k=3, stages_v=3, stages_q=2,
        late=blind or len_k < 8192 or problem.has_softcap,
        in_turns=widest == 64 and not modified,
    )  # fmt: skip


def _staged(problem: AttentionProblem, block_d: int, block_v: int, *, fixed: bool) -> Tiling:
    """Return the shapes for a mask that TMA copies; not of 32 bits beside D or Dv above 128.

    H200, as above, 4K each: a bias at D 128 1.92 times PyTorch's function, booleans 2.38; 1.09 and
    1.49 where each thread loads its numbers itself. Two places hide the way from memory better.
    """
    num_bytes = mask_bytes(problem)
    widest = max(block_d, block_v)
    short = problem.block_size[1] % 128 != 0 or widest > 128 or (widest == 128 and num_bytes == 4)
    single = widest > 128 or num_bytes == (2 if widest == 128 else 4)
    return Tiling(
        warpgroups=2,
        block_n=64 if short else 128,
        block_d=block_d,
        block_v=block_v,
        stages_k=2,
        stages_v=2 if widest >= 128 else 3,
        stages_q=1 if widest >= 128 else 2,
        out_parts=max(block_v // 64, 1),
        late=fixed,
        in_turns=widest == 128,
        stages_m=1 if single else 2,
        mask_bytes=num_bytes,
    )


def _rows(len_q: int, block_m: int) -> int:
    """Return the rows that tiles of a height compute."""
    return -(-len_q // block_m) * block_m


def _columns(head_dim: int) -> int:
    """Return the columns of a tile: the next power of two, which TMA fills with zeros."""
    return max(1 << (head_dim - 1).bit_length(), 32)


def mask_dtype(problem: AttentionProblem) -> str:
    """Return Triton's name of the mask's type, booleans as bytes."""
    if problem.mask is not MaskKind.ADDITIVE:
        return "i8"
    return "fp32" if problem.mask_is_wide else problem.precision.label


def mask_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of a number of the mask."""
    return {"i8": 1, "fp32": 4}.get(mask_dtype(problem), 2)


def tiles_of(problem: AttentionProblem, length: int, size: int) -> int:
    """Return the tiles of one head's rows or keys; of packed sequences enough for any lengths.

    Sequence n has those from ``starts[n] // size + n`` on, which the host need not know.

    Args:
        problem: it has the packed sequences.
        length: of all of them.
        size: of a tile.
    """
    if problem.num_sequences:
        return length // size + problem.num_sequences
    return -(-length // size)


def tile_bits(num_tiles: int) -> int:
    """Return the bits that tell the tiles of a head apart: the kernel then needs no division."""
    return max(num_tiles - 1, 0).bit_length()


def box_rows(tiling: Tiling) -> tuple[int, int, int, int]:
    """Return the rows that one copy of q, k, v and of the result takes."""
    return ROWS, tiling.block_n, tiling.block_n, ROWS


def key_blocks(
    problem: AttentionProblem, first_row: int, num_rows: int, block_n: int
) -> tuple[int, int]:
    """Return the blocks of keys that some rows see: the first, and behind the last; one at least.

    The kernel computes the same.
    """
    right, left = edges(problem)
    start, end = 0, problem.len_k
    if right >= 0:
        last_row = min(first_row + num_rows, problem.len_q) - 1
        end = min(end, max(last_row + problem.offset + right + 1, 0))
    if left >= 0:
        start = max(first_row + problem.offset - left, 0) // block_n
    return start, max(-(-end // block_n), start + 1)
