"""The arithmetic of a method: in which formats it multiplies and sums."""

from dataclasses import dataclass

from adaattn.spec.enums import Precision

__all__ = ["Scheme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The formats that attention is computed in, whatever the dtype of its input.

    Args:
        qk: format of what the product of q and k multiplies.
        pv: format of what the product of weights and v multiplies.
        accumulate: format of sums, those of the softmax included.

    Smoothing, rotation and the granularity of scales join when an executor has them.

    Example:
        >>> Scheme.of(Precision.BF16)
        Scheme(qk=<Precision.BF16: 2>, pv=<Precision.BF16: 2>, accumulate=<Precision.FP32: 1>)
    """

    qk: Precision = Precision.FP32
    pv: Precision = Precision.FP32
    accumulate: Precision = Precision.FP32

    @classmethod
    def of(cls, precision: Precision) -> "Scheme":
        """Return both products in one format, with sums in fp32, or in fp64 for fp64."""
        sums = Precision.FP64 if precision is Precision.FP64 else Precision.FP32
        return cls(qk=precision, pv=precision, accumulate=sums)

    @property
    def inputs(self) -> Precision:
        """The format that q, k and v are cast to: the wider one of both products."""
        return min(self.qk, self.pv)

    @property
    def label(self) -> str:
        """The one format, such as ``"bf16"``; else those of both products and of sums."""
        if self == Scheme.of(self.qk):
            return self.qk.label
        return f"{self.qk.label}+{self.pv.label}+{self.accumulate.label}"

    def keeps(self, precision: Precision) -> bool:
        """Return whether numbers of a format go through every step without being rounded to less.

        Example:
            >>> Scheme.of(Precision.FP32).keeps(Precision.BF16)
            True
        """
        return all(step.keeps(precision) for step in (self.qk, self.pv, self.accumulate))
