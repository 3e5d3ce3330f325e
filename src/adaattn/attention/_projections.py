"""The projections of q, k and v, by one matrix or by three."""

from collections.abc import Sequence

import torch
from torch.nn import functional

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def project_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: tuple[int, int, int],
) -> Three:
    """Return the projected tensors; where k and v are the same tensor it is read once.

    Args:
        query: [..., E].
        key: [..., E].
        value: [..., E].
        weight: [sum of the sizes, E].
        bias: [sum of the sizes] or None.
        sizes: of each.
    """
    if key is not value:
        return project_separately((query, key, value), weight.split(sizes), bias, sizes)
    halves = (sizes[0], sizes[1] + sizes[2])
    b_q, b_kv = (None, None) if bias is None else bias.split(halves)
    w_q, w_kv = weight.split(halves)
    k, v = functional.linear(key, w_kv, b_kv).split(sizes[1:], dim=-1)
    return functional.linear(query, w_q, b_q), k, v


def project_separately(
    tensors: Three,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    sizes: tuple[int, int, int],
) -> Three:
    """Return the projected tensors.

    Args:
        tensors: query, key and value, [..., E], [..., Ek] and [..., Ev].
        weights: one matrix for each.
        bias: the three biases behind one another, or None.
        sizes: of each.
    """
    biases = (None, None, None) if bias is None else bias.split(sizes)
    q, k, v = (
        functional.linear(tensor, weight, part)
        for tensor, weight, part in zip(tensors, weights, biases, strict=True)
    )
    return q, k, v
