"""Gradients beside a mask by the Hopper kernels, run on a CPU by `conftest.py`."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.hopper import gradients
from adaattn.backends.hopper.gradient_launch import GradientVariant, choose_gradients
from adaattn.backends.interface import Tensors
from adaattn.spec import Align, AttentionProblem, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    Layout,
    assert_training_matches,
    gradients_of,
    make_problem,
    make_tensors,
    with_tensors,
)

pytestmark = pytest.mark.usefixtures("simulated")
run = partial(hopper.run, group=HeadGroup(capability="hopper"))

LEAVES = ("query", "key", "value")
BIAS: dict[str, Any] = {"mask": MaskKind.ADDITIVE}
BOOLEAN: dict[str, Any] = {"mask": MaskKind.BOOLEAN}
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
TWO: dict[str, Any] = {"num_heads": 2}

CASES: dict[str, dict[str, Any]] = {
    "bias": BIAS | TWO | {"len_q": 150, "len_k": 200},
    "boolean": BOOLEAN | TWO | {"len_q": 150, "len_k": 200},
    "whole tiles": BIAS | {"len_q": 128, "len_k": 192, "head_dim": 128},
    "one row": BOOLEAN | {"len_q": 1, "len_k": 130},
    "one key": BIAS | {"len_q": 130, "len_k": 1},
    "odd columns": BIAS | {"len_q": 67, "len_k": 131, "head_dim": 128},
    "wide numbers": BIAS | {"len_q": 70, "len_k": 140, "mask_is_wide": True, "head_dim": 128},
    "half": BIAS | {"len_q": 70, "len_k": 140, "precision": Precision.FP16},
    "of 256 columns": BIAS | {"len_q": 140, "len_k": 100, "head_dim": 256},
    "booleans of 160 columns": BOOLEAN | {"len_q": 140, "len_k": 100, "head_dim": 160},
    "padding": BOOLEAN | TWO | {"batch": 2, "len_q": 70, "mask_shape": (2, 1, 1, 70)},
    "bias of keys": BIAS | TWO | {"len_q": 140, "len_k": 150, "mask_shape": (1, 2, 1, 150)},
    "for all heads": BIAS | TWO | {"len_q": 140, "len_k": 152, "mask_shape": (1, 1, 140, 152)},
    "of each sequence": BOOLEAN | TWO | {"batch": 2, "len_q": 70, "mask_shape": (2, 1, 70, 70)},
    "of two dimensions": BOOLEAN | {"len_q": 140, "len_k": 152, "mask_shape": (140, 152)},
    "one number for a row": BIAS | {"len_q": 140, "len_k": 70, "mask_shape": (1, 1, 140, 1)},
    "causal": BIAS | {"len_q": 192, "is_causal": True, "head_dim": 128},
    "boolean to the end": BOOLEAN | TO_END | {"len_q": 90, "len_k": 200},
    "window": BOOLEAN | {"len_q": 300, "window": (70, 20)},
    "window, rows that see nothing": BIAS | {"len_q": 300, "len_k": 70, "window": (10, 3)},
    "groups": BIAS | GROUPS | {"len_q": 140, "len_k": 100},
    "groups, causal": BOOLEAN | GROUPS | {"len_q": 130, "is_causal": True, "head_dim": 160},
    "softcap": BIAS | {"len_q": 140, "softcap": 1.5},
    "sinks": BOOLEAN | TWO | {"len_q": 100, "has_sinks": True, "sinks_require_grad": True},
    "ALiBi": BIAS | {"len_q": 100, "has_alibi": True, "batch": 2},
    "transposed": BIAS | TWO | {"layout": Layout.TRANSPOSED, "len_q": 100},
    "packed": BOOLEAN | {"lengths_q": (90, 0, 70)},
    "packed, no queries at the end": BIAS | {"lengths_q": (90, 70, 0), "lengths_k": (9, 70, 80)},
    "packed, no queries at the start": BIAS | {"lengths_q": (0, 70), "lengths_k": (80, 90)},
    "packed, causal": BIAS | GROUPS | TO_END | {"lengths_q": (90, 70)},
    "packed, a mask of keys": BOOLEAN | {"lengths_q": (90, 70), "mask_shape": (1, 1, 1, 160)},
    "packed in a window": BIAS | {"lengths_q": (200, 9), "lengths_k": (30, 9), "window": (40, -1)},
}


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem with a mask that wants gradients, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 64, "num_heads": 1, "requires_grad": True}
    values = usual | values
    how = {key: values.pop(key) for key in ("layout",) if key in values}
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths, **how)
    if problem.has_alibi:
        slopes = torch.rand(problem.batch, problem.num_heads)
        tensors = with_tensors(tensors, alibi_slopes=slopes)
    return problem, tensors


@pytest.mark.parametrize("number", [-1e9, -1e12, -1e15, -1e30])
def test_rows_of_padding_alone_that_nobody_counts_have_no_gradient(number: float) -> None:
    """fp32 keeps nothing of a score beside such numbers: weights made anew were infinite."""
    values = {"len_q": 66, "head_dim": 32, "num_heads": 1, "is_causal": True, "requires_grad": True}
    problem = make_problem(**BIAS, **values, mask_is_wide=True, precision=Precision.BF16)
    mask = torch.zeros(1, 1, 66, 66)
    mask[..., :9] = number
    tensors = with_tensors(make_tensors(problem), mask=mask)
    upstream = torch.randn(1, 1, 66, 32).bfloat16()
    upstream[:, :, :9] = 0.0
    leaves = [tensors.query, tensors.key, tensors.value]
    found = torch.autograd.grad(run(tensors, problem).output, leaves, upstream)
    assert all(not item[:, :, :9].any() for item in found)
    later = [item[:, :, 9:].detach().requires_grad_() for item in leaves]
    rest = replace(problem, len_q=57, len_k=57, mask_shape=(1, 1, 57, 57))
    alone = run(Tensors.of(*later, mask=mask[..., 9:, 9:]), rest)
    expected = torch.autograd.grad(alone.output, later, upstream[:, :, 9:])
    for item, other in zip(found, expected, strict=True):
        torch.testing.assert_close(item[:, :, 9:], other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    problem, tensors = made(CASES[name])
    assert choose_gradients(problem).is_split
    assert_training_matches(run, tensors, problem)


@pytest.mark.parametrize("kind", [BIAS, BOOLEAN], ids=str)
def test_rows_that_a_mask_leaves_without_keys_have_no_gradients(kind: dict[str, Any]) -> None:
    problem, _ = made(kind | {"len_q": 140, "len_k": 150})
    tensors = make_tensors(problem, num_hidden_rows=70)
    assert_training_matches(run, tensors, problem)
    assert not gradients_of(run(tensors, problem), tensors)["query"][:, :, :70].any()


def random_case(seed: int) -> dict[str, Any]:
    """Return any problem with a mask."""
    draw = random.Random(seed)
    known = (1, 3, 63, 64, 65, 100, 128, 129)
    kv_heads = draw.choice((1, 2))
    heads = kv_heads * draw.choice((1, 2))
    len_q, len_k, batch = draw.choice(known), draw.choice(known), draw.choice((1, 2))
    shape = (draw.choice((1, batch)), draw.choice((1, heads)), draw.choice((1, len_q)), len_k)
    values: dict[str, Any] = {
        **draw.choice((BIAS, BOOLEAN)),
        **{"batch": batch, "num_heads": heads, "num_kv_heads": kv_heads},
        **{"len_q": len_q, "len_k": len_k, "mask_shape": shape},
        "head_dim": draw.choice((32, 64, 72, 128, 160)),
        "is_causal": draw.random() < 0.4,
        "align": draw.choice(tuple(Align)),
        "softcap": draw.choice((0.0, 0.0, 2.0)),
        "precision": draw.choice((Precision.BF16, Precision.FP16)),
    }
    if values["mask"] is MaskKind.ADDITIVE:
        values["mask_is_wide"] = draw.random() < 0.3
    if draw.random() < 0.3:
        values["window"] = (draw.choice((0, 9, 64)), -1)
    return values


@pytest.mark.parametrize("seed", range(25))
def test_any_problem_in_their_scope(seed: int) -> None:
    problem, tensors = made(random_case(seed))
    assert_training_matches(run, tensors, problem)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", ["bias", "booleans of 160 columns", "groups", "packed"])
def test_nothing_reads_too_early_or_writes_what_is_still_read(name: str) -> None:
    problem, tensors = made(CASES[name])
    assert_training_matches(run, tensors, problem)


def views() -> dict[str, tuple[torch.Tensor, dict[str, bool]]]:
    """Return masks of 70 rows and 80 keys, and what kernels may take for granted of each."""
    whole = torch.randn(1, 1, 70, 96).bfloat16()
    lying = {"mask_is_dense": True, "mask_is_aligned": True}
    return {
        "of wider rows": (whole[..., :80], lying),
        "expanded over heads": (whole[..., :80].expand(1, 2, 70, 80), lying),
        "from an odd column on": (whole[..., 3:83], lying | {"mask_is_aligned": False}),
        "of odd rows": (
            torch.randn(1, 1, 70, 81).bfloat16()[..., :80],
            lying | {"mask_is_aligned": False},
        ),
        "turned": (
            torch.randn(1, 1, 80, 70).bfloat16().transpose(2, 3),
            {"mask_is_dense": False, "mask_is_aligned": False},
        ),
        "of every other column": (
            torch.randn(1, 1, 70, 160).bfloat16()[..., ::2],
            {"mask_is_dense": False, "mask_is_aligned": True},
        ),
    }


@pytest.mark.parametrize("name", views())
def test_masks_may_lie_in_any_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, lying = views()[name]
    problem, tensors = made(BIAS | TWO | {"len_q": 70, "len_k": 80, "mask_shape": (1, 1, 70, 80)})
    seen: list[GradientVariant] = []
    compiled = gradients._compiled

    def noted(variant: GradientVariant, device: torch.device) -> Any:
        seen.append(variant)
        return compiled(variant, device)

    monkeypatch.setattr(gradients, "_compiled", noted)
    assert_training_matches(run, with_tensors(tensors, mask=mask), problem)
    assert {name: getattr(seen[0], name) for name in lying} == lying


def test_a_mask_that_lies_otherwise_has_kernels_of_its_own() -> None:
    """Of equal shape and strides, but from another address on: pairs of numbers are then apart."""
    problem, tensors = made(BIAS | {"len_q": 70, "len_k": 80, "mask_shape": (1, 1, 70, 80)})
    whole = torch.randn(1, 1, 70, 96).bfloat16()
    for first in (0, 1, 8):
        shown = with_tensors(tensors, mask=whole[..., first : first + 80])
        assert_training_matches(run, shown, problem)


def test_masks_of_other_kinds_of_numbers_are_cast() -> None:
    problem, tensors = made(BIAS | {"len_q": 70, "len_k": 80, "mask_is_wide": True})
    assert tensors.mask is not None
    wide = with_tensors(tensors, mask=tensors.mask.double())
    found = gradients_of(run(wide, problem), wide)
    expected = gradients_of(run(tensors, problem), tensors)
    assert all(torch.equal(found[name], expected[name]) for name in LEAVES)


@pytest.mark.parametrize("mode", ["deterministic", "batch_invariant"])
def test_gradients_have_one_order_in_any_mode(mode: str) -> None:
    problem, tensors = made(CASES["bias"])
    fixed, _ = made(CASES["bias"] | {mode: True})
    found = gradients_of(run(tensors, fixed), tensors)
    expected = gradients_of(run(tensors, problem), tensors)
    assert not choose_gradients(fixed).is_ordered
    assert all(torch.equal(found[name], expected[name]) for name in LEAVES)
