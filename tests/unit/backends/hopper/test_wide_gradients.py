"""Gradients of more than 128 columns by the Hopper kernels, run on a CPU by `conftest.py`."""

import random
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, Precision
from adaattn.testing import (
    Layout,
    assert_matches,
    assert_training_matches,
    attention,
    cast_tensors,
    gradients_of,
    make_problem,
    make_tensors,
    num_summands,
    poisoned_memory,
    with_tensors,
)

pytestmark = pytest.mark.usefixtures("simulated")
run = partial(hopper.run, group=HeadGroup(capability="hopper"))

LEAVES = ("query", "key", "value")
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
SINKS: dict[str, Any] = {"has_sinks": True, "sinks_require_grad": True}
NARROW_VALUES: dict[str, Any] = {"head_dim": 192, "value_dim": 128}
TWO: dict[str, Any] = {"num_heads": 2}

CASES: dict[str, dict[str, Any]] = {
    "one row": {"len_q": 1, "len_k": 1},
    "one row, many keys": {"len_q": 1, "len_k": 300},
    "many rows, one key": {"len_q": 300, "len_k": 1},
    "whole tiles": {"head_dim": 256, "len_q": 128, "len_k": 192},
    "ragged": TWO | {"head_dim": 256, "len_q": 67, "len_k": 131},
    "an odd number of tiles": {"len_q": 190, "len_k": 64},
    "batch": TWO | {"batch": 2, "len_q": 70, "len_k": 150},
    "causal": {"head_dim": 256, "len_q": 256, "is_causal": True},
    "causal, ragged": {"len_q": 300, "is_causal": True},
    "causal, fewer keys": {"len_q": 300, "len_k": 100, "is_causal": True},
    "causal, keys that no row sees": {"len_q": 100, "len_k": 300, "is_causal": True},
    "to the end": TO_END | {"len_q": 130, "len_k": 333},
    "to the end, aligned": TO_END | {"len_q": 128, "len_k": 320},
    "to the end, fewer keys": TO_END | {"len_q": 333, "len_k": 90},
    "to the end, rows that see nothing": TO_END | {"len_q": 384, "len_k": 128},
    "window both ways": {"len_q": 400, "window": (70, 20)},
    "window to the left": {"len_q": 300, "window": (40, -1)},
    "window to the right": {"len_q": 300, "window": (-1, 40)},
    "causal in a window": {"len_q": 400, "is_causal": True, "window": (128, -1)},
    "window beyond int32": {"len_q": 70, "window": (2**31, 2**31)},
    "window, rows that see nothing": {"len_q": 400, "len_k": 100, "window": (10, 3)},
    "groups": GROUPS | {"len_q": 200, "len_k": 140},
    "groups, causal": GROUPS | {"len_q": 192, "is_causal": True, "batch": 2},
    "groups in a window": GROUPS | {"len_q": 300, "window": (90, 4)},
    "one key head": {"num_heads": 3, "num_kv_heads": 1, "len_q": 140, "is_causal": True},
    "160 columns": {"head_dim": 160, "len_q": 100, "len_k": 70},
    "192 columns": {"head_dim": 192, "len_q": 100, "is_causal": True},
    "fewer columns of values": NARROW_VALUES | TWO | {"len_q": 200, "is_causal": True},
    "few columns of values": {"head_dim": 256, "value_dim": 40, "len_q": 70, "len_k": 100},
    "wider values": TWO | {"head_dim": 64, "value_dim": 256, "len_q": 150, "is_causal": True},
    "transposed": TWO | {"layout": Layout.TRANSPOSED, "len_q": 140, "batch": 2},
    "strided": TWO | {"layout": Layout.STRIDED, "len_q": 140},
    "large scores": {"scale": 30.0, "len_q": 70, "len_k": 200},
    "softcap": {"len_q": 140, "softcap": 1.5},
    "softcap in a window": {"len_q": 200, "softcap": 3.0, "window": (50, 10)},
    "sinks": SINKS | TWO | {"len_q": 140},
    "sinks over rows that see nothing": SINKS | TO_END | {"len_q": 200, "len_k": 90},
    "ALiBi": {"has_alibi": True, "batch": 2, "len_q": 140},
    "ALiBi to the end, in groups": GROUPS | TO_END | {"has_alibi": True, "len_q": 90, "len_k": 140},
    "all else": GROUPS
    | SINKS
    | TO_END
    | {"has_alibi": True, "len_q": 140, "len_k": 200, "softcap": 3.0, "window": (90, -1)},
    "packed": {"lengths_q": (9, 0, 170, 1, 65)},
    "packed, whole tiles": {"lengths_q": (128, 64, 256)},
    "packed, causal": TWO | {"lengths_q": (130, 64, 3, 200), "is_causal": True},
    "packed, other keys": {"lengths_q": (3, 80, 0, 5), "lengths_k": (170, 8, 20, 0)},
    "packed, no keys at all": {"lengths_q": (40, 30), "lengths_k": (0, 20)},
    "packed, to the end": TO_END | {"lengths_q": (3, 150, 70, 5), "lengths_k": (70, 80, 150, 0)},
    "packed in a window": {"lengths_q": (300, 70, 17, 1), "is_causal": True, "window": (60, -1)},
    "packed, a window both ways, to the end": {
        **{"lengths_q": (100, 170, 17), "lengths_k": (200, 90, 300), "window": (50, 20)},
        "align": Align.BOTTOM_RIGHT,
    },
    "packed groups": GROUPS | TO_END | {"lengths_q": (130, 40)},
    "packed, fewer columns of values": NARROW_VALUES | {"lengths_q": (130, 40)},
    "packed, all else": GROUPS
    | SINKS
    | TO_END
    | {"lengths_q": (130, 0, 40), "lengths_k": (90, 10, 60), "softcap": 3.0}
    | {"has_alibi": True, "window": (90, -1)},
}


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem that wants gradients, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 136, "num_heads": 1, "requires_grad": True}
    values = usual | values
    how = {key: values.pop(key) for key in ("layout",) if key in values}
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths, **how)
    if problem.has_alibi:
        slopes = torch.rand(problem.batch, problem.num_heads)
        tensors = with_tensors(tensors, alibi_slopes=slopes)
    return problem, tensors


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name: str, precision: Precision) -> None:
    problem, tensors = made(CASES[name] | {"precision": precision})
    assert_training_matches(run, tensors, problem)
