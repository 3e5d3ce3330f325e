"""What the portable kernels are launched with: numbers, and what is compiled in, in their order."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.allocation import unfilled
from adaattn.backends.device.launch import Launch
from adaattn.backends.interface import STATISTICS
from adaattn.backends.masks import broadcast_strides
from adaattn.backends.triton.launch import (
    COPIED_BYTES,
    HALVED_ROWS,
    HALVED_STEP,
    choose_tile,
    halved_columns,
    invariant_split,
    is_halved,
    num_splits,
    packed_heads,
    padded,
)
from adaattn.spec import Align, AttentionProblem, Aux, HeadTerm, Precision

__all__ = ["Arguments", "MaskLayout", "at_multiples", "in_halves"]

_INT32: Final = 2**31
_FEW_ROWS: Final = 32
_MOST_KEYS: Final = 2**30
"""A window that hides nothing, where each head has its own: beside a position it is an int32."""


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """How a mask lies in memory, and what kind it is.

    Args:
        kind: 0 none, 1 boolean, 2 added.
        strides: of its four dimensions; 0 where it is broadcast.
        dtype: of its numbers.
    """

    kind: int = 0
    strides: tuple[int, ...] = (0, 0, 0, 0)
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, mask: torch.Tensor) -> "MaskLayout":
        """Return it for a 4-D mask, broadcast dimensions unexpanded."""
        kind = 1 if mask.dtype == torch.bool else 2
        return cls(kind, broadcast_strides(mask), mask.dtype)

    def constants(self, pack: int, rows_of_tile: int) -> tuple[int, bool, int, int]:
        """Return what is compiled in: kind, whether rows differ, the step of keys, alignment.

        Args:
            pack: heads in a tile.
            rows_of_tile: rows of a tile, those of all its heads.
        """
        batch, heads, rows, keys = self.strides
        align = next(it for it in (16, 8, 1) if not (batch % it or heads % it or rows % it))
        # A tile reads few entries: vectors of them gain nothing, and the strides of a mask that
        # grows with a cache would make a kernel for each alignment.
        if rows_of_tile <= _FEW_ROWS or (self.kind == 1 and rows == 0):
            align = 1
        return self.kind, rows != 0 or (pack > 1 and heads != 0), min(keys, 2), align


class Arguments:
    """The arguments of the kernels for one problem, whose lengths are those of each call."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.is_halved = is_halved(problem)
        self._problem = problem
        self._tile = choose_tile(problem)
        self.pack = packed_heads(problem)
        left, right = problem.window
        if problem.by_head(HeadTerm.WINDOW):
            left = right = _MOST_KEYS
        self.window = left, 0 if problem.is_causal else right

    @property
    def known_by(self) -> tuple[object, ...]:
        """What says, before there are tensors, which kernels a problem takes."""
        problem = self._problem
        keys = self._keys(problem.len_q, problem.len_k)
        splits = keys > self._tile.keys * 16 and self._tile.rows <= 64
        features = (*self.features, *self.listed, problem.mask, problem.mask_shape[-2:-1] == (1,))
        asked = self._asked(False)
        return (
            "triton",
            problem.precision,
            *self._shape,
            *features,
            *asked,
            splits,
            problem.batch_invariant,
            self._tile,
            *([problem.head_terms.value] if problem.head_terms.value else ()),
        )

    def programs(self, batch: int, heads: int, len_q: int, sequences: int) -> tuple[int, int]:
        """Return the programs without splits, and the tiles of rows of a head."""
        rows, dilation = self._tile.rows, self._problem.dilation
        if sequences:
            tiles = (len_q // (rows // self.pack) + sequences) * dilation
        else:
            longest = -(-len_q // dilation)
            tiles = -(-longest * self.pack // rows) * dilation
        return tiles * (heads // self.pack) * batch, tiles

    def splits(self, programs: int, len_q: int, len_k: int, num_processors: int) -> tuple[int, int]:
        """Return over how many programs the keys of a tile are split, and the keys of each.

        Args:
            programs: those without splits.
            len_q: query rows.
            len_k: keys.
            num_processors: of the device.
        """
        problem, tile = self._problem, self._tile
        keys = self._keys(len_q, len_k)
        if problem.num_sequences or problem.has_blocks:
            return 1, keys
        if problem.batch_invariant:
            split_keys = invariant_split(problem, keys)
            return max(-(-keys // split_keys), 1), split_keys
        splits = num_splits(programs, tile, keys, num_processors)
        split_keys = -(-keys // splits // tile.keys) * tile.keys
        return -(-keys // split_keys), split_keys

    def _keys(self, len_q: int, len_k: int) -> int:
        """Return how many keys the rows of a tile may see."""
        dilation = self._problem.dilation
        keys = -(-len_k // dilation)
        left, right = self.window
        if self._problem.align is Align.BOTTOM_RIGHT:
            last = max(len_q - 1, 0)  # what the first row has behind it
            right = last if right < 0 else min(right, last)
        if left < 0 or right < 0:
            return keys
        return min(keys, (left + right) // dilation + 1 + self._tile.rows + self._tile.keys)

    def forward(
        self,
        grid: tuple[int, int, int],
        strides: tuple[int, ...],
        sizes: tuple[int, int, int],
        counts: tuple[int, int, int, int],
        seen: MaskLayout,
        listed: tuple[int, int, int] = (0, 0, 0),
        *,
        overlaps: bool = False,
    ) -> Launch:
        """Return the launch of the forward kernel.

        Args:
            grid: programs and splits.
            strides: of q, k, v, the output, the mask and the slopes.
            sizes: Hq, Sq and Sk.
            counts: packed sequences, tiles of rows, keys of a split, and B * Hkv.
            seen: the mask.
            listed: strides of the counts of blocks over batch and heads, and the room of a list.
            overlaps: what adds up the splits is launched before the end.
        """
        problem, tile = self._problem, self._tile
        rows = max(strides[5], strides[8], *seen.strides[2:]) * problem.dilation
        is_wide = rows * max(tile.keys, tile.rows) >= _INT32
        is_split = grid[1] > 1
        # Strides over sequences, or over all tokens, make no other kernel where they have no say.
        blind = problem.batch_invariant and (problem.num_sequences or not seen.strides[2])
        rows_read = 0 if blind else tile.rows
        return Launch(
            module="triton.forward",
            name="forward",
            grid=grid,
            numbers=(
                *self.factors,
                *strides,
                *sizes,
                *self.window,
                problem.dilation,
                *counts,
                *listed,
            ),
            constants=(
                *(
                    *self._shape,
                    *seen.constants(self.pack, rows_read),
                    *self.features,
                    *self.listed,
                    *(is_split, is_split and overlaps),
                ),
                *(*self._asked(is_split), *self.aligns, is_wide),
                # Keys of other sequences may not choose where they are to have no say.
                *(self.is_halved, not (problem.batch_invariant and problem.num_sequences)),
                *(HALVED_ROWS, self.dot),
            ),
            options=(("num_warps", tile.warps), ("num_stages", tile.stages)),
        )

    def combine(
        self,
        output_strides: tuple[int, ...],
        splits: int,
        batch: int,
        heads: int,
        len_q: int,
        *,
        overlaps: bool = False,
    ) -> Launch:
        """Return the launch of what adds up splits.

        It may overlap the end of the kernel before (programmatic dependent launch), which saves
        about 2 us of 50 (H200).
        """
        rows = batch * heads * len_q
        columns = self._problem.value_dim
        most = 1 << (splits - 1).bit_length()
        return Launch(
            module="triton.combine",
            name="combine",
            grid=(rows, 1, 1),
            numbers=(*output_strides[:3], splits, heads, len_q, rows),
            constants=(
                *(columns, padded(columns), most, self._problem.has_sinks),
                *self._asked(False),
                overlaps,
            ),
            options=(("num_warps", 4), *((("launch_pdl", True),) if overlaps else ())),
        )

    def halve(
        self,
        strides: tuple[int, ...],
        batch: int,
        heads: int,
        rows: int,
        columns: int,
        align: int,
    ) -> Launch:
        """Return the launch of what takes a matrix apart.

        Args:
            strides: over batch, heads and rows, multiples of ``align`` elements.
            batch: B.
            heads: of the matrix.
            rows: of a head.
            columns: of a row.
            align: see there.
        """
        return Launch(
            module="triton.halving",
            name="halve",
            grid=(batch * heads * -(-rows // HALVED_ROWS), 1, 1),
            numbers=(*strides[:3], heads, rows),
            constants=(
                *(columns, halved_columns(columns), padded(columns)),
                *(HALVED_ROWS, align),
            ),
            options=(("num_warps", 4),),
        )

    def halved_strides(self, heads: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the strides of the halves of keys and of values."""
        widths = map(halved_columns, (self._problem.head_dim, self._problem.value_dim))
        key, value = ((heads * rows * width, rows * width, width) for width in widths)
        return key, value

    def _asked(self, is_split: bool) -> tuple[bool, bool, bool]:
        """Return which statistics the kernel writes; of the parts, those that add up to them."""
        lse, row_max, entropy = (self._problem.wants(flag) for flag in STATISTICS[:3])
        return (True, True, entropy) if is_split else (lse, row_max, entropy)

    @cached_property
    def _shape(self) -> tuple[Any, ...]:
        """What is compiled in of shapes and positions."""
        problem, tile = self._problem, self._tile
        left, right = self.window
        return (
            *(tile.rows, tile.keys, problem.head_dim, problem.value_dim),
            *(padded(problem.head_dim), padded(problem.value_dim)),
            *(problem.group_size, self.pack, problem.align is Align.BOTTOM_RIGHT),
            *(left >= 0, right >= 0, problem.dilation > 1, problem.num_sequences > 0),
        )

    @cached_property
    def features(self) -> tuple[bool, ...]:
        """What is compiled in of the rest: biases, sinks, softcap, PTX's tanh, dropout."""
        problem = self._problem
        # Scores in bf16 would round more than it does.
        fast = problem.precision is Precision.BF16 and problem.device_type == "cuda"
        fast = fast and torch.version.hip is None
        cap = problem.has_softcap
        drops = problem.dropout_p > 0
        return problem.has_alibi, problem.has_sinks, cap, cap and fast, drops

    @cached_property
    def listed(self) -> tuple[int, int, bool]:
        """What is compiled in of a list of blocks: their sizes, and whether others are weighed."""
        return (*self._problem.block_size, self._problem.wants(Aux.DROPPED_MASS))

    @property
    def are_copied(self) -> bool:
        """Whether q, k and v lie so that the kernels read contiguous copies of them."""
        return not self._problem.dense_columns or self._problem.stride_bytes < COPIED_BYTES

    @cached_property
    def given_align(self) -> int:
        """What strides of q, k and v are known to be multiples of, in elements."""
        problem = self._problem
        number_bytes = problem.precision.bits // 8
        if self.are_copied:
            return math.gcd(problem.head_dim, problem.value_dim, 16 // number_bytes)
        return max(problem.stride_bytes // number_bytes, 1)

    @cached_property
    def aligns(self) -> tuple[int, int]:
        """What strides are known to be multiples of: the query's and output's, the keys'."""
        problem, known = self._problem, self.given_align
        own = known if problem.value_dim % known == 0 else 1
        return own, HALVED_STEP if self.is_halved else known

    @cached_property
    def dot(self) -> str:
        """The arithmetic of products."""
        return "tf32x3" if self._problem.precision is Precision.FP32 else "tf32"

    @cached_property
    def factors(self) -> tuple[float, float, float]:
        """What products are multiplied by before the cap and after it, and dropout's share."""
        scale, cap = self._problem.scale, self._problem.softcap
        before, after = (scale / cap, cap * LOG2_E) if cap else (scale * LOG2_E, 0.0)
        if self._problem.by_head(HeadTerm.SOFTCAP):
            before = scale
        return before, after, self._problem.dropout_p


def in_halves(
    take_apart: Launch, matrix: torch.Tensor, lifts: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Return a matrix as sums of two fp16 numbers.

    Args:
        take_apart: of `Arguments.halve`, for such a matrix.
        matrix: fp32 [B, H, S, D].
        lifts: to be written, of `lift_sizes`: the power of two of each row.
        bounds: to be written, likewise: of those of each block of rows.

    Returns:
        fp16 [2, B, H, S, D], high halves first, D in steps of 8.
    """
    shape = (2, *matrix.shape[:-1], halved_columns(matrix.shape[-1]))
    both = unfilled(matrix, shape, dtype=torch.float16)
    take_apart(matrix, both, lifts, bounds)
    return both


def at_multiples(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that begins where asynchronous copies may, of the same strides."""
    if tensor.data_ptr() % COPIED_BYTES == 0:
        return tensor
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
