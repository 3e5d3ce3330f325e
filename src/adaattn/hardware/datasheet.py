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


@dataclass(frozen=True, slots=True)
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
    bf16: float
    fp16: float
    fp8: float
    int8: float
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
    # card, pattern, fp64, fp32, bf16, fp16, fp8, int8, bandwidth, source
    Datasheet("V100 SXM2", r"V100-SXM[23]", 7.8, 15.7, 0, 125, 0, 0, 900, _VOLTA),
    Datasheet("V100 PCIe", r"V100-PCIE", 7, 14, 0, 112, 0, 0, 900, _VOLTA),
    Datasheet("T4", r"T4", 0.25, 8.1, 0, 65, 0, 130, 300, _T4),
    Datasheet("RTX 2080 Ti", r"RTX 2080 Ti", 0.42, 13.4, 0, 53.8, 0, 215.2, 616, _TURING),
    Datasheet("A100 40GB", r"A100-(SXM4|PCIE)-40GB", 19.5, 19.5, 312, 312, 0, 624, 1555, _A100),
    Datasheet("A100 SXM 80GB", r"A100-SXM4-80GB", 19.5, 19.5, 312, 312, 0, 624, 2039, _A100),
    Datasheet("A100 PCIe 80GB", r"A100 80GB PCIe", 19.5, 19.5, 312, 312, 0, 624, 1935, _A100),
    Datasheet("A10", r"A10", 0.49, 31.2, 125, 125, 0, 250, 600, _A10),
    Datasheet("RTX 3090", r"RTX 3090", 0.56, 35.6, 71, 71, 0, 284, 936, _GA102),
    Datasheet("L4", r"L4", 0.47, 30.3, 121, 121, 242.5, 242.5, 300, _L4),
    Datasheet("L40S", r"L40S", 1.43, 91.6, 362.05, 362.05, 733, 733, 864, _L40S),
    Datasheet("RTX 4090", r"RTX 4090", 1.29, 82.6, 165.2, 165.2, 330.3, 660.6, 1008, _ADA),
    Datasheet("RTX 5090", r"RTX 5090", 1.64, 104.8, 209.5, 209.5, 419, 838, 1792, _BLACKWELL_RTX),
    Datasheet("H100 SXM", r"H100 (80GB HBM3|SXM5?)", 67, 67, 989.5, 989.5, 1979, 1979, 3350, _H100),
    Datasheet("H100 PCIe", r"H100 PCIe", 51, 51, 756.5, 756.5, 1513, 1513, 2000, _H100),
    Datasheet("H100 NVL", r"H100 NVL", 60, 60, 835.5, 835.5, 1670.5, 1670.5, 3900, _H100),
    Datasheet("H200", r"H200", 67, 67, 989.5, 989.5, 1979, 1979, 4800, _H200),
    Datasheet("H200 NVL", r"H200 NVL", 60, 60, 835.5, 835.5, 1670.5, 1670.5, 4800, _H200),
    Datasheet("B200", r"B200", 37, 75, 2250, 2250, 4500, 4500, 7700, _B200),
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
