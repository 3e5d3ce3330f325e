"""The gradients of the Hopper kernels, run on a CPU by `conftest.py`, against the definition."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.hopper import CAPABILITIES, executor, gradient_numbers, gradients
from adaattn.backends.hopper.gradient_launch import BLOCK_KEYS, choose_gradients
from adaattn.backends.hopper.gradient_numbers import numbers_of
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.operator_arguments import taken_apart
from adaattn.backends.operators import trained
from adaattn.errors import UnsupportedError
from adaattn.planning.support import reasons
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, HeadTerm, MaskKind, Precision
from adaattn.testing import (
    Layout,
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
    with_tensors,
)

GROUP = HeadGroup(capability="hopper")
LEAVES = ("query", "key", "value")

TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
ONE: dict[str, Any] = {"num_heads": 1}
SINKS: dict[str, Any] = {"has_sinks": True, "sinks_require_grad": True}
WIDE: dict[str, Any] = {"head_dim": 128, "num_heads": 1}

CASES: dict[str, dict[str, Any]] = {
    "one row": {"len_q": 1, "len_k": 1},
    "one row, many keys": {"len_q": 1, "len_k": 300},
    "many rows, one key": {"len_q": 300, "len_k": 1},
    "whole blocks": ONE | {"len_q": 256, "len_k": 384},
    "ragged": {"len_q": 67, "len_k": 131},
    "ragged rows, whole keys": ONE | {"len_q": 200, "len_k": 256},
    "batch": {"batch": 2, "len_q": 70, "len_k": 150},
    "causal": {"len_q": 256, "is_causal": True},
    "causal, ragged": {"len_q": 300, "is_causal": True},
    "causal, fewer keys": {"len_q": 300, "len_k": 100, "is_causal": True},
    "causal, keys that no row sees": ONE | {"len_q": 100, "len_k": 500, "is_causal": True},
    "to the end": TO_END | {"len_q": 130, "len_k": 333},
    "to the end, aligned": TO_END | ONE | {"len_q": 128, "len_k": 384},
    "to the end, fewer keys": TO_END | {"len_q": 333, "len_k": 90},
    "to the end, rows that see nothing": TO_END | ONE | {"len_q": 384, "len_k": 128},
    "window both ways": ONE | {"len_q": 400, "window": (70, 20)},
    "window to the left": ONE | {"len_q": 300, "window": (40, -1)},
    "window to the right": ONE | {"len_q": 300, "window": (-1, 40)},
    "causal in a window": ONE | {"len_q": 500, "is_causal": True, "window": (128, -1)},
    "window beyond int32": {"len_q": 70, "window": (2**31, 2**31)},
    "window, rows that see nothing": ONE | {"len_q": 500, "len_k": 100, "window": (10, 3)},
    "groups": GROUPS | {"len_q": 200, "len_k": 140},
    "groups, causal": GROUPS | {"len_q": 256, "is_causal": True, "batch": 2},
    "groups in a window": GROUPS | {"len_q": 300, "window": (90, 4)},
    "one key head": {"num_heads": 3, "num_kv_heads": 1, "len_q": 140, "is_causal": True},
    "one key head, to the end": TO_END
    | {"num_heads": 3, "num_kv_heads": 1, "len_q": 140, "len_k": 300},
    "40 columns": {"head_dim": 40, "len_q": 100},
    "values of other widths": {"head_dim": 64, "value_dim": 40, "len_q": 100, "is_causal": True},
    "wider values": {"head_dim": 48, "value_dim": 128, "len_q": 100},
    "104 columns": {"head_dim": 104, "len_q": 100, "len_k": 70},
    "128 columns": WIDE | {"len_q": 200, "len_k": 256},
    "128 columns, causal": WIDE | {"len_q": 256, "is_causal": True},
    "128 columns, causal, ragged": WIDE | {"len_q": 200, "is_causal": True},
    "128 columns, to the end": WIDE | TO_END | {"len_q": 128, "len_k": 384},
    "128 columns in a window": WIDE | {"len_q": 300, "window": (70, 20)},
    "128 columns, groups": GROUPS | {"head_dim": 128, "len_q": 140, "is_causal": True},
    "transposed": {"layout": Layout.TRANSPOSED, "len_q": 140, "batch": 2},
    "strided": {"layout": Layout.STRIDED, "len_q": 140},
    "large scores": {"scale": 30.0, "len_q": 70, "len_k": 200},
    "softcap": {"len_q": 140, "softcap": 1.5},
    "softcap, 128 columns, causal": WIDE | {"len_q": 140, "softcap": 3.0, "is_causal": True},
    "sinks": SINKS | {"len_q": 140},
    "sinks over rows that see nothing": SINKS | TO_END | {"len_q": 200, "len_k": 90},
    "ALiBi": {"has_alibi": True, "batch": 2, "len_q": 140},
    "ALiBi to the end, in groups": GROUPS
    | TO_END
    | {"has_alibi": True, "len_q": 140, "len_k": 200},
    "all else": GROUPS
    | SINKS
    | TO_END
    | {"has_alibi": True, "len_q": 140, "len_k": 200, "softcap": 3.0, "window": (90, -1)},
}
MADE = ("layout",)

simulated = pytest.mark.usefixtures("simulated")


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem that wants gradients, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 64, "num_heads": 2, "requires_grad": True}
    values = usual | values
    how = {key: values.pop(key) for key in MADE if key in values}
    problem = make_problem(**values)
    tensors = make_tensors(problem, **how)
    if problem.has_alibi:
        slopes = torch.rand(problem.batch, problem.num_heads)
        tensors = with_tensors(tensors, alibi_slopes=slopes)
    return problem, tensors


run = partial(hopper.run, group=GROUP)


@simulated
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name: str, precision: Precision) -> None:
    problem, tensors = made(CASES[name] | {"precision": precision})
    assert_training_matches(run, tensors, problem)


def random_case(seed: int) -> dict[str, Any]:
    """Return any problem that the kernel trains."""
    draw = random.Random(seed)
    kv_heads = draw.choice((1, 1, 2))
    head_dim = draw.choice((32, 56, 64, 72, 128))
    length = partial(draw.choice, (1, 3, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300))
    values: dict[str, Any] = {
        "batch": draw.choice((1, 1, 2)),
        "num_heads": kv_heads * draw.choice((1, 1, 2, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": draw.choice((head_dim, head_dim, 64)),
        "len_q": length(),
        "len_k": length(),
        "is_causal": draw.random() < 0.5,
        "align": draw.choice(tuple(Align)),
        "precision": draw.choice((Precision.BF16, Precision.FP16)),
        "layout": draw.choice(tuple(Layout)),
        "softcap": draw.choice((0.0, 0.0, 2.0)),
        "has_alibi": draw.random() < 0.2,
        "deterministic": draw.random() < 0.4,
    }
    if draw.random() < 0.4:
        right = -1 if values["is_causal"] else draw.choice((-1, 0, 9, 70))
        values["window"] = (draw.choice((0, 9, 64, 150)), right)
    return values | (SINKS if draw.random() < 0.2 else {})


@simulated
@pytest.mark.parametrize("seed", range(40))
def test_any_problem_in_its_scope(seed: int) -> None:
    problem, tensors = made(random_case(seed))
    assert_training_matches(run, tensors, problem)


ORDERED = ("one row", "whole blocks", "causal, ragged", "causal, keys that no row sees",
           "to the end, rows that see nothing", "window both ways", "groups, causal",
           "128 columns, causal", "softcap, 128 columns, causal", "all else")  # fmt: skip


@simulated
@pytest.mark.parametrize("mode", ["deterministic", "batch_invariant"])
@pytest.mark.parametrize("name", ORDERED)
def test_gradients_in_a_fixed_order_are_those_of_the_definition(name: str, mode: str) -> None:
    problem, tensors = made(CASES[name] | {mode: True})
    assert_training_matches(run, tensors, problem)


@simulated
@pytest.mark.usefixtures("late", "together")
@pytest.mark.parametrize(
    "values",
    [
        {"len_q": 200, "len_k": 500, "num_heads": 1},
        {"len_q": 500, "is_causal": True, "head_dim": 128, "num_heads": 1},
        {"len_q": 500, "is_causal": True, "num_heads": 3},
        TO_END | {"len_q": 130, "len_k": 500},
        {"len_q": 200, "len_k": 500, "is_causal": True},
        GROUPS | {"len_q": 300, "is_causal": True},
        {"len_q": 500, "window": (200, 100), "num_heads": 1},
        {"len_q": 260, "num_heads": 9},
    ],
    ids=str,
)
def test_gradients_in_a_fixed_order_are_the_same_each_time(values: dict[str, Any]) -> None:
    """Blocks start in another order each time, and take their time."""
    problem, tensors = made(values | {"deterministic": True})
    first = gradients_of(run(tensors, problem), tensors)
    again = gradients_of(run(tensors, problem), tensors)
    assert all(torch.equal(first[name], again[name]) for name in first)


@simulated
@pytest.mark.usefixtures("late", "together")
def test_parts_of_ascending_heads_need_not_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten heads five ascend, three together and then two."""
    monkeypatch.setattr(gradient_numbers, "_BLOCKS_APART", 5)
    problem, tensors = made(
        {"len_q": 200, "num_heads": 10, "is_causal": True, "deterministic": True}
    )
    assert numbers_of(problem, choose_gradients(problem), 0)[-5:-2] == (5, 5, 3)
    assert_training_matches(run, tensors, problem)


@simulated
def test_gradients_of_one_sequence_are_those_in_a_batch() -> None:
    """Bit for bit, where any batch alike is asked for: heads do not ascend by their number."""
    asked = {"len_q": 300, "is_causal": True, "batch_invariant": True}
    problem, tensors = made(asked | {"batch": 3})
    single, _ = made(asked)
    upstream = torch.randn_like(tensors.query)
    leaves = [getattr(tensors, name) for name in LEAVES]
    together = torch.autograd.grad(run(tensors, problem).output, leaves, upstream)
    for number in range(3):
        read = [item.detach()[number : number + 1].clone().requires_grad_() for item in leaves]
        alone = with_tensors(tensors, **dict(zip(LEAVES, read, strict=True)))
        output = run(alone, single).output
        found = torch.autograd.grad(output, read, upstream[number : number + 1])
        for one, all_of_them in zip(found, together, strict=True):
            assert torch.equal(one[0], all_of_them[number])


@simulated
def test_what_is_left_of_a_transform_is_as_any_tensor() -> None:
    problem, tensors = made({"len_q": 70})
    left: list[torch.Tensor] = []

    def leak(query: torch.Tensor) -> torch.Tensor:
        left.append(query)
        return query.sum()

    torch.func.grad(leak)(tensors.query.detach())
    plain = run(tensors, problem).output
    assert torch.equal(run(with_tensors(tensors, query=left[0]), problem).output, plain)


@simulated
def test_a_transform_that_is_under_way_is_refused_whatever_it_has_hold_of() -> None:
    problem, tensors = made(SINKS | {"len_q": 70})
    assert tensors.sinks is not None

    def of_sinks(sinks: torch.Tensor) -> torch.Tensor:
        return run(with_tensors(tensors, sinks=sinks), problem).output.sum()

    def of_nothing(number: torch.Tensor) -> torch.Tensor:
        return run(tensors, problem).output.sum() * number

    for call, given in ((of_sinks, tensors.sinks.detach()), (of_nothing, torch.ones(()))):
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(call)(given)


@simulated
def test_gradients_of_a_sequence_alone_are_those_in_a_batch() -> None:
    problem, tensors = made({"batch": 2, "len_q": 300, "batch_invariant": True})
    upstream = torch.randn_like(tensors.query)
    read = [getattr(tensors, name) for name in LEAVES]
    together = torch.autograd.grad(run(tensors, problem).output, read, upstream)
    read = [item.detach()[1:].requires_grad_() for item in read]
    single = with_tensors(tensors, **dict(zip(LEAVES, read, strict=True)))
    output = run(single, replace(problem, batch=1)).output
    alone = torch.autograd.grad(output, read, upstream[1:])
    assert all(torch.equal(both[1:], one) for both, one in zip(together, alone, strict=True))


LATE = ("whole blocks", "causal", "causal, ragged", "128 columns, causal", "groups, causal",
        "window both ways", "softcap, 128 columns, causal", "all else")  # fmt: skip


@simulated
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", LATE)
def test_nothing_reads_too_early_or_writes_what_is_still_read(name: str) -> None:
    problem, tensors = made(CASES[name])
    assert_training_matches(run, tensors, problem)


@simulated
@pytest.mark.parametrize("name", ["ragged", "sinks", "to the end, rows that see nothing", "groups"])
def test_gradients_that_arrive_at_the_log_sum_exp_are_passed_on(name: str) -> None:
    problem, tensors = made(CASES[name] | {"aux": Aux.LSE})
    wide = cast_tensors(tensors, torch.float64)

    def found_by(result: Result, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        assert result.lse is not None
        upstream = torch.randn(result.lse.shape, generator=generator)
        given = [getattr(tensors, name) for name in LEAVES]
        seen = result.lse.masked_fill(result.lse == -torch.inf, 0.0)
        total = (seen * upstream.to(seen)).sum() + result.output.sum()
        return torch.autograd.grad(total, given)

    with poisoned_memory():
        found = found_by(run(tensors, problem), tensors)
    exact = found_by(attention(wide, problem), wide)
    eager = found_by(attention(tensors, problem, compute_dtype=tensors.query.dtype), tensors)
    for which in zip(found, exact, eager, strict=True):
        assert_matches(*which, summands=num_summands(problem, which[0]))


@simulated
@pytest.mark.parametrize("place", range(4))
def test_a_known_layout_may_begin_where_tma_cannot_read(place: int) -> None:
    problem, tensors = made({"len_q": 70, "len_k": 70})
    given = [tensors.query, tensors.key, tensors.value]
    given.append(torch.randn(given[0].shape, dtype=given[0].dtype))
    wide = torch.zeros(given[place].numel() + 8, dtype=given[place].dtype)
    odd = wide[1 : 1 + given[place].numel()].view_as(given[place]).copy_(given[place].detach())
    assert odd.data_ptr() % 16
    found = []
    for values in (given, [odd if it == place else value for it, value in enumerate(given)]):
        *read, upstream = (item.detach().requires_grad_(it < 3) for it, item in enumerate(values))
        names = dict(zip(("query", "key", "value"), read, strict=True))
        output = run(with_tensors(tensors, **names), problem).output
        found.append(torch.autograd.grad(output, read, upstream))
    assert all(map(torch.equal, *found))


@simulated
def test_the_gradient_of_the_log_sum_exp_alone_needs_none_of_the_output() -> None:
    problem, tensors = made({"len_q": 70, "aux": Aux.LSE})
    result = run(tensors, problem)
    found = torch.autograd.grad(result.lse.sum(), tensors.query)[0]
    assert bool(found.isfinite().all()) and bool(found.any())


@simulated
@pytest.mark.parametrize("what", LEAVES)
def test_rows_behind_the_last_are_never_read(what: str) -> None:
    """They stand in the same boxes, as a neighbour's: a weight of 0 times NaN would be NaN."""
    problem, tensors = made({"len_q": 70, "len_k": 90, "num_heads": 1})
    views = {}
    for name in LEAVES:
        item = getattr(tensors, name).detach()
        place = item.new_full((*item.shape[:2], 200, item.shape[3]), float("nan"))
        views[name] = place[:, :, : item.shape[2]].copy_(item).requires_grad_()
    shown = with_tensors(tensors, **{what: views[what]})
    assert_training_matches(run, shown, problem)


@simulated
def test_keys_behind_the_last_weigh_nothing_where_all_scores_are_low() -> None:
    """Their score of 0 would be 2^200 beside a log-sum-exp of -150: infinite, and 0 times that."""
    problem, tensors = made({"len_q": 70, "len_k": 90, "num_heads": 1, "scale": 1.0})
    query = torch.full_like(tensors.query, 3.0).requires_grad_()
    key = (torch.randn_like(tensors.key) * 0.01 - 1.0).requires_grad_()
    assert_training_matches(run, with_tensors(tensors, query=query, key=key), problem)


@simulated
def test_gradients_of_any_layout_arrive() -> None:
    """As from a sum, from a transposed view, from rows that begin anywhere."""
    problem, tensors = made({"len_q": 70})
    output = run(tensors, problem).output
    dense = torch.randn_like(output)
    odd = torch.zeros(dense.numel() + 1, dtype=dense.dtype)[1:].view(dense.shape).copy_(dense)
    padded = torch.zeros(*dense.shape[:3], 65, dtype=dense.dtype)[..., :64].copy_(dense)
    turned = dense.transpose(1, 2).contiguous().transpose(1, 2)
    one = torch.ones((), dtype=dense.dtype).expand(dense.shape)
    leaves = [getattr(tensors, name) for name in LEAVES]
    for upstream in (odd, padded, turned, one):
        expected = torch.autograd.grad(output, leaves, upstream.clone(), retain_graph=True)
        found = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
        assert all(map(torch.equal, found, expected))


@simulated
def test_queries_of_any_layout_are_differentiated() -> None:
    """Expanded over the batch, and rows that begin between multiples of 16 bytes."""
    problem, tensors = made({"len_q": 70, "batch": 2})
    query = tensors.query.detach()[:1].expand(tensors.query.shape).requires_grad_()
    place = tensors.key.new_zeros(tensors.key.numel() + 1)[1:].view(tensors.key.shape)
    key = place.copy_(tensors.key).detach().requires_grad_()
    assert_training_matches(run, with_tensors(tensors, query=query, key=key), problem)


@simulated
def test_the_function_of_repeated_calls_has_gradients() -> None:
    problem, tensors = made({"len_q": 140, "is_causal": True})
    repeated = hopper.direct(problem, GROUP)
    assert repeated is not None
    for _ in range(2):
        output = repeated(tensors.query, tensors.key, tensors.value)
        found = gradients_of(Result(output=output), tensors)
        expected = gradients_of(run(tensors, problem), tensors)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@simulated
def test_what_is_saved_may_come_back_in_another_layout() -> None:
    problem, tensors = made({"len_q": 70, "layout": Layout.TRANSPOSED, "batch": 2})
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous()):
        assert_training_matches(run, tensors, problem)


@simulated
def test_a_second_derivative_is_refused() -> None:
    problem, tensors = made({"len_q": 10})
    output = run(tensors, problem).output
    found = torch.autograd.grad(output.sum(), tensors.query, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"(?s)hopper.*no derivatives.*reference"):
        found[0].sum().backward()


@simulated
@pytest.mark.parametrize(
    "values",
    [{"is_causal": True}, SINKS | {"softcap": 3.0}, {"is_causal": True, "deterministic": True}],
    ids=str,
)
def test_the_operator_of_graphs_has_the_same_gradients(values: dict[str, Any]) -> None:
    problem, tensors = made({"len_q": 70} | values)
    given = (tensors.query, tensors.key, tensors.value, None, tensors.sinks)
    output = torch.ops.adaattn.hopper(
        *given, None, None, None, None, None, *taken_apart(trained(problem)), None, None, None, None
    )[0]
    found = gradients_of(Result(output=output), tensors)
    expected = gradients_of(run(tensors, problem), tensors)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@simulated
def test_a_compiled_training_step_is_one_graph() -> None:
    problem, tensors = made({"len_q": 70, "is_causal": True, "aux": Aux.LSE | Aux.ENTROPY})

    def step(tensors: Tensors) -> Result:
        return run(tensors, problem)

    torch.compiler.reset()  # the numbers of another problem would make these symbols
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(tensors)
    expected = run(tensors, problem)
    assert torch.equal(found.output, expected.output)
    assert found.lse.requires_grad and not found.entropy.requires_grad
    made_in_graph = gradients_of(found, tensors)
    for name, gradient in gradients_of(expected, tensors).items():
        assert torch.equal(gradient, made_in_graph[name]), name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mask": MaskKind.ADDITIVE, "mask_requires_grad": True}, "gradient"),
        ({"block_size": (128, 128)}, "a list of blocks"),
        ({"head_terms": HeadTerm.SCALE}, "numbers of each head"),
        ({"has_alibi": True, "alibi_requires_grad": True}, "a gradient for ALiBi slopes"),
        ({"dropout_p": 0.1}, "dropout"),
    ],
    ids=str,
)
def test_what_it_does_not_train_is_said_in_words(values: dict[str, Any], words: str) -> None:
    layout = {"device_type": "cuda", "dense_columns": True, "stride_bytes": 16}
    usual = {"precision": Precision.BF16, "head_dim": 64, "requires_grad": True} | layout
    (capability,) = CAPABILITIES
    plain = make_problem(**usual)
    known = {f"this installation cannot run it: {capability.unavailable}"}
    assert set(reasons(capability, plain, None)) <= known
    found = set(reasons(capability, make_problem(**(usual | values)), None)) - known
    assert any(words in text for text in found), found


def test_training_never_comes_before_what_a_card_has_timed() -> None:
    (capability,) = CAPABILITIES
    problem = make_problem(head_dim=64, precision=Precision.BF16, len_q=4096)
    assert capability.order(problem) < capability.order(replace(problem, requires_grad=True))


def test_what_a_call_allocates_is_said() -> None:
    (capability,) = CAPABILITIES
    problem = make_problem(head_dim=128, num_heads=4, len_q=1000, precision=Precision.BF16)
    known = partial(capability.overhead, group=GROUP, hardware=fake_facts("h200"), density=1.0)
    assert known(problem).workspace_bytes == 0
    shape = (2, 1, 2048, 1024)
    masked = make_problem(
        precision=Precision.BF16, batch=2, num_heads=4, len_q=2048, len_k=1024,
        mask=MaskKind.BOOLEAN, mask_shape=shape,
    )  # fmt: skip
    assert known(masked).workspace_bytes == 2 * 2048 * 1024 // 8
    assert known(replace(masked, num_heads=2)).workspace_bytes == 0
    sums, terms = 4 * 4 * 1024 * 128, 4 * 4 * 1024 * 2
    trained = replace(problem, requires_grad=True)
    assert known(trained).workspace_bytes == sums + terms
    packed = make_problem(
        head_dim=128,
        num_heads=4,
        lengths_q=(1000, 24),
        precision=Precision.BF16,
        requires_grad=True,
    )
    assert known(packed).workspace_bytes == 4 * 4 * (1024 + 2 * 64) * (128 + 2)
    turns = 8 * 4 * 1024 // 64
    for mode in ("deterministic", "batch_invariant"):
        assert known(replace(trained, **{mode: True})).workspace_bytes == sums + terms + turns
        wide = replace(trained, head_dim=192, **{mode: True})
        assert known(wide).workspace_bytes == terms


def test_kernels_that_were_compiled_for_training_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = made({"len_q": 70})
    known = gradients.noted_as(problem)
    monkeypatch.setattr(executor, "is_noted", lambda found: found == known or found[0] == "hopper")
    assert hopper.is_ready(problem)
    monkeypatch.setattr(executor, "is_noted", lambda found: found == known)
    assert not hopper.is_ready(problem)


@pytest.mark.parametrize(
    ("values", "is_aligned"),
    [
        ({"is_causal": True, "len_q": 256}, True),
        ({"is_causal": True, "len_q": 250, "len_k": 256}, True),
        (TO_END | {"len_q": 250, "len_k": 256}, False),
        (TO_END | {"len_q": 128, "len_k": 256}, True),
        ({"is_causal": True, "len_q": 250}, False),
        ({"is_causal": True, "len_q": 256, "window": (9, -1)}, False),
        ({"is_causal": True, "len_q": 256} | GROUPS, False),
        ({"window": (-1, BLOCK_KEYS), "len_q": 256}, True),
        ({"is_causal": True, "len_q": 256, "has_alibi": True}, False),
        ({"len_q": 256}, False),
    ],
    ids=str,
)
def test_which_edges_begin_with_a_tile(values: dict[str, Any], is_aligned: bool) -> None:
    problem = make_problem(head_dim=64, precision=Precision.BF16, **values)
    variant = choose_gradients(problem)
    assert variant.is_aligned == is_aligned
    assert all(number < 2**31 for number in numbers_of(problem, variant, 0))
    assert not choose_gradients(replace(problem, head_dim=128, value_dim=128)).is_aligned


@pytest.mark.parametrize(
    ("values", "has_adders"),
    [
        ({"head_dim": 128}, True),
        ({"head_dim": 80, "is_causal": True}, True),
        ({"head_dim": 128, "softcap": 3.0, "has_alibi": True}, True),
        ({"head_dim": 128} | GROUPS, True),
        ({"head_dim": 128, "window": (9, -1)}, False),
        ({"head_dim": 128, "mask": MaskKind.BOOLEAN, "len_q": 512}, False),
        ({"head_dim": 128, "lengths_q": (70, 80)}, False),
        ({"head_dim": 128, "lengths_q": (70, 80), "deterministic": True}, True),
        ({"head_dim": 64}, False),
        ({"head_dim": 64, "deterministic": True}, True),
        ({"head_dim": 256}, False),
    ],
    ids=str,
)
def test_where_warps_of_their_own_add_to_sums(values: dict[str, Any], has_adders: bool) -> None:
    problem = make_problem(precision=Precision.BF16, **values)
    assert choose_gradients(problem).has_adders == has_adders
