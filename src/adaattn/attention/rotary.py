"""Rotary position embedding: queries and keys turned by angles that grow with their position.

    from adaattn.attention.rotary import RotaryConfig, RotaryEmbedding

Pair i of R rotated dimensions turns by position * f_i, with f_i = base ** (-2 i / R), so that a
dot product depends on the difference of two positions only (RoFormer,
https://arxiv.org/abs/2104.09864). `RotaryScaling` stretches the f_i to longer contexts.

Frequencies are float32 and rounded as Transformers rounds them, bit for bit, so that converted
weights meet the angles of their training. Angles, cosines and sines are float32 (float64 for
float64 tensors) whatever the module was cast to; the products too, before they are rounded to the
input's dtype. Not covered: LongRoPE, and positions of several axes (images, video).
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from adaattn._dtypes import precision_of
from adaattn.attention.rotary_config import RotaryConfig, RotaryScaling, grown_frequencies
from adaattn.errors import ArgumentTypeError, DeviceError, DTypeError, ShapeError

__all__ = ["RotaryConfig", "RotaryEmbedding", "RotaryScaling"]


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions. No parameters, nothing in ``state_dict``.

    With DYNAMIC_NTK the base follows the longest position of the call, over its whole batch, and
    keeps no memory of calls before; Transformers keeps the longest until a short call. Keys that
    a cache holds stay rotated as they were, there and here.

    Args:
        config: what is computed.

    Example:
        >>> rotary = RotaryEmbedding(RotaryConfig(head_dim=64))
        >>> query, key = torch.randn(1, 4, 10, 64), torch.randn(1, 2, 10, 64)
        >>> turned, _ = rotary(query, key, torch.arange(10))
        >>> torch.equal(turned[:, :, 0], query[:, :, 0])
        True
    """

    inverse_frequencies: torch.Tensor

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        if not isinstance(config, RotaryConfig):
            raise ArgumentTypeError.got("config", "a RotaryConfig", repr(config))
        self.config = config
        self.register_buffer("inverse_frequencies", config.inverse_frequencies(), persistent=False)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (query, key), rotated, in their shapes and dtypes.

        Args:
            query: [B, Hq, L, D].
            key: [B, Hkv, L, D].
            positions: [L], [1, L] or [B, L] int64; negative ones are allowed.

        Raises:
            ShapeError, DTypeError, DeviceError: the tensors do not fit each other or the config.
        """
        for name, tensor in (("query", query), ("key", key)):
            self._check(name, tensor, positions)
        dtype = torch.promote_types(query.dtype, key.dtype)
        tables = self.tables(positions, dtype=torch.promote_types(dtype, torch.float32))
        return self.rotate(query, tables), self.rotate(key, tables)

    def tables(
        self, positions: torch.Tensor, *, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cosines, sines), each [1 or B, 1, L, R / 2], times the config's amplitude.

        A model may compute them once and `rotate` in each of its layers.

        Args:
            positions: [L], [1, L] or [B, L] integers.
            dtype: float32 or float64, of the angles too.

        Raises:
            DTypeError: positions that are no integers; a table below float32.
            ShapeError: positions of another rank.
        """
        if positions.dtype not in (torch.int64, torch.int32):
            hint = "low precision has no number for most positions"
            raise DTypeError.got("positions", "int64", positions.dtype, hint)
        if positions.ndim not in (1, 2):
            expected = "[L], [1, L] or [B, L]"
            raise ShapeError.got("positions", expected, tuple(positions.shape))
        if dtype not in (torch.float32, torch.float64):
            raise DTypeError.got("dtype", "float32 or float64", dtype)
        rows = positions if positions.ndim == 2 else positions[None]
        angles = rows[:, None, :, None].to(dtype) * self._frequencies(positions).to(dtype)
        cos, sin, amplitude = angles.cos(), angles.sin(), self.config.amplitude
        return (cos, sin) if amplitude == 1.0 else (cos * amplitude, sin * amplitude)

    def rotate(
        self, tensor: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return the tensor rotated, in its shape and dtype.

        Args:
            tensor: [B, H, L, D].
            tables: what `tables` returned.
        """
        rotated_dim = self.config.rotated_dim
        cos, sin = tables
        turning = tensor[..., :rotated_dim].to(cos.dtype)
        if self.config.interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        else:
            first, second = turning.chunk(2, dim=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        turned = (
            torch.stack(pair, -1).flatten(-2) if self.config.interleaved else torch.cat(pair, -1)
        )
        turned = turned.to(tensor.dtype)
        if rotated_dim == tensor.shape[-1]:
            return turned
        return torch.cat((turned, tensor[..., rotated_dim:]), dim=-1)

    def extra_repr(self) -> str:
        """Return the config's values that differ from their defaults."""
        given = ((f.name, getattr(self.config, f.name), f.default) for f in fields(self.config))
        return ", ".join(f"{name}={value}" for name, value, default in given if value != default)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "RotaryEmbedding":
        """Follow a move to another device; undo a cast, and fill what to_empty() left open."""
        nn.Module._apply(self, fn, recurse)
        device = self.inverse_frequencies.device
        self.inverse_frequencies = self.config.inverse_frequencies().to(device)
        return self

    def _frequencies(self, positions: torch.Tensor) -> torch.Tensor:
        """Return f_i on the device of the positions, from the longest of them if dynamic."""
        static = self.inverse_frequencies
        if static.device != positions.device:
            # Weights were assigned on a device that the module itself was never moved to.
            static = self.config.inverse_frequencies().to(positions.device)
            if not torch.compiler.is_compiling():
                self.inverse_frequencies = static
        if self.config.scaling is not RotaryScaling.DYNAMIC_NTK or not positions.numel():
            return static
        length = positions.max() + 1
        return torch.where(
            length > self.config.max_positions, grown_frequencies(self.config, length), static
        )

    def _check(self, name: str, tensor: torch.Tensor, positions: torch.Tensor) -> None:
        """Refuse a tensor that does not fit the config or the positions."""
        precision_of(tensor.dtype, subject=name)
        shape = tuple(tensor.shape)
        if len(shape) != 4 or shape[-1] != self.config.head_dim:
            expected = f"[B, H, L, {self.config.head_dim}]"
            raise ShapeError.got(name, expected, shape)
        if positions.ndim in (1, 2) and (
            positions.shape[-1] != shape[2]
            or (positions.ndim == 2 and positions.shape[0] not in (1, shape[0]))
        ):
            expected = f"[L], [1, L] or [B, L] for a {name} of shape {shape}"
            raise ShapeError.got("positions", expected, tuple(positions.shape))
        if tensor.device != positions.device:
            raise DeviceError.got("positions", f"on {tensor.device}", positions.device)
