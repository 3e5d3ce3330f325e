"""What calls teach, as values: averages, barred heads, entries, plans to follow again."""

import copy
import gc
import pickle
from dataclasses import replace
from typing import Any

import pytest

from adaattn import AttentionEvent, AttentionProblem, HeadGroup, History, Policy
from adaattn.call.history import Entry, running_stats
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.spec import Decision, Plan, Precision, TensorStats
from adaattn.testing import make_errors, make_problem

BF16 = Precision.BF16
PROBLEM = make_problem(num_heads=2)
INFINITE = float("inf")
LOSSY = Policy(name="lossy", error_budget=0.05)


def stats(*errors: float) -> TensorStats:
    """Return measured numbers, the errors the same for each approximation."""
    return TensorStats(
        sampled_rows=16,
        precision_errors=((BF16, errors),),
        entropy_bits=errors,
        method_errors=make_errors({8: errors}, {0.9: errors}, errors),
    )


def entry_of(
    history: History,
    layer: int = 0,
    problem: AttentionProblem = PROBLEM,
    *,
    policy: Policy = LOSSY,
    backend: str = "auto",
) -> Entry:
    """Return what a history knows of some calls."""
    return history.entry(problem, layer, policy, backend)


def decision(note: str = "") -> Decision:
    """Return some decision."""
    group = HeadGroup(capability="chunked")
    return Decision(plan=Plan(groups=(group,), num_heads=2), notes=(note,))


class TestAverages:
    """Running statistics."""

    @pytest.mark.parametrize("momentum", [0.0, 0.25, 0.5, 0.9])
    def test_numbers_are_averaged_with_the_momentum(self, momentum: float) -> None:
        old = TensorStats(
            entropy_bits=(4.0, 8.0),
            pooled_entropy_bits=((4, (2.0, 4.0)),),
            effective_ranks=(16.0, 32.0),
            score_tails=((8, (0.5, 0.25)),),
            value_tails=((8, (0.125, 1.0)),),
            method_errors=make_errors({}, {0.9: (0.0, 0.0)}, (0.5, 1.0)),
        )
        new = TensorStats(
            entropy_bits=(8.0, 4.0),
            pooled_entropy_bits=((4, (4.0, 2.0)),),
            effective_ranks=(32.0, 16.0),
            score_tails=((8, (0.25, 0.5)),),
            value_tails=((8, (1.0, 0.125)),),
            method_errors=make_errors({}, {0.9: (0.0, 0.0)}, (1.0, 0.5)),
        )

        def mean(before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(
                momentum * a + (1 - momentum) * b for a, b in zip(before, now, strict=True)
            )

        found = running_stats(old, new, momentum)
        assert found.entropy_bits == mean((4.0, 8.0), (8.0, 4.0))
        assert found.pooled_entropy_bits == ((4, mean((2.0, 4.0), (4.0, 2.0))),)
        assert found.effective_ranks == mean((16.0, 32.0), (32.0, 16.0))
        assert found.score_tails == ((8, mean((0.5, 0.25), (0.25, 0.5))),)
        assert found.value_tails == ((8, mean((0.125, 1.0), (1.0, 0.125))),)
        densities = mean((0.5, 1.0), (1.0, 0.5))
        assert found.method_errors == make_errors({}, {0.9: (0.0, 0.0)}, densities)

    @pytest.mark.parametrize(
        ("before", "now", "expected"), [(0.5, 0.25, 0.375), (0.25, 0.5, 0.5), (0.25, 0.25, 0.25)]
    )
    def test_an_error_falls_slowly_and_rises_at_once(
        self, before: float, now: float, expected: float
    ) -> None:
        found = running_stats(stats(before, 0.0), stats(now, 0.0), 0.5)
        assert found.precision_errors == ((BF16, (expected, 0.0)),)
        assert [item.errors for item in found.method_errors] == [(expected, 0.0)] * 2

    def test_without_momentum_the_newest_alone_counts(self) -> None:
        new = stats(0.125, 0.25)
        assert running_stats(stats(0.5, 0.5), new, 0.0) == new

    def test_what_was_not_measured_before_is_taken_as_it_is(self) -> None:
        old = TensorStats(method_errors=make_errors({8: (0.5, 0.5), 16: (0.25, 0.25)}))
        new = replace(stats(0.125, 0.125), method_errors=make_errors({32: (0.125, 0.25)}))
        assert running_stats(old, new, 0.5) == new

    def test_what_was_not_measured_now_is_not_known_now(self) -> None:
        old = stats(0.5, 0.5)
        new = TensorStats(sampled_rows=8, max_magnitude=3.0, measure_ms=2.0)
        assert running_stats(old, new, 0.5) == new

    @pytest.mark.parametrize("momentum", [0.0, 0.5])
    def test_an_infinite_error_is_forgotten_at_the_next_measurement(self, momentum: float) -> None:
        """An average with infinity stayed infinite, and with no momentum it was no number."""
        found = running_stats(stats(INFINITE, 0.5), stats(0.125, 0.5), momentum)
        assert found.precision_errors == ((BF16, (0.125, 0.5)),)
        assert [item.errors for item in found.method_errors] == [(0.125, 0.5)] * 2

    def test_an_average_that_is_out_of_date_is_held_to_cheaper_parameters(self) -> None:
        old = TensorStats(method_errors=make_errors({8: (0.4,), 16: (0.4,)}))
        new = TensorStats(method_errors=make_errors({8: (0.1,), 16: (0.01,)}))
        once = running_stats(old, new, 0.5)
        expected = [(0.5 * 0.4 + 0.5 * 0.1,), (0.5 * 0.4 + 0.5 * 0.01,)]
        assert [item.errors for item in once.method_errors] == expected
        left_out = TensorStats(method_errors=make_errors({8: (0.01,), 16: (0.005,)}))
        stale = TensorStats(method_errors=make_errors({8: (0.01,), 16: (0.4,)}))
        found = running_stats(stale, left_out, 0.5)
        assert [item.errors for item in found.method_errors] == [(0.01,), (0.01,)]

    def test_no_error_is_below_what_was_just_measured(self) -> None:
        """It fell to that of a lower rank once, though the newest rows said more."""
        old = TensorStats(method_errors=make_errors({8: (0.1,), 16: (0.1,)}))
        new = TensorStats(method_errors=make_errors({8: (0.1,), 16: (0.3,)}))
        found = running_stats(old, new, 0.5)
        assert [item.errors for item in found.method_errors] == [(0.1,), (0.3,)]


class TestValues:
    """The history itself."""

    def test_an_entry_is_of_one_problem_layer_policy_and_backend(self) -> None:
        history = History()
        known = entry_of(history)
        known.learn(stats(0.1, 0.2), 0.5)
        assert entry_of(history, problem=make_problem(num_heads=2)) is known
        others = [
            entry_of(history, problem=make_problem(num_heads=2, len_q=16)),
            entry_of(history, 1),
            entry_of(history, policy=replace(LOSSY, error_budget=0.01)),
            entry_of(history, backend="low_rank"),
        ]
        assert len({id(item) for item in (known, *others)}) == 5
        assert all(item.stats is None for item in others)
        assert known.stats == stats(0.1, 0.2)

    def test_256_entries_are_kept_the_least_recent_forgotten_first(self) -> None:
        history = History()
        entries = [entry_of(history, layer) for layer in range(256)]
        assert entry_of(history, 0) is entries[0]
        entry_of(history, 256)
        assert entry_of(history, 0) is entries[0]
        assert entry_of(history, 2) is entries[2]
        assert entry_of(history, 1) is not entries[1]

    def test_a_reset_forgets_everything(self) -> None:
        history = History()
        entry_of(history).learn(stats(0.1, 0.2), 0.5)
        history.keep("mark", decision())
        history.reset()
        assert entry_of(history).stats is None
        assert history.recalled("mark") is None

    @pytest.mark.parametrize("twin", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
    def test_a_copy_has_the_settings_and_nothing_learnt(self, twin: Any) -> None:
        """What one process measured is not true of another's tensors; a model is often copied."""
        history = History(measure_every=3, momentum=0.25)
        entry_of(history).learn(stats(0.1, 0.2), 0.5)
        history.keep("mark", decision())
        found = twin(history)
        assert (found.measure_every, found.momentum) == (3, 0.25)
        assert entry_of(found).stats is None
        assert found.recalled("mark") is None
        assert entry_of(history).stats is not None


class TestEntries:
    """What is known of one problem in one layer."""

    def test_a_measurement_begins_a_new_age(self) -> None:
        entry = Entry()
        entry.age = 7
        entry.learn(stats(0.5, 0.5), 0.5)
        assert (entry.age, entry.stats) == (0, stats(0.5, 0.5))
        entry.learn(stats(0.25, 1.0), 0.5)
        assert entry.stats is not None
        assert entry.stats.method_errors[0].errors == (0.375, 1.0)

    def test_a_barred_head_is_approximated_by_nothing_until_it_is_measured(self) -> None:
        entry = Entry(stats=stats(0.25, 0.25))
        entry.bar((1,))
        assert entry.stats is not None
        assert entry.stats.precision_errors == ((BF16, (0.25, INFINITE)),)
        barred = make_errors({8: (0.25, INFINITE)}, {0.9: (0.25, INFINITE)}, (0.25, 0.25))
        assert entry.stats.method_errors == barred
        assert entry.stats.entropy_bits == (0.25, 0.25)
        entry.learn(stats(0.25, 0.25), 0.5)
        assert entry.stats.method_errors == stats(0.25, 0.25).method_errors

    def test_heads_of_which_nothing_is_known_cannot_be_barred(self) -> None:
        entry = Entry()
        entry.bar((0,))
        assert entry.stats is None


class TestForwards:
    """Decisions that a recomputation follows again."""

    def test_the_newest_decision_of_the_same_inputs_is_recalled(self) -> None:
        history = History()
        decisions = [decision(str(number)) for number in range(3)]
        for found, mark in zip(decisions, ("a", "b", "a"), strict=True):
            history.keep(mark, found)
        assert history.recalled("a") is decisions[2]
        assert history.recalled("b") is decisions[1]
        assert history.recalled("c") is None

    def test_a_mark_of_numbers_is_compared_by_value(self) -> None:
        history, found = History(), decision()
        history.keep(((1, 2), 0.5, -0.25), found)
        assert history.recalled(((1, 2), 0.5, -0.25)) is found
        assert history.recalled(((1, 2), 0.5, 0.25)) is None

    def test_the_last_64_are_kept(self) -> None:
        history = History()
        for number in range(65):
            history.keep(number, decision())
        assert history.recalled(0) is None
        assert history.recalled(1) is not None and history.recalled(64) is not None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"measure_every": 0}, ArgumentError, "measure_every: expected an integer of at least 1"),
        ({"measure_every": 2.0}, ArgumentTypeError, "measure_every: .* got 2.0"),
        ({"measure_every": True}, ArgumentTypeError, "measure_every: .* got True"),
        ({"momentum": 1.0}, ArgumentError, r"momentum: expected a number in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, ArgumentError, "momentum: .* got -0.1"),
        ({"momentum": float("nan")}, ArgumentError, "momentum: .* got nan"),
        ({"momentum": "half"}, ArgumentTypeError, "momentum: .* got 'half'"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        History(**options)


class Owner:
    """Counts something, and is gone one day."""


def test_what_a_counter_counted_is_handed_over_once_its_owner_is_gone() -> None:
    """Garbage collection may run inside the watcher itself, and must not call it there."""
    history, seen = History(), []

    def watch(event: AttentionEvent, calls: int) -> None:
        gc.collect()
        seen.append((event.tag, calls))

    history.watch = watch
    owners = [Owner() for _ in range(3)]
    plan = Plan(groups=(HeadGroup(capability="reference"),), num_heads=PROBLEM.num_heads)
    for number, owner in enumerate(owners):
        event = AttentionEvent(
            problem=PROBLEM, decision=Decision(plan=plan), workspace_bytes=0, layer=number
        )
        history.serve(owner, event).calls = number + 1
    owners[0].cycle = owners[0]  # type: ignore[attr-defined]
    del owners[:2], owner
    gc.collect()
    assert not seen
    assert [counter.calls for counter in history.served()] == [3]
    assert sorted(seen) == [("layer0", 1), ("layer1", 2)]
    assert [counter.calls for counter in history.served()] == [3]
    assert len(seen) == 2
