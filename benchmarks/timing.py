"""Interleaved timing of functions on a CPU or a GPU, and results as JSON with machine facts."""

import argparse
import json
import math
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import adaattn
from adaattn import hardware

RESULTS = Path(__file__).parent / "results"

_MOST_SPIN_MS, _LONG_LAUNCH_MS = 50.0, 2.5
_LEAST_ROUNDS = 5
_FLUSHED_BYTES = 1 << 28
"""Written before each call: five times the L2 cache of an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of one function over interleaved rounds."""

    median_ms: float
    low_ms: float
    high_ms: float
    rounds: int


def interleaved(
    functions: dict[str, Callable[[], Any]],
    *,
    device: str,
    rounds: int = 15,
    budget_ms: float = 8,
    limit_s: float = math.inf,
) -> dict[str, Timing]:
    """Return the time of each function; every round runs each once, in rotating order.

    On a GPU it is device time, from a cold L2 cache (`cold`). Each round repeats a function until
    about ``budget_ms`` have passed, on a GPU at most 20 times: what is launched must fit the
    queue behind the spin.

    Args:
        functions: what is timed.
        device: "cpu" or "cuda".
        rounds: how often each is timed.
        budget_ms: how long each is repeated in a round.
        limit_s: after the first five no further round begins later than that.
    """
    sample = partial(_once, device=device)
    most = 1000
    if device == "cuda":
        flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
        sample, most = partial(cold, flushed=flushed), 20
    counts = {name: _count(run, sample, budget_ms, most) for name, run in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    end = time.monotonic() + limit_s
    for number in range(rounds):
        if number >= _LEAST_ROUNDS and time.monotonic() > end:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            samples[name].append(sample(functions[name], counts[name]))
    return {
        name: Timing(
            median_ms=statistics.median(values),
            low_ms=min(values),
            high_ms=max(values),
            rounds=len(values),
        )
        for name, values in samples.items()
    }


def behind_spin(function: Callable[[], Any], count: int, device: str) -> float:
    """Return the device's milliseconds for a call, all launched while the device still spins."""
    torch.cuda.synchronize(device)
    launch_ms = _launch_ms(function, count)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _spin(launch_ms)
    begin.record()
    for _ in range(count):
        function()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / count


def cold(function: Callable[[], Any], count: int, flushed: torch.Tensor) -> float:
    """Return the device's milliseconds for a call that finds nothing of its inputs in the L2 cache.

    As `behind_spin`, but each call has its own pair of events, and a buffer is written before it.

    Args:
        function: what is timed.
        count: how many calls; the mean is returned.
        flushed: a buffer on the device, larger than its L2 cache.
    """
    torch.cuda.synchronize()
    # A single call is a long one: it need not run twice to hide what its launch takes.
    launch_ms = _launch_ms(function, count) if count > 1 else _LONG_LAUNCH_MS
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    _spin(launch_ms + 0.05 * count)
    for begin, end in pairs:
        flushed.zero_()
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sum(float(begin.elapsed_time(end)) for begin, end in pairs) / count


def _launch_ms(function: Callable[[], Any], count: int) -> float:
    """Return how long the host takes to launch some calls; the device is idle after them."""
    start = time.perf_counter()
    for _ in range(count):
        function()
    launch_ms = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return launch_ms


def _spin(launch_ms: float) -> None:
    """Keep the device busy for twice as long as launching takes.

    Its clock counts two million cycles a millisecond at most.
    """
    torch.cuda._sleep(int(2e6 * min(2 * launch_ms + 0.2, _MOST_SPIN_MS)))


@cache
def machine_facts(device: str) -> dict[str, Any]:
    """Return what a reader needs to repeat a figure."""
    facts = hardware.probe(device)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "device": facts.name,
        "device_type": facts.device_type,
        "processors": facts.num_processors,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver() if facts.device_type == "cuda" else None,
        "triton": _version("triton"),
        "cudnn": torch.backends.cudnn.version() if facts.device_type == "cuda" else None,
        "adaattn": adaattn.__version__,
        "commit": commit.stdout.strip() or "not a checkout",
        "date": datetime.now(UTC).date().isoformat(),
        "rates_source": facts.rates.source,
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's driver as ``nvidia-smi`` says it; None without that."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return (said.stdout.splitlines() or [""])[0].strip() or None


def _version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def save(
    name: str, options: argparse.Namespace, rows: list[dict[str, Any]], **sections: Any
) -> Path:
    """Write rows with machine facts to ``results/<name>.json`` and return the path.

    Args:
        name: of the benchmark.
        options: its command line.
        rows: what it found.
        **sections: what stands behind the rows; the options then follow.
    """
    device = options.device
    target = (options.out or RESULTS) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    machine = dict(machine_facts(device))
    machine["commit"] = options.commit or machine["commit"]
    document = {"benchmark": name, "machine": machine, "rows": rows, **sections}
    if sections:
        document["options"] = {
            key: it
            for key, it in vars(options).items()
            if key != "out" and not isinstance(it, Path)
        }
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return target


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, by default a GPU where there is one; one that is not there is refused."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cpu", "cuda"), type=_present)


def _present(device: str) -> str:
    """Return a device that was asked for."""
    if device == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("this PyTorch sees no CUDA device")
    return device


def arguments(description: str, *, selects_many: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark takes.

    Args:
        description: what the benchmark does.
        selects_many: ``--only`` takes several texts, and is a list of them.
    """
    parser = argparse.ArgumentParser(description=description)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON result")
    parser.add_argument("--commit", default="", help="what to record where there is no checkout")
    only: dict[str, Any] = {"nargs": "+", "default": [""]} if selects_many else {"default": ""}
    parser.add_argument("--only", help="run the cells whose name contains this", **only)
    return parser


def ratio_row(name: str, timings: dict[str, Timing], peer: str, **more: Any) -> dict[str, Any]:
    """Return one result: all timings and each function's speed-up over ``peer``."""
    base = timings[peer].median_ms
    return {
        "cell": name,
        "peer": peer,
        "speedup": {
            key: round(base / value.median_ms, 3) for key, value in timings.items() if key != peer
        },
        "timings": {key: asdict(value) for key, value in timings.items()},
        **more,
    }


def _count(
    function: Callable[[], Any], sample: Callable[..., float], budget_ms: float, most: int
) -> int:
    """Return how many repetitions fill the budget; the function is warmed."""
    sample(function, 1)
    once = min(sample(function, 1) for _ in range(3))
    return max(1, min(most, round(budget_ms / max(once, 1e-3))))


def _once(runner: Callable[[], Any], count: int, device: str) -> float:
    """Return the milliseconds of one of ``count`` repetitions."""
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            runner()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / count
    begin = time.perf_counter()
    for _ in range(count):
        runner()
    return 1e3 * (time.perf_counter() - begin) / count
