"""Runs the Hopper kernels: with or without gradients, eager and in graphs."""

from collections.abc import Callable
from typing import Any, Final

from adaattn.backends.compiled_before import is_noted
from adaattn.backends.hopper.forward import bound, output_function
from adaattn.backends.hopper.gradients import backward_of, noted_as
from adaattn.backends.hopper.launch import choose
from adaattn.backends.interface import Result
from adaattn.backends.operators import trained
from adaattn.backends.training import Differentiated
from adaattn.spec import AttentionProblem

__all__ = ["KERNELS", "direct", "is_ready", "run"]


def _computed(problem: AttentionProblem, *given: Any, **others: Any) -> Result:
    """Return a result; there is no dropout, and nothing is kept beside the log-sum-exp."""
    del others
    return bound(problem)(*given)


def _repeated(problem: AttentionProblem) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return both passes of a problem whose output alone is asked for."""
    return bound(problem), backward_of(problem).of_output


KERNELS: Final = Differentiated(
    "hopper", _computed, backward_of, output_function, repeated=_repeated
)
run, direct = KERNELS.run, KERNELS.direct


def is_ready(problem: AttentionProblem) -> bool:
    """Return whether this machine has compiled the kernels of a problem."""
    if problem.wants_gradients:
        return is_noted(("hopper", choose(trained(problem)))) and is_noted(noted_as(problem))
    return is_noted(("hopper", choose(problem)))
