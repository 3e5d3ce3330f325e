"""Single attention problems: AdaAttn beside what a PyTorch user writes, row by row."""

import html
from collections.abc import Iterable, Sequence

from adaattn.evaluation._page import svg
from adaattn.evaluation._page.markup import duration, note
from adaattn.evaluation.report import NOTICEABLE
from adaattn.evaluation.results import Comparison

__all__ = ["comparison_bars"]

# Two panels in units, time at the left. Bars grow from 1, where both are equal.
_TIME = (2.0, 230.0)
_MEMORY = (256.0, 418.0)
_LEAST = 2.0
"""A panel spans this ratio at least, so that small differences look small."""

_EQUAL = "equal"
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def comparison_bars(comparisons: Sequence[Comparison]) -> str:
    """Return a row for each problem: its time and its memory, as ratios on logarithmic scales."""
    time = _scale((item.time_ratio for item in comparisons), _TIME)
    memory = _scale((item.memory_ratio for item in comparisons), _MEMORY)
    rows = "".join(_row(item, time, memory) for item in comparisons)
    about = note(
        [
            "Bars are ratios on a logarithmic scale: to the right of 1 AdaAttn needs less than "
            "what a PyTorch user writes, to the left it needs more. Memory is the most that a "
            "call added, output included."
        ]
    )
    return f'{about}<div class="rows">{_head(time, memory)}{rows}</div>'


def _scale(ratios: Iterable[float | None], panel: tuple[float, float]) -> svg.Scale:
    """Return a scale on which every ratio and 1 have a place."""
    found = [ratio for ratio in ratios if ratio is not None]
    low, high = min(found, default=1.0), max(found, default=1.0)
    # 1 stands at the left where nothing is lost, and never nearer to an end than an eighth.
    high = max(high, _LEAST)
    low = min(low, high**-0.14)
    return svg.Scale(low=low, high=high, start=panel[0], end=panel[1], is_log=True)


def _head(time: svg.Scale, memory: svg.Scale) -> str:
    body = []
    for scale, title in ((time, "time of a call"), (memory, "memory")):
        body.append(svg.text(scale.start, 12, title, css="strong"))
        body += [
            svg.text(scale.place(ratio), 30, _tick_words(ratio), "middle")
            for ratio in _ratio_ticks(scale)
        ]
    picture = svg.drawing(34, "Scales of the rows below: ratios of time and of memory", body)
    return f'<div class="row head"><p></p>{picture}</div>'


def _ratio_ticks(scale: svg.Scale) -> list[float]:
    """Return 1 and round ratios to both sides, as many as have room for their words."""
    powers = range(-4, 7)
    # Powers of ten first, so that they win where room is short.
    round_ones = [10.0**power * digit for digit in (1, 2, 5) for power in powers]
    ticks = [1.0]
    for ratio in round_ones:
        if not scale.low <= ratio <= scale.high:
            continue
        half = len(_tick_words(ratio)) * svg.CHARACTER / 2
        place = scale.place(ratio)
        others = [(scale.place(tick), len(_tick_words(tick))) for tick in ticks]
        is_free = all(
            abs(place - other) >= half + length * svg.CHARACTER / 2 + 9 for other, length in others
        )
        if is_free and place + half <= scale.end + 4:
            ticks.append(ratio)
    return sorted(ticks)


def _tick_words(ratio: float) -> str:
    return f"{ratio:g}x" if ratio < 1e4 else f"{svg.tick_words(ratio)}x"


def _row(item: Comparison, time: svg.Scale, memory: svg.Scale) -> str:
    about = (
        f"{item.detail.rstrip('.')}. PyTorch: {item.peer}. "
        f"AdaAttn ran {item.chosen}{_agreement(item)}."
    )
    what = f"<h3>{html.escape(item.name)}</h3>{note([about])}"
    ratio = item.time_ratio
    words = "" if ratio is None else _ratio_words(ratio, ("faster", "slower"), NOTICEABLE)
    body = _panel(time, ratio, words, _time_words(item))
    ratio = item.memory_ratio
    words = "" if ratio is None else _ratio_words(ratio, ("less", "more"))
    least = "at least " if item.peer_ms is None and words else ""
    body += _panel(memory, ratio, least + words, _memory_words(item))
    label = f"{item.name}: {_time_words(item)}; {_memory_words(item)}"
    picture = svg.drawing(58, label, body)
    return f'<div class="row"><div>{what}</div><div>{picture}{_not_run(item)}</div></div>'


def _panel(scale: svg.Scale, ratio: float | None, words: str, numbers: str) -> list[str]:
    one = scale.place(1.0)
    body = [
        svg.line(scale.place(tick), 17, scale.place(tick), 39, "grid")
        for tick in _ratio_ticks(scale)
    ]
    if ratio is not None:
        tone = "ref" if words.endswith(_EQUAL) else "good" if ratio > 1 else "bad"
        end = scale.place(ratio)
        bar = svg.Box(
            left=min(one, end), top=20, right=max(one, end, min(one, end) + 1.5), bottom=36
        )
        body.append(svg.rect(bar, f"fill {tone}", numbers, radius=2))
        body.append(svg.text(scale.start, 12, words, "start", f"tone {tone}"))
    body.append(svg.line(one, 16, one, 40, "axis"))
    most = int((scale.end - scale.start) / svg.CHARACTER)
    body.append(svg.text(scale.start, 52, svg.short(numbers, most)))
    return body


def _ratio_words(ratio: float, words: tuple[str, str], noise: float = 0.005) -> str:
    """Return a ratio as people say it; equal, where it differs from 1 by no more than noise.

    Example:
        >>> _ratio_words(3.14, ("faster", "slower")), _ratio_words(0.5, ("faster", "slower"))
        ('3.1x faster', '2.0x slower')
    """
    if abs(ratio - 1) <= noise:
        return _EQUAL
    factor = max(ratio, 1 / ratio)
    digits = 2 if factor < 1.1 else 1 if factor < 100 else 0
    return f"{factor:.{digits}f}x {words[0] if ratio > 1 else words[1]}"


def _time_words(item: Comparison) -> str:
    if item.peer_ms is None:
        return f"{duration(item.ours_ms)}, PyTorch not run"
    return f"{duration(item.ours_ms)}, PyTorch {duration(item.peer_ms)}"


def _memory_words(item: Comparison) -> str:
    if item.ours_bytes is None:
        return "not measured"
    peer = "?" if item.peer_bytes is None else _size(item.peer_bytes)
    least = "≥ " if item.peer_ms is None and item.peer_bytes is not None else ""
    return f"{_size(item.ours_bytes)}, PyTorch {least}{peer}"


def _agreement(item: Comparison) -> str:
    if item.error is None:
        return ""
    if item.error == 0:
        return "; the outputs are equal"
    return f"; the outputs differ by at most {item.error:.1e} of the largest value"


def _not_run(item: Comparison) -> str:
    if item.peer_ms is not None:
        return ""
    words = [f"PyTorch was not run: {item.why_not.rstrip('.') or 'no reason was given'}."]
    if item.peer_bytes is not None:
        words.append(f"It would need at least {_size(item.peer_bytes)}.")
    return note(words)


def _size(num_bytes: int) -> str:
    """Return bytes in the largest unit that leaves a number above 1."""
    if num_bytes <= 0:
        return "0 B"
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"
