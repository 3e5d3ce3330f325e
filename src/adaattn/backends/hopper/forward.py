"""One call of the kernel: what is worked out once for a layout, and what each call does.

A repeated call looks up its layout, allocates the result, and launches. Triton's own call of a
kernel looks at all 54 arguments each time; here the compiled kernel is kept and launched directly.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.common import with_dense_columns
from adaattn.backends.compiled_before import note
from adaattn.backends.hopper.launch import (
    MASK_ALIGNMENT,
    Variant,
    choose,
    edges,
    heads_together,
    key_blocks,
    schedule,
    tile_bits,
    tiles_per_head,
)
from adaattn.backends.interface import STATISTICS, Result, Tensors
from adaattn.backends.masks import stream_of, with_rank
from adaattn.backends.own_kernels import check_untransformed, compiling
from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, Aux

__all__ = ["attend", "output_function"]

_DTYPES: Final = {
    torch.bool: "i8",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_ALIGNMENT: Final = 16
_MOST_LISTED: Final = 100_000
"""Tiles up to which a list is made, on the host in half a microsecond each."""

_MOST_KEPT: Final = 4096
"""Layouts of a problem, and lists in all. Lists stay: a CUDA graph may have recorded where."""

_Strides = tuple[int, ...]
_Layout = tuple[Any, ...]


def attend(tensors: Tensors, problem: AttentionProblem) -> Result:
    """Return attention with the row outputs that ``problem.aux`` asks for.

    Args:
        tensors: canonical tensors on a device of compute capability 9.0.
        problem: what to compute; sizes are taken from the tensors.

    Raises:
        ExecutorError: the kernel cannot be compiled here.
    """
    call = _bound(problem)
    return call(
        tensors.query,
        tensors.key,
        tensors.value,
        tensors.mask,
        tensors.sinks,
        tensors.alibi_slopes,
    )


def output_function(problem: AttentionProblem) -> Callable[..., torch.Tensor]:
    """Return a function from q, k, v, mask, sinks and slopes to the output alone."""
    call = _bound(problem)

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        *rest: None,
    ) -> torch.Tensor:
        return call(query, key, value, mask, sinks, slopes).output

    return run


@lru_cache(maxsize=1024)
def _bound(problem: AttentionProblem) -> Callable[..., Result]:
    """Return the call of a problem, which keeps what it works out for each layout of tensors."""
    known: dict[_Layout, _Prepared] = {}

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
    ) -> Result:
        check_untransformed(query, key, value)
        query, key, value = map(_readable, (query, key, value))
        sinks, slopes = (None if x is None else _numbers(x) for x in (sinks, slopes))
        extras = [None if x is None else _layout(x) for x in (mask, sinks, slopes)]
        at = 0 if mask is None else mask.data_ptr() % MASK_ALIGNMENT
        layout = (*_layout(query), *_layout(key), value.stride(), *extras, at, query.device.index)
        prepared = known.get(layout)
        if prepared is None:
            prepared = _prepare(problem, query, key, value, mask, sinks, slopes)
            if prepared.is_lasting:
                if len(known) >= _MOST_KEPT:
                    known.clear()
                known[layout] = prepared
        if query.is_cuda and query.device.index != torch.cuda.current_device():
            with torch.cuda.device(query.device):
                return prepared.run(query, key, value, mask, sinks, slopes)
        return prepared.run(query, key, value, mask, sinks, slopes)

    return call


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a launch takes for granted of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_aligned(mask: torch.Tensor) -> bool:
    """Return whether a mask's rows begin at multiples that the kernel can make use of."""
    rows = zip(mask.shape[:-1], mask.stride(), strict=False)
    at = mask.data_ptr() % MASK_ALIGNMENT
    return at == 0 and not any(step % MASK_ALIGNMENT for size, step in rows if size > 1)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that TMA can read: a copy if it is expanded, or not aligned to 16 bytes."""
    if 0 in tensor.stride() or tensor.data_ptr() % _ALIGNMENT:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


@dataclass(slots=True, kw_only=True, eq=False)
class _Prepared:
    """A launch for one layout.

    Args:
        launch: the compiled kernel's launch.
        num_blocks: persistent blocks.
        descriptor: makes TMA's description of a tensor with given shape and strides.
        shapes: of q, k, v and the result, with their strides.
        out_strides: strides of the result.
        row_shape: [B, Hq, Sq].
        num_flags: notes of tiles to be computed again; 0 where there are none.
        scalars: the arguments behind the pointers, compile-time ones included.
        tiles: the list of tiles, or None.
        is_lasting: what was prepared may serve later calls.
        aux: row outputs.
    """

    launch: Callable[..., None]
    num_blocks: int
    descriptor: Callable[..., Any]
    shapes: tuple[tuple[_Strides, _Strides], ...]
    out_strides: _Strides
    row_shape: _Strides
    num_flags: int
    scalars: tuple[Any, ...]
    tiles: torch.Tensor | None
    is_lasting: bool
    aux: Aux

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
    ) -> Result:
        """Return the result of one launch."""
        out = query.new_empty_strided(self.shapes[3][0], self.out_strides)
        lse, row_max, entropy = (
            query.new_empty(self.row_shape, dtype=torch.float32) if self.aux & flag else None
            for flag in STATISTICS[:3]
        ) if self.aux else (None, None, None)  # fmt: skip
        flags = query.new_empty(self.num_flags, dtype=torch.int32) if self.num_flags else None
        if mask is not None:
            mask = mask if mask.dtype in _DTYPES else mask.float()
        describe = self.descriptor
        self.launch(
            self.num_blocks,
            stream_of(query),
            *map(describe, (query, key, value, out), self.shapes),
            _address(lse),
            _address(row_max),
            _address(entropy),
            _address(self.tiles),
            _address(flags),
            _address(mask),
            _address(sinks),
            _address(slopes),
            *self.scalars,
        )
        return Result(output=out, lse=lse, row_max=row_max, entropy=entropy)


def _address(tensor: torch.Tensor | None) -> int:
    """Return where a tensor begins: a number is launched faster than the tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of numbers that the kernel reads, with adjacent columns."""
    return with_dense_columns(tensor if tensor.dtype in _DTYPES else tensor.float())


def _prepare(
    problem: AttentionProblem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> _Prepared:
    """Return the launch for tensors of a layout."""
    problem = replace(
        problem,
        batch=query.shape[0],
        len_q=query.shape[2],
        len_k=key.shape[2],
        mask_shape=() if mask is None else tuple(with_rank(mask, 4).shape),
    )
    num_blocks = probe(query.device).num_processors
    variant = known_by = choose(problem)
    tiles, lasting = _tiles(problem, variant, num_blocks, query.device)
    variant = replace(
        variant,
        has_tiles=tiles is not None,
        mask_is_dense=mask is None or mask.stride(-1) == 1 < mask.shape[-1],
        mask_is_aligned=mask is None or _is_aligned(mask),
        mask_dtype="i8" if mask is None else _DTYPES.get(mask.dtype, "fp32"),
        sinks_dtype="fp32" if sinks is None else _DTYPES[sinks.dtype],
        slopes_dtype="fp32" if slopes is None else _DTYPES[slopes.dtype],
    )
    per_head = tiles_per_head(problem.len_q, variant.tiling)
    num_tiles = per_head * problem.batch * problem.num_heads
    num_blocks = min(num_blocks, num_tiles)
    per_block = tiles.shape[1] - 1 if tiles is not None else -(-num_tiles // num_blocks)
    out_shape = (*query.shape[:3], value.shape[3])
    out_strides = _strides_like(query, out_shape)
    described = [(tuple(x.shape), x.stride()) for x in (query, key, value)]
    launch, descriptor, constants = _compiled(variant, query.device)
    note(("hopper", known_by))
    return _Prepared(
        launch=launch,
        num_blocks=num_blocks,
        descriptor=descriptor,
        shapes=tuple(
            (shape, _tma_strides(shape, strides))
            for shape, strides in [*described, (out_shape, out_strides)]
        ),
        out_strides=out_strides,
        row_shape=tuple(query.shape[:3]),
        num_flags=num_blocks * (per_block + 1) if variant.fixed else 0,
        scalars=(
            *_scalars(problem, num_tiles, per_head, per_block, fast_tanh=variant.has_fast_tanh),
            *_strides_of(mask, slopes),
            *constants,
        ),
        tiles=tiles,
        is_lasting=lasting,
        aux=problem.aux,
    )


def _scalars(
    problem: AttentionProblem, num_tiles: int, per_head: int, per_block: int, *, fast_tanh: bool
) -> tuple[int | float, ...]:
    """Return scale, softcap and sizes, in the kernel's order."""
    right, left = edges(problem)
    scale = problem.scale * LOG2_E
    if problem.softcap > 0:
        # The kernel's tanh takes the score itself, or the exponent of its own exponential.
        scale = (problem.scale if fast_tanh else 2.0 * scale) / problem.softcap
    return (
        scale,
        problem.softcap * LOG2_E,
        problem.len_q,
        problem.len_k,
        num_tiles,
        per_head,
        tile_bits(per_head),
        per_block,
        problem.num_heads,
        problem.group_size,
        problem.offset,
        left,
        right,
    )


def _strides_of(mask: torch.Tensor | None, slopes: torch.Tensor | None) -> tuple[int, ...]:
    """Return the slopes' stride over sequences and the mask's four; 0 where one stands for all."""
    by_batch = 0 if slopes is None or slopes.dim() < 2 or slopes.shape[0] == 1 else slopes.stride(0)
    if mask is None:
        return by_batch, 0, 0, 0, 0
    full = with_rank(mask, 4)
    strides = zip(full.shape, full.stride(), strict=True)
    return by_batch, *(0 if size == 1 else stride for size, stride in strides)


def _tma_strides(shape: _Strides, strides: _Strides) -> _Strides:
    """Return strides that TMA takes: those over one element may be anything, and are made so."""
    return tuple(
        strides[i] if shape[i] > 1 or i == 3 else max(shape[3], 8) for i in range(len(shape))
    )


def _strides_like(query: torch.Tensor, shape: _Strides) -> _Strides:
    """Return dense strides with the dimensions in the query's order."""
    order = sorted(range(3), key=query.stride, reverse=True)
    strides, step = [0, 0, 0, 1], shape[3]
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _tiles(
    problem: AttentionProblem, variant: Variant, num_blocks: int, device: torch.device
) -> tuple[torch.Tensor | None, bool]:
    """Return the list of tiles on the device, and whether it may be kept.

    While a CUDA graph is captured none is made: the static order serves, slower, until the next
    call outside of it.
    """
    heads = problem.batch * problem.num_heads
    per_head = tiles_per_head(problem.len_q, variant.tiling)
    if not variant.has_tiles or per_head * heads > _MOST_LISTED:
        return None, True
    tiling = variant.tiling
    costs = []
    for tile in range(per_head):
        first = tile * tiling.block_m
        start, end = key_blocks(problem, first, tiling.block_m, tiling.block_n)
        costs.append(end - start)
    facts = (tuple(costs), heads, heads_together(problem), min(num_blocks, per_head * heads))
    if (facts, device) not in _LISTED:
        if len(_LISTED) >= _MOST_KEPT:
            return None, True
        if torch.cuda.is_current_stream_capturing():
            return None, False
        lists = schedule(*facts)
        width = max(map(len, lists))
        rows = [(len(row), *row, *(0,) * (width - len(row))) for row in lists]
        _LISTED[facts, device] = torch.tensor(rows, dtype=torch.int32).to(device)
    return _LISTED[facts, device], True


_LISTED: Final[dict[Any, torch.Tensor]] = {}


@lru_cache(maxsize=256)
def _compiled(
    variant: Variant, device: torch.device
) -> tuple[Callable[..., None], Callable[..., Any], tuple[Any, ...]]:
    """Return a kernel's launch on a device, what describes tensors for it, and its constants."""
    with compiling("the Hopper kernel"), torch.cuda.device(device):
        # Triton is imported when a kernel first runs: importing the package does not need it.
        from adaattn.backends.hopper import compiled

        return compiled.launcher(variant)
