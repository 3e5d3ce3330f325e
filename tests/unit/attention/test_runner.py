"""A runner under PyTorch's machinery: plans, compilation, checkpoints, transforms, formats."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import adaattn
from adaattn import AttentionEvent, AttentionProblem, HeadGroup, Policy
from adaattn import scaled_dot_product_attention as attend
from adaattn.attention.precision_mode import MODES
from adaattn.attention.runner import Runner
from adaattn.backends import registry
from adaattn.backends.interface import Result, Tensors
from adaattn.errors import ArgumentError, PolicyError, UnsupportedError
from adaattn.spec import HardwareFacts, Plan, Precision
from adaattn.testing import assert_matches, assert_within_budget, fake_facts

HEADS, LENGTH, DIM = 2, 64, 16
LOSSY = Policy(
    name="lossy", error_budget=0.05, audit_rows=8, precisions=(Precision.FP32, Precision.BF16)
)


def slow_machine(*more: Precision) -> HardwareFacts:
    """Return a machine so slow that a lower format pays for its measurement at any length."""
    facts = fake_facts("cpu_amx")
    rates = dict(facts.rates.flops)
    rates |= {precision: rates[Precision.BF16] for precision in more}
    slower = tuple((precision, rate / 1e3) for precision, rate in rates.items())
    return replace(
        facts,
        instructions=(*facts.instructions, *more),
        rates=replace(facts.rates, flops=slower, launch_s=0.0),
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test see a machine on which the planner takes bf16 for the lossy policy."""
    facts = slow_machine()
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)


def draw(*, grad: bool = False, length: int = LENGTH) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, length, DIM).requires_grad_(grad) for _ in range(3)]


def squared(runner: Runner, **semantics: Any) -> Callable[..., torch.Tensor]:
    """Return a function of q, k and v with work behind the attention call."""
    return lambda *tensors: runner.run(*tensors, **semantics)[0].square()


def gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients that one backward pass leaves in leaves."""
    for tensor in tensors:
        tensor.grad = None
    output.sum().backward()
    return [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]


def planned_gradients(
    plan: Plan, tensors: list[torch.Tensor], **semantics: Any
) -> list[torch.Tensor]:
    """Return the gradients of a plan, without a runner and without a checkpoint."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return gradients(attend(*leaves, plan=plan, **semantics).square(), leaves)


def exact_gradients(tensors: list[torch.Tensor], backend: str = "auto") -> list[torch.Tensor]:
    """Return the gradients of exact attention in the dtype of the tensors."""
    return planned_gradients(adaattn.plan_attention(*tensors, backend=backend).plan, tensors)


def precisions(event: AttentionEvent) -> set[Precision]:
    return {group.scheme.inputs for group in event.decision.plan.groups}


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, factor: float) -> None:
    """Make an executor return results that are wrong in bf16."""
    honest = registry.load(name)

    def wrong(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        result = honest(tensors, problem, group)
        if group.scheme.inputs is not Precision.BF16:
            return result
        return replace(result, output=result.output * factor)

    known = registry._KNOWN[name]._replace(run=wrong)
    monkeypatch.setitem(registry._KNOWN, name, known)


class TestCalls:
    """What a call returns."""

    @pytest.mark.parametrize(
        "semantics", [{}, {"is_causal": True}, {"window": (5, 3)}, {"softcap": 2.0}], ids=str
    )
    def test_it_is_what_the_public_call_returns(self, semantics: dict[str, Any]) -> None:
        tensors = draw()
        output, weights = Runner("quality").run(*tensors, **semantics)
        assert weights is None
        assert torch.equal(output, attend(*tensors, **semantics))

    @pytest.mark.parametrize("policy", ["quality", LOSSY])
    def test_weights_are_given_where_they_are_wanted(self, policy: Policy | str) -> None:
        tensors = draw()
        output, weights = Runner(policy).run(*tensors, need_weights=True)
        wide = [tensor.double() for tensor in tensors]
        exact = torch.softmax(wide[0] @ wide[1].mT / DIM**0.5, -1)
        eager = torch.softmax(tensors[0] @ tensors[1].mT / DIM**0.5, -1)
        assert weights is not None
        assert_within_budget(weights, exact, LOSSY.error_budget)
        assert_within_budget(output, exact @ wide[2], LOSSY.error_budget)
        if policy == "quality":
            assert_matches(weights, exact, eager, summands=DIM + LENGTH)

    def test_without_a_policy_the_ambient_one_is_followed(
        self, events: list[AttentionEvent]
    ) -> None:
        runner, tensors = Runner(), draw()
        runner.run(*tensors)
        with adaattn.use_policy(LOSSY):
            runner.run(*tensors)
        runner.run(*tensors)
        assert [event.decision.policy for event in events] == ["quality", "lossy", "quality"]
        assert [precisions(event) for event in events] == [
            {Precision.FP32},
            {Precision.BF16},
            {Precision.FP32},
        ]

    def test_events_of_a_module_reach_its_statistics_and_every_sink(
        self, events: list[AttentionEvent]
    ) -> None:
        runner = Runner(LOSSY, layer=7)
        for _ in range(3):
            runner.run(*draw())
        assert [event.tag for event in events] == ["layer7"] * 3
        assert runner.statistics["calls"] == 3
        assert set(runner.statistics["per_head"]) == {"layer7 head 0", "layer7 head 1"}

    def test_a_layers_calibrated_budgets_are_its_own(self, events: list[AttentionEvent]) -> None:
        policy = replace(LOSSY, head_budgets=((3, 0, 0.0), (3, 1, 0.0)))
        for layer in (3, 4):
            Runner(policy, layer=layer).run(*draw())
        assert [precisions(event) for event in events] == [{Precision.FP32}, {Precision.BF16}]

    @pytest.mark.parametrize("policy", ["quality", LOSSY])
    @pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 2, 0, 8), (2, 0, 4, 8)])
    def test_an_empty_call_is_empty(
        self, policy: Policy | str, shape: tuple[int, int, int, int]
    ) -> None:
        """No heads once ended in an IndexError under an error budget."""
        empty = torch.randn(shape)
        assert Runner(policy).run(empty, empty, empty)[0].shape == shape

    @pytest.mark.parametrize("policy", ["quality", LOSSY])
    def test_wrong_shapes_are_told_as_the_public_call_tells_them(
        self, policy: Policy | str
    ) -> None:
        query, key, value = draw()
        with pytest.raises(adaattn.errors.ShapeError, match="head dimension"):
            Runner(policy).run(query, key[..., :8], value)

    def test_a_backend_by_name_serves_or_says_why_not(self, events: list[AttentionEvent]) -> None:
        Runner("quality", backend="chunked").run(*draw())
        assert [g.capability for g in events[0].decision.plan.groups] == ["chunked"]
        with pytest.raises(UnsupportedError, match="backend 'low_rank'"):
            Runner("quality", backend="low_rank").run(*draw())

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"policy": "fast"}, PolicyError, "policy: expected 'quality'"),
            ({"precision_mode": "fp4"}, ArgumentError, "precision_mode: expected one of 'auto'"),
            ({"measure_every": 0}, ArgumentError, "measure_every: expected an integer"),
            ({"momentum": 1}, ArgumentError, r"momentum: expected a number in \[0, 1\)"),
        ],
    )
    def test_settings_that_make_no_sense_are_refused(
        self, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            Runner(**options)


class TestMemory:
    """What calls teach the next ones."""

    @pytest.mark.parametrize("measure_every", [1, 3])
    def test_numbers_are_measured_once_in_so_many_calls(
        self, events: list[AttentionEvent], measure_every: int
    ) -> None:
        runner = Runner(LOSSY, measure_every=measure_every)
        for _ in range(6):
            runner.run(*draw())
        measured = [event.stats is not None for event in events]
        assert measured == [call % measure_every == 0 for call in range(6)]
        assert runner.statistics["measured_calls"] == sum(measured)

    def test_a_head_that_an_audit_repaired_is_exact_until_measured_anew(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        """It stayed exact for ever: an average with its infinite error is infinite."""
        runner = Runner(LOSSY, measure_every=3)
        with monkeypatch.context() as patch:
            spoil(patch, "sdpa.flash", 1.2)
            runner.run(*draw())
        for _ in range(5):
            runner.run(*draw())
        assert events[0].repaired_heads == (0, 1)
        assert [event.stats is not None for event in events] == [True, False, False] * 2
        assert [precisions(event) for event in events] == [
            {Precision.BF16},
            *[{Precision.FP32}] * 2,
            *[{Precision.BF16}] * 3,
        ]

    def test_a_decision_asked_for_is_that_of_the_next_call(
        self, monkeypatch: pytest.MonkeyPatch, events: list[AttentionEvent]
    ) -> None:
        """It did not know what the calls had taught."""
        runner, tensors = Runner(LOSSY), draw()
        assert runner.decision(*tensors).plan.groups[0].scheme.inputs is Precision.BF16
        with monkeypatch.context() as patch:
            spoil(patch, "sdpa.flash", 1.2)
            runner.run(*tensors)
        told = runner.decision(*tensors)
        runner.run(*tensors)
        assert told.plan == events[-1].decision.plan

    @pytest.mark.parametrize("mode", ["auto", "bf16", "fp16"])
    def test_a_decision_asked_for_is_in_the_precision_mode(
        self, mode: str, events: list[AttentionEvent]
    ) -> None:
        """It was in the tensors' own format, whatever the mode."""
        runner, tensors = Runner("quality", precision_mode=mode), draw()
        runner.run(*tensors)
        told = runner.decision(*tensors)
        assert told.plan == events[-1].decision.plan
        assert told.plan.groups[0].scheme.inputs is (MODES[mode] or Precision.FP32)

    def test_a_reset_forgets_statistics_and_memory(self, events: list[AttentionEvent]) -> None:
        runner = Runner(LOSSY)
        runner.run(*draw())
        runner.reset()
        assert runner.statistics["calls"] == 0
        runner.run(*draw())
        assert [event.stats is not None for event in events] == [True, True]

    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
    def test_a_copy_counts_on_and_measures_for_itself(
        self, events: list[AttentionEvent], how: str
    ) -> None:
        """What was learnt is of calls in this process: a copy may run anywhere, on anything."""
        runner = Runner(LOSSY, layer=2, measure_every=4)
        runner.run(*draw())
        if how == "deepcopy":
            copied = copy.deepcopy(runner)
        elif how == "pickle":
            copied = pickle.loads(pickle.dumps(runner))
        else:
            buffer = io.BytesIO()
            torch.save(runner, buffer)
            buffer.seek(0)
            copied = torch.load(buffer, weights_only=False)
        copied.run(*draw())
        runner.run(*draw())
        assert [event.stats is not None for event in events] == [True, True, False]
        assert (runner.statistics["calls"], copied.statistics["calls"]) == (2, 2)


class TestPlans:
    """A plan for every call."""

    def test_it_is_followed_and_counted(self, events: list[AttentionEvent]) -> None:
        tensors = draw()
        runner = Runner(LOSSY)
        runner.plan = adaattn.plan_attention(*tensors, backend="chunked").plan
        output, _ = runner.run(*tensors)
        assert torch.equal(output, attend(*tensors, backend="chunked"))
        assert runner.statistics["calls_by_executor"] == {"chunked": 1}
        assert events[0].stats is None

    def test_a_plan_for_other_heads_is_refused(self) -> None:
        runner = Runner()
        runner.plan = adaattn.plan_attention(*draw()).plan
        with pytest.raises(ArgumentError, match="plan: expected one for 3 heads, got one for 2"):
            runner.run(*(torch.randn(1, 3, 8, 4) for _ in range(3)))

    def test_it_compiles_into_one_graph(self) -> None:
        torch._dynamo.reset()
        tensors = draw(grad=True)
        runner = Runner(LOSSY)
        runner.plan = adaattn.plan_attention(*tensors, is_causal=True).plan
        compiled = torch.compile(squared(runner, is_causal=True), backend="eager", fullgraph=True)
        output = compiled(*tensors)
        assert torch.equal(output, squared(runner, is_causal=True)(*tensors))
        found = gradients(output, tensors)
        wanted = planned_gradients(runner.plan, tensors, is_causal=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert runner.statistics["calls"] == 1

    @pytest.mark.parametrize("policy", ["quality", LOSSY])
    def test_without_one_a_whole_graph_is_exact_and_counts_nothing(
        self, policy: Policy | str
    ) -> None:
        """A graph holds no measurement; it broke at the call, or was refused."""
        torch._dynamo.reset()
        tensors = draw(grad=True)
        runner = Runner(policy)
        compiled = torch.compile(squared(runner), backend="eager", fullgraph=True)
        output = compiled(*tensors)
        wide = [tensor.detach().double() for tensor in tensors]
        assert_matches(
            output,
            F.scaled_dot_product_attention(*wide).square(),
            F.scaled_dot_product_attention(*tensors).square(),
            summands=LENGTH + DIM,
        )
        for found, expected, yardstick in zip(
            gradients(output, tensors),
            exact_gradients([tensor.requires_grad_() for tensor in wide]),
            exact_gradients(tensors),
            strict=True,
        ):
            assert_matches(found, expected, yardstick, summands=LENGTH + DIM)
        assert runner.statistics["calls"] == 0


class TestCheckpoints:
    """A forward pass that backward runs again follows the plan that it had."""

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("policy", ["quality", LOSSY])
    def test_gradients_are_those_without_a_checkpoint(
        self, events: list[AttentionEvent], policy: Policy | str, use_reentrant: bool
    ) -> None:
        tensors = draw(grad=True)
        runner = Runner(policy)
        output = checkpoint(squared(runner), *tensors, use_reentrant=use_reentrant)
        found = gradients(output, tensors)
        wanted = planned_gradients(events[0].decision.plan, tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert [event.decision.plan.groups for event in events[:2]] == [
            events[0].decision.plan.groups
        ] * 2

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("policy", ["quality", LOSSY])
    @pytest.mark.parametrize("planned", [False, True])
    def test_a_recomputation_is_counted_apart(
        self, policy: Policy | str, planned: bool, use_reentrant: bool
    ) -> None:
        """With a plan of its own a module once counted each recomputation as a call."""
        tensors = draw(grad=True)
        runner = Runner(policy)
        if planned:
            runner.plan = adaattn.plan_attention(*tensors).plan
        output = checkpoint(squared(runner), *tensors, use_reentrant=use_reentrant)
        output.sum().backward()
        statistics = runner.statistics
        assert (statistics["calls"], statistics["recomputed_calls"]) == (1, 1)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "backwards"])
    def test_each_follows_its_own_plan_although_the_memory_changed(
        self,
        monkeypatch: pytest.MonkeyPatch,
        events: list[AttentionEvent],
        order: tuple[int, int],
        use_reentrant: bool,
    ) -> None:
        """The first forward pass is in bf16; then an audit bars it, and the second is in fp32."""
        runner = Runner(LOSSY)
        first, second = draw(grad=True), draw(grad=True)
        outputs = [checkpoint(squared(runner), *first, use_reentrant=use_reentrant)]
        with monkeypatch.context() as patch, torch.set_grad_enabled(not use_reentrant):
            spoil(patch, "sdpa.flash", 1.2)
            runner.run(*draw(grad=True))
        outputs.append(checkpoint(squared(runner), *second, use_reentrant=use_reentrant))
        plans = [events[0].decision.plan, events[2].decision.plan]
        assert [precisions(events[place]) for place in (0, 2)] == [
            {Precision.BF16},
            {Precision.FP32},
        ]
        inputs = (first, second)
        for place in order:
            found = gradients(outputs[place], inputs[place])
            wanted = planned_gradients(plans[place], inputs[place])
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert runner.statistics["recomputed_calls"] == 2
        assert runner.statistics["calls"] == 3

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 2, 0, 8), (2, 0, 4, 8)])
    def test_an_empty_call_is_recomputed_too(
        self, shape: tuple[int, int, int, int], use_reentrant: bool
    ) -> None:
        """Its fingerprint once looked for a last row that there is not."""
        tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        output = checkpoint(squared(Runner(LOSSY)), *tensors, use_reentrant=use_reentrant)
        assert all(torch.equal(g, torch.zeros(shape)) for g in gradients(output, tensors))

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_calls_that_nothing_was_measured_on_are_recomputed_alike(
        self, events: list[AttentionEvent], use_reentrant: bool
    ) -> None:
        """A decode step is decided by its static facts, whatever was learnt of other problems."""
        runner = Runner(LOSSY)
        query, key, value = draw(grad=True)
        runner.run(query, key, value)
        step = query.detach()[:, :, -1:].clone().requires_grad_()
        tensors = [step, key, value]
        output = checkpoint(squared(runner), *tensors, use_reentrant=use_reentrant)
        found = gradients(output, tensors)
        wanted = planned_gradients(events[1].decision.plan, tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert [event.stats is not None for event in events[:3]] == [True, False, False]

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_a_forward_pass_that_was_forgotten_is_measured_again_and_teaches_nothing(
        self, events: list[AttentionEvent], use_reentrant: bool
    ) -> None:
        runner = Runner(LOSSY, measure_every=100)
        tensors = draw(grad=True)
        output = checkpoint(squared(runner), *tensors, use_reentrant=use_reentrant)
        for _ in range(64):
            runner.run(*draw(grad=not use_reentrant))
        calls = runner.statistics["calls"]
        found = gradients(output, tensors)
        wanted = planned_gradients(events[0].decision.plan, tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert runner.statistics["calls"] == calls == 65
        assert runner.statistics["recomputed_calls"] == 1

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_a_repair_is_repeated(
        self,
        monkeypatch: pytest.MonkeyPatch,
        events: list[AttentionEvent],
        use_reentrant: bool,
    ) -> None:
        spoil(monkeypatch, "sdpa.flash", 1.2)
        tensors = draw(grad=True)
        output = checkpoint(squared(Runner(LOSSY)), *tensors, use_reentrant=use_reentrant)
        found = gradients(output, tensors)
        assert events[0].repaired_heads == events[1].repaired_heads == (0, 1)
        wide = exact_gradients([tensor.double() for tensor in tensors], "chunked")
        eager = exact_gradients(tensors, "chunked")
        for actual, exact, yardstick in zip(found, wide, eager, strict=True):
            assert_matches(actual, exact, yardstick, summands=LENGTH + DIM)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_calls_that_differ_in_their_meaning_alone_are_told_apart(
        self, events: list[AttentionEvent], use_reentrant: bool
    ) -> None:
        """Equal tensors with another mask once got the plan of the newest call."""
        tensors = draw(grad=True)
        mask = torch.randn(LENGTH, LENGTH)
        runner = Runner(LOSSY)
        settings: list[dict[str, Any]] = [{"attn_mask": mask}, {}]
        outputs = [
            checkpoint(squared(runner, **meaning), *tensors, use_reentrant=use_reentrant)
            for meaning in settings
        ]
        plans = [event.decision.plan for event in events]
        assert [precisions(event) for event in events] == [{Precision.FP32}, {Precision.BF16}]
        for output, plan, meaning in zip(outputs, plans, settings, strict=True):
            found = gradients(output, tensors)
            wanted = planned_gradients(plan, tensors, **meaning)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_a_format_that_training_may_not_use_is_not_taken(
        self,
        monkeypatch: pytest.MonkeyPatch,
        events: list[AttentionEvent],
        use_reentrant: bool,
    ) -> None:
        """A reentrant checkpoint runs its forward pass without gradients; fp16 was taken then."""
        facts = slow_machine(Precision.FP16)
        monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
        policy = replace(LOSSY, precisions=(Precision.FP16,))
        tensors = draw(grad=True)
        output = checkpoint(squared(Runner(policy)), *tensors, use_reentrant=use_reentrant)
        output.sum().backward()
        assert [precisions(event) for event in events] == [{Precision.FP32}] * 2


class TestTransforms:
    """Inside a transform of torch.func nothing can be measured."""

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    @pytest.mark.parametrize("policy", ["quality", LOSSY])
    def test_vmap_takes_the_exact_path(
        self, events: list[AttentionEvent], policy: Policy | str
    ) -> None:
        tensors = [torch.randn(3, 1, HEADS, LENGTH, DIM) for _ in range(3)]
        runner = Runner(policy)
        output = torch.func.vmap(lambda *each: runner.run(*each)[0])(*tensors)
        eager = torch.stack([attend(*each) for each in zip(*tensors, strict=True)])
        exact = torch.stack([attend(*(t.double() for t in e)) for e in zip(*tensors, strict=True)])
        assert_matches(output, exact, eager, summands=LENGTH + DIM)
        assert runner.statistics["share_by_precision"] == {"fp32": 1.0}
        assert runner.statistics["measured_calls"] == 0
        if policy is LOSSY:
            assert "torch.func transform" in events[0].decision.notes[-1]

    def test_a_gradient_taken_by_a_transform_is_the_exact_one(self) -> None:
        tensors = draw()
        loss = lambda *each: Runner(LOSSY).run(*each)[0].square().sum()  # noqa: E731
        found = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
        eager = exact_gradients(tensors)
        exact = exact_gradients([tensor.double() for tensor in tensors])
        for actual, reference, yardstick in zip(found, exact, eager, strict=True):
            assert_matches(actual, reference, yardstick, summands=LENGTH + DIM)


class TestFormats:
    """Precision modes, and what is said where a device lacks one."""

    def test_a_mode_that_the_device_has_is_used(self, events: list[AttentionEvent]) -> None:
        tensors = draw()
        runner = Runner("quality", precision_mode="bf16")
        output, _ = runner.run(*tensors)
        assert output.dtype is torch.float32
        assert torch.equal(output, attend(*(t.bfloat16() for t in tensors)).float())
        assert runner.statistics["share_by_precision"] == {"bf16": 1.0}
        assert runner.statistics["precision_notes"] == {}

    def test_a_mode_that_it_lacks_is_used_and_noted(self) -> None:
        tensors = draw()
        runner = Runner("quality", precision_mode="fp16")
        for _ in range(2):
            output, _ = runner.run(*tensors)
            assert torch.equal(output, attend(*(t.half() for t in tensors)).float())
        assert runner.statistics["share_by_precision"] == {"fp16": 1.0}
        ((note, count),) = runner.statistics["precision_notes"].items()
        assert count == 2
        assert note.startswith("precision_mode 'fp16' is computed in as asked, though Intel Xeon")
        assert note.endswith("8480+ computes fp64, fp32, bf16, int8 natively, not it")

    def test_a_mode_in_which_nothing_computes_is_refused_by_each_call(self) -> None:
        runner = Runner("quality", precision_mode="fp8")
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="precision_mode 'fp8' cannot serve"):
                runner.run(*draw())
        assert runner.statistics["calls"] == 0

    def test_a_mode_and_a_budget_go_together(self, events: list[AttentionEvent]) -> None:
        runner = Runner(LOSSY, precision_mode="bf16")
        runner.run(*draw())
        assert events[0].problem.precision is Precision.BF16
        assert events[0].decision.plan.is_exact

    def test_weights_come_in_the_format_of_the_mode(self) -> None:
        output, weights = Runner("quality", precision_mode="bf16").run(*draw(), need_weights=True)
        assert weights is not None
        assert output.dtype is torch.float32
        assert weights.shape == (1, HEADS, LENGTH, LENGTH)
