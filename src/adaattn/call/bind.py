"""Describe, bind, run, observe: the one way of every call, and the cache that makes it short.

The first call of a kind is described (validated, made canonical), decided, and bound to a
function of its tensors. Calls of the same kind find that function by one lookup. Its key holds
everything that the choice depends on; decoding over a growing cache is one kind for each power
of two of keys.
"""

from dataclasses import replace
from typing import Any, Final

import torch

from adaattn import hardware
from adaattn.call.adapt import PROCESS, adapted, is_settled, is_transformed, repeated
from adaattn.call.arguments import Arguments
from adaattn.call.audit import Outcome, is_lossy
from adaattn.call.bound import Bound, Exact, general
from adaattn.call.choice import Choice, as_it_runs
from adaattn.call.choose import check_choice, decide_exactly
from adaattn.call.describe import Call, build_call
from adaattn.call.given import given
from adaattn.call.history import History
from adaattn.call.key import Choices, may_keep
from adaattn.call.outputs import AuxRequest, requested_flags
from adaattn.call.recomputing import Forwards, is_recomputing
from adaattn.call.run import GIVEN, check_plan, run_decision
from adaattn.errors import ArgumentError, UnsupportedError
from adaattn.policies import PRESETS, resolve_policy
from adaattn.spec import Decision, Plan, Policy

__all__ = ["Bound", "bind", "bound_calls", "find"]

_KEPT: Final = 4096
_TRANSFORMED: Final = "inside a torch.func transform nothing can be measured; it ran exactly"

_BOUND: Final[dict[object, Bound]] = {}
_NAMED: Final[dict[object, object]] = {}
"""What the keys name by identity, which nothing else may take while they are kept."""

find = _BOUND.get
"""Returns the bound call of a key, or None."""


def _forget() -> None:
    """Drop every bound call."""
    _BOUND.clear()
    _NAMED.clear()


hardware.on_clear(_forget)


def bound_calls() -> int:
    """Return how many calls are bound in this process."""
    return len(_BOUND)


def bind(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    choice: Choices,
    known_by: object,
) -> Bound:
    """Return the bound call for tensors like these, and remember it.

    Args:
        query: [..., Hq, Sq, D].
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        arguments: what is to be computed.
        choice: how it is to be planned; a plan excludes policy, backend and history.
        known_by: the key; None remembers nothing.

    Raises:
        AdaAttnError: as `adaattn.scaled_dot_product_attention`.
    """
    policy, plan, history, backend, layer, return_aux = choice
    if torch._C._get_tracing_state() is not None:
        raise UnsupportedError(
            "torch.jit.trace",
            ["plans are made of sizes as numbers, and a trace hides them"],
            "use torch.compile or torch.export, which take these calls",
        )
    check_choice(backend, layer, history)
    if any(map(_has_symbols, (query, key))):
        raise UnsupportedError(
            "symbolic sizes outside of torch.compile and torch.export",
            ["plans are made of sizes as numbers"],
            'use make_fx with tracing_mode="real" or "fake", or torch.export',
        )
    if plan is not None and (policy is not None or backend != "auto" or history is not None):
        got = f"{policy!r}, {backend!r}, {history!r}"
        raise ArgumentError.got("policy, backend and history with a plan", "none of them", got)
    resolved = resolve_policy(policy)
    arguments = arguments.under(resolved)
    call = build_call(query, key, value, arguments, requested_flags(return_aux))
    if plan is not None:
        made = _given(call, arguments, plan, choice)
    else:
        made = _chosen(call, arguments, resolved, choice)
    if known_by is None or is_transformed(query, key, value) or not may_keep(arguments, policy):
        return made
    if len(_BOUND) >= _KEPT:
        _forget()
    _NAMED[known_by] = (policy, resolved, plan, history)
    _BOUND[known_by] = made
    return made


def _has_symbols(tensor: torch.Tensor) -> bool:
    """Return whether the sizes of a tensor are symbols; those of nested ones are refused apart."""
    if getattr(tensor, "is_nested", False):
        return False
    return any(type(size) is not int for size in getattr(tensor, "shape", ()))


def _chosen(call: Call, arguments: Arguments, policy: Policy, asked: Choices) -> Bound:
    """Return the bound call that planning makes."""
    _, _, history, backend, layer, return_aux = asked
    call = _waiting_as_asked(call, policy)
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
        return _Adapting(call, arguments, choice, kept, return_aux)
    return Exact(call, arguments, exact, policy, backend, layer, return_aux, history).bound()


class _Adapting:
    """A bound call that may lose something; exact while there is nothing to decide."""

    def __init__(
        self,
        call: Call,
        arguments: Arguments,
        choice: Choice,
        history: History,
        return_aux: AuxRequest | bool | None,
    ) -> None:
        self._choice = choice
        self._history = history
        self._decided = choice.exact
        self._left = 0
        self._kept: Decision | None = None
        # Where the host waits, numbers say which forward pass is run again.
        may_hold = call.problem.requires_grad and not call.problem.may_wait
        self._forwards = Forwards() if may_hold else None
        policy, backend, layer, exact = choice.policy, choice.backend, choice.layer, choice.exact
        self._full = general(arguments, return_aux, layer, self._run, call, history)
        self._first = general(arguments, return_aux, layer, self._begin, call, history)
        self._again = general(arguments, return_aux, layer, self._repeat, call, history)
        self._quick = self._full
        self._exact: Exact | None = None
        if exact is not None:
            self._exact = Exact(call, arguments, exact, policy, backend, layer, return_aux, history)
            self._quick = self._exact.bound()

    def __call__(self, *given: Any) -> Any:
        """Return the call's result; takes what every bound call takes."""
        joins = None if self._forwards is None else self._forwards.joins()
        if joins is not None:
            return self._again(*given) if joins else self._first(*given)
        if self._left <= 0 or is_recomputing():
            return self._full(*given)
        self._left -= 1
        return self._quick(*given)

    def _run(self, call: Call) -> Outcome:
        """Return the outcome of one call, and see how many may run without a look after it."""
        choice, exact = self._choice, self._exact
        if exact is not None and choice.exact is not None and choice.exact.later is not None:
            now = as_it_runs(choice.exact, exact.decision_now())
            if now is not choice.exact:
                choice = replace(choice, exact=now)
                if not exact.waits:  # else the later one is for this call alone
                    self._choice = choice
        outcome = adapted(_waiting_as_asked(call, choice.policy), choice, self._history)
        self._left = outcome.exact_calls_next
        decision = outcome.decision
        is_new = decision is not self._decided and choice is self._choice
        if self._left and exact and decision is not None and is_new:
            self._decided = decision
            exact.follow(decision)
            self._quick = exact.bound()
        return outcome

    def _begin(self, call: Call) -> Outcome:
        """Return the outcome of a checkpointed call; the next ones and backward do as it did."""
        if self._left > 0 and self._exact is not None and not is_recomputing():
            self._left -= 1
            policy, backend = self._choice.policy, self._choice.backend
            outcome = run_decision(call, self._exact.decision_now(), policy, backend)
        else:
            outcome = self._run(call)
        self._kept = outcome.decision
        return outcome

    def _repeat(self, call: Call) -> Outcome:
        """Return the outcome of a checkpointed call beside others, or of one run again."""
        if self._kept is None:  # the first one raised
            return self._begin(call)
        if self._left > 0 and not is_recomputing():
            self._left -= 1
        return repeated(call, self._choice, self._history, self._kept)


def _given(call: Call, arguments: Arguments, plan: Plan, asked: Choices) -> Bound:
    """Return the bound call that follows a plan which the caller made."""
    *_, layer, return_aux = asked
    check_plan(call, plan)
    own = plan.groups[0].scheme.inputs is call.problem.precision
    if len(plan.groups) > 1 or not own or is_lossy(plan, call.problem):
        followed = given(plan, call.problem.without_layout())
        return general(arguments, return_aux, layer, followed.run)
    decision = Decision(plan=plan, notes=(GIVEN,))
    policy = PRESETS["quality"]
    return Exact(call, arguments, decision, policy, GIVEN, layer, return_aux).bound()


def _waiting_as_asked(call: Call, policy: Policy) -> Call:
    """Return the call, which may wait for the device where its policy checks always."""
    if policy.check != "always" or call.problem.may_wait:
        return call
    return replace(call, problem=replace(call.problem, may_wait=True))
