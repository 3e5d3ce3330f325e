"""The sequences of a batch one at a time, each as it would come alone.

What a library's product rounds depends on the shape that it is given, on its strides, and on where
it lies. Here each sequence has tensors of its own: contiguous, at an aligned address. So the same
functions see the same numbers in the same places, whatever else the batch holds, and none of them
has to promise more than that it does the same twice.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from adaattn.backends.common import sequences
from adaattn.backends.interface import Tensors
from adaattn.backends.keys_values import KeysValues
from adaattn.backends.own_kernels import check_untransformed
from adaattn.spec import AttentionProblem

__all__ = ["one_by_one"]

_ALIGNED_BYTES: Final = 64
"""Where PyTorch's allocators begin a tensor, at least."""


def one_by_one(
    tensors: Tensors, problem: AttentionProblem
) -> Iterator[tuple[Tensors, AttentionProblem]]:
    """Yield each sequence, packed or of a batch, as a problem of its own.

    Args:
        tensors: of the whole call.
        problem: what it computes.

    Raises:
        ExecutorError: a transform of ``torch.func`` hides what is in the batch.
    """
    check_untransformed(tensors.query, tensors.key, tensors.value)
    parts = sequences(tensors, problem) if problem.num_sequences else _of_batch(tensors, problem)
    for part, its_problem in parts:
        mask, slopes = part.mask, part.alibi_slopes
        own = replace(
            part,
            query=_own(part.query),
            kv=KeysValues(key=_own(part.key), value=_own(part.value)),
            mask=None if mask is None else _own(mask),
            mask_given=None,
            alibi_slopes=None if slopes is None else _own(slopes),
        )
        shape = () if mask is None else tuple(mask.shape)
        # Which kernel SDPA would take, and how tensors lie, was said of all of them together.
        yield own, replace(its_problem.without_layout(), batch=1, mask_shape=shape, sdpa_default="")


def _of_batch(
    tensors: Tensors, problem: AttentionProblem
) -> Iterator[tuple[Tensors, AttentionProblem]]:
    """Yield the rows of a dense batch as views."""
    for place in range(problem.batch):
        row = slice(place, place + 1)
        mask, slopes = (
            item if item is None or item.shape[0] == 1 else item[row]
            for item in (tensors.mask, tensors.alibi_slopes)
        )
        blocks = tensors.blocks
        if blocks is not None and blocks.counts.shape[0] > 1:
            blocks = replace(blocks, counts=blocks.counts[row], indices=blocks.indices[row])
        yield (
            replace(
                tensors,
                query=tensors.query[row],
                kv=KeysValues(key=tensors.key[row], value=tensors.value[row]),
                mask=mask,
                alibi_slopes=slopes,
                blocks=blocks,
            ),
            problem,
        )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a fresh one of its shape would lie; itself if it lies so."""
    flat = tensor.contiguous().view(-1)
    if flat.data_ptr() % _ALIGNED_BYTES:
        flat = flat.clone()
    return flat.view(tensor.shape)
