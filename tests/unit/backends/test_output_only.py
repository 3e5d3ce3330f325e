"""Training calls whose output alone is asked for: what autograd is told, with other kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaattn.backends.interface import Direct, Result, Tensors, num_taken
from adaattn.backends.operators import Kept, trained
from adaattn.backends.reference import attention
from adaattn.backends.training import Differentiated
from adaattn.errors import ExecutorError, UnsupportedError
from adaattn.spec import AttentionProblem, Aux, HeadGroup, HeadTerm, MaskKind, Precision
from adaattn.testing import assert_training_matches, make_problem, make_tensors

GROUP = HeadGroup(capability="stand_in")
DRAWN: dict[str, Any] = {"precision": Precision.BF16, "head_dim": 16, "len_q": 24, "batch": 2}
NAMES = ("query", "key", "value")
TAKEN = (*NAMES, "mask", "sinks", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
WANTED: dict[str, Any] = DRAWN | {"requires_grad": True}


asked: list[set[str]] = []
"""Which gradients were asked for."""


def computed(problem: AttentionProblem, *given: Any, **others: Any) -> Result:
    """Return attention by the definition, which autograd does not see."""
    del others
    with torch.no_grad():
        return attention(Tensors.of_direct(*given), trained(problem))


def backward_of(problem: AttentionProblem) -> Callable[..., dict[str, torch.Tensor]]:
    """Return the gradients by the definition."""

    def run(
        tensors: Tensors, kept: Kept, upstream: torch.Tensor, *rest: Any
    ) -> dict[str, torch.Tensor]:
        assert kept.output.shape == upstream.shape
        names = sorted(rest[-1])
        asked.append(set(names))
        given = dict(zip(TAKEN, tensors.as_direct(), strict=False))
        leaves = [given[name].detach().requires_grad_() for name in names]
        given |= dict(zip(names, leaves, strict=True))
        with torch.enable_grad():
            output = attention(Tensors.of(**given), problem).output
        return dict(zip(names, torch.autograd.grad(output, leaves, upstream), strict=True))

    return run


class Repeated:
    """Stands for the passes of calls whose output alone is asked for."""

    def __init__(self) -> None:
        self.served: list[str] = []

    def __call__(self, problem: AttentionProblem) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return partial(self._forward, problem), partial(self._backward, problem)

    def _forward(self, problem: AttentionProblem, *given: Any) -> Result:
        self.served.append("forward")
        return computed(problem, *given)

    def _backward(
        self,
        problem: AttentionProblem,
        wanted: tuple[bool, ...],
        upstream: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        *given: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        self.served.append("backward")
        tensors, kept = Tensors.of_direct(*given), Kept(output=output, lse=lse)
        names = {name for name, wants in zip(TAKEN, wanted, strict=False) if wants}
        found = backward_of(problem)(tensors, kept, upstream, None, frozenset(names))
        return tuple(map(found.get, TAKEN[:6]))


repeated = Repeated()
KERNELS = Differentiated("stand_in", computed, backward_of, lambda problem: None, repeated=repeated)


@pytest.fixture(autouse=True)
def nothing_is_served() -> None:
    repeated.served.clear()


def as_run(call: Direct) -> Callable[[Tensors, AttentionProblem], Result]:
    """Return a function of repeated calls as an executor."""
    return lambda tensors, problem: Result(output=call(*tensors.as_direct()[: num_taken(problem)]))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"is_causal": True},
        {"num_heads": 4, "num_kv_heads": 2},
        {"mask": MaskKind.BOOLEAN},
        {"mask": MaskKind.ADDITIVE},
        {"has_sinks": True, "sinks_require_grad": True},
        {"has_alibi": True},
        {"batch": 1, "lengths_q": (16, 8)},
    ],
)
def test_gradients_are_those_of_the_definition(values: dict[str, Any]) -> None:
    problem = make_problem(**(WANTED | values))
    assert_training_matches(
        as_run(KERNELS.direct(problem, GROUP)),
        make_tensors(problem, lengths_q=values.get("lengths_q", ())),
        problem,
    )
    assert repeated.served == ["forward", "backward"]


def test_gradients_of_gradients_are_asked_of_what_wants_one() -> None:
    """With ``create_graph`` the kernels are told what wants a gradient."""
    problem = make_problem(**WANTED)
    query, key, value = (torch.randn(2, 2, 24, 16).bfloat16() for _ in range(3))
    output = KERNELS.direct(problem, GROUP)(query, key.requires_grad_(), value, None)
    found = torch.autograd.grad(output.sum(), key, create_graph=True)
    assert asked[-1] == {"key"}
    assert torch.equal(*found, *torch.autograd.grad(output.sum(), key))


def test_gradients_of_gradients_are_asked_beside_sinks() -> None:
    beside = {"has_sinks": True, "sinks_require_grad": True, "has_alibi": True}
    problem = make_problem(**WANTED, **beside)
    tensors = make_tensors(problem)
    output = KERNELS.direct(problem, GROUP)(*tensors.as_direct()[:8])
    wanted = tensors.key, tensors.sinks
    found = torch.autograd.grad(output.sum(), wanted, create_graph=True)
    assert asked[-1] == {"query", "key", "value", "sinks"}
    for one, other in zip(found, torch.autograd.grad(output.sum(), wanted), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("values", [{}, {"mask": MaskKind.BOOLEAN}, {"has_sinks": True}])
def test_second_derivatives_are_refused(values: dict[str, Any]) -> None:
    problem = make_problem(**(WANTED | values))
    tensors = make_tensors(problem)
    output = KERNELS.direct(problem, GROUP)(*tensors.as_direct()[: num_taken(problem)])
    (gradient,) = torch.autograd.grad(output.sum(), tensors.query, create_graph=True)
    with pytest.raises(UnsupportedError, match="have no derivatives"):
        gradient.sum().backward()


def test_transforms_are_refused() -> None:
    problem = make_problem(**WANTED)
    call = KERNELS.direct(problem, GROUP)
    given = make_tensors(problem).as_direct()[:3]
    with pytest.raises(ExecutorError):
        torch.func.grad(lambda query: call(query, *given[1:], None).sum())(given[0])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ExecutorError):
        call(*given, None)
    assert not repeated.served


def test_others_are_not_taken_for_them() -> None:
    for values in ({"dropout_p": 0.5}, {"head_terms": HeadTerm.SCALE}, {"aux": Aux.LSE}):
        problem = make_problem(**(WANTED | values))
        tensors = make_tensors(problem)
        call = KERNELS.direct(problem, GROUP)
        call(*tensors.as_direct()[: num_taken(problem)])
        KERNELS.run(tensors, problem, GROUP)
    assert not repeated.served


def test_saved_tensors_may_be_kept_elsewhere() -> None:
    problem = make_problem(**WANTED)
    tensors = make_tensors(problem)
    call = KERNELS.direct(problem, GROUP)
    kept: list[torch.Size] = []

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor.detach().mT.contiguous()

    def run(tensors: Tensors, problem: AttentionProblem) -> Result:
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor.mT):
            return as_run(call)(tensors, problem)

    assert_training_matches(run, tensors, problem)
    heads, rows = torch.Size((2, 2, 24, 16)), torch.Size((2, 2, 24))
    assert kept == [heads, rows, heads, heads, heads]


@pytest.mark.parametrize("order", [("run", "direct"), ("direct", "run")])
def test_a_checkpoint_may_compute_again_in_the_other_way(order: tuple[str, str]) -> None:
    """A call whose time is taken goes by `run`, and need not be timed when it is computed again."""
    problem = make_problem(**WANTED)
    tensors = make_tensors(problem)
    call = KERNELS.direct(problem, GROUP)
    ways = {
        "run": lambda: KERNELS.run(tensors, problem, GROUP).output,
        "direct": lambda: call(*tensors.as_direct()[:4]),
    }
    left = list(order)
    output = checkpoint(lambda query: ways[left.pop(0)](), tensors.query, use_reentrant=False)
    found = torch.autograd.grad(output.sum(), tensors.query)
    assert torch.equal(*found, *torch.autograd.grad(ways["run"]().sum(), tensors.query))
    assert not left


def test_without_a_gradient_of_the_output_there_is_none() -> None:
    class Stop(torch.autograd.Function):
        """Passes no gradient on."""

        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> None:
            return None

    problem = make_problem(**WANTED)
    tensors = make_tensors(problem)
    output = KERNELS.direct(problem, GROUP)(*tensors.as_direct()[:4])
    (Stop.apply(output).sum() + tensors.query.sum()).backward()
    assert tensors.query.grad is not None
    assert tensors.key.grad is tensors.value.grad is None
    assert "backward" not in repeated.served
