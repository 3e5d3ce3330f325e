"""Attention as modules: drop-ins for ``torch.nn.MultiheadAttention`` that adapt."""

from adaattn.attention.adaattn import AdaAttention
from adaattn.attention.adaptive_precision import AdaptivePrecisionAttention
from adaattn.attention.adaptive_rank import AdaptiveRankAttention
from adaattn.attention.base import BaseAttention
from adaattn.attention.config import AttentionConfig, AttentionOptions
from adaattn.attention.dense import DenseAttention
from adaattn.attention.rotary import RotaryConfig, RotaryEmbedding, RotaryScaling
from adaattn.attention.statistics import AttentionStatistics

__all__ = [
    "AdaAttention",
    "AdaptivePrecisionAttention",
    "AdaptiveRankAttention",
    "AttentionConfig",
    "AttentionOptions",
    "AttentionStatistics",
    "BaseAttention",
    "DenseAttention",
    "RotaryConfig",
    "RotaryEmbedding",
    "RotaryScaling",
]
