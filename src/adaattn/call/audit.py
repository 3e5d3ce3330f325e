"""The outcome of a call, held against exact rows: heads over their budget are computed again."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from adaattn._transfer import on_device
from adaattn.backends import Result, exact_in_bounded_memory, run_group, slice_heads
from adaattn.backends.interface import combine
from adaattn.call.arriving import Arriving
from adaattn.call.describe import Call
from adaattn.call.measure import audit, sample_rows
from adaattn.errors import UnsupportedError
from adaattn.spec import (
    AttentionProblem,
    Decision,
    Method,
    Plan,
    Precision,
    TensorStats,
    Variant,
)

__all__ = [
    "AUDIT_EVERY",
    "FALLBACKS",
    "Outcome",
    "audited",
    "audited_later",
    "is_lossy",
    "over_budget",
    "with_earlier",
]

_LOGGER = logging.getLogger("adaattn")

AUDIT_EVERY: Final = 16
"""Approximate calls from one audit to the next where the host may not wait for its verdict."""

FALLBACKS: Counter[str] = Counter()
"""Steps down taken by ``backend="auto"`` in this process, by the executor that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call gave.

    Args:
        result: the executor's outputs.
        decision: plan and reasons; None in a graph.
        head_errors: [B, Hq] error on sampled rows, or None where nothing was approximated.
        worst_errors: the largest of each head over the batch, on the host; () likewise.
        earlier_errors: of an audit of an earlier call that has arrived, by head; () for none.
        earlier_over: heads that it found over their budget.
        fallbacks: each step down, as a sentence.
        repaired_heads: query heads that were over their budget and computed again exactly.
        stats: numbers measured on this very call; None if there are none.
        saved_ms: time that approximations were measured to have saved since the last such call,
            less what trying and measuring cost.
        exact_calls_next: calls like this one that may run exactly without a look at anything.
    """

    result: Result
    decision: Decision | None
    head_errors: torch.Tensor | None = None
    worst_errors: tuple[float, ...] = ()
    earlier_errors: tuple[float, ...] = ()
    earlier_over: tuple[int, ...] = ()
    fallbacks: tuple[str, ...] = ()
    repaired_heads: tuple[int, ...] = ()
    stats: TensorStats | None = None
    saved_ms: float = 0.0
    exact_calls_next: int = 0

    def variants(self, own: Precision) -> tuple[Variant, ...]:
        """Return how each head was computed in the end; ``own`` is the format of the input."""
        assert self.decision is not None
        return self.decision.plan.variants(own, self.repaired_heads)


def over_budget(errors: Sequence[float], budgets: tuple[float, ...]) -> tuple[int, ...]:
    """Return the heads whose error is over their budget, or is no number."""
    return tuple(head for head, error in enumerate(errors) if not error <= budgets[head])


def is_lossy(plan: Plan, problem: AttentionProblem) -> bool:
    """Return whether a plan loses anything that the input's own precision would keep."""
    return not plan.is_exact or not all(g.scheme.keeps(problem.precision) for g in plan.groups)


def audited(
    call: Call,
    outcome: Outcome,
    budgets: tuple[float, ...],
    rows: int,
    *,
    seed: int = 1,
    memory_budget_bytes: int | None = None,
    backend: str = "auto",
) -> Outcome:
    """Return the outcome with its errors on rows drawn anew.

    Heads over their budget, and their auxiliary outputs, are computed exactly; where the executor
    was named, that is an error instead.

    Args:
        call: what was asked.
        outcome: what was found.
        budgets: of each head.
        rows: drawn from each head.
        seed: of the rows; above 0, since planning measures those of 0.
        memory_budget_bytes: what computing heads again may take.
        backend: ``"auto"``, or what was asked for by name.

    Raises:
        UnsupportedError: an approximation asked for by name is over its budget.
    """
    errors = audit(outcome.result.output, sample_rows(call.tensors, call.problem, rows, seed=seed))
    worst = errors.amax(0).tolist()
    over = over_budget(worst, budgets)
    if not over:
        return replace(outcome, head_errors=errors, worst_errors=tuple(worst))
    shown = ", ".join(str(head) for head in over)
    found = (
        f"audit: heads {shown} had errors up to {max(worst[head] for head in over):.2g}, "
        f"{min(budgets[head] for head in over):g} allowed"
    )
    decision, result = outcome.decision, outcome.result
    assert decision is not None
    if backend != "auto" and not decision.plan.is_exact:
        raise UnsupportedError(
            f"backend {backend!r}",
            [found],
            "Raise the error budget, or pass backend='auto'.",
        )
    sentence = f"{found}; they were computed exactly"
    _LOGGER.info("%s", sentence)
    FALLBACKS.update(["audit"])
    part, problem = slice_heads(call.tensors, call.problem, over)
    group = exact_in_bounded_memory(problem, memory_budget_bytes)
    exact = run_group(part, problem, group)
    index = torch.tensor(over, device=result.output.device)
    return replace(
        outcome,
        result=combine(
            [result, exact],
            lambda pair: pair[0].index_copy(1, index, pair[1].to(pair[0].dtype)),
        ),
        decision=replace(decision, notes=(*decision.notes, sentence)),
        head_errors=errors.index_fill(1, index, 0.0),
        worst_errors=tuple(0.0 if head in over else error for head, error in enumerate(worst)),
        fallbacks=(*outcome.fallbacks, sentence),
        repaired_heads=over,
    )


def audited_later(call: Call, outcome: Outcome, rows: int, seed: int) -> Arriving:
    """Return an outcome's errors on their way to the host, by head; 0 where a head was exact.

    Args:
        call: what was asked.
        outcome: what was found.
        rows: drawn from each head.
        seed: of the rows.
    """
    problem = call.problem
    errors = audit(outcome.result.output, sample_rows(call.tensors, problem, rows, seed=seed))
    errors = errors.amax(0)
    own = problem.precision
    exact = [
        head for head, found in enumerate(outcome.variants(own)) if found == (Method.EXACT, own)
    ]
    if exact:
        errors = errors.index_fill(0, on_device(torch.tensor(exact), errors.device), 0.0)
    return Arriving.of(errors[None], lambda found: tuple(found[0]))


def with_earlier(
    outcome: Outcome, errors: tuple[float, ...], budgets: tuple[float, ...], then: str
) -> Outcome:
    """Return the outcome with what an audit of an earlier call has found, now that it is here.

    Heads over their budget are logged and counted.

    Args:
        outcome: of the call that meets it.
        errors: by head; () for none.
        budgets: by head.
        then: what becomes of heads that are over.
    """
    if not errors:
        return outcome
    over = over_budget(errors, budgets)
    if over:
        shown = ", ".join(map(str, over))
        _LOGGER.warning("audit: heads %s were over their budget; %s", shown, then)
        FALLBACKS.update(["audit"])
    return replace(outcome, earlier_errors=errors, earlier_over=over)
