"""What measured times say: of their own problems, of larger ones, and with one of them left out."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from adaattn.cli.machines import facts_of
from adaattn.hardware.tables import timings_of
from adaattn.planning.evidence import DISPLACES, interpolated, ratio
from adaattn.spec import AttentionProblem, Cell, Measured, TimingTable
from adaattn.testing import make_problem
from adaattn.tuning_cell import cell_of
from adaattn.tuning_grid import default_grid

CARDS = ("h200", "h100")
OWN_KERNELS = ("hopper", "triton")

MOST_WRONG = 0.05
"""Share of the cells in which neighbours may take the place of what is faster: the clock's spread
alone moves so many across the line (`DISPLACES`)."""


@cache
def shipped(card: str) -> TimingTable:
    table = timings_of(facts_of(card))
    assert table is not None
    return table


@cache
def problems() -> dict[tuple[Any, ...], AttentionProblem]:
    """Return the problems of the usual grid by what their cells say of them."""
    return {facts(cell_of(asked.problem, {})): asked.problem for asked in default_grid("cuda")}


def facts(cell: Cell) -> tuple[Any, ...]:
    sizes = (cell.heads, cell.group_size, cell.len_q, cell.len_k, cell.head_dim, cell.visible)
    return (cell.problem_class, cell.num_sequences, *sizes)


def measured_problems(card: str) -> Iterator[tuple[Cell, AttentionProblem]]:
    """Yield the cells of a shipped table that belong to the grid, with their problems."""
    for cells in shipped(card).cells.values():
        for cell in cells:
            if facts(cell) in problems():
                yield cell, problems()[facts(cell)]


def without(table: TimingTable, left_out: Cell) -> TimingTable:
    cells = table.cells[left_out.problem_class]
    rest = tuple(cell for cell in cells if cell is not left_out)
    return replace(table, cells={left_out.problem_class: rest})


@pytest.mark.parametrize("card", CARDS)
def test_with_one_cell_left_out_its_neighbours_choose_as_well(card: str) -> None:
    taken = wrong = 0
    gains = []
    for cell, problem in measured_problems(card):
        for name in set(OWN_KERNELS) & set(cell.times):
            if cell.default not in cell.times:
                continue
            share = ratio(without(shipped(card), cell), problem, name, cell.default)
            if share is None or share >= DISPLACES:
                continue
            mine, other = cell.times[name], cell.times[cell.default]
            real = max(mine.device_ms / other.device_ms, mine.wall_ms / other.wall_ms)
            taken += 1
            wrong += real > 1.0 / DISPLACES
            gains.append(-math.log(real))
    assert taken > 100
    assert wrong <= MOST_WRONG * taken
    assert sum(gains) / taken > math.log(1.5)


@pytest.mark.parametrize("card", CARDS)
def test_a_problem_that_was_measured_is_expected_to_take_as_long(card: str) -> None:
    """Packed sequences once were expected to take four times as long, for the four of a cell."""
    by_class: dict[str, list[float]] = {}
    for cell, problem in measured_problems(card):
        for name, time in cell.times.items():
            expected = interpolated(shipped(card), problem, name)
            assert expected is not None
            found = by_class.setdefault(cell.problem_class, [])
            found.append(expected.device_ms / time.device_ms)
    assert len(by_class) > 15
    for name, shares in by_class.items():
        median = sorted(shares)[len(shares) // 2]
        assert DISPLACES < median < 1.0 / DISPLACES, name


SMALL = {"num_heads": 4, "len_q": 512, "len_k": 512, "head_dim": 64, "device_type": "cuda"}


@pytest.mark.parametrize(("batch", "is_taken"), [(1, False), (2, False), (4, True)])
def test_the_time_to_call_a_small_problem_does_not_speak_for_a_large_one(
    batch: int, is_taken: bool
) -> None:
    times = {
        "slow to call": Measured(device_ms=0.010, host_ms=0.024),
        "usual": Measured(device_ms=0.016, host_ms=0.012),
    }
    measured_on = make_problem(**SMALL)
    cell = cell_of(measured_on, times)
    table = TimingTable(source="table of a test", cells={cell.problem_class: (cell,)})
    problem = replace(measured_on, batch=batch)
    share = ratio(table, problem, "slow to call", "usual")
    assert share is not None
    # Four times the heads take twice the time at least: 20 of 24 microseconds, against 32.
    assert (share < DISPLACES) is is_taken


def test_a_packed_cell_says_how_many_sequences_it_had() -> None:
    packed = make_problem(**SMALL, num_sequences=4, packed_square=True, max_len_q=128, max_len_k=128)
    time = {"usual": Measured(device_ms=1.0, host_ms=1.0)}
    several, twice = (
        cell_of(problem, time) for problem in (packed, replace(packed, num_sequences=8))
    )
    assert several.num_sequences == 4 and "4 times 128 x 128" in several.label
    tables = [
        TimingTable(source="table of a test", cells={cell.problem_class: (cell,)})
        for cell in (several, twice)
    ]
    merged = tables[0].merged(tables[1])
    read = TimingTable.from_dict(merged.to_dict(), "read")
    assert [cell.num_sequences for cell in read.cells[several.problem_class]] == [4, 8]
