"""What the benchmark of large head dimensions times, on a CPU at toy sizes."""

import importlib
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="it runs kernels in Triton's interpreter")


@pytest.mark.uncounted
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes the place of one")
def test_every_variant_is_checked_and_timed(tmp_path: Path) -> None:
    program = importlib.import_module("benchmarks.wide")
    given = ["--device", "cpu", "--rounds", "1", "--commit", "abc1234", "--out", str(tmp_path)]
    cells = ["small D512 S16 fp32", "wide D512 S2048 full backward"]
    assert program.main([*given, "--variants", "--only", *cells]) == 0
    rows = json.loads((tmp_path / "wide_cpu.json").read_text())["rows"]
    wide, small = (set(row["timings"]) for row in rows)
    assert {"F.sdpa", "adaattn", "streamed"} <= wide
    names = {"small", "small, launches apart", "streamed", "streamed, blocks of 8192"}
    assert names | {f"small, {name}" for name in program._SPLITS} <= small
    assert program.main([*given, "--only", cells[0]]) == 0
    (row,) = json.loads((tmp_path / "wide_cpu.json").read_text())["rows"]
    assert {"F.sdpa", "adaattn", "small", "streamed"} <= set(row["timings"])
    assert not any("," in name for name in row["timings"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes are those of a CPU")
def test_low_rank_under_a_budget_is_settled_checked_and_timed(tmp_path: Path) -> None:
    program = importlib.import_module("benchmarks.wide")
    given = ["--device", "cpu", "--rounds", "1", "--commit", "abc1234", "--out", str(tmp_path)]
    assert program.main([*given, "--low-rank"]) == 0
    rows = json.loads((tmp_path / "wide_low_rank_cpu.json").read_text())["rows"]
    assert len(rows) == len(program.CELLS)
    for row in rows:
        assert set(row["timings"]) == {"F.sdpa", "adaattn", "adaattn, 2 %"}
        assert row["executors"]["adaattn"] and row["trace"]
    planted, _, full = (row["executors"]["adaattn, 2 %"] for row in rows)
    assert not any(label.startswith("low_rank") for label in full)
    assert planted
