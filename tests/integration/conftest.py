"""Tiny random models of Transformers, made from configurations, and their float64 oracle."""

import contextlib
import copy
import dataclasses
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

VOCABULARY = 64
WINDOW = 6

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS_OF_8 = {**GROUPED, "head_dim": 8}
LOCAL = ["sliding_attention", "full_attention"]
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A tiny model: the class of its configuration and model, and what sets its sizes."""

    config: str
    model: str
    values: dict[str, Any]


def _decoder(prefix: str, values: dict[str, Any], suffix: str = "ForCausalLM") -> Architecture:
    config = f"{prefix.replace('Text', '')}{'TextConfig' if 'Text' in prefix else 'Config'}"
    return Architecture(config=config, model=prefix.replace("Text", "") + suffix, values=values)


DECODERS: dict[str, Architecture] = {
    "llama": _decoder("Llama", GROUPED),
    "mistral": _decoder("Mistral", {**GROUPED, "sliding_window": WINDOW}),
    "qwen2": _decoder(
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": _decoder("Qwen3", HEADS_OF_8),
    "gemma2": _decoder(
        "Gemma2",
        {
            **HEADS_OF_8,
            "sliding_window": WINDOW,
            "layer_types": LOCAL,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": Architecture(
        config="Gemma3TextConfig",
        model="Gemma3ForCausalLM",
        values={**HEADS_OF_8, "sliding_window": WINDOW, "layer_types": LOCAL},
    ),
    "gpt2": Architecture(
        config="GPT2Config",
        model="GPT2LMHeadModel",
        values={
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": _decoder("GPTNeoX", SIZES),
    "gpt_oss": _decoder(
        "GptOss",
        {
            **HEADS_OF_8,
            **EXPERTS,
            "sliding_window": WINDOW,
            "layer_types": LOCAL,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "phi3": _decoder("Phi3", {**GROUPED, "sliding_window": WINDOW}),
    "olmo2": _decoder("Olmo2", GROUPED),
    "cohere2": _decoder("Cohere2", {**GROUPED, "sliding_window": WINDOW, "layer_types": LOCAL}),
    "starcoder2": _decoder("Starcoder2", {**GROUPED, "sliding_window": WINDOW}),
    "mixtral": _decoder("Mixtral", {**GROUPED, **EXPERTS, "sliding_window": WINDOW}),
    # Its layers do not pass their window on: only the mask knows it.
    "qwen2_moe": _decoder(
        "Qwen2Moe",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "granite": _decoder("Granite", GROUPED),
    "smollm3": _decoder("SmolLM3", GROUPED),
    "llama4": Architecture(
        config="Llama4TextConfig",
        model="Llama4ForCausalLM",
        values={
            **HEADS_OF_8,
            **EXPERTS,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
}

ENCODERS: dict[str, Architecture] = {
    "bert": Architecture(config="BertConfig", model="BertForMaskedLM", values=SIZES),
    "roberta": Architecture(config="RobertaConfig", model="RobertaForMaskedLM", values=SIZES),
    "modernbert": Architecture(
        config="ModernBertConfig",
        model="ModernBertForMaskedLM",
        values={**SIZES, "local_attention": WINDOW, "cls_token_id": 1, "sep_token_id": 2},
    ),
}

SEQUENCE_TO_SEQUENCE: dict[str, Architecture] = {
    "t5": Architecture(
        config="T5Config",
        model="T5ForConditionalGeneration",
        values={
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 1,
        },
    ),
    "bart": Architecture(
        config="BartConfig",
        model="BartForConditionalGeneration",
        values={**BART, "max_position_embeddings": 64},
    ),
    "whisper": Architecture(
        config="WhisperConfig",
        model="WhisperForConditionalGeneration",
        values={
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}

VISION: dict[str, Architecture] = {
    "vit": Architecture(
        config="ViTConfig",
        model="ViTForImageClassification",
        values={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 12,
            "patch_size": 4,
        },
    ),
}

ARCHITECTURES = {**DECODERS, **ENCODERS, **SEQUENCE_TO_SEQUENCE, **VISION}


@pytest.fixture(autouse=True, scope="session")
def offline() -> Iterator[None]:
    """Keep Transformers from the network, and fail at once if anything tries it."""

    def refuse(*_: object) -> None:
        raise AssertionError("a test tried to use the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr(socket.socket, "connect", refuse)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: waiting for a second one costs more than these tensors do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """Return a maker of tiny random models whose attention is far from uniform."""
    import transformers

    transformers.logging.set_verbosity_error()

    def make(name: str, **changes: Any) -> Any:
        architecture = ARCHITECTURES[name]
        config = getattr(transformers, architecture.config)(**{**architecture.values, **changes})
        config._experts_implementation = "eager"  # the grouped product has no float64
        torch.manual_seed(1)
        model = getattr(transformers, architecture.model)(config)
        with torch.no_grad():
            for label, parameter in model.named_parameters():
                if parameter.dim() > 1 or label.endswith("sinks"):
                    parameter.normal_(std=0.3)
        model.set_attn_implementation("eager")
        if model.can_generate():
            model.generation_config.pad_token_id = 0
        return model.eval()

    return make


@pytest.fixture
def oracle() -> Callable[..., Any]:
    """Return a runner of a float64 copy of a model, with eager attention."""

    def run(model: Any, call: Callable[[Any], Any]) -> Any:
        exact = copy.deepcopy(model).double()
        exact.set_attn_implementation("eager")
        with _softmax_in_float64():
            return call(exact)

    return run


@contextlib.contextmanager
def _softmax_in_float64() -> Iterator[None]:
    """Let eager attention, which asks for a float32 softmax, keep float64."""
    softmax = torch.nn.functional.softmax

    def keep(
        values: torch.Tensor, dim: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return softmax(values, dim, dtype=None if values.dtype == torch.float64 else dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", keep)
        yield
