"""Attention over the blocks of keys that hold most of each row's probability.

Selection: the rows that `scored_rows` names are scored exactly against all keys that they see; a
block of keys is kept for a block of queries if any of its scored rows needs it to reach
the kept mass (the worst row decides, which loses far less than a mean would), and the
diagonal is always kept. Between the scored rows, each row is held against the key of each
block that is farthest from the block's mean: one key that few rows look for is not lost.
Computation: the kept blocks are gathered for each block of
queries and attended exactly.
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
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.sdpa_call import fused_attention
from adaattn.spec import AttentionProblem, BlockSparse, Capability, Feature, HeadGroup, Method

__all__ = [
    "CAPABILITIES",
    "STRIDE",
    "blocks_needed",
    "diagonal_blocks",
    "far_shares",
    "run",
    "scored_rows",
    "select_blocks",
]

STRIDE = 16
_ROWS_AT_ONCE = 64

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
    ),
)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention over the blocks that `select_blocks` keeps, as ``group.method`` says."""
    assert isinstance(group.method, BlockSparse)
    size = group.method.block_size
    if problem.len_q == 0 or problem.len_k == 0:
        shape = (*tensors.query.shape[:-1], problem.value_dim)
        tied = [item[..., :0].sum() for item in (tensors.query, tensors.key, tensors.value)]
        return Result(output=tensors.query.new_zeros(shape) + torch.stack(tied).sum())
    with torch.no_grad():
        keep = select_blocks(tensors, problem, size, group.method.kept_mass)
        most = keep.sum(-1).amax(dim=(0, 1)).tolist()  # the one host read
    key_blocks = _blocks(tensors.key, size)
    value_blocks = _blocks(tensors.value, size)
    outputs = []
    for index, start in enumerate(range(0, problem.len_q, size)):
        stop = min(start + size, problem.len_q)
        order, valid = _kept_first(keep[:, :, index], max(most[index], 1))
        outputs.append(
            _attend(tensors, problem, (order, valid), (key_blocks, value_blocks), start, stop)
        )
    return Result(output=torch.cat(outputs, dim=2))


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


def scored_rows(start: int, stop: int, size: int) -> list[int]:
    """Return which of the query rows ``start..stop`` selection scores.

    Beside every `STRIDE`-th row it is the last of each block: a head that looks at its
    neighbourhood needs the next block for its last rows alone.
    """
    last = range(start + (-start - 1) % size, stop, size)
    return sorted({*range(start, stop, STRIDE), *last, stop - 1})


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
    blocks = _blocks(tensors.key.to(dtype), size)
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


def _blocks(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return [B, H, N, size, X], the last block padded with zeros."""
    missing = -tokens.shape[2] % size
    blocks: torch.Tensor = F.pad(tokens, (0, 0, 0, missing)).unflatten(2, (-1, size))
    return blocks


def _kept_first(keep: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (block numbers, which of them are kept), [B, Hq, most], the kept ones first."""
    order = keep.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
    return order, keep.gather(-1, order)


def _attend(
    tensors: Tensors,
    problem: AttentionProblem,
    kept: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[torch.Tensor, torch.Tensor],
    start: int,
    stop: int,
) -> torch.Tensor:
    """Return the output of query rows ``start..stop`` over their kept blocks."""
    order, valid = kept
    key_blocks, value_blocks = blocks
    batch, heads, _ = order.shape
    size = key_blocks.shape[3]
    batches = torch.arange(batch, device=order.device)[:, None, None]
    kv_heads = torch.arange(heads, device=order.device)[None, :, None] // problem.group_size
    key = key_blocks[batches, kv_heads, order].flatten(2, 3)
    value = value_blocks[batches, kv_heads, order].flatten(2, 3)
    numbers = (order * size).unsqueeze(-1) + torch.arange(size, device=order.device)
    numbers = numbers.flatten(2)
    seen = (valid.repeat_interleave(size, dim=-1) & (numbers < problem.len_k)).unsqueeze(2)
    rows = torch.arange(start, stop, device=order.device).expand(batch, heads, -1)
    visible = visible_tile(problem, rows, numbers)
    if visible is not None:
        seen = seen & visible
    return fused_attention(tensors.query[:, :, start:stop], key, value, seen, problem)
