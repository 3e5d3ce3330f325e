"""A call that is found again without its key is the call that its key names, and no other."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn import AuxRequest, History, Policy, functional, hardware, plan_attention, use_policy
from adaattn import scaled_dot_product_attention as attend
from adaattn.call import recent
from adaattn.call.key import DECODE_ROWS
from adaattn.errors import ArgumentTypeError, DeviceError, ShapeError

_HISTORY = History()
_POLICY = Policy(error_budget=0.0)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Note what is found without a key, and hold each to what its key names."""
    found: list[object] = []

    by_key = attend.__wrapped__  # type: ignore[attr-defined]

    def noting(*given: Any) -> Any:
        known = recent.again(*given)
        found.append(None if isinstance(known, recent.Miss) else known)
        *positional, options = given
        bound = known.args[1] if isinstance(known, partial) else found[-1]  # outside of autocast
        assert bound is None or bound is by_key(*positional, **options).bound
        return known

    monkeypatch.setattr(functional, "again", noting)
    hardware.clear_cache()
    yield found
    hardware.clear_cache()


def tensors(heads: int = 4, length: int = 24, **kind: Any) -> list[torch.Tensor]:
    return [torch.randn(2, heads, length, 16, **kind) for _ in range(3)]


def with_strides() -> list[torch.Tensor]:
    query, key, value = tensors()
    return [query, key.transpose(1, 2).contiguous().transpose(1, 2), value]


def with_gradients(place: int) -> list[torch.Tensor]:
    made = tensors()
    made[place].requires_grad_()
    return made


def inference() -> list[torch.Tensor]:
    with torch.inference_mode():
        return tensors()


def masked(mask: torch.Tensor, **settings: Any) -> "Call":
    return lambda: (tensors(), {"attn_mask": mask, **settings})


def packed(starts_q: torch.Tensor, starts_k: torch.Tensor | None = None) -> "Call":
    starts = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_q if starts_k is None else starts_k}
    return lambda: ([item[:1] for item in tensors()], {"is_causal": True, **starts})


Call = Callable[[], tuple[list[torch.Tensor], dict[str, Any]]]

SEEN = torch.rand(24, 24) > 0.3
CALLS: dict[str, Call] = {
    "plain": lambda: (tensors(), {}),
    "fewer keys": lambda: ([tensors()[0], *tensors(length=20)[1:]], {}),
    "other values": lambda: ([*tensors()[:2], torch.randn(2, 4, 24, 32)], {}),
    "other strides": lambda: (with_strides(), {}),
    "another dtype": lambda: (tensors(dtype=torch.float64), {}),
    "a key head": lambda: ([tensors()[0], *tensors(heads=1)[1:]], {"enable_gqa": True}),
    "gradients of queries": lambda: (with_gradients(0), {}),
    "gradients of values": lambda: (with_gradients(2), {}),
    "of inference mode": lambda: (inference(), {}),
    "a parameter": lambda: ([torch.nn.Parameter(x, requires_grad=False) for x in tensors()], {}),
    "causal": lambda: (tensors(), {"is_causal": True}),
    "causal from the end": lambda: (tensors(), {"is_causal": True, "align": "bottom_right"}),
    "scale": lambda: (tensors(), {"scale": 0.5}),
    "softcap": lambda: (tensors(), {"softcap": 2.0}),
    "dropout": lambda: (tensors(), {"dropout_p": 0.5}),
    "window": lambda: (tensors(), {"window": (3, 0)}),
    "another window": lambda: (tensors(), {"window": (4, 0)}),
    "dilation": lambda: (tensors(), {"dilation": 2}),
    "any batch": lambda: (tensors(), {"batch_invariant": True}),
    "a policy": lambda: (tensors(), {"policy": "balanced"}),
    "a budget": lambda: (tensors(), {"policy": 0.01}),
    "a policy's own object": lambda: (tensors(), {"policy": _POLICY}),
    "a history": lambda: (tensors(), {"policy": "balanced", "history": _HISTORY}),
    "a layer": lambda: (tensors(), {"layer": 3}),
    "a backend": lambda: (tensors(), {"backend": "chunked"}),
    "a policy that is a number": lambda: (tensors(), {"policy": 0}),
    "a plan": lambda: (tensors(), {"plan": plan_attention(*tensors(), backend="chunked").plan}),
    "the decision": lambda: (tensors(), {"return_aux": True}),
    "an output": lambda: (tensors(), {"return_aux": AuxRequest(lse=True)}),
    "mask": masked(SEEN),
    "one mask for all rows": masked(SEEN[:1]),
    "a mask of numbers": masked(torch.zeros(24, 24)),
    "a mask with gradients": masked(torch.zeros(24, 24, requires_grad=True)),
    "a mask's other strides": masked(torch.zeros(24, 24).t()),
    "a mask in a window": masked(SEEN, window=(3, 3)),
    "sinks": lambda: (tensors(), {"sinks": torch.randn(4)}),
    "slopes": lambda: (tensors(), {"alibi_slopes": torch.rand(4)}),
    "sinks and slopes": lambda: (
        tensors(),
        {"sinks": torch.randn(4), "alibi_slopes": torch.rand(4)},
    ),
    "slopes of each batch entry": lambda: (tensors(), {"alibi_slopes": torch.rand(2, 4)}),
    "slopes with gradients": lambda: (
        tensors(),
        {"alibi_slopes": torch.rand(4, requires_grad=True)},
    ),
    "a mask and slopes": masked(SEEN, alibi_slopes=torch.rand(4)),
    "packed": packed(torch.tensor([0, 10, 24], dtype=torch.int32)),
    "packed by two tensors": packed(*torch.tensor([[0, 10, 24], [0, 12, 24]], dtype=torch.int32)),
    "packed in three": packed(torch.tensor([0, 10, 20, 24], dtype=torch.int32)),
    "a scale of each head": lambda: (tensors(), {"scale": torch.rand(4)}),
}
NEVER = ("a scale of each head",)
"""Found by their keys alone."""


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_is_found_without_its_key(name: str, found: list[object]) -> None:
    for _ in range(4):
        given, settings = CALLS[name]()
        attend(*given, **settings)
    assert any(bound is not None for bound in found) is (name not in NEVER)


@pytest.mark.parametrize("first", CALLS)
def test_no_other_call_is_taken_for_it(first: str, found: list[object]) -> None:
    for other in CALLS:
        for name in (first, first, first, other):
            found.clear()
            given, settings = CALLS[name]()
            attend(*given, **settings)
        assert other == first or found in ([], [None])
        hardware.clear_cache()


@contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def without(kernel: str) -> Iterator[None]:
    getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    try:
        yield
    finally:
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(True)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "threads": threads,
    "determinism": deterministic,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "a policy": lambda: use_policy("balanced"),
    "math alone": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash alone": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    **{
        f"no {kernel}": partial(without, kernel)
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    },
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_surrounds_a_call_is_part_of_it(name: str, found: list[object]) -> None:
    given = tensors()
    for surrounding in (nullcontext, SURROUNDINGS[name]):
        with surrounding():
            attend(*given)
            assert not found[-1]
            attend(*given)
            attend(*given)
            assert bool(found[-1]) is (surrounding is nullcontext or name != "autocast")
    attend(*given)
    assert bool(found[-1]) is (name == "autocast"), "tensors that are cast leave nothing behind"


HALVES: dict[str, Call] = {
    "plain": lambda: (tensors(dtype=torch.bfloat16), {}),
    "scores of another executor": lambda: (tensors(dtype=torch.bfloat16), {"softcap": 3.0}),
    "a mask": lambda: (tensors(dtype=torch.bfloat16), {"attn_mask": SEEN}),
    "wider than autocast casts": lambda: (tensors(dtype=torch.float64), {}),
}


@pytest.mark.parametrize("name", HALVES)
def test_tensors_that_autocast_leaves_alone_are_found_under_it(
    name: str, found: list[object]
) -> None:
    given, settings = HALVES[name]()
    expected = attend(*given, **settings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for again in (False, True, True):
            assert torch.equal(attend(*given, **settings), expected)
            assert bool(found[-1]) is again
            assert torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        other = attend(*given, **settings)
        assert not found[-1]
        assert other.dtype is (torch.float64 if "wider" in name else torch.float16)
        attend(*given, **settings)
        assert bool(found[-1]) is ("wider" in name), "tensors that are cast leave nothing behind"


def test_autocast_is_enabled_again_behind_a_call_that_failed(found: list[object]) -> None:
    given = tensors(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            attend(*given)
        bound = found[-1]
        assert callable(bound)
        with pytest.raises(TypeError):
            bound(*given)
        assert torch.is_autocast_enabled("cpu")


def test_a_dilation_that_is_no_integer_is_refused_beside_an_equal_one(found: list[object]) -> None:
    for _ in range(3):
        attend(*tensors(), dilation=2)
    assert found[-1]
    with pytest.raises(Exception, match="dilation: expected an integer"):
        attend(*tensors(), dilation=2.0)  # type: ignore[arg-type]


def test_a_window_whose_edges_are_no_integers_is_refused_beside_an_equal_one(
    found: list[object],
) -> None:
    for _ in range(3):
        attend(*tensors(), window=(3, 0))
    assert found[-1]
    with pytest.raises(Exception, match="window"):
        attend(*tensors(), window=(3.0, 0))  # type: ignore[arg-type]


def test_a_window_made_anew_is_found_again(found: list[object]) -> None:
    edges = [3, 0]
    for _ in range(3):
        attend(*tensors(), window=tuple(edges))
    assert found[-1]
    attend(*tensors(), window=edges)
    assert not found[-1]


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_with_a_gradient_is_not_taken_for_an_equal_one(
    name: str, found: list[object]
) -> None:
    for _ in range(3):
        attend(*tensors(heads=1), **{name: 0.5})
    assert found[-1]
    number = torch.tensor([0.5], requires_grad=True)
    attend(*tensors(heads=1), **{name: number}).sum().backward()
    assert number.grad is not None


def test_a_policy_of_another_type_is_refused_beside_an_equal_one(found: list[object]) -> None:
    for _ in range(3):
        attend(*tensors(), policy=0)
    assert found[-1]
    with pytest.raises(Exception, match="policy"):
        attend(*tensors(), policy=False)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"enable_gqa": True}, {"enable_gqa": 1}),
        ({"batch_invariant": True}, {"batch_invariant": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"layer": 1}, {"layer": True}),
        ({"layer": 1}, {"layer": 1.0}),
        ({"return_aux": True}, {"return_aux": 1}),
        ({"tag": ""}, {"tag": 5}),
    ],
    ids=str,
)
def test_an_equal_value_of_another_type_is_refused_after_it(
    right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    for _ in range(3):
        attend(*tensors(), **right)
    with pytest.raises(ArgumentTypeError):
        attend(*tensors(), **wrong)


def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note each time that tensors are compared."""
    made: list[object] = []
    honest = recent.guards

    def guards(*given: Any) -> Any:
        made.append(given)
        return honest(*given)

    monkeypatch.setattr(recent, "guards", guards)
    return made


def test_nobody_looks_for_calls_that_never_repeat(
    found: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is read in parts: each call would pay for a comparison that fails."""
    compared = looks(monkeypatch)
    query = torch.randn(1, 2, DECODE_ROWS + 1, 16)
    for length in range(33, 64):
        attend(query, *(torch.randn(1, 2, length, 16) for _ in range(2)))
    assert found.count(None) == len(found) and not compared


def decoded(
    length: int, *, rows: int = 1, apart: int = 0, mask: Any = None, **settings: Any
) -> None:
    """Attend over a cache of some length, whose heads are so many numbers apart."""
    held = (torch.randn(1, 2, length * 16 + apart)[..., : length * 16] for _ in range(2))
    key, value = (heads.unflatten(-1, (length, 16)) for heads in held)
    settings |= {} if mask is None else {"attn_mask": mask(length)}
    attend(torch.randn(1, 2, rows, 16), key, value, **settings)


@pytest.mark.parametrize("rows", [1, DECODE_ROWS])
@pytest.mark.parametrize("mask", [None, lambda length: torch.rand(1, 1, 1, length) > 0.3])
def test_decoding_over_a_growing_cache_is_found_for_each_power_of_two(
    rows: int, mask: Any, found: list[object]
) -> None:
    for length in range(32, 80, 2):
        decoded(length, rows=rows, apart=length % 4 * 8, mask=mask)
        decoded(length, rows=rows, apart=length % 4 * 8, mask=mask)
    lengths = [length for length in range(32, 80, 2) for _ in range(2)]
    none = [length for length, bound in zip(lengths, found, strict=True) if bound is None]
    assert none == [32, 32, 34, 34, 66, 66], "twice seen by its key, at each power of two"


def test_decoding_from_the_first_token_on_is_found_too(found: list[object]) -> None:
    lengths = range(1, 4 * DECODE_ROWS + 1)
    for length in 2 * [*lengths]:
        decoded(length)
    found.clear()
    for length in lengths:
        decoded(length)
    assert all(found), "each length and power of two has its last call"


@pytest.mark.parametrize(
    ("first", "then"),
    {
        "at another power of two": ({"length": 40}, {"length": 65}),
        "of fewer keys than a window": ({"length": 60, "window": (50, 0)}, {"length": 48}),
        "of more keys than a window": ({"length": 40, "window": (50, 0)}, {"length": 60}),
        "as few keys as rows": ({"length": 9, "rows": 8}, {"length": 8}),
        "so aligned no more": ({"length": 40, "apart": 16}, {"length": 42, "apart": 24}),
    }.values(),
    ids=str,
)
def test_a_cache_of_another_kind_is_not_taken_for_it(
    first: dict[str, Any], then: dict[str, Any], found: list[object]
) -> None:
    for _ in range(3):
        decoded(**first)
    assert found[-1]
    decoded(**{**first, **then})
    assert not found[-1]


def test_a_cache_whose_parts_differ_in_length_is_refused_after_it() -> None:
    query, mask = torch.randn(1, 2, 1, 16), torch.ones(1, 1, 1, 41, dtype=torch.bool)
    cache = torch.randn(1, 2, 40, 16)
    for _ in range(3):
        attend(query, cache, cache.clone())
        attend(query, cache, cache.clone(), mask[..., :40])
    with pytest.raises(ShapeError, match="value"):
        attend(query, cache, cache[:, :, :39])
    with pytest.raises(ShapeError, match="mask"):
        attend(query, cache, cache.clone(), mask)


@pytest.mark.parametrize("places", [(0, 0, 0), (0, 1, 1), (0, 0, 2), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("rows", [1, 24])
def test_one_tensor_given_twice_is_found_again(
    places: tuple[int, ...], rows: int, found: list[object]
) -> None:
    """A call of one tensor three times took 10 us more than one of three tensors."""
    for _ in range(3):
        given = tensors(length=rows)
        attend(*(given[at] for at in places))
    assert found[-1]
    with pytest.raises(ShapeError):
        attend(*given[:2], torch.randn(2, 4, rows + 1, 16))
    attend(*given)
    attend(*given)
    assert not found[-2]
    attend(*given)
    assert found[-1]


def test_values_that_are_the_keys_of_a_growing_cache_are_found_again(found: list[object]) -> None:
    """As latents are that both are read from."""
    for length in (20, 21, 22, 23):
        both = torch.randn(1, 2, length, 16)
        attend(torch.randn(1, 2, 1, 16), both, both)
    assert found[-1]
    with pytest.raises(ShapeError):
        attend(torch.randn(1, 2, 1, 16), both, both[:, :, 1:])


def test_which_tensors_are_one_is_no_longer_asked_where_it_changes(
    found: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = looks(monkeypatch)
    one = torch.randn(2, 4, 24, 16)
    for _ in range(100):
        attend(one, one, one)
        attend(*tensors())
    assert len(compared) < 10
    for _ in range(300):
        attend(*tensors())
    assert found[-1]


def test_calls_that_take_turns_are_left_to_their_keys(
    found: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = looks(monkeypatch)
    for _ in range(100):
        attend(*tensors(), scale=0.25)
        attend(*tensors(), scale=0.5)
    assert found.count(None) == len(found) and not compared
    histories = History(), History()
    for _ in range(3):
        for history in histories:
            attend(*tensors(), history=history)
    assert found[-1] and found[-2]


def test_the_last_call_of_all_is_found_by_comparisons_alone(
    found: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape, its hash and a look into a dictionary took 15 us of a call behind a large kernel."""
    histories = History(), History()
    for _ in range(3):
        for history in histories:
            attend(*tensors(), history=history)
    monkeypatch.delattr(recent, "_place")
    found.clear()
    for history in histories:
        attend(*tensors(), history=history)
    assert all(found)


def test_a_masked_call_is_found_among_calls_without_a_mask(found: list[object]) -> None:
    for _ in range(3):
        attend(*tensors())
        attend(*tensors(), SEEN)
    assert found[-1] and found[-2]


def test_what_was_measured_anew_is_decided_anew(found: list[object]) -> None:
    for _ in range(3):
        attend(*tensors())
    assert found[-1]
    hardware.clear_cache()
    attend(*tensors())
    assert not found[-1]


def test_bounds_of_the_queries_alone_are_refused_beside_those_of_both(found: list[object]) -> None:
    starts = torch.tensor([0, 10, 24], dtype=torch.int32)
    for _ in range(3):
        attend(*(item[:1] for item in tensors()), cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert found[-1]
    with pytest.raises(Exception, match="both or neither"):
        attend(*(item[:1] for item in tensors()), cu_seqlens_q=starts)


@pytest.mark.parametrize("settings", [{}, {"softcap": 30.0}, {"window": (3, 0)}], ids=str)
@pytest.mark.parametrize("length", [1, 24])
def test_keys_on_another_device_are_refused_beside_calls_that_ran(
    length: int, settings: dict[str, Any], found: list[object]
) -> None:
    """The key knew only which tensors were on a GPU: a warm call read memory of nobody."""
    query = tensors()[0][:, :, :length]
    mask = torch.zeros(1, 1, 1, 24)
    _, key, value = tensors()
    for _ in range(4):
        attend(query, key, value, **settings)
        attend(query, key, value, mask, **settings)
    for given in ((query, key.to("meta"), value), (query, key, value.to("meta"))):
        with pytest.raises(DeviceError, match="one device"):
            attend(*given, **settings)
    with pytest.raises(DeviceError, match="mask"):
        attend(query, key, value, mask.to("meta"), **settings)
