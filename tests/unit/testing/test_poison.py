"""Fresh memory is poisoned inside the block and left alone outside it."""

import pytest
import torch

from adaattn.testing import assert_matches, poisoned_memory


def allocations() -> list[torch.Tensor]:
    """Return fresh memory from each allocating function."""
    like = torch.ones(3, 2)
    return [
        torch.empty(3, 2),
        torch.empty_like(like),
        torch.empty_strided((3, 2), (2, 1)),
        like.new_empty(3, 2),
        like.new_empty_strided((3, 2), (2, 1)),
    ]


def test_every_allocator_returns_nan_inside_the_block() -> None:
    with poisoned_memory():
        fresh = allocations()
    assert all(bool(tensor.isnan().all()) for tensor in fresh)


def test_integers_hold_their_maximum_and_half_precision_nan() -> None:
    with poisoned_memory():
        whole = torch.empty(4, dtype=torch.int32)
        half = torch.empty(4, dtype=torch.float16)
    assert whole.tolist() == [torch.iinfo(torch.int32).max] * 4
    assert bool(half.isnan().all())


def test_what_is_written_stays_as_written() -> None:
    with poisoned_memory():
        tensor = torch.zeros(3)
        filled = torch.empty(3).fill_(2.0)
    assert tensor.tolist() == [0.0] * 3
    assert filled.tolist() == [2.0] * 3


def test_the_backward_pass_is_poisoned_too() -> None:
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(gradient)

    x = torch.ones(4, requires_grad=True)
    with poisoned_memory():
        Forgetful.apply(x).sum().backward()
    assert x.grad is not None and bool(x.grad.isnan().all())


def test_a_row_that_nobody_wrote_fails_the_comparison() -> None:
    exact = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with poisoned_memory():
        output = torch.empty(1, 1, 4, 8)
        output[:, :, :3] = exact[:, :, :3].float()
    with pytest.raises(AssertionError, match=r"25\.000% of 32 elements"):
        assert_matches(output, exact, exact.float())
