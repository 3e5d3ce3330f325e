"""Quantise, dequantise, and measure what a number format costs.

Formats: fp8 e4m3 and e5m2, int8, and int4 packed two to a byte. A value is rebuilt as
``code * scale``, or ``code * scale + zero_point`` when asymmetric. Scales are float32
(float64 for float64 input). `smooth_keys` and `hadamard_rotate` change what is quantised
without changing attention.

Not covered: stochastic rounding, and microscaling formats whose scales are powers of two.
"""

from dataclasses import dataclass
from typing import Any

import torch

from adaattn._dtypes import torch_dtype
from adaattn._numbers import require_integer
from adaattn.errors import ArgumentError, ShapeError
from adaattn.linalg._checks import accumulation_dtype, require_finite, require_matrix
from adaattn.linalg._codes import (
    FP8,
    INTEGERS,
    Granularity,
    Scheme,
    encode,
    fit_groups,
    pack_int4,
    spread_groups,
    unpack_int4,
)
from adaattn.linalg.invariances import hadamard_rotate, smooth_keys
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

_FLOATS = (Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16, *FP8)


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
        if self.precision in FP8:
            info = torch.finfo(torch_dtype(self.precision))
            half_subnormal = info.smallest_normal * info.eps / 2
            half_step = (codes * self.precision.unit_roundoff).clamp_min(half_subnormal)
        else:
            half_step = torch.full_like(codes, 0.5)
        magnitude = codes * scale
        if self.zero_point is not None:
            magnitude = magnitude + self._spread(self.zero_point).abs()
        # Division, product and sum each round once; fp8 casts go through float32.
        dtype = torch.float32 if self.precision in FP8 else self.scale.dtype
        return half_step * scale + 4 * torch.finfo(dtype).eps * (magnitude + half_step * scale)

    def _spread(self, per_group: torch.Tensor) -> torch.Tensor:
        """Return a tensor of one entry per group so that it broadcasts with the codes."""
        return spread_groups(per_group, self.granularity, self.group_size, self.shape[-2])


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
        return torch.where(none, 0.0, self.max_abs.log2() - self.min_abs.log2())

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
    _require_one_of(precision, (*FP8, *INTEGERS))
    granularity, scheme = Granularity(granularity), Scheme(scheme)
    require_integer("group_size", group_size, least=1)
    if scheme is Scheme.ASYMMETRIC and precision not in INTEGERS:
        raise ArgumentError.got(
            "scheme", f"SYMMETRIC for {precision.label}", scheme.name, "use int8"
        )
    if check_finite:
        require_finite(tensor, "tensor")
    values = tensor.detach().to(accumulation_dtype(tensor.dtype))
    scale, zero_point = fit_groups(values, precision, granularity, group_size, scheme)
    return Quantized(
        data=encode(values, scale, zero_point, precision, granularity, group_size),
        scale=scale,
        zero_point=zero_point,
        precision=precision,
        granularity=granularity,
        group_size=group_size,
        shape=tensor.shape,
        dtype=tensor.dtype,
    )


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
    rounded: torch.Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
        tensor, stored.dequantize()
    )
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
        raise ShapeError.got("tensor", f"shape {tuple(quantized.shape)}", tuple(tensor.shape))
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
        raise ArgumentError.got("precision", expected, precision.label)


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
