"""Every candidate once, costed where it may be used, refused with a sentence where not."""

from collections import Counter
from dataclasses import replace

import pytest

from adaattn.backends import capability_named
from adaattn.backends.block_sparse.executor import KEPT_MASSES
from adaattn.backends.chunk_rows import choose_chunk_rows, row_bytes
from adaattn.backends.sampling import BLOCK_SIZE
from adaattn.planning.candidates import (
    Candidate,
    enumerate_candidates,
    with_stats,
)
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Cost,
    Feature,
    HardwareFacts,
    HeadGroup,
    LowRank,
    Method,
    Policy,
    Precision,
    TensorStats,
    Why,
)
from adaattn.testing import fake_facts, make_errors, make_problem

FP32, BF16, FP16 = Precision.FP32, Precision.BF16, Precision.FP16
ANY = ~Feature(0)
FUSED = Capability(name="fused", backend="fused", features=ANY, is_fused=True)
NAIVE = Capability(name="naive", backend="naive", features=ANY, materialises_scores=True)
CHUNKED = Capability(
    name="chunked",
    backend="chunked",
    features=ANY,
    chunk_rows=choose_chunk_rows,
    row_bytes=row_bytes,
)
LOW_RANK = replace(capability_named("low_rank"), features=ANY)
SPARSE = replace(capability_named("block_sparse"), name="sparse", features=ANY)
ALL = (FUSED, NAIVE, CHUNKED, LOW_RANK, SPARSE)
UNMEASURED = ("nobody measured it", Why.WAITING)
LOSSY = Policy(name="lossy", error_budget=0.05)
PROBLEM = make_problem(num_heads=2, len_q=2048, head_dim=64)
A100 = fake_facts("a100")
STATS = TensorStats(
    sampled_rows=32,
    max_magnitude=1.0,
    precision_errors=((BF16, (0.004, 0.005)), (FP16, (0.0005, 0.0006))),
    method_errors=(
        *make_errors({8: (0.3, 0.4), 16: (0.04, 0.2), 32: (0.01, 0.02)}),
        *make_errors({}, {0.9: (0.06, 0.07)}, (0.1, 0.5), ("", "sparse")),
        *make_errors({}, {0.97: (0.03, 0.04)}, (0.2, 0.6), ("", "sparse")),
    ),
)


def _enumerate(
    problem: AttentionProblem = PROBLEM,
    hardware: HardwareFacts = A100,
    policy: Policy = LOSSY,
    capabilities: tuple[Capability, ...] = ALL,
) -> dict[str, Candidate]:
    found = enumerate_candidates(problem, hardware, policy, capabilities)
    counts = Counter(item.name for item in found)
    assert set(counts.values()) == {1}, counts
    return {item.name: item for item in found}


def _judge(
    stats: TensorStats = STATS,
    *,
    budgets: tuple[float, ...] = (0.05, 0.05),
    hardware: HardwareFacts = A100,
    problem: AttentionProblem = PROBLEM,
) -> dict[str, Candidate]:
    found = enumerate_candidates(problem, hardware, LOSSY, ALL)
    judged = with_stats(found, problem, stats, hardware, LOSSY, budgets, lambda item: UNMEASURED)
    return {item.name: item for item in judged}


def test_each_way_appears_once_in_each_usable_format() -> None:
    labels = ("fp32", "fp16", "bf16")
    expected = {f"fused/{label}" for label in labels}
    expected |= {f"chunked/{label}" for label in labels}
    expected |= {"naive/fp32"}
    expected |= {f"low_rank/{p} rank={r},{r}" for p in labels for r in (8, 16, 32)}
    expected |= {f"sparse/{p} mass={mass:g}" for p in labels for mass in KEPT_MASSES}
    found = _enumerate()
    assert set(found) == expected
    assert all(item.cost and not item.refusal for item in found.values())


@pytest.mark.parametrize("machine", ["h200", "v100", "pascal", "cpu", "cpu_amx"])
@pytest.mark.parametrize("budget", [0.0, 0.05])
@pytest.mark.parametrize("values", [{}, {"softcap": 3.0}, {"lengths_q": (3, 5)}, {"batch": 0}])
def test_the_real_executors_appear_once_too(
    executors: tuple[Capability, ...], machine: str, budget: float, values: dict[str, object]
) -> None:
    facts = fake_facts(machine)
    problem = make_problem(**{"device_type": facts.device_type, **values})
    found = _enumerate(problem, facts, Policy(error_budget=budget), executors)
    assert {item.capability.name for item in found.values()} - {"any executor"} == {
        item.name for item in executors
    }
    lower = {
        item.group.scheme.inputs for item in found.values() if item.group.scheme.inputs is not FP32
    }
    assert lower == {BF16, FP16}


def test_a_capability_that_cannot_serve_appears_once_with_all_its_reasons() -> None:
    lame = replace(SPARSE, features=Feature(0), device_types=("cuda",))
    found = _enumerate(replace(PROBLEM, softcap=2.0, dropout_p=0.5), capabilities=(FUSED, lame))
    assert found["sparse/fp32"].refusal == (
        "it runs on cuda, the tensors are on cpu; it does not support softcap; "
        "it does not support dropout"
    )
    assert found["sparse/fp32"].cost is None
    assert found["sparse/fp32"].time_ms == float("inf")
    assert found["sparse/fp32"].workspace_bytes == 0


def test_a_method_that_the_policy_leaves_out_says_so() -> None:
    policy = Policy(
        name="sparse only", error_budget=0.1, methods=(Method.EXACT, Method.BLOCK_SPARSE)
    )
    found = _enumerate(policy=policy)
    assert found["low_rank/fp32"].refusal == "policy 'sparse only' does not use this method"
    assert not found["sparse/fp32 mass=0.9"].refusal


@pytest.mark.parametrize("dims", [(8, 8), (4, 64), (64, 4)])
def test_head_dimensions_too_small_for_any_rank_are_a_reason_and_not_an_absence(
    dims: tuple[int, int],
) -> None:
    """The capability once vanished from the trace instead."""
    found = _enumerate(replace(PROBLEM, head_dim=dims[0], value_dim=dims[1]))
    assert found["low_rank/fp32"].refusal == (
        "expected head dimensions and ranks for which it gains something, "
        f"got D {dims[0]}, Dv {dims[1]}"
    )


def test_a_listed_format_that_no_executor_takes_is_refused_and_not_ignored() -> None:
    """It was once left out of the trace, as if the policy had not asked for it."""
    policy = replace(LOSSY, precisions=(Precision.FP8_E4M3, BF16))
    found = _enumerate(hardware=fake_facts("h200"), policy=policy)
    assert found["any executor/fp8_e4m3"].refusal == (
        "no executor that can serve this call takes it and gains"
    )
    assert "any executor/bf16" not in found
    only_naive = _enumerate(policy=replace(LOSSY, precisions=(BF16,)), capabilities=(NAIVE,))
    assert only_naive["any executor/bf16"].refusal.startswith("no executor that can serve")


def test_lower_formats_are_tried_from_the_most_accurate_on() -> None:
    found = enumerate_candidates(PROBLEM, A100, LOSSY, (FUSED,))
    assert [item.group.scheme.inputs for item in found] == [FP32, FP16, BF16]


def test_a_format_that_the_executor_does_not_take_is_not_tried_with_it() -> None:
    half = replace(FUSED, precisions=(FP32, BF16))
    found = _enumerate(capabilities=(half, CHUNKED))
    assert {name for name in found if name.startswith("fused")} == {"fused/fp32", "fused/bf16"}


def test_sparse_candidates_name_their_block_and_chunked_ones_their_rows() -> None:
    found = _enumerate()
    assert {
        found[f"sparse/fp32 mass={mass:g}"].group.method.block_size for mass in KEPT_MASSES
    } == {BLOCK_SIZE}
    assert found["chunked/fp32"].group.launch.chunk_rows == 1024
    tight = _enumerate(policy=replace(LOSSY, memory_budget_bytes=4 << 20))
    assert tight["chunked/fp32"].group.launch.chunk_rows == 64
    assert not tight["chunked/fp32"].refusal


@pytest.mark.parametrize(
    ("budget", "refusal"),
    [
        (0, "expected at most 0 bytes of workspace, got 64.02 MiB"),
        (1, "expected at most 1 byte of workspace, got 64.02 MiB"),
        (100, "expected at most 100 bytes of workspace, got 64.02 MiB"),
        (5 << 10, "expected at most 5 KiB of workspace, got 64.02 MiB"),
        (3 << 20, "expected at most 3 MiB of workspace, got 64.02 MiB"),
        (1 << 30, ""),
    ],
)
def test_too_much_workspace_is_refused_in_units_that_people_read(budget: int, refusal: str) -> None:
    """A budget of 0 bytes was once taken for no limit."""
    found = _enumerate(policy=replace(LOSSY, memory_budget_bytes=budget))
    assert found["naive/fp32"].refusal == refusal
    assert found["naive/fp32"].cost is not None


def test_without_a_budget_the_devices_memory_is_the_limit_where_it_is_known() -> None:
    small = replace(A100, memory_bytes=1 << 30)
    long = replace(PROBLEM, len_q=65536, len_k=65536)
    found = _enumerate(long, small)
    assert found["naive/fp32"].refusal == "expected at most 1 GiB of workspace, got 64 GiB"
    assert not _enumerate(long, replace(A100, memory_bytes=0))["naive/fp32"].refusal


def test_measured_errors_and_densities_are_those_of_the_very_group() -> None:
    judged = _judge()
    assert judged["fused/fp32"].errors == ()
    assert judged["fused/fp16"].errors == (0.0005, 0.0006)
    assert judged["low_rank/fp32 rank=32,32"].errors == (0.01, 0.02)
    assert judged["low_rank/bf16 rank=32,32"].errors == pytest.approx((0.014, 0.025))
    sparse = judged["sparse/fp16 mass=0.97"]
    assert sparse.densities == (0.2, 0.6)
    assert sparse.errors == pytest.approx((0.0305, 0.0406))
    assert sparse.density(0) == 0.2 and judged["fused/fp32"].density(0) == 1.0


def test_a_head_that_keeps_more_blocks_costs_more() -> None:
    judged = _judge()
    sparse = judged["sparse/fp32 mass=0.97"]
    assert sparse.head_ms(0) < sparse.head_ms(1)
    fused = judged["fused/fp32"]
    assert fused.head_ms(0) == fused.head_ms(1) == fused.time_ms / 2


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("low_rank/fp32 rank=8,8", "expected an error of at most 0.05, got 0.3 to 0.4 over heads"),
        ("sparse/fp32 mass=0.9", "expected an error of at most 0.05, got 0.06 to 0.07 over heads"),
        ("sparse/fp32 mass=0.99", "nobody measured it"),
        ("low_rank/fp32 rank=16,16", ""),
    ],
)
def test_a_candidate_is_refused_only_if_no_head_may_use_it(name: str, refusal: str) -> None:
    assert _judge()[name].refusal == refusal


def test_an_executor_that_predicts_says_itself_why_nobody_measured() -> None:
    """All others have the reason that planning gives, whose code may be another one."""
    judged = _judge(replace(STATS, precision_errors=STATS.precision_errors[:1]))
    for name in ("sparse/fp32 mass=0.99", "fused/fp16", "low_rank/fp16 rank=16,16"):
        assert (judged[name].refusal, judged[name].why) == UNMEASURED
    tells = replace(LOW_RANK, why_unmeasured=lambda *_: "predicted to lose too much")
    stats = replace(STATS, method_errors=())
    found = enumerate_candidates(PROBLEM, A100, LOSSY, (FUSED, tells))
    told = with_stats(found, PROBLEM, stats, A100, LOSSY, (0.05, 0.05), lambda item: UNMEASURED)
    low = {item.name: item for item in told}["low_rank/fp32 rank=8,8"]
    assert (low.refusal, low.why) == ("predicted to lose too much", Why.UNMEASURED)


def test_one_error_of_all_heads_is_said_once() -> None:
    stats = replace(STATS, method_errors=make_errors({8: (0.3, 0.3)}))
    judged = _judge(stats)["low_rank/fp32 rank=8,8"]
    assert judged.refusal == "expected an error of at most 0.05, got 0.3"


def test_an_error_that_is_no_number_is_over_every_budget() -> None:
    nan = float("nan")
    stats = replace(STATS, method_errors=make_errors({8: (nan, nan)}))
    assert "got nan" in _judge(stats)["low_rank/fp32 rank=8,8"].refusal


def test_each_head_is_held_to_its_own_budget() -> None:
    judged = _judge(budgets=(0.001, 0.05))["low_rank/fp32 rank=32,32"]
    assert [judged.allows(head) for head in range(2)] == [False, True]


def test_a_budget_of_0_allows_nothing_not_even_an_estimate_of_0() -> None:
    """An estimate of 0 on sampled rows is no proof, and a budget of 0 is the exact path."""
    stats = replace(STATS, method_errors=make_errors({8: (0.0, 0.0)}))
    assert _judge(stats, budgets=(0.0, 0.1))["low_rank/fp32 rank=8,8"].allows(1)
    assert not _judge(stats, budgets=(0.0, 0.1))["low_rank/fp32 rank=8,8"].allows(0)
    refused = _judge(stats, budgets=(0.0, 0.0))["low_rank/fp32 rank=8,8"]
    assert refused.refusal == "it approximates, and the error budget is 0"


def test_a_format_refused_for_its_range_refuses_every_candidate_that_uses_it() -> None:
    judged = _judge(replace(STATS, max_magnitude=50000.0))
    fp16 = [item for item in judged.values() if item.group.scheme.inputs is FP16]
    assert {item.refusal for item in fp16} == {"elements reach 5e+04; fp16 is safe up to 32752"}
    assert not judged["fused/bf16"].refusal


def test_what_was_refused_before_measuring_keeps_its_reason() -> None:
    found = enumerate_candidates(PROBLEM, fake_facts("cpu"), LOSSY, ALL)
    judged = _judge(hardware=fake_facts("cpu"))
    refused = {item.name: item.refusal for item in found if item.refusal}
    assert set(refused) == {"any executor/bf16", "any executor/fp16"}
    assert {name: judged[name].refusal for name in refused} == refused


def test_the_errors_of_parameters_that_were_not_measured_are_unknown() -> None:
    found = STATS.errors_of("low_rank", LowRank(rank=16, value_rank=16))
    assert found is not None and found.errors == (0.04, 0.2)
    assert STATS.errors_of("low_rank", LowRank(rank=16, value_rank=32)) is None


def test_a_candidate_without_heads_shares_its_time_among_none() -> None:
    cost = Cost(flops=0.0, bytes_moved=0.0, workspace_bytes=7, time_ms=2.0)
    group = HeadGroup(capability="fused")
    item = Candidate(group=group, capability=FUSED, cost=cost, num_heads=0)
    assert item.head_ms(0) == 2.0 and item.workspace_bytes == 7
