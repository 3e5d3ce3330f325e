"""benchmarks/architectures.py at its smallest."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--width", "16", "--heads", "2", "--tokens", "8", "--new-tokens", "4", "--rounds", "1"]


def _rows(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str, policy: str = "quality"
) -> list[dict[str, Any]]:
    """Return the rows of a run at small sizes."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import architectures

    path = architectures.main(["--device", "cpu", *SMALL, "--out", str(folder), *more])
    assert path.name == f"architectures_{policy}_cpu.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss", "GPT2", "Bert", "T5", "Bart"])
def test_a_model_of_each_kind_does_as_its_peer_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _rows(monkeypatch, tmp_path, "--only", name)
    ways = ["forward", "training", "generation", "padded generation"]
    expected = ways[:2] if name == "Bert" else ways
    assert [row["cell"] for row in rows] == [f"{name} {way}" for way in expected]
    for row in rows:
        assert "failed" not in row, row
        assert row["peer"] == ("eager" if name in ("Gemma2", "GptOss") else "sdpa")
        assert row["ratio"] > 0 and row["ours_ms"] > 0 and row["peer_ms"] > 0
        assert "agreement" in row


def test_what_fails_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("--only", "Bert forward", "--policy", "nonsense")
    (row,) = _rows(monkeypatch, tmp_path, *more, policy="nonsense")
    assert row["failed_by"] == "benchmark" and "ratio" not in row
