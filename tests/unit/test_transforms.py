"""The public call under torch.compile, torch.export, torch.func and checkpointing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from adaattn import (
    AttentionEvent,
    AuxRequest,
    HeadGroup,
    Launch,
    LowRank,
    Plan,
    Precision,
    Scheme,
    plan_attention,
    record_events,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.errors import AdaAttnError, UnsupportedError
from adaattn.testing import assert_matches

HEADS = 4


def one(**values: Any) -> Plan:
    return Plan(groups=(HeadGroup(**values),), num_heads=HEADS)


PLANS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "flash": (one(capability="sdpa.flash"), {"is_causal": True}),
    "math": (one(capability="sdpa.math"), {"is_causal": True}),
    "chunked window": (one(capability="chunked", launch=Launch(chunk_rows=16)), {"window": (9, 3)}),
    "chunked softcap": (one(capability="chunked", launch=Launch(chunk_rows=16)), {"softcap": 5.0}),
    "reference": (one(capability="reference"), {"dilation": 2}),
    "low rank": (
        one(capability="low_rank", method=LowRank(rank=8, value_rank=8)),
        {"is_causal": True},
    ),
    "lower precision": (
        replace(one(capability="sdpa.flash", scheme=Scheme.of(Precision.BF16)), error_budget=0.05),
        {},
    ),
    "mixed heads": (
        Plan(
            groups=(
                HeadGroup(capability="sdpa.flash", heads=(0, 2)),
                HeadGroup(capability="chunked", heads=(1, 3)),
            ),
            num_heads=HEADS,
        ),
        {"is_causal": True},
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Start and leave without compiled code."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def draw(*, grad: bool = False, batch: tuple[int, ...] = (2,)) -> list[torch.Tensor]:
    return [torch.randn(*batch, HEADS, 48, 16, requires_grad=grad) for _ in range(3)]


def with_gradients(
    function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the output and the gradients of a weighted sum of it."""
    output = function(*tensors)
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


@pytest.mark.parametrize("name", PLANS)
def test_a_given_plan_compiles_whole_forward_and_backward(name: str) -> None:
    plan, settings = PLANS[name]

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, plan=plan, **settings)

    tensors = draw(grad=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = with_gradients(call, tensors)
    for actual, reference in zip(with_gradients(compiled, tensors), expected, strict=True):
        assert torch.equal(actual, reference)


OTHER_CALLS: dict[str, tuple[Plan, Callable[[], dict[str, Any]], str]] = {
    "softcap": (one(capability="sdpa.flash"), lambda: {"softcap": 2.0}, "not support softcap"),
    "window": (one(capability="sdpa.flash"), lambda: {"window": (3, 0)}, "a sliding window"),
    "sinks": (one(capability="sdpa.flash"), lambda: {"sinks": torch.randn(HEADS)}, "sinks"),
    "negative scale": (
        one(capability="sdpa.flash"),
        lambda: {"is_causal": True, "scale": -1.0},
        "a scale of 0 or less",
    ),
    "other heads": (
        Plan(groups=(HeadGroup(capability="chunked"),), num_heads=2 * HEADS),
        dict,
        "one for 4 heads, got one for 8",
    ),
    "lower precision": (
        one(capability="sdpa.flash", scheme=Scheme.of(Precision.BF16)),
        dict,
        "computes in bf16 and allows no error",
    ),
}


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("form", ["eager", "compiled", "compiled whole"])
@pytest.mark.parametrize("name", OTHER_CALLS)
def test_a_plan_for_another_call_is_refused(name: str, form: str) -> None:
    """Compiled calls once ran such a plan and left out what it did not know."""
    plan, settings, match = OTHER_CALLS[name]
    given = settings()

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return attend(*tensors, plan=plan, **given)

    if form == "compiled whole":  # the compiler words an error inside a graph its own way
        with pytest.raises((AdaAttnError, Unsupported)):
            torch.compile(call, fullgraph=True, backend="aot_eager")(*draw())
        return
    run = torch.compile(call, backend="aot_eager") if form == "compiled" else call
    with pytest.raises(AdaAttnError, match=match):
        run(*draw())


BOUNDS = torch.tensor([0, 20, 48], dtype=torch.int32)
PACKED = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}


@pytest.mark.parametrize(
    "settings", [{}, {"is_causal": True}, {"window": (5, 3), "softcap": 3.0}], ids=str
)
def test_packed_calls_compile_whole(settings: dict[str, Any]) -> None:
    tensors = draw(batch=(1,))
    compiled = torch.compile(
        lambda *items: attend(*items, **settings, **PACKED), fullgraph=True, backend="aot_eager"
    )
    exact = attend(*(item.double() for item in tensors), **settings, **PACKED)
    eager = attend(*tensors, backend="reference", **settings, **PACKED)
    assert_matches(compiled(*tensors), exact, eager, summands=sum(tensors[0].shape[-2:]))


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize(
    "choice", [{"plan": one(capability="chunked")}, {"backend": "chunked"}], ids=["plan", "backend"]
)
def test_an_executor_that_reads_bounds_is_refused_inside_a_graph(choice: dict[str, Any]) -> None:
    tensors = draw(batch=(1,))
    settings = choice | PACKED | {"alibi_slopes": torch.ones(tensors[0].shape[1])}
    attend(*tensors, **settings)
    compiled = torch.compile(lambda *items: attend(*items, **settings), backend="aot_eager")
    with pytest.raises(UnsupportedError, match="read on the host, which a graph cannot do"):
        compiled(*tensors)


@pytest.mark.parametrize("settings", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_a_few_packed_tokens_are_one_call_with_a_mask_in_a_graph_too(
    settings: dict[str, Any],
) -> None:
    tensors = draw(batch=(1,))

    def call(*items: torch.Tensor) -> torch.Tensor:
        return attend(*items, backend="chunked", **settings, **PACKED)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), call(*tensors))


def test_auxiliary_outputs_come_out_of_a_compiled_call() -> None:
    plan = one(capability="chunked")
    request = AuxRequest(lse=True, entropy=True)

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, aux = attend(*tensors, plan=plan, return_aux=request)
        return output, aux.lse, aux.entropy

    tensors = draw()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(*tensors), call(*tensors), strict=True):
        assert torch.equal(actual, expected)


def test_a_compiled_call_follows_autocast() -> None:
    plan = one(capability="chunked")

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(*tensors, softcap=5.0, plan=plan)

    tensors = draw()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert compiled(*tensors).dtype is torch.bfloat16
    assert torch.equal(compiled(*tensors), call(*tensors))


def test_a_compiled_call_emits_no_event() -> None:
    tensors = draw()
    plan = plan_attention(*tensors).plan
    compiled = torch.compile(
        lambda *items: attend(*items, plan=plan), fullgraph=True, backend="aot_eager"
    )
    events: list[object] = []
    with record_events(events.append):
        compiled(*tensors)
    assert events == []


@pytest.mark.parametrize(
    "settings", [{}, {"is_causal": True}, {"window": (5, 3)}, {"softcap": 3.0}], ids=str
)
def test_a_call_without_a_plan_compiles_whole(settings: dict[str, Any]) -> None:
    """It went around the graph, and Inductor saw nothing of it."""
    tensors = draw()
    compiled = torch.compile(
        lambda *items: attend(*items, **settings).sin(), fullgraph=True, backend="aot_eager"
    )
    exact = attend(*(item.double() for item in tensors), **settings).sin()
    eager = attend(*tensors, backend="reference", **settings).sin()
    assert_matches(compiled(*tensors), exact, eager, summands=sum(tensors[0].shape[-2:]))


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_an_approximation_by_name_is_refused_inside_a_graph() -> None:
    """It computed at full rank there: exactly, slowly, and under another's name."""
    compiled = torch.compile(
        lambda *items: attend(*items, policy="speed", backend="low_rank"), backend="aot_eager"
    )
    with pytest.raises(UnsupportedError, match="pass the plan that plan_attention gives"):
        compiled(*draw())


class Attention(torch.nn.Module):
    """A module that runs one plan."""

    def __init__(self, plan: Plan, settings: dict[str, Any]) -> None:
        super().__init__()
        self.plan = plan
        self.settings = settings

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, plan=self.plan, **self.settings)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("name", PLANS)
def test_a_given_plan_exports(name: str, strict: bool) -> None:
    module = Attention(*PLANS[name])
    tensors = draw()
    exported = torch.export.export(module, tuple(tensors), strict=strict)
    others = draw()
    assert torch.equal(exported.module()(*others), module(*others))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
class TestFunctionTransforms:
    """torch.func works where it works with PyTorch's own function."""

    @pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
    def test_vmap_maps_the_call(self, settings: dict[str, Any]) -> None:
        tensors = draw(batch=(3, 2))
        for _ in range(2):
            actual = torch.func.vmap(lambda *items: attend(*items, **settings))(*tensors)
            theirs = torch.func.vmap(
                lambda *items: F.scaled_dot_product_attention(*items, **settings)
            )(*tensors)
            assert torch.equal(actual, theirs)

    def test_vmap_maps_what_pytorch_has_no_kernel_for(self) -> None:
        tensors = draw(batch=(3, 2))
        actual = torch.func.vmap(lambda *items: attend(*items, window=(5, 3)))(*tensors)
        assert torch.equal(actual, attend(*tensors, window=(5, 3)))

    @pytest.mark.parametrize("policy", ["balanced", "speed"])
    def test_vmap_under_an_error_budget_is_exact(self, policy: str) -> None:
        tensors = draw(batch=(3, 2))
        actual = torch.func.vmap(lambda *items: attend(*items, policy=policy))(*tensors)
        theirs = torch.func.vmap(F.scaled_dot_product_attention)(*tensors)
        assert torch.equal(actual, theirs)

    def test_the_decision_says_why_nothing_was_measured(self) -> None:
        events: list[AttentionEvent] = []
        with record_events(events.append):
            torch.func.vmap(lambda *items: attend(*items, policy="speed"))(*draw(batch=(3, 2)))
        (event,) = events
        assert event.decision.plan.is_exact
        assert event.decision.notes == (
            "inside a torch.func transform nothing can be measured; it ran exactly",
        )

    def test_a_shared_key_need_not_be_mapped(self) -> None:
        query, key, value = draw(batch=(3, 2))
        mapped = torch.func.vmap(attend, in_dims=(0, None, None))(query, key[0], value[0])
        theirs = torch.func.vmap(F.scaled_dot_product_attention, in_dims=(0, None, None))(
            query, key[0], value[0]
        )
        assert torch.equal(mapped, theirs)

    def test_grad_differentiates_the_call(self) -> None:
        tensors = draw()

        def gradients(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
            total = torch.func.grad(lambda *items: function(*items).square().sum(), (0, 1, 2))
            return total(*tensors)

        for _ in range(2):
            theirs = gradients(F.scaled_dot_product_attention)
            assert all(map(torch.equal, gradients(attend), theirs))

    def test_gradients_of_each_sample_are_mapped_gradients(self) -> None:
        tensors = draw(batch=(3, 2))

        def of_samples(function: Callable[..., torch.Tensor]) -> torch.Tensor:
            total = torch.func.grad(lambda *items: function(*items).square().sum())
            return torch.func.vmap(total)(*tensors)

        assert torch.equal(of_samples(attend), of_samples(F.scaled_dot_product_attention))


@pytest.mark.parametrize(("softcap", "length"), [(0.0, 53), (2.0, 59)])
def test_what_is_made_of_fake_tensors_serves_no_other_call(softcap: float, length: int) -> None:
    """A fake window was kept, and hid nothing from calls after it."""
    settings = {"window": (6, 0), "is_causal": True}
    first = [torch.randn(1, 2, length, 16) for _ in range(3)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        attend(*first, softcap=softcap, **settings)
    real = [torch.randn(2, 4, length, 16) for _ in range(3)]
    if softcap:
        settings |= {"softcap": softcap, "sinks": torch.randn(4)}
    wide = attend(*(item.double() for item in real), backend="reference", **settings)
    eager = attend(*real, backend="reference", **settings)
    assert_matches(attend(*real, **settings), wide, eager, summands=length + 16)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_derivatives_of_slopes_are_those_of_this_call() -> None:
    """A mask was kept with the derivative of the call that made it."""
    tensors = [torch.randn(2, 4, 45, 16) for _ in range(3)]
    slopes, tangent = torch.rand(4), torch.randn(4)

    def derivative(step: float, dtype: torch.dtype, **choice: Any) -> torch.Tensor | None:
        dual = slopes.to(dtype)
        if step:
            dual = forward_ad.make_dual(dual, step * tangent.to(dtype))
        output = attend(*(item.to(dtype) for item in tensors), alibi_slopes=dual, **choice)
        return forward_ad.unpack_dual(output).tangent

    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        for step in (1.0, 2.0, 1.0):
            wide = derivative(step, torch.float64, backend="reference")
            eager = derivative(step, torch.float32, backend="reference")
            found = derivative(step, torch.float32)
            assert wide is not None and eager is not None and found is not None
            assert wide.any()
            assert_matches(found, wide, eager, summands=2 * 45 + 16)
        assert derivative(0.0, torch.float32) is None


def test_symbolic_sizes_are_refused_with_what_takes_them() -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.export"):
        make_fx(lambda *given: attend(*given), tracing_mode="symbolic")(*draw())


@pytest.mark.parametrize("more", [{}, {"window": (3, 0)}], ids=str)
@pytest.mark.parametrize("name", ["alibi_slopes", "scale", "softcap"])
def test_a_graph_of_operators_takes_the_numbers_that_it_is_given(
    name: str, more: dict[str, Any]
) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: Any) -> Any:
        return attend(q, k, v, **{name: numbers}, **more)

    tensors, numbers = draw(), torch.rand(HEADS)
    for _ in range(3):
        attention(*tensors, numbers)
    graph = make_fx(attention, tracing_mode="real")(*tensors, numbers)
    for given in (numbers, numbers + 1):
        torch.testing.assert_close(graph(*tensors, given), attention(*tensors, given))


def test_windows_of_each_head_are_drawn_as_a_graph_and_by_fake_tensors() -> None:
    tensors, windows = draw(), torch.tensor([[3, 0], [-1, 2], [0, 0], [5, -1]])

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any) -> Any:
        return attend(q, k, v, window=window)

    graph = make_fx(attention, tracing_mode="real")(*tensors, windows)
    for given in (windows, windows.flip(0)):
        torch.testing.assert_close(graph(*tensors, given), attention(*tensors, given))
    with FakeTensorMode() as mode:
        output = attention(*map(mode.from_tensor, (*tensors, windows)))
    assert output.shape == tensors[0].shape


@pytest.mark.parametrize("settings", [{"window": (3, 0)}, {"dilation": 2}], ids=str)
def test_functionalized_calls_see_what_position_shows(settings: dict[str, Any]) -> None:
    tensors = draw()
    found = torch.func.functionalize(lambda *given: attend(*given, **settings))(*tensors)
    torch.testing.assert_close(found, attend(*tensors, **settings))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"window": (5, 3)}, {"softcap": 3.0}, {"dropout_p": 0.3}],
    ids=str,
)
def test_checkpointing_recomputes_the_same_call(
    settings: dict[str, Any], use_reentrant: bool
) -> None:
    """The recomputation finds the call that the first run bound."""
    tensors = draw(grad=True)

    def call(*items: torch.Tensor) -> torch.Tensor:
        return attend(*items, **settings)

    def checkpointed(*items: torch.Tensor) -> torch.Tensor:
        return checkpoint(call, *items, use_reentrant=use_reentrant)

    torch.manual_seed(1)
    expected = with_gradients(call, tensors)
    torch.manual_seed(1)
    for actual, reference in zip(
        with_gradients_of_leaves(checkpointed, tensors), expected, strict=True
    ):
        assert torch.equal(actual, reference)


def with_gradients_of_leaves(
    function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the same as `with_gradients` by ``backward``, which reentrant checkpoints need."""
    leaves = [item.detach().requires_grad_() for item in tensors]
    output = function(*leaves)
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    (output * weights).sum().backward()
    return [output, *(leaf.grad for leaf in leaves)]
