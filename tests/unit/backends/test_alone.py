"""Sequences taken out of a batch lie as they would alone, whatever lay beside them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends.alone import one_by_one
from adaattn.backends.interface import Tensors
from adaattn.errors import ExecutorError
from adaattn.spec import AttentionProblem, MaskKind
from adaattn.testing import Layout, make_problem, make_tensors

DENSE: dict[str, dict[str, Any]] = {
    "odd columns": {"batch": 3, "head_dim": 5, "len_q": 7},
    "ALiBi": {"batch": 2, "has_alibi": True},
    "a mask of its own": {"batch": 3, "mask": MaskKind.BOOLEAN, "mask_shape": (3, 1, 1, 8)},
    "a mask of all": {"batch": 3, "mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 8, 8)},
    "groups": {"batch": 2, "num_heads": 4, "num_kv_heads": 1},
}


def lying(tensors: Tensors) -> list[tuple[Any, ...]]:
    """Return how each tensor lies."""
    named = (tensors.query, tensors.key, tensors.value, tensors.mask, tensors.alibi_slopes)
    return [(it.shape, it.stride(), it.data_ptr() % 64) for it in named if it is not None]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", DENSE)
def test_each_row_of_a_batch_lies_as_it_would_alone(name: str, layout: Layout) -> None:
    problem = make_problem(**DENSE[name], batch_invariant=True)
    tensors = make_tensors(problem, layout=layout)
    parts = list(one_by_one(tensors, problem))
    assert len(parts) == problem.batch
    for row, (part, own) in enumerate(parts):
        assert torch.equal(part.query[0], tensors.query[row])
        assert torch.equal(part.key[0], tensors.key[row])
        assert torch.equal(part.value[0], tensors.value[row])
        assert lying(part) == lying(parts[0][0])
        assert all(at == 0 for *_, at in lying(part))
        assert all(item.is_contiguous() for item in (part.query, part.key, part.value))
        assert own == parts[0][1]
        assert (own.batch, own.sdpa_default, own.stride_bytes) == (1, "", 1)


def test_packed_sequences_lie_so_too() -> None:
    lengths = (3, 5, 0, 5)
    problem = make_problem(lengths_q=lengths, head_dim=5, batch_invariant=True)
    tensors = make_tensors(problem, lengths_q=lengths)
    parts = list(one_by_one(tensors, problem))
    assert [part.query.shape[2] for part, _ in parts] == list(lengths)
    assert lying(parts[1][0]) == lying(parts[3][0])
    assert torch.equal(parts[1][0].query, tensors.query[:, :, 3:8])
    assert all(own.num_sequences == 0 for _, own in parts)


def test_what_lies_so_already_is_not_copied() -> None:
    problem = make_problem(batch=2, head_dim=16, batch_invariant=True)
    tensors = make_tensors(problem)
    for row, (part, _) in enumerate(one_by_one(tensors, problem)):
        assert part.query.data_ptr() == tensors.query[row].data_ptr()


def test_a_transform_hides_what_is_in_the_batch() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        problem: AttentionProblem = replace(make_problem(), batch_invariant=True)
        ((part, _),) = one_by_one(Tensors.of(x, x, x), problem)
        return part.query

    with pytest.raises(ExecutorError, match=r"torch\.func"):
        torch.func.vmap(call)(torch.randn(2, 1, 2, 8, 16))
