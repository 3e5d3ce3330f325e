"""The masks of ``torch.nn.MultiheadAttention`` as those of the public call.

There True means masked; here, as in ``scaled_dot_product_attention``, True means attend.
Causal order and window stay flags as long as no mask over queries and keys is given, or one
that says no more than ``is_causal`` beside it. Into any other they are folded, since its
numbers exist anyway and more kernels can serve one mask. The keys that ``add_bias_kv`` and
``add_zero_attn`` append are seen by every query and have no position, so causal order and
window become a mask beside them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from adaattn.attention._causal_hint import is_plain_causal
from adaattn.attention._layout import Layout
from adaattn.backends.masks import kept_beside
from adaattn.call.canonical import described
from adaattn.errors import ArgumentTypeError, DTypeError, ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which keys a query may see by position alone.

    Args:
        is_causal: none behind its own.
        window: ``(left, right)`` around its own; -1 is unlimited.
        to_end: the last query stands at the last key; else the first at the first.
    """

    is_causal: bool
    window: tuple[int, int]
    to_end: bool

    @property
    def hides(self) -> bool:
        """Whether any key can be hidden."""
        return self.is_causal or self.window != (-1, -1)

    @property
    def is_top_left(self) -> bool:
        """Whether causal order counts from the first key, as masks of PyTorch's helpers do."""
        return self.is_causal and not self.to_end

    def flags(self) -> dict[str, Any]:
        """Return the keywords of the public call."""
        return _flags(self.is_causal, self.window, self.to_end)

    def visible(self, len_q: int, len_k: int, device: torch.device) -> torch.Tensor:
        """Return which keys are seen: boolean [L, S]."""
        first = len_k - len_q if self.to_end else 0
        rows = torch.arange(first, first + len_q, device=device)[:, None]
        ahead = torch.arange(len_k, device=device) - rows
        left, right = self.window
        seen = ahead <= 0 if self.is_causal else torch.ones_like(ahead, dtype=torch.bool)
        if left >= 0:
            seen = seen & (ahead >= -left)
        return seen & (ahead <= right) if right >= 0 else seen


def _flags(is_causal: bool, window: tuple[int, int], to_end: bool) -> dict[str, Any]:
    """Return the keywords of the public call for an order; those at their default are left out."""
    flags: dict[str, Any] = {}
    if is_causal:
        flags["is_causal"] = True
    if window != (-1, -1):
        flags["window"] = window
    if flags and to_end:
        flags["align"] = "bottom_right"
    return flags


def mask_arguments(
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    layout: Layout,
    *,
    is_causal: bool,
    window: tuple[int, int],
    to_end: bool,
    num_heads: int,
    num_dropped: int,
    num_extra: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the keywords of the public call that say which keys are seen.

    Args:
        key_padding_mask: [B, S], or [S] without a batch; True = masked, or added.
        attn_mask: [L, S] or [B * H, L, S]; True = masked, or added.
        layout: the call; its ``len_k`` counts every key, cached ones too, without the extra.
        is_causal: a query sees none behind its own.
        window: ``(left, right)`` around its own; -1 is unlimited.
        to_end: the last query stands at the last key; else the first at the first.
        num_heads: H.
        num_dropped: of these the first ones, which a cache no longer holds.
        num_extra: keys appended behind the others, which every query sees.
        device: where the keys are.

    Raises:
        ShapeError: a mask of another shape.
        DTypeError: a mask that is neither boolean nor floating point.
        ArgumentTypeError: no tensor.
    """
    if key_padding_mask is attn_mask is None and not num_extra:
        return _flags(is_causal, window, to_end)
    order = Order(is_causal=is_causal, window=window, to_end=to_end)
    padding = _padding_mask(key_padding_mask, layout)
    pairs = _pair_mask(attn_mask, layout, num_heads)
    if attn_mask is not None and pairs is not None and pairs.dim() == 2 and order.is_top_left:
        pairs = None if is_plain_causal(attn_mask) else pairs
    if order.hides and (pairs is not None or num_extra):
        seen = order.visible(layout.len_q, layout.len_k, device)
        pairs = seen if pairs is None else _both(pairs, seen)
        order = replace(order, is_causal=False, window=(-1, -1))
    mask = pairs if padding is None else padding if pairs is None else _both(pairs, padding)
    if mask is None:
        return order.flags()
    if num_dropped:
        mask = mask[..., num_dropped:]
    if num_extra:
        mask = functional.pad(mask, (0, num_extra), value=float(mask.dtype == torch.bool))
    if order.is_causal:
        # The public call takes a mask or is_causal; a right edge of 0 says the same beside one.
        order = replace(order, is_causal=False, window=(order.window[0], 0))
    return {"attn_mask": mask, **order.flags()}


def _padding_mask(mask: torch.Tensor | None, layout: Layout) -> torch.Tensor | None:
    """Return [B, 1, 1, S]: True = attend, or added."""
    if mask is None:
        return None
    given = (layout.batch, layout.len_k) if layout.is_batched else (layout.len_k,)
    _check_mask("key_padding_mask", mask, [given])
    shape = (layout.batch, 1, 1, layout.len_k)
    if mask.is_cuda and mask.dtype == torch.bool:
        # Every layer is given it, and what PyTorch's kernels are handed is kept by identity.
        return kept_beside(mask, ("attending", shape), lambda: (~mask).view(shape))
    return _attending(mask).view(shape)


def _pair_mask(mask: torch.Tensor | None, layout: Layout, num_heads: int) -> torch.Tensor | None:
    """Return [L, S] or [B, H, L, S]: True = attend, or added."""
    if mask is None:
        return None
    pairs = (layout.len_q, layout.len_k)
    _check_mask("attn_mask", mask, [pairs, (layout.batch * num_heads, *pairs)])
    mask = _attending(mask)
    return mask if mask.dim() == 2 else mask.unflatten(0, (layout.batch, num_heads))


def _check_mask(name: str, mask: object, shapes: list[tuple[int, ...]]) -> None:
    """Refuse a mask of another type, dtype or shape."""
    if not isinstance(mask, torch.Tensor):
        raise ArgumentTypeError.got(name, "None or a torch.Tensor", type(mask).__name__)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DTypeError.got(
            f"dtype of {name}",
            "bool (True = masked) or floating point (added to the scores)",
            mask.dtype,
            "cast it",
        )
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError.got(name, wanted, described(mask))


def _attending(mask: torch.Tensor) -> torch.Tensor:
    """Return a boolean mask with True = attend; one that is added as it is."""
    return ~mask if mask.dtype == torch.bool else mask


def _both(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return one mask that does what two do, True = attend or added."""
    if left.dtype == torch.bool and right.dtype == torch.bool:
        return left & right
    if left.dtype == torch.bool:
        left, right = right, left
    if right.dtype == torch.bool:
        return left.masked_fill(~right, float("-inf"))
    return left + right
