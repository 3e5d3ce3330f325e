"""What measured times say: of their own problems, of larger ones, and with one of them left out."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from adaattn.cli.machines import facts_of
from adaattn.hardware.tables import read_table
from adaattn.planning import decide
from adaattn.planning.evidence import DISPLACES, fastest, interpolated, ratio
from adaattn.planning.stand_ins import GROUPED, MARGIN, MARGIN_APART, stand_ins
from adaattn.spec import (
    Align,
    AttentionProblem,
    Aux,
    Capability,
    Cell,
    MaskKind,
    Measured,
    Policy,
    Precision,
    TimingTable,
)
from adaattn.spec.evidence import problem_class
from adaattn.testing import fake_facts, make_problem
from adaattn.tuning.cell import cell_of
from adaattn.tuning.grid import default_grid

CARDS = ("h200", "h100")
OWN_KERNELS = ("hopper", "triton")

MOST_WRONG = 0.05
"""Share of the cells in which neighbours may take the place of what is faster: the clock's spread
alone moves so many across the line (`DISPLACES`)."""


@cache
def shipped(card: str) -> TimingTable:
    """Return the table of a card alone."""
    files = {"h200": "cuda-h200.json", "h100": "cuda-h100-sxm.json"}
    return read_table(table_file(files[card]), facts_of(card))


def table_file(name: str) -> Path:
    return Path(str(resources.files("adaattn") / "hardware" / "tables" / name))


@cache
def problems() -> dict[tuple[Any, ...], AttentionProblem]:
    """Return the problems of the usual grid by what their cells say of them."""
    return {facts(cell_of(asked.problem, {})): asked.problem for asked in default_grid("cuda")}


def facts(cell: Cell) -> tuple[Any, ...]:
    sizes = (cell.heads, cell.group_size, cell.len_q, cell.len_k, cell.head_dim, cell.visible)
    return (cell.problem_class, cell.num_sequences, *sizes)


def measured_problems(card: str) -> Iterator[tuple[Cell, AttentionProblem]]:
    """Yield the cells of a shipped table that belong to the grid, with their problems."""
    for cells in shipped(card).cells.values():
        for cell in cells:
            if facts(cell) in problems():
                yield cell, problems()[facts(cell)]


def measured_ratio(cell: Cell, name: str, incumbent: str) -> float:
    """Return the time of an executor over another's where they were measured."""
    mine, other = cell.times[name], cell.times[incumbent]
    return max(mine.device_ms / other.device_ms, mine.wall_ms / other.wall_ms)


def without(table: TimingTable, left_out: Cell) -> TimingTable:
    cells = table.cells[left_out.problem_class]
    rest = tuple(cell for cell in cells if cell is not left_out)
    return replace(table, cells={left_out.problem_class: rest})


@cache
def without_class(card: str, left_out: str) -> TimingTable:
    """Return a shipped table that knows nothing of a class."""
    cells = shipped(card).cells
    return replace(shipped(card), cells={name: cells[name] for name in cells if name != left_out})


def table_of(*cells: Cell) -> TimingTable:
    by_class: dict[str, tuple[Cell, ...]] = {}
    for cell in cells:
        by_class[cell.problem_class] = (*by_class.get(cell.problem_class, ()), cell)
    return TimingTable(source="table of a test", cells=by_class)


def times(**milliseconds: float) -> dict[str, Measured]:
    return {name: Measured(device_ms=ms, host_ms=0.01) for name, ms in milliseconds.items()}


@pytest.mark.uncounted
@pytest.mark.parametrize("card", CARDS)
def test_with_one_cell_left_out_its_neighbours_choose_as_well(card: str) -> None:
    taken = wrong = 0
    gains = []
    for cell, problem in measured_problems(card):
        for name in set(OWN_KERNELS) & set(cell.times):
            if cell.default not in cell.times:
                continue
            share = ratio(without(shipped(card), cell), problem, name, cell.default)
            if share is None or share >= DISPLACES:
                continue
            real = measured_ratio(cell, name, cell.default)
            taken += 1
            wrong += real > 1.0 / DISPLACES
            gains.append(-math.log(real))
    assert taken > 100
    assert wrong <= MOST_WRONG * taken
    assert sum(gains) / taken > math.log(1.5)


@pytest.mark.parametrize(("card", "other"), [CARDS, CARDS[::-1]])
def test_a_card_of_the_same_chip_chooses_as_well(card: str, other: str) -> None:
    """H100 and H200 differ in their memory: what one table lacks, the other tells."""
    theirs = {facts(cell): cell for cells in shipped(other).cells.values() for cell in cells}
    taken = wrong = 0
    for cell in chain.from_iterable(shipped(card).cells.values()):
        there = theirs.get(facts(cell))
        if there is None:
            continue
        names = cell.times.keys() & there.times.keys()
        usual = [cell.default] if cell.default else ["sdpa.flash2", "flex", "chunked"]
        place = next((name for name in usual if name in names), None)
        for name in names - {place} if place else ():
            if measured_ratio(there, name, place) < DISPLACES:
                taken += 1
                wrong += measured_ratio(cell, name, place) > 1.0 / DISPLACES
    assert taken > 500
    assert wrong <= MOST_WRONG * taken


@pytest.mark.uncounted
@pytest.mark.parametrize("card", CARDS)
def test_a_problem_that_was_measured_is_expected_to_take_as_long(card: str) -> None:
    """Packed sequences once were expected to take four times as long, for the four of a cell."""
    known = set()
    for cell, problem in measured_problems(card):
        known.add(cell.problem_class)
        for name, time in cell.times.items():
            expected = interpolated(shipped(card), problem, name)
            assert expected is not None
            measured, found, _ = expected
            assert found == cell.problem_class
            assert measured.device_ms == pytest.approx(time.device_ms), (cell.label, name)
    assert len(known) > 15


def shipped_of_cpu(instructions: str) -> TimingTable:
    path = table_file(f"cpu-2-cores-{instructions}.json")
    return TimingTable.from_dict(json.loads(path.read_text(encoding="utf-8")), "cpu")


@pytest.mark.parametrize("instructions", ["avx2", "avx512", "avx512-amx"])
def test_single_tokens_of_grouped_heads_read_each_key_once(instructions: str) -> None:
    """PyTorch's kernel reads it once for each query head."""
    decoding = make_problem(
        num_heads=32, num_kv_heads=8, len_q=1, len_k=16384, head_dim=128, precision=Precision.FP32
    )
    share = ratio(shipped_of_cpu(instructions), decoding, "grouped", "sdpa.flash")
    assert share is not None and share < DISPLACES


@pytest.mark.parametrize("instructions", ["avx2", "avx512"])
@pytest.mark.parametrize("mask", [MaskKind.BOOLEAN, MaskKind.ADDITIVE])
def test_masks_over_the_keys_of_a_cache_are_in_the_tables(
    mask: MaskKind, instructions: str
) -> None:
    """No table had them: decoding of padded prompts stayed with a kernel 10 times as slow."""
    on_cpu = shipped_of_cpu(instructions)
    decoding = make_problem(
        batch=4, num_heads=32, num_kv_heads=8, len_q=1, len_k=1500, head_dim=128, mask=mask,
        mask_shape=(4, 1, 1, 1500), precision=Precision.BF16,
    )  # fmt: skip
    share = ratio(on_cpu, decoding, "grouped", "sdpa.flash")
    assert share is not None and share < DISPLACES
    on_card = replace(decoding, precision=Precision.FP32, device_type="cuda")
    share = ratio(shipped("h200"), on_card, "triton", "sdpa.math")
    assert share is not None and share < DISPLACES


SMALL: dict[str, Any] = {
    "num_heads": 4,
    "len_q": 512,
    "len_k": 512,
    "head_dim": 64,
    "device_type": "cuda",
}


@pytest.mark.parametrize(("batch", "is_taken"), [(1, False), (2, False), (4, True)])
def test_the_time_to_call_a_small_problem_does_not_speak_for_a_large_one(
    batch: int, is_taken: bool
) -> None:
    measured = {
        "slow to call": Measured(device_ms=0.010, host_ms=0.024),
        "usual": Measured(device_ms=0.016, host_ms=0.012),
    }
    measured_on = make_problem(**SMALL)
    table = table_of(cell_of(measured_on, measured))
    problem = replace(measured_on, batch=batch)
    share = ratio(table, problem, "slow to call", "usual")
    assert share is not None
    # Four times the heads take twice the time at least: 20 of 24 microseconds, against 32.
    assert (share < DISPLACES) is is_taken


@pytest.mark.parametrize(("length", "is_known"), [(6371, True), (512, False)])
def test_more_heads_speak_for_fewer_where_these_fill_the_card(length: int, is_known: bool) -> None:
    """Four heads of 6371 tokens are 200 tiles; those of 512 are 16, and others run beside them."""
    measured_on = make_problem(**SMALL | {"num_heads": 32, "len_q": length, "len_k": length})
    table = table_of(cell_of(measured_on, times(fused=1.0, usual=2.0)))
    share = ratio(table, replace(measured_on, num_heads=4, num_kv_heads=4), "fused", "usual")
    assert (share is not None) is is_known


@pytest.mark.parametrize(
    ("rows", "keys", "splits_keys", "expected"),
    [(1, 4096, True, 0.5), (1, 4096, False, 2.0), (1, 128, False, 0.5), (17, 4096, False, 0.5)],
)
def test_a_kernel_that_splits_no_keys_takes_as_long_for_fewer_heads(
    rows: int, keys: int, splits_keys: bool, expected: float
) -> None:
    """By cells of 32 heads 8 of D 512 went to `grouped`, at half of the speed of PyTorch's math."""
    measured_on = make_problem(**SMALL | {"num_heads": 32, "len_q": rows, "len_k": keys})
    table = table_of(cell_of(measured_on, times(one_block=1.0, usual=2.0)))
    asked = replace(measured_on, num_heads=8, num_kv_heads=8)
    share = ratio(table, asked, "one_block", "usual", splits_keys=splits_keys)
    assert share == pytest.approx(expected)
    assert ratio(table, measured_on, "one_block", "usual", splits_keys=False) == pytest.approx(0.5)


@pytest.mark.parametrize(("heads", "kv_heads", "taken"), [(8, 1, "sdpa.math"), (32, 8, "grouped")])
def test_eight_heads_of_d_512_stay_with_pytorchs_math_until_a_kernel_is_compiled(
    heads: int, kv_heads: int, taken: str, executors: tuple[Capability, ...]
) -> None:
    problem = make_problem(
        num_heads=heads, num_kv_heads=kv_heads, len_q=1, len_k=8192, head_dim=512,
        precision=Precision.BF16, device_type="cuda", sdpa_default="sdpa.math",
    )  # fmt: skip
    facts = replace(fake_facts("h200"), timings=shipped("h200"))
    plan = decide(problem, None, facts, Policy(), executors).plan
    assert plan.groups[0].capability == taken


def test_a_packed_cell_says_how_many_sequences_it_had() -> None:
    packed = make_problem(
        **SMALL, num_sequences=4, packed_square=True, max_len_q=128, max_len_k=128
    )
    several, twice = (
        cell_of(problem, times(usual=1.0)) for problem in (packed, replace(packed, num_sequences=8))
    )
    assert several.num_sequences == 4 and "4 times 128 x 128" in several.label
    merged = table_of(several).merged(table_of(twice))
    read = TimingTable.from_dict(merged.to_dict(), "read")
    assert [cell.num_sequences for cell in read.cells[several.problem_class]] == [4, 8]


@pytest.mark.parametrize("card", CARDS)
def test_packed_cells_that_ship_have_equal_lengths(card: str) -> None:
    """As the grid asks for, or of as many tokens as steps of training have."""
    cells = [
        cell for name, cells in shipped(card).cells.items() if "packed" in name for cell in cells
    ]
    assert len(cells) > 100
    others = [cell for cell in cells if facts(cell) not in problems()]
    assert {cell.num_sequences * cell.len_q for cell in others} <= {16384, 32768, 65536}
    assert all(cell.visible == cell.len_q / 2 for cell in others)


def test_executors_are_compared_in_the_cells_that_measured_both() -> None:
    """Shares of the incumbent's time came from different cells, and the slower one won by them."""
    far = make_problem(**SMALL)
    near = replace(far, len_q=1024, len_k=1024)
    table = table_of(
        cell_of(far, times(usual=100.0, slower=4.0, faster=2.0)),
        cell_of(near, times(usual=100.0, slower=1.0)),
    )
    slower, faster = (ratio(table, near, name, "usual") for name in ("slower", "faster"))
    assert slower is not None and faster is not None and slower < faster
    assert fastest(table, near, {"slower": slower, "faster": faster}) == "faster"
    assert fastest(table, near, {"slower": 0.01}) == "slower"


def test_those_that_no_cell_measured_both_of_are_compared_by_their_own_times() -> None:
    """Shares of an incumbent that one cell found ten times as slow took the slower kernel."""
    far = make_problem(**SMALL)
    near = replace(far, len_q=2 * far.len_q, len_k=2 * far.len_k)
    table = table_of(
        cell_of(far, times(usual=1000.0, slower=4.0)),
        cell_of(near, times(usual=400.0, faster=8.0)),
    )
    shares = {name: ratio(table, near, name, "usual") or 1.0 for name in ("slower", "faster")}
    assert shares["slower"] < shares["faster"], "4 of 1000 is less than 8 of 400"
    assert fastest(table, near, shares) == "faster", "twice as long is four times as much"


BEHIND: dict[str, Any] = SMALL | {
    "len_q": 1, "len_k": 2**20, "window": (1023, -1), "align": Align.BOTTOM_RIGHT,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "is_known"),
    [
        ({}, True),
        ({"len_q": 4}, False),
        ({"dilation": 2}, False),
        ({"mask": MaskKind.BOOLEAN}, False),
        ({"mask": MaskKind.ADDITIVE}, False),
        ({"window": (-1, -1), "is_causal": True, "len_q": 2}, False),
    ],
)
def test_cells_of_other_lengths_speak_for_the_window_of_the_last_rows(
    values: dict[str, Any], is_known: bool
) -> None:
    """They read no more than it, however many keys are before; under a mask they read that."""
    asked = make_problem(**BEHIND | {"len_q": 1} | values)
    fewer = replace(asked, len_k=2**12, len_q=1 if values.get("len_q") == 4 else asked.len_q)
    if asked.mask is not MaskKind.NONE:
        fewer = replace(fewer, mask_shape=(*asked.mask_shape[:-1], fewer.len_k))
    table = table_of(cell_of(fewer, times(usual=2.0, faster=1.0)))
    assert (ratio(table, asked, "faster", "usual") is not None) is is_known


def test_of_cells_in_a_window_those_of_the_same_window_are_nearest() -> None:
    asked = make_problem(**BEHIND)
    same = replace(asked, len_k=2**13)
    quarter = replace(asked, len_k=2**18, window=(255, -1))
    table = table_of(
        cell_of(same, times(usual=2.0, faster=1.0)),
        cell_of(quarter, times(usual=1.0, faster=2.0)),
    )
    found = interpolated(table, asked, "faster")
    assert found is not None and found[0].device_ms == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("device", "heads", "is_told"),
    [("cpu", 2, False), ("cpu", 4, True), ("cpu", 32, True), ("cuda", 2, True)],
)
def test_on_a_cpu_eight_heads_do_not_speak_for_two(device: str, heads: int, is_told: bool) -> None:
    """Chunks of 512 tokens took 0.8 of the time of PyTorch's kernel, and of 2 heads 1.0 to 1.6."""
    measured = make_problem(**SMALL | {"num_heads": 8, "device_type": device})
    table = table_of(cell_of(measured, times(usual=1.0, other=0.5)))
    asked = replace(measured, num_heads=heads, num_kv_heads=heads)
    assert (ratio(table, asked, "other", "usual") is not None) is is_told


def test_of_two_that_each_lose_by_one_time_the_one_that_loses_less_is_taken() -> None:
    problem = make_problem(**SMALL)
    both = {
        "usual": Measured(device_ms=200.0, host_ms=200.0),
        "called sooner": Measured(device_ms=30.0, host_ms=20.0),
        "done sooner": Measured(device_ms=10.0, host_ms=40.0),
    }
    table = table_of(cell_of(problem, both))
    shares = {name: ratio(table, problem, name, "usual") for name in both if name != "usual"}
    assert shares == {"called sooner": 0.15, "done sooner": 0.2}
    assert fastest(table, problem, {"called sooner": 0.15, "done sooner": 0.2}) == "done sooner"
    assert fastest(table, problem, {"called sooner": 0.15, "done sooner": 0.8}) == "called sooner"


MIX: dict[str, Any] = {
    "is_causal": True, "has_sinks": True, "softcap": 20.0, "has_alibi": True, "dilation": 2,
    "window": (64, 0), "value_dim": 32, "aux": Aux.ENTROPY,
}  # fmt: skip


def test_a_mix_that_nobody_measured_goes_by_its_simpler_problems_with_a_margin() -> None:
    problem = make_problem(**SMALL, **MIX)
    names = [problem_class(known.problem) for known in stand_ins(problem)]
    whole = "fp32 causal window dilation softcap sinks alibi value_dim"
    assert names[:3] == [f"{whole} statistics", whole, whole.replace(" sinks", "")]
    assert names[-1] == "fp32 causal"
    assert len(names) == len({*names}) == 1 + 2**6
    counts = [len(name.split()) for name in names]
    assert counts == sorted(counts, reverse=True)
    causal = make_problem(**SMALL, is_causal=True)
    for share, expected in ((0.5, 0.5 * MARGIN), (0.8, 0.8 * MARGIN)):
        table = table_of(cell_of(causal, times(fused=share, chunked=1.0)))
        by_stand_in = ratio(table, problem, "fused", "chunked", by_stand_in=True)
        assert by_stand_in == pytest.approx(expected)
        assert ratio(table, problem, "fused", "chunked") is None
        assert ratio(table, causal, "fused", "chunked") == pytest.approx(share)
    found = interpolated(table, problem, "fused")
    assert found is not None and found[1] == "fp32 causal"


@pytest.mark.parametrize(("more", "margin"), [({}, MARGIN), ({"len_k": 1024}, MARGIN_APART)])
def test_of_simpler_problems_the_nearest_count_and_of_these_the_fastest(
    more: dict[str, Any], margin: float
) -> None:
    """A window with a softcap went by windows alone, of which `chunked` writes no scores."""
    asked = make_problem(**SMALL | more, is_causal=True, softcap=20.0, window=(64, 0))
    windows, softcaps = replace(asked, softcap=0.0), replace(asked, window=(-1, -1))
    simplest = replace(windows, window=(-1, -1))
    cells = [cell_of(simplest, times(fused=0.01, chunked=1.0))]
    for problem, share in ((windows, 0.7), (softcaps, 0.2)):
        cells.append(cell_of(problem, times(fused=share, chunked=1.0)))
        told = ratio(table_of(*cells), asked, "fused", "chunked", by_stand_in=True)
        assert told == pytest.approx(share * margin)


@pytest.mark.parametrize(
    ("values", "last"),
    [
        ({"requires_grad": True, "has_sinks": True}, "fp32 training"),
        ({"dropout_p": 0.1, "softcap": 5.0}, "fp32 dropout"),
        ({"mask": MaskKind.BOOLEAN, "mask_shape": (512, 512), "is_causal": True}, "fp32 mask"),
        ({"mask": MaskKind.ADDITIVE, "mask_shape": (1, 512), "softcap": 5.0}, "fp32 bias of_keys"),
        ({"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_q": 128}, "fp32"),
        ({"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_q": 128, "window": (8, 0)},
         "fp32 causal"),
        ({"head_dim": 64, "value_dim": 256}, "fp32 value_dim"),
        ({"num_sequences": 4, "max_len_q": 128, "max_len_k": 128, "packed_square": True},
         "fp32 packed causal"),
        ({"aux": Aux.DROPPED_MASS | Aux.LSE, "block_size": (128, 128), "most_blocks": 2},
         "fp32 blocks128x128 dropped_mass"),
        ({"aux": Aux.WEIGHTS, "has_alibi": True}, "fp32 weights"),
    ],
)  # fmt: skip
def test_what_other_kernels_serve_is_never_left_out(values: dict[str, Any], last: str) -> None:
    assert problem_class(stand_ins(make_problem(**(SMALL | values)))[-1].problem) == last


@pytest.mark.uncounted
@pytest.mark.parametrize("card", CARDS)
def test_with_a_class_left_out_simpler_problems_choose_as_well(card: str) -> None:
    """What may stand in: our kernels, each the same for all mixes, over what writes scores out."""
    taken = wrong = wrong_squares = 0
    for cell, problem in measured_problems(card):
        if len(stand_ins(problem)) == 1 or "chunked" not in cell.times:
            continue
        left = without_class(card, cell.problem_class)
        for name in {*OWN_KERNELS} & {*cell.times}:
            share = ratio(left, problem, name, "chunked", by_stand_in=True)
            if share is not None and share < DISPLACES:
                taken += 1
                is_wrong = measured_ratio(cell, name, "chunked") > 1.0 / DISPLACES
                wrong += is_wrong
                wrong_squares += is_wrong and cell.len_q == cell.len_k
    assert taken > 40
    assert wrong <= MOST_WRONG * taken
    assert wrong_squares <= 4  # of 2100 on both cards, as `MARGIN` says


@pytest.mark.parametrize(
    ("heads", "kv_heads", "len_q", "group"),
    [(16, 1, 512, 8), (71, 1, 512, 1), (28, 1, 512, 7), (32, 2, 17, 8), (32, 2, 16, 16),
     (32, 4, 512, 8)],
)  # fmt: skip
def test_large_groups_go_by_smaller_ones_but_for_few_rows(
    heads: int, kv_heads: int, len_q: int, group: int
) -> None:
    known = {"num_heads": heads, "has_sinks": True, "is_causal": True, "len_q": len_q}
    problem = make_problem(**known, num_kv_heads=kv_heads, len_k=512)
    found = {it.problem.group_size: it.factor for it in stand_ins(problem)[:2]}
    assert list(found)[-1] == group
    if group == problem.group_size:
        return
    assert found == {problem.group_size: 1.0, group: GROUPED}
    near = replace(problem, num_kv_heads=heads // min(group, 4))
    table = table_of(cell_of(near, times(fused=0.1, chunked=1.0)))
    share = ratio(table, problem, "fused", "chunked", by_stand_in=True)
    assert share == pytest.approx(0.1 * GROUPED)
    assert ratio(table, problem, "fused", "chunked") is None


def test_smaller_groups_say_nothing_against_what_writes_no_scores() -> None:
    mask = {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 512, 512)}
    aligned = make_problem(num_heads=16, num_kv_heads=4, len_q=512, len_k=512, **mask)
    problem = replace(aligned, num_kv_heads=1, mask_is_aligned=False)
    table = table_of(cell_of(aligned, times(fused=0.1, chunked=1.0)))
    assert problem_class(problem) not in table.cells
    assert ratio(table, problem, "fused", "chunked", by_stand_in=True) is not None
    assert ratio(table, problem, "fused", "chunked") is None


def test_groups_of_one_say_rightly_who_is_faster_in_groups_of_four() -> None:
    """For what PyTorch has no word for, where `chunked` is the incumbent."""
    taken = wrong = 0
    for card in CARDS:
        for name, cells in shipped(card).cells.items():
            if not {*name.split()} & {"softcap", "sinks", "alibi", "dilation", "window"}:
                continue
            alone = {facts(replace(it, group_size=4)): it for it in cells if it.group_size == 1}
            for cell in cells:
                if cell.group_size == 4 and cell.len_q > 16 and facts(cell) in alone:
                    found = _told_by(alone[facts(cell)], cell)
                    taken, wrong = taken + found[0], wrong + found[1]
    assert taken > 150
    assert wrong <= MOST_WRONG * taken


def _told_by(alone: Cell, grouped: Cell) -> tuple[int, int]:
    """Return how many own kernels take the place of `chunked` by a cell, and how many wrongly."""
    taken = [
        name
        for name in OWN_KERNELS
        if {name, "chunked"} <= {*alone.times} & {*grouped.times}
        and GROUPED * measured_ratio(alone, name, "chunked") < DISPLACES
    ]
    wrong = [name for name in taken if measured_ratio(grouped, name, "chunked") > 1.0 / DISPLACES]
    return len(taken), len(wrong)


def test_who_was_left_out_of_a_cell_does_not_come_in_by_another() -> None:
    """It failed there, or was wrong."""
    causal = make_problem(**SMALL, is_causal=True)
    problem = replace(causal, has_sinks=True)
    table = table_of(
        cell_of(problem, times(chunked=1.0)), cell_of(causal, times(chunked=1.0, fused=0.1))
    )
    assert ratio(table, problem, "fused", "chunked", by_stand_in=True) is None


def test_another_cards_time_does_not_speak_beside_the_cards_own() -> None:
    problem = make_problem(**SMALL)
    own = table_of(cell_of(problem, times(fused=0.9, usual=1.0)))
    other = table_of(cell_of(problem, times(fused=1.3, usual=1.0, new=0.5)))
    both = own.completed(other)
    assert ratio(both, problem, "fused", "usual") == pytest.approx(0.9)
    assert ratio(both, problem, "new", "usual") == pytest.approx(0.5)


def test_a_time_on_the_device_alone_does_not_win() -> None:
    problem = make_problem(**SMALL)
    measured = {
        "slow on the device": Measured(device_ms=0.02, host_ms=0.03),
        "slow to call": Measured(device_ms=0.01, host_ms=0.05),
    }
    table = table_of(cell_of(problem, measured))
    names = tuple(measured)
    assert ratio(table, problem, *names) == pytest.approx(2.0)
    assert ratio(table, problem, *names[::-1]) == pytest.approx(5 / 3)


def test_in_training_the_device_saves_half_of_what_the_host_takes_longer() -> None:
    """A host that is busy with a whole model hides nothing of it."""
    problem = make_problem(**SMALL)
    usual = Measured(device_ms=1.0, host_ms=0.3)
    for saved, is_taken in ((0.06, False), (0.09, False), (0.11, True)):
        ours = Measured(device_ms=1.0 - saved, host_ms=0.5)
        for training in (False, True):
            asked = replace(problem, requires_grad=training)
            table = table_of(cell_of(asked, {"ours": ours, "usual": usual}))
            share = ratio(table, asked, "ours", "usual")
            assert share is not None
            assert (share < DISPLACES) is (is_taken or not training)


def test_of_two_challengers_in_training_the_host_counts_too() -> None:
    trained = replace(make_problem(**SMALL), requires_grad=True)
    measured = {
        "less on the device": Measured(device_ms=0.97, host_ms=0.75),
        "less to call": Measured(device_ms=1.0, host_ms=0.43),
        "usual": Measured(device_ms=2.0, host_ms=0.3),
    }
    for problem, expected in ((trained, 1), (replace(trained, requires_grad=False), 0)):
        table = table_of(cell_of(problem, measured))
        names = list(measured)[:2]
        shares = {name: ratio(table, problem, name, "usual") or 1.0 for name in names}
        assert fastest(table, problem, shares) == names[expected]


def test_a_problem_of_many_heads_goes_by_cells_of_a_full_card_and_not_the_other_way() -> None:
    problem = make_problem(**(SMALL | {"num_heads": 64}))
    table = table_of(cell_of(problem, times(fused=0.5, usual=1.0)))
    few = replace(problem, num_heads=4, num_kv_heads=4)
    of_few = table_of(cell_of(few, times(fused=0.5, usual=1.0)))
    assert ratio(of_few, problem, "fused", "usual") is None
    for heads, is_known in ((16 * 64, True), (32 * 64, False), (16, True), (8, False)):
        share = ratio(
            table, replace(problem, num_heads=heads, num_kv_heads=heads), "fused", "usual"
        )
        assert (share is not None) is is_known, heads


def test_a_mask_that_begins_anywhere_goes_by_aligned_ones_where_nobody_measured_it() -> None:
    """With a margin: what copies masks ahead loses that."""
    aligned = make_problem(**SMALL, mask=MaskKind.BOOLEAN, mask_shape=(512, 512))
    problem = replace(aligned, mask_is_aligned=False)
    for share in (0.3, 0.6):
        table = table_of(cell_of(aligned, times(fused=share, chunked=1.0)))
        assert ratio(table, aligned, "fused", "chunked") == pytest.approx(share)
        assert ratio(table, problem, "fused", "chunked") == pytest.approx(2.0 * share)
    own = cell_of(problem, times(chunked=1.0))
    table = table_of(cell_of(aligned, times(fused=0.3, chunked=1.0)), own)
    assert ratio(table, problem, "fused", "chunked") is None


@pytest.mark.parametrize(
    ("bound", "shares", "expected"),
    [
        (16384, {512: 0.5}, 0.5),  # of all tokens: beyond the table, which knows the mean
        (2048, {512: 0.5, 2048: 0.8}, 0.8),
        (2048, {512: 1.5, 2048: 0.8}, 1.5),  # what wins at the bound may lose at the mean
        (512, {512: 0.5}, 0.5),
    ],
)
def test_packed_sequences_go_by_their_mean_length_and_by_their_bound(
    bound: int, shares: dict[int, float], expected: float
) -> None:
    """The larger ratio counts: lengths lie between the two."""
    packed = make_problem(
        **(SMALL | {"len_q": 16384, "len_k": 16384}),
        is_causal=True,
        num_sequences=32,
        packed_square=True,
        max_len_q=bound,
        max_len_k=bound,
    )
    table = table_of(
        *(
            cell_of(replace(packed, max_len_q=length, max_len_k=length), times(fused=share, flex=1))
            for length, share in shares.items()
        )
    )
    assert ratio(table, packed, "fused", "flex") == pytest.approx(expected)
    assert interpolated(table, packed, "fused") is not None
