"""What ``--device`` means, and the cards that ``adaattn plan`` knows without having them."""

import re
from dataclasses import replace

from adaattn.errors import DeviceError
from adaattn.hardware import probe
from adaattn.hardware.datasheet import datasheet_rates
from adaattn.hardware.probe import resolve
from adaattn.hardware.tables import timings_of
from adaattn.spec import HardwareFacts, Precision

__all__ = ["CARDS", "check_device", "facts_of"]

_GIB = 1024**3
_MIB = 1024**2
_BASE = (Precision.FP64, Precision.FP32)
_VOLTA = (*_BASE, Precision.FP16)
_TURING = (*_VOLTA, Precision.INT8)
_AMPERE = (*_TURING, Precision.BF16)
_ADA = (*_AMPERE, Precision.FP8_E4M3, Precision.FP8_E5M2)

# Name: driver's name, compute capability, memory GiB, multiprocessors, L2 MiB, formats.
# From the data sheets named in `adaattn.hardware.datasheet` and NVIDIA's architecture papers.
CARDS: dict[str, tuple[str, tuple[int, int], int, int, int, tuple[Precision, ...]]] = {
    "v100": ("Tesla V100-SXM2-32GB", (7, 0), 32, 80, 6, _VOLTA),
    "t4": ("Tesla T4", (7, 5), 16, 40, 4, _TURING),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 80, 108, 40, _AMPERE),
    "rtx3090": ("NVIDIA GeForce RTX 3090", (8, 6), 24, 82, 6, _AMPERE),
    "l4": ("NVIDIA L4", (8, 9), 24, 58, 48, _ADA),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9), 24, 128, 72, _ADA),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 80, 132, 50, _ADA),
    "h200": ("NVIDIA H200", (9, 0), 141, 132, 50, _ADA),
    "b200": ("NVIDIA B200", (10, 0), 180, 148, 126, _ADA),
}


def check_device(name: str, *, or_card: bool = False) -> None:
    """Refuse a device that nothing has the name of, or that is not here.

    Args:
        name: what came with ``--device``.
        or_card: one of `CARDS` will do.

    Raises:
        DeviceError: so it is.
    """
    if or_card and name.lower() in CARDS:
        return
    if re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", name) is None:
        known = ", ".join(["auto", "cpu", "cuda", "cuda:N", *(CARDS if or_card else ())])
        hint = "adaattn plan alone knows cards that are not here" if name.lower() in CARDS else ""
        raise DeviceError.got("device", f"one of {known}", repr(name), hint)
    resolve(None if name == "auto" else name)


def facts_of(name: str) -> HardwareFacts:
    """Return the facts of a device of this machine, or of a card by its name.

    Args:
        name: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or one of `CARDS`.

    Raises:
        DeviceError: nothing has that name.
    """
    check_device(name, or_card=True)
    if name.lower() not in CARDS:
        return probe(None if name == "auto" else name)
    driver_name, capability, memory, processors, cache, formats = CARDS[name.lower()]
    rates = datasheet_rates(driver_name)
    assert rates is not None, f"{driver_name} has no data sheet"
    facts = HardwareFacts(
        device_type="cuda",
        name=driver_name,
        compute_capability=capability,
        memory_bytes=memory * _GIB,
        num_processors=processors,
        l2_bytes=cache * _MIB,
        instructions=formats,
        rates=rates,
    )
    return replace(facts, timings=timings_of(facts))
