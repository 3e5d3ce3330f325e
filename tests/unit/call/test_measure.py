"""Statistics of sampled rows: the numbers they claim, and how near they are to the truth."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn import (
    HeadGroup,
    Method,
    Policy,
    Precision,
    Scheme,
    plan_attention,
)
from adaattn._dtypes import torch_dtype
from adaattn.backends import Tensors, capabilities, execute
from adaattn.backends.block_sparse.executor import KEPT_MASSES
from adaattn.backends.low_rank.ranks import methods
from adaattn.backends.sampling import Sampled
from adaattn.call.measure import audit, check_finite, measure, sample_rows
from adaattn.spec import AttentionProblem, MaskKind, Plan, TensorStats
from adaattn.testing import attention, head_errors, make_problem, make_tensors

ROWS = 32
LOW_RANK, BLOCK_SPARSE = Method.LOW_RANK, Method.BLOCK_SPARSE
EVERYTHING = (
    (LOW_RANK, Precision.FP64),
    (BLOCK_SPARSE, Precision.FP64),
    (Method.EXACT, Precision.BF16),
)

PROBLEMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "grouped heads": {"num_kv_heads": 2},
    "odd length": {"len_q": 333, "len_k": 333, "is_causal": True},
    "a batch": {"batch": 2, "num_heads": 2},
}


def draw(seed: int = 0, **options: Any) -> tuple[Tensors, AttentionProblem]:
    values = {"num_heads": 4, "len_q": 512, "head_dim": 32, "precision": Precision.FP64} | options
    problem = make_problem(**values)
    return make_tensors(problem, seed=seed), problem


def wide(numbers: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def measured(tensors: Tensors, problem: AttentionProblem) -> tuple[TensorStats, Sampled]:
    stats = measure(tensors, problem, EVERYTHING, ROWS, allowed=capabilities())
    return stats, sample_rows(tensors, problem, ROWS, seed=0)


def variants(stats: TensorStats) -> list[tuple[HeadGroup, tuple[float, ...]]]:
    """Return every approximation that was measured, with its estimated error of each head."""
    names = {LOW_RANK: "low_rank", BLOCK_SPARSE: "block_sparse"}
    own = Scheme.of(Precision.FP64)
    found = [
        (HeadGroup(capability=names[item.method.kind], method=item.method, scheme=own), item.errors)
        for item in stats.method_errors
    ]
    assert found
    return found


def roundings(problem: AttentionProblem) -> float:
    """Return how far two orders of summing may be apart in fp64, norms of rows included."""
    return torch.finfo(torch.float64).eps * (problem.len_k + problem.head_dim) ** 1.5


def run(group: HeadGroup, tensors: Tensors, problem: AttentionProblem) -> torch.Tensor:
    plan = Plan(groups=(group,), num_heads=problem.num_heads)
    return execute(tensors, problem, plan).output


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_estimate_is_the_executors_own_error_on_the_sampled_rows(name: str) -> None:
    """In fp64 nothing but the order of sums may differ, so the bound is a rounding per summand."""
    tensors, problem = draw(**PROBLEMS[name])
    stats, sample = measured(tensors, problem)
    rounding = roundings(problem)
    groups = variants(stats)
    assert len(groups) == len(methods(problem, Policy())) + len(KEPT_MASSES)
    for group, estimated in groups:
        actual = audit(run(group, tensors, problem), sample).amax(0)
        assert (actual - wide(estimated)).abs().amax() < rounding, group.label


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PROBLEMS)
def test_an_estimate_is_near_the_true_error(name: str, seed: int) -> None:
    """The rows are drawn at random, so their mean obeys the sampling error of the population.

    With d and e the squared error and size of each row and r^2 = sum d / sum e, the sampled
    sum of d - r^2 e has mean 0 and standard deviation sqrt(n) * std(d - r^2 e). Rows that
    block selection scores are never sampled, and left out here. Six deviations are allowed.
    """
    tensors, problem = draw(seed=seed, **PROBLEMS[name])
    tensors = replace(tensors, query=4 * tensors.query)
    stats, sample = measured(tensors, problem)
    rounding = roundings(problem)
    exact = attention(tensors, problem).output
    population = torch.arange(problem.len_q) % 16 != 0
    for group, estimated in variants(stats):
        output = run(group, tensors, problem)
        error = (output - exact).square().sum(-1)[:, :, population]
        size = exact.square().sum(-1)[:, :, population]
        share = error.sum(-1) / size.sum(-1)
        deviation = (error - share[..., None] * size).std(-1) * len(sample.rows) ** 0.5
        sampled = size.mean(-1) * len(sample.rows)
        allowed = 6 * deviation / sampled
        found = audit(output, sample).square()
        assert ((found - share).abs() <= allowed + rounding**2).all(), group.label
        assert wide(estimated).sub(found.amax(0).sqrt()).abs().amax() < rounding


def test_an_estimate_for_a_lower_precision_is_the_error_of_that_precision() -> None:
    """Within a factor of two of the executor's own error: it rounds in another order."""
    tensors, problem = draw(precision=Precision.FP32)
    wanted = ((Method.EXACT, Precision.BF16), (Method.EXACT, Precision.FP16))
    stats = measure(tensors, problem, wanted, ROWS, allowed=capabilities())
    exact = attention(replace(tensors, query=tensors.query.double()), problem).output
    assert [precision for precision, _ in stats.precision_errors] == [
        Precision.BF16,
        Precision.FP16,
    ]
    for precision, estimated in stats.precision_errors:
        group = HeadGroup(capability="sdpa.flash", scheme=Scheme.of(precision))
        true_errors = head_errors(run(group, tensors, problem), exact)[0]
        ratio = torch.tensor(estimated) / true_errors
        assert ratio.amax() < 2
        assert ratio.amin() > 0.5
        assert max(estimated) > torch.finfo(torch_dtype(precision)).eps / 4


class TestRows:
    """Which rows are sampled."""

    def test_equal_seeds_choose_equal_rows(self) -> None:
        tensors, problem = draw()
        first, second, other = (
            sample_rows(tensors, problem, ROWS, seed=seed).index for seed in (5, 5, 6)
        )
        assert torch.equal(first, second)
        assert not torch.equal(first, other)

    @pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 100, 129, 512, 1000])
    def test_they_are_in_range_distinct_and_spread(self, length: int) -> None:
        tensors, problem = draw(len_q=length, len_k=length)
        rows = sample_rows(tensors, problem, ROWS, seed=0).rows
        assert len(set(rows)) == len(rows) <= ROWS
        assert all(0 <= row < length for row in rows)
        quarters = {4 * row // length for row in rows}
        assert len(quarters) == min(4, length) or length < 256

    def test_the_last_rows_of_a_length_that_no_block_divides_are_sampled_too(self) -> None:
        """Blocks once ended at the last whole one, and up to 63 rows were never looked at."""
        tensors, problem = draw(len_q=127, len_k=127)
        rows = sample_rows(tensors, problem, ROWS, seed=0).index
        assert (rows >= 64).any()

    def test_they_are_none_of_those_that_block_selection_scores(self) -> None:
        tensors, problem = draw()
        rows = sample_rows(tensors, problem, ROWS, seed=0).index
        assert (rows % 16 != 0).all()


class TestNumbers:
    """The other numbers of the statistics."""

    def test_the_exact_rows_are_exact(self) -> None:
        tensors, problem = draw(is_causal=True, mask=MaskKind.ADDITIVE)
        _, sample = measured(tensors, problem)
        exact = attention(tensors, problem).output
        assert audit(exact, sample).amax() < roundings(problem)

    def test_entropies_are_those_of_the_sampled_rows(self) -> None:
        tensors, problem = draw(is_causal=True)
        stats, sample = measured(tensors, problem)
        scores = problem.scale * tensors.query @ tensors.key.mT
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        bits = torch.special.entr(weights).sum(-1) / torch.log(torch.tensor(2.0).double())
        expected = bits[:, :, sample.rows].mean((0, 2))
        assert (wide(stats.entropy_bits) - expected).abs().amax() < roundings(problem)

    def test_more_mass_keeps_more_blocks_and_loses_less(self) -> None:
        tensors, problem = draw()
        tensors = replace(tensors, query=4 * tensors.query)
        stats, _ = measured(tensors, problem)
        found = [item for item in stats.method_errors if item.method.kind is BLOCK_SPARSE]
        assert [item.method.kept_mass for item in found] == list(KEPT_MASSES)
        for head in range(problem.num_heads):
            kept = [item.densities[head] for item in found]
            lost = [item.errors[head] for item in found]
            assert 0 < kept[0] <= kept[1] <= kept[2] <= 1
            assert lost[0] >= lost[1] >= lost[2]

    def test_only_what_is_wanted_is_measured(self) -> None:
        tensors, problem = draw()
        stats = measure(
            tensors, problem, ((LOW_RANK, Precision.FP64),), ROWS, allowed=capabilities()
        )
        assert tuple(item.method for item in stats.method_errors) == methods(problem, Policy())
        assert stats.precision_errors == ()

    def test_the_worst_of_a_batch_counts(self) -> None:
        tensors, problem = draw(batch=2)
        one = Tensors.of(tensors.query[:1], tensors.key[:1], tensors.value[:1])
        two = Tensors.of(tensors.query[1:], tensors.key[1:], tensors.value[1:])
        both, _ = measured(tensors, problem)
        alone = [measured(part, replace(problem, batch=1))[0] for part in (one, two)]
        for index, (group, errors) in enumerate(variants(both)):
            worst = torch.stack([wide(variants(stats)[index][1]) for stats in alone]).amax(0)
            assert (wide(errors) - worst).abs().amax() < roundings(problem), group.label

    def test_the_largest_magnitude_is_found_in_any_tensor(self) -> None:
        for position in range(3):
            tensors, _ = draw()
            items = [tensors.query, tensors.key, tensors.value]
            items[position][0, 1, 2, 3] = -1234.5
            assert check_finite(tensors) == 1234.5

    def test_empty_tensors_have_no_magnitude(self) -> None:
        tensors, _ = draw(len_q=0, len_k=0)
        assert check_finite(tensors) == 0.0

    def test_nothing_is_recorded_for_gradients(self) -> None:
        tensors, problem = draw(requires_grad=True)
        _, sample = measured(tensors, problem)
        assert not sample.exact.requires_grad


def test_the_decision_rests_on_the_measured_numbers() -> None:
    tensors, _ = draw()
    decision = plan_attention(
        tensors.query,
        tensors.key,
        tensors.value,
        policy=Policy(error_budget=0.99),
        backend="low_rank",
    )
    stats = measure(tensors, draw()[1], EVERYTHING, Policy().audit_rows, allowed=capabilities())
    largest = {
        item.method.label: max(item.errors)
        for item in stats.method_errors
        if item.method.kind is LOW_RANK
    }
    assert largest
    estimates = {
        entry.candidate.split(" ")[-1]: entry.error_estimate
        for entry in decision.trace
        if entry.error_estimate is not None and "fp64" in entry.candidate
    }
    assert estimates
    for shape, estimate in estimates.items():
        assert estimate == pytest.approx(largest[shape], rel=1e-12)
