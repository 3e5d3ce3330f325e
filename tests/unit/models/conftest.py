"""Tiny random transformers of each style, and their counterparts in Transformers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn.models import Decoder, Encoder, TransformerConfig
from adaattn.testing import assert_matches

VOCABULARY = 64
WINDOW = 4

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "mlp_dim": 48,
    "max_positions": 48,
}
GPT: dict[str, Any] = {**SIZES}
LLAMA: dict[str, Any] = {
    **SIZES,
    "num_kv_heads": 2,
    "activation": "silu",
    "mlp": "gated",
    "norm": "rms",
    "positions": "rotary",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_embeddings": False,
}
LOCAL: dict[str, Any] = {
    **LLAMA,
    "head_dim": 16,
    "qk_norm": True,
    "windows": ((WINDOW - 1, -1), (-1, -1)),
    "softcap": 4.0,
}
BERT: dict[str, Any] = {
    **SIZES,
    "activation": "gelu",
    "norm_eps": 1e-12,
    "norm_placement": "post",
    "type_vocab_size": 2,
    "embedding_norm": True,
    "pooler": True,
}
DECODERS = {"gpt": GPT, "llama": LLAMA, "local": LOCAL}

_THEIRS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_THEIRS, "num_key_value_heads": 2}
_TIERS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 48,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "llama_biased": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_THEIRS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_GROUPED, **_TIERS}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, **_TIERS, "head_dim": 16}),
    "bert": ("BertConfig", "BertModel", _THEIRS),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 48,
            "pad_token_id": 0,
        },
    ),
    "bert_classifier": (
        "BertConfig",
        "BertForSequenceClassification",
        {**_THEIRS, "num_labels": 3},
    ),
}


def spread_weights(model: torch.nn.Module) -> None:
    """Draw weights so wide that every part of the model moves its result."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.uniform_(-0.5, 1.5)


@pytest.fixture
def decoder() -> Callable[..., Decoder]:
    """Return a maker of tiny decoders in evaluation mode."""

    def make(style: str = "gpt", **changes: Any) -> Decoder:
        torch.manual_seed(1)
        model = Decoder(TransformerConfig(**{**DECODERS[style], **changes}))
        spread_weights(model)
        return model.eval()

    return make


@pytest.fixture
def encoder() -> Callable[..., Encoder]:
    """Return a maker of tiny encoders in evaluation mode."""

    def make(**changes: Any) -> Encoder:
        torch.manual_seed(1)
        model = Encoder(TransformerConfig(**{**BERT, **changes}))
        spread_weights(model)
        return model.eval()

    return make


@pytest.fixture
def theirs() -> Callable[..., Any]:
    """Return a maker of tiny models of Transformers."""
    import transformers

    def make(name: str, **changes: Any) -> Any:
        config, model, values = HUGGING_FACE[name]
        torch.manual_seed(1)
        made = getattr(transformers, model)(
            getattr(transformers, config)(**{**values, **changes}, attn_implementation="eager")
        )
        spread_weights(made)
        made.tie_weights()
        if made.can_generate():
            made.generation_config.pad_token_id = 0
        return made.eval()

    return make


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """Return a maker of random rows without padding and end tokens."""

    def make(rows: int = 2, length: int = 10, seed: int = 3) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, (rows, length), generator=generator)

    return make


@pytest.fixture
def exact() -> Callable[[Any], Any]:
    """Return a maker of float64 copies."""
    return lambda model: copy.deepcopy(model).double()


@pytest.fixture
def same_numbers() -> Callable[..., None]:
    """Return the assertion for what whole tiny models compute."""
    # What the products of two blocks and the head sum up for one logit.
    summands = 2 * (4 * SIZES["embed_dim"] + SIZES["mlp_dim"]) + SIZES["embed_dim"]

    def check(actual: torch.Tensor, reference: torch.Tensor, yardstick: torch.Tensor) -> None:
        assert_matches(actual, reference, yardstick, summands=summands)

    return check
