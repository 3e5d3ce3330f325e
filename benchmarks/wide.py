"""Head dimensions above 256: our ways of computing them, beside PyTorch's.

    python -m benchmarks.wide --device cuda --limit-s 500
    python -m benchmarks.wide --device cuda --variants --only "small" --limit-s 200
    python -m benchmarks.wide --device cuda --low-rank

Each cell of `benchmarks.ops` of the kinds `wide` and `small` is checked first, by its rule, and
then timed in turns: PyTorch's function and each of its kernels, attention written out, and ours.
``--variants`` adds ours by number of rows in a chunk, keys in a block, and how products are split.
``--low-rank`` times `benchmarks.wide_low_rank` instead.
Few rows are timed as CUDA graphs of many calls, warm; all else as in `benchmarks.ops`. On a CPU,
where Triton's interpreter multiplies no bf16, to see that all runs.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn.backends.streamed import arguments as launches
from adaattn.backends.streamed import direct as chunked
from adaattn.backends.streamed import executor, small, split
from adaattn.spec import AttentionProblem, HeadGroup, Launch, Precision
from adaattn.testing import make_problem
from benchmarks.failures import FailedError, RefusedError, blamed, is_lost, time_limit
from benchmarks.ops.check import Exact
from benchmarks.ops.contestants import NAIVE, OURS, SDPA, Call, contestants
from benchmarks.ops.inputs import Inputs, make_inputs, tiny
from benchmarks.ops.registry import Cell, cells, selected
from benchmarks.timing import Timing, arguments, behind_spin, interleaved, ratio_row, save
from benchmarks.wide_low_rank import CELLS, LowRankCell
from benchmarks.wide_low_rank import row_of as low_rank_row

_KERNELS: Final = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_ROWS: Final = (512, 1024, 2048, 4096, 8192, 16384)
_KEYS: Final = (2048, 8192, 16384)
_CALLS: Final = 50
"""Calls of few rows in one CUDA graph."""

_SPLITS: Final[dict[str, dict[str, Any]]] = {
    "32 rows": {"_ROWS": 32},
    "64 rows": {"_ROWS": 64},
    "8 splits": {"_MOST_SPLITS": 8},
    "32 splits": {"_MOST_SPLITS": 32},
    "slices of 64": {"_SLICE": 64},
    "slices of 256": {"_SLICE": 256},
}
"""What stands for constants of `split`, where it is not what they are."""

Make = Callable[[], Callable[[], torch.Tensor]]


def variants(cell: Cell, inputs: Inputs) -> Iterator[tuple[str, Make]]:
    """Yield the name of each of our ways of computing a cell, and what makes its call."""
    problem = problem_of(cell)
    lines = problem.group_size * problem.len_q
    multiplies = inputs.query.is_cuda or cell.dtype is torch.float32
    if max(lines, problem.len_k) <= split.MOST_LINES and multiplies:
        yield "small", partial(_small, problem, inputs)
        for name, constants in _SPLITS.items() if not cell.backward else ():
            yield f"small, {name}", partial(_small, problem, inputs, constants)
        apart = patch.object(small, "_OVERLAPS_FROM", (99, 0))
        yield "small, launches apart", partial(_small, problem, inputs, {}, apart)
    yield "streamed", partial(_streamed, problem, inputs, 0)
    for rows in _ROWS:
        if rows < 2 * problem.len_q:
            yield f"streamed, {rows} rows", partial(_streamed, problem, inputs, rows)
    for keys in _KEYS if not cell.backward else ():
        block = patch.object(launches, "_MOST_KEYS", keys)
        yield f"streamed, blocks of {keys}", partial(_streamed, problem, inputs, 0, block)


def problem_of(cell: Cell) -> AttentionProblem:
    """Return a cell as a problem."""
    batch, heads, kv_heads, len_q, len_k, dim = cell.shape
    return make_problem(
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        len_q=len_q,
        len_k=len_k,
        head_dim=dim,
        value_dim=cell.dim_v,
        is_causal=cell.given.is_causal,
        precision=Precision.FP32 if cell.dtype is torch.float32 else Precision.BF16,
        device_type="cuda" if torch.cuda.is_available() else "cpu",
        requires_grad=cell.backward,
    )


def _small(
    problem: AttentionProblem,
    inputs: Inputs,
    constants: dict[str, Any] | None = None,
    also: AbstractContextManager[Any] | None = None,
) -> Callable[[], torch.Tensor]:
    """Return a call of `small`, its launches made with other constants."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(also or contextlib.nullcontext())
        for name, value in (constants or {}).items():
            stack.enter_context(patch.object(split, name, value))
        launcher = small._Launcher(problem)
        launcher(*(item.detach() for item in inputs.qkv))
    if problem.requires_grad:
        return partial(small.direct(problem, HeadGroup(capability="small")), *inputs.qkv)
    return partial(launcher, *inputs.qkv)


def _streamed(
    problem: AttentionProblem,
    inputs: Inputs,
    rows: int,
    also: AbstractContextManager[Any] | None = None,
) -> Callable[[], torch.Tensor]:
    """Return a call of `streamed` by so many rows; 0 are those that it chooses."""
    if problem.requires_grad:
        group = HeadGroup(capability="streamed", launch=Launch(chunk_rows=rows))
        return partial(chunked(problem, group), *inputs.qkv)
    with also or contextlib.nullcontext():
        launcher = executor._Launcher(problem, rows)
        launcher(*inputs.qkv)
    return partial(launcher, *inputs.qkv)


def peers(cell: Cell, inputs: Inputs) -> Iterator[tuple[str, Make]]:
    """Yield PyTorch's ways: its function, each kernel by name, and attention written out."""
    for name, make in contestants(cell, with_flex=False):
        if name in (SDPA, NAIVE, OURS):
            yield name, lambda make=make: make(cell, inputs).run  # type: ignore[misc]
    if inputs.is_grouped or inputs.query.device.type != "cuda":
        return
    for kernel in _KERNELS:

        def run(kernel: SDPBackend = kernel) -> torch.Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(*inputs.qkv, is_causal=cell.given.is_causal)

        yield f"{SDPA}/{kernel.name.lower()}", lambda run=run: run  # type: ignore[misc]


def right_ones(
    cell: Cell, inputs: Inputs, skipped: dict[str, str], peaks: dict[str, int], has_variants: bool
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the calls whose results are right; why others are not timed is noted."""
    exact, found = Exact(cell, inputs), {}
    ours = [it for it in variants(cell, inputs) if has_variants or "," not in it[0]]
    for name, make in (*peers(cell, inputs), *ours):
        try:
            with blamed(name):
                call, _ = exact.held(name, Call(run=make()))
                peaks[name] = peak_bytes(call.run)
        except (FailedError, RefusedError) as error:
            skipped[name] = str(error)
            continue
        found[name] = call.run
    return found


def peak_bytes(function: Callable[[], torch.Tensor]) -> int:
    """Return what a call allocates at most, its result among it; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() - before


def graphed(function: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return what replays some calls that a CUDA graph holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            function()
    return graph.replay


def timed_graphs(
    runs: dict[str, Callable[[], torch.Tensor]], options: argparse.Namespace
) -> dict[str, Timing]:
    """Return the time of one call in a graph of many, in turns."""
    graphs = {name: graphed(run) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(options.rounds):
        names = list(graphs)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(behind_spin(graphs[name], 1, options.device) / _CALLS)
    return {
        name: Timing(
            median_ms=statistics.median(values),
            low_ms=min(values),
            high_ms=max(values),
            rounds=len(values),
        )
        for name, values in samples.items()
    }


def row_of(cell: Cell | LowRankCell, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result row of a cell."""
    if isinstance(cell, LowRankCell):
        return low_rank_row(cell, options)
    skipped: dict[str, str] = {}
    peaks: dict[str, int] = {}
    inputs = make_inputs(cell, options.device)
    runs = right_ones(cell, inputs, skipped, peaks, options.variants)
    in_graphs = cell.kind == "small" and options.device == "cuda"
    if in_graphs:
        timings = timed_graphs(runs, options)
    else:
        timings = interleaved(runs, device=options.device, rounds=options.rounds, limit_s=8.0)
    peer = SDPA if SDPA in timings else next(iter(timings))
    rates = {name: cell.flops / it.median_ms / 1e9 for name, it in timings.items()}
    facts = {"kind": cell.kind, "shape": cell.shape, "value_dim": cell.dim_v, "tflops": rates}
    facts |= {"peak_bytes": peaks}
    return ratio_row(cell.name, timings, peer, in_graphs=in_graphs, skipped=skipped, **facts)


def main(given: list[str] | None = None) -> int:
    """Return 1 if a result of ours was wrong or the device was lost, else 0."""
    parser = arguments((__doc__ or "").splitlines()[0], selects_many=True)
    parser.add_argument("--variants", action="store_true", help="time our other ways, too")
    parser.add_argument("--low-rank", action="store_true", help="time low rank under a budget")
    parser.add_argument("--limit-s", type=float, default=1e6, help="no cell begins later")
    parser.add_argument("--cell-limit-s", type=float, default=180, help="a cell hangs after that")
    options = parser.parse_args(given)
    chosen = chosen_cells(options)
    end = time.monotonic() + options.limit_s
    rows: list[dict[str, Any]] = []
    path = None
    name = f"wide_low_rank_{options.device}" if options.low_rank else f"wide_{options.device}"
    for cell in chosen:
        if time.monotonic() > end:
            print(f"stopped after {options.limit_s:g} s and {len(rows)} cells", flush=True)
            break
        with time_limit(options.cell_limit_s, partial(print, cell.name, "HUNG", flush=True)):
            rows.append(row_of(cell, options))
        best = sorted(rows[-1]["timings"].items(), key=lambda item: item[1]["median_ms"])
        told = " ".join(f"{name} {1e3 * it['median_ms']:.1f}" for name, it in best)
        wrong = {name: text[:80] for name, text in rows[-1]["skipped"].items() if "wrong" in text}
        print(f"{cell.name} [us]: {told} {wrong or ''}", flush=True)
        path = save(name, options, rows)
        if is_lost(options.device):
            return 1
    print(path)
    return int(any("wrong" in text for row in rows for text in row["skipped"].values()))


def chosen_cells(options: argparse.Namespace) -> list[Cell] | list[LowRankCell]:
    """Return what is timed, at toy sizes on a CPU."""
    is_whole = options.device == "cuda"
    if options.low_rank:
        named = [it for it in CELLS if any(text in it.name for text in options.only)]
        return [it if is_whole else it.tiny() for it in named]
    ours = [it for it in selected(cells("cuda"), options.only) if _is_ours(it)]
    return [it if is_whole else tiny(it) for it in ours]


def _is_ours(cell: Cell) -> bool:
    """Return whether a cell is of large head dimensions."""
    return cell.kind.startswith(("wide", "small"))


if __name__ == "__main__":
    sys.exit(main())
