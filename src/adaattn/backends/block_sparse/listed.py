"""Exact attention over a caller's list of blocks on a CPU: what is not listed costs nothing."""

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.block_sparse.gathered import NEARLY_FULL, attend_gathered
from adaattn.backends.block_sparse.selection import padded_blocks
from adaattn.backends.common import visible_tile
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.sdpa_call import fused_attention
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup

__all__ = ["CAPABILITIES", "run"]


def _no_list(problem: AttentionProblem) -> str:
    """Return why a problem has nothing to gather, or ""."""
    return "" if problem.has_blocks else "it is for lists of blocks"


CAPABILITIES = (
    Capability(
        name="block_list",
        backend="block_list",
        device_types=("cpu",),
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.CAUSAL_BOTTOM_RIGHT
            | Feature.WINDOW
            | Feature.SCALE_SIGN
            | Feature.DROPOUT
            | Feature.BACKWARD
            | Feature.VALUE_DIM
            | Feature.BLOCK_LIST
        ),
        rules=(_no_list,),
        efficiency=0.6,
        num_launches=6,
        order=lambda problem: 20,
    ),
)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention over the listed blocks."""
    del group
    blocks = tensors.blocks
    assert blocks is not None
    num_blocks = -(-problem.len_k // blocks.block_k)
    if bool((blocks.counts < 0).any()):
        sizes = {"block_q": blocks.block_q, "block_k": blocks.block_k}
        blocks = BlockList.from_mask(blocks.to_mask(num_blocks), **sizes)
    shared = blocks.counts.shape[:2] == (1, 1)
    if shared and float(blocks.counts.float().mean()) > NEARLY_FULL * num_blocks:
        return Result(output=_in_one_call(tensors, problem, blocks))
    key, value = (padded_blocks(item, blocks.block_k) for item in tensors.kv)
    most = blocks.counts.amax(dim=(0, 1)).tolist()
    outputs = []
    for index, start in enumerate(range(0, problem.len_q, blocks.block_q)):
        rows = range(start, min(start + blocks.block_q, problem.len_q))
        room = max(most[index], 1)
        order = blocks.indices[:, :, index, :room]
        valid = torch.arange(room) < blocks.counts[:, :, index, None]
        order = torch.where(valid, order, 0).long()
        outputs.append(attend_gathered(tensors, problem, (order, valid), (key, value), rows))
    return Result(output=torch.cat(outputs, dim=2))


def _in_one_call(tensors: Tensors, problem: AttentionProblem, blocks: BlockList) -> torch.Tensor:
    """Return attention by one call of SDPA, whose mask serves all heads."""
    rows, keys = (torch.arange(length) for length in (problem.len_q, problem.len_k))
    seen = blocks.seen(range(problem.len_q), range(problem.len_k))
    visible = visible_tile(problem, rows, keys)
    seen = seen if visible is None else seen & visible
    return fused_attention(tensors.query, tensors.key, tensors.value, seen, problem)
