"""The four suites of benchmarks/gpu_benchmark.py at their smallest, and its gate."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The benchmark's module, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("ADAATTN_CACHE", str(tmp_path_factory.mktemp("cache")))
        from benchmarks import gpu_benchmark

        yield gpu_benchmark


@pytest.fixture(scope="module")
def quick(
    benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], str, str]:
    """One quick run: its JSON, its page and what it printed."""
    folder = tmp_path_factory.mktemp("quick")
    arguments = ["--quick", "--device", "cpu", "--commit", "abc1234"]
    arguments += ["--json", str(folder / "out.json"), "--html", str(folder / "out.html")]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert benchmark.main(arguments) == 0
    result = json.loads((folder / "out.json").read_text())
    return result, (folder / "out.html").read_text(), printed.getvalue()


def rows_of(result: dict[str, Any], suite: str) -> list[dict[str, Any]]:
    """Return the rows of one suite."""
    found = [row for row in result["rows"] if row["suite"] == suite]
    assert found, suite
    return found


def test_every_suite_has_times_of_right_results(quick: tuple[dict[str, Any], str, str]) -> None:
    result, _, _ = quick
    for suite in ("implementation", "precision", "memory", "scalability"):
        timed = [row for row in rows_of(result, suite) if row["status"] == "ok"]
        assert timed
        for row in timed:
            assert row["mean_ms"] > 0 and row["median_ms"] > 0 and row["std_ms"] >= 0
            assert row["mse"] >= 0 and row["relative_error"] < 1
            assert row["utilisation_percent"] is None
            if "limit_bytes" not in row["extra"]:
                assert row["rounds"] == 3
                assert row["tokens_per_s"] > 0 and row["tflops"] > 0


def test_the_result_says_where_it_is_from(quick: tuple[dict[str, Any], str, str]) -> None:
    machine, options = quick[0]["machine"], quick[0]["options"]
    assert machine["commit"] == "abc1234"
    assert machine["torch"] == torch.__version__
    assert machine["device_type"] == "cpu" and machine["rates_source"]
    assert options["quick"] is True and options["seconds"] > 0


def test_every_implementation_is_in_every_cell(quick: tuple[dict[str, Any], str, str]) -> None:
    rows = rows_of(quick[0], "implementation")
    variants = {
        cell: {row["variant"] for row in rows if row["cell"] == cell}
        for cell in {row["cell"] for row in rows}
    }
    assert len(variants) == 2
    for found in variants.values():
        assert found == {
            "naive",
            "F.sdpa",
            "nn.MultiheadAttention",
            "DenseAttention",
            "AdaptiveRankAttention",
            "AdaptivePrecisionAttention",
            "AdaAttention",
            "AdaptiveFlashAttention",
        }
    labels = {row["variant"]: row["note"].partition(":")[0] for row in rows}
    assert labels["DenseAttention"] == "dense only"
    assert labels["AdaptiveRankAttention"] == "adaptive rank"
    assert labels["AdaAttention"] == "both adaptive"


def test_the_cells_of_a_full_run_are_the_named_ones(benchmark: ModuleType) -> None:
    from benchmarks.gpu import implementation
    from benchmarks.gpu.rows import Settings

    names = [cell.name for cell in implementation.cells(Settings(device="cpu"))]
    assert names[:4] == ["B4_S128", "B2_S512", "B4_S512", "B1_S1024"]
    on_gpu = [cell.name for cell in implementation.cells(Settings(device="cuda"))]
    assert on_gpu[: len(names)] == names and len(on_gpu) > len(names)


def test_a_format_without_instructions_has_the_reason_and_no_time(
    quick: tuple[dict[str, Any], str, str],
) -> None:
    rows = {
        (row["variant"], row["phase"]): row
        for row in rows_of(quick[0], "precision")
        if row["phase"] == "forward"
    }
    assert set(rows) == {(mode, "forward") for mode in ("fp32", "bf16", "fp16", "fp8")}
    refused = rows["fp8", "forward"]
    assert refused["status"] == "not available" and refused["median_ms"] is None
    assert "natively, not it" in refused["note"] or "no executor" in refused["note"]
    for mode, limit in (("bf16", 1e-4), ("fp16", 1e-3)):
        row = rows[mode, "forward"]
        assert row["status"] == "not available" or row["mse"] < limit == row["extra"]["mse_limit"]


def test_under_a_real_limit_the_naive_way_fails_and_this_library_does_not(
    quick: tuple[dict[str, Any], str, str],
) -> None:
    limited = [row for row in rows_of(quick[0], "memory") if "limit_bytes" in row["extra"]]
    status = {(row["variant"], row["cell"].split(",")[1]): row["status"] for row in limited}
    assert status == {
        ("naive", " S256"): "ok",
        ("naive", " S2048"): "out of memory",
        ("adaattn", " S256"): "ok",
        ("adaattn", " S2048"): "ok",
    }


def test_the_page_has_every_row_and_its_plots(quick: tuple[dict[str, Any], str, str]) -> None:
    result, page, _ = quick
    pytest.importorskip("plotly")
    assert page.count("<tr>") == len(result["rows"]) + 4
    assert page.count('class="plot"') == 7
    assert "plotly is missing" not in page


def test_without_rich_and_plotly_tables_are_text_and_the_page_says_so(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in ("rich", "rich.console", "rich.table", "plotly", "plotly.io"):
        monkeypatch.setitem(sys.modules, name, None)
    page = tmp_path / "out.html"
    arguments = ["--quick", "--device", "cpu", "--suite", "precision", "--html", str(page)]
    assert benchmark.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Number formats\ncell " in printed
    assert "0 wrong results" in printed
    assert "plotly is missing" in page.read_text()
    assert "<td class=text>fp32</td>" in page.read_text()


def test_a_wrong_result_gets_no_time_and_the_status_says_so(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu import scalability, tensors

    def slightly_wrong(*inputs: torch.Tensor) -> torch.Tensor:
        return 1.001 * tensors.ours(*inputs)

    monkeypatch.setitem(scalability._FUNCTIONS, "adaattn", slightly_wrong)
    assert benchmark.main(["--quick", "--device", "cpu", "--suite", "scalability"]) == 1
    printed = capsys.readouterr().out
    assert "wrong result  relative error 0.001, allowed " in printed
    assert "4 wrong results" in printed


def test_wrong_gradients_get_no_time_either(benchmark: ModuleType) -> None:
    from benchmarks.gpu.rows import Settings
    from benchmarks.gpu.tensors import TensorCell, ours, run_tensors

    def wrong_backward(query: Any, key: Any, value: Any) -> torch.Tensor:
        return ours(query, key.detach() + 0.5 * (key - key.detach()), value)

    cell = TensorCell(name="small", shape=(1, 2, 32, 16), dtype=torch.float32)
    settings = Settings(device="cpu", quick=True, rounds=1, say=lambda text: None)
    functions = {"right": ours, "wrong": wrong_backward}
    right, wrong = run_tensors(cell, functions, settings, {"suite": "x"}, training=True)
    assert right.status == "ok" and right.median_ms is not None
    assert wrong.status == "wrong result" and wrong.median_ms is None
    assert "relative error of gradients" in wrong.note


def test_a_layer_that_is_wrong_is_caught_too(benchmark: ModuleType) -> None:
    from benchmarks.gpu import implementation
    from benchmarks.gpu.variants import ModuleCell, make_variants, reference

    cell = ModuleCell(name="small", batch=1, length=16, embed_dim=32, num_heads=2)
    x = torch.randn(1, 16, 32)
    variants = make_variants(cell, "cpu")
    other = replace(variants[3], call=lambda module, given: 1.001 * module(given)[0])
    found = implementation._check(
        [*variants[:3], other], x, reference(cell, x), {"suite": "x", "cell": "small"}
    )
    assert [row.status for row in found.values()] == ["ok", "ok", "ok", "wrong result"]


def test_an_allocation_that_fails_is_a_row_and_no_crash(benchmark: ModuleType) -> None:
    from benchmarks.gpu.rows import guarded

    def too_large() -> torch.Tensor:
        return torch.empty(1 << 55, dtype=torch.float64)

    def broken() -> None:
        raise RuntimeError("something else")

    assert guarded(too_large) == (None, "out of memory")
    with pytest.raises(RuntimeError, match="something else"):
        guarded(broken)


def test_a_device_that_is_not_there_is_refused(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "--device: this PyTorch sees no CUDA device" in capsys.readouterr().err


def test_it_runs_as_a_script_from_any_folder(tmp_path: Path) -> None:
    import os

    import adaattn

    package = str(Path(adaattn.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_benchmark.py"), "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--suite" in done.stdout and "docs/benchmarks.md" in done.stdout
