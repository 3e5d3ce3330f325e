"""Tables of machine, problem, statistics and policy, and the plan and reasons they must give."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.backends import capability_named
from adaattn.backends.block_sparse.executor import KEPT_MASSES
from adaattn.backends.low_rank.ranks import methods
from adaattn.planning import decide, head_budgets, worth_measuring
from adaattn.planning.cost import estimate
from adaattn.planning.evidence import DISPLACES_ON_A_CPU, ratio
from adaattn.planning.plan import MARGIN
from adaattn.spec import (
    AttentionProblem,
    Aux,
    Capability,
    Decision,
    Feature,
    HeadGroup,
    LowRank,
    MaskKind,
    Measured,
    Method,
    Plan,
    Policy,
    Precision,
    TensorStats,
    TimingTable,
    TraceEntry,
    Why,
)
from adaattn.spec.evidence import problem_class
from adaattn.testing import fake_facts, make_errors, make_problem
from adaattn.tuning.cell import cell_of

FP32, BF16, FP16 = Precision.FP32, Precision.BF16, Precision.FP16
MACHINES = ("h200", "l40s", "a100", "v100", "pascal", "cpu", "cpu_amx")
MASKED = {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 4096), "len_k": 4096}
Executors = tuple[Capability, ...]


def _problem(machine: str, **values: object) -> AttentionProblem:
    device = fake_facts(machine).device_type
    return make_problem(
        **{"num_heads": 4, "len_q": 8192, "head_dim": 64, "device_type": device, **values}
    )


def _stats(
    problem: AttentionProblem,
    *,
    lower: float = 1e-3,
    rank: tuple[float, ...] = (0.9,) * 4,
    densities: tuple[float, ...] = (1.0,) * 4,
    sparse: tuple[float, ...] = (0.9,) * 4,
    magnitude: float = 4.0,
) -> TensorStats:
    """Invented numbers: the same errors at every rank and every kept mass."""
    heads = problem.num_heads
    return TensorStats(
        sampled_rows=32,
        max_magnitude=magnitude,
        precision_errors=((BF16, (lower,) * heads), (FP16, (lower / 8,) * heads)),
        method_errors=make_errors(
            {method.rank: rank for method in methods(problem, Policy())},
            dict.fromkeys(KEPT_MASSES, sparse),
            densities,
        ),
    )


def _entries(decision: Decision) -> dict[str, TraceEntry]:
    """The trace by candidate, each exactly once, and true to the plan."""
    counts = Counter(entry.candidate for entry in decision.trace)
    assert set(counts.values()) == {1}, counts
    assert all(entry.reason for entry in decision.trace)
    accepted = {entry.candidate for entry in decision.trace if entry.accepted}
    assert accepted == {group.label for group in decision.plan.groups}
    return {entry.candidate: entry for entry in decision.trace}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("policy", [Policy(), Policy(name="quality", audit_rows=0)])
@pytest.mark.parametrize("measured", [False, True])
def test_a_budget_of_0_is_the_exact_path_in_the_inputs_own_format(
    executors: Executors, machine: str, policy: Policy, measured: bool
) -> None:
    problem = _problem(machine)
    stats = _stats(problem, lower=0.0, rank=(0.0,) * 4, sparse=(0.0,) * 4) if measured else None
    decision = decide(problem, stats, fake_facts(machine), policy, executors)
    (group,) = decision.plan.groups
    assert decision.plan.is_exact and group.scheme.inputs is FP32 and group.heads == ()
    assert decision.plan.error_budget == 0.0
    entries = _entries(decision)
    approximations = [e for name, e in entries.items() if name.startswith(("low_rank/", "block_"))]
    assert {e.reason for e in approximations} == {"it approximates, and the error budget is 0"}
    assert entries["any executor/bf16"].reason == (
        "lower than the input's fp32, and the error budget is 0"
    )


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [
        ("h200", FP16),
        ("l40s", FP16),
        ("a100", FP16),
        ("v100", FP16),
        ("pascal", FP32),
        ("cpu", FP32),
        ("cpu_amx", BF16),
    ],
)
def test_a_lower_format_is_taken_within_the_budget_by_the_rules_of_the_hardware(
    executors: Executors, machine: str, chosen: Precision
) -> None:
    problem = _problem(machine)
    decision = decide(
        problem, _stats(problem), fake_facts(machine), Policy(error_budget=0.01), executors
    )
    assert {group.scheme.inputs for group in decision.plan.groups} == {chosen}
    for label in ("bf16", "fp16"):
        refused = _entries(decision).get(f"any executor/{label}")
        if refused:
            assert refused.reason.endswith("natively, not it")


@pytest.mark.parametrize(
    ("machine", "chosen"), [("h200", BF16), ("a100", BF16), ("v100", FP32), ("cpu_amx", BF16)]
)
def test_magnitudes_beyond_fp16_leave_bf16_or_the_inputs_own_format(
    executors: Executors, machine: str, chosen: Precision
) -> None:
    problem = _problem(machine)
    stats = _stats(problem, magnitude=60000.0)
    decision = decide(problem, stats, fake_facts(machine), Policy(error_budget=0.01), executors)
    assert {group.scheme.inputs for group in decision.plan.groups} == {chosen}


@pytest.mark.parametrize(("budget", "chosen"), [(2e-3, BF16), (1e-3, BF16), (0.99e-3, FP32)])
def test_a_lower_format_is_taken_up_to_the_budget_and_no_further(
    executors: Executors, budget: float, chosen: Precision
) -> None:
    problem = _problem("cpu_amx")
    policy = Policy(error_budget=budget)
    decision = decide(problem, _stats(problem), fake_facts("cpu_amx"), policy, executors)
    assert {group.scheme.inputs for group in decision.plan.groups} == {chosen}
    if chosen is FP32:
        assert _entries(decision)["sdpa.flash/bf16"].reason == (
            "expected an error of at most 0.00099, got 0.001"
        )


def test_heads_of_one_call_go_different_ways(executors: Executors) -> None:
    problem = _problem("cpu", num_heads=6, len_q=16384, head_dim=128)
    stats = _stats(
        problem,
        rank=(0.001, 0.001, 0.9, 0.9, 0.9, 0.9),
        densities=(0.9, 0.9, 0.05, 0.1, 0.1, 0.9),
        sparse=(0.01, 0.01, 0.01, 0.01, 0.9, 0.01),
    )
    decision = decide(problem, stats, fake_facts("cpu"), Policy(error_budget=0.02), executors)
    by_method = {group.method.kind: group.heads for group in decision.plan.groups}
    assert by_method == {
        Method.LOW_RANK: (0, 1),
        Method.BLOCK_SPARSE: (2, 3),
        Method.EXACT: (4, 5),
    }
    assert sorted(head for group in decision.plan.groups for head in group.heads) == [*range(6)]
    assert decision.plan.audit_rows == 32
    entries = _entries(decision)
    taken = {entry.heads: entry.reason for entry in entries.values() if entry.accepted}
    assert taken[0, 1].startswith("taken for heads 0-1: ")
    assert "estimated error 0.001 of 0.02 allowed" in taken[0, 1]
    assert "8% of blocks kept" in taken[2, 3]
    assert taken[4, 5].endswith(
        "the usual way where SDPA cannot serve, serves by math, or was not asked"
    )
    exact_ms = entries["sdpa.flash/fp32"].cost
    assert exact_ms and decision.cost.time_ms < (1 - MARGIN) * exact_ms.time_ms


@pytest.mark.parametrize(
    ("good", "kv_heads"), [((0, 1, 2, 3), (1, 1)), ((0, 1), (2, 6)), ((0, 4), (2, 6))]
)
def test_heads_keep_sharing_keys_only_where_their_whole_group_goes_one_way(
    executors: Executors, good: tuple[int, ...], kv_heads: tuple[int, int]
) -> None:
    facts = fake_facts("cpu")
    problem = _problem("cpu", num_heads=8, num_kv_heads=2, len_q=16384, head_dim=128)
    rank = tuple(0.001 if head in good else 0.9 for head in range(8))
    stats = _stats(problem, rank=rank, densities=(1.0,) * 8, sparse=(0.9,) * 8)
    decision = decide(problem, stats, facts, Policy(error_budget=0.02), executors)
    by_name = {item.name: item for item in executors}
    low, exact = sorted(decision.plan.groups, key=lambda group: group.capability)
    assert low.heads == good and low.method.kind is Method.LOW_RANK
    costs = [
        estimate(
            replace(problem, num_heads=len(group.heads), num_kv_heads=shared),
            by_name[group.capability],
            group,
            facts,
        )
        for group, shared in zip((low, exact), kv_heads, strict=True)
    ]
    copied = [
        4 * (len(group.heads) + shared) * 16384 * (128 + 128)
        for group, shared in zip((low, exact), kv_heads, strict=True)
    ]
    copying_ms = 1e3 * 2 * sum(copied) / facts.rates.bandwidth
    assert decision.cost is not None
    assert decision.cost.time_ms == pytest.approx(sum(cost.time_ms for cost in costs) + copying_ms)
    assert decision.workspace_bytes == max(
        cost.workspace_bytes + size for cost, size in zip(costs, copied, strict=True)
    )


def test_one_way_for_all_heads_is_one_group_without_head_numbers(executors: Executors) -> None:
    problem = _problem("cpu", len_q=16384, head_dim=128)
    stats = _stats(problem, rank=(0.001,) * 4)
    plan = decide(problem, stats, fake_facts("cpu"), Policy(error_budget=0.02), executors).plan
    (group,) = plan.groups
    assert group.method.kind is Method.LOW_RANK and group.heads == ()
    assert (group.method.rank, group.method.value_rank) == (16, 16)


def test_the_more_accurate_of_two_near_equals_is_taken() -> None:
    """Half the blocks kept twice over: equal times, so the smaller error decides."""
    everything = ~Feature(0)
    exact = Capability(name="exact", backend="x", features=everything, is_fused=True)
    sparse = replace(
        capability_named("block_sparse"), name="sparse", features=everything, efficiency=0.5
    )
    problem = _problem("cpu", len_q=32768)
    stats = TensorStats(
        method_errors=make_errors(
            {},
            {
                mass: (error,) * 4
                for mass, error in zip(KEPT_MASSES, (0.01, 0.002, 0.005), strict=True)
            },
            (0.2,) * 4,
            ("", "sparse"),
        )
    )
    policy = Policy(error_budget=0.02)
    decision = decide(problem, stats, fake_facts("cpu"), policy, (exact, sparse))
    assert [group.method.kept_mass for group in decision.plan.groups] == [KEPT_MASSES[1]]
    assert _entries(decision)["sparse/fp32 mass=0.9"].reason.startswith("no faster: ")


@pytest.mark.parametrize(("saved", "taken"), [(MARGIN - 0.01, False), (MARGIN + 0.01, True)])
def test_an_approximation_must_be_faster_by_the_margin(saved: float, taken: bool) -> None:
    everything = ~Feature(0)
    exact = Capability(name="exact", backend="x", features=everything, is_fused=True)
    half = Capability(name="half", backend="x", features=everything, is_fused=True)
    exact = replace(exact, precisions=(FP32,), efficiency=0.5)
    facts = fake_facts("cpu_amx")
    fp32, bf16 = facts.rates.flops_of(FP32), facts.rates.flops_of(BF16)
    half = replace(half, efficiency=0.5 * fp32 / bf16 / (1 - saved))
    policy = Policy(error_budget=0.01, precisions=(BF16,))
    problem = _problem("cpu_amx", len_q=16384)
    decision = decide(problem, _stats(problem), facts, policy, (exact, half))
    assert (decision.plan.groups[0].scheme.inputs is BF16) is taken
    if not taken:
        assert _entries(decision)["half/bf16"].reason.startswith("not faster by enough: ")


def test_sharing_heads_out_is_dropped_where_it_gains_too_little() -> None:
    """The trace once called the approximation slower than the exact path that it had beaten."""
    everything = ~Feature(0)
    low = replace(
        capability_named("low_rank"),
        features=everything,
        efficiency=0.5,
        num_launches=1,
    )
    facts = fake_facts("cpu")
    problem = _problem("cpu", head_dim=128)
    group = HeadGroup(capability="low_rank", method=LowRank(rank=16, value_rank=16))
    low_ms = estimate(problem, low, group, facts).time_ms
    flops = 2 * problem.len_q**2 * (128 + 128) * problem.num_heads
    share = 0.9 * flops / (1e-3 * low_ms) / facts.rates.flops_of(FP32)
    exact = Capability(name="exact", backend="x", features=everything, is_fused=True)
    exact = replace(exact, efficiency=share)
    policy = Policy(error_budget=0.02)

    def chosen(num_good: int) -> Decision:
        rank = tuple(0.001 if head < num_good else 0.9 for head in range(4))
        return decide(problem, _stats(problem, rank=rank), facts, policy, (exact, low))

    assert chosen(4).plan.groups == (group,)
    one = chosen(1)
    assert one.plan.is_exact and one.plan.groups[0].heads == ()
    reason = _entries(one)["low_rank/fp32 rank=16,16"].reason
    assert reason.startswith("faster for some heads, but too little is gained: ")
    assert " ms with heads shared out, exact/fp32 " in reason and reason.endswith(" ms for all")
    assert _entries(one)["low_rank/fp32 rank=64,64"].reason.startswith("slower for head 0: ")


@pytest.mark.parametrize("machine", MACHINES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_numbers_give_a_plan_within_budget_that_covers_each_head_once(
    executors: Executors, machine: str, data: st.DataObject
) -> None:
    error = st.floats(0, 0.2)
    heads = 4
    per_head = st.lists(error, min_size=heads, max_size=heads).map(tuple)
    share = st.lists(st.floats(0.01, 1), min_size=heads, max_size=heads).map(tuple)
    problem = _problem(machine, len_q=data.draw(st.sampled_from((256, 8192, 32768))))
    stats = _stats(
        problem,
        lower=data.draw(error),
        rank=data.draw(per_head),
        sparse=data.draw(per_head),
        densities=data.draw(share),
        magnitude=data.draw(st.floats(0, 1e6)),
    )
    budgets = tuple((0, head, data.draw(st.floats(0, 0.1))) for head in range(heads))
    policy = Policy(error_budget=0.05, head_budgets=budgets)
    decision = decide(problem, stats, fake_facts(machine), policy, executors, layer=0)
    entries = _entries(decision)
    measured = dict(stats.precision_errors)
    for group in decision.plan.groups:
        for head in group.heads or range(heads):
            loss = measured[group.scheme.inputs][head] if group.scheme.inputs is not FP32 else 0.0
            if group.method.kind is not Method.EXACT:
                found = stats.errors_of(group.capability, group.method)
                assert found is not None
                loss += found.errors[head]
            allowed = budgets[head][2]
            assert loss <= allowed
            exact = group.method.kind is Method.EXACT and group.scheme.inputs is FP32
            assert exact or allowed > 0
    assert decision.plan == Plan.from_dict(json.loads(json.dumps(decision.plan.to_dict())))
    assert len(entries) == len(decision.trace)


def test_calibrated_budgets_are_those_of_the_layer_and_the_head() -> None:
    policy = Policy(error_budget=0.01, head_budgets=((0, 1, 0.2), (3, 0, 0.0), (0, 9, 0.5)))
    assert head_budgets(policy, 3, 0) == (0.01, 0.2, 0.01)
    assert head_budgets(policy, 3, 3) == (0.0, 0.01, 0.01)
    assert head_budgets(policy, 3, -1) == (0.01, 0.01, 0.01)
    assert head_budgets(policy, 0, 0) == ()


def test_a_layer_with_calibrated_heads_approximates_those_alone(executors: Executors) -> None:
    problem = _problem("cpu", len_q=16384, head_dim=128)
    policy = Policy(error_budget=0.0, head_budgets=((2, 1, 0.05), (2, 3, 0.02)))
    stats = _stats(problem, rank=(0.001,) * 4)
    facts = fake_facts("cpu")
    plan = decide(problem, stats, facts, policy, executors, layer=2).plan
    lossy = [group for group in plan.groups if group.method.kind is Method.LOW_RANK]
    assert [group.heads for group in lossy] == [(1, 3)]
    assert plan.error_budget == 0.05
    assert decide(problem, stats, facts, policy, executors, layer=1).plan.is_exact


def test_a_problem_is_decided_in_its_plainest_words(executors: Executors) -> None:
    facts = fake_facts("cpu")
    plain = _problem("cpu", is_causal=True)
    wordy = replace(plain, is_causal=False, window=(8192, 0))
    assert decide(wordy, None, facts, Policy(), executors) == decide(
        plain, None, facts, Policy(), executors
    )
    policy = Policy(error_budget=0.05)
    assert worth_measuring(wordy, facts, policy, executors) == worth_measuring(
        plain, facts, policy, executors
    )


@pytest.mark.parametrize("values", [{"num_heads": 0}, {"batch": 0}, {"len_k": 0}, {"len_q": 0}])
def test_an_empty_call_has_a_plan(executors: Executors, values: dict[str, int]) -> None:
    """A call without heads once ended in an error that listed every executor."""
    problem = _problem("cpu", **values)
    decision = decide(problem, None, fake_facts("cpu"), Policy(), executors)
    assert decision.plan.groups[0].heads == ()
    _entries(decision)


def test_an_ambient_choice_of_kernels_is_honoured(executors: Executors) -> None:
    problem = _problem("cpu", allowed_sdpa=("sdpa.math",))
    sdpa = tuple(item for item in executors if item.backend == "sdpa")
    decision = decide(problem, None, fake_facts("cpu"), Policy(), sdpa)
    assert decision.plan.groups[0].capability == "sdpa.math"


@pytest.mark.parametrize(
    ("machine", "values", "capability"),
    [
        ("h200", {"precision": BF16}, "sdpa.cudnn"),
        ("a100", {"precision": BF16}, "sdpa.flash2"),
        ("v100", {"precision": FP16}, "sdpa.efficient"),
        ("h200", {}, "sdpa.efficient"),
        ("cpu", {}, "sdpa.flash"),
        ("cpu", {"softcap": 1.0}, "chunked"),
        ("cpu", {"len_q": 1, "num_heads": 32, "num_kv_heads": 4}, "sdpa.flash"),
        ("h200", {"precision": BF16, "window": (512, -1), "is_causal": True}, "sdpa.flash2"),
        ("h200", {"precision": BF16, "window": (64, 64), "len_q": 300}, "chunked"),
        ("h200", {"precision": BF16, "window": (64, -1), "len_q": 1}, "chunked"),
        ("a100", {"precision": BF16, "has_sinks": True, "len_q": 256}, "sdpa.flash2"),
        (
            "a100",
            {"precision": BF16, "has_sinks": True, "len_q": 256, "sdpa_default": "sdpa.flash2"},
            "sdpa.flash2",
        ),
        (
            "h200",
            {"precision": BF16, "has_sinks": True, "len_q": 256, "sdpa_default": "sdpa.math"},
            "chunked",
        ),
        ("a100", {"precision": BF16, "has_sinks": True, "len_q": 255}, "chunked"),
        (  # one key with a sink once took 1.5 times as long as written out
            "a100",
            {
                "precision": BF16,
                "has_sinks": True,
                "len_q": 1,
                "len_k": 1,
                "sdpa_default": "sdpa.flash2",
            },
            "chunked",
        ),
        ("a100", {"precision": BF16, "has_sinks": True, "requires_grad": True}, "chunked"),
    ],
)
def test_the_exact_path_of_each_machine(
    executors: Executors, machine: str, values: dict[str, object], capability: str
) -> None:
    problem = _problem(machine, **({"len_k": 8192} | values))
    decision = decide(problem, None, fake_facts(machine), Policy(), executors)
    assert decision.plan.groups[0].capability == capability
    assert decision.policy == "custom"


GROUPED: dict[str, object] = {"num_kv_heads": 1, "sdpa_default": "sdpa.math"}
DECODING: dict[str, object] = GROUPED | {"len_q": 1}


@pytest.mark.parametrize(
    ("machine", "values", "capability"),
    [
        ("h200", GROUPED, "sdpa.efficient"),
        ("h200", GROUPED | {"num_kv_heads": 4}, "sdpa.math"),
        ("h200", GROUPED | {"len_q": 8, "len_k": 600}, "sdpa.math"),
        ("h200", GROUPED | {"len_q": 9, "len_k": 600}, "sdpa.efficient"),
        ("h200", GROUPED | {"requires_grad": True}, "sdpa.efficient"),
        ("h200", GROUPED | {"requires_grad": True, "len_q": 1024}, "sdpa.math"),
        ("h200", GROUPED | {"dropout_p": 0.1, "requires_grad": True}, "sdpa.efficient"),
        ("h200", DECODING | {"len_k": 512}, "grouped"),
        ("h200", DECODING | {"len_k": 8192}, "sdpa.math"),
        ("h200", DECODING | {"len_k": 8192, "precision": BF16}, "grouped"),
        ("h200", DECODING | {"len_k": 512, "requires_grad": True}, "sdpa.math"),
        ("a100", DECODING | {"precision": BF16, **MASKED}, "grouped"),
        ("cpu", GROUPED | {"precision": Precision.FP64}, "sdpa.math"),
    ],
)
def test_grouped_heads_that_pytorch_serves_by_math_are_folded_or_repeated(
    executors: Executors, machine: str, values: dict[str, object], capability: str
) -> None:
    """As Transformers does: ``enable_gqa`` alone would write the scores out."""
    values = {"len_k": values.get("len_q", 8192)} | values
    problem = _problem(machine, **values)
    decision = decide(problem, None, fake_facts(machine), Policy(), executors)
    assert decision.plan.groups[0].capability == capability


@pytest.mark.parametrize(
    ("values", "capability"),
    [
        ({"window": (5, 0), "requires_grad": True}, "chunked"),
        ({"window": (5, 0)}, "sdpa.flash2"),
        ({"window": (5, 0), "requires_grad": True, "len_q": 520, "len_k": 520}, "sdpa.flash2"),
        ({"window": (5, 0), "requires_grad": True, "num_kv_heads": 1}, "sdpa.flash2"),
        (
            {"window": (5, 0), "requires_grad": True, "num_kv_heads": 1}
            | {"sdpa_default": "sdpa.cudnn"},
            "chunked",
        ),
    ],
)
def test_short_windows_in_training_are_a_mask_for_sdpa_on_a_gpu(
    executors: Executors, values: dict[str, object], capability: str
) -> None:
    problem = _problem("h200", **{"len_q": 512, "len_k": 512, "precision": BF16} | values)
    decision = decide(problem, None, fake_facts("h200"), Policy(), executors)
    assert decision.plan.groups[0].capability == capability


def _table(problem: AttentionProblem, times: dict[str, Measured]) -> TimingTable:
    """Return a table with one cell, that of a problem."""
    cell = cell_of(problem, times)
    return TimingTable(source="table of a test", cells={cell.problem_class: (cell,)})


def _taken(
    times: dict[str, Measured], *, default: str = "pytorch", **values: object
) -> tuple[Decision, str]:
    """Return the decision between two executors with measured times, and who was taken."""
    everything = ~Feature(0)
    best = Capability(name="best", backend="x", features=everything, is_fused=True, efficiency=0.9)
    other = replace(best, name="pytorch", efficiency=0.1)
    measured_on = _problem("cpu", sdpa_default=default)
    problem = replace(measured_on, **values)
    facts = replace(fake_facts("cpu"), timings=_table(measured_on, times) if times else None)
    decision = decide(problem, None, facts, Policy(), (best, other))
    return decision, decision.plan.groups[0].capability


def _time(wall_ms: float, **more: float) -> Measured:
    return Measured(**({"device_ms": wall_ms, "host_ms": wall_ms} | more))


def test_a_guess_never_displaces_what_pytorch_would_run() -> None:
    """The roofline once gave every fp32 problem of a GPU to a kernel 50 times slower."""
    decision, taken = _taken({})
    assert taken == "pytorch"
    assert "what PyTorch would run" in _entries(decision)["pytorch/fp32"].reason
    assert _entries(decision)["best/fp32"].reason.startswith("nobody measured that it is faster")


@pytest.mark.parametrize(
    "values",
    [
        {"has_sinks": True},
        {"window": (64, 0)},
        {"num_sequences": 3, "max_len_q": 4000, "max_len_k": 4000, "packed_square": True},
    ],
    ids=str,
)
def test_pytorch_would_run_nothing_where_its_function_has_no_word(
    executors: Executors, values: dict[str, object]
) -> None:
    problem = _problem("a100", precision=BF16, sdpa_default="sdpa.flash2", **values)
    decision = decide(problem, None, fake_facts("a100"), Policy(), executors)
    assert decision.plan.groups[0].capability == "sdpa.flash2"
    reason = _entries(decision)["sdpa.flash2/bf16"].reason
    assert reason.endswith(
        "the usual way where SDPA cannot serve, serves by math, or was not asked"
    )


@pytest.mark.parametrize(
    ("share", "taken"),
    [(DISPLACES_ON_A_CPU - 0.01, "best"), (DISPLACES_ON_A_CPU + 0.01, "pytorch")],
)
def test_a_measured_time_displaces_it_if_it_is_clearly_better(share: float, taken: str) -> None:
    decision, found = _taken({"best": _time(share), "pytorch": _time(1.0)})
    assert found == taken
    assert "(table of a test)" in _entries(decision)[f"{taken}/fp32"].reason


def test_a_kernel_that_is_faster_and_takes_longer_to_call_does_not_displace_it() -> None:
    slow_call = _time(0.5, host_ms=2.0)
    assert _taken({"best": slow_call, "pytorch": _time(1.0)})[1] == "pytorch"


def test_a_time_that_did_not_settle_counts_and_says_so() -> None:
    decision, taken = _taken({"best": _time(0.5, settled=False), "pytorch": _time(1.0)})
    assert taken == "best" and "not settled" in _entries(decision)["best/fp32"].reason


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        ({"len_q": 4096, "len_k": 4096}, "best"),
        ({"len_q": 16384, "len_k": 16384}, "best"),
        ({"len_q": 2048, "len_k": 2048}, "pytorch"),
        ({"len_q": 32768, "len_k": 32768}, "pytorch"),
        ({"head_dim": 512, "value_dim": 512}, "pytorch"),
        ({"is_causal": True}, "pytorch"),
        ({"precision": BF16}, "pytorch"),
        ({"requires_grad": True}, "pytorch"),
    ],
)
def test_times_are_extrapolated_by_a_factor_of_two_and_to_no_other_class(
    values: dict[str, object], taken: str
) -> None:
    times = {"best": _time(0.5), "pytorch": _time(1.0)}
    assert _taken(times, **values)[1] == taken


@pytest.mark.parametrize("aux", [Aux.ENTROPY, Aux.LSE | Aux.ROW_MAX, Aux.LSE])
def test_statistics_go_by_the_times_without_them_where_nobody_measured_them(aux: Aux) -> None:
    decision, taken = _taken({"best": _time(0.5), "pytorch": _time(1.0)}, aux=aux)
    assert taken == "best"
    assert "(table of a test, of fp32)" in _entries(decision)["best/fp32"].reason


def test_the_dropped_mass_takes_the_scores_of_all_blocks_and_goes_by_its_own_times_alone() -> None:
    listed = {"block_size": (128, 128), "most_blocks": 4}
    measured_on = _problem("cpu", **listed)
    table = _table(measured_on, {"best": _time(0.5), "pytorch": _time(1.0)})
    assert ratio(table, measured_on, "best", "pytorch") == pytest.approx(0.5)
    dropped = replace(measured_on, aux=Aux.DROPPED_MASS)
    assert ratio(table, dropped, "best", "pytorch") is None


def test_statistics_that_were_measured_go_by_their_own_times() -> None:
    measured_on = _problem("cpu", sdpa_default="pytorch")
    tables = [
        _table(measured_on, {"best": _time(0.5), "pytorch": _time(1.0)}),
        _table(replace(measured_on, aux=Aux.ENTROPY), {"best": _time(2.0), "pytorch": _time(1.0)}),
    ]
    table = TimingTable(source="table", cells=tables[0].cells | tables[1].cells)
    for aux, expected in ((Aux.NONE, 0.5), (Aux.ENTROPY, 2.0), (Aux.ROW_MAX | Aux.LSE, 2.0)):
        problem = replace(measured_on, aux=aux)
        assert ratio(table, problem, "best", "pytorch") == pytest.approx(expected)


def test_a_list_of_blocks_is_one_class_with_causal_order_and_without() -> None:
    listed = _problem("cpu", block_size=(128, 128), most_blocks=4)
    assert problem_class(listed) == problem_class(replace(listed, is_causal=True))
    plain = _problem("cpu")
    assert problem_class(plain) != problem_class(replace(plain, is_causal=True))


@pytest.mark.parametrize("compile_ms", [0.0, 100.0])
def test_of_two_that_are_faster_the_cells_that_measured_both_tell_which(compile_ms: float) -> None:
    """By shares of the incumbent's time in different cells the slower one once won."""
    everything = ~Feature(0)
    best = Capability(name="best", backend="x", features=everything, is_fused=True)
    offered = (best, replace(best, name="second"), replace(best, name="pytorch"))
    problem = _problem("cpu", sdpa_default="pytorch")
    far = replace(problem, len_q=2 * problem.len_q, len_k=2 * problem.len_k)
    times = {"best": _time(2.0), "second": _time(4.0), "pytorch": _time(100.0)}
    tables = [
        _table(far, {name: replace(time, compile_ms=compile_ms) for name, time in times.items()}),
        _table(problem, {"second": _time(1.0, compile_ms=compile_ms), "pytorch": _time(100.0)}),
    ]
    facts = replace(fake_facts("cpu"), timings=tables[0].merged(tables[1]))
    decision = decide(problem, None, facts, Policy(), offered)
    plan = decision.later if compile_ms else decision.plan
    assert plan is not None and plan.groups[0].capability == "best"


@pytest.mark.parametrize(
    ("compiles", "first_ms", "taken", "calls"),
    [(True, 100.0, "best", 0), (True, 60.0, "pytorch", 80), (False, 100.0, "pytorch", 200)],
)
def test_what_serves_until_then_and_has_to_be_compiled_itself_is_part_of_the_price(
    compiles: bool, first_ms: float, taken: str, calls: int
) -> None:
    """A first call that is slow for other reasons is none: libraries are loaded once."""
    best = Capability(name="best", backend="x", features=~Feature(0), is_fused=True, compiles=True)
    offered = (best, replace(best, name="pytorch", compiles=compiles))
    problem = _problem("cpu", sdpa_default="pytorch")
    times = {"best": _time(0.5, compile_ms=100.0), "pytorch": _time(1.0, compile_ms=first_ms)}
    facts = replace(fake_facts("cpu"), timings=_table(problem, times))
    decision = decide(problem, None, facts, Policy(), offered)
    assert decision.plan.groups[0].capability == taken and decision.calls_before == calls


def test_what_has_to_be_compiled_waits_until_calls_have_lost_what_that_costs() -> None:
    decision, taken = _taken({"best": _time(0.5, compile_ms=100.0), "pytorch": _time(1.0)})
    assert taken == "pytorch" and decision.calls_before == 200
    assert decision.later is not None and decision.later.groups[0].capability == "best"
    (entry,) = (entry for entry in decision.trace if "best" in entry.candidate)
    assert entry.why is Why.WAITING
    assert entry.reason.startswith("taken from call 201 on, when calls have lost the 100 ms of ")
