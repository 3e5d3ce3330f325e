"""Lists of blocks: what makes one, what it says, and who attends over it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adaattn
from adaattn import AuxRequest, BlockList
from adaattn.backends import load, slice_heads
from adaattn.backends.interface import Tensors
from adaattn.errors import (
    AdaAttnError,
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from adaattn.spec import AttentionProblem, Aux, HeadGroup, Scheme
from adaattn.testing import (
    assert_matches,
    attention,
    cast_tensors,
    make_problem,
    make_tensors,
    num_summands,
)

INTERPRETED = [] if torch.cuda.is_available() else ["triton"]
EXECUTORS = ["reference", "chunked", *INTERPRETED]


def ints(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def listed(**changes: Any) -> BlockList:
    """Return two rows of blocks: keys 0 and 2, then key 1."""
    usual = {"counts": ints([[2, 1]]), "indices": ints([[[0, 2], [1, 0]]])}
    return BlockList(**(usual | {"block_q": 16, "block_k": 16} | changes))


def run(name: str, tensors: Tensors, problem: AttentionProblem) -> torch.Tensor:
    group = HeadGroup(capability=name, scheme=Scheme.of(problem.precision))
    return load(name)(tensors, problem, group).output


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"counts": [2, 1]}, ArgumentTypeError, "a tensor, got list"),
        ({"counts": torch.tensor([[[2, 1]]])}, DTypeError, r"int32, got torch.int64; use .to"),
        ({"counts": ints([[2, 1, 1]])}, ShapeError, r"\[B, H, Nq\] and \[B, H, Nq, K\]"),
        ({"indices": ints([[[], []]])}, ShapeError, "none empty"),
        ({"block_q": 0}, ArgumentError, "block_q: expected an integer of at least 1"),
        ({"block_k": 16.0}, ArgumentTypeError, "block_k"),
        ({"counts": ints([[3, 1]])}, ArgumentError, "-1 to 2, got 1 to 3"),
        ({"counts": ints([[-2, 1]])}, ArgumentError, "-1 to 2, got -2 to 1"),
        ({"indices": ints([[[2, 0], [1, 0]]])}, ArgumentError, r"2 before 0 at \[0, 0, 0, 0\]"),
        ({"indices": ints([[[2, 2], [1, 0]]])}, ArgumentError, "each block once"),
        ({"indices": ints([[[-1, 2], [1, 0]]])}, ArgumentError, "at least 0, got -1"),
        ({"indices": ints([[[0, 2], [1, 0]]]).to("meta")}, DeviceError, "cpu, meta"),
    ],
)
def test_what_is_no_list_of_blocks_is_refused(
    changes: dict[str, Any], error: type[AdaAttnError], words: str
) -> None:
    with pytest.raises(error, match=words):
        listed(**changes)


def test_numbers_behind_the_count_are_not_looked_at() -> None:
    blocks = listed(indices=ints([[[0, 2], [1, -7]]]))
    assert blocks.needed_blocks == 3
    assert blocks.to_mask(3).tolist() == [[[[True, False, True], [False, True, False]]]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"blocks": torch.ones(2, 3).bool()}, ArgumentTypeError, "BlockList.from_mask makes one"),
        ({"blocks": listed(block_q=64)}, ShapeError, r"\[1 or 2, 1 or 4, 1\] in blocks of 64 rows"),
        ({"blocks": listed(block_k=32)}, ArgumentError, "below 2, with 48 keys in blocks of 32"),
        (
            {"blocks": BlockList.from_mask(torch.ones(2, 2).bool(), block_q=16, block_k=16)},
            ShapeError,
            "blocks of keys of a list: expected 3, with 48 keys in blocks of 16, got 2",
        ),
        (
            {"blocks": listed(counts=ints([[2, 1]] * 3), indices=ints([[[0, 2], [1, 0]]] * 3))},
            ShapeError,
            "1 or 4",
        ),
    ],
)
def test_a_list_of_another_call_is_refused(
    arguments: dict[str, Any], error: type[AdaAttnError], words: str
) -> None:
    q, k = torch.randn(2, 4, 32, 16), torch.randn(2, 4, 48, 16)
    with pytest.raises(error, match=words):
        adaattn.scaled_dot_product_attention(q, k, k, **arguments)


def test_packed_sequences_have_no_blocks() -> None:
    q, starts = torch.randn(1, 4, 32, 16), ints(0, 20, 32)[0:3]
    with pytest.raises(ArgumentError, match="blocks with cu_seqlens_q"):
        adaattn.scaled_dot_product_attention(
            q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, blocks=listed()
        )


def test_without_a_list_nothing_is_dropped() -> None:
    q = torch.randn(1, 4, 32, 16)
    with pytest.raises(ArgumentError, match="dropped_mass: expected a call with blocks"):
        adaattn.scaled_dot_product_attention(q, q, q, return_aux=AuxRequest(dropped_mass=True))


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(3, 3), DTypeError),
        (torch.ones(3).bool(), ShapeError),
        ([[True]], ArgumentTypeError),
    ],
)
def test_what_is_no_mask_of_blocks_is_refused(mask: Any, error: type[AdaAttnError]) -> None:
    with pytest.raises(error, match="mask of blocks"):
        BlockList.from_mask(mask)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_mask_of_blocks_comes_back_and_says_which_keys_are_seen(data: st.DataObject) -> None:
    batch, heads = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]))
    rows, keys = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    block_q, block_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 99))
    mask = torch.rand(batch, heads, rows, keys, generator=torch.Generator().manual_seed(seed)) < 0.4
    blocks = BlockList.from_mask(mask, block_q=block_q, block_k=block_k)
    assert torch.equal(blocks.to_mask(keys), mask)
    seen = mask.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)
    first, left = data.draw(st.integers(0, rows * block_q)), data.draw(st.integers(0, keys))
    found = blocks.seen(range(first, rows * block_q), range(left, keys * block_k))
    assert torch.equal(found, seen[:, :, first:, left:])


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("pattern", [{"is_causal": True}, {"window": (40, 9)}, {}])
def test_executors_attend_over_what_a_mask_of_blocks_says(
    name: str, shared: bool, share: float, pattern: dict[str, Any]
) -> None:
    problem = make_problem(
        **{"batch": 2, "num_heads": 4, "num_kv_heads": 2, "len_q": 130, "len_k": 150},
        block_size=(64, 16),
        **pattern,
    )
    tensors = make_tensors(problem)
    shape = (1, 1, 3, 10) if shared else (2, 4, 3, 10)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share
    blocks = BlockList.from_mask(mask, block_q=64, block_k=16)
    problem = replace(problem, most_blocks=blocks.indices.shape[-1])
    tensors = replace(tensors, blocks=blocks)
    whole = replace(
        cast_tensors(tensors, torch.float64),
        mask=mask.repeat_interleave(64, 2).repeat_interleave(16, 3)[:, :, :130, :150],
        blocks=None,
    )
    bare = replace(problem, block_size=(0, 0), most_blocks=0)
    assert_matches(
        run(name, tensors, problem),
        attention(whole, bare).output,
        attention(tensors, problem).output,
        summands=num_summands(problem, tensors.query),
    )


@pytest.mark.parametrize("name", ["reference", "chunked", *INTERPRETED])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_what_is_not_listed_weighs_as_much_as_is_said_at_most(name: str, with_sinks: bool) -> None:
    problem = make_problem(
        **{"batch": 2, "num_heads": 4, "num_kv_heads": 2, "len_q": 70, "len_k": 110},
        **{"block_size": (32, 16), "is_causal": True, "has_sinks": with_sinks},
        aux=Aux.DROPPED_MASS | Aux.LSE,
    )
    tensors = make_tensors(problem)
    assert tensors.blocks is not None
    group = HeadGroup(capability=name, scheme=Scheme.of(problem.precision))
    found = load(name)(tensors, problem, group).dropped_mass
    everything = replace(problem, block_size=(0, 0), aux=Aux.WEIGHTS | Aux.LSE)
    exact = attention(replace(cast_tensors(tensors, torch.float64), blocks=None), everything)
    assert found is not None and exact.weights is not None
    seen = tensors.blocks.seen(range(70), range(110))
    dropped = exact.weights.masked_fill(seen, 0.0).sum(-1)
    rounding = 110 * torch.finfo(torch.float32).eps
    assert (found >= dropped - rounding).all() and (found <= 1.0).all()
    assert (dropped > 0.1).any() and (dropped == 0.0).any()
    assert (found[dropped == 0.0] == 0.0).all()
    # In a tile of 16 keys each weighs as much as the largest, at most; so it is said, and no more.
    hidden = exact.weights.masked_fill(seen, 0.0)
    tiles = torch.nn.functional.pad(hidden, (0, -110 % 16)).unflatten(-1, (-1, 16))
    counts = torch.tensor([16.0] * 6 + [14.0], dtype=torch.float64)
    most = (tiles.amax(-1) * counts).sum(-1)
    kept = exact.weights.masked_fill(~seen, 0.0).sum(-1)
    if with_sinks:
        kept = kept + (1.0 - exact.weights.sum(-1)) * (kept > 0)
    largest = torch.where(most > 0, most / (most + kept).clamp_min(1e-300), 0.0)
    assert (found <= largest + rounding).all()


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_bound_holds_for_the_output(with_sinks: bool) -> None:
    problem = make_problem(
        **{"num_heads": 4, "len_q": 64, "len_k": 96, "block_size": (16, 16)},
        **{"has_sinks": with_sinks, "aux": Aux.DROPPED_MASS},
    )
    tensors = make_tensors(problem)
    result = attention(tensors, problem)
    whole = attention(replace(tensors, blocks=None), replace(problem, aux=Aux.NONE)).output
    assert result.dropped_mass is not None
    norms = tensors.value.norm(dim=-1).amax(-1)
    change = (result.output - whole).norm(dim=-1)
    rounding = 96 * torch.finfo(torch.float32).eps * norms.max()
    assert (change <= 2.0 * result.dropped_mass * norms[..., None] + rounding).all()


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_the_dropped_mass_has_no_gradient(name: str) -> None:
    aux = Aux.DROPPED_MASS
    problem = make_problem(len_q=32, block_size=(16, 16), aux=aux, requires_grad=True)
    group = HeadGroup(capability=name, scheme=Scheme.of(problem.precision))
    found = load(name)(make_tensors(problem), problem, group).dropped_mass
    assert found is not None and not found.requires_grad


@pytest.mark.parametrize("name", EXECUTORS)
def test_lists_that_are_views_are_read_as_they_are(name: str) -> None:
    problem = make_problem(num_heads=4, batch=2, len_q=64, len_k=96, block_size=(16, 16))
    tensors = make_tensors(problem)
    wide = ints(*[[[0, 3, 5, 0], [1, 2, 0, 0], [4, 0, 0, 0], [0, 1, 2, 3]]])[None]
    counts = ints([[2, 2, 1, 3]])
    views = BlockList(
        counts=counts.expand(2, 4, -1),
        indices=wide[..., :3].expand(2, 4, -1, -1),
        block_q=16,
        block_k=16,
    )
    own = BlockList(counts=counts, indices=wide[..., :3].clone(), block_q=16, block_k=16)
    problem = replace(problem, most_blocks=3)
    found, expected = (
        run(name, replace(tensors, blocks=blocks), problem) for blocks in (views, own)
    )
    assert torch.equal(found, expected)


def test_a_second_list_of_the_same_sizes_is_followed() -> None:
    q = torch.randn(1, 2, 32, 16)
    first, second = (
        BlockList.from_mask(torch.tensor(mask).bool(), block_q=16, block_k=16)
        for mask in ([[1, 0], [0, 1]], [[0, 1], [1, 0]])
    )
    outputs = [
        adaattn.scaled_dot_product_attention(q, q, q, blocks=blocks)
        for blocks in (first, second, first)
    ]
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])


def test_a_call_says_what_was_dropped() -> None:
    q, k = torch.randn(2, 4, 32, 16), torch.randn(2, 4, 48, 16)
    _, aux = adaattn.scaled_dot_product_attention(
        q, k, k, blocks=listed(), return_aux=AuxRequest(dropped_mass=True, lse=True)
    )
    assert aux.dropped_mass.shape == (2, 4, 32) and aux.lse.shape == (2, 4, 32)
    assert aux.decision.plan.is_exact


def test_gradients_pass_and_a_backend_without_lists_is_refused() -> None:
    q, k = (torch.randn(1, 2, length, 16, requires_grad=True) for length in (32, 48))
    adaattn.scaled_dot_product_attention(q, k, k, blocks=listed()).sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    with pytest.raises(UnsupportedError, match="it does not support a list of blocks"):
        adaattn.scaled_dot_product_attention(q, k, k, blocks=listed(), backend="sdpa.math")


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_graphs_hold_a_list_of_blocks(backend: str) -> None:
    q, k = torch.randn(1, 2, 32, 16), torch.randn(1, 2, 48, 16)
    blocks = listed()

    def call(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = adaattn.scaled_dot_product_attention(
            x, k.to(x), k.to(x), blocks=blocks, is_causal=True, backend=backend
        )
        return output

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    torch._dynamo.reset()
    assert_matches(compiled, call(q.double()), call(q), summands=48)


@pytest.mark.skipif(torch.cuda.is_available(), reason="under the interpreter")
def test_an_operator_takes_a_list_of_blocks_into_graphs() -> None:
    problem = make_problem(len_q=40, block_size=(16, 16), aux=Aux.DROPPED_MASS | Aux.LSE)
    tensors = make_tensors(problem)
    group = HeadGroup(capability="triton", scheme=Scheme.of(problem.precision))

    def call(query: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = load("triton")(replace(tensors, query=query), problem, group)
        assert result.lse is not None and result.dropped_mass is not None and result.entropy is None
        return result.output, result.lse, result.dropped_mass

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(tensors.query)
    torch._dynamo.reset()
    assert all(map(torch.equal, found, call(tensors.query)))


def test_some_heads_take_their_own_lists_along() -> None:
    problem = make_problem(num_heads=4, len_q=64, block_size=(16, 16))
    tensors = make_tensors(problem)
    part, _ = slice_heads(tensors, problem, (3, 1))
    assert tensors.blocks is not None and part.blocks is not None
    assert torch.equal(part.blocks.counts, tensors.blocks.counts[:, [3, 1]])
    shared = replace(tensors, blocks=listed())
    assert slice_heads(shared, problem, (3, 1))[0].blocks is shared.blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="under the interpreter")
@pytest.mark.parametrize("numbers", [(7, 3, 1), (-5, 99, 1), (0, 0, 0)])
def test_numbers_that_nobody_checked_stay_inside_of_the_tensors(numbers: tuple[int, ...]) -> None:
    problem = make_problem(len_q=40, len_k=70, block_size=(16, 16))
    tensors = make_tensors(problem)
    blocks = listed(counts=ints([[3, 3, 3]]), indices=ints([[[0, 1, 2]] * 3]))
    # Behind the list stand numbers that are none of it, of a block whose keys are no numbers.
    storage = torch.full((64,), 2, dtype=torch.int32)
    storage[:9] = torch.tensor(numbers * 3)
    object.__setattr__(blocks, "indices", storage[:9].view(1, 1, 3, 3))
    blocks.counts[0, 0, :] = 1000
    tensors.key[:, :, 32:48] = float("nan")
    problem = replace(problem, most_blocks=3)
    group = HeadGroup(capability="triton", scheme=Scheme.of(problem.precision))
    result = load("triton")(replace(tensors, blocks=blocks), problem, group)
    assert result.output.isfinite().all()
