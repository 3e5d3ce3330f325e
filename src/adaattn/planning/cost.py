"""Roofline estimates: FLOPs, bytes, workspace and time of one way of computing attention.

Formulas, with P the (query, key) pairs that are computed, per batch and query head:

- products: 2 * P * (D + Dv) FLOPs forward, 2.5 times that again backward (low rank has its
  backward through all columns);
- traffic: q, k, v and the output once; materialised scores six times in fp32;
- time: the larger of FLOPs over the achievable rate and bytes over the bandwidth (their
  sum where scores are materialised, since the passes do not overlap), plus launches.

They rank candidates; they do not predict a stopwatch.
"""

import math
from functools import lru_cache
from typing import Final

from adaattn.spec import (
    AttentionProblem,
    BlockSparse,
    Capability,
    Cost,
    HardwareFacts,
    HeadGroup,
    LowRank,
    MaskKind,
    Method,
    Precision,
)

__all__ = [
    "SELECTION_STRIDE",
    "computed_pairs",
    "copied_bytes",
    "estimate",
    "measuring_ms",
    "visible_pairs",
]

SELECTION_STRIDE: Final = 12.8
"""Block selection scores 5 of 64 query rows exactly."""

_BACKWARD_FACTOR: Final = 3.5
_FUSED_SHARE: Final = 0.55
"""Share of the matrix rate of the fused backward: sdpa.flash's own."""

_INNER_SHARE: Final = 0.5
"""Share of the matrix rate of the kernels that other ways are made of."""

_SCORE_PASSES: Final = 6
_DECODE_ROWS: Final = 8
_DECODE_SHARES: Final = ((0.12, 0.6), (0.5, 0.05))
"""Share of the bandwidth that decoding reaches: (SDPA, grouped) on a CPU, on CUDA."""

_DECODE_GROUP: Final = 8
"""Query heads per key head for which SDPA's share on a CPU holds."""

_SAMPLE_PASSES: Final = 24
"""Passes over the scores of sampled rows: masks, softmax, entropies at three scales, errors."""

_CHECK_LAUNCHES: Final = (15, 100)
"""Eager operations' worth of host time in computing sampled rows: on a CPU, on CUDA.

On CUDA the host waits for the device as well; docs/kernel-notes.md has the measurement.
"""


@lru_cache(maxsize=4096)
def visible_pairs(problem: AttentionProblem) -> float:
    """Return how many (query, key) pairs causality and windows leave, per head and batch.

    Exact without dilation; within one pair a row with it; an estimate for packed sequences,
    whose lengths are not all known here.
    """
    left, right = problem.window
    right = 0 if problem.is_causal else right
    if problem.num_sequences:
        pairs = float(problem.attended_pairs)
        pairs *= 0.5 if problem.is_causal else 1.0
        if left >= 0 and right >= 0:
            pairs = min(pairs, float(problem.len_q * (left + 1 + right)))
    else:
        low, high, count = problem.offset, problem.len_k, problem.len_q
        upper = _clamped_sum(count, low + right + 1, high) if right >= 0 else count * high
        lower = _clamped_sum(count, low - left, high) if left >= 0 else 0
        pairs = float(max(upper - lower, 0))
    return pairs / problem.dilation


def computed_pairs(problem: AttentionProblem, capability: Capability) -> float:
    """Return how many pairs an executor works through, hidden ones included if it does."""
    if capability.skips_hidden:
        return visible_pairs(problem)
    if problem.num_sequences:
        return float(problem.attended_pairs)
    return float(problem.len_q * problem.len_k)


def estimate(
    problem: AttentionProblem,
    capability: Capability,
    group: HeadGroup,
    hardware: HardwareFacts,
    *,
    density: float = 1.0,
) -> Cost:
    """Return what computing all heads of ``problem`` in this way needs.

    Args:
        problem: simplified.
        capability: the executor.
        group: its parameters; ``group.heads`` is ignored, give a problem of those heads.
        hardware: the device and its rates.
        density: share of the blocks kept, for the block-sparse method.
    """
    heads = problem.batch * problem.num_heads
    dim, value_dim = _dims(problem, group)
    pairs = computed_pairs(problem, capability)
    training = _BACKWARD_FACTOR if problem.requires_grad else 1.0
    flops = 2.0 * pairs * (dim + value_dim) * heads * training * density
    if isinstance(group.method, LowRank):
        flops /= training
    moved = float(_tensor_bytes(problem, group)) * (2.0 if problem.requires_grad else 1.0)
    if capability.expands_kv and problem.group_size > 1:
        moved += 2.0 * _expanded_bytes(problem, group)
    score_bytes = 0.0
    if capability.materialises_scores:
        score_bytes = 4.0 * pairs * heads * _SCORE_PASSES * training
    extra_flops, extra_bytes, extra_launches = _approximation_work(problem, group, density)
    launches = capability.num_launches * _num_chunks(problem, group) + extra_launches
    rates = hardware.rates
    compute_s = flops / _flops_rate(capability, group, hardware)
    compute_s += extra_flops / max(rates.flops_of(Precision.FP32), 1.0)
    memory_s = (moved + extra_bytes) / _bandwidth(problem, capability, hardware)
    if problem.len_q <= _DECODE_ROWS and not capability.materialises_scores:
        compute_s = min(compute_s, memory_s)
    time_s = max(compute_s, memory_s) + score_bytes / max(rates.bandwidth, 1.0)
    if isinstance(group.method, LowRank):
        whole, whole_s = _whole_backward(problem, group, hardware, pairs)
        flops += whole
        time_s += _eigen_s(problem, hardware) + whole_s
    return Cost(
        flops=flops + extra_flops,
        bytes_moved=moved + extra_bytes + score_bytes,
        workspace_bytes=_workspace(problem, capability, group, density),
        time_ms=1e3 * (time_s + launches * rates.launch_s),
    )


def measuring_ms(
    problem: AttentionProblem, hardware: HardwareFacts, rows: int, variants: int
) -> float:
    """Return the time of computing ``rows`` sampled rows exactly, and ``variants`` times again."""
    heads = problem.batch * problem.num_heads
    flops = 2.0 * rows * problem.len_k * (problem.head_dim + problem.value_dim) * heads
    moved = 4.0 * rows * problem.len_k * heads * _SAMPLE_PASSES
    rates = hardware.rates
    once = flops / max(0.5 * rates.flops_of(Precision.FP32), 1.0) + moved / max(
        rates.bandwidth, 1.0
    )
    launches = _CHECK_LAUNCHES[problem.device_type == "cuda"]
    return 1e3 * ((1 + variants) * (once + launches * rates.launch_s))


def copied_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of q, k, v and the output: what serving some heads apart copies."""
    columns = problem.head_dim + problem.value_dim
    tokens = problem.num_heads * problem.len_q + problem.num_kv_heads * problem.len_k
    return problem.batch * tokens * columns * problem.precision.bits // 8


def _clamped_sum(count: int, start: int, high: int) -> int:
    """Return the sum of clamp(start + i, 0, high) over i in range(count)."""
    first = min(max(-start, 0), count)
    last = min(max(high - start, first), count)
    rising = (last - first) * (2 * start + first + last - 1) // 2
    return rising + (count - last) * high


def _dims(problem: AttentionProblem, group: HeadGroup) -> tuple[int, int]:
    """Return the columns of the score product and of the value product."""
    if not isinstance(group.method, LowRank):
        return problem.head_dim, problem.value_dim
    return group.method.rank or problem.head_dim, group.method.value_rank or problem.value_dim


def _element_bytes(problem: AttentionProblem, group: HeadGroup) -> float:
    """Return the bytes of one element as the products read it."""
    return min(problem.precision.bits, group.scheme.inputs.bits) / 8


def _tensor_bytes(problem: AttentionProblem, group: HeadGroup) -> float:
    """Return the bytes of q, k, v, the output and the mask, each once, casts included."""
    elements = problem.batch * (
        problem.num_heads * problem.len_q * (problem.head_dim + problem.value_dim)
        + problem.num_kv_heads * problem.len_k * (problem.head_dim + problem.value_dim)
    )
    total = elements * _element_bytes(problem, group)
    if group.scheme.inputs is not problem.precision:
        total += elements * (problem.precision.bits / 8 + _element_bytes(problem, group))
    if problem.mask is not MaskKind.NONE:
        size = 1 if problem.mask is MaskKind.BOOLEAN else problem.precision.bits // 8
        for extent in problem.mask_shape:
            size *= extent
        total += size
    return total


def _expanded_bytes(problem: AttentionProblem, group: HeadGroup) -> float:
    """Return the bytes of k and v repeated for every query head."""
    columns = problem.head_dim + problem.value_dim
    count = problem.batch * problem.num_heads * problem.len_k * columns
    return count * _element_bytes(problem, group)


def _mask_bytes(problem: AttentionProblem, capability: Capability, group: HeadGroup) -> float:
    """Return the bytes of the mask as a kernel reads it: numbers, and on a GPU stored whole."""
    if problem.mask is MaskKind.NONE or group.launch.chunk_rows:
        return 0.0
    count = float(math.prod(problem.mask_shape))
    if problem.device_type == "cuda" and capability.is_fused:
        count = float(problem.len_q * problem.len_k * math.prod(problem.mask_shape[:2]))
    elif problem.mask is MaskKind.ADDITIVE:
        return 0.0
    return count * _element_bytes(problem, group)


def _num_chunks(problem: AttentionProblem, group: HeadGroup) -> int:
    """Return how many times the executor's operations are launched."""
    if not group.launch.chunk_rows:
        return 1
    sequences = max(problem.num_sequences, 1)
    rows = max(problem.len_q // sequences, 1)
    return sequences * -(-rows // group.launch.chunk_rows)


def _approximation_work(
    problem: AttentionProblem, group: HeadGroup, density: float
) -> tuple[float, float, int]:
    """Return (FLOPs, bytes, launches) that an approximation adds before attention itself."""
    heads, kv_heads = problem.batch * problem.num_heads, problem.batch * problem.num_kv_heads
    tokens = problem.len_q * heads + problem.len_k * kv_heads
    method = group.method
    if isinstance(method, LowRank):
        dim = max(problem.head_dim, problem.value_dim)
        gram = 2.0 * tokens * dim * dim + 2.0 * problem.len_k * kv_heads * dim * dim
        projections = 2.0 * tokens * dim * (method.rank + method.value_rank)
        return gram + projections, 4.0 * tokens * dim * 4, 60
    if isinstance(method, BlockSparse):
        pairs = visible_pairs(problem)
        selection = 2.0 * pairs * problem.head_dim * heads / SELECTION_STRIDE
        score_bytes = 4.0 * pairs * heads / SELECTION_STRIDE * _SCORE_PASSES
        blocks = -(-problem.len_q // max(method.block_size, 1))
        columns = problem.head_dim + problem.value_dim
        gathered = 2.0 * density * pairs / max(method.block_size, 1) * columns * heads
        return selection, score_bytes + gathered * _element_bytes(problem, group), 12 * blocks + 20
    return 0.0, 0.0, 0


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
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, pairs: float
) -> tuple[float, float]:
    """Return (FLOPs, seconds) of low rank's backward pass, which takes all columns.

    On a CPU the fused kernel computes it, on a GPU chunks of written-out weights, for which
    half of the fused kernel's rate is assumed.
    """
    if not problem.requires_grad:
        return 0.0, 0.0
    heads = problem.batch * problem.num_heads
    flops = 2.0 * pairs * (problem.head_dim + problem.value_dim) * heads * (_BACKWARD_FACTOR - 1)
    share = _FUSED_SHARE if problem.device_type == "cpu" else 0.5 * _FUSED_SHARE
    return flops, flops / max(_matrix_rate(hardware, group.scheme.inputs) * share, 1.0)


def _matrix_rate(hardware: HardwareFacts, precision: Precision) -> float:
    """Return the FLOP/s of matrix products; a quarter of fp32's in a format without its own."""
    rates = hardware.rates
    return rates.flops_of(precision) or 0.25 * rates.flops_of(Precision.FP32)


def _flops_rate(capability: Capability, group: HeadGroup, hardware: HardwareFacts) -> float:
    """Return the FLOP/s that the executor reaches when compute-bound."""
    is_kernel = group.method.kind is Method.EXACT and capability.is_fused
    share = capability.efficiency * (1.0 if is_kernel else _INNER_SHARE)
    return max(_matrix_rate(hardware, group.scheme.inputs) * share, 1.0)


def _bandwidth(problem: AttentionProblem, capability: Capability, hardware: HardwareFacts) -> float:
    """Return the bytes per second that the executor reaches when memory-bound."""
    share = 1.0
    if problem.len_q <= _DECODE_ROWS:
        grouped = capability.min_group_size > 1
        share = _DECODE_SHARES[problem.device_type == "cuda"][grouped]
        if not grouped and problem.device_type == "cpu":
            share = min(share * _DECODE_GROUP / problem.group_size, 0.8)
    return max(hardware.rates.bandwidth * share, 1.0)


def _workspace(
    problem: AttentionProblem, capability: Capability, group: HeadGroup, density: float
) -> int:
    """Return the bytes allocated beside inputs and output."""
    heads, kv_heads = problem.batch * problem.num_heads, problem.batch * problem.num_kv_heads
    score = group.scheme.accumulate.bits / 8
    total = score * heads * problem.len_q + _mask_bytes(problem, capability, group)
    if capability.materialises_scores:
        total += 2 * score * heads * problem.len_q * problem.len_k
    if group.launch.chunk_rows:
        rows = min(group.launch.chunk_rows, problem.len_q)
        total += rows * capability.row_bytes(problem)
    if capability.expands_kv and problem.group_size > 1:
        total += _expanded_bytes(problem, group)
    columns = problem.head_dim + problem.value_dim
    tokens = problem.len_q * heads + problem.len_k * kv_heads
    if group.scheme.inputs is not problem.precision:
        total += tokens * columns * _element_bytes(problem, group)
    if isinstance(group.method, LowRank):
        kept = group.method.rank + (group.method.value_rank or problem.value_dim)
        total += tokens * kept * (problem.precision.bits / 8)
    if isinstance(group.method, BlockSparse):
        sampled = -(-problem.len_q // SELECTION_STRIDE)
        total += 2 * 4.0 * heads * sampled * problem.len_k
        total += 2 * density * heads * problem.len_k * columns * _element_bytes(problem, group)
    return int(total)
