"""Shortcuts for exact calls whose decision cannot depend on the tensors' values.

A call like one before finds its executor by one lookup: a few microseconds of host time.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F

from adaattn import hardware
from adaattn._dtypes import torch_dtype
from adaattn._events import AttentionEvent, emit, has_sinks
from adaattn.backends import Tensors, load
from adaattn.backends.interface import Executor
from adaattn.backends.sdpa import goes_through_sdpa
from adaattn.deciding import DECODE_ROWS
from adaattn.policies import PRESETS, current_policy
from adaattn.spec import AttentionProblem, Decision, HeadGroup, Policy
from adaattn.validation import Call, without_autocast

__all__ = ["Key", "are_plain", "find", "remember", "shortcut_key"]

_Flag = Callable[[], bool]
_flash_enabled: _Flag = torch.backends.cuda.flash_sdp_enabled
_efficient_enabled: _Flag = torch.backends.cuda.mem_efficient_sdp_enabled
_math_enabled: _Flag = torch.backends.cuda.math_sdp_enabled
_cudnn_enabled: _Flag = torch.backends.cuda.cudnn_sdp_enabled

_Direct = Callable[..., torch.Tensor]
Key = tuple[object, ...]
_PLAIN: Final = frozenset((int, float, bool, type(None)))
_KEPT_DIRECT: Final = 4096
_KEPT_TAGS: Final = 256

_DIRECT: Final[dict[tuple[object, ...], tuple[_Direct, object, object]]] = {}
"""Shortcuts of exact calls. The policy beside each keeps its identity from being reused."""

hardware.on_clear(_DIRECT.clear)


def find(key: Key) -> Callable[..., torch.Tensor] | None:
    """Return the shortcut of a key: a function of q, k, v, mask, sinks, slopes and the tag."""
    known = _DIRECT.get(key)
    return None if known is None else known[0]


def _facts(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    """Return what a decision depends on of an optional tensor."""
    if tensor is None:
        return None
    return (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))


def are_plain(*values: object) -> bool:
    """Return whether all are Python numbers or None: a tensor's value may change unseen."""
    return all(type(value) in _PLAIN for value in values)


def shortcut_key(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    companions: tuple[torch.Tensor | None, ...],
    settings: tuple[object, ...],
    window: Sequence[int],
    choice: tuple[Policy | str | None, str, int],
) -> Key:
    """Return everything that the decision of an exact call depends on."""
    policy, backend, calls_per_measurement = choice
    ambient = current_policy() if policy is None else policy
    return (
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        torch.is_grad_enabled(),
        query.requires_grad or key.requires_grad or value.requires_grad,
        _facts(companions[0]),
        _facts(companions[1]),
        _facts(companions[2]),
        settings,
        operator.index(window[0]),
        operator.index(window[1]),
        len(window),
        backend,
        calls_per_measurement,
        ambient if type(ambient) is str else id(ambient),
        _autocast_dtype(query.device.type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        _flash_enabled(),
        _efficient_enabled(),
        _math_enabled(),
        _cudnn_enabled(),
    )


def remember(
    fast_key: tuple[object, ...],
    call: Call,
    decision: Decision,
    policy: Policy,
    named: Policy | str | None,
) -> None:
    """Keep a shortcut for calls whose decision cannot depend on the tensors' values."""
    problem, plan = call.problem, decision.plan
    if policy.head_budgets and problem.len_q > DECODE_ROWS:
        return  # a layer's number, which the key does not hold, could matter
    if named is not None and named is not policy and named not in PRESETS:
        return  # a file, which may change
    group = plan.groups[0]
    exact = len(plan.groups) == 1 and plan.is_exact and group.precision is problem.precision
    if not exact or len(call.batch_shape) != 2:
        return
    autocast = _autocast_dtype(problem.device_type)
    if autocast is not None and (
        autocast is not torch_dtype(problem.precision) or call.tensors.mask is not None
    ):
        return  # something would be cast first
    if len(_DIRECT) >= _KEPT_DIRECT:
        _DIRECT.clear()
    event = AttentionEvent(problem=problem, decision=decision, workspace_bytes=plan.workspace_bytes)
    direct = _shortcut(problem, group)
    if autocast is not None:
        direct = partial(_as_it_is, direct, problem.device_type)
    _DIRECT[fast_key] = (partial(_told, direct, {event.tag: event}, event), policy, named)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast casts to on a device; None while it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _as_it_is(direct: _Direct, device_type: str, *given: torch.Tensor | None) -> torch.Tensor:
    """Return the result of a shortcut in the dtype of its tensors, which autocast gave them."""
    with without_autocast(device_type):
        return direct(*given)


def _told(
    direct: _Direct,
    by_tag: dict[str, AttentionEvent],
    event: AttentionEvent,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    tag: str,
) -> torch.Tensor:
    """Return the result of a shortcut; the sinks, if there are any, get its event.

    Calls of one tag share one event, so that a sink can tell repetitions by identity.
    """
    output = direct(query, key, value, mask, sinks, slopes)
    if has_sinks():
        if tag not in by_tag:
            if len(by_tag) >= _KEPT_TAGS:
                by_tag.clear()
            by_tag[tag] = replace(event, tag=tag)
        emit(by_tag[tag])
    return output


def _shortcut(problem: AttentionProblem, group: HeadGroup) -> _Direct:
    """Return a function of the caller's tensors that runs one decided executor."""
    if goes_through_sdpa(problem, group):
        return partial(
            _sdpa_shortcut,
            dropout_p=problem.dropout_p,
            is_causal=problem.is_causal,
            scale=problem.scale,
            enable_gqa=problem.group_size > 1,
        )
    return partial(_executor_shortcut, load(group.capability), problem, group)


def _sdpa_shortcut(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    **settings: Any,
) -> torch.Tensor:
    """Return PyTorch's own result."""
    return F.scaled_dot_product_attention(query, key, value, _four_dimensional(mask), **settings)


def _four_dimensional(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask as the first call like it had it.

    Checkpointing compares what a recomputation saves with what the forward pass saved.
    """
    return mask if mask is None or mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]


def _executor_shortcut(
    executor: Executor,
    problem: AttentionProblem,
    group: HeadGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Return an executor's output for q, k and v that are canonical already."""
    tensors = Tensors(
        query=query,
        key=key,
        value=value,
        mask=_four_dimensional(mask),
        sinks=sinks,
        alibi_slopes=slopes if slopes is None or slopes.dim() == 2 else slopes.unsqueeze(0),
    )
    return executor(tensors, problem, group).output
