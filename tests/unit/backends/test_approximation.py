"""An executor that approximates is its own file too: parameters, cost, errors, and what it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import adaattn
from adaattn import hardware
from adaattn.backends import Result, Tensors, register
from adaattn.backends.common import grouped_product
from adaattn.backends.reference import attention
from adaattn.backends.sampling import Estimate, Sampled, row_weights
from adaattn.errors import ArgumentError, UnsupportedError
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Feature,
    HardwareFacts,
    HeadGroup,
    HeadMethod,
    LowRank,
    Method,
    Overhead,
    Policy,
    Precision,
    TensorStats,
)

RANKS = (4, 8, 16)
BUDGET = 0.01


def cut(tensors: Tensors, rank: int) -> Tensors:
    """Return q and k with their first columns alone."""
    return replace(
        tensors,
        query=tensors.query[..., :rank],
        kv=replace(tensors.kv, key=tensors.key[..., :rank]),
    )


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    assert isinstance(group.method, LowRank)
    part = replace(problem, head_dim=group.method.rank)
    return attention(cut(tensors, group.method.rank), part)


def methods(problem: AttentionProblem, policy: Policy) -> tuple[HeadMethod, ...]:
    return tuple(LowRank(rank=rank) for rank in RANKS if rank < problem.head_dim)


def overhead(
    problem: AttentionProblem, group: HeadGroup, hardware: HardwareFacts, density: float
) -> Overhead:
    return Overhead(flops=7.0, workspace_bytes=1000, seconds=1e-6)


def sample(
    sampled: Sampled, found: Sequence[HeadMethod], stats: TensorStats, budgets: tuple[float, ...]
) -> tuple[TensorStats, list[Estimate]]:
    estimates = []
    for method in found:
        assert isinstance(method, LowRank)
        weights = row_weights(cut(sampled.tensors, method.rank), sampled.problem, sampled.index)
        output = grouped_product(weights, sampled.tensors.value.to(weights.dtype))
        estimates.append(Estimate(method=method, errors=sampled.errors(output)))
    return stats, estimates


FIRST = Capability(
    name="first_columns",
    backend="first_columns",
    method=Method.LOW_RANK,
    features=Feature.CAUSAL_TOP_LEFT,
    methods=methods,
    overhead=overhead,
    sampling_cost=3,
)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    """Register the executor for one test."""
    remove = register([FIRST], run, None, sample)
    yield
    remove()
    hardware.clear_cache()


def draw(rank: int) -> list[torch.Tensor]:
    """Return q, k and v, whose q and k have ``rank`` columns that count."""
    tensors = [torch.randn(1, 2, 512, 32) for _ in range(3)]
    for item in tensors[:2]:
        item[..., rank:] = 0.0
    return tensors


@pytest.mark.parametrize("rank", RANKS)
def test_its_own_estimates_choose_its_parameters(rank: int) -> None:
    tensors = draw(rank)
    policy = Policy(error_budget=BUDGET)
    decision = adaattn.plan_attention(*tensors, policy=policy, backend="first_columns")
    assert [group.method for group in decision.plan.groups] == [LowRank(rank=rank)]
    output = adaattn.scaled_dot_product_attention(*tensors, policy=policy, backend="first_columns")
    exact = torch.nn.functional.scaled_dot_product_attention(*[it.double() for it in tensors])
    assert (output - exact).norm() <= BUDGET * exact.norm()


def test_what_its_estimates_forbid_is_not_run() -> None:
    policy = Policy(error_budget=BUDGET)
    with pytest.raises(UnsupportedError) as caught:
        adaattn.scaled_dot_product_attention(*draw(32), policy=policy, backend="first_columns")
    text = str(caught.value)
    assert all(f"first_columns/fp32 rank={rank}: expected an error of" in text for rank in RANKS)


def test_the_estimates_of_another_executor_of_its_method_are_not_its_own() -> None:
    """Turned columns: a projection finds their rank, the first columns do not hold it."""
    turn, _ = torch.linalg.qr(torch.randn(32, 32))
    query, key, value = draw(4)
    value[..., 4:] = 0.0
    tensors = [query @ turn, key @ turn, value]
    policy = Policy(error_budget=BUDGET)
    decision = adaattn.plan_attention(*tensors, policy=policy, backend="low_rank")
    assert decision.plan.groups[0].capability == "low_rank"
    with pytest.raises(UnsupportedError):
        adaattn.plan_attention(*tensors, policy=policy, backend="first_columns")


def test_its_costs_are_in_the_trace() -> None:
    decision = adaattn.plan_attention(
        *draw(4), backend="first_columns", policy=Policy(error_budget=BUDGET)
    )
    costs = {entry.candidate: entry.cost for entry in decision.trace}
    for rank in RANKS:
        cost = costs[f"first_columns/fp32 rank={rank}"]
        assert cost is not None
        assert cost.flops == 2 * 512 * 512 * (rank + 32) * 2 + 7
        assert cost.workspace_bytes == 4 * 2 * 512 + 1000


def test_executors_that_share_estimates_are_measured_once() -> None:
    calls = []

    def counted(
        sampled: Sampled,
        found: Sequence[HeadMethod],
        stats: TensorStats,
        budgets: tuple[float, ...],
    ) -> tuple[TensorStats, list[Estimate]]:
        calls.append(found)
        return sample(sampled, found, stats, budgets)

    twins = [replace(FIRST, name=name, backend="twins") for name in ("twin.one", "twin.two")]
    remove = register(twins, run, None, counted)
    try:
        policy = Policy(error_budget=BUDGET)
        decision = adaattn.plan_attention(*draw(4), policy=policy, backend="twins")
    finally:
        remove()
    assert len(calls) == 1
    estimates = {
        entry.candidate: entry.error_estimate
        for entry in decision.trace
        if entry.candidate.endswith("fp32 rank=4")
    }
    assert estimates.keys() == {"twin.one/fp32 rank=4", "twin.two/fp32 rank=4"}
    assert estimates["twin.one/fp32 rank=4"] == estimates["twin.two/fp32 rank=4"]


def test_executors_that_share_estimates_keep_their_own_parameters() -> None:
    """The first one's parameters were tried for all once, and the others were never measured."""
    parts = [
        replace(
            FIRST,
            name=f"rank.{rank}",
            backend="parts",
            methods=lambda problem, policy, rank=rank: (LowRank(rank=rank),),
        )
        for rank in (4, 8)
    ]
    remove = register(parts, run, None, sample)
    try:
        policy = Policy(error_budget=BUDGET)
        decision = adaattn.plan_attention(*draw(8), policy=policy, backend="parts")
    finally:
        remove()
    named = {(group.capability, group.method) for group in decision.plan.groups}
    assert named == {("rank.8", LowRank(rank=8))}
    errors = {entry.candidate: entry.error_estimate for entry in decision.trace}
    assert errors["rank.4/fp32 rank=4"] is not None
    assert "rank.4/fp32 rank=8" not in errors


@pytest.mark.parametrize(
    "changes", [{"device_types": ("cuda",)}, {"precisions": (Precision.FP16,)}], ids=str
)
def test_an_executor_that_cannot_serve_is_not_sampled(changes: dict[str, Any]) -> None:
    """Its method alone decided once, and what its sampler raised reached the caller."""

    def fails(*given: object) -> tuple[TensorStats, list[Estimate]]:
        raise RuntimeError("it has no tensors of this kind")

    other = replace(FIRST, name="elsewhere", **changes)
    remove = register([other], run, None, fails)
    try:
        tensors = [torch.randn(1, 2, 4096, 128) for _ in range(3)]
        policy = Policy(error_budget=BUDGET, methods=(Method.EXACT, Method.LOW_RANK))
        decision = adaattn.plan_attention(*tensors, policy=policy)
    finally:
        remove()
    measured = {
        entry.executor for entry in decision.trace if "expected an error" in entry.reason
    } | {entry.executor for entry in decision.trace if "predicted error" in entry.reason}
    assert measured  # some approximation was looked at


@pytest.mark.parametrize("missing", ["estimates", "parameters"])
def test_an_approximation_without_estimates_or_parameters_is_refused(missing: str) -> None:
    item = replace(FIRST, name="half made")
    if missing == "parameters":
        item = replace(item, methods=None)
    with pytest.raises(ArgumentError, match="half made, which approximates: expected `methods`"):
        register([item], run, None, sample if missing == "parameters" else None)
