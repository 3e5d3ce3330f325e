"""The outcome of a call, held against exact rows: heads over their budget are computed again."""

import logging
from collections import Counter
from dataclasses import dataclass, replace

import torch

from adaattn.backends import Result, run_group, slice_heads
from adaattn.backends.interface import combine
from adaattn.errors import UnsupportedError
from adaattn.measure import audit, sample_rows
from adaattn.planning import head_budgets
from adaattn.planning.launch import choose_chunk_rows
from adaattn.spec import AttentionProblem, Decision, HeadGroup, Plan, Policy
from adaattn.validation import Call

__all__ = ["FALLBACKS", "Outcome", "audited", "is_lossy"]

_LOGGER = logging.getLogger("adaattn")

FALLBACKS: Counter[str] = Counter()
"""Steps down taken by ``backend="auto"`` in this process, by the executor that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call gave.

    Args:
        result: the executor's outputs.
        decision: plan and reasons; None when the plan was given.
        head_errors: [B, Hq] error on sampled rows, or None where nothing was approximated.
        worst_errors: the largest of each head over the batch, on the host; () likewise.
        fallbacks: each step down, as a sentence.
        repaired_heads: query heads that were over their budget and computed again exactly.
        is_settled: calls with the same static facts are decided alike, whatever they hold.
    """

    result: Result
    decision: Decision | None
    head_errors: torch.Tensor | None = None
    worst_errors: tuple[float, ...] = ()
    fallbacks: tuple[str, ...] = ()
    repaired_heads: tuple[int, ...] = ()
    is_settled: bool = False


def is_lossy(plan: Plan, problem: AttentionProblem) -> bool:
    """Return whether a plan loses anything that the input's own precision would keep."""
    return not plan.is_exact or any(g.precision is not problem.precision for g in plan.groups)


def audited(
    call: Call, outcome: Outcome, policy: Policy, backend: str, layer: int, seed: int
) -> Outcome:
    """Return the outcome with its errors on rows drawn anew.

    Heads over their budget are computed exactly; where the executor was named, that is an
    error instead.

    Args:
        call: what was asked.
        outcome: what was found.
        policy: its budgets.
        backend: ``"auto"``, or what was asked for by name.
        layer: which layer's budgets.
        seed: of the rows; above 0, since planning measures those of 0.

    Raises:
        UnsupportedError: an approximation asked for by name is over its budget.
    """
    decision, result = outcome.decision, outcome.result
    assert decision is not None
    budgets = head_budgets(policy, call.problem.num_heads, layer)
    half = max(policy.audit_rows - policy.audit_rows // 2, 1)
    sample = sample_rows(call.tensors, call.problem, half, seed=seed)
    errors = audit(result.output, sample)
    worst = errors.amax(0).tolist()
    over = tuple(head for head, error in enumerate(worst) if not error <= budgets[head])
    if not over:
        return replace(outcome, head_errors=errors, worst_errors=tuple(worst))
    shown = ", ".join(str(head) for head in over)
    found = (
        f"audit: heads {shown} had errors up to {max(worst[head] for head in over):.2g}, "
        f"{min(budgets[head] for head in over):g} allowed"
    )
    if backend != "auto" and not decision.plan.is_exact:
        raise UnsupportedError(
            f"backend {backend!r}", [found], "Raise the error budget, or pass backend='auto'."
        )
    sentence = f"{found}; they were computed exactly"
    _LOGGER.info("%s", sentence)
    FALLBACKS.update(["audit"])
    return Outcome(
        result=_repaired(call, result, over, policy),
        decision=replace(decision, notes=(*decision.notes, sentence)),
        head_errors=errors.index_fill(1, torch.tensor(over, device=errors.device), 0.0),
        worst_errors=tuple(0.0 if head in over else error for head, error in enumerate(worst)),
        fallbacks=(*outcome.fallbacks, sentence),
        repaired_heads=over,
    )


def _repaired(call: Call, result: Result, heads: tuple[int, ...], policy: Policy) -> Result:
    """Return the result with some heads, and all that is told of them, computed exactly."""
    part, problem = slice_heads(call.tensors, call.problem, heads)
    group = HeadGroup(
        capability="chunked",
        precision=problem.precision,
        chunk_rows=choose_chunk_rows(problem, policy.memory_budget_bytes),
    )
    exact = run_group(part, problem, group)
    index = torch.tensor(heads, device=result.output.device)

    return combine(
        [result, exact],
        lambda pair: pair[0].index_copy(1, index, pair[1].to(pair[0].dtype)),
    )
