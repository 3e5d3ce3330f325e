"""What listed blocks leave out: the Hopper kernel's bound, run on a CPU (`conftest.py`)."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends import hopper, load
from adaattn.backends.hopper.launch import choose
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, HeadTerm, MaskKind, Precision
from adaattn.testing import (
    assert_executor_matches,
    assert_matches,
    cast_tensors,
    make_problem,
    make_tensors,
    poisoned_memory,
    with_tensors,
)

pytestmark = pytest.mark.usefixtures("simulated")

TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
USUAL: dict[str, Any] = {
    **{"precision": Precision.BF16, "head_dim": 32, "block_size": (128, 128)},
    **{"len_q": 300, "len_k": 700, "aux": Aux.DROPPED_MASS},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "beside the log-sum-exp": {"aux": Aux.DROPPED_MASS | Aux.LSE | Aux.ENTROPY},
    "beside the row maximum": {"aux": Aux.DROPPED_MASS | Aux.ROW_MAX},
    "two sequences": {"batch": 2},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2},
    "causal": {"len_q": 700, "is_causal": True},
    "to the end": {"len_q": 500, "len_k": 630, **TO_END},
    "to the end, fewer keys": {"len_q": 500, "len_k": 130, **TO_END},
    "window": {"len_q": 500, "window": (150, 40)},
    "blocks of 64 keys": {"block_size": (128, 64), "is_causal": True},
    "blocks of 192 keys": {"block_size": (128, 192)},
    "large blocks": {"len_q": 700, "block_size": (256, 256), "is_causal": True},
    "fewer keys than a block": {"len_k": 50},
    "columns of 128": {"head_dim": 128},
    "columns of 256": {"head_dim": 256, "is_causal": True},
    "half": {"precision": Precision.FP16},
    "softcap, sinks, ALiBi": {"softcap": 5.0, "has_sinks": True, "has_alibi": True, **TO_END},
    "mask": {"mask": MaskKind.BOOLEAN},
    "mask that TMA could read": {"len_k": 704, "mask": MaskKind.BOOLEAN},
    "mask of one column": {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 300, 1), "len_k": 300},
    "bias": {"mask": MaskKind.ADDITIVE},
    "bias that TMA could read": {"len_k": 704, "mask": MaskKind.ADDITIVE, "is_causal": True},
    "numbers of each head": {"head_terms": HeadTerm(7), "num_heads": 4},
    "batch-invariant": {"batch_invariant": True, "is_causal": True},
}  # fmt: skip


def run(tensors: Tensors, problem: AttentionProblem) -> Result:
    with poisoned_memory():
        return hopper.run(tensors, problem, HeadGroup(capability="hopper"))


def widened(tensors: Tensors, problem: AttentionProblem) -> tuple[Tensors, AttentionProblem]:
    """Return the same in fp64."""
    return cast_tensors(tensors, torch.float64), replace(problem, precision=Precision.FP64)


def bound(tensors: Tensors, problem: AttentionProblem, columns: int) -> torch.Tensor:
    """Return the bound by its definition, eagerly: [B, Hq, Sq]; blocks have so many keys."""
    asked = replace(problem, aux=Aux.LSE)
    listed = load("reference")(tensors, asked, HeadGroup(capability="reference"))
    assert listed.lse is not None and tensors.blocks is not None
    keys, (rows, per_block) = problem.len_k, problem.block_size
    counts, indices = tensors.blocks.counts, tensors.blocks.indices
    dropped = torch.zeros_like(listed.lse)
    for start in range(0, keys, columns):
        place = torch.arange(indices.shape[-1])
        named = (indices == start // per_block) & (place < counts[..., None])
        is_listed = named.any(-1) | (counts < 0)
        is_listed = is_listed.repeat_interleave(rows, -1)[..., : problem.len_q]
        # The maximum over one block of keys: of a call that sees that block alone.
        alone = (torch.arange(keys) // columns == start // columns).view(1, 1, 1, keys)
        only = replace(problem, aux=Aux.ROW_MAX, mask=MaskKind.BOOLEAN, mask_shape=(1, 1, 1, keys))
        only = replace(only, block_size=(0, 0), most_blocks=0, has_sinks=False)
        part = replace(tensors, mask=alone, blocks=None, sinks=None)
        found = load("reference")(part, only, HeadGroup(capability="reference")).row_max
        assert found is not None
        weight = min(columns, keys - start) * found.exp()
        dropped += torch.where(is_listed, 0.0, weight)
    return torch.where(dropped > 0, dropped / (dropped + listed.lse.exp()), 0.0)


@pytest.mark.parametrize("name", CASES)
def test_the_bound_is_no_smaller_than_what_is_left_out(name: str) -> None:
    problem = make_problem(**(USUAL | CASES[name]))
    result = assert_executor_matches(run, make_tensors(problem), problem)
    assert (result.lse is not None) is problem.wants(Aux.LSE)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "mask" not in case])
def test_it_is_the_bound_that_it_is_said_to_be(name: str) -> None:
    problem = make_problem(**(USUAL | CASES[name]))
    tensors = make_tensors(problem)
    found, columns = run(tensors, problem).dropped_mass, choose(problem).tiling.block_n
    exact = bound(*widened(tensors, problem), columns)
    assert found is not None
    assert torch.equal(found == 0, exact == 0)
    assert_matches(found, exact, bound(tensors, problem, columns), summands=problem.len_k)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_that_are_computed_again_have_their_bound(is_causal: bool) -> None:
    problem = make_problem(**(USUAL | {"len_q": 600, "is_causal": is_causal}))
    tensors = make_tensors(problem)
    key = tensors.key.clone()
    key[:, :, 20:300] *= 300
    assert_executor_matches(run, with_tensors(tensors, key=key), problem)


def test_where_all_scores_are_equal_the_bound_is_what_is_left_out() -> None:
    problem = make_problem(**(USUAL | {"len_k": 640}))
    tensors = make_tensors(problem)
    tensors = with_tensors(tensors, query=torch.zeros_like(tensors.query))
    found = run(tensors, problem).dropped_mass
    exact, eager = (
        load("reference")(*given, HeadGroup(capability="reference")).dropped_mass
        for given in (widened(tensors, problem), (tensors, problem))
    )
    assert found is not None and exact is not None and eager is not None
    assert_matches(found, exact, eager, summands=problem.len_k)


def test_numbers_of_lists_that_nobody_checked_lead_to_no_other_memory() -> None:
    problem = make_problem(**(USUAL | {"window": (200, 100), "num_heads": 1}))
    tensors = make_tensors(problem)
    assert tensors.blocks is not None
    counts, indices = tensors.blocks.counts, tensors.blocks.indices
    for seed in range(4):
        torch.manual_seed(seed)
        counts.random_(-(2**31), 2**31 - 1) if seed % 2 else counts.random_(-3, 9)
        indices.random_(-(2**31), 2**31 - 1) if seed > 1 else indices.random_(-2, 7)
        run(tensors, problem)
