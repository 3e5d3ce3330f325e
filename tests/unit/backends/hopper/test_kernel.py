"""The Hopper kernel against the oracle, on a GPU of its kind. `make test-gpu` runs it.

`tests/unit/test_semantics.py` holds it to small problems; these have the edges of tiles, several
tiles a block, the second pass, and neighbours' rows that are NaN.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.interface import Result, Tensors
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
    assert_executor_matches,
    make_problem,
    make_tensors,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="it is written for compute capability 9.0",
    ),
]

GROUP = HeadGroup(capability="hopper", scheme=Scheme.of(Precision.BF16))
BOTTOM = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
BY_HEAD = {"head_terms": HeadTerm(7), "num_heads": 4}
ALL_AUX = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY
PROBLEMS: dict[str, dict[str, Any]] = {
    "one row": {"len_q": 1, "len_k": 1000},
    "one key": {"len_q": 100, "len_k": 1, "aux": ALL_AUX},
    "one beyond a block": {"len_q": 129, "len_k": 129, "is_causal": True},
    "odd": {"len_q": 1000, "len_k": 63, "is_causal": True, "head_dim": 64},
    "wide heads": {"len_q": 385, "head_dim": 256, "is_causal": True},
    "heads filled up with zeros": {"len_q": 300, "head_dim": 80, "value_dim": 48},
    "latent heads": {"len_q": 300, "head_dim": 192, "value_dim": 128, "is_causal": True},
    "narrow heads": {"len_q": 300, "head_dim": 32},
    "half": {"len_q": 500, "precision": Precision.FP16, "aux": ALL_AUX},
    "grouped heads": {"len_q": 1000, "num_heads": 6, "num_kv_heads": 2, "is_causal": True},
    "rows without keys": {"len_q": 500, "len_k": 129, **BOTTOM, "aux": ALL_AUX},
    "unaligned diagonal": {"len_q": 300, "len_k": 1037, **BOTTOM, "aux": Aux.LSE},
    "window": {"len_q": 2048, "is_causal": True, "window": (300, -1), "head_dim": 64},
    "narrow window": {"len_q": 1000, "window": (0, 0)},
    "window beyond the keys": {"len_q": 1000, "len_k": 100, "window": (17, 33), "aux": Aux.LSE},
    "right window": {"len_q": 700, "window": (-1, 5), "aux": Aux.ENTROPY},
    "softcap": {"len_q": 700, "softcap": 30.0, "is_causal": True},
    "softcap in half": {"len_q": 700, "softcap": 1.5, "precision": Precision.FP16},
    "sinks": {"len_q": 700, "has_sinks": True, "aux": Aux.LSE | Aux.ENTROPY, **BOTTOM},
    "alibi": {"len_q": 1000, "has_alibi": True, "is_causal": True},
    "everything": {
        "len_q": 1000,
        "softcap": 5.0,
        "has_sinks": True,
        "has_alibi": True,
        "is_causal": True,
        "aux": ALL_AUX,
    },
    "boolean mask": {"len_q": 500, "mask": MaskKind.BOOLEAN},
    "aligned boolean mask": {"len_q": 512, "mask": MaskKind.BOOLEAN, "aux": ALL_AUX},
    "key padding": {"len_q": 500, "mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 1, 500)},
    "bias": {"len_q": 512, "mask": MaskKind.ADDITIVE, "is_causal": True},
    "staged bias": {"len_q": 1000, "len_k": 1040, "mask": MaskKind.ADDITIVE, "aux": Aux.LSE},
    "staged bias, causal": {"len_q": 1000, "mask": MaskKind.ADDITIVE, **BOTTOM, "head_dim": 64},
    "staged bias of all heads": {
        "len_q": 1000,
        "mask": MaskKind.ADDITIVE,
        "mask_shape": (2, 1, 1000, 1000),
        "window": (300, 200),
    },
    "staged bias in half": {
        "len_q": 500,
        "len_k": 504,
        "mask": MaskKind.ADDITIVE,
        "precision": Precision.FP16,
        "aux": ALL_AUX,
    },
    "staged booleans": {"len_q": 1000, "len_k": 1040, "mask": MaskKind.BOOLEAN, "aux": ALL_AUX},
    "staged booleans, narrow": {
        "len_q": 500,
        "len_k": 1040,
        "mask": MaskKind.BOOLEAN,
        "head_dim": 64,
    },
    "staged bias of wide heads": {
        "len_q": 500,
        "len_k": 520,
        "mask": MaskKind.ADDITIVE,
        "head_dim": 256,
        "is_causal": True,
    },
    "staged numbers of 32 bits": {
        "len_q": 700,
        "len_k": 520,
        "mask": MaskKind.ADDITIVE,
        "mask_is_wide": True,
    },
    "wide bias": {"len_q": 300, "mask": MaskKind.ADDITIVE, "mask_is_wide": True},
    "bias of rows": {"len_q": 300, "mask": MaskKind.ADDITIVE, "mask_shape": (2, 1, 300, 1)},
    "numbers of each head": {"len_q": 1000, **BY_HEAD, "aux": ALL_AUX},
    "numbers of each head, causal": {"len_q": 700, "len_k": 1037, **BY_HEAD, **BOTTOM},
    "numbers of each head in half": {"len_q": 700, **BY_HEAD, "precision": Precision.FP16},
    "windows of each head": {"len_q": 1500, "head_terms": HeadTerm.WINDOW, "head_dim": 64},
    "scales of each head": {"len_q": 700, "head_terms": HeadTerm.SCALE, "is_causal": True},
}


def _problem(values: dict[str, Any]) -> AttentionProblem:
    usual = {"batch": 2, "num_heads": 2, "head_dim": 128, "precision": Precision.BF16}
    layout = {"device_type": "cuda", "dense_columns": True, "stride_bytes": 16}
    return make_problem(**(usual | layout | values))


def _among_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with NaN behind each head's rows and columns."""
    batch, heads, rows, columns = tensor.shape
    around = tensor.new_full((batch, heads, rows + 70, columns + 8), float("nan"))
    around[:, :, :rows, :columns] = tensor
    return around[:, :, :rows, :columns]


def _held_to_the_oracle(tensors: Tensors, problem: AttentionProblem) -> Result:
    return assert_executor_matches(partial(hopper.run, group=GROUP), tensors, problem)


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_are_the_oracles(name: str) -> None:
    problem = _problem(PROBLEMS[name])
    tensors = make_tensors(problem)
    query, key, value = map(_among_nan, (tensors.query, tensors.key, tensors.value))
    kv = replace(tensors.kv, key=key, value=value)
    _held_to_the_oracle(replace(tensors, query=query, kv=kv), problem)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_beyond_the_fixed_reference_are_computed_again(
    head_dim: int, is_causal: bool
) -> None:
    """Keys of the blocks visited last exceed the first ones' scores by far more than 2^100."""
    problem = _problem({"len_q": 1000, "is_causal": is_causal, "head_dim": head_dim})
    tensors = make_tensors(problem)
    key = tensors.key.clone()
    key[:, :, :100] *= 60
    _held_to_the_oracle(replace(tensors, kv=replace(tensors.kv, key=key)), problem)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_graph_replays_with_other_numbers(is_causal: bool) -> None:
    """Also where the numbers of a replay need the second pass and those of the capture did not."""
    problem = _problem({"len_q": 1024, "is_causal": is_causal})
    tensors = make_tensors(problem)
    query, key, value = tensors.query, tensors.key.clone(), tensors.value
    call = hopper.direct(problem, GROUP)
    assert call is not None
    call(query, key, value, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(query, key, value, None)
    for factor in (1.0, 60.0, 1.0):
        key.normal_()
        key[:, :, :100] *= factor
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, call(query, key, value, None))


PACKED: dict[str, dict[str, Any]] = {
    "ragged": {"lengths_q": (9, 0, 570, 1, 65, 129, 128), "aux": ALL_AUX},
    "causal": {"lengths_q": (130, 64, 3, 1200), "is_causal": True},
    "causal, other keys": {
        "lengths_q": (3, 150, 700),
        "lengths_k": (70, 800, 150),
        "is_causal": True,
    },
    "to the end": {
        "lengths_q": (3, 350, 70, 5),
        "lengths_k": (70, 80, 1000, 0),
        "aux": Aux.LSE,
        **BOTTOM,
    },
    "narrow heads": {"lengths_q": (300, 129), "head_dim": 64, "is_causal": True},
    "wide heads": {"lengths_q": (300, 129), "head_dim": 256, "is_causal": True},
    "window": {"lengths_q": (1000, 70, 300), "is_causal": True, "window": (200, -1)},
    "grouped heads": {"lengths_q": (500, 40), "num_heads": 6, "num_kv_heads": 2, **BOTTOM},
    "everything": {
        "lengths_q": (700, 0, 40),
        "softcap": 5.0,
        "has_sinks": True,
        "has_alibi": True,
        "aux": ALL_AUX,
        **BOTTOM,
    },
    "half": {"lengths_q": (500, 40), "precision": Precision.FP16, "aux": ALL_AUX},
    "mask": {"lengths_q": (300, 40, 70), "mask": MaskKind.BOOLEAN},
    "numbers of each head": {"lengths_q": (700, 0, 40), **BY_HEAD, **BOTTOM},
    "many": {"lengths_q": tuple(range(1, 90)), "is_causal": True, "head_dim": 64},
}


def _packed(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    lengths = {name: values[name] for name in ("lengths_q", "lengths_k") if name in values}
    problem = _problem({"batch": 1} | values)
    return problem, make_tensors(problem, **lengths)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_each_a_problem_of_its_own(name: str) -> None:
    problem, tensors = _packed(PACKED[name])
    _held_to_the_oracle(tensors, problem)


@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_packed_sequence_sees_nothing_of_its_neighbours(what: str) -> None:
    problem, tensors = _packed({"lengths_q": (170, 290, 300), "is_causal": True})
    clean = hopper.run(tensors, problem, GROUP).output
    getattr(tensors, what)[:, :, 170:460] = float("nan")
    found = hopper.run(tensors, problem, GROUP).output
    assert torch.equal(found[:, :, :170], clean[:, :, :170])
    assert torch.equal(found[:, :, 460:], clean[:, :, 460:])


@pytest.mark.parametrize(
    "starts",
    [
        *[(0, 500, 90), (0, 90, 40, 90), (-50, 90), (0, 40, 2000), (70, 20, 90), (90, 90, 0)],
        (-(2**31), 2**31 - 1),
    ],
    ids=str,
)
def test_starts_that_nobody_checked_end_and_write_nowhere_else(starts: tuple[int, ...]) -> None:
    problem = _problem({"batch": 1, "lengths_q": (40, 50), "is_causal": True})
    problem = replace(problem, num_sequences=len(starts) - 1)
    guarded = torch.randn(3, 1, 2, 490, 128, device="cuda", dtype=torch.bfloat16)
    before = guarded.clone()
    bounds = torch.tensor(starts, dtype=torch.int32, device="cuda")
    tensors = Tensors.of(
        *guarded[:, :, :, 200:290], cu_seqlens_q=bounds, cu_seqlens_k=bounds.flip(0)
    )
    output = hopper.run(tensors, problem, GROUP).output
    torch.cuda.synchronize()
    assert output.nan_to_num(0.0).shape == (1, 2, 90, 128)
    assert torch.equal(guarded, before)


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_scores_beyond_the_fixed_reference_are_computed_again(is_causal: bool) -> None:
    problem, tensors = _packed({"lengths_q": (700, 40, 900, 1), "is_causal": is_causal})
    key = tensors.key.clone()
    key[:, :, :100] *= 60
    key[:, :, 740:800] *= 60
    _held_to_the_oracle(replace(tensors, kv=replace(tensors.kv, key=key)), problem)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_packed_sequence_has_the_same_bits_whatever_its_neighbours(
    head_dim: int, precision: Precision
) -> None:
    """Some keys exceed the fixed reference, so that tiles of both calls are computed again."""
    lengths = (1, 700, 40, 129, 2000)
    asked = {"is_causal": True, "head_dim": head_dim, "precision": precision}
    problem, tensors = _packed({"lengths_q": lengths, "batch_invariant": True} | asked)
    key = tensors.key.clone()
    key[:, :, 3::400] *= 60
    tensors = replace(tensors, kv=replace(tensors.kv, key=key))
    whole = hopper.run(tensors, problem, GROUP).output
    for n, length in enumerate(lengths):
        rows = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
        bounds = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        given = [it[:, :, rows].clone() for it in (tensors.query, key, tensors.value)]
        alone, _ = _packed({"lengths_q": (length,), "batch_invariant": True} | asked)
        parts = Tensors.of(*given, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        assert torch.equal(hopper.run(parts, alone, GROUP).output, whole[:, :, rows])
        dense = _problem({"batch": 1, "len_q": length, "batch_invariant": True} | asked)
        assert torch.equal(hopper.run(Tensors.of(*given), dense, GROUP).output, whole[:, :, rows])


LISTS: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 700, "len_k": 1700, "aux": ALL_AUX},
    "causal": {"len_q": 1700, "is_causal": True, "aux": Aux.LSE},
    "narrow heads": {"len_q": 1700, "is_causal": True, "head_dim": 64},
    "wide heads": {"len_q": 700, "is_causal": True, "head_dim": 256},
    "blocks of 64 keys": {"len_q": 700, "is_causal": True, "block_size": (128, 64)},
    "blocks of 192 keys": {"len_q": 700, "len_k": 1500, "block_size": (128, 192), **BOTTOM},
    "large blocks": {"len_q": 1700, "is_causal": True, "block_size": (256, 512)},
    "to the end": {"len_q": 900, "len_k": 130, "aux": ALL_AUX, **BOTTOM},
    "window": {"len_q": 1700, "is_causal": True, "window": (500, -1)},
    "fewer keys than a block": {"len_q": 300, "len_k": 50},
    "grouped heads": {"len_q": 900, "num_heads": 6, "num_kv_heads": 2, "is_causal": True},
    "everything": {
        "len_q": 1000,
        "softcap": 5.0,
        "has_sinks": True,
        "has_alibi": True,
        "is_causal": True,
        "aux": ALL_AUX,
    },
    "half": {"len_q": 700, "precision": Precision.FP16, "aux": ALL_AUX},
    "mask": {"len_q": 700, "len_k": 733, "mask": MaskKind.BOOLEAN, "is_causal": True},
    "numbers of each head": {"len_q": 1700, "is_causal": True, **BY_HEAD},
    "dropped mass": {"len_q": 1700, "is_causal": True, "aux": Aux.DROPPED_MASS},
    "dropped mass of a biased list": {
        "len_q": 700,
        "len_k": 1700,
        "head_dim": 64,
        "mask": MaskKind.ADDITIVE,
        "aux": Aux.DROPPED_MASS | Aux.LSE,
    },
    "dropped mass in half": {
        "len_q": 900,
        "len_k": 1130,
        "precision": Precision.FP16,
        "aux": Aux.DROPPED_MASS,
        **BOTTOM,
    },
}


@pytest.mark.parametrize("name", LISTS)
def test_only_listed_blocks_are_seen(name: str) -> None:
    """Of random lists: some rows have none, some heads all."""
    problem = _problem({"block_size": (128, 128)} | LISTS[name])
    _held_to_the_oracle(make_tensors(problem), problem)


@pytest.mark.parametrize("is_causal", [False, True])
def test_listed_scores_beyond_the_fixed_reference_are_computed_again(is_causal: bool) -> None:
    problem = _problem({"block_size": (128, 128), "len_q": 1500, "is_causal": is_causal})
    tensors = make_tensors(problem)
    key = tensors.key.clone()
    key[:, :, :300] *= 60
    _held_to_the_oracle(replace(tensors, kv=replace(tensors.kv, key=key)), problem)


@pytest.mark.parametrize("values", [{}, {"is_causal": True}, {"window": (300, 50)}], ids=str)
def test_numbers_of_lists_that_nobody_checked_end(values: dict[str, Any]) -> None:
    problem = _problem({"block_size": (128, 128), "len_q": 1000, "len_k": 1300} | values)
    tensors = make_tensors(problem)
    assert tensors.blocks is not None
    for widest in (20, 2**31 - 1):
        tensors.blocks.counts.random_(-widest, widest)
        tensors.blocks.indices.random_(-widest, widest)
        hopper.run(tensors, problem, GROUP)
        torch.cuda.synchronize()


def test_a_graph_replays_with_other_sequences_and_lists() -> None:
    problem, tensors = _packed({"lengths_q": (700, 40, 900, 1), "is_causal": True})
    call = hopper.direct(problem, GROUP)
    starts = tensors.cu_seqlens_q
    assert call is not None
    assert starts is not None
    given = (tensors.query, tensors.key, tensors.value, None, None, None, starts, starts)
    call(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(*given)
    for bounds in ((0, 1, 2, 1000, 1641), (0, 641, 641, 1641, 1641)):
        starts.copy_(torch.tensor(bounds))
        graph.replay()
        assert torch.equal(output, call(*given))
