"""The shapes of a call: leading dimensions broadcast and flattened, heads matched, masks 4-D."""

import math

import torch

from adaattn.backends.masks import with_rank
from adaattn.errors import DeviceError, DTypeError, ShapeError

__all__ = ["canonical_mask", "canonical_tensors", "described"]


def canonical_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return q, k and v as [B, H, S, D], and the leading dimensions of the result."""
    rank = max(query.dim(), key.dim(), value.dim())
    query, key, value = (with_rank(item, max(rank, 4)) for item in (query, key, value))
    _check_sizes(query, key, value)
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if value.shape[-3] != kv_heads:
        if enable_gqa or 1 not in (kv_heads, value.shape[-3]):
            raise ShapeError.got(
                "heads of key and value", "the same", f"{kv_heads}, {value.shape[-3]}"
            )
        kv_heads = max(kv_heads, value.shape[-3])
    if heads != kv_heads:
        looks_swapped = min(heads, kv_heads) > query.shape[-2] == key.shape[-2] > 1
        heads = _check_heads(heads, kv_heads, enable_gqa, looks_swapped)
    try:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError as error:
        shapes = f"{described(query)}, {described(key)}, {described(value)}"
        raise ShapeError.got("leading dimensions", "sizes that broadcast", shapes) from error
    query = _flat(query, batch, heads)
    key, value = _flat(key, batch, kv_heads), _flat(value, batch, kv_heads)
    leading = (*batch, heads)
    return query, key, value, leading[len(leading) - (rank - 2) :]


def _check_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse different head dimensions of q and k, and different lengths of k and v."""
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError.got(
            "head dimension of key", f"{query.shape[-1]} as in query", key.shape[-1]
        )
    if query.shape[-1] == 0:
        raise ShapeError.got("head dimension", "at least 1", 0)
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError.got("length of value", f"{key.shape[-2]} as in key", value.shape[-2])


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool, looks_swapped: bool) -> int:
    """Return the heads of the result when q and k differ in theirs."""
    layout = "are they [B, S, H, D]? Then pass x.transpose(1, 2); else " if looks_swapped else ""
    if enable_gqa:
        if kv_heads == 0 or heads % kv_heads:
            raise ShapeError.got(
                "query heads with enable_gqa=True",
                f"a multiple of {kv_heads}",
                heads,
                layout and layout + "use other heads",
            )
        return heads
    if kv_heads == 1:
        return heads
    if heads == 1:
        return kv_heads
    hint = "pass enable_gqa=True" if kv_heads and heads % kv_heads == 0 else "use equal heads"
    raise ShapeError.got(
        "heads of query and key", "the same", f"{heads}, {kv_heads}", layout + hint
    )


def _flat(tensor: torch.Tensor, batch: torch.Size, heads: int) -> torch.Tensor:
    """Return [B, H, S, X] with the leading dimensions broadcast and flattened."""
    shape = (*batch, heads, *tensor.shape[-2:])
    if tensor.shape != shape:
        tensor = tensor.expand(shape)
    return tensor if len(batch) == 1 else tensor.reshape(math.prod(batch), *shape[-3:])


def canonical_mask(
    mask: torch.Tensor | None, query: torch.Tensor, leading: tuple[int, ...], len_k: int
) -> torch.Tensor | None:
    """Return the mask as 4-D, each size 1 or full."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DTypeError.got(
            "dtype of attn_mask",
            "bool or floating point",
            mask.dtype,
            "mask.bool() if 1 says attend, a float is added to the scores",
        )
    if mask.device != query.device:
        raise DeviceError.got("attn_mask", f"device {query.device}", mask.device)
    batch, _, len_q, _ = query.shape
    full = (*leading, len_q, len_k)
    try:
        fits = torch.broadcast_shapes(mask.shape, full) == torch.Size(full)
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeError.got(
            "attn_mask",
            f"a shape that broadcasts to {list(full)}",
            described(mask),
            _mask_hint(tuple(mask.shape), full),
        )
    mask = with_rank(mask, max(len(full), 4))
    if mask.dim() == 4:
        return mask
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*leading[:-1], *mask.shape[-3:]).reshape(batch, *mask.shape[-3:])


def _mask_hint(shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """Return what a mask of another shape was probably meant to be; "" if nothing is like it."""
    if len(full) != 4:
        return ""
    batch, heads, len_q, len_k = full
    if shape == (batch, len_k):
        return "a mask of keys is mask[:, None, None, :]"
    if shape == (batch, len_q, len_k):
        return "a mask for all heads is mask[:, None]"
    if shape == (batch * heads, len_q, len_k):
        return f"a mask for each head is mask.reshape({list(full)})"
    if heads != len_k and shape[-1:] == (heads,):
        return "are q, k and v [B, S, H, D]? Then pass x.transpose(1, 2)"
    return ""


def described(value: object) -> str:
    """Return a tensor's dtype and shape, or the type of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
