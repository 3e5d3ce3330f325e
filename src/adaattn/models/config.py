"""The one value that describes a whole transformer: sizes, kinds of its parts, and which attention.

Names follow the rest of the library: H heads, D head size, ``window`` is ``(left, right)``.
"""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from adaattn._numbers import require_flag, require_integer, require_number
from adaattn.attention.rotary import RotaryConfig
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.models.kinds import (
    Activation,
    AttentionKind,
    MlpKind,
    NormKind,
    NormPlacement,
    PositionKind,
)

__all__ = ["TransformerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A decoder's or an encoder's shape.

    Args:
        vocab_size: number of tokens.
        num_layers: number of blocks.
        embed_dim: width of the residual stream.
        num_heads: query heads H.
        num_kv_heads: key and value heads; None is ``num_heads``.
        head_dim: size D of a head; None is ``embed_dim // num_heads``.
        mlp_dim: width inside an MLP; None is ``4 * embed_dim``.
        max_positions: longest sequence; the size of the table of learned positions.
        activation: of the MLPs.
        mlp: plain or gated.
        norm: kind of every normalisation.
        norm_eps: added inside its root, qk-norm's too.
        norm_placement: before each sublayer (with a last one at the end) or after it.
        positions: how positions enter.
        rotary: details of rotary positions; None with ``"rotary"`` is the default of this size.
        qk_norm: RMS norm over each head's queries and keys, before the rotation.
        windows: one ``(left, right)`` per layer, -1 unlimited; () is no window anywhere.
        softcap: of the scores; None is none.
        scale: of the scores; None is ``1 / sqrt(head_dim)``.
        attention_bias: biases of the q, k and v projections.
        attention_out_bias: of the output projection; None is ``attention_bias``.
        mlp_bias: of the MLPs.
        tie_embeddings: the decoder's head is the token embedding; an encoder has no such head.
        dropout: of each sublayer's result.
        embedding_dropout: of the embeddings; None is ``dropout``.
        attention_dropout: of the attention weights.
        classifier_dropout: before the classification head; None is ``dropout``.
        type_vocab_size: token types of an encoder; 0 is none.
        embedding_norm: normalise the embeddings, as BERT does.
        pooler: an encoder's tanh layer over the first token.
        num_labels: outputs of an encoder's classification head over the pooler; 0 is none.
        pad_token_id: what fills up shorter rows; None is none.
        eos_token_ids: the tokens at which `Decoder.generate` ends a row.
        init_std: standard deviation of fresh weights.
        attention: which attention module.
        attention_settings: keyword arguments of that module, such as ``{"policy": "speed"}``.

    Raises:
        ArgumentError: a value is out of range, or two do not fit.
        ArgumentTypeError: a value has another type.

    Example:
        >>> from adaattn.models import TransformerConfig
        >>> config = TransformerConfig(vocab_size=100, num_layers=2, embed_dim=64, num_heads=4)
        >>> config.head_dim, config.mlp_dim, config.positions.value
        (16, 256, 'learned')
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    max_positions: int = 1024
    activation: Activation = Activation.GELU_TANH
    mlp: MlpKind = MlpKind.PLAIN
    norm: NormKind = NormKind.LAYER
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = NormPlacement.PRE
    positions: PositionKind = PositionKind.LEARNED
    rotary: RotaryConfig | None = None
    qk_norm: bool = False
    windows: tuple[tuple[int, int], ...] = ()
    softcap: float | None = None
    scale: float | None = None
    attention_bias: bool = True
    attention_out_bias: bool | None = None
    mlp_bias: bool = True
    tie_embeddings: bool = True
    dropout: float = 0.0
    embedding_dropout: float | None = None
    attention_dropout: float = 0.0
    classifier_dropout: float | None = None
    type_vocab_size: int = 0
    embedding_norm: bool = False
    pooler: bool = False
    num_labels: int = 0
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    init_std: float = 0.02
    attention: AttentionKind = AttentionKind.DENSE
    attention_settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check every value and fill in those that follow from others."""
        for name, kind in _ENUMS.items():
            _set(self, name, _member(name, getattr(self, name), kind))
        for name in _SIZES:
            require_integer(name, getattr(self, name), least=1)
        for name in ("type_vocab_size", "num_labels"):
            require_integer(name, getattr(self, name), least=0)
        self._fill_sizes()
        for name in _FLAGS:
            require_flag(name, getattr(self, name))
        for name in _SHARES:
            require_number(name, getattr(self, name), least=0, below=1)
        for name in ("norm_eps", "init_std", "softcap", "scale"):
            value = getattr(self, name)
            if value is not None:
                require_number(name, value, above=0)
        self._check_tokens()
        self._check_windows()
        self._fill_rotary()
        if self.num_labels and not self.pooler:
            raise ArgumentError.got(
                "pooler with num_labels", True, False, "the head reads the pooler"
            )
        if not isinstance(self.attention_settings, Mapping):
            raise ArgumentTypeError.got(
                "attention_settings", "a mapping", repr(self.attention_settings)
            )
        _set(self, "attention_settings", dict(self.attention_settings))

    def window(self, layer: int) -> tuple[int, int]:
        """Return ``(left, right)`` of a layer; -1 is unlimited.

        Args:
            layer: index of the block.
        """
        return self.windows[layer] if self.windows else (-1, -1)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain JSON values."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data |= {name: data[name].value for name in _ENUMS}
        data["windows"] = [list(pair) for pair in self.windows]
        data["eos_token_ids"] = list(self.eos_token_ids)
        data["attention_settings"] = dict(self.attention_settings)
        if self.rotary is not None:
            data["rotary"] = _rotary_to_dict(self.rotary)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TransformerConfig":
        """Return the config that `to_dict` wrote.

        Args:
            data: names and values; those left out have their defaults.

        Raises:
            ArgumentTypeError: a name is unknown, or a needed one is missing.
            ArgumentError: a value is out of range.
        """
        if not isinstance(data, Mapping):
            raise ArgumentTypeError.got("config", "a mapping", type(data).__name__)
        _check_names("config keys", data, cls)
        values = dict(data)
        if isinstance(values.get("rotary"), Mapping):
            values["rotary"] = _rotary_from_dict(values["rotary"])
        try:
            for name in ("windows", "eos_token_ids"):
                if name in values:
                    values[name] = tuple(
                        tuple(item) if isinstance(item, list) else item for item in values[name]
                    )
        except TypeError as error:
            raise ArgumentTypeError.got(name, "a list", repr(values[name])) from error
        return cls(**values)

    def _fill_sizes(self) -> None:
        """Fill in the sizes that were left out, and check that they fit."""
        heads, width = self.num_heads, self.embed_dim
        if self.head_dim is None:
            if width % heads:
                raise ArgumentError.got(
                    "embed_dim", f"a multiple of num_heads {heads}", width, "or give head_dim"
                )
            _set(self, "head_dim", width // heads)
        if self.num_kv_heads is None:
            _set(self, "num_kv_heads", heads)
        if self.mlp_dim is None:
            _set(self, "mlp_dim", 4 * width)
        if self.attention_out_bias is None:
            _set(self, "attention_out_bias", self.attention_bias)
        for name in ("embedding_dropout", "classifier_dropout"):
            if getattr(self, name) is None:
                _set(self, name, self.dropout)
        for name in ("head_dim", "num_kv_heads", "mlp_dim"):
            require_integer(name, getattr(self, name), least=1)
        if heads % (self.num_kv_heads or 1):
            raise ArgumentError.got(
                "num_kv_heads", f"a divisor of num_heads {heads}", self.num_kv_heads
            )

    def _check_tokens(self) -> None:
        """Refuse tokens that are not in the vocabulary."""
        if not isinstance(self.eos_token_ids, tuple):
            raise ArgumentTypeError.got(
                "eos_token_ids", "a tuple of integers", repr(self.eos_token_ids)
            )
        tokens = [("eos_token_ids", token) for token in self.eos_token_ids]
        if self.pad_token_id is not None:
            tokens.append(("pad_token_id", self.pad_token_id))
        for name, token in tokens:
            require_integer(name, token, least=0)
            if token >= self.vocab_size:
                raise ArgumentError.got(name, f"a token below vocab_size {self.vocab_size}", token)

    def _check_windows(self) -> None:
        """Refuse windows that are no pair for each layer."""
        wanted = "a tuple of (left, right) pairs of integers, one for each layer, or ()"
        pairs = self.windows
        if not isinstance(pairs, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 and all(type(side) is int for side in pair)
            for pair in pairs
        ):
            raise ArgumentTypeError.got("windows", wanted, repr(pairs))
        if pairs and len(pairs) != self.num_layers:
            raise ArgumentError.got("windows", f"{self.num_layers} pairs or none", len(pairs))
        if any(side < -1 for pair in pairs for side in pair):
            raise ArgumentError.got("windows", "sides of at least -1", pairs)

    def _fill_rotary(self) -> None:
        """Make the default rotation, and refuse one that does not fit."""
        if self.positions is not PositionKind.ROTARY:
            if self.rotary is not None:
                raise ArgumentError.got(
                    "positions with a rotary config", "rotary", self.positions.value
                )
            return
        assert self.head_dim is not None
        if self.rotary is None:
            default = RotaryConfig(head_dim=self.head_dim, max_positions=self.max_positions)
            _set(self, "rotary", default)
        elif not isinstance(self.rotary, RotaryConfig):
            raise ArgumentTypeError.got("rotary", "a RotaryConfig", repr(self.rotary))
        elif self.rotary.head_dim != self.head_dim:
            raise ArgumentError.got(
                "rotary.head_dim", f"head_dim {self.head_dim}", self.rotary.head_dim
            )


_ENUMS: dict[str, type[enum.StrEnum]] = {
    item.name: item.type
    for item in fields(TransformerConfig)
    if isinstance(item.type, type) and issubclass(item.type, enum.StrEnum)
}
_SIZES = ("vocab_size", "num_layers", "embed_dim", "num_heads", "max_positions")
_FLAGS = [item.name for item in fields(TransformerConfig) if item.type in (bool, bool | None)]
_SHARES = ("dropout", "embedding_dropout", "attention_dropout", "classifier_dropout")


def _set(config: TransformerConfig, name: str, value: object) -> None:
    """Give a frozen config a value that follows from its others."""
    object.__setattr__(config, name, value)


def _member(name: str, value: object, kind: type[enum.StrEnum]) -> enum.StrEnum:
    """Return the enum member that a string or a member means."""
    try:
        return kind(str(value))
    except ValueError as error:
        names = ", ".join(repr(member.value) for member in kind)
        raise ArgumentError.got(name, f"one of {names}", repr(value)) from error


def _check_names(subject: str, data: Mapping[str, Any], kind: type[Any]) -> None:
    """Refuse names that the dataclass does not have, and say which of its own are missing."""
    known = {item.name: item for item in fields(kind)}
    if unknown := sorted(map(str, set(data) - set(known))):
        raise ArgumentTypeError.got(subject, f"some of {sorted(known)}", unknown)
    missing = [
        name
        for name, item in known.items()
        if name not in data
        and item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ArgumentTypeError.got(subject, f"{missing} among them", sorted(data))


def _rotary_to_dict(rotary: RotaryConfig) -> dict[str, Any]:
    """Return a rotation as plain JSON values."""
    data = {item.name: getattr(rotary, item.name) for item in fields(rotary)}
    return {
        name: value.value if isinstance(value, enum.Enum) else value for name, value in data.items()
    }


def _rotary_from_dict(data: Mapping[str, Any]) -> RotaryConfig:
    """Return the rotation that `_rotary_to_dict` wrote."""
    _check_names("rotary keys", data, RotaryConfig)
    return RotaryConfig(**data)
