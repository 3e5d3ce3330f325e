"""The definition of attention: the oracle that every other executor is held against.

    s = scale * q k^T;  s = c * tanh(s / c);  s = s - slope * |p - j| + mask
    w = exp(s) / (sum exp(s) + exp(sink)) over the keys seen, 0 elsewhere;  out = w v

Scale, c and the window may be those of each head, from tensors; a c of 0 leaves s as it is.

Eager PyTorch on any device, differentiable in every input. It allocates all Sq x Sk
scores and copies k and v for each query head: clear before fast. Products are computed in
float64 for float64 input and in float32 otherwise, whatever precision a plan names.

A row that sees no key has a zero output, a zero gradient and ``lse = -inf``, also when
sinks are given: a sink takes probability, it is not seen.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from adaattn._constants import LOG2_E
from adaattn.backends.block_list import BlockList
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, Capability, Feature, HeadGroup, KVKind

__all__ = ["CAPABILITIES", "attention", "positions", "run", "visible_keys"]

CAPABILITIES = (
    Capability(
        name="reference",
        backend="reference",
        features=~Feature.BATCH_INVARIANT,  # batched products choose their kernels by size
        kv_kinds=(KVKind.DENSE, KVKind.PACKED),
        materialises_scores=True,
        expands_kv=True,
        efficiency=0.05,
        num_launches=12,
        order=lambda problem: 90,
    ),
)

_NOTHING = float("-inf")


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return exact attention; ``group`` changes nothing here.

    Args:
        tensors: the canonical tensors of the call.
        problem: what to compute.
        group: which heads and how, unused: the definition has no variants.
    """
    del group
    return attention(tensors, problem)


def attention(
    tensors: Tensors, problem: AttentionProblem, *, compute_dtype: torch.dtype | None = None
) -> Result:
    """Return attention as it is defined, with the outputs that ``problem.aux`` asks for.

    Args:
        tensors: the canonical tensors of the call.
        problem: what to compute; sizes are taken from the tensors.
        compute_dtype: dtype of every intermediate; None is float64 for float64 input and
            float32 otherwise. The input's own dtype gives the error of eager PyTorch.

    Example:
        >>> import torch
        >>> from adaattn.testing import attention, make_problem, make_tensors
        >>> problem = make_problem(len_q=5, is_causal=True)
        >>> attention(make_tensors(problem), problem).output.shape
        torch.Size([1, 2, 5, 16])
    """
    in_dtype = tensors.query.dtype
    aux_dtype = torch.float64 if in_dtype is torch.float64 else torch.float32
    scores = _scores(tensors, problem, compute_dtype or aux_dtype)
    visible = visible_keys(tensors, problem) & (scores != _NOTHING)

    # Hidden scores are replaced before exp, so that no infinity meets a zero gradient.
    row_max = _largest(scores.masked_fill(~visible, _NOTHING))
    shift = row_max.detach()
    if tensors.sinks is not None:
        sinks = tensors.sinks.to(scores.dtype)[None, :, None]
        shift = torch.maximum(shift, sinks.detach())
    shift = shift.masked_fill(shift == _NOTHING, 0.0)
    shifted = torch.where(visible, scores - shift[..., None], 0.0)
    numerator = shifted.exp().masked_fill(~visible, 0.0)
    total = numerator.sum(-1)
    if tensors.sinks is not None:
        total = total + (sinks - shift).exp()
    total = total.masked_fill(total == 0, 1.0)
    weights = numerator / total[..., None]

    value = _per_query_head(tensors.value, scores)
    kept = functional.dropout(weights, problem.dropout_p, training=problem.dropout_p > 0)
    aux = problem.aux
    result = {}
    if aux & Aux.LSE:
        lse = shift + total.log()
        result["lse"] = lse.masked_fill(~visible.any(-1), _NOTHING).to(aux_dtype)
    if aux & Aux.ROW_MAX:
        result["row_max"] = row_max.to(aux_dtype)
    if aux & Aux.ENTROPY:
        # -sum w log w with log w = shifted - log(total): finite where a weight underflows to 0.
        nats = (weights * (total.log()[..., None] - shifted)).sum(-1)
        if tensors.sinks is not None:
            log_sink = sinks - shift - total.log()
            log_sink = log_sink.masked_fill(log_sink == _NOTHING, 0.0)  # exp(0) * 0 adds nothing
            nats = nats - log_sink.exp() * log_sink
        result["entropy"] = (nats * LOG2_E).to(aux_dtype)
    if aux & Aux.WEIGHTS:
        result["weights"] = weights.to(aux_dtype)
    if aux & Aux.DROPPED_MASS:
        everything = replace(tensors, blocks=None)
        hidden = scores.detach().masked_fill(~visible_keys(everything, problem), _NOTHING)
        kept_or_sink = torch.where(visible.any(-1), shift + total.log(), _NOTHING)
        dropped = hidden.masked_fill(visible, _NOTHING).logsumexp(-1)
        share = torch.sigmoid(dropped - kept_or_sink.detach())
        result["dropped_mass"] = share.masked_fill(dropped == _NOTHING, 0.0).to(aux_dtype)
    return Result(output=(kept @ value).to(in_dtype), **result)


def visible_keys(tensors: Tensors, problem: AttentionProblem) -> torch.Tensor:
    """Return which keys each row may see: boolean, broadcastable to [B, Hq, Sq, Sk].

    Boolean mask, causality, window, dilation and packed sequences; an additive mask hides
    nothing here (its -inf entries do, once added).
    """
    rows, keys, same_sequence = positions(tensors, problem)
    ahead = keys - rows[:, None]
    left, right = problem.window
    visible = same_sequence
    if problem.is_causal:
        visible = visible & (ahead <= 0)
    if left >= 0:
        visible = visible & (ahead >= -left)
    if right >= 0:
        visible = visible & (ahead <= right)
    if problem.dilation > 1:
        visible = visible & (ahead % problem.dilation == 0)
    if tensors.head_window is not None:
        lefts, rights = tensors.head_window.T[:, :, None, None]
        visible = visible & ((lefts < 0) | (ahead >= -lefts)) & ((rights < 0) | (ahead <= rights))
    visible = visible[None] if visible.dim() == 3 else visible[None, None]
    if tensors.blocks is not None:
        visible = visible & _in_listed_blocks(tensors, tensors.blocks)
    if tensors.mask is not None and tensors.mask.dtype is torch.bool:
        visible = visible & tensors.mask
    return visible


def _in_listed_blocks(tensors: Tensors, blocks: BlockList) -> torch.Tensor:
    """Return whether the block of each key is listed for the block of each row."""
    rows = torch.arange(tensors.query.shape[2], device=tensors.query.device) // blocks.block_q
    keys = torch.arange(tensors.key.shape[2], device=tensors.query.device) // blocks.block_k
    counts = blocks.counts[:, :, rows, None]
    listed = counts < 0
    for place in range(blocks.indices.shape[3]):
        named = blocks.indices[:, :, rows, place, None] == keys
        listed = listed | (named & (place < counts))
    return listed


def positions(
    tensors: Tensors, problem: AttentionProblem
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions p [Sq], key indices j [Sk], and whether each pair shares a sequence."""
    len_q, len_k = tensors.query.shape[2], tensors.key.shape[2]
    device = tensors.query.device
    rows = torch.arange(len_q, device=device)
    keys = torch.arange(len_k, device=device)
    to_end = problem.align is Align.BOTTOM_RIGHT
    bounds_q, bounds_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if bounds_q is None or bounds_k is None:
        return rows + (len_k - len_q if to_end else 0), keys, torch.ones(1, 1, device=device).bool()
    starts_q, ends_q = bounds_q.long().unfold(0, 2, 1).T
    starts_k, ends_k = bounds_k.long().unfold(0, 2, 1).T
    row_sequence = torch.bucketize(rows, ends_q.contiguous(), right=True)
    key_sequence = torch.bucketize(keys, ends_k.contiguous(), right=True)
    offset = to_end * (ends_k - starts_k - ends_q + starts_q)
    rows = rows - (starts_q - offset)[row_sequence]
    return rows, keys - starts_k[key_sequence], row_sequence[:, None] == key_sequence


def _scores(tensors: Tensors, problem: AttentionProblem, dtype: torch.dtype) -> torch.Tensor:
    """Return the scores [B, Hq, Sq, Sk] with softcap, ALiBi and additive mask."""
    query = tensors.query.to(dtype)
    scores = problem.scale * (query @ _per_query_head(tensors.key, query).mT)
    if tensors.head_scale is not None:
        scores = (scores * tensors.head_scale[:, None, None]).to(dtype)
    if problem.softcap > 0:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if tensors.head_softcap is not None:
        caps = tensors.head_softcap.to(dtype)[:, None, None]
        divisors = torch.where(caps > 0, caps, 1.0)
        scores = torch.where(caps > 0, caps * torch.tanh(scores / divisors), scores)
    if tensors.alibi_slopes is not None:
        rows, keys, _ = positions(tensors, problem)
        distance = (rows[:, None] - keys).abs().to(dtype)
        scores = scores - tensors.alibi_slopes.to(dtype)[..., None, None] * distance
    if tensors.mask is not None and tensors.mask.dtype is not torch.bool:
        scores = scores + tensors.mask.to(dtype)
    return scores


def _per_query_head(heads: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return [B, Hq, Sk, D] in the dtype of ``like``: kv head ``h // group_size`` for head h."""
    group_size = like.shape[1] // max(heads.shape[1], 1)
    return heads.to(like.dtype).repeat_interleave(group_size, dim=1)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """Return the row maxima, -inf for rows without keys."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], _NOTHING)
    return scores.amax(-1)
