"""A plan that the caller made, followed call after call."""

from collections import deque
from functools import lru_cache

import torch

from adaattn.call.adapt import is_transformed
from adaattn.call.arriving import Arriving
from adaattn.call.audit import AUDIT_EVERY, Outcome, audited_later, with_earlier
from adaattn.call.describe import Call
from adaattn.call.recomputing import is_recomputing
from adaattn.call.run import run_plan
from adaattn.spec import AttentionProblem, Plan

__all__ = ["Given", "given"]

_REPORTED = "the plan was given, and is followed all the same"


class Given:
    """A plan that loses something, followed by all calls of a problem.

    Where the host may wait, `run_plan` audits each call and repairs it. Where it may not, the first
    call and every 16th after it are audited, and nobody waits for the verdict: it is in the event
    of the call that meets it, and heads over the plan's budget are logged as a warning and counted.
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
        outcome = run_plan(call, self._plan)
        if not (self._plan.audit_rows and _has_late_audits(call)):
            return outcome
        errors: tuple[float, ...] = ()
        while self._arriving and self._arriving[0].is_here():
            errors = self._arriving.popleft().value()
        if self._calls % AUDIT_EVERY == 0:
            later = audited_later(call, outcome, self._plan.audit_rows, 1 + self._calls)
            self._arriving.append(later)
        self._calls += 1
        return with_earlier(outcome, errors, self._plan.budgets, _REPORTED)


@lru_cache(maxsize=256)
def given(plan: Plan, problem: AttentionProblem) -> Given:
    """Return who follows a plan for a problem: the same one for all its calls."""
    return Given(plan)


def _has_late_audits(call: Call) -> bool:
    """Return whether a call is audited, and the host may not wait for it."""
    problem, tensors = call.problem, call.tensors
    if problem.may_wait or problem.num_sequences or problem.dropout_p or is_recomputing():
        return False
    if is_transformed(tensors.query, tensors.key, tensors.value):
        return False
    return not (tensors.query.is_cuda and torch.cuda.is_current_stream_capturing())
