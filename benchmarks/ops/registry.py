"""The cells of the operator benchmark, as data: adding one is adding a line here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adaattn.spec import AttentionProblem
from adaattn.testing import make_problem

__all__ = ["Cell", "Given", "cells", "selected"]

_TOKENS = 16384
_HIDDEN = 2048
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_DIMS = (64, 128, 256)
_WIDE_HIDDEN, _LEAST_HEADS = 8192, 4
"""Columns of all heads where each has more than 256, and heads there are at least."""

_ODD = 3067
"""Tokens of which 8 is no divisor, as of seven prompts of eight."""

_WIDE = ((512, 512), (576, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192))
"""D and Dv above 256."""

_DOCUMENTS = (1.0, 0.25, 0.75, 0.125, 0.875, 0.5)
"""Lengths of packed documents in turn, as shares of the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What is asked of attention beside its sizes.

    Args:
        is_causal: from the top left.
        window: keys seen before the query's own; 0 is all.
        dilation: only every so many keys are seen.
        softcap: of the scores; 0 is none.
        has_sinks: a logit of each head joins the denominator.
        has_alibi: ALiBi's usual slopes.
        mask: "", "boolean" ([1, 1, Sq, Sk], 70 % kept), "additive" ([1, H, Sq, Sk]), or a boolean
            mask that is a pattern: "padded" ([B, 1, Sq, Sk], causal order behind padding on the
            left) or "documents" ([1, 1, Sq, Sk], causal order in documents).
        longest: of the packed documents; 0 is not packed.
        listed: percent of the blocks of 128 x 128 that each head's list keeps, its own for each
            row of blocks; 0 is no list.
        has_entropy: the row entropy is asked for, which nobody else gives.
    """

    is_causal: bool = False
    window: int = 0
    dilation: int = 1
    softcap: float = 0.0
    has_sinks: bool = False
    has_alibi: bool = False
    mask: str = ""
    longest: int = 0
    listed: int = 0
    has_entropy: bool = False

    @property
    def sdpa_lacks(self) -> str:
        """What ``F.scaled_dot_product_attention`` cannot be told, not even by a mask; or ""."""
        return "softcap" * (self.softcap > 0) or "sinks" * self.has_sinks

    @property
    def is_for_flex(self) -> bool:
        """Whether users of FlexAttention would write it so."""
        special = (self.window, self.softcap, self.has_sinks, self.has_alibi, self.longest)
        return any(special) or self.dilation > 1 or self.listed > 0

    @property
    def sdpa_needs_mask(self) -> bool:
        """Whether PyTorch's function is given a mask that is made before."""
        hides = self.window or self.longest or self.dilation > 1 or self.has_alibi or self.listed
        return bool(hides or self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One comparison.

    Args:
        name: shown in the table; ``--only`` selects by it.
        kind: the class of cells that it belongs to.
        shape: (B, Hq, Hkv, Sq, Sk, D).
        value_dim: Dv; 0 is D.
        dtype: of q, k and v.
        backward: time the backward pass too, sums in a fixed order as well.
        is_alone: time it alone.
        given: what is asked beside the sizes.
        with_naive: compare with attention written out, too, and with PyTorch's own math.
    """

    name: str
    kind: str
    shape: tuple[int, int, int, int, int, int]
    value_dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    backward: bool = False
    is_alone: bool = False
    given: Given = Given()
    with_naive: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the packed documents; () is not packed."""
        if not self.given.longest:
            return ()
        found: list[int] = []
        while (left := self.shape[3] - sum(found)) > 0:
            share = _DOCUMENTS[len(found) % len(_DOCUMENTS)]
            found.append(min(left, int(share * self.given.longest)))
        return tuple(found)

    @property
    def dim_v(self) -> int:
        """Columns of a value."""
        return self.value_dim or self.shape[5]

    @property
    def visible_pairs(self) -> float:
        """(query, key) pairs per head and batch that positions leave; tensors hide nothing here."""
        _, _, _, len_q, len_k, _ = self.shape
        if self.lengths:
            return float(
                sum(n * (n + 1) // 2 if self.given.is_causal else n * n for n in self.lengths)
            )
        share = self.given.listed / 100 if self.given.listed else 1.0
        return self._positions(len_q, len_k).visible_pairs * share

    def _positions(self, len_q: int, len_k: int) -> AttentionProblem:
        return make_problem(
            len_q=len_q,
            len_k=len_k,
            is_causal=self.given.is_causal,
            window=(self.given.window or -1, -1),
            dilation=self.given.dilation,
        )

    @property
    def flops(self) -> float:
        """Of one call: 2 pairs (D + Dv) for each head; 2.5 times that for the backward pass."""
        batch, heads, _, _, _, dim = self.shape
        forward = 2 * batch * heads * self.visible_pairs * (dim + self.dim_v)
        return forward * ((not self.is_alone) + 2.5 * self.backward)

    @property
    def bytes_moved(self) -> float:
        """Of one call: q, k, v, the output and a mask that is given, each once; forward only."""
        batch, heads, kv_heads, len_q, len_k, dim = self.shape
        elements = batch * (heads * len_q + kv_heads * len_k) * (dim + self.dim_v)
        planes = {"": 0, "additive": 2 * heads, "padded": batch}.get(self.given.mask, 1)
        return float(elements * self.dtype.itemsize + planes * len_q * len_k)


def selected(found: Iterator[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Return the cells whose names have every word of one of the patterns, and none after a "-"."""

    def fits(name: str, text: str) -> bool:
        words = text.split()
        return all((word[1:] not in name) if word[0] == "-" else word in name for word in words)

    return [cell for cell in found if any(fits(cell.name, text) for text in patterns)]


def cells(device: str) -> Iterator[Cell]:
    """Yield the cells that suit a device."""
    if device == "cpu":
        yield from _cpu_cells()
        return
    yield from _dense()
    yield from _special()
    yield from _masked()
    yield from _listed()
    yield from _entropy()
    yield from _other_sizes()
    yield from _decode()
    yield from _grid()
    yield from _training()
    yield from _backward()
    yield from _wide()
    yield from _small()


def _square(kind: str, dim: int, length: int, given: Given, *, group: int = 1, **more: Any) -> Cell:
    """Return a cell of square self-attention with as many tokens and columns as the others."""
    heads = _HIDDEN // dim
    shape = (max(1, _TOKENS // length), heads, heads // group, length, length, dim)
    order = "causal" if given.is_causal else "full"
    name = f"{kind} D{dim} S{length} {order}"
    return Cell(name=name, kind=kind, shape=shape, given=given, **more)


def _dense() -> Iterator[Cell]:
    for dim in _DIMS:
        for length in (*_LENGTHS, *([131072] if dim == 128 else [])):
            for is_causal in (False, True):
                given = Given(is_causal=is_causal)
                yield _square("dense", dim, length, given, with_naive=length == 4096)


def _special() -> Iterator[Cell]:
    kinds = {
        "window 1024": Given(is_causal=True, window=1024),
        "ALiBi": Given(is_causal=True, has_alibi=True),
        "dilation 4": Given(is_causal=True, dilation=4),
        "softcap 30": Given(is_causal=True, softcap=30.0),
        "sinks": Given(is_causal=True, has_sinks=True),
    }
    for kind, given in kinds.items():
        for dim in _DIMS:
            longer = [131072] if dim == 128 and given.window else []
            for length in (*_LENGTHS, *longer):
                naive = bool(given.sdpa_lacks) and length <= 8192
                yield _square(kind, dim, length, given, with_naive=naive)
    for dim in _DIMS:
        for longest in (512, 1024, 2048, 4096, 8192):
            yield _packed(dim, longest)


def _packed(dim: int, longest: int) -> Cell:
    """Return a cell of packed documents in causal order."""
    heads, tokens = _HIDDEN // dim, max(_TOKENS, longest)
    return Cell(
        name=f"packed T{tokens} D{dim} S{longest} causal",
        kind="packed",
        shape=(1, heads, heads, tokens, tokens, dim),
        given=Given(is_causal=True, longest=longest),
    )


def _masked() -> Iterator[Cell]:
    kinds = {
        "boolean mask": "boolean",
        "additive bias": "additive",
        "mask of padding": "padded",
        "mask of documents": "documents",
    }
    for kind, mask in kinds.items():
        for dim in _DIMS:
            for length in _LENGTHS[:5]:
                yield _square(kind, dim, length, Given(mask=mask))
            if mask == "additive":
                continue
            for length in (2048, 8192):
                cell = _square(kind, dim, length, Given(mask=mask), backward=True)
                yield replace(cell, name=f"{cell.name} backward", kind=f"{kind}, training")


def _listed() -> Iterator[Cell]:
    for listed in (50, 25, 10, 5):
        for length in (16384, 65536):
            yield _square(f"list {listed} %", 128, length, Given(listed=listed))


def _entropy() -> Iterator[Cell]:
    for dim in _DIMS:
        for length in (2048, 16384):
            for is_causal in (False, True):
                yield _square("entropy", dim, length, Given(is_causal=is_causal, has_entropy=True))


def _other_sizes() -> Iterator[Cell]:
    for is_causal in (False, True):
        given = Given(is_causal=is_causal)
        order = "causal" if is_causal else "full"
        for length in _LENGTHS:
            yield Cell(
                name=f"GQA 32/8 D128 S{length} {order}",
                kind="GQA 32/8",
                shape=(max(1, _TOKENS // length), 32, 8, length, length, 128),
                given=given,
            )
        for dim in _DIMS:
            for length in _LENGTHS[:5]:
                yield _square("fp32", dim, length, given, dtype=torch.float32)
        for dim in (80, 96, 192):
            for length in (1024, 4096, 16384):
                yield _square("odd head", dim, length, given)
        for length in (1024, 4096, 16384):
            cell = _square("odd head", 192, length, given, value_dim=128)
            yield replace(cell, name=cell.name.replace("D192", "D192/128"))


def _decode() -> Iterator[Cell]:
    for batch, length in ((1, 32768), (1, 131072), (16, 8192), (64, 8192), (32, 32768)):
        yield Cell(
            name=f"decode B{batch} 32/8 D128 S{length}",
            kind="decode",
            shape=(batch, 32, 8, 1, length, 128),
        )


def _grid() -> Iterator[Cell]:
    for hidden in (768, 1024, 2048, 4096):
        for batch in (1, 4, 8, 16):
            for length in (512, 1024, 2048, 4096):
                heads = hidden // 64
                yield Cell(
                    name=f"grid B{batch} S{length} E{hidden}",
                    kind="grid",
                    shape=(batch, heads, heads, length, length, 64),
                    with_naive=True,
                )


def _training() -> Iterator[Cell]:
    for dim in _DIMS:
        for length in (512, 2048, 16384):
            for is_causal in (False, True):
                cell = _square("dense", dim, length, Given(is_causal=is_causal), backward=True)
                yield replace(cell, name=f"{cell.name} backward", kind="dense, training")
    kinds: dict[str, dict[str, Any]] = {
        "window 1024": {"window": 1024},
        "ALiBi": {"has_alibi": True},
        "softcap 30": {"softcap": 30.0},
        "sinks": {"has_sinks": True},
    }
    for kind, words in kinds.items():
        for dim in _DIMS:
            given = Given(is_causal=True, **words)
            naive = bool(given.sdpa_lacks)  # whose gradients have no memory over 16K tokens
            for length in (2048, 4096) if naive else (2048, 4096, 16384):
                cell = _square(kind, dim, length, given, backward=True, with_naive=naive)
                yield replace(cell, name=f"{cell.name} backward", kind=f"{kind}, training")
    for dim in _DIMS[:2]:
        for length in (1024, 2048):
            given = Given(is_causal=True)
            cell = _square("fp32", dim, length, given, backward=True, dtype=torch.float32)
            yield replace(cell, name=f"{cell.name} backward", kind="fp32, training")
    for dim in _DIMS:
        for longest in (1024, 4096):
            cell = _packed(dim, longest)
            cell = replace(cell, name=f"{cell.name} backward", kind="packed, training")
            yield replace(cell, backward=True)


def _backward() -> Iterator[Cell]:
    for dim in _DIMS:
        for length in _LENGTHS:
            causal = Given(is_causal=True)
            kinds = {
                "full": _square("", dim, length, Given()),
                "causal": _square("", dim, length, causal),
                "groups of 4": _square("", dim, length, causal, group=4),
                "window": _square("", dim, length, Given(is_causal=True, window=length // 8)),
                "packed": _packed(dim, length),
            }
            if length <= _LENGTHS[4]:
                kinds["mask"] = _square("", dim, length, Given(mask="boolean"))
            for kind, cell in kinds.items():
                name = f"alone D{dim} S{length} {kind}"
                yield replace(cell, name=name, kind=f"alone, {kind}", backward=True, is_alone=True)


def _wide() -> Iterator[Cell]:
    for dim, value_dim in _WIDE:
        heads = max(_WIDE_HIDDEN // dim, _LEAST_HEADS)
        dims = f"D{dim}" if dim == value_dim else f"D{dim}/{value_dim}"
        for length in (2048, _ODD, 4096, 8192, 16384):
            for is_causal in (False, True):
                cell = Cell(
                    name=f"wide {dims} S{length} {'causal' if is_causal else 'full'}",
                    kind="wide",
                    shape=(1, heads, heads, length, length, dim),
                    value_dim=value_dim,
                    given=Given(is_causal=is_causal),
                )
                yield cell
                if length in (2048, _ODD, 8192):
                    training = replace(cell, backward=True, kind="wide, training")
                    yield replace(training, name=f"{cell.name} backward")


def _small() -> Iterator[Cell]:
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for dim in (512, 2048, 4096, 8192):
            for length in (16, 64):
                yield Cell(
                    name=f"small B1 H4 D{dim} S{length} {name}",
                    kind="small",
                    shape=(1, 4, 4, length, length, dim),
                    dtype=dtype,
                    with_naive=True,
                )


def _cpu_cells() -> Iterator[Cell]:
    fp32 = torch.float32
    for dim, length in ((64, 512), (64, 2048), (128, 1024), (128, 2048)):
        for causal in (False, True):
            yield Cell(
                name=f"dense D{dim} S{length} {'causal' if causal else 'full'}",
                kind="dense",
                shape=(1, 8, 8, length, length, dim),
                dtype=fp32,
                given=Given(is_causal=causal),
            )
    yield Cell(
        name="dense D64 S1024 causal backward",
        kind="dense, training",
        shape=(1, 8, 8, 1024, 1024, 64),
        dtype=fp32,
        given=Given(is_causal=True),
        backward=True,
    )
    yield Cell(
        name="GQA 9/3 D64 S2048 causal",
        kind="GQA 9/3",
        shape=(1, 9, 3, 2048, 2048, 64),
        dtype=fp32,
        given=Given(is_causal=True),
    )
    for heads, kv_heads, dim in ((32, 4, 128), (32, 8, 128), (9, 3, 64)):
        yield Cell(
            name=f"decode B1 {heads}/{kv_heads} D{dim} S8192",
            kind="decode",
            shape=(1, heads, kv_heads, 1, 8192, dim),
            dtype=fp32,
        )
    yield Cell(
        name="window 256, causal, S4096 D64",
        kind="window 256",
        shape=(1, 8, 8, 4096, 4096, 64),
        dtype=fp32,
        given=Given(is_causal=True, window=256),
    )
