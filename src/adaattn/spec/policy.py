"""What a user can afford to lose."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from adaattn.errors import ArgumentError, PolicyError, expected_got
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
        methods: approximations that may be used.
        precisions: precisions that products may be computed in, beside the input's own.
        audit_rows: query rows per head checked against exact attention whenever an
            approximation ran; 0 never checks.
        head_budgets: ``((layer, head, error_budget), ...)`` from calibration; these come first.
        provenance: where a calibrated policy comes from.

    Raises:
        ArgumentError: a value is out of range.
    """

    name: str = "custom"
    error_budget: float = 0.0
    memory_budget_bytes: int | None = None
    methods: tuple[Method, ...] = (Method.EXACT, Method.LOW_RANK, Method.BLOCK_SPARSE)
    precisions: tuple[Precision, ...] = (Precision.FP32, Precision.BF16, Precision.FP16)
    audit_rows: int = 32
    head_budgets: tuple[tuple[int, int, float], ...] = ()
    provenance: str = ""

    def __post_init__(self) -> None:
        """Refuse values that no plan could honour."""
        if not (math.isfinite(self.error_budget) and 0.0 <= self.error_budget < 1.0):
            raise ArgumentError(
                expected_got("error_budget", "a number in [0, 1)", self.error_budget)
            )
        if self.memory_budget_bytes is not None and self.memory_budget_bytes < 0:
            raise ArgumentError(
                expected_got("memory_budget_bytes", "None or at least 0", self.memory_budget_bytes)
            )
        if self.audit_rows < 0:
            raise ArgumentError(expected_got("audit_rows", "at least 0", self.audit_rows))
        if Method.EXACT not in self.methods:
            raise ArgumentError(
                expected_got("methods", "a tuple with Method.EXACT in it", self.methods)
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain JSON values."""
        data = asdict(self)
        data["methods"] = [method.name.lower() for method in self.methods]
        data["precisions"] = [precision.label for precision in self.precisions]
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
            raise PolicyError(expected_got("policy keys", sorted(known), unknown))
        values = dict(data)
        try:
            if "methods" in values:
                values["methods"] = tuple(Method[name.upper()] for name in values["methods"])
            if "precisions" in values:
                values["precisions"] = tuple(Precision[n.upper()] for n in values["precisions"])
            if "head_budgets" in values:
                values["head_budgets"] = tuple(
                    (int(layer), int(head), float(budget))
                    for layer, head, budget in values["head_budgets"]
                )
            return cls(**values)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PolicyError(
                expected_got("policy values", "those of adaattn.Policy", repr(error))
            ) from error
