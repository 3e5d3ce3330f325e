"""Few rows and keys of many columns, as Triton's interpreter computes them, with gradients.

bf16 is left to a GPU: the interpreter's products of it are wrong (Triton 3.6 to 3.9).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaattn import hardware
from adaattn.backends import capabilities, load
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.operator_arguments import taken_apart
from adaattn.backends.operators import trained
from adaattn.backends.streamed import small
from adaattn.backends.streamed.arguments import Arguments, Beside
from adaattn.backends.streamed.split import choose_splits
from adaattn.errors import ExecutorError, UnsupportedError
from adaattn.planning import decide, reasons
from adaattn.spec import (
    Align,
    AttentionProblem,
    Aux,
    HeadGroup,
    MaskKind,
    Policy,
    Precision,
)
from adaattn.testing import (
    Layout,
    assert_executor_matches,
    assert_matches,
    assert_training_matches,
    attention,
    cast_tensors,
    fake_facts,
    gradients_of,
    make_problem,
    make_tensors,
    num_summands,
)

on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/unit/test_semantics.py runs the kernels on the GPU"
)

Made = Callable[[dict[str, Any]], tuple[AttentionProblem, Tensors, HeadGroup]]

GROUP = HeadGroup(capability="small")
SMALL: dict[str, Any] = {"executor": "small", "num_heads": 1}
TRAINED: dict[str, Any] = SMALL | {"requires_grad": True}
FP32: dict[str, Any] = {"precision": Precision.FP32}
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
SINKS: dict[str, Any] = {"num_heads": 2, "has_sinks": True, "sinks_require_grad": True}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 16},
    "one row": {"len_q": 1, "len_k": 1},
    "three rows": {"len_q": 3, "batch": 2},
    "ragged": {"len_q": 63, "len_k": 100, "num_heads": 1},
    "100 rows": {"len_q": 100, "num_heads": 1},
    "128 rows": {"len_q": 128, "num_heads": 1, "is_causal": True},
    "causal": {"len_q": 40, "is_causal": True},
    "causal, fewer keys": {"len_q": 70, "len_k": 3, "is_causal": True},
    "to the end": TO_END | {"len_q": 30, "len_k": 97, "num_heads": 1},
    "to the end, fewer keys": TO_END | {"len_q": 60, "len_k": 21},
    "window both ways": {"len_q": 60, "window": (5, 3)},
    "dilation": {"len_q": 40, "dilation": 3},
    "boolean mask": {"len_q": 40, "len_k": 70, "mask": MaskKind.BOOLEAN},
    "boolean mask, hidden rows": {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "mask over keys": {"len_k": 77, "mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 1, 77)}
    | {"batch": 2},
    "added mask": {"len_q": 40, "mask": MaskKind.ADDITIVE},
    "softcap": {"len_q": 20, "softcap": 1.5},
    "sinks": SINKS | {"len_q": 20},
    "sinks over hidden rows": SINKS | {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "ALiBi": {"len_q": 30, "has_alibi": True, "batch": 2, "num_heads": 2},
    "groups": GROUPS | {"len_q": 9, "batch": 2},
    "groups of rows at the end": GROUPS | TO_END | {"len_q": 11, "len_k": 90},
    "one key head": {"num_heads": 3, "num_kv_heads": 1, "len_q": 40, "is_causal": True},
    "values of fewer columns": {"head_dim": 576, "value_dim": 512, "len_q": 20},
    "wide values": {"head_dim": 40, "value_dim": 264, "len_q": 33},
    "1000 columns": {"head_dim": 1000, "len_q": 33, "num_heads": 1},
    "8192 columns": {"head_dim": 8192, "len_q": 16, "num_heads": 1},
    "transposed": {"layout": Layout.TRANSPOSED, "len_q": 20, "batch": 2, "num_heads": 2},
    "strided": {"layout": Layout.STRIDED, "len_q": 20},
    "negative scale": {"scale": -0.3, "is_causal": True, "len_q": 40},
    "zero scale": {"scale": 0.0, "is_causal": True, "len_q": 40},
    "all else": GROUPS
    | SINKS
    | TO_END
    | {
        "num_heads": 4,
        "len_q": 13,
        "len_k": 40,
        "softcap": 3.0,
        "window": (30, -1),
        "mask": MaskKind.BOOLEAN,
    }
    | {"has_alibi": True},
}
IN_FULL = ("ragged", "causal", "groups", "sinks", "softcap", "1000 columns", "all else")
"""Those in fp32 too, whose products and tiles are others."""

EACH = [(name, Precision.FP16) for name in CASES] + [(name, Precision.FP32) for name in IN_FULL]


def computing(group: HeadGroup) -> Callable[[Tensors, AttentionProblem], Result]:
    """Return the executor."""
    return partial(load("small"), group=group)


@on_a_cpu
@pytest.mark.parametrize(("name", "precision"), EACH, ids=str)
def test_it_computes_what_is_defined(name: str, precision: Precision, made: Made) -> None:
    values = {key: value for key, value in CASES[name].items() if key != "sinks_require_grad"}
    problem, tensors, group = made(SMALL | {"precision": precision} | values)
    assert_executor_matches(computing(group), tensors, problem)


@on_a_cpu
@pytest.mark.parametrize(("name", "precision"), EACH, ids=str)
def test_gradients_are_those_of_the_definition(name: str, precision: Precision, made: Made) -> None:
    problem, tensors, group = made(TRAINED | {"precision": precision} | CASES[name])
    assert_training_matches(computing(group), tensors, problem)


@on_a_cpu
def test_odd_columns_of_fp32_are_read_one_by_one(made: Made) -> None:
    values = FP32 | {"head_dim": 261, "value_dim": 7, "len_q": 20}
    problem, tensors, group = made(TRAINED | values)
    assert_training_matches(computing(group), tensors, problem)


@on_a_cpu
@pytest.mark.parametrize("name", ["sinks", "to the end", "softcap"])
def test_gradients_that_arrive_at_the_log_sum_exp_are_passed_on(name: str, made: Made) -> None:
    problem, tensors, group = made(TRAINED | FP32 | CASES[name] | {"aux": Aux.LSE})
    wide = cast_tensors(tensors, torch.float64)
    leaves = ["query", "key", "value", *(["sinks"] if name == "sinks" else [])]

    def of(result: Result, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        assert result.lse is not None
        upstream = torch.randn(result.lse.shape, generator=generator)
        total = (result.lse * upstream.to(result.lse)).sum() + result.output.sum()
        return torch.autograd.grad(total, [getattr(tensors, name) for name in leaves])

    found = of(computing(group)(tensors, problem), tensors)
    exact = of(attention(wide, problem), wide)
    eager = of(attention(tensors, problem), tensors)
    for which in zip(found, exact, eager, strict=True):
        assert_matches(*which, summands=num_summands(problem, which[0]))


@on_a_cpu
def test_dropout_keeps_what_chunks_keep_and_gradients_go_through_it(made: Made) -> None:
    values = {"len_q": 10, "len_k": 48, "dropout_p": 0.3}
    problem, tensors, group = made(TRAINED | FP32 | values | GROUPS)
    found = []
    for name in ("small", "streamed"):
        torch.manual_seed(3)
        result = load(name)(tensors, problem, replace(group, capability=name))
        found.append((result.output, gradients_of(result, tensors)))
    (output, mine), (other, theirs) = found
    torch.testing.assert_close(output, other)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name])


@on_a_cpu
def test_equal_calls_have_equal_bits(made: Made) -> None:
    problem, tensors, group = made(TRAINED | CASES["all else"])
    first, second = (gradients_of(computing(group)(tensors, problem), tensors) for _ in range(2))
    assert len(first) == 4
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_a_cpu
def test_the_function_of_repeated_calls_follows_lengths_and_layouts(made: Made) -> None:
    problem, _, group = made(SMALL | FP32 | CASES["causal"] | {"aux": Aux.NONE})
    repeated = small.direct(problem, group)
    for length in (40, 33, 100, 1):
        case = replace(problem, len_q=length, len_k=length)
        tensors = make_tensors(case, seed=length)
        output = repeated(tensors.query, tensors.key.clone(), tensors.value)
        exact = attention(cast_tensors(tensors, torch.float64), case).output
        assert_matches(
            output, exact, attention(tensors, case).output, summands=num_summands(case, output)
        )


@on_a_cpu
def test_rows_that_copies_cannot_begin_at_are_laid_out_anew(made: Made) -> None:
    problem, tensors, group = made(SMALL | {"len_q": 20, "aux": Aux.NONE})
    expected = computing(group)(tensors, problem).output
    shifted = {}
    for name in ("key", "value"):
        item = getattr(tensors, name)
        shifted[name] = item.new_zeros(item.numel() + 1)[1:].view(item.shape).copy_(item)
    narrow = tensors.query.new_zeros(*tensors.query.shape[:3], 267)[..., 3:].copy_(tensors.query)
    moved = replace(tensors, query=narrow, kv=replace(tensors.kv, **shifted))
    assert torch.equal(computing(group)(moved, problem).output, expected)


@on_a_cpu
def test_what_stands_between_kernels_needs_no_clearing(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, tensors, group = made(TRAINED | CASES["ragged"])
    expected = gradients_of(computing(group)(tensors, problem), tensors)
    usual = small.unfilled

    def infinite(*given: Any, **named: Any) -> torch.Tensor:
        return usual(*given, **named).fill_(torch.inf)

    monkeypatch.setattr(small, "unfilled", infinite)
    found = gradients_of(computing(group)(tensors, problem), tensors)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_a_cpu
def test_a_checkpoint_draws_the_same_weights_again(made: Made) -> None:
    problem, tensors, group = made(TRAINED | FP32 | CASES["plain"] | {"dropout_p": 0.3})
    run = computing(group)
    torch.manual_seed(1)
    expected = gradients_of(run(tensors, problem), tensors)
    torch.manual_seed(1)
    given = (tensors.query, tensors.key, tensors.value)
    output = checkpoint(
        lambda *given: run(Tensors.of(*given), problem).output, *given, use_reentrant=False
    )
    found = gradients_of(Result(output=output), tensors)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_a_cpu
def test_a_second_derivative_and_transforms_are_refused(made: Made) -> None:
    problem, tensors, group = made(TRAINED | FP32 | CASES["plain"])
    output = computing(group)(tensors, problem).output
    found = torch.autograd.grad(output.sum(), tensors.query, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"(?s)no derivatives.*reference"):
        found[0].sum().backward()
    plain = replace(problem, requires_grad=False)
    given = [item.detach()[None] for item in (tensors.query, tensors.key, tensors.value)]
    with pytest.raises(ExecutorError, match=r"torch\.func"):
        torch.vmap(lambda *item: computing(group)(Tensors.of(*item), plain).output)(*given)


@on_a_cpu
def test_a_compiled_training_step_is_one_graph(made: Made) -> None:
    problem, tensors, group = made(TRAINED | FP32 | CASES["sinks"])
    step = computing(group)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda tensors: step(tensors, problem), backend="aot_eager", fullgraph=True
    )
    eager, graph = step(tensors, problem), compiled(tensors)
    assert torch.equal(eager.output, graph.output)
    expected, found = gradients_of(eager, tensors), gradients_of(graph, tensors)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@on_a_cpu
def test_it_is_an_operator_as_pytorch_wants_them(made: Made) -> None:
    problem, tensors, _ = made(TRAINED | FP32 | CASES["sinks"] | {"aux": Aux.LSE})
    given = (tensors.query, tensors.key, tensors.value, None, tensors.sinks, *[None] * 5)
    words = (*taken_apart(problem), *[None] * 4)
    torch.library.opcheck(torch.ops.adaattn.small.default, (*given, *words))


@on_a_cpu
def test_what_is_prepared_is_dropped_with_the_facts_that_it_rests_on(made: Made) -> None:
    problem, tensors, group = made(TRAINED)
    gradients_of(computing(group)(tensors, problem), tensors)
    kept = small._launcher.cache_info, small._backward.cache_info
    assert all(of().currsize for of in kept)
    hardware.clear_cache()
    assert not any(of().currsize for of in kept)


@pytest.mark.parametrize(
    ("values", "columns", "expected"),
    [
        ({"len_q": 64}, 512, (8, 64)),
        ({"len_q": 64}, 8192, (8, 1024)),
        ({"len_q": 16}, 512, (8, 64)),
        ({"len_q": 16}, 2048, (16, 128)),
        ({"len_q": 16}, 264, (5, 64)),
        ({"len_q": 128, "num_heads": 8}, 8192, (2, 4096)),
        ({"len_q": 128, "num_heads": 64}, 512, (1, 512)),
    ],
)
def test_products_are_split_until_the_card_is_full(
    values: dict[str, Any], columns: int, expected: tuple[int, int]
) -> None:
    problem = make_problem(**({"num_heads": 4, "head_dim": columns} | values))
    found = choose_splits(problem, columns, 132)
    assert (found.count, found.columns) == expected
    assert (found.count - 1) * found.columns < columns <= found.count * found.columns


@pytest.mark.parametrize("len_k", [16, 33])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16], ids=str)
def test_only_launches_of_many_keys_in_fp32_wait_for_one_another(
    precision: Precision, len_k: int
) -> None:
    hopper = fake_facts("h200")
    problem = make_problem(len_q=16, len_k=len_k, head_dim=512, precision=precision)
    apart = precision is Precision.FP32 and len_k > 32
    assert small._overlaps(problem, hopper) == (not apart)


GPU: dict[str, Any] = {"num_heads": 4, "len_q": 64, "head_dim": 2048, "device_type": "cuda"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"head_dim": 256}, "it is for D or Dv above 256"),
        ({"len_k": 129}, "it takes up to 128 keys, and as many rows .* got 129 and 64"),
        ({"num_kv_heads": 1}, "got 64 and 256"),
        ({"batch": 9}, "it takes up to 2048 rows in all, got 2304"),
        (
            {"head_dim": 2044, "precision": Precision.BF16},
            "in 16 bits it takes D and Dv in steps of 8, got 2044 and 2044",
        ),
        ({"batch_invariant": True}, "the rest of the batch"),
        ({"aux": Aux.WEIGHTS}, "the weights as an output"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_a_reason(
    values: dict[str, Any], reason: str
) -> None:
    usable = replace(small.CAPABILITIES[0], unavailable="")
    found = reasons(usable, make_problem(**(GPU | values)), fake_facts("h200"))
    with pytest.raises(AssertionError, match=reason):
        assert not found, found


@pytest.mark.parametrize(
    ("values", "first"),
    [({}, "sdpa.efficient"), ({"softcap": 30.0}, "chunked"), ({"aux": Aux.ENTROPY}, "chunked")],
)
def test_it_is_first_nowhere_without_measured_times(values: dict[str, Any], first: str) -> None:
    usable = tuple(
        replace(it, unavailable="") if it.name in ("small", "streamed") else it
        for it in capabilities()
    )
    facts = replace(fake_facts("h200"), timings=None)
    decision = decide(make_problem(**(GPU | values)), None, facts, Policy(name="exact"), usable)
    assert decision.plan.groups[0].capability == first


def test_on_hopper_kernels_begin_while_the_one_before_them_ends() -> None:
    values = GPU | {"requires_grad": True, "precision": Precision.BF16}
    problem, read = make_problem(**values), tuple(torch.empty(1, 4, 64, 2048) for _ in range(7))
    for major, chained in ((9, True), (8, False)):
        facts = replace(fake_facts("h200"), compute_capability=(major, 0))
        launches, counts = small._backward_launches(problem, facts, read, Beside())
        follows = [dict(it.options).get("launch_pdl", False) for it in launches]
        assert follows == [False, *[chained] * 5]
        assert counts == (8, 8)
        launches, _ = small._forward(problem, facts, read[:4], Beside())
        follows = [dict(it.options).get("launch_pdl", False) for it in launches]
        assert follows == [False, chained, chained]


def test_kernels_that_were_compiled_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(**(GPU | {"requires_grad": True}))
    splits = choose_splits(problem, 2048, 132)
    known = ("small", splits, splits, *Arguments(trained(problem)).known_by)
    monkeypatch.setattr(small, "is_noted", lambda found: found == known)
    assert small.is_ready(problem)
    assert not small.is_ready(replace(problem, requires_grad=False))
