"""Two charts of all runs: quality against time, and loss differences along the text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adaattn.evaluation._page import svg
from adaattn.evaluation._page.markup import duration, legend, note
from adaattn.evaluation._page.style import run_colours
from adaattn.evaluation.results import EvaluationResult, RunResult

__all__ = ["losses_by_position", "trade_off"]

# The plots of both charts, in units: room for tick labels at the left and below.
_LEFT, _RIGHT, _TOP = 64.0, 410.0, 38.0
_LANE = 17.0
_NAME = 24
"""Most characters of a run's name in a chart; the whole name is in the hover."""

_STRETCHES = 16
"""The running mean is over this part of the text: wide enough to see past single tokens."""
_CURVE_POINTS = 97

_LEAST_SPAN = 0.1
"""Times span this share of the longest at least, so that small differences look small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """One run in the trade-off."""

    run: RunResult
    css: str
    x: float
    y: float


def trade_off(result: EvaluationResult) -> str:
    """Return the chart of attention time against KL to the exact run, a point for each run.

    The vertical axis is logarithmic; runs without divergence stand in a strip below it, each in a
    lane of its own. Error bars: quartiles over windows, and two standard errors of the mean KL.
    """
    drawn = [run for run in result.runs if _can_draw(run)]
    missing = [run.name for run in result.runs if not _can_draw(run)]
    words = f"Not drawn, since their time or KL is not known: {', '.join(missing)}."
    missed = [words] if missing else []
    if not drawn:
        return note(missed)
    times, divergences = _time_scale(drawn), _divergence_scale(drawn)
    exact_ones = sorted((run for run in drawn if run.divergence <= 0), key=_time)
    strip = _TOP if divergences is None else divergences.start + 14.0
    floor = strip + _LANE * max(len(exact_ones), 1) + 4.0
    lanes = {run.name: strip + _LANE * (i + 0.5) + 2.0 for i, run in enumerate(exact_ones)}
    colours = run_colours(result)
    points = [
        _Point(
            run=run,
            css=colours[run.name],
            x=times.place(_time(run)),
            y=divergences.place(run.divergence)
            if divergences and run.divergence > 0
            else lanes[run.name],
        )
        for run in drawn
    ]
    bars = [(point, bar) for point in points for bar in _bars(point, times, divergences)]
    body = _trade_off_axes(times, divergences, (strip, floor), result)
    body += [
        svg.line(bar.left, bar.top, bar.right, bar.bottom, f"spread {point.css}")
        for point, bar in bars
    ]
    body += [
        svg.dot(point.x, point.y, f"mark {point.css}", _point_words(point.run)) for point in points
    ]
    body += _names(points, bars)
    label = "Attention time against KL divergence from the exact run, one point for each run"
    return svg.drawing(floor + 52, label, body) + note(missed)


def losses_by_position(result: EvaluationResult) -> str:
    """Return the chart of loss differences along the text; a sentence for runs that have none."""
    moved = [run for run in result.runs if any(run.token_differences)]
    unmoved = [
        run.name for run in result.runs if not any(run.token_differences) and run.name != "exact"
    ]
    words = []
    if unmoved:
        words.append(f"Exactly zero at every token: {', '.join(unmoved)}.")
    broken = [run for run in moved if not all(map(math.isfinite, run.token_differences))]
    if broken:
        names = ", ".join(run.name for run in broken)
        words.append(f"Not drawn, since some of their losses are not finite: {names}.")
    moved = [run for run in moved if run not in broken]
    if not moved:
        return note(words)
    window = max(1, len(moved[0].token_differences) // _STRETCHES)
    curves = {run.name: _running_mean(run, window) for run in moved}
    corners = [
        value for curve in curves.values() for _, low, _, high in curve for value in (low, high)
    ]
    height = svg.Scale(low=min(*corners, 0.0), high=max(*corners, 0.0), start=220, end=_TOP)
    first = moved[0].difference_by_position[0][0]
    count = len(moved[0].token_differences)
    along = svg.Scale(low=first, high=first + max(count - 1, 1), start=_LEFT, end=_RIGHT)
    colours = run_colours(result)
    body = _position_axes(along, height)
    for name, curve in curves.items():
        body += _curve_marks(name, curve, along, height, colours[name])
    words.append(
        f"Running mean over {window} tokens; the band is two standard errors to either side. "
        "Above 0 a run predicts worse than exact attention."
    )
    label = "Loss minus exact loss along the text, with two standard errors"
    entries = [(colours[run.name], run.name) for run in moved]
    return legend(entries) + svg.drawing(266, label, body) + note(words)


def _can_draw(run: RunResult) -> bool:
    return run.attention_ms is not None and math.isfinite(run.divergence)


def _time(run: RunResult) -> float:
    assert run.attention_ms is not None
    return run.attention_ms


def _time_scale(runs: Sequence[RunResult]) -> svg.Scale:
    ends = [_time(run) for run in runs]
    ends += [end for run in runs for end in (run.attention_ms_low, run.attention_ms_high) if end]
    low, high = min(ends), max(ends)
    margin = max(0.08 * (high - low), (_LEAST_SPAN * high - (high - low)) / 2) or 1.0
    return svg.Scale(low=max(low - margin, 0.0), high=high + margin, start=_LEFT, end=_RIGHT)


def _divergence_scale(runs: Sequence[RunResult]) -> svg.Scale | None:
    """Return whole decades around what was measured; None if nothing diverged."""
    ends = [
        end for run in runs for end in (run.divergence, _ends(run)[0], _ends(run)[1]) if end > 0
    ]
    if not ends:
        return None
    low = 10.0 ** math.floor(math.log10(min(ends)))
    high = 10.0 ** math.ceil(math.log10(max(ends)))
    return svg.Scale(
        low=low, high=high if high > low else 10 * low, start=214.0, end=_TOP, is_log=True
    )


def _ends(run: RunResult) -> tuple[float, float]:
    """Return the interval of a KL: two standard errors, but no lower than a tenth of it."""
    spread = 2 * run.divergence_error
    return max(run.divergence - spread, run.divergence / 10), run.divergence + spread


def _trade_off_axes(
    times: svg.Scale,
    divergences: svg.Scale | None,
    strip: tuple[float, float],
    result: EvaluationResult,
) -> list[str]:
    top, floor = strip
    body = [svg.text(0, 12, "KL to the exact run (nat a token)", css="strong")]
    if divergences:
        for value in divergences.ticks(6):
            y = divergences.place(value)
            body.append(svg.line(_LEFT, y, _RIGHT, y, "grid"))
            body.append(svg.text(_LEFT - 8, y + 4, svg.tick_words(value), "end"))
    body.append(svg.rect(svg.Box(left=_LEFT, top=top, right=_RIGHT, bottom=floor), "strip"))
    body.append(svg.line(_LEFT, floor, _RIGHT, floor, "axis"))
    body.append(svg.text(_LEFT - 8, (top + floor) / 2 + 4, "0, exact", "end"))
    for value in times.ticks(6):
        x = times.place(value)
        body.append(svg.line(x, floor, x, floor + 5, "axis"))
        body.append(svg.text(x, floor + 19, svg.tick_words(value), "middle"))
    words = "attention in the median window (ms)"
    body.append(svg.text(_RIGHT, floor + 40, words, "end", "strong"))
    exact = next((run for run in result.runs if run.name == "exact" and _can_draw(run)), None)
    if exact is not None:
        x = times.place(_time(exact))
        body.append(svg.line(x, _TOP, x, floor, "dash"))
        # Each word needs its room beside the line.
        if x - _LEFT > 60:
            body.append(svg.text(x - 6, _TOP - 5, "← faster", "end"))
        if _RIGHT - x > 60:
            body.append(svg.text(x + 6, _TOP - 5, "slower →"))
    return body


def _bars(point: _Point, times: svg.Scale, divergences: svg.Scale | None) -> list[svg.Box]:
    """Return the error bars of a point: quartiles of its time, two standard errors of its KL."""
    run = point.run
    bars = []
    if run.attention_ms_low is not None and run.attention_ms_high is not None:
        low, high = times.place(run.attention_ms_low), times.place(run.attention_ms_high)
        bars.append(svg.Box(left=low, top=point.y, right=high, bottom=point.y))
    if divergences and run.divergence > 0 and run.divergence_error:
        low, high = (divergences.place(end) for end in _ends(run))
        bars.append(svg.Box(left=point.x, top=high, right=point.x, bottom=low))
    return bars


def _names(points: Sequence[_Point], bars: Sequence[tuple[_Point, svg.Box]]) -> list[str]:
    """Return the points' names, each where it covers neither a mark nor another name."""
    taken = [svg.Box.around(point.x, point.y, 6) for point in points]
    taken += [bar.grown(1) for _, bar in bars]
    plot = svg.Box(left=_LEFT, top=_TOP - 4, right=svg.WIDTH, bottom=math.inf)
    body = []
    for point in sorted(points, key=lambda point: point.x, reverse=True):
        words = svg.short(point.run.name, _NAME)
        ends = [end for owner, bar in bars if owner is point for end in (bar.right, bar.left)]
        places = _places(point, ends)
        boxes = [svg.Box.of_text(x, y, words, anchor) for x, y, anchor in places]
        costs = [
            sum(box.overlap(other) for other in taken) + (0 if plot.holds(box) else 1e6)
            for box in boxes
        ]
        best = costs.index(min(costs))
        x, y, anchor = places[best]
        taken.append(boxes[best])
        if abs(y - point.y) > _NEAR:
            body.append(svg.line(point.x, point.y - 6, point.x, y + 3, f"lead {point.css}"))
        body.append(svg.text(x, y, words, anchor, f"name {point.css}"))
    return body


def _places(point: _Point, ends: Sequence[float]) -> list[tuple[float, float, str]]:
    """Return where a name may stand, the best place first: ``(x, y, anchor)``."""
    places = [(point.x + dx, point.y + dy, anchor) for dx, dy, anchor in _OFFSETS]
    if point.run.divergence <= 0 and ends:
        # In a lane of its own the name stands beyond the error bar.
        beyond = [(ends[0] + 8, point.y + 4, "start"), (ends[1] - 8, point.y + 4, "end")]
        return beyond + places
    return places


# Beside the point, then above and below it, then in rows further up, with a line to it.
_NEAR = 22
_OFFSETS = (
    (10, 4, "start"),
    (-10, 4, "end"),
    (0, -12, "middle"),
    (-4, -12, "start"),
    (4, -12, "end"),
    *(
        (dx, -12 - 15 * row, anchor)
        for row in range(1, 8)
        for dx, anchor in ((0, "middle"), (-4, "start"), (4, "end"))
    ),
)


def _point_words(run: RunResult) -> str:
    words = f"{run.name}: {duration(_time(run))}"
    if run.attention_ms_low is not None and run.attention_ms_high is not None:
        low, high = duration(run.attention_ms_low), duration(run.attention_ms_high)
        words += f" (quartiles {low}, {high})"
    if run.divergence <= 0:
        return f"{words}, KL 0"
    return f"{words}, KL {run.divergence:.1e} ± {run.divergence_error:.0e} nat a token"


def _running_mean(run: RunResult, window: int) -> list[tuple[float, float, float, float]]:
    """Return ``(position, low, mean, high)`` along the text."""
    values = run.token_differences
    first = run.difference_by_position[0][0]
    last = len(values) - window
    begins = sorted({round(last * index / (_CURVE_POINTS - 1)) for index in range(_CURVE_POINTS)})
    curve = []
    for begin in begins:
        part = values[begin : begin + window]
        mean = math.fsum(part) / window
        squares = math.fsum((value - mean) ** 2 for value in part)
        spread = 2 * math.sqrt(squares / max(window - 1, 1) / window)
        curve.append((first + begin + (window - 1) / 2, mean - spread, mean, mean + spread))
    return curve


def _curve_marks(
    name: str,
    curve: Sequence[tuple[float, float, float, float]],
    along: svg.Scale,
    height: svg.Scale,
    css: str,
) -> list[str]:
    """Return the band and the line of one run."""
    upper = [(along.place(at), height.place(high)) for at, _, _, high in curve]
    lower = [(along.place(at), height.place(low)) for at, low, _, _ in reversed(curve)]
    middle = [(along.place(at), height.place(mean)) for at, _, mean, _ in curve]
    return [svg.area([*upper, *lower], f"band {css}"), svg.path(middle, f"curve {css}", name)]


def _position_axes(along: svg.Scale, height: svg.Scale) -> list[str]:
    body = [svg.text(0, 12, "loss minus exact loss (nat a token)", css="strong")]
    for value in height.ticks(6):
        y = height.place(value)
        body.append(svg.line(_LEFT, y, _RIGHT, y, "grid"))
        body.append(svg.text(_LEFT - 8, y + 4, svg.tick_words(value), "end"))
    zero = height.place(0.0)
    body.append(svg.line(_LEFT, zero, _RIGHT, zero, "axis"))
    for value in along.ticks(6):
        body.append(
            svg.text(along.place(value), height.start + 20, svg.tick_words(value), "middle")
        )
    body.append(
        svg.text(_RIGHT, height.start + 40, "position in the text (tokens)", "end", "strong")
    )
    return body
