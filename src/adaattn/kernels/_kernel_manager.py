"""Which executor serves a problem, and why: a cached view of planning."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import torch

from adaattn import hardware
from adaattn.backends import capabilities
from adaattn.call.describe import Arguments, build_call
from adaattn.errors import ArgumentTypeError
from adaattn.functional import plan_attention
from adaattn.hardware.probe import resolve
from adaattn.planning import decide, reasons
from adaattn.policies import PolicyLike, resolve_policy
from adaattn.spec import AttentionProblem, Capability, Decision, HardwareFacts, Policy

_FUSED: Final = frozenset(item.name for item in capabilities() if item.is_fused)

_KEPT: Final = 256


class CacheInfo(NamedTuple):
    """How often a selection was known already."""

    hits: int
    misses: int
    maxsize: int | None
    currsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The executors that serve a problem.

    Args:
        names: one, or several that share out the heads.
        decision: the plan, and the fate of every candidate.
    """

    names: tuple[str, ...]
    decision: Decision

    @property
    def name(self) -> str:
        """The executor of the most heads."""
        groups = self.decision.plan.groups
        return max(groups, key=lambda group: len(group.heads)).capability

    @property
    def is_fused(self) -> bool:
        """Whether every head is served by a fused kernel."""
        return _FUSED.issuperset(self.names)

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence for each candidate, the accepted ones first."""
        ordered = sorted(self.decision.trace, key=lambda entry: not entry.accepted)
        return tuple(f"{entry.candidate}: {entry.reason}" for entry in ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """One executor on one device.

    Args:
        name: what ``backend=`` takes.
        is_fused: it counts as flash in statistics.
        refusals: why it cannot serve there, one sentence each; () if it can.
    """

    name: str
    is_fused: bool
    refusals: tuple[str, ...]

    @property
    def is_available(self) -> bool:
        """Whether nothing stands against it."""
        return not self.refusals


class AttentionKernelManager:
    """Selects executors as the public call would, and remembers selections.

    Args:
        device: as for `CUDAManager`; for problems given without tensors.
        policy: what a call may lose; None is the ambient policy of the moment.

    Raises:
        DeviceError: there is no such device.
        PolicyError: there is no such policy.

    Example:
        >>> import torch
        >>> manager = AttentionKernelManager("cpu", policy="quality")
        >>> x = torch.randn(1, 4, 64, 32)
        >>> manager.select(x, x, x, is_causal=True).name
        'sdpa.flash'
    """

    def __init__(
        self, device: torch.device | str | None = None, *, policy: PolicyLike | None = None
    ) -> None:
        self.device = resolve(device)
        self.policy = None if policy is None else resolve_policy(policy)
        self._known = lru_cache(maxsize=_KEPT)(_decided)

    def select(
        self,
        query: torch.Tensor | AttentionProblem,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        **semantics: Any,
    ) -> KernelChoice:
        """Return the executors for a problem, or for tensors, and why.

        A policy without a loss, and a problem without tensors, are decided once and
        remembered. With a loss allowed, tensors are measured each time, as a call does.

        Args:
            query: [..., Hq, Sq, D], or the whole problem.
            key: [..., Hkv, Sk, D].
            value: [..., Hkv, Sk, Dv].
            **semantics: keywords of `adaattn.scaled_dot_product_attention` that say what is to
                be computed; unknown ones are refused.

        Raises:
            ArgumentTypeError: an unknown keyword, or a problem with tensors or keywords.
            PlanError: nothing can serve.
            AdaAttnError: as `adaattn.plan_attention`.
        """
        policy = resolve_policy(self.policy)
        if isinstance(query, AttentionProblem):
            if key is not None or value is not None or semantics:
                raise ArgumentTypeError.got(
                    "arguments beside a problem", "none", "key, value or keywords"
                )
            return self._known(query, hardware.probe(self.device), policy)
        key, value = cast(torch.Tensor, key), cast(torch.Tensor, value)
        unknown = sorted(set(semantics) - set(Arguments.__dataclass_fields__))
        if policy.error_budget > 0 or policy.head_budgets or unknown:
            return _as_choice(plan_attention(query, key, value, policy=policy, **semantics))
        call = build_call(query, key, value, Arguments(**semantics))
        return self._known(call.problem, hardware.probe(call.tensors.query.device), policy)

    def kernels(self, problem: AttentionProblem | None = None) -> tuple[KernelInfo, ...]:
        """Return every executor of this installation, with what stands against it.

        Args:
            problem: judged for this problem; None judges for the plainest one that each is for.
        """
        facts = hardware.probe(self.device)
        return tuple(
            KernelInfo(
                name=item.name,
                is_fused=item.is_fused,
                refusals=reasons(item, problem or _plainest(item, facts), facts),
            )
            for item in capabilities()
        )

    def cache_info(self) -> CacheInfo:
        """Return hits, misses, and how many selections are kept."""
        return CacheInfo(*self._known.cache_info())

    def cache_clear(self) -> None:
        """Forget every selection."""
        self._known.cache_clear()


def _decided(problem: AttentionProblem, facts: HardwareFacts, policy: Policy) -> KernelChoice:
    """Return the selection that needs no measured numbers."""
    return _as_choice(decide(problem, None, facts, policy, capabilities()))


def _as_choice(decision: Decision) -> KernelChoice:
    """Return a decision with the names of its executors."""
    names = dict.fromkeys(group.capability for group in decision.plan.groups)
    return KernelChoice(names=tuple(names), decision=decision)


def _plainest(capability: Capability, facts: HardwareFacts) -> AttentionProblem:
    """Return a small problem of the sizes and the dtype that an executor is for."""
    return AttentionProblem(
        batch=1,
        num_heads=capability.min_group_size,
        num_kv_heads=1,
        len_q=max(capability.min_len_q, 1),
        len_k=max(capability.min_len_q, 1),
        head_dim=64,
        value_dim=64,
        precision=capability.precisions[0],
        device_type=facts.device_type,
    )
