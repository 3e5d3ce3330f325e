"""Slightly wrong results. An assertion about attention that accepts one is worthless."""

from collections.abc import Callable
from dataclasses import replace

import torch

from adaattn.backends.interface import Result, Tensors
from adaattn.backends.reference import attention
from adaattn.spec import Align, AttentionProblem
from adaattn.testing.inputs import with_tensors

__all__ = ["mutations"]

_SCALE_ROUNDINGS = 32


def mutations(tensors: Tensors, problem: AttentionProblem) -> dict[str, Result]:
    """Return wrong results of a call, by what is wrong with them.

    Only mistakes that change this problem's result are in it: swapped heads need two, and
    a mistaken alignment needs Sq != Sk.

    Args:
        tensors: at least two queries and two keys.
        problem: what they are for.
    """
    slightly = 1 + _SCALE_ROUNDINGS * torch.finfo(tensors.query.dtype).eps
    wrong = {
        "scale dropped": attention(tensors, replace(problem, scale=1.0)),
        "scale slightly off": attention(tensors, replace(problem, scale=slightly * problem.scale)),
        "last key lost": attention(_without_last_key(tensors), problem),
    }
    if problem.is_causal:
        left, _ = problem.window
        late = replace(problem, is_causal=False, window=(left, 1))
        wrong["causal mask off by one"] = attention(tensors, late)
    if problem.window[0] >= 0:
        left, right = problem.window
        wrong["window off by one"] = attention(tensors, replace(problem, window=(left + 1, right)))
    if problem.is_positional and problem.len_q != problem.len_k and not problem.num_sequences:
        other = Align.TOP_LEFT if problem.align is Align.BOTTOM_RIGHT else Align.BOTTOM_RIGHT
        wrong["other alignment"] = attention(tensors, replace(problem, align=other))
    if problem.softcap > 0:
        wrong["softcap dropped"] = attention(tensors, replace(problem, softcap=0.0))
    if tensors.sinks is not None:
        wrong["sinks dropped"] = attention(replace(tensors, sinks=None), problem)
    if tensors.alibi_slopes is not None:
        wrong["ALiBi dropped"] = attention(replace(tensors, alibi_slopes=None), problem)
    if tensors.head_terms is not None:
        wrong["numbers of heads dropped"] = attention(replace(tensors, head_terms=None), problem)
    if tensors.blocks is not None:
        wrong["list of blocks dropped"] = attention(replace(tensors, blocks=None), problem)
    if tensors.mask is not None:
        wrong["mask dropped"] = attention(replace(tensors, mask=None), problem)

    correct = attention(tensors, problem)
    wrong["one NaN"] = _edited(correct, lambda output: output[0, 0, -1, -1:].fill_(float("nan")))
    wrong["one row unwritten"] = _edited(correct, lambda output: output[0, -1, -1].zero_())
    wrong["one element doubled"] = _edited(correct, _double_largest)
    if problem.num_heads > 1:
        wrong["heads swapped"] = replace(correct, output=correct.output.flip(1))
    return wrong


def _edited(result: Result, edit: Callable[[torch.Tensor], object]) -> Result:
    """Return the result with a changed copy of its output."""
    output = result.output.detach().clone()
    edit(output)
    return replace(result, output=output)


def _double_largest(output: torch.Tensor) -> None:
    """Double the element of largest magnitude."""
    flat = output.view(-1)
    flat[flat.abs().argmax()] *= 2


def _without_last_key(tensors: Tensors) -> Tensors:
    """Return the tensors with the last key's value zeroed, as a tail cut off by a tile would."""
    value = tensors.value.detach().clone()
    value[:, :, -1] = 0
    return with_tensors(tensors, value=value)
