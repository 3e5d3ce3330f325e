"""Tensors compared as PyTorch's compiler does."""

import gc
import weakref

import pytest
import torch

from adaattn._guards import guards


def test_tensors_that_lie_alike_are_alike_wherever_they_are() -> None:
    check = guards((torch.zeros(2, 8), torch.zeros(3)))
    assert check(torch.ones(2, 8), torch.ones(4)[1:])


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 8),
        torch.zeros(8, 2).t(),
        torch.zeros(2, 8, dtype=torch.int32),
        torch.zeros(2, 8, requires_grad=True),
        torch.zeros(2, 8, device="meta"),
        torch.nn.Parameter(torch.zeros(2, 8), requires_grad=False),
    ],
    ids=["shape", "strides", "dtype", "gradient", "device", "type"],
)
def test_others_are_not(other: torch.Tensor) -> None:
    check = guards((torch.zeros(2, 8), torch.zeros(3)))
    assert not check(other, torch.zeros(3))


def test_sizes_may_be_any() -> None:
    check = guards((torch.zeros(2, 8),), [[None, 8]], [[None, 1]])
    assert check(torch.zeros(5, 9)[:, :8])
    assert not check(torch.zeros(5, 9))


def test_a_tensor_that_stands_twice_is_compared_where_it_stands() -> None:
    one, two = torch.zeros(2, 8), torch.zeros(2, 8)
    check = guards((one, two, one))
    assert check(one, two, one)
    assert check(two, one, two)
    assert not check(one, two, two)
    assert not guards((one, two))(one, one)


def test_no_tensor_is_kept_alive() -> None:
    given = [torch.zeros(2, 8), torch.zeros(3)]
    left = [weakref.ref(item) for item in given]
    check = guards([*given, given[0]])
    del given
    gc.collect()
    assert check is not None
    assert [ref() for ref in left] == [None, None]
