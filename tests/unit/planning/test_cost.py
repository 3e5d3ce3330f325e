"""The cost model: pairs counted exactly, work that grows where there is more of it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.backends import capability_named
from adaattn.backends.block_sparse.cost import SELECTION_STRIDE
from adaattn.backends.chunk_rows import row_bytes
from adaattn.planning import measuring_cost_ms
from adaattn.planning.cost import (
    computed_pairs,
    estimate,
    measuring_ms,
)
from adaattn.spec import (
    Align,
    AttentionProblem,
    BlockSparse,
    Capability,
    HardwareFacts,
    HeadGroup,
    Launch,
    LowRank,
    MaskKind,
    Method,
    Overhead,
    Policy,
    Precision,
    Rates,
    Scheme,
)
from adaattn.testing import fake_facts, make_problem

FUSED = Capability(name="fused", backend="x", is_fused=True, skips_hidden=True)
NAIVE = Capability(name="naive", backend="x", materialises_scores=True, num_launches=8)
COPIES = replace(FUSED, name="copies", expands_kv=True)
CHUNKED = Capability(
    name="chunked", backend="chunked", skips_hidden=True, num_launches=14, row_bytes=row_bytes
)
LOW_RANK = capability_named("low_rank")
SPARSE = capability_named("block_sparse")
GROUPED = replace(FUSED, name="grouped", min_group_size=2, max_len_q=8)

EXACT = HeadGroup(capability="any")
RANK = replace(EXACT, method=LowRank(rank=16, value_rank=16))
BLOCKS = replace(EXACT, method=BlockSparse(block_size=64, kept_mass=0.9))
CHUNKS = replace(EXACT, launch=Launch(chunk_rows=64))

WAYS = [
    (FUSED, EXACT),
    (NAIVE, EXACT),
    (COPIES, EXACT),
    (CHUNKED, CHUNKS),
    (LOW_RANK, RANK),
    (SPARSE, BLOCKS),
    (FUSED, replace(EXACT, scheme=Scheme.of(Precision.BF16))),
]
MACHINES = ("h200", "a100", "v100", "pascal", "cpu", "cpu_amx")

LENGTHS = st.integers(0, 9)
EDGES = st.integers(-1, 11)
ALIGNS = st.sampled_from(Align)


def _problem(**values: object) -> AttentionProblem:
    return make_problem(
        **{"num_heads": 8, "num_kv_heads": 2, "len_q": 1024, "head_dim": 64, **values}
    )


def _counted(problem: AttentionProblem) -> int:
    """Visible pairs of one head, one by one."""
    left, right = problem.window
    count = 0
    for row in range(problem.len_q):
        position = row + problem.offset
        for key in range(problem.len_k):
            ahead = key - position
            count += not (
                (problem.is_causal and ahead > 0)
                or (left >= 0 and -ahead > left)
                or (right >= 0 and ahead > right)
                or ahead % problem.dilation
            )
    return count


@settings(max_examples=600, deadline=None)
@given(len_q=LENGTHS, len_k=LENGTHS, causal=st.booleans(), align=ALIGNS, left=EDGES, right=EDGES)
def test_visible_pairs_are_counted_exactly(
    len_q: int, len_k: int, causal: bool, align: Align, left: int, right: int
) -> None:
    problem = make_problem(
        len_q=len_q, len_k=len_k, is_causal=causal, align=align, window=(left, right)
    )
    assert problem.visible_pairs == _counted(problem)


@settings(max_examples=300, deadline=None)
@given(len_q=LENGTHS, len_k=LENGTHS, causal=st.booleans(), left=EDGES, dilation=st.integers(2, 4))
def test_visible_pairs_under_dilation_are_within_one_a_row(
    len_q: int, len_k: int, causal: bool, left: int, dilation: int
) -> None:
    problem = make_problem(
        len_q=len_q, len_k=len_k, is_causal=causal, window=(left, -1), dilation=dilation
    )
    assert abs(problem.visible_pairs - _counted(problem)) <= len_q


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 40.0),
        ({"is_causal": True}, 20.0),
        ({"window": (1, 1)}, 24.0),
        ({"window": (1, -1)}, 40.0),
        ({"window": (0, -1), "is_causal": True}, 8.0),
        ({"window": (6, 6)}, 40.0),
        ({"dilation": 2}, 20.0),
    ],
)
def test_pairs_of_packed_sequences_are_bounded_by_the_longest_and_not_the_whole_tensor(
    values: dict[str, object], expected: float
) -> None:
    """A window open to the right was once counted as if it ended at the row itself."""
    assert make_problem(lengths_q=(3, 5), **values).visible_pairs == expected


def test_an_executor_that_does_not_skip_works_through_hidden_pairs_too() -> None:
    causal = make_problem(len_q=8, is_causal=True)
    assert computed_pairs(causal, FUSED) == 36
    assert computed_pairs(causal, NAIVE) == 64
    packed = make_problem(lengths_q=(3, 5), is_causal=True)
    assert computed_pairs(packed, FUSED) == 20
    assert computed_pairs(packed, NAIVE) == 40


@pytest.mark.parametrize(("capability", "group"), WAYS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "larger",
    [
        {"batch": 2},
        {"num_heads": 16, "num_kv_heads": 4},
        {"len_q": 2048, "len_k": 1024},
        {"len_k": 2048},
        {"head_dim": 128},
        {"value_dim": 128},
        {"requires_grad": True},
    ],
    ids=str,
)
def test_a_larger_problem_never_costs_less(
    machine: str, capability: Capability, group: HeadGroup, larger: dict[str, object]
) -> None:
    facts = fake_facts(machine)
    values = {"value_dim": 64, "device_type": facts.device_type}
    small = estimate(_problem(**values), capability, group, facts)
    large = estimate(_problem(**values | larger), capability, group, facts)
    assert large.flops > small.flops
    assert large.bytes_moved > small.bytes_moved
    assert large.workspace_bytes >= small.workspace_bytes
    assert large.time_ms >= small.time_ms


@pytest.mark.parametrize("machine", MACHINES)
def test_keeping_fewer_blocks_or_columns_costs_less(machine: str) -> None:
    facts = fake_facts(machine)
    problem = _problem(len_q=8192, device_type=facts.device_type)
    by_density = [
        estimate(problem, SPARSE, BLOCKS, facts, density=share) for share in (0.1, 0.3, 1.0)
    ]
    by_rank = [
        estimate(
            problem, LOW_RANK, replace(RANK, method=LowRank(rank=rank, value_rank=rank)), facts
        )
        for rank in (8, 16, 32)
    ]
    for costs in (by_density, by_rank):
        for field in ("flops", "workspace_bytes", "time_ms"):
            values = [getattr(cost, field) for cost in costs]
            assert values == sorted(values) and len(set(values)) == len(values), field


@pytest.mark.parametrize("machine", MACHINES)
def test_what_hides_keys_saves_time_for_those_who_skip_them(machine: str) -> None:
    facts = fake_facts(machine)
    values = {"len_q": 8192, "device_type": facts.device_type}
    full, causal, window = (
        estimate(_problem(**values | more), FUSED, EXACT, facts).time_ms
        for more in ({}, {"is_causal": True}, {"is_causal": True, "window": (127, -1)})
    )
    assert window < causal < full
    naive = [
        estimate(_problem(**values, is_causal=causal), NAIVE, EXACT, facts)
        for causal in (False, True)
    ]
    assert naive[0] == naive[1]


def test_the_products_and_the_traffic_of_a_plain_call_are_those_of_the_formulas() -> None:
    problem = _problem(num_kv_heads=8)
    cost = estimate(problem, FUSED, EXACT, fake_facts("h200"))
    assert cost.flops == 2 * 1024 * 1024 * (64 + 64) * 8
    assert cost.bytes_moved == 4 * 8 * (1024 + 1024) * (64 + 64)
    assert cost.workspace_bytes == 4 * 8 * 1024
    backward = estimate(replace(problem, requires_grad=True), FUSED, EXACT, fake_facts("h200"))
    assert backward.flops == 3.5 * cost.flops
    assert backward.bytes_moved == 2 * cost.bytes_moved


@pytest.mark.parametrize(
    ("capability", "group", "extra"),
    [
        (FUSED, EXACT, 0),
        (NAIVE, EXACT, 2 * 4 * 8 * 1024 * 1024),
        (COPIES, EXACT, 4 * 8 * 1024 * (64 + 64)),
        (CHUNKED, CHUNKS, 3 * 4 * 8 * 64 * 1024),
        (CHUNKED, replace(CHUNKS, launch=Launch(chunk_rows=4096)), 3 * 4 * 8 * 1024 * 1024),
        (FUSED, replace(EXACT, scheme=Scheme.of(Precision.BF16)), 2 * (8 + 2) * 1024 * (64 + 64)),
        (LOW_RANK, RANK, 4 * (8 + 2) * 1024 * (16 + 16)),
        (LOW_RANK, replace(RANK, method=LowRank(rank=16)), 4 * (8 + 2) * 1024 * (16 + 64)),
        (
            SPARSE,
            BLOCKS,
            2 * 4 * 8 * math.ceil(1024 / SELECTION_STRIDE) * 1024 + 2 * 8 * 1024 * (64 + 64) * 4,
        ),
    ],
)
def test_workspace_is_the_row_statistics_and_what_the_way_allocates(
    capability: Capability, group: HeadGroup, extra: int
) -> None:
    cost = estimate(_problem(), capability, group, fake_facts("cpu"))
    assert cost.workspace_bytes == 4 * 8 * 1024 + extra


@pytest.mark.parametrize(
    ("mask", "shape", "extra"),
    [
        (MaskKind.BOOLEAN, (1, 1, 1024, 1024), 1024 * 1024),
        (MaskKind.ADDITIVE, (1, 8, 1024, 1024), 4 * 8 * 1024 * 1024),
        (MaskKind.ADDITIVE, (1, 1, 1, 1024), 4 * 1024),
    ],
)
def test_a_mask_is_read_once_in_its_own_size(
    mask: MaskKind, shape: tuple[int, ...], extra: int
) -> None:
    facts = fake_facts("cpu")
    plain = estimate(_problem(), FUSED, EXACT, facts)
    masked = estimate(_problem(mask=mask, mask_shape=shape), FUSED, EXACT, facts)
    assert masked.bytes_moved - plain.bytes_moved == extra


def test_copying_keys_for_each_query_head_costs_traffic_only_where_heads_share_them() -> None:
    facts = fake_facts("a100")
    shared = [estimate(_problem(), item, EXACT, facts).bytes_moved for item in (FUSED, COPIES)]
    own = [
        estimate(_problem(num_kv_heads=8), item, EXACT, facts).bytes_moved
        for item in (FUSED, COPIES)
    ]
    assert shared[0] < shared[1]
    assert own[0] == own[1]


def test_smaller_chunks_take_more_launches_and_packed_sequences_their_own() -> None:
    facts = HardwareFacts(device_type="cpu", rates=Rates(launch_s=1.0))
    work = replace(facts, rates=replace(facts.rates, launch_s=0.0))

    def launches(problem: AttentionProblem, chunk_rows: int) -> float:
        group = replace(EXACT, launch=Launch(chunk_rows=chunk_rows))
        with_launches, without = (
            estimate(problem, CHUNKED, group, machine).time_ms for machine in (facts, work)
        )
        return round((with_launches - without) / 1e3 / CHUNKED.num_launches)

    assert launches(_problem(len_q=8), 0) == 1
    assert launches(_problem(len_q=8), 4) == 2
    assert launches(_problem(len_q=9), 4) == 3
    assert launches(_problem(lengths_q=(4, 4, 4)), 0) == 1
    assert launches(_problem(lengths_q=(4, 4, 4)), 2) == 6


def test_a_kernel_twice_as_efficient_takes_half_the_time() -> None:
    facts = fake_facts("h200")
    problem = _problem(len_q=16384, device_type="cuda")
    better = replace(FUSED, efficiency=2 * FUSED.efficiency)
    slow, fast = (estimate(problem, item, EXACT, facts).time_ms for item in (FUSED, better))
    launch_ms = 1e3 * facts.rates.launch_s
    assert fast - launch_ms == pytest.approx((slow - launch_ms) / 2)


def test_stored_scores_are_traffic_beside_the_tensors() -> None:
    facts = fake_facts("cpu")
    stored, fused = (estimate(_problem(), item, EXACT, facts) for item in (NAIVE, FUSED))
    assert stored.bytes_moved - fused.bytes_moved == 4 * 6 * 1024 * 1024 * 8
    assert stored.time_ms > fused.time_ms


def test_a_format_without_a_known_rate_is_taken_to_be_slow() -> None:
    facts = fake_facts("pascal")
    problem = _problem(len_q=8192, device_type="cuda")
    fp32 = estimate(problem, FUSED, EXACT, facts)
    half = replace(problem, precision=Precision.FP16)
    fp16 = estimate(half, FUSED, replace(EXACT, scheme=Scheme.of(Precision.FP16)), facts)
    assert fp16.time_ms > fp32.time_ms


@pytest.mark.parametrize(
    ("machine", "group_size", "faster"),
    [("cpu", 8, "grouped"), ("cpu_amx", 8, "grouped"), ("h200", 8, "fused")],
)
def test_decoding_is_estimated_to_go_to_the_way_that_reads_keys_best(
    machine: str, group_size: int, faster: str
) -> None:
    facts = fake_facts(machine)
    problem = _problem(
        len_q=1,
        len_k=8192,
        num_heads=32,
        num_kv_heads=32 // group_size,
        device_type=facts.device_type,
    )
    times = {item.name: estimate(problem, item, EXACT, facts).time_ms for item in (FUSED, GROUPED)}
    assert min(times, key=times.__getitem__) == faster


def test_decoding_is_bound_by_memory_and_not_by_products() -> None:
    facts = fake_facts("cpu")
    times = [
        estimate(_problem(len_q=rows, len_k=4096), FUSED, EXACT, facts).time_ms for rows in (1, 8)
    ]
    bytes_moved = [
        estimate(_problem(len_q=rows, len_k=4096), FUSED, EXACT, facts).bytes_moved
        for rows in (1, 8)
    ]
    launch_ms = 1e3 * facts.rates.launch_s
    ratio = (times[1] - launch_ms) / (times[0] - launch_ms)
    assert ratio == pytest.approx(bytes_moved[1] / bytes_moved[0])


def test_measuring_costs_more_with_rows_variants_keys_and_heads() -> None:
    facts = fake_facts("cpu")
    base = measuring_ms(_problem(), facts, 32, 4)
    assert base < measuring_ms(_problem(), facts, 64, 4)
    assert base < measuring_ms(_problem(), facts, 32, 8)
    assert base < measuring_ms(_problem(len_k=2048), facts, 32, 4)
    assert base < measuring_ms(_problem(num_heads=16), facts, 32, 4)


@pytest.mark.parametrize(("capability", "group"), WAYS)
def test_a_device_of_unknown_rates_gives_finite_times(
    capability: Capability, group: HeadGroup
) -> None:
    unknown = HardwareFacts(device_type="cpu")
    for values in ({}, {"len_q": 1}, {"num_heads": 0, "num_kv_heads": 0}, {"len_k": 0}):
        cost = estimate(_problem(**values), capability, group, unknown)
        assert 0 <= cost.time_ms < float("inf")
    assert measuring_ms(_problem(), unknown, 32, 4) < float("inf")


@pytest.mark.parametrize(
    ("field", "amount", "changed"),
    [
        ("flops", 1e12, {"flops", "time_ms"}),
        ("bytes_moved", 1e12, {"bytes_moved", "time_ms"}),
        ("workspace_bytes", 1000, {"workspace_bytes"}),
        ("launches", 7, {"time_ms"}),
        ("seconds", 1.0, {"time_ms"}),
        ("flops_in_seconds", 1e12, {"flops"}),
    ],
)
def test_what_an_executor_takes_besides_is_counted_once(
    field: str, amount: float, changed: set[str]
) -> None:
    facts = fake_facts("cpu")
    more = replace(LOW_RANK, overhead=lambda *given: Overhead(**{field: amount}))
    bare = replace(LOW_RANK, overhead=lambda *given: Overhead())
    plain, full = (estimate(_problem(), item, RANK, facts) for item in (bare, more))
    names = ("flops", "bytes_moved", "workspace_bytes", "time_ms")
    assert {name for name in names if getattr(full, name) != getattr(plain, name)} == changed
    added = {
        "flops": amount / facts.rates.flops_of(Precision.FP32),
        "bytes_moved": amount / facts.rates.bandwidth,
        "launches": amount * facts.rates.launch_s,
        "seconds": amount,
    }
    if field in ("launches", "seconds"):
        assert 1e-3 * (full.time_ms - plain.time_ms) == pytest.approx(added[field])
    elif field in added:
        assert 1e-3 * full.time_ms >= added[field]


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_low_rank_pays_for_gram_matrices_eigenproblems_and_a_whole_backward_pass(
    machine: str,
) -> None:
    facts = fake_facts(machine)
    problem = _problem(num_kv_heads=4, device_type=facts.device_type)
    forward = LOW_RANK.overhead(problem, RANK, facts, 1.0)
    tokens, keys, dim, rank = 8 * 1024 + 4 * 1024, 4 * 1024, 64, 16
    assert forward.flops == 2 * tokens * dim * (dim + 2 * rank) + 2 * keys * dim * dim
    assert forward.bytes_moved == 4 * 4 * tokens * dim
    assert forward.workspace_bytes == 4 * tokens * 2 * rank
    assert forward.launches == 60 and forward.flops_in_seconds == 0
    assert forward.seconds > 0
    more_heads = replace(problem, num_heads=16, num_kv_heads=8)
    eigen = LOW_RANK.overhead(more_heads, RANK, facts, 1.0).seconds
    assert eigen == pytest.approx(2 * forward.seconds)
    training = LOW_RANK.overhead(replace(problem, requires_grad=True), RANK, facts, 1.0)
    whole = 2.5 * 2 * 1024 * 1024 * (64 + 64) * 8
    assert training.flops_in_seconds == whole
    share = 0.55 if machine == "cpu" else 0.275
    assert training.seconds - forward.seconds == pytest.approx(
        whole / (share * facts.rates.matrix_flops_of(Precision.FP32))
    )
    exact = estimate(replace(problem, requires_grad=True), FUSED, EXACT, facts).flops
    low = estimate(replace(problem, requires_grad=True), LOW_RANK, RANK, facts).flops
    assert whole < low < exact


def test_block_sparsity_pays_for_scored_rows_and_gathered_blocks() -> None:
    problem, facts = _problem(), fake_facts("cpu")
    pairs = 1024 * 1024
    none, half = (SPARSE.overhead(problem, BLOCKS, facts, share) for share in (0.0, 0.5))
    assert none.flops == half.flops == 2 * pairs * 64 * 8 * 5 / 64
    assert none.bytes_moved == 4 * 6 * pairs * 8 * 5 / 64
    assert half.bytes_moved - none.bytes_moved == 2 * 0.5 * pairs / 64 * 128 * 8 * 4
    assert half.workspace_bytes - none.workspace_bytes == 2 * 0.5 * 8 * 1024 * 128 * 4
    assert none.launches == 12 * 16 + 20


@pytest.mark.parametrize(
    ("methods", "computations"),
    [
        ((Method.EXACT,), 2),
        ((Method.LOW_RANK,), 5),
        ((Method.BLOCK_SPARSE,), 8),
        ((Method.EXACT, Method.LOW_RANK, Method.BLOCK_SPARSE), 15),
    ],
)
def test_measuring_costs_what_each_method_takes(
    methods: tuple[Method, ...], computations: int
) -> None:
    problem, facts, policy = _problem(), fake_facts("cpu"), Policy(error_budget=0.1)
    wanted = [(method, Precision.BF16) for method in methods for _ in range(2)]
    able = (FUSED, NAIVE, LOW_RANK, SPARSE)
    found = measuring_cost_ms(problem, facts, policy, able, wanted)
    assert found == measuring_ms(problem, facts, policy.audit_rows, computations)
    twice = measuring_cost_ms(problem, facts, policy, (*able, replace(LOW_RANK, name="b")), wanted)
    more = 5 * (Method.LOW_RANK in methods)
    assert twice == measuring_ms(problem, facts, policy.audit_rows, computations + more)
