"""The table of data sheets, by the names that drivers give."""

import pytest

from adaattn.hardware.datasheet import _TABLE, Datasheet, datasheet_rates, find_datasheet
from adaattn.hardware.defaults import default_rates
from adaattn.spec import HardwareFacts, Precision

_NAMES = {
    "V100 SXM2": "Tesla V100-SXM2-32GB",
    "V100 PCIe": "Tesla V100-PCIE-16GB",
    "T4": "Tesla T4",
    "RTX 2080 Ti": "NVIDIA GeForce RTX 2080 Ti",
    "A100 40GB": "NVIDIA A100-PCIE-40GB",
    "A100 SXM 80GB": "NVIDIA A100-SXM4-80GB",
    "A100 PCIe 80GB": "NVIDIA A100 80GB PCIe",
    "A10": "NVIDIA A10",
    "RTX 3090": "NVIDIA GeForce RTX 3090",
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
    "RTX 5090": "NVIDIA GeForce RTX 5090",
    "H100 SXM": "NVIDIA H100 80GB HBM3",
    "H100 PCIe": "NVIDIA H100 PCIe",
    "H100 NVL": "NVIDIA H100 NVL",
    "H200": "NVIDIA H200",
    "H200 NVL": "NVIDIA H200 NVL",
    "B200": "NVIDIA B200",
}


@pytest.mark.parametrize("sheet", _TABLE, ids=lambda sheet: sheet.card)
def test_each_card_is_found_by_the_name_that_its_driver_gives(sheet: Datasheet) -> None:
    assert find_datasheet(_NAMES[sheet.card]) is sheet


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "",
    ],
)
def test_a_card_of_a_similar_name_gets_no_other_cards_rates(name: str) -> None:
    assert find_datasheet(name) is None
    assert datasheet_rates(name) is None


@pytest.mark.parametrize("sheet", _TABLE, ids=lambda sheet: sheet.card)
def test_each_data_sheet_is_plausible_and_has_a_source(sheet: Datasheet) -> None:
    assert "https://" in sheet.source
    assert 0 < sheet.fp64 <= sheet.fp32 < sheet.fp16
    assert sheet.bf16 in (0.0, sheet.fp16)
    assert sheet.fp8 == 0.0 or 1.9 < sheet.fp8 / sheet.fp16 < 2.1
    assert 300 <= sheet.bandwidth <= 8000


def test_rates_are_below_the_peaks_and_leave_out_what_a_card_lacks() -> None:
    rates = datasheet_rates("Tesla V100-SXM2-32GB")

    assert rates is not None
    assert 0.5 * 125e12 < rates.flops_of(Precision.FP16) < 125e12
    assert 0.5 * 900e9 < rates.bandwidth < 900e9
    assert rates.flops_of(Precision.BF16) == 0.0
    assert rates.flops_of(Precision.FP8_E4M3) == 0.0
    assert "volta" in rates.source.lower()


@pytest.mark.parametrize(
    ("name", "capability", "processors"),
    [
        ("Tesla V100-SXM2-32GB", (7, 0), 80),
        ("Tesla T4", (7, 5), 40),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 108),
        ("NVIDIA GeForce RTX 3090", (8, 6), 82),
        ("NVIDIA L4", (8, 9), 58),
        ("NVIDIA GeForce RTX 4090", (8, 9), 128),
        ("NVIDIA H100 PCIe", (9, 0), 114),
        ("NVIDIA H200", (9, 0), 132),
        ("NVIDIA B200", (10, 0), 148),
        ("NVIDIA GeForce RTX 5090", (12, 0), 170),
    ],
)
def test_defaults_of_a_generation_stay_below_its_cards(
    name: str, capability: tuple[int, int], processors: int
) -> None:
    """A default stands in for unknown cards, so it must be cautious on every known one."""
    sheet = find_datasheet(name)
    assert sheet is not None
    facts = HardwareFacts(
        device_type="cuda",
        compute_capability=capability,
        num_processors=processors,
        instructions=(Precision.FP64, Precision.FP32, Precision.FP16),
    )

    rates = default_rates(facts)

    assert 0 < rates.flops_of(Precision.FP16) <= sheet.fp16 * 1e12
    assert 0 < rates.flops_of(Precision.FP32) <= sheet.fp32 * 1e12
    assert 0 < rates.bandwidth <= sheet.bandwidth * 1e9
