"""How a problem is launched: tiles, warps and splits, from its shape and the device alone."""

import math
from dataclasses import dataclass, replace
from typing import Final

import torch

from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, HeadTerm, MaskKind, Precision

__all__ = [
    "COPIED_BYTES",
    "HALVED_ROWS",
    "HALVED_STEP",
    "LEAST_BLOCK",
    "Tile",
    "choose_tile",
    "halved_columns",
    "has_room",
    "invariant_split",
    "is_halved",
    "lift_sizes",
    "num_splits",
    "packed_heads",
    "padded",
]

LEAST_BLOCK: Final = 16
"""Rows, and keys, of the least tile that a matrix product takes."""

COPIED_BYTES: Final = 4
"""What one asynchronous copy takes at least: rows of keys and values begin at multiples of it."""

_LEAST_SPLIT: Final = 256
"""Keys of the shortest split: below, adding up the parts costs more than it saves."""

_INVARIANT_SPLIT: Final = 512
_MOST_INVARIANT_SPLITS: Final = 64
"""Keys of a split at least, and splits at most, where no batch has a say: 8 heads of 8K keys make
128 programs, about one for each multiprocessor. Not timed on a card yet."""

_MANY_HEADS: Final = 256
"""Key heads of a batch from which on long blocks of keys are as fast or faster (H200, 2026-11)."""

HALVED_ROWS: Final = 64
"""Rows of a matrix that one program takes apart."""

HALVED_STEP: Final = 8
"""Halves of a row begin at multiples of so many: copies take 16 bytes."""

_HALVED_GRADIENTS: Final = 128
"""Columns up to which gradients are made of halves, where a program has Hopper's shared memory:
more of them do not fit beside their sums. Elsewhere half as many."""

_HOPPER: Final = (9, 0)

_HALVED_WORK: Final = 2e8
"""Scores of all heads times columns from which on gradients are. An estimate: taking apart is four
launches more, about 50 us of a caller's time, in which a third of what both passes of so many take
would be saved."""

_HALVED_FROM: Final = 128
"""Query rows from which on taking keys and values apart beforehand pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The shape of one program's work.

    Args:
        rows: BLOCK_M.
        keys: BLOCK_N.
        warps: warps of a program.
        stages: tiles of keys and values in flight.
        programs: of a multiprocessor that splits of the keys are for.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1


_TILES: Final = {
    64: Tile(rows=128, keys=64, warps=8, stages=3),
    128: Tile(rows=128, keys=64, warps=8, stages=3),
    256: Tile(rows=128, keys=32, warps=8, stages=3),
}
"""By columns, in 16 bits: 417, 452 and 464 TFLOP/s over 4096 tokens."""

_HALVED_TILES: Final = {
    64: Tile(rows=128, keys=64, warps=8, stages=3),
    128: Tile(rows=128, keys=64, warps=8, stages=2),
    256: Tile(rows=128, keys=16, warps=8, stages=3),
}
"""By columns, of fp32 in halves, over 4096 tokens of an H200: 3.5, 3.1 and 2.2 times PyTorch's
kernel, causal 3.3, 2.9 and 2.1. Tiles of 32 keys at 128 columns, which spill nothing: 2.8; two
stages at 256: 2.0; 64 rows there: 1.1."""


def padded(columns: int) -> int:
    """Return the power of two from 16 on that holds a number of columns.

    Example:
        >>> padded(5), padded(80)
        (16, 128)
    """
    return max(LEAST_BLOCK, 1 << (columns - 1).bit_length())


def halved_columns(columns: int) -> int:
    """Return the columns of halves, those behind the matrix's own being zeros.

    Example:
        >>> halved_columns(57), halved_columns(64)
        (64, 64)
    """
    return -(-columns // HALVED_STEP) * HALVED_STEP


def lift_sizes(num_heads: int, num_rows: int) -> tuple[int, int]:
    """Return the powers of two of all rows of keys, or values, and their bounds.

    Each in steps of four, 16 bytes, at which what is read begins.

    Args:
        num_heads: of keys, in all sequences.
        num_rows: of a head.

    Example:
        >>> lift_sizes(2, 65)
        (132, 8)
    """
    bounds = 2 * num_heads * -(-num_rows // HALVED_ROWS)
    return -(-num_heads * num_rows // 4) * 4, -(-bounds // 4) * 4


def packed_heads(problem: AttentionProblem) -> int:
    """Return how many heads of a group stand in one tile: all where rows are few, else 1.

    Packed sequences find their tiles by rows, which takes a power of two. Where they may not matter
    to one another, how few rows there are is nobody's to say. Lists of blocks may differ from head
    to head.
    """
    group = problem.group_size
    longest, _ = problem.longest
    if problem.has_blocks:
        return 1
    if problem.num_sequences and group & (group - 1):
        return 1
    return group if group <= 64 and (longest < 64 or _is_blind(problem)) else 1


def is_halved(problem: AttentionProblem) -> bool:
    """Return whether fp32 keys and values are taken apart before, into two fp16 numbers each.

    Three products of such halves keep 22 bits, as three tf32 products do, at fp16's rate. With few
    rows the keys are read once or twice anyway, and tf32 takes them as they are. Where gradients
    are wanted both passes have halves, or neither: weights made anew from scores of other products
    would not add up to 1.
    """
    rows = packed_heads(problem) * problem.len_q
    many = rows >= _HALVED_FROM or _is_blind(problem)
    columns = max(problem.head_dim, problem.value_dim)
    if problem.wants_gradients:
        work = float(problem.batch * problem.num_heads) * problem.visible_pairs * columns
        wide = columns > (_HALVED_GRADIENTS if has_room() else _HALVED_GRADIENTS // 2)
        many = many and not (work < _HALVED_WORK or wide or problem.mask_requires_grad)
    return problem.precision is Precision.FP32 and many


def has_room() -> bool:
    """Return whether a program of this machine's GPU, if it has one, has 227 KiB to share."""
    found = probe().compute_capability
    return found == (0, 0) or (torch.version.hip is None and found >= _HOPPER)


def _is_blind(problem: AttentionProblem) -> bool:
    """Return whether no length of the packed sequences may be looked at: it may be another's."""
    return problem.batch_invariant and problem.num_sequences > 0


def choose_tile(problem: AttentionProblem) -> Tile:
    """Return the tile of a problem: the fastest of those tried on an H200 (2026-11).

    Where blocks are listed, one that they consist of.
    """
    tile = _usual_tile(problem)
    if not problem.has_blocks:
        return tile
    rows, keys = (
        min(size, listed & -listed)
        for size, listed in zip((tile.rows, tile.keys), problem.block_size, strict=True)
    )
    return replace(tile, rows=rows, keys=keys, warps=tile.warps if rows > 64 else 4)


def _usual_tile(problem: AttentionProblem) -> Tile:
    """Return the tile of a problem without a list of blocks."""
    longest, _ = problem.longest
    longest = -(-longest // problem.dilation)
    rows = packed_heads(problem) * longest
    columns = padded(max(problem.head_dim, problem.value_dim))
    if is_halved(problem):
        tile = _HALVED_TILES[_size(columns)]
        # Three stages of a mask beside 256 columns are more than shared memory holds.
        fewer = problem.mask is not MaskKind.NONE and columns > 128
        return replace(tile, stages=2) if fewer else tile
    if problem.precision is Precision.FP32:
        few = min(padded(rows), 64)
        stages = 2 if columns <= 128 else 1
        return Tile(rows=few, keys=32, warps=4, stages=stages, programs=2 if few <= 32 else 1)
    if rows <= 2 * LEAST_BLOCK and not _is_blind(problem):
        many = problem.batch * problem.num_kv_heads >= _MANY_HEADS and not problem.batch_invariant
        keys = 128 if many and columns <= 128 else 64
        if columns != 128:
            stages = 3 if columns < 128 else 2
            return Tile(rows=padded(rows), keys=keys, warps=4, stages=stages, programs=2)
        # H200: 1.03, 1.01 and 1.00 of cuDNN at (B, Sk) of (1, 32K), (1, 128K) and (16, 8K); with
        # two programs of three stages 1.03, 1.00 and 0.98, with four or 128 keys below that.
        # Many heads, unsplit: 128 keys 1.01, 64 keys 0.89 to 1.00.
        return Tile(rows=padded(rows), keys=keys, warps=4, stages=3 if many else 4)
    if rows <= 64 or _is_blind(problem) or (columns <= 128 and _is_ragged(problem)):
        return Tile(rows=64, keys=64, warps=4, stages=3 if columns <= 128 else 2)
    return _TILES[_size(columns)]


def _size(columns: int) -> int:
    """Return the key of the tables for a number of columns."""
    return min(max(columns, 64), 256)


def _is_ragged(problem: AttentionProblem) -> bool:
    """Return whether half of a larger tile would often be hidden."""
    left, _ = problem.window
    few = problem.is_causal and problem.len_q <= 2048
    windowed = left >= 0 or problem.by_head(HeadTerm.WINDOW)
    return (few or windowed or padded(problem.head_dim) <= 64) and problem.is_positional


def num_splits(num_programs: int, tile: Tile, len_k: int, num_processors: int) -> int:
    """Return over how many programs the keys of a tile are split.

    Args:
        num_programs: programs without splits.
        tile: the tile.
        len_k: keys.
        num_processors: of the device.

    Example:
        >>> tile = Tile(rows=16, keys=64, warps=4, stages=4)
        >>> num_splits(8, tile, 32768, 132), num_splits(4096, tile, 32768, 132)
        (16, 1)
    """
    wanted = num_processors * tile.programs
    if num_programs * 2 > wanted:
        return 1
    most = max(len_k // _LEAST_SPLIT, 1)
    return min(1 << math.floor(math.log2(wanted / num_programs)), 1 << math.floor(math.log2(most)))


def invariant_split(problem: AttentionProblem, keys: int) -> int:
    """Return the keys of a split where sums may not depend on the batch, nor on the device.

    One sequence's sizes say it: the rows of a head, and the keys.

    Args:
        problem: what to compute.
        keys: that a tile of rows may see.

    Example:
        >>> from adaattn.testing import make_problem
        >>> one = make_problem(len_q=1, batch_invariant=True)
        >>> [invariant_split(one, keys) for keys in (100, 8192, 131072)]
        [512, 512, 2048]
    """
    if packed_heads(problem) * problem.len_q > 64 or problem.num_sequences:
        return padded(keys)
    return max(_INVARIANT_SPLIT, padded(-(-keys // _MOST_INVARIANT_SPLITS)))
