"""The cells of benchmarks/ops at toy sizes, and its gate before a time."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import adaattn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ops() -> Iterator[ModuleType]:
    """The program's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("benchmarks.ops.run")


def _run(ops: ModuleType, folder: Path, *only: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of a run at toy sizes."""
    given = ["--device", "cpu", "--tiny", "--no-flex", "--rounds", "1", "--commit", "abc1234"]
    status = ops.main([*given, "--out", str(folder), "--only", *only])
    return status, json.loads((folder / "ops_cpu.json").read_text(encoding="utf-8"))


def _cells(*patterns: str) -> list[Any]:
    registry = sys.modules["benchmarks.ops.registry"]
    return registry.selected(registry.cells("cuda"), patterns)


def test_every_kind_of_cell_is_checked_and_timed(ops: ModuleType, tmp_path: Path) -> None:
    kinds = (
        "D64 S512",
        "D80 S1024",
        "D192/128 S1024",
        "decode B1",
        "GQA S512",
        "grid B1 S512 E768",
        "wide D512 S2048",
        "small D512",
    )
    status, document = _run(ops, tmp_path, *kinds)
    assert status == 0
    assert document["machine"]["commit"] == "abc1234"
    assert document["failed"] == []
    assert {row["kind"] for row in document["rows"]} == {cell.kind for cell in _cells(*kinds)}
    assert len({row["kind"] for row in document["rows"]}) == 20
    for row in document["rows"]:
        assert {"adaattn", row["peer"]} <= set(row["timings"]), row
        assert row["rates"]["adaattn"]["tflops"] > 0
        assert row["skipped"]["cudnn"] == "it runs on a GPU"
        assert row["skipped"]["adaattn[hopper]"]
    (softcap,) = (row for row in document["rows"] if row["kind"] == "softcap 30")
    assert softcap["skipped"]["F.sdpa"] == "it cannot be told softcap"
    assert softcap["peer"] == "naive"
    (dense, *_) = (row for row in document["rows"] if row["kind"] == "dense")
    assert "scaled_dot_product" in dense["kernel"]


@pytest.mark.parametrize("pattern", ["softcap D64 S512", "ALiBi D64 S512", "dense D64 S512"])
def test_a_wrong_result_has_no_time(
    ops: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    right = adaattn.scaled_dot_product_attention
    monkeypatch.setattr(
        adaattn,
        "scaled_dot_product_attention",
        lambda *given, **named: 1.1 * right(*given, **named),
    )
    status, document = _run(ops, tmp_path, pattern)
    assert status == 1
    for row in document["rows"]:
        assert "adaattn" not in row["timings"]
        assert row["skipped"]["adaattn"].startswith("wrong: ")


def test_one_row_of_one_head_that_is_nan_has_no_time(
    ops: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = adaattn.scaled_dot_product_attention

    def spoilt(*given: Any, **named: Any) -> torch.Tensor:
        output = right(*given, **named).clone()
        output[-1, -1, -1] = float("nan")
        return output

    monkeypatch.setattr(adaattn, "scaled_dot_product_attention", spoilt)
    status, document = _run(ops, tmp_path, "dense D64 S512 full")
    assert status == 1
    assert "finite" in document["rows"][0]["skipped"]["adaattn"]


def test_who_runs_out_of_memory_has_that_as_the_reason(
    ops: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(sys.modules["benchmarks.ops.inputs"], "alibi_mask", full)
    status, document = _run(ops, tmp_path, "ALiBi D64 S512")
    assert status == 0
    (row,) = document["rows"]
    assert row["skipped"]["F.sdpa"] == "out of memory"
    assert row["peer"] == "adaattn"


def test_the_cells_are_those_that_the_page_promises(ops: ModuleType) -> None:
    names = [cell.name for cell in _cells("")]
    page = Path(__file__).parents[2] / "docs" / "benchmarks.md"
    assert f"on a GPU {len(names)} cells" in page.read_text(encoding="utf-8")
    assert len(names) == len(set(names))
    assert len(_cells("grid")) == 64
    (cell,) = _cells("dense D128 S16384 full -backward")
    assert cell.flops == 4 * 16 * 16384**2 * 128
    (cell,) = _cells("dense D128 S16384 causal -backward")
    assert cell.flops == pytest.approx(2 * 16 * 16384**2 * 128, rel=1e-3)
    (cell,) = _cells("packed D64 S4096")
    assert sum(cell.lengths) == 16384 and max(cell.lengths) == 4096
    (cell,) = _cells("decode B64")
    assert cell.bytes_moved == pytest.approx(2 * 64 * 8192 * 8 * 128 * 2, rel=1e-2)
    assert [one.name for one in _cells("odd D192/128 S1024 causal")] == [
        "odd head D192/128 S1024 causal"
    ]


def test_the_check_samples_rows_where_all_would_be_too_many(
    ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, inputs = (sys.modules[f"benchmarks.ops.{name}"] for name in ("check", "inputs"))
    contestants = sys.modules["benchmarks.ops.contestants"]
    monkeypatch.setattr(check, "_COMPARED", 1)
    for pattern in ("window D64 S512", "additive D64 S512", "ALiBi D64 S512", "sinks D64 S512"):
        cell = inputs.tiny(_cells(pattern)[0])
        tensors = inputs.make_inputs(cell, "cpu")
        exact = check.Exact(cell, tensors)
        assert len(exact._places()) == 8 < cell.shape[3]
        call = contestants._ours("auto", cell, tensors)
        output = call.run()
        assert exact.hold("adaattn", call, output) < 0.01
        with pytest.raises(Exception, match="wrong: output"):
            exact.hold("adaattn", replace(call), 1.1 * output)
