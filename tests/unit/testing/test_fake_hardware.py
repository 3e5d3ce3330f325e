"""Invented machines are plausible: the instructions of their generation, ordered rates."""

import pytest

from adaattn.errors import ArgumentError
from adaattn.spec import HardwareFacts, Precision
from adaattn.testing import fake_facts

MACHINES = ("h200", "a100", "l40s", "v100", "pascal", "cpu", "cpu_amx")


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_has_a_rate_for_each_instruction_and_for_nothing_else(machine: str) -> None:
    facts = fake_facts(machine)
    assert isinstance(facts, HardwareFacts)
    assert tuple(precision for precision, _ in facts.rates.flops) == facts.instructions
    assert all(rate > facts.rates.bandwidth / 8 for _, rate in facts.rates.flops)
    assert facts.rates.launch_s > 0 and facts.memory_bytes > facts.l2_bytes > 0
    assert facts.device_type == ("cpu" if machine.startswith("cpu") else "cuda")
    assert (facts.compute_capability > (0, 0)) == (facts.device_type == "cuda")


@pytest.mark.parametrize(
    ("machine", "native", "absent"),
    [
        ("h200", Precision.FP8_E4M3, Precision.INT4),
        ("l40s", Precision.FP8_E4M3, None),
        ("a100", Precision.BF16, Precision.FP8_E4M3),
        ("v100", Precision.FP16, Precision.BF16),
        ("pascal", Precision.FP32, Precision.FP16),
        ("cpu_amx", Precision.BF16, Precision.FP16),
        ("cpu", Precision.FP32, Precision.BF16),
    ],
)
def test_each_generation_has_its_number_formats(
    machine: str, native: Precision, absent: Precision | None
) -> None:
    facts = fake_facts(machine)
    assert native in facts.instructions
    assert absent not in facts.instructions


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"machine: expected \['a100', .*got 'h300'"):
        fake_facts("h300")
