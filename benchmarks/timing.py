"""Interleaved timing of functions on a CPU or a GPU, and results as JSON with machine facts."""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import adaattn
from adaattn import hardware

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of one function over interleaved rounds."""

    median_ms: float
    low_ms: float
    high_ms: float
    rounds: int


def interleaved(
    functions: dict[str, Callable[[], Any]], *, device: str, rounds: int = 15, budget_ms: float = 8
) -> dict[str, Timing]:
    """Return the time of each function; every round runs each once, in rotating order.

    On CUDA a function is captured in a graph, so that device time is measured and host time
    is not; where capture fails, events around eager calls are used. Each round repeats a
    function until about ``budget_ms`` have passed.
    """
    runners = {name: _runner(function, device) for name, function in functions.items()}
    counts = {name: _count(runner, device, budget_ms) for name, runner in runners.items()}
    samples: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            samples[name].append(_once(runners[name], counts[name], device))
    return {
        name: Timing(
            median_ms=statistics.median(values),
            low_ms=min(values),
            high_ms=max(values),
            rounds=rounds,
        )
        for name, values in samples.items()
    }


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
        "cudnn": torch.backends.cudnn.version() if facts.device_type == "cuda" else None,
        "adaattn": adaattn.__version__,
        "commit": commit.stdout.strip() or "not a checkout",
        "date": datetime.now(UTC).date().isoformat(),
        "rates_source": facts.rates.source,
    }


def save(name: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> Path:
    """Write rows with machine facts to ``results/<name>.json`` and return the path."""
    device = options.device
    target = (options.out or RESULTS) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    machine = machine_facts(device)
    machine["commit"] = options.commit or machine["commit"]
    document = {"benchmark": name, "machine": machine, "rows": rows}
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return target


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON result")
    parser.add_argument("--commit", default="", help="what to record where there is no checkout")
    parser.add_argument("--only", default="", help="run the cells whose name contains this")
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


def _runner(function: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return a CUDA graph's replay of the function where it can be captured, else itself."""
    function()
    if device != "cuda":
        return function
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"  not captured ({str(error).splitlines()[0][:80]}); eager calls are timed")
        return function
    return graph.replay


def _count(runner: Callable[[], Any], device: str, budget_ms: float) -> int:
    """Return how many repetitions fill the budget."""
    _once(runner, 1, device)
    once = min(_once(runner, 1, device) for _ in range(3))
    return max(1, min(1000, round(budget_ms / max(once, 1e-3))))


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
