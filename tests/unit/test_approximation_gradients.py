"""Gradients of the approximations: whole for low rank, those of the kept blocks for sparse."""

import pytest
import torch

from adaattn import BlockSparse, HeadGroup, LowRank, Method, Plan, Precision, Scheme
from adaattn import scaled_dot_product_attention as attend
from adaattn.testing import fake_facts

LOW_RANK = HeadGroup(
    capability="low_rank", method=LowRank(rank=3, value_rank=3), scheme=Scheme.of(Precision.FP64)
)


def _of_rank(rank: int, *shape: int) -> torch.Tensor:
    """Return a tensor whose last two dimensions have a rank."""
    left = torch.randn(*shape[:-1], rank, dtype=torch.float64)
    return left @ torch.randn(*shape[:-2], rank, shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("value_dim", [6, 4], ids=["fused backward", "recomputed"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_finite_differences_hold_the_gradients_of_low_rank(
    kv_heads: int, value_dim: int, is_causal: bool
) -> None:
    """Three tokens have rank 3 wherever a step leads, so differences see the whole gradient.

    Differentiating the projected computation, with projections as constants, fails this: it
    cuts the directions that they leave out.
    """
    shapes = [(1, 2, 3, 6), (1, kv_heads, 3, 6), (1, kv_heads, 3, value_dim)]
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    plan = Plan(groups=(LOW_RANK,), num_heads=2)

    def call(*items: torch.Tensor) -> torch.Tensor:
        return attend(*items, is_causal=is_causal, enable_gqa=True, plan=plan)

    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_the_gradients_of_low_rank_are_within_the_error_of_its_forward(mask: str | None) -> None:
    """Tensors of nearly rank 3: forward and backward lose about what the rank leaves out."""
    shapes = [(1, 2, 40, 8), (1, 1, 40, 8), (1, 1, 40, 8)]
    tensors = [
        (_of_rank(3, *s) + 0.01 * torch.randn(s, dtype=torch.float64)).requires_grad_()
        for s in shapes
    ]
    given = None
    if mask is not None:
        given = torch.rand(1, 1, 40, 40) < 0.7
        given[..., 3, :] = False
        if mask == "additive":
            given = torch.zeros(given.shape, dtype=torch.float64).masked_fill(~given, -torch.inf)
    plan = Plan(groups=(LOW_RANK,), num_heads=2)
    settings = {"attn_mask": given, "enable_gqa": True}
    output = attend(*tensors, plan=plan, **settings)
    exact = attend(*tensors, **settings)
    weights = torch.randn_like(exact)
    found = torch.autograd.grad((output * weights).sum(), tensors)
    expected = torch.autograd.grad((exact * weights).sum(), tensors)
    error = (output - exact).norm() / exact.norm()
    assert 0 < error < 0.1
    for gradient, right in zip(found, expected, strict=True):
        assert gradient.isfinite().all()
        assert (gradient - right).norm() <= 4 * error * right.norm()
    if mask is not None:
        assert found[0][:, :, 3].count_nonzero() == 0


@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_block_sparse_differentiates_the_kept_blocks(kv_heads: int, is_causal: bool) -> None:
    """Which blocks are kept does not change within a finite difference."""
    group = HeadGroup(
        capability="block_sparse",
        method=BlockSparse(block_size=4, kept_mass=0.3),
        scheme=Scheme.of(Precision.FP64),
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
    factors = [(torch.randn(1, 2, 4096, 8), torch.randn(1, 2, 8, 64)) for _ in range(3)]
    tensors = [(left @ right / 8**0.5).requires_grad_() for left, right in factors]
    output, aux = attend(*tensors, policy="balanced", return_aux=True)
    assert {group.method.kind for group in aux.decision.plan.groups} == {Method.LOW_RANK}
    planned = attend(*tensors, plan=aux.decision.plan)
    weights = torch.randn_like(output)
    found = torch.autograd.grad((output * weights).sum(), tensors)
    again = torch.autograd.grad((planned * weights).sum(), tensors)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("seed", range(3))
def test_a_few_tokens_unlike_all_others_leave_the_gradients_right(seed: int) -> None:
    """Their scores were far above what the projections kept, and exp(score - lse) was infinite.

    A log-sum-exp of the projected forward is used only where it is proven to be near the exact
    one; here exact attention is computed again before its backward.
    """
    torch.manual_seed(seed)
    tensors = [_of_rank(3, 1, 2, 200, 8).float() for _ in range(3)]
    for item in tensors:
        item[:, :, :2] += 30 * torch.randn(1, 2, 2, 8)
    group = HeadGroup(capability="low_rank", method=LowRank(rank=3, value_rank=3))
    plan = Plan(groups=(group,), num_heads=2, error_budget=0.5)
    leaves = [item.requires_grad_() for item in tensors]
    output = attend(*leaves, plan=plan)
    found = torch.autograd.grad(output.sum(), leaves)
    wide = [item.detach().double().requires_grad_() for item in tensors]
    exact = torch.autograd.grad(attend(*wide).sum(), wide)
    for gradient, right in zip(found, exact, strict=True):
        assert gradient.isfinite().all()
        # rowsum(dO * O) takes the projected output, so the error is the forward pass's.
        assert gradient.norm() <= 2 * right.norm() + 1
