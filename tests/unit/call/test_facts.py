"""What a problem knows of strides: what kernels ask, and nothing in a graph."""

import pytest
import torch

import adaattn
from adaattn import HeadGroup, Plan, Precision, hardware
from adaattn.backends import Result, Tensors, register
from adaattn.backends.reference import attention
from adaattn.call.arguments import Arguments
from adaattn.call.describe import build_call
from adaattn.call.history import History
from adaattn.errors import UnsupportedError
from adaattn.spec import AttentionProblem, Capability, Scheme


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


def test_a_growing_cache_of_other_head_strides_is_another_kind() -> None:
    """The rule of a kernel that needs aligned strides holds at each step."""
    seen: list[int] = []

    def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        seen.append(tensors.key.stride(1))
        return attention(tensors, problem)

    def misaligned(problem: AttentionProblem) -> str:
        return "" if problem.stride_bytes == 16 else "it needs strides of 16 bytes"

    remove = register([Capability(name="aligned", backend="aligned", rules=(misaligned,))], run)
    try:
        query = torch.randn(1, 2, 1, 8)
        for stride, serves in ((1024, True), (1001, False), (1024, True)):
            keys = torch.randn(4096).as_strided((1, 2, 12, 8), (2 * stride, stride, 8, 1))
            if serves:
                adaattn.scaled_dot_product_attention(query, keys, keys, backend="aligned")
                continue
            with pytest.raises(UnsupportedError, match="strides of 16 bytes"):
                adaattn.scaled_dot_product_attention(query, keys, keys, backend="aligned")
        assert seen == [1024, 1024]
    finally:
        remove()
        hardware.clear_cache()


def test_heads_that_are_sliced_and_formats_that_are_cast_have_no_known_layout() -> None:
    problems: list[AttentionProblem] = []

    def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        problems.append(problem)
        return attention(tensors, problem)

    precisions = (Precision.FP32, Precision.BF16)
    remove = register([Capability(name="any", backend="any", precisions=precisions)], run)
    try:
        x = torch.randn(1, 4, 32, 8)[..., :4]
        low = Scheme.of(Precision.BF16)
        groups = (
            HeadGroup(capability="any", heads=(0, 2)),
            HeadGroup(capability="any", heads=(1, 3), scheme=low),
        )
        plan = Plan(groups=groups, num_heads=4, error_budget=0.1)
        adaattn.scaled_dot_product_attention(x, x, x, plan=plan)
        assert [problem.stride_bytes for problem in problems] == [1, 1]
        assert not any(problem.dense_columns for problem in problems)
    finally:
        remove()
        hardware.clear_cache()


def test_what_is_learnt_of_a_problem_holds_in_every_layout() -> None:
    history = History()
    policy = adaattn.Policy(name="lossy", error_budget=0.01)
    x = torch.randn(1, 2, 9, 9)
    entries = [
        history.entry(problem_of(item, item, item), 0, policy, "auto")
        for item in (x[..., :8], x[..., :8].contiguous())
    ]
    assert entries[0] is entries[1]
