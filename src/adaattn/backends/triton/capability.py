"""What the portable Triton kernels can do."""

import importlib.util
from typing import Final

from adaattn.spec import Capability, Feature, KVKind, Precision

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
)


def _unavailable() -> str:
    """Return why Triton cannot run here, or ""."""
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


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
        unavailable=_unavailable(),
        # Behind FlexAttention: a user of PyTorch has it without this package.
        order=lambda problem: 45,
        compiles=True,
        compile_ms=1500.0,  # 1 to 2 s (Triton 3.6, 2026-11)
    ),
)
