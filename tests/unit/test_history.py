"""What earlier calls taught enters a call as an argument, and is followed."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from adaattn import (
    AttentionEvent,
    AttentionProblem,
    HeadGroup,
    Policy,
    deciding,
    plan_attention,
    record_events,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import capabilities, registry
from adaattn.backends.interface import Result, Tensors
from adaattn.errors import ArgumentError, NonFiniteError
from adaattn.call.measure import measure
from adaattn.planning import worth_measuring
from adaattn.spec import Capability, Earlier, History, Method, Precision, TensorStats, Way
from adaattn.testing import assert_matches, assert_within_budget, fake_facts, make_problem

LOSSY = Policy(name="lossy", error_budget=0.05)
DENSE: Way = (Method.EXACT, Precision.FP32)
LOW: Way = (Method.LOW_RANK, Precision.FP32)


def draw(heads: int = 2, length: int = 2048, dim: int = 64) -> list[torch.Tensor]:
    """Return q, k and v of rank 8: the low-rank executor loses nothing but rounding."""
    return [torch.randn(1, heads, length, 8) @ torch.randn(1, heads, 8, dim) / 8 for _ in range(3)]


def scale_heads(monkeypatch: pytest.MonkeyPatch, *factors: float) -> None:
    """Make the low-rank executor return each head multiplied by a factor."""
    honest = registry.load("low_rank")

    def scaled(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        result = honest(tensors, problem, group)
        return replace(result, output=result.output * torch.tensor(factors)[:, None, None])

    monkeypatch.setitem(registry._EXECUTORS, "low_rank", scaled)


def learnt(event: AttentionEvent, *ways: Way) -> History:
    """Return a history of one call whose numbers are still fresh."""
    assert event.stats is not None
    return History(entries=(Earlier(problem=event.problem, stats=event.stats, ways=ways),))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test see a machine on which the planner takes the low-rank executor."""
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)


@pytest.fixture
def executors() -> tuple[Capability, ...]:
    """What the executors declare, the same on every machine that runs the tests."""
    return tuple(replace(item, unavailable="") for item in capabilities() if item.backend != "flex")


@pytest.fixture
def events() -> Iterator[list[AttentionEvent]]:
    """Record the events of one test."""
    found: list[AttentionEvent] = []
    with record_events(found.append):
        yield found


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[TensorStats]:
    """Note what is measured."""
    found: list[TensorStats] = []

    def noting(*args: Any, **settings: Any) -> Any:
        stats, sample = measure(*args, **settings)
        found.append(stats)
        return stats, sample

    monkeypatch.setattr(deciding, "measure", noting)
    return found


class TestValues:
    """The history itself."""

    def test_a_history_knows_its_problems_and_no_others(self) -> None:
        first, second = make_problem(len_q=8), make_problem(len_q=16)
        known = Earlier(problem=first, ways=(DENSE, LOW))
        history = History(entries=(known, Earlier(problem=second)))
        assert history.of(first) is known
        assert history.of(make_problem(len_q=8)) is known
        assert history.of(second) == Earlier(problem=second, stats=None, ways=())
        assert history.of(make_problem(len_q=8, is_causal=True)) is None
        assert History().of(first) is None

    def test_a_history_is_a_frozen_value(self) -> None:
        entry = Earlier(problem=make_problem(), stats=TensorStats(), ways=(DENSE,))
        history = History(entries=(entry,))
        assert hash(history) == hash(History(entries=(replace(entry),)))
        with pytest.raises(FrozenInstanceError):
            history.repeat = None
        with pytest.raises(TypeError):
            History((entry,))


class TestFreshNumbers:
    """A call whose numbers are known measures nothing."""

    def test_the_decision_is_the_one_of_the_call_that_measured(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors = draw()
        first = attend(*tensors, policy=LOSSY)
        again = attend(*tensors, policy=LOSSY, history=learnt(events[0]))
        assert len(measurements) == 1
        assert events[0].stats == measurements[0]
        assert events[1].stats is None and events[1].entropy_bits == ()
        assert events[1].decision == events[0].decision
        assert not events[0].decision.plan.is_exact
        assert torch.equal(first, again)

    def test_the_result_is_still_audited(
        self,
        monkeypatch: pytest.MonkeyPatch,
        events: list[AttentionEvent],
        measurements: list[TensorStats],
    ) -> None:
        tensors = draw()
        attend(*tensors, policy=LOSSY)
        scale_heads(monkeypatch, 1.0, 1.2)
        output = attend(*tensors, policy=LOSSY, history=learnt(events[0]))
        assert events[1].repaired_heads == (1,) and events[0].repaired_heads == ()
        assert len(measurements) == 1
        assert_within_budget(output, attend(*(t.double() for t in tensors)), LOSSY.error_budget)

    def test_inputs_are_still_checked(self, events: list[AttentionEvent]) -> None:
        tensors = draw()
        attend(*tensors, policy=LOSSY)
        tensors[1][0, 0, 5, 5] = float("nan")
        with pytest.raises(NonFiniteError, match="key: expected finite numbers"):
            attend(*tensors, policy=LOSSY, history=learnt(events[0]))

    def test_numbers_of_another_problem_are_not_used(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        attend(*draw(length=4096), policy=LOSSY)
        others = draw(length=4096)
        attend(*others, is_causal=True, policy=LOSSY, history=learnt(events[0]))
        assert len(measurements) == 2 and events[1].stats is not None

    def test_stale_numbers_are_measured_anew(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors = draw()
        attend(*tensors, policy=LOSSY)
        stale = History(entries=(Earlier(problem=events[0].problem, ways=(DENSE, DENSE)),))
        attend(*tensors, policy=LOSSY, history=stale)
        assert len(measurements) == 2
        assert events[1].stats is not None
        assert replace(events[1].stats, measure_ms=0.0) == replace(measurements[0], measure_ms=0.0)

    def test_what_was_asked_for_by_name_is_measured_on_every_call(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors = draw()
        attend(*tensors, policy=LOSSY)
        attend(*tensors, policy=LOSSY, backend="low_rank", history=learnt(events[0]))
        assert len(measurements) == 2

    def test_an_exact_policy_needs_no_history(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors = draw()
        attend(*tensors, policy=LOSSY)
        output = attend(*tensors, policy="quality", history=learnt(events[0], LOW, LOW))
        assert events[1].decision.plan.is_exact and len(measurements) == 1
        assert torch.equal(output, attend(*tensors, policy="quality"))


class TestWays:
    """Earlier ways give heads their inertia."""

    @pytest.mark.parametrize(
        ("share", "ways", "low"),
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
        ways: tuple[Way, ...],
        low: tuple[int, ...],
    ) -> None:
        tensors = draw(length=4096)
        attend(*tensors, policy=LOSSY)
        stats = events[0].stats
        assert stats is not None
        errors = (share * LOSSY.error_budget,) * 2
        stats = replace(
            stats, low_rank_errors=tuple((ranks, errors) for ranks, _ in stats.low_rank_errors)
        )
        history = learnt(replace(events[0], stats=stats), *ways)
        attend(*tensors, policy=LOSSY, history=history)
        taken = [
            head
            for group in events[1].decision.plan.groups
            if group.method is Method.LOW_RANK
            for head in group.heads or (0, 1)
        ]
        assert tuple(taken) == low


class TestRepeat:
    """A decision that is to be followed again."""

    def test_it_is_followed_whatever_policy_and_numbers_say(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        tensors = draw()
        exact = plan_attention(*tensors, backend="chunked")
        output = attend(*tensors, policy=LOSSY, history=History(repeat=exact))
        assert events[0].decision is exact and events[0].stats is None
        assert measurements == []
        assert torch.equal(output, attend(*tensors, backend="chunked"))

    def test_an_audits_repair_is_repeated_bit_for_bit(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        tensors = [item.requires_grad_() for item in draw()]
        scale_heads(monkeypatch, 1.2, 1.0)
        first = attend(*tensors, policy=LOSSY)
        again = attend(*tensors, policy=LOSSY, history=History(repeat=events[0].decision))
        assert events[0].repaired_heads == events[1].repaired_heads == (0,)
        assert torch.equal(first, again)
        weights = torch.randn_like(first)
        one = torch.autograd.grad((first * weights).sum(), tensors)
        other = torch.autograd.grad((again * weights).sum(), tensors)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    def test_a_step_down_is_repeated_without_trying_what_failed(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        tensors = draw()
        tried: list[str] = []

        def broken(inputs: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
            tried.append(group.label)
            raise RuntimeError("no such instruction")

        monkeypatch.setitem(registry._EXECUTORS, "low_rank", broken)
        first = attend(*tensors, policy=LOSSY)
        again = attend(*tensors, policy=LOSSY, history=History(repeat=events[0].decision))
        assert len(tried) == 1 and len(events[0].fallbacks) == 1 and events[1].fallbacks == ()
        assert torch.equal(first, again)
        exact = attend(*(t.double() for t in tensors))
        assert_matches(first, exact, attend(*tensors, backend="chunked"), summands=2048 + 64)


class TestSharedCost:
    """Calls that share a measurement pay a part of it each."""

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_what_does_not_pay_for_one_call_may_pay_for_several(
        self, executors: tuple[Capability, ...], is_causal: bool
    ) -> None:
        facts = fake_facts("cpu")
        policy = replace(LOSSY, precisions=())
        paying = {
            calls: [
                length
                for length in range(512, 4096, 64)
                if worth_measuring(
                    make_problem(len_q=length, head_dim=64, is_causal=is_causal),
                    facts,
                    policy,
                    executors,
                    calls_per_measurement=calls,
                )
            ]
            for calls in (1, 8, 1000)
        }
        assert set(paying[1]) < set(paying[8]) <= set(paying[1000])
        assert 512 not in paying[1000]

    def test_a_call_is_told_by_its_history(
        self, events: list[AttentionEvent], measurements: list[TensorStats]
    ) -> None:
        length = next(
            length
            for length in range(512, 4096, 64)
            if plan_attention(*draw(length=length), policy=LOSSY).plan.audit_rows
        )
        before = len(measurements)
        tensors = draw(length=length - 64)
        attend(*tensors, policy=LOSSY)
        assert len(measurements) == before
        attend(*tensors, policy=LOSSY, history=History(calls_per_measurement=1000))
        assert len(measurements) == before + 1
        assert events[1].stats is not None


@pytest.mark.parametrize("history", [History(), History(entries=())])
def test_an_empty_history_is_none(
    events: list[AttentionEvent], measurements: list[TensorStats], history: History
) -> None:
    tensors = draw()
    plain = attend(*tensors, policy=LOSSY)
    assert torch.equal(attend(*tensors, policy=LOSSY, history=history), plain)
    assert events[0].decision == events[1].decision
    assert len(measurements) == 2


def test_a_plan_leaves_nothing_for_a_history_to_say() -> None:
    tensors = draw(length=64)
    plan = plan_attention(*tensors).plan
    with pytest.raises(ArgumentError, match="policy, backend and history with a plan: expected no"):
        attend(*tensors, plan=plan, history=History())
