"""Grouped decoding: always a fused kernel, and refused where SDPA has none."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import grouped
from adaattn.backends.registry import capability_named
from adaattn.planning import reasons
from adaattn.spec import HeadGroup, Precision
from adaattn.testing import (
    Layout,
    assert_matches,
    assert_results_match,
    attention,
    cast_tensors,
    fake_facts,
    make_problem,
    make_tensors,
    num_summands,
)

(GROUPED,) = grouped.CAPABILITIES
DECODE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "len_q": 1, "len_k": 100}


class Kernels(TorchDispatchMode):
    """Notes the operators of attention that run, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if "attention" in str(func) or "softmax" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("precision", GROUPED.precisions)
def test_it_runs_one_fused_kernel(
    precision: Precision, layout: Layout, requires_grad: bool
) -> None:
    """Keys with strided columns once took the kernel that writes the scores out."""
    problem = make_problem(**DECODE, precision=precision, requires_grad=requires_grad)
    tensors = make_tensors(problem, layout=layout)
    with Kernels() as seen:
        found = grouped.run(tensors, problem, HeadGroup(capability="grouped"))
    assert seen.names == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    assert_results_match(
        found,
        attention(cast_tensors(tensors, torch.float64), problem),
        attention(tensors, problem, compute_dtype=tensors.query.dtype),
        summands=num_summands(problem, found.output),
    )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dropout_p": 0.1}, "it does not support dropout"),
        ({"value_dim": 8}, "it does not support Dv different from D"),
        ({"precision": Precision.FP64}, "it takes fp32, bf16, fp16, got fp64"),
    ],
    ids=str,
)
def test_it_refuses_what_no_fused_kernel_computes(values: dict[str, Any], reason: str) -> None:
    """It is counted as a fused kernel, and SDPA computed these without one on some device."""
    assert reasons(GROUPED, make_problem(**DECODE, **values), fake_facts("cpu")) == (reason,)


@pytest.mark.parametrize(
    ("values", "is_first"),
    [
        ({"head_dim": 512, "num_heads": 4, "num_kv_heads": 1}, False),
        ({"head_dim": 512, "num_heads": 4, "num_kv_heads": 1, "len_k": 500}, True),
        ({"head_dim": 512, "num_heads": 15, "num_kv_heads": 5}, False),
        ({"head_dim": 512, "num_heads": 16}, True),
        ({"head_dim": 512, "num_heads": 4, "num_kv_heads": 1, "batch": 4}, True),
        ({"head_dim": 128, "num_heads": 4, "num_kv_heads": 1}, True),
        ({"head_dim": 128, "num_heads": 32, "precision": Precision.FP32}, False),
    ],
    ids=str,
)
def test_on_a_gpu_it_goes_before_math_where_one_block_of_keys_is_no_slower(
    values: dict[str, Any], is_first: bool
) -> None:
    """Four heads of D 512 over 8051 keys once took 2.7 times as long as PyTorch's math."""
    measured = {"precision": Precision.BF16, "len_k": 8051, "sdpa_default": "sdpa.math"} | values
    problem = make_problem(**DECODE | measured, device_type="cuda")
    math = capability_named("sdpa.math")
    assert (GROUPED.order(problem) < math.order(problem)) is is_first


@pytest.mark.parametrize("shape", [(2, 3, 1, 1, 20), (3, 1, 1, 20), (1, 1, 20), (20,)])
def test_a_mask_of_any_rank_is_taken_as_the_call_takes_it(shape: tuple[int, ...]) -> None:
    query, key = torch.randn(2, 3, 8, 1, 16), torch.randn(2, 3, 2, 20, 16)
    mask = torch.rand(shape) > 0.3
    found = {
        name: attend(query, key, key, mask, scale=0.7, enable_gqa=True, backend=name)
        for name in ("grouped", "reference")
    }
    wide = [item.double() for item in (query, key, key)]
    exact = attend(*wide, mask, scale=0.7, enable_gqa=True, backend="reference")
    assert_matches(found["grouped"], exact, found["reference"], summands=16 + 20)
