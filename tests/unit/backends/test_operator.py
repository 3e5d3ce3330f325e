"""An executor whose kernel is an operator of `torch.library`: eager, in a graph, in training."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import adaattn
from adaattn import AuxRequest, hardware
from adaattn.backends import Result, Tensors, register
from adaattn.spec import AttentionProblem, Aux, Capability, Feature, HeadGroup
from adaattn.testing import assert_matches

NAME = "adaattn_test::softmax"


@torch.library.custom_op(NAME, mutates_args=())
def softmax_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> list[Tensor]:
    """Return the output [B, H, Sq, Dv] and the log-sum-exp [B, H, Sq]; a kernel would be here."""
    scores = scale * query @ key.mT
    lse = scores.logsumexp(-1)
    return [(scores - lse[..., None]).exp() @ value, lse]


@softmax_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> list[Tensor]:
    return [
        query.new_empty((*query.shape[:-1], value.shape[-1])),
        query.new_empty(query.shape[:-1]),
    ]


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: list[Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: torch.autograd.function.FunctionCtx, grads: list[Tensor]) -> tuple:
    """Take the gradients of both outputs: that of the log-sum-exp adds to each row's scores."""
    query, key, value, output, lse = ctx.saved_tensors
    grad, grad_lse = grads
    weights = (ctx.scale * query @ key.mT - lse[..., None]).exp()
    rows = (grad * output).sum(-1, keepdim=True) - grad_lse[..., None]
    scores = ctx.scale * weights * (grad @ value.mT - rows)
    return scores @ key, scores.mT @ query, weights.mT @ grad, None


softmax_attention.register_autograd(_backward, setup_context=_keep)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    output, lse = softmax_attention(tensors.query, tensors.key, tensors.value, problem.scale)
    return Result(output=output, lse=lse if problem.wants(Aux.LSE) else None)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    features = Feature.BACKWARD | Feature.LSE | Feature.LSE_GRADIENT
    remove = register([Capability(name="operator", backend="operator", features=features)], run)
    yield
    remove()
    hardware.clear_cache()


def draw() -> list[Tensor]:
    return [torch.randn(1, 2, 12, 8, requires_grad=True) for _ in range(3)]


def attend(*tensors: Tensor) -> Tensor:
    return adaattn.scaled_dot_product_attention(*tensors, backend="operator")


def losses(tensors: list[Tensor], backend: str) -> Tensor:
    output, aux = adaattn.scaled_dot_product_attention(
        *tensors, backend=backend, return_aux=AuxRequest(lse=True)
    )
    return output.square().sum() + aux.lse.sin().sum()


def test_it_is_an_operator_as_pytorch_wants_them() -> None:
    torch.library.opcheck(softmax_attention, (*draw(), 0.3))


def test_the_gradient_of_its_log_sum_exp_arrives() -> None:
    tensors = draw()
    wide = [item.detach().double().requires_grad_() for item in tensors]
    actual = torch.autograd.grad(losses(tensors, "operator"), tensors)
    exact = torch.autograd.grad(losses(wide, "reference"), wide)
    eager = torch.autograd.grad(losses(tensors, "reference"), tensors)
    for found, right, yardstick in zip(actual, exact, eager, strict=True):
        assert_matches(found, right, yardstick, summands=12)


def test_a_graph_holds_it_and_does_not_look_inside() -> None:
    names: list[str] = []

    def noting(graph: torch.fx.GraphModule, inputs: object) -> object:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    tensors = [item.detach() for item in draw()]
    compiled = torch.compile(attend, fullgraph=True, backend=noting)
    assert torch.equal(compiled(*tensors), attend(*tensors))
    assert any("adaattn_test" in name for name in names)
    assert not any(name == "softmax" or "matmul" in name for name in names)
