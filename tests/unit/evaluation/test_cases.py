import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn import AttentionEvent, scaled_dot_product_attention
from adaattn._events import emit
from adaattn.evaluation import case_list, cases
from adaattn.evaluation.case_list import CASES, Case, Inputs, Peer, Shape
from adaattn.evaluation.cases import compare_cases
from adaattn.testing import assert_matches, make_problem

CPU = torch.device("cpu")
LENGTH = 24


def _small(case: Case, **more: Any) -> Case:
    """Return a case of the same kind that takes milliseconds."""
    shape = case.on_cpu
    small = replace(
        shape,
        heads=4,
        kv_heads=4 * shape.kv_heads // shape.heads,
        len_q=min(shape.len_q, LENGTH),
        len_k=LENGTH,
        head_dim=8,
        window=5 if shape.window else 0,
        lengths=(7, 1, 16) if shape.lengths else (),
        budget_bytes=1_000 if shape.budget_bytes else None,
        **more,
    )
    return replace(case, on_cpu=small)


SMALL = {case.name: _small(case) for case in CASES}


@pytest.fixture(params=SMALL, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    return SMALL[request.param]


def _inputs(case: Case, dtype: torch.dtype = torch.float32) -> Inputs:
    return cases._inputs(case.on_cpu, CPU, dtype)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    query, key, value = (item.to(dtype) for item in (inputs.query, inputs.key, inputs.value))
    return replace(inputs, query=query, key=key, value=value)


def test_both_sides_compute_the_same(case: Case) -> None:
    inputs = _inputs(case)
    exact = case.peer.make(_cast(inputs, torch.float64))[0]()
    theirs = case.peer.make(inputs)[0]()
    ours = scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, **case.keywords(inputs)
    )
    assert_matches(ours, exact, theirs, name=case.name, summands=LENGTH)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("case", [item for item in SMALL.values() if item.peer_on_cuda])
def test_the_peer_of_a_gpu_computes_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    inputs = _inputs(case)
    exact = case.peer.make(_cast(inputs, torch.float64))[0]()
    theirs = case.peer.make(inputs)[0]()
    assert case.peer_on_cuda is not None
    flex = case.peer_on_cuda.make(inputs)[0]()
    assert_matches(flex, exact, theirs, name=case.name, summands=LENGTH)


@pytest.mark.parametrize("case", [SMALL[name] for name in SMALL if "cache" not in name])
def test_the_keywords_matter(case: Case) -> None:
    """Each case computes something else than causal attention."""
    inputs = _inputs(case)
    keywords = case.keywords(inputs)
    ours = scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, **keywords)
    plain = scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, is_causal=True)
    assert not torch.equal(ours, plain)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("sliding window", {(9, 4), (9, 9), (0, 0)}),
        ("packed documents", {(6, 0), (7, 7), (9, 8), (23, 8)}),
        ("softcap", {(23, 0)}),
    ],
)
def test_a_mask_shows_what_its_words_say(name: str, seen: set[tuple[int, int]]) -> None:
    visible = case_list._visible(_inputs(SMALL[name]))
    assert visible.shape == (LENGTH, LENGTH)
    assert all(bool(visible[place]) for place in seen)
    hidden = {"sliding window": (9, 3), "packed documents": (7, 6), "softcap": (3, 4)}[name]
    assert not bool(visible[hidden])


def test_the_benchmark_writes_the_chosen_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importlib.import_module("benchmarks.cases")
    monkeypatch.setattr(program, "CASES", tuple(SMALL.values()))
    given = ["--device", "cpu", "--out", str(tmp_path), "--commit", "abc1234", "--only"]
    assert program.main([*given, "window"]) == 0
    (row,) = json.loads((tmp_path / "cases_cpu.json").read_text())["rows"]
    assert row["name"] == "sliding window"
    assert row["ratio"] == row["peer_ms"] / row["ours_ms"]
    assert program.main([*given, "no such case"]) == 1


def test_a_comparison_holds_what_both_sides_took() -> None:
    (found,) = compare_cases("cpu", cases=[SMALL["sliding window"]])
    assert found.name == "sliding window"
    assert found.detail == "4 heads, 24 tokens, D 8, 5 keys back, float32"
    assert found.peer == "F.scaled_dot_product_attention, a boolean mask made before"
    assert "/fp32" in found.chosen
    assert found.ours_ms > 0
    assert found.peer_ms is not None
    assert found.peer_ms > 0
    assert found.error is not None
    assert found.error <= torch.finfo(torch.float32).eps * LENGTH
    assert found.why_not == ""


def test_a_peer_over_the_budget_is_not_run_and_says_what_it_needs() -> None:
    case = SMALL["softcap in little memory"]
    broken = Peer(words="all scores", make=lambda _: pytest.fail("it ran"), needs_scores=True)
    wide = replace(case.on_cpu, budget_bytes=1_000_000, len_q=300, len_k=300)
    (found,) = compare_cases("cpu", cases=[replace(case, on_cpu=wide, peer=broken)])
    assert (found.peer_ms, found.error) == (None, None)
    assert found.peer_bytes == 4 * 300 * 300 * 4
    assert found.ours_ms > 0
    assert found.why_not == ("it holds a number for each score, 1.4 MB, and the budget is 1 MB")


def test_a_peer_that_memory_does_not_hold_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "free_memory_bytes", lambda _: 1000)
    (found,) = compare_cases("cpu", cases=[SMALL["softcap"]])
    assert found.peer_ms is None
    assert found.why_not.endswith("and 0.001 MB are free")


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_results_that_differ_are_not_timed_against_one_another(factor: float) -> None:
    case = SMALL["softcap"]

    def wrong(inputs: Inputs) -> Any:
        call, kept = case.peer.make(inputs)
        return lambda: call() * factor, kept

    (found,) = compare_cases("cpu", cases=[replace(case, peer=replace(case.peer, make=wrong))])
    assert found.peer_ms is None
    assert found.error is not None
    assert "the results differ by" in found.why_not


def test_progress_counts_cases() -> None:
    seen: list[tuple[str, int, int]] = []
    compare_cases(
        "cpu", progress=lambda *step: seen.append(step), cases=[SMALL["softcap"], SMALL["ALiBi"]]
    )
    assert seen == [("compare", done, 2) for done in range(3)]


def test_a_turn_repeats_short_calls_and_ends_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cases, "_CASE_S", 0.0)
    calls: list[int] = []

    def call() -> torch.Tensor:
        calls.append(1)
        return torch.zeros(())

    (time_ms,) = cases._timed_in_turns([call], CPU)
    assert time_ms > 0
    assert len(calls) > 3 * 10


def test_a_gpu_has_its_own_sizes_and_peer() -> None:
    case = next(case for case in CASES if case.name == "sliding window")
    assert case.shape(torch.device("cuda")) is case.on_cuda
    assert "flex_attention" in case.peer_for(torch.device("cuda")).words
    assert case.peer_for(CPU) is case.peer


def test_sizes_are_said_in_words() -> None:
    shape = Shape(heads=8, kv_heads=2, len_q=1, len_k=64, head_dim=16, budget_bytes=2_000_000)
    assert shape.words() == (
        "8 heads over 2 key heads, 1 query on 64 keys, D 16, at most 2 MB of workspace"
    )
    assert replace(shape, len_q=3).words().startswith("8 heads over 2 key heads, 3 queries on 64")


def test_what_takes_over_later_is_timed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled runs after some calls; the peer is compiled before it is timed."""
    plans = []

    def with_later(*tensors: Any, **keywords: Any) -> torch.Tensor:
        plans.append(keywords.get("plan"))
        output, aux = scaled_dot_product_attention(*tensors, **keywords, return_aux=True)
        if keywords.get("plan") is None:
            decision = replace(aux.decision, later=aux.decision.plan, calls_before=7)
            event = AttentionEvent(
                problem=make_problem(), decision=decision, workspace_bytes=0, layer=-1
            )
            emit(event)
        return output

    monkeypatch.setattr(cases, "scaled_dot_product_attention", with_later)
    (found,) = compare_cases(CPU, cases=[SMALL["softcap"]])
    assert found.chosen == "chunked/fp32 (from call 8 on, chunked/fp32 before)"
    assert plans[0] is None
    assert plans[-1] is not None
