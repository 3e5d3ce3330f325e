"""Exact attention as a module."""

from typing import Unpack

from adaattn.attention.base import BaseAttention
from adaattn.attention.config import AttentionOptions
from adaattn.attention.runner import Runner

__all__ = ["DenseAttention"]


class DenseAttention(BaseAttention):
    """Exact multi-head attention, by the fastest executor of the device.

    A drop-in for ``torch.nn.MultiheadAttention``, whose ``state_dict`` it loads and gives;
    `BaseAttention` says where the two differ.

    Args:
        embed_dim: size of the query's and the output's last dimension.
        num_heads: query heads.
        dropout: probability of dropping a weight, in training only.
        bias: the projections have biases.
        **options: `AttentionOptions`, as `AttentionConfig` describes them.

    Example:
        >>> import torch
        >>> from adaattn.attention.dense import DenseAttention
        >>> attention = DenseAttention(64, 8, num_kv_heads=2)
        >>> output, weights = attention(torch.randn(2, 10, 64), is_causal=True)
        >>> tuple(output.shape), weights
        ((2, 10, 64), None)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        **options: Unpack[AttentionOptions],
    ) -> None:
        runner = Runner("quality", layer=options.get("layer", -1))
        super().__init__(embed_dim, num_heads, dropout, bias, runner=runner, **options)
