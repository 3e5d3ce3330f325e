"""Both sides of a problem of `benchmarks.regret` as function calls, and what they should give.

The peer is ``F.scaled_dot_product_attention`` with a mask made before, where it has no word for
what is asked; and attention written out where no mask says it either.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import adaattn
from adaattn.backends.interface import Result, Tensors
from adaattn.call.audit import is_lossy
from adaattn.spec import Align, AttentionProblem, MaskKind
from adaattn.testing import (
    assert_gradients_match,
    assert_matches,
    assert_within_budget,
    attention,
    cast_tensors,
    gradients_of,
    make_problem,
    num_summands,
    term_sizes,
    visible_keys,
)
from benchmarks.failures import blamed
from benchmarks.ops.inputs import alibi_mask
from benchmarks.regret_problems import Kind, Problem
from benchmarks.written_out import written_out

__all__ = [
    "OURS",
    "PEER",
    "Calls",
    "allowed_error",
    "function_calls",
    "kept",
    "our_keywords",
    "positional",
    "recorded",
    "tensors_of",
]

OURS, PEER = "adaattn", "F.sdpa"

_CHECKED = 2**22
"""Scores, or elements of q and k, up to which a whole result is checked in float64, in seconds."""

_KEPT_SHARE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Both sides of one problem.

    Args:
        ours: the call to be timed.
        peer: the same by ``F.scaled_dot_product_attention``.
        check: raises `FailedError` unless both are right.
    """

    ours: Callable[[], Any]
    peer: Callable[[], Any]
    check: Callable[[], None]


def recorded(call: Callable[[], Any]) -> tuple[Any, list[adaattn.AttentionEvent]]:
    """Return what a call returns, and the events of it that are ours."""
    events: list[adaattn.AttentionEvent] = []
    with adaattn.record_events(events.append):
        result = call()
    return result, events


def allowed_error(events: list[adaattn.AttentionEvent]) -> float:
    """Return the error that calls may have by their budgets; 0, as exact, where nothing is lost."""
    lossy = [event for event in events if is_lossy(event.decision.plan, event.problem)]
    return max((event.decision.plan.error_budget for event in lossy), default=0.0)


@contextlib.contextmanager
def function_calls(problem: Problem, device: str, policy: str) -> Iterator[Calls]:
    """Yield the calls of the two functions."""
    tensors = tensors_of(problem, device)
    spec = _spec(problem)
    inputs = (tensors.query, tensors.key, tensors.value)
    shared = {"enable_gqa": True} if problem.heads != problem.kv_heads else {}
    ours_keywords = shared | our_keywords(problem, tensors)
    if policy != "quality":
        ours_keywords["policy"] = policy
    peer_keywords: dict[str, Any] = {}
    if problem.softcap or problem.has_sinks:
        hidden = ~visible_keys(tensors, spec)[0, 0]
        hidden = hidden if bool(hidden.any()) else None
        peer = written_out(*inputs, hidden=hidden, softcap=problem.softcap, sinks=tensors.sinks)
    else:
        peer_keywords = shared | _peer_keywords(problem, tensors, spec)
        peer = partial(F.scaled_dot_product_attention, *inputs, **peer_keywords)

    ours = partial(adaattn.scaled_dot_product_attention, *inputs, **ours_keywords)

    def check() -> None:
        exact = _Exact(problem, tensors, spec)
        with blamed(OURS):
            output, events = recorded(ours)
            budget = allowed_error(events)
            exact.hold_unseen(output)
            exact.hold(output, budget)
        if problem.kind is Kind.ALIBI:  # its bias is rounded to the dtype before it is added
            given = replace(tensors, alibi_slopes=None, mask=peer_keywords["attn_mask"])
            exact = _Exact(problem, given, replace(spec, has_alibi=False, mask=MaskKind.ADDITIVE))
        with blamed(PEER):
            exact.hold(exact.without_unseen(peer()), 0.0)

    if not problem.training:
        yield Calls(ours=ours, peer=peer, check=check)
        return
    # As in the check: PyTorch keeps cuDNN's backward by the layouts of q, k and v alone, and
    # another layout of the gradient than the first one's is then misread (PyTorch 2.11).
    gradient = torch.randn_like(tensors.query, memory_format=torch.contiguous_format)
    yield Calls(
        ours=lambda: torch.autograd.grad(ours(), inputs, gradient),
        peer=lambda: torch.autograd.grad(peer(), inputs, gradient),
        check=check,
    )


def tensors_of(problem: Problem, device: str) -> Tensors:
    """Return the tensors of a problem, drawn on the device; a mask is there in four dimensions."""
    generator = torch.Generator(device).manual_seed(problem.index)
    dtype = getattr(torch, problem.dtype)

    def heads(count: int, length: int) -> torch.Tensor:
        shape = [problem.batch, count, length, problem.dim]
        if problem.transposed:
            shape[1], shape[2] = shape[2], shape[1]
        made = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        made = made.transpose(1, 2) if problem.transposed else made
        return made.requires_grad_(problem.training)

    query = heads(problem.heads, problem.len_q)
    key, value = (heads(problem.kv_heads, problem.len_k) for _ in range(2))
    bounds = (0, *accumulate(problem.lengths)) if problem.lengths else ()
    starts = torch.tensor(bounds, dtype=torch.int32, device=device) if bounds else None
    slopes = None
    if problem.kind is Kind.ALIBI:
        places = torch.arange(1, problem.heads + 1, device=device)
        slopes = torch.exp2(-8.0 * places / problem.heads)[None]
    sinks = None
    if problem.has_sinks:
        sinks = torch.randn(problem.heads, generator=generator, device=device, dtype=dtype)
    return Tensors.of(
        query,
        key,
        value,
        sinks=sinks,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        bounds_q=bounds,
        bounds_k=bounds,
        mask=_mask(problem, generator, dtype) if problem.mask_shape else None,
        alibi_slopes=slopes,
    )


def _mask(problem: Problem, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask or bias; the first rows of it see nothing where the problem says so."""
    shape = (1,) * (4 - len(problem.mask_shape)) + problem.mask_shape
    device = generator.device
    if problem.kind is Kind.BIAS:
        mask = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    elif problem.kind is Kind.MASK:
        mask = torch.rand(shape, generator=generator, device=device) < _KEPT_SHARE
        mask[..., 0] = True
    else:
        mask = kept(problem, device)[:, None, None]
        if problem.kind is Kind.PADDING_BIAS:
            mask = torch.zeros(shape, device=device, dtype=dtype).masked_fill(~mask, -torch.inf)
    if problem.hidden_rows:
        mask[:, :, : problem.hidden_rows] = -torch.inf if mask.is_floating_point() else False
    return mask


def kept(problem: Problem, device: str | torch.device) -> torch.Tensor:
    """Return which keys are no padding, [B, Sk]: at least a quarter, the first ones."""
    source = random.Random(problem.index)
    least = max(problem.len_k // 4, 1)
    lengths = [source.randint(least, problem.len_k) for _ in range(problem.batch)]
    lengths[0] = problem.len_k
    return (
        torch.arange(problem.len_k, device=device) < torch.tensor(lengths, device=device)[:, None]
    )


def _spec(problem: Problem) -> AttentionProblem:
    """Return the problem as the definition of attention takes it."""
    is_bias = problem.kind in (Kind.BIAS, Kind.PADDING_BIAS)
    kind = MaskKind.ADDITIVE if is_bias else MaskKind.BOOLEAN
    keywords = positional(problem)
    return make_problem(
        batch=problem.batch,
        num_heads=problem.heads,
        num_kv_heads=problem.kv_heads,
        len_q=problem.len_q,
        len_k=problem.len_k,
        head_dim=problem.dim,
        requires_grad=problem.training,
        has_alibi=problem.kind is Kind.ALIBI,
        has_sinks=problem.has_sinks,
        mask=kind if problem.mask_shape else MaskKind.NONE,
        lengths_q=problem.lengths,
        **keywords,
    )


def positional(problem: Problem) -> dict[str, Any]:
    """Return the keywords that say what positions hide, common to every way of calling ours."""
    found: dict[str, Any] = {}
    if "causal" in problem.kind.value:
        found["is_causal"] = True
        if problem.len_q < problem.len_k:
            found["align"] = Align.BOTTOM_RIGHT
    if problem.window:
        right = problem.window if problem.kind is Kind.WINDOW else 0
        found["window"] = (problem.window, right)
    if problem.dilation > 1:
        found["dilation"] = problem.dilation
    if problem.softcap:
        found["softcap"] = problem.softcap
    return found


def our_keywords(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """Return what is passed to ``adaattn.scaled_dot_product_attention`` beside q, k and v."""
    found = positional(problem)
    if tensors.mask is not None:
        found["attn_mask"] = tensors.mask.view(problem.mask_shape)
    if tensors.alibi_slopes is not None:
        found["alibi_slopes"] = tensors.alibi_slopes[0]
    if tensors.sinks is not None:
        found["sinks"] = tensors.sinks
    if tensors.cu_seqlens_q is not None:
        found |= {"cu_seqlens_q": tensors.cu_seqlens_q, "cu_seqlens_k": tensors.cu_seqlens_k}
    return found


def _peer_keywords(problem: Problem, tensors: Tensors, spec: AttentionProblem) -> dict[str, Any]:
    """Return what is passed to PyTorch's function: a mask made before, where it lacks a word."""
    if problem.kind is Kind.CAUSAL:
        return _causal(problem)
    if tensors.alibi_slopes is not None:
        slopes = {"alibi_slopes": tensors.alibi_slopes[0]}
        return {"attn_mask": alibi_mask(tensors.query, tensors.key, slopes)}
    if tensors.mask is not None:
        return {"attn_mask": tensors.mask.view(problem.mask_shape)}
    if problem.kind is Kind.PLAIN:
        return {}
    return {"attn_mask": visible_keys(tensors, spec)[0, 0]}


def _causal(problem: Problem) -> dict[str, Any]:
    """Return how PyTorch's function is told of causal order: its flag begins at the first key."""
    if problem.len_q == problem.len_k:
        return {"is_causal": True}
    if problem.len_q == 1:
        return {}
    return {"attn_mask": causal_lower_right(problem.len_q, problem.len_k)}


class _Exact:
    """The float64 result of a call, or of some of its heads, and eager PyTorch's beside it.

    Heads do not depend on one another, so a part that fits the memory is exact as it is.

    Args:
        problem: the call.
        tensors: its tensors.
        spec: what to compute.
    """

    def __init__(self, problem: Problem, tensors: Tensors, spec: AttentionProblem) -> None:
        self.whole = tensors
        self.batch, self.heads, self.kv_heads = _part(problem)
        part = replace(
            tensors,
            query=self._cut(tensors.query, self.heads),
            kv=replace(
                tensors.kv,
                key=self._cut(tensors.key, self.kv_heads),
                value=self._cut(tensors.value, self.kv_heads),
            ),
            mask=None if tensors.mask is None else self._cut(tensors.mask, self.heads),
            alibi_slopes=None
            if tensors.alibi_slopes is None
            else tensors.alibi_slopes[:, self.heads],
            sinks=None if tensors.sinks is None else tensors.sinks[self.heads],
        )
        batch, num_heads = part.query.shape[:2]
        kv_heads = part.key.shape[1]
        self.spec = replace(spec, batch=batch, num_heads=num_heads, num_kv_heads=kv_heads)
        wide = cast_tensors(part, torch.float64)
        self.exact = attention(wide, self.spec)
        self.eager = attention(part, self.spec, compute_dtype=part.query.dtype)
        self.unseen = _unseen(part, self.spec).expand(self.exact.output.shape)
        if problem.training:
            self.gradients = gradients_of(self.exact, wide)
            self.eager_gradients = gradients_of(self.eager, part)
            self.sizes = term_sizes(part, self.spec)

    def hold_unseen(self, output: torch.Tensor) -> None:
        """Raise AssertionError unless all is finite and rows that see no key are zeros."""
        if not bool(output.isfinite().all()):
            raise AssertionError("output: expected finite numbers, got others")
        if bool(self._cut(output, self.heads)[self.unseen].any()):
            raise AssertionError("rows that see no key: expected zeros, got others")

    def without_unseen(self, output: torch.Tensor) -> torch.Tensor:
        """Return the output with zeros in the checked rows that see no key."""
        unseen = output.new_zeros(output.shape, dtype=torch.bool)
        unseen[self.batch, self.heads] = self.unseen
        return output.masked_fill(unseen, 0.0)

    def hold(self, output: torch.Tensor, budget: float) -> None:
        """Raise AssertionError unless an output of the whole call, and its gradients, are right.

        Args:
            output: with its graph, in training.
            budget: the error that the call may have; 0 is as exact as eager PyTorch. The gradients
                of an approximation have no stated bound, and need to be finite only.
        """
        part = self._cut(output, self.heads)
        summands = num_summands(self.spec, part)
        if budget:
            assert_within_budget(part, self.exact.output, budget)
        else:
            exact, eager = self.exact.output, self.eager.output
            assert_matches(part, exact, eager, name="output", summands=summands)
        if not self.spec.requires_grad:
            return
        found = gradients_of(Result(output=part), self.whole)
        cut = {
            name: self._cut(gradient, self.heads if name == "query" else self.kv_heads)
            for name, gradient in found.items()
        }
        if not budget:
            assert_gradients_match(
                cut, self.gradients, self.eager_gradients, sizes=self.sizes, problem=self.spec
            )
        elif not all(bool(gradient.isfinite().all()) for gradient in cut.values()):
            raise AssertionError("gradients: expected finite numbers, got others")

    def _cut(self, tensor: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return the part of a tensor [B or 1, H or 1, ...] that is checked."""
        first, second = (
            part if size > 1 else slice(None)
            for part, size in zip((self.batch, heads), tensor.shape[:2], strict=True)
        )
        return tensor[first, second]


def _part(problem: Problem) -> tuple[slice, slice, slice]:
    """Return the batch entries, query heads and key heads to check: all, or some of one entry."""
    lengths = problem.len_q, problem.len_k
    per_head = max(math.prod(lengths), sum(lengths) * problem.dim)
    if problem.batch * problem.heads * per_head <= _CHECKED:
        return slice(None), slice(None), slice(None)
    source = random.Random(problem.index)
    entry = source.randrange(problem.batch)
    group = problem.heads // problem.kv_heads
    count = min(max(_CHECKED // per_head, 1), problem.heads)
    if count < group:
        kv_head = source.randrange(problem.kv_heads)
        first = group * kv_head + source.randint(0, group - count)
        kv_heads = slice(kv_head, kv_head + 1)
    else:
        kv_count = count // group
        kv_first = source.randint(0, problem.kv_heads - kv_count)
        first, count = group * kv_first, group * kv_count
        kv_heads = slice(kv_first, kv_first + kv_count)
    return slice(entry, entry + 1), slice(first, first + count), kv_heads


def _unseen(tensors: Tensors, spec: AttentionProblem) -> torch.Tensor:
    """Return which rows see no key, broadcastable to the output [B, H, Sq, D]."""
    visible = visible_keys(tensors, spec)
    if tensors.mask is not None and tensors.mask.is_floating_point():
        visible = visible & (tensors.mask != -torch.inf)
    return ~visible.any(-1, keepdim=True)
