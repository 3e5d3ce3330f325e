"""The launches of a backward pass, for tensors that lie as those of its first call."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from adaattn.backends.allocation import Place, unfilled_all
from adaattn.backends.device.launch import View, address_of
from adaattn.backends.hopper.mask_lists import Tiles, packed_tiles, turns_of
from adaattn.backends.masks import stream_of

__all__ = ["MaskReading", "Pass", "SinglePass", "SplitPass"]

_Optional = torch.Tensor | None
_Tensors = tuple[torch.Tensor, ...]
_Optionals = tuple[_Optional, ...]
_Numbers = tuple[int | float, ...]
_Steps = tuple[int, ...]
_Launch = Callable[..., None]


class MaskReading(NamedTuple):
    """How a kernel reads a mask.

    Args:
        strides: of the mask, or of its packed tiles over sequences and heads; 0 where one stands
            for all.
        steps: of its lists from block to block, and to those of the next sequence.
        block: lines and others of a block of the lists; None without.
        by_columns: lines are its columns.
        view: of its packed tiles, as TMA sees them; None where it is read as it is.
    """

    strides: _Steps = (0, 0, 0, 0)
    steps: _Steps = (0, 0)
    block: tuple[int, int] | None = None
    by_columns: bool = False
    view: View | None = None

    @classmethod
    def of_tiles(
        cls, mask: torch.Tensor, block: tuple[int, int] | None, *, by_columns: bool = False
    ) -> "MaskReading":
        """Return how its packed tiles are read."""
        words, _, indices, _ = packed_tiles(mask, block, by_columns=by_columns)
        assert words is not None
        sizes = zip(words.shape[:2], words.stride(), strict=False)
        strides = (*(step if size > 1 else 0 for size, step in sizes), 0, 0)
        steps: _Steps = (0, 0)
        if indices is not None:
            blocks, width = indices.shape[2:]
            steps = (width, blocks if indices.shape[0] > 1 else 0)
        return cls(strides, steps, block, by_columns, (tuple(words.shape), words.stride()))

    def tiles(self, mask: _Optional) -> Tiles:
        """Return what the kernel reads, to be held until it is launched."""
        if mask is None or self.view is None:
            return Tiles(mask)
        return packed_tiles(mask, self.block, by_columns=self.by_columns)

    def numbers(self, tiles: Tiles) -> tuple[int, ...]:
        """Return where a mask begins, its strides, where lists of it do, and their steps."""
        words, counts, indices, _ = tiles
        return address_of(words), *self.strides, *map(address_of, (counts, indices)), *self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What every backward pass has.

    Args:
        launches: of the kernels, in order; the first makes terms of rows.
        allocated: the gradients of q, k and v; log-sum-exp and delta of rows, fp32 [tiles, 2, rows
            of a tile]; and, where gradients are summed, the sums, and turns in summing.
        num_tiles: of query rows, of all heads.
        prepare: numbers of the first launch.
    """

    launches: tuple[_Launch, _Launch, _Launch]
    allocated: tuple[Place, ...]
    num_tiles: int
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
        query, key, value, terms, *summed = unfilled_all(upstream, self.allocated)
        written = query, key, value
        if starts[0] is not None:
            for item in written:  # tokens of no sequence
                item.zero_()
        stream, starts_q = stream_of(upstream), address_of(starts[0])
        sums, turns = (*summed, None, None)[:2]
        of_rows = map(address_of, (read[4], upstream, lse, lse_upstream, terms, sums, turns))
        self.launches[0](self.num_tiles, stream, (), *of_rows, starts_q, *self.prepare)
        beside = slopes, *starts, mask
        self._differentiate((*read[:4], terms, *written), stream, (sums, turns), beside)
        return written, terms

    @abstractmethod
    def _differentiate(
        self, tensors: _Tensors, stream: int, summed: _Optionals, beside: _Optionals
    ) -> None:
        """Launch the kernels behind the first.

        Args:
            tensors: q, k, v, the gradient of the output, terms of rows, and those to be written.
            stream: of the launches.
            summed: sums of gradients, and turns in summing.
            beside: slopes, starts of queries and of keys, and the mask.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SinglePass(Pass):
    """One kernel for all gradients, which sums those of queries or all; another finishes them.

    Args:
        num_blocks: of keys, of all heads that have some.
        num_sums: tiles of sums.
        main: numbers of the second launch.
        finish: of the third.
        mask: how it is read.
    """

    num_blocks: int
    num_sums: int
    main: _Numbers
    finish: _Numbers
    mask: MaskReading

    def _differentiate(
        self, tensors: _Tensors, stream: int, summed: _Optionals, beside: _Optionals
    ) -> None:
        slopes, *bounds = map(address_of, beside[:3])
        sums, turns = summed
        _, main, finish = self.launches
        mask, reading = beside[3], self.mask
        words, counts, indices, _ = seen = reading.tiles(mask)
        before = None
        if turns is not None and mask is not None and reading.block is not None:
            before = turns_of(mask, seen, reading.block)
        assert sums is not None
        copied = (*tensors[:5], *tensors[6:], sums)
        if words is not None:
            copied = (*copied, words)
        planes = (int(step > 0) for step in reading.strides[:2])
        lists = map(address_of, (counts, indices, before))
        others = (*bounds, *planes, *lists, *reading.steps)
        main(self.num_blocks, stream, copied, slopes, address_of(turns), *self.main, *others)
        summed_up = map(address_of, (sums, *tensors[5:], turns))
        finish(self.num_sums, stream, (), *summed_up, bounds[0], *self.finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPass(Pass):
    """One kernel for the gradients of keys and values, one for those of queries: no sums.

    Args:
        num_blocks: of keys, of all key heads.
        num_row_blocks: of query rows, of all heads.
        keys: numbers of the second launch.
        queries: of the third.
        mask: how each of them reads it.
    """

    num_blocks: int
    num_row_blocks: int
    keys: _Numbers
    queries: _Numbers
    mask: tuple[MaskReading, MaskReading]

    def _differentiate(
        self, tensors: _Tensors, stream: int, summed: _Optionals, beside: _Optionals
    ) -> None:
        del summed
        slopes, *bounds = map(address_of, beside[:3])
        _, keys, queries = self.launches
        first, second = (reading.tiles(beside[3]) for reading in self.mask)
        of_keys, of_queries = self.mask
        copied = (*tensors[:5], *tensors[6:])
        others = (*bounds, *of_keys.numbers(first))
        keys(self.num_blocks, stream, copied, slopes, *self.keys, *others)
        copied, terms = (*tensors[:4], tensors[5]), address_of(tensors[4])
        others = (*bounds, *of_queries.numbers(second))
        queries(self.num_row_blocks, stream, copied, terms, slopes, *self.queries, *others)
