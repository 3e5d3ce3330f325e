"""Attention with q, k and v projected to fewer columns.

Scores: (q A)(k B)^T, the best approximation of that rank for the very q and k of the call.
Values: (P v W) W^T with W the leading directions of v. Projections come from all tokens of
the call and are constants to autograd: gradients are those of the projected computation.
In a causal model they are therefore chosen with later tokens in view. Full rank is exact.
"""

from dataclasses import dataclass, replace

import torch

from adaattn.backends.common import fused_attention
from adaattn.backends.interface import Result, Tensors
from adaattn.linalg.projections import ScoreProjections, score_projections, value_basis
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup, Method

__all__ = ["CAPABILITIES", "Projected", "project", "run"]

CAPABILITIES = (
    Capability(
        name="low_rank",
        backend="low_rank",
        method=Method.LOW_RANK,
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.BOOLEAN_MASK
            | Feature.ADDITIVE_MASK
            | Feature.DROPOUT
            | Feature.BACKWARD
            | Feature.VALUE_DIM
        ),
        skips_hidden=True,
        efficiency=0.8,
        num_launches=6,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Tensors with fewer columns, and what they came from.

    Args:
        tensors: q and k with ``rank`` columns, v with ``value_rank``.
        scores: the projections of q and k, one for each key head; None where all columns stay.
        basis: [B, Hkv, Dv, value_rank] the columns' directions; None where all columns stay.
    """

    tensors: Tensors
    scores: ScoreProjections | None
    basis: torch.Tensor | None


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention at ``group.rank`` and ``group.value_rank`` (0 is all columns)."""
    found = project(tensors, problem, group.rank, group.value_rank)
    projected, basis = found.tensors, found.basis
    output = fused_attention(
        projected.query,
        projected.key,
        projected.value,
        projected.mask,
        problem,
        is_causal=problem.is_causal,
    )
    if basis is not None:
        batch, heads, rows, rank = output.shape
        folded = output.reshape(batch, problem.num_kv_heads, -1, rank) @ basis.mT
        output = folded.reshape(batch, heads, rows, problem.value_dim)
    return Result(output=output)


def project(tensors: Tensors, problem: AttentionProblem, rank: int, value_rank: int) -> Projected:
    """Return the tensors with fewer columns; 0 keeps all.

    The query heads of a group share their projection, so that k keeps its heads.
    """
    batch, _, len_q, dim = tensors.query.shape
    query, key, value = tensors.query, tensors.key, tensors.value
    found = None
    if 0 < rank < dim:
        folded = query.reshape(batch, problem.num_kv_heads, -1, dim)
        with torch.no_grad():
            found = score_projections(folded, key, rank)
        query = (folded @ found.query_factor).reshape(batch, -1, len_q, rank)
        key = key @ found.key_factor
    basis = None
    if 0 < value_rank < problem.value_dim:
        with torch.no_grad():
            basis = value_basis(value, value_rank)
        value = value @ basis
    fewer = replace(tensors, query=query, key=key, value=value)
    return Projected(tensors=fewer, scores=found, basis=basis)
