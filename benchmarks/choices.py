"""Holds the executor that is chosen against every other one that could serve, on random problems.

    python -m benchmarks.choices --device cuda --problems 300 --out build/choices

`benchmarks.regret` shows where a choice loses to PyTorch's function. This shows where it gains
less than it could: a problem that no table speaks of stays with PyTorch's kernel, however fast the
others are. Each problem is drawn as there, and timed as by ``adaattn tune``. The gain is the
chosen executor's time over the fastest one's, by the device's time and by what a caller waits,
whichever is less: 1 is the best choice.
"""

import argparse
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from adaattn.call.arguments import Arguments
from adaattn.call.choose import decided
from adaattn.call.describe import build_call
from adaattn.hardware.probe import describe
from adaattn.planning import simplify
from adaattn.planning.evidence import DISPLACES
from adaattn.policies import PRESETS
from adaattn.spec import Cell
from adaattn.spec.evidence import problem_class
from adaattn.tuning.cell import Effort, measure_cell
from benchmarks.gpu.clock import free_unused
from benchmarks.regret_calls import our_keywords, tensors_of
from benchmarks.regret_problems import FUNCTIONS, Problem, draw
from benchmarks.timing import arguments, save

WORTH = 1 / DISPLACES
"""A larger gain is one that was missed: planning takes nothing for less."""

_SAVE_EVERY = 50
_NEAREST = 12


def measure(problem: Problem, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the row of one problem; None where the tuner times nothing of it."""
    device = torch.device(options.device)
    tensors = tensors_of(problem, options.device)
    inputs = (tensors.query, tensors.key, tensors.value)
    given = Arguments(enable_gqa=True, **our_keywords(problem, tensors))
    call = build_call(*inputs, given)
    decision = decided(call, PRESETS["quality"], "auto", -1, None)
    asked = simplify(replace(call.problem, may_wait=True))
    effort = Effort(rounds=options.rounds, compiles=options.compiles)
    cell = measure_cell(asked, device, describe(device), effort)
    chosen = (decision.later or decision.plan).groups[0].capability  # once it has been compiled
    if cell is None or chosen not in cell.times:
        return None
    best = max(cell.times, key=lambda name: gain(cell, chosen, name))
    return {
        "cell": problem.name,
        "class": problem_class(asked),
        "chosen": chosen,
        "fastest": best,
        "gain": gain(cell, chosen, best),
        "default": cell.default,
        "times_ms": {name: asdict(time) for name, time in cell.times.items()},
    }


def gain(cell: Cell, chosen: str, other: str) -> float:
    """Return how many times faster another executor is, on the device and for who waits."""
    mine, its = cell.times[chosen], cell.times[other]
    return min(mine.device_ms / its.device_ms, mine.wall_ms / its.wall_ms)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how often another executor would have been faster, and where most."""
    gains = [row["gain"] for row in rows]
    missed = sorted((row for row in rows if row["gain"] > WORTH), key=lambda row: -row["gain"])
    return {
        "count": len(rows),
        "missed": len(missed),
        "largest_gain": max(gains, default=None),
        "mean_gain": statistics.geometric_mean(gains) if gains else None,
        "largest": [
            {key: row[key] for key in ("gain", "cell", "chosen", "fastest")}
            for row in missed[:_NEAREST]
        ],
    }


def run(options: argparse.Namespace) -> Path:
    """Return the path of the result, written every fifty problems and at the end."""
    end = time.monotonic() + options.limit_s
    rows: list[dict[str, Any]] = []
    problems = draw(
        options.problems, seed=options.seed, device=options.device, through=options.through
    )
    for problem in problems:
        if options.only not in problem.name:
            continue
        if time.monotonic() > end:
            print(f"stopped after {options.limit_s:g} s", flush=True)
            break
        row = measure(problem, options)
        free_unused(options.device)
        if row is None:
            continue
        rows.append(row)
        print(
            f"{row['gain']:7.3f}  {row['cell']}  [{row['chosen']}, fastest {row['fastest']}]",
            flush=True,
        )
        if len(rows) % _SAVE_EVERY == 0:
            _write(rows, options)
    path = _write(rows, options)
    totals = summary(rows)
    for row in totals.pop("largest"):
        print(f"{row['gain']:7.3f}  {row['cell']}  [{row['chosen']}, fastest {row['fastest']}]")
    for key, value in totals.items():
        print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}")
    return path


def _write(rows: list[dict[str, Any]], options: argparse.Namespace) -> Path:
    """Write the rows, the options and their summary, and return the path."""
    name = f"choices_{options.through}_{options.device}"
    return save(name, options, rows, summary=summary(rows))


def main(given: list[str] | None = None) -> Path:
    """Return the path of the result of one run."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", type=int, default=300, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--through", default="function", choices=FUNCTIONS)
    parser.set_defaults(rounds=5)
    parser.add_argument("--compiles", action="store_true", help="also what compiles for a length")
    parser.add_argument("--limit-s", type=float, default=1e6, help="no problem begins later")
    path = run(parser.parse_args(given))
    print(path)
    return path


if __name__ == "__main__":
    main()
