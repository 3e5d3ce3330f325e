"""What block sparsity takes beside the products over the kept blocks: selection and gathering."""

from typing import Final

from adaattn.spec import (
    AttentionProblem,
    BlockSparse,
    HardwareFacts,
    HeadGroup,
    Overhead,
    Precision,
)

__all__ = ["BEST_DENSITY", "SELECTION_STRIDE", "overhead"]

BEST_DENSITY: Final = 0.1

SELECTION_STRIDE: Final = 12.8
"""Block selection scores 5 of 64 query rows exactly."""

_SCORE_PASSES: Final = 6
"""Reads and writes of each scored row's scores."""


def overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return what scoring some rows, ordering their blocks and gathering the kept ones takes."""
    assert isinstance(group.method, BlockSparse)
    heads, size = problem.batch * problem.num_heads, max(group.method.block_size, 1)
    columns = problem.head_dim + problem.value_dim
    element = min(problem.precision.bits, group.scheme.inputs.bits) / 8
    scored = problem.visible_pairs * heads / SELECTION_STRIDE
    flops = 2.0 * scored * problem.head_dim
    gathered = 2.0 * density * problem.visible_pairs / size * columns * heads
    rows = -(-problem.len_q // SELECTION_STRIDE)
    return Overhead(
        flops=flops,
        bytes_moved=4.0 * scored * _SCORE_PASSES + gathered * element,
        workspace_bytes=2 * 4.0 * heads * rows * problem.len_k
        + 2 * density * heads * problem.len_k * columns * element,
        launches=12 * -(-problem.len_q // size) + 20,
        seconds=flops / max(hardware.rates.flops_of(Precision.FP32), 1.0),
    )
