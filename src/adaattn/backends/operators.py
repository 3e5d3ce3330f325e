"""A kernel as one operator of `torch.library`: graphs hold it whole, and look at its fake.

An operator takes tensors and numbers. The problem is taken apart into them, and described again
from the tensors that arrive when the graph runs, whose lengths may be others.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from adaattn._dtypes import precision_of
from adaattn.backends.block_list import BlockList
from adaattn.backends.common import layout_facts, output_like
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import STATISTICS, Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadTerm, MaskKind

__all__ = ["operator"]

_AUX: Final = 5
"""Where the wanted outputs stand among the sizes of `_taken_apart`."""

_SIZES: Final = 9
"""Where those stand among the arguments behind q, k and v."""

_Run = Callable[[Tensors, AttentionProblem], Result]


def operator(name: str, run: _Run) -> _Run:
    """Return what calls ``run`` through the operator ``adaattn::<name>``.

    Args:
        name: of the operator.
        run: computes a problem; it has no gradient.
    """

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        starts_q: torch.Tensor | None,
        starts_k: torch.Tensor | None,
        counts: torch.Tensor | None,
        indices: torch.Tensor | None,
        numbers: list[float],
        flags: list[bool],
        sizes: list[int],
        head_scale: torch.Tensor | None = None,
        head_window: torch.Tensor | None = None,
        head_softcap: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        tensors = Tensors.of(
            query,
            key,
            value,
            mask=mask,
            sinks=sinks,
            alibi_slopes=slopes,
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            blocks=_list_of(counts, indices, sizes[-2:]),
            head_terms=_terms_of(head_scale, head_window, head_softcap),
        )
        result = run(tensors, _described(tensors, numbers, flags, sizes))
        found = (result.output, result.lse, result.row_max, result.entropy, result.dropped_mass)
        return [query.new_empty(0, dtype=torch.float32) if item is None else item for item in found]

    made = torch.library.custom_op(f"adaattn::{name}", call, mutates_args=())
    made.register_fake(_fake)

    def through(tensors: Tensors, problem: AttentionProblem) -> Result:
        blocks = tensors.blocks
        output, *statistics = made(
            tensors.query,
            tensors.key,
            tensors.value,
            *(tensors.mask, tensors.sinks, tensors.alibi_slopes),
            *(tensors.cu_seqlens_q, tensors.cu_seqlens_k),
            *((None, None) if blocks is None else (blocks.counts, blocks.indices)),
            *_taken_apart(problem),
            *(tensors.head_scale, tensors.head_window, tensors.head_softcap),
        )
        lse, row_max, entropy, dropped = (
            item if problem.wants(flag) else None
            for item, flag in zip(statistics, STATISTICS, strict=True)
        )
        return Result(
            output=output, lse=lse, row_max=row_max, entropy=entropy, dropped_mass=dropped
        )

    return through


def _list_of(
    counts: torch.Tensor | None, indices: torch.Tensor | None, sizes: list[int]
) -> BlockList | None:
    """Return the list of blocks that these tensors are, or None."""
    if counts is None or indices is None:
        return None
    return BlockList(counts=counts, indices=indices, block_q=sizes[0], block_k=sizes[1])


def _terms_of(
    scale: torch.Tensor | None, window: torch.Tensor | None, softcap: torch.Tensor | None
) -> HeadTerms | None:
    """Return the numbers of each head that these tensors are, or None."""
    if scale is window is softcap is None:
        return None
    return HeadTerms(scale=scale, window=window, softcap=softcap)


def _taken_apart(problem: AttentionProblem) -> tuple[list[float], list[bool], list[int]]:
    """Return what a problem says beyond its tensors, as numbers of three kinds."""
    longest = problem.max_len_q, problem.max_len_k
    return (
        [problem.scale, problem.softcap, problem.dropout_p],
        [problem.is_causal, problem.align is Align.BOTTOM_RIGHT],
        [*problem.window, problem.dilation, *longest, problem.aux.value, *problem.block_size],
    )


def _described(
    tensors: Tensors, numbers: list[float], flags: list[bool], sizes: list[int]
) -> AttentionProblem:
    """Return the problem that `_taken_apart` took apart, for the tensors at hand."""
    query, key, value, mask = tensors.query, tensors.key, tensors.value, tensors.mask
    scale, softcap, dropout_p = numbers
    is_causal, to_end = flags
    left, right, dilation, max_len_q, max_len_k, aux, *block_size = sizes
    starts = tensors.cu_seqlens_q
    kind = MaskKind.NONE
    if mask is not None:
        kind = MaskKind.BOOLEAN if mask.dtype == torch.bool else MaskKind.ADDITIVE
    return AttentionProblem(
        batch=query.shape[0],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        len_q=query.shape[2],
        len_k=key.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        precision=precision_of(query.dtype),
        device_type=query.device.type,
        scale=scale,
        is_causal=is_causal,
        align=Align.BOTTOM_RIGHT if to_end else Align.TOP_LEFT,
        window=(left, right),
        dilation=dilation,
        mask=kind,
        mask_shape=() if mask is None else tuple(mask.shape),
        softcap=softcap,
        has_sinks=tensors.sinks is not None,
        has_alibi=tensors.alibi_slopes is not None,
        head_terms=HeadTerm.NONE if tensors.head_terms is None else tensors.head_terms.kinds,
        block_size=(block_size[0], block_size[1]),
        most_blocks=0 if tensors.blocks is None else tensors.blocks.indices.shape[-1],
        dropout_p=dropout_p,
        num_sequences=0 if starts is None else starts.shape[0] - 1,
        max_len_q=max_len_q,
        max_len_k=max_len_k,
        aux=Aux(aux),
        **layout_facts(query, key, value),
    )


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> list[torch.Tensor]:
    """Return outputs without numbers: what a graph knows of them."""
    del key
    aux, shape = Aux(rest[_SIZES][_AUX]), query.shape[:-1]
    statistics = [
        query.new_empty(shape if flag in aux else (0,), dtype=torch.float32) for flag in STATISTICS
    ]
    return [output_like(query, value.shape[-1]), *statistics]
