import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaattn.cli import app
from adaattn.cli.console import check_outputs, one_line, one_line_errors, write_text
from adaattn.errors import AssetError, UnsupportedError


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_version_is_that_of_the_package(invoke: Callable[..., Any]) -> None:
    import adaattn

    assert invoke("--version").stdout == f"adaattn {adaattn.__version__}\n"


@pytest.mark.parametrize("command", ["evaluate", "info", "plan", "tune"])
def test_help_explains_every_option(invoke: Callable[..., Any], command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    printed = " ".join(result.stdout.replace("│", " ").split())
    if command in ("evaluate", "plan"):
        assert "quality, balanced, speed" in printed
    if command in ("plan", "tune"):
        assert "Batch, heads of q" in printed


def test_help_imports_neither_torch_nor_transformers_nor_plotly() -> None:
    done = python(
        "import sys; sys.argv = ['adaattn', '--help']\n"
        "from adaattn.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "print({'torch', 'transformers', 'plotly'} & set(sys.modules), code)"
    )
    assert done.stdout.splitlines()[-1] == "set() 0", done.stderr


def test_importing_the_package_imports_no_command_line() -> None:
    done = python(
        "import adaattn, sys; print({'typer', 'rich', 'transformers'} & set(sys.modules))"
    )
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_package_is_one_line_and_exit_2(missing: str) -> None:
    done = python(
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['adaattn', 'evaluate']\n"
        "from adaattn.cli.app import main; main()"
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: the adaattn command needs {missing}; run: pip install adaattn[cli]\n"
    )


def test_another_missing_module_is_not_blamed_on_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "adaattn.cli.commands", None)
    with pytest.raises(ModuleNotFoundError):
        app.main()


def test_ctrl_c_exits_with_130_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from adaattn.cli import commands

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "app", interrupted)
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [("--version",), ("plan", "--shape", "1,1,1,8,8,8")])
def test_a_full_disk_is_one_line_and_exit_2(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "adaattn", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.stderr == "error: the output cannot be written: No space left on device\n"
    assert done.returncode == 2


def test_ctrl_c_inside_a_command_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit) as caught, one_line_errors():
        raise KeyboardInterrupt
    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"


NO_GPU = "error: device: expected 'cpu', got cuda:0; this PyTorch sees no CUDA device"
UNKNOWN = "error: device: expected one of auto, cpu, cuda, cuda:N"


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", NO_GPU), ("abacus", UNKNOWN), ("", UNKNOWN), ("mps", UNKNOWN), ("cuda:x", UNKNOWN)],
)
@pytest.mark.parametrize(
    "mistakes",
    [
        ("evaluate", "--dtype", "int3", "--tokens", "0", "--policies", "none", "--html", "/"),
        ("plan", "--shape", "1,2", "--dtype", "int3", "--policy", "none", "--json", "/"),
        ("tune", "--shape", "1,2", "--dtype", "int3", "--budget", "0", "--out", "/"),
    ],
    ids=lambda mistakes: mistakes[0],
)
def test_a_device_that_is_not_here_is_refused_before_anything_else(
    invoke: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    mistakes: tuple[str, ...],
    device: str,
    message: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke(*mistakes, "--device", device)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_a_missing_device_costs_no_import_of_the_evaluation() -> None:
    done = python(
        "import sys, torch; torch.cuda.is_available = lambda: False\n"
        "sys.argv = ['adaattn', 'evaluate', '--device', 'cuda']\n"
        "from adaattn.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "print('adaattn.evaluation.perplexity' in sys.modules, code)"
    )
    assert done.stdout == "False 2\n", done.stderr


def test_several_reasons_become_one_line() -> None:
    error = UnsupportedError("sdpa.flash", ["D is too large", "no mask"], "use auto")
    assert one_line(str(error)) == (
        "sdpa.flash cannot serve this call: D is too large; no mask; use auto"
    )
    assert one_line("one") == "one"


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "adaattn", "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith("adaattn ")


SHAPE = ("--shape", "1,2,2,16,16,16", "--device", "cpu")


@pytest.mark.parametrize("command", [("info",), ("plan", *SHAPE), ("tune", *SHAPE)])
@pytest.mark.parametrize("target", ["/no/such/folder/x.json", "/"])
def test_an_output_that_cannot_be_written_is_refused_in_the_same_words(
    invoke: Callable[..., Any], command: tuple[str, ...], target: str
) -> None:
    result = invoke(*command, "--json", target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        f"error: output file {target}: expected a file in an existing folder, got "
    )
    assert result.stderr.count("\n") == 1


def test_a_folder_without_permission_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(AssetError, match="got one that may not be written"):
        check_outputs(tmp_path / "x.json")


def test_two_outputs_are_not_written_to_one_file(
    invoke: Callable[..., Any], tmp_path: Path
) -> None:
    """The table was lost: the JSON was written over it."""
    path = str(tmp_path / "x.json")
    result = invoke("tune", *SHAPE, "--out", path, "--json", path)
    assert result.exit_code == 2
    assert result.stderr.endswith("got the same file twice\n")
    assert not list(tmp_path.iterdir())


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """A link became a file, and so would /dev/null for whoever may write to /dev."""
    link, target, pipe = tmp_path / "link", tmp_path / "target", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    check_outputs(link, pipe)
    write_text(link, "text")
    assert link.is_symlink() and target.read_text() == "text"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.txt"
    write_text(path, "first")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(AssetError, match="got No space left on device; name another place"):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
