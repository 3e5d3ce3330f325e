"""The portable backward kernels as Triton's interpreter runs them, against the definition.

bf16 is left to a GPU, as in `test_interpreted.py`.
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from adaattn._dtypes import torch_dtype
from adaattn.backends import load
from adaattn.backends.device.launch import Launch
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.operator_arguments import taken_apart
from adaattn.backends.operators import trained
from adaattn.backends.triton import direct, executor
from adaattn.backends.triton.gradient_launch import GradientArguments
from adaattn.backends.triton.launch import is_halved
from adaattn.errors import ExecutorError, UnsupportedError
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, HeadTerm, MaskKind, Precision
from adaattn.testing import (
    Layout,
    assert_gradients_match,
    assert_matches,
    assert_training_matches,
    attention,
    cast_tensors,
    fake_facts,
    gradients_of,
    make_problem,
    make_tensors,
    num_summands,
    poisoned_memory,
    term_sizes,
    with_tensors,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/unit/test_semantics.py runs the kernels on the GPU"
)

GROUP = HeadGroup(capability="triton")
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
BY_HEAD: dict[str, Any] = {"head_terms": HeadTerm(7), "num_heads": 6}
ADDED: dict[str, Any] = {"mask": MaskKind.ADDITIVE, "mask_requires_grad": True}
SINKS: dict[str, Any] = {"has_sinks": True, "sinks_require_grad": True}
ALIBI: dict[str, Any] = {"has_alibi": True, "alibi_requires_grad": True}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 40, "num_heads": 1},
    "one row": {"len_q": 1, "len_k": 1},
    "ragged": {"len_q": 67, "len_k": 131, "num_heads": 1},
    "causal": {"len_q": 130, "is_causal": True, "num_heads": 1},
    "causal, fewer keys": {"len_q": 70, "len_k": 3, "is_causal": True},
    "to the end": TO_END | {"len_q": 30, "len_k": 147, "num_heads": 1},
    "to the end, fewer keys": TO_END | {"len_q": 130, "len_k": 21, "num_heads": 1},
    "window both ways": {"len_q": 200, "window": (5, 3), "num_heads": 1},
    "wide window": {"len_q": 300, "window": (150, 70), "num_heads": 1},
    "window to the left": {"len_q": 150, "window": (40, -1), "num_heads": 1},
    "window to the right": {"len_q": 150, "window": (-1, 4), "num_heads": 1},
    "dilation": {"len_q": 100, "dilation": 3, "num_heads": 1},
    "dilation to the end": TO_END | {"len_q": 50, "len_k": 171, "dilation": 3, "num_heads": 1},
    "dilation in a window": {"len_q": 70, "len_k": 31, "dilation": 4, "window": (9, 6)},
    "dilation with an added mask": ADDED | {"len_q": 30, "dilation": 2, "num_heads": 1},
    "boolean mask": {"len_q": 70, "len_k": 100, "mask": MaskKind.BOOLEAN, "num_heads": 1},
    "boolean mask, hidden rows": {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "padding": {"len_k": 133, "mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 1, 133), "batch": 2},
    "added mask": ADDED | {"len_q": 70, "len_k": 100},
    "added mask, hidden rows": ADDED | {"len_k": 90, "num_hidden_rows": 2},
    "added mask without a gradient": {"len_q": 40, "mask": MaskKind.ADDITIVE},
    "added over keys": ADDED | {"len_q": 20, "len_k": 90, "mask_shape": (1, 1, 1, 90)},
    "added over heads": ADDED | {"len_q": 20, "num_heads": 4, "mask_shape": (1, 4, 1, 1)},
    "added over rows": ADDED | {"len_q": 150, "len_k": 20, "mask_shape": (1, 1, 150, 1)},
    "added for all": ADDED | {"len_q": 30, "batch": 2, "mask_shape": (1, 1, 30, 30)},
    "added over a batch": ADDED | {"len_q": 20, "batch": 2, "mask_shape": (2, 1, 20, 20)},
    "added, causal in groups": GROUPS | ADDED | {"len_q": 40, "is_causal": True},
    "softcap": {"len_q": 40, "softcap": 1.5},
    "sinks": SINKS | {"len_q": 40},
    "sinks over hidden rows": SINKS | {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "ALiBi": ALIBI | {"len_q": 100, "batch": 2, "num_heads": 1},
    "ALiBi, dilation": ALIBI | {"len_q": 60, "dilation": 2, "is_causal": True},
    # Sums that cancel: what rounding takes from the output is most of what is left of them.
    "ALiBi over few keys": ALIBI | SINKS | {"len_q": 200, "len_k": 9, "aux": Aux.LSE},
    "groups": GROUPS | {"len_q": 20},
    "one key head": {"num_heads": 3, "num_kv_heads": 1, "len_q": 40, "is_causal": True},
    "values of other widths": {"head_dim": 20, "value_dim": 8, "len_q": 65},
    "odd columns": {"head_dim": 58, "value_dim": 30, "len_q": 40, "len_k": 70},
    "128 columns": {"head_dim": 128, "len_q": 65, "is_causal": True, "num_heads": 1},
    "256 columns": {"head_dim": 256, "len_q": 33, "num_heads": 1},
    "packed": {"lengths_q": (9, 0, 70, 1)},
    "packed, other keys": {"lengths_q": (3, 8, 0, 5), "lengths_k": (7, 8, 2, 0)},
    "packed in a window": GROUPS | {"lengths_q": (50, 17, 1), "window": (20, 4)},
    "packed to the end": TO_END | {"lengths_q": (3, 8, 0, 5), "lengths_k": (7, 8, 2, 9)},
    "packed, dilation": {"lengths_q": (13, 8, 5), "is_causal": True, "dilation": 3},
    "packed with an added mask": ADDED | TO_END | {"lengths_q": (13, 20, 5)},
    "transposed": {"layout": Layout.TRANSPOSED, "len_q": 40},
    "strided": {"layout": Layout.STRIDED, "len_q": 40},
    "blocks": {"len_q": 130, "len_k": 200, "block_size": (32, 32), "num_heads": 2},
    "blocks, causal": TO_END | {"len_q": 130, "len_k": 200, "block_size": (64, 32)},
    "blocks in a window, in groups": GROUPS
    | {"len_q": 100, "window": (70, 9), "block_size": (16, 64)},
    "blocks with an added mask": ADDED | {"len_q": 70, "block_size": (32, 16)},
    "little room for blocks": {"len_q": 100, "block_size": (32, 16), "most_blocks": 2},
    "negative scale": {"scale": -0.3, "is_causal": True, "len_q": 40},
    "zero scale": {"scale": 0.0, "is_causal": True, "len_q": 40},
    # Scores are exact: computed again, another order of sums would change weights visibly.
    "large scores": {"scale": 29.7, "len_q": 40, "len_k": 100, "step": 0.125},
    "numbers of each head": BY_HEAD | {"len_q": 40},
    "numbers of each head, to the end": BY_HEAD | TO_END | {"len_q": 33, "len_k": 90},
    "numbers of each head in groups": BY_HEAD | {"num_kv_heads": 2, "len_q": 33, "len_k": 50},
    "numbers of each head, dilation": BY_HEAD | {"len_q": 40, "dilation": 3},
    "numbers of each head with all else": BY_HEAD
    | SINKS
    | ALIBI
    | ADDED
    | {"len_q": 40, "is_causal": True},
    "scale of each head beside a softcap": {"head_terms": HeadTerm.SCALE, "softcap": 3.0},
    "softcap of each head beside a scale": {"head_terms": HeadTerm.SOFTCAP, "scale": -0.4},
    "all else": GROUPS
    | SINKS
    | ALIBI
    | {"len_q": 60, "len_k": 90, "softcap": 3.0, "window": (30, -1), "mask": MaskKind.BOOLEAN}
    | TO_END,
}
IN_FULL = (
    *("ragged", "causal", "window both ways", "dilation to the end", "added over heads"),
    *("softcap", "sinks", "ALiBi", "groups", "128 columns", "256 columns", "packed to the end"),
    *("blocks", "numbers of each head with all else", "large scores", "odd columns"),
)
"""Those in fp32 too: its products are others, and its tiles."""

IN_HALVES = (
    *("ragged", "causal", "causal, fewer keys", "to the end", "window both ways"),
    *("dilation to the end", "boolean mask", "added mask without a gradient", "softcap", "sinks"),
    *("ALiBi", "ALiBi over few keys", "groups", "values of other widths", "odd columns"),
    *("128 columns", "packed, other keys", "packed, dilation", "transposed", "strided", "blocks"),
    *("large scores", "negative scale", "numbers of each head in groups", "all else"),
)
"""Those in fp32 whose matrices are taken apart into halves."""

MANY = "numbers of each head with all else"

MADE = ("lengths_q", "lengths_k", "num_hidden_rows", "layout", "step")


def made(name: str, precision: Precision, **others: Any) -> tuple[AttentionProblem, Tensors]:
    """Return a case that wants all gradients that there are: its problem, and its tensors."""
    values = {"precision": precision, "requires_grad": True} | CASES[name] | others
    how = {key: values.pop(key) for key in MADE if key in values}
    lengths = {key: how[key] for key in ("lengths_q", "lengths_k") if key in how}
    if values.get("head_terms", HeadTerm(0)).value & ~HeadTerm.WINDOW.value:
        values["head_terms_require_grad"] = True
    problem = make_problem(**lengths, **values)
    return problem, make_tensors(problem, **how)


run = partial(load("triton"), group=GROUP)


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, Precision.FP16) for name in CASES] + [(name, Precision.FP32) for name in IN_FULL],
    ids=str,
)
def test_gradients_are_those_of_the_definition(name: str, precision: Precision) -> None:
    problem, tensors = made(name, precision)
    assert_training_matches(run, tensors, problem)


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("name", IN_HALVES)
def test_gradients_of_halves_are_those_of_the_definition(name: str) -> None:
    problem, tensors = made(name, Precision.FP32)
    assert is_halved(problem)
    assert_training_matches(run, tensors, problem)


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("power", [-60, 20])
def test_rows_of_any_size_have_gradients_of_halves(columns: int, power: int) -> None:
    """Each row has a power of two of its own; fp16 alone holds few."""
    shape = {"len_q": 70, "len_k": 90, "num_heads": 1, "head_dim": columns, "is_causal": True}
    problem = make_problem(precision=Precision.FP32, requires_grad=True, **shape)
    tensors = make_tensors(problem)
    sizes = torch.ones(problem.len_k, 1)
    sizes[::3] = 2.0**power
    tensors = with_tensors(tensors, value=tensors.value * sizes)
    assert_training_matches(run, tensors, problem)


@pytest.mark.parametrize(
    ("given", "halves", "apart"),
    [
        ({}, True, False),
        ({"head_dim": 128}, True, True),
        ({"len_q": 64}, False, False),
        ({"num_heads": 1, "len_q": 1024, "is_causal": True}, False, False),
        ({"head_dim": 256}, False, False),
        (ADDED, False, False),
    ],
)
def test_gradients_are_of_halves_where_that_pays(
    given: dict[str, Any], halves: bool, apart: bool
) -> None:
    """Both passes have them, or neither: they compute the same scores."""
    usual = {"precision": Precision.FP32, "head_dim": 64, "num_heads": 16, "len_q": 1024}
    problem = make_problem(requires_grad=True, **usual | given)
    assert is_halved(problem) is halves
    assert GradientArguments(problem).keys_apart is apart


@pytest.mark.parametrize(("machine", "columns"), [("a100", 64), ("h200", 128), ("cpu", 128)])
def test_gradients_are_of_halves_that_a_card_has_room_for(
    machine: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = fake_facts(machine)
    monkeypatch.setattr("adaattn.backends.triton.launch.probe", lambda: facts)
    usual = {"precision": Precision.FP32, "num_heads": 16, "len_q": 1024, "requires_grad": True}
    found = [is_halved(make_problem(head_dim=size, **usual)) for size in (64, 65, 128, 129)]
    assert found == [size <= columns for size in (64, 65, 128, 129)]


@pytest.mark.usefixtures("halved")
def test_rows_of_zeros_have_gradients_of_halves() -> None:
    """Any power of two would do for them; none is a number."""
    problem, tensors = made("ragged", Precision.FP32)
    kept = (torch.arange(problem.len_k) % 3 > 0).float()[:, None]
    few = tensors.query * (torch.arange(problem.len_q) % 2)[:, None]
    zeros = with_tensors(tensors, query=few, key=tensors.key * kept, value=tensors.value * kept)
    assert_training_matches(run, zeros, problem)


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("name", ["added mask", "128 columns", "groups"])
def test_the_operator_of_graphs_is_of_halves_where_calls_are(name: str) -> None:
    """It once did not know that a mask wants a gradient, which halves have none for."""
    hold_operator_as_calls(name, Precision.FP32)


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("missing", ["key", "value"])
def test_halves_have_gradients_of_keys_or_values_alone(missing: str) -> None:
    problem, tensors = made("128 columns", Precision.FP32)
    whole = gradients_of(run(tensors, problem), tensors)
    fewer = with_tensors(tensors, **{missing: getattr(tensors, missing).detach()})
    found = gradients_of(run(fewer, problem), fewer)
    assert list(found) == [name for name in whole if name != missing]
    assert all(torch.equal(found[name], whole[name]) for name in found)


@pytest.mark.parametrize("name", ["ALiBi", "added, causal in groups", "all else", MANY])
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.FP32])
def test_sums_over_scores_take_nothing_from_the_output(
    name: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their terms cancel, and the output's rounding would be left; so it is taken for 0 here."""
    problem, tensors = made(name, precision)

    def nothing(arguments: GradientArguments, layout: Any) -> Any:
        return lambda output, upstream, of_lse, delta: delta.zero_()

    monkeypatch.setattr(GradientArguments, "sums", nothing)
    found = gradients_of(run(tensors, problem), tensors)
    del found["query"]  # it is made while the sums are
    exact = gradients_of(attention(wide := cast_tensors(tensors, torch.float64), problem), wide)
    eager = gradients_of(attention(tensors, problem, compute_dtype=tensors.query.dtype), tensors)
    sizes = term_sizes(tensors, problem)
    del exact["query"]
    assert_gradients_match(found, exact, eager, sizes=sizes, problem=problem)


@pytest.mark.parametrize("number", [-1e8, -3e9])
def test_rows_that_a_mask_makes_low_have_gradients_in_16_bits(number: float) -> None:
    """Rounding takes more than a whole from such a log-sum-exp."""
    low = {"mask": MaskKind.ADDITIVE, "mask_is_wide": True, "len_q": 20, "len_k": 37}
    problem = make_problem(precision=Precision.FP16, requires_grad=True, **low)
    tensors = make_tensors(problem)
    assert tensors.mask is not None
    mask = tensors.mask.clone()
    mask[:, :, 3] = number
    assert_training_matches(run, with_tensors(tensors, mask=mask), problem)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", ["sinks", "to the end", "softcap", "ALiBi", "128 columns"])
def test_gradients_that_arrive_at_the_log_sum_exp_are_passed_on(
    name: str, halves: bool, request: pytest.FixtureRequest
) -> None:
    if halves:
        request.getfixturevalue("halved")
    problem, tensors = made(name, Precision.FP32, aux=Aux.LSE)
    assert is_halved(problem) is halves
    wide = cast_tensors(tensors, torch.float64)
    leaves = ("query", "key", "value", *(["alibi_slopes"] if name == "ALiBi" else []))

    def gradients(result: Result, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        assert result.lse is not None
        upstream = torch.randn(result.lse.shape, generator=generator)
        given = [getattr(tensors, name) for name in leaves]
        total = (result.lse * upstream.to(result.lse)).sum() + result.output.sum()
        return torch.autograd.grad(total, given)

    found = gradients(run(tensors, problem), tensors)
    exact = gradients(attention(wide, problem), wide)
    eager = gradients(attention(tensors, problem), tensors)
    for which in zip(found, exact, eager, strict=True):
        assert_matches(*which, summands=num_summands(problem, which[0]))


def test_the_gradient_of_the_log_sum_exp_alone_needs_none_of_the_output() -> None:
    problem, tensors = made("plain", Precision.FP32, aux=Aux.LSE)
    found = torch.autograd.grad(run(tensors, problem).lse.sum(), tensors.query)[0]
    wide = cast_tensors(tensors, torch.float64)
    exact = torch.autograd.grad(attention(wide, problem).lse.sum(), wide.query)[0]
    eager = torch.autograd.grad(attention(tensors, problem).lse.sum(), tensors.query)[0]
    assert_matches(found, exact, eager, summands=num_summands(problem, found))


@pytest.mark.parametrize("name", ["triton", "streamed", "small"])
@pytest.mark.parametrize("len_k", [9, 600])
def test_dropout_of_all_weights_leaves_zeros(name: str, len_k: int) -> None:
    """The share that is kept divides what is left, and is 0."""
    lengths = {"len_q": 3, "len_k": min(len_k, 128) if name == "small" else len_k}
    wide = {"head_dim": 16 if name == "triton" else 264, "requires_grad": True}
    added = ADDED if name == "triton" else {}
    problem = make_problem(**lengths, **wide, **added, dropout_p=1.0)
    tensors = make_tensors(problem)
    result = load(name)(tensors, problem, HeadGroup(capability=name))
    found = (result.output, *gradients_of(result, tensors).values())
    assert len(found) == 4 + len(added) // 2
    assert all(torch.equal(it, torch.zeros_like(it)) for it in found)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_heads": 4, "num_kv_heads": 2, "is_causal": True},
        ADDED | {"dilation": 2},
        ADDED | {"mask_shape": (1, 1, 1, 32), "lengths_q": (30, 10), "lengths_k": (12, 20)},
        ADDED | {"mask_shape": (1, 2, 40, 1), "block_size": (16, 16)},
    ],
    ids=["plain", "groups", "dilation", "packed", "blocks"],
)
def test_gradients_go_through_the_weights_that_dropout_kept(shape: dict[str, Any]) -> None:
    """The identity as values shows which those are; the same generator draws them again."""
    values = {"len_q": 40, "len_k": 32, "value_dim": 32, "dropout_p": 0.3, "requires_grad": True}
    values |= shape
    lengths = {key: values.pop(key) for key in ("lengths_q", "lengths_k") if key in values}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths)
    shown = replace(
        tensors, kv=replace(tensors.kv, value=torch.eye(32).expand(tensors.value.shape))
    )
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
    seen = attention(tensors, replace(plain, aux=Aux.WEIGHTS)).weights
    assert seen is not None
    assert 0.6 < float(kept.sum() / (seen > 0).sum()) < 0.8
    assert_matches(found.output, exact.output, eager.output, summands=64)
    assert_gradients_match(
        gradients_of(found, tensors),
        gradients_of(exact, wide),
        gradients_of(eager, tensors),
        sizes=term_sizes(tensors, plain),
        problem=plain,
    )


def test_equal_calls_have_equal_bits() -> None:
    problem, tensors = made(MANY, Precision.FP16)
    first, second = (gradients_of(run(tensors, problem), tensors) for _ in range(2))
    assert len(first) == 8
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, tensors = made("sinks", Precision.FP16)
    for name in ("keys", "rows"):
        monkeypatch.setattr(GradientArguments, name, lambda self, layout: None)
    tensors = replace(
        tensors,
        query=tensors.query.detach(),
        kv=replace(tensors.kv, key=tensors.key.detach(), value=tensors.value.detach()),
    )
    found = torch.autograd.grad(run(tensors, problem).output.sum(), tensors.sinks)
    assert bool(found[0].isfinite().all())


def test_the_function_of_repeated_calls_has_gradients() -> None:
    problem, tensors = made("causal", Precision.FP16)
    repeated = direct(problem, GROUP)
    for _ in range(2):
        output = repeated(tensors.query, tensors.key, tensors.value)
        found = gradients_of(Result(output=output), tensors)
        expected = gradients_of(run(tensors, problem), tensors)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_repeated_calls_take_masks_and_slopes_of_fewer_dimensions() -> None:
    """As callers give them."""
    given = ADDED | ALIBI | {"len_q": 20, "num_heads": 2, "mask_shape": (1, 1, 20, 20)}
    problem = make_problem(requires_grad=True, precision=Precision.FP32, **given)
    tensors = make_tensors(problem)
    assert tensors.mask is not None and tensors.alibi_slopes is not None
    flat = [item.detach()[0].requires_grad_() for item in (tensors.mask[0], tensors.alibi_slopes)]
    output = direct(problem, GROUP)(*_given(tensors), flat[0], None, flat[1], None, None)
    found = torch.autograd.grad(output.square().sum(), flat)
    whole = [tensors.mask, tensors.alibi_slopes]
    expected = torch.autograd.grad(run(tensors, problem).output.square().sum(), whole)
    for gradient, other, leaf in zip(found, expected, flat, strict=True):
        assert gradient.shape == leaf.shape
        assert torch.equal(gradient, other.view(leaf.shape))


def test_gradients_of_any_layout_arrive() -> None:
    """As from a sum, from a transposed view, from rows that begin anywhere."""
    problem, tensors = made("plain", Precision.FP16)
    output = run(tensors, problem).output
    dense = torch.randn_like(output)
    place = torch.zeros(dense.numel() + 1, dtype=torch.float16)[1:]
    odd = place.view(dense.shape).copy_(dense)
    padded = torch.zeros(*dense.shape[:3], 17, dtype=torch.float16)[..., :16].copy_(dense)
    turned = dense.transpose(1, 2).contiguous().transpose(1, 2)
    one = torch.ones((), dtype=torch.float16).expand(dense.shape)
    leaves = _given(tensors)
    for upstream in (odd, padded, turned, one):
        expected = torch.autograd.grad(output, leaves, upstream.clone(), retain_graph=True)
        found = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
        assert all(map(torch.equal, found, expected))


def test_slopes_are_read_as_they_lie() -> None:
    problem, tensors = made("ALiBi", Precision.FP32, num_heads=3)
    assert tensors.alibi_slopes is not None
    rows = tensors.alibi_slopes.detach().expand(2, 3) * torch.tensor([[1.0], [0.5]])
    turned = rows.T.contiguous().T.requires_grad_()
    assert turned.stride() == (1, 2)
    assert_training_matches(run, with_tensors(tensors, alibi_slopes=turned), problem)


def test_what_begins_between_multiples_of_four_bytes_is_copied() -> None:
    """No asynchronous copy takes it, and products of such tiles were wrong on a card."""
    problem, tensors = made("ragged", Precision.FP16)
    shifted = {}
    for name in ("query", "key", "value"):
        item = getattr(tensors, name).detach()
        place = item.new_zeros(item.numel() + 1)[1:].view(item.shape).copy_(item)
        assert place.data_ptr() % 4
        shifted[name] = place.requires_grad_()
    seen: list[int] = []
    call = Launch.__call__

    def noting(self: Launch, *given: torch.Tensor | None) -> None:
        seen.extend(item.data_ptr() for item in given if item is not None)
        call(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", noting)
        assert_training_matches(run, with_tensors(tensors, **shifted), problem)
    assert seen and not any(place % 4 for place in seen)


def test_what_is_saved_may_come_back_in_another_layout() -> None:
    """As from ``torch.autograd.graph.save_on_cpu``, or from an offloading of activations."""
    problem = make_problem(len_q=40, head_dim=68, requires_grad=True, precision=Precision.FP16)
    tensors = make_tensors(problem)
    views = {}
    for name in ("query", "key", "value"):
        item = getattr(tensors, name).detach()
        views[name] = item.new_zeros(*item.shape[:3], 72)[..., :68].copy_(item).requires_grad_()
    tensors = with_tensors(tensors, **views)
    problem = replace(problem, dense_columns=True, stride_bytes=16)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous())
    with hooks:
        assert_training_matches(run, tensors, problem)


def test_tokens_of_no_sequence_have_no_part_in_sums_over_rows() -> None:
    leaves = [torch.randn(1, 2, 50, 16, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor((0, 20, 40), dtype=torch.int32)
    sinks = torch.randn(2, requires_grad=True)
    mask = torch.randn(1, 1, 1, 50, requires_grad=True)
    values = {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 1, 50), "has_sinks": True}
    wants = {"requires_grad": True, "mask_requires_grad": True, "sinks_require_grad": True}
    problem = make_problem(lengths_q=(20, 20), head_dim=16, **values, **wants)
    problem = replace(problem, len_q=50, len_k=50)
    tensors = Tensors.of(*leaves, mask=mask, sinks=sinks, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    with poisoned_memory():
        output = run(tensors, problem).output
        found = torch.autograd.grad(output[:, :, :40].sum(), (*leaves, mask, sinks))
    assert all(bool(item.isfinite().all()) for item in found)
    assert not found[3][..., 40:].any()


def test_a_checkpoint_draws_the_same_weights_again() -> None:
    problem, tensors = made("plain", Precision.FP32, dropout_p=0.3)
    torch.manual_seed(1)
    expected = gradients_of(run(tensors, problem), tensors)
    torch.manual_seed(1)
    output = checkpoint(
        lambda *given: run(Tensors.of(*given), problem).output,
        *_given(tensors),
        use_reentrant=False,
    )
    found = gradients_of(Result(output=output), tensors)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_kernels_that_were_compiled_for_training_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = made("plain", Precision.FP16)
    known = GradientArguments(trained(problem)).known_by
    monkeypatch.setattr(executor, "is_noted", lambda found: found == known)
    assert executor.is_ready(problem)
    assert not executor.is_ready(replace(problem, requires_grad=False))


def test_a_second_derivative_is_refused() -> None:
    problem, tensors = made("plain", Precision.FP32)
    output = run(tensors, problem).output
    found = torch.autograd.grad(output.sum(), tensors.query, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"(?s)no derivatives.*reference"):
        found[0].sum().backward()


def test_statistics_beside_the_log_sum_exp_have_no_gradient() -> None:
    problem, tensors = made("plain", Precision.FP32, aux=Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY)
    result = run(tensors, problem)
    assert result.lse is not None and result.lse.requires_grad
    assert result.entropy is not None and not result.entropy.requires_grad
    assert result.row_max is not None and not result.row_max.requires_grad


# Rows of no sequence hold what was there before, of which NumPy may say so.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("starts", [(0, 30, 20, 40), (-5, 40), (0, 90), (30, 40, 0)], ids=str)
def test_starts_that_nobody_checked_lead_to_no_memory_of_others(starts: tuple[int, ...]) -> None:
    problem = make_problem(lengths_q=(20, 20), head_dim=16, is_causal=True, requires_grad=True)
    problem = replace(problem, num_sequences=len(starts) - 1)
    inside = torch.randn(3, 1, 2, 40, 16).unbind()
    bounds = torch.tensor(starts, dtype=torch.int32)
    leaves = [item.requires_grad_() for item in inside]
    tensors = Tensors.of(*leaves, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    output = run(tensors, problem).output.nan_to_num(0.0)
    for found in torch.autograd.grad(output.sum(), leaves):
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.FP32], ids=lambda it: it.label)
@pytest.mark.parametrize("name", ["plain", "packed in a window", "blocks", MANY])
def test_the_operator_of_graphs_has_the_same_gradients(name: str, precision: Precision) -> None:
    hold_operator_as_calls(name, precision)


def hold_operator_as_calls(name: str, precision: Precision) -> None:
    """Hold the operator of a graph against a call, bit by bit."""
    problem, tensors = made(name, precision)
    eager, through = run(tensors, problem), executor.KERNELS.operator(tensors, problem, 0)
    assert torch.equal(eager.output, through.output)
    assert through.lse is None
    expected, found = gradients_of(eager, tensors), gradients_of(through, tensors)
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


@pytest.mark.parametrize(
    ("name", "values"),
    [("sinks", {"dropout_p": 0.2, "aux": Aux.LSE | Aux.ENTROPY}), ("added over keys", {})],
)
def test_a_compiled_training_step_is_one_graph(name: str, values: dict[str, Any]) -> None:
    problem, tensors = made(name, Precision.FP32, **values)

    def step(tensors: Tensors) -> Result:
        return run(tensors, problem)

    torch.compiler.reset()  # the numbers of another problem would make these symbols
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    results = []
    for call in (step, compiled):
        torch.manual_seed(0)
        results.append(call(tensors))
    eager, found = results
    assert torch.equal(eager.output, found.output)
    expected = gradients_of(eager, tensors)
    for name, gradient in gradients_of(found, tensors).items():
        assert torch.equal(gradient, expected[name]), name
    if found.entropy is not None:
        assert found.lse.requires_grad and not found.entropy.requires_grad


def test_the_operators_keep_the_rules_of_operators() -> None:
    problem, tensors = made("sinks", Precision.FP32)
    given = (tensors.query, tensors.key, tensors.value, None, tensors.sinks, *[None] * 5)
    words = taken_apart(replace(problem, aux=Aux.LSE))
    words = (*words, *[None] * 4)
    torch.library.opcheck(torch.ops.adaattn.triton.default, (*given, *words))
    plain = [None if item is None else item.detach() for item in given]
    output, lse, *_, rest = torch.ops.adaattn.triton(*plain, *words)
    wanted = [True, False, True, False, True, *[False] * 3]
    kept = (torch.randn_like(output), torch.randn_like(lse), output, lse, rest)
    checks = ("test_schema", "test_faketensor")
    backward = torch.ops.adaattn.triton_backward.default
    torch.library.opcheck(backward, (*kept, *plain, *words, wanted), test_utils=checks)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.FP32], ids=lambda it: it.label)
@pytest.mark.parametrize("values", [{"len_q": 70}, GROUPS | {"len_q": 40, "is_causal": True}])
def test_gradients_of_a_sequence_are_those_that_it_has_alone(
    values: dict[str, Any], precision: Precision
) -> None:
    problem = make_problem(
        batch=3, batch_invariant=True, requires_grad=True, precision=precision, **values
    )
    leaves = [item.requires_grad_() for item in _qkv(problem)]
    upstream = torch.randn_like(leaves[0])
    whole = torch.autograd.grad(run(Tensors.of(*leaves), problem).output, leaves, upstream)
    for row in (0, 2):
        part = slice(row, row + 1)
        alone = [item[part].detach().clone().requires_grad_() for item in leaves]
        output = run(Tensors.of(*alone), replace(problem, batch=1)).output
        found = torch.autograd.grad(output, alone, upstream[part].clone())
        assert all(torch.equal(x, y[part]) for x, y in zip(found, whole, strict=True))


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.FP32], ids=lambda it: it.label)
def test_gradients_of_a_packed_sequence_do_not_depend_on_its_neighbours(
    precision: Precision,
) -> None:
    mine = [torch.randn(1, 4, 33, 16) for _ in range(4)]
    found = []
    for lengths in ((33,), (70, 33), (5, 33, 1)):
        before, total = (0, *lengths)[lengths.index(33)], sum(lengths)
        problem = make_problem(
            lengths_q=lengths, num_heads=4, is_causal=True, precision=precision,
            batch_invariant=True, requires_grad=True,
        )  # fmt: skip
        whole = [torch.randn(1, 4, total, 16) for _ in range(4)]
        for item, own in zip(whole, mine, strict=True):
            item[:, :, before : before + 33] = own
        *leaves, upstream = (item.to(torch_dtype(precision)) for item in whole)
        leaves = [item.requires_grad_() for item in leaves]
        starts = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)
        output = run(Tensors.of(*leaves, cu_seqlens_q=starts, cu_seqlens_k=starts), problem).output
        gradients = torch.autograd.grad(output, leaves, upstream)
        found.append([item[:, :, before : before + 33] for item in gradients])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def _qkv(problem: AttentionProblem) -> tuple[torch.Tensor, ...]:
    return _given(make_tensors(replace(problem, requires_grad=False)))


def _given(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    return tensors.query, tensors.key, tensors.value


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_selective_checkpoint_saves_the_operator_or_computes_it_again(
    is_saved: bool, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, tensors = made("plain", Precision.FP32)
    expected = gradients_of(run(tensors, problem), tensors)
    calls, usual = [], executor.KERNELS.compute
    monkeypatch.setattr(
        executor.KERNELS, "compute", lambda *x, **y: (calls.append(1), usual(*x, **y))[1]
    )
    save = [torch.ops.adaattn.triton.default] if is_saved else []
    short = executor.direct(problem, HeadGroup(capability="triton"))
    output = checkpoint(
        short if is_bound else lambda *given: run(Tensors.of(*given), problem).output,
        *_given(tensors),
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save),
    )
    found = gradients_of(Result(output=output), tensors)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(calls) == (1 if is_saved else 2)


class Watching(TorchDispatchMode):
    """A mode that looks at operators, and does nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what the operator returns."""
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("values", [{}, {"batch_invariant": True}, {"dropout_p": 0.0}], ids=str)
def test_a_mode_that_watches_changes_nothing_of_a_problem(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(is_causal=True, window=(5, -1), softcap=3.0, scale=0.3, **values)
    tensors, seen, usual = make_tensors(problem), [], executor.KERNELS.compute
    problem = replace(problem, dense_columns=True, stride_bytes=16)
    monkeypatch.setattr(
        executor.KERNELS, "compute", lambda it, *x, **y: (seen.append(it), usual(it, *x, **y))[1]
    )
    expected = run(tensors, problem)
    with Watching():
        found = run(tensors, problem)
    assert seen == [problem, problem]
    assert torch.equal(found.output, expected.output)


def test_what_transforms_hide_is_refused_under_a_mode_too() -> None:
    problem = make_problem()
    tensors = make_tensors(problem)
    given = _given(tensors)
    with Watching(), pytest.raises(ExecutorError, match=r"torch\.func"):
        torch.vmap(lambda *item: run(Tensors.of(*item), problem).output)(
            *(it[None] for it in given)
        )


def test_a_second_derivative_is_refused_under_a_mode_too() -> None:
    problem, tensors = made("plain", Precision.FP32)
    with Watching():
        output = run(tensors, problem).output
        found = torch.autograd.grad(output.sum(), tensors.query, create_graph=True)
        with pytest.raises(UnsupportedError, match=r"(?s)no derivatives.*reference"):
            found[0].sum().backward()


def test_tensors_without_numbers_pass_outside_of_their_mode() -> None:
    problem, tensors = made("plain", Precision.FP16, requires_grad=False)
    with FakeTensorMode():
        fake = [torch.empty(it.shape, dtype=it.dtype) for it in _given(tensors)]
    assert run(Tensors.of(*fake), problem).output.shape == tensors.query.shape
    assert executor.direct(problem, GROUP)(*fake).shape == tensors.query.shape
    assert run(tensors, problem).output.isfinite().all()


def test_tensors_without_numbers_pass_through_a_bound_call() -> None:
    """`FakeTensorMode` asks for shapes alone."""
    problem, _ = made("plain", Precision.FP16, requires_grad=False)
    short = executor.direct(problem, HeadGroup(capability="triton"))
    with FakeTensorMode():
        query, key, value = (torch.empty(2, 4, 40, 16, dtype=torch.float16) for _ in range(3))
        output = short(query, key, value)
    assert output.shape == query.shape and output.dtype is torch.float16
