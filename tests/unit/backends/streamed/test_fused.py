"""Weights made where scores are: device code in Gluon run on a CPU, against the oracle."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.backends.simulation import World, bound, device_code

from adaattn.backends import streamed
from adaattn.backends.interface import Tensors
from adaattn.backends.streamed import chunks, executor, fused_launch, fused_rules
from adaattn.backends.streamed.fused_launch import Variant, boxes
from adaattn.backends.streamed.fused_rules import is_fused
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, Launch, MaskKind, Precision
from adaattn.testing import (
    Layout,
    assert_executor_matches,
    assert_training_matches,
    make_problem,
    make_tensors,
    poisoned_memory,
    with_tensors,
)

FILES = ("device/barriers", "device/stages", "streamed/fused")

TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
CAUSAL: dict[str, Any] = {"len_q": 300, "is_causal": True}
GROUPS: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_kv_heads": 2}


class Machine:
    """Stands for the compiled kernel, and counts its launches."""

    def __init__(self) -> None:
        self.others: dict[str, Any] = {}
        self.launched = 0

    def replace(self, name: str, remake: Callable[[Any], Any]) -> None:
        """Have what is made of a function of the source run in its place, from now on."""
        self.others[name] = remake(device_code(FILES)[name])
        executor._launcher.cache_clear()

    def __call__(self, variant: Variant, device: torch.device) -> Any:
        compiled = pytest.importorskip("adaattn.backends.streamed.fused_compiled")
        space = device_code(FILES)
        space.update(self.others)
        bind = bound(space["weights"], compiled.constants_of(variant), boxes(variant.kind))

        def counted(views: Any) -> Callable[..., None]:
            launch = bind(views)

            def count(*given: Any) -> None:
                self.launched += 1
                launch(*given)

            return count

        return counted


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(fused_launch, "_compiled", machine)
    monkeypatch.setattr(fused_launch, "_address", lambda tensor: tensor)
    monkeypatch.setattr(fused_rules, "_is_on_hopper", lambda problem: True)
    for kept in (executor._launcher, chunks._size):
        kept.cache_clear()
    yield machine
    for kept in (executor._launcher, chunks._size):
        kept.cache_clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have asynchronous work done as late as it may be, and everything take some time."""
    monkeypatch.setattr(World, "is_late", True)
    random.seed(0)
    yield


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors, HeadGroup]:
    """Return a problem, its tensors, and how it is computed."""
    values = {"precision": Precision.BF16, "head_dim": 264, "value_dim": 16, "len_q": 70,
              "len_k": 300, "num_heads": 1, "aux": Aux.LSE} | values  # fmt: skip
    if values.get("is_causal") and values.get("align") is None:
        values["len_k"] = values["len_q"]
    if values.get("requires_grad"):
        values.pop("aux")
    rows, loud = values.pop("chunk_rows", 0), values.pop("loud", None)
    layout = values.pop("layout", None)
    problem = make_problem(**values)
    tensors = make_tensors(problem, **({} if layout is None else {"layout": layout}))
    if loud is not None:
        key = tensors.key.clone()
        key[:, :, loud] *= 300.0
        tensors = with_tensors(tensors, key=key)
    group = HeadGroup(capability="streamed", launch=Launch(chunk_rows=rows))
    return problem, tensors, group


def hold(values: dict[str, Any]) -> None:
    """Raise AssertionError unless results, or gradients, are right."""
    problem, tensors, group = made(values)
    compare = assert_training_matches if problem.requires_grad else assert_executor_matches
    with poisoned_memory():
        compare(partial(streamed.run, group=group), tensors, problem)


FIRST_KEYS = slice(0, 50)
LAST_KEYS = slice(-50, None)

SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "one block of keys": {"len_k": 128},
    "whole tiles": {"len_q": 256, "len_k": 256, "head_dim": 512},
    "columns of one copy": {"head_dim": 64, "value_dim": 264, "len_k": 272},
    "causal": CAUSAL,
    "causal, some keys before": {"len_q": 130, "len_k": 397, **TO_END},
    "causal, rows that see nothing": {"len_q": 300, "len_k": 140, **TO_END},
    "causal, from the first key on": {"len_q": 300, "len_k": 140, "is_causal": True,
                                      "align": Align.TOP_LEFT},
    "grouped heads": GROUPS,
    "grouped heads, causal": GROUPS | {"len_q": 200, "is_causal": True},
    "a group whose rows are no multiple of a tile": GROUPS | {"len_q": 150, "is_causal": True},
    "chunks": {"len_q": 300, "len_k": 300, "chunk_rows": 100, "num_heads": 2},
    "chunks, causal": CAUSAL | {"chunk_rows": 128, "num_heads": 2},
    "memory of other order": GROUPS | {"layout": Layout.TRANSPOSED, "chunk_rows": 30},
    "no statistics": {"aux": Aux.NONE},
    "later scores beyond every reference": {"loud": FIRST_KEYS},
    "the same, causal": CAUSAL | {"loud": FIRST_KEYS},
    "the same in some lines": {"len_q": 260, "len_k": 300, "loud": FIRST_KEYS, "num_heads": 2},
    "keys far above the others, not seen": {"len_q": 140, "len_k": 140, "is_causal": True,
                                            "loud": LAST_KEYS},
    "training": {"requires_grad": True, "len_q": 130, "len_k": 200},
    "training, causal": {"requires_grad": True, **CAUSAL, "chunk_rows": 128},
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_it_matches_the_definition(name: str, machine: Machine) -> None:
    hold(SERVED[name])
    assert machine.launched


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.usefixtures("late")
def test_nothing_is_read_or_written_too_early(name: str) -> None:
    hold(SERVED[name])


UNSERVED: dict[str, dict[str, Any]] = {
    "half precision has too few exponents": {"precision": Precision.FP16},
    "more columns than registers": {"head_dim": 520},
    "columns that TMA cannot copy": {"head_dim": 260},
    "few keys": {"len_k": 100},
    "more values than keys": {"value_dim": 304},
    "a window": CAUSAL | {"window": (20, -1)},
    "a mask": {"mask": MaskKind.BOOLEAN},
    "softcap": {"softcap": 2.0},
    "sinks": {"has_sinks": True},
    "slopes": {"has_alibi": True},
    "a dilation": {"dilation": 2},
    "a negative scale": {"scale": -0.1},
    "the maximum of rows": {"aux": Aux.ROW_MAX},
    "entropy": {"aux": Aux.ENTROPY},
}


@pytest.mark.parametrize("name", UNSERVED)
def test_all_else_goes_the_other_way(name: str, machine: Machine) -> None:
    problem, _, _ = made({"len_k": 300} | UNSERVED[name])
    assert not is_fused(problem)
    hold(UNSERVED[name])
    assert not machine.launched


def test_what_tma_cannot_read_goes_the_other_way(machine: Machine) -> None:
    problem, tensors, group = made({})
    shifted = torch.empty(tensors.key.numel() + 1, dtype=tensors.key.dtype)[1:]
    key = shifted.view_as(tensors.key).copy_(tensors.key)
    assert_executor_matches(
        partial(streamed.run, group=group), with_tensors(tensors, key=key), problem
    )
    assert not machine.launched


def test_another_layout_of_the_same_shapes_is_launched_anew(machine: Machine) -> None:
    problem, tensors, group = made(GROUPS)
    run = partial(streamed.run, group=group)
    assert_executor_matches(run, tensors, problem)
    others = with_tensors(
        tensors,
        **{
            name: getattr(tensors, name).transpose(1, 2).contiguous().transpose(1, 2)
            for name in ("query", "key", "value")
        },
    )
    assert_executor_matches(run, others, problem)
    assert machine.launched
