"""The decision of one call: cached where static facts decide it, measured where numbers must."""

import struct
import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from adaattn import hardware
from adaattn.backends import capabilities_asked_for
from adaattn.errors import PlanError, UnsupportedError
from adaattn.measure import check_finite, measure
from adaattn.planning import FP16_SAFE, decide, head_budgets, reasons, worth_measuring
from adaattn.planning.plan import DROPOUT_HIDES
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Decision,
    HardwareFacts,
    History,
    Method,
    Policy,
    TensorStats,
    Way,
)
from adaattn.validation import Call, without_autocast

__all__ = ["DECODE_ROWS", "Decided", "decide_call", "is_transformed"]

DECODE_ROWS: Final = 8
"""Up to this many query rows a growing cache is decided once for each power of two of keys."""

_TRANSFORMED: Final = "inside a torch.func transform nothing can be measured; it ran exactly"


class Decided(NamedTuple):
    """A decision, and what it rests on.

    Args:
        decision: the plan and its reasons.
        stats: numbers measured on this call; None if there are none.
        is_settled: calls with the same static facts are decided alike, whatever they hold.
        audit_seed: of the audited rows. It follows from the tensors' largest element: other
            tensors are audited on other rows, the same ones again on the same.
    """

    decision: Decision
    stats: TensorStats | None = None
    is_settled: bool = False
    audit_seed: int = 1


def decide_call(
    call: Call, policy: Policy, backend: str, layer: int, history: History | None = None
) -> Decided:
    """Return the decision for a call; measures only if an approximation could pay.

    Args:
        call: checked and canonical.
        policy: what may be lost.
        backend: ``"auto"``, or what was asked for.
        layer: which layer's budgets to take from a calibrated policy.
        history: what the caller's earlier calls taught.

    Raises:
        UnsupportedError: what was asked for cannot serve the call.
        PlanError: nothing can.
        NonFiniteError: q, k or v is not finite, and an approximation was to be measured.
    """
    with without_autocast(call.problem.device_type):
        return _decided(call, policy, backend, layer, history)


def _decided(
    call: Call, policy: Policy, backend: str, layer: int, history: History | None
) -> Decided:
    """Return what `decide_call` returns, autocast switched off."""
    if history is not None and history.repeat is not None:
        return Decided(history.repeat, audit_seed=_audit_seed(check_finite(call.tensors)))
    problem = call.problem
    facts = hardware.probe(call.tensors.query.device)
    allowed = capabilities_asked_for(backend)
    if backend != "auto":
        _check_backend(problem, facts, policy, backend, allowed)
    if not policy.allows_loss:
        return Decided(_decide_cached(problem, facts, policy, allowed, layer), None, True)
    if is_transformed(call.tensors.query, call.tensors.key, call.tensors.value):
        decision = _decide_cached(problem, facts, policy, allowed, layer)
        return Decided(replace(decision, notes=(*decision.notes, _TRANSFORMED)))
    try:
        return _decided_with_budget(call, policy, allowed, layer, history or History())
    except PlanError as error:
        if backend == "auto":
            raise
        raise UnsupportedError(f"backend {backend!r}", error.trace) from error


def _decided_with_budget(
    call: Call,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
    history: History,
) -> Decided:
    """Return the decision under an error budget: from static facts, from history, or measured."""
    problem = call.problem
    facts = hardware.probe(call.tensors.query.device)
    forced = all(item.method is not Method.EXACT for item in allowed)
    shared = history.calls_per_measurement
    if not worth_measuring(
        problem, facts, policy, allowed, forced=forced, calls_per_measurement=shared
    ):
        return Decided(_decide_cached(problem, facts, policy, allowed, layer), None, True)
    magnitude = check_finite(call.tensors)
    safe = magnitude <= FP16_SAFE
    wanted = worth_measuring(
        problem,
        facts,
        policy,
        allowed,
        forced=forced,
        fp16_safe=safe,
        calls_per_measurement=shared,
    )
    if not wanted:
        return Decided(_decide_cached(problem, facts, policy, allowed, layer))
    earlier = history.of(problem)
    ways = earlier.ways if earlier else ()
    if earlier is not None and earlier.stats is not None and not forced:
        known = replace(earlier.stats, max_magnitude=0.0 if safe else magnitude)
        decision = _decide_measured(problem, known, facts, policy, allowed, layer, ways)
        return Decided(decision, audit_seed=_audit_seed(magnitude))
    stats, _ = measure(
        call.tensors,
        problem,
        wanted,
        max(policy.audit_rows // 2, 1),
        max_magnitude=magnitude,
        policy=policy,
        budgets=() if forced else head_budgets(policy, problem.num_heads, layer),
    )
    decision = decide(problem, stats, facts, policy, allowed, layer=layer, forced=forced, ways=ways)
    return Decided(decision, stats, audit_seed=_audit_seed(magnitude))


def _audit_seed(magnitude: float) -> int:
    """Return a seed above 0 that the largest element of q, k and v decides."""
    return 1 + zlib.crc32(struct.pack("d", magnitude)) % 65536


def is_transformed(*tensors: torch.Tensor) -> bool:
    """Return whether a transform of ``torch.func`` hides the numbers that measuring reads."""
    hidden = torch._C._functorch.is_functorch_wrapped_tensor
    return any(hidden(item) for item in tensors)


def _decide_cached(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
) -> Decision:
    """Return the decision that needs no statistics.

    A decoding step is decided for the next power of two of keys: a growing cache would
    otherwise be decided anew at each token.
    """
    if problem.len_q <= DECODE_ROWS < problem.len_k and not problem.num_sequences:
        keys = 1 << (problem.len_k - 1).bit_length()
        mask_shape = tuple(
            keys if place == 3 and size > 1 else size
            for place, size in enumerate(problem.mask_shape)
        )
        problem = replace(problem, len_k=keys, mask_shape=mask_shape)
    return _decide_whole(problem, facts, policy, allowed, layer)


@lru_cache(maxsize=1024)
def _decide_whole(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
) -> Decision:
    """Return the decision for exactly this problem."""
    return decide(problem, None, facts, policy, allowed, layer=layer)


@lru_cache(maxsize=256)
def _decide_measured(
    problem: AttentionProblem,
    stats: TensorStats,
    facts: HardwareFacts,
    policy: Policy,
    allowed: tuple[Capability, ...],
    layer: int,
    ways: tuple[Way, ...],
) -> Decision:
    """Return the decision from numbers that an earlier call measured."""
    return decide(problem, stats, facts, policy, allowed, layer=layer, ways=ways)


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
