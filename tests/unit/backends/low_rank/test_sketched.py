"""Low rank by sketches: its errors, when the planner takes it, and what it says where not."""

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn import AttentionEvent, HeadGroup, Policy, Precision, Scheme, plan_attention
from adaattn import scaled_dot_product_attention as attend
from adaattn._dtypes import torch_dtype
from adaattn.backends import Tensors, capabilities, capability_named, load
from adaattn.backends.low_rank.sketched import sketch
from adaattn.call import adapt, measure
from adaattn.errors import UnsupportedError
from adaattn.planning import measuring_cost_ms, reasons, worth_measuring
from adaattn.planning.cost import estimate
from adaattn.spec import AttentionProblem, LowRank, MaskKind, Method, TensorStats
from adaattn.testing import (
    assert_matches,
    assert_within_budget,
    attention,
    cast_tensors,
    fake_facts,
    make_problem,
    make_tensors,
    with_tensors,
)

NAME = "low_rank.sketch"
RANK, PLANTED, NOISE, BUDGET = 64, 48, 0.01, 0.02
POLICY = Policy(name="two percent", error_budget=BUDGET)
BF16, FP32, FP64 = Precision.BF16, Precision.FP32, Precision.FP64


def planted(shape: tuple[int, ...], rank: int = PLANTED, noise: float = NOISE) -> torch.Tensor:
    """Return fp64 numbers of variance 1 and some rank, with noise of a share of that."""
    *lead, tokens, dim = shape
    left = torch.randn(*lead, tokens, rank, dtype=torch.float64)
    right = torch.randn(*lead, rank, dim, dtype=torch.float64)
    return left @ right / math.sqrt(rank) + noise * torch.randn(shape, dtype=torch.float64)


def draw(noise: float = NOISE, **options: Any) -> tuple[Tensors, AttentionProblem]:
    """Return a problem with keys and values of rank 48."""
    values = {"num_heads": 2, "len_q": 256, "head_dim": 512, "precision": FP32} | options
    problem = make_problem(**values)
    tensors, dtype = make_tensors(problem), torch_dtype(problem.precision)
    key = planted(tuple(tensors.key.shape), noise=noise).to(dtype)
    value = planted(tuple(tensors.value.shape), noise=noise).to(dtype)
    return with_tensors(tensors, key=key, value=value), problem


def run(tensors: Tensors, problem: AttentionProblem, *ranks: int) -> torch.Tensor:
    rank, value_rank = ranks or (RANK, RANK)
    method = LowRank(rank=rank, value_rank=value_rank)
    group = HeadGroup(capability=NAME, method=method, scheme=Scheme.of(problem.precision))
    return load(NAME)(tensors, problem, group).output


def exactly(tensors: Tensors, problem: AttentionProblem) -> torch.Tensor:
    return attention(cast_tensors(tensors, torch.float64), problem).output


@pytest.mark.parametrize("precision", [FP64, FP32, BF16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"num_heads": 4, "num_kv_heads": 2},
        {"batch": 2, "num_heads": 1},
        {"value_dim": 320},
        {"mask": MaskKind.BOOLEAN},
        {"mask": MaskKind.ADDITIVE},
        {"head_dim": 1024, "num_heads": 1},
        {"len_q": 100, "len_k": 333},
    ],
    ids=str,
)
def test_planted_keys_and_values_stay_within_the_budget(
    options: dict[str, Any], precision: Precision
) -> None:
    tensors, problem = draw(**options, precision=precision)
    assert_within_budget(run(tensors, problem), exactly(tensors, problem), BUDGET)


@pytest.mark.parametrize("ranks", [(0, 0), (512, 512), (600, 0)], ids=str)
def test_all_columns_are_exact_attention(ranks: tuple[int, int]) -> None:
    tensors, problem = draw()
    exact, eager = exactly(tensors, problem), attention(tensors, problem).output
    assert_matches(run(tensors, problem, *ranks), exact, eager, summands=512 + 256)


@pytest.mark.parametrize("ranks", [(RANK, 0), (0, RANK), (RANK, 96)], ids=str)
def test_either_side_may_keep_other_columns(ranks: tuple[int, int]) -> None:
    tensors, problem = draw()
    assert_within_budget(run(tensors, problem, *ranks), exactly(tensors, problem), BUDGET)


def test_errors_do_not_grow_with_the_rank() -> None:
    tensors, problem = draw()
    exact = exactly(tensors, problem)
    errors = [
        float((run(tensors, problem, rank, rank) - exact).norm()) for rank in (16, 32, 64, 256)
    ]
    assert errors == sorted(errors, reverse=True)


def test_query_heads_of_a_group_share_the_basis_of_their_key_head() -> None:
    tensors, _ = draw(num_heads=4, num_kv_heads=2)
    found = sketch(tensors, LowRank(rank=RANK, value_rank=RANK))
    shapes = [tuple(item.shape) for item in (found.query, found.key, found.value)]
    assert shapes == [(1, 4, 256, RANK), (1, 2, 256, RANK), (1, 2, 256, RANK)]


class TestCapability:
    """What it serves, and for which ranks."""

    @pytest.mark.parametrize(
        ("options", "ranks"),
        [
            ({"head_dim": 512}, (64, 128)),
            ({"head_dim": 1024}, (64, 128, 256)),
            ({"head_dim": 4096, "value_dim": 320}, (64,)),
        ],
        ids=str,
    )
    def test_ranks_are_those_of_fused_kernels_up_to_a_quarter(
        self, options: dict[str, Any], ranks: tuple[int, ...]
    ) -> None:
        found = capability_named(NAME).methods_for(make_problem(**options), Policy())
        assert found == tuple(LowRank(rank=rank, value_rank=rank) for rank in ranks)

    def test_a_policy_names_its_own(self) -> None:
        found = capability_named(NAME).methods_for(
            make_problem(head_dim=512), Policy(ranks=(600, 96, 32))
        )
        assert [method.rank for method in found] == [32, 96]

    @pytest.mark.parametrize(
        ("options", "own", "other"),
        [
            ({"head_dim": 256}, "it is for head dimensions above 256, got D 256, Dv 256", ""),
            ({"head_dim": 512, "value_dim": 64}, "above 256, got D 512, Dv 64", ""),
            ({"head_dim": 512, "requires_grad": True}, "it does not support gradients", ""),
            ({"head_dim": 512}, "", "low_rank.sketch serves head dimensions above 256"),
        ],
        ids=str,
    )
    def test_one_of_the_two_low_ranks_serves_a_problem(
        self, options: dict[str, Any], own: str, other: str
    ) -> None:
        problem = make_problem(**options)
        for name, expected in ((NAME, own), ("low_rank", other)):
            found = "; ".join(reasons(capability_named(name), problem, fake_facts("cpu")))
            assert expected in found and bool(expected) is bool(found)

    @pytest.mark.parametrize("machine", ["cpu", "h200"])
    def test_costs_grow_with_heads_ranks_and_tokens(self, machine: str) -> None:
        facts, capability = fake_facts(machine), capability_named(NAME)

        def cost_ms(rank: int = 128, **options: Any) -> float:
            values = {"num_heads": 8, "len_q": 4096, "head_dim": 1024, "precision": BF16} | options
            problem = make_problem(**values, device_type=facts.device_type)
            method = LowRank(rank=rank, value_rank=rank)
            group = HeadGroup(capability=NAME, method=method, scheme=Scheme.of(BF16))
            return estimate(problem, capability, group, facts).time_ms

        assert cost_ms() < min(cost_ms(256), cost_ms(num_heads=32), cost_ms(len_q=16384))

    @pytest.mark.parametrize(
        ("heads", "tokens", "measured_ms"), [(8, 4096, 0.55), (32, 4096, 1.6), (8, 16384, 2.5)]
    )
    def test_the_model_is_near_what_an_h200_took(
        self, heads: int, tokens: int, measured_ms: float
    ) -> None:
        """Within a third, which is less than any gain that is looked for."""
        problem = make_problem(
            num_heads=heads, len_q=tokens, head_dim=1024, precision=BF16, device_type="cuda"
        )
        method = LowRank(rank=128, value_rank=128)
        group = HeadGroup(capability=NAME, method=method, scheme=Scheme.of(BF16))
        found = estimate(problem, capability_named(NAME), group, fake_facts("h200")).time_ms
        assert measured_ms / 1.33 < found < 1.33 * measured_ms

    def test_it_is_worth_measuring_on_a_gpu_that_may_not_wait(self) -> None:
        problem = make_problem(
            num_heads=32,
            len_q=4096,
            head_dim=1024,
            precision=BF16,
            device_type="cuda",
            may_wait=False,
        )
        facts = fake_facts("h200")
        wanted = worth_measuring(problem, facts, POLICY, capabilities())
        assert (Method.LOW_RANK, BF16) in wanted
        cost_ms = measuring_cost_ms(problem, facts, POLICY, (capability_named(NAME),), wanted)
        assert 0 < cost_ms < 84  # one batch of eigenproblems


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test see a machine of known rates."""
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)


def call_of(key_rank: int, noise: float = NOISE) -> list[torch.Tensor]:
    """Return q, k and v of two heads, 2048 tokens and D 512."""
    shape = (1, 2, 2048, 512)
    kv = [planted(shape, key_rank, noise).float() for _ in range(2)]
    return [torch.randn(shape), *kv]


@pytest.mark.usefixtures("machine")
class TestPlanner:
    """Taken under a budget where k and v have few directions, and else refused by measurement."""

    def test_planted_keys_and_values_are_taken_within_the_budget(
        self, events: list[AttentionEvent]
    ) -> None:
        tensors = call_of(PLANTED)
        output = attend(*tensors, policy=POLICY)
        (group,) = events[0].decision.plan.groups
        assert (group.capability, group.method) == (NAME, LowRank(rank=RANK, value_rank=RANK))
        assert_within_budget(output, attend(*(item.double() for item in tensors)), BUDGET)

    def test_full_rank_is_refused_with_what_was_measured(
        self, events: list[AttentionEvent]
    ) -> None:
        tensors = [torch.randn(1, 2, 2048, 512) for _ in range(3)]
        output = attend(*tensors, policy=POLICY)
        assert events[0].decision.plan.is_exact
        assert torch.equal(output, attend(*tensors))
        said = {
            entry.candidate: entry.reason
            for entry in events[0].decision.trace
            if entry.candidate.startswith(f"{NAME}/fp32 rank")
        }
        assert list(said) == [f"{NAME}/fp32 rank={rank},{rank}" for rank in (64, 128)]
        expected = "expected an error of at most 0.02, got 0."
        assert all(reason.startswith(expected) for reason in said.values())

    @pytest.mark.parametrize("policy", [None, "quality"])
    def test_it_is_never_taken_without_a_budget(
        self, policy: str | None, events: list[AttentionEvent]
    ) -> None:
        tensors = call_of(PLANTED)
        keywords = {} if policy is None else {"policy": policy}
        attend(*tensors, **keywords)
        assert plan_attention(*tensors, **keywords).plan.is_exact
        assert events[0].decision.plan.is_exact

    def test_by_name_it_is_taken_or_the_call_refused(self) -> None:
        tensors = call_of(PLANTED)
        assert not plan_attention(*tensors, policy=POLICY, backend="low_rank").plan.is_exact
        full = [torch.randn(1, 2, 2048, 512) for _ in range(3)]
        with pytest.raises(UnsupportedError, match=r"rank=128,128: expected an error of at most"):
            attend(*full, policy=POLICY, backend=NAME)


class Here:
    """Numbers that have arrived, without a GPU that sends them."""

    def __init__(self, rows: torch.Tensor, read: Callable[[list[list[float]]], Any]) -> None:
        self.rows, self.read = rows.double(), read

    @classmethod
    def of(cls, rows: torch.Tensor, read: Callable[[list[list[float]]], Any]) -> "Here":
        """Return the numbers."""
        return cls(rows, read)

    def is_here(self) -> bool:
        """Return that they are."""
        return True

    def value(self) -> Any:
        """Return what they mean."""
        return self.read(self.rows.tolist())


class TestLater:
    """Errors that nobody waits for."""

    def test_they_are_those_that_are_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "Arriving", Here)
        tensors, problem = draw()
        wanted = ((Method.LOW_RANK, FP32), (Method.EXACT, BF16))
        allowed = (capability_named(NAME),)
        later = measure.measure_later(tensors, problem, wanted, POLICY, allowed=allowed).value()
        now = measure.measure(
            tensors, problem, wanted, POLICY.audit_rows, policy=POLICY, allowed=allowed
        )
        assert isinstance(later, TensorStats)
        assert later.method_errors == now.method_errors and len(now.method_errors) == 2
        assert later.precision_errors == now.precision_errors
        assert later.entropy_bits == now.entropy_bits

    def test_what_arrives_keeps_no_tensor_of_the_call(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "Arriving", Here)
        tensors, problem = draw()
        wanted, allowed = ((Method.LOW_RANK, FP32),), (capability_named(NAME),)
        later = measure.measure_later(tensors, problem, wanted, POLICY, allowed=allowed)
        held = [weakref.ref(item) for item in (tensors.query, tensors.key, tensors.value)]
        del tensors
        assert [item() for item in held] == [None] * 3
        assert later.value().sampled_rows > 0

    @pytest.mark.usefixtures("machine")
    def test_a_call_that_may_not_wait_is_exact_until_they_arrive_and_then_sketched(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        monkeypatch.setattr(measure, "Arriving", Here)
        honest = adapt._measured

        def later(call: Any, *rest: Any, **options: Any) -> Any:
            part = replace(call, problem=replace(call.problem, may_wait=False))
            return honest(part, *rest, **options)

        monkeypatch.setattr(adapt, "_measured", later)
        tensors = call_of(PLANTED)
        for _ in range(2):
            output = attend(*tensors, policy=POLICY)
        names = [event.decision.plan.groups[0].capability for event in events]
        assert names[0] != NAME and names[1] == NAME
        assert_within_budget(output, attend(*(item.double() for item in tensors)), BUDGET)
