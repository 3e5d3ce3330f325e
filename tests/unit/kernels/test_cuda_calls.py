"""Attention asked for by what it should be: fused, of a rank and a format, within a memory."""

from collections.abc import Callable

import pytest
import torch

import adaattn
from adaattn import AttentionEvent, Policy, record_events, use_policy
from adaattn.backends import Result
from adaattn.errors import (
    AdaAttnError,
    ArgumentError,
    ArgumentTypeError,
    DTypeError,
    PlanError,
    UnsupportedError,
)
from adaattn.kernels.cuda_utils import (
    adaptive_attention_kernel,
    fused_scaled_dot_product_attention,
    memory_efficient_attention,
)
from adaattn.spec import HardwareFacts, Method, Precision
from adaattn.testing import (
    assert_gradients_match,
    assert_within_budget,
    attention,
    cast_tensors,
    gradients_of,
    make_problem,
    make_tensors,
    term_sizes,
)

BALANCED = adaattn.PRESETS["balanced"].error_budget
Draw = Callable[..., tuple[torch.Tensor, ...]]
Check = Callable[..., None]


def served(run: Callable[[], object]) -> list[str]:
    """Return the executors that served a call."""
    events: list[AttentionEvent] = []
    with record_events(events.append):
        run()
    return [group.capability for event in events for group in event.decision.plan.groups]


class TestFused:
    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_it_is_attention(
        self, draw: Draw, check: Check, kv_heads: int, is_causal: bool
    ) -> None:
        inputs = draw(kv_heads=kv_heads)
        actual = fused_scaled_dot_product_attention(*inputs, is_causal=is_causal, scale=0.3)
        check(actual, inputs, is_causal=is_causal, scale=0.3)

    def test_a_fused_kernel_serves_it(self, draw: Draw) -> None:
        inputs = draw()
        assert served(lambda: fused_scaled_dot_product_attention(*inputs)) == ["sdpa.flash"]

    def test_masks_hide_and_bias(self, draw: Draw, check: Check) -> None:
        inputs = draw()
        for mask in (torch.rand(24, 24) > 0.3, torch.randn(24, 24)):
            check(fused_scaled_dot_product_attention(*inputs, mask), inputs, attn_mask=mask)

    def test_every_reason_is_listed_where_none_can(self, draw: Draw) -> None:
        with pytest.raises(UnsupportedError, match="backend 'flash' cannot serve") as caught:
            fused_scaled_dot_product_attention(*draw(), None, 0.5)
        told = "\n".join(caught.value.reasons)
        assert "sdpa.flash: it does not support dropout" in told
        assert "sdpa.cudnn: it runs on cuda, the tensors are on cpu" in told

    def test_auto_steps_down(self, draw: Draw) -> None:
        inputs = draw()
        found = served(
            lambda: fused_scaled_dot_product_attention(*inputs, None, 0.5, backend="auto")
        )
        assert found == ["sdpa.math"]

    def test_an_executor_may_be_named(self, draw: Draw) -> None:
        inputs = draw()
        named = {"backend": "reference"}
        assert served(lambda: fused_scaled_dot_product_attention(*inputs, **named)) == ["reference"]
        with pytest.raises(
            ArgumentError, match="backend: expected 'auto', 'flash', 'unfused', 'sdpa' or one of"
        ):
            fused_scaled_dot_product_attention(*inputs, backend="no_such_kernel")

    def test_gradients_are_those_of_the_public_call(self, draw: Draw) -> None:
        inputs = draw(grad=True)
        gradient = torch.randn_like(inputs[0])
        ours = fused_scaled_dot_product_attention(*inputs, is_causal=True)
        public = adaattn.scaled_dot_product_attention(*inputs, is_causal=True)
        for one, other in zip(
            torch.autograd.grad(ours, inputs, gradient),
            torch.autograd.grad(public, inputs, gradient),
            strict=True,
        ):
            assert torch.equal(one, other) and bool(one.any())


def planted(rank: int, shape: tuple[int, int, int, int] = (1, 2, 64, 32)) -> list[torch.Tensor]:
    """Return q, k and v that have a rank."""
    batch, heads, length, dim = shape
    return [
        torch.randn(batch, heads, length, rank) @ torch.randn(batch, heads, rank, dim) / rank**0.5
        for _ in range(3)
    ]


class TestAdaptive:
    def test_a_given_rank_is_exact_for_inputs_of_that_rank(self) -> None:
        inputs = planted(4)
        exact = adaattn.scaled_dot_product_attention(*(item.double() for item in inputs))

        output, decision = adaptive_attention_kernel(*inputs, rank=4, return_decision=True)

        assert_within_budget(output, exact, BALANCED)
        (group,) = decision.plan.groups
        assert (group.method.kind, group.method.rank, group.method.value_rank) == (
            Method.LOW_RANK,
            4,
            4,
        )
        assert decision.notes == (
            "the rank was given with the call; policy 'balanced' chose the format",
        )

    @pytest.mark.parametrize("policy", ["quality", "balanced", "speed"])
    @pytest.mark.parametrize("precision", [None, "fp32", "bf16"])
    def test_a_given_rank_claims_no_error_budget(self, policy: str, precision: str | None) -> None:
        """It claimed the policy's, which nothing holds against the rank."""
        events: list[AttentionEvent] = []
        with record_events(events.append):
            _, decision = adaptive_attention_kernel(
                *planted(4), rank=4, precision=precision, policy=policy, return_decision=True
            )
        assert (decision.policy, decision.plan.error_budget) == ("given", None)
        (entry,) = decision.trace
        assert entry.reason == "its rank was given by the caller, and no error budget is checked"
        assert decision.explain().startswith("policy given (no error budget)\n")
        assert decision.to_dict()["plan"]["error_budget"] is None
        assert events[-1].decision.plan == decision.plan
        assert "no error budget" in str(events[-1])

    def test_a_rank_below_the_inputs_loses_something(self) -> None:
        inputs = planted(8)
        exact = adaattn.scaled_dot_product_attention(*(item.double() for item in inputs))
        with pytest.raises(AssertionError, match="expected a relative error"):
            assert_within_budget(adaptive_attention_kernel(*inputs, rank=4), exact, BALANCED)

    def test_the_full_rank_is_exact(self, draw: Draw, check: Check) -> None:
        inputs = draw()
        output, decision = adaptive_attention_kernel(*inputs, rank=16, return_decision=True)
        assert decision.plan.is_exact
        check(output, inputs)

    def test_a_given_format_is_computed_in(self, draw: Draw, check: Check) -> None:
        inputs = draw()
        output, decision = adaptive_attention_kernel(
            *inputs, precision="bf16", return_decision=True
        )
        assert {group.scheme.inputs for group in decision.plan.groups} == {Precision.BF16}
        assert output.dtype == torch.float32
        check(output.bfloat16(), tuple(item.bfloat16() for item in inputs))

    @pytest.mark.parametrize("rank", [None, 4])
    def test_a_format_that_the_device_lacks_is_computed_in_and_that_is_said(
        self, draw: Draw, machine: Callable[..., HardwareFacts], rank: int | None
    ) -> None:
        machine("cpu_amx")
        _, decision = adaptive_attention_kernel(
            *draw(), rank=rank, precision="fp16", return_decision=True
        )
        assert {group.scheme.inputs for group in decision.plan.groups} == {Precision.FP16}
        assert decision.notes[-1].startswith("precision 'fp16' is computed in as asked, though")

    def test_rank_and_format_are_one_call(self) -> None:
        inputs = planted(4)
        output, decision = adaptive_attention_kernel(
            *inputs, rank=4, precision=Precision.BF16, is_causal=True, return_decision=True
        )
        assert decision.plan.groups[0].label == "low_rank/bf16 rank=4,4"
        exact = adaattn.scaled_dot_product_attention(
            *(item.double() for item in inputs), is_causal=True
        )
        # Four roundings of bf16, the package's own safety: planning/plan.py.
        assert_within_budget(output, exact, 4 * Precision.BF16.unit_roundoff)

    def test_what_is_none_is_the_policys(self, draw: Draw) -> None:
        inputs = draw()
        output, decision = adaptive_attention_kernel(
            *inputs, policy="quality", return_decision=True
        )
        assert decision.policy == "quality" and decision.plan.is_exact
        assert torch.equal(output, adaattn.scaled_dot_product_attention(*inputs))
        with use_policy("speed"):
            _, decision = adaptive_attention_kernel(*inputs, policy=None, return_decision=True)
        assert decision.policy == "speed"

    def test_the_policy_gives_each_head_its_format_beside_a_given_rank(
        self, machine: Callable[..., HardwareFacts]
    ) -> None:
        """A lower one where it pays, and the input's own on a machine without lower formats."""
        inputs = planted(4, (1, 8, 1024, 64))
        for name, expected in (("cpu", Precision.FP32), ("cpu_amx", Precision.BF16)):
            machine(name)
            _, decision = adaptive_attention_kernel(*inputs, rank=4, return_decision=True)
            assert {group.scheme.inputs for group in decision.plan.groups} == {expected}
            assert {group.method.rank for group in decision.plan.groups} == {4}

    def test_a_rank_asked_for_by_name_runs_under_a_budget_of_0_too(self) -> None:
        """It is the caller who approximates; nothing is measured, so nothing is judged."""
        inputs, none = planted(4), Policy(error_budget=0.0)
        output, decision = adaptive_attention_kernel(
            *inputs, rank=4, policy=none, return_decision=True
        )
        assert decision.plan.error_budget is None and not decision.plan.is_exact
        assert torch.equal(output, adaptive_attention_kernel(*inputs, rank=4))

    def test_without_the_decision_the_output_comes_alone(self, draw: Draw) -> None:
        inputs = draw(kv_heads=2)
        for keywords in ({}, {"rank": 4}, {"rank": 16}, {"precision": "fp32"}):
            output = adaptive_attention_kernel(*inputs, **keywords)
            assert isinstance(output, torch.Tensor) and output.shape == inputs[0].shape

    def test_gradients_flow_through_the_projection(self) -> None:
        inputs = [item.requires_grad_() for item in planted(4)]
        output = adaptive_attention_kernel(*inputs, rank=4)
        for gradient in torch.autograd.grad(output.sum(), inputs):
            assert bool(torch.isfinite(gradient).all()) and bool(gradient.any())

    @pytest.mark.parametrize(
        ("keywords", "kind", "message"),
        [
            ({"rank": 17}, ArgumentError, "rank: expected 1 to the head dimension, 16, got 17"),
            ({"rank": 0}, ArgumentError, "rank: expected 1 to the head dimension, 16, got 0"),
            ({"rank": 2.5}, ArgumentTypeError, "rank: expected None or an integer, got 2.5"),
            ({"rank": True}, ArgumentTypeError, "rank: expected None or an integer, got True"),
            ({"precision": "fp12"}, ArgumentError, "precision: expected one of .* got 'fp12'"),
            ({"precision": "auto"}, ArgumentError, "precision: expected one of .* got 'auto'"),
            ({"precision": 16}, ArgumentTypeError, "precision: expected a Precision or 'fp32'"),
            ({"precision": "fp8"}, UnsupportedError, "precision 'fp8_e4m3' cannot serve"),
            ({"precision": Precision.INT4}, UnsupportedError, "precision 'int4' cannot serve"),
            ({"rank": 4, "window": (3, 0)}, UnsupportedError, "not support a sliding window"),
            ({"casual": True}, ArgumentTypeError, "keyword arguments: expected some of"),
        ],
    )
    def test_wrong_arguments_are_refused(
        self, draw: Draw, keywords: dict[str, object], kind: type[AdaAttnError], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            adaptive_attention_kernel(*draw(), **keywords)

    def test_a_cast_does_not_hide_inputs_of_several_dtypes(self, draw: Draw) -> None:
        query, key, value = draw()
        with pytest.raises(DTypeError, match="query, key and value: expected one dtype"):
            adaptive_attention_kernel(query, key.double(), value, precision="bf16")


class TestMemoryEfficient:
    @pytest.mark.parametrize("budget", [None, 1 << 16])
    def test_it_is_attention(self, draw: Draw, check: Check, budget: int | None) -> None:
        inputs = draw((1, 4, 100, 16), kv_heads=2)
        output = memory_efficient_attention(*inputs, is_causal=True, memory_budget_bytes=budget)
        check(output, inputs, is_causal=True)

    def test_its_arguments_are_those_of_xformers(self, draw: Draw, check: Check) -> None:
        inputs = draw()
        bias = torch.randn(24, 24)
        check(
            memory_efficient_attention(*inputs, bias, 0.0, 0.5), inputs, attn_mask=bias, scale=0.5
        )

    def test_a_smaller_budget_takes_smaller_chunks(self, draw: Draw) -> None:
        inputs = draw((1, 4, 512, 16))
        rows: list[int] = []
        for budget in (1 << 18, 1 << 22):
            events: list[AttentionEvent] = []
            with record_events(events.append):
                memory_efficient_attention(*inputs, memory_budget_bytes=budget)
            (event,) = events
            (group,) = event.decision.plan.groups
            assert group.capability == "chunked"
            assert event.workspace_bytes <= budget
            rows.append(group.launch.chunk_rows)
        assert 0 < rows[0] < rows[1]

    def test_gradients_are_those_of_the_definition_over_several_chunks(self) -> None:
        problem = make_problem(len_q=50, is_causal=True, requires_grad=True)
        tensors = make_tensors(problem)
        inputs = (tensors.query, tensors.key, tensors.value)
        events: list[AttentionEvent] = []
        with record_events(events.append):
            output = memory_efficient_attention(*inputs, is_causal=True, memory_budget_bytes=20000)
        wide = cast_tensors(tensors, torch.float64)

        assert events[0].decision.plan.groups[0].launch.chunk_rows == 16
        assert_gradients_match(
            gradients_of(Result(output=output), tensors),
            gradients_of(attention(wide, problem), wide),
            gradients_of(attention(tensors, problem), tensors),
            sizes=term_sizes(tensors, problem),
            problem=problem,
        )

    def test_what_does_not_fit_is_an_error(self, draw: Draw) -> None:
        with pytest.raises(PlanError, match="no executor can serve this call"):
            memory_efficient_attention(*draw(), memory_budget_bytes=1)
        with pytest.raises(
            ArgumentError, match="memory_budget_bytes: expected an integer of at least 0"
        ):
            memory_efficient_attention(*draw(), memory_budget_bytes=-1)
        with pytest.raises(ArgumentTypeError, match="memory_budget_bytes: expected an integer"):
            memory_efficient_attention(*draw(), memory_budget_bytes=0.5)  # type: ignore[arg-type]
