"""Exact attention with every feature in bounded memory: query rows are taken a chunk at a time.

A chunk reads only the keys that its rows can see, so windows and causal order save time as
well as memory. Where nothing but masks is asked for, a chunk is one SDPA call; softcap and
sinks take matrix products and a softmax (`written`), what is added to such scores or read off
their rows an explicit one (`explicit`), recomputed in the backward pass. On a CPU what a list of
blocks leaves out costs nothing. Not for speed on a GPU where FlexAttention can serve.

The gradients of k and v, sums over chunks, add up in fp32. Masks that follow from positions
alone are kept between calls (`adaattn.backends.tiles`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from adaattn.backends.alone import one_by_one
from adaattn.backends.chunk_rows import choose_chunk_rows, row_bytes
from adaattn.backends.common import (
    accumulation_dtype,
    host_bounds,
    key_range,
    mask_part,
    multiplies_in_tiles,
    part_of,
    sequences,
)
from adaattn.backends.explicit import as_result, explicit_tile
from adaattn.backends.interface import Direct, Result, Tensors, combine
from adaattn.backends.keys_values import KeysValues
from adaattn.backends.listed import attend_listed, is_gathered
from adaattn.backends.masked import (
    is_fused,
    is_in_order,
    is_plain,
    packed_tile,
    sdpa_tile,
    whole_packed,
    whole_tile,
)
from adaattn.backends.masks import may_keep
from adaattn.backends.sdpa_call import fused_attention, needs_care
from adaattn.backends.sinks import (
    flash_sinks_tile,
    has_flash_sinks,
    whole_flash_sinks,
)
from adaattn.backends.written import (
    is_written,
    packed_written,
    whole_written,
    written_tile,
)
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup, KVKind, MaskKind

__all__ = ["CAPABILITIES", "direct", "run"]


def _order(problem: AttentionProblem) -> int:
    """Return 30, a mask for SDPA; on a GPU 70 for packed sequences if it waits for their bounds.

    A list of blocks is a mask too, and none that skips anything: 70 on a GPU. So are windows of
    each head, and a scale or softcap of each takes scores that are written out.

    On a GPU a short problem in training goes to SDPA before FlashAttention-2: there the host is
    the slower one, and that kernel's views and backward pass cost it 30 to 100 us more. Windows of
    128 tokens take it 1.25 times the time on the device too (H200, PyTorch 2.11, 2026-11).
    """
    if problem.device_type != "cuda":
        return 30
    if problem.num_sequences and not _is_one_call(problem):
        return 70
    if problem.has_blocks or problem.head_terms.value:
        return 70
    short = problem.len_q * problem.len_k <= _SHORT_TRAINING
    ungrouped = problem.group_size == 1 or problem.sdpa_default == "sdpa.cudnn"
    return 8 if problem.requires_grad and short and ungrouped and is_plain(problem) else 30


CAPABILITIES = (
    Capability(
        name="chunked",
        backend="chunked",
        features=~Feature(0),
        kv_kinds=(KVKind.DENSE, KVKind.PACKED),
        skips_hidden=True,
        efficiency=0.5,
        num_launches=14,
        order=_order,
        chunk_rows=choose_chunk_rows,
        row_bytes=row_bytes,
    ),
)

_Piece = tuple[torch.Tensor, ...]
_Chunk = Callable[[Tensors, AttentionProblem, range, range], _Piece]
"""Computes one tile: its tensors hold the rows and keys of the two ranges, and no others."""

_PRODUCTS_OF_A_CALL: Final = {False: 1_000_000, True: 5_000_000}
_PRODUCTS_OF_A_WRITTEN_CALL: Final = 2_000_000
_FEW_TOKENS: Final = 48
_MOST_PACKED: Final = 1 << 23
"""See `_is_one_call`."""

_SHORT_TRAINING: Final = 1 << 18
"""Pairs of tokens; see `_order`."""

_MOST_KEPT: Final = {"cpu": 64 << 20, "cuda": 512 << 20}

_BLOCK: Final = 512
"""Keys that a window's gradients are added up in; a chunk joins the blocks that it reads."""


def direct(problem: AttentionProblem, group: HeadGroup) -> Direct | None:
    """Return the one call of SDPA that a problem is; None where it is several, or none."""
    if problem.batch_invariant:
        return None
    if not problem.num_sequences:
        whole = whole_tile(problem, group) or whole_flash_sinks(problem, group)
        if whole or (problem.mask is not MaskKind.NONE and _is_by_kernel(problem)):
            return whole
        return whole_written(problem, group)
    if not _is_one_call(problem) or not is_plain(problem) or needs_care(problem):
        return None
    return whole_packed(problem)


def _is_by_kernel(problem: AttentionProblem) -> bool:
    """Return whether PyTorch's kernels compute a chunk; else its scores are written out."""
    return is_plain(problem) or has_flash_sinks(problem)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention computed some query rows at a time, as ``group.launch`` says."""
    if problem.batch_invariant and problem.batch:
        return _each_alone(tensors, problem, group.launch.chunk_rows)
    if is_gathered(problem) and is_plain(problem) and not torch.compiler.is_compiling():
        output = attend_listed(tensors, problem, group.launch.chunk_rows)
        if output is not None:
            return Result(output=output)
    if not problem.num_sequences:
        return _one_sequence(tensors, problem, group.launch.chunk_rows)
    if _is_one_call(problem):
        starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        assert starts_q is not None and starts_k is not None
        bounds, writes = (tensors.bounds_q, tensors.bounds_k), not is_plain(problem)
        mask = packed_tile(tensors.query, (starts_q, starts_k), bounds, problem, hides=writes)
        if writes:
            return Result(output=packed_written(tensors, mask, problem))
        output = fused_attention(tensors.query, tensors.key, tensors.value, mask, problem)
        return Result(output=output)
    if problem.len_q and problem.len_k and is_plain(problem) and tensors.mask is None:
        return _plain_sequences(tensors, problem, group.launch.chunk_rows)
    parts = [
        _one_sequence(part, part_problem, group.launch.chunk_rows)
        for part, part_problem in sequences(tensors, problem)
    ]
    return _joined_sequences(parts, tensors)


def _each_alone(tensors: Tensors, problem: AttentionProblem, chunk_rows: int) -> Result:
    """Return attention of which no bit depends on what else is in the batch.

    Packed sequences are of many lengths: each has the rows that it would have alone.
    """
    parts = []
    for part, own in one_by_one(tensors, problem):
        lengths = own.len_q, own.len_k
        if (
            part.mask is None
            and is_plain(own)
            and is_fused(own)
            and is_in_order(part, own, lengths)
        ):
            output = fused_attention(part.query, part.key, part.value, None, own, is_causal=True)
            parts.append(Result(output=output))
            continue
        rows = choose_chunk_rows(own, None) if problem.num_sequences else chunk_rows
        parts.append(_one_sequence(part, own, rows))
    if problem.num_sequences:
        return _joined_sequences(parts, tensors)
    return parts[0] if len(parts) == 1 else combine(parts, torch.cat)


def _plain_sequences(tensors: Tensors, problem: AttentionProblem, chunk_rows: int) -> Result:
    """Return attention of packed sequences that SDPA computes one by one."""
    query, key, value = tensors.query, tensors.key, tensors.value
    bounds_q, bounds_k = host_bounds(tensors)
    lengths_q, lengths_k = (
        [stop - start for start, stop in pairwise(bounds)] for bounds in (bounds_q, bounds_k)
    )
    outputs = []
    for q, k, v in zip(
        query.split(lengths_q, 2), key.split(lengths_k, 2), value.split(lengths_k, 2), strict=True
    ):
        lengths = q.shape[2], k.shape[2]
        if is_in_order(tensors, problem, lengths):
            outputs.append(fused_attention(q, k, v, None, problem, is_causal=True))
            continue
        part = replace(
            tensors, query=q, kv=KeysValues(key=k, value=v), cu_seqlens_q=None, bounds_q=()
        )
        part_problem = replace(problem, num_sequences=0, len_q=lengths[0], len_k=lengths[1])
        outputs.append(_one_sequence(part, part_problem, chunk_rows).output)
    return Result(output=outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2))


def _is_one_call(problem: AttentionProblem) -> bool:
    """Return whether one call with a mask is to serve all packed sequences: of SDPA, or a tile.

    On a GPU it does where that mask is small: one call for each would wait for their bounds. On a
    CPU it does where it beats those: a call costs 25 to 35 us, the scores between sequences 30 to
    60 us for each million multiplications. The two meet at 1 to 1.3 million a sequence (AMD EPYC
    9004 with 2 cores, float32 and bfloat16, 32 to 512 tokens, 3 to 16 sequences, 2026-11); at 4 to
    10 million where products go by tiles (Intel Xeon with AMX and 2 cores, bfloat16). Scores
    written out, with sinks or a softcap, cost 200 us a sequence: up to 1 million one tile takes 0.1
    to 0.8 of the time, at 4 million 0.3 to 2.4 (the same, 2 and 8 sequences).
    """
    tokens = problem.len_q, problem.len_k
    others = problem.mask is not MaskKind.NONE or problem.has_alibi
    if others or 0 in tokens:
        return False
    products = problem.num_heads * problem.head_dim * tokens[0] * tokens[1]
    if not is_plain(problem):
        most = _PRODUCTS_OF_A_WRITTEN_CALL * problem.num_sequences
        return problem.device_type == "cpu" and is_written(problem) and products <= most
    if problem.device_type == "cuda":
        return tokens[0] * tokens[1] <= _MOST_PACKED
    most = _PRODUCTS_OF_A_CALL[multiplies_in_tiles(problem)] * problem.num_sequences
    return products <= most or max(tokens) <= _FEW_TOKENS


def _joined_sequences(parts: list[Result], tensors: Tensors) -> Result:
    """Return the results of packed sequences one after another."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].weights is not None:  # [1, Hq, T, T], zero between sequences
        _, bounds = host_bounds(tensors)
        for part, (start, stop) in zip(parts, pairwise(bounds), strict=True):
            assert part.weights is not None
            part.weights = F.pad(part.weights, (start, bounds[-1] - stop))
    return combine(parts, partial(torch.cat, dim=2))


def _one_sequence(tensors: Tensors, problem: AttentionProblem, chunk_rows: int) -> Result:
    """Return attention of one dense problem."""
    length = problem.len_q
    step = min(chunk_rows or length, length)
    chunk: _Chunk = explicit_tile
    if length and is_plain(problem):
        chunk = partial(sdpa_tile, step=step)
    elif length and has_flash_sinks(problem) and may_keep(tensors.query):
        chunk = partial(flash_sinks_tile, step=step)
    elif is_written(problem):
        chunk = written_tile
    if step == length:
        rows, cols = range(length), _keys(problem, range(length))
        columns = list(chunk(part_of(tensors, rows, cols), problem, rows, cols))
        return as_result(columns, problem.aux)
    spans = [range(start, min(start + step, length)) for start in range(0, length, step)]
    if torch.is_grad_enabled() and problem.requires_grad:
        pieces = _differentiable(chunk, tensors, problem, spans)
        columns = [torch.cat(column, dim=2) for column in zip(*pieces, strict=True)]
    else:
        columns = _written(chunk, tensors, problem, spans)
    return as_result(columns, problem.aux)


def _keys(problem: AttentionProblem, rows: range) -> range:
    """Return the keys that some rows can see at all; every key for no rows."""
    if not rows:
        return range(problem.len_k)
    begin, end = key_range(problem, rows.start, rows.stop)
    return range(begin, end) if begin < end else range(0)


def _written(
    chunk: _Chunk, tensors: Tensors, problem: AttentionProblem, spans: list[range]
) -> list[torch.Tensor]:
    """Return each output of all chunks, written into one tensor as they come.

    Kept apart until the end they lie between the chunks' temporaries, whose memory an
    allocator then cannot give back: 188 MiB resident instead of 8 on a CPU. Of causal rows the
    last see most keys, and go first: what they free has room for all that follow. In the other
    order each chunk asks for a little more than any before it freed: 40 MiB instead of 16. With
    dropout they go in order: the same random numbers are for the same rows as with gradients.
    """
    columns: list[torch.Tensor] = []
    for rows in spans if problem.dropout_p else reversed(spans):
        cols = _keys(problem, rows)
        piece = chunk(part_of(tensors, rows, cols), problem, rows, cols)
        if not columns:
            columns = [
                item.new_empty((*item.shape[:2], problem.len_q, *item.shape[3:])) for item in piece
            ]
        for column, item in zip(columns, piece, strict=True):
            column[:, :, rows.start : rows.stop] = item
    return columns


def _differentiable(
    chunk: _Chunk, tensors: Tensors, problem: AttentionProblem, spans: list[range]
) -> list[_Piece]:
    """Return the chunks, which the backward pass computes again.

    What several chunks read is widened once, because autograd adds the chunks' gradients in
    the dtype of what they read: 16 chunks in bf16 had 15 times the error of one. Slices of a
    whole tensor would each get a gradient as long as that tensor, so rows are split and the
    keys of a window come in blocks.
    """
    queries = tensors.query.split(len(spans[0]), dim=2)
    size = _BLOCK if problem.window[0] >= 0 else max(problem.len_k, 1)
    keys, values = (_widened(item).split(size, dim=2) for item in (tensors.key, tensors.value))
    mask = tensors.mask
    if mask is not None and problem.mask_requires_grad and mask.shape[2] == 1:
        mask = _widened(mask)
    shared = replace(
        tensors,
        sinks=None if tensors.sinks is None else _widened(tensors.sinks),
        alibi_slopes=None if tensors.alibi_slopes is None else _widened(tensors.alibi_slopes),
        head_terms=None if tensors.head_terms is None else tensors.head_terms.widened(),
    )

    def run(query: torch.Tensor, rows: range) -> _Piece:
        cols = _keys(problem, rows)
        tile = replace(
            shared,
            query=query,
            kv=KeysValues(key=_joined(keys, cols), value=_joined(values, cols)).to(query.dtype),
            mask=mask_part(mask, rows, cols),
        )
        return chunk(tile, problem, rows, cols)

    parts = zip(queries, spans, strict=True)
    if (is_plain(problem) or has_flash_sinks(problem)) and _keeps_little(problem, spans):
        return [run(query, rows) for query, rows in parts]
    # The query is an argument so that the recomputation finds its device's random state.
    return [checkpoint(run, query, rows, use_reentrant=False) for query, rows in parts]


def _keeps_little(problem: AttentionProblem, spans: list[range]) -> bool:
    """Return whether chunks need not be computed again: SDPA's fused kernels keep no scores.

    What their backward pass reads, their masks and their keys and values, is 64 MiB at most, on a
    GPU 512.
    """
    if torch.compiler.is_compiling() or not is_fused(problem):
        return False
    size = problem.precision.bits // 8
    if problem.device_type == "cpu":
        size = max(size, 4)
    heads = problem.batch * problem.num_heads if problem.has_alibi else 1
    if problem.mask_shape:
        heads = max(heads, math.prod(problem.mask_shape[:2]))
    kept = problem.num_heads if has_flash_sinks(problem) else problem.num_kv_heads
    columns = problem.batch * kept * (problem.head_dim + problem.value_dim)
    elements = 0
    for rows in spans:
        elements += len(_keys(problem, rows)) * (heads * len(rows) + columns)
    return size * elements <= _MOST_KEPT[problem.device_type]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype that sums of its gradients take."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def _joined(blocks: tuple[torch.Tensor, ...], cols: range) -> torch.Tensor:
    """Return some of the tokens that were split into equal blocks."""
    size = max(blocks[0].shape[2], 1)
    first = cols.start // size
    read = blocks[first : max(-(-cols.stop // size), first + 1)]
    joined = read[0] if len(read) == 1 else torch.cat(read, dim=2)
    return joined[:, :, cols.start - first * size : cols.stop - first * size]
