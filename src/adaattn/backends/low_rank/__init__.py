"""Attention with q, k and v projected to fewer columns."""

from adaattn.backends.low_rank.executor import CAPABILITIES, run
from adaattn.backends.low_rank.sample import sample

__all__ = ["CAPABILITIES", "run", "sample"]
