"""PyTorch's own kernels, each by name: flash, efficient, cudnn, math.

A kernel that ``F.scaled_dot_product_attention`` would choose by itself is reached through
it, the cheapest door; any other through its operator, because the ``sdpa_kernel`` context
costs microseconds a call. Each kernel declares only what it does natively: masks that
stand for windows or packed sequences belong to other executors. FlashAttention-2 takes sinks too,
without gradients: its output is multiplied by a share that follows from its log-sum-exp.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from adaattn.backends.common import with_dense_columns
from adaattn.backends.interface import Direct, Result, Tensors
from adaattn.backends.masks import additive_mask, kept_bias, stored_columns, with_rank
from adaattn.backends.own_kernels import check_untransformed
from adaattn.backends.sdpa_call import (
    above_sinks,
    beside_sinks,
    sdpa,
    sdpa_keywords,
    with_masks,
)
from adaattn.backends.sdpa_capabilities import CAPABILITIES
from adaattn.spec import (
    Align,
    AttentionProblem,
    Aux,
    HeadGroup,
    MaskKind,
)

__all__ = ["CAPABILITIES", "direct", "goes_through_sdpa", "run"]

_ATEN = torch.ops.aten
_ALIGNMENT = 8


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention by the kernel that ``group.capability`` names."""
    if goes_through_sdpa(problem, group):
        return Result(output=_through_sdpa(tensors, problem))
    result = _KERNELS[group.capability](tensors, problem)
    return result if problem.wants(Aux.LSE) else Result(output=result.output)


def goes_through_sdpa(problem: AttentionProblem, group: HeadGroup) -> bool:
    """Return whether ``F.scaled_dot_product_attention`` itself would run this kernel.

    A mask goes to it as it was given, broadcast dimensions unexpanded, but for one column that
    stands for all keys, which kernels for GPUs misread.
    """
    one_column = problem.mask_shape[-1:] == (1,) and problem.len_k > 1
    if problem.sdpa_default != group.capability or (one_column and problem.device_type == "cuda"):
        return False
    special = problem.num_sequences > 0 or problem.window != (-1, -1) or problem.has_sinks
    corner = problem.is_causal and problem.align is Align.BOTTOM_RIGHT
    return not (special or corner or problem.aux is not Aux.NONE)


def direct(problem: AttentionProblem, group: HeadGroup) -> Direct | None:
    """Return PyTorch's function with the problem's keywords, or a kernel's operator."""
    if not goes_through_sdpa(problem, group):
        if problem.head_dim % _ALIGNMENT or problem.value_dim % _ALIGNMENT:
            return None
        make = _DIRECT.get(group.capability)
        return None if make is None else make(problem)
    keywords = sdpa_keywords(problem)
    if problem.is_causal:
        keywords["is_causal"] = True
    if problem.mask is MaskKind.BOOLEAN and problem.sdpa_default == "sdpa.cudnn":
        return _with_bias(keywords)
    return partial(sdpa, **keywords) if keywords else sdpa


def _with_bias(keywords: dict[str, Any]) -> Direct:
    """Return PyTorch's function for a boolean mask, which cuDNN is handed as numbers."""

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *rest: None
    ) -> torch.Tensor:
        bias = kept_bias(with_rank(mask, 4), mask, query.dtype)
        return sdpa(query, key, value, bias, **keywords)

    return run


def _through_sdpa(tensors: Tensors, problem: AttentionProblem) -> torch.Tensor:
    """Return the output of PyTorch's public function."""
    mask = tensors.mask
    if mask is not None and problem.sdpa_default == "sdpa.cudnn":
        mask = kept_bias(mask, tensors.mask_given, tensors.query.dtype)
    return sdpa(
        tensors.query,
        tensors.key,
        tensors.value,
        attn_mask=mask,
        is_causal=problem.is_causal,
        **sdpa_keywords(problem),
    )


def _cpu_flash(tensors: Tensors, problem: AttentionProblem) -> Result:
    """Return the CPU's flash kernel's output and log-sum-exp."""
    output, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu.default(
        with_dense_columns(tensors.query),
        with_dense_columns(tensors.key),
        with_dense_columns(tensors.value),
        0.0,
        problem.is_causal,
        attn_mask=additive_mask(tensors.mask, tensors.query.dtype),
        scale=problem.scale,
    )
    return Result(output=output, lse=_masked_lse(lse, tensors, problem))


def _flash2(tensors: Tensors, problem: AttentionProblem) -> Result:
    """Return FlashAttention-2's output; its causal order and windows count from the last key."""
    output, lse = _flash2_call(problem)(
        _padded(tensors.query),
        _padded(tensors.key),
        _padded(tensors.value),
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
        tensors.sinks,
    )
    if lse.dim() == 2:
        lse = lse.unsqueeze(0)
    if problem.wants(Aux.LSE):
        is_blind = lse == float("inf")
        if tensors.sinks is not None:
            lse = torch.logaddexp(lse, tensors.sinks[:, None].to(lse.dtype))
        lse = lse.masked_fill(is_blind, float("-inf"))
    return Result(output=output[..., : problem.value_dim], lse=lse)


def _flash2_direct(problem: AttentionProblem) -> Direct:
    """Return FlashAttention-2's operator for columns that need no padding."""
    call, dense = _flash2_call(problem), problem.dense_columns

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None = None,
        sinks: torch.Tensor | None = None,
        slopes: None = None,
        starts_q: torch.Tensor | None = None,
        starts_k: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not dense:
            query, key, value = map(with_dense_columns, (query, key, value))
        return call(query, key, value, starts_q, starts_k, sinks)[0]

    return run


def _flash2_call(
    problem: AttentionProblem,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the operator for a problem: from [B, H, S, D], bounds and sinks to (output, lse).

    The log-sum-exp is that of the keys alone. A single row's window is cut out of the keys, which
    the kernel splits only if there is none: over 4096 of 32768 keys 83 us with it, 30 us over 4096
    (H200, 32 heads, D 128, 2026-11).
    """
    forward = _ATEN._flash_attention_forward.default
    edges: dict[str, Any] = {"scale": problem.scale}
    left = problem.window[0]
    cut = left + 1 if left >= 0 and problem.len_q == 1 and not problem.num_sequences else 0
    if problem.window != (-1, -1) and not cut:
        right = 0 if problem.is_causal else problem.window[1]
        edges |= {"window_size_left": left, "window_size_right": right}
    dropout_p, is_causal = problem.dropout_p, problem.is_causal
    longest = problem.max_len_q, problem.max_len_k

    def dense(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cut:
            key, value = key[:, :, -cut:], value[:, :, -cut:]
        output, lse, *_ = forward(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None,
            None,
            query.shape[2],
            key.shape[2],
            dropout_p,
            is_causal,
            False,
            **edges,
        )
        return output.transpose(1, 2), lse

    def packed(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        *rest: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, keys, values = (item.squeeze(0).transpose(0, 1) for item in (query, key, value))
        output, lse, *_ = forward(
            rows, keys, values, starts_q, starts_k, *longest, dropout_p, is_causal, False, **edges
        )
        return output.transpose(0, 1).unsqueeze(0), lse

    call = packed if problem.num_sequences else dense
    return partial(_scaled_by_sinks, call) if problem.has_sinks else call


def _scaled_by_sinks(
    call: Callable[..., tuple[torch.Tensor, torch.Tensor]], *given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output beside sinks, the last of what is given, and the keys' log-sum-exp."""
    *others, sinks = given
    if not torch.compiler.is_compiling():
        check_untransformed(*others[:3], sinks)
    output, lse = call(*others)
    return beside_sinks(output, above_sinks(lse, sinks)), lse


def _biased(tensors: Tensors, problem: AttentionProblem, name: str) -> Result:
    """Return the output and log-sum-exp of a kernel that takes masks as numbers."""
    call = _biased_call(problem, name)
    output, lse = call(tensors.query, tensors.key, tensors.value, tensors.mask, tensors.mask_given)
    # cuDNN's has a last dimension of 1, the other's rows go up to a multiple of 32.
    lse = lse.flatten(2)[..., : problem.len_q] if lse is not None and lse.numel() else None
    lse = _masked_lse(lse, tensors, problem)
    return Result(output=output[..., : problem.value_dim], lse=lse)


def _biased_direct(problem: AttentionProblem, name: str) -> Direct:
    """Return the operator of such a kernel for columns that need no padding."""
    return with_masks(_biased_call(problem, name), has_more=True)


def _biased_call(
    problem: AttentionProblem, name: str
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return what takes q, k, v, the mask in four dimensions, and as the caller gave it.

    It returns the output with padded columns, and the kernel's log-sum-exp. The memory-efficient
    kernel takes no grouped heads: k and v are repeated for it.
    """
    repeats = problem.group_size > 1 and name == "sdpa.efficient"
    wants_lse = problem.wants(Aux.LSE) or problem.requires_grad
    fixed: tuple[bool | float, ...] = (wants_lse, problem.dropout_p, problem.is_causal)
    operator = _ATEN._scaled_dot_product_efficient_attention.default
    if name == "sdpa.cudnn":
        operator = _ATEN._scaled_dot_product_cudnn_attention.default
        fixed = (*fixed, False)  # no debug mask
    heads, scale = (problem.batch, problem.num_heads), problem.scale
    fits = problem.dense_columns and not (problem.head_dim | problem.value_dim) % _ALIGNMENT

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        given: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None
        if mask is not None:
            bias = _bias_of(mask, given, query.dtype, key.shape[2])
            bias = bias.expand(*heads, query.shape[2], key.shape[2])
        if repeats:
            key, value = _repeated(key, problem), _repeated(value, problem)
        if not fits:
            query, key, value = _padded(query), _padded(key), _padded(value)
        output, lse, *_ = operator(query, key, value, bias, *fixed, scale=scale)
        return output, lse

    return call


def _math(tensors: Tensors, problem: AttentionProblem) -> Result:
    """Return the output of PyTorch's composite of matrix products and softmax."""
    output, _ = _ATEN._scaled_dot_product_attention_math.default(
        tensors.query,
        tensors.key,
        tensors.value,
        additive_mask(tensors.mask, tensors.query.dtype),
        problem.dropout_p,
        problem.is_causal,
        None,
        scale=problem.scale,
        enable_gqa=problem.group_size > 1,
    )
    return Result(output=output)


_KERNELS: dict[str, Callable[[Tensors, AttentionProblem], Result]] = {
    "sdpa.flash": _cpu_flash,
    "sdpa.flash2": _flash2,
    "sdpa.efficient": partial(_biased, name="sdpa.efficient"),
    "sdpa.cudnn": partial(_biased, name="sdpa.cudnn"),
    "sdpa.math": _math,
}


_DIRECT: dict[str, Callable[[AttentionProblem], Direct]] = {
    "sdpa.flash2": _flash2_direct,
    "sdpa.efficient": partial(_biased_direct, name="sdpa.efficient"),
    "sdpa.cudnn": partial(_biased_direct, name="sdpa.cudnn"),
}


def _masked_lse(
    lse: torch.Tensor | None, tensors: Tensors, problem: AttentionProblem
) -> torch.Tensor | None:
    """Return the log-sum-exp with -inf where a mask hides every key; kernels differ there."""
    if lse is None or tensors.mask is None or not problem.wants(Aux.LSE):
        return lse
    seen = tensors.mask if tensors.mask.dtype == torch.bool else tensors.mask > float("-inf")
    return lse.masked_fill(~seen.any(-1), float("-inf"))


def _bias_of(
    mask: torch.Tensor, given: torch.Tensor | None, dtype: torch.dtype, len_k: int
) -> torch.Tensor:
    """Return the mask as numbers with a column for each key, in aligned rows, unexpanded."""
    bias = stored_columns(kept_bias(mask, given, dtype), len_k)
    if bias.stride(-1) != 1 or any(step % 8 for step in bias.stride()[:-1]):
        bias = _aligned(bias.contiguous())
    return bias


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with contiguous columns, their number a multiple of 8."""
    missing = -tensor.shape[-1] % _ALIGNMENT
    if missing:
        return F.pad(tensor, (0, missing))
    return with_dense_columns(tensor)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Return the bias in rows whose storage starts at multiples of 16 elements."""
    columns = bias.shape[-1]
    return F.pad(bias, (0, -columns % 16))[..., :columns]


def _repeated(tensor: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """Return k or v with one head for each query head, copied once whatever its layout."""
    heads = tensor.unsqueeze(2).expand(-1, -1, problem.group_size, -1, -1)
    return heads.reshape(tensor.shape[0], problem.num_heads, *tensor.shape[2:])
