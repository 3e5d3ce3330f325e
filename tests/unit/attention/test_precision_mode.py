"""Number formats by name: what there is, what a device makes of the wish, and how it is said."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn._dtypes import torch_dtype
from adaattn.attention import precision_mode
from adaattn.attention.precision_mode import (
    MODES,
    checked_mode,
    in_precision,
    named_precision,
    why_not,
)
from adaattn.backends import capabilities
from adaattn.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from adaattn.spec import Precision
from adaattn.testing import fake_facts

FP32, BF16, FP16 = Precision.FP32, Precision.BF16, Precision.FP16
MACHINES = ("h200", "a100", "l40s", "v100", "pascal", "cpu", "cpu_amx")


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    facts = fake_facts(machine)
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)


def draw(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 4, 8).to(dtype) for _ in range(3)]


def in_mode(mode: str, *call: Any) -> tuple[Any, str]:
    return in_precision(f"precision_mode {mode!r}", MODES[mode], *call)


class Notes:
    """Stands for the call, and keeps what it was given."""

    def __init__(self, *more: Any) -> None:
        self.seen: list[tuple[torch.Tensor, ...]] = []
        self.autocast: list[bool] = []
        self._more = more

    def __call__(self, *tensors: torch.Tensor) -> Any:
        self.seen.append(tensors)
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        return (tensors[0] + 1, *self._more) if self._more else tensors[0] + 1


class TestNames:
    """Modes and formats as users write them."""

    @pytest.mark.parametrize("mode", ["auto", "fp32", "bf16", "fp16", "fp8"])
    def test_each_promised_mode_exists(self, mode: str) -> None:
        assert checked_mode(mode) == mode
        assert mode in MODES

    @pytest.mark.parametrize("mode", ["", "FP16", "int8", "fp64", "half", "auto "])
    def test_an_unknown_mode_is_answered_with_what_there_is(self, mode: str) -> None:
        message = "precision_mode: expected one of 'auto', 'fp32', 'bf16', 'fp16', 'fp8', got "
        with pytest.raises(ArgumentError, match=message):
            checked_mode(mode)

    @pytest.mark.parametrize("mode", [None, 16, Precision.FP16, torch.float16, ["fp16"]])
    def test_a_mode_is_a_string(self, mode: object) -> None:
        with pytest.raises(ArgumentTypeError, match="precision_mode: expected a string, got "):
            checked_mode(mode)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("fp32", FP32),
            ("bf16", BF16),
            ("fp16", FP16),
            ("fp8", Precision.FP8_E4M3),
            (Precision.INT8, Precision.INT8),
            (FP32, FP32),
        ],
    )
    def test_a_format_is_named_by_a_mode_or_itself(
        self, name: Precision | str, expected: Precision
    ) -> None:
        assert named_precision(name) is expected

    @pytest.mark.parametrize("name", ["auto", "fp4", "BF16", ""])
    def test_an_unknown_format_is_answered_with_what_there_is(self, name: str) -> None:
        message = "precision: expected one of 'fp32', 'bf16', 'fp16', 'fp8', got "
        with pytest.raises(ArgumentError, match=message):
            named_precision(name)

    @pytest.mark.parametrize("name", [None, 1, torch.float16])
    def test_a_format_is_a_string_or_a_precision(self, name: object) -> None:
        message = "precision: expected a Precision or 'fp32', 'bf16', 'fp16', 'fp8', got "
        with pytest.raises(ArgumentTypeError, match=message):
            named_precision(name)


class TestDevices:
    """What a device gains from a format."""

    @pytest.mark.parametrize(
        ("machine", "gains"),
        [
            ("h200", {FP32, BF16, FP16}),
            ("l40s", {FP32, BF16, FP16}),
            ("a100", {FP32, BF16, FP16}),
            ("v100", {FP32, FP16}),
            ("pascal", {FP32}),
            ("cpu", {FP32}),
            ("cpu_amx", {FP32, BF16}),
        ],
    )
    def test_a_format_is_of_use_where_the_device_computes_in_it(
        self, monkeypatch: pytest.MonkeyPatch, machine: str, gains: set[Precision]
    ) -> None:
        pretend(monkeypatch, machine)
        asked = (FP32, BF16, FP16, Precision.FP8_E4M3)
        assert {item for item in asked if not why_not(item, "cpu")} == gains

    def test_a_device_that_lacks_a_format_says_what_it_has(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend(monkeypatch, "v100")
        assert why_not(BF16, "cpu") == (
            "Tesla V100-SXM2-32GB computes fp64, fp32, fp16 natively, not it"
        )

    def test_a_device_without_a_name_is_called_by_its_kind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        facts = replace(fake_facts("cpu"), name="")
        monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
        assert why_not(FP16, "cpu") == "cpu computes fp64, fp32 natively, not it"

    @pytest.mark.parametrize("machine", ["h200", "l40s"])
    def test_a_format_without_an_executor_is_of_no_use(
        self, monkeypatch: pytest.MonkeyPatch, machine: str
    ) -> None:
        pretend(monkeypatch, machine)
        assert not any(Precision.FP8_E4M3 in item.precisions for item in capabilities())
        assert why_not(Precision.FP8_E4M3, "cpu") == (
            "no executor of this version computes in fp8_e4m3"
        )


class TestCalls:
    """A call in the format of a mode."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
    def test_auto_leaves_a_call_as_it_is(self, dtype: torch.dtype) -> None:
        tensors, call = draw(dtype), Notes()
        found, note = in_mode("auto", *tensors, call)
        assert note == ""
        assert all(a is b for a, b in zip(call.seen[0], tensors, strict=True))
        assert found.dtype is dtype

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        ("mode", "inside"),
        [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
    )
    def test_a_mode_casts_the_inputs_and_the_result_back(
        self,
        monkeypatch: pytest.MonkeyPatch,
        mode: str,
        inside: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        pretend(monkeypatch, "a100")
        tensors, call = draw(dtype), Notes("weights")
        (output, weights), note = in_mode(mode, *tensors, call)
        assert note == ""
        assert {tensor.dtype for tensor in call.seen[0]} == {inside}
        assert output.dtype is dtype and weights == "weights"
        assert torch.equal(output, (tensors[0].to(inside) + 1).to(dtype))

    @pytest.mark.parametrize("machine", MACHINES)
    @pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
    def test_where_the_device_lacks_it_the_call_is_made_in_it_and_that_is_told(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        machine: str,
        mode: str,
    ) -> None:
        pretend(monkeypatch, machine)
        tensors, call = draw(), Notes()
        with caplog.at_level(logging.INFO, "adaattn"):
            found, note = in_mode(mode, *tensors, call)
        precision = MODES[mode]
        assert precision is not None and found.dtype is torch.float32
        assert {tensor.dtype for tensor in call.seen[0]} == {torch_dtype(precision)}
        reason = "" if precision is FP32 else why_not(precision, "cpu")
        asked = f"precision_mode '{mode}' is computed in as asked, though {reason}"
        assert note == (asked if reason else "")
        assert caplog.messages == ([asked] if reason else [])

    @pytest.mark.parametrize("machine", MACHINES)
    def test_a_format_without_an_executor_is_refused_on_every_device(
        self, monkeypatch: pytest.MonkeyPatch, machine: str
    ) -> None:
        pretend(monkeypatch, machine)
        call = Notes()
        with pytest.raises(UnsupportedError, match="precision_mode 'fp8' cannot serve") as raised:
            in_mode("fp8", *draw(), call)
        assert raised.value.reasons == (
            "expected a format in which an executor computes here ('fp32', 'bf16', 'fp16'), "
            "got fp8_e4m3",
        )
        assert str(raised.value).endswith("Name one of these, or leave the format to the policy.")
        assert not call.seen

    def test_executors_of_other_devices_and_uninstalled_ones_do_not_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend(monkeypatch, "cpu")
        known = capabilities()
        formats = (FP32, Precision.FP8_E4M3)
        elsewhere = replace(known[0], device_types=("cuda",), precisions=formats)
        missing = replace(known[0], unavailable="not installed", precisions=formats)
        monkeypatch.setattr(precision_mode, "capabilities", lambda: (*known, elsewhere, missing))
        with pytest.raises(UnsupportedError, match="got fp8_e4m3"):
            in_mode("fp8", *draw(), Notes())
        here = replace(missing, unavailable="")
        monkeypatch.setattr(precision_mode, "capabilities", lambda: (*known, here))
        found, _ = in_mode("fp8", *draw(), lambda *tensors: tensors)
        assert {tensor.dtype for tensor in found[1:]} == {torch.float8_e4m3fn}

    def test_the_inputs_own_format_by_name_needs_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the device gains nothing from it: it is what was given."""
        pretend(monkeypatch, "cpu")
        tensors, call = draw(torch.float16), Notes()
        found, note = in_mode("fp16", *tensors, call)
        assert (note, found.dtype) == ("", torch.float16)

    def test_autocast_is_switched_off_inside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, "a100")
        tensors, call = draw(), Notes()
        with torch.autocast("cpu", torch.bfloat16):
            in_mode("fp16", *tensors, call)
            assert torch.is_autocast_enabled("cpu")
        assert call.autocast == [False]
        assert call.seen[0][0].dtype is torch.float16

    def test_gradients_flow_through_the_casts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, "a100")
        tensors = [tensor.requires_grad_() for tensor in draw()]
        output, _ = in_mode("bf16", *tensors, Notes())
        output.sum().backward()
        assert tensors[0].grad is not None
        assert torch.equal(tensors[0].grad, torch.ones_like(tensors[0]))

    def test_inputs_of_several_dtypes_are_left_for_the_call_to_refuse(self) -> None:
        query, key, value = draw()
        call = Notes()
        in_mode("bf16", query, key.double(), value, call)
        assert [tensor.dtype for tensor in call.seen[0]] == [
            torch.float32,
            torch.float64,
            torch.float32,
        ]

    @pytest.mark.parametrize("mode", ["auto", "bf16"])
    @pytest.mark.parametrize("wrong", [None, 3, [[1.0]]])
    def test_what_is_no_tensor_is_left_for_the_call_to_refuse(
        self, mode: str, wrong: object
    ) -> None:
        found, note = in_mode(mode, wrong, wrong, wrong, lambda *items: items)
        assert found == (wrong,) * 3 and note == ""

    def test_a_compiled_call_asks_the_machine_outside_its_graph(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch._dynamo.reset()
        pretend(monkeypatch, "a100")
        tensors = draw()

        def call(*items: torch.Tensor) -> torch.Tensor:
            return in_mode("bf16", *items, lambda q, k, v: q @ k.mT @ v)[0]

        compiled = torch.compile(call, backend="eager")
        assert torch.equal(compiled(*tensors), call(*tensors))
