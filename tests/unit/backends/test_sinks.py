"""Sinks beside PyTorch's flash kernel for CPUs: what it computes, and what it leaves to others."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from adaattn import hardware
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import Result, chunked, sinks
from adaattn.backends.sinks import has_flash_sinks, whole_flash_sinks
from adaattn.errors import UnsupportedError
from adaattn.spec import Align, HeadGroup, Launch, MaskKind, Precision, Scheme
from adaattn.testing import (
    assert_executor_matches,
    assert_training_matches,
    make_problem,
    make_tensors,
)

SIZES: dict[str, Any] = {"batch": 2, "num_heads": 4, "len_q": 70, "len_k": 70, "has_sinks": True}
MASK: dict[str, Any] = {"mask_shape": (2, 1, 70, 70)}
PROBLEMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "more keys, from the end": {"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 90},
    "fewer keys": {"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_q": 90},
    "window": {"is_causal": True, "window": (5, 0)},
    "dilation": {"is_causal": True, "dilation": 3},
    "slopes": {"is_causal": True, "has_alibi": True},
    "mask": {"mask": MaskKind.BOOLEAN, **MASK},
    "bias": {"mask": MaskKind.ADDITIVE, **MASK},
    "groups": {"is_causal": True, "num_kv_heads": 2},
    "fp64": {"precision": Precision.FP64},
    "own scale": {"is_causal": True, "scale": 0.7},
}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let few tokens take the kernel, too."""
    monkeypatch.setattr(sinks, "_FEWEST", 64)
    monkeypatch.setattr(sinks, "_FEWEST_IN_WINDOWS", 64)
    hardware.clear_cache()
    yield
    hardware.clear_cache()


class Kernels(TorchDispatchMode):
    """Notes which kernels ran, and of how many heads of keys the flash kernel did."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.key_heads: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.add(str(func))
        if "flash_attention_for_cpu" in str(func):
            self.key_heads.add(args[1].shape[1])
        return func(*args, **(kwargs or {}))

    @property
    def ran_flash(self) -> bool:
        return any("flash_attention_for_cpu" in name for name in self.names)


def group(problem: Any, rows: int) -> HeadGroup:
    return HeadGroup(
        heads=tuple(range(problem.num_heads)),
        capability="chunked",
        scheme=Scheme.of(problem.precision),
        launch=Launch(chunk_rows=rows),
    )


@pytest.mark.parametrize("rows", [0, 32], ids=["whole", "chunks"])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_computes_what_is_defined_by_the_kernel(name: str, training: bool, rows: int) -> None:
    wants = {"requires_grad": training, "sinks_require_grad": training}
    problem = make_problem(**(SIZES | PROBLEMS[name]), **wants)
    tensors = make_tensors(problem, num_hidden_rows=3 if name in ("mask", "bias") else 0)
    holds = assert_training_matches if training else assert_executor_matches
    assert has_flash_sinks(problem)
    with Kernels() as kernels:
        holds(lambda *call: chunked.run(*call, group(problem, rows)), tensors, problem)
    assert kernels.ran_flash


@pytest.mark.parametrize("name", ["full", "causal", "window", "groups", "fewer keys"])
def test_the_short_way_computes_the_same(name: str) -> None:
    problem = make_problem(**(SIZES | PROBLEMS[name]))
    tensors = make_tensors(problem)
    run = whole_flash_sinks(problem, group(problem, 0))
    assert run is not None
    given = tensors.query, tensors.key, tensors.value, None, tensors.sinks
    expected = chunked.run(tensors, problem, group(problem, 0)).output
    with Kernels() as kernels:
        torch.testing.assert_close(run(*given), expected)
    assert kernels.ran_flash


@pytest.mark.parametrize(
    "other",
    [
        {"softcap": 5.0},
        {"dropout_p": 0.1},
        {"precision": Precision.BF16},
        {"len_q": 63, "requires_grad": True},
        {"scale": -0.2},
        {"value_dim": 8},
        {"device_type": "cuda"},
        {"has_sinks": False},
        {"allowed_sdpa": ("sdpa.math",)},
        {"has_alibi": True, "alibi_requires_grad": True},
    ],
    ids=lambda other: " ".join(other),
)
def test_the_rest_is_left_to_others(other: dict[str, Any]) -> None:
    assert not has_flash_sinks(replace(make_problem(**SIZES), **other))


@pytest.mark.parametrize(
    "sizes",
    [
        {"len_q": 1, "num_kv_heads": 2},
        {"len_q": 1, "num_kv_heads": 1, "batch": 1},
        {"len_q": 1, "window": (20, 0), "is_causal": True, "num_kv_heads": 2},
        {"len_q": 1, "num_kv_heads": 2, "precision": Precision.BF16},
        {"len_q": 1},
        {"len_q": 7, "is_causal": True},
        {"len_q": 7},
        {"len_q": 1, "num_kv_heads": 2, "scale": 0.7},
        {"len_k": 9, "len_q": 9, "is_causal": True},
    ],
    ids=lambda sizes: " ".join(f"{name} {size}" for name, size in sizes.items()),
)
def test_few_rows_behind_a_cache_take_the_kernel(
    sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No keys are repeated: the heads that share some are rows of one matrix."""
    monkeypatch.setattr(sinks, "multiplies_in_tiles", lambda problem: False)
    problem = make_problem(**(SIZES | {"align": Align.BOTTOM_RIGHT} | sizes))
    tensors = make_tensors(problem)
    assert has_flash_sinks(problem)
    run = whole_flash_sinks(problem, group(problem, 0))
    assert run is not None

    def whole(tensors: Any, problem: Any) -> Result:
        given = tensors.query, tensors.key, tensors.value, None, tensors.sinks
        return Result(output=run(*given))

    for way in (whole, lambda *call: chunked.run(*call, group(problem, 0))):
        with Kernels() as kernels:
            assert_executor_matches(way, tensors, problem)
        assert kernels.ran_flash
        assert kernels.key_heads == {problem.num_kv_heads}


@pytest.mark.parametrize("length", [50, 75])
def test_a_cache_of_another_length_is_taken_where_position_hides_nothing(length: int) -> None:
    sizes = SIZES | {"len_q": 1, "num_kv_heads": 2, "align": Align.BOTTOM_RIGHT}
    problem = make_problem(**sizes)
    other = replace(problem, len_k=length)
    tensors = make_tensors(other)
    given = tensors.query, tensors.key, tensors.value, None, tensors.sinks
    run = whole_flash_sinks(problem, group(problem, 0))
    assert run is not None
    assert_executor_matches(lambda *_: Result(output=run(*given)), tensors, other)
    windowed = whole_flash_sinks(
        replace(problem, window=(20, 0), is_causal=True), group(problem, 0)
    )
    assert windowed is not None
    assert windowed(*given) is None


@pytest.mark.parametrize("given", ["slopes", "mask", "window"])
def test_a_last_chunk_of_one_row_is_one_as_the_others(given: str) -> None:
    """Its heads have masks of their own, which rows of one matrix would share."""
    changed = {"mask": {"mask": MaskKind.BOOLEAN, "mask_shape": (2, 4, 65, 65)}}
    sizes = SIZES | PROBLEMS[given] | changed.get(given, {}) | {"num_kv_heads": 2}
    problem = make_problem(**(sizes | {"len_q": 65, "len_k": 65}))
    assert has_flash_sinks(problem)
    assert_executor_matches(
        lambda *call: chunked.run(*call, group(problem, 32)), make_tensors(problem), problem
    )


def test_a_single_row_with_gradients_of_its_sinks_alone_has_them() -> None:
    query, key, value = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 70, 8), torch.randn(1, 4, 70, 8)
    logits = torch.randn(4, requires_grad=True)
    attend(query, key, value, sinks=logits).sum().backward()
    wide = logits.detach().double().requires_grad_()
    tensors = (query.double(), key.double(), value.double())
    attend(*tensors, sinks=wide, backend="reference").sum().backward()
    assert logits.grad is not None and wide.grad is not None
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "key_shape"), [((0, 8, 1, 16), (0, 2, 70, 16)), ((1, 0, 1, 16), (1, 0, 70, 16))]
)
def test_no_batch_and_no_heads_are_an_empty_result(
    shape: tuple[int, ...], key_shape: tuple[int, ...]
) -> None:
    given = torch.randn(shape), torch.randn(key_shape), torch.randn(key_shape)
    assert attend(*given, sinks=torch.randn(shape[1]), enable_gqa=True).shape == shape


def test_who_serves_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with gradients, windows, masks or groups of several rows are written out."""
    monkeypatch.undo()
    for length, others, expected in (
        (511, {}, True),
        (511, {"num_kv_heads": 2}, False),
        (511, {"head_dim": 160}, False),
        (511, {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 511, 511)}, False),
        (512, {}, True),
        (512, {"len_q": 300, "has_alibi": True}, False),
        (512, {"len_q": 1, "batch": 16, "align": Align.BOTTOM_RIGHT}, False),
        (512, {"len_q": 1, "precision": Precision.BF16, "align": Align.BOTTOM_RIGHT}, False),
        (4096, {"len_q": 1, "head_dim": 64, "align": Align.BOTTOM_RIGHT}, False),
        (256, {"len_q": 1, "head_dim": 64, "align": Align.BOTTOM_RIGHT}, True),
        (70, {"len_q": 90, "align": Align.BOTTOM_RIGHT}, False),
        (512, {"len_q": 9, "precision": Precision.BF16, "align": Align.BOTTOM_RIGHT}, False),
        (300, {"requires_grad": True}, False),
        (300, {"window": (9, 0)}, False),
        (300, {"window": (9, 0), "requires_grad": True}, True),
        (200, {"window": (9, 0), "requires_grad": True}, False),
    ):
        sizes = SIZES | {"len_q": length, "len_k": length, "is_causal": True} | others
        assert has_flash_sinks(make_problem(**sizes)) is expected, (length, others)


def test_sinks_that_outweigh_all_keys_leave_exact_small_gradients() -> None:
    """And those that weigh nothing: 1 less a share near 1 has lost its digits."""
    problem = make_problem(**SIZES, requires_grad=True, sinks_require_grad=True)
    for level in (-12.0, 12.0):
        tensors = make_tensors(problem)
        assert tensors.sinks is not None
        with torch.no_grad():
            tensors.sinks.add_(level)
        assert_training_matches(
            lambda *call: chunked.run(*call, group(problem, 0)), tensors, problem
        )


def test_gradients_are_those_of_differences() -> None:
    shape = 1, 1, 64, 2
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(1, dtype=torch.float64, requires_grad=True)
    with Kernels() as kernels:
        assert gradcheck(
            lambda *call: attend(*call[:3], is_causal=True, sinks=call[3]), (*given, sinks)
        )
    assert kernels.ran_flash


def called(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    sinks = torch.linspace(-1.0, 1.0, 2)
    return attend(query[None], key[None], value[None], sinks=sinks)[0]


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "vmap": lambda *given: torch.vmap(called)(*(item[None] for item in given))[0],
    "a graph": lambda *given: torch.compile(called, fullgraph=True, backend="eager")(*given),
    "forward mode": lambda *given: torch.func.jvp(called, given, given)[0],
    "dual numbers": lambda *given: with_tangents(*given),
}


def with_tangents(*given: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(called(*(forward_ad.make_dual(x, x) for x in given))).primal


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", WAYS)
def test_transforms_and_graphs_take_the_written_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = torch.randn(3, 2, 64, 8).unbind()
    ran: list[object] = []
    honest = sinks._attend
    monkeypatch.setattr(sinks, "_attend", lambda *given: ran.append(given) or honest(*given))
    expected = called(*given)
    assert ran
    ran.clear()
    torch.testing.assert_close(WAYS[name](*given), expected)
    assert not ran


@pytest.mark.parametrize("constant", [False, True], ids=["its own gradient", "a constant one"])
def test_a_second_derivative_is_refused_and_not_lost(constant: bool) -> None:
    query, key, value = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, requires_grad=True)
    output = attend(query, key, value, sinks=sinks)
    of_output = output.sum() if constant else output.pow(2).sum()
    for leaf in (query, sinks):
        (grad,) = torch.autograd.grad(of_output, leaf, create_graph=True)
        assert grad.requires_grad
        with pytest.raises(UnsupportedError, match="no derivatives themselves"):
            torch.autograd.grad(of_output + grad.pow(2).sum(), key, retain_graph=True)
