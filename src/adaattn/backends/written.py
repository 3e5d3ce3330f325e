"""Softcap and sinks as users of PyTorch write them: products and a softmax in the input's dtype.

Fewer passes over the scores than `explicit` makes, and no statistics of rows. Where the processor
multiplies 16-bit numbers no faster than 32 bits, products are of 32 bits.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from adaattn.backends.common import (
    accumulation_dtype,
    grouped_product,
    hides_nothing,
    multiplies_as_is,
    never_hides,
)
from adaattn.backends.interface import Direct, Tensors
from adaattn.backends.masked import grown_chunk, only_chunk, tile_masks
from adaattn.backends.masks import may_keep, stream_of, with_rank
from adaattn.backends.tiles import kept, made_tile, tile_key
from adaattn.spec import AttentionProblem, Aux, HeadGroup, MaskKind

__all__ = [
    "is_written",
    "packed_written",
    "whole_written",
    "written_tile",
]

_HIDDEN = float("-inf")


def is_written(problem: AttentionProblem) -> bool:
    """Return whether a chunk is softcap, sinks and what is seen, and no more.

    What is added to scores is added in 32 bits: by `explicit` to those that have fewer.
    """
    added = problem.has_alibi or problem.mask is MaskKind.ADDITIVE
    is_narrow = added and problem.precision.bits < 32
    return problem.aux is Aux.NONE and not is_narrow and not problem.head_terms.value


def written_tile(
    tile: Tensors, problem: AttentionProblem, rows: range, cols: range
) -> tuple[torch.Tensor, ...]:
    """Return the output of some rows; the tile's tensors hold them and their keys alone."""
    bias, seen = tile_masks(tile, problem, rows, cols)
    hidden = None if seen is None else ~seen
    given = tile.mask is not None or tile.blocks is not None
    blind = given or not _sees_itself(problem) or not cols
    tensors = tile.query, tile.key, tile.value, tile.sinks
    return (_attend(*tensors, hidden, _Numbers.of(problem), blind=blind, bias=bias),)


def whole_written(problem: AttentionProblem, group: HeadGroup) -> Direct | None:
    """Return the function of a problem that is one chunk; None where it is not."""
    is_masked = problem.mask is not MaskKind.NONE
    is_added = problem.mask is MaskKind.ADDITIVE
    unmasked = replace(problem, mask=MaskKind.NONE, mask_shape=()) if is_masked else problem
    chunk = only_chunk(unmasked, group)
    if chunk is None or problem.has_alibi or not is_written(problem):
        return None
    rows, cols = chunk
    part = slice(cols.start, cols.stop) if len(cols) < problem.len_k else None
    hides = not hides_nothing(problem, rows, cols)
    blind = is_masked or not _sees_itself(problem)
    is_free = never_hides(problem)
    numbers = _Numbers.of(problem)
    place: object = None

    def make(device: torch.device) -> torch.Tensor:
        return ~made_tile(problem, rows, cols, device, torch.bool)

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        *rest: None,
    ) -> torch.Tensor:
        if not is_free and (key.shape[2] != problem.len_k or not may_keep(query)):
            seen = None if mask is None else with_rank(mask, 4)
            tensors = Tensors.of(query, key, value, mask=seen, sinks=sinks)
            return written_tile(*grown_chunk(tensors, problem))[0]
        if part is not None:
            key, value = key[:, :, part], value[:, :, part]
            mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., part]
        bias = mask if is_added else None
        hidden = None if mask is None or is_added else ~mask
        if hides:
            nonlocal place
            place = place or ("hidden", tile_key(problem, rows, cols, query, torch.bool))
            ahead = kept((place, stream_of(query)), partial(make, query.device))
            hidden = ahead if hidden is None else hidden | ahead
        return _attend(query, key, value, sinks, hidden, numbers, blind=blind, bias=bias)

    return run


def packed_written(
    tensors: Tensors, hidden: torch.Tensor, problem: AttentionProblem
) -> torch.Tensor:
    """Return the output of packed sequences as one tile: scores between them are hidden.

    Args:
        tensors: packed.
        hidden: boolean [Tq, Tk].
        problem: of all sequences.
    """
    blind = not problem.packed_square
    query, key, value = tensors.query, tensors.key, tensors.value
    return _attend(query, key, value, tensors.sinks, hidden, _Numbers.of(problem), blind=blind)


class _Numbers(NamedTuple):
    """What a problem says of its scores, read once for all bound calls.

    Whether products are computed in a wider dtype, a scale that is divided by the softcap, the
    softcap, and the probability of dropout.
    """

    is_widened: bool
    scale: float
    cap: float
    dropout_p: float

    @classmethod
    def of(cls, problem: AttentionProblem) -> Self:
        """Return those of a problem."""
        as_is = problem.device_type != "cpu" or multiplies_as_is(problem.precision)
        cap = problem.softcap
        return cls(
            not as_is, problem.scale / cap if cap > 0 else problem.scale, cap, problem.dropout_p
        )


def _sees_itself(problem: AttentionProblem) -> bool:
    """Return whether each row stands at a key, which position always lets it see."""
    return problem.offset >= 0 and problem.offset + problem.len_q <= problem.len_k


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    hidden: torch.Tensor | None,
    numbers: _Numbers,
    *,
    blind: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of rows over keys.

    Args:
        query: [B, Hq, R, D].
        key: [B, Hkv, C, D].
        value: [B, Hkv, C, Dv].
        sinks: [Hq], or None.
        hidden: boolean, broadcastable to [B, Hq, R, C]; None where no key is.
        numbers: of the problem.
        blind: a row may see nothing.
        bias: added to the scores, broadcastable likewise.
    """
    is_widened, scale, cap, dropout_p = numbers
    own = dtype = query.dtype
    if is_widened:
        dtype = accumulation_dtype(own)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, rows, width = query.shape
    kv_heads, columns = key.shape[1:3]
    product = torch.matmul if heads == kv_heads else grouped_product
    # Scaled late are the fewer numbers, and in bf16 all, which rounds them once less. fp16 has no
    # room for products that are not scaled.
    late = dtype is torch.bfloat16 or (columns < width and dtype is not torch.float16)
    scores = product(query if late else query * scale, key.mT)
    # In a transform of torch.func a mask may have more dimensions than scores have.
    alone = torch._C._functorch.peek_interpreter_stack() is None
    in_place = alone and not scores.requires_grad
    if late:
        scores = scores.mul_(scale) if in_place else scores * scale
    if cap > 0:
        scores = scores.tanh_().mul_(cap) if in_place else cap * torch.tanh(scores)
    if bias is not None:
        scores = (scores.add_ if in_place and not bias.requires_grad else scores.add)(bias)
    if hidden is not None:
        in_place = in_place and not scores.requires_grad
        scores = (scores.masked_fill_ if in_place else scores.masked_fill)(hidden, _HIDDEN)
    unseen = None
    blind = blind and not (hidden is bias is None)
    if blind and sinks is None:
        # Weights that are NaN would be so in gradients, and products of bf16 by the tiles of a CPU
        # (oneDNN) multiply what lies behind a row by 0: NaN in the row before them.
        if bias is None and hidden is not None:
            unseen = hidden.all(-1, keepdim=True)
        else:
            unseen = (scores.detach() == _HIDDEN).all(-1, keepdim=True)
        scores = (scores.masked_fill_ if in_place else scores.masked_fill)(unseen, 0.0)
    if sinks is not None:
        column = sinks if sinks.dtype is dtype else sinks.to(dtype)
        if blind:  # a number, so that a row which sees nothing leaves all its weight to it
            column = column.clamp(min=torch.finfo(dtype).min)
        column = column.view(heads, 1, 1).expand(batch, heads, rows, 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1)
    if sinks is not None:
        weights = weights.narrow(-1, 0, columns)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    output = product(weights, value)
    if unseen is not None:
        output = output.masked_fill(unseen, 0.0)
    return output.to(own) if is_widened else output
