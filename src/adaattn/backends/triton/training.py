"""The portable kernels as autograd knows them, eager and in graphs."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import Tensors
from adaattn.backends.operators import GIVEN, Kept
from adaattn.backends.triton.gradients import gradients
from adaattn.errors import UnsupportedError
from adaattn.spec import AttentionProblem

__all__ = ["Attention", "drawn_seed", "gradients_in_graphs", "kept_rest"]

_Optional = torch.Tensor | None


def drawn_seed(query: torch.Tensor) -> torch.Tensor:
    """Return the seed of a call's dropout, int64 [1], from its device's generator."""
    return torch.randint(2**62, (1,), device=query.device)


def kept_rest(query: torch.Tensor) -> _Optional:
    """Return room for what rounding takes from the log-sum-exp; 16 bits are as right without."""
    return query.new_empty(query.shape[:3]) if query.dtype == torch.float32 else None


def gradients_in_graphs(
    tensors: Tensors,
    problem: AttentionProblem,
    kept: Kept,
    upstream: torch.Tensor,
    lse_upstream: torch.Tensor,
    wanted: Sequence[bool],
) -> tuple[_Optional, ...]:
    """Return the gradients of a call in the order of `GIVEN`, as an operator asks for them."""
    names = frozenset(name for name, wants in zip(GIVEN, wanted, strict=True) if wants)
    found = gradients(problem, tensors, kept, upstream, lse_upstream, names)
    return tuple(map(found.get, GIVEN))


class Attention(torch.autograd.Function):
    """The kernels of a problem as autograd sees them.

    What is computed, and its gradients, are those of `adaattn.backends.triton`; the row outputs
    beside the log-sum-exp have none. A second derivative raises an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., tuple[Any, ...]],
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
        output, *statistics = run(*given, seed=seed, lse_rest=rest)
        ctx.problem = problem
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
        given = (ctx.problem, wanted, upstream, lse_upstream, *ctx.saved_tensors)
        found = _Gradients.apply(*given)  # type: ignore[no-untyped-call]
        return (None, None, None, *found)


class _Gradients(torch.autograd.Function):
    """The gradients of a call, which have none themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: AttentionProblem,
        wanted: frozenset[str],
        upstream: _Optional,
        lse_upstream: _Optional,
        *tensors: _Optional,
    ) -> tuple[_Optional, ...]:
        """Return the gradients in the order of `GIVEN`; None of what wants none."""
        del ctx
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
        found = gradients(problem, given, kept, upstream, lse_upstream, wanted)
        return tuple(map(found.get, GIVEN))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Refuse."""
        del ctx, upstream
        raise UnsupportedError(
            "triton",
            ("its gradients have no derivatives themselves",),
            'Pass backend="reference" where second derivatives are wanted.',
        )


_SAVED: Final = (
    *("query", "key", "value", "mask", "sinks", "alibi_slopes"),
    *("cu_seqlens_q", "cu_seqlens_k"),
)
"""What is saved of a call beside its lists and the numbers of its heads."""
