"""Checks of numbers that users give."""

import math
from typing import Any

import pytest

from adaattn._numbers import require_integer, require_number
from adaattn.errors import ArgumentError, ArgumentTypeError


def test_what_is_within_the_bounds_passes() -> None:
    require_integer("n", 3, least=3)
    for bounds in ({}, {"least": 1}, {"most": 1}, {"above": 0, "below": 2}):
        require_number("x", 1, **bounds)


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_what_is_no_integer_is_of_another_type(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^n: expected an integer of at least 1, got"):
        require_integer("n", value, least=1)


@pytest.mark.parametrize(
    ("bounds", "value", "wanted"),
    [
        ({}, math.nan, "a finite number"),
        ({}, -math.inf, "a finite number"),
        ({"least": 0}, -1, "a finite number of at least 0"),
        ({"above": 0}, 0, "a finite number above 0"),
        ({"above": 0}, math.inf, "a finite number above 0"),
        ({"least": 0, "below": 1}, 1, "a number in [0, 1)"),
        ({"above": 0, "most": 1}, 0, "a number in (0, 1]"),
        ({"least": 0, "most": 1}, math.nan, "a number in [0, 1]"),
    ],
)
def test_what_is_outside_of_the_bounds_is_told_with_them(
    bounds: dict[str, Any], value: float, wanted: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        require_number("x", value, **bounds, hint="turn back")
    assert str(caught.value) == f"x: expected {wanted}, got {value}; turn back"
    with pytest.raises(ArgumentTypeError) as caught_type:
        require_number("x", True, **bounds)
    assert str(caught_type.value) == f"x: expected {wanted}, got True"
