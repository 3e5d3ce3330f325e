"""The launches of a problem's backward pass: tiles, numbers, and what is compiled in."""

from dataclasses import dataclass, replace
from typing import Any, Final

from adaattn.backends.device.launch import Launch
from adaattn.backends.triton.arguments import Arguments, MaskLayout
from adaattn.backends.triton.launch import HALVED_STEP, Tile, is_halved, padded
from adaattn.spec import Align, AttentionProblem, MaskKind, Precision

__all__ = ["GradientArguments", "Layout"]

_INT32: Final = 2**31
_SUM_ROWS: Final = 32
"""Rows of one program that sums products of outputs and gradients."""

_KEY_TILES: Final = {
    64: Tile(rows=32, keys=128, warps=4, stages=3),
    128: Tile(rows=32, keys=64, warps=4, stages=2),
    256: Tile(rows=32, keys=64, warps=8, stages=2),
}
"""By columns, in 16 bits, of the gradients of keys and values.

On an H200 the fastest of four to six each, or within 5 % of it in half of the shared memory, which
smaller cards lack: 64 x 128 with 8 warps at 128 columns, 64 x 64 in causal order at 64."""

_ROW_TILES: Final = {
    64: Tile(rows=64, keys=64, warps=4, stages=3),
    128: Tile(rows=64, keys=64, warps=4, stages=2),
    256: Tile(rows=64, keys=32, warps=4, stages=2),
}
"""Likewise of those of queries: within 5 % of the fastest of four, 7 % at 256 columns."""

_WIDE_KEY_TILES: Final = {
    64: Tile(rows=32, keys=32, warps=4, stages=2),
    128: Tile(rows=32, keys=16, warps=4, stages=1),
    256: Tile(rows=16, keys=16, warps=8, stages=1),
}
_WIDE_ROW_TILES: Final = {
    64: Tile(rows=32, keys=32, warps=4, stages=2),
    128: Tile(rows=32, keys=32, warps=8, stages=1),
    256: Tile(rows=16, keys=16, warps=8, stages=1),
}
"""The same in fp32, whose products are three of tf32 each."""

_HALVED_KEY_TILES: Final = {
    64: Tile(rows=64, keys=64, warps=4, stages=1),
    128: Tile(rows=64, keys=128, warps=8, stages=1),
}
_HALVED_ROW_TILES: Final = {
    64: Tile(rows=64, keys=64, warps=4, stages=2),
    128: Tile(rows=128, keys=32, warps=8, stages=3),
}
"""The same of fp32 in halves on an H200, both passes in causal order: over 2048 tokens of 12
(`gradients_fp32_h200.json`), over 1024 of 13 (`gradients_fp32_short_h200.json`), where the backward
pass takes 0.95 and 0.985 of the time with 128 rows, 64 keys, 8 warps and one stage."""

_HALVED_TOGETHER: Final = 64
"""Columns up to which one kernel has the gradients of keys and of values. With 128 both sums and a
product take more registers than there are; apart a fifth product is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the tensors of a backward pass lie: strides of the first three dimensions.

    Args:
        sizes: B, Hq, Hkv, Sq and Sk.
        query: strides, and so on.
        key: likewise.
        value: likewise.
        output: likewise.
        upstream: of the gradient of the output.
        query_gradient: of what is written.
        key_gradient: likewise.
        value_gradient: likewise.
        mask: how the mask lies.
        slope: ALiBi's slopes from one sequence to the next.
        sequences: that are packed.
        listed: strides of the counts of blocks over batch and heads, and the room of a list.
        listing: the same of the lists of the blocks of keys.
    """

    sizes: tuple[int, int, int, int, int]
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    output: tuple[int, ...]
    upstream: tuple[int, ...]
    query_gradient: tuple[int, ...]
    key_gradient: tuple[int, ...]
    value_gradient: tuple[int, ...]
    mask: MaskLayout
    slope: int
    sequences: int
    listed: tuple[int, int, int]
    listing: tuple[int, int, int]


class GradientArguments:
    """The arguments of the backward kernels for one problem."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._forward = Arguments(problem)
        self._key_tile, self._row_tile = gradient_tiles(problem)

    @property
    def known_by(self) -> tuple[object, ...]:
        """What says, before there are tensors, which kernels a problem's training takes."""
        tiles = self._key_tile, self._row_tile
        return ("gradients", *self._forward.known_by, *tiles, self._problem.mask_requires_grad)

    @property
    def are_copied(self) -> bool:
        """Whether q, k and v lie so that the kernels read contiguous copies of them."""
        return self._forward.are_copied

    @property
    def align(self) -> int:
        """What strides of the output's gradient must be multiples of, in elements."""
        return self._forward.aligns[0]

    @property
    def keys_apart(self) -> bool:
        """Whether gradients of keys and of values are two launches: of halves one more product."""
        size = max(self._problem.head_dim, self._problem.value_dim)
        return self._forward.is_halved and size > _HALVED_TOGETHER

    def halves(self, layout: Layout) -> tuple[Launch, ...]:
        """Return the launches of what takes q, k, v and the output's gradient apart, if any do."""
        if not self._forward.is_halved:
            return ()
        batch, heads, kv_heads, len_q, len_k = layout.sizes
        columns, value_columns = self._problem.head_dim, self._problem.value_dim
        align, own = self._forward.given_align, self.align
        return tuple(
            self._forward.halve(strides, batch, *sizes)
            for strides, *sizes in (
                (layout.query, heads, len_q, columns, align),
                (layout.key, kv_heads, len_k, columns, align),
                (layout.value, kv_heads, len_k, value_columns, align),
                (layout.upstream, heads, len_q, value_columns, own),
            )
        )

    def _read(self, layout: Layout) -> Layout:
        """Return how what the kernels read lies: halves where there are some."""
        if not self._forward.is_halved:
            return layout
        _, heads, kv_heads, len_q, len_k = layout.sizes
        query, upstream = self._forward.halved_strides(heads, len_q)
        key, value = self._forward.halved_strides(kv_heads, len_k)
        return replace(layout, query=query, key=key, value=value, upstream=upstream)

    def sums(self, layout: Layout) -> Launch:
        """Return the launch of what sums the products of outputs and their gradients."""
        batch, heads, _, len_q, _ = layout.sizes
        columns = self._problem.value_dim
        return Launch(
            module="device.rows",
            name="row_sums",
            grid=(batch * heads * -(-len_q // _SUM_ROWS), 1, 1),
            numbers=(*layout.output, *layout.upstream, heads, len_q),
            constants=(columns, padded(columns), _SUM_ROWS),
            options=(("num_warps", 4),),
        )

    def keys(self, layout: Layout) -> Launch:
        """Return the launch of what has the gradients of keys and values."""
        batch, _, kv_heads, _, len_k = layout.sizes
        tiles = self._tiles(len_k, self._key_tile.keys, layout.sequences)
        gradients = (*layout.key_gradient, *layout.value_gradient)
        return self._launch(
            "key_gradients", batch * kv_heads * tiles, self._key_tile, layout, gradients,
            (tiles, *layout.listing),
        )  # fmt: skip

    def rows(self, layout: Layout) -> Launch:
        """Return the launch of what has the gradients of queries, and of the terms of heads."""
        batch, heads, _, len_q, _ = layout.sizes
        tiles = self._tiles(len_q, self._row_tile.rows, layout.sequences)
        return self._launch(
            "row_gradients", batch * heads * tiles, self._row_tile, layout, layout.query_gradient,
            (tiles, *layout.listed),
        )  # fmt: skip

    def mask(self, layout: Layout, mask_sizes: tuple[int, ...]) -> Launch:
        """Return the launch of what has the gradient of an added mask of four sizes."""
        tile = self._row_tile
        batch, heads, _, *lengths = layout.sizes
        mask_batch, mask_heads, mask_rows, mask_keys = mask_sizes
        tiles = -(-mask_rows // tile.rows) * -(-mask_keys // tile.keys)
        before, after, dropout_p = self._forward.factors
        return Launch(
            module="triton.mask_gradients",
            name="mask_gradients",
            grid=(mask_batch * mask_heads * tiles, 1, 1),
            numbers=(
                *(before, after, dropout_p, *self._strides(layout)),
                *(*layout.mask.strides, layout.slope, batch, heads, *lengths),
                *(*self._forward.window, self._problem.dilation, layout.sequences),
                *(*layout.listed, *mask_sizes),
            ),
            constants=(
                *(*self._shape(tile), *self._features, *self._problem.block_size),
                *(mask_rows == 1, mask_keys == 1, *self._aligns, self._forward.dot),
            ),
            options=(("num_warps", tile.warps), ("num_stages", 1)),
        )

    def _launch(
        self,
        name: str,
        programs: int,
        tile: Tile,
        layout: Layout,
        gradients: tuple[int, ...],
        counts: tuple[int, ...],
    ) -> Launch:
        """Return the launch of one of the two kernels that loop over tiles."""
        problem, layout = self._problem, self._read(layout)
        before, after, dropout_p = self._forward.factors
        steps = (layout.query[2], layout.key[2], layout.value[2], layout.upstream[2])
        is_wide = max(steps) * problem.dilation * max(tile.rows, tile.keys) >= _INT32
        _, heads, _, *lengths = layout.sizes
        return Launch(
            module=f"triton.{name}",
            name=name,
            grid=(programs, 1, 1),
            numbers=(
                *(before, after, problem.scale, dropout_p, *self._strides(layout), *gradients),
                *(*layout.mask.strides, layout.slope, heads, *lengths),
                *(*self._forward.window, problem.dilation, layout.sequences, *counts),
            ),
            constants=(
                *(*self._shape(tile), layout.mask.kind, layout.mask.strides[2] != 0),
                *(*self._features, *problem.block_size),
                *(*self._aligns, is_wide, self._dot),
            ),
            options=(("num_warps", tile.warps), ("num_stages", tile.stages)),
        )

    def _strides(self, layout: Layout) -> tuple[int, ...]:
        """Return the strides of what all kernels read."""
        return (*layout.query, *layout.key, *layout.value, *layout.upstream)

    def _tiles(self, length: int, step: int, sequences: int) -> int:
        """Return the tiles of a head's rows, or keys, all classes of a dilation together."""
        dilation = self._problem.dilation
        if sequences:
            return (length // step + sequences) * dilation
        longest = -(-length // dilation)
        return -(-longest // step) * dilation

    def _shape(self, tile: Tile) -> tuple[Any, ...]:
        """Return what is compiled in of shapes and positions."""
        problem = self._problem
        left, right = self._forward.window
        return (
            *(tile.rows, tile.keys, problem.head_dim, problem.value_dim),
            *(padded(problem.head_dim), padded(problem.value_dim)),
            *(problem.group_size, problem.align is Align.BOTTOM_RIGHT),
            *(left >= 0, right >= 0, problem.dilation > 1, problem.num_sequences > 0),
        )

    @property
    def _features(self) -> tuple[bool, ...]:
        """What is compiled in of the rest: ALiBi, softcap, PTX's tanh, dropout."""
        has_alibi, _, *rest = self._forward.features
        return (has_alibi, *rest)

    @property
    def _dot(self) -> str:
        """The arithmetic of products, as in the forward kernel."""
        return "halves" if self._forward.is_halved else self._forward.dot

    @property
    def _aligns(self) -> tuple[int, int]:
        """What strides are known to be multiples of: of queries and outputs, of keys."""
        if self._forward.is_halved:
            return HALVED_STEP, HALVED_STEP
        return self._forward.aligns[0], self._forward.given_align


def gradient_tiles(problem: AttentionProblem) -> tuple[Tile, Tile]:
    """Return the tiles of the gradients of keys and values, and of those of queries.

    They depend on columns and on the sizes of listed blocks alone.

    Example:
        >>> from adaattn.testing import make_problem
        >>> keys, rows = gradient_tiles(make_problem(head_dim=64, precision=Precision.BF16))
        >>> keys.keys, rows.rows
        (128, 64)
    """
    size = min(max(padded(max(problem.head_dim, problem.value_dim)), 64), 256)
    if is_halved(problem):
        found = _HALVED_KEY_TILES[size], _HALVED_ROW_TILES[size]
    elif problem.precision is Precision.FP32:
        found = _WIDE_KEY_TILES[size], _WIDE_ROW_TILES[size]
    else:
        found = _KEY_TILES[size], _ROW_TILES[size]
    if problem.mask is not MaskKind.NONE:
        found = found[0], replace(found[1], stages=min(found[1].stages, 2))
    if not problem.has_blocks:
        return found
    rows, keys = (listed & -listed for listed in problem.block_size)
    first, second = (
        replace(tile, rows=min(tile.rows, rows), keys=min(tile.keys, keys)) for tile in found
    )
    return first, second
