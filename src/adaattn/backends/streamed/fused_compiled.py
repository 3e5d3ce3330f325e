"""The kernel of weights compiled from its variants, with or without a GPU."""

from typing import Any, Final

from triton import compile as compile_source
from triton.backends.compiler import GPUTarget

from adaattn.backends.device.gluon import GluonASTSource
from adaattn.backends.device.tma import descriptor_type
from adaattn.backends.streamed import fused
from adaattn.backends.streamed.fused_launch import Kind, Variant, boxes

__all__ = ["compile_weights", "constants_of"]

_COPIED: Final = ("query", "key", "out", "read")
_OTHERS: Final = {"totals": "*fp32", "references": "*fp32", "noted": "*i32", "scale": "fp32"}
_STAGES: Final = {Kind.SUMS: 11, Kind.GIVEN: 11, Kind.CHANGES: 9}
"""As many as there are barriers for; two of those are of the weights that CHANGES reads."""


def compile_weights(variant: Variant) -> Any:
    """Return Triton's compiled kernel for sm_90a; its loading waits for the first launch."""
    names = fused.weights.arg_names
    constants = constants_of(variant)
    types = dict.fromkeys(names, "i32") | _OTHERS
    for name, box in zip(_COPIED, boxes(variant.kind), strict=False):
        types[name] = descriptor_type(variant.dtype, [1, *box])
    source = GluonASTSource(
        fused.weights,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={},
    )
    # Registers at entry: two warpgroups and the producer's, which gives most of its own up.
    options = {"num_warps": 4, "maxnreg": 168}
    return compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)


def constants_of(variant: Variant) -> dict[str, Any]:
    """Return the compile-time arguments by name."""
    kind = variant.kind
    constants = {
        "KIND": kind.value,
        "PARTS": variant.parts,
        "STAGES": _STAGES[kind],
        "IS_CAUSAL": variant.is_causal,
    }
    return constants if kind is Kind.CHANGES else constants | {"read": None}
