"""One problem measured: tensors made for it, its executors checked, then timed in turns.

On a CUDA device two times are taken, medians over the rounds. The device's is that between two
events behind a kernel that only waits, so that the calls are queued before the first of them
runs; the host's is that until a call returns. On a CPU they are one, and the fastest call
counts: what else runs there only ever adds to a time.

Not covered: tensors stay in the device's cache from call to call, as they seldom do in a model.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import torch

from adaattn.backends import (
    Tensors,
    capabilities,
    capability_named,
    direct,
    exact_in_bounded_memory,
    num_taken,
    run_group,
)
from adaattn.call.describe import Call, without_autocast
from adaattn.call.run import now_ms
from adaattn.errors import PlanError
from adaattn.hardware import free_memory_bytes
from adaattn.planning import decide, reasons
from adaattn.policies import PRESETS
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Cell,
    HardwareFacts,
    HeadGroup,
    Measured,
    Method,
    Precision,
    Scheme,
)
from adaattn.spec.evidence import problem_class
from adaattn.tuning.inputs import algorithms, random_call

__all__ = ["Effort", "cell_of", "measure_cell", "step_of"]

_LOGGER = logging.getLogger("adaattn")
_T = TypeVar("_T")

_FEW_ROUNDS: Final = 3
_SLOW: Final = 3.0
_LONG_MS: Final = 50.0
"""An executor this many times slower than the fastest has one round: its time decides nothing.
The first round is whole for all: a lone call may take the host 100 us where the next take 20.
Calls this long, which average out what disturbs short ones, have the few."""

_SPREAD: Final = 0.15
"""A time has settled when its rounds differ by less: on CUDA the interquartile range from the
median, on a CPU the second fastest from the fastest."""

_PATIENCE: Final = 4
"""Times that have not settled get so many times the rounds that were asked for."""

_VANISHING: Final = 1e-3
_BATCH_MS: Final = 2.0
_MAX_BATCH: Final = 200
_HOST_BATCH, _HOST_BATCH_MS = 20, 50.0
_COMPILED_MS: Final = 50.0
_CYCLES_PER_MS: Final = 2e6
"""Of a GPU at 2 GHz; a slower clock hides more of the host, which is as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is spent on one problem.

    Args:
        rounds: turns of each executor, at most.
        deadline: reading of ``time.perf_counter`` after which only first rounds are made.
        compiles: executors that compile for each length take part.
    """

    rounds: int = 7
    deadline: float = math.inf
    compiles: bool = True


@dataclass(slots=True, kw_only=True)
class _Run:
    """An executor on the tensors of a problem, and its times so far in milliseconds."""

    name: str
    call: Callable[[], object]
    first_ms: float
    wall_ms: float
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    @property
    def best_ms(self) -> float:
        """The fastest call so far."""
        return min([self.wall_ms, *map(max, self.device, self.host)])


def measure_cell(
    problem: AttentionProblem, device: torch.device, facts: HardwareFacts, effort: Effort
) -> Cell | None:
    """Return the times of every executor that serves a problem; None where none did.

    Args:
        problem: what to compute.
        device: where.
        facts: of the device.
        effort: how much to spend.

    Raises:
        AdaAttnError: the problem contradicts itself.
    """
    grad = problem.requires_grad
    # In one statement: set_grad_enabled acts when it is made, and inference_mode saves that state.
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        without_autocast(device.type),
        algorithms(deterministic=problem.deterministic),
    ):
        call = random_call(problem, device)
        with algorithms(deterministic=False):  # the reference may take what refuses others
            expected = _expected(call, facts)
        if expected is None:
            return None
        groups = _groups(call.problem, device, facts, effort)
        checked = [_checked(call, group, expected) for group in groups]
        del expected
        runs = _timed([run for run in checked if run is not None], device, effort)
    if not runs:
        return None
    return cell_of(call.problem, {run.name: _measured(run, device) for run in runs})


def cell_of(problem: AttentionProblem, times: dict[str, Measured]) -> Cell:
    """Return the cell of a simplified problem."""
    len_q, len_k = problem.longest
    plain = not reasons(capability_named("sdpa.math"), problem, None)
    return Cell(
        problem_class=problem_class(problem),
        heads=problem.batch * problem.num_heads,
        group_size=problem.group_size,
        len_q=len_q,
        len_k=len_k,
        head_dim=problem.head_dim,
        visible=problem.visible_pairs / max(problem.len_q, 1),
        num_sequences=problem.num_sequences,
        times=times,
        default=problem.sdpa_default if plain else "",
    )


def _groups(
    problem: AttentionProblem, device: torch.device, facts: HardwareFacts, effort: Effort
) -> list[HeadGroup]:
    """Return what planning would run by each exact executor; the reference only if alone."""
    found = []
    free = free_memory_bytes(device)
    for capability in capabilities():
        if capability.method is not Method.EXACT:
            continue
        each_compiles = capability.compiles and not capability.compile_ms
        if each_compiles and not effort.compiles:
            continue
        group, workspace_bytes = _planned(problem, facts, capability)
        if group is None:
            continue
        if free is not None and workspace_bytes > free // 2:
            _leave_out(capability.name, problem, f"its workspace is {workspace_bytes:.3g} bytes")
            continue
        found.append(group)
    return [group for group in found if group.capability != "reference"] or found


def _planned(
    problem: AttentionProblem, facts: HardwareFacts, capability: Capability
) -> tuple[HeadGroup | None, int]:
    """Return how planning would run a problem by one executor, and its workspace in bytes."""
    try:
        decision = decide(problem, None, facts, PRESETS["quality"], (capability,))
    except PlanError:
        return None, 0
    cost = decision.cost
    return decision.plan.groups[0], cost.workspace_bytes if cost else 0


def _expected(call: Call, facts: HardwareFacts) -> tuple[torch.Tensor, ...] | None:
    """Return the results in fp32 (fp64 for fp64), in little memory; None if that failed."""
    problem = call.problem
    group = exact_in_bounded_memory(problem, None)
    if problem.precision is not Precision.FP64:
        group = replace(group, scheme=Scheme.of(Precision.FP32))
    return _guarded(group.capability, problem, step_of(call, group))


def _checked(call: Call, group: HeadGroup, expected: tuple[torch.Tensor, ...]) -> _Run | None:
    """Return an executor that has run twice, its results checked; None where it fails."""
    problem, device = call.problem, call.tensors.query.device
    step = step_of(call, group)

    def timed() -> tuple[tuple[torch.Tensor, ...], float]:
        start = now_ms(device)
        results = step()
        return results, now_ms(device) - start

    first = _guarded(group.capability, problem, timed)
    if first is None:
        return None
    results, first_ms = first
    error = max(_error(*pair) for pair in zip(results, expected, strict=True))
    if problem.dropout_p == 0 and not error <= _allowed(problem, device):
        _leave_out(group.capability, problem, f"its results are wrong by {error:.2g}")
        return None
    del results, first
    second = _guarded(group.capability, problem, timed)
    if second is None:
        return None
    return _Run(name=group.capability, call=step, first_ms=first_ms, wall_ms=second[1])


def step_of(call: Call, group: HeadGroup) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return one call by an executor: its output, and gradients where they are wanted."""
    tensors, problem = call.tensors, call.problem
    leaves = _leaves(tensors) if problem.requires_grad else []
    upstream: list[torch.Tensor] = []
    short = direct(problem, group)  # which is what repeated calls run
    given = [tensors.query, tensors.key, tensors.value, tensors.mask]
    given += [tensors.sinks, tensors.alibi_slopes, tensors.cu_seqlens_q, tensors.cu_seqlens_k]
    taken = [*given, tensors.blocks, tensors.head_terms][: num_taken(problem)]

    def step() -> tuple[torch.Tensor, ...]:
        output = short(*taken) if short else run_group(tensors, problem, group).output
        if not leaves:
            return (output,)
        if not upstream:
            generator = torch.Generator(output.device).manual_seed(1)
            numbers = torch.randn(
                output.shape, generator=generator, device=output.device, dtype=output.dtype
            )
            upstream.append(numbers)
        return (output.detach(), *torch.autograd.grad(output, leaves, upstream))

    return step


def _leaves(tensors: Tensors) -> list[torch.Tensor]:
    """Return the tensors that want gradients."""
    items = (tensors.query, tensors.key, tensors.value)
    others = (tensors.mask, tensors.sinks, tensors.alibi_slopes)
    terms = (tensors.head_scale, tensors.head_softcap)
    return [item for item in (*items, *others, *terms) if item is not None and item.requires_grad]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative Frobenius error of a head; NaN where there is one.

    What vanishes, as the gradients of rows that see one key, is held against a thousandth of the
    inputs' size, which is 1.
    """
    dims = (-2, -1) if found.dim() == 4 else tuple(range(found.dim()))
    exact = expected.to(torch.promote_types(expected.dtype, torch.float32))
    difference = torch.linalg.vector_norm(found.to(exact.dtype) - exact, dim=dims)
    size = torch.linalg.vector_norm(exact, dim=dims)
    count = exact.numel() / max(size.numel(), 1)
    return float((difference / size.clamp(min=_VANISHING * math.sqrt(count))).max())


def _allowed(problem: AttentionProblem, device: torch.device) -> float:
    """Return the error of a result that agrees in half of the digits of its products' format.

    Less is wrong: another window, say, or a mask that is not honoured.
    """
    roundoff = problem.precision.unit_roundoff
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    if tf32 and problem.precision is Precision.FP32:
        roundoff = Precision.FP16.unit_roundoff
    return math.sqrt(roundoff)


def _guarded(name: str, problem: AttentionProblem, action: Callable[[], _T]) -> _T | None:
    """Return what an action returns; None, logged, where it fails."""
    try:
        return action()
    except torch.AcceleratorError:
        raise  # nothing runs on this device any more
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        _leave_out(name, problem, f"out of memory: {error}")
    except Exception as error:  # noqa: BLE001 - one that fails is left out, the others go on
        _leave_out(name, problem, f"{type(error).__name__}: {error}")
    return None


def _leave_out(name: str, problem: AttentionProblem, why: str) -> None:
    """Log that an executor is not timed on a problem."""
    first = why.strip().splitlines()[0]
    _LOGGER.warning("%s is left out of %s: %s", name, cell_of(problem, {}).label, first)


def _timed(runs: list[_Run], device: torch.device, effort: Effort) -> list[_Run]:
    """Return the executors with their times, taken in turns that begin with another each round.

    All of them have the first round, whatever the deadline.
    """
    for number in range(_PATIENCE * effort.rounds):
        fastest = min((run.best_ms for run in runs), default=0.0)
        going = [run for run in runs if number == 0 or run.best_ms <= _SLOW * fastest]
        going = [run for run in going if number < _FEW_ROUNDS or run.best_ms <= _LONG_MS]
        if number >= effort.rounds and all(_settled(run, device) for run in going):
            return runs
        first = number % max(len(going), 1)
        for run in (*going[first:], *going[:first]):
            if number and time.perf_counter() > effort.deadline:
                return runs
            _take_turn(run, device)
    return runs


def _take_turn(run: _Run, device: torch.device) -> None:
    """Add the times of one round."""
    count = min(max(math.ceil(_BATCH_MS / max(run.best_ms, 1e-3)), 1), _MAX_BATCH)
    if device.type != "cuda":
        run.device.append(min(_host_ms(run.call, 1) for _ in range(count)))
        run.host.append(run.device[-1])
        return
    few = min(max(int(_HOST_BATCH_MS / max(run.best_ms, 1e-3)), 1), _HOST_BATCH)
    torch.cuda.synchronize(device)
    run.host.append(_host_ms(run.call, few))
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(_CYCLES_PER_MS * (run.host[-1] * count + 1.0)))
    start.record()
    for _ in range(count):
        run.call()
    end.record()
    end.synchronize()
    run.device.append(float(start.elapsed_time(end)) / count)


def _host_ms(call: Callable[[], object], count: int) -> float:
    """Return the milliseconds until each of some calls returns."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return 1e3 * (time.perf_counter() - start) / count


def _measured(run: _Run, device: torch.device) -> Measured:
    """Return what the rounds of an executor say."""
    best = statistics.median if device.type == "cuda" else min
    device_ms, host_ms = best(run.device), best(run.host)
    later_ms = min(run.wall_ms, run.first_ms)
    compile_ms = run.first_ms - later_ms
    compiled = device.type == "cuda" and compile_ms > max(_COMPILED_MS, later_ms)
    # What is kept on disk may have been there: the price is that of who has not.
    known_ms = next((it.compile_ms for it in capabilities() if it.name == run.name), 0.0)
    return Measured(
        device_ms=_rounded(max(device_ms, 1e-6)),
        host_ms=_rounded(max(host_ms, 1e-6)),
        compile_ms=known_ms or (_rounded(compile_ms) if compiled else 0.0),
        settled=_settled(run, device),
    )


def _rounded(time_ms: float) -> float:
    """Return a time with the four digits that a file needs."""
    return float(f"{time_ms:.4g}")


def _settled(run: _Run, device: torch.device) -> bool:
    """Return whether the rounds agree on the number that counts."""
    if len(run.device) < 2:
        return False
    if device.type != "cuda":
        fastest, second = sorted(run.device)[:2]
        return second <= (1 + _SPREAD) * fastest
    low, middle, high = statistics.quantiles(run.device, n=4, method="inclusive")
    return high - low <= _SPREAD * middle
