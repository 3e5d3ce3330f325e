"""Functions of a call's tensors: what binding makes, and what calls of a kind run again.

`general` describes its tensors unless they are like the first call's, runs one decision and
emits an event. `Exact` does the same for one decision that loses nothing, by the shortest
way that there is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from adaattn._events import AttentionEvent, emit, listeners, wants_timing
from adaattn._settings import is_debugging
from adaattn.backends import Result, Tensors, direct, load, num_taken
from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.masks import with_rank
from adaattn.call.arguments import COMPANIONS, Arguments
from adaattn.call.audit import Outcome, is_lossy
from adaattn.call.describe import Call, build_call, without_autocast
from adaattn.call.facts import packed_facts
from adaattn.call.history import History
from adaattn.call.key import Tensor
from adaattn.call.outputs import ROW_OUTPUTS, AuxOutput, AuxRequest, requested_flags
from adaattn.call.packing import packed_bounds
from adaattn.call.run import log_unfused, now_ms, run_decision, tell
from adaattn.call.waiting import Wait
from adaattn.errors import ExecutorError
from adaattn.spec import AttentionProblem, Aux, Decision, Policy

__all__ = ["Bound", "Exact", "general"]

Bound = Callable[..., Any]
"""Takes q, k, v, what stands beside them (`Companions`) and tag; returns the result."""

_KEPT_TAGS: Final = 256
_ALL_TAKEN: Final = 11
"""What a bound call takes, its tag among it."""


def general(
    arguments: Arguments,
    return_aux: AuxRequest | bool | None,
    layer: int,
    run: Callable[[Call], Outcome],
    like: Call | None = None,
    history: History | None = None,
) -> Bound:
    """Return a bound call that runs ``run``.

    Args:
        arguments: what is to be computed.
        return_aux: outputs wanted beside the result.
        layer: index of the caller's layer.
        run: runs a described call.
        like: the first call; where its tensors needed no step to be canonical the others are
            described as it was. None describes each.
        history: its `watch` gets the event of each call.
    """
    alike = None
    if like is not None and _is_as_given(like, arguments):
        alike = _Alike(like.problem, arguments.max_seqlen_q, arguments.max_seqlen_k)
    flags = requested_flags(return_aux)
    # The tensors of the first call would live as long as what is bound.
    arguments = arguments.with_companions((None,) * len(COMPANIONS))

    def bound(*given: Any) -> Any:
        query, key, value, *companions, tag = given
        call = alike.call(*given) if alike is not None else None
        if call is None:
            call = build_call(query, key, value, arguments.with_companions(companions), flags)
        timed = wants_timing()
        start = now_ms(query.device) if timed else 0.0
        with without_autocast(call.problem.device_type):
            outcome = run(call)
        time_ms = now_ms(query.device) - start if timed else None
        tell(call, outcome, tag, layer, time_ms, None if history is None else history.watch)
        return _result(call, outcome, return_aux)

    return bound


class Exact:
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
        history: History | None = None,
    ) -> None:
        self._policy = policy
        self._backend = backend
        self._history = None if history is None or history.watch is None else history
        self._general = general(arguments, return_aux, layer, self._run, history=history)
        self._as_decided = general(
            arguments, return_aux, layer, self._run_as_decided, history=history
        )
        self._is_short = _is_as_given(call, arguments)
        self._return_aux = bool(return_aux)
        shape, device = call.tensors.query.shape[:2], call.tensors.query.device
        self._no_errors = partial(torch.zeros, shape, device=device)
        self._alike = _Alike(call.problem, arguments.max_seqlen_q, arguments.max_seqlen_k)
        self._by_tag: dict[tuple[str, int], AttentionEvent] = {}
        self._event = AttentionEvent(
            problem=call.problem, decision=decision, workspace_bytes=0, layer=layer
        )
        self.follow(decision)
        if backend == "auto":
            log_unfused(call.problem, self._decision)

    def follow(self, decision: Decision) -> None:
        """Run a decision from now on; what need not be compiled any more is run at once."""
        self._wait = Wait.of(self._alike.problem, decision)
        if self._wait is None and decision.later is not None:
            decision = replace(decision, plan=decision.later, later=None)
        self._decision = decision
        self._event = replace(
            self._event, decision=decision, workspace_bytes=decision.workspace_bytes
        )
        self._by_tag.clear()
        self._aux = AuxOutput(decision=decision, _errors=self._no_errors)
        self._direct: Bound | None = None
        self._short: Bound | None = None
        self._meanwhile: Bound | None = None
        self._takes = 0
        if self._is_short:
            self._direct, self._takes = _direct(self._alike, decision)
        if self._wait is not None and self._direct is not None:
            self._meanwhile, self._direct = self._shortest(self._as_decided), None

    def decision_now(self) -> Decision:
        """Return the decision of a call that begins: the later one, once enough paid for it.

        While checkpointed calls are pending, the later one is for this call alone.
        """
        wait, later = self._wait, self._decision.later
        if wait is None or later is None or wait.goes_on():
            return self._decision
        decision = replace(self._decision, plan=later, later=None)
        if wait.is_done:
            self.follow(decision)
        return decision

    @property
    def waits(self) -> bool:
        """Whether a later decision is waited for."""
        return self._decision.later is not None

    def bound(self) -> Bound:
        """Return the shortest function that does what the decision says."""
        if not self._is_short:
            return self._general
        return self._waiting if self._direct is None else self._shortest()

    def _waiting(self, *given: Any) -> Any:
        """Return the result of what waits, until a later decision can be run directly."""
        if self._meanwhile is not None and self.decision_now().later is not None:
            return self._meanwhile(*given)
        if self._direct is None:
            return self._general(*given)
        if self._short is None:
            self._short = self._shortest()
        return self._short(*given)

    def _shortest(self, otherwise: Bound | None = None) -> Bound:
        """Return a function that runs the executor; it takes the general way where that fails."""
        otherwise = otherwise or self._general
        more, by_tag = self._takes - 4, self._by_tag
        served = None if self._history is None else self._history.serve(self, self._event)
        dressed = self._with_aux if self._return_aux else None
        run = self._direct

        def shortest(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Tensor, *rest: Any
        ) -> Any:
            nonlocal run
            watched = listeners()
            if run is None or (watched and watched[0]):  # it wants times
                return otherwise(query, key, value, mask, *rest)
            output: Any = None
            try:
                if more:
                    output = run(query, key, value, mask, *rest[:more])
                else:
                    output = run(query, key, value, mask)
            except (torch.OutOfMemoryError, ExecutorError):
                run = self._direct = None
            if output is None:  # outside of the handler, whose traceback keeps the call's memory
                return otherwise(query, key, value, mask, *rest)
            if served is not None:
                served.calls += 1
            if watched:
                kind = rest[-1], key.shape[2]
                emit(by_tag.get(kind) or self._event_of(*kind))
            return output if dressed is None else dressed(output)

        return shortest

    def _with_aux(self, output: torch.Tensor | Result) -> tuple[torch.Tensor, AuxOutput]:
        """Return the output and what was asked for beside it."""
        if not isinstance(output, Result):
            return output, self._aux
        return output.output, replace(
            self._aux, **{name: getattr(output, name) for name in ROW_OUTPUTS}
        )

    def _run(self, call: Call) -> Outcome:
        """Return the outcome of the decision, or of the later one."""
        return self._outcome(call, self.decision_now())

    def _run_as_decided(self, call: Call) -> Outcome:
        """Return the outcome of the decision."""
        return self._outcome(call, self._decision)

    def _outcome(self, call: Call, decision: Decision) -> Outcome:
        outcome = run_decision(call, decision, self._policy, self._backend)
        if outcome.fallbacks and decision is self._decision:
            assert outcome.decision is not None
            # What had no room once is not tried at each call; what is waited for is waited for.
            self._decision = replace(outcome.decision, later=decision.later)
        return outcome

    def _event_of(self, tag: str, len_k: int) -> AttentionEvent:
        """Return the event of a tag: the same each time, so that repetitions tell themselves."""
        known = self._by_tag.get((tag, len_k))
        if known is None:
            if len(self._by_tag) >= _KEPT_TAGS:
                self._by_tag.clear()
            problem = replace(self._event.problem, len_k=len_k)
            known = replace(self._event, problem=problem, tag=tag)
            self._by_tag[tag, len_k] = known
        return known


def _is_as_given(call: Call, arguments: Arguments) -> bool:
    """Return whether the tensors of a call need no step to be canonical, or one that is known."""
    mask, tensors = arguments.attn_mask, call.tensors
    same_mask = mask is None or (tensors.mask is not None and 2 <= mask.dim() <= 4)
    return (
        len(call.batch_shape) == 2
        and same_mask
        and (tensors.mask is None) == (mask is None)
        and call.is_as_given
        and not torch.is_autocast_enabled(call.problem.device_type)
    )


def _direct(alike: "_Alike", decision: Decision) -> tuple[Bound, int]:
    """Return a function that runs one executor, and how much of a bound call's arguments it takes.

    Its result is None for a call that is not alike.
    """
    problem = alike.problem
    group = decision.plan.groups[0]
    # Debugging goes by `alike`, which checks numbers on a GPU.
    unread = problem.num_sequences or problem.has_blocks or problem.head_terms.value
    by_alike = unread and problem.device_type != "cpu" and is_debugging()
    known = None if by_alike else direct(problem, group)
    if known is not None:
        if problem.num_sequences and problem.device_type == "cpu":
            known = _checked(alike, known)
        return known, num_taken(problem)
    executor = load(group.capability)
    whole = problem.aux is not Aux.NONE

    def through_executor(*given: Any) -> torch.Tensor | Result | None:
        call = alike.call(*given)
        if call is None:
            return None
        result = executor(call.tensors, call.problem, group)
        return result if whole else result.output

    return through_executor, _ALL_TAKEN


def _checked(alike: "_Alike", run: Bound) -> Bound:
    """Return the same for packed sequences on a CPU; bounds that are not the last ones are checked.

    Its result is None for a packing that makes another problem.
    """
    last: object = None

    def checked(*given: Any) -> Any:
        nonlocal last
        starts_q, starts_k = given[6], given[7]
        numbers = starts_q.tolist(), starts_k is starts_q or starts_k.tolist()
        if numbers != last:
            if alike.call(*given) is None:
                return None
            last = numbers
        return run(*given)

    return checked


@dataclass(frozen=True, slots=True)
class _Alike:
    """Describes calls as the first of their kind was: its problem, and the caller's lengths."""

    problem: AttentionProblem
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Tensor,
        sinks: Tensor,
        slopes: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        blocks: BlockList | None = None,
        head_terms: HeadTerms | None = None,
        tag: str = "",
    ) -> Call | None:
        """Return the call of canonical tensors; None where their packing makes another problem."""
        problem = self.problem
        seen = None if mask is None else with_rank(mask, 4)
        if blocks is not None and is_debugging():
            blocks.check()
        if head_terms is not None and is_debugging():
            head_terms.check()
        # On a CPU the numbers of the bounds are read, and checked, at each call.
        bounds_q, bounds_k = packed_bounds(starts_q, starts_k, query, key)
        tensors = Tensors.of(
            query,
            key,
            value,
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            bounds_q=bounds_q,
            bounds_k=bounds_k,
            mask=seen,
            mask_given=mask,
            sinks=sinks,
            alibi_slopes=slopes if slopes is None or slopes.dim() == 2 else slopes.unsqueeze(0),
            blocks=blocks,
            head_terms=head_terms,
        )
        if bounds_q:
            facts = packed_facts(tensors, self.max_seqlen_q, self.max_seqlen_k)
            if any(getattr(problem, name) != value for name, value in facts.items()):
                return None
        if key.shape[2] != problem.len_k:  # a growing cache
            shape = () if seen is None else tuple(seen.shape)
            problem = replace(problem, len_k=key.shape[2], mask_shape=shape)
        leading = tuple(query.shape[:2])
        return Call(tensors=tensors, problem=problem, batch_shape=leading, is_as_given=True)


def _result(call: Call, outcome: Outcome, return_aux: AuxRequest | bool | None) -> Any:
    """Return what the caller gets."""
    output = call.restore(outcome.result.output)
    if not return_aux:
        return output
    result, problem = outcome.result, call.problem
    errors = outcome.head_errors
    decision = outcome.decision
    lossy = decision is not None and is_lossy(decision.plan, problem)
    if errors is None and not lossy:
        errors = torch.zeros(problem.batch, problem.num_heads, device=output.device)
    if not problem.wants(Aux.LSE):
        result = replace(result, lse=None)
    errors = None if errors is None else errors.float()
    return output, AuxOutput.of(result, decision, errors, call.restore)
