"""Pieces of HTML that several parts of the page use."""

import html
import re
from collections.abc import Iterable, Sequence

__all__ = ["duration", "figure", "legend", "note", "percent", "prose", "table"]

_EXPONENT = re.compile(r"[+-]?\d(?:\.\d+)?e[+-]\d+")


def prose(words: str) -> str:
    """Return words as HTML in which no line ends inside a number such as 1e-06."""
    return _EXPONENT.sub(r'<span class="number">\g<0></span>', html.escape(words))


def percent(share: float) -> str:
    """Return a share in percent, small ones with more digits."""
    digits = ".0f" if share >= 0.1 or share == 0 else ".2g"
    return f"{100 * share:{digits}}\N{NO-BREAK SPACE}%"


def duration(milliseconds: float) -> str:
    """Return a time in the largest unit that leaves a number above 1.

    Example:
        >>> duration(2345.0), duration(234.5), duration(0.2345)
        ('2.35 s', '234 ms', '234 µs')
    """
    if milliseconds >= 1e3:
        return f"{milliseconds / 1e3:.3g} s"
    return f"{milliseconds:.3g} ms" if milliseconds >= 1 else f"{1e3 * milliseconds:.3g} µs"


def note(sentences: Iterable[str]) -> str:
    """Return sentences in small print, or nothing if there are none."""
    words = prose(" ".join(sentences))
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
