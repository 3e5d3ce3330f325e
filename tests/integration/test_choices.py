"""benchmarks/choices.py: what another executor would have gained, at small sizes."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from adaattn.spec import Cell, Measured

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def choices() -> Iterator[ModuleType]:
    """The benchmark's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import choices

        yield choices


def test_each_row_names_the_fastest_executor_and_what_it_gains(
    choices: ModuleType, tmp_path: Path
) -> None:
    small = ["--device", "cpu", "--problems", "12", "--rounds", "1", "--only", "Sq1 "]
    path = choices.main([*small, "--commit", "abc1234", "--out", str(tmp_path)])
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = document["rows"]
    assert rows and all("Sq1 " in row["cell"] for row in rows)
    for row in rows:
        times = {name: Measured(**time) for name, time in row["times_ms"].items()}
        cell = _cell(times)
        assert {row["chosen"], row["fastest"]} <= set(times)
        gains = {name: choices.gain(cell, row["chosen"], name) for name in times}
        assert row["gain"] == pytest.approx(max(gains.values())) and row["gain"] >= 1.0
        assert gains[row["fastest"]] == pytest.approx(row["gain"])
    assert document["summary"] == choices.summary(rows)
    assert document["summary"]["count"] == len(rows)


def test_a_gain_counts_on_the_device_and_for_who_waits(choices: ModuleType) -> None:
    slow_to_call = Measured(device_ms=0.01, host_ms=0.04)
    times = {"usual": Measured(device_ms=0.02, host_ms=0.02), "own": slow_to_call}
    cell = _cell(times)
    assert choices.gain(cell, "usual", "usual") == 1.0
    assert choices.gain(cell, "usual", "own") == 0.5  # who waits loses, though the device gains
    row = {"cell": "one", "chosen": "usual", "fastest": "own", "times_ms": {}}
    rows = [row | {"gain": gain} for gain in (1.0, choices.WORTH + 0.01, 3.0)]
    found = choices.summary(rows)
    assert (found["count"], found["missed"], found["largest_gain"]) == (3, 2, 3.0)
    assert [item["gain"] for item in found["largest"]] == [3.0, choices.WORTH + 0.01]
    assert choices.summary([])["largest_gain"] is None


def _cell(times: dict[str, Measured]) -> Cell:
    return Cell(
        problem_class="half",
        heads=8,
        group_size=4,
        len_q=1,
        len_k=512,
        head_dim=64,
        visible=512.0,
        times=times,
    )
