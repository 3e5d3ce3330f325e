"""One run of an evaluation while it goes on, and its frozen result."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adaattn.evaluation.attention_clock import AttentionClock
from adaattn.evaluation.ledger import Ledger
from adaattn.evaluation.metrics import paired_summary, quartiles
from adaattn.evaluation.results import RunResult
from adaattn.spec import Policy

__all__ = ["Run", "finished"]

_POSITION_BINS = 128
"""Points of the plot by position."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One run while it goes on."""

    name: str
    implementation: str
    policy: Policy | None = None
    clock: AttentionClock
    ledger: Ledger = field(default_factory=Ledger)
    is_clocked: bool = False
    attention_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    differences: list[torch.Tensor] = field(default_factory=list)
    divergences: list[torch.Tensor] = field(default_factory=list)


def finished(run: Run, exact_losses: torch.Tensor, positions: Sequence[int]) -> RunResult:
    """Return the frozen result of one run.

    Args:
        run: all windows done.
        exact_losses: [N] of the exact run's tokens, float64.
        positions: [N] of these tokens in the text.
    """
    nothing = torch.zeros_like(exact_losses)
    differences = torch.cat(run.differences) if run.differences else nothing
    divergences = torch.cat(run.divergences) if run.divergences else nothing
    mean, error, absolute = paired_summary(differences)
    divergence, divergence_error, _ = paired_summary(divergences)
    low, median, high = quartiles(run.attention_ms) if run.is_clocked else (None, None, None)
    loss = float(exact_losses.mean()) + mean
    summary = run.ledger.summary()
    return RunResult(
        name=run.name,
        implementation="adaattn" if run.policy is not None else run.implementation,
        error_budget=None if run.policy is None else run.policy.error_budget,
        loss=loss,
        perplexity=math.exp(loss),
        loss_difference=mean,
        loss_difference_error=error,
        mean_absolute_difference=absolute,
        divergence=divergence,
        divergence_error=divergence_error,
        max_divergence=float(divergences.max()),
        attention_ms=median,
        attention_ms_low=low,
        attention_ms_high=high,
        forward_ms=statistics.median(run.forward_ms),
        peak_bytes=run.peak_bytes,
        workspace_bytes=summary.workspace_bytes,
        methods=summary.methods,
        approximated=summary.approximated,
        mean_output_error=summary.mean_error,
        max_output_error=summary.max_error,
        fallbacks=summary.fallbacks,
        chosen=summary.chosen,
        decisions=summary.decisions,
        refusals=summary.refusals,
        difference_by_position=_bins(differences, positions),
        token_differences=tuple(differences.tolist()),
    )


def _bins(differences: torch.Tensor, positions: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Return the mean difference of equal stretches of the text."""
    size = max(1, -(-differences.numel() // _POSITION_BINS))
    return tuple(
        (positions[begin], float(differences[begin : begin + size].mean()))
        for begin in range(0, differences.numel(), size)
    )
