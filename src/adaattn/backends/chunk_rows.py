"""How many query rows `chunked` takes at once, and what each allocates."""

import math
from dataclasses import replace
from typing import Final

from adaattn.backends.common import multiplies_as_is, multiplies_in_tiles
from adaattn.backends.masked import is_fused, is_plain, sliding_columns
from adaattn.backends.sinks import has_flash_sinks
from adaattn.backends.tiles import CPU_BYTES
from adaattn.backends.written import is_written
from adaattn.spec import AttentionProblem, Scheme

__all__ = ["choose_chunk_rows", "row_bytes"]

_DEFAULT_BYTES: Final = 256 << 20
"""Score workspace when the policy sets no limit; large enough to amortise launches."""

_GPU_BYTES: Final = {True: 4 << 30, False: 2 << 30}
"""The same on a GPU, by whether a kernel of SDPA writes no scores."""

_GPU_WRITTEN_BYTES: Final = (2 << 30, 7 << 29)
"""The same where scores are written out, forward and in training, which keeps more of them."""

_PAIR_BYTES, _BIAS_BYTES = 24, 10
"""A mask's pair of a row and a key while it is made, and what ALiBi adds for each head."""

_SCORE_COPIES: Final = 3
_TRAINING_COPIES: Final = 5
"""Scores, weights and one temporary, in the precision of sums; on a GPU in training five were seen
with a softcap, four with sinks (H100, PyTorch 2.11, 2026-11)."""

_MAX_ROWS: Final = {"cpu": 1024, "cuda": 1 << 15}
_CHUNK_PRODUCTS: Final = (1.5e6, 4e6)
"""What a chunk costs beside its products, in multiplications: forward, and in training.

Fitted to chunks of 64 to 1024 rows in sixteen problems: windows of 1 to 128 and ALiBi, 130 to 2048
tokens, 1 to 128 heads. What it takes is 2 % above the best in the median, 23 % at most (AMD EPYC
9004 with 2 cores, 2026-11, benchmarks/results/chunk_rows_cpu.json).
"""

_ALIBI_PRODUCTS: Final = 3e6
"""The same of ALiBi, forward: each chunk reads its bias. Of 30 problems of 1 to 32 heads and 142 to
900 tokens none takes more than 1.01 of what one chunk takes, for 1.11 (as above)."""

_WRITTEN_PRODUCTS: Final = {False: (3e6, 8e6), True: (1e7, 2.7e7)}
"""The same of chunks that are written out, by whether 16-bit numbers are multiplied as such: those
products are the faster ones, and a chunk costs as much. As nine problems of 43 to 1024 tokens had
it (as above)."""

_COPYING_ROWS: Final = 16
"""Rows in whose time a chunk of a window copies its keys and values for products of 16 bits. Two
chunks of 36 heads and 114 tokens, which were taken without this, take up to 1.3 of the time of one.
Of 21 windows of 100 to 400 tokens none takes more than 1.05 of the best, forward (the same CPU,
benchmarks/results/chunk_rows_16_bits_cpu.json)."""

_TILED_PRODUCTS: Final = {False: (8e6, 2.4e7), True: (3e7, 6e7)}
"""Both where products go by tiles, by whether scores are written out: 2 and 8 % above the best in
the mean of 40 random windows, 1 and 6 of 12 with a softcap (Intel Xeon with AMX and 2 cores, bf16,
64 to 2353 tokens, 2026-11)."""

_GPU_CHUNK_PRODUCTS: Final = {True: (5e9, 5e10), False: (5e8, 5e9)}
"""The same on a GPU by whether the input has 16 bits: at a fused kernel's rate what the host takes
for a chunk, 70 us, and 0.8 ms with its recomputation in training (H200, PyTorch 2.11, 2026-11)."""

_GPU_WRITTEN_PAIRS: Final = (1.2e7, 2.6e7)
"""The same in pairs of a row and a key where scores are written out, which goes by pairs: the host
takes 0.3 ms for a chunk, 2 with its recomputation (H100, benchmarks/results/chunk_rows_h100.json).
"""

_AGAIN: Final = 4.5 / 3.5
"""What computing chunks again in the backward pass costs: five products and two, and two more."""

_WORTH_CUTTING: Final = 0.9
"""Share of what one chunk takes below which several must be: short ones run at a lower rate."""

_SHARING_ROWS: Final = 128
"""See `_sharing_a_tile`."""

_MIN_ROWS: Final = 16
"""Fewer rows spend their time on launches; only a memory budget asks for less."""


def choose_chunk_rows(problem: AttentionProblem, memory_budget_bytes: int | None) -> int:
    """Return the rows of a chunk: a power of two; those that there are fit the memory budget.

    It is the one that takes least by the keys that chunks read and what each chunk costs beside
    them (`_CHUNK_PRODUCTS`).

    Args:
        problem: simplified.
        memory_budget_bytes: the policy's limit; None takes 256 MiB, on a GPU 2 to 4 GiB; exceeded
            only where 16 rows need more.
    """
    problem = _own(problem)
    if problem.dropout_p:  # reentrant checkpoints draw without gradients what they draw again with
        problem = replace(problem, requires_grad=True)
    available, smallest = _DEFAULT_BYTES, _MIN_ROWS
    if problem.device_type == "cuda":
        available = _GPU_WRITTEN_BYTES[problem.requires_grad]
        if is_plain(problem):
            available = _GPU_BYTES[is_fused(problem)]
    if memory_budget_bytes is not None:
        # Whatever the chunk, each query row has its log-sum-exp.
        rows = problem.batch * problem.num_heads * problem.len_q
        available = memory_budget_bytes - _score_bytes(problem) * rows
        smallest = 1
    rows = max(available // max(row_bytes(problem), 1), 1)
    left, right = problem.window
    rows = min(rows, _MAX_ROWS[problem.device_type])
    most = 1 << (int(rows).bit_length() - 1)
    if most < problem.len_q <= rows:  # all of them fit, though no power of two does
        most *= 2
    if problem.is_causal or left >= 0 or right >= 0:
        sizes = [1 << power for power in range(6, most.bit_length())]
        best = min(reversed(sizes), key=lambda size: _products(problem, size), default=most)
        if _products(problem, best) < _WORTH_CUTTING * _products(problem, most):
            most = best
    return max(_sharing_a_tile(problem, most), smallest)


def _sharing_a_tile(problem: AttentionProblem, rows: int) -> int:
    """Return so few rows of a chunk that all chunks' ALiBi is windows of one kept tile.

    Made anew for each chunk it takes as long as the products. Where that takes fewer than 128
    rows, it is not to be had.
    """
    if not problem.has_alibi or problem.device_type != "cpu" or not is_plain(problem):
        return rows
    for fewer in (rows >> shift for shift in range(rows.bit_length())):
        size = problem.num_heads * fewer * len(sliding_columns(problem, fewer))
        if size * problem.precision.bits // 8 <= CPU_BYTES:
            return fewer if fewer >= min(_SHARING_ROWS, rows) else rows
    return rows


def row_bytes(problem: AttentionProblem) -> int:
    """Return the bytes that a row of a chunk allocates: its scores, or on a GPU its mask alone."""
    problem, len_k = _own(problem), max(problem.len_k, 1)
    if problem.device_type == "cuda" and is_plain(problem) and is_fused(problem):
        heads = problem.num_heads if problem.has_alibi else 0
        if problem.mask_shape and (problem.is_positional or problem.has_alibi):
            heads = max(heads, math.prod(problem.mask_shape[:2]))
        if problem.has_blocks:
            heads = problem.batch * problem.num_heads
        return (_PAIR_BYTES + _BIAS_BYTES * heads) * len_k
    copies = _SCORE_COPIES
    if problem.device_type == "cuda" and problem.requires_grad and not is_plain(problem):
        copies = _TRAINING_COPIES
    return copies * _score_bytes(problem) * problem.batch * problem.num_heads * len_k


def _own(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem of one sequence, where sequences go one at a time."""
    if not problem.batch_invariant:
        return problem
    return replace(problem, batch=1, mask_shape=problem.mask_shape and (1, *problem.mask_shape[1:]))


def _score_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of a number in the precision of sums."""
    return Scheme.of(problem.precision).accumulate.bits // 8


def _products(problem: AttentionProblem, size: int) -> float:
    """Return the multiplications of all chunks of a size, each chunk's own cost among them."""
    len_q, len_k = problem.longest
    rows = min(size, max(len_q, 1))
    left, right = problem.window
    right = 0 if problem.is_causal else right
    is_window = left >= 0 and right >= 0
    keys: float
    if is_window:
        keys = min(rows + left + right, len_k)
    else:  # rows at one end read all keys, those at the other a chunk's
        keys = (len_k + min(rows + max(left, right), len_k)) / 2
    per_pair = problem.batch * problem.num_heads * problem.head_dim
    chunks = -(-len_q // rows)
    products = per_pair * len_q * keys
    if chunks > 1 and problem.requires_grad and (problem.device_type != "cpu" or _writes(problem)):
        products *= _AGAIN
    if chunks > 1 and is_window and _copies(problem):
        products *= 1 + _COPYING_ROWS / rows
    return products + chunks * _products_of_a_chunk(problem)


def _products_of_a_chunk(problem: AttentionProblem) -> float:
    """Return the multiplications in whose time a chunk is made ready and launched."""
    half = problem.precision.bits <= 16
    if problem.device_type != "cpu":
        if not is_plain(problem):
            return problem.head_dim * _GPU_WRITTEN_PAIRS[problem.requires_grad]
        return _GPU_CHUNK_PRODUCTS[half][problem.requires_grad]
    found = _CHUNK_PRODUCTS
    if problem.has_alibi:
        found = (_ALIBI_PRODUCTS, found[1])
    if multiplies_in_tiles(problem):
        found = _TILED_PRODUCTS[_writes(problem)]
    elif _writes(problem):
        found = _WRITTEN_PRODUCTS[_copies(problem)]
    return found[problem.requires_grad]


def _copies(problem: AttentionProblem) -> bool:
    """Return whether a CPU multiplies 16-bit numbers of a chunk as such, though not by tiles."""
    as_is = problem.precision.bits <= 16 and multiplies_as_is(problem.precision)
    written = problem.device_type == "cpu" and _writes(problem)
    return as_is and written and not multiplies_in_tiles(problem)


def _writes(problem: AttentionProblem) -> bool:
    """Return whether a CPU writes the scores of a chunk and multiplies them itself."""
    return is_written(problem) and not (is_plain(problem) or has_flash_sinks(problem))
