"""What the events of one run add up to: methods, errors, memory, and reasons for refusing."""

import re
from collections import Counter
from dataclasses import dataclass

from adaattn._events import AttentionEvent
from adaattn.backends import capabilities
from adaattn.spec import Method, Precision, Scheme

__all__ = ["Ledger", "LedgerSummary", "Refusal", "is_approximation"]

_MAX_REFUSALS = 8
_NUMBERS = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why an approximation was not taken, as far as numbers apart.

    Args:
        candidate: the first one it was said of.
        reason: the first sentence; others differ in their numbers.
        calls: how often it was said.
    """

    candidate: str
    reason: str
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSummary:
    """The sums of one run.

    Args:
        calls: attention calls.
        methods: ``(label, share)`` of all heads of all calls, the largest share first.
        approximated: share of heads that any approximation served.
        mean_error: mean measured relative output error of a head, exact heads counted as 0.
        max_error: the largest one.
        workspace_bytes: the most that a plan asked for.
        fallbacks: steps down taken.
        chosen: label of each head of each layer, in the first window.
        decisions: the whole trace of each layer, in the first window.
        refusals: the most frequent reasons for not approximating.
    """

    calls: int
    methods: tuple[tuple[str, float], ...]
    approximated: float
    mean_error: float
    max_error: float
    workspace_bytes: int
    fallbacks: int
    chosen: tuple[tuple[str, ...], ...]
    decisions: tuple[str, ...]
    refusals: tuple[Refusal, ...]


class Ledger:
    """A sink for the events of one run; sums, and keeps the first window's choices.

    An event arrives while its attention call is being timed, so that it is only kept then;
    `settle` does the sums.
    """

    def __init__(self) -> None:
        self._pending: list[AttentionEvent] = []
        self._calls = 0
        self._heads: Counter[str] = Counter()
        self._approximated = 0
        self._error_sum = 0.0
        self._error_max = 0.0
        self._judged = 0
        self._workspace = 0
        self._fallbacks = 0
        self._chosen: dict[int, tuple[str, ...]] = {}
        self._decisions: dict[int, str] = {}
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._examples: dict[tuple[str, str], tuple[str, str]] = {}

    def add(self, event: AttentionEvent) -> None:
        """Keep one call for `settle`."""
        self._pending.append(event)

    def settle(self) -> None:
        """Add up what was kept."""
        for event in self._pending:
            self._settle(event)
        self._pending.clear()

    def summary(self) -> LedgerSummary:
        """Return the sums so far."""
        self.settle()
        heads = max(self._heads.total(), 1)
        return LedgerSummary(
            calls=self._calls,
            methods=tuple((label, n / heads) for label, n in self._heads.most_common()),
            approximated=self._approximated / heads,
            mean_error=self._error_sum / max(self._judged, 1),
            max_error=self._error_max,
            workspace_bytes=self._workspace,
            fallbacks=self._fallbacks,
            chosen=tuple(self._chosen[layer] for layer in sorted(self._chosen)),
            decisions=tuple(self._decisions[layer] for layer in sorted(self._decisions)),
            refusals=tuple(
                Refusal(candidate=self._examples[key][0], reason=self._examples[key][1], calls=n)
                for key, n in self._refusals.most_common(_MAX_REFUSALS)
            ),
        )

    def _settle(self, event: AttentionEvent) -> None:
        num_heads = event.problem.num_heads
        own = event.problem.precision
        labels = [""] * num_heads
        for group in event.decision.plan.groups:
            for head in group.heads or range(num_heads):
                labels[head] = group.label
            if group.method.kind is not Method.EXACT or group.scheme != Scheme.of(own):
                self._approximated += len(group.heads) or num_heads
        self._heads.update(labels)
        errors = (*event.head_errors, *event.earlier_errors)
        self._error_sum += sum(errors)
        self._error_max = max(self._error_max, *errors, 0.0)
        # Where the host does not wait, one call in many has errors: it stands for the others.
        unseen = not event.problem.may_wait and not event.earlier_errors
        self._judged += 0 if unseen else num_heads
        self._workspace = max(self._workspace, event.workspace_bytes)
        self._fallbacks += len(event.fallbacks)
        self._note_refusals(event)
        layer = _layer_of(event.tag, self._calls)
        self._chosen.setdefault(layer, tuple(labels))
        if layer not in self._decisions:
            self._decisions[layer] = str(event.decision)
        self._calls += 1

    def _note_refusals(self, event: AttentionEvent) -> None:
        for entry in event.decision.trace:
            if entry.accepted or not is_approximation(entry.candidate, event.problem.precision):
                continue
            key = (entry.candidate.split()[0], _NUMBERS.sub("#", entry.reason))
            self._refusals[key] += 1
            self._examples.setdefault(key, (entry.candidate, entry.reason))


def is_approximation(candidate: str, own: Precision) -> bool:
    """Return whether a candidate, by its label, computes something else than exact attention.

    Args:
        candidate: a label such as ``"low_rank/fp32 rank=8"``.
        own: what the inputs are stored in; anything lower is an approximation too.
    """
    executor, _, scheme = candidate.split()[0].partition("/")
    methods = {item.name: item.method for item in capabilities()}
    return methods.get(executor, Method.EXACT) is not Method.EXACT or scheme != own.label


def _layer_of(tag: str, calls: int) -> int:
    digits = tag.removeprefix("layer")
    return int(digits) if digits.isdigit() else calls
