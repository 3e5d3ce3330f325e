"""Approximations under an error budget: taken where they hold it, refused where they do not."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from adaattn import (
    AttentionProblem,
    BlockSparse,
    Decision,
    HeadGroup,
    Launch,
    LowRank,
    Method,
    Plan,
    Policy,
    Precision,
    Scheme,
    plan_attention,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import registry
from adaattn.backends.interface import Result, Tensors
from adaattn.errors import UnsupportedError
from adaattn.testing import assert_matches, assert_within_budget, fake_facts, head_errors

BALANCED = Policy(name="tenth of a percent", error_budget=0.001)
DIM = 64
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def invented_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for one invented machine, whatever the test runs on."""
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)


def exactly(tensors: Heads, **settings: object) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(item.double() for item in tensors), **settings)


def low_rank_heads(length: int = 2048, heads: int = 2, rank: int = 8) -> Heads:
    """Return q, k and v of a rank that the low-rank executor keeps whole."""

    def one() -> torch.Tensor:
        return torch.randn(1, heads, length, rank) @ torch.randn(1, heads, rank, DIM) / rank**0.5

    return one(), one(), one()


def full_rank_heads(length: int = 2048, heads: int = 2) -> Heads:
    return tuple(torch.randn(1, heads, length, DIM) for _ in range(3))


def local_heads(length: int = 4096, heads: int = 2, sharpness: float = 4.0) -> Heads:
    """Return heads that look at a neighbourhood: positions as angles of many frequencies."""
    angles = torch.arange(length)[:, None] * torch.arange(1, DIM // 2 + 1) * 2 * torch.pi / length
    places = torch.cat([angles.cos(), angles.sin()], -1).expand(1, heads, length, DIM)
    query, key, value = full_rank_heads(length, heads)
    return sharpness**0.5 * places + 0.1 * query, sharpness**0.5 * places + 0.1 * key, value


def sink_heads(length: int = 4096, heads: int = 2) -> Heads:
    """Return heads that look at the first token, and a little at everything."""
    query, key, value = full_rank_heads(length, heads)
    query, key = 0.1 * query, 0.1 * key
    query[..., 0] = 8.0
    key[..., 0, 0] = 20.0
    return query, key, value


def topic_heads(length: int = 4096, heads: int = 2) -> Heads:
    """Return heads that look at tokens of their own topic; topics change every 100 tokens."""
    centres = 1.6 * torch.randn(1, heads, 16, DIM)
    topics = centres[:, :, torch.arange(length) // 100 % 16]
    query, key, value = full_rank_heads(length, heads)
    return topics + 0.5 * query, topics + 0.5 * key, value


KINDS = (low_rank_heads, full_rank_heads, local_heads, sink_heads, topic_heads)


def methods_of(decision: Decision) -> set[Method]:
    return {group.method.kind for group in decision.plan.groups}


def reasons_of(decision: Decision, candidate: str) -> list[str]:
    return [entry.reason for entry in decision.trace if entry.candidate.startswith(candidate)]


class TestLowRank:
    """Low rank under a policy."""

    @pytest.mark.parametrize("policy", ["balanced", "speed", BALANCED], ids=str)
    def test_it_is_taken_where_the_rank_is_low_and_keeps_the_budget(self, policy: str) -> None:
        tensors = low_rank_heads()
        output, aux = attend(*tensors, policy=policy, return_aux=True)
        assert methods_of(aux.decision) == {Method.LOW_RANK}
        budget = aux.decision.plan.error_budget
        assert_within_budget(output, exactly(tensors), budget)
        assert aux.error_estimate.amax() <= budget
        assert aux.decision.notes == ()

    def test_full_rank_is_refused_with_what_its_spectrum_predicts(self) -> None:
        tensors = full_rank_heads()
        decision = plan_attention(*tensors, policy="speed")
        assert decision.plan.is_exact
        refusals = reasons_of(decision, "low_rank/")
        assert refusals
        assert all("heads are expected to need rank" in reason for reason in refusals)

    def test_a_budget_of_zero_is_the_exact_path_bit_for_bit(self) -> None:
        tensors = low_rank_heads()
        exact = F.scaled_dot_product_attention(*tensors)
        for policy in (Policy(error_budget=0.0), "quality", None):
            assert torch.equal(attend(*tensors, policy=policy), exact)

    def test_the_error_does_not_grow_with_the_rank(self) -> None:
        spectrum = 0.8 ** torch.arange(DIM)
        tensors = tuple(item * spectrum for item in full_rank_heads(length=256))
        exact = exactly(tensors)
        last = torch.full((1, 2), float("inf"), dtype=torch.float64)
        for rank in (4, 8, 16, 32, 48, 64):
            group = HeadGroup(capability="low_rank", method=LowRank(rank=rank, value_rank=rank))
            output = attend(*tensors, plan=Plan(groups=(group,), num_heads=2))
            errors = head_errors(output, exact)
            assert (errors <= last).all()
            last = errors
        assert_matches(output, exact, F.scaled_dot_product_attention(*tensors), summands=256 + DIM)


def with_a_needle(tensors: Heads) -> Heads:
    """Give one key a direction of its own that every query looks for."""
    query, key, value = (item.clone() for item in tensors)
    direction = torch.randn(DIM)
    query += direction / direction.norm()
    key[:, :, 77] += 30 * direction / direction.norm()
    return query, key, value


def with_an_outlier_column(tensors: Heads) -> Heads:
    """Let one column of q be huge and the same column of k tiny."""
    query, key, value = (item.clone() for item in tensors)
    query[..., 5] *= 1e4
    key[..., 5] *= 1e-4
    return query, key, value


def with_a_huge_value(tensors: Heads) -> Heads:
    """Let one token's value outweigh all others."""
    query, key, value = (item.clone() for item in tensors)
    value[:, :, 1000] *= 1e4
    return query, key, value


def with_opposite_halves(tensors: Heads) -> Heads:
    """Let the second half of the queries look for the opposite of the first."""
    query, key, value = (item.clone() for item in tensors)
    query[:, :, query.shape[2] // 2 :] *= -1
    return query, key, value


def with_equal_tokens(tensors: Heads) -> Heads:
    """Let every token be the same one."""
    return tuple(item[:, :, :1].expand_as(item) for item in tensors)


def with_cancelling_values(tensors: Heads) -> Heads:
    """Let values nearly cancel, so that little is left for an error to be measured against."""
    query, key, value = (item.clone() for item in tensors)
    value[:, :, 1::2] = -value[:, :, ::2]
    return 0.01 * query, key, value


def with_a_rank_between_candidates(tensors: Heads) -> Heads:
    """Let the rank be one more than the smallest that is tried."""
    more = low_rank_heads(rank=9)
    return tuple(item[:, :, : tensors[0].shape[2]] for item in more)


def with_zeros(tensors: Heads) -> Heads:
    """Let one head be zero, whose relative error has no denominator."""
    query, key, value = (item.clone() for item in tensors)
    value[:, 1] = 0
    return query, key, value


def with_sharp_scores(tensors: Heads) -> Heads:
    """Let each row see little more than one key."""
    query, key, value = tensors
    return 30 * query, key, value


ADVERSARIES: tuple[Callable[[Heads], Heads], ...] = (
    with_a_needle,
    with_an_outlier_column,
    with_a_huge_value,
    with_opposite_halves,
    with_equal_tokens,
    with_cancelling_values,
    with_a_rank_between_candidates,
    with_zeros,
    with_sharp_scores,
)


ATTACKS = [(kind, adversary) for kind in KINDS for adversary in ADVERSARIES]


@pytest.mark.parametrize(("heads", "adversary"), ATTACKS)
def test_the_budget_holds_on_inputs_made_to_break_it(
    heads: Callable[..., Heads], adversary: Callable[[Heads], Heads]
) -> None:
    tensors = adversary(heads(length=2048))
    exact = exactly(tensors)
    output = attend(*tensors, policy="balanced")
    rounding = head_errors(F.scaled_dot_product_attention(*tensors), exact).amax().item()
    assert_within_budget(output, exact, max(0.01, 2 * rounding))
    for method in (Method.LOW_RANK, Method.BLOCK_SPARSE):
        name = method.name.lower()
        try:
            output, aux = attend(*tensors, policy="balanced", backend=name, return_aux=True)
        except UnsupportedError as error:
            refusals = [
                reason for reason in error.reasons if reason.startswith((f"{name}/", "audit"))
            ]
            assert refusals
            assert all(
                "at most 0.01, got" in r or "over budget" in r or "0.01 allowed" in r
                for r in refusals
            )
        else:
            assert methods_of(aux.decision) == {method}
            assert_within_budget(output, exact, max(0.01, 2 * rounding))


GIVEN = {
    # group, budget in a gap of the errors, attacks that it must survive and must not
    "bf16": (HeadGroup(capability="sdpa.flash", scheme=Scheme.of(Precision.BF16)), 0.025, 38, 7),
    "fp16": (HeadGroup(capability="sdpa.flash", scheme=Scheme.of(Precision.FP16)), 0.01, 40, 5),
    "low rank": (
        HeadGroup(capability="low_rank", method=LowRank(rank=8, value_rank=8)),
        0.01,
        11,
        34,
    ),
    "block sparse": (
        HeadGroup(capability="block_sparse", method=BlockSparse(block_size=64, kept_mass=0.9)),
        0.01,
        30,
        10,
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_given_approximation_runs_on_every_attack_and_is_never_wrong_in_silence(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Only 18 of 45 attacks once got an approximate plan, so most of them attacked nothing.

    A given plan runs whatever planning thinks of it. Over its budget it is repaired or
    refused by the audit. Of 64 audited rows, 1 draw in 100 misses what bf16 loses in sharp
    heads, which is in few rows; of 256, none in 200.
    """
    group, budget, num_within, num_beyond = GIVEN[name]
    plan = Plan(groups=(group,), num_heads=2, error_budget=budget, audit_rows=256)
    ran: list[HeadGroup] = []
    honest = registry.load(group.capability)

    def noting(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        ran.append(group)
        return honest(tensors, problem, group)

    known = registry._KNOWN[group.capability]._replace(run=noting)
    monkeypatch.setitem(registry._KNOWN, group.capability, known)
    within = beyond = 0
    for heads, adversary in ATTACKS:
        torch.manual_seed(0)
        tensors = adversary(heads(length=2048))
        exact = exactly(tensors)
        ran.clear()
        unchecked = attend(*tensors, plan=replace(plan, audit_rows=0))
        assert ran == [group]
        if (head_errors(unchecked, exact) <= budget).all():
            within += 1
        else:
            beyond += 1
        try:
            output, aux = attend(*tensors, plan=plan, return_aux=True)
        except UnsupportedError as error:
            assert any("audit" in reason for reason in error.reasons)
        else:
            assert aux.error_estimate is not None
            assert aux.error_estimate.amax() <= budget
            assert_within_budget(output, exact, budget)
    assert within + beyond == len(KINDS) * len(ADVERSARIES) == 45
    assert within >= num_within
    assert beyond >= num_beyond


@pytest.mark.parametrize("seed", range(8))
def test_a_needle_that_no_scored_row_looks_for_is_kept(seed: int) -> None:
    """One key that a few rows look for, and none of those that selection scores, was lost.

    Up to 9 % of a head was wrong at a kept mass of 99 %, in so few rows that the audit, which
    samples 16 or 32, missed it in 25 of 30 draws.
    """
    torch.manual_seed(seed)
    tensors = with_a_needle(topic_heads(length=2048))
    group = HeadGroup(capability="block_sparse", method=BlockSparse(block_size=64, kept_mass=0.99))
    output = attend(*tensors, plan=Plan(groups=(group,), num_heads=2))
    assert_within_budget(output, exactly(tensors), 0.01)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", KINDS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
def test_the_budget_holds_on_random_inputs(
    heads: Callable[..., Heads], seed: int, is_causal: bool
) -> None:
    """Block selection once left out the last rows of blocks, and audits most of the blocks.

    Local and topic heads then lost three times what they were allowed, unseen.
    """
    torch.manual_seed(seed)
    tensors = heads(length=2048)
    output, aux = attend(*tensors, is_causal=is_causal, policy="balanced", return_aux=True)
    assert_within_budget(output, exactly(tensors, is_causal=is_causal), 0.01)
    assert aux.error_estimate.amax() <= 0.01


class TestBlockSparse:
    """Block sparsity under a policy, on heads with planted peaks."""

    @pytest.mark.parametrize("heads", [local_heads, sink_heads])
    @pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
    def test_it_is_taken_at_long_sequences_and_keeps_the_budget(
        self, heads: Callable[..., Heads], is_causal: bool
    ) -> None:
        tensors = heads(length=6144)
        policy = Policy(error_budget=0.01, methods=(Method.EXACT, Method.BLOCK_SPARSE))
        output, aux = attend(*tensors, is_causal=is_causal, policy=policy, return_aux=True)
        assert methods_of(aux.decision) == {Method.BLOCK_SPARSE}
        assert_within_budget(output, exactly(tensors, is_causal=is_causal), 0.01)
        assert aux.error_estimate.amax() <= 0.01

    def test_heads_without_peaks_are_refused(self) -> None:
        tensors = full_rank_heads(length=4096)
        decision = plan_attention(*tensors, policy="balanced")
        assert decision.plan.is_exact
        assert len(reasons_of(decision, "block_sparse")) == 3

    def test_the_error_does_not_grow_with_the_kept_mass(self) -> None:
        tensors = local_heads(length=1024, sharpness=2.0)
        exact = exactly(tensors)
        last = torch.full((1, 2), float("inf"), dtype=torch.float64)
        for mass in (0.5, 0.8, 0.9, 0.97, 0.99, 0.999, 1.0):
            group = HeadGroup(
                capability="block_sparse", method=BlockSparse(block_size=64, kept_mass=mass)
            )
            output = attend(*tensors, plan=Plan(groups=(group,), num_heads=2))
            errors = head_errors(output, exact)
            assert (errors <= last).all()
            last = errors
        eager = F.scaled_dot_product_attention(*tensors)
        assert_matches(output, exact, eager, summands=1024 + DIM)

    def test_a_window_and_a_corner_are_honoured(self) -> None:
        query, key, value = local_heads(length=1024)
        query = query[:, :, 512:]
        settings = {"align": "bottom_right", "window": (200, 0)}
        group = HeadGroup(
            capability="block_sparse", method=BlockSparse(block_size=64, kept_mass=0.99)
        )
        output = attend(query, key, value, **settings, plan=Plan(groups=(group,), num_heads=2))
        exact = attend(query.double(), key.double(), value.double(), **settings)
        assert head_errors(output, exact).amax() < 0.01


class TestMixedPlans:
    """A plan that differs by head is each head's own computation."""

    @pytest.mark.parametrize("group_size", [1, 2])
    def test_heads_of_different_kinds_get_a_method_each(self, group_size: int) -> None:
        low, full = low_rank_heads(heads=2), full_rank_heads(heads=2)
        query, key, value = (
            torch.cat([one[:, :1], other, one[:, 1:]], dim=1)
            for one, other in zip(low, full, strict=True)
        )
        query = query.repeat_interleave(group_size, dim=1)
        settings = {"enable_gqa": group_size > 1}
        output, aux = attend(query, key, value, policy="balanced", return_aux=True, **settings)
        plan = aux.decision.plan
        assert {Method.EXACT, Method.LOW_RANK} == methods_of(aux.decision)
        num_heads = query.shape[1]
        exact = F.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), **settings
        )
        assert_within_budget(output, exact, 0.01)
        for group in plan.groups:
            outer = {head for head in group.heads if head in (0, num_heads - 1)}
            assert bool(outer) == (group.method.kind is Method.LOW_RANK)
            rows = list(group.heads)
            columns = sorted({head // group_size for head in rows})
            alone = attend(
                query[:, rows],
                key[:, columns],
                value[:, columns],
                plan=Plan(groups=(replace(group, heads=()),), num_heads=len(rows)),
                **settings,
            )
            wide = replace(group, heads=(), scheme=Scheme.of(Precision.FP64))
            exact_alone = attend(
                query[:, rows].double(),
                key[:, columns].double(),
                value[:, columns].double(),
                plan=Plan(groups=(wide,), num_heads=len(rows)),
                **settings,
            )
            assert_matches(output[:, rows], exact_alone, alone, summands=2048 + DIM)

    def test_heads_that_share_a_key_head_may_part(self) -> None:
        query, key, value = torch.randn(1, 4, 40, 16), *torch.randn(2, 1, 2, 40, 16)
        plan = Plan(
            groups=(
                HeadGroup(capability="sdpa.math", heads=(3, 0)),
                HeadGroup(capability="chunked", heads=(1, 2), launch=Launch(chunk_rows=7)),
            ),
            num_heads=4,
        )
        output = attend(query, key, value, enable_gqa=True, plan=plan)
        for head in range(4):
            name = "sdpa.math" if head in (0, 3) else "chunked"
            pair = (item[:, head // 2 : head // 2 + 1] for item in (key, value))
            tensors = (query[:, head : head + 1], *pair)
            alone = attend(*tensors, backend=name)
            assert_matches(output[:, head : head + 1], exactly(tensors), alone, summands=56)
