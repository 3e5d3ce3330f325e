"""The same problem in its plainest words, so that each backend need know fewer cases."""

from dataclasses import replace
from typing import Final

from adaattn.spec import Align, AttentionProblem, HeadTerm

__all__ = ["simplify"]

_ANY_REACH: Final = 2**30
"""More than any sequence has tokens. Kernels add the edge of a window to a position, in int32."""


def simplify(problem: AttentionProblem) -> AttentionProblem:
    """Return a problem that attends to exactly the same keys, with fewer features in use.

    A window that no pair reaches is dropped, a right edge of 0 becomes causality, and
    alignment is reset where both corners are the same one. Causality hides nothing from a
    single bottom-right row, nor does it of a single key.

    Args:
        problem: any problem; packed lengths are judged by their maxima, or not at all where one
            sequence may not matter to another.
    """
    len_q, len_k = problem.longest
    left, right = problem.window
    is_causal = problem.is_causal or right == 0
    if problem.batch_invariant and problem.num_sequences:
        right = -1 if is_causal else right
        left, right = (-1 if edge >= _ANY_REACH else edge for edge in (left, right))
        return replace(problem, is_causal=is_causal, window=(left, right))
    dilation = problem.dilation
    align = problem.align
    if problem.packed_square if problem.num_sequences else len_q == len_k:
        align = Align.TOP_LEFT
    at_last_key = len_q == 1 if align is Align.BOTTOM_RIGHT else len_k == 1
    if is_causal and at_last_key and problem.num_sequences == 0:
        is_causal, right = False, -1
    if is_causal:
        right = -1
    reach = max(len_q, len_k)
    if left >= reach:
        left = -1
    if right >= reach:
        right = -1
    if reach <= 1:
        dilation = 1
    windowed = (left, right) != (-1, -1) or problem.by_head(HeadTerm.WINDOW)
    positional = is_causal or windowed or dilation > 1 or problem.has_alibi
    if not positional:
        align = Align.TOP_LEFT
    changed = (is_causal, (left, right), dilation, align)
    if changed == (problem.is_causal, problem.window, problem.dilation, problem.align):
        return problem
    return replace(
        problem, is_causal=is_causal, window=(left, right), dilation=dilation, align=align
    )
