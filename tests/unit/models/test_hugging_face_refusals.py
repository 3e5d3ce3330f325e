"""What `from_hugging_face` refuses: nothing is guessed, and nothing is dropped in silence."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn.errors import ArgumentTypeError, AssetError, UnsupportedError
from adaattn.models import from_hugging_face

Maker = Callable[..., Any]
Tokens = Callable[..., torch.Tensor]


def test_tensors_left_over_or_missing_are_named(theirs: Maker) -> None:
    source = theirs("llama")
    source.model.layers[1].register_buffer("adapter", torch.ones(2))
    with pytest.raises(AssetError, match=r"each with a use, got unused layers.1.adapter"):
        from_hugging_face(source)
    source = theirs("llama")
    del source.model.layers[0].mlp.up_proj
    with pytest.raises(AssetError, match=r"expected those of llama or .*, got no layers.0.mlp.up_"):
        from_hugging_face(source)


def test_tensors_of_another_shape_are_named(theirs: Maker) -> None:
    source = theirs("llama")
    source.model.norm.weight = torch.nn.Parameter(torch.ones(31))
    with pytest.raises(AssetError, match=r"got shape final_norm.weight \[31\] instead of \[32\]"):
        from_hugging_face(source)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, r"is True: .* of a scale that differs"),
        ("gpt2", {"reorder_and_upcast_attn": True}, r"is True: .* of scores in float32 wh"),
        ("gpt2", {"add_cross_attention": True}, r"add_cross_attention is True: .* of layers that"),
        (
            "bert",
            {"is_decoder": True},
            r"is_decoder is True: there is no counterpart of a causal BERT",
        ),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            r"position_embedding_type is 'relative_key': .* positions relative to each other",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config is .* of quantised"),
    ],
)
def test_features_without_a_counterpart_are_refused(
    theirs: Maker, name: str, changes: dict[str, Any], message: str
) -> None:
    source = theirs(name)
    for key, value in changes.items():
        setattr(source.config, key, value)
    with pytest.raises(UnsupportedError, match=message):
        from_hugging_face(source)


def test_rotations_without_a_counterpart_are_refused(theirs: Maker) -> None:
    source = theirs("llama")
    source.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(UnsupportedError, match=r"rope_type 'longrope' is not among default, lin"):
        from_hugging_face(source)
    source.config.rope_parameters = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedError, match=r"rotate a part of each head, which these models"):
        from_hugging_face(source)
    source.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedError, match=r"layer_types hold chunked_attention") as caught:
        from_hugging_face(source)
    assert len(caught.value.reasons) == 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gemma2", r"model type 'gemma2': its embeddings are scaled and its norms multiply by"),
        ("roberta", r"its positions count from the padding token"),
        (
            "t5",
            r"'t5': no rule says .*\n.*bert, distilbert, gpt2, llama, mistral, qwen2, qwen3; ada",
        ),
    ],
)
def test_other_model_types_are_refused(
    theirs: Maker, tmp_path: Path, kind: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UnsupportedError, match=message):
        from_hugging_face(tmp_path)
    source = theirs("llama")
    source.config.model_type = kind
    with pytest.raises(UnsupportedError, match=message):
        from_hugging_face(source)


def test_classes_with_another_head_are_refused(theirs: Maker, tmp_path: Path) -> None:
    import transformers

    source = transformers.BertForTokenClassification(theirs("bert").config)
    message = r"expected one of BertModel, .*, got BertForTokenClassification"
    with pytest.raises(UnsupportedError, match=message):
        from_hugging_face(source)
    source.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        from_hugging_face(tmp_path)


def test_activations_without_a_counterpart_are_refused(theirs: Maker) -> None:
    with pytest.raises(ValueError, match=r"activation: expected one of 'gelu', .*, got 'tanh'"):
        from_hugging_face(theirs("gpt2", activation_function="tanh"))


def test_folders_that_hold_something_else_are_named(
    theirs: Maker, decoder: Maker, tmp_path: Path
) -> None:
    with pytest.raises(AssetError, match=r"expected a readable file, got .*; give a folder that"):
        from_hugging_face("org/name")
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(AssetError, match=r"config.json: expected JSON, got"):
        from_hugging_face(tmp_path)
    path.write_text("{}")
    with pytest.raises(AssetError, match=r"expected a config of Transformers, got another file"):
        from_hugging_face(tmp_path)
    decoder().save(tmp_path)
    with pytest.raises(AssetError, match=r"got one of adaattn.models; use Decoder.load or Enc"):
        from_hugging_face(tmp_path)
    with pytest.raises(
        ArgumentTypeError, match=r"expected a Transformers model or a folder, got i"
    ):
        from_hugging_face(3)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.norm.weight"),
            r"weights in .*: expected those of its config, got no",
        ),
        (lambda t: t.update({"model.extra": torch.ones(1)}), r"got unused model.extra"),
    ],
)
def test_files_with_gaps_are_refused_and_never_filled_at_random(
    theirs: Maker, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    theirs("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(AssetError, match=message):
        from_hugging_face(tmp_path)


def test_constants_that_older_files_carry_are_passed_over(
    theirs: Maker, tokens: Tokens, tmp_path: Path
) -> None:
    source, rows = theirs("gpt2"), tokens()
    source.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}))
    assert torch.equal(
        from_hugging_face(tmp_path)(rows).logits, from_hugging_face(source)(rows).logits
    )


def test_a_folder_without_weights_is_named(theirs: Maker, tmp_path: Path) -> None:
    theirs("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(AssetError, match=r"expected one that Transformers loads, got"):
        from_hugging_face(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(AssetError, match=r"expected one that Transformers loads, got"):
        from_hugging_face(tmp_path)


def test_missing_transformers_says_how_to_install_it(
    theirs: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs("llama").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AssetError, match=r"transformers: .*; run: pip install 'adaattn\[hf\]'"):
        from_hugging_face(tmp_path)
