"""The public call where `F.scaled_dot_product_attention` is the contract, and its own extras."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from adaattn import AttentionEvent, AuxRequest, Policy, plan_attention, record_events
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends.sdpa import goes_through_sdpa
from adaattn.errors import ArgumentTypeError
from adaattn.testing import assert_matches

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL_AUX = AuxRequest(lse=True, row_max=True, entropy=True, weights=True)

POSITIONAL: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "no mask": (None,),
    "boolean mask": ("boolean",),
    "additive mask": ("additive",),
    "mask with a hidden row": ("hidden row",),
    "no dropout, spelled out": (None, 0.0),
    "causal": (None, 0.0, True),
}
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "square": ((2, 3, 17, 8), (2, 3, 17, 8), (2, 3, 17, 8)),
    "wide": ((2, 3, 17, 8), (2, 3, 29, 8), (2, 3, 29, 8)),
    "tall": ((2, 3, 29, 8), (2, 3, 17, 8), (2, 3, 17, 8)),
    "one row": ((2, 3, 1, 8), (2, 3, 29, 8), (2, 3, 29, 8)),
    "other values": ((2, 3, 17, 8), (2, 3, 17, 8), (2, 3, 17, 5)),
}


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def make_mask(kind: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a mask [Sq, Sk] of the named kind; None for anything else."""
    shape = (query.shape[-2], key.shape[-2])
    if kind == "boolean":
        return torch.rand(shape) > 0.3
    if kind == "additive":
        return torch.randn(shape).to(query.dtype)
    if kind == "hidden row":
        mask = torch.rand(shape) > 0.3
        mask[0] = False
        return mask
    return None


def mask_rank(arguments: tuple[Any, ...]) -> int:
    """Return the rank of the mask among positional arguments; 0 without one."""
    return arguments[0].dim() if arguments and arguments[0] is not None else 0


def widened(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with floating-point tensors in float64."""
    return tuple(
        item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
        for item in arguments
    )


def assert_as_pytorch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **settings: Any
) -> AttentionEvent:
    """Check a call against PyTorch's, bit for bit where PyTorch's own function served it.

    Where something was broadcast first, PyTorch's function sees other shapes and may choose
    another kernel for them.
    """
    events: list[AttentionEvent] = []
    with record_events(events.append):
        actual = attend(query, key, value, *rest, **settings)
    (event,) = events
    leading = {tuple(item.shape[:-2]) for item in (query, key, value)}
    as_given = len(leading) == 1 and query.dim() == 4 and mask_rank(rest) in (0, 2, 4)
    if as_given and goes_through_sdpa(event.problem, event.decision.plan.groups[0]):
        theirs = F.scaled_dot_product_attention(query, key, value, *rest, **settings)
        assert torch.equal(actual, theirs)
    with sdpa_kernel(SDPBackend.MATH):
        eager = F.scaled_dot_product_attention(query, key, value, *rest, **settings)
        exact = F.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), *widened(rest), **settings
        )
    assert_matches(actual, exact, eager, summands=query.shape[-1] + key.shape[-2])
    return event


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arguments", POSITIONAL)
def test_positional_arguments_mean_what_they_mean_to_pytorch(
    arguments: str, shape: str, dtype: torch.dtype
) -> None:
    query, key, value = draw(*SHAPES[shape], dtype=dtype)
    mask, *rest = POSITIONAL[arguments] or (None,)
    given = (make_mask(mask, query, key), *rest) if POSITIONAL[arguments] else ()
    for settings in ({}, {"scale": 0.3}):
        assert_as_pytorch(query, key, value, *given, **settings)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_mean_what_they_mean_to_pytorch(kv_heads: int, is_causal: bool) -> None:
    query, key, value = draw((2, 4, 17, 8), (2, kv_heads, 17, 8), (2, kv_heads, 17, 8))
    assert_as_pytorch(query, key, value, None, 0.0, is_causal, enable_gqa=True)


def test_a_dense_call_is_pytorchs_own_bit_for_bit() -> None:
    query, key, value = draw(*SHAPES["square"])
    event = assert_as_pytorch(query, key, value, None, 0.0, True)
    assert goes_through_sdpa(event.problem, event.decision.plan.groups[0])


def test_dropout_follows_pytorchs_generator() -> None:
    query, key, value = draw(*SHAPES["square"])
    torch.manual_seed(3)
    actual = attend(query, key, value, None, 0.4, backend="sdpa.math")
    torch.manual_seed(3)
    assert torch.equal(actual, F.scaled_dot_product_attention(query, key, value, None, 0.4))


BROADCASTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "2-D": ((17, 8), (29, 8)),
    "3-D": ((3, 17, 8), (3, 29, 8)),
    "5-D": ((2, 3, 4, 17, 8), (2, 3, 4, 29, 8)),
    "one query for a batch of keys": ((1, 4, 17, 8), (3, 4, 29, 8)),
    "a batch of queries for one key": ((3, 4, 17, 8), (1, 4, 29, 8)),
    "5-D with both broadcast": ((2, 1, 4, 17, 8), (1, 3, 4, 29, 8)),
    "one key head": ((2, 4, 17, 8), (2, 1, 29, 8)),
    "one query head": ((2, 1, 17, 8), (2, 4, 29, 8)),
    "one key head, batch broadcast": ((1, 4, 17, 8), (3, 1, 29, 8)),
    "key of a lower rank": ((2, 4, 17, 8), (4, 29, 8)),
    "query of a lower rank": ((17, 8), (2, 4, 29, 8)),
}


@pytest.mark.parametrize("shape", BROADCASTS)
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}], ids=["dense", "causal"])
def test_leading_dimensions_broadcast_as_in_pytorch(shape: str, settings: dict[str, Any]) -> None:
    query_shape, key_shape = BROADCASTS[shape]
    assert_as_pytorch(*draw(query_shape, key_shape, key_shape), **settings)


@pytest.mark.parametrize("shape", BROADCASTS)
def test_leading_dimensions_broadcast_where_pytorch_has_no_kernel(shape: str) -> None:
    """Twice, since the second call may take a shortcut that the first one left."""
    query_shape, key_shape = BROADCASTS[shape]
    query, key, value = draw(query_shape, key_shape, key_shape)
    distance = torch.arange(17)[:, None] - torch.arange(29)
    band = (distance <= 5) & (distance >= -3)
    eager = F.scaled_dot_product_attention(query, key, value, band)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), band)
    for _ in range(2):
        assert_matches(attend(query, key, value, window=(5, 3)), exact, eager, summands=37)


MASK_SHAPES: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]]]] = {
    "2-D": ((17, 8), [(29,), (1, 29), (17, 1), (17, 29)]),
    "3-D": ((4, 17, 8), [(29,), (17, 29), (1, 17, 29), (4, 1, 29), (4, 17, 29)]),
    "4-D": ((2, 4, 17, 8), [(17, 29), (4, 17, 29), (2, 1, 1, 29), (1, 4, 1, 29), (2, 4, 17, 29)]),
    "5-D": ((2, 3, 4, 17, 8), [(17, 29), (4, 1, 29), (3, 1, 17, 29), (2, 1, 1, 17, 29)]),
}


@pytest.mark.parametrize(
    ("rank", "shape"),
    [(rank, shape) for rank, (_, shapes) in MASK_SHAPES.items() for shape in shapes],
    ids=str,
)
def test_masks_of_every_rank_broadcast_as_in_pytorch(rank: str, shape: tuple[int, ...]) -> None:
    query_shape, _ = MASK_SHAPES[rank]
    key_shape = (*query_shape[:-2], 29, 8)
    query, key, value = draw(query_shape, key_shape, key_shape)
    for mask in (torch.rand(shape) > 0.2, torch.randn(shape)):
        assert_as_pytorch(query, key, value, mask)


@pytest.mark.parametrize("rank", ["2-D", "3-D", "5-D"])
@pytest.mark.parametrize("mask", [torch.tensor(True), torch.tensor(0.5)], ids=str)
def test_masks_without_dimensions_broadcast_as_in_pytorch(rank: str, mask: torch.Tensor) -> None:
    query_shape, _ = MASK_SHAPES[rank]
    key_shape = (*query_shape[:-2], 29, 8)
    assert_as_pytorch(*draw(query_shape, key_shape, key_shape), mask)


@pytest.mark.parametrize("shape", [(29,), (17, 29), (4, 1, 29), (2, 1, 17, 29)], ids=str)
def test_masks_of_every_rank_join_a_window(shape: tuple[int, ...]) -> None:
    query, key, value = draw((2, 4, 17, 8), (2, 4, 29, 8), (2, 4, 29, 8))
    mask = torch.rand(shape) > 0.2
    distance = torch.arange(17)[:, None] - torch.arange(29)
    both = mask & (distance <= 5) & (distance >= -3)
    eager = F.scaled_dot_product_attention(query, key, value, both)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), both)
    for _ in range(2):
        actual = attend(query, key, value, mask, window=(5, 3))
        assert_matches(actual, exact, eager, summands=37)


def test_causal_biases_of_torch_mean_their_corner_on_every_call() -> None:
    query, key, value = draw((2, 4, 17, 8), (2, 4, 29, 8), (2, 4, 29, 8))
    for bias in (causal_lower_right(17, 29), causal_upper_left(17, 29)) * 2:
        dense = bias._materialize()
        eager = F.scaled_dot_product_attention(query, key, value, dense)
        exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), dense)
        assert_matches(attend(query, key, value, bias), exact, eager, summands=37)


class TestAutocast:
    """Autocast casts the inputs as PyTorch does, and nothing after them."""

    def test_inputs_and_masks_are_cast_as_pytorch_casts_them(self) -> None:
        query, key, value = draw(*SHAPES["square"])
        wide = [item.double() for item in (query, key, value)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for mask in (None, torch.randn(17, 17)):
                actual = attend(query, key, value, mask)
                assert actual.dtype is torch.bfloat16
                theirs = F.scaled_dot_product_attention(query, key, value, mask)
                assert torch.equal(actual, theirs)
            mixed = attend(query, key.bfloat16(), value.bfloat16())
            theirs = F.scaled_dot_product_attention(query, key.bfloat16(), value.bfloat16())
            assert torch.equal(mixed, theirs)
            assert attend(*wide).dtype is torch.float64

    @pytest.mark.parametrize("settings", [{"softcap": 20.0}, {"window": (5, 5)}], ids=str)
    def test_scores_stay_as_wide_as_without_autocast(self, settings: dict[str, Any]) -> None:
        """Executors widen scores to fp32; autocast used to narrow them to bf16 again."""
        query, key, value = (3 * item for item in draw(*[(1, 2, 128, 64)] * 3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = attend(query, key, value, **settings)
        plain = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), **settings)
        assert torch.equal(actual, plain)

    def test_measured_errors_are_those_without_autocast(self) -> None:
        query, key, value = (0.1 * item for item in draw(*[(1, 2, 256, 64)] * 3))
        settings = {
            "policy": Policy(error_budget=0.99),
            "backend": "low_rank",
            "return_aux": True,
        }
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, inside = attend(query, key, value, **settings)
        _, outside = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), **settings)
        assert torch.equal(inside.error_estimate, outside.error_estimate)
        assert inside.error_estimate.amin() > 0


class TestAmbientKernels:
    """``torch.nn.attention.sdpa_kernel`` restricts which of SDPA's kernels may serve."""

    @pytest.mark.parametrize(
        ("allowed", "name"),
        [(SDPBackend.MATH, "sdpa.math"), (SDPBackend.FLASH_ATTENTION, "sdpa.flash")],
    )
    def test_the_allowed_kernel_serves_bit_for_bit(self, allowed: SDPBackend, name: str) -> None:
        query, key, value = draw(*SHAPES["square"])
        with sdpa_kernel(allowed):
            for _ in range(2):
                actual = attend(query, key, value, backend="sdpa")
                assert torch.equal(actual, F.scaled_dot_product_attention(query, key, value))
            decision = plan_attention(query, key, value, backend="sdpa")
        assert decision.plan.groups[0].capability == name

    def test_the_trace_says_which_kernels_the_context_leaves(self) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            decision = plan_attention(*draw(*SHAPES["square"]))
        (flash,) = [entry for entry in decision.trace if entry.candidate == "sdpa.flash/fp32"]
        assert flash.reason == "the ambient sdpa_kernel allows sdpa.math"
        assert decision.plan.groups[0].capability != "sdpa.flash"

    def test_another_executor_serves_where_the_context_leaves_no_kernel(self) -> None:
        query, key, value = draw(*SHAPES["square"])
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            decision = plan_attention(query, key, value)
        assert decision.plan.groups[0].capability in ("chunked", "reference")

    def test_the_restriction_ends_with_the_context(self) -> None:
        query, key, value = draw(*SHAPES["square"])
        before = attend(query, key, value)
        with sdpa_kernel(SDPBackend.MATH):
            attend(query, key, value)
        assert torch.equal(attend(query, key, value), before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Ask PyTorch for deterministic algorithms during one test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_reaches_the_plan_and_repeats_gradients() -> None:
    events: list[AttentionEvent] = []
    found = []
    tensors = [item.requires_grad_() for item in draw(*SHAPES["wide"])]
    for _ in range(2):
        with record_events(events.append):
            output = attend(*tensors, window=(5, 5), softcap=3.0)
        found.append(torch.autograd.grad(output.sum(), tensors))
    assert all(event.problem.deterministic for event in events)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class TestAuxiliaryOutputs:
    """``return_aux`` gives ``(out, aux)`` in the caller's leading dimensions."""

    @pytest.mark.parametrize(
        ("query_shape", "key_shape", "leading"),
        [
            ((17, 8), (29, 8), ()),
            ((4, 17, 8), (4, 29, 8), (4,)),
            ((2, 4, 17, 8), (2, 4, 29, 8), (2, 4)),
            ((2, 3, 4, 17, 8), (2, 3, 4, 29, 8), (2, 3, 4)),
            ((1, 3, 4, 17, 8), (2, 1, 1, 29, 8), (2, 3, 4)),
        ],
        ids=str,
    )
    def test_shapes_follow_the_rank_of_the_input(
        self, query_shape: tuple[int, ...], key_shape: tuple[int, ...], leading: tuple[int, ...]
    ) -> None:
        query, key, value = draw(query_shape, key_shape, key_shape)
        output, aux = attend(query, key, value, return_aux=ALL_AUX)
        assert output.shape == (*leading, 17, 8)
        for name in ("lse", "row_max", "entropy"):
            assert getattr(aux, name).shape == (*leading, 17)
            assert getattr(aux, name).dtype is torch.float32
        assert aux.weights.shape == (*leading, 17, 29)
        assert aux.error_estimate.shape == leading
        assert aux.decision.plan.is_exact

    def test_values_are_those_of_the_scores(self) -> None:
        query, key, value = draw(*SHAPES["wide"])
        _, aux = attend(query, key, value, scale=0.3, return_aux=ALL_AUX)

        def of_scores(query: torch.Tensor, key: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = 0.3 * query @ key.mT
            weights = scores.softmax(-1)
            return {
                "lse": scores.logsumexp(-1),
                "row_max": scores.amax(-1),
                "entropy": -(weights * weights.log2()).sum(-1),
                "weights": weights,
            }

        exact, eager = of_scores(query.double(), key.double()), of_scores(query, key)
        for name, reference in exact.items():
            assert_matches(getattr(aux, name), reference, eager[name], name=name, summands=37)

    def test_only_what_was_asked_for_is_there(self) -> None:
        names = ("lse", "row_max", "entropy", "weights")
        for wanted in itertools.product((False, True), repeat=len(names)):
            request = AuxRequest(**dict(zip(names, wanted, strict=True)))
            _, aux = attend(*draw(*SHAPES["square"]), return_aux=request)
            assert tuple(getattr(aux, name) is not None for name in names) == wanted

    def test_true_gives_the_decision_alone_and_false_the_output_alone(self) -> None:
        tensors = draw(*SHAPES["square"])
        output, aux = attend(*tensors, return_aux=True)
        assert aux.decision == plan_attention(*tensors)
        assert aux.lse is None
        assert torch.equal(aux.error_estimate, torch.zeros(2, 3))
        assert torch.equal(attend(*tensors, return_aux=False), output)


def test_plan_attention_refuses_unknown_keywords() -> None:
    with pytest.raises(ArgumentTypeError, match=r"keyword arguments: .*'windowing'"):
        plan_attention(*draw(*SHAPES["square"]), windowing=(1, 1))


@pytest.mark.parametrize("backend", ["auto", "sdpa.flash", "chunked", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_mask_is_not_rounded_to_the_querys_dtype(dtype: torch.dtype, backend: str) -> None:
    """An offset that all keys share changes nothing, unless rounding eats the differences."""
    tensors = draw(*[(2, 3, 17, 16)] * 3, dtype=dtype)
    mask = torch.randint(-32, 32, (2, 3, 17, 17)) / 16
    shifted = mask + 4096.0
    assert not torch.equal(shifted.to(dtype).float(), shifted)
    actual = attend(*tensors, shifted, backend=backend)
    exact = attend(*(item.double() for item in tensors), mask.double(), backend="reference")
    eager = F.scaled_dot_product_attention(*tensors, mask.to(dtype))
    assert_matches(actual, exact, eager, summands=16 + 17)


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("lengths", [(17, 17), (17, 29), (29, 17)], ids=str)
def test_causal_order_holds_for_scales_that_are_not_positive(
    scale: float, lengths: tuple[int, int]
) -> None:
    """Fused kernels hide keys by -inf before scaling, and 0 * -inf is NaN."""
    len_q, len_k = lengths
    shapes = (2, 3, len_q, 16), (2, 3, len_k, 16), (2, 3, len_k, 16)
    tensors = [item.requires_grad_() for item in draw(*shapes)]
    output = attend(*tensors, is_causal=True, scale=scale)
    gradients = torch.autograd.grad(output.square().sum(), tensors)
    assert all(item.isfinite().all() for item in (output, *gradients))
    wide = [item.detach().double() for item in tensors]
    exact = attend(*wide, is_causal=True, scale=scale, backend="reference")
    eager = attend(*tensors, is_causal=True, scale=scale, backend="reference")
    assert_matches(output, exact, eager, summands=16 + len_k)
