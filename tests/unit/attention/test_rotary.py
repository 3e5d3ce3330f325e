import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.attention.rotary import RotaryConfig, RotaryEmbedding, RotaryScaling
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from adaattn.testing import assert_matches

HEAD_DIM, LENGTH = 16, 40
FACTORS = {scaling: 1.0 if scaling is RotaryScaling.NONE else 4.0 for scaling in RotaryScaling}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
HUGGING_FACE: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2**20},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.5,
        "mscale_all_dim": 0,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 8192,
    },
]


def config(scaling: RotaryScaling = RotaryScaling.NONE, **given: Any) -> RotaryConfig:
    defaults = {"max_positions": 32, "scaling": scaling, "factor": FACTORS[scaling]}
    return RotaryConfig(**({"head_dim": HEAD_DIM} | defaults | given))


def tensors(dtype: torch.dtype = torch.float32, *, dim: int = HEAD_DIM) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 4, LENGTH, dim).to(dtype), torch.randn(2, 2, LENGTH, dim).to(dtype)


def llama(parameters: dict[str, Any], head_dim: int, max_positions: int) -> Any:
    """Transformers' own module for these parameters."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    made = modeling.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=dict(parameters),
    )
    return modeling.LlamaRotaryEmbedding(made)


def assert_same_frequencies(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check frequencies one by one: the smallest, which turn far positions, count too."""
    assert ours.numel() == theirs.numel() > 0
    for one, other in zip(ours, theirs, strict=True):
        assert_matches(one, other.double(), other)


def turned_by_definition(
    tensor: torch.Tensor, rotary: RotaryConfig, positions: torch.Tensor
) -> torch.Tensor:
    """Each pair as a complex number times its turn, in float64."""
    angles = positions.double()[:, None] * rotary.inverse_frequencies().double()
    turns = torch.polar(torch.full_like(angles, rotary.amplitude), angles)
    half = rotary.rotated_dim // 2
    turning = tensor[..., : rotary.rotated_dim].double()
    if rotary.interleaved:
        pairs = turning.unflatten(-1, (half, 2))
    else:
        pairs = turning.unflatten(-1, (2, half)).mT
    done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    joined = done.flatten(-2) if rotary.interleaved else done.mT.flatten(-2)
    return torch.cat((joined, tensor[..., rotary.rotated_dim :].double()), dim=-1)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128])
@pytest.mark.parametrize("parameters", HUGGING_FACE)
def test_frequencies_and_amplitude_are_those_of_transformers(
    parameters: dict[str, Any], head_dim: int
) -> None:
    if parameters["rope_type"] == "dynamic" and head_dim == 2:
        with pytest.raises(ArgumentError, match="head_dim: expected at least 4"):
            RotaryConfig.from_hugging_face(parameters, head_dim, 128)
        return
    theirs = llama(parameters, head_dim, 128)
    ours = RotaryConfig.from_hugging_face(parameters, head_dim, 128)
    assert_same_frequencies(ours.inverse_frequencies(), theirs.inv_freq)
    assert ours.amplitude == theirs.attention_scaling


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("parameters", [p for p in HUGGING_FACE if p["rope_type"] != "default"])
def test_partial_rotation_has_the_frequencies_of_transformers(
    parameters: dict[str, Any], share: float
) -> None:
    given = parameters | {"partial_rotary_factor": share}
    theirs = llama(given, 64, 128)
    ours = RotaryConfig.from_hugging_face(given, 64, 128)
    assert ours.rotated_dim == 64 * share
    assert_same_frequencies(ours.inverse_frequencies(), theirs.inv_freq)


@pytest.mark.parametrize("offset", [0, 100, 5000])
@pytest.mark.parametrize("parameters", HUGGING_FACE)
def test_rotation_is_that_of_transformers_in_float32(
    parameters: dict[str, Any], offset: int
) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    query, key = tensors()
    positions = torch.arange(LENGTH) + offset
    tables = llama(parameters, HEAD_DIM, 128)(query, positions[None])
    expected = modeling.apply_rotary_pos_emb(query, key, *tables)
    rotary = RotaryEmbedding(RotaryConfig.from_hugging_face(parameters, HEAD_DIM, 128))
    for ours, theirs in zip(rotary(query, key, positions), expected, strict=True):
        assert_matches(ours, theirs.double(), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_at_least_as_right_as_transformers(dtype: torch.dtype) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    query, key = tensors(dtype)
    positions = torch.arange(LENGTH)
    rotary = config()
    tables = llama({"rope_type": "default", "rope_theta": 10000.0}, HEAD_DIM, 128)(
        query, positions[None]
    )
    eager = modeling.apply_rotary_pos_emb(query, key, *tables)
    ours = RotaryEmbedding(rotary)(query, key, positions)
    for got, given_tensor, yardstick in zip(ours, (query, key), eager, strict=True):
        exact = turned_by_definition(given_tensor, rotary, positions)
        assert got.dtype is dtype
        assert_matches(got, exact, yardstick)
        assert (got - exact).abs().mean() < (yardstick - exact).abs().mean()


def test_pairs_of_neighbours_turn_as_gpt_j_turns_them() -> None:
    modeling = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    query, key = tensors()
    positions = torch.arange(LENGTH)
    rotary = RotaryEmbedding(config(interleaved=True))
    sin, cos = modeling.create_sinusoidal_positions(LENGTH, HEAD_DIM).chunk(2, dim=-1)
    expected = modeling.apply_rotary_pos_emb(query.transpose(1, 2), sin[None], cos[None])
    got = rotary(query, key, positions)[0]
    exact = turned_by_definition(query, rotary.config, positions)
    assert_matches(got, exact, expected.transpose(1, 2))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 2, 10, 16])
@pytest.mark.parametrize("scaling", RotaryScaling)
def test_float64_follows_the_definition(
    scaling: RotaryScaling, rotary_dim: int | None, interleaved: bool
) -> None:
    if rotary_dim == 2 and "ntk" in scaling:
        rotary_dim = 4
    rotary = config(scaling, rotary_dim=rotary_dim, interleaved=interleaved, max_positions=LENGTH)
    query, key = tensors(torch.float64)
    positions = torch.arange(LENGTH)
    for got, given_tensor in zip(
        RotaryEmbedding(rotary)(query, key, positions), (query, key), strict=True
    ):
        exact = turned_by_definition(given_tensor, rotary, positions)
        # A pair's second number may be small where its first is not.
        assert_matches(got, exact, exact, terms=given_tensor.abs().amax() * torch.ones(()))
        passed = rotary.rotated_dim
        assert torch.equal(got[..., passed:], given_tensor[..., passed:])


def test_the_definition_tells_the_two_pairings_and_a_neighbouring_position_apart() -> None:
    query, key = tensors()
    positions = torch.arange(LENGTH)
    rotary = config()
    exact = turned_by_definition(query, rotary, positions)
    right = RotaryEmbedding(rotary)(query, key, positions)[0]
    assert_matches(right, exact, right)
    for wrong in (
        RotaryEmbedding(dataclasses.replace(rotary, interleaved=True))(query, key, positions)[0],
        RotaryEmbedding(rotary)(query, key, positions + 1)[0],
    ):
        with pytest.raises(AssertionError, match="beyond their bound"):
            assert_matches(wrong, exact, right)


def test_static_ntk_raises_the_base_by_the_factor() -> None:
    stretched = config(RotaryScaling.NTK, factor=8.0)
    base = 10000.0 * 8.0 ** (HEAD_DIM / (HEAD_DIM - 2))
    assert_same_frequencies(
        stretched.inverse_frequencies(), config(base=base).inverse_frequencies()
    )


def test_static_ntk_is_dynamic_ntk_at_the_length_where_both_raise_the_base_alike() -> None:
    """The dynamic base grows by s L / M - (s - 1), the static one by s."""
    query, key = tensors()
    positions = torch.arange(LENGTH) + 80 - LENGTH  # longest 79: growth 2 * 80 / 32 - 1 = 4
    dynamic = RotaryEmbedding(config(RotaryScaling.DYNAMIC_NTK, factor=2.0))
    static = RotaryEmbedding(config(RotaryScaling.NTK, factor=4.0))
    exact = turned_by_definition(query, static.config, positions)
    yardstick = static(query, key, positions)[0]
    # The two bases round differently; an angle feels that as often as it has radians.
    terms = positions.double().max() * query.abs().amax() * torch.ones(())
    assert_matches(dynamic(query, key, positions)[0], exact, yardstick, terms=terms)


def test_dynamic_ntk_leaves_short_calls_alone_and_forgets_long_ones() -> None:
    rotary = RotaryEmbedding(config(RotaryScaling.DYNAMIC_NTK))
    plain = RotaryEmbedding(config())
    positions = torch.arange(32)
    query, key = (x[:, :, :32] for x in tensors())
    expected = plain(query, key, positions)[0]
    assert torch.equal(rotary(query, key, positions)[0], expected)
    assert not torch.equal(
        rotary(query, key, positions + 1)[0], plain(query, key, positions + 1)[0]
    )
    assert torch.equal(rotary(query, key, positions)[0], expected)


@pytest.mark.parametrize("scaling", RotaryScaling)
@settings(max_examples=20, deadline=None)
@given(
    positions=st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=6),
    interleaved=st.booleans(),
    rotary_dim=st.sampled_from([4, 8, 16]),
)
def test_rotation_keeps_norms_up_to_the_amplitude(
    scaling: RotaryScaling, positions: list[int], interleaved: bool, rotary_dim: int
) -> None:
    torch.manual_seed(0)  # once an example, so that a failing one fails again
    rotary = config(scaling, interleaved=interleaved, rotary_dim=rotary_dim)
    query = torch.randn(1, 2, len(positions), HEAD_DIM, dtype=torch.float64)
    turned = RotaryEmbedding(rotary)(query, query, torch.tensor(positions))[0]
    for part, factor in ((slice(rotary_dim), rotary.amplitude), (slice(rotary_dim, None), 1.0)):
        before, after = (torch.linalg.vector_norm(x[..., part], dim=-1) for x in (query, turned))
        exact = before * factor
        assert_matches(after, exact, exact, summands=HEAD_DIM)


@settings(max_examples=50, deadline=None)
@given(
    first=st.integers(-5000, 5000),
    second=st.integers(-5000, 5000),
    shift=st.integers(-5000, 5000),
    interleaved=st.booleans(),
)
def test_dot_products_depend_on_the_difference_of_positions_only(
    first: int, second: int, shift: int, interleaved: bool
) -> None:
    torch.manual_seed(0)  # once an example, so that a failing one fails again
    rotary = RotaryEmbedding(config(interleaved=interleaved))
    query, key = torch.randn(2, 1, 1, 1, HEAD_DIM, dtype=torch.float64)

    def product(at_query: int, at_key: int) -> torch.Tensor:
        turned = rotary(query, key, torch.tensor([at_query]))[0]
        return (turned * rotary(query, key, torch.tensor([at_key]))[1]).sum(-1)

    exact = product(first - second, 0)
    # Rounding an angle of many radians turns the pair by that rounding.
    radians = 1 + sum(abs(p) for p in (first, second, shift))
    terms = radians * (query.abs() * key.abs()).sum(-1)
    for got in (product(first, second), product(first + shift, second + shift)):
        assert_matches(got, exact, exact, summands=HEAD_DIM, terms=terms)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", [s for s in RotaryScaling if s is not RotaryScaling.YARN])
def test_position_zero_changes_nothing(scaling: RotaryScaling, dtype: torch.dtype) -> None:
    query, key = tensors(dtype)
    zeros = torch.zeros(LENGTH, dtype=torch.int64)
    turned_query, turned_key = RotaryEmbedding(config(scaling))(query, key, zeros)
    assert torch.equal(turned_query, query)
    assert torch.equal(turned_key, key)


def test_positions_may_be_one_row_or_one_for_each_sequence() -> None:
    rotary = RotaryEmbedding(config())
    query, key = tensors()
    row = torch.arange(LENGTH)
    shared = rotary(query, key, row)[0]
    assert torch.equal(shared, rotary(query, key, row[None])[0])
    assert torch.equal(shared, rotary(query, key, row.expand(2, -1))[0])
    assert torch.equal(shared, rotary(query, key, row.to(torch.int32))[0])
    own = rotary(query, key, torch.stack((row, row + 7)))[0]
    for got, right in zip(own, (shared[0], rotary(query, key, row + 7)[0][1]), strict=True):
        assert_matches(got, right.double(), right)


@pytest.mark.parametrize("scaling", RotaryScaling)
def test_no_tokens_give_no_tokens(scaling: RotaryScaling) -> None:
    empty = torch.empty(2, 4, 0, HEAD_DIM)
    rotary = RotaryEmbedding(config(scaling))
    assert rotary(empty, empty, torch.arange(0))[0].shape == empty.shape


@pytest.mark.parametrize("scaling", RotaryScaling)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_casting_the_module_keeps_its_frequencies(
    cast: torch.dtype, scaling: RotaryScaling
) -> None:
    query, key = tensors()
    positions = torch.arange(LENGTH) + 1000
    rotary = RotaryEmbedding(config(scaling))
    expected = rotary(query, key, positions)[0]
    inside = torch.nn.Sequential(rotary).to(cast)[0]
    assert inside.inverse_frequencies.dtype is torch.float32
    assert torch.equal(inside(query, key, positions)[0], expected)


def test_autocast_does_not_reach_the_angles() -> None:
    query, key = tensors()
    positions = torch.arange(LENGTH) + 1000
    rotary = RotaryEmbedding(config())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = rotary(query, key, positions)[0]
    assert torch.equal(got, rotary(query, key, positions)[0])


def test_nothing_is_saved_or_trained_and_copies_are_equal() -> None:
    rotary = RotaryEmbedding(config(RotaryScaling.YARN))
    assert list(rotary.state_dict()) == []
    assert list(rotary.parameters()) == []
    query, key = tensors()
    positions = torch.arange(LENGTH)
    for other in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert other.config == rotary.config
        assert torch.equal(other(query, key, positions)[0], rotary(query, key, positions)[0])


@pytest.mark.parametrize("scaling", RotaryScaling)
def test_a_module_that_was_on_the_meta_device_is_right_again(scaling: RotaryScaling) -> None:
    query, key = tensors()
    positions = torch.arange(LENGTH)
    expected = RotaryEmbedding(config(scaling))(query, key, positions)[0]
    with torch.device("meta"):
        made = RotaryEmbedding(config(scaling))
    assert torch.equal(made(query, key, positions)[0], expected)
    moved = RotaryEmbedding(config(scaling)).to("meta")
    assert moved(*(x.to("meta") for x in (query, key, positions)))[0].is_meta
    assert torch.equal(moved(query, key, positions)[0], expected)
    emptied = RotaryEmbedding(config(scaling)).to("meta").to_empty(device="cpu")
    assert torch.equal(emptied(query, key, positions)[0], expected)


def test_the_default_dtype_does_not_reach_the_frequencies() -> None:
    expected = config(RotaryScaling.YARN).inverse_frequencies()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(config(RotaryScaling.YARN).inverse_frequencies(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scaling", RotaryScaling)
def test_it_is_one_graph_without_reads_of_the_positions(scaling: RotaryScaling) -> None:
    torch.compiler.reset()
    rotary = RotaryEmbedding(config(scaling))
    query, key = tensors()
    positions = torch.arange(LENGTH)
    expected = rotary(query, key, positions)
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(rotary, (query, key, positions)).module()
    for form in (compiled, exported):
        for got, right in zip(form(query, key, positions), expected, strict=True):
            assert_matches(got, right.double(), right)
    moved = rotary(query, key, positions + 5)[0]
    assert_matches(exported(query, key, positions + 5)[0], moved.double(), moved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_those_of_the_rotation(interleaved: bool) -> None:
    rotary = RotaryEmbedding(config(head_dim=6, rotary_dim=4, interleaved=interleaved))
    query, key = torch.randn(2, 1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([0, 5, 70])
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, positions), (query, key))


def test_tables_may_be_shared_by_layers() -> None:
    rotary = RotaryEmbedding(config())
    query, key = tensors()
    positions = torch.arange(LENGTH)
    tables = rotary.tables(positions)
    assert tables[0].shape == (1, 1, LENGTH, HEAD_DIM // 2)
    assert torch.equal(rotary.rotate(query, tables), rotary(query, key, positions)[0])


def test_the_printed_module_names_what_differs_from_the_defaults() -> None:
    text = repr(RotaryEmbedding(RotaryConfig(64, scaling="linear", factor=2.0)))
    assert text == "RotaryEmbedding(head_dim=64, scaling=linear, factor=2.0)"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"head_dim": 0}, ArgumentError, "head_dim: expected an integer of at least 1, got 0"),
        (
            {"head_dim": 8.0},
            ArgumentTypeError,
            "head_dim: expected an integer of at least 1, got 8.0",
        ),
        (
            {"head_dim": True},
            ArgumentTypeError,
            "head_dim: expected an integer of at least 1, got True",
        ),
        ({"head_dim": 15}, ArgumentError, "head_dim: expected an even number .*rotary_dim="),
        ({"rotary_dim": 7}, ArgumentError, "rotary_dim: expected an even number up to head_dim"),
        ({"rotary_dim": 18}, ArgumentError, "rotary_dim: .* head_dim = 16, got 18"),
        ({"max_positions": -1}, ArgumentError, "max_positions: expected an integer of at least 1"),
        ({"base": 1.0}, ArgumentError, "base: expected a finite number above 1, got 1.0"),
        ({"base": math.nan}, ArgumentError, "base: expected a finite number above 1, got nan"),
        ({"base": "big"}, ArgumentTypeError, "base: expected a finite number above 1, got 'big'"),
        ({"scaling": "longrope"}, ArgumentError, "scaling: expected one of none, linear, ntk"),
        ({"interleaved": 1}, ArgumentTypeError, "interleaved: expected True or False, got 1"),
        ({"factor": 2.0}, ArgumentError, "factor: expected 1.0 with scaling none, which ignores"),
        ({"truncate": False}, ArgumentError, "truncate: .*; scaling yarn reads it"),
        (
            {"scaling": "llama3", "beta_fast": 16.0},
            ArgumentError,
            "beta_fast: expected 32.0 with scaling llama3",
        ),
        ({"scaling": "linear", "factor": 0.5}, ArgumentError, "factor: .* of at least 1, got 0.5"),
        ({"scaling": "yarn", "beta_slow": 0.0}, ArgumentError, "beta_slow: .* above 0, got 0.0"),
        ({"scaling": "yarn", "beta_fast": 1.0}, ArgumentError, "beta_fast: .* above 1.0, got 1.0"),
        ({"scaling": "yarn", "mscale": 1.0}, ArgumentError, "mscale_all_dim.: expected both or"),
        (
            {"scaling": "yarn", "attention_factor": -1.0},
            ArgumentError,
            "attention_factor: expected a finite number above 0",
        ),
        (
            {"scaling": "llama3", "high_freq_factor": 1.0},
            ArgumentError,
            "high_freq_factor: expected a finite number above 1.0",
        ),
        (
            {"scaling": "ntk", "rotary_dim": 2},
            ArgumentError,
            "rotary_dim: expected at least 4 with scaling ntk",
        ),
    ],
)
def test_a_bad_config_says_what_is_wrong(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RotaryConfig(**({"head_dim": HEAD_DIM} | given))


@pytest.mark.parametrize("rope_type", ["longrope", "su", "mrope", "proportional", "axial"])
def test_a_known_type_that_is_not_covered_is_refused(rope_type: str) -> None:
    with pytest.raises(UnsupportedError, match=f"rope_type '{rope_type}' is not among default"):
        RotaryConfig.from_hugging_face({"rope_type": rope_type, "factor": 2.0}, 64, 128)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ([], ArgumentTypeError, r"parameters: expected a mapping, got \[\]"),
        ({"full_attention": {}}, ArgumentTypeError, "one rope dictionary, got .'full_attention'.*"),
        ({"rope_type": "spiral"}, ArgumentError, "rope_type: expected one of default, linear"),
        ({"rope_type": ["yarn"]}, ArgumentError, "rope_type: expected one of default, linear"),
        ({"factor": 2.0}, ArgumentError, r"keys that none reads, got \['factor'\]"),
        ({"type": "linear"}, ArgumentError, "parameters: expected factor, got none"),
        (
            {"type": "linear", "factor": 2.0, "beta_fast": 4},
            ArgumentError,
            r"keys that linear reads, got \['beta_fast'\]; they would be ignored",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0},
            ArgumentError,
            "parameters: expected high_freq_factor, low_freq_factor, got none",
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 0},
            ArgumentError,
            "original_max_position_embeddings: expected an integer of at least 1, got 0",
        ),
        (
            {"partial_rotary_factor": -0.5},
            ArgumentError,
            "partial_rotary_factor: expected a finite number above 0",
        ),
        ({"partial_rotary_factor": 2.0}, ArgumentError, "rotary_dim: expected an even number up"),
    ],
)
def test_a_bad_dictionary_says_what_is_wrong(
    parameters: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RotaryConfig.from_hugging_face(parameters, 64, 128)


def test_old_names_and_absent_values_of_transformers_are_understood() -> None:
    old = {"type": "yarn", "factor": 16.0, "finetuned": True, "original_max_position_embeddings": 8}
    found = RotaryConfig.from_hugging_face(old | {"beta_fast": None}, 64, 128)
    assert (found.scaling, found.factor, found.beta_fast) == (RotaryScaling.YARN, 16.0, 32.0)
    assert RotaryConfig.from_hugging_face({}, 64, 128) == RotaryConfig(64, max_positions=128)


def test_tensors_that_do_not_fit_say_what_was_expected() -> None:
    rotary = RotaryEmbedding(config())
    query, key = tensors()
    row = torch.arange(LENGTH)
    with pytest.raises(ShapeError, match=r"query: expected \[B, H, L, 16\], got \(2, 4, 40, 8\)"):
        rotary(query[..., :8], key, row)
    with pytest.raises(ShapeError, match=r"key: expected \[B, H, L, 16\], got \(4, 40, 16\)"):
        rotary(query, query[0], row)
    with pytest.raises(ShapeError, match=r"positions: .* a key of shape \(2, 2, 39, 16\), got"):
        rotary(query, key[:, :, :39], row)
    with pytest.raises(ShapeError, match=r"positions: .* a query of shape .*, got \(3, 40\)"):
        rotary(query, key, row.expand(3, -1))
    with pytest.raises(ShapeError, match=r"positions: expected \[L\].*, got \(\)"):
        rotary(query, key, torch.tensor(3))
    with pytest.raises(DTypeError, match=r"positions: expected int64, got torch.bfloat16"):
        rotary(query, key, row.bfloat16())
    with pytest.raises(DTypeError, match="dtype: expected float32 or float64, got"):
        rotary.tables(row, dtype=torch.bfloat16)
    with pytest.raises(DTypeError, match="dtype of key: expected float64, float32"):
        rotary(query, key.to(torch.int64), row)
    with pytest.raises(DeviceError, match="positions: expected on cpu, got meta"):
        rotary(query, key, row.to("meta"))
    with pytest.raises(ArgumentTypeError, match="config: expected a RotaryConfig, got 64"):
        RotaryEmbedding(64)
