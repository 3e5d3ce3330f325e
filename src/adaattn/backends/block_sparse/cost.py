"""What block sparsity takes beside the products over the kept blocks: selection and gathering."""

from typing import Final

from adaattn.backends.sampling import BLOCK_SIZE, scored_rows
from adaattn.spec import AttentionProblem, BlockSparse, HardwareFacts, HeadGroup, Overhead

__all__ = ["BEST_DENSITY", "SELECTION_STRIDE", "overhead"]

BEST_DENSITY: Final = 0.1

SELECTION_STRIDE: Final = BLOCK_SIZE / len(scored_rows(0, BLOCK_SIZE, BLOCK_SIZE))
"""Block selection scores one query row in so many exactly."""

_SCORE_PASSES: Final = 6
"""Reads and writes of each scored row's scores."""


def overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return what scoring some rows, ordering their blocks and gathering the kept ones takes."""
    del hardware
    assert isinstance(group.method, BlockSparse)
    heads, size = problem.batch * problem.num_heads, max(group.method.block_size, 1)
    columns = problem.head_dim + problem.value_dim
    element = min(problem.precision.bits, group.scheme.inputs.bits) / 8
    scored = problem.visible_pairs * heads / SELECTION_STRIDE
    gathered = 2.0 * density * problem.visible_pairs / size * columns * heads
    rows = -(-problem.len_q // SELECTION_STRIDE)
    return Overhead(
        flops=2.0 * scored * problem.head_dim,
        bytes_moved=4.0 * scored * _SCORE_PASSES + gathered * element,
        workspace_bytes=2 * 4.0 * heads * rows * problem.len_k
        + 2 * density * heads * problem.len_k * columns * element,
        launches=12 * -(-problem.len_q // size) + 20,
    )
