"""The rule accepts what is right and refuses each slightly wrong result."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn._constants import LOG2_E
from adaattn._dtypes import torch_dtype
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, MaskKind, Precision
from adaattn.testing import (
    assert_matches,
    assert_results_match,
    assert_within_budget,
    attention,
    cast_tensors,
    compare,
    head_errors,
    make_problem,
    make_tensors,
    mutations,
)

PRECISIONS = [Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16]
SITUATIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 50},
    "window": {"is_causal": True, "window": (4, -1)},
    "softcap": {"softcap": 1.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "boolean mask": {"mask": MaskKind.BOOLEAN},
    "additive mask": {"mask": MaskKind.ADDITIVE},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2},
}
MISTAKES = {
    "dense": {"scale dropped", "scale slightly off", "last key lost", "one NaN"}
    | {"one row unwritten", "one element doubled", "heads swapped"},
    "causal": {"causal mask off by one"},
    "bottom right": {"causal mask off by one", "other alignment"},
    "window": {"window off by one"},
    "softcap": {"softcap dropped"},
    "sinks": {"sinks dropped"},
    "alibi": {"ALiBi dropped"},
    "boolean mask": {"mask dropped"},
    "additive mask": {"mask dropped"},
}


def draw(situation: str, precision: Precision) -> tuple[AttentionProblem, Tensors, Result, Result]:
    """Return problem, tensors, the oracle's result and that of eager PyTorch."""
    options = {"batch": 2, "len_q": 33, "head_dim": 32} | SITUATIONS[situation]
    problem = make_problem(**options, precision=precision)
    tensors = make_tensors(problem)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem, compute_dtype=torch_dtype(precision))
    return problem, tensors, exact, eager


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_right_result_passes_and_every_mutation_of_it_fails(
    situation: str, precision: Precision
) -> None:
    problem, tensors, exact, eager = draw(situation, precision)
    assert_results_match(attention(tensors, problem), exact, eager, summands=problem.len_k)
    wrong = mutations(tensors, problem)
    assert MISTAKES.get(situation, set()) | MISTAKES["dense"] <= set(wrong)
    for mistake, result in wrong.items():
        comparison = compare(result.output, exact.output, eager.output, summands=problem.len_k)
        assert comparison.problems, f"{mistake} was accepted"
        assert comparison.share_failing > 0
        with pytest.raises(AssertionError, match=r"output: .* elements are beyond their bound"):
            assert_results_match(result, exact, eager, summands=problem.len_k)


def test_the_message_names_the_worst_position_both_numbers_and_the_share() -> None:
    exact = torch.ones(2, 3, 4, 5, dtype=torch.float64)
    actual = exact.float()
    actual[1, 2, 3, 4] = 7.0
    with pytest.raises(
        AssertionError,
        match=r"out: 0\.833% of 120 .* worst at \(1, 2, 3, 4\): expected 1, got 7, error 6",
    ):
        assert_matches(actual, exact, exact.float(), name="out")


def test_a_wrong_shape_dtype_or_reference_is_refused_in_words() -> None:
    exact = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"shape: expected \(2, 3\), got \(3, 2\)"):
        assert_matches(exact.T.float(), exact, exact.float())
    with pytest.raises(AssertionError, match=r"dtype: expected torch.float32, got torch.float16"):
        assert_matches(exact.half(), exact, exact.float())
    with pytest.raises(AssertionError, match=r"reference: expected torch.float64"):
        assert_matches(exact.float(), exact.float(), exact.float())


@pytest.mark.parametrize(
    ("truth", "got"),
    [(-math.inf, 0.0), (-math.inf, math.inf), (0.0, math.nan), (math.nan, 0.0), (1.0, math.inf)],
)
def test_infinities_and_nan_must_stand_where_the_oracle_has_them(truth: float, got: float) -> None:
    exact = torch.tensor([1.0, truth], dtype=torch.float64)
    actual = torch.tensor([1.0, got])
    assert_matches(exact.float(), exact, exact.float())
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_matches(actual, exact, exact.float())


def test_eager_overflow_does_not_widen_the_bound() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager = torch.tensor([1.0, math.inf])
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_matches(torch.tensor([1.0, 2.5]), exact, eager)


def test_a_large_head_does_not_hide_a_wrong_small_one() -> None:
    exact = torch.ones(1, 2, 4, 4, dtype=torch.float64)
    exact[:, 0] *= 1e6
    eager = exact.float()
    eager[:, 0] += 1.0
    actual = exact.float()
    actual[0, 1, 0, 0] = 1.5
    with pytest.raises(AssertionError, match=r"worst at \(0, 1, 0, 0\)"):
        assert_matches(actual, exact, eager)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_is_twice_the_eager_error_and_a_few_roundings(dtype: torch.dtype) -> None:
    exact = torch.ones(4, dtype=torch.float64)
    step = torch.finfo(dtype).eps
    eager = (exact + 16 * step).to(dtype)
    assert_matches((exact + 32 * step).to(dtype), exact, eager)
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_matches((exact + 36 * step).to(dtype), exact, eager)
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_matches((exact + 4 * step).to(dtype), exact, exact.to(dtype))


def test_empty_tensors_match_and_their_shapes_still_count() -> None:
    empty = torch.zeros(1, 2, 0, 4, dtype=torch.float64)
    assert_matches(empty.float(), empty, empty.float())
    with pytest.raises(AssertionError, match="shape"):
        assert_matches(empty.float()[..., :3], empty, empty.float())


def test_a_missing_or_unasked_auxiliary_output_fails() -> None:
    problem = make_problem(precision=Precision.FP64)
    tensors = make_tensors(problem)
    plain = attention(tensors, problem)
    with_lse = attention(tensors, replace(problem, aux=Aux.LSE))
    with pytest.raises(AssertionError, match="lse: expected a tensor"):
        assert_results_match(plain, with_lse, with_lse)
    with pytest.raises(AssertionError, match="lse: expected None"):
        assert_results_match(with_lse, plain, plain)


def test_entropies_are_held_to_what_they_are_the_difference_of() -> None:
    """One key of two has nearly all of the weight: 4.5e-7 bits, of a log-sum-exp of 40 in bits.

    Another head has one of 4000, which is not to be its measure.
    """
    lse = torch.tensor([[[40.0, -math.inf], [4000.0, 4000.0]]]).double() / LOG2_E
    output, bits = torch.ones(1, 2, 2, 4).double(), torch.zeros(1, 2, 2).double()
    bits[0, 0, 0] = 4.5e-7
    exact, eager = (
        Result(output=output, entropy=bits),
        Result(output=output.float(), entropy=bits.float()),
    )
    rounding = 40.0 * (2.0 + math.sqrt(2.0)) * 2.0**-24

    def hold(error: float, known: torch.Tensor | None) -> None:
        found = bits.float()
        found[0, 0, 0] += error * rounding
        assert_results_match(replace(eager, entropy=found), exact, eager, summands=2, lse=known)

    for error in (0.99, 1.0):
        hold(error, lse)
    for error, known in ((1.01, lse), (0.1, None)):
        with pytest.raises(AssertionError, match="entropy: "):
            hold(error, known)


@pytest.mark.parametrize("budget", [0.0, 0.01, 0.05])
def test_the_budget_holds_for_each_head_alone(budget: float) -> None:
    exact = torch.randn(2, 3, 8, 4, dtype=torch.float64)
    noise = torch.randn_like(exact)
    noise *= exact.norm(dim=(-2, -1), keepdim=True) / noise.norm(dim=(-2, -1), keepdim=True)
    assert_within_budget(exact + 0.99 * budget * noise, exact, budget)
    spoiled = exact.clone()
    spoiled[1, 2] += (1.01 * budget + 1e-9) * noise[1, 2]
    with pytest.raises(AssertionError, match=r"head \(1, 2\): .* 1 of 6 heads fail"):
        assert_within_budget(spoiled, exact, budget)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_the_exact_output_keeps_a_budget_of_zero(dtype: torch.dtype) -> None:
    exact = torch.randn(1, 2, 64, 32, dtype=torch.float64)
    assert_within_budget(exact.to(dtype), exact, 0.0)


def test_a_nan_a_wrong_shape_and_a_head_that_should_be_zero_break_any_budget() -> None:
    exact = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    exact[0, 1] = 0
    assert_within_budget(exact, exact, 0.0)
    broken = exact.clone()
    broken[0, 0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match=r"head \(0, 0\)"):
        assert_within_budget(broken, exact, 0.5)
    with pytest.raises(AssertionError, match=r"head \(0, 1\)"):
        assert_within_budget(exact + 1e-3, exact, 0.5)
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(exact[:, :1], exact, 0.5)


def test_head_errors_are_relative_frobenius_norms() -> None:
    exact = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    actual = exact.clone()
    actual[0, 0, 0, 0] = 3.0
    assert head_errors(actual, exact).tolist() == [[1.0]]
