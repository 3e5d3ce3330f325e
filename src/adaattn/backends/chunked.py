"""Exact attention with every feature in bounded memory: query rows are taken a chunk at a time.

A chunk reads only the keys that its rows can see, so windows and causal order save time as
well as memory. Where nothing but masks is asked for, a chunk is one SDPA call; softcap,
sinks and auxiliary outputs take matrix products and an explicit softmax, recomputed in the
backward pass. Not for speed on a GPU where FlexAttention can serve.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from adaattn.backends.common import (
    fused_attention,
    grouped_product,
    hides_nothing,
    key_range,
    sequences,
    softmax_rows,
    tile_mask,
    tile_scores,
)
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import AttentionProblem, Aux, Capability, Feature, HeadGroup, Precision

__all__ = ["CAPABILITIES", "run"]

CAPABILITIES = (
    Capability(
        name="chunked",
        backend="chunked",
        features=~Feature(0),
        skips_hidden=True,
        efficiency=0.5,
        num_launches=14,
    ),
)

_Piece = tuple[torch.Tensor, ...]
_Chunk = Callable[[Tensors, AttentionProblem, int, int], _Piece]


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention computed ``group.chunk_rows`` query rows at a time (0 is all rows)."""
    parts = [
        _one_sequence(part, part_problem, group.chunk_rows)
        for part, part_problem in sequences(tensors, problem)
    ]
    if len(parts) == 1:
        return parts[0]
    return Result(
        output=torch.cat([part.output for part in parts], dim=2),
        lse=_join([part.lse for part in parts]),
        row_max=_join([part.row_max for part in parts]),
        entropy=_join([part.entropy for part in parts]),
        weights=_block_diagonal([part.weights for part in parts], tensors, problem),
    )


def _one_sequence(tensors: Tensors, problem: AttentionProblem, chunk_rows: int) -> Result:
    """Return attention of one dense problem."""
    rows = chunk_rows or max(problem.len_q, 1)
    starts = range(0, problem.len_q, rows)
    chunk = _sdpa_chunk if _is_plain(problem) else _explicit_chunk
    spans = [(start, min(start + rows, problem.len_q)) for start in starts]
    if not spans:
        return _result(list(_explicit_chunk(tensors, problem, 0, 0)), problem.aux)
    if torch.is_grad_enabled() and problem.requires_grad:
        one = _recomputed if len(spans) > 1 else _plainly
        pieces = [one(chunk, tensors, problem, span) for span in spans]
        columns = [torch.cat(column, dim=2) for column in zip(*pieces, strict=True)]
    else:
        columns = _written(chunk, tensors, problem, spans)
    return _result(columns, problem.aux)


def _written(
    chunk: _Chunk, tensors: Tensors, problem: AttentionProblem, spans: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return each output of all chunks, written into one tensor as they come.

    Kept apart until the end they lie between the chunks' temporaries, whose memory an
    allocator then cannot give back: 188 MiB resident instead of 8 on a CPU.
    """
    columns: list[torch.Tensor] = []
    for start, stop in spans:
        piece = chunk(tensors, problem, start, stop)
        if not columns:
            columns = [
                item.new_empty((*item.shape[:2], problem.len_q, *item.shape[3:])) for item in piece
            ]
        for column, item in zip(columns, piece, strict=True):
            column[:, :, start:stop] = item
    return columns


def _plainly(
    chunk: _Chunk, tensors: Tensors, problem: AttentionProblem, span: tuple[int, int]
) -> _Piece:
    """Return one chunk, what backward needs of it kept."""
    return chunk(tensors, problem, *span)


def _recomputed(
    chunk: _Chunk, tensors: Tensors, problem: AttentionProblem, span: tuple[int, int]
) -> _Piece:
    """Return one chunk that the backward pass computes again."""

    def run(query: torch.Tensor) -> _Piece:
        return chunk(replace(tensors, query=query), problem, *span)

    # The query is an argument so that the recomputation finds its device's random state.
    piece: _Piece = checkpoint(run, tensors.query, use_reentrant=False)
    return piece


def _is_plain(problem: AttentionProblem) -> bool:
    """Return whether SDPA with a mask can compute a chunk."""
    if problem.softcap > 0 or problem.has_sinks or problem.aux is not Aux.NONE:
        return False
    # A bias in 16 bits would lose distances past 256, and what a wider mask says.
    half = problem.precision in (Precision.BF16, Precision.FP16)
    return not (half and (problem.has_alibi or problem.mask_is_wide))


def _sdpa_chunk(tensors: Tensors, problem: AttentionProblem, start: int, stop: int) -> _Piece:
    """Return the output of rows ``start..stop`` by one SDPA call."""
    begin, end = key_range(problem, start, stop)
    query = tensors.query[:, :, start:stop]
    if begin == end:
        return _blind(tensors, query)
    rows = torch.arange(start, stop, device=query.device)
    cols = range(begin, end)
    all_seen = hides_nothing(problem, range(start, stop), cols)
    bias, mask = tile_mask(tensors, problem, rows, cols, all_seen=all_seen)
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    keys, values = tensors.key[:, :, begin:end], tensors.value[:, :, begin:end]
    output = fused_attention(query, keys, values, mask, problem)
    return (output,)


def _blind(tensors: Tensors, query: torch.Tensor) -> _Piece:
    """Return zeros for rows that see no key, tied to the inputs so that gradients are zeros."""
    tied = [item[..., :0].sum() for item in (query, tensors.key, tensors.value)]
    zero = torch.stack(tied).sum().to(query.dtype)
    return (zero.expand(*query.shape[:-1], tensors.value.shape[-1]),)


def _explicit_chunk(tensors: Tensors, problem: AttentionProblem, start: int, stop: int) -> _Piece:
    """Return output, log-sum-exp, maximum, entropy and weights of rows ``start..stop``."""
    begin, end = key_range(problem, start, stop) if stop > start else (0, problem.len_k)
    rows = torch.arange(start, stop, device=tensors.query.device)
    all_seen = hides_nothing(problem, range(start, stop), range(begin, end))
    scores = tile_scores(tensors, problem, rows, range(begin, end), all_seen=all_seen)
    found = softmax_rows(scores, tensors.sinks, problem.aux)
    weights = found.weights
    dropped = F.dropout(weights, problem.dropout_p) if problem.dropout_p > 0 else weights
    value = tensors.value[:, :, begin:end].to(weights.dtype)
    output = grouped_product(dropped, value).to(tensors.query.dtype)
    piece: list[torch.Tensor] = [output]
    if Aux.LSE in problem.aux:
        piece.append(found.lse)
    if Aux.ROW_MAX in problem.aux:
        piece.append(found.row_max)
    if found.entropy is not None:
        piece.append(found.entropy)
    if Aux.WEIGHTS in problem.aux:
        piece.append(F.pad(weights, (begin, problem.len_k - end)))
    return tuple(piece)


def _result(columns: list[torch.Tensor], aux: Aux) -> Result:
    """Return the result whose auxiliary outputs follow the order of `Aux`."""
    rest = iter(columns[1:])
    return Result(
        output=columns[0],
        lse=next(rest) if Aux.LSE in aux else None,
        row_max=next(rest) if Aux.ROW_MAX in aux else None,
        entropy=next(rest) if Aux.ENTROPY in aux else None,
        weights=next(rest) if Aux.WEIGHTS in aux else None,
    )


def _join(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sequences' rows one after another, or None."""
    present = [part for part in parts if part is not None]
    return torch.cat(present, dim=2) if present else None


def _block_diagonal(
    parts: list[torch.Tensor | None], tensors: Tensors, problem: AttentionProblem
) -> torch.Tensor | None:
    """Return packed weights as [1, Hq, T, T], zero between sequences."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    total = tensors.bounds_k[-1]
    rows = [
        F.pad(part, (tensors.bounds_k[n], total - tensors.bounds_k[n + 1]))
        for n, part in enumerate(present)
    ]
    return torch.cat(rows, dim=2)
