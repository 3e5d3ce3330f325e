"""The decision of one call before anything runs: exact by static facts, or by measured numbers."""

from dataclasses import replace
from functools import lru_cache

from adaattn import hardware
from adaattn._numbers import require_integer
from adaattn.backends import capabilities_asked_for
from adaattn.call.adapt import PROCESS, decide_approximately, is_settled, is_transformed
from adaattn.call.choice import Choice
from adaattn.call.describe import Call, without_autocast
from adaattn.call.history import History
from adaattn.call.key import DECODE_ROWS
from adaattn.errors import ArgumentError, ArgumentTypeError, PlanError, UnsupportedError
from adaattn.planning import decide, reasons
from adaattn.planning.unmeasured import DROPOUT_HIDES
from adaattn.spec import AttentionProblem, Capability, Decision, HardwareFacts, Method, Policy

__all__ = ["check_choice", "decide_exactly", "decided"]


def check_choice(backend: object, layer: object, history: object) -> None:
    """Refuse a backend, layer or history of another type.

    Raises:
        ArgumentTypeError: always then.
        ArgumentError: a layer below -1.
    """
    if not isinstance(backend, str):
        raise ArgumentTypeError.got("backend", "a string such as 'auto'", repr(backend))
    require_integer("layer", layer, least=-1)
    if not isinstance(history, History | None):
        raise ArgumentTypeError.got("history", "None or a History", repr(history))


def decide_exactly(
    problem: AttentionProblem, facts: HardwareFacts, policy: Policy, backend: str, layer: int = -1
) -> Decision | None:
    """Return the decision that loses nothing; None where only approximations were asked for.

    A decoding step is decided for the next power of two of keys.

    Raises:
        UnsupportedError: what was asked for cannot serve the call.
        PlanError: nothing can.
        ArgumentError: a memory budget that would make packed sequences matter to one another.
    """
    allowed = capabilities_asked_for(backend)
    if problem.batch_invariant and problem.num_sequences and policy.memory_budget_bytes is not None:
        got = f"{policy.memory_budget_bytes} bytes"
        hint = "how much fits would depend on the other sequences"
        raise ArgumentError.got(
            "memory budget of batch-invariant packed sequences", "None", got, hint
        )
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
    check_choice(backend, layer, history)
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
        may_lose = policy.allows_loss and not problem.batch_invariant
        if may_lose and any(item.method is Method.EXACT for item in allowed):
            lower = [p for p in policy.precisions if p.bits < problem.precision.bits]
            if any(
                not reasons(item, replace(problem, precision=p), facts)
                for item in allowed
                for p in lower
            ):
                return None
        raise


def _check_backend(
    problem: AttentionProblem,
    facts: HardwareFacts,
    policy: Policy,
    backend: str,
    allowed: tuple[Capability, ...],
) -> None:
    """Refuse an explicit backend that cannot serve, with every reason."""
    found: list[str] = []
    lossy = policy.allows_loss and not problem.batch_invariant
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
