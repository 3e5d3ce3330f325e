"""Holds attention against ``F.scaled_dot_product_attention`` on random problems.

    python -m benchmarks.regret --device cpu --problems 300 --out build/regret

Each problem is drawn from a seed, computed by both, checked, and only then timed, in turns in one
run. What PyTorch's function lacks a word for is a mask that was made before the timing; sinks and
softcaps (``--through written``) are attention written out; ``--through cache`` has the last tokens
of longer keys. The ratio is the peer's time over ours: 1 is equal, more is faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import adaattn
from benchmarks.failures import FailedError, blamed, is_lost
from benchmarks.gpu.clock import free_unused, once
from benchmarks.regret_calls import OURS, PEER, Calls, allowed_error, function_calls, recorded
from benchmarks.regret_layers import generation_calls, module_calls, transformers_calls
from benchmarks.regret_problems import Problem, draw
from benchmarks.timing import arguments, behind_spin, save

SIDES = {
    "function": function_calls,
    "written": function_calls,
    "cache": function_calls,
    "module": module_calls,
    "transformers": transformers_calls,
    "generation": generation_calls,
}
"""What makes the calls of a problem, by the way that a user takes."""

BARS = {"cpu": 0.93, "cuda": 0.97}
"""A ratio below this counts as a loss; a CPU that others use too is the noisier clock."""

_WARM_CALLS = {"quality": 3, "balanced": 20}
_SAVE_EVERY = 20
_LEAST_ROUNDS = 3
_PROBLEM_S = 6.0
"""Seconds that the rounds of one problem may take, after which no further one begins."""

_ROUND_MS = 2.0
_MOST_CALLS = 20
"""Calls in a round of CUDA at most: their kernels must fit the launch queue behind the spin."""

_HOST_BATCHES = 10
_HOST_BATCH_MS = 60.0
_HOST_BAR_US, _HOST_S = 10.0, 2.0
_HOST_CPU_MS = 0.2
"""On a CPU a call returns when it is done; what a longer one takes says nothing of the host."""

Function = Callable[..., Any]


def measure(problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one problem: its times, or under ``"failed"`` why there are none."""
    facts = asdict(problem)
    facts["kind"] = problem.kind.value
    row: dict[str, Any] = {"cell": problem.name, "problem": facts}
    began = time.monotonic()
    try:
        with (
            blamed("benchmark"),
            SIDES[options.through](problem, options.device, options.policy) as calls,
        ):
            row |= _decided(calls, options)
            calls.check()
            row |= _timed(calls, options)
    except FailedError as error:
        row |= {"failed": str(error), "failed_by": error.side}
    return row | {"seconds": round(time.monotonic() - began, 2)}


def _decided(calls: Calls, options: argparse.Namespace) -> dict[str, Any]:
    """Return which executors serve our calls once they are warm, and why; both sides are warmed."""
    with blamed(OURS):
        if options.compiled:
            adaattn.warmup(calls.ours)
        for _ in range(_WARM_CALLS[options.policy]):
            calls.ours()
        _, events = recorded(calls.ours)
    with blamed(PEER):
        for _ in range(_WARM_CALLS["quality"]):
            calls.peer()
    decisions = [event.decision for event in events]
    labels = [group.label for decision in decisions for group in decision.plan.groups]
    reasons = [entry.reason for found in decisions for entry in found.trace if entry.accepted]
    return {
        "executor": " + ".join(dict.fromkeys(labels)),
        "because": "; ".join(dict.fromkeys(reasons)),
        "error_budget": allowed_error(events),
    }


def _timed(calls: Calls, options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the times; a ratio below the bar is measured again, three times as long.

    The second measurement replaces the first, which the row keeps as ``first_ratio``. Beside it
    stands the ratio of a function of one line that calls the peer: no library in Python has more.
    """
    functions = {OURS: calls.ours, PEER: calls.peer}
    found = _ratios(functions, options.device, options.rounds)
    if found["ratio"] < BARS[options.device]:
        first = found["ratio"]
        found = _ratios(functions, options.device, 3 * options.rounds)
        found["first_ratio"] = first
        if isinstance(calls.peer, partial):
            passed_on = partial(
                _passed_on, calls.peer.func, *calls.peer.args, **calls.peer.keywords
            )
            beside = _ratios({OURS: passed_on, PEER: calls.peer}, options.device, options.rounds)
            found["one_line_ratio"] = beside["ratio"]
    return found | _host(functions, options.device, found["peer_ms"])


def _passed_on(function: Function, *inputs: Any, **keywords: Any) -> Any:
    """Return what a function returns."""
    return function(*inputs, **keywords)


def _ratios(functions: dict[str, Function], device: str, rounds: int) -> dict[str, Any]:
    """Return medians of both times and of their ratio in each round."""
    alone = max(min(once(run, 1, device) for _ in range(3)) for run in functions.values())
    most = _MOST_CALLS if device == "cuda" else 1000
    count = max(1, min(most, round(_ROUND_MS / max(alone, 1e-3))))
    sample = partial(behind_spin if device == "cuda" else once, count=count, device=device)
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    end = time.monotonic() + _PROBLEM_S
    for number in range(rounds):
        if number >= _LEAST_ROUNDS and time.monotonic() > end:
            break
        for name in names if number % 2 else reversed(names):
            samples[name].append(sample(functions[name]))
    ratios = [theirs / ours for ours, theirs in zip(samples[OURS], samples[PEER], strict=True)]
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quarters[0], quarters[2]],
        "ratio_of_best": min(samples[PEER]) / min(samples[OURS]),
        "ours_ms": statistics.median(samples[OURS]),
        "peer_ms": statistics.median(samples[PEER]),
        "rounds": len(ratios),
        "calls_per_round": count,
    }


def _host(functions: dict[str, Function], device: str, call_ms: float) -> dict[str, Any]:
    """Return microseconds until a call returns, both medians and ours minus the peer's.

    The two take turns, and the queue is emptied between batches. A difference above the bar is
    measured again, five times as long: a median over a few wakes of a thread is not one. On a CPU
    only short calls are measured.
    """
    if device == "cpu" and call_ms > _HOST_CPU_MS:
        return {"host_us": None, "host_over_peer_us": None}
    medians = _host_medians(functions, device, call_ms, _HOST_BATCHES)
    if medians[OURS] - medians[PEER] > _HOST_BAR_US:
        medians = _host_medians(functions, device, call_ms, 5 * _HOST_BATCHES)
    return {"host_us": medians, "host_over_peer_us": medians[OURS] - medians[PEER]}


def _host_medians(
    functions: dict[str, Function], device: str, call_ms: float, batches: int
) -> dict[str, float]:
    """Return the median microseconds until a call returns, of each function."""
    batch = max(3, min(20, int(_HOST_BATCH_MS / max(call_ms, 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    end = time.monotonic() + _HOST_S
    for number in range(batches):
        if number >= _LEAST_ROUNDS and time.monotonic() > end:
            break
        order = list(functions.items())
        order = order if number % 2 else order[::-1]
        for _ in range(batch):
            for name, function in order:
                start = time.perf_counter()
                function()
                samples[name].append(1e6 * (time.perf_counter() - start))
        if device == "cuda":
            torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}


def summary(rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Return what the rows come to."""
    timed = [row for row in rows if "failed" not in row]
    failed = [row for row in rows if "failed" in row]
    found: dict[str, Any] = {
        "count": len(rows),
        "failed": sum(row["failed_by"] == OURS for row in failed),
        "failed_elsewhere": sum(row["failed_by"] != OURS for row in failed),
        "bar": BARS[device],
    }
    if not timed:
        return found
    worst = sorted(timed, key=lambda row: row["ratio"])
    ratios = [row["ratio"] for row in worst]
    host = [us for row in timed if (us := row["host_over_peer_us"]) is not None]
    lost = [row for row in worst if row["ratio"] < BARS[device]]
    return found | {
        "worst_ratio": ratios[0],
        "below_bar": len(lost),
        "below_bar_at_best_too": sum(row["ratio_of_best"] < BARS[device] for row in lost),
        "median_ratio": statistics.median(ratios),
        "geometric_mean_ratio": statistics.geometric_mean(ratios),
        "host_over_peer_us_median": statistics.median(host) if host else None,
        "host_over_peer_us_worst": max(host, default=None),
        "worst_waited": min(
            ({"ratio": _waited_ratio(row), "cell": row["cell"]} for row in timed),
            key=lambda found: found["ratio"],
        ),
        "worst": [{key: row[key] for key in ("cell", "ratio", "executor")} for row in worst[:10]],
    }


def _waited_ratio(row: dict[str, Any]) -> float:
    """Return what a caller waits for the peer over ours: for the device, or longer for the host."""
    host = row["host_us"]
    if host is None:
        return float(row["ratio"])
    return max(row["peer_ms"], host[PEER] / 1e3) / max(row["ours_ms"], host[OURS] / 1e3)


def run(options: argparse.Namespace) -> Path:
    """Return the path of the result, written every twenty problems and at the end."""
    problems = draw(
        options.problems,
        seed=options.seed,
        device=options.device,
        through=options.through,
        longest=options.longest,
        few_heads=options.few_heads,
    )
    end = time.monotonic() + options.limit_s
    rows: list[dict[str, Any]] = []
    for problem in problems[options.skip :]:
        if options.only not in problem.name:
            continue
        if time.monotonic() > end:
            print(f"stopped after {options.limit_s:g} s", flush=True)
            break
        rows.append(measure(problem, options))
        print(_line(rows[-1]), flush=True)
        if "failed" in rows[-1] and is_lost(options.device):
            print("stopped: the device takes no more work", flush=True)
            break
        free_unused(options.device)
        if len(rows) % _SAVE_EVERY == 0:
            _write(rows, options)
    path = _write(rows, options)
    totals = summary(rows, options.device)
    for row in totals.pop("worst", []):
        print(f"{row['ratio']:7.3f}  {row['cell']}  [{row['executor']}]")
    for key, value in totals.items():
        print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}")
    return path


def _line(row: dict[str, Any]) -> str:
    """Return a row as a line of progress."""
    if "failed" in row:
        return f"FAILED by {row['failed_by']}: {row['cell']}: {row['failed'].splitlines()[0]}"
    host = row["host_over_peer_us"]
    one_line = row.get("one_line_ratio")
    return (
        f"{row['ratio']:7.3f}  {row['ours_ms']:9.4f} ms against {row['peer_ms']:9.4f}"
        f"  host {'' if host is None else f'{host:+.1f} us':>10}  {row['cell']}"
        f"  [{row['executor']}]{' measured again' if 'first_ratio' in row else ''}"
        f"{'' if one_line is None else f', a function of one line {one_line:.3f}'}"
    )


def _write(rows: list[dict[str, Any]], options: argparse.Namespace) -> Path:
    """Write the rows, the options and their summary, and return the path."""
    state = "_few_heads" * options.few_heads + "_compiled" * options.compiled
    name = f"regret_{options.through}_{options.policy}{state}_{options.device}"
    return save(name, options, rows, summary=summary(rows, options.device))


def main(given: list[str] | None = None) -> Path:
    """Return the path of the result of one run."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", type=int, default=300, help="how many are drawn")
    parser.add_argument("--skip", type=int, default=0, help="of these, how many at the front")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--policy", default="quality", choices=tuple(_WARM_CALLS))
    parser.add_argument("--through", default="function", choices=tuple(SIDES))
    parser.add_argument("--compiled", action="store_true", help="after `adaattn.warmup`")
    parser.add_argument("--few-heads", action="store_true", help="one sequence, 1 to 4 heads")
    parser.add_argument("--longest", type=int, default=None, help="greatest length; by device")
    parser.add_argument("--limit-s", type=float, default=1e6, help="no problem begins later")
    path = run(parser.parse_args(given))
    print(path)
    return path


if __name__ == "__main__":
    main()
