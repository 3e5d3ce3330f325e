"""Heads of planted ranks: told apart, served by low rank within their error, and no others."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn import hardware, record_events
from adaattn.attention.adaptive_rank import AdaptiveRankAttention
from adaattn.attention.dense import DenseAttention
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.planning.assignment import ENTER_ERROR
from adaattn.spec import Method
from adaattn.testing import assert_within_budget

EMBED, HEADS, LENGTH = 256, 4, 2048
BUDGET = 0.02


def heads_of(module: AdaptiveRankAttention, x: torch.Tensor) -> torch.Tensor:
    """Return the attention output of each head [B, H, L, D], before the output projection."""
    found: list[torch.Tensor] = []
    run = module.runner.run

    def spy(*tensors: torch.Tensor, **arguments: Any) -> Any:
        result = run(*tensors, **arguments)
        found.append(result[0])
        return result

    module.runner.run = spy  # type: ignore[method-assign]
    try:
        module(x)
    finally:
        del module.runner.run
    return found[0]


def dense_twin(module: AdaptiveRankAttention) -> DenseAttention:
    """Return exact attention with the module's numbers, in fp64."""
    twin = DenseAttention(EMBED, HEADS, dtype=torch.float64)
    twin.load_state_dict(module.state_dict())
    return twin


@pytest.fixture
def planted(pretend: Callable[[str], Any], plant: Callable[..., None]) -> AdaptiveRankAttention:
    """Heads 0 and 1 of rank 6, heads 2 and 3 of full rank."""
    pretend("cpu")
    module = AdaptiveRankAttention(EMBED, HEADS, error_budget=BUDGET, measure_every=3)
    plant(module, (0, 1), rank=6)
    return module


class TestPlantedHeads:
    """Two heads of rank 6 beside two of full rank."""

    def test_only_heads_of_low_rank_are_served_by_it_and_the_statistics_say_so(
        self, planted: AdaptiveRankAttention
    ) -> None:
        planted(torch.randn(1, LENGTH, EMBED))
        statistics = planted.get_statistics()
        assert statistics["share_by_method"] == {"low_rank": 0.5, "exact": 0.5}
        assert statistics["heads_by_rank"] == {"8": 2}
        heads = statistics["per_head"]
        ranks = [heads[f"attention head {head}"]["last_rank"] for head in range(HEADS)]
        assert ranks == [8, 8, 0, 0]
        found = [heads[f"attention head {h}"]["mean_effective_rank"] for h in range(HEADS)]
        assert all(1 < rank <= 6 for rank in found[:2])
        assert all(rank > 0.8 * EMBED / HEADS for rank in found[2:])

    def test_each_head_is_within_the_budget_and_the_audit_found_it_so(
        self, planted: AdaptiveRankAttention
    ) -> None:
        x = torch.randn(1, LENGTH, EMBED)
        exact = heads_of(dense_twin(planted), x.double())
        assert_within_budget(heads_of(planted, x), exact, BUDGET)
        statistics = planted.get_statistics()
        assert 0 < statistics["max_audited_error"] <= BUDGET
        assert 0 < statistics["max_estimated_error"] <= BUDGET
        assert statistics["step_downs"] == statistics["repaired_heads"] == 0

    def test_one_measurement_serves_the_next_calls(self, planted: AdaptiveRankAttention) -> None:
        x = torch.randn(1, LENGTH, EMBED)
        for _ in range(4):
            planted(x)
        statistics = planted.get_statistics()
        assert statistics["calls"] == 4
        assert statistics["measured_calls"] == 2
        assert statistics["share_by_method"] == {"low_rank": 0.5, "exact": 0.5}
        assert statistics["switches"] == 0

    def test_arithmetic_is_saved_by_the_cost_model(self, planted: AdaptiveRankAttention) -> None:
        with torch.no_grad():  # in training backward takes all columns
            planted(torch.randn(1, LENGTH, EMBED))
        statistics = planted.get_statistics()
        assert statistics["flops_saved"] / (statistics["flops_saved"] + statistics["flops"]) > 0.25

    def test_a_head_that_was_of_low_rank_goes_back_to_dense_when_it_is_no_longer(
        self, planted: AdaptiveRankAttention
    ) -> None:
        """Between two measurements the audit sees it first: the call is repaired, then learnt."""
        x = torch.randn(1, LENGTH, EMBED)
        planted(x)
        with torch.no_grad():
            planted.in_proj_weight[:64] = torch.randn(64, EMBED) / EMBED**0.5
            planted.in_proj_weight[EMBED : EMBED + 64] = torch.randn(64, EMBED) / EMBED**0.5
        exact = heads_of(dense_twin(planted), x.double())
        assert_within_budget(heads_of(planted, x), exact, BUDGET)
        assert planted.get_statistics()["repaired_heads"] == 1
        planted.reset_statistics()
        planted(x)
        after = planted.get_statistics()
        assert after["share_by_method"] == {"low_rank": 0.25, "exact": 0.75}
        assert after["repaired_heads"] == 0

    def test_a_causal_call_and_a_masked_one_are_within_the_budget_too(
        self, planted: AdaptiveRankAttention
    ) -> None:
        x = torch.randn(1, LENGTH, EMBED)
        twin = dense_twin(planted)
        padding = torch.zeros(1, LENGTH, dtype=torch.bool)
        padding[:, -100:] = True
        for settings in ({"is_causal": True}, {"key_padding_mask": padding}):
            output, _ = planted(x, **settings)
            exact, _ = twin(x.double(), **settings)
            # The output projection mixes heads, whose errors are within the budget each.
            error = (output - exact).norm() / exact.norm()
            assert error <= HEADS * BUDGET
        assert planted.get_statistics()["share_by_method"]["low_rank"] > 0


class TestRefusals:
    """Where low rank must not run, and what is said of it."""

    def test_random_weights_of_full_rank_stay_dense_with_the_rank_that_they_would_need(
        self, pretend: Callable[[str], Any]
    ) -> None:
        pretend("cpu")
        module = AdaptiveRankAttention(EMBED, HEADS, error_budget=BUDGET)
        events: list[Any] = []
        with record_events(events.append):
            module(torch.randn(1, LENGTH, EMBED))
        assert module.get_statistics()["share_by_method"] == {"exact": 1.0}
        said = [
            entry.reason
            for entry in events[0].decision.trace
            if entry.candidate.startswith("low_rank/")
        ]
        assert said
        assert all("heads are expected to need rank" in reason for reason in said)

    def test_short_sequences_are_dense_because_nothing_is_gained(
        self, planted: AdaptiveRankAttention
    ) -> None:
        planted(torch.randn(1, 128, EMBED))
        assert planted.get_statistics()["share_by_method"] == {"exact": 1.0}
        assert planted.get_statistics()["measured_calls"] == 0

    def test_a_budget_of_zero_is_dense_bit_for_bit(self, plant: Callable[..., None]) -> None:
        module = AdaptiveRankAttention(EMBED, HEADS, error_budget=0.0)
        plant(module, range(HEADS), rank=6)
        twin = DenseAttention(EMBED, HEADS)
        twin.load_state_dict(module.state_dict())
        x = torch.randn(1, LENGTH, EMBED)
        assert torch.equal(module(x)[0], twin(x)[0])

    def test_dropout_in_training_is_exact(self, planted: AdaptiveRankAttention) -> None:
        planted.dropout = 0.1
        planted.train()(torch.randn(1, 512, EMBED))
        assert planted.get_statistics()["share_by_method"] == {"exact": 1.0}

    def test_weights_come_from_an_exact_executor(self, planted: AdaptiveRankAttention) -> None:
        _, weights = planted(torch.randn(1, 512, EMBED), need_weights=True)
        assert tuple(weights.shape) == (1, 512, 512)
        assert planted.get_statistics()["share_by_method"] == {"exact": 1.0}

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"ranks": (8, 64)}, ArgumentError, "ranks below the head dimension 64"),
            ({"ranks": (65,)}, ArgumentError, "ranks below the head dimension 64"),
            ({"ranks": (0,)}, ArgumentError, "ranks: expected integers of at least 1"),
            ({"ranks": (2.5,)}, ArgumentTypeError, "ranks: expected a tuple of integers"),
            ({"error_budget": 1.0}, ArgumentError, r"error_budget: .* in \[0, 1\)"),
            ({"error_budget": -0.1}, ArgumentError, r"error_budget: .* in \[0, 1\)"),
            ({"measure_every": 0}, ArgumentError, "measure_every: expected an integer"),
            ({"momentum": 1.0}, ArgumentError, r"momentum: expected a number in \[0, 1\)"),
            ({"rank": 8}, ArgumentTypeError, "keyword arguments"),
            ({"ranks": 8}, ArgumentTypeError, "ranks: expected None or a tuple of integers"),
        ],
    )
    def test_settings_that_make_no_sense_are_refused(
        self, settings: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            AdaptiveRankAttention(EMBED, HEADS, **settings)

    def test_input_that_is_not_finite_is_computed_exactly_and_the_statistics_say_so(
        self, planted: AdaptiveRankAttention
    ) -> None:
        """As nn.MultiheadAttention does: a training loop skips such a step itself."""
        x = torch.randn(2, LENGTH, EMBED)
        x[0, 3, 3] = torch.nan
        output, _ = planted(x)
        twin = DenseAttention(EMBED, HEADS)
        twin.load_state_dict(planted.state_dict())
        assert output[0].isnan().all() and output[1].isfinite().all()
        assert torch.equal(output[1], twin(x)[0][1])
        statistics = planted.get_statistics()
        assert statistics["share_by_method"] == {"exact": 1.0}
        (reason,) = statistics["fallback_reasons"]
        assert reason.startswith("the input was not finite")


def test_flat_and_peaked_heads_are_told_apart_by_their_entropies(
    pretend: Callable[[str], Any], plant: Callable[..., None]
) -> None:
    """Scores ten times as large concentrate a head; its entropy is in the statistics."""
    pretend("cpu")
    module = AdaptiveRankAttention(EMBED, HEADS, error_budget=BUDGET)
    plant(module, range(HEADS), rank=6)
    with torch.no_grad():
        module.in_proj_weight[: EMBED // 2] *= 0.1
        module.in_proj_weight[EMBED // 2 : EMBED] *= 10
    module(torch.randn(1, LENGTH, EMBED))
    heads = module.get_statistics()["per_head"]
    bits = [heads[f"attention head {head}"]["mean_entropy_bits"] for head in range(HEADS)]
    uniform = torch.tensor(float(LENGTH)).log2()
    assert min(bits[:2]) > 0.99 * uniform
    assert max(bits[2:]) < 0.5 * uniform


@pytest.mark.parametrize(("before", "stays"), [(8, "low_rank"), (60, "exact")])
def test_hysteresis_keeps_a_head_in_its_way_while_its_error_is_near_the_budget(
    pretend: Callable[[str], Any], plant: Callable[..., None], before: int, stays: str
) -> None:
    """An error between 80 % and 100 % of the budget, measured afresh at each call.

    The head that was of low rank stays so; the same head with the same weights stays dense if
    it was dense. Without hysteresis both would be of low rank.
    """
    pretend("cpu")
    settings = {"measure_every": 1, "momentum": 0.0, "ranks": (8,)}
    probe = AdaptiveRankAttention(64, 1, error_budget=0.5, **settings)
    plant(probe, [0], rank=8, noise=0.02)
    near = copy.deepcopy(probe.state_dict())
    x = torch.randn(1, 2 * LENGTH, 64)
    probe(x)
    error = probe.get_statistics()["max_estimated_error"]
    assert 0.001 < error < 0.4

    budget = 2 * error / (1 + ENTER_ERROR)
    module = AdaptiveRankAttention(64, 1, error_budget=budget, **settings)
    plant(module, [0], rank=before)
    module(x)
    assert module.get_statistics()["share_by_method"] == {stays: 1.0}
    module.load_state_dict(near)
    for _ in range(3):
        module(x)
    statistics = module.get_statistics()
    assert statistics["share_by_method"] == {stays: 1.0}
    assert statistics["switches"] == 0
    assert statistics["measured_calls"] == 4


def test_low_rank_saves_more_than_a_quarter_of_the_memory_of_the_manual_path(
    planted: AdaptiveRankAttention, plant: Callable[..., None]
) -> None:
    """Measured on this process, every head of low rank, against scores written out."""
    plant(planted, range(HEADS), rank=6)
    x = torch.randn(1, LENGTH, EMBED)

    def manual() -> torch.Tensor:
        packed = x @ planted.in_proj_weight.mT + planted.in_proj_bias
        q, k, v = (
            item.unflatten(-1, (HEADS, -1)).transpose(1, 2) for item in packed.chunk(3, dim=-1)
        )
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        return planted.out_proj((weights @ v).transpose(1, 2).flatten(-2))

    with torch.no_grad():
        planted(x)
        with hardware.peak_memory("cpu") as ours:
            output, _ = planted(x)
        with hardware.peak_memory("cpu") as theirs:
            written_out = manual()
    assert (output - written_out).norm() <= HEADS * BUDGET * written_out.norm()
    assert planted.get_statistics()["share_by_method"] == {"low_rank": 1.0}
    if ours.added_bytes is None or theirs.added_bytes is None:
        pytest.fail("this system does not tell the memory of a process")
    assert ours.added_bytes <= 0.75 * theirs.added_bytes


def test_every_decision_names_low_rank_once_for_each_rank(planted: AdaptiveRankAttention) -> None:
    events: list[Any] = []
    with record_events(events.append):
        planted(torch.randn(1, LENGTH, EMBED))
    names = [entry.candidate for entry in events[0].decision.trace]
    assert [name for name in names if name.startswith("low_rank/")] == [
        f"low_rank/fp32 rank={rank},{rank}" for rank in (8, 16, 32)
    ]
    groups = {group.heads: group.method.kind for group in events[0].decision.plan.groups}
    assert groups == {(0, 1): Method.LOW_RANK, (2, 3): Method.EXACT}
