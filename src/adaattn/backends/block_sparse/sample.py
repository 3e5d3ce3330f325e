"""What sampled rows say of each kept mass, by the selection that the executor makes."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    sizes = {method.block_size: _Selection.of(sampled, method.block_size) for method in tried}
    return stats, [sizes[method.block_size].estimate(sampled, method) for method in tried]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """What selection sees in the sampled rows' blocks of queries, whatever mass it keeps.

    Args:
        weights: [B, Hq, T, Sk] of the rows that it scores.
        owner: [T] which of the blocks each of them lies in.
        member: [R] the same of the sampled rows.
        shares: [B, Hq, N, Nk] of far keys, see `far_shares`.
        diagonal: [N, Nk] blocks that are always kept.
        visible: [R, Nk] blocks of which each sampled row sees a key by position.
    """

    weights: torch.Tensor
    owner: torch.Tensor
    member: torch.Tensor
    shares: torch.Tensor
    diagonal: torch.Tensor
    visible: torch.Tensor

    @classmethod
    def of(cls, sampled: Sampled, size: int) -> "_Selection":
        """Return what selection sees with blocks of one size."""
        problem, device = sampled.problem, sampled.index.device
        blocks = sorted({row // size for row in sampled.rows})
        scored = [
            row
            for block in blocks
            for row in scored_rows(block * size, min((block + 1) * size, problem.len_q), size)
        ]
        owner, member = (
            torch.tensor([blocks.index(row // size) for row in rows], device=device)
            for rows in (scored, sampled.rows)
        )
        return cls(
            weights=row_weights(sampled.tensors, problem, torch.tensor(scored, device=device)),
            owner=owner,
            member=member,
            shares=far_shares(sampled.tensors, problem, size)[:, :, blocks],
            diagonal=diagonal_blocks(problem, size, device)[blocks],
            visible=_visible_blocks(sampled, size),
        )

    def estimate(self, sampled: Sampled, method: BlockSparse) -> Estimate:
        """Return the errors of a kept mass, and the share of visible blocks that it keeps."""
        size, exact = method.block_size, sampled.weights
        needed = blocks_needed(self.weights, size, method.kept_mass)
        shape = (*needed.shape[:2], len(self.diagonal), needed.shape[-1])
        votes = torch.zeros(shape, device=exact.device).index_add_(2, self.owner, needed.float())
        keep = (votes > 0) | (self.shares > 1.0 - method.kept_mass) | self.diagonal
        keep = keep.index_select(2, self.member)
        kept = exact * keep.repeat_interleave(size, dim=-1)[..., : sampled.problem.len_k]
        output = grouped_product(kept, sampled.tensors.value.to(kept.dtype))
        output = output / kept.sum(-1, keepdim=True).clamp_min(1e-30)
        seen = (keep & self.visible).sum(dim=(0, 2, 3))
        density = seen / (self.visible.sum() * sampled.problem.batch)
        return Estimate(
            method=method, errors=sampled.errors(output), densities=density.to(exact.dtype)
        )


def _visible_blocks(sampled: Sampled, size: int) -> torch.Tensor:
    """Return the blocks of which each row sees a key by position: [R, Nk]."""
    problem, device = sampled.problem, sampled.index.device
    visible = visible_tile(problem, sampled.index, torch.arange(problem.len_k, device=device))
    if visible is None:
        shape = (len(sampled.rows), problem.len_k)
        visible = torch.ones(shape, dtype=torch.bool, device=device)
    return blocks_needed(visible.float(), size, 1.0)
