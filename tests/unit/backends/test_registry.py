"""A new executor is what it declares and what it runs: nothing else of the library changes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import adaattn
from adaattn import hardware
from adaattn.backends import Result, Tensors, capabilities, capability_named, load, register
from adaattn.backends.interface import Direct
from adaattn.backends.keys_values import KeysValues, PackedKeysValues
from adaattn.backends.reference import attention
from adaattn.errors import ArgumentError, UnsupportedError
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Cell,
    Feature,
    HeadGroup,
    KVKind,
    Measured,
    TimingTable,
)
from adaattn.spec.evidence import problem_class
from adaattn.testing import assert_matches, fake_facts

LONGEST = 64


def _short(problem: AttentionProblem) -> str:
    """Say why a problem is too long for the toy."""
    return "" if problem.len_k <= LONGEST else f"it takes up to {LONGEST} keys, got {problem.len_k}"


TOY = Capability(
    name="toy.softmax",
    backend="toy",
    features=Feature.CAUSAL_TOP_LEFT | Feature.BACKWARD | Feature.SOFTCAP,
    max_head_dim=32,
    rules=(_short,),
    chunk_rows=lambda problem, memory_budget_bytes: 16,
)


class Toy:
    """An executor that notes what it was given."""

    def __init__(self) -> None:
        self.runs: list[HeadGroup] = []

    def run(self, tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        self.runs.append(group)
        return attention(tensors, problem)

    def bind(self, problem: AttentionProblem, group: HeadGroup) -> Direct | None:
        if problem.requires_grad:
            return None

        def run(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
        ) -> torch.Tensor:
            tensors = Tensors.of(query, key, value, mask=mask)
            return self.run(tensors, problem, group).output

        return run


@pytest.fixture(params=["with a short function", "without"])
def toy(request: pytest.FixtureRequest) -> Iterator[Toy]:
    """Register the toy for one test."""
    made = Toy()
    remove = register([TOY], made.run, made.bind if request.param != "without" else None)
    yield made
    remove()
    hardware.clear_cache()
    assert TOY not in capabilities()


def draw(length: int = 32, *, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 16, requires_grad=grad) for _ in range(3)]


def plain(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)


def test_it_serves_who_asks_for_it_by_either_name(toy: Toy) -> None:
    tensors = draw()
    exact = plain([item.double() for item in tensors])
    for backend in ("toy", "toy.softmax"):
        output = adaattn.scaled_dot_product_attention(*tensors, is_causal=True, backend=backend)
        assert_matches(output, exact, plain(tensors), summands=32)
    assert len(toy.runs) == 2
    assert {group.launch.chunk_rows for group in toy.runs} == {16}


def test_it_trains(toy: Toy) -> None:
    tensors = draw(grad=True)
    output = adaattn.scaled_dot_product_attention(*tensors, is_causal=True, backend="toy")
    actual = torch.autograd.grad(output.square().sum(), tensors)
    wide = [item.detach().double().requires_grad_() for item in tensors]
    exact = torch.autograd.grad(plain(wide).square().sum(), wide)
    eager = torch.autograd.grad(plain(tensors).square().sum(), tensors)
    for found, right, yardstick in zip(actual, exact, eager, strict=True):
        assert_matches(found, right, yardstick, summands=32)


def test_what_it_cannot_do_is_said_in_its_own_words(toy: Toy) -> None:
    with pytest.raises(UnsupportedError) as caught:
        adaattn.scaled_dot_product_attention(*draw(65), window=(3, 0), backend="toy")
    assert caught.value.reasons == (
        "toy.softmax: it does not support a sliding window",
        "toy.softmax: it takes up to 64 keys, got 65",
    )
    assert not toy.runs


def test_it_is_weighed_and_not_chosen_while_nobody_measured_it(toy: Toy) -> None:
    decision = adaattn.plan_attention(*draw(), is_causal=True)
    assert decision.plan.groups[0].capability == "sdpa.flash"
    (entry,) = [entry for entry in decision.trace if entry.executor == "toy.softmax"]
    assert not entry.accepted and entry.cost is not None
    adaattn.scaled_dot_product_attention(*draw(), is_causal=True)
    assert not toy.runs


@pytest.mark.parametrize(("toy_ms", "chosen"), [(0.5, "toy.softmax"), (0.97, "sdpa.flash")])
def test_a_measured_time_alone_lets_it_win(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, toy_ms: float, chosen: str
) -> None:
    with adaattn.record_events(lambda event: problems.append(event.problem)):
        problems: list[AttentionProblem] = []
        adaattn.scaled_dot_product_attention(*draw(), is_causal=True)
    (problem,) = problems
    cell = Cell(
        problem_class=problem_class(problem),
        heads=2,
        group_size=1,
        len_q=32,
        len_k=32,
        head_dim=16,
        visible=16.5,
        times={
            "sdpa.flash": Measured(device_ms=1.0, host_ms=1.0),
            "toy.softmax": Measured(device_ms=toy_ms, host_ms=toy_ms),
        },
        default="sdpa.flash",
    )
    table = TimingTable(source="a test", cells={cell.problem_class: (cell,)})
    facts = replace(fake_facts("cpu"), timings=table)
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    hardware.clear_cache()
    decision = adaattn.plan_attention(*draw(), is_causal=True)
    assert decision.plan.groups[0].capability == chosen
    adaattn.scaled_dot_product_attention(*draw(), is_causal=True)
    assert len(toy.runs) == (chosen == "toy.softmax")


def test_a_name_is_taken_once(toy: Toy) -> None:
    with pytest.raises(ArgumentError, match="name of an executor: expected a new one, got 'toy"):
        register([TOY], toy.run)
    assert load("toy.softmax") == toy.run
    assert capability_named("toy.softmax") is TOY


@pytest.mark.parametrize("kinds", [(KVKind.DENSE,), tuple(KVKind)], ids=str)
def test_keys_and_values_come_as_a_kind_that_it_takes(kinds: tuple[KVKind, ...]) -> None:
    given: list[KeysValues] = []

    def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
        given.append(tensors.kv)
        return attention(tensors, problem)

    remove = register([replace(TOY, kv_kinds=kinds)], run)
    starts = torch.tensor([0, 12, 32], dtype=torch.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    try:
        adaattn.scaled_dot_product_attention(*draw(), backend="toy")
        if KVKind.PACKED in kinds:
            adaattn.scaled_dot_product_attention(*draw(), backend="toy", **packed)
        else:
            with pytest.raises(UnsupportedError, match="it does not support packed sequences"):
                adaattn.scaled_dot_product_attention(*draw(), backend="toy", **packed)
    finally:
        remove()
    assert [kv.kind for kv in given] == list(kinds)
    for kv in given:
        if isinstance(kv, PackedKeysValues):
            assert kv.cu_seqlens is starts and kv.bounds == (0, 12, 32)
