"""The backward pass of the Hopper kernels: what is worked out once for a layout, and launched."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.common import output_like, with_dense_columns
from adaattn.backends.compiled_before import note
from adaattn.backends.hopper.gradient_launch import (
    BLOCK_KEYS,
    TILE_NUMBERS,
    GradientVariant,
    choose_gradients,
    numbers_of,
)
from adaattn.backends.hopper.prepared import DTYPES
from adaattn.backends.hopper.views import View, head_view, made_readable
from adaattn.backends.interface import Tensors
from adaattn.backends.masks import stream_of
from adaattn.backends.operators import Kept
from adaattn.backends.own_kernels import compiling
from adaattn.hardware import on_clear
from adaattn.spec import AttentionProblem

__all__ = ["gradients", "noted_as"]

_MOST_KEPT: Final = 4096
"""Layouts of a problem."""

_SUM_COLUMNS: Final = 256
"""Numbers of a row as TMA adds sums."""

_Optional = torch.Tensor | None
_Strides = tuple[int, ...]


def gradients(
    problem: AttentionProblem,
    tensors: Tensors,
    kept: Kept,
    upstream: torch.Tensor,
    lse_upstream: _Optional,
    wanted: frozenset[str],
) -> dict[str, torch.Tensor]:
    """Return the gradients of a call by their names.

    Args:
        problem: of the call; sizes are taken from the tensors.
        tensors: of the call.
        kept: of its forward pass.
        upstream: gradient of the output, [B, Hq, Sq, Dv].
        lse_upstream: gradient of the log-sum-exp, fp32 [B, Hq, Sq]; None is zero.
        wanted: names, of `GIVEN`.

    Raises:
        ExecutorError: a kernel cannot be compiled here.
    """
    device = upstream.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _backward(problem)(tensors, kept, upstream, lse_upstream, wanted)
    return _backward(problem)(tensors, kept, upstream, lse_upstream, wanted)


@lru_cache(maxsize=256)
def _backward(problem: AttentionProblem) -> "_Backward":
    """Return what launches the backward pass of a problem."""
    return _Backward(problem)


on_clear(_backward.cache_clear)


def noted_as(problem: AttentionProblem) -> tuple[object, ...]:
    """Return what says, before there are tensors, which kernels a problem's training takes."""
    return ("hopper gradients", choose_gradients(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The launches of one call, for tensors that lie as those of its first.

    Args:
        launches: what makes terms of rows, the main kernel, and what finishes queries.
        describe: makes TMA's description of a tensor from a view.
        constants: the compile-time arguments of each.
        views: of q, k, v, the output's gradient, and the gradients of k and v.
        num_blocks: of keys, of all key heads.
        num_tiles: of query rows, of all heads.
        block_m: rows of a tile.
        prepare: numbers of the first launch.
        main: of the second.
        finish: of the third.
    """

    launches: tuple[Callable[..., None], ...]
    describe: Callable[..., Any]
    constants: tuple[tuple[Any, ...], ...]
    views: tuple[View, ...]
    num_blocks: int
    num_tiles: int
    block_m: int
    prepare: tuple[int, ...]
    main: tuple[int | float, ...]
    finish: tuple[int | float, ...]

    def run(
        self,
        read: tuple[torch.Tensor, ...],
        rows: tuple[_Optional, ...],
        slopes: _Optional,
        written: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Write the gradients; return log-sum-exp and delta of rows, [tiles, 2, rows of a tile].

        Args:
            read: q, k, v and the gradient of the output.
            rows: the output, the log-sum-exp and its gradient, if there is one.
            slopes: of ALiBi, if there are any.
            written: the gradients of q, k and v.
        """
        upstream = read[3]
        stream = stream_of(upstream)
        terms = upstream.new_empty((self.num_tiles, 2, self.block_m), dtype=torch.float32)
        sums = upstream.new_empty(self.num_tiles * TILE_NUMBERS, dtype=torch.float32)
        output, lse, lse_upstream = rows
        prepare, main, finish = self.launches
        prepare(
            self.num_tiles,
            stream,
            *map(_address, (output, upstream, lse, lse_upstream, terms, sums)),
            *self.prepare,
            *self.constants[0],
        )
        seen = (terms.numel(),), (1,)
        added = (sums.numel() // _SUM_COLUMNS, _SUM_COLUMNS), (_SUM_COLUMNS, 1)
        main(
            self.num_blocks,
            stream,
            *map(self.describe, read, self.views[:4]),
            self.describe(terms, seen),
            *map(self.describe, written[1:], self.views[4:]),
            self.describe(sums, added),
            _address(slopes),
            *self.main,
            *self.constants[1],
        )
        finish(
            self.num_tiles,
            stream,
            *map(_address, (sums, written[0])),
            *self.finish,
            *self.constants[2],
        )
        return terms


def _address(tensor: _Optional) -> int:
    """Return where a tensor begins: a number is launched faster than the tensor."""
    return 0 if tensor is None else tensor.data_ptr()


class _Backward:
    """Launches the backward pass of one problem; what a layout of tensors needs is kept."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._known: dict[tuple[Any, ...], _Prepared] = {}

    def __call__(
        self,
        tensors: Tensors,
        kept: Kept,
        upstream: torch.Tensor,
        lse_upstream: _Optional,
        wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients that are wanted."""
        given = (tensors.query, tensors.key, tensors.value)
        written = tuple(output_like(item, item.shape[3]) for item in given)
        read = tuple(map(made_readable, (*given, upstream)))
        output, lse = made_readable(kept.output), kept.lse.contiguous()
        if lse_upstream is not None:
            lse_upstream = lse_upstream.float().contiguous()
        slopes = tensors.alibi_slopes
        if slopes is not None:
            slopes = with_dense_columns(slopes if slopes.dtype in DTYPES else slopes.float())
        strides = tuple(item.stride() for item in (*read, output, *written))
        shapes = (given[0].shape, given[1].shape, given[2].shape[3])
        of_slopes = None if slopes is None else (slopes.shape, slopes.stride(), slopes.dtype)
        layout = (*strides, *shapes, of_slopes, lse_upstream is None, upstream.device.index)
        prepared = self._known.get(layout)
        if prepared is None:
            has_gradient = lse_upstream is not None
            prepared = _prepare(self._problem, (*read, output), written, slopes, has_gradient)
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[layout] = prepared
            note(noted_as(self._problem))
        terms = prepared.run(read, (output, lse, lse_upstream), slopes, written)
        found = dict(zip(("query", "key", "value"), written, strict=True))
        if "sinks" in wanted:
            assert tensors.sinks is not None
            found["sinks"] = _of_sinks(tensors.sinks, terms, given[0].shape)
        return {name: found[name] for name in wanted}


def _prepare(
    problem: AttentionProblem,
    read: tuple[torch.Tensor, ...],
    written: tuple[torch.Tensor, ...],
    slopes: _Optional,
    has_lse_gradient: bool,
) -> _Prepared:
    """Return the launches for tensors of a layout.

    Args:
        problem: of the call; sizes are taken from the tensors.
        read: q, k, v, the gradient of the output, and the output.
        written: the gradients of q, k and v.
        slopes: of ALiBi.
        has_lse_gradient: one arrives at the log-sum-exp.
    """
    query, key, value, upstream, output = read
    problem = replace(problem, batch=query.shape[0], len_q=query.shape[2], len_k=key.shape[2])
    dtype = "fp32" if slopes is None else DTYPES[slopes.dtype]
    variant = choose_gradients(problem, has_lse_gradient=has_lse_gradient, slopes_dtype=dtype)
    by_batch = slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1
    stride = slopes.stride(0) if slopes is not None and by_batch else 0
    numbers = numbers_of(problem, variant, stride)
    tiles = -(-problem.len_q // variant.block_m)
    key_blocks = -(-problem.len_k // BLOCK_KEYS)
    of_rows = (problem.num_heads, problem.len_q, tiles)
    launches, describe, constants = _compiled(variant, query.device)
    return _Prepared(
        launches=launches,
        describe=describe,
        constants=constants,
        views=tuple(
            head_view(item, is_packed=False) for item in (query, key, value, upstream, *written[1:])
        ),
        num_blocks=problem.batch * problem.num_kv_heads * key_blocks,
        num_tiles=problem.batch * problem.num_heads * tiles,
        block_m=variant.block_m,
        prepare=(*_row_strides(output), *_row_strides(upstream), *of_rows, value.shape[3]),
        main=numbers,
        finish=(problem.scale, *_row_strides(written[0]), *of_rows, query.shape[3]),
    )


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
) -> tuple[tuple[Callable[..., None], ...], Callable[..., Any], tuple[tuple[Any, ...], ...]]:
    """Return the kernels' launches on a device, what describes tensors, and their constants."""
    with compiling("the Hopper backward kernel"), torch.cuda.device(device):
        # Triton is imported when a kernel first runs: importing the package does not need it.
        from adaattn.backends.hopper import gradient_compiled

        return gradient_compiled.gradient_launchers(variant)
