"""Kernels compiled from their variants, with or without a GPU."""

from typing import Any

from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl

from adaattn.backends.device.gluon import GluonASTSource
from adaattn.backends.device.tma import TYPES, descriptor_type
from adaattn.backends.hopper import kernel
from adaattn.backends.hopper.launch import MASK_ALIGNMENT, ROWS, Variant, box_rows
from adaattn.spec import HeadTerm, MaskKind

__all__ = ["boxes", "compile_variant", "shared_layout"]

_POINTERS = ("lse", "row_max", "entropy", "dropped")
_NUMBERS = ("tiles", "flags", "starts_q", "starts_k", "counts", "indices")
_WIDE = ("mask_stride_b", "mask_stride_h", "mask_stride_m", "mask_stride_n")


def compile_variant(variant: Variant) -> Any:
    """Return Triton's compiled kernel for sm_90a; its loading waits for the first launch."""
    constants = _constants(variant)
    source = GluonASTSource(
        kernel.forward,
        signature=_signature(variant, constants),
        constexprs={_place(name): value for name, value in constants.items()},
        attrs=_alignments(variant),
    )
    # Registers at entry: what all warps together may hold before the producer gives its own up.
    most = 168 if variant.tiling.warpgroups == 2 else 128
    options = {"num_warps": 4, "maxnreg": most}
    return compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)


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
    return {
        "NUM_WARPGROUPS": tiling.warpgroups,
        "BLOCK_N": tiling.block_n,
        "BLOCK_D": tiling.block_d,
        "BLOCK_V": tiling.block_v,
        "STAGES_K": tiling.stages_k,
        "STAGES_V": tiling.stages_v,
        "STAGES_Q": tiling.stages_q,
        "STAGES_M": tiling.stages_m,
        "OUT_PARTS": tiling.out_parts,
        "LATE": tiling.late,
        "FIXED": variant.fixed,
        "HAS_TILES": variant.has_tiles,
        "IS_PACKED": variant.is_packed,
        "TO_END": variant.to_end,
        "LIST_RATIO": variant.list_ratio,
        "HAS_LSE": variant.has_lse,
        "HAS_ROW_MAX": variant.has_row_max,
        "HAS_ENTROPY": variant.has_entropy,
        "HAS_RIGHT": variant.has_right,
        "HAS_UNALIGNED_RIGHT": variant.has_unaligned_right,
        "HAS_LEFT": variant.has_left,
        "IS_RAGGED": variant.is_ragged,
        "MAY_HIDE": variant.may_hide,
        "HAS_SOFTCAP": variant.has_softcap,
        "FAST_TANH": variant.has_fast_tanh,
        "HAS_SINKS": variant.has_sinks,
        "HAS_ALIBI": variant.has_alibi,
        "MASK": int(variant.mask),
        "MASK_HAS_ROWS": variant.mask_has_rows,
        "MASK_IS_DENSE": variant.mask_is_dense,
        "MASK_IS_FIRST": variant.mask_is_first,
        "HAS_HEAD_SCALES": variant.by_head(HeadTerm.SCALE),
        "HAS_HEAD_WINDOWS": variant.by_head(HeadTerm.WINDOW),
        "HAS_HEAD_SOFTCAPS": variant.by_head(HeadTerm.SOFTCAP),
        "HAS_DROPPED": variant.has_dropped,
    } | ({} if tiling.stages_m else {"staged": None})


def _place(name: str) -> tuple[int]:
    """Return where an argument stands, as Triton writes it."""
    return (kernel.forward.arg_names.index(name),)


def _alignments(variant: Variant) -> dict[tuple[int], list[list[Any]]]:
    """Return what Triton may take for granted: it then reads two numbers of a mask at once."""
    if not variant.mask_is_aligned:
        return {}
    names = ("mask", "mask_stride_b", "mask_stride_h", "mask_stride_m")
    return {_place(name): [["tt.divisibility", MASK_ALIGNMENT]] for name in names}


def _signature(variant: Variant, constants: dict[str, Any]) -> dict[str, str]:
    """Return Triton's names of all arguments' types."""
    types = dict.fromkeys(kernel.forward.arg_names, "i32")
    for name, box in zip(("query", "key", "value", "out"), boxes(variant), strict=True):
        types[name] = descriptor_type(variant.precision.label, block_shape(variant, box))
    columns = variant.tiling.block_n // (2 if variant.mask is MaskKind.BOOLEAN else 1)
    tile = [1, 1, ROWS, columns]
    types["staged"] = descriptor_type(variant.mask_dtype.replace("i8", "i16"), tile)
    types |= dict.fromkeys(_POINTERS, "*fp32") | dict.fromkeys(_WIDE, "i64")
    types |= dict.fromkeys(_NUMBERS, "*i32") | {"sinks": f"*{variant.sinks_dtype}"}
    types |= {"slopes": f"*{variant.slopes_dtype}", "head_scales": f"*{variant.scales_dtype}"}
    types["head_windows"] = f"*{variant.windows_dtype}"
    types["head_softcaps"] = f"*{variant.softcaps_dtype}"
    types |= {"mask": f"*{variant.mask_dtype}", "scale": "fp32", "cap": "fp32"}
    return types | dict.fromkeys(constants, "constexpr")
