"""Seeded random tensors for a problem: masks, slopes, sinks, packed lengths, layouts.

Numbers are drawn in float64 on the CPU and then rounded, so that one seed gives the same
tensors, up to rounding, for every dtype and device.
"""

import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from adaattn._dtypes import torch_dtype
from adaattn.backends.block_list import ALL_BLOCKS, BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import Tensors
from adaattn.backends.sampling import BLOCK_SIZE
from adaattn.errors import ArgumentError
from adaattn.spec import (
    AttentionProblem,
    BlockSparse,
    HeadTerm,
    LowRank,
    MaskKind,
    MethodErrors,
    Precision,
)

__all__ = [
    "FLOATING",
    "Layout",
    "cast_tensors",
    "make_errors",
    "make_problem",
    "make_tensors",
    "with_tensors",
]

_HEAD_TERMS = ("head_scale", "head_window", "head_softcap")
FLOATING = ("query", "key", "value", "mask", "sinks", "alibi_slopes", *_HEAD_TERMS[::2])
"""Those of a call's tensors that may hold floating-point numbers."""

_HIDDEN_SHARE = 0.3
_LISTED_SHARE = 0.5
_DENSE_SHARE = 0.1


class Layout(enum.Enum):
    """How q, k and v lie in memory."""

    CONTIGUOUS = enum.auto()
    TRANSPOSED = enum.auto()
    STRIDED = enum.auto()


def make_problem(
    *, lengths_q: Sequence[int] = (), lengths_k: Sequence[int] = (), **values: Any
) -> AttentionProblem:
    """Return a small problem, with every value that follows from the others filled in.

    Args:
        lengths_q: tokens of each packed query sequence; empty when not packed.
        lengths_k: the same for keys; empty means those of the queries.
        **values: fields of `AttentionProblem`; an unknown one raises TypeError.

    Example:
        >>> problem = make_problem(len_q=3, len_k=5, num_heads=4, num_kv_heads=2)
        >>> problem.scale, problem.group_size
        (0.25, 2)
    """
    filled: dict[str, Any] = {"batch": 1, "num_heads": 2, "len_q": 8, "head_dim": 16} | values
    if lengths_q:
        lengths_k = lengths_k or lengths_q
        filled |= {
            "num_sequences": len(lengths_q),
            "len_q": sum(lengths_q),
            "len_k": sum(lengths_k),
            "max_len_q": max(lengths_q),
            "max_len_k": max(lengths_k),
            "packed_square": tuple(lengths_q) == tuple(lengths_k),
        }
    filled.setdefault("num_kv_heads", filled["num_heads"])
    filled.setdefault("len_k", filled["len_q"])
    filled.setdefault("value_dim", filled["head_dim"])
    own_scales = filled.get("head_terms", HeadTerm.NONE) & HeadTerm.SCALE
    filled.setdefault("scale", 1.0 if own_scales else 1.0 / math.sqrt(max(filled["head_dim"], 1)))
    if filled.get("mask", MaskKind.NONE) is not MaskKind.NONE:
        names = ("batch", "num_heads", "len_q", "len_k")
        filled.setdefault("mask_shape", tuple(filled[name] for name in names))
    if "block_size" in filled:
        filled.setdefault("most_blocks", -(-filled["len_k"] // filled["block_size"][1]))
    return AttentionProblem(**filled)


def make_tensors(
    problem: AttentionProblem,
    *,
    seed: int = 0,
    lengths_q: Sequence[int] = (),
    lengths_k: Sequence[int] = (),
    layout: Layout = Layout.CONTIGUOUS,
    num_hidden_rows: int = 0,
    step: float = 0.0,
) -> Tensors:
    """Return random tensors that fit the problem, on its device, with gradients where it says.

    Args:
        problem: what they are for.
        seed: equal seeds give equal tensors.
        lengths_q: tokens of each packed query sequence; empty when not packed.
        lengths_k: the same for keys; empty means those of the queries.
        layout: how q, k and v lie in memory.
        num_hidden_rows: leading query rows that the mask hides every key from.
        step: q, k and v are multiples of it: with 1/8 their products in fp32 have no rounding,
            whatever the order of sums; 0 leaves them as drawn.

    Raises:
        ArgumentError: the lengths do not fit the problem.
    """
    draw = _Draw(problem, seed, step)
    heads_q, heads_k = problem.num_heads, problem.num_kv_heads
    bounds_q, bounds_k = _bounds(problem, lengths_q, lengths_k)
    wide = torch.float64 if problem.precision is Precision.FP64 else torch.float32
    device = problem.device_type
    return Tensors.of(
        draw.heads(heads_q, problem.len_q, problem.head_dim, layout),
        draw.heads(heads_k, problem.len_k, problem.head_dim, layout),
        draw.heads(heads_k, problem.len_k, problem.value_dim, layout),
        cu_seqlens_q=_int32(bounds_q, device),
        cu_seqlens_k=_int32(bounds_k, device),
        bounds_q=bounds_q,
        bounds_k=bounds_k,
        mask=draw.mask(num_hidden_rows),
        sinks=draw.leaf(torch.randn, heads_q, grad=problem.sinks_require_grad)
        if problem.has_sinks
        else None,
        alibi_slopes=draw.leaf(torch.rand, 1, heads_q, grad=problem.alibi_requires_grad, dtype=wide)
        if problem.has_alibi
        else None,
        blocks=draw.blocks() if problem.has_blocks else None,
        head_terms=draw.head_terms() if problem.head_terms else None,
    )


class _Draw:
    """One seeded source of tensors for a problem."""

    def __init__(self, problem: AttentionProblem, seed: int, step: float) -> None:
        self.problem = problem
        self.step = step
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch_dtype(problem.precision)

    def leaf(
        self, source: Any, *shape: int, grad: bool, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return random numbers of a shape from ``torch.randn`` or ``torch.rand``."""
        numbers = source(*shape, generator=self.generator, dtype=torch.float64)
        placed: torch.Tensor = numbers.to(self.problem.device_type, dtype or self.dtype)
        return placed.requires_grad_(grad)

    def heads(self, num_heads: int, length: int, dim: int, layout: Layout) -> torch.Tensor:
        """Return [B, H, S, D] in a memory layout."""
        shape = (self.problem.batch, num_heads, length, dim)
        dense = self.leaf(torch.randn, *shape, grad=False)
        if self.step:
            dense = (dense / self.step).round() * self.step
        if layout is Layout.TRANSPOSED:
            dense = dense.transpose(1, 2).contiguous().transpose(1, 2)
        if layout is Layout.STRIDED:
            wide = dense.new_zeros(*shape[:-1], 2 * dim)
            wide[..., ::2] = dense
            dense = wide[..., ::2]
        return dense.requires_grad_(self.problem.requires_grad)

    def blocks(self) -> BlockList:
        """Return lists of each head with room for all blocks: some, none, or all as a dense head.

        About half of the blocks are listed.
        """
        problem = self.problem
        rows, keys = problem.block_size
        num_rows, num_keys = -(-problem.len_q // rows), -(-problem.len_k // keys)
        shape = (problem.batch, problem.num_heads, num_rows)
        listed = torch.rand(*shape, num_keys, generator=self.generator) < _LISTED_SHARE
        order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        all_of_them = torch.rand(shape, generator=self.generator) < _DENSE_SHARE
        room = order[..., : problem.most_blocks].to(torch.int32)
        counts = torch.where(all_of_them, ALL_BLOCKS, listed.sum(-1).clamp(max=room.shape[-1]))
        return BlockList(
            counts=counts.to(problem.device_type, torch.int32),
            indices=room.to(problem.device_type).contiguous(),
            block_q=rows,
            block_k=keys,
        )

    def head_terms(self) -> HeadTerms:
        """Return scales around 1 / sqrt(D); every other head has no window, and no cap."""
        problem, heads = self.problem, self.problem.num_heads
        grad, wide = problem.head_terms_require_grad, max(problem.len_k // 4, 2)
        dtype = torch.float64 if problem.precision is Precision.FP64 else torch.float32
        scale = (0.5 + torch.rand(heads, generator=self.generator)) / problem.head_dim**0.5
        window = torch.randint(-1, wide, (heads, 2), generator=self.generator)
        softcap = 1.0 + 4.0 * torch.rand(heads, generator=self.generator)
        window[1::2], softcap[::2] = -1, 0.0
        drawn = {"scale": scale.to(dtype), "window": window.int(), "softcap": softcap.to(dtype)}
        return HeadTerms(
            **{
                name: numbers.to(problem.device_type).requires_grad_(grad and name != "window")
                for name, numbers in drawn.items()
                if problem.by_head(HeadTerm[name.upper()])
            }
        )

    def mask(self, num_hidden_rows: int) -> torch.Tensor | None:
        """Return a random mask whose first rows hide every key; None without one.

        A wide one has the next dtype above the query's.
        """
        problem = self.problem
        if problem.mask is MaskKind.NONE:
            return None
        shape = (1,) * (4 - len(problem.mask_shape)) + problem.mask_shape
        if problem.mask is MaskKind.BOOLEAN:
            numbers = torch.rand(shape, generator=self.generator)
            mask = (numbers > _HIDDEN_SHARE).to(problem.device_type)
        else:
            wide = torch.float64 if self.dtype is torch.float32 else torch.float32
            dtype = wide if problem.mask_is_wide else self.dtype
            mask = self.leaf(torch.randn, *shape, grad=False, dtype=dtype)
        if num_hidden_rows:
            hidden = False if problem.mask is MaskKind.BOOLEAN else float("-inf")
            mask[:, :, :num_hidden_rows] = hidden
        return mask.requires_grad_(problem.mask_requires_grad)


def cast_tensors(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return detached copies in another dtype that want the same gradients; for the oracle.

    Args:
        tensors: the tensors of a call; integers and booleans stay as they are.
        dtype: floating-point dtype of the copies.
    """
    copies: dict[str, Any] = {}
    for name in FLOATING:
        tensor = getattr(tensors, name)
        if tensor is not None and tensor.is_floating_point():
            copy = tensor.detach().to(dtype, copy=True)
            copies[name] = copy.requires_grad_(tensor.requires_grad)
    return with_tensors(tensors, **copies)


def with_tensors(tensors: Tensors, **others: Any) -> Tensors:
    """Return the tensors of a call with others in their place.

    Args:
        tensors: the tensors of a call.
        **others: by their names in `FLOATING`.
    """
    kv = {name: others.pop(name) for name in ("key", "value") if name in others}
    terms = {name.removeprefix("head_"): others.pop(name) for name in _HEAD_TERMS if name in others}
    if terms:
        assert tensors.head_terms is not None
        others["head_terms"] = replace(tensors.head_terms, **terms)
    return replace(tensors, kv=replace(tensors.kv, **kv), **others)


def _bounds(
    problem: AttentionProblem, lengths_q: Sequence[int], lengths_k: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the starts of packed sequences and their end; two empty tuples if not packed."""
    if not problem.num_sequences and not lengths_q:
        return (), ()
    bounds_q = (0, *itertools.accumulate(lengths_q))
    bounds_k = (0, *itertools.accumulate(lengths_k or lengths_q))
    got = (len(bounds_q) - 1, bounds_q[-1], len(bounds_k) - 1, bounds_k[-1])
    wanted = (problem.num_sequences, problem.len_q, problem.num_sequences, problem.len_k)
    if got != wanted:
        raise ArgumentError.got("packed lengths (N, Sq, N, Sk)", wanted, got, "use make_problem")
    return bounds_q, bounds_k


def _int32(bounds: tuple[int, ...], device: str) -> torch.Tensor | None:
    """Return bounds as a tensor; None when not packed."""
    return torch.tensor(bounds, dtype=torch.int32, device=device) if bounds else None


def make_errors(
    ranks: Mapping[int, tuple[float, ...]],
    masses: Mapping[float, tuple[float, ...]] | None = None,
    densities: tuple[float, ...] = (),
    names: tuple[str, str] = ("low_rank", "block_sparse"),
) -> tuple[MethodErrors, ...]:
    """Return invented errors of approximations, for the ``method_errors`` of statistics.

    Args:
        ranks: errors of each head by rank.
        masses: errors of each head by kept mass.
        densities: share of the keys that block sparsity keeps, for each head and every mass.
        names: the capabilities of both.
    """
    low = [
        MethodErrors(capability=names[0], method=LowRank(rank=rank, value_rank=rank), errors=errors)
        for rank, errors in ranks.items()
    ]
    sparse = [
        MethodErrors(
            capability=names[1],
            method=BlockSparse(block_size=BLOCK_SIZE, kept_mass=mass),
            errors=errors,
            densities=densities or (1.0,) * len(errors),
        )
        for mass, errors in (masses or {}).items()
    ]
    return (*low, *sparse)
