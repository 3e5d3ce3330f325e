"""Tensors of a call as chunks take them: views of planes, and the memory that scores are in."""

import math
from collections.abc import Callable

import torch

from adaattn.backends.allocation import adjacent, unfilled
from adaattn.backends.streamed.chunks import Chunk, pitch_of
from adaattn.backends.streamed.products import multiply

__all__ = [
    "Planes",
    "Space",
    "Taken",
    "fill_for_nothing",
    "lines_of",
    "num_entries",
    "padded_keys",
    "write_products",
]


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

    def rows(self, chunk: Chunk) -> torch.Tensor:
        """Return the rows of a chunk, a view: [P, L, D], or [P, H / Hkv, R, D] of groups."""
        found = self.part(chunk.planes, chunk.rows)
        _, group, rows, _ = found.shape
        if group == 1:
            return found.squeeze(1)
        is_one = rows == 1 or found.stride(1) == rows * found.stride(2)
        return found.flatten(1, 2) if is_one else found

    def keys(self, chunk: Chunk) -> torch.Tensor:
        """Return the keys of a chunk as matrices [P, C, D], a view."""
        return self.part(chunk.planes, chunk.keys).squeeze(1)

    def keys_to_pitch(self, chunk: Chunk) -> torch.Tensor:
        """Return as many as the chunk's pitch, or all that there are: a view."""
        first = chunk.keys.start
        return self.part(chunk.planes, range(first, first + pitch_of(chunk))).squeeze(1)


def lines_of(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a chunk as matrices [P, L, D]; a copy where a group's are not one already."""
    return rows if rows.dim() == 3 else rows.flatten(1, 2)


def padded_keys(keys: torch.Tensor, pitch: int) -> torch.Tensor:
    """Return as many keys as a chunk's pitch, [P, N, D]: those behind its own have no weights.

    Args:
        keys: from `Planes.keys_to_pitch`; they, or a copy that is ended by zeros.
        pitch: N.
    """
    count = keys.shape[1]
    if count == pitch:
        return keys
    padded = unfilled(keys, (keys.shape[0], pitch, keys.shape[2]))
    padded[:, :count].copy_(keys)
    padded[:, count:].zero_()
    return padded


def write_products(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scale: float = 1.0
) -> None:
    """Write products of matrices to rows of a chunk.

    Args:
        left: [P, L, N], of the chunk's pitch N.
        right: [P, N, D].
        out: [P, L, D], or [P, H / Hkv, R, D], as from `Planes.rows`.
        scale: factor of the products.
    """
    if out.dim() == 3:
        multiply(left, right, out, scale=scale)
        return
    product = unfilled(out, (*left.shape[:2], right.shape[2]))
    multiply(left, right, product, scale=scale)
    out.copy_(product.view(out.shape))


class Taken:
    """A view that a chunk takes of a tensor [B, H, S, D]: found once for all that lie like it.

    Args:
        chunk: which.
        kv_heads: Hkv.
        entries: as from `num_entries` of all tensors of a call.
        take: returns the view of the tensor's planes.
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
        found = take(Planes(tensor, kv_heads, entries), chunk)
        self._lying = found.shape, found.stride()
        self._offset = int(found.storage_offset() - tensor.storage_offset())

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it of a tensor."""
        return tensor.as_strided(*self._lying, tensor.storage_offset() + self._offset)


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
