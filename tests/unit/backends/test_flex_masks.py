"""Block masks made in parts, what is kept between calls, and the numbers around the kernel.

FlexAttention's kernels need a GPU. On a CPU an eager stand-in computes what its documentation
says, so that all else is checked there; the tests marked ``gpu`` run the kernels.
"""

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import create_block_mask

from adaattn.backends import flex, flex_masks, flex_tiles
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    assert_gradients_match,
    assert_results_match,
    attention,
    cast_tensors,
    gradients_of,
    make_problem,
    make_tensors,
    num_summands,
    term_sizes,
    with_tensors,
)

CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window": (200, 0)},
    "window both ways": {"window": (300, 128)},
    "window that begins with a tile": {"window": (127, 0)},
    "window beyond int32": {"window": (2**31, 2**31)},
    "dilation": {"dilation": 3, "is_causal": True},
    "dilation beyond a window": {"dilation": 200, "window": (100, -1)},
    "bottom right": {"is_causal": True, "len_q": 130, "align": Align.BOTTOM_RIGHT},
    "rows that see nothing": {"is_causal": True, "len_k": 130, "align": Align.BOTTOM_RIGHT},
    "odd": {"is_causal": True, "len_q": 1000, "len_k": 777},
    "whole tiles": {"window": (1000, 1000)},
    "one sequence": {"lengths_q": (512,), "is_causal": True},
    "sequences": {"lengths_q": (100, 0, 300, 40, 5, 700)},
    "causal sequences": {"lengths_q": (100, 300, 1, 40, 5, 256, 700), "is_causal": True},
    "sequences of whole tiles": {"lengths_q": (128, 256, 128, 512), "is_causal": True},
    "sequences in a window": {"lengths_q": (700, 300), "is_causal": True, "window": (200, -1)},
}
OF_OTHER_LENGTHS: dict[str, dict[str, Any]] = {
    "other keys": {"lengths_q": (100, 0, 300, 200), "lengths_k": (30, 400, 0, 600)},
    "small sequences": {"lengths_q": (9,) * 70, "lengths_k": (7,) * 70, "is_causal": True},
    "to the end": {"lengths_q": (100, 300), "lengths_k": (700, 250), "is_causal": True,
                   "align": Align.BOTTOM_RIGHT},
    "to the end, in a window": {"lengths_q": (100, 300), "lengths_k": (700, 250),
                                "window": (90, 9), "align": Align.BOTTOM_RIGHT},
    "dilation": {"lengths_q": (100, 300), "lengths_k": (700, 250), "dilation": 200},
}  # fmt: skip
SQUARE: dict[str, Any] = {"num_heads": 2, "len_q": 512, "len_k": 512}


@pytest.mark.parametrize("name", CASES)
def test_a_block_mask_is_the_one_that_pytorch_makes(name: str) -> None:
    usual = {} if "lengths_q" in CASES[name] else SQUARE
    _check(*draw(usual | CASES[name]))


@pytest.mark.parametrize("elements", [1, 1 << 26], ids=["row by row", "at once"])
def test_a_mask_of_each_batch_and_head_is_too(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(flex_tiles, "_MASK_ELEMENTS", elements)
    problem = make_problem(num_heads=2, batch=3, len_q=300, len_k=260, is_causal=True)
    tensors = replace(make_tensors(problem, seed=0), mask=torch.rand(3, 2, 300, 260) > 0.5)
    _check(tensors, problem, batch=3, heads=2)


def _check(tensors: Tensors, problem: AttentionProblem, batch: int = 1, heads: int = 1) -> None:
    found = flex_masks.block_mask(tensors, problem)
    shape = (batch, heads, problem.len_q, problem.len_k)
    expected = create_block_mask(flex_masks._mask_mod(tensors, problem), *shape, device="cpu")
    for name in (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
        "full_q_num_blocks",
        "full_q_indices",
    ):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).is_contiguous(), f"{name}: kernels know no strides"
    assert found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE


@pytest.mark.parametrize("name", OF_OTHER_LENGTHS)
def test_a_tile_that_is_seen_is_never_left_out(name: str) -> None:
    """Where sequences have other keys than queries, several may meet in a tile that none sees."""
    _check_holds(*draw(OF_OTHER_LENGTHS[name]))


@pytest.mark.parametrize("seed", range(60))
def test_tiles_of_any_positions_are_right(seed: int) -> None:
    of = random.Random(seed)
    values: dict[str, Any] = {"is_causal": of.random() < 0.5, "align": of.choice(tuple(Align))}
    if of.random() < 0.7:
        count = of.choice((1, 2, 5, 40))
        values |= {
            name: (1, *(of.choice((0, 1, 17, 127, 128, 129, 300)) for _ in range(count)))
            for name in ("lengths_q", "lengths_k")[: of.choice((1, 2))]
        }
    else:
        values |= {name: of.choice((1, 128, 200, 700)) for name in ("len_q", "len_k")}
    left, right = (of.choice((-1, 0, 5, 127, 128, 400)) for _ in range(2))
    values["window"] = (left, -1 if values["is_causal"] else right)
    values["dilation"] = of.choice((1, 1, 1, 2, 150))
    _check_holds(*draw(values))


def test_lists_of_tiles_are_one_graph_for_many_packings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are compiled: some 150 small kernels at each step of training, otherwise."""
    graphs: list[object] = []

    def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        return inner(function, backend=lambda graph, _: graphs.append(graph) or graph, **how)

    inner = torch.compile
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(flex_masks, "_stays_eager", lambda tensor: False)
    flex_masks.compiled_once.cache_clear()
    for lengths in ((100, 412), (1, 300, 211), (512,), (128, 128, 256)):
        _check(*draw({"lengths_q": lengths, "is_causal": True, "window": (150, -1)}))
    flex_masks.compiled_once.cache_clear()
    assert len(graphs) == 2  # up to one sequence and up to three


def _check_holds(tensors: Tensors, problem: AttentionProblem) -> None:
    """Assert that tiles seen as a whole are those that are, and that no other seen is lacking."""
    shape = (1, 1, problem.len_q, problem.len_k)
    mask_mod = flex_masks._mask_mod(tensors, problem)
    partial, full = flex_tiles.tiles_by_position(
        problem, torch.device("cpu"), flex_masks._packing(tensors, problem)
    )
    seen_in_part, whole = flex_tiles.written_tiles(mask_mod, shape, torch.device("cpu"))
    assert torch.equal(full, whole)
    assert bool((partial >= seen_in_part).all())
    if not problem.num_sequences:
        assert torch.equal(partial, seen_in_part)


def eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Callable[..., torch.Tensor] | None,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    return_aux: Any = None,
) -> Any:
    """Return what FlexAttention computes, by eager operators that autograd differentiates."""
    size = query.shape[1] // key.shape[1]
    assert enable_gqa == (size > 1)
    key, value = (item.repeat_interleave(size, dim=1) for item in (key, value))
    lengths = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    places = [torch.arange(n, device=query.device) for n in lengths]
    b, h, i, j = torch.meshgrid(*places, indexing="ij")
    scores = scale * (query.float() @ key.float().mT)
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if block_mask is not None:
        seen = block_mask.mask_mod(b, h, i, j)
        tiles = block_mask.to_dense().bool().repeat_interleave(128, 2).repeat_interleave(128, 3)
        seen = seen & tiles[:, :, : lengths[2], : lengths[3]]
        scores = scores.masked_fill(~seen, float("-inf"))
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    weights = scores.softmax(-1).masked_fill(blind, 0.0)
    output = (weights @ value.float()).to(query.dtype)
    if return_aux is None:
        return output
    lse = scores.logsumexp(-1).masked_fill(blind[..., 0], float("-inf"))
    return output, theirs.AuxOutput(lse=lse, max_scores=None)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Put the eager form in the kernel's place; note the facts of each kernel asked for."""
    asked: list[object] = []

    def kernel(function: Callable[..., Any], facts: object) -> Callable[..., Any]:
        asked.append(facts)
        return function

    monkeypatch.setattr(flex, "compiled_once", kernel)
    monkeypatch.setattr(theirs, "flex_attention", eager)
    monkeypatch.setattr(flex_masks, "_KEPT", type(flex_masks._KEPT)())
    return asked


def run(tensors: Tensors, problem: AttentionProblem) -> Result:
    return flex.run(tensors, problem, HeadGroup(capability="flex"))


def check(tensors: Tensors, problem: AttentionProblem) -> None:
    """Assert that the result and every gradient obey the rule for numbers."""
    wide = cast_tensors(tensors, torch.float64)
    found, exact = run(tensors, problem), attention(wide, problem)
    yardstick = attention(tensors, problem)
    assert_results_match(found, exact, yardstick, summands=num_summands(problem, found.output))
    if problem.requires_grad:
        assert_gradients_match(
            gradients_of(found, tensors),
            gradients_of(exact, wide),
            gradients_of(yardstick, tensors),
            sizes=term_sizes(tensors, problem),
            problem=problem,
        )


PACKED: dict[str, Any] = {"lengths_q": (40, 0, 88), "lengths_k": (50, 30, 80)}
OTHER: dict[str, Any] = {"lengths_q": (64, 64), "lengths_k": (60, 100)}
FEATURES: dict[str, dict[str, Any]] = {
    "everything seen": {},
    "causal": {"is_causal": True, "len_k": 150, "align": Align.BOTTOM_RIGHT},
    "causal over several tiles": {"len_q": 300, "is_causal": True},
    "softcap and ALiBi": {"softcap": 5.0, "has_alibi": True},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2, "window": (20, 3), "dilation": 2},
    "boolean mask": {"mask": MaskKind.BOOLEAN, "is_causal": True},
    "boolean mask of the keys": {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 128)},
    "additive mask": {"mask": MaskKind.ADDITIVE, "window": (20, 3)},
    "sinks": {"has_sinks": True, "sinks_require_grad": True, "aux": Aux.LSE},
    "sinks over blind rows": {
        "has_sinks": True,
        "sinks_require_grad": True,
        "aux": Aux.LSE,
        "is_causal": True,
        "len_k": 100,
        "align": Align.BOTTOM_RIGHT,
    },
    "blocks": {"len_q": 300, "len_k": 400, "block_size": (128, 256)},
    "blocks and all else": {"len_q": 300, "len_k": 400, "block_size": (256, 128), "batch": 2}
    | {"is_causal": True, "mask": MaskKind.BOOLEAN, "has_sinks": True, "softcap": 5.0},
    "packed": {**PACKED},
    "packed, causal, ALiBi": {
        **PACKED,
        "is_causal": True,
        "align": Align.BOTTOM_RIGHT,
        "has_alibi": True,
    },
}


def draw(values: dict[str, Any], **more: Any) -> tuple[Tensors, AttentionProblem]:
    """Return the tensors and the problem of some values and packed lengths."""
    lengths = {name: values[name] for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**{"len_q": 128, "requires_grad": True, **values, **more})
    return make_tensors(problem, **lengths), problem


@pytest.mark.parametrize("name", FEATURES)
def test_the_mods_and_masks_say_what_the_reference_computes(
    stand_in: list[object], name: str
) -> None:
    """In "sinks over blind rows" the log-sum-exp was once the sink instead of -inf."""
    for _ in range(2):
        check(*draw(FEATURES[name]))
    assert stand_in[0] == stand_in[1]


def test_a_sink_of_minus_infinity_over_a_blind_row_is_no_nan(stand_in: list[object]) -> None:
    tensors, problem = draw(FEATURES["sinks over blind rows"])
    assert tensors.sinks is not None
    sinks = torch.full_like(tensors.sinks, float("-inf")).requires_grad_()
    result = run(replace(tensors, sinks=sinks), problem)
    assert result.lse is not None
    assert (result.lse[..., :28] == float("-inf")).all()
    (gradient,) = torch.autograd.grad(result.output.sum(), sinks)
    assert torch.equal(gradient, torch.zeros_like(sinks))


def test_another_packing_needs_no_other_kernel(stand_in: list[object]) -> None:
    """The longest sequence and the number of sequences once had a kernel each compiled for them."""
    longer = {"lengths_q": (128,), "lengths_k": (160,)}
    for lengths in (PACKED, OTHER, longer):
        check(*draw(lengths, is_causal=True, align=Align.BOTTOM_RIGHT))
    assert len(set(stand_in)) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"scale": 0.3},
        {"softcap": 3.0},
        {"window": (5, 0)},
        {"dilation": 2},
        {"is_causal": True},
        {"len_k": 64},
        {"requires_grad": False},
        {"precision": Precision.BF16},
        {"aux": Aux.LSE},
        {"mask": MaskKind.BOOLEAN},
        {"mask": MaskKind.ADDITIVE},
        {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 1, 128)},
        {"has_alibi": True},
        {"lengths_q": (28, 100)},
        {"deterministic": True},
    ],
    ids=str,
)
def test_what_changes_the_kernel_asks_for_another(
    stand_in: list[object], other: dict[str, Any]
) -> None:
    run(*draw({}))
    run(*draw(other))
    assert stand_in[0] != stand_in[1]


def test_layouts_shared_tensors_and_modes_ask_for_another_kernel(stand_in: list[object]) -> None:
    """Dynamo guards each of these, and stops compiling one function after 8 of them."""
    tensors, problem = draw({})
    strided = tensors.query.detach().mT.contiguous().mT.requires_grad_()
    run(tensors, problem)
    run(replace(tensors, query=strided), problem)
    run(replace(tensors, query=tensors.query.detach()), problem)
    run(with_tensors(tensors, key=tensors.query), problem)
    run(with_tensors(tensors, value=tensors.key), problem)
    with torch.no_grad():
        run(tensors, problem)
    with torch.inference_mode():
        run(tensors, problem)
    assert len(set(stand_in)) == 7


@pytest.fixture
def made(stand_in: list[object], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note each block mask that is made."""
    found: list[object] = []
    make = flex_masks._block_mask

    def noting(*arguments: Any) -> object:
        found.append(make(*arguments))
        return found[-1]

    monkeypatch.setattr(flex_masks, "_block_mask", noting)
    return found


@pytest.mark.parametrize("values", [{"is_causal": True}, PACKED], ids=["causal", "packed"])
def test_a_block_mask_is_made_once(made: list[object], values: dict[str, Any]) -> None:
    """An additive mask once had blocks made of every head of every batch, on each call."""
    tensors, problem = draw(values)
    for mask in (None, torch.randn(1, 2, problem.len_q, problem.len_k)):
        for _ in range(2):
            run(replace(tensors, mask=mask), problem)
    assert len(made) == 1


def test_the_block_mask_of_a_list_is_made_once_and_again_when_it_is_written_over(
    made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made at each call it took as long as the attention of 5 % of 16384 tokens (H200)."""
    tensors, problem = draw(FEATURES["blocks"])
    for _ in range(3):
        check(tensors, problem)
    assert len(made) == 1
    blocks = tensors.blocks
    assert blocks is not None
    blocks.counts.zero_()
    check(tensors, problem)
    assert len(made) == 2
    # A CUDA graph makes it anew at each replay: nothing that was kept serves it, nothing is kept.
    kept = dict(flex_masks._KEPT)
    monkeypatch.setattr(flex_masks, "_is_recorded", lambda tensor: True)
    check(tensors, problem)
    assert len(made) == 3 and dict(flex_masks._KEPT) == kept


@pytest.mark.parametrize("values", [{"is_causal": True}, PACKED], ids=["causal", "packed"])
def test_a_graph_of_a_card_makes_its_own(
    made: list[object], values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay with other bounds once saw the documents of the capture; and what a capture makes
    lies in its graph's memory, where it is computed at the first replay."""
    tensors, problem = draw(values)
    run(tensors, problem)
    kept = dict(flex_masks._KEPT)
    monkeypatch.setattr(flex_masks, "_is_recorded", lambda tensor: True)
    check(tensors, problem)
    assert len(made) == 2 and dict(flex_masks._KEPT) == kept
    flex_masks._KEPT.clear()
    check(tensors, problem)
    assert not flex_masks._KEPT


@pytest.mark.parametrize("values", [{"is_causal": True}, PACKED], ids=["causal", "packed"])
def test_each_stream_makes_its_own(
    made: list[object], values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream would read what is still being made."""
    tensors, problem = draw(values)
    for stream in (1, 2, 1):
        monkeypatch.setattr(flex_masks, "stream_of", lambda tensor, stream=stream: stream)
        check(tensors, problem)
    assert len(made) == 2


def test_a_packing_written_over_is_another_packing(made: list[object]) -> None:
    tensors, problem = draw(PACKED, is_causal=True)
    others, _ = draw({**OTHER, "lengths_q": (20, 30, 78), "lengths_k": (50, 60, 50)})
    run(tensors, problem)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        getattr(tensors, name).copy_(getattr(others, name))
    kv = replace(tensors.kv, bounds=others.bounds_k)
    check(replace(tensors, bounds_q=others.bounds_q, kv=kv), problem)
    assert len(made) == 2


def test_what_is_kept_of_a_packing_goes_with_it(made: list[object]) -> None:
    tensors, problem = draw(PACKED)
    run(tensors, problem)
    assert flex_masks._KEPT
    del tensors
    gc.collect()
    assert not flex_masks._KEPT


def test_a_block_mask_made_in_inference_mode_is_no_inference_tensor(made: list[Any]) -> None:
    """Such tensors cannot be saved for a backward pass."""
    with torch.inference_mode():
        run(*draw({"is_causal": True}))
    assert not made[0].kv_indices.is_inference()


def on_gpu(values: dict[str, Any]) -> tuple[Tensors, AttentionProblem]:
    return draw(values, device_type="cuda", head_dim=64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEATURES)
def test_the_kernels_compute_what_the_reference_does(name: str) -> None:
    for _ in range(2):
        check(*on_gpu(FEATURES[name]))


@pytest.mark.gpu
def test_a_kernel_is_compiled_once_for_every_packing() -> None:
    torch.compiler.reset()
    flex_masks.compiled_once.cache_clear()
    counters.clear()
    for lengths in (PACKED, OTHER, PACKED):
        check(*on_gpu({**lengths, "is_causal": True, "align": Align.BOTTOM_RIGHT}))
    assert counters["stats"]["unique_graphs"] == 2  # the kernel, and the lists of tiles


@pytest.mark.gpu
def test_the_kernels_tell_layouts_and_modes_apart() -> None:
    tensors, problem = on_gpu({"is_causal": True})
    without = replace(problem, requires_grad=False)
    strided = tensors.query.detach().transpose(1, 2).contiguous().transpose(1, 2)
    torch.compiler.reset()
    flex_masks.compiled_once.cache_clear()
    counters.clear()
    for _ in range(2):
        check(tensors, problem)
        check(replace(tensors, query=strided.requires_grad_()), problem)
        check(with_tensors(tensors, key=tensors.query.detach()), problem)
        check(
            with_tensors(tensors, key=tensors.query, value=tensors.query),
            problem,
        )
        with torch.no_grad():
            check(tensors, without)
        with torch.inference_mode():
            check(tensors, without)
    assert flex_masks.compiled_once.cache_info().currsize == counters["stats"]["unique_graphs"] == 6


@pytest.mark.gpu
def test_a_compiled_caller_holds_the_kernel_in_its_graph() -> None:
    tensors, problem = on_gpu({"is_causal": True})

    def call(query: torch.Tensor) -> torch.Tensor:
        return run(replace(tensors, query=query), problem).output

    output = torch.compile(call, fullgraph=True)(tensors.query)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    assert_results_match(
        Result(output=output), exact, attention(tensors, problem), summands=problem.len_k
    )


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"head_dim": 16, "value_dim": 5}, True),
        ({"head_dim": 8, "value_dim": 8}, True),
        ({"head_dim": 16, "value_dim": 16}, False),
        ({"num_kv_heads": 1, "len_q": 33, "requires_grad": True}, True),
        ({"num_kv_heads": 1, "len_q": 33}, False),
        ({"num_kv_heads": 2, "len_q": 33, "requires_grad": True}, False),
        ({"num_kv_heads": 1, "len_q": 512, "requires_grad": True}, False),
        (
            {"num_kv_heads": 1, "len_q": 33, "requires_grad": True, "precision": Precision.BF16},
            False,
        ),
    ],
    ids=str,
)
def test_what_inductor_has_no_kernel_for_is_refused(values: dict[str, Any], refused: bool) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 4, "len_q": 64, "head_dim": 32, "value_dim": 32}
    problem = AttentionProblem(batch=1, len_k=64, **(sizes | values))
    (capability,) = flex.CAPABILITIES
    assert any(rule(problem) for rule in capability.rules) == refused
