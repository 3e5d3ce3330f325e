"""The public door onto planning and backends: kernels by name, and what the device offers.

Nothing is computed here that the rest of the package does not compute already, and nothing
inside the package imports this folder. Shape legend in `adaattn.spec`.
"""

from adaattn.kernels.cuda_utils import (
    AttentionKernelManager,
    CUDAManager,
    KernelChoice,
    KernelInfo,
    adaptive_attention_kernel,
    fused_scaled_dot_product_attention,
    memory_efficient_attention,
)
from adaattn.kernels.flash_attention import (
    AdaptiveFlashAttention,
    FlashAttentionConfig,
    flash_attention_forward,
)

__all__ = [
    "AdaptiveFlashAttention",
    "AttentionKernelManager",
    "CUDAManager",
    "FlashAttentionConfig",
    "KernelChoice",
    "KernelInfo",
    "adaptive_attention_kernel",
    "flash_attention_forward",
    "fused_scaled_dot_product_attention",
    "memory_efficient_attention",
]
