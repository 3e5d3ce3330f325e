"""Errors are caught by the names that PyTorch users know, and say all that stands in the way."""

import inspect
import pickle

import pytest

from adaattn import errors
from adaattn.errors import (
    AdaAttnError,
    PlanError,
    ShapeError,
    UnsupportedError,
    expected_got,
)


@pytest.mark.parametrize(
    ("error", "builtins"),
    [
        (errors.ShapeError, (ValueError, RuntimeError)),
        (errors.ArgumentError, (ValueError,)),
        (errors.ArgumentTypeError, (TypeError,)),
        (errors.DTypeError, (TypeError, RuntimeError)),
        (errors.DeviceError, (RuntimeError,)),
        (errors.NonFiniteError, (ValueError,)),
        (errors.PolicyError, (ValueError,)),
        (errors.AssetError, (RuntimeError,)),
    ],
)
def test_each_error_is_caught_as_ours_and_as_pythons(
    error: type[AdaAttnError], builtins: tuple[type[Exception], ...]
) -> None:
    for kind in (AdaAttnError, *builtins):
        with pytest.raises(kind, match="what is wrong"):
            raise error("what is wrong")


def test_every_error_of_the_module_is_exported_and_derives_from_the_one_base() -> None:
    classes = {
        name for name, item in vars(errors).items() if inspect.isclass(item) and "Error" in name
    }
    assert classes <= set(errors.__all__)
    assert all(issubclass(getattr(errors, name), AdaAttnError) for name in classes)


def test_an_unsupported_request_lists_every_reason_and_then_what_to_do() -> None:
    error = UnsupportedError("backend 'x'", ["one", "two"], "Pass backend='auto'.")
    assert isinstance(error, RuntimeError)
    assert error.reasons == ("one", "two")
    assert str(error) == (
        "backend 'x' cannot serve this call:\n  - one\n  - two\nPass backend='auto'."
    )
    assert str(UnsupportedError("x", ["one"])) == "x cannot serve this call:\n  - one"


def test_a_plan_error_lists_every_candidate() -> None:
    error = PlanError("nothing fits", ["a: too big", "b: wrong device"])
    assert isinstance(error, RuntimeError)
    assert error.trace == ("a: too big", "b: wrong device")
    assert str(error) == "nothing fits\n  - a: too big\n  - b: wrong device"
    assert str(PlanError("nothing fits")) == "nothing fits" and PlanError("x").trace == ()


@pytest.mark.parametrize(
    "error",
    [
        PlanError("nothing fits", ["a: too big"]),
        UnsupportedError("backend 'x'", ["one", "two"], "Pass backend='auto'."),
        errors.ShapeError("wrong"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_crosses_processes_with_its_text(error: AdaAttnError) -> None:
    """Unpickling an unsupported request once failed."""
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_the_one_sentence_says_what_was_expected_what_came_and_what_to_do() -> None:
    assert expected_got("scale", "a number", None) == "scale: expected a number, got None"
    error = ShapeError.got("scale", "a number", None)
    assert type(error) is ShapeError and str(error) == "scale: expected a number, got None"
    assert expected_got("scale", "a number", "x", "pass 1.0") == (
        "scale: expected a number, got x; pass 1.0"
    )
