"""q, k and v with fewer columns, and attention on them whose gradients lose no direction.

Forward is softmax(scale (q A)(k B)^T) (v W) W^T. Differentiating that, with A, B and W as
constants, would cut every direction that the projections leave out: heads of low rank could
never grow out of it. So backward takes all columns of q, k and v, with the output O and the
log-sum-exp L that the projected forward found: P = exp(scores - L), dV = P^T dO,
dS = P * (dO V^T - rowsum(dO * O)). These are the gradients of exact attention up to about the
error of the forward pass, for the price of exact backward: low rank saves training its forward
pass alone.

That L is only used where it is proven to be near the exact one. With R = I - A B^T, a projector,
scores differ by scale (q R) (k R^T)^T, so L differs by at most scale max|q R| max|k R^T|; where
that is above `_TRUSTED`, as with a few tokens unlike all others, exact attention is computed again
before its backward. On a CPU PyTorch's fused kernel does all this; where D and Dv differ, and on a
GPU, rows of the exact weights are computed again in chunks.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

from adaattn.backends.common import accumulation_dtype, grouped_product, with_dense_columns
from adaattn.backends.interface import Result
from adaattn.backends.masks import additive_mask
from adaattn.backends.sdpa_call import careful_sdpa, fused_attention
from adaattn.linalg.projections import ScoreProjections, score_projections, value_basis
from adaattn.spec import AttentionProblem

__all__ = ["Projected", "attention_with_whole_gradients", "project"]

_ROWS: Final = 256
"""Query rows whose weights are written out at once in the backward pass."""

_TRUSTED: Final = 0.1
"""Largest proven change of a log-sum-exp, in nats, under which the projected one may be used."""

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Tensors with fewer columns, and what they came from.

    Args:
        query: [B, Hq, Sq, rank].
        key: [B, Hkv, Sk, rank].
        value: [B, Hkv, Sk, value_rank].
        scores: the projections of q and k, one for each key head; None where all columns stay, and
            where a basis of k stands for both.
        basis: [B, Hkv, Dv, value_rank] directions of v's columns; None where all columns stay.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scores: ScoreProjections | None
    basis: torch.Tensor | None

    def widened(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output [B, Hq, Sq, value_rank] with all columns of v again."""
        return output if self.basis is None else grouped_product(output, self.basis.mT)

    def attention(self, mask: torch.Tensor | None, problem: AttentionProblem) -> Result:
        """Return attention on these columns, with all columns of v again."""
        output = fused_attention(
            self.query, self.key, self.value, mask, problem, is_causal=problem.is_causal
        )
        return Result(output=self.widened(output))


def project(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rank: int, value_rank: int
) -> Projected:
    """Return the tensors with fewer columns; a rank of 0 keeps all.

    The query heads of a group share their projection, so that k keeps its heads. Projections
    are constants to autograd.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        rank: columns of q and k.
        value_rank: columns of v.
    """
    batch, _, len_q, dim = query.shape
    scores = basis = None
    if 0 < rank < dim:
        folded = query.reshape(batch, key.shape[1], -1, dim)
        with torch.no_grad():
            scores = score_projections(folded, key, rank)
        query = (folded @ scores.query_factor).reshape(batch, -1, len_q, rank)
        key = key @ scores.key_factor
    if 0 < value_rank < value.shape[-1]:
        with torch.no_grad():
            basis = value_basis(value, value_rank)
        value = value @ basis
    return Projected(query=query, key=key, value=value, scores=scores, basis=basis)


@torch.library.custom_op("adaattn::projected_attention", mutates_args=())
def attention_with_whole_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    rank: int,
    value_rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output [B, Hq, Sq, Dv], log-sum-exp or nothing); see the module.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        mask: boolean (True = attend) or added, broadcastable to [B, Hq, Sq, Sk].
        scale: factor of the scores.
        is_causal: top-left aligned.
        rank: columns of q and k; 0 is all.
        value_rank: columns of v; 0 is all.
    """
    found = project(query, key, value, rank, value_rank)
    columns = (found.query, found.key, found.value)
    if _is_fused(query, value) and found.query.shape[-1] == found.value.shape[-1]:
        output, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu.default(
            *map(with_dense_columns, columns),
            0.0,
            is_causal,
            attn_mask=additive_mask(mask, query.dtype),
            scale=scale,
        )
    else:
        output = careful_sdpa(*columns, mask, is_causal=is_causal, scale=scale)
        lse = output.new_empty(0)
    if lse.numel():
        lse = lse.masked_fill(~(_score_change(query, key, found, scale) <= _TRUSTED), float("nan"))
    return found.widened(output).contiguous(), lse.contiguous()


@attention_with_whole_gradients.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, rank, value_rank = others
    output = query.new_empty((*query.shape[:3], value.shape[-1]))
    dim, value_dim = query.shape[-1], value.shape[-1]
    columns = (rank if 0 < rank < dim else dim, value_rank or value_dim)
    if _is_fused(query, value) and columns[0] == min(columns[1], value_dim):
        return output, query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))
    return output, query.new_empty(0)


@torch.library.custom_op("adaattn::projected_attention_backward", mutates_args=())
def _backward_op(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v."""
    if not lse.numel():
        return _exact_gradients(gradient, query, key, value, mask, scale, is_causal)
    added = additive_mask(mask, query.dtype)
    q, k, v = (with_dense_columns(item) for item in (query, key, value))
    if lse.isnan().any():
        output, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal, attn_mask=added, scale=scale
        )
    found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default(
        with_dense_columns(gradient),
        q,
        k,
        v,
        with_dense_columns(output),
        lse,
        0.0,
        is_causal,
        attn_mask=added,
        scale=scale,
    )
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


@_backward_op.register_fake
def _(_: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    return tuple(item.new_empty(item.shape) for item in others[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Keep what the backward pass reads."""
    query, key, value, mask, ctx.scale, ctx.is_causal, _, _ = inputs
    ctx.save_for_backward(query, key, value, mask, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of q, k and v, and None for the rest."""
    query, key, value, mask, output, lse = ctx.saved_tensors
    found = _backward_op(gradient, query, key, value, mask, output, lse, ctx.scale, ctx.is_causal)
    return (*found, None, None, None, None, None)


attention_with_whole_gradients.register_autograd(_backward, setup_context=_keep)


def _score_change(
    query: torch.Tensor, key: torch.Tensor, found: Projected, scale: float
) -> torch.Tensor:
    """Return a bound on how much the projections change any score; one number."""
    if found.scores is None:
        return query.new_zeros(())
    to, back = found.scores.query_factor, found.scores.key_factor
    rest_of_query = query - grouped_product(found.query, back.mT)
    rest_of_key = key - found.key @ to.mT
    longest = [item.float().norm(dim=-1).amax() for item in (rest_of_query, rest_of_key)]
    change: torch.Tensor = abs(scale) * longest[0] * longest[1]
    return change


def _is_fused(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the CPU's fused kernel can serve the backward pass."""
    empty = 0 in query.shape or 0 in value.shape
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and not empty


def _exact_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of exact attention, rows of its weights written out in chunks."""
    dtype = accumulation_dtype(query.dtype)
    batch, kv_heads, len_k = key.shape[:3]
    len_q = query.shape[2]
    wide_key, wide_value = key.to(dtype), value.to(dtype)
    bias = additive_mask(mask, dtype)
    columns = torch.arange(len_k, device=query.device)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_key, grad_value = torch.zeros_like(wide_key), torch.zeros_like(wide_value)

    def folded(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(batch, kv_heads, -1, rows.shape[-1])

    for start in range(0, len_q, _ROWS):
        part = slice(start, min(start + _ROWS, len_q))
        rows, out_rows = query[:, :, part].to(dtype), gradient[:, :, part].to(dtype)
        scores = grouped_product(rows * scale, wide_key.mT)
        if bias is not None:
            scores = scores + (bias[:, :, part] if bias.shape[2] > 1 else bias)
        if is_causal:
            later = columns > torch.arange(part.start, part.stop, device=query.device)[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        slopes = grouped_product(out_rows, wide_value.mT)
        slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True)) * scale
        grad_query[:, :, part] = grouped_product(slopes, wide_key).to(query.dtype)
        grad_key += folded(slopes).mT @ folded(rows)
        grad_value += folded(weights).mT @ folded(out_rows)
    return grad_query, grad_key.to(key.dtype).contiguous(), grad_value.to(value.dtype).contiguous()
