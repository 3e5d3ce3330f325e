"""Events reach every sink of their context, and no sink can harm a call."""

import asyncio
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import adaattn
from adaattn._events import AttentionEvent, emit, listeners, record_events, wants_timing
from adaattn.call import bound, run
from adaattn.errors import ArgumentTypeError
from adaattn.spec import Decision, HeadGroup, Method, Plan, TensorStats
from adaattn.testing import fake_facts, make_problem

EVENT = AttentionEvent(
    problem=make_problem(),
    decision=Decision(plan=Plan(groups=(HeadGroup(capability="x"),), num_heads=2)),
    workspace_bytes=64,
)


def _call() -> torch.Tensor:
    x = torch.randn(1, 2, 8, 16)
    return adaattn.scaled_dot_product_attention(x, x, x)


def _fail(event: AttentionEvent) -> None:
    raise RuntimeError("a full disk")


def test_an_event_says_nothing_that_was_not_measured() -> None:
    assert EVENT.error_estimate is None and EVENT.time_ms is None
    assert EVENT.fallbacks == EVENT.head_errors == EVENT.entropy_bits == ()
    assert EVENT.tag == "" and EVENT.stats is None and EVENT.repaired_heads == ()


def test_the_entropies_of_an_event_are_those_of_its_numbers() -> None:
    measured = replace(EVENT, stats=TensorStats(entropy_bits=(1.5, 2.5), sampled_rows=8))
    assert measured.entropy_bits == (1.5, 2.5)
    with pytest.raises(TypeError):
        replace(EVENT, entropy_bits=(1.0, 2.0))


def test_an_event_tells_the_numbers_that_its_call_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    seen: list[AttentionEvent] = []
    q, k, v = (torch.randn(1, 2, 2048, 8) @ torch.randn(8, 64) / 8 for _ in range(3))
    with record_events(seen.append):
        adaattn.scaled_dot_product_attention(q, k, v, policy="speed")
        adaattn.scaled_dot_product_attention(q, k, v, policy="quality")
    lossy, exact = seen
    assert lossy.stats is not None and exact.stats is None
    assert 0 < lossy.stats.sampled_rows <= adaattn.policies.PRESETS["speed"].audit_rows
    found = [item.method.kind for item in lossy.stats.method_errors]
    assert found == [Method.LOW_RANK] * 3 + [Method.BLOCK_SPARSE] * 3
    assert lossy.entropy_bits == lossy.stats.entropy_bits and exact.entropy_bits == ()
    assert lossy.repaired_heads == exact.repaired_heads == ()
    assert lossy.decision.cost is not None and lossy.decision.exact_cost is not None
    assert lossy.decision.cost.flops < lossy.decision.exact_cost.flops
    assert exact.decision.cost is not None
    assert exact.decision.cost == exact.decision.exact_cost


def test_a_sink_gets_each_event_inside_its_block_and_none_outside() -> None:
    seen: list[AttentionEvent] = []
    emit(EVENT)
    assert not listeners()
    with record_events(seen.append):
        assert listeners()
        emit(EVENT)
        emit(EVENT)
    emit(EVENT)
    assert not listeners()
    assert seen == [EVENT, EVENT]


def test_nested_sinks_all_get_the_event_the_outer_one_first() -> None:
    order: list[str] = []
    with record_events(lambda event: order.append("outer")):
        with record_events(lambda event: order.append("inner")):
            emit(EVENT)
        emit(EVENT)
    assert order == ["outer", "inner", "outer"]


def test_the_same_sink_twice_gets_the_event_twice() -> None:
    seen: list[AttentionEvent] = []
    with record_events(seen.append), record_events(seen.append):
        emit(EVENT)
    assert len(seen) == 2


def test_a_sink_that_cannot_be_called_is_refused() -> None:
    """It was once logged, as a failing sink, at each call."""
    with (
        pytest.raises(ArgumentTypeError, match="sink: expected a callable that takes an event"),
        record_events(3),  # type: ignore[arg-type]
    ):
        pass


def test_a_block_left_by_an_error_takes_its_sink_along() -> None:
    with pytest.raises(ZeroDivisionError), record_events(_fail):
        raise ZeroDivisionError
    assert not listeners()


def test_a_failing_sink_is_logged_and_the_others_still_get_the_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[AttentionEvent] = []
    with (
        caplog.at_level(logging.ERROR, "adaattn"),
        record_events(_fail),
        record_events(seen.append),
    ):
        emit(EVENT)
    assert seen == [EVENT]
    assert "an event sink failed; the attention call goes on" in caplog.text
    assert "a full disk" in caplog.text


def test_an_interrupt_in_a_sink_is_no_failure_of_the_sink() -> None:
    def interrupt(event: AttentionEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), record_events(interrupt):
        emit(EVENT)


@pytest.mark.parametrize(
    ("timings", "wanted"),
    [((), False), ((False,), False), ((True,), True), ((True, False), True), ((False, True), True)],
)
def test_time_is_wanted_if_one_sink_asks_for_it(timings: tuple[bool, ...], wanted: bool) -> None:
    def within(rest: tuple[bool, ...]) -> bool:
        if not rest:
            return wants_timing()
        with record_events(_fail, timing=rest[0]):
            return within(rest[1:])

    assert within(timings) is wanted
    assert not wants_timing()


def test_another_thread_has_its_own_sinks() -> None:
    seen: list[object] = []
    with record_events(_fail):
        thread = threading.Thread(target=lambda: seen.append(listeners()))
        thread.start()
        thread.join()
    assert seen == [()]


def test_a_task_keeps_the_sinks_of_its_own_context() -> None:
    async def listening(seen: list[AttentionEvent], turn: asyncio.Event) -> None:
        with record_events(seen.append):
            turn.set()
            await asyncio.sleep(0)
            emit(EVENT)

    async def both() -> tuple[int, int]:
        first: list[AttentionEvent] = []
        second: list[AttentionEvent] = []
        turn = asyncio.Event()
        await asyncio.gather(listening(first, turn), listening(second, turn))
        return len(first), len(second)

    assert asyncio.run(both()) == (1, 1)


def test_each_call_emits_one_event_with_its_problem_and_its_reasons() -> None:
    seen: list[AttentionEvent] = []
    with adaattn.record_events(seen.append):
        _call()
        _call()
    assert len(seen) == 2
    event = seen[0]
    assert (event.problem.num_heads, event.problem.len_q, event.problem.head_dim) == (2, 8, 16)
    assert event.decision.policy == "quality" and event.decision.trace
    assert event.workspace_bytes == event.decision.workspace_bytes
    assert event.time_ms is None


def test_time_is_measured_where_a_sink_asks_for_it() -> None:
    seen: list[AttentionEvent] = []
    with adaattn.record_events(seen.append, timing=True):
        _call()
    assert seen[0].time_ms is not None and seen[0].time_ms > 0


def test_a_failing_sink_changes_nothing_about_the_result(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    quiet = _call()
    torch.manual_seed(1)
    with caplog.at_level(logging.ERROR, "adaattn"), record_events(_fail):
        loud = _call()
    assert torch.equal(quiet, loud)
    assert caplog.text.count("an event sink failed") == 1


@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0}, {"return_aux": True}], ids=str)
def test_without_a_sink_a_call_tells_nothing_and_reads_no_clock(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    x = torch.randn(1, 2, 8, 16)

    def called() -> Any:
        return adaattn.scaled_dot_product_attention(x, x, x, **settings)

    called()  # the first of its kind makes the event that the others tell

    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError("it was used though nobody listens")

    for module, name in (
        (bound, "emit"),
        (bound, "AttentionEvent"),
        (bound, "now_ms"),
        (run, "emit"),
        (run, "AttentionEvent"),
    ):
        monkeypatch.setattr(module, name, touched)
    for _ in range(2):
        called()
    for timing in (False, True):
        with (
            pytest.raises(AssertionError, match="nobody listens"),
            record_events(_fail, timing=timing),
        ):
            called()


def test_without_a_sink_the_cost_is_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[object] = []

    def counted() -> object:
        lookups.append(None)
        return listeners()

    x = torch.randn(1, 1, 4, 8)
    adaattn.scaled_dot_product_attention(x, x, x)
    monkeypatch.setattr(bound, "listeners", counted)
    adaattn.scaled_dot_product_attention(x, x, x)
    assert len(lookups) == 1
