"""Which blocks of keys each block of queries needs.

The rows that `scored_rows` names are scored exactly against all keys that they see; a block of keys
is kept for a block of queries if any of its scored rows needs it to reach the kept mass (the worst
row decides, which loses far less than a mean would), and the diagonal is always kept. Between the
scored rows, each row is held against the key of each block that is farthest from the block's mean:
one key that few rows look for is not lost.
"""

import torch
import torch.nn.functional as F

from adaattn.backends.common import (
    accumulation_dtype,
    grouped_product,
    key_range,
    softmax_rows,
    tile_scores,
    visible_tile,
)
from adaattn.backends.interface import Tensors
from adaattn.backends.listed import padded_blocks
from adaattn.backends.sampling import STRIDE, scored_rows
from adaattn.spec import AttentionProblem

__all__ = ["blocks_needed", "diagonal_blocks", "far_shares", "select_blocks"]

_ROWS_AT_ONCE = 64


def select_blocks(
    tensors: Tensors, problem: AttentionProblem, size: int, kept_mass: float
) -> torch.Tensor:
    """Return which blocks of keys each block of queries keeps: boolean [B, Hq, Nq, Nk].

    Args:
        tensors: [B, H, S, D] tensors, no mask.
        problem: not packed.
        size: side of a block in tokens.
        kept_mass: share of each scored row's probability to reach, in (0, 1]; 1 keeps every
            block of which some row sees a key.
    """
    if kept_mass >= 1.0:
        visible = _visible_blocks(problem, size, tensors.query.device)
        return visible.expand(problem.batch, problem.num_heads, -1, -1)
    num_query_blocks = -(-problem.len_q // size)
    num_key_blocks = -(-problem.len_k // size)
    shape = (problem.batch, problem.num_heads, num_query_blocks, num_key_blocks)
    keep = torch.zeros(shape, dtype=torch.bool, device=tensors.query.device)
    step = _ROWS_AT_ONCE * STRIDE
    for start in range(0, problem.len_q, step):
        stop = min(start + step, problem.len_q)
        numbers = scored_rows(start, stop, size)
        begin, end = key_range(problem, start, stop)
        if begin == end:
            continue
        begin -= begin % size
        rows = torch.tensor(numbers, device=keep.device)
        scores = tile_scores(tensors, problem, rows, range(begin, end))
        needed = blocks_needed(softmax_rows(scores, None).weights, size, kept_mass)
        columns = slice(begin // size, begin // size + needed.shape[-1])
        for index, row in enumerate(numbers):
            keep[:, :, row // size, columns] |= needed[:, :, index]
    keep |= far_shares(tensors, problem, size) > 1.0 - kept_mass
    return keep | diagonal_blocks(problem, size, keep.device)


def far_shares(tensors: Tensors, problem: AttentionProblem, size: int) -> torch.Tensor:
    """Return the largest estimated share of each block's far key: [B, Hq, Nq, Nk].

    The far key is the one farthest from the mean key of its block. Two scores for each row
    and block, this key's and the mean's, estimate which share of the row's probability it
    holds; the largest over the rows of a block of queries counts. Rows that selection does
    not score need that: their one sharp key may be none of any scored row.

    Args:
        tensors: [B, H, S, D] tensors, no mask.
        problem: not packed.
        size: side of a block in tokens.
    """
    dtype = accumulation_dtype(tensors.query.dtype)
    query = tensors.query.to(dtype) * problem.scale
    blocks = padded_blocks(tensors.key.to(dtype), size)
    numbers = torch.arange(blocks.shape[2] * size, device=query.device).view(-1, size)
    counts = (numbers < problem.len_k).sum(-1)
    means = blocks.sum(3) / counts.unsqueeze(-1)
    distance = (blocks - means.unsqueeze(3)).square().sum(-1)
    place = distance.masked_fill(numbers >= problem.len_k, -1.0).argmax(-1)
    far_keys = blocks.gather(3, place[..., None, None].expand(*place.shape, 1, blocks.shape[-1]))
    far_numbers = (numbers[:, 0] + place).repeat_interleave(problem.group_size, dim=1)
    found = []
    for start in range(0, problem.len_q, size):
        rows = query[:, :, start : start + size]
        far = grouped_product(rows, far_keys.squeeze(3).mT)
        rest = grouped_product(rows, means.mT) + counts.log()
        row_numbers = torch.arange(start, start + rows.shape[2], device=query.device)
        visible = visible_tile(problem, row_numbers, far_numbers)
        if visible is not None:
            far = far.masked_fill(~visible, float("-inf"))
            first = visible_tile(problem, row_numbers, numbers[:, 0])
            last = visible_tile(problem, row_numbers, numbers[:, -1])
            assert first is not None and last is not None
            rest = rest.masked_fill(~(visible | first | last), float("-inf"))
        whole = torch.logaddexp(far, rest).logsumexp(-1, keepdim=True)
        found.append((far - whole).exp().nan_to_num(0.0).amax(2))
    return torch.stack(found, dim=2)


def blocks_needed(weights: torch.Tensor, size: int, kept_mass: float) -> torch.Tensor:
    """Return the fewest blocks of each row that reach the kept mass: boolean [..., Nk].

    Args:
        weights: [..., C] probabilities, the first column at the start of a block.
        size: side of a block.
        kept_mass: share to reach; 1 keeps every block that holds anything.
    """
    missing = -weights.shape[-1] % size
    mass: torch.Tensor = F.pad(weights, (0, missing)).unflatten(-1, (-1, size)).sum(-1)
    if kept_mass >= 1.0:
        return mass > 0
    ordered, order = mass.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    needed = (before < kept_mass) & (ordered > 0)
    return torch.zeros_like(needed).scatter_(-1, order, needed)


def _block_distances(problem: AttentionProblem, size: int, device: torch.device) -> torch.Tensor:
    """Return p - j between the first row and the first key of each pair of blocks: [Nq, Nk]."""
    queries = torch.arange(0, problem.len_q, size, device=device) + problem.offset
    return queries.unsqueeze(-1) - torch.arange(0, problem.len_k, size, device=device)


def _visible_blocks(problem: AttentionProblem, size: int, device: torch.device) -> torch.Tensor:
    """Return the pairs of blocks in which some row sees some key: boolean [Nq, Nk]."""
    distance = _block_distances(problem, size, device)
    left, right = problem.window
    right = 0 if problem.is_causal else right
    visible = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        visible &= distance + size - 1 >= -right
    if left >= 0:
        visible &= distance - size + 1 <= left
    return visible


def diagonal_blocks(problem: AttentionProblem, size: int, device: torch.device) -> torch.Tensor:
    """Return the blocks that hold the positions of a block's own rows: boolean [Nq, Nk]."""
    return _block_distances(problem, size, device).abs() < size
