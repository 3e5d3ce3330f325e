"""Measured times of executors on one kind of device: what a choice may rest on.

A table holds cells. Each cell is one problem, on which several executors were timed in turns, in
the same run: their ratio means something where lone times do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

from adaattn.errors import TableError
from adaattn.spec.enums import Align, Aux, MaskKind, Precision
from adaattn.spec.facts import AttentionProblem

__all__ = ["Cell", "Measured", "TimingTable", "problem_class"]

_INFINITY: Final = float("inf")

_SIZES: Final = (
    *("heads", "group_size", "len_q", "len_k", "head_dim", "visible", "num_sequences"),
)
"""Of a cell, in the order of a table; the last one stands only where it is not 0."""
_sizes_of = attrgetter(*_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one executor took.

    Args:
        device_ms: median time on the device, the host hidden; on a CPU the whole call, the
            fastest of many, since what else runs there only adds to it.
        host_ms: median time until the call returns; equal to ``device_ms`` on a CPU.
        compile_ms: time of the first call above a later one, where the executor compiles.
        settled: the rounds agreed; a time that did not settle counts all the same, and says so.
    """

    device_ms: float
    host_ms: float
    compile_ms: float = 0.0
    settled: bool = True

    @property
    def wall_ms(self) -> float:
        """What a caller waits in the long run: the slower of host and device."""
        return max(self.device_ms, self.host_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One problem and the executors measured on it.

    Args:
        problem_class: `problem_class` of the problem: what may not be interpolated.
        heads: B * Hq.
        group_size: query heads for each key head.
        len_q: Sq; the longest sequence when packed.
        len_k: Sk; likewise.
        head_dim: D.
        visible: mean keys that a row sees.
        num_sequences: that are packed; 0 where none are.
        times: by executor.
        default: the executor that ``F.scaled_dot_product_attention`` would run; "" where it
            cannot express the problem.
        source: of the table that it was read from; "" is its table's own.
    """

    problem_class: str
    heads: int
    group_size: int
    len_q: int
    len_k: int
    head_dim: int
    visible: float
    times: Mapping[str, Measured]
    default: str = ""
    num_sequences: int = 0
    source: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """The problem in words, for tables."""
        group = f" in groups of {self.group_size}" if self.group_size > 1 else ""
        seen = "" if self.visible >= self.len_k else f" ({self.visible:.0f} seen)"
        several = f"{self.num_sequences} times " if self.num_sequences > 1 else ""
        lengths = f"{several}{self.len_q} x {self.len_k}{seen}"
        return f"{self.problem_class}: {self.heads} heads{group}, {lengths}, D {self.head_dim}"

    @property
    def fastest(self) -> str:
        """The executor that a caller waits for the least; "" where none was measured."""
        return min(self.times, key=lambda name: self.times[name].wall_ms, default="")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimingTable:
    """The cells of one kind of device; compared by identity.

    Args:
        source: where the times are from, as traces say it: ``"measured here"`` or
            ``"table of NVIDIA H200"``.
        device: the vendor's name of the device.
        versions: of torch, CUDA, the driver and so on.
        date: when it was measured.
        commit: of the code that measured it.
        cells: by class.
    """

    source: str
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    commit: str = ""
    cells: Mapping[str, tuple[Cell, ...]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON values; a cell is a list, which loads twice as fast."""
        return {
            "device": self.device,
            "versions": dict(self.versions),
            "date": self.date,
            "commit": self.commit,
            "cells": {name: [_row(cell) for cell in cells] for name, cells in self.cells.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str) -> "TimingTable":
        """Return the table that ``to_dict`` wrote.

        Args:
            data: JSON values; other keys are left to the caller.
            source: as traces are to name it.

        Raises:
            TableError: a key is missing, a value of another kind, or a size or time is no
                positive number.
        """
        try:
            return cls(
                source=source,
                device=str(data["device"]),
                versions=dict(data["versions"]),
                date=str(data["date"]),
                commit=str(data["commit"]),
                cells={
                    name: tuple(_cell(name, row, source) for row in rows)
                    for name, rows in data["cells"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TableError.got("timing table", "what adaattn.tune wrote", repr(error)) from error

    def merged(self, newer: "TimingTable") -> "TimingTable":
        """Return this table with the cells of a newer one, which replace its own."""
        names = dict.fromkeys((*self.cells, *newer.cells))
        cells = {
            name: _merged(self.cells.get(name, ()), newer.cells.get(name, ())) for name in names
        }
        return replace(newer, cells=cells)

    def completed(self, other: "TimingTable") -> "TimingTable":
        """Return this table with the cells of another that timed an executor which its own lack."""
        names = dict.fromkeys((*self.cells, *other.cells))
        cells = {}
        for name in names:
            own = self.cells.get(name, ())
            timed = {_place(cell): cell.times.keys() for cell in own}
            more = other.cells.get(name, ())
            cells[name] = own + tuple(
                it for it in more if it.times.keys() - timed.get(_place(it), ())
            )
        return replace(self, source=f"{self.source} and {other.source}", cells=cells)


def _row(cell: Cell) -> list[Any]:
    """Return a cell as JSON values."""
    times = {
        name: [time.device_ms, time.host_ms, time.compile_ms, time.settled]
        for name, time in cell.times.items()
    }
    return [*_place(cell), cell.default, times]


def _cell(name: str, row: Sequence[Any], source: str) -> Cell:
    """Return the cell that `_row` wrote.

    Raises:
        TypeError, ValueError: it is none.
    """
    *place, default, times = row
    sizes = dict(zip(_SIZES[: len(place)], place, strict=True))
    numbers = [*place]
    found = {}
    for executor, (device_ms, host_ms, compile_ms, settled) in times.items():
        numbers += (device_ms, host_ms, compile_ms + 1.0)
        found[executor] = Measured(
            device_ms=device_ms, host_ms=host_ms, compile_ms=compile_ms, settled=bool(settled)
        )
    if not (min(numbers) > 0 and sum(numbers) < _INFINITY):  # a NaN makes the sum one
        raise ValueError(f"expected positive numbers, got {row}")
    return Cell(problem_class=name, times=found, default=str(default), source=source, **sizes)


def _merged(old: tuple[Cell, ...], new: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """Return the cells of both, the new ones in the place of old ones of the same problem."""
    by_place = {_place(cell): cell for cell in old}
    by_place.update((_place(cell), cell) for cell in new)
    return tuple(by_place.values())


def _place(cell: Cell) -> tuple[object, ...]:
    """Return what says which problem a cell measured."""
    sizes: tuple[object, ...] = _sizes_of(cell)
    return sizes if cell.num_sequences else sizes[:-1]


def problem_class(problem: AttentionProblem) -> str:
    """Return the part of a problem that times of another one say nothing of.

    Its dtype (the two of 16 bits are one), the features in use, what is to be differentiated
    and what is wanted beside the output, such as ``"half causal window"``. Row maximum and entropy
    cost the same, with the log-sum-exp or without; with a list of blocks, causal order is a mask of
    a few of them.

    Example:
        >>> problem = AttentionProblem(batch=1, num_heads=8, num_kv_heads=2, len_q=64, len_k=64,
        ...                            head_dim=64, value_dim=64, is_causal=True)
        >>> problem_class(problem)
        'fp32 causal'
    """
    half = problem.precision in (Precision.BF16, Precision.FP16)
    words = ["half" if half else problem.precision.label]
    square = problem.len_q == problem.len_k
    corner = not square and problem.is_positional and problem.align is Align.BOTTOM_RIGHT
    for used, word in (
        (problem.num_sequences > 0, "packed"),
        (problem.is_causal and not problem.has_blocks, "causal"),
        (problem.window != (-1, -1), "window"),
        (problem.head_terms.value > 0, f"by_head{problem.head_terms.value}"),
        (problem.dilation > 1, "dilation"),
        (corner, "to_end"),
        (problem.softcap > 0, "softcap"),
        (problem.has_sinks, "sinks"),
        (problem.has_alibi, "alibi"),
        (problem.mask is MaskKind.BOOLEAN, "mask"),
        (problem.mask is MaskKind.ADDITIVE, "bias"),
        (problem.mask is not MaskKind.NONE and problem.mask_shape[-2:-1] == (1,), "of_keys"),
        (not problem.mask_is_aligned, "unaligned"),
        (problem.mask_requires_grad, "bias_gradient"),
        (problem.has_blocks, f"blocks{problem.block_size[0]}x{problem.block_size[1]}"),
        (problem.dropout_p > 0, "dropout"),
        (problem.value_dim != problem.head_dim, "value_dim"),
        (problem.aux == Aux.LSE, "lse"),
        (bool(problem.aux & (Aux.ROW_MAX | Aux.ENTROPY)), "statistics"),
        (bool(problem.aux & Aux.WEIGHTS), "weights"),
        (bool(problem.aux & Aux.DROPPED_MASS), "dropped_mass"),
        (problem.requires_grad, "training"),
        (problem.deterministic and problem.requires_grad, "deterministic"),
    ):
        if used:
            words.append(word)
    return " ".join(words)
