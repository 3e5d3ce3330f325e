"""The facts of a problem that follow from canonical tensors and PyTorch's settings."""

from typing import Any, Final

import torch

from adaattn._dtypes import precision_of
from adaattn.backends import Tensors
from adaattn.backends.common import layout_facts
from adaattn.call.packing import longest
from adaattn.errors import ArgumentError
from adaattn.spec import HeadTerm, MaskKind

__all__ = ["SDPA_NAMES", "allowed_sdpa_kernels", "packed_facts", "sdpa_default", "tensor_facts"]

SDPA_NAMES: Final = {
    "cpu": {0: "sdpa.math", 1: "sdpa.flash"},
    "cuda": {0: "sdpa.math", 1: "sdpa.flash2", 2: "sdpa.efficient", 3: "sdpa.cudnn"},
}
"""SDPA's kernels on each type of device, by the number that PyTorch gives them."""


def tensor_facts(tensors: Tensors) -> dict[str, Any]:
    """Return the fields of the problem that follow from the tensors and the context."""
    query, mask = tensors.query, tensors.mask
    sinks, slopes, blocks = tensors.sinks, tensors.alibi_slopes, tensors.blocks
    terms = (tensors.head_scale, tensors.head_softcap)

    def wants_grad(*items: torch.Tensor | None) -> bool:
        wanting = any(item is not None and item.requires_grad for item in items)
        return torch.is_grad_enabled() and wanting

    return {
        "batch": query.shape[0],
        "num_heads": query.shape[1],
        "num_kv_heads": tensors.key.shape[1],
        "len_q": query.shape[2],
        "len_k": tensors.key.shape[2],
        "head_dim": query.shape[3],
        "value_dim": tensors.value.shape[3],
        "precision": precision_of(query.dtype),
        "device_type": query.device.type,
        "mask": _mask_kind(mask),
        "mask_shape": () if mask is None else tuple(mask.shape),
        "mask_is_wide": _is_wide(mask, query),
        "mask_requires_grad": wants_grad(mask),
        "has_sinks": sinks is not None,
        "sinks_require_grad": wants_grad(sinks),
        "has_alibi": slopes is not None,
        "alibi_requires_grad": wants_grad(slopes),
        "block_size": (0, 0) if blocks is None else (blocks.block_q, blocks.block_k),
        "most_blocks": 0 if blocks is None else blocks.indices.shape[-1],
        "head_terms": HeadTerm.NONE if tensors.head_terms is None else tensors.head_terms.kinds,
        "head_terms_require_grad": wants_grad(*terms),
        "requires_grad": wants_grad(query, tensors.key, tensors.value, mask, sinks, slopes, *terms),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "allowed_sdpa": allowed_sdpa_kernels(query.device.type),
        "may_wait": query.device.type == "cpu",
        **layout_facts(query, tensors.key, tensors.value, mask=mask),
    }


def packed_facts(
    tensors: Tensors, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> dict[str, Any]:
    """Return the fields of a packed problem; those that follow from one packing are bounds.

    A number of tokens is rounded up to a power of two: a new packing is not a new problem.

    Raises:
        ArgumentError: a longest sequence is no such number, or there are no sequences.
    """
    starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if starts_q is None or starts_k is None:
        if max_seqlen_q is not None or max_seqlen_k is not None:
            hint = "they say how long packed sequences are; a dense batch has its shape"
            wanted = "cu_seqlens_q and cu_seqlens_k beside them"
            raise ArgumentError.got("max_seqlen_q and max_seqlen_k", wanted, "neither", hint)
        return {}
    len_q, len_k = tensors.query.shape[2], tensors.key.shape[2]
    most_q = longest("max_seqlen_q", max_seqlen_q, tensors.bounds_q, len_q)
    most_k = longest("max_seqlen_k", max_seqlen_k, tensors.bounds_k, len_k)
    same = bool(tensors.bounds_q) and tensors.bounds_q == tensors.bounds_k
    return {
        "num_sequences": starts_q.shape[0] - 1,
        "max_len_q": min(_rounded_up(most_q), len_q),
        "max_len_k": min(_rounded_up(most_k), len_k),
        "packed_square": same or starts_q is starts_k,
    }


def _rounded_up(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(count - 1, 0).bit_length()


def allowed_sdpa_kernels(device_type: str) -> tuple[str, ...] | None:
    """Return the SDPA kernels that an ambient ``sdpa_kernel`` leaves; None when it leaves all.

    A traced call has its plan already, and no view of the context: None there too.
    """
    if torch.compiler.is_compiling():
        return None
    cuda = torch.backends.cuda
    enabled = {
        0: cuda.math_sdp_enabled(),
        1: cuda.flash_sdp_enabled(),
        2: cuda.mem_efficient_sdp_enabled(),
        3: cuda.cudnn_sdp_enabled(),
    }
    if all(enabled.values()):
        return None
    names = SDPA_NAMES.get(device_type, {})
    return tuple(names[number] for number, on in enabled.items() if on and number in names)


def _is_wide(mask: torch.Tensor | None, query: torch.Tensor) -> bool:
    """Return whether an additive mask would be rounded in the query's dtype."""
    if mask is None or mask.dtype == torch.bool:
        return False
    return torch.finfo(mask.dtype).bits > torch.finfo(query.dtype).bits


def _mask_kind(mask: torch.Tensor | None) -> MaskKind:
    """Return the kind of a mask."""
    if mask is None:
        return MaskKind.NONE
    return MaskKind.BOOLEAN if mask.dtype == torch.bool else MaskKind.ADDITIVE


def sdpa_default(tensors: Tensors, is_causal: bool, scale: float, dropout_p: float) -> str:
    """Return the kernel that SDPA would choose for the plain part of the call; "" if unknown."""
    if torch.compiler.is_compiling() or tensors.query.device.type not in SDPA_NAMES:
        return ""
    try:
        number = torch._fused_sdp_choice(
            tensors.query,
            tensors.key,
            tensors.value,
            tensors.mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=tensors.query.shape[1] != tensors.key.shape[1],
        )
    except (RuntimeError, NotImplementedError):
        return ""
    return SDPA_NAMES[tensors.query.device.type].get(int(number), "")
