"""The launches of a backward pass, for tensors that lie as those of its first call."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from adaattn.backends.allocation import unfilled
from adaattn.backends.device.launch import address_of
from adaattn.backends.hopper.gradient_launch import TILE_NUMBERS
from adaattn.backends.hopper.mask_lists import Tiles, tiles_both_ways
from adaattn.backends.masks import stream_of

__all__ = ["Pass", "SinglePass", "SplitPass"]

_Optional = torch.Tensor | None
_Tensors = tuple[torch.Tensor, ...]
_Optionals = tuple[_Optional, ...]
_Strides = tuple[int, ...]
_Numbers = tuple[int | float, ...]
_Launch = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What every backward pass has.

    Args:
        launches: of the kernels, in order; the first makes terms of rows.
        written: shape and strides of the gradients of q, k and v.
        num_tiles: of query rows, of all heads.
        block_m: rows of a tile.
        prepare: numbers of the first launch.
    """

    launches: tuple[_Launch, _Launch, _Launch]
    written: tuple[tuple[torch.Size, _Strides], ...]
    num_tiles: int
    block_m: int
    prepare: tuple[int, ...]

    def run(
        self,
        read: _Tensors,
        lse: torch.Tensor,
        lse_upstream: _Optional,
        mask: _Optional,
        slopes: _Optional,
        starts: tuple[_Optional, _Optional],
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the gradients of q, k and v; and log-sum-exp and delta of rows.

        The latter are [tiles, 2, rows of a tile].

        Args:
            read: q, k, v, the gradient of the output, and the output.
            lse: the log-sum-exp.
            lse_upstream: its gradient, if there is one.
            mask: if there is one.
            slopes: of ALiBi, if there are any.
            starts: of packed queries and keys, if they are.
        """
        upstream = read[3]
        written = tuple(unfilled(upstream, *both) for both in self.written)
        if starts[0] is not None:
            for item in written:  # tokens of no sequence
                item.zero_()
        terms = unfilled(upstream, (self.num_tiles, 2, self.block_m), dtype=torch.float32)
        summed = self._summed(upstream)
        stream, starts_q = stream_of(upstream), address_of(starts[0])
        of_rows = map(address_of, (read[4], upstream, lse, lse_upstream, terms, *summed))
        self.launches[0](self.num_tiles, stream, (), *of_rows, starts_q, *self.prepare)
        beside = slopes, *starts, mask
        self._differentiate((*read[:4], terms, *written), stream, summed, beside)
        return written, terms

    def _summed(self, upstream: torch.Tensor) -> tuple[_Optional, _Optional]:
        """Return memory for gradients of queries that are summed, and for turns in doing so."""
        del upstream
        return None, None

    @abstractmethod
    def _differentiate(
        self, tensors: _Tensors, stream: int, summed: _Optionals, beside: _Optionals
    ) -> None:
        """Launch the kernels behind the first.

        Args:
            tensors: q, k, v, the gradient of the output, terms of rows, and those to be written.
            stream: of the launches.
            summed: sums of gradients of queries, and turns in summing.
            beside: slopes, starts of queries and of keys, and the mask.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SinglePass(Pass):
    """One kernel for all gradients, which sums those of queries; another finishes them.

    Args:
        num_blocks: of keys, of all key heads.
        is_ordered: sums of gradients of queries have a fixed order.
        main: numbers of the second launch.
        finish: of the third.
    """

    num_blocks: int
    is_ordered: bool
    main: _Numbers
    finish: _Numbers

    def _summed(self, upstream: torch.Tensor) -> tuple[_Optional, _Optional]:
        sums = unfilled(upstream, (self.num_tiles * TILE_NUMBERS,), (1,), torch.float32)
        turns = None
        if self.is_ordered:
            turns = unfilled(upstream, (2 * self.num_tiles,), (1,), torch.int32)
        return sums, turns

    def _differentiate(
        self, tensors: _Tensors, stream: int, summed: _Optionals, beside: _Optionals
    ) -> None:
        slopes, *bounds = map(address_of, beside[:3])
        sums, turns = summed
        _, main, finish = self.launches
        copied = (*tensors[:5], *tensors[6:], sums)
        main(self.num_blocks, stream, copied, slopes, address_of(turns), *self.main, *bounds)
        of_queries = map(address_of, (sums, tensors[5]))
        finish(self.num_tiles, stream, (), *of_queries, bounds[0], *self.finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPass(Pass):
    """One kernel for the gradients of keys and values, one for those of queries: no sums.

    Args:
        num_blocks: of keys, of all key heads.
        num_row_blocks: of query rows, of all heads.
        keys: numbers of the second launch.
        queries: of the third.
        mask: strides of the mask.
        packs_mask: tiles of the mask are packed before.
        has_lists: so are lists of those that it shows.
    """

    num_blocks: int
    num_row_blocks: int
    keys: _Numbers
    queries: _Numbers
    mask: tuple[int, ...]
    packs_mask: bool
    has_lists: bool

    def _differentiate(
        self, tensors: _Tensors, stream: int, summed: _Optionals, beside: _Optionals
    ) -> None:
        del summed
        slopes, *bounds = map(address_of, beside[:3])
        _, keys, queries = self.launches
        mask = beside[3]
        of_keys = of_queries = None  # in these names until both kernels are launched
        if self.packs_mask:
            assert mask is not None
            of_keys, of_queries = tiles_both_ways(mask, has_lists=self.has_lists)
        copied = (*tensors[:5], *tensors[6:])
        others = (*bounds, *self._mask_numbers(mask, of_keys))
        keys(self.num_blocks, stream, copied, slopes, *self.keys, *others)
        copied, terms = (*tensors[:4], tensors[5]), address_of(tensors[4])
        others = (*bounds, *self._mask_numbers(mask, of_queries))
        queries(self.num_row_blocks, stream, copied, terms, slopes, *self.queries, *others)

    def _mask_numbers(self, mask: _Optional, tiles: Tiles | None) -> tuple[int, ...]:
        """Return where a mask begins, its strides, where lists of it do, and their steps."""
        strides, steps = self.mask, (0, 0)
        if tiles is None:
            return address_of(mask), *strides, address_of(None), address_of(None), *steps
        words, counts, indices, _ = tiles
        sizes = zip(words.shape[:2], words.stride(), strict=False)
        strides = (*(step if size > 1 else 0 for size, step in sizes), 0, 0)
        if indices is not None:
            blocks, width = indices.shape[2:]
            steps = (width, blocks if indices.shape[0] > 1 else 0)
        return address_of(words), *strides, address_of(counts), address_of(indices), *steps
