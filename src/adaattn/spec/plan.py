"""What is run: which heads, by whom and how."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from adaattn._numbers import require_integer
from adaattn.errors import ArgumentError
from adaattn.spec.enums import Method, Precision, Variant
from adaattn.spec.method import METHODS, Exact, HeadMethod
from adaattn.spec.scheme import Scheme

__all__ = ["HeadGroup", "Launch", "Plan"]


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
        require_integer("chunk_rows", self.chunk_rows, least=0)


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
        error_budget: what the policy allowed; None where the caller gave what is lost, so that
            no budget is checked.
        audit_rows: rows per head to check after an approximation.

    It holds nothing that was estimated or timed: equal plans are equal on every rank.

    Raises:
        ArgumentError: the groups do not cover each head once, or rows are to be audited without
            an error budget.
    """

    groups: tuple[HeadGroup, ...]
    num_heads: int
    error_budget: float | None = 0.0
    audit_rows: int = 0

    def __post_init__(self) -> None:
        """Check that the groups cover each head once, and that audits have a budget."""
        if self.error_budget is None and self.audit_rows:
            hint = "an audit holds errors against a budget"
            raise ArgumentError.got(
                "audit_rows of a plan without an error budget", 0, self.audit_rows, hint
            )
        if not self.groups:
            raise ArgumentError.got("plan groups", "at least one", "none")
        if len(self.groups) == 1 and not self.groups[0].heads:
            return
        if not all(group.heads for group in self.groups):
            raise ArgumentError.got(
                "plan groups", "heads in each of several", "a group without heads"
            )
        heads = sorted(head for group in self.groups for head in group.heads)
        if heads != list(range(self.num_heads)):
            raise ArgumentError.got("plan heads", f"each of 0..{self.num_heads - 1} once", heads)

    @property
    def is_exact(self) -> bool:
        """True when no group approximates (its scheme is checked against the input apart)."""
        return all(isinstance(group.method, Exact) for group in self.groups)

    @property
    def budgets(self) -> tuple[float, ...]:
        """The error budget of each head, for audits; () where none is checked."""
        return () if self.error_budget is None else (self.error_budget,) * self.num_heads

    @property
    def shown_budget(self) -> str:
        """The error budget in words."""
        budget = self.error_budget
        return "no error budget" if budget is None else f"error budget {budget:g}"

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
        """Return the plan that ``to_dict`` wrote.

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
            raise ArgumentError.got(
                "plan", "the values that Plan.to_dict wrote", repr(error)
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
