"""Modules, models and whole gradients on a CUDA device."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import adaattn
from adaattn import HeadGroup, LowRank, Plan, Precision, hardware
from adaattn.attention.adaattn import AdaAttention
from adaattn.attention.adaptive_precision import AdaptivePrecisionAttention
from adaattn.attention.adaptive_rank import AdaptiveRankAttention
from adaattn.attention.base import BaseAttention
from adaattn.attention.dense import DenseAttention
from adaattn.attention.rotary import RotaryConfig
from adaattn.backends.flex_masks import block_mask
from adaattn.models import Decoder, PositionKind, TransformerConfig
from adaattn.testing import assert_matches, make_problem, make_tensors

pytestmark = pytest.mark.gpu

EMBED, HEADS, LENGTH = 256, 4, 512
KINDS = [DenseAttention, AdaptiveRankAttention, AdaptivePrecisionAttention, AdaAttention]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"is_causal": True},
        {"key_padding_mask": True},
        {"key_padding_mask": True, "is_causal": True},
        {"need_weights": True},
    ],
    ids=str,
)
def test_dense_attention_is_as_right_as_pytorchs(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, device="cuda", dtype=dtype)
    ours = DenseAttention(EMBED, HEADS, device="cuda", dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    wide = copy.deepcopy(theirs).double()
    x = torch.randn(2, LENGTH, EMBED, device="cuda", dtype=dtype)
    given = dict(settings)
    if given.pop("key_padding_mask", False):
        given["key_padding_mask"] = torch.zeros(2, LENGTH, dtype=torch.bool, device="cuda")
        given["key_padding_mask"][1, -100:] = True
    output, weights = ours(x, **given)
    if given.get("is_causal"):
        given["attn_mask"] = nn.Transformer.generate_square_subsequent_mask(LENGTH, device="cuda")
        given["attn_mask"] = given["attn_mask"] < 0
    given.setdefault("need_weights", False)
    eager, eager_weights = theirs(x, x, x, **given)
    exact, exact_weights = wide(*(x.double(),) * 3, **given)
    assert_matches(output, exact, eager, summands=LENGTH + EMBED)
    if weights is not None:
        assert_matches(weights, exact_weights, eager_weights, summands=LENGTH + EMBED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_trains_and_its_memory_does_not_grow(kind: type[BaseAttention]) -> None:
    module = kind(EMBED, HEADS, num_kv_heads=2, device="cuda")
    optimiser = torch.optim.SGD(module.parameters(), lr=1e-3)
    x = torch.randn(2, LENGTH, EMBED, device="cuda")
    held = []
    for _ in range(40):
        optimiser.zero_grad(set_to_none=True)
        module(x, is_causal=True)[0].square().mean().backward()
        optimiser.step()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[9]
    assert module.get_statistics()["calls"] == 40
    assert module.get_statistics()["peak_memory_bytes"] > 0


def test_lower_formats_are_taken_where_they_pay_and_keep_the_budget() -> None:
    """The first calls are exact: what they measure arrives later. Every 16th one is audited."""
    module = AdaptivePrecisionAttention(EMBED, 2, device="cuda").eval()
    x = torch.randn(2, 16384, EMBED, device="cuda")
    with torch.no_grad():
        for _ in range(60):
            module(x)
            torch.cuda.synchronize()
    statistics = module.get_statistics()
    assert set(statistics["share_by_precision"]) & {"fp16", "bf16"}
    assert 0 < statistics["max_audited_error"] <= 0.01


@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradients_of_low_rank_are_whole(dim: int, is_causal: bool) -> None:
    """Rank 24 of 32 columns: what exact attention gives, by weights written out in chunks."""
    group = HeadGroup(capability="low_rank", method=LowRank(rank=32, value_rank=32))
    plan = Plan(groups=(group,), num_heads=4, error_budget=0.01)
    shapes = [(1, 4, 700, 24), (1, 2, 700, 24), (1, 2, 700, 24)]
    tensors = [
        torch.randn(s, device="cuda") @ torch.randn(*s[:2], 24, dim, device="cuda") / 24**0.5
        for s in shapes
    ]
    found, exact, eager = (
        _gradients(tensors, dtype, is_causal, chosen)
        for dtype, chosen in ((torch.float32, plan), (torch.float64, None), (torch.float32, None))
    )
    for one, oracle, yardstick in zip(found, exact, eager, strict=True):
        size = oracle.norm()
        assert (one - oracle).norm() <= 0.01 * size
        assert (yardstick - oracle).norm() <= 0.01 * size


def _gradients(
    tensors: list[torch.Tensor], dtype: torch.dtype, is_causal: bool, plan: Plan | None
) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    output = adaattn.scaled_dot_product_attention(
        *leaves, is_causal=is_causal, enable_gqa=True, plan=plan
    )
    generator = torch.Generator("cuda").manual_seed(0)
    direction = torch.randn(output.shape, device="cuda", generator=generator)
    return torch.autograd.grad((output * direction).sum(), leaves)


def test_a_block_mask_of_many_tokens_takes_little_memory() -> None:
    problem = make_problem(len_q=65536, is_causal=True, device_type="cuda", head_dim=16)
    tensors = make_tensors(problem)
    with hardware.peak_memory(torch.device("cuda")) as peak:
        mask = block_mask(tensors, problem)
    assert peak.added_bytes < 512 << 20
    assert mask.kv_num_blocks.sum() == 512


@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
def test_flex_attention_stays_compiled_for_many_shapes() -> None:
    """After eight shapes it once fell back to eager, which writes out all scores."""
    for length in range(1024, 1024 + 12 * 128, 128):
        x = torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16)
        settings: dict[str, Any] = {"is_causal": True, "softcap": 20.0}
        output = adaattn.scaled_dot_product_attention(x, x, x, backend="flex", **settings)
        wide = [x.double()] * 3
        exact = adaattn.scaled_dot_product_attention(*wide, backend="reference", **settings)
        eager = adaattn.scaled_dot_product_attention(x, x, x, backend="reference", **settings)
        assert_matches(output, exact, eager, summands=length + 64)


def test_softcap_over_many_tokens_fits_where_scores_would_not() -> None:
    x = torch.randn(1, 2, 32768, 64, device="cuda", dtype=torch.bfloat16)
    with hardware.peak_memory(x.device) as peak:
        adaattn.scaled_dot_product_attention(x, x, x, is_causal=True, softcap=20.0)
    assert peak.added_bytes < 1 << 30


def test_a_converted_encoder_gives_the_same_and_every_layer_is_ours() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda().eval()
    x = torch.randn(3, 100, EMBED, device="cuda")
    padding = torch.zeros(3, 100, dtype=torch.bool, device="cuda")
    padding[0, 60:] = True
    wide = copy.deepcopy(encoder).double()
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=padding)
        exact = wide(x.double(), src_key_padding_mask=padding)
        report = adaattn.convert(encoder, "dense")
        after = encoder(x, src_key_padding_mask=padding)
    assert len(report.replaced) == 2
    kept = ~padding
    assert_matches(after[kept], exact[kept], before[kept], summands=4 * EMBED)


def test_a_decoder_generates_as_on_the_cpu() -> None:
    config = TransformerConfig(
        vocab_size=100,
        num_layers=2,
        embed_dim=64,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=128,
        positions=PositionKind.ROTARY,
        rotary=RotaryConfig(head_dim=16),
    )
    decoder = Decoder(config).eval()
    tokens = torch.randint(0, 100, (2, 12))
    expected = decoder.generate(tokens, max_new_tokens=8)
    found = decoder.cuda().generate(tokens.cuda(), max_new_tokens=8)
    assert torch.equal(found.cpu(), expected)


def test_a_dense_module_can_be_captured_in_a_graph() -> None:
    module = DenseAttention(EMBED, HEADS, device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(2, 128, EMBED, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            module(x, is_causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, _ = module(x, is_causal=True)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, module(x, is_causal=True)[0])


def test_weights_by_name_of_format() -> None:
    module = AdaAttention(EMBED, HEADS, precision_mode="bf16", device="cuda").eval()
    module(torch.randn(2, 128, EMBED, device="cuda"))
    assert module.get_statistics()["share_by_precision"] == {Precision.BF16.label: 1.0}
