"""What the portable Triton kernels can do."""

from typing import Final

from adaattn.backends.own_kernels import why_no_triton
from adaattn.backends.triton.launch import is_halved
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Feature,
    HardwareFacts,
    HeadGroup,
    KVKind,
    Overhead,
    Precision,
)

__all__ = ["CAPABILITIES"]

_NOT: Final = (
    Feature.MASK_GRADIENT
    | Feature.SINKS_GRADIENT
    | Feature.ALIBI_GRADIENT
    | Feature.LSE_GRADIENT
    | Feature.BACKWARD
    | Feature.DETERMINISTIC_BACKWARD
    | Feature.WEIGHTS
    | Feature.EMPTY
    | Feature.BLOCK_LIST
    | Feature.DROPPED_MASS
)


def _overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return what taking fp32 keys and values apart takes: read once, written in their size."""
    del group, hardware, density
    if not is_halved(problem):
        return Overhead()
    numbers = problem.batch * problem.num_kv_heads * problem.len_k
    size = 4.0 * numbers * (problem.head_dim + problem.value_dim + 2)
    return Overhead(bytes_moved=2.0 * size, workspace_bytes=size, launches=2)


CAPABILITIES = (
    Capability(
        name="triton",
        backend="triton",
        device_types=("cuda",),
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        features=~_NOT,
        kv_kinds=(KVKind.DENSE, KVKind.PACKED),
        max_head_dim=256,
        min_compute_capability=(8, 0),
        skips_hidden=True,
        is_fused=True,
        efficiency=0.5,
        unavailable=why_no_triton(),
        # Behind FlexAttention: a user of PyTorch has it without this package.
        order=lambda problem: 45,
        compiles=True,
        overhead=_overhead,
        compile_ms=1500.0,  # 1 to 2 s (Triton 3.6, 2026-11)
    ),
)
