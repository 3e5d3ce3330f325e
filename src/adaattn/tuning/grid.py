"""Which problems `adaattn.tune` measures when none are given: the lists of each class, crossed.

A problem comes the earlier, the nearer its values are to the heads of their lists, so that a run
cut short has measured the usual calls.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from adaattn.planning import simplify
from adaattn.spec import Align, AttentionProblem, MaskKind, Precision
from adaattn.tuning.lists import (
    BLOCK,
    CLASSES,
    COMPILED,
    DOCUMENTS,
    GRIDS,
    LISTED,
    MASKED,
    Grid,
    Values,
)

__all__ = ["Asked", "default_grid"]

_SHORTEST_LISTED: Final = 1024
"""Tokens below which a list of blocks has next to nothing to leave out."""

_ALIGNED_BYTES: Final = 16
"""What rows of a mask begin at multiples of, where TMA is to read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One problem to measure.

    Args:
        problem: what.
        compiles: executors that compile for each length take part; 5 to 10 s for each problem.
    """

    problem: AttentionProblem
    compiles: bool = True


def default_grid(device_type: str) -> tuple[Asked, ...]:
    """Return the problems to measure on a kind of device, the most informative first.

    Example:
        >>> grid = default_grid("cpu")
        >>> grid[0].problem.len_q, grid[0].problem.is_causal
        (512, True)
    """
    grid = GRIDS[device_type]
    found = [*_classes(grid), *_at_end(grid)]
    found.sort(key=lambda item: item[0])
    asked: dict[AttentionProblem, Asked] = {}
    for _, problem, compiles in found:
        plain = simplify(replace(problem, device_type=device_type))
        asked.setdefault(plain, Asked(problem=plain, compiles=compiles))
    return tuple(asked.values())


def _classes(grid: Grid) -> Iterator[tuple[float, AttentionProblem, bool]]:
    """Yield (how unusual, problem, whether to compile) class by class, and what each seldom has."""
    for name in CLASSES:
        if name in grid.omitted:
            continue
        masked = name in (*MASKED, *LISTED)
        lists: Iterable[tuple[float, Values]] = grid.masked if masked else grid.square
        if name.endswith("statistics"):
            lists = grid.statistics or ()
        elif name.startswith("unaligned"):
            lists = grid.unaligned or ()
        for place, values in lists:
            problem = _problem(name, values)
            too_long = name.endswith("bias") and problem.len_q > grid.longest_bias
            too_short = name in LISTED and problem.len_q < _SHORTEST_LISTED
            if not (too_long or too_short):
                compiles = name in COMPILED and _is_usual(values, grid)
                yield place + _class_place(name), problem, compiles
        if name in COMPILED:
            for place, values in _long(grid):
                yield place + _class_place(name), _problem(name, values), True
        for part in grid.seldom:
            for place, values in part.lists if name in part.names else ():
                problem = _problem(name, values)
                yield place + _class_place(name) + 1.0, problem, False
                if name in grid.trained:
                    training = replace(problem, requires_grad=True)
                    yield place + _class_place(name) + 1.5, training, False
        if name in grid.trained:
            for place, values in grid.masked if masked else grid.training:
                problem = replace(_problem(name, values), requires_grad=True)
                yield place + _class_place(name) + 0.5, problem, False
                half = problem.precision is Precision.BF16
                if name in grid.deterministic and half and problem.head_dim <= 256:
                    again = replace(problem, deterministic=True)
                    yield place + _class_place(name) + 1.0, again, False


def _at_end(grid: Grid) -> Iterator[tuple[float, AttentionProblem, bool]]:
    """Yield the same for a query, or some, at the last keys."""
    for part in grid.at_end:
        for name in part.names:
            for place, values in part.lists:
                problem = replace(_problem(name, values), align=Align.BOTTOM_RIGHT)
                if problem.len_q < problem.len_k:
                    yield place + _class_place(name), problem, False


def _long(grid: Grid) -> Iterator[tuple[float, Values]]:
    """Yield the usual problems of lengths at which those that compile are alone worth a look."""
    lists = grid.square
    rest = tuple(length for length in grid.compiled_lengths if length not in lists.lengths)
    usual = replace(
        lists,
        precisions=lists.precisions[:1],
        head_dims=lists.head_dims[:1],
        sizes=lists.sizes[:1],
        groups=lists.groups[:1],
        lengths=rest,
    )
    for place, values in usual:
        yield place + len(lists.lengths), values


def _is_usual(values: Values, grid: Grid) -> bool:
    """Return whether executors that compile take part: lists begin with the usual values."""
    *first, _, length = values
    lists = grid.square
    usual = (lists.precisions, lists.head_dims, lists.sizes, lists.groups)
    return first == [values[0] for values in usual] and length in grid.compiled_lengths


def _class_place(name: str) -> float:
    """Return how unusual a class is: the last counts as much as two steps elsewhere."""
    return 2.0 * list(CLASSES).index(name) / len(CLASSES)


def _problem(name: str, values: Values) -> AttentionProblem:
    """Return the problem of a class and its sizes."""
    precision, dims, size, group, rows, length = values
    fields = dict(CLASSES[name])
    head_dim, value_dim = (dims, dims) if isinstance(dims, int) else dims
    if "window" in fields:
        left = max(length // fields["window"] - 1, 0)
        fields["window"] = (left, -1 if fields.get("is_causal") else left)
    if "listed" in fields:
        most = max(length // (BLOCK * fields.pop("listed")), 1)
        fields |= {"block_size": (BLOCK, BLOCK), "most_blocks": most}
    if "mask" in fields:
        shapes = {
            "keys": (size[0], 1, 1, length),
            "mask": (1, 1, rows, length),
            "bias": (1, size[1], rows, length),
        }
        fields["mask_shape"] = shapes[name.split()[-1]]
        number = 1 if fields["mask"] is MaskKind.BOOLEAN else precision.bits // 8
        has_rows = fields["mask_shape"][-2] > 1
        fields["mask_is_aligned"] = not (has_rows and length * number % _ALIGNED_BYTES)
    if "num_sequences" in fields:
        longest = length // DOCUMENTS
        size = (1, size[0] * size[1])
        fields |= {"max_len_q": longest, "max_len_k": longest}
    return AttentionProblem(
        batch=size[0],
        num_heads=size[1],
        num_kv_heads=size[1] // group,
        len_q=rows,
        len_k=length,
        head_dim=head_dim,
        value_dim=value_dim,
        precision=precision,
        scale=head_dim**-0.5,
        **fields,
    )
