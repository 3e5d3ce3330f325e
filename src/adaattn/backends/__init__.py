"""Executors. Each says what it can do (data) and does it; none chooses or falls back."""

from adaattn.backends.execute import execute, run_group, slice_heads
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.registry import (
    capabilities,
    capabilities_asked_for,
    capability_named,
    load,
)

__all__ = [
    "Result",
    "Tensors",
    "capabilities",
    "capabilities_asked_for",
    "capability_named",
    "execute",
    "load",
    "run_group",
    "slice_heads",
]
