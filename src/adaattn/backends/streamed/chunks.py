"""How scores are cut into chunks: rows, planes and keys, from sizes and a memory budget alone.

A plane is the rows of all heads that share a key head, beside its keys. A chunk takes some planes,
of each head the same rows, and the keys that these can see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from adaattn.backends.common import key_range
from adaattn.backends.streamed.fused_rules import is_fused, writes_no_scores
from adaattn.spec import AttentionProblem, HardwareFacts, HeadGroup, Overhead

__all__ = [
    "PITCH",
    "Chunk",
    "choose_chunk_rows",
    "chunks_of",
    "is_even",
    "overhead",
    "padded",
    "pitch_of",
    "row_bytes",
]

_KEY_STEP: Final = 16
"""Chunks begin at multiples of so many keys, which loads in vectors take."""

PITCH: Final = 8
"""Rows of a chunk begin at multiples of so many scores, and products sum so many at once: cuBLAS
takes five to eleven times as long for 3067 keys as for 3072 (H200, torch 2.11)."""

_FILLING: Final = 2 * 132 * 128 * 256
"""Numbers that a matrix product writes to keep a card busy: two tiles for each of 132
multiprocessors (H100, H200)."""

_L2_BYTES: Final = 32 << 20
"""Of an L2 cache of 50 (H100) or 60 MB (H200) what scores may take, beside keys and values."""

_FUSED_LINES: Final = 2 * 128 * 128
"""Lines of a chunk whose scores are not written: two tiles for nearly all processors."""

_LEAST_FUSED_LINES: Final = 128 * 128
"""The same where rows see few keys."""

_MOST_BYTES: Final = 4 << 30
"""Of a chunk's scores where the policy sets no limit."""

_HIDDEN_SHARE: Final = 0.25
"""Rows of a chunk over the keys that a row sees, where fewer launches do not pay for more rows:
half of that share of the work is on hidden keys."""

_HOST_PRODUCTS: Final = 3e10
"""Multiplications and additions that a card does while its host launches a chunk: 75 to 100 us."""

_SCORE_PRODUCTS: Final = 1000
"""How many take as long as passing a score through memory, 12 bytes."""

_PARTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Chunks into which the rows of a plane may be cut, where they see few keys."""

_EVEN: Final = 64
"""Rows of a chunk are multiples of it where there are as many."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of the scores.

    Args:
        planes: of all batch entries and key heads.
        rows: of each head.
        keys: that these rows can see.
    """

    planes: range
    rows: range
    keys: range


def choose_chunk_rows(problem: AttentionProblem, memory_budget_bytes: int | None) -> int:
    """Return the rows of a chunk: as many as keep a card busy, or all of them in training.

    There each further chunk adds to the gradients of keys and values in memory. Fewer where scores
    then stay in the L2 cache, where rows see few keys, and where the budget says so.

    Args:
        problem: simplified.
        memory_budget_bytes: the policy's limit; None takes 4 GiB.
    """
    _, rows = _size(problem)
    if memory_budget_bytes is None:
        return rows
    left = memory_budget_bytes - 4 * problem.batch * problem.num_heads * problem.len_q
    left -= int(_kept_bytes(problem, rows))
    fitting = left // row_bytes(problem)
    if fitting < rows:
        left += int(_kept_bytes(problem, rows) - _kept_bytes(problem, 1))
        fitting = left // row_bytes(problem)
    return max(min(rows, fitting), 1)


def row_bytes(problem: AttentionProblem) -> int:
    """Return the bytes that a row of a chunk allocates, of all heads that it takes."""
    planes, _ = _size(problem)
    return planes * problem.group_size * _line_bytes(problem)


def overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return the traffic of scores, and what a backward pass keeps beside a chunk."""
    del hardware, density
    pairs = problem.batch * problem.num_heads * problem.visible_pairs
    passes = 2.0 * _pair_bytes(problem)  # each written and read
    if problem.wants_gradients:
        passes += 4.0 if writes_no_scores(problem) else 12.0  # those of the forward pass
    return Overhead(
        bytes_moved=pairs * passes,
        workspace_bytes=_kept_bytes(problem, group.launch.chunk_rows),
    )


def _kept_bytes(problem: AttentionProblem, chunk_rows: int) -> float:
    """Return the bytes beside chunks: padded keys and values, a backward pass's sums in fp32."""
    planes, _ = _size(problem)
    kept = 0.0
    if not is_even(problem.len_k):
        number = problem.precision.bits // 8
        columns = problem.head_dim + problem.value_dim
        kept += number * planes * (problem.len_k + _KEY_STEP + PITCH) * columns
    if not problem.wants_gradients:
        return kept
    kept += 4.0 * problem.batch * problem.num_heads * problem.len_q
    if not _is_whole(problem, chunk_rows):
        kept += 4.0 * planes * problem.len_k * (problem.head_dim + problem.value_dim)
    return kept


def _is_whole(problem: AttentionProblem, chunk_rows: int) -> bool:
    """Return whether one chunk of rows has all gradients of its keys."""
    lines = problem.group_size * problem.len_q
    if 0 < chunk_rows < problem.len_q or not (is_even(lines) and is_even(problem.len_k)):
        return False
    return key_range(problem, 0, problem.len_q) == (0, problem.len_k)


def chunks_of(problem: AttentionProblem, chunk_rows: int, entries: int) -> Iterator[Chunk]:
    """Yield the chunks of a problem, all rows of some planes after one another.

    Args:
        problem: of the call.
        chunk_rows: rows of a chunk; 0 leaves them to the sizes, which a graph knows when it runs.
        entries: parts of the batch that no chunk crosses: 1 or all of them.
    """
    at_once, usual = _size(problem)
    step = min(chunk_rows or usual, problem.len_q)
    of_entry = problem.batch * problem.num_kv_heads // entries
    for start in range(0, entries * of_entry, of_entry):
        for first in range(start, start + of_entry, at_once):
            planes = range(first, min(first + at_once, start + of_entry))
            for row in range(0, problem.len_q, step):
                rows = range(row, min(row + step, problem.len_q))
                yield Chunk(planes, rows, _keys(problem, rows))


def pitch_of(chunk: Chunk) -> int:
    """Return how many numbers the rows of a chunk's scores are apart, and are multiplied."""
    return padded(len(chunk.keys))


def padded(size: int) -> int:
    """Return the least number of terms that are as many, and that `is_even` takes."""
    return -(-size // PITCH) * PITCH


def is_even(size: int) -> bool:
    """Return whether matrix products sum so many terms at their full rate."""
    return size % PITCH == 0


def _keys(problem: AttentionProblem, rows: range) -> range:
    """Return the keys that some rows can see, from a multiple of `_KEY_STEP` on."""
    begin, end = key_range(problem, rows.start, rows.stop)
    return range(begin // _KEY_STEP * _KEY_STEP, end) if begin < end else range(0)


def _pair_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of a score: itself in fp32, and beside it what is multiplied in 16 bits."""
    beside = 2 if problem.precision.bits <= 16 else 0
    forward = beside + (0 if writes_no_scores(problem) else 4)
    if not problem.wants_gradients:
        return forward
    return max(forward, 2 * (beside + (0 if is_fused(problem) else 4)))


def _line_bytes(problem: AttentionProblem) -> int:
    """Return the bytes that a line allocates: its scores, and copies of the rows of groups."""
    number = problem.precision.bits // 8
    columns = problem.head_dim + problem.value_dim
    if problem.wants_gradients:
        columns += problem.head_dim
    copies = number * columns if problem.group_size > 1 else 0
    if writes_no_scores(problem):
        copies += 4 * problem.value_dim + 8  # products before they are divided, and by what
    return _pair_bytes(problem) * (problem.len_k + _KEY_STEP + PITCH) + copies


def _size(problem: AttentionProblem) -> tuple[int, int]:
    """Return the planes and the rows of a chunk where memory is no matter."""
    return _sized(problem, _pair_bytes(problem), is_fused(problem))


@lru_cache(maxsize=1024)
def _sized(problem: AttentionProblem, pair_bytes: int, fused: bool) -> tuple[int, int]:
    """Return them for scores of so many bytes, which are not written where ``fused``."""
    group, scores = problem.group_size, pair_bytes * max(problem.len_k, 1)
    fitting = max(_MOST_BYTES // scores, 1)
    columns = max(min(problem.head_dim, problem.value_dim), 1)
    lines = min(-(-_FILLING // columns), fitting)
    cached = _L2_BYTES // scores
    if lines // 2 <= cached < lines:
        lines = cached
    rows = fitting // group if problem.wants_gradients else lines // group
    if fused:
        lines = min(_FUSED_LINES, fitting)
        rows = rows if problem.wants_gradients else lines // group
    if _sees_few(problem):
        # A batch is often computed entry by entry: its heads are not one dimension with it.
        least = min(_LEAST_FUSED_LINES, fitting) // problem.num_heads if fused else 1
        seen = problem.visible_pairs * problem.dilation / problem.len_q
        least = max(least, int(seen * _HIDDEN_SHARE))
        quickest = _quickest(problem)
        if least < quickest <= rows and not fused:
            lines = fitting
        rows = min(rows, max(quickest, least))
    rows = _balanced(problem.len_q, max(rows, 1))
    planes = min(-(-lines // (group * rows)), max(fitting // (group * rows), 1))
    return _balanced(problem.batch * problem.num_kv_heads, planes), rows


def _sees_few(problem: AttentionProblem) -> bool:
    """Return whether rows do not see all keys by their positions."""
    return problem.visible_pairs * problem.dilation < problem.len_q * problem.len_k


def _quickest(problem: AttentionProblem) -> int:
    """Return the rows of a chunk for which those of an entry take the least time, host or card.

    More rows are fewer launches, and more scores that no row sees.
    """
    columns = problem.head_dim + problem.value_dim + _SCORE_PRODUCTS
    of_score = problem.num_heads * columns

    def products(rows: int) -> float:
        parts = (range(it, min(it + rows, problem.len_q)) for it in range(0, problem.len_q, rows))
        scores = (len(part) * len(_keys(problem, part)) for part in parts)
        return sum(max(of_score * size, _HOST_PRODUCTS) for size in scores)

    parts = (-(-problem.len_q // it) for it in _PARTS)
    return min((-(-part // _EVEN) * _EVEN for part in parts), key=products)


def _balanced(total: int, most: int) -> int:
    """Return the size of parts of a total that are about equal, at most so large; at least 1."""
    parts = -(-max(total, 1) // most)
    size = -(-max(total, 1) // parts)
    even = -(-size // _EVEN) * _EVEN
    return even if size >= _EVEN and even <= most else size
