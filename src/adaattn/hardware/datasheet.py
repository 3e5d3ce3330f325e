"""Rates to plan with: vendors' data sheets.

Tensor rates are dense (no structured sparsity) and accumulate in fp32, as attention does;
GeForce cards run fp16 products twice as fast with fp16 accumulation, which is left out.
A data sheet states peaks: `datasheet_rates` scales them to what products of matrices and
copies reach.
"""

import re
from dataclasses import dataclass

from adaattn.spec import Precision, Rates

__all__ = ["LAUNCH_S", "Datasheet", "datasheet_rates", "find_datasheet"]

_REACHED_FLOPS = 0.8
"""Share of the peak that large bf16 products reach: 790 of 989 TFLOP/s on an H200."""

_REACHED_BANDWIDTH = 0.9
"""Share of the peak that a large copy reaches: 4.2 to 4.3 of 4.8 TB/s on an H200."""

LAUNCH_S = 5e-6
"""One eager operation of PyTorch on a server CPU, 2 to 8 microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """Peak rates of one card.

    Args:
        card: what people call it.
        pattern: regular expression that the driver's name of the card matches.
        fp64: TFLOP/s of matrix products, tensor cores included.
        fp32: TFLOP/s without TF32.
        bf16: dense TFLOP/s with fp32 accumulation; 0 when the card lacks it.
        fp16: the same.
        fp8: the same.
        int8: dense TOP/s with int32 accumulation; 0 when the card lacks it.
        bandwidth: GB/s of main memory.
        source: title and address of the document.
    """

    card: str
    pattern: str
    fp64: float
    fp32: float
    bf16: float = 0.0
    fp16: float = 0.0
    fp8: float = 0.0
    int8: float = 0.0
    bandwidth: float
    source: str


_VOLTA = (
    "NVIDIA V100 datasheet, https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)
_T4 = (
    "NVIDIA T4 datasheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/"
    "tesla-t4/t4-tensor-core-datasheet-951643.pdf"
)
_TURING = (
    "NVIDIA Turing GPU architecture whitepaper, https://images.nvidia.com/aem-dam/en-zz/Solutions/"
    "design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_A100 = (
    "NVIDIA A100 datasheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/"
    "pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_A10 = (
    "NVIDIA A10 datasheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/"
    "pdf/a10-datasheet.pdf"
)
_GA102 = (
    "NVIDIA Ampere GA102 GPU architecture whitepaper, https://www.nvidia.com/content/PDF/"
    "nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_ADA = (
    "NVIDIA Ada GPU architecture whitepaper, https://images.nvidia.com/aem-dam/Solutions/geforce/"
    "ada/nvidia-ada-gpu-architecture.pdf"
)
_L4 = "NVIDIA L4 specifications, https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "NVIDIA L40S specifications, https://www.nvidia.com/en-us/data-center/l40s/"
_BLACKWELL_RTX = (
    "NVIDIA RTX Blackwell GPU architecture whitepaper, https://images.nvidia.com/aem-dam/Solutions/"
    "geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_H100 = "NVIDIA H100 specifications, https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "NVIDIA H200 specifications, https://www.nvidia.com/en-us/data-center/h200/"
_B200 = "NVIDIA HGX B200 specifications, https://www.nvidia.com/en-us/data-center/hgx/"

# Where a document states rates with sparsity only, half of them is entered. fp64 of cards
# without fp64 units is 1/32 (Turing) or 1/64 (GA102, Ada, GB202) of fp32: CUDA C++ Programming
# Guide, "Throughput of Native Arithmetic Instructions".
_TABLE = (
    Datasheet(
        card="V100 SXM2",
        pattern=r"V100-SXM[23]",
        fp64=7.8,
        fp32=15.7,
        fp16=125,
        bandwidth=900,
        source=_VOLTA,
    ),
    Datasheet(
        card="V100 PCIe",
        pattern=r"V100-PCIE",
        fp64=7.0,
        fp32=14.0,
        fp16=112,
        bandwidth=900,
        source=_VOLTA,
    ),
    Datasheet(
        card="T4",
        pattern=r"T4",
        fp64=0.25,
        fp32=8.1,
        fp16=65,
        int8=130,
        bandwidth=300,
        source=_T4,
    ),
    Datasheet(
        card="RTX 2080 Ti",
        pattern=r"RTX 2080 Ti",
        fp64=0.42,
        fp32=13.4,
        fp16=53.8,
        int8=215.2,
        bandwidth=616,
        source=_TURING,
    ),
    Datasheet(
        card="A100 40GB",
        pattern=r"A100-(SXM4|PCIE)-40GB",
        fp64=19.5,
        fp32=19.5,
        bf16=312,
        fp16=312,
        int8=624,
        bandwidth=1555,
        source=_A100,
    ),
    Datasheet(
        card="A100 SXM 80GB",
        pattern=r"A100-SXM4-80GB",
        fp64=19.5,
        fp32=19.5,
        bf16=312,
        fp16=312,
        int8=624,
        bandwidth=2039,
        source=_A100,
    ),
    Datasheet(
        card="A100 PCIe 80GB",
        pattern=r"A100 80GB PCIe",
        fp64=19.5,
        fp32=19.5,
        bf16=312,
        fp16=312,
        int8=624,
        bandwidth=1935,
        source=_A100,
    ),
    Datasheet(
        card="A10",
        pattern=r"A10",
        fp64=0.49,
        fp32=31.2,
        bf16=125,
        fp16=125,
        int8=250,
        bandwidth=600,
        source=_A10,
    ),
    Datasheet(
        card="RTX 3090",
        pattern=r"RTX 3090",
        fp64=0.56,
        fp32=35.6,
        bf16=71,
        fp16=71,
        int8=284,
        bandwidth=936,
        source=_GA102,
    ),
    Datasheet(
        card="L4",
        pattern=r"L4",
        fp64=0.47,
        fp32=30.3,
        bf16=121,
        fp16=121,
        fp8=242.5,
        int8=242.5,
        bandwidth=300,
        source=_L4,
    ),
    Datasheet(
        card="L40S",
        pattern=r"L40S",
        fp64=1.43,
        fp32=91.6,
        bf16=362.05,
        fp16=362.05,
        fp8=733,
        int8=733,
        bandwidth=864,
        source=_L40S,
    ),
    Datasheet(
        card="RTX 4090",
        pattern=r"RTX 4090",
        fp64=1.29,
        fp32=82.6,
        bf16=165.2,
        fp16=165.2,
        fp8=330.3,
        int8=660.6,
        bandwidth=1008,
        source=_ADA,
    ),
    Datasheet(
        card="RTX 5090",
        pattern=r"RTX 5090",
        fp64=1.64,
        fp32=104.8,
        bf16=209.5,
        fp16=209.5,
        fp8=419,
        int8=838,
        bandwidth=1792,
        source=_BLACKWELL_RTX,
    ),
    Datasheet(
        card="H100 SXM",
        pattern=r"H100 (80GB HBM3|SXM5?)",
        fp64=67,
        fp32=67,
        bf16=989.5,
        fp16=989.5,
        fp8=1979,
        int8=1979,
        bandwidth=3350,
        source=_H100,
    ),
    Datasheet(
        card="H100 PCIe",
        pattern=r"H100 PCIe",
        fp64=51,
        fp32=51,
        bf16=756.5,
        fp16=756.5,
        fp8=1513,
        int8=1513,
        bandwidth=2000,
        source=_H100,
    ),
    Datasheet(
        card="H100 NVL",
        pattern=r"H100 NVL",
        fp64=60,
        fp32=60,
        bf16=835.5,
        fp16=835.5,
        fp8=1670.5,
        int8=1670.5,
        bandwidth=3900,
        source=_H100,
    ),
    Datasheet(
        card="H200",
        pattern=r"H200",
        fp64=67,
        fp32=67,
        bf16=989.5,
        fp16=989.5,
        fp8=1979,
        int8=1979,
        bandwidth=4800,
        source=_H200,
    ),
    Datasheet(
        card="H200 NVL",
        pattern=r"H200 NVL",
        fp64=60,
        fp32=60,
        bf16=835.5,
        fp16=835.5,
        fp8=1670.5,
        int8=1670.5,
        bandwidth=4800,
        source=_H200,
    ),
    Datasheet(
        card="B200",
        pattern=r"B200",
        fp64=37,
        fp32=75,
        bf16=2250,
        fp16=2250,
        fp8=4500,
        int8=4500,
        bandwidth=7700,
        source=_B200,
    ),
)


def find_datasheet(name: str) -> Datasheet | None:
    """Return the data sheet of the card that the driver names so, or None.

    The whole name must match: laptop variants ("RTX 4090 Laptop GPU") and slices of a card
    ("A100-SXM4-40GB MIG 1g.5gb") are other devices, and get no card's rates.

    Example:
        >>> from adaattn.hardware.datasheet import find_datasheet
        >>> find_datasheet("NVIDIA A100-SXM4-80GB").card
        'A100 SXM 80GB'
    """
    for sheet in _TABLE:
        optional = r"(NVIDIA |Tesla |GeForce )*"
        memory = r"([- ]\d+ ?GB)?"
        if re.fullmatch(f"{optional}{sheet.pattern}{memory}", name.strip(), re.IGNORECASE):
            return sheet
    return None


def datasheet_rates(name: str) -> Rates | None:
    """Return what the card of this name should reach by its data sheet, or None if unknown."""
    sheet = find_datasheet(name)
    if sheet is None:
        return None
    peaks = (
        (Precision.FP64, sheet.fp64),
        (Precision.FP32, sheet.fp32),
        (Precision.BF16, sheet.bf16),
        (Precision.FP16, sheet.fp16),
        (Precision.FP8_E4M3, sheet.fp8),
        (Precision.FP8_E5M2, sheet.fp8),
        (Precision.INT8, sheet.int8),
    )
    return Rates(
        flops=tuple((p, tera * 1e12 * _REACHED_FLOPS) for p, tera in peaks if tera > 0),
        bandwidth=sheet.bandwidth * 1e9 * _REACHED_BANDWIDTH,
        launch_s=LAUNCH_S,
        source=f"datasheet {sheet.source}",
    )
