"""What exact attention by written-out scores can do: in chunks, and of few rows and keys."""

from typing import Final

import torch

from adaattn._settings import has_fixed_workspace
from adaattn.backends.own_kernels import why_no_triton
from adaattn.backends.streamed.chunks import choose_chunk_rows, overhead, row_bytes
from adaattn.backends.streamed.products import WHY_NO_PRODUCTS
from adaattn.backends.streamed.split import MOST_LINES, choose_splits
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Feature,
    HardwareFacts,
    HeadGroup,
    Overhead,
    Precision,
)

__all__ = ["CAPABILITIES", "SMALL"]

_NARROW: Final = 256
"""Columns up to which kernels that write no scores are faster."""

_MOST_ROWS: Final = 2048
"""Rows of all heads beyond which products fill a card by themselves."""

_STEP: Final = 8

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
"""Among them batch-invariant results: cuBLAS picks its algorithm by all sizes."""


def _narrow(problem: AttentionProblem) -> str:
    """Return why columns are too few, or ""."""
    if max(problem.head_dim, problem.value_dim) > _NARROW:
        return ""
    dims = f"{problem.head_dim} and {problem.value_dim}"
    return f"it is for D or Dv above {_NARROW}, got {dims}"


def _unset(problem: AttentionProblem) -> str:
    """Return why PyTorch would raise an error at a product, or ""."""
    if not problem.deterministic or not torch.are_deterministic_algorithms_enabled():
        return ""
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return ""
    if has_fixed_workspace():
        return ""
    return "deterministic matrix products need CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8"


def _many(problem: AttentionProblem) -> str:
    """Return why rows or keys are too many for one tile, or ""."""
    lines, keys = problem.group_size * problem.len_q, problem.len_k
    total = problem.batch * problem.num_heads * problem.len_q
    if max(lines, keys) > MOST_LINES:
        return (
            f"it takes up to {MOST_LINES} keys, and as many rows of the heads that share one, "
            f"got {keys} and {lines}"
        )
    return "" if total <= _MOST_ROWS else f"it takes up to {_MOST_ROWS} rows in all, got {total}"


def _uneven(problem: AttentionProblem) -> str:
    """Return why 16-bit rows do not begin where copies of 16 bytes do, or ""."""
    dims = problem.head_dim, problem.value_dim
    if problem.precision is Precision.FP32 or not any(size % _STEP for size in dims):
        return ""
    return f"in 16 bits it takes D and Dv in steps of {_STEP}, got {dims[0]} and {dims[1]}"


def _split_overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return what parts of scores take, which are written and read again, and weights."""
    del group, density
    lines = problem.batch * problem.num_heads * problem.len_q
    number = problem.precision.bits // 8
    parts = choose_splits(problem, max(problem.head_dim, 1), hardware.num_processors).count
    size = 4.0 * parts + number
    if problem.wants_gradients:
        others = choose_splits(problem, max(problem.value_dim, 1), hardware.num_processors).count
        size += 4.0 * others + number
    size *= lines * (problem.len_k + _STEP)
    return Overhead(bytes_moved=2.0 * size, workspace_bytes=size)


SMALL: Final = Capability(
    name="small",
    backend="small",
    device_types=("cuda",),
    precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
    features=~_NOT,
    min_compute_capability=(8, 0),
    is_one_kernel=True,
    efficiency=0.5,
    num_launches=3,
    unavailable=why_no_triton(),
    rules=(_narrow, _many, _uneven),
    order=lambda problem: 71,
    compiles=True,
    compile_ms=3000.0,  # three kernels
    overhead=_split_overhead,
)

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
        rules=(_narrow, _unset),
        # Behind what a user of PyTorch has: measured times bring it forward.
        order=lambda problem: 72,
        compiles=True,
        compile_ms=4000.0,  # `fused` 2.2 to 3.4 s, with its gradients 3.3 to 5 (Triton 3.6, H200)
        chunk_rows=choose_chunk_rows,
        row_bytes=row_bytes,
        overhead=overhead,
    ),
)
