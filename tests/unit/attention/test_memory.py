"""What a module remembers: averages, ages, ways, barred heads, and plans to follow again."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaattn import AttentionEvent
from adaattn.call.history import CallMemory, is_recomputing, running_stats
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.spec import (
    AttentionProblem,
    Decision,
    HeadGroup,
    Method,
    Plan,
    Precision,
    TensorStats,
    Way,
)
from adaattn.testing import make_problem

BF16 = Precision.BF16
DENSE: Way = (Method.EXACT, Precision.FP32)
LOW: Way = (Method.LOW_RANK, Precision.FP32)
PROBLEM = make_problem(num_heads=2)
INFINITE = float("inf")


def stats(*errors: float) -> TensorStats:
    """Return measured numbers, the errors the same for each approximation."""
    return TensorStats(
        sampled_rows=16,
        precision_errors=((BF16, errors),),
        entropy_bits=errors,
        low_rank_errors=(((8, 8), errors),),
        block_sparse=((0.9, errors, errors),),
    )


def event(
    measured: TensorStats | None = None,
    problem: AttentionProblem = PROBLEM,
    *,
    low: tuple[int, ...] = (),
    repaired: tuple[int, ...] = (),
    note: str = "",
) -> AttentionEvent:
    """Return a call in which some heads were of low rank."""
    dense = tuple(head for head in range(problem.num_heads) if head not in low)
    groups = [HeadGroup(capability="chunked", heads=dense)] if dense else []
    if low:
        low_rank = HeadGroup(capability="low_rank", method=Method.LOW_RANK, rank=8, heads=low)
        groups.append(low_rank)
    plan = Plan(groups=tuple(groups), num_heads=problem.num_heads)
    return AttentionEvent(
        problem=problem,
        decision=Decision(plan=plan, notes=(note,)),
        workspace_bytes=0,
        repaired_heads=repaired,
        stats=measured,
    )


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
            block_sparse=((0.9, (0.5, 1.0), (0.0, 0.0)),),
        )
        new = TensorStats(
            entropy_bits=(8.0, 4.0),
            pooled_entropy_bits=((4, (4.0, 2.0)),),
            effective_ranks=(32.0, 16.0),
            score_tails=((8, (0.25, 0.5)),),
            value_tails=((8, (1.0, 0.125)),),
            block_sparse=((0.9, (1.0, 0.5), (0.0, 0.0)),),
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
        assert found.block_sparse == ((0.9, mean((0.5, 1.0), (1.0, 0.5)), (0.0, 0.0)),)

    @pytest.mark.parametrize(
        ("before", "now", "expected"), [(0.5, 0.25, 0.375), (0.25, 0.5, 0.5), (0.25, 0.25, 0.25)]
    )
    def test_an_error_falls_slowly_and_rises_at_once(
        self, before: float, now: float, expected: float
    ) -> None:
        found = running_stats(stats(before, 0.0), stats(now, 0.0), 0.5)
        assert found.precision_errors == ((BF16, (expected, 0.0)),)
        assert found.low_rank_errors == (((8, 8), (expected, 0.0)),)
        assert found.block_sparse[0][2] == (expected, 0.0)

    def test_without_momentum_the_newest_alone_counts(self) -> None:
        new = stats(0.125, 0.25)
        assert running_stats(stats(0.5, 0.5), new, 0.0) == new

    def test_what_was_not_measured_before_is_taken_as_it_is(self) -> None:
        old = TensorStats(low_rank_errors=(((8, 8), (0.5, 0.5)), ((16, 16), (0.25, 0.25))))
        new = replace(stats(0.125, 0.125), low_rank_errors=(((32, 32), (0.125, 0.25)),))
        assert running_stats(old, new, 0.5) == new

    def test_what_was_not_measured_now_is_not_known_now(self) -> None:
        old = stats(0.5, 0.5)
        new = TensorStats(sampled_rows=8, max_magnitude=3.0, measure_ms=2.0)
        assert running_stats(old, new, 0.5) == new

    @pytest.mark.parametrize("momentum", [0.0, 0.5])
    def test_an_infinite_error_is_forgotten_at_the_next_measurement(self, momentum: float) -> None:
        """An average with infinity stayed infinite, and with no momentum it was no number."""
        found = running_stats(stats(INFINITE, 0.5), stats(0.125, 0.5), momentum)
        assert found.low_rank_errors == (((8, 8), (0.125, 0.5)),)
        assert found.precision_errors == ((BF16, (0.125, 0.5)),)
        assert found.block_sparse[0][2] == (0.125, 0.5)


class TestAges:
    """When numbers are measured anew."""

    @pytest.mark.parametrize("measure_every", [1, 2, 3, 8])
    def test_numbers_serve_until_the_next_measurement(self, measure_every: int) -> None:
        memory = CallMemory(measure_every=measure_every)
        measured = []
        for _ in range(3 * measure_every):
            earlier = memory.history().of(PROBLEM)
            fresh = earlier is not None and earlier.stats is not None
            measured.append(not fresh)
            memory.learn(event(None if fresh else stats(0.1, 0.2)), ())
        assert measured == [call % measure_every == 0 for call in range(3 * measure_every)]

    def test_each_problem_has_its_own_age(self) -> None:
        memory = CallMemory(measure_every=2)
        other = make_problem(num_heads=2, len_q=16)
        memory.learn(event(stats(0.1, 0.2)), ())
        memory.learn(event(stats(0.1, 0.2), other), ())
        memory.learn(event(None, other), ())
        first, second = memory.history().of(PROBLEM), memory.history().of(other)
        assert first is not None and first.stats == stats(0.1, 0.2)
        assert second is not None and second.stats is None

    def test_stale_numbers_still_enter_the_average(self) -> None:
        memory = CallMemory(measure_every=1, momentum=0.5)
        memory.learn(event(stats(0.5, 0.5)), ())
        memory.learn(event(stats(0.25, 1.0)), ())
        memory.measure_every = 5
        memory.learn(event(stats(0.25, 1.0)), ())
        earlier = memory.history().of(PROBLEM)
        assert earlier is not None and earlier.stats is not None
        assert earlier.stats.low_rank_errors == (((8, 8), (0.3125, 1.0)),)

    def test_calls_on_which_nothing_was_ever_measured_teach_nothing(self) -> None:
        memory = CallMemory()
        memory.learn(event(None), ())
        assert memory.history().entries == ()

    def test_the_same_history_is_given_until_something_changes(self) -> None:
        """Planning caches by what it is given; a new object a call would be hashed anew."""
        memory = CallMemory(measure_every=4)
        memory.learn(event(stats(0.1, 0.2), low=(0,)), ())
        first = memory.history()
        memory.learn(event(None, low=(0,)), ())
        assert memory.history() is first
        memory.learn(event(None, low=(0, 1)), ())
        changed = memory.history()
        assert changed is not first
        assert changed.entries[0].ways == (LOW, LOW)
        memory.learn(event(None, low=(0, 1)), ())
        assert memory.history() is not changed

    def test_eight_problems_are_remembered_the_least_recent_forgotten_first(self) -> None:
        memory = CallMemory()
        problems = [make_problem(num_heads=2, len_q=length) for length in range(1, 10)]
        for problem in problems[:8]:
            memory.learn(event(stats(0.1, 0.2), problem), ())
        memory.learn(event(stats(0.1, 0.2), problems[0]), ())
        memory.learn(event(stats(0.1, 0.2), problems[8]), ())
        known = [entry.problem for entry in memory.history().entries]
        assert known == [*problems[2:8], problems[0], problems[8]]

    @pytest.mark.parametrize("measure_every", [1, 5])
    def test_planning_is_told_how_many_calls_share_a_measurement(self, measure_every: int) -> None:
        memory = CallMemory(measure_every=measure_every)
        assert memory.history().calls_per_measurement == measure_every
        memory.learn(event(stats(0.1, 0.2)), ())
        assert memory.history().calls_per_measurement == measure_every

    def test_a_reset_forgets_everything(self) -> None:
        memory = CallMemory()
        memory.learn(event(stats(0.1, 0.2)), "mark")
        memory.reset()
        assert memory.history().entries == ()
        assert memory.recalled("mark") is None


class TestWays:
    """How each head was computed the last time."""

    def test_they_are_those_of_the_newest_call(self) -> None:
        memory = CallMemory()
        memory.learn(event(stats(0.1, 0.2), low=(1,)), ())
        assert memory.history().entries[0].ways == (DENSE, LOW)
        memory.learn(event(None, low=(0,)), ())
        assert memory.history().entries[0].ways == (LOW, DENSE)

    def test_a_group_without_heads_is_all_of_them(self) -> None:
        memory = CallMemory()
        group = HeadGroup(capability="chunked", precision=BF16)
        plan = Plan(groups=(group,), num_heads=2)
        found = replace(event(stats(0.1, 0.2)), decision=Decision(plan=plan))
        memory.learn(found, ())
        assert memory.history().entries[0].ways == ((Method.EXACT, BF16),) * 2

    def test_a_repaired_head_was_exact_in_the_end(self) -> None:
        memory = CallMemory()
        memory.learn(event(stats(0.1, 0.2), low=(0, 1), repaired=(1,)), ())
        assert memory.history().entries[0].ways == (LOW, DENSE)

    def test_a_repaired_head_stays_exact_until_it_is_measured_anew(self) -> None:
        memory = CallMemory(measure_every=3, momentum=0.5)
        memory.learn(event(stats(0.25, 0.25), low=(0, 1), repaired=(1,)), ())
        for _ in range(2):
            (earlier,) = memory.history().entries
            assert earlier.stats is not None
            assert earlier.stats.low_rank_errors == (((8, 8), (0.25, INFINITE)),)
            assert earlier.stats.precision_errors == ((BF16, (0.25, INFINITE)),)
            assert earlier.stats.block_sparse == ((0.9, (0.25, 0.25), (0.25, INFINITE)),)
            assert earlier.stats.entropy_bits == (0.25, 0.25)
            memory.learn(event(None, low=(0,)), ())
        assert memory.history().entries[0].stats is None
        memory.learn(event(stats(0.25, 0.25)), ())
        (earlier,) = memory.history().entries
        assert earlier.stats is not None
        assert earlier.stats.low_rank_errors == (((8, 8), (0.25, 0.25)),)

    def test_a_head_that_fails_between_two_measurements_is_barred_too(self) -> None:
        memory = CallMemory(measure_every=8)
        memory.learn(event(stats(0.25, 0.25), low=(0, 1)), ())
        memory.learn(event(None, low=(0, 1), repaired=(0,)), ())
        (earlier,) = memory.history().entries
        assert earlier.stats is not None
        assert earlier.stats.low_rank_errors == (((8, 8), (INFINITE, 0.25)),)
        assert earlier.ways == (DENSE, LOW)


class TestForwards:
    """Decisions that a recomputation follows again."""

    def test_the_newest_decision_of_the_same_inputs_is_recalled(self) -> None:
        memory = CallMemory()
        events = [event(note=str(number)) for number in range(3)]
        for found, mark in zip(events, ("a", "b", "a"), strict=True):
            memory.learn(found, mark)
        assert memory.recalled("a") is events[2].decision
        assert memory.recalled("b") is events[1].decision
        assert memory.recalled("c") is None

    def test_a_mark_of_numbers_is_compared_by_value(self) -> None:
        memory = CallMemory()
        found = event()
        memory.learn(found, ((1, 2), 0.5, -0.25))
        assert memory.recalled(((1, 2), 0.5, -0.25)) is found.decision
        assert memory.recalled(((1, 2), 0.5, 0.25)) is None

    def test_the_last_64_are_kept(self) -> None:
        memory = CallMemory()
        for number in range(65):
            memory.learn(event(), number)
        assert memory.recalled(0) is None
        assert memory.recalled(1) is not None and memory.recalled(64) is not None


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"measure_every": 0}, ArgumentError, "measure_every: expected an integer of at least 1"),
        ({"measure_every": 2.0}, ArgumentError, "measure_every: .* got 2.0"),
        ({"measure_every": True}, ArgumentError, "measure_every: .* got True"),
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
        CallMemory(**options)
