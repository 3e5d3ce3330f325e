"""Packed sequences through the public call: their bounds, and what planning knows of them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from adaattn import AttentionEvent, AuxRequest, record_events
from adaattn import scaled_dot_product_attention as attend
from adaattn.call import bound
from adaattn.call.packing import packed_bounds
from adaattn.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from adaattn.spec import Decision, HeadGroup, Plan, Scheme
from adaattn.testing import assert_matches, make_problem

LENGTHS_Q, LENGTHS_K = (5, 0, 9, 2), (7, 3, 9, 0)


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    tokens_q, tokens_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    tensors = [torch.randn(1, 4, tokens_q, 8), *(torch.randn(1, 2, tokens_k, 8) for _ in range(2))]
    return tensors, {"cu_seqlens_q": starts(LENGTHS_Q), "cu_seqlens_k": starts(LENGTHS_K)}


def one_by_one(tensors: list[torch.Tensor], **settings: Any) -> torch.Tensor:
    """Return the attention of each sequence called alone, joined."""
    query, *others = tensors
    parts_q = query.split(LENGTHS_Q, dim=2)
    parts = [item.split(LENGTHS_K, dim=2) for item in others]
    return torch.cat(
        [attend(q, k, v, **settings) for q, k, v in zip(parts_q, *parts, strict=True)], dim=2
    )


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Note each tensor that is read on the host."""
    reads: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist

    def noting(tensor: torch.Tensor) -> Any:
        reads.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noting)
    return reads


@pytest.mark.parametrize(
    "settings",
    [{}, {"is_causal": True}, {"is_causal": True, "align": "bottom_right"}, {"window": (2, 1)}],
    ids=str,
)
def test_packed_sequences_are_the_sequences_called_one_by_one(settings: dict[str, Any]) -> None:
    tensors, bounds = packed()
    settings = settings | {"enable_gqa": True}
    exact = one_by_one([item.double() for item in tensors], **settings)
    eager = one_by_one(tensors, **settings, backend="reference")
    actual = attend(*tensors, **settings, **bounds)
    assert_matches(actual, exact, eager, summands=8 + max(LENGTHS_K))


@pytest.mark.parametrize("first", ["top_left", "bottom_right"])
def test_the_corner_tells_packings_of_as_many_tokens_apart(first: str) -> None:
    """A mask kept for one corner was once taken for the other, whose sums of lengths are equal."""
    tensors = [torch.randn(1, 2, 24, 8) for _ in range(3)]
    bounds = {"cu_seqlens_q": starts((4, 20)), "cu_seqlens_k": starts((12, 12))}
    second = "top_left" if first == "bottom_right" else "bottom_right"
    for align in (first, second):
        settings = bounds | {"is_causal": True, "align": align}
        actual = attend(*tensors, **settings)
        exact = attend(*(item.double() for item in tensors), **settings, backend="reference")
        eager = attend(*tensors, **settings, backend="reference")
        assert_matches(actual, exact, eager, summands=8 + 12)


@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_long_packed_sequences_in_order_take_any_scale(scale: float) -> None:
    """PyTorch's kernel for CPUs multiplies the -inf of causal order by the scale."""
    tensors = [torch.randn(1, 1, 1200, 64) for _ in range(3)]
    bounds = {"cu_seqlens_q": starts((600, 600)), "cu_seqlens_k": starts((600, 600))}
    settings = bounds | {"is_causal": True, "scale": scale}
    actual = attend(*tensors, **settings)
    exact = attend(*(item.double() for item in tensors), **settings, backend="reference")
    eager = attend(*tensors, **settings, backend="reference")
    assert_matches(actual, exact, eager, summands=64 + 600)


def test_packed_tensors_may_come_without_a_batch_dimension() -> None:
    tensors, bounds = packed()
    flat = [item[0] for item in tensors]
    output, aux = attend(*flat, enable_gqa=True, return_aux=AuxRequest(lse=True), **bounds)
    exact = one_by_one([item.double() for item in tensors], enable_gqa=True)
    eager = one_by_one(tensors, enable_gqa=True, backend="reference")
    assert_matches(output[None], exact, eager, summands=8 + max(LENGTHS_K))
    assert aux.lse.shape == (4, sum(LENGTHS_Q))


@pytest.mark.gpu
def test_bounds_on_a_gpu_are_never_read(host_reads: list[torch.Tensor]) -> None:
    tensors, bounds = packed()
    tensors = [item.cuda() for item in tensors]
    bounds = {name: item.cuda() for name, item in bounds.items()}
    for _ in range(3):
        attend(*tensors, enable_gqa=True, **bounds)
    assert not any(read is given for read in host_reads for given in bounds.values())


def test_only_the_form_of_bounds_on_a_gpu_is_checked() -> None:
    """Tensors without numbers stand in for those on a GPU: reading one is an error."""
    with FakeTensorMode():

        def bounds(count: int, dtype: torch.dtype = torch.int32, at: str = "cuda") -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=at)

        query, key = (torch.empty(1, 2, tokens, 8, device="cuda") for tokens in (16, 19))
        assert packed_bounds(bounds(5), bounds(5), query, key) == ((), ())
        with pytest.raises(ShapeError, match="cu_seqlens_k: expected 5 entries as cu_seqlens_q"):
            packed_bounds(bounds(5), bounds(4), query, key)
        with pytest.raises(DTypeError, match=r"an int32 tensor \[N \+ 1\], got int64\[5\]"):
            packed_bounds(bounds(5, torch.int64), bounds(5), query, key)
        with pytest.raises(DeviceError, match="cu_seqlens_k: expected device cuda:0, got cpu"):
            packed_bounds(bounds(5), bounds(5, at="cpu"), query, key)


class TestDebugging:
    """``ADAATTN_DEBUG=1`` reads bounds on a GPU, and changes nothing else."""

    @pytest.fixture(autouse=True)
    def as_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Say of tensors on this CPU that they are on a GPU."""
        monkeypatch.setenv("ADAATTN_DEBUG", "1")
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def test_bounds_are_checked_with_the_same_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        query, right, wrong = torch.randn(1, 2, 12, 8), starts((4, 8)), starts((4, 7))
        assert packed_bounds(right, right, query, query) == ((), ())
        with pytest.raises(ArgumentError, match=r"cu_seqlens_k: expected rising numbers .* 11\]"):
            packed_bounds(right, wrong, query, query)
        monkeypatch.setenv("ADAATTN_DEBUG", "0")
        assert packed_bounds(right, wrong, query, query) == ((), ())

    def test_a_stream_that_is_captured_is_not_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, host_reads: list[torch.Tensor]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        query, wrong = torch.randn(1, 2, 12, 8), starts((4, 7))
        assert packed_bounds(wrong, wrong, query, query) == ((), ())
        assert host_reads == []

    def test_each_call_of_a_kind_is_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What runs a kernel at once does not look at the numbers."""
        query, right = torch.randn(1, 2, 12, 8), starts((4, 8))
        problem = make_problem(lengths_q=(4, 8), head_dim=8, device_type="cuda")
        group = HeadGroup(capability="reference", scheme=Scheme.of(problem.precision))
        decision = Decision(plan=Plan(groups=(group,), num_heads=problem.num_heads))
        monkeypatch.setattr(bound, "direct", lambda *_: pytest.fail("it was run at once"))
        run, _ = bound._direct(bound._Alike(problem, None, None), decision)
        companions = (None, None, None)
        assert run(query, query, query, *companions, right, right).shape == query.shape
        wrong = starts((4, 7))
        with pytest.raises(ArgumentError, match="cu_seqlens_q: expected rising numbers"):
            run(query, query, query, *companions, wrong, right)


def test_bounds_on_a_cpu_are_read_by_each_call(host_reads: list[torch.Tensor]) -> None:
    """Reading them costs nothing there, and whoever shares their memory may change them."""
    tensors, bounds = packed()
    for _ in range(3):
        host_reads.clear()
        attend(*tensors, enable_gqa=True, **bounds)
        for given in bounds.values():
            assert any(read is given for read in host_reads)


class TestFacts:
    """What planning knows of packed sequences."""

    @staticmethod
    def event_of(tensors: list[torch.Tensor], **settings: Any) -> AttentionEvent:
        """Return the event of a call."""
        events: list[AttentionEvent] = []
        with record_events(events.append):
            attend(*tensors, **settings)
        (event,) = events
        return event

    def test_the_longest_sequence_is_rounded_up_so_that_a_new_packing_is_no_new_problem(
        self,
    ) -> None:
        query = torch.randn(1, 2, 100, 8)
        problems = set()
        for lengths in ((40, 35, 25), (33, 33, 34), (64, 1, 35)):
            bounds = starts(lengths)
            event = self.event_of([query] * 3, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
            assert (event.problem.max_len_q, event.problem.max_len_k) == (64, 64)
            problems.add(event.problem)
        assert len(problems) == 1

    def test_it_is_never_longer_than_all_tokens(self) -> None:
        query, bounds = torch.randn(1, 2, 100, 8), starts((70, 30))
        problem = self.event_of([query] * 3, cu_seqlens_q=bounds, cu_seqlens_k=bounds).problem
        assert (problem.max_len_q, problem.max_len_k) == (100, 100)

    def test_the_callers_bound_counts_where_there_is_one(self) -> None:
        tensors, bounds = packed()
        event = self.event_of(tensors, enable_gqa=True, max_seqlen_q=10, max_seqlen_k=17, **bounds)
        assert (event.problem.max_len_q, event.problem.max_len_k) == (16, 19)

    @pytest.mark.parametrize("wrong", [8, 17, 10.0, True, "9"], ids=repr)
    def test_a_bound_that_no_sequence_can_have_is_refused(self, wrong: object) -> None:
        tensors, bounds = packed()
        message = f"max_seqlen_q: expected an integer from 9 to 16, got {wrong!r}"
        with pytest.raises(ArgumentError, match=message):
            attend(*tensors, enable_gqa=True, max_seqlen_q=wrong, **bounds)

    def test_the_pairs_that_are_attended_are_at_least_those_that_there_are(self) -> None:
        tensors, bounds = packed()
        problem = self.event_of(tensors, enable_gqa=True, **bounds).problem
        pairs = sum(q * k for q, k in zip(LENGTHS_Q, LENGTHS_K, strict=True))
        assert pairs <= problem.attended_pairs <= problem.len_q * problem.len_k

    def test_equal_bounds_are_square_and_others_are_not(self) -> None:
        query, bounds = torch.randn(1, 2, 12, 8), starts((4, 8))
        for other, square in ((bounds, True), (starts((4, 8)), True), (starts((8, 4)), False)):
            event = self.event_of([query] * 3, cu_seqlens_q=bounds, cu_seqlens_k=other)
            assert event.problem.packed_square is square


def test_a_packing_of_another_kind_is_described_anew() -> None:
    """Counted from the last key, equal lengths are the same as counted from the first."""
    tensors, bounds = [torch.randn(1, 2, 12, 8) for _ in range(3)], starts((4, 8))
    settings = {"is_causal": True, "align": "bottom_right", "cu_seqlens_q": bounds}
    attend(*tensors, **settings, cu_seqlens_k=starts((4, 8)))
    other = starts((7, 5))
    wide = [item.double() for item in tensors]
    exact = attend(*wide, **settings, cu_seqlens_k=other, backend="reference")
    eager = attend(*tensors, **settings, cu_seqlens_k=other, backend="reference")
    actual = attend(*tensors, **settings, cu_seqlens_k=other)
    assert_matches(actual, exact, eager, summands=12)


def test_a_change_of_shared_memory_is_noticed() -> None:
    """A write through NumPy moves no version counter."""
    query = torch.randn(1, 2, 12, 8)
    numbers = np.array([0, 4, 12], dtype=np.int32)
    bounds = torch.from_numpy(numbers)
    settings = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    before = attend(query, query, query, **settings)
    numbers[1] = 6
    after = attend(query, query, query, **settings)
    fresh = starts((6, 6))
    again = attend(query, query, query, cu_seqlens_q=fresh, cu_seqlens_k=fresh)
    assert torch.equal(after, again)
    assert not torch.equal(before, after)


def test_a_change_in_place_is_noticed() -> None:
    query = torch.randn(1, 2, 12, 8)
    bounds = starts((4, 8))
    settings = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    before = attend(query, query, query, **settings)
    bounds[1] = 6
    after = attend(query, query, query, **settings)
    fresh = starts((6, 6))
    again = attend(query, query, query, cu_seqlens_q=fresh, cu_seqlens_k=fresh)
    assert torch.equal(after, again)
    assert not torch.equal(before, after)


def test_another_tensor_is_never_taken_for_a_freed_one() -> None:
    """CPython gives a freed tensor's id to the next one."""
    query = torch.randn(1, 2, 12, 8)
    for cut in (3, 9) * 10:
        bounds = starts((cut, 12 - cut))
        output = attend(query, query, query, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        alone = attend(query[:, :, :cut], query[:, :, :cut], query[:, :, :cut])
        assert_matches(output[:, :, :cut], alone.double(), alone, summands=20)


def test_bounds_made_in_inference_mode_serve() -> None:
    """Such tensors have no version counter, so each call reads them."""
    with torch.inference_mode():
        tensors, bounds = packed()
        assert attend(*tensors, enable_gqa=True, **bounds).shape == (1, 4, 16, 8)
        bounds["cu_seqlens_k"][1] += 1
        moved = attend(*tensors, enable_gqa=True, **bounds)
    bounds = {name: item.clone() for name, item in bounds.items()}
    tensors = [item.clone() for item in tensors]
    assert torch.equal(attend(*tensors, enable_gqa=True, **bounds), moved)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one alone": ({"cu_seqlens_k": None}, ArgumentError, r"both or neither, got one of them"),
    "int64": (
        {"cu_seqlens_q": starts((12,)).long()},
        DTypeError,
        r"cu_seqlens_q: expected an int32 tensor \[N \+ 1\], got int64\[2\]",
    ),
    "a list": ({"cu_seqlens_q": [0, 12]}, DTypeError, r"int32 tensor \[N \+ 1\], got list"),
    "two dimensions": (
        {"cu_seqlens_k": starts((12,))[None]},
        DTypeError,
        r"cu_seqlens_k: .* got int32\[1, 2\]",
    ),
    "another device": (
        {"cu_seqlens_q": starts((12,)).to("meta")},
        DeviceError,
        r"cu_seqlens_q: expected device cpu, got meta",
    ),
    "falling numbers": (
        {"cu_seqlens_q": torch.tensor([0, 9, 3, 12], dtype=torch.int32)},
        ArgumentError,
        r"rising numbers from 0 to 12, got \[0, 9, 3, 12\]",
    ),
    "a wrong end": (
        {"cu_seqlens_k": starts((4, 7))},
        ArgumentError,
        r"cu_seqlens_k: expected rising numbers from 0 to 12, got \[0, 4, 11\]",
    ),
    "no sequence": (
        {"cu_seqlens_q": starts(())},
        ArgumentError,
        r"cu_seqlens_q: expected at least two numbers, \[N \+ 1\], got int32\[1\]",
    ),
    "different numbers of sequences": (
        {"cu_seqlens_k": starts((4, 4, 4))},
        ShapeError,
        r"cu_seqlens_k: expected 3 entries as cu_seqlens_q, got 4",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_bounds_end_in_one_typed_error(name: str) -> None:
    changed, error, match = WRONG[name]
    query = torch.randn(1, 2, 12, 8)
    given = {"cu_seqlens_q": starts((4, 8)), "cu_seqlens_k": starts((4, 8))} | changed
    with pytest.raises(error, match=match):
        attend(query, query, query, **given)


def test_packed_tensors_have_no_batch() -> None:
    query, bounds = torch.randn(2, 2, 12, 8), starts((4, 8))
    with pytest.raises(ShapeError, match=r"packed tensors: expected \[1, H, T, D\], got batch 2"):
        attend(query, query, query, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
