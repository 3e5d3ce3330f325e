"""The rows as a table, as JSON and as a page with plots."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row

__all__ = ["document", "page", "print_tables", "write_json"]

_COLUMNS = (
    "cell",
    "variant",
    "phase",
    "median ms",
    "mean ± std",
    "speedup",
    "peak",
    "MSE",
    "tokens/s",
    "TFLOP/s",
    "GPU",
    "note",
)
_TEXT_COLUMNS = frozenset({"cell", "variant", "phase", "note"})

_TITLES = {
    "implementation": "Implementations of a self-attention layer",
    "precision": "Number formats",
    "memory": "Peak memory, and what runs under a limit",
    "scalability": "Growth with tokens, batch and heads",
}

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8886; }
td.text, th.text { text-align: left; }
.plot { background: #fff; margin: 1rem 0; }
"""


def document(machine: dict[str, Any], options: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Return the result as plain JSON values."""
    return {
        "benchmark": "gpu_benchmark",
        "machine": machine,
        "options": options,
        "rows": [row.to_dict() for row in rows],
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def print_tables(rows: list[Row]) -> None:
    """Print one table for each suite, by rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for suite, found in _by_suite(rows).items():
            print(f"\n{_TITLES[suite]}\n" + _plain_table([_cells(row) for row in found]))
        return
    # A pipe has no width: the table keeps its own instead of being cut to 80 columns.
    console = Console()
    console = console if console.is_terminal else Console(width=220)
    for suite, found in _by_suite(rows).items():
        table = Table(title=_TITLES[suite], title_justify="left")
        for column in _COLUMNS:
            left = column in _TEXT_COLUMNS
            table.add_column(column, justify="left" if left else "right", overflow="fold")
        previous = ""
        for row in found:
            if previous and row.cell != previous:
                table.add_section()
            previous = row.cell
            table.add_row(*_cells(row))
        console.print(table)


def page(result: dict[str, Any], rows: list[Row]) -> str:
    """Return an HTML page: tables, and plots where plotly is installed."""
    try:
        from plotly.io import to_html
        from plotly.offline import get_plotlyjs

        from benchmarks.gpu.plot import figures
    except ImportError:
        plots = "<p>No plots: plotly is missing (<code>pip install plotly</code>).</p>"
        script = ""
    else:
        script = f"<script>{get_plotlyjs()}</script>"
        plots = "".join(
            '<div class="plot">'
            + to_html(figure, full_html=False, include_plotlyjs=False)
            + "</div>"
            for figure in figures(rows)
        )
    machine = result["machine"]
    about = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    tables = "".join(
        f"<h2>{html.escape(_TITLES[suite])}</h2>" + _html_table(found)
        for suite, found in _by_suite(rows).items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Attention on {html.escape(str(machine['device']))}</title>"
        f"<style>{_STYLE}</style>{script}</head><body>"
        f"<h1>Attention on {html.escape(str(machine['device']))}</h1>"
        f"<p>{html.escape(about)}</p>{plots}{tables}</body></html>\n"
    )


def _by_suite(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each suite, in the order of the titles."""
    found = {suite: [row for row in rows if row.suite == suite] for suite in _TITLES}
    return {suite: items for suite, items in found.items() if items}


def _cells(row: Row) -> list[str]:
    """Return one row of the table as text."""
    spread = ""
    if row.mean_ms is not None and row.rounds > 1:
        spread = f"{_number(row.mean_ms)} ± {_number(row.std_ms)}"
    saved = row.extra.get("saved_against_naive")
    note = row.note if row.status == "ok" else f"{row.status}: {row.note}".removesuffix(": ")
    if saved is not None and row.variant != "naive":
        note = f"{saved:.0%} less than naive; {note}"
    return [
        row.cell,
        row.variant,
        row.phase,
        _number(row.median_ms),
        spread,
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f} MiB",
        "" if row.mse is None else f"{row.mse:.2g}",
        "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        "" if row.tflops is None else f"{row.tflops:.3g}",
        "" if row.utilisation_percent is None else f"{row.utilisation_percent:.0f} %",
        note,
    ]


def _number(value: float | None) -> str:
    """Return milliseconds with four significant digits, never as a power of ten."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _plain_table(lines: list[list[str]]) -> str:
    """Return aligned columns."""
    table = [list(_COLUMNS), *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
    shown = []
    for line in table:
        cells = [
            text.ljust(width) if name in _TEXT_COLUMNS else text.rjust(width)
            for text, width, name in zip(line, widths, _COLUMNS, strict=True)
        ]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def _html_table(rows: list[Row]) -> str:
    """Return the rows of a suite as an HTML table."""

    def line(tag: str, values: Sequence[str]) -> str:
        cells = (
            f"<{tag}{' class=text' if name in _TEXT_COLUMNS else ''}>{html.escape(text)}</{tag}>"
            for name, text in zip(_COLUMNS, values, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", _cells(row)) for row in rows)
    return f"<table><thead>{line('th', _COLUMNS)}</thead><tbody>{body}</tbody></table>"
