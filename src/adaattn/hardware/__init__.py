"""What the machine is and what it can do: facts, rates, measured times, memory."""

from adaattn.hardware.memory import (
    PeakMemory,
    free_memory_bytes,
    peak_memory,
    peak_so_far,
    return_freed_memory,
)
from adaattn.hardware.probe import clear_cache, on_clear, probe

__all__ = [
    "PeakMemory",
    "clear_cache",
    "free_memory_bytes",
    "on_clear",
    "peak_memory",
    "peak_so_far",
    "probe",
    "return_freed_memory",
]
