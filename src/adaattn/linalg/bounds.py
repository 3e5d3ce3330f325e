"""Bounds on what an approximation of attention can do to its output, computed from the call.

They rest on two facts: a change of at most epsilon in every score moves softmax by at most
tanh(epsilon / 2) in total variation, and an output is a mean of values that lie within a radius
R of their centre. They are worst cases, typically 5 to 10 times what is measured.
"""

import torch

from adaattn.errors import ShapeError
from adaattn.linalg._checks import accumulation_dtype, require_matrix

__all__ = [
    "dropped_mass",
    "dropped_mass_bound",
    "low_rank_score_bound",
    "output_error_bound",
    "value_radius",
]


def low_rank_score_bound(
    query_residual: torch.Tensor, key_residual: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return, for each query, the largest change of a score when both sides are projected.

    With one orthonormal basis for queries and keys, ``q k - (Pq)(Pk) = q_perp k_perp``, so the
    change is at most ``|scale| ||q_perp|| max ||k_perp||``. Keys may be centred (softmax does
    not see it), queries may not.

    Args:
        query_residual: [..., Hq, Sq] lengths outside the basis, see `residual_norms`.
        key_residual: [..., Hkv, Sk]; Hkv divides Hq.
        scale: factor of the scores.

    Returns:
        [..., Hq, Sq]; 0 without keys.

    Raises:
        ShapeError: the heads do not fit.
    """
    if key_residual.shape[-1] == 0:
        return torch.zeros_like(query_residual)
    longest = key_residual.amax(-1, keepdim=True)
    if query_residual.ndim >= 2 and longest.ndim >= 2:
        heads, kv_heads = query_residual.shape[-2], longest.shape[-2]
        if kv_heads == 0 or heads % kv_heads:
            expected = f"a number of heads that divides {heads}"
            raise ShapeError.got("key_residual", expected, kv_heads)
        longest = longest.repeat_interleave(heads // kv_heads, dim=-2)
    return abs(scale) * query_residual * longest


def value_radius(value: torch.Tensor) -> torch.Tensor:
    """Return the largest distance of a value from the mean value of its head.

    Args:
        value: [..., Sk, Dv].

    Returns:
        [...]; 0 without keys.
    """
    require_matrix(value, "value")
    value = value.to(accumulation_dtype(value.dtype))
    if value.shape[-2] == 0:
        return value.sum((-2, -1))
    centred = value - value.mean(-2, keepdim=True)
    lengths: torch.Tensor = torch.linalg.vector_norm(centred, dim=-1)
    return lengths.amax(-1)


def output_error_bound(epsilon: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Return the most an output row can move when no score of the row moves more than epsilon.

    ``2 tanh(epsilon / 2) R``, with R the radius of the values around any fixed point.

    Args:
        epsilon: largest change of a score, in nats.
        radius: R, see `value_radius`; broadcasts with ``epsilon``.
    """
    return 2.0 * torch.tanh(0.5 * epsilon) * radius


def dropped_mass(
    tile_max: torch.Tensor, tile_keys: torch.Tensor | int, lse_kept: torch.Tensor
) -> torch.Tensor:
    """Return an upper bound of the softmax mass in tiles of keys that were left out.

    The left-out keys add at most ``x = sum n exp(tile max - lse_kept)`` to a denominator of 1,
    so they hold at most ``x / (1 + x)``.

    Args:
        tile_max: [..., Sq, T] largest score (or a bound of it) in each left-out tile; -inf for
            tiles that were kept.
        tile_keys: keys in a tile, a number or a tensor that broadcasts with ``tile_max``.
        lse_kept: [..., Sq] log of the sum of exponentials of the kept scores; -inf if none.

    Returns:
        [..., Sq] between 0 and 1.
    """
    sizes = torch.as_tensor(tile_keys, dtype=tile_max.dtype, device=tile_max.device)
    lse_dropped = torch.logsumexp(tile_max + sizes.log(), dim=-1)
    nothing = lse_dropped == -torch.inf
    difference = torch.where(nothing, 0.0, lse_dropped) - torch.where(nothing, 0.0, lse_kept)
    return torch.where(nothing, 0.0, torch.sigmoid(difference))


def dropped_mass_bound(mass: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Return the most an output row can move when keys holding ``mass`` of it are left out.

    ``2 mass R``: the output moves by mass times the distance between two means of values.

    Args:
        mass: softmax mass left out, 0 to 1, see `dropped_mass`.
        radius: R, see `value_radius`; broadcasts with ``mass``.
    """
    return 2.0 * mass * radius
