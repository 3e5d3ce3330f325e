"""Low rank of large head dimensions: budgeted calls once they have settled, beside exact ones.

    python -m benchmarks.wide --device cuda --low-rank

K and V are of planted rank 96 with noise of 1 %, and in one cell of full rank, where the budgeted
call has to stay exact. Calls under a budget of 2 % are made until one of them is approximate and 40
more, or 1000 in all; then they are timed in turns with exact calls and PyTorch's function, with all
that measuring, auditing and the comparison with exact calls costs. Errors are those of 64 rows.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F

import adaattn
from adaattn.testing import head_errors
from benchmarks.timing import interleaved, ratio_row

__all__ = ["CELLS", "LowRankCell", "row_of"]

BUDGET: Final = 0.02
_NOISE: Final = 0.01
_ROWS: Final = 64
_MOST_CALLS, _MORE_CALLS = 1000, 40

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankCell:
    """Heads of D 1024 in bf16.

    Args:
        heads: of q, k and v.
        tokens: Sq and Sk.
        rank: of k and v, but for noise; 0 is full.
        dim: D.
        most_calls: to settle in.
    """

    heads: int
    tokens: int
    rank: int
    dim: int = 1024
    most_calls: int = _MOST_CALLS

    @property
    def name(self) -> str:
        """As in results."""
        rank = f"rank {self.rank}" if self.rank else "full rank"
        return f"low rank D{self.dim} S{self.tokens} H{self.heads} {rank}"

    def tiny(self) -> "LowRankCell":
        """Return the cell at toy sizes, to see that all of it runs."""
        return replace(self, heads=2, tokens=256, dim=320, rank=self.rank // 4, most_calls=8)


CELLS: Final = (
    LowRankCell(heads=32, tokens=4096, rank=96),
    LowRankCell(heads=8, tokens=16384, rank=96),
    LowRankCell(heads=32, tokens=4096, rank=0),
)


def inputs_of(cell: LowRankCell, device: str) -> Qkv:
    """Return q, k and v [1, H, S, D], always the same."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, cell.heads, *shape, device=device, generator=generator)

    def planted() -> torch.Tensor:
        if not cell.rank:
            return normal(cell.tokens, cell.dim)
        low = normal(cell.tokens, cell.rank) @ normal(cell.rank, cell.dim) / cell.rank**0.5
        return low + _NOISE * normal(cell.tokens, cell.dim)

    query, key, value = normal(cell.tokens, cell.dim), planted(), planted()
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def settled(run: Callable[[], torch.Tensor], cell: LowRankCell) -> tuple[int, Any]:
    """Return after how many calls one was approximate, 0 for never, and the last event."""
    events: list[adaattn.AttentionEvent] = []
    taken, end = 0, cell.most_calls
    with adaattn.record_events(events.append):
        while len(events) < end:
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # so that what is on its way arrives
            if not taken and not events[-1].decision.plan.is_exact:
                taken = len(events)
                end = min(end, taken + _MORE_CALLS)
    return taken, events[-1]


def error_of(output: torch.Tensor, qkv: Qkv) -> float:
    """Return the largest relative error of a head's rows, against fp32 from the same numbers."""
    query, key, value = qkv
    rows = torch.linspace(0, query.shape[2] - 1, _ROWS, device=query.device).long()
    scores = query[:, :, rows].float() @ key.float().mT / query.shape[3] ** 0.5
    exact = scores.softmax(-1) @ value.float()
    return float(head_errors(output[:, :, rows], exact).amax())


def row_of(cell: LowRankCell, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result row of a cell; a budgeted call that is over its budget is not timed."""
    qkv = inputs_of(cell, options.device)
    policy = adaattn.Policy(name=f"two percent, {cell.name}", error_budget=BUDGET)  # own history
    budgeted = "adaattn, 2 %"
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "F.sdpa": lambda: F.scaled_dot_product_attention(*qkv),
        "adaattn": lambda: adaattn.scaled_dot_product_attention(*qkv),
        budgeted: lambda: adaattn.scaled_dot_product_attention(*qkv, policy=policy),
    }
    skipped: dict[str, str] = {}
    with torch.no_grad():
        adaattn.warmup(runs["adaattn"])  # else the exact calls would wait for what they compile
        taken, last = settled(runs[budgeted], cell)
        events: list[adaattn.AttentionEvent] = []
        with adaattn.record_events(events.append):
            runs["adaattn"]()
        errors = {name: error_of(run(), qkv) for name, run in runs.items()}
        if not errors[budgeted] <= BUDGET + torch.finfo(torch.bfloat16).eps:
            skipped[budgeted] = f"wrong: error {errors[budgeted]:.3g}, {BUDGET:g} allowed"
            del runs[budgeted]
        timings = interleaved(runs, device=options.device, rounds=options.rounds, limit_s=20.0)
    said = [entry for entry in last.decision.trace if entry.candidate.startswith("low_rank.sketch")]
    return ratio_row(
        cell.name,
        timings,
        "adaattn",
        kind="low rank",
        executors={
            "adaattn": [group.label for group in events[0].decision.plan.groups],
            budgeted: [group.label for group in last.decision.plan.groups],
        },
        taken_after=taken,
        errors=errors,
        trace=[f"{entry.candidate}: {entry.reason}" for entry in said],
        skipped=skipped,
    )
