"""Weights made where scores are: device code in Gluon run on a CPU, against the oracle."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.backends import simulation
from tests.unit.backends.simulation import bound, device_code

from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import streamed
from adaattn.backends.allocation import output_like, unfilled
from adaattn.backends.interface import Tensors
from adaattn.backends.streamed import chunks, executor, fused_launch, fused_rules, gradients, planes
from adaattn.backends.streamed.fused_launch import Kind, Variant, boxes
from adaattn.backends.streamed.fused_rules import is_fused
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, Launch, MaskKind, Precision
from adaattn.testing import (
    Layout,
    assert_executor_matches,
    assert_matches,
    assert_training_matches,
    fake_facts,
    gradients_of,
    make_problem,
    make_tensors,
    poisoned_memory,
    with_tensors,
)

FILES = ("device/barriers", "device/stages", "streamed/fused")

TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
CAUSAL: dict[str, Any] = {"len_q": 300, "is_causal": True}
GROUPS: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_kv_heads": 2}


def forget() -> None:
    """Have nothing kept of what was bound to other kernels."""
    for kept in (executor._launcher, gradients.backward_of):
        kept.cache_clear()


late = simulation.late


class Machine:
    """Stands for the compiled kernel, and counts its launches."""

    def __init__(self) -> None:
        self.others: dict[str, Any] = {}
        self.launched: list[Kind] = []

    def replace(self, name: str, remake: Callable[[Any], Any]) -> None:
        """Have what is made of a function of the source run in its place, from now on."""
        self.others[name] = remake(device_code(FILES)[name])
        forget()

    def __call__(self, variant: Variant, device: torch.device) -> Any:
        compiled = pytest.importorskip("adaattn.backends.streamed.fused_compiled")
        space = device_code(FILES)
        space.update(self.others)
        bind = bound(space["weights"], compiled.constants_of(variant), boxes(variant.kind))

        def counted(views: Any) -> Callable[..., None]:
            launch = bind(views)

            def count(*given: Any) -> None:
                self.launched.append(variant.kind)
                launch(*given)

            return count

        return counted


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(fused_launch, "_compiled", machine)
    monkeypatch.setattr(fused_launch, "address_of", lambda tensor: tensor)
    monkeypatch.setattr(fused_rules, "_LEAST_LINES", 1)
    monkeypatch.setattr(fused_rules, "_is_on_hopper", lambda device: True)
    forget()
    yield machine
    forget()


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
    loud_rows = values.pop("loud_rows", None)
    problem = make_problem(**values)
    tensors = make_tensors(problem, **({} if layout is None else {"layout": layout}))
    if loud_rows is not None:
        query = tensors.query.clone()
        query[:, :, loud_rows] *= 300.0
        tensors = with_tensors(tensors, query=query)
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


def hold_quiet_rows() -> None:
    """Raise AssertionError unless rows are right whose block is computed again for others."""
    problem, tensors, group = made({"len_q": 260, "loud_rows": slice(64, 128), "num_heads": 2})
    given = tensors.query, tensors.key, tensors.value
    quiet = [*range(64), *range(128, 260)]
    with poisoned_memory():
        found = streamed.run(tensors, problem, group).output[:, :, quiet]
    exact = attend(*(it.double() for it in given), backend="reference")[:, :, quiet]
    eager = attend(*given, backend="reference")[:, :, quiet]
    assert_matches(found, exact, eager, summands=problem.len_k + problem.head_dim)


FIRST_KEYS = slice(0, 50)
LAST_KEYS = slice(-50, None)

NOT_SEEN: dict[str, Any] = {"len_q": 140, "len_k": 397, "loud": slice(385, None)}
"""Only the last row of the first tile sees the last block of keys, of which its first."""

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
    "the same in some lines": {"len_q": 260, "loud_rows": slice(64, 128), "num_heads": 2},
    "the same, of a group whose heads end in a tile": GROUPS | TO_END | {
        "len_q": 300, "len_k": 250, "loud": FIRST_KEYS},
    "keys far above the others, not seen": {"len_q": 140, "len_k": 140, "is_causal": True,
                                            "loud": LAST_KEYS},
    "as many columns as there may be": {"head_dim": 576, "len_q": 20, "len_k": 700},
    "training": {"requires_grad": True, "len_q": 130, "len_k": 200},
    "training, as many columns as there may be": {"requires_grad": True, "len_q": 20,
                                                  "len_k": 700, "value_dim": 576},
    "training, causal": {"requires_grad": True, **CAUSAL, "chunk_rows": 128},
    "keys far above the others, not seen by all": TO_END | NOT_SEEN,
    "training, rows that see nothing": TO_END | {"requires_grad": True, "len_q": 300,
                                                 "len_k": 140},
    "chunks without keys": TO_END | {"len_q": 300, "len_k": 140, "chunk_rows": 100},
    "training, chunks without keys": TO_END | {"requires_grad": True, "len_q": 300, "len_k": 140,
                                               "chunk_rows": 100},
    "training, grouped heads": GROUPS | {"requires_grad": True, "len_q": 150, "is_causal": True},
    "training, memory of other order": GROUPS | {"requires_grad": True,
                                                 "layout": Layout.TRANSPOSED},
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_it_matches_the_definition(name: str, machine: Machine) -> None:
    hold(SERVED[name])
    kinds = set(machine.launched)
    assert kinds == (set(Kind) if SERVED[name].get("requires_grad") else {Kind.SUMS})


def test_rows_beside_some_that_are_computed_again_are_as_right() -> None:
    hold_quiet_rows()


def test_keys_behind_the_last_that_are_not_hidden_again_are_seen(
    machine: Machine, rewritten: Callable[..., Any]
) -> None:
    change = partial(rewritten, old="gl.to_tensor(1)", new="gl.to_tensor(0)")
    machine.replace("masked_blocks", change)
    with pytest.raises(AssertionError, match="beyond their bound"):
        hold_quiet_rows()


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.usefixtures("late")
def test_nothing_is_read_or_written_too_early(name: str) -> None:
    hold(SERVED[name])


UNSERVED: dict[str, dict[str, Any]] = {
    "half precision has too few exponents": {"precision": Precision.FP16},
    "more columns than registers": {"head_dim": 584},
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


def test_few_lines_go_the_other_way(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_rules, "_LEAST_LINES", 71)
    hold({"len_q": 70})
    hold({"len_q": 70, "requires_grad": True})
    assert not machine.launched
    hold({"len_q": 71, "requires_grad": True})
    assert set(machine.launched) == set(Kind)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that begins where TMA cannot read."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view_as(tensor).copy_(tensor)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [B, S, H, D] in memory whose rows TMA cannot read."""
    batch, heads, length, columns = tensor.shape
    memory = torch.empty(batch, length, heads, columns + 2, dtype=tensor.dtype)
    return memory[..., :columns].transpose(1, 2).copy_(tensor)


@pytest.mark.parametrize("change", [shifted, widened])
@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("trained", [False, True], ids=["forward", "training"])
def test_what_tma_cannot_read_is_copied(
    change: Callable[[torch.Tensor], torch.Tensor], name: str, trained: bool, machine: Machine
) -> None:
    problem, tensors, group = made(GROUPS | ({"requires_grad": True} if trained else {}))
    tensors = with_tensors(tensors, **{name: change(getattr(tensors, name).detach())})
    if trained:
        getattr(tensors, name).requires_grad_()
    compare = assert_training_matches if trained else assert_executor_matches
    compare(partial(streamed.run, group=group), tensors, problem)
    assert set(machine.launched) == (set(Kind) if trained else {Kind.SUMS})


def test_gradients_lie_as_what_they_are_of() -> None:
    problem, tensors, group = made(GROUPS | {"requires_grad": True})
    query = widened(tensors.query.detach()).requires_grad_()
    tensors = with_tensors(tensors, query=query)
    output = streamed.run(tensors, problem, group).output
    (found,) = torch.autograd.grad(output.sum(), query)
    assert found.stride() == output_like(query, query.shape[3]).stride()


@pytest.mark.parametrize("number", [float("nan"), -float("inf")])
def test_rows_that_see_nothing_are_zeros_whatever_their_queries_are(number: float) -> None:
    problem, tensors, group = made(TO_END | {"len_q": 300, "len_k": 140})
    query = tensors.query.clone()
    query[:, :, 3] = number
    found = streamed.run(with_tensors(tensors, query=query), problem, group)
    assert found.lse is not None
    assert bool((found.output[:, :, :160] == 0.0).all())
    assert bool((found.lse[:, :, :160] == -torch.inf).all())


def test_half_precision_has_fused_gradients_alone(machine: Machine) -> None:
    hold({"precision": Precision.FP16, "requires_grad": True})
    assert set(machine.launched) == {Kind.GIVEN, Kind.CHANGES}


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


FILLED: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "full": ({"len_q": 4096}, (4096, 8, 2)),
    "full, long": ({"len_q": 16384}, (16384, 2, 8)),
    "causal, few lines": ({"len_q": 2048, "is_causal": True}, (1024, 16, 2)),
    "causal": ({"len_q": 8192, "is_causal": True}, (1024, 16, 8)),
    "causal, long": ({"len_q": 16384, "is_causal": True}, (2048, 16, 8)),
    "training": ({"len_q": 4096, "requires_grad": True}, (4096, 8, 2)),
    "training, causal": ({"len_q": 2048, "is_causal": True, "requires_grad": True}, (1024, 16, 2)),
}
"""16 heads of 512 columns: the rows of a chunk, its planes, and how many chunks there are."""


@pytest.mark.parametrize("name", FILLED)
def test_chunks_fill_the_card(name: str) -> None:
    values, expected = FILLED[name]
    sizes = {"num_heads": 16, "head_dim": 512, "precision": Precision.BF16}
    problem = make_problem(**sizes, **values)
    rows = chunks.choose_chunk_rows(problem, None)
    found = list(chunks.chunks_of(problem, rows, 1))
    assert (rows, len(found[0].planes), len(found)) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"value_dim": 264},
        CAUSAL | {"value_dim": 264, "num_heads": 2, "chunk_rows": 100},
        GROUPS | {"len_q": 150, "chunk_rows": 64},
        {"len_q": 304, "len_k": 304, "is_causal": True, "chunk_rows": 101},
        CAUSAL | {"requires_grad": True, "num_heads": 2},
        GROUPS | {"requires_grad": True, "len_q": 150, "precision": Precision.FP16},
    ],
)
def test_no_more_is_allocated_than_planning_is_told(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, tensors, group = made(values)
    live, most = [0], [0]

    def noting(*given: Any, **others: Any) -> torch.Tensor:
        found = unfilled(*given, **others)
        size = found.nbytes
        live.append(live[-1] + size)
        most.append(max(most[-1], live[-1]))
        weakref.finalize(found, lambda: live.append(live[-1] - size))
        return found

    monkeypatch.setattr(fused_launch, "unfilled", noting)
    monkeypatch.setattr(planes, "unfilled", noting)
    result = streamed.run(tensors, problem, group)
    if problem.requires_grad:
        gradients_of(result, tensors)
    facts = fake_facts("h200")
    kept = chunks.overhead(problem, group, facts, 1.0).workspace_bytes
    lse = 4 * problem.batch * problem.num_heads * problem.len_q
    told = (group.launch.chunk_rows or problem.len_q) * chunks.row_bytes(problem) + lse + kept
    assert 0 < most[-1] <= told


TWO: dict[str, Any] = {"num_heads": 2}
LONG: dict[str, Any] = {"len_q": 300}
LOUD: dict[str, Any] = {"loud": FIRST_KEYS}
TRAINED: dict[str, Any] = {"requires_grad": True, "len_q": 130, "len_k": 300}

Fault = tuple[str, str, str, dict[str, Any]]

FAULTS: dict[str, Fault] = {
    "keys of the first block": ("produce", "i) * KEYS, part", "i) * 0, part", {}),
    "keys of the first columns": ("produce", "part * COLUMNS", "0 * COLUMNS", {}),
    "keys of the first plane": ("produce", "c.plane, (count - 1 - i) * KEYS, part",
                                "0, (count - 1 - i) * KEYS, part", TWO),
    "queries of the first columns": ("producer", "part * COLUMNS", "0 * COLUMNS", {}),
    "queries of the first tile": ("producer", "c.line, part", "0, part", LONG),
    "queries of one warpgroup": ("consumer", "slice(w * 64,", "slice(0,", LONG),
    "products of the first columns": ("scores", "q[part], k", "q[0], k", {}),
    "products not added up": ("scores", "use_acc=part > 0", "use_acc=part > 1", {}),
    "no scale": ("visit", "s * c.scale - gl", "s - gl", {}),
    "blocks elsewhere": ("visit", "write(c, w, p, block)", "write(c, w, p, 0)", {}),
    "no sums": ("visit", "total + sum_in_thread(p)", "total", {}),
    "sums of before": ("consumer", "visits > 0", "visits > 99", LOUD),
    "keys behind a position": ("hide", "gl.minimum(last, places)", "last", CAUSAL),
    "keys behind the last": ("hide", "c.len_k - 1", "c.len_k + 99", {}),
    "positions from 0 on": ("positions", " + c.first", "", TO_END | {"len_k": 397}),
    "positions of another head": ("positions", "lines % c.num_rows", "lines",
                                  GROUPS | {"len_q": 150, "is_causal": True}),
    "blocks that hide nothing": ("masked_blocks", "count - plain", "1 + 0 * plain",
                                 TO_END | {"len_q": 300, "len_k": 350}),
    "too few blocks": ("num_blocks", "last + c.first, 0)", "row + c.first, 0)",
                       TO_END | {"len_q": 140, "len_k": 440}),
    "blocks of a head's end": ("num_blocks", "row + LINES > c.num_rows, c.num_rows,",
                               "row + LINES > c.num_rows, row + 1,",
                               GROUPS | {"len_q": 300, "is_causal": True}),
    "written by one warpgroup": ("write", "c.line + w * 64", "c.line", LONG),
    "hidden blocks unwritten": ("consumer", "range(count, gl", "range(99, gl", CAUSAL),
    "a reference that does not serve": ("keep", "== False", "== 7", LOUD),
    "a reference far above": ("keep", "(total > LEAST_TOTAL)", "(total > -1.0)",
                              TO_END | NOT_SEEN),
    "no reference of rows that see nothing": (
        "consumer", "gl.where(reference == NO_SCORE, 0.0, reference)", "reference",
        GROUPS | TO_END | {"len_q": 300, "len_k": 250, "loud": FIRST_KEYS}),
    "another reference too small": ("visit", "gl.max(s, 1) * c.scale", "gl.max(s, 1) * 0.0", LOUD),
    "sums of another line": ("keep", "c.totals + place", "c.totals + place * 0", {}),
    "blocks of the first plane": ("weights", "of_planes * together + within % together",
                                  "of_planes * together", CAUSAL | TWO),
    "blocks of the first planes": ("weights", "of_planes * together + within",
                                   "0 * of_planes + within", TWO),
    "the first tile alone": ("weights", "within // together) * LINES", "tiles + 1) * LINES", LONG),
    "log-sum-exp of another base": ("given", "found * LOG2_E", "found", TRAINED),
    "log-sum-exp of rows that see nothing": ("given", "found == NO_SCORE", "found == 7.0",
                                             TO_END | TRAINED | {"len_q": 300, "len_k": 140}),
    "terms of another line": ("given", "c.num_lines + lines", "c.num_lines + lines * 0", TRAINED),
    "products as changes": ("change", "s - gl.expand_dims(delta, 1)", "s", TRAINED),
    "weights of the first block": ("produce", "i) * KEYS\n", "i) * 0\n", TRAINED),
    "weights of one warpgroup": ("produce", "c.line + w * 64", "c.line", TRAINED),
}  # fmt: skip

DIVISIONS: dict[str, Fault] = {
    "no division": ("divide", "found *= factor[:, None]", "found *= 1.0", {}),
    "another reference": ("divide", "log2_or_nothing(total, reference)",
                          "log2_or_nothing(total, reference * 0.0)", {}),
    "another head": ("divide", "times(head, stride_oh", "times(head * 0, stride_oh", TWO),
    "the first columns": ("divide", "START + tl.arange", "tl.arange",
                          {"value_dim": 520, "len_k": 528}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_device_code_is_seen(
    name: str, machine: Machine, rewritten: Callable[..., Any]
) -> None:
    function, old, new, values = FAULTS[name]
    machine.replace(function, partial(rewritten, old=old, new=old))
    hold(values)
    machine.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises(AssertionError, match="beyond their bound"):
        hold(values)


TOO_EARLY: dict[str, Fault] = {
    "the buffer of what is stored": ("write", "tma.store_wait(0)", "pass", {}),
    "what is stored again": ("finish", "wait_for_writes()", "pass", CAUSAL | LOUD),
    "keys of a product under way": (
        "scores",
        "s = warpgroup_mma_wait(1, deps=[s])",
        "pass",
        {"head_dim": 576, "len_k": 700},
    ),
    "stages that are still read": ("produce", "fills >= c.STAGES", "fills >= 9999", {}),
    "weights that are still read": ("produce", "if i > 0", "if i > 9999", TRAINED),
}


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", TOO_EARLY)
def test_a_missing_wait_is_seen(name: str, machine: Machine, rewritten: Callable[..., Any]) -> None:
    function, old, new, values = TOO_EARLY[name]
    machine.replace(function, partial(rewritten, old=old, new=old))
    hold(values)
    machine.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises((AssertionError, TimeoutError)):
        for seed in range(9):
            random.seed(seed)
            hold(values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is replaced in Triton's interpreter")
@pytest.mark.parametrize("name", DIVISIONS)
def test_a_fault_in_the_division_is_seen(
    name: str, change: Callable[[str, str, str], None]
) -> None:
    function, old, new, values = DIVISIONS[name]
    change(function, old, old)
    hold(values)
    change(function, old, new)
    with pytest.raises(AssertionError, match="beyond their bound"):
        hold(values)
