"""How products of few rows are split, from sizes and the device alone, and their launches."""

import math
from dataclasses import dataclass
from typing import Final

import torch

from adaattn.backends.device.launch import Launch
from adaattn.backends.streamed.arguments import chained
from adaattn.spec import AttentionProblem, Precision

__all__ = ["MOST_LINES", "Splits", "choose_splits", "is_wide", "partials", "slices"]

MOST_LINES: Final = 128
"""Rows of a plane, and keys, at most: they are one tile."""

_ROWS: Final = 16
"""Rows of a tile. Tiles of 32 and 64 read keys fewer times, and took as long or longer (H200; of
fp32 at D 8192 and 64 rows those of 64 took 6 % less)."""

_STEP: Final = 64
"""Columns that are summed over at once, and split at least."""

_MOST_SPLITS: Final = 16
"""Parts of a sum at most: 32 took 1.5 to 3 us longer wherever they are as many programs (H200)."""

_WIDE: Final = 64
"""Keys from which on fp32 is another case: 8 warps a tile, slices of 128 columns instead of 64, and
launches that do not overlap, which took 1.6 times as long at D 2048 and 64 rows (H200)."""

_SLICE: Final = 128
"""Columns of a result that one program computes."""


@dataclass(frozen=True, slots=True)
class Splits:
    """How one product's sums are split.

    Args:
        count: of parts.
        columns: of each.
    """

    count: int
    columns: int


def choose_splits(problem: AttentionProblem, columns: int, num_processors: int) -> Splits:
    """Return how the product of the rows of all planes with their keys is split.

    Args:
        problem: of the call.
        columns: that are summed over.
        num_processors: of the device.

    Example:
        >>> from adaattn.testing import make_problem
        >>> problem = make_problem(num_heads=4, len_q=16)
        >>> [choose_splits(problem, columns, 132).count for columns in (512, 2048, 8192)]
        [8, 16, 16]
    """
    lines = problem.group_size * problem.len_q
    programs = max(problem.batch * problem.num_kv_heads * -(-lines // _ROWS), 1)
    wanted = max(num_processors // programs, 1)
    most = min(1 << math.floor(math.log2(wanted)), _MOST_SPLITS, -(-columns // _STEP))
    of_split = -(-columns // most // _STEP) * _STEP
    return Splits(count=-(-columns // of_split), columns=of_split)


def partials(
    problem: AttentionProblem,
    left: torch.Tensor,
    right: torch.Tensor,
    pitch: int,
    splits: Splits,
    *,
    follows: bool,
    overlaps: bool,
) -> Launch:
    """Return the launch of the parts of products of rows [B, Hq, Sq, D] and keys [B, Hkv, Sk, D].

    Args:
        problem: of the call.
        left: the rows.
        right: the keys.
        pitch: what lines of the result are apart.
        splits: of D.
        follows: it may begin before what it waits for has ended.
        overlaps: what comes next may do so.
    """
    batch, kv_heads, len_k, columns = right.shape
    blocks = -(-problem.group_size * left.shape[2] // _ROWS)
    return Launch(
        module="streamed.split_products",
        name="partial_products",
        grid=(batch * kv_heads * blocks, splits.count, 1),
        numbers=(
            *(*left.stride()[:3], *right.stride()[:3]),
            *(kv_heads, left.shape[2], len_k, columns, splits.columns, pitch, 1.0),
        ),
        constants=(
            *(_ROWS, _tile(pitch), _STEP, problem.group_size),
            *(_align(left, right), _dot(problem), follows, overlaps),
        ),
        options=(*_warps(problem, _tile(pitch)), ("num_stages", 3), *chained(follows)),
    )


def slices(
    problem: AttentionProblem,
    right: torch.Tensor,
    out: torch.Tensor,
    *,
    pitch: int,
    scale: float = 1.0,
    is_transposed: bool = False,
    overlaps: bool,
) -> Launch:
    """Return the launch of products of weights and rows, one slice of the columns a program.

    Args:
        problem: of the call.
        right: keys or values [B, Hkv, Sk, D]; where transposed rows [B, Hq, Sq, D].
        out: the result, of rows; where transposed of keys.
        pitch: what lines of the weights are apart.
        scale: factor of the result.
        is_transposed: weights are.
        overlaps: it may begin before what it waits for has ended, and what comes next likewise.
    """
    batch, kv_heads, group = problem.batch, problem.num_kv_heads, problem.group_size
    line_rows, key_rows = problem.len_q, problem.len_k
    out_rows, inner = group * line_rows, key_rows
    if is_transposed:
        out_rows, inner = inner, out_rows
    columns = right.shape[3]
    few = problem.precision is Precision.FP32 and not is_wide(problem, problem.len_k)
    width = _SLICE // 2 if few else _SLICE
    return Launch(
        module="streamed.split_products",
        name="slice_products",
        grid=(batch * kv_heads * -(-out_rows // _ROWS), -(-columns // width), 1),
        numbers=(
            *(*right.stride()[:3], *out.stride()[:3]),
            *(kv_heads, line_rows, key_rows, columns, scale, pitch),
        ),
        constants=(
            *(_ROWS, _tile(inner), width, group, is_transposed),
            *(_align(right, out), _dot(problem), overlaps, overlaps),
        ),
        options=(*_warps(problem, _tile(inner)), *chained(overlaps)),
    )


def _tile(count: int) -> int:
    """Return the power of two from 16 on that holds a number of rows."""
    return max(_ROWS, 1 << (count - 1).bit_length())


def _align(*tensors: torch.Tensor) -> int:
    """Return what columns and strides are multiples of: 16 bytes of numbers, or 1."""
    step = 16 // tensors[0].element_size()
    sizes = (size for it in tensors for size in (it.shape[3], *it.stride()[:3]))
    return 1 if any(size % step for size in sizes) else step


def is_wide(problem: AttentionProblem, keys: int) -> bool:
    """Return whether keys are many for fp32, whose products hold three numbers for one."""
    return problem.precision is Precision.FP32 and _tile(keys) >= _WIDE


def _warps(problem: AttentionProblem, keys: int) -> tuple[tuple[str, int], ...]:
    """Return the warps of a tile: many keys in fp32 spilled in 4."""
    return (("num_warps", 8 if is_wide(problem, keys) else 4),)


def _dot(problem: AttentionProblem) -> str:
    """Return the arithmetic of products: of fp32 three of tf32, which keep its accuracy."""
    return "tf32x3" if problem.precision is Precision.FP32 else "tf32"
