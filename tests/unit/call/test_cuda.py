"""On a GPU no call waits for the device, whatever the policy; what it measures arrives later."""

import time
import warnings
from collections.abc import Iterator

import pytest
import torch

import adaattn
from adaattn.call.adapt import PROCESS
from adaattn.call.bind import bound_calls
from adaattn.call.ledger import ledger_of
from adaattn.integrations.transformers import register
from adaattn.testing import assert_within_budget

pytestmark = pytest.mark.gpu

POLICIES = ("quality", "balanced", "speed")


@pytest.fixture
def never_waiting() -> Iterator[None]:
    """Make every synchronising call an error, once the libraries are loaded."""
    warm = torch.randn(1, 2, 64, 64, device="cuda")
    adaattn.scaled_dot_product_attention(warm, warm, warm)
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def draw(length: int = 1024, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 8, length, 64, device="cuda", dtype=dtype) for _ in range(3)]


@pytest.mark.usefixtures("never_waiting")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_call_of_the_function_waits(policy: str, dtype: torch.dtype) -> None:
    tensors = draw(dtype=dtype)
    mask = torch.ones(1024, 1024, device="cuda", dtype=torch.bool).tril()
    slopes = torch.rand(8, device="cuda")
    for _ in range(20):
        adaattn.scaled_dot_product_attention(*tensors, policy=policy)
        adaattn.scaled_dot_product_attention(*tensors, is_causal=True, policy=policy)
        adaattn.scaled_dot_product_attention(*tensors, mask, policy=policy)
        adaattn.scaled_dot_product_attention(
            *tensors, is_causal=True, alibi_slopes=slopes, policy=policy
        )


@pytest.mark.usefixtures("never_waiting")
def test_packed_calls_do_not_read_their_bounds() -> None:
    tensors = draw(dtype=torch.bfloat16)
    bounds = torch.tensor([0, 300, 1024], dtype=torch.int32, pin_memory=True)
    bounds = bounds.to("cuda", non_blocking=True)
    for _ in range(5):
        adaattn.scaled_dot_product_attention(
            *tensors, is_causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds
        )


@pytest.mark.usefixtures("never_waiting")
@pytest.mark.parametrize("training", [False, True])
def test_no_module_waits(training: bool) -> None:
    module = adaattn.AdaAttention(512, 8, policy="balanced", device="cuda").train(training)
    x = torch.randn(1, 1024, 512, device="cuda", requires_grad=training)
    for _ in range(20):
        output, _ = module(x, is_causal=True)
        if training:
            output.sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_layer_of_transformers_waits(policy: str, request: pytest.FixtureRequest) -> None:
    """A cache is passed: without one Transformers itself reads the positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaModel(config).to("cuda", torch.bfloat16).eval()
    tokens = torch.zeros(2, 300, dtype=torch.long, device="cuda")
    request.getfixturevalue("never_waiting")
    with register(policy=policy), torch.no_grad():
        model.set_attn_implementation("adaattn")
        for _ in range(20):
            past = transformers.DynamicCache(config=config)
            model(tokens, past_key_values=past, use_cache=True)
            model(tokens[:, :1], past_key_values=past, use_cache=True)


@pytest.mark.probation
def test_a_format_that_pays_is_taken_and_its_measured_saving_told() -> None:
    """fp32 by bf16 products takes a tenth of the time; nobody waits to find that out."""
    tensors = draw(8192)
    events: list[adaattn.AttentionEvent] = []
    with adaattn.record_events(events.append):
        for _ in range(400):
            adaattn.scaled_dot_product_attention(*tensors, policy="balanced")
            torch.cuda.synchronize()  # so that what is on its way arrives
    chosen = [event.decision.plan.groups[0].scheme.inputs.label for event in events]
    assert chosen[0] == "fp32" and chosen[-1] in ("bf16", "fp16")
    assert sum(event.saved_ms for event in events) > 0


@pytest.mark.probation
def test_a_format_that_does_not_pay_is_dropped() -> None:
    """The clock is told that each approximate call took ten times as long."""
    tensors = draw(8192)
    policy = adaattn.Policy(name="planted", error_budget=0.01)
    for _ in range(400):
        adaattn.scaled_dot_product_attention(*tensors, policy=policy)
        torch.cuda.synchronize()
        (key,) = [key for key in PROCESS._entries if key[2] is policy]
        ledger = ledger_of(key[0], policy, "auto", tensors[0].device)
        for variants, times in ledger._by_variants.items():
            if times:
                ledger.record(10 * ledger.exact_ms, "approximate", variants)
                ledger.record(10 * ledger.exact_ms, "approximate", variants)
    assert ledger.dropped
    _, aux = adaattn.scaled_dot_product_attention(*tensors, policy=policy, return_aux=True)
    assert aux.decision.plan.groups[0].scheme.inputs is adaattn.Precision.FP32


@pytest.mark.usefixtures("never_waiting")
@pytest.mark.parametrize("rank", [96, 1024], ids=["planted", "full"])
def test_wide_heads_are_sketched_without_waiting_where_keys_and_values_are_of_low_rank(
    rank: int, events: list[adaattn.AttentionEvent]
) -> None:
    def draw_one() -> torch.Tensor:
        normal = torch.randn(1, 32, 4096, 1024, device="cuda")
        if rank == 1024:
            return normal.bfloat16()
        left, right = (torch.randn(1, 32, size, rank, device="cuda") for size in (4096, 1024))
        return (left @ right.mT / rank**0.5 + 0.01 * normal).bfloat16()

    policy = adaattn.Policy(name="two percent", error_budget=0.02)
    query = torch.randn(1, 32, 4096, 1024, device="cuda").bfloat16()
    key, value = draw_one(), draw_one()
    with torch.no_grad():
        for _ in range(40):
            output = adaattn.scaled_dot_product_attention(query, key, value, policy=policy)
            time.sleep(0.01)  # what is on its way arrives
    torch.cuda.set_sync_debug_mode("default")
    names = {group.capability for group in events[-1].decision.plan.groups}
    assert ("low_rank.sketch" in names) is (rank == 96), events[-1].decision
    assert events[-1].decision.plan.is_exact is (rank == 1024)
    rows = torch.arange(0, 4096, 64, device="cuda")
    scores = query[:, :, rows].double() @ key.double().mT / 1024**0.5
    exact = scores.softmax(-1) @ value.double()
    assert_within_budget(output[:, :, rows], exact, policy.error_budget)


@pytest.mark.usefixtures("never_waiting")
def test_three_hundred_steps_of_decoding_leave_a_handful_of_bound_calls() -> None:
    cache = torch.randn(1, 8, 400, 64, device="cuda", dtype=torch.bfloat16)
    query = cache[:, :, :1].contiguous()
    before = bound_calls()
    for length in range(64, 364):
        keys = cache[:, :, :length]
        adaattn.scaled_dot_product_attention(query, keys, keys)
    assert bound_calls() - before <= 12


def test_a_call_is_captured_in_a_graph_after_a_warm_one() -> None:
    tensors = draw(dtype=torch.bfloat16)
    expected = adaattn.scaled_dot_product_attention(*tensors, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = adaattn.scaled_dot_product_attention(*tensors, is_causal=True)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
