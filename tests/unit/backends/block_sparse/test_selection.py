"""Which blocks of keys a block of queries keeps."""

from dataclasses import replace

import pytest
import torch

from adaattn.backends.block_sparse.selection import far_shares, select_blocks
from adaattn.testing import make_problem, make_tensors


@pytest.mark.parametrize("scale", [0.0625, 4.0])
def test_a_scale_is_a_factor_of_the_queries(scale: float) -> None:
    """A power of two, so that both are the same numbers."""
    problem = make_problem(num_heads=2, len_q=256, head_dim=16, scale=scale)
    tensors = make_tensors(problem)
    scaled = replace(tensors, query=tensors.query * scale)
    plain = replace(problem, scale=1.0)
    assert torch.equal(far_shares(tensors, problem, 64), far_shares(scaled, plain, 64))
    assert not torch.equal(far_shares(tensors, problem, 64), far_shares(tensors, plain, 64))
    kept = select_blocks(tensors, problem, 64, 0.9)
    assert torch.equal(kept, select_blocks(scaled, plain, 64, 0.9))
