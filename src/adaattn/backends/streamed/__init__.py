"""Exact attention for head dimensions above 256: scores in bounded chunks, written out.

Matrix products by cuBLAS, and between them a Triton kernel that makes weights of scores; gradients
likewise, with five products. Equal inputs give equal bits. Scores are fp32, weights of the input's
dtype, as in eager PyTorch.

Not the form for D up to 256, where fused kernels move less memory.
"""

from adaattn.backends.streamed.capability import CAPABILITIES
from adaattn.backends.streamed.executor import direct, is_ready, run

__all__ = ["CAPABILITIES", "direct", "is_ready", "run"]
