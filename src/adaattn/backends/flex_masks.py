"""What FlexAttention is given for a problem: changes of scores, keys that are seen, block masks.

What follows from positions and packed sequences is kept between calls.
"""

import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F

from adaattn.backends.block_list import listed_first
from adaattn.backends.common import packed_positions
from adaattn.backends.flex_tiles import (
    BLOCK,
    Packing,
    listed_tiles,
    tiles_by_position,
    written_tiles,
)
from adaattn.backends.interface import Tensors
from adaattn.backends.masks import stream_of
from adaattn.spec import AttentionProblem

__all__ = ["block_mask", "compiled_once", "score_mod"]

_KEPT_VALUES: Final = 64
_KEPT_FUNCTIONS: Final = 256

_ScoreMod = Callable[..., torch.Tensor]
_Value = TypeVar("_Value")
_Tiles = tuple[torch.Tensor, torch.Tensor]


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
    packing = _packing(tensors, problem)
    sequences = None if packing is None else packing[2:4]  # kept, unlike where they start
    distance_of = _distance(tensors, problem)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = distance_of(i, j)
        seen = distance == distance if sequences is None else sequences[0][i] == sequences[1][j]
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
    packing = _packing(tensors, problem)
    if packing is None:
        return lambda i, j: i + offset - j
    if problem.packed_square:  # both count from the same token
        return lambda i, j: i - j
    position_q, position_k = packing[4:]
    return lambda i, j: position_q[i] - position_k[j]


def _boolean(tensors: Tensors) -> torch.Tensor | None:
    """Return the mask if it is boolean."""
    mask = tensors.mask
    return mask if mask is not None and mask.dtype == torch.bool else None


def _packing(tensors: Tensors, problem: AttentionProblem) -> Packing | None:
    """Return each query's and each key's packed sequence and place in it; None if not packed."""
    starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if starts_q is None or starts_k is None:
        return None

    def made() -> tuple[torch.Tensor, ...]:
        return packed_positions(starts_q, starts_k, problem)

    facts = ("packing", problem.len_q, problem.len_k, problem.align)
    return Packing(starts_q, starts_k, *_kept(facts, tensors.query, (starts_q, starts_k), made))


_KEPT: OrderedDict[object, tuple[tuple[weakref.ref[torch.Tensor], ...], Any]] = OrderedDict()
_LOCK: Final = threading.Lock()


def _kept(
    facts: tuple[object, ...],
    like: torch.Tensor,
    sources: tuple[torch.Tensor, ...],
    make: Callable[[], _Value],
) -> _Value:
    """Return what ``make`` returns, made once while its sources live unchanged.

    A write to a source that PyTorch does not see is not noticed. Where a CUDA graph records the
    call it is made at each replay, of the numbers that are there then; each stream has its own.

    Args:
        facts: what it depends on beside the sources' numbers.
        like: a tensor of the call, on its device.
        sources: the tensors that are read.
        make: makes the value, which must not hold the sources.
    """
    if torch.compiler.is_compiling() or any(source.is_inference() for source in sources):
        return make()
    if _is_recorded(like):
        return make()
    key = (facts, stream_of(like), tuple((id(source), source._version) for source in sources))
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


def _stays_eager(tensor: torch.Tensor) -> bool:
    """Return whether nothing is to be compiled for a tensor here."""
    return not tensor.is_cuda or torch.compiler.is_compiling() or _is_recorded(tensor)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether a CUDA graph records what is computed with a tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_of(ref: weakref.ref[torch.Tensor], source: torch.Tensor) -> bool:
    """Return whether a reference is to this very tensor."""
    return ref() is source


def block_mask(tensors: Tensors, problem: AttentionProblem) -> Any:
    """Return the block mask, None if all is seen; without a boolean mask it is kept."""
    boolean, like = _boolean(tensors), tensors.query
    device = like.device
    packed = tensors.cu_seqlens_q is not None
    if boolean is None and not (problem.is_positional or packed or problem.has_blocks):
        return None
    batch, heads = (1, 1) if boolean is None else boolean.shape[:2]
    shape = (batch, heads, problem.len_q, problem.len_k)
    mask_mod = _mask_mod(tensors, problem)
    facts = (
        problem.len_q,
        problem.len_k,
        problem.is_causal,
        problem.align,
        problem.window,
        problem.dilation,
        device,
    )

    def tiles() -> _Tiles:
        if boolean is None:
            return tiles_by_position(problem, device, _packing(tensors, problem))
        return written_tiles(mask_mod, shape, device)

    def made() -> Any:
        packing = None if boolean is not None else _packing(tensors, problem)
        if packing is None or _stays_eager(packing.starts_q):
            lists = _lists(*tiles())
        else:
            packing = _widened(packing)
            compiled = compiled_once(_lists_by_position, (*facts, len(packing.starts_q)))
            lists = compiled(problem, device, packing)
        return _block_mask(lists, mask_mod, shape[2:])

    if tensors.blocks is not None:
        blocks = tensors.blocks
        own = boolean is not None

        def of_list() -> Any:
            partial, full = tiles() if own else _kept(("tiles", *facts), like, (), tiles)
            listed = listed_tiles(blocks, problem)
            return _block_mask(_lists(partial & listed, full & listed), mask_mod, shape[2:])

        if own:
            return of_list()
        listing = blocks.counts, blocks.indices
        return _kept((problem.block_size, *facts), like, listing, of_list)
    if boolean is not None:
        return made()
    starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    given = tuple(item for item in starts if item is not None)
    return _kept(("blocks", *facts), like, given, made)


def _lists_by_position(
    problem: AttentionProblem, device: torch.device, packing: Packing
) -> tuple[torch.Tensor, ...]:
    """Return the lists of tiles that packed sequences see: `_lists` of `tiles_by_position`."""
    return _lists(*tiles_by_position(problem, device, packing))


def _lists(partial: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return how many tiles, and which, in the order in which `BlockMask` takes them.

    Args:
        partial: tiles seen in part, boolean [B, H, Nq, Nk].
        full: those seen as a whole.
    """
    by_rows = (*listed_first(partial), *listed_first(full))
    return (*by_rows, *listed_first(partial.mT), *listed_first(full.mT))


def _block_mask(
    lists: tuple[torch.Tensor, ...], mask_mod: _ScoreMod, lengths: tuple[int, int]
) -> Any:
    """Return the block mask of lists of tiles."""
    from torch.nn.attention import flex_attention

    module: Any = flex_attention
    return module.BlockMask(lengths, *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod)


def _widened(packing: Packing) -> Packing:
    """Return a packing with empty sequences behind, up to a power of two: one graph serves many."""
    starts_q, starts_k = packing[:2]
    more = (1 << (len(starts_q) - 1).bit_length()) - len(starts_q)
    return Packing(
        F.pad(starts_q, (0, more), value=len(packing.sequence_q)),
        F.pad(starts_k, (0, more), value=len(packing.sequence_k)),
        *packing[2:],
    )


@lru_cache(maxsize=_KEPT_FUNCTIONS)
def compiled_once(function: types.FunctionType, facts: tuple[object, ...]) -> Callable[..., Any]:
    """Return a function compiled for the calls of equal facts.

    Each has a code object of its own. Dynamo stops compiling one after 8 shapes, and would go on
    with its eager form: FlexAttention's writes out all scores and only warns. Guards stay: without
    them a call of FlexAttention took as long (113 and 133 microseconds forward, H100, PyTorch 2.11,
    2026-11).
    """
    del facts
    code = function.__code__.replace(co_name=f"{function.__name__}_")
    own = types.FunctionType(code, function.__globals__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, dynamic=False, fullgraph=True)
