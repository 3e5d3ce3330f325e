"""The kernel of weights compiled from its variants, with or without a GPU."""

from typing import Any, Final

from adaattn.backends.device import tma
from adaattn.backends.streamed import fused
from adaattn.backends.streamed.fused_launch import Kind, Variant, boxes

__all__ = ["compile_weights", "constants_of"]

_COPIED: Final = ("query", "key", "out", "read")
_OTHERS: Final = {"totals": "*fp32", "references": "*fp32", "noted": "*i32", "scale": "fp32"}
_STAGES: Final = {Kind.SUMS: 11, Kind.GIVEN: 11, Kind.CHANGES: 9}
"""As many as there are barriers for; two of those are of the weights that CHANGES reads."""


def compile_weights(variant: Variant) -> Any:
    """Return Triton's compiled kernel for sm_90a; its loading waits for the first launch."""
    types = dict(_OTHERS)
    for name, box in zip(_COPIED, boxes(variant.kind), strict=False):
        types[name] = tma.descriptor_type(variant.dtype, [1, *box])
    # Of two warpgroups and the producer's.
    return tma.compiled(fused.weights, types, constants_of(variant), registers=168)


def constants_of(variant: Variant) -> dict[str, Any]:
    """Return the compile-time arguments by name."""
    kind = variant.kind
    own = {"KIND": kind.value, "STAGES": _STAGES[kind]}
    constants = tma.constants_of(fused.weights, variant, **own)
    return constants if kind is Kind.CHANGES else constants | {"read": None}
