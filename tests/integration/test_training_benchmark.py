"""benchmarks/training.py at toy sizes."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


def test_twins_learn_the_same_and_each_part_has_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    program = importlib.import_module("benchmarks.training")
    given = ["--device", "cpu", "--tiny", "--steps", str(STEPS), "--many-steps", "20"]
    page = tmp_path / "losses.html"
    assert program.main([*given, "--out", str(tmp_path), "--plot", str(page)]) == 0
    document = json.loads((tmp_path / "training_cpu.json").read_text("utf-8"))
    rows = {row["cell"]: row for row in document["rows"]}
    assert set(rows) == {"decoder", "mixed", "memory S32", "memory S64", "growth"}
    for name, peer in (("decoder", "F.sdpa"), ("mixed", "naive")):
        losses = rows[name]["losses"]
        assert {"adaattn", peer} <= set(losses)
        assert all(len(found) == STEPS for found in losses.values())
        first = [found[0] for found in losses.values()]
        assert first == pytest.approx([first[0]] * len(first), rel=torch.finfo(torch.bfloat16).eps)
        assert math.log(256) / 2 < losses["adaattn"][-1] < 2 * math.log(256)
        assert min(rows[name]["step_ms"].values()) > 0
    assert set(rows["memory S64"]["peak_bytes"]) == {"adaattn", "F.sdpa", "naive"}
    assert set(rows["growth"]["held_bytes_after"]) == {"2", "10", "20"}
    assert "adaattn" in page.read_text("utf-8")


@pytest.mark.parametrize("dropped", ["window", "cu_seqlens_k", "softcap"])
def test_nothing_is_trained_by_a_wrong_attention(
    dropped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    program = importlib.import_module("benchmarks.training")
    usual = program.adaattn.scaled_dot_product_attention
    names = {dropped, "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k"}
    names = names if dropped == "cu_seqlens_k" else {dropped}

    def wrong(*tensors: torch.Tensor, **given: object) -> object:
        return usual(*tensors, **{name: it for name, it in given.items() if name not in names})

    monkeypatch.setattr(program.adaattn, "scaled_dot_product_attention", wrong)
    given = ["--device", "cpu", "--tiny", "--steps", "1", "--part", "mixed"]
    with pytest.raises(AssertionError, match="beyond"):
        program.main([*given, "--out", str(tmp_path)])
