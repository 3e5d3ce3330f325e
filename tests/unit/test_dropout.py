"""Dropout of weights: a forward pass that is run again draws what it drew."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import adaattn

LONG, SHORT, WIDE = (2, 2048, 8), (2, 300, 8), (8, 300, 16)
CASES: dict[str, tuple[tuple[int, int, int], torch.dtype, dict[str, Any]]] = {
    "window": (WIDE, torch.float32, {"window": (5, 0)}),
    "softcap of many chunks": (LONG, torch.float32, {"softcap": 2.0}),
    "ALiBi of many chunks": (LONG, torch.float32, {"alibi_slopes": torch.tensor([0.5, 0.1])}),
    "blocks": (SHORT, torch.bfloat16, {"blocks": 64}),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_have_the_gradients_of_their_output(name: str, use_reentrant: bool) -> None:
    shape, dtype, options = CASES[name]
    if "blocks" in options:
        kept = torch.eye(-(-shape[1] // 64), dtype=torch.bool)
        options = {"blocks": adaattn.BlockList.from_mask(kept, block_q=64, block_k=64)}
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, *shape, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = adaattn.scaled_dot_product_attention(
            q, k, v, dropout_p=0.3, **options
        )
        return output

    output = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
    weights = torch.randn_like(output)
    output.backward(weights)
    assert v.grad is not None
    # The output is linear in the values, and so it is its gradient's product with them.
    expected = (output.double() * weights.double()).sum()
    found = (v.double() * v.grad.double()).sum()
    size = (output.double() * weights.double()).norm()
    assert (found - expected).abs() < 0.05 * size
