"""Attention with q, k and v projected to fewer columns.

Scores: (q A)(k B)^T, the best approximation of that rank for the very q and k of the call.
Values: (P v W) W^T with W the leading directions of v. Projections come from all tokens of
the call; in a causal model they are therefore chosen with later tokens in view. Full rank is
exact. Gradients are those of exact attention, see `adaattn.backends.low_rank.projected`.
"""

from typing import Final

import torch

from adaattn.backends.interface import Result, Tensors
from adaattn.backends.low_rank.cost import BACKWARD_FACTOR, overhead
from adaattn.backends.low_rank.projected import attention_with_whole_gradients, project
from adaattn.backends.low_rank.ranks import methods, why_unmeasured
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup, LowRank, Method

__all__ = ["CAPABILITIES", "SKETCHED_ABOVE", "run"]

SKETCHED_ABOVE: Final = 256
"""D and Dv above which `adaattn.backends.low_rank.sketched` serves calls without gradients.

Eigenproblems grow with the cube of D. Were both allowed, both would be measured on each such call,
for keys of full rank under queries of low rank alone.
"""


def _is_sketched(problem: AttentionProblem) -> str:
    """Return the reason against calls that a sketch serves, or ""."""
    if problem.requires_grad or min(problem.head_dim, problem.value_dim) <= SKETCHED_ABOVE:
        return ""
    return f"without gradients low_rank.sketch serves head dimensions above {SKETCHED_ABOVE}"


CAPABILITIES = (
    Capability(
        name="low_rank",
        backend="low_rank",
        method=Method.LOW_RANK,
        waits=True,
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.BOOLEAN_MASK
            | Feature.ADDITIVE_MASK
            | Feature.BACKWARD
            | Feature.VALUE_DIM
        ),
        rules=(_is_sketched,),
        skips_hidden=True,
        efficiency=0.8,
        num_launches=6,
        methods=methods,
        overhead=overhead,
        backward_factor=BACKWARD_FACTOR,
        sampling_cost=5,
        why_unmeasured=why_unmeasured,
    ),
)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention at the ranks of ``group.method`` (0 is all columns)."""
    assert isinstance(group.method, LowRank)
    ranks = (group.method.rank, group.method.value_rank)
    query, key, value, mask = tensors.query, tensors.key, tensors.value, tensors.mask
    if torch.is_grad_enabled() and any(item.requires_grad for item in (query, key, value)):
        output, _ = attention_with_whole_gradients(
            query, key, value, mask, problem.scale, problem.is_causal, *ranks
        )
        return Result(output=output)
    return project(query, key, value, *ranks).attention(mask, problem)
