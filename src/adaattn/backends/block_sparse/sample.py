"""What sampled rows say of each kept mass, by the selection that the executor makes."""

from collections.abc import Sequence

import torch

from adaattn.backends.block_sparse.selection import blocks_needed, diagonal_blocks, far_shares
from adaattn.backends.common import grouped_product, visible_tile
from adaattn.backends.sampling import Estimate, Sampled, row_weights, scored_rows
from adaattn.spec import BlockSparse, HeadMethod, TensorStats

__all__ = ["sample"]


def sample(
    sampled: Sampled,
    methods: Sequence[HeadMethod],
    stats: TensorStats,
    budgets: tuple[float, ...],
) -> tuple[TensorStats, list[Estimate]]:
    """Return errors and densities of each kept mass. A `Sampler`."""
    del budgets
    tried = [method for method in methods if isinstance(method, BlockSparse)]
    problem, blocks, device = sampled.problem, sampled.blocks, sampled.weights.device
    (size,) = {method.block_size for method in tried}
    scored = [row for block in blocks for row in _scored(block, size, problem.len_q)]
    owner = torch.tensor([blocks.index(row // size) for row in scored], device=device)
    member = torch.tensor([blocks.index(row // size) for row in sampled.rows], device=device)
    scored_weights = row_weights(sampled.tensors, problem, torch.tensor(scored, device=device))
    diagonal = diagonal_blocks(problem, size, device)[blocks]
    shares = far_shares(sampled.tensors, problem, size)[:, :, blocks]
    visible = _visible_blocks(sampled, size)
    value = sampled.tensors.value.to(sampled.weights.dtype)
    found = []
    for method in tried:
        needed = blocks_needed(scored_weights, size, method.kept_mass)
        shape = (*needed.shape[:2], len(blocks), needed.shape[-1])
        votes = torch.zeros(shape, device=device).index_add_(2, owner, needed.float())
        keep = (votes > 0) | (shares > 1.0 - method.kept_mass) | diagonal
        keep = keep.index_select(2, member)
        kept = sampled.weights * keep.repeat_interleave(size, dim=-1)[..., : problem.len_k]
        output = grouped_product(kept, value) / kept.sum(-1, keepdim=True).clamp_min(1e-30)
        density = (keep & visible).sum(dim=(0, 2, 3)) / (visible.sum() * problem.batch)
        found.append(
            Estimate(
                method=method,
                errors=sampled.errors(output),
                densities=density.to(sampled.weights.dtype),
            )
        )
    return stats, found


def _scored(block: int, size: int, len_q: int) -> list[int]:
    """Return the rows of a block of queries that selection scores."""
    return scored_rows(block * size, min((block + 1) * size, len_q), size)


def _visible_blocks(sampled: Sampled, size: int) -> torch.Tensor:
    """Return the blocks of which each row sees a key by position: [R, Nk]."""
    problem, device = sampled.problem, sampled.index.device
    visible = visible_tile(problem, sampled.index, torch.arange(problem.len_k, device=device))
    if visible is None:
        shape = (len(sampled.rows), problem.len_k)
        visible = torch.ones(shape, dtype=torch.bool, device=device)
    return blocks_needed(visible.float(), size, 1.0)
