"""Gradients of a call, and how large the numbers are that cancel in them.

The gradient of a score is ``w (dp - sum w dp)``: where a row sees one key it is a
difference of equal numbers, zero on paper and a rounding error in any kernel. Its size
alone therefore says nothing about the error to expect; the size of its terms does.
"""

from dataclasses import replace

import torch

from adaattn.backends.interface import Result, Tensors
from adaattn.backends.reference import attention, positions
from adaattn.spec import AttentionProblem, Aux
from adaattn.testing.compare import assert_matches
from adaattn.testing.inputs import FLOATING, cast_tensors

__all__ = [
    "assert_gradients_match",
    "differentiable",
    "gradients_of",
    "num_summands",
    "term_sizes",
]


def differentiable(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors that want a gradient, by field name."""
    named = {name: getattr(tensors, name) for name in FLOATING}
    return {name: it for name, it in named.items() if it is not None and it.requires_grad}


def gradients_of(result: Result, tensors: Tensors, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return the gradient for each tensor that wants one, from a random output gradient.

    Args:
        result: what an executor made of ``tensors``.
        tensors: the inputs.
        seed: equal seeds give equal output gradients in every dtype.
    """
    leaves = differentiable(tensors)
    if not leaves:
        return {}
    upstream = _upstream(result.output, seed)
    found = torch.autograd.grad(result.output, list(leaves.values()), upstream)
    return dict(zip(leaves, found, strict=True))


def assert_gradients_match(
    actual: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    yardstick: dict[str, torch.Tensor],
    *,
    sizes: dict[str, torch.Tensor],
    problem: AttentionProblem,
) -> None:
    """Raise AssertionError unless every gradient is as right as that of eager PyTorch.

    Args:
        actual: gradients under test, by field name, as `gradients_of` returns them.
        reference: the oracle's, float64.
        yardstick: eager PyTorch's, in the dtypes of ``actual``.
        sizes: what `term_sizes` returns for the same call.
        problem: the call.
    """
    if set(actual) != set(reference):
        raise AssertionError(f"gradients: expected {sorted(reference)}, got {sorted(actual)}")
    for name, gradient in actual.items():
        assert_matches(
            gradient,
            reference[name],
            yardstick[name],
            name=f"gradient of {name}",
            summands=num_summands(problem, gradient),
            terms=sizes[name],
        )


def num_summands(problem: AttentionProblem, tensor: torch.Tensor) -> int:
    """Return how many terms the sums behind one element of a result or gradient may have.

    A GPU's exponential is within two units in the last place (``ex2.approx``), four roundings
    above the line and four below, in each pass: as much as the random walk of 128.

    Args:
        problem: the call.
        tensor: an output, or the gradient of an input; one that is smaller than the scores,
            such as a broadcast mask's, sums over what it was broadcast to.
    """
    scores = problem.batch * problem.num_heads * problem.len_q * problem.len_k
    products = problem.head_dim + problem.value_dim
    exponential = 128 if problem.device_type == "cuda" else 0
    return products + problem.len_k + scores // max(tensor.numel(), 1) + exponential


def term_sizes(
    tensors: Tensors, problem: AttentionProblem, *, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Return for each gradient the root of the sum of its squared terms, float64.

    Rounding errors are independent, so they add as squares do. The fields that want no
    gradient are left out.

    Args:
        tensors: the inputs of the call.
        problem: the call.
        seed: the one given to `gradients_of`.
    """
    wide = cast_tensors(tensors, torch.float64)
    with torch.no_grad():
        result = attention(wide, replace(problem, aux=Aux.WEIGHTS, dropout_p=0.0))
        weights = result.weights
        assert weights is not None
        group_size = weights.shape[1] // max(wide.key.shape[1], 1)
        signed = wide.key.repeat_interleave(group_size, dim=1)
        key = signed.square()
        value = wide.value.repeat_interleave(group_size, dim=1)
        upstream = _upstream(result.output, seed)
        product = (upstream @ value.mT).square() + upstream.square() @ value.square().mT
        from_value = weights.square() * product
        row = from_value.sum(-1, keepdim=True)
        score = from_value + weights.square() * row
        factor: float | torch.Tensor = problem.scale**2
        if wide.head_scale is not None:
            factor = factor * wide.head_scale.square()[:, None, None]
        squares = {
            "query": factor * score @ key,
            "key": _per_group(factor * score.mT @ wide.query.square(), group_size),
            "value": _per_group(weights.square().mT @ upstream.square(), group_size),
        }
        if wide.mask is not None:
            squares["mask"] = score.sum_to_size(wide.mask.shape)
        if wide.sinks is not None:
            share = (1.0 - weights.sum(-1)).square()
            squares["sinks"] = (share * row[..., 0]).sum((0, 2))
        if wide.alibi_slopes is not None:
            rows, keys, _ = positions(wide, problem)
            moved = (score * (rows[:, None] - keys).square()).sum((2, 3))
            squares["alibi_slopes"] = moved.sum_to_size(wide.alibi_slopes.shape)
        if wide.head_terms is not None:
            products = (wide.query @ signed.mT).square()
            squares["head_scale"] = (score * products).sum((0, 2, 3))
            squares["head_softcap"] = score.sum((0, 2, 3))
    return {name: squares[name].sqrt() for name in differentiable(tensors)}


def _upstream(output: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a random output gradient, exact in the narrowest dtypes."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return numbers.bfloat16().to(output)


def _per_group(heads: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return sums over the query heads of each key head: [B, Hkv, S, D]."""
    return heads.unflatten(1, (-1, group_size)).sum(2) if heads.numel() else heads[:, ::group_size]
