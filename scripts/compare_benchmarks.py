"""Compares benchmark results of two versions; prints a Markdown table, exits 1 on a slow-down.

    python scripts/compare_benchmarks.py results/base results/head --threshold 0.1

Each folder holds the JSON files of several runs (`scripts/benchmark_in_turns.sh` makes both).
What is compared is a function's time over that of its peer in the same run: a machine that slows
down for a while slows both.

A cell is slower when its head values rank above its base values made longer by the threshold:
the exact one-sided rank-sum test, which assumes no distribution, with Holm's correction, so that
the chance of one false alarm among all cells stays below ``--alpha``. A slow-down of exactly the
threshold is therefore no alarm, and neither is noise, however many cells there are.

Exit codes: 0 nothing is slower, 1 something is, 2 the results cannot be compared.
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MACHINE = ("device", "device_type", "processors", "python", "torch", "cuda")

Key = tuple[str, str, str]
"""Benchmark, cell, function."""


class NotComparableError(Exception):
    """The results say nothing about two versions; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of one function in one cell.

    Args:
        key: benchmark, cell and function.
        base: median time over the peer's, before.
        head: the same, after.
        p_slower: adjusted chance of such ranks if it were not slower by more than the threshold.
        p_faster: the same for faster.
    """

    key: Key
    base: float
    head: float
    p_slower: float
    p_faster: float


def read_runs(folder: Path) -> tuple[dict[Key, list[float]], set[tuple[str, ...]]]:
    """Return the values of every run in a folder, and the machines they come from.

    Raises:
        NotComparableError: no file, or a file that is no benchmark result.
    """
    values: dict[Key, list[float]] = defaultdict(list)
    machines = set()
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise NotComparableError(f"{folder}: expected JSON results, got none")
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            machines.add(tuple(str(document["machine"][fact]) for fact in MACHINE))
            for row in document["rows"]:
                peer = row["timings"][row["peer"]]["median_ms"]
                for function, timing in row["timings"].items():
                    if function != row["peer"]:
                        key = (document["benchmark"], row["cell"], function)
                        values[key].append(timing["median_ms"] / peer)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise NotComparableError(
                f"{file}: expected a benchmark result, got {error!r}"
            ) from error
    return values, machines


def compare(
    base: dict[Key, list[float]],
    head: dict[Key, list[float]],
    *,
    threshold: float,
    alpha: float,
) -> list[Change]:
    """Return every function and cell that both sides have, the largest slow-down first.

    Raises:
        NotComparableError: nothing in common, or too few runs for any answer at this alpha.
    """
    keys = [key for key in base if key in head]
    if not keys:
        raise NotComparableError("the two results have no cell in common")
    for key in keys:
        least = 1 / math.comb(len(base[key]) + len(head[key]), len(head[key]))
        if least * len(keys) > alpha:
            raise NotComparableError(
                f"{' / '.join(key)}: expected at least {_runs_needed(len(keys), alpha)} runs of "
                f"each side for {len(keys)} comparisons at alpha {alpha:g}, got {len(base[key])} "
                f"and {len(head[key])}"
            )
    factor = 1 + threshold
    slower = holm([rank_sum(head[key], [factor * value for value in base[key]]) for key in keys])
    faster = holm([rank_sum(base[key], [factor * value for value in head[key]]) for key in keys])
    changes = [
        Change(
            key=key,
            base=statistics.median(base[key]),
            head=statistics.median(head[key]),
            p_slower=p_slower,
            p_faster=p_faster,
        )
        for key, p_slower, p_faster in zip(keys, slower, faster, strict=True)
    ]
    return sorted(changes, key=lambda change: change.base / change.head)


def rank_sum(high: Sequence[float], low: Sequence[float]) -> float:
    """Return the exact chance of ranks as high as those of ``high`` if both came from one source.

    Ties share their mean rank; the distribution is counted over all ways to split the values.
    """
    pooled = sorted([*high, *low])
    # Doubled, so that the mean rank of a tie is a whole number.
    doubled = {
        value: 2 * pooled.index(value) + pooled.count(value) + 1 for value in dict.fromkeys(pooled)
    }
    observed = sum(doubled[value] for value in high)
    ways: list[dict[int, int]] = [{0: 1}] + [{} for _ in high]
    for value in pooled:
        for size in range(len(high), 0, -1):
            for total, count in ways[size - 1].items():
                reached = total + doubled[value]
                ways[size][reached] = ways[size].get(reached, 0) + count
    at_least = sum(count for total, count in ways[-1].items() if total >= observed)
    return at_least / math.comb(len(pooled), len(high))


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values adjusted so that one threshold holds for all of them together."""
    order = sorted(range(len(chances)), key=lambda index: chances[index])
    adjusted = [0.0] * len(chances)
    largest = 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (len(chances) - position) * chances[index]))
        adjusted[index] = largest
    return adjusted


def table(changes: Sequence[Change], *, threshold: float, alpha: float) -> str:
    """Return the Markdown table."""
    lines = [
        "| cell | function | base | head | change | p | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for change in changes:
        verdict, chance = "", min(change.p_slower, change.p_faster)
        if change.p_slower <= alpha:
            verdict, chance = f"**slower by more than {threshold:.0%}**", change.p_slower
        elif change.p_faster <= alpha:
            verdict, chance = f"faster by more than {threshold:.0%}", change.p_faster
        benchmark, cell, function = change.key
        lines.append(
            f"| {benchmark}: {cell} | {function} | {change.base:.3f} | {change.head:.3f} "
            f"| {change.head / change.base - 1:+.1%} | {chance:.2g} | {verdict} |"
        )
    return "\n".join(lines)


def _runs_needed(comparisons: int, alpha: float) -> int:
    """Return the runs of each side from which the smallest p-value can be small enough."""
    runs = 1
    while comparisons / math.comb(2 * runs, runs) > alpha:
        runs += 1
    return runs


def _only(side: str, keys: set[Key]) -> str:
    """Return a line on what only one side has; nothing if nothing."""
    return f"Only in {side}: {', '.join(' / '.join(key) for key in sorted(keys))}\n" if keys else ""


def _report(options: argparse.Namespace) -> tuple[str, int]:
    """Return what to print and the exit code."""
    base, base_machines = read_runs(options.base)
    head, head_machines = read_runs(options.head)
    if len(base_machines | head_machines) > 1:
        raise NotComparableError(
            f"expected one machine, got {sorted(base_machines)} and {sorted(head_machines)}"
        )
    changes = compare(base, head, threshold=options.threshold, alpha=options.alpha)
    slower = sum(change.p_slower <= options.alpha for change in changes)
    runs = min(len(values) for values in (*base.values(), *head.values()))
    text = (
        f"{slower} of {len(changes)} comparisons slower by more than {options.threshold:.0%} "
        f"(family-wise alpha {options.alpha:g}, {runs} runs of each side).\n"
        "base and head: median time over the peer's in the same run.\n\n"
        f"{table(changes, threshold=options.threshold, alpha=options.alpha)}\n\n"
        f"{_only('base', base.keys() - head.keys())}{_only('head', head.keys() - base.keys())}"
    )
    return text, 1 if slower else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", type=Path, help="folder with the JSON results of the old version")
    parser.add_argument("head", type=Path, help="folder with those of the new version")
    parser.add_argument("--threshold", type=float, default=0.1, help="share of time, 0.1 is 10 %%")
    parser.add_argument("--alpha", type=float, default=0.05, help="chance of any false alarm")
    options = parser.parse_args(arguments)
    try:
        text, code = _report(options)
    except NotComparableError as reason:
        sys.stderr.write(f"{reason}\n")
        return 2
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
