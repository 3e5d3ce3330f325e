"""Random inputs: seeded, of the right shapes, and equal across dtypes up to rounding."""

import pytest
import torch

from adaattn.errors import ArgumentError
from adaattn.spec import MaskKind, Precision
from adaattn.testing import Layout, cast_tensors, differentiable, make_problem, make_tensors


def test_equal_seeds_give_equal_tensors_and_other_seeds_others() -> None:
    problem = make_problem()
    first, again, other = (make_tensors(problem, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.query, again.query)
    assert not torch.equal(first.query, other.query)


def test_a_lower_precision_is_the_same_numbers_rounded() -> None:
    wide = make_tensors(make_problem(precision=Precision.FP64))
    low = make_tensors(make_problem(precision=Precision.BF16))
    assert torch.equal(low.key, wide.key.bfloat16())


@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_holds_the_same_numbers(layout: Layout) -> None:
    problem = make_problem(batch=2, len_q=5, requires_grad=True)
    plain, laid = make_tensors(problem), make_tensors(problem, layout=layout)
    assert torch.equal(plain.query, laid.query)
    assert laid.query.is_leaf and laid.query.requires_grad
    assert laid.query.is_contiguous() == (layout is Layout.CONTIGUOUS)
    assert (laid.query.stride(-1) == 1) == (layout is not Layout.STRIDED)


def test_what_follows_from_the_sizes_is_filled_in() -> None:
    problem = make_problem(num_heads=6, num_kv_heads=2, head_dim=64, mask=MaskKind.BOOLEAN)
    assert (problem.scale, problem.group_size) == (0.125, 3)
    assert (problem.len_k, problem.value_dim) == (8, 64)
    assert problem.mask_shape == (1, 6, 8, 8)


def test_packed_lengths_give_bounds_and_counts() -> None:
    lengths = {"lengths_q": (2, 0, 3), "lengths_k": (1, 4, 0)}
    problem = make_problem(**lengths)
    tensors = make_tensors(problem, **lengths)
    assert (problem.num_sequences, problem.len_q, problem.len_k) == (3, 5, 5)
    assert (problem.max_len_q, problem.max_len_k) == (3, 4)
    pairs = sum(q * k for q, k in zip(*lengths.values(), strict=True))
    assert pairs <= problem.attended_pairs < problem.len_q * problem.len_k
    assert not problem.packed_square
    assert tensors.bounds_q == (0, 2, 2, 5)
    assert tensors.cu_seqlens_k is not None and tensors.cu_seqlens_k.tolist() == [0, 1, 5, 5]
    assert tensors.cu_seqlens_k.dtype is torch.int32


def test_lengths_that_do_not_fit_the_problem_are_refused() -> None:
    problem = make_problem(lengths_q=(2, 3))
    with pytest.raises(ArgumentError, match=r"packed lengths .*expected \(2, 5, 2, 5\), got"):
        make_tensors(problem, lengths_q=(2, 2))


def test_a_misspelt_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="soft_cap"):
        make_problem(soft_cap=3.0)


@pytest.mark.parametrize("kind", [MaskKind.BOOLEAN, MaskKind.ADDITIVE])
def test_hidden_rows_see_nothing_and_other_rows_something(kind: MaskKind) -> None:
    problem = make_problem(mask=kind, len_k=40)
    mask = make_tensors(problem, num_hidden_rows=3).mask
    assert mask is not None
    seen = mask if kind is MaskKind.BOOLEAN else torch.isfinite(mask)
    assert not seen[:, :, :3].any()
    assert bool(seen[:, :, 3:].any(-1).all())


def test_gradients_are_wanted_where_the_problem_says() -> None:
    problem = make_problem(
        requires_grad=True, mask=MaskKind.ADDITIVE, mask_requires_grad=True, has_sinks=True,
        has_alibi=True, alibi_requires_grad=True,
    )  # fmt: skip
    tensors = make_tensors(problem)
    assert set(differentiable(tensors)) == {"query", "key", "value", "mask", "alibi_slopes"}
    wide = cast_tensors(tensors, torch.float64)
    assert set(differentiable(wide)) == set(differentiable(tensors))
    assert all(tensor.dtype is torch.float64 for tensor in differentiable(wide).values())


def test_casting_copies_even_when_the_dtype_stays() -> None:
    tensors = make_tensors(make_problem(precision=Precision.FP64))
    copy = cast_tensors(tensors, torch.float64)
    copy.query.zero_()
    assert bool(tensors.query.any())
