"""How PyTorch's function is called."""

import math

import pytest

from adaattn.backends.sdpa_call import sdpa_keywords
from adaattn.testing import make_problem


@pytest.mark.parametrize(
    "write", [lambda d: d**-0.5, lambda d: 1 / math.sqrt(d), lambda d: 1 / d**0.5]
)
def test_the_usual_scale_is_left_out_however_it_was_written(write: object) -> None:
    for dim in range(1, 513):
        assert not sdpa_keywords(make_problem(head_dim=dim, scale=write(dim)))  # type: ignore[operator]
        assert sdpa_keywords(make_problem(head_dim=dim, scale=1.001 * write(dim)))  # type: ignore[operator]
