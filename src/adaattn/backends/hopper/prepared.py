"""What is worked out once for a layout of tensors, and launched at each call.

Triton's own call of a kernel looks at all arguments each time; here the compiled kernel is kept
and launched directly.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from adaattn._constants import LOG2_E
from adaattn.backends.allocation import Place, output_like, place_of, placed, unfilled_all
from adaattn.backends.block_list import list_strides
from adaattn.backends.compiled_before import note
from adaattn.backends.device.launch import address_of
from adaattn.backends.hopper.launch import (
    MASK_ALIGNMENT,
    Sizes,
    Variant,
    choose,
    edges,
    key_blocks,
    listed,
    tile_bits,
    tiles_of,
)
from adaattn.backends.hopper.order import heads_together, schedule
from adaattn.backends.hopper.views import head_view, is_staged, mask_view
from adaattn.backends.interface import STATISTICS, Result
from adaattn.backends.masks import broadcast_strides, stream_of, with_rank
from adaattn.backends.own_kernels import compiling
from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, Aux, HeadTerm

__all__ = [
    "DTYPES",
    "NOTHING_BESIDE",
    "NOT_BY_HEAD",
    "Beside",
    "Given",
    "Prepared",
    "is_aligned",
    "prepare",
    "strides_of",
]

DTYPES: Final = {
    torch.bool: "i8",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""What the kernel reads of masks, sinks, slopes and numbers of heads, by Triton's names."""

_INTEGERS: Final = {torch.int32: "i32", torch.int64: "i64"}
"""The same of windows."""

_MOST_LISTED: Final = 100_000
"""Tiles up to which a list is made, on the host in half a microsecond each."""

_MOST_KEPT: Final = 4096
"""Lists of tiles in all. They stay: a CUDA graph may have recorded where."""

_MOST_KEYS: Final = 2**30
"""A window that hides nothing, where each head has its own: beside a position it is an int32."""

Beside = tuple[torch.Tensor | None, ...]

NOTHING_BESIDE: Final[Beside] = (None, None, None, None, None)
"""A call without packed sequences and lists of blocks."""

NOT_BY_HEAD: Final[Beside] = (None, None, None)
"""A call whose heads have no scale, window or softcap of their own."""

_NO_ADDRESSES: Final = (0, 0, 0, 0, 0)

_ALONE: Final = ((), (STATISTICS.index(Aux.LSE),))
"""What may be stored beside the output of q, k and v alone."""


class Given(NamedTuple):
    """The tensors of a call, as the kernel reads them.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        mask: of up to four dimensions; or its packed tiles, int32, beside lists of its blocks.
        sinks: [Hq].
        slopes: [B or 1, Hq].
        starts_q: int32 [N + 1], starts of packed query sequences and their end.
        starts_k: the same of keys.
        counts: int32 [B or 1, Hq or 1, Nq], listed blocks of keys.
        indices: int32 [B or 1, Hq or 1, Nq, K], their numbers.
        sees: int8 [B or 1, Nq, rows of a block], whether rows see anything of a packed mask.
        head_scale: [Hq].
        head_window: [Hq, 2].
        head_softcap: [Hq].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    sees: torch.Tensor | None = None
    head_scale: torch.Tensor | None = None
    head_window: torch.Tensor | None = None
    head_softcap: torch.Tensor | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Tiles:
    """A list of tiles on the device.

    Args:
        tensor: int32 [blocks, 1 + tiles of a block]: how many, then each.
        is_copied: where its copy ends among the device's work; None once that has passed.
    """

    tensor: torch.Tensor
    is_copied: torch.cuda.Event | None = None

    def settle(self) -> None:
        """Have the current stream wait for the copy, which another stream may have begun.

        What a CUDA graph records comes behind it: PyTorch waits for the device before a capture.
        """
        copied = self.is_copied
        if copied is None or torch.cuda.is_current_stream_capturing():
            return
        if copied.query():
            self.is_copied = None
        else:
            copied.wait()


@dataclass(slots=True, kw_only=True, eq=False)
class Prepared:
    """A launch for one layout.

    Args:
        launch: the compiled kernel's launch for tensors that lie so.
        num_blocks: persistent blocks.
        copies_mask: TMA reads the mask, too.
        allocated: the result, the statistics of `stored`, and, where there are some, notes of tiles
            to be computed again.
        scalars: the arguments between the pointers.
        numbers: those between the next pointers and those of heads.
        tiles: the list of tiles, or None.
        is_lasting: what was prepared may serve later calls.
        stored: which of `STATISTICS` the kernel stores, by their places.
        has_lse: the caller wants the log-sum-exp, too.
        packs_mask: it is handed the packed tiles of a mask and lists of its blocks.
        plain: all that is handed over behind the notes where there are q, k and v alone; None
            otherwise.
    """

    launch: Callable[..., None]
    num_blocks: int
    copies_mask: bool
    allocated: tuple[Place, ...]
    scalars: tuple[Any, ...]
    numbers: tuple[int, ...]
    tiles: _Tiles | None
    is_lasting: bool
    stored: tuple[int, ...]
    has_lse: bool
    packs_mask: bool
    plain: tuple[Any, ...] | None

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        beside: Beside,
        by_head: Beside,
    ) -> Result:
        """Return the result of one launch, of tensors as in `Given`."""
        if self.plain is not None and self.stored in _ALONE:
            out, lse = self.alone(query, key, value)
            return Result(output=out, lse=lse if self.has_lse else None)
        out, *made = unfilled_all(query, self.allocated)
        flags = made.pop() if len(made) > len(self.stored) else None
        statistics: list[torch.Tensor | None] = [None, None, None, None]
        for place, item in zip(self.stored, made, strict=True):
            statistics[place] = item
        lse, row_max, entropy, dropped = statistics
        copied = (query, key, value, out, mask) if self.copies_mask else (query, key, value, out)
        first = self.num_blocks, stream_of(query), copied
        rows = *map(address_of, (lse, row_max, entropy)), self._tiles(), address_of(flags)
        self.launch(
            *first,
            *rows,
            *map(address_of, (mask, sinks, slopes)),
            *self.scalars,
            *map(address_of, beside),
            *self.numbers,
            *map(address_of, (*by_head, dropped)),
        )
        if not self.has_lse:
            lse = None
        return Result(output=out, lse=lse, row_max=row_max, entropy=entropy, dropped_mass=dropped)

    def alone(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of q, k and v alone, and the log-sum-exp, if that is `stored`."""
        assert self.plain is not None and self.stored in _ALONE
        out, *made = unfilled_all(query, self.allocated)
        lse = made.pop(0) if self.stored else None
        flags = made[0] if made else None
        rows = address_of(lse), 0, 0, self._tiles(), address_of(flags)
        self.launch(self.num_blocks, stream_of(query), (query, key, value, out), *rows, *self.plain)
        return out, lse

    def _tiles(self) -> int:
        """Return where the list of tiles begins on the device; 0 where there is none."""
        tiles = self.tiles
        if tiles is None:
            return 0
        if tiles.is_copied is not None:
            tiles.settle()
        return address_of(tiles.tensor)


def prepare(problem: AttentionProblem, given: Given) -> Prepared:
    """Return the launch for tensors of a layout.

    Args:
        problem: what to compute; sizes are taken from the tensors.
        given: tensors that TMA can read.

    Raises:
        ExecutorError: the kernel cannot be compiled here.
    """
    query, mask = given.query, given.mask
    lengths = query.shape[2], given.key.shape[2]
    shape: Sizes = () if mask is None else tuple(with_rank(mask, 4).shape)
    packed = mask is not None and mask.dtype is torch.int32
    problem = replace(
        problem,
        batch=query.shape[0],
        len_q=lengths[0],
        len_k=lengths[1],
        mask_shape=(*shape[:2], *lengths) if packed else shape,
    )
    staged = mask is not None and not packed and is_staged(problem, mask)
    known_by = choose(problem, staged=staged)
    num_blocks = probe(query.device).num_processors
    tiles, lasting = _tiles(problem, known_by, num_blocks, query.device)
    variant = _for_tensors(replace(known_by, has_tiles=tiles is not None), given)
    per_head = tiles_of(problem, problem.len_q, variant.tiling.block_m)
    num_tiles = per_head * problem.batch * problem.num_heads
    num_blocks = min(num_blocks, num_tiles)
    per_block = -(-num_tiles // num_blocks) if tiles is None else tiles.tensor.shape[1] - 1
    out = output_like(query, given.value.shape[3])
    heads = query, given.key, given.value, out
    views = tuple(head_view(item, is_packed=variant.is_packed) for item in heads)
    if mask is not None and variant.tiling.stages_m:
        views = (*views, mask_view(mask))
    launch = _compiled(variant, query.device)(views)
    strides = strides_of(mask, given.slopes)
    if packed:  # from one line of tiles to the next, also where there is one
        assert mask is not None and variant.packs_mask
        strides = (*strides[:-2], mask.stride(2), 1)
    aux = problem.aux | Aux.LSE if variant.has_dropped else problem.aux
    stored = tuple(place for place, flag in enumerate(STATISTICS) if aux & flag)
    allocated: list[Place] = [
        place_of(out),
        *(placed(out.shape[:3], torch.float32) for _ in stored),
    ]
    if variant.fixed:
        allocated.append(placed((num_blocks * (per_block + 1),), torch.int32))
    scalars = (
        *_scalars(problem, num_tiles, per_head, per_block, fast_tanh=variant.has_fast_tanh),
        *strides,
    )
    numbers = (problem.num_sequences, *_lists(listed(problem), given))
    plain = None
    if all(it is None for it in given[3:]):
        absent = _NO_ADDRESSES
        plain = (*absent[:3], *scalars, *absent, *numbers, *absent[:4])
    note(("hopper", known_by))
    note(("hopper", choose(problem)))  # what `is_ready` asks for, which knows no addresses
    return Prepared(
        launch=launch,
        num_blocks=num_blocks,
        copies_mask=len(views) == 5,
        allocated=tuple(allocated),
        scalars=scalars,
        numbers=numbers,
        tiles=tiles,
        is_lasting=lasting,
        stored=stored,
        has_lse=problem.wants(Aux.LSE),
        packs_mask=packed,
        plain=plain,
    )


def _for_tensors(variant: Variant, given: Given) -> Variant:
    """Return the kernel that reads mask, sinks, slopes and numbers of heads as they lie."""
    mask, window = given.mask, given.head_window
    loaded = None if variant.tiling.stages_m else mask
    return replace(
        variant,
        mask_is_dense=loaded is None or loaded.stride(-1) == 1 < loaded.shape[-1],
        mask_is_aligned=loaded is None or is_aligned(loaded),
        mask_dtype=variant.mask_dtype if mask is None or variant.packs_mask else DTYPES[mask.dtype],
        sinks_dtype=_type_of(given.sinks),
        slopes_dtype=_type_of(given.slopes),
        scales_dtype=_type_of(given.head_scale),
        windows_dtype="i32" if window is None else _INTEGERS[window.dtype],
        softcaps_dtype=_type_of(given.head_softcap),
    )


def _type_of(numbers: torch.Tensor | None) -> str:
    """Return Triton's name of a tensor's type; where there is none, of what stands for it."""
    return "fp32" if numbers is None else DTYPES[numbers.dtype]


def is_aligned(mask: torch.Tensor) -> bool:
    """Return whether a mask's rows begin at multiples that the kernel can make use of."""
    rows = zip(mask.shape[:-1], mask.stride(), strict=False)
    at = mask.data_ptr() % MASK_ALIGNMENT
    return at == 0 and not any(step % MASK_ALIGNMENT for size, step in rows if size > 1)


def _scalars(
    problem: AttentionProblem, num_tiles: int, per_head: int, per_block: int, *, fast_tanh: bool
) -> tuple[int | float, ...]:
    """Return scale, softcap and sizes, in the kernel's order."""
    right, left = edges(problem)
    scale = problem.scale * LOG2_E
    if problem.softcap > 0:
        # The kernel's tanh takes the score itself, or the exponent of its own exponential.
        scale = (problem.scale if fast_tanh else 2.0 * scale) / problem.softcap
    if problem.by_head(HeadTerm.SOFTCAP):
        scale = problem.scale  # the rest of the way is each head's
    if problem.by_head(HeadTerm.WINDOW):
        left, right = _MOST_KEYS, right if right >= 0 else _MOST_KEYS
    return (
        scale,
        problem.softcap * LOG2_E,
        problem.len_q,
        problem.len_k,
        num_tiles,
        per_head,
        tile_bits(per_head),
        per_block,
        problem.num_heads,
        problem.group_size,
        0 if problem.num_sequences else problem.offset,
        left,
        right,
    )


def strides_of(mask: torch.Tensor | None, slopes: torch.Tensor | None) -> tuple[int, ...]:
    """Return the slopes' stride over sequences and the mask's four; 0 where one stands for all."""
    by_batch = 0 if slopes is None or slopes.dim() < 2 or slopes.shape[0] == 1 else slopes.stride(0)
    if mask is None:
        return by_batch, 0, 0, 0, 0
    return by_batch, *broadcast_strides(with_rank(mask, 4))


def _lists(problem: AttentionProblem, given: Given) -> tuple[int, ...]:
    """Return how lists of blocks lie, in the kernel's order."""
    if given.indices is None:
        return 0, 0, 0, 0, 0, 0
    width = given.indices.shape[-1]
    num_blocks = -(-problem.len_k // problem.block_size[1])
    return (
        *list_strides(given.indices.shape),
        problem.block_size[0],
        width,
        min(width, num_blocks),
        num_blocks,
    )


def _tiles(
    problem: AttentionProblem, variant: Variant, num_blocks: int, device: torch.device
) -> tuple[_Tiles | None, bool]:
    """Return the list of tiles on the device, and whether it may be kept.

    While a CUDA graph is captured none is made: the static order serves, slower, until the next
    call outside of it.
    """
    heads = problem.batch * problem.num_heads
    per_head = tiles_of(problem, problem.len_q, variant.tiling.block_m)
    if not variant.has_tiles or per_head * heads > _MOST_LISTED:
        return None, True
    tiling = variant.tiling
    costs = []
    for tile in range(per_head):
        first = tile * tiling.block_m
        start, end = key_blocks(problem, first, tiling.block_m, tiling.block_n)
        costs.append(end - start)
    facts = (tuple(costs), heads, heads_together(problem), min(num_blocks, per_head * heads))
    if (facts, device) not in _LISTED:
        if len(_LISTED) >= _MOST_KEPT:
            return None, True
        if torch.cuda.is_current_stream_capturing():
            return None, False
        _LISTED[facts, device] = _copied(schedule(*facts), device)
    return _LISTED[facts, device], True


def _copied(lists: tuple[tuple[int, ...], ...], device: torch.device) -> _Tiles:
    """Return lists of tiles on the device. The host waits for nothing."""
    width = max(map(len, lists))
    rows = [(len(row), *row, *(0,) * (width - len(row))) for row in lists]
    if device.type != "cuda":
        return _Tiles(tensor=torch.tensor(rows, dtype=torch.int32, device=device))
    with torch.cuda.device(device):
        pinned = torch.tensor(rows, dtype=torch.int32, pin_memory=True)
        made = _Tiles(tensor=pinned.to(device, non_blocking=True), is_copied=torch.cuda.Event())
        if made.is_copied is not None:
            made.is_copied.record()
    return made


_LISTED: Final[dict[Any, _Tiles]] = {}


@lru_cache(maxsize=256)
def _compiled(variant: Variant, device: torch.device) -> Callable[..., Callable[..., None]]:
    """Return what binds a kernel on a device to the views of its tensors."""
    with compiling("the Hopper kernel"), torch.cuda.device(device):
        # Triton is imported when a kernel first runs: importing the package does not need it.
        from adaattn.backends.device.tma import Launcher
        from adaattn.backends.hopper.compiled import compile_variant

        return Launcher(compile_variant(variant)).bind
