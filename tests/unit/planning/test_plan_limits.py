"""What memory, sampling and explicit requests do to a plan, and when nothing need be measured."""

from collections import Counter
from dataclasses import replace

import pytest

from adaattn.backends import capability_named
from adaattn.backends.low_rank.ranks import methods
from adaattn.errors import PlanError
from adaattn.planning import decide, worth_measuring
from adaattn.planning.trace import format_ms
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Decision,
    Feature,
    KVKind,
    Measured,
    Method,
    Policy,
    Precision,
    TensorStats,
    TimingTable,
    TraceEntry,
    Why,
)
from adaattn.testing import fake_facts, make_errors, make_problem
from adaattn.tuning.cell import cell_of

FP32, BF16, FP16 = Precision.FP32, Precision.BF16, Precision.FP16
Executors = tuple[Capability, ...]


def _problem(machine: str, **values: object) -> AttentionProblem:
    device = fake_facts(machine).device_type
    return make_problem(
        **{"num_heads": 4, "len_q": 8192, "head_dim": 64, "device_type": device, **values}
    )


def _table(problem: AttentionProblem, times_ms: dict[str, float]) -> TimingTable:
    """Return a table with one cell, that of a problem."""
    times = {name: Measured(device_ms=ms, host_ms=ms) for name, ms in times_ms.items()}
    cell = cell_of(problem, times)
    return TimingTable(source="table of a test", cells={cell.problem_class: (cell,)})


def _stats(problem: AttentionProblem, rank: tuple[float, ...]) -> TensorStats:
    """Invented numbers: the same errors at every rank."""
    errors = make_errors({method.rank: rank for method in methods(problem, Policy())})
    return TensorStats(sampled_rows=32, max_magnitude=4.0, method_errors=errors)


def _entries(decision: Decision) -> dict[str, TraceEntry]:
    """The trace by candidate, each exactly once."""
    counts = Counter(entry.candidate for entry in decision.trace)
    assert set(counts.values()) == {1}, counts
    return {entry.candidate: entry for entry in decision.trace}


def test_a_memory_budget_below_every_candidate_is_an_error_that_lists_them_all(
    executors: Executors,
) -> None:
    problem = _problem("cpu", softcap=30.0)
    with pytest.raises(PlanError, match="no executor can serve this call under policy 'tiny'") as e:
        decide(
            problem,
            None,
            fake_facts("cpu"),
            Policy(name="tiny", memory_budget_bytes=1 << 10),
            executors,
        )
    lines = dict(line.split(": ", 1) for line in e.value.trace)
    assert {item.name for item in executors} <= {name.split("/")[0] for name in lines}
    assert lines["chunked/fp32"].startswith("expected at most 1 KiB of workspace, got ")
    assert lines["sdpa.flash/fp32"] == "it does not support softcap"
    assert "raise the memory budget, or drop the feature that no executor has" in str(e.value)


def test_approximations_do_not_serve_where_nothing_exact_could_take_over() -> None:
    everything = ~Feature(0)
    exact = Capability(name="x", backend="x", features=everything, materialises_scores=True)
    low = replace(
        capability_named("low_rank"),
        name="low",
        features=everything,
        efficiency=0.5,
        num_launches=1,
    )
    policy = Policy(error_budget=0.1, memory_budget_bytes=64 << 20)
    with pytest.raises(PlanError, match="low/fp32 rank=16,16: it approximates, and no exact one"):
        decide(_problem("cpu", head_dim=128), None, fake_facts("cpu"), policy, (exact, low))


def test_a_smaller_memory_budget_takes_smaller_chunks(executors: Executors) -> None:
    problem = _problem("cpu", softcap=30.0)
    facts = fake_facts("cpu")
    rows, times = [], []
    for budget in (None, 64 << 20, 8 << 20, 1 << 20):
        policy = Policy(memory_budget_bytes=budget)
        decision = decide(problem, None, facts, policy, executors)
        (group,) = decision.plan.groups
        assert group.capability == "chunked" and decision.cost is not None
        assert budget is None or decision.workspace_bytes <= budget
        rows.append(group.launch.chunk_rows)
        times.append(decision.cost.time_ms)
    assert rows == sorted(set(rows), reverse=True)
    assert times == sorted(times)


def test_a_memory_budget_turns_the_plan_from_the_fast_to_the_small() -> None:
    everything = ~Feature(0)
    big = Capability(name="big", backend="x", features=everything, materialises_scores=True)
    big = replace(big, efficiency=1.0)
    small = Capability(name="small", backend="x", features=everything, efficiency=0.01)
    problem, facts = _problem("h200", len_q=1024), fake_facts("h200")

    def chosen(budget: int | None) -> str:
        policy = Policy(memory_budget_bytes=budget)
        return decide(problem, None, facts, policy, (big, small)).plan.groups[0].capability

    assert (chosen(None), chosen(1 << 20)) == ("big", "small")


@pytest.mark.parametrize(
    ("policy", "values", "why"),
    [
        (
            Policy(error_budget=0.05, audit_rows=0),
            {},
            "it must be checked on sampled rows, and the policy audits none",
        ),
        (
            Policy(error_budget=0.05),
            {"len_q": 127},
            "checked on 32 rows, it takes 128 at least; this call has 127",
        ),
        (
            Policy(error_budget=0.05),
            {"len_q": 128},
            "no gain by estimate: ",
        ),
    ],
)
def test_what_is_not_measured_says_why(
    executors: Executors, policy: Policy, values: dict[str, int], why: str
) -> None:
    problem = _problem("cpu", **values)
    decision = decide(problem, None, fake_facts("cpu"), policy, executors)
    reason = _entries(decision)["low_rank/fp32 rank=8,8"].reason
    assert reason.startswith(why)
    assert decision.plan.is_exact and decision.plan.audit_rows == 0


LOSING = {
    Why.SLOWER: "no gain by estimate: ",
    Why.WAITING: "it is tried when exact calls have paid",
}


@pytest.mark.parametrize("machine", ["cpu", "cpu_amx", "a100", "h200"])
@pytest.mark.parametrize("length", [128, 256, 2048, 8192, 65536])
@pytest.mark.parametrize("measured_ms", [None, 1e-3, 1e3])
def test_what_waits_and_what_brings_no_gain_have_codes_of_their_own(
    executors: Executors, machine: str, length: int, measured_ms: float | None
) -> None:
    """Both were `UNMEASURED`, and a sentence could name another time than the trace beside it."""
    facts, policy = fake_facts(machine), Policy(error_budget=0.05)
    problem = _problem(machine, len_q=length, head_dim=128, sdpa_default="sdpa.flash")
    if measured_ms is not None:
        facts = replace(facts, timings=_table(problem, {"sdpa.flash": measured_ms}))
    decision = decide(problem, None, facts, policy, executors)
    entries = _entries(decision)
    codes = {entry.why for entry in decision.trace}
    assert Why.UNMEASURED not in codes
    assert (Why.WAITING in codes) == bool(worth_measuring(problem, facts, policy, executors))
    found = 0
    for entry in decision.trace:
        if entry.cost is None or entry.accepted or " ms at its best" not in entry.reason:
            continue
        found += 1
        assert entry.reason.startswith(LOSING[entry.why])
        mine, theirs = entry.reason.split(" at its best and ")
        assert mine.endswith(format_ms(entry.time_ms))
        (rival,) = [other for other in decision.trace if f", {other.candidate} " in theirs]
        shown = theirs.split(f", {rival.candidate} ")[1]
        assert shown.startswith(format_ms(rival.cost.time_ms))
        assert format_ms(rival.time_ms) in shown and (
            rival.source == "estimated" or rival.source in shown
        )
    assert found and entries


def test_a_lower_format_that_surely_holds_is_what_the_others_wait_for(
    executors: Executors,
) -> None:
    """A way that loses to it by estimate was said to be tried some day, and never was."""
    facts, problem = fake_facts("cpu_amx"), _problem("cpu_amx", **LONG)
    decision = decide(problem, None, facts, Policy(error_budget=0.05), executors)
    entries = _entries(decision)
    assert entries["sdpa.flash/bf16"].why is Why.WAITING
    sparse = entries["block_sparse/fp32 mass=0.9"]
    assert sparse.why is Why.SLOWER and "checking, sdpa.flash/bf16 " in sparse.reason


def test_a_layer_without_a_budget_waits_for_nothing(executors: Executors) -> None:
    """A calibrated policy has budgets for some layers alone."""
    policy = Policy(error_budget=0.0, head_budgets=((1, 0, 0.05),))
    problem, facts = _problem("cpu", **LONG), fake_facts("cpu")
    for layer, why in ((0, Why.POLICY), (1, Why.WAITING)):
        decision = decide(problem, None, facts, policy, executors, layer=layer)
        assert _entries(decision)["block_sparse/fp32 mass=0.9"].why is why


@pytest.mark.parametrize("len_q", [256, 8192])
def test_what_an_earlier_measurement_left_out_has_the_same_codes(
    executors: Executors, len_q: int
) -> None:
    problem = _problem("cpu", len_q=len_q)
    facts, policy = fake_facts("cpu"), Policy(error_budget=0.05)
    before = _entries(decide(problem, None, facts, policy, executors))
    numbers = TensorStats(sampled_rows=32, max_magnitude=1.0)
    after = _entries(decide(problem, numbers, facts, policy, executors))
    name = "block_sparse/fp32 mass=0.9"
    assert after[name].why is (Why.SLOWER if len_q == 256 else Why.WAITING)
    assert (after[name].reason, after[name].why) == (before[name].reason, before[name].why)


def test_packed_sequences_say_that_their_errors_are_not_measured_yet() -> None:
    everything, kinds = ~Feature(0), tuple(KVKind)
    exact = Capability(name="exact", backend="x", features=everything, kv_kinds=kinds)
    low = replace(
        capability_named("low_rank"),
        name="low",
        features=everything,
        kv_kinds=kinds,
        efficiency=0.5,
        num_launches=1,
    )
    problem = make_problem(lengths_q=(512, 512), head_dim=64)
    policy = Policy(error_budget=0.05)
    decision = decide(problem, None, fake_facts("cpu"), policy, (exact, low))
    assert _entries(decision)["low/fp32 rank=8,8"].reason == (
        "errors are not measured on packed sequences yet; call it for each sequence"
    )
    for lengths, wanted in (((32768, 32768), ()), ((), ((Method.LOW_RANK, FP32),))):
        long = make_problem(lengths_q=lengths, len_q=65536, head_dim=128)
        assert worth_measuring(long, fake_facts("cpu"), policy, (exact, low)) == wanted


LONG = {"len_q": 32768, "head_dim": 128}


@pytest.mark.parametrize(
    ("values", "policy"),
    [
        (LONG | {"len_q": 127}, Policy(error_budget=0.05)),
        (LONG, Policy(error_budget=0.05, audit_rows=0)),
        (LONG, Policy(error_budget=0.05, audit_rows=32768)),
        (LONG, Policy(error_budget=0.0)),
        (LONG, Policy(error_budget=0.0, head_budgets=((0, 0, 0.0),))),
        (LONG, Policy(error_budget=0.05, methods=(Method.EXACT,), precisions=())),
        (LONG, Policy(error_budget=0.05, memory_budget_bytes=1)),
        ({"len_q": 256}, Policy(error_budget=0.05)),
        ({"lengths_q": (32768, 32768), "head_dim": 128}, Policy(error_budget=0.05)),
    ],
)
def test_nothing_is_measured_where_nothing_can_come_of_it(
    executors: Executors, values: dict[str, object], policy: Policy
) -> None:
    assert worth_measuring(_problem("cpu", **values), fake_facts("cpu"), policy, executors) == ()


def test_what_could_pay_is_worth_measuring(executors: Executors) -> None:
    policy = Policy(error_budget=0.05)
    assert worth_measuring(_problem("cpu", **LONG), fake_facts("cpu"), policy, executors) == (
        (Method.LOW_RANK, FP32),
        (Method.BLOCK_SPARSE, FP32),
    )
    longer = _problem("cpu_amx", **{**LONG, "len_q": 8 * LONG["len_q"]})
    found = worth_measuring(longer, fake_facts("cpu_amx"), policy, executors)
    assert (Method.EXACT, BF16) in found and (Method.LOW_RANK, BF16) in found
    assert all(precision is not FP16 for _, precision in found)
    only = replace(policy, methods=(Method.EXACT, Method.LOW_RANK))
    assert worth_measuring(_problem("cpu", **LONG), fake_facts("cpu"), only, executors) == (
        (Method.LOW_RANK, FP32),
    )


def test_a_format_that_will_surely_hold_the_budget_is_what_the_rest_must_beat(
    executors: Executors,
) -> None:
    facts, problem = fake_facts("cpu_amx"), _problem("cpu_amx", **LONG)
    sparse = (Method.BLOCK_SPARSE, FP32)
    for budget, wanted in ((0.05, False), (0.01, True)):
        found = worth_measuring(problem, facts, Policy(error_budget=budget), executors)
        assert (Method.EXACT, BF16) in found
        assert (sparse in found) is wanted


def test_an_executor_asked_for_by_name_is_measured_whether_it_pays_or_not(
    executors: Executors,
) -> None:
    low = tuple(item for item in executors if item.name == "low_rank")
    policy = Policy(error_budget=0.05)
    small, facts = _problem("cpu", len_q=16), fake_facts("cpu")
    assert worth_measuring(small, facts, policy, low, forced=True) == ((Method.LOW_RANK, FP32),)
    assert worth_measuring(small, facts, policy, low) == ()
    captured = replace(small, softcap=1.0)
    assert worth_measuring(captured, facts, policy, low, forced=True) == ()
    exact = replace(policy, error_budget=0.0)
    assert worth_measuring(small, facts, exact, low, forced=True) == ()


def test_an_executor_asked_for_by_name_serves_within_the_budget_though_it_does_not_pay(
    executors: Executors,
) -> None:
    low = tuple(item for item in executors if item.name == "low_rank")
    problem, facts = _problem("cpu", len_q=128), fake_facts("cpu")
    policy = Policy(error_budget=0.05)
    stats = replace(
        _stats(problem, ()),
        method_errors=make_errors(
            {
                8: (0.01, 0.9, 0.9, 0.01),
                16: (0.01, 0.04, 0.9, 0.01),
                32: (0.001, 0.01, 0.03, 0.002),
            }
        ),
    )
    decision = decide(problem, stats, facts, policy, low, forced=True)
    served = {head: group.method.rank for group in decision.plan.groups for head in group.heads}
    if not served:
        served = dict.fromkeys(range(4), decision.plan.groups[0].method.rank)
    assert sorted(served) == [0, 1, 2, 3]
    assert served[2] == 32
    accepted = [entry for entry in _entries(decision).values() if entry.accepted]
    assert all(entry.reason.endswith("; it was asked for by name") for entry in accepted)


def test_an_executor_asked_for_by_name_that_is_over_budget_for_a_head_is_an_error(
    executors: Executors,
) -> None:
    low = tuple(item for item in executors if item.name == "low_rank")
    problem = _problem("cpu", len_q=128)
    stats = _stats(problem, (0.01, 0.01, 0.9, 0.01))
    with pytest.raises(PlanError, match="head 2 has no approximation within its error budget") as e:
        decide(problem, stats, fake_facts("cpu"), Policy(error_budget=0.05), low, forced=True)
    assert "low_rank/fp32 rank=8,8: over budget for some heads" in e.value.trace


def test_an_executor_asked_for_by_name_without_numbers_is_an_error(executors: Executors) -> None:
    low = tuple(item for item in executors if item.name == "low_rank")
    with pytest.raises(PlanError, match="low_rank/fp32 rank=8,8: "):
        decide(_problem("cpu"), None, fake_facts("cpu"), Policy(error_budget=0.1), low, forced=True)
