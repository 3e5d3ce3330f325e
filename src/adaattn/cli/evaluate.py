"""``adaattn evaluate``: progress while it runs, tables and a verdict at the end."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from adaattn.cli.console import STDOUT, check_outputs, write_json, write_text
from adaattn.evaluation.html_report import html_report
from adaattn.evaluation.perplexity import EvaluationRequest, evaluate
from adaattn.evaluation.report import print_report

__all__ = ["run_evaluate"]

_STAGES = {
    "download": "fetching the demo model",
    "unpack": "unpacking it",
    "convert": "converting it (once)",
    "check": "checking its checksums",
    "load": "loading the model",
    "evaluate": "evaluating",
    "compare": "comparing with PyTorch",
}
_GOES_ON = {"compare": "evaluate"}
"""Stages that count on from another, whose time left is then that of both."""

_LINE_EVERY_S = 10.0
_MIN_WIDTH = 100


def run_evaluate(
    request: EvaluationRequest,
    *,
    json_path: str | None,
    html_path: Path | None,
    shows_progress: bool,
) -> None:
    """Evaluate, then print tables to stdout (to stderr when JSON goes to stdout).

    Raises:
        AdaAttnError: as `evaluate`; also when an output file cannot be written.
    """
    check_outputs(json_path, html_path)
    errors = Console(stderr=True)
    if not shows_progress:
        result = evaluate(request)
    elif errors.is_terminal:
        with _bar(errors) as progress:
            result = evaluate(request, progress=_on_bar(progress))
    else:
        result = evaluate(request, progress=_as_lines())
    if html_path is not None:
        write_text(html_path, html_report(result))
    if json_path is not None:
        write_json(json_path, result.to_dict())
    console = Console(stderr=json_path == STDOUT)
    if not console.is_terminal:
        console.width = max(console.width, _MIN_WIDTH)
    print_report(result, console)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _on_bar(progress: Progress) -> Callable[[str, int, int], None]:
    """Return a callback that shows one bar for each stage."""
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        words, key = _STAGES.get(stage, stage), _GOES_ON.get(stage, stage)
        if key not in tasks:
            for task in tasks.values():
                progress.remove_task(task)
            tasks.clear()
            tasks[key] = progress.add_task(words, total=None)
        progress.update(tasks[key], description=words, completed=done, total=total or None)

    return report


def _as_lines() -> Callable[[str, int, int], None]:
    """Return a callback that writes a line now and then, for logs."""
    began: dict[str, float] = {}
    last = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        is_new = stage not in began
        began.setdefault(stage, began.get(_GOES_ON.get(stage, stage), now))
        if not is_new and now - last < _LINE_EVERY_S:
            return
        last = now
        words = _STAGES.get(stage, stage)
        if total and done and not is_new:
            left = (now - began[stage]) / done * (total - done)
            words += f": {done / total:.0%}, about {left:.0f} s left"
        print(words, file=sys.stderr, flush=True)

    return report
