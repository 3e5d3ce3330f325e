"""The public call and the modules inside ``torch.compile(fullgraph=True)``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import adaattn
from adaattn import scaled_dot_product_attention as attend
from adaattn.testing import assert_matches

LENGTHS = range(20, 70)
MODULES = (
    adaattn.DenseAttention,
    adaattn.AdaAttention,
    adaattn.AdaptiveRankAttention,
    adaattn.AdaptivePrecisionAttention,
)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (8, 0)},
    "dilation": {"dilation": 2},
    "bottom right": {"is_causal": True, "align": "bottom_right"},
    "softcap": {"softcap": 5.0},
    "ALiBi": {"is_causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "packed": {
        "is_causal": True,
        "cu_seqlens_q": torch.tensor([0, 9, 32], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, 32], dtype=torch.int32),
    },
}


@pytest.fixture(autouse=True)
def fresh_graphs() -> None:
    torch._dynamo.reset()


def draw(length: int = 32, heads: int = 4, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, heads, length, 16)


def check(name: str, found: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Hold a result against the definition in fp64, eager PyTorch in fp32 as the yardstick."""
    exact = attend(*(item.double() for item in tensors), backend="reference", **CALLS[name])
    eager = attend(*tensors, backend="reference", **CALLS[name])
    assert_matches(found, exact, eager, summands=sum(tensors[0].shape[-2:]))


@pytest.mark.parametrize("name", CALLS)
def test_the_default_call_is_one_graph_with_the_right_result(name: str) -> None:
    tensors = draw(), draw(heads=2), draw(heads=2)
    given = CALLS[name] | {"enable_gqa": True}
    compiled = torch.compile(
        lambda *items: attend(*items, **given), fullgraph=True, backend="aot_eager"
    )
    grouped = [item.repeat_interleave(2, 1) for item in tensors[1:]]
    check(name, compiled(*tensors), tensors[0], *grouped)


@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap"])
def test_fifty_lengths_compile_twice(name: str) -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: attend(x, x, x, **CALLS[name]), fullgraph=True, backend=counter
    )
    for length in LENGTHS:
        compiled(draw(length))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_is_one_graph_for_any_length(kind: Callable[..., Any]) -> None:
    counter = CompileCounter()
    module = kind(64, 4)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for length in LENGTHS:
        x = torch.randn(1, length, 64)
        output, _ = compiled(x, is_causal=True)
        assert output.shape == x.shape
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "module",
    [
        adaattn.DenseAttention(64, 4),
        adaattn.AdaAttention(64, 4, policy="quality"),
        adaattn.AdaptiveRankAttention(64, 4, error_budget=0.0),
    ],
    ids=lambda module: type(module).__name__,
)
def test_an_exact_module_is_exported_for_any_length(module: torch.nn.Module) -> None:
    module.eval()
    x = torch.randn(1, 24, 64)
    length = torch.export.Dim("length", min=2, max=512)
    with torch.no_grad():
        exported = torch.export.export(
            module,
            (x,),
            {"is_causal": True},
            dynamic_shapes={"query": {1: length}, "is_causal": None},
        ).module()
        other = torch.randn(1, 41, 64)
        assert_matches(
            exported(other, is_causal=True)[0],
            module.double()(other.double(), is_causal=True)[0],
            module.float()(other, is_causal=True)[0],
            summands=64 + 41,
        )


def test_under_a_budget_one_operator_decides_when_the_graph_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph used to break there; a graph that trains is exact instead."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        del inputs
        graphs.append(graph)
        return graph.forward

    x = draw(512)
    events: list[adaattn.AttentionEvent] = []
    compiled = torch.compile(
        lambda x: attend(x, x, x, policy="balanced"), fullgraph=True, backend=backend
    )
    with torch.no_grad():
        compiled(x)
    targets = [str(node.target) for node in graphs[-1].graph.nodes]
    assert any("adaattn.attention" in target for target in targets)
    compiled(x.requires_grad_())
    targets = [str(node.target) for node in graphs[-1].graph.nodes]
    assert not any("adaattn.attention" in target for target in targets)
    with torch.no_grad(), adaattn.record_events(events.append):
        compiled(x)
    assert [event.decision.policy for event in events] == ["balanced"]


def test_a_policy_without_a_loss_needs_no_operator() -> None:
    policy = adaattn.Policy(name="exact", error_budget=0.0)
    x = draw()
    compiled = torch.compile(
        lambda x: attend(x, x, x, policy=policy), fullgraph=True, backend="aot_eager"
    )
    check("plain", compiled(x), x, x, x)
