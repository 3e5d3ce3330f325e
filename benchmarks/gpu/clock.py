"""Times, peaks and utilisation of functions, taken in one process and in turn."""

import contextlib
import ctypes
import gc
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from adaattn.hardware import peak_memory
from benchmarks.gpu.rows import Settings
from benchmarks.timing import _once as once

__all__ = ["free_unused", "once", "peak_bytes", "timed", "utilisation_meter"]

Function = Callable[[], Any]

_LEAST_ROUNDS = 3
_LOAD_S = 0.4
"""How long the GPU is kept busy for one figure; NVML averages over up to this long."""

_SAMPLE_MS = 50


def timed(functions: dict[str, Function], settings: Settings) -> dict[str, dict[str, Any]]:
    """Return mean, standard deviation, median and rounds of each function, as fields of a row.

    Functions are warm already. Every round runs each in rotating order, repeated for
    about ``round_ms``; what a round took, divided by its repetitions, is one sample. Eager
    calls are timed: on a GPU host time counts where the host is the slower one.
    """
    device = settings.device
    alone = {name: min(once(run, 1, device) for _ in range(2)) for name, run in functions.items()}
    counts = {name: max(1, round(settings.round_ms / max(ms, 1e-3))) for name, ms in alone.items()}
    round_s = sum(counts[name] * alone[name] for name in functions) / 1e3
    affordable = int(settings.limit_s / max(round_s, 1e-6))
    rounds = max(min(settings.rounds, affordable), min(_LEAST_ROUNDS, settings.rounds))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for number in range(rounds):
        shift = number % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            samples[name].append(once(functions[name], counts[name], device))
    return {
        name: {
            "mean_ms": statistics.fmean(values),
            "std_ms": statistics.stdev(values) if len(values) > 1 else 0.0,
            "median_ms": statistics.median(values),
            "rounds": rounds,
        }
        for name, values in samples.items()
    }


def peak_bytes(function: Function, device: str) -> int | None:
    """Return the memory that one call adds at its peak; None where it cannot be measured."""
    free_unused(device)
    with peak_memory(device) as peak:
        found = function()
        if device == "cuda":
            torch.cuda.synchronize()
    del found
    return peak.added_bytes


def free_unused(device: str) -> None:
    """Give back what no tensor uses, so that a peak counts what a call takes."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed pages, and a call would reuse them


@contextlib.contextmanager
def utilisation_meter(device: str) -> Iterator[Callable[[Function], float | None]]:
    """Yield a function that loads the GPU with another one and returns its utilisation.

    The figure is NVML's, by ``nvidia-smi``: percent of the time in which some kernel ran.
    None on a CPU and where there is no ``nvidia-smi``.
    """
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        yield lambda function: None
        return
    process = subprocess.Popen(
        [
            "nvidia-smi",
            f"--id={_card()}",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            f"--loop-ms={_SAMPLE_MS}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    samples: list[tuple[float, float]] = []
    thread = threading.Thread(target=_read, args=(process, samples), daemon=True)
    thread.start()
    try:
        yield lambda function: _loaded(function, samples)
    finally:
        process.terminate()
        process.wait(timeout=10)
        thread.join(timeout=10)


def _card() -> str:
    """Return what ``nvidia-smi`` calls the current device."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return "0" if uuid is None else f"GPU-{uuid}"


def _read(process: subprocess.Popen[str], samples: list[tuple[float, float]]) -> None:
    """Append each line that can be read as a number, with the time at which it came."""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            samples.append((time.perf_counter(), float(line)))


def _loaded(function: Function, samples: list[tuple[float, float]]) -> float | None:
    """Return the mean utilisation in the second half of a load."""
    start = time.perf_counter()
    while time.perf_counter() - start < _LOAD_S:
        once(function, 1, "cuda")
    end = time.perf_counter()
    late = [value for at, value in samples if start + _LOAD_S / 2 <= at <= end]
    return statistics.fmean(late) if late else None
