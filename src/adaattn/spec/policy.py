"""What a user can afford to lose."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from adaattn._numbers import require_flag, require_integer, require_number
from adaattn.errors import ArgumentError, ArgumentTypeError, PolicyError
from adaattn.spec.enums import Method, Precision

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What quality and memory the user can afford.

    Args:
        name: shown in traces and events.
        error_budget: allowed relative Frobenius error of each head's output; 0 is the exact
            path, at the input's dtype.
        memory_budget_bytes: most workspace a call may take beside its inputs and its output;
            None is what the device has.
        methods: approximations that may be used, or their names, such as ``"low_rank"``.
        precisions: precisions that products may be computed in, beside the input's own, or their
            names, such as ``"bf16"``.
        ranks: ranks that low rank may use; () leaves them to the head dimension.
        audit_rows: query rows per head that are sampled for a measurement, and checked after an
            approximation ran; with 0 ``auto`` never approximates, and what is asked for by name
            is not checked.
        check: ``"sampled"``: on a GPU no call waits, so that numbers measured on one call serve
            later ones and audits come every few calls; ``"always"``: this very call is measured,
            checked and repaired before it returns, at the price of waiting for the device. A CPU
            always does.
        head_budgets: ``((layer, head, error_budget), ...)`` from calibration; these come first.
        batch_invariant: a sequence's result is the same, bit for bit, whatever else is in the
            batch; every error budget must be 0.
        provenance: where a calibrated policy comes from.

    Raises:
        ArgumentError: a value is out of range.
        ArgumentTypeError: a value has another type.
    """

    name: str = "custom"
    error_budget: float = 0.0
    memory_budget_bytes: int | None = None
    methods: tuple[Method, ...] = (Method.EXACT, Method.LOW_RANK, Method.BLOCK_SPARSE)
    precisions: tuple[Precision, ...] = (Precision.FP32, Precision.BF16, Precision.FP16)
    ranks: tuple[int, ...] = ()
    audit_rows: int = 32
    check: str = "sampled"
    head_budgets: tuple[tuple[int, int, float], ...] = ()
    batch_invariant: bool = False
    provenance: str = ""

    if TYPE_CHECKING:  # names will do where members are kept

        def __init__(
            self,
            *,
            name: str = "custom",
            error_budget: float = 0.0,
            memory_budget_bytes: int | None = None,
            methods: tuple[Method | str, ...] = (),
            precisions: tuple[Precision | str, ...] = (),
            ranks: tuple[int, ...] = (),
            audit_rows: int = 32,
            check: str = "sampled",
            head_budgets: tuple[tuple[int, int, float], ...] = (),
            batch_invariant: bool = False,
            provenance: str = "",
        ) -> None: ...

    def __post_init__(self) -> None:
        """Refuse values that no plan could honour."""
        require_number("error_budget", self.error_budget, least=0, below=1)
        if self.memory_budget_bytes is not None:
            require_integer("memory_budget_bytes", self.memory_budget_bytes, least=0)
        require_integer("audit_rows", self.audit_rows, least=0)
        if self.check not in ("sampled", "always"):
            raise ArgumentError.got("check", "'sampled' or 'always'", repr(self.check))
        object.__setattr__(self, "methods", _members("methods", self.methods, Method))
        object.__setattr__(self, "precisions", _members("precisions", self.precisions, Precision))
        _check_ranks(self.ranks)
        _check_head_budgets(self.head_budgets)
        if Method.EXACT not in self.methods:
            raise ArgumentError.got("methods", "a tuple with Method.EXACT in it", self.methods)
        require_flag("batch_invariant", self.batch_invariant)
        if self.batch_invariant and self.allows_loss:
            hint = "approximations are chosen by numbers that are measured on the whole batch"
            raise ArgumentError.got("error budgets with batch_invariant=True", "0", "others", hint)

    @property
    def allows_loss(self) -> bool:
        """True when some head may lose something: not every budget is 0."""
        return self.error_budget > 0.0 or any(budget > 0.0 for *_, budget in self.head_budgets)

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain JSON values."""
        data = asdict(self)
        data["methods"] = [method.name.lower() for method in self.methods]
        data["precisions"] = [precision.label for precision in self.precisions]
        data["ranks"] = list(self.ranks)
        data["head_budgets"] = [list(entry) for entry in self.head_budgets]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        """Return the policy that ``to_dict`` wrote.

        Raises:
            PolicyError: a key is unknown or a value does not fit.
        """
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise PolicyError.got("policy keys", sorted(known), unknown)
        values = dict(data)
        try:
            if "methods" in values:
                values["methods"] = tuple(Method[name.upper()] for name in values["methods"])
            if "precisions" in values:
                values["precisions"] = tuple(Precision[n.upper()] for n in values["precisions"])
            if "ranks" in values:
                values["ranks"] = tuple(values["ranks"])
            if "head_budgets" in values:
                values["head_budgets"] = tuple(
                    (int(layer), int(head), float(budget))
                    for layer, head, budget in values["head_budgets"]
                )
            return cls(**values)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PolicyError.got(
                "policy values", "those of adaattn.Policy", repr(error)
            ) from error


def _members(name: str, values: object, kind: type[Method] | type[Precision]) -> tuple[Any, ...]:
    """Return members of one enum, given as such or by their names in any case.

    Raises:
        ArgumentTypeError: a value is neither.
    """
    if isinstance(values, tuple):
        named = {item.name: item for item in kind}
        found = [named.get(it.upper()) if isinstance(it, str) else it for it in values]
        if all(isinstance(item, kind) for item in found):
            return tuple(found)
    names = ", ".join(repr(item.name.lower()) for item in kind)
    raise ArgumentTypeError.got(
        name, f"a tuple of adaattn.{kind.__name__}, or of {names}", repr(values)
    )


def _check_ranks(values: object) -> None:
    """Refuse what is no tuple of positive integers."""
    if not isinstance(values, tuple) or not all(type(item) is int for item in values):
        raise ArgumentTypeError.got("ranks", "a tuple of integers", repr(values))
    if any(rank < 1 for rank in values):
        raise ArgumentError.got("ranks", "integers of at least 1", values)


def _check_head_budgets(entries: object) -> None:
    """Refuse what is no tuple of (layer, head, error_budget)."""
    if not isinstance(entries, tuple):
        raise ArgumentTypeError.got("head_budgets", "a tuple", repr(entries))
    for entry in entries:
        if not (isinstance(entry, tuple) and len(entry) == 3):
            raise ArgumentTypeError.got(
                "head_budgets", "tuples (layer, head, error_budget)", repr(entry)
            )
        layer, head, budget = entry
        require_integer("layer of head_budgets", layer, least=0)
        require_integer("head of head_budgets", head, least=0)
        require_number(f"error_budget of layer {layer}, head {head}", budget, least=0, below=1)
