"""The one rule for what an executor returns."""

from collections.abc import Callable

import torch

from adaattn.backends.interface import Result, Tensors
from adaattn.backends.reference import attention
from adaattn.spec import AttentionProblem
from adaattn.testing.compare import assert_results_match
from adaattn.testing.gradients import (
    assert_gradients_match,
    gradients_of,
    num_summands,
    term_sizes,
)
from adaattn.testing.inputs import cast_tensors
from adaattn.testing.poison import poisoned_memory

__all__ = ["assert_executor_matches", "assert_training_matches"]


def assert_executor_matches(
    run: Callable[[Tensors, AttentionProblem], Result], tensors: Tensors, problem: AttentionProblem
) -> Result:
    """Raise AssertionError unless an executor computes what is defined; return what it computed.

    It runs in poisoned memory, so that what it does not write is no number.

    Args:
        run: the executor.
        tensors: of a call.
        problem: what to compute.
    """
    with poisoned_memory():
        found = run(tensors, problem)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem, compute_dtype=tensors.query.dtype)
    assert_results_match(found, exact, eager, summands=num_summands(problem, found.output))
    return found


def assert_training_matches(
    run: Callable[[Tensors, AttentionProblem], Result], tensors: Tensors, problem: AttentionProblem
) -> Result:
    """Raise AssertionError unless an executor's result and all wanted gradients are right.

    As `assert_executor_matches`, and the backward pass runs in poisoned memory too.

    Args:
        run: the executor.
        tensors: of a call; some want a gradient.
        problem: what to compute.
    """
    with poisoned_memory():
        found = run(tensors, problem)
        gradients = gradients_of(found, tensors)
    wide = cast_tensors(tensors, torch.float64)
    exact = attention(wide, problem)
    eager = attention(tensors, problem, compute_dtype=tensors.query.dtype)
    assert_results_match(found, exact, eager, summands=num_summands(problem, found.output))
    assert_gradients_match(
        gradients,
        gradients_of(exact, wide),
        gradients_of(eager, tensors),
        sizes=term_sizes(tensors, problem),
        problem=problem,
    )
    return found
