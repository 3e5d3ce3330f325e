"""The key of a bound call: everything that the choice for it depends on."""

import operator
from collections.abc import Sequence
from math import gcd
from typing import Any, Final

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.common import is_aligned
from adaattn.backends.head_terms import HeadTerms
from adaattn.call.arguments import Arguments, Companions
from adaattn.call.history import History
from adaattn.call.outputs import AuxRequest
from adaattn.policies import AMBIENT, PRESETS, PolicyLike
from adaattn.spec import Plan, Policy

__all__ = [
    "DECODE_ROWS",
    "NO_WINDOW",
    "PROCESS_MODES",
    "Choices",
    "Tensor",
    "alignment",
    "autocast_dtype",
    "key_of",
    "may_grow",
    "may_keep",
    "process_modes",
]

Tensor = torch.Tensor | None

Choices = tuple[PolicyLike | None, Plan | None, History | None, str, int, AuxRequest | bool | None]
"""Policy, plan, history, backend, layer, and the outputs wanted beside the result."""

NO_WINDOW: Final = (-1, -1)
"""The default, by identity."""

DECODE_ROWS: Final = 8
"""Up to this many query rows a growing cache is bound once for each power of two of keys."""

_NAMING: Final = frozenset((str, float, int))
"""Types of policies that stand for the same one wherever they are equal."""

_PLAIN: Final = frozenset((int, float, bool, type(None)))

PROCESS_MODES: Final = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_deterministic_algorithms,
    torch.get_num_threads,
    torch.is_grad_enabled,
)
"""Functions that return the modes of the process that a choice depends on, beside autocast."""
_flash, _efficient, _math, _cudnn, _deterministic, _threads, _grad = PROCESS_MODES
_ambient = AMBIENT.get
_any_autocast = torch._C._is_any_autocast_enabled
_autocasts = torch.is_autocast_enabled


def key_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    companions: Companions,
    settings: tuple[Any, ...],
    window: Sequence[int] | torch.Tensor,
    choice: Choices,
) -> object:
    """Return everything that the choice for a call depends on.

    Args:
        query: [..., Hq, Sq, D].
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        companions: mask, sinks, slopes, cu_seqlens_q, cu_seqlens_k, blocks and numbers of heads.
        settings: the numbers and flags that say what is to be computed.
        window: left and right.
        choice: how it is to be planned.

    Raises:
        AttributeError, IndexError, TypeError, ValueError, RuntimeError: what is no tensor, or no
            number, has no key; nor has a nested tensor.
    """
    policy, plan, history, backend, layer, return_aux = choice
    mask, sinks, slopes, starts_q, starts_k, blocks, terms = companions
    shape, key_shape, device = query.shape, key.shape, query.device
    edges = window if window is NO_WINDOW else tuple(map(operator.index, window))
    seen: object = None
    keys: tuple[Any, ...]
    if may_grow(query, key, starts_q):
        keys = _growing(key, value, edges)
        if mask is not None:
            seen = _growing_mask(mask, key_shape[-2])
    else:
        keys = (key_shape, key.stride(), value.shape, value.stride())
        if mask is not None:
            seen = _facts(mask)
    if terms is None and blocks is None and sinks is slopes is starts_q is starts_k is None:
        rest = None
    else:
        rest = (
            sinks is not None and _facts(sinks),
            slopes is not None and _facts(slopes),
            starts_q is not None and _facts(starts_q),
            starts_k is not None and _facts(starts_k),
            starts_q is starts_k,
            blocks is not None and _listed(blocks),
            terms is not None and _by_head(terms),
        )
    return (
        shape,
        query.stride(),
        keys,
        query.dtype,
        key.dtype,
        value.dtype,
        device,
        key.device,
        value.device,
        _grad() and (query.requires_grad, key.requires_grad, value.requires_grad),
        seen,
        rest,
        settings,
        *map(type, settings),  # 2.0 equals 2, and is no dilation
        edges,
        None if edges is NO_WINDOW else tuple(map(type, window)),
        policy if type(policy) in _NAMING else id(_ambient() if policy is None else policy),
        None if plan is None else id(plan),
        None if history is None else id(history),
        backend,
        layer,
        type(layer),
        return_aux,
        type(return_aux),
        autocast_dtype(device.type),
        *process_modes(),
    )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return what autocast casts to on a device; None where it is not enabled."""
    if _any_autocast() and _autocasts(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def process_modes() -> tuple[object, ...]:
    """Return what each of `PROCESS_MODES` does."""
    return _flash(), _efficient(), _math(), _cudnn(), _deterministic(), _threads(), _grad()


def may_grow(query: torch.Tensor, key: torch.Tensor, starts_q: Tensor) -> bool:
    """Return whether a call decodes over keys that may grow from call to call."""
    return query.shape[-2] <= DECODE_ROWS < key.shape[-2] and starts_q is None


def alignment(key: torch.Tensor, value: torch.Tensor) -> int:
    """Return what all strides but the last are multiples of: 16 or a part of it."""
    return gcd(16, *key.stride()[:-1], *value.stride()[:-1])


def may_keep(arguments: Arguments, policy: object) -> bool:
    """Return whether calls with equal keys are alike: a tensor's value and a file may change."""
    numbers = (arguments.scale, arguments.softcap, arguments.dropout_p)
    if type(policy) is str:
        named = policy in PRESETS
    else:
        named = isinstance(policy, Policy | float | int | None)
    return named and all(type(number) in _PLAIN for number in numbers)


def _growing(key: torch.Tensor, value: torch.Tensor, window: tuple[int, ...]) -> tuple[Any, ...]:
    """Return what a choice depends on of the keys and values of decoding over a growing cache."""
    *leading, length, dim = key.shape
    *value_leading, value_length, value_dim = value.shape
    strides, value_strides = key.stride(), value.stride()
    return (
        *leading,
        *value_leading,
        (length - 1).bit_length(),
        dim,
        strides[-2],
        strides[-1],
        alignment(key, value),
        len(leading),
        value_length - length,
        value_dim,
        value_strides[-2],
        value_strides[-1],
        # What a problem is simplified to depends on whether a window reaches all keys.
        None if window is NO_WINDOW else (window[0] >= length, window[1] >= length),
    )


def _growing_mask(mask: torch.Tensor, length: int) -> tuple[object, ...]:
    """Return the same of a mask over that cache."""
    *lead, columns = mask.shape
    return (
        tuple(lead),
        columns == length,
        columns == 1,
        mask.stride()[-1],
        mask.dtype,
        mask.device,
        is_aligned(mask),
        mask.requires_grad,
        type(mask),
    )


def _facts(tensor: Tensor) -> tuple[object, ...]:
    """Return what a choice depends on of an optional tensor."""
    return () if tensor is None else (tensor.shape, tensor.stride(), *_kind(tensor))


def _listed(blocks: BlockList) -> tuple[object, ...]:
    """Return what a choice depends on of a list of blocks."""
    sizes = blocks.block_q, blocks.block_k, blocks.num_key_blocks, blocks.needed_blocks
    return (*sizes, blocks.indices.shape, blocks.indices.device)


def _by_head(terms: HeadTerms) -> tuple[object, ...]:
    """Return what a choice depends on of numbers of each head."""
    return _facts(terms.scale), _facts(terms.window), _facts(terms.softcap)


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a choice depends on of a tensor beside its layout."""
    return tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)
