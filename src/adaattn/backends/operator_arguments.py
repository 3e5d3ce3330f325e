"""What an operator takes: a call as tensors and numbers, and a call again.

The problem is taken apart into them, and described again from the tensors that arrive when a graph
runs, whose lengths may be others.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from adaattn._dtypes import precision_of
from adaattn.backends.block_list import BlockList
from adaattn.backends.common import layout_facts
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadTerm, MaskKind

__all__ = ["SCHEMA", "call_of", "taken_apart"]

SCHEMA: Final = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, Tensor? slopes, "
    "Tensor? starts_q, Tensor? starts_k, Tensor? counts, Tensor? indices, "
    "float[] numbers, bool[] flags, SymInt[] sizes, "
    "Tensor? head_scale, Tensor? head_window, Tensor? head_softcap, Tensor? seed"
)
"""What an operator takes; numbers, flags and sizes are a problem as `taken_apart` has it."""

_Optional = torch.Tensor | None

_BLOCK: Final = slice(6, 8)
"""Where the rows and keys of a listed block stand among the sizes."""


def call_of(given: Sequence[Any]) -> tuple[Tensors, AttentionProblem, int, _Optional]:
    """Return the tensors of a call, its problem, rows of a chunk, and seed.

    Args:
        given: what an operator was given, as `SCHEMA` names it.
    """
    query, key, value, mask, sinks, slopes, starts_q, starts_k, counts, indices, *rest = given
    numbers, flags, sizes, *terms, seed = rest
    if mask is not None:
        # A compiler writes other masks into this one's memory, and PyTorch counts no write: what
        # is kept beside a tensor is kept beside one of this call.
        mask = mask.detach()
    blocks = None
    if counts is not None:
        block_q, block_k = sizes[_BLOCK]
        blocks = BlockList(counts=counts, indices=indices, block_q=block_q, block_k=block_k)
    tensors = Tensors.of(
        query,
        key,
        value,
        mask=mask,
        sinks=sinks,
        alibi_slopes=slopes,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        blocks=blocks,
        head_terms=HeadTerms.given(*terms),
    )
    return tensors, _problem_of(tensors, numbers, flags, sizes), sizes[-1], seed


def taken_apart(
    problem: AttentionProblem, chunk_rows: int = 0
) -> tuple[list[float], list[bool], list[int]]:
    """Return what a problem says beyond its tensors, as numbers of three kinds.

    Args:
        problem: of the call.
        chunk_rows: rows that are computed at once, the last of the sizes; 0 where no plan says it.
    """
    longest = problem.max_len_q, problem.max_len_k
    return (
        [problem.scale, problem.softcap, problem.dropout_p],
        [
            problem.is_causal,
            problem.align is Align.BOTTOM_RIGHT,
            problem.wants_gradients,
            problem.batch_invariant,
            problem.deterministic,
            problem.mask_requires_grad,
        ],
        [
            *(*problem.window, problem.dilation, *longest, problem.aux.value, *problem.block_size),
            chunk_rows,
        ],
    )


def _problem_of(
    tensors: Tensors, numbers: list[float], flags: list[bool], sizes: list[int]
) -> AttentionProblem:
    """Return the problem that `taken_apart` took apart, for the tensors at hand."""
    query, key, value, mask = tensors.query, tensors.key, tensors.value, tensors.mask
    scale, softcap, dropout_p = numbers
    is_causal, to_end, is_trained, is_invariant, is_deterministic, trains_mask = flags
    left, right, dilation, max_len_q, max_len_k, aux, *block_size, _ = sizes
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
        mask_requires_grad=trains_mask,
        softcap=softcap,
        has_sinks=tensors.sinks is not None,
        has_alibi=tensors.alibi_slopes is not None,
        head_terms=HeadTerm.NONE if tensors.head_terms is None else tensors.head_terms.kinds,
        block_size=(block_size[0], block_size[1]),
        most_blocks=0 if tensors.blocks is None else tensors.blocks.indices.shape[-1],
        dropout_p=dropout_p,
        requires_grad=is_trained,
        batch_invariant=is_invariant,
        deterministic=is_deterministic,
        num_sequences=0 if starts is None else starts.shape[0] - 1,
        max_len_q=max_len_q,
        max_len_k=max_len_k,
        aux=Aux(aux),
        **layout_facts(query, key, value, mask=mask),
    )
