"""What the default problems of `adaattn.tune` are made of: classes, and the sizes of each.

Every list begins with what calls most often are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from adaattn.spec import Aux, MaskKind, Precision

__all__ = [
    "BLOCK",
    "CLASSES",
    "COMPILED",
    "DOCUMENTS",
    "GRIDS",
    "LISTED",
    "MASKED",
    "Grid",
    "Lists",
    "Part",
    "Values",
]

BLOCK: Final = 128
"""Rows and keys of a listed block."""

DOCUMENTS: Final = 4
"""Packed sequences of a problem, of equal lengths."""

_PACKED: Final = {"is_causal": True, "num_sequences": DOCUMENTS, "packed_square": True}

CLASSES: Final[dict[str, dict[str, Any]]] = {
    "causal": {"is_causal": True},
    "full": {},
    "narrow window": {"is_causal": True, "window": 8},
    "mask of keys": {"mask": MaskKind.BOOLEAN},
    "wide window": {"is_causal": True, "window": 2},
    "mask": {"mask": MaskKind.BOOLEAN},
    "alibi": {"is_causal": True, "has_alibi": True},
    "softcap": {"is_causal": True, "softcap": 30.0},
    "sinks": {"is_causal": True, "has_sinks": True},
    "dilation": {"is_causal": True, "dilation": 4},
    "packed": _PACKED,
    "blocks": {"is_causal": True, "listed": 8},
    "bias": {"mask": MaskKind.ADDITIVE},
    "unaligned mask": {"mask": MaskKind.BOOLEAN},
    "unaligned bias": {"mask": MaskKind.ADDITIVE},
    "bias of keys": {"mask": MaskKind.ADDITIVE},
    "thinner window": {"is_causal": True, "window": 128},
    "thinnest window": {"is_causal": True, "window": 512},
    "window both ways": {"window": 8},
    "thin window": {"is_causal": True, "window": 32},
    "thin window both ways": {"window": 32},
    "wide window both ways": {"window": 2},
    "few blocks": {"is_causal": True, "listed": 32},
    "all blocks": {"listed": 1},
    "statistics": {"is_causal": True, "aux": Aux.ENTROPY},
    "full statistics": {"aux": Aux.ENTROPY},
    "thinner window both ways": {"window": 128},
    "thinnest window both ways": {"window": 512},
    "window with sinks": {"is_causal": True, "window": 8, "has_sinks": True},
    "window with a softcap": {"is_causal": True, "window": 8, "softcap": 30.0},
    "packed window": _PACKED | {"window": 8},
    "packed window with a softcap": _PACKED | {"window": 8, "softcap": 30.0},
}
"""Fields of each class; a window, and the listed blocks, are a share of the length."""

MASKED: Final = tuple(name for name in CLASSES if "window" in name or name == "packed")
LISTED: Final = ("blocks", "few blocks", "all blocks")
COMPILED: Final = (
    *("narrow window", "window both ways", "packed", "alibi", "softcap"),
    *("blocks", "all blocks"),
)
_FEATURES: Final = ("alibi", "softcap", "sinks", "dilation", "mask of keys", "mask", "bias")
_TRAINED: Final = ("causal", "full", *MASKED, *_FEATURES)

Values = tuple[Precision, int | tuple[int, int], tuple[int, int], int, int, int]
"""A dtype, D or D and Dv, (B, Hq), query heads for a key head, Sq and Sk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """What is crossed.

    Args:
        precisions: of q, k and v.
        head_dims: D, or D and Dv.
        sizes: B and Hq.
        groups: query heads for a key head.
        lengths: Sk.
        rows: Sq; as many as keys where empty, and never as many where not.
    """

    precisions: tuple[Precision, ...]
    head_dims: tuple[int | tuple[int, int], ...]
    sizes: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[tuple[float, Values]]:
        """Yield every choice with the sum of the places of its values."""
        for (a, precision), (b, dims), (c, size), (d, group), (e, rows), (f, length) in product(
            enumerate(self.precisions),
            enumerate(self.head_dims),
            enumerate(self.sizes),
            enumerate(self.groups),
            enumerate(self.rows or (0,)),
            enumerate(self.lengths),
        ):
            if rows != length:
                place = a + b + c + d + e + f
                yield place, (precision, dims, size, group, rows or length, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some classes over some lists.

    Args:
        names: of the classes.
        lists: that are crossed for each of them.
    """

    names: tuple[str, ...]
    lists: Lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The lists of one kind of device.

    Args:
        square: of prefill.
        masked: of what is a mask to SDPA, windows and packed sequences, in training too.
        training: of the rest where gradients are wanted.
        statistics: of prefill with the entropy of rows, which few executors know.
        unaligned: of masks whose rows begin at no multiples of 16 bytes.
        seldom: what else is measured, with gradients too where its class has them: few tokens,
            head dimensions above 256, queries of one sequence and keys of another.
        at_end: of rows at the end of longer keys: a single query, and some that come together.
        trained: classes of ``training``, and of ``masked``, with gradients.
        deterministic: classes of ``training`` with gradients that are the same each time, in 16
            bits: there are kernels that add them up in no fixed order.
        omitted: classes that are left out: one executor alone serves them.
        compiled_lengths: of the problems that executors which compile take part in.
        longest_bias: tokens up to which there is a bias, which is a matrix for each head.
    """

    square: Lists
    masked: Lists
    training: Lists
    statistics: Lists | None = None
    unaligned: Lists | None = None
    seldom: tuple[Part, ...] = ()
    at_end: tuple[Part, ...] = ()
    trained: tuple[str, ...] = _TRAINED
    deterministic: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    compiled_lengths: tuple[int, ...] = ()
    longest_bias: int = 2048


_CPU: Final = Lists(
    precisions=(Precision.FP32, Precision.BF16),
    head_dims=(64, 128),
    sizes=((1, 8),),
    groups=(1, 4),
    lengths=(512, 2048, 128, 1024, 4096),
)
_CUDA: Final = Lists(
    precisions=(Precision.BF16, Precision.FP32),
    head_dims=(128, 64, 256, 512),
    sizes=((1, 32), (4, 32)),
    groups=(1, 4),
    lengths=(2048, 512, 8192, 128, 4096, 16384),
)
_CUDA_FUSED: Final = replace(_CUDA, head_dims=(128, 64, 256))
_CUDA_CHUNKS: Final = replace(
    _CUDA_FUSED, rows=(16, 256, 64, 1024, 4), lengths=(8192, 2048, 32768, 512)
)

_DECODED: Final = ("causal", "mask of keys", "bias of keys")
_SHORT: Final = (
    *("causal", "full", "mask of keys", "bias of keys", "mask", "bias"),
    *("alibi", "softcap", "sinks", "dilation"),
)
_SEVERAL: Final = ("causal", "mask")
_SEVERAL_FEATURES: Final = (
    *("softcap", "sinks", "alibi"),
    *("window with sinks", "window with a softcap"),
)
_CROSS: Final = ("full", "mask of keys")
_WIDE: Final = ("causal", "full")
_WIDE_FEATURES: Final = ("softcap", "sinks", "alibi", "narrow window", "mask", "bias")
_THIN: Final = ("thin window", "thinner window", "thinnest window")
_DECODED_FEATURES: Final = (*_SEVERAL_FEATURES, "narrow window", "wide window", *_THIN)

GRIDS: Final = {
    "cpu": Grid(
        square=_CPU,
        masked=replace(_CPU, lengths=(2048, 1024, 4096)),
        training=replace(_CPU, lengths=(512, 2048, 1024)),
        at_end=(
            Part(
                names=_DECODED,
                lists=replace(
                    _CPU,
                    sizes=((1, 8), (4, 32)),
                    groups=(4, 8, 1),
                    rows=(1,),
                    lengths=(2048, 8192, 512, 1024, 4096, 16384),
                ),
            ),
        ),
        trained=("causal", "full", *MASKED),
        omitted=(
            "sinks",
            "dilation",
            "window both ways",
            "thin window",
            "thin window both ways",
            "wide window both ways",
            "thinner window both ways",
            "thinnest window both ways",
            "window with sinks",
            "window with a softcap",
            "packed window",
            "packed window with a softcap",
        ),
    ),
    "cuda": Grid(
        square=_CUDA,
        masked=replace(
            _CUDA_FUSED,
            sizes=((1, 32), (1, 4)),
            lengths=(2048, 512, 8192, 128, 32768, 32, 4),
        ),
        training=replace(_CUDA, lengths=(2048, 512, 8192, 1024, 128)),
        statistics=replace(_CUDA, head_dims=(128,), sizes=((1, 32),)),
        unaligned=replace(
            _CUDA_FUSED,
            precisions=(Precision.BF16,),
            lengths=(2044, 508, 8188, 124, 4092),
        ),
        seldom=(
            Part(
                names=_SHORT,
                lists=replace(_CUDA_FUSED, sizes=((1, 32), (1, 4), (4, 32)), lengths=(32, 4, 12)),
            ),
            Part(
                names=_SHORT,
                lists=replace(
                    _CUDA,
                    head_dims=(512,),
                    sizes=((1, 32), (1, 4)),
                    groups=(4,),
                    lengths=(32, 4),
                ),
            ),
            Part(
                names=_CROSS,
                lists=replace(_CUDA_FUSED, rows=(1024, 4096, 256), lengths=(64, 1024, 256, 4096)),
            ),
            Part(
                names=_WIDE,
                lists=replace(
                    _CUDA,
                    head_dims=((576, 512), 1024),
                    sizes=((1, 16),),
                    lengths=(2048, 8192, 512),
                ),
            ),
            Part(
                names=_WIDE,
                lists=replace(
                    _CUDA,
                    head_dims=(2048, 4096, 8192, 512),
                    sizes=((1, 4),),
                    groups=(1,),
                    lengths=(2048, 64, 8192, 16, 512, 128),
                ),
            ),
            Part(
                names=_WIDE_FEATURES,
                lists=replace(
                    _CUDA,
                    precisions=(Precision.BF16,),
                    head_dims=(512, 2048),
                    sizes=((1, 8),),
                    groups=(1,),
                    lengths=(2048, 8192, 512),
                ),
            ),
        ),
        at_end=(
            Part(
                names=_DECODED,
                lists=replace(
                    _CUDA,
                    groups=(4, 8, 1),
                    rows=(1,),
                    lengths=(8192, 2048, 512, 1024, 4096, 16384),
                ),
            ),
            Part(
                names=_DECODED_FEATURES,
                lists=replace(
                    _CUDA_FUSED, groups=(8, 1), rows=(1,), lengths=(2048, 8192, 512, 32768, 128)
                ),
            ),
            Part(names=_SEVERAL, lists=_CUDA_CHUNKS),
            Part(
                names=("narrow window", *_THIN),
                lists=replace(_CUDA_CHUNKS, sizes=((1, 32),)),
            ),
            Part(
                names=_SEVERAL_FEATURES,
                lists=replace(_CUDA_FUSED, rows=(16, 64, 4, 256), lengths=(8192, 2048, 512, 128)),
            ),
        ),
        deterministic=("causal", "full"),
        compiled_lengths=(2048, 512, 8192, 32768),
        longest_bias=8192,
    ),
}
