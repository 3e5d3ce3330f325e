"""Codes of the narrow formats: their limits, which elements share a scale, how they are stored."""

import enum

import torch
import torch.nn.functional as F

from adaattn._dtypes import torch_dtype
from adaattn.errors import ShapeError
from adaattn.spec import Precision

FP8 = (Precision.FP8_E4M3, Precision.FP8_E5M2)
INTEGERS = (Precision.INT8, Precision.INT4)


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


def fit_groups(
    values: torch.Tensor,
    precision: Precision,
    granularity: Granularity,
    group_size: int,
    scheme: Scheme,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scale and zero point of each group; scale is never 0."""
    # A smaller scale would be subnormal and lose digits, or divide by zero.
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
    return scale, low - low_code * scale


def _code_limits(precision: Precision, scheme: Scheme) -> tuple[float, float]:
    """Return the smallest and the largest code."""
    if precision in FP8:
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
        shape = (*values.shape[:-2], groups, group_size, values.shape[-1])
        return padded.reshape(shape).amax(-2)
    first = {Granularity.TENSOR: 0, Granularity.HEAD: -2, Granularity.TOKEN: -1}[granularity]
    dims = tuple(range(values.ndim))[first:]
    if all(values.shape[dim] for dim in dims):
        return values.amax(dims, keepdim=True)
    return values.sum(dims, keepdim=True)


def spread_groups(
    per_group: torch.Tensor, granularity: Granularity, group_size: int, length: int
) -> torch.Tensor:
    """Return one entry per group so that it broadcasts with [..., length, D]."""
    if granularity is not Granularity.CHANNEL_GROUP:
        return per_group
    return per_group.repeat_interleave(group_size, dim=-2)[..., :length, :]


def encode(
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
        values = values - spread_groups(zero_point, granularity, group_size, length)
    codes = values / spread_groups(scale, granularity, group_size, length)
    low, high = _code_limits(precision, scheme)
    if precision in FP8:
        return codes.clamp(low, high).float().to(torch_dtype(precision))
    codes = codes.round().clamp(low, high).to(torch.int8)
    return pack_int4(codes) if precision is Precision.INT4 else codes


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
        count = -(-size // 2)
        expected = f"{count} {'byte' if count == 1 else 'bytes'} for {size} codes"
        raise ShapeError.got("last dimension of packed", expected, packed.shape[-1])
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :size]
    # Moves the sign bit of four bits to that of eight.
    return (nibbles.to(torch.int8) ^ 8) - 8
