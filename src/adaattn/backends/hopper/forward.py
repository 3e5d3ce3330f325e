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

_Layout = tuple[Any, ...]
_Optional = torch.Tensor | None


def output_function(problem: AttentionProblem) -> Callable[..., torch.Tensor]:
    """Return a function from the tensors of a `Direct` to the output alone."""
    call = bound(problem)
    alone = call.alone

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *others: Any,
    ) -> torch.Tensor:
        if others or mask is not None:
            return call(query, key, value, mask, *others).output
        check_untransformed(query, key, value)
        return alone(query, key, value)[0]

    return run


class _Call:
    """The call of a problem, which keeps what it works out for each layout of tensors."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._may_list = may_list_mask(problem)
        aligned = problem.dense_columns and problem.stride_bytes == ALIGNMENT
        self._layouts: Layouts[Prepared] = Layouts(readable if aligned else made_readable)

    def alone(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, _Optional]:
        """Return output and log-sum-exp of a problem that has, and asks for, nothing else."""
        prepared = self._layouts.again((query, key, value), _layout, ())
        if prepared is None or is_elsewhere(query):
            result = self(query, key, value)
            return result.output, result.lse
        return prepared.alone(query, key, value)

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
        beside, by_head = NOTHING_BESIDE, NOT_BY_HEAD
        extras: _Layout = ()
        is_plain = mask is sinks is slopes is starts_q is None
        if not (is_plain and blocks is None and head_terms is None):
            sinks, slopes = (None if x is None else _numbers(x) for x in (sinks, slopes))
            if mask is not None and mask.dtype not in DTYPES:
                mask = mask.float()
            beside, by_head = _beside(starts_q, starts_k, blocks), _of_heads(head_terms)
            if (
                self._may_list
                and mask is not None
                and is_listed(mask.shape, query.shape[2], key.shape[2])
            ):
                mask, *lists = packed_tiles(mask, MASK_BLOCK)
                beside = (None, None, *lists)
            extras = _extras((mask, sinks, slopes), beside, by_head)
        read, layout, prepared = self._layouts.find((query, key, value), _layout, extras)
        query, key, value = read
        if prepared is None:
            given = Given(query, key, value, mask, sinks, slopes, *beside, *by_head)
            prepared = prepare(self._problem, given)
            if prepared.is_lasting:
                self._layouts.keep(layout, prepared)
        if is_elsewhere(query):
            with torch.cuda.device(query.device):
                return prepared.run(query, key, value, mask, sinks, slopes, beside, by_head)
        return prepared.run(query, key, value, mask, sinks, slopes, beside, by_head)


bound = kept_by_problem(_Call)


def _layout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, extras: _Layout
) -> _Layout:
    """Return what a launch takes for granted of its tensors."""
    strides = query.stride(), key.stride(), value.stride()
    return (query.shape, key.shape, *strides, query.dtype, extras, query.get_device())


def _extras(given: tuple[torch.Tensor | None, ...], beside: Beside, by_head: Beside) -> _Layout:
    """Return the same of mask, sinks and slopes, and of what stands beside them."""
    lying = tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in given)
    shapes = tuple(None if x is None else x.shape for x in beside)
    at = 0 if given[0] is None else given[0].data_ptr() % MASK_ALIGNMENT
    return lying, shapes, tuple(None if x is None else x.dtype for x in by_head), at


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
