"""The suites as plots; imported only where plotly is installed."""

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from benchmarks.gpu.rows import OK, Row

__all__ = ["figures"]


def figures(rows: list[Row]) -> list[Any]:
    """Return one figure for each thing that the rows can show."""
    found = [
        _bars(
            [row for row in rows if row.suite == "implementation"],
            "Speed of a layer, times F.sdpa",
            lambda row: row.speedup,
        ),
        _bars(
            [row for row in rows if row.suite == "precision"],
            "Speed of each number format, times fp32",
            lambda row: row.speedup,
        ),
        _bars(
            [row for row in rows if row.suite == "memory" and "limit_bytes" not in row.extra],
            "Peak memory of one call, MiB",
            lambda row: None if row.peak_bytes is None else row.peak_bytes / 2**20,
        ),
        _limits([row for row in rows if "limit_bytes" in row.extra]),
        *(
            _growth([row for row in rows if row.extra.get("axis") == axis], axis, place)
            for axis, place in (("tokens", 2), ("batch", 0), ("heads", 1))
        ),
    ]
    return [figure for figure in found if figure is not None]


def _bars(rows: list[Row], title: str, value: Callable[[Row], float | None]) -> Any:
    """Return grouped bars, a colour for each variant; None without rows."""
    if not rows:
        return None
    figure = go.Figure(layout={"title": title, "barmode": "group", "template": "plotly_white"})
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = [row for row in rows if row.variant == variant and row.status == OK]
        figure.add_bar(
            name=variant,
            x=[f"{row.cell}, {row.phase}" for row in mine],
            y=[value(row) for row in mine],
        )
    return figure


def _limits(rows: list[Row]) -> Any:
    """Return which variant ran under which limit, as coloured squares; None without rows."""
    if not rows:
        return None
    labels = list(dict.fromkeys(f"{row.cell}, {row.phase}" for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    known = {(f"{row.cell}, {row.phase}", row.variant): row for row in rows}
    squares = [[known.get((label, variant)) for label in labels] for variant in variants]
    return go.Figure(
        go.Heatmap(
            x=labels,
            y=variants,
            z=[
                [None if one is None else float(one.status == OK) for one in row] for row in squares
            ],
            text=[["" if one is None else one.status for one in row] for row in squares],
            texttemplate="%{text}",
            colorscale=[[0, "#d95f5f"], [1, "#6fb36f"]],
            zmin=0,
            zmax=1,
            showscale=False,
        ),
        layout={"title": "What runs under a memory limit", "template": "plotly_white"},
    )


def _growth(rows: list[Row], axis: str, place: int) -> Any:
    """Return time over one size, both logarithmic; None without rows."""
    if not rows:
        return None
    figure = go.Figure(
        layout={
            "title": f"Time of one call over {axis}, ms",
            "xaxis": {"type": "log", "title": axis},
            "yaxis": {"type": "log", "title": "ms"},
            "template": "plotly_white",
        }
    )
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = [row for row in rows if row.variant == variant and row.median_ms is not None]
        figure.add_scatter(
            name=variant,
            x=[row.extra["shape"][place] for row in mine],
            y=[row.median_ms for row in mine],
            mode="lines+markers",
        )
    return figure
