"""The backward pass of the portable kernels: what is launched for which gradients."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch

from adaattn.backends.block_list import BlockList, list_strides, listed_first
from adaattn.backends.common import layout_facts, output_like, with_dense_columns
from adaattn.backends.compiled_before import note
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.masks import with_rank
from adaattn.backends.triton.arguments import MaskLayout, at_multiples
from adaattn.backends.triton.compiled import Launch
from adaattn.backends.triton.gradient_launch import GradientArguments, Layout
from adaattn.hardware import on_clear
from adaattn.spec import AttentionProblem

__all__ = ["Saved", "gradients"]

_KEPT: Final = 256

_Optional = torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a backward pass reads: tensors of the call, and of its forward pass.

    Args:
        query: [B, Hq, Sq, D], and so on as in `Tensors`.
        key: likewise.
        value: likewise.
        output: [B, Hq, Sq, Dv].
        lse: fp32 [B, Hq, Sq].
        lse_rest: what rounding took from it, likewise; None where it does not matter.
        mask: likewise.
        sinks: likewise.
        slopes: likewise, or [Hq].
        starts_q: likewise.
        starts_k: likewise.
        seed: int64 [1], of dropout.
        blocks: likewise.
        head_terms: likewise.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    lse_rest: _Optional = None
    mask: _Optional = None
    sinks: _Optional = None
    slopes: _Optional = None
    starts_q: _Optional = None
    starts_k: _Optional = None
    seed: _Optional = None
    blocks: BlockList | None = None
    head_terms: HeadTerms | None = None


def gradients(
    problem: AttentionProblem,
    saved: Saved,
    upstream: torch.Tensor,
    lse_upstream: _Optional,
    wanted: frozenset[str],
) -> dict[str, torch.Tensor]:
    """Return the gradients of a call by the names of its tensors.

    Args:
        problem: of the call.
        saved: of the call.
        upstream: gradient of the output, [B, Hq, Sq, Dv].
        lse_upstream: gradient of the log-sum-exp, fp32 [B, Hq, Sq]; None is zero.
        wanted: names, of `Saved` or of `HeadTerms`.

    Raises:
        ExecutorError: a kernel cannot be compiled here.
    """
    # Hooks on what is saved may have laid it out anew.
    problem = replace(problem, **layout_facts(saved.query, saved.key, saved.value))
    return _backward(problem)(saved, upstream, lse_upstream, wanted)


@lru_cache(maxsize=_KEPT)
def _backward(problem: AttentionProblem) -> "_Backward":
    """Return what launches the backward pass of a problem."""
    return _Backward(problem)


on_clear(_backward.cache_clear)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launches:
    """The launches of one call, for tensors that lie as those of its first.

    Args:
        known: what they follow from.
        sums: of the products of outputs and gradients.
        keys: of the gradients of keys and values.
        rows: of those of queries, and of what a head has one of.
        mask: of that of an added mask; None where there is none.
    """

    known: tuple[Any, ...]
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
        saved: Saved,
        upstream: torch.Tensor,
        lse_upstream: _Optional,
        wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients that are wanted."""
        found = _outputs(saved, wanted)
        saved = self._readable(saved)
        upstream = _aligned(upstream, self._arguments.align)
        mask = None if saved.mask is None else with_rank(saved.mask, 4)
        if lse_upstream is not None:
            lse_upstream = lse_upstream.contiguous()
        launches = self._prepared(saved, upstream, found, mask, (wanted, lse_upstream is None))
        delta = torch.empty_like(saved.lse)
        launches.sums(saved.output, upstream, lse_upstream, delta)
        if saved.starts_q is not None:  # tokens of no sequence have no output
            delta.masked_fill_(saved.lse == -torch.inf, 0.0)
        given = mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask
        terms = saved.head_terms or HeadTerms()
        read = (saved.query, saved.key, saved.value, upstream, saved.lse, delta, given)
        beside = (saved.slopes, saved.starts_q, saved.starts_k, saved.seed)
        numbers = (terms.scale, terms.window, terms.softcap, saved.lse_rest)
        blocks = saved.blocks
        lists: tuple[_Optional, _Optional] = (None, None)
        if blocks is not None:
            lists = blocks.counts, blocks.indices
        if "key" in found:
            listing = lists if blocks is None else _listing(blocks, saved.key.shape[2])
            launches.keys(*read, *beside, *listing, *numbers, found["key"], found["value"])
        sums: dict[str, torch.Tensor] = {
            name: torch.zeros_like(delta) for name in _SUMS if name in wanted
        }
        if "query" in found:
            of_heads = (sums.get(name) for name in _SUMS)
            launches.rows(*read, *beside, *lists, *numbers, found["query"], *of_heads)
        if launches.mask is not None:
            assert saved.mask is not None and mask is not None
            made = mask.new_empty(mask.shape)
            launches.mask(*read, *beside, *lists, *numbers, made)
            found["mask"] = made.view(saved.mask.shape)
        found |= _of_heads(saved, delta, sums, wanted)
        if upstream.is_cuda and not self._is_noted and {"key", "query"} <= found.keys():
            self._is_noted = True
            note(self._arguments.known_by)
        return {name: found[name] for name in wanted}

    def _readable(self, saved: Saved) -> Saved:
        """Return the tensors of a call as the kernels read them."""
        query, key, value = saved.query, saved.key, saved.value
        if self._arguments.are_copied:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        query, key, value = map(at_multiples, (query, key, value))
        slopes = None if saved.slopes is None else with_dense_columns(saved.slopes)
        terms = saved.head_terms
        if terms is not None:
            numbers = (terms.scale, terms.window, terms.softcap)
            terms = HeadTerms.given(*(None if it is None else it.contiguous() for it in numbers))
        return replace(saved, query=query, key=key, value=value, slopes=slopes, head_terms=terms)

    def _prepared(
        self,
        saved: Saved,
        upstream: torch.Tensor,
        found: dict[str, torch.Tensor],
        mask: _Optional,
        asked: tuple[frozenset[str], bool],
    ) -> _Launches:
        """Return the launches for tensors that lie as these."""
        layout = _layout(saved, upstream, found, mask)
        terms = saved.head_terms or HeadTerms()
        others = (saved.slopes, terms.scale, terms.window, terms.softcap)
        dtypes = (None if it is None else it.dtype for it in (*others, saved.lse_rest))
        known = (layout, asked, saved.query.get_device(), *dtypes)
        if self._launches is None or self._launches.known != known:
            arguments, of_mask = self._arguments, None
            if mask is not None and "mask" in asked[0]:
                of_mask = arguments.mask(layout, tuple(mask.shape))
            self._launches = _Launches(
                known=known,
                sums=arguments.sums(layout),
                keys=arguments.keys(layout),
                rows=arguments.rows(layout),
                mask=of_mask,
            )
        return self._launches


_SUMS: Final = ("slopes", "scale", "softcap")
"""What a head has one of, in the order in which the kernel of rows takes their sums."""


def _outputs(saved: Saved, wanted: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return empty gradients of queries, keys and values, by kernel; tokens of no sequence: 0."""
    named = {}
    if wanted & {"query", *_SUMS}:
        named["query"] = saved.query
    if wanted & {"key", "value"}:
        named |= {"key": saved.key, "value": saved.value}
    found = {name: output_like(item, item.shape[3]) for name, item in named.items()}
    if saved.starts_q is not None:
        for item in found.values():
            item.zero_()
    return found


def _of_heads(
    saved: Saved, delta: torch.Tensor, sums: dict[str, torch.Tensor], wanted: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Return the gradients of what a head has one of, from those of its rows."""
    found = {}
    if "slopes" in sums:
        assert saved.slopes is not None
        by_head = sums["slopes"].sum(-1).sum_to_size(with_rank(saved.slopes, 2).shape)
        found["slopes"] = by_head.reshape(saved.slopes.shape).to(saved.slopes.dtype)
    for name in {"scale", "softcap"} & sums.keys():
        found[name] = sums[name].sum((0, 2)).to(getattr(saved.head_terms, name).dtype)
    if "sinks" in wanted:
        assert saved.sinks is not None
        # The weight of the sink, whose value is 0; rows that see nothing have none.
        weights = torch.exp(saved.sinks.float()[:, None] - saved.lse)
        weights = weights.masked_fill(saved.lse == -torch.inf, 0.0)
        found["sinks"] = -(weights * delta).sum((0, 2)).to(saved.sinks.dtype)
    return found


def _aligned(upstream: torch.Tensor, align: int) -> torch.Tensor:
    """Return a gradient of the output as the kernels read it: adjacent columns, aligned rows."""
    odd = any(step % align for step in upstream.stride()[:3])
    dense = upstream.contiguous() if odd or upstream.stride(3) != 1 else upstream
    return at_multiples(dense)


def _layout(
    saved: Saved, upstream: torch.Tensor, found: dict[str, torch.Tensor], mask: _Optional
) -> Layout:
    """Return how the tensors of a call lie."""
    query, key, blocks = saved.query, saved.key, saved.blocks
    batch, heads, len_q, _ = query.shape
    slopes, starts = saved.slopes, saved.starts_q
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
        value=saved.value.stride()[:3],
        output=saved.output.stride()[:3],
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
    counts, indices = listed_first(mask.mT.contiguous())
    return counts, indices.contiguous()
