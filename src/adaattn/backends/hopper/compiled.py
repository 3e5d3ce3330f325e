"""Kernels compiled from their variants, with or without a GPU."""

from typing import Any

from triton.experimental.gluon import language as gl

from adaattn.backends.device.tma import TYPES, compiled, constants_of, descriptor_type
from adaattn.backends.hopper import kernel
from adaattn.backends.hopper.launch import MASK_ALIGNMENT, ROWS, Variant, box_rows
from adaattn.backends.hopper.mask_bits import BITS
from adaattn.spec import HeadTerm, MaskKind

__all__ = ["boxes", "compile_variant", "shared_layout"]

_POINTERS = ("lse", "row_max", "entropy", "dropped")
_NUMBERS = ("tiles", "flags", "starts_q", "starts_k", "counts", "indices")
_ALIGNED = ("mask", "mask_stride_b", "mask_stride_h", "mask_stride_m")
"""What Triton then reads two numbers of a mask at once by."""


def compile_variant(variant: Variant) -> Any:
    """Return Triton's compiled kernel."""
    return compiled(
        kernel.forward,
        _types(variant),
        _constants(variant),
        alignments=dict.fromkeys(_ALIGNED, MASK_ALIGNMENT) if variant.mask_is_aligned else None,
        registers=168 if variant.tiling.warpgroups == 2 else 128,
    )


def boxes(variant: Variant) -> tuple[tuple[int, int], ...]:
    """Return what one copy of q, k, v and of the result takes: rows and columns."""
    tiling = variant.tiling
    columns = (
        *(tiling.block_d, tiling.block_d, tiling.block_v),
        tiling.block_v // tiling.out_parts,
    )
    return tuple(zip(box_rows(tiling), columns, strict=True))


def shared_layout(variant: Variant, box: tuple[int, int]) -> Any:
    """Return how a box of one head lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(
        block_shape(variant, box), TYPES[variant.precision.label]
    )


def block_shape(variant: Variant, box: tuple[int, int]) -> list[int]:
    """Return the shape of a copy: rows and columns behind the dimensions of one place."""
    return [*(1,) * (3 if variant.is_packed else 2), *box]


def _constants(variant: Variant) -> dict[str, Any]:
    """Return the compile-time arguments by name."""
    tiling = variant.tiling
    found = constants_of(
        kernel.forward,
        variant,
        tiling,
        NUM_WARPGROUPS=tiling.warpgroups,
        FAST_TANH=variant.has_fast_tanh,
        MASK=BITS.value if variant.packs_mask else int(variant.mask),
        HAS_HEAD_SCALES=variant.by_head(HeadTerm.SCALE),
        HAS_HEAD_WINDOWS=variant.by_head(HeadTerm.WINDOW),
        HAS_HEAD_SOFTCAPS=variant.by_head(HeadTerm.SOFTCAP),
    )
    return found if tiling.stages_m else found | {"staged": None}


def _types(variant: Variant) -> dict[str, str]:
    """Return Triton's names of the types of arguments that are not int32."""
    types = {}
    for name, box in zip(("query", "key", "value", "out"), boxes(variant), strict=True):
        types[name] = descriptor_type(variant.precision.label, block_shape(variant, box))
    if variant.tiling.stages_m:
        columns = variant.tiling.block_n // (2 if variant.mask is MaskKind.BOOLEAN else 1)
        tile = [1, 1, ROWS, columns]
        types["staged"] = descriptor_type(variant.mask_dtype.replace("i8", "i16"), tile)
    types |= dict.fromkeys(_POINTERS, "*fp32")
    types |= dict.fromkeys((*_ALIGNED[1:], "mask_stride_n"), "i64")
    types |= dict.fromkeys(_NUMBERS, "*i32") | {"sinks": f"*{variant.sinks_dtype}"}
    types |= {
        "sees": "*i8",
        "slopes": f"*{variant.slopes_dtype}",
        "head_scales": f"*{variant.scales_dtype}",
    }
    types["head_windows"] = f"*{variant.windows_dtype}"
    types["head_softcaps"] = f"*{variant.softcaps_dtype}"
    return types | {"mask": f"*{variant.mask_dtype}", "scale": "fp32", "cap": "fp32"}
