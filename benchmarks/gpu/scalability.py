"""Suite 4: how time and memory grow with tokens, batch and heads."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.rows import Row, Settings
from benchmarks.gpu.tensors import TensorCell, naive, ours, run_tensors, sdpa

__all__ = ["run"]

_FUNCTIONS = {"naive": naive, "F.sdpa": sdpa, "adaattn": ours}

_SCORE_COPIES = 3
"""Scores, hidden scores and weights: what the naive way holds at once."""

_NAIVE_SHARE = 0.5
"""Of the memory there is: where the naive way needs more it is not tried outside of a limit."""


def run(settings: Settings) -> list[Row]:
    """Return the rows of the suite."""
    rows: list[Row] = []
    for axis, cell in cells(settings):
        rows += run_tensors(
            cell,
            {name: one for name, one in _FUNCTIONS.items() if name != "naive" or _fits(cell)},
            settings,
            {"suite": "scalability"},
            peer="F.sdpa",
        )
        for index, row in enumerate(rows):
            if row.cell == cell.name:
                row.extra["axis"] = axis
                rows[index] = row
    return rows


def cells(settings: Settings) -> Iterator[tuple[str, TensorCell]]:
    """Yield (what grows, sizes)."""
