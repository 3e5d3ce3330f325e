"""The backward pass of the Hopper kernels: what is worked out once for a layout, and launched."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.allocation import output_like, place_of, placed
from adaattn.backends.common import with_dense_columns
from adaattn.backends.compiled_before import note
from adaattn.backends.device.launch import View
from adaattn.backends.hopper.gradient_launch import (
    ROW_BLOCK,
    TILE_NUMBERS,
    GradientVariant,
    choose_gradients,
)
from adaattn.backends.hopper.gradient_numbers import (
    num_block_heads,
    num_key_tiles,
    numbers_of,
    split_numbers_of,
)
from adaattn.backends.hopper.gradient_passes import MaskReading, Pass, SinglePass, SplitPass
from adaattn.backends.hopper.launch import MASK_ALIGNMENT, tiles_of
from adaattn.backends.hopper.prepared import DTYPES, is_aligned, strides_of
from adaattn.backends.hopper.views import Layouts, head_view, is_elsewhere, made_readable
from adaattn.backends.interface import Tensors
from adaattn.backends.masks import with_rank
from adaattn.backends.operators import Kept
from adaattn.backends.own_kernels import compiling, kept_by_problem
from adaattn.spec import AttentionProblem

__all__ = ["backward_of", "noted_as"]

_SUM_COLUMNS: Final = 256
"""Numbers of a row as TMA adds sums."""

_WRITTEN: Final = ("query", "key", "value")
"""Whose gradients kernels write, in this order."""

_Optional = torch.Tensor | None
_Strides = tuple[int, ...]


def noted_as(problem: AttentionProblem) -> tuple[object, ...]:
    """Return what says, before there are tensors, which kernels a problem's training takes."""
    return ("hopper gradients", choose_gradients(problem))


class _Backward:
    """Launches the backward pass of one problem; what a layout of tensors needs is kept."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._layouts: Layouts[Pass] = Layouts(made_readable)

    def __call__(
        self,
        tensors: Tensors,
        kept: Kept,
        upstream: torch.Tensor,
        lse_upstream: _Optional,
        wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients that are wanted."""
        if is_elsewhere(upstream):
            with torch.cuda.device(upstream.device):
                return self(tensors, kept, upstream, lse_upstream, wanted)
        read: tuple[torch.Tensor, ...]
        read = (tensors.query, tensors.key, tensors.value, upstream, kept.output)
        lse, slopes = kept.lse.contiguous(), tensors.alibi_slopes
        if lse_upstream is not None:
            lse_upstream = lse_upstream.float().contiguous()
        if slopes is not None:
            slopes = with_dense_columns(slopes if slopes.dtype in DTYPES else slopes.float())
        starts: tuple[_Optional, _Optional] = (None, None)
        if tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None:
            starts = (tensors.cu_seqlens_q.contiguous(), tensors.cu_seqlens_k.contiguous())
        mask = tensors.mask
        if mask is not None and mask.dtype not in DTYPES:
            mask = mask.float()
        given, has_lse_gradient = (mask, slopes, *starts), lse_upstream is not None
        read, layout, prepared = self._layouts.find(read, _layout, *given, has_lse_gradient)
        if prepared is None:
            prepared = _prepare(self._problem, read, mask, slopes, starts[0], has_lse_gradient)
            self._layouts.keep(layout, prepared)
            note(noted_as(self._problem))
        written, terms = prepared.run(read, lse, lse_upstream, mask, slopes, starts)
        found = dict(zip(_WRITTEN, written, strict=True))
        if "sinks" in wanted:
            assert tensors.sinks is not None
            found["sinks"] = _of_sinks(tensors.sinks, terms, tensors.query.shape)
        return {name: found[name] for name in wanted}

    def of_output(
        self,
        wanted: tuple[bool, ...],
        upstream: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: _Optional = None,
        sinks: _Optional = None,
        slopes: _Optional = None,
        starts_q: _Optional = None,
        starts_k: _Optional = None,
    ) -> tuple[_Optional, ...]:
        """Return the gradients of q, k, v, mask, sinks and slopes where the output alone has one.

        Those of q, k and v are always there; masks and slopes have none.
        """
        assert True not in wanted[3:4] and True not in wanted[5:6], "refused before"
        read = query, key, value, upstream, output
        prepared = self._layouts.again(read, _layout, mask, slopes, starts_q, starts_k)
        of_sinks = None
        if prepared is None or is_elsewhere(upstream) or not lse.is_contiguous():
            given = (query, key, value, mask, sinks, slopes, starts_q, starts_k)
            kept = Kept(output=output, lse=lse)
            names = (*_WRITTEN, "sinks") if sinks is not None and wanted[4] else _WRITTEN
            found = self(Tensors.of_direct(*given), kept, upstream, None, frozenset(names))
            written, of_sinks = tuple(map(found.__getitem__, _WRITTEN)), found.get("sinks")
        else:
            starts = starts_q, starts_k
            written, terms = prepared.run(read, lse, None, mask, slopes, starts)
            if sinks is not None and wanted[4]:
                of_sinks = _of_sinks(sinks, terms, query.shape)
        return (*written, None, of_sinks, None)


backward_of = kept_by_problem(_Backward)


def _layout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    upstream: torch.Tensor,
    output: torch.Tensor,
    mask: _Optional,
    slopes: _Optional,
    starts_q: _Optional,
    starts_k: _Optional,
    has_lse_gradient: bool = False,
) -> tuple[Any, ...]:
    """Return what launches take for granted of tensors."""
    beside = mask, slopes, starts_q, starts_k
    return (
        query.shape,
        query.stride(),
        key.shape,
        key.stride(),
        value.shape,
        value.stride(),
        upstream.stride(),
        output.stride(),
        0 if mask is None else mask.data_ptr() % MASK_ALIGNMENT,
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in beside),
        has_lse_gradient,
        upstream.get_device(),
    )


def _prepare(
    problem: AttentionProblem,
    read: tuple[torch.Tensor, ...],
    mask: _Optional,
    slopes: _Optional,
    starts: _Optional,
    has_lse_gradient: bool,
) -> Pass:
    """Return the launches for tensors of a layout.

    Args:
        problem: of the call; sizes are taken from the tensors.
        read: q, k, v, the gradient of the output, and the output.
        mask: of up to four dimensions.
        slopes: of ALiBi.
        starts: of packed sequences.
        has_lse_gradient: one arrives at the log-sum-exp.
    """
    query, key, value, upstream, output = read
    problem = replace(
        problem,
        batch=query.shape[0],
        len_q=query.shape[2],
        len_k=key.shape[2],
        num_sequences=0 if starts is None else len(starts) - 1,
        mask_shape=() if mask is None else tuple(with_rank(mask, 4).shape),
    )
    dtype = "fp32" if slopes is None else DTYPES[slopes.dtype]
    variant = choose_gradients(problem, has_lse_gradient=has_lse_gradient, slopes_dtype=dtype)
    if mask is not None and not variant.packs_mask:
        variant = replace(
            variant,
            mask_dtype=DTYPES[mask.dtype],
            mask_is_dense=mask.stride(-1) == 1 < mask.shape[-1],
            mask_is_aligned=is_aligned(mask),
        )
    stride, *of_mask = strides_of(mask, slopes)
    tiles = tiles_of(problem, problem.len_q, variant.block_m)
    num_tiles = problem.batch * problem.num_heads * tiles
    packed, of_rows = problem.num_sequences, (problem.num_heads, problem.len_q, tiles)
    key_blocks = tiles_of(problem, problem.len_k, variant.block_n)
    view_of = partial(head_view, is_packed=variant.is_packed)
    written = tuple(output_like(item, item.shape[3]) for item in (query, key, value))
    copied = (
        *map(view_of, (query, key, value, upstream)),
        ((num_tiles * 2 * variant.block_m,), (1,)),
        *map(view_of, written[1:]),
    )
    kernels = _compiled(variant, query.device)
    key_tiles = num_key_tiles(problem, variant)
    num_sums = num_tiles
    if variant.heads_apart:
        num_sums += 2 * problem.batch * problem.num_kv_heads * key_tiles
    terms = placed((num_tiles, 2, variant.block_m), torch.float32)
    allocated = (*map(place_of, written), terms)
    shared: dict[str, Any] = {
        "num_tiles": num_tiles,
        "num_blocks": num_block_heads(problem, variant) * key_blocks,
        "prepare": (
            *(packed, *_row_strides(output), *_row_strides(upstream), *of_rows),
            *(value.shape[3], num_sums),
        ),
    }

    def reading(block: tuple[int, int], *, by_columns: bool) -> MaskReading:
        """Return how a kernel reads the mask, whose blocks have so many lines and others."""
        if mask is None or not variant.packs_mask:
            return MaskReading(tuple(of_mask))
        listed = block if variant.has_lists else None
        return MaskReading.of_tiles(mask, listed, by_columns=by_columns)

    if variant.is_split:
        row_blocks = tiles_of(problem, problem.len_q, ROW_BLOCK)
        of_queries = (*copied[:4], view_of(written[0]))
        return SplitPass(
            launches=_bound(kernels, ((), copied, of_queries)),
            allocated=allocated,
            num_row_blocks=problem.batch * problem.num_heads * row_blocks,
            keys=split_numbers_of(problem, variant, stride, key_blocks),
            queries=split_numbers_of(problem, variant, stride, row_blocks),
            mask=(
                reading((variant.block_n, variant.block_m), by_columns=True),
                reading((ROW_BLOCK, variant.block_n), by_columns=False),
            ),
            **shared,
        )
    sums = placed((num_sums * TILE_NUMBERS // _SUM_COLUMNS, _SUM_COLUMNS), torch.float32)
    summed = [sums]
    if variant.is_ordered:
        summed.append(placed((2 * num_sums,), torch.int32))
    seen = reading((variant.block_n, variant.block_m), by_columns=True)
    views = (*copied, sums[:2]) if seen.view is None else (*copied, sums[:2], seen.view)
    return SinglePass(
        launches=_bound(kernels, ((), views, ())),
        allocated=(*allocated, *summed),
        main=numbers_of(problem, variant, stride),
        mask=seen,
        num_sums=num_sums,
        finish=(
            *(packed, problem.scale, *_row_strides(written[0]), *of_rows, query.shape[3]),
            *(*_row_strides(written[1]), *_row_strides(written[2])),
            *(problem.num_kv_heads, problem.len_k, key_tiles, value.shape[3]),
            num_tiles,
        ),
        **shared,
    )


def _bound(kernels: tuple[Callable[..., Any], ...], views: tuple[tuple[View, ...], ...]) -> Any:
    """Return the launches of kernels for the views of the tensors that each copies."""
    return tuple(bind(those) for bind, those in zip(kernels, views, strict=True))


def _row_strides(tensor: torch.Tensor) -> _Strides:
    """Return the strides over batch, heads and rows."""
    return head_view(tensor, is_packed=False)[1][:3]


def _of_sinks(sinks: torch.Tensor, terms: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the gradient of sinks, whose value is 0: from log-sum-exp and delta of all rows."""
    by_head = terms.view(*shape[:2], -1, 2, terms.shape[2])
    base, delta = by_head.unbind(3)
    weights = torch.exp2(sinks.float()[:, None, None] * LOG2_E - base)
    return -(weights * delta).sum((0, 2, 3)).to(sinks.dtype)


@lru_cache(maxsize=256)
def _compiled(
    variant: GradientVariant, device: torch.device
) -> tuple[Callable[..., Callable[..., None]], ...]:
    """Return what binds the kernels on a device to the views of their tensors."""
    with compiling("the Hopper backward kernel"), torch.cuda.device(device):
        # Triton is imported when a kernel first runs: importing the package does not need it.
        from adaattn.backends.hopper import gradient_compiled

        return tuple(kernel.bind for kernel in gradient_compiled.gradient_kernels(variant))
