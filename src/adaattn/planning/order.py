"""Which exact candidate comes first by itself, before any measured time has a say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from adaattn.planning.candidates import Candidate
from adaattn.spec import AttentionProblem, Why

__all__ = ["behind", "default_of", "first_in_order", "incumbent_of"]

_BY_TIMES: Final = 70
"""What stands behind this place is for problems in which it was measured to be faster."""


def default_of(problem: AttentionProblem) -> str:
    """Return the kernel that ``F.scaled_dot_product_attention`` would run; "" where it runs none.

    FlashAttention-2 takes windows, sinks and packed sequences, and that function none of them.
    """
    beyond = problem.has_sinks or problem.window != (-1, -1) or problem.num_sequences
    return "" if beyond else problem.sdpa_default


def incumbent_of(usable: Sequence[Candidate], problem: AttentionProblem) -> Candidate:
    """Return what PyTorch would run, else what its user would write.

    Grouped heads that PyTorch would serve by math are written by folding them into rows or by
    repeating k and v, which fused kernels take.
    """

    def order(item: Candidate) -> int:
        return item.capability.order(problem)

    name = default_of(problem)
    default = next((it for it in usable if it.group.capability == name), None)
    if default is None:
        return min(usable, key=order)
    if problem.group_size == 1 or not default.capability.materialises_scores:
        return default
    fused = [it for it in usable if it.capability.is_fused and not it.capability.compiles]
    return min((default, *fused), key=order)


def first_in_order(
    candidates: Sequence[Candidate], problem: AttentionProblem
) -> tuple[Candidate, ...]:
    """Return the exact candidate that stands first, fused ones before the others; () for none.

    No time has a say, and no size of a batch: an executor that declares `Feature.BATCH_INVARIANT`
    has its place, too, from the sizes of one sequence; one that is for measured times alone stands
    among the last. Where the first has too little memory nothing stands in for it: the same
    sequence in a smaller batch would have been computed by it.
    """
    able = [it for it in candidates if it.is_exact and (not it.refusal or it.why is Why.MEMORY)]

    def order(item: Candidate) -> tuple[bool, int]:
        place = item.capability.order(problem)
        return not item.capability.is_fused or place > _BY_TIMES, place

    first = min(able, key=order, default=None)
    return () if first is None or first.refusal else (first,)


def behind(candidates: Sequence[Candidate], first: Candidate) -> list[Candidate]:
    """Return the candidates, those refused that stand behind the first of a fixed order."""
    why = f"it stands behind {first.name} in the fixed order that batch_invariant takes"
    return [
        it if it.refusal or it is first else replace(it, refusal=why, why=Why.POLICY)
        for it in candidates
    ]
