"""Blocks of query rows over the blocks of keys that they keep, gathered for calls of SDPA."""

from typing import Final

import torch
import torch.nn.functional as F

from adaattn.backends.block_list import BlockList, listed_first
from adaattn.backends.common import key_range, visible_tile
from adaattn.backends.interface import Tensors
from adaattn.backends.sdpa_call import fused_attention
from adaattn.spec import AttentionProblem, MaskKind, Precision

__all__ = [
    "attend_gathered",
    "attend_listed",
    "is_gathered",
    "kept_first",
    "padded_blocks",
]

_SHARES: Final = {True: 0.6, False: 0.5}
"""Share of the visible blocks up to which copies of those listed cost less than a mask of all, by
whether one list serves all heads: half of 2048 keys took 0.8 of a mask's time, 0.75 of them 1.1
times (AMD EPYC 9004, 2026-11)."""

_LEAST_ROWS: Final = 64
"""Rows of a block below which a call of SDPA for each costs more than it saves."""

_MOST_ROWS: Final = 512
"""Rows of a block that are computed at once: each has a mask over its keys."""


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


def kept_first(keep: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (block numbers, which of them are kept), [B, Hq, most], the kept ones first."""
    counts, order = listed_first(keep)
    order = order[..., :most].long()
    return order, torch.arange(order.shape[-1], device=order.device) < counts.unsqueeze(-1)


def is_gathered(problem: AttentionProblem) -> bool:
    """Return whether gathering serves a list of blocks: on a CPU, nothing beside it but positions.

    The gradients of keys and values, sums over blocks of rows, are added in their own dtype.
    Dropout draws as it would with gradients.
    """
    others = problem.mask is not MaskKind.NONE or problem.has_alibi or problem.dilation > 1
    half = problem.precision in (Precision.BF16, Precision.FP16)
    fits = not others and not (half and (problem.requires_grad or problem.dropout_p))
    some = problem.len_q > 0 and problem.len_k > 0
    return problem.has_blocks and problem.device_type == "cpu" and fits and some


def attend_listed(
    tensors: Tensors, problem: AttentionProblem, chunk_rows: int
) -> torch.Tensor | None:
    """Return attention over a list of blocks, [B, Hq, Sq, Dv]; None where a mask is better.

    Args:
        tensors: of the whole call.
        problem: see `is_gathered`.
        chunk_rows: query rows that may be computed at once; 0 if any.
    """
    blocks = tensors.blocks
    assert blocks is not None
    rows = _rows_of(blocks, problem)
    if rows is None:
        return None
    key, value = (padded_blocks(item, blocks.block_k) for item in tensors.kv)
    step = min(chunk_rows or _MOST_ROWS, _MOST_ROWS)
    outputs = []
    for span, order, valid in rows:
        for start in range(span.start, span.stop, step):
            part = range(start, min(start + step, span.stop))
            outputs.append(attend_gathered(tensors, problem, (order, valid), (key, value), part))
    return torch.cat(outputs, dim=2)


def _rows_of(
    blocks: BlockList, problem: AttentionProblem
) -> list[tuple[range, torch.Tensor, torch.Tensor]] | None:
    """Return (rows, numbers of blocks of keys, which of them count) of each block of rows.

    None where there are so many that copies of them cost more than a mask.
    """
    if blocks.block_q < _LEAST_ROWS:
        return None
    mask = blocks.to_mask(-(-problem.len_k // blocks.block_k))
    if bool((mask == mask[:1, :1]).all()):
        mask = mask[:1, :1]
    found, copied, visible = [], 0, 0
    for index, start in enumerate(range(0, problem.len_q, blocks.block_q)):
        rows = range(start, min(start + blocks.block_q, problem.len_q))
        begin, end = key_range(problem, rows.start, rows.stop)
        first, last = begin // blocks.block_k, max(-(-end // blocks.block_k), 1)
        first = min(first, last - 1)
        listed = mask[:, :, index, first:last]
        room = max(int(listed.sum(-1).max()), 1)
        order, valid = kept_first(listed, room)
        found.append((rows, order + first, valid))
        copied += room
        visible += last - first
    return found if copied <= _SHARES[mask.shape[:2] == (1, 1)] * visible else None


def padded_blocks(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return [B, H, N, size, X], the last block padded with zeros."""
    missing = -tokens.shape[2] % size
    blocks: torch.Tensor = F.pad(tokens, (0, 0, 0, missing)).unflatten(2, (-1, size))
    return blocks
