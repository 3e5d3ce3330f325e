"""The sizes of a gradient's terms let cancellation pass and let nothing else pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.spec import AttentionProblem, MaskKind
from adaattn.testing import (
    assert_gradients_match,
    assert_matches,
    attention,
    cast_tensors,
    gradients_of,
    make_problem,
    make_tensors,
    term_sizes,
)

EVERYTHING: dict[str, Any] = {
    "num_heads": 4, "num_kv_heads": 2, "len_q": 17, "len_k": 21, "is_causal": True,
    "mask": MaskKind.ADDITIVE, "softcap": 2.0, "has_sinks": True, "has_alibi": True,
    "requires_grad": True, "mask_requires_grad": True, "sinks_require_grad": True,
    "alibi_requires_grad": True,
}  # fmt: skip


def gradients(problem: AttentionProblem, wrong: AttentionProblem | None = None) -> dict[str, Any]:
    """Return actual, reference, yardstick and sizes; actual from ``wrong`` if given."""
    tensors = make_tensors(problem)
    wide = cast_tensors(tensors, torch.float64)
    dtype = tensors.query.dtype
    eager = attention(tensors, problem, compute_dtype=dtype)
    return {
        "actual": gradients_of(attention(tensors, wrong or problem), tensors),
        "reference": gradients_of(attention(wide, problem), wide),
        "yardstick": gradients_of(eager, tensors),
        "sizes": term_sizes(tensors, problem),
        "problem": problem,
    }


def test_right_gradients_of_every_input_pass() -> None:
    found = gradients(make_problem(**EVERYTHING))
    assert len(found["actual"]) == 6
    assert_gradients_match(**found)


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "sinks", "alibi_slopes"])
def test_one_element_off_by_a_thousandth_fails(name: str) -> None:
    found = gradients(make_problem(**EVERYTHING))
    flat = found["actual"][name].view(-1)
    flat[flat.abs().argmax()] *= 1.001
    with pytest.raises(AssertionError, match=f"gradient of {name}: .* beyond their bound"):
        assert_gradients_match(**found)


def test_a_missing_gradient_is_named() -> None:
    found = gradients(make_problem(**EVERYTHING))
    del found["actual"]["sinks"]
    with pytest.raises(AssertionError, match=r"gradients: expected \[.*'sinks'.*\], got"):
        assert_gradients_match(**found)


def test_another_scale_fails_in_the_gradient_of_the_query() -> None:
    problem = make_problem(len_q=17, requires_grad=True)
    found = gradients(problem, replace(problem, scale=1.001 * problem.scale))
    with pytest.raises(AssertionError, match="gradient of query"):
        assert_gradients_match(**found)


def test_the_rounding_of_a_difference_that_is_zero_on_paper_passes_only_with_its_terms() -> None:
    """With one key the weights are one, and the gradient of the query is exactly zero."""
    problem = make_problem(len_q=1, len_k=1, requires_grad=True)
    found = gradients(problem)
    exact = found["reference"]["query"]
    assert not exact.any()
    noise = torch.full_like(found["actual"]["query"], 1e-8)
    sizes = found["sizes"]["query"]
    assert_matches(noise, exact, found["yardstick"]["query"], terms=sizes)
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_matches(noise, exact, found["yardstick"]["query"])
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_matches(1e3 * noise, exact, found["yardstick"]["query"], terms=sizes)


def test_a_call_without_gradients_has_none() -> None:
    problem = make_problem()
    tensors = make_tensors(problem)
    assert gradients_of(attention(tensors, problem), tensors) == {}
    assert term_sizes(tensors, problem) == {}
