"""A tile of scores as one call of SDPA, what positions hide and ALiBi adds being its mask.

The mask is kept between calls, as a caller of SDPA would keep it.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.common import (
    head_windows,
    hides_nothing,
    key_range,
    packed_tile_seen,
    part_of,
    tile_mask,
)
from adaattn.backends.interface import Direct, Tensors
from adaattn.backends.masks import aligned_bias, may_keep, stream_of
from adaattn.backends.sdpa_call import fused_attention, needs_care, sdpa, sdpa_keywords
from adaattn.backends.tiles import identity, kept, made_tile, most_bytes, seen_tile, tile_key
from adaattn.spec import AttentionProblem, Aux, HeadGroup, MaskKind, Precision

__all__ = [
    "grown_chunk",
    "is_fused",
    "is_in_order",
    "is_plain",
    "listed_keys",
    "only_chunk",
    "packed_tile",
    "sdpa_mask",
    "sdpa_tile",
    "sliding_columns",
    "tile_masks",
    "whole_packed",
    "whole_tile",
    "zero_rows",
]

_FUSED_DIM: Final = 256
"""Largest D that PyTorch's fused kernels for GPUs surely take in training."""


def is_plain(problem: AttentionProblem) -> bool:
    """Return whether SDPA with a mask can compute a chunk."""
    beyond = problem.softcap > 0 or problem.has_sinks or problem.head_terms.value > 0
    if beyond or problem.aux is not Aux.NONE:
        return False
    # In 16 bits what a wider mask says would be lost, and sums of gradients over distances.
    half = problem.precision in (Precision.BF16, Precision.FP16)
    return not (half and (problem.mask_is_wide or problem.alibi_requires_grad))


def is_fused(problem: AttentionProblem) -> bool:
    """Return whether SDPA surely takes a kernel that writes no scores, with a mask too."""
    unserved = problem.mask_requires_grad or problem.alibi_requires_grad or problem.dropout_p
    if unserved or problem.value_dim != problem.head_dim:
        return False
    if problem.device_type == "cpu":
        return problem.allowed_sdpa is None or "sdpa.flash" in problem.allowed_sdpa
    grouped = problem.group_size > 1 and problem.sdpa_default != "sdpa.cudnn"
    fits = problem.head_dim % 8 == 0 and problem.head_dim <= _FUSED_DIM
    known = problem.precision is not Precision.FP64
    return problem.allowed_sdpa is None and fits and known and not grouped


def is_in_order(tensors: Tensors, problem: AttentionProblem, lengths: tuple[int, int]) -> bool:
    """Return whether SDPA's flag says all that there is to say of so many rows and keys."""
    biased = tensors.alibi_slopes is not None or tensors.blocks is not None
    if biased or lengths[0] != lengths[1] or not lengths[0]:
        return False
    return problem.is_causal and problem.window == (-1, -1) and problem.dilation == 1


def sdpa_tile(
    tile: Tensors, problem: AttentionProblem, rows: range, cols: range, step: int
) -> tuple[torch.Tensor, ...]:
    """Return the output of some rows by one SDPA call.

    Args:
        tile: the tensors of these rows and keys alone.
        problem: of the whole call.
        rows: numbers of the query rows.
        cols: numbers of the keys.
        step: rows of every chunk but the last.
    """
    if not cols:
        return zero_rows(tile)
    mask = sdpa_mask(tile, problem, rows, cols, step)
    return (fused_attention(tile.query, tile.key, tile.value, mask, problem),)


def sdpa_mask(
    tile: Tensors, problem: AttentionProblem, rows: range, cols: range, step: int
) -> torch.Tensor | None:
    """Return the mask of `sdpa_tile`, boolean or added; None where nothing is hidden or added."""
    query = tile.query
    given = tile.mask is not None or tile.blocks is not None
    if not given and tile.alibi_slopes is None:
        hidden = not hides_nothing(problem, rows, cols)
        return seen_tile(problem, rows, cols, query, query.dtype) if hidden else None
    if not given:
        return _alibi(tile, problem, rows, cols, step)
    bias, mask = tile_masks(tile, problem, rows, cols)
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
    return mask


def only_chunk(problem: AttentionProblem, group: HeadGroup) -> tuple[range, range] | None:
    """Return the rows and keys of a problem without masks that is one chunk; None where not."""
    rows, cols = range(problem.len_q), range(*key_range(problem, 0, problem.len_q))
    several = 0 < group.launch.chunk_rows < problem.len_q or problem.num_sequences > 0
    given = problem.mask is not MaskKind.NONE or problem.has_blocks
    return None if several or given or not (rows and cols) else (rows, cols)


def grown_chunk(
    tensors: Tensors, problem: AttentionProblem
) -> tuple[Tensors, AttentionProblem, range, range]:
    """Return a call's only chunk, with its problem, rows and keys, for the keys that there are."""
    grown = replace(problem, len_k=tensors.key.shape[2])
    rows, cols = range(grown.len_q), range(*key_range(grown, 0, grown.len_q))
    return part_of(tensors, rows, cols), grown, rows, cols


def whole_tile(problem: AttentionProblem, group: HeadGroup) -> Direct | None:
    """Return the call of SDPA that a problem is, with its mask; None where it is none.

    A window over a hundred tokens takes 15 us more than SDPA through `sdpa_tile`, 5 us through
    this (AMD EPYC 9004, PyTorch 2.13, 2026-11).
    """
    chunk = only_chunk(problem, group)
    careful = problem.alibi_requires_grad or needs_care(problem)
    if chunk is None or careful or not is_plain(problem):
        return None
    rows, cols = chunk
    keywords = sdpa_keywords(problem)
    part = slice(cols.start, cols.stop) if len(cols) < problem.len_k else None
    hidden = not hides_nothing(problem, rows, cols)
    is_masked = hidden or problem.has_alibi
    place: object = None
    recent = _Recent()

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        sinks: None = None,
        slopes: torch.Tensor | None = None,
        *starts: None,
    ) -> torch.Tensor:
        if key.shape[2] != problem.len_k or (is_masked and not may_keep(query)):
            if slopes is not None and slopes.dim() == 1:
                slopes = slopes.unsqueeze(0)
            tensors = Tensors.of(query, key, value, alibi_slopes=slopes)
            return sdpa_tile(*grown_chunk(tensors, problem), step=len(rows))[0]
        if part is not None:
            key, value = key[:, :, part], value[:, :, part]
        if not is_masked:
            return sdpa(query, key, value, **keywords)
        nonlocal place, recent
        place = place or tile_key(problem, rows, cols, query, query.dtype)
        bias = recent.bias_of(slopes, query)
        if bias is None and slopes is not None:
            bias = _kept_bias(slopes, place, query, partial(_bias, slopes, problem, rows, cols))
            recent = _Recent(bias, slopes, query)
        elif bias is None:
            make = partial(made_tile, problem, rows, cols, query.device, query.dtype)
            bias = kept((place, stream_of(query)), make)
            recent = _Recent(bias, None, query)
        return sdpa(query, key, value, bias, **keywords)

    return run


class _Recent:
    """The last call's mask, known by its slopes' numbers, on a GPU by their identity.

    Both may be gone.

    Args:
        bias: the mask; None is none yet.
        slopes: what it was made from beside positions.
        query: of the call.
    """

    __slots__ = ("bias", "place", "slopes")

    def __init__(
        self,
        bias: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
    ) -> None:
        self.bias = self.slopes = self.place = None
        if type(bias) is not torch.Tensor or query is None:  # none, or one of a mode of tensors
            return
        if query.is_cuda and slopes is not None and slopes.is_inference():  # it has no version
            return
        self.bias, self.place = weakref.ref(bias), self._place_of(slopes, query)
        self.slopes = None if slopes is None else weakref.ref(slopes)

    @staticmethod
    def _place_of(slopes: torch.Tensor | None, query: torch.Tensor) -> object:
        """Return what the mask's numbers change with, on a GPU as far as PyTorch knows."""
        if not query.is_cuda:
            return None if slopes is None else slopes.tolist()
        changes = () if slopes is None else (slopes._version, slopes.data_ptr())
        return *changes, stream_of(query)

    def bias_of(self, slopes: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a call like the last one, or None."""
        if self.bias is None or self._place_of(slopes, query) != self.place:
            return None
        if query.is_cuda and self.slopes is not None and self.slopes() is not slopes:
            return None
        return self.bias()


def whole_packed(problem: AttentionProblem) -> Direct:
    """Return the call of SDPA that packed sequences are, with a mask over all tokens."""
    keywords = sdpa_keywords(problem)

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        sinks: None,
        slopes: None,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
    ) -> torch.Tensor:
        same = starts_k is starts_q
        bounds_q = () if starts_q.is_cuda else tuple(starts_q.tolist())
        bounds_k = bounds_q if same or starts_k.is_cuda else tuple(starts_k.tolist())
        tile = packed_tile(query, (starts_q, starts_k), (bounds_q, bounds_k), problem)
        return sdpa(query, key, value, tile, **keywords)

    return run


def packed_tile(
    query: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    bounds: tuple[tuple[int, ...], tuple[int, ...]],
    problem: AttentionProblem,
    *,
    hides: bool = False,
) -> torch.Tensor:
    """Return which keys the rows of all packed sequences see, [Tq, Tk] to be added; kept.

    Args:
        query: [1, Hq, Tq, D].
        starts: of the packed queries and keys, int32 [N + 1].
        bounds: the same on the host, () where they are not known there.
        problem: without mask and ALiBi; what it hides, it hides in each sequence.
        hides: return which they do not see, boolean.
    """

    def make() -> torch.Tensor:
        seen = packed_tile_seen(*starts, problem)
        return ~seen if hides else aligned_bias(seen, query.dtype)

    if not may_keep(query):
        return make()
    known: tuple[object, object] | None = (bounds, None)
    if not bounds[0]:
        known = identity(starts)
    if known is None:
        return make()
    lengths = range(problem.len_q), range(problem.len_k)
    dtype = torch.bool if hides else query.dtype
    place = (problem.align, tile_key(problem, *lengths, query, dtype))
    return kept((known[0], place, stream_of(query)), make, known[1])


def _alibi(
    tile: Tensors, problem: AttentionProblem, rows: range, cols: range, step: int
) -> torch.Tensor:
    """Return ALiBi's bias and what position hides, [B or 1, Hq, R, C] in the query's dtype."""
    slopes, query = tile.alibi_slopes, tile.query
    assert slopes is not None
    keeps = may_keep(query) and not (slopes.requires_grad and torch.is_grad_enabled())
    if not keeps:
        return _bias(slopes, problem, rows, cols, query)
    columns = slice(None)
    sliding = sliding_columns(problem, step)
    size = slopes.numel() * step * len(sliding) * query.element_size()
    if sliding and size <= most_bytes(query.device):
        begin = cols.start - rows.start - sliding.start
        columns = slice(begin, begin + len(cols))
        rows, cols = range(step), sliding
    make = partial(_bias, slopes, problem, rows, cols)
    bias = _kept_bias(slopes, tile_key(problem, rows, cols, query, query.dtype), query, make)
    return bias[:, :, : query.shape[2], columns]


def sliding_columns(problem: AttentionProblem, step: int) -> range:
    """Return the columns of a tile of ``step`` rows in which every chunk's bias lies; none for one.

    What ALiBi adds depends on distances alone, so that chunks are windows of one tile, whose row
    0 stands at row 0 and whose columns begin below key 0. Chunks of a window are alike anyway.

    Args:
        problem: with ALiBi.
        step: rows of every chunk but the last.
    """
    if step >= problem.len_q or problem.window[0] >= 0 or problem.num_sequences:
        return range(0)
    last = (problem.len_q - 1) // step * step
    seen = step + problem.offset if problem.is_causal else problem.len_k
    return range(-last, max(seen, 1))


def _kept_bias(
    slopes: torch.Tensor,
    place: object,
    query: torch.Tensor,
    make: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return ALiBi's bias of a tile, kept by the slopes' numbers, on a GPU by their identity."""
    if not slopes.is_cuda:
        leading = 1 if slopes.dim() == 1 else slopes.shape[0]
        return kept(("alibi", leading, *slopes.flatten().tolist(), place), partial(make, query))
    known = identity((slopes,))
    if known is None:
        return make(query)
    return kept(("alibi", known[0], place, stream_of(query)), partial(make, query), known[1])


def _bias(
    slopes: torch.Tensor, problem: AttentionProblem, rows: range, cols: range, query: torch.Tensor
) -> torch.Tensor:
    """Return what slopes, [Hq] or [B or 1, Hq], add to the scores, -inf where position hides."""
    slopes = slopes if slopes.dim() == 2 else slopes.unsqueeze(0)
    tile = Tensors.of(query, query, query, alibi_slopes=slopes)
    bias, seen = tile_masks(tile, problem, rows, cols)
    assert bias is not None
    bias = bias.to(query.dtype)
    bias = bias if seen is None else torch.where(seen, bias, float("-inf"))
    return aligned_bias(bias, query.dtype)


def listed_keys(blocks: BlockList, rows: range, cols: range, query: torch.Tensor) -> torch.Tensor:
    """Return which keys of a tile are in listed blocks, boolean [B or 1, Hq or 1, R, C]; kept."""
    known = identity((blocks.counts, blocks.indices)) if may_keep(query) else None
    make = partial(blocks.seen, rows, cols)
    if known is None:
        return make()
    sizes = blocks.block_q, blocks.block_k
    return kept(("blocks", known[0], sizes, rows, cols, stream_of(query)), make, known[1])


def zero_rows(tile: Tensors) -> tuple[torch.Tensor, ...]:
    """Return zeros for rows that see no key, tied to the inputs so that gradients are zeros."""
    tied = [item[..., :0].sum() for item in (tile.query, tile.key, tile.value)]
    zero = torch.stack(tied).sum().to(tile.query.dtype)
    return (zero.expand(*tile.query.shape[:-1], tile.value.shape[-1]).contiguous(),)


def tile_masks(
    tile: Tensors, problem: AttentionProblem, rows: range, cols: range
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (what is added to the scores, which keys are seen) of a tile; None for nothing."""
    bias: torch.Tensor | None = None
    if tile.alibi_slopes is not None:
        numbers = torch.arange(rows.start, rows.stop, device=tile.query.device)
        bias, _ = tile_mask(replace(tile, mask=None), problem, numbers, cols, all_seen=True)
    seen: torch.Tensor | None = None
    if not hides_nothing(problem, rows, cols):
        seen = seen_tile(problem, rows, cols, tile.query, torch.bool)
    if tile.head_window is not None:
        numbers = torch.arange(rows.start, rows.stop, device=tile.query.device)
        windows = head_windows(tile.head_window, problem, numbers, cols)
        seen = windows if seen is None else windows & seen
    if tile.blocks is not None:
        listed = listed_keys(tile.blocks, rows, cols, tile.query)
        seen = listed if seen is None else listed & seen
    if tile.mask is None:
        return bias, seen
    if tile.mask.dtype == torch.bool:
        return bias, tile.mask if seen is None else tile.mask & seen
    return tile.mask if bias is None else bias + tile.mask, seen
