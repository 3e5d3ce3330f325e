"""AdaAttn: attention that adapts.

Given q, k, v, the hardware and the quality that its user can afford, it picks the cheapest
way to compute attention that keeps that quality, says what it chose and why, and bounds or
measures the error.

Names are loaded when first used: ``import adaattn`` imports neither Triton nor Transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from adaattn import errors, hardware, models
    from adaattn._events import AttentionEvent, record_events
    from adaattn.attention.adaattn import AdaAttention
    from adaattn.attention.adaptive_precision import AdaptivePrecisionAttention
    from adaattn.attention.adaptive_rank import AdaptiveRankAttention
    from adaattn.attention.dense import DenseAttention
    from adaattn.attention.statistics import AttentionStatistics
    from adaattn.backends.block_list import BlockList
    from adaattn.cache import KVCache
    from adaattn.call.history import History
    from adaattn.call.outputs import AuxOutput, AuxRequest
    from adaattn.functional import plan_attention, scaled_dot_product_attention
    from adaattn.integrations.conversion import ConversionReport, convert
    from adaattn.integrations.pytorch import SdpaPatch, patch_sdpa
    from adaattn.kernels.flash_attention import AdaptiveFlashAttention
    from adaattn.policies import PRESETS, current_policy, load_policy, save_policy, use_policy
    from adaattn.spec import (
        AttentionProblem,
        BlockSparse,
        Capability,
        Decision,
        Exact,
        HardwareFacts,
        HeadGroup,
        Launch,
        LowRank,
        Method,
        MethodErrors,
        Plan,
        Policy,
        Precision,
        Scheme,
        TensorStats,
    )
    from adaattn.tuning import tune
    from adaattn.warming import warmup

__version__ = "0.1.0"

_EXPORTS: Final = {
    "adaattn._events": ("AttentionEvent", "record_events"),
    "adaattn.attention.adaattn": ("AdaAttention",),
    "adaattn.attention.adaptive_precision": ("AdaptivePrecisionAttention",),
    "adaattn.attention.adaptive_rank": ("AdaptiveRankAttention",),
    "adaattn.attention.dense": ("DenseAttention",),
    "adaattn.attention.statistics": ("AttentionStatistics",),
    "adaattn.backends.block_list": ("BlockList",),
    "adaattn.cache": ("KVCache",),
    "adaattn.functional": ("plan_attention", "scaled_dot_product_attention"),
    "adaattn.integrations.conversion": ("ConversionReport", "convert"),
    "adaattn.integrations.pytorch": ("SdpaPatch", "patch_sdpa"),
    "adaattn.call.history": ("History",),
    "adaattn.call.outputs": ("AuxOutput", "AuxRequest"),
    "adaattn.kernels.flash_attention": ("AdaptiveFlashAttention",),
    "adaattn.policies": (
        "PRESETS",
        "current_policy",
        "load_policy",
        "save_policy",
        "use_policy",
    ),
    "adaattn.spec": (
        "AttentionProblem",
        "BlockSparse",
        "Capability",
        "Decision",
        "Exact",
        "HardwareFacts",
        "HeadGroup",
        "Launch",
        "LowRank",
        "Method",
        "MethodErrors",
        "Plan",
        "Policy",
        "Precision",
        "Scheme",
        "TensorStats",
    ),
    "adaattn.tuning": ("tune",),
    "adaattn.warming": ("warmup",),
}
_MODULES: Final = ("errors", "hardware", "models")
_HOME: Final = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "PRESETS",
    "AdaAttention",
    "AdaptiveFlashAttention",
    "AdaptivePrecisionAttention",
    "AdaptiveRankAttention",
    "AttentionEvent",
    "AttentionProblem",
    "AttentionStatistics",
    "AuxOutput",
    "AuxRequest",
    "BlockList",
    "BlockSparse",
    "Capability",
    "ConversionReport",
    "Decision",
    "DenseAttention",
    "Exact",
    "HardwareFacts",
    "HeadGroup",
    "History",
    "KVCache",
    "Launch",
    "LowRank",
    "Method",
    "MethodErrors",
    "Plan",
    "Policy",
    "Precision",
    "Scheme",
    "SdpaPatch",
    "TensorStats",
    "__version__",
    "convert",
    "current_policy",
    "errors",
    "hardware",
    "load_policy",
    "models",
    "patch_sdpa",
    "plan_attention",
    "record_events",
    "save_policy",
    "scaled_dot_product_attention",
    "tune",
    "use_policy",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name in _HOME:
        found = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        found = importlib.import_module(f"adaattn.{name}")
    else:
        raise AttributeError(f"module 'adaattn' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
