"""Attention in four suites: implementations, number formats, memory and growth, on CPU or GPU.

    python benchmarks/gpu_benchmark.py
    python -m benchmarks.gpu_benchmark --suite memory --device cpu --json out.json --html out.html

Every function is checked against a wider computation first, and no time is given for a
wrong result. docs/benchmarks.md says what each column means.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # As a script: the project's folder is the one to import from, not this file's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu import implementation, memory, precision, scalability
from benchmarks.gpu.clock import utilisation_meter
from benchmarks.gpu.report import document, page, print_tables, write_json
from benchmarks.gpu.rows import WRONG, Row, Settings
from benchmarks.timing import RESULTS, add_device, machine_facts

SUITES = {
    "implementation": implementation.run,
    "precision": precision.run,
    "memory": memory.run,
    "scalability": scalability.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites, show and write the result; return 1 if a result was wrong."""
    options = _parser().parse_args(arguments)
    start = time.perf_counter()
    rows: list[Row] = []
    with utilisation_meter("cpu" if options.quick else options.device) as meter:
        settings = Settings(
            device=options.device,
            quick=options.quick,
            rounds=3 if options.quick else 9,
            round_ms=2.0 if options.quick else 20.0,
            limit_s=1.0 if options.quick else (2.0 if options.device == "cuda" else 6.0),
            say=lambda text: print(text, flush=True),
            utilisation=meter,
        )
        for name in options.suite:
            print(f"{name} ({time.perf_counter() - start:.0f} s)", flush=True)
            rows += SUITES[name](settings)
    seconds = time.perf_counter() - start
    machine = dict(machine_facts(options.device))
    machine["commit"] = options.commit or machine["commit"]
    asked = {"suites": options.suite, "quick": options.quick, "seconds": round(seconds, 1)}
    result = document(machine, asked, rows)
    print_tables(rows)
    target = options.json
    if target is None and not options.quick:
        target = RESULTS / f"gpu_benchmark_{options.device}.json"
    if target is not None:
        write_json(target, result)
        print(f"\n{target}")
    if options.html is not None:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(page(result, rows), encoding="utf-8")
        print(options.html)
    wrong = [row for row in rows if row.status == WRONG]
    print(f"{len(rows)} rows in {seconds:.0f} s, {len(wrong)} wrong results")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="docs/benchmarks.md says what each column means.",
    )
    parser.add_argument(
        "--suite", nargs="+", choices=SUITES, default=list(SUITES), help="which suites to run"
    )
    add_device(parser)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that all runs; seconds"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="result file (default: benchmarks/results/gpu_benchmark_DEVICE.json; "
        "none with --quick)",
    )
    parser.add_argument("--html", type=Path, metavar="PATH", help="page with tables and plots")
    parser.add_argument("--commit", default="", help="what to record where there is no checkout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
