"""Suite 4: how time and memory grow with tokens, batch and heads."""

from collections.abc import Iterator

import torch

from adaattn.hardware import free_memory_bytes
from benchmarks.gpu.rows import UNAVAILABLE, Row, Settings, line
from benchmarks.gpu.tensors import TensorCell, naive, ours, run_tensors, sdpa

__all__ = ["cells", "run"]

_FUNCTIONS = {"naive": naive, "F.sdpa": sdpa, "adaattn": ours}

_SCORE_COPIES = 3
"""Scores, hidden scores and weights: what the naive way holds at once."""

_SHARE = 0.5
"""Of the free memory of a CPU: the naive way is not tried beyond, for a kernel would kill it."""


def run(settings: Settings) -> list[Row]:
    """Return the rows of the suite."""
    rows: list[Row] = []
    for cell in cells(settings):
        functions = dict(_FUNCTIONS)
        refusal = _refusal(cell, settings)
        if refusal:
            del functions["naive"]
            rows.append(
                Row(
                    suite="scalability",
                    cell=cell.name,
                    variant="naive",
                    status=UNAVAILABLE,
                    note=refusal,
                    extra={"shape": cell.shape, "axis": cell.axis},
                )
            )
            settings.say(line(rows[-1]))
        rows += run_tensors(cell, functions, settings, {"suite": "scalability"}, peer="F.sdpa")
    return rows


def cells(settings: Settings) -> Iterator[TensorCell]:
    """Yield the sizes along each axis."""
    if settings.quick:
        axes = {"tokens": ((1, 2, 64), (1, 2, 128)), "batch": ((2, 2, 64),), "heads": ((1, 4, 64),)}
        dim, dtype = 32, torch.float32
    elif settings.is_gpu:
        lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
        axes = {
            "tokens": tuple((1, 16, length) for length in lengths),
            "batch": tuple((batch, 16, 2048) for batch in (1, 4, 16, 64)),
            "heads": tuple((1, heads, 4096) for heads in (4, 16, 64)),
        }
        dim, dtype = 128, torch.bfloat16
    else:
        lengths = (512, 1024, 2048, 4096, 8192)
        axes = {
            "tokens": tuple((1, 8, length) for length in lengths),
            "batch": tuple((batch, 8, 512) for batch in (1, 4, 16)),
            "heads": tuple((1, heads, 1024) for heads in (4, 8, 16, 32)),
        }
        dim, dtype = 64, torch.float32
    for axis, sizes in axes.items():
        for batch, heads, length in sizes:
            yield TensorCell(
                name=f"{axis}: B{batch}_H{heads}_S{length}_D{dim}",
                shape=(batch, heads, length, dim),
                dtype=dtype,
                axis=axis,
            )


def _refusal(cell: TensorCell, settings: Settings) -> str:
    """Return why the naive way is not tried here; "" if it is."""
    batch, heads, length, _ = cell.shape
    needed = _SCORE_COPIES * batch * heads * length**2 * cell.dtype.itemsize
    free = free_memory_bytes(settings.device)
    if settings.is_gpu or free is None or needed <= _SHARE * free:
        return ""
    return f"needs about {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
