"""Runs a chunk after the other: products of queries and keys, softmax, products with values.

On Hopper the first two are one kernel where it serves (`fused_launch`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

import torch

from adaattn.backends.allocation import output_like
from adaattn.backends.common import with_dense_columns
from adaattn.backends.compiled_before import is_noted, note
from adaattn.backends.device.launch import Launch
from adaattn.backends.interface import Direct, Result, Tensors
from adaattn.backends.masks import as_bytes
from adaattn.backends.operators import trained
from adaattn.backends.own_kernels import check_untransformed
from adaattn.backends.streamed.arguments import Arguments, Beside
from adaattn.backends.streamed.chunks import Chunk, chunks_of
from adaattn.backends.streamed.fused_launch import FusedChunks
from adaattn.backends.streamed.fused_rules import fits, serves
from adaattn.backends.streamed.gradients import gradients
from adaattn.backends.streamed.planes import (
    Planes,
    Space,
    fill_for_nothing,
    num_entries,
    with_statistics,
)
from adaattn.backends.streamed.products import multiply
from adaattn.backends.training import Differentiated, drawn_seed
from adaattn.hardware import on_clear
from adaattn.spec import AttentionProblem, HeadGroup

__all__ = ["KERNELS", "direct", "is_ready", "run"]

_KEPT: Final = 256


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return exact attention, ``group.launch.chunk_rows`` query rows at a time.

    Raises:
        ExecutorError: a kernel cannot be compiled here.
    """
    return KERNELS.attend(tensors, problem, group.launch.chunk_rows)


def direct(problem: AttentionProblem, group: HeadGroup) -> Direct:
    """Return the function of repeated calls."""
    rows = group.launch.chunk_rows
    return KERNELS.direct(problem, lambda own: _Launcher(own, rows), rows)


def is_ready(problem: AttentionProblem) -> bool:
    """Return whether this machine has compiled the kernels of a problem."""
    asked = trained(problem) if problem.wants_gradients else problem
    return is_noted(Arguments(asked).known_by)


def _computed(problem: AttentionProblem, *given: Any, chunk_rows: int = 0, **others: Any) -> Result:
    """Return the output and the statistics that the problem asks for."""
    return with_statistics(_launcher(problem, chunk_rows), problem, given, others)


KERNELS: Final = Differentiated("streamed", _computed, gradients)


@lru_cache(maxsize=_KEPT)
def _launcher(problem: AttentionProblem, chunk_rows: int) -> "_Launcher":
    """Return the launcher of a problem."""
    return _Launcher(problem, chunk_rows)


on_clear(_launcher.cache_clear)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The chunks of calls of one layout, and the launch of each softmax."""

    layout: tuple[Any, ...]
    chunks: tuple[Chunk, ...]
    launches: tuple[Launch, ...]
    fused: FusedChunks | None


class _Launcher:
    """Computes one problem; lengths and strides are those of each call."""

    def __init__(self, problem: AttentionProblem, chunk_rows: int) -> None:
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
        statistics: tuple[torch.Tensor | None, ...] = (None, None, None),
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
            statistics: fp32 [B, Hq, Sq] each, written where given: log-sum-exp, maximum, entropy.
            seed: int64 [1], of dropout; None draws one.
            lse_rest: fp32 [B, Hq, Sq], written where given: what rounding takes from the
                log-sum-exp.
        """
        check_untransformed(query, key, value)
        query, key, value = map(with_dense_columns, (query, key, value))
        _, _, len_k, columns = value.shape
        lines = query.shape[:3].numel()
        is_fused = self._may_fuse and fits(lines, len_k, columns, query.device)
        output = output_like(query, value.shape[3])
        if not (query.numel() and key.numel()):  # in a graph whose sizes nobody knew
            fill_for_nothing(output, *statistics, lse_rest)
            return output
        mask = as_bytes(mask)
        sinks, slopes = (None if it is None else with_dense_columns(it) for it in (sinks, slopes))
        if self._problem.dropout_p and seed is None:
            seed = drawn_seed(query)
        entries = num_entries(query, key, value, output)
        beside = Beside.of(mask, slopes, sinks)
        prepared = self._prepared
        lying = (output.stride(), query.get_device(), is_fused)
        layout = (query.shape, key.shape, entries, beside, *lying)
        if prepared is None or prepared.layout != layout:
            prepared = self._prepared = self._prepare(layout, output)
        tensors = query, key, value, output
        with torch.no_grad():
            if prepared.fused is not None:
                prepared.fused.run(tensors, statistics[0])
            else:
                rest = (*statistics, lse_rest, mask, sinks, slopes, seed)
                self._run(prepared, tensors, entries, rest)
        # What a backward pass takes is compiled there.
        if query.is_cuda and not self._is_noted and not self._problem.wants_gradients:
            self._is_noted = True
            note(Arguments(self._problem).known_by)
        return output

    def _prepare(self, layout: tuple[Any, ...], output: torch.Tensor) -> _Prepared:
        """Return the chunks and launches for tensors of a layout."""
        query_shape, key_shape, entries, beside, *_, is_fused = layout
        own = replace(self._problem, batch=query_shape[0], len_q=query_shape[2], len_k=key_shape[2])
        chunks = tuple(chunks_of(own, self._chunk_rows, entries))
        if is_fused:
            return _Prepared(layout, chunks, (), FusedChunks(own, chunks, output, entries))
        launches = map(partial(Arguments(own).softmax, beside=beside), chunks)
        return _Prepared(layout, chunks, tuple(launches), None)

    def _run(
        self,
        prepared: _Prepared,
        tensors: tuple[torch.Tensor, ...],
        entries: int,
        rest: tuple[torch.Tensor | None, ...],
    ) -> None:
        """Compute the chunks.

        Args:
            prepared: what they are.
            tensors: q, k, v and the output.
            entries: parts of the batch.
            rest: what the softmax writes and reads beside scores and weights.
        """
        problem, chunks = self._problem, prepared.chunks
        query, key, value, output = (Planes(it, problem.num_kv_heads, entries) for it in tensors)
        given, group = tensors[0], problem.group_size
        scores_space = Space(given, torch.float32, chunks, group)
        weights_space = scores_space
        if given.dtype != torch.float32:
            weights_space = Space(given, given.dtype, chunks, group)
        for chunk, launch in zip(chunks, prepared.launches, strict=True):
            scores, weights = scores_space.of(chunk), weights_space.of(chunk)
            multiply(query.lines(chunk), key.padded_keys(chunk).mT, scores)
            launch(scores, weights, *rest)
            output.write(chunk, weights, value.padded_keys(chunk))
