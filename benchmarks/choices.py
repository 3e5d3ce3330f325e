"""Holds the executor that is chosen against every other one that could serve, on random problems.

    python -m benchmarks.choices --device cuda --problems 300 --out build/choices

`benchmarks.regret` shows where a choice loses to PyTorch's function. This shows where it gains
less than it could: a problem that no table speaks of stays with PyTorch's kernel, however fast the
others are. Each problem is drawn as there, and timed as by ``adaattn tune``. The gain is the
chosen executor's time over the fastest one's, by the device's time and by what a caller waits,
whichever is less: 1 is the best choice.

    python -m benchmarks.choices --unknown --table cuda-h200.json --processes 15

The times can go into a table, which is how those that ship grow; ``--unknown`` times no problem of
which the tables know every executor.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from adaattn._files import replace_file
from adaattn.backends import capabilities
from adaattn.call.arguments import Arguments
from adaattn.call.choose import decided
from adaattn.call.describe import build_call
from adaattn.hardware import probe
from adaattn.hardware.probe import describe
from adaattn.hardware.tables import read_table, stamped, table_text
from adaattn.planning import reasons, simplify
from adaattn.planning.evidence import DISPLACES, ratio
from adaattn.policies import PRESETS
from adaattn.spec import AttentionProblem, Cell, Method
from adaattn.tuning.cell import Effort, measure_cell
from benchmarks.gpu.clock import free_unused
from benchmarks.regret_calls import our_keywords, tensors_of
from benchmarks.regret_problems import FUNCTIONS, Problem, draw
from benchmarks.timing import arguments, save

WORTH = 1 / DISPLACES
"""A larger gain is one that was missed: planning takes nothing for less."""

_SAVE_EVERY = 10
_NEAREST = 12


def asked(problem: Problem, device: str) -> tuple[AttentionProblem, str]:
    """Return what a problem asks for, and the executor that is chosen once it has been compiled."""
    tensors = tensors_of(problem, device)
    inputs = (tensors.query, tensors.key, tensors.value)
    given = Arguments(enable_gqa=True, **our_keywords(problem, tensors))
    call = build_call(*inputs, given)
    decision = decided(call, PRESETS["quality"], "auto", -1, None)
    chosen = (decision.later or decision.plan).groups[0].capability
    return simplify(replace(call.problem, may_wait=True)), chosen


def is_known(problem: AttentionProblem, chosen: str, options: argparse.Namespace) -> bool:
    """Return whether the tables compare every executor that would be timed with the chosen one."""
    facts = probe(options.device)
    table = facts.timings
    timed = [
        it
        for it in capabilities()
        if it.method is Method.EXACT and (options.compiles or it.compile_ms or not it.compiles)
    ]
    serving = {it.name for it in timed if not reasons(it, problem, facts)}
    others = serving - {chosen, "reference"}
    return table is not None and None not in (ratio(table, problem, it, chosen) for it in others)


def row_of(problem: Problem, chosen: str, cell: Cell) -> dict[str, Any]:
    """Return the row of one problem whose executors were timed."""
    best = max(cell.times, key=lambda name: gain(cell, chosen, name))
    return {
        "cell": problem.name,
        "class": cell.problem_class,
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


def wanted(
    options: argparse.Namespace, first: int = 0, step: int = 1
) -> Iterator[tuple[Problem, AttentionProblem, str]]:
    """Yield the problems that are to be timed, with `asked` of each; every ``step``-th drawn."""
    problems = draw(
        options.problems,
        seed=options.seed,
        device=options.device,
        through=options.through,
        few_heads=options.few_heads,
    )
    for problem in problems[first::step]:
        if options.only not in problem.name:
            continue
        question, chosen = asked(problem, options.device)
        if not (options.unknown and is_known(question, chosen, options)):
            yield problem, question, chosen


def compile_all(options: argparse.Namespace) -> None:
    """Compile what the problems need, in several processes, so that one may time them at once."""
    spawned = multiprocessing.get_context("spawn")
    workers = [
        spawned.Process(target=compile_some, args=(options, first))
        for first in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    end = time.monotonic() + options.compile_s
    for worker in workers:
        worker.join(max(end - time.monotonic(), 0.0))
        if worker.is_alive():
            worker.kill()
            worker.join()
    done = sum(worker.exitcode == 0 for worker in workers)
    print(f"{done} of {len(workers)} processes compiled all of theirs", flush=True)


def compile_some(options: argparse.Namespace, first: int) -> None:
    """Run every executor of some of the problems."""
    device = torch.device(options.device)
    effort = Effort(rounds=1, deadline=0.0, compiles=options.compiles)
    for _, question, _ in wanted(options, first, options.processes):
        measure_cell(question, device, describe(device), effort)
        free_unused(options.device)


def run(options: argparse.Namespace) -> Path:
    """Return the path of the result, written every ten problems and at the end."""
    if options.processes:
        compile_all(options)
    device = torch.device(options.device)
    effort = Effort(rounds=options.rounds, compiles=options.compiles)
    end = time.monotonic() + options.limit_s
    rows: list[dict[str, Any]] = []
    cells: list[Cell] = []
    for problem, question, chosen in wanted(options):
        if time.monotonic() > end:
            print(f"stopped after {options.limit_s:g} s", flush=True)
            break
        cell = measure_cell(question, device, describe(device), effort)
        free_unused(options.device)
        if cell is None:
            continue
        if not cell.num_sequences:  # a table's packed sequences have equal lengths, these have not
            cells.append(cell)
        if chosen not in cell.times:
            continue
        row = row_of(problem, chosen, cell)
        rows.append(row)
        print(
            f"{row['gain']:7.3f}  {row['cell']}  [{row['chosen']}, fastest {row['fastest']}]",
            flush=True,
        )
        if len(rows) % _SAVE_EVERY == 0:
            _write(rows, cells, options)
    path = _write(rows, cells, options)
    totals = summary(rows)
    for row in totals.pop("largest"):
        print(f"{row['gain']:7.3f}  {row['cell']}  [{row['chosen']}, fastest {row['fastest']}]")
    for key, value in totals.items():
        print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}")
    return path


def _write(rows: list[dict[str, Any]], cells: list[Cell], options: argparse.Namespace) -> Path:
    """Write the rows, the options and their summary, and return the path; and the cells."""
    if options.table:
        add_cells(options.table, cells, options.device, options.commit)
    name = f"choices_{options.through}_{options.device}"
    return save(name, options, rows, summary=summary(rows))


def add_cells(path: Path, cells: list[Cell], device: str, commit: str = "") -> None:
    """Put cells into a table's file, in the place of older ones of the same problems.

    Args:
        path: a file for such a device, or none yet.
        cells: measured here.
        device: "cpu" or "cuda".
        commit: of the code, where there is no checkout.
    """
    facts = describe(torch.device(device))
    table = stamped(facts, cells)
    if commit:
        table = replace(table, commit=commit)
    if path.exists():
        table = read_table(path, facts).merged(table)
    text = table_text(facts, table)
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", type=int, default=300, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--through", default="function", choices=FUNCTIONS)
    parser.set_defaults(rounds=5)
    parser.add_argument("--few-heads", action="store_true", help="one sequence, 1 to 4 heads")
    parser.add_argument("--compiles", action="store_true", help="also what compiles for a length")
    parser.add_argument("--limit-s", type=float, default=1e6, help="no problem begins later")
    parser.add_argument("--table", type=Path, help="put the times into this table's file too")
    parser.add_argument("--unknown", action="store_true", help="only what the tables do not know")
    parser.add_argument("--processes", type=int, default=0, help="that compile before all else")
    parser.add_argument("--compile-s", type=float, default=120.0, help="they may take so long")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> Path:
    """Return the path of the result of one run."""
    path = run(parsed(given))
    print(path)
    return path


if __name__ == "__main__":
    main()
