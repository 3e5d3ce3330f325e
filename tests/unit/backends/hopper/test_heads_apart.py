"""Gradients of grouped heads that have blocks of keys of their own, and when they do."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.hopper.gradient_launch import choose_gradients
from adaattn.backends.hopper.gradient_numbers import numbers_of
from adaattn.backends.interface import Tensors
from adaattn.spec import Align, AttentionProblem, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    assert_training_matches,
    make_problem,
    make_tensors,
    with_tensors,
)

run = partial(hopper.run, group=HeadGroup(capability="hopper"))

GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "requires_grad": True}
CASES: dict[str, dict[str, Any]] = {
    "full": {"batch": 2, "len_q": 70, "len_k": 150},
    "causal": {"len_q": 140, "is_causal": True},
    "causal, whole blocks": {"len_q": 256, "is_causal": True},
    "one key head": {"num_heads": 3, "num_kv_heads": 1, "len_q": 64, "len_k": 40},
    "to the end": {"len_q": 70, "len_k": 300, "is_causal": True, "align": Align.BOTTOM_RIGHT},
    "keys that no row sees": {"len_q": 64, "len_k": 300, "is_causal": True},
    "in a window": {"len_q": 140, "window": (70, 20)},
    "mask": {"len_q": 512, "mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 512, 512)},
    "values of other columns": {"len_q": 70, "len_k": 140, "value_dim": 40},
    "all else": {
        "batch": 2, "len_q": 65, "len_k": 130, "softcap": 3.0, "has_alibi": True,
        "has_sinks": True, "sinks_require_grad": True, "window": (90, -1),
    },
}  # fmt: skip


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem of grouped heads, and its tensors."""
    problem = make_problem(**GROUPS | {"precision": Precision.BF16, "head_dim": 64} | values)
    tensors = make_tensors(problem)
    if problem.has_alibi:
        slopes = torch.rand(problem.batch, problem.num_heads)
        tensors = with_tensors(tensors, alibi_slopes=slopes)
    return problem, tensors


@pytest.mark.usefixtures("simulated", "apart")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [*((name, 64) for name in CASES), *((name, 128) for name in CASES if name != "mask"),
     ("full", 80), ("all else", 80)],
)  # fmt: skip
def test_gradients_are_those_of_the_definition(
    name: str, head_dim: int, deterministic: bool
) -> None:
    problem, tensors = made({"head_dim": head_dim, "deterministic": deterministic} | CASES[name])
    variant = choose_gradients(problem)
    assert variant.heads_apart and variant.is_ordered == deterministic
    assert variant.is_aligned == (name == "causal, whole blocks" and not deterministic)
    assert_training_matches(run, tensors, problem)


FIVE: dict[str, Any] = {"num_heads": 5, "num_kv_heads": 1, "deterministic": True}


def are_the_same_each_time(values: dict[str, Any]) -> bool:
    """Return whether all gradients are those of the first run in three more.

    Heads are alike in pairs of opposite upstream gradients, all but the last: their sums are near
    0 beside what is added, and its rounding is seen.
    """
    problem, tensors = made(FIVE | values)
    query = tensors.query.detach()[:, :1].expand(tensors.query.shape).clone().requires_grad_()
    tensors = with_tensors(tensors, query=query)
    output = run(tensors, problem).output
    upstream = torch.randn_like(output)
    upstream[:, 2:4] = -upstream[:, :2]
    leaves = (tensors.query, tensors.key, tensors.value)
    first, *more = (
        torch.autograd.grad(output, leaves, upstream, retain_graph=True) for _ in range(4)
    )
    return all(all(map(torch.equal, first, other)) for other in more)


IN_ORDER = [{"len_q": 64, "len_k": 140}, {"len_q": 64, "len_k": 40, "head_dim": 128}]


@pytest.mark.usefixtures("simulated", "apart", "late", "together")
@pytest.mark.parametrize("values", IN_ORDER, ids=str)
def test_in_a_fixed_order_they_are_the_same_each_time(values: dict[str, Any]) -> None:
    assert are_the_same_each_time(values)


FAULTS = {
    "heads not awaited": ("await_number", "turn < due", "turn < 0"),
    "the head before that": ("gradient_adder", "gl.to_tensor(0), c.heads_before",
                             "gl.to_tensor(0), c.heads_before - 1"),
    "told before it is there": ("pass_on", "wait_for_writes()", "pass"),
}  # fmt: skip


@pytest.mark.usefixtures("apart", "late", "together")
@pytest.mark.parametrize(
    ("name", "values"),
    [*((name, IN_ORDER[0]) for name in FAULTS), ("heads not awaited", IN_ORDER[1])],
    ids=str,
)
def test_a_fault_in_their_order_is_seen(
    name: str, values: dict[str, Any], simulated: Any, rewritten: Callable[..., Any]
) -> None:
    function, old, new = FAULTS[name]
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with suppress(TimeoutError):
        assert not all(are_the_same_each_time(values) for _ in range(8))


LLAMA: dict[str, Any] = GROUPS | {"num_heads": 32, "num_kv_heads": 8, "precision": Precision.BF16}
FASTER: dict[str, dict[str, Any]] = {
    "few blocks": {"len_q": 512},
    "two rounds, the second half empty": {"len_q": 3072, "head_dim": 128},
    "the longest block long": {"len_q": 4096, "is_causal": True},
    "one key head": {"len_q": 2048, "num_kv_heads": 1, "is_causal": True, "head_dim": 128},
}
SPLIT: dict[str, dict[str, Any]] = {
    "few tiles": {"len_q": 512, "window": (64, 0)},
    "few tiles, in a fixed order": {"len_q": 1024, "window": (128, 0), "deterministic": True},
    "more than 128 columns": {"len_q": 512, "head_dim": 256},
    "more, in a fixed order": {"len_q": 512, "head_dim": 256, "deterministic": True},
}
SLOWER: dict[str, dict[str, Any]] = {
    "one round": {"len_q": 2048},
    "128 columns, in a fixed order": {
        "len_q": 4096,
        "is_causal": True,
        "head_dim": 128,
        "deterministic": True,
    },
    "many sequences": {"len_q": 512, "batch": 16, "is_causal": True, "head_dim": 128},
    "a window": {"len_q": 2048, "window": (256, 0)},
    "heads alone": {"len_q": 512, "num_kv_heads": 32},
    "packed": {"lengths_q": (400, 112)},
    "any batch alike": {"len_q": 512, "batch_invariant": True},
}


@pytest.mark.parametrize("name", [*FASTER, *SPLIT, *SLOWER])
def test_heads_share_blocks_as_was_fastest_on_a_card(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured (`gradients_ways_h200.json`, `gradients_placed_h200.json`), or where nothing is
    summed by head."""
    monkeypatch.undo()
    problem = make_problem(**LLAMA | {"head_dim": 64} | (FASTER | SPLIT | SLOWER)[name])
    variant = choose_gradients(problem)
    assert variant.heads_apart == (name in FASTER) and variant.is_split == (name in SPLIT)


IN_ORDER: dict[str, Any] = {"deterministic": True}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_kv_heads": 8, "len_q": 32768}, (8, 0, 0)),
        ({"len_q": 32768}, (2, 0, 0)),
        (IN_ORDER | {"batch": 8, "len_q": 2048}, (8, 248, 28)),
        (IN_ORDER | {"batch": 8, "len_q": 2048, "is_causal": False}, (16, 0, 0)),
        (IN_ORDER | {"batch": 8, "len_q": 2048, "batch_invariant": True}, (29, 0, 0)),
        (IN_ORDER | {"len_q": 16384}, (4, 28, 4)),
        (IN_ORDER | {"len_q": 32768}, (2, 30, 2)),
        (IN_ORDER | {"len_q": 65536}, (16, 0, 0)),
        (IN_ORDER | {"len_q": 32768, "head_dim": 128, "num_heads": 16}, (2, 14, 1)),
        (IN_ORDER | {"lengths_q": (32768,), "head_dim": 128, "num_heads": 16}, (16, 0, 0)),
        (IN_ORDER | {"len_q": 65536, "head_dim": 128, "num_heads": 16}, (16, 0, 0)),
        (IN_ORDER | {"len_q": 32768, "num_heads": 2}, (1, 1, 1)),
        ({"batch_invariant": True, "len_q": 32768}, (16, 0, 0)),
        ({"batch_invariant": True, "len_q": 32768, "head_dim": 128, "num_heads": 16}, (16, 0, 0)),
        (IN_ORDER | {"len_q": 32768, "num_heads": 1}, (1, 0, 0)),
        (IN_ORDER | {"len_q": 16384, "head_dim": 128, "num_heads": 16}, (4, 12, 2)),
        (IN_ORDER | {"batch": 8, "len_q": 2048, "num_kv_heads": 8}, (16, 0, 0)),
        (IN_ORDER | {"len_q": 32768, "num_kv_heads": 8}, (4, 0, 0)),
        (IN_ORDER | {"lengths_q": (8192, 8192)}, (8, 24, 8)),
        (
            IN_ORDER | {"len_q": 16384, "num_sequences": 4, "max_len_q": 16384, "max_len_k": 16384},
            (8, 24, 8),
        ),
        (IN_ORDER | {"len_q": 2048, "batch": 2, "head_dim": 128}, (8, 56, 19)),
        ({"batch": 2, "len_q": 2048, "head_dim": 128, "num_heads": 10}, (20, 0, 0)),
        ({"len_q": 4096, "head_dim": 128, "num_heads": 12}, (12, 0, 0)),
        (IN_ORDER | {"len_q": 8192, "head_dim": 128, "is_causal": False}, (4, 0, 0)),
        (IN_ORDER | {"len_q": 1024, "head_dim": 128, "is_causal": False}, (16, 0, 0)),
        ({"len_q": 8192, "head_dim": 128, "is_causal": False}, (2, 0, 0)),
        (
            IN_ORDER
            | {"len_q": 8192, "head_dim": 128, "is_causal": False}
            | {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 8192, 8192)},
            (4, 0, 0),
        ),
        (
            IN_ORDER
            | {"len_q": 16384, "head_dim": 128, "is_causal": False}
            | {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 16384, 16384)},
            (1, 0, 0),
        ),
        (IN_ORDER | {"lengths_q": (16384,), "is_causal": False, "head_dim": 128}, (1, 0, 0)),
        (IN_ORDER | {"len_q": 8192, "is_causal": False, "window": (6000, -1)}, (4, 0, 0)),
    ],
    ids=str,
)
def test_heads_are_worked_on_in_the_order_that_was_fastest(
    values: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """How many together, how many ascend, and how many of those together."""
    usual = {"head_dim": 64, "num_heads": 32, "is_causal": True, "precision": Precision.BF16}
    problem = make_problem(**usual | {"requires_grad": True} | values)
    variant = choose_gradients(problem)
    assert variant.is_grouped == ("num_kv_heads" in values)
    assert numbers_of(problem, variant, 0)[-5:-2] == expected


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are written for compute capability 9.0",
)
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("name", CASES)
def test_on_a_card_too(name: str, head_dim: int, deterministic: bool) -> None:
    kind = {"head_dim": head_dim, "device_type": "cuda", "deterministic": deterministic}
    problem, tensors = made(kind | CASES[name])
    if tensors.alibi_slopes is not None:
        tensors = with_tensors(tensors, alibi_slopes=tensors.alibi_slopes.cuda())
    assert choose_gradients(problem).heads_apart
    assert_training_matches(run, tensors, problem)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are written for compute capability 9.0",
)
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_card_they_are_the_same_in_100_repeats(head_dim: int) -> None:
    kind = {"device_type": "cuda", "head_dim": head_dim, "deterministic": True, "is_causal": True}
    problem, tensors = made(kind | {"num_heads": 32, "num_kv_heads": 8, "len_q": 1000})
    output = run(tensors, problem).output
    upstream = torch.randn_like(output)
    leaves = (tensors.query, tensors.key, tensors.value)
    first, *more = (
        torch.autograd.grad(output, leaves, upstream, retain_graph=True) for _ in range(101)
    )
    assert all(all(map(torch.equal, first, other)) for other in more)


@pytest.mark.parametrize(
    ("values", "is_ordered"),
    [
        ({"head_dim": 128, "batch": 32, "len_q": 512}, True),
        ({"head_dim": 128, "batch": 32, "len_q": 512, "num_kv_heads": 4}, True),
        ({"head_dim": 128, "batch": 16, "len_q": 1024, "window": (127, 0)}, True),
        ({"head_dim": 64, "batch": 32, "len_q": 512}, True),
        ({"head_dim": 64, "batch": 16, "len_q": 1024}, True),
        ({"head_dim": 64, "batch": 16, "len_q": 1024, "is_causal": False}, False),
        ({"head_dim": 64, "batch": 32, "len_q": 512, "has_alibi": True}, True),
        ({"head_dim": 64, "batch": 32, "len_q": 1024, "has_alibi": True}, False),
        ({"head_dim": 128, "batch": 32, "len_q": 1024, "len_k": 512}, False),
        ({"head_dim": 128, "batch": 32, "len_q": 512, "num_kv_heads": 1}, False),
        ({"head_dim": 128, "batch": 256, "len_q": 64}, False),
        ({"head_dim": 128, "batch": 8, "len_q": 2048}, True),
        ({"head_dim": 128, "batch": 8, "len_q": 2048, "has_alibi": True}, False),
        ({"head_dim": 128, "batch": 8, "len_q": 2048, "window": (1000, 0)}, False),
        (
            {"head_dim": 128, "batch": 8, "len_q": 2048, "is_causal": False, "window": (-1, 9)},
            False,
        ),
        ({"head_dim": 128, "batch": 32, "len_q": 2048, "num_kv_heads": 4}, False),
        ({"head_dim": 128, "batch": 8, "len_q": 2049}, False),
        ({"head_dim": 128, "batch": 4, "len_q": 4096}, False),
        ({"head_dim": 128, "batch": 2, "len_q": 16384}, False),
        ({"head_dim": 128, "batch": 31, "len_q": 512}, False),
        ({"head_dim": 128, "batch": 32, "len_q": 512, "mask": MaskKind.BOOLEAN}, False),
        ({"head_dim": 256, "batch": 32, "len_q": 512}, False),
    ],
)
def test_sums_have_a_fixed_order_where_that_is_faster(
    values: dict[str, Any], is_ordered: bool
) -> None:
    sizes = {"num_heads": 16, "is_causal": True, "precision": Precision.BF16, **values}
    assert choose_gradients(make_problem(**sizes)).is_ordered == is_ordered


def test_packed_sequences_have_none_unasked() -> None:
    sizes = {"head_dim": 128, "num_heads": 256, "precision": Precision.BF16}
    assert choose_gradients(make_problem(len_q=1024, **sizes)).is_ordered
    assert not choose_gradients(make_problem(lengths_q=[512, 512], **sizes)).is_ordered
