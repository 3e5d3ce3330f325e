import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn import DenseAttention, scaled_dot_product_attention
from adaattn.backends.keys_values import KeysValues, PackedKeysValues
from adaattn.cache import KVCache, LayerCache
from adaattn.cache.layer import StoredLayer
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from adaattn.spec import KVKind
from adaattn.testing import assert_matches

BATCH, HEADS, DIM, VALUE_DIM = 2, 3, 4, 5
TOKEN_BYTES = BATCH * HEADS * (DIM + VALUE_DIM) * 4

Pair = tuple[torch.Tensor, torch.Tensor]


def tokens(count: int, first: int = 0, *, batch: int = BATCH) -> Pair:
    """Keys and values that say where they belong: sequence, head, position, dimension."""

    def number(dim: int, sign: int) -> torch.Tensor:
        rows, heads, places, dims = (
            torch.arange(n, dtype=torch.float32) for n in (batch, HEADS, count, dim)
        )
        grid = rows[:, None] * 10 + heads
        return sign * ((grid[..., None] * 1000 + first + places)[..., None] + dims / 8)

    return number(DIM, 1), number(VALUE_DIM, -1)


def assert_holds(found: Pair, expected: Pair) -> None:
    for got, right in zip(found, expected, strict=True):
        assert torch.equal(got, right)


def feed(layer: LayerCache, lengths: Sequence[int]) -> Pair:
    for count in lengths:
        found = layer.update(*tokens(count, layer.length))
    return found


options = st.sampled_from([{}, {"max_length": 60}])
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=10)


@settings(max_examples=60, deadline=None)
@given(lengths, options)
def test_any_appends_equal_their_concatenation(counts: list[int], given_options: dict) -> None:
    cache = KVCache(1, **given_options)
    for done, count in enumerate(counts):
        found = cache.layer(0).update(*tokens(count, sum(counts[:done])))
        assert_holds(found, tokens(sum(counts[: done + 1])))
        assert cache.length == sum(counts[: done + 1])
        assert cache.layer(0).start == 0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=10),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([None, 120]),
)
def test_a_window_returns_the_last_keys_and_tells_where_they_start(
    counts: list[int], window: int, spare: int, max_length: int | None
) -> None:
    cache = KVCache(1, max_length, window=window, spare=spare)
    layer = cache.layer(0)
    for count in counts:
        start, length = layer.start, layer.length
        assert start == max(0, length - window - spare)
        found = layer.update(*tokens(count, length))
        assert_holds(found, tokens(length + count - start, start))
        assert layer.length == length + count
    # Two windows, or all that one long call brought.
    assert cache.memory_bytes <= 2 * (window + spare) * TOKEN_BYTES


Step = tuple[str, int]
steps = st.lists(
    st.tuples(st.sampled_from(["append", "append", "crop", "reorder"]), st.integers(0, 7)),
    max_size=14,
)


@settings(max_examples=80, deadline=None)
@given(steps, options, st.sampled_from([None, (4, 0), (4, 3)]))
def test_appends_crops_and_reorders_equal_the_same_on_plain_tensors(
    given_steps: list[Step], given_options: dict, windowing: tuple[int, int] | None
) -> None:
    extra = {} if windowing is None else {"window": windowing[0], "spare": windowing[1]}
    options_used = {"max_length": 98} if given_options else {}
    cache = KVCache(1, **options_used, **extra)
    layer = cache.layer(0)
    keys, values = tokens(0)
    for number, (step, size) in enumerate(given_steps):
        if step == "append":
            key, value = tokens(size, 100 * number)
            keys, values = torch.cat((keys, key), 2), torch.cat((values, value), 2)
            start = layer.start
            found = layer.update(key, value)
            assert_holds(found, (keys[:, :, start:], values[:, :, start:]))
        elif step == "crop":
            kept = max(0, layer.length - size)
            within = windowing is None or kept == 0 or layer.start <= max(0, kept - windowing[0])
            if not within:
                with pytest.raises(ArgumentError, match="were dropped"):
                    cache.crop(kept)
                continue
            cache.crop(kept)
            keys, values = keys[:, :, :kept], values[:, :, :kept]
        else:
            index = torch.tensor([size % 2, (size // 2) % 2])
            cache.reorder(index)
            keys, values = keys[index], values[index]
        assert layer.length == keys.shape[2]
        assert layer.length - layer.start <= (sum(windowing) if windowing else layer.length)
    start = layer.start
    found = layer.update(*tokens(0))
    assert_holds(found, (keys[:, :, start:], values[:, :, start:]))


@pytest.mark.parametrize("max_length", [None, 64])
def test_a_window_in_attention_sees_what_it_would_see_of_all_keys(max_length: int | None) -> None:
    left = 5
    cache = KVCache(1, max_length, window=left)
    query, key, value = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    whole = scaled_dot_product_attention(query, key, value, is_causal=True, window=(left, 0))
    parts = []
    for piece in zip(
        *(x.split([7, 1, 1, 1, 3, 12, 1, 1, 13], 2) for x in (query, key, value)), strict=True
    ):
        keys, values = cache.layer(0).update(*piece[1:])
        parts.append(
            scaled_dot_product_attention(
                piece[0], keys, values, is_causal=True, window=(left, 0), align="bottom_right"
            )
        )
    assert_matches(torch.cat(parts, 2), whole, whole, summands=40 * 8)


def test_growth_doubles_and_copies_each_token_a_bounded_number_of_times() -> None:
    cache = KVCache(1)
    sizes = []
    for position in range(100):
        cache.layer(0).update(*tokens(1, position))
        sizes.append(cache.memory_bytes // TOKEN_BYTES)
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 64, 128]


def test_the_views_share_the_storage_and_no_update_within_room_moves_them() -> None:
    layer = KVCache(1, max_length=10).layer(0)
    first, _ = layer.update(*tokens(3))
    second, _ = layer.update(*tokens(1, 3))
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, tokens(3)[0])


def test_memory_is_counted_exactly() -> None:
    cache = KVCache(3)
    assert cache.memory_bytes == 0
    cache.layer(0).update(*tokens(5))
    assert cache.memory_bytes == 5 * TOKEN_BYTES
    cache.layer(0).update(*tokens(1, 5))
    assert cache.memory_bytes == 10 * TOKEN_BYTES
    cache.layer(2).update(*(x.bfloat16() for x in tokens(7)))
    assert cache.memory_bytes == 10 * TOKEN_BYTES + 7 * TOKEN_BYTES // 2
    cache.crop(0)
    assert cache.memory_bytes == 10 * TOKEN_BYTES + 7 * TOKEN_BYTES // 2
    cache.reset()
    assert cache.memory_bytes == 0
    static = KVCache(1, max_length=64)
    assert static.memory_bytes == 0
    for _ in range(3):
        static.layer(0).update(*tokens(2))
        assert static.memory_bytes == 64 * TOKEN_BYTES


def test_a_full_cache_names_its_limits_and_is_left_as_it_was() -> None:
    cache = KVCache(1, max_length=8)
    feed(cache.layer(0), [6])
    message = r"key: expected at most 2 new tokens \(max_length 8, 6 held\), got 3; crop, reset"
    with pytest.raises(ShapeError, match=message):
        feed(cache.layer(0), [3])
    assert cache.length == 6
    assert_holds(feed(cache.layer(0), [2]), tokens(8))


def test_layers_are_independent_and_the_length_is_what_all_have() -> None:
    cache = KVCache(2)
    feed(cache.layer(0), [4])
    assert (cache.length, cache.layer(0).length, cache.layer(1).length) == (0, 4, 0)
    key, value = tokens(4)
    found = cache.layer(1).update(key[:1, :2], value[:1, :2])
    assert_holds(found, (key[:1, :2], value[:1, :2]))
    assert cache.length == 4
    assert_holds(feed(cache.layer(0), [1]), tokens(5))
    assert cache.layer(0) is cache.layer(0)
    assert isinstance(cache.layer(0), LayerCache)


def test_each_layer_may_have_its_own_window() -> None:
    cache = KVCache(3, window=[2, None, 4])
    for index in range(3):
        feed(cache.layer(index), [10])
    assert [cache.layer(index).start for index in range(3)] == [8, 0, 6]
    assert cache.length == 10
    assert "window=[2, None, 4]" in repr(cache)


def test_a_crop_takes_back_a_call_that_failed_half_way() -> None:
    cache = KVCache(2)
    for index in range(2):
        feed(cache.layer(index), [5])
    feed(cache.layer(0), [3])
    cache.crop(cache.length)
    for index in range(2):
        assert_holds(feed(cache.layer(index), [2]), tokens(7))


def test_a_crop_that_one_layer_refuses_changes_none() -> None:
    cache = KVCache(2, window=[None, 4], spare=2)
    for index in range(2):
        feed(cache.layer(index), [10])
    message = (
        r"length: expected 0, or 8 to 10, with its window, got 7; "
        r"keys before position 4 were dropped; spare= keeps more"
    )
    with pytest.raises(ArgumentError, match=message):
        cache.crop(7)
    assert [cache.layer(index).length for index in range(2)] == [10, 10]
    cache.crop(8)
    assert_holds(feed(cache.layer(0), [1]), tokens(9))
    assert_holds(feed(cache.layer(1), [1]), tokens(5, 4))
    with pytest.raises(ArgumentError, match="length: expected at most the 9 tokens held, got 10"):
        cache.crop(10)
    with pytest.raises(ArgumentError, match="length: expected an integer of at least 0, got -1"):
        cache.crop(-1)
    with pytest.raises(ArgumentTypeError, match=r"length: expected an integer .*, got 2\.0"):
        cache.crop(2.0)


def test_a_cropped_window_starts_again_from_nothing() -> None:
    cache = KVCache(1, window=3)
    feed(cache.layer(0), [4, 1, 1])
    cache.crop(0)
    assert (cache.length, cache.layer(0).start) == (0, 0)
    assert_holds(feed(cache.layer(0), [2, 2]), tokens(4))


@pytest.mark.parametrize("given_options", [{}, {"max_length": 20}, {"window": 4}])
def test_a_reorder_may_change_the_number_of_sequences(given_options: dict) -> None:
    cache = KVCache(2, **given_options)
    feed(cache.layer(0), [3])
    index = torch.tensor([1, 1, 0])
    cache.reorder(index)  # the second layer holds nothing yet
    key, value = tokens(1, 3, batch=3)
    keys, values = tokens(3)
    expected = (torch.cat((keys[index], key), 2), torch.cat((values[index], value), 2))
    assert_holds(cache.layer(0).update(key, value), expected)


def test_a_reorder_of_a_static_cache_keeps_its_room() -> None:
    cache = KVCache(1, max_length=20)
    feed(cache.layer(0), [3])
    cache.reorder(torch.tensor([1, 0], dtype=torch.int32))
    assert cache.memory_bytes == 20 * TOKEN_BYTES


def test_a_bad_reorder_changes_nothing() -> None:
    cache = KVCache(2)
    key, value = tokens(3)
    cache.layer(0).update(key, value)
    cache.layer(1).update(key[:1], value[:1])
    with pytest.raises(
        ArgumentError, match=r"beam_index: expected indices in \[0, 1\), got 0 to 1"
    ):
        cache.reorder(torch.tensor([1, 0]))
    with pytest.raises(ArgumentError, match=r"beam_index: .*, got -1 to 0"):
        cache.reorder(torch.tensor([-1, 0]))
    with pytest.raises(ArgumentTypeError, match=r"an int64 tensor \[B\], got torch.float32 \(2,\)"):
        cache.reorder(torch.tensor([1.0, 0.0]))
    with pytest.raises(ArgumentTypeError, match=r"an int64 tensor \[B\], got torch.int64 \(1, 1\)"):
        cache.reorder(torch.tensor([[0]]))
    with pytest.raises(ArgumentTypeError, match=r"an int64 tensor \[B\], got \[1, 0\]"):
        cache.reorder([1, 0])
    assert_holds(feed(cache.layer(0), [0]), tokens(3))


def test_a_reset_takes_another_batch_dtype_and_head_count() -> None:
    cache = KVCache(1, max_length=8)
    feed(cache.layer(0), [5])
    cache.reset()
    assert (cache.length, cache.layer(0).start) == (0, 0)
    key, value = (x.double()[:1, :2] for x in tokens(8))
    assert_holds(cache.layer(0).update(key, value), (key, value))


def test_a_copy_goes_its_own_way() -> None:
    cache = KVCache(1, max_length=10)
    feed(cache.layer(0), [4])
    other = copy.deepcopy(cache)
    other.crop(1)
    feed(other.layer(0), [2])
    assert (cache.length, other.length) == (4, 3)
    assert_holds(feed(cache.layer(0), [1]), tokens(5))


def test_the_caller_may_write_over_what_it_gave() -> None:
    cache = KVCache(1)
    key, value = tokens(3)
    cache.layer(0).update(key, value)
    key.zero_()
    assert_holds(feed(cache.layer(0), [0]), tokens(3))


@pytest.mark.parametrize("given_options", [{}, {"max_length": 12}, {"window": 3}])
def test_gradients_through_several_calls_are_those_of_a_concatenation(
    given_options: dict,
) -> None:
    parts = [torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (4, 1, 2)]

    def loss(returned: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum((x.sin() * x.cos().cumsum(2)).sum() for x in returned)

    layer = KVCache(1, **given_options).layer(0)
    starts, found = [], []
    for part in parts:
        starts.append(layer.start)
        found.append(layer.update(part, part.detach()).key)
    expected = [torch.cat(parts[: i + 1], 2)[:, :, start:] for i, start in enumerate(starts)]
    ours = torch.autograd.grad(loss(found), parts)
    theirs = torch.autograd.grad(loss(expected), parts)
    for got, right in zip(ours, theirs, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("max_length", [None, 12])
def test_a_call_without_gradients_after_one_with_them_writes_over_nothing(
    max_length: int | None,
) -> None:
    layer = KVCache(1, max_length).layer(0)
    key, value = (x.requires_grad_() for x in tokens(3))
    keys, _ = layer.update(key, value)
    kept = keys.square().sum()
    with torch.no_grad():
        later, _ = layer.update(*tokens(1, 3))
        assert not later.requires_grad
        assert torch.equal(later, tokens(4)[0])
    (gradient,) = torch.autograd.grad(kept, key)
    assert torch.equal(gradient, 2 * key)


def test_a_call_without_gradients_after_a_crop_writes_over_nothing() -> None:
    cache = KVCache(1)
    key, value = (x.requires_grad_() for x in tokens(3))
    keys, _ = cache.layer(0).update(key, value)
    kept = keys.square().sum()
    cache.crop(1)
    with torch.no_grad():
        cache.layer(0).update(*tokens(1, 1))
    (gradient,) = torch.autograd.grad(kept, key)
    assert torch.equal(gradient, 2 * key)


def test_new_keys_with_gradients_leave_alone_what_an_earlier_product_needs() -> None:
    layer = KVCache(1, max_length=8).layer(0)
    query = torch.ones(BATCH, HEADS, 1, DIM, requires_grad=True)
    earlier, _ = layer.update(*tokens(3))
    loss = (query @ earlier.mT).sum()
    key, value = tokens(1, 3)
    later, _ = layer.update(key.requires_grad_(), value)
    assert torch.equal(later, tokens(4)[0])
    ours = torch.autograd.grad(loss + later.square().sum(), (query, key))
    assert torch.equal(ours[0], tokens(3)[0].sum(2, keepdim=True))
    assert torch.equal(ours[1], 2 * key)


def test_storage_with_gradients_has_no_room_to_spare_and_is_counted() -> None:
    cache = KVCache(1, max_length=20)
    cache.layer(0).update(*(x.requires_grad_() for x in tokens(3)))
    assert cache.memory_bytes == 3 * TOKEN_BYTES
    cache.layer(0).update(*tokens(2, 3))
    assert cache.memory_bytes == 5 * TOKEN_BYTES
    with torch.no_grad():
        cache.layer(0).update(*tokens(1, 5))
    assert cache.memory_bytes == 20 * TOKEN_BYTES


def test_gradients_survive_a_crop_and_a_reorder() -> None:
    cache = KVCache(1)
    key, value = (x.requires_grad_() for x in tokens(3))
    cache.layer(0).update(key, value)
    cache.crop(2)
    cache.reorder(torch.tensor([1, 1]))
    more = tokens(1, 2)
    keys, _ = cache.layer(0).update(*more)
    assert torch.equal(keys, torch.cat((key[:, :, :2][[1, 1]], more[0]), 2))
    (gradient,) = torch.autograd.grad(keys.sum(), key)
    expected = torch.zeros_like(key)
    expected[1, :, :2] = 2
    assert torch.equal(gradient, expected)


def test_a_view_that_a_backward_pass_needs_is_not_written_over_silently() -> None:
    """Only the query needs gradients, so keys are stored in place; PyTorch notices the write."""
    layer = KVCache(1, max_length=8).layer(0)
    query = torch.randn(BATCH, HEADS, 1, DIM, requires_grad=True)
    keys, _ = layer.update(*tokens(3))
    loss = (query @ keys.mT).sum()
    layer.update(*tokens(1, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode_and_no_grad_may_take_turns() -> None:
    for given_options in ({}, {"max_length": 20}, {"window": 2}):
        layer = KVCache(1, **given_options).layer(0)
        with torch.inference_mode():
            feed(layer, [3, 1])
        with torch.no_grad():
            feed(layer, [1, 4])
        start = layer.start
        assert_holds(feed(layer, [1]), tokens(10 - start, start))


@pytest.mark.parametrize("given_options", [{}, {"max_length": 32}])
def test_decoding_with_it_compiles_to_one_graph(given_options: dict) -> None:
    torch.compiler.reset()

    def step(layer: LayerCache, key: torch.Tensor, value: torch.Tensor) -> Pair:
        keys, values = layer.update(key, value)
        return 2 * keys, 2 * values

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ours, theirs = (KVCache(1, **given_options).layer(0) for _ in range(2))
    with torch.no_grad():
        for count in (5, 1, 1, 1, 1):
            key, value = tokens(count, ours.length)
            assert_holds(compiled(ours, key, value), step(theirs, key, value))
    assert_holds(feed(ours, [1]), tokens(10))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda k, v: (k[0], v), ShapeError, r"key: expected \[B, Hkv, L, D\], got \(3, 1, 4\)"),
        (lambda k, v: (k, v[0]), ShapeError, r"value: expected \[B, Hkv, L, D\], got \(3, 1, 5\)"),
        (lambda k, v: (k, v[:1]), ShapeError, r"value: expected \(2, 3, 1\) before its last"),
        (lambda k, v: (k[:1], v[:1]), ShapeError, r"key: expected \[2, 3, L, 4\], as this layer"),
        (lambda k, v: (k[:, :2], v[:, :2]), ShapeError, r"key: .*, got \(2, 2, 1, 4\); reset"),
        (lambda k, v: (k[..., :2], v), ShapeError, r"key: expected \[2, 3, L, 4\]"),
        (lambda k, v: (k, v[..., :2]), ShapeError, r"value: expected \[2, 3, L, 5\]"),
        (
            lambda k, v: (k, v.double()),
            DTypeError,
            "dtype of value: expected torch.float32, as the key has, got torch.float64",
        ),
        (
            lambda k, v: (k.half(), v.half()),
            DTypeError,
            "dtype of key: expected torch.float32, as the cache has, got torch.float16",
        ),
        (
            lambda k, v: (k, v.to("meta")),
            DeviceError,
            "device of value: expected cpu, as the key has, got meta",
        ),
        (
            lambda k, v: (k.to("meta"), v.to("meta")),
            DeviceError,
            "device of key: expected cpu, as the cache has, got meta",
        ),
    ],
)
def test_tensors_that_do_not_fit_say_so_and_change_nothing(
    change: Any, error: type[Exception], message: str
) -> None:
    layer = KVCache(1).layer(0)
    feed(layer, [3])
    with pytest.raises(error, match=message):
        layer.update(*change(*tokens(1, 3)))
    assert layer.length == 3
    assert_holds(feed(layer, [1]), tokens(4))


@pytest.mark.parametrize(
    ("given_arguments", "error", "message"),
    [
        ({"num_layers": 0}, ArgumentError, "num_layers: expected an integer of at least 1, got 0"),
        ({"num_layers": 2.0}, ArgumentTypeError, r"num_layers: expected an integer .*, got 2\.0"),
        ({"max_length": 0}, ArgumentError, "max_length: expected an integer of at least 1, got 0"),
        ({"max_length": True}, ArgumentTypeError, "max_length: expected an integer .*, got True"),
        ({"window": 0}, ArgumentError, "window: expected an integer of at least 1, got 0"),
        ({"window": "4"}, ArgumentTypeError, "window: expected an integer for each layer, got '4'"),
        ({"window": [4]}, ArgumentError, "window: expected one number for each of 2 layers, got 1"),
        ({"window": [4, 4.0]}, ArgumentTypeError, r"window: expected an integer .*, got 4\.0"),
        ({"spare": -1}, ArgumentError, "spare: expected an integer of at least 0, got -1"),
        ({"spare": 1}, ArgumentError, "spare: expected 0 without a window, got 1"),
    ],
)
def test_a_bad_cache_says_what_is_wrong(
    given_arguments: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KVCache(**({"num_layers": 2} | given_arguments))


def test_a_layer_that_does_not_exist_is_named() -> None:
    with pytest.raises(ArgumentError, match="index: expected a layer below num_layers = 2, got 2"):
        KVCache(2).layer(2)
    with pytest.raises(ArgumentError, match="index: expected an integer of at least 0, got -1"):
        KVCache(2).layer(-1)


def test_it_prints_what_it_holds() -> None:
    cache = KVCache(2, max_length=16, window=4)
    for index in range(2):
        feed(cache.layer(index), [3])
    assert repr(cache) == (
        f"KVCache(num_layers=2, length=3, max_length=16, window=4, "
        f"memory_bytes={2 * 8 * TOKEN_BYTES})"
    )


def test_a_cache_hands_over_dense_keys_and_values() -> None:
    found = KVCache(1).layer(0).update(*tokens(3))
    assert isinstance(found, KeysValues) and found.kind is KVKind.DENSE
    keys, values = found
    assert keys is found.key and values is found.value


def test_a_module_refuses_a_cache_of_another_kind() -> None:
    class Packed(StoredLayer):
        def update(self, key: torch.Tensor, value: torch.Tensor) -> KeysValues:
            starts = torch.tensor([0, key.shape[2]], dtype=torch.int32)
            return PackedKeysValues(key=key, value=value, cu_seqlens=starts)

    module = DenseAttention(16, 2)
    with pytest.raises(UnsupportedError, match="expected dense keys and values"):
        module(torch.randn(1, 3, 16), cache=Packed())
