"""A tile of scores written out: softmax, and whatever can be read off its rows."""

from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F

from adaattn.backends.common import grouped_product, softmax_rows, tile_scores
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.masked import listed_keys, tile_masks
from adaattn.spec import AttentionProblem, Aux

__all__ = ["as_result", "explicit_tile"]

_AUXILIARY: Final = {str(flag.name).lower(): flag.value for flag in Aux}


def explicit_tile(
    tile: Tensors, problem: AttentionProblem, rows: range, cols: range
) -> tuple[torch.Tensor, ...]:
    """Return output, log-sum-exp, maximum, entropy, weights and dropped mass of some rows."""
    bare = replace(tile, mask=None, alibi_slopes=None)
    numbers = torch.arange(len(rows), device=tile.query.device)
    scores = tile_scores(bare, problem, numbers, range(len(cols)), all_seen=True)
    wants_dropped = problem.wants(Aux.DROPPED_MASS)
    masked = replace(tile, blocks=None) if wants_dropped else tile
    bias, seen = tile_masks(masked, problem, rows, cols)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    unlisted = None
    if wants_dropped:
        assert tile.blocks is not None
        listed = listed_keys(tile.blocks, rows, cols, tile.query)
        unlisted = scores.detach().masked_fill(listed, float("-inf")).logsumexp(-1)
        scores = scores.masked_fill(~listed, float("-inf"))
    found = softmax_rows(scores, tile.sinks, problem.aux)
    weights = found.weights
    dropped = F.dropout(weights, problem.dropout_p) if problem.dropout_p > 0 else weights
    output = grouped_product(dropped, tile.value.to(weights.dtype)).to(tile.query.dtype)
    piece: list[torch.Tensor] = [output]
    if problem.wants(Aux.LSE):
        piece.append(found.lse)
    if problem.wants(Aux.ROW_MAX):
        piece.append(found.row_max)
    if found.entropy is not None:
        piece.append(found.entropy)
    if problem.wants(Aux.WEIGHTS):
        piece.append(F.pad(weights, (cols.start, problem.len_k - cols.stop)))
    if unlisted is not None:
        share = torch.sigmoid(unlisted - found.lse.detach())
        piece.append(share.masked_fill(unlisted == float("-inf"), 0.0))
    return tuple(piece)


def as_result(columns: list[torch.Tensor], aux: Aux) -> Result:
    """Return the result whose auxiliary outputs follow the order of `Aux`."""
    if aux is Aux.NONE:
        return Result(output=columns[0])
    wanted = (name for name, flag in _AUXILIARY.items() if aux.value & flag)
    return Result(**dict(zip(("output", *wanted), columns, strict=True)))
