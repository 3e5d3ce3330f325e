"""The Hopper kernels as they are called: with or without gradients, eager and in graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.hopper.forward import bound, computed, given, output_function
from adaattn.backends.hopper.gradients import gradients
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.operators import Training, is_observed, is_watched, operator
from adaattn.backends.own_kernels import check_untransformed
from adaattn.backends.training import (
    Attention,
    Trained,
    drawn_seed,
    gradients_in_graphs,
    trained_once,
)
from adaattn.spec import AttentionProblem, Aux

__all__ = ["attend", "function_of"]


def attend(tensors: Tensors, problem: AttentionProblem) -> Result:
    """Return attention with the row outputs that ``problem.aux`` asks for.

    Args:
        tensors: canonical tensors on a device of compute capability 9.0.
        problem: what to compute; sizes are taken from the tensors.

    Raises:
        ExecutorError: a kernel cannot be compiled here.
    """
    if is_watched(tensors.query):
        return _in_graphs(tensors, problem)
    return _attend(tensors, problem)


def function_of(problem: AttentionProblem) -> Callable[..., torch.Tensor]:
    """Return a function from the tensors of a `Direct` to the output alone."""
    launch = partial(_output, problem) if problem.wants_gradients else output_function(problem)

    def run(*tensors: Any) -> torch.Tensor:
        if is_observed(tensors[0]):
            return _in_graphs(Tensors.of_direct(*tensors), problem).output
        return launch(*tensors)

    return run


def _output(problem: AttentionProblem, *tensors: Any) -> torch.Tensor:
    """Return the output alone, known to autograd."""
    output: torch.Tensor = _differentiable(problem, *tensors)[0]
    return output


def _attend(tensors: Tensors, problem: AttentionProblem) -> Result:
    """Return the same where nobody watches operators."""
    if not problem.wants_gradients:
        return computed(tensors, problem)
    output, lse, row_max, entropy, dropped = _differentiable(problem, *given(tensors))
    return Result(
        output=output,
        lse=lse if problem.wants(Aux.LSE) else None,
        row_max=row_max,
        entropy=entropy,
        dropped_mass=dropped,
    )


def _differentiable(
    problem: AttentionProblem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    starts_q: torch.Tensor | None = None,
    starts_k: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    terms: HeadTerms | None = None,
) -> tuple[Any, ...]:
    """Return output and statistics, known to autograd; the log-sum-exp is always there."""
    check_untransformed(query, key, value)
    terms = terms or HeadTerms()
    with_lse = trained_once(problem)
    executor = Trained(name="hopper", run=partial(_computed, with_lse), gradients=gradients)
    beside = (starts_q, starts_k, blocks, terms.window)
    found: tuple[Any, ...] = Attention.apply(  # type: ignore[no-untyped-call]
        *(executor, with_lse, beside, query, key, value, mask, sinks, slopes),
        *(terms.scale, terms.softcap),
    )
    return found


def _computed(problem: AttentionProblem, *tensors: Any, **others: Any) -> tuple[Any, ...]:
    """Return output and statistics in the order of `STATISTICS`.

    There is no dropout, hence no seed, and 16 bits keep nothing beside the log-sum-exp.
    """
    del others
    found = bound(problem)(*tensors)
    return found.output, found.lse, found.row_max, found.entropy, found.dropped_mass


def _trained(
    tensors: Tensors, problem: AttentionProblem, seed: torch.Tensor | None
) -> tuple[Result, torch.Tensor | None]:
    """Return the result of a graph's forward pass, which keeps nothing beside it."""
    del seed
    return computed(tensors, problem), None


_in_graphs: Final = operator(
    "hopper",
    _attend,
    Training(seed_of=drawn_seed, forward=_trained, backward=gradients_in_graphs(gradients)),
)
