"""Chunks on Hopper whose scores are never in memory: `fused`, products with values, division."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.allocation import unfilled
from adaattn.backends.device.launch import Launch, View
from adaattn.backends.masks import stream_of
from adaattn.backends.own_kernels import compiling
from adaattn.backends.streamed.chunks import Chunk
from adaattn.backends.streamed.planes import Planes, Space
from adaattn.backends.streamed.products import multiply
from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, Aux, MaskKind, Precision

__all__ = ["BOXES", "FusedChunks", "Variant", "has_keys", "reads", "serves"]

BOXES: Final = ((128, 64), (128, 64), (64, 128))
"""What one copy of queries, keys and weights takes: lines or keys, and columns."""

_LINES: Final = 128
_COLUMNS: Final = 64
_MOST_COLUMNS: Final = 512
"""A warpgroup holds so many of 64 queries in half of its registers."""

_STEP: Final = 8
"""16 bytes, of which addresses and strides are multiples."""

_LEAST_KEYS: Final = 128
_HOPPER: Final = (9, 0)
_DIVIDED: Final = (4, 512)
"""Lines and columns of a program that divides."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What the kernel is compiled for.

    Args:
        parts: of 64 columns, that queries and keys have.
        is_causal: keys behind a row's position are hidden.
    """

    parts: int
    is_causal: bool


def serves(problem: AttentionProblem) -> bool:
    """Return whether weights of a problem of any lengths can be made where its scores are.

    Weights need the exponents of bf16, and scores nothing but a scale and causal order.
    """
    sizes = problem.head_dim, problem.value_dim
    return (
        problem.precision is Precision.BF16
        and problem.head_dim <= _MOST_COLUMNS
        and not any(size % _STEP for size in sizes)
        and problem.scale > 0
        and problem.window == (-1, -1)
        and problem.dilation == 1
        and problem.mask is MaskKind.NONE
        and not (problem.softcap or problem.has_sinks or problem.has_alibi or problem.dropout_p)
        and problem.aux in (Aux.NONE, Aux.LSE)
        and _is_on_hopper(problem)
    )


def _is_on_hopper(problem: AttentionProblem) -> bool:
    """Return whether a problem's device has the kernel's instructions."""
    return problem.device_type == "cuda" and probe().compute_capability == _HOPPER


def has_keys(len_k: int, value_dim: int) -> bool:
    """Return whether keys are many: products in fp32 take no more memory than scores then."""
    return len_k >= max(_LEAST_KEYS, value_dim)


def reads(*tensors: torch.Tensor) -> bool:
    """Return whether TMA can read tensors [B, H, S, D]: all begins at multiples of 16 bytes."""
    return not any(map(_is_uneven, tensors))


def _is_uneven(tensor: torch.Tensor) -> bool:
    """Return whether a tensor or one of its rows begins elsewhere."""
    sizes = zip(tensor.shape[:3], tensor.stride(), strict=False)
    uneven = any(step % _STEP for size, step in sizes if size > 1)
    return uneven or tensor.data_ptr() % (_STEP * tensor.element_size()) != 0


class FusedChunks:
    """The chunks of calls of one layout, and the launches of each.

    Args:
        problem: of the call.
        chunks: all of them.
        output: of a call, which others lie like.
        entries: as from `num_entries`.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        chunks: tuple[Chunk, ...],
        output: torch.Tensor,
        entries: int,
    ) -> None:
        self._problem, self._chunks, self._entries = problem, chunks, entries
        variant = Variant(-(-problem.head_dim // _COLUMNS), problem.is_causal)
        self._bind = _compiled(variant, output.device)
        self._bound: dict[int, tuple[tuple[View, ...], Callable[..., None]]] = {}
        self._divisions = [self._division(chunk, output) for chunk in chunks]
        lines = [len(chunk.planes) * problem.group_size * len(chunk.rows) for chunk in chunks]
        self._most_lines = max(lines)
        self._most_blocks = max(len(it.planes) * self._tiles(it) for it in chunks)

    def run(self, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor | None) -> None:
        """Compute all chunks.

        Args:
            tensors: q, k, v and the output.
            lse: fp32 [B, Hq, Sq], written where given.
        """
        problem = self._problem
        given, output = tensors[0], tensors[3]
        query, key, value = (Planes(it, problem.num_kv_heads, self._entries) for it in tensors[:3])
        space = Space(given, given.dtype, self._chunks, problem.group_size)
        products = unfilled(given, (self._most_lines * problem.value_dim,), dtype=torch.float32)
        sums = unfilled(given, (2, self._most_lines), dtype=torch.float32)
        noted = unfilled(given, (self._most_blocks,), dtype=torch.int32)
        stream = stream_of(given)
        for place, chunk in enumerate(self._chunks):
            copied = query.lines(chunk), key.keys(chunk), space.of(chunk)
            self._launch(place, copied)(
                len(chunk.planes) * self._tiles(chunk),
                stream,
                copied,
                *map(_address, (sums[0], sums[1], noted)),
                *self._numbers(chunk),
            )
            weights = copied[2]
            size = (*weights.shape[:2], problem.value_dim)
            written = products[: size[0] * size[1] * size[2]].view(size)
            multiply(weights, value.keys(chunk), written)
            self._divisions[place](written, sums[0], sums[1], output, lse)

    def _launch(self, place: int, copied: tuple[torch.Tensor, ...]) -> Callable[..., None]:
        """Return the launch of a chunk, for tensors that lie as these."""
        views = tuple(map(_view, copied))
        known = self._bound.get(place)
        if known is None or known[0] != views:
            known = self._bound[place] = views, self._bind(views)
        return known[1]

    def _numbers(self, chunk: Chunk) -> tuple[float, ...]:
        """Return the numbers of a chunk, in the kernel's order."""
        problem, rows = self._problem, len(chunk.rows)
        first = chunk.rows.start + problem.offset - chunk.keys.start
        lines = problem.group_size * rows
        scale = problem.scale * LOG2_E
        return scale, lines, rows, self._tiles(chunk), len(chunk.keys), first

    def _tiles(self, chunk: Chunk) -> int:
        """Return the blocks of lines of a plane."""
        return -(-self._problem.group_size * len(chunk.rows) // _LINES)

    def _division(self, chunk: Chunk, output: torch.Tensor) -> Launch:
        """Return the launch of what divides by the sums of weights."""
        problem, (lines, columns) = self._problem, _DIVIDED
        count = len(chunk.planes) * problem.group_size * len(chunk.rows)
        return Launch(
            module="streamed.division",
            name="divide",
            grid=(-(-count // lines), 1, 1),
            numbers=(
                *output.stride()[:3],
                *(problem.num_heads, problem.len_q),
                *(chunk.planes.start, chunk.rows.start, len(chunk.rows), count),
            ),
            constants=(problem.value_dim, columns, lines, problem.group_size),
            options=(("num_warps", 4),),
        )


def _view(tensor: torch.Tensor) -> View:
    """Return matrices as TMA sees them; a stride over one of them may be anything."""
    planes, by_plane = tensor.shape[0], tensor.stride(0)
    by_line = tensor.stride(1) if tensor.shape[1] > 1 else -(-tensor.shape[2] // _STEP) * _STEP
    return tuple(tensor.shape), (by_plane if planes > 1 else by_line, by_line, 1)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor begins: a number is launched faster than the tensor."""
    return tensor.data_ptr()


@lru_cache(maxsize=64)
def _compiled(variant: Variant, device: torch.device) -> Callable[..., Callable[..., None]]:
    """Return what binds the kernel on a device to the views of its tensors."""
    with compiling("the Hopper kernel"), torch.cuda.device(device):
        # Triton is imported when a kernel first runs: importing the package does not need it.
        from adaattn.backends.device.tma import Launcher
        from adaattn.backends.streamed.fused_compiled import compile_weights

        return Launcher(compile_weights(variant)).bind
