"""Blocks that a boolean mask hides whole are left out: their lists, and what is computed then."""

import importlib
import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.backends.hopper.graphs import recorded
from tests.unit.backends.hopper.test_gradient_faults import sums_are_the_same_each_time

from adaattn.backends import hopper
from adaattn.backends.hopper import gradient_launch, launch, mask_lists, prepared
from adaattn.backends.hopper.gradient_launch import choose_gradients
from adaattn.backends.hopper.launch import MASK_BLOCK, choose, is_listed, lists_mask
from adaattn.backends.hopper.mask_lists import packed_tiles, turns_of
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import AttentionProblem, Aux, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    assert_executor_matches,
    assert_training_matches,
    gradients_of,
    make_problem,
    make_tensors,
    poisoned_memory,
    with_tensors,
)

pytest.importorskip("triton")
mask_tiles = importlib.import_module("adaattn.backends.device.mask_tiles")
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels themselves run")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are written for compute capability 9.0",
)
run = partial(hopper.run, group=HeadGroup(capability="hopper"))

Pattern = Callable[[int, int], torch.Tensor]


def causal(len_q: int, len_k: int) -> torch.Tensor:
    return torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q)


def padded(len_q: int, len_k: int) -> torch.Tensor:
    """Causal order behind padding on the left; rows of the padding see nothing."""
    return causal(len_q, len_k) & (torch.arange(len_k) >= 140)


def documents(len_q: int, len_k: int) -> torch.Tensor:
    return torch.arange(len_q)[:, None] // 150 == torch.arange(len_k) // 150


def banded(len_q: int, len_k: int) -> torch.Tensor:
    """A band, and the first keys."""
    behind = torch.arange(len_q)[:, None] - torch.arange(len_k)
    return (behind.abs() < 40) | (torch.arange(len_k) < 9)


def scattered(len_q: int, len_k: int) -> torch.Tensor:
    """Few keys anywhere, some rows without any."""
    torch.manual_seed(3)
    return torch.rand(len_q, len_k) < 5e-4


def speckled(len_q: int, len_k: int) -> torch.Tensor:
    """Blocks of keys of which rows see a part, most, and then all: no two are alike."""
    torch.manual_seed(5)
    mask = everything(len_q, len_k)
    mask[:, :40] = False
    mask[:, 128:256] = torch.rand(mask[:, 128:256].shape) < 0.8
    return mask


def stairs(len_q: int, len_k: int) -> torch.Tensor:
    """Keys that are seen from some row on, in turn from the first and from later ones."""
    first = torch.arange(len_k) // 128 % 2 * 130
    return torch.arange(len_q)[:, None] >= first


def nothing(len_q: int, len_k: int) -> torch.Tensor:
    return torch.zeros(len_q, len_k, dtype=torch.bool)


def everything(len_q: int, len_k: int) -> torch.Tensor:
    return ~nothing(len_q, len_k)


PATTERNS: tuple[Pattern, ...] = (
    causal, padded, documents, banded, scattered, speckled, nothing, everything,
)  # fmt: skip


def blocks_of(mask: torch.Tensor, lines: int, others: int) -> list[list[int]]:
    """Return the numbers of the blocks that blocks of rows see, by PyTorch."""
    return [
        [number for number, part in enumerate(rows.split(others, 1)) if bool(part.any())]
        for rows in mask.split(lines, 0)
    ]


def as_lists(counts: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    """Return the lists of the first sequence."""
    pairs = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return [numbers[:count] for count, numbers in pairs]


@on_a_cpu
@pytest.mark.parametrize("sizes", [(300, 400), (70, 1300), (512, 256), (1, 130), (257, 3)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_lists_name_the_blocks_that_are_seen(pattern: Pattern, sizes: tuple[int, int]) -> None:
    mask = pattern(*sizes)
    for lines, others in ((128, 128), (128, 64), (64, 64)):
        with poisoned_memory():
            straight, turned = (
                mask_lists._listed(mask_lists._packed(mask[None, None], by_columns), lines, others)
                for by_columns in (False, True)
            )
        for found, right in ((straight, mask), (turned, mask.T)):
            assert as_lists(*found[:2]) == blocks_of(right, lines, others)
            assert torch.equal(found[2].flatten()[: len(right)].bool(), right.any(1))


def words_of(mask: torch.Tensor, *, by_columns: bool = False) -> torch.Tensor:
    """Return the words of each tile, [B, H, tiles, 128]."""
    words = packed_tiles(mask, None, by_columns=by_columns).words
    assert words is not None
    return words.unflatten(-1, (-1, 128)).flatten(2, 3)


def listed_blocks(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lists of the forward pass."""
    _, counts, indices, _ = packed_tiles(mask, MASK_BLOCK)
    assert counts is not None and indices is not None
    return counts, indices


def unpacked(words: torch.Tensor, len_q: int, len_k: int) -> torch.Tensor:
    """Return the mask of the packed tiles of one sequence, bit by bit of each thread's word."""
    across = -(-len_k // 64)
    tiles = torch.zeros(len(words), 64, 64, dtype=torch.bool)
    threads = torch.arange(128)
    for j, h, e in itertools.product(range(8), range(2), range(2)):
        rows = threads // 32 * 16 + 8 * h + threads % 32 // 4
        columns = 8 * j + 2 * (threads % 4) + e
        tiles[:, rows, columns] = (words >> (4 * j + 2 * h + e) & 1).bool()
    lines = [torch.cat([*tiles[at : at + across]], 1) for at in range(0, len(tiles), across)]
    whole = torch.cat(lines)
    assert not whole[len_q:].any() and not whole[:, len_k:].any()
    return whole[:len_q, :len_k]


@on_a_cpu
@pytest.mark.parametrize("pattern", [padded, scattered, everything])
def test_packed_tiles_have_each_bit_where_a_product_leaves_its_score(pattern: Pattern) -> None:
    mask = pattern(130, 200)
    words = words_of(mask)[0, 0]
    assert words.shape == (3 * 4, 128)
    assert torch.equal(unpacked(words, 130, 200), mask)
    turned = words_of(mask[None, None], by_columns=True)[0, 0]
    assert torch.equal(unpacked(turned, 200, 130), mask.T)
    for block in ((64, 64), (128, 64), (128, 128)):
        for by_columns in (False, True):
            tiles = packed_tiles(mask, block, by_columns=by_columns)
            assert tiles.counts is not None and tiles.indices is not None
            right = blocks_of(mask.T if by_columns else mask, *block)
            assert as_lists(tiles.counts, tiles.indices) == right


FAULTS_IN_READING = {
    "the next block": ("list_blocks", "first // OTHERS + tl", "first // OTHERS + 1 + tl"),
    "the last part alone": ("list_blocks", "count += tl.sum", "count = tl.sum"),
    "another sequence's blocks": ("list_blocks", "list_number // blocks", "list_number % blocks"),
    "other rows": ("pack_tiles", "(in_rows // 8 % 2 * 2)", "(in_rows // 4 % 2 * 2)"),
    "other columns": ("pack_tiles", "in_columns // 8 * 4 +", "in_columns // 4 % 8 * 4 +"),
    "other threads": ("pack_tiles", "threads % 32 * 4 + threads // 32", "threads"),
    "another head": ("pack_tiles", "plane % num_heads", "plane // num_heads"),
    "a row of the last keys": ("list_blocks", "seen |= words", "seen = words"),
    "a row of the other half": ("list_blocks", "seen >> (2 * half)", "seen"),
    "never turned": ("pack_tiles", "(line if BY_ROWS else other) * _TILE", "line * _TILE"),
}


def held_to_what_is_there(masks: torch.Tensor) -> None:
    """Raise AssertionError unless lists and tiles of masks [B, H, Sq, Sk] are right."""
    first = masks[:, :1]
    lists = listed_blocks(first)
    for mask, counts, indices in zip(first[:, 0], *lists, strict=True):
        assert as_lists(counts[None], indices[None]) == blocks_of(mask, 128, 128)
    sees = packed_tiles(first, MASK_BLOCK).sees
    assert sees is not None
    assert torch.equal(sees.flatten(1)[:, : first.shape[2]].bool(), first[:, 0].any(2))
    for turned in (False, True):
        words = words_of(masks, by_columns=turned).flatten(0, 1)
        for mask, tiles in zip(masks.flatten(0, 1), words, strict=True):
            right = mask.T if turned else mask
            assert torch.equal(unpacked(tiles, *right.shape), right)


@on_a_cpu
@pytest.mark.parametrize("name", ["none", *FAULTS_IN_READING])
def test_a_fault_in_what_reads_a_mask_is_seen(
    name: str, rewritten: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, old, new = FAULTS_IN_READING.get(name, next(iter(FAULTS_IN_READING.values())))
    before = getattr(mask_tiles, function).fn
    patterns = (causal, documents, padded, banded)
    masks = torch.stack([pattern(263, 330) for pattern in patterns]).view(2, 2, 263, 330)
    monkeypatch.setattr(mask_lists, "_AT_ONCE", 2)
    if name == "none":
        monkeypatch.setattr(mask_tiles, function, rewritten(before, old, old))
        held_to_what_is_there(masks)
        return
    monkeypatch.setattr(mask_tiles, function, rewritten(before, old, new))
    with pytest.raises(AssertionError):
        held_to_what_is_there(masks)


@on_a_cpu
def test_a_mask_may_lie_anywhere() -> None:
    wide = torch.stack([causal(300, 512), documents(300, 512)])[:, None]
    lying = {
        "a slice": wide[..., 7:307],
        "columns apart": wide[..., ::2],
        "rows expanded": wide[:1, :, :1, :300].expand(2, 1, 300, 300),
    }
    for name, mask in lying.items():
        words = mask_lists._packed(mask_lists._own(mask), False)
        listed = mask_lists._listed(words, 128, 64)
        lists = zip(*listed[:2], words_of(mask)[:, 0], strict=True)
        for one, (counts, indices, tiles) in zip(mask[:, 0], lists, strict=mask.stride(0) > 0):
            assert as_lists(counts[None], indices[None]) == blocks_of(one, 128, 64), name
            assert torch.equal(unpacked(tiles, *one.shape), one), name


@on_a_cpu
def test_lists_are_kept_until_the_mask_is_written_to() -> None:
    mask = causal(300, 300)
    first = listed_blocks(mask)
    assert listed_blocks(mask)[0] is first[0]
    assert listed_blocks(mask[None, None])[0].shape == first[0].shape
    mask[:128] = True
    assert as_lists(*listed_blocks(mask)) == [[0, 1, 2], [0, 1], [0, 1, 2]]
    with torch.inference_mode():
        unkept = causal(300, 300)
        assert listed_blocks(unkept)[0] is not listed_blocks(unkept)[0]


@on_a_cpu
def test_both_passes_read_the_same_words() -> None:
    mask = causal(300, 300)
    forward = packed_tiles(mask, MASK_BLOCK)
    turned = packed_tiles(mask, (64, 64), by_columns=True)
    straight = packed_tiles(mask, (128, 64))
    assert straight.words is forward.words and turned.words is not forward.words
    assert packed_tiles(mask, MASK_BLOCK).counts is forward.counts
    assert straight.counts is not forward.counts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have lists made of small masks, and for one head."""
    monkeypatch.setattr(launch, "_LEAST_LISTED", 64)
    monkeypatch.setattr(launch, "_LEAST_HEADS", 1)
    monkeypatch.setattr(gradient_launch, "_LEAST_PACKED", 64)


BOOLEAN: dict[str, Any] = {"mask": MaskKind.BOOLEAN, "precision": Precision.BF16}
PACKED_ALONE: dict[str, dict[str, Any]] = {
    "of each head": BOOLEAN | {"num_heads": 4, "num_kv_heads": 2, "len_q": 200, "len_k": 264},
    "of each sequence": BOOLEAN | {"batch": 2, "len_q": 130, "mask_shape": (2, 1, 130, 130),
                                   "num_heads": 2, "is_causal": True},
    "beside a window": BOOLEAN | {"len_q": 300, "window": (70, 20), "mask_shape": (300, 300)},
    "in a window behind all keys": BOOLEAN | {"len_q": 512, "len_k": 64, "window": (20, 10)},
}  # fmt: skip


@on_a_cpu
@pytest.mark.usefixtures("simulated", "small")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", PACKED_ALONE)
def test_masks_are_packed_where_there_are_no_lists(name: str, deterministic: bool) -> None:
    values = PACKED_ALONE[name] | {"deterministic": deterministic}
    is_split = "window" in values
    problem = make_problem(head_dim=64, requires_grad=True, **values)
    variant = choose_gradients(problem)
    assert variant.packs_mask and not variant.has_lists and variant.is_split == is_split
    assert_training_matches(run, make_tensors(problem, num_hidden_rows=3), problem)


FAULTS = {
    "nothing hidden": ("kept_ahead", "if c.HAS_MASK", "if False"),
    "another weight for those": ("kept_ahead", ", 0.0)", ", 1.0)"),
    "the words of the tile before": (
        "gradient_consumer",
        "kept_ahead(c, w, p, stage ^ 1)",
        "kept_ahead(c, w, p, stage)",
    ),
    "one warpgroup's bits": ("kept_ahead", "2 * stage + w", "2 * stage"),
    "one half of the keys": ("gradient_producer", "lines + w", "lines"),
    "other keys": ("gradient_producer", "c.first_key // c.KEYS", "c.first_key // c.ROWS"),
    "other rows": ("gradient_producer", "tile * (2 * c.ROWS))", "tile * c.ROWS)"),
    "twice the same rows": ("copied_words", "place.slice(WORDS, WORDS)", "place.slice(0, WORDS)"),
    "words before they are there": ("backward", "4 if HAS_MASK else 2", "2"),
    "the other half's bits": ("shown", "// 8 % 2 * 2", "// 8 % 2"),
    "bits of a pair in turn": ("shown", "places % 2", "1 - places % 2"),
    "the other tile's bits": ("shown", "[0, 1, 3, 2]", "[0, 1, 2, 3]"),
    "the next block's bits": (
        "attend_blocks",
        "mask = next_mask\n            next_mask = load",
        "next_mask = mask = load",
    ),
    "another block's bits": ("load_mask", "block * (BLOCK_N // 64)", "block"),
    "another warpgroup's bits": ("load_mask", "gl.minimum(first_row, ", "gl.minimum(block, "),
    "the tile behind's bits": ("load_mask", "gl.minimum(tile + 1, across - 1)", "tile"),
    "a tile too few": ("listed_range", "gl.maximum(high, low) + 1", "gl.maximum(high, low)"),
    "begun too late": ("listed_range", "gl.maximum(low, first)", "low + 1"),
}
FAULTS_OF_SPLIT = {
    "nothing hidden": ("kept", "shown(p, mask, 0.0)", "p"),
    "another weight for those": ("kept", "mask, 0.0", "mask, 1.0"),
    "another tile of keys": ("load_tile", "number = key_tile *", "number = row_tile *"),
    "another tile of rows": ("load_tile", "number = row_tile *", "number = key_tile *"),
    "a tile too few": ("listed_range", "gl.maximum(high, low) + 1", "gl.maximum(high, low)"),
    "begun too late": ("listed_range", "gl.maximum(low, first)", "low + 1"),
}


@on_a_cpu
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("is_split", "name"),
    [*((False, name) for name in FAULTS), *((True, name) for name in FAULTS_OF_SPLIT)],
)
def test_a_fault_in_the_device_code_is_seen(
    is_split: bool, name: str, simulated: Any, rewritten: Callable[..., Any]
) -> None:
    function, old, new = (FAULTS_OF_SPLIT if is_split else FAULTS)[name]
    softcap = 20.0 if is_split else 0.0
    problem, tensors = made(speckled, requires_grad=True, len_q=270, len_k=330, softcap=softcap)
    assert choose_gradients(problem).is_split == is_split
    simulated.replace(function, partial(rewritten, old=old, new=old))
    assert_training_matches(run, tensors, problem)
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises((AssertionError, TimeoutError)):
        assert_training_matches(run, tensors, problem)


@on_a_cpu
@pytest.mark.parametrize("block", [(128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_block_of_keys_waits_for_the_last_before_it_that_visits_a_tile(
    pattern: Pattern, block: tuple[int, int]
) -> None:
    mask = pattern(500, 700)
    tiles = packed_tiles(mask, block, by_columns=True)
    found = turns_of(mask, tiles, block)[0, 0].tolist()
    assert turns_of(mask, tiles, block) is turns_of(mask, tiles, block)
    visited: list[range] = []
    for seen in blocks_of(mask.T, *block):
        for tile, due in enumerate(found[len(visited)]):
            before = [number for number, those in enumerate(visited, 1) if tile in those]
            assert due == max(before, default=0)
        visited.append(range(seen[0], seen[-1] + 1) if seen else range(1))
    assert len(found) == len(visited)


IN_ORDER: dict[str, Any] = {"requires_grad": True, "deterministic": True, "len_q": 400}


@on_a_cpu
@pytest.mark.usefixtures("simulated", "small", "late", "together")
@pytest.mark.parametrize(
    ("pattern", "head_dim"),
    [(pattern, (64, 128)[place % 2]) for place, pattern in enumerate(PATTERNS)],
)
def test_sums_have_one_order_whatever_a_mask_leaves_out(pattern: Pattern, head_dim: int) -> None:
    problem, tensors = made(pattern, **IN_ORDER, head_dim=head_dim)
    variant = choose_gradients(problem)
    assert variant.is_ordered and variant.has_lists
    assert sums_are_the_same_each_time(tensors, problem)


def by_sequence(*patterns: Pattern, **values: Any) -> tuple[AttentionProblem, Tensors]:
    """Return a problem with a mask of its own for each sequence, and its tensors."""
    length, batch = values["len_q"], len(patterns)
    usual = {"precision": Precision.BF16, "num_heads": 2, "head_dim": 64, "requires_grad": True}
    shape = (batch, 1, length, length)
    problem = make_problem(mask=MaskKind.BOOLEAN, mask_shape=shape, batch=batch, **usual | values)
    assert lists_mask(problem) and choose_gradients(problem).has_lists
    tensors = make_tensors(problem)
    mask = torch.stack([pattern(length, length) for pattern in patterns])[:, None]
    return problem, with_tensors(tensors, mask=mask.to(tensors.query.device))


@on_a_cpu
@pytest.mark.usefixtures("simulated", "small", "late", "together")
@pytest.mark.parametrize("deterministic", [False, True])
def test_each_sequence_has_its_own_lists(deterministic: bool) -> None:
    problem, tensors = by_sequence(documents, stairs, len_q=300, deterministic=deterministic)
    assert_training_matches(run, tensors, problem)
    assert not deterministic or sums_are_the_same_each_time(tensors, problem)


FAULTS_OF_PLANES = {
    "another sequence's words": ("gradient_producer", "c.batch * c.of_batch", "0 * c.of_batch"),
    "another head's words": ("gradient_producer", "head * c.of_head", "0 * c.of_head"),
    "another sequence's lists": ("backward", "batch * list_stride_b + block", "block + 0"),
}


@on_a_cpu
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", FAULTS_OF_PLANES)
def test_a_fault_in_whose_mask_it_is_is_seen(
    name: str, simulated: Any, rewritten: Callable[..., Any]
) -> None:
    function, old, new = FAULTS_OF_PLANES[name]
    problem, tensors = by_sequence(documents, stairs, len_q=300)
    if "head" in name:
        values = PACKED_ALONE["of each head"]
        problem = make_problem(head_dim=64, requires_grad=True, **values)
        tensors = make_tensors(problem)
    simulated.replace(function, partial(rewritten, old=old, new=old))
    assert_training_matches(run, tensors, problem)
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises(AssertionError):
        assert_training_matches(run, tensors, problem)


FAULTS_OF_ORDER = {
    "nobody waited for": ("await_number", "turn < due", "turn < 0"),
    "the block before that": ("await_number", "turn < due", "turn < due - 1"),
    "another tile's": ("turn_of", "c.before + tile", "c.before + c.first_tile"),
    "another block's": ("backward", "before += number.to(gl.int64) * list_width", "before += 0"),
}


@on_a_cpu
@pytest.mark.usefixtures("small", "late", "together")
@pytest.mark.parametrize("name", FAULTS_OF_ORDER)
def test_a_fault_in_the_order_of_sums_is_seen(
    name: str, simulated: Any, rewritten: Callable[..., Any]
) -> None:
    function, old, new = FAULTS_OF_ORDER[name]
    # Each block of keys begins at another tile of rows, and the last is seen by all.
    problem, tensors = made(stairs, **IN_ORDER | {"len_q": 300}, len_k=900)
    simulated.replace(function, partial(rewritten, old=old, new=old))
    assert sums_are_the_same_each_time(tensors, problem)
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with suppress(TimeoutError):  # of a block that waits for one that never comes
        assert not all(sums_are_the_same_each_time(tensors, problem) for _ in range(8))


@on_a_cpu
@pytest.mark.usefixtures("small")
def test_rows_that_see_something_are_computed_again_where_their_reference_is_too_low(
    simulated: Any, rewritten: Callable[..., Any]
) -> None:
    problem, tensors = made(padded)
    # The last block of keys, whose largest score is every row's reference, has scores of 0.
    key = tensors.kv.key.clone()
    key[:, :, 256:] = 0.0
    tensors = with_tensors(tensors, query=200.0 * tensors.query, key=key)
    assert choose(problem).fixed
    assert_executor_matches(run, tensors, problem)
    old = "(gl.load(c.lists.sees + line + rows, mask=bad, other=0) != 0)"
    simulated.replace("finish_tile", partial(rewritten, old=old, new="(rows < 0)"))
    with pytest.raises(AssertionError):
        assert_executor_matches(run, tensors, problem)


def made(pattern: Pattern, **values: Any) -> tuple[AttentionProblem, Tensors]:
    """Return a problem with a mask of a pattern, the same for all heads, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 32, "num_heads": 2, "len_q": 300}
    values = usual | values
    len_q = values["len_q"]
    len_k = values.setdefault("len_k", len_q)
    problem = make_problem(mask=MaskKind.BOOLEAN, mask_shape=(1, 1, len_q, len_k), **values)
    assert lists_mask(problem)
    tensors = make_tensors(problem)
    mask = pattern(len_q, len_k)[None, None].to(tensors.query.device)
    return problem, with_tensors(tensors, mask=mask)


@on_a_cpu
@pytest.mark.usefixtures("simulated", "small")
@pytest.mark.parametrize("values", [
    {"aux": Aux.LSE | Aux.ENTROPY},
    {"len_k": 464, "head_dim": 128},
    {"precision": Precision.FP16},
    {"aux": Aux.LSE | Aux.ROW_MAX},
    {"softcap": 20.0, "has_alibi": True, "has_sinks": True},
    {"len_q": 150, "len_k": 400, "head_dim": 160, "num_heads": 4, "num_kv_heads": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_left_out_changes_nothing(pattern: Pattern, values: dict[str, Any]) -> None:
    problem, tensors = made(pattern, **values)
    assert choose(problem).list_ratio
    assert_executor_matches(run, tensors, problem)


@on_a_cpu
@pytest.mark.usefixtures("simulated", "small")
@pytest.mark.parametrize("values", [
    {"len_q": 200, "len_k": 264},
    {"len_q": 264, "len_k": 200, "deterministic": True},
    {"head_dim": 128, "num_heads": 4, "num_kv_heads": 2, "len_q": 200},
    {"len_q": 200, "softcap": 20.0},
    {"head_dim": 160, "num_heads": 4, "num_kv_heads": 2, "len_q": 140},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("pattern", PATTERNS)
def test_nor_does_it_change_gradients(pattern: Pattern, values: dict[str, Any]) -> None:
    problem, tensors = made(pattern, requires_grad=True, **values)
    assert choose_gradients(problem).has_lists
    assert_training_matches(run, tensors, problem)
    assert tensors.mask is not None
    blind = ~tensors.mask[0, 0].any(-1)
    assert not gradients_of(run(tensors, problem), tensors)["query"][:, :, blind].any()


@on_a_cpu
@pytest.mark.usefixtures("simulated", "small")
@pytest.mark.parametrize("len_k", [256, 300])
def test_what_is_noted_as_compiled_is_what_is_asked_for(
    len_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[object] = []
    monkeypatch.setattr(prepared, "note", noted.append)
    problem, tensors = made(causal, len_q=130, len_k=len_k)
    run(tensors, problem)
    assert ("hopper", choose(problem)) in noted


@on_a_cpu
@pytest.mark.usefixtures("simulated", "small")
def test_an_operator_reads_its_mask_at_each_call() -> None:
    """Compiled graphs write one mask where another was, which PyTorch counts as no write."""
    problem, tensors = made(causal, len_q=130, len_k=130)
    assert tensors.mask is not None
    hopper.executor.KERNELS.operator(tensors, problem, 0)
    version = tensors.mask._version
    tensors.mask.numpy()[:] = documents(130, 130).flip(1).numpy()
    assert tensors.mask._version == version

    def through(tensors: Tensors, problem: AttentionProblem) -> Result:
        return hopper.executor.KERNELS.operator(tensors, problem, 0)

    assert_executor_matches(through, tensors, problem)


@on_a_cpu
def test_views_of_one_mask_and_one_expanded_over_a_batch() -> None:
    whole = torch.stack([causal(300, 300), documents(300, 300), padded(300, 300)])
    views = whole.unbind(0)
    first = [listed_blocks(view)[0] for view in views]
    again = [listed_blocks(view)[0] for view in whole.unbind(0)]
    assert all(one is other for one, other in zip(first, again, strict=True))
    expanded = views[0].expand(70_000, 1, 300, 300)
    assert listed_blocks(expanded)[0].shape == (1, 1, 3)
    assert words_of(expanded).shape == (1, 1, 25, 128)


def test_lists_are_made_where_one_mask_serves_many_heads() -> None:
    usual: dict[str, Any] = {"precision": Precision.BF16, "num_heads": 8, "len_q": 1024}
    boolean: dict[str, Any] = usual | {"mask": MaskKind.BOOLEAN}
    shape = (1, 1, 1024, 1024)
    assert lists_mask(make_problem(**boolean, mask_shape=shape))
    assert lists_mask(make_problem(**boolean, mask_shape=(1024, 1024)))
    assert is_listed((1, 1024, 1024), 1024, 1024) and not is_listed((1000, 1024), 1000, 1024)
    others: dict[str, dict[str, Any]] = {
        "of each head": boolean | {"mask_shape": (1, 8, 1024, 1024)},
        "of keys alone": boolean | {"mask_shape": (1, 1, 1, 1024)},
        "one for all keys": boolean | {"mask_shape": (1, 1, 1024, 1)},
        "numbers": usual | {"mask": MaskKind.ADDITIVE, "mask_shape": shape},
        "causal order too": boolean | {"mask_shape": shape, "is_causal": True},
        "a window too": boolean | {"mask_shape": shape, "window": (90, 3)},
        "few heads": boolean | {"mask_shape": shape, "num_heads": 2},
        "alike in any batch": boolean | {"mask_shape": shape, "batch_invariant": True},
    }
    for name, values in others.items():
        problem = make_problem(**values)
        assert not lists_mask(problem), name
        assert not choose(problem).list_ratio, name
        assert not choose_gradients(problem).has_lists, name


ON_A_CARD: dict[str, Any] = {"device_type": "cuda", "num_heads": 8, "num_kv_heads": 4}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_on_a_card_nothing_changes_either(pattern: Pattern, head_dim: int) -> None:
    sizes = {"len_q": 1030, "len_k": 1296, "head_dim": head_dim}
    problem, tensors = made(pattern, aux=Aux.LSE, **sizes, **ON_A_CARD)
    assert_executor_matches(run, tensors, problem)
    problem, tensors = made(pattern, requires_grad=True, **sizes, **ON_A_CARD)
    assert_training_matches(run, tensors, problem)


@pytest.mark.gpu
@on_hopper
def test_on_a_card_each_sequence_has_its_own_mask() -> None:
    values = ON_A_CARD | {"batch": 3, "len_q": 1152, "head_dim": 64, "requires_grad": True}
    problem = make_problem(
        mask=MaskKind.BOOLEAN, mask_shape=(3, 1, 1152, 1152), precision=Precision.BF16, **values
    )
    assert lists_mask(problem)
    mask = torch.stack([pattern(1152, 1152) for pattern in (causal, padded, documents)])
    tensors = with_tensors(make_tensors(problem), mask=mask[:, None].cuda())
    assert_training_matches(run, tensors, problem)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_on_a_card_each_tile_of_a_block_has_its_own_list(head_dim: int) -> None:
    """A kernel that takes the first tile's list for all of them waits for ever."""
    values = ON_A_CARD | {"batch": 8, "num_heads": 8, "len_q": 1152, "head_dim": head_dim}
    problem = make_problem(
        mask=MaskKind.BOOLEAN, mask_shape=(8, 1, 1152, 1152), precision=Precision.BF16, **values
    )
    assert lists_mask(problem)
    places = torch.arange(1152)
    first = torch.arange(8)[:, None, None, None] * 80
    mask = (causal(1152, 1152) & (places >= first)) | torch.eye(1152, dtype=torch.bool)
    tensors = with_tensors(make_tensors(problem), mask=mask.cuda())
    assert_executor_matches(run, tensors, problem)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_on_a_card_a_mask_of_each_head_is_packed(head_dim: int) -> None:
    values = BOOLEAN | ON_A_CARD | {"len_q": 600, "len_k": 720, "batch": 2}
    problem = make_problem(head_dim=head_dim, requires_grad=True, **values)
    assert choose_gradients(problem).packs_mask
    assert_training_matches(run, make_tensors(problem, num_hidden_rows=9), problem)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pattern", [causal, documents, scattered, stairs, everything])
def test_on_a_card_sums_have_one_order(pattern: Pattern, head_dim: int) -> None:
    values = IN_ORDER | ON_A_CARD | {"len_q": 1530, "len_k": 1700, "head_dim": head_dim}
    problem, tensors = made(pattern, **values)
    assert choose_gradients(problem).is_ordered
    assert_training_matches(run, tensors, problem)
    assert all(sums_are_the_same_each_time(tensors, problem) for _ in range(5))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("deterministic", [False, True])
def test_on_a_card_more_blocks_than_it_runs_at_a_time_have_their_lists(deterministic: bool) -> None:
    patterns = (causal, documents, stairs, padded, scattered, banded, nothing, everything)
    values = ON_A_CARD | {"num_heads": 8, "len_q": 1152, "deterministic": deterministic}
    problem, tensors = by_sequence(*patterns, **values)
    assert_training_matches(run, tensors, problem)
    assert not deterministic or sums_are_the_same_each_time(tensors, problem)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("len_k", [1152, 1300, 1301])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("is_dense", [False, True])
def test_on_a_card_words_are_those_of_the_mask(
    len_k: int, by_columns: bool, is_dense: bool
) -> None:
    torch.manual_seed(len_k)
    mask = torch.rand(1030, len_k) < 0.5
    there = mask.cuda() if is_dense else mask.T.contiguous().cuda().T
    words = words_of(there, by_columns=by_columns)[0, 0].cpu()
    right = mask.T if by_columns else mask
    assert torch.equal(unpacked(words, *right.shape), right)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_of_gradients_follows_a_mask_that_is_written_to(deterministic: bool) -> None:
    values = ON_A_CARD | {"requires_grad": True, "deterministic": deterministic}
    problem, tensors = made(causal, len_q=1152, head_dim=64, **values)
    mask = tensors.mask
    assert mask is not None
    upstream = torch.randn_like(tensors.query)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(run(tensors, problem).output, (tensors.key, tensors.kv.value),
                                   upstream)  # fmt: skip

    graph, found = recorded(gradients)
    for pattern in (documents, nothing, everything, causal):
        mask.copy_(pattern(1152, 1152))
        graph.replay()
        # Sums of queries' gradients alone have no order.
        assert all(map(torch.equal, found, gradients()))


@pytest.mark.gpu
@on_hopper
def test_a_graph_follows_a_mask_that_is_written_to() -> None:
    problem, tensors = made(causal, len_q=1152, head_dim=64, **ON_A_CARD)
    mask = tensors.mask
    assert mask is not None
    run(tensors, problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(tensors, problem).output
    for pattern in (documents, nothing, everything, causal):
        mask.copy_(pattern(1152, 1152))
        graph.replay()
        torch.testing.assert_close(output, run(tensors, problem).output, rtol=0.0, atol=0.0)
