"""Roofline estimates: FLOPs, bytes, workspace and time of one way of computing attention.

Formulas, with P the (query, key) pairs that are computed, per batch and query head:

- products: 2 * P * (D + Dv) FLOPs forward, 2.5 times that again backward, unless the executor says
  otherwise; what it takes beside them is its own to say (`Capability.overhead`);
- traffic: q, k, v and the output once; materialised scores six times in fp32;
- time: the larger of FLOPs over the achievable rate and bytes over the bandwidth (their
  sum where scores are materialised, since the passes do not overlap), plus launches.

They rank candidates; they do not predict a stopwatch.
"""

import math
from typing import Final

from adaattn.spec import (
    AttentionProblem,
    Capability,
    Cost,
    HardwareFacts,
    HeadGroup,
    MaskKind,
    Method,
    Precision,
)

__all__ = [
    "computed_pairs",
    "copied_bytes",
    "estimate",
    "measuring_ms",
]

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


def computed_pairs(problem: AttentionProblem, capability: Capability) -> float:
    """Return how many pairs an executor works through, hidden ones included if it does."""
    if capability.skips_hidden:
        return problem.visible_pairs
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
        density: share of the keys kept.
    """
    heads = problem.batch * problem.num_heads
    columns = sum(group.method.columns(problem.head_dim, problem.value_dim))
    pairs = computed_pairs(problem, capability)
    training = capability.backward_factor if problem.requires_grad else 1.0
    flops = 2.0 * pairs * columns * heads * training * density
    moved = float(_tensor_bytes(problem, group)) * (2.0 if problem.requires_grad else 1.0)
    if capability.expands_kv and problem.group_size > 1:
        moved += 2.0 * _expanded_bytes(problem, group)
    score_bytes = 0.0
    if capability.materialises_scores:
        score_bytes = 4.0 * pairs * heads * _SCORE_PASSES * training
    extra = capability.overhead(problem, group, hardware, density)
    launches = capability.num_launches * _num_chunks(problem, group) + extra.launches
    rates = hardware.rates
    compute_s = flops / _flops_rate(capability, group, hardware)
    compute_s += extra.flops / max(rates.flops_of(Precision.FP32), 1.0)
    memory_s = (moved + extra.bytes_moved) / _bandwidth(problem, capability, hardware)
    if problem.len_q <= _DECODE_ROWS and not capability.materialises_scores:
        compute_s = min(compute_s, memory_s)
    time_s = max(compute_s, memory_s) + score_bytes / max(rates.bandwidth, 1.0) + extra.seconds
    return Cost(
        flops=flops + extra.flops + extra.flops_in_seconds,
        bytes_moved=moved + extra.bytes_moved + score_bytes,
        workspace_bytes=int(_workspace(problem, capability, group) + extra.workspace_bytes),
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
    return _num_elements(problem) * problem.precision.bits // 8


def _num_elements(problem: AttentionProblem) -> int:
    """Return the elements of q, k, v and the output."""
    columns = problem.head_dim + problem.value_dim
    tokens = problem.num_heads * problem.len_q + problem.num_kv_heads * problem.len_k
    return problem.batch * tokens * columns


def _element_bytes(problem: AttentionProblem, group: HeadGroup) -> float:
    """Return the bytes of one element as the products read it."""
    return min(problem.precision.bits, group.scheme.inputs.bits) / 8


def _tensor_bytes(problem: AttentionProblem, group: HeadGroup) -> float:
    """Return the bytes of q, k, v, the output and the mask, each once, casts included."""
    elements = _num_elements(problem)
    total = elements * _element_bytes(problem, group)
    if group.scheme.inputs is not problem.precision:
        total += elements * (problem.precision.bits / 8 + _element_bytes(problem, group))
    if problem.mask is not MaskKind.NONE:
        size = 1 if problem.mask is MaskKind.BOOLEAN else problem.precision.bits // 8
        total += size * math.prod(problem.mask_shape)
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


def _flops_rate(capability: Capability, group: HeadGroup, hardware: HardwareFacts) -> float:
    """Return the FLOP/s that the executor reaches when compute-bound."""
    is_kernel = group.method.kind is Method.EXACT and capability.is_fused
    share = capability.efficiency * (1.0 if is_kernel else _INNER_SHARE)
    return max(hardware.rates.matrix_flops_of(group.scheme.inputs) * share, 1.0)


def _bandwidth(problem: AttentionProblem, capability: Capability, hardware: HardwareFacts) -> float:
    """Return the bytes per second that the executor reaches when memory-bound."""
    share = 1.0
    if problem.len_q <= _DECODE_ROWS:
        grouped = capability.min_group_size > 1
        share = _DECODE_SHARES[problem.device_type == "cuda"][grouped]
        if not grouped and problem.device_type == "cpu":
            share = min(share * _DECODE_GROUP / problem.group_size, 0.8)
    return max(hardware.rates.bandwidth * share, 1.0)


def _workspace(problem: AttentionProblem, capability: Capability, group: HeadGroup) -> float:
    """Return the bytes allocated beside inputs and output."""
    heads = problem.batch * problem.num_heads
    score = group.scheme.accumulate.bits / 8
    total = score * heads * problem.len_q + _mask_bytes(problem, capability, group)
    if capability.materialises_scores:
        total += 2 * score * heads * problem.len_q * problem.len_k
    if group.launch.chunk_rows:
        rows = min(group.launch.chunk_rows, problem.len_q)
        total += rows * capability.row_bytes(problem)
    if capability.expands_kv and problem.group_size > 1:
        total += _expanded_bytes(problem, group)
    if group.scheme.inputs is not problem.precision:
        total += _num_elements(problem) * _element_bytes(problem, group)
    return total
