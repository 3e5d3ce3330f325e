"""Random attention problems in families: one of structure, many of sizes.

A kernel is compiled for each combination of features, so these are drawn for a family; lengths,
layouts and numbers are drawn for each problem. Both follow from the seed alone.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from adaattn.spec import Align, AttentionProblem, Aux, HeadTerm, MaskKind, Precision
from adaattn.testing import make_problem

__all__ = ["DTYPES", "Family", "Problem", "all_problems", "draw", "families"]

DTYPES = ("bfloat16", "float16", "float32")

_DIMS = (32, 48, 64, 64, 80, 96, 112, 128, 128, 160, 192, 256)
_WIDE_DIMS = ((264, 264), (320, 320), (512, 512), (512, 512), (576, 512), (1000, 40), (1024, 1024),
              (128, 512), (2048, 2048), (4096, 4096), (8192, 8192))  # fmt: skip
_WIDE_SHARE = 1 / 8
"""D and Dv of one family in eight: one of them at least above 256."""

_ODD_DIMS = (33, 40, 57, 72, 100, 120, 136, 200, 250)
_GROUPS = ((1, 1), (2, 2), (4, 2), (4, 1), (8, 2), (8, 1), (3, 1), (6, 2), (5, 5))
_LAYOUTS = ("dense", "transposed", "packed qkv", "guarded", "guarded transposed", "strided columns")
_LAYOUT_WEIGHTS = (30, 25, 10, 20, 12, 3)
_LISTED_SHARE = 1 / 6
_BY_HEAD_SHARE = 1 / 8
_BLOCK_SIZES = ((128, 128), (128, 128), (128, 64), (256, 128), (64, 64), (16, 48), (33, 20))
_SCORES = {"cpu": 2**20, "cuda": 2**23}
"""Scores of all heads together: what the oracle writes out several times in float64."""

_PRECISIONS = {"bfloat16": Precision.BF16, "float16": Precision.FP16, "float32": Precision.FP32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a kernel may be compiled for.

    Args:
        number: of the family.
        dtype: of q, k and v.
        dim: D.
        dim_v: Dv.
        order: "full", "causal" or "causal bottom right".
        window: "", "left", "right" or "both".
        dilation: only every so many keys are seen.
        softcap: of the scores; 0 is none.
        has_sinks: a logit of each head joins the denominator.
        has_alibi: a bias by distance.
        mask: "", "boolean", "additive" or "wide" (additive, fp32 beside 16 bits).
        mask_dims: which of [B, Hq, Sq, Sk] the mask has in full.
        is_packed: sequences of different lengths behind one another.
        aux: outputs wanted beside the result: of "lse", "row_max", "entropy".
        scale: of the scores; None is 1 / sqrt(D).
        size: standard deviation of q; large ones make rows of nearly one key.
        decodes: few queries on many keys.
        block_size: rows and keys of a block, where blocks are listed; (0, 0) else.
        by_head: which of "scale", "window" and "softcap" each head has its own of.
    """

    number: int
    dtype: str
    dim: int
    dim_v: int
    order: str = "full"
    window: str = ""
    dilation: int = 1
    softcap: float = 0.0
    has_sinks: bool = False
    has_alibi: bool = False
    mask: str = ""
    mask_dims: tuple[bool, bool, bool, bool] = (True, True, True, True)
    is_packed: bool = False
    aux: tuple[str, ...] = ()
    scale: float | None = None
    size: float = 1.0
    decodes: bool = False
    block_size: tuple[int, int] = (0, 0)
    by_head: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem.

    Args:
        index: its number, and the seed of its tensors.
        family: its structure.
        batch: B.
        heads: Hq.
        kv_heads: Hkv.
        len_q: Sq.
        len_k: Sk.
        lengths_q: of packed query sequences.
        lengths_k: of packed key sequences.
        window: keys seen to the left and to the right of a query's position; -1 is all.
        layout: how q, k and v lie in memory; "guarded" is inside a larger tensor of NaN.
        hidden_rows: leading query rows that the mask hides every key from.
        tells_longest: the greatest packed lengths are passed, too.
    """

    index: int
    family: Family
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    window: tuple[int, int] = (-1, -1)
    layout: str = "dense"
    hidden_rows: int = 0
    tells_longest: bool = False

    @property
    def is_causal(self) -> bool:
        """Whether later keys are hidden by the flag; with a mask a window says it."""
        return self.family.order != "full" and not self.family.mask

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The shape of the mask; () is none."""
        full = (self.batch, self.heads, self.len_q, self.len_k)
        pairs = zip(full, self.family.mask_dims, strict=True)
        return tuple(size if kept else 1 for size, kept in pairs) if self.family.mask else ()

    @property
    def mask_kind(self) -> MaskKind:
        """The kind of the mask."""
        named = {"": MaskKind.NONE, "boolean": MaskKind.BOOLEAN}
        return named.get(self.family.mask, MaskKind.ADDITIVE)

    @property
    def align(self) -> Align:
        """Where positions count from."""
        at_end = self.family.order.endswith("bottom right")
        return Align.BOTTOM_RIGHT if at_end else Align.TOP_LEFT

    def spec(self, device: str) -> AttentionProblem:
        """Return the problem as the definition of attention takes it."""
        family = self.family
        values: dict[str, Any] = {"scale": family.scale} if family.scale is not None else {}
        for name in family.by_head:
            values["head_terms"] = values.get("head_terms", HeadTerm.NONE) | HeadTerm[name.upper()]
        if family.block_size[1]:
            values["block_size"] = family.block_size
        if family.mask:
            values["mask_shape"] = self.mask_shape
        if not family.is_packed:
            values |= {"len_q": self.len_q, "len_k": self.len_k}
        aux = Aux.NONE
        for name in family.aux:
            aux |= Aux[name.upper()]
        return make_problem(
            batch=self.batch,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=family.dim,
            value_dim=family.dim_v,
            precision=_PRECISIONS[family.dtype],
            device_type=device,
            lengths_q=self.lengths_q,
            lengths_k=self.lengths_k,
            is_causal=self.is_causal,
            align=self.align,
            window=self.window,
            dilation=family.dilation,
            softcap=family.softcap,
            has_sinks=family.has_sinks,
            has_alibi=family.has_alibi,
            mask=self.mask_kind,
            aux=aux,
            **values,
        )

    def words(self) -> str:
        """Return all that differs from the plainest problem, in one line."""
        plain = Family(number=0, dtype="", dim=0, dim_v=0)
        of_family = {
            name: value
            for name, value in asdict(self.family).items()
            if name not in ("number", "dtype", "dim", "dim_v") and value != getattr(plain, name)
        }
        rest = {
            "lengths_q": self.lengths_q,
            "lengths_k": self.lengths_k,
            "window": self.window if self.window != (-1, -1) else (),
            "hidden_rows": self.hidden_rows,
        }
        dims = f"D{self.family.dim}" + (
            f"/{self.family.dim_v}" if self.family.dim_v != self.family.dim else ""
        )
        parts = [
            f"#{self.index} family {self.family.number} {self.family.dtype} {dims}",
            f"B{self.batch} H{self.heads}/{self.kv_heads} Sq{self.len_q} Sk{self.len_k}",
            self.layout,
            *(f"{name}={value}" for name, value in of_family.items() if name != "window"),
            *(f"{name}={value}" for name, value in rest.items() if value),
        ]
        return " ".join(parts)


def families(count: int, seed: int) -> list[Family]:
    """Return the families of a run."""
    found = [_family(number, random.Random(f"{seed} family {number}")) for number in range(count)]
    return [_by_head(_with_blocks(_wide(family, seed), seed), seed) for family in found]


def _wide(family: Family, seed: int) -> Family:
    """Return the family, one in eight with head dimensions above 256."""
    source = random.Random(f"{seed} wide {family.number}")
    if source.random() >= _WIDE_SHARE:
        return family
    dim, dim_v = source.choice(_WIDE_DIMS)
    return replace(family, dim=dim, dim_v=dim_v)


def _by_head(family: Family, seed: int) -> Family:
    """Return the family, one in eight with numbers of each head."""
    source = random.Random(f"{seed} by head {family.number}")
    if source.random() >= _BY_HEAD_SHARE:
        return family
    names = source.choice((("scale",), ("window",), ("softcap",), ("scale", "window", "softcap")))
    scale = None if "scale" in names else family.scale
    softcap = 0.0 if "softcap" in names else family.softcap
    # With a mask, causal order is said as a window.
    order = "full" if "window" in names and family.mask else family.order
    window = "" if "window" in names else family.window
    return replace(family, by_head=names, scale=scale, softcap=softcap, window=window, order=order)


def _with_blocks(family: Family, seed: int) -> Family:
    """Return the family, one in six of those that are not packed with a list of blocks."""
    source = random.Random(f"{seed} blocks {family.number}")
    if family.is_packed or source.random() >= _LISTED_SHARE:
        return family
    aux = (*family.aux, "dropped_mass") if source.random() < 0.3 else family.aux
    return replace(family, block_size=source.choice(_BLOCK_SIZES), aux=aux)


def _family(number: int, source: random.Random) -> Family:
    """Return a random family; three features in ten are on, so that most are mixes.

    A quarter are plainer, for executors that serve few features.
    """
    if source.random() < 0.25:
        dim = source.choice((64, 128, 256))
        return Family(
            number=number,
            dtype=source.choice(DTYPES),
            dim=dim,
            dim_v=dim,
            order=source.choice(("full", "causal", "causal bottom right")),
            window=source.choice(("", "", "left", "both")),
            aux=source.choice(((), (), ("lse",), ("lse", "row_max", "entropy"))),
            size=source.choice((1.0, 1.0, 8.0)),
            decodes=source.random() < 0.15,
        )
    return _mixed(number, source)


def _mixed(number: int, source: random.Random) -> Family:
    """Return a family of any features."""

    def chance(share: float) -> bool:
        return source.random() < share

    dim = source.choice(_ODD_DIMS) if chance(0.15) else source.choice(_DIMS)
    mask = source.choice(("boolean", "boolean", "additive", "wide")) if chance(0.3) else ""
    dtype = source.choice(DTYPES)
    is_packed = chance(0.2)
    mask_dims = tuple(chance(0.65) for _ in range(4))
    aux = [name for name in ("lse", "row_max", "entropy") if chance(0.6)] if chance(0.4) else []
    return Family(
        number=number,
        dtype=dtype,
        dim=dim,
        dim_v=source.choice(_DIMS) if chance(0.12) else dim,
        order=source.choice(("full", "causal", "causal", "causal bottom right")),
        window=source.choice(("left", "right", "both")) if chance(0.3) else "",
        dilation=source.choice((2, 3, 4, 7)) if chance(0.12) else 1,
        softcap=source.choice((5.0, 30.0, 50.0)) if chance(0.2) else 0.0,
        has_sinks=chance(0.2),
        has_alibi=chance(0.2),
        mask="additive" if mask == "wide" and dtype == "float32" else mask,
        mask_dims=(mask_dims[0], mask_dims[1], mask_dims[2], mask_dims[3]),
        is_packed=is_packed,
        aux=tuple(aux),
        scale=source.choice((0.5, 0.02, -0.2, 0.0)) if chance(0.12) else None,
        size=source.choice((8.0, 16.0)) if chance(0.15) else 1.0,
        decodes=chance(0.15) and not is_packed,
    )


def draw(index: int, family: Family, seed: int, device: str) -> Problem:
    """Return a problem of a family.

    Args:
        index: its number.
        family: its structure.
        seed: of the run.
        device: "cpu" or "cuda", which bounds the sizes.
    """
    source = random.Random(f"{seed} problem {index}")
    heads, kv_heads = source.choice(_GROUPS)
    len_q, len_k = _lengths(family, source)
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    if family.is_packed:
        lengths_q, lengths_k = _packing(source)
        len_q, len_k = sum(lengths_q), sum(lengths_k)
    fits = _SCORES[device] // max(len_q * len_k, 1)
    if heads > max(fits, 1):
        heads = kv_heads = 1
    batch = 1 if family.is_packed else min(source.choice((1, 1, 2, 3)), max(fits // heads, 1))
    layout = source.choices(_LAYOUTS, _LAYOUT_WEIGHTS)[0]
    is_one = heads == kv_heads and len_q == len_k and family.dim == family.dim_v
    drawn = Problem(
        index=index,
        family=family,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        len_q=len_q,
        len_k=len_k,
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        window=_window(family, source, max(len_q, len_k)),
        layout="transposed" if layout == "packed qkv" and not is_one else layout,
        hidden_rows=source.choice((0, 1, len_q // 2, len_q)) if source.random() < 0.3 else 0,
        tells_longest=source.random() < 0.5,
    )
    return drawn if family.mask and family.mask_dims[2] else replace(drawn, hidden_rows=0)


def _length(source: random.Random, longest: int) -> int:
    """Return a length, short ones and those beside multiples of 64 the more likely."""
    if source.random() < 0.3:
        beside = 64 * source.randint(1, max(longest // 64, 1)) + source.choice((-1, 0, 0, 1))
        return max(1, min(beside, longest))
    return max(1, round(math.exp(source.uniform(0.0, math.log(longest)))))


def _lengths(family: Family, source: random.Random) -> tuple[int, int]:
    """Return Sq and Sk, equal half of the time."""
    longest = 2000 if source.random() < 0.06 else 300
    if family.decodes:
        return source.choice((1, 1, 1, 2, 5, 16)), _length(source, 2000)
    len_q = _length(source, longest)
    return len_q, len_q if source.random() < 0.5 else _length(source, longest)


def _packing(source: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return lengths of packed queries and keys, some of them 0; never all."""
    count = source.randint(1, 7)

    def some() -> tuple[int, ...]:
        drawn = [0 if source.random() < 0.15 else _length(source, 200) for _ in range(count)]
        return tuple(drawn) if any(drawn) else (*drawn[:-1], 5)

    lengths_q = some()
    return lengths_q, lengths_q if source.random() < 0.5 else some()


def _window(family: Family, source: random.Random, reach: int) -> tuple[int, int]:
    """Return the window; causal order beside a mask is a right edge of 0."""
    left, right = (source.choice((0, 1, 7, 31, 64, reach // 3, reach)) for _ in range(2))
    left = left if family.window in ("left", "both") else -1
    right = right if family.window in ("right", "both") else -1
    if family.order != "full" and family.mask:
        right = 0
    return left, right


def all_problems(count: int, num_families: int, seed: int, device: str) -> Iterator[Problem]:
    """Yield the problems of a run, families in turn."""
    known = families(num_families, seed)
    for index in range(count):
        yield draw(index, known[index % len(known)], seed, device)
