"""Faults of earlier versions, one test each: what went wrong is told in the docstring."""

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import adaattn
from adaattn import (
    AttentionEvent,
    AuxRequest,
    HeadGroup,
    Method,
    Plan,
    Policy,
    Precision,
    Scheme,
    plan_attention,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import registry, written
from adaattn.errors import UnsupportedError
from adaattn.testing import (
    assert_matches,
    assert_within_budget,
    fake_facts,
    make_problem,
    make_tensors,
)

DIM = 64
LOSSY = Policy(name="lossy", error_budget=0.05)
FULL = torch.OutOfMemoryError("the memory is full")


@pytest.fixture
def invented_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for one invented machine, on which low rank pays."""
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)


def draw(length: int = 32, heads: int = 4, dim: int = 16) -> list[torch.Tensor]:
    return [torch.randn(1, heads, length, dim) for _ in range(3)]


def draw_low_rank(length: int = 2048, heads: int = 4) -> list[torch.Tensor]:
    """Return q, k and v of rank 8: the low-rank executor loses nothing but rounding."""
    return [torch.randn(1, heads, length, 8) @ torch.randn(1, heads, 8, DIM) / 8 for _ in range(3)]


def exactly(tensors: list[torch.Tensor], **settings: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(item.double() for item in tensors), **settings)


def assert_right(output: torch.Tensor, tensors: list[torch.Tensor], **settings: Any) -> None:
    """Check an exact call by the one rule, with PyTorch's own softmax as the yardstick."""
    eager = attend(*tensors, backend="reference", **settings)
    wide = attend(*(item.double() for item in tensors), backend="reference", **settings)
    assert_matches(output, wide, eager, summands=tensors[1].shape[-2] + tensors[0].shape[-1])


def homes_of(name: str) -> list[ModuleType]:
    """Return each loaded module of the package that holds the function ``name``."""
    modules = [item for path, item in sys.modules.items() if path.split(".")[0] == "adaattn"]
    found = [item for item in modules if isinstance(vars(item).get(name), FunctionType)]
    assert len({vars(item)[name] for item in found}) == 1, f"{name}: expected one function"
    return found


def note_results(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Return the list that gets what each call of one of the package's functions returns."""
    found: list[Any] = []
    homes = homes_of(name)
    original = getattr(homes[0], name)

    def noting(*given: Any, **named: Any) -> Any:
        found.append(original(*given, **named))
        return found[-1]

    for module in homes:
        monkeypatch.setattr(module, name, noting)
    return found


class TestLogSumExp:
    """The log-sum-exp that a call returns beside its output."""

    @pytest.mark.parametrize("is_causal", [False, True], ids=["plain", "causal"])
    @pytest.mark.parametrize("kv_heads", [4, 2], ids=["equal", "grouped"])
    def test_its_gradient_reaches_query_and_key(self, kv_heads: int, is_causal: bool) -> None:
        """PyTorch's CPU kernel returns a log-sum-exp without a gradient, and so did we.

        A loss with it in it, a z-loss for one, trained on half of its gradient, unseen.
        """
        query, key, value = draw()
        leaves = [query, key[:, :kv_heads].clone(), value[:, :kv_heads].clone()]

        def gradients(dtype: torch.dtype, **settings: Any) -> tuple[torch.Tensor, ...]:
            tensors = [item.to(dtype).requires_grad_() for item in leaves]
            output, aux = attend(
                *tensors,
                is_causal=is_causal,
                enable_gqa=kv_heads < 4,
                return_aux=AuxRequest(lse=True),
                **settings,
            )
            return torch.autograd.grad(output.sum() + aux.lse.sum(), tensors)

        exact = gradients(torch.float64, backend="reference")
        eager = gradients(torch.float32, backend="reference")
        assert exact[0].any() and exact[1].any()
        for name, *items in zip("qkv", gradients(torch.float32), exact, eager, strict=True):
            assert_matches(*items, name=f"gradient of {name}", summands=2 * 32 + 16)


class TestGivenPlans:
    """A plan that the caller gives is held to what it promises."""

    @pytest.mark.parametrize("capability", ["sdpa.flash", "sdpa.math", "chunked"])
    def test_bf16_is_no_exact_way_of_computing_fp16(self, capability: str) -> None:
        """Both have 16 bits, and the check compared bits: bf16 lost three of fp16's digits."""
        tensors = [item.half() for item in draw()]
        group = HeadGroup(capability=capability, scheme=Scheme.of(Precision.BF16))
        with pytest.raises(UnsupportedError, match=r"bf16.* allows no error.* fp16"):
            attend(*tensors, plan=Plan(groups=(group,), num_heads=4))

    def test_one_made_for_other_tensors_is_audited_on_these(self, invented_cpu: None) -> None:
        """A low-rank plan of rank-deficient tensors was 90 % wrong on others, in silence."""
        made_for = draw_low_rank()
        plan = plan_attention(*made_for, policy=LOSSY, backend="low_rank").plan
        assert {group.method.kind for group in plan.groups} == {Method.LOW_RANK}
        assert plan.audit_rows > 0
        output, aux = attend(*made_for, plan=plan, return_aux=True)
        assert_within_budget(output, exactly(made_for), LOSSY.error_budget)
        assert aux.error_estimate is not None
        assert aux.error_estimate.amax() <= LOSSY.error_budget

        others = draw(length=2048, dim=DIM)
        try:
            output, aux = attend(*others, plan=plan, return_aux=True)
        except UnsupportedError as error:
            assert any("audit" in reason for reason in error.reasons)
        else:
            assert_within_budget(output, exactly(others), LOSSY.error_budget)
            assert aux.error_estimate is not None
            assert aux.error_estimate.amax() <= LOSSY.error_budget

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_one_compiles_for_lengths_that_change(self, fullgraph: bool) -> None:
        """The check of the scale asked ``math.isfinite`` about a symbolic number."""
        torch._dynamo.reset()
        plan = plan_attention(*draw(), is_causal=True).plan

        def planned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = attend(query, key, value, is_causal=True, plan=plan)
            return output

        compiled = torch.compile(planned, backend="eager", dynamic=True, fullgraph=fullgraph)
        for length in (32, 48, 7):
            tensors = draw(length)
            assert_right(compiled(*tensors), tensors, is_causal=True)
        torch._dynamo.reset()


def operators_of(call: Callable[[], object]) -> set[str]:
    """Return the names of the operators that a call runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
    return {event.name for event in profile.events()}


def test_a_named_kernel_runs_for_any_layout_even_after_a_contiguous_call() -> None:
    """A shortcut made by a contiguous call went to PyTorch's public function.

    That took the unfused path for a query whose last dimension is strided, under the name of
    the flash kernel.
    """
    query, key, value = draw(length=40)
    strided = query.mT.contiguous().mT
    assert strided.stride(-1) != 1 and query.stride(-1) == 1
    for first in (query, query, strided, strided):
        names = operators_of(lambda first=first: attend(first, key, value, backend="sdpa.flash"))
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
        assert "aten::_scaled_dot_product_attention_math" not in names
    output = attend(strided, key, value, backend="sdpa.flash")
    assert_right(output, [query, key, value])


class Failing(TorchDispatchMode):
    """Lets PyTorch's flash kernel fail on a CPU."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what the operator returns, if it is another one."""
        if func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu":
            raise self.error
        return func(*args, **(kwargs or {}))


EXPLICIT: dict[str, Any] = {"softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])}
"""What no bound call serves, so that the executor itself runs each time."""


class TestFailures:
    """What ``auto`` does where an executor fails. Each test has lengths that no other has."""

    @staticmethod
    def assert_steps_down(
        events: list[AttentionEvent], name: str, tensors: list[torch.Tensor], **settings: Any
    ) -> None:
        """Check two equal calls in which an executor fails: the second may know better."""
        for is_first in (True, False):
            events.clear()
            with Failing(FULL):
                output = attend(*tensors, **settings)
            (event,) = events
            assert event.fallbacks or not is_first
            assert event.decision.plan.groups[0].capability != name
            assert_right(output, tensors, **settings)

    @pytest.mark.parametrize("num_good", [0, 1, 2])
    def test_a_lack_of_memory_in_pytorchs_kernel_steps_down_on_every_call(
        self, events: list[AttentionEvent], num_good: int
    ) -> None:
        """The second of two equal calls took a shortcut that knew no other way, and raised."""
        tensors = draw(length=131 + num_good)
        for _ in range(num_good):
            attend(*tensors)
        assert [event.fallbacks for event in events] == [()] * num_good
        self.assert_steps_down(events, "sdpa.flash", tensors)

    @pytest.mark.parametrize("num_good", [0, 1, 2])
    def test_a_lack_of_memory_in_an_executor_steps_down_on_every_call(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent], num_good: int
    ) -> None:
        """A shortcut held the executor itself, and no step down was left behind it."""
        tensors = draw(length=141 + num_good)
        name = plan_attention(*tensors, **EXPLICIT).plan.groups[0].capability
        honest, is_full = registry._KNOWN[name].run, False

        def failing(*given: Any) -> Any:
            if is_full:
                raise FULL
            return honest(*given)

        known = registry._KNOWN[name]._replace(run=failing)
        monkeypatch.setitem(registry._KNOWN, name, known)
        for _ in range(num_good):
            attend(*tensors, **EXPLICIT)
        assert [event.fallbacks for event in events] == [()] * num_good
        is_full = True
        self.assert_steps_down(events, name, tensors, **EXPLICIT)

    @pytest.mark.parametrize("num_good", [0, 1, 2])
    def test_a_lack_of_memory_in_a_bound_call_steps_down_on_every_call(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent], num_good: int
    ) -> None:
        tensors = draw(length=161 + num_good)
        honest, is_full = written._attend, False

        def failing(*given: Any, **more: Any) -> Any:
            if is_full:
                raise FULL
            return honest(*given, **more)

        monkeypatch.setattr(written, "_attend", failing)
        for _ in range(num_good):
            attend(*tensors, softcap=5.0)
        is_full = True
        self.assert_steps_down(events, "chunked", tensors, softcap=5.0)

    def test_an_error_that_is_no_lack_of_memory_is_the_callers_to_see(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Any RuntimeError led to another executor: a bug in a kernel only made calls slower."""

        def broken(*given: Any) -> Any:
            raise RuntimeError("a bug in the executor")

        tensors = draw(length=151)
        for _ in range(2):
            kernel = Failing(RuntimeError("a bug in the kernel"))
            with kernel, pytest.raises(RuntimeError, match="a bug in the kernel"):
                attend(*tensors)
        name = plan_attention(*tensors, **EXPLICIT).plan.groups[0].capability
        known = registry._KNOWN[name]._replace(run=broken)
        monkeypatch.setitem(registry._KNOWN, name, known)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a bug in the executor"):
                attend(*tensors, **EXPLICIT)


def test_a_layer_whose_heads_may_lose_nothing_is_exact_and_never_measured(
    monkeypatch: pytest.MonkeyPatch, invented_cpu: None
) -> None:
    """Another layer's budget once had this one measured, and its NaN refused."""
    tensors = draw_low_rank()
    policy = Policy(error_budget=0.05, head_budgets=tuple((3, head, 0.0) for head in range(4)))
    measured = note_results(monkeypatch, "measure")
    _, aux = attend(*tensors, policy=policy, layer=2, return_aux=True)
    assert len(measured) == 1
    assert not aux.decision.plan.is_exact

    output, aux = attend(*tensors, policy=policy, layer=3, return_aux=True)
    assert len(measured) == 1
    assert aux.decision.plan.is_exact
    assert {group.scheme.inputs for group in aux.decision.plan.groups} == {Precision.FP32}
    assert_right(output, tensors)

    tensors[0][0, 1, 5, 0] = torch.nan
    output = attend(*tensors, policy=policy, layer=3)
    assert output[0, 1, 5].isnan().all()
    assert output.isnan().sum() == DIM
    assert len(measured) == 1


class TestAuditedRows:
    """Which rows an approximation is checked on."""

    @pytest.mark.parametrize("length", [256, 4096])
    @pytest.mark.parametrize("num_rows", [1, 7, 16, 32, 64])
    def test_there_are_exactly_as_many_as_were_asked_for(self, num_rows: int, length: int) -> None:
        """The number was rounded to a multiple of the blocks: 16 rows became 32, 7 became 4."""
        problem = make_problem(len_q=length, len_k=length, num_heads=1, head_dim=16)
        sample_rows = homes_of("sample_rows")[0].sample_rows
        rows = sample_rows(make_tensors(problem), problem, num_rows, seed=1).rows
        assert len(rows) == len(set(rows)) == num_rows
        assert all(0 <= row < length for row in rows)

    def test_tensors_that_share_a_massive_activation_are_audited_on_different_rows(
        self, monkeypatch: pytest.MonkeyPatch, invented_cpu: None
    ) -> None:
        """The rows followed from the largest element, in many models the same one in each call.

        All calls of a layer were then audited on the same few rows.
        """
        inputs = [draw_low_rank(), draw_low_rank()]
        for tensors in inputs:
            tensors[1][0, 0, 0, 0] = 500.0
        assert len({max(item.abs().max().item() for item in tensors) for tensors in inputs}) == 1
        samples = note_results(monkeypatch, "sample_rows")
        drawn = []
        for tensors in (*inputs, inputs[0]):
            samples.clear()
            attend(*tensors, policy=Policy(error_budget=0.99), backend="low_rank")
            drawn.append(samples[-1].rows)  # the others are those that planning measures
        first, second, again = drawn
        assert first and second
        assert first != second
        assert first == again


def test_it_can_take_the_place_of_pytorchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put there by hand it called itself, until Python gave up."""
    tensors = draw(length=39)
    original = F.scaled_dot_product_attention
    with monkeypatch.context() as context:
        context.setattr(F, "scaled_dot_product_attention", adaattn.scaled_dot_product_attention)
        outputs = [F.scaled_dot_product_attention(*tensors, is_causal=True) for _ in range(3)]
    assert F.scaled_dot_product_attention is original
    for output in outputs:
        assert_right(output, tensors, is_causal=True)
