"""Attention whose products are computed in the cheapest number format that keeps the policy.

What the device computes natively decides what may be tried: fp8 on Hopper and Ada, bf16 from
Ampere on, fp16 from Volta on, else fp32 alone; a CPU says what its instructions are. Of those
the fastest whose error, measured on sampled rows of the call, is within the policy's budget is
taken. Softmax and sums are in fp32 whatever the format of the products.
"""

from dataclasses import replace
from typing import Final, Unpack

from adaattn.attention.base import BaseAttention
from adaattn.attention.config import AttentionOptions
from adaattn.attention.runner import Runner
from adaattn.policies import PolicyLike, resolve_policy
from adaattn.spec import Method, Precision

__all__ = ["AdaptivePrecisionAttention"]

_TRIED: Final = (
    Precision.FP32,
    Precision.BF16,
    Precision.FP16,
    Precision.FP8_E4M3,
    Precision.INT8,
)
"""Every format is named, so that each decision says of each why it was taken or not."""


class AdaptivePrecisionAttention(BaseAttention):
    """Multi-head attention in fp32, bf16, fp16 or eight bits, by policy and hardware.

    Args:
        embed_dim: model dimension.
        num_heads: query heads.
        dropout: probability of dropping a weight in training. With dropout errors cannot be
            checked, and the input's own format is kept.
        bias: projections have biases.
        policy: ``"quality"`` keeps the input's format, ``"balanced"`` and ``"speed"`` allow
            the errors of those presets; or a `adaattn.Policy`, whose error budget, audited
            rows and memory budget count here.
        precision_mode: ``"auto"`` chooses by the policy; ``"fp32"``, ``"bf16"``, ``"fp16"``
            and ``"fp8"`` are that format. Where the device gains nothing by it,
            ``get_statistics()["precision_notes"]`` says why; where no executor computes in
            it, such as in fp8, calls raise `adaattn.errors.UnsupportedError`.
        measure_every: calls from one measurement of errors to the next.
        **options: the other settings of `adaattn.attention.config.AttentionConfig`.

    The call, parameters and ``state_dict`` are those of
    `adaattn.attention.base.BaseAttention`. Results have the input's dtype.

    Raises:
        ArgumentError: an unknown precision mode, or a number out of range.
        PolicyError: an unknown policy.
        ShapeError, ArgumentTypeError: as `adaattn.attention.base.BaseAttention`.

    Example:
        >>> import torch
        >>> attention = AdaptivePrecisionAttention(64, 4, precision_mode="bf16")
        >>> output, _ = attention(torch.randn(2, 100, 64))
        >>> output.dtype
        torch.float32
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        policy: PolicyLike = "balanced",
        precision_mode: str = "auto",
        measure_every: int = 8,
        **options: Unpack[AttentionOptions],
    ) -> None:
        named = replace(resolve_policy(policy), methods=(Method.EXACT,), precisions=_TRIED)
        runner = Runner(
            named,
            layer=options.get("layer", -1),
            precision_mode=precision_mode,
            measure_every=measure_every,
        )
        super().__init__(embed_dim, num_heads, dropout, bias, runner=runner, **options)
