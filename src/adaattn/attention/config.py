"""What an attention module is made of, checked when it is made."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypedDict

import torch

from adaattn._numbers import require_flag, require_integer, require_number
from adaattn.attention.rotary_config import RotaryConfig
from adaattn.call.arguments import Arguments, checked_numbers
from adaattn.errors import ArgumentTypeError, ShapeError

__all__ = ["AttentionConfig", "AttentionOptions"]

_FLAGS: Final = ("bias", "add_bias_kv", "add_zero_attn", "batch_first", "qk_norm", "sinks")


class AttentionOptions(TypedDict, total=False):
    """The keywords that every attention module takes, beside its own.

    They are the fields of `AttentionConfig`, and where the parameters are made: ``device``
    and ``dtype``.
    """

    add_bias_kv: bool
    add_zero_attn: bool
    kdim: int | None
    vdim: int | None
    batch_first: bool
    device: torch.device | str | None
    dtype: torch.dtype | None
    num_kv_heads: int | None
    head_dim: int | None
    out_bias: bool | None
    rotary: RotaryConfig | None
    qk_norm: bool
    qk_norm_eps: float
    window: tuple[int, int] | None
    softcap: float | None
    sinks: bool
    scale: float | None
    layer: int


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What an attention module is made of.

    The first nine fields are those of ``torch.nn.MultiheadAttention``; ``batch_first`` is
    True here.

    Args:
        embed_dim: size of the query's and the output's last dimension.
        num_heads: query heads.
        dropout: probability of dropping a weight, in training only.
        bias: the projections of q, k and v have biases.
        add_bias_kv: one learned key and value more, seen by every query.
        add_zero_attn: one key and value of zeros more, seen by every query.
        kdim: size of the key's last dimension; None is ``embed_dim``.
        vdim: size of the value's last dimension; None is ``embed_dim``.
        batch_first: tensors are [B, L, E], not [L, B, E].
        num_kv_heads: heads of k and v, a divisor of ``num_heads``; None is ``num_heads``.
        head_dim: size of a head; None is ``embed_dim // num_heads``.
        out_bias: the output projection has a bias; None is ``bias``.
        rotary: rotary position embedding of q and k; None is none.
        qk_norm: RMSNorm over each head's q and k, before rotary, as in Qwen3.
        qk_norm_eps: its epsilon.
        window: ``(left, right)`` keys around a query that it sees; -1 is unlimited, None is none.
        softcap: c in c * tanh(s / c) of the scores; None is none.
        sinks: a learned logit for each head joins the softmax denominator.
        scale: factor of the scores; None is 1 / sqrt(head_dim).
        layer: the module's index in its model; -1 is none.

    Raises:
        ShapeError: sizes that do not divide.
        ArgumentError: a number out of range.
        ArgumentTypeError: no integer, no number, or no flag.

    Example:
        >>> config = AttentionConfig(embed_dim=64, num_heads=8, num_kv_heads=2)
        >>> config.size_of_head, config.query_size, config.kv_size
        (8, 64, 16)
    """

    embed_dim: int
    num_heads: int
    dropout: float = 0.0
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    batch_first: bool = True
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_bias: bool | None = None
    rotary: RotaryConfig | None = None
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    window: tuple[int, int] = (-1, -1)
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    layer: int = -1

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("embed_dim", "num_heads"):
            require_integer(name, getattr(self, name), least=1)
        for name in ("kdim", "vdim", "num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), least=1)
        require_integer("layer", self.layer, least=-1)
        for name in _FLAGS:
            require_flag(name, getattr(self, name))
        if self.out_bias is not None:
            require_flag("out_bias", self.out_bias)
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ShapeError.got(
                "embed_dim",
                f"a multiple of num_heads={self.num_heads}",
                self.embed_dim,
                "or give head_dim",
            )
        if self.num_heads % self.kv_heads:
            raise ShapeError.got(
                "num_kv_heads", f"a divisor of num_heads={self.num_heads}", self.kv_heads
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Check what is no size."""
        require_number("dropout", self.dropout, least=0, most=1)
        require_number("qk_norm_eps", self.qk_norm_eps, least=0)
        arguments = Arguments(window=self.window, softcap=self.softcap, scale=self.scale)
        if arguments.head_terms is not None:
            hint = "adaattn.scaled_dot_product_attention takes tensors of numbers of each head"
            wanted = "numbers that serve all heads"
            raise ArgumentTypeError.got(
                "scale, window and softcap of a module", wanted, "a tensor", hint
            )
        window, *_ = checked_numbers(arguments, self.size_of_head)
        object.__setattr__(self, "window", window)
        if self.rotary is None:
            return
        if not isinstance(self.rotary, RotaryConfig):
            raise ArgumentTypeError.got("rotary", "None or a RotaryConfig", repr(self.rotary))
        if self.rotary.head_dim != self.size_of_head:
            raise ShapeError.got(
                "head_dim of rotary", f"{self.size_of_head} as here", self.rotary.head_dim
            )

    def numbers(self) -> dict[str, Any]:
        """Return the keywords of the public call that say more than its defaults, in each call."""
        given: dict[str, Any] = {}
        if self.scale is not None:
            given["scale"] = self.scale
        if self.softcap is not None:
            given["softcap"] = self.softcap
        if self.kv_heads != self.num_heads:
            given["enable_gqa"] = True
        return given

    @cached_property
    def kv_heads(self) -> int:
        """Heads of k and v."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @cached_property
    def size_of_head(self) -> int:
        """Numbers in a head."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @cached_property
    def query_size(self) -> int:
        """Numbers in the query heads of a token, and in those of the output."""
        return self.num_heads * self.size_of_head

    @cached_property
    def kv_size(self) -> int:
        """Numbers in the key heads of a token, and in its value heads."""
        return self.kv_heads * self.size_of_head

    @cached_property
    def key_size(self) -> int:
        """Numbers in a key before projection."""
        return self.embed_dim if self.kdim is None else self.kdim

    @cached_property
    def value_size(self) -> int:
        """Numbers in a value before projection."""
        return self.embed_dim if self.vdim is None else self.vdim

    @cached_property
    def has_packed_weights(self) -> bool:
        """Whether one matrix, ``in_proj_weight``, holds the projections of q, k and v."""
        return self.key_size == self.value_size == self.embed_dim
