"""Random tensors for a problem, turned into a call by the door that every caller's pass."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from adaattn._dtypes import torch_dtype
from adaattn.backends.block_list import BlockList
from adaattn.call.arguments import Arguments
from adaattn.call.describe import Call, build_call
from adaattn.spec import AttentionProblem, HeadTerm, MaskKind

__all__ = ["algorithms", "random_call"]

_KEPT_SHARE: Final = 0.8
"""Of a boolean mask."""


@contextlib.contextmanager
def algorithms(*, deterministic: bool) -> Iterator[None]:
    """Have PyTorch choose deterministic algorithms inside the block, or any."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def random_call(problem: AttentionProblem, device: torch.device) -> Call:
    """Return a call of the problem on random normal numbers, described as any caller's is."""
    generator = torch.Generator(device).manual_seed(0)
    dtype, batch = torch_dtype(problem.precision), problem.batch

    def normal(*shape: int, wants_grad: bool, dtype: torch.dtype = dtype) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return numbers.requires_grad_(wants_grad)

    grad = problem.requires_grad
    query = normal(batch, problem.num_heads, problem.len_q, problem.head_dim, wants_grad=grad)
    heads, length = problem.num_kv_heads, problem.len_k
    key = normal(batch, heads, length, problem.head_dim, wants_grad=grad)
    value = normal(batch, heads, length, problem.value_dim, wants_grad=grad)
    mask = None
    if problem.mask is not MaskKind.NONE:
        shape = problem.mask_shape or (problem.len_q, length)
        if problem.mask is MaskKind.BOOLEAN:
            mask = torch.rand(shape, generator=generator, device=device) < _KEPT_SHARE
        else:
            above = torch.float64 if dtype is torch.float32 else torch.float32
            wide = above if problem.mask_is_wide else dtype
            mask = normal(*shape, wants_grad=problem.mask_requires_grad, dtype=wide)
    left, right = problem.window
    sinks = slopes = None
    if problem.has_sinks:
        sinks = normal(problem.num_heads, wants_grad=problem.sinks_require_grad)
    if problem.has_alibi:
        exponents = torch.arange(1, problem.num_heads + 1, device=device) / problem.num_heads
        slopes = torch.exp2(-8.0 * exponents).requires_grad_(problem.alibi_requires_grad)
    starts_q = _starts(problem.len_q, problem.num_sequences, device)
    # That they are the same is known of one tensor, on a GPU of no two.
    starts_k = starts_q if problem.packed_square else _starts(length, problem.num_sequences, device)
    bounds: dict[str, int] = {}
    if problem.num_sequences:  # told, as callers tell FlashAttention: a GPU is not read for them
        bounds["max_seqlen_q"] = -(-problem.len_q // problem.num_sequences)
        bounds["max_seqlen_k"] = -(-length // problem.num_sequences)
    numbers: dict[str, Any] = {
        "scale": problem.scale,
        "window": (left, 0 if problem.is_causal and mask is not None else right),
        "softcap": problem.softcap,
    }
    arguments = Arguments(
        attn_mask=mask,
        dropout_p=problem.dropout_p,
        # With a mask, causal order is said as a window.
        is_causal=problem.is_causal and mask is None,
        enable_gqa=problem.group_size > 1,
        align=problem.align,
        dilation=problem.dilation,
        sinks=sinks,
        alibi_slopes=slopes,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        blocks=_blocks(problem, device) if problem.has_blocks else None,
        **(numbers | bounds | _by_head(problem, device)),
    )
    return build_call(query, key, value, arguments, problem.aux)


def _by_head(problem: AttentionProblem, device: torch.device) -> dict[str, Any]:
    """Return tensors of the numbers that each head has of its own: windows of 1 key to all."""
    heads, grad = problem.num_heads, problem.head_terms_require_grad
    wide = torch.linspace(0, problem.len_k, heads, device=device).int()
    numbers = {
        HeadTerm.SCALE: torch.full((heads,), problem.head_dim**-0.5, device=device),
        HeadTerm.WINDOW: wide.unsqueeze(1).expand(heads, 2),
        HeadTerm.SOFTCAP: torch.full((heads,), 30.0, device=device),
    }
    return {
        str(term.name).lower(): item.requires_grad_(grad) if item.is_floating_point() else item
        for term, item in numbers.items()
        if problem.by_head(term)
    }


def _blocks(problem: AttentionProblem, device: torch.device) -> BlockList:
    """Return one list for all heads: as many blocks as there is room for, spread over the keys."""
    block_q, block_k = problem.block_size
    num_rows, num_keys = -(-problem.len_q // block_q), -(-problem.len_k // block_k)
    rows = torch.arange(num_rows, device=device)
    last = torch.full_like(rows, num_keys - 1)
    if problem.is_causal:
        last = (((rows + 1) * block_q - 1 + problem.offset) // block_k).clamp(0, num_keys - 1)
    counts = (last + 1).clamp(max=problem.most_blocks)
    places = torch.arange(problem.most_blocks, device=device)
    steps = (counts - 1).clamp(min=1).unsqueeze(-1)
    indices = places * last.unsqueeze(-1) // steps
    return BlockList(
        counts=counts.to(torch.int32)[None, None],
        indices=indices.to(torch.int32)[None, None],
        block_q=block_q,
        block_k=block_k,
    )


def _starts(length: int, count: int, device: torch.device) -> torch.Tensor | None:
    """Return the starts of packed sequences of equal lengths and their end; None if not packed."""
    if not count:
        return None
    starts = [length * place // count for place in range(count + 1)]
    return torch.tensor(starts, dtype=torch.int32, device=device)
