"""Checks that several values make of their numbers."""

from adaattn.errors import ArgumentError, ArgumentTypeError

__all__ = ["check_at_least_0"]


def check_at_least_0(name: str, value: object) -> None:
    """Refuse what is no integer of at least 0."""
    if not isinstance(value, int):
        raise ArgumentTypeError.got(name, "an integer", repr(value))
    if value < 0:
        raise ArgumentError.got(name, "at least 0", value)
