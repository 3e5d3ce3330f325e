"""Quantise, dequantise, and measure what a number format costs.

Formats: fp8 e4m3 and e5m2, int8, and int4 packed two to a byte. A value is rebuilt as
``code * scale``, or ``code * scale + zero_point`` when asymmetric. Scales are float32
(float64 for float64 input). `smooth_keys` and `hadamard_rotate` change what is quantised
without changing attention.

Not covered: stochastic rounding, and microscaling formats whose scales are powers of two.
"""

import enum
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from adaattn._dtypes import precision_of, torch_dtype
from adaattn.errors import ArgumentError, ShapeError, expected_got
from adaattn.linalg._checks import accumulation_dtype, require_finite, require_matrix
from adaattn.spec import Precision

__all__ = [
    "DynamicRange",
    "Granularity",
    "QuantizationError",
    "Quantized",
    "Scheme",
    "cast_error",
    "dequantize",
    "dynamic_range",
    "fake_quantize",
    "hadamard_rotate",
    "pack_int4",
    "quantization_error",
    "quantize",
    "smooth_keys",
    "unpack_int4",
]

_FP8 = (Precision.FP8_E4M3, Precision.FP8_E5M2)
_INTEGERS = (Precision.INT8, Precision.INT4)
_FLOATS = (Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16, *_FP8)


class Granularity(enum.IntEnum):
    """Which elements of ``[..., S, D]`` share a scale."""

    TENSOR = 0
    HEAD = 1
    """The last two dimensions."""
    TOKEN = 2
    """The last dimension."""
    CHANNEL_GROUP = 3
    """Each channel over ``group_size`` tokens; the last group has the rest."""


class Scheme(enum.IntEnum):
    """Whether zero is code 0, or the codes span the smallest to the largest element."""

    SYMMETRIC = 0
    ASYMMETRIC = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """A tensor in a narrow format.

    Args:
        data: codes: float8 or int8 [..., S, D], or uint8 [..., S, ceil(D / 2)] for int4.
        scale: one for each group, with as many dimensions as the tensor; sizes 1 where shared,
            [..., groups, D] for channel groups.
        zero_point: value of code 0, in units of the tensor, shaped as ``scale``; None when
            symmetric.
        precision: the format.
        granularity: what shares a scale.
        group_size: tokens in a channel group.
        shape: of the tensor.
        dtype: of the tensor.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    precision: Precision
    granularity: Granularity
    group_size: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Storage of the codes, scales and zero points."""
        parts = (self.data, self.scale, self.zero_point)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def codes(self) -> torch.Tensor:
        """Return the codes as numbers, [..., S, D] in the dtype of the scale."""
        is_packed = self.precision is Precision.INT4
        data = unpack_int4(self.data, self.shape[-1]) if is_packed else self.data
        return data.to(self.scale.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor that the codes stand for, in its own dtype unless told otherwise."""
        values = self.codes() * self._spread(self.scale)
        if self.zero_point is not None:
            values = values + self._spread(self.zero_point)
        return values.to(self.dtype if dtype is None else dtype)

    def error_bound(self) -> torch.Tensor:
        """Return the most each element can be off, before the cast to the tensor's own dtype.

        Half a step of the format at that element, and the rounding of the arithmetic.
        """
        scale, codes = self._spread(self.scale), self.codes().abs()
        if self.precision in _FP8:
            info = torch.finfo(torch_dtype(self.precision))
            half_subnormal = info.smallest_normal * info.eps / 2
            half_step = (codes * self.precision.unit_roundoff).clamp_min(half_subnormal)
        else:
            half_step = torch.full_like(codes, 0.5)
        magnitude = codes * scale
        if self.zero_point is not None:
            magnitude = magnitude + self._spread(self.zero_point).abs()
        # Division, product and sum each round once; fp8 casts go through float32.
        dtype = torch.float32 if self.precision in _FP8 else self.scale.dtype
        return half_step * scale + 4 * torch.finfo(dtype).eps * (magnitude + half_step * scale)

    def _spread(self, per_group: torch.Tensor) -> torch.Tensor:
        """Return a tensor of one entry per group so that it broadcasts with the codes."""
        return _spread(per_group, self.granularity, self.group_size, self.shape[-2])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizationError:
    """How far a rounded tensor is from the original.

    Args:
        relative_frobenius: scalar, ``||x - x'||_F / ||x||_F``; 0 where nothing changed.
        max_abs: scalar, largest absolute difference.
        per_head: [...], the relative Frobenius error over the last two dimensions.
    """

    relative_frobenius: torch.Tensor
    max_abs: torch.Tensor
    per_head: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamicRange:
    """How large and how small the elements of each head are.

    Args:
        max_abs: [...], largest magnitude; 0 for empty heads.
        min_abs: [...], smallest magnitude that is not zero; 0 when all are.
    """

    max_abs: torch.Tensor
    min_abs: torch.Tensor

    @property
    def bits(self) -> torch.Tensor:
        """log2 of largest over smallest magnitude, [...]; 0 for heads of zeros."""
        none = self.min_abs == 0.0
        return self.max_abs.log2().masked_fill(none, 0.0) - self.min_abs.log2().masked_fill(
            none, 0.0
        )

    def fits(self, precision: Precision) -> torch.Tensor:
        """Return where a plain cast to a floating-point format does not overflow, [...] bool."""
        _require_one_of(precision, _FLOATS)
        return self.max_abs <= torch.finfo(torch_dtype(precision)).max


def quantize(
    tensor: torch.Tensor,
    precision: Precision,
    granularity: Granularity = Granularity.TOKEN,
    *,
    group_size: int = 128,
    scheme: Scheme = Scheme.SYMMETRIC,
    check_finite: bool = True,
) -> Quantized:
    """Return the tensor in a narrow format, each group scaled to the format's full range.

    Every element is rebuilt to within `Quantized.error_bound`, which is half a step. No
    gradient passes; `fake_quantize` is for training.

    Args:
        tensor: [..., S, D], floating point, any strides.
        precision: FP8_E4M3, FP8_E5M2, INT8 or INT4.
        granularity: what shares a scale.
        group_size: tokens in a channel group; other granularities ignore it.
        scheme: ASYMMETRIC is for integers; it halves the step where all elements of a group
            have one sign.
        check_finite: refuse NaN and infinity, which costs one read from the device. Without
            it they spoil the groups that they are in.

    Raises:
        ShapeError: fewer than two dimensions.
        DTypeError: the dtype is not floating point.
        ArgumentError: the format, scheme or group size cannot be used.
        NonFiniteError: an element is NaN or infinite.

    Example:
        >>> import torch
        >>> keys = torch.linspace(-1, 1, 12).reshape(1, 1, 3, 4)
        >>> stored = quantize(keys, Precision.INT8)
        >>> bool(((stored.dequantize() - keys).abs() <= stored.error_bound()).all())
        True
    """
    require_matrix(tensor, "tensor")
    _require_one_of(precision, (*_FP8, *_INTEGERS))
    granularity, scheme = Granularity(granularity), Scheme(scheme)
    if group_size < 1:
        raise ArgumentError(expected_got("group_size", "at least 1", group_size))
    if scheme is Scheme.ASYMMETRIC and precision not in _INTEGERS:
        raise ArgumentError(
            expected_got("scheme", f"SYMMETRIC for {precision.label}", scheme.name, "use int8")
        )
    if check_finite:
        require_finite(tensor, "tensor")
    values = tensor.detach().to(accumulation_dtype(tensor.dtype))
    scale, zero_point = _fit(values, precision, granularity, group_size, scheme)
    return Quantized(
        data=_encode(values, scale, zero_point, precision, granularity, group_size),
        scale=scale,
        zero_point=zero_point,
        precision=precision,
        granularity=granularity,
        group_size=group_size,
        shape=tensor.shape,
        dtype=tensor.dtype,
    )


def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor that the codes stand for, in its own dtype unless told otherwise."""
        values = self.codes() * self._spread(self.scale)
        if self.zero_point is not None:
            values = values + self._spread(self.zero_point)
        return values.to(self.dtype if dtype is None else dtype)

    def error_bound(self) -> torch.Tensor:
        """Return the most each element can be off, before the cast to the tensor's own dtype.

        Half a step of the format at that element, and the rounding of the arithmetic.
        """
        scale, codes = self._spread(self.scale), self.codes().abs()
        if self.precision in _FP8:
            info = torch.finfo(torch_dtype(self.precision))
            half_subnormal = info.smallest_normal * info.eps / 2
            half_step = (codes * self.precision.unit_roundoff).clamp_min(half_subnormal)
        else:
            half_step = torch.full_like(codes, 0.5)
        magnitude = codes * scale
        if self.zero_point is not None:
            magnitude = magnitude + self._spread(self.zero_point).abs()
        # Division, product and sum each round once; fp8 casts go through float32.
        dtype = torch.float32 if self.precision in _FP8 else self.scale.dtype
        return half_step * scale + 4 * torch.finfo(dtype).eps * (magnitude + half_step * scale)

    def _spread(self, per_group: torch.Tensor) -> torch.Tensor:
        """Return a tensor of one entry per group so that it broadcasts with the codes."""
        return _spread(per_group, self.granularity, self.group_size, self.shape[-2])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizationError:
    """How far a rounded tensor is from the original.

    Args:
        relative_frobenius: scalar, ``||x - x'||_F / ||x||_F``; 0 where nothing changed.
        max_abs: scalar, largest absolute difference.
        per_head: [...], the relative Frobenius error over the last two dimensions.
    """

    relative_frobenius: torch.Tensor
    max_abs: torch.Tensor
    per_head: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamicRange:
    """How large and how small the elements of each head are.

    Args:
        max_abs: [...], largest magnitude; 0 for empty heads.
        min_abs: [...], smallest magnitude that is not zero; 0 when all are.
    """

    max_abs: torch.Tensor
    min_abs: torch.Tensor

    @property
    def bits(self) -> torch.Tensor:
        """log2 of largest over smallest magnitude, [...]; 0 for heads of zeros."""
        none = self.min_abs == 0.0
        return self.max_abs.log2().masked_fill(none, 0.0) - self.min_abs.log2().masked_fill(
            none, 0.0
        )

    def fits(self, precision: Precision) -> torch.Tensor:
        """Return where a plain cast to a floating-point format does not overflow, [...] bool."""
        _require_one_of(precision, _FLOATS)
        return self.max_abs <= torch.finfo(torch_dtype(precision)).max


def quantize(
    tensor: torch.Tensor,
    precision: Precision,
    granularity: Granularity = Granularity.TOKEN,
    *,
    group_size: int = 128,
    scheme: Scheme = Scheme.SYMMETRIC,
    check_finite: bool = True,
) -> Quantized:
    """Return the tensor in a narrow format, each group scaled to the format's full range.

    Every element is rebuilt to within `Quantized.error_bound`, which is half a step. No
    gradient passes; `fake_quantize` is for training.

    Args:
        tensor: [..., S, D], floating point, any strides.
        precision: FP8_E4M3, FP8_E5M2, INT8 or INT4.
        granularity: what shares a scale.
        group_size: tokens in a channel group; other granularities ignore it.
        scheme: ASYMMETRIC is for integers; it halves the step where all elements of a group
            have one sign.
        check_finite: refuse NaN and infinity, which costs one read from the device. Without
            it they spoil the groups that they are in.

    Raises:
        ShapeError: fewer than two dimensions.
        DTypeError: the dtype is not floating point.
        ArgumentError: the format, scheme or group size cannot be used.
        NonFiniteError: an element is NaN or infinite.

    Example:
        >>> import torch
        >>> keys = torch.linspace(-1, 1, 12).reshape(1, 1, 3, 4)
        >>> stored = quantize(keys, Precision.INT8)
        >>> bool(((stored.dequantize() - keys).abs() <= stored.error_bound()).all())
        True
    """
    require_matrix(tensor, "tensor")
    _require_one_of(precision, (*_FP8, *_INTEGERS))
    granularity, scheme = Granularity(granularity), Scheme(scheme)
    if group_size < 1:
        raise ArgumentError(expected_got("group_size", "at least 1", group_size))
    if scheme is Scheme.ASYMMETRIC and precision not in _INTEGERS:
        raise ArgumentError(
            expected_got("scheme", f"SYMMETRIC for {precision.label}", scheme.name, "use int8")
        )
    if check_finite:
        require_finite(tensor, "tensor")
    values = tensor.detach().to(accumulation_dtype(tensor.dtype))
    scale, zero_point = _scale_and_zero(values, precision, granularity, group_size, scheme)
    parts = {"precision": precision, "granularity": granularity, "group_size": group_size}
    empty = Quantized(
        data=values,
        scale=scale,
        zero_point=zero_point,
        shape=tensor.shape,
        dtype=tensor.dtype,
        **parts,
    )
    return empty


def dequantize(quantized: Quantized, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the tensor that the codes stand for, in its own dtype unless told otherwise."""
    return quantized.dequantize(dtype)


def fake_quantize(
    tensor: torch.Tensor,
    precision: Precision,
    granularity: Granularity = Granularity.TOKEN,
    *,
    group_size: int = 128,
    scheme: Scheme = Scheme.SYMMETRIC,
    check_finite: bool = True,
) -> torch.Tensor:
    """Return the tensor after a round trip through a narrow format, with the gradient of identity.

    The straight-through estimator of Bengio, Leonard and Courville
    (https://arxiv.org/abs/1308.3432). Scales follow the tensor, so nothing is clipped and no
    gradient needs to be cut. Arguments and errors are those of `quantize`.
    """
    stored = quantize(
        tensor,
        precision,
        granularity,
        group_size=group_size,
        scheme=scheme,
        check_finite=check_finite,
    )
    rounded: torch.Tensor = _StraightThrough.apply(tensor, stored.dequantize())
    return rounded


def quantization_error(tensor: torch.Tensor, quantized: Quantized) -> QuantizationError:
    """Return the measured error of a quantised tensor against the original.

    Args:
        tensor: the original, [..., S, D].
        quantized: what `quantize` made of it.

    Raises:
        ShapeError: the shapes differ.
    """
    if tensor.shape != quantized.shape:
        raise ShapeError(
            expected_got("tensor", f"shape {tuple(quantized.shape)}", tuple(tensor.shape))
        )
    return _error(tensor, quantized.dequantize(quantized.scale.dtype))


def cast_error(tensor: torch.Tensor, precision: Precision) -> QuantizationError:
    """Return the measured error of a plain cast to a floating-point format, without a scale.

    Args:
        tensor: [..., S, D], floating point.
        precision: a floating-point format; what it cannot hold counts as infinitely wrong.

    Raises:
        ArgumentError: the format is an integer one.
    """
    require_matrix(tensor, "tensor")
    _require_one_of(precision, _FLOATS)
    dtype = torch_dtype(precision)
    # e4m3 has no infinity, and devices differ in saturating or giving NaN.
    overflow = tensor.detach().abs() > torch.finfo(dtype).max
    cast = tensor.detach().to(dtype).to(accumulation_dtype(tensor.dtype))
    return _error(tensor, cast.masked_fill(overflow, torch.inf))


def dynamic_range(tensor: torch.Tensor) -> DynamicRange:
    """Return the largest and the smallest nonzero magnitude of each head.

    Args:
        tensor: [..., S, D], floating point.
    """
    require_matrix(tensor, "tensor")
    size = tensor.detach().abs()
    if size.numel() == 0:
        zeros = size.new_zeros(size.shape[:-2])
        return DynamicRange(max_abs=zeros, min_abs=zeros)
    smallest = size.masked_fill(size == 0.0, torch.inf).amin((-2, -1))
    largest = size.amax((-2, -1))
    return DynamicRange(max_abs=largest, min_abs=smallest.masked_fill(largest == 0.0, 0.0))


def smooth_keys(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys without their mean, and the mean that was subtracted.

    Softmax does not see it: every score of query q falls by ``scale * q . mean``, which is
    also what a log-sum-exp must get back. Channel outliers, which most keys share, vanish
    (SageAttention, https://arxiv.org/abs/2410.02367).

    Args:
        key: [..., Sk, D].

    Returns:
        [..., Sk, D] in the dtype of the key, and [..., 1, D] in float32 (float64 for float64).
    """
    require_matrix(key, "key")
    mean = key.sum(-2, keepdim=True, dtype=accumulation_dtype(key.dtype)) / max(key.shape[-2], 1)
    return (key - mean).to(key.dtype), mean


def hadamard_rotate(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor times the orthonormal Hadamard matrix of its last dimension.

    ``(q H)(k H)^T = q k^T``, so scores stay, while an outlier in one channel is spread over
    all of them (QuaRot, https://arxiv.org/abs/2404.00456). It is its own inverse. Computed by
    the fast transform, D log2 D sums a row, in float32 (float64 for float64).

    Args:
        tensor: [..., D] with D a power of two.

    Raises:
        ShapeError: D is not a power of two.
    """
    precision_of(tensor.dtype, subject="tensor")
    dim = tensor.shape[-1] if tensor.ndim else 0
    if dim < 1 or dim & (dim - 1):
        hint = "pad the last dimension with zeros"
        raise ShapeError(expected_got("last dimension", "a power of two", dim, hint))
    values = tensor.to(accumulation_dtype(tensor.dtype))
    half = 1
    while half < dim:
        pairs = values.unflatten(-1, (dim // (2 * half), 2, half))
        low, high = pairs.unbind(-2)
        values = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return (values * dim**-0.5).to(tensor.dtype)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Return codes from -8 to 7 two to a byte: even positions in the low four bits.

    Args:
        codes: [..., D] integers; an odd D gets a zero at its end.

    Returns:
        uint8 [..., ceil(D / 2)].
    """
    nibbles = F.pad(codes.to(torch.int8), (0, codes.shape[-1] % 2)).view(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Return the int8 codes [..., size] that `pack_int4` packed.

    Raises:
        ShapeError: ``packed`` does not hold that many.
    """
    if packed.shape[-1] != -(-size // 2):
        expected = f"{-(-size // 2)} bytes for {size} codes"
        raise ShapeError(expected_got("last dimension of packed", expected, packed.shape[-1]))
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :size]
    # Moves the sign bit of four bits to that of eight.
    return (nibbles.to(torch.int8) ^ 8) - 8


class _StraightThrough(torch.autograd.Function):
    """Returns the second argument and gives its gradient to the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Keep nothing: the gradient is that of identity."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _require_one_of(precision: Precision, allowed: tuple[Precision, ...]) -> None:
    """Refuse formats that a function cannot handle."""
    if precision not in allowed:
        expected = "one of " + ", ".join(choice.label for choice in allowed)
        got = precision.label if isinstance(precision, Precision) else precision
        raise ArgumentError(expected_got("precision", expected, got))


def _fit(
    values: torch.Tensor,
    precision: Precision,
    granularity: Granularity,
    group_size: int,
    scheme: Scheme,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scale and zero point of each group; a group of zeros has scale 1."""
    # Smaller scales would make a code overflow, or divide by zero.
    tiny = torch.finfo(values.dtype).tiny
    if scheme is Scheme.SYMMETRIC:
        largest = _reduce(values.abs(), granularity, group_size)
        scale = (largest / _code_limits(precision, scheme)[1]).clamp_min(tiny)
        return torch.where(largest == 0.0, 1.0, scale), None
    low_code, high_code = _code_limits(precision, scheme)
    high = _reduce(values, granularity, group_size)
    low = -_reduce(-values, granularity, group_size)
    steps = high_code - low_code
    scale = (high / steps - low / steps).clamp_min(tiny)
    scale = torch.where(high == low, 1.0, scale)
    return scale, low - low_code * scale


def _code_limits(precision: Precision, scheme: Scheme) -> tuple[float, float]:
    """Return the smallest and the largest code."""
    if precision in _FP8:
        largest = torch.finfo(torch_dtype(precision)).max
        return -largest, largest
    top = 2 ** (precision.bits - 1)
    return (-top if scheme is Scheme.ASYMMETRIC else 1 - top), top - 1


def _reduce(values: torch.Tensor, granularity: Granularity, group_size: int) -> torch.Tensor:
    """Return the maximum of each group, in the shape of the scale; 0 for empty groups."""
    length = values.shape[-2]
    if granularity is Granularity.CHANNEL_GROUP:
        groups = -(-length // group_size)
        padding = (0, 0, 0, groups * group_size - length)
        padded = F.pad(values, padding, value=-torch.inf)
        return padded.unflatten(-2, (groups, group_size)).amax(-2)
    first = {Granularity.TENSOR: 0, Granularity.HEAD: -2, Granularity.TOKEN: -1}[granularity]
    dims = tuple(range(values.ndim))[first:]
    if all(values.shape[dim] for dim in dims):
        return values.amax(dims, keepdim=True)
    return values.sum(dims, keepdim=True)


def _spread(
    per_group: torch.Tensor, granularity: Granularity, group_size: int, length: int
) -> torch.Tensor:
    """Return one entry per group so that it broadcasts with [..., length, D]."""
    if granularity is not Granularity.CHANNEL_GROUP:
        return per_group
    return per_group.repeat_interleave(group_size, dim=-2)[..., :length, :]


def _encode(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    precision: Precision,
    granularity: Granularity,
    group_size: int,
) -> torch.Tensor:
    """Return the codes in the dtype that stores them."""
    length = values.shape[-2]
    scheme = Scheme.SYMMETRIC if zero_point is None else Scheme.ASYMMETRIC
    if zero_point is not None:
        values = values - _spread(zero_point, granularity, group_size, length)
    codes = values / _spread(scale, granularity, group_size, length)
    low, high = _code_limits(precision, scheme)
    if precision in _FP8:
        return codes.clamp(low, high).float().to(torch_dtype(precision))
    codes = codes.round().clamp(low, high).to(torch.int8)
    return pack_int4(codes) if precision is Precision.INT4 else codes


def _error(tensor: torch.Tensor, rounded: torch.Tensor) -> QuantizationError:
    """Return the error of ``rounded``, with sums of squares in float64."""
    exact = tensor.detach().double()
    difference = exact - rounded.double()
    largest = difference.abs().amax() if difference.numel() else difference.sum()
    return QuantizationError(
        relative_frobenius=_ratio(difference, exact, tuple(range(exact.ndim))),
        max_abs=largest,
        per_head=_ratio(difference, exact, (-2, -1)),
    )


def _ratio(part: torch.Tensor, whole: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the ratio of two norms over some dimensions; 0 where the first is 0."""
    size = torch.linalg.vector_norm(part, dim=dims)
    return torch.where(size == 0.0, 0.0, size / torch.linalg.vector_norm(whole, dim=dims))
