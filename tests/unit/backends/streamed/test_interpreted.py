"""Chunks of scores as Triton's interpreter makes weights of them, against the definition."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from adaattn import hardware
from adaattn.backends import load
from adaattn.backends.device import launch
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.operator_arguments import taken_apart
from adaattn.backends.streamed import direct, executor, small
from adaattn.backends.streamed.arguments import Beside
from adaattn.backends.streamed.planes import Space
from adaattn.errors import ExecutorError
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    Layout,
    assert_executor_matches,
    assert_results_match,
    attention,
    cast_tensors,
    make_problem,
    make_tensors,
    num_summands,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/unit/test_semantics.py runs the kernels on the GPU"
)

Made = Callable[[dict[str, Any]], tuple[AttentionProblem, Tensors, HeadGroup]]

TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row": {"len_q": 1, "len_k": 1},
    "three rows": {"len_q": 3, "len_k": 3, "batch": 2},
    "ragged": {"len_q": 63, "len_k": 100},
    "causal": {"len_q": 100, "is_causal": True},
    "causal, fewer keys": {"len_q": 70, "len_k": 3, "is_causal": True},
    "to the end": TO_END | {"len_q": 30, "len_k": 147},
    "to the end, fewer keys": TO_END | {"len_q": 60, "len_k": 21},
    "window both ways": {"len_q": 100, "window": (5, 3)},
    "window to the left": {"len_q": 100, "window": (40, -1)},
    "window to the right": {"len_q": 100, "window": (-1, 4)},
    "window of one key": {"len_q": 70, "window": (0, 0)},
    "window beyond the keys": TO_END | {"len_q": 80, "len_k": 40, "window": (3, -1)},
    "dilation": {"len_q": 70, "dilation": 3},
    "dilation to the end": TO_END | {"len_q": 30, "len_k": 71, "dilation": 3},
    "dilation in a window": {"len_q": 70, "len_k": 31, "dilation": 4, "window": (9, 6)},
    "boolean mask": {"len_q": 40, "len_k": 100, "mask": MaskKind.BOOLEAN},
    "boolean mask, hidden rows": {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "added mask, hidden rows": {"len_k": 90, "mask": MaskKind.ADDITIVE, "num_hidden_rows": 2},
    "mask over keys": {"len_k": 133, "mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 133)},
    "mask over heads": {"num_heads": 4, "mask": MaskKind.ADDITIVE, "mask_shape": (1, 4, 1, 1)},
    "mask over rows": {"len_q": 70, "mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 70, 1)},
    "masks of a batch": {"batch": 2, "mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 8, 8)},
    "causal mask in groups": GROUPS | {"len_q": 40, "is_causal": True, "mask": MaskKind.BOOLEAN},
    "softcap": {"len_q": 40, "softcap": 1.5},
    "a wide softcap": {"len_q": 40, "softcap": 50.0},
    "sinks": {"len_q": 40, "has_sinks": True},
    "sinks over hidden rows": {"has_sinks": True, "mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "ALiBi": {"len_q": 70, "has_alibi": True, "batch": 2},
    "ALiBi, dilation": {"len_q": 60, "has_alibi": True, "dilation": 2, "is_causal": True},
    "groups": GROUPS | {"len_q": 20, "batch": 2},
    "one key head": {"num_heads": 3, "num_kv_heads": 1, "len_q": 40, "is_causal": True},
    "decode in groups": GROUPS | TO_END | {"len_q": 1, "len_k": 300, "batch": 2},
    "values of fewer columns": {"head_dim": 576, "value_dim": 512, "len_q": 20},
    "wide values": {"head_dim": 40, "value_dim": 264, "len_q": 65},
    "odd columns": {"head_dim": 257, "value_dim": 31, "len_q": 40, "mask": MaskKind.ADDITIVE},
    "1024 columns": {"head_dim": 1024, "len_q": 33, "is_causal": True, "num_heads": 1},
    "8192 columns": {"head_dim": 8192, "len_q": 9, "num_heads": 1},
    "transposed": {"layout": Layout.TRANSPOSED, "len_q": 40, "batch": 2},
    "transposed groups": GROUPS | {"layout": Layout.TRANSPOSED, "len_q": 20, "batch": 2},
    "strided": {"layout": Layout.STRIDED, "len_q": 40},
    "negative scale": {"scale": -0.3, "is_causal": True, "len_q": 40},
    "zero scale": {"scale": 0.0, "is_causal": True, "len_q": 40},
    "large scores": {"scale": 29.7, "len_q": 40, "len_k": 200, "step": 0.125},
    "rows of several blocks": {"len_q": 5, "len_k": 9001, "head_dim": 16, "value_dim": 16},
    "rows of several blocks with sinks": TO_END
    | {"len_q": 5, "len_k": 5000, "head_dim": 16, "has_sinks": True, "window": (4500, -1)},
    "all else": GROUPS
    | TO_END
    | {"len_q": 60, "len_k": 90, "softcap": 3.0, "window": (30, -1), "mask": MaskKind.BOOLEAN}
    | {"has_sinks": True, "has_alibi": True},
}
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.BF16)


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda it: it.label)
@pytest.mark.parametrize("chunk_rows", [0, 17])
@pytest.mark.parametrize("name", CASES)
def test_chunks_compute_what_is_defined(
    name: str, chunk_rows: int, precision: Precision, made: Made
) -> None:
    values = {"precision": precision, "chunk_rows": chunk_rows}
    problem, tensors, group = made(values | CASES[name])
    assert_executor_matches(partial(load("streamed"), group=group), tensors, problem)


def test_results_are_those_of_any_chunk(made: Made) -> None:
    found = []
    for rows in (1, 7, 64, 100):
        values = CASES["all else"] | {"precision": Precision.FP32, "chunk_rows": rows}
        problem, tensors, group = made(values)
        found.append(load("streamed")(tensors, problem, group))
    for other in found[1:]:
        torch.testing.assert_close(other.output, found[0].output)
        torch.testing.assert_close(other.lse, found[0].lse)


@pytest.mark.parametrize(
    "change",
    [{"scale": 0.1}, {"window": (6, 3)}, {"window": (5, 2)}],
    ids=["another scale", "a window shifted to the left", "a window cut at the right"],
)
def test_a_kernel_that_is_slightly_wrong_is_noticed(change: dict[str, Any], made: Made) -> None:
    problem, tensors, group = made(CASES["window both ways"] | {"len_q": 40})

    def wrong(tensors: Tensors, problem: AttentionProblem) -> Result:
        return load("streamed")(tensors, replace(problem, **change), group)

    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_executor_matches(wrong, tensors, problem)


def test_what_stands_behind_the_last_key_has_no_say(made: Made) -> None:
    """Rows of scores end with up to seven numbers that nothing wrote: infinity here, then NaN."""
    problem, tensors, group = made({"len_q": 9, "len_k": 21})
    memory = Space.memory
    found = []
    for filling in (torch.inf, torch.nan):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Space, "memory", lambda *given, by=filling: memory(*given).fill_(by))
            found.append(load("streamed")(tensors, problem, group))
    assert torch.equal(found[0].output, found[1].output)
    assert bool(found[0].output.isfinite().all())


def test_a_function_of_repeated_calls_follows_lengths_and_layouts(made: Made) -> None:
    problem, _, group = made(CASES["decode in groups"] | {"precision": Precision.FP32})
    problem = replace(problem, aux=Aux.NONE)
    repeated = direct(problem, group)
    for len_k in (300, 301, 17, 1):
        case = replace(problem, len_k=len_k)
        tensors = make_tensors(case, seed=len_k)
        output = repeated(tensors.query, tensors.key.contiguous(), tensors.value)
        exact = attention(cast_tensors(tensors, torch.float64), case)
        eager = attention(tensors, case)
        assert_results_match(
            Result(output=output), exact, eager, summands=num_summands(case, output)
        )


def test_repeated_calls_take_masks_and_slopes_of_fewer_dimensions(made: Made) -> None:
    """As callers give them."""
    given = {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 20, 20), "has_alibi": True}
    problem, tensors, group = made(given | {"len_q": 20, "precision": Precision.FP32})
    problem = replace(problem, aux=Aux.NONE)
    assert tensors.mask is not None and tensors.alibi_slopes is not None
    qkv = (tensors.query, tensors.key, tensors.value)
    flat = (tensors.mask[0, 0], None, tensors.alibi_slopes[0], None, None)
    output = direct(problem, group)(*qkv, *flat)
    assert torch.equal(output, load("streamed")(tensors, problem, group).output)


@pytest.mark.parametrize("name", ["streamed", "small"])
def test_sinks_and_slopes_of_other_dtypes_are_read_as_such(name: str, made: Made) -> None:
    """What is prepared for a layout has compiled them in."""
    given = {"has_alibi": True, "has_sinks": True, "len_q": 10, "precision": Precision.FP32}
    problem, tensors, group = made(given | {"aux": Aux.NONE, "executor": name})
    assert tensors.sinks is not None and tensors.alibi_slopes is not None
    repeated = direct(problem, group) if name == "streamed" else small.direct(problem, group)
    qkv = (tensors.query, tensors.key, tensors.value)
    half = (tensors.sinks.half(), tensors.alibi_slopes.half())
    narrow = repeated(*qkv, None, *half, None, None)
    wide = repeated(*qkv, None, *(it.float() for it in half), None, None)
    torch.testing.assert_close(narrow, wide)
    wider = [it.float() for it in half]
    assert Beside.of(None, half[1], half[0]) != Beside.of(None, wider[1], wider[0])


def test_a_mask_read_anywhere_is_the_same(made: Made) -> None:
    problem, tensors, group = made(CASES["boolean mask"])
    assert tensors.mask is not None
    expected = load("streamed")(tensors, problem, group).output
    wide = torch.zeros(*tensors.mask.shape[:3], 203, dtype=torch.bool)[..., 1:201:2]
    odd = replace(tensors, mask=wide.copy_(tensors.mask))
    assert torch.equal(load("streamed")(odd, problem, group).output, expected)


def test_what_is_prepared_is_dropped_with_the_facts_that_it_rests_on(made: Made) -> None:
    problem, tensors, group = made({})
    load("streamed")(tensors, problem, group)
    launch._COMPILED["a kernel"] = ExecutorError("it failed")
    assert executor._launcher.cache_info().currsize
    hardware.clear_cache()
    assert not executor._launcher.cache_info().currsize and not launch._COMPILED


def test_transforms_and_tangents_are_refused_and_auto_goes_on(made: Made) -> None:
    problem, tensors, group = made({"precision": Precision.FP32})
    with forward_ad.dual_level(), pytest.raises(ExecutorError, match="forward-mode"):
        load("streamed")(tensors, problem, group)


def test_dropout_keeps_what_the_portable_kernels_keep(made: Made) -> None:
    """One rule, by a weight's own place and the seed; the identity as values shows it."""
    values = {"head_dim": 16, "value_dim": 48, "len_q": 40, "len_k": 48, "dropout_p": 0.3}
    problem, tensors, group = made(values | GROUPS | {"aux": Aux.NONE, "chunk_rows": 7})
    shown = replace(
        tensors,
        kv=replace(tensors.kv, value=torch.eye(48).half().expand(tensors.value.shape)),
    )
    found = []
    for name in ("streamed", "triton"):
        torch.manual_seed(3)
        run = load(name)
        found.append(run(shown, problem, replace(group, capability=name)).output)
    assert torch.equal(found[0] == 0.0, found[1] == 0.0)
    assert 0.65 < float((found[0] != 0.0).float().mean()) < 0.75
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=1e-4)


def test_it_is_an_operator_as_pytorch_wants_them(made: Made) -> None:
    problem, tensors, _ = made(CASES["sinks"] | {"precision": Precision.FP32, "aux": Aux.LSE})
    given = (tensors.query, tensors.key, tensors.value, None, tensors.sinks, *[None] * 5)
    words = (*taken_apart(problem, 17), *[None] * 4)
    torch.library.opcheck(torch.ops.adaattn.streamed.default, (*given, *words))


def test_a_graph_holds_it_as_one_operator_for_any_length() -> None:
    """No plan says how many rows a chunk takes: the sizes do, when the graph runs."""
    names: list[str] = []

    def noting(graph: torch.fx.GraphModule, inputs: object) -> object:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        given = {"len_q": query.shape[2], "head_dim": 264, "is_causal": True}
        problem = make_problem(**given, precision=Precision.FP32)
        group = HeadGroup(capability="streamed")
        return load("streamed")(Tensors.of(query, key, value), problem, group).output

    torch.compiler.reset()
    in_graph = torch.compile(attend, fullgraph=True, dynamic=True, backend=noting)
    for length in (12, 40, 130):
        tensors = [torch.randn(1, 2, length, 264) for _ in range(3)]
        torch.testing.assert_close(in_graph(*tensors), attend(*tensors), rtol=0, atol=0)
    assert any("adaattn.streamed" in name for name in names)


def test_a_compiled_call_is_one_graph_and_follows_the_plan(made: Made) -> None:
    values = CASES["causal"] | {"precision": Precision.FP32, "chunk_rows": 17}
    problem, tensors, group = made(values)
    seen: list[int] = []
    usual = executor.chunks_of

    def noting(problem: AttentionProblem, rows: int, entries: int) -> Any:
        seen.append(rows)
        return usual(problem, rows, entries)

    def call(tensors: Tensors) -> Result:
        return load("streamed")(tensors, problem, group)

    torch.compiler.reset()
    executor._launcher.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "chunks_of", noting)
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(tensors)
    assert torch.equal(found.output, call(tensors).output)
    assert seen and set(seen) == {17}
