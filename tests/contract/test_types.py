"""What type checkers are told is what the functions take."""

import inspect
import typing

import adaattn
from adaattn import functional
from adaattn.spec import Policy


def test_type_checkers_know_what_the_call_returns() -> None:
    """It was Any, which strict callers may not return."""
    found = typing.get_overloads(adaattn.scaled_dot_product_attention)
    returned = [inspect.signature(it).return_annotation for it in found]
    assert [getattr(it, "__name__", str(it)) for it in returned] == ["Tensor", "tuple", "Any"]


def test_type_checkers_know_every_keyword_of_the_call() -> None:
    parameters = inspect.signature(adaattn.scaled_dot_product_attention).parameters.values()
    named = {it.name for it in parameters if it.kind is it.KEYWORD_ONLY}
    assert set(functional._Options.__annotations__) == named - {"return_aux"}


def test_type_checkers_know_every_field_of_a_policy() -> None:
    source = inspect.getsource(Policy).partition("def __init__(")[2].partition(") -> None")[0]
    typed = [line.split(":")[0].strip() for line in source.splitlines() if ":" in line]
    assert typed == list(Policy.__dataclass_fields__)
