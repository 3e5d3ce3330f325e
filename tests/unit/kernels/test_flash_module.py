"""The module on fused kernels: what it computes, and what it counts."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from adaattn import AttentionEvent, record_events
from adaattn.attention.base import BaseAttention
from adaattn.attention.dense import DenseAttention
from adaattn.errors import AdaAttnError, ArgumentError, ArgumentTypeError, ShapeError
from adaattn.kernels.flash_attention import AdaptiveFlashAttention
from adaattn.spec import HardwareFacts
from adaattn.testing import assert_matches

Install = Callable[..., HardwareFacts]


def beside_pytorch() -> tuple[AdaptiveFlashAttention, nn.MultiheadAttention]:
    """Return the module and PyTorch's, of the same weights."""
    theirs = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    ours = AdaptiveFlashAttention(32, 4).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_it_is_multi_head_attention() -> None:
    ours, theirs = beside_pytorch()
    assert isinstance(ours, BaseAttention)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 10, 32)

    output, weights = ours(x, x, x)

    assert weights is None
    eager, _ = theirs(x, x, x)
    wide = x.double()
    exact, _ = theirs.double()(wide, wide, wide)
    assert_matches(output, exact.detach(), eager.detach(), summands=32)


def test_calls_by_fused_kernels_are_counted() -> None:
    attention = AdaptiveFlashAttention(32, 4)
    x = torch.randn(2, 10, 32)
    for _ in range(3):
        attention(x, x, x, is_causal=True)

    found = attention.get_flash_statistics()

    assert (found["total_calls"], found["flash_calls"], found["fallback_calls"]) == (3, 3, 0)
    assert found["flash_ratio"] == 1.0
    assert found["fallback_reasons"] == {}
    assert (found["precision_mode"], found["precision_notes"]) == ("auto", {})
    assert found["share_by_precision"] == {"fp32": 1.0}


def test_weights_come_from_another_executor_and_count_as_a_fallback() -> None:
    ours, theirs = beside_pytorch()
    x = torch.randn(2, 10, 32)
    ours(x, x, x)

    found = ours(x, x, x, need_weights=True, average_attn_weights=False)

    eager = theirs(x, x, x, average_attn_weights=False)
    wide = x.double()
    exact = theirs.double()(wide, wide, wide, average_attn_weights=False)
    for one, yardstick, oracle in zip(found, eager, exact, strict=True):
        assert_matches(one, oracle.detach(), yardstick.detach(), summands=32)
    counted = ours.get_flash_statistics()
    assert (counted["flash_calls"], counted["fallback_calls"]) == (1, 1)
    assert counted["flash_ratio"] == 0.5
    told = "; ".join(counted["fallback_reasons"])
    assert "it does not support the weights as an output" in told


def test_without_fused_kernels_every_call_is_a_fallback_by_choice() -> None:
    attention = AdaptiveFlashAttention(32, 4, enable_flash=False)
    x = torch.randn(2, 10, 32)
    events: list[AttentionEvent] = []
    with record_events(events.append):
        attention(x, x, x)
        attention(x, x, x, need_weights=True)

    served = [event.decision.plan.groups[0].capability for event in events]
    assert served == ["sdpa.math", "reference"]
    found = attention.get_flash_statistics()
    assert (found["total_calls"], found["flash_calls"], found["fallback_calls"]) == (2, 0, 2)
    assert found["fallback_reasons"] == {
        f"{name} was asked for by name, which is no fused kernel": 1 for name in served
    }


def test_a_precision_mode_is_computed_in_and_counted(machine: Install) -> None:
    machine("cpu_amx")
    attention = AdaptiveFlashAttention(32, 4, precision_mode="bf16")
    output, _ = attention(torch.randn(2, 10, 32))
    found = attention.get_flash_statistics()
    assert output.dtype == torch.float32
    assert found["share_by_precision"] == {"bf16": 1.0}
    assert (found["precision_mode"], found["precision_notes"]) == ("bf16", {})


def test_a_mode_that_the_device_lacks_is_in_the_statistics(machine: Install) -> None:
    machine("cpu")
    attention = AdaptiveFlashAttention(32, 4, "fp16")
    attention(torch.randn(2, 10, 32))
    found = attention.get_flash_statistics()
    assert found["share_by_precision"] == {"fp16": 1.0}
    ((note, count),) = found["precision_notes"].items()
    assert count == 1
    assert note.endswith("computes fp64, fp32 natively, not it")


def test_statistics_before_any_call_are_clear() -> None:
    found = AdaptiveFlashAttention(32, 4).get_flash_statistics()
    assert (found["total_calls"], found["flash_calls"], found["fallback_calls"]) == (0, 0, 0)
    assert found["fallback_reasons"] == {}


def test_statistics_are_reset() -> None:
    attention = AdaptiveFlashAttention(32, 4, enable_flash=False)
    attention(torch.randn(1, 4, 32))
    attention.reset_statistics()
    assert attention.get_flash_statistics()["total_calls"] == 0
    attention(torch.randn(1, 4, 32))
    assert attention.get_flash_statistics()["total_calls"] == 1


@pytest.mark.parametrize("enable_flash", [False, True])
def test_it_trains(enable_flash: bool) -> None:
    attention = AdaptiveFlashAttention(32, 4, enable_flash=enable_flash, dropout=0.1)
    x = torch.randn(2, 10, 32, requires_grad=True)
    attention(x, is_causal=True)[0].sum().backward()
    assert x.grad is not None and bool(x.grad.any())
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name


def test_the_settings_of_every_attention_module_are_its_own_too() -> None:
    attention = AdaptiveFlashAttention(
        32, 4, num_kv_heads=2, window=(3, 0), bias=False, layer=7, policy="speed"
    )
    events: list[AttentionEvent] = []
    with record_events(events.append):
        attention(torch.randn(1, 12, 32))
    (event,) = events
    assert event.tag == "layer7"
    assert event.problem.num_kv_heads == 2 and event.problem.window == (3, -1)
    assert event.problem.is_causal
    assert event.decision.policy == "speed"
    assert attention.in_proj_bias is None


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"precision_mode": "fp12"}, ArgumentError, "precision_mode: expected one of 'auto'"),
        ({"num_heads": 5}, ShapeError, "embed_dim: expected a multiple of num_heads=5, got 32"),
        ({"num_kv_heads": 3}, ShapeError, "num_kv_heads: expected a divisor of num_heads=4"),
        ({"heads": 3}, ArgumentTypeError, "keyword arguments: expected some of"),
        ({"dropout": 2.0}, ArgumentError, "dropout: expected a number in"),
    ],
)
def test_wrong_settings_are_refused(
    arguments: dict[str, object], kind: type[AdaAttnError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        AdaptiveFlashAttention(**({"embed_dim": 32, "num_heads": 4} | arguments))


@pytest.mark.parametrize("enable_flash", [False, True])
def test_a_copy_counts_for_itself(enable_flash: bool) -> None:
    attention = AdaptiveFlashAttention(32, 4, enable_flash=enable_flash)
    x = torch.randn(1, 4, 32)
    attention(x)
    other = copy.deepcopy(attention)
    other(x)
    assert other.get_flash_statistics()["total_calls"] == 2
    assert attention.get_flash_statistics()["total_calls"] == 1


def test_it_compiles_with_the_chain_and_the_precision_mode(machine: Install) -> None:
    """The mode was left out of the graph; calls in a graph are not counted."""
    torch._dynamo.reset()
    machine("cpu_amx")
    attention = AdaptiveFlashAttention(32, 4, "bf16", enable_flash=False)
    x = torch.randn(1, 4, 32)
    compiled = torch.compile(attention, backend="eager")
    with torch.no_grad():
        found = compiled(x)[0]
        assert attention.get_flash_statistics()["total_calls"] == 0
        single = DenseAttention(32, 4)
        single.load_state_dict(attention.state_dict())
        exact = copy.deepcopy(single).double()(x.double())[0]
        assert_matches(found, exact, attention(x)[0], summands=32)
        assert not torch.equal(found, single(x)[0])
