"""From tensors to numbers: what a few exact rows of the very call say about each approximation.

Query rows are sampled from blocks spread over the sequence. Their exact outputs are kept:
the same rows audit the result after the plan has run, at no further cost.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from adaattn._constants import LN_2
from adaattn._dtypes import torch_dtype
from adaattn.backends import Tensors
from adaattn.backends.block_sparse import (
    blocks_needed,
    diagonal_blocks,
    far_shares,
    scored_rows,
)
from adaattn.backends.common import (
    accumulation_dtype,
    grouped_product,
    softmax_rows,
    tile_scores,
    visible_tile,
)
from adaattn.backends.projected import Projected
from adaattn.call.arriving import Arriving, on_device
from adaattn.call.spectra import (
    ENTROPY_SCALES,
    entropy_stats,
    entropy_stats_of,
    project_widely,
    spectral_stats,
)
from adaattn.errors import NonFiniteError, expected_got
from adaattn.planning.candidates import BLOCK_SIZE, KEPT_MASSES
from adaattn.planning.rank import candidate_ranks, ranks_to_measure
from adaattn.spec import AttentionProblem, Method, Policy, Precision, TensorStats, Variant

__all__ = [
    "Sample",
    "audit",
    "check_finite",
    "measure",
    "measure_later",
    "sample_rows",
]

_BLOCKS = 32
"""Errors of block selection come in blocks of queries: few rows of many blocks see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Exact outputs of some rows.

    Args:
        rows: [R] their numbers.
        exact: [B, Hq, R, Dv] their outputs in fp32 (fp64 for fp64).
    """

    rows: torch.Tensor
    exact: torch.Tensor


def check_finite(tensors: Tensors) -> float:
    """Return the largest magnitude in q, k and v; one pass over each, one host read.

    Raises:
        NonFiniteError: one of them holds NaN or infinity.
    """
    names = ("query", "key", "value")
    values = _magnitudes(tensors).tolist()
    for name, value in zip(names, values, strict=True):
        if not value < float("inf"):
            raise NonFiniteError(
                expected_got(
                    name,
                    "finite numbers under an error budget",
                    f"a magnitude of {value}",
                    'use policy="quality", which needs no measurement, or clean the input',
                )
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


@torch.no_grad()
def measure_later(
    tensors: Tensors, problem: AttentionProblem, wanted: Sequence[Variant], policy: Policy
) -> Arriving:
    """Return errors of number formats and entropies of sampled rows, as they will arrive.

    Args:
        tensors: canonical, on a GPU.
        problem: simplified.
        wanted: the formats; methods that read the device are not among them.
        policy: says how many rows.
    """
    numbers = _choose_rows(problem.len_q, max(policy.audit_rows, 1), 0)[1]
    chosen = on_device(numbers, tensors.query.device)
    _, exact, entropies = _exact_rows(tensors, problem, chosen)
    precisions = sorted({precision for _, precision in wanted})
    errors = [
        _head_errors(_cast_rows(tensors, problem, chosen, precision), exact).double()
        for precision in precisions
    ]
    magnitude = _magnitudes(tensors).amax().expand(problem.num_heads)
    rows = torch.stack([magnitude, *entropies.double(), *errors])

    def read(found: list[list[float]]) -> TensorStats:
        largest = found[0][0]
        stats = entropy_stats_of(found[1 : 1 + len(ENTROPY_SCALES)])
        return replace(
            stats,
            sampled_rows=len(numbers),
            max_magnitude=largest if largest < float("inf") else float("inf"),
            precision_errors=tuple(
                (precision, tuple(row))
                for precision, row in zip(precisions, found[1 + len(ENTROPY_SCALES) :], strict=True)
            ),
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
    seed: int = 0,
    policy: Policy | None = None,
    budgets: tuple[float, ...] = (),
) -> tuple[TensorStats, Sample]:
    """Return the statistics that planning needs, and the exact rows they rest on.

    Args:
        tensors: canonical, not packed.
        problem: simplified.
        wanted: which approximations are worth their measurement.
        rows: how many query rows to sample.
        max_magnitude: largest element of q, k and v, from `check_finite`.
        seed: of the choice of rows; equal seeds choose equal rows.
        policy: which ranks it names; None names none.
        budgets: error budget of each head: ranks that are predicted to be far above all of
            them are not tried; () tries every rank.
    """
    start = time.perf_counter()
    blocks, numbers = _choose_rows(problem.len_q, rows, seed)
    chosen = torch.tensor(numbers, device=tensors.query.device)
    weights, exact, entropies = _exact_rows(tensors, problem, chosen)
    precisions = sorted({p for _, p in wanted if p is not problem.precision})
    methods = {method for method, _ in wanted}
    found: list[tuple[object, torch.Tensor]] = []
    for precision in precisions:
        approximate = _cast_rows(tensors, problem, chosen, precision)
        found.append((precision, _head_errors(approximate, exact)))
    tried = candidate_ranks(problem, policy.ranks if policy else ())
    if Method.LOW_RANK in methods and tried:
        projected = project_widely(tensors, problem, tried)
        stats = spectral_stats(projected, tensors, problem, entropies, tried)
        if budgets:
            tried = ranks_to_measure(stats, tried, budgets)
        found += _low_rank_errors(tensors, projected, problem, tried, chosen, exact)
    else:
        stats = entropy_stats(entropies)
    if Method.BLOCK_SPARSE in methods:
        found += _sparse_errors(tensors, problem, (blocks, numbers), weights, exact)
    host = torch.stack([tensor for _, tensor in found]).tolist() if found else []
    by_key = {key: tuple(values) for (key, _), values in zip(found, host, strict=True)}
    stats = replace(
        stats,
        sampled_rows=len(numbers),
        max_magnitude=max_magnitude,
        precision_errors=tuple((p, by_key[p]) for p in precisions),
        low_rank_errors=tuple((ranks, by_key[ranks]) for ranks in tried if ranks in by_key),
        block_sparse=tuple(
            (mass, by_key["density", mass], by_key["error", mass])
            for mass in KEPT_MASSES
            if ("error", mass) in by_key
        ),
        measure_ms=1e3 * (time.perf_counter() - start),
    )
    return stats, Sample(rows=chosen, exact=exact)


@torch.no_grad()
def sample_rows(tensors: Tensors, problem: AttentionProblem, rows: int, *, seed: int) -> Sample:
    """Return the exact outputs of some rows.

    Args:
        tensors: canonical, not packed.
        problem: simplified.
        rows: how many query rows.
        seed: of their choice.
    """
    chosen = on_device(_choose_rows(problem.len_q, rows, seed)[1], tensors.query.device)
    weights = _row_weights(tensors, problem, chosen)
    return Sample(rows=chosen, exact=grouped_product(weights, tensors.value.to(weights.dtype)))


@torch.no_grad()
def audit(output: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Return the relative Frobenius error [B, Hq] of an output [B, Hq, Sq, Dv] on the sample."""
    return _relative(output.index_select(2, sample.rows), sample.exact)


def _choose_rows(len_q: int, rows: int, seed: int) -> tuple[list[int], list[int]]:
    """Return (sampled blocks of queries, exactly ``rows`` rows in them), spread over the sequence.

    As far as there are others the rows are not those that block selection scores, which would
    flatter it. No more rows than the sequence has.
    """
    generator = random.Random(seed * 1_000_003 + len_q)
    num_blocks = max(-(-len_q // BLOCK_SIZE), 1)
    rows = min(rows, len_q)
    count = min(_BLOCKS, num_blocks, max(rows, 1))
    edges = [num_blocks * i // count for i in range(count + 1)]
    blocks = [generator.randrange(a, b) for a, b in pairwise(edges)]
    numbers: list[int] = []
    spare: list[int] = []
    for place, block in enumerate(blocks):
        inside = range(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, len_q))
        scored = set(_scored(block, len_q))
        ordered = [row for row in inside if row not in scored]
        generator.shuffle(ordered)
        ordered += [row for row in inside if row in scored]
        share = rows * (place + 1) // count - rows * place // count
        numbers += ordered[:share]
        spare += ordered[share:]
    if len(numbers) < rows:  # blocks too short for their share
        left = sorted(set(range(len_q)) - set(numbers) - set(spare))
        numbers += (spare + left)[: rows - len(numbers)]
        blocks = sorted({*blocks, *(row // BLOCK_SIZE for row in numbers)})
    return blocks, sorted(numbers)


def _scored(block: int, len_q: int) -> list[int]:
    """Return the rows of a block of queries that block selection scores."""
    return scored_rows(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, len_q), BLOCK_SIZE)


def _exact_rows(
    tensors: Tensors, problem: AttentionProblem, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights [B, Hq, R, Sk], outputs [B, Hq, R, Dv], mean entropies in bits [E, Hq]).

    The entropies are those of each of `ENTROPY_SCALES`.
    """
    weights = _row_weights(tensors, problem, rows)
    exact = grouped_product(weights, tensors.value.to(weights.dtype))
    sinks = 0.0
    if tensors.sinks is not None:
        sinks = torch.special.entr((1 - weights.sum(-1)).clamp_min(0.0))
    entropies = []
    for scale in ENTROPY_SCALES:
        missing = -weights.shape[-1] % scale
        pooled = F.pad(weights, (0, missing)).unflatten(-1, (-1, scale)).sum(-1)
        bits = (torch.special.entr(pooled).sum(-1) + sinks) / LN_2
        entropies.append(bits.mean(dim=(0, 2)))
    return weights, exact, torch.stack(entropies)


def _row_weights(tensors: Tensors, problem: AttentionProblem, rows: torch.Tensor) -> torch.Tensor:
    """Return the softmax weights [B, Hq, R, Sk] of some rows; zeros where nothing is seen."""
    scores = tile_scores(tensors, problem, rows, range(problem.len_k))
    if tensors.sinks is not None:
        return softmax_rows(scores, tensors.sinks).weights
    return torch.softmax(scores, dim=-1).nan_to_num_(0.0)


def _cast_rows(
    tensors: Tensors, problem: AttentionProblem, rows: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """Return the sampled outputs with inputs and weights rounded to ``precision``."""
    dtype = torch_dtype(precision)
    wide = accumulation_dtype(tensors.query.dtype)
    rounded = replace(
        tensors,
        query=tensors.query.to(dtype),
        key=tensors.key.to(dtype),
        value=tensors.value.to(dtype),
    )
    weights = _row_weights(rounded, problem, rows).to(dtype).to(wide)
    return grouped_product(weights, rounded.value.to(wide))


def _low_rank_errors(
    tensors: Tensors,
    projected: Projected,
    problem: AttentionProblem,
    ranks: Sequence[tuple[int, int]],
    rows: torch.Tensor,
    exact: torch.Tensor,
) -> list[tuple[object, torch.Tensor]]:
    """Return ((rank, value_rank), errors [Hq]) of each rank; the factors are nested."""
    found: list[tuple[object, torch.Tensor]] = []
    for rank, value_rank in ranks:
        part = replace(
            tensors,
            query=projected.query[..., :rank],
            key=projected.key[..., :rank],
            value=projected.value[..., :value_rank],
        )
        weights = _row_weights(part, problem, rows)
        output = grouped_product(weights, part.value.to(weights.dtype))
        if projected.basis is not None:
            basis = projected.basis[..., :value_rank].mT.to(weights.dtype)
            output = grouped_product(output, basis)
        found.append(((rank, value_rank), _head_errors(output, exact)))
    return found


def _sparse_errors(
    tensors: Tensors,
    problem: AttentionProblem,
    sampled: tuple[list[int], list[int]],
    weights: torch.Tensor,
    exact: torch.Tensor,
) -> list[tuple[object, torch.Tensor]]:
    """Return densities and errors of each kept mass, by the selection that the executor makes."""
    blocks, numbers = sampled
    device = weights.device
    scored = [row for block in blocks for row in _scored(block, problem.len_q)]
    owner = torch.tensor([blocks.index(row // BLOCK_SIZE) for row in scored], device=device)
    member = torch.tensor([blocks.index(row // BLOCK_SIZE) for row in numbers], device=device)
    rows = torch.tensor(scored, device=device)
    scored_weights = _row_weights(tensors, problem, rows)
    diagonal = diagonal_blocks(problem, BLOCK_SIZE, device)[blocks]
    shares = far_shares(tensors, problem, BLOCK_SIZE)[:, :, blocks]
    visible = _visible_blocks(problem, torch.tensor(numbers, device=device), device)
    value = tensors.value.to(weights.dtype)
    found: list[tuple[object, torch.Tensor]] = []
    for mass in KEPT_MASSES:
        needed = blocks_needed(scored_weights, BLOCK_SIZE, mass)
        shape = (*needed.shape[:2], len(blocks), needed.shape[-1])
        votes = torch.zeros(shape, device=device).index_add_(2, owner, needed.float())
        keep = ((votes > 0) | (shares > 1.0 - mass) | diagonal).index_select(2, member)
        tokens = keep.repeat_interleave(BLOCK_SIZE, dim=-1)[..., : problem.len_k]
        kept = weights * tokens
        output = grouped_product(kept, value) / kept.sum(-1, keepdim=True).clamp_min(1e-30)
        seen = keep & visible
        density = seen.sum(dim=(0, 2, 3)) / (visible.sum() * problem.batch)
        found.append((("density", mass), density.to(weights.dtype)))
        found.append((("error", mass), _head_errors(output, exact)))
    return found


def _visible_blocks(
    problem: AttentionProblem, rows: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return the blocks of which each row sees a key by position: [R, Nk]."""
    keys = torch.arange(problem.len_k, device=device)
    visible = visible_tile(problem, rows, keys)
    if visible is None:
        visible = torch.ones(len(rows), problem.len_k, dtype=torch.bool, device=device)
    return blocks_needed(visible.float(), BLOCK_SIZE, 1.0)


def _head_errors(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the relative error of each head, the worst over the batch: [Hq]."""
    return _relative(approximate, exact).amax(0)


def _relative(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return ||approximate - exact|| / ||exact|| over rows and columns: [B, Hq]."""
    difference = (approximate.to(exact.dtype) - exact).flatten(2).norm(dim=-1)
    size = exact.flatten(2).norm(dim=-1)
    relative: torch.Tensor = difference / size.clamp_min(torch.finfo(exact.dtype).tiny)
    return relative
