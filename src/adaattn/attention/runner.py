"""One module's calls: the policy that they follow, what they taught, the statistics they leave."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final

import torch

from adaattn._events import AttentionEvent, add_sink, remove_sink
from adaattn._numbers import require_integer
from adaattn.attention.precision_mode import MODES, checked_mode, in_precision
from adaattn.attention.statistics import AttentionStatistics
from adaattn.call.history import History
from adaattn.call.outputs import AuxRequest
from adaattn.call.recomputing import is_recomputing
from adaattn.functional import plan_attention, scaled_dot_product_attention
from adaattn.policies import AMBIENT, PolicyLike, resolve_policy
from adaattn.spec import Decision, Plan, Policy, Precision

__all__ = ["Runner"]

_WEIGHTS: Final = AuxRequest(weights=True)


class Runner:
    """Runs attention for one module.

    Its history makes measuring serve many calls and keeps heads from flickering between
    methods. Input that is not finite cannot be measured: such a call is computed exactly.

    Args:
        policy: what its calls may lose; None follows the ambient policy.
        backend: as for `adaattn.scaled_dot_product_attention`.
        layer: the module's index in its model, for calibrated budgets and events; -1 is none.
        precision_mode: ``"auto"`` leaves the number format to the policy; a format by name is
            used, and the statistics say where the device gains nothing by it. One in which no
            executor computes is refused by the call.
        measure_every: calls of one problem from one measurement to the next.
        momentum: share of the old value in each running statistic.
        fused_on_gpu: False keeps calls on a GPU off fused kernels.

    Attributes:
        plan: a plan for every call; None plans each.
        statistics: of the calls so far.

    Raises:
        PolicyError: an unknown policy.
        ArgumentError: an unknown precision mode, or a number out of range.
        ArgumentTypeError: no integer, no number, or no string.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        backend: str = "auto",
        layer: int = -1,
        precision_mode: str = "auto",
        measure_every: int = 8,
        momentum: float = 0.5,
        fused_on_gpu: bool = True,
    ) -> None:
        require_integer("layer", layer, least=-1)
        self.policy = None if policy is None else resolve_policy(policy)
        self.backend = backend
        self.layer = layer
        self.precision_mode = checked_mode(precision_mode)
        self.fused_on_gpu = fused_on_gpu
        self.plan: Plan | None = None
        self.statistics = AttentionStatistics()
        self._history = History(measure_every=measure_every, momentum=momentum)
        self._tag = f"layer{layer}" if layer >= 0 else ""
        self._judged: Policy | None = None
        self._may_lose = False

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
        compiling = torch.compiler.is_compiling()
        if self.layer >= 0:
            semantics["tag"], semantics["layer"] = self._tag, self.layer
        if need_weights:
            semantics["return_aux"] = _WEIGHTS
        if self.plan is not None:
            semantics["plan"] = self.plan
        else:
            if self.policy is not None:
                semantics["policy"] = self.policy
            backend = self.backend if self.fused_on_gpu else self._backend_of(query)
            if backend != "auto":
                semantics["backend"] = backend
            if not compiling:
                policy = AMBIENT.get() if self.policy is None else self.policy
                if policy is not self._judged:
                    self._judged, self._may_lose = policy, policy.allows_loss
                if self._may_lose:
                    semantics |= self._learning(policy, query, key, value, training)
        token = None if compiling else add_sink(self._count)
        try:
            if self.precision_mode == "auto":
                found = scaled_dot_product_attention(query, key, value, **semantics)
            else:
                run = partial(scaled_dot_product_attention, **semantics)
                found, note = self._in_mode(query, key, value, run)
                if note:
                    self.statistics.note_precision(note)
        finally:
            if token is not None:
                remove_sink(token)
        if not need_weights:
            return found, None
        output, aux = found
        return output, aux.weights

    def reset(self) -> None:
        """Forget the statistics and all that was learnt."""
        self.statistics.reset()
        self._history.reset()

    def decision(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **semantics: Any
    ) -> Decision:
        """Return the decision that the next call with these tensors would follow; see `run`.

        A ``plan`` of the runner's own is left aside.

        Raises:
            UnsupportedError: no executor computes in the precision mode on this device.
        """
        decide = partial(
            plan_attention,
            policy=self.policy,
            backend=self._backend_of(query),
            layer=self.layer,
            history=self._history,
            **semantics,
        )
        found: Decision = self._in_mode(query, key, value, decide)[0]
        return found

    def _learning(
        self,
        policy: Policy,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        training: bool,
    ) -> dict[str, Any]:
        """Return the keywords of a call that may lose something: it has a history."""
        history = self._history
        wanted = training or query.requires_grad or key.requires_grad or value.requires_grad
        history.may_be_recomputed = wanted and not torch.is_grad_enabled()
        if not history.may_be_recomputed:
            return {"history": history}
        return {"history": history, "policy": _without_fp16(policy)}

    def _in_mode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any],
    ) -> tuple[Any, str]:
        """Return what ``run`` gives in the format of the precision mode, and a note or ""."""
        mode = self.precision_mode
        return in_precision(f"precision_mode {mode!r}", MODES[mode], query, key, value, run)

    def _count(self, event: AttentionEvent) -> None:
        """Count a call, or its recomputation."""
        if is_recomputing():
            self.statistics.record_recomputed()
        else:
            self.statistics.record(event)
            if event.decision.unmeasured:
                self.statistics.note_fallback(event.decision.unmeasured)

    def _backend_of(self, query: torch.Tensor) -> str:
        """Return the executor asked for, or ``"auto"``."""
        plain = not self.fused_on_gpu and query.is_cuda and self.backend == "auto"
        return "unfused" if plain else self.backend


@lru_cache(maxsize=64)
def _without_fp16(policy: Policy) -> Policy:
    """Return the policy without a format that training may not use; the same object each time."""
    kept = tuple(item for item in policy.precisions if item is not Precision.FP16)
    return replace(policy, precisions=kept)
