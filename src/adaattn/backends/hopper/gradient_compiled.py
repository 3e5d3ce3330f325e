"""The kernels of a backward pass compiled from their variants, with or without a GPU."""

from typing import Any

from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl

from adaattn.backends.hopper import backward, gradient_rows
from adaattn.backends.hopper._gluon import GluonASTSource
from adaattn.backends.hopper.compiled import Launcher, descriptor_type
from adaattn.backends.hopper.gradient_launch import BLOCK_KEYS, GradientVariant

__all__ = ["compile_gradients", "constants_of", "gradient_kernels"]

_ADDRESS_BYTES = 16
_STEP = 8
"""Numbers that strides and columns are multiples of."""

_KINDS = {"prepare": "prepare_rows", "main": "backward", "finish": "finish_queries"}


def compile_gradients(variant: GradientVariant, kind: str) -> Any:
    """Return Triton's compiled kernel for sm_90a.

    Args:
        variant: what it depends on.
        kind: "prepare", "main" or "finish".
    """
    function = getattr(backward if kind == "main" else gradient_rows, _KINDS[kind])
    constants = constants_of(variant, kind)
    types = dict.fromkeys(function.arg_names, "i32") | _types(variant, kind)
    signature = {name: types[name] for name in function.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(
        function,
        signature=signature,
        constexprs={(function.arg_names.index(name),): it for name, it in constants.items()},
        attrs={} if kind == "main" else _alignments(function.arg_names, signature),
    )
    options: dict[str, Any] = {"num_warps": 4}
    if kind == "main":
        # At entry: two warpgroups and the producer's, which gives most of its own up.
        options["maxnreg"] = 168
    return compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)


def gradient_kernels(variant: GradientVariant) -> tuple[Launcher, ...]:
    """Return what makes terms of rows, the main kernel, and what finishes queries."""
    return tuple(Launcher(compile_gradients(variant, kind)) for kind in _KINDS)


def constants_of(variant: GradientVariant, kind: str) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel by name."""
    sizes = {"BLOCK_M": variant.block_m, "BLOCK_D": variant.block_d}
    if kind == "prepare":
        return sizes | {
            "HAS_LSE_GRADIENT": variant.has_lse_gradient,
            "IS_ORDERED": variant.is_ordered,
            "IS_PACKED": variant.is_packed,
        }
    if kind == "finish":
        return sizes | {"IS_PACKED": variant.is_packed}
    return {
        "BLOCK_M": variant.block_m,
        "BLOCK_N": BLOCK_KEYS,
        "BLOCK_D": variant.block_d,
        "IS_GROUPED": variant.is_grouped,
        "HAS_RIGHT": variant.has_right,
        "HAS_LEFT": variant.has_left,
        "IS_RAGGED": variant.is_ragged,
        "IS_ALIGNED": variant.is_aligned,
        "HAS_SOFTCAP": variant.has_softcap,
        "FAST_TANH": variant.has_fast_tanh,
        "HAS_ALIBI": variant.has_alibi,
        "IS_ORDERED": variant.is_ordered,
        "IS_PACKED": variant.is_packed,
        "TO_END": variant.to_end,
    }


def _types(variant: GradientVariant, kind: str) -> dict[str, str]:
    """Return Triton's names of the types of arguments that are not int32."""
    label = variant.precision.label
    if kind != "main":
        pointers = ("lse", "lse_upstream", "row_terms", "sums")
        numbers = dict.fromkeys(("output", "upstream", "gradient"), f"*{label}")
        others = {"scale": "fp32", "turns": "*i32", "starts": "*i32"}
        return numbers | dict.fromkeys(pointers, "*fp32") | others
    rows, keys = (
        descriptor_type(label, [*(1,) * (3 if variant.is_packed else 2), size, variant.block_d])
        for size in (variant.block_m, BLOCK_KEYS)
    )
    return {
        **dict.fromkeys(("query", "upstream"), rows),
        **dict.fromkeys(("key", "value", "key_gradient", "value_gradient"), keys),
        **dict.fromkeys(("scale", "natural", "cap"), "fp32"),
        "row_terms": _plain([2 * variant.block_m]),
        "sums": _plain([16, 256]),
        "slopes": f"*{variant.slopes_dtype}",
        **dict.fromkeys(("turns", "starts_q", "starts_k"), "*i32"),
    }


def _plain(tile: list[int]) -> str:
    """Return Triton's name of the type of fp32 that TMA copies without a swizzle."""
    layout = gl.NVMMASharedLayout(0, 32, len(tile))
    return f"tensordesc<fp32[{','.join(map(str, tile))}],{layout!r}>"


def _alignments(names: list[str], signature: dict[str, str]) -> dict[tuple[int], list[list[Any]]]:
    """Return what Triton may take for granted of addresses, strides and columns.

    Not of the log-sum-exp and its gradient, which may begin anywhere.
    """
    found: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(names):
        if signature[name].startswith("*") and not name.startswith("lse"):
            found[place,] = [["tt.divisibility", _ADDRESS_BYTES]]
        elif name.startswith("stride_") or name == "columns":
            found[place,] = [["tt.divisibility", _STEP]]
    return found
