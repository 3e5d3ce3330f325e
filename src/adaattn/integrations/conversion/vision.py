"""Adapters for attention of torchvision and timm that writes its scores out.

Windows of Swin transformers (Liu et al. 2021, 2022) and the grids of MaxViT (Tu et al. 2022) add
a learnt bias by relative position to the scores, and Swin a mask where a shifted window holds
what was not side by side. Shapes: x [..., tokens, C] in, the same out; nW windows of N tokens.
"""

import math
from typing import Any, Final

import torch
from torch.nn import functional

from adaattn.integrations.conversion.change import Attend
from adaattn.integrations.conversion.first_calls import Adapter

__all__ = ["known_adapter"]

_APART: Final = -100.0
"""Added to scores of tokens that were not side by side, as the models were trained."""

_LOGIT_LIMIT: Final = math.log(100.0)


def known_adapter(cls: type) -> Adapter | None:
    """Return the adapter of a class of torchvision or timm, or None.

    Args:
        cls: the class itself; classes derived from it are others.
    """
    return _ADAPTERS.get((cls.__module__, cls.__qualname__))


def _attend_in_windows(
    attend: Attend,
    qkv: torch.Tensor,
    bias: torch.Tensor,
    apart: torch.Tensor | None,
    dropout: float,
    logit_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [B*nW, N, H*D] of attention inside windows.

    Args:
        attend: attention.
        qkv: [3, B*nW, H, N, D].
        bias: [1, H, N, N], added to the scores.
        apart: [nW, N, N], added too, or None.
        dropout: probability of dropping a weight.
        logit_scale: [H, 1, 1] logarithm of the scale of cosine similarities; None for dot products.
    """
    query, key, value = qkv.unbind(0)
    scale = None
    if logit_scale is not None:
        factor = logit_scale.clamp(max=_LOGIT_LIMIT).exp()
        query = functional.normalize(query, dim=-1) * factor
        key = functional.normalize(key, dim=-1)
        query, key = query.to(value.dtype), key.to(value.dtype)
        scale = 1.0
    bias = bias.to(value.dtype)
    if apart is None:
        found = attend(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale)
    else:
        mask = bias + apart.to(bias.dtype).unsqueeze(1)  # [nW, H, N, N], the same for all images
        shape = (-1, apart.shape[0], *query.shape[1:])
        query, key, value = (tensor.reshape(shape) for tensor in (query, key, value))
        found = attend(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
        found = found.flatten(0, 1)
    return found.transpose(1, 2).flatten(2)


def _torchvision_swin(module: Any, attend: Attend, x: torch.Tensor) -> torch.Tensor:
    """Return what ``ShiftedWindowAttention`` and its V2 return, [B, H, W, C]."""
    _, height, width, channels = x.shape
    rows, columns = module.window_size
    padded = functional.pad(x, (0, 0, 0, -width % columns, 0, -height % rows))
    size = (padded.shape[1], padded.shape[2])
    shift = [
        0 if window >= length else int(by)
        for window, length, by in zip(module.window_size, size, module.shift_size, strict=True)
    ]
    if any(shift):
        padded = padded.roll((-shift[0], -shift[1]), dims=(1, 2))
    grid = padded.unflatten(2, (-1, columns)).unflatten(1, (-1, rows)).transpose(2, 3)
    tokens = grid.reshape(-1, rows * columns, channels)

    logit_scale = getattr(module, "logit_scale", None)
    weight_bias = module.qkv.bias
    if logit_scale is not None and weight_bias is not None:
        query_bias, key_bias, value_bias = weight_bias.chunk(3)
        weight_bias = torch.cat((query_bias, torch.zeros_like(key_bias), value_bias))
    qkv = functional.linear(tokens, module.qkv.weight, weight_bias)
    qkv = qkv.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    apart = _apart(size, (rows, columns), shift, x.device) if any(shift) else None
    dropout = module.attention_dropout if module.training else 0.0
    bias = module.get_relative_position_bias()
    found = _attend_in_windows(attend, qkv, bias, apart, dropout, logit_scale)
    found = functional.dropout(module.proj(found), module.dropout, module.training)

    grid = found.reshape(grid.shape).transpose(2, 3)
    whole = grid.flatten(3, 4).flatten(1, 2)
    if any(shift):
        whole = whole.roll((shift[0], shift[1]), dims=(1, 2))
    return whole[:, :height, :width].contiguous()


def _apart(
    size: tuple[int, int], window: tuple[int, int], shift: list[int], device: torch.device
) -> torch.Tensor:
    """Return [nW, N, N], `_APART` between tokens of a window that the shift brought together."""
    parts = []
    for length, step, by in zip(size, window, shift, strict=True):
        position = torch.arange(length, device=device)
        wrapped = (position >= length - by) if by else torch.zeros_like(position, dtype=torch.bool)
        parts.append(wrapped.long().unflatten(0, (-1, step)))
    down, across = parts
    place = 2 * down[:, None, :, None] + across[None, :, None, :]
    place = place.flatten(0, 1).flatten(1, 2)
    differs: torch.Tensor = place.unsqueeze(1) != place.unsqueeze(2)
    return _APART * differs


def _torchvision_maxvit(module: Any, attend: Attend, x: torch.Tensor) -> torch.Tensor:
    """Return what ``RelativePositionalMultiHeadAttention`` returns, [B, G, P, C]."""
    qkv = module.to_qkv(x).unflatten(-1, (3, module.n_heads, -1))
    query, key, value = qkv.movedim(-3, 0).transpose(-3, -2)
    bias = module.get_relative_positional_bias().to(value.dtype)
    found = attend(query, key, value, attn_mask=bias, scale=module.scale_factor)
    merged: torch.Tensor = module.merge(found.transpose(-3, -2).flatten(-2))
    return merged


def _timm_swin(
    module: Any, attend: Attend, x: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what timm's ``WindowAttention`` of Swin returns, [B*nW, N, C]."""
    qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    dropout = module.attn_drop.p if module.training else 0.0
    found = _attend_in_windows(attend, qkv, module._get_rel_pos_bias(), mask, dropout)
    projected: torch.Tensor = module.proj_drop(module.proj(found))
    return projected


def _timm_swin_v2(
    module: Any, attend: Attend, x: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what timm's ``WindowAttention`` of Swin V2 returns, [B*nW, N, C]."""
    weight_bias = None
    if module.q_bias is not None:
        weight_bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    qkv = functional.linear(x, module.qkv.weight, weight_bias)
    qkv = qkv.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    table = module.cpb_mlp(module.relative_coords_table).view(-1, module.num_heads)
    index = module.relative_position_index
    bias = 16 * torch.sigmoid(table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1))
    dropout = module.attn_drop.p if module.training else 0.0
    scale = module.logit_scale
    found = _attend_in_windows(attend, qkv, bias.unsqueeze(0), mask, dropout, scale)
    projected: torch.Tensor = module.proj_drop(module.proj(found))
    return projected


_ADAPTERS: Final[dict[tuple[str, str], Adapter]] = {
    ("timm.models.swin_transformer", "WindowAttention"): _timm_swin,
    ("timm.models.swin_transformer_v2", "WindowAttention"): _timm_swin_v2,
    ("torchvision.models.maxvit", "RelativePositionalMultiHeadAttention"): _torchvision_maxvit,
    ("torchvision.models.swin_transformer", "ShiftedWindowAttention"): _torchvision_swin,
    ("torchvision.models.swin_transformer", "ShiftedWindowAttentionV2"): _torchvision_swin,
}
