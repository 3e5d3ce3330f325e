"""Which method served which head: a heat map of layers and heads for each policy."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from adaattn._dtypes import precision_of
from adaattn.evaluation._page import svg
from adaattn.evaluation._page.markup import figure, legend, note, percent
from adaattn.evaluation._page.style import NUM_COLOURS
from adaattn.evaluation.ledger import is_approximation
from adaattn.evaluation.models import DTYPES
from adaattn.evaluation.results import EvaluationResult, RunResult

__all__ = ["head_maps"]

_LEFT, _TOP, _RIGHT = 32.0, 22.0, 416.0
_MAX_HOVERS = 4096
"""With more cells than this on a page, they have no hover: it is 120 bytes a cell."""

_SHADES = 4
_MAX_METHODS = 12
_OTHERS = "other methods"


def head_maps(result: EvaluationResult) -> str:
    """Return a heat map for each policy whose heads differ; a sentence for each other one."""
    shown = [run for run in result.runs if len(_labels(run)) > 1]
    alike: dict[str, list[str]] = {}
    for run in result.runs:
        if len(_labels(run)) == 1:
            (label,) = _labels(run)
            alike.setdefault(label, []).append(run.name)
    words = [
        f"Under {', '.join(names)}: every head of the first window was served by {label}."
        for label, names in alike.items()
    ]
    if not shown:
        return note(words)
    colours = _colours(shown, result)
    has_hovers = sum(len(layer) for run in shown for layer in run.chosen) <= _MAX_HOVERS
    maps = [
        figure(f"Heads under {run.name}", _head_map(run, result, colours, has_hovers=has_hovers))
        for run in shown
    ]
    return f'<div class="charts">{"".join(maps)}</div>' + note(words)


def _labels(run: RunResult) -> Counter[str]:
    return Counter(label for layer in run.chosen for label in layer)


def _colours(runs: Sequence[RunResult], result: EvaluationResult) -> dict[str, str]:
    """Return the classes of each method, the same in all maps.

    Exact methods are grey. An executor in a number format has a colour; its settings, such as
    ranks, are shades of it.
    """
    count: Counter[str] = sum((_labels(run) for run in runs), Counter())
    colours: dict[str, str] = {}
    families: dict[str, list[str]] = {}
    for label, _ in count.most_common(_MAX_METHODS):
        family = label.split()[0] if _is_adapted(label, result) else ""
        families.setdefault(family, []).append(label)
    adapted = [family for family in families if family]
    for family, labels in families.items():
        hue = f"c{adapted.index(family) % NUM_COLOURS}" if family else "ref"
        for index, label in enumerate(sorted(labels)):
            # Exact methods start one shade paler, so that the others stand out.
            shade = min(index + (not family), _SHADES - 1)
            colours[label] = f"{hue} s{shade}" if shade else hue
    return colours


def _is_adapted(label: str, result: EvaluationResult) -> bool:
    return bool(label) and is_approximation(label, precision_of(DTYPES[result.dtype]))


def _head_map(
    run: RunResult, result: EvaluationResult, colours: Mapping[str, str], *, has_hovers: bool
) -> str:
    layers, heads = len(run.chosen), max(map(len, run.chosen))
    width = (_RIGHT - _LEFT) / layers
    height = min(max(220 / heads, 9.0), 20.0)
    gap = 1.0 if width > 4 else 0.0
    cells: dict[str, list[str]] = {}
    for layer, labels in enumerate(run.chosen):
        for head, label in enumerate(labels):
            x, y = _LEFT + layer * width, _TOP + head * height
            box = svg.Box(left=x, top=y, right=x + width - gap, bottom=y + height - gap)
            words = _cell_words(layer, head, label, result.entropy_bits) if has_hovers else ""
            css = colours.get(label, "ink")
            cells.setdefault(css, []).append(
                svg.rect(box, "", words) if has_hovers else svg.outline(box)
            )
    body = [
        f'<g class="fill {css}">{"".join(marks)}</g>'
        if has_hovers
        else f'<path class="fill {css}" d="{"".join(marks)}"/>'
        for css, marks in cells.items()
    ]
    body += _head_axes(layers, heads, width, height)
    count = _labels(run)
    shares = ", ".join(f"{percent(n / count.total())} {label}" for label, n in count.most_common(4))
    label = f"Method of each head by layer under {run.name}: {shares}"
    picture = svg.drawing(_TOP + heads * height + 26, label, body)
    return _map_legend(count, colours) + picture + note(_entropy_words(run, result))


def _cell_words(layer: int, head: int, label: str, entropy: Sequence[Sequence[float]]) -> str:
    words = f"layer {layer}, head {head}: {label}"
    if layer < len(entropy) and head < len(entropy[layer]):
        words += f", {entropy[layer][head]:.2f} bits"
    return words


def _head_axes(layers: int, heads: int, width: float, height: float) -> list[str]:
    body = [svg.text(0, 12, "head", css="strong")]
    step = max(1, math.ceil(13 / height))
    for head in range(0, heads, step):
        y = _TOP + (head + 0.5) * height + 4
        body.append(svg.text(_LEFT - 6, y, str(head), "end"))
    below = _TOP + heads * height + 15
    step = max(1, math.ceil(layers / 12 / 5) * 5) if layers > 14 else 1
    for layer in range(0, layers, step):
        body.append(svg.text(_LEFT + (layer + 0.5) * width, below, str(layer), "middle"))
    body.append(svg.text(_RIGHT, 12, "layer →", "end", "strong"))
    return body


def _map_legend(count: Counter[str], colours: Mapping[str, str]) -> str:
    entries = [
        (colours[label], f"{label} ({percent(n / count.total())})")
        for label, n in sorted(count.items())
        if label in colours
    ]
    rest = sum(n for label, n in count.items() if label not in colours)
    entries += [("ink", f"{_OTHERS} ({percent(rest / count.total())})")] if rest else []
    return legend(entries)


def _entropy_words(run: RunResult, result: EvaluationResult) -> list[str]:
    """Return how concentrated the rows of both kinds of heads are."""
    kinds: dict[bool, list[float]] = {True: [], False: []}
    for labels, bits in zip(run.chosen, result.entropy_bits, strict=False):
        for label, value in zip(labels, bits, strict=False):
            kinds[_is_adapted(label, result)].append(value)
    if not (kinds[True] and kinds[False]):
        return []
    adapted, exact = (math.fsum(kinds[kind]) / len(kinds[kind]) for kind in (True, False))
    return [
        f"Mean entropy of attention rows: {adapted:.1f} bits in heads that adapted, "
        f"{exact:.1f} bits in heads that stayed exact."
    ]
