from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn.errors import AssetError
from adaattn.models import Decoder, Encoder, PositionKind, from_hugging_face

Maker = Callable[..., Any]
Tokens = Callable[..., torch.Tensor]

BOUND = 1e-4
"""Largest difference of a logit or state: what the project promises of converted float32 weights.

Both sides round in float32 and order their sums differently; these models' numbers are of size
1 to 30, and a wrong tensor moves them by more than 0.01 (a test below holds it to that).
"""

CAUSAL = ["gpt2", "llama", "llama_biased", "mistral", "qwen2", "qwen3"]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    assert one.shape == other.shape
    return (one - other).abs().max().item()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_decoders_give_the_logits_of_transformers(
    theirs: Maker, tokens: Tokens, name: str, side: str
) -> None:
    source, rows = theirs(name), tokens(2, 12)
    model = from_hugging_face(source)
    assert isinstance(model, Decoder)
    mask = torch.ones_like(rows)
    if side != "none":
        mask[0, slice(0, 5) if side == "left" else slice(7, 12)] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    wanted = source(
        rows, attention_mask=mask, position_ids=places, labels=rows, output_hidden_states=True
    )
    found = model(rows, attention_mask=mask, labels=rows, return_hidden_states=True)
    seen = mask.bool()
    assert distance(found.logits[seen], wanted.logits[seen]) < BOUND
    for ours, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert distance(ours[seen], other[seen]) < BOUND
    if side == "none":
        assert distance(found.loss, wanted.loss) < BOUND


@pytest.mark.parametrize("name", ["bert", "distilbert"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_encoders_give_the_states_of_transformers(
    theirs: Maker, tokens: Tokens, name: str, side: str
) -> None:
    source, rows = theirs(name), tokens(2, 12)
    model = from_hugging_face(source)
    assert isinstance(model, Encoder)
    extra = {}
    if name == "bert":
        extra["token_type_ids"] = (torch.arange(12) > 6).long().expand(2, -1)
    mask = torch.ones_like(rows)
    if side != "none":
        mask[0, slice(0, 5) if side == "left" else slice(7, 12)] = 0
    wanted = source(rows, attention_mask=mask, output_hidden_states=True, **extra)
    found = model(rows, mask, return_hidden_states=True, **extra)
    seen = mask.bool()
    for ours, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert distance(ours[seen], other[seen]) < BOUND
    if name == "bert" and side != "left":  # the pooler reads the first token
        assert distance(found.pooled, wanted.pooler_output) < BOUND


@torch.no_grad()
def test_a_classifier_gives_the_logits_of_transformers(theirs: Maker, tokens: Tokens) -> None:
    source, rows = theirs("bert_classifier"), tokens(3, 9)
    labels = torch.tensor([0, 2, 1])
    found, wanted = from_hugging_face(source)(rows, labels=labels), source(rows, labels=labels)
    assert distance(found.logits, wanted.logits) < BOUND
    assert distance(found.loss, wanted.loss) < BOUND


@pytest.mark.parametrize(
    "architecture", ["BertForPreTraining", "BertForMaskedLM", "DistilBertForMaskedLM"]
)
@torch.no_grad()
def test_heads_of_pre_training_are_left_behind(
    theirs: Maker, tokens: Tokens, architecture: str
) -> None:
    import transformers

    torch.manual_seed(2)
    name = "distilbert" if architecture.startswith("Distil") else "bert"
    source = getattr(transformers, architecture)(theirs(name).config).eval()
    model, rows = from_hugging_face(source), tokens()
    wanted = getattr(source, name)(rows).last_hidden_state
    assert distance(model(rows).last_hidden_state, wanted) < BOUND
    assert (model.pooler is None) == (architecture != "BertForPreTraining")


def test_a_bert_without_a_pooler_stays_without(theirs: Maker) -> None:
    import transformers

    source = transformers.BertModel(theirs("bert").config, add_pooling_layer=False)
    assert from_hugging_face(source).pooler is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 12,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@torch.no_grad()
def test_scaled_rotations_give_the_logits_of_transformers(
    theirs: Maker, tokens: Tokens, rope: dict[str, Any]
) -> None:
    positions = 48
    source = theirs("llama", rope_parameters=rope, max_position_embeddings=positions)
    model = from_hugging_face(source)
    for length in (20, positions + 8):  # beyond it the dynamic form changes its base
        rows = tokens(1, length)
        assert distance(model(rows).logits, source(rows).logits) < BOUND
    plain = from_hugging_face(theirs("llama"))
    assert distance(model(rows).logits, plain(rows).logits) > BOUND


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_weights": False},
        {"n_inner": 40},
        {"activation_function": "relu"},
        {"tie_word_embeddings": False},
        {"layer_norm_epsilon": 0.1},
    ],
    ids=lambda changes: next(iter(changes)),
)
@torch.no_grad()
def test_each_feature_of_the_config_is_honoured(
    theirs: Maker, tokens: Tokens, changes: dict[str, Any]
) -> None:
    source, rows = theirs("gpt2", **changes), tokens()
    assert distance(from_hugging_face(source)(rows).logits, source(rows).logits) < BOUND


def test_dropouts_are_taken_over(theirs: Maker) -> None:
    changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
    config = from_hugging_face(theirs("gpt2", **changes)).config
    dropouts = (config.dropout, config.embedding_dropout, config.attention_dropout)
    assert dropouts == (0.1, 0.2, 0.3)
    bert = from_hugging_face(theirs("bert_classifier", classifier_dropout=0.4)).config
    assert (bert.dropout, bert.classifier_dropout) == (0.1, 0.4)


@pytest.mark.parametrize(
    ("name", "part", "other"),
    [
        ("llama", "mlp.gate.weight", "mlp.up.weight"),
        ("llama", "attention.in_proj_weight", (1, 2)),
        ("llama", "attention_norm.weight", "mlp_norm.weight"),
        ("qwen3", "attention.q_norm.weight", "attention.k_norm.weight"),
        ("bert", "attention_norm.bias", "mlp_norm.bias"),
    ],
)
@torch.no_grad()
def test_tensors_in_each_others_place_are_beyond_the_bound(
    theirs: Maker, tokens: Tokens, name: str, part: str, other: str | tuple[int, int]
) -> None:
    source, rows = theirs(name), tokens()
    model = from_hugging_face(source)
    state = model.state_dict()
    if isinstance(other, str):
        one, two = (state[f"blocks.0.{item}"] for item in (part, other))
    else:  # the parts of one matrix
        config = model.blocks[0].attention.config
        sizes = config.query_size, config.kv_size, config.kv_size
        one, two = (state[f"blocks.0.{part}"].split(sizes)[place] for place in other)
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)
    wanted = source(rows)
    ours = model(rows).last_hidden_state if name == "bert" else model(rows).logits
    assert distance(ours, wanted.last_hidden_state if name == "bert" else wanted.logits) > 0.01


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "bert"])
@torch.no_grad()
def test_a_folder_gives_the_same_model(
    theirs: Maker, tokens: Tokens, tmp_path: Path, name: str
) -> None:
    source, rows = theirs(name), tokens()
    source.save_pretrained(tmp_path)
    live, stored = from_hugging_face(source), from_hugging_face(str(tmp_path))
    assert stored.config == live.config
    assert all(
        torch.equal(tensor, stored.state_dict()[key]) for key, tensor in live.state_dict().items()
    )
    assert torch.equal(live(rows).last_hidden_state, stored(rows).last_hidden_state)


def test_the_source_shares_nothing_and_no_random_number_is_drawn(theirs: Maker) -> None:
    source = theirs("llama_biased")
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    state = torch.random.get_rng_state()
    model = from_hugging_face(source)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(t, before[name]) for name, t in source.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_dtype_attention_and_tokens_can_be_set(theirs: Maker, tmp_path: Path) -> None:
    source = theirs("llama").bfloat16()
    assert {p.dtype for p in from_hugging_face(source).parameters()} == {torch.bfloat16}
    source.save_pretrained(tmp_path)
    for given in (source, tmp_path):
        model = from_hugging_face(
            given, dtype=torch.float32, attention="ada", attention_settings={"policy": "speed"}
        )
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert type(model.attention_modules()[0]).__name__ == "AdaAttention"
        assert (model.config.eos_token_ids, model.config.pad_token_id) == ((2,), 0)
        assert not model.training


def test_a_converted_model_can_be_saved_and_trained(
    theirs: Maker, tokens: Tokens, tmp_path: Path
) -> None:
    model, rows = from_hugging_face(theirs("qwen3")), tokens()
    model.save(tmp_path)
    again = Decoder.load(tmp_path)
    assert torch.equal(again(rows).logits, model(rows).logits)
    before = again(rows, labels=rows).loss
    before.backward()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter -= 1e-3 * parameter.grad
    assert again(rows, labels=rows).loss < before


def test_a_base_model_with_a_tied_head_serves(theirs: Maker, tokens: Tokens) -> None:
    source, rows = theirs("gpt2"), tokens()
    model = from_hugging_face(source.transformer)
    assert torch.equal(model(rows).logits, from_hugging_face(source)(rows).logits)
    with pytest.raises(AssetError, match=r"got no lm_head.weight; a class without its head has"):
        from_hugging_face(theirs("llama").model)


def test_windows_count_the_token_itself(theirs: Maker) -> None:
    assert from_hugging_face(theirs("mistral")).config.windows == ((3, -1), (3, -1))
    assert from_hugging_face(theirs("qwen2")).config.windows == ((-1, -1), (3, -1))
    assert from_hugging_face(theirs("llama")).config.windows == ()
    assert from_hugging_face(theirs("llama")).config.positions is PositionKind.ROTARY
