"""Kernels of our own as autograd knows them, eager and in graphs."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from adaattn.backends.allocation import unfilled
from adaattn.backends.autograd import (
    Repeated,
    attention,
    chunked,
    drawn_seed,
    kept_rest,
    output_only,
    wanted_names,
)
from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import (
    BEFORE_BLOCKS,
    STATISTICS,
    Direct,
    Result,
    Tensors,
    num_taken,
)
from adaattn.backends.operators import (
    GIVEN,
    Kept,
    Training,
    is_observed,
    is_watched,
    operator,
    trained,
)
from adaattn.backends.own_kernels import check_untransformed
from adaattn.spec import AttentionProblem, Aux, HeadGroup

__all__ = ["Differentiated", "with_statistics"]

_Optional = torch.Tensor | None
_Backward = Callable[
    [Tensors, Kept, torch.Tensor, _Optional, frozenset[str]], dict[str, torch.Tensor]
]
"""Returns the gradients that are wanted by their names, of `GIVEN`, from the tensors of a call,
what was kept, and the gradients of output [B, Hq, Sq, Dv] and log-sum-exp, fp32 [B, Hq, Sq]; None
is zero."""


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
        repeated: returns the passes of repeated calls whose output alone is asked for.
    """

    def __init__(
        self,
        name: str,
        compute: Callable[..., Result],
        backward_of: Callable[..., _Backward],
        launcher: Callable[..., Direct],
        *,
        is_chunked: bool = False,
        repeated: Callable[[AttentionProblem], Repeated] | None = None,
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
            if repeated := self._passes(problem, asked):
                launch = partial(self._output_only, asked, repeated, launch)
        else:
            launch = self._launcher(problem, **chunked(chunk_rows))

        def run(*given: Any) -> torch.Tensor:
            if is_observed(given[0]):
                return self.operator(Tensors.of_direct(*given), problem, chunk_rows).output
            return launch(*given)

        return run

    def _eager(self, tensors: Tensors, problem: AttentionProblem, chunk_rows: int) -> Result:
        """Return the result where nobody watches operators."""
        if not problem.wants_gradients:
            return self.compute(problem, *tensors.as_direct(), **chunked(chunk_rows))
        asked = _trained_once(problem)
        # As `direct` does: what a checkpoint computes again is to save as many tensors.
        given = tensors.as_direct()
        if repeated := self._passes(problem, asked):
            output = output_only(self, asked, repeated, *given[: num_taken(problem)])
            if output is not None:
                return Result(output=output)
        found = self._differentiable(asked, chunk_rows, *given)
        output, lse, row_max, entropy, dropped = found
        return Result(
            output=output,
            lse=lse if problem.wants(Aux.LSE) else None,
            row_max=row_max,
            entropy=entropy,
            dropped_mass=dropped,
        )

    def _passes(self, problem: AttentionProblem, asked: AttentionProblem) -> Repeated | None:
        """Return the passes of a problem, trained as ``asked``, for `output_only`; else None.

        Its output alone is asked for, and there is no dropout, which is drawn, nor a list of
        blocks, nor numbers of heads.
        """
        has_others = num_taken(problem) > BEFORE_BLOCKS or problem.dropout_p > 0
        if self._repeated is None or has_others or problem.aux is not Aux.NONE:
            return None
        return self._repeated(asked)

    def _output(self, problem: AttentionProblem, chunk_rows: int, *given: Any) -> torch.Tensor:
        """Return the output alone, known to autograd."""
        output: torch.Tensor = self._differentiable(problem, chunk_rows, *given)[0]
        return output

    def _output_only(
        self, problem: AttentionProblem, repeated: Repeated, otherwise: Direct, *given: _Optional
    ) -> torch.Tensor:
        """Return the output, known to autograd, which is told less than `otherwise`."""
        output = output_only(self, problem, repeated, *given)
        return otherwise(*given) if output is None else output

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
        return attention(self, problem, beside, *given)

    def _graph_forward(
        self, tensors: Tensors, problem: AttentionProblem, seed: _Optional, chunk_rows: int
    ) -> tuple[Result, _Optional]:
        """Return the result of the operator's forward pass, and what it keeps beside it."""
        rest = kept_rest(tensors.query, tensors.mask)
        given = tensors.as_direct()
        others = chunked(chunk_rows)
        return self.compute(problem, *given, seed=seed, lse_rest=rest, **others), rest

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
        names = wanted_names(tuple(wanted))
        return self.gradients(problem, tensors, kept, upstream, lse_upstream, names)

    def gradients(
        self, problem: AttentionProblem, tensors: Tensors, kept: Kept, *rest: Any
    ) -> tuple[_Optional, ...]:
        """Return the gradients of a call in the order of `GIVEN`; None of what wants none."""
        backward = self._backward_of(problem, **chunked(kept.chunk_rows))
        return tuple(map(backward(tensors, kept, *rest).get, GIVEN))


_trained_once = lru_cache(maxsize=1024)(trained)
"""`trained`, which an eager call does not work out anew; a graph cannot look into it."""


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
