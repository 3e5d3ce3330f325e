"""The backward pass of written-out scores: five products a chunk, in a fixed order.

Gradients of keys and values are added up over the chunks of rows in fp32; where one chunk has all
of them they are written at once. Equal inputs give equal bits.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
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
from adaattn.backends.own_kernels import sinks_gradient
from adaattn.backends.streamed.arguments import Arguments, Beside
from adaattn.backends.streamed.chunks import Chunk, chunks_of
from adaattn.backends.streamed.planes import Planes, Space, num_entries
from adaattn.backends.streamed.products import multiply
from adaattn.hardware import on_clear
from adaattn.spec import AttentionProblem

__all__ = ["gradients"]

_KEPT: Final = 256
_PRODUCTS: Final = ("query", "key", "value")

_Optional = torch.Tensor | None


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
        problem: of the call.
        tensors: of the call.
        kept: of its forward pass.
        upstream: gradient of the output, [B, Hq, Sq, Dv].
        lse_upstream: gradient of the log-sum-exp, fp32 [B, Hq, Sq]; None is zero.
        wanted: names, of `GIVEN`.

    Raises:
        ExecutorError: a kernel cannot be compiled here.
    """
    with torch.no_grad():
        return _backward(problem, kept.chunk_rows)(tensors, kept, upstream, lse_upstream, wanted)


@lru_cache(maxsize=_KEPT)
def _backward(problem: AttentionProblem, chunk_rows: int) -> "_Backward":
    """Return what computes the backward pass of a problem."""
    return _Backward(problem, chunk_rows)


on_clear(_backward.cache_clear)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is launched for calls of one layout.

    Args:
        layout: what it follows from.
        sums: of the products of outputs and gradients.
        chunks: of the scores.
        launches: of the gradients of each.
    """

    layout: tuple[Any, ...]
    sums: Launch
    chunks: tuple[Chunk, ...]
    launches: tuple[Launch, ...]


class _Backward:
    """Computes the gradients of one problem; lengths and strides are those of each call."""

    def __init__(self, problem: AttentionProblem, chunk_rows: int) -> None:
        self._problem = problem
        self._chunk_rows = chunk_rows
        self._prepared: _Prepared | None = None
        self._is_noted = False

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
        named = [name for name in _PRODUCTS if name in wanted]
        found: dict[str, torch.Tensor]
        found = {name: output_like(read[name], read[name].shape[3]) for name in named}
        if not (read["query"].numel() and read["key"].numel()):  # in a graph of any sizes
            return {name: torch.zeros_like(getattr(tensors, name)) for name in wanted}
        mask = as_bytes(tensors.mask)
        slopes = None if tensors.alibi_slopes is None else with_dense_columns(tensors.alibi_slopes)
        entries = num_entries(*read.values(), *found.values())
        prepared = self._known(kept.output, read, entries, Beside.of(mask, slopes))
        delta = unfilled(kept.lse, kept.lse.shape)
        if lse_upstream is not None:
            lse_upstream = lse_upstream.contiguous()
        prepared.sums(kept.output, read["upstream"], lse_upstream, delta)
        if found:
            rest = (kept.lse, delta, None, kept.lse_rest, mask, slopes, kept.seed)
            work = _Work(self._problem, read, found, entries, prepared.chunks)
            steps = zip(prepared.chunks, prepared.launches, strict=True)
            for _, of_planes in groupby(steps, key=lambda step: step[0].planes):
                work.planes(list(of_planes), rest)
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
    ) -> _Prepared:
        """Return what is prepared for tensors that lie as these."""
        query, key, upstream = read["query"], read["key"], read["upstream"]
        lying = (output.stride(), upstream.stride(), upstream.dtype, query.get_device())
        layout = (query.shape, key.shape, entries, beside, *lying)
        prepared = self._prepared
        if prepared is None or prepared.layout != layout:
            batch, _, len_q, _ = query.shape
            own = replace(self._problem, batch=batch, len_q=len_q, len_k=key.shape[2])
            arguments = Arguments(own)
            chunks = tuple(chunks_of(own, self._chunk_rows, entries))
            launches = tuple(map(partial(arguments.changes, beside=beside), chunks))
            sums = arguments.sums(output, upstream)
            prepared = self._prepared = _Prepared(layout, sums, chunks, launches)
        return prepared


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
        given = read["query"]
        fp32 = [Space(given, torch.float32, chunks, group) for _ in range(2)]
        own = fp32
        if given.dtype != torch.float32:
            own = [Space(given, given.dtype, chunks, group) for _ in range(2)]
        self._scores, self._products, self._weights, self._changes = *fp32, *own
        self._keys = range(read["key"].shape[2])

    def planes(self, steps: list[tuple[Chunk, Launch]], rest: tuple[_Optional, ...]) -> None:
        """Write the gradients of some planes.

        Args:
            steps: all chunks of them, and their launches.
            rest: what the kernel reads beside scores and products.
        """
        first, _ = steps[0]
        written: dict[str, torch.Tensor] = {
            name: self._found[name].part(first.planes, self._keys).squeeze(1)
            for name in ("key", "value")
            if name in self._found
        }
        sums = written
        is_whole = len(steps) == 1 and first.keys == self._keys
        if not is_whole:
            sums = {name: torch.zeros_like(it, dtype=torch.float32) for name, it in written.items()}
        for chunk, launch in steps:
            self._chunk(chunk, launch, rest, sums, adds=not is_whole)
        if not is_whole:
            for name, item in written.items():
                item.copy_(sums[name])

    def _chunk(
        self,
        chunk: Chunk,
        launch: Launch,
        rest: tuple[_Optional, ...],
        sums: dict[str, torch.Tensor],
        *,
        adds: bool,
    ) -> None:
        """Write, or add, the gradients of one chunk."""
        query, upstream = (self._read[name].lines(chunk) for name in ("query", "upstream"))
        key, value = (self._read[name].keys(chunk) for name in ("key", "value"))
        scores, products = self._scores.of(chunk), self._products.of(chunk)
        weights, changes = self._weights.of(chunk), self._changes.of(chunk)
        multiply(query, key.mT, scores)
        multiply(upstream, value.mT, products)
        launch(scores, products, weights, changes, *rest)
        keys = slice(chunk.keys.start, chunk.keys.stop)
        if "value" in sums:
            multiply(weights.mT, upstream, sums["value"][:, keys], adds=adds)
        if "key" in sums:
            multiply(changes.mT, query, sums["key"][:, keys], scale=self._scale, adds=adds)
        if "query" in self._found:
            self._found["query"].write(chunk, changes, key, self._scale)
