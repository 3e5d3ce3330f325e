"""Fused attention by name, the chain of `auto`, and precision modes."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import adaattn
from adaattn import AttentionEvent, AuxRequest, record_events
from adaattn.errors import (
    AdaAttnError,
    ArgumentError,
    ArgumentTypeError,
    DTypeError,
    UnsupportedError,
)
from adaattn.kernels.flash_attention import (
    FlashAttentionConfig,
    flash_attention_forward,
)
from adaattn.spec import HardwareFacts, Precision

Draw = Callable[..., tuple[torch.Tensor, ...]]
Check = Callable[..., None]
Install = Callable[..., HardwareFacts]


def event_of(run: Callable[[], object]) -> AttentionEvent:
    """Return the one event of a call."""
    events: list[AttentionEvent] = []
    with record_events(events.append):
        run()
    (event,) = events
    return event


def executor_of(run: Callable[[], object]) -> str:
    """Return the executor that served a call."""
    return event_of(run).decision.plan.groups[0].capability


class Failing(TorchDispatchMode):
    """Lets PyTorch's flash kernel fail on a CPU."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu":
            raise self.error
        return func(*args, **(kwargs or {}))


class TestForward:
    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("backend", ["auto", "flash", "reference"])
    def test_it_is_attention(
        self, draw: Draw, check: Check, backend: str, is_causal: bool, kv_heads: int
    ) -> None:
        inputs = draw(kv_heads=kv_heads)
        config = FlashAttentionConfig(is_causal=is_causal, scale=0.3)
        actual = flash_attention_forward(*inputs, config, backend=backend)
        check(actual, inputs, is_causal=is_causal, scale=0.3)

    def test_without_a_config_it_is_plain_attention(self, draw: Draw, check: Check) -> None:
        inputs = draw()
        check(flash_attention_forward(*inputs), inputs)

    @pytest.mark.parametrize(
        "change",
        [
            {"is_causal": True},
            {"is_causal": True, "align": "bottom_right"},
            {"scale": 0.7},
            {"window": (3, 2)},
            {"softcap": 2.0},
        ],
        ids=str,
    )
    def test_every_setting_changes_what_the_public_call_is_asked_for(
        self, draw: Draw, change: dict[str, object]
    ) -> None:
        query, key, value = draw()
        inputs = (query[:, :, :20], key, value)
        actual = flash_attention_forward(*inputs, FlashAttentionConfig(**change))
        expected = adaattn.scaled_dot_product_attention(*inputs, **change)
        assert torch.equal(actual, expected)
        assert not torch.equal(actual, flash_attention_forward(*inputs))

    def test_dropout_is_honoured(self, draw: Draw) -> None:
        inputs = draw()
        dropped = [
            flash_attention_forward(*inputs, FlashAttentionConfig(dropout_p=0.5)) for _ in range(2)
        ]
        assert not torch.equal(*dropped)
        all_dropped = flash_attention_forward(*inputs, FlashAttentionConfig(dropout_p=1.0))
        assert not bool(all_dropped.any())

    def test_masks_hide_and_bias(self, draw: Draw, check: Check) -> None:
        inputs = draw()
        for mask in (torch.rand(24, 24) > 0.3, torch.randn(24, 24)):
            check(flash_attention_forward(*inputs, attn_mask=mask), inputs, attn_mask=mask)

    def test_an_explicit_request_lists_every_reason(self, draw: Draw) -> None:
        config = FlashAttentionConfig(softcap=3.0, dropout_p=0.1)
        with pytest.raises(UnsupportedError, match="backend 'flash' cannot serve") as caught:
            flash_attention_forward(*draw(), config, backend="flash")
        told = [reason for reason in caught.value.reasons if reason.startswith("sdpa.flash:")]
        assert told == [
            "sdpa.flash: it does not support softcap",
            "sdpa.flash: it does not support dropout",
        ]

    def test_auto_steps_down_and_the_log_says_why(
        self, draw: Draw, caplog: pytest.LogCaptureFixture
    ) -> None:
        inputs = draw()
        with caplog.at_level(logging.INFO, logger="adaattn"):
            flash_attention_forward(*inputs, FlashAttentionConfig(is_causal=True))
            assert caplog.records == []
            found = flash_attention_forward(*inputs, FlashAttentionConfig(dropout_p=0.5))
        assert isinstance(found, torch.Tensor)
        assert caplog.messages == [
            "no fused kernel serves queries [2, 4, 24, 16] over 24 keys, sdpa.math does: "
            "sdpa.flash: it does not support dropout"
        ]

    def test_a_kernel_without_room_is_followed_by_the_next(self, draw: Draw, check: Check) -> None:
        inputs = draw((1, 2, 40, 16))

        def forward() -> torch.Tensor:
            with Failing(torch.OutOfMemoryError("the memory is full")):
                return flash_attention_forward(*inputs)

        event = event_of(lambda: check(forward(), inputs))
        assert event.fallbacks[0] == (
            "sdpa.flash failed (the memory is full); the next candidate was tried"
        )
        full = pytest.raises(torch.OutOfMemoryError, match="the memory is full")
        with Failing(torch.OutOfMemoryError("the memory is full")), full:
            flash_attention_forward(*inputs, backend="flash")

    @pytest.mark.parametrize("backend", ["auto", "flash"])
    def test_a_kernel_that_breaks_is_an_error(self, draw: Draw, backend: str) -> None:
        """Another one took its place, and nobody saw the bug."""
        broken = pytest.raises(RuntimeError, match="no such instruction")
        with Failing(RuntimeError("no such instruction")), broken:
            flash_attention_forward(*draw((1, 2, 41, 16)), backend=backend)

    def test_without_fused_kernels_the_chain_is_sdpa_then_the_definition(
        self, draw: Draw, check: Check
    ) -> None:
        inputs = draw()
        off = FlashAttentionConfig(enable_flash=False)
        capped = dataclasses.replace(off, softcap=2.0)
        assert executor_of(lambda: flash_attention_forward(*inputs, off)) == "sdpa.math"
        assert executor_of(lambda: flash_attention_forward(*inputs, capped)) == "reference"
        event = event_of(lambda: flash_attention_forward(*inputs, capped))
        refused = {entry.candidate: entry.reason for entry in event.decision.trace}
        assert refused["sdpa.math/fp32"] == "it does not support softcap"
        check(flash_attention_forward(*inputs, off), inputs)

    def test_what_is_asked_for_beside_the_output_comes_with_the_decision(self, draw: Draw) -> None:
        inputs = draw()
        output, aux = flash_attention_forward(*inputs, return_aux=AuxRequest(weights=True))
        assert aux.weights is not None and aux.weights.shape == (2, 4, 24, 24)
        assert aux.decision.plan.groups[0].capability not in ("sdpa.flash",)
        _, aux = flash_attention_forward(*inputs, return_aux=True, policy="speed")
        assert aux.decision.policy == "speed"
        assert output.shape == inputs[0].shape

    def test_gradients_are_those_of_the_public_call(self, draw: Draw) -> None:
        inputs = draw(grad=True)
        gradient = torch.randn_like(inputs[0])
        ours = flash_attention_forward(*inputs, FlashAttentionConfig(is_causal=True))
        public = adaattn.scaled_dot_product_attention(*inputs, is_causal=True)
        for one, other in zip(
            torch.autograd.grad(ours, inputs, gradient),
            torch.autograd.grad(public, inputs, gradient),
            strict=True,
        ):
            assert torch.equal(one, other) and bool(one.any())

    @pytest.mark.parametrize("backend", ["flash", "sdpa.math"])
    def test_a_backend_beside_enable_flash_false_is_a_contradiction(
        self, draw: Draw, backend: str
    ) -> None:
        with pytest.raises(ArgumentError, match="backend with enable_flash=False: expected 'auto'"):
            flash_attention_forward(
                *draw(), FlashAttentionConfig(enable_flash=False), backend=backend
            )

    @pytest.mark.parametrize(
        ("values", "kind", "message"),
        [
            ({"precision_mode": "fp12"}, ArgumentError, "precision_mode: expected one of 'auto'"),
            (
                {"precision_mode": 16},
                ArgumentTypeError,
                "precision_mode: expected a string, got 16",
            ),
        ],
    )
    def test_an_unknown_precision_mode_is_refused_at_once(
        self, values: dict[str, object], kind: type[AdaAttnError], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            FlashAttentionConfig(**values)

    @pytest.mark.parametrize(
        ("values", "kind", "message"),
        [
            ({"dropout_p": 2.0}, ArgumentError, r"dropout_p: expected a probability in \[0, 1\]"),
            ({"window": (-2, 0)}, ArgumentError, r"window: expected \(left, right\)"),
            ({"scale": "x"}, ArgumentTypeError, "scale: expected a number, got 'x'"),
            ({"softcap": True}, ArgumentTypeError, "softcap: expected a number, got True"),
        ],
    )
    def test_a_wrong_number_is_refused_at_once(
        self, values: dict[str, object], kind: type[AdaAttnError], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            FlashAttentionConfig(**values)

    def test_other_wrong_settings_are_refused_by_the_call(self, draw: Draw) -> None:
        with pytest.raises(ArgumentTypeError, match="is_causal: expected True or False, got 1"):
            flash_attention_forward(*draw(), FlashAttentionConfig(is_causal=1))
        with pytest.raises(ArgumentTypeError, match="config: expected None or a FlashAttention"):
            flash_attention_forward(*draw(), {"is_causal": True})
        with pytest.raises(ArgumentTypeError, match=r"query: expected a torch\.Tensor, got str"):
            flash_attention_forward("q", "k", "v", FlashAttentionConfig(precision_mode="bf16"))
        with pytest.raises(dataclasses.FrozenInstanceError):
            FlashAttentionConfig().is_causal = True  # type: ignore[misc]


class TestPrecisionMode:
    @pytest.mark.parametrize(("mode", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
    def test_a_mode_of_the_device_is_computed_in(
        self, draw: Draw, check: Check, machine: Install, mode: str, dtype: torch.dtype
    ) -> None:
        machine("cpu_amx")
        for own in (torch.float32, torch.bfloat16, torch.float64):
            inputs = draw(dtype=own)
            config = FlashAttentionConfig(precision_mode=mode)
            event = event_of(lambda: flash_attention_forward(*inputs, config))  # noqa: B023
            assert event.problem.precision.label == mode
            output = flash_attention_forward(*inputs, config)
            assert output.dtype == own
            if own == torch.float32:
                check(output.to(dtype), tuple(item.to(dtype) for item in inputs))

    def test_a_mode_that_the_device_lacks_is_computed_in_and_that_is_said(
        self, draw: Draw, machine: Install, caplog: pytest.LogCaptureFixture
    ) -> None:
        machine("cpu_amx")
        inputs = draw()
        config = FlashAttentionConfig(precision_mode="fp16")
        with caplog.at_level(logging.INFO, logger="adaattn"):
            output, aux = flash_attention_forward(*inputs, config, return_aux=True)
        note = "precision_mode 'fp16' is computed in as asked, though Intel Xeon Platinum 8480+ "
        note += "computes fp64, fp32, bf16, int8 natively, not it"
        assert aux.decision.notes[-1] == note
        assert note in caplog.text
        assert {group.scheme.inputs for group in aux.decision.plan.groups} == {Precision.FP16}
        assert torch.equal(output, flash_attention_forward(*(t.half() for t in inputs)).float())

    def test_a_format_that_no_executor_takes_is_refused_on_any_card(
        self, draw: Draw, machine: Install
    ) -> None:
        facts = machine("cpu_amx")
        machine("cpu_amx", instructions=(*facts.instructions, Precision.FP8_E4M3))
        config = FlashAttentionConfig(precision_mode="fp8")
        for return_aux in (None, True):
            with pytest.raises(UnsupportedError, match="precision_mode 'fp8' cannot serve"):
                flash_attention_forward(*draw(), config, return_aux=return_aux)

    def test_a_mode_rules_over_autocast(self, draw: Draw, machine: Install) -> None:
        machine("cpu_amx")
        inputs = draw()
        config = FlashAttentionConfig(precision_mode="fp32")
        with torch.autocast("cpu", torch.bfloat16):
            event = event_of(lambda: flash_attention_forward(*inputs, config))
        assert event.problem.precision is Precision.FP32

    def test_a_cast_does_not_hide_inputs_of_several_dtypes(
        self, draw: Draw, machine: Install
    ) -> None:
        machine("cpu_amx")
        query, key, value = draw()
        with pytest.raises(DTypeError, match="query, key and value: expected one dtype"):
            flash_attention_forward(
                query, key.double(), value, FlashAttentionConfig(precision_mode="bf16")
            )

    def test_gradients_pass_through_the_cast(self, draw: Draw, machine: Install) -> None:
        machine("cpu_amx")
        inputs = draw(grad=True)
        output = flash_attention_forward(*inputs, FlashAttentionConfig(precision_mode="bf16"))
        for gradient in torch.autograd.grad(output.sum(), inputs[2:]):
            assert gradient.dtype == torch.float32 and bool(gradient.any())
