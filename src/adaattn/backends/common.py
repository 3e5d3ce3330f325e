"""Mathematics that several executors use unchanged: which keys a row sees, and its softmax.

The oracle in `reference` does not use this file: the two are written apart so that a
mistake in one shows as a difference.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from adaattn._constants import LN_2
from adaattn.backends.interface import Tensors
from adaattn.errors import UnsupportedError
from adaattn.hardware.probe import describe
from adaattn.spec import Align, AttentionProblem, Aux, Precision

__all__ = [
    "RowStatistics",
    "accumulation_dtype",
    "grouped_product",
    "head_windows",
    "hides_nothing",
    "host_bounds",
    "is_aligned",
    "key_range",
    "layout_facts",
    "mask_part",
    "multiplies_as_is",
    "multiplies_in_tiles",
    "never_hides",
    "packed_positions",
    "packed_tile_seen",
    "part_of",
    "sequences",
    "softmax_rows",
    "tile_mask",
    "tile_scores",
    "visible_tile",
    "with_dense_columns",
]

_CPU: Final = describe("cpu")
_MOST_ALIGNED: Final = 16


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Softmax weights of some rows and what can be read off them; shapes [B, Hq, R(, C)]."""

    weights: torch.Tensor
    lse: torch.Tensor
    row_max: torch.Tensor
    entropy: torch.Tensor | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64 and fp32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sequences(
    tensors: Tensors, problem: AttentionProblem
) -> Iterator[tuple[Tensors, AttentionProblem]]:
    """Yield each packed sequence as a problem of its own; the whole call when not packed."""
    if problem.num_sequences == 0:
        yield tensors, problem
        return
    bounds_q, bounds_k = host_bounds(tensors)
    for n in range(problem.num_sequences):
        rows = range(bounds_q[n], bounds_q[n + 1])
        cols = range(bounds_k[n], bounds_k[n + 1])
        yield (
            replace(part_of(tensors, rows, cols), cu_seqlens_q=None, bounds_q=()),
            replace(problem, num_sequences=0, len_q=len(rows), len_k=len(cols)),
        )


def part_of(tensors: Tensors, rows: range, cols: range) -> Tensors:
    """Return the tensors of some rows and keys, as views."""
    if len(rows) == tensors.query.shape[2] and len(cols) == tensors.key.shape[2]:
        return tensors
    return replace(
        tensors,
        query=tensors.query[:, :, rows.start : rows.stop],
        kv=tensors.kv.of_tokens(cols),
        mask=mask_part(tensors.mask, rows, cols),
        mask_given=None,
    )


def mask_part(mask: torch.Tensor | None, rows: range, cols: range) -> torch.Tensor | None:
    """Return the part of a broadcastable mask that concerns some rows and keys, as a view."""
    if mask is None:
        return None
    if mask.shape[-1] != 1:
        mask = mask[..., cols.start : cols.stop]
    return mask if mask.shape[-2] == 1 else mask[:, :, rows.start : rows.stop]


def host_bounds(tensors: Tensors) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bounds of packed sequences on the host; on a GPU this waits for the device."""
    if tensors.bounds_q or tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        return tensors.bounds_q, tensors.bounds_k
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "torch.compile",
            ["the bounds of packed sequences are read on the host, which a graph cannot do"],
            "Leave plan and backend out, or call it outside the compiled function.",
        )
    return tuple(tensors.cu_seqlens_q.tolist()), tuple(tensors.cu_seqlens_k.tolist())


def packed_positions(
    starts_q: torch.Tensor, starts_k: torch.Tensor, problem: AttentionProblem
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each query's and each key's packed sequence, and its place in it: int32 [T] each.

    Nothing is read on the host. Where sequences are aligned at their ends a query's place is that
    of the key beside it.
    """
    sequence_q, position_q = _places(starts_q, problem.len_q)
    sequence_k, position_k = _places(starts_k, problem.len_k)
    if problem.align is Align.BOTTOM_RIGHT:
        longer = starts_k.diff() - starts_q.diff()
        # Beyond bounds that end too early, which nothing has checked on a GPU, is none to read.
        position_q = position_q + longer[sequence_q.clamp(max=len(longer) - 1)]
    return sequence_q, sequence_k, position_q, position_k


def _places(starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed sequence of each token, and the token's place in it: int32 [T] each."""
    tokens = torch.arange(length, device=starts.device, dtype=starts.dtype)
    sequence = torch.searchsorted(starts[1:].contiguous(), tokens, right=True, out_int32=True)
    return sequence, tokens - starts[sequence]


def packed_tile_seen(
    starts_q: torch.Tensor, starts_k: torch.Tensor, problem: AttentionProblem
) -> torch.Tensor:
    """Return which keys the rows of all packed sequences see by position: boolean [Tq, Tk]."""
    sequence_q, sequence_k, rows, cols = packed_positions(starts_q, starts_k, problem)
    seen = sequence_q.unsqueeze(-1) == sequence_k
    # The places are counted from the corner already.
    visible = visible_tile(replace(problem, align=Align.TOP_LEFT), rows, cols)
    return seen if visible is None else seen & visible


def key_range(problem: AttentionProblem, start: int, stop: int) -> tuple[int, int]:
    """Return the range of keys that rows ``start..stop`` can see at all."""
    left, right = problem.window
    first, last = start + problem.offset, stop - 1 + problem.offset
    end = problem.len_k
    if problem.is_causal or right >= 0:
        end = min(end, last + (0 if problem.is_causal else right) + 1)
    begin = max(first - left, 0) if left >= 0 else 0
    return begin, max(end, begin)


def visible_tile(
    problem: AttentionProblem, rows: torch.Tensor, cols: torch.Tensor
) -> torch.Tensor | None:
    """Return which keys are seen, by position alone: boolean [..., R, C], or None for all.

    Args:
        problem: not packed, or in places of one packed sequence.
        rows: [..., R] query row numbers.
        cols: [..., C] key numbers.
    """
    if not problem.is_positional:
        return None
    distance = (rows + problem.offset).unsqueeze(-1) - cols.unsqueeze(-2)
    left, right = problem.window
    right = 0 if problem.is_causal else right
    visible = torch.ones_like(distance, dtype=torch.bool)  # `functionalize` knows no &=
    if right >= 0:
        visible.logical_and_(distance >= -right)
    if left >= 0:
        visible.logical_and_(distance <= left)
    if problem.dilation > 1:
        visible.logical_and_(distance % problem.dilation == 0)
    return visible


def head_windows(
    window: torch.Tensor, problem: AttentionProblem, rows: torch.Tensor, cols: range
) -> torch.Tensor:
    """Return which keys the window of each head shows: boolean [Hq, R, C].

    Args:
        window: [Hq, 2], left and right.
        problem: not packed.
        rows: [R] query row numbers.
        cols: key numbers.
    """
    keys = torch.arange(cols.start, cols.stop, device=rows.device)
    distance = (rows + problem.offset).unsqueeze(-1) - keys
    left, right = window.T[:, :, None, None]
    seen: torch.Tensor = ((left < 0) | (distance <= left)) & ((right < 0) | (distance >= -right))
    return seen


def hides_nothing(problem: AttentionProblem, rows: range, cols: range) -> bool:
    """Return whether position hides no key of a rectangular tile from any of its rows."""
    left, right = problem.window
    right = 0 if problem.is_causal else right
    if problem.dilation > 1:
        return False
    if right >= 0 and cols.stop - 1 > rows.start + problem.offset + right:
        return False
    return not (left >= 0 and cols.start < rows.stop - 1 + problem.offset - left)


def never_hides(problem: AttentionProblem) -> bool:
    """Return whether position hides nothing however many keys there are: of a growing cache too."""
    return not problem.is_causal and problem.window == (-1, -1) and problem.dilation == 1


def tile_mask(
    tensors: Tensors, problem: AttentionProblem, rows: torch.Tensor, cols: range, *, all_seen: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (what is added to the scores, which keys are seen) of a tile; None for nothing.

    Args:
        tensors: not packed.
        problem: not packed.
        rows: [R] query row numbers.
        cols: the keys of the tile.
        all_seen: position hides nothing here (`hides_nothing`).
    """
    dtype = accumulation_dtype(tensors.query.dtype)
    keys = torch.arange(cols.start, cols.stop, device=rows.device)
    bias: torch.Tensor | None = None
    if tensors.alibi_slopes is not None:
        distance = ((rows + problem.offset).unsqueeze(-1) - keys).abs()
        bias = -tensors.alibi_slopes[..., None, None].to(dtype) * distance.to(dtype)
    visible = None if all_seen else visible_tile(problem, rows, keys)
    if tensors.head_window is not None and not all_seen:
        windows = head_windows(tensors.head_window, problem, rows, cols)
        visible = windows if visible is None else windows & visible
    if tensors.mask is not None:
        mask = _mask_rows(tensors.mask, rows, cols)
        if mask.dtype == torch.bool:
            visible = mask if visible is None else mask & visible
        else:
            bias = mask.to(dtype) if bias is None else bias + mask.to(dtype)
    return bias, visible


def layout_facts(*tensors: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the fields of the problem that strides decide; none in a graph, which fixes none."""
    if torch.compiler.is_compiling():
        return {}
    return {
        "dense_columns": all(item.stride(-1) == 1 for item in tensors),
        "stride_bytes": _alignment(*tensors),
        "mask_is_aligned": mask is None or is_aligned(mask),
    }


def is_aligned(mask: torch.Tensor) -> bool:
    """Return False of a mask on a GPU with rows that do not begin at multiples of 16 bytes."""
    if not mask.is_cuda or mask.shape[-2:-1] in ((), (1,)):
        return True
    return _alignment(mask) == _MOST_ALIGNED


def _alignment(*tensors: torch.Tensor) -> int:
    """Return what all strides but the last, in bytes, are multiples of: 16 or a part of it."""
    steps = [
        step * item.element_size()
        for item in tensors
        for step, size in zip(item.stride()[:-1], item.shape, strict=False)
        if size > 1
    ]
    return math.gcd(_MOST_ALIGNED, *steps)


def with_dense_columns(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with adjacent columns; kernels misread any other and say nothing."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def multiplies_as_is(precision: Precision) -> bool:
    """Return whether this CPU multiplies numbers of a format at least as fast as wider ones."""
    return precision.bits > 16 or (precision is Precision.BF16 and precision in _CPU.instructions)


def multiplies_in_tiles(problem: AttentionProblem) -> bool:
    """Return whether a CPU multiplies the inputs by its tiles: more of them in the same time."""
    return problem.device_type == "cpu" and problem.precision is Precision.BF16 and _CPU.has_tiles


def grouped_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right where right has one head for each group of left's heads.

    Args:
        left: [B, Hq, R, X].
        right: [B, Hkv, X, Y].
    """
    batch, heads, rows, inner = left.shape
    kv_heads = right.shape[1]
    if heads == kv_heads:
        return left @ right
    folded = left.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return (folded @ right).reshape(batch, heads, rows, right.shape[-1])


def tile_scores(
    tensors: Tensors,
    problem: AttentionProblem,
    rows: torch.Tensor,
    cols: range,
    *,
    all_seen: bool = False,
) -> torch.Tensor:
    """Return the scores of some rows after scale, softcap, bias and masks: [B, Hq, R, C]."""
    dtype = accumulation_dtype(tensors.query.dtype)
    query = tensors.query.index_select(2, rows).to(dtype) * problem.scale
    if tensors.head_scale is not None:
        query = query * tensors.head_scale[:, None, None].to(dtype)
    keys = tensors.key[:, :, cols.start : cols.stop].to(dtype)
    scores = grouped_product(query, keys.transpose(-1, -2))
    if problem.softcap > 0:
        cap = problem.softcap
        in_place = not scores.requires_grad
        scores = scores.div_(cap).tanh_().mul_(cap) if in_place else cap * torch.tanh(scores / cap)
    if tensors.head_softcap is not None:
        caps = tensors.head_softcap[:, None, None].to(dtype)
        divisors = caps.masked_fill(caps <= 0, 1.0)
        scores = torch.where(caps > 0, caps * torch.tanh(scores / divisors), scores)
    bias, visible = tile_mask(tensors, problem, rows, cols, all_seen=all_seen)
    if bias is not None:
        scores = scores + bias
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def softmax_rows(
    scores: torch.Tensor, sinks: torch.Tensor | None, aux: Aux = Aux.NONE
) -> RowStatistics:
    """Return weights and statistics of rows of scores; rows that see nothing weigh zero.

    Args:
        scores: [B, Hq, R, C], hidden keys as -inf.
        sinks: [Hq] logits that join the denominator, or None.
        aux: the entropy is computed only when asked for.
    """
    if scores.shape[-1] == 0:
        row_max = scores.new_full(scores.shape[:-1], float("-inf"))
    else:
        row_max = scores.amax(-1)
    reference = row_max.detach()
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None]
        reference = torch.maximum(reference, sink.detach())
    unseen = row_max == float("-inf")
    reference = reference.masked_fill(reference == float("-inf"), 0.0)
    weights = (scores - reference[..., None]).exp_()
    total = weights.sum(-1)
    sink_weight = torch.exp(sink - reference) if sinks is not None else None
    if sink_weight is not None:
        total = total + sink_weight
    safe_total = total.masked_fill(unseen, 1.0)
    divisor = safe_total[..., None]
    weights = weights / divisor if weights.requires_grad else weights.div_(divisor)
    lse = (reference + safe_total.log()).masked_fill(unseen, float("-inf"))
    entropy = None
    if aux.value & Aux.ENTROPY.value:
        entropy = _entropy(weights)
        if sink_weight is not None:
            sink_entropy = _entropy((sink_weight / safe_total)[..., None])
            entropy = entropy + sink_entropy.masked_fill(unseen, 0.0)
    return RowStatistics(weights, lse, row_max, entropy)


def _entropy(weights: torch.Tensor) -> torch.Tensor:
    """Return the entropy in bits of the last dimension; 0 log 0 is 0, in gradients too."""
    positive = weights > 0
    logs = torch.where(positive, weights, 1.0).log()
    return -(weights * logs).sum(-1) / LN_2


def _mask_rows(mask: torch.Tensor, rows: torch.Tensor, cols: range) -> torch.Tensor:
    """Return the part of a broadcastable mask that concerns some rows and keys."""
    if mask.shape[-1] != 1:
        mask = mask[..., cols.start : cols.stop]
    return mask if mask.shape[-2] == 1 else mask.index_select(2, rows)
