"""What the portable Triton kernels can do."""

import math
from typing import Final

from adaattn.backends.own_kernels import why_no_triton
from adaattn.backends.triton.arguments import Arguments
from adaattn.backends.triton.gradient_launch import GradientArguments
from adaattn.backends.triton.launch import (
    COPIED_BYTES,
    LEAST_BLOCK,
    halved_columns,
    lift_sizes,
)
from adaattn.spec import (
    AttentionProblem,
    Aux,
    Capability,
    Feature,
    HardwareFacts,
    HeadGroup,
    KVKind,
    Overhead,
    Precision,
)

__all__ = ["CAPABILITIES"]

_NOT: Final = Feature.WEIGHTS | Feature.EMPTY


def _overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return what is written and read again: halves of fp32 matrices, parts of splits."""
    del group, density
    arguments = Arguments(problem)
    size, before, launches = 0.0, 0.0, 0
    if arguments.is_halved:
        size = _halves(problem, problem.num_kv_heads, problem.len_k)
        launches += 2
        if problem.wants_gradients:  # those of the forward pass are gone when they are made again
            before = size
            size += _halves(problem, problem.num_heads, problem.len_q)
            launches += 4 + GradientArguments(problem).keys_apart
    sizes = problem.batch, problem.num_heads, problem.len_q
    programs, _ = arguments.programs(*sizes, problem.num_sequences)
    splits, _ = arguments.splits(programs, problem.len_q, problem.len_k, hardware.num_processors)
    if splits > 1:
        sums = 3 if problem.wants(Aux.ENTROPY) else 2
        size += 4.0 * splits * math.prod(sizes) * (problem.value_dim + sums)
        launches += 1
    moved = 2.0 * (before + size)
    return Overhead(bytes_moved=moved, workspace_bytes=size, launches=launches)


def _halves(problem: AttentionProblem, heads: int, rows: int) -> float:
    """Return the bytes of two matrices in halves, of D and Dv columns, with their powers of two."""
    heads *= problem.batch
    columns = halved_columns(problem.head_dim) + halved_columns(problem.value_dim)
    return 4.0 * (heads * rows * columns + 2 * sum(lift_sizes(heads, rows)))


def _blocks(problem: AttentionProblem) -> str:
    """Return why a list of blocks does not fit its tiles, or ""."""
    if not problem.has_blocks:
        return ""
    if problem.dilation > 1:
        return "it takes no list of blocks together with dilation"
    if not any(size % LEAST_BLOCK for size in problem.block_size):
        return ""
    rows, keys = problem.block_size
    return f"it takes blocks in steps of {LEAST_BLOCK}, got {rows} rows and {keys} keys"


def _halfwords(problem: AttentionProblem) -> str:
    """Return why 16-bit rows are not read, or "".

    Those that begin anywhere come 2 bytes at a time, which no asynchronous copy does; what Triton
    3.6 made of products of such tiles was wrong on an H200, for D 57 beside Dv 32.
    """
    if problem.precision is Precision.FP32:
        return ""
    dims = problem.head_dim, problem.value_dim
    if dims[0] % 2 or dims[1] % 2:
        return f"it takes an even D and Dv in 16 bits, got {dims[0]} and {dims[1]}"
    if problem.dense_columns and problem.stride_bytes < COPIED_BYTES:
        return f"it takes 16-bit rows that begin at multiples of {COPIED_BYTES} bytes"
    return ""


def _training(problem: AttentionProblem) -> str:
    """Return why batch-invariant calls do not train on it, or "".

    Their executor is the first in a fixed order, fused ones before the others, and one sequence
    after the other by PyTorch's kernels is faster where sequences are long.
    """
    if not (problem.batch_invariant and problem.wants_gradients):
        return ""
    return "PyTorch's gradients are faster, and batch_invariant asks for no measured time"


CAPABILITIES = (
    Capability(
        name="triton",
        backend="triton",
        device_types=("cuda",),
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        features=~_NOT,
        kv_kinds=(KVKind.DENSE, KVKind.PACKED),
        max_head_dim=256,
        min_compute_capability=(8, 0),
        skips_hidden=True,
        is_fused=True,
        is_one_kernel=True,
        efficiency=0.5,
        unavailable=why_no_triton(),
        # Behind FlexAttention: a user of PyTorch has it without this package. In training behind
        # all others: 0.3 to 0.8 of cuDNN's speed in plain attention (H200, 2026-11).
        order=lambda problem: 75 if problem.wants_gradients else 45,
        compiles=True,
        rules=(_blocks, _halfwords, _training),
        overhead=_overhead,
        compile_ms=1500.0,  # 1 to 2 s (Triton 3.6, 2026-11)
    ),
)
