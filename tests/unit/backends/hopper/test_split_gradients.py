"""Gradients of more than 128 columns by the Hopper kernels, run on a CPU by `conftest.py`.

So are those of few blocks of grouped heads.
"""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.hopper import gradient_launch
from adaattn.backends.hopper.gradient_launch import Sharing, choose_gradients
from adaattn.backends.hopper.gradient_numbers import split_numbers_of
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, Precision
from adaattn.testing import (
    Layout,
    assert_matches,
    assert_training_matches,
    attention,
    cast_tensors,
    gradients_of,
    make_problem,
    make_tensors,
    num_summands,
    poisoned_memory,
    with_tensors,
)

pytestmark = pytest.mark.usefixtures("simulated")
run = partial(hopper.run, group=HeadGroup(capability="hopper"))

LEAVES = ("query", "key", "value")
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
SINKS: dict[str, Any] = {"has_sinks": True, "sinks_require_grad": True}
NARROW_VALUES: dict[str, Any] = {"head_dim": 192, "value_dim": 128}
TWO: dict[str, Any] = {"num_heads": 2}

CASES: dict[str, dict[str, Any]] = {
    "one row": {"len_q": 1, "len_k": 1},
    "one row, many keys": {"len_q": 1, "len_k": 300},
    "many rows, one key": {"len_q": 300, "len_k": 1},
    "whole tiles": {"head_dim": 256, "len_q": 128, "len_k": 192},
    "ragged": TWO | {"head_dim": 256, "len_q": 67, "len_k": 131},
    "an odd number of tiles": {"len_q": 190, "len_k": 64},
    "batch": TWO | {"batch": 2, "len_q": 70, "len_k": 150},
    "causal": {"head_dim": 256, "len_q": 256, "is_causal": True},
    "causal, ragged": {"len_q": 300, "is_causal": True},
    "causal, fewer keys": {"len_q": 300, "len_k": 100, "is_causal": True},
    "causal, keys that no row sees": {"len_q": 100, "len_k": 300, "is_causal": True},
    "to the end": TO_END | {"len_q": 130, "len_k": 333},
    "to the end, aligned": TO_END | {"len_q": 128, "len_k": 320},
    "to the end, fewer keys": TO_END | {"len_q": 333, "len_k": 90},
    "to the end, rows that see nothing": TO_END | {"len_q": 384, "len_k": 128},
    "window both ways": {"len_q": 400, "window": (70, 20)},
    "window to the left": {"len_q": 300, "window": (40, -1)},
    "window to the right": {"len_q": 300, "window": (-1, 40)},
    "causal in a window": {"len_q": 400, "is_causal": True, "window": (128, -1)},
    "window beyond int32": {"len_q": 70, "window": (2**31, 2**31)},
    "window, rows that see nothing": {"len_q": 400, "len_k": 100, "window": (10, 3)},
    "groups": GROUPS | {"len_q": 200, "len_k": 140},
    "groups, causal": GROUPS | {"len_q": 192, "is_causal": True, "batch": 2},
    "groups in a window": GROUPS | {"len_q": 300, "window": (90, 4)},
    "one key head": {"num_heads": 3, "num_kv_heads": 1, "len_q": 140, "is_causal": True},
    "160 columns": {"head_dim": 160, "len_q": 100, "len_k": 70},
    "192 columns": {"head_dim": 192, "len_q": 100, "is_causal": True},
    "fewer columns of values": NARROW_VALUES | TWO | {"len_q": 200, "is_causal": True},
    "few columns of values": {"head_dim": 256, "value_dim": 40, "len_q": 70, "len_k": 100},
    "wider values": TWO | {"head_dim": 64, "value_dim": 256, "len_q": 150, "is_causal": True},
    "transposed": TWO | {"layout": Layout.TRANSPOSED, "len_q": 140, "batch": 2},
    "strided": TWO | {"layout": Layout.STRIDED, "len_q": 140},
    "large scores": {"scale": 30.0, "len_q": 70, "len_k": 200},
    "softcap": {"len_q": 140, "softcap": 1.5},
    "softcap in a window": {"len_q": 200, "softcap": 3.0, "window": (50, 10)},
    "sinks": SINKS | TWO | {"len_q": 140},
    "sinks over rows that see nothing": SINKS | TO_END | {"len_q": 200, "len_k": 90},
    "ALiBi": {"has_alibi": True, "batch": 2, "len_q": 140},
    "ALiBi to the end, in groups": GROUPS | TO_END | {"has_alibi": True, "len_q": 90, "len_k": 140},
    "all else": GROUPS
    | SINKS
    | TO_END
    | {"has_alibi": True, "len_q": 140, "len_k": 200, "softcap": 3.0, "window": (90, -1)},
    "packed": {"lengths_q": (9, 0, 170, 1, 65)},
    "packed, whole tiles": {"lengths_q": (128, 64, 256)},
    "packed, causal": TWO | {"lengths_q": (130, 64, 3, 200), "is_causal": True},
    "packed, other keys": {"lengths_q": (3, 80, 0, 5), "lengths_k": (170, 8, 20, 0)},
    "packed, no keys at all": {"lengths_q": (40, 30), "lengths_k": (0, 20)},
    "packed, to the end": TO_END | {"lengths_q": (3, 150, 70, 5), "lengths_k": (70, 80, 150, 0)},
    "packed in a window": {"lengths_q": (300, 70, 17, 1), "is_causal": True, "window": (60, -1)},
    "packed, a window both ways, to the end": {
        **{"lengths_q": (100, 170, 17), "lengths_k": (200, 90, 300), "window": (50, 20)},
        "align": Align.BOTTOM_RIGHT,
    },
    "packed groups": GROUPS | TO_END | {"lengths_q": (130, 40)},
    "packed, fewer columns of values": NARROW_VALUES | {"lengths_q": (130, 40)},
    "packed, all else": GROUPS
    | SINKS
    | TO_END
    | {"lengths_q": (130, 0, 40), "lengths_k": (90, 10, 60), "softcap": 3.0}
    | {"has_alibi": True, "window": (90, -1)},
}


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem that wants gradients, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 136, "num_heads": 1, "requires_grad": True}
    values = usual | values
    how = {key: values.pop(key) for key in ("layout",) if key in values}
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths, **how)
    if problem.has_alibi:
        slopes = torch.rand(problem.batch, problem.num_heads)
        tensors = with_tensors(tensors, alibi_slopes=slopes)
    return problem, tensors


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name: str, precision: Precision) -> None:
    problem, tensors = made(CASES[name] | {"precision": precision})
    assert_training_matches(run, tensors, problem)


@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize(
    "name", ["groups", "groups, causal", "groups in a window", "one key head", "all else"]
)
def test_few_blocks_of_grouped_heads_go_the_same_way(
    name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_launch, "_fastest_sharing", lambda *given: Sharing.SPLIT)
    problem, tensors = made(CASES[name] | {"head_dim": head_dim})
    variant = choose_gradients(problem)
    assert variant.is_split and variant.block_d == (64 if head_dim == 64 else 128)
    assert_training_matches(run, tensors, problem)


def random_case(seed: int) -> dict[str, Any]:
    """Return any problem of more than 128 columns that the kernels train."""
    draw = random.Random(seed)
    kv_heads = draw.choice((1, 1, 2))
    known = (1, 3, 63, 64, 65, 100, 127, 128, 129, 200)
    values: dict[str, Any] = {
        "num_heads": kv_heads * draw.choice((1, 1, 2, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": draw.choice((136, 160, 192, 256)),
        "is_causal": draw.random() < 0.5,
        "align": draw.choice(tuple(Align)),
        "precision": draw.choice((Precision.BF16, Precision.FP16)),
        "softcap": draw.choice((0.0, 0.0, 2.0)),
        "has_alibi": draw.random() < 0.2,
        "deterministic": draw.random() < 0.3,
    }
    values["value_dim"] = draw.choice((values["head_dim"], values["head_dim"], 64, 128, 200))
    if draw.random() < 0.4:
        lengths = partial(draw.choices, (0, *known), k=draw.choice((2, 3)))
        values |= {"lengths_q": (1, *lengths())}
        values |= {"lengths_k": (5, *lengths())} if draw.random() < 0.5 else {}
        if len(values.get("lengths_k", values["lengths_q"])) != len(values["lengths_q"]):
            values.pop("lengths_k")
    else:
        values |= {"len_q": draw.choice(known), "len_k": draw.choice(known)}
        values |= {"batch": draw.choice((1, 1, 2)), "layout": draw.choice(tuple(Layout))}
    if draw.random() < 0.4:
        right = -1 if values["is_causal"] else draw.choice((-1, 0, 9, 70))
        values["window"] = (draw.choice((0, 9, 64, 150)), right)
    return values | (SINKS if draw.random() < 0.2 else {})


@pytest.mark.parametrize("seed", range(40))
def test_any_problem_in_their_scope(seed: int) -> None:
    problem, tensors = made(random_case(seed))
    assert_training_matches(run, tensors, problem)


LATE = ("one row, many keys", "many rows, one key", "whole tiles", "causal, ragged",
        "groups, causal", "window both ways", "fewer columns of values", "softcap in a window",
        "all else", "packed", "packed in a window")  # fmt: skip


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", LATE)
def test_nothing_reads_too_early_or_writes_what_is_still_read(name: str) -> None:
    problem, tensors = made(CASES[name])
    assert_training_matches(run, tensors, problem)


@pytest.mark.usefixtures("late", "together")
@pytest.mark.parametrize("mode", ["any order", "deterministic"])
def test_gradients_are_the_same_each_time_in_either_mode(mode: str) -> None:
    """Blocks start in another order each time, and nothing is added in memory."""
    problem, tensors = made(GROUPS | {"len_q": 150, "deterministic": mode == "deterministic"})
    first = gradients_of(run(tensors, problem), tensors)
    again = gradients_of(run(tensors, problem), tensors)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("name", ["ragged", "sinks", "to the end, rows that see nothing", "packed"])
def test_gradients_that_arrive_at_the_log_sum_exp_are_passed_on(name: str) -> None:
    problem, tensors = made(CASES[name] | {"aux": Aux.LSE})
    wide = cast_tensors(tensors, torch.float64)

    def found_by(result: Result, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        assert result.lse is not None
        upstream = torch.randn(result.lse.shape, generator=generator)
        given = [getattr(tensors, name) for name in LEAVES]
        seen = result.lse.masked_fill(result.lse == -torch.inf, 0.0)
        total = (seen * upstream.to(seen)).sum() + result.output.sum()
        return torch.autograd.grad(total, given)

    with poisoned_memory():
        found = found_by(run(tensors, problem), tensors)
    exact = found_by(attention(wide, problem), wide)
    eager = found_by(attention(tensors, problem, compute_dtype=tensors.query.dtype), tensors)
    for which in zip(found, exact, eager, strict=True):
        assert_matches(*which, summands=num_summands(problem, which[0]))


@pytest.mark.parametrize("what", LEAVES)
def test_rows_behind_the_last_are_never_read(what: str) -> None:
    """They stand in the same boxes, as a neighbour's: a weight of 0 times NaN would be NaN."""
    problem, tensors = made({"len_q": 70, "len_k": 90})
    views = {}
    for name in LEAVES:
        item = getattr(tensors, name).detach()
        place = item.new_full((*item.shape[:2], 200, item.shape[3]), float("nan"))
        views[name] = place[:, :, : item.shape[2]].copy_(item).requires_grad_()
    assert_training_matches(run, with_tensors(tensors, **{what: views[what]}), problem)


@pytest.mark.parametrize("what", LEAVES)
def test_a_sequence_sees_nothing_of_its_neighbours(what: str) -> None:
    problem, tensors = made({"lengths_q": (70, 90, 100), "is_causal": True})
    broken = getattr(tensors, what).detach().clone()
    broken[:, :, 70:160] = float("nan")
    shown = with_tensors(tensors, **{what: broken.requires_grad_()})
    found = gradients_of(run(shown, problem), shown)
    expected = gradients_of(run(tensors, problem), tensors)
    for name in LEAVES:
        for part in (slice(None, 70), slice(160, None)):
            assert torch.equal(found[name][:, :, part], expected[name][:, :, part])


def test_keys_behind_the_last_weigh_nothing_where_all_scores_are_low() -> None:
    """Their score of 0 would be 2^200 beside a log-sum-exp of -150: infinite, and 0 times that."""
    problem, tensors = made({"len_q": 70, "len_k": 90, "scale": 1.0})
    query = torch.full_like(tensors.query, 3.0).requires_grad_()
    key = (torch.randn_like(tensors.key) * 0.01 - 1.0).requires_grad_()
    assert_training_matches(run, with_tensors(tensors, query=query, key=key), problem)


@pytest.mark.parametrize("before", [0, 5, 300])
def test_tokens_of_no_sequence_have_gradients_of_zero(before: int) -> None:
    """They stand before the first sequence and behind the last; here they are no numbers."""
    problem, tensors = made({"lengths_q": (130, 64, 3), "is_causal": True})
    total, behind = problem.len_q, 140
    views = []
    for name in LEAVES:
        item = getattr(tensors, name).detach()
        place = item.new_full((1, 1, before + total + behind, item.shape[3]), float("nan"))
        place[:, :, before : before + total] = item
        views.append(place.requires_grad_())
    assert tensors.cu_seqlens_q is not None
    starts = tensors.cu_seqlens_q + before
    upstream = torch.randn_like(tensors.query)
    with poisoned_memory():
        output = run(packed(views, starts), lengthened(problem, before + behind)).output
        found = torch.autograd.grad(output[:, :, before : before + total], views, upstream)
    leaves = [getattr(tensors, name) for name in LEAVES]
    expected = torch.autograd.grad(run(tensors, problem).output, leaves, upstream)
    for given, inner in zip(found, expected, strict=True):
        assert torch.equal(given[:, :, before : before + total], inner)
        assert not given[:, :, :before].any() and not given[:, :, before + total :].any()


def packed(leaves: list[torch.Tensor], starts: torch.Tensor) -> Tensors:
    """Return the tensors of a call whose queries and keys are packed alike."""
    query, key, value = leaves
    return Tensors.of(query, key, value, cu_seqlens_q=starts, cu_seqlens_k=starts)


def lengthened(problem: AttentionProblem, more: int) -> AttentionProblem:
    """Return a problem with more tokens, of no sequence."""
    return replace(problem, len_q=problem.len_q + more, len_k=problem.len_k + more)


def test_gradients_of_a_sequence_alone_are_those_in_a_batch() -> None:
    problem, tensors = made({"batch": 2, "len_q": 150, "batch_invariant": True})
    upstream = torch.randn_like(tensors.query)
    read = [getattr(tensors, name) for name in LEAVES]
    together = torch.autograd.grad(run(tensors, problem).output, read, upstream)
    read = [item.detach()[1:].requires_grad_() for item in read]
    single = with_tensors(tensors, **dict(zip(LEAVES, read, strict=True)))
    output = run(single, replace(problem, batch=1)).output
    alone = torch.autograd.grad(output, read, upstream[1:])
    assert all(torch.equal(both[1:], one) for both, one in zip(together, alone, strict=True))


def test_gradients_of_a_sequence_alone_are_those_among_others() -> None:
    how: dict[str, Any] = TO_END | {"batch_invariant": True}
    problem, tensors = made(how | {"lengths_q": (70, 200, 17), "lengths_k": (70, 200, 30)})
    upstream = torch.randn_like(tensors.query)
    leaves = [getattr(tensors, name) for name in LEAVES]
    together = torch.autograd.grad(run(tensors, problem).output, leaves, upstream)
    own = slice(70, 270)
    alone, _ = made(how | {"lengths_q": (200,)})
    read = [item.detach()[:, :, own].contiguous().requires_grad_() for item in leaves]
    given = packed(read, torch.tensor([0, 200], dtype=torch.int32))
    single = torch.autograd.grad(run(given, alone).output, read, upstream[:, :, own])
    for both, one in zip(together, single, strict=True):
        assert torch.equal(both[:, :, own], one)


@pytest.mark.parametrize(
    "starts",
    [(0, 400, 90, 600, 600), (-200, 900, 400, 0, 900), (600, 300, 200, 100, 0), (999,) * 5],
    ids=str,
)
def test_starts_that_nobody_has_checked_do_no_harm(starts: tuple[int, ...]) -> None:
    """On a GPU nobody reads them; a simulated access outside fails, and a wait without end."""
    problem, tensors = made({"lengths_q": (100, 200, 300, 0)})
    wrong = torch.tensor(starts, dtype=torch.int32)
    given = packed([getattr(tensors, name) for name in LEAVES], wrong)
    output = run(given, problem).output.nan_to_num()
    gradients_of(Result(output=output), given)


@pytest.mark.parametrize(
    ("values", "is_aligned"),
    [
        ({"len_q": 250}, True),
        ({"is_causal": True, "len_q": 250}, True),
        ({"is_causal": True, "len_q": 250, "has_alibi": True}, False),
        ({"len_q": 250, "has_alibi": True}, True),
        (TO_END | {"len_q": 128, "len_k": 192}, True),
        (TO_END | {"len_q": 120, "len_k": 192}, False),
        ({"window": (-1, 64), "len_q": 250}, True),
        ({"window": (-1, 60), "len_q": 250}, False),
        ({"window": (64, -1), "len_q": 250}, False),
        ({"lengths_q": (70, 80), "is_causal": True}, True),
        (TO_END | {"lengths_q": (70, 80), "lengths_k": (80, 90)}, False),
    ],
    ids=str,
)
def test_where_only_the_first_tile_has_hidden_keys(
    values: dict[str, Any], is_aligned: bool
) -> None:
    problem, _ = made(values)
    variant = choose_gradients(problem)
    assert variant.is_split and variant.is_aligned == is_aligned
    assert not variant.is_ordered
    assert all(number < 2**31 for number in split_numbers_of(problem, variant, 0, 1))


@pytest.mark.parametrize(
    ("columns", "tile"),
    [((64, 64), (64, 64)), ((72, 40), (128, 128)), ((136, 136), (256, 256)),
     ((192, 128), (256, 128)), ((64, 256), (128, 256))],
)  # fmt: skip
def test_columns_of_tiles(columns: tuple[int, int], tile: tuple[int, int]) -> None:
    problem = make_problem(
        head_dim=columns[0], value_dim=columns[1], precision=Precision.BF16, requires_grad=True
    )
    variant = choose_gradients(problem)
    assert (variant.block_d, variant.block_v) == tile
