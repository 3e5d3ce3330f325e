"""What measured times say of a problem: interpolated in logarithms, hardly ever beyond the table.

Executors are compared by the ratio of their times in the same cells, never by lone times: what
a cell gets wrong, such as a warmer card, it gets wrong for all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Final

from adaattn.planning.stand_ins import stand_ins
from adaattn.spec import AttentionProblem, Cell, Measured, TimingTable
from adaattn.spec.evidence import problem_class

__all__ = ["DISPLACES", "DISPLACES_ON_A_CPU", "fastest", "interpolated", "ratio"]

DISPLACES: Final = 0.95
"""An executor takes the incumbent's place below this share of its time."""

DISPLACES_ON_A_CPU: Final = 0.85
"""The same on a CPU, where runs differ by more, and lengths too: causal, fp32, 8 heads of D 64,
`chunked` takes 0.90 of the time of PyTorch's kernel over 512 tokens, the middle of several runs,
and 1.20 over 616, whose rows fill no tiles of products (two cores with AVX-512)."""

_SURE: Final = 0.75
"""Below this share of the incumbent's time one of two challengers may lose to the other by one time
and win by the other. Of 2549 cells on H200 and H100 that time several, one left out at a time, the
device then takes 1.033 and 1.032 of the fastest one's time, for 1.042 and 1.038 without, at most
3.7 times for 13.3. What a caller waits shrinks too, and as many lose to the incumbent."""

_REACH: Final = 1.0
"""Octaves to the nearest cell in each size: twice or half of what was measured, not more."""

_MORE_HEADS: Final = 0.5
"""What heads count of that where the fewer fill the card, which takes them in turn: 16 times as
many are in reach. Of pairs of cells on H200 and H100 that differ in heads alone, the one with more
takes a place wrongly for the other in 34 of 3372 choices where the fewer fill it, in 173 of 2761
where they do not."""

_FEWER_HEADS: Final = 2.0
"""What heads count of that on a CPU where a problem has fewer than the cell: what is done between
products takes as long for 2 as for 8. Of 616 tokens `chunked` takes 1.52 of the time of PyTorch's
kernel for 2 heads."""

_FEW_ROWS, _ONE_BLOCK = 16, 128
"""Rows of which, over more keys than the second, a kernel that splits no keys takes as long for 4
heads as for 32. Told by cells of the H200 with at least four times as many heads, `grouped` took
the place of math in 163 cells, in 114 of them wrongly, and ``sdpa.efficient`` in 70 and 4; with
this in 45 and 30, never wrongly. Leaving out one cell at a time both take as many as without."""

_FULL: Final = 128
"""Tiles of 128 rows that fill one: an H100 has 132 processors."""

_BETWEEN: Final = 2.0
"""Octaves within which other cells count beside the nearest one: the steps of the grids."""

_CELLS: Final = 4

_WIDE: Final = 256
"""Above this D other kernels serve: what one side's cells leave out, the other's may have."""

_KEYS: Final = 3
_COLUMNS: Final = 4
"""Where Sk and D stand in a place."""

_WINDOWED: Final = {"window", "to_end"}
_NOT_CUT: Final = {"dilation", "mask", "bias", "packed"}
"""Classes with the first words and none of the second: rows at the end read the keys in their
window alone, so that cells are in reach however many keys are before. Leaving out all cells of as
many keys as one of 1224, the H200's table takes a place in 670 for it, never wrongly; were all keys
to count, in none."""

_HOST_SHARE: Final = 0.5
"""How much of what the host takes longer in training the device has to save. In a model a host that
is busy hides nothing of it: 14 layers of 12 heads over 8 times 2048 tokens, where the device takes
0.065 ms less for a layer and the host 0.15 more, took 45.6 ms a step for 43.6, and 41.9 for 41.7 by
the same kernel (H200, whose host runs Python slowly, `training_decoder_host_h200.json`)."""

_Place = tuple[float, ...]
"""Logarithms of sizes."""

_OF_COLUMNS: Final = 1.0
"""How much more an octave of D counts than one of a length: tiles change with it. With 0, 1, 2, 3
the tables of H200 and H100, one cell left out at a time, take 496, 492, 499, 495 places from
PyTorch's kernel, 21, 12, 11, 10 of them wrongly."""

_GROWTH: Final = 0.5
"""Power of the work by which device times surely grow: a card that is half empty takes more at no
cost. With less work they may shrink by all of it. Leaving out one cell at a time of the tables of
H200 and H100, powers of 0, 0.5 and 1 take the place of PyTorch's kernel in 460, 492 and 526 cells,
wrongly in 12, 12 and 16; 0.5, were times not to shrink, in 516, wrongly in 22."""


def ratio(
    table: TimingTable,
    problem: AttentionProblem,
    name: str,
    incumbent: str,
    *,
    by_stand_in: bool = False,
    splits_keys: bool = True,
    margin: float = DISPLACES,
) -> float | None:
    """Return the time of one executor over that of another; None where nobody measured it.

    The larger of the ratios of device time and of what a caller waits, so that neither loses, and
    in training of the device's time and a share of the host's, which need not beat the margin;
    and the larger of the nearest cell's and the mean of those around. What a caller of a larger
    problem waits is the host's time no longer: the device's grows, at least by a root of the work,
    and shrinks with less of it.
    Cells of packed sequences have equal ones. A problem's are known by their mean and a bound:
    the larger of the ratios at both, or that at the one which the table reaches.

    Args:
        table: of the problem's device.
        problem: simplified.
        name: of the challenger.
        incumbent: of the executor that it would displace.
        by_stand_in: simpler problems' times count where its own has none: the challenger is one
            kernel for all mixes, and nothing says that it was left out of this one. Those with
            the fewest features left out count, and of them the one that says most for it.
        splits_keys: of the challenger. One that does not takes as long for fewer heads of few rows.
        margin: below which the ratio has to be for it to be taken; 1 between two challengers.
    """
    is_known = problem_class(problem) in table.cells
    for place, alike in groupby(stand_ins(problem), key=attrgetter("place")):
        shares = []
        for known in alike:
            if place and not by_stand_in and (is_known or known.is_mix):
                return None
            evened = _evened(known.problem)
            found = [_log_ratio(table, it, name, incumbent, splits_keys, margin) for it in evened]
            told = [log for log in found if log is not None]
            if told:
                shares.append(known.factor * math.exp(max(told)))
            elif not place and any(_near(table, even, (incumbent,)) for even in evened):
                return None
        if shares:
            return min(shares)
    return None


def _log_ratio(
    table: TimingTable,
    problem: AttentionProblem,
    name: str,
    incumbent: str,
    splits_keys: bool,
    margin: float,
) -> float | None:
    """Return the logarithm of the ratio in the cells around a problem; None without any."""
    logs: list[tuple[float, float]] = []
    work, heads = _work(problem), problem.batch * problem.num_heads
    shrinks = splits_keys or problem.len_q > _FEW_ROWS or problem.len_k <= _ONE_BLOCK
    for distance, cell in _near(table, problem, (name, incumbent)):
        mine, other = cell.times[name], cell.times[incumbent]
        more = work / _cell_work(cell)
        grown = min(more, more**_GROWTH)
        waited = [max(grown * time.device_ms, time.host_ms) for time in (mine, other)]
        fewer = 1.0 if shrinks or logs else min(heads / cell.heads, 1.0)  # of the nearest
        worse = max(mine.device_ms / (fewer * other.device_ms), waited[0] / waited[1])
        if problem.requires_grad:
            both = [grown * time.device_ms + _HOST_SHARE * time.host_ms for time in (mine, other)]
            worse = max(worse, margin * both[0] / both[1])
        logs.append((distance, math.log(worse)))
    return max(logs[0][1], _mean(logs)) if logs else None


def _evened(problem: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """Return the problem with packed sequences as long as they may be, and as they are on average.

    A caller's bound may be that of all tokens, and many short ones run as short ones.
    """
    count = problem.num_sequences
    if not count:
        return (problem,)
    mean_q = min(-(-problem.len_q // count), problem.max_len_q)
    mean_k = min(-(-problem.len_k // count), problem.max_len_k)
    return problem, replace(problem, max_len_q=mean_q, max_len_k=mean_k)


def fastest(table: TimingTable, problem: AttentionProblem, shares: Mapping[str, float]) -> str:
    """Return the executor that takes the least, each pair compared in cells that measured both.

    Of two that each lose by one of the two times, device and host, the one that loses less, if the
    incumbent is no rival of it. Where no cell of its class measured both, what the cells of each
    say decides, and the shares where those are not of one class.

    Args:
        table: of the problem's device.
        problem: simplified.
        shares: of the incumbent's time, by executor, which may come from different cells.
    """
    best, *others = sorted(shares, key=shares.__getitem__)
    for name in others:
        direct = ratio(table, problem, name, best, margin=1.0)
        direct = direct or _ratio_apart(table, problem, name, best)
        if direct is None:
            continue
        is_sure = shares[name] < _SURE
        reverse = ratio(table, problem, best, name, margin=1.0) if is_sure else None
        if direct < (reverse or 1.0):
            best = name
    return best


def _ratio_apart(
    table: TimingTable, problem: AttentionProblem, name: str, other: str
) -> float | None:
    """Return `ratio` by cells that measured one of the two; None where they are of two classes."""
    mine, theirs = (interpolated(table, problem, each) for each in (name, other))
    if mine is None or theirs is None or mine[1] != theirs[1]:
        return None
    return max(mine[0].device_ms / theirs[0].device_ms, mine[0].wall_ms / theirs[0].wall_ms)


def interpolated(
    table: TimingTable, problem: AttentionProblem, name: str
) -> tuple[Measured, str, str] | None:
    """Return what an executor should take by cells around a problem, their class and source."""
    for known in stand_ins(problem):
        for even in reversed(_evened(known.problem)):  # a bound may be that of all tokens
            near = _near(table, even, (name,))
            if near:
                source = near[0][1].source or table.source
                return _time_of(even, name, near), problem_class(known.problem), source
    return None


def _time_of(problem: AttentionProblem, name: str, near: Sequence[tuple[float, Cell]]) -> Measured:
    """Return the mean of cells' times, grown by the work; that of its own cell if there is one."""
    if near[0][0] == 0.0:
        near = near[:1]
    work = math.log(_work(problem))
    device, host = [], []
    for distance, cell in near:
        time = cell.times[name]
        grown = work - math.log(_cell_work(cell))
        device.append((distance, math.log(time.device_ms) + grown))
        host.append((distance, math.log(time.host_ms)))
    return Measured(
        device_ms=math.exp(_mean(device)),
        host_ms=math.exp(_mean(host)),
        compile_ms=max(cell.times[name].compile_ms for _, cell in near),
        settled=all(cell.times[name].settled for _, cell in near),
    )


def _near(
    table: TimingTable, problem: AttentionProblem, names: Sequence[str]
) -> list[tuple[float, Cell]]:
    """Return the nearest cells that measured all of some executors, with their distances.

    Of two of the same place the first alone: the other is of a card of the same chip.
    """
    found = []
    known = set()
    for distance, reach, cell, place in _around(table, problem):
        if place not in known and all(name in cell.times for name in names):
            known.add(place)
            found.append((distance, reach, cell))
    if not found or min(reach for _, reach, _ in found) > _REACH:
        return []
    return [(distance, cell) for distance, _, cell in found[:_CELLS]]


@lru_cache(maxsize=256)
def _around(
    table: TimingTable, problem: AttentionProblem
) -> tuple[tuple[float, float, Cell, object], ...]:
    """Return distance, octaves in the farthest size, cell and place of those around, near first."""
    sizes = (problem.batch * problem.num_heads, problem.group_size, *problem.longest)
    visible = problem.visible_pairs / max(problem.len_q, 1)
    places = _places(problem_class(problem), sizes, problem.head_dim, visible)
    found = []
    for cell, points in _points(table, problem_class(problem)):
        pairs = tuple(zip(places, points, strict=True))
        if min(abs(a[_KEYS] - b[_KEYS]) for a, b in pairs) > _BETWEEN:  # most cells
            continue
        if (cell.head_dim > _WIDE) is not (problem.head_dim > _WIDE):
            continue
        steps = [[abs(a - b) for a, b in zip(*pair, strict=True)] for pair in pairs]
        fewer = min((sizes[0], problem.longest[0]), (cell.heads, cell.len_q))
        heads = steps[0][0]
        if _is_full(*fewer):
            heads *= _MORE_HEADS
        elif problem.device_type == "cpu" and sizes[0] < cell.heads:
            heads *= _FEWER_HEADS
        reach = max(heads, min(max(step[1:]) for step in steps))
        if reach <= _BETWEEN:
            distance = min(map(sum, steps)) + _OF_COLUMNS * steps[0][_COLUMNS]
            entry = distance, reach, cell, (points[0], cell.num_sequences)
            found.append((distance, sum(steps[0]), entry))
    found.sort(key=lambda item: item[:2])
    return tuple(entry for *_, entry in found)


@lru_cache(maxsize=256)
def _points(table: TimingTable, name: str) -> tuple[tuple[Cell, tuple[_Place, ...]], ...]:
    """Return the cells of a class with their places."""
    found = []
    for cell in table.cells.get(name, ()):
        sizes = (cell.heads, cell.group_size, cell.len_q, cell.len_k)
        found.append((cell, _places(name, sizes, cell.head_dim, cell.visible)))
    return tuple(found)


def _places(
    name: str, sizes: tuple[int, int, int, int], head_dim: int, visible: float
) -> tuple[_Place, ...]:
    """Return where a problem of a class lies, and where with the keys alone that it reads.

    Args:
        name: of the class; the second place is left out where all keys are read.
        sizes: B * Hq, query heads for a key head, Sq and Sk.
        head_dim: D.
        visible: mean keys that a row sees: the last rows see them one after another.
    """
    *others, rows, keys = sizes
    words = set(name.split())
    is_cut = words >= _WINDOWED and not words & _NOT_CUT
    read = (keys, min(keys, visible + rows - 1)) if is_cut else (keys,)
    return tuple(_logs((*others, rows, count), head_dim, visible) for count in read)


def _logs(sizes: tuple[float, ...], head_dim: int, visible: float) -> _Place:
    """Return the coordinates of sizes; heads count half, since they only add up."""
    heads, group, len_q, len_k = (math.log2(max(size, 1)) for size in sizes)
    share = math.log2(max(visible, 1.0) / max(sizes[3], 1))
    return (0.5 * heads, group, len_q, len_k, math.log2(max(head_dim, 1)), share)


def _is_full(heads: int, len_q: int) -> bool:
    """Return whether so many heads and rows fill a card."""
    return heads * -(-len_q // 128) >= _FULL


def _work(problem: AttentionProblem) -> float:
    """Return what a time grows with."""
    heads = problem.batch * problem.num_heads
    return max(heads * problem.visible_pairs * problem.head_dim, 1.0)


def _cell_work(cell: Cell) -> float:
    """Return the same of a cell."""
    rows = cell.heads * cell.len_q * max(cell.num_sequences, 1)
    return max(rows * cell.visible * cell.head_dim, 1.0)


def _mean(values: Sequence[tuple[float, float]]) -> float:
    """Return the mean of values, the near ones counting more."""
    weights = [1.0 / (0.1 + distance) for distance, _ in values]
    total = sum(weight * value for weight, (_, value) in zip(weights, values, strict=True))
    return total / sum(weights)
