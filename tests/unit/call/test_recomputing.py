"""Checkpointed forward passes run again as they ran, whatever has changed since."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.call.test_adapt import Late
from torch.utils.checkpoint import checkpoint

from adaattn import AttentionEvent, History, Policy, hardware, record_events, warmup
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import capability_named
from adaattn.call import adapt, bind, waiting
from adaattn.call.audit import is_lossy
from adaattn.call.recomputing import Forwards, is_recomputing
from adaattn.call.waiting import without_waiting
from adaattn.spec import TensorStats
from adaattn.spec.evidence import Cell, Measured, TimingTable, problem_class
from adaattn.testing import assert_matches, fake_facts

CALLS_BEFORE = 5
LAYERS = 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_is_known_by_the_backward_pass_around_it(use_reentrant: bool) -> None:
    seen: list[bool] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_recomputing())
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    output = checkpoint(noting, x, use_reentrant=use_reentrant).sum()
    assert seen == [False]
    output.backward()
    assert seen == [False, True]
    assert not is_recomputing()


class TestForwards:
    """A forward pass is pending while its graph holds what it saved."""

    @staticmethod
    def asked(
        forwards: Forwards, found: list[bool | None]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a segment that asks and saves its input."""

        def segment(x: torch.Tensor) -> torch.Tensor:
            found.append(forwards.joins())
            return x.sin()

        return segment

    def test_until_backward_has_run_though_the_loss_lives_on(self) -> None:
        forwards, found = Forwards(), []
        segment, x = self.asked(forwards, found), torch.randn(3, requires_grad=True)
        losses = []
        for _ in range(2):
            y = checkpoint(segment, x, use_reentrant=False)
            losses.append(checkpoint(segment, y, use_reentrant=False).sum())
            losses[-1].backward()
        assert found == [False, True, True, True] * 2
        assert not forwards.are_pending()

    def test_until_the_graph_is_dropped(self) -> None:
        forwards, found = Forwards(), []
        segment, x = self.asked(forwards, found), torch.randn(3, requires_grad=True)
        y = checkpoint(segment, x, use_reentrant=False)
        assert forwards.are_pending() and segment(x) is not None
        assert found == [False, None]
        del y
        assert not forwards.are_pending()

    @pytest.mark.parametrize("kind", ["reentrant", "saved on the CPU"])
    def test_what_is_not_run_again_alike_is_never(self, kind: str) -> None:
        forwards, found = Forwards(), []
        segment, x = self.asked(forwards, found), torch.randn(3, requires_grad=True)
        if kind == "reentrant":
            y = checkpoint(segment, x, use_reentrant=True)
        else:
            with torch.autograd.graph.save_on_cpu():
                y = segment(x)
        assert found == [None]
        assert not forwards.are_pending()
        y.sum().backward()
        assert set(found) == {None}


class TestWaiting:
    """Calls whose kernel is compiled once enough of them have paid for it."""

    @pytest.fixture(autouse=True)
    def planted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``reference`` be compiled after five calls by ``chunked``."""
        tensors = self.draw()
        found: list[AttentionEvent] = []
        with record_events(found.append):
            attend(*tensors, softcap=2.0)
        problem = found[0].problem
        cell = Cell(
            problem_class=problem_class(problem),
            heads=problem.batch * problem.num_heads,
            group_size=1,
            len_q=problem.len_q,
            len_k=problem.len_k,
            head_dim=problem.head_dim,
            visible=float(problem.len_k),
            times={
                "chunked": Measured(device_ms=2.0, host_ms=2.0),
                "reference": Measured(device_ms=1.0, host_ms=1.0, compile_ms=CALLS_BEFORE - 0.5),
            },
        )
        table = TimingTable(source="planted", cells={cell.problem_class: (cell,)})
        facts = replace(fake_facts("cpu"), timings=table)
        monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
        hardware.clear_cache()

    @staticmethod
    def draw() -> list[torch.Tensor]:
        """Return q, k and v that want gradients."""
        return [torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3)]

    @staticmethod
    def step(tensors: list[torch.Tensor], **settings: Any) -> list[torch.Tensor]:
        """Return the gradients of a stack of checkpointed layers."""
        query, key, value = tensors

        def layer(x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = attend(x, key, value, softcap=2.0, **settings)
            return found.sin() + x  # what needs more of the call than its first steps

        x = query
        for _ in range(LAYERS):
            x = checkpoint(layer, x, use_reentrant=False)
        return list(torch.autograd.grad(x.square().sum(), tensors))

    @pytest.mark.parametrize("policy", ["quality", "balanced"])
    def test_the_kernel_comes_with_the_first_call_of_a_step(
        self, policy: str, events: list[AttentionEvent]
    ) -> None:
        """It came between a forward pass and its recomputation, which checkpointing refused."""
        tensors = self.draw()
        steps = [self.step(tensors, policy=policy) for _ in range(3)]
        served = [event.decision.plan.groups[0].capability for event in events]
        assert served == ["chunked"] * 2 * LAYERS + ["reference"] * 4 * LAYERS
        wide = [item.detach().double().requires_grad_() for item in tensors]
        exact = self.step(wide, backend="reference")
        eager = self.step(tensors, backend="reference")
        for found in steps:
            for items in zip(found, exact, eager, strict=True):
                assert_matches(*items, summands=LAYERS * (32 + 16))

    @pytest.mark.parametrize("losses", ["one call's loss", "losses of all"])
    def test_calls_that_are_bound_anew_wait_together(
        self, losses: str, events: list[AttentionEvent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A NumPy number for a scale is bound at each call, its recomputation too."""
        if losses == "losses of all":
            monkeypatch.setattr(
                waiting,
                "capability_named",
                lambda name: replace(capability_named(name), compile_ms=1.0),
            )
        monkeypatch.setattr(waiting, "is_ready", lambda problem, group: False)
        tensors = self.draw()
        for _ in range(3):
            self.step(tensors, scale=np.float64(0.25))
        served = [event.decision.plan.groups[0].capability for event in events]
        assert served == ["chunked"] * 2 * LAYERS + ["reference"] * 4 * LAYERS

    @pytest.mark.parametrize("policy", ["quality", "balanced"])
    def test_a_call_beside_a_kept_graph_waits_no_longer_than_others(
        self, policy: str, events: list[AttentionEvent]
    ) -> None:
        """What nothing runs again has the kernel; what may be run again runs as before."""
        tensors = self.draw()

        def layer(x: torch.Tensor) -> torch.Tensor:
            return attend(x, *tensors[1:], softcap=2.0, policy=policy).sin()

        kept = checkpoint(layer, tensors[0], use_reentrant=False)
        for _ in range(CALLS_BEFORE + 1):
            attend(*tensors, softcap=2.0, policy=policy)
        other = checkpoint(layer, tensors[0], use_reentrant=False)
        (kept + other).sum().backward()
        attend(*tensors, softcap=2.0, policy=policy)
        checkpoint(layer, tensors[0], use_reentrant=False).sum().backward()
        served = [event.decision.plan.groups[0].capability for event in events]
        beside = ["chunked"] * CALLS_BEFORE + ["reference"] * 2 + ["chunked"] * 3
        assert served == beside + ["reference"] * 3

    def test_a_call_that_waits_counts_once_where_calls_are_timed(self) -> None:
        tensors, found = self.draw(), []
        with record_events(found.append, timing=True):
            for _ in range(CALLS_BEFORE + 1):
                attend(*tensors, softcap=2.0)
        served = [event.decision.plan.groups[0].capability for event in found]
        assert served == ["chunked"] * CALLS_BEFORE + ["reference"]

    @pytest.mark.parametrize("policy", ["quality", "balanced"])
    def test_nothing_waits_where_that_is_asked_for(
        self, policy: str, events: list[AttentionEvent]
    ) -> None:
        tensors = self.draw()
        attend(*tensors, softcap=2.0, policy=policy)
        with without_waiting():
            self.step(tensors, policy=policy)
        attend(*tensors, softcap=2.0, policy=policy)
        served = [event.decision.plan.groups[0].capability for event in events]
        assert served == ["chunked"] + ["reference"] * (2 * LAYERS + 1)

    def test_a_model_that_is_warmed_runs_what_its_calls_would_wait_for(
        self, events: list[AttentionEvent]
    ) -> None:
        tensors = self.draw()
        warmup(attend, *tensors, softcap=2.0, device="cpu")
        attend(*tensors, softcap=2.0)
        served = [event.decision.plan.groups[0].capability for event in events]
        assert served == ["reference"] * 2


def test_numbers_that_arrive_within_a_step_change_the_next_one(
    monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
) -> None:
    """On a GPU nothing tells which forward pass is run again: all of a step are alike."""
    facts = fake_facts("cpu_amx")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    policy, history = Policy(name="lossy", error_budget=0.05), History()
    tensors = [torch.randn(1, 2, 2048, 64) for _ in range(3)]
    attend(*tensors, policy=policy, history=History())
    stats = events[0].stats
    assert isinstance(stats, TensorStats)
    honest = bind.build_call

    def on_gpu(*given: Any) -> Any:
        call = honest(*given)
        return replace(call, problem=replace(call.problem, may_wait=False))

    measured, audits = Late(stats), []

    def audited(*given: Any) -> Late:
        audits.append(Late((0.0, 0.0)))
        return audits[-1]

    monkeypatch.setattr(bind, "build_call", on_gpu)
    monkeypatch.setattr(adapt, "measure_later", lambda *given, **settings: measured)
    monkeypatch.setattr(adapt, "audited_later", audited)
    monkeypatch.setattr(adapt, "AUDIT_EVERY", 1)
    for item in tensors:
        item.requires_grad_()

    def layer(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = attend(x, *tensors[1:], policy=policy, history=history)
        return output.square()

    def step() -> list[bool]:
        events.clear()
        first = checkpoint(layer, tensors[0], use_reentrant=False)
        measured.has_arrived = True
        second = checkpoint(layer, tensors[0], use_reentrant=False)
        (first + second).sum().backward()
        return [is_lossy(event.decision.plan, event.problem) for event in events]

    assert step() == [False] * 4
    assert not audits
    assert step() == [True] * 4
    assert len(audits) == 2


def test_checkpointed_calls_count_among_those_that_run_exactly_before_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They did not, and a stack of layers learnt once a step."""
    facts = fake_facts("cpu_amx")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    honest, look, looks = bind.build_call, bind.adapted, []

    def on_gpu(*given: Any) -> Any:
        call = honest(*given)
        return replace(call, problem=replace(call.problem, may_wait=False))

    def looking(*given: Any) -> Any:
        looks.append(given)
        return replace(look(*given), exact_calls_next=3)

    monkeypatch.setattr(bind, "build_call", on_gpu)
    monkeypatch.setattr(bind, "adapted", looking)
    monkeypatch.setattr(adapt, "measure_later", lambda *given, **settings: Late(None))
    policy, history = Policy(name="lossy", error_budget=0.05), History()
    tensors = [torch.randn(1, 2, 2048, 64, requires_grad=True) for _ in range(3)]

    def layer(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = attend(x, *tensors[1:], policy=policy, history=history)
        return output.square()

    for _ in range(4):
        outputs = [checkpoint(layer, tensors[0], use_reentrant=False) for _ in range(2)]
        sum(output.sum() for output in outputs).backward()
    assert len(looks) == 2
