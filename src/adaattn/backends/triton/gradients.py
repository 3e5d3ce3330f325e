"""The portable kernels with their gradients: a function that autograd knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch

from adaattn.backends.block_list import BlockList, list_strides, listed_first
from adaattn.backends.common import output_like, with_dense_columns
from adaattn.backends.compiled_before import note
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import Tensors
from adaattn.backends.masks import with_rank
from adaattn.backends.operators import GIVEN, Kept
from adaattn.backends.triton.arguments import MaskLayout
from adaattn.backends.triton.gradient_launch import GradientArguments, Layout
from adaattn.errors import UnsupportedError
from adaattn.hardware import on_clear
from adaattn.spec import AttentionProblem

__all__ = ["Attention", "Saved", "drawn_seed", "gradients", "gradients_in_graphs", "kept_rest"]

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


def drawn_seed(query: torch.Tensor) -> torch.Tensor:
    """Return the seed of a call's dropout, int64 [1], from its device's generator."""
    return torch.randint(2**62, (1,), device=query.device)


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
    return _backward(problem)(saved, upstream, lse_upstream, wanted)


def kept_rest(query: torch.Tensor) -> _Optional:
    """Return room for what rounding takes from the log-sum-exp; 16 bits are as right without."""
    return query.new_empty(query.shape[:3]) if query.dtype == torch.float32 else None


def gradients_in_graphs(
    tensors: Tensors,
    problem: AttentionProblem,
    kept: Kept,
    upstream: torch.Tensor,
    lse_upstream: torch.Tensor,
    wanted: Sequence[bool],
) -> tuple[_Optional, ...]:
    """Return the gradients of a call in the order of `GIVEN`, as an operator asks for them."""
    saved = Saved(
        query=tensors.query,
        key=tensors.key,
        value=tensors.value,
        output=kept.output,
        lse=kept.lse,
        lse_rest=kept.lse_rest,
        mask=tensors.mask,
        sinks=tensors.sinks,
        slopes=tensors.alibi_slopes,
        starts_q=tensors.cu_seqlens_q,
        starts_k=tensors.cu_seqlens_k,
        seed=kept.seed,
        blocks=tensors.blocks,
        head_terms=tensors.head_terms,
    )
    names = frozenset(name for name, wants in zip(GIVEN, wanted, strict=True) if wants)
    found = gradients(problem, saved, upstream, lse_upstream, names)
    return tuple(map(found.get, GIVEN))


@lru_cache(maxsize=_KEPT)
def _backward(problem: AttentionProblem) -> "_Backward":
    """Return what launches the backward pass of a problem."""
    return _Backward(problem)


on_clear(_backward.cache_clear)


class _Backward:
    """Launches the backward kernels of one problem; lengths and strides are those of each call."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._arguments = GradientArguments(problem)
        self._is_noted = False

    def __call__(
        self,
        saved: Saved,
        upstream: torch.Tensor,
        lse_upstream: _Optional,
        wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients that are wanted."""
        arguments, problem = self._arguments, self._problem
        upstream = _readable(upstream, arguments.align)
        found = self._outputs(saved)
        if arguments.are_copied:
            query, key, value = (it.contiguous() for it in (saved.query, saved.key, saved.value))
            saved = replace(saved, query=query, key=key, value=value)
        delta = torch.empty_like(saved.lse)
        mask = None if saved.mask is None else with_rank(saved.mask, 4)
        layout = _layout(saved, upstream, found, mask)
        if lse_upstream is not None:
            lse_upstream = lse_upstream.contiguous()
        arguments.sums(layout)(saved.output, upstream, lse_upstream, delta)
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        slopes = None if saved.slopes is None else with_dense_columns(saved.slopes)
        terms = saved.head_terms or HeadTerms()
        numbers = [
            None if it is None else it.contiguous()
            for it in (terms.scale, terms.window, terms.softcap)
        ]
        numbers.append(saved.lse_rest)
        read = (saved.query, saved.key, saved.value, upstream, saved.lse, delta, mask, slopes)
        starts = (saved.starts_q, saved.starts_k, saved.seed)
        blocks = saved.blocks
        lists: tuple[_Optional, _Optional] = (None, None)
        if blocks is not None:
            lists = blocks.counts, blocks.indices
        if wanted & {"key", "value"}:
            listing = lists if blocks is None else _listing(blocks, problem.len_k)
            run = arguments.keys(layout)
            run(*read, *starts, *listing, *numbers, found["key"], found["value"])
        sums: dict[str, torch.Tensor] = {
            name: torch.zeros_like(delta) for name in _SUMS if name in wanted
        }
        if wanted & {"query", *_SUMS}:
            run = arguments.rows(layout)
            run(
                *read,
                *starts,
                *lists,
                *numbers,
                found["query"],
                *(sums.get(name) for name in _SUMS),
            )
        if "mask" in wanted:
            assert mask is not None
            made = mask.new_empty(mask.shape)
            run = arguments.mask(layout, tuple(mask.shape))
            run(*read, *starts, *lists, *numbers, made)
            assert saved.mask is not None
            found["mask"] = made.view(saved.mask.shape)
        found |= self._of_heads(saved, delta, sums, wanted)
        if upstream.is_cuda and not self._is_noted:
            self._is_noted = True
            note(arguments.known_by)
        return {name: found[name] for name in wanted}

    def _outputs(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return empty gradients of queries, keys and values; tokens of no sequence have none."""
        named = {"query": saved.query, "key": saved.key, "value": saved.value}
        found = {name: output_like(item, item.shape[3]) for name, item in named.items()}
        if saved.starts_q is not None:
            for item in found.values():
                item.zero_()
        return found

    def _of_heads(
        self,
        saved: Saved,
        delta: torch.Tensor,
        sums: dict[str, torch.Tensor],
        wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of what a head has one of, from those of its rows."""
        found = {}
        if "slopes" in sums:
            assert saved.slopes is not None
            by_head = sums["slopes"].sum(-1).sum_to_size(with_rank(saved.slopes, 2).shape)
            found["slopes"] = by_head.reshape(saved.slopes.shape).to(saved.slopes.dtype)
        terms = saved.head_terms
        for name, numbers in (
            () if terms is None else (("scale", terms.scale), ("softcap", terms.softcap))
        ):
            if name in sums:
                assert numbers is not None
                found[name] = sums[name].sum((0, 2)).to(numbers.dtype)
        if "sinks" in wanted:
            assert saved.sinks is not None
            # The weight of the sink, whose value is 0; rows that see nothing have none.
            weights = torch.exp(saved.sinks.float()[:, None] - saved.lse)
            weights = weights.masked_fill(saved.lse == -torch.inf, 0.0)
            found["sinks"] = -(weights * delta).sum((0, 2)).to(saved.sinks.dtype)
        return found


_SUMS: Final = ("slopes", "scale", "softcap")
"""What a head has one of, in the order in which the kernel of rows takes their sums."""


def _readable(upstream: torch.Tensor, align: int) -> torch.Tensor:
    """Return a gradient of the output as the kernels read it: adjacent columns, aligned rows."""
    odd = any(step % align for step in upstream.stride()[:3])
    return upstream.contiguous() if odd or upstream.stride(3) != 1 else upstream


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
    return Layout(
        sizes=(batch, heads, key.shape[1], len_q, key.shape[2]),
        query=query.stride()[:3],
        key=key.stride()[:3],
        value=saved.value.stride()[:3],
        output=saved.output.stride()[:3],
        upstream=upstream.stride()[:3],
        query_gradient=found["query"].stride()[:3],
        key_gradient=found["key"].stride()[:3],
        value_gradient=found["value"].stride()[:3],
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


class Attention(torch.autograd.Function):
    """The kernels of a problem as autograd sees them.

    What is computed, and its gradients, are those of `adaattn.backends.triton`; the row outputs
    beside the log-sum-exp have none. A second derivative raises an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., tuple[Any, ...]],
        problem: AttentionProblem,
        beside: tuple[Any, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: _Optional,
        sinks: _Optional,
        slopes: _Optional,
        scale: _Optional,
        softcap: _Optional,
    ) -> tuple[_Optional, ...]:
        """Return the output and the statistics of rows, in the order of `STATISTICS`."""
        starts_q, starts_k, blocks, window = beside
        terms = None
        if not scale is window is softcap is None:
            terms = HeadTerms(scale=scale, window=window, softcap=softcap)
        seed = drawn_seed(query) if problem.dropout_p else None
        given = (query, key, value, mask, sinks, slopes, starts_q, starts_k, blocks, terms)
        rest = kept_rest(query)
        output, *statistics = run(*given, seed=seed, lse_rest=rest)
        ctx.problem, ctx.blocks = problem, blocks
        ctx.save_for_backward(
            *(query, key, value, output, statistics[0], rest, mask, sinks, slopes),
            *(starts_q, starts_k, seed, scale, window, softcap),
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(item for item in statistics[1:] if item is not None))
        return (output, *statistics)

    @staticmethod
    def backward(ctx: Any, upstream: _Optional, lse_upstream: _Optional, *rest: Any) -> Any:
        """Return the gradients of what wants one."""
        del rest
        needs = ctx.needs_input_grad[-len(GIVEN) :]
        wanted = frozenset(name for name, need in zip(GIVEN, needs, strict=True) if need)
        given = (ctx.problem, ctx.blocks, wanted, upstream, lse_upstream, *ctx.saved_tensors)
        found = _Gradients.apply(*given)  # type: ignore[no-untyped-call]
        return (None, None, None, *found)


class _Gradients(torch.autograd.Function):
    """The gradients of a call, which have none themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: AttentionProblem,
        blocks: BlockList | None,
        wanted: frozenset[str],
        upstream: _Optional,
        lse_upstream: _Optional,
        *tensors: _Optional,
    ) -> tuple[_Optional, ...]:
        """Return the gradients in the order of `GIVEN`; None of what wants none."""
        del ctx
        *named, scale, window, softcap = tensors
        terms = None
        if not scale is window is softcap is None:
            terms = HeadTerms(scale=scale, window=window, softcap=softcap)
        fields: dict[str, Any] = dict(zip(_SAVED, named, strict=True))
        saved = Saved(**fields, blocks=blocks, head_terms=terms)
        if upstream is None:
            if lse_upstream is None:
                return (None,) * len(GIVEN)
            upstream = torch.zeros_like(saved.output)
        found = gradients(problem, saved, upstream, lse_upstream, wanted)
        return tuple(map(found.get, GIVEN))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Refuse."""
        del ctx, upstream
        raise UnsupportedError(
            "triton",
            ("its gradients have no derivatives themselves",),
            'Pass backend="reference" where second derivatives are wanted.',
        )


_SAVED: Final = (
    *("query", "key", "value", "output", "lse", "lse_rest", "mask", "sinks", "slopes"),
    *("starts_q", "starts_k", "seed"),
)
