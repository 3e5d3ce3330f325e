import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from adaattn.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from adaattn.linalg.entropy import (
    attention_entropy,
    attention_sparsity,
    keys_for_mass,
    multi_scale_entropy,
    row_entropy,
    sampled_attention_entropy,
    weight_entropy,
)
from adaattn.spec import Align
from adaattn.testing import assert_matches


class LargestTensor(TorchDispatchMode):
    """Notes the size in bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


def textbook_entropy(scores: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return torch.special.entr(weights).sum(-1) / math.log(2)


def textbook_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float | None = None,
    is_causal: bool = False,
    align: Align = Align.TOP_LEFT,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    len_q, len_k = scores.shape[-2:]
    if is_causal:
        offset = len_k - len_q if align is Align.BOTTOM_RIGHT else 0
        seen = torch.ones(len_q, len_k, dtype=torch.bool).tril(offset)
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        added = mask.dtype != torch.bool
        scores = scores + mask if added else scores.masked_fill(~mask, -torch.inf)
    return scores


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 3, 63, 1000])
def test_row_entropy_is_as_right_as_eager_softmax(dtype: torch.dtype, size: int) -> None:
    scores = (4 * torch.randn(2, 3, 5, size)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    exact = textbook_entropy(scores.double())
    assert_matches(row_entropy(scores), exact, textbook_entropy(scores.to(wide)), summands=size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weight_entropy_is_as_right_as_eager_arithmetic(dtype: torch.dtype) -> None:
    weights = torch.softmax(3 * torch.randn(2, 3, 5, 100), dim=-1).to(dtype)

    def textbook(weights: torch.Tensor) -> torch.Tensor:
        share = weights / weights.sum(-1, keepdim=True)
        return torch.special.entr(share).sum(-1) / math.log(2)

    wide = torch.promote_types(dtype, torch.float32)
    exact = textbook(weights.double())
    assert_matches(weight_entropy(weights), exact, textbook(weights.to(wide)), summands=100)


def test_masked_keys_count_as_absent_and_rows_without_keys_have_no_entropy() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf], [-torch.inf] * 4])
    assert row_entropy(scores).tolist() == [1.0, 0.0]
    assert weight_entropy(torch.tensor([[0.5, 0.0, 0.5], [0.0] * 3])).tolist() == [1.0, 0.0]


def test_huge_scores_neither_overflow_nor_cancel() -> None:
    scores = torch.tensor([[3e38, 3e38, -3e38], [1e4, 1e4, 1e4 - 200]])
    assert row_entropy(scores).tolist() == [1.0, 1.0]


def test_nan_scores_are_not_mistaken_for_masked_ones() -> None:
    assert row_entropy(torch.tensor([[0.0, torch.nan]])).isnan().all()


@pytest.mark.parametrize("function", [row_entropy, weight_entropy])
def test_gradients_are_finite_where_rows_are_masked_or_empty(function: Callable) -> None:
    absent = -torch.inf if function is row_entropy else 0.0
    values = torch.rand(4, 6)
    values[0] = absent
    values[1, 2:] = absent
    values[2, 1:] = absent
    values.requires_grad_()
    function(values).sum().backward()
    assert values.grad.isfinite().all()
    assert not values.grad[0].any()
    assert values.grad[3].any()


def test_row_entropy_has_the_right_gradient_beside_masked_keys() -> None:
    scores = torch.randn(3, 5, dtype=torch.double)
    hidden = torch.rand(3, 5) < 0.4
    hidden[0] = True
    scores.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: row_entropy(s.masked_fill(hidden, -torch.inf)), scores
    )


def test_weight_entropy_has_the_right_gradient() -> None:
    weights = (torch.rand(3, 5, dtype=torch.double) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(weight_entropy, weights)


@settings(deadline=None, max_examples=50)
@given(
    size=st.integers(1, 40),
    spread=st.floats(0.0, 100.0),
    hidden=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
)
def test_entropy_lies_between_zero_and_log2_of_the_keys_seen(
    size: int, spread: float, hidden: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(4, size, generator=generator, dtype=torch.double)
    scores[torch.rand(4, size, generator=generator) < hidden] = -torch.inf
    most = (scores > -torch.inf).sum(-1).clamp_min(1).double().log2()
    entropy = row_entropy(scores)
    assert (entropy >= 0.0).all()
    assert (entropy <= most * (1 + size * torch.finfo(torch.double).eps)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("align", list(Align))
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (33, 17), (17, 33)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_entropy_matches_the_entropy_of_all_scores(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    align: Align,
    len_q: int,
    len_k: int,
    is_causal: bool,
) -> None:
    query = (2 * torch.randn(2, heads, len_q, 16)).to(dtype)
    key = (2 * torch.randn(2, kv_heads, len_k, 16)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)

    def textbook(dtype: torch.dtype) -> torch.Tensor:
        scores = textbook_scores(query.to(dtype), key.to(dtype), is_causal=is_causal, align=align)
        return textbook_entropy(scores)

    actual = attention_entropy(
        query, key, is_causal=is_causal, align=align, max_chunk_bytes=100_000
    )
    assert_matches(actual, textbook(torch.float64), textbook(wide), summands=len_k * 16)


@pytest.mark.parametrize("kind", ["boolean", "additive", "broadcast"])
def test_attention_entropy_honours_masks_and_scale(kind: str) -> None:
    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 7, 8)
    mask = {
        "boolean": torch.rand(2, 4, 9, 7) < 0.5,
        "additive": torch.randn(2, 4, 9, 7),
        "broadcast": torch.rand(1, 1, 1, 7) < 0.5,
    }[kind]

    def textbook(dtype: torch.dtype) -> torch.Tensor:
        typed = mask if mask.dtype == torch.bool else mask.to(dtype)
        return textbook_entropy(
            textbook_scores(query.to(dtype), key.to(dtype), scale=0.7, mask=typed)
        )

    actual = attention_entropy(query, key, scale=0.7, mask=mask, max_chunk_bytes=1)
    assert_matches(actual, textbook(torch.float64), textbook(torch.float32), summands=56)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_entropy_differentiates_through_its_chunks(is_causal: bool) -> None:
    query = torch.randn(1, 2, 3, 2, dtype=torch.double, requires_grad=True)
    key = torch.randn(1, 1, 4, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k: attention_entropy(q, k, is_causal=is_causal, max_chunk_bytes=1), (query, key)
    )


def test_attention_entropy_never_holds_all_scores_forward_or_backward() -> None:
    query = torch.randn(1, 2, 256, 8, requires_grad=True)
    key = torch.randn(1, 2, 256, 8, requires_grad=True)
    limit = 1 << 17
    with LargestTensor() as largest:
        attention_entropy(query, key, max_chunk_bytes=limit).sum().backward()
    all_scores = 2 * 256 * 256 * 4
    assert largest.num_bytes <= limit < all_scores
    assert query.grad.isfinite().all()


def test_attention_entropy_takes_non_contiguous_tensors() -> None:
    query = torch.randn(2, 9, 4, 8).transpose(1, 2)
    key = torch.randn(2, 8, 2, 7).permute(0, 2, 3, 1)
    exact = textbook_entropy(textbook_scores(query.double(), key.double()))
    eager = textbook_entropy(textbook_scores(query, key))
    assert_matches(attention_entropy(query, key), exact, eager, summands=7 * 8)


@pytest.mark.parametrize(
    ("query_shape", "key_shape"),
    [
        ((0, 2, 3, 4), (0, 2, 5, 4)),
        ((1, 2, 0, 4), (1, 2, 5, 4)),
        ((1, 2, 3, 4), (1, 2, 0, 4)),
        ((1, 0, 3, 4), (1, 0, 5, 4)),
    ],
)
def test_empty_inputs_have_no_entropy(query_shape: list[int], key_shape: list[int]) -> None:
    query, key = torch.randn(query_shape), torch.randn(key_shape)
    exact = attention_entropy(query, key)
    assert exact.shape == query_shape[:3]
    assert not exact.any()
    estimate = sampled_attention_entropy(query, key)
    assert estimate.mean.shape == query_shape[:2]
    assert not estimate.mean.any()
    pooled = multi_scale_entropy(query, key, scales=(1, 2))
    assert pooled.bits.shape == (*query_shape[:2], 2)
    assert not pooled.normalised.any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_sampling_every_row_gives_the_exact_mean_without_error(is_causal: bool) -> None:
    query, key = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 30, 8)
    arguments = {"is_causal": is_causal, "align": Align.BOTTOM_RIGHT}
    estimate = sampled_attention_entropy(query, key, rows=20, **arguments)
    rows = textbook_entropy(textbook_scores(query.double(), key.double(), **arguments))
    eager = textbook_entropy(textbook_scores(query, key, **arguments))
    assert_matches(estimate.mean, rows.mean(-1), eager.mean(-1), summands=30 * 8)
    assert not estimate.standard_error.any()
    assert estimate.num_rows == 20


def test_sampled_means_lie_within_their_standard_error() -> None:
    """Chebyshev allows a ninth beyond three standard errors, whatever the distribution."""
    query = torch.randn(1, 2, 300, 8) * torch.linspace(0, 4, 300)[:, None]
    key = torch.randn(1, 1, 100, 8)
    truth = attention_entropy(query, key).mean(-1)
    beyond = 0.0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        estimate = sampled_attention_entropy(query, key, rows=40, generator=generator)
        beyond += ((estimate.mean - truth).abs() > 3 * estimate.standard_error).sum().item() / 120
    assert beyond <= 1 / 9


def test_standard_errors_are_those_of_the_means_they_describe() -> None:
    """The spread of 200 means has a relative standard error of 1 / sqrt(400), 5 %."""
    query, key = 2 * torch.randn(1, 1, 200, 8), torch.randn(1, 1, 100, 8)
    generator = torch.Generator().manual_seed(1)
    draws = [
        sampled_attention_entropy(query, key, rows=150, generator=generator) for _ in range(200)
    ]
    spread = torch.stack([draw.mean for draw in draws]).std(0)
    claimed = torch.stack([draw.standard_error for draw in draws]).square().mean(0).sqrt()
    assert ((spread / claimed - 1).abs() < 5 / math.sqrt(400)).all()


def test_sampling_takes_the_same_rows_each_time_and_leaves_the_global_state_alone() -> None:
    query, key = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 50, 8)
    before = torch.get_rng_state()
    first = sampled_attention_entropy(query, key, rows=10)
    second = sampled_attention_entropy(query, key, rows=10)
    other = sampled_attention_entropy(
        query, key, rows=10, generator=torch.Generator().manual_seed(5)
    )
    assert torch.equal(first.mean, second.mean)
    assert not torch.equal(first.mean, other.mean)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampled_rows_see_their_own_part_of_the_mask() -> None:
    query, key = torch.randn(1, 1, 100, 8), torch.randn(1, 1, 50, 8)
    mask = torch.zeros(100, 50, dtype=torch.bool)
    mask[:, 0] = True
    assert not sampled_attention_entropy(query, key, rows=10, mask=mask).mean.any()
    causal = textbook_scores(query, key, is_causal=True) > -torch.inf
    masked = sampled_attention_entropy(query, key, rows=10, mask=causal)
    flagged = sampled_attention_entropy(query, key, rows=10, is_causal=True)
    assert_matches(masked.mean, flagged.mean.double(), flagged.mean, summands=50 * 8)


def test_gradients_of_the_sampled_mean_are_finite_even_when_all_rows_agree() -> None:
    query = torch.zeros(1, 1, 50, 4, requires_grad=True)
    sampled_attention_entropy(query, torch.randn(1, 1, 9, 4), rows=5).mean.sum().backward()
    assert query.grad.isfinite().all()


def test_scale_one_of_multi_scale_entropy_is_the_exact_mean() -> None:
    query, key = torch.randn(2, 4, 21, 8), torch.randn(2, 2, 33, 8)
    for is_causal in (False, True):
        arguments = {"is_causal": is_causal, "align": Align.BOTTOM_RIGHT}
        found = multi_scale_entropy(query, key, scales=(1,), **arguments)
        rows = attention_entropy(query.double(), key.double(), **arguments)
        eager = textbook_entropy(textbook_scores(query, key, **arguments))
        assert_matches(found.bits[..., 0], rows.mean(-1), eager.mean(-1), summands=33 * 8)


@pytest.mark.parametrize("step", [2, 4, 16, 100])
@pytest.mark.parametrize("align", list(Align))
@pytest.mark.parametrize("is_causal", [False, True])
def test_pooled_scales_average_tokens_and_see_a_key_when_any_token_does(
    step: int, align: Align, is_causal: bool
) -> None:
    query = torch.randn(1, 2, 21, 8, dtype=torch.double)
    key = torch.randn(1, 2, 33, 8, dtype=torch.double)

    def averaged(tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.mean(-2) for part in tokens.split(step, dim=-2)], dim=-2)

    scores = textbook_scores(averaged(query), averaged(key))
    if is_causal:
        hidden = textbook_scores(query, key, is_causal=True, align=align) == -torch.inf
        seen = [
            [(~tile).any().item() for tile in band.split(step, dim=-1)]
            for band in hidden[0, 0].split(step, dim=-2)
        ]
        scores = scores.masked_fill(~torch.tensor(seen), -torch.inf)
    keys = (scores > -torch.inf).sum(-1).clamp_min(1).double().log2().sum(-1)
    found = multi_scale_entropy(query, key, scales=(step,), is_causal=is_causal, align=align)
    exact = textbook_entropy(scores)
    assert_matches(found.bits[..., 0], exact.mean(-1), exact.mean(-1), summands=33 * 8)
    normalised = torch.where(keys == 0.0, 0.0, exact.sum(-1) / keys.clamp_min(1.0))
    assert_matches(found.normalised[..., 0], normalised, normalised, summands=33 * 8)


def test_uniform_attention_has_normalised_entropy_one_at_every_scale() -> None:
    found = multi_scale_entropy(torch.zeros(1, 2, 40, 4), torch.randn(1, 2, 40, 4), is_causal=True)
    assert found.scales == (1, 2, 4, 8, 16)
    ones = torch.ones(1, 2, 5)
    assert_matches(found.normalised, ones.double(), ones, summands=40)


def test_multi_scale_entropy_can_sample_rows_and_differentiate() -> None:
    query = torch.randn(1, 2, 100, 4, requires_grad=True)
    found = multi_scale_entropy(query, torch.randn(1, 2, 100, 4), rows=10, is_causal=True)
    found.normalised.sum().backward()
    assert found.bits.shape == (1, 2, 5)
    assert query.grad.isfinite().all()
    assert 10 <= query.grad[0, 0].any(-1).sum() < 100


def test_keys_for_mass_counts_the_largest_weights() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    assert keys_for_mass(weights, 0.5).tolist() == [1, 1, 0]
    assert keys_for_mass(weights, 0.75).tolist() == [2, 1, 0]
    assert keys_for_mass(weights, 1.0).tolist() == [4, 1, 0]
    assert attention_sparsity(weights, 0.5).item() == pytest.approx(1 - 2 / 12)


def test_bad_arguments_are_refused_with_a_sentence() -> None:
    query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    with pytest.raises(ShapeError, match=r"key: expected \[1, a divisor of 4, Sk, 8\], got"):
        attention_entropy(query, torch.zeros(1, 3, 3, 8))
    with pytest.raises(ShapeError, match=r"query: expected \[B, H, S, D\], got \(3, 8\)"):
        attention_entropy(query[0, 0], key)
    with pytest.raises(DTypeError, match=r"dtype of key: expected torch.float32"):
        attention_entropy(query, key.half())
    with pytest.raises(DTypeError, match="dtype of scores: expected float64"):
        row_entropy(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(DTypeError, match="dtype of mask: expected bool or floating point"):
        attention_entropy(query, key, mask=torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"mask: expected broadcastable to \(1, 4, 3, 3\)"):
        attention_entropy(query, key, mask=torch.ones(3, 5))
    with pytest.raises(DeviceError, match="device of key: expected cpu, got meta"):
        attention_entropy(query, key.to("meta"))
    with pytest.raises(ArgumentError, match="scale: expected a finite number, got nan"):
        attention_entropy(query, key, scale=math.nan)
    with pytest.raises(ArgumentError, match="rows: expected at least 2, got 1"):
        sampled_attention_entropy(query, key, rows=1)
    with pytest.raises(ArgumentError, match="scales: expected at least one"):
        multi_scale_entropy(query, key, scales=())
    with pytest.raises(ArgumentError, match=r"mass: expected a number in \(0, 1\], got 0"):
        keys_for_mass(query, 0)
