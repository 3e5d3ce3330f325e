"""Tuning: which problems, who is timed and who is left out, what is kept when it stops early."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adaattn
from adaattn import hardware
from adaattn.backends import Result, registry
from adaattn.backends.chunk_rows import choose_chunk_rows
from adaattn.call import describe
from adaattn.errors import ArgumentError, ArgumentTypeError, DeviceError, TableError
from adaattn.hardware import tables
from adaattn.hardware.tables import timings_of
from adaattn.planning import simplify
from adaattn.spec import (
    Align,
    AttentionProblem,
    HardwareFacts,
    HeadGroup,
    MaskKind,
    Precision,
    TimingTable,
)
from adaattn.spec.evidence import problem_class
from adaattn.testing.inputs import make_problem
from adaattn.tuning import cell as tuning_cell
from adaattn.tuning import run as tuning
from adaattn.tuning.grid import default_grid
from adaattn.tuning.inputs import random_call

PLAIN = make_problem(num_heads=4, num_kv_heads=2, len_q=32, len_k=32, is_causal=True)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a cache of the test's own; no table is shipped."""
    monkeypatch.setenv("ADAATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "_SHIPPED", tmp_path / "none")
    return tmp_path


def tuned(*problems: AttentionProblem, **options: Any) -> TimingTable:
    return adaattn.tune(problems, device="cpu", **({"rounds": 2, "save": False} | options))


def own_facts() -> HardwareFacts:
    return hardware.probe("cpu")


def cells_of(table: TimingTable) -> list:
    return [cell for cells in table.cells.values() for cell in cells]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what replaces an executor."""

    def replace_executor(name: str, run: Callable[..., Result]) -> None:
        known = registry._KNOWN[name]._replace(run=run, bind=None)
        monkeypatch.setitem(registry._KNOWN, name, known)

    return replace_executor


def test_every_executor_that_can_serve_is_in_the_cell_and_the_reference_is_not() -> None:
    (cell,) = tuned(PLAIN).cells["fp32 causal"]
    assert set(cell.times) == {"sdpa.flash", "sdpa.math", "chunked"}
    assert cell.default == "sdpa.flash"
    sizes = (cell.heads, cell.group_size, cell.len_q, cell.len_k, cell.head_dim, cell.visible)
    assert sizes == (4, 2, 32, 32, 16, 16.5)
    assert cell.fastest in cell.times
    for measured in cell.times.values():
        assert measured.device_ms == measured.host_ms > 0
        assert measured.compile_ms == 0


PROBLEMS = {
    "full": {},
    "half": {"precision": Precision.BF16},
    "double": {"precision": Precision.FP64},
    "decode": {"len_q": 1, "num_heads": 4, "num_kv_heads": 1},
    "to the end": {"len_q": 8, "len_k": 32, "is_causal": True, "align": Align.BOTTOM_RIGHT},
    "window": {"window": (7, -1), "is_causal": True},
    "dilation": {"dilation": 2},
    "mask": {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 32, 32)},
    "mask of keys": {"mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 1, 32), "batch": 2},
    "causal mask": {"mask": MaskKind.BOOLEAN, "is_causal": True},
    "bias": {"mask": MaskKind.ADDITIVE},
    "wide bias": {
        "mask": MaskKind.ADDITIVE,
        "mask_is_wide": True,
        "precision": Precision.BF16,
    },
    "trained bias": {
        "mask": MaskKind.ADDITIVE,
        "mask_requires_grad": True,
        "requires_grad": True,
    },
    "softcap": {"softcap": 5.0},
    "sinks": {"has_sinks": True, "sinks_require_grad": True, "requires_grad": True},
    "alibi": {"has_alibi": True, "is_causal": True},
    "training": {"requires_grad": True, "is_causal": True},
    "dropout": {"dropout_p": 0.1},
    "values": {"value_dim": 8},
    "packed": {"lengths_q": (8, 8, 8, 8), "is_causal": True},
}


@pytest.mark.parametrize("values", PROBLEMS.values(), ids=PROBLEMS)
def test_the_tensors_made_for_a_problem_are_described_as_that_problem(
    values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    problem = make_problem(**({"len_q": 32, "len_k": 32} | values))
    if "lengths_q" in values:
        problem = make_problem(**values)
    problem = simplify(problem)
    with caplog.at_level(logging.WARNING, "adaattn"):
        (cell,) = cells_of(tuned(problem, rounds=1))
    assert caplog.text == ""
    asked = tuning_cell.cell_of(problem, {})
    assert cell == replace(asked, times=cell.times, default=cell.default)
    assert cell.times


def test_what_is_called_is_what_planning_would_run(broken: Callable[..., None]) -> None:
    groups: list[HeadGroup] = []
    original = registry.load("chunked")

    def seen(tensors: Any, problem: AttentionProblem, group: HeadGroup) -> Result:
        if problem.len_q == long.len_q:  # not the warm-up
            groups.append(group)
        return original(tensors, problem, group)

    long = make_problem(
        num_heads=1, len_q=512, len_k=512, head_dim=64, window=(15, -1), is_causal=True
    )
    broken("chunked", seen)
    tuned(long, rounds=1)
    chunks = {group.launch.chunk_rows for group in groups}
    assert (
        chunks == {choose_chunk_rows(long, None)} != {1024}
    )  # which many rows without a window get


def test_the_default_kernel_is_known_only_where_pytorch_can_express_the_call() -> None:
    table = tuned(PLAIN, replace(PLAIN, softcap=3.0), replace(PLAIN, window=(7, -1)))
    defaults = {name: cells[0].default for name, cells in table.cells.items()}
    assert defaults == {
        "fp32 causal": "sdpa.flash",
        "fp32 causal softcap": "",
        "fp32 causal window": "",
    }


def wrong(tensors: Any, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return what ignores causal order."""
    found = torch.nn.functional.scaled_dot_product_attention(
        tensors.query, tensors.key, tensors.value, enable_gqa=True
    )
    return Result(output=found)


def failing(tensors: Any, problem: AttentionProblem, group: HeadGroup) -> Result:
    raise NotImplementedError("no kernel for this\nand a second line")


def without_memory(tensors: Any, problem: AttentionProblem, group: HeadGroup) -> Result:
    raise torch.OutOfMemoryError("tried to allocate 3 GiB")


def not_a_number(tensors: Any, problem: AttentionProblem, group: HeadGroup) -> Result:
    return Result(output=torch.full_like(tensors.query, float("nan")))


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (wrong, "its results are wrong by"),
        (not_a_number, "its results are wrong by nan"),
        (failing, "NotImplementedError: no kernel for this"),
        (without_memory, "out of memory: tried to allocate 3 GiB"),
    ],
)
def test_an_executor_that_is_wrong_or_fails_is_logged_and_left_out(
    broken: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    run: Callable[..., Result],
    why: str,
) -> None:
    broken("sdpa.math", run)
    with caplog.at_level(logging.WARNING, "adaattn"):
        (cell,) = cells_of(tuned(PLAIN))
    assert set(cell.times) == {"sdpa.flash", "chunked"}
    line = caplog.records[-1].getMessage()
    assert line.startswith("sdpa.math is left out of fp32 causal: 4 heads")
    assert why in line
    assert "\n" not in line


def test_gradients_are_checked_too(
    broken: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel whose forward pass is right and whose backward pass is not must not be chosen."""
    original = registry.load("sdpa.math")

    def half_gradients(tensors: Any, problem: AttentionProblem, group: HeadGroup) -> Result:
        output = original(tensors, problem, group).output
        return Result(output=output.detach() + 0.5 * (output - output.detach()))

    broken("sdpa.math", half_gradients)
    (cell,) = cells_of(tuned(replace(PLAIN, requires_grad=True)))
    assert "sdpa.math" not in cell.times
    assert "its results are wrong by 0.5" in caplog.text


def test_an_executor_whose_workspace_does_not_fit_is_not_run(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., None]
) -> None:
    """On a CPU memory that is missing ends the process: there is no error to catch."""
    monkeypatch.setattr(tuning_cell, "free_memory_bytes", lambda device: 4096)
    broken("sdpa.math", failing)
    (cell,) = cells_of(tuned(PLAIN))
    assert "sdpa.math" not in cell.times


def test_a_problem_that_nothing_can_check_has_no_cell(
    broken: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    broken("chunked", failing)
    assert cells_of(tuned(PLAIN)) == []
    assert "chunked is left out" in caplog.text


def test_saved_times_reach_the_next_probe_and_load_takes_over_a_file(tmp_path: Path) -> None:
    table = tuned(PLAIN, save=True)
    (path,) = (tmp_path / "timings").iterdir()
    assert timings_of(own_facts()).cells["fp32 causal"] == table.cells["fp32 causal"]

    elsewhere = tmp_path / "elsewhere.json"
    path.rename(elsewhere)
    loaded = adaattn.tune(device="cpu", load=elsewhere)
    assert loaded.cells == table.cells
    assert path.exists()
    path.unlink()
    adaattn.tune(device="cpu", load=str(elsewhere), save=False)
    assert not path.exists()


def test_saving_makes_the_next_probe_read_the_table_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hardware.probe("cpu")
    assert hardware.probe("cpu") is before
    tuned(PLAIN, save=True)
    assert hardware.probe("cpu") is not before


def test_a_file_that_cannot_be_loaded_is_an_error_and_saves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{}")
    with pytest.raises(TableError, match=r"expected .*, got"):
        adaattn.tune(device="cpu", load=path)
    assert not (tmp_path / "timings").exists()


def test_what_vanishes_is_held_against_the_size_of_the_inputs() -> None:
    """A row that sees one key has no gradient: any rounding was an infinite error."""
    exact = torch.zeros(1, 2, 8, 4)
    assert tuning_cell._error(exact + 1e-7, exact) < 1e-3
    assert tuning_cell._error(exact + 1.0, exact) > 100
    assert math.isnan(tuning_cell._error(exact * math.nan, exact))


@pytest.mark.parametrize("square", [True, False])
def test_packed_sequences_of_equal_lengths_share_their_bounds(square: bool) -> None:
    """Of two tensors on a GPU nobody knows that they are the same."""
    problem = make_problem(lengths_q=(8, 8), lengths_k=(8, 8))
    call = random_call(replace(problem, packed_square=square), torch.device("cpu"))
    assert (call.tensors.cu_seqlens_q is call.tensors.cu_seqlens_k) == square


def test_a_packed_cell_has_the_length_of_a_sequence_where_no_device_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the bound of a call that tells none is the length of all."""
    problem = make_problem(lengths_q=(8, 8), lengths_k=(16, 16))
    monkeypatch.setattr(describe, "packed_bounds", lambda *_: ((), ()))
    found = random_call(problem, torch.device("cpu")).problem
    assert (found.max_len_q, found.max_len_k) == (8, 16)


def test_interrupted_it_keeps_and_saves_what_was_measured(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def stop(problem: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    table = tuned(PLAIN, replace(PLAIN, softcap=2.0), save=True, progress=stop)
    assert list(table.cells) == ["fp32 causal"]
    assert "interrupted: 1 of 2 problems were measured" in caplog.text
    assert timings_of(own_facts()).cells["fp32 causal"] == table.cells["fp32 causal"]


def test_an_error_in_the_middle_leaves_the_cells_before_it_on_disk() -> None:
    contradictory = replace(PLAIN, num_heads=3)
    with pytest.raises(adaattn.errors.AdaAttnError):
        tuned(PLAIN, contradictory, save=True)
    assert "fp32 causal" in timings_of(own_facts()).cells


def test_out_of_time_it_finishes_one_problem_and_keeps_it() -> None:
    table = tuned(*[replace(PLAIN, scale=1.0 + place) for place in range(50)], budget_s=1e-9)
    (cell,) = cells_of(table)
    assert not any(measured.settled for measured in cell.times.values())


def test_progress_counts_the_problems_and_names_each() -> None:
    calls: list[tuple[str, int, int]] = []
    tuned(PLAIN, replace(PLAIN, softcap=2.0), progress=lambda *call: calls.append(call))
    assert [call[1:] for call in calls] == [(0, 2), (1, 2), (2, 2)]
    assert calls[0][0] == "fp32 causal: 4 heads in groups of 2, 32 x 32 (16 seen), D 16"


def test_the_caller_s_random_state_and_modes_stay_as_they_are() -> None:
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        table = tuned(replace(PLAIN, requires_grad=True), replace(PLAIN, dropout_p=0.5))
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert set(table.cells) == {"fp32 causal training", "fp32 causal dropout"}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"budget_s": "1"},
            ArgumentTypeError,
            "budget_s: expected a positive number of seconds, got",
        ),
        ({"budget_s": 0.0}, ArgumentError, "budget_s: expected a positive number"),
        ({"budget_s": float("nan")}, ArgumentError, "budget_s: expected a positive number"),
        ({"rounds": 0}, ArgumentError, "rounds: expected an integer of at least 1, got 0"),
        ({"device": "abacus"}, DeviceError, "device: expected 'cpu' or 'cuda'"),
    ],
)
def test_impossible_arguments_are_errors(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        adaattn.tune([PLAIN], **({"device": "cpu"} | options))


@pytest.mark.parametrize("problems", [[1], "fp32", 3], ids=type)
def test_what_are_no_problems_is_refused(problems: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="problems: expected AttentionProblems"):
        adaattn.tune(problems, device="cpu")


def run_of(*samples: float) -> tuning_cell._Run:
    return tuning_cell._Run(
        name="x", call=lambda: None, first_ms=1.0, wall_ms=1.0, device=list(samples)
    )


@pytest.mark.parametrize(
    ("samples", "on_cpu", "on_cuda"),
    [
        ((1.0,), False, False),
        ((1.0, 1.0, 1.0), True, True),
        ((1.0, 1.1, 3.0, 4.0, 5.0), True, False),  # the fastest agree, and others were disturbed
        ((1.0, 1.2, 1.2, 1.2, 1.2), False, True),
        ((1.0, 2.0, 3.0, 4.0), False, False),
    ],
)
def test_times_have_settled_where_the_number_that_counts_was_found_again(
    samples: tuple[float, ...], on_cpu: bool, on_cuda: bool
) -> None:
    run = run_of(*samples)
    assert tuning_cell._settled(run, torch.device("cpu")) is on_cpu
    assert tuning_cell._settled(run, torch.device("cuda")) is on_cuda


def test_the_fastest_call_counts_on_a_cpu_and_the_median_on_a_gpu() -> None:
    run = run_of(9.0, 1.0, 2.0)
    run.host = [0.3, 0.1, 0.2]
    assert tuning_cell._measured(run, torch.device("cpu")).device_ms == 1.0
    on_gpu = tuning_cell._measured(run, torch.device("cuda"))
    assert (on_gpu.device_ms, on_gpu.host_ms, on_gpu.wall_ms) == (2.0, 0.2, 2.0)


def test_turns_rotate_and_slow_executors_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def turn(run: tuning_cell._Run, device: torch.device) -> None:
        order.append(run.name)
        run.device.append(run.wall_ms)

    monkeypatch.setattr(tuning_cell, "_take_turn", turn)
    runs = [replace_wall("a", 1.0), replace_wall("b", 2.0), replace_wall("c", 9.0)]
    tuning_cell._timed(runs, torch.device("cpu"), tuning_cell.Effort(rounds=5))
    assert "".join(order) == "abc" + "ba" + "ab" + "ba" + "ab"


def test_one_slow_call_does_not_make_an_executor_slow() -> None:
    """The first call after another kernel's took 100 us of the host, and the next ones 20."""
    calls = {"a": 0, "b": 0}

    def counted(name: str) -> tuning_cell._Run:
        def call() -> None:
            calls[name] += 1

        return tuning_cell._Run(
            name=name, call=call, first_ms=0.1, wall_ms=0.02 if name == "a" else 0.1
        )

    late = tuning_cell.Effort(rounds=3, deadline=0.0)  # everyone has the first round alone
    tuning_cell._timed([counted("a"), counted("b")], torch.device("cpu"), late)
    assert calls == {"a": 100, "b": 20}, "2 ms of each, as long as its known call takes"


def replace_wall(name: str, wall_ms: float) -> tuning_cell._Run:
    return tuning_cell._Run(name=name, call=lambda: None, first_ms=wall_ms, wall_ms=wall_ms)


def test_times_that_do_not_settle_have_more_rounds_but_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turn(run: tuning_cell._Run, device: torch.device) -> None:
        run.device.append(1.0 / (1 + len(run.device)))

    monkeypatch.setattr(tuning_cell, "_take_turn", turn)
    (run,) = tuning_cell._timed(
        [replace_wall("a", 1.0)], torch.device("cpu"), tuning_cell.Effort(rounds=1)
    )
    assert len(run.device) == 4


def test_what_a_first_call_costs_is_a_price_of_compiling_only_on_a_gpu() -> None:
    """A first call on a busy CPU is slow as well, and nothing was compiled there."""
    run = run_of(1.0, 1.0, 1.0)
    run.first_ms, run.host = 5000.0, [0.5, 0.5, 0.5]
    assert tuning_cell._measured(run, torch.device("cpu")).compile_ms == 0
    on_gpu = tuning_cell._measured(run, torch.device("cuda"))
    assert on_gpu.compile_ms == 4999.0
    assert (on_gpu.device_ms, on_gpu.host_ms) == (1.0, 0.5)
    run.first_ms = 40.0
    assert tuning_cell._measured(run, torch.device("cuda")).compile_ms == 0


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_grid_has_each_problem_once_as_a_simplified_one(device_type: str) -> None:
    grid = default_grid(device_type)
    problems = [item.problem for item in grid]
    assert len(set(problems)) == len(problems)
    assert all(simplify(problem) == problem for problem in problems)
    assert {problem.device_type for problem in problems} == {device_type}
    places = {replace(tuning_cell.cell_of(problem, {}), times=()) for problem in problems}
    assert len(places) == len(problems), "two problems share a cell"


def test_the_usual_problems_come_first() -> None:
    """A run cut short after a tenth of the problems has one of almost every class."""
    for device_type, dtype in (("cpu", "fp32"), ("cuda", "half")):
        grid = default_grid(device_type)
        first = [problem_class(item.problem) for item in grid[: len(grid) // 10]]
        assert first[0] == f"{dtype} causal"
        assert first[1] == dtype  # a decoding step
        # Booleans of a few keys are in memory as TMA cannot read them, which nobody looks for.
        everything = {problem_class(item.problem) for item in grid if item.problem.len_k > 12}
        assert {name for name in everything if name.startswith(dtype)} <= set(first)


def test_queries_at_the_end_of_longer_keys_and_of_other_sequences_are_asked_for() -> None:
    problems = [item.problem for item in default_grid("cuda")]
    at_end = [problem for problem in problems if 1 < problem.len_q < problem.len_k]
    named = {problem_class(problem) for problem in at_end if problem.precision is Precision.BF16}
    assert named >= {
        "half causal to_end",
        "half causal window to_end",
        "half causal to_end sinks",
        "half causal to_end softcap",
        "half mask",
        "half",
    }
    assert all(problem.align is Align.BOTTOM_RIGHT for problem in at_end if problem.is_causal), (
        "the last query stands at the last key"
    )
    cross = [problem for problem in problems if problem.len_q > problem.len_k]
    assert {problem_class(problem) for problem in cross} == {
        f"{dtype}{mask}{training}"
        for dtype in ("half", "fp32")
        for mask in ("", " mask of_keys")
        for training in ("", " training")
    }
    decoding = {problem_class(p) for p in problems if p.len_q == 1 < p.len_k}
    assert decoding >= {"half sinks", "half softcap", "half alibi", "half window to_end"}


def test_executors_that_compile_take_part_in_about_20_problems_that_sdpa_lacks() -> None:
    chosen = [item.problem for item in default_grid("cuda") if item.compiles]
    assert 15 <= len(chosen) <= 28
    assert {problem.len_q for problem in chosen} == {512, 2048, 8192, 32768}
    names = {problem_class(problem) for problem in chosen}
    assert names == {
        "half causal window",
        "half window",
        "half causal alibi",
        "half causal softcap",
        "half packed causal",
        "half blocks128x128",
    }


def test_a_problem_of_a_grid_that_may_not_compile_leaves_out_who_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling = replace(registry.capability_named("sdpa.math"), compiles=True)
    known = registry._KNOWN["sdpa.math"]._replace(capability=compiling)
    monkeypatch.setitem(registry._KNOWN, "sdpa.math", known)
    asked = tuning.Asked(problem=PLAIN, compiles=False)
    monkeypatch.setattr(tuning, "default_grid", lambda device_type: (asked,))
    (cell,) = cells_of(adaattn.tune(device="cpu", rounds=1, save=False))
    assert set(cell.times) == {"sdpa.flash", "chunked"}


class Event:
    """A CUDA event whose clock is the number of calls made before it."""

    calls: list[int]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = len(self.calls)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 0.25 * (end.at - self.at)


def test_a_turn_on_a_gpu_queues_a_batch_behind_a_kernel_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    slept: list[int] = []

    def sleep(cycles: int) -> None:
        slept.append(len(calls))
        assert cycles > 0

    monkeypatch.setattr(Event, "calls", calls, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    run = replace_wall("a", 0.5)
    run.call = lambda: calls.append(1)
    tuning_cell._take_turn(run, torch.device("cuda", 0))
    assert run.device == [0.25]  # of each call, the twenty that timed the host left out
    assert (slept, len(calls)) == ([20], 24)  # 2 ms are four calls of half a millisecond
    assert len(run.host) == 1


@pytest.mark.gpu
def test_on_a_gpu_the_device_is_timed_with_the_host_hidden() -> None:
    """A tiny call is bound by the host: its device time must not hold the host's."""
    small = replace(PLAIN, precision=Precision.BF16, head_dim=64, value_dim=64)
    began = time.perf_counter()
    (cell,) = cells_of(adaattn.tune([small], device="cuda", rounds=3, save=False))
    assert time.perf_counter() - began < 240
    assert {"sdpa.flash2", "sdpa.math", "flex"} <= set(cell.times)
    assert cell.times["sdpa.math"].device_ms < cell.times["sdpa.math"].host_ms
    assert cell.times["flex"].compile_ms > 0
