import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import adaattn
from adaattn.call.arguments import Arguments
from adaattn.call.describe import build_call
from adaattn.cli.machines import CARDS, facts_of
from adaattn.cli.plan import PlanRequest, decision_for, problem_of
from adaattn.errors import DeviceError
from adaattn.spec import Align, MaskKind

SHAPE = "1,8,2,512,512,64"


def test_the_decision_names_the_choice_and_a_reason_for_everything_else(
    invoke: Callable[..., Any],
) -> None:
    result = invoke("plan", "--shape", SHAPE, "--device", "cpu", "--causal")
    assert result.exit_code == 0
    assert "  + sdpa" in result.stdout
    refused = [line for line in result.stdout.splitlines() if line.startswith("  - ")]
    assert len(refused) > 5
    assert all(len(line.split()) > 3 for line in refused)


def test_json_holds_plan_and_trace_and_nothing_else_is_printed(
    invoke: Callable[..., Any], tmp_path: Path
) -> None:
    bare = json.loads(invoke("plan", "--shape", SHAPE, "--device", "cpu", "--json").stdout)
    assert bare["plan"]["groups"]
    assert {entry["accepted"] for entry in bare["trace"]} == {True, False}
    path = tmp_path / "plan.json"
    result = invoke("plan", "--json", str(path), "--shape", SHAPE, "--device", "cpu")
    assert result.exit_code == 0
    assert json.loads(path.read_text()) == bare
    assert invoke("plan", "--json", "--shape", SHAPE, "--device", "cpu").stdout.startswith("{")


@pytest.mark.parametrize("card", CARDS)
def test_every_known_card_can_be_planned_for_without_having_it(card: str) -> None:
    request = PlanRequest(shape="1,32,8,4096,4096,128", dtype="float16", device=card)
    _, hardware, decision = decision_for(request)
    assert hardware.device_type == "cuda"
    assert hardware.rates.source.startswith("datasheet")
    assert decision.cost.time_ms > 0


def test_a_faster_card_is_predicted_faster() -> None:
    times = {
        card: decision_for(PlanRequest(shape="4,32,8,8192,8192,128", dtype="float16", device=card))[
            2
        ].cost.time_ms
        for card in ("t4", "a100", "h200")
    }
    assert times["h200"] < times["a100"] < times["t4"]


def test_a_policy_file_that_asks_for_batch_invariance_is_planned_so(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    adaattn.save_policy(adaattn.Policy(batch_invariant=True), path)
    for device, executor in (("cpu", "chunked"), ("a100", "triton")):
        request = PlanRequest(shape=SHAPE, dtype="float16", device=device, policy=str(path))
        problem, _, decision = decision_for(request)
        assert problem.batch_invariant
        assert decision.plan.groups[0].capability == executor


def test_options_reach_the_problem_and_the_policy() -> None:
    problem, _, decision = decision_for(
        PlanRequest(
            shape="2,8,4,100,300,64,32",
            dtype="bf16",
            is_causal=True,
            window="128,0",
            align="bottom_right",
            dilation=2,
            softcap=30.0,
            device="cpu",
            policy="balanced",
            error_budget=0.25,
            memory_budget="1.5GB",
            backward=True,
        )
    )
    assert (problem.batch, problem.len_q, problem.len_k) == (2, 100, 300)
    assert (problem.num_heads, problem.num_kv_heads) == (8, 4)
    assert (problem.head_dim, problem.value_dim) == (64, 32)
    assert problem.window == (128, -1)  # to the right causal order says it
    assert problem.align is Align.BOTTOM_RIGHT
    assert (problem.dilation, problem.softcap) == (2, 30.0)
    assert problem.is_causal
    assert problem.requires_grad
    assert decision.policy == "balanced"
    assert decision.plan.error_budget == 0.25


def test_masks_alibi_sinks_dropout_and_packed_sequences_are_described_as_calls_are() -> None:
    shape = "1,8,2,512,512,64"
    options = {"alibi_slopes": True, "sinks": True, "dropout_p": 0.1, "cu_seqlens_q": "0,100,512"}
    problem, _, decision = decision_for(PlanRequest(shape=shape, device="cpu", **options))
    query, key = torch.empty(1, 8, 512, 64), torch.empty(1, 2, 512, 64)
    starts = torch.tensor([0, 100, 512], dtype=torch.int32)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "enable_gqa": True, "dropout_p": 0.1}
    beside = {"alibi_slopes": torch.ones(8), "sinks": torch.ones(8)}
    arguments = Arguments(**given, **beside)
    assert problem == build_call(query, key, key, arguments).problem.without_layout()
    assert decision.plan == adaattn.plan_attention(query, key, key, **given, **beside).plan


@pytest.mark.parametrize(
    ("text", "kind", "shape"),
    [
        ("bool", MaskKind.BOOLEAN, (1, 1, 512, 512)),
        ("float:8,1,512", MaskKind.ADDITIVE, (1, 8, 1, 512)),
        ("bool: 1, 1, 1, 512", MaskKind.BOOLEAN, (1, 1, 1, 512)),
    ],
)
def test_a_mask_is_of_all_pairs_or_of_the_shape_that_is_given(
    text: str, kind: MaskKind, shape: tuple[int, ...]
) -> None:
    problem, _, _ = decision_for(PlanRequest(shape=SHAPE, attn_mask=text, device="h200"))
    assert (problem.mask, problem.mask_shape) == (kind, shape)


@pytest.mark.parametrize(
    ("arguments", "words", "name"),
    [
        (("--device", "cpu"), "sdpa.flash", "sdpa.flash"),
        (("--device", "cpu", "--dropout-p", "0.1"), "sdpa.math", "sdpa.math"),
        (("--device", "cpu", "--softcap", "9"), "no such call (it does not support softcap)", None),
        (("--device", "t4"), "unknown, it tells on the device itself", ""),
    ],
)
def test_what_pytorch_would_choose_is_said(
    invoke: Callable[..., Any], arguments: tuple[str, ...], words: str, name: str | None
) -> None:
    shape = ("--shape", "1,8,8,512,512,64")
    told = invoke("plan", *shape, *arguments).stdout.splitlines()
    assert told[2] == f"F.scaled_dot_product_attention: {words}"
    assert json.loads(invoke("plan", *shape, *arguments, "--json").stdout)["sdpa_default"] == name


def test_a_plan_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that no machine has room for are planned all the same."""
    made = torch.empty
    sizes: list[int] = []

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        found = made(*size, **options)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(torch, "empty", empty)
    problem_of(PlanRequest(shape="64,64,64,1000000,1000000,128", attn_mask="bool"), "cpu")
    assert sum(sizes) < 10**7


def test_a_number_is_a_policy() -> None:
    _, _, decision = decision_for(PlanRequest(shape=SHAPE, policy="0.02", device="cpu"))
    assert (decision.policy, decision.plan.error_budget) == ("0.02", 0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2,3"], "error: shape: expected B,Hq,Hkv,Sq,Sk,D"),
        (["--shape", "1,2,2,a,4,8"], "error: shape: expected B,Hq,Hkv,Sq,Sk,D"),
        (["--shape", "1,2,2,0,4,8"], "error: shape: expected sizes of at least 1"),
        (["--shape", "1,8,8,4,9999999999,8"], "error: shape: expected sizes up to 2147483647"),
        (["--shape", "1,999999999,1,999999999,1,64"], "error: shape: expected sizes up to"),
        (["--shape", SHAPE, "--attn-mask", "int"], "error: attn_mask: expected bool or float, "),
        (
            ["--shape", SHAPE, "--attn-mask", "bool:3,512"],
            "error: attn_mask: expected a shape",
        ),
        (["--shape", SHAPE, "--attn-mask", "bool", "--causal"], "error: attn_mask with is_causal"),
        (["--shape", SHAPE, "--dropout-p", "2"], "error: dropout_p: expected a probability in"),
        (["--shape", SHAPE, "--cu-seqlens-q", "512"], "error: cu_seqlens_q: expected at least two"),
        (["--shape", SHAPE, "--cu-seqlens-q", "0;512"], "error: cu_seqlens_q: expected bounds of"),
        (["--shape", SHAPE, "--cu-seqlens-q", "0,9,500"], "error: cu_seqlens_q: expected rising"),
        (["--shape", SHAPE, "--cu-seqlens-k", "0,512"], "error: cu_seqlens_q and cu_seqlens_k: "),
        (["--shape", "1,8,3,4,4,8"], "error: Hq: expected a multiple of Hkv (3), got 8"),
        (["--shape", SHAPE, "--dtype", "int3"], "error: dtype: expected one of float64"),
        (
            ["--shape", SHAPE, "--device", "abacus"],
            "error: device: expected one of auto, cpu, cuda, cuda:N, v1",
        ),
        (["--shape", SHAPE, "--window", "1"], "error: window: expected LEFT,RIGHT"),
        (["--shape", SHAPE, "--window", "-2,0"], "error: window: expected LEFT,RIGHT"),
        (["--shape", SHAPE, "--align", "middle"], "error: align: expected 'top_left' or 'bottom"),
        (
            ["--shape", SHAPE, "--dilation", "0"],
            "error: dilation: expected an integer of",
        ),
        (["--shape", SHAPE, "--softcap", "nan"], "error: softcap: expected None or a finite"),
        (["--shape", SHAPE, "--policy", "fastest"], "error: policy: expected 'quality'"),
        (["--shape", SHAPE, "--error-budget", "2"], "error: error_budget: expected a number in"),
        (["--shape", SHAPE, "--memory-budget", "much"], "error: memory budget: expected bytes"),
    ],
)
def test_bad_options_print_one_line_and_exit_with_2(
    invoke: Callable[..., Any], arguments: list[str], message: str
) -> None:
    result = invoke("plan", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


NOTHING_FITS = ("plan", "--shape", SHAPE, "--device", "cpu", "--memory-budget", "1")


def test_a_budget_that_nothing_fits_has_a_line_for_each_candidate(
    invoke: Callable[..., Any],
) -> None:
    result = invoke(*NOTHING_FITS)
    first, *others = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert first == (
        "error: no executor can serve this call under policy 'quality'; "
        "raise the memory budget, or drop the feature that no executor has"
    )
    assert "expected at most 1 byte of workspace" in others[0]
    names = [line.split()[1] for line in others]
    assert {"sdpa.flash/fp32", "chunked/fp32", "reference/fp32"} <= set(names)
    assert all(line.startswith("  - ") for line in others)
    starts = {re.search(r"  +(?=\S)", line[4:]).end() for line in others}
    assert len(starts) == 1  # reasons stand below one another, as in a decision


def test_a_refused_plan_is_json_where_that_was_asked_for(
    invoke: Callable[..., Any], tmp_path: Path
) -> None:
    result = invoke(*NOTHING_FITS, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 2
    assert found["error"].startswith("no executor can serve this call")
    assert len(found["trace"]) == len(result.stderr.splitlines()) - 1
    for entry in found["trace"]:
        assert entry["candidate"] and entry["reason"] and entry["accepted"] is False
    path = tmp_path / "plan.json"
    assert invoke(*NOTHING_FITS, "--json", str(path)).exit_code == 2
    assert json.loads(path.read_text()) == found


@pytest.mark.parametrize(
    ("text", "expected"), [("100", 100), ("2kB", 2000), ("1.5 GiB", 3 * 2**29), ("7MB", 7 * 10**6)]
)
def test_memory_is_read_with_its_unit(text: str, expected: int) -> None:
    from adaattn.cli.plan import _bytes

    assert _bytes(text) == expected


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"expected one of auto, .*h200.*got 'abacus'"):
        facts_of("abacus")


def test_a_card_that_is_not_here_is_planned_for_by_its_shipped_times() -> None:
    table = facts_of("h200").timings
    assert table is not None and table.cells
    assert facts_of("v100").timings is None


def test_a_decoding_step_is_planned_for_as_many_keys_as_a_call_is() -> None:
    _, _, decision = decision_for(PlanRequest(shape="1,4,1,1,1500,64", device="cpu"))
    tensors = [
        torch.randn(1, heads, length, 64) for heads, length in ((4, 1), (1, 1500), (1, 1500))
    ]
    called = adaattn.plan_attention(*tensors, enable_gqa=True, policy="quality")
    assert decision.plan == called.plan
    assert [entry.time_ms for entry in decision.trace] == [entry.time_ms for entry in called.trace]
