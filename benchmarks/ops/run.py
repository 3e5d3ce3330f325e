"""Compares AdaAttn with PyTorch's ways cell by cell; no time on a wrong result.

    python -m benchmarks.ops.run --device cuda --only "dense D128" "window D128" --limit-s 500

A text of ``--only`` selects the cells whose names have all of its words, and none after a "-"
("dense D128 -backward"). Every result is held
against float64 first (`benchmarks/ops/check.py`); all who are right are then timed in turns in
one run. What refuses, fails, runs out of memory or is wrong has its reason in the row.
"""

import argparse
import gc
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from adaattn.hardware import peak_memory
from adaattn.hardware.datasheet import find_datasheet
from benchmarks.failures import FailedError, blamed, is_lost, time_limit
from benchmarks.ops.check import Exact
from benchmarks.ops.contestants import ALL_BLOCKS, NAIVE, OURS, SDPA, Call, contestants
from benchmarks.ops.inputs import Inputs, make_inputs, tiny
from benchmarks.ops.registry import Cell, cells, selected
from benchmarks.timing import arguments, interleaved, ratio_row, save

_CELL_S = 6.0
"""Seconds that the rounds of one cell may take on a GPU, after which no further one begins."""

METHOD = {
    "time": "CUDA events around each call, the L2 cache written over before it, all launched while "
    "the device spins; median over interleaved rounds. On a CPU the wall clock.",
    "flops": "2 B H pairs (D + Dv), 4 B H Sq Sk D for full attention, about half for causal; 3.5 "
    "times that with the backward pass, 2.5 alone; pairs that a mask tensor hides count",
    "bytes": "q, k, v, the output and a mask tensor that is given, each once",
    "roofline": "the larger of flops / peak and bytes / bandwidth, over the measured time; peaks "
    "of the data sheet, of fp32 that of three tf32 products at half the bf16 rate",
    "workspace": "most memory allocated during a warm call beyond inputs and output, and beyond "
    "the mask that was made beforehand, which is mask_bytes",
}


def compare(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result row of one cell; without ``timings`` where nobody could be timed."""
    skipped: dict[str, str] = {}
    facts = {"kind": cell.kind, "shape": cell.shape, "value_dim": cell.dim_v}
    facts |= {"dtype": str(cell.dtype).removeprefix("torch."), "skipped": skipped}
    try:
        with blamed("benchmark"):
            inputs = make_inputs(cell, options.device)
            calls, found = _right_ones(cell, inputs, options, skipped)
            timings = {}
            if calls:
                runs = {name: call.run for name, call in calls.items()}
                limit_s = _CELL_S if options.device == "cuda" else math.inf
                timings = interleaved(
                    runs, device=options.device, rounds=options.rounds, limit_s=limit_s
                )
    except FailedError as error:
        return {"cell": cell.name, "failed": str(error), **facts}
    if not timings:
        return {"cell": cell.name, "failed": "nobody could be timed", **facts}
    peer = next(
        (name for name in (ALL_BLOCKS, SDPA, NAIVE) if name in timings), next(iter(timings))
    )
    rates = {name: _rates(cell, each.median_ms, options) for name, each in timings.items()}
    return ratio_row(cell.name, timings, peer, **facts, **found, rates=rates)


def _right_ones(
    cell: Cell, inputs: Inputs, options: argparse.Namespace, skipped: dict[str, str]
) -> tuple[dict[str, Call], dict[str, Any]]:
    """Return the calls with right results, and what is known of each beside its time."""
    exact = Exact(cell, inputs)
    calls: dict[str, Call] = {}
    found: dict[str, Any] = {
        name: {} for name in ("relative_error", "workspace_bytes", "mask_bytes", "chosen")
    }
    found["kernel"] = ""
    for name, make in contestants(cell, with_flex=not options.no_flex):
        try:
            with blamed(name):
                call, error = exact.held(name, make(cell, inputs))
                if error is not None:
                    found["relative_error"][name] = error
                found["workspace_bytes"][name] = _workspace(call, options.device)
        except FailedError as error:
            skipped[name] = str(error)
            found["relative_error"].pop(name, None)
            found["workspace_bytes"].pop(name, None)
            _free(options.device)
            continue
        calls[name] = call
        if name == SDPA:
            found["kernel"] = _kernel(call, options.device)
        if call.mask is not None:
            found["mask_bytes"][name] = call.mask.nbytes
        if call.chosen:
            found["chosen"][name] = call.chosen
    return calls, found


def _workspace(call: Call, device: str) -> int | None:
    """Return the most memory that a warm call takes beside its inputs and output."""
    if device == "cpu":
        _free(device)  # resident memory is counted there, what was freed before too
    with peak_memory(device) as peak:
        found = call.run()
        if device == "cuda":
            torch.cuda.synchronize()
    made = sum(item.nbytes for item in ([found] if isinstance(found, torch.Tensor) else found))
    return None if peak.added_bytes is None else max(peak.added_bytes - made, 0)


def _kernel(call: Call, device: str) -> str:
    """Return the name of the kernel, on a CPU of PyTorch's operator, that took the most time.

    "" where the profiler cannot say.
    """
    try:
        with blamed("profiler"):
            return _profiled(call, device)
    except FailedError as error:
        print(f"  no name of a kernel: {error}", flush=True)
        return ""


def _profiled(call: Call, device: str) -> str:
    """Return what the profiler says."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = device == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        call.run()
        if on_gpu:
            torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profile.key_averages():
        if on_gpu:
            spent[event.key] = float(getattr(event, "self_device_time_total", 0.0))
        elif event.key.startswith("aten::_scaled_dot_product"):
            spent[event.key] = float(event.self_cpu_time_total)
    return max(spent, key=spent.__getitem__, default="")


def _rates(cell: Cell, median_ms: float, options: argparse.Namespace) -> dict[str, float | None]:
    """Return TFLOP/s, GB/s and percent of the roofline, None where the peaks are unknown."""
    seconds = median_ms / 1e3
    found: dict[str, float | None] = {
        "tflops": cell.flops / seconds / 1e12,
        "gb_per_s": None if cell.backward else cell.bytes_moved / seconds / 1e9,
        "roofline_percent": None,
    }
    sheet = find_datasheet(torch.cuda.get_device_name()) if options.device == "cuda" else None
    if sheet is not None:
        peak = max(sheet.bf16 / 6, sheet.fp32) if cell.dtype is torch.float32 else sheet.bf16
        least = cell.flops / (peak * 1e12)
        if not cell.backward:
            least = max(least, cell.bytes_moved / (sheet.bandwidth * 1e9))
        found["roofline_percent"] = 100 * least / seconds
    return found


def _free(device: str) -> None:
    """Give back what no tensor uses."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _line(row: dict[str, Any]) -> str:
    """Return a row as a line of progress."""
    reasons = "".join(
        f"  {name}: {reason.splitlines()[0][:90]}"
        for name, reason in row["skipped"].items()
        if reason.startswith("wrong") or "Error" in reason
    )
    if "failed" in row:
        return f"{row['cell']:<40} FAILED: {row['failed'].splitlines()[0]}{reasons}"
    peer = row["peer"]
    parts = [f"{row['cell']:<40} {peer} {row['timings'][peer]['median_ms']:9.4f} ms"]
    for name, gain in row["speedup"].items():
        parts.append(f"{name} {gain:.3f}x")
    ours = row["rates"].get("adaattn", {})
    parts.append(f"{ours.get('tflops', 0.0):.3g} TFLOP/s [{row['chosen'].get('adaattn', '')}]")
    return " ".join(parts) + reasons


def _write(rows: list[dict[str, Any]], options: argparse.Namespace) -> Path:
    """Write what is there, rows without times apart, and return the path."""
    name = f"ops_{options.device}" + (f"_{options.part}" if options.part else "")
    timed = [row for row in rows if "failed" not in row]
    failed = [row for row in rows if "failed" in row]
    return save(name, options, timed, failed=failed, method=METHOD)


def run(options: argparse.Namespace) -> tuple[Path, int]:
    """Return the path of the result, written after each cell, and the exit status."""
    chosen = selected(cells("cuda" if options.tiny else options.device), options.only)
    end = time.monotonic() + options.limit_s
    rows: list[dict[str, Any]] = []
    path = _write(rows, options)
    for cell in (tiny(cell) for cell in chosen) if options.tiny else chosen:
        if time.monotonic() > end:
            print(f"stopped after {options.limit_s:g} s and {len(rows)} cells", flush=True)
            break

        def hung(name: str = cell.name) -> None:
            print(f"{name}: HUNG for {options.cell_limit_s:g} s", flush=True)

        with time_limit(options.cell_limit_s, hung), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            begun = time.monotonic()
            row = compare(cell, options)
            rows.append(row | {"seconds": round(time.monotonic() - begun, 2)})
            print(_line(rows[-1]), flush=True)
            path = _write(rows, options)
            if is_lost(options.device):
                print("stopped: the device takes no more work", flush=True)
                return path, 1
            _free(options.device)
    wrong = [
        (row["cell"], name)
        for row in rows
        for name, reason in row["skipped"].items()
        if reason.startswith("wrong")
    ]
    print(f"{len(rows)} of {len(chosen)} cells, {len(wrong)} wrong results {wrong or ''}")
    return path, 1 if any(name.startswith(OURS) for _, name in wrong) else 0


def main(given: list[str] | None = None) -> int:
    """Return 1 if a result of ours was wrong or the device was lost, else 0."""
    parser = arguments((__doc__ or "").splitlines()[0], selects_many=True)
    parser.add_argument("--limit-s", type=float, default=1e6, help="no cell begins later")
    parser.add_argument("--cell-limit-s", type=float, default=180, help="a cell hangs after that")
    parser.add_argument("--no-flex", action="store_true", help="compile no FlexAttention")
    parser.add_argument("--part", default="", help="added to the name of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="the GPU's cells at toy sizes")
    options = parser.parse_args(given)
    gc.freeze()  # what is imported stays: looking through it takes 0.1 s each time
    try:
        path, status = run(options)
    finally:
        gc.unfreeze()
    print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
