import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from adaattn.cli import tune as command
from adaattn.spec import AttentionProblem, TimingTable
from adaattn.tuning import tune

SHAPE = ("--shape", "1,4,2,32,32,16", "--device", "cpu", "--rounds", "1")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ADAATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "timings"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[AttentionProblem]]:
    """Return the problems that each call of the command asked for."""
    found: list[Any] = []

    def seen(problems: Any, **options: Any) -> Any:
        found.append(problems)
        return tune(problems, **options)

    monkeypatch.setattr(command, "tune", seen)
    return found


def words(text: str) -> str:
    return " ".join(text.split())


def test_each_problem_is_printed_with_its_fastest_executor_and_what_pytorch_would_take(
    invoke: Callable[..., Any], cache: Path
) -> None:
    result = invoke("tune", *SHAPE, "--shape", "1,2,2,16,16,16")
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert len(lines) == 2
    assert "fp32: 4 heads in groups of 2, 32 x 32, D 16" in lines[0]
    assert all("(sdpa.flash)" in line for line in lines)
    (path,) = cache.iterdir()
    assert path.name in result.stdout.replace("\n", "")


def test_gradients_are_followed_afterwards_as_before(invoke: Callable[..., Any]) -> None:
    """Of two modes entered together one kept what the other had set: gradients stayed off."""
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert invoke("tune", *SHAPE).exit_code == 0
            assert torch.is_grad_enabled() is enabled


def test_progress_goes_to_stderr_and_can_be_left_out(invoke: Callable[..., Any]) -> None:
    shown = invoke("tune", *SHAPE)
    assert "0 of 1, about 60 s left: fp32: 4 heads" in shown.stderr
    assert "left" not in shown.stdout
    assert invoke("tune", *SHAPE, "--no-progress").stderr == ""


def test_options_reach_the_problem(
    invoke: Callable[..., Any], asked: list[Sequence[AttentionProblem]]
) -> None:
    options = ("--dtype", "bf16", "--causal", "--window", "7,-1", "--softcap", "5", "--training")
    result = invoke("tune", *SHAPE, *options, "--align", "bottom_right")
    assert result.exit_code == 0, result.stderr
    ((problem,),) = asked
    assert problem.precision.label == "bf16"
    assert (problem.is_causal, problem.window, problem.softcap) == (True, (7, -1), 5.0)
    assert problem.requires_grad
    assert "half causal window softcap training" in words(result.stdout)
    assert "│ - │" in words(result.stdout)  # PyTorch has no call for it


def test_plan_and_tune_take_both_words_for_a_backward_pass(invoke: Callable[..., Any]) -> None:
    asked = ("--shape", "1,4,4,32,32,512", "--device", "h200", "--explain")
    shown = [invoke("plan", *asked, word).stdout for word in ("--backward", "--training")]
    assert shown[0] == shown[1] != invoke("plan", *asked).stdout
    result = invoke("tune", *SHAPE, "--backward", "--rounds", "1")
    assert "fp32 training" in words(result.stdout)


def test_without_a_shape_the_usual_problems_are_measured_within_the_budget(
    invoke: Callable[..., Any], asked: list[Sequence[AttentionProblem] | None]
) -> None:
    arguments = ("--device", "cpu", "--budget", "0.001", "--rounds", "1")
    result = invoke("tune", *arguments)
    assert result.exit_code == 0, result.stderr
    assert asked == [None]
    assert "1 problem; written to" in words(result.stdout)


def test_json_alone_goes_to_stdout_and_the_table_to_stderr(invoke: Callable[..., Any]) -> None:
    result = invoke("tune", *SHAPE, "--json", "--no-progress")
    found = json.loads(result.stdout)
    assert list(found["cells"]) == ["fp32"]
    assert "sdpa.flash" in result.stderr


def test_a_table_written_to_a_file_can_be_taken_over(
    invoke: Callable[..., Any], cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    written = invoke("tune", *SHAPE, "--out", str(path), "--json", "--no-progress")
    assert written.exit_code == 0, written.stderr
    assert not cache.exists()

    loaded = invoke("tune", "--device", "cpu", "--table", str(path), "--json")
    assert loaded.exit_code == 0, loaded.stderr
    assert json.loads(loaded.stdout)["cells"] == json.loads(written.stdout)["cells"]
    assert len(list(cache.iterdir())) == 1


def test_a_table_is_read_once_so_that_a_pipe_can_bring_it(
    invoke: Callable[..., Any], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads = tmp_path / "table.json", []
    assert invoke("tune", *SHAPE, "--out", str(path), "--no-progress").exit_code == 0
    read_text = Path.read_text

    def counted(self: Path, *arguments: Any, **options: Any) -> str:
        reads.append(self)
        return read_text(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", counted)
    assert invoke("tune", "--device", "cpu", "--table", str(path)).exit_code == 0
    assert reads.count(path) == 1
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1,2,3"), "error: shape: expected B,Hq,Hkv,Sq,Sk,D"),
        ((*SHAPE, "--dtype", "int3"), "error: dtype: expected one of float64"),
        ((*SHAPE, "--window", "1"), "error: window: expected LEFT,RIGHT"),
        ((*SHAPE, "--budget", "0"), "error: --budget: expected a positive number of seconds"),
        ((*SHAPE, "--rounds", "0"), "error: rounds: expected an integer of at least 1"),
        (("--softcap", "30"), "error: --shape: expected one beside options of shapes"),
        (("--training",), "error: --shape: expected one beside options of shapes"),
        (
            ("--device", "h200"),
            "error: device: expected one of auto, cpu, cuda, cuda:N, got 'h200'",
        ),
        ((*SHAPE, "--table", "none.json"), "error: timing table none.json: expected a readable"),
        ((*SHAPE, "--out", "none/x.json"), "error: output file none/x.json: expected a file in"),
        ((*SHAPE, "--json", "none/x.json"), "error: output file none/x.json: expected a file in"),
    ],
)
def test_bad_options_print_one_line_and_exit_with_2(
    invoke: Callable[..., Any], arguments: tuple[str, ...], message: str
) -> None:
    result = invoke("tune", *arguments, "--no-progress")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


DAMAGED = {
    "": "an empty file",
    "{\n": "text that is no JSON from line 2 on",
    "\xff\xfe": "a file that is no text",
    "[1, 2]": "JSON of another kind",
    '{"policy": {}}': "JSON of another kind",
    '{"format": 2, "cells": {}}': "one with damaged entries",
    "[" * 100_000: "JSON of another kind",
}


@pytest.mark.parametrize(("text", "found"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_a_damaged_table_is_told_in_plain_words(
    invoke: Callable[..., Any], cache: Path, tmp_path: Path, text: str, found: str
) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text.encode("latin-1"))
    result = invoke("tune", "--device", "cpu", "--table", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: timing table {path}: expected a table that adaattn tune wrote, got {found}; "
        "measure again with adaattn tune\n"
    )
    assert not cache.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 9}, "expected format 2, got format 9"),
        ({"format": "adaattn-policy"}, "expected format 2, got format adaattn-policy"),
        ({"cells": {"fp32": [[10**400]]}}, "got one with damaged entries"),
        ({"hardware": {"device_type": "cuda"}, "device": "NVIDIA H200"}, "got NVIDIA H200 (dev"),
    ],
)
def test_a_table_of_something_else_is_told_in_plain_words(
    invoke: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "table.json"
    invoke("tune", *SHAPE, "--out", str(path))
    if "cells" in changes:  # a number that no float holds
        row = json.loads(path.read_text())["cells"]["fp32"][0]
        changes = {"cells": {"fp32": [[10**400, *row[1:]]]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    result = invoke("tune", "--device", "cpu", "--table", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(path) in result.stderr and words in result.stderr
    assert result.stderr.count("\n") == 1 and "measure again" in result.stderr


def test_an_own_table_that_cannot_be_read_is_kept_beside_the_new_one(
    invoke: Callable[..., Any], cache: Path
) -> None:
    """It was written over, be it of a later format."""
    assert invoke("tune", *SHAPE).exit_code == 0
    (path,) = cache.iterdir()
    for number, text in enumerate(('{"format": 9}', "{"), start=1):
        path.write_text(text)
        result = invoke("tune", *SHAPE, "--no-progress")
        kept = path.with_suffix(f".damaged-{number}")
        assert result.exit_code == 0
        assert result.stderr.startswith(f"note: timing table {path}: expected ")
        assert result.stderr.endswith(f"; it is kept as {kept}\n")
        assert kept.read_text() == text
        assert json.loads(path.read_text())["format"] == 2


def test_a_cache_that_cannot_be_written_is_refused_before_measuring(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It measured, failed to save, and said that it had."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ADAATTN_CACHE", str(tmp_path / "file"))
    result = invoke("tune", *SHAPE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: folder {tmp_path / 'file' / 'timings'}: expected one that can be made, "
        "got Not a directory; set ADAATTN_CACHE to another, or use --out\n"
    )
    assert invoke("tune", *SHAPE, "--out", str(tmp_path / "table.json")).exit_code == 0


def test_shapes_beside_a_table_are_refused(invoke: Callable[..., Any], tmp_path: Path) -> None:
    """They were left out without a word."""
    path = tmp_path / "table.json"
    invoke("tune", *SHAPE, "--out", str(path))
    result = invoke("tune", *SHAPE, "--table", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: --table: expected no --shape beside it, got 1 shape\n"


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what lets Ctrl-C come after so many problems."""

    def after(number: int) -> None:
        def report(problem: str, done: int, total: int) -> None:
            if done == number:
                signal.raise_signal(signal.SIGINT)

        def seen(problems: Any, **options: Any) -> Any:
            return tune(problems, **{**options, "progress": report})

        monkeypatch.setattr(command, "tune", seen)

    return after


def test_ctrl_c_keeps_what_was_measured_and_exits_with_130(
    invoke: Callable[..., Any], interrupted: Callable[[int], None], tmp_path: Path
) -> None:
    path, before = tmp_path / "table.json", signal.getsignal(signal.SIGINT)
    interrupted(1)
    result = invoke("tune", *SHAPE, "--shape", "1,2,2,16,16,16", "--out", str(path))
    assert result.exit_code == 130
    assert "1 problem; written to" in words(result.stdout)
    assert len(json.loads(path.read_text())["cells"]["fp32"]) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_anything_was_measured_touches_no_file(
    invoke: Callable[..., Any], interrupted: Callable[[int], None], tmp_path: Path
) -> None:
    """It wrote an empty table over the file, and exited with 0."""
    path = tmp_path / "table.json"
    path.write_text("what was there")
    interrupted(0)
    result = invoke("tune", *SHAPE, "--out", str(path), "--json", str(tmp_path / "out.json"))
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("interrupted\n")
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]
    assert path.read_text() == "what was there"


def test_nothing_measured_is_not_called_written(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, empty = tmp_path / "table.json", TimingTable(source="measured here", device="a CPU")
    monkeypatch.setattr(command, "tune", lambda *_, **__: empty)
    result = invoke("tune", *SHAPE, "--out", str(path))
    assert "0 problems; nothing is written" in words(result.stdout)
    assert not path.exists()


def test_the_time_that_is_left_is_the_budget_or_the_rest_of_the_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rich.console import Console

    now = 0.0
    monkeypatch.setattr(command.time, "monotonic", lambda: now)
    shown: list[tuple[str, float]] = []
    progress = command._Progress(Console(stderr=True), 60.0)
    progress._show = lambda line, share: shown.append((line, share))

    progress("a", 0, 10)
    now = 12.0
    progress("b", 1, 10)  # at this pace all ten take two minutes: the budget ends first
    progress("c", 6, 10)  # at this one eight seconds are left

    assert shown == [
        ("0 of 10, about 60 s left: a", 0.0),
        ("1 of 10, about 48 s left: b", 0.2),
        ("6 of 10, about 8 s left: c", 0.6),
    ]
