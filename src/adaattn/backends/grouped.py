"""Decoding with grouped heads: the heads of a group become rows of one query matrix.

Without this, k and v are read once for each query head. It holds for any number of query
rows as long as position hides nothing, which is the case for one row aligned to the end.
What it takes is what SDPA has a fused kernel for, so it never writes the scores out: no dropout
and no fp64, and values as wide as keys.
"""

from adaattn.backends.common import sdpa, with_dense_columns
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup, Precision

__all__ = ["CAPABILITIES", "run"]

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
    batch, heads, len_q, dim = tensors.query.shape
    folded = tensors.query.reshape(batch, problem.num_kv_heads, -1, dim)
    output = sdpa(
        with_dense_columns(folded),
        with_dense_columns(tensors.key),
        with_dense_columns(tensors.value),
        scale=problem.scale,
    )
    return Result(output=output.reshape(batch, heads, len_q, tensors.value.shape[-1]))
