"""What all commands share: errors without traceback, ``--json``, files written whole."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from adaattn._files import replace_file
from adaattn.errors import AdaAttnError, AssetError, PlanError

__all__ = [
    "JsonOption",
    "check_outputs",
    "counted",
    "one_line",
    "one_line_errors",
    "refusal",
    "write_json",
    "write_text",
]

STDOUT = "-"


class JsonOption(TyperCommand):
    """A command whose ``--json`` may stand without a value, meaning stdout."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare ``--json`` its value before the arguments are parsed."""
        given: list[str] = []
        for index, argument in enumerate(args):
            given.append(argument)
            following = args[index + 1] if index + 1 < len(args) else None
            is_bare = following is None or (following != STDOUT and following.startswith("-"))
            if argument == "--json" and is_bare:
                given.append(STDOUT)
        return super().parse_args(ctx, given)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the library's errors into one line and exit status 2, Ctrl-C into 130.

    Below the line of a `PlanError` each candidate has its own, with the reason against it.
    """
    try:
        yield
    except PlanError as error:
        found = refusal(error)
        typer.echo(f"error: {found['error']}", err=True)
        width = max((len(entry["candidate"]) for entry in found["trace"]), default=0)
        for entry in found["trace"]:
            typer.echo(f"  - {entry['candidate']:<{width}}  {entry['reason']}", err=True)
        raise typer.Exit(2) from error
    except AdaAttnError as error:
        typer.echo(f"error: {one_line(str(error))}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from error


def one_line(message: str) -> str:
    r"""Return a message of several lines as one, its reasons joined with semicolons.

    Example:
        >>> one_line("x cannot serve this call:\n  - too large\n  - too slow")
        'x cannot serve this call: too large; too slow'
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[:2] = [f"{lines[0]} {lines[1]}"]
    return "; ".join(lines)


def refusal(error: PlanError) -> dict[str, Any]:
    """Return a refused plan as JSON values: the sentence, and the reason of each candidate.

    Example:
        >>> from adaattn.errors import PlanError
        >>> refusal(PlanError("nothing fits", ["reference/fp32: too large"]))["trace"]
        [{'candidate': 'reference/fp32', 'accepted': False, 'reason': 'too large'}]
    """
    told = [line.partition(": ") for line in error.trace]
    trace = [{"candidate": name, "accepted": False, "reason": reason} for name, _, reason in told]
    return {"error": str(error).partition("\n")[0], "trace": trace}


def counted(number: int, noun: str) -> str:
    """Return how many there are of something.

    Example:
        >>> counted(1, "problem"), counted(2, "problem")
        ('1 problem', '2 problems')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_outputs(*targets: str | Path | None) -> None:
    """Refuse before minutes of work what could not be written after them.

    Args:
        targets: files; None and stdout (``-``) pass.

    Raises:
        AssetError: one is a folder, would lie in none, may not be written, or is named twice.
    """
    seen: set[Path] = set()
    for path in (Path(target) for target in targets if target not in (None, STDOUT)):
        folder, found = path.absolute().parent, ""
        if path.is_dir():
            found = "a folder"
        elif not folder.is_dir():
            found = "no such folder"
        elif not os.access(path if _is_device(path) else folder, os.W_OK):
            found = "one that may not be written"
        elif path.resolve() in seen:
            found = "the same file twice"
        if found:
            raise AssetError.got(f"output file {path}", "a file in an existing folder", found)
        seen.add(path.resolve())


def _is_device(path: Path) -> bool:
    """Return whether a path is neither a file nor a folder: /dev/null, a pipe, a terminal."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_json(target: str, value: Any) -> None:
    """Write a value as JSON to stdout (``-``) or to a file.

    Raises:
        AssetError: the file cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    if target == STDOUT:
        typer.echo(text, nl=False)
    else:
        write_text(Path(target), text)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; a device such as /dev/null stays what it is.

    Raises:
        AssetError: it cannot be written.
    """
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
        else:
            target = path.resolve()  # a link goes on to point there
            replace_file(target, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise AssetError.got(
            f"output file {path}",
            "a file that can be written",
            error.strerror or repr(error),
            "name another place",
        ) from error
