"""Machine code of the kernels around written-out scores, as `machine_code` has of the others."""

import torch

from adaattn._dtypes import torch_dtype
from adaattn.backends.interface import STATISTICS
from adaattn.backends.streamed.arguments import Arguments, Beside
from adaattn.backends.streamed.chunks import Chunk, pitch_of
from adaattn.backends.streamed.fused_launch import Kind, Variant
from adaattn.backends.streamed.split import choose_splits, partials, slices
from adaattn.spec import AttentionProblem, Aux, Precision
from adaattn.testing.machine_code import (
    TYPES,
    MachineCode,
    built,
    examined,
    mask_layout,
    slopes_and_seed,
)

__all__ = [
    "fused_changes_code",
    "fused_sums_code",
    "fused_weights_code",
    "partial_products_code",
    "score_changes_code",
    "slice_products_code",
    "softmax_code",
]


def softmax_code(problem: AttentionProblem) -> MachineCode:
    """Return the machine code of the softmax of written-out scores of all rows of a head."""
    kind = TYPES[problem.precision]
    rows = ("*fp32" if problem.wants(flag) else None for flag in STATISTICS[:3])
    mask, arguments, chunk, beside = _chunked(problem)
    rest = "*fp32" if problem.precision is Precision.FP32 and problem.wants(Aux.LSE) else None
    sinks = "*fp32" if problem.has_sinks else None
    pointers = ("*fp32", f"*{kind}", *rows, rest, mask, sinks, *slopes_and_seed(problem))
    return built(pointers, arguments.softmax(chunk, beside))


def score_changes_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the gradients of written-out scores, likewise."""
    kind = f"*{TYPES[problem.precision]}"
    mask, arguments, chunk, beside = _chunked(problem)
    rest = "*fp32" if problem.precision is Precision.FP32 else None
    scores = ("*fp32", "*fp32", kind, kind)
    pointers = (*scores, "*fp32", "*fp32", None, rest, mask, *slopes_and_seed(problem))
    return built(pointers, arguments.changes(chunk, beside))


def fused_sums_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the kernel of weights and their sums, for Hopper GPUs."""
    return _fused(problem, Kind.SUMS)


def fused_weights_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the same in a backward pass."""
    return _fused(problem, Kind.GIVEN)


def fused_changes_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the gradients of scores."""
    return _fused(problem, Kind.CHANGES)


def _fused(problem: AttentionProblem, kind: Kind) -> MachineCode:
    """Return the machine code of a kernel that writes no scores."""
    from adaattn.backends.streamed.fused_compiled import compile_weights

    return examined(lambda: compile_weights(Variant.of(problem, kind)))


def partial_products_code(problem: AttentionProblem) -> MachineCode:
    """Return that of products of few rows whose sums are split over 132 multiprocessors."""
    query, key, pitch, pointers = _few_rows(problem)
    found = choose_splits(problem, problem.head_dim, 132)
    launch = partials(problem, query, key, pitch, found, follows=True, overlaps=True)
    return built((*pointers[:2], "*fp32"), launch)


def slice_products_code(problem: AttentionProblem) -> MachineCode:
    """Return that of products with weights of few rows; transposed ones in training."""
    query, key, pitch, pointers = _few_rows(problem)
    right, out = (query, key) if problem.requires_grad else (key, query)
    transposed = problem.requires_grad
    launch = slices(problem, right, out, pitch=pitch, is_transposed=transposed, overlaps=True)
    return built(pointers, launch)


def _few_rows(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor, int, tuple[str, ...]]:
    """Return queries and keys without numbers, what lines of scores are apart, and types."""
    rows, keys = (
        torch.empty(1, heads, length, problem.head_dim, dtype=torch_dtype(problem.precision))
        for heads, length in (
            (problem.num_heads, problem.len_q),
            (problem.num_kv_heads, problem.len_k),
        )
    )
    *_, chunk, _ = _chunked(problem)
    return rows, keys, pitch_of(chunk), (f"*{TYPES[problem.precision]}",) * 3


def _chunked(problem: AttentionProblem) -> tuple[str | None, Arguments, Chunk, Beside]:
    """Return the type of a problem's mask, what launches take, and one chunk."""
    mask, seen = mask_layout(problem)
    chunk = Chunk(planes=range(1), rows=range(problem.len_q), keys=range(problem.len_k))
    return mask, Arguments(problem), chunk, Beside(mask=seen.strides)
