"""Decoding with grouped heads: the heads of a group become rows of one query matrix.

Without this, k and v are read once for each query head. It holds for any number of query
rows as long as position hides nothing, which is the case for one row aligned to the end.
What it takes is what SDPA has a fused kernel for, so it never writes the scores out: no dropout
and no fp64, and values as wide as keys.
"""

import torch

from adaattn.backends.common import sdpa, sdpa_keywords, with_dense_columns
from adaattn.backends.interface import Direct, Result, Tensors
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup, Precision

__all__ = ["CAPABILITIES", "direct", "run"]

CAPABILITIES = (
    Capability(
        name="grouped",
        backend="grouped",
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        features=Feature.BACKWARD,
        min_group_size=2,
        max_len_q=8,
        is_fused=True,
        efficiency=0.3,
        num_launches=2,
    ),
)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention of [B, Hkv, G * Sq, D] queries, unfolded again."""
    return Result(output=direct(problem, group)(tensors.query, tensors.key, tensors.value))


def direct(problem: AttentionProblem, group: HeadGroup) -> Direct:
    """Return the call of SDPA."""
    shape = (problem.batch, problem.num_heads, problem.len_q, problem.value_dim)
    folded = (problem.batch, problem.num_kv_heads, -1, problem.head_dim)
    keywords = sdpa_keywords(problem)
    keywords.pop("enable_gqa", None)

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: None
    ) -> torch.Tensor:
        rows = with_dense_columns(query.reshape(folded))
        key, value = with_dense_columns(key), with_dense_columns(value)
        return sdpa(rows, key, value, **keywords).reshape(shape)

    return call
