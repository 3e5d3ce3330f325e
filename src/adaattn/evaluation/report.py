"""An evaluation in words and tables, for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adaattn.errors import ArgumentError
from adaattn.evaluation.results import Comparison, EvaluationResult, RunResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "COST_COLUMNS",
    "NOTICEABLE",
    "QUALITY_COLUMNS",
    "comparison_lines",
    "comparison_rows",
    "cost_rows",
    "headline",
    "is_clear",
    "method_lines",
    "print_report",
    "quality_rows",
    "verdict",
]

QUALITY_COLUMNS = (
    "run",
    "perplexity",
    "loss difference (nat)",
    "mean |diff|",
    "KL to exact",
    "output error",
)
COST_COLUMNS = (
    "run",
    "attention",
    "of exact",
    "all layers",
    "of exact",
    "peak",
    "workspace",
)
"""Times are those of the median window."""

COMPARISON_COLUMNS = (
    "problem",
    "AdaAttn",
    "PyTorch",
    "AdaAttn is",
    "memory",
    "PyTorch's",
    "difference",
)

_MAX_METHODS = 4
NOTICEABLE = 0.02
"""Ratios of two times closer to 1 than this are within what repeated runs differ by."""

_ROUNDED = 0.1
"""Ratios nearer to 1 than this are given with another digit."""

_MEGABYTE = 1e6


def print_report(result: EvaluationResult, console: "Console") -> None:
    """Print tables, methods and verdict.

    Args:
        result: what `evaluate` returned.
        console: where to print; its width decides how tables fold.
    """
    from rich.markup import escape

    console.print(escape(headline(result)), highlight=False)
    console.print(_table(QUALITY_COLUMNS, quality_rows(result)))
    console.print(_table(COST_COLUMNS, cost_rows(result), "times of the median window"))
    for line in method_lines(result):
        console.print(escape(line), highlight=False)
    if result.comparisons:
        caption = "Single problems beside PyTorch: median times, and the memory that a call adds"
        console.print()
        console.print(_table(COMPARISON_COLUMNS, comparison_rows(result), caption))
        for line in comparison_lines(result):
            console.print(escape(line), highlight=False)
    console.print()
    console.print(escape(verdict(result)), highlight=False)


def headline(result: EvaluationResult) -> str:
    """Return one line that says what was evaluated."""
    return (
        f"{result.model} on {result.text}: {result.scored} tokens scored, "
        f"window {result.window}, stride {result.stride}, {result.dtype} on "
        f"{result.device} ({result.device_name or 'unknown device'})"
    )


def quality_rows(result: EvaluationResult) -> list[tuple[str, ...]]:
    """Return one row for each run: what it loses."""
    return [
        (
            run.name,
            f"{run.perplexity:.4f}",
            _difference(run),
            "" if run.name == "exact" else f"{run.mean_absolute_difference:.1e}",
            "" if run.name == "exact" else f"{run.divergence:.1e}",
            _error(run),
        )
        for run in result.runs
    ]


def cost_rows(result: EvaluationResult) -> list[tuple[str, ...]]:
    """Return one row for each run: what it costs."""
    exact = _exact(result)
    return [
        (
            run.name,
            "unknown" if run.attention_ms is None else f"{run.attention_ms:.0f} ms",
            _ratio(run.attention_ms, exact.attention_ms),
            f"{run.forward_ms:.0f} ms",
            _ratio(run.forward_ms, exact.forward_ms),
            "unknown" if run.peak_bytes is None else f"{run.peak_bytes / _MEGABYTE:.0f} MB",
            "unknown" if run.error_budget is None else f"{run.workspace_bytes / _MEGABYTE:.1f} MB",
        )
        for run in result.runs
    ]


def method_lines(result: EvaluationResult) -> list[str]:
    """Return one line for each run: the share of heads that each method served."""
    lines = []
    for run in result.runs:
        if not run.methods:
            continue
        shares = [f"{share:.1%} {label}" for label, share in run.methods[:_MAX_METHODS]]
        rest = sum(share for _, share in run.methods[_MAX_METHODS:])
        shares += [f"{rest:.1%} others"] if rest else []
        lines.append(f"heads by method, {run.name}: {', '.join(shares)}")
    return lines


def comparison_rows(result: EvaluationResult) -> list[tuple[str, ...]]:
    """Return one row for each single problem: both sides' times and memory."""
    return [
        (
            item.name,
            _milliseconds(item.ours_ms),
            "not run" if item.peer_ms is None else _milliseconds(item.peer_ms),
            _times(item),
            _megabytes(item.ours_bytes),
            # Of a peer that was not run it is a lower bound.
            ("over " if item.error is None else "") + _megabytes(item.peer_bytes),
            "" if item.error is None else f"{item.error:.1e}",
        )
        for item in result.comparisons
    ]


def comparison_lines(result: EvaluationResult) -> list[str]:
    """Return one line for each single problem: its sizes, and what ran on both sides."""
    return [
        f"{item.name}: {item.detail}; AdaAttn: {item.chosen}; PyTorch: {item.peer}"
        + (f"; not compared: {item.why_not}" if item.why_not else "")
        for item in result.comparisons
    ]


def verdict(result: EvaluationResult) -> str:
    """Return one paragraph in plain words: is exact exact, and what did each policy buy."""
    exact = _exact(result)
    baseline = result.runs[0]
    agreement = baseline.mean_absolute_difference
    exactly = f"to {agreement:.1e} nat a token" if agreement else "bit for bit"
    sentences = [f"Exact attention agrees with Transformers' {baseline.name} {exactly}."]
    for run in result.runs:
        if run.error_budget is not None and run is not exact:
            sentences += _judge(run, result)
    if result.comparisons:
        sentences.append(_compared(result.comparisons))
    return " ".join(sentences)


def _spreads_overlap(run: RunResult, other: RunResult) -> bool:
    """Return whether the quartiles over windows of two attention times have times in common.

    Times that are not known might.
    """
    if run.attention_ms_low is None or run.attention_ms_high is None:
        return True
    if other.attention_ms_low is None or other.attention_ms_high is None:
        return True
    first = max(run.attention_ms_low, other.attention_ms_low)
    return first <= min(run.attention_ms_high, other.attention_ms_high)


def is_clear(run: RunResult, result: EvaluationResult) -> bool:
    """Return whether a run's attention time is told from exact attention's by more than noise.

    The quartiles of the two must not overlap, and they must be further apart than Transformers'
    own attention is where that computed what exact attention did, bit for bit.
    """
    exact = _exact(result)
    if _spreads_overlap(run, exact) or not run.attention_ms or not exact.attention_ms:
        return False
    theirs = [it for it in result.runs if it.error_budget is None and it.attention_ms]
    alike = [it.attention_ms or 0.0 for it in theirs if not it.mean_absolute_difference]
    noise = [abs(found - exact.attention_ms) for found in alike]
    return abs(run.attention_ms - exact.attention_ms) > max(noise, default=0.0)


def _compared(comparisons: Sequence[Comparison]) -> str:
    """Return what single problems took, beside PyTorch: the faster, the others by name."""
    ratios = {item.name: item.time_ratio for item in comparisons}
    faster = sorted(r for r in ratios.values() if r is not None and r > 1 + NOTICEABLE)
    text = f"Of {len(ratios)} single problems, AdaAttn computed {len(faster)} faster than PyTorch"
    if faster:
        most = f" to {faster[-1]:.1f}" if len(faster) > 1 else ""
        text += f", {faster[0]:.1f}{most} times as fast"
    known = [(name, ratio) for name, ratio in ratios.items() if ratio is not None]
    slower = [f"{name} ({ratio:.2f}x)" for name, ratio in known if ratio < 1 - NOTICEABLE]
    level = [name for name, ratio in known if abs(ratio - 1) <= NOTICEABLE]
    missing = [name for name, ratio in ratios.items() if ratio is None]
    for words, names in (
        ("slower", slower),
        ("as fast", level),
        ("by AdaAttn alone", missing),
    ):
        text += f"; {words}: {', '.join(names)}" if names else ""
    return f"{text}."


def _times(item: Comparison) -> str:
    """Return how many times as fast AdaAttn was, in words."""
    ratio = item.time_ratio
    if ratio is None:
        return ""
    if ratio > 1 + NOTICEABLE:
        return f"{ratio:.1f}x faster" if ratio >= 1 + _ROUNDED else f"{ratio:.2f}x faster"
    return f"{ratio:.2f}x: slower" if ratio < 1 - NOTICEABLE else "as fast"


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _megabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / _MEGABYTE:.0f} MB"


def _judge(run: RunResult, result: EvaluationResult) -> list[str]:
    """Return what one policy lost and bought."""
    exact = _exact(result)
    change = run.perplexity / exact.perplexity - 1
    if run.approximated == 0.0:
        moved = f"loss {run.loss_difference:+.1e} nat a token"
        unchanged = run.mean_absolute_difference == 0.0
        words = [f"{run.name} kept every head exact ({'loss unchanged' if unchanged else moved})."]
        if run.error_budget and run.refusals:
            refusal = run.refusals[0]
            words.append(
                f"The most frequent reason: {refusal.candidate} was refused because "
                f"{refusal.reason.rstrip('.')}."
            )
        return words
    words = [
        f"{run.name} approximated {_share(run.approximated)} of the heads; perplexity moved by "
        f"{change:+.3%}, KL {run.divergence:.1e} nat, measured output error "
        f"{run.mean_output_error:.1e} on average and {run.max_output_error:.1e} at most."
    ]
    if run.attention_ms is not None and exact.attention_ms:
        ratio = run.attention_ms / exact.attention_ms
        words.append(_time_words(ratio, clear=is_clear(run, result)))
    return words


def _share(value: float) -> str:
    """Return a share above 0 as a percentage above 0."""
    return f"{value:.0%}" if value >= 0.1 else f"{max(100 * value, 0.01):.2g}%"


def _time_words(ratio: float, *, clear: bool) -> str:
    """Return a ratio of times as a sentence; a gain and a loss must both be clear."""
    word = "less" if ratio < 1 else "more"
    if abs(ratio - 1) > NOTICEABLE and not clear:
        return (
            f"Its attention took {abs(ratio - 1):.0%} {word} time than exact attention in the "
            "median window, within the noise of these times."
        )
    if ratio < 1 - NOTICEABLE:
        return f"Its attention took {1 - ratio:.0%} less time than exact attention."
    if ratio > 1 + NOTICEABLE:
        return f"Its attention took {ratio - 1:.0%} more time than exact attention: it did not pay."
    return "Its attention took as long as exact attention."


def _exact(result: EvaluationResult) -> RunResult:
    try:
        return result.run("exact")
    except KeyError:
        names = ", ".join(run.name for run in result.runs)
        raise ArgumentError.got("runs", "one named exact", names) from None


def _difference(run: RunResult) -> str:
    if run.name == "exact":
        return "reference"
    if run.mean_absolute_difference == 0.0:
        return "none, bit for bit"
    return f"{run.loss_difference:+.1e} ± {run.loss_difference_error:.0e}"


def _error(run: RunResult) -> str:
    if run.error_budget is None:
        return ""
    if run.approximated == 0.0:
        return "exact"
    return f"{run.mean_output_error:.1e} (max {run.max_output_error:.1e})"


def _ratio(value: float | None, reference: float | None) -> str:
    return "" if value is None or not reference else f"{value / reference:.2f}x"


def _table(
    columns: tuple[str, ...], rows: list[tuple[str, ...]], caption: str | None = None
) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False, caption=caption, caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
