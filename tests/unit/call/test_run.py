"""Backends by name, steps down, policies, events and given plans of the public call."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn import (
    AttentionEvent,
    AttentionProblem,
    HardwareFacts,
    HeadGroup,
    Launch,
    LowRank,
    Method,
    Plan,
    Policy,
    hardware,
    plan_attention,
    record_events,
    save_policy,
    use_policy,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import capabilities, registry
from adaattn.backends.interface import Executor, Result, Tensors
from adaattn.call.run import FALLBACKS
from adaattn.errors import ArgumentError, PlanError, UnsupportedError
from adaattn.testing import assert_matches, assert_within_budget, fake_facts

LOSSY = Policy(name="lossy", error_budget=0.05)
FULL = torch.OutOfMemoryError("the memory is full\nand this is its second line")


def draw(length: int = 32, heads: int = 4) -> list[torch.Tensor]:
    return [torch.randn(2, heads, length, 16) for _ in range(3)]


def draw_low_rank(length: int = 256, heads: int = 4, dim: int = 64) -> list[torch.Tensor]:
    """Return q, k and v of rank 8: the low-rank executor loses nothing but rounding."""
    return [torch.randn(2, heads, length, 8) @ torch.randn(2, heads, 8, dim) / 8 for _ in range(3)]


def exactly(tensors: list[torch.Tensor], **settings: Any) -> torch.Tensor:
    return attend(*(item.double() for item in tensors), **settings)


def wrap(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Result], Result]
) -> list[HeadGroup]:
    """Change what an executor returns; return the list of the groups that it runs."""
    groups: list[HeadGroup] = []
    honest: Executor = registry.load(name)

    def changed(tensors: Any, problem: Any, group: HeadGroup) -> Result:
        groups.append(group)
        return change(honest(tensors, problem, group))

    known = registry._KNOWN[name]._replace(run=changed)
    monkeypatch.setitem(registry._KNOWN, name, known)
    return groups


def break_executor(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception | None = None
) -> list[Any]:
    """Make an executor raise; return a list that grows each time it is tried.

    A plain call goes to PyTorch's function itself, not through the executor; calls that are bound
    hold what they run, and are forgotten.
    """
    error = error or RuntimeError(f"{name} ran out of luck\nand of this line")
    tried: list[Any] = []

    def broken(*given: Any, **named: Any) -> Any:
        tried.append(name)
        raise error

    known = registry._KNOWN[name]
    bind = known.bind and (lambda problem, group: broken)
    monkeypatch.setitem(registry._KNOWN, name, known._replace(run=broken, bind=bind))
    hardware.clear_cache()
    return tried


CPU_EXACT = [
    item.name
    for item in capabilities()
    if "cpu" in item.device_types and item.method is Method.EXACT
]


class TestExplicitBackend:
    """A backend asked for by name serves or says why not; it never falls back."""

    @pytest.mark.parametrize("name", CPU_EXACT)
    def test_the_named_executor_serves(self, name: str) -> None:
        query, key, value = draw()
        query = query[:, :, :4]
        key, value = key[:, :2], value[:, :2]
        output, aux = attend(query, key, value, enable_gqa=True, backend=name, return_aux=True)
        assert [group.capability for group in aux.decision.plan.groups] == [name]
        exact = exactly([query, key, value], enable_gqa=True)
        eager = attend(query, key, value, enable_gqa=True, backend="reference")
        assert_matches(output, exact, eager, summands=48)

    def test_the_name_of_a_module_means_the_best_of_its_executors(self) -> None:
        decision = plan_attention(*draw(), backend="sdpa")
        assert decision.plan.groups[0].capability == "sdpa.flash"
        executors = {entry.candidate.split("/")[0] for entry in decision.trace}
        kernels = {item.name for item in capabilities() if item.backend == "sdpa"}
        assert executors - {"any executor"} == kernels

    def test_a_refusal_lists_every_reason(self) -> None:
        with pytest.raises(UnsupportedError, match=r"'sdpa\.flash' cannot serve") as caught:
            attend(*draw(), softcap=2.0, window=(3, 0), dilation=2, backend="sdpa.flash")
        assert caught.value.reasons == (
            "sdpa.flash: it does not support a sliding window",
            "sdpa.flash: it does not support a dilated pattern",
            "sdpa.flash: it does not support softcap",
        )
        assert "Pass backend='auto'" in str(caught.value)

    def test_a_refusal_names_each_executor_of_a_module(self) -> None:
        with pytest.raises(UnsupportedError, match="backend 'sdpa' cannot serve") as caught:
            attend(*draw(), softcap=2.0, backend="sdpa")
        kernels = [item.name for item in capabilities() if item.backend == "sdpa"]
        assert {reason.split(":")[0] for reason in caught.value.reasons} == set(kernels)
        assert "sdpa.flash2: it runs on cuda, the tensors are on cpu" in caught.value.reasons

    def test_an_approximation_needs_an_error_budget(self) -> None:
        with pytest.raises(UnsupportedError, match="has an error budget of 0; pass policy="):
            attend(*draw_low_rank(), backend="low_rank")

    def test_a_budget_of_heads_alone_is_a_budget(self) -> None:
        policy = Policy(head_budgets=tuple((0, head, 0.05) for head in range(4)))
        tensors = draw_low_rank()
        decision = plan_attention(*tensors, policy=policy, backend="low_rank", layer=0)
        assert {group.method.kind for group in decision.plan.groups} == {Method.LOW_RANK}

    def test_a_method_that_the_policy_leaves_out_is_refused(self) -> None:
        policy = Policy(name="mine", error_budget=0.05, methods=(Method.EXACT,))
        with pytest.raises(UnsupportedError, match="policy 'mine' does not use this method"):
            attend(*draw_low_rank(), policy=policy, backend="low_rank")

    def test_an_approximation_over_budget_is_refused_with_what_was_measured(self) -> None:
        with pytest.raises(UnsupportedError, match="backend 'low_rank'") as caught:
            attend(*draw(length=256), policy=LOSSY, backend="low_rank")
        assert any("expected an error of at most 0.05, got" in r for r in caught.value.reasons)

    def test_its_failure_is_the_callers_to_see(self, monkeypatch: pytest.MonkeyPatch) -> None:
        break_executor(monkeypatch, "chunked")
        before = FALLBACKS.copy()
        with pytest.raises(RuntimeError, match="chunked ran out of luck"):
            attend(*draw(), backend="chunked")
        assert before == FALLBACKS


class TestStepsDown:
    """``auto`` steps down where memory runs out; it says so, logs it and counts it."""

    @pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"softcap": 2.0}], ids=str)
    @pytest.mark.parametrize("return_aux", [None, True])
    def test_the_next_candidate_serves(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        events: list[AttentionEvent],
        settings: dict[str, Any],
        return_aux: bool | None,
    ) -> None:
        tensors = draw()
        name = plan_attention(*tensors, **settings).plan.groups[0].capability
        before = FALLBACKS[name]
        break_executor(monkeypatch, name, FULL)
        with caplog.at_level(logging.WARNING, logger="adaattn"):
            output = attend(*tensors, return_aux=return_aux, **settings)
        sentence = f"{name} failed (the memory is full); the next candidate was tried"
        assert caplog.messages == [sentence]
        assert FALLBACKS[name] == before + 1
        (event,) = events
        assert event.fallbacks == (sentence,)
        assert sentence in event.decision.notes
        assert event.decision.plan.groups[0].capability != name
        if return_aux:
            output, aux = output
            assert aux.decision == event.decision
        eager = attend(*tensors, backend="reference", **settings)
        exact = exactly(tensors, backend="reference", **settings)
        assert_matches(output, exact, eager, summands=48)

    @pytest.mark.parametrize("settings", [{}, {"softcap": 2.0}], ids=str)
    def test_what_had_no_room_once_is_not_tried_at_each_call(
        self,
        monkeypatch: pytest.MonkeyPatch,
        events: list[AttentionEvent],
        settings: dict[str, Any],
    ) -> None:
        tensors = draw()
        name = plan_attention(*tensors, **settings).plan.groups[0].capability
        tried = break_executor(monkeypatch, name, FULL)
        first = attend(*tensors, **settings)
        num_tried = len(tried)
        again = attend(*tensors, **settings)
        assert len(tried) == num_tried > 0
        assert [len(event.fallbacks) for event in events] == [1, 0]
        assert events[0].decision.plan == events[1].decision.plan
        assert torch.equal(first, again)

    def test_one_calls_step_down_changes_nothing_for_a_call_of_another_kind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensors = draw(length=23)
        with monkeypatch.context() as context:
            break_executor(context, "sdpa.flash", FULL)
            attend(*tensors)
        _, aux = attend(*tensors, return_aux=True)
        assert aux.decision.plan.groups[0].capability == "sdpa.flash"

    def test_steps_are_taken_one_after_another(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        names = [name for name in CPU_EXACT if name != "reference"]
        for name in names:
            break_executor(monkeypatch, name, FULL)
        attend(*draw())
        (event,) = events
        tried = [sentence.split(" ")[0] for sentence in event.fallbacks]
        assert tried[0] == "sdpa.flash"
        assert len(tried) == len(set(tried)) >= 2 and set(tried) <= set(names)
        assert event.decision.plan.groups[0].capability == "reference"

    def test_fewer_rows_at_once_are_tried_before_another_executor(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        """All chunks went with the large ones, though small ones had room."""
        honest, rows = registry.load("chunked"), []

        def limited(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
            rows.append(group.launch.chunk_rows)
            if rows[-1] > 256:
                raise FULL
            return honest(tensors, problem, group)

        known = registry._KNOWN["chunked"]._replace(run=limited)
        monkeypatch.setitem(registry._KNOWN, "chunked", known)
        tensors = draw(length=2048)
        problem = plan_attention(*tensors, softcap=2.0)
        free = problem.workspace_bytes // 4
        monkeypatch.setattr("adaattn.hardware.free_memory_bytes", lambda device: free)
        attend(*tensors, softcap=2.0)
        (event,) = events
        assert event.decision.plan.groups[0].capability == "chunked"
        assert rows[0] > 256 >= rows[-1] > 0
        assert event.fallbacks[0].startswith("chunked failed (the memory is full)")

    def test_the_last_error_is_raised_when_nothing_is_left(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        for name in CPU_EXACT:
            break_executor(monkeypatch, name, FULL)
        with pytest.raises(torch.OutOfMemoryError, match="the memory is full"):
            attend(*draw(), return_aux=True)
        assert events == []

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("a bug in a kernel"),
            UnsupportedError("an executor", ["it said no"]),
            torch.AcceleratorError("a sick device"),
            AssertionError("a broken invariant"),
        ],
        ids=lambda error: type(error).__name__,
    )
    @pytest.mark.parametrize("settings", [{}, {"return_aux": True}, {"softcap": 2.0}], ids=str)
    def test_any_other_error_is_the_callers_to_see(
        self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], error: Exception
    ) -> None:
        """A bug once led to another executor: calls were slower, and nobody knew why."""
        tensors = draw()
        before = FALLBACKS.copy()
        _, aux = attend(*tensors, **(settings | {"return_aux": True}))
        break_executor(monkeypatch, aux.decision.plan.groups[0].capability, error)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                attend(*tensors, **settings)
            assert caught.value is error
        assert before == FALLBACKS

    def test_an_approximation_without_room_is_replaced_by_an_exact_executor_that_takes_less(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        facts = fake_facts("cpu")
        monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
        tensors = draw_low_rank(length=2048)
        first = plan_attention(*tensors, policy="balanced")
        assert not first.plan.is_exact
        break_executor(monkeypatch, "low_rank", FULL)
        output = attend(*tensors, policy="balanced")
        (event,) = events
        assert event.fallbacks[0].startswith("low_rank failed (the memory is full)")
        assert event.decision.plan.is_exact
        assert event.decision.workspace_bytes < first.workspace_bytes
        assert torch.equal(output, attend(*tensors))

    @pytest.mark.parametrize("return_aux", [None, True])
    def test_a_lack_of_memory_is_raised_where_no_other_way_fits_into_what_is_free(
        self,
        monkeypatch: pytest.MonkeyPatch,
        events: list[AttentionEvent],
        return_aux: bool | None,
    ) -> None:
        """A kernel may need more than was predicted, so what is free counts, not its prediction."""
        monkeypatch.setattr("adaattn.hardware.free_memory_bytes", lambda device: 1000)
        break_executor(monkeypatch, "sdpa.flash", FULL)
        with pytest.raises(torch.OutOfMemoryError, match="the memory is full"):
            attend(*draw(length=512), return_aux=return_aux)
        assert events == []


class TestPolicies:
    """A policy comes as a value, a preset's name, a file, or from the context."""

    def test_each_form_of_a_policy_is_followed(self, tmp_path: Any) -> None:
        policy = Policy(name="saved", error_budget=0.125)
        path = tmp_path / "mine.json"
        save_policy(policy, path)
        tensors = draw()
        for given in (policy, str(path)):
            decision = plan_attention(*tensors, policy=given)
            assert (decision.policy, decision.plan.error_budget) == ("saved", 0.125)
        assert plan_attention(*tensors, policy="speed").plan.error_budget == 0.05
        assert plan_attention(*tensors).policy == "quality"

    def test_the_ambient_policy_serves_calls_that_name_none(self) -> None:
        tensors = draw()
        with use_policy("balanced"):
            assert plan_attention(*tensors).policy == "balanced"
            with use_policy(Policy(name="inner")):
                assert plan_attention(*tensors).policy == "inner"
            assert plan_attention(*tensors, policy="speed").policy == "speed"
            assert plan_attention(*tensors).policy == "balanced"
        assert plan_attention(*tensors).policy == "quality"

    def test_a_memory_budget_that_nothing_keeps_is_an_error_with_the_trace(self) -> None:
        with pytest.raises(PlanError, match="raise the memory budget") as caught:
            attend(*draw(), policy=Policy(memory_budget_bytes=1))
        refused = "sdpa.math/fp32: expected at most 1 byte of workspace, got "
        assert any(line.startswith(refused) for line in caught.value.trace)

    def test_a_memory_budget_is_kept_by_smaller_chunks(self) -> None:
        tensors = draw(length=512)
        budget = plan_attention(*tensors, softcap=5.0).workspace_bytes // 4
        tight = plan_attention(*tensors, softcap=5.0, policy=Policy(memory_budget_bytes=budget))
        assert 0 < tight.workspace_bytes <= budget
        assert tight.plan.groups[0].launch.chunk_rows < 512


class TestEvents:
    """Every eager call emits one event."""

    def test_an_event_says_what_was_asked_and_chosen(self, events: list[AttentionEvent]) -> None:
        tensors = draw()
        attend(*tensors, is_causal=True, tag="layer7")
        (event,) = events
        assert (event.tag, event.time_ms, event.fallbacks) == ("layer7", None, ())
        assert event.problem.is_causal
        assert event.decision == plan_attention(*tensors, is_causal=True)
        assert event.workspace_bytes == event.decision.workspace_bytes
        assert (event.error_estimate, event.head_errors) == (None, ())

    def test_time_is_taken_when_a_sink_asks(self) -> None:
        found: list[AttentionEvent] = []
        tensors = draw()
        with record_events(found.append, timing=True):
            attend(*tensors)
            attend(*tensors, plan=found[0].decision.plan)
        assert all(event.time_ms is not None and event.time_ms > 0 for event in found)

    def test_a_given_plan_emits_its_event_too(self, events: list[AttentionEvent]) -> None:
        tensors = draw()
        plan = plan_attention(*tensors).plan
        attend(*tensors, plan=plan, tag="mine")
        (event,) = events
        assert (event.decision.plan, event.tag) == (plan, "mine")

    def test_entropy_is_reported_where_it_was_measured(self, events: list[AttentionEvent]) -> None:
        attend(*draw_low_rank(), policy=LOSSY, backend="low_rank")
        assert len(events[0].entropy_bits) == 4
        assert all(0 <= bits <= 8 for bits in events[0].entropy_bits)

    def test_a_sink_that_fails_stops_no_call(self, caplog: pytest.LogCaptureFixture) -> None:
        def failing(event: AttentionEvent) -> None:
            raise ValueError("a broken observer")

        seen: list[AttentionEvent] = []
        with record_events(failing), record_events(seen.append):
            attend(*draw())
        assert len(seen) == 1
        assert "an event sink failed" in caplog.text


class TestGivenPlans:
    """A plan that the caller gives is run as it is."""

    def test_it_runs_what_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        groups = wrap(monkeypatch, "chunked", lambda result: result)
        tensors = draw()
        plan = Plan(
            groups=(HeadGroup(capability="chunked", launch=Launch(chunk_rows=5)),), num_heads=4
        )
        output, aux = attend(*tensors, plan=plan, return_aux=True)
        assert groups == list(plan.groups)
        assert aux.decision.plan == plan
        assert aux.decision.notes == ("the plan was given with the call",)
        assert torch.equal(aux.error_estimate, torch.zeros(2, 4))
        assert_matches(output, exactly(tensors), attend(*tensors, backend="reference"), summands=48)

    def test_an_approximation_given_is_not_said_to_be_exact(self) -> None:
        group = HeadGroup(capability="low_rank", method=LowRank(rank=8, value_rank=8))
        _, aux = attend(*draw(), plan=Plan(groups=(group,), num_heads=4), return_aux=True)
        assert aux.error_estimate is None

    def test_one_that_audits_repairs_the_heads_that_are_over_its_budget(
        self, events: list[AttentionEvent]
    ) -> None:
        """Two heads have rank 8, the other two do not, and rank 8 was made for all."""
        tensors = draw_low_rank(length=128, dim=32)
        for item in tensors:
            item[:, 2:] = torch.randn(2, 2, 128, 32)
        group = HeadGroup(capability="low_rank", method=LowRank(rank=8, value_rank=8))
        plan = Plan(groups=(group,), num_heads=4, error_budget=0.01, audit_rows=16)
        output, aux = attend(*tensors, plan=plan, return_aux=True)
        (event,) = events
        assert event.repaired_heads == (2, 3)
        assert aux.decision.notes == ("the plan was given with the call", *event.fallbacks)
        assert aux.error_estimate[:, 2:].eq(0).all()
        assert_within_budget(output, exactly(tensors), 0.01)
        exact, eager = exactly(tensors), attend(*tensors, backend="chunked")
        assert_matches(output[:, 2:], exact[:, 2:], eager[:, 2:], summands=128 + 32)

    def test_one_that_loses_nothing_is_not_audited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = Plan(groups=(HeadGroup(capability="chunked"),), num_heads=4, audit_rows=16)
        monkeypatch.setattr("adaattn.call.audit.sample_rows", None)
        _, aux = attend(*draw(), plan=plan, return_aux=True)
        assert torch.equal(aux.error_estimate, torch.zeros(2, 4))


def test_facts_of_a_device_without_an_executor_refuse_nothing_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan's executor is checked against the device that the tensors are on."""
    facts: HardwareFacts = fake_facts("h200")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    plan = Plan(groups=(HeadGroup(capability="sdpa.cudnn"),), num_heads=4)
    with pytest.raises(UnsupportedError, match="it runs on cuda, the tensors are on cpu"):
        attend(*draw(), plan=plan)


def test_an_unknown_backend_is_refused_before_anything_runs() -> None:
    with pytest.raises(
        ArgumentError, match="backend: expected 'auto', 'flash', 'unfused', 'sdpa' or one of"
    ):
        plan_attention(*draw(), backend="flash5")
