"""The launches of a backward pass, for tensors that lie as those of its first call."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from adaattn.backends.allocation import unfilled
from adaattn.backends.device.launch import address_of
from adaattn.backends.hopper.gradient_launch import ROW_BLOCK, SPLIT_TILE, TILE_NUMBERS
from adaattn.backends.hopper.mask_lists import Lists, listed_blocks
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
        has_lists: lists are made of the mask.
    """

    num_blocks: int
    num_row_blocks: int
    keys: _Numbers
    queries: _Numbers
    mask: tuple[int, ...]
    has_lists: bool

    def _differentiate(
        self, tensors: _Tensors, stream: int, summed: _Optionals, beside: _Optionals
    ) -> None:
        del summed
        slopes, *bounds_and_mask = map(address_of, beside)
        _, keys, queries = self.launches
        others = (*bounds_and_mask, *self.mask)
        of_keys, of_queries = self._lists(beside[3])
        listed = _list_numbers(of_keys)
        copied = (*tensors[:5], *tensors[6:])
        keys(self.num_blocks, stream, copied, slopes, *self.keys, *others, *listed)
        listed = _list_numbers(of_queries)
        copied, terms = (*tensors[:4], tensors[5]), address_of(tensors[4])
        others = (*others, *listed)
        queries(self.num_row_blocks, stream, copied, terms, slopes, *self.queries, *others)

    def _lists(self, mask: _Optional) -> tuple[Lists | None, Lists | None]:
        """Return the lists of rows for blocks of keys, and of keys for blocks of rows."""
        if not self.has_lists:
            return None, None
        assert mask is not None
        of_keys = listed_blocks(mask, SPLIT_TILE, SPLIT_TILE, by_columns=True)
        return of_keys, listed_blocks(mask, ROW_BLOCK, SPLIT_TILE)


def _list_numbers(lists: Lists | None) -> tuple[int, ...]:
    """Return where counts and numbers begin, and the steps from list and sequence to the next."""
    counts, indices = lists or (None, None)
    at = address_of(counts), address_of(indices)
    if lists is None:
        return *at, 0, 0
    blocks, width = lists[1].shape[2:]
    return *at, width, blocks if lists[1].shape[0] > 1 else 0
