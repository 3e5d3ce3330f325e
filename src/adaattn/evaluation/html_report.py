"""An evaluation as one self-contained HTML page: nothing is loaded from anywhere."""

import html
from collections.abc import Sequence
from typing import Any

from adaattn.errors import AssetError, expected_got
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

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
pre { overflow-x: auto; font-size: 13px; padding: .5rem; border: 1px solid #8886; }
.plot { background: #fff; margin: 1rem 0; }
"""


def html_report(result: EvaluationResult) -> str:
    """Return the page: verdict, tables, plots, and every decision of the first window.

    Plots: loss difference by position, entropy by layer and head, chosen method by layer and
    head for each policy. The plotting library is inside the page.

    Args:
        result: what `evaluate` returned.

    Raises:
        AssetError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        from plotly.io import to_html
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise AssetError(
            expected_got(
                "an HTML report", "plotly", "no such package", "pip install 'adaattn[viz]'"
            )
        ) from error
    figures = [_difference_figure(go, result)]
    if result.entropy_bits:
        figures.append(_entropy_figure(go, result))
    labels = _labels(result.runs)
    figures += [_method_figure(go, run, labels) for run in result.runs if run.chosen]
    plots = "".join(
        '<div class="plot">'
        + to_html(
            figure,
            full_html=False,
            include_plotlyjs=False,
            config={"displaylogo": False, "responsive": True},
        )
        + "</div>"
        for figure in figures
    )
    title = html.escape(f"AdaAttn on {result.model} and {result.text}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>"
        f"<p>{html.escape(headline(result))}</p><p>{html.escape(verdict(result))}</p>"
        f"<h2>What each run lost</h2>{_html_table(QUALITY_COLUMNS, quality_rows(result))}"
        f"<h2>What each run cost in the median window</h2>"
        f"{_html_table(COST_COLUMNS, cost_rows(result))}"
        f"{_methods(result)}{plots}"
        f"<h2>Why</h2>{''.join(_reasons(run) for run in result.runs)}"
        f"<p>{html.escape(_versions(result))}</p></body></html>\n"
    )


def _difference_figure(go: Any, result: EvaluationResult) -> Any:
    figure = go.Figure()
    for run in result.runs:
        if run.name != "exact":
            figure.add_scatter(
                x=[position for position, _ in run.difference_by_position],
                y=[difference for _, difference in run.difference_by_position],
                mode="lines",
                name=html.escape(run.name),
            )
    figure.update_layout(
        title="Loss minus exact loss, by position in the text",
        xaxis_title="token",
        yaxis_title="nat a token",
        template="plotly_white",
    )
    return figure


def _entropy_figure(go: Any, result: EvaluationResult) -> Any:
    figure = go.Figure(
        go.Heatmap(
            z=[list(layer) for layer in result.entropy_bits],
            colorbar={"title": "bits"},
            colorscale="Viridis",
            hovertemplate="layer %{y}, head %{x}: %{z:.2f} bits<extra></extra>",
        )
    )
    figure.update_layout(title="Entropy of exact attention rows (first window)", **_axes())
    return figure


def _labels(runs: Sequence[RunResult]) -> list[str]:
    """Return every method in use, so that all figures give each the same colour."""
    return sorted({label for run in runs for layer in run.chosen for label in layer})


def _method_figure(go: Any, run: RunResult, labels: list[str]) -> Any:
    number = {label: index for index, label in enumerate(labels)}
    escaped = [html.escape(label) for label in labels]
    figure = go.Figure(
        go.Heatmap(
            z=[[number[label] for label in layer] for layer in run.chosen],
            text=[[html.escape(label) for label in layer] for layer in run.chosen],
            zmin=-0.5,
            zmax=len(labels) - 0.5,
            colorscale=_steps(len(labels)),
            colorbar={"tickvals": list(range(len(labels))), "ticktext": escaped},
            hovertemplate="layer %{y}, head %{x}: %{text}<extra></extra>",
        )
    )
    figure.update_layout(
        title=f"Chosen method under {html.escape(run.name)} (first window)", **_axes()
    )
    return figure


def _axes() -> dict[str, Any]:
    return {
        "xaxis": {"title": "head", "dtick": 1},
        "yaxis": {"title": "layer", "autorange": "reversed"},
        "template": "plotly_white",
    }


def _steps(count: int) -> list[list[float | str]]:
    """Return a colour scale of ``count`` equal flat steps."""
    from plotly.colors import qualitative

    colours = qualitative.Safe
    scale: list[list[float | str]] = []
    for index in range(count):
        colour = colours[index % len(colours)]
        scale += [[index / count, colour], [(index + 1) / count, colour]]
    return scale


def _html_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _methods(result: EvaluationResult) -> str:
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in method_lines(result))
    return f"<ul>{lines}</ul>"


def _reasons(run: RunResult) -> str:
    """Return the reasons of one run: the frequent refusals, then every trace, folded."""
    if not run.decisions:
        return ""
    refusals = "".join(
        f"<li>{html.escape(refusal.candidate)}: {html.escape(refusal.reason)} "
        f"({refusal.calls} times)</li>"
        for refusal in run.refusals
    )
    frequent = f"<p>Approximations refused most often:</p><ul>{refusals}</ul>" if refusals else ""
    traces = "".join(
        f"<details><summary>layer {index}</summary><pre>{html.escape(trace)}</pre></details>"
        for index, trace in enumerate(run.decisions)
    )
    return f"<h3>{html.escape(run.name)}</h3>{frequent}{traces}"


def _versions(result: EvaluationResult) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.versions)
