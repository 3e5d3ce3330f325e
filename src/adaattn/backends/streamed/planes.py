"""Tensors of a call as chunks take them: views of planes, and the memory that scores are in."""

import math
from collections.abc import Callable
from typing import Any

import torch

from adaattn.backends.allocation import adjacent, unfilled
from adaattn.backends.interface import STATISTICS, Result
from adaattn.backends.streamed.chunks import Chunk, pitch_of
from adaattn.backends.streamed.products import multiply
from adaattn.spec import AttentionProblem

__all__ = [
    "Planes",
    "Space",
    "Taken",
    "fill_for_nothing",
    "num_entries",
    "with_statistics",
    "write_products",
]


def with_statistics(
    launcher: Callable[..., torch.Tensor],
    problem: AttentionProblem,
    given: tuple[Any, ...],
    others: dict[str, Any],
) -> Result:
    """Return the output of a launcher, and the statistics of rows that a problem asks for.

    Args:
        launcher: writes those that it is given, and returns the output.
        problem: of the call.
        given: what a `Direct` takes.
        others: what the launcher takes beside it.
    """
    query = given[0]
    statistics = tuple(
        unfilled(query, query.shape[:3], dtype=torch.float32) if problem.wants(flag) else None
        for flag in STATISTICS[:3]
    )
    output = launcher(*given, statistics=statistics, **others)
    lse, row_max, entropy = statistics
    return Result(output=output, lse=lse, row_max=row_max, entropy=entropy)


def fill_for_nothing(*results: torch.Tensor | None) -> None:
    """Fill the output and the statistics of a call without rows or keys, and what lse_rest is."""
    for item, number in zip(results, (0.0, -math.inf, -math.inf, 0.0, 0.0), strict=True):
        if item is not None:
            item.fill_(number)


def num_entries(*tensors: torch.Tensor) -> int:
    """Return in how many parts a batch is computed: 1 where batch and heads are one dimension.

    Where they are not, as in memory of [B, S, H, D], a matrix product would copy the tensors.
    """
    return 1 if all(map(_is_one, tensors)) else tensors[0].shape[0]


def _is_one(tensor: torch.Tensor) -> bool:
    """Return whether batch and heads of a tensor [B, H, S, D] lie as one dimension."""
    batch, heads = tensor.shape[:2]
    return batch == 1 or heads == 1 or tensor.stride(0) == heads * tensor.stride(1)


class Planes:
    """A tensor [B, H, S, D] by planes, [B * Hkv, H / Hkv, S, D].

    Args:
        tensor: of the call.
        kv_heads: Hkv.
        entries: as from `num_entries` of all tensors of a call.
    """

    def __init__(self, tensor: torch.Tensor, kv_heads: int, entries: int) -> None:
        batch, heads, *rest = tensor.shape
        if entries == batch == 1 and heads == kv_heads:
            self._entries = [tensor.transpose(0, 1)]
            return
        shape = (-1, heads // kv_heads, *rest)
        parts = (tensor,) if entries == 1 else tensor.split(tensor.shape[0] // entries)
        self._entries = [part.reshape(shape) for part in parts]

    def part(self, planes: range, tokens: range) -> torch.Tensor:
        """Return the same tokens of some planes of one entry: a view [P, H / Hkv, T, D]."""
        entry, first = divmod(planes.start, self._entries[0].shape[0])
        whole: torch.Tensor = self._entries[entry]
        if len(planes) == whole.shape[0] and tokens.start == 0 and tokens.stop >= whole.shape[2]:
            return whole
        return whole[first : first + len(planes), :, tokens.start : tokens.stop]

    def lines(self, chunk: Chunk) -> torch.Tensor:
        """Return the rows of a chunk as matrices [P, H / Hkv * R, D]; a copy of those of groups."""
        found = self.part(chunk.planes, chunk.rows)
        return found.squeeze(1) if found.shape[1] == 1 else found.flatten(1, 2)

    def keys(self, chunk: Chunk) -> torch.Tensor:
        """Return the keys of a chunk as matrices [P, C, D], a view."""
        return self.part(chunk.planes, chunk.keys).squeeze(1)

    def padded_keys(self, chunk: Chunk) -> torch.Tensor:
        """Return as many as the chunk's pitch, [P, N, D]: those behind it have no weights.

        It is a view, or a copy, ended by zeros, where there are no more.
        """
        first, pitch = chunk.keys.start, pitch_of(chunk)
        keys = self.part(chunk.planes, range(first, first + pitch)).squeeze(1)
        count = keys.shape[1]
        if count == pitch:
            return keys
        padded = unfilled(keys, (keys.shape[0], pitch, keys.shape[2]))
        padded[:, :count].copy_(keys)
        padded[:, count:].zero_()
        return padded

    def transposed_keys(self, chunk: Chunk) -> torch.Tensor:
        """Return those as [P, D, N]."""
        return self.padded_keys(chunk).mT

    def written(self, chunk: Chunk) -> torch.Tensor:
        """Return where the rows of a chunk are written: a view for `write_products`."""
        found = self.part(chunk.planes, chunk.rows)
        _, group, rows, _ = found.shape
        if group == 1:
            return found.squeeze(1)
        is_one = rows == 1 or found.stride(1) == rows * found.stride(2)
        return found.flatten(1, 2) if is_one else found


def write_products(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scale: float = 1.0
) -> None:
    """Write products of matrices to rows of a chunk.

    Args:
        left: [P, L, N], of the chunk's pitch N.
        right: [P, N, D].
        out: [P, L, D], or [P, H / Hkv, R, D] where no matrix has the rows of a group.
        scale: factor of the products.
    """
    if out.dim() == 3:
        multiply(left, right, out, scale=scale)
        return
    product = unfilled(out, (*left.shape[:2], right.shape[2]))
    multiply(left, right, product, scale=scale)
    out.copy_(product.view(out.shape))


class Taken:
    """What a chunk takes of a tensor [B, H, S, D], for all that lie like it: found once if a view.

    Args:
        chunk: which.
        kv_heads: Hkv.
        entries: as from `num_entries` of all tensors of a call.
        take: returns it of the tensor's planes, as a view or a copy.
        tensor: the first.
    """

    def __init__(
        self,
        chunk: Chunk,
        kv_heads: int,
        entries: int,
        take: Callable[[Planes, Chunk], torch.Tensor],
        tensor: torch.Tensor,
    ) -> None:
        self._chunk, self._kv_heads, self._entries, self._take = chunk, kv_heads, entries, take
        self._place: tuple[torch.Size, tuple[int, ...], int] | None = None
        found = self._taken(tensor)
        if found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            offset = int(found.storage_offset() - tensor.storage_offset())
            self._place = found.shape, found.stride(), offset

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it, found anew."""
        return self._take(Planes(tensor, self._kv_heads, self._entries), self._chunk)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it of a tensor."""
        if self._place is None:
            return self._taken(tensor)
        shape, strides, offset = self._place
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


class Space:
    """Memory for the numbers of chunks, the same for each, so that it stays in a cache.

    Args:
        chunks: those that are to fit.
        group: heads that share a key head.
    """

    def __init__(self, chunks: tuple[Chunk, ...], group: int) -> None:
        self._group = group
        self._size = max(math.prod(self.place(chunk)[0]) for chunk in chunks)

    def memory(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for all of them, on a tensor's device."""
        return unfilled(like, (self._size,), (1,), dtype)

    def place(self, chunk: Chunk) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of a chunk's numbers in it: [P, G * R, N], N the pitch."""
        shape = (len(chunk.planes), self._group * len(chunk.rows), pitch_of(chunk))
        return shape, adjacent(shape)
