"""The audit: sampled exact rows against what an approximation returned."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn import AttentionEvent, AttentionProblem, HeadGroup, Policy
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import registry
from adaattn.backends.interface import Result, Tensors
from adaattn.call.measure import measure, sample_rows
from adaattn.call.run import FALLBACKS
from adaattn.errors import UnsupportedError
from adaattn.testing import assert_matches, assert_within_budget, fake_facts, head_errors

LOSSY = Policy(name="lossy", error_budget=0.05)


def draw_low_rank(length: int = 2048, heads: int = 4, dim: int = 64) -> list[torch.Tensor]:
    """Return q, k and v of rank 8: the low-rank executor loses nothing but rounding."""
    return [torch.randn(1, heads, length, 8) @ torch.randn(1, heads, 8, dim) / 8 for _ in range(3)]


def exactly(tensors: list[torch.Tensor], **settings: Any) -> torch.Tensor:
    return attend(*(item.double() for item in tensors), **settings)


def scale_heads(monkeypatch: pytest.MonkeyPatch, *factors: float) -> None:
    """Make the low-rank executor return each head multiplied by a factor."""
    honest = registry.load("low_rank")

    def scaled(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        result = honest(tensors, problem, group)
        return replace(result, output=result.output * torch.tensor(factors)[:, None, None])

    known = registry._KNOWN["low_rank"]._replace(run=scaled)
    monkeypatch.setitem(registry._KNOWN, "low_rank", known)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test see a machine on which the planner takes the low-rank executor."""
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)


def test_heads_over_budget_are_repaired_and_the_others_kept(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    events: list[AttentionEvent],
) -> None:
    tensors = draw_low_rank()
    before = FALLBACKS["audit"]
    honest = attend(*tensors, policy=LOSSY)
    assert [group.capability for group in events[0].decision.plan.groups] == ["low_rank"]
    events.clear()
    scale_heads(monkeypatch, 1.0, 1.2, 1.02, 0.5)
    with caplog.at_level(logging.INFO, logger="adaattn"):
        output, aux = attend(*tensors, policy=LOSSY, return_aux=True)
    exact, chunked = exactly(tensors), attend(*tensors, backend="chunked")
    assert_within_budget(output, exact, LOSSY.error_budget)
    assert torch.equal(output[:, 0], honest[:, 0])
    assert torch.equal(output[:, 2], honest[:, 2] * 1.02)
    for head in (1, 3):
        assert_matches(output[:, head], exact[:, head], chunked[:, head])
        assert aux.error_estimate[:, head].eq(0).all()
    sentence = "audit: heads 1, 3 had errors up to 0.5, 0.05 allowed; they were computed exactly"
    assert caplog.messages == [sentence]
    assert sentence in aux.decision.notes
    assert events[0].fallbacks == (sentence,)
    assert events[0].repaired_heads == (1, 3)
    assert FALLBACKS["audit"] == before + 1


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.2, float("nan"), float("inf")])
def test_a_result_that_is_wrong_in_every_head_is_repaired(
    monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent], factor: float
) -> None:
    tensors = draw_low_rank()
    scale_heads(monkeypatch, *[factor] * 4)
    output = attend(*tensors, policy=LOSSY)
    assert_within_budget(output, exactly(tensors), LOSSY.error_budget)
    assert events[0].repaired_heads == (0, 1, 2, 3)


def test_a_named_approximation_over_budget_is_refused(
    monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
) -> None:
    """What was asked for by name is never replaced by something else."""
    tensors = draw_low_rank()
    before = FALLBACKS.copy()
    scale_heads(monkeypatch, 1.0, 1.2, 1.02, 0.5)
    with pytest.raises(UnsupportedError, match="backend 'low_rank'") as caught:
        attend(*tensors, policy=LOSSY, backend="low_rank")
    assert caught.value.reasons == ("audit: heads 1, 3 had errors up to 0.5, 0.05 allowed",)
    assert "pass backend='auto'" in str(caught.value)
    assert events == []
    assert before == FALLBACKS


def test_audited_rows_are_others_than_those_that_planning_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An executor that is right only on the rows of the estimate is found out."""
    tensors = draw_low_rank()
    honest = registry.load("low_rank")
    measured: list[torch.Tensor] = []

    def noting(*args: Any, **settings: Any) -> Any:
        tensors, problem, _, rows = args
        measured.append(sample_rows(tensors, problem, rows, seed=0).index)
        return measure(*args, **settings)

    def right_where_measured(
        inputs: Tensors, problem: AttentionProblem, group: HeadGroup
    ) -> Result:
        result = honest(inputs, problem, group)
        output = torch.zeros_like(result.output)
        output[:, :, measured[0]] = result.output[:, :, measured[0]]
        return replace(result, output=output)

    monkeypatch.setattr("adaattn.call.adapt.measure", noting)
    known = registry._KNOWN["low_rank"]._replace(run=right_where_measured)
    monkeypatch.setitem(registry._KNOWN, "low_rank", known)
    output = attend(*tensors, policy=LOSSY)
    assert measured
    assert_within_budget(output, exactly(tensors), LOSSY.error_budget)


def test_a_repair_keeps_the_memory_budget(
    monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
) -> None:
    tensors = draw_low_rank()
    limit = 8 * sum(item.nbytes for item in tensors)
    policy = replace(LOSSY, memory_budget_bytes=limit)
    scale_heads(monkeypatch, 1.0, 1.2, 1.0, 1.0)
    chunks: list[int] = []
    chunked = registry.load("chunked")

    def noting(inputs: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        chunks.append(
            3 * 4 * problem.batch * problem.num_heads * group.launch.chunk_rows * problem.len_k
        )
        return chunked(inputs, problem, group)

    known = registry._KNOWN["chunked"]._replace(run=noting)
    monkeypatch.setitem(registry._KNOWN, "chunked", known)
    attend(*tensors, policy=policy)
    assert len(chunks) == 1
    assert 0 < chunks[0] <= limit


def test_errors_within_the_budget_are_reported_and_left(
    monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
) -> None:
    tensors = draw_low_rank()
    scale_heads(monkeypatch, 1.0, 1.01, 1.02, 1.03)
    output, aux = attend(*tensors, policy=LOSSY, backend="low_rank", return_aux=True)
    true_errors = head_errors(output, exactly(tensors)).float()
    unit = torch.finfo(torch.float32).eps * (64 + 2048)
    assert (aux.error_estimate - true_errors).abs().amax() < unit
    assert events[0].fallbacks == () and events[0].repaired_heads == ()
    assert events[0].head_errors == tuple(aux.error_estimate.amax(0).tolist())
    assert events[0].error_estimate == max(events[0].head_errors)


def test_each_head_is_held_against_its_own_budget(
    monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
) -> None:
    """The audit once allowed every head the largest budget of all."""
    policy = replace(LOSSY, head_budgets=((3, 1, 0.001), (4, 2, 0.001)))
    tensors = draw_low_rank()
    scale_heads(monkeypatch, *[1.01] * 4)
    for layer, head in ((3, 1), (4, 2)):
        _, aux = attend(*tensors, policy=policy, layer=layer, return_aux=True)
        repaired = aux.error_estimate.amax(0).eq(0).nonzero().flatten().tolist()
        assert repaired == [head]
        assert events[-1].layer == layer and events[-1].repaired_heads == (head,)


def test_gradients_flow_through_repaired_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_heads(monkeypatch, 1.0, 2.0, 1.0, 1.0)
    tensors = [item.requires_grad_() for item in draw_low_rank()]
    output = attend(*tensors, policy=LOSSY)
    gradients = torch.autograd.grad(output[:, 1].sum(), tensors)
    wide = [item.detach().double().requires_grad_() for item in tensors]
    exact = torch.autograd.grad(attend(*wide)[:, 1].sum(), wide)
    eager = torch.autograd.grad(attend(*tensors, backend="chunked")[:, 1].sum(), tensors)
    for actual, reference, yardstick in zip(gradients, exact, eager, strict=True):
        assert_matches(actual, reference, yardstick, summands=2048 + 64)


def test_dropout_is_no_error(events: list[AttentionEvent]) -> None:
    """The audit once took dropped weights for a wrong result and repaired every head."""
    tensors = draw_low_rank()
    _, aux = attend(*tensors, dropout_p=0.5, policy=LOSSY, return_aux=True)
    assert events[0].fallbacks == ()
    assert aux.decision.plan.is_exact
    assert aux.error_estimate.eq(0).all()
    reasons = {
        entry.candidate.split("/")[0]: entry.reason
        for entry in aux.decision.trace
        if entry.candidate.startswith(("low_rank/", "block_sparse"))
    }
    assert reasons == {
        "low_rank": "it does not support dropout",
        "block_sparse": "dropout hides errors of this size, so they cannot be checked",
    }


def test_a_named_approximation_that_dropout_keeps_from_being_checked_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="backend 'low_rank'"):
        attend(*draw_low_rank(), dropout_p=0.5, policy=LOSSY, backend="low_rank")
