"""Kernels compiled before they are needed: for problems, or for what a model asks for."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from adaattn._events import AttentionEvent, record_events
from adaattn.backends import is_ready
from adaattn.call.choose import decide_exactly
from adaattn.call.describe import without_autocast
from adaattn.call.waiting import without_waiting
from adaattn.errors import ArgumentTypeError, ExecutorError
from adaattn.hardware import probe
from adaattn.hardware.probe import resolve
from adaattn.planning import simplify
from adaattn.policies import PRESETS
from adaattn.spec import AttentionProblem, HeadGroup, Plan
from adaattn.tuning.cell import step_of
from adaattn.tuning.inputs import random_call

__all__ = ["warmup"]

_LOGGER = logging.getLogger("adaattn")


def warmup(
    what: Iterable[AttentionProblem] | Callable[..., object],
    *args: Any,
    device: torch.device | str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **kwargs: Any,
) -> tuple[Plan, ...]:
    """Return the plans of exact calls, after each has run once: what they compile is compiled.

    A first call of a kind compiles for seconds where an executor compiles; later calls, and other
    processes on this machine, find it on disk. Call it before serving, or before a clock runs.
    A plan that fails is logged, and the others go on. What serves only until a kernel is compiled
    is not run once that kernel is, nor by a model that is called: meanwhile calls of other threads
    do not wait either. FlexAttention compiles for one problem alone: what only problems warm still
    waits until calls have paid for that.

    Args:
        what: problems; or a model, or any function, which is called once and whose attention calls
            are taken.
        *args: of that call.
        device: where; None is the current CUDA device where there is one, else the CPU. A model
            is called where it is.
        progress: called with the plan in words, how many are done, and how many there are.
        **kwargs: of the model's call.

    Raises:
        ArgumentTypeError: ``what`` is neither.
        DeviceError: the device is unknown.
        UnsupportedError: a problem has no executor there.

    Example:
        >>> import adaattn
        >>> problem = adaattn.AttentionProblem(batch=1, num_heads=2, num_kv_heads=2, len_q=64,
        ...                                    len_k=64, head_dim=64, value_dim=64)
        >>> [plan.groups[0].capability for plan in adaattn.warmup([problem], device="cpu")]
        ['sdpa.flash']
    """
    chosen = resolve(device)
    problems: list[Any] = [None]
    if callable(what):
        problems = _asked_by(what, args, kwargs)
    elif isinstance(what, Iterable) and not args and not kwargs:
        problems = list(what)
    if not all(isinstance(problem, AttentionProblem) for problem in problems):
        expected = "problems alone, or a model or function with what it is called with"
        raise ArgumentTypeError.got("what", expected, type(what).__name__)
    plain = [simplify(replace(it, device_type=chosen.type)) for it in problems]
    return _run_once(list(dict.fromkeys(plain)), chosen, progress)


def _asked_by(
    model: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[AttentionProblem]:
    """Return the problems of a model's attention calls, in the order of their first."""
    events: list[AttentionEvent] = []
    with record_events(events.append), without_waiting():
        model(*args, **kwargs)
    return [event.problem for event in events]


def _run_once(
    problems: list[AttentionProblem],
    device: torch.device,
    progress: Callable[[str, int, int], None] | None,
) -> tuple[Plan, ...]:
    """Run the plans of problems; return them, each once."""
    facts = probe(device)
    done: list[Plan] = []
    for number, problem in enumerate(problems):
        decision = decide_exactly(problem, facts, PRESETS["quality"], "auto")
        assert decision is not None
        later = decision.later
        for plan in (later, decision.plan):
            if plan is None:
                continue
            if plan is not later and later in done and is_ready(problem, later.groups[0]):
                continue  # nothing waits for it any more
            group = plan.groups[0]
            if progress is not None:
                progress(group.label, number, len(problems))
            try:
                _run_plan(problem, group, device)
            except (ExecutorError, torch.OutOfMemoryError) as error:
                _LOGGER.warning("%s is not warm: %s", group.label, error)
                continue
            done.append(plan)
    if progress is not None:
        progress("", len(problems), len(problems))
    return tuple(dict.fromkeys(done))


def _run_plan(problem: AttentionProblem, group: HeadGroup, device: torch.device) -> None:
    """Run one way of computing a problem, its gradients too where they are wanted."""
    grad = problem.requires_grad
    # In one statement: set_grad_enabled acts when it is made, and inference_mode saves that state.
    with torch.inference_mode(False), torch.set_grad_enabled(grad), without_autocast(device.type):
        step_of(random_call(problem, device), group)()
