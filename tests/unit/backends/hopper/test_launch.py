"""How the Hopper kernel cuts a problem into tiles, and who gets which. No GPU, no Triton."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from adaattn._constants import TMA_WRAP
from adaattn.backends.hopper import CAPABILITIES
from adaattn.backends.hopper.launch import (
    choose,
    edges,
    key_blocks,
    tile_bits,
    tiles_of,
)
from adaattn.backends.hopper.order import heads_together, schedule
from adaattn.backends.hopper.views import packed_view
from adaattn.planning.support import reasons
from adaattn.spec import Align, AttentionProblem, Aux, HardwareFacts, MaskKind, Precision
from adaattn.testing import make_problem

H200 = HardwareFacts(device_type="cuda", compute_capability=(9, 0), num_processors=132)
SHARED_BYTES = 227 * 1024
BARRIER_BYTES = 1024
NAMED_BARRIERS = 16
SIZES = (32, 48, 64, 80, 96, 128, 160, 192, 256)
(CAPABILITY,) = CAPABILITIES


def _problem(**values: Any) -> AttentionProblem:
    values = {
        "precision": Precision.BF16,
        "device_type": "cuda",
        "dense_columns": True,
        "stride_bytes": 16,
        "head_dim": 64,
    } | values
    return make_problem(**values)


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("value_dim", SIZES)
@pytest.mark.parametrize("mask", MaskKind)
@pytest.mark.parametrize("len_q", [64, 512, 4096, 16384])
def test_each_choice_fits_shared_memory_and_the_named_barriers(
    head_dim: int, value_dim: int, mask: MaskKind, len_q: int
) -> None:
    for causal, softcap, wide in itertools.product((False, True), (0.0, 30.0), (False, True)):
        problem = _problem(
            head_dim=head_dim,
            value_dim=value_dim,
            mask=mask,
            len_q=len_q,
            is_causal=causal,
            softcap=softcap,
            mask_is_wide=wide and mask is MaskKind.ADDITIVE,
        )
        tiling = choose(problem).tiling
        assert tiling.shared_bytes <= SHARED_BYTES - BARRIER_BYTES
        # Triton takes 0 to 1 + workers; the stages follow from 5 on.
        stages = tiling.stages_k + tiling.stages_v + tiling.warpgroups * tiling.stages_m
        turns = tiling.warpgroups * tiling.in_turns
        assert 5 + stages + turns <= NAMED_BARRIERS
        assert tiling.block_d >= head_dim
        assert tiling.block_v >= value_dim


@pytest.mark.parametrize("align", Align)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (5, -1), (-1, 7), (70, 3), (200, 200)])
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (100, 100), (63, 300), (300, 63), (1, 200)])
def test_the_blocks_of_a_tile_are_those_that_hold_a_visible_key(
    align: Align, is_causal: bool, window: tuple[int, int], len_q: int, len_k: int
) -> None:
    problem = _problem(len_q=len_q, len_k=len_k, is_causal=is_causal, align=align, window=window)
    right, left = edges(problem)
    block_n, num_rows = 32, 64
    for first_row in range(0, len_q, num_rows):
        rows = range(first_row, min(first_row + num_rows, len_q))
        seen = {
            key // block_n
            for row, key in itertools.product(rows, range(len_k))
            if (right < 0 or key <= row + problem.offset + right)
            and (left < 0 or key >= row + problem.offset - left)
        }
        start, end = key_blocks(problem, first_row, num_rows, block_n)
        assert end > start
        if seen:
            assert (start, end) == (min(seen), max(seen) + 1)
        else:
            assert end - start == 1


@pytest.mark.parametrize("num_heads", [1, 3, 8])
@pytest.mark.parametrize("together", [1, 2, 8])
@pytest.mark.parametrize("costs", [(1,), (1, 2, 3), (5, 5, 5, 5), tuple(range(1, 34))])
def test_each_tile_is_in_exactly_one_list(
    num_heads: int, together: int, costs: tuple[int, ...]
) -> None:
    num_blocks = min(132, num_heads * len(costs))
    lists = schedule(costs, num_heads, together, num_blocks)
    bits = tile_bits(len(costs))
    wanted = [head << bits | tile for head in range(num_heads) for tile in range(len(costs))]
    assert sorted(itertools.chain(*lists)) == wanted
    assert len(lists) == num_blocks
    assert all(lists)


def test_lists_of_a_causal_problem_are_balanced() -> None:
    """A static order from the longest tile to the shortest was 1.7 times out of balance."""
    costs = tuple(range(1, 129))
    lists = schedule(costs, 16, 2, 132)
    loads = [sum(costs[tile & 127] + 2 for tile in tiles) for tiles in lists]
    assert max(loads) < 1.02 * sum(loads) / len(loads)


def test_tiles_cover_all_rows() -> None:
    problem = _problem(len_q=1000)
    tiling = choose(problem).tiling
    assert tiles_of(problem, problem.len_q, tiling.block_m) * tiling.block_m >= 1000
    assert (tiles_of(problem, problem.len_q, tiling.block_m) - 1) * tiling.block_m < 1000
    assert [tile_bits(count) for count in (1, 2, 3, 4, 5)] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    "lengths", [(1,), (127, 1, 128), (0, 0, 0, 5), (129,) * 9, (100, 28, 300), (1,) * 50]
)
def test_packed_sequences_have_tiles_enough_at_places_that_depend_on_starts_alone(
    lengths: tuple[int, ...],
) -> None:
    """The kernel looks for the last sequence whose first tile is not behind its own."""
    problem = make_problem(lengths_q=lengths, precision=Precision.BF16, head_dim=64)
    tiling = choose(problem).tiling
    starts = list(itertools.accumulate(lengths, initial=0))
    first = [start // tiling.block_m + n for n, start in enumerate(starts[:-1])]
    rows = set()
    for tile in range(tiles_of(problem, problem.len_q, tiling.block_m)):
        sequence = max(n for n, place in enumerate(first) if place <= tile)
        start = (tile - first[sequence]) * tiling.block_m
        end = min(start + tiling.block_m, lengths[sequence])
        rows |= {starts[sequence] + row for row in range(start, end)}
    assert rows == set(range(sum(lengths)))


@pytest.mark.parametrize("strides", [(0, 50 * 32, 32, 1), (0, 32, 3 * 32, 1)], ids=str)
def test_tma_sees_the_rows_of_one_sequence(strides: tuple[int, ...]) -> None:
    """A box that begins n rows before a sequence's end has these rows, and no more."""
    num_rows, tokens = 8, 50
    shape, by = packed_view((1, 3, tokens, 32), strides)
    assert all(0 < 2 * step < 2**40 for step in by[:-1])  # what TMA takes, in bytes
    for row, n, head in itertools.product((0, 1, 30, 42), range(num_rows + 1), range(3)):
        first, fourth = TMA_WRAP, TMA_WRAP - n
        assert first < shape[0]
        inside = [
            2 * (first * by[0] + (row + n) * by[1] + head * by[2] + step * by[3]) % 2**64
            for step in range(fourth, fourth + num_rows)
            if step < shape[3]
        ]
        assert inside == [2 * (head * strides[1] + (row + i) * strides[2]) for i in range(n)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [(128, 64), (128, 128), (256, 192), (384, 512)])
@pytest.mark.parametrize("mask", MaskKind)
@pytest.mark.parametrize("len_q", [512, 4096])
def test_blocks_of_a_list_are_whole_tiles(
    head_dim: int, block_size: tuple[int, int], mask: MaskKind, len_q: int
) -> None:
    for is_causal, softcap in itertools.product((False, True), (0.0, 30.0)):
        problem = _problem(
            head_dim=head_dim,
            block_size=block_size,
            mask=mask,
            len_q=len_q,
            is_causal=is_causal,
            softcap=softcap,
        )
        found = choose(problem)
        assert block_size[0] % found.tiling.block_m == 0
        assert found.list_ratio * found.tiling.block_n == block_size[1]
        assert found.tiling.shared_bytes <= SHARED_BYTES - BARRIER_BYTES
        assert not found.has_tiles


@pytest.mark.parametrize(
    ("values", "to_end", "unaligned"),
    [
        ({"is_causal": True}, False, False),
        ({"is_causal": True, "align": Align.BOTTOM_RIGHT}, True, True),
        ({"is_causal": True, "align": Align.BOTTOM_RIGHT, "packed_square": True}, False, False),
        ({"window": (-1, 5)}, False, True),
        ({"align": Align.BOTTOM_RIGHT, "has_alibi": True}, True, False),
    ],
)
def test_where_packed_sequences_are_aligned_is_not_known_on_the_host(
    values: dict[str, Any], to_end: bool, unaligned: bool
) -> None:
    packed = {"num_sequences": 3, "len_q": 900, "len_k": 2000, "max_len_q": 300, "max_len_k": 900}
    found = choose(_problem(**(packed | values)))
    assert found.is_packed
    assert found.to_end is to_end
    assert found.has_unaligned_right is unaligned
    assert found.is_ragged
    assert found.may_hide


def test_heads_of_a_group_of_key_heads_are_worked_on_together() -> None:
    long = _problem(len_q=65536, num_heads=8, num_kv_heads=2, head_dim=128)
    assert heads_together(long) == 4
    assert heads_together(replace(long, len_k=1024)) > 8


@pytest.mark.parametrize(
    ("values", "is_fixed"),
    [
        ({}, True),
        ({"aux": Aux.LSE | Aux.ENTROPY}, True),
        ({"aux": Aux.ROW_MAX}, False),
        ({"precision": Precision.FP16}, False),
        ({"mask": MaskKind.BOOLEAN}, False),
    ],
)
def test_the_fixed_reference_serves_where_it_loses_nothing(
    values: dict[str, Any], is_fixed: bool
) -> None:
    assert choose(_problem(**values)).fixed is is_fixed


@pytest.mark.parametrize(
    ("values", "unaligned", "may_hide"),
    [
        ({"is_causal": True, "len_q": 4096}, False, False),
        ({"is_causal": True, "len_q": 128, "len_k": 4096}, False, False),
        ({"is_causal": True, "len_q": 100, "len_k": 228}, False, False),
        ({"is_causal": True, "len_q": 100, "len_k": 229}, True, True),
        ({"is_causal": True, "len_q": 256, "len_k": 128}, False, True),
        ({"is_causal": True, "window": (1024, -1)}, True, True),
        ({"window": (-1, 5)}, True, True),
    ],
)
def test_masks_are_read_where_edges_do_not_fall_on_blocks(
    values: dict[str, Any], unaligned: bool, may_hide: bool
) -> None:
    align = Align.TOP_LEFT if values.get("len_q") == 4096 else Align.BOTTOM_RIGHT
    found = choose(_problem(head_dim=128, **({"align": align} | values)))
    assert found.has_right
    assert found.has_unaligned_right is unaligned or "window" in values
    assert found.may_hide is may_hide


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, ""),
        ({"head_dim": 20}, "it takes D and Dv from 32 on in steps of 8, got 20 and 20"),
        ({"value_dim": 36}, "it takes D and Dv from 32 on in steps of 8, got 64 and 36"),
        (
            {"stride_bytes": 8},
            "it takes adjacent columns and strides that are multiples of 16 bytes",
        ),
        (
            {"dense_columns": False},
            "it takes adjacent columns and strides that are multiples of 16 bytes",
        ),
        ({"scale": -1.0}, "it takes scales above 0, got -1"),
        ({"head_dim": 512}, "it takes head dimensions up to 256, got 512"),
        ({"precision": Precision.FP32}, "it takes bf16, fp16, got fp32"),
        ({"requires_grad": True, "head_dim": 256}, ""),
        ({"num_sequences": 3}, ""),
        ({"dense_columns": False, "stride_bytes": 1}, ""),  # in a graph nobody knows
        ({"block_size": (256, 192)}, ""),
        (
            {"block_size": (64, 128)},
            "it takes lists of blocks whose rows are multiples of 128 and whose keys are "
            "multiples of 64, got 64 and 128",
        ),
        (
            {"block_size": (128, 32)},
            "it takes lists of blocks whose rows are multiples of 128 and whose keys are "
            "multiples of 64, got 128 and 32",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_said(values: dict[str, Any], sentence: str) -> None:
    found = reasons(replace(CAPABILITY, unavailable=""), _problem(**values), H200)
    assert found == ((sentence,) if sentence else ())


@pytest.mark.parametrize(
    ("generation", "serves"), [((8, 0), False), ((9, 0), True), ((10, 0), False)]
)
def test_only_hopper_has_its_instructions(generation: tuple[int, int], serves: bool) -> None:
    facts = replace(H200, compute_capability=generation)
    assert (reasons(replace(CAPABILITY, unavailable=""), _problem(), facts) == ()) is serves
