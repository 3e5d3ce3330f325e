"""What a caller may ask for beside the attention result, and what it gets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from adaattn.backends import Result
from adaattn.errors import ArgumentTypeError
from adaattn.spec import Aux, Decision

__all__ = ["ROW_OUTPUTS", "AuxOutput", "AuxRequest", "requested_flags"]

ROW_OUTPUTS: Final = ("lse", "row_max", "entropy", "weights", "dropped_mass")
"""The outputs beside the result, by their names in `Result` and `AuxOutput`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxRequest:
    """Which auxiliary outputs are wanted.

    Args:
        lse: the log-sum-exp of each row.
        row_max: the largest score of each row.
        entropy: the entropy of each row's weights, in bits.
        weights: the softmax weights themselves; needs Sq x Sk memory.
        dropped_mass: with ``blocks``, a bound of the share of each row's softmax that blocks which
            are not listed would have.
    """

    lse: bool = False
    row_max: bool = False
    entropy: bool = False
    weights: bool = False
    dropped_mass: bool = False

    @property
    def flags(self) -> Aux:
        """The request as `Aux` flags."""
        flags = Aux.NONE
        for name in ROW_OUTPUTS:
            if getattr(self, name):
                flags |= Aux[name.upper()]
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxOutput:
    """The auxiliary outputs of one call; those not asked for are None.

    Args:
        decision: plan and reasons; None under ``torch.compile``.
        lse: [B, Hq, Sq] fp32 (fp64 for fp64 input), natural logarithm, sinks included.
        row_max: [B, Hq, Sq] after softcap, bias and masks.
        entropy: [B, Hq, Sq] in bits.
        weights: [B, Hq, Sq, Sk] before dropout.
        dropped_mass: [B, Hq, Sq], in [0, 1], without a gradient. With tau for it and R for the
            largest norm of a value, what the list changes of a row's output is 2 tau R at most;
            for rows that see a key, without sinks, R may be the largest distance of a value from
            any fixed vector.
        _errors: what `error_estimate` returns, or makes when it is read.

    B is there as the leading dimensions of the query; a 2-D query drops B and Hq.
    """

    decision: Decision | None
    lse: torch.Tensor | None = None
    row_max: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    dropped_mass: torch.Tensor | None = None
    _errors: torch.Tensor | Callable[[], torch.Tensor] | None = field(default=None, repr=False)

    @property
    def error_estimate(self) -> torch.Tensor | None:
        """Relative Frobenius errors found on sampled rows, [B, Hq] fp32.

        Zeros where the call was exact; None where nobody looked.
        """
        return self._errors() if callable(self._errors) else self._errors

    @classmethod
    def of(
        cls,
        result: Result,
        decision: Decision | None,
        errors: torch.Tensor | None,
        restore: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> "AuxOutput":
        """Return what stands beside a result's output, in the caller's leading dimensions.

        Args:
            result: canonical.
            decision: plan and reasons.
            errors: [B, Hq].
            restore: gives a tensor the caller's leading dimensions.
        """
        found = {name: getattr(result, name) for name in ROW_OUTPUTS} | {"_errors": errors}
        restored = {k: None if item is None else restore(item) for k, item in found.items()}
        return cls(decision=decision, **restored)


def requested_flags(return_aux: AuxRequest | bool | None) -> Aux:
    """Return the outputs that a request names.

    Raises:
        ArgumentTypeError: it is neither None, a boolean nor an `AuxRequest`.
    """
    if isinstance(return_aux, AuxRequest):
        return return_aux.flags
    if return_aux is None or isinstance(return_aux, bool):
        return Aux.NONE
    raise ArgumentTypeError.got(
        "return_aux", "None, True or an AuxRequest", type(return_aux).__name__
    )
