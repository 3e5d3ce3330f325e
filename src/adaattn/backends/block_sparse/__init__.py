"""Attention over the blocks of keys that hold most of each row's probability."""

from adaattn.backends.block_sparse.executor import CAPABILITIES, run
from adaattn.backends.block_sparse.sample import sample
from adaattn.backends.block_sparse.selection import select_blocks

__all__ = ["CAPABILITIES", "run", "sample", "select_blocks"]
