"""Matrix products as PyTorch computes them, written to where their numbers belong.

Its settings hold: TF32 in fp32, and sums of parts that are rounded to 16 bits, which it allows.
"""

import torch

__all__ = ["WHY_NO_PRODUCTS", "multiply"]

WHY_NO_PRODUCTS = (
    ""
    if hasattr(torch.ops.aten.baddbmm, "dtype_out")
    else "`torch.baddbmm` has no `out_dtype` here: it needs a later PyTorch"
)


def multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    adds: bool = False,
) -> None:
    """Write the products of a batch of matrices.

    Products of 16-bit numbers are written as they were summed, where ``out`` is fp32. Those of fp32
    are as PyTorch's settings say; its default is fp32's accuracy.

    Args:
        left: [P, M, K].
        right: [P, K, N].
        out: [P, M, N] in their dtype or fp32, its last dimension dense.
        scale: factor of the products.
        adds: they are added to what is there.
    """
    beta = 1.0 if adds else 0.0
    if out.dtype == left.dtype and (left.is_cuda or left.dtype == torch.float32):
        out.baddbmm_(left, right, beta=beta, alpha=scale)
    elif left.is_cuda:
        torch.baddbmm(out, left, right, out.dtype, beta=beta, alpha=scale, out=out)
    else:
        wide = left.float() @ right.float() * scale
        out.copy_(out + wide if adds else wide)
