"""Softcap and sinks in the input's dtype: whole and in chunks, what rows see, gradients."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from adaattn import scaled_dot_product_attention
from adaattn.backends import capability_named, direct, load
from adaattn.backends.common import multiplies_as_is
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.written import is_written, whole_written
from adaattn.hardware import probe
from adaattn.planning import decide
from adaattn.policies import PRESETS
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    assert_executor_matches,
    assert_gradients_match,
    assert_matches,
    attention,
    cast_tensors,
    gradients_of,
    make_problem,
    make_tensors,
    term_sizes,
)

USUAL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "len_q": 37, "head_dim": 24}
PROBLEMS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "sinks": {"has_sinks": True},
    "both, causal": {"softcap": 5.0, "has_sinks": True, "is_causal": True},
    "one query": {"has_sinks": True, "len_q": 1, "len_k": 37},
    "window": {"softcap": 2.0, "is_causal": True, "window": (6, 0)},
    "window both ways": {"has_sinks": True, "window": (3, 2)},
    "dilation": {"softcap": 2.0, "is_causal": True, "dilation": 3},
    "at the end": {"has_sinks": True, "is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 50},
    "rows before the first key": {
        "softcap": 3.0, "is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 20,
    },
    "rows before the first key, sinks": {
        "has_sinks": True, "is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 20,
    },
    "rows behind the window": {"softcap": 3.0, "window": (2, 0), "len_k": 20},
    "mask": {"softcap": 3.0, "mask": MaskKind.BOOLEAN, "mask_shape": (1, 4, 37, 37)},
    "mask of keys, causal": {
        "has_sinks": True, "is_causal": True, "mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 37),
    },
    "values of another size": {"has_sinks": True, "value_dim": 40},
    # In 16 bits `explicit` adds it.
    "numbers added": {"softcap": 3.0, "mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 37, 37)},
    "numbers added, sinks, causal": {
        "has_sinks": True, "is_causal": True,
        "mask": MaskKind.ADDITIVE, "mask_shape": (1, 4, 37, 37),
    },
    "alibi, sinks": {"has_sinks": True, "is_causal": True, "has_alibi": True},
    "a negative scale": {"softcap": 3.0, "scale": -0.3},
}  # fmt: skip
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.FP64)


def group_of(problem: AttentionProblem, chunk_rows: int) -> HeadGroup:
    chunked = (capability_named("chunked"),)
    group = decide(problem, None, probe("cpu"), PRESETS["quality"], chunked).plan.groups[0]
    return replace(group, launch=replace(group.launch, chunk_rows=chunk_rows))


def run(tensors: Tensors, problem: AttentionProblem, *, chunk_rows: int) -> Result:
    """Return the result of `chunked`, by its bound call where it has one."""
    group = group_of(problem, chunk_rows)
    call = direct(problem, group)
    if call is None:
        return load("chunked")(tensors, problem, group)
    given = (tensors.query, tensors.key, tensors.value, tensors.mask, tensors.sinks)
    return Result(output=call(*given, None, None, None))


@pytest.mark.parametrize("chunk_rows", [0, 16])
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.label)
@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_written_is_what_is_defined(
    name: str, precision: Precision, chunk_rows: int
) -> None:
    problem = make_problem(**(USUAL | PROBLEMS[name]), precision=precision)
    is_added = problem.has_alibi or problem.mask is MaskKind.ADDITIVE
    assert is_written(problem) is not (is_added and precision.bits < 32)
    tensors = make_tensors(problem)
    assert_executor_matches(partial(run, chunk_rows=chunk_rows), tensors, problem)


@pytest.mark.parametrize("chunk_rows", [0, 16])
@pytest.mark.parametrize("name", PROBLEMS)
def test_its_gradients_are_those_of_the_definition(name: str, chunk_rows: int) -> None:
    changed = USUAL | PROBLEMS[name]
    problem = make_problem(
        **changed,
        requires_grad=True,
        sinks_require_grad=bool(changed.get("has_sinks")),
    )
    tensors = make_tensors(problem)
    found = gradients_of(load("chunked")(tensors, problem, group_of(problem, chunk_rows)), tensors)
    wide = cast_tensors(tensors, torch.float64)
    exact = gradients_of(attention(wide, problem), wide)
    eager = gradients_of(attention(tensors, problem), tensors)
    assert_gradients_match(found, exact, eager, sizes=term_sizes(tensors, problem), problem=problem)


def test_what_a_kernel_of_pytorch_computes_under_a_mask_is_not_written_out() -> None:
    masked = {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 600), "len_q": 600, "len_k": 600}
    for changed, is_written_out in (
        ({}, False),
        ({"has_sinks": True}, False),
        ({"softcap": 2.0}, True),
        ({"has_sinks": True, "len_q": 37}, True),
    ):
        problem = make_problem(**(USUAL | masked | changed))
        assert is_written(problem)
        assert (direct(problem, group_of(problem, 0)) is not None) is is_written_out


@pytest.mark.parametrize("mask", MaskKind)
@pytest.mark.parametrize("window", [(4, -1), (-1, -1)])
def test_a_call_that_is_bound_takes_longer_keys_than_those_it_was_bound_with(
    mask: MaskKind, window: tuple[int, int]
) -> None:
    """As decoding does, with a window that moves along."""
    columns = {"mask": mask, "mask_shape": (1, 1, 1, 20)} if mask is not MaskKind.NONE else {}
    bound = make_problem(
        **(USUAL | {"len_q": 1, "len_k": 20}),
        **columns,
        has_sinks=True,
        is_causal=window[0] >= 0,
        window=window,
        align=Align.BOTTOM_RIGHT,
    )
    call = whole_written(bound, group_of(bound, 0))
    assert call is not None
    longer = replace(bound, len_k=33, mask_shape=(1, 1, 1, 33) if columns else ())
    tensors = make_tensors(longer)

    def grown(tensors: Tensors, problem: AttentionProblem) -> Result:
        given = (tensors.query, tensors.key, tensors.value, tensors.mask, tensors.sinks)
        return Result(output=call(*given))

    assert_executor_matches(grown, tensors, longer)


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.label)
def test_rows_that_see_nothing_are_zeros_beside_a_sink_of_no_weight(precision: Precision) -> None:
    problem = make_problem(
        **USUAL, precision=precision, has_sinks=True, mask=MaskKind.BOOLEAN, mask_shape=(37, 37)
    )
    tensors = make_tensors(problem)
    assert tensors.sinks is not None and tensors.mask is not None
    tensors.sinks[::2] = float("-inf")
    tensors.mask[..., 3, :] = False
    found = run(tensors, problem, chunk_rows=0).output
    assert not found[:, :, 3].any()
    assert_executor_matches(partial(run, chunk_rows=0), tensors, problem)


@pytest.mark.parametrize(
    "values",
    [
        {"has_alibi": True, "softcap": 2.0, "precision": Precision.BF16},
        {
            "mask": MaskKind.ADDITIVE,
            "mask_shape": (37, 37),
            "softcap": 2.0,
            "precision": Precision.FP16,
        },
        {"has_sinks": True, "aux": Aux.LSE},
    ],
)
def test_what_is_added_in_more_bits_to_scores_or_read_off_rows_is_left_to_others(
    values: dict[str, Any],
) -> None:
    problem = make_problem(**(USUAL | values))
    assert not is_written(problem)
    assert whole_written(problem, group_of(problem, 0)) is None
    run_chunks = partial(run, chunk_rows=16)
    assert_executor_matches(run_chunks, make_tensors(problem), problem)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_masks_alone_may_be_mapped_over(name: str, kind: str) -> None:
    """Scores without the mapped dimension were filled in place."""
    query, key, value = torch.randn(3, 2, 2, 16, 8)
    masks = torch.rand(3, 2, 1, 16, 16) > 0.3 if kind == "boolean" else torch.randn(3, 2, 1, 16, 16)
    options: dict[str, Any] = {"softcap": 2.0} if name == "softcap" else {"sinks": torch.randn(2)}

    def run(mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = scaled_dot_product_attention(query, key, value, mask, **options)
        return found

    alone = torch.stack([run(mask) for mask in masks])
    assert_matches(torch.func.vmap(run)(masks), alone.double(), alone, summands=16)


def test_products_of_16_bits_are_of_16_bits_only_where_the_processor_has_them() -> None:
    assert multiplies_as_is(Precision.FP32) and multiplies_as_is(Precision.FP64)
    assert not multiplies_as_is(Precision.FP16)
    assert multiplies_as_is(Precision.BF16) is (Precision.BF16 in probe("cpu").instructions)
