"""Which problems have their weights made where their scores are, on Hopper (`fused`)."""

from typing import Final

import torch

from adaattn.backends.own_kernels import why_no_gluon
from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, Aux, MaskKind, Precision

__all__ = [
    "fits",
    "is_fused",
    "num_parts",
    "parts_of",
    "serves",
    "serves_gradients",
    "writes_no_scores",
]

_MOST_COLUMNS: Final = 576
"""A warpgroup holds so many of 64 lines in more than half of its registers."""

_PART: Final = 64
_STEP: Final = 8
"""Columns whose rows begin at multiples of 16 bytes."""

_LEAST_KEYS: Final = 128
_LEAST_LINES: Final = 64 * 128
"""Of all heads. A block of 128 visits all their keys, and half of the card is to have one: with 4
heads of 512 columns and 2K tokens it takes as long as written scores, with 512 tokens 1.7 times as
long (cells of H200 and H100)."""
_HOPPER: Final = (9, 0)


def is_fused(problem: AttentionProblem) -> bool:
    """Return whether the last pass of a problem writes no scores: in training the backward one."""
    rule = serves_gradients if problem.wants_gradients else serves
    return rule(problem) and _is_reached(problem)


def writes_no_scores(problem: AttentionProblem) -> bool:
    """Return whether the forward pass writes none."""
    return serves(problem) and _is_reached(problem)


def num_parts(problem: AttentionProblem) -> tuple[int, ...]:
    """Return the columns of both products that kernels are compiled for, in parts of 64."""
    sizes = problem.head_dim, problem.value_dim
    return tuple(map(parts_of, sizes)) if is_fused(problem) else ()


def parts_of(columns: int) -> int:
    """Return how many stages of 64 columns are multiplied."""
    return -(-columns // _PART)


def serves(problem: AttentionProblem) -> bool:
    """Return whether the forward pass of a problem of any lengths writes no scores.

    Weights that are divided by their sums later need the exponents of bf16.
    """
    return problem.precision is Precision.BF16 and _is_plain(problem)


def serves_gradients(problem: AttentionProblem) -> bool:
    """Return whether the backward pass of a problem of any lengths writes no scores."""
    known = problem.precision in (Precision.BF16, Precision.FP16)
    return known and problem.value_dim <= _MOST_COLUMNS and _is_plain(problem)


def fits(lines: int, len_k: int, value_dim: int, device: torch.device) -> bool:
    """Return whether sizes are for it, and a device has its instructions.

    Args:
        lines: rows of all heads, which blocks share.
        len_k: with many keys products in fp32 take no more memory than scores.
        value_dim: columns of those.
        device: of the tensors.
    """
    is_large = lines >= _LEAST_LINES and len_k >= max(_LEAST_KEYS, value_dim)
    return is_large and _is_on_hopper(device)


def _is_plain(problem: AttentionProblem) -> bool:
    """Return whether scores have nothing but a scale and causal order."""
    sizes = problem.head_dim, problem.value_dim
    return (
        problem.head_dim <= _MOST_COLUMNS
        and not any(size % _STEP for size in sizes)
        and problem.scale > 0
        and problem.window == (-1, -1)
        and problem.dilation == 1
        and problem.mask is MaskKind.NONE
        and not (problem.softcap or problem.has_sinks or problem.has_alibi or problem.dropout_p)
        and problem.aux in (Aux.NONE, Aux.LSE)
    )


def _is_reached(problem: AttentionProblem) -> bool:
    """Return whether sizes and the current device are for it: plans are made for that."""
    lines = problem.batch * problem.num_heads * problem.len_q
    device = torch.device(problem.device_type)
    there = device.type == "cpu" or torch.cuda.is_available()
    return there and fits(lines, problem.len_k, problem.value_dim, device)


def _is_on_hopper(device: torch.device) -> bool:
    """Return whether a device has the kernel's instructions."""
    is_cuda = device.type == "cuda" and not why_no_gluon()
    return is_cuda and probe(device).compute_capability == _HOPPER
