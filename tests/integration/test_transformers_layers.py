"""The parts of the Transformers integration: the mask function and one layer's call."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

from adaattn.errors import ArgumentTypeError, ShapeError, UnsupportedError
from adaattn.integrations._transformers_masks import make_mask
from adaattn.integrations._transformers_structure import StructuredMask
from adaattn.integrations._transformers_visibility import joined
from adaattn.integrations.transformers import IGNORED_KEYWORDS, attention_forward
from adaattn.testing import assert_matches

SCALE = 0.3


class Layer(torch.nn.Module):
    """Stands for an attention layer of Transformers."""

    def __init__(self, *, is_causal: bool = True, layer_idx: int | None = None) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        self.eval()


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    bias: torch.Tensor | float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eager attention under a boolean mask in float64 and in the inputs' dtype."""
    results = []
    for dtype in (torch.float64, query.dtype):
        q, k, v = (tensor.to(dtype) for tensor in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = (q @ k.transpose(2, 3) * SCALE + bias).masked_fill(~seen, float("-inf"))
        results.append((torch.softmax(scores, -1) @ v).transpose(1, 2))
    return results[0], results[1]


def inputs(len_q: int = 7, len_k: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of four heads over two."""
    return (
        torch.randn(2, 4, len_q, 8),
        torch.randn(2, 2, len_k, 8),
        torch.randn(2, 2, len_k, 8),
    )


def positions(len_q: int, len_k: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query positions [Sq, 1] and key positions [1, Sk]."""
    return torch.arange(len_q)[:, None] + first, torch.arange(len_k)[None]


# Masks


def _causal() -> Callable[..., Any]:
    return masking_utils.causal_mask_function


MASK_FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "causal": _causal,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(3),
    "window of one": lambda: masking_utils.sliding_window_causal_mask_function(1),
    "wide window": lambda: masking_utils.sliding_window_causal_mask_function(50),
    "all": lambda: masking_utils.bidirectional_mask_function,
    "both sides": lambda: masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": lambda: masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=int)),
    "own": lambda: masking_utils.and_masks(_causal(), lambda b, h, q, k: k != 2),
}
LOCAL_SIZES = {"window": 3, "window of one": 1, "wide window": 50, "both sides": 2, "chunks": 3}
# (q_length, kv_length, q_offset, kv_offset): no cache, cache, static cache, rolling window,
# one token, cross attention.
EXTENTS = [
    (6, 6, 0, 0),
    (4, 9, 5, 0),
    (4, 12, 0, 0),
    (4, 12, 5, 0),
    (4, 6, 9, 7),
    (1, 6, 5, 0),
    (1, 3, 9, 7),
    (6, 9, 0, 0),
]


@pytest.mark.parametrize("extent", EXTENTS, ids=str)
@pytest.mark.parametrize("name", MASK_FUNCTIONS)
@pytest.mark.parametrize("padding", ["none", "ones", "left"])
def test_a_layer_sees_the_keys_that_transformers_own_mask_shows(
    name: str, extent: tuple[int, int, int, int], padding: str
) -> None:
    len_q, len_k, q_offset, kv_offset = extent
    two_dimensional = torch.ones(2, q_offset + len_q, dtype=torch.bool)
    if padding == "left":
        two_dimensional[0, : q_offset + 1] = False
    is_causal = name not in {"all", "both sides"}
    request: dict[str, Any] = {
        "batch_size": 2,
        "q_length": len_q,
        "kv_length": len_k,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": MASK_FUNCTIONS[name](),
        "attention_mask": None if padding == "none" else two_dimensional,
        "allow_is_causal_skip": is_causal and name != "own",
        "allow_is_bidirectional_skip": not is_causal,
        "use_vmap": name == "own",
        "local_size": LOCAL_SIZES.get(name),
        "device": torch.device("cpu"),
    }
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    seen = masking_utils.sdpa_mask(**{**request, **never})
    mask = make_mask(**request)
    if mask is None and len_q == 1 and len_k > q_offset + 1:
        pytest.fail("a static cache needs its mask")
    if isinstance(mask, StructuredMask):
        assert torch.equal(mask.materialise(), seen)
        mask = make_mask(**request)  # a fresh one, which has no tensor yet
    query, key, value = inputs(len_q, len_k)
    output, _ = attention_forward(
        Layer(is_causal=is_causal), query, key, value, mask, scaling=SCALE
    )
    rows = seen.any(-1, keepdim=True).transpose(1, 2)
    truth, yardstick = exact(query, key, value, seen)
    keep = rows.expand_as(output)
    assert_matches(output[keep], truth[keep], yardstick[keep], summands=len_k)
    assert not output[~keep].any()


@pytest.mark.parametrize("name", ["causal", "window"])
def test_patterns_without_padding_take_no_boolean_mask(name: str) -> None:
    request = {"batch_size": 2, "q_length": 4, "kv_length": 12, "q_offset": 5}
    mask = make_mask(**request, mask_function=MASK_FUNCTIONS[name]())
    assert isinstance(mask, StructuredMask)
    assert mask.structure.num_keys == 9
    assert mask.structure.window == ((2, -1) if name == "window" else (-1, -1))
    assert not mask.is_dense


def test_a_mask_is_made_once_unless_somebody_holds_it_or_computed_with_it() -> None:
    """What is held, by another thread say, or was computed with, may be written to."""
    request = {"batch_size": 2, "q_length": 5, "kv_length": 5, "mask_function": _causal()}
    made = []
    for other in ({}, {}, {"batch_size": 3}):
        mask = make_mask(**{**request, **other})
        made.append(weakref.ref(mask))
        del mask
    assert made[0]() is made[1]() is not made[2]()
    with torch.inference_mode():
        assert make_mask(**request) is not made[0]()
    held = make_mask(**request)
    assert held is made[0]()
    assert make_mask(**request) is not held
    held[..., 0] = False
    fresh = make_mask(**request)
    assert fresh.materialise()[..., 0].all()
    assert not held.materialise()[..., 0].any()
    before = weakref.ref(fresh)
    del fresh
    assert make_mask(**request) is not before(), "it was computed with"


def test_only_one_query_goes_without_a_mask() -> None:
    """Layers of NLLB-MoE, Splinter and PaliGemma took None for another order than their mask's."""
    request = {"batch_size": 2, "kv_length": 6, "mask_function": _causal()}
    assert make_mask(**request, q_length=1, q_offset=5) is None
    assert isinstance(make_mask(**request, q_length=6), StructuredMask)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_an_architecture_without_sdpa_computes_with_an_additive_mask(padding: str) -> None:
    """DeepSeek V4 appends a bias to its mask, which turned round as booleans."""
    config = transformers.GptOssConfig()
    config._attn_implementation = "adaattn"
    real = torch.ones(2, 6, dtype=torch.bool)
    real[0, 0] = padding == "none"
    request = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": _causal()}
    request["attention_mask"] = real
    mask = make_mask(**request, config=config, dtype=torch.bfloat16)
    assert isinstance(mask, StructuredMask)
    assert not mask.is_dense
    wanted = masking_utils.eager_mask(**request, dtype=torch.bfloat16)
    assert mask.dtype == wanted.dtype
    assert torch.equal(mask + 0, wanted)
    query, key, value = inputs(6, 6)
    for given in (mask, make_mask(**request, config=config)):  # with its tensor, and without
        output, _ = attention_forward(Layer(), query, key, value, given, scaling=SCALE)
        seen = wanted == 0
        truth, yardstick = exact(query, key, value, seen)
        keep = seen.any(-1, keepdim=True).transpose(1, 2).expand_as(output)
        assert_matches(output[keep], truth[keep], yardstick[keep], summands=6)


def test_a_decoder_used_as_an_encoder_sees_all_keys() -> None:
    """Its layers still call themselves causal, so that no mask would be read as causal."""

    config = transformers.LlamaConfig()
    config.is_causal = False
    mask = make_mask(
        batch_size=2,
        q_length=7,
        kv_length=7,
        mask_function=masking_utils.bidirectional_mask_function,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True,
        config=config,
    )
    query, key, value = inputs()
    output, _ = attention_forward(Layer(), query, key, value, mask, scaling=SCALE)
    truth, yardstick = exact(query, key, value, torch.ones(7, 7, dtype=torch.bool))
    assert_matches(output, truth, yardstick, summands=7)


def test_a_window_that_the_mask_does_not_have_is_not_applied() -> None:
    """OLMoE passes its configuration's window to layers whose mask shows all earlier keys."""

    config = transformers.LlamaConfig()
    config.sliding_window = 3
    for len_q, len_k in ((7, 7), (1, 7)):
        mask = make_mask(
            batch_size=2,
            q_length=len_q,
            kv_length=len_k,
            q_offset=len_k - len_q,
            mask_function=_causal(),
            config=config,
        )
        query, key, value = inputs(len_q, len_k)
        output, _ = attention_forward(
            Layer(), query, key, value, mask, scaling=SCALE, sliding_window=3
        )
        position, keys = positions(len_q, len_k, first=len_k - len_q)
        truth, yardstick = exact(query, key, value, keys <= position)
        assert_matches(output, truth, yardstick, summands=7)


def test_a_structured_mask_computes_like_the_boolean_mask_that_it_stands_for() -> None:
    def make() -> Any:
        return make_mask(
            batch_size=2,
            q_length=4,
            kv_length=9,
            q_offset=5,
            mask_function=MASK_FUNCTIONS["window"](),
        )

    dense = make().materialise()
    assert dense.dtype == torch.bool
    assert dense.shape == make().shape == (2, 1, 4, 9)
    assert torch.equal(make()[:, :, 1:, :4], dense[:, :, 1:, :4])
    assert torch.equal(torch.where(make(), 1.0, 2.0), torch.where(dense, 1.0, 2.0))
    assert torch.equal(~make() & dense, torch.zeros_like(dense))
    assert "is_causal=True" in repr(make())


def test_what_is_written_into_a_structured_mask_is_honoured() -> None:
    request = {"batch_size": 2, "q_length": 7, "kv_length": 7}
    mask = make_mask(**request, mask_function=MASK_FUNCTIONS["window"]())
    assert mask is not None
    mask[:, :, 3] = True
    query, key, value = inputs()
    output, _ = attention_forward(Layer(), query, key, value, mask, scaling=SCALE)
    position, keys = positions(7, 7)
    seen = (keys <= position) & (keys > position - 3)
    seen[3] = True
    truth, yardstick = exact(query, key, value, seen)
    assert_matches(output, truth, yardstick, summands=7)


# One layer's call


@pytest.mark.parametrize("name", sorted(IGNORED_KEYWORDS))
def test_keywords_that_leave_attention_alone_change_nothing(name: str) -> None:
    query, key, value = inputs()
    plain, weights = attention_forward(Layer(), query, key, value, None, scaling=SCALE)
    output, _ = attention_forward(
        Layer(), query, key, value, None, scaling=SCALE, **{name: torch.ones(3)}
    )
    assert torch.equal(output, plain)
    assert weights is None
    assert output.is_contiguous()
    assert output.shape == (2, 7, 4, 8)


def test_unknown_keywords_are_refused_unless_they_are_none() -> None:
    query, key, value = inputs()
    attention_forward(Layer(), query, key, value, None, head_mask=None)
    with pytest.raises(ArgumentTypeError, match=r"got 'block_indices'; drop it, or use attn_impl"):
        attention_forward(Layer(), query, key, value, None, block_indices=torch.zeros(1))
    with pytest.raises(UnsupportedError, match="continuous batching"):
        attention_forward(Layer(), query, key, value, None, cache=object())


def test_wrong_shapes_are_refused() -> None:
    query, key, value = inputs()
    with pytest.raises(ShapeError, match=r"expected \[B, Hq, Sq, D\], got \(4, 7, 8\)"):
        attention_forward(Layer(), query[0], key, value, None)
    with pytest.raises(ShapeError, match="pass padding"):
        attention_forward(Layer(), query, key, value, torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(ShapeError, match="attention_mask"):
        padding, bias = torch.ones(7, 7, dtype=torch.bool), torch.zeros(1, 4, 7, 7)
        attention_forward(Layer(), query, key, value, padding, position_bias=bias)
    with pytest.raises(UnsupportedError, match="one logit a head"):
        attention_forward(Layer(), query, key, value, None, sinks=torch.zeros(2, 4, 7, 1))
    with pytest.raises(ArgumentTypeError, match="both cu_seq_lens_q and cu_seq_lens_k"):
        attention_forward(Layer(), query, key, value, None, cu_seq_lens_q=torch.tensor([0, 7]))


@pytest.mark.parametrize("width", [5, 9])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_mask_may_be_narrower_or_wider_than_the_keys(width: int, kind: str) -> None:
    query, key, value = inputs(3, 7)
    position, keys = positions(3, width, first=2)
    mask = (keys <= position).expand(2, 1, 3, width)
    seen = torch.nn.functional.pad(mask, (0, max(0, 7 - width)))[..., :7]
    if kind == "additive":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    output, weights = attention_forward(
        Layer(), query, key, value, mask, scaling=SCALE, output_attentions=True
    )
    truth, yardstick = exact(query, key, value, seen)
    assert_matches(output, truth, yardstick, summands=7)
    assert weights is not None
    assert weights.shape == (2, 4, 3, 7)
    assert not weights[~seen.expand_as(weights)].any()


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_without_a_mask_is_applied(is_causal: bool) -> None:
    query, key, value = inputs()
    position, keys = positions(7, 7)
    output, _ = attention_forward(
        Layer(is_causal=is_causal), query, key, value, None, scaling=SCALE, sliding_window=3
    )
    near = (position - keys).abs() < 3
    seen = near & (keys <= position) if is_causal else near
    truth, yardstick = exact(query, key, value, seen)
    assert_matches(output, truth, yardstick, summands=7)


def test_the_causality_of_the_call_goes_before_that_of_the_layer() -> None:
    query, key, value = inputs()
    output, _ = attention_forward(Layer(), query, key, value, None, scaling=SCALE, is_causal=False)
    truth, yardstick = exact(query, key, value, torch.ones(7, 7, dtype=torch.bool))
    assert_matches(output, truth, yardstick, summands=7)


@pytest.mark.parametrize("kind", ["none", "boolean", "additive", "structured"])
def test_a_position_bias_is_added_whatever_the_mask(kind: str) -> None:
    query, key, value = inputs()
    bias = torch.randn(1, 4, 7, 7)
    position, keys = positions(7, 7)
    seen = (keys <= position).expand(2, 1, 7, 7)
    structured = make_mask(
        batch_size=2, q_length=7, kv_length=7, mask_function=_causal(), allow_is_causal_skip=False
    )
    mask = {
        "none": None,
        "boolean": seen,
        "additive": torch.where(seen, 0.0, torch.finfo(torch.float32).min),
        "structured": structured,
    }[kind]
    output, _ = attention_forward(
        Layer(), query, key, value, mask, scaling=SCALE, position_bias=bias
    )
    truth, yardstick = exact(query, key, value, seen, bias)
    assert_matches(output, truth, yardstick, summands=7)


@pytest.mark.parametrize(
    "other", [torch.randn(4, 7, 7), torch.randn(1, 4, 7, 11)], ids=["3-D", "wider"]
)
def test_a_bias_that_joins_no_mask_is_not_taken_for_one_alone(other: torch.Tensor) -> None:
    """The last call of a bias alone answered a call with a mask, and the bias was lost."""
    query, key, value = inputs()
    bias, mask = torch.randn(1, 4, 7, 7), torch.randn(1, 4, 7, 7)
    layer = Layer(is_causal=False)
    for _ in range(4):
        attention_forward(layer, query, key, value, None, scaling=SCALE, position_bias=bias)
    output, _ = attention_forward(
        layer, query, key, value, mask, scaling=SCALE, position_bias=other
    )
    seen = torch.ones(7, 7, dtype=torch.bool)
    truth, yardstick = exact(query, key, value, seen, other[..., :7] + mask)
    assert_matches(output, truth, yardstick, summands=7)


def test_a_large_bias_joins_a_mask_of_inference_mode() -> None:
    with torch.inference_mode():
        query, key, value = (torch.randn(1, 2, 160, 8) for _ in range(3))
        bias, mask = torch.randn(1, 2, 160, 160), torch.rand(1, 1, 160, 160) < 0.9
        output, _ = attention_forward(
            Layer(), query, key, value, mask, scaling=SCALE, position_bias=bias
        )
        truth, yardstick = exact(query, key, value, mask, bias)
    assert_matches(output, truth, yardstick, summands=160)


def test_mask_functions_of_any_kind_are_asked_and_not_kept() -> None:
    """An object that is called is not hashable; a method kept its model alive."""

    @dataclasses.dataclass
    class Prefix:
        length: int

        def __call__(self, b: int, h: int, q: Any, k: Any) -> Any:
            return (k <= q) | (k < self.length)

        def seen(self, b: int, h: int, q: Any, k: Any) -> Any:
            return self(b, h, q, k)

    prefix = Prefix(2)
    numbers = {"batch_size": 1, "q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0}
    config = transformers.LlamaConfig(attn_implementation="adaattn")
    expected = torch.ones(4, 4, dtype=torch.bool).tril()
    expected[:, :2] = True
    for function in (prefix, prefix.seen):
        mask = make_mask(mask_function=function, attention_mask=None, config=config, **numbers)
        assert mask is not None and torch.equal(mask[0, 0], expected)
    kept = weakref.ref(prefix)
    del prefix, function
    assert kept() is None


def test_dropout_acts_in_training_only() -> None:
    query, key, value = inputs()
    layer = Layer()
    plain, _ = attention_forward(layer, query, key, value, None, dropout=0.0)
    evaluated, _ = attention_forward(layer, query, key, value, None, dropout=0.5)
    assert torch.equal(evaluated, plain)
    layer.train()
    trained, _ = attention_forward(layer, query, key, value, None, dropout=0.5)
    assert not torch.equal(trained, plain)


def test_packed_keywords_join_with_a_mask() -> None:
    query, key, value = (tensor[:1] for tensor in inputs())
    starts = torch.tensor([0, 3, 7])
    position, keys = positions(7, 7)
    causal = (keys <= position).expand(1, 1, 7, 7)
    together = (position < 3) == (keys < 3)
    for mask in (causal, torch.where(causal, 0.0, torch.finfo(torch.float32).min), None):
        output, _ = attention_forward(
            Layer(),
            query,
            key,
            value,
            mask,
            scaling=SCALE,
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
        )
        truth, yardstick = exact(query, key, value, causal & together)
        assert_matches(output, truth, yardstick, summands=7)


def test_an_additive_mask_in_another_dtype_is_cast() -> None:
    query, key, value = (tensor.to(torch.bfloat16) for tensor in inputs())
    position, keys = positions(7, 7)
    seen = (keys <= position).expand(2, 1, 7, 7)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    output, _ = attention_forward(Layer(), query, key, value, mask, scaling=SCALE)
    truth, yardstick = exact(query, key, value, seen)
    assert_matches(output, truth, yardstick, summands=7)


def test_a_bias_under_a_mask_is_made_once_for_all_layers() -> None:
    bias, mask = torch.randn(1, 4, 128, 128), torch.rand(2, 1, 128, 128) > 0.3
    made = joined(bias, mask)
    assert joined(bias, mask) is made
    assert torch.equal(made, torch.where(mask, bias, float("-inf")))
    assert joined(bias, mask.clone()) is not made
    mask[..., 0] = True
    assert joined(bias, mask)[..., 0].isfinite().all()
    bias[..., 0] = 7.0
    assert (joined(bias, mask)[..., 0] == 7.0).all()
    followed = bias.requires_grad_()
    for _ in range(2):
        joined(followed, mask).where(mask, 0.0).sum().backward()
    assert followed.grad is not None


def test_a_bias_under_a_mask_is_gone_with_the_mask() -> None:
    """It was kept with the bias, which a model may own."""
    bias, mask = torch.randn(1, 4, 128, 128), torch.rand(2, 1, 128, 128) > 0.3
    made = weakref.ref(joined(bias, mask))
    assert made() is not None
    del mask
    gc.collect()
    assert made() is None


@pytest.mark.parametrize("kind", ["order", "none", "boolean", "additive"])
def test_keys_that_queries_chose_are_seen_alone(kind: str) -> None:
    query, key, value = inputs()
    position, keys = positions(7, 7)
    indices = torch.rand(2, 7, 7).argsort(-1)[..., :3].to(torch.int32)
    indices[:, :, 0] = torch.arange(7)  # each row sees itself
    seen = torch.zeros(2, 7, 7, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    layer, mask = Layer(), None
    if kind == "none":
        layer.is_causal = False
    else:
        seen = seen & (keys <= position)
    if kind in ("boolean", "additive"):
        mask = (keys <= position).expand(2, 1, 7, 7)
    if kind == "additive":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    output, _ = attention_forward(layer, query, key, value, mask, scaling=SCALE, indices=indices)
    truth, yardstick = exact(query, key, value, seen)
    assert_matches(output, truth, yardstick, summands=7)
    with pytest.raises(ShapeError, match=r"indices of keys: expected \[B, Sq, k\] of integers"):
        attention_forward(layer, query, key, value, mask, indices=indices[0])
