"""What statistics make of events: each number, their merging, their forms."""

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adaattn
from adaattn import AttentionEvent, BlockSparse, HeadGroup, LowRank, Policy, Scheme
from adaattn.attention import _digest
from adaattn.attention.runner import Runner
from adaattn.attention.statistics import AttentionStatistics
from adaattn.errors import ArgumentTypeError, UnsupportedError
from adaattn.spec import Cost, Decision, Plan, Precision, TensorStats, TraceEntry, Why
from adaattn.testing import make_problem

FP32, BF16 = Precision.FP32, Precision.BF16
PROBLEM = make_problem(num_heads=4)
FLASH = HeadGroup(capability="sdpa.flash")
CHUNKED = HeadGroup(capability="chunked")
LOW = HeadGroup(capability="low_rank", method=LowRank(rank=8, value_rank=8))
SPARSE = HeadGroup(capability="block_sparse", method=BlockSparse(block_size=64))

NOTHING = {
    "calls": 0,
    "flash_calls": 0,
    "fallback_calls": 0,
    "approximate_calls": 0,
    "flash_ratio": 0.0,
    "share_by_method": {},
    "share_by_precision": {},
    "calls_by_executor": {},
    "calls_by_plan": {},
    "heads_by_rank": {},
    "fallback_reasons": {},
    "precision_notes": {},
    "measured_calls": 0,
    "recomputed_calls": 0,
    "step_downs": 0,
    "repaired_heads": 0,
    "switches": 0,
    "mean_entropy_bits": None,
    "mean_effective_rank": None,
    "mean_estimated_error": None,
    "max_estimated_error": None,
    "mean_audited_error": None,
    "max_audited_error": None,
    "flops": 0.0,
    "bytes_moved": 0.0,
    "flops_saved": 0.0,
    "bytes_saved": 0.0,
    "peak_workspace_bytes": None,
    "peak_memory_bytes": None,
    "measure_ms": None,
    "time_ms": None,
    "time_saved_ms": None,
    "per_head": {},
}


def event(
    *groups: HeadGroup,
    trace: tuple[TraceEntry, ...] = (),
    cost: Cost | None = None,
    exact_cost: Cost | None = None,
    **values: Any,
) -> AttentionEvent:
    """Return the event of a call whose heads were computed by some groups."""
    plan = Plan(groups=groups, num_heads=PROBLEM.num_heads)
    decision = Decision(plan=plan, trace=trace, cost=cost, exact_cost=exact_cost)
    defaults = {"problem": PROBLEM, "workspace_bytes": 0}
    return AttentionEvent(decision=decision, **(defaults | values))


def heads(group: HeadGroup, *numbers: int) -> HeadGroup:
    return replace(group, heads=numbers)


def recorded(*events: AttentionEvent) -> AttentionStatistics:
    found = AttentionStatistics()
    for item in events:
        found.record(item)
    return found


def refused(
    candidate: str, reason: str, why: Why = Why.UNSUPPORTED, num_reasons: int = 1
) -> TraceEntry:
    return TraceEntry(
        candidate=candidate, accepted=False, reason=reason, why=why, num_reasons=num_reasons
    )


def cost(flops: float, moved: float) -> Cost:
    return Cost(flops=flops, bytes_moved=moved, workspace_bytes=0, time_ms=1.0)


VARIED = (
    event(FLASH, cost=cost(10.0, 4.0), tag="layer0", workspace_bytes=100, time_ms=1.5),
    event(
        heads(LOW, 0, 2),
        heads(CHUNKED, 1, 3),
        cost=cost(6.0, 3.0),
        exact_cost=cost(10.0, 4.0),
        stats=TensorStats(
            entropy_bits=(1.0, 2.0, 3.0, 4.0), effective_ranks=(2.0,) * 4, measure_ms=0.5
        ),
        trace=(
            TraceEntry(candidate="low_rank/fp32", accepted=True, reason="x", error_estimate=0.02),
            refused("sdpa.flash/fp32", "it does not support softcap"),
        ),
        head_errors=(0.01, 0.0, 0.03, 0.0),
        tag="layer1",
        workspace_bytes=300,
    ),
    event(LOW, head_errors=(0.01,) * 4, repaired_heads=(), fallbacks=("x failed",), tag="layer1"),
)


class TestNumbers:
    """Each statistic, on events that were made for it."""

    def test_before_any_call_everything_is_zero_empty_or_none(self) -> None:
        assert AttentionStatistics().to_dict() == NOTHING
        assert Runner().statistics.to_dict() == NOTHING

    @pytest.mark.parametrize(
        ("groups", "name"),
        [
            ((FLASH,), "flash_calls"),
            ((HeadGroup(capability="sdpa.cudnn"),), "flash_calls"),
            ((heads(FLASH, 0, 1), heads(LOW, 2, 3)), "flash_calls"),
            ((CHUNKED,), "fallback_calls"),
            ((HeadGroup(capability="reference"),), "fallback_calls"),
            ((HeadGroup(capability="sdpa.math"),), "fallback_calls"),
            ((heads(CHUNKED, 0), heads(LOW, 1, 2, 3)), "fallback_calls"),
            ((LOW,), "approximate_calls"),
            ((heads(LOW, 0, 1), heads(SPARSE, 2, 3)), "approximate_calls"),
        ],
    )
    def test_a_call_is_fused_a_fallback_or_approximate(
        self, groups: tuple[HeadGroup, ...], name: str
    ) -> None:
        found = recorded(event(*groups))
        counts = {key: found[f"{key}_calls"] for key in ("flash", "fallback", "approximate")}
        assert counts == {
            key: int(name == f"{key}_calls") for key in ("flash", "fallback", "approximate")
        }
        assert bool(found["fallback_reasons"]) is (name == "fallback_calls")

    def test_the_flash_ratio_is_the_share_of_all_calls(self) -> None:
        found = recorded(event(FLASH), event(CHUNKED), event(LOW), event(FLASH))
        assert (found["calls"], found["flash_ratio"]) == (4, 0.5)

    def test_shares_are_those_of_heads(self) -> None:
        half = replace(FLASH, scheme=Scheme.of(BF16))
        found = recorded(
            event(heads(LOW, 0), heads(FLASH, 1, 2, 3)), event(half), event(SPARSE), event(FLASH)
        )
        assert found["share_by_method"] == {
            "low_rank": 1 / 16,
            "exact": 11 / 16,
            "block_sparse": 4 / 16,
        }
        assert found["share_by_precision"] == {"fp32": 12 / 16, "bf16": 4 / 16}

    def test_a_head_that_an_audit_repaired_was_exact(self) -> None:
        found = recorded(event(LOW, repaired_heads=(1, 2), fallbacks=("audit: ...",)))
        assert found["repaired_heads"] == 2 and found["step_downs"] == 1
        assert found["share_by_method"] == {"low_rank": 0.5, "exact": 0.5}
        assert found["heads_by_rank"] == {"8": 2}
        per_head = list(found["per_head"].values())
        assert [item["last_rank"] for item in per_head] == [8, 0, 0, 8]
        assert [item.get("calls exact", 0) for item in per_head] == [0, 1, 1, 0]

    def test_executors_plans_and_ranks_are_counted(self) -> None:
        mixed = event(heads(LOW, 0, 2), heads(FLASH, 1, 3))
        found = recorded(mixed, mixed, event(FLASH))
        assert found["calls_by_executor"] == {"low_rank": 2, "sdpa.flash": 3}
        assert found["calls_by_plan"] == {
            "heads 0,2: low_rank/fp32 rank=8,8; heads 1,3: sdpa.flash/fp32": 2,
            "sdpa.flash/fp32": 1,
        }
        assert found["heads_by_rank"] == {"8": 4}

    def test_switches_are_heads_that_left_the_way_of_the_call_before(self) -> None:
        found = recorded(
            event(FLASH, tag="a"),
            event(heads(LOW, 0, 1), heads(FLASH, 2, 3), tag="a"),
            event(LOW, tag="b"),
            event(heads(LOW, 0), heads(FLASH, 1, 2, 3), tag="a"),
            event(LOW, tag="b", repaired_heads=(3,)),
        )
        assert found["switches"] == 4
        counts = {name: item["switches"] for name, item in found["per_head"].items()}
        assert counts == {
            "a head 0": 1,
            "a head 1": 2,
            "a head 2": 0,
            "a head 3": 0,
            "b head 0": 0,
            "b head 1": 0,
            "b head 2": 0,
            "b head 3": 1,
        }

    def test_another_rank_is_no_switch_and_another_format_is(self) -> None:
        found = recorded(event(LOW), event(replace(LOW, method=LowRank(rank=16, value_rank=16))))
        assert found["switches"] == 0
        assert found["heads_by_rank"] == {"8": 4, "16": 4}
        found.record(event(replace(LOW, scheme=Scheme.of(BF16))))
        assert found["switches"] == 4

    def test_means_are_over_measured_heads_alone(self) -> None:
        measured = TensorStats(entropy_bits=(1.0, 2.0, 3.0, 6.0), measure_ms=2.0)
        spectral = replace(measured, effective_ranks=(4.0, 4.0, 8.0, 8.0))
        found = recorded(event(FLASH), event(FLASH, stats=measured), event(FLASH, stats=spectral))
        assert (found["calls"], found["measured_calls"], found["measure_ms"]) == (3, 2, 4.0)
        assert found["mean_entropy_bits"] == 3.0
        assert found["mean_effective_rank"] == 6.0
        assert found["per_head"]["attention head 3"] == {
            "calls exact": 3,
            "switches": 0,
            "last_rank": 0,
            "mean_entropy_bits": 6.0,
            "mean_effective_rank": 8.0,
        }

    def test_estimated_errors_are_those_of_accepted_candidates(self) -> None:
        trace = (
            TraceEntry(candidate="low_rank/fp32", accepted=True, reason="x", error_estimate=0.25),
            TraceEntry(candidate="x/fp32", accepted=False, reason="x", error_estimate=0.75),
            TraceEntry(candidate="sdpa.flash/fp32", accepted=True, reason="x"),
        )
        smaller = (replace(trace[0], error_estimate=0.125),)
        found = recorded(event(LOW, trace=trace), event(LOW, trace=smaller))
        assert found["max_estimated_error"] == 0.25
        assert found["mean_estimated_error"] == 0.1875

    def test_audited_errors_are_those_of_heads_that_were_approximated(self) -> None:
        found = recorded(
            event(
                heads(LOW, 0, 1),
                heads(replace(FLASH, scheme=Scheme.of(BF16)), 2),
                heads(FLASH, 3),
                head_errors=(0.25, 0.5, 0.75, 1e-9),
            )
        )
        assert found["max_audited_error"] == 0.75
        assert found["mean_audited_error"] == 0.5

    def test_what_is_saved_is_the_difference_to_the_exact_way(self) -> None:
        found = recorded(
            event(LOW, cost=cost(3.0, 5.0), exact_cost=cost(10.0, 6.0)),
            event(FLASH, cost=cost(10.0, 6.0), exact_cost=cost(10.0, 6.0)),
            event(LOW, cost=cost(3.0, 5.0)),
            event(FLASH),
        )
        assert (found["flops"], found["bytes_moved"]) == (16.0, 16.0)
        assert (found["flops_saved"], found["bytes_saved"]) == (7.0, 1.0)

    def test_the_largest_memory_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peaks = iter((500, 700, 600))
        monkeypatch.setattr("adaattn.hardware.peak_so_far", lambda device_type: next(peaks))
        found = recorded(*(event(FLASH, workspace_bytes=size) for size in (7, 3, 5)))
        assert (found["peak_workspace_bytes"], found["peak_memory_bytes"]) == (7, 700)

    def test_memory_that_the_system_does_not_tell_is_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("adaattn.hardware.peak_so_far", lambda device_type: None)
        assert recorded(event(FLASH))["peak_memory_bytes"] is None

    def test_time_is_summed_where_it_was_taken(self) -> None:
        found = recorded(event(FLASH, time_ms=1.5), event(FLASH), event(FLASH, time_ms=0.25))
        assert found["time_ms"] == 1.75

    def test_recomputations_and_formats_that_were_kept_are_counted_beside_calls(self) -> None:
        found = AttentionStatistics()
        found.record_recomputed()
        found.note_precision("no such format")
        found.note_precision("no such format")
        changed = {key: value for key, value in found.items() if value != NOTHING[key]}
        assert changed == {"recomputed_calls": 1, "precision_notes": {"no such format": 2}}


class TestReasons:
    """Why an exact call was served by no fused kernel."""

    @pytest.mark.parametrize(
        ("trace", "reason"),
        [
            ((), "chunked was asked for by name, which is no fused kernel"),
            (
                (refused("sdpa.flash/fp32", "it does not support softcap"),),
                "sdpa.flash: it does not support softcap",
            ),
            (
                (
                    refused("sdpa.cudnn/fp32", "it runs on cuda, not here", Why.ELSEWHERE),
                    refused("sdpa.flash/fp32", "no softcap; no sinks", num_reasons=2),
                ),
                "sdpa.flash: no softcap; no sinks",
            ),
            (
                (
                    refused("sdpa.efficient/fp32", "no softcap; no sinks", num_reasons=2),
                    refused("sdpa.flash/fp32", "it says; what it says"),
                ),
                "sdpa.flash: it says; what it says",
            ),
            (
                (
                    refused("sdpa.flash/fp32", "it does not support softcap"),
                    refused("sdpa.cudnn/fp32", "nobody measured that it is faster", Why.SLOWER),
                ),
                "sdpa.cudnn was not faster than chunked",
            ),
            (
                (refused("sdpa.cudnn/fp32", "it runs on cuda, not here", Why.ELSEWHERE),),
                "sdpa.cudnn: it runs on cuda, not here",
            ),
            (
                (
                    refused("any executor/bf16", "cpu computes fp32 natively, not it"),
                    refused("sdpa.math/fp32", "nobody measured that it is faster", Why.SLOWER),
                    refused("low_rank/fp32", "it approximates, the budget is 0", Why.POLICY),
                ),
                "chunked was asked for by name, which is no fused kernel",
            ),
        ],
    )
    def test_it_is_the_nearest_one(self, trace: tuple[TraceEntry, ...], reason: str) -> None:
        found = recorded(event(CHUNKED, trace=trace))
        assert found["fallback_reasons"] == {reason: 1}

    def test_a_step_down_comes_first(self) -> None:
        trace = (refused("sdpa.flash/fp32", "it does not support softcap"),)
        found = recorded(event(CHUNKED, trace=trace, fallbacks=("flex failed", "flash failed")))
        assert found["fallback_reasons"] == {"flash failed": 1}
        assert found["step_downs"] == 2

    @pytest.mark.parametrize(
        ("semantics", "backend", "reason"),
        [
            ({"softcap": 5.0}, "auto", "sdpa.flash: it does not support softcap"),
            ({}, "chunked", "chunked was asked for by name, which is no fused kernel"),
            ({"need_weights": True}, "auto", "sdpa.flash: it does not support the weights"),
        ],
    )
    def test_real_calls_say_it_too(
        self, semantics: dict[str, Any], backend: str, reason: str
    ) -> None:
        runner = Runner("quality", backend=backend)
        x = torch.randn(1, 2, 16, 8)
        for _ in range(3):
            runner.run(x, x, x, **semantics)
        ((found, count),) = runner.statistics["fallback_reasons"].items()
        assert found.startswith(reason) and count == 3
        assert runner.statistics["flash_ratio"] == 0.0

    def test_a_plain_call_on_a_cpu_is_served_by_a_fused_kernel(self) -> None:
        runner = Runner("quality")
        x = torch.randn(1, 2, 16, 8)
        runner.run(x, x, x, is_causal=True)
        assert runner.statistics["flash_ratio"] == 1.0
        assert runner.statistics["fallback_reasons"] == {}

    def test_an_executor_without_room_is_a_step_down_with_its_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from adaattn.backends import registry

        def full(*arguments: object) -> None:
            raise torch.OutOfMemoryError("the memory is full")

        known = registry._KNOWN["chunked"]._replace(run=full)
        monkeypatch.setitem(registry._KNOWN, "chunked", known)
        runner = Runner("quality")
        x = torch.randn(1, 2, 64, 8)
        slopes = torch.tensor([0.5, 0.25])
        runner.run(x, x, x, is_causal=True, softcap=5.0, alibi_slopes=slopes)
        assert runner.statistics["step_downs"] == 1
        assert runner.statistics["fallback_calls"] == 1
        (reason,) = runner.statistics["fallback_reasons"]
        assert reason.startswith("chunked failed (the memory is full)")


class TestMerging:
    """Several modules, layers or processes together."""

    def test_merged_parts_are_one_that_saw_everything(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("adaattn.hardware.peak_so_far", lambda device_type: 4096)
        first, second = recorded(VARIED[0]), recorded(*VARIED[1:])
        second.record_recomputed()
        whole = recorded(*VARIED)
        whole.record_recomputed()
        merged = AttentionStatistics.merge([first, second])
        assert merged.to_dict() == whole.to_dict()
        assert first.to_dict() == recorded(VARIED[0]).to_dict()

    def test_the_same_head_of_two_processes_is_one_head(self) -> None:
        """Its counts add up, and its last rank is the last one told, not their sum."""
        larger = replace(LOW, method=LowRank(rank=16, value_rank=16))
        first, second = recorded(event(larger), event(larger)), recorded(event(LOW))
        merged = AttentionStatistics.merge([first, second])
        head = merged["per_head"]["attention head 0"]
        assert (head["calls low_rank"], head["last_rank"]) == (3, 8)
        assert merged["heads_by_rank"] == {"16": 8, "8": 4}

    def test_nothing_merged_is_nothing(self) -> None:
        assert AttentionStatistics.merge([]).to_dict() == NOTHING
        empty = [AttentionStatistics(), AttentionStatistics()]
        assert AttentionStatistics.merge(empty).to_dict() == NOTHING

    def test_parts_go_on_by_themselves(self) -> None:
        part = recorded(VARIED[1])
        merged = AttentionStatistics.merge(iter([part]))
        part.record(VARIED[0])
        assert merged["calls"] == 1
        merged.record(VARIED[0])
        merged.record(VARIED[0])
        assert part["calls"] == 2

    @pytest.mark.parametrize("part", [None, {}, {"calls": 3}, "statistics"])
    def test_something_else_is_refused(self, part: object) -> None:
        with pytest.raises(ArgumentTypeError, match="statistics: expected AttentionStatistics, g"):
            AttentionStatistics.merge([AttentionStatistics(), part])

    def test_without_a_process_group_there_is_nobody_to_gather_from(self) -> None:
        with pytest.raises(UnsupportedError, match=r"gather[\s\S]*no process group") as caught:
            AttentionStatistics().gather()
        assert "init_process_group" in str(caught.value)

    def test_two_processes_gather_the_same(self, tmp_path: Path) -> None:
        program = textwrap.dedent(_GATHERING)
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank), str(tmp_path / "store")],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        results = [process.communicate(timeout=120) for process in ranks]
        for output, errors in results:
            assert output, errors
        (first, second) = (json.loads(output) for output, _ in results)
        assert first == second
        assert first["calls"] == 3 and first["flash_calls"] == 2
        assert set(first["per_head"]) == {
            f"layer{layer} head {head}" for layer in (0, 1) for head in (0, 1)
        }


_GATHERING = """
    import json, sys
    import torch
    from torch import distributed
    from adaattn.attention.runner import Runner

    rank, store = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    runner = Runner("quality", layer=rank)
    x = torch.randn(1, 2, 16, 8)
    for call in range(1 + rank):
        runner.run(x, x, x, softcap=2.0 * call)
    found = runner.statistics.gather()
    assert runner.statistics["calls"] == 1 + rank
    distributed.barrier()
    distributed.destroy_process_group()
    print(json.dumps(found.to_dict()))
"""


class TestForms:
    """Mapping, dictionary, table, copies."""

    def test_it_is_a_mapping_of_the_names_that_the_class_lists(self) -> None:
        found = recorded(*VARIED)
        assert isinstance(found, Mapping)
        assert list(found) == list(NOTHING) and len(found) == len(NOTHING)
        assert dict(found) == found.to_dict()
        assert "flash_ratio" in found and "speed" not in found
        documented = AttentionStatistics.__doc__ or ""
        assert [name for name in NOTHING if f"``{name}``" not in documented] == []
        with pytest.raises(KeyError, match="speed"):
            found["speed"]

    def test_a_dictionary_is_json_and_a_copy(self) -> None:
        found = recorded(*VARIED)
        data = found.to_dict()
        assert json.loads(json.dumps(data, allow_nan=False)) == data
        data["calls_by_executor"]["magic"] = 7
        data["per_head"].clear()
        assert "magic" not in found["calls_by_executor"] and found["per_head"]

    def test_reading_changes_nothing(self) -> None:
        found = recorded(*VARIED)
        before = copy.deepcopy(found.__dict__)
        first = found.to_dict()
        str(found)
        assert found.to_dict() == first
        assert {name: len(counts) for name, counts in before["_kinds"].items() if counts} == {
            name: len(counts) for name, counts in found._kinds.items() if counts
        }

    def test_it_is_printed_as_a_table(self) -> None:
        verdict, blank, *lines = str(recorded(*VARIED)).splitlines()
        assert verdict.startswith("3 calls: heads ") and blank == ""
        first = {line.split("  ")[0].strip() for line in lines}
        assert set(NOTHING) - {"per_head", "time_saved_ms"} <= first
        assert "time_saved_ms" not in first  # nobody took it
        starts = {
            next(place for place, text in enumerate(line) if place >= width and text != " ")
            for width in [max(len(name) for name in first) + 2]
            for line in lines
        }
        assert len(starts) == 1
        table = "\n".join(lines)
        assert "flash_ratio" in table and "0.3333" in table
        assert "layer1 head 0" in table and "switches 0" in table
        assert all(line == line.rstrip() for line in lines)

    @pytest.mark.parametrize(
        ("events", "verdict"),
        [
            ([event(FLASH)], "1 call: heads 100% exact"),
            (
                [event(heads(LOW, 0, 1), heads(FLASH, 2, 3)), event(FLASH)],
                "2 calls: heads 75% exact, 25% low rank; time saved not measured yet",
            ),
            (
                [
                    event(LOW, saved_ms=2.0, head_errors=(0.01, 0.02, 0.0, 0.0)),
                    event(LOW, saved_ms=-0.5),
                ],
                "2 calls: heads 100% low rank; 1.5 ms saved, as measured; worst audited error 0.02",
            ),
            (
                [event(LOW, saved_ms=-0.25)],
                "1 call: heads 100% low rank; 0.25 ms lost, as measured",
            ),
        ],
    )
    def test_the_verdict_is_one_line(self, events: list[AttentionEvent], verdict: str) -> None:
        assert recorded(*events).verdict() == verdict

    def test_it_is_shown_as_its_verdict(self) -> None:
        """The address of an object once stood there."""
        assert repr(AttentionStatistics()) == "<AttentionStatistics of no calls yet>"
        found = recorded(*VARIED)
        assert repr(found) == f"<AttentionStatistics of {found.verdict()}>"

    def test_before_any_call_the_table_says_so(self) -> None:
        verdict, _, *lines = str(AttentionStatistics()).splitlines()
        assert verdict == "no calls yet"
        rows = dict(line.split(maxsplit=1) for line in lines)
        assert not {"measure_ms", "time_ms", "time_saved_ms"} & set(rows)
        assert rows["calls"] == "0" and rows["flash_ratio"] == "0"
        assert rows["mean_entropy_bits"] == "-" and rows["fallback_reasons"] == "none"

    def test_a_reset_forgets_every_call(self) -> None:
        found = recorded(*VARIED)
        found.note_precision("x")
        found.reset()
        assert found.to_dict() == NOTHING
        found.record(event(LOW, tag="layer0"))
        assert found["switches"] == 0

    @pytest.mark.parametrize("how", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
    def test_a_copy_goes_on_by_itself(self, how: Any) -> None:
        found = recorded(*VARIED)
        copied = how(found)
        assert copied.to_dict() == found.to_dict()
        copied.record(event(FLASH, tag="layer1"))
        assert (found["calls"], copied["calls"]) == (3, 4)
        assert copied["switches"] == found["switches"] + 4


class TestDigests:
    """What is kept of a decision, so that it is counted fast."""

    def test_one_decision_for_two_problems_is_kept_apart(self) -> None:
        first = event(LOW)
        wide = replace(first, problem=replace(PROBLEM, precision=BF16))
        longer = replace(first, problem=replace(PROBLEM, len_q=99))
        digests = {id(_digest.digest_of(item)) for item in (first, wide, longer)}
        assert len(digests) == 3
        assert _digest.digest_of(first) is _digest.digest_of(replace(first, tag="x"))

    def test_a_decision_is_not_taken_for_another_at_the_same_address(self) -> None:
        """CPython gives a freed object's id to the next one of its size."""
        found = AttentionStatistics()
        for number in range(600):
            found.record(event((FLASH, CHUNKED)[number % 2]))
        assert (found["flash_calls"], found["fallback_calls"]) == (300, 300)
        assert len(_digest._DIGESTS) <= _digest._KEPT

    def test_a_repeated_call_counts_as_a_first_one(self) -> None:
        repeated = recorded(*[VARIED[1]] * 3)
        alone = recorded(*(replace(VARIED[1], decision=replace(VARIED[1].decision)) for _ in "abc"))
        assert repeated.to_dict() == alone.to_dict()


def test_statistics_are_the_same_facts_as_events() -> None:
    runner, other = Runner(Policy(error_budget=0.01)), AttentionStatistics()
    with adaattn.record_events(other.record):
        for length in (16, 300, 16):
            x = torch.randn(1, 2, length, 8)
            runner.run(x, x, x, is_causal=True)
    ours, theirs = runner.statistics.to_dict(), other.to_dict()
    for memory in (ours, theirs):
        memory.pop("peak_memory_bytes")
    assert ours == theirs


def test_one_event_given_again_counts_like_as_many_events() -> None:
    """Calls that are all alike share one event and are added up when somebody looks."""
    x = torch.randn(1, 2, 16, 8)
    seen: list[AttentionEvent] = []
    with adaattn.record_events(seen.append):
        adaattn.scaled_dot_product_attention(x, x, x)
    (event,) = seen
    shared, apart = AttentionStatistics(), AttentionStatistics()
    for _ in range(5):
        shared.record(event)
        apart.record(replace(event))
    assert shared["calls"] == 5
    shared.record(event)
    apart.record(replace(event))
    copied = pickle.loads(pickle.dumps(shared))
    for found in (shared, copied, AttentionStatistics.merge([shared])):
        told, expected = found.to_dict(), apart.to_dict()
        for statistics in (told, expected):
            del statistics["peak_memory_bytes"]
        assert told == expected
