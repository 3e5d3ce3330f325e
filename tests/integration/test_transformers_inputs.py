"""What models and their callers hand to layers of Transformers beside masks: nothing is misread."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from adaattn.integrations.transformers import register
from adaattn.testing import assert_matches

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
GPT2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=40)
LLAMA = transformers.LlamaConfig(intermediate_size=32, **SMALL)
BERT = transformers.BertConfig(intermediate_size=32, **SMALL)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    with register():
        yield


def both(kind: Any, config: Any) -> list[Any]:
    """Return a model by eager attention and its copy by ours, weights far from uniform."""
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for parameter in eager.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="adaattn").eval()
    ours.load_state_dict(eager.state_dict())
    return [eager, ours]


def assert_alike(models: list[Any], run: Any) -> None:
    """Assert that ours, in float64, errs no more than eager attention does in float32.

    A whole network multiplies roundings by chance.
    """
    with torch.no_grad():
        yardstick = run(models[0])
        truth, got = (run(copy.deepcopy(model).double()) for model in models)
    assert_matches(got.to(yardstick.dtype), truth.double(), yardstick, summands=64)


def test_no_mask_hides_nothing_from_a_layer_that_was_written_for_eager_attention() -> None:
    """BridgeTower's images came without a mask to layers that say they are causal: 57 % wrong."""
    size = {"hidden_size": 64, "num_hidden_layers": 2}
    part = {"num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.BridgeTowerConfig(
        **size,
        **part,
        text_config={**size, **part, "vocab_size": 40, "max_position_embeddings": 32},
        vision_config={**size, "image_size": 32, "patch_size": 8},
    )
    pixels, tokens = torch.randn(2, 3, 32, 32), torch.randint(3, 40, (2, 10))
    assert_alike(
        both(transformers.BridgeTowerModel, config),
        lambda model: model(input_ids=tokens, pixel_values=pixels.to(model.dtype)).image_features,
    )


@pytest.mark.parametrize("given", [None, torch.ones(2, 12, dtype=torch.long)], ids=["none", "all"])
def test_an_encoder_sees_the_prefix_in_its_cache(given: torch.Tensor | None) -> None:
    """Prefix tuning: the first keys alone were seen, as many as there are tokens."""
    prefix = [torch.randn(2, 2, 2, 7, 16) for _ in range(2)]
    tokens = torch.randint(3, 40, (2, 5))

    def run(model: Any) -> torch.Tensor:
        cache = transformers.DynamicCache()
        for layer, (key, value) in enumerate(prefix):
            cache.update(key.to(model.dtype), value.to(model.dtype), layer)
        found: torch.Tensor = model(
            tokens, attention_mask=given, past_key_values=cache
        ).last_hidden_state
        return found

    assert_alike(both(transformers.BertModel, BERT), run)


@pytest.mark.parametrize(
    ("kind", "config"), [(transformers.GPT2Model, GPT2), (transformers.LlamaModel, LLAMA)]
)
def test_weights_are_there_whether_a_layer_asks_for_them_or_a_hook_does(
    kind: Any, config: Any
) -> None:
    """Layers of GPT-2 tell the attention function nothing, and its weights were ()."""
    tokens = torch.randint(3, 40, (2, 6))
    models = both(kind, config)
    for layer in range(2):
        assert_alike(
            models, lambda model, at=layer: model(tokens, output_attentions=True).attentions[at]
        )
    for _ in range(3):
        assert models[1](tokens).attentions is None


def test_words_for_the_loss_and_of_a_tokenizer_are_no_word_of_attention() -> None:
    eager, ours = both(transformers.LlamaForCausalLM, LLAMA)
    tokens = torch.randint(3, 40, (2, 6))
    words = {"labels": tokens, "shift_labels": tokens, "ignore_index": 3, "token_type_ids": tokens}
    assert_alike([eager, ours], lambda model: model(tokens, **words).loss[None])


PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("padding", [None, PADDED], ids=["none", "left"])
@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.GPT2Model, GPT2),
        (transformers.LlamaModel, LLAMA),
        (transformers.BertModel, BERT),
    ],
)
def test_a_model_without_numbers_gives_shapes_as_with_sdpa(
    kind: Any, config: Any, where: str, padding: torch.Tensor | None
) -> None:
    """On device meta each layer raised, in a FakeTensorMode each padding mask did."""
    device = "meta" if where == "meta" else "cpu"
    with FakeTensorMode() if where == "fake" else torch.device("meta"):
        mask = None if padding is None else torch.ones((2, 6), dtype=torch.long, device=device)
        model = kind._from_config(copy.deepcopy(config), attn_implementation="adaattn")
        tokens = torch.zeros((2, 6), dtype=torch.long, device=device)
        output = model(tokens, attention_mask=mask, output_attentions=True)
        found = output.last_hidden_state
        found.sum().backward()
    assert found.shape == (2, 6, 32) and found.is_meta == (where == "meta")
    assert [tuple(weights.shape) for weights in output.attentions] == [(2, 2, 6, 6)] * 2
    weights = [p for n, p in model.named_parameters() if p.dim() > 1 and "att" in n]
    assert weights and all(weight.grad is not None for weight in weights)
    real = torch.randint(3, 40, (2, 6))
    assert_alike(both(kind, config), lambda m: m(real, attention_mask=padding)[0][1:])
