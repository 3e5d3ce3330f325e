"""One module's calls: the policy that they follow, what they taught, the statistics they leave."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import torch

from adaattn._events import AttentionEvent, record_events
from adaattn.attention.memory import CallMemory, is_recomputing
from adaattn.attention.precision_mode import checked_mode, in_mode
from adaattn.attention.statistics import AttentionStatistics
from adaattn.deciding import is_transformed
from adaattn.errors import NonFiniteError
from adaattn.functional import plan_attention, scaled_dot_product_attention
from adaattn.outputs import AuxRequest
from adaattn.policies import PRESETS, resolve_policy
from adaattn.spec import Decision, Plan, Policy, Precision

__all__ = ["Runner"]

_EXACT: Final = PRESETS["quality"]
_NOT_FINITE: Final = "the input was not finite, so nothing could be measured: computed exactly"


class Runner:
    """Runs attention for one module.

    Under an error budget it remembers: statistics measured on one call serve the next ones,
    a head keeps its method until another is clearly better, and a forward pass that activation
    checkpointing runs again in backward follows the plan that it had the first time. Input that
    is not finite cannot be measured: with ``backend="auto"`` such a call is computed exactly,
    and the statistics count the reason in ``fallback_reasons``.

    Args:
        policy: what its calls may lose; None follows the ambient policy.
        backend: as for `adaattn.scaled_dot_product_attention`.
        layer: the module's index in its model, for calibrated budgets and events; -1 is none.
        precision_mode: ``"auto"`` leaves the number format to the policy; a format by name is
            used where the device computes in it, else the input's own is kept and the
            statistics say why.
        measure_every: calls of one problem from one measurement to the next.
        momentum: share of the old value in each running statistic.
        fused_on_gpu: False keeps calls on a GPU off fused kernels.

    Attributes:
        plan: a plan for every call; None plans each. With one the module traces into one
            graph under ``torch.compile(fullgraph=True)``.
        statistics: of the calls so far.

    Raises:
        PolicyError: an unknown policy.
        ArgumentError: an unknown precision mode, or a number out of range.
    """

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        backend: str = "auto",
        layer: int = -1,
        precision_mode: str = "auto",
        measure_every: int = 8,
        momentum: float = 0.5,
        fused_on_gpu: bool = True,
    ) -> None:
        self.policy = None if policy is None else resolve_policy(policy)
        self.backend = backend
        self.layer = layer
        self.precision_mode = checked_mode(precision_mode)
        self.fused_on_gpu = fused_on_gpu
        self.plan: Plan | None = None
        self.statistics = AttentionStatistics()
        self._memory = CallMemory(measure_every=measure_every, momentum=momentum)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        need_weights: bool = False,
        training: bool = False,
        **semantics: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output [B, Hq, Sq, Dv], weights [B, Hq, Sq, Sk] or None).

        Args:
            query: [B, Hq, Sq, D].
            key: [B, Hkv, Sk, D].
            value: [B, Hkv, Sk, Dv].
            need_weights: return the softmax weights too.
            training: gradients may be wanted later though none are followed now, as in the
                forward pass of a reentrant checkpoint: formats that training may not use are
                left out.
            **semantics: keywords of `adaattn.scaled_dot_product_attention` that say what is to
                be computed.
        """
        call = _Call(query, key, value, need_weights, training, semantics)
        if torch.compiler.is_compiling():
            if self.plan is not None:
                return self._planned(call)
            outside: Any = torch.compiler.disable(self._run)
            return outside(call)  # type: ignore[no-any-return]
        return self._run(call)

    def reset(self) -> None:
        """Forget the statistics and all that was learnt."""
        self.statistics.reset()
        self._memory.reset()

    def decision(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **semantics: Any
    ) -> Decision:
        """Return the decision that the next call with these tensors would follow; see `run`."""
        return plan_attention(
            query,
            key,
            value,
            policy=self.policy,
            backend=self._backend_of(query),
            layer=self.layer,
            history=self._memory.history(),
            **semantics,
        )

    def _run(self, call: "_Call") -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what `run` returns, in the format of the precision mode."""

        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
            cast = call._replace(query=query, key=key, value=value)
            if self.plan is None:
                return self._adapted(cast)
            with record_events(self._count):
                return self._planned(cast)

        found, note = in_mode(self.precision_mode, call.query, call.key, call.value, run)
        if note:
            self.statistics.note_precision(note)
        output, weights = found
        return output, weights

    def _planned(self, call: "_Call") -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the module's plan computes."""
        return _called(call, {"plan": self.plan, "tag": self._tag})

    def _adapted(self, call: "_Call") -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what planning decides from the call and from what earlier calls taught."""
        policy = resolve_policy(self.policy)
        if policy.allows_loss and call.may_need_gradients_later:
            policy = _without_fp16(policy)
        backend = self._backend_of(call.query)
        settings: dict[str, Any] = {"policy": policy, "backend": backend, "tag": self._tag}
        if not policy.allows_loss or is_transformed(call.query, call.key, call.value):
            with record_events(self._count):
                return _called(call, settings)
        try:
            return self._remembered(call, settings)
        except NonFiniteError:
            if backend != "auto":
                raise
            # Training skips such steps itself; a module that raised would hang other ranks.
            self.statistics.note_fallback(_NOT_FINITE)
            with record_events(self._count):
                return _called(call, settings | {"policy": _EXACT})

    def _remembered(
        self, call: "_Call", settings: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what planning decides with what is remembered, and take in what it measured."""
        history = self._memory.history()
        if is_recomputing():
            repeat = self._memory.recalled(_fingerprint(call))
            found = _called(call, settings | {"history": replace(history, repeat=repeat)})
            self.statistics.record_recomputed()
            return found
        events: list[AttentionEvent] = []
        with record_events(events.append):
            found = _called(call, settings | {"history": history})
        for event in events:
            self.statistics.record(event)
            if self._memory.learns_from(event):
                recomputable = torch.is_grad_enabled() or call.may_need_gradients_later
                self._memory.learn(event, _fingerprint(call) if recomputable else None)
        return found

    def _count(self, event: AttentionEvent) -> None:
        """Count an exact call, or its recomputation."""
        if is_recomputing():
            self.statistics.record_recomputed()
        else:
            self.statistics.record(event)

    def _backend_of(self, query: torch.Tensor) -> str:
        """Return the executor asked for, or ``"auto"``."""
        plain = query.is_cuda and not self.fused_on_gpu and self.backend == "auto"
        return "unfused" if plain else self.backend

    @property
    def _tag(self) -> str:
        """The name of the module's calls in events."""
        return f"layer{self.layer}" if self.layer >= 0 else ""


@lru_cache(maxsize=64)
def _without_fp16(policy: Policy) -> Policy:
    """Return the policy without a format that training may not use; the same object each time."""
    kept = tuple(item for item in policy.precisions if item is not Precision.FP16)
    return replace(policy, precisions=kept)


class _Call(NamedTuple):
    """What one call is given."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    need_weights: bool
    training: bool
    semantics: dict[str, Any]

    @property
    def may_need_gradients_later(self) -> bool:
        """Whether gradients are not followed now and may be wanted of a recomputation."""
        tensors = (self.query, self.key, self.value)
        wanted = self.training or any(item.requires_grad for item in tensors)
        return wanted and not torch.is_grad_enabled()


def _called(call: _Call, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, weights or None) of the public call."""
    attend = partial(
        scaled_dot_product_attention,
        call.query,
        call.key,
        call.value,
        **call.semantics,
        **settings,
    )
    if not call.need_weights:
        return attend(), None
    output, found = attend(return_aux=AuxRequest(weights=True))
    return output, found.weights


def _fingerprint(call: _Call) -> tuple[object, ...]:
    """Return what a recomputed call knows its forward pass by: settings, shapes, sums."""
    said: list[object] = []
    sums = []
    tensors = (("q", call.query), ("k", call.key), ("v", call.value))
    for name, item in (*tensors, *sorted(call.semantics.items())):
        if not isinstance(item, torch.Tensor):
            said.append((name, item))
            continue
        said.append((name, tuple(item.shape), item.dtype))
        if item.numel():
            sums.append(item.detach().sum(dtype=torch.float64))
    return (*said, *(torch.stack(sums).tolist() if sums else ()))
