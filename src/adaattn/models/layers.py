"""The parts that decoders and encoders share: embeddings, norms, MLPs and blocks.

Shape legend: ``B`` rows, ``L`` new tokens, ``S`` tokens seen so far and new, ``E`` width.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from adaattn.attention.adaattn import AdaAttention
from adaattn.attention.adaptive_precision import AdaptivePrecisionAttention
from adaattn.attention.adaptive_rank import AdaptiveRankAttention
from adaattn.attention.base import BaseAttention
from adaattn.attention.dense import DenseAttention
from adaattn.cache import LayerCache
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.models.config import TransformerConfig
from adaattn.models.kinds import (
    Activation,
    AttentionKind,
    MlpKind,
    NormKind,
    NormPlacement,
    PositionKind,
)

__all__ = ["MLP", "Block", "Embeddings", "make_attention", "make_norm"]

_ATTENTION: dict[AttentionKind, type[BaseAttention]] = {
    AttentionKind.DENSE: DenseAttention,
    AttentionKind.ADAPTIVE_RANK: AdaptiveRankAttention,
    AttentionKind.ADAPTIVE_PRECISION: AdaptivePrecisionAttention,
    AttentionKind.ADA: AdaAttention,
}


def make_norm(config: TransformerConfig) -> nn.Module:
    """Return a fresh normalisation over the width.

    Args:
        config: its kind and epsilon.
    """
    if config.norm is NormKind.RMS:
        return nn.RMSNorm(config.embed_dim, eps=config.norm_eps)
    return nn.LayerNorm(config.embed_dim, eps=config.norm_eps)


def make_attention(config: TransformerConfig, layer: int) -> BaseAttention:
    """Return the attention module of one block.

    Args:
        config: what it is made of.
        layer: index of the block.

    Raises:
        ArgumentTypeError: a setting that the module does not take.
    """
    kind: Any = _ATTENTION[config.attention]
    _check_settings(kind, config.attention_settings)
    made: BaseAttention = kind(
        config.embed_dim,
        config.num_heads,
        config.attention_dropout,
        config.attention_bias,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        out_bias=config.attention_out_bias,
        rotary=config.rotary,
        qk_norm=config.qk_norm,
        qk_norm_eps=config.norm_eps,
        window=config.window(layer),
        softcap=config.softcap,
        scale=config.scale,
        layer=layer,
        **config.attention_settings,
    )
    return made


class Embeddings(nn.Module):
    """Returns the sum of token, position and type embeddings: [B, L, E].

    Args:
        config: which of them there are.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.embed_dim
        self.tokens = nn.Embedding(config.vocab_size, width)
        types = config.type_vocab_size
        self.types = nn.Embedding(types, width) if types else None
        learned = config.positions is PositionKind.LEARNED
        self.positions = nn.Embedding(config.max_positions, width) if learned else None
        self.norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout or 0.0)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the embeddings, [B, L, E].

        Args:
            input_ids: [B, L] int64.
            positions: [B or 1, L] int64.
            token_type_ids: [B, L] int64; None is type 0 everywhere.

        Raises:
            ArgumentError: an index beyond its table, on a CPU; on a GPU CUDA stops the process.
        """
        hidden = _look_up("input_ids", self.tokens, input_ids)
        if self.types is not None:
            first = torch.zeros_like(input_ids[:1])
            types = first if token_type_ids is None else token_type_ids
            hidden = hidden + _look_up("token_type_ids", self.types, types)
        if self.positions is not None:
            hidden = hidden + _look_up("positions", self.positions, positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.dropout(hidden)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Returns down(act(up(x))), or with a gate down(act(gate(x)) * up(x)).

    Args:
        config: its sizes, activation and kind.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.mlp_dim is not None
        width, inner, bias = config.embed_dim, config.mlp_dim, config.mlp_bias
        gated = config.mlp is MlpKind.GATED
        self.gate = nn.Linear(width, inner, bias=bias) if gated else None
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B, L, E].

        Args:
            hidden: [B, L, E].
        """
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))  # type: ignore[no-any-return]
        gated = self.activation(self.gate(hidden)) * self.up(hidden)
        return self.down(gated)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Returns the residual stream after one attention and one MLP: [B, L, E].

    Args:
        config: what the block is made of.
        layer: its index.
        is_causal: tokens see only themselves and those before.
    """

    def __init__(self, config: TransformerConfig, layer: int, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.rotates = config.positions is PositionKind.ROTARY
        self.is_post = config.norm_placement is NormPlacement.POST
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden: torch.Tensor,
        hidden_keys: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """Return [B, L, E].

        Args:
            hidden: [B, L, E].
            hidden_keys: [B, S] boolean, True for tokens that nobody sees; None is none.
            positions: [B or 1, L] int64, for the rotation.
            cache: keys and values of earlier tokens.
        """

        def attend(inputs: torch.Tensor) -> torch.Tensor:
            output, _ = self.attention(
                inputs,
                key_padding_mask=hidden_keys,
                is_causal=self.is_causal,
                positions=positions if self.rotates else None,
                cache=cache,
            )
            return self.dropout(output)  # type: ignore[no-any-return]

        if self.is_post:
            hidden = self.attention_norm(hidden + attend(hidden))
            return self.mlp_norm(hidden + self.dropout(self.mlp(hidden)))  # type: ignore[no-any-return]
        hidden = hidden + attend(self.attention_norm(hidden))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))  # type: ignore[no-any-return]


def _look_up(name: str, table: nn.Embedding, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table; the kernel checks the indices, so that no host read has to."""
    try:
        return table(indices)  # type: ignore[no-any-return]
    except IndexError as error:
        low, high = indices.min().item(), indices.max().item()
        wanted = f"numbers from 0 to {table.num_embeddings - 1}"
        raise ArgumentError.got(name, wanted, f"{low} to {high}") from error


def _gelu_tanh(hidden: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form, as GPT-2 has it."""
    return F.gelu(hidden, approximate="tanh")


def _quick_gelu(hidden: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x), https://arxiv.org/abs/1606.08415 section 2."""
    return hidden * torch.sigmoid(1.702 * hidden)


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.QUICK_GELU: _quick_gelu,
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
}


def _check_settings(kind: type[BaseAttention], settings: Mapping[str, Any]) -> None:
    """Refuse what the module does not take, or what other fields of the config say."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    known = sorted(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
    if unknown := sorted(map(str, set(settings) - set(known))):
        raise ArgumentTypeError.got(
            "attention_settings",
            f"some of {known}, which {kind.__name__} takes",
            unknown,
            "sizes and kinds are fields of TransformerConfig",
        )
