"""Simpler problems whose times speak for a mix that nobody measured.

A table has a class for each feature, and calls mix them: a window, sinks and a softcap in one
model. Each feature costs a fused kernel a few operations on scores that it holds, and those that
write scores out one more pass over memory, so that what is left of a ratio is nearly its own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial, reduce
from itertools import combinations
from typing import Final, NamedTuple

from adaattn.spec import Align, AttentionProblem, Aux, HeadTerm, MaskKind
from adaattn.spec.evidence import problem_class

__all__ = ["GROUPED", "MARGIN", "MARGIN_APART", "StandIn", "stand_ins"]

MARGIN: Final = 1.5
"""What a ratio of a stand-in is taken times. With the cells of one class of mixes left out at a
time, the tables of H200 and H100 then have `hopper` and `triton` displace `chunked` in 2100 cells
of squares, wrongly in 4, by 14 % at most; 2.0 in 1449, never wrongly."""

MARGIN_APART: Final = 2.0
"""The same where there are more keys than queries, or fewer: kernels that split keys are compared
with others. 2.0 displaces in 1749 cells, wrongly in 32, 1.5 in 2492, wrongly in 61."""

UNALIGNED: Final = 2.0
"""The same for a mask whose rows begin anywhere, by times of an aligned one: with a bias at D 64
`hopper` loses half of its lead there (H200, ``half bias unaligned``), and others next to none."""

GROUPED: Final = 2.0
"""The same for larger groups of heads than tables have, by times of smaller ones. Told from groups
of 1 what groups of 4 take, `hopper` and `triton` displace `chunked` rightly in all 207 cells."""

_MOST_GROUPED: Final = 8
"""Heads of a group that a table's groups of 4 speak for by themselves."""

_FEW_ROWS: Final = 16
"""Rows whose groups are tiles: other groups are other kernels there."""

_OF_ROWS: Final = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY


class StandIn(NamedTuple):
    """A simpler problem.

    Args:
        problem: whose times speak for another.
        factor: what its ratios are to be taken times.
        is_mix: a feature was left out: only some may come in by it.
        place: those with as many features left out have the same.
    """

    problem: AttentionProblem
    factor: float = 1.0
    is_mix: bool = False
    place: int = 0


@lru_cache(maxsize=4096)
def stand_ins(problem: AttentionProblem) -> tuple[StandIn, ...]:
    """Return the problem, then ever simpler ones.

    Precision, gradients, dropout, lists of blocks and masks are never left out: other kernels
    serve them, or these do something else. Groups of more than 8 heads stand as smaller ones, but
    of few rows. Causal order is left out beside a mask and at the end of longer keys; packed
    sequences take it on, which is how tables have them.

    Args:
        problem: simplified.

    Example:
        >>> from adaattn.spec.evidence import problem_class
        >>> problem = AttentionProblem(batch=1, num_heads=8, num_kv_heads=8, len_q=64, len_k=64,
        ...                            head_dim=64, value_dim=64, is_causal=True, has_sinks=True)
        >>> [(problem_class(known.problem), known.factor) for known in stand_ins(problem)]
        [('fp32 causal sinks', 1.0), ('fp32 causal', 1.5)]
    """
    found = [StandIn(problem)]
    if not problem.mask_is_aligned:
        found.append(StandIn(replace(problem, mask_is_aligned=True), UNALIGNED, place=1))
    smaller = _in_smaller_groups(found[-1].problem)
    if smaller.group_size < problem.group_size:
        found.append(StandIn(smaller, found[-1].factor * GROUPED, is_mix=True, place=2))
    last = found[-1]
    bare = _without_statistics(last.problem)
    if problem_class(bare) != problem_class(last.problem):
        found.append(last._replace(problem=bare, place=3))
    margin = MARGIN if problem.len_q == problem.len_k else MARGIN_APART
    known = {problem_class(bare)}
    steps = [step for step in _STEPS if problem_class(step(bare)) not in known]
    for count in range(1, len(steps) + 1):
        for chosen in combinations(steps, count):
            simpler = reduce(lambda left, step: step(left), chosen, bare)
            if problem_class(simpler) not in known:
                known.add(problem_class(simpler))
                found.append(StandIn(simpler, last.factor * margin, is_mix=True, place=3 + count))
    return tuple(found)


def _in_smaller_groups(problem: AttentionProblem) -> AttentionProblem:
    """As many query heads with more key heads: groups of 8, or what divides them next."""
    if problem.group_size <= _MOST_GROUPED or problem.len_q <= _FEW_ROWS:
        return problem
    sizes = range(1, _MOST_GROUPED + 1)
    size = max(size for size in sizes if problem.num_heads % size == 0)
    return replace(problem, num_kv_heads=problem.num_heads // size)


def _without_statistics(problem: AttentionProblem) -> AttentionProblem:
    """They cost fused kernels next to nothing, and need no margin."""
    return problem if problem.aux & ~_OF_ROWS else replace(problem, aux=Aux.NONE)


def _with_square_values(problem: AttentionProblem) -> AttentionProblem:
    """Values of half to twice the keys' size as wide as those: the table's own reach."""
    near = problem.head_dim <= 2 * problem.value_dim <= 4 * problem.head_dim
    return replace(problem, value_dim=problem.head_dim) if near else problem


def _from_the_top_left(problem: AttentionProblem) -> AttentionProblem:
    """Rows at the end of longer keys: with a window as at their beginning, else as full ones."""
    if problem.align is Align.TOP_LEFT or problem.len_q == problem.len_k or problem.num_sequences:
        return problem
    if problem.window != (-1, -1):
        return replace(problem, align=Align.TOP_LEFT)
    return replace(problem, align=Align.TOP_LEFT, is_causal=False)


def _as_usual_order(problem: AttentionProblem) -> AttentionProblem:
    """Packed sequences in causal order, masks without."""
    if problem.num_sequences:
        return replace(problem, is_causal=True)
    return problem if problem.mask is MaskKind.NONE else replace(problem, is_causal=False)


_STEPS: Final[tuple[Callable[[AttentionProblem], AttentionProblem], ...]] = (
    partial(replace, has_sinks=False),
    partial(replace, head_terms=HeadTerm(0)),
    _with_square_values,
    partial(replace, softcap=0.0),
    partial(replace, has_alibi=False),
    partial(replace, dilation=1),
    _from_the_top_left,
    partial(replace, window=(-1, -1)),
    _as_usual_order,
)
"""What may be left out, in this order, one or several."""
