"""What the benchmark of deterministic gradients writes, on a CPU in a small form."""

import importlib
import json
from pathlib import Path

import torch


def test_it_compares_both_modes(tmp_path: Path) -> None:
    program = importlib.import_module("benchmarks.deterministic")
    given = ["--device", "cpu", "--rounds", "1", "--only", "D64 S64", "--out", str(tmp_path)]
    assert program.main(given) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    rows = json.loads((tmp_path / "deterministic_cpu.json").read_text())["rows"]
    assert [row["cell"] for row in rows] == [
        "D64 S64 full",
        "D64 S64 causal",
        "D64 S64 causal, groups of 4",
        "D64 S64 window 8",
    ]
    for row in rows:
        assert row["peer"] == "adaattn"
        assert set(row["timings"]) == {"adaattn", "adaattn, deterministic"}
