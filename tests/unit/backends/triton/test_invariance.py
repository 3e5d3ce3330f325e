"""Rows of the portable kernels, bit for bit the same whatever else is in the batch."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from adaattn.backends import load
from adaattn.backends.block_list import BlockList
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.keys_values import KeysValues
from adaattn.backends.triton import direct
from adaattn.backends.triton.arguments import Arguments, MaskLayout
from adaattn.backends.triton.launch import choose_tile, is_halved, packed_heads
from adaattn.hardware import probe
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, MaskKind, Precision, Scheme
from adaattn.testing import make_problem, make_tensors

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/unit/test_batch_invariance.py runs them on the GPU"
)

STATISTICS = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2}
DECODE: dict[str, Any] = TO_END | GROUPS | {"len_q": 1, "len_k": 1500}
OF_KEYS: dict[str, Any] = {"batch": 3, "mask": MaskKind.BOOLEAN}

DENSE: dict[str, dict[str, Any]] = {
    "few rows": {"len_q": 20},
    "causal": {"len_q": 130, "is_causal": True},
    "window": {"len_q": 150, "window": (40, 3)},
    "dilation in groups": GROUPS | {"len_q": 40, "dilation": 3, "is_causal": True},
    "softcap and sinks": {"len_q": 70, "softcap": 1.5, "has_sinks": True},
    "ALiBi": {"len_q": 40, "has_alibi": True},
    "a mask of rows": {"len_q": 40, "len_k": 70, "mask": MaskKind.ADDITIVE},
    "a mask of keys": OF_KEYS | {"len_q": 40, "len_k": 133, "mask_shape": (3, 1, 1, 133)},
    "decode": DECODE,
    "decode in a window": DECODE | {"window": (700, -1), "has_sinks": True},
    "decode over a masked cache": DECODE | OF_KEYS | {"mask_shape": (3, 1, 1, 1500)},
}
PACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, groups": GROUPS | {"is_causal": True},
    "groups of three": {"num_heads": 3, "num_kv_heads": 1, "is_causal": True},
    "a window that reaches all keys of some": {"window": (60, 60)},
    "dilation": {"dilation": 2, "is_causal": True},
    "a mask": {"mask": MaskKind.ADDITIVE},
}
LENGTHS = (9, 0, 140, 1, 33)


def invariant(values: dict[str, Any], **more: Any) -> AttentionProblem:
    return make_problem(**{"batch_invariant": True, "aux": STATISTICS} | values | more)


def run(tensors: Tensors, problem: AttentionProblem) -> Result:
    group = HeadGroup(capability="triton", scheme=Scheme.of(problem.precision))
    return load("triton")(tensors, problem, group)


def row_of(tensors: Tensors, problem: AttentionProblem, row: int) -> tuple[Any, Any]:
    """Return one sequence of a batch by itself, in memory of its own."""
    part = slice(row, row + 1)
    mask, slopes = (
        item if item is None or item.shape[0] == 1 else item[part].clone()
        for item in (tensors.mask, tensors.alibi_slopes)
    )
    kv = KeysValues(key=tensors.key[part].clone(), value=tensors.value[part].clone())
    alone = replace(
        tensors, query=tensors.query[part].clone(), kv=kv, mask=mask, alibi_slopes=slopes
    )
    shape = () if mask is None else tuple(mask.shape)
    return alone, replace(problem, batch=1, mask_shape=shape)


def assert_same_bits(whole: Result, alone: Result, rows: tuple[Any, ...]) -> None:
    for field in fields(Result):
        ours, theirs = getattr(whole, field.name), getattr(alone, field.name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(ours[rows], theirs), field.name


@interpreted
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("name", DENSE)
def test_a_sequence_of_a_batch_has_the_bits_that_it_has_alone(
    name: str, precision: Precision
) -> None:
    problem = invariant({"batch": 3} | DENSE[name], precision=precision)
    tensors = make_tensors(problem)
    whole = run(tensors, problem)
    for row in (0, 2):
        alone = run(*row_of(tensors, problem, row))
        assert_same_bits(whole, alone, (slice(row, row + 1),))


@interpreted
def test_the_room_of_a_list_of_blocks_changes_no_bit() -> None:
    """Alone a sequence's list is as long as its own needs it; in a batch as the longest one's."""
    listed = torch.rand(3, 2, 5, 5) < torch.tensor([0.2, 0.5, 0.9])[:, None, None, None]
    x = torch.randn(3, 2, 140, 16)
    results = []
    for rows in (slice(0, 3), slice(0, 1), slice(1, 2)):
        blocks = BlockList.from_mask(listed[rows], block_q=32, block_k=32)
        part = Tensors.of(*[x[rows].clone()] * 3, blocks=blocks)
        problem = invariant({"batch": rows.stop - rows.start, "len_q": 140, "is_causal": True})
        room = blocks.indices.shape[-1]
        results.append(run(part, replace(problem, block_size=(32, 32), most_blocks=room)))
    for row, alone in enumerate(results[1:]):
        assert_same_bits(results[0], alone, (slice(row, row + 1),))


@interpreted
@pytest.mark.parametrize("is_invariant", [True, False])
def test_no_size_of_the_device_changes_a_bit(
    is_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual splits follow it, and their sums differ: without the mode this fails."""
    problem = invariant(DECODE, precision=Precision.FP16, aux=Aux.LSE)
    problem = replace(problem, batch_invariant=is_invariant, aux=Aux.NONE)
    tensors = make_tensors(problem)
    splits, outputs = set(), []
    for processors in (1, 3, 132):
        monkeypatch.setattr(
            "adaattn.backends.triton.executor.probe",
            lambda name, count=processors: replace(probe("cpu"), num_processors=count),
        )
        splits.add(Arguments(problem).splits(2, 1, 1500, processors))
        run = direct(problem, HeadGroup(capability="triton"))
        outputs.append(run(tensors.query, tensors.key, tensors.value))
    if is_invariant:
        assert splits == {(3, 512)}
        assert all(torch.equal(output, outputs[0]) for output in outputs)
    else:
        assert len(splits) == 3
        assert not all(torch.equal(output, outputs[0]) for output in outputs)


def packed(
    values: dict[str, Any], lengths: tuple[int, ...], precision: Precision
) -> tuple[Tensors, AttentionProblem]:
    problem = invariant(values, lengths_q=lengths, precision=precision)
    return make_tensors(problem, lengths_q=lengths), problem


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
    part = Tensors.of(query, key, value, mask=mask, cu_seqlens_q=starts, cu_seqlens_k=starts)
    longest = max(lengths[n] for n in kept)
    sizes = {"len_q": len(tokens), "len_k": len(tokens), "num_sequences": len(kept)}
    shape = () if mask is None else tuple(mask.shape)
    return part, replace(problem, **sizes, max_len_q=longest, max_len_k=longest, mask_shape=shape)


@interpreted
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_sequence_has_the_same_bits_whatever_its_neighbours(
    name: str, precision: Precision
) -> None:
    tensors, problem = packed(PACKED[name], LENGTHS, precision)
    whole = run(tensors, problem)
    for kept in ((0,), (4,), (3, 4), (4, 2)):
        part = run(*among(tensors, problem, LENGTHS, kept))
        at = 0
        for n in kept:
            rows = slice(sum(LENGTHS[:n]), sum(LENGTHS[: n + 1]))
            own = slice(at, at + LENGTHS[n])
            at += LENGTHS[n]
            cut = {f.name: getattr(part, f.name) for f in fields(Result)}
            mine = Result(**{k: v if v is None else v[:, :, own] for k, v in cut.items()})
            assert_same_bits(whole, mine, (slice(None), slice(None), rows))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("values", [{"len_q": 1}, {"len_q": 40}, {"len_q": 300, "is_causal": True}])
def test_no_batch_has_a_say_in_tiles_and_splits(
    values: dict[str, Any], precision: Precision
) -> None:
    one = invariant(GROUPS | {"len_k": 9000, "align": Align.BOTTOM_RIGHT} | values)
    one = replace(one, precision=precision)
    many = replace(one, batch=200)
    assert choose_tile(one) == choose_tile(many)
    rows = one.len_q
    assert Arguments(one).splits(2, rows, 9000, 132) == Arguments(many).splits(400, rows, 9000, 132)


def test_usual_calls_have_other_tiles_in_large_batches() -> None:
    """Else the test before this one would say nothing."""
    one = make_problem(**DECODE, precision=Precision.FP16)
    assert choose_tile(one) != choose_tile(replace(one, batch=200))


@interpreted
@pytest.mark.parametrize("what", ["key", "value"])
def test_a_packed_sequence_has_the_same_bits_beside_numbers_of_another_size(what: str) -> None:
    """fp32 has another arithmetic where the keys of a head do not share a power of two."""
    problem = make_problem(
        lengths_q=(140, 60), precision=Precision.FP32, is_causal=True, batch_invariant=True
    )
    tensors = make_tensors(problem, lengths_q=(140, 60))
    numbers = getattr(tensors, what).clone()
    numbers[:, :, 140:] *= 4096
    others = replace(tensors, kv=replace(tensors.kv, **{what: numbers}))
    first, second = (run(item, problem).output[:, :, :140] for item in (tensors, others))
    assert torch.equal(first, second)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16], ids=lambda it: it.label)
def test_no_neighbour_has_a_say_in_the_tiles_of_packed_sequences(precision: Precision) -> None:
    one, many = (
        invariant(GROUPS, lengths_q=lengths, precision=precision)
        for lengths in ((1,), (700, 1, 2000))
    )
    for choose in (choose_tile, packed_heads, is_halved):
        assert choose(one) == choose(many)
    usual = [choose_tile(replace(it, batch_invariant=False)) for it in (one, many)]
    assert usual[0] != usual[1], "else this says nothing"


def test_the_number_of_all_tokens_makes_no_other_kernel() -> None:
    """It is the step from row to row of a mask over packed sequences."""
    launches = []
    for tokens in (64, 133):
        problem = invariant({"mask": MaskKind.BOOLEAN}, lengths_q=(30, tokens - 30))
        seen = MaskLayout(1, (0, 0, tokens, 1), torch.bool)
        steps = (*[8] * 12, *seen.strides, 0)
        sizes, counts = (2, tokens, tokens), (2, 3, tokens, 2)
        launches.append(Arguments(problem).forward((1, 1, 1), steps, sizes, counts, seen))
    assert launches[0].constants == launches[1].constants
