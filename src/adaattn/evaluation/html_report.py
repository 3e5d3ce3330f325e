"""An evaluation as one self-contained HTML page: no script, and nothing loaded from anywhere.

Its charts are drawn as SVG by the functions in `_page`, in colours that follow the reader's
choice of a light or a dark screen.
"""

import html
from collections.abc import Iterator
from pathlib import PurePath

from adaattn.evaluation._page.cards import cards_html
from adaattn.evaluation._page.charts import losses_by_position, trade_off
from adaattn.evaluation._page.comparisons import comparison_bars
from adaattn.evaluation._page.heads import head_maps
from adaattn.evaluation._page.markup import figure, note, prose, table
from adaattn.evaluation._page.style import STYLE
from adaattn.evaluation.report import (
    COST_COLUMNS,
    QUALITY_COLUMNS,
    cost_rows,
    headline,
    method_lines,
    quality_rows,
    verdict,
)
from adaattn.evaluation.results import EvaluationResult, RunResult

__all__ = ["html_report"]

_MAX_TRACE_CHARACTERS = 300_000
"""Traces beyond this are left out of the page, so that it stays small."""

_MODELS = {"demo": "SmolLM2-135M-Instruct"}
_TEXTS = {"opticks": "Newton's Opticks"}
"""What the names of the demo stand for; other names stand for themselves."""


def html_report(result: EvaluationResult) -> str:
    """Return the page: verdict, charts, tables, and the decisions of the first window.

    Charts: AdaAttn beside PyTorch on single problems, if the result has any; attention time
    against KL to the exact run; loss difference by position; the method of each head of each
    layer, for policies whose heads differ.

    Args:
        result: what `evaluate` returned.

    Raises:
        ArgumentError: no run is named exact.
    """
    sections = [
        f"<header><h1>{html.escape(_title(result))}</h1>"
        f'<p class="muted">{html.escape(headline(result))}</p></header>',
        f"<main>{cards_html(result)}<p>{prose(verdict(result))}</p>",
    ]
    if result.comparisons:
        sections.append(f"<h2>Beside PyTorch</h2>{comparison_bars(result.comparisons)}")
    sections += [
        '<h2>What a policy costs and what it saves</h2><div class="charts">',
        figure("Attention time against quality", trade_off(result)),
        figure("Loss difference along the text", losses_by_position(result)),
        f"</div><h2>Which heads adapted</h2>{head_maps(result)}",
        "<h2>What each run lost</h2>",
        table(QUALITY_COLUMNS, quality_rows(result), "What each run lost"),
        "<h2>What each run cost in the median window</h2>",
        table(COST_COLUMNS, cost_rows(result), "What each run cost"),
        _methods(result),
        f"<h2>Why</h2>{_reasons(result)}{note([_versions(result)])}</main>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(_title(result))}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _title(result: EvaluationResult) -> str:
    model = _MODELS.get(result.model, PurePath(result.model).name or result.model)
    text = _TEXTS.get(result.text, PurePath(result.text).name or result.text)
    return f"What AdaAttn gives on {model} reading {text}"


def _methods(result: EvaluationResult) -> str:
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in method_lines(result))
    return f"<ul>{lines}</ul>" if lines else ""


def _reasons(result: EvaluationResult) -> str:
    """Return the reasons of all runs, folded, as many as the page has room for."""
    room = _MAX_TRACE_CHARACTERS
    parts = []
    for run in result.runs:
        traces = []
        for where, trace in _traces(run):
            room -= len(trace)
            if room < 0:
                left_out = "Further traces are left out of this page; the JSON output has them all."
                traces.append(note([left_out]))
                break
            traces.append(
                f"<details><summary>{where}</summary><pre>{html.escape(trace)}</pre></details>"
            )
        if traces:
            name = html.escape(run.name)
            parts.append(
                f"<details><summary>{name}</summary>{_refusals(run)}{''.join(traces)}</details>"
            )
    return "".join(parts)


def _traces(run: RunResult) -> Iterator[tuple[str, str]]:
    """Yield ``(layers, trace)``, layers with the same trace together."""
    layers: dict[str, list[int]] = {}
    for index, trace in enumerate(run.decisions):
        layers.setdefault(trace, []).append(index)
    for trace, found in layers.items():
        yield f"layer {_spans(found)}" if len(found) == 1 else f"layers {_spans(found)}", trace


def _spans(numbers: list[int]) -> str:
    """Return ascending numbers, neighbours as spans.

    Example:
        >>> _spans([0, 1, 2, 5])
        '0 to 2, 5'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in spans)


def _refusals(run: RunResult) -> str:
    items = "".join(
        f"<li>{html.escape(refusal.candidate)}: {html.escape(refusal.reason)} "
        f"({refusal.calls} times)</li>"
        for refusal in run.refusals
    )
    return f"<p>Approximations refused most often:</p><ul>{items}</ul>" if items else ""


def _versions(result: EvaluationResult) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.versions)
