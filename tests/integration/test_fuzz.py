"""Random problems of benchmarks/fuzz.py: the same each time, and a wrong executor is caught."""

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

from adaattn import hardware
from adaattn.backends import Result, Tensors, register
from adaattn.backends.reference import CAPABILITIES, attention
from adaattn.spec import AttentionProblem, HeadGroup

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--seed", "390")
"""Draws every feature, without long rows of 2048 columns: 16 orders of their sums take 30 s."""


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    """The program's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import fuzz

        yield fuzz


@pytest.fixture
def spoil() -> Iterator[dict[str, Any]]:
    """Register an executor whose results are changed by ``spoil["how"]``."""
    kept: dict[str, Any] = {"how": lambda result: result}

    def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        return kept["how"](attention(tensors, problem))

    named = replace(CAPABILITIES[0], name="spoilt", backend="spoilt")
    remove = register([named], run)
    yield kept
    remove()
    hardware.clear_cache()


def _run(fuzz: ModuleType, folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of a run."""
    given = ["--device", "cpu", "--out", str(folder), "--commit", "abc1234", "--families", "20"]
    status = fuzz.main([*given, *more])
    (path,) = folder.glob("fuzz_*_cpu.json")
    return status, json.loads(path.read_text(encoding="utf-8"))


def test_a_right_executor_passes_and_the_totals_are_written(
    fuzz: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = _run(fuzz, tmp_path, "--backend", "chunked", "--problems", "40")
    assert status == 0
    assert document["rows"] == []
    assert document["summary"]["checked"] == 40
    assert len(document["summary"]["families"]) == 20
    assert document["machine"]["commit"] == "abc1234"
    assert "checked 40, refused 0, failed 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "how",
    [
        lambda result: replace(result, output=1.01 * result.output),
        lambda result: replace(result, output=torch.full_like(result.output, float("nan"))),
        lambda result: replace(result, output=torch.empty_like(result.output)),
    ],
    ids=["scaled", "NaN", "never written"],
)
def test_a_wrong_output_is_a_failure_that_can_be_found_again(
    fuzz: ModuleType,
    spoil: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    how: Any,
) -> None:
    assert _run(fuzz, tmp_path, *SMALL, "--backend", "spoilt", "--problems", "20")[0] == 0
    spoil["how"] = how
    status, document = _run(fuzz, tmp_path, *SMALL, "--backend", "spoilt", "--problems", "20")
    assert status == 1
    rows = document["rows"]
    assert document["summary"]["failed"] == len(rows) > 0
    exact = [row for row in rows if row["problem"]["family"]["dtype"] == "float32"]
    assert exact, "1 % is more than fp32 may be wrong by"
    printed = capsys.readouterr().out
    assert all(f"FAILED {row['cell']}" in printed for row in rows)
    index = exact[0]["problem"]["index"]
    status, again = _run(fuzz, tmp_path, *SMALL, "--backend", "spoilt", "--index", str(index))
    assert status == 1
    assert [row["cell"] for row in again["rows"]] == [exact[0]["cell"]]


def test_a_call_that_is_wrong_when_it_comes_again_is_a_failure(
    fuzz: ModuleType, spoil: dict[str, Any], tmp_path: Path
) -> None:
    seen: list[torch.Tensor] = []

    def how(result: Result) -> Result:
        times = sum(torch.equal(result.output, other) for other in seen)
        seen.append(result.output)
        return replace(result, output=result.output * 1.5) if times == 2 else result

    spoil["how"] = how
    given = (*SMALL, "--backend", "spoilt", "--problems", "20")
    status, document = _run(fuzz, tmp_path, *given)
    assert status == 1
    assert all(row["problem"]["index"] % 3 == 0 for row in document["rows"])


def test_a_wrong_number_beside_the_output_is_a_failure(
    fuzz: ModuleType, spoil: dict[str, Any], tmp_path: Path
) -> None:
    def how(result: Result) -> Result:
        if result.entropy is None:
            return result
        return replace(result, entropy=result.entropy + 1)

    spoil["how"] = how
    status, document = _run(fuzz, tmp_path, *SMALL, "--backend", "spoilt", "--problems", "40")
    assert status == 1
    assert all("entropy: " in row["failed"] for row in document["rows"])


def test_an_unseen_row_that_is_no_zero_and_a_raised_error_are_failures(
    fuzz: ModuleType, spoil: dict[str, Any], tmp_path: Path
) -> None:
    spoil["how"] = lambda result: replace(result, output=result.output + 1e-30)
    _, document = _run(fuzz, tmp_path, *SMALL, "--backend", "spoilt", "--problems", "60")
    assert any("rows that see no key" in row["failed"] for row in document["rows"])

    def raising(result: Result) -> Result:
        raise RuntimeError("no such kernel")

    spoil["how"] = raising
    status, document = _run(fuzz, tmp_path, *SMALL, "--backend", "spoilt", "--problems", "5")
    assert (status, document["summary"]["failed"]) == (1, 5)
    assert "no such kernel" in document["rows"][0]["failed"]


def test_a_wrong_gradient_of_a_right_output_is_a_failure_in_training(
    fuzz: ModuleType, spoil: dict[str, Any], tmp_path: Path
) -> None:
    def how(result: Result) -> Result:
        change = result.output - result.output.detach()  # 0, and its gradient is not
        return replace(result, output=result.output + 0.1 * change)

    given = (*SMALL, "--backend", "spoilt", "--problems", "12")
    assert _run(fuzz, tmp_path, *given, "--training")[0] == 0
    spoil["how"] = how
    assert _run(fuzz, tmp_path / "plain", *given)[0] == 0
    status, document = _run(fuzz, tmp_path / "wrong", *given, "--training")
    assert status == 1
    assert all("gradient of " in row["failed"] for row in document["rows"])


def test_what_an_executor_refuses_is_counted_with_its_reasons(
    fuzz: ModuleType, tmp_path: Path
) -> None:
    status, document = _run(fuzz, tmp_path, "--backend", "sdpa.flash", "--problems", "40")
    totals = document["summary"]
    assert status in (0, 2)
    assert totals["checked"] + totals["refused"] == 40
    assert totals["refused"] > 0
    assert all(reason.startswith("sdpa.flash: ") for reason in totals["refusals"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_seed_gives_the_same_problems_and_they_cover_the_features(
    fuzz: ModuleType, device: str
) -> None:
    problems = sys.modules["benchmarks.fuzz_problems"]
    drawn = list(problems.all_problems(2000, 200, 3, device))
    assert drawn == list(problems.all_problems(2000, 200, 3, device))
    assert drawn != list(problems.all_problems(2000, 200, 4, device))
    families = {one.family.number: one.family for one in drawn}.values()
    assert {one.dtype for one in families} == set(problems.DTYPES)
    assert {one.mask for one in families} == {"", "boolean", "additive", "wide"}
    assert {one.order for one in families} == {"full", "causal", "causal bottom right"}
    for name in ("has_sinks", "has_alibi", "is_packed", "softcap", "aux", "decodes", "window"):
        assert {bool(getattr(one, name)) for one in families} == {True, False}, name
    assert len({one.mask_dims for one in families if one.mask}) > 8
    assert {one.layout for one in drawn} == set(problems._LAYOUTS)
    assert any(0 in one.lengths_k for one in drawn)
    assert any(one.hidden_rows for one in drawn)
    assert max(one.len_q for one in drawn) > 1000
    scores = [one.batch * one.heads * one.len_q * one.len_k for one in drawn]
    assert max(scores) <= max(problems._SCORES[device], 2000**2)


def test_a_call_that_hangs_ends_the_process_and_says_which() -> None:
    code = (
        "import time; from benchmarks.failures import time_limit\n"
        "with time_limit(0.2, lambda: print('problem 7 hung', flush=True)): time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 3
    assert "problem 7 hung" in done.stdout


def test_jobs_share_the_problems_and_their_totals_are_one(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    given = (*SMALL, "--backend", "chunked", "--problems", "24", "--jobs", "2")
    status, document = _run(fuzz, tmp_path, *given)
    assert status == 0
    assert document["summary"]["checked"] + document["summary"]["refused"] == 24
