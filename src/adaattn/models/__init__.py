"""Whole transformers on attention that adapts: a decoder, an encoder, and pretrained weights."""

from adaattn.models.config import TransformerConfig
from adaattn.models.decoder import Decoder, DecoderOutput
from adaattn.models.encoder import Encoder, EncoderOutput
from adaattn.models.hugging_face import from_hugging_face
from adaattn.models.kinds import (
    Activation,
    AttentionKind,
    MlpKind,
    NormKind,
    NormPlacement,
    PositionKind,
)

__all__ = [
    "Activation",
    "AttentionKind",
    "Decoder",
    "DecoderOutput",
    "Encoder",
    "EncoderOutput",
    "MlpKind",
    "NormKind",
    "NormPlacement",
    "PositionKind",
    "TransformerConfig",
    "from_hugging_face",
]
