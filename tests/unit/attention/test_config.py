"""What an attention module may be made of."""

import dataclasses
from typing import Any

import pytest

from adaattn.attention.config import AttentionConfig, AttentionOptions
from adaattn.attention.rotary_config import RotaryConfig
from adaattn.errors import AdaAttnError, ArgumentError, ArgumentTypeError, ShapeError


def make(**changes: Any) -> AttentionConfig:
    return AttentionConfig(**{"embed_dim": 16, "num_heads": 4} | changes)


def test_sizes_follow_from_the_dimension_and_the_heads() -> None:
    config = make()
    assert (config.size_of_head, config.kv_heads) == (4, 4)
    assert (config.query_size, config.kv_size) == (16, 16)
    assert (config.key_size, config.value_size) == (16, 16)
    assert config.has_packed_weights


def test_sizes_can_be_given() -> None:
    config = make(head_dim=6, num_kv_heads=2, kdim=5, vdim=7)
    assert (config.size_of_head, config.kv_heads) == (6, 2)
    assert (config.query_size, config.kv_size) == (24, 12)
    assert (config.key_size, config.value_size) == (5, 7)
    assert not config.has_packed_weights


@pytest.mark.parametrize(
    ("changes", "packed"),
    [
        ({"kdim": 16, "vdim": 16}, True),
        ({"num_kv_heads": 4, "head_dim": 4}, True),
        ({"kdim": 8}, False),
        ({"vdim": 8}, False),
        ({"num_kv_heads": 2}, True),
        ({"head_dim": 8}, True),
        ({"head_dim": 8, "num_kv_heads": 2, "kdim": 8}, False),
    ],
    ids=str,
)
def test_one_matrix_serves_where_one_tensor_may_be_q_k_and_v(
    changes: dict[str, Any], packed: bool
) -> None:
    assert make(**changes).has_packed_weights is packed


def test_a_dimension_that_heads_do_not_divide_needs_its_head_size() -> None:
    assert make(embed_dim=15, head_dim=8).query_size == 32
    with pytest.raises(ShapeError, match="embed_dim: expected a multiple of num_heads=4, got 15"):
        make(embed_dim=15)


BAD: dict[str, tuple[dict[str, Any], type[AdaAttnError], str]] = {
    "no dimension": (
        {"embed_dim": 0},
        ArgumentError,
        "embed_dim: expected an integer of at least 1, got 0",
    ),
    "fractional": ({"embed_dim": 16.0}, ArgumentTypeError, "embed_dim: expected an integer"),
    "boolean": (
        {"num_heads": True},
        ArgumentTypeError,
        "num_heads: expected an integer .*, got True",
    ),
    "no heads": ({"num_heads": 0}, ArgumentError, "num_heads: expected an integer of at least 1"),
    "negative heads": (
        {"num_heads": -4},
        ArgumentError,
        "num_heads: expected an integer of at least 1",
    ),
    "kv heads": (
        {"num_kv_heads": 3},
        ShapeError,
        "num_kv_heads: expected a divisor of num_heads=4, got 3",
    ),
    "too many kv heads": ({"num_kv_heads": 8}, ShapeError, "divisor of num_heads=4, got 8"),
    "no kv heads": (
        {"num_kv_heads": 0},
        ArgumentError,
        "num_kv_heads: expected an integer of at least 1",
    ),
    "head size": ({"head_dim": 0}, ArgumentError, "head_dim: expected an integer of at least 1"),
    "key size": ({"kdim": -1}, ArgumentError, "kdim: expected an integer of at least 1"),
    "value size": ({"vdim": "8"}, ArgumentTypeError, "vdim: expected an integer .*, got '8'"),
    "dropout": ({"dropout": 1.5}, ArgumentError, r"dropout: expected a number in \[0, 1\]"),
    "dropout nan": ({"dropout": float("nan")}, ArgumentError, "dropout: expected a number in"),
    "dropout type": ({"dropout": "0.1"}, ArgumentTypeError, "dropout: expected a number"),
    "window": ({"window": (3,)}, ArgumentError, r"window: expected \(left, right\)"),
    "window type": ({"window": 3.5}, ArgumentTypeError, r"window: expected \(left, right\)"),
    "norms": ({"qk_norm": 1}, ArgumentTypeError, "qk_norm: expected True or False, got 1"),
    "sinks": ({"sinks": "a"}, ArgumentTypeError, "sinks: expected True or False, got 'a'"),
    "bias": ({"bias": None}, ArgumentTypeError, "bias: expected True or False, got None"),
    "out bias": ({"out_bias": 0}, ArgumentTypeError, "out_bias: expected True or False, got 0"),
    "softcap flag": ({"softcap": True}, ArgumentTypeError, "softcap: expected a number, got True"),
    "softcap": ({"softcap": -1.0}, ArgumentError, "softcap: expected None or a finite number"),
    "scale": ({"scale": float("inf")}, ArgumentError, "scale: expected None or a finite number"),
    "scale type": ({"scale": "wide"}, ArgumentTypeError, "scale: expected a number, got 'wide'"),
    "epsilon": ({"qk_norm_eps": -1e-6}, ArgumentError, "qk_norm_eps: expected a finite number"),
    "layer": ({"layer": -2}, ArgumentError, "layer: expected an integer of at least -1, got -2"),
    "rotary": ({"rotary": 10000.0}, ArgumentTypeError, "rotary: expected None or a RotaryConfig"),
    "rotary size": (
        {"rotary": RotaryConfig(head_dim=8)},
        ShapeError,
        "head_dim of rotary: expected 4 as here, got 8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_impossible_module_is_refused(name: str) -> None:
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make(**changes)


def test_a_window_may_be_a_list() -> None:
    assert make(window=[3, 0]).window == (3, 0)


def test_no_window_is_written_as_none_too() -> None:
    assert make(window=None) == make()


def test_a_config_is_a_value() -> None:
    assert make() == make()
    assert hash(make()) == hash(make())
    assert dataclasses.replace(make(), num_heads=2).kv_heads == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().embed_dim = 3


def test_the_options_are_the_fields_beside_the_positional_ones() -> None:
    fields = {field.name for field in dataclasses.fields(AttentionConfig)}
    positional = {"embed_dim", "num_heads", "dropout", "bias"}
    assert set(AttentionOptions.__annotations__) == (fields - positional) | {"device", "dtype"}
