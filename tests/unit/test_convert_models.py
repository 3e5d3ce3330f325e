"""Whole models converted: by their own code, by adapters, by name in Transformers; and undone."""

import copy
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from adaattn import convert, record_events
from adaattn.errors import ArgumentError, ArgumentTypeError, ShapeError
from adaattn.integrations.conversion.adapters import AdaptedModule, is_adapted
from adaattn.testing import assert_matches

EMBED, HEADS, LEN = 32, 4, 12
SUMMANDS = 6 * EMBED + LEN


class CausalSelfAttention(nn.Module):
    """As hand-written GPTs do it: one call of PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(EMBED, 3 * EMBED)
        self.proj = nn.Linear(EMBED, EMBED)

    def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Return [B, S, C]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.proj(torch.flatten(y.transpose(1, 2), 2))


class LongNames(CausalSelfAttention):
    """The same by the whole path."""

    def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Return [B, S, C]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.proj(torch.flatten(y.transpose(1, 2), 2))


class BareName(CausalSelfAttention):
    """The same by a name of its own, with a call of super() that needs the closure."""

    def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Return [B, S, C]."""
        assert super().extra_repr() == ""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.proj(torch.flatten(y.transpose(1, 2), 2))


class Switched(CausalSelfAttention):
    """With a switch, as timm has it."""

    fused_attn: bool = False

    def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Return [B, S, C]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            y = written_out(q, k, v)
        return self.proj(torch.flatten(y.transpose(1, 2), 2))


class WrittenOut(CausalSelfAttention):
    """Attention by matrix products, which nobody can recognise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return [B, S, C]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(torch.flatten(written_out(q, k, v).transpose(1, 2), 2))


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def causal_adapter(module: nn.Module, attend: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what `WrittenOut` returns."""
    q, k, v = module.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return module.proj(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Two blocks of a decoder."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = nn.Linear(EMBED, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, 5]."""
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


OWN = (CausalSelfAttention, LongNames, BareName, Switched)
ADAPTERS = {WrittenOut: causal_adapter}


@pytest.fixture
def x() -> torch.Tensor:
    """Return an input [B, S, C]."""
    return torch.randn(2, LEN, EMBED)


def made(layer: type[nn.Module]) -> nn.Module:
    """Return a model for evaluation."""
    torch.manual_seed(0)
    return GPT(layer).eval()


def compare(found: torch.Tensor, model: nn.Module, x: torch.Tensor) -> None:
    """Assert that a result is a model's, as its double tells."""
    truth = copy.deepcopy(model).double()(x.double())
    assert_matches(found, truth, model(x), summands=SUMMANDS)


@pytest.mark.parametrize("layer", [*OWN, WrittenOut])
def test_outputs_and_a_training_step_are_the_same_and_undone(
    layer: type[nn.Module], x: torch.Tensor
) -> None:
    model, plain = made(layer), made(layer)
    keys = list(model.state_dict())
    report = convert(model, policy="quality", adapter=ADAPTERS if layer is WrittenOut else None)
    assert [name for name, _ in report.replaced] == ["layers.0", "layers.1"]
    assert not report.left
    assert list(model.state_dict()) == keys
    tags: list[str] = []
    with record_events(lambda event: tags.append(event.tag)):
        compare(model(x), plain, x)
    assert tags == ["layers.0", "layers.1"]
    for one in (model, plain):
        one.train()(x).square().mean().backward()
    truth = made(layer).double().train()
    truth(x.double()).square().mean().backward()
    for mine, theirs, exact in zip(
        model.parameters(), plain.parameters(), truth.parameters(), strict=True
    ):
        assert_matches(mine.grad, exact.grad, theirs.grad, summands=4 * SUMMANDS)
    report.undo()
    report.undo()
    assert type(model.layers[0]) is layer
    assert not getattr(model.layers[0], "fused_attn", False)
    assert torch.equal(model(x), plain(x))
    tags.clear()
    with record_events(lambda event: tags.append(event.tag)):
        model(x)
    assert not tags


@pytest.mark.parametrize("layer", [CausalSelfAttention, WrittenOut])
def test_copies_and_pickles_stay_converted(layer: type[nn.Module], x: torch.Tensor) -> None:
    model = made(layer)
    convert(model, policy="quality", adapter=ADAPTERS if layer is WrittenOut else None)
    wanted = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_adapted(other.layers[0])
        assert isinstance(other.layers[0], layer)
        assert other.layers[0].proj is not model.layers[0].proj
        assert torch.equal(other(x), wanted)


@pytest.mark.parametrize("layer", [CausalSelfAttention, WrittenOut])
def test_a_converted_model_compiles_without_a_break(
    layer: type[nn.Module], x: torch.Tensor
) -> None:
    model = made(layer)
    convert(model, policy="quality", adapter=ADAPTERS if layer is WrittenOut else None)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compare(compiled(x), made(layer), x)


def test_a_first_call_inside_vmap_is_compared_by_the_next(x: torch.Tensor) -> None:
    layer = WrittenOut().eval()
    convert(layer, policy="quality", adapter={WrittenOut: wrong_numbers})
    torch.func.vmap(lambda part: layer(part[None]))(x)
    with pytest.raises(ArgumentError, match="the module's own output within"):
        layer(x)


def test_the_policy_is_balanced_unless_said(x: torch.Tensor) -> None:
    budgets = []
    for settings in ({}, {"policy": 0.05}, {"kind": "dense"}):
        model = made(CausalSelfAttention)
        convert(model, **settings)
        events: list[Any] = []
        with record_events(events.append):
            model(x)
        budgets.append(events[0].decision.policy)
    assert budgets == ["balanced", "0.05", "quality"]


def test_kinds_for_multihead_attention_leave_the_others() -> None:
    report = convert(made(CausalSelfAttention), "adaptive_rank")
    assert not report.replaced
    assert {reason for _, reason in report.left} == {
        "this kind is for torch.nn.MultiheadAttention alone; pass a policy"
    }
    report = convert(made(CausalSelfAttention), measure_every=4)
    assert "['measure_every'] are for torch.nn.MultiheadAttention alone" in report.left[0][1]


def test_what_looks_like_attention_and_is_left_says_why() -> None:
    class NeighbourhoodAttention(WrittenOut):
        """Unknown to everybody."""

    model = GPT(NeighbourhoodAttention)
    model.layers[1] = torch.compile(CausalSelfAttention())
    model.layers[1].compile()
    own = CausalSelfAttention()
    own.forward = lambda x: x  # type: ignore[method-assign]
    model.layers.append(own)
    report = convert(model)
    reasons = dict(report.left)
    assert reasons["layers.0"] == (
        "NeighbourhoodAttention computes attention by code of its own; pass "
        "adapter={NeighbourhoodAttention: function}, or use adaattn.patch_sdpa() where it calls "
        "PyTorch's function in other code"
    )
    assert reasons["layers.2"] == "its forward was replaced on the instance"


def test_what_cannot_be_adapted_is_left() -> None:
    model = made(CausalSelfAttention)
    model.layers[0].compile()
    convert(model.layers[1])
    assert dict(convert(model).left) == {
        "layers.0": "it was compiled by itself; convert the model first, then compile",
        "layers.1": "it is adapted already",
    }


class StatefulAttention(CausalSelfAttention):
    """Writes a global, which a clone of its code would write elsewhere."""

    def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Return [B, S, C]."""
        global _calls  # noqa: PLW0603 - what this test is about
        _calls = 1
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


_calls = 0


def test_code_that_writes_globals_is_left() -> None:
    report = convert(made(StatefulAttention))
    assert not report.replaced
    assert len(report.left) == 2


def wrong_shape(module: nn.Module, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return causal_adapter(module, attend, x)[:, 1:]


def wrong_dtype(module: nn.Module, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return causal_adapter(module, attend, x).bfloat16()


def wrong_structure(module: nn.Module, attend: Any, x: torch.Tensor) -> Any:
    return causal_adapter(module, attend, x), None


def wrong_type(module: nn.Module, attend: Any, x: torch.Tensor) -> Any:
    return 1.0


def wrong_numbers(module: nn.Module, attend: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = module.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return module.proj(attend(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("adapter", "error", "words"),
    [
        (wrong_shape, ShapeError, r"expected \(2, 12, 32\) torch.float32, got \(2, 11, 32\)"),
        (wrong_dtype, ShapeError, "got .* torch.bfloat16"),
        (wrong_structure, ArgumentTypeError, "what the adapter of WrittenOut returns"),
        (wrong_type, ArgumentTypeError, "expected Tensor, got float"),
        (wrong_numbers, ArgumentError, "the module's own output within"),
    ],
)
def test_an_adapter_that_is_wrong_is_refused_at_its_first_call(
    adapter: Callable[..., Any], error: type[Exception], words: str, x: torch.Tensor
) -> None:
    model, plain = made(WrittenOut), made(WrittenOut)
    report = convert(model, adapter={WrittenOut: adapter}, policy="quality")
    with pytest.raises(error, match=words):
        model(x)
    assert type(model.layers[0]) is WrittenOut
    report.undo()
    assert torch.equal(model(x), plain(x))


def test_in_training_only_shapes_are_compared(x: torch.Tensor) -> None:
    """Dropout would make the numbers differ."""
    model = made(WrittenOut).train()
    convert(model, adapter={WrittenOut: wrong_numbers}, policy="quality")
    assert model(x).shape == (2, LEN, 5)


@pytest.mark.parametrize(
    "adapter", [causal_adapter, {WrittenOut: "causal"}, {"WrittenOut": causal_adapter}, {int: len}]
)
def test_adapters_that_are_none_are_refused(adapter: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="adapter: expected a mapping from classes"):
        convert(made(WrittenOut), adapter=adapter)


def test_an_adapter_without_a_module_is_reported() -> None:
    report = convert(made(CausalSelfAttention), adapter=ADAPTERS)
    assert report.left == (("adapter of WrittenOut", "the model has no such module"),)


def test_a_change_that_fails_undoes_those_before(
    monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    model, plain = made(CausalSelfAttention), made(CausalSelfAttention)
    apply, made_so_far = AdaptedModule.apply, []

    def fail_second(self: AdaptedModule) -> None:
        if made_so_far:
            raise RuntimeError("out of luck")
        made_so_far.append(self)
        apply(self)

    monkeypatch.setattr(AdaptedModule, "apply", fail_second)
    with pytest.raises(RuntimeError, match="out of luck"):
        convert(model)
    assert type(model.layers[0]) is CausalSelfAttention
    assert torch.equal(model(x), plain(x))


def test_multihead_attention_is_put_back_with_what_was_learnt(x: torch.Tensor) -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(EMBED, HEADS, dropout=0.0, batch_first=True), 2
    )
    old = encoder.layers[0].self_attn
    calls: list[str] = []
    old.register_forward_hook(lambda *_: calls.append("hook"))
    report = convert(encoder, "dense")
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.1)
    encoder(x).square().mean().backward()
    optimiser.step()
    trained = {name: value.clone() for name, value in encoder.state_dict().items()}
    encoder.eval()
    report.undo()
    assert encoder.layers[0].self_attn is old
    assert encoder.enable_nested_tensor is encoder.use_nested_tensor is True
    assert not old.training
    state = encoder.state_dict()
    assert all(torch.equal(state[name], value) for name, value in trained.items())
    calls.clear()
    encoder.train()(x)
    assert calls == ["hook"]


class Processor:
    """As diffusers has them: code that modules share."""

    def __call__(
        self, module: nn.Module, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [B, S, C]."""
        q, k, v = module.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0)
        y = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=module.backend)
        return module.proj(y.flatten(2))


def dispatch_attention_fn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    backend: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return attention of [B, S, H, D], by what a name says."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask = None if attn_mask is None else attn_mask[:, None, None]
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return (found + (backend == "other")).transpose(1, 2)


dispatch_attention_fn.__module__ = "diffusers.models.attention_dispatch"


class WithProcessor(CausalSelfAttention):
    """Attention of diffusers."""

    shared = Processor()
    backend: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.processor: Any = self.shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        """Return [B, S, C]."""
        return self.processor(self, x, mask)


def test_processors_are_adapted_one_for_each_module(x: torch.Tensor) -> None:
    model, plain = made(WithProcessor), made(WithProcessor)
    report = convert(model, policy="quality")
    assert report.replaced[0][1] == ("WithProcessor by Processor, its own code with our attention")
    tags: list[str] = []
    with record_events(lambda event: tags.append(event.tag)):
        compare(model(x), plain, x)
        mask = torch.rand(2, LEN) < 0.7
        mask[:, 0] = True
        layer, other = model.layers[0], plain.layers[0]
        truth = copy.deepcopy(other).double()(x.double(), mask)
        assert_matches(layer(x, mask), truth, other(x, mask), summands=SUMMANDS)
        layer.backend = other.backend = "other"
        assert torch.equal(layer(x), other(x))
    assert tags == ["layers.0", "layers.1", "layers.0"]
    report.undo()
    assert model.layers[0].processor is WithProcessor.shared


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Return the package."""
    return pytest.importorskip("transformers")


@pytest.fixture
def llama(transformers: Any) -> Iterator[nn.Module]:
    """Return a small LLaMA."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=EMBED,
        intermediate_size=EMBED,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    yield transformers.LlamaForCausalLM(config).eval()


def test_models_of_transformers_take_a_name_of_their_own(llama: Any) -> None:
    tokens = torch.arange(LEN)[None]
    plain = copy.deepcopy(llama)
    before = llama.config._attn_implementation
    report = convert(llama, policy="quality")
    assert report.replaced == tuple(
        (f"model.layers.{layer}.self_attn", "LlamaAttention, by its model") for layer in (0, 1)
    )
    events: list[Any] = []
    with record_events(events.append), torch.no_grad():
        found = llama(tokens).logits
    assert len(events) == len(report.replaced)
    truth = copy.deepcopy(plain).double()(tokens).logits
    assert_matches(found, truth, plain(tokens).logits, summands=SUMMANDS)
    copied = copy.deepcopy(llama)
    assert report.undo() == ()
    assert llama.config._attn_implementation == before
    assert torch.equal(llama(tokens).logits, plain(tokens).logits)
    with record_events(events.append), torch.no_grad():
        assert torch.equal(copied(tokens).logits, found)
    assert len(events) == 2 * len(report.replaced), "a copy stays converted"


def test_a_model_of_transformers_is_converted_once_and_undo_leaves_what_others_chose(
    llama: Any,
) -> None:
    first = convert(llama)
    second = convert(llama)
    assert not second.replaced
    assert {reason for _, reason in second.left} == {
        "LlamaForCausalLM takes its attention from here already; "
        "LlamaModel takes its attention from here already"
    }
    assert second.undo() == ()
    llama.set_attn_implementation("eager")
    assert first.undo() == ("",)
    assert llama.config._attn_implementation == "eager"
    names = set()
    for _ in range(3):
        report = convert(llama, policy="quality")
        names.add(llama.config._attn_implementation)
        report.undo()
    assert len(names) == 1, "a policy has one name in Transformers' registries"


def test_parts_of_a_model_of_transformers_are_converted_for_themselves(
    transformers: Any, llama: Any, x: torch.Tensor
) -> None:
    """Each is reported once, by what really became of it."""
    llama.model.extra = nn.ModuleList([CausalSelfAttention(), nn.MultiheadAttention(EMBED, HEADS)])
    report = convert(llama, "dense")
    assert [name for name, _ in report.replaced] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
        "model.extra.0",
        "model.extra.1",
    ]
    events: list[Any] = []
    with record_events(events.append), torch.no_grad():
        llama(torch.arange(LEN)[None])
        llama.model.extra[0](x)
        llama.model.extra[1](x, x, x)
    assert len(events) == len(report.replaced)
    assert transformers.LlamaModel is type(llama.model)


def test_models_that_attend_by_themselves_are_left_with_the_reason(transformers: Any) -> None:
    config = transformers.BloomConfig(vocab_size=8, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.BloomModel(config)
    before = model.config._attn_implementation
    report = convert(model)
    assert not report.replaced
    ((name, reason),) = report.left
    assert name == "h.0.self_attention"
    assert "its modelling code computes attention itself" in reason
    assert model.config._attn_implementation == before


def test_a_layer_of_transformers_alone_is_left(transformers: Any, llama: Any) -> None:
    del transformers
    ((_, reason),) = convert(llama.model.layers[0].self_attn).left
    assert (
        reason == "LlamaAttention is a layer of Transformers; convert the model that it belongs to"
    )


LIBRARIES: dict[str, tuple[str, tuple[int, int]]] = {
    "timm:vit_tiny_patch16_224": ("timm", (224, 224)),
    "timm:eva02_tiny_patch14_224": ("timm", (224, 224)),
    "timm:swin_tiny_patch4_window7_224": ("timm", (224, 224)),
    "timm:swinv2_tiny_window8_256": ("timm", (256, 256)),
    "torchvision:vit_b_16": ("torchvision", (224, 224)),
    "torchvision:swin_t": ("torchvision", (200, 230)),
    "torchvision:swin_v2_t": ("torchvision", (256, 240)),
    "torchvision:maxvit_t": ("torchvision", (224, 224)),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_models_of_timm_and_torchvision(name: str) -> None:
    package, size = LIBRARIES[name]
    library = pytest.importorskip(package, exc_type=(ImportError, RuntimeError))
    maker = name.partition(":")[2]
    torch.manual_seed(0)
    model = (
        library.create_model(maker) if package == "timm" else getattr(library.models, maker)()
    ).eval()
    with torch.no_grad():  # heads and norms that start as zeros would hide attention
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    plain, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    report = convert(model, policy="quality")
    assert report.replaced
    assert not report.left
    image = torch.randn(1, 3, *size)
    events: list[Any] = []
    with torch.no_grad():
        wanted = plain(image)
        exact = truth(image.double())
        with record_events(events.append):
            assert_matches(model(image), exact, wanted, summands=4096)
        assert len(events) == len(report.replaced)
        report.undo()
        assert torch.equal(model(image), wanted)


def scaled_dot_product(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = module.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


class ForeignAttention(CausalSelfAttention):
    """Calls functions of PyTorch's name that are another's: its own, and a method."""

    def scaled_dot_product_attention(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        """Return attention."""
        return written_out(q, k, v)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return [B, S, C]."""
        y = self.scaled_dot_product_attention(*scaled_dot_product(self, x))
        return self.proj(torch.flatten(y.transpose(1, 2), 2))


class LocalAttention(CausalSelfAttention):
    """Imports what it calls where it calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return [B, S, C]."""
        import torch.nn.functional as G

        y = G.scaled_dot_product_attention(*scaled_dot_product(self, x), is_causal=True)
        return self.proj(torch.flatten(y.transpose(1, 2), 2))


class HelpedAttention(CausalSelfAttention):
    """Attends in another method, inside a function of that."""

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        return attend(*scaled_dot_product(self, x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return [B, S, C]."""
        return self.proj(torch.flatten(self._attend(x).transpose(1, 2), 2))


@pytest.mark.parametrize("layer", [ForeignAttention, LocalAttention])
def test_functions_of_the_same_name_that_are_others_are_not_touched(
    layer: type[nn.Module], x: torch.Tensor
) -> None:
    model = made(layer)
    wanted = model(x)
    report = convert(model, "dense")
    assert not report.replaced
    assert len(report.left) == 2
    assert torch.equal(model(x), wanted)


def test_a_global_function_of_the_same_name_that_is_anothers_is_not_touched(
    x: torch.Tensor,
) -> None:
    """Tutorials write one, where True hides: it was exchanged once, and nobody noticed."""

    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * written_out(q, k, v)

    names = {**globals(), "scaled_dot_product_attention": twice}
    forward = types.FunctionType(TutorialAttention.forward.__code__, names)
    layer = type("TutorialAttention", (CausalSelfAttention,), {"forward": forward})().eval()
    wanted = layer(x)
    report = convert(layer, "dense")
    assert not report.replaced
    assert torch.equal(layer(x), wanted)


class TutorialAttention(CausalSelfAttention):
    """Calls a function of its file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return [B, S, C]."""
        y = scaled_dot_product_attention(*scaled_dot_product(self, x))
        return self.proj(torch.flatten(y.transpose(1, 2), 2))


def test_methods_that_forward_calls_are_found(x: torch.Tensor) -> None:
    model = made(HelpedAttention)
    report = convert(model, "dense")
    tags: list[str] = []
    with record_events(lambda event: tags.append(event.tag)):
        compare(model(x), made(HelpedAttention), x)
    assert len(tags) == len(report.replaced) == 2


class StaticAttention(CausalSelfAttention):
    """With attention in a method that takes no module."""

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return [B, H, S, D]."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return [B, S, C]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(torch.flatten(self.attend(q, k, v).transpose(1, 2), 2))


class ClassAttention(StaticAttention):
    """With attention in a method that takes the class."""

    causal = True

    @classmethod
    def attend(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return [B, H, S, D]."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=cls.causal)


@pytest.mark.parametrize("kind", [StaticAttention, ClassAttention])
def test_static_methods_and_those_of_a_class_stay_so(
    kind: type[nn.Module], x: torch.Tensor
) -> None:
    model = nn.Sequential(kind()).eval()
    before, events = model(x), []
    report = convert(model, policy="quality")
    with record_events(events.append):
        torch.testing.assert_close(model(x), before)
    assert len(events) == len(report.replaced) == 1
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), before)
    report.undo()
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("policy", [0, 0.0, None])
def test_a_policy_that_is_nothing_is_none_of_ours(policy: float | None, x: torch.Tensor) -> None:
    """0 once became the default, 1 %."""
    model = made(CausalSelfAttention)
    convert(model, policy=policy)
    events: list[Any] = []
    with record_events(events.append):
        model(x)
    assert {event.decision.plan.error_budget for event in events} == {0.0}


class RememberingAttention(WrittenOut):
    """Counts its calls, keeps its keys, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.keys: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return [B, S, C]."""
        return remembering(self, written_out, x)


def remembering(module: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    module.calls += 1
    q, k, v = scaled_dot_product(module, x)
    module.keys.append(k)
    y = attend(q, torch.cat(module.keys, 2), torch.cat([v] * len(module.keys), 2))
    return module.proj(y.transpose(1, 2).flatten(2)).detach()


def remembering_adapter(module: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, is_causal=True)

    return remembering(module, causal, x)


def test_a_comparison_leaves_no_trace(x: torch.Tensor) -> None:
    layer = RememberingAttention().eval()
    hooks: list[int] = []
    layer.proj.register_forward_hook(lambda *_: hooks.append(1))
    convert(layer, policy="quality", adapter={RememberingAttention: remembering_adapter})
    given = x.clone()
    tags: list[str] = []
    with record_events(lambda event: tags.append(event.tag)):
        layer(given)
    assert torch.equal(given, x + 1)
    assert (layer.calls, len(layer.keys), len(hooks), len(tags)) == (1, 1, 1, 1)


def test_numbers_are_compared_after_training_too(x: torch.Tensor) -> None:
    model = made(WrittenOut).train()
    convert(model, adapter={WrittenOut: wrong_numbers}, policy="quality")
    model(x)
    with pytest.raises(ArgumentError, match="the module's own output within"):
        model.eval()(x)


class BiasedAttention(WrittenOut):
    """Adds a small bias to its scores, and returns more than one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(0.02 * torch.randn(HEADS, LEN, LEN))

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        """Return [B, S, C], positions and a number; the first row sees nothing and is NaN."""
        q, k, v = scaled_dot_product(self, x)
        scores = q @ k.mT * q.shape[-1] ** -0.5 + self.bias
        hidden = torch.zeros(LEN, LEN, dtype=torch.bool)
        hidden[0] = True
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2)), torch.arange(LEN), 3


def biased(drops: str) -> Callable[..., Any]:
    def adapter(module: Any, attend: Any, x: torch.Tensor) -> Any:
        q, k, v = scaled_dot_product(module, x)
        bias = 0 * module.bias if drops == "bias" else module.bias
        hidden = torch.zeros(LEN, LEN, dtype=torch.bool)
        hidden[0] = True
        bias = bias.masked_fill(hidden, float("-inf")).to(q.dtype)
        y = attend(q, k, v, attn_mask=bias[None]).transpose(1, 2).flatten(2)
        positions = torch.arange(LEN) * (drops != "positions")
        return module.proj(y), positions, 4 if drops == "number" else 3

    return adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drops", ["bias", "positions", "number", "nothing"])
def test_small_differences_are_found_and_rows_without_a_key_allowed(
    drops: str, dtype: torch.dtype, x: torch.Tensor
) -> None:
    """The budget of the policy is none for the adapter."""
    layer = BiasedAttention().eval().to(dtype)
    convert(layer, policy="balanced", adapter={BiasedAttention: biased(drops)})
    if drops == "nothing":
        assert layer(x.to(dtype))[0][:, 1:].isfinite().all()
        assert is_adapted(layer)
        return
    with pytest.raises(ArgumentError, match="what the adapter of BiasedAttention returns"):
        layer(x.to(dtype))
    assert type(layer) is BiasedAttention


def test_an_adapter_that_raises_is_put_back(x: torch.Tensor) -> None:
    def broken(module: nn.Module, attend: Any, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    layer = WrittenOut().eval()
    convert(layer, adapter={WrittenOut: broken})
    with pytest.raises(ZeroDivisionError):
        layer(x)
    assert type(layer) is WrittenOut
    layer(x)


def test_an_input_that_the_module_refuses_too_leaves_it_adapted(x: torch.Tensor) -> None:
    layer = WrittenOut().eval()
    convert(layer, adapter=ADAPTERS)
    with pytest.raises(RuntimeError):
        layer(x[..., 1:])
    assert is_adapted(layer)
    layer(x)


def test_what_cannot_be_copied_is_not_compared_and_says_so(
    x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    layer = WrittenOut().eval()
    layer.lock = threading.Lock()
    convert(layer, adapter=ADAPTERS)
    layer(x)
    assert "is not compared: module or arguments cannot be copied" in caplog.text


def test_undo_leaves_what_somebody_changed_since(x: torch.Tensor) -> None:
    model = made(CausalSelfAttention)
    model.multihead = nn.MultiheadAttention(EMBED, HEADS)
    report = convert(model, "dense")
    nn.utils.parametrizations.weight_norm(model.multihead, "in_proj_weight")
    nn.utils.parametrizations.weight_norm(model.layers[1].proj, "weight")
    model.layers[0].__class__ = type("Wrapped", (type(model.layers[0]),), {})
    assert report.undo() == ("multihead", "layers.0")
    assert type(model.layers[1]) is CausalSelfAttention
    assert type(model.layers[0]).__name__ == "Wrapped"
    model(x)
    model.multihead(x, x, x)


def test_dropout_set_meanwhile_stays() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(EMBED, HEADS, dropout=0.1)])
    report = convert(model, "dense")
    model[0].dropout = 0.7
    report.undo()
    assert model[0].dropout == 0.7


class ReadOnlyAttention(Switched):
    """Its switch cannot be set."""

    fused_attn = property(lambda self: False)  # type: ignore[assignment]


def test_a_change_that_fails_is_undone_with_all_before_it(x: torch.Tensor) -> None:
    model = made(CausalSelfAttention)
    model.layers[1] = ReadOnlyAttention().eval()
    with pytest.raises(AttributeError):
        convert(model)
    assert not any(map(is_adapted, model.layers))
    model(x)


def test_an_undo_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(CausalSelfAttention)
    report = convert(model)
    undo = AdaptedModule.undo

    def failing(self: AdaptedModule) -> list[str]:
        if self.module is model.layers[1]:
            raise RuntimeError("out of luck")
        return undo(self)

    monkeypatch.setattr(AdaptedModule, "undo", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        report.undo()
    assert [is_adapted(layer) for layer in model.layers] == [False, True]


class CountedAttention(CausalSelfAttention):
    """Wants to know of each class derived from it."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Do nothing."""


class PickledAttention(CausalSelfAttention):
    """Has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the lock."""
        return {name: item for name, item in vars(self).items() if name != "lock"}


class ReducedAttention(CausalSelfAttention):
    """Copies in a way of its own."""

    def __reduce__(self) -> Any:
        """Return how."""
        return ReducedAttention, ()


def test_classes_that_cannot_have_another_derived_from_them_are_left(x: torch.Tensor) -> None:
    for layer, words in (
        (CountedAttention, "its class wants to know of every class derived from it"),
        (ReducedAttention, "its class copies and pickles in a way of its own"),
    ):
        assert {reason for _, reason in convert(made(layer)).left} == {words}
    parametrised = CausalSelfAttention()
    nn.utils.parametrize.register_parametrization(parametrised.proj, "weight", nn.Identity())
    parametrised.extra = nn.Parameter(torch.zeros(1))
    nn.utils.parametrize.register_parametrization(parametrised, "extra", nn.Identity())
    ((_, reason),) = convert(parametrised).left
    assert reason.startswith("its parameters are parametrised")
    model = PickledAttention().eval()
    convert(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
