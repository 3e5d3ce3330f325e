"""Exact attention for GPUs of compute capability 9.0, written in Gluon.

Keys and values pass through TMA and products through wgmma; see `adaattn.backends.hopper.kernel`.
Sequences may be packed, blocks of keys listed, and heads have windows, scales and softcaps of their
own. It needs Triton and strides of 16 bytes. Gradients are without lists; those of queries, and of
grouped heads those of keys and values too, are added up in no fixed order up to 128 columns, unless
PyTorch was asked for deterministic algorithms, or `batch_invariant`; above, beside most masks,
where grouped heads have short blocks, and over few keys, where that is faster, always the same way
(`gradient_launch.choose_gradients`).
"""

import math
from typing import Final

from adaattn.backends.hopper.executor import direct, is_ready, run
from adaattn.backends.hopper.gradient_launch import TILE_NUMBERS, choose_gradients
from adaattn.backends.hopper.gradient_numbers import num_key_tiles
from adaattn.backends.hopper.launch import lists_mask, tiles_of
from adaattn.backends.own_kernels import why_no_gluon
from adaattn.spec import (
    AttentionProblem,
    Aux,
    Capability,
    Feature,
    HardwareFacts,
    HeadGroup,
    KVKind,
    MaskKind,
    Overhead,
    Precision,
)

__all__ = ["CAPABILITIES", "direct", "is_ready", "run"]

_LEAST_COLUMNS: Final = 32
_COLUMN_STEP: Final = 8
_STRIDE_BYTES: Final = 16
_FEW_ROWS: Final = 64
_LONG_ROWS: Final = 2048
_MOST_TIMED: Final = 128
_LISTED_ROWS: Final = 128
_LISTED_KEYS: Final = 64


def _narrow(problem: AttentionProblem) -> str:
    """Return why columns do not fit TMA and wgmma, or ""."""
    sizes = problem.head_dim, problem.value_dim
    if min(sizes) >= _LEAST_COLUMNS and not any(size % _COLUMN_STEP for size in sizes):
        return ""
    return (
        f"it takes D and Dv from {_LEAST_COLUMNS} on in steps of {_COLUMN_STEP}, "
        f"got {problem.head_dim} and {problem.value_dim}"
    )


def _layout(problem: AttentionProblem) -> str:
    """Return why TMA cannot read the tensors, or ""."""
    if problem.dense_columns and problem.stride_bytes % _STRIDE_BYTES == 0:
        return ""
    if problem.stride_bytes == 1 or problem.batch_invariant:
        # In a graph nothing is known; under batch_invariant a sequence alone may lie otherwise than
        # in a batch, and both must go this way. What cannot be read is copied.
        return ""
    return f"it takes adjacent columns and strides that are multiples of {_STRIDE_BYTES} bytes"


def _negative(problem: AttentionProblem) -> str:
    """Return why the scale's sign is not its, or ""."""
    return "" if problem.scale > 0 else f"it takes scales above 0, got {problem.scale:g}"


def _lists(problem: AttentionProblem) -> str:
    """Return why a list of blocks does not fit its tiles, or ""."""
    rows, keys = problem.block_size
    if rows % _LISTED_ROWS == 0 and keys % _LISTED_KEYS == 0:
        return ""
    return (
        f"it takes lists of blocks whose rows are multiples of {_LISTED_ROWS} and whose keys are "
        f"multiples of {_LISTED_KEYS}, got {rows} and {keys}"
    )


def _untrained(problem: AttentionProblem) -> str:
    """Return why gradients are not its, or ""."""
    refused = {
        "a list of blocks": problem.has_blocks,
        "numbers of each head": problem.head_terms.value > 0,
    }
    found = [text for text, applies in refused.items() if applies and problem.wants_gradients]
    return f"it has no gradients with {', nor with '.join(found)}" if found else ""


def _overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    """Return what is made of a mask: a bit for each pair, and blocks that it shows.

    A backward pass takes terms of rows beside it, and sums in fp32 that are read again, of queries
    or of all gradients; where those of queries have a kernel of their own there are no sums.
    """
    del group, hardware, density
    if not problem.wants_gradients:
        if not lists_mask(problem):
            return Overhead()
        pairs = float(math.prod(problem.mask_shape))
        return Overhead(bytes_moved=2.125 * pairs, workspace_bytes=pairs / 8.0, launches=2)
    variant = choose_gradients(problem)
    of_head = tiles_of(problem, problem.len_q, variant.block_m)
    tiles = problem.batch * problem.num_heads * of_head
    sums, terms = 4.0 * tiles * TILE_NUMBERS, 8.0 * tiles * variant.block_m
    if variant.heads_apart:
        key_heads = problem.batch * problem.num_kv_heads
        sums += 8.0 * key_heads * num_key_tiles(problem, variant) * TILE_NUMBERS
    packed = 0.0
    if variant.packs_mask:  # a bit for each pair, with rows in lines and with keys
        packed = math.prod(problem.mask_shape) / 4.0
    if variant.is_split:
        moved = 3 * terms + 6 * packed
        return Overhead(bytes_moved=moved, workspace_bytes=terms + packed, launches=2)
    workspace = sums + terms + packed + (8.0 * tiles if variant.is_ordered else 0.0)
    return Overhead(bytes_moved=4 * sums + 6 * packed, workspace_bytes=workspace, launches=2)


def _order(problem: AttentionProblem) -> int:
    """Return its place behind what PyTorch's users would run; measured times bring it forward.

    Few rows of a head leave most of a tile empty, and its keys to one block: there `triton`, which
    splits them, is before it. Where no table speaks (any batch alike, numbers of each head) it is
    before `triton` for long rows without a mask alone (H200, 128 / 512 / 4K
    rows, D 64 and 128: 0.8 / 1.0 / 1.0 to 1.5 times as fast; with a bias 0.7 to 0.9). Packed
    sequences that may not depend on one another have lengths that nobody may ask for. In training
    all others are before it: times must say that its gradients are faster. They were over long rows
    of up to 128 columns without a mask (H200), so that it is first there where any batch is to be
    alike.
    """
    if problem.wants_gradients:
        is_dense = problem.num_sequences == 0 and problem.mask is MaskKind.NONE
        known = is_dense and max(problem.head_dim, problem.value_dim) <= _MOST_TIMED
        is_first = problem.batch_invariant and known and problem.len_q >= _LONG_ROWS
        return 45 if is_first else 75
    rows, _ = problem.longest
    least = _FEW_ROWS
    if problem.wants(Aux.DROPPED_MASS):
        return 46
    if problem.batch_invariant or problem.head_terms.value:
        if problem.mask is not MaskKind.NONE or problem.num_sequences:
            return 46
        least = _LONG_ROWS - 1
    return 46 if rows <= least else 45


CAPABILITIES = (
    Capability(
        name="hopper",
        backend="hopper",
        device_types=("cuda",),
        precisions=(Precision.BF16, Precision.FP16),
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.CAUSAL_BOTTOM_RIGHT
            | Feature.BOOLEAN_MASK
            | Feature.ADDITIVE_MASK
            | Feature.MASKED_POSITIONS
            | Feature.WIDE_MASK
            | Feature.WINDOW
            | Feature.SOFTCAP
            | Feature.SINKS
            | Feature.ALIBI
            | Feature.VALUE_DIM
            | Feature.LSE
            | Feature.ROW_MAX
            | Feature.ENTROPY
            | Feature.BLOCK_LIST
            | Feature.DROPPED_MASS
            | Feature.HEAD_TERMS
            | Feature.BATCH_INVARIANT
            | Feature.BACKWARD
            | Feature.DETERMINISTIC_BACKWARD
            | Feature.LSE_GRADIENT
            | Feature.SINKS_GRADIENT
        ),
        kv_kinds=(KVKind.DENSE, KVKind.PACKED),
        overhead=_overhead,
        rules=(_narrow, _layout, _negative, _lists, _untrained),
        max_head_dim=256,
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        skips_hidden=True,
        is_fused=True,
        is_one_kernel=True,
        efficiency=0.65,
        unavailable=why_no_gluon(),
        order=_order,
        compiles=True,
        compile_ms=5000.0,  # 3 to 9 s (Triton 3.6, 2026-11)
    ),
)
