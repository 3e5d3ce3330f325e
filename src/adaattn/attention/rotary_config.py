"""What a rotary position embedding computes: its config, and the frequencies that follow from it.

Frequencies are float32 and rounded as Transformers rounds them, bit for bit, so that converted
weights meet the angles of their training.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch

from adaattn._numbers import require_flag, require_integer, require_number
from adaattn.errors import ArgumentError, ArgumentTypeError, UnsupportedError

__all__ = ["RotaryConfig", "RotaryScaling", "grown_frequencies"]


class RotaryScaling(enum.StrEnum):
    """How frequencies are stretched by a factor s, to positions beyond those of training.

    LINEAR divides all by s (https://arxiv.org/abs/2306.15595). NTK raises the base by
    s ** (R / (R - 2)); DYNAMIC_NTK does so by the longest position of each call and leaves
    calls within ``max_positions`` alone. YARN divides slow frequencies, keeps fast ones and
    blends between (https://arxiv.org/abs/2309.00071, which also describes both NTK forms).
    LLAMA3 does the same with other borders (https://arxiv.org/abs/2407.21783).
    """

    NONE = "none"
    LINEAR = "linear"
    NTK = "ntk"
    DYNAMIC_NTK = "dynamic_ntk"
    YARN = "yarn"
    LLAMA3 = "llama3"


_YARN_ONLY = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_LLAMA3_ONLY = ("low_freq_factor", "high_freq_factor")
_READ_BY: dict[RotaryScaling, tuple[str, ...]] = {
    RotaryScaling.NONE: (),
    RotaryScaling.LINEAR: ("factor",),
    RotaryScaling.NTK: ("factor",),
    RotaryScaling.DYNAMIC_NTK: ("factor",),
    RotaryScaling.YARN: ("factor", "original_max_positions", *_YARN_ONLY),
    RotaryScaling.LLAMA3: ("factor", "original_max_positions", *_LLAMA3_ONLY),
}
_HUGGING_FACE_TYPES = {
    "default": RotaryScaling.NONE,
    "linear": RotaryScaling.LINEAR,
    "dynamic": RotaryScaling.DYNAMIC_NTK,
    "yarn": RotaryScaling.YARN,
    "llama3": RotaryScaling.LLAMA3,
}
_UNSUPPORTED_TYPES = ("longrope", "su", "mrope", "proportional", "axial")


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """What a `RotaryEmbedding` computes.

    Args:
        head_dim: D of the queries and keys.
        base: theta, above 1.
        max_positions: positions that the model is meant for; DYNAMIC_NTK starts beyond them.
            No limit: longer positions are computed too.
        scaling: a `RotaryScaling` or its value; what it does not read must keep its default.
        factor: s, at least 1.
        rotary_dim: the first so many dimensions rotate, the rest pass; None rotates all.
        interleaved: dimensions 2 i and 2 i + 1 are a pair (GPT-J), not i and i + R / 2 (LLaMA).
        original_max_positions: positions before the stretching (YARN, LLAMA3); None is
            ``max_positions``.
        attention_factor: factor of cosines and sines (YARN); None follows from the rest.
        beta_fast: turns within the original positions from which a frequency is kept (YARN).
        beta_slow: turns up to which it is divided by the factor (YARN).
        mscale: with ``mscale_all_dim``, the two weights of DeepSeek's attention factor (YARN).
        mscale_all_dim: see ``mscale``; both or neither.
        truncate: round the borders of the blend outwards to whole pairs (YARN).
        low_freq_factor: turns up to which a frequency is divided by the factor (LLAMA3).
        high_freq_factor: turns from which it is kept (LLAMA3).

    Raises:
        ArgumentError: an impossible value, or one that the scaling would ignore.
        ArgumentTypeError: something that should be a number and is not.

    Example:
        >>> RotaryConfig(64, scaling="yarn", factor=4.0, max_positions=8192).amplitude
        1.138629436111989
    """

    head_dim: int
    _: KW_ONLY
    base: float = 10000.0
    max_positions: int = 2048
    scaling: RotaryScaling | str = RotaryScaling.NONE
    factor: float = 1.0
    rotary_dim: int | None = None
    interleaved: bool = False
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        """Refuse what cannot be computed and what would be ignored."""
        object.__setattr__(self, "scaling", _scaling(self.scaling))
        for name in ("head_dim", "max_positions", "rotary_dim", "original_max_positions"):
            if (value := getattr(self, name)) is not None:
                require_integer(name, value, least=1)
        for name in ("interleaved", "truncate"):
            require_flag(name, getattr(self, name))
        require_number("base", self.base, above=1)
        require_number("factor", self.factor, least=1)
        require_number("beta_slow", self.beta_slow, above=0)
        require_number("beta_fast", self.beta_fast, above=self.beta_slow)
        require_number("low_freq_factor", self.low_freq_factor, above=0)
        require_number("high_freq_factor", self.high_freq_factor, above=self.low_freq_factor)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if (value := getattr(self, name)) is not None:
                require_number(name, value, above=0)
        if (self.mscale is None) != (self.mscale_all_dim is None):
            pair = (self.mscale, self.mscale_all_dim)
            raise ArgumentError.got("(mscale, mscale_all_dim)", "both or neither", pair)
        self._require_dimensions()
        for field in fields(self):
            readers = [scaling for scaling, names in _READ_BY.items() if field.name in names]
            value = getattr(self, field.name)
            if readers and self.scaling not in readers and value != field.default:
                expected = f"{field.default} with scaling {self.scaling}, which ignores it"
                hint = f"scaling {', '.join(readers)} reads it"
                raise ArgumentError.got(field.name, expected, value, hint)

    def _require_dimensions(self) -> None:
        """Refuse dimensions that do not come in pairs, or too few for a new base."""
        name = "head_dim" if self.rotary_dim is None else "rotary_dim"
        rotated = self.rotated_dim
        if rotated % 2 or rotated > self.head_dim:
            hint = "rotary_dim= rotates a part of an odd head" if name == "head_dim" else ""
            expected = f"an even number up to head_dim = {self.head_dim}"
            raise ArgumentError.got(name, expected, rotated, hint)
        if self.scaling in (RotaryScaling.NTK, RotaryScaling.DYNAMIC_NTK) and rotated < 4:
            expected = f"at least 4 with scaling {self.scaling}, whose base has R - 2 below it"
            raise ArgumentError.got(name, expected, rotated)

    @classmethod
    def from_hugging_face(
        cls, parameters: Mapping[str, Any], head_dim: int, max_positions: int
    ) -> "RotaryConfig":
        """Return the config that Transformers' ``rope_parameters`` (or ``rope_scaling``) mean.

        The pairing is not in them: ``dataclasses.replace(config, interleaved=True)`` for GPT-J.

        Args:
            parameters: the dictionary of one kind of layer; None values count as absent.
            head_dim: D.
            max_positions: ``max_position_embeddings``.

        Raises:
            UnsupportedError: a known ``rope_type`` that is not covered, such as longrope.
            ArgumentError: an unknown type, a key that the type does not read, a missing one.
            ArgumentTypeError: no mapping, or one mapping for each kind of layer.

        Example:
            >>> rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
            >>> RotaryConfig.from_hugging_face(rope, head_dim=64, max_positions=4096).base
            500000.0
        """
        return cls(**_hugging_face_arguments(parameters, head_dim, max_positions))

    @property
    def rotated_dim(self) -> int:
        """R, the number of dimensions that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def trained_positions(self) -> int:
        """Positions before the stretching."""
        original = self.original_max_positions
        return self.max_positions if original is None else original

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines: 1, and YaRN's attention factor."""
        if self.scaling is not RotaryScaling.YARN:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    def _grown(self, mscale: float) -> float:
        """Return YaRN's inverse temperature, which grows with the logarithm of the factor."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def inverse_frequencies(self) -> torch.Tensor:
        """Return f_i, [R / 2] float32 on the CPU, in radians a position; scaled, if static."""
        dim, base = self.rotated_dim, self.base
        if self.scaling is RotaryScaling.YARN:
            return _yarn(self)
        if self.scaling is RotaryScaling.NTK:
            base = base * self.factor ** (dim / (dim - 2))
        plain = 1.0 / base ** _exponents(dim)
        if self.scaling is RotaryScaling.LINEAR:
            return plain / self.factor
        return _llama3(self, plain) if self.scaling is RotaryScaling.LLAMA3 else plain


def grown_frequencies(config: RotaryConfig, num_positions: torch.Tensor) -> torch.Tensor:
    """Return f_i of DYNAMIC_NTK for a call of so many positions, [R / 2] float32; no host read.

    Args:
        config: one with that scaling.
        num_positions: 0-d, above ``max_positions``.
    """
    dim = config.rotated_dim
    growth = config.factor * num_positions.to(torch.float32) / config.max_positions
    base = config.base * (growth - (config.factor - 1)) ** (dim / (dim - 2))
    return 1.0 / base ** _exponents(dim, num_positions.device)


def _exponents(dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return 2 i / R. On the CPU unless asked, whatever the default device or dtype is."""
    return torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(torch.float32) / dim


def _yarn(config: RotaryConfig) -> torch.Tensor:
    """Return slow frequencies divided, fast ones kept, and a linear blend between."""
    dim = config.rotated_dim
    low = _pair_of_turns(config, config.beta_fast)
    high = _pair_of_turns(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width would divide by zero; a thousandth is a step, as Transformers has it.
    width = high - low if high != low else 0.001
    steps = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - torch.clamp((steps - low) / width, 0, 1)
    periods = config.base ** _exponents(dim)
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _pair_of_turns(config: RotaryConfig, turns: float) -> float:
    """Return the pair, as a fraction, that makes so many turns within the trained positions."""
    ratio = config.trained_positions / (turns * 2 * math.pi)
    return (config.rotated_dim * math.log(ratio)) / (2 * math.log(config.base))


def _llama3(config: RotaryConfig, plain: torch.Tensor) -> torch.Tensor:
    """Return slow frequencies divided, fast ones kept, and a blend by the wavelength between."""
    length, low, high = config.trained_positions, config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / plain
    divided = plain / config.factor
    share = (length / wavelengths - low) / (high - low)
    blended = (1 - share) * plain / config.factor + share * plain
    found = torch.where(wavelengths > length / low, divided, plain)
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, blended, found)


def _scaling(given: RotaryScaling | str) -> RotaryScaling:
    """Return the scaling of a name."""
    try:
        return RotaryScaling(given)
    except ValueError:
        names = ", ".join(RotaryScaling)
        raise ArgumentError.got("scaling", f"one of {names}", repr(given)) from None


def _hugging_face_arguments(
    parameters: Mapping[str, Any], head_dim: int, max_positions: int
) -> dict[str, Any]:
    """Return the arguments of `RotaryConfig` that the dictionary means."""
    if not isinstance(parameters, Mapping):
        raise ArgumentTypeError.got("parameters", "a mapping", repr(parameters))
    require_integer("head_dim", head_dim, least=1)
    require_integer("max_positions", max_positions, least=1)
    given = {name: value for name, value in parameters.items() if value is not None}
    if nested := [name for name, value in given.items() if isinstance(value, Mapping)]:
        hint = "pass the one of a kind of layer"
        raise ArgumentTypeError.got("parameters", "one rope dictionary", nested, hint)
    scaling = _hugging_face_scaling(given.pop("rope_type", given.pop("type", "default")))
    given.pop("type", None)
    given.pop("finetuned", None)  # says how the weights came about, not what is computed
    share = given.pop("partial_rotary_factor", None)
    arguments = {"base": given.pop("rope_theta", 10000.0)}
    if share is not None:
        require_number("partial_rotary_factor", share, above=0)
        arguments["rotary_dim"] = int(head_dim * share)
    for name in _READ_BY[scaling]:
        key = "original_max_position_embeddings" if name == "original_max_positions" else name
        if key in given:
            arguments[name] = given.pop(key)
    if given:
        hint = "they would be ignored"
        raise ArgumentError.got("parameters", f"keys that {scaling} reads", sorted(given), hint)
    if scaling is RotaryScaling.YARN:
        # Transformers drops one weight without the other, and weights of 0.
        if not (arguments.get("mscale") and arguments.get("mscale_all_dim")):
            arguments = {k: v for k, v in arguments.items() if not k.startswith("mscale")}
        original = arguments.get("original_max_positions", max_positions)
        require_integer("original_max_position_embeddings", original, least=1)
        arguments.setdefault("factor", max_positions / original)
    required = {"factor", *_LLAMA3_ONLY} & set(_READ_BY[scaling])
    if missing := sorted(required - set(arguments)):
        raise ArgumentError.got("parameters", f"{', '.join(missing)}", "none")
    return {"head_dim": head_dim, "max_positions": max_positions, "scaling": scaling, **arguments}


def _hugging_face_scaling(rope_type: object) -> RotaryScaling:
    """Return the scaling that Transformers calls so."""
    known = ", ".join(_HUGGING_FACE_TYPES)
    name = str(rope_type)
    if name in _UNSUPPORTED_TYPES:
        reason = f"rope_type {name!r} is not among {known}"
        raise UnsupportedError("RotaryConfig", (reason,), "Such a model runs in Transformers.")
    if name not in _HUGGING_FACE_TYPES:
        raise ArgumentError.got("rope_type", f"one of {known}", repr(rope_type))
    return _HUGGING_FACE_TYPES[name]
