"""Runs a chunk after the other: products of queries and keys, softmax, products with values.

On Hopper the first two are one kernel where it serves (`fused_launch`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from adaattn.backends.allocation import output_like, unfilled
from adaattn.backends.autograd import drawn_seed
from adaattn.backends.common import with_dense_columns
from adaattn.backends.compiled_before import is_noted, note
from adaattn.backends.device.launch import Launch
from adaattn.backends.interface import Result
from adaattn.backends.masks import as_bytes
from adaattn.backends.operators import trained
from adaattn.backends.own_kernels import check_untransformed, kept_by_problem
from adaattn.backends.streamed.arguments import Arguments, Beside
from adaattn.backends.streamed.chunks import Chunk, chunks_of
from adaattn.backends.streamed.fused_launch import FusedChunks
from adaattn.backends.streamed.fused_rules import fits, serves
from adaattn.backends.streamed.gradients import backward_of
from adaattn.backends.streamed.planes import (
    Planes,
    Space,
    Taken,
    fill_for_nothing,
    lines_of,
    num_entries,
    padded_keys,
    write_products,
)
from adaattn.backends.streamed.products import multiply
from adaattn.backends.training import Differentiated, with_statistics
from adaattn.spec import AttentionProblem

__all__ = ["KERNELS", "direct", "is_ready", "run"]


def is_ready(problem: AttentionProblem) -> bool:
    """Return whether this machine has compiled the kernels of a problem."""
    asked = trained(problem) if problem.wants_gradients else problem
    return is_noted(Arguments(asked).known_by)


def _computed(problem: AttentionProblem, *given: Any, chunk_rows: int = 0, **others: Any) -> Result:
    """Return the output and the statistics that the problem asks for."""
    return with_statistics(_launcher(problem, chunk_rows), problem, given, others)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk of calls of one layout.

    Args:
        scores: shape and strides in their memory, and those of weights.
        queries: its rows.
        keys: up to its pitch.
        values: likewise.
        written: rows of the output.
        softmax: makes weights of its scores.
    """

    scores: tuple[tuple[int, ...], tuple[int, ...]]
    queries: Taken
    keys: Taken
    values: Taken
    written: Taken
    softmax: Launch


class _WrittenChunks:
    """The chunks of calls of one layout, as `FusedChunks`, whose scores are written.

    Args:
        problem: of the call.
        chunks: all of them.
        tensors: q, k, v and the output of a call, which those of others lie like.
        entries: as from `num_entries`.
        beside: how what stands beside them lies.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        chunks: tuple[Chunk, ...],
        tensors: tuple[torch.Tensor, ...],
        entries: int,
        beside: Beside,
    ) -> None:
        query, key, value, output = tensors
        arguments = Arguments(problem)
        self._space = Space(chunks, problem.group_size)
        self._pieces = []
        for chunk in chunks:
            take = partial(Taken, chunk, problem.num_kv_heads, entries)
            piece = _Piece(
                scores=self._space.place(chunk),
                queries=take(Planes.rows, query),
                keys=take(Planes.keys_to_pitch, key),
                values=take(Planes.keys_to_pitch, value),
                written=take(Planes.rows, output),
                softmax=arguments.softmax(chunk, beside),
            )
            self._pieces.append(piece)

    def run(self, tensors: tuple[torch.Tensor, ...], rest: tuple[torch.Tensor | None, ...]) -> None:
        """Compute all chunks.

        Args:
            tensors: q, k, v and the output.
            rest: what the softmax writes and reads beside scores and weights.
        """
        query, key, value, output = tensors
        of_scores = of_weights = self._space.memory(query, torch.float32)
        if query.dtype != torch.float32:
            of_weights = self._space.memory(query, query.dtype)
        for it in self._pieces:
            scores, weights = of_scores.as_strided(*it.scores), of_weights.as_strided(*it.scores)
            pitch = scores.shape[2]
            keys = padded_keys(it.keys.of(key), pitch)
            multiply(lines_of(it.queries.of(query)), keys.mT, scores)
            it.softmax(scores, weights, *rest)
            write_products(weights, padded_keys(it.values.of(value), pitch), it.written.of(output))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is computed for calls of one layout.

    Args:
        layout: what it follows from.
        output: shape and strides of the output.
        chunks: one after the other.
    """

    layout: tuple[Any, ...]
    output: tuple[torch.Size, tuple[int, ...]]
    chunks: FusedChunks | _WrittenChunks


class _Launcher:
    """Computes one problem; lengths and strides are those of each call."""

    def __init__(self, problem: AttentionProblem, chunk_rows: int = 0) -> None:
        self._problem = problem
        self._chunk_rows = chunk_rows
        self._prepared: _Prepared | None = None
        self._is_noted = False
        self._may_fuse = serves(problem)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        *unserved: None,
        statistics: tuple[torch.Tensor | None, ...] = (None,) * 4,
        seed: torch.Tensor | None = None,
        lse_rest: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention [B, Hq, Sq, Dv].

        Args:
            query: [B, Hq, Sq, D], and so on as in `Tensors`.
            key: likewise.
            value: likewise.
            mask: of up to four dimensions.
            sinks: likewise.
            slopes: likewise, or [Hq].
            unserved: what else a `Direct` takes.
            statistics: fp32 [B, Hq, Sq] each, written where given, in the order of `STATISTICS`.
            seed: int64 [1], of dropout; None draws one.
            lse_rest: fp32 [B, Hq, Sq], written where given: what rounding takes from the
                log-sum-exp.
        """
        check_untransformed(query, key, value)
        statistics = statistics[:3]
        query, key, value = map(with_dense_columns, (query, key, value))
        if not (query.numel() and key.numel()):  # in a graph whose sizes nobody knew
            output = output_like(query, value.shape[3])
            fill_for_nothing(output, *statistics, lse_rest)
            return output
        mask = as_bytes(mask)
        sinks, slopes = (None if it is None else with_dense_columns(it) for it in (sinks, slopes))
        if self._problem.dropout_p and seed is None:
            seed = drawn_seed(query)
        lying = query.stride(), key.stride(), value.stride(), query.get_device()
        beside = Beside.of(mask, slopes, sinks)
        layout = (query.shape, key.shape, value.shape, lying, beside)
        with torch.no_grad():
            prepared = self._prepared
            if prepared is None or prepared.layout != layout:
                prepared = self._prepared = self._prepare(layout, (query, key, value), beside)
            output = unfilled(query, *prepared.output)
            rest = (*statistics, lse_rest, mask, sinks, slopes, seed)
            prepared.chunks.run((query, key, value, output), rest)
        # What a backward pass takes is compiled there.
        if query.is_cuda and not self._is_noted and not self._problem.wants_gradients:
            self._is_noted = True
            note(Arguments(self._problem).known_by)
        return output

    def _prepare(
        self, layout: tuple[Any, ...], given: tuple[torch.Tensor, ...], beside: Beside
    ) -> _Prepared:
        """Return what is computed for tensors that lie as these."""
        query, key, value = given
        batch, _, len_q, _ = query.shape
        own = replace(self._problem, batch=batch, len_q=len_q, len_k=key.shape[2])
        output = output_like(query, value.shape[3])
        tensors = (*given, output)
        entries = num_entries(*tensors)
        chunks = tuple(chunks_of(own, self._chunk_rows, entries))
        lines = query.shape[:3].numel()
        computed: FusedChunks | _WrittenChunks
        if self._may_fuse and fits(lines, own.len_k, own.value_dim, query.device):
            computed = FusedChunks(own, chunks, tensors, entries)
        else:
            computed = _WrittenChunks(own, chunks, tensors, entries, beside)
        return _Prepared(layout, (output.shape, output.stride()), computed)


_launcher = kept_by_problem(_Launcher)
KERNELS: Final = Differentiated("streamed", _computed, backward_of, _Launcher, is_chunked=True)
run, direct = KERNELS.run, KERNELS.direct
