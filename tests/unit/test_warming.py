"""Plans run once before they are needed."""

from typing import Any

import pytest
import torch

import adaattn
from adaattn import warming
from adaattn.backends import register
from adaattn.backends.interface import Result, Tensors
from adaattn.errors import ArgumentTypeError, ExecutorError
from adaattn.policies import PRESETS
from adaattn.spec import AttentionProblem, Capability, Decision, Feature, HeadGroup
from adaattn.testing import attention, make_problem


@pytest.fixture
def first_in_line() -> Any:
    """Register an executor that is the incumbent wherever PyTorch has no words; note its runs."""
    seen: list[AttentionProblem] = []

    def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        seen.append(problem)
        return attention(tensors, problem)

    capability = Capability(
        name="noting",
        backend="noting",
        features=Feature.SOFTCAP | Feature.CAUSAL_TOP_LEFT,
        order=lambda problem: 0,
        compiles=True,
    )
    remove = register([capability], run)
    yield seen
    remove()
    adaattn.hardware.clear_cache()


def test_problems_run_once_each_by_the_plans_of_their_calls(
    first_in_line: list[AttentionProblem],
) -> None:
    capped = make_problem(len_q=12, softcap=3.0)
    plans = adaattn.warmup([capped, capped], device="cpu")
    assert [plan.groups[0].capability for plan in plans] == ["noting"]
    assert [problem.softcap for problem in first_in_line] == [3.0]


def test_a_model_is_called_once_and_its_calls_are_warmed(
    first_in_line: list[AttentionProblem],
) -> None:
    calls = []

    def model(x: torch.Tensor, *, cap: float) -> torch.Tensor:
        calls.append(x)
        return adaattn.scaled_dot_product_attention(x, x, x, softcap=cap)

    done: list[int] = []
    adaattn.warmup(
        model,
        torch.randn(1, 2, 12, 16),
        cap=2.0,
        device="cpu",
        progress=lambda label, number, count: done.append(number),
    )
    assert len(calls) == 1
    assert [problem.len_q for problem in first_in_line] == [12, 12]  # the model's, and once more
    assert done == [0, 1]


@pytest.mark.parametrize("ready", [True, False])
def test_what_only_serves_until_a_kernel_is_compiled_is_warmed_where_that_stays(
    ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, other = make_problem(len_q=12), make_problem(len_q=13)
    found = [
        warming.decide_exactly(problem, warming.probe("cpu"), PRESETS["quality"], backend)
        for backend in ("auto", "chunked")
    ]
    meanwhile, later = (item.plan for item in found if item is not None)
    decision = Decision(plan=meanwhile, later=later, calls_before=9)
    ran: list[str] = []
    monkeypatch.setattr(warming, "decide_exactly", lambda *given: decision)
    monkeypatch.setattr(warming, "is_ready", lambda _, group: ready and group.label in ran)
    monkeypatch.setattr(warming, "_run_plan", lambda problem, group, _: ran.append(group.label))
    labels = [plan.groups[0].label for plan in adaattn.warmup([problem, other], device="cpu")]
    expected = [plan.groups[0].label for plan in (later, meanwhile)][: 1 if ready else 2]
    assert labels == expected
    assert ran == 2 * expected


def test_a_plan_that_fails_is_logged_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> None:
        raise ExecutorError("no compiler")

    real = warming._run_plan
    problems = [make_problem(len_q=12), make_problem(len_q=13)]
    monkeypatch.setattr(
        warming, "_run_plan", lambda *it: fails() if it[0].len_q == 12 else real(*it)
    )
    with caplog.at_level("WARNING", logger="adaattn"):
        plans = adaattn.warmup(problems, device="cpu")
    assert len(plans) == 1
    assert "is not warm: no compiler" in caplog.text


def test_gradients_are_run_where_a_problem_wants_them() -> None:
    problem = make_problem(len_q=12, requires_grad=True)
    with torch.inference_mode():
        (plan,) = adaattn.warmup([problem], device="cpu")
    assert plan.is_exact


@pytest.mark.parametrize("grad", [True, False])
def test_modes_of_the_caller_are_left_as_they_were(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        adaattn.warmup([make_problem(len_q=12)], device="cpu")
        adaattn.warmup([make_problem(len_q=12, requires_grad=True)], device="cpu")
        assert torch.is_grad_enabled() is grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("what", "args"), [(3, ()), ("x", ()), ([3], ()), ([make_problem()], (1,))]
)
def test_what_is_neither_problems_nor_a_model_is_refused(what: Any, args: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentTypeError, match="expected problems alone, or a model or function"):
        adaattn.warmup(what, *args, device="cpu")
