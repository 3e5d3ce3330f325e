"""A kernel as one operator of `torch.library`: graphs hold it whole, and look at its fake.

Modes that watch operators (selective checkpointing, fake tensors) see it too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes_in_use

from adaattn.backends.allocation import output_layout, output_like
from adaattn.backends.interface import STATISTICS, Result, Tensors
from adaattn.backends.masks import PLAIN_TENSORS
from adaattn.backends.operator_arguments import SCHEMA, call_of, taken_apart
from adaattn.backends.own_kernels import check_untransformed
from adaattn.errors import UnsupportedError
from adaattn.spec import AttentionProblem, Aux

__all__ = [
    "GIVEN",
    "Kept",
    "Training",
    "is_observed",
    "is_watched",
    "keeps_rest",
    "no_second_derivative",
    "operator",
    "trained",
]

_AUX: Final = 5
"""Where the wanted outputs stand among the sizes of `taken_apart`."""

_SIZES: Final = 9
"""Where those stand among the arguments behind q, k and v."""

_TENSORS: Final = 10
"""Tensors of an operator before its numbers, flags and sizes."""

_KEPT: Final = "Tensor upstream, Tensor lse_upstream, Tensor output, Tensor lse, Tensor lse_rest"
"""What an operator of gradients takes before what its operator took."""

_Run = Callable[[Tensors, AttentionProblem, int], Result]
"""Computes a problem, so many rows at once; 0 where no plan says it."""
_Optional = torch.Tensor | None


class Kept(NamedTuple):
    """What a forward pass leaves to the backward pass.

    Args:
        output: [B, Hq, Sq, Dv].
        lse: fp32 [B, Hq, Sq].
        lse_rest: what rounding took from it, likewise; None where it does not matter.
        seed: int64 [1], of dropout.
        chunk_rows: rows that were computed at once; 0 where no plan says it.
    """

    output: torch.Tensor
    lse: torch.Tensor
    lse_rest: _Optional = None
    seed: _Optional = None
    chunk_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How an operator is differentiated.

    Args:
        seed_of: draws the seed of a query's dropout.
        forward: computes a problem, which asks for the log-sum-exp, from a seed, so many rows at
            once; returns the result and what rounding took from the log-sum-exp.
        backward: returns the gradients of a problem from its tensors, what was kept, the gradients
            of output and log-sum-exp, and whether each of `GIVEN` wants one; None of what does not.
    """

    seed_of: Callable[[torch.Tensor], torch.Tensor]
    forward: Callable[[Tensors, AttentionProblem, _Optional, int], tuple[Result, _Optional]]
    backward: Callable[
        [Tensors, AttentionProblem, Kept, torch.Tensor, torch.Tensor, Sequence[bool]],
        Sequence[_Optional],
    ]


GIVEN: Final = ("query", "key", "value", "mask", "sinks", "slopes", "scale", "softcap")
"""What may want a gradient."""

_PLACES: Final = (0, 1, 2, 3, 4, 5, 13, 15)
"""Where those stand among the arguments of an operator."""

_TRAINED: Final = 2
"""Where the flags say that a gradient is wanted."""


def is_observed(query: torch.Tensor) -> bool:
    """Return whether a mode of PyTorch, or a tensor of another type, looks at operators.

    Such are selective checkpointing, fake tensors in their mode and outside of it, counted FLOPs.
    A mode that is to see what executors allocate says so by an attribute ``looks_inside``.
    """
    if type(query) not in PLAIN_TENSORS:
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return not all(getattr(mode, "looks_inside", False) for mode in modes_in_use())


def is_watched(query: torch.Tensor) -> bool:
    """Return whether a call is to be one operator: it is observed, or a graph is made."""
    return torch.compiler.is_compiling() or is_observed(query)


def keeps_rest(query: torch.Tensor, mask: _Optional) -> bool:
    """Return whether a backward pass takes what rounding took from the log-sum-exp.

    16 bits are as right without it, but beside an additive mask: where all keys of a row have -1e9
    rounding takes up to 32.
    """
    return query.dtype == torch.float32 or (mask is not None and mask.is_floating_point())


def trained(problem: AttentionProblem) -> AttentionProblem:
    """Return a problem as it is computed where gradients are wanted: with its log-sum-exp."""
    return replace(problem, aux=problem.aux | Aux.LSE)


def operator(name: str, run: _Run, training: Training) -> _Run:
    """Return what calls ``run`` through the operator ``adaattn::<name>``.

    Args:
        name: of the operator.
        run: computes a problem.
        training: how it is differentiated.
    """

    def call(*given: Any) -> list[torch.Tensor]:
        tensors, problem, chunk_rows, seed = call_of(given)
        rest = None
        if problem.wants_gradients:
            result, rest = training.forward(tensors, problem, seed, chunk_rows)
        else:
            result = run(tensors, problem, chunk_rows)
        output = _as_told(result.output, tensors.query)
        found = (output, result.lse, result.row_max, result.entropy, result.dropped_mass)
        return [_or_nothing(item, output) for item in (*found, rest)]

    made = _custom_op(name, call, SCHEMA)
    made.register_fake(_fake)
    backward = _backward_operator(name, training)
    made.register_autograd(partial(_differentiated, backward), setup_context=_keep)

    def through(tensors: Tensors, problem: AttentionProblem, chunk_rows: int) -> Result:
        if not torch.compiler.is_compiling():
            check_untransformed(tensors.query, tensors.key, tensors.value)
        blocks, seed = tensors.blocks, None
        asked = problem
        if problem.wants_gradients:
            asked = trained(problem)
            seed = training.seed_of(tensors.query) if problem.dropout_p else None
        output, *statistics = made(
            tensors.query,
            tensors.key,
            tensors.value,
            *(tensors.mask, tensors.sinks, tensors.alibi_slopes),
            *(tensors.cu_seqlens_q, tensors.cu_seqlens_k),
            *((None, None) if blocks is None else (blocks.counts, blocks.indices)),
            *taken_apart(asked, chunk_rows),
            *(tensors.head_scale, tensors.head_window, tensors.head_softcap),
            seed,
        )
        return _result(problem, output, statistics)

    return through


def _result(
    problem: AttentionProblem, output: torch.Tensor, statistics: list[torch.Tensor]
) -> Result:
    """Return what an operator returned, without the statistics that nobody asked for."""
    lse, *others = (
        item if problem.wants(flag) else None
        for item, flag in zip(statistics, STATISTICS, strict=False)
    )
    # Those have no gradient, and are not to look as if they had.
    row_max, entropy, dropped = (None if item is None else item.detach() for item in others)
    return Result(output=output, lse=lse, row_max=row_max, entropy=entropy, dropped_mass=dropped)


def _backward_operator(name: str, training: Training) -> Any:
    """Return the operator ``adaattn::<name>_backward``: the gradients in the order of `GIVEN`."""

    def call(*everything: Any) -> list[torch.Tensor]:
        upstream, lse_upstream, output, lse, lse_rest, *given, wanted = everything
        tensors, problem, chunk_rows, seed = call_of(given)
        rest = lse_rest if lse_rest.numel() else None
        kept = Kept(output=output, lse=lse, lse_rest=rest, seed=seed, chunk_rows=chunk_rows)
        found = list(training.backward(tensors, problem, kept, upstream, lse_upstream, wanted))
        for place, item in enumerate((tensors.query, tensors.key, tensors.value)):
            gradient = found[place]
            found[place] = None if gradient is None else _as_told(gradient, item)
        return [_or_nothing(item, upstream) for item in found]

    def refuse(ctx: Any, *upstream: Any) -> Any:
        del ctx, upstream
        raise no_second_derivative(name)

    made = _custom_op(f"{name}_backward", call, f"{_KEPT}, {SCHEMA}, bool[] wanted")
    made.register_fake(_fake_gradients)
    made.register_autograd(refuse)
    return made


def no_second_derivative(name: str) -> UnsupportedError:
    """Return the error of gradients of gradients."""
    return UnsupportedError(
        name,
        ("its gradients have no derivatives themselves",),
        'Pass backend="reference" where second derivatives are wanted.',
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """Keep what the backward pass reads."""
    numbers, flags, sizes = inputs[_TENSORS : _TENSORS + 3]
    ctx.words = numbers, flags, sizes
    tensors = (*inputs[:_TENSORS], *inputs[_TENSORS + 3 :])
    ctx.save_for_backward(output[0], output[1], output[-1], *tensors)


def _differentiated(
    backward: Callable[..., list[torch.Tensor]], ctx: Any, upstream: list[torch.Tensor]
) -> tuple[Any, ...]:
    """Return a gradient for each argument of an operator, by the operator of its gradients."""
    output, lse, rest, *tensors = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[place] for place in _PLACES]
    given = (*tensors[:_TENSORS], *ctx.words, *tensors[_TENSORS:])
    made = backward(upstream[0], upstream[1], output, lse, rest, *given, wanted)
    found: list[_Optional] = [None] * len(given)
    for place, gradient, wants in zip(_PLACES, made, wanted, strict=True):
        found[place] = gradient if wants else None
    return tuple(found)


def _custom_op(name: str, call: Callable[..., list[torch.Tensor]], takes: str) -> Any:
    """Return the operator ``adaattn::<name>``, which takes so much and returns tensors."""
    schema = f"({takes}) -> Tensor[]"
    return torch.library.custom_op(f"adaattn::{name}", call, mutates_args=(), schema=schema)


def _or_nothing(item: _Optional, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor; an empty one for None, which no operator returns."""
    return like.new_empty(0, dtype=torch.float32) if item is None else item


def _as_told(item: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return an output or a gradient as it lies by `_fake`; executors go by tensors made readable.

    Args:
        item: [B, H, S, D].
        like: the query, or the tensor that it is a gradient of, as it was given.
    """
    shape, strides = output_layout(like, item.shape[-1])
    steps = zip(shape, strides, item.stride(), strict=True)
    if all(told == own for size, told, own in steps if size > 1):
        return item
    return item.new_empty_strided(shape, strides).copy_(item)


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> list[torch.Tensor]:
    """Return outputs without numbers: what a graph knows of them."""
    del key
    aux, shape, flags = Aux(rest[_SIZES][_AUX]), query.shape[:-1], rest[_SIZES - 1]
    statistics = [
        query.new_empty(shape if flag in aux else (0,), dtype=torch.float32) for flag in STATISTICS
    ]
    has_rest = flags[_TRAINED] and keeps_rest(query, rest[0])
    kept = query.new_empty(shape if has_rest else (0,), dtype=torch.float32)
    return [output_like(query, value.shape[-1]), *statistics, kept]


def _fake_gradients(*given: Any) -> list[torch.Tensor]:
    """Return gradients without numbers."""
    *arguments, wanted = given[5:]
    found = []
    for place, name, wants in zip(_PLACES, GIVEN, wanted, strict=True):
        item = arguments[place]
        if not wants:
            found.append(arguments[0].new_empty(0, dtype=torch.float32))
        elif name in ("query", "key", "value"):
            found.append(output_like(item, item.shape[-1]))
        else:
            found.append(item.new_empty(item.shape))
    return found
