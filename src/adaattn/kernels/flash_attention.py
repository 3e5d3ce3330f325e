"""Fused attention by name: a config, a call, and a module that counts what served it.

A fused kernel is one with online softmax (FlashAttention-2, cuDNN, the memory-efficient
kernel, PyTorch's CPU kernel, FlexAttention). The chain of ``auto`` is: a fused kernel, else
PyTorch's SDPA, else matrix products and a softmax. Where no fused kernel serves, the reason is
logged at level INFO, once for each kind of call, and statistics count the calls under
``fallback_calls``. A step down is an executor that fails when it runs: it is logged as a warning,
is in the call's event, and counts under ``step_downs``. Tensors are [B, H, S, D]; legend in
`adaattn.spec`.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Unpack

import torch

from adaattn.attention.base import BaseAttention
from adaattn.attention.config import AttentionOptions
from adaattn.attention.precision_mode import MODES, checked_mode, in_precision
from adaattn.attention.runner import Runner
from adaattn.call.arguments import Arguments, checked_numbers
from adaattn.call.outputs import AuxOutput, AuxRequest
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.functional import scaled_dot_product_attention
from adaattn.policies import PolicyLike
from adaattn.spec import Align

__all__ = ["AdaptiveFlashAttention", "FlashAttentionConfig", "flash_attention_forward"]

_FROM_STATISTICS: Final = (
    "flash_calls",
    "fallback_calls",
    "fallback_reasons",
    "approximate_calls",
    "flash_ratio",
    "step_downs",
    "peak_memory_bytes",
    "peak_workspace_bytes",
    "share_by_method",
    "share_by_precision",
    "precision_notes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttentionConfig:
    """What a fused attention call is to compute, and in which number format.

    Args:
        is_causal: key j is seen from position p only if j <= p.
        align: whether p counts from the first key (``"top_left"``) or the last one
            (``"bottom_right"``).
        scale: factor of the scores; None is 1 / sqrt(D).
        window: ``(left, right)``; key j is seen when p - left <= j <= p + right; -1 is unlimited.
        softcap: c in c * tanh(s / c); None is none.
        dropout_p: probability of dropping a weight.
        precision_mode: ``"auto"`` leaves the format to the policy; ``"fp32"``, ``"bf16"``,
            ``"fp16"`` and ``"fp8"`` compute in that format. Where the device has no instructions
            for it, the decision and the log say so; where no executor computes in it, such as
            in fp8, calls raise.
        enable_flash: False takes fused kernels out of the chain.

    Raises:
        ArgumentError: an unknown precision mode; a number out of range.
        ArgumentTypeError: a precision mode that is no string; no number where one belongs.

    Flags, and which corner, are checked by the call.

    Example:
        >>> FlashAttentionConfig(is_causal=True, window=(127, 0)).precision_mode
        'auto'
    """

    is_causal: bool = False
    align: str | Align = "top_left"
    scale: float | None = None
    window: tuple[int, int] | None = (-1, -1)
    softcap: float | None = None
    dropout_p: float = 0.0
    precision_mode: str = "auto"
    enable_flash: bool = True

    def __post_init__(self) -> None:
        """Refuse a precision mode that does not exist, and numbers that no call takes."""
        checked_mode(self.precision_mode)
        checked_numbers(Arguments(**self.semantics), head_dim=1)

    @property
    def semantics(self) -> dict[str, Any]:
        """The keywords of `adaattn.scaled_dot_product_attention` that it stands for."""
        return {
            "is_causal": self.is_causal,
            "align": self.align,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
        }


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    config: FlashAttentionConfig | None = None,
    *,
    attn_mask: torch.Tensor | None = None,
    policy: PolicyLike | None = None,
    backend: str = "auto",
    return_aux: AuxRequest | bool | None = None,
) -> Any:
    """Return attention of the inputs, [B, Hq, Sq, Dv], in the dtype of the query.

    Args:
        query: [B, Hq, Sq, D]; float64, float32, bfloat16 or float16.
        key: [B, Hkv, Sk, D]; Hkv divides Hq.
        value: [B, Hkv, Sk, Dv].
        config: what to compute; None is `FlashAttentionConfig` as it stands.
        attn_mask: broadcastable to [B, Hq, Sq, Sk]; boolean (True = attend) or added.
        policy: what the call may lose; None is the ambient policy.
        backend: ``"auto"`` follows the chain; ``"flash"`` is any fused kernel and nothing else;
            an executor's name is that executor and nothing else.
        return_aux: an `AuxRequest`, or True for the decision alone.

    Returns:
        The output, or ``(output, AuxOutput)`` when ``return_aux`` is given.

    Raises:
        ArgumentError: a backend was named and ``enable_flash`` is False; a number out of range.
        ArgumentTypeError: ``config`` is something else.
        UnsupportedError: a named backend cannot serve, every reason is listed; no executor
            computes in the format of ``precision_mode``.
        AdaAttnError: as `adaattn.scaled_dot_product_attention`.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 8, 64, 32)
        >>> k = v = torch.randn(1, 2, 64, 32)
        >>> config = FlashAttentionConfig(is_causal=True)
        >>> out, aux = flash_attention_forward(q, k, v, config, backend="flash", return_aux=True)
        >>> tuple(out.shape), aux.decision.plan.groups[0].capability
        ((1, 8, 64, 32), 'sdpa.flash')
    """
    config = FlashAttentionConfig() if config is None else config
    if not isinstance(config, FlashAttentionConfig):
        got = type(config).__name__
        raise ArgumentTypeError.got("config", "None or a FlashAttentionConfig", got)
    if backend != "auto" and not config.enable_flash:
        raise ArgumentError.got("backend with enable_flash=False", "'auto'", repr(backend))
    settings = config.semantics | {
        "enable_gqa": True,
        "policy": policy,
        "backend": backend if config.enable_flash else "unfused",
        "return_aux": return_aux,
    }

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return scaled_dot_product_attention(query, key, value, attn_mask, **settings)

    mode = config.precision_mode
    found, note = in_precision(f"precision_mode {mode!r}", MODES[mode], query, key, value, run)
    if not return_aux:
        return found
    output, aux = found
    return output, _with_note(aux, note)


class AdaptiveFlashAttention(BaseAttention):
    """Multi-head attention served by fused kernels where one can, that counts what served it.

    Args:
        embed_dim: model dimension.
        num_heads: query heads.
        precision_mode: as in `FlashAttentionConfig`.
        enable_flash: False takes fused kernels out of the chain.
        dropout: probability of dropping a weight in training.
        bias: projections have biases.
        policy: what its calls may lose; None is the ambient policy, exact by default.
        **options: the other settings of `adaattn.attention.config.AttentionConfig`.

    Parameters, ``state_dict`` and the call are those of `BaseAttention`. Weights asked for
    with ``need_weights=True`` come from an executor that has them; the call counts as a
    fallback with its reason.

    Raises:
        ArgumentError: an unknown precision mode; sizes that do not fit.
        ArgumentTypeError: an unknown option.

    Example:
        >>> import torch
        >>> attention = AdaptiveFlashAttention(64, 4)
        >>> x = torch.randn(2, 10, 64)
        >>> output, weights = attention(x, x, x)
        >>> attention.get_flash_statistics()["flash_ratio"]
        1.0
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        precision_mode: str = "auto",
        enable_flash: bool = True,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        policy: PolicyLike | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        runner = Runner(
            policy,
            backend="auto" if enable_flash else "unfused",
            precision_mode=precision_mode,
            layer=options.get("layer", -1),
        )
        super().__init__(embed_dim, num_heads, dropout, bias, runner=runner, **options)

    def get_flash_statistics(self) -> dict[str, Any]:
        """Return how its calls were served, as plain values.

        ``total_calls``, ``precision_mode``, and these of `AttentionStatistics`, which says what
        they mean: ``flash_calls``, ``fallback_calls``, ``fallback_reasons``,
        ``approximate_calls``, ``flash_ratio``, ``step_downs``, ``peak_memory_bytes``,
        ``peak_workspace_bytes``, ``share_by_method``, ``share_by_precision`` and
        ``precision_notes``: how often the device gained nothing by the mode, and why.
        """
        known = self.get_statistics().to_dict()
        return {
            "total_calls": known["calls"],
            **{name: known[name] for name in _FROM_STATISTICS},
            "precision_mode": self.runner.precision_mode,
        }


def _with_note(aux: AuxOutput, note: str) -> AuxOutput:
    """Return the outputs with one remark more in the decision."""
    if not note or aux.decision is None:
        return aux
    return replace(aux, decision=replace(aux.decision, notes=(*aux.decision.notes, note)))
