"""Memory that is not filled first."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from adaattn.backends import allocation
from adaattn.backends.allocation import output_like, unfilled
from adaattn.testing import poisoned_memory


@pytest.fixture(params=[False, True], ids=["usual", "deterministic"])
def mode(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), None), ((0, 3), None), ((5,), None), ((2, 3, 4), None), ((2, 3, 4), (4, 8, 1))],
)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int32])
def test_it_is_what_empty_is(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype | None
) -> None:
    like = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    made = unfilled(like, shape, strides, dtype)
    wanted = torch.empty_strided(shape, strides or torch.empty(shape).stride())
    assert (made.shape, made.stride()) == (wanted.shape, wanted.stride())
    assert made.dtype is (dtype or torch.bfloat16) and not made.requires_grad
    assert made.untyped_storage().nbytes() == made.numel() * made.element_size()
    made.fill_(3)
    assert bool((made == 3).all())


def test_nothing_fills_it(mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator hands out what was freed last: seen on a storage that stands in for it."""
    del mode
    used = torch.full((64,), 7.0)
    monkeypatch.setattr(torch, "UntypedStorage", lambda *_, **__: used.untyped_storage())
    torch.use_deterministic_algorithms(True)
    assert bool((unfilled(used, (8, 8)) == 7.0).all())


def test_what_poisons_memory_poisons_this(mode: bool) -> None:
    del mode
    with poisoned_memory():
        assert bool(unfilled(torch.zeros(1), (4, 4)).isnan().all())
        assert bool(output_like(torch.zeros(1, 2, 3, 4), 4).isnan().all())


def test_graphs_are_traced_with_it(mode: bool) -> None:
    del mode
    with FakeTensorMode():
        assert unfilled(torch.empty(2), (3, 4)).shape == (3, 4)


@pytest.mark.gpu
@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize(("shape", "strides"), [((0, 3), None), ((2, 3, 4), (4, 8, 1))])
def test_on_a_gpu_it_is_what_empty_is(
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    is_fast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert allocation._empty_on_gpu is not None
    if not is_fast:
        monkeypatch.setattr(allocation, "_empty_on_gpu", None)
    like = torch.zeros(3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wanted = torch.empty_strided(shape, strides or torch.empty(shape).stride(), device="cuda")
    for dtype in (None, torch.int32):
        made = unfilled(like, shape, strides, dtype)
        assert (made.shape, made.stride()) == (wanted.shape, wanted.stride())
        assert made.dtype is (dtype or torch.bfloat16) and not made.requires_grad
        assert made.device == like.device
    with torch.inference_mode():
        assert unfilled(like, shape, strides).is_inference()


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("columns", [4, 8])
def test_outputs_lie_like_their_queries(columns: int) -> None:
    query = torch.zeros(2, 5, 3, 4).transpose(1, 2)
    made = output_like(query, columns)
    assert made.shape == (2, 3, 5, columns)
    assert made.transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("columns", [4, 8])
def test_outputs_of_expanded_queries_are_contiguous(columns: int) -> None:
    for query in (torch.zeros(1, 3, 5, 4).expand(2, 3, 5, 4), torch.zeros(4).expand(2, 3, 5, 4)):
        assert output_like(query, columns).is_contiguous()
