"""Rows of attention scores: checks, sampling of rows, pooling of tokens.

Shape legend as in `adaattn.spec`.
"""

import math

import torch
import torch.nn.functional as F

from adaattn._dtypes import precision_of
from adaattn.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from adaattn.linalg._checks import accumulation_dtype, seeded_generator


def check_query_key(query: torch.Tensor, key: torch.Tensor) -> None:
    """Refuse shapes, dtypes and devices that do not fit one another."""
    for name, tensor in (("query", query), ("key", key)):
        precision_of(tensor.dtype, subject=name)
        if tensor.ndim != 4:
            raise ShapeError.got(name, "[B, H, S, D]", tuple(tensor.shape))
    if query.dtype != key.dtype:
        raise DTypeError.got("dtype of key", query.dtype, key.dtype)
    if query.device != key.device:
        raise DeviceError.got("device of key", query.device, key.device)
    batch, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    if key.shape[0] != batch or key.shape[-1] != dim or (heads % kv_heads if kv_heads else heads):
        expected = f"[{batch}, a divisor of {heads}, Sk, {dim}]"
        raise ShapeError.got("key", expected, tuple(key.shape))


def broadcast_mask(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Return the mask expanded to [B, Hq, Sq, Sk], a view."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DTypeError.got("dtype of mask", "bool or floating point", mask.dtype)
    shape = (*query.shape[:3], key.shape[-2])
    try:
        return mask.expand(shape)
    except RuntimeError as error:
        raise ShapeError.got("mask", f"broadcastable to {shape}", tuple(mask.shape)) from error


def scale_or_default(scale: float | None, query: torch.Tensor) -> float:
    """Return the scale, checked, or 1/sqrt(D)."""
    if scale is None:
        return 1.0 / math.sqrt(max(query.shape[-1], 1))
    if not math.isfinite(scale):
        raise ArgumentError.got("scale", "a finite number", scale)
    return scale


def pick_rows(
    num_rows: int, wanted: int, generator: torch.Generator | None, device: torch.device
) -> torch.Tensor:
    """Return sorted row indices, drawn without replacement; all of them when few."""
    if wanted < 2:
        raise ArgumentError.got("rows", "at least 2", wanted)
    if num_rows <= wanted:
        return torch.arange(num_rows, device=device)
    generator = seeded_generator(generator)
    picked = torch.randperm(num_rows, generator=generator, device=generator.device)[:wanted]
    return picked.sort().values.to(device, non_blocking=True)


def score_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    limits: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return the masked scores of some query rows, [B, Hq, R, Sk] in the dtype of the key.

    Args:
        query: [B, Hq, R, D].
        key: [B, Hkv, Sk, D], already in the dtype to compute in.
        scale: factor of the scores.
        limits: [R]; row r sees keys 0 to ``limits[r]``; None sees all.
        mask: [B, Hq, R, Sk], boolean (True = attend) or added to the scores.
    """
    batch, heads, num_rows, dim = query.shape
    kv_heads, len_k = key.shape[1:3]
    group_rows = heads // max(kv_heads, 1) * num_rows
    # A group of query heads shares its keys, so its rows are folded into one product.
    folded = query.to(key.dtype).reshape(batch, kv_heads, group_rows, dim) * scale
    scores = (folded @ key.mT).reshape(batch, heads, num_rows, len_k)
    if limits is not None:
        positions = torch.arange(len_k, device=key.device)
        scores = scores.masked_fill(positions > limits[:, None], -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def pool_tokens(tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Return [B, H, ceil(S / step), D]: means of runs of tokens."""
    length = tokens.shape[-2]
    tokens = tokens.to(accumulation_dtype(tokens.dtype))
    if step == 1 or length == 0:
        return tokens
    num_groups = -(-length // step)
    padded = F.pad(tokens, (0, 0, 0, num_groups * step - length))
    sums = padded.reshape(*tokens.shape[:-2], num_groups, step, tokens.shape[-1]).sum(-2)
    starts = torch.arange(num_groups, device=tokens.device) * step
    return sums / (length - starts).clamp_max(step)[:, None]
