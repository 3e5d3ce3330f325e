"""The clock that approximations obey, with planted times: no test waits for a real one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from adaattn import AttentionEvent, Policy, record_events
from adaattn import scaled_dot_product_attention as attend
from adaattn.attention.runner import Runner
from adaattn.attention.statistics import AttentionStatistics
from adaattn.call.ledger import SHARE, Ledger, Variants, ledger_of
from adaattn.spec import Method, Precision
from adaattn.testing import fake_facts, make_problem

pytestmark = pytest.mark.probation

CPU = torch.device("cpu")
LOW: Variants = frozenset({(Method.LOW_RANK, Precision.FP32)})
BF16: Variants = frozenset({(Method.EXACT, Precision.BF16)})
LOSSY = Policy(name="lossy", error_budget=0.05, precisions=())
EXACT_MS, MEASURING_MS = 10.0, 1.0


def with_exact(calls: int, taken_ms: float = EXACT_MS) -> Ledger:
    """Return a ledger of some exact calls."""
    ledger = Ledger()
    for _ in range(calls):
        ledger.record(taken_ms, "exact")
    return ledger


class TestPaying:
    """Exact calls pay for measuring and trying, 2 % of their time."""

    def test_nothing_is_tried_before_an_exact_call_was_timed(self) -> None:
        assert not Ledger().may_try(LOW)
        assert not Ledger().may_measure(0.0, LOW)

    def test_a_measurement_and_a_try_wait_until_exact_calls_have_paid(self) -> None:
        needed = (MEASURING_MS + EXACT_MS) / SHARE
        calls = round(needed / EXACT_MS)
        assert not with_exact(calls - 1).may_measure(MEASURING_MS, LOW)
        assert with_exact(calls + 1).may_measure(MEASURING_MS, LOW)

    def test_what_measuring_took_counts_more_than_what_it_was_expected_to(self) -> None:
        ledger = with_exact(100)
        assert ledger.may_measure(MEASURING_MS, LOW)
        ledger.record(8.0, "measuring", LOW)
        assert not ledger.may_measure(MEASURING_MS, LOW)
        assert ledger.may_measure(MEASURING_MS, BF16)

    def test_a_first_try_waits_and_the_ones_after_it_do_not(self) -> None:
        ledger = with_exact(10)
        assert not ledger.may_try(LOW)
        ledger.record(0.9 * EXACT_MS, "approximate", LOW)
        assert ledger.may_try(LOW)

    def test_an_approximation_that_pays_pays_for_the_next_measurement_too(self) -> None:
        ledger = with_exact(100)
        ledger.record(19.0, "measuring", LOW)
        for _ in range(400):
            ledger.record(EXACT_MS / 2, "approximate", LOW)
        assert ledger.may_measure(0.0, BF16)


class TestDropping:
    """A way stays while its median is below that of exact attention."""

    def test_one_that_takes_much_longer_is_dropped_at_once(self) -> None:
        ledger = with_exact(3)
        ledger.record(1.3 * EXACT_MS, "approximate", LOW)
        assert ledger.dropped == LOW

    def test_one_that_takes_a_little_longer_is_dropped_by_the_second_call(self) -> None:
        ledger = with_exact(3)
        ledger.record(1.1 * EXACT_MS, "approximate", LOW)
        assert not ledger.dropped
        ledger.record(1.1 * EXACT_MS, "approximate", LOW)
        assert ledger.dropped == LOW

    def test_a_lone_slow_call_of_one_that_pays_drops_nothing(self) -> None:
        ledger = with_exact(3)
        for taken_ms in (5.0, 5.0, 80.0, 5.0, 5.0):
            ledger.record(taken_ms, "approximate", LOW)
        assert not ledger.dropped

    def test_one_that_is_slow_in_four_calls_of_nine_is_dropped(self) -> None:
        """Its median was below; its calls took twice the time, repairs among them."""
        ledger = with_exact(3)
        for taken_ms in ([9.0] * 5 + [40.0] * 4) * 2:
            ledger.record(taken_ms, "approximate", LOW)
        assert ledger.dropped == LOW

    def test_one_that_has_become_slower_is_dropped(self) -> None:
        ledger = with_exact(3)
        for _ in range(20):
            ledger.record(5.0, "approximate", LOW)
        calls = 0
        while not ledger.dropped:
            ledger.record(12.0, "approximate", LOW)
            calls += 1
        assert calls <= 9

    def test_one_is_compared_with_exact_attention_as_of_now(self) -> None:
        ledger = with_exact(9)
        for _ in range(9):
            ledger.record(EXACT_MS / 4, "exact")
        for _ in range(2):
            ledger.record(EXACT_MS / 2, "approximate", LOW)
        assert ledger.dropped == LOW

    def test_the_others_stay(self) -> None:
        ledger = with_exact(3)
        for _ in range(3):
            ledger.record(20.0, "approximate", LOW)
            ledger.record(5.0, "approximate", BF16)
        assert ledger.dropped == LOW

    def test_exact_attention_is_timed_again_every_32_calls(self) -> None:
        ledger = Ledger()
        wanted = [ledger.wants_exact() for _ in range(96)]
        assert [place for place, now in enumerate(wanted, 1) if now] == [32, 64, 96]


class TestSaved:
    """The time that approximations saved, less what trying and measuring cost."""

    def test_gains_losses_and_measurements_are_added_up(self) -> None:
        ledger = with_exact(3)
        ledger.record(MEASURING_MS, "measuring")
        for taken_ms in (4.0, 13.0):
            ledger.record(taken_ms, "approximate", LOW)
        assert ledger.take_saved() == -1.0 + 6.0 - 3.0
        assert ledger.take_saved() == 0.0

    def test_an_approximation_without_an_exact_call_beside_it_saves_nothing(self) -> None:
        """It was compared with infinity, and the statistics had saved that."""
        ledger = Ledger()
        for _ in range(3):
            ledger.record(5.0, "approximate", LOW)
        assert ledger.take_saved() == 0.0
        assert not ledger.dropped


def test_a_block_is_timed_by_the_wall_clock_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.25])
    monkeypatch.setattr("adaattn.call.ledger.time.perf_counter", lambda: next(clock))
    ledger = Ledger()
    with ledger.timing(CPU, "exact"):
        pass
    assert ledger.exact_ms == 250.0


def test_a_block_that_raises_was_not_timed() -> None:
    ledger = Ledger()
    with pytest.raises(ZeroDivisionError), ledger.timing(CPU, "exact"):
        raise ZeroDivisionError
    assert not ledger.may_try(LOW)


def test_layers_of_one_problem_share_a_ledger_and_policies_do_not() -> None:
    problem = make_problem()
    ledger = ledger_of(problem, LOSSY, "auto", CPU)
    assert ledger_of(make_problem(), LOSSY, "auto", CPU) is ledger
    assert ledger_of(problem, Policy(error_budget=0.01), "auto", CPU) is not ledger
    assert ledger_of(problem, LOSSY, "low_rank", CPU) is not ledger
    assert ledger_of(make_problem(len_q=9), LOSSY, "auto", CPU) is not ledger


class TestCalls:
    """Calls under an error budget, on a machine where low rank is predicted to pay."""

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every test see that machine."""
        facts = fake_facts("cpu")
        monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)

    @staticmethod
    def plant(monkeypatch: pytest.MonkeyPatch, approximate_ms: float) -> list[tuple[str, float]]:
        """Let each step take a planted time; return the steps."""
        steps: list[tuple[str, float]] = []

        @contextmanager
        def timing(
            ledger: Ledger,
            device: torch.device,
            kind: str,
            variants: Variants = frozenset(),
            chose_ms: float = 0.0,
        ) -> Iterator[None]:
            yield
            planted = {"exact": EXACT_MS, "measuring": MEASURING_MS, "approximate": approximate_ms}
            steps.append((kind, planted[kind]))
            ledger.record(planted[kind], kind, variants)

        counted = Ledger.count_exact

        def count_exact(ledger: Ledger, calls: int) -> None:
            steps.extend([("untimed", EXACT_MS)] * calls)
            counted(ledger, calls)

        monkeypatch.setattr(Ledger, "timing", timing)
        monkeypatch.setattr(Ledger, "count_exact", count_exact)
        return steps

    @staticmethod
    def draw() -> list[torch.Tensor]:
        """Return q, k and v of rank 8: low rank loses nothing but rounding."""
        return [torch.randn(1, 1, 2048, 8) @ torch.randn(8, 64) / 8 for _ in range(3)]

    @pytest.mark.parametrize("approximate_ms", [10.5, 12.0, 19.0])
    def test_a_way_that_does_not_pay_is_dropped_after_few_calls_and_costs_2_percent(
        self, monkeypatch: pytest.MonkeyPatch, approximate_ms: float
    ) -> None:
        steps = self.plant(monkeypatch, approximate_ms)
        tensors, events = self.draw(), list[AttentionEvent]()
        with record_events(events.append):
            for _ in range(150):
                attend(*tensors, policy=LOSSY)
        assert events[0].decision.plan.is_exact and events[0].stats is None
        tries = [place for place, item in enumerate(events) if not item.decision.plan.is_exact]
        assert 1 <= len(tries) <= 3
        assert tries[0] > 20  # exact calls paid first
        assert all(item.decision.plan.is_exact for item in events[tries[-1] + 1 :])
        alone = 150 * EXACT_MS
        total, worst, calls = 0.0, 0.0, 0
        for kind, taken_ms in steps:
            total += taken_ms
            calls += kind != "measuring"
            worst = max(worst, total - calls * EXACT_MS)
        calls_left = calls - 150  # the last of those that run without a look are yet to come
        assert 0 <= calls_left < 16
        total -= calls_left * EXACT_MS
        assert 0 < worst <= SHARE * alone
        last = events[-1].decision.trace
        assert any("took longer than exact attention" in entry.reason for entry in last)
        saved = sum(item.saved_ms for item in events)
        assert saved == pytest.approx(alone - total, rel=1e-9)

    def test_a_way_that_pays_is_taken_and_the_statistics_tell_what_it_saved(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = self.plant(monkeypatch, 4.0)
        tensors, runner = self.draw(), Runner(LOSSY, measure_every=1000)
        for _ in range(150):
            runner.run(*tensors)
        kinds = [kind for kind, _ in steps]
        taken = kinds.count("approximate")
        assert kinds.count("measuring") == 1
        assert kinds.count("exact") + kinds.count("untimed") + taken == 150 and taken > 60
        statistics = runner.statistics.to_dict()
        assert statistics["approximate_calls"] == taken
        assert statistics["time_saved_ms"] == pytest.approx(
            taken * (EXACT_MS - 4.0) - MEASURING_MS, rel=1e-9
        )

    def test_a_named_approximation_is_on_no_probation_and_saves_nothing_unheard_of(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.plant(monkeypatch, 40.0)
        tensors, statistics = self.draw(), AttentionStatistics()
        events: list[AttentionEvent] = []
        with record_events(statistics.record), record_events(events.append):
            for _ in range(4):
                attend(*tensors, policy=LOSSY, backend="low_rank")
        assert not any(event.decision.plan.is_exact for event in events)
        assert statistics["time_saved_ms"] == pytest.approx(-MEASURING_MS, rel=1e-9)

    def test_one_layer_profits_from_what_another_found_too_slow(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = self.plant(monkeypatch, 19.0)
        tensors = self.draw()
        for call in range(160):
            attend(*tensors, policy=LOSSY, layer=call % 2)
        assert [kind for kind, _ in steps].count("approximate") <= 2
