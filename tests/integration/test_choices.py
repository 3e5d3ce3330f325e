"""benchmarks/choices.py: what another executor would have gained, at small sizes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from adaattn.hardware.tables import read_table
from adaattn.spec import AttentionProblem, Cell, Measured

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


def test_what_was_timed_goes_into_a_table_and_is_known_from_then_on(
    choices: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "table.json"
    few = ["--device", "cpu", "--problems", "12", "--rounds", "1", "--only", "Sq1 "]
    given = [*few, "--out", str(tmp_path), "--table", str(file), "--commit", "abc1234"]
    unknown = replace(choices.probe("cpu"), timings=None)
    monkeypatch.setattr(choices, "probe", lambda device: unknown)
    path = choices.main([*given, "--unknown"])
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    table = read_table(file, unknown)
    cells = [cell for cells in table.cells.values() for cell in cells]
    assert table.commit == "abc1234"
    assert [dict(cell.times) for cell in cells] == [
        {name: Measured(**time) for name, time in row["times_ms"].items()} for row in rows
    ]
    monkeypatch.setattr(choices, "probe", lambda device: replace(unknown, timings=table))
    path = choices.main([*given, "--unknown"])
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == []
    assert read_table(file, unknown).cells == table.cells


def test_other_processes_compile_before_anything_is_timed(
    choices: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--device", "cpu", "--problems", "1", "--rounds", "1", "--out", str(tmp_path)]
    choices.main([*few, "--processes", "2"])
    assert capsys.readouterr().out.startswith("2 of 2 processes compiled all of theirs")


def test_each_problem_is_compiled_by_one_process(
    choices: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[AttentionProblem] = []
    monkeypatch.setattr(choices, "measure_cell", lambda problem, *rest: compiled.append(problem))
    options = choices.parsed(["--device", "cpu", "--problems", "9", "--processes", "2"])
    choices.compile_some(options, 0)
    assert len(compiled) == 5
    choices.compile_some(options, 1)
    assert set(compiled) == {question for _, question, _ in choices.wanted(options)}
    assert len(compiled) == 9


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
