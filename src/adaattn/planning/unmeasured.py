"""Why nobody measured an approximation, in words."""

from typing import Final

from adaattn.planning.assignment import MARGIN
from adaattn.planning.candidates import Candidate
from adaattn.planning.cost import measuring_ms
from adaattn.planning.trace import format_ms
from adaattn.spec import AttentionProblem, HardwareFacts, Policy

__all__ = ["DROPOUT_HIDES", "why_unmeasured"]

DROPOUT_HIDES: Final = "dropout hides errors of this size, so they cannot be checked"

_LOSES_NOTHING: Final = "it approximates, and the error budget is 0"
_MEASURES_THE_BATCH: Final = (
    "its error is measured on the whole batch, which batch_invariant excludes"
)


def why_unmeasured(
    item: Candidate,
    problem: AttentionProblem,
    hardware: HardwareFacts,
    policy: Policy,
    exact: Candidate,
) -> str:
    """Return the sentence for an approximation that nobody measured.

    Args:
        item: the approximation.
        problem: as for `adaattn.planning.decide`.
        hardware: likewise.
        policy: likewise.
        exact: the way that is taken instead.
    """
    rows = policy.audit_rows
    if problem.batch_invariant:
        return _MEASURES_THE_BATCH
    if not policy.allows_loss:
        return _LOSES_NOTHING
    if rows == 0:
        return "it must be checked on sampled rows, and the policy audits none"
    if problem.dropout_p:
        return DROPOUT_HIDES
    if problem.num_sequences:
        return "errors are not measured on packed sequences yet; call it for each sequence"
    if problem.len_q < 4 * rows:
        return (
            f"checked on {rows} rows, it takes {4 * rows} at least; this call has {problem.len_q}"
        )
    overhead = measuring_ms(problem, hardware, rows, 0)
    if item.time_ms + overhead < (1 - MARGIN) * exact.time_ms:
        return "it is tried when exact calls have paid for a try"
    mine, check, theirs = map(format_ms, (item.time_ms, overhead, exact.time_ms))
    times = f"{mine} and {check} of checking, it would not beat {exact.name}: {theirs}"
    return f"even at its best, {times} (estimated)"
