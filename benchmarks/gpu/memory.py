"""Suite 3: peak memory of every implementation, and what runs under a real limit."""

import torch

from benchmarks.gpu import budget
from benchmarks.gpu.implementation import run_cell
from benchmarks.gpu.rows import Row, Settings
from benchmarks.gpu.variants import ModuleCell

__all__ = ["run"]


def run(settings: Settings) -> list[Row]:
    """Return the rows of the suite: peaks of forward and training, then the limits."""
    rows: list[Row] = []
    for cell in _cells(settings):
        for training in (False, True):
            rows += _with_savings(run_cell("memory", cell, settings, training=training))
    return rows + budget.run(settings)


def _cells(settings: Settings) -> list[ModuleCell]:
    """Return the layers whose peaks are compared."""
    if settings.quick:
        return [ModuleCell(name="B1_S512", batch=1, length=512, embed_dim=64, num_heads=4)]
    if settings.is_gpu:
        return [
            ModuleCell(
                name="B4_S4096 E2048",
                batch=4,
                length=4096,
                embed_dim=2048,
                num_heads=16,
                dtype=torch.bfloat16,
            )
        ]
    return [ModuleCell(name="B1_S2048", batch=1, length=2048, embed_dim=512, num_heads=8)]


def _with_savings(rows: list[Row]) -> list[Row]:
    """Return the rows, each with the share of the naive way's peak that it saves."""
    peaks = {row.variant: row.peak_bytes for row in rows}
    naive = peaks.get("naive")
    for row in rows:
        if naive and row.peak_bytes is not None:
            row.extra["saved_against_naive"] = 1 - row.peak_bytes / naive
    return rows
