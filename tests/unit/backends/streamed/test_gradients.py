"""Gradients through chunks of scores, against the definition."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from adaattn.backends import load
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.operator_arguments import taken_apart
from adaattn.backends.streamed import direct, executor, planes
from adaattn.backends.streamed import gradients as backward
from adaattn.backends.streamed.products import multiply
from adaattn.errors import ExecutorError, UnsupportedError
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    Layout,
    assert_gradients_match,
    assert_matches,
    assert_training_matches,
    attention,
    cast_tensors,
    gradients_of,
    num_summands,
    term_sizes,
    with_tensors,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/unit/test_semantics.py runs the kernels on the GPU"
)

Made = Callable[[dict[str, Any]], tuple[AttentionProblem, Tensors, HeadGroup]]

TRAINED: dict[str, Any] = {"requires_grad": True}
FP32: dict[str, Any] = TRAINED | {"precision": Precision.FP32}
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
SINKS: dict[str, Any] = {"has_sinks": True, "sinks_require_grad": True}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 40, "num_heads": 1},
    "one row": {"len_q": 1, "len_k": 1},
    "ragged": {"len_q": 63, "len_k": 100, "num_heads": 1},
    "causal": {"len_q": 100, "is_causal": True, "num_heads": 1},
    "causal, fewer keys": {"len_q": 70, "len_k": 3, "is_causal": True},
    "causal, more keys": {"len_q": 20, "len_k": 70, "is_causal": True},
    "to the end": TO_END | {"len_q": 30, "len_k": 147, "num_heads": 1},
    "to the end, fewer keys": TO_END | {"len_q": 60, "len_k": 21, "num_heads": 1},
    "window both ways": {"len_q": 100, "window": (5, 3), "num_heads": 1},
    "window to the left": {"len_q": 100, "window": (40, -1), "num_heads": 1},
    "window that sees nothing": TO_END | {"len_q": 60, "len_k": 30, "window": (3, -1)},
    "dilation": {"len_q": 60, "dilation": 3, "num_heads": 1},
    "boolean mask": {"len_q": 40, "len_k": 70, "mask": MaskKind.BOOLEAN, "num_heads": 1},
    "boolean mask, hidden rows": {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "padding": {"len_k": 133, "mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 1, 133), "batch": 2},
    "added mask": {"len_q": 40, "mask": MaskKind.ADDITIVE},
    "softcap": {"len_q": 40, "softcap": 1.5},
    "sinks": SINKS | {"len_q": 40},
    "sinks over hidden rows": SINKS | {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "ALiBi": {"has_alibi": True, "len_q": 70, "batch": 2, "num_heads": 1},
    "groups": GROUPS | {"len_q": 20, "batch": 2},
    "one key head": {"num_heads": 3, "num_kv_heads": 1, "len_q": 40, "is_causal": True},
    "values of fewer columns": {"head_dim": 576, "value_dim": 512, "len_q": 20},
    "wide values": {"head_dim": 40, "value_dim": 264, "len_q": 33},
    "1024 columns": {"head_dim": 1024, "len_q": 33, "is_causal": True, "num_heads": 1},
    "transposed": {"layout": Layout.TRANSPOSED, "len_q": 40, "batch": 2},
    "transposed groups": GROUPS | {"layout": Layout.TRANSPOSED, "len_q": 20, "batch": 2},
    "strided": {"layout": Layout.STRIDED, "len_q": 40},
    "negative scale": {"scale": -0.3, "is_causal": True, "len_q": 40},
    "zero scale": {"scale": 0.0, "is_causal": True, "len_q": 40},
    "all else": GROUPS
    | SINKS
    | TO_END
    | {"len_q": 60, "len_k": 90, "softcap": 3.0, "window": (30, -1), "mask": MaskKind.BOOLEAN}
    | {"has_alibi": True},
}
IN_FULL = ("ragged", "causal", "window both ways", "groups", "sinks", "softcap", "all else")
"""Those in every dtype."""


def training(group: HeadGroup) -> Callable[[Tensors, AttentionProblem], Result]:
    """Return the executor with a plan."""
    return partial(load("streamed"), group=group)


@pytest.mark.parametrize("chunk_rows", [0, 17])
@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, Precision.FP16) for name in CASES]
    + [(name, precision) for name in IN_FULL for precision in (Precision.FP32, Precision.BF16)],
    ids=str,
)
def test_gradients_are_those_of_the_definition(
    name: str, precision: Precision, chunk_rows: int, made: Made
) -> None:
    values = TRAINED | {"precision": precision, "chunk_rows": chunk_rows}
    problem, tensors, group = made(values | CASES[name])
    assert_training_matches(training(group), tensors, problem)


@pytest.mark.parametrize("executor", ["streamed", "small"])
@pytest.mark.parametrize("number", [-1e8, -3e9])
def test_rows_that_a_mask_makes_low_have_gradients_in_16_bits(
    number: float, executor: str, made: Made
) -> None:
    """Rounding takes more than a whole from such a log-sum-exp."""
    low = {"mask": MaskKind.ADDITIVE, "mask_is_wide": True, "len_q": 20, "len_k": 37}
    problem, tensors, group = made(TRAINED | low | {"executor": executor})
    assert tensors.mask is not None
    mask = tensors.mask.clone()
    mask[:, :, 3] = number
    run = partial(load(executor), group=group)
    assert_training_matches(run, with_tensors(tensors, mask=mask), problem)


@pytest.mark.parametrize("name", ["sinks", "to the end", "softcap"])
def test_gradients_that_arrive_at_the_log_sum_exp_are_passed_on(name: str, made: Made) -> None:
    problem, tensors, group = made(FP32 | CASES[name] | {"aux": Aux.LSE, "chunk_rows": 17})
    wide = cast_tensors(tensors, torch.float64)

    def of(result: Result, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        assert result.lse is not None
        upstream = torch.randn(result.lse.shape, generator=generator)
        total = (result.lse * upstream.to(result.lse)).sum() + result.output.sum()
        return torch.autograd.grad(total, (tensors.query, tensors.key, tensors.value))

    found = of(training(group)(tensors, problem), tensors)
    exact = of(attention(wide, problem), wide)
    eager = of(attention(tensors, problem), tensors)
    for which in zip(found, exact, eager, strict=True):
        assert_matches(*which, summands=num_summands(problem, which[0]))


@pytest.mark.parametrize("shape", [{}, GROUPS | {"is_causal": True}], ids=["plain", "groups"])
@pytest.mark.parametrize("chunk_rows", [0, 17])
def test_gradients_go_through_the_weights_that_dropout_kept(
    shape: dict[str, Any], chunk_rows: int, made: Made
) -> None:
    """The identity as values shows which those are; the same generator draws them again."""
    values = {"len_q": 40, "len_k": 32, "value_dim": 32, "dropout_p": 0.3}
    problem, tensors, group = made(FP32 | values | shape | {"chunk_rows": chunk_rows})
    run = training(group)
    identity = torch.eye(32).expand(tensors.value.shape)
    shown = replace(tensors, kv=replace(tensors.kv, value=identity))
    torch.manual_seed(3)
    with torch.no_grad():
        kept = run(shown, problem).output != 0.0
    plain = replace(problem, dropout_p=0.0)

    def of(tensors: Tensors) -> Result:
        weights = attention(tensors, replace(plain, aux=Aux.WEIGHTS)).weights
        assert weights is not None
        values = tensors.value.repeat_interleave(problem.group_size, 1)
        return Result(output=(weights * kept / (1.0 - problem.dropout_p)) @ values)

    torch.manual_seed(3)
    found = run(tensors, problem)
    wide = cast_tensors(tensors, torch.float64)
    exact, eager = of(wide), of(tensors)
    assert_matches(found.output, exact.output, eager.output, summands=64)
    assert_gradients_match(
        gradients_of(found, tensors),
        gradients_of(exact, wide),
        gradients_of(eager, tensors),
        sizes=term_sizes(tensors, plain),
        problem=plain,
    )


@pytest.mark.parametrize("chunk_rows", [0, 17])
def test_equal_calls_have_equal_bits(chunk_rows: int, made: Made) -> None:
    problem, tensors, group = made(TRAINED | CASES["all else"] | {"chunk_rows": chunk_rows})
    run = training(group)
    first, second = (gradients_of(run(tensors, problem), tensors) for _ in range(2))
    assert len(first) == 4
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_gradient_of_sinks_alone_takes_no_product(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, tensors, group = made(FP32 | CASES["sinks"])
    kv = replace(tensors.kv, key=tensors.key.detach(), value=tensors.value.detach())
    tensors = replace(tensors, query=tensors.query.detach(), kv=kv)
    output = training(group)(tensors, problem).output
    monkeypatch.setattr(backward, "multiply", None)
    found = torch.autograd.grad(output.sum(), tensors.sinks)
    assert bool(found[0].isfinite().all())


def test_the_function_of_repeated_calls_has_gradients(made: Made) -> None:
    problem, tensors, group = made(TRAINED | CASES["causal"] | {"chunk_rows": 17})
    repeated = direct(problem, group)
    expected = gradients_of(training(group)(tensors, problem), tensors)
    for _ in range(2):
        output = repeated(tensors.query, tensors.key, tensors.value)
        found = gradients_of(Result(output=output), tensors)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_of_any_layout_arrive(made: Made) -> None:
    """As from a sum, or from a transposed view."""
    problem, tensors, group = made(TRAINED | CASES["groups"])
    output = training(group)(tensors, problem).output
    leaves = (tensors.query, tensors.key, tensors.value)
    turned = torch.randn_like(output).transpose(1, 2).contiguous().transpose(1, 2)
    one = torch.ones((), dtype=output.dtype).expand(output.shape)
    for upstream in (turned, one):
        expected = torch.autograd.grad(output, leaves, upstream.contiguous(), retain_graph=True)
        found = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
        for gradient, other in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=2e-3, atol=2e-3)


def test_a_checkpoint_draws_the_same_weights_again(made: Made) -> None:
    problem, tensors, group = made(FP32 | CASES["plain"] | {"dropout_p": 0.3})
    run = training(group)
    torch.manual_seed(1)
    expected = gradients_of(run(tensors, problem), tensors)
    torch.manual_seed(1)
    given = (tensors.query, tensors.key, tensors.value)
    output = checkpoint(
        lambda *given: run(Tensors.of(*given), problem).output, *given, use_reentrant=False
    )
    found = gradients_of(Result(output=output), tensors)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_selective_checkpoint_saves_the_operator_or_computes_it_again(
    is_saved: bool, is_bound: bool, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    problem, tensors, group = made(FP32 | CASES["plain"] | {"chunk_rows": 17})
    run = training(group)
    expected = gradients_of(run(tensors, problem), tensors)
    calls, usual = [], executor.KERNELS.compute
    monkeypatch.setattr(
        executor.KERNELS, "compute", lambda *x, **y: (calls.append(1), usual(*x, **y))[1]
    )
    save = [torch.ops.adaattn.streamed.default] if is_saved else []
    short = direct(problem, group)
    output = checkpoint(
        short if is_bound else lambda *given: run(Tensors.of(*given), problem).output,
        *(tensors.query, tensors.key, tensors.value),
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save),
    )
    found = gradients_of(Result(output=output), tensors)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(calls) == (1 if is_saved else 2)


def test_a_second_derivative_is_refused(made: Made) -> None:
    problem, tensors, group = made(FP32 | CASES["plain"])
    output = training(group)(tensors, problem).output
    found = torch.autograd.grad(output.sum(), tensors.query, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"(?s)no derivatives.*reference"):
        found[0].sum().backward()


def test_what_transforms_hide_is_refused(made: Made) -> None:
    problem, tensors, group = made({"precision": Precision.FP32, "aux": Aux.NONE})
    run = training(group)
    with pytest.raises(ExecutorError, match=r"torch\.func"):
        torch.vmap(lambda *item: run(Tensors.of(*item), problem).output)(
            *(it[None] for it in (tensors.query, tensors.key, tensors.value))
        )


def test_tensors_without_numbers_pass_outside_of_their_mode(made: Made) -> None:
    problem, tensors, group = made({"aux": Aux.NONE})
    given = (tensors.query, tensors.key, tensors.value)
    with FakeTensorMode():
        fake = [torch.empty(it.shape, dtype=it.dtype) for it in given]
    assert training(group)(Tensors.of(*fake), problem).output.shape == tensors.query.shape
    assert direct(problem, group)(*fake).shape == tensors.query.shape


def test_what_no_gradient_is_wanted_of_is_part_of_no_graph(made: Made) -> None:
    """In-place products would join it where their inputs want gradients."""
    problem, tensors, group = made({"aux": Aux.NONE})
    leaves = with_tensors(tensors, query=tensors.query.clone().requires_grad_())
    assert not training(group)(leaves, problem).output.requires_grad


@pytest.mark.parametrize("chunk_rows", [0, 17])
@pytest.mark.parametrize(("name", "values"), [("sinks", {"dropout_p": 0.2}), ("groups", {})])
def test_a_compiled_training_step_is_one_graph(
    name: str, values: dict[str, Any], chunk_rows: int, made: Made
) -> None:
    problem, tensors, group = made(FP32 | CASES[name] | values | {"chunk_rows": chunk_rows})
    step = training(group)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda tensors: step(tensors, problem), backend="aot_eager", fullgraph=True
    )
    found = []
    for call in (lambda tensors: step(tensors, problem), compiled):
        torch.manual_seed(0)
        result = call(tensors)
        found.append((result.output, gradients_of(result, tensors)))
    (output, expected), (other, gradients) = found
    assert torch.equal(output, other)
    assert all(torch.equal(expected[name], gradients[name]) for name in expected)


def test_the_operators_keep_the_rules_of_operators(made: Made) -> None:
    problem, tensors, _ = made(FP32 | CASES["sinks"] | {"aux": Aux.LSE})
    given = (tensors.query, tensors.key, tensors.value, None, tensors.sinks, *[None] * 5)
    words = (*taken_apart(problem, 17), *[None] * 4)
    torch.library.opcheck(torch.ops.adaattn.streamed.default, (*given, *words))
    plain = [None if item is None else item.detach() for item in given]
    output, lse, *_, rest = torch.ops.adaattn.streamed(*plain, *words)
    wanted = [True, False, True, False, True, *[False] * 3]
    kept = (torch.randn_like(output), torch.randn_like(lse), output, lse, rest)
    operator = torch.ops.adaattn.streamed_backward.default
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (*kept, *plain, *words, wanted), test_utils=checks)


@pytest.mark.parametrize("wanted", ["query", "key", "value"])
def test_products_of_gradients_that_nobody_wants_are_left_out(
    wanted: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, tensors, group = made(TRAINED | {"precision": Precision.FP32})
    whole = torch.autograd.grad(
        training(group)(tensors, problem).output.sum(), getattr(tensors, wanted)
    )
    alone = {
        name: getattr(tensors, name).detach().requires_grad_(name == wanted)
        for name in ("query", "key", "value")
    }
    output = training(group)(with_tensors(tensors, **alone), problem).output
    products: list[torch.Tensor] = []
    multiply = backward.multiply

    def noting(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **how: Any) -> None:
        products.append(out)
        multiply(left, right, out, **how)

    for module in (backward, planes):
        monkeypatch.setattr(module, "multiply", noting)
    found = torch.autograd.grad(output.sum(), alone[wanted])
    assert torch.equal(found[0], whole[0])
    assert len(products) == 3  # scores, those of upstream gradients, and the one


@pytest.mark.parametrize("sizes", [{"len_q": 0}, {"len_k": 0}, {"batch": 0}], ids=str)
def test_an_operator_of_nothing_gives_nothing(sizes: dict[str, int], made: Made) -> None:
    """The planner sends nothing of the kind here, but a graph of any sizes may."""
    problem, _, _ = made(TRAINED | {"precision": Precision.FP32, "len_q": 5, "len_k": 5})
    shape = {"batch": 1, "len_q": 5, "len_k": 5} | sizes
    lines, keys = (
        torch.randn(shape["batch"], 2, shape[name], 264, requires_grad=True)
        for name in ("len_q", "len_k")
    )
    words = (*taken_apart(problem), *[None] * 4)
    output, lse, *_ = torch.ops.adaattn.streamed(lines, keys, keys, *[None] * 7, *words)
    assert not output.any() and output.shape == lines.shape
    assert (lse == float("-inf")).all()
    assert not any(it.any() for it in torch.autograd.grad(output.sum(), (lines, keys)))


@pytest.mark.parametrize(
    "values",
    [
        {"len_q": 67, "len_k": 101},
        {"len_q": 67, "len_k": 101, "precision": Precision.FP32},
        GROUPS | TO_END | {"len_q": 53, "len_k": 77, "chunk_rows": 20},
    ],
)
def test_products_sum_as_many_terms_as_their_full_rate_takes(
    values: dict[str, Any], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS takes many times as long for sizes between; what is left is a product of its own."""
    sizes: list[tuple[int, ...]] = []
    rows: list[int] = []

    def noting(left: torch.Tensor, right: torch.Tensor, *others: Any, **named: Any) -> None:
        sizes.append((left.shape[2], right.shape[2]))
        if left.stride(1) == 1:  # rows of the result lie beside one another
            rows.append(left.shape[1])
        multiply(left, right, *others, **named)

    for module in (executor, planes, backward):
        monkeypatch.setattr(module, "multiply", noting)
    problem, tensors, group = made(TRAINED | values)
    compare = partial(load("streamed"), group=group)
    assert_training_matches(compare, tensors, problem)
    left_over = {terms for terms, _ in sizes if terms % 8}
    assert left_over
    assert all(terms < 8 for terms in left_over)
    assert not any(columns % 8 for _, columns in sizes)
    assert rows
    assert not any(size % 8 for size in rows)
