"""What became of each candidate, said in one sentence with the numbers that decided."""

from dataclasses import replace

import pytest

from adaattn.planning.candidates import Candidate
from adaattn.planning.trace import format_ms, trace_of
from adaattn.spec import (
    Capability,
    Cost,
    Decision,
    HeadGroup,
    LowRank,
    Measured,
    Plan,
    Precision,
    Scheme,
    Why,
)

NUM_HEADS = 4


def _candidate(name: str, time_ms: float, **values: object) -> Candidate:
    return Candidate(
        **{
            "group": HeadGroup(capability=name),
            "capability": Capability(name=name, backend=name),
            "cost": Cost(flops=1.0, bytes_moved=1.0, workspace_bytes=64, time_ms=time_ms),
            "num_heads": NUM_HEADS,
            **values,
        }
    )


def _lossy(name: str, time_ms: float, errors: tuple[float, ...], **values: object) -> Candidate:
    group = HeadGroup(capability=name, method=LowRank(rank=8))
    budgets = (0.05,) * NUM_HEADS
    return _candidate(name, time_ms, group=group, errors=errors, budgets=budgets, **values)


EXACT = _candidate("fused", 8.0)
SLOW = _candidate("naive", 20.0)
REFUSED = _candidate("flex", 0.0, cost=None, refusal="it runs on cuda, the tensors are on cpu")
LOW = _lossy("low_rank", 4.0, (0.01, 0.02, 0.01, 0.03))


WHY = "what PyTorch would run"


def _reasons(
    judged: list[Candidate], chosen: list[Candidate], exact: Candidate | None
) -> list[str]:
    entries = trace_of(judged, chosen, exact, WHY)
    assert [entry.candidate for entry in entries] == [item.name for item in judged]
    return [entry.reason for entry in entries]


def test_the_exact_path_taken_for_all_heads() -> None:
    taken, slow, refused = trace_of([EXACT, SLOW, REFUSED], [EXACT] * NUM_HEADS, EXACT, WHY)
    assert (taken.accepted, slow.accepted, refused.accepted) == (True, False, False)
    assert taken.reason == "taken for all heads: 8 ms (estimated), what PyTorch would run"
    assert (
        slow.reason
        == "nobody measured that it is faster here: 20 ms (estimated), fused/fp32 8 ms (estimated)"
    )
    assert refused.reason == "it runs on cuda, the tensors are on cpu"
    assert taken.heads == () and taken.cost == EXACT.cost and taken.error_estimate is None
    assert refused.cost is None


def test_an_exact_path_that_is_not_quite_the_fastest_does_not_claim_to_be() -> None:
    faster = _candidate("faster", 7.5)
    taken, other = _reasons([EXACT, faster], [EXACT] * NUM_HEADS, EXACT)
    assert taken == ("taken for all heads: 8 ms (estimated), what PyTorch would run")
    assert other.startswith("nobody measured that it is faster here: 7.5 ms (estimated)")


def test_what_is_waited_for_is_what_others_are_compared_with() -> None:
    """A kernel was not faster by enough than one that took a hundred times as long."""
    later = _candidate("later", 2.0, refusal="taken from call 3 on", why=Why.WAITING)
    _, _, other = _reasons([EXACT, later, SLOW], [EXACT] * NUM_HEADS, EXACT)
    assert other.endswith("20 ms (estimated), later/fp32 2 ms (estimated)")


@pytest.mark.parametrize(
    ("wall_ms", "words"), [(7.5, "not surely faster: "), (7.7, "not faster by enough: ")]
)
def test_a_time_that_is_less_and_proves_nothing_is_not_called_too_long(
    wall_ms: float, words: str
) -> None:
    """A time of simpler problems, 20 times less than the incumbent's, was not enough, it said."""
    known, other = (
        replace(item, measured=Measured(device_ms=time_ms, host_ms=time_ms), source="a table")
        for item, time_ms in ((EXACT, 8.0), (replace(EXACT, group=SLOW.group), wall_ms))
    )
    _, reason = _reasons([known, other], [known] * NUM_HEADS, known)
    assert reason.startswith(words)


def test_an_approximation_taken_for_all_heads_names_its_error_and_what_exact_would_cost() -> None:
    taken, exact = trace_of([LOW, EXACT], [LOW] * NUM_HEADS, EXACT, WHY)
    assert taken.reason == (
        "taken for all heads: 4 ms (estimated), estimated error 0.03 of 0.05 allowed; "
        "fused/fp32 would take 8 ms for all"
    )
    assert taken.error_estimate == 0.03
    assert exact.reason == "slower: 8 ms, low_rank/fp32 rank=8 4 ms"


def test_heads_shared_out_are_named_in_spans_and_only_their_time_and_error_count() -> None:
    chosen = [LOW, EXACT, LOW, LOW]
    low, exact = trace_of([LOW, EXACT], chosen, EXACT, WHY)
    assert low.heads == (0, 2, 3) and exact.heads == (1,)
    assert low.reason == (
        "taken for heads 0, 2-3: 3 ms for its heads (estimated), "
        "estimated error 0.03 of 0.05 allowed; "
        "fused/fp32 would take 8 ms for all"
    )
    assert (
        exact.reason == "taken for head 1: 2 ms for its heads (estimated), what PyTorch would run"
    )


def test_kept_blocks_are_averaged_over_the_heads_served() -> None:
    sparse = _lossy(
        "sparse",
        1.0,
        (0.01,) * NUM_HEADS,
        densities=(0.2, 0.4, 1.0, 1.0),
        head_costs_ms=(0.5, 0.7, 3.0, 3.0),
    )
    low, exact = _reasons([sparse, EXACT], [sparse, sparse, EXACT, EXACT], EXACT)
    assert low.startswith(
        "taken for heads 0-1: 1.2 ms for its heads (estimated), estimated error 0.01 of 0.05"
    )
    assert ", 30% of blocks kept; fused/fp32 would take 8 ms for all" in low
    assert exact.startswith("taken for heads 2-3: 4 ms for its heads")


def test_the_tightest_budget_of_the_heads_served_is_the_one_named() -> None:
    tight = replace(LOW, budgets=(0.05, 0.03, 0.05, 0.04))
    reason, _ = _reasons([tight, EXACT], [tight] * NUM_HEADS, EXACT)
    assert "estimated error 0.03 of 0.03 allowed" in reason


def test_an_approximation_is_compared_on_the_heads_that_it_may_serve() -> None:
    """It was once compared over all heads with another's best case, and `slower` could be false."""
    some = _lossy("other", 12.0, (0.01, 0.9, 0.01, 0.9))
    _, _, reason = _reasons([EXACT, LOW, some], [LOW, EXACT, EXACT, EXACT], EXACT)
    assert reason == "slower for heads 0, 2: 6 ms, low_rank/fp32 rank=8 and fused/fp32 3 ms"


@pytest.mark.parametrize(
    ("time_ms", "reason"),
    [
        (9.0, "slower: 9 ms, fused/fp32 8 ms"),
        (8.0, "no faster: 8 ms, fused/fp32 8 ms"),
        (7.8, "not faster by enough: 7.8 ms, fused/fp32 8 ms"),
    ],
)
def test_the_word_for_not_taken_is_true(time_ms: float, reason: str) -> None:
    other = _lossy("other", time_ms, (0.01,) * NUM_HEADS)
    assert _reasons([EXACT, other], [EXACT] * NUM_HEADS, EXACT)[1] == reason


def test_a_measured_time_stands_beside_the_estimate_that_was_compared() -> None:
    """The sentence named the estimate alone, and the entry beside it another time."""
    measured = Measured(device_ms=9.0, host_ms=9.0)
    known = replace(EXACT, measured=measured, source="measured here")
    shown = "8 ms (estimated), 9 ms (measured here)"
    taken, exact = trace_of([LOW, known], [LOW] * NUM_HEADS, known, WHY)
    assert taken.reason.endswith(f"; fused/fp32 would take {shown} for all")
    assert exact.reason == f"slower: {shown}, low_rank/fp32 rank=8 4 ms"
    assert exact.time_ms == 9.0
    other = _lossy("other", 7.8, (0.01,) * NUM_HEADS)
    assert _reasons([known, other], [known] * NUM_HEADS, known)[1] == (
        f"not faster by enough: 7.8 ms, fused/fp32 {shown}"
    )


def test_the_time_of_heads_that_differ_is_their_sum() -> None:
    """The entry held the time at the lowest density, the sentence that of the measured ones."""
    other = _lossy("other", 2.0, (0.01,) * NUM_HEADS, head_costs_ms=(2.0, 2.0, 3.0, 3.0))
    _, entry = trace_of([EXACT, other], [EXACT] * NUM_HEADS, EXACT, WHY)
    assert entry.reason == "slower: 10 ms, fused/fp32 8 ms" and entry.time_ms == 10.0


def test_an_approximation_asked_for_by_name_says_so() -> None:
    (reason,) = _reasons([LOW], [LOW] * NUM_HEADS, None)
    assert reason.endswith("estimated error 0.03 of 0.05 allowed; it was asked for by name")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 ms"),
        (0.012345, "0.0123 ms"),
        (12.345, "12.3 ms"),
        (999.4, "999 ms"),
        (999.6, "1000 ms"),
        (12345.6, "12346 ms"),
    ],
)
def test_milliseconds_are_never_powers_of_ten(value: float, text: str) -> None:
    assert format_ms(value) == text


def test_a_decision_explains_with_the_accepted_first_and_its_notes_last() -> None:
    plan = Plan(groups=(EXACT.group,), num_heads=NUM_HEADS, error_budget=0.01)
    entries = trace_of([REFUSED, SLOW, EXACT], [EXACT] * NUM_HEADS, EXACT, WHY)
    decision = Decision(plan=plan, trace=entries, policy="balanced", notes=("one remark",))
    assert decision.explain().splitlines() == [
        "policy balanced (error budget 0.01)",
        "  + fused/fp32  taken for all heads: 8 ms (estimated), what PyTorch would run",
        "  - flex/fp32   it runs on cuda, the tensors are on cpu",
        "  - naive/fp32  nobody measured that it is faster here: 20 ms (estimated), "
        "fused/fp32 8 ms (estimated)",
        "  note: one remark",
    ]


def test_a_candidate_in_a_lower_format_is_not_exact() -> None:
    half = replace(EXACT, group=HeadGroup(capability="fused", scheme=Scheme.of(Precision.BF16)))
    assert EXACT.is_exact and not half.is_exact and not LOW.is_exact


def test_a_decision_prints_in_short_in_order_of_time() -> None:
    """What runs elsewhere shares the last line; one executor's refusals share their fastest's."""
    plan = Plan(groups=(EXACT.group,), num_heads=NUM_HEADS)
    slower = _candidate("naive", 30.0)
    lossy = _lossy("other", 9.0, (0.9,) * NUM_HEADS)
    away = [replace(REFUSED, group=replace(REFUSED.group, capability=name)) for name in "ab"]
    away = [replace(item, why=Why.ELSEWHERE) for item in away]
    unable = replace(REFUSED, group=replace(REFUSED.group, capability="c"), why=Why.UNSUPPORTED)
    judged = [unable, *away, slower, SLOW, lossy, EXACT]
    entries = trace_of(judged, [EXACT] * NUM_HEADS, EXACT, WHY)
    decision = Decision(plan=plan, trace=entries)
    lines = str(decision).splitlines()
    assert [line[2:20].strip() for line in lines[1:]] == [
        "+ fused/fp32",
        f"- {lossy.name}"[:18].strip(),
        "- naive/fp32 and 1",
        "- c/fp32",
        "- elsewhere",
    ]
    assert "nobody measured that it is faster here: 20 ms" in lines[3]
    assert lines[-1].endswith("a, b: another device, or not installed")
    assert len(decision.explain().splitlines()) == 1 + len(judged)


def test_entries_say_their_time_and_where_it_is_from() -> None:
    measured = Measured(device_ms=5.0, host_ms=1.0, settled=False)
    timed = replace(EXACT, measured=measured, source="measured here")
    entries = trace_of([REFUSED, SLOW, timed], [timed] * NUM_HEADS, timed, WHY)
    assert [(entry.time_ms, entry.source) for entry in entries] == [
        (None, ""),
        (20.0, "estimated"),
        (5.0, "measured here, not settled"),
    ]


def test_candidates_of_one_executor_with_one_reason_share_an_explained_line() -> None:
    plan = Plan(groups=(EXACT.group,), num_heads=NUM_HEADS)
    ranks = [
        replace(LOW, group=replace(LOW.group, method=LowRank(rank=rank)), refusal="no")
        for rank in (8, 16)
    ]
    other = replace(
        ranks[1], group=replace(ranks[1].group, method=LowRank(rank=32)), refusal="too much"
    )
    entries = trace_of([EXACT, *ranks, other], [EXACT] * NUM_HEADS, EXACT, WHY)
    assert len(entries) == 4
    assert Decision(plan=plan, trace=entries).explain().splitlines()[2:] == [
        "  - low_rank/fp32 rank=8 and 1 more  no",
        "  - low_rank/fp32 rank=32            too much",
    ]


def test_a_plan_of_two_kinds_of_one_executor_prints_both() -> None:
    other = replace(LOW, group=replace(LOW.group, method=LowRank(rank=16)))
    entries = trace_of([EXACT, LOW, other], [LOW, LOW, other, other], EXACT, WHY)
    accepted = [
        line for line in str(Decision(plan=PLAN, trace=entries)).splitlines() if "+" in line
    ]
    assert len(accepted) == 2
    assert "heads 0-1" in accepted[0] and "heads 2-3" in accepted[1]


PLAN = Plan(groups=(EXACT.group,), num_heads=NUM_HEADS)
