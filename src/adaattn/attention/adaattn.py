"""The flagship module: rank, sparsity and precision adapt together, on every executor."""

from typing import Unpack

from adaattn._numbers import require_flag
from adaattn.attention.base import BaseAttention
from adaattn.attention.config import AttentionOptions
from adaattn.attention.runner import Runner
from adaattn.policies import PolicyLike, resolve_policy

__all__ = ["AdaAttention"]


class AdaAttention(BaseAttention):
    """Multi-head attention computed in the cheapest way that keeps the policy, head by head.

    Exact kernels, lower number formats, block sparsity and low rank compete under one error
    budget; `adaattn.plan_attention` explains the choice, ``get_statistics()`` counts it.

    Args:
        embed_dim: model dimension.
        num_heads: query heads.
        dropout: probability of dropping a weight in training. With dropout errors cannot be
            checked, and every call is exact.
        bias: projections have biases.
        policy: a preset, a `adaattn.Policy` or a policy file; None is the ambient policy. The
            default, ``"balanced"``, allows each head's output an error of 1 %; ``"quality"``
            is exact.
        precision_mode: ``"auto"``, or a number format by name, as in
            `adaattn.attention.adaptive_precision.AdaptivePrecisionAttention`.
        enable_gpu_optimization: False keeps calls on a GPU off fused kernels: exact, by matrix
            products with the scores written out, for debugging and comparison. On a CPU it
            changes nothing.
        measure_every: calls from one measurement to the next.
        momentum: share of the old value in each running statistic.
        **options: the other settings of `adaattn.attention.config.AttentionConfig`.

    The call, parameters and ``state_dict`` are those of
    `adaattn.attention.base.BaseAttention`.

    Raises:
        ArgumentError, ArgumentTypeError, PolicyError, ShapeError: as the other modules.

    Example:
        >>> import torch
        >>> attn = AdaAttention(embed_dim=512, num_heads=8, enable_gpu_optimization=True)
        >>> x = torch.randn(2, 64, 512)
        >>> output, weights = attn(x, x, x)
        >>> attn.get_statistics()["flash_ratio"]
        1.0
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        policy: PolicyLike | None = "balanced",
        precision_mode: str = "auto",
        enable_gpu_optimization: bool = True,
        measure_every: int = 8,
        momentum: float = 0.5,
        **options: Unpack[AttentionOptions],
    ) -> None:
        require_flag("enable_gpu_optimization", enable_gpu_optimization)
        runner = Runner(
            None if policy is None else resolve_policy(policy),
            layer=options.get("layer", -1),
            precision_mode=precision_mode,
            measure_every=measure_every,
            momentum=momentum,
            fused_on_gpu=enable_gpu_optimization,
        )
        super().__init__(embed_dim, num_heads, dropout, bias, runner=runner, **options)
