"""The random problems of benchmarks/regret.py at their smallest, and its gate before a time."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import adaattn

ROOT = Path(__file__).resolve().parents[2]
TIMES = {"ratio", "ratio_quartiles", "ratio_of_best", "ours_ms", "peer_ms", "rounds"}


@pytest.fixture(scope="module")
def regret() -> Iterator[ModuleType]:
    """The benchmark's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import regret

        yield regret


@pytest.fixture(scope="module")
def problems(regret: ModuleType) -> ModuleType:
    """The module that draws."""
    return sys.modules["benchmarks.regret_problems"]


def _run(regret: ModuleType, folder: Path, *more: str) -> dict[str, Any]:
    """Return the JSON of a run at small sizes."""
    small = ["--device", "cpu", "--longest", "24", "--rounds", "1", "--commit", "abc1234"]
    path = regret.main([*small, "--out", str(folder), *more])
    return json.loads(path.read_text(encoding="utf-8"))


def _problem(problems: ModuleType, **changed: Any) -> Any:
    """Return a small causal problem, changed."""
    plain = problems.Problem(
        index=0,
        kind=problems.Kind.CAUSAL,
        dtype="float32",
        batch=2,
        heads=4,
        kv_heads=2,
        len_q=12,
        len_k=12,
        dim=32,
    )
    return replace(plain, **changed)


def _options(regret: ModuleType, problems: ModuleType, *more: str) -> Any:
    """Return the parsed options of a run."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regret, "run", lambda options: kept.append(options))
        regret.main(["--device", "cpu", "--rounds", "1", *more])
    return kept[0]


def test_a_run_writes_times_of_right_results_and_what_they_come_to(
    regret: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = _run(regret, tmp_path, "--problems", "8")
    assert document["benchmark"] == "regret_function_quality_cpu"
    assert document["machine"]["commit"] == "abc1234"
    assert document["options"]["seed"] == 0
    rows = document["rows"]
    assert len(rows) == 8
    for row in rows:
        assert "failed" not in row, row
        assert set(row) >= TIMES | {"cell", "problem", "executor", "because", "host_over_peer_us"}
        assert row["executor"] and row["because"]
        assert row["ratio"] > 0 and row["ours_ms"] > 0 and row["peer_ms"] > 0
        assert row["rounds"] == (3 if "first_ratio" in row else 1)
    totals = document["summary"]
    assert (totals["count"], totals["failed"], totals["failed_elsewhere"]) == (8, 0, 0)
    assert totals["worst_ratio"] == min(row["ratio"] for row in rows)
    assert len(totals["worst"]) == 8
    printed = capsys.readouterr().out
    assert all(row["cell"] in printed for row in rows)
    assert "worst_ratio: " in printed


@pytest.mark.parametrize("policy", ["quality", "balanced"])
def test_a_layer_is_checked_and_timed_too(regret: ModuleType, tmp_path: Path, policy: str) -> None:
    more = ("--through", "module", "--policy", policy, "--problems", "5")
    rows = _run(regret, tmp_path, *more)["rows"]
    assert {row["problem"]["kind"] for row in rows} == {
        "plain",
        "causal",
        "padding",
        "causal window",
        "window",
    }
    assert all(row.keys() >= TIMES for row in rows), rows


@pytest.mark.parametrize("through", ["transformers", "generation"])
def test_a_transformers_model_is_checked_and_timed_too(
    regret: ModuleType, tmp_path: Path, through: str
) -> None:
    pytest.importorskip("transformers")
    rows = _run(regret, tmp_path, "--through", through, "--problems", "2")["rows"]
    assert {row["problem"]["kind"] for row in rows} == {"causal", "padding"}
    assert all(row.keys() >= TIMES for row in rows), rows


def test_few_heads_are_few(problems: ModuleType) -> None:
    drawn = problems.draw(60, seed=4, device="cuda", few_heads=True)
    assert {item.heads for item in drawn} == {1, 2, 3, 4} and {item.batch for item in drawn} == {1}
    assert all(item.heads % item.kv_heads == 0 for item in drawn)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_seed_gives_the_same_problems_of_every_kind(problems: ModuleType, device: str) -> None:
    drawn = problems.draw(300, seed=4, device=device)
    assert drawn == problems.draw(300, seed=4, device=device)
    assert drawn != problems.draw(300, seed=5, device=device)
    kinds = problems.kinds("function")
    counts = [sum(item.kind is kind for item in drawn) for kind in kinds]
    assert set(counts) == {300 // len(kinds)}
    assert {item.training for item in drawn} == {item.transposed for item in drawn} == {True, False}
    assert {item.heads // item.kv_heads for item in drawn} >= {1, 2, 4, 8}
    assert {item.dim for item in drawn} == {32, 48, 64, 80, 96, 128, 192, 256, 512}
    assert any(item.len_q == 1 < item.len_k for item in drawn)
    assert any(1 < item.len_q != item.len_k for item in drawn)
    assert any(item.hidden_rows for item in drawn)
    for item in drawn:
        assert sum(item.lengths) in (0, item.len_q)
        assert item.heads % item.kv_heads == 0
        assert item.scores <= (2**24 if device == "cpu" else 2**30)


def test_what_users_write_out_is_softcaps_sinks_dilations_and_mixes(
    regret: ModuleType, problems: ModuleType, tmp_path: Path
) -> None:
    drawn = problems.draw(80, seed=4, device="cuda", through="written")
    assert {item.kind for item in drawn} == set(problems.kinds("written"))
    for item in drawn:
        asked = (item.softcap > 0) + item.has_sinks + (item.window > 0) + (item.dilation > 1)
        assert asked == 1 or (item.kind is problems.Kind.MIX and asked in (2, 3))
    document = _run(regret, tmp_path, "--through", "written", "--problems", "12")
    assert document["summary"]["count"] == 12
    assert document["summary"]["failed"] == document["summary"]["failed_elsewhere"] == 0


def test_queries_behind_a_cache_are_one_a_few_or_many_at_its_end(
    regret: ModuleType, problems: ModuleType, tmp_path: Path
) -> None:
    for device, seed, longest in (("cpu", 6, None), ("cpu", 1, 16), ("cuda", 4, None)):
        drawn = problems.draw(140, seed=seed, device=device, through="cache", longest=longest)
        assert {item.kind for item in drawn} == set(problems.kinds("cache"))
        assert {item.training for item in drawn} == {False}
        assert all(item.len_q < item.len_k for item in drawn), "the keys may have been shortened"
    for low, high in ((1, 1), (2, 16), (17, 4096)):
        assert sum(low <= item.len_q <= high for item in drawn) > 10, (low, high)
    document = _run(regret, tmp_path, "--through", "cache", "--problems", "21")
    assert document["summary"]["count"] == 21
    assert document["summary"]["failed"] == document["summary"]["failed_elsewhere"] == 0


def test_a_first_row_behind_a_cache_sees_all_of_it_on_both_sides(
    regret: ModuleType, problems: ModuleType
) -> None:
    """PyTorch's flag of causal order begins at the first key: of 9 a row would see one."""
    calls = sys.modules["benchmarks.regret_calls"]
    for len_q in (1, 4):
        problem = _problem(problems, len_q=len_q, len_k=12)
        with calls.function_calls(problem, "cpu", "quality") as both:
            both.check()
            ours, peer = both.ours(), both.peer()
        tensors = calls.tensors_of(problem, "cpu")
        seen = tensors.value[:, :, : 12 - len_q + 1].repeat_interleave(2, 1)
        keys = tensors.key[:, :, : 12 - len_q + 1].repeat_interleave(2, 1)
        first = torch.nn.functional.scaled_dot_product_attention(
            tensors.query[:, :, :1], keys, seen
        )
        for output in (ours, peer):
            torch.testing.assert_close(output[:, :, :1], first)


def test_an_alibi_mask_of_last_rows_is_the_end_of_the_whole_one(regret: ModuleType) -> None:
    from benchmarks.ops.inputs import alibi_mask

    query, key = torch.randn(1, 3, 12, 8), torch.randn(1, 3, 12, 8)
    slopes = {"alibi_slopes": torch.rand(3)}
    whole = alibi_mask(query, key, slopes)
    assert torch.equal(alibi_mask(query[:, :, 8:], key, slopes), whole[:, :, 8:])


@pytest.mark.parametrize("training", [False, True])
def test_a_wrong_result_is_a_failure_without_a_time(
    regret: ModuleType, problems: ModuleType, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    right = adaattn.scaled_dot_product_attention
    options = _options(regret, problems)
    problem = _problem(problems, training=training)
    assert "failed" not in regret.measure(problem, options)
    monkeypatch.setattr(
        adaattn,
        "scaled_dot_product_attention",
        lambda *given, **named: 1.01 * right(*given, **named),
    )
    row = regret.measure(problem, options)
    assert row["failed_by"] == "adaattn"
    assert "output" in row["failed"] and "beyond their bound" in row["failed"]
    assert not TIMES & set(row)
    assert regret.summary([row], "cpu")["failed"] == 1


def test_wrong_gradients_of_a_right_output_are_a_failure(
    regret: ModuleType, problems: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = adaattn.scaled_dot_product_attention

    def halved(*given: torch.Tensor, **named: Any) -> torch.Tensor:
        output = right(*given, **named)
        return 0.5 * output + 0.5 * output.detach()

    monkeypatch.setattr(adaattn, "scaled_dot_product_attention", halved)
    options = _options(regret, problems)
    assert "failed" not in regret.measure(_problem(problems), options)
    row = regret.measure(_problem(problems, training=True), options)
    assert row["failed"].startswith("AssertionError: gradient of ")


def test_a_row_that_sees_no_key_must_be_zeros(
    regret: ModuleType, problems: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number far below the rounding band of a head passes the rule, but is no zero."""
    right = adaattn.scaled_dot_product_attention
    options = _options(regret, problems)
    kind = problems.Kind.MASK
    problem = _problem(problems, kind=kind, mask_shape=(12, 12), hidden_rows=2)
    assert "failed" not in regret.measure(problem, options)
    monkeypatch.setattr(
        adaattn,
        "scaled_dot_product_attention",
        lambda *given, **named: right(*given, **named) + 1e-12,
    )
    assert "rows that see no key" in regret.measure(problem, options)["failed"]
    assert "failed" not in regret.measure(_problem(problems), options)


def test_a_part_of_the_heads_is_checked_where_all_would_be_too_many(
    regret: ModuleType, problems: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = sys.modules["benchmarks.regret_calls"]
    kinds = (problems.Kind.ALIBI, problems.Kind.BIAS)
    options = _options(regret, problems)
    for limit in (1, 3 * 24 * 32):
        monkeypatch.setattr(calls, "_CHECKED", limit)
        for kind in kinds:
            shape = (2, 4, 12, 12) if kind is problems.Kind.BIAS else ()
            problem = _problem(problems, kind=kind, mask_shape=shape, training=True)
            checked = calls._part(problem)[1]
            assert 0 < checked.stop - checked.start < problem.heads
            row = regret.measure(problem, options)
            assert "failed" not in row, row["failed"]


def test_an_exception_is_a_row_and_the_run_goes_on(
    regret: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = adaattn.scaled_dot_product_attention

    def refuses(*given: torch.Tensor, **named: Any) -> torch.Tensor:
        if "alibi_slopes" in named:
            raise ValueError("no slopes today")
        return right(*given, **named)

    monkeypatch.setattr(adaattn, "scaled_dot_product_attention", refuses)
    rows = _run(regret, tmp_path, "--problems", "10")["rows"]
    failed = [row for row in rows if "failed" in row]
    assert [row["problem"]["kind"] for row in failed] == ["alibi causal"]
    assert failed[0]["failed"] == "ValueError: no slopes today"
    assert len(rows) == 10


def test_a_ratio_below_the_bar_is_measured_again_three_times_as_long(
    regret: ModuleType, problems: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    found = [{"ratio": ratio, "peer_ms": 1.0} for ratio in (0.5, 1.1, 0.9)]

    def ratios(functions: Any, device: str, count: int) -> dict[str, Any]:
        rounds.append(count)
        return dict(found[len(rounds) - 1])

    monkeypatch.setattr(regret, "_ratios", ratios)
    row = regret.measure(_problem(problems), _options(regret, problems, "--rounds", "4"))
    assert rounds == [4, 12, 4]
    assert (row["ratio"], row["first_ratio"], row["one_line_ratio"]) == (1.1, 0.5, 0.9)


def test_the_summary_counts_what_lost(regret: ModuleType) -> None:
    rows = [
        {"cell": str(ratio), "ratio": ratio, "ratio_of_best": best, "executor": "x"}
        | {"host_over_peer_us": host, "ours_ms": 1.0, "peer_ms": ratio}
        | {"host_us": None if host is None else {"adaattn": 4e3, "F.sdpa": 4e3 - 1e3 * host}}
        for ratio, best, host in ((0.5, 0.6, 3.0), (0.9, 1.0, None), (1.0, 1.0, 5.0), (2, 2, 1.0))
    ]
    rows.append({"cell": "broken", "failed": "why", "failed_by": "F.sdpa"})
    assert regret.summary(rows, "cpu") == {
        "count": 5,
        "failed": 0,
        "failed_elsewhere": 1,
        "bar": 0.93,
        "worst_ratio": 0.5,
        "below_bar": 2,
        "below_bar_at_best_too": 1,
        "median_ratio": 0.95,
        "geometric_mean_ratio": pytest.approx((0.5 * 0.9 * 2) ** 0.25),
        "host_over_peer_us_median": 3.0,
        "host_over_peer_us_worst": 5.0,
        "worst_waited": {"ratio": 0.25, "cell": "0.5"},
        "worst": [
            {"cell": str(ratio), "ratio": ratio, "executor": "x"} for ratio in (0.5, 0.9, 1.0, 2)
        ],
    }


def test_no_problem_begins_after_the_limit(regret: ModuleType, tmp_path: Path) -> None:
    document = _run(regret, tmp_path, "--problems", "8", "--limit-s", "-1")
    assert document["rows"] == [] and document["summary"]["count"] == 0
