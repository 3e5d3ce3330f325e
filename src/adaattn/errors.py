"""Every error that AdaAttn raises, one base class, and one template for its text.

Each class also derives from the built-in that a PyTorch user would already catch
(`ValueError`, `TypeError` or `RuntimeError`). Messages follow one form: what was
checked, what was expected, what came, and what to do.
"""

from collections.abc import Sequence
from typing import TypeVar

__all__ = [
    "AdaAttnError",
    "ArgumentError",
    "ArgumentTypeError",
    "AssetError",
    "DTypeError",
    "DeviceError",
    "ExecutorError",
    "NonFiniteError",
    "PlanError",
    "PolicyError",
    "ShapeError",
    "TableError",
    "UnsupportedError",
    "expected_got",
]


_E = TypeVar("_E", bound="AdaAttnError")


class AdaAttnError(Exception):
    """Base class of every error that the library raises on purpose."""

    @classmethod
    def got(cls: type[_E], subject: str, expected: object, got: object, hint: str = "") -> _E:
        """Return the error of a value that is not what was expected, told by `expected_got`."""
        return cls(expected_got(subject, expected, got, hint))


class ShapeError(AdaAttnError, ValueError, RuntimeError):
    """A tensor has the wrong rank, size or number of heads."""


class ArgumentError(AdaAttnError, ValueError):
    """An argument has the right type and an impossible value."""


class ArgumentTypeError(AdaAttnError, TypeError):
    """An argument has the wrong type, or a keyword is unknown."""


class DTypeError(AdaAttnError, TypeError, RuntimeError):
    """Tensors have different or unsupported dtypes."""


class DeviceError(AdaAttnError, RuntimeError):
    """Tensors are on different devices, or the device is unknown."""


class ExecutorError(AdaAttnError, RuntimeError):
    """An executor found while running that it cannot serve; ``auto`` steps down from it."""


class NonFiniteError(AdaAttnError, ValueError):
    """An input holds NaN or infinity where an error budget needs finite numbers."""


class PolicyError(AdaAttnError, ValueError):
    """A policy name is unknown, or a policy file is corrupt or foreign."""


class TableError(AdaAttnError, ValueError):
    """A table of measured times is damaged, or belongs to other hardware."""


class AssetError(AdaAttnError, RuntimeError):
    """A model, a text or a cache folder is missing, damaged or cannot be written."""


class UnsupportedError(AdaAttnError, RuntimeError):
    """An explicit request that nothing can serve.

    Attributes:
        reasons: one sentence for each thing that stands in the way.
    """

    def __init__(self, request: str, reasons: Sequence[str], hint: str = "") -> None:
        self.reasons = tuple(reasons)
        super().__init__(request, self.reasons, hint)

    def __str__(self) -> str:
        """Return the request, every reason and the hint; made of ``args``, so pickling keeps it."""
        request, reasons, hint = self.args
        text = f"{request} cannot serve this call:"
        text += "".join(f"\n  - {reason}" for reason in reasons)
        return text + (f"\n{hint}" if hint else "")


class PlanError(AdaAttnError, RuntimeError):
    """No candidate satisfies the policy, or a plan does not fit the call.

    Attributes:
        trace: one line for each candidate and why it was refused.
    """

    def __init__(self, message: str, trace: Sequence[str] = ()) -> None:
        self.trace = tuple(trace)
        super().__init__(message + "".join(f"\n  - {line}" for line in self.trace))


def expected_got(subject: str, expected: object, got: object, hint: str = "") -> str:
    """Return the one sentence every message uses.

    Example:
        >>> expected_got("dropout_p", "a number in [0, 1]", 1.5, "pass 0.0 in evaluation")
        'dropout_p: expected a number in [0, 1], got 1.5; pass 0.0 in evaluation'
    """
    return f"{subject}: expected {expected}, got {got}" + (f"; {hint}" if hint else "")
