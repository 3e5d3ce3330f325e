"""Executors. Each says what it can do (data) and does it; none chooses or falls back."""

from adaattn.backends.execute import execute, run_group, slice_heads
from adaattn.backends.interface import Direct, Result, Tensors
from adaattn.backends.registry import (
    capabilities,
    capabilities_asked_for,
    capability_named,
    direct,
    load,
)

__all__ = [
    "Direct",
    "Result",
    "Tensors",
    "capabilities",
    "capabilities_asked_for",
    "capability_named",
    "direct",
    "execute",
    "load",
    "run_group",
    "slice_heads",
]
