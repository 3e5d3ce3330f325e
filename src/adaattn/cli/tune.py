"""``adaattn tune``: executors timed on this machine, the fastest of each problem printed."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from adaattn.cli.console import STDOUT, check_outputs, counted, write_json, write_text
from adaattn.cli.plan import PlanRequest, problem_of
from adaattn.cli.tables import make_room, read
from adaattn.errors import ArgumentError
from adaattn.hardware.probe import describe
from adaattn.hardware.tables import own_path, table_text
from adaattn.spec import Cell, TimingTable
from adaattn.tuning import tune
from adaattn.tuning.run import keep

__all__ = ["TuneRequest", "run_tune"]

_MIN_WIDTH = 110
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """The options of the command, as typed.

    Args:
        problems: one for each ``--shape``; () measures the usual problems.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        budget_s: seconds.
        rounds: turns of each executor.
        load: a table to take over in the place of measuring.
        out: a file to write in the place of this machine's own.
    """

    problems: tuple[PlanRequest, ...] = ()
    device: str = "auto"
    budget_s: float = 60.0
    rounds: int = 7
    load: Path | None = None
    out: Path | None = None


def run_tune(request: TuneRequest, *, json_path: str | None, shows_progress: bool) -> None:
    """Measure or load, then print the table to stdout (to stderr when JSON goes to stdout).

    After Ctrl-C it does the same with what was measured until then.

    Raises:
        AdaAttnError: an option cannot be understood, or a file cannot be read or written.
        KeyboardInterrupt: Ctrl-C came before anything was measured; no file is touched.
        typer.Exit: it came later; with status 130.
    """
    device = None if request.device == "auto" else request.device
    facts = describe(device)
    problems = [problem_of(item, facts.device_type) for item in request.problems]
    check_outputs(request.out, json_path)
    if not request.budget_s > 0:
        raise ArgumentError.got("--budget", "a positive number of seconds", request.budget_s)
    loaded = None
    if request.load is not None:
        loaded = read(request.load, facts)
        if problems:
            shapes = counted(len(problems), "shape")
            raise ArgumentError.got("--table", "no --shape beside it", shapes)
    if request.out is None and (moved := make_room(facts)):
        print(f"note: {moved}", file=sys.stderr)
    errors = Console(stderr=True)
    shown = _Progress(errors, request.budget_s) if shows_progress and not request.load else None
    with _interrupts() as interrupts:
        try:
            table = loaded or tune(
                problems or None,
                device=device,
                budget_s=request.budget_s,
                rounds=request.rounds,
                save=request.out is None,
                progress=shown,
            )
        finally:
            if shown is not None:
                shown.stop()
    if loaded is not None:
        keep(facts, loaded, save=request.out is None)
    if interrupts and not table.cells:
        raise KeyboardInterrupt
    if request.out is not None and table.cells:
        write_text(request.out, table_text(facts, table))
    if json_path is not None:
        write_json(json_path, table.to_dict())
    console = Console(stderr=json_path == STDOUT)
    if not console.is_terminal:
        console.width = max(console.width, _MIN_WIDTH)
    console.print(_printed(table))
    where = f"written to {request.out or own_path(facts)}" if table.cells else "nothing is written"
    console.print(f"{counted(_count(table), 'problem')}; {where}")
    if interrupts:
        raise typer.Exit(130)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that tells of Ctrl-C, which `tune` answers by returning what it has."""
    seen: list[int] = []

    def noted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, noted)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _printed(table: TimingTable) -> Table:
    """Return the fastest executor of each cell, as rich prints it."""
    printed = Table(title=f"{table.device} ({table.source}, {table.date})")
    printed.add_column("problem", overflow="fold")
    printed.add_column("fastest")
    printed.add_column("ms", justify="right")
    printed.add_column("of PyTorch's", justify="right")
    for cell in (cell for cells in table.cells.values() for cell in cells):
        best = cell.times[cell.fastest]
        mark = "" if best.settled else " ?"
        printed.add_row(cell.label, cell.fastest, f"{best.wall_ms:.3g}{mark}", _share(cell))
    printed.caption = "?: its rounds did not agree. -: PyTorch has no call for it."
    return printed


def _share(cell: Cell) -> str:
    """Return the fastest time over that of what PyTorch would run."""
    default = cell.times.get(cell.default)
    if default is None:
        return "-"
    return f"{cell.times[cell.fastest].wall_ms / default.wall_ms:.2f} ({cell.default})"


def _count(table: TimingTable) -> int:
    """Return the number of cells."""
    return sum(len(cells) for cells in table.cells.values())


class _Progress:
    """A bar on a terminal, a line now and then in a log; both with the time that is left.

    Args:
        console: of stderr.
        budget_s: seconds that the run may take.
    """

    def __init__(self, console: Console, budget_s: float) -> None:
        self._budget_s = budget_s
        self._began, self._last = time.monotonic(), -math.inf
        self._show: Callable[[str, float], None] = self._line
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            task = self._bar.add_task("", total=1.0)
            bar = self._bar
            self._show = lambda words, share: bar.update(task, description=words, completed=share)
            self._bar.start()

    def __call__(self, problem: str, done: int, total: int) -> None:
        """Show how far a run has come: by problems or by its budget, whichever ends first."""
        spent = time.monotonic() - self._began
        left = max(self._budget_s - spent, 0.0)
        if done:
            left = min(left, spent / done * (total - done))
        share = spent / max(spent + left, 1e-9)
        self._show(f"{done} of {total}, about {left:.0f} s left: {problem}", share)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, words: str, share: float) -> None:
        """Write a line to stderr, not too often."""
        del share
        now = time.monotonic()
        if now - self._last >= _LINE_EVERY_S:
            self._last = now
            print(words, file=sys.stderr, flush=True)
