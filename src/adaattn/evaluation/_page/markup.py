"""Pieces of HTML that several parts of the page use."""

import html
from collections.abc import Iterable, Sequence

__all__ = ["figure", "legend", "note", "table"]


def note(sentences: Iterable[str]) -> str:
    """Return sentences in small print, or nothing if there are none."""
    words = html.escape(" ".join(sentences))
    return f'<p class="note">{words}</p>' if words else ""


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return what each colour stands for, from ``(class, words)``."""
    items = "".join(f'<li><i class="{css}"></i>{html.escape(words)}</li>' for css, words in entries)
    return f'<ul class="legend">{items}</ul>'


def figure(title: str, body: str) -> str:
    """Return a chart under its title."""
    return f"<figure><h3>{html.escape(title)}</h3>{body}</figure>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> str:
    """Return a table in a box of its own, which scrolls where the page is narrow."""
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
