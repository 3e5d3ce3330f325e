"""The gradients of the Hopper kernels against the oracle, on a GPU of their kind.

`test_gradients.py` holds their source to small problems on a CPU; these have lengths of many tiles,
more blocks than processors, and what only a card shows: CUDA graphs, sums in any order.
"""

from functools import partial
from typing import Any

import pytest
import torch

from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import hopper
from adaattn.errors import UnsupportedError
from adaattn.spec import Align, HeadGroup, Precision
from adaattn.testing import Layout, assert_training_matches, make_problem, make_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="they are written for compute capability 9.0",
    ),
]

TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2}
PROBLEMS: dict[str, dict[str, Any]] = {
    "whole tiles": {"len_q": 2048},
    "whole tiles, narrow": {"len_q": 2048, "head_dim": 64},
    "causal": {"len_q": 1024, "is_causal": True, "num_heads": 16, "batch": 4},
    "causal, narrow": {"len_q": 1024, "is_causal": True, "head_dim": 64, "num_heads": 32},
    "causal, ragged": {"len_q": 1000, "is_causal": True},
    "one row": {"len_q": 1, "len_k": 1000},
    "one key": {"len_q": 1000, "len_k": 1, "head_dim": 64},
    "to the end": TO_END | {"len_q": 300, "len_k": 1037},
    "rows without keys": TO_END | {"len_q": 700, "len_k": 129, "head_dim": 64},
    "keys without rows": {"len_q": 300, "len_k": 1037, "is_causal": True},
    "window": {"len_q": 1500, "is_causal": True, "window": (300, -1)},
    "window both ways": {"len_q": 1500, "window": (100, 33), "head_dim": 64},
    "groups": GROUPS | {"len_q": 777, "is_causal": True, "batch": 2},
    "groups, whole tiles": GROUPS | {"len_q": 512, "head_dim": 64, "is_causal": True},
    "40 columns, strided": {"len_q": 500, "head_dim": 40, "layout": Layout.STRIDED},
    "80 columns, transposed": {"len_q": 500, "head_dim": 80, "layout": Layout.TRANSPOSED},
    "half": {"len_q": 700, "precision": Precision.FP16, "is_causal": True},
    "softcap": {"len_q": 700, "softcap": 5.0, "is_causal": True},
    "softcap, narrow": {"len_q": 700, "softcap": 5.0, "head_dim": 64},
    "softcap in half": {"len_q": 300, "softcap": 1.5, "precision": Precision.FP16},
    "sinks": {"len_q": 700, "has_sinks": True, "sinks_require_grad": True},
    "ALiBi": GROUPS | {"len_q": 500, "has_alibi": True, "is_causal": True},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    usual = {"precision": Precision.BF16, "head_dim": 128, "requires_grad": True}
    values = usual | {"device_type": "cuda"} | PROBLEMS[name]
    how = {key: values.pop(key) for key in ("layout",) if key in values}
    problem = make_problem(**values)
    run = partial(hopper.run, group=HeadGroup(capability="hopper"))
    assert_training_matches(run, make_tensors(problem, **how), problem)


def leaves(length: int = 512) -> list[torch.Tensor]:
    """Return random q, k and v that want gradients."""
    shape = (2, 4, length, 128)
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(shape, **kind) for _ in range(3)]


def test_a_cuda_graph_replays_a_training_step() -> None:
    given = leaves()

    def step() -> tuple[torch.Tensor, ...]:
        output = attend(*given, is_causal=True, backend="hopper")
        return torch.autograd.grad(output.square().sum(), given)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    with torch.no_grad():
        given[0].mul_(0.5)
    for _ in range(3):
        graph.replay()
    for found, expected in zip(made, step(), strict=True):
        assert float((found - expected).float().norm() / expected.float().norm()) < 2**-8


def test_keys_and_values_have_the_same_gradients_each_time() -> None:
    """Those of queries are added up in no fixed order."""
    given = leaves(2048)
    output = attend(*given, is_causal=True, backend="hopper")
    first, second = (torch.autograd.grad(output.sum(), given, retain_graph=True) for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


def test_deterministic_algorithms_are_refused() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedError, match="deterministic"):
            attend(*leaves(), backend="hopper")
    finally:
        torch.use_deterministic_algorithms(False)
