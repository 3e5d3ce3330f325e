from adaattn._events import AttentionEvent
from adaattn.evaluation.ledger import Ledger
from adaattn.spec import (
    AttentionProblem,
    Decision,
    HeadGroup,
    LowRank,
    Plan,
    Precision,
    Scheme,
    TraceEntry,
)

PROBLEM = AttentionProblem(
    batch=1, num_heads=3, num_kv_heads=3, len_q=8, len_k=8, head_dim=4, value_dim=4
)


def event(tag: str, errors: tuple[float, ...] = (), reason: str = "error 0.2 above 0.1") -> object:
    groups = (
        HeadGroup(capability="sdpa.flash", heads=(0, 2)),
        HeadGroup(capability="low_rank", heads=(1,), method=LowRank(rank=8)),
    )
    trace = (
        TraceEntry(candidate="sdpa.flash/fp32", accepted=True, reason="taken"),
        TraceEntry(candidate="sdpa.math/fp32", accepted=False, reason="slower"),
        TraceEntry(candidate="sdpa.flash/bf16", accepted=False, reason="error 0.3 above 0.1"),
        TraceEntry(candidate="low_rank/fp32 rank=4", accepted=False, reason=reason),
    )
    return AttentionEvent(
        problem=PROBLEM,
        decision=Decision(plan=Plan(groups=groups, num_heads=3), trace=trace, policy="p"),
        workspace_bytes=100,
        fallbacks=("one",),
        head_errors=errors,
        tag=tag,
    )


def test_shares_count_heads_and_approximations() -> None:
    ledger = Ledger()
    for layer in range(2):
        ledger.add(event(f"layer{layer}"))
    told = ledger.summary()
    assert told.calls == 2
    assert told.methods == (("sdpa.flash/fp32", 2 / 3), ("low_rank/fp32 rank=8", 1 / 3))
    assert told.approximated == 1 / 3
    assert told.fallbacks == 2
    assert told.workspace_bytes == 100


def test_a_lower_precision_counts_as_an_approximation() -> None:
    plan = Plan(
        groups=(HeadGroup(capability="sdpa", scheme=Scheme.of(Precision.BF16)),), num_heads=3
    )
    ledger = Ledger()
    ledger.add(AttentionEvent(problem=PROBLEM, decision=Decision(plan=plan), workspace_bytes=0))
    assert ledger.summary().approximated == 1.0


def test_the_mean_error_counts_exact_heads_as_nothing() -> None:
    ledger = Ledger()
    ledger.add(event("layer0", errors=(0.0, 0.3, 0.0)))
    ledger.add(event("layer1"))
    told = ledger.summary()
    assert told.mean_error == 0.3 / 6
    assert told.max_error == 0.3


def test_layers_stand_in_order_and_only_the_first_window_is_kept() -> None:
    ledger = Ledger()
    for tag in ("layer10", "layer2", "layer10"):
        ledger.add(event(tag))
    told = ledger.summary()
    assert len(told.chosen) == len(told.decisions) == 2
    assert told.chosen[0] == ("sdpa.flash/fp32", "low_rank/fp32 rank=8", "sdpa.flash/fp32")


def test_refusals_that_differ_in_their_numbers_are_counted_together() -> None:
    ledger = Ledger()
    ledger.add(event("layer0", reason="error 0.2 above 0.1"))
    ledger.add(event("layer1", reason="error 1.5e-1 above 0.1"))
    ledger.add(event("layer2", reason="nothing was measured"))
    refusals = ledger.summary().refusals
    assert [(r.candidate, r.calls) for r in refusals] == [
        ("sdpa.flash/bf16", 3),
        ("low_rank/fp32 rank=4", 2),
        ("low_rank/fp32 rank=4", 1),
    ]
    assert refusals[1].reason == "error 0.2 above 0.1"


def test_an_empty_ledger_sums_to_nothing() -> None:
    told = Ledger().summary()
    assert (told.calls, told.methods, told.refusals) == (0, (), ())
