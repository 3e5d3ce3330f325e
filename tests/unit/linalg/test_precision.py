import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.errors import ArgumentError, DTypeError, NonFiniteError, ShapeError
from adaattn.linalg.precision import (
    Granularity,
    Quantized,
    Scheme,
    cast_error,
    dequantize,
    dynamic_range,
    fake_quantize,
    hadamard_rotate,
    pack_int4,
    quantization_error,
    quantize,
    smooth_keys,
    unpack_int4,
)
from adaattn.spec import Precision
from adaattn.testing import assert_matches

FORMATS = [
    (Precision.FP8_E4M3, Scheme.SYMMETRIC),
    (Precision.FP8_E5M2, Scheme.SYMMETRIC),
    (Precision.INT8, Scheme.SYMMETRIC),
    (Precision.INT8, Scheme.ASYMMETRIC),
    (Precision.INT4, Scheme.SYMMETRIC),
    (Precision.INT4, Scheme.ASYMMETRIC),
]
FORMAT_NAMES = [f"{precision.label}-{scheme.name.lower()}" for precision, scheme in FORMATS]
formats = pytest.mark.parametrize(("precision", "scheme"), FORMATS, ids=FORMAT_NAMES)
granularities = pytest.mark.parametrize("granularity", list(Granularity))


def assert_within_bound(tensor: torch.Tensor, stored: Quantized) -> None:
    rebuilt = stored.dequantize(stored.scale.dtype).double()
    error, bound = (tensor.double() - rebuilt).abs(), stored.error_bound().double()
    assert rebuilt.isfinite().all()
    assert (error <= bound).all(), f"exceeds the bound by {(error / bound).max()}"


def groups_of(tensor: torch.Tensor, granularity: Granularity, size: int) -> list[torch.Tensor]:
    """The elements that share a scale, in the order of the flattened scale."""
    if granularity is Granularity.TENSOR:
        return [tensor.flatten()]
    if granularity is Granularity.HEAD:
        return list(tensor.flatten(-2).flatten(0, -2))
    if granularity is Granularity.TOKEN:
        return list(tensor.flatten(0, -2))
    heads = tensor.flatten(0, -3)
    return [c for head in heads for part in head.split(size, dim=0) for c in part.unbind(-1)]


@formats
@granularities
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_element_is_rebuilt_to_within_half_a_step(
    precision: Precision, scheme: Scheme, granularity: Granularity, dtype: torch.dtype
) -> None:
    tensor = (torch.randn(2, 3, 13, 7) * torch.logspace(-3, 3, 7) + 1).to(dtype)
    stored = quantize(tensor, precision, granularity, group_size=5, scheme=scheme)
    assert_within_bound(tensor, stored)
    rebuilt = dequantize(stored)
    assert rebuilt.dtype == dtype
    assert rebuilt.shape == tensor.shape
    assert stored.scale.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)


@settings(deadline=None, max_examples=60)
@given(
    chosen=st.sampled_from(FORMATS),
    granularity=st.sampled_from(list(Granularity)),
    length=st.integers(1, 9),
    dim=st.integers(1, 9),
    group_size=st.integers(1, 10),
    exponent=st.floats(-44, 38),
    shift=st.floats(-10, 10),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_the_error_bound_holds_at_any_size_offset_and_sparsity(
    chosen: tuple[Precision, Scheme],
    granularity: Granularity,
    length: int,
    dim: int,
    group_size: int,
    exponent: float,
    shift: float,
    zeros: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.rand(2, length, dim, generator=generator) * 2 - 1 + shift
    tensor[torch.rand(tensor.shape, generator=generator) < zeros] = 0.0
    tensor = (tensor.double() * 10.0**exponent).clamp(-3e38, 3e38).float()
    stored = quantize(tensor, chosen[0], granularity, group_size=group_size, scheme=chosen[1])
    assert_within_bound(tensor, stored)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
@granularities
def test_integer_steps_are_the_largest_magnitude_over_the_largest_code(
    precision: Precision, granularity: Granularity
) -> None:
    tensor = torch.randn(2, 3, 13, 7, dtype=torch.double)
    top = 2 ** (precision.bits - 1) - 1
    stored = quantize(tensor, precision, granularity, group_size=5)
    groups = groups_of(tensor, granularity, 5)
    expected = torch.stack([group.abs().max() for group in groups]) / top
    assert torch.equal(stored.scale.flatten(), expected)
    worst = (tensor - stored.dequantize()).abs().max()
    assert worst <= stored.scale.max() * 0.5 * (1 + 8 * top * torch.finfo(torch.double).eps)
    assert worst > stored.scale.min() * 0.25


def test_relative_half_steps_are_the_unit_roundoff_of_the_format() -> None:
    tensor = torch.randn(1, 1, 400, 8, dtype=torch.double)
    for precision in (Precision.INT8, Precision.INT4):
        found = quantization_error(tensor, quantize(tensor, precision, Granularity.TENSOR))
        limit = precision.unit_roundoff * tensor.abs().max()
        assert 0.9 * limit <= found.max_abs <= limit * (1 + 1e3 * torch.finfo(torch.double).eps)


def test_asymmetric_codes_halve_the_step_of_one_sided_values() -> None:
    tensor = torch.rand(1, 2, 40, 8)
    symmetric, asymmetric = (
        quantize(tensor, Precision.INT4, Granularity.HEAD, scheme=scheme) for scheme in Scheme
    )
    assert (asymmetric.scale <= symmetric.scale * 7 / 15 * (1 + 1e-6)).all()
    assert asymmetric.codes().amin() == -8
    assert asymmetric.codes().amax() == 7
    assert symmetric.codes().amin() >= 0


def test_constant_and_zero_groups_are_rebuilt_exactly() -> None:
    tensor = torch.tensor([[0.0] * 5, [1e-6] * 5, [-3e5] * 5, [1.5e-45] * 5])
    for precision in (Precision.INT8, Precision.INT4):
        stored = quantize(tensor, precision, scheme=Scheme.ASYMMETRIC)
        assert torch.equal(stored.dequantize()[:3], tensor[:3])
        assert_within_bound(tensor, stored)
    for precision, scheme in FORMATS:
        assert not quantize(torch.zeros(3, 4), precision, scheme=scheme).dequantize().any()


@pytest.mark.parametrize("precision", [Precision.FP8_E4M3, Precision.FP8_E5M2])
def test_fp8_uses_its_whole_range_and_never_overflows(precision: Precision) -> None:
    tensor = torch.randn(2, 3, 9, 16) * 1e30
    stored = quantize(tensor, precision, Granularity.HEAD)
    dtype = {Precision.FP8_E4M3: torch.float8_e4m3fn, Precision.FP8_E5M2: torch.float8_e5m2}
    assert stored.data.dtype == dtype[precision]
    largest = stored.codes().abs().amax((-2, -1))
    assert (largest == torch.finfo(stored.data.dtype).max).all()
    relative = (stored.dequantize() - tensor).abs() / tensor.abs()
    normal = stored.codes().abs() >= torch.finfo(stored.data.dtype).smallest_normal
    slack = 1 + 8 * torch.finfo(torch.float).eps
    assert (relative[normal] <= precision.unit_roundoff * slack).all()


@granularities
def test_finer_granularity_confines_an_outlier_to_its_group(granularity: Granularity) -> None:
    tensor = torch.rand(1, 2, 8, 4) + 1
    spoiled = tensor.clone()
    spoiled[0, 0, 0, 0] = 1e4
    before = quantize(tensor, Precision.INT8, granularity, group_size=4).dequantize()
    after = quantize(spoiled, Precision.INT8, granularity, group_size=4).dequantize()
    touched = {
        Granularity.TENSOR: 64,
        Granularity.HEAD: 32,
        Granularity.TOKEN: 4,
        Granularity.CHANNEL_GROUP: 4,
    }[granularity]
    changed = before != after
    assert changed.sum() == touched


@pytest.mark.parametrize("size", [0, 1, 2, 7, 16])
def test_int4_codes_survive_packing_two_to_a_byte(size: int) -> None:
    codes = torch.randint(-8, 8, (3, 5, size), dtype=torch.int8)
    packed = pack_int4(codes)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, (size + 1) // 2)
    assert torch.equal(unpack_int4(packed, size), codes)


def test_all_int4_codes_survive_packing() -> None:
    codes = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8))
    assert torch.equal(unpack_int4(pack_int4(codes), 2).long(), codes)
    assert pack_int4(torch.tensor([[3, -1]])).item() == 0xF3


def test_storage_is_counted_with_scales_and_zero_points() -> None:
    tensor = torch.randn(2, 3, 100, 65)
    assert quantize(tensor, Precision.INT8).num_bytes == 600 * 65 + 600 * 4
    stored = quantize(
        tensor, Precision.INT4, Granularity.CHANNEL_GROUP, scheme=Scheme.ASYMMETRIC, group_size=64
    )
    assert stored.num_bytes == 600 * 33 + 2 * (6 * 2 * 65) * 4
    assert stored.scale.shape == (2, 3, 2, 65)


@formats
@granularities
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 5, 4), (2, 3, 0, 4)])
def test_empty_tensors_stay_empty(
    precision: Precision, scheme: Scheme, granularity: Granularity, shape: tuple[int, ...]
) -> None:
    tensor = torch.zeros(shape)
    stored = quantize(tensor, precision, granularity, scheme=scheme)
    assert stored.dequantize().shape == shape
    error = quantization_error(tensor, stored)
    assert error.relative_frobenius == error.max_abs == 0


@formats
@granularities
def test_strides_do_not_matter(
    precision: Precision, scheme: Scheme, granularity: Granularity
) -> None:
    tensor = torch.randn(2, 13, 3, 14).transpose(1, 2)[..., ::2]
    found, expected = (
        quantize(x, precision, granularity, group_size=5, scheme=scheme)
        for x in (tensor, tensor.contiguous())
    )
    rebuilt = expected.dequantize()
    assert_matches(found.dequantize(), rebuilt.double(), rebuilt)


@formats
def test_fake_quantisation_rounds_forward_and_is_identity_backward(
    precision: Precision, scheme: Scheme
) -> None:
    tensor = torch.randn(2, 5, 6, requires_grad=True)
    weight = torch.randn(2, 5, 6)
    rounded = fake_quantize(tensor, precision, scheme=scheme)
    (rounded * weight).sum().backward()
    assert torch.equal(rounded, quantize(tensor, precision, scheme=scheme).dequantize())
    assert torch.equal(tensor.grad, weight)


def test_measured_errors_are_those_of_float64_arithmetic() -> None:
    tensor = torch.randn(2, 3, 17, 8)
    stored = quantize(tensor, Precision.INT4)
    found = quantization_error(tensor, stored)
    difference = tensor.double() - stored.dequantize().double()
    exact = difference.norm() / tensor.double().norm()
    assert found.relative_frobenius.item() == pytest.approx(exact.item())
    assert found.max_abs.item() == difference.abs().max().item()
    heads = difference.flatten(-2).norm(dim=-1) / tensor.double().flatten(-2).norm(dim=-1)
    assert_matches(found.per_head, heads, heads, summands=17 * 8)
    assert (
        quantization_error(
            torch.zeros(2, 2), quantize(torch.zeros(2, 2), Precision.INT8)
        ).relative_frobenius
        == 0
    )


@pytest.mark.parametrize("precision", [p for p in Precision if p not in (6, 7)])
def test_cast_error_is_within_the_unit_roundoff_of_the_format(precision: Precision) -> None:
    tensor = torch.rand(2, 3, 9, 8, dtype=torch.double) + 1
    found = cast_error(tensor, precision)
    assert found.relative_frobenius <= precision.unit_roundoff
    assert (found.relative_frobenius == 0) == (precision is Precision.FP64)
    assert (found.per_head <= precision.unit_roundoff).all()


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.FP8_E4M3, Precision.FP8_E5M2])
def test_what_a_format_cannot_hold_counts_as_infinitely_wrong(precision: Precision) -> None:
    tensor = torch.tensor([[[1.0, 2.0]], [[1.0, 1e6]]])
    found = cast_error(tensor, precision)
    assert found.max_abs == math.inf
    assert found.per_head.tolist() == [0, math.inf]
    assert dynamic_range(tensor).fits(precision).tolist() == [True, False]
    assert dynamic_range(tensor).fits(Precision.BF16).all()


def test_dynamic_range_leaves_zeros_out() -> None:
    tensor = torch.tensor([[[0.0, 8.0]], [[-0.25, 4.0]], [[0.0, 0.0]]])
    found = dynamic_range(tensor)
    assert found.max_abs.tolist() == [8, 4, 0]
    assert found.min_abs.tolist() == [8, 0.25, 0]
    assert found.bits.tolist() == [0, 4, 0]
    assert dynamic_range(torch.zeros(2, 0, 3)).bits.tolist() == [0, 0]


def test_smoothing_keys_changes_scores_by_one_number_a_row() -> None:
    query = torch.randn(2, 3, 5, 8, dtype=torch.double)
    key = torch.randn(2, 3, 9, 8, dtype=torch.double) + 20
    smooth, mean = smooth_keys(key)
    scores = query @ key.mT
    rebuilt = query @ smooth.mT + query @ mean.mT
    assert_matches(rebuilt, scores, scores, summands=64)
    before, after = scores.softmax(-1), (query @ smooth.mT).softmax(-1)
    band = 64 * torch.finfo(torch.double).eps * scores.abs().max()
    assert (before - after).abs().max() <= band
    raw, smoothed = (
        quantization_error(k, quantize(k, Precision.INT8)).max_abs for k in (key, smooth)
    )
    assert smoothed < raw / 4
    assert smooth_keys(torch.zeros(2, 0, 3))[0].shape == (2, 0, 3)
    assert smooth_keys(key.half())[0].dtype == torch.half
    assert smooth_keys(key.half())[1].dtype == torch.float


@pytest.mark.parametrize("dim", [1, 2, 8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_hadamard_rotation_is_the_product_with_sylvesters_matrix(
    dim: int, dtype: torch.dtype
) -> None:
    matrix = torch.ones(1, 1, dtype=torch.double)
    while len(matrix) < dim:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.double), matrix)
    matrix = matrix / math.sqrt(dim)
    tensor = torch.randn(2, 3, 5, dim).to(dtype)
    exact = tensor.double() @ matrix
    wide = torch.promote_types(dtype, torch.float32)
    eager = (tensor.to(wide) @ matrix.to(wide)).to(dtype)
    assert_matches(hadamard_rotate(tensor), exact, eager, summands=dim)
    assert_matches(hadamard_rotate(exact), tensor.double(), tensor.double(), summands=dim)


def test_hadamard_rotation_keeps_scores_and_spreads_outliers() -> None:
    query, key = torch.randn(2, 1, 7, 64).double()
    key[:, 3] += 50
    scores = query @ key.mT
    rotated = hadamard_rotate(query) @ hadamard_rotate(key).mT
    assert_matches(rotated, scores, scores, summands=64 * 64)
    spiky = torch.randn(4, 64) + 50 * torch.eye(64)[:4]
    raw, spread = (
        quantization_error(x, quantize(x, Precision.INT8)).relative_frobenius
        for x in (spiky, hadamard_rotate(spiky))
    )
    assert spread < raw


def test_smoothing_and_rotation_have_the_right_gradient() -> None:
    tensor = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(hadamard_rotate, tensor)
    assert torch.autograd.gradcheck(lambda k: smooth_keys(k)[0], tensor)


def test_unchecked_nan_spoils_only_its_own_group() -> None:
    tensor = torch.ones(3, 4)
    tensor[1, 2] = torch.nan
    rebuilt = quantize(tensor, Precision.FP8_E4M3, check_finite=False).dequantize()
    assert rebuilt[1].isnan().all()
    assert torch.equal(rebuilt[[0, 2]], torch.ones(2, 4))


def test_bad_arguments_are_refused_with_a_sentence() -> None:
    tensor = torch.ones(3, 4)
    with pytest.raises(ArgumentError, match=r"precision: expected one of fp8_e4m3, .* got bf16"):
        quantize(tensor, Precision.BF16)
    with pytest.raises(ArgumentError, match="scheme: expected SYMMETRIC for fp8_e4m3, got ASYMM"):
        quantize(tensor, Precision.FP8_E4M3, scheme=Scheme.ASYMMETRIC)
    with pytest.raises(ArgumentError, match="group_size: expected an integer of at least 1, got 0"):
        quantize(tensor, Precision.INT8, Granularity.CHANNEL_GROUP, group_size=0)
    with pytest.raises(ArgumentError, match=r"precision: expected one of fp64, .* got int8"):
        cast_error(tensor, Precision.INT8)
    with pytest.raises(NonFiniteError, match="tensor: expected finite elements, got 1 NaN"):
        quantize(torch.tensor([[1.0, torch.inf]]), Precision.INT8)
    with pytest.raises(ShapeError, match="tensor: expected a tensor of at least 2 dimensions"):
        quantize(tensor[0], Precision.INT8)
    with pytest.raises(DTypeError, match="dtype of tensor: expected float64"):
        quantize(tensor.int(), Precision.INT8)
    with pytest.raises(ShapeError, match="last dimension: expected a power of two, got 12; pad"):
        hadamard_rotate(torch.ones(2, 12))
    with pytest.raises(ShapeError, match="last dimension of packed: expected 2 bytes for 3"):
        unpack_int4(torch.zeros(1, 1, dtype=torch.uint8), 3)
    with pytest.raises(ShapeError, match="expected 1 byte for 2 codes, got 2"):
        unpack_int4(torch.zeros(1, 2, dtype=torch.uint8), 2)
    with pytest.raises(ShapeError, match=r"tensor: expected shape \(3, 4\), got \(4, 3\)"):
        quantization_error(tensor.T, quantize(tensor, Precision.INT8))
