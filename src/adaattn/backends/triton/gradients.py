"""The backward pass of the portable kernels: what is launched for which gradients.

One kernel has the gradients of a block of keys, of all heads and rows that see it; one has those of
a block of rows; one has those of an added mask. Nothing is added up by atomics: equal inputs give
equal bits. Scores are computed anew in each, as in `forward`, and nothing of the size of the scores
is stored. Positions, classes of a dilation and lists are those of `forward`. Tiles of the first
kernel are [keys, rows], of the others [rows, keys].
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from adaattn.backends.allocation import output_like, unfilled
from adaattn.backends.block_list import BlockList, list_strides, listed_first
from adaattn.backends.common import layout_facts, with_dense_columns
from adaattn.backends.compiled_before import note
from adaattn.backends.device.launch import Launch
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import Tensors
from adaattn.backends.masks import as_bytes, with_rank
from adaattn.backends.operators import Kept
from adaattn.backends.own_kernels import kept_by_problem, sinks_gradient
from adaattn.backends.triton.arguments import MaskLayout, at_multiples, in_halves
from adaattn.backends.triton.gradient_launch import GradientArguments, Layout
from adaattn.backends.triton.launch import lift_sizes
from adaattn.spec import AttentionProblem

__all__ = ["backward_of"]

_Optional = torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launches:
    """The launches of one call, for tensors that lie as those of its first.

    Args:
        known: what they follow from.
        halves: of q, k, v and the output's gradient; none where they are read as they are.
        sums: of the products of outputs and gradients.
        keys: of the gradients of keys and values.
        rows: of those of queries, and of what a head has one of.
        mask: of that of an added mask; None where there is none.
    """

    known: tuple[Any, ...]
    halves: tuple[Launch, ...]
    sums: Launch
    keys: Launch
    rows: Launch
    mask: Launch | None


class _Backward:
    """Launches the backward kernels of one problem; lengths and strides are those of each call."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._arguments = GradientArguments(problem)
        self._launches: _Launches | None = None
        self._is_noted = False

    def __call__(
        self,
        tensors: Tensors,
        kept: Kept,
        upstream: torch.Tensor,
        lse_upstream: _Optional,
        wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients that are wanted."""
        layout = layout_facts(tensors.query, tensors.key, tensors.value, mask=tensors.mask)
        if any(getattr(self._problem, name) != fact for name, fact in layout.items()):
            # Hooks on what is saved have laid it out anew.
            other = backward_of(replace(self._problem, **layout))
            return other(tensors, kept, upstream, lse_upstream, wanted)
        found = _outputs(tensors, wanted)
        tensors = self._readable(tensors)
        upstream = _aligned(upstream, self._arguments.align)
        mask = None if tensors.mask is None else with_rank(tensors.mask, 4)
        if lse_upstream is not None:
            lse_upstream = lse_upstream.contiguous()
        launches = self._prepared(tensors, kept, upstream, found, mask, wanted)
        delta = unfilled(kept.lse, kept.lse.shape)
        launches.sums(kept.output, upstream, lse_upstream, delta)
        if tensors.cu_seqlens_q is not None:  # tokens of no sequence have no output
            delta.masked_fill_(kept.lse == -torch.inf, 0.0)
        given = as_bytes(mask)
        matrices: tuple[torch.Tensor, ...]
        matrices = (tensors.query, tensors.key, tensors.value, upstream)
        low: tuple[_Optional, ...] = (None,) * 8
        if launches.halves:
            matrices, low = _halved(launches.halves, matrices)
        terms = tensors.head_terms or HeadTerms()
        read = (*matrices, kept.lse, delta, given)
        beside = (tensors.alibi_slopes, tensors.cu_seqlens_q, tensors.cu_seqlens_k, kept.seed)
        numbers = (terms.scale, terms.window, terms.softcap, kept.lse_rest)
        blocks = tensors.blocks
        lists: tuple[_Optional, _Optional] = (None, None)
        if blocks is not None:
            lists = blocks.counts, blocks.indices
        sums: dict[str, torch.Tensor] = {
            name: torch.zeros_like(delta) for name in _SUMS if name in wanted
        }
        if "query" in found:
            of_heads = (sums.get(name) for name in _SUMS)
            exact = (lse_upstream, delta) if wanted & _ADDED_UP else (None, None)
            launches.rows(*read, *beside, *lists, *numbers, *low, found["query"], *of_heads, *exact)
        if "key" in found:
            listing = lists if blocks is None else _listing(blocks, tensors.key.shape[2])
            given_keys = (*read, *beside, *listing, *numbers, *low)
            if self._arguments.keys_apart:
                if "value" in wanted:
                    launches.keys(*given_keys, None, found["value"])
                if "key" in wanted:
                    launches.keys(*given_keys, found["key"], None)
            else:
                launches.keys(*given_keys, found["key"], found["value"])
        if launches.mask is not None:
            assert tensors.mask is not None and mask is not None and not launches.halves
            made = unfilled(mask, mask.shape)
            launches.mask(*read, *beside, *lists, *numbers, made)
            found["mask"] = made.view(tensors.mask.shape)
        found |= _of_heads(tensors, kept, delta, sums, wanted)
        if upstream.is_cuda and not self._is_noted and {"key", "query"} <= found.keys():
            self._is_noted = True
            note(self._arguments.known_by)
        return {name: found[name] for name in wanted}

    def _readable(self, tensors: Tensors) -> Tensors:
        """Return the tensors of a call as the kernels read them."""
        query, key, value = tensors.query, tensors.key, tensors.value
        if self._arguments.are_copied:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        query, key, value = map(at_multiples, (query, key, value))
        slopes = None if tensors.alibi_slopes is None else with_dense_columns(tensors.alibi_slopes)
        terms = tensors.head_terms
        if terms is not None:
            numbers = (terms.scale, terms.window, terms.softcap)
            terms = HeadTerms.given(*(None if it is None else it.contiguous() for it in numbers))
        made = (query, key, value, slopes, terms)
        as_given = (tensors.query, tensors.key, tensors.value, tensors.alibi_slopes, None)
        if all(item is given for item, given in zip(made, as_given, strict=True)):
            return tensors
        kv = replace(tensors.kv, key=key, value=value)
        return replace(tensors, query=query, kv=kv, alibi_slopes=slopes, head_terms=terms)

    def _prepared(
        self,
        tensors: Tensors,
        kept: Kept,
        upstream: torch.Tensor,
        found: dict[str, torch.Tensor],
        mask: _Optional,
        wanted: frozenset[str],
    ) -> _Launches:
        """Return the launches for tensors that lie as these."""
        layout = _layout(tensors, kept, upstream, found, mask)
        terms = tensors.head_terms or HeadTerms()
        others = (tensors.alibi_slopes, terms.scale, terms.window, terms.softcap)
        dtypes = (None if it is None else it.dtype for it in (*others, kept.lse_rest))
        known = (layout, wanted, tensors.query.get_device(), *dtypes)
        if self._launches is None or self._launches.known != known:
            arguments, of_mask = self._arguments, None
            if mask is not None and "mask" in wanted:
                of_mask = arguments.mask(layout, tuple(mask.shape))
            self._launches = _Launches(
                known=known,
                halves=arguments.halves(layout),
                sums=arguments.sums(layout),
                keys=arguments.keys(layout),
                rows=arguments.rows(layout),
                mask=of_mask,
            )
        return self._launches


_SUMS: Final = ("slopes", "scale", "softcap")
"""What a head has one of, in the order in which the kernel of rows takes their sums."""

_ADDED_UP: Final = frozenset({"mask", *_SUMS})
"""Sums over scores whose terms cancel: the kernel of rows finds delta for them, not the output."""


backward_of = kept_by_problem(_Backward)


def _outputs(tensors: Tensors, wanted: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return empty gradients of queries, keys and values, by kernel; tokens of no sequence: 0."""
    named = {}
    if wanted & {"query", *_ADDED_UP}:
        named["query"] = tensors.query
    if wanted & {"key", "value"}:
        named |= {"key": tensors.key, "value": tensors.value}
    found = {name: output_like(item, item.shape[3]) for name, item in named.items()}
    if tensors.cu_seqlens_q is not None:
        for item in found.values():
            item.zero_()
    return found


def _of_heads(
    tensors: Tensors,
    kept: Kept,
    delta: torch.Tensor,
    sums: dict[str, torch.Tensor],
    wanted: frozenset[str],
) -> dict[str, torch.Tensor]:
    """Return the gradients of what a head has one of, from those of its rows."""
    found = {}
    if "slopes" in sums:
        assert tensors.alibi_slopes is not None
        by_head = sums["slopes"].sum(-1).sum_to_size(with_rank(tensors.alibi_slopes, 2).shape)
        found["slopes"] = by_head.reshape(tensors.alibi_slopes.shape).to(tensors.alibi_slopes.dtype)
    for name in {"scale", "softcap"} & sums.keys():
        found[name] = sums[name].sum((0, 2)).to(getattr(tensors.head_terms, name).dtype)
    if "sinks" in wanted:
        assert tensors.sinks is not None
        found["sinks"] = sinks_gradient(tensors.sinks, kept.lse, delta)
    return found


def _halved(
    launches: tuple[Launch, ...], read: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return high halves of matrices; and their low ones, and then the powers of two of their rows.

    Args:
        launches: of what takes each apart.
        read: fp32 [B, H, S, D] each.
    """
    high, low, powers = [], [], []
    for take_apart, matrix in zip(launches, read, strict=True):
        batch, heads, rows, _ = matrix.shape
        num_lifts, num_bounds = lift_sizes(batch * heads, rows)
        lifts = unfilled(matrix, (num_lifts + num_bounds,))
        both = in_halves(take_apart, matrix, lifts, lifts[num_lifts:])
        high.append(both[0])
        low.append(both[1])
        powers.append(lifts)
    return tuple(high), (*low, *powers)


def _aligned(upstream: torch.Tensor, align: int) -> torch.Tensor:
    """Return a gradient of the output as the kernels read it: adjacent columns, aligned rows."""
    odd = any(step % align for step in upstream.stride()[:3])
    dense = upstream.contiguous() if odd or upstream.stride(3) != 1 else upstream
    return at_multiples(dense)


def _layout(
    tensors: Tensors,
    kept: Kept,
    upstream: torch.Tensor,
    found: dict[str, torch.Tensor],
    mask: _Optional,
) -> Layout:
    """Return how the tensors of a call lie."""
    query, key, blocks = tensors.query, tensors.key, tensors.blocks
    batch, heads, len_q, _ = query.shape
    slopes, starts = tensors.alibi_slopes, tensors.cu_seqlens_q
    by_batch = slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1
    listed = listing = (0, 0, 0)
    if blocks is not None:
        lists, heads_listed = blocks.counts.shape[:2]
        num_keys = -(-key.shape[2] // blocks.block_k)
        shapes = blocks.indices.shape, (lists, heads_listed, num_keys, blocks.counts.shape[2])
        listed, listing = ((*list_strides(shape), shape[-1]) for shape in shapes)
    written = {name: item.stride()[:3] for name, item in found.items()}
    nowhere = (0, 0, 0)
    return Layout(
        sizes=(batch, heads, key.shape[1], len_q, key.shape[2]),
        query=query.stride()[:3],
        key=key.stride()[:3],
        value=tensors.value.stride()[:3],
        output=kept.output.stride()[:3],
        upstream=upstream.stride()[:3],
        query_gradient=written.get("query", nowhere),
        key_gradient=written.get("key", nowhere),
        value_gradient=written.get("value", nowhere),
        mask=MaskLayout() if mask is None else MaskLayout.of(mask),
        slope=slopes.stride(0) if slopes is not None and by_batch else 0,
        sequences=0 if starts is None else starts.shape[0] - 1,
        listed=listed,
        listing=listing,
    )


def _listing(blocks: BlockList, len_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of rows that list each block of keys; made on the device."""
    mask = blocks.to_mask(-(-len_k // blocks.block_k))
    return listed_first(mask.mT)
