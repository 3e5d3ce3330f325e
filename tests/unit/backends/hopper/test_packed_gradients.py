"""The gradients of packed sequences by the Hopper kernels, run on a CPU by `conftest.py`."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, HeadGroup, Precision
from adaattn.testing import (
    assert_training_matches,
    gradients_of,
    make_problem,
    make_tensors,
    poisoned_memory,
    with_tensors,
)

pytestmark = pytest.mark.usefixtures("simulated")
run = partial(hopper.run, group=HeadGroup(capability="hopper"))

LEAVES = ("query", "key", "value")
ONE: dict[str, Any] = {"num_heads": 1}
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
SINKS: dict[str, Any] = {"has_sinks": True, "sinks_require_grad": True}

CASES: dict[str, dict[str, Any]] = {
    "of any length": {"lengths_q": (9, 0, 170, 1, 65)},
    "whole blocks": ONE | {"lengths_q": (128, 256, 128)},
    "causal": {"lengths_q": (130, 64, 3, 200), "is_causal": True},
    "other keys": {"lengths_q": (3, 80, 0, 5), "lengths_k": (170, 8, 20, 0)},
    "causal, other keys": {"lengths_q": (3, 150, 70), "lengths_k": (70, 80, 150),
                           "is_causal": True},
    "to the end": TO_END | {"lengths_q": (3, 150, 70, 5), "lengths_k": (70, 80, 150, 0)},
    "no keys at all": {"lengths_q": (40, 30), "lengths_k": (0, 20)},
    "causal in a window": {"lengths_q": (300, 70, 17, 1), "is_causal": True, "window": (60, -1)},
    "window to the left": {"lengths_q": (300, 70), "lengths_k": (100, 290), "window": (60, -1)},
    "window both ways, to the end": {"lengths_q": (100, 170, 17), "lengths_k": (200, 90, 300),
                                     "window": (50, 20), "align": Align.BOTTOM_RIGHT},
    "groups": GROUPS | TO_END | {"lengths_q": (130, 40)},
    "128 columns": {"lengths_q": (130, 40, 270), "head_dim": 128, "is_causal": True} | ONE,
    "values of other widths": {"lengths_q": (130, 40), "value_dim": 40},
    "half": {"lengths_q": (130, 40), "precision": Precision.FP16},
    "softcap in a window": {"lengths_q": (200, 90), "softcap": 2.0, "is_causal": True,
                            "window": (70, -1)},
    "all else": GROUPS | SINKS | TO_END | {"lengths_q": (130, 0, 40), "lengths_k": (90, 10, 60),
                                           "softcap": 3.0, "has_alibi": True, "window": (90, -1)},
}  # fmt: skip


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a packed problem that wants gradients, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 64, "num_heads": 2, "requires_grad": True}
    values = usual | values
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    return problem, make_tensors(problem, **lengths)


def packed(leaves: list[torch.Tensor], starts: torch.Tensor) -> Tensors:
    """Return the tensors of a call whose queries and keys are packed alike."""
    query, key, value = leaves
    return Tensors.of(query, key, value, cu_seqlens_q=starts, cu_seqlens_k=starts)


@pytest.mark.parametrize("mode", ["any order", "deterministic"])
@pytest.mark.parametrize("name", CASES)
def test_packed_sequences_are_each_a_problem_of_its_own(name: str, mode: str) -> None:
    problem, tensors = made(CASES[name] | {"deterministic": mode == "deterministic"})
    assert_training_matches(run, tensors, problem)


def random_case(seed: int) -> dict[str, Any]:
    """Return any packed problem that the kernel trains."""
    draw = random.Random(seed)
    known = (0, 1, 3, 64, 65, 100, 127, 128, 129, 200)
    lengths = partial(draw.choices, known, k=draw.choice((2, 4)))
    values: dict[str, Any] = {
        **draw.choice((GROUPS, {"num_heads": 2}, {"num_heads": 3, "num_kv_heads": 1})),
        "head_dim": draw.choice((32, 64, 72, 128)),
        "lengths_q": (1, *lengths()),
        "is_causal": draw.random() < 0.5,
        "align": draw.choice(tuple(Align)),
        "softcap": draw.choice((0.0, 0.0, 2.0)),
        "has_alibi": draw.random() < 0.2,
        "deterministic": draw.random() < 0.4,
    }
    if draw.random() < 0.5:
        values["lengths_k"] = (5, *lengths())
    if draw.random() < 0.4:
        right = -1 if values["is_causal"] else draw.choice((-1, 0, 9, 70))
        values["window"] = (draw.choice((0, 9, 64, 150)), right)
    return values | (SINKS if draw.random() < 0.2 else {})


@pytest.mark.parametrize("seed", range(30))
def test_any_packed_problem_in_its_scope(seed: int) -> None:
    problem, tensors = made(random_case(seed))
    assert_training_matches(run, tensors, problem)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", ["of any length", "causal", "groups", "softcap in a window"])
def test_nothing_reads_too_early_or_writes_what_is_still_read(name: str) -> None:
    problem, tensors = made(CASES[name])
    assert_training_matches(run, tensors, problem)


@pytest.mark.usefixtures("late", "together")
@pytest.mark.parametrize("name", ["of any length", "causal", "causal in a window", "groups"])
def test_gradients_in_a_fixed_order_are_the_same_each_time(name: str) -> None:
    problem, tensors = made(CASES[name] | {"deterministic": True})
    first = gradients_of(run(tensors, problem), tensors)
    again = gradients_of(run(tensors, problem), tensors)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("mode", ["any order", "deterministic"])
@pytest.mark.parametrize("before", [0, 5, 300])
def test_tokens_of_no_sequence_have_gradients_of_zero(before: int, mode: str) -> None:
    """They stand before the first sequence and behind the last; here they are no numbers."""
    problem, tensors = made(CASES["causal"] | {"deterministic": mode == "deterministic"})
    total, behind = problem.len_q, 140
    views = {}
    for name in LEAVES:
        item = getattr(tensors, name).detach()
        place = item.new_full((1, item.shape[1], before + total + behind, 64), float("nan"))
        place[:, :, before : before + total] = item
        views[name] = place.requires_grad_()
    assert tensors.cu_seqlens_q is not None
    starts = tensors.cu_seqlens_q + before
    wide = packed(list(views.values()), starts)
    lengths = {"len_q": before + total + behind, "len_k": before + total + behind}
    upstream = torch.randn_like(tensors.query)
    with poisoned_memory():
        output = run(wide, replace(problem, **lengths)).output[:, :, before : before + total]
        found = torch.autograd.grad(output, list(views.values()), upstream)
    leaves = [getattr(tensors, name) for name in LEAVES]
    expected = torch.autograd.grad(run(tensors, problem).output, leaves, upstream)
    for given, inner in zip(found, expected, strict=True):
        if mode == "deterministic":
            assert torch.equal(given[:, :, before : before + total], inner)
        else:
            torch.testing.assert_close(given[:, :, before : before + total], inner)
        assert not given[:, :, :before].any() and not given[:, :, before + total :].any()


@pytest.mark.parametrize("what", LEAVES)
def test_a_sequence_sees_nothing_of_its_neighbours(what: str) -> None:
    """Their rows stand in the same boxes; a weight of 0 times NaN would be NaN."""
    problem, tensors = made({"lengths_q": (70, 90, 100), "is_causal": True})
    broken = getattr(tensors, what).detach().clone()
    broken[:, :, 70:160] = float("nan")
    shown = with_tensors(tensors, **{what: broken.requires_grad_()})
    found = gradients_of(run(shown, problem), shown)
    expected = gradients_of(run(tensors, problem), tensors)
    for name in LEAVES:
        for part in (slice(None, 70), slice(160, None)):
            torch.testing.assert_close(found[name][:, :, part], expected[name][:, :, part])


def test_gradients_of_a_sequence_alone_are_those_among_others() -> None:
    """Bit for bit, where any batch alike is asked for."""
    how = {"batch_invariant": True, "is_causal": True}
    problem, tensors = made(how | {"lengths_q": (70, 300, 17)})
    upstream = torch.randn_like(tensors.query)
    leaves = [getattr(tensors, name) for name in LEAVES]
    together = torch.autograd.grad(run(tensors, problem).output, leaves, upstream)
    own = slice(70, 370)
    alone, _ = made(how | {"lengths_q": (300,)})
    read = [item.detach()[:, :, own].contiguous().requires_grad_() for item in leaves]
    starts = torch.tensor([0, 300], dtype=torch.int32)
    given = packed(read, starts)
    single = torch.autograd.grad(run(given, alone).output, read, upstream[:, :, own])
    for both, one in zip(together, single, strict=True):
        assert torch.equal(both[:, :, own], one)


@pytest.mark.parametrize("mode", ["any order", "deterministic", "ascending heads"])
@pytest.mark.parametrize(
    "starts",
    [
        (0, 400, 90, 600, 600),
        (0, 500, 90, 150, 600),
        (-200, 900, 400, 0, 900),
        (600, 300, 200, 100, 0),
        (999,) * 5,
    ],
    ids=str,
)
def test_starts_that_nobody_has_checked_do_no_harm(starts: tuple[int, ...], mode: str) -> None:
    """On a GPU nobody reads them; a simulated access outside fails, and a wait without end."""
    given: dict[str, Any] = {"lengths_q": (100, 200, 300, 0), "num_heads": 1}
    if mode == "ascending heads":
        given |= {"num_heads": 2, "is_causal": True}
    problem, tensors = made(given | {"deterministic": mode != "any order"})
    wrong = torch.tensor(starts, dtype=torch.int32)
    read = packed([getattr(tensors, name) for name in LEAVES], wrong)
    output = run(read, problem).output.nan_to_num()
    gradients_of(Result(output=output), read)
