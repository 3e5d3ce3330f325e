"""Block masks made in parts: those that PyTorch makes at once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from adaattn.backends import flex
from adaattn.spec import Align
from adaattn.testing import make_problem, make_tensors

CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window": (200, 0)},
    "dilation": {"dilation": 3, "is_causal": True},
    "bottom right": {"is_causal": True, "len_q": 130, "align": Align.BOTTOM_RIGHT},
    "odd": {"is_causal": True, "len_q": 1000, "len_k": 777},
}


@pytest.mark.parametrize("elements", [1, 1 << 26], ids=["row by row", "at once"])
@pytest.mark.parametrize("name", CASES)
def test_a_block_mask_is_the_one_that_pytorch_makes(
    monkeypatch: pytest.MonkeyPatch, name: str, elements: int
) -> None:
    monkeypatch.setattr(flex, "_MASK_ELEMENTS", elements)
    problem = make_problem(**{"num_heads": 2, "len_q": 512, "len_k": 512, **CASES[name]})
    mask_mod = flex._mask_mod(make_tensors(problem, seed=0), problem)
    assert mask_mod is not None
    _check(mask_mod, (1, 1, problem.len_q, problem.len_k))


def test_a_mask_of_each_batch_and_head_is_too() -> None:
    problem = make_problem(num_heads=2, batch=3, len_q=300, len_k=260, is_causal=True)
    tensors = replace(make_tensors(problem, seed=0), mask=torch.rand(3, 2, 300, 260) > 0.5)
    mask_mod = flex._mask_mod(tensors, problem)
    assert mask_mod is not None
    _check(mask_mod, (3, 2, 300, 260))


def _check(mask_mod: Any, shape: tuple[int, int, int, int]) -> None:
    found = flex.made_block_mask(mask_mod, shape, torch.device("cpu"))
    expected = create_block_mask(mask_mod, *shape, device="cpu")
    for name in (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
        "full_q_num_blocks",
        "full_q_indices",
    ):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
