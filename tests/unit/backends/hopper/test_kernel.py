"""The Hopper kernel against the oracle, on a GPU of its kind. `make test-gpu` runs it.

`tests/unit/test_semantics.py` holds it to small problems; these have the edges of tiles, several
tiles a block, the second pass, and neighbours' rows that are NaN.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, MaskKind, Precision, Scheme
from adaattn.testing import (
    assert_results_match,
    attention,
    cast_tensors,
    make_problem,
    make_tensors,
    num_summands,
    poisoned_memory,
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
    "wide bias": {"len_q": 300, "mask": MaskKind.ADDITIVE, "mask_is_wide": True},
    "bias of rows": {"len_q": 300, "mask": MaskKind.ADDITIVE, "mask_shape": (2, 1, 300, 1)},
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
    with poisoned_memory():
        found = hopper.run(tensors, problem, GROUP)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem, compute_dtype=tensors.query.dtype)
    assert_results_match(found, exact, eager, summands=num_summands(problem, found.output))
    return found


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
