"""The kinds that the parts of a transformer come in."""

import enum

__all__ = [
    "Activation",
    "AttentionKind",
    "MlpKind",
    "NormKind",
    "NormPlacement",
    "PositionKind",
]


class Activation(enum.StrEnum):
    """The non-linearity of an MLP."""

    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    QUICK_GELU = "quick_gelu"
    RELU = "relu"
    SILU = "silu"


class MlpKind(enum.StrEnum):
    """PLAIN is down(act(up(x))), GATED is down(act(gate(x)) * up(x))."""

    PLAIN = "plain"
    GATED = "gated"


class NormKind(enum.StrEnum):
    """LAYER subtracts the mean and has a bias, RMS does neither."""

    LAYER = "layer"
    RMS = "rms"


class NormPlacement(enum.StrEnum):
    """PRE normalises what enters a sublayer, POST what leaves the residual sum."""

    PRE = "pre"
    POST = "post"


class PositionKind(enum.StrEnum):
    """Where positions enter: a learned table, rotated queries and keys, or nowhere."""

    LEARNED = "learned"
    ROTARY = "rotary"
    NONE = "none"


class AttentionKind(enum.StrEnum):
    """Which module of `adaattn.attention` each layer uses."""

    DENSE = "dense"
    ADAPTIVE_RANK = "adaptive_rank"
    ADAPTIVE_PRECISION = "adaptive_precision"
    ADA = "ada"
