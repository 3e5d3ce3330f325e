"""What the kernels of a chunk are launched with: numbers, and constants, in their order."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.device.launch import Launch
from adaattn.backends.masks import broadcast_strides, with_rank
from adaattn.backends.streamed.chunks import Chunk, pitch_of
from adaattn.backends.streamed.fused_rules import num_parts
from adaattn.spec import AttentionProblem, Aux, MaskKind, Precision

__all__ = ["Arguments", "Beside", "chained"]

_MOST_KEYS: Final = 4096
"""Keys of a block: longer rows are read twice, the second time from the L2 cache. Over 8K keys 2048
are 13 % slower, 8192 1 % faster (H200)."""

_LEAST_KEYS: Final = 16
_SCORES: Final = 2048
"""Scores of a program of short rows."""

_SPLIT_SCORES: Final = 512
"""The same where scores are sums of parts, which are read one after the other."""

_SCORES_OF_A_WARP: Final = 512

_CHANGES: Final = (4, 512)
"""Lines and keys of a program of the backward pass."""

_SUM_ROWS, _SUM_COLUMNS = 8, 512
"""Lines of a program that sums over columns, and columns that it reads at once."""

_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class Beside:
    """How what stands beside q, k and v in a call lies: what is prepared for it serves no other.

    Args:
        mask: strides of its four dimensions; 0 where it is broadcast.
        slopes: of ALiBi, their stride over the batch, likewise.
        dtypes: of mask, slopes and sinks.
    """

    mask: tuple[int, ...] = (0, 0, 0, 0)
    slopes: int = 0
    dtypes: tuple[torch.dtype | None, ...] = (None, None, None)

    @classmethod
    def of(
        cls,
        mask: torch.Tensor | None,
        slopes: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> "Beside":
        """Return it for tensors of any number of dimensions."""
        if mask is None and slopes is None and sinks is None:
            return _NOTHING
        strides = (0, 0, 0, 0) if mask is None else broadcast_strides(with_rank(mask, 4))
        of_batch = 0 if slopes is None else broadcast_strides(with_rank(slopes, 2))[0]
        dtypes = (None if it is None else it.dtype for it in (mask, slopes, sinks))
        return cls(strides, of_batch, tuple(dtypes))


_NOTHING: Final = Beside()


def chained(follows: bool) -> tuple[tuple[str, int], ...]:
    """Return the option of a kernel that may begin before the one before it has ended."""
    return (("launch_pdl", True),) if follows else ()


class Arguments:
    """The arguments of the kernels for one problem, whose lengths are those of a call."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        left, right = problem.window
        self._window = left, 0 if problem.is_causal else right

    @property
    def known_by(self) -> tuple[object, ...]:
        """What says, before there are tensors, which kernels a problem takes."""
        problem = self._problem
        shape = (self._block_keys(problem.len_k), problem.group_size, problem.precision)
        asked = (problem.aux.value, problem.wants_gradients, *num_parts(problem))
        return ("streamed", *shape, *self._positions, problem.mask, *self._terms, *asked)

    def softmax(
        self, chunk: Chunk, beside: Beside, splits: int = 1, *, is_chained: bool = False
    ) -> Launch:
        """Return the launch of a chunk's softmax.

        Args:
            chunk: of the scores.
            beside: how mask and slopes lie.
            splits: parts that scores are sums of.
            is_chained: it may begin before what it waits for has ended, and what follows likewise.
        """
        problem, pitch = self._problem, pitch_of(chunk)
        keys = self._block_keys(problem.len_k)
        rows = max((_SCORES if splits == 1 else _SPLIT_SCORES) // keys, 1)
        lines = len(chunk.planes) * problem.group_size * len(chunk.rows)
        return Launch(
            module="streamed.softmax",
            name="softmax",
            grid=(-(-lines // rows), 1, 1),
            numbers=self._numbers(chunk, beside),
            constants=(
                *(rows, keys, problem.group_size, pitch <= keys, *self._positions),
                *self._mask(beside),
                *(*self._terms[:3], problem.has_sinks, self._terms[3]),
                *(problem.wants(Aux.ENTROPY), splits, is_chained),
            ),
            options=(("num_warps", max(rows * keys // _SCORES_OF_A_WARP, 4)), *chained(is_chained)),
        )

    def changes(
        self,
        chunk: Chunk,
        beside: Beside,
        splits: tuple[int, int] = (1, 1),
        *,
        is_chained: bool = False,
        has_delta: bool = True,
    ) -> Launch:
        """Return the launch of the gradients of a chunk's scores.

        Args:
            chunk: of the scores.
            beside: how mask and slopes lie.
            splits: parts that scores, and products with values, are sums of.
            is_chained: as for `softmax`.
            has_delta: sums of rows are there; else all keys are one tile.
        """
        problem = self._problem
        rows, keys = _CHANGES
        if not has_delta:
            keys = self._block_keys(problem.len_k)
            rows = max(_SPLIT_SCORES // keys, 1)
        lines = len(chunk.planes) * problem.group_size * len(chunk.rows)
        tiles = max(-(-pitch_of(chunk) // keys), 1)
        return Launch(
            module="streamed.score_changes",
            name="score_changes",
            grid=(-(-lines // rows) * tiles, 1, 1),
            numbers=self._numbers(chunk, beside),
            constants=(
                *(rows, keys, problem.group_size, *self._positions),
                *(*self._mask(beside), *self._terms),
                *(has_delta, *splits, is_chained),
            ),
            options=(("num_warps", 4), *chained(is_chained)),
        )

    def sums(self, output: torch.Tensor, upstream: torch.Tensor) -> Launch:
        """Return the launch of what sums the products of outputs and their gradients."""
        batch, heads, len_q, columns = output.shape
        return Launch(
            module="device.rows",
            name="row_sums",
            grid=(batch * heads * -(-len_q // _SUM_ROWS), 1, 1),
            numbers=(*output.stride()[:3], *upstream.stride()[:3], heads, len_q),
            constants=(columns, _SUM_COLUMNS, _SUM_ROWS),
            options=(("num_warps", 4),),
        )

    def _numbers(self, chunk: Chunk, beside: Beside) -> tuple[float, ...]:
        """Return the numbers of both kernels."""
        problem = self._problem
        scale, cap = problem.scale, problem.softcap
        factors = (scale / cap, cap * LOG2_E) if cap else (scale * LOG2_E, 0.0)
        lines = len(chunk.planes) * problem.group_size * len(chunk.rows)
        return (
            *(*factors, problem.dropout_p, *beside.mask, beside.slopes),
            *(problem.num_heads, problem.len_q, problem.offset, *self._window, problem.dilation),
            *(chunk.planes.start, chunk.rows.start, len(chunk.rows)),
            *(chunk.keys.start, chunk.keys.stop, pitch_of(chunk), lines),
        )

    def _mask(self, beside: Beside) -> tuple[int, int, int]:
        """Return what is compiled in of a mask: kind, step of keys, alignment."""
        kinds = {MaskKind.NONE: 0, MaskKind.BOOLEAN: 1, MaskKind.ADDITIVE: 2}
        *others, step = beside.mask
        aligned = not any(stride % _ALIGN for stride in others)
        return kinds[self._problem.mask], min(step, 2), _ALIGN if aligned else 1

    @cached_property
    def _positions(self) -> tuple[bool, bool, bool]:
        """What is compiled in of positions: limits at the left and right, a dilation."""
        left, right = self._window
        return left >= 0, right >= 0, self._problem.dilation > 1

    @cached_property
    def _terms(self) -> tuple[bool, bool, bool, bool]:
        """What is compiled in of the rest: ALiBi, softcap, PTX's tanh, dropout."""
        problem = self._problem
        # Scores in bf16 would round more than PTX's tanh does.
        fast = problem.precision is Precision.BF16 and problem.device_type == "cuda"
        fast = fast and torch.version.hip is None
        cap = problem.softcap > 0
        return problem.has_alibi, cap, cap and fast, problem.dropout_p > 0

    def _block_keys(self, len_k: int) -> int:
        """Return the keys of a block of the softmax: a power of two."""
        return min(max(1 << (len_k - 1).bit_length(), _LEAST_KEYS), _MOST_KEYS)
