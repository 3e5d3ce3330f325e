"""Tables of times, errors and earlier ways, and the way that each head must take."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.backends import capability_named
from adaattn.backends.block_sparse.executor import KEPT_MASSES
from adaattn.errors import PlanError
from adaattn.planning import decide
from adaattn.planning.assignment import (
    ENTER_ERROR,
    MARGIN,
    assign_heads,
    group_heads,
    with_inertia,
)
from adaattn.planning.candidates import Candidate
from adaattn.planning.cost import estimate
from adaattn.spec import (
    METHODS,
    AttentionProblem,
    Capability,
    Cost,
    Decision,
    Feature,
    HeadGroup,
    LowRank,
    Method,
    Policy,
    Precision,
    Scheme,
    TensorStats,
    Variant,
)
from adaattn.testing import fake_facts, make_errors, make_problem

FP32, BF16 = Precision.FP32, Precision.BF16
BUDGET = 0.02
DENSE: Variant = (Method.EXACT, FP32)
LOW: Variant = (Method.LOW_RANK, FP32)
SPARSE: Variant = (Method.BLOCK_SPARSE, FP32)
HALF: Variant = (Method.EXACT, BF16)
TINY = 1e-9
Executors = tuple[Capability, ...]


def candidate(
    variant: Variant,
    ms: float,
    errors: tuple[float, ...] = (),
    *,
    rank: int = 0,
    num_heads: int = 1,
) -> Candidate:
    """Return a way of computing that takes so long for each head and loses so much."""
    method, precision = variant
    found = LowRank(rank=rank) if method is Method.LOW_RANK else METHODS[method]()
    num_heads = len(errors) or num_heads
    return Candidate(
        group=HeadGroup(capability=method.name.lower(), method=found, scheme=Scheme.of(precision)),
        capability=Capability(name=method.name.lower(), backend="x", method=method),
        cost=Cost(flops=0.0, bytes_moved=0.0, workspace_bytes=0, time_ms=ms * num_heads),
        errors=errors,
        budgets=(BUDGET,) * len(errors),
        num_heads=num_heads,
    )


def taken(candidates: Sequence[Candidate], num_heads: int = 1, *variants: Variant) -> list[Variant]:
    """Return the way of each head, as `decide` finds it; the first candidate is exact."""
    judged = with_inertia(candidates, variants)
    chosen = assign_heads(judged, candidates[0], num_heads, variants)
    return [(item.group.method.kind, item.group.scheme.inputs) for item in chosen]


class TestErrors:
    """A new way is entered below a share of the budget, and left above the budget."""

    @pytest.mark.parametrize(
        ("share", "before", "after"),
        [
            (0.0, None, LOW),
            (1.0, None, LOW),
            (1.0 + TINY, None, DENSE),
            (0.0, DENSE, LOW),
            (ENTER_ERROR - TINY, DENSE, LOW),
            (ENTER_ERROR + TINY, DENSE, DENSE),
            (1.0, DENSE, DENSE),
            (1.0 + TINY, DENSE, DENSE),
            (ENTER_ERROR - TINY, LOW, LOW),
            (ENTER_ERROR + TINY, LOW, LOW),
            (1.0, LOW, LOW),
            (1.0 + TINY, LOW, DENSE),
            (float("inf"), LOW, DENSE),
            (float("nan"), LOW, DENSE),
            (ENTER_ERROR - TINY, SPARSE, LOW),
            (ENTER_ERROR + TINY, SPARSE, DENSE),
        ],
    )
    def test_a_head_enters_well_below_its_budget_and_leaves_above_it(
        self, share: float, before: Variant | None, after: Variant
    ) -> None:
        candidates = [
            candidate(DENSE, 10.0),
            candidate(LOW, 5.0, (share * BUDGET,), rank=8),
        ]
        assert taken(candidates, 1, *([before] if before else [])) == [after]

    def test_an_error_that_wanders_about_the_budgets_edge_changes_a_head_once(self) -> None:
        """Without inertia each measurement would have changed the way."""
        shares = (0.95, 0.79, 0.9, 0.99, 0.85, 0.999, 1.01, 0.9, 0.99, 0.81, 0.79)
        variant, seen, hasty = DENSE, [], []
        for share in shares:
            candidates = [candidate(DENSE, 10.0), candidate(LOW, 5.0, (share * BUDGET,))]
            (variant,) = taken(candidates, 1, variant)
            seen.append(variant)
            hasty += taken(candidates)
        assert seen == [DENSE, *[LOW] * 5, *[DENSE] * 4, LOW]
        assert hasty == [*[LOW] * 6, DENSE, *[LOW] * 4]

    def test_each_head_has_its_own_past(self) -> None:
        errors = (0.9 * BUDGET,) * 3
        candidates = [candidate(DENSE, 10.0, num_heads=3), candidate(LOW, 5.0, errors)]
        assert taken(candidates, 3, LOW, DENSE, LOW) == [LOW, DENSE, LOW]

    def test_a_lower_format_is_a_way_of_its_own(self) -> None:
        errors = (0.9 * BUDGET,)
        candidates = [candidate(DENSE, 10.0), candidate(HALF, 5.0, errors)]
        assert taken(candidates, 1, DENSE) == [DENSE]
        assert taken(candidates, 1, HALF) == [HALF]
        lower = (Method.LOW_RANK, BF16)
        candidates = [candidate(DENSE, 10.0), candidate(lower, 5.0, errors)]
        assert taken(candidates, 1, LOW) == [DENSE]

    def test_another_rank_is_the_same_way(self) -> None:
        """A head of low rank may always take the smallest rank that keeps its budget."""
        candidates = [
            candidate(DENSE, 10.0),
            candidate(LOW, 3.0, (0.95 * BUDGET,), rank=8),
            candidate(LOW, 5.0, (0.1 * BUDGET,), rank=16),
        ]
        (chosen,) = assign_heads(candidates, candidates[0], 1, (LOW,))
        assert chosen.group.method.rank == 8
        (fresh,) = assign_heads(candidates, candidates[0], 1, (DENSE,))
        assert fresh.group.method.rank == 16

    def test_a_head_that_may_lose_nothing_stays_exact_whatever_it_was(self) -> None:
        item = candidate(LOW, 5.0, (0.0, 0.0))
        strict = Candidate(
            group=item.group,
            capability=item.capability,
            cost=item.cost,
            errors=(0.0, 0.0),
            budgets=(0.0, BUDGET),
            num_heads=2,
        )
        candidates = [candidate(DENSE, 10.0, num_heads=2), strict]
        assert taken(candidates, 2, LOW, LOW) == [DENSE, LOW]


class TestTimes:
    """A new way is entered for a clear gain, and kept for any."""

    @pytest.mark.parametrize(
        ("saved", "before", "after"),
        [
            (MARGIN + 0.01, None, LOW),
            (MARGIN - 0.01, None, DENSE),
            (MARGIN + 0.01, DENSE, LOW),
            (MARGIN - 0.01, DENSE, DENSE),
            (MARGIN - 0.01, LOW, LOW),
            (0.001, LOW, LOW),
            (0.0, LOW, DENSE),
            (-0.01, LOW, DENSE),
            (MARGIN - 0.01, SPARSE, DENSE),
        ],
    )
    def test_a_head_enters_for_a_clear_gain_and_stays_while_it_is_not_slower(
        self, saved: float, before: Variant | None, after: Variant
    ) -> None:
        candidates = [
            candidate(DENSE, 10.0),
            candidate(LOW, 10.0 * (1 - saved), (0.1 * BUDGET,)),
        ]
        assert taken(candidates, 1, *([before] if before else [])) == [after]

    @pytest.mark.parametrize(
        ("low_ms", "sparse_ms", "before", "after"),
        [
            (5.0, 5.0, LOW, LOW),
            (5.0, 5.1, LOW, LOW),
            (5.1, 5.0, LOW, LOW),
            (5.0, 4.9, LOW, LOW),
            (5.0, 4.0, LOW, SPARSE),
            (5.0, 5.1, SPARSE, SPARSE),
            (5.0, 6.0, SPARSE, LOW),
        ],
    )
    @pytest.mark.parametrize("low_is_more_accurate", [True, False])
    def test_a_head_leaves_one_approximation_for_another_only_for_a_clear_gain(
        self,
        low_ms: float,
        sparse_ms: float,
        before: Variant,
        after: Variant,
        low_is_more_accurate: bool,
    ) -> None:
        """A more accurate one once took a head away for any gain at all."""
        errors = (0.1 * BUDGET, 0.2 * BUDGET)
        low, sparse = errors if low_is_more_accurate else reversed(errors)
        candidates = [
            candidate(DENSE, 10.0),
            candidate(LOW, low_ms, (low,)),
            candidate(SPARSE, sparse_ms, (sparse,)),
        ]
        assert taken(candidates, 1, before) == [after]

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_what_was_decided_is_decided_again(self, data: st.DataObject) -> None:
        """Numbers that do not change never change a way."""
        error = st.floats(0, 1.3 * BUDGET)
        ms = st.floats(1.0, 12.0)
        heads = 3
        candidates = [
            candidate(DENSE, 10.0, num_heads=heads),
            *(
                candidate(variant, data.draw(ms), tuple(data.draw(error) for _ in range(heads)))
                for variant in (LOW, SPARSE, HALF)
            ),
        ]
        before = [data.draw(st.sampled_from((DENSE, LOW, SPARSE, HALF))) for _ in range(heads)]
        first = taken(candidates, heads, *before)
        assert taken(candidates, heads, *first) == first


class TestDecisions:
    """The same through `decide`: plans that stay, and sentences that are true."""

    @staticmethod
    def problem(**values: object) -> AttentionProblem:
        return make_problem(**{"num_heads": 4, "len_q": 16384, "head_dim": 128, **values})

    @staticmethod
    def stats(problem: AttentionProblem, *errors: float) -> TensorStats:
        heads = problem.num_heads
        return TensorStats(
            sampled_rows=32,
            method_errors=make_errors(
                dict.fromkeys((16, 32, 64), errors), dict.fromkeys(KEPT_MASSES, (0.9,) * heads)
            ),
        )

    def decided(
        self,
        executors: Executors,
        errors: Sequence[float],
        variants: tuple[Variant, ...],
        **options: bool,
    ) -> Decision:
        problem = self.problem()
        policy = Policy(error_budget=BUDGET)
        stats = self.stats(problem, *errors)
        facts = fake_facts("cpu")
        return decide(problem, stats, facts, policy, executors, variants=variants, **options)

    def test_no_past_is_the_first_call(self, executors: Executors) -> None:
        errors = (0.9 * BUDGET,) * 4
        fresh = self.decided(executors, errors, ())
        assert [group.method.kind for group in fresh.plan.groups] == [Method.LOW_RANK]
        assert self.decided(executors, errors, (LOW,) * 4) == fresh

    def test_a_candidate_that_inertia_bars_from_every_head_says_so(
        self, executors: Executors
    ) -> None:
        errors = [share * BUDGET for share in (0.9, 0.85, 0.95, 3.0)]
        decision = self.decided(executors, errors, (DENSE,) * 4)
        assert decision.plan.is_exact
        reasons = {
            entry.reason for entry in decision.trace if entry.candidate.startswith("low_rank/")
        }
        assert reasons == {
            "error 0.017 is within the 0.02 allowed, but a head takes a new way only below 0.8 "
            "of it"
        }

    def test_heads_that_stay_keep_a_mixed_plan(self, executors: Executors) -> None:
        errors = [share * BUDGET for share in (0.9, 0.9, 3.0, 0.9)]
        variants = (LOW, LOW, DENSE, DENSE)
        decision = self.decided(executors, errors, variants)
        by_method = {group.method.kind: group.heads for group in decision.plan.groups}
        assert by_method == {Method.LOW_RANK: (0, 1), Method.EXACT: (2, 3)}
        assert self.decided(executors, errors, ()).plan.groups != decision.plan.groups

    def test_a_candidate_held_from_some_heads_is_not_called_slow(
        self, executors: Executors
    ) -> None:
        """Rank 32 was faster for head 1 and barred by inertia, and the trace told of its time."""
        problem = self.problem()
        stats = TensorStats(
            method_errors=make_errors(
                {
                    16: (0.1 * BUDGET, 9.0, 9.0, 9.0),
                    32: (0.1 * BUDGET, *[0.9 * BUDGET] * 3),
                    64: (9.0,) * 4,
                }
            )
        )
        decision = decide(
            problem,
            stats,
            fake_facts("cpu"),
            Policy(error_budget=BUDGET),
            executors,
            variants=(LOW, DENSE, DENSE, DENSE),
        )
        entries = {entry.candidate: entry for entry in decision.trace}
        assert entries["low_rank/fp32 rank=16,16"].heads == (0,)
        costs = {name: entry.cost.time_ms for name, entry in entries.items() if entry.cost}
        assert costs["low_rank/fp32 rank=32,32"] < 0.8 * costs["sdpa.flash/fp32"]
        reason = entries["low_rank/fp32 rank=32,32"].reason
        assert "not faster by enough" not in reason and "slower for heads 0-3" not in reason
        assert "only below 0.8" in reason or reason.startswith("slower for head 0")

    @pytest.mark.parametrize(
        ("before", "mixed"),
        [
            ((LOW, DENSE, DENSE, DENSE), True),
            ((DENSE,) * 4, False),
            ((LOW,) * 4, False),
            ((), False),
        ],
    )
    def test_a_mixed_plan_that_stays_need_not_gain_the_margin_again(
        self, before: tuple[Variant, ...], mixed: bool
    ) -> None:
        """One head of four gains a tenth, which is less than the margin of the whole."""
        everything = ~Feature(0)
        facts, problem = fake_facts("cpu"), self.problem()
        low = replace(capability_named("low_rank"), name="low", features=everything, efficiency=0.5)
        group = HeadGroup(capability="low", method=LowRank(rank=64, value_rank=64))
        low_ms = estimate(problem, low, group, facts).time_ms
        flops = 2 * problem.len_q**2 * (128 + 128) * problem.num_heads
        exact = Capability(
            name="exact",
            backend="x",
            features=everything,
            is_fused=True,
            efficiency=0.9 * flops / (1e-3 * low_ms) / facts.rates.flops_of(FP32),
        )
        stats = TensorStats(
            method_errors=make_errors({64: (0.001, 0.9, 0.9, 0.9)}, names=("low", ""))
        )
        policy = Policy(error_budget=BUDGET, ranks=(64,))
        decision = decide(problem, stats, facts, policy, (exact, low), variants=before)
        assert decision.exact_cost is not None
        assert decision.plan.is_exact is not mixed
        if mixed:
            assert decision.cost is not None
            saved = 1 - decision.cost.time_ms / decision.exact_cost.time_ms
            assert 0 < saved < MARGIN
        else:
            (entry,) = [e for e in decision.trace if e.candidate.startswith("low/")]
            assert entry.reason.startswith("faster for some heads, but too little is gained: ")

    @pytest.mark.parametrize("variants", [(), (DENSE,) * 4, (LOW,) * 4, (SPARSE,) * 4])
    def test_what_was_asked_for_by_name_is_not_held_back_by_the_past(
        self, executors: Executors, variants: tuple[Variant, ...]
    ) -> None:
        """An error within the budget was refused to heads that were exact before."""
        alone = tuple(item for item in executors if item.name == "low_rank")
        decision = self.decided(alone, (0.9 * BUDGET,) * 4, variants, forced=True)
        assert [group.method.kind for group in decision.plan.groups] == [Method.LOW_RANK]

    def test_without_an_exact_way_a_head_over_budget_is_an_error(
        self, executors: Executors
    ) -> None:
        alone = tuple(item for item in executors if item.name == "low_rank")
        errors = (0.9 * BUDGET, 0.9 * BUDGET, 1.1 * BUDGET, 0.0)
        with pytest.raises(PlanError, match="head 2 has no approximation within its error budget"):
            self.decided(alone, errors, (LOW,) * 4, forced=True)

    def test_costs_of_the_plan_and_of_the_exact_path_are_told(self, executors: Executors) -> None:
        decision = self.decided(executors, (0.1 * BUDGET,) * 4, ())
        assert decision.cost is not None and decision.exact_cost is not None
        assert decision.cost.workspace_bytes == decision.workspace_bytes
        assert decision.cost.flops < decision.exact_cost.flops
        exact = self.decided(executors, (0.9,) * 4, ())
        assert exact.cost == exact.exact_cost == decision.exact_cost

    def test_a_plan_by_name_has_no_exact_cost(self, executors: Executors) -> None:
        alone = tuple(item for item in executors if item.name == "low_rank")
        decision = self.decided(alone, (0.1 * BUDGET,) * 4, (), forced=True)
        assert decision.cost is not None and decision.exact_cost is None
        assert decision.to_dict()["exact_cost"] is None
        assert decision.to_dict()["cost"]["flops"] == decision.cost.flops

    @pytest.mark.parametrize(
        ("errors", "expected"),
        [((0.001, 0.009, 0.9, 0.9), 0.009), ((0.9,) * 4, 0.9), ((0.001,) * 4, 0.001)],
    )
    def test_the_error_told_of_a_candidate_is_that_of_the_heads_it_serves(
        self, executors: Executors, errors: tuple[float, ...], expected: float
    ) -> None:
        decision = self.decided(executors, errors, ())
        entries = {entry.candidate: entry for entry in decision.trace}
        assert entries["low_rank/fp32 rank=16,16"].error_estimate == expected


class TestGroups:
    """From candidates to groups of heads."""

    def test_one_candidate_for_all_is_a_group_without_heads(self) -> None:
        only = candidate(DENSE, 1.0, num_heads=3)
        assert group_heads([only] * 3) == (only.group,)

    def test_each_candidate_in_use_has_its_heads(self) -> None:
        dense = candidate(DENSE, 1.0, num_heads=4)
        low = candidate(LOW, 1.0, (0.0,) * 4)
        groups = group_heads([dense, low, dense, low])
        assert [(group.method.kind, group.heads) for group in groups] == [
            (Method.EXACT, (0, 2)),
            (Method.LOW_RANK, (1, 3)),
        ]
