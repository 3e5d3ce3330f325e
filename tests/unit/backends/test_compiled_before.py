"""What was compiled before, and calls that need not wait for it."""

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import adaattn
from adaattn import hardware
from adaattn.backends import compiled_before, register, registry
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.registry import is_ready
from adaattn.call import waiting
from adaattn.errors import ExecutorError
from adaattn.spec import AttentionProblem, Capability, Feature, HeadGroup, Measured, TimingTable
from adaattn.testing import attention, make_problem
from adaattn.tuning.cell import cell_of


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """Forget what this process noted; notes go to a folder of the test."""
    monkeypatch.setattr(compiled_before, "_NOTED", set())
    monkeypatch.setattr(waiting, "_LOST", {})
    return cache


def test_a_note_outlives_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiled_before.is_noted(("kernel", 128))
    compiled_before.note(("kernel", 128))
    monkeypatch.setattr(compiled_before, "_NOTED", set())
    assert compiled_before.is_noted(("kernel", 128))
    assert not compiled_before.is_noted(("kernel", 64))


def test_a_kernel_of_another_version_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_before.note("kernel")
    monkeypatch.setattr(compiled_before, "_versions", lambda: "later")
    assert not compiled_before.is_noted("kernel")


def test_a_folder_that_cannot_be_written_is_logged_and_the_process_remembers(
    new_process: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new_process.parent.mkdir(parents=True, exist_ok=True)
    new_process.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="adaattn"):
        compiled_before.note("kernel")
    assert "cannot be noted" in caplog.text
    assert compiled_before.is_noted("kernel")


class Compiling:
    """An executor that compiles, twice as fast as PyTorch by its table, and what ran."""

    def __init__(self) -> None:
        self.ready = False
        self.runs = 0
        self.remove = register(
            [
                Capability(
                    name="compiling",
                    backend="compiling",
                    features=Feature.CAUSAL_TOP_LEFT,
                    order=lambda problem: 90,
                    compiles=True,
                    compile_ms=10.0,
                )
            ],
            self.run,
            ready=lambda problem: self.ready,
        )

    def run(self, tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        self.runs += 1
        return attention(tensors, problem)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    made = Compiling()
    default = "sdpa.flash"
    times = {
        default: Measured(device_ms=4.0, host_ms=4.0),
        "compiling": Measured(device_ms=2.0, host_ms=2.0, compile_ms=10.0),
    }
    problem = make_problem(len_q=12, sdpa_default=default)
    cell = cell_of(problem, times)
    table = TimingTable(source="a test", cells={cell.problem_class: (cell,)})
    # The package's attribute of that name is the function.
    probe = importlib.import_module("adaattn.hardware.probe")
    monkeypatch.setattr(probe, "timings_of", lambda facts: table)
    hardware.clear_cache()
    yield made
    made.remove()
    hardware.clear_cache()


def call(events: list[Any], longer: int = 0) -> str:
    x = torch.randn(1, 2, 12 + longer, 16)
    adaattn.scaled_dot_product_attention(x, x, x)
    return str(events[-1].decision.plan.groups[0].capability)


def test_calls_wait_until_they_have_lost_what_compiling_takes(
    compiling: Compiling, events: list[Any]
) -> None:
    """Each call loses 2 ms: five of them pay for 10 ms of compiling."""
    ran = [call(events) for _ in range(8)]
    assert ran == 5 * ["sdpa.flash"] + 3 * ["compiling"]
    assert compiling.runs == 3


def test_calls_of_several_kinds_that_wait_for_one_executor_pay_together(
    compiling: Compiling, events: list[Any]
) -> None:
    """As calls of other lengths do: each is bound apart, and one kernel serves them all."""
    ran = [call(events, longer=number) for number in range(7)]
    assert ran == 5 * ["sdpa.flash"] + ["compiling"] + ["sdpa.flash"]


def test_who_waits_goes_on_when_another_has_compiled_it(
    compiling: Compiling, events: list[Any]
) -> None:
    assert call(events) == "sdpa.flash"
    compiling.ready = True
    compiled_before.note("something")
    assert call(events) == "compiling"


def test_what_is_compiled_already_runs_at_once(compiling: Compiling, events: list[Any]) -> None:
    compiling.ready = True
    assert [call(events) for _ in range(2)] == ["compiling", "compiling"]
    assert events[0].decision.later is None


def test_an_executor_that_fails_while_others_wait_does_not_end_the_wait(
    compiling: Compiling, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that calls stepped down to had forgotten what they waited for."""

    def fails(*given: Any) -> Result:
        raise ExecutorError("not today")

    known = registry._KNOWN["sdpa.flash"]._replace(run=fails, bind=None)
    monkeypatch.setitem(registry._KNOWN, "sdpa.flash", known)
    ran = [call(events) for _ in range(8)]
    assert "sdpa.flash" not in ran
    assert ran[0] != "compiling"
    assert ran[-1] == "compiling"


def test_a_group_in_another_format_is_not_taken_for_what_is_compiled(compiling: Compiling) -> None:
    compiling.ready = True
    problem = make_problem(len_q=12)
    own = HeadGroup(capability="compiling")
    assert is_ready(problem, own)
    assert not is_ready(problem, HeadGroup(capability="compiling", heads=(0,)))
    assert not is_ready(problem, HeadGroup(capability="sdpa.flash"))
