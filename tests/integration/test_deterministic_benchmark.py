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


def test_it_times_what_a_user_of_pytorch_has_beside_it(tmp_path: Path) -> None:
    program = importlib.import_module("benchmarks.deterministic")
    how = ["--device", "cpu", "--rounds", "1", "--beside", "--dims", "136", "--lengths", "48"]
    assert program.main([*how, "--only", "window", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "backward_d136_cpu.json").read_text())["rows"]
    assert [row["cell"] for row in rows] == ["D136 S48 window 6", "D136 S48 window 6, both passes"]
    assert set(rows[0]["timings"]) == {"adaattn", "adaattn, deterministic", "F.sdpa"}
    assert set(rows[1]["timings"]) == {"adaattn", "F.sdpa"}


def test_masks_are_given_to_both(tmp_path: Path) -> None:
    program = importlib.import_module("benchmarks.deterministic")
    how = ["--device", "cpu", "--rounds", "1", "--beside", "--masks", "--lengths", "48"]
    only = ["--dims", "64", "128", "--only", "D128 S48 ", "--out", str(tmp_path)]
    assert program.main([*how, *only]) == 0
    rows = json.loads((tmp_path / "backward_cpu.json").read_text())["rows"]
    assert [row["cell"] for row in rows][-4::2] == ["D128 S48 mask", "D128 S48 bias"]
    assert all("F.sdpa" in row["timings"] for row in rows)


def test_the_window_of_pytorch_is_ours() -> None:
    program = importlib.import_module("benchmarks.deterministic")
    given = [torch.randn(1, 1, 40, 8) for _ in range(3)]
    words = {"window": (5, 0)}
    found = program.peer(40, 1, words, "cpu")(*given)
    torch.testing.assert_close(found, program.attend(*given, backend="reference", **words))
