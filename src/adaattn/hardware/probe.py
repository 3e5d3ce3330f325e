"""Facts of a device, cached. The only caller of ``torch.cuda.get_device_*``.

Nothing is measured here: rates are a data sheet's, else a cautious default, and times come from
tables.
"""

import functools
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from adaattn.errors import DeviceError, expected_got
from adaattn.hardware.datasheet import datasheet_rates
from adaattn.hardware.defaults import default_rates
from adaattn.hardware.memory import host_memory_bytes
from adaattn.hardware.tables import timings_of
from adaattn.spec import HardwareFacts, Precision

__all__ = ["clear_cache", "describe", "on_clear", "probe", "resolve"]

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def probe(device: torch.device | str | None = None) -> HardwareFacts:
    """Return what is known of a device, cached for the process.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``, as a string or a ``torch.device``; None is
            the current CUDA device where there is one, else the CPU.

    Raises:
        DeviceError: the device is neither a CPU nor a CUDA device that this process can see.

    Example:
        >>> from adaattn.hardware import probe
        >>> probe("cpu").device_type
        'cpu'
    """
    if not isinstance(device, torch.device):
        device = resolve(device)
    if device.type == "cpu":
        return _facts("cpu", 0, torch.get_num_threads())
    return _facts("cuda", _checked_index(device), 0)


def describe(device: torch.device | str | None = None) -> HardwareFacts:
    """Return the facts that the device itself tells: without rates and measured times.

    Raises:
        DeviceError: as `probe`.
    """
    chosen = resolve(device)
    if chosen.type == "cpu":
        return _description("cpu", 0, torch.get_num_threads())
    return _description("cuda", chosen.index, 0)


_ON_CLEAR: list[Callable[[], None]] = []


def on_clear(callback: Callable[[], None]) -> None:
    """Call ``callback`` whenever the facts are forgotten: for caches that rest on them."""
    _ON_CLEAR.append(callback)


def clear_cache() -> None:
    """Forget the facts of every device, so that the next `probe` asks the machine again."""
    _existing_index.cache_clear()
    _facts.cache_clear()
    _description.cache_clear()
    for callback in _ON_CLEAR:
        callback()


def resolve(device: torch.device | str | None = None) -> torch.device:
    """Return the device with its index, checked to exist.

    Raises:
        DeviceError: as `probe`.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(_wrong_device(device)) from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", _checked_index(chosen))


def _checked_index(device: torch.device) -> int:
    """Return the index of a CUDA device that exists; the current one's for plain ``"cuda"``."""
    if device.type == "cuda" and cast("int | None", device.index) is None:
        return _existing_index(torch.device("cuda", _current_index()))
    return _existing_index(device)


def _current_index() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


@functools.lru_cache(maxsize=64)
def _existing_index(device: torch.device) -> int:
    if device.type != "cuda":
        raise DeviceError(_wrong_device(device))
    if not torch.cuda.is_available():
        hint = "this PyTorch sees no CUDA device: check the driver and the build of torch"
        raise DeviceError.got("device", "'cpu'", device, hint)
    if device.index >= torch.cuda.device_count():
        expected = f"an index below {torch.cuda.device_count()}"
        raise DeviceError.got("device", expected, device)
    return device.index


def _wrong_device(device: object) -> str:
    return expected_got("device", "'cpu' or 'cuda'", repr(str(device)))


@functools.lru_cache(maxsize=64)
def _facts(device_type: str, index: int, num_threads: int) -> HardwareFacts:
    facts = _description(device_type, index, num_threads)
    known = datasheet_rates(facts.name) if device_type == "cuda" else None
    return replace(facts, rates=known or default_rates(facts), timings=timings_of(facts))


@functools.lru_cache(maxsize=64)
def _description(device_type: str, index: int, num_threads: int) -> HardwareFacts:
    if device_type == "cuda":
        return _describe_cuda(index)
    return _describe_cpu(num_threads)


def _describe_cuda(index: int) -> HardwareFacts:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return HardwareFacts(
        device_type="cuda",
        name=properties.name,
        compute_capability=capability,
        memory_bytes=properties.total_memory,
        num_processors=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", 0),
        instructions=_cuda_instructions(capability, is_rocm=torch.version.hip is not None),
    )


_CUDA_INSTRUCTIONS = (
    (Precision.FP16, (7, 0)),
    (Precision.INT8, (7, 5)),
    (Precision.BF16, (8, 0)),
    (Precision.FP8_E4M3, (8, 9)),
    (Precision.FP8_E5M2, (8, 9)),
)
"""Tensor-core formats and the first compute capability that has them."""


def _cuda_instructions(capability: tuple[int, int], *, is_rocm: bool) -> tuple[Precision, ...]:
    if is_rocm:
        # AMD's numbers are gfx versions: (9, 0) there is not Hopper, and its fp8 is another fp8.
        found = {Precision.FP16, Precision.BF16}
    else:
        found = {precision for precision, first in _CUDA_INSTRUCTIONS if capability >= first}
    return tuple(sorted({Precision.FP64, Precision.FP32, *found}))


def _describe_cpu(num_threads: int) -> HardwareFacts:
    return HardwareFacts(
        device_type="cpu",
        name=_cpu_name(),
        memory_bytes=host_memory_bytes(),
        num_processors=num_threads,
        l2_bytes=_last_level_cache_bytes(),
        instructions=_cpu_instructions(),
        has_tiles=_cpu_has("_is_amx_tile_supported"),
    )


def _cpu_instructions() -> tuple[Precision, ...]:
    found = {Precision.FP64, Precision.FP32}
    if _cpu_has("_is_avx512_bf16_supported") or _cpu_has("_is_amx_tile_supported"):
        found.add(Precision.BF16)
    if _cpu_has("_is_amx_fp16_supported") or "avx512_fp16" in _cpu_flags():
        found.add(Precision.FP16)
    if _cpu_has("_is_vnni_supported"):
        found.add(Precision.INT8)
    return tuple(sorted(found))


def _cpu_has(name: str) -> bool:
    """Return what one of torch.cpu's private questions answers; False where it is not there."""
    return bool(getattr(torch.cpu, name, bool)())


def _cpu_flags() -> frozenset[str]:
    found = re.search(r"^flags\s*:(.*)$", _read(_CPU_INFO), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read(_CPU_INFO), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "cpu"


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _last_level_cache_bytes() -> int:
    """Return the size of the highest cache level of the first core; 0 if unknown."""
    sizes = [0]
    for path in _CPU_CACHES.glob("index*/size"):
        if found := re.fullmatch(r"(\d+)([KMG]?)", _read(path).strip()):
            sizes.append(int(found[1]) * _UNITS[found[2]])
    return max(sizes)


def _read(path: Path) -> str:
    """Return a file of the kernel's, or nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
