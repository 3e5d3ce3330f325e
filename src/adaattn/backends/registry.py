"""The executors of this installation: what each can do, and how it is called.

A new one is a module, or a folder, with ``CAPABILITIES`` and ``run``, registered at the end of
this file.
"""

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from adaattn.backends import (
    block_sparse,
    chunked,
    flex,
    grouped,
    hopper,
    low_rank,
    reference,
    sdpa,
    streamed,
    triton,
)
from adaattn.backends.interface import Direct, Executor
from adaattn.backends.low_rank import sketched
from adaattn.backends.sampling import Sampler
from adaattn.backends.streamed import small
from adaattn.errors import ArgumentError
from adaattn.spec import AttentionProblem, Aux, Capability, HeadGroup, Launch, Method, Scheme

__all__ = [
    "capabilities",
    "capabilities_asked_for",
    "capability_named",
    "direct",
    "exact_in_bounded_memory",
    "is_ready",
    "load",
    "register",
    "samplers",
]

_Bind = Callable[[AttentionProblem, HeadGroup], Direct | None]

_Ready = Callable[[AttentionProblem], bool]


class _Registered(NamedTuple):
    """What `register` was given for a name."""

    capability: Capability
    run: Executor
    bind: _Bind | None
    sample: Sampler | None
    ready: _Ready | None


_KNOWN: Final[dict[str, _Registered]] = {}


def register(
    items: Iterable[Capability],
    run: Executor,
    bind: _Bind | None = None,
    sample: Sampler | None = None,
    ready: _Ready | None = None,
) -> Callable[[], None]:
    """Add an executor under the names of its capabilities; return what takes it out again.

    Calls that are bound already keep what they run until ``adaattn.hardware.clear_cache()``.

    Args:
        items: what it can do.
        run: runs a group of heads.
        bind: returns the shortest function for a problem, or None; see `Direct`.
        sample: estimates its errors, where it approximates; see `Sampler`.
        ready: says whether what it compiles for a problem is there already.

    Raises:
        ArgumentError: a name is taken, or an approximation brings no parameters or estimates.
    """
    items = tuple(items)
    for item in items:
        if item.name in _KNOWN:
            raise ArgumentError.got("name of an executor", "a new one", repr(item.name))
        if item.method is not Method.EXACT and (sample is None or item.methods is None):
            expected = "`methods` to try and a `sample` function that estimates its errors"
            raise ArgumentError.got(f"{item.name}, which approximates", expected, "none")
    for item in items:
        _KNOWN[item.name] = _Registered(item, run, bind, sample, ready)
    capabilities_asked_for.cache_clear()

    def remove() -> None:
        for item in items:
            _KNOWN.pop(item.name, None)
        capabilities_asked_for.cache_clear()

    return remove


def capabilities() -> tuple[Capability, ...]:
    """Return what every executor declares, in the order in which ties are broken."""
    return tuple(known.capability for known in _KNOWN.values())


def capability_named(name: str) -> Capability:
    """Return one capability by its name.

    Raises:
        ArgumentError: there is none of that name.
    """
    if name not in _KNOWN:
        raise ArgumentError.got(
            "backend",
            f"'auto', 'flash', 'unfused', 'sdpa' or one of {', '.join(_KNOWN)}",
            repr(name),
        )
    return _KNOWN[name].capability


@lru_cache(maxsize=256)
def capabilities_asked_for(backend: str) -> tuple[Capability, ...]:
    """Return the capabilities that a caller's ``backend=`` allows.

    Args:
        backend: ``"auto"``: all; ``"flash"``: the fused kernels; ``"unfused"``: exact attention
            with its scores written out; a module such as ``"sdpa"``: its capabilities; a name.

    Raises:
        ArgumentError: it is none of these.
    """
    known = capabilities()
    if backend == "auto":
        return known
    if backend == "flash":
        return tuple(item for item in known if item.is_fused)
    if backend == "unfused":
        return tuple(item for item in known if item.materialises_scores)
    found = tuple(item for item in known if backend in (item.name, item.backend))
    return found or (capability_named(backend),)


def load(name: str) -> Executor:
    """Return the executor of a capability; compiled kernels are imported when they first run."""
    return _KNOWN[name].run


def direct(problem: AttentionProblem, group: HeadGroup) -> Direct | None:
    """Return what an executor does for a problem, as short as it can be; None if `load` is it."""
    own = group.scheme.inputs is problem.precision and not group.heads
    known = _KNOWN.get(group.capability)
    if not own or problem.aux is not Aux.NONE or known is None or known.bind is None:
        return None
    return known.bind(problem, group)


def is_ready(problem: AttentionProblem, group: HeadGroup) -> bool:
    """Return whether what an executor compiles for a problem is there already."""
    known = _KNOWN.get(group.capability)
    own = group.scheme.inputs is problem.precision and not group.heads
    return known is not None and known.ready is not None and own and known.ready(problem)


def samplers(
    allowed: Iterable[Capability], methods: Collection[Method]
) -> dict[Sampler, list[Capability]]:
    """Return who estimates errors of some methods, and the executors for which each does.

    Args:
        allowed: the executors that can serve a call.
        methods: the methods that are worth a look.
    """
    found: dict[Sampler, list[Capability]] = {}
    for item in allowed:
        known = _KNOWN.get(item.name)
        if item.method in methods and known is not None and known.sample is not None:
            found.setdefault(known.sample, []).append(item)
    return found


def exact_in_bounded_memory(
    problem: AttentionProblem, memory_budget_bytes: int | None
) -> HeadGroup:
    """Return how any problem is computed exactly within a memory budget."""
    (capability,) = chunked.CAPABILITIES
    return HeadGroup(
        capability=capability.name,
        scheme=Scheme.of(problem.precision),
        launch=Launch(chunk_rows=capability.chunk_rows(problem, memory_budget_bytes)),
    )


for _module in (
    *(sdpa, grouped, flex, hopper, triton, small, streamed, chunked),
    *(low_rank, sketched, block_sparse, reference),
):
    register(
        _module.CAPABILITIES,
        _module.run,
        getattr(_module, "direct", None),
        getattr(_module, "sample", None),
        getattr(_module, "is_ready", None),
    )
