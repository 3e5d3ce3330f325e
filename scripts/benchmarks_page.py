"""Checks, or with --write renews, BENCHMARKS.md: the committed results of `benchmarks.ops.run`.

    python scripts/benchmarks_page.py --write

Every number of the page is from a file `benchmarks/results/ops_*.json`; nothing is typed by hand.
Where several files of one card have a cell, the newest one counts.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = "BENCHMARKS.md"
RESULTS = Path("benchmarks") / "results"

OURS = "adaattn"
PEERS = {
    "F.sdpa": "F.sdpa",
    "cudnn": "cuDNN",
    "flex": "Flex",
    "naive": "naive",
    "FA3": "FA3",
    "FA4": "FA4",
}
"""Those that AdaAttn is compared with, and what the page calls them."""

_INTRO = """# Benchmarks

<!-- Written by scripts/benchmarks_page.py from benchmarks/results/; do not edit it by hand. -->

Attention by AdaAttn beside what a PyTorch user has, cell by cell, in one run and in turns. A
ratio is the other's time over ours: more than 1 is faster. No time stands beside a wrong result:
each is held against float64 before it is timed. How it is measured and how to run it is in
[docs/benchmarks.md](docs/benchmarks.md)."""

_NOTHING = """The repository has no results from this form of the program yet. These make them:

```sh
python -m benchmarks.ops.run --device cuda --out benchmarks/results
python scripts/benchmarks_page.py --write
```"""

_LEGEND = """`adaattn` is this library's own choice, `[name]` an executor asked for by name.
`F.sdpa` is `F.scaled_dot_product_attention` as a user must call it for the cell, with a mask
made before where it lacks a word; making it is not counted. An empty place was not compared;
*cannot* is refused, by the words in the JSON. "workspace" is memory beyond inputs and output."""

_VOID = "adaattn[hopper], fixed order"
"""Times of an order of sums that was not always kept (docs/kernel-notes.md): not shown."""

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All cells of one card.

    Args:
        machines: what each file says of its machine, without repetitions.
        rows: those with times.
        failed: those without.
        method: how the numbers were made, by their names.
    """

    machines: list[dict[str, Any]]
    rows: list[Row]
    failed: list[Row]
    method: dict[str, str]


def read(folder: Path) -> dict[str, Results]:
    """Return the results by the name of the card, from files of the present form.

    Args:
        folder: of the JSON files; those of toy sizes are left out.
    """
    documents = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("ops_*.json"))]
    documents = [item for item in documents if "method" in item and not item["options"]["tiny"]]
    found: dict[str, Results] = {}
    for document in sorted(documents, key=lambda item: str(item["machine"]["date"])):
        card = document["machine"]["device"]
        known = found.setdefault(card, Results(machines=[], rows=[], failed=[], method={}))
        known.method.update(document["method"])
        if document["machine"] not in known.machines:
            known.machines.append(document["machine"])
        names = {row["cell"] for row in (*document["rows"], *document["failed"])}
        for rows, news in ((known.rows, document["rows"]), (known.failed, document["failed"])):
            rows[:] = [row for row in rows if row["cell"] not in names] + news
    return found


def page(results: dict[str, Results]) -> str:
    """Return the whole page."""
    parts = [_INTRO]
    if not any(known.rows or known.failed for known in results.values()):
        return "\n\n".join([*parts, _NOTHING]) + "\n"
    parts.append(_LEGEND)
    for card, known in results.items():
        parts += [f"## {card}", *map(_machine, known.machines)]
        parts.append(
            "\n".join(f"- **{name}**: {text.rstrip('.')}." for name, text in known.method.items())
        )
        kinds = list(dict.fromkeys(row["kind"] for row in known.rows))
        by_kind = {kind: [row for row in known.rows if row["kind"] == kind] for kind in kinds}
        parts += ["### All classes", "\n".join(_overview(by_kind))]
        for kind, rows in by_kind.items():
            parts += [f"### {kind}", "\n".join(_table(_columns(rows), rows))]
        parts += _complaints(known)
    return "\n\n".join(parts) + "\n"


def stale(root: Path, *, writes: bool = False) -> bool:
    """Return whether the page is not what the results say; with ``writes`` renew it."""
    expected = page(read(root / RESULTS))
    path = root / PAGE
    if path.exists() and path.read_text("utf-8") == expected:
        return False
    if writes:
        path.write_text(expected, encoding="utf-8")
    return True


def _machine(machine: dict[str, Any]) -> str:
    """Return a sentence on where a file's numbers are from."""
    names = ("driver", "cuda", "cudnn", "torch", "triton", "python")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    return f"Commit {machine['commit']}, {machine['date']}: {versions}."


def _overview(by_kind: dict[str, list[Row]]) -> list[str]:
    """Return a table with the geometric mean and the range of ratios of every class."""
    present = [peer for peer in PEERS if any(_ratios(rows, peer) for rows in by_kind.values())]
    lines = _head("class", "cells", *(f"over {PEERS[peer]}" for peer in present), "roofline %")
    for kind, rows in by_kind.items():
        ranges = [_range(_ratios(rows, peer)) for peer in present]
        shares = [_rate(row, OURS, "roofline_percent") for row in rows]
        known = [share for share in shares if share is not None]
        roofline = f"{min(known):.0f} to {max(known):.0f}" if known else ""
        lines.append(_row(kind, str(len(rows)), *ranges, roofline))
    return lines


def _ratios(rows: Iterable[Row], peer: str) -> list[float]:
    """Return a peer's time over ours, of the rows that have both."""
    found = [_ratio(row, peer) for row in rows]
    return [ratio for ratio in found if ratio is not None]


def _ratio(row: Row, peer: str) -> float | None:
    """Return a peer's time over ours; None where one of them has none."""
    ours, theirs = (row["timings"].get(name) for name in (OURS, peer))
    return theirs["median_ms"] / ours["median_ms"] if ours and theirs else None


def _range(ratios: list[float]) -> str:
    """Return the geometric mean of ratios, with the least and the greatest."""
    if not ratios:
        return ""
    mean = statistics.geometric_mean(ratios)
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _columns(rows: list[Row]) -> list[Column]:
    """Return the columns of a class; those without any value are left out."""
    rate = "gb_per_s" if rows[0]["kind"] == "decode" else "tflops"
    word = "GB/s" if rate == "gb_per_s" else "TFLOP/s"
    executors = dict.fromkeys(
        name
        for row in rows
        for name in row["timings"]
        if name.startswith(f"{OURS}[") and name != _VOID
    )
    columns: list[Column] = [
        ("cell", lambda row: row["cell"]),
        ("settles on", lambda row: row["chosen"].get(OURS, "")),
        ("ms", lambda row: _number(_ms(row, OURS), 2)),
        ("spread %", _spread),
        (word, lambda row: _number(_rate(row, OURS, rate), 0)),
        ("roofline %", lambda row: _number(_rate(row, OURS, "roofline_percent"), 0)),
    ]
    for peer, title in PEERS.items():
        if any(_ratio(row, peer) or _why(row["skipped"].get(peer, "")) for row in rows):
            columns.append((f"over {title}", _against(peer)))
    for name in executors:
        short = name.removeprefix(OURS)
        columns.append((f"{short} {word}", _rate_of(name, rate)))
    columns += [
        ("F.sdpa ran", lambda row: _kernel(row.get("kernel", ""))),
        ("workspace MB", lambda row: _megabytes(row, OURS)),
        ("naive's", lambda row: _megabytes(row, "naive")),
    ]
    return [column for column in columns if any(column[1](row) for row in rows)]


def _against(peer: str) -> Callable[[Row], str]:
    """Return what writes the ratio over a peer, or in a word why there is none."""

    def written(row: Row) -> str:
        ratio = _ratio(row, peer)
        if ratio is not None:
            return f"{ratio:.2f}"
        reason = row["skipped"].get(peer, "")
        return f"*{_why(reason) or 'cannot'}*" if reason else ""

    return written


def _why(reason: str) -> str:
    """Return in a word or two why there is no time; "" for what was refused in words."""
    if reason.startswith(("out of memory", "wrong")):
        return reason.partition(":")[0]
    return "failed" if "Error: " in reason and "No available kernel" not in reason else ""


def _rate_of(name: str, rate: str) -> Callable[[Row], str]:
    """Return what writes the rate of an executor."""
    return lambda row: _number(_rate(row, name, rate), 0)


def _rate(row: Row, name: str, rate: str) -> float | None:
    """Return a rate of one who was timed, or None."""
    found: float | None = row["rates"].get(name, {}).get(rate)
    return found


def _ms(row: Row, name: str) -> float | None:
    """Return the median milliseconds of one who was timed, or None."""
    return row["timings"][name]["median_ms"] if name in row["timings"] else None


def _spread(row: Row) -> str:
    """Return the range of our rounds in percent of their median."""
    if OURS not in row["timings"]:
        return ""
    each = row["timings"][OURS]
    return f"{100 * (each['high_ms'] - each['low_ms']) / each['median_ms']:.0f}"


def _kernel(name: str) -> str:
    """Return the beginning of a kernel's name, without template arguments."""
    short = name.partition("<")[0].partition("(")[0].removeprefix("void ").rpartition("::")[2]
    return f"`{short[:32]}`" if short else ""


def _megabytes(row: Row, name: str) -> str:
    """Return the workspace of one who was timed."""
    count = row["workspace_bytes"].get(name)
    return _number(None if count is None else count / 1e6, 0)


def _number(value: float | None, digits: int) -> str:
    """Return a number as text, small ones with two digits more; "" for none."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.{digits if value >= 10 else digits + 2}f}"


def _complaints(known: Results) -> list[str]:
    """Return what could not be timed, and what was wrong."""
    lines = [f"- {row['cell']}: {_first_line(row['failed'])}" for row in known.failed]
    for row in (*known.rows, *known.failed):
        for name, reason in row["skipped"].items():
            if reason.startswith("wrong") or (name.startswith(OURS) and _why(reason)):
                lines.append(f"- {row['cell']}, {name}: {_first_line(reason)}")
    return ["### Without a time", "\n".join(lines)] if lines else []


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0].replace("|", "/")


def _table(columns: list[Column], rows: list[Row]) -> list[str]:
    lines = _head(*(title for title, _ in columns))
    return lines + [_row(*(write(row) for _, write in columns)) for row in rows]


def _head(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if the page is stale and was left so, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="renew the page")
    parser.add_argument("--check", action="store_true", help="only say whether it is stale")
    options = parser.parse_args(arguments)
    writes = options.write and not options.check
    is_stale = stale(ROOT, writes=writes)
    if is_stale:
        sys.stdout.write(f"{PAGE}: {'renewed' if writes else 'stale, run with --write'}\n")
    return 1 if is_stale and not writes else 0


if __name__ == "__main__":
    sys.exit(main())
