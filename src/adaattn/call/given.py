"""A plan that the caller made, followed call after call."""

from collections import deque
from dataclasses import replace

import torch

from adaattn.backends import exact_in_bounded_memory
from adaattn.call.arriving import Arriving
from adaattn.call.audit import (
    AUDIT_EVERY,
    Outcome,
    audited_later,
    is_lossy,
    over_budget,
    with_audit,
)
from adaattn.call.describe import Call
from adaattn.call.run import run_plan
from adaattn.spec import AttentionProblem, Plan

__all__ = ["Given"]


class Given:
    """A plan that loses something, followed by all calls of a kind.

    Where the host may wait, `run_plan` audits each call and repairs it. Where it may not, the first
    call and every 16th after it are audited, and nobody waits for the verdict: heads that are found
    over the plan's budget are computed exactly from then on.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._calls = 0
        self._arriving: deque[Arriving] = deque()

    def run(self, call: Call) -> Outcome:
        """Return the outcome of one call.

        Raises:
            UnsupportedError: an executor of the plan cannot serve the call.
        """
        problem = call.problem
        if problem.may_wait or not self._plan.audit_rows or _is_fixed(problem):
            return run_plan(call, self._plan)
        arrived = self._take_in(problem)
        outcome = run_plan(call, self._plan)
        if self._calls % AUDIT_EVERY == 0 and is_lossy(self._plan, problem):
            later = audited_later(call, outcome, self._plan.audit_rows, 1 + self._calls)
            self._arriving.append(later)
        self._calls += 1
        return with_audit(outcome, *arrived)

    def _take_in(self, problem: AttentionProblem) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Return what has arrived, the plan changed where heads were over its budget."""
        errors: tuple[float, ...] = ()
        sentences: list[str] = []
        while self._arriving and self._arriving[0].is_here():
            errors = self._arriving.popleft().value()
            budgets = (self._plan.error_budget,) * self._plan.num_heads
            over, sentence = over_budget(errors, budgets)
            if over:
                self._plan = _with_exact(self._plan, over, problem)
                sentences.append(sentence)
        return errors, tuple(sentences)


def _is_fixed(problem: AttentionProblem) -> bool:
    """Return whether a call can have no audit: packed, with dropout, or captured in a graph."""
    if problem.num_sequences or problem.dropout_p:
        return True
    return problem.device_type == "cuda" and torch.cuda.is_current_stream_capturing()


def _with_exact(plan: Plan, heads: tuple[int, ...], problem: AttentionProblem) -> Plan:
    """Return the plan with some heads computed exactly."""
    every = range(plan.num_heads)
    exact = exact_in_bounded_memory(problem, None)
    left = [(group, set(group.heads or every) - set(heads)) for group in plan.groups]
    kept = [replace(group, heads=tuple(sorted(rest))) for group, rest in left if rest]
    if not kept:
        return replace(plan, groups=(exact,))
    barred = replace(exact, heads=tuple(sorted(heads)))
    return replace(plan, groups=(*kept, barred))
