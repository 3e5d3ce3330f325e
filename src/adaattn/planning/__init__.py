"""The decision layer: numbers in, `Decision` out. No tensors, no clock, no I/O."""

from adaattn.planning.plan import decide, head_budgets, measuring_cost_ms, worth_measuring
from adaattn.planning.precision import FP16_SAFE
from adaattn.planning.simplify import simplify
from adaattn.planning.support import reasons, serving

__all__ = [
    "FP16_SAFE",
    "decide",
    "head_budgets",
    "measuring_cost_ms",
    "reasons",
    "serving",
    "simplify",
    "worth_measuring",
]
