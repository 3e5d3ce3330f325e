"""FlexAttention, for score changes that SDPA lacks. GPUs only.

On a CPU it has no backward pass and compiles with a C++ compiler that users may not have,
so the reference and `chunked` serve there. The compiled function and block masks are kept;
a sink is applied to the result through the log-sum-exp, which FlexAttention differentiates.
"""

import importlib.util
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
import torch.nn.functional as F

from adaattn.backends.interface import Result, Tensors
from adaattn.spec import AttentionProblem, Aux, Capability, Feature, HeadGroup, Precision

__all__ = ["CAPABILITIES", "run"]

_KEPT_MASKS: Final = 64
_KEPT_KERNELS: Final = 256


def _unavailable() -> str:
    """Return why FlexAttention cannot run here, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


CAPABILITIES = (
    Capability(
        name="flex",
        backend="flex",
        device_types=("cuda",),
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.CAUSAL_BOTTOM_RIGHT
            | Feature.BOOLEAN_MASK
            | Feature.ADDITIVE_MASK
            | Feature.MASKED_POSITIONS
            | Feature.WIDE_MASK
            | Feature.SCALE_SIGN
            | Feature.WINDOW
            | Feature.DILATION
            | Feature.SOFTCAP
            | Feature.SINKS
            | Feature.SINKS_GRADIENT
            | Feature.ALIBI
            | Feature.PACKED
            | Feature.VALUE_DIM
            | Feature.BACKWARD
            | Feature.LSE
        ),
        max_head_dim=256,
        min_len_q=16,
        min_compute_capability=(8, 0),
        skips_hidden=True,
        is_fused=True,
        efficiency=0.55,
        # Host time, mostly the guards of the compiled function: 270 microseconds more than
        # the memory-efficient kernel's in training on an H200 (docs/kernel-notes.md).
        num_launches=50,
        unavailable=_unavailable(),
    ),
)

_ScoreMod = Callable[..., torch.Tensor]

_BLOCK: Final = 128
"""Side of FlexAttention's blocks."""

_MASK_ELEMENTS: Final = 1 << 22
"""Decisions of a mask that are written out at once, about 20 bytes each with their distances."""


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention by one compiled FlexAttention kernel."""
    mask_mod = _mask_mod(tensors, problem)
    block_mask = _block_mask(tensors, problem, mask_mod) if mask_mod is not None else None
    needs_lse = problem.has_sinks or Aux.LSE in problem.aux
    found = _compiled(problem)(
        tensors.query,
        tensors.key,
        tensors.value,
        score_mod=_score_mod(tensors, problem),
        block_mask=block_mask,
        scale=problem.scale,
        enable_gqa=problem.group_size > 1,
        return_lse=needs_lse,
    )
    if not needs_lse:
        return Result(output=found)
    output, lse = found
    if tensors.sinks is not None:
        sinks = tensors.sinks.float()[None, :, None]
        share = torch.sigmoid(lse - sinks)
        output = (output.float() * share.unsqueeze(-1)).to(output.dtype)
        lse = torch.logaddexp(lse, sinks)
    return Result(output=output, lse=lse if Aux.LSE in problem.aux else None)


@lru_cache(maxsize=_KEPT_KERNELS)
def _compiled(problem: AttentionProblem) -> Callable[..., Any]:
    """Return a compiled entry for the calls of one problem.

    Each has a code object of its own. Dynamo stops compiling one after 8 shapes, and would go on
    with FlexAttention's eager form, which writes out all scores and only warns.
    """
    own = types.FunctionType(_entry.__code__.replace(co_name=f"{_entry.__name__}_"), globals())
    return torch.compile(own, dynamic=False, fullgraph=True)


def _entry(*args: Any, **kwargs: Any) -> Any:
    """Return what FlexAttention returns."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(*args, **kwargs)


def _score_mod(tensors: Tensors, problem: AttentionProblem) -> _ScoreMod | None:
    """Return the change of a score by softcap, ALiBi and an additive mask; None for none."""
    softcap, slopes, offset = problem.softcap, tensors.alibi_slopes, problem.offset
    mask = tensors.mask if tensors.mask is not None and tensors.mask.is_floating_point() else None
    if softcap == 0 and slopes is None and mask is None:
        return None
    if slopes is not None:
        slopes = slopes.float().expand(problem.batch, problem.num_heads).contiguous()
    if mask is not None:
        mask = mask.expand(problem.batch, problem.num_heads, problem.len_q, problem.len_k)
    starts_q, starts_k = _starts(tensors, problem)
    shift = _packed_shift(tensors, problem)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            if starts_q is None:
                distance = i + offset - j
            else:
                distance = i - starts_q[i] + shift[i] - (j - starts_k[j])
            score = score - slopes[b, h] * torch.abs(distance)
        if mask is not None:
            score = score + mask[b, h, i, j]
        return score

    return score_mod


def _mask_mod(tensors: Tensors, problem: AttentionProblem) -> _ScoreMod | None:
    """Return which keys are seen, by position, boolean mask and packed sequence; None for all."""
    boolean = (
        tensors.mask if tensors.mask is not None and tensors.mask.dtype == torch.bool else None
    )
    if not problem.is_positional and boolean is None and problem.num_sequences == 0:
        return None
    if boolean is not None:
        boolean = boolean.expand(problem.batch, problem.num_heads, problem.len_q, problem.len_k)
    left, right = problem.window
    right = 0 if problem.is_causal else right
    offset, dilation = problem.offset, problem.dilation
    starts_q, starts_k = _starts(tensors, problem)
    shift = _packed_shift(tensors, problem)
    documents_q = _documents(tensors.cu_seqlens_q, problem.len_q)
    documents_k = _documents(tensors.cu_seqlens_k, problem.len_k)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        if starts_q is None:
            distance = i + offset - j
            seen = distance == distance
        else:
            distance = i - starts_q[i] + shift[i] - (j - starts_k[j])
            seen = documents_q[i] == documents_k[j]
        if right >= 0:
            seen = seen & (distance >= -right)
        if left >= 0:
            seen = seen & (distance <= left)
        if dilation > 1:
            seen = seen & (distance % dilation == 0)
        if boolean is not None:
            seen = seen & boolean[b, h, i, j]
        return seen

    return mask_mod


def _documents(bounds: torch.Tensor | None, length: int) -> Any:
    """Return the packed sequence of each token, int32 [T]."""
    if bounds is None:
        return None
    tokens = torch.arange(length, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds[1:].contiguous(), tokens, right=True, out_int32=True)


def _starts(tensors: Tensors, problem: AttentionProblem) -> tuple[Any, Any]:
    """Return the first token of each token's packed sequence, for queries and keys."""
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        return None, None
    documents_q = _documents(tensors.cu_seqlens_q, problem.len_q)
    documents_k = _documents(tensors.cu_seqlens_k, problem.len_k)
    return tensors.cu_seqlens_q[documents_q], tensors.cu_seqlens_k[documents_k]


def _packed_shift(tensors: Tensors, problem: AttentionProblem) -> Any:
    """Return Sk - Sq of each query's packed sequence if aligned to the end, else zeros."""
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        return None
    lengths = tensors.cu_seqlens_k.diff() - tensors.cu_seqlens_q.diff()
    if not problem.align:
        lengths = torch.zeros_like(lengths)
    return lengths[_documents(tensors.cu_seqlens_q, problem.len_q)]


@dataclass(frozen=True, slots=True)
class _MaskKey:
    """What a positional block mask depends on."""

    problem: tuple[object, ...]
    bounds: tuple[tuple[int, ...], tuple[int, ...]]
    device: torch.device


_BLOCK_MASKS: OrderedDict[_MaskKey, Any] = OrderedDict()


def _block_mask(tensors: Tensors, problem: AttentionProblem, mask_mod: _ScoreMod) -> Any:
    """Return the block mask; those that depend on positions alone are kept."""
    device = tensors.query.device
    per_head = tensors.mask is not None
    batch = problem.batch if per_head else 1
    heads = problem.num_heads if per_head else 1
    facts = (
        problem.len_q,
        problem.len_k,
        problem.is_causal,
        problem.align,
        problem.window,
        problem.dilation,
    )
    key = _MaskKey(facts, (tensors.bounds_q, tensors.bounds_k), device)
    if not per_head and key in _BLOCK_MASKS:
        _BLOCK_MASKS.move_to_end(key)
        return _BLOCK_MASKS[key]
    made = made_block_mask(mask_mod, (batch, heads, problem.len_q, problem.len_k), device)
    if not per_head:
        _BLOCK_MASKS[key] = made
        if len(_BLOCK_MASKS) > _KEPT_MASKS:
            _BLOCK_MASKS.popitem(last=False)
    return made


def made_block_mask(
    mask_mod: _ScoreMod, shape: tuple[int, int, int, int], device: torch.device
) -> Any:
    """Return what ``create_block_mask`` returns, made from some rows of blocks at a time.

    PyTorch's writes out all Sq x Sk decisions at once, 8 bytes each while it sums them up: 34 GB
    at 64K tokens.

    Args:
        mask_mod: whether query i of batch b and head h sees key j, for index tensors.
        shape: (B, H, Sq, Sk).
        device: where the mask is made.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, heads, len_q, len_k = shape
    blocks_q, blocks_k = -(-len_q // _BLOCK), -(-len_k // _BLOCK)
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    j = torch.arange(len_k, device=device)
    step = max(_MASK_ELEMENTS // (batch * heads * max(len_k, 1) * _BLOCK), 1)
    seen, whole = [], []
    for first in range(0, blocks_q, step):
        rows = range(first * _BLOCK, min((first + step) * _BLOCK, len_q))
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        part = mask_mod(b, h, i, j).expand(batch, heads, len(rows), len_k)
        part = F.pad(part, (0, -len_k % _BLOCK, 0, -len(rows) % _BLOCK))
        tiles = part.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
        counts = tiles.sum(dim=(3, 5), dtype=torch.int32)
        whole.append(counts == _BLOCK * _BLOCK)
        seen.append((counts > 0) & ~whole[-1])
    partial, full = (_ordered(torch.cat(items, dim=2)) for items in (seen, whole))
    assert partial[1].shape[-1] == blocks_k
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(len_q, len_k)
    )


def _ordered(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (how many blocks of keys each block of queries has, their numbers, kept first)."""
    order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
    return kept.sum(-1, dtype=torch.int32), order.int()
