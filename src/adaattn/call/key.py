"""The key of a bound call: everything that the choice for it depends on."""

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch

from adaattn.call.history import History
from adaattn.call.outputs import AuxRequest
from adaattn.policies import PRESETS, current_policy
from adaattn.spec import Plan, Policy

__all__ = ["DECODE_ROWS", "NO_WINDOW", "Choices", "Tensor", "key_of"]

Tensor = torch.Tensor | None

Choices = tuple[
    Policy | str | None, Plan | None, History | None, str, int, AuxRequest | bool | None
]
"""Policy, plan, history, backend, layer, and the outputs wanted beside the result."""

NO_WINDOW: Final = (-1, -1)
"""The default, by identity."""

DECODE_ROWS: Final = 8
"""Up to this many query rows a growing cache is bound once for each power of two of keys."""

_PLAIN: Final = frozenset((int, float, bool, type(None)))

_flash = torch._C._get_flash_sdp_enabled
_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn = torch._C._get_cudnn_sdp_enabled
_deterministic = torch._C._get_deterministic_algorithms
_grad = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_threads = torch.get_num_threads


def key_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    companions: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    settings: tuple[Any, ...],
    window: Sequence[int],
    choice: Choices,
) -> object:
    """Return everything that the choice for a call depends on; None where that cannot be said.

    Args:
        query: [..., Hq, Sq, D].
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        companions: mask, sinks, slopes, cu_seqlens_q and cu_seqlens_k.
        settings: the numbers and flags that say what is to be computed.
        window: left and right.
        choice: how it is to be planned.
    """
    policy, plan, history, backend, layer, return_aux = choice
    named: object
    if policy is None:
        named = id(current_policy())
    elif type(policy) is str:
        if policy not in PRESETS:
            return None  # a file, which may change
        named = policy
    elif isinstance(policy, Policy):
        named = id(policy)
    else:
        return None
    scale, softcap, dropout_p, is_causal, grouped, *_ = settings
    plain = type(scale) in _PLAIN and type(softcap) in _PLAIN and type(dropout_p) in _PLAIN
    if not (plain and type(is_causal) is bool and type(grouped) is bool):
        return None  # a tensor's value may change unseen
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    seen: tuple[Any, ...] | None
    if query.shape[-2] <= DECODE_ROWS < key.shape[-2] and companions[3] is None:
        keys, values, seen = _growing(key, value, companions[0], window)
    else:
        keys, values = (key.shape, key.stride()), (value.shape, value.stride())
        seen = None if companions[0] is None else _facts(companions[0])
    rest = None
    if not (companions[1] is companions[2] is companions[3] is companions[4] is None):
        rest = (*map(_facts, companions[1:]), companions[3] is companions[4])
    return (
        query.shape,
        query.stride(),
        keys,
        values,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.is_cuda,
        value.is_cuda,
        _grad() and (query.requires_grad, key.requires_grad, value.requires_grad),
        seen,
        rest,
        settings,
        type(settings[6]),  # 2.0 equals 2, and is no dilation
        window if window is NO_WINDOW else tuple(map(operator.index, window)),
        (named, id(plan), id(history), backend, layer, return_aux),
        torch.get_autocast_dtype(query.device.type) if _autocasts(query) else None,
        _deterministic(),
        _threads(),
        _flash(),
        _efficient(),
        _math(),
        _cudnn(),
    )


def _growing(
    key: torch.Tensor, value: torch.Tensor, mask: Tensor, window: Sequence[int]
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...] | None]:
    """Return what a choice depends on of keys, values and mask of decoding over a growing cache."""
    length = key.shape[-2]
    grown = (length - 1).bit_length()
    # What a problem is simplified to depends on whether a window reaches all keys.
    reached = (window[0] >= length, window[1] >= length)
    keys = (key.shape[:-2], key.shape[-1], grown, key.stride()[-2:], reached)
    values = (value.shape[:-2], value.shape[-1], value.shape[-2] - length, value.stride()[-2:])
    if mask is None:
        return keys, values, None
    whole = mask.shape[-1] in (1, length)
    seen = (mask.shape[:-1], whole, mask.shape[-1] == 1, mask.stride(-1), *_kind(mask))
    return keys, values, seen


def _autocasts(query: torch.Tensor) -> bool:
    """Return whether autocast would cast a tensor."""
    return _any_autocast() and torch.is_autocast_enabled(query.device.type)


def _facts(tensor: Tensor) -> tuple[object, ...]:
    """Return what a choice depends on of an optional tensor."""
    return () if tensor is None else (tensor.shape, tensor.stride(), *_kind(tensor))


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a choice depends on of a tensor beside its layout."""
    return tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)
