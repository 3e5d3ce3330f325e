"""How scores are cut into chunks, what that allocates, and what the executor says of itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends import capabilities, load
from adaattn.backends.interface import Tensors
from adaattn.backends.operators import trained
from adaattn.backends.streamed import CAPABILITIES, executor, fused_rules, planes
from adaattn.backends.streamed.arguments import Arguments
from adaattn.backends.streamed.chunks import (
    choose_chunk_rows,
    chunks_of,
    overhead,
    pitch_of,
    row_bytes,
)
from adaattn.planning import decide, reasons
from adaattn.spec import (
    Align,
    AttentionProblem,
    Aux,
    Capability,
    HardwareFacts,
    HeadGroup,
    HeadTerm,
    Launch,
    MaskKind,
    Policy,
    Precision,
    Why,
)
from adaattn.testing import assert_training_matches, fake_facts, gradients_of, make_problem

Made = Callable[[dict[str, Any]], tuple[AttentionProblem, Tensors, HeadGroup]]

(STREAMED,) = CAPABILITIES
GPU: dict[str, Any] = {
    "num_heads": 16,
    "len_q": 16384,
    "head_dim": 512,
    "device_type": "cuda",
    "precision": Precision.BF16,
}
CAUSAL: dict[str, Any] = {"is_causal": True}
TRAINED: dict[str, Any] = {"requires_grad": True}


@pytest.fixture(autouse=True)
def no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all scores written, on each card; `test_fused` has the other chunks."""
    monkeypatch.setattr(fused_rules, "_is_on_hopper", lambda device: False)


def rows_and_planes(problem: AttentionProblem) -> tuple[int, int]:
    """Return the rows of a chunk, and the planes that it takes at once."""
    rows = choose_chunk_rows(problem, None)
    first = next(iter(chunks_of(problem, rows, 1)))
    return rows, len(first.planes)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (16384, 2)),
        ({"len_q": 4096}, (4096, 4)),
        ({"len_q": 512, "batch": 32, "num_heads": 4}, (512, 22)),
        ({"len_q": 131072}, (5248, 1)),
        ({"head_dim": 8192, "num_heads": 4, "len_q": 4096}, (1024, 2)),
        ({"num_kv_heads": 2, "len_q": 8192}, (2048, 2)),
        (CAUSAL, (2048, 8)),
        (CAUSAL | {"head_dim": 8192, "num_heads": 4, "len_q": 4096}, (512, 2)),
        (CAUSAL | {"window": (1000, 0)}, (704, 16)),
        ({"window": (100, 100)}, (1024, 16)),
        (CAUSAL | {"len_q": 2048, "num_heads": 8}, (1024, 8)),
        ({"window": (2, 0), "len_q": 2048, "num_heads": 3, "batch": 7}, (2048, 21)),
        (TRAINED, (16384, 1)),
        (TRAINED | {"len_q": 4096}, (4096, 4)),
        (TRAINED | CAUSAL, (2048, 8)),
        (TRAINED | {"len_q": 131072}, (2688, 1)),
        ({"len_q": 1, "len_k": 32768, "num_heads": 32, "num_kv_heads": 4}, (1, 4)),
        ({"precision": Precision.FP32, "len_q": 4096}, (4096, 4)),
    ],
)
def test_a_chunk_fills_the_card_and_hides_little(
    values: dict[str, Any], expected: tuple[int, int]
) -> None:
    problem = make_problem(**(GPU | values))
    assert rows_and_planes(problem) == expected
    assert expected[0] * row_bytes(problem) <= 4 << 30


@pytest.mark.parametrize("values", [{}, CAUSAL, TRAINED, TRAINED | CAUSAL, {"num_kv_heads": 2}])
@pytest.mark.parametrize("budget_mib", [4096, 600, 100, 40])
def test_chunks_keep_the_memory_budget_or_are_refused(
    values: dict[str, Any], budget_mib: int
) -> None:
    problem, budget = make_problem(**(GPU | values)), budget_mib << 20
    policy = Policy(name="small", memory_budget_bytes=budget)
    usable = (replace(STREAMED, unavailable=""), *_without("streamed"))
    found = decide(problem, None, fake_facts("h200"), policy, usable)
    rows = choose_chunk_rows(problem, budget)
    group = HeadGroup(capability="streamed", launch=Launch(chunk_rows=rows))
    kept = overhead(problem, group, fake_facts("h200"), 1.0).workspace_bytes
    needed = 4 * 16 * 16384 + rows * row_bytes(problem) + kept
    entry = next(it for it in found.trace if it.executor == "streamed")
    assert (entry.why is Why.MEMORY) == (needed > budget)
    assert (needed <= budget) or rows == 1
    assert rows == choose_chunk_rows(problem, None) or needed + row_bytes(problem) > budget


def test_chunks_cover_each_row_and_its_keys_once() -> None:
    problem = make_problem(
        batch=2, num_heads=6, num_kv_heads=3, len_q=100, len_k=130, is_causal=True,
        align=Align.BOTTOM_RIGHT, window=(20, -1), head_dim=512,
    )  # fmt: skip
    for entries in (1, 2):
        found = list(chunks_of(problem, 17, entries))
        rows = [(plane, row) for it in found for plane in it.planes for row in it.rows]
        assert sorted(rows) == [(plane, row) for plane in range(6) for row in range(100)]
        for chunk in found:
            first, last = chunk.rows.start + 30 - 20, chunk.rows.stop - 1 + 30
            assert chunk.keys.start == max(first, 0) // 16 * 16
            assert chunk.keys.stop == last + 1
            assert pitch_of(chunk) % 8 == 0 and 0 <= pitch_of(chunk) - len(chunk.keys) < 8
            assert entries == 1 or chunk.planes.start // 3 == (chunk.planes.stop - 1) // 3


def test_without_a_plan_the_sizes_say_how_many_rows_a_chunk_takes() -> None:
    problem = make_problem(**(GPU | CAUSAL))
    assert len(next(iter(chunks_of(problem, 0, 1))).rows) == choose_chunk_rows(problem, None)


def test_rows_that_see_no_key_have_a_chunk_without_keys() -> None:
    problem = make_problem(len_q=90, len_k=20, window=(3, 0), head_dim=512)
    found = list(chunks_of(problem, 30, 1))
    assert [len(it.keys) for it in found] == [20, 0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU then")
@pytest.mark.parametrize(
    "values",
    [
        {"len_q": 100},
        CAUSAL | {"len_q": 100, "chunk_rows": 20},
        CAUSAL | {"len_q": 100, "chunk_rows": 20, "num_heads": 6, "num_kv_heads": 2},
        TRAINED | {"len_q": 64},
        TRAINED | CAUSAL | {"len_q": 100, "chunk_rows": 20, "num_heads": 4, "num_kv_heads": 2},
        TRAINED | {"len_q": 100, "chunk_rows": 20, "precision": Precision.FP32},
    ],
)
def test_what_is_allocated_is_what_planning_is_told(
    values: dict[str, Any], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, tensors, group = made({"aux": Aux.NONE} | values)
    sizes: list[int] = []
    usual = planes.Space.memory

    def noting(*given: Any) -> torch.Tensor:
        made = usual(*given)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(planes.Space, "memory", noting)
    passes = []
    result = load("streamed")(tensors, problem, group)
    passes.append(sum(sizes))
    if problem.requires_grad:
        sizes.clear()
        gradients_of(result, tensors)
        passes.append(sum(sizes))
    rows = group.launch.chunk_rows or problem.len_q
    told = rows * row_bytes(problem)
    assert max(passes) <= told
    if problem.group_size == 1:
        assert max(passes) > 0.7 * told


@pytest.mark.parametrize("num_entries", [1, 2])
def test_views_of_planes_copy_nothing(num_entries: int) -> None:
    memory = torch.zeros(2, 40, 6, 16)
    tensor = memory.transpose(1, 2) if num_entries == 2 else memory.permute(0, 2, 1, 3).contiguous()
    assert planes.num_entries(tensor) == num_entries
    of = planes.Planes(tensor, 3, num_entries)
    problem = make_problem(batch=2, num_heads=6, num_kv_heads=3, len_q=40, head_dim=512)
    for chunk in chunks_of(problem, 17, num_entries):
        part = of.part(chunk.planes, chunk.rows)
        assert part.shape == (len(chunk.planes), 2, len(chunk.rows), 16)
        part.add_(1.0)
    assert bool((tensor == 1.0).all())


@pytest.mark.parametrize("num_entries", [1, 2])
@pytest.mark.parametrize("kv_heads", [6, 3])
def test_what_a_chunk_takes_is_the_same_of_all_tensors_that_lie_alike(
    num_entries: int, kv_heads: int
) -> None:
    memory = torch.randn(3, 2, 37, 6, 16)
    if num_entries == 1:
        memory = memory.transpose(2, 3).contiguous().transpose(2, 3)
    tensors = memory.transpose(2, 3)
    problem = make_problem(
        batch=2, num_heads=6, num_kv_heads=kv_heads, len_q=37, head_dim=512, is_causal=True
    )
    takes = [planes.Planes.rows]
    if kv_heads == 6:
        takes += [planes.Planes.keys, planes.Planes.keys_to_pitch]
    for chunk in chunks_of(problem, 17, num_entries):
        for take in takes:
            taken = planes.Taken(chunk, kv_heads, num_entries, take, tensors[1])
            for tensor in tensors:
                found = taken.of(tensor)
                assert torch.equal(found, take(planes.Planes(tensor, kv_heads, num_entries), chunk))


def test_one_sequence_lies_as_one_dimension_however_it_lies() -> None:
    tensor = torch.zeros(1, 40, 6, 16).transpose(1, 2)
    assert planes.num_entries(tensor, torch.zeros(1, 6, 40, 16)) == 1
    assert planes.num_entries(torch.zeros(5, 40, 1, 16).transpose(1, 2)) == 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"head_dim": 256}, "it is for D or Dv above 256, got 256 and 256"),
        ({"lengths_q": (100, 28)}, "packed"),
        ({"block_size": (128, 128)}, "a list of blocks"),
        ({"aux": Aux.WEIGHTS}, "the weights as an output"),
        ({"batch_invariant": True}, "do not depend on the rest of the batch"),
        ({"head_terms": HeadTerm.SCALE}, "of each head, from a tensor"),
        ({"mask": MaskKind.ADDITIVE, "mask_requires_grad": True}, "a gradient for the mask"),
        ({"has_alibi": True, "alibi_requires_grad": True}, "a gradient for ALiBi slopes"),
        ({"precision": Precision.FP64}, "it takes fp32, bf16, fp16, got fp64"),
        ({"device_type": "cpu"}, "it runs on cuda"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_a_reason(
    values: dict[str, Any], reason: str
) -> None:
    usable = replace(STREAMED, unavailable="")
    lengths = {"lengths_q": values.pop("lengths_q")} if "lengths_q" in values else {}
    sizes = {} if lengths else {"len_q": 128}
    problem = make_problem(**lengths, **(GPU | sizes | values))
    assert any(reason in text for text in reasons(usable, problem, fake_facts("h200")))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"head_dim": 264, "value_dim": 8192, "len_q": 17},
        CAUSAL | TRAINED | {"deterministic": True, "has_sinks": True, "sinks_require_grad": True},
        {"softcap": 30.0, "mask": MaskKind.BOOLEAN, "window": (9, 3), "dilation": 2},
        {"dropout_p": 0.1, "has_alibi": True, "scale": -1.0, "precision": Precision.FP32},
        {"aux": Aux.LSE | Aux.ENTROPY | Aux.ROW_MAX, "num_kv_heads": 2},
    ],
)
def test_what_it_serves_has_nothing_against_it(values: dict[str, Any]) -> None:
    usable = replace(STREAMED, unavailable="")
    problem = make_problem(**(GPU | {"len_q": 128} | values))
    assert reasons(usable, problem, fake_facts("h200")) == ()
    older = replace(fake_facts("h200"), compute_capability=(7, 5))
    assert "it needs compute capability 8.0" in reasons(usable, problem, older)[0]


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ({}, "sdpa.efficient"),
        (CAUSAL, "sdpa.efficient"),
        (TRAINED, "sdpa.efficient"),
        ({"window": (1000, 0)}, "chunked"),
        ({"mask": MaskKind.BOOLEAN}, "sdpa.efficient"),
        ({"softcap": 30.0}, "chunked"),
        (CAUSAL | TRAINED | {"has_sinks": True}, "chunked"),
        ({"aux": Aux.ENTROPY}, "chunked"),
    ],
)
def test_it_is_first_nowhere_without_measured_times(values: dict[str, Any], first: str) -> None:
    problem = make_problem(**(GPU | {"len_q": 4096} | values))
    usable = (replace(STREAMED, unavailable=""), *_without("streamed"))
    decision = decide(problem, None, _untimed(), Policy(name="exact"), usable)
    assert decision.plan.groups[0].capability == first


def _without(name: str) -> tuple[Capability, ...]:
    """Return all other capabilities."""
    return tuple(it for it in capabilities() if it.name != name)


def _untimed() -> HardwareFacts:
    """Return an H200 that nobody has measured."""
    return replace(fake_facts("h200"), timings=None)


@pytest.mark.parametrize(("value", "served"), [("", False), (":4096:8", True), (":16:8", True)])
def test_products_in_a_fixed_order_need_a_fixed_workspace(
    value: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch raises a RuntimeError at a product, which nothing steps down from."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    usable = replace(STREAMED, unavailable="")
    problem = make_problem(**(GPU | {"deterministic": True}))
    torch.use_deterministic_algorithms(True)
    try:
        found = reasons(usable, problem, fake_facts("h200"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert any("CUBLAS_WORKSPACE_CONFIG" in why for why in found) != served
    assert not reasons(usable, problem, fake_facts("h200"))  # warnings alone, or none


def test_kernels_that_were_compiled_for_training_are_known(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, _, _ = made(TRAINED)
    known = Arguments(trained(problem)).known_by
    monkeypatch.setattr(executor, "is_noted", lambda found: found == known)
    assert executor.is_ready(problem)
    assert not executor.is_ready(replace(problem, requires_grad=False))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU then")
def test_chunks_of_more_than_a_block_of_keys_have_gradients(made: Made) -> None:
    values = {"len_q": 30, "len_k": 5000, "head_dim": 16, "chunk_rows": 11}
    problem, tensors, group = made(TRAINED | values)
    assert_training_matches(
        lambda tensors, problem: load("streamed")(tensors, problem, group), tensors, problem
    )
