"""How many query rows an executor that works in chunks takes at once."""

from typing import Final

from adaattn.spec import AttentionProblem, Scheme

__all__ = ["choose_chunk_rows"]

_DEFAULT_BYTES: Final = 256 << 20
"""Score workspace when the policy sets no limit; large enough to amortise launches."""

_SCORE_COPIES: Final = 3
"""Scores, weights and one temporary, in the precision of sums."""

_MAX_ROWS: Final = 1024
_MIN_ROWS: Final = 16
"""Fewer rows spend their time on launches; only a memory budget asks for less."""


def choose_chunk_rows(problem: AttentionProblem, memory_budget_bytes: int | None) -> int:
    """Return the rows of a chunk: the largest power of two whose scores fit the memory budget.

    Under a window a chunk of w rows reads window + w keys, so chunks near the window's
    width waste little and stay few.

    Args:
        problem: simplified.
        memory_budget_bytes: the policy's limit; None takes 256 MiB, exceeded only where 16 rows
            need more.
    """
    heads = problem.batch * problem.num_heads
    available, smallest = _DEFAULT_BYTES, _MIN_ROWS
    score_bytes = Scheme.of(problem.precision).accumulate.bits // 8
    if memory_budget_bytes is not None:
        # Whatever the chunk, each query row has its log-sum-exp.
        available = memory_budget_bytes - score_bytes * heads * problem.len_q
        smallest = 1
    row_bytes = _SCORE_COPIES * score_bytes * heads * max(problem.len_k, 1)
    rows = max(available // max(row_bytes, 1), 1)
    left = problem.window[0]
    if left >= 0:
        rows = min(rows, max(left, 128))
    rows = min(rows, _MAX_ROWS)
    power = 1 << (int(rows).bit_length() - 1)
    return max(power, smallest)
