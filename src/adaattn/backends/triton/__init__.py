"""Exact attention by portable Triton kernels: any mix of features, fp32 at fp32's accuracy."""

from adaattn.backends.triton.capability import CAPABILITIES
from adaattn.backends.triton.executor import direct, is_ready, run

__all__ = ["CAPABILITIES", "direct", "is_ready", "run"]
