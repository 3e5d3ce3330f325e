"""The backward pass of written-out scores: five products a chunk, in a fixed order.

Gradients of keys and values are added up over the chunks of rows in fp32; where one chunk has all
of them they are written at once. Equal inputs give equal bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Final

import torch

from adaattn.backends.allocation import output_like, unfilled
from adaattn.backends.common import with_dense_columns
from adaattn.backends.compiled_before import note
from adaattn.backends.device.launch import Launch
from adaattn.backends.interface import Tensors
from adaattn.backends.masks import as_bytes
from adaattn.backends.operators import Kept
from adaattn.backends.own_kernels import kept_by_problem, sinks_gradient
from adaattn.backends.streamed.arguments import Arguments, Beside
from adaattn.backends.streamed.chunks import PITCH, Chunk, chunks_of, is_even, padded, pitch_of
from adaattn.backends.streamed.fused_launch import Fused, Kind
from adaattn.backends.streamed.fused_rules import fits, serves_gradients
from adaattn.backends.streamed.planes import (
    Planes,
    Space,
    lines_of,
    num_entries,
    padded_keys,
    write_products,
)
from adaattn.backends.streamed.products import multiply
from adaattn.spec import AttentionProblem

__all__ = ["backward_of"]

_PRODUCTS: Final = ("query", "key", "value")

_Optional = torch.Tensor | None

_Made = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Makes weights and their changes [P, L, N] of a chunk, from it and its queries, keys up to the
pitch N, and gradients of the output."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is launched for calls of one layout.

    Args:
        layout: what it follows from.
        sums: of the products of outputs and gradients.
        chunks: of the scores.
        launches: of the gradients of each.
        fused: what makes weights, and their changes, in place of those where scores are not
            written.
    """

    layout: tuple[Any, ...]
    sums: Launch
    chunks: tuple[Chunk, ...]
    launches: tuple[Launch, ...]
    fused: tuple[Fused, Fused] | None


class _Backward:
    """Computes the gradients of one problem; lengths and strides are those of each call."""

    def __init__(self, problem: AttentionProblem, chunk_rows: int = 0) -> None:
        self._problem = problem
        self._chunk_rows = chunk_rows
        self._prepared: _Prepared | None = None
        self._is_noted = False
        self._may_fuse = serves_gradients(problem)

    @torch.no_grad()
    def __call__(
        self,
        tensors: Tensors,
        kept: Kept,
        upstream: torch.Tensor,
        lse_upstream: _Optional,
        wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients that are wanted."""
        given = (tensors.query, tensors.key, tensors.value, upstream)
        read = dict(zip((*_PRODUCTS, "upstream"), map(with_dense_columns, given), strict=True))
        _, _, len_k, columns = read["value"].shape
        lines = upstream.shape[:3].numel()
        is_fused = self._may_fuse and fits(lines, len_k, columns, upstream.device)
        named = [name for name in _PRODUCTS if name in wanted]
        found: dict[str, torch.Tensor]
        found = {name: output_like(read[name], read[name].shape[3]) for name in named}
        if not (read["query"].numel() and read["key"].numel()):  # in a graph of any sizes
            return {name: torch.zeros_like(getattr(tensors, name)) for name in wanted}
        mask = as_bytes(tensors.mask)
        slopes = None if tensors.alibi_slopes is None else with_dense_columns(tensors.alibi_slopes)
        entries = num_entries(*read.values(), *found.values())
        prepared = self._known(kept.output, read, entries, Beside.of(mask, slopes), is_fused)
        delta = unfilled(kept.lse, kept.lse.shape)
        if lse_upstream is not None:
            lse_upstream = lse_upstream.contiguous()
        prepared.sums(kept.output, read["upstream"], lse_upstream, delta)
        if found:
            work = _Work(self._problem, read, found, entries, prepared.chunks)
            if prepared.fused is None:
                rest = (kept.lse, delta, None, kept.lse_rest, mask, slopes, kept.seed)
                made = work.written(
                    dict(zip(prepared.chunks, prepared.launches, strict=True)), rest
                )
            else:
                made = work.fused(*prepared.fused, kept.lse, delta)
            for _, of_planes in groupby(prepared.chunks, key=lambda chunk: chunk.planes):
                work.planes(list(of_planes), made)
        if "sinks" in wanted:
            assert tensors.sinks is not None
            found["sinks"] = sinks_gradient(tensors.sinks, kept.lse, delta)
        if upstream.is_cuda and not self._is_noted and {"query", "key", "value"} <= found.keys():
            self._is_noted = True
            note(Arguments(self._problem).known_by)
        return found

    def _known(
        self,
        output: torch.Tensor,
        read: dict[str, torch.Tensor],
        entries: int,
        beside: Beside,
        is_fused: bool,
    ) -> _Prepared:
        """Return what is prepared for tensors that lie as these."""
        query, key, upstream = read["query"], read["key"], read["upstream"]
        lying = (output.stride(), upstream.stride(), upstream.dtype, query.get_device(), is_fused)
        layout = (query.shape, key.shape, entries, beside, *lying)
        prepared = self._prepared
        if prepared is None or prepared.layout != layout:
            batch, _, len_q, _ = query.shape
            own = replace(self._problem, batch=batch, len_q=len_q, len_k=key.shape[2])
            arguments = Arguments(own)
            chunks = tuple(chunks_of(own, self._chunk_rows, entries))
            sums = arguments.sums(output, upstream)
            launches: tuple[Launch, ...] = ()
            fused = None
            if is_fused:
                kinds = Kind.GIVEN, Kind.CHANGES
                fused = (Fused(own, kinds[0], query.device), Fused(own, kinds[1], query.device))
            else:
                launches = tuple(map(partial(arguments.changes, beside=beside), chunks))
            prepared = self._prepared = _Prepared(layout, sums, chunks, launches, fused)
        return prepared


backward_of = kept_by_problem(_Backward)


class _Work:
    """What the chunks of one backward pass read and write.

    Args:
        problem: of the call.
        read: q, k, v and the gradient of the output, by name.
        found: the gradients that are written, by name.
        entries: parts of the batch.
        chunks: all of them.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        read: dict[str, torch.Tensor],
        found: dict[str, torch.Tensor],
        entries: int,
        chunks: tuple[Chunk, ...],
    ) -> None:
        self._scale, kv_heads, group = problem.scale, problem.num_kv_heads, problem.group_size
        self._read = {name: Planes(it, kv_heads, entries) for name, it in read.items()}
        self._found = {name: Planes(it, kv_heads, entries) for name, it in found.items()}
        self._given, self._group = read["query"], group
        self._space = Space(chunks, group)
        self._keys = range(read["key"].shape[2])

    def written(self, launches: dict[Chunk, Launch], rest: tuple[_Optional, ...]) -> _Made:
        """Return what makes weights and their changes of written-out scores and products.

        Args:
            launches: of each chunk.
            rest: what the kernel reads beside scores and products.
        """
        of_scores, of_products = self._memory(torch.float32)
        of_weights, of_changes = of_scores, of_products
        if self._given.dtype != torch.float32:
            of_weights, of_changes = self._memory(self._given.dtype)

        def made(
            chunk: Chunk, query: torch.Tensor, key: torch.Tensor, upstream: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            value = _padded(self._read["value"], chunk)
            place = self._space.place(chunk)
            scores, products = of_scores.as_strided(*place), of_products.as_strided(*place)
            weights, changes = of_weights.as_strided(*place), of_changes.as_strided(*place)
            multiply(query, key.mT, scores)
            multiply(upstream, value.mT, products)
            launches[chunk](scores, products, weights, changes, *rest)
            return weights, changes

        return made

    def fused(self, make: Fused, change: Fused, lse: torch.Tensor, delta: torch.Tensor) -> _Made:
        """Return what makes weights and their changes where scores and products are.

        Args:
            make: the kernel of weights.
            change: that of their changes.
            lse: log-sum-exp of rows, fp32 [B, Hq, Sq].
            delta: what products of a row are less, likewise.
        """
        of_weights, of_changes = self._memory(self._given.dtype)
        shape = (-1, self._group, lse.shape[2])
        by_plane = lse.reshape(shape), delta.reshape(shape)

        def made(
            chunk: Chunk, query: torch.Tensor, key: torch.Tensor, upstream: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            value = self._read["value"].keys(chunk)  # the kernel reads any number
            planes, rows = (slice(it.start, it.stop) for it in (chunk.planes, chunk.rows))
            of_rows, less = (it[planes, :, rows].contiguous() for it in by_plane)
            place = self._space.place(chunk)
            weights, changes = of_weights.as_strided(*place), of_changes.as_strided(*place)
            if chunk.keys:
                make(chunk, (query, key, weights), of_rows)
                change(chunk, (upstream, value, changes, weights), less)
            return weights, changes

        return made

    def _memory(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return memory for weights, and for their changes."""
        return [self._space.memory(self._given, dtype) for _ in range(2)]

    def planes(self, chunks: list[Chunk], made: _Made) -> None:
        """Write the gradients of some planes.

        Args:
            chunks: all of them.
            made: returns the weights of a chunk and their changes.
        """
        first = chunks[0]
        written: dict[str, torch.Tensor] = {
            name: self._found[name].part(first.planes, self._keys).squeeze(1)
            for name in ("key", "value")
            if name in self._found
        }
        sums = written
        # Products over other numbers of lines are added up of two, and other keys have columns
        # beside them: cuBLAS takes ten times as long for 3067 rows of a result as for 3072.
        is_whole = len(chunks) == 1 and first.keys == self._keys
        is_whole = is_whole and is_even(self._group * len(first.rows)) and is_even(len(first.keys))
        if not is_whole:
            rows = padded(len(self._keys))
            sums = {
                name: it.new_zeros((it.shape[0], rows, it.shape[2]), dtype=torch.float32)
                for name, it in written.items()
            }
        for chunk in chunks:
            self._chunk(chunk, made, sums, adds=not is_whole)
        if not is_whole:
            for name, item in written.items():
                item.copy_(sums[name][:, : len(self._keys)])

    def _chunk(
        self, chunk: Chunk, made: _Made, sums: dict[str, torch.Tensor], *, adds: bool
    ) -> None:
        """Write, or add, the gradients of one chunk."""
        query, upstream = (lines_of(self._read[name].rows(chunk)) for name in ("query", "upstream"))
        key = _padded(self._read["key"], chunk)
        weights, changes = made(chunk, query, key, upstream)
        keys = slice(chunk.keys.start, chunk.keys.start + pitch_of(chunk))
        if "value" in sums:
            _multiply_lines(weights, upstream, sums["value"][:, keys], 1.0, adds=adds)
        if "key" in sums:
            _multiply_lines(changes, query, sums["key"][:, keys], self._scale, adds=adds)
        if "query" in self._found:
            write_products(changes, key, self._found["query"].rows(chunk), self._scale)


def _padded(planes: Planes, chunk: Chunk) -> torch.Tensor:
    """Return the keys or values of a chunk, as many as its pitch."""
    return padded_keys(planes.keys_to_pitch(chunk), pitch_of(chunk))


def _multiply_lines(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scale: float, *, adds: bool
) -> None:
    """Write sums over lines, or add them, those that are too many for whole steps by themselves.

    Args:
        left: [P, L, N].
        right: [P, L, D].
        out: [P, N, D].
        scale: factor of the products.
        adds: they are added to what is there, as they must be where L is no multiple of `PITCH`.
    """
    left, lines = left.mT, right.shape[1]
    if is_even(lines):
        multiply(left, right, out, scale=scale, adds=adds)
        return
    steps = lines - lines % PITCH
    for part in (slice(0, steps), slice(steps, lines)):
        if part.start < part.stop:
            multiply(left[:, :, part], right[:, part], out, scale=scale, adds=adds)
