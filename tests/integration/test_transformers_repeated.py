"""A layer's call that is found again by the layer's own words is the one that was bound for it."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import masking_utils

from adaattn import History, Policy, hardware, record_events, use_policy
from adaattn.call.recent import Miss
from adaattn.integrations import _transformers_attention as layers
from adaattn.integrations._transformers_masks import make_mask
from adaattn.testing import assert_matches

_HISTORY = History()
_POLICY = Policy(error_budget=0.01)

Given = tuple[torch.nn.Module, list[torch.Tensor | None], dict[str, Any]]


class Layer(torch.nn.Module):
    """Stands for an attention layer of Transformers."""

    def __init__(self, *, is_causal: bool = True, layer_idx: int | None = 2) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        self.eval()


@cache
def layer_of(*, training: bool, **settings: Any) -> Layer:
    """Return the one layer of some settings."""
    return Layer(**settings).train(training)


def call(
    mask: torch.Tensor | None = None,
    *,
    layer: dict[str, Any] | None = None,
    training: bool = False,
    lengths: tuple[int, int] = (7, 7),
    **keywords: Any,
) -> Given:
    """Return what a layer passes; q has four heads over two."""
    module = layer_of(training=training, **(layer or {}))
    heads = ((4, lengths[0]), (2, lengths[1]), (2, lengths[1]))
    tensors: list[torch.Tensor | None] = [torch.randn(1, *shape, 8) for shape in heads]
    usual = {"dropout": 0.0, "scaling": 0.3, "position_ids": torch.arange(7)[None]}
    return module, [*tensors, mask], {**usual, "history": _HISTORY, **keywords}


def structured(function: Callable[..., Any], **other: Any) -> torch.Tensor:
    request = {"batch_size": 1, "q_length": 7, "kv_length": 7, "mask_function": function, **other}
    mask = make_mask(**request)
    assert mask is not None
    return mask


def held(mask: torch.Tensor) -> torch.Tensor:
    """Return a structured mask with which somebody has computed."""
    mask[..., 0] = True
    return mask


SEEN = torch.ones(1, 1, 7, 7).tril() > 0
SINKS = torch.randn(4)
STARTS = torch.tensor([0, 3, 7], dtype=torch.int32)
_causal = masking_utils.causal_mask_function
_window = masking_utils.sliding_window_causal_mask_function
CALLS: dict[str, Callable[[], Given]] = {
    "plain": call,
    "other words that change nothing": lambda: call(use_cache=False),
    "a longer query": lambda: call(lengths=(9, 9)),
    "fewer keys": lambda: call(lengths=(7, 5)),
    "more keys": lambda: call(lengths=(7, 9)),
    "one query": lambda: call(lengths=(1, 9)),
    "scaling": lambda: call(scaling=0.5),
    "no scaling": lambda: call(scaling=None),
    "all keys": lambda: call(is_causal=False),
    "a layer that sees all keys": lambda: call(layer={"is_causal": False}),
    "another layer": lambda: call(layer={"layer_idx": 3}),
    "a layer of the same number": lambda: call(layer={"layer_idx": 2}),
    "a layer without a number": lambda: call(layer={"layer_idx": None}),
    "dropout of no effect": lambda: call(dropout=0.5),
    "training": lambda: call(training=True),
    "dropout": lambda: call(training=True, dropout=0.5),
    "window": lambda: call(sliding_window=3),
    "another window": lambda: call(sliding_window=4),
    "softcap": lambda: call(softcap=2.0),
    "sinks": lambda: call(sinks=SINKS),
    "sinks by another name": lambda: call(s_aux=SINKS),
    "sinks of another shape": lambda: call(s_aux=SINKS.view(1, 4, 1, 1)),
    "a mask of causal order": lambda: call(structured(_causal)),
    "a mask of a window": lambda: call(structured(_window(3))),
    "a mask of another window": lambda: call(structured(_window(4))),
    "a mask that was computed with": lambda: call(held(structured(_causal))),
    "a mask that cuts off keys": lambda: call(structured(_causal, kv_length=9), lengths=(7, 9)),
    "a boolean mask": lambda: call(SEEN),
    "an additive mask": lambda: call(torch.where(SEEN, 0.0, -1e9)),
    "a mask of each head": lambda: call(SEEN.expand(1, 4, 7, 7)),
    "a narrower mask": lambda: call(SEEN[..., :5]),
    "a bias": lambda: call(position_bias=torch.ones(1, 4, 7, 7)),
    "a bias for one query": lambda: call(lengths=(1, 9), position_bias=torch.ones(1, 4, 1, 9)),
    "a bias of causal order": lambda: call(
        structured(_causal), position_bias=torch.ones(1, 4, 7, 7)
    ),
    "a bias beside a mask": lambda: call(SEEN, position_bias=torch.ones(1, 4, 7, 7)),
    "a wider bias beside a mask": lambda: call(
        SEEN, lengths=(7, 7), position_bias=torch.ones(1, 4, 7, 9)
    ),
    "an additive mask as large": lambda: call(torch.ones(1, 4, 7, 7)),
    "packed": lambda: call(cu_seq_lens_q=STARTS, cu_seq_lens_k=STARTS),
    "weights": lambda: call(output_attentions=True),
    "a policy": lambda: call(policy=_POLICY),
    "another history": lambda: call(history=History()),
    "no history": lambda: call(history=None),
}
NEVER = {
    "a wider bias beside a mask",
    "more keys",  # a static cache: its keys are cut off
    "sinks of another shape",
    "a mask that was computed with",  # its ordinary tensor is another one
    "a mask that cuts off keys",
    "a narrower mask",
    "packed",
    "weights",
    "another history",
}
"""Never found by the layer's words."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Note what a layer finds, None where that is nothing."""
    found: list[object] = []
    again = layers.again

    def noting(*given: Any) -> Any:
        known = again(*given)
        found.append(None if isinstance(known, Miss) else known)
        return known

    monkeypatch.setattr(layers, "again", noting)
    hardware.clear_cache()
    yield found
    hardware.clear_cache()


def run(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    module, tensors, keywords = CALLS[name]()
    return layers.attention_forward(module, *tensors, **keywords)  # type: ignore[arg-type]


def bound_for(name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return what is bound for a call where no layer looks for its last one."""
    bind, bound = layers.bind_attention, []

    def noting(*given: Any, **keywords: Any) -> Any:
        bound.append(bind(*given, **keywords))
        return bound[-1]

    with monkeypatch.context() as patched:
        patched.setattr(layers, "again", lambda *_: Miss.SKIP)
        patched.setattr(layers, "bind_attention", noting)
        run(name)
    return bound[-1].bound


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_of_a_layer_is_found_by_its_words(name: str, found: list[object]) -> None:
    for _ in range(4):
        run(name)
    assert (found[-1] is not None) is (name not in NEVER)


@pytest.mark.parametrize("first", CALLS)
def test_no_other_call_of_a_layer_is_taken_for_it(
    first: str, found: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in CALLS:
        for name in (first, first, first, other):
            found.clear()
            run(name)
        if found[-1] is not None:
            assert found[-1] is bound_for(other, monkeypatch)
        hardware.clear_cache()


def test_a_layer_follows_the_ambient_policy(found: list[object]) -> None:
    for _ in range(3):
        run("plain")
    assert found[-1] is not None
    with use_policy("balanced"):
        run("plain")
        assert found[-1] is None


def test_a_found_call_is_counted_and_told_like_any_other() -> None:
    events: list[Any] = []
    with record_events(events.append):
        for _ in range(4):
            run("a layer without a number")
            run("another layer")
    assert [event.tag for event in events] == ["", "layer3"] * 4


def test_a_layer_that_changes_is_not_taken_for_itself(found: list[object]) -> None:
    module = Layer()
    tensors = [torch.randn(1, heads, 7, 8) for heads in (4, 2, 2)]
    for name, value in (("is_causal", False), ("layer_idx", 5), ("training", True)):
        for _ in range(3):
            layers.attention_forward(module, *tensors, None, scaling=0.3)
        assert found[-1] is not None
        setattr(module, name, value)
        layers.attention_forward(module, *tensors, None, scaling=0.3)
        assert found[-1] is None


@pytest.mark.parametrize("function", [_causal, _window(40)], ids=["causal", "window"])
def test_a_few_tokens_over_a_growing_cache_are_found_whatever_its_length(
    function: Callable[..., Any], found: list[object]
) -> None:
    """Assisted decoding; each length of a window was another structure, noted and never found."""
    module = Layer()
    for length in range(33, 64):
        heads = ((4, 4), (2, length), (2, length))
        query, key, value = (torch.randn(1, *shape, 8) for shape in heads)
        mask = structured(function, q_length=4, kv_length=length, q_offset=length - 4)
        output, _ = layers.attention_forward(module, query, key, value, mask, scaling=0.3)
        seen = function(0, 0, torch.arange(length - 4, length)[:, None], torch.arange(length)[None])
        wanted = [
            F.scaled_dot_product_attention(
                *(item.to(dtype) for item in (query, key, value)), seen, scale=0.3, enable_gqa=True
            ).transpose(1, 2)
            for dtype in (torch.float64, torch.float32)
        ]
        assert_matches(output, *wanted, summands=length)
    assert found.count(None) == (2 if function is _causal else 4), "twice on either side of 40"
