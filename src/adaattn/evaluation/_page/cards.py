"""What an evaluation says at a glance: quality, time, memory, and the heads that adapted."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from adaattn.evaluation._page.markup import duration, percent, prose
from adaattn.evaluation.report import NOTICEABLE, is_clear
from adaattn.evaluation.results import EvaluationResult, RunResult

__all__ = ["Card", "cards", "cards_html"]

_MEGABYTE = 1e6
_NOISE = 2.0
"""Differences below so many standard errors are not told from none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One answer.

    Args:
        title: what was asked.
        value: the answer in a few words.
        detail: of which run it is, and what it is compared with.
        tone: ``"good"`` for a gain, ``"bad"`` for a loss, ``""`` for neither.
    """

    title: str
    value: str
    detail: str
    tone: str = ""


def cards(result: EvaluationResult) -> tuple[Card, ...]:
    """Return the four answers: quality kept, time and memory saved, heads adapted.

    Quality is that of the policy that changed the loss most. Time and memory are those of the
    policy that needs least of each, measured against the exact run and against Transformers' own
    attention. A gain of time needs an approximation, and must stand out from the spread over
    windows; a loss need not. Single problems beside PyTorch come before the policies.
    """
    policies = [run for run in result.runs[1:] if run.name != "exact"]
    if not policies:
        titles = ("Quality", "Time", "Memory", "Heads that adapted")
        none = "No policy was run."
        return tuple(Card(title=title, value="none", detail=none) for title in titles)
    time = _time(policies, result)
    memory = _memory(policies, result.runs[0])
    if result.comparisons:
        ratios = [(item.time_ratio, item.memory_ratio) for item in result.comparisons]
        times, sizes = zip(*ratios, strict=True)
        time = _beside(time, times, ("faster", "slower"))
        memory = _beside(memory, sizes, ("less", "more"))
    return (_quality(policies), time, memory, _adapted(policies))


def cards_html(result: EvaluationResult) -> str:
    """Return the answers side by side."""
    return (
        '<div class="cards">'
        + "".join(
            f'<section class="card {card.tone}"><h2>{html.escape(card.title)}</h2>'
            f"<strong>{html.escape(card.value)}</strong><p>{prose(card.detail)}</p></section>"
            for card in cards(result)
        )
        + "</div>"
    )


def _quality(policies: list[RunResult]) -> Card:
    title = "Quality"
    broken = [run for run in policies if not math.isfinite(run.loss_difference)]
    if broken:
        detail = f"{broken[0].name}: its loss is not a finite number."
        return Card(title=title, value="lost", detail=detail, tone="bad")
    if not any(run.mean_absolute_difference or run.divergence for run in policies):
        detail = "Under every policy, the loss of every token is exactly that of exact attention."
        return Card(title=title, value="unchanged", detail=detail, tone="good")
    worst = max(policies, key=lambda run: abs(run.loss_difference))
    change = math.expm1(worst.loss_difference)
    detail = (
        f"in perplexity under {worst.name}, the policy that changed it most: loss "
        f"{worst.loss_difference:+.1e} ± {worst.loss_difference_error:.0e} nat a token. Largest KL "
        f"of a policy to exact attention: {max(run.divergence for run in policies):.1e} nat."
    )
    if abs(worst.loss_difference) <= _NOISE * worst.loss_difference_error:
        detail = detail.replace("changed it most:", "changed it most, within the noise:")
        sign = "+" if change > 0 else "-"
        return Card(title=title, value=f"{sign}{percent(abs(change))}", detail=detail)
    value = f"{percent(abs(change))} {'worse' if change > 0 else 'better'}"
    return Card(title=title, value=value, detail=detail, tone="bad" if change > 0 else "good")


def _time(policies: list[RunResult], result: EvaluationResult) -> Card:
    exact = result.run("exact")
    timed = [run for run in policies if run.attention_ms is not None]
    if not timed or not exact.attention_ms:
        return Card(
            title="Time", value="not measured", detail="Attention calls cannot be timed here."
        )
    best = min(timed, key=_attention_ms)
    value, tone = _saved(_attention_ms(best) / exact.attention_ms, "less time", "slower")
    detail = (
        f"attention in the median window under {best.name}, the fastest policy: "
        f"{duration(_attention_ms(best))}, exact {duration(exact.attention_ms)}. "
        f"All layers: {duration(best.forward_ms)}, exact {duration(exact.forward_ms)}."
    )
    if tone == "good" and best.approximated == 0.0:
        value, tone = "no difference", ""
        detail += " It ran what exact attention runs: the difference is noise."
    elif tone == "good" and not is_clear(best, result):
        value, tone = "no clear gain", ""
        detail += " The difference is within the noise of these times."
    return Card(title="Time", value=value, detail=detail, tone=tone)


def _memory(policies: list[RunResult], baseline: RunResult) -> Card:
    measured = [run for run in policies if run.peak_bytes is not None]
    if not measured or not baseline.peak_bytes:
        detail = "The peak of a forward pass cannot be measured here."
        return Card(title="Memory", value="not measured", detail=detail)
    best = min(measured, key=_peak_bytes)
    value, tone = _saved(_peak_bytes(best) / baseline.peak_bytes, "less", "more")
    detail = (
        f"added by a forward pass at its peak under {best.name}, the policy that needs least: "
        f"{_peak_bytes(best) / _MEGABYTE:.0f} MB, Transformers' {baseline.name} "
        f"{baseline.peak_bytes / _MEGABYTE:.0f} MB."
    )
    return Card(title="Memory", value=value, detail=detail, tone=tone)


def _beside(card: Card, ratios: Sequence[float | None], words: tuple[str, str]) -> Card:
    """Return a card of single problems beside PyTorch, with what another says of the policies."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return card
    better = [ratio for ratio in known if ratio > 1 + NOTICEABLE]
    worse = [ratio for ratio in known if ratio < 1 - NOTICEABLE]
    value = f"{len(better)} of {len(known)} {words[0]}"
    detail = f"single problems beside PyTorch, {_span(better)}" if better else "single problems"
    if worse:
        detail += f"; {len(worse)} {words[1]}, {_span([1 / ratio for ratio in worse])}"
    detail += f". On the text: {card.value}, {card.detail}"
    tone = "bad" if len(worse) > len(better) else "good" if better else ""
    return Card(title=card.title, value=value, detail=detail, tone=tone)


def _span(ratios: Sequence[float]) -> str:
    """Return the least and the largest of some ratios."""
    low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return f"{low}x" if low == high else f"{low}x to {high}x"


def _adapted(policies: list[RunResult]) -> Card:
    title = "Heads that adapted"
    shares = ", ".join(f"{run.name} {percent(run.approximated)}" for run in policies)
    most = max(run.approximated for run in policies)
    if most == 0.0:
        detail = f"Every head of every call stayed exact ({shares}). The reasons are below."
        return Card(title=title, value="none", detail=detail)
    detail = f"of all calls were served by an approximation: {shares}."
    return Card(title=title, value=percent(most), detail=detail)


def _saved(ratio: float, gain: str, loss: str) -> tuple[str, str]:
    """Return a ratio in words, and whether it is a gain or a loss."""
    if ratio < 1 - NOTICEABLE:
        return f"{percent(1 - ratio)} {gain}", "good"
    if ratio > 1 + NOTICEABLE:
        return f"{percent(ratio - 1)} {loss}", "bad"
    return "no difference", ""


def _attention_ms(run: RunResult) -> float:
    assert run.attention_ms is not None
    return run.attention_ms


def _peak_bytes(run: RunResult) -> int:
    assert run.peak_bytes is not None
    return run.peak_bytes
