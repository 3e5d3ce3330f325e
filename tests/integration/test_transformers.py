"""Models of Transformers give the same through AdaAttn as with their own eager attention."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import adaattn
from adaattn import functional
from adaattn.integrations.transformers import register
from adaattn.testing import assert_matches, compare

DECODERS = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_oss",
    "phi3", "olmo2", "cohere2", "starcoder2", "mixtral", "qwen2_moe", "granite", "smollm3",
    "llama4",
]  # fmt: skip
GENERATING = ["llama", "mistral", "gemma2", "gemma3", "gpt2", "gpt_oss", "qwen2_moe", "llama4"]
LENGTH = 14
PADDING = 5
SUMMANDS = 13 * 64  # six products a layer and the head, one behind another, the widest of 64


@pytest.fixture(autouse=True)
def adaattn_registered() -> Iterator[None]:
    """Register under the default name for each test, and take it out again."""
    with register():
        yield


@pytest.fixture
def same(oracle: Callable[..., Any]) -> Callable[..., None]:
    """Return an assertion that a model's results do not depend on the implementation."""

    def check(model: Any, call: Callable[[Any], torch.Tensor], rows: Any = ...) -> None:
        exact = oracle(model, call)
        model.set_attn_implementation("eager")
        yardstick = call(model)
        model.set_attn_implementation("adaattn")
        actual = call(model)
        assert_matches(actual[rows], exact[rows], yardstick[rows], summands=SUMMANDS)

    return check


@pytest.fixture
def tokens() -> torch.Tensor:
    """Return two rows of tokens without padding."""
    return torch.randint(3, 60, (2, LENGTH))


@pytest.fixture
def left_padding() -> torch.Tensor:
    """Return the padding mask of a batch whose first row is shorter."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :PADDING] = 0
    return mask


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_has_eager_logits(name: str, tiny: Any, same: Any, tokens: Any) -> None:
    with torch.no_grad():
        same(tiny(name), lambda model: model(tokens).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_batch_has_eager_logits_where_there_are_tokens(
    name: str, side: str, tiny: Any, same: Any, tokens: Any, left_padding: Any
) -> None:
    mask = left_padding if side == "left" else left_padding.flip(1)
    with torch.no_grad():
        same(tiny(name), lambda m: m(tokens, attention_mask=mask).logits, mask.bool())


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_read_in_two_parts_has_eager_logits(
    name: str, tiny: Any, same: Any, tokens: Any
) -> None:
    def second_part(model: Any) -> torch.Tensor:
        cache = model(tokens[:, :9], use_cache=True).past_key_values
        return model(tokens[:, 9:], past_key_values=cache, use_cache=True).logits

    with torch.no_grad():
        same(tiny(name), second_part)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "dynamic") for name in GENERATING),
        # Transformers before 5.23 cannot make Llama 4's masks for a static cache.
        *((name, "static") for name in GENERATING if name != "llama4"),
    ],
)
def test_greedy_generation_gives_the_tokens_of_eager(
    name: str, cache: str, tiny: Any, tokens: Any, left_padding: Any
) -> None:
    model = tiny(name)
    kwargs = {"cache_implementation": "static"} if cache == "static" else {}
    for mask in (torch.ones_like(tokens), left_padding):
        results = []
        for implementation in ("eager", "adaattn"):
            model.set_attn_implementation(implementation)
            results.append(
                model.generate(
                    tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, **kwargs
                )
            )
        assert results[1].shape[1] > LENGTH
        assert results[1].tolist() == results[0].tolist()


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_an_encoder_has_eager_logits(
    name: str, tiny: Any, same: Any, tokens: Any, left_padding: Any
) -> None:
    model, mask = tiny(name), left_padding.flip(1)
    with torch.no_grad():
        same(model, lambda m: m(tokens).logits)
        same(model, lambda m: m(tokens, attention_mask=mask).logits, mask.bool())


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_and_decoder_have_eager_logits_and_tokens(
    name: str, tiny: Any, same: Any, tokens: Any, left_padding: Any
) -> None:
    model, mask = tiny(name), left_padding.flip(1)
    target = torch.randint(3, 60, (2, 9))
    kwargs = {"attention_mask": mask, "decoder_input_ids": target}
    with torch.no_grad():
        same(model, lambda m: m(tokens, **kwargs).logits)
    results = []
    for implementation in ("eager", "adaattn"):
        model.set_attn_implementation(implementation)
        results.append(
            model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
        )
    assert results[1].tolist() == results[0].tolist()


def test_whisper_has_eager_logits(tiny: Any, same: Any) -> None:
    sound, target = torch.randn(2, 8, 24), torch.randint(3, 60, (2, 9))

    def call(model: Any) -> torch.Tensor:
        features = sound.to(model.dtype)
        return model(input_features=features, decoder_input_ids=target).logits

    with torch.no_grad():
        same(tiny("whisper"), call)


def test_vit_has_eager_logits(tiny: Any, same: Any) -> None:
    image = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        same(tiny("vit"), lambda model: model(image.to(model.dtype)).logits)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_every_parameter_gets_eager_gradients_in_training(
    name: str, tiny: Any, oracle: Any, tokens: Any, left_padding: Any
) -> None:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = tiny(name, **(quiet if name == "bert" else {})).train()
    mask = left_padding.flip(1)
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens[:, :9]

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        logits = model(**inputs).logits
        logits = logits if name == "t5" else logits[mask.bool()]
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)
        return {n: g for n, g in zip(names, found, strict=True) if g is not None}

    exact, sizes = oracle(model, lambda model: _with_sizes_of_biases(model, gradients))
    model.set_attn_implementation("eager")
    yardstick = gradients(model)
    model.set_attn_implementation("adaattn")
    actual = gradients(model)
    assert actual.keys() == exact.keys()
    for label, gradient in actual.items():
        assert_matches(
            gradient,
            exact[label],
            yardstick[label],
            name=label,
            summands=SUMMANDS * LENGTH,
            terms=sizes.get(label),
        )


def _with_sizes_of_biases(model: Any, call: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """Return what a call returns, and the size of what each bias's gradient sums.

    A key's bias changes no weight: its gradient is zero, from terms that are not.
    """
    sizes: dict[str, torch.Tensor] = {}

    def watch(label: str, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: sizes.update({label: grad.abs().flatten(0, -2).sum(0)}))

    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: watch(f"{name}.bias", out))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.bias is not None
    ]
    found = call(model)
    for hook in hooks:
        hook.remove()
    return found, sizes


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "bert"])
def test_attention_weights_are_returned_where_they_are_asked_for(
    name: str, tiny: Any, same: Any, tokens: Any
) -> None:
    def weights(model: Any) -> torch.Tensor:
        attentions = model(tokens, output_attentions=True).attentions
        assert len(attentions) == 2
        return torch.stack(attentions)

    with torch.no_grad():
        same(tiny(name), weights)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen2_moe"])
def test_packed_positions_keep_documents_apart(
    name: str, tiny: Any, same: Any, tokens: Any
) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    row, model = tokens[:1], tiny(name)
    with torch.no_grad():
        same(model, lambda m: m(row, position_ids=positions, use_cache=False).logits)


def test_flash_attention_keywords_keep_documents_apart(tiny: Any, oracle: Any, tokens: Any) -> None:
    starts, row = torch.tensor([0, 5, LENGTH], dtype=torch.int32), tokens[:1]
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]

    def apart(model: Any) -> torch.Tensor:
        parts = (row[:, :5], row[:, 5:])
        return torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)

    model = tiny("mistral")
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 9}
    with torch.no_grad():
        exact, yardstick = oracle(model, apart), apart(model)
        model.set_attn_implementation("adaattn")
        for extra in ({}, {"attention_mask": torch.ones_like(row)}):
            actual = model(row, position_ids=positions, use_cache=False, **packed, **extra).logits
            assert_matches(actual, exact, yardstick, summands=SUMMANDS)


@pytest.mark.parametrize("change", ["window", "causality", "softcap", "sinks"])
def test_the_comparison_notices_a_small_change_of_attention(
    change: str, tiny: Any, oracle: Any, tokens: Any, monkeypatch: Any
) -> None:
    model = tiny({"softcap": "gemma2", "sinks": "gpt_oss"}.get(change, "mistral"))
    replaced = {
        "window": {"window": (4, -1)},
        "causality": {"is_causal": False, "window": (5, 1)},
        "softcap": {"softcap": 2.1},
        "sinks": {"sinks": None},
    }[change]
    call = functional.bind_attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, **replaced})

    with torch.no_grad():
        exact, yardstick = oracle(model, lambda m: m(tokens).logits), model(tokens).logits
        monkeypatch.setattr("adaattn.integrations._transformers_attention.bind_attention", wrong)
        model.set_attn_implementation("adaattn")
        actual = model(tokens).logits
    assert compare(actual, exact, yardstick, summands=SUMMANDS).problems


def test_the_ambient_policy_is_followed_and_layers_name_their_calls(tiny: Any, tokens: Any) -> None:
    model, events = tiny("llama"), []
    model.set_attn_implementation("adaattn")
    with torch.no_grad(), adaattn.record_events(events.append):
        model(tokens)
        with adaattn.use_policy("speed"):
            model(tokens)
    seen = [(event.decision.policy, event.tag) for event in events]
    layers = ["layer0", "layer1"]
    assert seen == [(policy, tag) for policy in ("quality", "speed") for tag in layers]


def test_a_registered_policy_goes_before_the_ambient_one(tiny: Any, tokens: Any) -> None:
    model, events = tiny("llama"), []
    with register("adaattn-speed", policy="speed"), torch.no_grad():
        model.set_attn_implementation("adaattn-speed")
        with adaattn.record_events(events.append), adaattn.use_policy("balanced"):
            model(tokens)
    assert {event.decision.policy for event in events} == {"speed"}


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3"])
def test_a_compiled_model_is_one_graph_and_computes_the_same(
    tiny: Any, same: Any, tokens: Any, left_padding: Any, name: str, is_padded: bool
) -> None:
    mask = {"attention_mask": left_padding} if is_padded else {}

    def call(model: Any) -> torch.Tensor:
        run = model
        if model.config._attn_implementation == "adaattn":
            torch._dynamo.reset()
            run = torch.compile(model, backend="eager", fullgraph=True)
        logits: torch.Tensor = run(tokens, use_cache=False, **mask).logits
        return logits[:, PADDING:] if is_padded else logits

    with torch.no_grad():
        same(tiny(name), call)


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 2), (True, 1), (False, 5)])
def test_lengths_share_the_graphs_of_a_compiled_llama(
    tiny: Any, dynamic: bool | None, graphs: int
) -> None:
    torch._dynamo.reset()
    model, counter = tiny("llama"), CompileCounter()
    model.set_attn_implementation("adaattn")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for length in (8, 12, 17, 33, 40):
            compiled(torch.randint(3, 60, (2, length)), use_cache=False)
    assert counter.frame_count == graphs
