"""Our function in the place of PyTorch's own: found everywhere, undone whole, right."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import adaattn
from adaattn.errors import ArgumentTypeError, PolicyError
from adaattn.testing import assert_matches

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Hold that each test leaves PyTorch's own function."""
    yield
    assert F.scaled_dot_product_attention is ORIGINAL


class Block(nn.Module):
    """A layer of a GPT as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


def policies_of(call: object, *args: torch.Tensor) -> tuple[object, list[str]]:
    """Return what a function returns, and the policies of its attention calls."""
    events: list[adaattn.AttentionEvent] = []
    with adaattn.record_events(events.append):
        found = call(*args)  # type: ignore[operator]
    return found, [event.decision.policy for event in events]


def test_a_model_runs_through_us_and_back() -> None:
    model, x = Block(), torch.randn(2, 10, 32)
    plain, none = policies_of(model, x)
    with adaattn.patch_sdpa() as patch:
        assert patch.is_active
        ours, policies = policies_of(model, x)
    after, back = policies_of(model, x)
    assert (none, policies, back) == ([], ["quality"], [])
    assert not patch.is_active
    exact = Block().double()
    exact.load_state_dict(model.double().state_dict())
    assert_matches(ours, exact(x.double()), plain, summands=32 + 10 + 32)
    assert torch.equal(after, plain)


def test_a_training_step_is_the_same() -> None:
    model, x = Block(), torch.randn(2, 10, 32)
    parameters = list(model.parameters())
    plain = torch.autograd.grad(model(x).square().sum(), parameters)
    with adaattn.patch_sdpa():
        ours = torch.autograd.grad(model(x).square().sum(), parameters)
    wide = [item.detach().double().requires_grad_() for item in parameters]
    names = [name for name, _ in model.named_parameters()]
    found = torch.func.functional_call(model, dict(zip(names, wide, strict=True)), (x.double(),))
    exact = torch.autograd.grad(found.square().sum(), wide)
    for got, right, eager in zip(ours, exact, plain, strict=True):
        assert_matches(got, right, eager, summands=20 * 32 + 10)


@pytest.mark.parametrize("policy", [None, "speed", adaattn.Policy(name="mine")])
def test_the_policy_is_that_of_the_patch_or_of_the_context(
    policy: str | adaattn.Policy | None,
) -> None:
    x = torch.randn(1, 2, 16, 8)
    with adaattn.patch_sdpa(policy) as patch, adaattn.use_policy("balanced"):
        _, policies = policies_of(lambda: F.scaled_dot_product_attention(x, x, x))
    wanted = {None: "balanced", "speed": "speed"}.get(policy, "mine")  # type: ignore[arg-type]
    assert policies == [wanted]
    assert repr(patch).startswith("SdpaPatch(policy=")


def test_multihead_attention_goes_through_it_too() -> None:
    module, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    with adaattn.patch_sdpa():
        _, policies = policies_of(lambda: module(x, x, x, need_weights=False))
    assert policies == ["quality"]


def test_a_module_that_imported_the_name_is_found() -> None:
    other = ModuleType("imported_it")
    other.scaled_dot_product_attention = ORIGINAL  # type: ignore[attr-defined]
    sys.modules["imported_it"] = other
    try:
        with adaattn.patch_sdpa():
            assert other.scaled_dot_product_attention is F.scaled_dot_product_attention
            assert other.scaled_dot_product_attention is not ORIGINAL
        assert other.scaled_dot_product_attention is ORIGINAL
    finally:
        del sys.modules["imported_it"]


@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_patches_inside_one_another_are_undone_in_any_order(order: str) -> None:
    x = torch.randn(1, 2, 16, 8)

    def policy() -> str:
        return policies_of(lambda: F.scaled_dot_product_attention(x, x, x))[1][0]

    outer, inner = adaattn.patch_sdpa("balanced"), adaattn.patch_sdpa("speed")
    assert policy() == "speed"
    first, second = (inner, outer) if order == "inner first" else (outer, inner)
    first.undo()
    assert policy() == ("balanced" if order == "inner first" else "speed")
    second.undo()
    second.undo()
    assert F.scaled_dot_product_attention is ORIGINAL


def test_an_error_inside_undoes_it() -> None:
    with pytest.raises(RuntimeError, match="mine"), adaattn.patch_sdpa():
        raise RuntimeError("mine")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_we_do_not_take_goes_to_pytorch() -> None:
    x = torch.randn(1, 2, 16, 8)
    parts = [torch.randn(length, 2, 8) for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)

    class Marked(torch.Tensor):
        pass

    with adaattn.patch_sdpa():
        meta, none = policies_of(lambda: F.scaled_dot_product_attention(*[x.to("meta")] * 3))
        marked, neither = policies_of(
            lambda: F.scaled_dot_product_attention(*[x.as_subclass(Marked)] * 3)
        )
        jagged, nor = policies_of(lambda: F.scaled_dot_product_attention(*[nested] * 3))
        mask = torch.ones(16, 16, dtype=torch.bool).tril(-2)
        mask[:, 0] = True
        both, never = policies_of(
            lambda: F.scaled_dot_product_attention(x, x, x, mask, is_causal=True)
        )
    assert none == neither == nor == never == []
    assert torch.equal(both, ORIGINAL(x, x, x, mask, is_causal=True))
    assert meta.device.type == "meta" and meta.shape == x.shape
    assert torch.equal(marked.as_subclass(torch.Tensor), ORIGINAL(x, x, x))
    for found, part in zip(jagged.unbind(), parts, strict=True):
        plain, exact = (ORIGINAL(*[it.transpose(0, 1)] * 3) for it in (part, part.double()))
        assert_matches(found, exact, plain, summands=16)


def test_a_keyword_that_only_pytorch_has_is_refused_by_name() -> None:
    x = torch.randn(1, 2, 16, 8)
    with adaattn.patch_sdpa(), pytest.raises(ArgumentTypeError) as caught:
        F.scaled_dot_product_attention(x, x, x, dropout_mask=None)  # type: ignore[call-arg]
    assert "expected some of enable_gqa, scale, got 'dropout_mask'; undo the patch" in str(
        caught.value
    )


def test_an_unknown_policy_patches_nothing() -> None:
    with pytest.raises(PolicyError):
        adaattn.patch_sdpa("fast")


def test_compiled_code_is_one_graph() -> None:
    x = torch.randn(1, 2, 16, 8)
    torch._dynamo.reset()
    with adaattn.patch_sdpa():
        compiled = torch.compile(
            lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
            backend="eager",
            fullgraph=True,
        )
        found = compiled(x)
    wide = x.double()
    exact, eager = (ORIGINAL(*[item] * 3, is_causal=True) for item in (wide, x))
    assert_matches(found, exact, eager, summands=24)
