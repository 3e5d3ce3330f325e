"""Sequences of the Hopper kernel, run on a CPU: the same bits alone, in a batch, beside others."""

from collections.abc import Iterable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.block_list import BlockList
from adaattn.backends.hopper import prepared
from adaattn.backends.hopper.launch import choose
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.keys_values import KeysValues
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, HeadTerm, MaskKind, Precision
from adaattn.testing import make_problem, make_tensors, with_tensors

pytestmark = pytest.mark.usefixtures("simulated")

TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
BIAS: dict[str, Any] = {"mask": MaskKind.ADDITIVE}
BOOLEAN: dict[str, Any] = {"mask": MaskKind.BOOLEAN}
BY_HEAD: dict[str, Any] = {"head_terms": HeadTerm(7)}
LOUD: dict[str, Any] = {"loud_keys": 300.0}
"""Scores that a fixed reference does not serve: their tiles are computed again."""
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
STATISTICS = Aux.LSE | Aux.ENTROPY
BOTH = [Precision.BF16, Precision.FP16]

DENSE: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 150, "len_k": 200},
    "causal": {"len_q": 200, "is_causal": True, **GROUPS},
    "causal, loud": {"len_q": 260, "is_causal": True, **LOUD},
    "window": {"len_q": 300, "window": (70, 20)},
    "softcap, sinks, ALiBi": {"len_q": 100, "softcap": 1.5, "has_sinks": True, "has_alibi": True},
    "numbers of each head": {"len_q": 200, **BY_HEAD, **TO_END, "len_k": 230},
    "a mask of rows": {"len_q": 70, "len_k": 144, **BIAS},
    "a mask of keys": {"len_q": 70, "len_k": 133, **BOOLEAN, "mask_shape": (3, 1, 1, 133)},
    "row maximum": {"len_q": 100, "aux": Aux.ROW_MAX},
    "columns of 64": {"len_q": 400, "head_dim": 64},
}  # fmt: skip
PACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, **GROUPS},
    "causal, loud": {"is_causal": True, **LOUD},
    "to the end": TO_END,
    "window": {"window": (60, 60)},
    "window to the end, loud": {"window": (60, 9), "align": Align.BOTTOM_RIGHT, **LOUD},
    "numbers of each head": {"is_causal": True, **BY_HEAD},
    "softcap and sinks": {"softcap": 1.5, "has_sinks": True},
    "a bias": BIAS,
    "a mask": {**BOOLEAN, "is_causal": True},
    "columns of 64": {"head_dim": 64, "is_causal": True},
    "columns of 128": {"head_dim": 128},
}  # fmt: skip
LENGTHS = (9, 0, 340, 1, 33, 200)


def invariant(values: dict[str, Any], **more: Any) -> tuple[AttentionProblem, Tensors]:
    """Return a problem with statistics, and its tensors."""
    values = {"batch_invariant": True, "aux": STATISTICS, "head_dim": 32} | values | more
    loud = values.pop("loud_keys", None)
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths)
    if loud is not None:
        key = tensors.key.clone()
        key[:, :, 3 : problem.len_k : 100] *= loud
        tensors = with_tensors(tensors, key=key)
    return problem, tensors


def run(tensors: Tensors, problem: AttentionProblem) -> Result:
    return hopper.run(tensors, problem, HeadGroup(capability="hopper"))


def row_of(
    tensors: Tensors, problem: AttentionProblem, row: int
) -> tuple[Tensors, AttentionProblem]:
    """Return one sequence of a batch by itself, in memory of its own."""
    part = slice(row, row + 1)
    mask = tensors.mask
    mask = mask if mask is None or mask.shape[0] == 1 else mask[part].clone()
    kv = KeysValues(key=tensors.key[part].clone(), value=tensors.value[part].clone())
    alone = replace(tensors, query=tensors.query[part].clone(), kv=kv, mask=mask)
    shape = () if mask is None else tuple(mask.shape)
    return alone, replace(problem, batch=1, mask_shape=shape)


def among(
    tensors: Tensors, problem: AttentionProblem, lengths: tuple[int, ...], kept: Iterable[int]
) -> tuple[Tensors, AttentionProblem]:
    """Return some of the packed sequences, packed by themselves."""
    kept = tuple(kept)
    tokens = torch.cat([torch.arange(sum(lengths[:n]), sum(lengths[: n + 1])) for n in kept])
    starts = torch.tensor((0, *(lengths[n] for n in kept)), dtype=torch.int32)
    starts = starts.cumsum(0, dtype=torch.int32)
    mask = tensors.mask
    if mask is not None:
        mask = mask[:, :, tokens][..., tokens]
    query, key, value = (it[:, :, tokens] for it in (tensors.query, tensors.key, tensors.value))
    part = Tensors.of(
        *(query, key, value),
        mask=mask,
        sinks=tensors.sinks,
        head_terms=tensors.head_terms,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
    )
    longest = max(lengths[n] for n in kept)
    sizes = {"len_q": len(tokens), "len_k": len(tokens), "num_sequences": len(kept)}
    shape = () if mask is None else tuple(mask.shape)
    return part, replace(problem, **sizes, max_len_q=longest, max_len_k=longest, mask_shape=shape)


def unpacked(tensors: Tensors, problem: AttentionProblem) -> tuple[Tensors, AttentionProblem]:
    """Return one packed sequence as an entry of a batch."""
    kv = KeysValues(key=tensors.key, value=tensors.value)
    sizes = {"num_sequences": 0, "max_len_q": 0, "max_len_k": 0, "packed_square": False}
    return replace(tensors, kv=kv, cu_seqlens_q=None), replace(problem, **sizes)


def cut(result: Result, rows: slice) -> Result:
    """Return some rows of a result."""
    found = {field.name: getattr(result, field.name) for field in fields(Result)}
    return Result(**{name: it if it is None else it[:, :, rows] for name, it in found.items()})


def same_bits(one: Result, other: Result) -> bool:
    """Return whether all outputs are equal to the last bit."""
    found = True
    for field in fields(Result):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        assert (ours is None) == (theirs is None)
        found &= ours is None or torch.equal(ours, theirs)
    return found


@pytest.mark.parametrize("precision", BOTH, ids=lambda it: it.label)
@pytest.mark.parametrize("name", DENSE)
def test_a_sequence_of_a_batch_has_the_bits_that_it_has_alone(
    name: str, precision: Precision
) -> None:
    problem, tensors = invariant({"batch": 3} | DENSE[name], precision=precision)
    whole = run(tensors, problem)
    for row in (0, 2):
        own = {
            field.name: None if it is None else it[row : row + 1]
            for field in fields(Result)
            for it in (getattr(whole, field.name),)
        }
        assert same_bits(Result(**own), run(*row_of(tensors, problem, row)))


@pytest.mark.parametrize("precision", BOTH, ids=lambda it: it.label)
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_sequence_has_the_same_bits_whatever_its_neighbours(
    name: str, precision: Precision
) -> None:
    problem, tensors = invariant(PACKED[name], lengths_q=LENGTHS, precision=precision)
    whole = run(tensors, problem)
    for kept in ((2,), (5, 3), (4, 0, 5)):
        part = run(*among(tensors, problem, LENGTHS, kept))
        at = 0
        for n in kept:
            rows = slice(sum(LENGTHS[:n]), sum(LENGTHS[: n + 1]))
            own = slice(at, at + LENGTHS[n])
            at += LENGTHS[n]
            assert same_bits(cut(whole, rows), cut(part, own))


@pytest.mark.parametrize("precision", BOTH, ids=lambda it: it.label)
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_sequence_and_the_same_unpacked_take_the_same_steps(
    name: str, precision: Precision
) -> None:
    problem, tensors = invariant(PACKED[name], lengths_q=LENGTHS, precision=precision)
    whole = run(tensors, problem)
    for n in (2, 4, 5):
        rows = slice(sum(LENGTHS[:n]), sum(LENGTHS[: n + 1]))
        alone = run(*unpacked(*among(tensors, problem, LENGTHS, (n,))))
        assert same_bits(cut(whole, rows), alone)


@pytest.mark.parametrize("is_invariant", [True, False])
def test_usual_calls_do_depend_on_their_neighbours(is_invariant: bool) -> None:
    """Short sequences have other tiles than long ones: else nothing is shown."""
    lengths = (300, 1100)
    problem, tensors = invariant({"is_causal": True, "num_heads": 1}, lengths_q=lengths)
    bf16 = [it.bfloat16() for it in (tensors.query, tensors.key, tensors.value)]
    kv = replace(tensors.kv, key=bf16[1], value=bf16[2])
    tensors = replace(tensors, query=bf16[0], kv=kv)
    problem = replace(problem, precision=Precision.BF16, batch_invariant=is_invariant)
    whole = cut(run(tensors, problem), slice(300))
    assert same_bits(whole, run(*among(tensors, problem, lengths, (0,)))) is is_invariant


def test_a_neighbour_with_other_keys_than_rows_moves_nothing() -> None:
    """Alone a sequence is as long as its keys, and where it ends is where it begins."""
    square = {"lengths_q": (140, 70), "lengths_k": (140, 70)}
    problem, tensors = invariant(TO_END, **square, precision=Precision.BF16)
    others = {"lengths_q": (140, 70), "lengths_k": (140, 200)}
    beside, wider = invariant(TO_END, **others, precision=Precision.BF16)
    assert problem.packed_square
    assert not beside.packed_square
    assert choose(problem) == choose(beside)
    key, value = wider.key.clone(), wider.value.clone()
    key[:, :, :140], value[:, :, :140] = tensors.key[:, :, :140], tensors.value[:, :, :140]
    query = tensors.query
    one, other = (
        cut(run(it, about), slice(140))
        for it, about in (
            (tensors, problem),
            (with_tensors(replace(wider, query=query), key=key, value=value), beside),
        )
    )
    assert same_bits(one, other)


def test_lists_of_blocks_are_each_sequences_own() -> None:
    """Alone a list has the room that its own rows need."""
    listed = torch.rand(3, 2, 3, 5) < torch.tensor([0.2, 0.5, 0.9])[:, None, None, None]
    sizes = {"len_q": 300, "len_k": 620, "is_causal": False, "precision": Precision.BF16}
    _, tensors = invariant({"batch": 3, **sizes}, **LOUD)
    results = []
    for rows in (slice(0, 3), slice(0, 1), slice(1, 2)):
        blocks = BlockList.from_mask(listed[rows], block_q=128, block_k=128)
        given = [it[rows].clone() for it in (tensors.query, tensors.key, tensors.value)]
        problem, _ = invariant({"batch": rows.stop - rows.start, **sizes}, block_size=(128, 128))
        problem = replace(problem, most_blocks=blocks.indices.shape[-1])
        results.append(run(Tensors.of(*given, blocks=blocks), problem))
    for row, alone in enumerate(results[1:]):
        assert torch.equal(results[0].output[row : row + 1], alone.output)


def test_no_size_of_the_device_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, tensors = invariant({"len_q": 260, "is_causal": True, "precision": Precision.BF16})
    results = []
    for processors in (1, 3, 132):
        facts = SimpleNamespace(num_processors=processors)
        monkeypatch.setattr(prepared, "probe", lambda device, facts=facts: facts)
        hopper.forward.bound.cache_clear()
        results.append(run(tensors, problem))
    assert all(same_bits(result, results[0]) for result in results)


def test_what_lies_otherwise_in_memory_is_served_by_a_copy() -> None:
    """In a batch rows may begin where TMA cannot read them, and alone in memory of their own."""
    problem, tensors = invariant({"len_q": 100, "precision": Precision.BF16})
    (capability,) = hopper.CAPABILITIES
    layout = {"dense_columns": True, "stride_bytes": 4}
    odd = replace(problem, **layout)
    assert all(not rule(odd) for rule in capability.rules)
    assert any(rule(replace(odd, batch_invariant=False)) for rule in capability.rules)
    wide = torch.zeros(1, 2, 100, 34, dtype=torch.bfloat16)
    wide[..., :32] = tensors.query
    found = run(replace(tensors, query=wide[..., :32]), odd)
    assert same_bits(found, run(tensors, problem))


@pytest.mark.parametrize("precision", BOTH, ids=lambda it: it.label)
@pytest.mark.parametrize("values", [*PACKED.values(), {"head_dim": 256}], ids=str)
def test_no_length_has_a_say_in_the_kernel(values: dict[str, Any], precision: Precision) -> None:
    values = {name: it for name, it in values.items() if name != "loud_keys"}
    asked = {"head_dim": 32, "precision": precision, "batch_invariant": True} | values
    kinds = {(1,): (1,), (700, 1, 2000): (700, 9, 2000), (64, 64): (64, 64)}
    found = {choose(make_problem(lengths_q=q, lengths_k=k, **asked)) for q, k in kinds.items()}
    for length in (1, 64, 640, 5000, 16384):
        problem = make_problem(len_q=length, batch=3, **asked)
        packed = {"is_packed": True, "to_end": asked.get("align") is Align.BOTTOM_RIGHT}
        for staged in (False, True):  # whether TMA could read the mask
            found.add(replace(choose(problem, staged=staged), has_tiles=False, **packed))
    # A mask of one row is read otherwise, and has the same numbers.
    (_,) = {replace(it, mask_has_rows=True) for it in found}


def test_usual_kernels_follow_lengths() -> None:
    """Else the test before this one would say nothing."""
    asked = {"head_dim": 64, "precision": Precision.BF16, "is_causal": True}
    tilings = {choose(make_problem(lengths_q=(n,), **asked)).tiling for n in (64, 2000, 9216)}
    assert len(tilings) == 3
