"""Holds an executor against the float64 definition on random problems; prints each that fails.

    python -m benchmarks.fuzz --backend triton --problems 10000 --limit-s 300 --out DIR

Output, log-sum-exp, row maximum and entropy are held by the one rule of `adaattn.testing`, rows
that see no key must be zeros, and memory is full of NaN before each call. What the executor says
that it cannot serve is counted, with its reasons. A problem is found again by its number:
``--index 123`` with the same ``--seed``, ``--families`` and ``--device``. Status 1 is a failure.

A result or gradient beyond its bound is compared once more, with the worst of eager PyTorch's
errors over 16 orders of the columns: one order may round luckily. What passes then is printed as
NEAR.

Every third call without other outputs comes three times, and the last is held: launches of repeated
calls are found in another way.

``--training`` holds the gradients of all tensors too, from a random one of the output.

Not covered: dropout, the softmax weights as an output, gradients that arrive at other outputs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from adaattn.errors import UnsupportedError
from benchmarks.failures import FailedError, blamed, is_lost, time_limit
from benchmarks.fuzz_calls import FuzzCall
from benchmarks.fuzz_problems import Problem, all_problems
from benchmarks.timing import add_device, machine_facts, save

_REPORT_S = 20.0
_REASONS = 20


@dataclass(slots=True)
class Totals:
    """What became of the problems so far.

    Args:
        checked: problems that were computed, right or wrong.
        refused: problems that the executor says it cannot serve.
        failures: one row for each problem that is wrong, raised or hung.
        near: problems that passed only against several orders of eager PyTorch's sums.
        reasons: why problems were refused, and how often.
        families: those with a problem that was checked.
        executors: which served, and how often.
    """

    checked: int = 0
    refused: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    near: list[dict[str, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    families: set[int] = field(default_factory=set)
    executors: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """Return the line that a run ends with."""
        counts = f"checked {self.checked}, refused {self.refused}, failed {len(self.failures)}"
        return counts + (f" ({len(self.near)} near)" if self.near else "")

    def fail(self, problem: Problem, text: str) -> None:
        """Note and print a failure."""
        facts = json.loads(json.dumps(asdict(problem)))
        self.failures.append({"cell": problem.words(), "failed": text, "problem": facts})
        print(f"FAILED {problem.words()}\n    {text}", flush=True)


def check(problem: Problem, options: argparse.Namespace, totals: Totals) -> None:
    """Add what becomes of one problem to the totals."""
    try:
        with blamed("benchmark"):
            call = FuzzCall(problem, options.device, training=options.training)
            if reasons := call.refusals(options.backend):
                totals.refused += 1
                totals.reasons.update(reasons)
                return
            totals.checked += 1
            totals.families.add(problem.family.number)
            totals.executors[call.run_and_check(options.backend)] += 1
    except FailedError as error:
        if isinstance(error.__cause__, UnsupportedError):
            totals.checked -= 1
            totals.refused += 1
            totals.reasons.update(f"when called: {text}" for text in error.__cause__.reasons)
            return
        totals.fail(problem, str(error))
        return
    if call.near:
        totals.near.append({"cell": problem.words(), "first": call.near})
        print(f"NEAR {problem.words()}\n    {call.near}", flush=True)


def run(problems: Iterable[Problem], options: argparse.Namespace) -> Totals:
    """Return the totals of some problems, until the time is over or the device is lost."""
    totals = Totals()
    machine_facts(options.device)  # read once, and not while a kernel hangs
    begun = reported = time.monotonic()
    for problem in problems:
        if time.monotonic() - begun > options.limit_s:
            print(f"stopped after {options.limit_s:g} s, before problem {problem.index}")
            break
        failed = len(totals.failures)

        def hung(problem: Problem = problem) -> None:
            totals.fail(problem, f"hung for {options.problem_limit_s:g} s; the run ends here")
            print(totals.line(), flush=True)
            write(totals, options)

        with time_limit(options.problem_limit_s, hung):
            check(problem, options, totals)
            if len(totals.failures) > failed and is_lost(options.device):
                print("stopped: the device takes no more work", flush=True)
                break
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            print(f"{reported - begun:5.0f} s  {totals.line()}", flush=True)
            write(totals, options)
    return totals


def in_jobs(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Return what `main` does, the problems shared out to processes; their totals added up."""
    command = [sys.executable, "-m", "benchmarks.fuzz", *given, "--jobs", "1"]
    threads = max((os.cpu_count() or 1) // options.jobs, 1)  # each would take them all
    surroundings = {"OMP_NUM_THREADS": str(threads), **os.environ}
    running = [
        subprocess.Popen([*command, "--share", str(number), str(options.jobs)], env=surroundings)
        for number in range(options.jobs)
    ]
    statuses = [job.wait() for job in running]
    totals = Totals()
    for number in range(options.jobs):
        path = options.out / f"{_name(options)}_{number}.json"
        if not path.exists():
            print(f"job {number} ended with status {statuses[number]} and left no result")
            statuses[number] = statuses[number] or 1
            continue
        part = json.loads(path.read_text(encoding="utf-8"))
        summary = part["summary"]
        totals.checked += summary["checked"]
        totals.refused += summary["refused"]
        totals.failures += part["rows"]
        totals.near += summary["near"]
        totals.reasons.update(summary["refusals"])
        totals.families.update(summary["families"])
        totals.executors.update(summary["executors"])
        path.unlink()
    print(write(totals, options))
    print(totals.line(), flush=True)
    others = [status for status in statuses if status not in (0, 2)]
    return max(others, default=0 if totals.checked else 2)


def _name(options: argparse.Namespace) -> str:
    """Return the name of the result."""
    kind = "_training" if options.training else ""
    return f"fuzz_{options.backend}{kind}_{options.device}"


def write(totals: Totals, options: argparse.Namespace) -> Path:
    """Write the failures and the totals, and return the path."""
    part = f"_{options.share[0]}" if options.share else ""
    summary = {
        "checked": totals.checked,
        "refused": totals.refused,
        "failed": len(totals.failures),
        "near": totals.near,
        "families": sorted(totals.families),
        "executors": dict(totals.executors),
        "refusals": dict(totals.reasons.most_common()),
    }
    return save(_name(options) + part, options, totals.failures, summary=summary)


def main(given: Sequence[str] | None = None) -> int:
    """Return 1 if a problem failed, 2 if none was checked, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_device(parser)
    parser.add_argument("--backend", default="auto", help="as of the public call")
    parser.add_argument("--training", action="store_true", help="hold the gradients, too")
    parser.add_argument("--problems", type=int, default=1000, help="how many are drawn")
    parser.add_argument("--families", type=int, default=60, help="combinations of features")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--index", type=int, nargs="+", help="run these problems alone")
    parser.add_argument("--limit-s", type=float, default=1e6, help="no problem begins later")
    parser.add_argument("--problem-limit-s", type=float, default=120, help="it hangs after that")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the problems")
    parser.add_argument("--share", type=int, nargs=2, metavar=("K", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder of the JSON")
    parser.add_argument("--commit", default="", help="what to record where there is no checkout")
    options = parser.parse_args(given)
    if options.jobs > 1:
        return in_jobs(options, sys.argv[1:] if given is None else given)
    count = max(options.problems, 1 + max(options.index or [0]))
    problems = all_problems(count, options.families, options.seed, options.device)
    wanted = set(options.index or ())
    if options.share:
        wanted = set(range(options.share[0], count, options.share[1]))
    with warnings.catch_warnings(), torch.set_grad_enabled(options.training):
        warnings.simplefilter("ignore")
        totals = run((one for one in problems if not wanted or one.index in wanted), options)
    for reason, times in totals.reasons.most_common(_REASONS):
        print(f"refused {times:6} times: {reason}")
    print(f"{len(totals.families)} families, served by {dict(totals.executors)}")
    print(write(totals, options))
    print(totals.line(), flush=True)
    if totals.failures:
        return 1
    return 0 if totals.checked else 2


if __name__ == "__main__":
    sys.exit(main())
