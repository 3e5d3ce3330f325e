"""Number formats by policy and hardware, seen in the statistics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn import Policy, record_events
from adaattn.attention.adaptive_precision import AdaptivePrecisionAttention
from adaattn.attention.dense import DenseAttention
from adaattn.errors import ArgumentError, ArgumentTypeError, PolicyError, UnsupportedError
from adaattn.testing import assert_matches

EMBED, HEADS, LENGTH = 128, 2, 1024

BY_HARDWARE = [
    ("h200", "fp16", "bf16"),
    ("l40s", "fp16", "bf16"),
    ("a100", "fp16", "bf16"),
    ("v100", "fp16", "fp32"),
    ("pascal", "fp32", "fp32"),
    ("cpu_amx", "bf16", "bf16"),
    ("cpu", "fp32", "fp32"),
]
"""Machine, format of inference, format of training."""


def reasons_of(module: AdaptivePrecisionAttention, x: torch.Tensor) -> dict[str, str]:
    """Return the reason given for each candidate of a call."""
    events: list[Any] = []
    with record_events(events.append):
        module(x)
    return {entry.candidate: entry.reason for entry in events[0].decision.trace}


@pytest.mark.parametrize(("machine", "inference", "training"), BY_HARDWARE)
def test_the_hardware_decides_the_format(
    pretend: Callable[[str], Any], machine: str, inference: str, training: str
) -> None:
    """bf16 from Ampere on, fp16 from Volta on, else fp32; fp8 has no executor yet.

    Where both are as fast, fp16 is taken, which rounds eight times finer; but never in
    training, where small gradients would vanish in it.
    """
    pretend(machine)
    x = torch.randn(1, 8192, EMBED)
    for expected, with_gradient in ((inference, False), (training, True)):
        module = AdaptivePrecisionAttention(EMBED, HEADS, policy="balanced").train(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            output, _ = module(x)
        assert module.get_statistics()["share_by_precision"] == {expected: 1.0}
        assert output.dtype is torch.float32


@pytest.mark.parametrize("machine", ["h200", "v100", "cpu"])
def test_each_decision_says_why_eight_bits_are_not_used(
    pretend: Callable[[str], Any], machine: str
) -> None:
    facts = pretend(machine)
    said = reasons_of(AdaptivePrecisionAttention(EMBED, HEADS), torch.randn(4, LENGTH, EMBED))
    reason = next(text for name, text in said.items() if name.endswith("/fp8_e4m3"))
    if machine == "h200":
        assert reason == "no executor that can serve this call takes it and gains"
    else:
        assert reason.startswith(f"{facts.name} computes fp64, fp32")


@pytest.mark.parametrize("policy", ["balanced", "speed"])
def test_the_result_is_within_the_policys_budget(
    pretend: Callable[[str], Any], policy: str
) -> None:
    pretend("cpu_amx")
    module = AdaptivePrecisionAttention(EMBED, HEADS, policy=policy)
    x = torch.randn(4, LENGTH, EMBED)
    output, _ = module(x)
    exact = DenseAttention(EMBED, HEADS, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    expected, _ = exact(x.double())
    budget = {"balanced": 0.01, "speed": 0.05}[policy]
    assert (output - expected).norm() <= HEADS * budget * expected.norm()
    statistics = module.get_statistics()
    assert 0 < statistics["max_audited_error"] <= budget
    assert statistics["share_by_method"] == {"exact": 1.0}


def test_quality_keeps_the_inputs_format_bit_for_bit(pretend: Callable[[str], Any]) -> None:
    pretend("cpu_amx")
    module = AdaptivePrecisionAttention(EMBED, HEADS, policy="quality")
    exact = DenseAttention(EMBED, HEADS)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(2, LENGTH, EMBED)
    assert torch.equal(module(x)[0], exact(x)[0])
    assert module.get_statistics()["share_by_precision"] == {"fp32": 1.0}


class TestModes:
    """A format by name."""

    @pytest.mark.parametrize("mode", ["bf16", "fp16"])
    def test_a_format_by_name_is_used_where_the_device_computes_in_it(
        self, pretend: Callable[[str], Any], mode: str
    ) -> None:
        pretend("a100")
        module = AdaptivePrecisionAttention(EMBED, HEADS, precision_mode=mode)
        x = torch.randn(2, 50, EMBED)
        output, _ = module(x)
        statistics = module.get_statistics()
        assert statistics["share_by_precision"] == {mode: 1.0}
        assert statistics["precision_notes"] == {}
        assert output.dtype is torch.float32
        exact = DenseAttention(EMBED, HEADS, dtype=torch.float64)
        exact.load_state_dict(module.state_dict())
        lower = {"bf16": torch.bfloat16, "fp16": torch.float16}[mode]
        eager = DenseAttention(EMBED, HEADS).to(lower)
        eager.load_state_dict(module.state_dict())
        expected, _ = exact(x.double())
        assert_matches(output.to(lower), expected, eager(x.to(lower))[0])

    @pytest.mark.parametrize(
        ("machine", "mode", "said"),
        [
            ("cpu", "bf16", "computes fp64, fp32 natively, not it"),
            ("v100", "bf16", "computes fp64, fp32, fp16 natively, not it"),
            ("pascal", "fp16", "natively, not it"),
        ],
    )
    def test_where_it_does_not_the_format_is_used_and_the_statistics_say_so(
        self, pretend: Callable[[str], Any], machine: str, mode: str, said: str
    ) -> None:
        pretend(machine)
        module = AdaptivePrecisionAttention(EMBED, HEADS, precision_mode=mode)
        module(torch.randn(2, 50, EMBED))
        statistics = module.get_statistics()
        assert statistics["share_by_precision"] == {mode: 1.0}
        ((note, count),) = statistics["precision_notes"].items()
        assert said in note and count == 1

    @pytest.mark.parametrize("machine", ["cpu", "a100", "h200"])
    def test_a_format_in_which_nothing_computes_is_refused_by_the_call(
        self, pretend: Callable[[str], Any], machine: str
    ) -> None:
        pretend(machine)
        module = AdaptivePrecisionAttention(EMBED, HEADS, precision_mode="fp8")
        with pytest.raises(UnsupportedError, match="precision_mode 'fp8' cannot serve"):
            module(torch.randn(2, 50, EMBED))

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"precision_mode": "fp7"}, ArgumentError, "precision_mode: expected one of 'auto'"),
            ({"precision_mode": 16}, ArgumentTypeError, "precision_mode: expected a string"),
            ({"policy": "cheap"}, PolicyError, "policy: expected 'quality', 'balanced'"),
        ],
    )
    def test_unknown_names_are_refused(
        self, settings: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            AdaptivePrecisionAttention(EMBED, HEADS, **settings)


def test_a_users_policy_keeps_its_budget_and_loses_its_methods(
    pretend: Callable[[str], Any],
) -> None:
    """A budget below the error of any lower format leaves fp32."""
    pretend("cpu_amx")
    module = AdaptivePrecisionAttention(EMBED, HEADS, policy=Policy(error_budget=1e-6))
    said = reasons_of(module, torch.randn(4, LENGTH, EMBED))
    assert module.get_statistics()["share_by_precision"] == {"fp32": 1.0}
    assert "expected an error of at most 1e-06, got" in said["sdpa.flash/bf16"]
    assert "does not use this method" in said["low_rank/fp32"]


def test_magnitudes_beyond_fp16_leave_the_format(pretend: Callable[[str], Any]) -> None:
    pretend("v100")
    module = AdaptivePrecisionAttention(EMBED, HEADS, policy="speed", measure_every=1).eval()
    with torch.no_grad():
        module.in_proj_weight[2 * EMBED :] *= 1e5
    with torch.no_grad():
        module(torch.randn(4, LENGTH, EMBED))
        assert module.get_statistics()["share_by_precision"] == {"fp32": 1.0}
        module.in_proj_weight[2 * EMBED :] /= 1e5
        module(torch.randn(4, LENGTH, EMBED))
    assert module.get_statistics()["share_by_precision"] == {"fp32": 0.5, "fp16": 0.5}
