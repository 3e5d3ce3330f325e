"""The flagship: both adaptations and every executor under one budget."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn import Policy, use_policy
from adaattn.attention.adaattn import AdaAttention
from adaattn.attention.dense import DenseAttention
from adaattn.errors import ArgumentTypeError, PolicyError

EMBED, HEADS, LENGTH = 256, 4, 2048


def test_the_specifications_example_runs() -> None:
    x = torch.randn(2, 100, 512)
    attn = AdaAttention(embed_dim=512, num_heads=8, enable_gpu_optimization=True)
    output, weights = attn(x, x, x)
    assert output.shape == x.shape
    assert weights is None
    assert attn.get_statistics()["flash_ratio"] == 1.0


def test_rank_and_precision_adapt_head_by_head(
    pretend: Callable[[str], Any], plant: Callable[..., None]
) -> None:
    """Heads of low rank go there, the others to bf16, on a machine that computes in it."""
    pretend("a100")
    module = AdaAttention(EMBED, HEADS, policy="balanced")
    plant(module, (0, 1), rank=6)
    module(torch.randn(1, LENGTH, EMBED))
    statistics = module.get_statistics()
    assert statistics["share_by_precision"].get("bf16", 0) > 0
    assert statistics["max_audited_error"] <= 0.01


def test_low_rank_is_taken_where_no_lower_format_is(
    pretend: Callable[[str], Any], plant: Callable[..., None]
) -> None:
    pretend("cpu")
    module = AdaAttention(EMBED, HEADS, policy="balanced")
    plant(module, (0, 1), rank=6)
    module(torch.randn(1, LENGTH, EMBED))
    assert module.get_statistics()["share_by_method"] == {"low_rank": 0.5, "exact": 0.5}


def test_quality_is_dense_bit_for_bit() -> None:
    module = AdaAttention(EMBED, HEADS, policy="quality")
    dense = DenseAttention(EMBED, HEADS)
    dense.load_state_dict(module.state_dict())
    x = torch.randn(1, 300, EMBED)
    assert torch.equal(module(x)[0], dense(x)[0])


def test_without_a_policy_the_ambient_one_counts(pretend: Callable[[str], Any]) -> None:
    pretend("cpu_amx")
    module = AdaAttention(EMBED, HEADS, policy=None)
    x = torch.randn(2, 1024, EMBED)
    module(x)
    assert module.get_statistics()["share_by_precision"] == {"fp32": 1.0}
    module.reset_statistics()
    with use_policy(Policy(name="mine", error_budget=0.01)):
        module(x)
    assert module.get_statistics()["share_by_precision"] == {"bf16": 1.0}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"enable_gpu_optimization": "yes"}, ArgumentTypeError, "enable_gpu_optimization"),
        ({"policy": "best"}, PolicyError, "policy: expected 'quality'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AdaAttention(EMBED, HEADS, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("optimised", [True, False])
def test_fused_kernels_serve_a_gpu_unless_they_are_turned_off(optimised: bool) -> None:
    module = AdaAttention(EMBED, HEADS, policy="quality", enable_gpu_optimization=optimised).cuda()
    module(torch.randn(2, 256, EMBED, device="cuda"))
    assert module.get_statistics()["flash_ratio"] == float(optimised)
