"""Training calls that come again, run on a CPU (`conftest.py`): each as if it were the first.

Between calls whose launches are found by guards come tensors that lie otherwise.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.interface import Result, Tensors, num_taken
from adaattn.spec import AttentionProblem, HeadGroup, MaskKind, Precision
from adaattn.testing import assert_training_matches, make_problem, make_tensors, with_tensors

pytestmark = pytest.mark.usefixtures("simulated")

GROUP = HeadGroup(capability="hopper")
DRAWN: dict[str, Any] = {"precision": Precision.BF16, "head_dim": 32, "requires_grad": True}
BESIDE: dict[str, Any] = {"has_sinks": True, "sinks_require_grad": True, "has_alibi": True}
LENGTHS = ((40, 1, 30), (10, 21, 40))


def bound(problem: AttentionProblem) -> Callable[[Tensors, AttentionProblem], Result]:
    """Return the function of repeated calls as an executor."""
    call = hopper.direct(problem, GROUP)
    return lambda tensors, problem: Result(output=call(*tensors.as_direct()[: num_taken(problem)]))


def test_masks_that_lie_otherwise_come_between() -> None:
    size = (2, 1, 70, 80)
    problem = make_problem(
        **DRAWN, mask=MaskKind.ADDITIVE, len_q=70, len_k=80, batch=2, mask_shape=size
    )
    run, tensors = bound(problem), make_tensors(problem)
    usual, wide = tensors.mask, torch.randn(2, 1, 70, 97).bfloat16()
    assert usual is not None
    others = (
        usual[:1].expand(size),
        wide[..., 1:81],
        wide[..., :80],
        usual.double(),
        usual.mT.contiguous().mT,
        wide[:, :, :1, :80].expand(size),
    )
    for mask in (usual, usual, usual, *[which for one in others for which in (one, usual)]):
        assert_training_matches(run, with_tensors(tensors, mask=mask), problem)


def test_sinks_and_slopes_that_lie_otherwise_come_between() -> None:
    problem = make_problem(**DRAWN, **BESIDE, is_causal=True, len_q=70, batch=2)
    run, tensors = bound(problem), make_tensors(problem)
    sinks, slopes = tensors.sinks, tensors.alibi_slopes
    assert sinks is not None and slopes is not None
    numbers = torch.rand(2, 3)
    pairs = (
        *[(sinks, slopes)] * 4,
        (numbers[:, 0].detach().requires_grad_(), slopes),
        (sinks, slopes),
        (torch.rand(3)[1:].requires_grad_(), numbers[:, 1]),
        (torch.rand(2).double().requires_grad_(), torch.rand(2, 2)),
        (sinks, torch.rand(2).bfloat16()),
        *[(sinks, slopes)] * 2,
    )
    for one, other in pairs:
        given = with_tensors(tensors, sinks=one, alibi_slopes=other)
        assert_training_matches(run, given, problem)


def test_starts_of_other_lengths_and_steps_come_between() -> None:
    problem = make_problem(**DRAWN, is_causal=True, lengths_q=(40, 1, 30), batch=1)
    run = bound(problem)
    drawn = {lengths: make_tensors(problem, lengths_q=lengths) for lengths in LENGTHS}
    for lengths, is_strided in zip((0, 0, 0, 1, 0, 0, 1), (0, 0, 0, 0, 1, 0, 1), strict=True):
        tensors = drawn[LENGTHS[lengths]]
        starts = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        if is_strided:
            starts = tuple(map(_strided, starts))
        given = Tensors.of(
            *tensors.as_direct()[:3],
            cu_seqlens_q=starts[0],
            cu_seqlens_k=starts[1],
            bounds_q=tensors.bounds_q,
            bounds_k=tensors.bounds_k,
        )
        assert_training_matches(run, given, problem)


def _strided(starts: torch.Tensor | None) -> torch.Tensor:
    """Return starts beside other numbers."""
    assert starts is not None
    wide = torch.full((len(starts), 2), 7, dtype=torch.int32)
    wide[:, 0] = starts
    return wide[:, 0]


def test_sinks_alone_may_want_a_gradient() -> None:
    problem = make_problem(**DRAWN, has_sinks=True, sinks_require_grad=True, len_q=70)
    given = [None if x is None else x.detach() for x in make_tensors(problem).as_direct()[:8]]
    sinks = given[4]
    assert sinks is not None
    sinks.requires_grad_()
    call = hopper.direct(problem, GROUP)
    found = [torch.autograd.grad(call(*given).sum(), sinks)[0] for _ in range(4)]
    found += torch.autograd.grad(call(*given).sum(), sinks, create_graph=True)
    assert all(torch.equal(found[0], other) for other in found)
