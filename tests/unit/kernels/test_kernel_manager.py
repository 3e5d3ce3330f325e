"""The cached view of planning."""

from collections.abc import Callable

import pytest
import torch

from adaattn import plan_attention, scaled_dot_product_attention
from adaattn.backends import capabilities
from adaattn.errors import ArgumentTypeError, PolicyError
from adaattn.kernels.cuda_utils import AttentionKernelManager
from adaattn.spec import Aux, HardwareFacts, Policy, Precision
from adaattn.testing import make_problem

Draw = Callable[..., tuple[torch.Tensor, ...]]


def test_a_selection_is_the_decision_of_the_public_call(draw: Draw) -> None:
    inputs = draw(kv_heads=2)
    manager = AttentionKernelManager("cpu", policy="quality")

    choice = manager.select(*inputs, is_causal=True, enable_gqa=True)

    decision = plan_attention(*inputs, is_causal=True, enable_gqa=True)
    assert choice.decision == decision
    assert choice.names == (choice.name,) == (decision.plan.groups[0].capability,)
    assert choice.is_fused
    assert choice.reasons[0].startswith("sdpa.flash/fp32: taken for all heads")
    assert len(choice.reasons) == len(decision.trace)
    output = scaled_dot_product_attention(
        *inputs, is_causal=True, enable_gqa=True, plan=choice.decision.plan
    )
    assert output.shape == inputs[0].shape


def test_equal_calls_are_decided_once(draw: Draw) -> None:
    manager = AttentionKernelManager("cpu", policy="quality")
    first, second = draw(), draw()

    choice = manager.select(*first)
    assert manager.cache_info()[:2] == (0, 1)
    assert manager.select(*second) is choice
    assert manager.cache_info()[:2] == (1, 1)
    manager.select(*first, is_causal=True)
    assert manager.cache_info() == (1, 2, manager.cache_info().maxsize, 2)
    manager.cache_clear()
    assert manager.cache_info()[:2] == (0, 0)


def test_a_policy_that_may_lose_measures_the_tensors_each_time(draw: Draw) -> None:
    manager = AttentionKernelManager("cpu", policy="balanced")
    manager.select(*draw())
    manager.select(*draw())
    assert manager.cache_info().currsize == 0


def test_the_ambient_policy_rules_where_none_is_given(draw: Draw) -> None:
    import adaattn

    manager = AttentionKernelManager("cpu")
    assert manager.select(*draw()).decision.policy == "quality"
    with adaattn.use_policy("speed"):
        assert manager.select(*draw()).decision.policy == "speed"


def test_a_problem_is_enough_for_a_card_that_is_not_here(
    machine: Callable[..., HardwareFacts],
) -> None:
    machine("h200")
    manager = AttentionKernelManager("cpu")
    problem = make_problem(
        device_type="cuda", precision=Precision.BF16, len_q=2048, head_dim=128, num_heads=16
    )

    choice = manager.select(problem)

    assert choice.is_fused
    assert choice.name == "sdpa.cudnn"
    assert manager.select(problem) is choice


def test_what_no_fused_kernel_can_do_names_the_reason() -> None:
    problem = make_problem(aux=Aux.WEIGHTS)
    choice = AttentionKernelManager("cpu", policy="quality").select(problem)

    assert not choice.is_fused
    assert any(
        reason.startswith("sdpa.flash/fp32: ") and "weights as an output" in reason
        for reason in choice.reasons
    )


def test_every_executor_is_listed_with_what_stands_against_it(
    machine: Callable[..., HardwareFacts],
) -> None:
    machine("cpu")
    listed = {item.name: item for item in AttentionKernelManager("cpu").kernels()}

    assert list(listed) == [item.name for item in capabilities()]
    assert listed["sdpa.flash"].is_available and listed["sdpa.flash"].is_fused
    assert listed["reference"].is_available and not listed["reference"].is_fused
    assert listed["low_rank"].is_available
    assert listed["sdpa.cudnn"].refusals == ("it runs on cuda, the tensors are on cpu",)


def test_an_old_card_lacks_the_kernels_of_a_new_one(
    machine: Callable[..., HardwareFacts],
) -> None:
    machine("v100")
    listed = {item.name: item for item in AttentionKernelManager("cpu").kernels()}

    assert listed["sdpa.efficient"].is_available
    assert listed["sdpa.flash2"].refusals == (
        "it needs compute capability 8.0, the device has 7.0",
    )


def test_kernels_are_judged_for_a_problem_too() -> None:
    listed = AttentionKernelManager("cpu").kernels(make_problem(softcap=20.0))
    refused = {item.name: item.refusals for item in listed}
    assert refused["sdpa.flash"] == ("it does not support softcap",)
    assert refused["chunked"] == ()


def test_wrong_arguments_are_refused(draw: Draw) -> None:
    manager = AttentionKernelManager("cpu")
    with pytest.raises(ArgumentTypeError, match=r"keyword arguments: expected some of .*'casual'"):
        manager.select(*draw(), casual=True)
    with pytest.raises(ArgumentTypeError, match="arguments beside a problem: expected none"):
        manager.select(make_problem(), is_causal=True)
    with pytest.raises(ArgumentTypeError, match=r"key: expected a torch\.Tensor, got NoneType"):
        manager.select(draw()[0])
    with pytest.raises(PolicyError, match="policy: expected 'quality'"):
        AttentionKernelManager("cpu", policy="best")


def test_a_budget_that_nothing_fits_is_an_error_with_the_trace() -> None:
    from adaattn.errors import PlanError

    manager = AttentionKernelManager("cpu", policy=Policy(memory_budget_bytes=0))
    with pytest.raises(PlanError, match="no executor can serve this call"):
        manager.select(make_problem(softcap=20.0, len_q=64))
