"""Attention in chunks of rows: gradients as right as in one piece, and masks that are kept."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaattn.backends import chunked, common, masked, registry, tiles
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.keys_values import KeysValues
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, Launch, MaskKind, Precision
from adaattn.testing import (
    assert_gradients_match,
    assert_results_match,
    attention,
    cast_tensors,
    fake_facts,
    gradients_of,
    make_problem,
    make_tensors,
    num_summands,
    term_sizes,
)

BF16 = Precision.BF16
WINDOW: dict[str, Any] = {"window": (9, 3), "len_q": 48}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Start and leave without kept masks."""
    tiles._TILES.clear()
    yield
    tiles._TILES.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Note each mask that is made from positions."""
    found: list[torch.Tensor] = []
    make = tiles.made_tile

    def noting(*arguments: Any) -> torch.Tensor:
        found.append(make(*arguments))
        return found[-1]

    monkeypatch.setattr(tiles, "made_tile", noting)
    return found


def run(tensors: Tensors, problem: AttentionProblem, rows: int) -> Result:
    return chunked.run(
        tensors, problem, HeadGroup(capability="chunked", launch=Launch(chunk_rows=rows))
    )


def check(problem: AttentionProblem, rows: int, **packing: Any) -> None:
    """Assert that the result and every gradient obey the rule for numbers."""
    tensors = make_tensors(problem, **packing)
    wide = cast_tensors(tensors, torch.float64)
    found, exact, eager = (
        run(tensors, problem, rows),
        attention(wide, problem),
        attention(tensors, problem),
    )
    assert_results_match(found, exact, eager, summands=num_summands(problem, found.output))
    if problem.requires_grad:
        assert_gradients_match(
            gradients_of(found, tensors),
            gradients_of(exact, wide),
            gradients_of(eager, tensors),
            sizes=term_sizes(tensors, problem),
            problem=problem,
        )


MANY_CHUNKS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "plain": {},
    "causal": {"is_causal": True, "len_k": 700, "align": Align.BOTTOM_RIGHT},
    "window over blocks of keys": {"window": (600, 40), "len_q": 1100},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2, "softcap": 5.0},
    "sinks": {"has_sinks": True, "sinks_require_grad": True},
    "ALiBi": {"has_alibi": True, "alibi_requires_grad": True, "is_causal": True},
    "mask of the keys": {
        "mask": MaskKind.ADDITIVE,
        "mask_shape": (1, 1, 1, 512),
        "mask_requires_grad": True,
    },
}


@pytest.mark.parametrize("name", MANY_CHUNKS)
def test_gradients_of_many_chunks_are_as_right_as_those_of_eager_pytorch(name: str) -> None:
    """Autograd once added the chunks' gradients in bf16.

    With softcap and 64 chunks the gradient of k had 15 times the error that it has in one. Eager
    PyTorch rounds its result to bf16 here and sums in fp32: what an own sum in bf16 may lose
    would hide the fault.
    """
    values = {"len_q": 512, "precision": BF16, "requires_grad": True, **MANY_CHUNKS[name]}
    check(make_problem(**values), rows=8)


@pytest.mark.parametrize(
    "values",
    [
        {"has_alibi": True, "is_causal": True},
        {"window": (40, 3)},
        {"mask": MaskKind.ADDITIVE, "window": (70, -1)},
    ],
    ids=str,
)
def test_chunks_that_keep_no_scores_run_once_in_training(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they keep for the backward pass has a limit, past which they are computed again."""
    problem = make_problem(len_q=256, requires_grad=True, **values)
    tensors, calls = make_tensors(problem), []
    sdpa = masked.fused_attention
    monkeypatch.setattr(masked, "fused_attention", lambda *given: calls.append(0) or sdpa(*given))
    for most, runs in ((1 << 26, 1), (0, 2)):
        monkeypatch.setitem(chunked._MOST_KEPT, "cpu", most)
        calls.clear()
        gradients_of(run(tensors, problem, 32), tensors)
        assert len(calls) == runs * 8
        check(problem, 32)


PACKINGS: dict[str, dict[str, Any]] = {
    "in order": {"is_causal": True},
    "all keys": {},
    "window": {"window": (9, 3)},
    "dilation": {"is_causal": True, "dilation": 3},
    "to the last key": {"is_causal": True, "align": Align.BOTTOM_RIGHT},
    "ALiBi": {"is_causal": True, "has_alibi": True},
    "softcap": {"is_causal": True, "softcap": 3.0},
    "sinks": {"window": (9, 0), "has_sinks": True},
    "softcap to the last key": {"is_causal": True, "align": Align.BOTTOM_RIGHT, "softcap": 3.0},
}


@pytest.mark.parametrize("lengths", [((9, 0, 5), (9, 3, 7)), ((150, 0, 61), (150, 70, 20))])
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_sequences_are_right_together_and_one_by_one(
    name: str, lengths: tuple[tuple[int, ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths_q, lengths_k = lengths
    values = {"num_heads": 4, "head_dim": 32, "requires_grad": True, **PACKINGS[name]}
    problem = make_problem(lengths_q=lengths_q, lengths_k=lengths_k, **values)
    together: list[bool] = []
    is_one_call = chunked._is_one_call
    monkeypatch.setattr(
        chunked, "_is_one_call", lambda given: together.append(is_one_call(given)) or together[-1]
    )
    check(problem, 0, lengths_q=lengths_q, lengths_k=lengths_k)
    assert together == [sum(lengths_q) < 100 and "ALiBi" not in name]


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("machine", ["cpu", "cpu_amx"])
def test_more_packed_sequences_are_one_call_where_products_go_by_tiles(
    precision: Precision, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "_CPU", fake_facts(machine))
    problem = make_problem(
        lengths_q=(24, 32, 16), num_heads=16, head_dim=128, precision=precision, is_causal=True
    )
    assert chunked._is_one_call(problem) is (machine == "cpu_amx" and precision is Precision.BF16)


PATTERNS: dict[str, dict[str, Any]] = {
    "window": {"window": (9, 3)},
    "window and scale": {"window": (9, 3), "scale": 0.7},
    "other window": {"window": (8, 3)},
    "causal window": {"window": (9, -1), "is_causal": True},
    "dilation": {"dilation": 3},
    "dilated and causal": {"dilation": 3, "is_causal": True},
    "causal to the first key": {"is_causal": True, "len_k": 70},
    "causal to the last key": {"is_causal": True, "len_k": 70, "align": Align.BOTTOM_RIGHT},
    "rows that see no key": {"is_causal": True, "len_k": 20, "align": Align.BOTTOM_RIGHT},
    "causal with a mask": {"is_causal": True, "mask": MaskKind.BOOLEAN},
    "window with a bias": {"window": (9, 3), "mask": MaskKind.ADDITIVE},
    "window with a bias of the keys": {
        "window": (9, 3),
        "mask": MaskKind.ADDITIVE,
        "mask_shape": (1, 1, 1, 48),
    },
    "window with ALiBi": {"window": (9, 3), "has_alibi": True},
    "window with ALiBi and a mask": {
        "window": (9, 3),
        "has_alibi": True,
        "mask": MaskKind.BOOLEAN,
    },
    "window with ALiBi and a bias": {
        "window": (9, 3),
        "has_alibi": True,
        "mask": MaskKind.ADDITIVE,
    },
    "window with softcap and outputs": {"window": (9, 3), "softcap": 5.0, "aux": Aux.LSE},
}


def test_kept_masks_are_never_those_of_another_pattern() -> None:
    """All of them run beside one another, each a second time."""
    for _ in range(2):
        for values in PATTERNS.values():
            for rows in (0, 16):
                check(make_problem(**{"len_q": 48, "requires_grad": True, **values}), rows)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_call_like_one_before_makes_no_mask(name: str, made: list[torch.Tensor]) -> None:
    problem = make_problem(**{"len_q": 48, **PATTERNS[name]})
    first = run(make_tensors(problem, seed=1), problem, 16).output
    assert made
    made.clear()
    assert torch.equal(first, run(make_tensors(problem, seed=1), problem, 16).output)
    assert not made


SLIDING: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "not causal": {},
    "more keys": {"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 77},
    "fewer keys": {"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 21},
    "top left": {"is_causal": True, "len_k": 77},
    "few keys": {"len_k": 5},
    "dilated": {"is_causal": True, "dilation": 3},
}


@pytest.mark.parametrize("values", SLIDING.values(), ids=SLIDING)
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_the_chunks_of_alibi_are_windows_of_one_tile(rows: int, values: dict[str, Any]) -> None:
    """Made anew for each chunk the bias took as long as the products."""
    problem = make_problem(has_alibi=True, **({"len_q": 43, "len_k": 43} | values))
    check(problem, rows)
    first = len(tiles._TILES)
    check(problem, rows)
    assert 0 < first == len(tiles._TILES) <= 2, "the bias, and what position hides in it"


def test_a_bias_too_large_for_one_tile_is_made_for_each_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "CPU_BYTES", 1)
    problem = make_problem(has_alibi=True, is_causal=True, len_q=43, len_k=43)
    tensors = make_tensors(problem, seed=3)
    assert torch.equal(run(tensors, problem, 43).output, run(tensors, problem, 43).output)
    check(problem, 16)
    assert not tiles._TILES


def test_chunks_at_equal_distances_share_a_mask(made: list[torch.Tensor]) -> None:
    problem = make_problem(window=(16, 0), is_causal=True, len_q=16 * 20)
    run(make_tensors(problem), problem, 16)
    assert len(made) == 2, "one for the first chunk and one for all others"


@pytest.mark.parametrize("name", [name for name in PATTERNS if "mask" not in PATTERNS[name]])
@pytest.mark.parametrize("training", [False, True])
def test_what_is_bound_gives_what_is_run(name: str, training: bool) -> None:
    """It takes the slopes as the caller gave them, for a batch or for all."""
    problem = make_problem(**{"len_q": 48, "requires_grad": training, **PATTERNS[name]})
    group = HeadGroup(capability="chunked")
    tensors = make_tensors(problem)
    bound = registry.direct(problem, group)
    assert (bound is None) == ("outputs" in name)
    if bound is None:
        return
    slopes = tensors.alibi_slopes
    for given in [None] if slopes is None else [slopes, slopes[0]]:
        output = bound(tensors.query, tensors.key, tensors.value, None, None, given)
        assert torch.equal(output, chunked.run(tensors, problem, group).output)
    if slopes is not None:
        slopes.mul_(2)
        output = bound(tensors.query, tensors.key, tensors.value, None, None, slopes)
        assert torch.equal(output, chunked.run(tensors, problem, group).output)


@pytest.mark.parametrize(
    "values",
    [{}, {"is_causal": True}, {"window": (2, 1)}, {"is_causal": True, "align": Align.BOTTOM_RIGHT}],
    ids=str,
)
def test_packed_sequences_are_one_call_that_reads_no_bounds(values: dict[str, Any]) -> None:
    """As on a GPU, where the bounds are not known to the host."""
    lengths = {"lengths_q": (5, 0, 9, 2), "lengths_k": (7, 3, 9, 0)}
    problem = make_problem(num_heads=4, num_kv_heads=2, head_dim=8, **lengths, **values)
    tensors = make_tensors(problem, **lengths)
    group = HeadGroup(capability="chunked")
    call = chunked.direct(replace(problem, device_type="cuda"), group)
    assert call is not None and tensors.cu_seqlens_q is not None
    starts = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    for bounds_q in (tensors.bounds_q, (0, 6, 6, 14, 16)):
        tensors.cu_seqlens_q.copy_(torch.tensor(bounds_q, dtype=torch.int32))
        tensors = replace(tensors, bounds_q=bounds_q)
        for _ in range(2):
            with Operators() as seen:
                output = call(tensors.query, tensors.key, tensors.value, None, None, None, *starts)
            exact = attention(cast_tensors(tensors, torch.float64), problem)
            summands = num_summands(problem, output)
            eager = attention(tensors, problem)
            assert_results_match(Result(output=output), exact, eager, summands=summands)
        # The host has read none, and what it made is kept.
        assert seen.names == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]


class Operators(TorchDispatchMode):
    """Notes the operators that run, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_one_chunk_with_a_kept_mask_is_one_kernel() -> None:
    problem = make_problem(**WINDOW)
    tensors = make_tensors(problem)
    run(tensors, problem, 0)
    with Operators() as seen:
        run(tensors, problem, 0)
    assert seen.names == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]


def test_kept_masks_keep_to_their_bytes_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CPU_BYTES", 40_000)
    monkeypatch.setattr(tiles, "_KEPT_TILES", 5)
    for width in range(1, 12):
        for length in (24, 64, 200):  # the last is too large to keep
            problem = make_problem(window=(width, 0), len_q=length)
            run(make_tensors(problem), problem, 0)
            assert sum(tile.nbytes for tile, _ in tiles._TILES.values()) <= 40_000
            assert len(tiles._TILES) <= 5


def test_a_tile_too_large_to_keep_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CPU_BYTES", 40_000)
    small = make_problem(window=(3, 0), len_q=24)
    run(make_tensors(small), small, 0)
    large = make_problem(window=(3, 0), len_q=200)
    run(make_tensors(large), large, 0)
    assert len(tiles._TILES) == 1
    tiles.forget(torch.device("cpu"))
    assert not tiles._TILES


def test_a_bias_made_where_no_gradient_is_wanted_holds_no_graph() -> None:
    """Leaving inference mode turned gradients on: training then went through an old graph."""
    problem = make_problem(has_alibi=True, is_causal=True, len_q=24)
    tensors = make_tensors(problem)
    assert tensors.alibi_slopes is not None
    tensors.alibi_slopes.requires_grad_()
    with torch.no_grad():
        run(tensors, problem, 0)
    assert not any(tile.requires_grad for tile, _ in tiles._TILES.values())


def test_a_mask_made_in_inference_mode_serves_training() -> None:
    """A tensor made there can never be saved for a backward pass."""
    problem = make_problem(**WINDOW)
    with torch.inference_mode():
        run(make_tensors(problem), problem, 0)
    assert len(tiles._TILES) == 1
    check(replace(problem, requires_grad=True), 0)
    assert len(tiles._TILES) == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nothing_is_kept_of_what_a_transform_or_a_compiler_traces() -> None:
    problem = make_problem(**WINDOW, batch=2)
    tensors = make_tensors(problem)

    def call(query: torch.Tensor) -> torch.Tensor:
        return run(replace(tensors, query=query), problem, 16).output

    def of_one(query: torch.Tensor) -> torch.Tensor:
        kv = KeysValues(key=tensors.key[:1], value=tensors.value[:1])
        one = replace(tensors, query=query[None], kv=kv)
        return run(one, replace(problem, batch=1), 16).output

    torch.func.grad(lambda query: call(query).sum())(tensors.query)
    torch.func.vmap(of_one)(tensors.query)
    torch.compile(call, backend="aot_eager", fullgraph=True)(tensors.query)
    torch.compiler.reset()
    assert not tiles._TILES
