"""How much memory a device has, has left, and used at most during a block of code."""

import ctypes
import gc
import os
import re
import sys
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows has no such module
    resource = None  # type: ignore[assignment]

__all__ = [
    "PeakMemory",
    "free_memory_bytes",
    "host_memory_bytes",
    "peak_memory",
    "peak_so_far",
    "return_freed_memory",
]

_PROC_STATUS = Path("/proc/self/status")
_PROC_CLEAR = Path("/proc/self/clear_refs")
_PROC_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

# Above this the kernel's memory.limit_in_bytes means "no limit".
_NO_LIMIT = 1 << 60

# The kernel batches its counters per thread; a peak this far above the present was not reset.
_RESET_SLACK_BYTES = 16 << 20


def free_memory_bytes(device: torch.device | str) -> int | None:
    """Return how many bytes can still be allocated, or None where the system does not tell.

    On CUDA this counts what the driver has free and what PyTorch's allocator keeps unused; on
    a CPU what the kernel calls available, within the limit of the control group.

    Args:
        device: a CPU or CUDA device.
    """
    chosen = torch.device(device)
    if chosen.type == "cuda":
        free, _ = torch.cuda.mem_get_info(chosen)
        kept = torch.cuda.memory_reserved(chosen) - torch.cuda.memory_allocated(chosen)
        return int(free + kept)
    available = _kilobytes(_PROC_MEMINFO, "MemAvailable")
    limit, used = _cgroup_memory()
    left = None if limit is None else max(limit - used, 0)
    known = [value for value in (available, left) if value is not None]
    return min(known) if known else None


def host_memory_bytes() -> int:
    """Return the memory that this process may use at most, in bytes; 0 if unknown."""
    limit, _ = _cgroup_memory()
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = 0
    return min(total, limit) if limit is not None and total else limit or total


def peak_so_far(device_type: str) -> int | None:
    """Return the most memory that this process used so far, in bytes; None where unknown.

    On CUDA PyTorch's allocations on the current device since the counter was reset; else the
    resident memory of the process since it began. Costs about a microsecond.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_memory(device: torch.device | str) -> "PeakMemory":
    """Return a context manager that measures the peak memory of its block.

    On CUDA it counts PyTorch's allocations, on Linux the resident memory of the process; it
    resets the counter that it reads, so a block inside a block spoils the outer one, and on
    CUDA ``torch.cuda.max_memory_allocated`` starts anew.

    Args:
        device: a CPU or CUDA device.

    Example:
        >>> import torch
        >>> from adaattn.hardware import peak_memory
        >>> with peak_memory("cpu") as peak:
        ...     ones = torch.ones(1 << 24)
        >>> peak.added_bytes is None or peak.added_bytes > 0
        True
    """
    return PeakMemory(torch.device(device))


def return_freed_memory() -> None:
    """Give freed host memory back to the system: glibc would keep it and hide the next peak."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class PeakMemory:
    """The peak of one block: read it after the block.

    Attributes:
        peak_bytes: most memory in use during the block; None where it cannot be measured.
        added_bytes: the same above what was in use when the block began.
    """

    __slots__ = ("_device", "_start", "added_bytes", "peak_bytes")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: int | None = None
        self.peak_bytes: int | None = None
        self.added_bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        """Reset the counter of the device."""
        self.peak_bytes = self.added_bytes = None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        else:
            self._start = _reset_host_peak()
        return self

    def __exit__(self, *_: object) -> None:
        """Read the counter."""
        if self._start is None:
            return
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            self.peak_bytes = _kilobytes(_PROC_STATUS, "VmHWM")
        if self.peak_bytes is not None:
            self.added_bytes = max(self.peak_bytes - self._start, 0)


def _reset_host_peak() -> int | None:
    """Return the resident bytes after the kernel forgot the peak; None if it did not."""
    try:
        _PROC_CLEAR.write_text("5")
    except OSError:
        return None
    resident = _kilobytes(_PROC_STATUS, "VmRSS")
    peak = _kilobytes(_PROC_STATUS, "VmHWM")
    if resident is None or peak is None or peak > resident + _RESET_SLACK_BYTES:
        return None
    return resident


def _kilobytes(path: Path, field: str) -> int | None:
    """Return the bytes of a ``field:  123 kB`` line of a file in /proc, or None."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _cgroup_memory() -> tuple[int | None, int]:
    """Return limit (None if none) and use of the control group, version 2 or 1."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((_CGROUP / limit_name).read_text())
            used = int((_CGROUP / used_name).read_text())
        except (OSError, ValueError):
            continue
        if limit < _NO_LIMIT:
            return limit, used
    return None, 0
