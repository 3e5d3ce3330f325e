"""What other libraries call it, and arguments that are nearly right: answered by name."""

from typing import Any

import pytest
import torch

import adaattn
from adaattn import AdaAttention, AdaptiveRankAttention, DenseAttention, Policy, Precision
from adaattn import scaled_dot_product_attention as attend
from adaattn.errors import (
    ArgumentTypeError,
    PolicyError,
    ShapeError,
    UnsupportedError,
)
from adaattn.kernels.cuda_utils import adaptive_attention_kernel
from adaattn.policies import resolve_policy
from adaattn.testing import assert_matches

X = torch.randn(1, 4, 16, 8)

ANSWERS = [
    ("causal", "is_causal"),
    ("window_size", "window"),
    ("sliding_window", "window=(W - 1, 0), of W keys with the query's own"),
    ("softmax_scale", "scale"),
    ("sm_scale", "scale"),
    ("attn_bias", "attn_mask"),
    ("attention_mask", "attn_mask"),
    ("dropout", "dropout_p"),
    ("p", "dropout_p"),
    ("s_aux", "sinks"),
    ("logits_soft_cap", "softcap"),
    ("return_lse", "return_aux=AuxRequest(lse=True)"),
    ("output_attentions", "return_aux=AuxRequest(weights=True)"),
    ("deterministic", "torch.use_deterministic_algorithms(True)"),
    ("is_casual", "is_causal"),
    ("alibi_slope", "alibi_slopes"),
    ("cu_seqlen_q", "cu_seqlens_q"),
    ("alibi", "alibi_slopes"),
    ("key_padding_mask", "attn_mask=~key_padding_mask[:, None, None, :], as True says attend"),
    ("training", "dropout_p, 0.0 in evaluation"),
]


@pytest.mark.parametrize(("theirs", "ours"), ANSWERS)
def test_a_keyword_of_another_library_is_answered_with_its_name_here(
    theirs: str, ours: str
) -> None:
    for call in (attend, adaattn.plan_attention, adaptive_attention_kernel):
        with pytest.raises(ArgumentTypeError) as caught:
            call(X, X, X, **{theirs: 1})
        assert str(caught.value).endswith(f"got [{theirs!r}]; {theirs!r} is {ours} here")


def test_a_keyword_like_none_of_ours_gets_the_list_alone() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        attend(X, X, X, zebra=1)
    assert str(caught.value).startswith("keyword arguments: expected some of ['attn_mask', ")
    assert str(caught.value).endswith("got ['zebra']")


def test_several_are_answered_in_one_sentence() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        attend(X, X, X, causal=True, softmax_scale=1.0)
    assert str(caught.value).endswith("'causal' is is_causal here, 'softmax_scale' is scale here")


@pytest.mark.parametrize(
    ("module", "first"),
    [(AdaAttention, "policy"), (AdaptiveRankAttention, "error_budget"), (DenseAttention, "embed_")],
)
def test_modules_name_their_own_keywords_first(module: Any, first: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        module(16, 2, num_key_value_heads=1)
    assert str(caught.value).startswith(f"keyword arguments: expected some of ['{first}")
    assert str(caught.value).endswith("'num_key_value_heads' is num_kv_heads here")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("attention_dropout", "dropout"),
        ("d_model", "embed_dim"),
        ("dim", "embed_dim"),  # once taken for vdim
        ("error_budget", "policy, a number is an error budget"),
        ("hidden_size", "embed_dim"),
        ("num_attention_heads", "num_heads"),
    ],
)
def test_keywords_of_other_modules_are_answered(theirs: str, ours: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        AdaAttention(16, 2, **{theirs: 1})
    assert str(caught.value).endswith(f"got [{theirs!r}]; {theirs!r} is {ours} here")


@pytest.mark.parametrize("budget", [0, 0.0, 0.01, 0.5])
def test_a_number_is_an_error_budget(budget: float) -> None:
    events: list[adaattn.AttentionEvent] = []
    with adaattn.record_events(events.append):
        attend(X, X, X, policy=budget)
        with adaattn.use_policy(budget) as policy:
            attend(X, X, X)
        AdaAttention(16, 2, policy=budget)(torch.randn(1, 4, 16))
    assert policy == Policy(name=f"{budget:g}", error_budget=budget)
    assert [event.decision.policy for event in events] == [f"{budget:g}"] * 3


def test_calls_with_a_number_are_bound_once() -> None:
    from adaattn.call.bind import bound_calls

    x = torch.randn(1, 3, 19, 8)
    attend(x, x, x, policy=0.0625)
    before = bound_calls()
    for _ in range(3):
        attend(x, x, x, policy=float("0.0625"))  # another object each time
    assert bound_calls() == before


@pytest.mark.parametrize("text", ["0.02", "2e-2", " .02 "])
def test_the_text_of_a_number_is_the_same_budget(text: str) -> None:
    """So that a command line takes one."""
    assert resolve_policy(text) is resolve_policy(0.02)


@pytest.mark.parametrize(
    "wrong", ["1.5", "nan", "0,02", True, -0.1, 1, 1.5, float("nan"), float("inf")]
)
def test_a_number_that_is_no_budget_is_refused(wrong: float | str) -> None:
    with pytest.raises(PolicyError, match=r"an error budget in \[0, 1\), got "):
        attend(X, X, X, policy=wrong)


def test_formats_and_methods_may_be_named() -> None:
    named = Policy(error_budget=0.01, precisions=("bf16", "FP16"), methods=("exact", "low_rank"))
    assert named.precisions == (Precision.BF16, Precision.FP16)
    assert named == Policy.from_dict(named.to_dict())
    for field in ("precisions", "methods"):
        with pytest.raises(ArgumentTypeError, match="bf17"):
            Policy(**{field: ("bf17",)})  # type: ignore[arg-type]


def test_one_number_for_a_window_is_answered_with_both_meanings() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        attend(X, X, X, window=8)
    assert str(caught.value).endswith("got 8; (8, 8) looks both ways, (7, 0) is 8 keys, causal")


@pytest.mark.parametrize("grouped", [False, True])
def test_a_swapped_layout_is_asked_about_before_grouped_heads(grouped: bool) -> None:
    query, key = torch.randn(2, 24, 4, 8), torch.randn(2, 16, 4, 8)
    with pytest.raises(ShapeError) as caught:
        attend(query, key, key, enable_gqa=grouped)
    text = str(caught.value)
    assert "; are they [B, S, H, D]? Then pass x.transpose(1, 2); else use " in text
    with pytest.raises(ShapeError) as caught:
        attend(X, X[:, :2], X[:, :2])
    assert str(caught.value).endswith("got 4, 2; pass enable_gqa=True")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_jit_trace_is_refused_with_what_works() -> None:
    with pytest.raises(UnsupportedError, match=r"use torch\.compile or torch\.export"):
        torch.jit.trace(lambda x: attend(x, x, x), (X,))
    module = DenseAttention(16, 2)
    with pytest.raises(UnsupportedError, match=r"use torch\.compile or torch\.export"):
        torch.jit.trace(module, (torch.randn(1, 4, 16),))


def test_a_mask_of_a_narrower_dtype_is_taken() -> None:
    mask = torch.randn(16, 16).half()
    exact = attend(*[X.double()] * 3, attn_mask=mask.double())
    eager = attend(X, X, X, attn_mask=mask.float(), backend="reference")
    assert_matches(attend(X, X, X, attn_mask=mask), exact, eager, summands=24)


def test_models_and_the_flash_module_are_found_at_the_top() -> None:
    assert adaattn.models.Decoder.__name__ == "Decoder"
    assert adaattn.AdaptiveFlashAttention.__module__ == "adaattn.kernels.flash_attention"


def test_an_event_prints_as_a_short_block() -> None:
    events: list[adaattn.AttentionEvent] = []
    with adaattn.record_events(events.append):
        attend(X, X, X, layer=3)
    text = str(events[0])
    assert text.splitlines() == [
        "attention of layer 3: B 1, Hq 4, Hkv 4, Sq 16, Sk 16, D 8, Dv 8, fp32, cpu",
        "  all heads by sdpa.flash/fp32",
        "  policy quality, error budget 0",
    ]
