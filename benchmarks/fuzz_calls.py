"""One problem of `benchmarks.fuzz` as tensors, as a call, and as what it should give."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import torch

import adaattn
from adaattn.backends import capabilities_asked_for
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import Result, Tensors
from adaattn.call.arguments import Arguments
from adaattn.call.describe import build_call
from adaattn.hardware import probe
from adaattn.planning.support import reasons
from adaattn.spec import Aux
from adaattn.testing import (
    assert_gradients_match,
    assert_results_match,
    attention,
    cast_tensors,
    gradients_of,
    num_summands,
    poisoned_memory,
    term_sizes,
    visible_keys,
    with_tensors,
)
from benchmarks.fuzz_problems import Problem

__all__ = ["FuzzCall"]

_KEPT_SHARE = 0.7
_LISTED_SHARE = 0.5
_SPARE_ROWS, _SPARE_COLUMNS = 3, 8
_WORKSPACE_BYTES = 1 << 23
_NAN = float("nan")
_ORDERS = 16
"""Of the columns, in which eager PyTorch computes once more where the first comparison failed."""
_CALLS_BEFORE = 2
"""The same call, before the one that is looked at: what comes again is launched in another way."""


class FuzzCall:
    """The tensors of a problem, and how it is called and checked.

    Args:
        problem: what is computed.
        device: "cpu" or "cuda".
        training: all tensors that can have a gradient want one, and it is checked.

    Attributes:
        near: what first comparisons said, where a second one with more yardsticks passed.
    """

    def __init__(self, problem: Problem, device: str, *, training: bool = False) -> None:
        self.problem, self.device, self.training = problem, device, training
        self.near = ""
        self.spec = problem.spec(device)
        self.dtype: torch.dtype = getattr(torch, problem.family.dtype)
        self.generator = torch.Generator(device).manual_seed(problem.index)
        self.query, self.key, self.value = self._qkv()
        self.starts_q, self.starts_k = (
            self._starts(lengths) for lengths in (problem.lengths_q, problem.lengths_k)
        )
        self.mask = self._mask() if problem.mask_shape else None
        self.sinks = self._normal(problem.heads) if problem.family.has_sinks else None
        self.slopes = None
        if problem.family.has_alibi:
            shape = (problem.batch if problem.index % 3 else 1, problem.heads)
            self.slopes = torch.rand(shape, generator=self.generator, device=device)
        self.by_head = self._by_head()
        self.blocks = self._blocks() if problem.family.block_size[1] else None
        if training:
            given = (self.query, self.key, self.value, self.mask, self.sinks, self.slopes)
            for item in (*given, *self.by_head.values()):
                if item is not None and item.is_floating_point():
                    item.requires_grad_()

    def refusals(self, backend: str) -> tuple[str, ...]:
        """Return why no executor of a backend serves the problem; () where one does."""
        keywords = self._keywords()
        call = build_call(
            self.query, self.key, self.value, Arguments(**keywords), self._request().flags
        )
        found: list[str] = []
        for capability in capabilities_asked_for(backend):
            against = reasons(capability, call.problem, probe(self.device))
            if not against:
                return ()
            found += [f"{capability.name}: {reason}" for reason in against]
        return tuple(found)

    def run_and_check(self, backend: str) -> str:
        """Return which executor served.

        Raises:
            AssertionError: the result is wrong, or a gradient.
        """
        tensors = self._tensors()
        wide = cast_tensors(tensors, torch.float64)
        exact = attention(wide, self.spec)
        eager = attention(tensors, self.spec, compute_dtype=self.dtype)
        unseen = self._unseen().expand(exact.output.shape[:-1])
        output, aux = self._run(backend, exact.output.shape)
        asked = self.problem.family.aux
        found = {name: getattr(aux, name) for name in asked}
        result = Result(output=output, **found)
        summands = num_summands(self.spec, output)
        if bool(output[unseen].any()):
            raise AssertionError("rows that see no key: expected zeros, got others")
        try:
            assert_results_match(result, exact, eager, summands=summands)
        except AssertionError as error:
            worst, lse = self._worst_eager(exact, eager), None
            if "entropy" in asked:
                with torch.no_grad():
                    lse = attention(wide, replace(self.spec, aux=Aux.LSE)).lse
            assert_results_match(result, exact, worst, summands=summands, lse=lse)
            self.near = str(error)
        if self.training:
            self._check_gradients(tensors, gradients_of(exact, wide), eager, result)
        return "a call without other outputs" if aux is None else self._served(aux)

    def _check_gradients(
        self, tensors: Tensors, of_exact: dict[str, torch.Tensor], eager: Result, result: Result
    ) -> None:
        """Hold the gradients of a result."""
        of_eager = gradients_of(eager, tensors)
        if self.device == "cuda":
            self._poison(result.output.shape)
        found = gradients_of(result, tensors)
        held: dict[str, Any] = {"sizes": term_sizes(tensors, self.spec), "problem": self.spec}
        try:
            assert_gradients_match(found, of_exact, of_eager, **held)
        except AssertionError as error:
            for other in self._other_orders(tensors):
                of_other = gradients_of(other, tensors)
                of_eager = {
                    name: _worse(exact, of_eager[name], of_other[name])
                    for name, exact in of_exact.items()
                }
            assert_gradients_match(found, of_exact, of_eager, **held)
            self.near = "; ".join(filter(None, (self.near, str(error))))

    def _served(self, aux: adaattn.AuxOutput) -> str:
        """Return the executors of a decision."""
        groups = () if aux.decision is None else aux.decision.plan.groups
        return " + ".join(dict.fromkeys(group.label for group in groups))

    def _worst_eager(self, exact: Result, eager: Result) -> Result:
        """Return eager PyTorch's results, of each element the worst over several orders."""
        for other in self._other_orders(self._tensors()):
            eager = Result(
                **{
                    item.name: _worse(*(getattr(one, item.name) for one in (exact, eager, other)))
                    for item in fields(Result)
                }
            )
        return eager

    def _other_orders(self, tensors: Tensors) -> Iterator[Result]:
        """Yield eager PyTorch's results with the columns in several orders.

        Where scores are large and rows are few, one order may round luckily, and twice its error
        is no measure then.
        """
        for _ in range(_ORDERS):
            order = torch.randperm(
                self.query.shape[3], generator=self.generator, device=self.device
            )
            turned = with_tensors(
                tensors, query=tensors.query[..., order], key=tensors.key[..., order]
            )
            yield attention(turned, self.spec, compute_dtype=self.dtype)

    def _run(
        self, backend: str, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, adaattn.AuxOutput | None]:
        """Return the output and what stands beside it, fresh memory being full of NaN.

        Every third call without other outputs is made as most users make it, and comes again: what
        a bound call runs may be shorter.
        """
        keywords: dict[str, Any] = self._keywords() | {"backend": backend}
        if self.problem.family.aux or self.problem.index % 3:
            return self._called(shape, keywords | {"return_aux": self._request()})
        for _ in range(_CALLS_BEFORE):
            output, _ = self._called(shape, keywords)
            if self.training:
                gradients_of(Result(output=output), self._tensors())
        return self._called(shape, keywords)

    def _called(
        self, shape: tuple[int, ...], keywords: dict[str, Any]
    ) -> tuple[torch.Tensor, adaattn.AuxOutput | None]:
        """Return the output of one call, and what stands beside it."""
        inputs = (self.query, self.key, self.value)
        if self.device == "cuda":
            self._poison(shape)
            found = adaattn.scaled_dot_product_attention(*inputs, **keywords)
        else:
            with poisoned_memory():
                found = adaattn.scaled_dot_product_attention(*inputs, **keywords)
        return found if isinstance(found, tuple) else (found, None)

    def _poison(self, shape: tuple[int, ...]) -> None:
        """Fill blocks with NaN and free them: the allocator hands them out next."""
        elements = math.prod(shape)
        rows = math.prod(shape[:-1])
        sizes = (elements, 2 * elements, rows, rows, rows, 2 * rows, _WORKSPACE_BYTES // 4)
        blocks = [torch.full((max(size, 1),), _NAN, device=self.device) for size in sizes]
        blocks += [
            torch.full((max(elements, 1),), _NAN, device=self.device, dtype=self.dtype)
            for _ in range(2)
        ]
        del blocks

    def _request(self) -> adaattn.AuxRequest:
        """Return the outputs that are asked for."""
        asked = self.problem.family.aux
        return adaattn.AuxRequest(**dict.fromkeys(asked, True))

    def _keywords(self) -> dict[str, Any]:
        """Return the keywords of the public call."""
        problem, family = self.problem, self.problem.family
        found: dict[str, Any] = {
            "attn_mask": None if self.mask is None else self._mask_as_given(),
            "is_causal": problem.is_causal,
            "enable_gqa": problem.heads != problem.kv_heads,
            "align": problem.align,
            "window": problem.window,
            "dilation": family.dilation,
            "softcap": family.softcap or None,
            "scale": family.scale,
            "sinks": self.sinks,
            "alibi_slopes": self._slopes_as_given(),
            "cu_seqlens_q": self.starts_q,
            "cu_seqlens_k": self.starts_k,
            "blocks": self.blocks,
        } | self.by_head
        if problem.tells_longest and problem.lengths_q:
            found["max_seqlen_q"] = max(problem.lengths_q)
            found["max_seqlen_k"] = max(problem.lengths_k)
        return found

    def _slopes_as_given(self) -> torch.Tensor | None:
        """Return the slopes, [Hq] where all sequences have the same."""
        if self.slopes is None or self.problem.index % 3:
            return self.slopes
        return self.slopes[0]

    def _mask_as_given(self) -> torch.Tensor | None:
        """Return the mask, of some problems without the leading dimensions that are 1."""
        mask = self.mask
        while self.problem.index % 2 and mask is not None and mask.dim() > 2 and len(mask) == 1:
            mask = mask[0]
        return mask

    def _tensors(self) -> Tensors:
        """Return the tensors as the definition takes them."""
        bounds_q, bounds_k = (
            (0, *accumulate(lengths)) if lengths else ()
            for lengths in (self.problem.lengths_q, self.problem.lengths_k)
        )
        return Tensors.of(
            self.query,
            self.key,
            self.value,
            mask=self.mask,
            sinks=self.sinks,
            alibi_slopes=self.slopes,
            cu_seqlens_q=self.starts_q,
            cu_seqlens_k=self.starts_k,
            bounds_q=bounds_q,
            bounds_k=bounds_k,
            blocks=self.blocks,
            head_terms=HeadTerms(**self.by_head) if self.by_head else None,
        )

    def _unseen(self) -> torch.Tensor:
        """Return which rows see no key, broadcastable to [B, Hq, Sq]."""
        visible = visible_keys(self._tensors(), self.spec)
        if self.mask is not None and self.mask.is_floating_point():
            visible = visible & (self.mask != -torch.inf)
        full = (*self.query.shape[:3], self.key.shape[2])
        return ~visible.expand(full).any(-1)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def _starts(self, lengths: tuple[int, ...]) -> torch.Tensor | None:
        """Return int32 bounds of packed sequences; None when not packed."""
        if not lengths:
            return None
        return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=self.device)

    def _blocks(self) -> adaattn.BlockList:
        """Return lists of all heads or of each, half of the blocks in them, some of them dense."""
        problem = self.problem
        block_q, block_k = problem.family.block_size
        shape = (-(-problem.len_q // block_q), -(-problem.len_k // block_k))
        if problem.index % 3:
            shape = (problem.batch, problem.heads, *shape)
        kept = torch.rand(shape, generator=self.generator, device=self.device) < _LISTED_SHARE
        found = adaattn.BlockList.from_mask(kept, block_q=block_q, block_k=block_k)
        if problem.index % 2:
            found.counts[:, -1] = -1
        return found

    def _by_head(self) -> dict[str, torch.Tensor]:
        """Return scales of both signs, narrow and unlimited windows, caps and none."""
        if not self.problem.family.by_head:
            return {}  # what is drawn after it stays what it was
        heads, reach = self.problem.heads, max(self.problem.len_k // 2, 2)
        shape = {"generator": self.generator, "device": self.device}
        softcap = 3.0 + torch.randn(heads, **shape)
        drawn = {
            "scale": torch.randn(heads, **shape) / self.problem.family.dim**0.5,
            "window": torch.randint(-1, reach, (heads, 2), **shape),
            "softcap": softcap.where(torch.rand(heads, **shape) < _LISTED_SHARE, 0.0).clamp(min=0),
        }
        drawn["window"][::3] = -1
        return {name: drawn[name] for name in self.problem.family.by_head}

    def _mask(self) -> torch.Tensor:
        """Return the mask, [B or 1, Hq or 1, Sq or 1, Sk or 1]."""
        problem, shape = self.problem, self.problem.mask_shape
        kept = torch.rand(shape, generator=self.generator, device=self.device) < _KEPT_SHARE
        kept[:, :, : problem.hidden_rows] &= problem.hidden_rows == 0
        if problem.family.mask == "boolean":
            return kept
        dtype = torch.float32 if problem.family.mask == "wide" else self.dtype
        mask = torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype)
        hides = problem.hidden_rows or problem.index % 2
        return mask.masked_fill(~kept, -torch.inf) if hides else mask

    def _qkv(self) -> list[torch.Tensor]:
        """Return q, k and v, [B, H, S, D], in the layout of the problem."""
        problem, family = self.problem, self.problem.family
        if problem.layout == "packed qkv":
            joined = self._normal(problem.batch, problem.len_q, 3, problem.heads, family.dim)
            joined[:, :, 0] *= family.size
            return [item.transpose(1, 2) for item in joined.unbind(2)]
        found = [
            self._heads(problem.heads, problem.len_q, family.dim),
            self._heads(problem.kv_heads, problem.len_k, family.dim),
            self._heads(problem.kv_heads, problem.len_k, family.dim_v),
        ]
        found[0].mul_(family.size)
        return found

    def _heads(self, heads: int, length: int, dim: int) -> torch.Tensor:
        """Return random numbers [B, H, S, D]; around guarded ones there is NaN."""
        batch, layout = self.problem.batch, self.problem.layout
        dense = self._normal(batch, heads, length, dim)
        if layout == "transposed":
            return dense.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "dense":
            return dense
        if layout == "strided columns":
            place = dense.new_full((batch, heads, length, 2 * dim), _NAN)[..., ::2]
        else:
            rows, columns = length + _SPARE_ROWS, dim + _SPARE_COLUMNS
            turned = layout == "guarded transposed"
            shape = (batch, rows, heads, columns) if turned else (batch, heads, rows, columns)
            place = dense.new_full(shape, _NAN)
            place = (place.transpose(1, 2) if turned else place)[:, :, :length, :dim]
        return place.copy_(dense)


def _worse(
    exact: torch.Tensor | None, first: torch.Tensor | None, second: torch.Tensor | None
) -> torch.Tensor | None:
    """Return of each element the one that is farther from the exact one."""
    if exact is None or first is None or second is None:
        return None
    errors = [(item.double() - exact).abs().nan_to_num(0.0) for item in (first, second)]
    return torch.where(errors[1] > errors[0], second, first)
