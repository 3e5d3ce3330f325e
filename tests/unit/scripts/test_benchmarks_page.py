"""BENCHMARKS.md is what the committed results say, and says so plainly where there are none."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script's module."""
    place = ROOT / "scripts" / "benchmarks_page.py"
    spec = importlib.util.spec_from_file_location("benchmarks_page", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _timing(ms: float) -> dict[str, Any]:
    return {"median_ms": ms, "low_ms": 0.9 * ms, "high_ms": 1.1 * ms, "rounds": 5}


def _row(cell: str, kind: str, times: dict[str, float], **more: Any) -> dict[str, Any]:
    """Return a result whose rates are those of a cell with 1 TFLOP and 1 GB."""
    rates = {
        name: {"tflops": 1e3 / ms, "gb_per_s": 1e3 / ms, "roofline_percent": 100 / ms}
        for name, ms in times.items()
    }
    plain: dict[str, Any] = {
        "cell": cell,
        "kind": kind,
        "peer": "F.sdpa",
        "timings": {name: _timing(ms) for name, ms in times.items()},
        "rates": rates,
        "skipped": {},
        "chosen": {"adaattn": "hopper/bf16"},
        "kernel": "void cudnn::flash<int>(float)",
        "workspace_bytes": dict.fromkeys(times, 2_000_000),
    }
    return plain | more


def _write(folder: Path, name: str, rows: list[Any], failed: list[Any], **machine: Any) -> None:
    """Write a result file of the program's form."""
    facts = {"device": "H200", "commit": "abc1234", "date": "2026-11-01", "torch": "2.11"} | machine
    document = {
        "machine": facts,
        "rows": rows,
        "failed": failed,
        "method": {"time": "medians."},
        "options": {"tiny": False},
    }
    results = folder / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / f"ops_{name}.json").write_text(json.dumps(document), encoding="utf-8")


def test_the_committed_page_is_what_the_committed_results_say(script: ModuleType) -> None:
    assert not script.stale(ROOT), "python scripts/benchmarks_page.py --write renews it"


def test_without_results_the_page_says_so(script: ModuleType, tmp_path: Path) -> None:
    assert "The repository has no results" in script.page(script.read(tmp_path))
    _write(tmp_path, "cuda", [], [])
    text = script.page(script.read(tmp_path / script.RESULTS))
    assert "The repository has no results" in text


def test_a_table_has_ratios_rates_and_why_there_is_none(script: ModuleType, tmp_path: Path) -> None:
    times = {"F.sdpa": 3.0, "cudnn": 2.5, "adaattn": 2.0, "adaattn[triton]": 4.0}
    dense = [
        _row("dense D64", "dense", times),
        _row(
            "dense D128",
            "dense",
            {"adaattn": 1.0, "F.sdpa": 1.0},
            skipped={
                "cudnn": "out of memory",
                "adaattn[triton]": "wrong: output: 3 % of 9 elements\nmore",
            },
        ),
    ]
    softcap = [_row("softcap", "softcap", {"flex": 3.0, "adaattn": 2.0}, kernel="")]
    softcap[0]["skipped"] = {"F.sdpa": "it cannot be told softcap", "naive": "out of memory"}
    failed = [{"cell": "grid B16", "failed": "nobody could be timed", "skipped": {}}]
    _write(tmp_path, "cuda", dense + softcap, failed)
    text = script.page(script.read(tmp_path / script.RESULTS))
    assert "Commit abc1234, 2026-11-01: torch 2.11." in text
    assert "- **time**: medians.\n" in text
    overview = "| dense | 2 | 1.22 (1.00 to 1.50) | 1.25 (1.25 to 1.25) |  | 50 to 100 |"
    assert overview in text
    assert (
        "| dense D64 | hopper/bf16 | 2.0000 | 20 | 500 | 50 | 1.50 | 1.25 | 250 | `flash` | 2.00 |"
    ) in text
    assert "| 1.00 | *out of memory* |  | `flash` | 2.00 |" in text
    assert "| cell | settles on | ms | spread % | TFLOP/s | roofline % | over Flex |" in text
    assert "- grid B16: nobody could be timed" in text
    assert "- dense D128, adaattn[triton]: wrong: output: 3 % of 9 elements\n" in text


def test_decoding_is_told_in_bytes_and_the_newest_result_counts(
    script: ModuleType, tmp_path: Path
) -> None:
    old = _row("decode B1", "decode", {"F.sdpa": 9.0, "adaattn": 1.0})
    new = _row("decode B1", "decode", {"F.sdpa": 2.0, "adaattn": 1.0})
    _write(tmp_path, "cuda_b", [old], [{"cell": "x", "failed": "lost", "skipped": {}}])
    _write(tmp_path, "cuda_a", [new, _row("x", "dense", {"adaattn": 1.0})], [], date="2026-11-02")
    text = script.page(script.read(tmp_path / script.RESULTS))
    assert "| GB/s |" in text
    assert "2.00 |" in text and "9.00" not in text
    assert "lost" not in text


def test_toy_sizes_and_older_forms_are_left_out(script: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, "cuda", [_row("dense", "dense", {"adaattn": 1.0})], [])
    path = tmp_path / script.RESULTS / "ops_cuda.json"
    document = json.loads(path.read_text("utf-8"))
    document["options"]["tiny"] = True
    path.write_text(json.dumps(document), encoding="utf-8")
    assert script.read(path.parent) == {}
    del document["method"]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert script.read(path.parent) == {}


def test_the_script_finds_and_renews_a_stale_page(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main(["--check"]) == 1
    assert "stale, run with --write" in capsys.readouterr().out
    assert script.main(["--write"]) == 0
    assert script.main(["--check"]) == 0
    _write(tmp_path, "cuda", [_row("dense", "dense", {"adaattn": 1.0})], [])
    assert script.main([]) == 1
    assert script.main(["--write"]) == 0
    assert script.main([]) == 0
    assert "## H200" in (tmp_path / script.PAGE).read_text("utf-8")
