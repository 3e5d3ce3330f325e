"""Random mixes of sizes and features, by chunks and by few rows, forward and in training."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import load
from adaattn.backends.interface import Tensors
from adaattn.backends.streamed import CAPABILITIES, small
from adaattn.planning import reasons
from adaattn.spec import Align, AttentionProblem, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    Layout,
    assert_executor_matches,
    assert_training_matches,
    fake_facts,
    make_problem,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="python -m benchmarks.fuzz does it on the GPU"
)

Made = Callable[[dict[str, Any]], tuple[AttentionProblem, Tensors, HeadGroup]]

SIZES = (1, 3, 17, 63, 100)
DIMS = ((264, 264), (320, 264), (512, 512), (576, 512), (40, 264), (1024, 40))
HEADS = ((1, 1), (2, 2), (3, 1), (4, 2))


def drawn(seed: int) -> dict[str, Any]:
    """Return the values of a problem; each feature is in three of ten."""
    source = random.Random(seed)

    def sometimes(**values: Any) -> dict[str, Any]:
        return values if source.random() < 0.3 else {}

    heads, kv_heads = source.choice(HEADS)
    dim, value_dim = source.choice(DIMS)
    len_q, len_k = source.choice(SIZES), source.choice(SIZES)
    window = tuple(source.choice((-1, 0, 5, 40)) for _ in range(2))
    values: dict[str, Any] = {
        "batch": source.choice((1, 2)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "len_q": len_q,
        "len_k": len_k,
        "head_dim": dim,
        "value_dim": value_dim,
        "is_causal": source.random() < 0.5,
        "align": source.choice(tuple(Align)),
        "precision": source.choice((Precision.FP32, Precision.FP16)),
        "layout": source.choice(tuple(Layout)),
        "chunk_rows": source.choice((0, 5, 16)),
    }
    values |= sometimes(window=window) | sometimes(dilation=2) | sometimes(softcap=3.0)
    values |= sometimes(has_sinks=True, sinks_require_grad=True) | sometimes(has_alibi=True)
    values |= sometimes(scale=source.choice((0.3, -0.1)))
    kind = source.choice((MaskKind.BOOLEAN, MaskKind.ADDITIVE))
    full = (values["batch"], heads, len_q, len_k)
    shape = tuple(size if source.random() < 0.6 else 1 for size in full)
    return values | sometimes(mask=kind, mask_shape=shape)


@pytest.mark.parametrize("seed", range(14))
def test_a_random_problem_is_computed_as_defined(seed: int, made: Made) -> None:
    values = drawn(seed)
    if seed % 2:
        values["requires_grad"] = True
    else:
        values.pop("sinks_require_grad", None)
    for name, (capability,) in (("streamed", CAPABILITIES), ("small", small.CAPABILITIES)):
        about = ("layout", "chunk_rows")
        asked = {key: value for key, value in values.items() if key not in about}
        on_gpu = make_problem(**asked, device_type="cuda")
        against = [
            it for it in reasons(capability, on_gpu, fake_facts("h200")) if "cannot" not in it
        ]
        if against:
            assert name == "small"
            continue
        problem, tensors, group = made(values | {"executor": name})
        holds = assert_training_matches if problem.requires_grad else assert_executor_matches
        holds(partial(load(name), group=group), tensors, problem)
