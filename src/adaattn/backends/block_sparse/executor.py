"""Attention over the blocks that selection keeps: gathered for each block of queries, and exact."""

import torch

from adaattn.backends.block_sparse.cost import BEST_DENSITY, overhead
from adaattn.backends.block_sparse.selection import select_blocks
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.listed import attend_gathered, kept_first, padded_blocks
from adaattn.backends.masked import zero_rows
from adaattn.backends.sampling import BLOCK_SIZE
from adaattn.spec import (
    AttentionProblem,
    BlockSparse,
    Capability,
    Feature,
    HeadGroup,
    HeadMethod,
    Method,
    Policy,
)

__all__ = ["CAPABILITIES", "KEPT_MASSES", "run"]

KEPT_MASSES = (0.9, 0.97, 0.99)
"""Shares of each sampled row's probability that the kept blocks must hold."""


def _methods(problem: AttentionProblem, policy: Policy) -> tuple[HeadMethod, ...]:
    """Return each kept mass, in blocks of one size."""
    del problem, policy
    return tuple(BlockSparse(block_size=BLOCK_SIZE, kept_mass=mass) for mass in KEPT_MASSES)


CAPABILITIES = (
    Capability(
        name="block_sparse",
        backend="block_sparse",
        method=Method.BLOCK_SPARSE,
        waits=True,
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.CAUSAL_BOTTOM_RIGHT
            | Feature.WINDOW
            | Feature.SCALE_SIGN
            | Feature.DROPOUT
            | Feature.BACKWARD
            | Feature.VALUE_DIM
        ),
        skips_hidden=True,
        efficiency=0.6,
        num_launches=4,
        methods=_methods,
        overhead=overhead,
        best_density=BEST_DENSITY,
        sampling_cost=8,
    ),
)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention over the blocks that `select_blocks` keeps, as ``group.method`` says."""
    assert isinstance(group.method, BlockSparse)
    size = group.method.block_size
    if problem.len_q == 0 or problem.len_k == 0:
        return Result(output=zero_rows(tensors)[0])
    with torch.no_grad():
        keep = select_blocks(tensors, problem, size, group.method.kept_mass)
        most = keep.sum(-1).amax(dim=(0, 1)).tolist()  # the one host read
    key_blocks = padded_blocks(tensors.key, size)
    value_blocks = padded_blocks(tensors.value, size)
    outputs = []
    for index, start in enumerate(range(0, problem.len_q, size)):
        stop = min(start + size, problem.len_q)
        order, valid = kept_first(keep[:, :, index], max(most[index], 1))
        outputs.append(
            attend_gathered(
                tensors, problem, (order, valid), (key_blocks, value_blocks), range(start, stop)
            )
        )
    return Result(output=torch.cat(outputs, dim=2))
