"""The one rule for what an executor returns."""

from collections.abc import Callable

import torch

from adaattn.backends.interface import Result, Tensors
from adaattn.backends.reference import attention
from adaattn.spec import AttentionProblem
from adaattn.testing.compare import assert_results_match
from adaattn.testing.gradients import num_summands
from adaattn.testing.inputs import cast_tensors
from adaattn.testing.poison import poisoned_memory

__all__ = ["assert_executor_matches"]


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
