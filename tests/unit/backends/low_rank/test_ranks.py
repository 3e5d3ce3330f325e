"""Ranks that spectra and entropies predict, against ranks that sampled rows measure."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends import Tensors, capabilities
from adaattn.backends.low_rank.ranks import (
    SCREEN,
    methods,
    predicted_error,
    predicted_ranks,
    ranks_to_measure,
    tail_ranks,
)
from adaattn.call.measure import measure
from adaattn.planning import decide
from adaattn.spec import (
    AttentionProblem,
    LowRank,
    Method,
    Policy,
    Precision,
    TensorStats,
    TraceEntry,
)
from adaattn.testing import fake_facts, make_errors, make_problem

HEADS = 4
WANTED = ((Method.LOW_RANK, Precision.FP32),)

SPECTRA = {
    "planted": lambda dim: torch.where(torch.arange(dim) < 8, 1.0, 0.02),
    "decaying": lambda dim: torch.exp(-8.0 * torch.arange(dim) / dim),
    "falling slowly": lambda dim: 1.0 / (1.0 + torch.arange(dim)),
}
SHARPNESS = {"flat": 0.5, "middling": 2.0, "peaked": 8.0}


def draw(
    spectrum: str, sharpness: float, *, length: int = 512, dim: int = 64, **options: Any
) -> tuple[Tensors, AttentionProblem]:
    """Return tensors whose columns fall as a spectrum does, turned at random in each head.

    Args:
        spectrum: a name in `SPECTRA`.
        sharpness: standard deviation of the scores.
        length: tokens.
        dim: D.
        **options: further fields of the problem.
    """
    problem = make_problem(
        **({"num_heads": HEADS, "len_q": length, "head_dim": dim, "len_k": length} | options)
    )
    sizes = SPECTRA[spectrum](dim)

    def turned(heads: int) -> torch.Tensor:
        turns, _ = torch.linalg.qr(torch.randn(heads, dim, dim))
        return (torch.randn(problem.batch, heads, length, dim) * sizes) @ turns

    query, key, value = (turned(h) for h in (problem.num_heads, *[problem.num_kv_heads] * 2))
    keys = key.repeat_interleave(problem.group_size, dim=1)
    spread = (query[..., :64, :] @ keys.mT).std() * problem.scale
    return Tensors.of(query * sharpness / spread, key, value), problem


def measured(tensors: Tensors, problem: AttentionProblem, **options: Any) -> TensorStats:
    return measure(tensors, problem, WANTED, 16, allowed=capabilities(), **options)


def by_rank(stats: TensorStats) -> dict[int, tuple[float, ...]]:
    """Return the errors of each rank that was measured."""
    return {
        found.method.rank: found.errors
        for found in stats.method_errors
        if isinstance(found.method, LowRank)
    }


def invented(
    *,
    score: dict[int, tuple[float, ...]],
    value: dict[int, tuple[float, ...]] | None = None,
    bits: tuple[float, ...] = (40.0,),
    pooled: tuple[tuple[int, tuple[float, ...]], ...] = (),
) -> TensorStats:
    """Return statistics that hold spectra and entropies alone."""
    nothing = {rank: (0.0,) * len(bits) for rank in score}
    return TensorStats(
        entropy_bits=bits,
        pooled_entropy_bits=pooled,
        effective_ranks=tuple(3.0 + head for head in range(len(bits))),
        score_tails=tuple(score.items()),
        value_tails=tuple((value or nothing).items()),
    )


class TestPrediction:
    """The error that a spectrum and entropies let expect."""

    @pytest.mark.parametrize("spectrum", SPECTRA)
    @pytest.mark.parametrize("sharpness", SHARPNESS)
    @pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
    @pytest.mark.parametrize(("length", "dim"), [(512, 64), (512, 128), (1024, 64)])
    def test_it_is_within_the_screen_of_the_measured_error(
        self, spectrum: str, sharpness: str, is_causal: bool, length: int, dim: int
    ) -> None:
        """A rank within budget is never screened out, nor one tried that is far from it."""
        sharp = SHARPNESS[sharpness]
        tensors, problem = draw(spectrum, sharp, length=length, dim=dim, is_causal=is_causal)
        stats = measured(tensors, problem)
        ratios = [
            error / predicted_error(stats, rank, head)
            for rank, errors in by_rank(stats).items()
            for head, error in enumerate(errors)
            if error < 0.3
        ]
        assert ratios
        assert min(ratios) > 1 / SCREEN
        assert max(ratios) < SCREEN

    @pytest.mark.parametrize("rank", [1, 8, 15])
    @pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
    def test_a_planted_rank_is_the_rank_that_is_predicted(self, rank: int, is_causal: bool) -> None:
        """Spectra are read at multiples of D/16, so it is the next of those."""
        problem = make_problem(num_heads=HEADS, len_q=512, head_dim=32, is_causal=is_causal)
        q, k, v = (
            torch.randn(1, HEADS, 512, rank) @ torch.randn(1, HEADS, rank, 32) for _ in range(3)
        )
        tensors = Tensors.of(q / rank, k, v)
        stats = measured(tensors, problem)
        expected = -(-rank // 2) * 2
        assert predicted_ranks(stats, problem, (1e-3,) * HEADS) == (expected,) * HEADS
        for at in tail_ranks(problem):
            for head in range(HEADS):
                assert (predicted_error(stats, at, head) <= 1e-3) is (at >= rank)

    def test_full_rank_tensors_are_predicted_to_need_all_of_it(self) -> None:
        problem = make_problem(num_heads=HEADS, len_q=512, head_dim=32)
        q, k, v = (torch.randn(1, HEADS, 512, 32) for _ in range(3))
        stats = measured(Tensors.of(q, k, v), problem)
        assert predicted_ranks(stats, problem, (0.01,) * HEADS) == (32,) * HEADS

    def test_heads_of_one_call_are_told_apart(self) -> None:
        low, problem = draw("planted", 1.0)
        slow, _ = draw("falling slowly", 1.0)
        mixed = Tensors.of(
            **{
                name: torch.cat([getattr(low, name)[:, :2], getattr(slow, name)[:, 2:]], dim=1)
                for name in ("query", "key", "value")
            }
        )
        needed = predicted_ranks(measured(mixed, problem), problem, (0.1,) * HEADS)
        assert needed[0] == needed[1] == 8
        assert min(needed[2:]) > 16

    def test_heads_that_share_keys_share_their_spectra(self) -> None:
        tensors, problem = draw("decaying", 1.0, num_kv_heads=2)
        stats = measured(tensors, problem)
        for _, tails in (*stats.score_tails, *stats.value_tails):
            assert tails[0] == tails[1] and tails[2] == tails[3]
            assert tails[0] != tails[2]

    def test_the_worst_of_a_batch_counts(self) -> None:
        low, problem = draw("planted", 1.0)
        slow, _ = draw("falling slowly", 1.0)
        both = Tensors.of(
            **{
                name: torch.cat([getattr(low, name), getattr(slow, name)])
                for name in ("query", "key", "value")
            }
        )
        alone = [measured(tensors, problem) for tensors in (low, slow)]
        together = measured(both, replace(problem, batch=2))
        rounding = torch.finfo(torch.float32).eps * (problem.len_k + problem.head_dim)
        for name in ("score_tails", "value_tails"):
            for place, (_, tails) in enumerate(getattr(together, name)):
                each = torch.tensor([getattr(stats, name)[place][1] for stats in alone])
                assert (torch.tensor(tails) - each.amax(0)).abs().amax() < rounding

    @pytest.mark.parametrize(
        ("bits", "pooled", "score", "value", "expected"),
        [
            ((0.0,), (), 0.5, 0.0, 0.0),
            ((0.0,), (), 0.5, 0.25, 0.25),
            ((1.0,), (), 0.5, 0.0, 0.5 * 0.5**0.5),
            ((1.0,), ((4, (0.0,)),), 0.5, 0.0, 0.5 * 0.25**0.5),
            ((2.0,), ((4, (1.0,)), (16, (0.0,))), 0.4, 0.0, 0.4 * (1.25 / 3) ** 0.5),
            ((2000.0,), (), 0.3, 0.4, 0.5),
        ],
    )
    def test_a_row_that_attends_to_few_keys_loses_little(
        self,
        bits: tuple[float, ...],
        pooled: tuple[tuple[int, tuple[float, ...]], ...],
        score: float,
        value: float,
        expected: float,
    ) -> None:
        stats = invented(score={8: (score,)}, value={8: (value,)}, bits=bits, pooled=pooled)
        assert predicted_error(stats, 8, 0) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize(
        ("rank", "expected"), [(8, 0.4), (9, 0.4), (15, 0.4), (16, 0.2), (500, 0.2)]
    )
    def test_the_spectrum_is_read_at_the_largest_rank_below(
        self, rank: int, expected: float
    ) -> None:
        stats = invented(score={8: (0.4,), 16: (0.2,)})
        assert predicted_error(stats, rank, 0) == pytest.approx(expected, rel=1e-9)

    def test_nothing_is_predicted_without_spectra(self) -> None:
        problem = make_problem(num_heads=2, head_dim=32)
        assert predicted_error(TensorStats(), 8, 0) == float("inf")
        assert predicted_ranks(TensorStats(), problem, (0.1, 0.1)) == ()

    def test_each_head_is_judged_by_its_own_budget(self) -> None:
        problem = make_problem(num_heads=3, head_dim=64)
        stats = invented(score={8: (0.1,) * 3, 16: (0.01,) * 3}, bits=(50.0,) * 3)
        assert predicted_ranks(stats, problem, (0.2, 0.05, 0.001)) == (8, 16, 64)


class TestScreening:
    """Which ranks are tried at all."""

    def test_a_rank_within_the_screen_of_one_heads_budget_is_measured(self) -> None:
        stats = invented(
            score={8: (1.0, 0.5), 16: (1.0, 0.039), 32: (1.0, 0.01)}, bits=(50.0, 50.0)
        )
        ranks = tuple(LowRank(rank=rank, value_rank=rank) for rank in (8, 16, 32))
        assert ranks_to_measure(stats, ranks, (0.01, 0.01)) == ranks[1:]
        assert ranks_to_measure(stats, ranks, (0.25, 0.01)) == ranks
        assert ranks_to_measure(stats, ranks, (0.01, 0.0)) == ()

    @pytest.mark.parametrize(("budget", "tried"), [(0.02, 0), (0.04, 1), (0.055, 2), (0.3, 3)])
    def test_ranks_predicted_to_lose_too_much_are_not_measured(
        self, budget: float, tried: int
    ) -> None:
        tensors, problem = draw("falling slowly", 2.0)
        stats = measured(tensors, problem, budgets=(budget,) * HEADS)
        everything = measured(tensors, problem)
        every, some = by_rank(everything), by_rank(stats)
        assert len(every) == len(methods(problem, Policy())) == 3
        assert len(some) == tried
        for rank, errors in some.items():
            assert every[rank] == errors
        for rank in every.keys() - some.keys():
            assert min(every[rank]) > budget

    @pytest.mark.parametrize("budget", [0.02, 0.05])
    @pytest.mark.parametrize("spectrum", SPECTRA)
    @pytest.mark.parametrize("sharpness", SHARPNESS)
    def test_no_rank_is_screened_out_that_keeps_the_budget(
        self, spectrum: str, sharpness: str, budget: float
    ) -> None:
        tensors, problem = draw(spectrum, SHARPNESS[sharpness])
        tried = by_rank(measured(tensors, problem, budgets=(budget,) * HEADS))
        everything = by_rank(measured(tensors, problem))
        assert len(everything) == len(methods(problem, Policy())) == 3
        for rank, errors in everything.items():
            assert rank in tried or min(errors) > budget, rank

    def test_a_refused_rank_is_told_with_what_would_have_been_needed(self) -> None:
        problem = make_problem(num_heads=2, len_q=8192, head_dim=64)
        stats = invented(
            score={8: (0.8, 0.9), 16: (0.8, 0.9), 32: (0.2, 0.3), 60: (0.01, 0.3)},
            bits=(5.0, 9.25),
        )
        policy = Policy(error_budget=0.02)
        decision = decide(problem, stats, fake_facts("cpu"), policy, capabilities())
        entries = {entry.candidate: entry for entry in decision.trace}
        reason = (
            "predicted error 0.79 or more, 0.02 allowed: heads are expected to need rank 60 to 64 "
            "(effective rank 3 to 4, row entropy 5 to 9.25 bits)"
        )
        entry = entries["low_rank/fp32 rank=16,16"]
        assert (entry.reason, entry.accepted, entry.error_estimate) == (reason, False, None)

    def test_one_number_is_said_once_where_heads_are_alike(self) -> None:
        problem = make_problem(num_heads=2, len_q=8192, head_dim=64)
        stats = replace(
            invented(score={8: (0.8,) * 2, 60: (0.5,) * 2}, bits=(5.0, 5.0)),
            effective_ranks=(31.0, 31.0),
        )
        policy = Policy(error_budget=0.02)
        decision = decide(problem, stats, fake_facts("cpu"), policy, capabilities())
        reasons = {e.reason for e in decision.trace if e.candidate.startswith("low_rank/")}
        (reason,) = reasons
        assert reason.endswith("expected to need rank 64 (effective rank 31, row entropy 5 bits)")


class TestNamedRanks:
    """Ranks that a policy names instead of fractions of D."""

    @pytest.mark.parametrize(
        ("dims", "named", "expected"),
        [
            ((64, 64), (), (8, 16, 32)),
            ((128, 128), (), (16, 32, 64)),
            ((32, 32), (), (8, 16)),
            ((16, 16), (), (8,)),
            ((8, 8), (), ()),
            ((64, 12), (), (8,)),
            ((64, 64), (24, 12), (12, 24)),
            ((64, 64), (24, 24, 64, 65), (24,)),
            ((64, 16), (24, 12), (12,)),
            ((64, 64), (200,), ()),
            ((64, 64), (1,), (1,)),
        ],
    )
    def test_they_are_tried_below_the_dimensions_the_smallest_first(
        self, dims: tuple[int, int], named: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        problem = make_problem(head_dim=dims[0], value_dim=dims[1])
        tried = tuple(LowRank(rank=rank, value_rank=rank) for rank in expected)
        assert methods(problem, Policy(ranks=named)) == tried

    def test_they_alone_are_candidates(self) -> None:
        problem = make_problem(num_heads=2, len_q=8192, head_dim=64)
        stats = TensorStats(method_errors=make_errors({12: (1e-3, 1e-3), 8: (0.0, 0.0)}))
        policy = Policy(error_budget=0.02, ranks=(12, 40))
        decision = decide(problem, stats, fake_facts("cpu"), policy, capabilities())
        assert [(g.method.rank, g.method.value_rank) for g in decision.plan.groups] == [(12, 12)]
        tried = [e.candidate for e in decision.trace if e.candidate.startswith("low_rank/")]
        assert tried == ["low_rank/fp32 rank=12,12", "low_rank/fp32 rank=40,40"]

    def test_they_alone_are_measured(self) -> None:
        tensors, problem = draw("planted", 1.0)
        stats = measured(tensors, problem, policy=Policy(ranks=(12, 20)))
        assert list(by_rank(stats)) == [12, 20]

    def test_ranks_that_the_dimension_does_not_exceed_leave_no_low_rank(self) -> None:
        problem = make_problem(num_heads=2, len_q=8192, head_dim=64)
        policy = Policy(error_budget=0.02, ranks=(64, 100))
        decision = decide(problem, None, fake_facts("cpu"), policy, capabilities())
        (entry,) = _low_rank(decision.trace)
        assert not entry.accepted
        assert entry.reason.endswith("got D 64, Dv 64")

    @pytest.mark.parametrize(
        ("dims", "rank"), [((64, 64), 2), ((128, 128), 4), ((256, 16), 4), ((16, 256), 4)]
    )
    def test_a_planted_rank_below_every_step_of_the_spectrum_is_measured(
        self, dims: tuple[int, int], rank: int
    ) -> None:
        """Its prediction was infinite once, and with one rank of a narrow head nothing ran."""
        problem = make_problem(num_heads=2, len_q=512, head_dim=dims[0], value_dim=dims[1])
        q, k, v = (
            torch.randn(1, 2, 512, rank) @ torch.randn(1, 2, rank, width) / rank
            for width in (dims[0], *dims)
        )
        tensors = Tensors.of(q, k, v)
        stats = measured(tensors, problem, policy=Policy(ranks=(rank,)), budgets=(0.02,) * 2)
        assert list(by_rank(stats)) == [rank]
        assert max(by_rank(stats)[rank]) < 0.02


class TestTailRanks:
    """Where spectra are read."""

    @pytest.mark.parametrize(
        ("dims", "expected"),
        [
            ((64, 64), tuple(range(4, 64, 4))),
            ((128, 64), tuple(range(8, 64, 8))),
            ((80, 80), tuple(range(5, 80, 5))),
            ((8, 8), tuple(range(1, 8))),
            ((2, 2), (1,)),
            ((1, 1), ()),
        ],
    )
    def test_they_are_sixteenths_below_the_dimensions(
        self, dims: tuple[int, int], expected: tuple[int, ...]
    ) -> None:
        problem = make_problem(head_dim=dims[0], value_dim=dims[1])
        assert tail_ranks(problem) == expected

    @pytest.mark.parametrize(
        ("dims", "named", "expected"),
        [
            ((16, 16), (5, 8), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
            ((64, 64), (2, 30), (2, *range(4, 29, 4), 28, 30, *range(32, 64, 4))),
            ((256, 16), (4,), (4,)),
        ],
    )
    def test_ranks_that_may_be_tried_are_among_them(
        self, dims: tuple[int, int], named: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        problem = make_problem(head_dim=dims[0], value_dim=dims[1])
        found = tail_ranks(problem, methods(problem, Policy(ranks=named)))
        assert found == tuple(sorted(set(expected)))

    @pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
    def test_usual_candidates_are_among_them(self, dim: int) -> None:
        problem = make_problem(head_dim=dim)
        assert {found.rank for found in methods(problem, Policy())} <= set(tail_ranks(problem))


def _low_rank(trace: tuple[TraceEntry, ...]) -> list[TraceEntry]:
    return [entry for entry in trace if entry.candidate.startswith("low_rank/")]
