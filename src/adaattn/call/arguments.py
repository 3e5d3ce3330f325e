"""The arguments that say what is to be computed, and the checks of those that are numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeGuard

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.spec import Align, Policy

__all__ = ["Arguments", "Companions", "checked_numbers"]

_Tensor = torch.Tensor | None
Companions = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, BlockList | None, HeadTerms | None]
"""Mask, sinks, slopes, both cu_seqlens, the list of blocks and the numbers of each head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of the public call that say what is to be computed.

    Tensors that are given as scale, window and softcap go to ``head_terms``; those of one number
    without a gradient are numbers.
    """

    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | torch.Tensor | None = None
    enable_gqa: bool = False
    align: str | Align = "top_left"
    window: Sequence[int] | torch.Tensor | None = (-1, -1)
    dilation: int = 1
    softcap: float | torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    blocks: BlockList | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    batch_invariant: bool = False
    head_terms: HeadTerms | None = None

    def __post_init__(self) -> None:
        """Move scale, window and softcap that are tensors to ``head_terms``."""
        numbers = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        given = {name: item for name, item in numbers.items() if _is_by_head(item)}
        if given:
            object.__setattr__(self, "head_terms", HeadTerms(**given))
            for name in given:
                object.__setattr__(self, name, (-1, -1) if name == "window" else None)

    @classmethod
    def of(
        cls,
        companions: Companions,
        settings: Sequence[Any],
        window: Sequence[int] | torch.Tensor | None,
    ) -> "Arguments":
        """Return the arguments in the groups in which the public call handles them."""
        return cls(
            **dict(zip(COMPANIONS, companions, strict=True)),  # type: ignore[arg-type]
            **dict(zip(SETTINGS, settings, strict=True)),
            window=window,
        )

    @property
    def companions(self) -> Companions:
        """What stands beside q, k and v, in the order of a bound call."""
        tensors = (self.attn_mask, self.sinks, self.alibi_slopes, self.cu_seqlens_q)
        return (*tensors, self.cu_seqlens_k, self.blocks, self.head_terms)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The numbers and flags, in the order in which the public call handles them."""
        return tuple(getattr(self, name) for name in SETTINGS)

    def with_companions(self, companions: Sequence[Any]) -> "Arguments":
        """Return the same arguments with other tensors beside q, k and v."""
        return replace(self, **dict(zip(COMPANIONS, companions, strict=True)))

    def under(self, policy: Policy) -> "Arguments":
        """Return the same arguments with what a policy asks for beside them."""
        if policy.batch_invariant and not self.batch_invariant:
            return replace(self, batch_invariant=True)
        return self


COMPANIONS: Final = (
    "attn_mask",
    "sinks",
    "alibi_slopes",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "blocks",
    "head_terms",
)
"""See `Companions`."""

SETTINGS: Final = (
    "scale",
    "softcap",
    "dropout_p",
    "is_causal",
    "enable_gqa",
    "align",
    "dilation",
    "max_seqlen_q",
    "max_seqlen_k",
    "batch_invariant",
)
"""Numbers and flags."""


def checked_numbers(
    arguments: Arguments, head_dim: int
) -> tuple[tuple[int, int], int, float, float, float]:
    """Return (window, dilation, softcap, scale, dropout_p), each in range."""
    window = _edges(arguments.window)
    if not _is_int(arguments.dilation) or arguments.dilation < 1:
        raise ArgumentError.got("dilation", "an integer of at least 1", arguments.dilation)
    softcap = 0.0 if arguments.softcap is None else _number("softcap", arguments.softcap)
    if not (_is_finite(softcap) and softcap >= 0):
        raise ArgumentError.got(
            "softcap", "None or a finite number of at least 0", arguments.softcap
        )
    scale = 1 / head_dim**0.5
    if arguments.scale is not None:
        scale = _number("scale", arguments.scale)
        if not _is_finite(scale):
            raise ArgumentError.got("scale", "None or a finite number", arguments.scale)
    dropout_p = _number("dropout_p", arguments.dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ArgumentError.got(
            "dropout_p", "a probability in [0, 1]", arguments.dropout_p, "0 turns it off"
        )
    return window, arguments.dilation, softcap, scale, dropout_p


def _edges(given: Any) -> tuple[int, int]:
    """Return the edges of a window; None has none."""
    if given is None:
        return -1, -1
    expected, hint = "(left, right), each at least -1", ""
    if _is_int(given):
        hint = f"({given}, {given}) looks both ways, ({given - 1}, 0) is {given} keys, causal"
    if not isinstance(given, Sequence) or not all(map(_is_int, given)):
        raise ArgumentTypeError.got("window", expected, repr(given), hint)
    if len(given) != 2 or any(edge < -1 for edge in given):
        raise ArgumentError.got("window", expected, given)
    return given[0], given[1]


def _is_finite(value: float) -> bool:
    """Return whether a number is finite; a symbolic one in a graph is taken to be."""
    return torch.compiler.is_compiling() or math.isfinite(value)


def _number(name: str, value: Any) -> float:
    """Return a number as a Python float; text and flags are none."""
    if isinstance(value, str | bytes | bool):
        raise ArgumentTypeError.got(name, "a number", repr(value))
    if torch.compiler.is_compiling():
        return value  # type: ignore[no-any-return]  # perhaps a symbolic one
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError.got(name, "a number", repr(value)) from error


def _is_int(value: object) -> bool:
    """Return whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_by_head(item: object) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor stands where a number may; one number without a gradient is that."""
    return isinstance(item, torch.Tensor) and (item.numel() != 1 or item.requires_grad)
