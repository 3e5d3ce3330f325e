"""Decoding with grouped heads: the heads of a group become rows of one query matrix.

Without this, k and v are read once for each query head. It holds for any number of query
rows as long as position hides nothing, which is the case for one row aligned to the end, and a
mask says the same to all rows of a group.
What it takes is what SDPA has a fused kernel for, so it never writes the scores out: no dropout
and no fp64, and values as wide as keys.
"""

from collections.abc import Callable
from typing import Final

import torch

from adaattn.backends.common import with_dense_columns
from adaattn.backends.interface import Direct, Result, Tensors
from adaattn.backends.masks import kept_bias, stored_columns
from adaattn.backends.sdpa_call import sdpa, sdpa_keywords, with_masks
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup, Precision

__all__ = ["CAPABILITIES", "direct", "run"]

_SHORT_KEYS: Final = 512
"""Up to this many keys one block of a kernel that does not split them is fast enough."""

_SPLIT_WIDTH, _MANY_HEADS = 256, 16
"""What is wider no kernel of PyTorch splits. At D 512 and 1084 to 8051 keys one block takes 1.3 to
2.8 times as long as math over 4 heads in all, 0.4 to 0.6 over 32, so as long over 5 to 15: math's
time goes by heads (H200, PyTorch 2.11, 2026-11)."""


def _rows_differ(problem: AttentionProblem) -> str:
    """Return why a mask keeps the rows of a group apart, or ""."""
    shape = problem.mask_shape
    shared = shape[2:3] == (1,) and (shape[1] == 1 or problem.len_q == 1)
    if not shape or (shared and shape[3] == problem.len_k):
        return ""
    return f"it takes masks over keys that all rows of a group share, got {list(shape)}"


def _order(problem: AttentionProblem) -> int:
    """Return 5 in the place of math, if no gradient is wanted and the keys are few or split."""
    few_of_wide = (
        problem.head_dim > _SPLIT_WIDTH and problem.batch * problem.num_heads < _MANY_HEADS
    )
    unsplit = problem.device_type == "cuda" and (problem.precision.bits > 16 or few_of_wide)
    slow = problem.requires_grad or (unsplit and problem.len_k > _SHORT_KEYS)
    return 61 if slow or problem.sdpa_default != "sdpa.math" else 5


CAPABILITIES = (
    Capability(
        name="grouped",
        backend="grouped",
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        features=Feature.BACKWARD | Feature.BOOLEAN_MASK | Feature.ADDITIVE_MASK,
        rules=(_rows_differ,),
        min_group_size=2,
        max_len_q=8,
        splits_keys=False,
        is_fused=True,
        efficiency=0.3,
        num_launches=2,
        order=_order,
    ),
)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention of [B, Hkv, G * Sq, D] queries, unfolded again."""
    call = _call(problem)
    output = call(tensors.query, tensors.key, tensors.value, tensors.mask, tensors.mask_given)
    return Result(output=output)


def direct(problem: AttentionProblem, group: HeadGroup) -> Direct:
    """Return the call of SDPA for masks of up to four dimensions."""
    return with_masks(_call(problem))


def _call(problem: AttentionProblem) -> Callable[..., torch.Tensor]:
    """Return what takes q, k, v, the mask in four dimensions, and as the caller gave it."""
    shape = (problem.batch, problem.num_heads, problem.len_q, problem.value_dim)
    folded = (problem.batch, problem.num_kv_heads, -1, problem.head_dim)
    keywords = sdpa_keywords(problem)
    keywords.pop("enable_gqa", None)
    by_head = problem.mask_shape[1:2] not in ((), (1,))

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        given: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = query.reshape(folded)
        if not problem.dense_columns:
            rows, key, value = map(with_dense_columns, (rows, key, value))
        if mask is not None and query.is_cuda:
            mask = stored_columns(kept_bias(mask, given, query.dtype), key.shape[2])
        if mask is not None and by_head:
            mask = mask.reshape(mask.shape[0], problem.num_kv_heads, -1, mask.shape[-1])
        return sdpa(rows, key, value, mask, **keywords).reshape(shape)

    return call
