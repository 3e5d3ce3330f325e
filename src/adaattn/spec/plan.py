"""What planning returns: a plan, and the reasons for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from adaattn.errors import ArgumentError, expected_got
from adaattn.spec._checks import check_at_least_0
from adaattn.spec.enums import Method, Precision, Variant, Why
from adaattn.spec.method import METHODS, Exact, HeadMethod
from adaattn.spec.scheme import Scheme

__all__ = ["Cost", "Decision", "HeadGroup", "Launch", "Plan", "TraceEntry"]

_FLAT: Final = ("rank", "value_rank", "block_size", "kept_mass")
"""Parameters of methods that stood in a group itself when it was written flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How an executor is launched, which changes no result beyond rounding.

    Args:
        chunk_rows: query rows computed at once; 0 is all.

    Raises:
        ArgumentError: a number is below 0.
        ArgumentTypeError: a number is no integer.
    """

    chunk_rows: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no number of rows."""
        check_at_least_0("chunk_rows", self.chunk_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGroup:
    """One way of computing attention, for some of the heads.

    Args:
        capability: name of the executor's capability.
        heads: the query heads; empty means all.
        method: exact, or which approximation, with its parameters.
        scheme: number formats of the arithmetic.
        launch: how the executor is launched.
    """

    capability: str
    heads: tuple[int, ...] = ()
    # torch.compile traces a function that makes a value, not a class or a value as a default.
    method: HeadMethod = field(default_factory=lambda: Exact())
    scheme: Scheme = field(default_factory=lambda: Scheme())
    launch: Launch = field(default_factory=lambda: Launch())

    @property
    def label(self) -> str:
        """A short name for tables: the executor and what it changes."""
        return f"{self.capability}/{self.scheme.label} {self.method.label}".rstrip()

    @property
    def variant(self) -> Variant:
        """Its method, and the format that q, k and v are cast to."""
        return self.method.kind, self.scheme.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: one group for all heads, or several that share them out.

    Args:
        groups: every query head is in exactly one of them.
        num_heads: Hq that the plan was made for.
        error_budget: what the policy allowed.
        audit_rows: rows per head to check after an approximation.

    It holds nothing that was estimated or timed: equal plans are equal on every rank.
    """

    groups: tuple[HeadGroup, ...]
    num_heads: int
    error_budget: float = 0.0
    audit_rows: int = 0

    def __post_init__(self) -> None:
        """Check that the groups cover each head once."""
        if not self.groups:
            raise ArgumentError(expected_got("plan groups", "at least one", "none"))
        if len(self.groups) == 1 and not self.groups[0].heads:
            return
        if not all(group.heads for group in self.groups):
            raise ArgumentError(
                expected_got("plan groups", "heads in each of several", "a group without heads")
            )
        heads = sorted(head for group in self.groups for head in group.heads)
        if heads != list(range(self.num_heads)):
            raise ArgumentError(
                expected_got("plan heads", f"each of 0..{self.num_heads - 1} once", heads)
            )

    @property
    def is_exact(self) -> bool:
        """True when no group approximates (its scheme is checked against the input apart)."""
        return all(isinstance(group.method, Exact) for group in self.groups)

    def variants(self, own: Precision, repaired: tuple[int, ...] = ()) -> tuple[Variant, ...]:
        """Return how each head is computed.

        Args:
            own: number format of the input.
            repaired: heads that were computed again, exactly.
        """
        every = range(self.num_heads)
        known = {head: group.variant for group in self.groups for head in group.heads or every}
        return tuple((Method.EXACT, own) if head in repaired else known[head] for head in every)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {**asdict(self), "groups": [_words_of(group) for group in self.groups]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """Return the plan that ``to_dict`` wrote, now or when a group's values were not nested.

        Raises:
            ArgumentError: a key is unknown or a value does not fit.
        """
        try:
            values = dict(data)
            values["groups"] = tuple(_group_of(words) for words in values["groups"])
            return cls(**values)
        except ArgumentError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArgumentError(
                expected_got("plan", "the values that Plan.to_dict wrote", repr(error))
            ) from error


def _words_of(group: HeadGroup) -> dict[str, Any]:
    """Return a group as plain JSON values."""
    words = asdict(group)
    formats = {name: precision.label for name, precision in words["scheme"].items()}
    method = {"kind": group.method.kind.name.lower(), **words["method"]}
    return {**words, "heads": list(group.heads), "method": method, "scheme": formats}


def _group_of(words: Mapping[str, Any]) -> HeadGroup:
    """Return the group that `_words_of` wrote.

    Raises:
        ArgumentError, AttributeError, KeyError, TypeError, ValueError: it wrote none of this.
    """
    if not any(isinstance(words.get(name), Mapping) for name in ("method", "scheme", "launch")):
        return _group_of_flat(words)
    values = {**words, "heads": tuple(words.get("heads", ()))}
    if "method" in words:
        parameters = dict(words["method"])
        values["method"] = METHODS[Method[parameters.pop("kind").upper()]](**parameters)
    if "scheme" in words:
        formats = {name: Precision[label.upper()] for name, label in words["scheme"].items()}
        values["scheme"] = Scheme(**formats)
    if "launch" in words:
        values["launch"] = Launch(**words["launch"])
    return HeadGroup(**values)


def _group_of_flat(words: Mapping[str, Any]) -> HeadGroup:
    """Return the group that was written when its values stood side by side.

    Parameters of other methods than the group's, which stood there too, meant nothing.
    """
    rest = {**words, "heads": tuple(words.get("heads", ()))}
    method = METHODS[Method[rest.pop("method", "exact").upper()]]
    scheme = Scheme.of(Precision[rest.pop("precision", "fp32").upper()])
    launch = Launch(chunk_rows=rest.pop("chunk_rows", 0))
    found = {name: rest.pop(name) for name in _FLAT if name in rest}
    own = {item.name: found[item.name] for item in fields(method) if item.name in found}
    return HeadGroup(**rest, method=method(**own), scheme=scheme, launch=launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a candidate needs, from first principles.

    Args:
        flops: floating-point operations of its products.
        bytes_moved: bytes read and written in main memory.
        workspace_bytes: memory beside inputs and output.
        time_ms: roofline time on the given hardware.
    """

    flops: float
    bytes_moved: float
    workspace_bytes: int
    time_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One candidate and what became of it.

    Args:
        candidate: the executor and what it changes.
        accepted: it is in the plan.
        reason: one sentence: expected and got.
        why: the same for programs.
        num_reasons: how many things stand against it.
        heads: query heads that it serves; empty means all when accepted.
        cost: what it would need; None when it was refused before that mattered.
        error_estimate: largest estimated error over the heads that it serves; over all heads
            when it serves none.
    """

    candidate: str
    accepted: bool
    reason: str
    why: Why = Why.CHOSEN
    num_reasons: int = 1
    heads: tuple[int, ...] = ()
    cost: Cost | None = None
    error_estimate: float | None = None

    @property
    def executor(self) -> str:
        """The executor's name alone."""
        return self.candidate.split("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan and why it is that one.

    Args:
        plan: what to run.
        trace: every candidate once.
        policy: name of the policy that was asked for.
        notes: remarks that concern no single candidate.
        later: the plan that takes over where it has to be compiled first, else None.
        calls_before: how many calls lose by then what compiling costs.
        cost: what the plan needs; None for a plan that was given.
        exact_cost: what the cheapest exact candidate needs; None if there is none.
    """

    plan: Plan
    trace: tuple[TraceEntry, ...] = ()
    policy: str = ""
    notes: tuple[str, ...] = ()
    later: Plan | None = None
    calls_before: int = 0
    cost: Cost | None = None
    exact_cost: Cost | None = None

    @property
    def workspace_bytes(self) -> int:
        """Predicted memory beside inputs and output."""
        return self.cost.workspace_bytes if self.cost else 0

    def __str__(self) -> str:
        """Return the trace as text, the accepted candidates first.

        Candidates of one executor that share a reason share a line.
        """
        lines: dict[tuple[bool, str, str], list[str]] = {}
        for entry in sorted(self.trace, key=lambda entry: not entry.accepted):
            executor = entry.candidate.split("/")[0]
            shared = (entry.accepted, executor, entry.reason)
            lines.setdefault(shared, []).append(entry.candidate)
        names = [_counted(candidates) for candidates in lines.values()]
        width = max((len(name) for name in names), default=0)
        budget = f"error budget {self.plan.error_budget:g}"
        text = [f"policy {self.policy or 'none'} ({budget})"]
        for name, (accepted, _, reason) in zip(names, lines, strict=True):
            text.append(f"  {'+' if accepted else '-'} {name:<{width}}  {reason}")
        return "\n".join([*text, *(f"  note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain JSON values."""
        return {
            "policy": self.policy,
            "plan": self.plan.to_dict(),
            "trace": [{**asdict(entry), "why": entry.why.value} for entry in self.trace],
            "notes": list(self.notes),
            "later": None if self.later is None else self.later.to_dict(),
            "calls_before": self.calls_before,
            "cost": None if self.cost is None else asdict(self.cost),
            "exact_cost": None if self.exact_cost is None else asdict(self.exact_cost),
        }


def _counted(names: list[str]) -> str:
    """Return the first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
