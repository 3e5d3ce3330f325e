"""The functions of `torch.autograd` that our kernels are called through."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Protocol

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import BEFORE_BLOCKS, Result, Tensors
from adaattn.backends.operators import GIVEN, Kept, keeps_rest, no_second_derivative
from adaattn.backends.own_kernels import meets_transforms, sees_no_transforms
from adaattn.spec import AttentionProblem, Aux

__all__ = [
    "Repeated",
    "attention",
    "chunked",
    "drawn_seed",
    "kept_rest",
    "output_only",
    "wanted_names",
]

_Optional = torch.Tensor | None


class Kernels(Protocol):
    """Kernels of an executor.

    Attributes:
        name: of the executor.
        compute: as in `adaattn.backends.training.Differentiated`.
    """

    name: str
    compute: Callable[..., Result]

    def gradients(
        self, problem: AttentionProblem, tensors: Tensors, kept: Kept, *rest: Any
    ) -> tuple[_Optional, ...]:
        """Return the gradients of a call in the order of `GIVEN`."""


Repeated = tuple[Callable[..., Result], Callable[..., tuple[_Optional, ...]]]
"""Both passes of a problem whose output alone is asked for, fastest for tensors that lie as some
before. The first takes the tensors of a `Direct`, up to `BEFORE_BLOCKS`, and returns output and
log-sum-exp. The second takes which of them want a gradient, the output's gradient, output,
log-sum-exp, and those tensors, and returns the gradients of the first six, None of what has none.
"""


def drawn_seed(query: torch.Tensor) -> torch.Tensor:
    """Return the seed of a call's dropout, int64 [1], from its device's generator."""
    return torch.randint(2**62, (1,), device=query.device)


def chunked(chunk_rows: int) -> dict[str, int]:
    """Return what an executor is told of the rows that it computes at once, if a plan says it."""
    return {"chunk_rows": chunk_rows} if chunk_rows else {}


def kept_rest(query: torch.Tensor, mask: _Optional) -> _Optional:
    """Return room for what rounding takes from the log-sum-exp; None where it does not matter."""
    if not keeps_rest(query, mask):
        return None
    return query.new_empty(query.shape[:3], dtype=torch.float32)


@lru_cache(maxsize=256)
def wanted_names(needs: tuple[bool, ...]) -> frozenset[str]:
    """Return the names of those of `GIVEN` that want a gradient."""
    return frozenset(name for name, need in zip(GIVEN, needs, strict=True) if need)


_SAVED: Final = (
    *("query", "key", "value", "mask", "sinks", "alibi_slopes"),
    *("cu_seqlens_q", "cu_seqlens_k"),
)
"""What is saved of a call beside its lists and the numbers of its heads."""

_SHARED: Final = 6
"""Tensors of a `Direct` that may want a gradient, the first of `GIVEN`: up to sinks and slopes."""

_ABSENT: Final = (None,) * 5
"""A list of blocks, which are two tensors, and numbers of heads, where there are none."""


class _Attention(torch.autograd.Function):
    """The kernels of a problem as autograd sees them.

    The row outputs beside the log-sum-exp have no gradients. A second derivative raises an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        problem: AttentionProblem,
        beside: tuple[Any, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: _Optional,
        sinks: _Optional,
        slopes: _Optional,
        scale: _Optional,
        softcap: _Optional,
    ) -> tuple[_Optional, ...]:
        """Return the output and the statistics of rows, in the order of `STATISTICS`."""
        starts_q, starts_k, blocks, window, chunk_rows = beside
        terms = HeadTerms.given(scale, window, softcap)
        seed = drawn_seed(query) if problem.dropout_p else None
        given = (query, key, value, mask, sinks, slopes, starts_q, starts_k, blocks, terms)
        rest = kept_rest(query, mask)
        found = kernels.compute(problem, *given, seed=seed, lse_rest=rest, **chunked(chunk_rows))
        ctx.chunk_rows = chunk_rows
        ctx.problem = problem
        ctx.kernels = kernels
        lists = (None, None) if blocks is None else (blocks.counts, blocks.indices)
        ctx.save_for_backward(
            *(found.output, found.lse, rest, seed),
            *(query, key, value, mask, sinks, slopes, starts_q, starts_k, *lists),
            *(scale, window, softcap),
        )
        ctx.set_materialize_grads(False)
        others = (found.row_max, found.entropy, found.dropped_mass)
        if problem.aux != Aux.LSE:
            ctx.mark_non_differentiable(*(item for item in others if item is not None))
        return (found.output, found.lse, *others)

    @staticmethod
    def backward(ctx: Any, upstream: _Optional, lse_upstream: _Optional, *rest: Any) -> Any:
        """Return the gradients of what wants one."""
        del rest
        wanted = wanted_names(ctx.needs_input_grad[-len(GIVEN) :])
        known = (ctx.kernels, ctx.problem, ctx.chunk_rows, wanted)
        given = (*known, upstream, lse_upstream, *ctx.saved_tensors)
        # Gradients are wanted of gradients with ``create_graph=True`` alone.
        compute: Callable[..., Any] = _Gradients.apply if torch.is_grad_enabled() else _computed
        found = compute(*given)
        return (None, None, None, *found)


class _Output(torch.autograd.Function):
    """The same where the output alone is asked for, without dropout, lists and numbers of heads.

    It is handed the tensors of a `Direct` and keeps two more, and launches of repeated calls are
    found without shapes: about half of the host's time (docs/kernel-notes.md).
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        problem: AttentionProblem,
        repeated: Repeated,
        *given: _Optional,
    ) -> torch.Tensor:
        """Return the output."""
        found = repeated[0](*given)
        ctx.known = kernels, problem, repeated
        ctx.save_for_backward(found.output, found.lse, *given)  # in the order of `_Attention`
        ctx.set_materialize_grads(False)
        return found.output

    @staticmethod
    def backward(ctx: Any, upstream: _Optional) -> Any:
        """Return the gradients of what wants one, and of q, k and v."""
        wanted = ctx.needs_input_grad[3:]
        if upstream is None:
            return (None,) * (3 + len(wanted))
        kernels, problem, repeated = ctx.known
        output, lse, *given = ctx.saved_tensors
        if torch.is_grad_enabled():
            shared = wanted[:_SHARED]
            names = wanted_names((*shared, *(False,) * (len(GIVEN) - len(shared))))
            missing = (None,) * (BEFORE_BLOCKS - len(given))
            saved = output, lse, None, None, *given, *missing, *_ABSENT
            compute: Callable[..., Any] = _Gradients.apply
            found = compute(kernels, problem, 0, names, upstream, None, *saved)[:_SHARED]
        else:
            found = repeated[1](wanted, upstream, output, lse, *given)
        of_starts = (None,) * (len(given) - _SHARED)
        return (None, None, None, *found[: len(given)], *of_starts)


_apply: Final[Callable[..., tuple[Any, ...]]] = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without what that does for transforms of ``torch.func``: 3 us less."""

_apply_output: Final[Callable[..., Any]] = super(torch.autograd.Function, _Output).apply


def _computed(
    kernels: Kernels,
    problem: AttentionProblem,
    chunk_rows: int,
    wanted: frozenset[str],
    upstream: _Optional,
    lse_upstream: _Optional,
    *tensors: _Optional,
) -> tuple[_Optional, ...]:
    """Return the gradients in the order of `GIVEN`; None of what wants none."""
    output, lse, rest, seed, *named, counts, indices, scale, window, softcap = tensors
    assert output is not None and lse is not None
    kept = Kept(output=output, lse=lse, lse_rest=rest, seed=seed, chunk_rows=chunk_rows)
    blocks = None
    if counts is not None and indices is not None:
        rows, keys = problem.block_size
        blocks = BlockList(counts=counts, indices=indices, block_q=rows, block_k=keys)
    fields: dict[str, Any] = dict(zip(_SAVED, named, strict=True))
    terms = HeadTerms.given(scale, window, softcap)
    given = Tensors.of(**fields, blocks=blocks, head_terms=terms)
    if upstream is None:
        if lse_upstream is None:
            return (None,) * len(GIVEN)
        upstream = torch.zeros_like(output)
    return kernels.gradients(problem, given, kept, upstream, lse_upstream, wanted)


class _Gradients(torch.autograd.Function):
    """The gradients of a call, which have none themselves."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, *given: Any) -> tuple[_Optional, ...]:
        """Return the gradients in the order of `GIVEN`; None of what wants none."""
        ctx.name = kernels.name
        return _computed(kernels, *given)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Refuse."""
        del upstream
        raise no_second_derivative(ctx.name)


def attention(
    kernels: Kernels, problem: AttentionProblem, beside: tuple[Any, ...], *given: _Optional
) -> tuple[Any, ...]:
    """Return output and statistics of a problem as `trained`, known to autograd.

    Args:
        kernels: that compute it.
        problem: what to compute.
        beside: starts of packed queries and keys, a list of blocks, the window of each head, and
            the rows that are computed at once.
        *given: the tensors of `GIVEN`.
    """
    apply = _Attention.apply if meets_transforms(given) else _apply
    found: tuple[Any, ...] = apply(kernels, problem, beside, *given)
    return found


def output_only(
    kernels: Kernels, problem: AttentionProblem, repeated: Repeated, *given: _Optional
) -> torch.Tensor | None:
    """Return the output of a call, known to autograd; None where transforms see its tensors."""
    if not sees_no_transforms(*given):
        return None
    output: torch.Tensor = _apply_output(kernels, problem, repeated, *given)
    return output
