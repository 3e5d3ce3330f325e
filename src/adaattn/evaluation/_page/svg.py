"""Small pieces of SVG: scales, ticks, marks and text, as strings.

A drawing is `WIDTH` units wide. On a screen of 400 px that makes a unit 0.85 px or more, so that
its text of 12 units stays legible. Colours are classes of `style`, for light and dark screens.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "CHARACTER",
    "WIDTH",
    "Box",
    "Scale",
    "area",
    "dot",
    "drawing",
    "line",
    "outline",
    "path",
    "rect",
    "short",
    "text",
    "tick_words",
]

WIDTH = 420
CHARACTER = 6.6
"""Units that a character of a chart's text takes, on average: 0.55 of 12."""

_BOLD_CHARACTER = 7.4
_TEXT_HEIGHT = 14
_GAP = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values on a line of the drawing.

    Args:
        low: the value at ``start``; positive if ``is_log``.
        high: the value at ``end``; above ``low``.
        start: coordinate of ``low``.
        end: coordinate of ``high``.
        is_log: equal ratios take equal lengths.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the coordinate of a value; of one outside, that of the nearer end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return at most that many round values on the scale, evenly spread."""
        return self._decades(most) if self.is_log else self._round(most)

    def _decades(self, most: int) -> list[float]:
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        step = max(1, -(-(last - first + 1) // most))
        return [10.0**power for power in range(first, last + 1, step)]

    def _round(self, most: int) -> list[float]:
        least = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(least))
        for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            if last - first < most:
                break
        return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle that a label, a point or a whole chart takes."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def of_text(cls, x: float, y: float, words: str, anchor: str) -> "Box":
        """Return what a line of bold text takes, and a gap beside it, its baseline at ``y``."""
        width = len(words) * _BOLD_CHARACTER + 2 * _GAP
        left = x - {"start": _GAP, "middle": width / 2, "end": width - _GAP}[anchor]
        return cls(left=left, top=y - _TEXT_HEIGHT + 3, right=left + width, bottom=y + 2)

    @classmethod
    def around(cls, x: float, y: float, radius: float) -> "Box":
        """Return the square around a point."""
        return cls(left=x - radius, top=y - radius, right=x + radius, bottom=y + radius)

    def grown(self, margin: float) -> "Box":
        """Return this box and what lies around it."""
        return Box(
            left=self.left - margin,
            top=self.top - margin,
            right=self.right + margin,
            bottom=self.bottom + margin,
        )

    def overlap(self, other: "Box") -> float:
        """Return the area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)

    def holds(self, other: "Box") -> bool:
        """Return whether another lies within this one."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and self.right >= other.right
            and self.bottom >= other.bottom
        )


def drawing(height: float, label: str, body: Iterable[str]) -> str:
    """Return a whole drawing.

    Args:
        height: in units.
        label: what it shows, for those who do not see it.
        body: its elements, the later ones on top.
    """
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{html.escape(label)}">'
        f"{''.join(body)}</svg>"
    )


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    """Return a line of text with its baseline at ``y``."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.4g}" y="{y:.4g}"{where}{_class(css)}>{html.escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """Return a straight line."""
    return f'<line x1="{x1:.4g}" y1="{y1:.4g}" x2="{x2:.4g}" y2="{y2:.4g}"{_class(css)}/>'


def path(points: Sequence[tuple[float, float]], css: str, hover: str = "") -> str:
    """Return straight lines from point to point."""
    return f'<path d="{_corners(points)}"{_class(css)}>{_title(hover)}</path>'


def area(points: Sequence[tuple[float, float]], css: str) -> str:
    """Return the surface that a closed line encloses."""
    return f'<path d="{_corners(points)}Z"{_class(css)}/>'


def rect(box: Box, css: str, hover: str = "", *, radius: float = 0) -> str:
    """Return a filled rectangle; ``hover`` is what a pointer over it reads."""
    rounded = f' rx="{radius:g}"' if radius else ""
    return (
        f'<rect x="{box.left:.4g}" y="{box.top:.4g}" width="{box.right - box.left:.4g}" '
        f'height="{box.bottom - box.top:.4g}"{rounded}{_class(css)}>{_title(hover)}</rect>'
    )


def outline(box: Box) -> str:
    """Return a rectangle as a piece of a path, many of which make one element."""
    return (
        f"M{box.left:.4g} {box.top:.4g}h{box.right - box.left:.4g}"
        f"v{box.bottom - box.top:.4g}h{box.left - box.right:.4g}z"
    )


def dot(x: float, y: float, css: str, hover: str) -> str:
    """Return the mark of one measurement."""
    return f'<circle cx="{x:.4g}" cy="{y:.4g}" r="5.5"{_class(css)}>{_title(hover)}</circle>'


def short(words: str, most: int) -> str:
    """Return words cut to a length, with an ellipsis where something is missing."""
    return words if len(words) <= most else words[: most - 1] + "…"


def tick_words(value: float) -> str:
    """Return a number as an axis shows it.

    Example:
        >>> tick_words(2e-05), tick_words(1500.0), tick_words(0.0)
        ('2e-5', '1500', '0')
    """
    if 1e5 > abs(value) >= 1e-3 or not value:
        return f"{value:.6g}"
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def _corners(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.4g} {y:.4g}" for x, y in points)


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


def _title(hover: str) -> str:
    return f"<title>{html.escape(hover)}</title>" if hover else ""
