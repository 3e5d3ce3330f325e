"""What FlexAttention is given for a problem: changes of scores, keys that are seen, block masks.

What follows from positions and packed sequences is kept between calls.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F

from adaattn.backends.block_list import BlockList, listed_first
from adaattn.backends.common import packed_positions
from adaattn.backends.interface import Tensors
from adaattn.spec import AttentionProblem

__all__ = ["BLOCK", "block_mask", "score_mod"]

BLOCK: Final = 128
"""Side of FlexAttention's blocks."""

_KEPT_VALUES: Final = 64
_MASK_ELEMENTS: Final = 1 << 22
"""Decisions of a mask that are written out at once, about 20 bytes each with their distances."""

_ScoreMod = Callable[..., torch.Tensor]
_Value = TypeVar("_Value")


def score_mod(tensors: Tensors, problem: AttentionProblem) -> _ScoreMod | None:
    """Return the change of a score by softcap, ALiBi and an additive mask; None for none."""
    softcap, slopes = problem.softcap, tensors.alibi_slopes
    mask = tensors.mask if tensors.mask is not None and tensors.mask.is_floating_point() else None
    if softcap == 0 and slopes is None and mask is None:
        return None
    if slopes is not None:
        slopes = slopes.float().expand(problem.batch, problem.num_heads).contiguous()
    if mask is not None:
        mask = mask.expand(problem.batch, problem.num_heads, problem.len_q, problem.len_k)
    distance_of = _distance(tensors, problem)

    def changed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[b, h] * torch.abs(distance_of(i, j))
        if mask is not None:
            score = score + mask[b, h, i, j]
        return score

    return changed


def _mask_mod(tensors: Tensors, problem: AttentionProblem) -> _ScoreMod:
    """Return which keys are seen, by position, boolean mask and packed sequence."""
    boolean = _boolean(tensors)
    if boolean is not None:
        boolean = boolean.expand(problem.batch, problem.num_heads, problem.len_q, problem.len_k)
    left, right = problem.window
    right = 0 if problem.is_causal else right
    dilation = problem.dilation
    sequence_q, sequence_k, _, _ = _packing(tensors, problem)
    distance_of = _distance(tensors, problem)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = distance_of(i, j)
        seen = distance == distance if sequence_q is None else sequence_q[i] == sequence_k[j]
        if right >= 0:
            seen = seen & (distance >= -right)
        if left >= 0:
            seen = seen & (distance <= left)
        if dilation > 1:
            seen = seen & (distance % dilation == 0)
        if boolean is not None:
            seen = seen & boolean[b, h, i, j]
        return seen

    return mask_mod


def _distance(tensors: Tensors, problem: AttentionProblem) -> Callable[[Any, Any], Any]:
    """Return how far before query i key j is, of those of one sequence."""
    offset = problem.offset
    _, _, position_q, position_k = _packing(tensors, problem)
    if position_q is None:
        return lambda i, j: i + offset - j
    if problem.packed_square:  # both count from the same token
        return lambda i, j: i - j
    return lambda i, j: position_q[i] - position_k[j]


def _boolean(tensors: Tensors) -> torch.Tensor | None:
    """Return the mask if it is boolean."""
    mask = tensors.mask
    return mask if mask is not None and mask.dtype == torch.bool else None


def _packing(tensors: Tensors, problem: AttentionProblem) -> tuple[Any, Any, Any, Any]:
    """Return each query's and each key's packed sequence and place in it; Nones if not packed."""
    starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if starts_q is None or starts_k is None:
        return None, None, None, None

    def made() -> tuple[Any, Any, Any, Any]:
        return packed_positions(starts_q, starts_k, problem)

    facts = ("packing", problem.len_q, problem.len_k, problem.align)
    return _kept(facts, (starts_q, starts_k), made)


_KEPT: OrderedDict[object, tuple[tuple[weakref.ref[torch.Tensor], ...], Any]] = OrderedDict()
_LOCK: Final = threading.Lock()


def _kept(
    facts: tuple[object, ...], sources: tuple[torch.Tensor, ...], make: Callable[[], _Value]
) -> _Value:
    """Return what ``make`` returns, made once while its sources live unchanged.

    A write to a source that PyTorch does not see is not noticed.

    Args:
        facts: what it depends on beside the sources' numbers.
        sources: the tensors that are read.
        make: makes the value, which must not hold the sources.
    """
    if torch.compiler.is_compiling() or any(source.is_inference() for source in sources):
        return make()
    key = (facts, tuple((id(source), source._version) for source in sources))
    with _LOCK:
        refs, value = _KEPT.get(key, ((), None))
        if value is not None and all(map(_is_of, refs, sources)):
            _KEPT.move_to_end(key)
            kept: _Value = value
            return kept
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    with _LOCK:
        _KEPT[key] = (
            tuple(weakref.ref(source, lambda _: _KEPT.pop(key, None)) for source in sources),
            made,
        )
        while len(_KEPT) > _KEPT_VALUES:
            _KEPT.popitem(last=False)
    return made


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether a CUDA graph records what is computed with a tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_of(ref: weakref.ref[torch.Tensor], source: torch.Tensor) -> bool:
    """Return whether a reference is to this very tensor."""
    return ref() is source


def block_mask(tensors: Tensors, problem: AttentionProblem) -> Any:
    """Return the block mask, None if all is seen; without a boolean mask it is kept."""
    boolean, device = _boolean(tensors), tensors.query.device
    packed = tensors.cu_seqlens_q is not None
    if boolean is None and not (problem.is_positional or packed or problem.has_blocks):
        return None
    batch, heads = (1, 1) if boolean is None else boolean.shape[:2]
    shape = (batch, heads, problem.len_q, problem.len_k)
    mask_mod = _mask_mod(tensors, problem)

    def tiles() -> tuple[torch.Tensor, torch.Tensor]:
        if boolean is None:
            return _tiles_by_position(tensors, problem)
        return _written_tiles(mask_mod, shape, device)

    def made() -> Any:
        return _of_tiles(*tiles(), mask_mod, shape[2:])

    if boolean is not None and tensors.blocks is None:
        return made()
    facts = (
        "blocks",
        problem.len_q,
        problem.len_k,
        problem.is_causal,
        problem.align,
        problem.window,
        problem.dilation,
        device,
    )
    if tensors.blocks is not None:
        blocks = tensors.blocks

        def of_list() -> Any:
            own = boolean is not None or _is_recorded(blocks.counts)
            partial, full = tiles() if own else _kept(("tiles", *facts), (), tiles)
            listed = _listed_tiles(blocks, problem)
            return _of_tiles(partial & listed, full & listed, mask_mod, shape[2:])

        # Recorded by a CUDA graph it is made at each replay, of the numbers that are there then.
        if boolean is not None or _is_recorded(blocks.counts):
            return of_list()
        return _kept((problem.block_size, *facts), (blocks.counts, blocks.indices), of_list)
    starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    return _kept(facts, tuple(item for item in starts if item is not None), made)


def _tiles_by_position(
    tensors: Tensors, problem: AttentionProblem
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles are seen in part, and which as a whole: boolean [1, 1, Nq, Nk] both.

    From the edges of tiles and packed sequences alone. A tile in which several sequences meet is
    said to be seen in part, though a window may hide all of it.
    """
    left, right = problem.window
    right = 0 if problem.is_causal else right
    device, dilation = tensors.query.device, problem.dilation
    row, last_row = (item[:, None] for item in _edges(problem.len_q, device))
    key, last_key = _edges(problem.len_k, device)
    whole = (last_row - row == BLOCK - 1) & (last_key - key == BLOCK - 1)
    meet, several = torch.ones_like(whole), torch.zeros_like(whole)
    sequence_q, sequence_k, position_q, position_k = _packing(tensors, problem)
    if sequence_q is None:
        least, most = row + problem.offset - last_key, last_row + problem.offset - key
    else:
        whole &= sequence_q[row] == sequence_q[last_row]
        whole &= sequence_k[key] == sequence_k[last_key]
        first = torch.maximum(sequence_q[row], sequence_k[key]).long()
        last = torch.minimum(sequence_q[last_row], sequence_k[last_key])
        rows = _part(tensors.cu_seqlens_q, problem.len_q, first, row, last_row)
        keys = _part(tensors.cu_seqlens_k, problem.len_k, first, key, last_key)
        meet, several = first <= last, first < last
        for begin, end in (rows, keys):
            meet = meet & (begin <= end)
        (row, last_row), (key, last_key) = (
            (places[begin.clamp(max=len(places) - 1)], places[end.clamp(min=0)])
            for places, (begin, end) in ((position_q, rows), (position_k, keys))
        )
        least, most = row - last_key, last_row - key
    lowest = least.clamp(min=-right) if right >= 0 else least
    highest = most.clamp(max=left) if left >= 0 else most
    highest = highest.div(dilation, rounding_mode="floor") * dilation
    full = whole & meet & (lowest == least) & (highest == most) & (dilation == 1)
    seen = several | (meet & (lowest <= highest))
    return (seen & ~full)[None, None], full[None, None]


def _edges(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last token of each tile."""
    first = torch.arange(0, length, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=length - 1)


def _part(
    starts: torch.Tensor | None,
    length: int,
    sequence: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last of a tile's tokens that are a packed sequence's."""
    assert starts is not None
    bounds = F.pad(starts.long(), (0, 1), value=length)
    return torch.maximum(bounds[sequence], first), torch.minimum(bounds[sequence + 1] - 1, last)


def _written_tiles(
    mask_mod: _ScoreMod, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles are seen in part, and which as a whole: boolean [B, H, Nq, Nk] both.

    Some rows of tiles are written out at a time: ``create_block_mask`` writes out all Sq x Sk
    decisions at once, 8 bytes each while it sums them up: 34 GB at 64K tokens.

    Args:
        mask_mod: whether query i of batch b and head h sees key j, for index tensors.
        shape: (B, H, Sq, Sk).
        device: where the mask is made.
    """
    batch, heads, len_q, len_k = shape
    blocks_q = -(-len_q // BLOCK)
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    j = torch.arange(len_k, device=device)
    step = max(_MASK_ELEMENTS // (batch * heads * max(len_k, 1) * BLOCK), 1)
    seen, whole = [], []
    for first in range(0, blocks_q, step):
        rows = range(first * BLOCK, min((first + step) * BLOCK, len_q))
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        part = mask_mod(b, h, i, j).expand(batch, heads, len(rows), len_k)
        part = F.pad(part, (0, -len_k % BLOCK, 0, -len(rows) % BLOCK))
        tiles = part.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        counts = tiles.sum(dim=(3, 5), dtype=torch.int32)
        whole.append(counts == BLOCK * BLOCK)
        seen.append((counts > 0) & ~whole[-1])
    return torch.cat(seen, dim=2), torch.cat(whole, dim=2)


def _of_tiles(
    partial: torch.Tensor, full: torch.Tensor, mask_mod: _ScoreMod, lengths: tuple[int, int]
) -> Any:
    """Return the block mask of tiles that are seen in part, and of those seen as a whole."""
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        *listed_first(partial),
        *listed_first(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=lengths,
    )


def _listed_tiles(blocks: BlockList, problem: AttentionProblem) -> torch.Tensor:
    """Return which tiles are in listed blocks, which consist of whole tiles."""
    listed = blocks.to_mask(-(-problem.len_k // blocks.block_k))
    listed = listed.repeat_interleave(blocks.block_q // BLOCK, 2)
    listed = listed.repeat_interleave(blocks.block_k // BLOCK, 3)
    return listed[:, :, : -(-problem.len_q // BLOCK), : -(-problem.len_k // BLOCK)]
