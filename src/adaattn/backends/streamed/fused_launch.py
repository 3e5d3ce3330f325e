"""Chunks on Hopper whose scores are never in memory: launches of `fused`, and what is around."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.allocation import adjacent, unfilled
from adaattn.backends.device.launch import Launch, View, address_of
from adaattn.backends.masks import stream_of
from adaattn.backends.own_kernels import compiling
from adaattn.backends.streamed.chunks import Chunk
from adaattn.backends.streamed.fused_rules import parts_of
from adaattn.backends.streamed.planes import Planes, Space, Taken, lines_of, padded_keys
from adaattn.backends.streamed.products import multiply
from adaattn.spec import AttentionProblem

__all__ = ["Fused", "FusedChunks", "Kind", "Variant", "boxes"]

_LINES: Final = 128
_KEYS_BOX: Final = (128, 64)
_SCORES_BOX: Final = (64, 128)

_ALIGNMENT: Final = 16
"""Bytes of which addresses and strides are multiples."""

_STEP: Final = 8
"""The same in numbers."""

_L2_BYTES: Final = 32 << 20
"""Of keys that stay in the L2 cache of 50 MiB beside what is written."""

_DIVIDED: Final = (4, 512)
"""Lines and columns of a program that divides."""


class Kind(enum.Enum):
    """What the kernel makes of products, by its own constants."""

    SUMS = 0
    """Weights that are not divided by their sums yet, and those."""
    GIVEN = 1
    """Weights, of a log-sum-exp."""
    CHANGES = 2
    """Gradients of scores, of weights."""


def boxes(kind: Kind) -> tuple[tuple[int, int], ...]:
    """Return what one copy of each tensor takes: lines or keys, and columns."""
    scores = 2 if kind is Kind.CHANGES else 1
    return (_KEYS_BOX, _KEYS_BOX, *(_SCORES_BOX,) * scores)


@dataclass(frozen=True, slots=True)
class Variant:
    """What the kernel is compiled for.

    Args:
        kind: what it makes.
        parts: of 64 columns, that what is multiplied has.
        is_causal: keys behind a row's position are hidden.
        dtype: of all, by Triton's name.
    """

    kind: Kind
    parts: int
    is_causal: bool
    dtype: str

    @classmethod
    def of(cls, problem: AttentionProblem, kind: Kind) -> "Variant":
        """Return what it is compiled for to make one kind of a problem's scores."""
        parts = parts_of(_columns_of(problem, kind))
        return cls(kind, parts, problem.is_causal, problem.precision.label)


def _columns_of(problem: AttentionProblem, kind: Kind) -> int:
    """Return the columns of what is multiplied: queries and keys, or gradients and values."""
    return problem.value_dim if kind is Kind.CHANGES else problem.head_dim


_Layout = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A launch for the tensors of a chunk.

    Args:
        layout: strides of those tensors.
        launch: None where TMA cannot read what is multiplied.
        num_blocks: of it.
        numbers: the kernel's, in its order.
    """

    layout: _Layout
    launch: Callable[..., None] | None
    num_blocks: int
    numbers: tuple[float, ...]


class Fused:
    """The kernel of one kind for the chunks of calls of one layout.

    Args:
        problem: of the call.
        kind: what it makes.
        device: where.
    """

    def __init__(self, problem: AttentionProblem, kind: Kind, device: torch.device) -> None:
        self._problem, self._kind = problem, kind
        self._columns = _columns_of(problem, kind)
        self._bind = _compiled(Variant.of(problem, kind), device)
        self._bound: dict[Chunk, _Bound] = {}

    def __call__(
        self,
        chunk: Chunk,
        copied: tuple[torch.Tensor, ...],
        references: torch.Tensor,
        totals: torch.Tensor | None = None,
        noted: torch.Tensor | None = None,
    ) -> None:
        """Make a chunk.

        Args:
            chunk: of the scores.
            copied: what is multiplied, [P, L, D] and [P, C, D] or more, up to the pitch N, what
                is made, [P, L, N], and of CHANGES the weights, likewise.
            references: fp32 [P, L], written by SUMS, and read by the others.
            totals: likewise, of SUMS.
            noted: int32 of as many numbers as `num_blocks` says, of SUMS.
        """
        first = copied[0]
        if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(first.device):
                self(chunk, copied, references, totals, noted)
            return
        layout = (first.stride(), copied[1].stride(), copied[2].stride())
        known = self._bound.get(chunk)
        if known is None or known.layout != layout:
            known = self._bound[chunk] = self._bound_to(chunk, copied, layout)
        if known.launch is None or (first.data_ptr() | copied[1].data_ptr()) % _ALIGNMENT:
            dense = (it.clone(memory_format=torch.contiguous_format) for it in copied[:2])
            self(chunk, (*dense, *copied[2:]), references, totals, noted)
            return
        addresses = map(address_of, (totals, references, noted))
        known.launch(known.num_blocks, stream_of(first), copied, *addresses, *known.numbers)

    def _bound_to(self, chunk: Chunk, copied: tuple[torch.Tensor, ...], layout: _Layout) -> _Bound:
        """Return the launch for the tensors of a chunk that lie so."""
        problem, rows = self._problem, len(chunk.rows)
        num_blocks = self.num_blocks(chunk)
        numbers = (
            problem.scale * LOG2_E,
            problem.group_size * rows,
            rows,
            num_blocks // len(chunk.planes),
            self._together(chunk),
            len(chunk.keys),
            chunk.rows.start + problem.offset - chunk.keys.start,
        )
        can_read = not any(map(_is_uneven, copied[:2]))
        launch = self._bind(tuple(map(_view, copied))) if can_read else None
        return _Bound(layout, launch, num_blocks, numbers)

    def _together(self, chunk: Chunk) -> int:
        """Return how many planes' blocks take turns: in causal order all, if caches hold the keys.

        Blocks with more to do then begin.
        """
        size = 2 * len(chunk.planes) * len(chunk.keys) * self._columns
        return len(chunk.planes) if self._problem.is_causal and size <= _L2_BYTES else 1

    def num_blocks(self, chunk: Chunk) -> int:
        """Return how many blocks a chunk takes."""
        return len(chunk.planes) * -(-self._problem.group_size * len(chunk.rows) // _LINES)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk of calls of one layout.

    Args:
        chunk: of the scores.
        queries: its rows.
        keys: those that they can see.
        values: of these, up to the chunk's pitch.
        weights: shape and strides in their memory.
        products: likewise of weights times values, [P, L, Dv].
        divide: writes them to the output, divided by the sums of weights.
    """

    chunk: Chunk
    queries: Taken
    keys: Taken
    values: Taken
    weights: tuple[tuple[int, ...], tuple[int, ...]]
    products: tuple[tuple[int, ...], tuple[int, ...]]
    divide: Launch


class FusedChunks:
    """The chunks of a forward pass of calls of one layout.

    Args:
        problem: of the call.
        chunks: all of them.
        tensors: q, k, v and the output of a call, which those of others lie like.
        entries: as from `num_entries`.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        chunks: tuple[Chunk, ...],
        tensors: tuple[torch.Tensor, ...],
        entries: int,
    ) -> None:
        self._problem = problem
        self._weights = Fused(problem, Kind.SUMS, tensors[0].device)
        self._space = Space(chunks, problem.group_size)
        self._pieces = tuple(self._piece(chunk, tensors, entries) for chunk in chunks)
        lines = max(len(chunk.planes) * len(chunk.rows) for chunk in chunks)
        self._most_lines = problem.group_size * lines
        self._most_blocks = max(map(self._weights.num_blocks, chunks))

    def _piece(self, chunk: Chunk, tensors: tuple[torch.Tensor, ...], entries: int) -> _Piece:
        """Return a chunk of calls whose tensors lie as these."""
        problem = self._problem
        query, key, value, output = tensors
        take = partial(Taken, chunk, problem.num_kv_heads, entries)
        weights = self._space.place(chunk)
        products = (*weights[0][:2], problem.value_dim)
        return _Piece(
            chunk=chunk,
            queries=take(Planes.rows, query),
            keys=take(Planes.keys, key),
            values=take(Planes.keys_to_pitch, value),
            weights=weights,
            products=(products, adjacent(products)),
            divide=self._division(chunk, output),
        )

    def run(self, tensors: tuple[torch.Tensor, ...], rest: tuple[torch.Tensor | None, ...]) -> None:
        """Compute all chunks.

        Args:
            tensors: q, k, v and the output.
            rest: the log-sum-exp, fp32 [B, Hq, Sq], written where given; nothing else is there.
        """
        query, key, value, output = tensors
        of_weights = self._space.memory(query, query.dtype)
        size = self._most_lines * self._problem.value_dim
        of_products = unfilled(query, (size,), (1,), torch.float32)
        totals, references = (
            unfilled(query, (self._most_lines,), (1,), torch.float32) for _ in range(2)
        )
        noted = unfilled(query, (self._most_blocks,), (1,), torch.int32)
        for it in self._pieces:
            products = of_products.as_strided(*it.products)
            if it.chunk.keys:
                weights = of_weights.as_strided(*it.weights)
                copied = lines_of(it.queries.of(query)), it.keys.of(key), weights
                self._weights(it.chunk, copied, references, totals, noted)
                multiply(weights, padded_keys(it.values.of(value), weights.shape[2]), products)
            else:
                totals.zero_()
                products.zero_()
            it.divide(products, totals, references, output, rest[0])

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


def _is_uneven(tensor: torch.Tensor) -> bool:
    """Return whether rows of matrices [P, L, D] begin where TMA cannot read."""
    sizes = zip(tensor.shape[:2], tensor.stride(), strict=False)
    return any(step % _STEP or not step for size, step in sizes if size > 1)


def _view(tensor: torch.Tensor) -> View:
    """Return matrices as TMA sees them; a stride over one of them may be anything."""
    planes, by_plane = tensor.shape[0], tensor.stride(0)
    by_line = tensor.stride(1) if tensor.shape[1] > 1 else -(-tensor.shape[2] // _STEP) * _STEP
    return tuple(tensor.shape), (by_plane if planes > 1 else by_line, by_line, 1)


@lru_cache(maxsize=64)
def _compiled(variant: Variant, device: torch.device) -> Callable[..., Callable[..., None]]:
    """Return what binds the kernel on a device to the views of its tensors."""
    with compiling("the Hopper kernel"), torch.cuda.device(device):
        # Triton is imported when a kernel first runs: importing the package does not need it.
        from adaattn.backends.device.tma import Launcher
        from adaattn.backends.streamed.fused_compiled import compile_weights

        return Launcher(compile_weights(variant)).bind
