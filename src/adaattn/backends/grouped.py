"""Decoding with grouped heads: the heads of a group become rows of one query matrix.

Without this, k and v are read once for each query head. It holds for any number of query
rows as long as position hides nothing, which is the case for one row aligned to the end.
"""

import torch.nn.functional as F

from adaattn.backends.interface import Result, Tensors
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup

__all__ = ["CAPABILITIES", "run"]

CAPABILITIES = (
    Capability(
        name="grouped",
        backend="grouped",
        features=(Feature.BACKWARD | Feature.VALUE_DIM | Feature.DROPOUT),
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
    output = F.scaled_dot_product_attention(
        folded, tensors.key, tensors.value, dropout_p=problem.dropout_p, scale=problem.scale
    )
    return Result(output=output.reshape(batch, heads, len_q, tensors.value.shape[-1]))
