"""A tile of scores as one call of SDPA, what positions hide and ALiBi adds being its mask.

The mask is kept between calls, as a caller of SDPA would keep it.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

import torch

from adaattn.backends.common import (
    fused_attention,
    hides_nothing,
    key_range,
    part_of,
    sdpa,
    sdpa_keywords,
    tile_mask,
    visible_tile,
)
from adaattn.backends.interface import Direct, Tensors
from adaattn.backends.masks import may_keep
from adaattn.backends.tiles import kept, kept_tile, made_tile, seen_tile, tile_key
from adaattn.spec import AttentionProblem, Aux, HeadGroup, MaskKind, Precision

__all__ = ["is_plain", "packed_tile", "sdpa_tile", "tile_masks", "whole_tile"]

_SMALL_BYTES: Final = 1 << 16
"""Slopes of which a bias is kept, and which it keeps alive, are no larger."""


def is_plain(problem: AttentionProblem) -> bool:
    """Return whether SDPA with a mask can compute a chunk."""
    if problem.softcap > 0 or problem.has_sinks or problem.aux is not Aux.NONE:
        return False
    # In 16 bits what a wider mask says would be lost, and sums of gradients over distances.
    half = problem.precision in (Precision.BF16, Precision.FP16)
    return not (half and (problem.mask_is_wide or problem.alibi_requires_grad))


def sdpa_tile(
    tile: Tensors, problem: AttentionProblem, rows: range, cols: range
) -> tuple[torch.Tensor, ...]:
    """Return the output of some rows by one SDPA call."""
    if not cols:
        return _blind(tile)
    query = tile.query
    if tile.mask is None and tile.alibi_slopes is None:
        hidden = not hides_nothing(problem, rows, cols)
        mask = seen_tile(problem, rows, cols, query, query.dtype) if hidden else None
    elif tile.mask is None:
        mask = _alibi(tile, problem, rows, cols)
    else:
        bias, mask = tile_masks(tile, problem, rows, cols)
        if bias is not None:
            bias = bias.to(query.dtype)
            mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
    return (fused_attention(query, tile.key, tile.value, mask, problem),)


def whole_tile(problem: AttentionProblem, group: HeadGroup) -> Direct | None:
    """Return the call of SDPA that a problem on a CPU is, with its mask; None where it is none.

    A window over a hundred tokens takes 15 us more than SDPA through `sdpa_tile`, 5 us through
    this (AMD EPYC 9004, PyTorch 2.13, 2026-11).
    """
    rows, cols = range(problem.len_q), range(*key_range(problem, 0, problem.len_q))
    is_one = not 0 < group.launch.chunk_rows < problem.len_q and not problem.num_sequences
    given = problem.mask is not MaskKind.NONE or problem.alibi_requires_grad
    if problem.device_type != "cpu" or not (is_one and rows and cols) or given:
        return None
    if not is_plain(problem):
        return None
    keywords = sdpa_keywords(problem)
    part = slice(cols.start, cols.stop) if len(cols) < problem.len_k else None
    hidden = not hides_nothing(problem, rows, cols)
    place: object = None

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        sinks: None = None,
        slopes: torch.Tensor | None = None,
        *starts: None,
    ) -> torch.Tensor:
        if key.shape[2] != problem.len_k or not may_keep(query):
            if slopes is not None and slopes.dim() == 1:
                slopes = slopes.unsqueeze(0)
            grown = replace(problem, len_k=key.shape[2])
            tensors = Tensors(query=query, key=key, value=value, alibi_slopes=slopes)
            read = range(*key_range(grown, 0, grown.len_q))
            return sdpa_tile(part_of(tensors, rows, read), grown, rows, read)[0]
        if part is not None:
            key, value = key[:, :, part], value[:, :, part]
        nonlocal place
        place = place or tile_key(problem, rows, cols, query, query.dtype)
        bias: torch.Tensor | None = None
        if slopes is not None:
            make = partial(_bias, slopes, problem, rows, cols, query)
            bias = kept((_numbers(slopes), place), make)
        elif hidden:
            make = partial(made_tile, problem, rows, cols, query.device, query.dtype)
            bias = kept(((), place), make)
        return sdpa(query, key, value, bias, **keywords)

    return run


def packed_tile(
    bounds_q: tuple[int, ...],
    bounds_k: tuple[int, ...],
    problem: AttentionProblem,
    query: torch.Tensor,
) -> torch.Tensor:
    """Return which keys the rows of all packed sequences see, [T, T] to be added; kept.

    Args:
        bounds_q: of the sequences' rows.
        bounds_k: of their keys.
        problem: without mask and ALiBi; what it hides, it hides in each sequence.
        query: tells dtype and device.
    """
    rows, cols = range(problem.len_q), range(problem.len_k)

    def make() -> torch.Tensor:
        found = query.new_full((len(rows), len(cols)), float("-inf"))
        for (start, stop), (first, last) in zip(
            pairwise(bounds_q), pairwise(bounds_k), strict=True
        ):
            part = replace(problem, num_sequences=0, len_q=stop - start, len_k=last - first)
            numbers = torch.arange(part.len_q, device=query.device)
            keys = torch.arange(part.len_k, device=query.device)
            seen = visible_tile(part, numbers, keys)
            block = found[start:stop, first:last]
            block.zero_() if seen is None else block.masked_fill_(seen, 0.0)
        return found

    if not may_keep(query):
        return make()
    return kept((bounds_q, bounds_k, tile_key(problem, rows, cols, query, query.dtype)), make)


def _alibi(tile: Tensors, problem: AttentionProblem, rows: range, cols: range) -> torch.Tensor:
    """Return ALiBi's bias and what position hides, [B or 1, Hq, R, C] in the query's dtype."""
    slopes, query = tile.alibi_slopes, tile.query
    assert slopes is not None
    make = partial(_bias, slopes, problem, rows, cols, query)
    if not may_keep(query) or (slopes.requires_grad and torch.is_grad_enabled()):
        return make()
    if not slopes.is_cuda:
        return kept_tile(_numbers(slopes), problem, rows, cols, query, query.dtype, make)
    # A write through ``.data``, which PyTorch does not count, is not noticed on a GPU.
    own = slopes._base if slopes._base is not None else slopes
    if own.is_inference() or own.untyped_storage().nbytes() > _SMALL_BYTES:
        return make()
    place = (own._version, own.data_ptr(), slopes.shape, slopes.stride(), slopes.storage_offset())
    return kept_tile(("alibi", id(own), *place), problem, rows, cols, query, query.dtype, make, own)


def _numbers(slopes: torch.Tensor) -> tuple[object, ...]:
    """Return what a bias depends on of slopes, [Hq] or [B or 1, Hq], on a CPU."""
    if slopes.dim() == 1:
        return ("alibi", 1, *slopes.tolist())
    return ("alibi", slopes.shape[0], *slopes.flatten().tolist())


def _bias(
    slopes: torch.Tensor, problem: AttentionProblem, rows: range, cols: range, query: torch.Tensor
) -> torch.Tensor:
    """Return what slopes, [Hq] or [B or 1, Hq], add to the scores, -inf where position hides."""
    slopes = slopes if slopes.dim() == 2 else slopes.unsqueeze(0)
    tile = Tensors(query=query, key=query, value=query, alibi_slopes=slopes)
    bias, seen = tile_masks(tile, problem, rows, cols)
    assert bias is not None
    bias = bias.to(query.dtype)
    return bias if seen is None else torch.where(seen, bias, float("-inf"))


def _blind(tile: Tensors) -> tuple[torch.Tensor, ...]:
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
    if tile.mask is None:
        return bias, seen
    if tile.mask.dtype == torch.bool:
        return bias, tile.mask if seen is None else tile.mask & seen
    return tile.mask if bias is None else bias + tile.mask, seen
