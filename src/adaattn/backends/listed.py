"""Blocks of query rows over the blocks of keys that they keep, gathered for calls of SDPA."""

from typing import Final

import torch
import torch.nn.functional as F

from adaattn.backends.block_list import BlockList
from adaattn.backends.common import visible_tile
from adaattn.backends.interface import Tensors
from adaattn.backends.sdpa_call import fused_attention
from adaattn.spec import AttentionProblem, MaskKind, Precision

__all__ = ["attend_gathered", "attend_listed", "is_gathered", "no_rows", "padded_blocks"]

_NEARLY_FULL: Final = 0.6
"""Share of kept blocks from which on a span with a mask costs less than copies of them: 0.75 of
4096 keys took 1.06 times as long gathered, 0.9 of them 1.4 times (AMD EPYC 9004, 2 cores,
2026-11)."""


def attend_gathered(
    tensors: Tensors,
    problem: AttentionProblem,
    kept: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[torch.Tensor, torch.Tensor],
    rows: range,
) -> torch.Tensor:
    """Return the output of some query rows over their kept blocks, [B, Hq, R, Dv].

    Args:
        tensors: of the whole call, no mask.
        problem: of the whole call, not packed.
        kept: numbers of blocks of keys, and which of them are kept: [B or 1, Hq or 1, N] both.
        blocks: keys and values in blocks, [B, Hkv, Nk, size, D], the last ones filled up.
        rows: numbers of the query rows.
    """
    order, valid = kept
    size, device = blocks[0].shape[3], order.device
    on_host = device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host:
        order, valid = _simplest(order, valid)
    key, value = _gathered(tensors, problem, order, blocks, on_host)
    numbers = (order * size).unsqueeze(-1) + torch.arange(size, device=device)
    numbers = numbers.flatten(2)
    seen = (valid.repeat_interleave(size, dim=-1) & (numbers < problem.len_k)).unsqueeze(2)
    row_numbers = torch.arange(rows.start, rows.stop, device=device)
    visible = visible_tile(problem, row_numbers.expand(*order.shape[:2], -1), numbers)
    if visible is not None:
        seen = seen & visible
    query = tensors.query[:, :, rows.start : rows.stop]
    # On a CPU a mask that hides nothing costs a fifth of the call.
    is_whole = on_host and bool(seen.all())
    return fused_attention(query, key, value, None if is_whole else seen, problem)


def _simplest(order: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same blocks as one list for all heads, or as a span that is nearly full."""
    if bool((order == order[:1, :1]).all() & (valid == valid[:1, :1]).all()):
        order, valid = order[:1, :1], valid[:1, :1]
    first, last = int(order.min()), int(order.max())
    span = last - first + 1
    if order.shape[-1] == span or order.shape[-1] <= _NEARLY_FULL * span:
        return order, valid
    places = torch.where(valid, order - first, span)
    listed = valid.new_zeros((*valid.shape[:2], span + 1)).scatter(-1, places, True)
    return torch.arange(first, last + 1)[None, None], listed[..., :span]


def _gathered(
    tensors: Tensors,
    problem: AttentionProblem,
    order: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor],
    on_host: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of some blocks; views of neighbours that all heads share."""
    device = order.device
    if order.shape[:2] == (1, 1):  # heads stay in groups
        places = order[0, 0]
        if on_host and bool((places.diff() == 1).all()):
            run = slice(int(places[0]), int(places[-1]) + 1)
            key, value = (item[:, :, run].flatten(2, 3) for item in blocks)
        else:
            key, value = (item.index_select(2, places).flatten(2, 3) for item in blocks)
        return key, value
    batch, heads = tensors.query.shape[:2]
    places = order.expand(batch, heads, -1)
    batches = torch.arange(batch, device=device)[:, None, None]
    kv_heads = torch.arange(heads, device=device)[None, :, None] // problem.group_size
    key, value = (item[batches, kv_heads, places].flatten(2, 3) for item in blocks)
    return key, value


def no_rows(tensors: Tensors) -> torch.Tensor:
    """Return zeros, the output where there are no rows or keys, tied to the inputs."""
    shape = (*tensors.query.shape[:-1], tensors.value.shape[-1])
    tied = [item[..., :0].sum() for item in (tensors.query, tensors.key, tensors.value)]
    return tensors.query.new_zeros(shape) + torch.stack(tied).sum()


def is_gathered(problem: AttentionProblem) -> bool:
    """Return whether gathering serves a list of blocks: on a CPU, nothing beside it but positions.

    The gradients of keys and values, sums over blocks of rows, are added in their own dtype.
    """
    others = problem.mask is not MaskKind.NONE or problem.has_alibi or problem.dilation > 1
    half = problem.precision in (Precision.BF16, Precision.FP16)
    fits = not others and not (half and problem.requires_grad)
    return problem.has_blocks and problem.device_type == "cpu" and fits


def attend_listed(tensors: Tensors, problem: AttentionProblem) -> torch.Tensor:
    """Return attention over a caller's list of blocks, [B, Hq, Sq, Dv]; see `is_gathered`."""
    blocks = tensors.blocks
    assert blocks is not None
    num_blocks = -(-problem.len_k // blocks.block_k)
    if bool((blocks.counts < 0).any()):
        sizes = {"block_q": blocks.block_q, "block_k": blocks.block_k}
        blocks = BlockList.from_mask(blocks.to_mask(num_blocks), **sizes)
    shared = blocks.counts.shape[:2] == (1, 1)
    if shared and float(blocks.counts.float().mean()) > _NEARLY_FULL * num_blocks:
        return _in_one_call(tensors, problem, blocks)
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
    return torch.cat(outputs, dim=2)


def _in_one_call(tensors: Tensors, problem: AttentionProblem, blocks: BlockList) -> torch.Tensor:
    """Return attention by one call of SDPA, whose mask serves all heads."""
    rows, keys = (torch.arange(length) for length in (problem.len_q, problem.len_k))
    seen = blocks.seen(range(problem.len_q), range(problem.len_k))
    visible = visible_tile(problem, rows, keys)
    seen = seen if visible is None else seen & visible
    return fused_attention(tensors.query, tensors.key, tensors.value, seen, problem)


def padded_blocks(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return [B, H, N, size, X], the last block padded with zeros."""
    missing = -tokens.shape[2] % size
    blocks: torch.Tensor = F.pad(tokens, (0, 0, 0, missing)).unflatten(2, (-1, size))
    return blocks
