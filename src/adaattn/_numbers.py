"""Checks of numbers and flags that users give, with one message each."""

import math

from adaattn.errors import ArgumentError, ArgumentTypeError


def require_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ArgumentTypeError: always then.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError.got(name, "True or False", repr(value))


def require_integer(name: str, value: object, *, least: int) -> None:
    """Refuse what is no integer of at least ``least``; True and False are none.

    Raises:
        ArgumentTypeError: no integer.
        ArgumentError: below.
    """
    expected = f"an integer of at least {least}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError.got(name, expected, repr(value))
    if value < least:
        raise ArgumentError.got(name, expected, value)


def require_number(
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    hint: str = "",
) -> None:
    """Refuse what is no finite number within the bounds; True and False are none.

    Args:
        name: of the caller's argument.
        value: what was given.
        least: the least number that will do.
        above: or the number that it must exceed.
        most: the greatest number that will do.
        below: or the number that it must not reach.
        hint: what to do instead.

    Raises:
        ArgumentTypeError: no number.
        ArgumentError: outside of the bounds, infinite or NaN.
    """
    low = f"({above}" if above > least else f"[{least}"
    high = f"{below})" if below < most else f"{most}]"
    expected = f"a number in {low}, {high}"
    if most == below:
        bound = f" above {above}" if above > least else f" of at least {least}"
        expected = "a finite number" + bound * (above != least)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError.got(name, expected, repr(value), hint)
    if not (math.isfinite(value) and above < value < below and least <= value <= most):
        raise ArgumentError.got(name, expected, value, hint)
