"""Kernels of our own as autograd knows them, eager and in graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import Tensors
from adaattn.backends.operators import GIVEN, Kept, no_second_derivative, trained
from adaattn.spec import AttentionProblem

__all__ = ["Attention", "Trained", "drawn_seed", "gradients_in_graphs", "kept_rest", "trained_once"]

_Optional = torch.Tensor | None
_Gradients = Callable[
    [AttentionProblem, Tensors, Kept, torch.Tensor, _Optional, frozenset[str]],
    dict[str, torch.Tensor],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is differentiated.

    Args:
        name: of the executor.
        run: returns the output and the statistics of rows, in the order of `STATISTICS`, from the
            tensors in the order of a `Direct`, a seed, and room for what rounding takes from the
            log-sum-exp.
        gradients: returns the gradients that are wanted by their names, of `GIVEN`, from the
            problem, its tensors, what was kept, and the gradients of output and log-sum-exp.
    """

    name: str
    run: Callable[..., tuple[Any, ...]]
    gradients: _Gradients


trained_once = lru_cache(maxsize=1024)(trained)
"""`trained`, which an eager call does not work out anew; a graph cannot look into it."""


def drawn_seed(query: torch.Tensor) -> torch.Tensor:
    """Return the seed of a call's dropout, int64 [1], from its device's generator."""
    return torch.randint(2**62, (1,), device=query.device)


def kept_rest(query: torch.Tensor) -> _Optional:
    """Return room for what rounding takes from the log-sum-exp; 16 bits are as right without."""
    return query.new_empty(query.shape[:3]) if query.dtype == torch.float32 else None


def gradients_in_graphs(gradients: _Gradients) -> Callable[..., tuple[_Optional, ...]]:
    """Return what has the gradients of a call in the order of `GIVEN`, as an operator asks."""

    def run(
        tensors: Tensors,
        problem: AttentionProblem,
        kept: Kept,
        upstream: torch.Tensor,
        lse_upstream: torch.Tensor,
        wanted: Sequence[bool],
    ) -> tuple[_Optional, ...]:
        names = frozenset(name for name, wants in zip(GIVEN, wanted, strict=True) if wants)
        found = gradients(problem, tensors, kept, upstream, lse_upstream, names)
        return tuple(map(found.get, GIVEN))

    return run


class Attention(torch.autograd.Function):
    """The kernels of a problem as autograd sees them.

    The row outputs beside the log-sum-exp have no gradients. A second derivative raises an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        trained: Trained,
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
        starts_q, starts_k, blocks, window = beside
        terms = HeadTerms.given(scale, window, softcap)
        seed = drawn_seed(query) if problem.dropout_p else None
        given = (query, key, value, mask, sinks, slopes, starts_q, starts_k, blocks, terms)
        rest = kept_rest(query)
        output, *statistics = trained.run(*given, seed=seed, lse_rest=rest)
        ctx.problem = problem
        ctx.trained = trained
        lists = (None, None) if blocks is None else (blocks.counts, blocks.indices)
        ctx.save_for_backward(
            *(output, statistics[0], rest, seed),
            *(query, key, value, mask, sinks, slopes, starts_q, starts_k, *lists),
            *(scale, window, softcap),
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(item for item in statistics[1:] if item is not None))
        return (output, *statistics)

    @staticmethod
    def backward(ctx: Any, upstream: _Optional, lse_upstream: _Optional, *rest: Any) -> Any:
        """Return the gradients of what wants one."""
        del rest
        needs = ctx.needs_input_grad[-len(GIVEN) :]
        wanted = frozenset(name for name, need in zip(GIVEN, needs, strict=True) if need)
        given = (ctx.trained, ctx.problem, wanted, upstream, lse_upstream, *ctx.saved_tensors)
        # Gradients are wanted of gradients with ``create_graph=True`` alone.
        compute: Callable[..., Any] = _Backward.apply if torch.is_grad_enabled() else _computed
        found = compute(*given)
        return (None, None, None, *found)


def _computed(
    trained: Trained,
    problem: AttentionProblem,
    wanted: frozenset[str],
    upstream: _Optional,
    lse_upstream: _Optional,
    *tensors: _Optional,
) -> tuple[_Optional, ...]:
    """Return the gradients in the order of `GIVEN`; None of what wants none."""
    output, lse, rest, seed, *named, counts, indices, scale, window, softcap = tensors
    assert output is not None and lse is not None
    kept = Kept(output=output, lse=lse, lse_rest=rest, seed=seed)
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
    found = trained.gradients(problem, given, kept, upstream, lse_upstream, wanted)
    return tuple(map(found.get, GIVEN))


class _Backward(torch.autograd.Function):
    """The gradients of a call, which have none themselves."""

    @staticmethod
    def forward(ctx: Any, trained: Trained, *given: Any) -> tuple[_Optional, ...]:
        """Return the gradients in the order of `GIVEN`; None of what wants none."""
        ctx.name = trained.name
        return _computed(trained, *given)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Refuse."""
        del upstream
        raise no_second_derivative(ctx.name)


_SAVED: Final = (
    *("query", "key", "value", "mask", "sinks", "alibi_slopes"),
    *("cu_seqlens_q", "cu_seqlens_k"),
)
"""What is saved of a call beside its lists and the numbers of its heads."""
