"""What a call of a Transformers layer shows to its queries, as arguments of the public call.

Transformers says it in four ways: a mask, no mask (causality and a window are then meant),
FlashAttention's packed sequences, and a bias by position. Shape legend in `adaattn.spec`.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdRef

from adaattn.backends.masks import kept_beside
from adaattn.errors import ArgumentTypeError, ShapeError
from adaattn.integrations._transformers_structure import (
    MaskStructure,
    StructuredMask,
    segments_of,
)

__all__ = ["Visibility", "joined", "masked", "packed", "selected", "unmasked", "with_bias"]

_UNLIMITED = (-1, -1)

_KEPT_FROM = 1 << 15
"""Numbers of a bias from which one is kept: fewer are made in less time than it takes to look."""


class Visibility(NamedTuple):
    """Which keys are seen, as arguments of the public call.

    Args:
        mask: boolean or additive [B or 1, Hq or 1, Sq, Sk], or None.
        is_causal: as in the public call.
        align: as in the public call.
        window: as in the public call.
        num_keys: keys from here on are cut off.
        cu_seqlens_q: starts of packed sequences and their end, or None.
        cu_seqlens_k: the same for keys.
    """

    num_keys: int
    mask: torch.Tensor | None = None
    is_causal: bool = False
    align: str = "bottom_right"
    window: tuple[int, int] = _UNLIMITED
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    def options(self) -> dict[str, Any]:
        """Return the keywords of the public call that say so, beside mask and causal order."""
        found: dict[str, Any] = {}
        if self.window != _UNLIMITED:
            found["window"] = self.window
        if self.is_causal or found:
            found["align"] = self.align
        if self.cu_seqlens_q is not None:
            found["cu_seqlens_q"], found["cu_seqlens_k"] = self.cu_seqlens_q, self.cu_seqlens_k
        return found


def masked(mask: torch.Tensor, len_k: int, dtype: torch.dtype) -> Visibility:
    """Return what a mask says; keys beyond a narrower mask (a static cache) are cut off."""
    if isinstance(mask, StructuredMask):
        structure = mask.structure if mask._dense is None else mask._dense
        if isinstance(structure, MaskStructure):
            if structure.is_order_alone and not structure.is_causal:
                return Visibility(num_keys=len_k)  # a prefix in the cache is seen, too
            if not isinstance(mask.visibility, Visibility):
                mask.visibility = _structured(structure)
            return mask.visibility
        mask = structure
    if mask.dim() != 4:
        raise ShapeError.got(
            "attention_mask",
            "[B, 1 or Hq, Sq, Sk]",
            tuple(mask.shape),
            "pass padding [B, S] to the model, not to the layer",
        )
    if mask.is_floating_point():  # under autocast it comes in another dtype than the queries
        mask = mask.to(dtype)
    width = mask.shape[-1]
    if width > len_k:
        return Visibility(num_keys=len_k, mask=mask[..., :len_k])
    return Visibility(num_keys=len_k if width == 1 else width, mask=mask)


def _structured(structure: MaskStructure) -> Visibility:
    """Return the structure that stands for a mask."""
    return Visibility(
        num_keys=structure.num_keys,
        is_causal=structure.is_causal,
        window=structure.window,
        cu_seqlens_q=structure.starts,
        cu_seqlens_k=structure.starts,
    )


def unmasked(is_causal: bool, sliding_window: int | None, len_q: int, len_k: int) -> Visibility:
    """Return what a call without a mask means in Transformers.

    One query is the newest token and sees every key. Several queries with more keys than
    queries start at the first key: the cache is static and was empty.
    """
    is_causal = is_causal and len_q > 1
    num_keys = min(len_q, len_k) if is_causal else len_k
    return Visibility(
        num_keys=num_keys,
        is_causal=is_causal,
        align="top_left" if len_q > num_keys else "bottom_right",
        window=_window(sliding_window, is_causal or len_q == 1, max(len_q, num_keys)),
    )


def _window(sliding_window: int | None, is_causal: bool, length: int) -> tuple[int, int]:
    """Return the window of Transformers' ``sliding_window``, which counts the query itself."""
    if sliding_window is None or sliding_window >= length:
        return _UNLIMITED
    return (sliding_window - 1, -1 if is_causal else sliding_window - 1)


def packed(
    mask: torch.Tensor | None,
    starts: tuple[torch.Tensor | None, torch.Tensor | None],
    is_causal: bool,
    sliding_window: int | None,
    query: torch.Tensor,
    len_k: int,
) -> Visibility:
    """Return packed sequences as FlashAttention's keywords describe them."""
    starts_q, starts_k = starts
    if starts_q is None or starts_k is None:
        raise ArgumentTypeError.got(
            "packed sequences", "both cu_seq_lens_q and cu_seq_lens_k", "one of them"
        )
    structure = None
    if isinstance(mask, StructuredMask) and not mask.is_dense:
        structure = mask.structure
    if mask is None or isinstance(structure, MaskStructure):
        if isinstance(structure, MaskStructure):
            is_causal, window = structure.is_causal, structure.window
        else:
            window = _window(sliding_window, is_causal, len_k)
        return Visibility(
            num_keys=len_k,
            is_causal=is_causal,
            window=window,
            cu_seqlens_q=starts_q.to(torch.int32),
            cu_seqlens_k=starts_k.to(torch.int32),
        )
    seen = masked(mask, len_k, query.dtype)
    assert seen.mask is not None
    rows = segments_of(starts_q, query.shape[2])[:, None]
    inside = rows == segments_of(starts_k, len_k)[None, : seen.num_keys]
    return Visibility(num_keys=seen.num_keys, mask=_narrowed(seen.mask, inside))


def with_bias(seen: Visibility, bias: torch.Tensor, dtype: torch.dtype) -> Visibility:
    """Return the same visibility with a bias added to the scores."""
    bias = (bias if bias.shape[-1] <= seen.num_keys else bias[..., : seen.num_keys]).to(dtype)
    return _with_mask(seen, bias if seen.mask is None else joined(bias, seen.mask))


def selected(seen: Visibility, indices: torch.Tensor, len_k: int) -> Visibility:
    """Return the same visibility of those keys alone that each query chose.

    Args:
        seen: what else hides keys.
        indices: integers [B, Sq, k], keys of all that there are.
        len_k: how many there are.
    """
    if indices.dim() != 3 or indices.dtype not in (torch.int32, torch.int64):
        got = f"{tuple(indices.shape)} of {indices.dtype}"
        raise ShapeError.got("indices of keys", "[B, Sq, k] of integers", got)
    chosen = indices.new_zeros((*indices.shape[:2], len_k), dtype=torch.bool)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)[..., : seen.num_keys]
    return _with_mask(seen, chosen if seen.mask is None else _narrowed(seen.mask, chosen))


def _narrowed(mask: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return a boolean or additive mask that shows some of the keys alone, those that are True."""
    if mask.dtype == torch.bool:
        return mask & keys
    return mask.masked_fill(~keys, float("-inf"))


def _with_mask(seen: Visibility, mask: torch.Tensor) -> Visibility:
    """Return the visibility with a mask, which excludes ``is_causal``.

    A window with nothing to the right says the same.
    """
    window = (seen.window[0], 0) if seen.is_causal else seen.window
    return seen._replace(mask=mask, is_causal=False, window=window)


def joined(bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a bias under a mask, made once for all layers that are given the same two.

    It is kept as long as the mask, which is of one forward pass; a model may own the bias.
    """
    is_followed = torch.is_grad_enabled() and (bias.requires_grad or mask.requires_grad)
    if is_followed or bias.numel() < _KEPT_FROM or bias.is_inference():
        return _under(mask, bias)
    facts = ("joined", WeakIdRef(bias), bias._version, bias.data_ptr(), bias.shape)
    return kept_beside(mask, facts, partial(_under, mask, bias))


def _under(mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return a bias where a boolean mask shows keys, or beside one that is added."""
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask
