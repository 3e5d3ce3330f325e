"""Gradients of the approximations are those of what they compute."""

import pytest
import torch

from adaattn import HeadGroup, Method, Plan, Precision
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import low_rank
from adaattn.linalg.projections import score_projections, value_basis
from adaattn.testing import fake_facts


@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_low_rank_differentiates_the_projected_computation(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, is_causal: bool
) -> None:
    """Projections are constants to autograd, so finite differences must hold them too."""
    group = HeadGroup(
        capability="low_rank",
        method=Method.LOW_RANK,
        precision=Precision.FP64,
        rank=3,
        value_rank=2,
    )
    plan = Plan(groups=(group,), num_heads=2)
    shapes = [(1, 2, 5, 6), (1, kv_heads, 5, 6), (1, kv_heads, 5, 4)]
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    folded = tensors[0].detach().reshape(1, kv_heads, -1, 6)
    projections = score_projections(folded, tensors[1].detach(), 3)
    basis = value_basis(tensors[2].detach(), 2)

    def call(*items: torch.Tensor) -> torch.Tensor:
        return attend(*items, is_causal=is_causal, enable_gqa=True, plan=plan)

    free = call(*tensors)
    monkeypatch.setattr(low_rank, "score_projections", lambda q, k, rank: projections)
    monkeypatch.setattr(low_rank, "value_basis", lambda v, rank: basis)
    assert torch.equal(call(*tensors), free)
    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_block_sparse_differentiates_the_kept_blocks(kv_heads: int, is_causal: bool) -> None:
    """Which blocks are kept does not change within a finite difference."""
    group = HeadGroup(
        capability="block_sparse",
        method=Method.BLOCK_SPARSE,
        precision=Precision.FP64,
        block_size=4,
        kept_mass=0.3,
    )
    plan = Plan(groups=(group,), num_heads=2)
    shapes = [(1, 2, 10, 3), (1, kv_heads, 10, 3), (1, kv_heads, 10, 2)]
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def call(*items: torch.Tensor) -> torch.Tensor:
        return attend(*items, is_causal=is_causal, enable_gqa=True, plan=plan)

    exact = attend(*tensors, is_causal=is_causal, enable_gqa=True)
    assert not torch.allclose(call(*tensors), exact)
    assert torch.autograd.gradcheck(call, tensors)


def test_a_call_under_a_policy_has_the_gradients_of_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    factors = [(torch.randn(1, 2, 2048, 8), torch.randn(1, 2, 8, 64)) for _ in range(3)]
    tensors = [(left @ right / 8**0.5).requires_grad_() for left, right in factors]
    output, aux = attend(*tensors, policy="balanced", return_aux=True)
    assert {group.method for group in aux.decision.plan.groups} == {Method.LOW_RANK}
    planned = attend(*tensors, plan=aux.decision.plan)
    weights = torch.randn_like(output)
    found = torch.autograd.grad((output * weights).sum(), tensors)
    again = torch.autograd.grad((planned * weights).sum(), tensors)
    assert all(map(torch.equal, found, again))
