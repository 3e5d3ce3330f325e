"""The kernels of a backward pass compiled from their variants, with or without a GPU."""

from typing import Any

from triton.experimental.gluon import language as gl

from adaattn.backends.device import tma
from adaattn.backends.device.tma import Launcher, descriptor_type
from adaattn.backends.hopper import backward, backward_keys, backward_queries, gradient_rows
from adaattn.backends.hopper.gradient_launch import GradientVariant
from adaattn.backends.hopper.launch import MASK_ALIGNMENT
from adaattn.backends.hopper.mask_bits import BITS

__all__ = ["compile_gradients", "constants_of", "gradient_kernels", "kinds_of"]

_ADDRESS_BYTES = 16
_STEP = 8
"""Numbers that strides and columns are multiples of."""

_FUNCTIONS = {
    "prepare": gradient_rows.prepare_rows,
    "main": backward.backward,
    "finish": gradient_rows.finish,
    "keys": backward_keys.backward_keys,
    "queries": backward_queries.backward_queries,
}
_SMALL = ("prepare", "finish")
"""Kernels without products."""
_STRIDES_OF_MASK = ("mask_stride_b", "mask_stride_h", "mask_stride_m", "mask_stride_n")


def compile_gradients(variant: GradientVariant, kind: str) -> Any:
    """Return Triton's compiled kernel for sm_90a.

    Args:
        variant: what it depends on.
        kind: one of `kinds_of`.
    """
    types = _types(variant, kind)
    return tma.compiled(
        _FUNCTIONS[kind],
        types,
        constants_of(variant, kind),
        alignments=_alignments(variant, kind, types),
        # Of two warpgroups and the producer's.
        registers=None if kind in _SMALL else 168,
    )


def gradient_kernels(variant: GradientVariant) -> tuple[Launcher, ...]:
    """Return the kernels of a backward pass, in the order in which they are launched."""
    return tuple(Launcher(compile_gradients(variant, kind)) for kind in kinds_of(variant))


def kinds_of(variant: GradientVariant) -> tuple[str, str, str]:
    """Return the names of those kernels.

    The first makes terms of rows. Then there is one for all gradients, and what finishes those that
    are summed; or else, where these are split, one for keys and values, and one for queries.
    """
    return ("prepare", "keys", "queries") if variant.is_split else ("prepare", "main", "finish")


def constants_of(variant: GradientVariant, kind: str) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel by name."""
    others = {
        "FAST_TANH": variant.has_fast_tanh,
        "MASK": BITS.value if variant.packs_mask else int(variant.mask),
        "HAS_MASK": variant.packs_mask,
        "HAS_SUMS": not variant.is_split,
    }
    if kind in _SMALL:
        others["BLOCK_D"] = variant.block_v
    found = tma.constants_of(_FUNCTIONS[kind], variant, **others)
    if kind == "main" and not variant.packs_mask:
        found["words"] = None
    return found


def _types(variant: GradientVariant, kind: str) -> dict[str, str]:
    """Return Triton's names of the types of arguments that are not int32."""
    label = variant.precision.label
    if kind in _SMALL:
        pointers = ("lse", "lse_upstream", "row_terms", "sums")
        written = ("gradient", "key_gradient", "value_gradient")
        numbers = dict.fromkeys(("output", "upstream", *written), f"*{label}")
        others = {"scale": "fp32", "turns": "*i32", "starts": "*i32"}
        return numbers | dict.fromkeys(pointers, "*fp32") | others
    rank = 3 if variant.is_packed else 2
    boxes = (
        (("query", "query_gradient"), variant.block_m, variant.block_d),
        (("upstream",), variant.block_m, variant.block_v),
        (("key", "key_gradient"), variant.block_n, variant.block_d),
        (("value", "value_gradient"), variant.block_n, variant.block_v),
    )
    copied = {
        name: descriptor_type(label, [*(1,) * rank, rows, columns])
        for names, rows, columns in boxes
        for name in names
    }
    # One kernel has terms of rows copied, log-sum-exps and the rest apart, another loads them.
    terms = {"main": _plain([2 * variant.block_m]), "keys": _plain([variant.block_m])}
    return copied | {
        **dict.fromkeys(("scale", "natural", "cap"), "fp32"),
        "row_terms": terms.get(kind, "*fp32"),
        "sums": _plain([16, 256]),
        "words": _plain([1, 1, 1, 2 * variant.block_m], "i32"),
        "slopes": f"*{variant.slopes_dtype}",
        **dict.fromkeys(("turns", "starts_q", "starts_k"), "*i32"),
        **dict.fromkeys(("counts", "indices", "before"), "*i32"),
        "mask": f"*{variant.mask_dtype}",
        **dict.fromkeys(_STRIDES_OF_MASK, "i64"),
    }


def _plain(tile: list[int], dtype: str = "fp32") -> str:
    """Return Triton's name of the type of numbers that TMA copies without a swizzle."""
    layout = gl.NVMMASharedLayout(0, 32, len(tile))
    return f"tensordesc<{dtype}[{','.join(map(str, tile))}],{layout!r}>"


def _alignments(variant: GradientVariant, kind: str, types: dict[str, str]) -> dict[str, int]:
    """Return what Triton may take for granted of addresses, strides and columns.

    Not of the log-sum-exp, its gradient and the bounds of packed sequences, which may begin
    anywhere; of kernels with products, of the mask alone.
    """
    if kind not in _SMALL:
        names = ("mask", *_STRIDES_OF_MASK[:3]) if variant.mask_is_aligned else ()
        found = dict.fromkeys(names, MASK_ALIGNMENT)
        return {name: step for name, step in found.items() if name in _FUNCTIONS[kind].arg_names}
    found = {}
    for name in _FUNCTIONS[kind].arg_names:
        if name.startswith(("stride_", "columns")):
            found[name] = _STEP
        elif types.get(name, "").startswith("*") and not name.startswith(("lse", "starts")):
            found[name] = _ADDRESS_BYTES
    return found
