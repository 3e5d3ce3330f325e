"""The frozen values: what they accept, what they refuse, and what they come back as."""

import dataclasses
import json
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaattn.errors import ArgumentError, ArgumentTypeError, PolicyError
from adaattn.spec import (
    METHODS,
    Align,
    AttentionProblem,
    BlockSparse,
    Capability,
    Cost,
    Decision,
    Exact,
    HardwareFacts,
    HeadGroup,
    HeadMethod,
    Launch,
    LowRank,
    Method,
    Plan,
    Policy,
    Precision,
    Rates,
    Scheme,
    TensorStats,
    TraceEntry,
    Why,
)
from adaattn.testing import fake_facts, make_problem

FLASH = HeadGroup(capability="sdpa.flash")
MIXED = Plan(
    groups=(
        HeadGroup(capability="sdpa.flash", heads=(0, 3), scheme=Scheme.of(Precision.BF16)),
        HeadGroup(capability="low_rank", heads=(1,), method=LowRank(rank=16, value_rank=8)),
        HeadGroup(
            capability="block_sparse", heads=(2,), method=BlockSparse(block_size=64, kept_mass=0.97)
        ),
    ),
    num_heads=4,
    error_budget=0.05,
    audit_rows=32,
)
FORMATS = st.sampled_from(Precision)
METHODS_OF_HEADS = st.one_of(
    st.just(Exact()),
    st.builds(LowRank, rank=st.integers(0, 512), value_rank=st.integers(0, 512)),
    st.builds(BlockSparse, block_size=st.integers(0, 512), kept_mass=st.floats(0, 1)),
)
VALUES = [
    LowRank(rank=4),
    BlockSparse(block_size=64, kept_mass=0.9),
    Scheme(),
    Launch(chunk_rows=3),
    make_problem(),
    TensorStats(),
    fake_facts("h200"),
    Rates(),
    Capability(name="x", backend="x"),
    FLASH,
    MIXED,
    Policy(),
    Decision(plan=MIXED),
    TraceEntry(candidate="x", accepted=False, reason="no"),
    Cost(flops=1.0, bytes_moved=1.0, workspace_bytes=1, time_ms=1.0),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen_hashed_by_content_and_pickled(value: object) -> None:
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)
    twin = pickle.loads(pickle.dumps(value))
    assert twin == value and hash(twin) == hash(value)


KINDS = (AttentionProblem, HeadGroup, Plan, Policy, Capability)
KINDS += (Exact, LowRank, BlockSparse, Scheme, Launch)


@pytest.mark.parametrize("kind", KINDS)
def test_values_take_keywords_alone_and_no_unknown_ones(kind: type) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind("x")
    with pytest.raises(TypeError, match="eror_budget"):
        kind(eror_budget=0.1)


def test_formats_know_their_size_and_their_rounding() -> None:
    assert [item.bits for item in Precision] == [64, 32, 16, 16, 8, 8, 8, 4]
    assert [item.label for item in Precision][:4] == ["fp64", "fp32", "bf16", "fp16"]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.FP64, "float64"),
        (Precision.FP32, "float32"),
        (Precision.BF16, "bfloat16"),
        (Precision.FP16, "float16"),
        (Precision.FP8_E4M3, "float8_e4m3fn"),
        (Precision.FP8_E5M2, "float8_e5m2"),
    ],
)
def test_the_unit_roundoff_is_half_the_step_above_1(precision: Precision, dtype: str) -> None:
    """Those of bf16 and fp16 were once half of this."""
    torch = pytest.importorskip("torch")
    step = torch.finfo(getattr(torch, dtype)).eps
    assert precision.unit_roundoff == step / 2
    assert precision.bits == torch.finfo(getattr(torch, dtype)).bits


def test_the_roundoff_of_integers_is_half_a_step_of_their_symmetric_range() -> None:
    for precision in (Precision.INT8, Precision.INT4):
        assert precision.unit_roundoff == 0.5 / (2 ** (precision.bits - 1) - 1)


def test_a_problem_knows_its_groups_and_where_its_rows_stand() -> None:
    problem = make_problem(num_heads=8, num_kv_heads=2, len_q=3, len_k=10)
    assert problem.group_size == 4
    assert problem.offset == 0
    assert dataclasses.replace(problem, align=Align.BOTTOM_RIGHT).offset == 7
    assert make_problem(num_heads=0).group_size == 1
    assert make_problem(num_heads=4, num_kv_heads=0).group_size == 4


@pytest.mark.parametrize(
    ("values", "positional"),
    [
        ({}, False),
        ({"has_alibi": True, "softcap": 1.0}, False),
        ({"is_causal": True}, True),
        ({"window": (0, -1)}, True),
        ({"window": (-1, 3)}, True),
        ({"dilation": 2}, True),
    ],
)
def test_a_problem_is_positional_when_positions_hide_keys(
    values: dict[str, object], positional: bool
) -> None:
    assert make_problem(**values).is_positional is positional


def test_rates_are_found_by_format() -> None:
    rates = Rates(flops=((Precision.FP32, 5.0),))
    assert rates.flops_of(Precision.FP32) == 5.0
    assert rates.flops_of(Precision.FP16) == 0.0


def test_facts_of_a_device_default_to_the_formats_that_every_device_computes() -> None:
    assert HardwareFacts(device_type="cpu").instructions == (Precision.FP64, Precision.FP32)


@pytest.mark.parametrize(
    ("group", "label"),
    [
        (FLASH, "sdpa.flash/fp32"),
        (MIXED.groups[0], "sdpa.flash/bf16"),
        (HeadGroup(capability="x", scheme=Scheme(qk=Precision.INT8)), "x/int8+fp32+fp32"),
        (MIXED.groups[1], "low_rank/fp32 rank=16,8"),
        (dataclasses.replace(MIXED.groups[1], method=LowRank(rank=16)), "low_rank/fp32 rank=16"),
        (HeadGroup(capability="low_rank", method=LowRank()), "low_rank/fp32"),
        (MIXED.groups[2], "block_sparse/fp32 mass=0.97"),
        (HeadGroup(capability="block_sparse", method=BlockSparse()), "block_sparse/fp32"),
    ],
)
def test_a_group_is_called_by_its_executor_and_what_it_changes(
    group: HeadGroup, label: str
) -> None:
    assert group.label == label


def _group(*heads: int) -> HeadGroup:
    return HeadGroup(capability="x", heads=heads)


@pytest.mark.parametrize(
    ("groups", "num_heads", "message"),
    [
        ((), 2, "plan groups: expected at least one, got none"),
        ((_group(0),), 2, r"plan heads: expected each of 0..1 once, got \[0\]"),
        ((_group(0, 1), _group(1)), 2, r"plan heads: expected each of 0..1 once"),
        ((_group(0), _group(2)), 2, "each of 0..1 once"),
        ((_group(-1), _group(0)), 2, "each of 0..1 once"),
        ((_group(), _group(0, 1)), 2, "expected heads in each of several, got a group without"),
        ((_group(), _group()), 2, "expected heads in each of several"),
    ],
)
def test_a_plan_covers_each_head_once(
    groups: tuple[HeadGroup, ...], num_heads: int, message: str
) -> None:
    """A second group that meant all heads was once accepted beside one that named them."""
    with pytest.raises(ArgumentError, match=message):
        Plan(groups=groups, num_heads=num_heads)


def test_a_plan_is_exact_when_no_group_approximates() -> None:
    assert Plan(groups=(FLASH,), num_heads=4).is_exact
    assert Plan(groups=(_group(1), _group(0)), num_heads=2).is_exact
    assert not MIXED.is_exact


@given(
    scheme=st.builds(Scheme, qk=FORMATS, pv=FORMATS, accumulate=FORMATS),
    methods=st.tuples(METHODS_OF_HEADS, METHODS_OF_HEADS),
    rows=st.integers(0, 512),
    budget=st.floats(0, 1),
    order=st.permutations(range(5)),
    cut=st.integers(1, 4),
)
def test_a_plan_comes_back_from_json_as_it_was(
    scheme: Scheme,
    methods: tuple[HeadMethod, HeadMethod],
    rows: int,
    budget: float,
    order: list[int],
    cut: int,
) -> None:
    first = HeadGroup(capability="x", heads=tuple(order[:cut]), scheme=scheme, method=methods[0])
    second = HeadGroup(
        capability="y",
        heads=tuple(order[cut:]),
        method=methods[1],
        launch=Launch(chunk_rows=rows),
    )
    plan = Plan(groups=(first, second), num_heads=5, error_budget=budget)
    twin = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert twin == plan and hash(twin) == hash(plan)


def test_a_plan_without_an_error_budget_says_so_and_is_not_audited() -> None:
    plan = Plan(groups=(FLASH,), num_heads=4, error_budget=None)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert (plan.budgets, plan.shown_budget) == ((), "no error budget")
    same = Plan(groups=(FLASH,), num_heads=2, error_budget=0.05, audit_rows=8)
    assert (same.budgets, same.shown_budget) == ((0.05, 0.05), "error budget 0.05")
    message = "audit_rows of a plan without an error budget: expected 0, got 8; an audit holds"
    with pytest.raises(ArgumentError, match=message):
        Plan(groups=(FLASH,), num_heads=4, error_budget=None, audit_rows=8)


def test_a_plan_of_words_needs_only_what_has_no_default() -> None:
    data = {"groups": [{"capability": "sdpa.flash"}], "num_heads": 4}
    assert Plan.from_dict(data) == Plan(groups=(FLASH,), num_heads=4)
    words = MIXED.to_dict()["groups"]
    assert [group["method"]["kind"] for group in words] == ["exact", "low_rank", "block_sparse"]
    assert [group["scheme"]["qk"] for group in words] == ["bf16", "fp32", "fp32"]
    assert words[1] == {
        "capability": "low_rank",
        "heads": [1],
        "method": {"kind": "low_rank", "rank": 16, "value_rank": 8},
        "scheme": {"qk": "fp32", "pv": "fp32", "accumulate": "fp32"},
        "launch": {"chunk_rows": 0},
    }


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        "groups",
        {"groups": 5, "num_heads": 1},
        {"groups": ["x"], "num_heads": 1},
        {"groups": [{"capability": "x", "heads": 3}], "num_heads": 1},
        {"groups": [{"capability": "x", "method": "magic"}], "num_heads": 1},
        {"groups": [{"capability": "x", "precision": "fp12"}], "num_heads": 1},
        {"groups": [{"capability": "x", "precision": 3}], "num_heads": 1},
        {"groups": [{"capability": "x", "tiles": 3}], "num_heads": 1},
        {"groups": [{"capability": "x", "method": {"rank": 3}}], "num_heads": 1},
        {"groups": [{"capability": "x", "method": {"kind": "magic"}}], "num_heads": 1},
        {"groups": [{"capability": "x", "method": {"kind": 1}}], "num_heads": 1},
        {"groups": [{"capability": "x", "method": {"kind": "exact", "rank": 3}}], "num_heads": 1},
        {"groups": [{"capability": "x", "method": {"kind": "low_rank", "rank": 1.5}}]},
        {"groups": [{"capability": "x", "method": {"kind": "block_sparse", "kept_mass": "1"}}]},
        {"groups": [{"capability": "x", "method": "low_rank", "rank": "3"}], "num_heads": 1},
        {"groups": [{"capability": "x", "method": "low_rank", "launch": {}}], "num_heads": 1},
        {"groups": [{"capability": "x", "precision": "bf16", "scheme": {}}], "num_heads": 1},
        {"groups": [{"capability": "x", "precision": "bf16", "launch": {}}], "num_heads": 1},
        {"groups": [{"capability": "x", "scheme": {"qk": "fp12"}}], "num_heads": 1},
        {"groups": [{"capability": "x", "scheme": {"qk": 3}}], "num_heads": 1},
        {"groups": [{"capability": "x", "scheme": {"qv": "fp32"}}], "num_heads": 1},
        {"groups": [{"capability": "x", "scheme": "bf16"}], "num_heads": 1},
        {"groups": [{"capability": "x", "launch": {"tiles": 3}}], "num_heads": 1},
        {"groups": [{"capability": "x", "launch": {"chunk_rows": None}}], "num_heads": 1},
        {"groups": [{}], "num_heads": 1},
        {"groups": [{"capability": "x"}]},
        {"groups": [{"capability": "x"}], "num_heads": 1, "colour": "red"},
    ],
    ids=str,
)
def test_what_no_plan_wrote_is_refused(data: object) -> None:
    with pytest.raises(ArgumentError, match=r"plan: expected the values that Plan.to_dict wrote"):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"method": {"kind": "low_rank", "rank": -1}},
            "^rank: expected an integer of at least 0, got -1",
        ),
        (
            {"method": {"kind": "low_rank", "value_rank": -2}},
            "^value_rank: expected an integer of at least 0, got",
        ),
        (
            {"method": {"kind": "block_sparse", "block_size": -4}},
            "^block_size: expected an integer",
        ),
        ({"method": {"kind": "block_sparse", "kept_mass": 1.5}}, r"^kept_mass: .* in \[0, 1\]"),
        ({"method": {"kind": "block_sparse", "kept_mass": float("nan")}}, "^kept_mass: .* got nan"),
        ({"launch": {"chunk_rows": -1}}, "^chunk_rows: expected an integer of at least 0, got -1"),
    ],
    ids=str,
)
def test_a_saved_number_out_of_range_is_named(words: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Plan.from_dict({"groups": [{"capability": "x", **words}], "num_heads": 1})


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowRank(rank=1.5),
        lambda: LowRank(value_rank="8"),
        lambda: BlockSparse(block_size=None),
        lambda: BlockSparse(kept_mass="0.9"),
        lambda: Launch(chunk_rows=2.0),
    ],
)
def test_parameters_of_another_type_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^\w+: expected an? (integer|number) .*, got"):
        make()


def test_each_method_has_a_class_and_its_tag_is_no_field() -> None:
    assert {kind: found.kind for kind, found in METHODS.items()} == {kind: kind for kind in Method}
    assert [dataclasses.asdict(METHODS[kind]()) for kind in Method] == [
        {},
        {"rank": 0, "value_rank": 0},
        {"block_size": 0, "kept_mass": 1.0},
    ]


def test_groups_differ_by_method_scheme_and_launch() -> None:
    changes = [
        {},
        {"method": LowRank()},
        {"method": LowRank(rank=8)},
        {"method": BlockSparse()},
        {"scheme": Scheme.of(Precision.BF16)},
        {"scheme": Scheme(pv=Precision.BF16)},
        {"scheme": Scheme(accumulate=Precision.BF16)},
        {"launch": Launch(chunk_rows=8)},
    ]
    assert len({HeadGroup(capability="x", **values) for values in changes}) == len(changes)
    assert HeadGroup(capability="x", method=Exact(), launch=Launch()) == _group()


@pytest.mark.parametrize("precision", Precision)
def test_one_format_throughout_sums_in_fp32_or_in_its_own_64_bits(precision: Precision) -> None:
    scheme = Scheme.of(precision)
    sums = Precision.FP64 if precision is Precision.FP64 else Precision.FP32
    assert (scheme.qk, scheme.pv, scheme.accumulate) == (precision, precision, sums)
    assert scheme.inputs is precision and scheme.label == precision.label
    assert scheme.keeps(precision)
    assert Scheme() == Scheme.of(Precision.FP32)


def test_a_scheme_of_several_formats_names_them_and_keeps_what_each_keeps() -> None:
    mixed = Scheme(qk=Precision.INT8, pv=Precision.FP16)
    assert mixed.label == "int8+fp16+fp32" and mixed.inputs is Precision.FP16
    assert not mixed.keeps(Precision.FP16) and not mixed.keeps(Precision.INT8)
    assert not Scheme(accumulate=Precision.FP16).keeps(Precision.FP32)
    assert Scheme(accumulate=Precision.FP16).label == "fp32+fp32+fp16"
    assert Scheme.of(Precision.FP32).keeps(Precision.FP16)
    assert not Scheme.of(Precision.FP32).keeps(Precision.FP64)


def test_a_saved_plan_that_covers_too_few_heads_says_which() -> None:
    data = {"groups": [{"capability": "x", "heads": [0]}], "num_heads": 2}
    with pytest.raises(ArgumentError, match=r"^plan heads: expected each of 0..1 once, got \[0\]"):
        Plan.from_dict(data)


def test_a_decision_becomes_json_with_every_reason() -> None:
    cost = Cost(flops=2.0, bytes_moved=3.0, workspace_bytes=4, time_ms=5.0)
    trace = (
        TraceEntry(candidate="a", accepted=True, reason="taken", heads=(1,), cost=cost),
        TraceEntry(
            candidate="b",
            accepted=False,
            reason="refused",
            why=Why.OVER_BUDGET,
            error_estimate=0.5,
        ),
    )
    decision = Decision(plan=MIXED, trace=trace, policy="speed", notes=("remark",))
    data = json.loads(json.dumps(decision.to_dict()))
    assert data["policy"] == "speed" and data["notes"] == ["remark"]
    assert Plan.from_dict(data["plan"]) == MIXED
    assert [entry["reason"] for entry in data["trace"]] == ["taken", "refused"]
    assert data["trace"][0]["cost"] == dataclasses.asdict(cost)
    assert data["trace"][0]["heads"] == [1]
    assert data["trace"][1]["error_estimate"] == 0.5
    assert [entry["why"] for entry in data["trace"]] == [Why.CHOSEN.value, Why.OVER_BUDGET.value]


def test_a_decision_that_waits_for_a_compiled_plan_tells_it_in_words() -> None:
    later = Plan(groups=(FLASH,), num_heads=4)
    words = Decision(plan=MIXED, later=later, calls_before=7).to_dict()
    assert Plan.from_dict(words["later"]) == later and words["calls_before"] == 7
    plain = Decision(plan=MIXED).to_dict()
    assert plain["later"] is None and plain["calls_before"] == 0


def test_a_decision_without_a_trace_or_a_policy_prints_too() -> None:
    assert str(Decision(plan=MIXED)) == "policy none (error budget 0.05)"


@given(
    budget=st.floats(0, 1, exclude_max=True),
    memory=st.none() | st.integers(0, 1 << 60),
    methods=st.sets(st.sampled_from(Method)).map(lambda found: (Method.EXACT, *sorted(found))),
    precisions=st.lists(st.sampled_from(Precision)).map(tuple),
    ranks=st.lists(st.integers(1, 1 << 20)).map(tuple),
    rows=st.integers(0, 1 << 20),
    check=st.sampled_from(["sampled", "always"]),
    heads=st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 99), st.floats(0, 1, exclude_max=True))
    ).map(tuple),
    text=st.text(),
)
def test_a_policy_comes_back_from_json_as_it_was(
    budget: float,
    memory: int | None,
    methods: tuple[Method, ...],
    precisions: tuple[Precision, ...],
    ranks: tuple[int, ...],
    rows: int,
    check: str,
    heads: tuple[tuple[int, int, float], ...],
    text: str,
) -> None:
    policy = Policy(
        name=text,
        error_budget=budget,
        memory_budget_bytes=memory,
        methods=methods,
        precisions=precisions,
        ranks=ranks,
        audit_rows=rows,
        check=check,
        head_budgets=heads,
        provenance=text,
    )
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"error_budget": -0.1}, ArgumentError, r"error_budget: expected a number in \[0, 1\)"),
        ({"error_budget": 1.0}, ArgumentError, r"error_budget: .* got 1.0"),
        ({"error_budget": float("nan")}, ArgumentError, "error_budget: .* got nan"),
        ({"error_budget": float("inf")}, ArgumentError, "error_budget: .* got inf"),
        ({"error_budget": "0.1"}, ArgumentTypeError, "error_budget: .* got '0.1'"),
        ({"error_budget": None}, ArgumentTypeError, "error_budget: .* got None"),
        (
            {"memory_budget_bytes": -1},
            ArgumentError,
            "memory_budget_bytes: expected an integer of at least 0",
        ),
        (
            {"memory_budget_bytes": 1e9},
            ArgumentTypeError,
            "expected an integer .*, got 1000000000.0",
        ),
        ({"memory_budget_bytes": "1GB"}, ArgumentTypeError, "expected an integer .*, got '1GB'"),
        ({"check": "never"}, ArgumentError, "check: expected 'sampled' or 'always', got 'never'"),
        ({"check": True}, ArgumentError, "check: .* got True"),
        (
            {"audit_rows": -1},
            ArgumentError,
            "audit_rows: expected an integer of at least 0, got -1",
        ),
        ({"audit_rows": 2.5}, ArgumentTypeError, "audit_rows: expected an integer .*, got 2.5"),
        ({"methods": (Method.LOW_RANK,)}, ArgumentError, "methods: .* with Method.EXACT in it"),
        ({"methods": ()}, ArgumentError, "methods: .* with Method.EXACT in it"),
        ({"methods": [Method.EXACT]}, ArgumentTypeError, "a tuple of adaattn.Method, or of"),
        ({"methods": (Method.EXACT, "low")}, ArgumentTypeError, "a tuple of adaattn.Method, or of"),
        ({"precisions": ("bf17",)}, ArgumentTypeError, "a tuple of adaattn.Precision, or of"),
        ({"precisions": [Precision.BF16]}, ArgumentTypeError, "a tuple of adaattn.Precision"),
        ({"ranks": (0,)}, ArgumentError, r"ranks: expected integers of at least 1, got \(0,\)"),
        ({"ranks": (8, -8)}, ArgumentError, "ranks: expected integers of at least 1"),
        ({"ranks": [8]}, ArgumentTypeError, r"ranks: expected a tuple of integers, got \[8\]"),
        ({"ranks": 8}, ArgumentTypeError, "ranks: expected a tuple of integers, got 8"),
        ({"ranks": (8.0,)}, ArgumentTypeError, "ranks: expected a tuple of integers"),
        ({"ranks": (True,)}, ArgumentTypeError, "ranks: expected a tuple of integers"),
        ({"head_budgets": [(0, 0, 0.1)]}, ArgumentTypeError, "head_budgets: expected a tuple, got"),
        ({"head_budgets": ((0, 0),)}, ArgumentTypeError, r"tuples \(layer, head, error_budget\)"),
        ({"head_budgets": ([0, 0, 0.1],)}, ArgumentTypeError, r"tuples \(layer, head, error_bud"),
        ({"head_budgets": ((-1, 0, 0.1),)}, ArgumentError, "layer of head_budgets: .* got -1"),
        ({"head_budgets": ((0, 0.5, 0.1),)}, ArgumentTypeError, "head of head_budgets: .* 0.5"),
        (
            {"head_budgets": ((2, 3, 1.5),)},
            ArgumentError,
            "error_budget of layer 2, head 3: .* 1.5",
        ),
    ],
    ids=str,
)
def test_a_policy_refuses_what_no_plan_could_honour(
    values: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Policy(**values)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"eror_budget": 0.1}, r"policy keys: expected \['audit_rows', .*, got \['eror_budget'\]"),
        ({"error_budget": 2}, "policy values: expected those of adaattn.Policy, got Argument"),
        ({"error_budget": "much"}, "policy values: .*error_budget"),
        ({"methods": ["exact", "magic"]}, "policy values: .*MAGIC"),
        ({"methods": 5}, "policy values: "),
        ({"methods": ["low_rank"]}, "policy values: .*Method.EXACT"),
        ({"precisions": [3]}, "policy values: "),
        ({"ranks": 8}, "policy values: "),
        ({"ranks": ["8"]}, "policy values: .*a tuple of integers"),
        ({"ranks": [0]}, "policy values: .*integers of at least 1"),
        ({"head_budgets": [[0, 0]]}, "policy values: "),
        ({"head_budgets": [[0, "x", 0.1]]}, "policy values: "),
        ({"head_budgets": [[0, 0, 7]]}, "policy values: .*layer 0, head 0"),
    ],
    ids=str,
)
def test_words_that_are_no_policy_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.from_dict(data)


def test_a_policy_of_words_keeps_every_default() -> None:
    assert Policy.from_dict({}) == Policy()
    assert Policy.from_dict({"methods": ["exact"]}) == Policy(methods=(Method.EXACT,))
    assert Policy.from_dict({"ranks": [4, 12]}) == Policy(ranks=(4, 12))


def test_costs_are_part_of_a_decision_in_words() -> None:
    cost = Cost(flops=2.0, bytes_moved=3.0, workspace_bytes=4, time_ms=5.0)
    words = Decision(plan=MIXED, cost=cost).to_dict()
    assert words["cost"] == {
        "flops": 2.0,
        "bytes_moved": 3.0,
        "workspace_bytes": 4,
        "time_ms": 5.0,
    }
    assert words["exact_cost"] is None
    assert Decision(plan=MIXED, cost=cost).workspace_bytes == 4
    assert Decision(plan=MIXED).workspace_bytes == 0
    assert json.loads(json.dumps(words["cost"])) == words["cost"]
