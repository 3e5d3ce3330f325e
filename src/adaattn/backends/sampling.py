"""Query rows of a call, computed exactly: what approximations are held against."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from adaattn.backends.common import grouped_product, softmax_rows, tile_scores
from adaattn.backends.interface import Tensors
from adaattn.spec import AttentionProblem, HeadMethod, TensorStats

__all__ = [
    "BLOCK_SIZE",
    "STRIDE",
    "Estimate",
    "Sampled",
    "Sampler",
    "choose_rows",
    "relative_errors",
    "row_weights",
    "scored_rows",
]

BLOCK_SIZE: Final = 64
"""Side of a block: small blocks keep less, and gathering hides below this size."""

STRIDE: Final = 16
"""Block selection scores one row in so many."""

_BLOCKS: Final = 32
"""Errors of block selection come in blocks of queries: few rows of many blocks see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Some rows of a call.

    Args:
        tensors: the call's, canonical.
        problem: simplified, not packed.
        rows: numbers of the rows, ascending.
        index: [R] the same rows on the device.
        weights: [B, Hq, R, Sk] their softmax weights in fp32 (fp64 for fp64).
        exact: [B, Hq, R, Dv] their outputs likewise.
    """

    tensors: Tensors
    problem: AttentionProblem
    rows: list[int]
    index: torch.Tensor
    weights: torch.Tensor
    exact: torch.Tensor

    @classmethod
    def of(
        cls,
        tensors: Tensors,
        problem: AttentionProblem,
        rows: list[int],
        index: torch.Tensor,
    ) -> "Sampled":
        """Return rows computed exactly.

        Args:
            tensors: the call's.
            problem: simplified, not packed.
            rows: their numbers, ascending.
            index: [R] the same on the device of the tensors.
        """
        weights = row_weights(tensors, problem, index)
        exact = grouped_product(weights, tensors.value.to(weights.dtype))
        return cls(
            tensors=tensors,
            problem=problem,
            rows=rows,
            index=index,
            weights=weights,
            exact=exact,
        )

    def errors(self, approximate: torch.Tensor) -> torch.Tensor:
        """Return the relative error of each head's rows, the worst over the batch: [Hq].

        Args:
            approximate: [B, Hq, R, Dv].
        """
        return relative_errors(approximate, self.exact).amax(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the rows say of one approximation, on the device.

    Args:
        method: with its parameters.
        errors: [Hq].
        densities: [Hq] share of the visible keys that is computed; None is all.
    """

    method: HeadMethod
    errors: torch.Tensor
    densities: torch.Tensor | None = None


Sampler = Callable[
    [Sampled, Sequence[HeadMethod], TensorStats, tuple[float, ...]],
    tuple[TensorStats, list[Estimate]],
]
"""What an executor that approximates says of its errors.

Takes the rows, the parameters to try, what is known of the tensors (the entropies) and the error
budget of each head, () for none. Returns what it has learnt of the tensors, and its estimates;
parameters that are far over each budget may be missing.
"""


def choose_rows(len_q: int, rows: int, seed: int) -> list[int]:
    """Return exactly ``rows`` query rows in a few blocks spread over the sequence, ascending.

    As far as there are others the rows are not those that block selection scores, which would
    flatter it. No more rows than the sequence has.
    """
    generator = random.Random(seed * 1_000_003 + len_q)
    num_blocks = max(-(-len_q // BLOCK_SIZE), 1)
    rows = min(rows, len_q)
    count = min(_BLOCKS, num_blocks, max(rows, 1))
    edges = [num_blocks * i // count for i in range(count + 1)]
    blocks = [generator.randrange(a, b) for a, b in pairwise(edges)]
    numbers: list[int] = []
    spare: list[int] = []
    for place, block in enumerate(blocks):
        inside = range(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, len_q))
        scored = set(scored_rows(inside.start, inside.stop, BLOCK_SIZE))
        ordered = [row for row in inside if row not in scored]
        generator.shuffle(ordered)
        ordered += [row for row in inside if row in scored]
        share = rows * (place + 1) // count - rows * place // count
        numbers += ordered[:share]
        spare += ordered[share:]
    if len(numbers) < rows:  # blocks too short for their share
        left = sorted(set(range(len_q)) - set(numbers) - set(spare))
        numbers += (spare + left)[: rows - len(numbers)]
    return sorted(numbers)


def scored_rows(start: int, stop: int, size: int) -> list[int]:
    """Return which of the query rows ``start..stop`` block selection scores.

    Beside every `STRIDE`-th row it is the last of each block: a head that looks at its
    neighbourhood needs the next block for its last rows alone.
    """
    last = range(start + (-start - 1) % size, stop, size)
    return sorted({*range(start, stop, STRIDE), *last, stop - 1})


def row_weights(tensors: Tensors, problem: AttentionProblem, rows: torch.Tensor) -> torch.Tensor:
    """Return the softmax weights [B, Hq, R, Sk] of some rows; zeros where nothing is seen."""
    scores = tile_scores(tensors, problem, rows, range(problem.len_k))
    if tensors.sinks is not None:
        return softmax_rows(scores, tensors.sinks).weights
    return torch.softmax(scores, dim=-1).nan_to_num_(0.0)


def relative_errors(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return ||approximate - exact|| / ||exact|| over rows and columns: [B, Hq]."""
    difference = (approximate.to(exact.dtype) - exact).flatten(2).norm(dim=-1)
    size = exact.flatten(2).norm(dim=-1)
    relative: torch.Tensor = difference / size.clamp_min(torch.finfo(exact.dtype).tiny)
    return relative
