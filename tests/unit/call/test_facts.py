"""What a problem knows of strides: what kernels ask, and nothing in a graph."""

import pytest
import torch

import adaattn
from adaattn.call.arguments import Arguments
from adaattn.call.describe import build_call
from adaattn.spec import AttentionProblem


def problem_of(*tensors: torch.Tensor) -> AttentionProblem:
    return build_call(*tensors, Arguments()).problem


@pytest.mark.parametrize(
    ("dtype", "dim", "stride_bytes"),
    [
        (torch.float32, 4, 16),
        (torch.float32, 6, 8),
        (torch.float32, 5, 4),
        (torch.bfloat16, 64, 16),
        (torch.bfloat16, 12, 8),
        (torch.bfloat16, 7, 2),
    ],
)
def test_strides_are_multiples_of_what_is_said(
    dtype: torch.dtype, dim: int, stride_bytes: int
) -> None:
    x = torch.randn(2, 3, 9, dim).to(dtype)
    problem = problem_of(x, x, x)
    assert problem.dense_columns
    assert problem.stride_bytes == stride_bytes


def test_the_least_aligned_of_q_k_and_v_counts() -> None:
    x = torch.randn(2, 3, 9, 8)
    padded = torch.randn(2, 3, 9, 9)[..., :8]
    assert problem_of(x, padded, x).stride_bytes == 4
    assert problem_of(x, padded, x).dense_columns


def test_dimensions_of_one_element_have_no_stride() -> None:
    odd = torch.randn(30)[:8].as_strided((1, 1, 1, 8), (3, 5, 7, 1))
    assert problem_of(odd, odd, odd).stride_bytes == 16


def test_columns_that_are_apart_are_said_to_be_and_give_the_same() -> None:
    x = torch.randn(2, 4, 9, 8)
    apart = x.mT.contiguous().mT
    problem = problem_of(x, apart, x)
    assert not problem.dense_columns
    output = adaattn.scaled_dot_product_attention(x, apart, x)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(output, expected)


def test_calls_of_other_strides_are_other_kinds() -> None:
    """A call bound for dense columns would misread others, were it found for them."""
    x = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    apart = x[1].mT.contiguous().mT
    expected = torch.nn.functional.scaled_dot_product_attention(x[0], x[1], x[1], enable_gqa=True)
    for keys in (x[1], apart, x[1]):
        found = adaattn.scaled_dot_product_attention(
            x[0], keys, keys, enable_gqa=True, backend="grouped"
        )
        torch.testing.assert_close(found, expected)
