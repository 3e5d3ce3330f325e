"""The Hopper kernel's device code, run on a CPU (`conftest.py`), against the oracle."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.block_list import BlockList
from adaattn.backends.hopper import prepared
from adaattn.backends.hopper.launch import choose
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    assert_executor_matches,
    make_problem,
    make_tensors,
    poisoned_memory,
)

pytestmark = pytest.mark.usefixtures("simulated")


def run(tensors: Tensors, problem: AttentionProblem) -> Result:
    with poisoned_memory():
        return hopper.run(tensors, problem, HeadGroup(capability="hopper"))


def held_to_the_oracle(tensors: Tensors, problem: AttentionProblem) -> Result:
    return assert_executor_matches(run, tensors, problem)


USUAL: dict[str, Any] = {"precision": Precision.BF16, "head_dim": 64, "num_heads": 2}
ALL_AUX = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
DENSE: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 300},
    "causal": {"len_q": 300, "is_causal": True, "aux": Aux.LSE},
    "causal, whole blocks": {"len_q": 256, "is_causal": True, "aux": Aux.LSE},
    "window": {"len_q": 300, "is_causal": True, "window": (70, -1), "aux": Aux.ENTROPY},
    "everything": {"len_q": 200, "softcap": 5.0, "has_sinks": True, "has_alibi": True, **TO_END,
                   "len_k": 230, "aux": ALL_AUX},
    "mask": {"len_q": 150, "mask": MaskKind.ADDITIVE, "precision": Precision.FP16},
    "padding": {"batch": 2, "len_q": 70, "mask": MaskKind.BOOLEAN, "mask_shape": (2, 1, 1, 70)},
    "softcap in half": {"len_q": 70, "softcap": 1.5, "precision": Precision.FP16, "aux": ALL_AUX},
    "a tile that ends with a block's first key": {"len_q": 193, "is_causal": True,
                                                  "window": (5, -1), "aux": Aux.LSE},
    "32 columns": {"len_q": 300, "is_causal": True, "head_dim": 32},
    "128 columns": {"len_q": 200, "softcap": 5.0, "is_causal": True, "window": (70, -1),
                    "head_dim": 128},
    "mask at 128 columns": {"len_q": 300, "mask": MaskKind.ADDITIVE, "head_dim": 128},
    "three warpgroups": {"len_q": 190, "len_k": 1100, "window": (70, 50)},
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    problem = make_problem(**(USUAL | DENSE[name]))
    held_to_the_oracle(make_tensors(problem), problem)


@pytest.mark.parametrize("name", ["causal", "window", "128 columns", "three warpgroups"])
def test_warpgroups_begin_their_products_in_turns(name: str, simulated: Any) -> None:
    """Also those of blocks that one of them skips."""
    turns: list[int] = []

    def noted(function: Any) -> Any:
        def take_turn(c: Any, w: int) -> None:
            function(c, w)
            turns.append(w)

        return take_turn

    simulated.replace("take_turn", noted)
    problem = make_problem(**(USUAL | DENSE[name]))
    held_to_the_oracle(make_tensors(problem), problem)
    tiling = choose(problem).tiling
    assert tiling.warpgroups == (3 if name == "three warpgroups" else 2)
    assert turns == [n % tiling.warpgroups for n in range(len(turns))]
    assert len(turns) >= 2 * tiling.warpgroups


BIAS: dict[str, Any] = {"mask": MaskKind.ADDITIVE}
BOOLEAN: dict[str, Any] = {"mask": MaskKind.BOOLEAN}
STAGED: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 300, "len_k": 272, **BIAS, "aux": Aux.LSE | Aux.ENTROPY},
    "causal, a tile's warpgroups see different keys": {"len_q": 400, **BIAS, **TO_END},
    "window": {"len_q": 400, "is_causal": True, "window": (70, -1), **BIAS},
    "wide numbers": {"len_q": 300, "len_k": 260, **BIAS, "mask_is_wide": True, "head_dim": 128},
    "half": {"len_q": 150, "len_k": 400, **BIAS, "precision": Precision.FP16, "aux": ALL_AUX},
    "columns of 128": {"len_q": 300, "len_k": 400, **BIAS, "head_dim": 128, "is_causal": True},
    "columns of 256": {"len_q": 150, "len_k": 208, **BIAS, "head_dim": 256, **TO_END},
    "booleans, columns of 256": {"len_q": 150, "len_k": 208, **BOOLEAN, "head_dim": 256,
                                 "aux": ALL_AUX},
    "latent heads": {"len_q": 150, "len_k": 208, **BIAS, "head_dim": 192, "value_dim": 128},
    "for all heads": {"len_q": 150, "len_k": 304, **BIAS, "mask_shape": (1, 1, 150, 304)},
    "of each batch": {"batch": 2, "len_q": 70, "len_k": 272, **BOOLEAN,
                      "mask_shape": (2, 1, 70, 272)},
    "of two dimensions": {"len_q": 150, "len_k": 304, **BOOLEAN, "mask_shape": (150, 304)},
    "booleans": {"len_q": 300, "len_k": 400, **BOOLEAN, "head_dim": 128, "aux": ALL_AUX},
    "booleans, causal": {"len_q": 400, **BOOLEAN, **TO_END},
    "more than a bias": {"len_q": 200, "len_k": 272, **BIAS, "softcap": 5.0, "has_alibi": True,
                         "has_sinks": True, "is_causal": True},
    "grouped heads": {"len_q": 150, "len_k": 208, "num_heads": 4, "num_kv_heads": 2, **BIAS},
}  # fmt: skip


@pytest.mark.parametrize("num_hidden_rows", [0, 70])
@pytest.mark.parametrize("name", STAGED)
def test_masks_that_pass_through_shared_memory(name: str, num_hidden_rows: int) -> None:
    problem = make_problem(**(USUAL | STAGED[name]))
    assert choose(problem).tiling.stages_m
    held_to_the_oracle(make_tensors(problem, num_hidden_rows=num_hidden_rows), problem)


def test_a_staged_mask_may_be_a_view() -> None:
    """Expanded over heads, with rows further apart than they are long."""
    problem = make_problem(**(USUAL | {"len_q": 150, "len_k": 200, **BIAS}))
    mask = torch.randn(1, 1, 150, 208).bfloat16()[..., :200].expand(1, 2, 150, 200)
    held_to_the_oracle(replace(make_tensors(problem), mask=mask), problem)


def test_one_column_for_all_keys_may_be_a_view() -> None:
    problem = make_problem(**(USUAL | {"len_q": 70, "len_k": 272, **BIAS}))
    mask = torch.randn(1, 1, 70, 272).bfloat16()[..., :1]
    held_to_the_oracle(replace(make_tensors(problem), mask=mask), problem)


def distances() -> torch.Tensor:
    return (torch.arange(512)[:, None] - torch.arange(512)).float()


USUAL_BIASES: dict[str, Callable[[], torch.Tensor]] = {
    "padding on the right": lambda: torch.where(torch.arange(512) < 300, 0.0, -1e4).expand(
        512, 512
    ),
    "causal order": lambda: torch.where(distances() >= 0, 0.0, -1e9),
    "causal order, infinite": lambda: torch.where(distances() >= 0, 0.0, -torch.inf),
    "slopes": lambda: -0.5 * distances().abs(),
}


@pytest.mark.parametrize("name", USUAL_BIASES)
def test_biases_of_every_day_are_computed_once(name: str, simulated: Any) -> None:
    """A fixed reference that a hidden block of keys gave would have all tiles computed again."""
    tiles = []

    def counted(function: Any) -> Any:
        def run(c: Any, w: int, tile: Any, *rest: Any) -> Any:
            tiles.append(int(tile))
            return function(c, w, tile, *rest)

        return run

    simulated.replace("attend_tile", counted)
    problem = make_problem(**(USUAL | {"len_q": 512, **BIAS}))
    bias = USUAL_BIASES[name]()[None, None].to(torch.bfloat16)
    held_to_the_oracle(replace(make_tensors(problem), mask=bias.contiguous()), problem)
    assert len(tiles) == 2 * len(set(tiles))


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 2.0**21])
def test_a_bias_beside_a_scale_that_it_cannot_be_divided_by(scale: float) -> None:
    problem = make_problem(**(USUAL | {"len_q": 70, "len_k": 272, **BIAS, "scale": scale}))
    assert not choose(problem).mask_is_first
    tensors = make_tensors(problem)
    assert tensors.mask is not None
    small = replace(tensors, query=tensors.query * min(1.0, 1.0 / scale))
    held_to_the_oracle(replace(small, mask=tensors.mask * 10), problem)


PADDED: dict[str, Any] = {"len_q": 70, "len_k": 272, "head_dim": 64, "num_heads": 1,
                          "mask_shape": (1, 1, 1, 272), **BIAS}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"aux": Aux.ROW_MAX},
        {"aux": Aux.ROW_MAX, "mask_is_wide": True},
        {"precision": Precision.FP16, "mask_is_wide": True},
    ],
    ids=["bf16", "a wide bias", "half"],
)
def test_a_bias_of_padding_makes_no_weight_infinite(
    values: dict[str, Any], simulated: Any, rewritten: Callable[..., Any]
) -> None:
    """A GPU does not round the product of `held_to`, but that of which the reference is made."""
    old = "t * factor - gl.expand_dims(base, 1)"
    new = "(t.double() * factor - gl.expand_dims(base, 1)).float()"
    simulated.replace("held_to", partial(rewritten, old=old, new=new))
    problem = make_problem(**(USUAL | PADDED | values))
    tensors = make_tensors(problem)
    assert tensors.mask is not None
    bias = torch.zeros_like(tensors.mask)
    bias[..., 100:] = -1e10
    held_to_the_oracle(replace(tensors, mask=bias), problem)


def test_a_kernel_for_masks_that_tma_cannot_read_is_known_to_be_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = []
    monkeypatch.setattr(prepared, "note", noted.append)
    problem = make_problem(**(USUAL | {"len_q": 70, "len_k": 272, **BIAS}))
    mask = torch.randn(1, 1, 70, 273).bfloat16()[..., :272]
    run(replace(make_tensors(problem), mask=mask), problem)
    assert ("hopper", choose(problem)) in noted


def test_scores_beyond_the_fixed_reference_are_computed_again_with_their_bias() -> None:
    problem = make_problem(**(USUAL | {"len_q": 300, "len_k": 400, **BIAS}))
    tensors = make_tensors(problem)
    assert tensors.mask is not None
    bias = tensors.mask.clone()
    bias[..., 70:150, :60] = 300.0
    held_to_the_oracle(replace(tensors, mask=bias), problem)


PACKED: dict[str, dict[str, Any]] = {
    "ragged": {"lengths_q": (9, 0, 170, 1, 65), "aux": ALL_AUX},
    "causal": {"lengths_q": (130, 64, 3, 200), "is_causal": True},
    "other keys": {"lengths_q": (3, 80, 0, 5), "lengths_k": (170, 8, 20, 0), "aux": Aux.LSE},
    "causal, other keys": {"lengths_q": (3, 150, 70), "lengths_k": (70, 80, 150),
                           "is_causal": True},
    "to the end": {"lengths_q": (3, 150, 70, 5), "lengths_k": (70, 80, 150, 0), **TO_END,
                   "aux": Aux.LSE},
    "window": {"lengths_q": (300, 70, 17, 1), "is_causal": True, "window": (60, -1)},
    "window both ways, to the end": {"lengths_q": (100, 170, 17), "lengths_k": (200, 90, 300),
                                     "window": (50, 20), "align": Align.BOTTOM_RIGHT},
    "grouped heads": {"lengths_q": (130, 40), "num_heads": 4, "num_kv_heads": 2, **TO_END},
    "everything": {"lengths_q": (130, 0, 40), "lengths_k": (90, 10, 60), "softcap": 5.0,
                   "has_sinks": True, "has_alibi": True, **TO_END, "aux": ALL_AUX},
    "half": {"lengths_q": (130, 40), "precision": Precision.FP16, "aux": ALL_AUX},
    "mask": {"lengths_q": (130, 40, 70), "mask": MaskKind.BOOLEAN},
    "bias": {"lengths_q": (130, 40, 70), "mask": MaskKind.ADDITIVE, "is_causal": True},
    "bias of unaligned rows": {"lengths_q": (130, 40, 71), "mask": MaskKind.ADDITIVE},
    "mask of keys": {"lengths_q": (90, 70), "mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 160)},
    "wide heads": {"lengths_q": (70, 130), "head_dim": 256, "is_causal": True},
    "long, so that three warpgroups serve": {"lengths_q": (193, 191), "head_dim": 64},
}  # fmt: skip


def made_packed(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a packed problem and its tensors."""
    values = USUAL | values
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    return problem, make_tensors(problem, **lengths)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_each_a_problem_of_its_own(name: str) -> None:
    problem, tensors = made_packed(PACKED[name])
    held_to_the_oracle(tensors, problem)


@pytest.mark.parametrize("layout", ["[1, H, T, D]", "[1, T, H, D]"])
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_sequence_sees_nothing_of_its_neighbours(what: str, layout: str) -> None:
    """Their rows stand in the same boxes; a weight of 0 times NaN would be NaN."""
    problem, tensors = made_packed({"lengths_q": (70, 90, 100), "is_causal": True})
    if layout == "[1, T, H, D]":
        turned = [
            x.transpose(1, 2).contiguous().transpose(1, 2)
            for x in (tensors.query, tensors.key, tensors.value)
        ]
        kv = replace(tensors.kv, key=turned[1], value=turned[2])
        tensors = replace(tensors, query=turned[0], kv=kv)
    clean = run(tensors, problem).output
    getattr(tensors, what)[:, :, 70:160] = float("nan")
    found = run(tensors, problem).output
    assert torch.equal(found[:, :, :70], clean[:, :, :70])
    assert torch.equal(found[:, :, 160:], clean[:, :, 160:])


@pytest.mark.parametrize(
    "starts",
    [(0, 500, 90), (0, 90, 40, 90), (-50, 90), (0, 40, 2000), (70, 20, 90), (90, 90, 0), (0, 0, 0),
     (-(2**31), 2**31 - 1), (2**31 - 1, -(2**31), 90)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("align", Align)
def test_starts_that_nobody_checked_lead_to_no_other_memory(
    starts: tuple[int, ...], align: Align
) -> None:
    """What is outside of a tensor is an error of the simulation; warpgroups that disagree, too."""
    problem = make_problem(**USUAL, lengths_q=(40, 50), is_causal=True, align=align)
    problem = replace(problem, num_sequences=len(starts) - 1, packed_square=False)
    query, key, value = torch.randn(3, 1, 2, 90, 64).bfloat16()
    bounds = torch.tensor(starts, dtype=torch.int32)
    tensors = Tensors.of(query, key, value, cu_seqlens_q=bounds, cu_seqlens_k=bounds.flip(0))
    assert run(tensors, problem).output.nan_to_num(0.0).abs().max() < 100


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_scores_beyond_the_fixed_reference_are_computed_again(is_causal: bool) -> None:
    problem, tensors = made_packed({"lengths_q": (300, 40, 290, 1), "is_causal": is_causal})
    key = tensors.key.clone()
    key[:, :, :50] *= 300
    key[:, :, 340:400] *= 300
    held_to_the_oracle(replace(tensors, kv=replace(tensors.kv, key=key)), problem)


LISTS: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 300, "len_k": 700, "aux": ALL_AUX},
    "causal": {"len_q": 700, "is_causal": True, "aux": Aux.LSE},
    "blocks of 64 keys": {"len_q": 300, "is_causal": True, "block_size": (128, 64)},
    "blocks of 192 keys": {"len_q": 300, "len_k": 500, "block_size": (128, 192), **TO_END},
    "large blocks": {"len_q": 700, "is_causal": True, "block_size": (256, 256)},
    "to the end": {"len_q": 500, "len_k": 130, **TO_END, "aux": ALL_AUX},
    "window": {"len_q": 700, "is_causal": True, "window": (200, -1), "block_size": (128, 256)},
    "window both ways": {"len_q": 500, "len_k": 700, "window": (150, 40), "aux": Aux.ENTROPY},
    "fewer keys than a block": {"len_q": 300, "len_k": 50},
    "grouped heads": {"len_q": 300, "num_heads": 4, "num_kv_heads": 2, "batch": 2, **TO_END},
    "everything": {"len_q": 500, "softcap": 5.0, "has_sinks": True, "has_alibi": True,
                   "is_causal": True, "aux": ALL_AUX},
    "half": {"len_q": 300, "precision": Precision.FP16, "aux": ALL_AUX},
    "mask": {"len_q": 300, "len_k": 333, "mask": MaskKind.BOOLEAN, "is_causal": True},
    "wide heads": {"len_q": 300, "head_dim": 256, "is_causal": True},
}  # fmt: skip


def made_listed(
    values: dict[str, Any], shape: tuple[bool, bool], density: float = 0.5, seed: int = 0
) -> tuple[AttentionProblem, Tensors]:
    """Return a problem with a random list of blocks: some rows have none, some heads all."""
    problem = make_problem(**(USUAL | {"block_size": (128, 128)} | values))
    rows, keys = problem.block_size
    row_blocks, key_blocks = -(-problem.len_q // rows), -(-problem.len_k // keys)
    leading = (problem.batch if shape[0] else 1, problem.num_heads if shape[1] else 1)
    torch.manual_seed(seed)
    mask = torch.rand(*leading, row_blocks, key_blocks) < density
    mask[..., -1, :] &= bool(seed % 2)
    blocks = BlockList.from_mask(mask, block_q=rows, block_k=keys)
    blocks.counts[-1, -1, :1] = -1
    problem = replace(problem, most_blocks=blocks.indices.shape[-1])
    return problem, replace(make_tensors(problem), blocks=blocks)


@pytest.mark.parametrize("shape", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_only_listed_blocks_are_seen(name: str, shape: tuple[bool, bool]) -> None:
    problem, tensors = made_listed(LISTS[name], shape, seed=sum(shape))
    held_to_the_oracle(tensors, problem)


@pytest.mark.parametrize("is_causal", [False, True])
def test_listed_scores_beyond_the_fixed_reference_are_computed_again(is_causal: bool) -> None:
    problem, tensors = made_listed({"len_q": 600, "is_causal": is_causal}, (True, True), 0.7)
    key = tensors.key.clone()
    key[:, :, :200] *= 300
    held_to_the_oracle(replace(tensors, kv=replace(tensors.kv, key=key)), problem)


@pytest.mark.parametrize(
    "values",
    [
        *({}, {"is_causal": True}, {"window": (100, 50)}, {"mask": MaskKind.ADDITIVE}),
        {"len_k": 50},
    ],
    ids=str,
)
def test_numbers_of_lists_that_nobody_checked_lead_to_no_other_memory(
    values: dict[str, Any],
) -> None:
    problem, tensors = made_listed({"len_q": 300, "len_k": 500} | values, (True, True))
    assert tensors.blocks is not None
    counts, indices = tensors.blocks.counts, tensors.blocks.indices
    for seed in range(4):
        torch.manual_seed(seed)
        counts.random_(-(2**31), 2**31 - 1) if seed % 2 else counts.random_(-3, 9)
        indices.random_(-(2**31), 2**31 - 1) if seed > 1 else indices.random_(-2, 7)
        run(tensors, problem)
