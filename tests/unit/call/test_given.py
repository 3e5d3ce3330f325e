"""A lossy plan on a GPU: audited without waiting, and mended for the calls that follow."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from adaattn import HeadGroup, LowRank, Plan
from adaattn.call import audit
from adaattn.call.arguments import Arguments
from adaattn.call.audit import AUDIT_EVERY, FALLBACKS
from adaattn.call.describe import Call, build_call
from adaattn.call.given import Given
from adaattn.spec import Method
from adaattn.testing import assert_matches


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


def test_heads_over_the_budget_are_exact_once_the_verdict_is_here(sent: list[Late]) -> None:
    given, call, before = Given(plan()), on_gpu(), FALLBACKS["audit"]
    outcomes = [given.run(call), given.run(call)]
    sent[0].has_arrived = True
    outcomes += [given.run(call), given.run(call)]
    assert [outcome.worst_errors for outcome in outcomes] == [(), (), sent[0].found, ()]
    assert FALLBACKS["audit"] == before + 1
    decision = outcomes[2].decision
    assert decision is not None
    assert any("exact from now on" in note for note in decision.notes)
    kinds = {head: group.method.kind for group in decision.plan.groups for head in group.heads}
    assert kinds == {0: Method.LOW_RANK, 1: Method.EXACT}
    tensors = [item[:, 1] for item in (call.tensors.query, call.tensors.key, call.tensors.value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    exact, eager = attend(*[item.double() for item in tensors]), attend(*tensors)
    assert_matches(outcomes[2].result.output[:, 1], exact, eager, summands=96)


def test_where_no_head_keeps_the_budget_nothing_is_audited_any_more(sent: list[Late]) -> None:
    given, call = Given(plan()), on_gpu()
    given.run(call)
    sent[0].found, sent[0].has_arrived = (0.5, float("nan")), True
    decision = given.run(call).decision
    assert decision is not None and decision.plan.is_exact
    for _ in range(2 * AUDIT_EVERY):
        given.run(call)
    assert len(sent) == 1


def test_a_plan_without_audit_rows_is_followed_as_it_is(sent: list[Late]) -> None:
    given, call = Given(replace(plan(), audit_rows=0)), on_gpu()
    decision = given.run(call).decision
    assert decision is not None and not decision.plan.is_exact
    assert not sent
