"""The portable kernels as Triton's interpreter runs them, on a CPU, against the definition.

bf16 is left to a GPU: the interpreter's products of it are wrong (Triton 3.6 to 3.9).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from adaattn import hardware
from adaattn._dtypes import torch_dtype
from adaattn.backends import load
from adaattn.backends.common import layout_facts
from adaattn.backends.device import launch
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.operator_arguments import taken_apart
from adaattn.backends.triton import direct, executor
from adaattn.backends.triton.arguments import Arguments, MaskLayout
from adaattn.backends.triton.forward import forward
from adaattn.errors import ExecutorError
from adaattn.spec import (
    Align,
    AttentionProblem,
    Aux,
    HeadGroup,
    HeadTerm,
    MaskKind,
    Precision,
    Scheme,
)
from adaattn.testing import (
    Layout,
    assert_matches,
    assert_results_match,
    attention,
    cast_tensors,
    make_problem,
    make_tensors,
    num_summands,
    poisoned_memory,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/unit/test_semantics.py runs the kernels on the GPU"
)

STATISTICS = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2}
DECODE: dict[str, Any] = TO_END | GROUPS | {"len_q": 1, "len_k": 1500}
BY_HEAD: dict[str, Any] = {"head_terms": HeadTerm(7), "num_heads": 6}
OF_KEYS: dict[str, Any] = {"batch": 2, "len_q": 2, "len_k": 1500}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row": {"len_q": 1, "len_k": 1},
    "ragged": {"len_q": 67, "len_k": 131},
    "causal": {"len_q": 130, "is_causal": True},
    "causal, fewer keys": {"len_q": 70, "len_k": 3, "is_causal": True},
    "to the end": TO_END | {"len_q": 30, "len_k": 147},
    "to the end, fewer keys": TO_END | {"len_q": 130, "len_k": 21},
    "window both ways": {"len_q": 200, "window": (5, 3)},
    "window to the left": {"len_q": 150, "window": (40, -1)},
    "window to the right": {"len_q": 150, "window": (-1, 4)},
    "window of one key": {"len_q": 70, "window": (0, 0)},
    "dilation": {"len_q": 100, "dilation": 3},
    "dilation to the end": TO_END | {"len_q": 50, "len_k": 171, "dilation": 3},
    "dilation, more than keys": {"len_q": 9, "len_k": 4, "dilation": 7},
    "dilation in a window": {
        "len_q": 70,
        "len_k": 31,
        "dilation": 4,
        "window": (9, 6),
        "align": Align.BOTTOM_RIGHT,
    },
    "dilation with a mask": {"len_q": 70, "dilation": 2, "mask": MaskKind.ADDITIVE},
    "boolean mask": {"len_q": 70, "len_k": 100, "mask": MaskKind.BOOLEAN},
    "boolean mask, hidden rows": {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "added mask, hidden rows": {"len_k": 90, "mask": MaskKind.ADDITIVE, "num_hidden_rows": 2},
    "mask over keys": {"len_k": 133, "mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 133)},
    "mask over heads": {"num_heads": 4, "mask": MaskKind.ADDITIVE, "mask_shape": (1, 4, 1, 1)},
    "mask over rows": {"len_q": 70, "mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 70, 1)},
    "causal mask in groups": GROUPS | {"len_q": 40, "is_causal": True, "mask": MaskKind.BOOLEAN},
    "softcap": {"len_q": 40, "softcap": 1.5},
    "a wide softcap": {"len_q": 40, "softcap": 50.0},
    "sinks": {"len_q": 40, "has_sinks": True},
    "sinks over hidden rows": {"has_sinks": True, "mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "ALiBi": {"len_q": 100, "has_alibi": True, "batch": 2},
    "ALiBi, dilation": {"len_q": 60, "has_alibi": True, "dilation": 2, "is_causal": True},
    "groups": GROUPS | {"len_q": 20},
    "long groups": {"num_heads": 6, "num_kv_heads": 2, "len_q": 130, "is_causal": True},
    "groups of three": {"num_heads": 3, "num_kv_heads": 1, "len_q": 40, "is_causal": True},
    "values of other widths": {"head_dim": 20, "value_dim": 7, "len_q": 65},
    "one column": {"head_dim": 1},
    "96 columns": {"head_dim": 96, "len_q": 65, "is_causal": True},
    "256 columns": {"head_dim": 256, "len_q": 130},
    "values of 136 columns": {"head_dim": 40, "value_dim": 136, "len_q": 130, "has_sinks": True},
    "wide values of groups, split": GROUPS
    | {"head_dim": 16, "value_dim": 160, "len_q": 40, "len_k": 3000, "is_causal": True}
    | {"align": Align.BOTTOM_RIGHT},
    "odd columns": {"head_dim": 57, "value_dim": 31, "len_q": 130, "mask": MaskKind.ADDITIVE},
    "packed": {"lengths_q": (9, 0, 170, 1)},
    "packed, other keys": {"lengths_q": (3, 8, 0, 5), "lengths_k": (7, 8, 2, 0)},
    "packed in a window": GROUPS
    | {"lengths_q": (90, 70, 17, 1), "is_causal": True, "window": (20, -1)},
    "packed to the end": TO_END
    | {"lengths_q": (3, 8, 0, 5), "lengths_k": (7, 8, 2, 9), "num_heads": 4, "num_kv_heads": 1},
    "packed, dilation": {
        "lengths_q": (13, 8, 0, 5),
        "lengths_k": (17, 8, 2, 9),
        "is_causal": True,
        "dilation": 3,
    },
    "packed with a mask": {"lengths_q": (13, 80, 5), "mask": MaskKind.ADDITIVE},
    "decode": DECODE,
    "decode with sinks in a window": DECODE | {"has_sinks": True, "window": (700, -1)},
    "decode over a masked cache": GROUPS
    | OF_KEYS
    | {"mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 1, 1500)},
    "decode with a bias of heads": GROUPS
    | OF_KEYS
    | {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 8, 1, 1500), "has_alibi": True},
    "decode, batch-invariant": DECODE | {"batch_invariant": True, "has_sinks": True},
    "causal, batch-invariant": GROUPS
    | {"len_q": 130, "is_causal": True, "batch_invariant": True, "batch": 2},
    "a masked cache, batch-invariant": GROUPS
    | OF_KEYS
    | {"mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 1, 1500), "batch_invariant": True},
    "packed, batch-invariant": GROUPS
    | {"lengths_q": (9, 0, 170, 1), "is_causal": True, "batch_invariant": True},
    "transposed": {"layout": Layout.TRANSPOSED, "len_q": 40},
    "strided": {"layout": Layout.STRIDED, "len_q": 40},
    "blocks": {"len_q": 130, "len_k": 200, "block_size": (32, 32), "batch": 2},
    "blocks, causal": TO_END | {"len_q": 130, "len_k": 200, "block_size": (64, 32)},
    "blocks in a window": {"len_q": 200, "window": (70, 9), "block_size": (16, 64)},
    "blocks with all else": GROUPS
    | {"len_q": 100, "block_size": (48, 80), "is_causal": True, "softcap": 3.0}
    | {"has_sinks": True, "has_alibi": True, "mask": MaskKind.BOOLEAN},
    "one row of blocks": DECODE | {"block_size": (128, 128), "len_k": 700},
    "little room for blocks": {"len_q": 100, "block_size": (32, 16), "most_blocks": 2},
    "negative scale": {"scale": -0.3, "is_causal": True, "len_q": 40},
    "zero scale": {"scale": 0.0, "is_causal": True, "len_q": 40},
    "large scores": {"scale": 30.0, "len_q": 40, "len_k": 200},
    "numbers of each head": BY_HEAD | {"len_q": 150, "batch": 2},
    "numbers of each head, causal": BY_HEAD | TO_END | {"len_q": 130, "len_k": 300},
    "scale of each head beside a softcap": {"head_terms": HeadTerm.SCALE, "softcap": 3.0},
    "softcap of each head beside a scale": {"head_terms": HeadTerm.SOFTCAP, "scale": -0.4},
    "scale of each head in a window": {"head_terms": HeadTerm.SCALE, "window": (5, 3), "len_q": 70},
    "windows of heads in a tile": GROUPS
    | {"head_terms": HeadTerm.WINDOW, "len_q": 40, "len_k": 300, "is_causal": True}
    | {"align": Align.BOTTOM_RIGHT},
    "numbers of three heads in a tile": BY_HEAD | {"num_kv_heads": 2, "len_q": 33, "len_k": 90},
    "numbers of heads in long groups": BY_HEAD | {"num_kv_heads": 2, "len_q": 140},
    "numbers of each head, dilation": BY_HEAD | GROUPS | {"len_q": 70, "dilation": 3},
    "numbers of each head, packed": BY_HEAD | {"lengths_q": (9, 0, 170, 1), "is_causal": True},
    "numbers of heads in tiles, packed": BY_HEAD | GROUPS | {"lengths_q": (13, 8, 0, 45)},
    "numbers of each head over blocks": BY_HEAD | {"len_q": 130, "block_size": (32, 32)},
    "numbers of each head with all else": BY_HEAD
    | {"len_q": 100, "is_causal": True, "has_sinks": True, "has_alibi": True}
    | {"mask": MaskKind.BOOLEAN},
    "decode with numbers of each head": BY_HEAD | DECODE,
    "decode with numbers of each head, batch-invariant": BY_HEAD
    | DECODE
    | {"batch_invariant": True},
}
MADE = ("lengths_q", "lengths_k", "num_hidden_rows", "layout")


def made(name: str, precision: Precision) -> tuple[AttentionProblem, Tensors]:
    """Return a case: its problem, with all statistics, and its tensors."""
    values = {"precision": precision, "aux": STATISTICS} | CASES[name]
    how = {key: values.pop(key) for key in MADE if key in values}
    lengths = {key: how[key] for key in ("lengths_q", "lengths_k") if key in how}
    problem = make_problem(**lengths, **values)
    return problem, make_tensors(problem, **how)


def run(tensors: Tensors, problem: AttentionProblem) -> Result:
    """Return what the kernels make of a case; what nothing wrote is no number."""
    group = HeadGroup(capability="triton", scheme=Scheme.of(problem.precision))
    return load("triton")(tensors, problem, group)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what is allocated without a value, as a GPU's memory may be.

    No mode of PyTorch does it: in one, memory is allocated as it is for a graph.
    """

    def poisoned(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            found = make(*args, **kwargs)
            return found.fill_(float("nan")) if found.is_floating_point() else found

        return call

    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_what_is_defined(name: str, precision: Precision) -> None:
    problem, tensors = made(name, precision)
    result = run(tensors, problem)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem, compute_dtype=torch_dtype(precision))
    assert_results_match(result, exact, eager, summands=num_summands(problem, result.output))


@pytest.mark.parametrize(
    "change",
    [{"scale": 0.27}, {"window": (6, 3)}, {"window": (5, 2)}],
    ids=["another scale", "a window shifted to the left", "a window cut at the right"],
)
def test_a_kernel_that_is_slightly_wrong_is_noticed(change: dict[str, Any]) -> None:
    problem, tensors = made("window both ways", Precision.FP16)
    result = run(tensors, replace(problem, **change))
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem, compute_dtype=torch.float16)
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_results_match(result, exact, eager, summands=num_summands(problem, result.output))


@pytest.mark.parametrize("name", ["scale", "window", "softcap"])
def test_a_number_of_one_head_that_is_slightly_wrong_is_noticed(name: str) -> None:
    problem, tensors = made("numbers of heads in long groups", Precision.FP16)
    assert tensors.head_terms is not None
    numbers = getattr(tensors.head_terms, name).clone()
    head = {"scale": 1, "window": 4, "softcap": 3}[name]  # one that has a window, or a cap
    numbers[head] = numbers[head] + 1 if name == "window" else numbers[head] * 1.05
    wrong = replace(tensors, head_terms=replace(tensors.head_terms, **{name: numbers}))
    result = run(wrong, problem)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem, compute_dtype=torch.float16)
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_results_match(result, exact, eager, summands=num_summands(problem, result.output))


@pytest.mark.parametrize("len_q", [1, 400])
def test_a_head_of_a_narrow_window_reads_no_keys_beyond_it(len_q: int) -> None:
    """What is read weighs 0 outside of the window, and 0 times NaN would be NaN."""
    heads = {"num_heads": 2, "len_q": len_q, "len_k": 400, "precision": Precision.FP16}
    problem = make_problem(**heads, head_terms=HeadTerm.WINDOW, align=Align.BOTTOM_RIGHT)
    tensors = make_tensors(problem)
    terms = HeadTerms(window=torch.tensor([[20, 20], [-1, -1]]))
    value = tensors.value.clone()
    value[:, :, :200] = float("nan")
    given = replace(tensors, head_terms=terms, kv=replace(tensors.kv, value=value))
    found = run(given, problem).output
    seen = run(replace(tensors, head_terms=terms), problem).output
    assert found[:, 1].isnan().all()
    last = slice(-min(len_q, 50), None)
    assert torch.equal(found[:, 0, last], seen[:, 0, last])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_of_heads_that_nobody_checked_are_clamped(dtype: torch.dtype) -> None:
    """A GPU's are not read on the host: below -1 is unlimited, a softcap below 0 is none."""
    problem, tensors = made("numbers of each head", Precision.FP16)
    assert tensors.head_terms is not None and tensors.head_window is not None
    most = torch.iinfo(dtype).max
    window = tensors.head_window.to(dtype)
    window[1], window[3] = most, -1
    softcap = tensors.head_softcap.clone()
    right = HeadTerms(scale=tensors.head_scale, window=window, softcap=softcap)
    wrong = replace(right, window=window.clone(), softcap=softcap.clone())
    wrong.window[3], wrong.softcap[::2] = -7, -3.0
    wrong.softcap[0] = float("nan")
    first, second = (run(replace(tensors, head_terms=it), problem).output for it in (right, wrong))
    assert torch.equal(first, second)
    assert not first.isnan().any()


def test_numbers_of_other_dtypes_and_strides_are_read_as_such() -> None:
    problem, tensors = made("numbers of each head", Precision.FP16)
    terms = tensors.head_terms
    assert terms is not None and terms.scale is not None and terms.window is not None
    first = run(replace(tensors, head_terms=replace(terms, scale=terms.scale.half())), problem)
    wide = replace(terms, scale=terms.scale.half().double())
    strided = replace(
        wide,
        scale=torch.stack([wide.scale, wide.scale + 9], 1)[:, 0],
        window=terms.window.long().T.contiguous().T,
    )
    for other in (wide, strided):
        assert torch.equal(run(replace(tensors, head_terms=other), problem).output, first.output)


def test_a_row_that_nothing_wrote_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, tensors = made("ragged", Precision.FP16)
    programs = Arguments.programs

    def fewer(self: Arguments, *sizes: int) -> tuple[int, int]:
        number, tiles = programs(self, *sizes)
        return number - 1, tiles

    monkeypatch.setattr(Arguments, "programs", fewer)
    output = direct(replace(problem, aux=Aux.NONE), HeadGroup(capability="triton"))(
        tensors.query, tensors.key, tensors.value
    )
    assert output.isnan().any()


def test_a_function_of_repeated_calls_follows_lengths_and_layouts() -> None:
    problem, _ = made("decode", Precision.FP32)
    problem = replace(problem, aux=Aux.NONE)
    repeated = direct(problem, HeadGroup(capability="triton"))
    for len_k in (1500, 1501, 300, 1):
        case = replace(problem, len_k=len_k)
        tensors = make_tensors(case, seed=len_k)
        output = repeated(tensors.query, tensors.key.contiguous(), tensors.value)
        exact = attention(cast_tensors(tensors, torch.float64), case)
        eager = attention(tensors, case)
        assert_results_match(
            Result(output=output), exact, eager, summands=num_summands(case, output)
        )


@pytest.mark.parametrize(
    "starts",
    [(0, 500, 90), (0, 90, 40, 90), (-50, 90), (0, 40, 2000), (70, 20, 90), (90, 90, 0)],
    ids=str,
)
def test_starts_that_nobody_checked_lead_to_no_memory_of_others(starts: tuple[int, ...]) -> None:
    """A GPU's are not read on the host. What is out of bounds would be a fault there."""
    problem = make_problem(lengths_q=(40, 50), head_dim=16, is_causal=True)
    problem = replace(problem, num_sequences=len(starts) - 1)
    guarded = torch.full((3, 1, 2, 290, 16), 1e30)
    inside = guarded[:, :, :, 100:190]
    inside.normal_()
    bounds = torch.tensor(starts, dtype=torch.int32)
    tensors = Tensors.of(*inside, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    before = guarded.clone()
    with poisoned_memory():
        output = run(tensors, problem).output
    assert output.nan_to_num(0.0).abs().max() < 100  # rows of no sequence are not written
    assert torch.equal(guarded, before)


@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e-3, 1e4, 1e15])
def test_fp32_keeps_its_accuracy_at_any_magnitude(size: float) -> None:
    """Keys and values are scaled before they are taken apart: fp16 holds neither extreme."""
    problem = make_problem(len_q=140, precision=Precision.FP32, scale=0.25 / size)
    tensors = make_tensors(problem)
    tensors = replace(
        tensors, kv=replace(tensors.kv, key=tensors.key * size, value=tensors.value * size)
    )
    result = run(tensors, problem)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem)
    assert_results_match(result, exact, eager, summands=num_summands(problem, result.output))


OUTLIERS: dict[str, dict[str, Any]] = {
    "keys that a mask hides": {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 200)},
    "the last key, in causal order": {"is_causal": True, "len_q": 200},
    "another sequence": {"lengths_q": (150, 50)},
}


@pytest.mark.parametrize("size", [1e9, 1e30])
@pytest.mark.parametrize("name", OUTLIERS)
def test_fp32_is_as_right_beside_numbers_that_are_hidden_and_huge(name: str, size: float) -> None:
    """A cache's slots beyond its end may hold anything; one scale for all lost the others' bits."""
    values = {"len_q": 140, "len_k": 200, "precision": Precision.FP32} | OUTLIERS[name]
    lengths = {"lengths_q": values.pop("lengths_q")} if "lengths_q" in values else {}
    if lengths:
        values = {"precision": Precision.FP32}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths)
    first = 150 if lengths else 199 if problem.is_causal else 120
    key, value = tensors.key.clone(), tensors.value.clone()
    key[:, :, first:] *= size
    value[:, :, first:] *= size
    if problem.mask is not MaskKind.NONE:
        hidden = torch.arange(200) < first
        tensors = replace(tensors, mask=hidden.expand(problem.mask_shape))
    tensors = replace(tensors, kv=replace(tensors.kv, key=key, value=value))
    rows = min(first, problem.len_q)
    result = run(tensors, problem).output[:, :, :rows]
    exact = attention(cast_tensors(tensors, torch.float64), problem).output[:, :, :rows]
    eager = attention(tensors, problem).output[:, :, :rows]
    assert_matches(result, exact, eager, summands=num_summands(problem, result))


@pytest.mark.parametrize("zeros", [slice(0, 70), slice(64, 128), slice(None)], ids=str)
def test_rows_of_zeros_have_any_power_of_two(zeros: slice) -> None:
    """A padded batch has some: they must not take the others off the fast path, nor be NaN."""
    problem = make_problem(len_q=140, len_k=200, precision=Precision.FP32, aux=STATISTICS)
    tensors = make_tensors(problem)
    key, value = tensors.key.clone(), tensors.value.clone()
    key[:, :, zeros] = 0.0
    value[:, :, zeros] = 0.0
    tensors = replace(tensors, kv=replace(tensors.kv, key=key, value=value))
    result = run(tensors, problem)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem)
    assert_results_match(result, exact, eager, summands=num_summands(problem, result.output))


@pytest.mark.parametrize("value_dim", [16, 160])
def test_values_of_very_different_sizes_keep_their_weights(value_dim: int) -> None:
    """A heavy key with small values, and a light one with large: both count."""
    sizes = {"len_q": 140, "len_k": 200, "value_dim": value_dim}
    problem = make_problem(**sizes, precision=Precision.FP32, scale=1.0)
    tensors = make_tensors(problem)
    sizes = torch.logspace(-8, 8, 200)[None, None, :, None]
    tensors = replace(tensors, kv=replace(tensors.kv, value=tensors.value * sizes))
    result = run(tensors, problem).output
    exact = attention(cast_tensors(tensors, torch.float64), problem).output
    eager = attention(tensors, problem).output
    assert_matches(result, exact, eager, summands=num_summands(problem, result))


def test_sinks_of_another_dtype_are_read_as_such() -> None:
    problem, tensors = made("sinks", Precision.FP16)
    run(tensors, problem)
    assert tensors.sinks is not None
    other = replace(tensors, sinks=tensors.sinks.double().float())
    assert other.sinks is not None
    first = run(other, problem).output
    torch.testing.assert_close(first, run(tensors, problem).output, rtol=0, atol=1e-2)
    strided = torch.stack([other.sinks, other.sinks + 9], 1)[:, 0]
    assert torch.equal(run(replace(other, sinks=strided), problem).output, first)


def test_queries_whose_columns_overlap_have_an_output_of_their_own() -> None:
    """`unfold` makes rows that begin one element apart: no layout for a result."""
    problem = make_problem(len_q=5, len_k=7, head_dim=16, precision=Precision.FP32)
    tensors = make_tensors(problem)
    windows = torch.randn(1, 2, 20).unfold(-1, 16, 1)
    tensors = replace(tensors, query=windows)
    output = run(tensors, replace(problem, dense_columns=True)).output
    exact = attention(cast_tensors(tensors, torch.float64), problem).output
    assert_matches(output, exact, attention(tensors, problem).output, summands=64)


@pytest.mark.parametrize(
    ("strides", "is_wide"),
    [((0, 0, 2**23, 1), False), ((0, 0, 2**25, 1), True), ((0, 0, 0, 2**25), True)],
)
def test_a_mask_whose_entries_lie_far_apart_is_read_in_64_bits(
    strides: tuple[int, ...], is_wide: bool
) -> None:
    problem = make_problem(len_q=130, precision=Precision.FP16)
    seen = MaskLayout(2, strides, torch.float16)
    steps = (*[8] * 12, *strides, 0)
    launch = Arguments(problem).forward((1, 1, 1), steps, (2, 130, 130), (0, 3, 64, 2), seen)
    constants = dict(
        zip(forward.arg_names[-len(launch.constants) :], launch.constants, strict=True)
    )
    assert constants["WIDE"] is is_wide


def test_what_is_prepared_is_dropped_with_the_facts_that_it_rests_on() -> None:
    """Splits follow from the device; and what failed to compile may be tried again."""
    problem, tensors = made("decode", Precision.FP16)
    run(tensors, problem)
    launch._COMPILED["a kernel"] = ExecutorError("it failed")
    assert executor._launcher.cache_info().currsize
    hardware.clear_cache()
    assert not executor._launcher.cache_info().currsize and not launch._COMPILED


def test_transforms_and_tangents_are_refused_and_auto_goes_on() -> None:
    problem, tensors = made("plain", Precision.FP32)
    with forward_ad.dual_level(), pytest.raises(ExecutorError, match="forward-mode"):
        run(tensors, problem)


@pytest.mark.parametrize(("len_q", "dropout_p"), [(64, 0.3), (128, 0.3), (128, 0.9)])
def test_dropout_drops_its_share_and_scales_what_it_keeps(len_q: int, dropout_p: float) -> None:
    """With v the identity the output shows which weights were dropped."""
    problem = make_problem(len_q=len_q, len_k=64, dropout_p=dropout_p, precision=Precision.FP32)
    tensors = make_tensors(problem)
    identity = torch.eye(64).expand(1, 2, 64, 64).contiguous()
    problem = replace(problem, value_dim=64)
    tensors = replace(tensors, kv=replace(tensors.kv, value=identity))
    first, second = run(tensors, problem).output, run(tensors, problem).output
    weights = attention(tensors, replace(problem, dropout_p=0.0, aux=Aux.WEIGHTS)).weights
    assert weights is not None
    kept = first != 0
    torch.testing.assert_close(first, weights * kept / (1.0 - dropout_p))
    six_sigma = 6 * (dropout_p * (1.0 - dropout_p) / kept.numel()) ** 0.5
    assert abs(float((~kept).float().mean()) - dropout_p) < six_sigma
    assert not torch.equal(kept, second != 0)
    rows = kept.float().reshape(-1, 64)
    assert not torch.equal(rows[0], rows[1])


def test_what_begins_between_multiples_of_four_bytes_is_copied() -> None:
    """Its rows are four bytes apart, and would be read two at a time."""
    problem = make_problem(len_q=40, head_dim=64, precision=Precision.FP16, stride_bytes=4)
    problem = replace(problem, dense_columns=True)
    tensors = make_tensors(problem)
    around = tensors.key.new_full((*tensors.key.shape[:3], 66), float("nan"))
    key = around[..., 1:65].copy_(tensors.key)
    assert key.data_ptr() % 4 == 2
    read = executor.at_multiples(key)
    assert read.data_ptr() % 4 == 0 and read.stride() == key.stride() and torch.equal(read, key)
    assert executor.at_multiples(tensors.query) is tensors.query
    shifted = replace(tensors, kv=replace(tensors.kv, key=key))
    assert torch.equal(run(shifted, problem).output, run(tensors, problem).output)


def test_strides_of_tensors_that_are_copied_first_say_nothing_of_the_copy() -> None:
    """Columns two apart made rows of 200 elements, the copy's have 100: no multiple of 8."""
    problem = make_problem(len_q=40, head_dim=100, precision=Precision.FP16)
    tensors = make_tensors(problem, layout=Layout.STRIDED)
    facts = layout_facts(tensors.query, tensors.key, tensors.value)
    result = run(tensors, replace(problem, **facts))
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem, compute_dtype=torch.float16)
    assert facts == {"dense_columns": False, "stride_bytes": 16, "mask_is_aligned": True}
    assert_results_match(result, exact, eager, summands=num_summands(problem, result.output))


@pytest.mark.parametrize("kinds", [HeadTerm.NONE, HeadTerm(7)], ids=str)
def test_a_graph_holds_it_as_one_operator_for_any_length(kinds: HeadTerm) -> None:
    terms = make_tensors(make_problem(head_terms=kinds)).head_terms
    names: list[str] = []

    def noting(graph: torch.fx.GraphModule, inputs: object) -> object:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        given = {"len_q": query.shape[2], "head_dim": 16, "is_causal": True, "head_terms": kinds}
        tensors = Tensors.of(query, key, value, head_terms=terms)
        return run(tensors, make_problem(**given, precision=Precision.FP32)).output

    torch.compiler.reset()
    in_graph = torch.compile(attend, fullgraph=True, dynamic=True, backend=noting)
    for length in (12, 40, 130):
        tensors = [torch.randn(1, 2, length, 16) for _ in range(3)]
        torch.testing.assert_close(in_graph(*tensors), attend(*tensors), rtol=0, atol=0)
    assert any("adaattn.triton" in name for name in names)


@pytest.mark.parametrize(
    "name", ["sinks", "transposed", "values of other widths", "scale of each head in a window"]
)
def test_it_is_an_operator_as_pytorch_wants_them(name: str) -> None:
    problem, tensors = made(name, Precision.FP32)
    arguments = (tensors.query, tensors.key, tensors.value, None, tensors.sinks, *[None] * 5)
    terms = (tensors.head_scale, tensors.head_window, tensors.head_softcap, None)
    torch.library.opcheck(
        torch.ops.adaattn.triton.default, (*arguments, *taken_apart(problem), *terms)
    )


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("value_dim", [16, 32])
@pytest.mark.parametrize("whole", [(1, 3), (2, 1)], ids=["a batch", "heads"])
def test_outputs_of_expanded_queries_lie_as_graphs_are_told(
    whole: tuple[int, int], value_dim: int, is_deterministic: bool
) -> None:
    sizes = {"batch": 2, "num_heads": 3, "len_q": 5, "head_dim": 16, "value_dim": value_dim}
    problem = make_problem(**sizes, precision=Precision.FP32)
    tensors = make_tensors(problem)
    query = torch.randn(*whole, 5, 16).expand(2, 3, 5, 16)
    given = (query, tensors.key, tensors.value)
    rest = (*[None] * 7, *taken_apart(problem), *[None] * 4)
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        real, *_ = torch.ops.adaattn.triton(*given, *rest)
        with FakeTensorMode() as mode:  # `opcheck` copies its tensors, none is expanded then
            told, *_ = torch.ops.adaattn.triton(*map(mode.from_tensor, given), *rest)
    finally:
        torch.use_deterministic_algorithms(False)
    assert real.stride() == told.stride()
