"""A lossy plan on a GPU: audited without waiting, and what that found is told later."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaattn import HeadGroup, LowRank, Plan
from adaattn.call import audit
from adaattn.call.arguments import Arguments
from adaattn.call.audit import AUDIT_EVERY, FALLBACKS
from adaattn.call.describe import Call, build_call
from adaattn.call.given import Given


@dataclass(eq=False)
class Late:
    """Numbers on their way, which arrive when the test says so."""

    found: tuple[float, ...]
    has_arrived: bool = False

    def is_here(self) -> bool:
        return self.has_arrived

    def value(self) -> tuple[float, ...]:
        return self.found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """What audits have sent so far."""
    found: list[Late] = []

    class Sender:
        @staticmethod
        def of(rows: torch.Tensor, read: Any) -> Late:
            found.append(Late(read(rows.tolist())))
            return found[-1]

    monkeypatch.setattr(audit, "Arriving", Sender)
    return found


def on_gpu() -> Call:
    """Return a call whose host may not wait; head 1 has a rank that low rank loses."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 96, 32)
    key[:, 0, :, 4:] = 0  # head 0 has rank 4
    value[:, 0, :, 4:] = 0
    call = build_call(query, key, value, Arguments())
    return replace(call, problem=replace(call.problem, may_wait=False))


def plan(**settings: Any) -> Plan:
    group = HeadGroup(capability="low_rank", method=LowRank(rank=8, value_rank=8))
    return Plan(groups=(group,), num_heads=2, error_budget=0.01, audit_rows=32, **settings)


def test_the_first_call_and_every_16th_are_audited(sent: list[Late]) -> None:
    given, call = Given(plan()), on_gpu()
    for _ in range(2 * AUDIT_EVERY):
        given.run(call)
    assert len(sent) == 2
    assert sent[0].found[0] < 0.01 < sent[0].found[1]


def test_what_an_audit_found_is_met_by_a_later_call_and_the_plan_followed_all_the_same(
    sent: list[Late], caplog: pytest.LogCaptureFixture
) -> None:
    given, call, before = Given(plan()), on_gpu(), FALLBACKS["audit"]
    outcomes = [given.run(call), given.run(call)]
    sent[0].has_arrived = True
    outcomes += [given.run(call), given.run(call)]
    assert [outcome.earlier_errors for outcome in outcomes] == [(), (), sent[0].found, ()]
    assert [outcome.earlier_over for outcome in outcomes] == [(), (), (1,), ()]
    assert FALLBACKS["audit"] == before + 1
    assert "heads 1 were over their budget" in caplog.text
    plans = {outcome.decision.plan for outcome in outcomes if outcome.decision is not None}
    assert plans == {plan()}


def test_a_recomputed_forward_pass_is_not_audited(sent: list[Late]) -> None:
    given, call = Given(plan()), on_gpu()
    query = call.tensors.query.clone().requires_grad_()

    def forward(query: torch.Tensor) -> torch.Tensor:
        return given.run(replace(call, tensors=replace(call.tensors, query=query))).result.output

    checkpoint(forward, query, use_reentrant=False).sum().backward()
    assert query.grad is not None
    assert len(sent) == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nothing_is_audited_under_vmap(sent: list[Late]) -> None:
    given, call = Given(plan()), on_gpu()

    def forward(query: torch.Tensor) -> torch.Tensor:
        return given.run(replace(call, tensors=replace(call.tensors, query=query))).result.output

    stacked = torch.stack([call.tensors.query] * 2)
    assert torch.vmap(forward)(stacked).shape == (2, *call.tensors.query.shape)
    assert not sent


def test_a_plan_without_audit_rows_is_followed_as_it_is(sent: list[Late]) -> None:
    given, call = Given(replace(plan(), audit_rows=0)), on_gpu()
    decision = given.run(call).decision
    assert decision is not None and not decision.plan.is_exact
    assert not sent
