"""One event for each attention call, delivered to the sinks of the current context.

Without a sink a call costs one lookup (`listeners`). A sink sees; it cannot change a
plan, and one that raises is logged and never stops a call. Under ``torch.compile`` no
events are emitted: a graph has no place for them.
"""

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from adaattn.errors import ArgumentTypeError
from adaattn.spec import AttentionProblem, Decision, TensorStats

_LOGGER = logging.getLogger("adaattn")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionEvent:
    """What one call was, what was chosen, and what it cost.

    Args:
        problem: the static facts of the call.
        decision: plan and reasons.
        workspace_bytes: predicted memory beside inputs and output.
        fallbacks: each step down that was taken, as a sentence.
        error_estimate: largest error over heads found on sampled rows, or estimated; None if exact.
        head_errors: the same per query head (maximum over the batch); empty if exact.
        earlier_errors: what an audit of an earlier call found, per query head, 0 for exact ones; it
            has arrived since, where the host may not wait for it. Empty where none has.
        earlier_over: query heads that it found over their budget.
        repaired_heads: query heads that an audit found over budget; they were computed exactly.
        stats: the numbers measured on the tensors of this very call, else None.
        saved_ms: time that approximations of this problem were measured to have saved since the
            last such event, choosing and checking counted; negative is a loss.
        time_ms: wall time (device time included) when a sink asked for it, else None.
        tag: what the caller named the call; "" if nothing.
        layer: the caller's index of its layer; -1 if none.
    """

    problem: AttentionProblem
    decision: Decision
    workspace_bytes: int
    fallbacks: tuple[str, ...] = ()
    error_estimate: float | None = None
    head_errors: tuple[float, ...] = ()
    earlier_errors: tuple[float, ...] = ()
    earlier_over: tuple[int, ...] = ()
    repaired_heads: tuple[int, ...] = ()
    stats: TensorStats | None = None
    saved_ms: float = 0.0
    time_ms: float | None = None
    tag: str = ""
    layer: int = -1

    @property
    def entropy_bits(self) -> tuple[float, ...]:
        """Mean row entropy per query head where it was measured, else empty."""
        return self.stats.entropy_bits if self.stats else ()

    def __str__(self) -> str:
        """Return a short block: what was called, what ran and why it was allowed, what it cost."""
        problem, plan = self.problem, self.decision.plan
        name = self.tag or ("" if self.layer < 0 else f"layer {self.layer}")
        lines = [
            f"attention{name and f' of {name}'}: B {problem.batch}, Hq {problem.num_heads}, "
            f"Hkv {problem.num_kv_heads}, Sq {problem.len_q}, Sk {problem.len_k}, "
            f"D {problem.head_dim}, Dv {problem.value_dim}, {problem.precision.label}, "
            f"{problem.device_type}"
        ]
        for group in plan.groups:
            heads = f"heads {', '.join(map(str, group.heads))}" if group.heads else "all heads"
            lines.append(f"{heads} by {group.label}")
        lines.append(f"policy {self.decision.policy or 'none'}, {plan.shown_budget}")
        if self.error_estimate is not None:
            lines.append(f"largest error {self.error_estimate:.2g}")
        if self.repaired_heads:
            lines.append(
                f"computed again exactly: heads {', '.join(map(str, self.repaired_heads))}"
            )
        if self.saved_ms:
            lines.append(f"saved {self.saved_ms:.3g} ms so far, measured")
        if self.time_ms is not None:
            lines.append(f"took {self.time_ms:.3g} ms")
        return "\n  ".join([*lines, *self.fallbacks])


Sink = Callable[[AttentionEvent], None]

_SINKS: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "adaattn_sinks", default=()
)


listeners = _SINKS.get
"""Returns (whether one of them wants times, each sink); () where nobody listens."""


def wants_timing() -> bool:
    """Return whether a sink asked for time, which costs a device synchronisation a call."""
    return listeners()[:1] == (True,)


def emit(event: AttentionEvent) -> None:
    """Deliver an event to every sink; a failing sink is logged."""
    for sink in listeners()[1:]:
        try:
            sink(event)
        except Exception:
            _LOGGER.exception("an event sink failed; the attention call goes on")


@contextlib.contextmanager
def record_events(sink: Sink, *, timing: bool = False) -> Iterator[None]:
    """Send every event inside the ``with`` block to ``sink``.

    Args:
        sink: a callable that takes an `AttentionEvent`, such as ``list.append``.
        timing: measure each call's wall time; this synchronises the device twice a call.

    Raises:
        ArgumentTypeError: ``sink`` cannot be called.

    Example:
        >>> import adaattn, torch
        >>> events = []
        >>> x = torch.randn(1, 2, 8, 16)
        >>> with adaattn.record_events(events.append):
        ...     _ = adaattn.scaled_dot_product_attention(x, x, x)
        >>> len(events)
        1
    """
    if not callable(sink):
        raise ArgumentTypeError.got("sink", "a callable that takes an event", repr(sink))
    token = add_sink(sink, timing=timing)
    try:
        yield
    finally:
        remove_sink(token)


@contextlib.contextmanager
def no_events() -> Iterator[None]:
    """Send no event from inside the ``with`` block: what runs there is nobody's call."""
    token = _SINKS.set(())
    try:
        yield
    finally:
        _SINKS.reset(token)


def add_sink(sink: Sink, *, timing: bool = False) -> contextvars.Token[Any]:
    """Send events to a sink until its token is given to `remove_sink`; without a ``with``."""
    earlier = listeners()
    if earlier:
        timing = timing or earlier[0]
    return _SINKS.set((timing, *earlier[1:], sink))


remove_sink = _SINKS.reset
