"""The comparison of two versions: exact where it can be counted, silent on noise."""

import importlib.util
import itertools
import json
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "compare_benchmarks.py"
RUNS = 6


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_benchmarks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _write(
    folder: Path, cells: dict[str, float], *, seed: int, runs: int = RUNS, **machine: str
) -> None:
    """Write runs whose times over the peer's are these, with a noise of about 3 % each."""
    noise = random.Random(seed)
    facts = {"device": "cpu", "device_type": "cpu", "processors": 2, "python": "3.11"}
    facts |= {"torch": "2.13", "cuda": None, **machine}
    for run in range(runs):
        # The machine is at times half as fast: that must not matter.
        slowness = noise.choice((1.0, 2.0))
        rows = [
            {
                "cell": cell,
                "peer": "F.sdpa",
                "timings": {
                    "F.sdpa": {"median_ms": slowness * noise.gauss(1, 0.02)},
                    "adaattn": {"median_ms": slowness * time * noise.gauss(1, 0.02)},
                },
            }
            for cell, time in cells.items()
        ]
        target = folder / str(run) / "ops_cpu.json"
        target.parent.mkdir(parents=True)
        document = {"benchmark": "ops_cpu", "machine": facts, "rows": rows}
        target.write_text(json.dumps(document), encoding="utf-8")


def _same(count: int = 20) -> dict[str, float]:
    return {f"cell {number}": 1.0 for number in range(count)}


def test_the_chance_of_a_rank_sum_is_counted_over_every_split(script: ModuleType) -> None:
    """Ties included: each split is weighed by brute force."""
    for high, low in (((3, 4, 4), (1, 4, 2, 3)), ((1, 1), (1, 1)), ((9, 8, 7), (1, 2, 3))):
        pooled = sorted([*high, *low])
        places = {v: [i for i, other in enumerate(pooled) if other == v] for v in pooled}
        rank = {value: sum(found) / len(found) for value, found in places.items()}
        observed = sum(rank[value] for value in high)
        splits = list(itertools.combinations(range(len(pooled)), len(high)))
        hits = sum(sum(rank[pooled[i]] for i in split) >= observed for split in splits)
        assert script.rank_sum(high, low) == hits / len(splits)


def test_holm_multiplies_by_the_comparisons_left_and_never_falls(script: ModuleType) -> None:
    assert script.holm([0.25, 0.0625, 0.5]) == [0.5, 0.1875, 0.5]
    assert script.holm([0.75, 0.75]) == [1.0, 1.0]


def test_the_same_speed_passes(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "base", _same(), seed=1)
    _write(tmp_path / "head", _same(), seed=2)
    assert script.main([str(tmp_path / "base"), str(tmp_path / "head")]) == 0
    assert "0 of 20 comparisons slower by more than 10%" in capsys.readouterr().out


def test_false_alarms_among_many_comparisons_are_as_rare_as_alpha_says(script: ModuleType) -> None:
    """At a threshold of 0 equal versions are on the edge of the null hypothesis itself."""
    noise = random.Random(0)
    trials, alarms = 200, 0
    for _ in range(trials):
        base, head = (
            {
                ("ops", str(cell), "f"): [noise.gauss(1, 0.1) for _ in range(RUNS)]
                for cell in _same()
            }
            for _ in range(2)
        )
        changes = script.compare(base, head, threshold=0, alpha=0.05)
        alarms += any(change.p_slower <= 0.05 for change in changes)
    # Four standard deviations of a binomial above the promise.
    assert alarms <= 0.05 * trials + 4 * (0.05 * 0.95 * trials) ** 0.5


def test_one_slower_cell_is_found_and_named(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "base", _same(), seed=1)
    _write(tmp_path / "head", _same() | {"cell 7": 1.4}, seed=2)
    assert script.main([str(tmp_path / "base"), str(tmp_path / "head")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines if "slower by more than 10%**" in line] == [
        "| ops_cpu: cell 7"
    ]


def test_a_slow_down_below_the_threshold_passes(script: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path / "base", _same(), seed=1)
    _write(tmp_path / "head", {cell: 1.4 for cell in _same()}, seed=2)
    folders = [str(tmp_path / "base"), str(tmp_path / "head")]
    assert script.main([*folders, "--threshold", "0.5"]) == 0
    assert script.main([*folders, "--threshold", "0.2"]) == 1


def test_a_faster_cell_is_said_and_passes(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "base", _same() | {"cell 3": 1.5}, seed=1)
    _write(tmp_path / "head", _same(), seed=2)
    assert script.main([str(tmp_path / "base"), str(tmp_path / "head")]) == 0
    assert "faster by more than 10%" in capsys.readouterr().out


def test_cells_of_one_side_only_are_listed(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "base", _same() | {"gone": 1.0}, seed=1)
    _write(tmp_path / "head", _same() | {"new": 1.0}, seed=2)
    assert script.main([str(tmp_path / "base"), str(tmp_path / "head")]) == 0
    out = capsys.readouterr().out
    assert "Only in base: ops_cpu / gone / adaattn" in out
    assert "Only in head: ops_cpu / new / adaattn" in out


def test_too_few_runs_for_any_answer_are_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "base", _same(), seed=1, runs=3)
    _write(tmp_path / "head", _same(), seed=2, runs=3)
    assert script.main([str(tmp_path / "base"), str(tmp_path / "head")]) == 2
    assert "at least 6 runs of each side for 20 comparisons" in capsys.readouterr().err


def test_two_machines_are_not_compared(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "base", _same(), seed=1)
    _write(tmp_path / "head", _same(), seed=2, torch="2.14")
    assert script.main([str(tmp_path / "base"), str(tmp_path / "head")]) == 2
    assert "expected one machine" in capsys.readouterr().err


def test_what_is_no_result_is_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "head", _same(), seed=2)
    (tmp_path / "base").mkdir()
    folders = [str(tmp_path / "base"), str(tmp_path / "head")]
    assert script.main(folders) == 2
    assert "expected JSON results, got none" in capsys.readouterr().err
    (tmp_path / "base" / "wrong.json").write_text("{}", encoding="utf-8")
    assert script.main(folders) == 2
    assert "expected a benchmark result, got KeyError('machine')" in capsys.readouterr().err


def test_a_result_of_the_operator_benchmark_can_be_read(script: ModuleType, tmp_path: Path) -> None:
    results = SCRIPT.parents[1] / "benchmarks" / "results" / "ops_cpu.json"
    shutil.copy(results, tmp_path)
    values, machines = script.read_runs(tmp_path)
    assert len(machines) == 1
    assert ("ops_cpu", "dense D64 S512 full", "adaattn") in values
