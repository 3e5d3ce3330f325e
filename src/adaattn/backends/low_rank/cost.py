"""What low rank takes beside the products of attention: projections, and a whole backward pass."""

import math
from typing import Final

from adaattn.spec import AttentionProblem, HardwareFacts, HeadGroup, LowRank, Overhead, Precision

__all__ = ["BACKWARD_FACTOR", "overhead", "sketch_overhead"]

BACKWARD_FACTOR: Final = 1.0
"""Its backward pass takes all columns, and is counted in `overhead`."""

_BACKWARD: Final = 2.5
"""Products of a backward pass, over those of a forward pass."""

_FUSED_SHARE: Final = 0.55
"""Share of the matrix rate of the fused backward: sdpa.flash's own."""

_LAUNCHES: Final = 60

_PRODUCTS_SHARE: Final = 0.37
"""Share of the matrix rate of sketches and projections.

NVIDIA H200, bf16, D 1024, 8 heads of 4096 tokens, rank 128 (torch 2.11): both sketches, which are
four products, 82 us, each further product 24 to 27 us.
"""

_FACTOR_S: Final = (1.7e-4, 4e-6)
"""Seconds of a Cholesky QR on a GPU, once and for each matrix, at D 1024 and rank 128.

There 16 matrices took 233 us: Gram matrices 23, factorisation 120, solving 90.
"""


def overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return what Gram matrices, eigenproblems and projections take, and the backward pass."""
    del density
    assert isinstance(group.method, LowRank)
    rank, value_rank = group.method.rank, group.method.value_rank
    kv_heads = problem.batch * problem.num_kv_heads
    tokens = problem.len_q * problem.batch * problem.num_heads + problem.len_k * kv_heads
    dim = max(problem.head_dim, problem.value_dim)
    flops = 2.0 * tokens * dim * (dim + rank + value_rank)
    flops += 2.0 * problem.len_k * kv_heads * dim * dim
    kept = rank + (value_rank or problem.value_dim)
    whole, whole_s = _whole_backward(problem, group, hardware)
    return Overhead(
        flops=flops,
        bytes_moved=4.0 * tokens * dim * 4,
        workspace_bytes=tokens * kept * problem.precision.bits / 8,
        launches=_LAUNCHES,
        seconds=_eigen_s(problem, hardware) + whole_s,
        flops_in_seconds=whole,
    )


def sketch_overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return what sketches of k and v, their orthonormalisation and projections take."""
    del density
    assert isinstance(group.method, LowRank)
    ranks = group.method.columns(problem.head_dim, problem.value_dim)
    kv_heads = problem.batch * problem.num_kv_heads
    keys, rows = problem.len_k * kv_heads, problem.len_q * problem.batch * problem.num_heads
    widths = zip((problem.head_dim, problem.value_dim), ranks, strict=True)
    # Two products are a sketch, one projects k or v; one projects q, one widens the output.
    flops = sum(2.0 * (3 * keys + rows) * dim * rank for dim, rank in widths)
    columns, size = problem.head_dim + problem.value_dim, group.scheme.inputs.bits / 8
    rate = hardware.rates.matrix_flops_of(group.scheme.inputs)
    return Overhead(
        bytes_moved=2.0 * keys * columns * size,  # k and v are read thrice
        workspace_bytes=(keys + rows) * sum(ranks) * size,
        seconds=flops / max(_PRODUCTS_SHARE * rate, 1.0) + _factor_s(problem, ranks[0], hardware),
        flops_in_seconds=flops,
    )


def _factor_s(problem: AttentionProblem, rank: int, hardware: HardwareFacts) -> float:
    """Return the seconds of making the columns of both sketches orthonormal."""
    dim = max(problem.head_dim, problem.value_dim)
    count = 2 * problem.batch * problem.num_kv_heads
    if problem.device_type == "cuda":
        once, each = _FACTOR_S
        return once * rank / 128 + count * each * dim / 1024 * (rank / 128) ** 2
    flops = count * (3.0 * dim * rank**2 + rank**3 / 3)
    return flops / max(_PRODUCTS_SHARE * hardware.rates.flops_of(Precision.FP64), 1.0)


def _eigen_s(problem: AttentionProblem, hardware: HardwareFacts) -> float:
    """Return the seconds of the symmetric eigenproblems behind the projections.

    Three for each key head: two for the scores, one for the values. A CPU takes about
    45 D^3 operations' worth of its fp32 matrix rate for each (9 D^3 at a fifth of the rate:
    0.2 ms at D 64, 14 ms at D 512 on two cores); a GPU is bound by its steps, not by
    arithmetic: 1.6 ms at D 128 on an H200.
    """
    dim = max(problem.head_dim, problem.value_dim)
    count = 3 * problem.batch * problem.num_kv_heads
    if problem.device_type == "cuda":
        return count * 1.6e-3 * math.pow(dim / 128, 1.5)
    return count * (1e-4 + 45.0 * dim**3 / max(hardware.rates.flops_of(Precision.FP32), 1.0))


def _whole_backward(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts
) -> tuple[float, float]:
    """Return (FLOPs, seconds) of a backward pass that takes all columns.

    On a CPU the fused kernel computes it, on a GPU chunks of written-out weights, for which
    half of the fused kernel's rate is assumed.
    """
    if not problem.requires_grad:
        return 0.0, 0.0
    columns = problem.head_dim + problem.value_dim
    products = 2.0 * problem.visible_pairs * columns * problem.batch * problem.num_heads
    share = _FUSED_SHARE if problem.device_type == "cpu" else 0.5 * _FUSED_SHARE
    rate = hardware.rates.matrix_flops_of(group.scheme.inputs)
    return _BACKWARD * products, _BACKWARD * products / max(rate * share, 1.0)
