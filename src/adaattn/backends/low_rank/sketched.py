"""Attention with q, k and v projected to columns that a random sketch finds; no number is read.

Scores: (q W)(k W)^T with W a basis of k's rows; values: (P v U) U^T with U one of v's. Where k and
v have that rank nothing but rounding is lost. Where the product of q and k alone has it,
`adaattn.backends.low_rank.executor` would find it, and this does not. Forward only.
"""

from collections.abc import Sequence

from adaattn.backends.common import grouped_product
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.low_rank.cost import sketch_overhead
from adaattn.backends.low_rank.executor import SKETCHED_ABOVE
from adaattn.backends.low_rank.projected import Projected
from adaattn.backends.low_rank.ranks import sketch_methods
from adaattn.backends.low_rank.sample import estimate
from adaattn.backends.sampling import Estimate, Sampled
from adaattn.linalg.projections import range_bases
from adaattn.spec import (
    AttentionProblem,
    Capability,
    Feature,
    HeadGroup,
    HeadMethod,
    LowRank,
    Method,
    TensorStats,
)

__all__ = ["CAPABILITIES", "run", "sample", "sketch"]


def _is_wide(problem: AttentionProblem) -> str:
    """Return the reason against small head dimensions, or ""."""
    if min(problem.head_dim, problem.value_dim) > SKETCHED_ABOVE:
        return ""
    got = f"D {problem.head_dim}, Dv {problem.value_dim}"
    return f"it is for head dimensions above {SKETCHED_ABOVE}, got {got}"


CAPABILITIES = (
    Capability(
        name="low_rank.sketch",
        backend="low_rank",
        method=Method.LOW_RANK,
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.BOOLEAN_MASK
            | Feature.ADDITIVE_MASK
            | Feature.VALUE_DIM
        ),
        rules=(_is_wide,),
        skips_hidden=True,
        # Half of it counts, which a fused kernel of so few columns reaches on a CPU and on a GPU.
        efficiency=1.0,
        num_launches=6,
        methods=sketch_methods,
        overhead=sketch_overhead,
        # Sketches of three ranks and their rows; a few fewer on a GPU, more with fp32 on a CPU.
        sampling_cost=10,
    ),
)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention at the ranks of ``group.method`` (0 is all columns)."""
    assert isinstance(group.method, LowRank)
    return sketch(tensors, group.method).attention(tensors.mask, problem)


def sample(
    sampled: Sampled,
    methods: Sequence[HeadMethod],
    stats: TensorStats,
    budgets: tuple[float, ...],
) -> tuple[TensorStats, list[Estimate]]:
    """Return the errors of each rank: there are no spectra to predict them. A `Sampler`."""
    del budgets
    tried = [method for method in methods if isinstance(method, LowRank)]
    return stats, [estimate(sampled, sketch(sampled.tensors, it), it) for it in tried]


def sketch(tensors: Tensors, method: LowRank) -> Projected:
    """Return the tensors with fewer columns; the query heads of a group share a basis.

    Args:
        tensors: dense.
        method: the ranks; 0, and what is no less than all, keeps all columns.
    """
    query, key, value = tensors.query, tensors.key, tensors.value
    dims = key.shape[-1], value.shape[-1]
    rank, value_rank = (
        kept if kept < dim else 0
        for kept, dim in zip((method.rank, method.value_rank), dims, strict=True)
    )
    key_basis = value_basis = None
    if rank and rank == value_rank:
        key_basis, value_basis = range_bases(key, value, rank=rank)
    elif rank:
        (key_basis,) = range_bases(key, rank=rank)
    if value_rank and value_basis is None:
        (value_basis,) = range_bases(value, rank=value_rank)
    return Projected(
        query=query if key_basis is None else grouped_product(query, key_basis),
        key=key if key_basis is None else key @ key_basis,
        value=value if value_basis is None else value @ value_basis,
        scores=None,
        basis=value_basis,
    )
