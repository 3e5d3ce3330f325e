"""What a problem says of how tensors lie."""

import pytest
import torch

from adaattn.backends.common import layout_facts
from adaattn.spec.evidence import problem_class
from adaattn.testing import make_problem


class OnCard(torch.Tensor):
    """A tensor that says of itself that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("shape", "dtype", "aligned"),
    [
        ((2, 1, 64, 48), torch.bool, True),
        ((2, 1, 64, 40), torch.bool, False),
        ((2, 1, 64, 40), torch.bfloat16, True),
        ((1, 4, 64, 36), torch.bfloat16, False),
        ((1, 4, 64, 36), torch.float32, True),
        ((4, 1, 1, 37), torch.bfloat16, True),  # one row: it is not read by tiles
        ((37,), torch.bfloat16, True),
    ],
)
def test_a_mask_whose_rows_tma_cannot_read_is_a_class_of_its_own(
    shape: tuple[int, ...], dtype: torch.dtype, aligned: bool
) -> None:
    mask = torch.zeros(shape, dtype=dtype)
    query = torch.zeros(1, 4, 64, 64)
    facts = layout_facts(query, mask=mask.as_subclass(OnCard))
    assert facts == layout_facts(query) | {"mask_is_aligned": aligned}
    assert layout_facts(query, mask=mask)["mask_is_aligned"], "a CPU does not ask"
    name = problem_class(make_problem(mask_is_aligned=aligned))
    assert ("unaligned" in name.split()) is not aligned


def test_it_is_the_strides_that_count() -> None:
    query, wide = torch.zeros(1, 4, 64, 64), torch.zeros(1, 1, 64, 72, dtype=torch.bfloat16)
    part = wide.as_subclass(OnCard)[..., :37]
    assert layout_facts(query, mask=part)["mask_is_aligned"]
    odd = torch.zeros(1, 1, 64, 73, dtype=torch.bfloat16).as_subclass(OnCard)[..., :64]
    assert not layout_facts(query, mask=odd)["mask_is_aligned"]
