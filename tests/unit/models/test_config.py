import json
from dataclasses import replace
from typing import Any

import pytest

from adaattn.attention.rotary import RotaryConfig
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.models import (
    Activation,
    AttentionKind,
    MlpKind,
    NormKind,
    NormPlacement,
    PositionKind,
    TransformerConfig,
)

SMALL: dict[str, Any] = {"vocab_size": 10, "num_layers": 2, "embed_dim": 32, "num_heads": 4}


def make(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**{**SMALL, **changes})


FULL = make(
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=40,
    positions="rotary",
    rotary=RotaryConfig(16, base=5e5, scaling="llama3", factor=2.0),
    windows=((3, -1), (-1, -1)),
    softcap=30.0,
    eos_token_ids=(2, 3),
    attention="ada",
    attention_settings={"policy": "speed"},
)


def test_sizes_that_are_left_out_follow_from_the_others() -> None:
    config = make()
    assert (config.head_dim, config.num_kv_heads, config.mlp_dim) == (8, 4, 128)
    assert config.attention_out_bias is True
    assert make(attention_bias=False).attention_out_bias is False
    assert make(dropout=0.5).embedding_dropout == make(dropout=0.5).classifier_dropout == 0.5


def test_strings_become_members() -> None:
    config = make(activation="silu", mlp="gated", norm="rms", norm_placement="post")
    assert config.activation is Activation.SILU
    assert config.mlp is MlpKind.GATED
    assert config.norm is NormKind.RMS
    assert config.norm_placement is NormPlacement.POST
    assert make(positions="none").positions is PositionKind.NONE
    assert make(attention="adaptive_rank").attention is AttentionKind.ADAPTIVE_RANK


def test_rotary_positions_get_a_default_of_the_right_size() -> None:
    assert make(positions="rotary", max_positions=99).rotary == RotaryConfig(8, max_positions=99)


@pytest.mark.parametrize("config", [make(), FULL, make(positions="rotary")])
def test_a_config_survives_json(config: TransformerConfig) -> None:
    text = json.dumps(config.to_dict())
    assert TransformerConfig.from_dict(json.loads(text)) == config
    assert hash(config) == hash(replace(config))


def test_windows_belong_to_layers() -> None:
    assert FULL.window(0) == (3, -1)
    assert make().window(1) == (-1, -1)


def test_settings_are_a_copy() -> None:
    settings = {"policy": "speed"}
    config = make(attention_settings=settings)
    settings["policy"] = "quality"
    assert config.attention_settings == {"policy": "speed"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 30}, r"embed_dim: expected a multiple of num_heads 4, got 30; or give"),
        ({"num_kv_heads": 3}, r"num_kv_heads: expected a divisor of num_heads 4, got 3"),
        ({"num_layers": 0}, r"num_layers: expected an integer of at least 1, got 0"),
        ({"num_labels": -1}, r"num_labels: expected an integer of at least 0, got -1"),
        ({"num_labels": 2}, r"pooler with num_labels: expected True, got False; the head reads"),
        ({"dropout": 1.0}, r"dropout: expected a number in \[0, 1\), got 1\.0"),
        ({"norm_eps": 0.0}, r"norm_eps: expected a finite number above 0, got 0\.0"),
        ({"softcap": float("nan")}, r"softcap: expected a finite number above 0, got nan"),
        ({"activation": "tanh"}, r"activation: expected one of 'gelu', .*'silu', got 'tanh'"),
        ({"attention": "sparse"}, r"attention: expected one of 'dense', .*, got 'sparse'"),
        ({"windows": ((1, 1),)}, r"windows: expected 2 pairs or none, got 1"),
        ({"windows": ((-2, 0), (0, 0))}, r"windows: expected sides of at least -1, got"),
        ({"pad_token_id": 10}, r"pad_token_id: expected a token below vocab_size 10, got 10"),
        ({"eos_token_ids": (-1,)}, r"eos_token_ids: expected an integer of at least 0, got -1"),
        ({"rotary": RotaryConfig(8)}, r"positions with a rotary config: expected rotary, got lea"),
        (
            {"rotary": RotaryConfig(16), "positions": "rotary"},
            r"rotary\.head_dim: expected head_dim 8, got 16",
        ),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 32.0}, r"embed_dim: expected an integer .*, got 32\.0"),
        ({"num_heads": True}, r"num_heads: expected an integer .*, got True"),
        ({"dropout": "0.1"}, r"dropout: expected a number in \[0, 1\), got '0\.1'"),
        ({"qk_norm": 1}, r"qk_norm: expected True or False, got 1"),
        ({"windows": [(1, 1)] * 2}, r"windows: expected a tuple of \(left, right\) pairs"),
        ({"windows": ((1, 1), (1, 1.5))}, r"windows: expected a tuple of \(left, right\) pairs"),
        ({"eos_token_ids": 2}, r"eos_token_ids: expected a tuple of integers, got 2"),
        ({"rotary": {}, "positions": "rotary"}, r"rotary: expected a RotaryConfig, got \{\}"),
        ({"attention_settings": "speed"}, r"attention_settings: expected a mapping, got 'speed'"),
    ],
)
def test_values_of_another_type_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**SMALL, "heads": 4}, r"config keys: expected some of .*, got \['heads'\]"),
        (
            {"vocab_size": 10},
            r"config keys: expected \['num_layers', 'embed_dim', 'num_heads'\] am",
        ),
        ({**SMALL, "windows": 3}, r"windows: expected a list, got 3"),
        (
            {**SMALL, "positions": "rotary", "rotary": {"head_dim": 8, "theta": 1}},
            r"rotary keys: expected some of .*, got \['theta'\]",
        ),
        ([], r"config: expected a mapping, got list"),
    ],
)
def test_foreign_dictionaries_are_refused(data: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        TransformerConfig.from_dict(data)
