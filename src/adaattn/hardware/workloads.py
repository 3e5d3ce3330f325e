"""The calls that the micro-benchmark times: products of matrices and PyTorch's attention."""

from collections.abc import Callable

import torch

from adaattn._dtypes import torch_dtype
from adaattn.spec import Precision

__all__ = ["FP8", "HALF", "product", "sdpa_kernels"]

HALF = (Precision.BF16, Precision.FP16)
FP8 = (Precision.FP8_E4M3, Precision.FP8_E5M2)


def product(precision: Precision, matrix: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies a square fp32 matrix by itself in another format.

    In 8 bits the second factor is transposed in memory, as tensor cores ask; e5m2 is multiplied
    by e4m3, the only product of it that CUDA has.
    """
    if precision in FP8:
        one = torch.ones((), device=matrix.device)
        first = matrix.to(torch_dtype(precision))
        second = matrix.to(torch_dtype(Precision.FP8_E4M3)).t()
        return lambda: torch._scaled_mm(
            first, second, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if precision is Precision.INT8:
        steps = (matrix * 32).to(torch.int8)
        return lambda: torch._int_mm(steps, steps.t())
    left, right = (matrix.to(torch_dtype(precision), copy=True) for _ in range(2))
    return lambda: left @ right


def sdpa_kernels(device_type: str, precision: Precision) -> dict[str, Callable[..., object]]:
    """Return PyTorch's attention operators by capability name, each taking q, k and v.

    The operator of cuDNN must not see fp32: it does not refuse it, and computes something else
    (at 12 times the rate of fp32 products on an H200 with torch 2.11).
    """
    aten = torch.ops.aten
    kernels: dict[str, Callable[..., object]] = {
        "sdpa.math": aten._scaled_dot_product_attention_math
    }
    if device_type == "cpu":
        kernels["sdpa.flash"] = aten._scaled_dot_product_flash_attention_for_cpu
        return kernels
    kernels["sdpa.efficient"] = lambda q, k, v: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True
    )
    if precision in HALF:
        kernels["sdpa.flash"] = aten._scaled_dot_product_flash_attention
        kernels["sdpa.cudnn"] = lambda q, k, v: aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True
        )
    return kernels
