"""One call of the kernel: its tensors made readable, and the launch found that fits their layout.

A repeated call looks up its layout, allocates the result, and launches
(`adaattn.backends.hopper.prepared`). A result of q, k and v alone has the shortest way of all.
"""

from collections.abc import Callable
from typing import Any

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.common import with_dense_columns
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.hopper.launch import MASK_ALIGNMENT, MASK_BLOCK, is_listed, may_list_mask
from adaattn.backends.hopper.mask_lists import packed_tiles
from adaattn.backends.hopper.prepared import (
    DTYPES,
    NOT_BY_HEAD,
    NOTHING_BESIDE,
    Beside,
    Given,
    Prepared,
    prepare,
)
from adaattn.backends.hopper.views import (
    ALIGNMENT,
    Layouts,
    is_elsewhere,
    made_readable,
    readable,
)
from adaattn.backends.interface import Result
from adaattn.backends.own_kernels import check_untransformed, kept_by_problem
from adaattn.spec import AttentionProblem

__all__ = ["bound", "output_function"]

_Optional = torch.Tensor | None


def output_function(problem: AttentionProblem) -> Callable[..., torch.Tensor]:
    """Return a function from the tensors of a `Direct` to the output alone."""
    call = bound(problem)
    return lambda *given: call(*given).output


class _Call:
    """The call of a problem, which keeps what it works out for each layout of tensors."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._may_list = may_list_mask(problem)
        aligned = problem.dense_columns and problem.stride_bytes == ALIGNMENT
        self._layouts: Layouts[Prepared] = Layouts(readable if aligned else made_readable)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        starts_q: torch.Tensor | None = None,
        starts_k: torch.Tensor | None = None,
        blocks: BlockList | None = None,
        head_terms: HeadTerms | None = None,
    ) -> Result:
        """Return the result, of tensors as a `Direct` takes them."""
        check_untransformed(query, key, value)
        prepared = tiles = None
        beside: Beside = starts_q, starts_k, None, None, None
        by_head = NOT_BY_HEAD
        if blocks is None and head_terms is None:
            given = mask, sinks, slopes, starts_q, starts_k
            prepared = self._layouts.again((query, key, value), _layout, *given)
        if prepared is None:
            sinks, slopes = (None if x is None else _numbers(x) for x in (sinks, slopes))
            if mask is not None and mask.dtype not in DTYPES:
                mask = mask.float()
            beside, by_head = _beside(starts_q, starts_k, blocks), _of_heads(head_terms)
            others = mask, sinks, slopes, *beside, *by_head
            cleaned, layout, prepared = self._layouts.find((query, key, value), _layout, *others)
            query, key, value = cleaned
            if prepared is None:
                read = Given(query, key, value, *others)
                lengths = query.shape[2], key.shape[2]
                if self._may_list and mask is not None and is_listed(mask.shape, *lengths):
                    tiles = packed_tiles(mask, MASK_BLOCK)
                    words, counts, indices, sees = tiles
                    read = read._replace(mask=words, counts=counts, indices=indices, sees=sees)
                prepared = prepare(self._problem, read)
                if prepared.is_lasting:
                    self._layouts.keep(layout, prepared)
        if prepared.packs_mask:
            assert mask is not None
            mask, *lists = tiles or packed_tiles(mask, MASK_BLOCK)
            beside = (None, None, *lists)
        if is_elsewhere(query):
            with torch.cuda.device(query.device):
                return prepared.run(query, key, value, mask, sinks, slopes, beside, by_head)
        return prepared.run(query, key, value, mask, sinks, slopes, beside, by_head)


bound = kept_by_problem(_Call)


def _layout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: _Optional,
    *others: _Optional,
) -> tuple[Any, ...]:
    """Return what a launch takes for granted of its tensors."""
    strides = query.stride(), key.stride(), value.stride()
    of_heads = (query.shape, key.shape, *strides, query.dtype, query.get_device())
    at = 0 if mask is None else mask.data_ptr() % MASK_ALIGNMENT
    given = enumerate((mask, *others))
    lying = tuple((it, x.shape, x.stride(), x.dtype) for it, x in given if x is not None)
    return (*of_heads, at, lying)


def _beside(
    starts_q: torch.Tensor | None, starts_k: torch.Tensor | None, blocks: BlockList | None
) -> Beside:
    """Return starts of packed sequences, or a list of blocks, as the kernel reads them."""
    if blocks is not None:
        return None, None, blocks.counts, blocks.indices, None
    if starts_q is not None and starts_k is not None:
        return starts_q.contiguous(), starts_k.contiguous(), None, None, None
    return NOTHING_BESIDE


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of numbers that the kernel reads, with adjacent columns."""
    return with_dense_columns(tensor if tensor.dtype in DTYPES else tensor.float())


def _of_heads(terms: HeadTerms | None) -> Beside:
    """Return scale, window and softcap of each head as the kernel reads them."""
    if terms is None:
        return NOT_BY_HEAD
    scale, softcap = (None if x is None else _numbers(x) for x in (terms.scale, terms.softcap))
    return scale, None if terms.window is None else terms.window.contiguous(), softcap
