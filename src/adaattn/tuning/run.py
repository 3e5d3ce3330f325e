"""Measured times for this machine: what may displace PyTorch's own choice of a kernel.

    import adaattn
    adaattn.tune()

`adaattn.hardware.tables` keeps them, planning reads them.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from adaattn._numbers import require_integer
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.hardware import clear_cache
from adaattn.hardware.probe import describe, resolve
from adaattn.hardware.tables import read_table, stamped
from adaattn.hardware.tables import save as save_table
from adaattn.planning import simplify
from adaattn.spec import AttentionProblem, Cell, HardwareFacts, Precision, TimingTable
from adaattn.tuning.cell import Effort, cell_of, measure_cell
from adaattn.tuning.grid import Asked, default_grid

__all__ = ["keep", "tune"]

_LOGGER = logging.getLogger("adaattn")

_WARM_UP: Final = AttentionProblem(
    batch=1,
    num_heads=2,
    num_kv_heads=2,
    len_q=64,
    len_k=64,
    head_dim=64,
    value_dim=64,
    precision=Precision.BF16,
    scale=0.125,
)
"""Loads libraries and starts threads, which no problem should pay for."""


def tune(
    problems: Iterable[AttentionProblem] | None = None,
    *,
    device: torch.device | str | None = None,
    budget_s: float = 60.0,
    rounds: int = 7,
    save: bool = True,
    load: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> TimingTable:
    """Return the times of every exact executor on some problems, measured now on this machine.

    Every executor that can serve a problem runs on random tensors made for it. Its results are
    checked first; one that is wrong or fails is logged and left out. Then all are timed in turns.
    Interrupted, out of time, or stopped by an error, it keeps what was measured until then.

    Calls plan with the new times from then on, in this process and in later ones. A process that
    is tuned twice may choose another kernel the second time; save a table and load it wherever
    the choice must be the same.

    Args:
        problems: what to measure; their ``device_type`` is taken from ``device``. None measures
            the usual problems of such a device, the most informative first.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None is the current CUDA device where
            there is one, else the CPU.
        budget_s: seconds for all of it; the problem at hand is finished in a first round.
        rounds: turns of each executor on each problem; slow ones have fewer, and times that do
            not agree up to four times as many.
        save: keep the times on this machine, in the place of older ones of the same problems.
        load: a file that `tune` or ``adaattn tune --out`` wrote for such a device: read it, and
            measure nothing.
        progress: called with the problem in words, how many are done, and how many there are.

    Raises:
        TableError: the file to load is damaged, of a later format, or for other hardware.
        DeviceError: the device is unknown.
        ArgumentError: a number is out of range, or a problem contradicts itself.
        ArgumentTypeError: ``problems`` are others, or the budget is no number.

    Example:
        >>> import adaattn
        >>> problem = adaattn.AttentionProblem(batch=1, num_heads=2, num_kv_heads=2, len_q=64,
        ...                                    len_k=64, head_dim=64, value_dim=64)
        >>> table = adaattn.tune([problem], device="cpu", rounds=1, save=False)
        >>> sorted(table.cells["fp32"][0].times)
        ['chunked', 'sdpa.flash', 'sdpa.math']
    """
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float):
        raise ArgumentTypeError.got("budget_s", "a positive number of seconds", repr(budget_s))
    if not budget_s > 0:
        raise ArgumentError.got("budget_s", "a positive number of seconds", budget_s)
    require_integer("rounds", rounds, least=1)
    chosen = resolve(device)
    facts = describe(chosen)
    if load is not None:
        table = read_table(Path(load), facts)
        keep(facts, table, save)
        return table
    if problems is None:
        asked = default_grid(chosen.type)
    else:
        given = list(problems) if isinstance(problems, Iterable) else [None]
        if not all(isinstance(problem, AttentionProblem) for problem in given):
            expected = "AttentionProblems, in a list for instance"
            raise ArgumentTypeError.got("problems", expected, repr(problems))
        own = (simplify(replace(problem, device_type=chosen.type)) for problem in given)
        asked = tuple(Asked(problem=problem) for problem in own)
    cells: list[Cell] = []
    deadline = time.perf_counter() + budget_s
    try:
        on_cuda = chosen.type == "cuda"
        where = torch.cuda.device(chosen) if on_cuda else contextlib.nullcontext()
        with torch.random.fork_rng([chosen] if on_cuda else []), where:
            _measure(
                asked, chosen, facts, Effort(rounds=rounds, deadline=deadline), cells, progress
            )
    except KeyboardInterrupt:
        _LOGGER.warning("interrupted: %d of %d problems were measured", len(cells), len(asked))
    finally:
        table = stamped(facts, cells)
        keep(facts, table, save)
    return table


def _measure(
    asked: tuple[Asked, ...],
    device: torch.device,
    facts: HardwareFacts,
    effort: Effort,
    cells: list[Cell],
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Add the cells of some problems, as many as there is time for."""
    warm_up = replace(_WARM_UP, device_type=device.type)
    measure_cell(warm_up, device, facts, replace(effort, rounds=1, compiles=False))
    for done, item in enumerate(asked):
        if done and time.perf_counter() > effort.deadline:
            return
        if progress is not None:
            progress(cell_of(item.problem, {}).label, done, len(asked))
        cell = measure_cell(item.problem, device, facts, replace(effort, compiles=item.compiles))
        if cell is not None:
            cells.append(cell)
    if progress is not None:
        progress("", len(asked), len(asked))


def keep(facts: HardwareFacts, table: TimingTable, save: bool) -> None:
    """Save the times where that is wanted, and plan with them from now on."""
    if save and table.cells and save_table(facts, table):
        clear_cache()
