"""Executors. Each says what it can do (data) and does it; none chooses or falls back."""

from adaattn.backends.execute import execute, run_group, slice_heads
from adaattn.backends.interface import Direct, Result, Tensors, num_taken
from adaattn.backends.registry import (
    capabilities,
    capabilities_asked_for,
    capability_named,
    direct,
    exact_in_bounded_memory,
    is_ready,
    load,
    register,
    samplers,
)
from adaattn.backends.tiles import forget as forget_tiles

__all__ = [
    "Direct",
    "Result",
    "Tensors",
    "capabilities",
    "capabilities_asked_for",
    "capability_named",
    "direct",
    "exact_in_bounded_memory",
    "execute",
    "forget_tiles",
    "is_ready",
    "load",
    "num_taken",
    "register",
    "run_group",
    "samplers",
    "slice_heads",
]
