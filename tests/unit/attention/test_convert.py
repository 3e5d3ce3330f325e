"""Modules of PyTorch replaced in place: what stays, what computes now, what is left and why."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from adaattn.attention._hooks import HOOK_DICTIONARIES
from adaattn.attention.adaattn import AdaAttention
from adaattn.attention.adaptive_precision import AdaptivePrecisionAttention
from adaattn.attention.adaptive_rank import AdaptiveRankAttention
from adaattn.attention.base import BaseAttention
from adaattn.attention.dense import DenseAttention
from adaattn.attention.replace import ConversionReport, convert
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.testing import assert_matches

EMBED, HEADS, BATCH, LEN = 16, 4, 3, 6
SUMMANDS = 64 + EMBED + LEN


class Countable(DenseAttention):
    """Dense, with a setting of its own, counting its calls."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        flavour: str = "plain",
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, **options)
        self.flavour = flavour
        self.num_calls = 0

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self.num_calls += 1
        return super().forward(*args, **keywords)


class Pair(nn.Module):
    """A model that calls its attention as foreign code does: for the weights, by default."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(EMBED, HEADS, **options)
        self.second = nn.ModuleList([nn.MultiheadAttention(EMBED, HEADS, **options)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, weights = self.first(x, x, x)
        z, more = self.second[0](y, x, x, average_attn_weights=False)
        return z, weights + more.mean(1)


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


def padding() -> torch.Tensor:
    hidden = torch.zeros(BATCH, LEN, dtype=torch.bool)
    hidden[1, 4:] = True
    hidden[2, 1:] = True
    return hidden


def counts(model: nn.Module) -> list[int]:
    return [module.num_calls for module in model.modules() if isinstance(module, Countable)]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_converted_model_returns_what_it_returned(batch_first: bool) -> None:
    model = Pair(batch_first=batch_first)
    exact = copy.deepcopy(model).double()
    x = torch.randn(BATCH, LEN, EMBED)
    eager = model(x)
    assert convert(model, "dense").model is model
    for got, reference, yardstick in zip(model(x), exact(x.double()), eager, strict=True):
        assert_matches(got, reference, yardstick, summands=SUMMANDS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"kdim": 5, "vdim": 7},
        {"vdim": 7, "dropout": 0.25, "batch_first": True},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_every_shape_keeps_its_parameters_and_its_state(options: dict[str, Any]) -> None:
    old = nn.MultiheadAttention(EMBED, HEADS, **options)
    state = old.state_dict()
    new = convert(old, "dense").model
    assert isinstance(new, DenseAttention)
    assert new.batch_first is old.batch_first
    assert new.dropout == old.dropout
    names = [name for name, _ in old.named_parameters()]
    assert [name for name, _ in new.named_parameters()] == names
    for name in names:
        assert new.get_parameter(name) is old.get_parameter(name)
    again = nn.MultiheadAttention(EMBED, HEADS, **options)
    again.load_state_dict(new.state_dict())
    assert list(new.state_dict()) == list(state)


def test_optimisers_and_tied_weights_stay_valid() -> None:
    model = Pair()
    model.second[0].in_proj_weight = model.first.in_proj_weight
    model.first.out_proj.weight.requires_grad_(False)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    convert(model, "dense")
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.second[0].in_proj_weight is model.first.in_proj_weight
    before = [item.detach().clone() for item in parameters]
    model(torch.randn(LEN, BATCH, EMBED))[0].square().sum().backward()
    optimiser.step()
    moved = {
        name: not torch.equal(item, old)
        for (name, item), old in zip(model.named_parameters(), before, strict=True)
    }
    assert [name for name, changed in moved.items() if not changed] == ["first.out_proj.weight"]


def test_random_numbers_flow_on_as_if_nothing_had_been_made() -> None:
    model = Pair()
    state = torch.get_rng_state()
    convert(model, "dense")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_training_flag_and_attributes_of_users_stay() -> None:
    model = Pair()
    model.first.eval()
    model.first.note = "ours"
    convert(model, "dense")
    assert (model.first.training, model.second[0].training) == (False, True)
    assert model.first.note == "ours"


def test_one_module_under_two_names_stays_one() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(EMBED, HEADS)})
    model["b"] = model["a"]
    report = convert(model, "dense")
    assert model["a"] is model["b"]
    assert isinstance(model["a"], DenseAttention)
    assert [name for name, _ in report.replaced] == ["a"]


def test_layers_are_numbered_in_order() -> None:
    model = encoder()
    convert(model, "dense")
    found = [module for module in model.modules() if isinstance(module, BaseAttention)]
    assert [module.config.layer for module in found] == [0, 1]
    assert [module.runner.layer for module in found] == [0, 1]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mode", ["nothing", "padding", "padding and mask", "causal"])
def test_the_inference_path_of_encoders_never_passes_the_modules_by(
    norm_first: bool, mode: str
) -> None:
    """PyTorch's encoder reads the weights itself in evaluation, and makes nested tensors."""
    options: dict[str, Any] = {"norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    exact = copy.deepcopy(model).double()
    exact.use_nested_tensor = False
    yardstick = copy.deepcopy(model)
    yardstick.use_nested_tensor = False
    convert(model, Countable)
    x = torch.randn(BATCH, LEN, EMBED)
    call: dict[str, Any] = {}
    if "padding" in mode:
        call["src_key_padding_mask"] = padding()
    if mode == "padding and mask":
        call["mask"] = torch.eye(LEN, dtype=torch.bool).roll(3, 1)
        call["mask"][:, 0] = False
    if mode == "causal":
        call["mask"] = torch.ones(LEN, LEN, dtype=torch.bool).triu(1)
        call["is_causal"] = True
    with torch.no_grad():
        got = model(x, **call)
        eager, reference = yardstick(x, **call), exact(x.double(), **call)
    assert counts(model) == [1, 1]
    assert_matches(got, reference, eager, summands=SUMMANDS)


def test_a_single_encoder_layer_never_passes_its_module_by() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True).eval()
    convert(layer, Countable)
    with torch.no_grad():
        layer(torch.randn(BATCH, LEN, EMBED), src_key_padding_mask=padding())
    with torch.inference_mode():
        layer(torch.randn(BATCH, LEN, EMBED))
    assert counts(layer) == [2]


def test_the_test_of_the_inference_path_can_fail() -> None:
    """With the flag that PyTorch reads set as its own modules set it, ours is passed by."""
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True).eval()
    convert(layer, Countable)
    layer.self_attn._qkv_same_embed_dim = True
    layer.self_attn.merge_masks = lambda *_: (None, None)
    with torch.no_grad():
        layer(torch.randn(BATCH, LEN, EMBED))
    assert counts(layer) == [0]


# PyTorch warns so when it makes the model.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but self.use_nested_tensor")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_whole_transformer_is_converted(batch_first: bool, training: bool) -> None:
    model = nn.Transformer(EMBED, HEADS, 1, 1, 32, dropout=0.0, batch_first=batch_first)
    model.encoder.use_nested_tensor = False
    model.train(training)
    exact, yardstick = copy.deepcopy(model).double(), copy.deepcopy(model)
    report = convert(model, Countable)
    assert [name for name, _ in report.replaced] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    shape = (BATCH, LEN, EMBED) if batch_first else (LEN, BATCH, EMBED)
    source, target = torch.randn(shape), torch.randn(shape)
    causal = nn.Transformer.generate_square_subsequent_mask(LEN)
    call = {"src_key_padding_mask": padding().float().mul(-1e4), "tgt_mask": causal}
    doubled = {name: item.double() for name, item in call.items()}
    got, eager = model(source, target, **call), yardstick(source, target, **call)
    reference = exact(source.double(), target.double(), **doubled)
    assert counts(model) == [1, 1, 1]
    assert_matches(got, reference, eager, summands=SUMMANDS)


def test_training_goes_on_after_conversion() -> None:
    """Loss and gradients of every parameter, padding masks and all."""
    model = encoder(dropout=0.0)
    exact, yardstick = copy.deepcopy(model).double(), copy.deepcopy(model)
    convert(model, "dense")
    x = torch.randn(BATCH, LEN, EMBED)
    gradients = []
    for judged, dtype in ((model, None), (yardstick, None), (exact, torch.float64)):
        output = judged(x.to(dtype or x.dtype), src_key_padding_mask=padding())
        output[~padding()].square().sum().backward()
        gradients.append({name: item.grad for name, item in judged.named_parameters()})
    got, eager, reference = gradients
    for name, item in got.items():
        summands = SUMMANDS * BATCH * LEN
        assert_matches(item, reference[name], eager[name], name=name, summands=summands)


def test_forward_hooks_move_and_their_handles_still_remove_them() -> None:
    model = Pair()
    seen: list[str] = []
    handles = [
        model.first.register_forward_pre_hook(lambda *_: seen.append("before")),
        model.first.register_forward_hook(lambda *_: seen.append("after")),
        model.first.register_forward_pre_hook(
            lambda _module, _args, _keywords: seen.append("keywords"), with_kwargs=True
        ),
        model.first.register_full_backward_hook(lambda *_: seen.append("backward")),
        model.first.register_state_dict_pre_hook(lambda *_: seen.append("saved")),
    ]
    convert(model, "dense")
    x = torch.randn(LEN, BATCH, EMBED, requires_grad=True)
    model.first(x, x, x)[0].sum().backward()
    model.state_dict()
    assert seen == ["before", "keywords", "after", "backward", "saved"]
    for handle in handles:
        handle.remove()
    seen.clear()
    model.first(x, x, x)[0].sum().backward()
    model.state_dict()
    assert seen == []


def test_a_hook_that_is_given_its_module_is_given_the_new_one() -> None:
    model = Pair()
    seen: list[nn.Module] = []
    model.first.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    convert(model, "dense")
    model.load_state_dict(model.state_dict())
    assert len(seen) == 1
    assert seen[0] is model.first


def test_hooks_of_every_kind_are_known() -> None:
    """A kind that a later PyTorch adds must be moved too."""
    present = {name for name in vars(nn.Module()) if "hook" in name}
    assert present == {*HOOK_DICTIONARIES, "_is_full_backward_hook"}


class WithOwnForward(nn.MultiheadAttention):
    def forward(self, query: torch.Tensor, *rest: Any, **call: Any) -> Any:
        return super().forward(2 * query, *rest, **call)


def parametrised() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(plain(), "in_proj_weight")


def weight_normed_before() -> nn.Module:
    module = plain()
    module.in_proj_weight_g = nn.Parameter(torch.ones(3))
    return module


def normed_output() -> nn.Module:
    module = plain()
    nn.utils.parametrizations.weight_norm(module.out_proj, "weight")
    return module


def quantised() -> nn.Module:
    module = plain()
    module.qconfig = torch.ao.quantization.default_qconfig
    return module


def with_instance_forward() -> nn.Module:
    module = plain()
    module.forward = functools.partial(nn.MultiheadAttention.forward, module)
    return module


def compiled() -> nn.Module:
    module = plain()
    module.compile(backend="eager")
    return module


def with_bound_hook() -> nn.Module:
    module = plain()
    module.register_forward_hook(functools.partial(lambda kept, *_: None, module))
    return module


def with_adapter() -> nn.Module:
    module = plain()
    module.adapter = nn.Linear(EMBED, EMBED)
    return module


def plain() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(EMBED, HEADS)


LEFT: dict[str, tuple[Any, str]] = {
    "own forward": (lambda: WithOwnForward(EMBED, HEADS), "WithOwnForward is a subclass that may"),
    "parametrised": (parametrised, "its parameters are parametrised"),
    "weight norm": (weight_normed_before, "more or less than .* \\['in_proj_weight_g'\\]"),
    "output": (normed_output, "more or less than the parameters of its class: \\['out_proj'\\]"),
    "quantised": (quantised, "it is quantised, or prepared for it"),
    "instance": (with_instance_forward, "its forward was replaced on the instance"),
    "compiled": (compiled, "it was compiled by itself"),
    "bound hook": (with_bound_hook, "hooks that are bound to it: \\['forward_hooks: partial'\\]"),
    "adapter": (with_adapter, "more or less than .* \\['adapter'\\]"),
    "ours": (lambda: DenseAttention(EMBED, HEADS), "it is a DenseAttention already"),
    "ours, with a vowel": (lambda: AdaAttention(EMBED, HEADS), "it is an AdaAttention already"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_a_replacement_would_lose_is_left_with_a_reason(name: str) -> None:
    make, reason = LEFT[name]
    model = nn.ModuleDict({"attention": make()})
    kept = model["attention"]
    report = convert(model, "dense")
    assert model["attention"] is kept
    assert report.replaced == ()
    ((where, why),) = report.left
    assert where == "attention"
    with pytest.raises(ValueError, match=reason):
        raise ValueError(why)


def test_quantisable_modules_of_torch_are_left() -> None:
    from torch.ao.nn import quantizable

    model = nn.Sequential(quantizable.MultiheadAttention(EMBED, HEADS))
    report = convert(model, "dense")
    assert report.left == (
        ("0", "it is quantised, or prepared for it; convert the model before that"),
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_scripted_modules_are_left() -> None:
    scripted = torch.jit.script(nn.MultiheadAttention(EMBED, HEADS))
    report = convert(nn.Sequential(scripted), "dense")
    assert report.left == (("0", "it is scripted; convert the model before torch.jit"),)


def test_layers_of_transformers_are_left_to_their_own_door() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    report = convert(transformers.BertModel(config), "dense")
    assert report.replaced == ()
    ((name, reason),) = report.left
    assert name == "encoder.layer.0.attention.self"
    assert "adaattn.integrations.transformers.register serves it" in reason


def test_the_report_prints_every_layer() -> None:
    model = nn.ModuleDict({"one": plain(), "another": WithOwnForward(EMBED, HEADS)})
    report = convert(model, "dense")
    assert str(report).splitlines() == [
        "replaced 1 of 2 attention layers",
        "  + one      DenseAttention(16, 4, batch_first=False, layer=0)",
        "  - another  left: WithOwnForward is a subclass that may compute something else",
    ]
    assert str(convert(nn.Linear(2, 2), "dense")) == "replaced 0 of 0 attention layers"
    assert "(the model itself)  DenseAttention" in str(convert(plain(), "dense"))
    assert isinstance(report, ConversionReport)


KINDS = {
    "ada": (AdaAttention, {"policy": "quality"}),
    "adaptive_precision": (AdaptivePrecisionAttention, {"policy": "quality"}),
    "adaptive_rank": (AdaptiveRankAttention, {"error_budget": 0.0}),
    "dense": (DenseAttention, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_the_place_and_its_settings(kind: str) -> None:
    wanted, settings = KINDS[kind]
    model = Pair(batch_first=True)
    exact, x = copy.deepcopy(model).double(), torch.randn(BATCH, LEN, EMBED)
    eager = model(x)
    convert(model, kind, **settings)
    assert type(model.first) is wanted
    for got, reference, yardstick in zip(model(x), exact(x.double()), eager, strict=True):
        assert_matches(got, reference, yardstick, summands=SUMMANDS)


def test_the_default_kind_is_the_flagship() -> None:
    model = Pair()
    convert(model)
    assert type(model.first) is AdaAttention


def test_settings_reach_the_modules() -> None:
    model = Pair()
    convert(model, Countable, flavour="salt")
    assert (model.first.flavour, model.second[0].flavour) == ("salt", "salt")


BAD: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "no module": ("model", "dense", {}, ArgumentTypeError, "model: expected a torch.nn.Module"),
    "unknown kind": (
        None,
        "sparse",
        {},
        ArgumentError,
        "kind: expected one of .*'dense'.*'sparse'",
    ),
    "no class": (None, nn.Linear, {}, ArgumentTypeError, "kind: expected a name, or a subclass"),
    "a module": (None, 3, {}, ArgumentTypeError, "kind: expected a name, or a subclass"),
    "unknown setting": (
        None,
        Countable,
        {"flavor": "salt"},
        ArgumentTypeError,
        r"settings of Countable: expected some of \['flavour'\], got \['flavor'\]",
    ),
    "shape": (
        None,
        Countable,
        {"window": (3, 0), "num_heads": 2},
        ArgumentError,
        r"settings: expected none that says what is computed.*\['num_heads', 'window'\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_anything_changes(name: str) -> None:
    model, kind, settings, error, message = BAD[name]
    pair = Pair()
    with pytest.raises(error, match=message):
        convert(pair if model is None else model, kind, **settings)
    assert type(pair.first) is nn.MultiheadAttention


class Refusing(DenseAttention):
    """Cannot be made for the second layer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if options["layer"] == 1:
            raise ArgumentError("no second layer")


def test_a_module_that_cannot_be_made_leaves_the_model_whole() -> None:
    model = Pair()
    with pytest.raises(ArgumentError, match="no second layer"):
        convert(model, Refusing)
    assert type(model.first) is nn.MultiheadAttention


def test_a_converted_model_can_be_copied_and_pickled() -> None:
    model = encoder().eval()
    convert(model, "dense")
    x = torch.randn(BATCH, LEN, EMBED)
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=padding())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(x, src_key_padding_mask=padding()), wanted)


def test_abstract_modules_are_no_kind() -> None:
    with pytest.raises(ArgumentTypeError, match=r"kind: expected .* that can be made"):
        convert(Pair(), BaseAttention)
