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
        "D64 S512 causal -alone -backward",
        "mask D64 S512 full -alone -backward",
        "additive D64 S512",
        "list S16384 10",
        "dense D64 S512 causal backward",
        "sinks D64 S2048 backward",
        "alone D64 S512 groups",
        "entropy D64 S2048 causal",
        "odd D80 S1024 causal",
        "decode B1 S32768",
        "GQA S512 causal",
        "grid B1 S512 E768 -B16",
        "wide D512 S2048 causal",
        "small D512 S16 fp32",
    )
    status, document = _run(ops, tmp_path, *kinds)
    assert status == 0
    assert document["machine"]["commit"] == "abc1234"
    assert document["failed"] == []
    assert {row["kind"] for row in document["rows"]} == {cell.kind for cell in _cells(*kinds)}
    assert len({row["kind"] for row in document["rows"]}) == 24
    for row in document["rows"]:
        assert {"adaattn", row["peer"]} <= set(row["timings"]), row
        assert row["rates"]["adaattn"]["tflops"] > 0
        assert row["skipped"]["cudnn"] == "it runs on a GPU"
        assert row["skipped"]["adaattn[hopper]"]
    for row in document["rows"]:
        if "training" in row["kind"] or "alone" in row["kind"]:
            assert row["skipped"]["adaattn[hopper], same bits"]
            assert row["rates"]["adaattn"]["gb_per_s"] is None
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
    (cell,) = _cells("packed D64 S4096 -alone -backward")
    assert sum(cell.lengths) == 16384 and max(cell.lengths) == 4096
    (alone,) = _cells("alone D128 S16384 full")
    (both,) = _cells("dense D128 S16384 full backward")
    assert alone.flops == pytest.approx(both.flops * 2.5 / 3.5)
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


def _gradients(pattern: str) -> tuple[Any, Any, Any, tuple[torch.Tensor, ...]]:
    """Return the check of a cell's gradients, who is held, the call, and PyTorch's gradients."""
    check, inputs = (sys.modules[f"benchmarks.ops.{name}"] for name in ("check", "inputs"))
    contestants = sys.modules["benchmarks.ops.contestants"]
    cell = inputs.tiny(_cells(pattern)[0])
    tensors = inputs.make_inputs(cell, "cpu")
    make = contestants.naive if cell.given.sdpa_lacks else contestants._sdpa
    call = make(cell, tensors)
    found = call.with_backward(tensors, is_alone=cell.is_alone)()
    return check.Exact(cell, tensors), contestants, call, found


@pytest.mark.parametrize(
    "pattern",
    ["alone D64 S512 full", "alone D64 S512 packed", "alone D64 S512 mask", "alone D64 S512 groups",
     "ALiBi D64 S2048 backward", "sinks D64 S2048 backward", "softcap D64 S2048 backward",
     "fp32 D64 S1024 backward"],
)  # fmt: skip
def test_gradients_are_held_to_those_of_a_wider_dtype(ops: ModuleType, pattern: str) -> None:
    exact, contestants, call, found = _gradients(pattern)
    peer = contestants.NAIVE if exact.cell.given.sdpa_lacks else contestants.SDPA
    assert exact.hold_gradients(peer, call, found, lambda: found) < 0.02
    assert exact.hold_gradients("adaattn", call, found, lambda: found) < 0.02
    query, *others = found
    with pytest.raises(Exception, match="wrong: relative error"):
        exact.hold_gradients("adaattn", call, (1.1 * query, *others), lambda: found)
    with pytest.raises(Exception, match="finite"):
        exact.hold_gradients("adaattn", call, (query / 0.0, *others), lambda: found)


def test_gradients_in_a_fixed_order_are_the_same_each_time(ops: ModuleType) -> None:
    exact, contestants, call, found = _gradients("alone D64 S512 full")
    ordered = replace(call, is_ordered=True)
    exact.hold_gradients(contestants.SDPA, ordered, found, lambda: found)
    query, *others = found
    other = (query.nextafter(query + 1.0), *others)
    with pytest.raises(Exception, match="wrong: expected the same gradients each time"):
        exact.hold_gradients(contestants.ORDERED, ordered, found, lambda: other)


def test_a_fixed_order_is_asked_for_in_both_passes_and_not_behind_them(ops: ModuleType) -> None:
    contestants, inputs = (
        sys.modules[f"benchmarks.ops.{name}"] for name in ("contestants", "inputs")
    )
    cell = inputs.tiny(_cells("alone D64 S512 full")[0])
    tensors = inputs.make_inputs(cell, "cpu")
    seen: list[bool] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor) -> torch.Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return query.clone()

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return upstream

    def run() -> torch.Tensor:
        return Watched.apply(tensors.query) + tensors.key.sum() + tensors.value.sum()

    call = contestants.Call(run=run, is_ordered=True)
    gradients = call.with_backward(tensors, is_alone=True)
    assert seen == [True]
    gradients(), gradients()
    assert seen == [True] * 3 and not torch.are_deterministic_algorithms_enabled()
