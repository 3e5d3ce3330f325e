"""Describe, bind, run, observe: the one way of every call, and the cache that makes it short.

The first call of a kind is described (validated, made canonical), decided, and bound to a
function of its tensors. Calls of the same kind find that function by one lookup. Its key holds
everything that the choice depends on; decoding over a growing cache is one kind for each power
of two of keys.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import torch

from adaattn import hardware
from adaattn._events import AttentionEvent, emit, has_sinks, wants_timing
from adaattn.backends import capabilities_asked_for
from adaattn.backends.common import sdpa
from adaattn.backends.sdpa import goes_through_sdpa
from adaattn.call.adapt import (
    PROCESS,
    Choice,
    adapted,
    decide_approximately,
    is_settled,
    is_transformed,
)
from adaattn.call.arguments import Arguments
from adaattn.call.audit import Outcome, is_lossy
from adaattn.call.describe import Call, build_call, without_autocast
from adaattn.call.history import History
from adaattn.call.outputs import AuxOutput, AuxRequest, requested_flags
from adaattn.call.run import now_ms, run_decision, run_plan, tell
from adaattn.errors import ArgumentError, PlanError, UnsupportedError, expected_got
from adaattn.planning import decide, reasons
from adaattn.planning.plan import DROPOUT_HIDES
from adaattn.policies import PRESETS, current_policy, resolve_policy
from adaattn.spec import (
    AttentionProblem,
    Aux,
    Capability,
    Decision,
    HardwareFacts,
    Method,
    Plan,
    Policy,
)

__all__ = ["Bound", "bind", "bound_calls", "decide_exactly", "decided", "find", "key_of", "policy_key"]

Tensor = torch.Tensor | None
Bound = Callable[..., Any]
"""Takes q, k, v, mask, sinks, slopes, both cu_seqlens and the tag; returns the call's result."""

DECODE_ROWS: Final = 8
"""Up to this many query rows a growing cache is bound once for each power of two of keys."""

_KEPT: Final = 4096
_KEPT_TAGS: Final = 256
_PLAIN: Final = frozenset((int, float, bool, type(None)))
_TRANSFORMED: Final = "inside a torch.func transform nothing can be measured; it ran exactly"

_BOUND: Final[dict[object, tuple[Bound, object]]] = {}
"""Bound calls by key; the values beside them keep identities in the key from being reused."""

hardware.on_clear(_BOUND.clear)

_flash = torch._C._get_flash_sdp_enabled
_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn = torch._C._get_cudnn_sdp_enabled
_deterministic = torch._C._get_deterministic_algorithms
_grad = torch.is_grad_enabled
_autocasts = torch.is_autocast_enabled
_threads = torch.get_num_threads


def bound_calls() -> int:
    """Return how many calls are bound in this process."""
    return len(_BOUND)


def key_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    companions: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    settings: tuple[Any, ...],
    window: Sequence[int],
    choice: tuple[Any, ...],
) -> object:
    """Return everything that the choice for a call depends on; None where that cannot be said.

    Args:
        query: [..., Hq, Sq, D].
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        companions: mask, sinks, slopes, cu_seqlens_q and cu_seqlens_k.
        settings: the numbers and flags that say what is to be computed.
        window: left and right.
        choice: policy, plan, history (by identity), backend, layer, outputs wanted.
    """
    if type(settings[0]) not in _PLAIN or type(settings[1]) not in _PLAIN:
        return None  # a tensor's value may change unseen
    device_type = query.device.type
    cast = torch.get_autocast_dtype(device_type) if _autocasts(device_type) else None
    shapes: tuple[Any, ...]
    if query.shape[-2] <= DECODE_ROWS < key.shape[-2] and companions[3] is None:
        shapes = (query.shape, query.stride(), *_growing(key), *_growing(value))
        mask = companions[0]
        seen = None if mask is None else (*_growing(mask), *_facts(mask)[2:])
    else:
        shapes = (
            query.shape,
            query.stride(),
            key.shape,
            key.stride(),
            value.shape,
            value.stride(),
        )
        seen = _facts(companions[0])
    rest = None
    if not (companions[1] is companions[2] is companions[3] is companions[4] is None):
        rest = (*map(_facts, companions[1:]), companions[3] is companions[4])
    return (
        shapes,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        _grad() and (query.requires_grad, key.requires_grad, value.requires_grad),
        seen,
        rest,
        settings,
        window if type(window) is tuple else tuple(map(operator.index, window)),
        choice,
        cast,
        _deterministic(),
        _threads(),
        _flash(),
        _efficient(),
        _math(),
        _cudnn(),
    )


def find(key: object) -> Bound | None:
    """Return the bound call of a key."""
    known = _BOUND.get(key)
    return None if known is None else known[0]


def bind(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    *,
    policy: Policy | str | None,
    plan: Plan | None,
    backend: str,
    layer: int,
    return_aux: AuxRequest | bool | None,
    history: History | None,
    known_by: object,
) -> Bound:
    """Return the bound call for tensors like these, and remember it.

    Args:
        query: [..., Hq, Sq, D].
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        arguments: what is to be computed.
        policy: what may be lost; None is the ambient one.
        plan: run this, and plan nothing.
        backend: ``"auto"``, or what was asked for.
        layer: index of the caller's layer.
        return_aux: outputs wanted beside the result.
        history: what the caller's earlier calls taught.
        known_by: the key; None remembers nothing.

    Raises:
        AdaAttnError: as `adaattn.scaled_dot_product_attention`.
    """
    if plan is not None and (policy is not None or backend != "auto" or history is not None):
        got = f"{policy!r}, {backend!r}, {history!r}"
        raise ArgumentError(expected_got("policy, backend and history with a plan", "none", got))
    call = build_call(query, key, value, arguments, requested_flags(return_aux))
    resolved = resolve_policy(policy)
    if plan is not None:
        made = _general(arguments, return_aux, layer, lambda c: run_plan(c, plan))
    else:
        made = _chosen(call, arguments, resolved, backend, layer, return_aux, history)
    if is_transformed(query, key, value):
        return made
    if known_by is not None:
        if len(_BOUND) >= _KEPT:
            _BOUND.clear()
        _BOUND[known_by] = (made, (policy, resolved, plan, history))
    return made


def decide_exactly(
    problem: AttentionProblem, facts: HardwareFacts, policy: Policy, backend: str, layer: int = -1
) -> Decision | None:
    """Return the decision that loses nothing; None where only approximations were asked for.

    A decoding step is decided for the next power of two of keys.

    Raises:
        UnsupportedError: what was asked for cannot serve the call.
        PlanError: nothing can.
    """
    allowed = capabilities_asked_for(backend)
    if backend != "auto":
        _check_backend(problem, facts, policy, backend, allowed)
    if all(item.method is not Method.EXACT for item in allowed):
        return None
    if problem.len_q <= DECODE_ROWS < problem.len_k and not problem.num_sequences:
        keys = 1 << (problem.len_k - 1).bit_length()
        mask_shape = tuple(
            keys if place == 3 and size > 1 else size
            for place, size in enumerate(problem.mask_shape)
        )
        problem = replace(problem, len_k=keys, mask_shape=mask_shape)
    return _decide(problem, facts, policy, allowed, layer)


def decided(
    call: Call, policy: Policy, backend: str, layer: int, history: History | None
) -> Decision:
    """Return the decision that a call would follow, numbers measured on it if they matter.

    Raises:
        AdaAttnError: as `adaattn.plan_attention`.
    """
    with without_autocast(call.problem.device_type):
        call = replace(call, problem=replace(call.problem, may_wait=True))
        facts = hardware.probe(call.tensors.query.device)
        exact = decide_exactly(call.problem, facts, policy, backend, layer)
        tensors = call.tensors
        if is_transformed(tensors.query, tensors.key, tensors.value) and exact is not None:
            return exact
        choice = Choice(policy=policy, backend=backend, layer=layer, exact=exact)
        if exact is not None and is_settled(call, choice):
            return exact
        return decide_approximately(call, choice, PROCESS if history is None else history)


@lru_cache(maxsize=1024)
def _decide(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
) -> Decision | None:
    """Return the decision without statistics; None where only a lower format was asked for."""
    try:
        return decide(problem, None, facts, policy, allowed, layer=layer)
    except PlanError:
        if policy.allows_loss and any(item.method is Method.EXACT for item in allowed):
            lower = [p for p in policy.precisions if p.bits < problem.precision.bits]
            if any(
                not reasons(item, replace(problem, precision=p), facts)
                for item in allowed
                for p in lower
            ):
                return None
        raise


def _facts(tensor: Tensor) -> tuple[object, ...]:
    """Return what a choice depends on of an optional tensor."""
    if tensor is None:
        return ()
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        type(tensor),
    )


def _growing(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the shape of keys that grow by a token a call, as it is bound."""
    shape = tensor.shape
    place = -1 if tensor.dtype == torch.bool or shape[-2] <= DECODE_ROWS else -2
    length = max(shape[place] - 1, 0).bit_length() if shape[place] > 1 else -1
    rest = tuple(shape[:place]), tuple(shape[place:][1:])
    return (*rest, length, tensor.stride(-1), tensor.stride(-2) if place == -2 else 0)


def _chosen(
    call: Call,
    arguments: Arguments,
    policy: Policy,
    backend: str,
    layer: int,
    return_aux: AuxRequest | bool | None,
    history: History | None,
) -> Bound:
    """Return the bound call that planning makes."""
    call = _waiting_as_told(call, policy)
    problem = call.problem
    facts = hardware.probe(call.tensors.query.device)
    exact = decide_exactly(problem, facts, policy, backend, layer)
    choice = Choice(policy=policy, backend=backend, layer=layer, exact=exact)
    if policy.allows_loss and is_transformed(
        call.tensors.query, call.tensors.key, call.tensors.value
    ):
        if exact is None:
            raise UnsupportedError(f"backend {backend!r}", [_TRANSFORMED])
        exact = replace(exact, notes=(*exact.notes, _TRANSFORMED))
    elif not is_settled(call, choice) or exact is None:
        kept = PROCESS if history is None else history

        def run(made: Call) -> Outcome:
            return adapted(_waiting_as_told(made, policy), choice, kept)

        return _general(arguments, return_aux, layer, run)
    return _Exact(call, arguments, exact, policy, backend, layer, return_aux).bound()


def _waiting_as_told(call: Call, policy: Policy) -> Call:
    """Return the call, which may wait for the device where its policy checks always."""
    if policy.check != "always" or call.problem.may_wait:
        return call
    return replace(call, problem=replace(call.problem, may_wait=True))


def _general(
    arguments: Arguments,
    return_aux: AuxRequest | bool | None,
    layer: int,
    run: Callable[[Call], Outcome],
) -> Bound:
    """Return a bound call that describes its tensors each time, and runs what it is told."""
    flags = requested_flags(return_aux)

    def bound(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Tensor,
        sinks: Tensor,
        slopes: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        tag: str,
    ) -> Any:
        given = replace(
            arguments,
            attn_mask=mask,
            sinks=sinks,
            alibi_slopes=slopes,
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
        )
        call = build_call(query, key, value, given, flags)
        timed = wants_timing()
        start = now_ms(query.device) if timed else 0.0
        with without_autocast(call.problem.device_type):
            outcome = run(call)
        tell(call, outcome, tag, layer, now_ms(query.device) - start if timed else None)
        return _result(call, outcome, return_aux)

    return bound


class _Exact:
    """A bound exact call: one decision for all calls of its kind."""

    def __init__(
        self,
        call: Call,
        arguments: Arguments,
        decision: Decision,
        policy: Policy,
        backend: str,
        layer: int,
        return_aux: AuxRequest | bool | None,
    ) -> None:
        self._decision = decision
        self._policy = policy
        self._backend = backend
        self._layer = layer
        self._left = decision.calls_before if decision.later is not None else -1
        self._general = _general(arguments, return_aux, layer, self._run)
        self._call = call
        self._plain = not return_aux
        self._by_tag: dict[str, AttentionEvent] = {}
        self._arguments = arguments

    def bound(self) -> Bound:
        """Return the shortest function that does the same."""
        call, problem, tensors = self._call, self._call.problem, self._call.tensors
        group = self._decision.plan.groups[0]
        as_given = (
            self._plain
            and self._left < 0
            and len(call.batch_shape) == 2
            and tensors.query.dim() == 4
            and goes_through_sdpa(problem, group)
            and (tensors.mask is None or problem.device_type == "cpu")
            and not torch.is_autocast_enabled(problem.device_type)
            and self._arguments.attn_mask is tensors.mask
            and tensors.mask_given is self._arguments.attn_mask
        )
        del self._call
        return self._through_sdpa(problem) if as_given else self._general

    def _run(self, call: Call) -> Outcome:
        """Return the outcome of the decision; the one after it, once enough calls paid for it."""
        if self._left == 0:
            later = self._decision.later
            assert later is not None
            self._decision = replace(self._decision, plan=later, later=None)
        self._left -= self._left >= 0
        outcome = run_decision(call, self._decision, self._policy, self._backend)
        if outcome.fallbacks:
            assert outcome.decision is not None
            self._decision = outcome.decision  # what had no room once is not tried at each call
        return outcome

    def _through_sdpa(self, problem: AttentionProblem) -> Bound:
        """Return a function that calls PyTorch's own, and tells the sinks if there are any."""
        dropout_p, is_causal, scale = problem.dropout_p, problem.is_causal, problem.scale
        grouped, general = problem.group_size > 1, self._general
        event = AttentionEvent(
            problem=problem,
            decision=self._decision,
            workspace_bytes=self._decision.workspace_bytes,
            layer=self._layer,
        )

        def bound(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: Tensor,
            sinks: Tensor,
            slopes: Tensor,
            starts_q: Tensor,
            starts_k: Tensor,
            tag: str,
        ) -> Any:
            if has_sinks():
                if wants_timing():
                    return general(query, key, value, mask, None, None, None, None, tag)
                emit(self._told(event, tag))
            try:
                return sdpa(
                    query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
                )
            except torch.OutOfMemoryError:
                return general(query, key, value, mask, None, None, None, None, tag)

        return bound

    def _told(self, event: AttentionEvent, tag: str) -> AttentionEvent:
        """Return the event of a tag: the same each time, so that repetitions tell themselves."""
        known = self._by_tag.get(tag)
        if known is None:
            if len(self._by_tag) >= _KEPT_TAGS:
                self._by_tag.clear()
            known = self._by_tag[tag] = replace(event, tag=tag)
        return known


def _result(call: Call, outcome: Outcome, return_aux: AuxRequest | bool | None) -> Any:
    """Return what the caller gets."""
    output = call.restore(outcome.result.output)
    if not return_aux:
        return output
    result, problem = outcome.result, call.problem

    def restore(tensor: Tensor) -> Tensor:
        return None if tensor is None else call.restore(tensor)

    errors = outcome.head_errors
    decision = outcome.decision
    lossy = decision is not None and is_lossy(decision.plan, problem)
    if errors is None and not lossy:
        errors = torch.zeros(problem.batch, problem.num_heads, device=output.device)
    return output, AuxOutput(
        decision=decision,
        lse=restore(result.lse if Aux.LSE in problem.aux else None),
        row_max=restore(result.row_max),
        entropy=restore(result.entropy),
        weights=restore(result.weights),
        error_estimate=None if errors is None else call.restore(errors.float()),
    )


def _check_backend(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    backend: str,
    allowed: tuple[Capability, ...],
) -> None:
    """Refuse an explicit backend that cannot serve, with every reason."""
    found: list[str] = []
    lossy = policy.allows_loss
    lower = [p for p in policy.precisions if lossy and p.bits < problem.precision.bits]
    for item in allowed:
        against = list(reasons(item, problem, facts))
        if any(not reasons(item, replace(problem, precision=p), facts) for p in lower):
            against = []
        if item.method is not Method.EXACT and not lossy:
            against.append(
                f"it approximates, and policy {policy.name!r} has an error budget of 0; "
                "pass policy='balanced' or a Policy(error_budget=...)"
            )
        if item.method is not Method.EXACT and problem.dropout_p > 0:
            against.append(DROPOUT_HIDES)
        if item.method not in policy.methods:
            against.append(f"policy {policy.name!r} does not use this method")
        if not against:
            return
        found += [f"{item.name}: {reason}" for reason in against]
    raise UnsupportedError(
        f"backend {backend!r}", found, "Pass backend='auto' to let another one serve."
    )


def policy_key(policy: Policy | str | None) -> object:
    """Return what a key holds of a policy; None where it names a file, which may change."""
    if policy is None:
        return id(current_policy())
    if type(policy) is str:
        return policy if policy in PRESETS else None
    return id(policy)
