"""How the models of Transformers that can be converted are called and shaped, as data.

A rule names a tensor of ours and the tensors of theirs that it is made of, put behind one
another along the first dimension. ``*`` stands for the index of a layer.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from adaattn.attention.rotary import RotaryConfig
from adaattn.models.kinds import Activation, MlpKind, NormKind, NormPlacement, PositionKind


@dataclass(frozen=True, slots=True)
class Rule:
    """What one tensor is made of.

    Args:
        sources: names of theirs.
        transposed: theirs are stored as [in, out] (GPT-2's Conv1D).
    """

    sources: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models whose weights have the same names.

    Args:
        model_types: their ``config.model_type``.
        architectures: their classes.
        is_encoder: they become an `Encoder`, else a `Decoder`.
        prefix: what stands before names when a head is on top of the base model.
        rules: by our names.
        ignored: ends or beginnings of names without a counterpart, and why that is right.
        needs: attributes of the config, the value that is supported, and what another means.
        convert: makes our fields of their config and the names of the tensors.
    """

    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    is_encoder: bool
    prefix: str
    rules: Mapping[str, Rule]
    ignored: Mapping[str, str]
    needs: Mapping[str, tuple[object, str]]
    convert: Callable[[Any, Set[str]], dict[str, Any]]


REFUSED = {
    "gemma": "its embeddings are scaled and its norms multiply by 1 + weight",
    "gemma2": "its embeddings are scaled and its norms multiply by 1 + weight",
    "gemma3_text": "its embeddings are scaled and its norms multiply by 1 + weight",
    "mixtral": "its MLPs are a mixture of experts",
    "qwen2_moe": "its MLPs are a mixture of experts",
    "qwen3_moe": "its MLPs are a mixture of experts",
    "roberta": "its positions count from the padding token, not from 0",
    "xlm-roberta": "its positions count from the padding token, not from 0",
}
"""Well-known models that look near and are not."""

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


def find_family(model_type: str) -> Family | None:
    """Return the family of a model type, or None.

    Args:
        model_type: as in the model's config.
    """
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def _activation(name: object) -> object:
    """Return our activation, or their name, which our config refuses with the list of its own."""
    return _ACTIVATIONS.get(str(name), name)


def _named(template: str, *names: str) -> Rule:
    """Return a rule whose sources differ in one part of their names."""
    return Rule(tuple(template.format(name) for name in names))


def _attention_rules(template: str, names: tuple[str, str, str]) -> dict[str, Rule]:
    """Return the rules of projections that are stored apart; ours may be packed."""
    target = "blocks.*.attention."
    weights, biases = f"{template}.weight", f"{template}.bias"
    rules = {f"{target}in_proj_weight": _named(weights, *names)}
    rules[f"{target}in_proj_bias"] = _named(biases, *names)
    for ours, theirs in zip("qkv", names, strict=True):
        rules[f"{target}{ours}_proj_weight"] = _named(weights, theirs)
    return rules


def _pairs(names: Mapping[str, str], *, transposed: bool = False) -> dict[str, Rule]:
    """Return the rules of modules that have a weight and may have a bias."""
    rules = {}
    for ours, theirs in names.items():
        rules[f"{ours}.weight"] = Rule((f"{theirs}.weight",), transposed)
        rules[f"{ours}.bias"] = Rule((f"{theirs}.bias",))
    return rules


def _llama_config(config: Any, names: Set[str]) -> dict[str, Any]:
    """Return the fields of our config for LLaMA and its kin."""
    kind = config.model_type
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    bias = kind == "qwen2" or bool(getattr(config, "attention_bias", False))
    positions = config.max_position_embeddings
    rope = dict(config.rope_parameters or {})
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "embed_dim": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "mlp_dim": config.intermediate_size,
        "max_positions": positions,
        "activation": _activation(config.hidden_act),
        "mlp": MlpKind.GATED,
        "norm": NormKind.RMS,
        "norm_eps": config.rms_norm_eps,
        "positions": PositionKind.ROTARY,
        "rotary": RotaryConfig.from_hugging_face(rope, head_dim, positions),
        "qk_norm": kind == "qwen3",
        "windows": _windows(config),
        "attention_bias": bias,
        "attention_out_bias": bias and kind != "qwen2",
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "tie_embeddings": bool(config.tie_word_embeddings),
        "attention_dropout": float(config.attention_dropout),
    }


def _windows(config: Any) -> tuple[tuple[int, int], ...]:
    """Return each layer's window; theirs counts the token itself, ours does not."""
    size = getattr(config, "sliding_window", None)
    if size is None:
        return ()
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple((size - 1, -1) if kind == "sliding_attention" else (-1, -1) for kind in kinds)


def _gpt2_config(config: Any, names: Set[str]) -> dict[str, Any]:
    """Return the fields of our config for GPT-2."""
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.n_layer,
        "embed_dim": config.n_embd,
        "num_heads": config.n_head,
        "mlp_dim": config.n_inner or 4 * config.n_embd,
        "max_positions": config.n_positions,
        "activation": _activation(config.activation_function),
        "norm_eps": config.layer_norm_epsilon,
        "scale": None if config.scale_attn_weights else 1.0,
        "tie_embeddings": bool(config.tie_word_embeddings),
        "dropout": float(config.resid_pdrop),
        "embedding_dropout": float(config.embd_pdrop),
        "attention_dropout": float(config.attn_pdrop),
    }


def _bert_config(config: Any, names: Set[str]) -> dict[str, Any]:
    """Return the fields of our config for BERT."""
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "embed_dim": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "mlp_dim": config.intermediate_size,
        "max_positions": config.max_position_embeddings,
        "activation": _activation(config.hidden_act),
        "norm_eps": config.layer_norm_eps,
        "norm_placement": NormPlacement.POST,
        "dropout": float(config.hidden_dropout_prob),
        "attention_dropout": float(config.attention_probs_dropout_prob),
        "classifier_dropout": config.classifier_dropout,
        "type_vocab_size": config.type_vocab_size,
        "embedding_norm": True,
        "pooler": "pooler.dense.weight" in names,
        "num_labels": config.num_labels if "classifier.weight" in names else 0,
    }


def _distilbert_config(config: Any, names: Set[str]) -> dict[str, Any]:
    """Return the fields of our config for DistilBERT."""
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.n_layers,
        "embed_dim": config.dim,
        "num_heads": config.n_heads,
        "mlp_dim": config.hidden_dim,
        "max_positions": config.max_position_embeddings,
        "activation": _activation(config.activation),
        "norm_eps": 1e-12,
        "norm_placement": NormPlacement.POST,
        "dropout": float(config.dropout),
        "attention_dropout": float(config.attention_dropout),
        "embedding_norm": True,
    }


_CROSS = "layers that look at another sequence"

_LLAMA = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    architectures=tuple(
        f"{name}{head}"
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
        for head in ("ForCausalLM", "Model")
    ),
    is_encoder=False,
    prefix="model.",
    rules={
        **_attention_rules("layers.*.self_attn.{}_proj", ("q", "k", "v")),
        **_pairs(
            {
                "embeddings.tokens": "embed_tokens",
                "blocks.*.attention_norm": "layers.*.input_layernorm",
                "blocks.*.attention.q_norm": "layers.*.self_attn.q_norm",
                "blocks.*.attention.k_norm": "layers.*.self_attn.k_norm",
                "blocks.*.attention.out_proj": "layers.*.self_attn.o_proj",
                "blocks.*.mlp_norm": "layers.*.post_attention_layernorm",
                "blocks.*.mlp.gate": "layers.*.mlp.gate_proj",
                "blocks.*.mlp.up": "layers.*.mlp.up_proj",
                "blocks.*.mlp.down": "layers.*.mlp.down_proj",
                "final_norm": "norm",
                "head": "lm_head",
            }
        ),
    },
    ignored={"rotary_emb.inv_freq": "frequencies are computed from the config"},
    needs={"quantization_config": (None, "quantised weights")},
    convert=_llama_config,
)

_GPT2 = Family(
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    is_encoder=False,
    prefix="transformer.",
    rules={
        **_pairs(
            {
                "embeddings.tokens": "wte",
                "embeddings.positions": "wpe",
                "blocks.*.attention_norm": "h.*.ln_1",
                "blocks.*.mlp_norm": "h.*.ln_2",
                "final_norm": "ln_f",
                "head": "lm_head",
            }
        ),
        **_pairs(
            {
                "blocks.*.attention.out_proj": "h.*.attn.c_proj",
                "blocks.*.mlp.up": "h.*.mlp.c_fc",
                "blocks.*.mlp.down": "h.*.mlp.c_proj",
            },
            transposed=True,
        ),
        "blocks.*.attention.in_proj_weight": Rule(("h.*.attn.c_attn.weight",), True),
        "blocks.*.attention.in_proj_bias": Rule(("h.*.attn.c_attn.bias",)),
    },
    ignored={
        ".attn.bias": "a causal mask that older files carry",
        ".attn.masked_bias": "a constant that older files carry",
    },
    needs={
        "scale_attn_by_inverse_layer_idx": (False, "a scale that differs from layer to layer"),
        "reorder_and_upcast_attn": (False, "scores in float32 whatever the weights' dtype"),
        "add_cross_attention": (False, _CROSS),
        "quantization_config": (None, "quantised weights"),
    },
    convert=_gpt2_config,
)

_BERT = Family(
    model_types=("bert",),
    architectures=(
        "BertModel",
        "BertForPreTraining",
        "BertForMaskedLM",
        "BertForSequenceClassification",
    ),
    is_encoder=True,
    prefix="bert.",
    rules={
        **_attention_rules("encoder.layer.*.attention.self.{}", ("query", "key", "value")),
        **_pairs(
            {
                "embeddings.tokens": "embeddings.word_embeddings",
                "embeddings.positions": "embeddings.position_embeddings",
                "embeddings.types": "embeddings.token_type_embeddings",
                "embeddings.norm": "embeddings.LayerNorm",
                "blocks.*.attention.out_proj": "encoder.layer.*.attention.output.dense",
                "blocks.*.attention_norm": "encoder.layer.*.attention.output.LayerNorm",
                "blocks.*.mlp.up": "encoder.layer.*.intermediate.dense",
                "blocks.*.mlp.down": "encoder.layer.*.output.dense",
                "blocks.*.mlp_norm": "encoder.layer.*.output.LayerNorm",
                "pooler": "pooler.dense",
                "classifier": "classifier",
            }
        ),
    },
    ignored={
        "cls.": "heads of pre-training; an Encoder gives the states below them",
        "embeddings.position_ids": "0, 1, 2, ... that older files carry",
    },
    needs={
        "is_decoder": (False, "a causal BERT"),
        "add_cross_attention": (False, _CROSS),
        "position_embedding_type": ("absolute", "positions relative to each other"),
        "quantization_config": (None, "quantised weights"),
    },
    convert=_bert_config,
)

_DISTILBERT = Family(
    model_types=("distilbert",),
    architectures=("DistilBertModel", "DistilBertForMaskedLM"),
    is_encoder=True,
    prefix="distilbert.",
    rules={
        **_attention_rules("transformer.layer.*.attention.{}_lin", ("q", "k", "v")),
        **_pairs(
            {
                "embeddings.tokens": "embeddings.word_embeddings",
                "embeddings.positions": "embeddings.position_embeddings",
                "embeddings.norm": "embeddings.LayerNorm",
                "blocks.*.attention.out_proj": "transformer.layer.*.attention.out_lin",
                "blocks.*.attention_norm": "transformer.layer.*.sa_layer_norm",
                "blocks.*.mlp.up": "transformer.layer.*.ffn.lin1",
                "blocks.*.mlp.down": "transformer.layer.*.ffn.lin2",
                "blocks.*.mlp_norm": "transformer.layer.*.output_layer_norm",
            }
        ),
    },
    ignored={"vocab_": "the head of pre-training; an Encoder gives the states below it"},
    needs={"quantization_config": (None, "quantised weights")},
    convert=_distilbert_config,
)

FAMILIES: tuple[Family, ...] = (_GPT2, _LLAMA, _BERT, _DISTILBERT)
