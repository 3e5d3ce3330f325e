import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn.errors import ArgumentTypeError, AssetError
from adaattn.models import Decoder, Encoder
from adaattn.models import saving as saving_module

Maker = Callable[..., Any]
DECODER_FILES = ["config.json", "model.safetensors"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("style", ["gpt", "llama", "local"])
def test_a_decoder_comes_back_bit_for_bit(decoder: Maker, tmp_path: Path, style: str) -> None:
    model, rows = decoder(style), torch.tensor([[3, 4, 5]])
    model.save(tmp_path / "a" / "b")
    state = torch.random.get_rng_state()
    loaded = Decoder.load(tmp_path / "a" / "b")
    assert torch.equal(torch.random.get_rng_state(), state)  # loading draws no number
    assert loaded.config == model.config
    assert not loaded.training
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in model.state_dict().items())
    assert torch.equal(loaded(rows).logits, model(rows).logits)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_an_encoder_comes_back_bit_for_bit(encoder: Maker, tmp_path: Path) -> None:
    model, rows = encoder(num_labels=2), torch.tensor([[3, 4, 5]])
    model.save(str(tmp_path))
    assert torch.equal(Encoder.load(str(tmp_path))(rows).logits, model(rows).logits)


def test_dtypes_are_kept_unless_another_is_asked_for(decoder: Maker, tmp_path: Path) -> None:
    model = decoder().bfloat16()
    model.final_norm.float()
    model.save(tmp_path)
    loaded = Decoder.load(tmp_path)
    assert {n: t.dtype for n, t in loaded.state_dict().items()} == {
        n: t.dtype for n, t in model.state_dict().items()
    }
    assert {p.dtype for p in Decoder.load(tmp_path, dtype=torch.float64).parameters()} == {
        torch.float64
    }


def test_tied_weights_are_stored_once(decoder: Maker, tmp_path: Path) -> None:
    from safetensors import safe_open

    model = decoder(tie_embeddings=True)
    model.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        assert "head.weight" not in file.keys()  # noqa: SIM118 - the file is no mapping


def test_two_saves_of_one_model_are_the_same_files(decoder: Maker, tmp_path: Path) -> None:
    for name in ("one", "other"):
        decoder().save(tmp_path / name)
    for file in DECODER_FILES:
        one, other = ((tmp_path / name / file).read_bytes() for name in ("one", "other"))
        assert one == other


def test_the_config_says_what_it_is(decoder: Maker, tmp_path: Path) -> None:
    decoder("local").save(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert (data["format"], data["version"]) == ("adaattn.transformer", 1)
    assert data["architecture"] == "decoder"
    assert data["config"]["windows"] == [[3, -1], [-1, -1]]


def test_other_files_stay_and_a_second_save_replaces_the_first(
    decoder: Maker, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    decoder("llama").save(tmp_path)
    model = decoder("gpt")
    model.save(tmp_path)
    assert names_in(tmp_path) == [*DECODER_FILES, "tokenizer.json"]
    assert Decoder.load(tmp_path).config == model.config


def test_a_save_that_fails_leaves_what_was_there(
    decoder: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    old = decoder("llama")
    old.save(tmp_path)

    def broken(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises(AssetError, match=r"folder .*: expected a place that can be written, got"):
        decoder("gpt").save(tmp_path)
    assert names_in(tmp_path) == DECODER_FILES
    assert Decoder.load(tmp_path).config == old.config


def test_a_save_that_breaks_off_between_the_files_is_noticed(
    decoder: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes fit, so only the checksum tells that these weights want another epsilon."""
    decoder("gpt").save(tmp_path)
    replace = saving_module.replace_file

    def interrupted(target: Path, write: Callable[[Path], object]) -> None:
        if target.name == "config.json":
            raise KeyboardInterrupt
        replace(target, write)

    monkeypatch.setattr(saving_module, "replace_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder("gpt", norm_eps=1e-3).save(tmp_path)
    with pytest.raises(AssetError, match=r"expected the weights that were saved with config.json"):
        Decoder.load(tmp_path)


def test_a_place_that_is_a_file_is_named(decoder: Maker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match=r"folder .*file: expected a place that can be written"):
        decoder().save(tmp_path / "file")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def edit_values(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())["config"]
    edit(folder, config={**config, **changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"expected a file written by save\(\), got no fi"),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), r"expected a readable text, got Uni"),
        (
            lambda f: (f / "config.json").write_text("{"),
            r"config.json: expected JSON, got .*; save",
        ),
        (
            lambda f: (f / "config.json").write_text("[]"),
            r'"format": "adaattn.transformer", got an',
        ),
        (
            lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'),
            r"got a config of Transformers; convert it with adaattn.models.from_hugging_face",
        ),
        (lambda f: edit(f, version=99), r"version in .*: expected 1, got 99; use the AdaAttn that"),
        (
            lambda f: edit(f, architecture="encoder"),
            r"architecture in .*: expected decoder, got en",
        ),
        (
            lambda f: edit_values(f, heads=3),
            r"config in .*: expected one that AdaAttn wrote, got co",
        ),
        (
            lambda f: edit_values(f, num_heads=5),
            r"got num_kv_heads: expected a divisor of num_heads",
        ),
        (
            lambda f: edit(f, config=3),
            r"expected one that AdaAttn wrote, got config: expected a ma",
        ),
        (lambda f: edit_values(f, norm_eps=0.1), r"got others, or a config edited since; save the"),
        (
            lambda f: (f / "model.safetensors").unlink(),
            r"expected the weights, got no file; copy it",
        ),
        (truncate, r"model.safetensors: expected a whole safetensors file, got .*; save the model"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"x" * 100),
            r"expected a whole safetensors file",
        ),
    ],
)
def test_a_missing_foreign_or_damaged_file_is_named(
    decoder: Maker, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    decoder().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(AssetError, match=message):
        Decoder.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("final_norm.bias"), r"expected the tensors of this config, got no final_"),
        (lambda t: t.update(extra=torch.ones(1)), r"got besides extra; save the model again"),
        (
            lambda t: t.update({"final_norm.bias": torch.ones(3)}),
            r"got shape final_norm.bias \[3\] instead of \[32\]",
        ),
        (lambda t: t.clear(), r"got no embeddings.tokens.weight, .* and \d+ more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    decoder: Maker, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    decoder().save(tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(AssetError, match=message):
        Decoder.load(tmp_path)


def test_settings_that_json_cannot_say_are_refused(decoder: Maker, tmp_path: Path) -> None:
    from adaattn import Policy

    model = decoder(attention="ada", attention_settings={"policy": Policy(error_budget=0.1)})
    with pytest.raises(ArgumentTypeError, match=r"attention_settings: expected strings, finite.*"):
        model.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_missing_safetensors_says_how_to_install_it(
    decoder: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder().save(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: decoder().save(tmp_path), lambda: Decoder.load(tmp_path)):
        with pytest.raises(AssetError, match=r"safetensors: .*; run: pip install 'adaattn\[hf\]'"):
            call()
