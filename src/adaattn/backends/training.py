"""Kernels of our own as autograd knows them, eager and in graphs."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import torch

from adaattn.backends.allocation import unfilled
from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import STATISTICS, Direct, Result, Tensors, num_taken
from adaattn.backends.operators import (
    GIVEN,
    Kept,
    Training,
    is_observed,
    is_watched,
    keeps_rest,
    no_second_derivative,
    operator,
    trained,
)
from adaattn.backends.own_kernels import (
    check_untransformed,
    is_untransformed,
    meets_transforms,
)
from adaattn.spec import AttentionProblem, Aux, HeadGroup, MaskKind

__all__ = ["Differentiated", "drawn_seed", "with_statistics"]

_Optional = torch.Tensor | None
_Backward = Callable[
    [Tensors, Kept, torch.Tensor, _Optional, frozenset[str]], dict[str, torch.Tensor]
]
"""Returns the gradients that are wanted by their names, of `GIVEN`, from the tensors of a call,
what was kept, and the gradients of output [B, Hq, Sq, Dv] and log-sum-exp, fp32 [B, Hq, Sq]; None
is zero."""

_Repeated = tuple[Callable[..., Any], Callable[..., Any]]
"""Both passes of a problem of q, k and v alone, for tensors that lie as some before; None for the
others. The first takes q, k and v, and returns output and log-sum-exp; the second q, k, v, the
output's gradient, the output and the log-sum-exp, and returns the gradients of the first three."""


_PLAIN_TAKEN: Final = 4
"""Tensors of a `Direct` up to the mask."""


class Differentiated:
    """Kernels of an executor as they are called: eager or as one operator, with gradients or not.

    Args:
        name: of the executor, and of its operator.
        compute: returns the result of a problem from the tensors in the order of a `Direct`; where
            gradients are wanted also from ``seed``, of dropout, and ``lse_rest``, room for what
            rounding takes from the log-sum-exp; where a plan says how many rows are computed at
            once, with ``chunk_rows``.
        backward_of: returns the backward pass of a problem, with ``chunk_rows`` likewise.
        launcher: returns its function of repeated calls without gradients, likewise.
        is_chunked: plans say how many rows are computed at once.
        repeated: returns the passes of repeated calls that want gradients of q, k and v alone.
    """

    def __init__(
        self,
        name: str,
        compute: Callable[..., Result],
        backward_of: Callable[..., _Backward],
        launcher: Callable[..., Direct],
        *,
        is_chunked: bool = False,
        repeated: Callable[[AttentionProblem], _Repeated] | None = None,
    ) -> None:
        self.name = name
        self.compute = compute
        self._backward_of = backward_of
        self._launcher = launcher
        self._is_chunked = is_chunked
        self._repeated = repeated
        passes = Training(
            seed_of=drawn_seed, forward=self._graph_forward, backward=self._graph_backward
        )
        self.operator = operator(name, self._eager, passes)

    def run(self, tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        """Return attention with the row outputs that ``problem.aux`` asks for.

        Args:
            tensors: of the call.
            problem: what to compute.
            group: says how many rows are computed at once, where plans do.

        Raises:
            ExecutorError: a kernel cannot be compiled here.
        """
        chunk_rows = group.launch.chunk_rows if self._is_chunked else 0
        if is_watched(tensors.query):
            return self.operator(tensors, problem, chunk_rows)
        return self._eager(tensors, problem, chunk_rows)

    def direct(self, problem: AttentionProblem, group: HeadGroup) -> Direct:
        """Return a problem's function of repeated calls.

        Args:
            problem: of the calls.
            group: as for `run`.
        """
        chunk_rows = group.launch.chunk_rows if self._is_chunked else 0
        launch: Direct
        if problem.wants_gradients:
            asked = trained(problem)
            launch = partial(self._output, asked, chunk_rows)
            if self._repeated is not None and _is_alone(problem):
                launch = partial(self._output_alone, asked, self._repeated(asked), launch)
        else:
            launch = self._launcher(problem, **_chunked(chunk_rows))

        def run(*given: Any) -> torch.Tensor:
            if is_observed(given[0]):
                return self.operator(Tensors.of_direct(*given), problem, chunk_rows).output
            return launch(*given)

        return run

    def _eager(self, tensors: Tensors, problem: AttentionProblem, chunk_rows: int) -> Result:
        """Return the result where nobody watches operators."""
        if not problem.wants_gradients:
            return self.compute(problem, *tensors.as_direct(), **_chunked(chunk_rows))
        found = self._differentiable(_trained_once(problem), chunk_rows, *tensors.as_direct())
        output, lse, row_max, entropy, dropped = found
        return Result(
            output=output,
            lse=lse if problem.wants(Aux.LSE) else None,
            row_max=row_max,
            entropy=entropy,
            dropped_mass=dropped,
        )

    def _output(self, problem: AttentionProblem, chunk_rows: int, *given: Any) -> torch.Tensor:
        """Return the output alone, known to autograd."""
        output: torch.Tensor = self._differentiable(problem, chunk_rows, *given)[0]
        return output

    def _output_alone(
        self,
        problem: AttentionProblem,
        repeated: _Repeated,
        otherwise: Direct,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: None,
    ) -> torch.Tensor:
        """Return the output of q, k and v alone, known to autograd, which is told less."""
        del rest
        if not is_untransformed(query, key, value):
            return otherwise(query, key, value)
        output: torch.Tensor = _apply_alone(self, problem, repeated, query, key, value)
        return output

    def _differentiable(
        self,
        problem: AttentionProblem,
        chunk_rows: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: _Optional = None,
        sinks: _Optional = None,
        slopes: _Optional = None,
        starts_q: _Optional = None,
        starts_k: _Optional = None,
        blocks: BlockList | None = None,
        terms: HeadTerms | None = None,
    ) -> tuple[Any, ...]:
        """Return output and statistics of a problem as `trained`, known to autograd."""
        check_untransformed(query, key, value)
        scale = window = softcap = None
        if terms is not None:
            scale, window, softcap = terms.scale, terms.window, terms.softcap
        beside = (starts_q, starts_k, blocks, window, chunk_rows)
        given = (query, key, value, mask, sinks, slopes, scale, softcap)
        apply = _Attention.apply if meets_transforms(given) else _apply
        found: tuple[Any, ...] = apply(self, problem, beside, *given)
        return found

    def _graph_forward(
        self, tensors: Tensors, problem: AttentionProblem, seed: _Optional, chunk_rows: int
    ) -> tuple[Result, _Optional]:
        """Return the result of the operator's forward pass, and what it keeps beside it."""
        rest = _kept_rest(tensors.query, tensors.mask)
        given = tensors.as_direct()
        chunked = _chunked(chunk_rows)
        return self.compute(problem, *given, seed=seed, lse_rest=rest, **chunked), rest

    def _graph_backward(
        self,
        tensors: Tensors,
        problem: AttentionProblem,
        kept: Kept,
        upstream: torch.Tensor,
        lse_upstream: torch.Tensor,
        wanted: Sequence[bool],
    ) -> tuple[_Optional, ...]:
        """Return the gradients of a call in the order of `GIVEN`, as an operator asks."""
        names = _wanted(tuple(wanted))
        return self.gradients(problem, tensors, kept, upstream, lse_upstream, names)

    def gradients(
        self, problem: AttentionProblem, tensors: Tensors, kept: Kept, *rest: Any
    ) -> tuple[_Optional, ...]:
        """Return the gradients of a call in the order of `GIVEN`; None of what wants none."""
        backward = self._backward_of(problem, **_chunked(kept.chunk_rows))
        return tuple(map(backward(tensors, kept, *rest).get, GIVEN))


def _is_alone(problem: AttentionProblem) -> bool:
    """Return whether a call has q, k and v alone, and no dropout, which is drawn."""
    is_plain = num_taken(problem) <= _PLAIN_TAKEN and problem.mask is MaskKind.NONE
    return is_plain and not problem.dropout_p


@lru_cache(maxsize=256)
def _wanted(needs: tuple[bool, ...]) -> frozenset[str]:
    """Return the names of those of `GIVEN` that want a gradient."""
    return frozenset(name for name, need in zip(GIVEN, needs, strict=True) if need)


_trained_once = lru_cache(maxsize=1024)(trained)
"""`trained`, which an eager call does not work out anew; a graph cannot look into it."""


def drawn_seed(query: torch.Tensor) -> torch.Tensor:
    """Return the seed of a call's dropout, int64 [1], from its device's generator."""
    return torch.randint(2**62, (1,), device=query.device)


def with_statistics(
    launcher: Callable[..., torch.Tensor],
    problem: AttentionProblem,
    given: tuple[Any, ...],
    others: dict[str, Any],
) -> Result:
    """Return the output of a launcher, and the statistics of rows that a problem asks for.

    Args:
        launcher: writes those that it is given, in the order of `STATISTICS`, and returns the
            output.
        problem: of the call.
        given: what a `Direct` takes.
        others: what the launcher takes beside it.
    """
    query = given[0]
    statistics = tuple(
        unfilled(query, query.shape[:3], dtype=torch.float32) if problem.wants(flag) else None
        for flag in STATISTICS
    )
    output = launcher(*given, statistics=statistics, **others)
    lse, row_max, entropy, dropped = statistics
    return Result(output=output, lse=lse, row_max=row_max, entropy=entropy, dropped_mass=dropped)


def _chunked(chunk_rows: int) -> dict[str, int]:
    """Return what an executor is told of the rows that it computes at once, if a plan says it."""
    return {"chunk_rows": chunk_rows} if chunk_rows else {}


def _kept_rest(query: torch.Tensor, mask: _Optional) -> _Optional:
    """Return room for what rounding takes from the log-sum-exp; None where it does not matter."""
    if not keeps_rest(query, mask):
        return None
    return query.new_empty(query.shape[:3], dtype=torch.float32)


class _Attention(torch.autograd.Function):
    """The kernels of a problem as autograd sees them.

    The row outputs beside the log-sum-exp have no gradients. A second derivative raises an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Differentiated,
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
        rest = _kept_rest(query, mask)
        found = kernels.compute(problem, *given, seed=seed, lse_rest=rest, **_chunked(chunk_rows))
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
        wanted = _wanted(ctx.needs_input_grad[-len(GIVEN) :])
        known = (ctx.kernels, ctx.problem, ctx.chunk_rows, wanted)
        given = (*known, upstream, lse_upstream, *ctx.saved_tensors)
        # Gradients are wanted of gradients with ``create_graph=True`` alone.
        compute: Callable[..., Any] = _Gradients.apply if torch.is_grad_enabled() else _computed
        found = compute(*given)
        return (None, None, None, *found)


class _Alone(torch.autograd.Function):
    """The same of q, k and v alone, of which the output alone is wanted; there is no dropout.

    Behind a kernel that empties the caches of the host it takes half as long: it is handed three
    tensors instead of eight, keeps five instead of fifteen, and the launches of repeated calls are
    found without shapes (docs/kernel-notes.md).
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Differentiated,
        problem: AttentionProblem,
        repeated: _Repeated,
        *given: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output."""
        found = repeated[0](*given)
        if found is None:
            result = kernels.compute(problem, *given)
            found = result.output, result.lse
        ctx.known = kernels, problem, repeated
        ctx.save_for_backward(*given, *found)
        output: torch.Tensor = found[0]
        return output

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        """Return the gradients of q, k and v."""
        kernels, problem, repeated = ctx.known
        query, key, value, output, lse = ctx.saved_tensors
        found = None
        if not torch.is_grad_enabled():
            found = repeated[1](query, key, value, upstream, output, lse)
        if found is None:
            wanted = _wanted((*ctx.needs_input_grad[3:], *_UNASKED))
            given = kernels, problem, 0, wanted, upstream, None, output, lse, None, None
            compute = _Gradients.apply if torch.is_grad_enabled() else _computed
            others = (None,) * (len(_SAVED) - 3 + 5)
            found = compute(*given, query, key, value, *others)[:3]
        return (None, None, None, *found)


_UNASKED: Final = (False,) * (len(GIVEN) - 3)
"""Of q, k and v alone nothing else wants a gradient."""


_apply: Final[Callable[..., tuple[Any, ...]]] = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without what that does for transforms of ``torch.func``: 3 us less."""

_apply_alone: Final[Callable[..., Any]] = super(torch.autograd.Function, _Alone).apply


def _computed(
    kernels: Differentiated,
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
    def forward(ctx: Any, kernels: Differentiated, *given: Any) -> tuple[_Optional, ...]:
        """Return the gradients in the order of `GIVEN`; None of what wants none."""
        ctx.name = kernels.name
        return _computed(kernels, *given)

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
