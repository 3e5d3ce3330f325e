"""The table of random problems on the page of benchmarks says what the files that it names hold."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"


def table_rows() -> list[list[str]]:
    """Return the cells of each row."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"^\| run \| problems \| wrong .*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[1].splitlines()]


def runs_of(cell: str) -> list[dict[str, Any]]:
    """Return the runs that a cell names."""
    names = re.findall(r"`(\w+)`", cell)
    texts = [(RESULTS / f"regret_{name}.json").read_text(encoding="utf-8") for name in names]
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: row[-1].replace("`", ""))
def test_a_row_says_what_its_files_hold(row: list[str]) -> None:
    runs = runs_of(row[-1])
    ratios = [entry["ratio"] for run in runs for entry in run["rows"] if entry.get("ratio")]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    shown = [f"{value:.2f}" for value in (statistics.median(ratios), mean, min(ratios))]
    wrong, below = (sum(run["summary"][name] for run in runs) for name in ("failed", "below_bar"))
    assert row[1:7] == [str(len(ratios)), str(wrong), *shown, str(below)]


def test_every_file_of_random_problems_is_named_on_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    names = [path.stem.removeprefix("regret_") for path in RESULTS.glob("regret_*.json")]
    assert len(names) > 50
    unnamed = [name for name in names if not re.search(rf"\b(regret_)?{name}\b", pages)]
    assert unnamed == []


@pytest.mark.parametrize(
    ("card", "names"),
    [
        ("an H200\nran 300", "`function_quality_h200`"),
        ("two CPU\ncores 100", "`function_quality_cpu_avx512_few_heads`"),
        (
            "the H200's problems run",
            "`function_quality_warm_h200` and `function_quality_warm_h200_from_290`",
        ),
    ],
)
def test_the_readme_quotes_the_newest_runs(card: str, names: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = next(row for row in table_rows() if row[-1] == names)
    after = " ".join(text.partition(card)[2].split())
    said = re.search(r"at ([\d.]+) times.*?median ([\d.]+), worst ([\d.]+)\)", after)
    assert said is not None
    assert [said[1], said[2], said[3]] == [row[4], row[3], row[5]]
