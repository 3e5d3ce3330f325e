"""Calls under an error budget: what they measure, follow, check, learn and repeat."""

import gc
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaattn import (
    AttentionEvent,
    AttentionProblem,
    HeadGroup,
    History,
    Policy,
    hardware,
    plan_attention,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.attention.statistics import AttentionStatistics
from adaattn.backends import registry
from adaattn.backends.interface import Result, Tensors
from adaattn.call import adapt
from adaattn.call.audit import FALLBACKS
from adaattn.call.history import Entry
from adaattn.call.measure import measure
from adaattn.errors import ArgumentError, NonFiniteError
from adaattn.spec import Method, Precision, TensorStats, Variant
from adaattn.testing import assert_matches, assert_within_budget, fake_facts

DENSE: Variant = (Method.EXACT, Precision.FP32)
LOW: Variant = (Method.LOW_RANK, Precision.FP32)
INFINITE = float("inf")
LOSSY = Policy(name="lossy", error_budget=0.05)


def draw(heads: int = 2, length: int = 2048, dim: int = 64) -> list[torch.Tensor]:
    """Return q, k and v of rank 8: the low-rank executor loses nothing but rounding."""
    return [torch.randn(1, heads, length, 8) @ torch.randn(1, heads, 8, dim) / 8 for _ in range(3)]


def exactly(tensors: list[torch.Tensor], **settings: Any) -> torch.Tensor:
    """Return exact attention in fp64."""
    return attend(*(item.detach().double() for item in tensors), **settings)


def scale_heads(monkeypatch: pytest.MonkeyPatch, *factors: float) -> None:
    """Make the low-rank executor return each head multiplied by a factor."""
    honest = registry.load("low_rank")

    def scaled(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        result = honest(tensors, problem, group)
        heads = group.heads or range(len(factors))
        factor = torch.tensor([factors[head] for head in heads])[:, None, None]
        return replace(result, output=result.output * factor[-result.output.shape[1] :])

    known = registry._KNOWN["low_rank"]._replace(run=scaled)
    monkeypatch.setitem(registry._KNOWN, "low_rank", known)


def low_heads(event: AttentionEvent) -> tuple[int, ...]:
    """Return the heads that low rank computed."""
    return tuple(
        head
        for group in event.decision.plan.groups
        if group.method.kind is Method.LOW_RANK
        for head in group.heads or range(event.problem.num_heads)
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test see a machine on which the planner takes the low-rank executor."""
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[TensorStats]:
    """Note what is measured."""
    found: list[TensorStats] = []

    def noting(*args: Any, **settings: Any) -> Any:
        found.append(measure(*args, **settings))
        return found[-1]

    monkeypatch.setattr("adaattn.call.adapt.measure", noting)
    return found


def test_who_watches_a_history_gets_every_call_once() -> None:
    """Calls that may lose something come with their errors, exact ones are counted."""
    history, found = History(), AttentionStatistics()
    history.watch = found.record
    tensors = draw()
    for _ in range(5):
        attend(*tensors, policy=LOSSY, history=history, layer=3)
    for _ in range(4):
        attend(*tensors, history=history, layer=3)
    served = list(history.served())
    assert sum(counter.calls for counter in served) + found["calls"] == 9
    assert found["approximate_calls"] > 0
    assert found["max_audited_error"] is not None
    assert {counter.event.tag for counter in served} == {"layer3"}


@pytest.mark.parametrize("history", [None, History()], ids=["the process's", "one's own"])
class TestFreshNumbers:
    """A call whose numbers are known measures nothing, whosever history it is."""

    def test_the_decision_is_the_one_of_the_call_that_measured(
        self,
        history: History | None,
        events: list[AttentionEvent],
        measurements: list[TensorStats],
    ) -> None:
        tensors = draw()
        first, again = (attend(*tensors, policy=LOSSY, history=history) for _ in range(2))
        assert len(measurements) == 1
        assert events[0].stats == measurements[0]
        assert events[1].stats is None and events[1].entropy_bits == ()
        assert events[1].decision == events[0].decision
        assert low_heads(events[0]) == (0, 1)
        assert torch.equal(first, again)

    def test_planning_follows_them_and_teaches_nothing(
        self, history: History | None, measurements: list[TensorStats]
    ) -> None:
        tensors = draw()
        settings = {"policy": LOSSY, "history": None if history is None else History()}
        alone = [plan_attention(*tensors, **settings) for _ in range(2)]
        assert alone[0].plan == alone[1].plan
        assert len(measurements) == 2
        _, aux = attend(*tensors, return_aux=True, **settings)
        assert len(measurements) == 3
        assert plan_attention(*tensors, **settings) == aux.decision
        assert len(measurements) == 3

    def test_the_result_is_still_audited(
        self,
        history: History | None,
        monkeypatch: pytest.MonkeyPatch,
        events: list[AttentionEvent],
        measurements: list[TensorStats],
    ) -> None:
        tensors = draw()
        settings = {"policy": LOSSY, "history": None if history is None else History()}
        attend(*tensors, **settings)
        scale_heads(monkeypatch, 1.0, 1.2)
        output = attend(*tensors, **settings)
        assert events[1].repaired_heads == (1,) and events[0].repaired_heads == ()
        assert len(measurements) == 1
        assert_within_budget(output, exactly(tensors), LOSSY.error_budget)


class TestMeasuring:
    """When numbers are measured, and for whom."""

    @pytest.mark.parametrize("measure_every", [1, 2, 3])
    def test_numbers_serve_until_the_next_measurement(
        self, measure_every: int, events: list[AttentionEvent]
    ) -> None:
        tensors, history = draw(heads=1), History(measure_every=measure_every)
        for _ in range(2 * measure_every + 1):
            attend(*tensors, policy=LOSSY, history=history)
        measured = [event.stats is not None for event in events]
        assert measured == [call % measure_every == 0 for call in range(2 * measure_every + 1)]

    def test_each_problem_is_measured_for_itself(self, measurements: list[TensorStats]) -> None:
        tensors, history = draw(heads=1, length=4096), History()
        for is_causal in (False, True, False, True):
            attend(*tensors, is_causal=is_causal, policy=LOSSY, history=history)
        assert len(measurements) == 2

    def test_each_layer_is_measured_for_itself(self, measurements: list[TensorStats]) -> None:
        tensors = draw(heads=1)
        for layer in (0, 1, 0, 1, -1):
            attend(*tensors, policy=LOSSY, layer=layer)
        assert len(measurements) == 3

    def test_each_history_is_its_own(self, measurements: list[TensorStats]) -> None:
        tensors = draw(heads=1)
        for history in (History(), History(), None, None):
            attend(*tensors, policy=LOSSY, history=history)
        assert len(measurements) == 3

    def test_each_approximation_by_name_is_measured_for_itself(
        self, events: list[AttentionEvent]
    ) -> None:
        """Numbers of low rank alone were taken for all there is, and block sparsity was refused."""
        tensors, policy = draw(length=256), Policy(error_budget=0.9)
        for name in ("low_rank", "block_sparse", "low_rank"):
            attend(*tensors, policy=policy, backend=name)
        found = [{group.capability for group in event.decision.plan.groups} for event in events]
        assert found == [{"low_rank"}, {"block_sparse"}, {"low_rank"}]

    def test_a_head_is_held_to_the_policy_of_its_call(self, events: list[AttentionEvent]) -> None:
        """One policy's ranks were the only ones that another's call knew of."""
        tensors = draw()
        for rank in (8, 16, 8):
            policy = Policy(error_budget=0.5, ranks=(rank,), precisions=())
            attend(*tensors, policy=policy, backend="low_rank")
        ranks = [event.decision.plan.groups[0].method.rank for event in events]
        assert ranks == [8, 16, 8]

    def test_an_exact_policy_measures_nothing(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors, history = draw(), History()
        attend(*tensors, policy=LOSSY, history=history)
        output = attend(*tensors, policy="quality", history=history)
        assert events[1].decision.plan.is_exact and len(measurements) == 1
        assert torch.equal(output, attend(*tensors, policy="quality"))

    def test_forgetting_the_devices_facts_forgets_what_the_process_learnt(
        self, measurements: list[TensorStats]
    ) -> None:
        tensors = draw(heads=1)
        for _ in range(2):
            attend(*tensors, policy=LOSSY)
        hardware.clear_cache()
        attend(*tensors, policy=LOSSY)
        assert len(measurements) == 2


class TestNonFiniteInput:
    """NaN cannot be measured, and no approximation of it is right."""

    def test_the_function_refuses_it_where_it_is_measured(self) -> None:
        tensors = draw()
        tensors[1][0, 0, 5, 5] = float("nan")
        for _ in range(2):
            with pytest.raises(NonFiniteError, match="key: expected finite numbers"):
                attend(*tensors, policy=LOSSY)

    def test_a_history_of_ones_own_computes_it_exactly(self, events: list[AttentionEvent]) -> None:
        """Training skips such steps itself, and one rank that raises lets the others wait."""
        tensors, history = draw(), History()
        tensors[2][0, 0, 5, 5] = float("nan")
        output = attend(*tensors, policy=LOSSY, history=history)
        assert events[0].decision.plan.is_exact and events[0].stats is None
        assert output.isnan().sum() == 2048 and output[0, 0, :, 5].isnan().all()
        attend(*draw(), policy=LOSSY, history=history)
        assert low_heads(events[1]) == (0, 1)

    @pytest.mark.parametrize("history", [None, History()], ids=["the process's", "one's own"])
    def test_between_two_measurements_the_audit_finds_it(
        self, history: History | None, events: list[AttentionEvent]
    ) -> None:
        tensors = draw()
        attend(*tensors, policy=LOSSY, history=history)
        tensors[2][0, 0, 5, 5] = float("nan")
        output = attend(*tensors, policy=LOSSY, history=history)
        assert events[1].repaired_heads == (0,)
        assert output.isnan().sum() == 2048 and output[0, 0, :, 5].isnan().all()


class TestWays:
    """Earlier ways give heads their inertia."""

    @pytest.mark.parametrize(
        ("share", "variants", "low"),
        [
            (0.9, (), (0, 1)),
            (0.9, (LOW, DENSE), (0,)),
            (0.9, (DENSE, DENSE), ()),
            (0.7, (DENSE, DENSE), (0, 1)),
            (1.1, (LOW, LOW), ()),
        ],
    )
    def test_heads_stay_with_their_way_up_to_the_budget(
        self,
        events: list[AttentionEvent],
        share: float,
        variants: tuple[Variant, ...],
        low: tuple[int, ...],
    ) -> None:
        tensors, history = draw(length=4096), History()
        attend(*tensors, policy=LOSSY, history=history)
        ((key, entry),) = history._entries.items()
        assert key[0] == events[0].problem.without_layout()
        assert entry.stats is not None and entry.variants == (LOW, LOW)
        errors = (share * LOSSY.error_budget,) * 2
        found = tuple(replace(item, errors=errors) for item in entry.stats.method_errors)
        entry.stats, entry.variants = replace(entry.stats, method_errors=found), variants
        attend(*tensors, policy=LOSSY, history=history)
        assert low_heads(events[1]) == low
        assert entry.variants == tuple(LOW if head in low else DENSE for head in range(2))

    def test_a_head_that_an_audit_repaired_is_exact_until_it_is_measured_anew(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        tensors, history = draw(length=4096), History(measure_every=3)
        with monkeypatch.context() as context:
            scale_heads(context, 1.0, 1.2)
            attend(*tensors, policy=LOSSY, history=history)
        for _ in range(3):
            attend(*tensors, policy=LOSSY, history=history)
        assert [event.repaired_heads for event in events] == [(1,), (), (), ()]
        assert [low_heads(event) for event in events] == [(0, 1), (0,), (0,), (0, 1)]
        assert [event.stats is not None for event in events] == [True, False, False, True]


@dataclass(eq=False)
class Late:
    """What a GPU sends, arrived when the test says so."""

    found: Any
    has_arrived: bool = False

    def is_here(self) -> bool:
        """Return whether it has arrived."""
        return self.has_arrived

    def value(self) -> Any:
        """Return what was sent."""
        return self.found


class TestArriving:
    """Numbers that were measured on an earlier call, and nobody waits for."""

    @staticmethod
    def known(history: History) -> Entry:
        """Return the only entry of a history."""
        (entry,) = history._entries.values()
        return entry

    def test_calls_are_exact_until_they_have_arrived(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors, history = draw(), History()
        attend(*tensors, policy=LOSSY, history=history)
        entry, late = self.known(history), Late(measurements[0])
        entry.stats, entry.variants = None, ()
        entry.arriving.append(late)
        attend(*tensors, policy=LOSSY, history=history)
        late.has_arrived = True
        attend(*tensors, policy=LOSSY, history=history)
        assert [low_heads(event) for event in events] == [(0, 1), (), (0, 1)]
        assert len(measurements) == 1 and not entry.arriving

    def test_numbers_of_input_that_is_not_finite_teach_nothing(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors, history = draw(), History()
        attend(*tensors, policy=LOSSY, history=history)
        entry = self.known(history)
        before = entry.stats
        found = replace(measurements[0], max_magnitude=INFINITE, method_errors=())
        entry.arriving.append(Late(found, has_arrived=True))
        attend(*tensors, policy=LOSSY, history=history)
        assert entry.stats is before
        assert low_heads(events[1]) == (0, 1)

    def test_a_head_over_its_budget_is_exact_from_then_on(
        self, events: list[AttentionEvent]
    ) -> None:
        tensors, history = draw(length=4096), History()
        attend(*tensors, policy=LOSSY, history=history)
        self.known(history).arriving.append(Late((0.01, float("nan")), has_arrived=True))
        for _ in range(2):
            attend(*tensors, policy=LOSSY, history=history)
        assert [low_heads(event) for event in events] == [(0, 1), (0,), (0,)]

    def test_what_it_found_is_in_the_event_of_the_call_that_meets_it(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        """The verdict on a head is counted although its own call could not be repaired."""
        monkeypatch.setattr(adapt, "audited", lambda call, outcome, *_, **__: outcome)
        tensors, history, statistics = draw(length=4096), History(), AttentionStatistics()
        attend(*tensors, policy=LOSSY, history=history)
        self.known(history).arriving.append(Late((0.01, 0.5), has_arrived=True))
        before = FALLBACKS["audit"]
        for _ in range(2):
            attend(*tensors, policy=LOSSY, history=history)
        assert [event.earlier_errors for event in events] == [(), (0.01, 0.5), ()]
        assert events[1].earlier_over == (1,)
        assert not any(event.decision.notes for event in events[1:])
        assert FALLBACKS["audit"] == before + 1
        statistics.record(events[1])
        assert statistics.to_dict()["max_audited_error"] == 0.5
        assert statistics.to_dict()["step_downs"] == 1


class TestRecomputed:
    """A forward pass that activation checkpointing runs again follows the plan that it had."""

    @staticmethod
    def checkpointed(
        tensors: list[torch.Tensor], history: History, **settings: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the square of a checkpointed call's output, and the gradients of its sum."""

        def call(*items: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = attend(*items, policy=LOSSY, history=history, **settings)
            return output.square()  # what needs more of the call than its first steps

        output = checkpoint(call, *tensors, use_reentrant=False)
        return output, torch.autograd.grad(output.sum(), tensors)

    def test_it_teaches_nothing(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors, history = [item.requires_grad_() for item in draw()], History(measure_every=1)
        self.checkpointed(tensors, history)
        assert len(events) == 2 and len(measurements) == 1
        assert events[1].decision.plan == events[0].decision.plan
        assert low_heads(events[1]) == (0, 1)

    def test_its_plan_is_that_of_its_forward_pass_whatever_was_learnt_since(
        self, events: list[AttentionEvent]
    ) -> None:
        tensors, history = [item.requires_grad_() for item in draw()], History()

        def call(*items: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = attend(*items, policy=LOSSY, history=history)
            return output.square()

        output = checkpoint(call, *tensors, use_reentrant=False)
        for entry in history._entries.values():
            entry.bar((0, 1))
        torch.autograd.grad(output.sum(), tensors)
        assert [low_heads(event) for event in events] == [(0, 1), (0, 1)]

    def test_an_audits_repair_is_repeated_bit_for_bit(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        tensors = [item.requires_grad_() for item in draw()]
        scale_heads(monkeypatch, 1.2, 1.0)
        square, gradients = self.checkpointed(tensors, History())
        assert events[0].repaired_heads == events[1].repaired_heads == (0,)
        alone = attend(*tensors, policy=LOSSY, history=History())
        assert torch.equal(square, alone.square())
        expected = torch.autograd.grad(alone.square().sum(), tensors)
        assert all(map(torch.equal, gradients, expected))

    def test_a_step_down_is_repeated_without_trying_what_had_no_room(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        """The plan that had no room was kept, and by then there may be room for it.

        A recomputation by another executor saves other tensors, which checkpointing refuses.
        """
        tensors = [item.requires_grad_() for item in draw()]
        honest, tried = registry.load("low_rank"), []

        def broken(inputs: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
            tried.append(group.label)
            if len(tried) == 1:
                raise torch.OutOfMemoryError("the memory is full")
            return honest(inputs, problem, group)

        known = registry._KNOWN["low_rank"]._replace(run=broken)
        monkeypatch.setitem(registry._KNOWN, "low_rank", known)
        square, gradients = self.checkpointed(tensors, History())
        assert len(tried) == 1 and len(events[0].fallbacks) == 1 and events[1].fallbacks == ()
        assert events[1].decision.plan == events[0].decision.plan
        eager = attend(*tensors, backend="chunked")
        exact = exactly(tensors)
        assert_matches(square, exact.square(), eager.square(), summands=2048 + 64)
        wide = [item.detach().double().requires_grad_() for item in tensors]
        true = torch.autograd.grad(attend(*wide).square().sum(), wide)
        plain = torch.autograd.grad(eager.square().sum(), tensors)
        for items in zip(gradients, true, plain, strict=True):
            assert_matches(*items, summands=2 * 2048 + 64)

    def test_an_approximation_by_name_that_only_a_backward_pass_calls_runs(
        self, events: list[AttentionEvent]
    ) -> None:
        """No forward pass had decided anything, and an assertion of ours failed."""
        tensors = draw(length=256)

        class Calling(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, item: torch.Tensor) -> torch.Tensor:
                return item.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                attend(*tensors, policy=LOSSY, backend="low_rank")
                return gradient

        leaf = torch.randn(3, requires_grad=True)
        Calling.apply(leaf).sum().backward()
        assert low_heads(events[0]) == (0, 1)


def test_an_empty_history_is_as_good_as_none(
    events: list[AttentionEvent], measurements: list[TensorStats]
) -> None:
    tensors = draw()
    plain = attend(*tensors, policy=LOSSY)
    assert torch.equal(attend(*tensors, policy=LOSSY, history=History()), plain)
    assert events[0].decision == events[1].decision
    assert len(measurements) == 2


def test_a_plan_leaves_nothing_for_a_history_to_say() -> None:
    tensors = draw(length=64)
    plan = plan_attention(*tensors).plan
    with pytest.raises(ArgumentError, match="policy, backend and history with a plan: expected no"):
        attend(*tensors, plan=plan, history=History())


def test_what_is_bound_keeps_no_tensor_of_its_first_call() -> None:
    tensors, mask = draw(), torch.zeros(2048, 2048)
    alive = [weakref.ref(item) for item in (*tensors, mask)]
    attend(*tensors, mask, policy=LOSSY)
    tensors.clear()
    del mask
    gc.collect()
    assert not any(item() is not None for item in alive)
