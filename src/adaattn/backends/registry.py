"""The executors of this installation: what each can do, and how it is called."""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from adaattn.backends import block_sparse, chunked, flex, grouped, low_rank, reference, sdpa
from adaattn.backends.interface import Direct, Executor
from adaattn.errors import ArgumentError, expected_got
from adaattn.spec import AttentionProblem, Aux, Capability, HeadGroup

__all__ = ["capabilities", "capabilities_asked_for", "capability_named", "direct", "load"]

_MODULES: Final = (sdpa, grouped, flex, chunked, low_rank, block_sparse, reference)
_CAPABILITIES: Final[tuple[Capability, ...]] = tuple(
    capability for module in _MODULES for capability in module.CAPABILITIES
)
_BY_NAME: Final = {capability.name: capability for capability in _CAPABILITIES}
_EXECUTORS: Final[dict[str, Executor]] = {
    capability.name: module.run for module in _MODULES for capability in module.CAPABILITIES
}
_DIRECT: Final[dict[str, Callable[[AttentionProblem, HeadGroup], Direct | None]]] = {
    capability.name: module.direct
    for module in (sdpa, chunked)
    for capability in module.CAPABILITIES
}


def capabilities() -> tuple[Capability, ...]:
    """Return what every executor declares, in the order in which ties are broken."""
    return _CAPABILITIES


def capability_named(name: str) -> Capability:
    """Return one capability by its name.

    Raises:
        ArgumentError: there is none of that name.
    """
    if name not in _BY_NAME:
        raise ArgumentError(
            expected_got(
                "backend",
                f"'auto', 'flash', 'unfused' or one of {', '.join(_BY_NAME)}",
                repr(name),
            )
        )
    return _BY_NAME[name]


@lru_cache(maxsize=256)
def capabilities_asked_for(backend: str) -> tuple[Capability, ...]:
    """Return the capabilities that a caller's ``backend=`` allows.

    Args:
        backend: ``"auto"``: all; ``"flash"``: the fused kernels; ``"unfused"``: exact attention
            with its scores written out; a module such as ``"sdpa"``: its capabilities; a name.

    Raises:
        ArgumentError: it is none of these.
    """
    if backend == "auto":
        return _CAPABILITIES
    if backend == "flash":
        return tuple(item for item in _CAPABILITIES if item.is_fused)
    if backend == "unfused":
        return tuple(item for item in _CAPABILITIES if item.materialises_scores)
    found = tuple(item for item in _CAPABILITIES if backend in (item.name, item.backend))
    return found or (capability_named(backend),)


def load(name: str) -> Executor:
    """Return the executor of a capability; compiled kernels are imported when they first run."""
    return _EXECUTORS[name]


def direct(problem: AttentionProblem, group: HeadGroup) -> Direct | None:
    """Return what an executor does for a problem, as short as it can be; None if `load` is it."""
    if problem.aux is not Aux.NONE or group.capability not in _DIRECT:
        return None
    return _DIRECT[group.capability](problem, group)
