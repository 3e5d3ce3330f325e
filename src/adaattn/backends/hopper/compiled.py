"""Kernels compiled from their variants, with or without a GPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import torch
from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adaattn.backends.hopper import kernel
from adaattn.backends.hopper._gluon import GluonASTSource
from adaattn.backends.hopper.launch import MASK_ALIGNMENT, ROWS, Variant, box_rows
from adaattn.backends.hopper.views import View
from adaattn.spec import HeadTerm, MaskKind

__all__ = ["Launcher", "boxes", "compile_variant", "descriptor_type", "shared_layout"]

_MOST_KEPT: Final = 2048
"""Descriptions of tensors that a kernel keeps, of half a KiB each: of all layouts together."""

_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "i16": gl.int16}
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


class Launcher:
    """Launches a compiled kernel on the current device with what it takes when it runs.

    Triton's own launch describes tensors for TMA anew at each call, and is handed every constant.

    Args:
        built: Triton's compiled kernel. Nobody else may launch it.
    """

    def __init__(self, built: Any) -> None:
        self._metas = tuple(built.metadata.tensordesc_meta or ())
        # Triton makes the launch of these two: for it descriptors are ready, and constants gone.
        built.src = SimpleNamespace(
            constants={}, signature=dict(enumerate(_launched_types(built.src.signature.values())))
        )
        built.metadata = built.metadata._replace(tensordesc_meta=None)
        built._init_handles()
        self._run = built.run
        self._given = (built.function, built.packed_metadata, None, None, None)
        self._places = count()
        self._known: dict[tuple[int, int], list[Any]] = {}

    def bind(self, views: Sequence[View]) -> Callable[..., None]:
        """Return the launch for tensors that lie in some way.

        It takes the number of blocks, the stream, the tensors that TMA copies, which are the
        kernel's first arguments, and the other arguments in order, addresses as numbers.

        Args:
            views: of those tensors: shape and strides.
        """
        run, given, known = self._run, self._given, self._known
        both = zip(views, self._metas, strict=True)
        places = [(next(self._places), view, meta) for view, meta in both]

        def launch(
            num_blocks: int, stream: int, copied: Sequence[torch.Tensor], *others: Any
        ) -> None:
            described: list[Any] = []
            for (place, view, meta), tensor in zip(places, copied, strict=True):
                at = place, tensor.data_ptr()
                found = known.get(at)
                if found is None:
                    if len(known) >= _MOST_KEPT:
                        known.clear()
                    found = known[at] = make_tensordesc_arg(_described(tensor, view), meta)
                described += found
            run(num_blocks, 1, 1, stream, *given, *described, *others)

        return launch


def _launched_types(types: Iterable[str]) -> Iterator[str]:
    """Yield Triton's names of the types that a launch hands over, addresses as numbers."""
    for name in types:
        if name.startswith("tensordesc"):
            rank = name.split("]")[0].count(",") + 1
            yield from ("nvTmaDesc", *["i32"] * rank, *["i64"] * rank)
        elif name != "constexpr":
            yield "i64" if name.startswith("*") else name


def _described(tensor: torch.Tensor, view: View) -> Any:
    """Return a tensor as Triton has it described for TMA, unchecked: the caller has checked."""
    made = object.__new__(TensorDescriptor)
    made.shape, made.strides = view
    made.base = tensor
    return made


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
        block_shape(variant, box), _TYPES[variant.precision.label]
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


def descriptor_type(dtype: str, tile: list[int]) -> str:
    """Return Triton's name of the type of a tensor that TMA copies in such tiles."""
    layout = gl.NVMMASharedLayout.get_default_for(tile, _TYPES[dtype])
    return f"tensordesc<{dtype}[{','.join(map(str, tile))}],{layout!r}>"
