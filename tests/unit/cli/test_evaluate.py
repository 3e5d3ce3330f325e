import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from rich.console import Console

from adaattn.cli import evaluate as command
from adaattn.evaluation.case_list import CASES, Case
from adaattn.evaluation.cases import compare_cases


@pytest.fixture
def arguments(tiny_model: Path, text_file: Path) -> tuple[str, ...]:
    return (
        *("evaluate", "--model", str(tiny_model), "--text", str(text_file), "--device", "cpu"),
        *("--tokens", "100", "--window", "64", "--stride", "32", "--policies", "quality,speed"),
    )


def test_tables_and_verdict_go_to_stdout_and_progress_to_stderr(
    invoke: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    for words in ("perplexity", "KL to exact", "quality", "speed", "heads by method, exact"):
        assert words in result.stdout
    assert "Exact attention agrees with Transformers' sdpa" in " ".join(result.stdout.split())
    assert "evaluating" in result.stderr
    assert "evaluating" not in result.stdout


def test_json_alone_goes_to_stdout_and_the_tables_to_stderr(
    invoke: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    result = invoke(*arguments, "--json", "--no-progress")
    found = json.loads(result.stdout)
    assert [run["name"] for run in found["runs"]] == ["sdpa", "exact", "quality", "speed"]
    assert found["scored"] == 99
    assert "perplexity" in result.stderr
    assert "evaluating" not in result.stderr


def test_files_are_written_where_asked(
    invoke: Callable[..., Any], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    result = invoke(*arguments, "--html", str(page), "--json", str(data), "--no-progress")
    assert result.exit_code == 0, result.stderr
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(data.read_text())["tokens"] == 100
    assert "perplexity" in result.stdout


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--policies", "cheap"], "error: policy: expected 'quality'"),
        (["--text", "no.txt"], "error: text 'no.txt': expected one of opticks"),
        (["--model", "/no/such/model"], "error: model '/no/such/model': expected a folder"),
        (["--stride", "64"], "error: stride: expected 1 to 63"),
        (["--stride", "0"], "error: stride: expected 1 to 63 (window - 1), got 0"),
        (["--tokens", "0"], "error: tokens: expected at least 2, got 0\n"),
        (["--tokens", "-5"], "error: tokens: expected at least 2, got -5\n"),
        (["--window", "0"], "error: window: expected at least 2 tokens, got 0"),
        (["--dtype", "int8"], "error: dtype: expected one of float32"),
        (["--html", "/no/such/folder/page.html"], "error: output file /no/such/folder/page.html"),
        (["--json", "/"], "error: output file /: expected a file in an existing folder"),
    ],
)
def test_bad_input_prints_one_line_and_exits_with_2(
    invoke: Callable[..., Any], arguments: tuple[str, ...], extra: list[str], message: str
) -> None:
    result = invoke(*arguments, *extra, "--no-progress")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_single_problems_are_compared_where_asked(
    invoke: Callable[..., Any], arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaattn.evaluation import perplexity

    monkeypatch.setattr(
        perplexity, "compare_cases", partial(compare_cases, cases=[one_small_case()])
    )
    result = invoke(*arguments, "--cases")
    assert result.exit_code == 0, result.stderr
    assert "Single problems beside PyTorch" in result.stdout
    assert "Of 1 single problems" in " ".join(result.stdout.split())
    assert "comparing with PyTorch" in result.stderr
    assert "Single problems" not in invoke(*arguments).stdout


def one_small_case() -> Case:
    """Return a case that takes milliseconds."""
    (case,) = (item for item in CASES if item.name == "softcap")
    return replace(case, on_cpu=replace(case.on_cpu, len_q=16, len_k=16))


def test_ctrl_c_prints_one_line_and_exits_with_130(
    invoke: Callable[..., Any], arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "evaluate", interrupted)
    result = invoke(*arguments)
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_the_bar_shows_one_stage_at_a_time_with_time_left() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with command._bar(console) as progress:
        report = command._on_bar(progress)
        report("load", 0, 0)
        report("evaluate", 1, 4)
        report("evaluate", 2, 4)
        (task,) = progress.tasks
        assert (task.description, task.completed, task.total) == ("evaluating", 2, 4)
    assert "left" in stream.getvalue()


def test_cases_go_on_in_the_bar_of_the_evaluation() -> None:
    with command._bar(Console(file=io.StringIO(), force_terminal=True)) as progress:
        report = command._on_bar(progress)
        report("evaluate", 3, 5)
        (before,) = progress.tasks
        report("compare", 4, 5)
        (task,) = progress.tasks
        assert task.id == before.id
        assert (task.description, task.completed, task.total) == ("comparing with PyTorch", 4, 5)


def test_the_time_left_of_cases_counts_from_the_evaluations_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 200.0, 220.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    report = command._as_lines()
    for stage, done in (("evaluate", 0), ("evaluate", 5), ("compare", 10), ("compare", 11)):
        report(stage, done, 12)
    assert capsys.readouterr().err.splitlines() == [
        "evaluating",
        "evaluating: 42%, about 140 s left",
        "comparing with PyTorch",
        "comparing with PyTorch: 92%, about 20 s left",
    ]


def test_lines_for_logs_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    report = command._as_lines()
    for done in range(50):
        report("evaluate", done, 50)
    assert capsys.readouterr().err == "evaluating\n"
