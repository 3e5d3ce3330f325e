"""What exact attention by written-out chunks of scores can do."""

from typing import Final

from adaattn.backends.masked import is_plain
from adaattn.backends.own_kernels import why_no_triton
from adaattn.backends.streamed.chunks import choose_chunk_rows, overhead, row_bytes
from adaattn.backends.streamed.products import WHY_NO_PRODUCTS
from adaattn.spec import AttentionProblem, Capability, Feature, Precision

__all__ = ["CAPABILITIES"]

_NARROW: Final = 256
"""Columns up to which kernels that write no scores are faster."""

_NOT: Final = (
    Feature.MASK_GRADIENT
    | Feature.ALIBI_GRADIENT
    | Feature.WEIGHTS
    | Feature.EMPTY
    | Feature.BLOCK_LIST
    | Feature.DROPPED_MASS
    | Feature.BATCH_INVARIANT
    | Feature.HEAD_TERMS
    | Feature.HEAD_TERMS_GRADIENT
)
"""Of these, results of any batch alike are beyond matrix products that PyTorch chooses by size."""


def _narrow(problem: AttentionProblem) -> str:
    """Return why columns are too few, or ""."""
    if max(problem.head_dim, problem.value_dim) > _NARROW:
        return ""
    dims = f"{problem.head_dim} and {problem.value_dim}"
    return f"it is for D or Dv above {_NARROW}, got {dims}"


def _order(problem: AttentionProblem) -> int:
    """Return 29, before `chunked` where that writes scores out too; else 47, behind all but math.

    There it moves fewer bytes in fewer launches, and multiplies 16-bit numbers as such where
    `chunked` makes fp32 of them. Where PyTorch's kernels compute a chunk measured times decide.
    """
    return 47 if is_plain(problem) else 29


CAPABILITIES = (
    Capability(
        name="streamed",
        backend="streamed",
        device_types=("cuda",),
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        features=~_NOT,
        min_compute_capability=(8, 0),
        skips_hidden=True,
        is_one_kernel=True,
        efficiency=0.9,
        num_launches=3,
        unavailable=why_no_triton() or WHY_NO_PRODUCTS,
        rules=(_narrow,),
        order=_order,
        compiles=True,
        compile_ms=1500.0,  # as `triton`; 1.6 to 2.9 s a kernel on a busy CPU (Triton 3.7, 2026-11)
        chunk_rows=choose_chunk_rows,
        row_bytes=row_bytes,
        overhead=overhead,
    ),
)
