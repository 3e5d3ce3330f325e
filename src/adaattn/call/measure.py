"""From tensors to numbers: what a few exact rows of the very call say about each approximation.

Query rows are sampled from blocks spread over the sequence. Other rows, chosen likewise, audit the
result after the plan has run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F

from adaattn._constants import LN_2
from adaattn._dtypes import torch_dtype
from adaattn._transfer import on_device
from adaattn.backends import Tensors, samplers
from adaattn.backends.common import accumulation_dtype, grouped_product
from adaattn.backends.sampling import Estimate, Sampled, choose_rows, relative_errors, row_weights
from adaattn.call.arriving import Arriving
from adaattn.errors import NonFiniteError
from adaattn.spec import (
    AttentionProblem,
    Capability,
    MethodErrors,
    Policy,
    Precision,
    TensorStats,
    Variant,
)

__all__ = [
    "ENTROPY_SCALES",
    "audit",
    "check_finite",
    "measure",
    "measure_later",
    "sample_rows",
]

ENTROPY_SCALES: Final = (1, 4, 16)
"""How many neighbouring keys are added up for each entropy of the sampled rows' weights."""


def check_finite(tensors: Tensors) -> float:
    """Return the largest magnitude in q, k and v; one pass over each, one host read.

    Raises:
        NonFiniteError: one of them holds NaN or infinity.
    """
    names = ("query", "key", "value")
    values = _magnitudes(tensors).tolist()
    for name, value in zip(names, values, strict=True):
        if not value < float("inf"):
            raise NonFiniteError.got(
                name,
                "finite numbers under an error budget",
                f"a magnitude of {value}",
                'use policy="quality", which needs no measurement, or clean the input',
            )
    return float(max(values))


def _magnitudes(tensors: Tensors) -> torch.Tensor:
    """Return the largest magnitudes of q, k and v, [3] fp64, NaN where there is one."""
    items = [tensors.query.detach(), tensors.key.detach(), tensors.value.detach()]
    return torch.stack(
        [
            torch.stack(torch.aminmax(item)).abs().amax().double()
            if item.numel()
            else item.new_zeros((), dtype=torch.float64)
            for item in items
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Errors:
    """What the rows say of approximations, on the device.

    Args:
        precisions: number formats below the input's.
        format_errors: [Hq] of each.
        estimates: of methods, with the capability that each is for.
    """

    precisions: tuple[Precision, ...]
    format_errors: tuple[torch.Tensor, ...]
    estimates: tuple[tuple[str, Estimate], ...]

    @property
    def rows(self) -> list[torch.Tensor]:
        """All numbers, [Hq] each."""
        found = list(self.format_errors)
        for _, estimate in self.estimates:
            found.append(estimate.errors)
            if estimate.densities is not None:
                found.append(estimate.densities)
        return found

    def fields(self, found: list[list[float]]) -> dict[str, Any]:
        """Return the fields of statistics that `rows` are, once they are on the host."""
        numbers = iter(map(tuple, found))
        return {
            "precision_errors": tuple((format_, next(numbers)) for format_ in self.precisions),
            "method_errors": tuple(
                MethodErrors(
                    capability=name,
                    method=estimate.method,
                    errors=next(numbers),
                    densities=() if estimate.densities is None else next(numbers),
                )
                for name, estimate in self.estimates
            ),
        }


def _errors(
    sampled: Sampled,
    wanted: Sequence[Variant],
    stats: TensorStats,
    policy: Policy,
    allowed: Sequence[Capability],
    budgets: tuple[float, ...],
) -> tuple[TensorStats, _Errors]:
    """Return the errors of what is wanted, and what samplers learnt beside them.

    Args:
        sampled: the rows.
        wanted: as for `measure`.
        stats: what is known of the tensors.
        policy: as for `measure`.
        allowed: likewise.
        budgets: likewise.
    """
    problem = sampled.problem
    precisions = tuple(sorted({p for _, p in wanted if p is not problem.precision}))
    estimates: list[tuple[str, Estimate]] = []
    for sample, items in samplers(allowed, {method for method, _ in wanted}).items():
        own = {item.name: item.methods_for(problem, policy) for item in items}
        every = tuple(dict.fromkeys(method for methods in own.values() for method in methods))
        if not every:
            continue
        stats, found = sample(sampled, every, stats, budgets)
        by_method = {estimate.method: estimate for estimate in found}
        estimates += [
            (name, by_method[method])
            for name, methods in own.items()
            for method in methods
            if method in by_method
        ]
    return stats, _Errors(
        precisions=precisions,
        format_errors=tuple(sampled.errors(_cast_rows(sampled, format_)) for format_ in precisions),
        estimates=tuple(estimates),
    )


@torch.no_grad()
def measure_later(
    tensors: Tensors,
    problem: AttentionProblem,
    wanted: Sequence[Variant],
    policy: Policy,
    *,
    allowed: Sequence[Capability] = (),
    budgets: tuple[float, ...] = (),
) -> Arriving:
    """Return errors of approximations and entropies of sampled rows, as they will arrive.

    Args:
        tensors: canonical, on a GPU.
        problem: simplified.
        wanted: as for `measure`.
        policy: says how many rows.
        allowed: as for `measure`, none of which reads the device.
        budgets: as for `measure`.
    """
    sampled = sample_rows(tensors, problem, max(policy.audit_rows, 1), seed=0)
    entropies = _entropies(sampled)
    _, errors = _errors(sampled, wanted, TensorStats(), policy, allowed, budgets)
    magnitude = _magnitudes(tensors).amax().expand(problem.num_heads)
    rows = torch.stack([magnitude, *entropies.double(), *(row.double() for row in errors.rows)])
    num_rows = len(sampled.rows)  # `sampled` would keep the call's tensors until the numbers arrive

    def read(found: list[list[float]]) -> TensorStats:
        largest = found[0][0]
        count = 1 + len(ENTROPY_SCALES)
        return replace(
            _entropy_stats(found[1:count]),
            sampled_rows=num_rows,
            max_magnitude=largest if largest < float("inf") else float("inf"),
            **errors.fields(found[count:]),
        )

    return Arriving.of(rows, read)


@torch.no_grad()
def measure(
    tensors: Tensors,
    problem: AttentionProblem,
    wanted: Sequence[Variant],
    rows: int,
    *,
    max_magnitude: float = 0.0,
    policy: Policy | None = None,
    allowed: Sequence[Capability] = (),
    budgets: tuple[float, ...] = (),
) -> TensorStats:
    """Return the statistics that planning needs.

    Args:
        tensors: canonical, not packed.
        problem: simplified.
        wanted: which approximations are worth their measurement.
        rows: how many query rows to sample.
        max_magnitude: largest element of q, k and v, from `check_finite`.
        policy: which ranks it names; None names none.
        allowed: the executors that can serve the call: those that approximate are sampled.
        budgets: error budget of each head: ranks that are predicted to be far above all of
            them are not tried; () tries every rank.
    """
    start = time.perf_counter()
    sampled = sample_rows(tensors, problem, rows, seed=0)
    stats = _entropy_stats(_entropies(sampled).tolist())
    stats, errors = _errors(sampled, wanted, stats, policy or Policy(), allowed, budgets)
    return replace(
        stats,
        sampled_rows=len(sampled.rows),
        max_magnitude=max_magnitude,
        **errors.fields(torch.stack(errors.rows).tolist() if errors.rows else []),
        measure_ms=1e3 * (time.perf_counter() - start),
    )


@torch.no_grad()
def sample_rows(tensors: Tensors, problem: AttentionProblem, rows: int, *, seed: int) -> Sampled:
    """Return some rows, computed exactly.

    Args:
        tensors: canonical, not packed.
        problem: simplified.
        rows: how many query rows.
        seed: of their choice; equal seeds choose equal rows, 0 those of `measure`.
    """
    chosen = choose_rows(problem.len_q, rows, seed)
    index = on_device(torch.tensor(chosen), tensors.query.device)
    return Sampled.of(tensors, problem, chosen, index)


@torch.no_grad()
def audit(output: torch.Tensor, sample: Sampled) -> torch.Tensor:
    """Return the relative Frobenius error [B, Hq] of an output [B, Hq, Sq, Dv] on the sample."""
    return relative_errors(output.index_select(2, sample.index), sample.exact)


def _entropies(sampled: Sampled) -> torch.Tensor:
    """Return the rows' mean entropies in bits, [E, Hq], one for each of `ENTROPY_SCALES`."""
    weights, sinks = sampled.weights, 0.0
    if sampled.tensors.sinks is not None:
        sinks = torch.special.entr((1 - weights.sum(-1)).clamp_min(0.0))
    entropies = []
    for scale in ENTROPY_SCALES:
        missing = -weights.shape[-1] % scale
        pooled = F.pad(weights, (0, missing)).unflatten(-1, (-1, scale)).sum(-1)
        bits = (torch.special.entr(pooled).sum(-1) + sinks) / LN_2
        entropies.append(bits.mean(dim=(0, 2)))
    return torch.stack(entropies)


def _entropy_stats(rows: list[list[float]]) -> TensorStats:
    """Return statistics that hold the entropies alone, from a row for each of `ENTROPY_SCALES`."""
    named = zip(ENTROPY_SCALES[1:], rows[1:], strict=True)
    return TensorStats(
        entropy_bits=tuple(rows[0]),
        pooled_entropy_bits=tuple((scale, tuple(row)) for scale, row in named),
    )


def _cast_rows(sampled: Sampled, precision: Precision) -> torch.Tensor:
    """Return the sampled outputs with inputs and weights rounded to ``precision``."""
    dtype, tensors = torch_dtype(precision), sampled.tensors
    wide = accumulation_dtype(tensors.query.dtype)
    rounded = replace(tensors, query=tensors.query.to(dtype), kv=tensors.kv.to(dtype))
    weights = row_weights(rounded, sampled.problem, sampled.index).to(dtype).to(wide)
    return grouped_product(weights, rounded.value.to(wide))
