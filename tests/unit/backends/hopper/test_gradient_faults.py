"""Faults put into the backward kernels for Hopper GPUs one by one, as `test_faults.py` does it."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.interface import Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, Precision
from adaattn.testing import (
    assert_matches,
    assert_training_matches,
    attention,
    cast_tensors,
    make_problem,
    make_tensors,
    num_summands,
    poisoned_memory,
    with_tensors,
)

PLAIN: dict[str, Any] = {"len_q": 70, "len_k": 140}
WIDE: dict[str, Any] = {"len_q": 140, "head_dim": 128}
ROWS: dict[str, Any] = {"len_q": 300, "len_k": 70}
CAUSAL: dict[str, Any] = {"len_q": 256, "is_causal": True}
RAGGED: dict[str, Any] = {"len_q": 300, "is_causal": True}
TO_END: dict[str, Any] = {"len_q": 140, "len_k": 300, "is_causal": True,
                          "align": Align.BOTTOM_RIGHT}  # fmt: skip
WINDOW: dict[str, Any] = {"len_q": 400, "window": (70, 20)}
HEADS: dict[str, Any] = {"num_heads": 2, "len_q": 70}
BATCH: dict[str, Any] = HEADS | {"batch": 2}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "len_q": 140}
ALIBI: dict[str, Any] = GROUPS | {"has_alibi": True, "batch": 2}
SOFTCAP: dict[str, Any] = {"len_q": 140, "softcap": 1.5}
SINKS: dict[str, Any] = HEADS | {"has_sinks": True, "sinks_require_grad": True}
LOW: dict[str, Any] = {"len_q": 70, "len_k": 90, "scale": 1.0, "low_scores": True}
FP16: dict[str, Any] = {"precision": Precision.FP16}
LSE: dict[str, Any] = HEADS | {"aux": Aux.LSE}

Fault = tuple[str, str, str, dict[str, Any]]

SCORES: dict[str, Fault] = {
    "scale dropped": ("capped", "s = s * c.scale", "s = s * 1.0", PLAIN),
    "base of the next row": ("weights_of", "beside(c, lse)", "beside(c, lse.roll(1))", PLAIN),
    "softcap without its cap": ("capped", "s = c.cap * tangent", "s = tangent", SOFTCAP),
    "softcap of another base": ("capped", "1.0 - 2.0 * inverse", "1.0 - inverse", SOFTCAP | FP16),
    "softcap's derivative dropped": ("keep_slope", "1.0 - tangent * tangent", "1.0 + 0.0 * tangent",
                                     SOFTCAP),
    "softcap's derivative of the other warpgroup": (
        "gradient_consumer", "c.caps.index(w)", "c.caps.index(1 - w)", SOFTCAP | {"len_k": 40}),
    "sign of the slope": ("weighed", "s - slope", "s + slope", ALIBI),
    "positions of rows": ("positions", "first_row - c.sizes.offset", "first_row",
                          TO_END | {"has_alibi": True}),
    "columns of another thread": ("split_columns", "columns & 6", "columns & 4", ALIBI),
    "slope of the first head": ("slope_of", "gl.minimum(head, c.last_head)", "0 * head", ALIBI),
    "slope in another unit": ("slope_of", "* LOG2_E", "* 1.0", ALIBI),
    "slopes of the first batch": ("backward", "batch * slopes_stride", "0", ALIBI),
}  # fmt: skip
TO_RIGHT = "known >= ahead - c.sizes.right"
TO_LEFT = "known <= ahead + c.sizes.left"
EDGES: dict[str, Fault] = {
    "one key more to the right": ("seen_part", TO_RIGHT, f"1 + {TO_RIGHT}", CAUSAL),
    "one key fewer to the right": ("seen_part", TO_RIGHT, TO_RIGHT.replace(">=", ">"), CAUSAL),
    "one key more to the right, ragged": ("seen_part", TO_RIGHT, f"1 + {TO_RIGHT}", RAGGED),
    "one key more to the end": ("seen_part", TO_RIGHT, f"1 + {TO_RIGHT}", TO_END),
    "one key more to the left": ("seen_part", TO_LEFT, f"-1 + {TO_LEFT}", WINDOW),
    "one key fewer to the left": ("seen_part", TO_LEFT, TO_LEFT.replace("<=", "<"), WINDOW),
    "keys behind the last": ("seen_part", "lines < keys_left", "lines < keys_left + 64", LOW),
    "last key lost": ("seen_part", "lines < keys_left", "lines < keys_left - 1", PLAIN),
    "edge to the right not noticed": ("is_edge", "> position + c.sizes.right",
                                      "> position + c.sizes.right + 64", RAGGED),
    "edge to the left not noticed": ("is_edge", "c.ROWS - 1 - c.sizes.left",
                                     "-1 - c.sizes.left", WINDOW),
    "edge of the keys not noticed": ("is_edge", "edge = first_key + c.KEYS > c.sizes.len_k",
                                     "edge = first_key > c.sizes.len_k", LOW),
    "edges ahead not noticed": ("hide_ahead", "not c.IS_ALIGNED", "c.IS_ALIGNED", WINDOW),
    "first rows lost": ("row_tiles", "first_key - sizes.offset - sizes.right",
                        "first_key - sizes.offset - sizes.right + BLOCK_N", RAGGED),
    "first rows lost to the end": ("row_tiles", "first_key - sizes.offset - sizes.right",
                                   "first_key - sizes.right",
                                   TO_END | {"len_q": 300, "len_k": 500}),
    "last rows lost": ("row_tiles", "sizes.left + 1, 0)", "sizes.left + 1 - BLOCK_M, 0)", WINDOW),
    "last tile of rows lost": ("row_tiles", "gl.cdiv(end, BLOCK_M)", "end // BLOCK_M", ROWS),
}  # fmt: skip
SUMS: dict[str, Fault] = {
    "scale of keys dropped": ("store_block", "dk * c.natural", "dk", PLAIN),
    "keys' gradients for values'": ("store_block", "store(dv.to(dtype))",
                                    "store(dk.to(dtype))", PLAIN),
    "half of a block unwritten": ("store_block", "c.v.slice(w * c.KEYS", "c.v.slice(0 * c.KEYS",
                                  PLAIN),
    "block of the first head": ("store_block", "c.key_head, c.start_k", "0, c.start_k", HEADS),
    "block stored one too far": ("store_block", "c.first_key, c.sizes", "c.first_key + 1, c.sizes",
                                 PLAIN),
    "delta dropped": ("gradient_consumer", "(dp - gl.expand_dims(delta, 0))", "dp", PLAIN),
    "delta for the log-sum-exp": (
        "gradient_consumer", "slice(rows, rows).load(of_rows)\n        dp",
                                  "slice(0, rows).load(of_rows)\n        dp", WIDE),
    "product with values dropped": ("gradient_consumer", "o, dv, is_async",
                                    "o, dv * 0.0, is_async", ROWS),
    "sum of keys begun anew": ("gradient_consumer", "q, dk, is_async", "q, dk * 0.0, is_async",
                               ROWS),
    "part of the other warpgroup": ("gradient_consumer", "ds_all.slice(w * half",
                                    "ds_all.slice((1 - w) * half", PLAIN),
    "queries of the values": (
        "gradient_consumer", "permute([1, 0]), all_k", "permute([1, 0]), c.v", PLAIN),
    "columns of the other half": ("gradient_consumer", "all_k.slice(w * 64", "all_k.slice(0 * 64",
                                  WIDE),
    "sums of the tile before": ("gradient_consumer", "slot_before * 2 + w, stage",
                                 "abs(slot_before - 1) * 2 + w, stage", ROWS),
    "sums of the other half": ("begin_to_add", "place * 16", "(place ^ 1) * 16", PLAIN),
    "a tile's last sum dropped": (
        "gradient_consumer", "c.visits & 1, dq)\n    if c.HEADS",
                                  "c.visits & 1, 0.0 * dq)\n    if c.HEADS", ROWS),
    "order of sums": ("lay_out", "[3, 0, 2, 4, 1, 5]", "[3, 0, 2, 1, 4, 5]", PLAIN),
}  # fmt: skip
HEADS_AND_TILES: dict[str, Fault] = {
    "a query head of the group skipped": ("backward", "visits = visits * group_size",
                                          "visits = visits * (group_size - 1)", GROUPS),
    "first head of the group twice": ("next_tile", "head + 1, head", "head, head", GROUPS),
    "sums of the first head": ("next_tile", "slot + c.skipped, slot", "slot, slot",
                               GROUPS | TO_END | {"len_q": 300}),
    "rows of the next tile": (
        "gradient_producer", "tile * c.ROWS", "(tile + 1) * c.ROWS", ROWS),
    "terms of the first head": ("gradient_producer", "(slot * (2", "(0 * slot * (2", HEADS),
    "queries of the first batch": (
        "gradient_producer", "c.batch, head, c.start_q", "0, head, c.start_q", BATCH),
    "keys of the first head": ("gradient_producer", "c.key_head, c.start_k", "0, c.start_k",
                               GROUPS),
    "heads of the first group": ("backward", "first_head = key_head * group_size",
                                 "first_head = key_head * 0", GROUPS),
}  # fmt: skip
BESIDE: dict[str, Fault] = {
    "rows behind the last with a weight": (
        "prepare_rows", "-NOTHING, base", "NOTHING, base", PLAIN),
    "log-sum-exp in another unit": ("prepare_rows", "base * LOG2_E", "base", PLAIN),
    "rows of the first head": ("prepare_rows", "(batch * num_heads + head)", "(batch * num_heads)",
                               HEADS),
    "output for its gradient": ("prepare_rows", "gl.sum(o * do, 1)", "gl.sum(o * o, 1)", PLAIN),
    "gradient of another head": ("prepare_rows", "of_upstream = places_of(batch, head,",
                                 "of_upstream = places_of(batch, 0 * head,", HEADS),
    "sums that do not begin at zero": (
        "prepare_rows", "gl.zeros([BLOCK_M * BLOCK_D], gl.float32, flat)", "1.0", PLAIN),
    "scale of queries dropped": ("finish", "found * scale", "found", PLAIN),
    "halves of columns swapped": ("finish", "[2, 5, 3, 0, 1, 4, 6]",
                                  "[2, 5, 3, 1, 0, 4, 6]", WIDE),
    "rows of queries swapped": ("finish", "[0, 2, 5, 3, 1, 4, 6]", "[0, 2, 3, 5, 1, 4, 6]",
                                PLAIN),
    "last row unwritten": ("tile_places", "rows < len_q", "rows < len_q - 1", PLAIN),
    "last column unwritten": ("tile_places", "cols < columns", "cols < columns - 1", PLAIN),
    "places of the first head": ("places_of", "head.to(gl.int64) * stride_h", "0", HEADS),
    "gradient of the log-sum-exp dropped": (
        "prepare_rows", "delta - gl.load(", "delta - 0.0 * gl.load(",
                                            LSE),
    "gradient of the log-sum-exp turned round": ("prepare_rows", "delta - gl.load(",
                                                 "delta + gl.load(", LSE),
}  # fmt: skip
IN_ORDER: dict[str, Any] = {"deterministic": True, "len_q": 300}
UNSEEN: dict[str, Any] = IN_ORDER | {"len_k": 100, "is_causal": True, "align": Align.BOTTOM_RIGHT}
GROUPS_IN_ORDER: dict[str, Any] = GROUPS | IN_ORDER | {"is_causal": True, "head_dim": 128}
ASCENDING: dict[str, Any] = IN_ORDER | {"is_causal": True, "num_heads": 3}
ADDED: dict[str, Fault] = {
    "a tile later": ("backward", "begin = behind - 1\n", "begin = behind\n", IN_ORDER),
    "sums of the first tile": ("backward", "first_tile + begin", "first_tile + first", IN_ORDER),
    "rows of one tile": ("next_tile", "tile += step_of(c)", "tile += 0", IN_ORDER),
    "sums of one tile": ("next_tile", "slot += step_of(c)", "slot += 0", IN_ORDER),
    "ascending: backwards": ("backward", "gl.where(ascends, 1, -1)", "-1", ASCENDING),
    "ascending: sums that each block begins": (
        "turn_of", "gl.where(tile >= c.shared_edge, c.block, 0)", "0 * c.block", ASCENDING),
    "one tile of all heads": ("next_tile", "tile - 1, tile", "tile, tile", GROUPS_IN_ORDER),
    "first head of the group alone": ("next_tile", "c.first_head, head + 1", "c.first_head, head",
                                      GROUPS_IN_ORDER),
    "sums of the head before": ("next_tile", "slot + c.tiles_per_head", "slot", GROUPS_IN_ORDER),
    "sums of the next head": ("backward", "(group_size - 1) * tiles_per_head + 1",
                              "group_size * tiles_per_head + 1", GROUPS_IN_ORDER),
    "one head of those worked on together": ("head_and_block", "first_head + place % heads",
                                             "first_head", IN_ORDER | HEADS),
    "one block of those of a head": ("head_and_block", "place // heads", "0 * place", IN_ORDER),
    "first half of a sum twice": ("gradient_adder", "slot * 2 + w\n", "slot * 2\n", IN_ORDER),
    "sums of the next tile": ("add_half", "tma_add(c.sums, [place", "tma_add(c.sums, [2 + place",
                              IN_ORDER),
    "sums that nobody begins": ("add_half", "before == 0", "before < 0", IN_ORDER),
    "sums that each block begins": ("add_half", "before == 0", "before >= 0", IN_ORDER),
    "sums of rows that nobody visits": ("finish", "gl.where(is_written, found, 0.0)", "found",
                                        UNSEEN),
    "sums of rows that somebody visits": ("finish", "2 * number) > 0", "2 * number) > 1",
                                          IN_ORDER | {"len_k": 100}),
}  # fmt: skip
SEQUENCES: dict[str, Any] = {"lengths_q": (100, 30, 170)}
OTHER_KEYS: dict[str, Any] = SEQUENCES | {"lengths_k": (40, 150, 90), "is_causal": True}
PACKED: dict[str, Fault] = {
    "keys of the next sequence": ("packed_keys", "bounds(starts_k + sequence", "bounds(starts_k",
                                  SEQUENCES),
    "queries of the first sequence": ("packed_keys", "bounds(starts_q + sequence",
                                      "bounds(starts_q", SEQUENCES),
    "tiles of the sequence before": ("packed_keys", "BLOCK_M + sequence", "BLOCK_M", SEQUENCES),
    "first block of all": ("packed_keys", "gl.minimum(first_key, len_k)", "0 * first_key",
                           {"lengths_q": (200, 60)}),
    "aligned at the start": ("backward", "own_k - own_q", "offset",
                             OTHER_KEYS | {"align": Align.BOTTOM_RIGHT}),
    "rows of all queries": ("backward", "Sizes(own_q, own_k", "Sizes(len_q, own_k", SEQUENCES),
    "keys of all sequences": ("backward", "Sizes(own_q, own_k", "Sizes(own_q, len_k", SEQUENCES),
    "queries from the start of all": ("gradient_producer", "c.start_q", "0 * c.start_q", SEQUENCES),
    "keys from the start of all": ("gradient_producer", "c.start_k", "0 * c.start_k", SEQUENCES),
    "gradients to the start of all": ("store_block", "c.start_k", "0 * c.start_k", SEQUENCES),
    "gradients behind a sequence's end": ("store_block", "c.sizes.len_k", "(c.sizes.len_k + 8)",
                                          SEQUENCES),
    "rows of the next sequence": ("tile_places", "start + length", "start + length + 1", SEQUENCES),
    "rows from the start of all": ("tile_places", "first_row += start", "first_row += 0",
                                   SEQUENCES),
    "the tile before the first": ("gradient_producer", "gl.maximum(row, 0)", "row",
                                  SEQUENCES | {"deterministic": True}),
}  # fmt: skip
TWO_BLOCKS: dict[str, Any] = GROUPS | {"len_k": 200}
WIDE_BLOCKS: dict[str, Any] = TWO_BLOCKS | {"head_dim": 128}
WIDE_EDGES: dict[str, Any] = GROUPS | {"len_q": 256, "head_dim": 128, "is_causal": True}
APART: dict[str, Fault] = {
    "edge of the second tile not noticed": ("hide_ahead", "c.ROWS == 64 and w == 1",
                                            "c.ROWS == 64 and w == 2", WIDE_EDGES),
    "key head of the next head": ("backward", "key_head = first_head // group_size",
                                  "key_head = first_head // group_size ^ 1", TWO_BLOCKS),
    "sums of another block": ("backward", "* key_blocks + block)", "* key_blocks + (block ^ 1))",
                              TWO_BLOCKS),
    "sums of the first key head": ("backward", "(head // group_size * key_blocks",
                                   "(0 * key_blocks", TWO_BLOCKS),
    "gradient of keys for that of values": ("add_block", "found = dv", "found = dk", TWO_BLOCKS),
    "columns of the first half": ("share_of", "* parts + columns", "* parts", WIDE_BLOCKS),
    "keys of the first warpgroup": ("share_of", "which * 2 + w", "which * 2", TWO_BLOCKS),
    "values summed with keys": ("share_of", "which * 2 + w", "w", TWO_BLOCKS),
    "sums of keys that do not begin at zero": (
        "prepare_rows", "range(number, num_sums,", "range(number, gl.num_programs(0),",
        WIDE_BLOCKS),
    "scale of values": ("finish", "columns, scale = columns_of_values, 1.0", "pass", TWO_BLOCKS),
    "tiles of the other half of a block": ("finish", "pair * of_block + place",
                                           "pair * of_block + (1 - place)", WIDE_BLOCKS),
    "values begun with the tiles of keys": ("finish", "place -= of_block", "pass", TWO_BLOCKS),
    "in a fixed order: keys of the first warpgroup": (
        "share_of", "which * 2 + w", "which * 2", WIDE_BLOCKS | {"deterministic": True}),
    "in a fixed order: sums of keys that each head begins": (
        "gradient_adder", "& 1, c.heads_before)", "& 1, 0)", TWO_BLOCKS | {"deterministic": True}),
    "in a fixed order: sums of keys that no head begins": (
        "gradient_adder", "& 1, c.heads_before)", "& 1, 1)", TWO_BLOCKS | {"deterministic": True}),
    "in a fixed order: sums of keys taken for unwritten": (
        "finish", "| (number >= num_tiles)", "", TWO_BLOCKS | {"deterministic": True}),
}  # fmt: skip
"""Of heads that have blocks of their own."""
LONG: dict[str, Any] = {"len_q": 700, "len_k": 384}
ORDER: dict[str, Fault] = {
    "queries not awaited": ("gradient_consumer",
                            "mbarrier.wait(c.q_full.index(stage ^ 1), ((visit + 1) >> 1) & 1)",
                            "pass", LONG),
    "gradients of the output not awaited": (
        "gradient_consumer", "mbarrier.wait(c.o_full.index(stage), (visit >> 1) & 1)", "pass",
        LONG),
    "scores of the other warpgroup not awaited": (
        "gradient_consumer", "mbarrier.wait(c.ds_full.index(stage), (visit >> 1) & 1)", "pass",
        LONG),
    "stages not awaited": (
        "gradient_producer", "mbarrier.wait(c.q_empty.index(stage), ((visit >> 1) & 1) ^ 1)",
        "pass", LONG),
    "one place for the scores of all tiles": ("gradient_consumer", "c.ds.index(stage)",
                                              "c.ds.index(0)", LONG),
    "sums not awaited": ("begin_to_add", "tma.store_wait(0)", "pass", LONG),
    "keys' gradients of the other warpgroup not awaited": (
        "store_block", "mbarrier.wait(c.end.index(1), 0)", "pass", LONG),
}  # fmt: skip
"""Seen where everything is as late as it may be."""
BOTH: dict[str, Any] = IN_ORDER | {"head_dim": 128}
ADDING: dict[str, Fault] = {
    "sums not awaited": ("add_half", "mbarrier.wait(c.dq_full.index(w), parity)", "pass",
                         IN_ORDER),
    "sums of the second warpgroup not awaited": (
        "add_half", "c.dq_full.index(w)", "c.dq_full.index(0)", BOTH),
    "sums not read yet": ("hand_over", "mbarrier.wait(c.dq_empty.index(w), parity)", "pass",
                          IN_ORDER | LONG),
    "sums said to be read": ("add_half", "tma.store_wait(0)", "pass", IN_ORDER | LONG),
    "in any order: sums not awaited": (
        "add_half", "mbarrier.wait(c.dq_full.index(w), parity)", "pass", WIDE),
    "in any order: sums not read yet": (
        "hand_over", "mbarrier.wait(c.dq_empty.index(w), parity)", "pass",
        LONG | {"head_dim": 128}),
    "in any order: sums said to be read": (
        "add_half", "tma.store_wait(0)", "pass", LONG | {"head_dim": 128}),
    "second half said to be read": ("add_half", "tma.store_wait(0)", "tma.store_wait(w)",
                                    BOTH | LONG),
}  # fmt: skip
MANY: dict[str, Any] = {"len_q": 200, "len_k": 900}
ASCENDING_LONG: dict[str, Any] = {"len_q": 900, "is_causal": True, "num_heads": 2}
TURNS: dict[str, Fault] = {
    "turns not awaited": ("await_number", "turn < due", "turn < 0", MANY),
    "turn of the block before": ("await_number", "turn < due", "turn < due - 1", MANY),
    "tiles of the block before unknown": ("backward", "gl.where(block > 0, ended, 0)", "0 * ended",
                                          MANY),
    "told before it is there": ("pass_on", "wait_for_writes()", "pass", MANY),
    "told before all see it": ("pass_on", "release_writes()", "pass", MANY),
    "turns of the first half": ("gradient_adder", "slot * 2 + w, visit", "slot * 2, visit", MANY),
    "ascending: turns not awaited": ("await_number", "turn < due", "turn < 0", ASCENDING_LONG),
    "ascending: a tile awaited in which nobody was": (
        "backward", "gl.where(ascends, after, 0)", "0 * after", ASCENDING_LONG),
    "turns of another tile": ("turn_of", "c.turns + place", "c.turns + c.first_tile * 2",
                              {"len_q": 300, "len_k": 900}),
}  # fmt: skip
"""Seen where blocks run at the same time, and their sums depend on the order."""
WAITS: dict[str, Fault] = {
    "ascending: the last tile first": (
        "backward", "gl.where(ascends, first, behind - 1)", "behind - 1", ASCENDING),
    "descending: the first tile first": (
        "backward", "gl.where(ascends, first, behind - 1)", "first", ASCENDING),
    "descending: heads of those that ascend": (
        "head_and_block", "ascends, 0, ascending_heads", "ascends, 0, 0 * num_heads", ASCENDING),
    "descending: too few": ("head_and_block", "place -= before * key_blocks", "pass", ASCENDING),
    "ascending: blocks from the first on": (
        "head_and_block", "gl.where(ascends, key_blocks - 1 - block, block)", "block", ASCENDING),
    "ascending: told as if they did not": (
        "backward", "gl.where(ascends, last_block - block, block)", "block", ASCENDING),
}  # fmt: skip
"""Seen where blocks run one behind another, as a card may run them: all wait for one another."""

FAULTS: dict[str, Fault] = {
    f"{kind}: {name}": fault
    for kind, faults in (
        *(("scores", SCORES), ("edges", EDGES), ("sums", SUMS)),
        *(("heads", HEADS_AND_TILES), ("beside", BESIDE), ("in order", ADDED)),
        *(("packed", PACKED), ("apart", APART)),
    )
    for name, fault in faults.items()
}

run = partial(hopper.run, group=HeadGroup(capability="hopper"))


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem that wants gradients, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 64, "num_heads": 1, "requires_grad": True}
    values = usual | values
    is_low = values.pop("low_scores", False)
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths)
    if problem.has_alibi:
        slopes = torch.rand(problem.batch, problem.num_heads)
        tensors = with_tensors(tensors, alibi_slopes=slopes)
    if is_low:
        query = torch.full_like(tensors.query, 3.0).requires_grad_()
        key = (torch.randn_like(tensors.key) * 0.01 - 1.0).requires_grad_()
        tensors = with_tensors(tensors, query=query, key=key)
    return problem, tensors


def hold_to_the_definition(tensors: Tensors, problem: AttentionProblem) -> None:
    """Raise AssertionError unless result and gradients are right, that of the LSE too if wanted."""
    with poisoned_memory():
        _hold_to_the_definition(tensors, problem)


def _hold_to_the_definition(tensors: Tensors, problem: AttentionProblem) -> None:
    if not problem.wants(Aux.LSE):
        assert_training_matches(run, tensors, problem)
        return
    wide = cast_tensors(tensors, torch.float64)
    found, exact, eager = (
        torch.autograd.grad(result.lse.square().sum() + result.output.sum(), given.query)[0]
        for result, given in (
            (run(tensors, problem), tensors),
            (attention(wide, problem), wide),
            (attention(tensors, problem, compute_dtype=tensors.query.dtype), tensors),
        )
        if result.lse is not None
    )
    assert_matches(found, exact, eager, summands=num_summands(problem, found))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_device_code_is_seen(
    name: str,
    simulated: Any,
    rewritten: Callable[..., Any],
    once: Callable[..., None],
    request: pytest.FixtureRequest,
) -> None:
    function, old, new, values = FAULTS[name]
    if name.startswith("apart"):
        request.getfixturevalue("apart")
    problem, tensors = made(values)
    once((values, name.startswith("apart")), partial(hold_to_the_definition, tensors, problem))
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises(AssertionError, match=r"beyond their bound|outside of a tensor"):
        hold_to_the_definition(tensors, problem)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", [*ORDER, *ADDING])
def test_a_fault_in_the_order_of_things_is_seen(
    name: str, simulated: Any, rewritten: Callable[..., Any]
) -> None:
    function, old, new, values = (ORDER | ADDING)[name]
    problem, tensors = made(values)
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises((AssertionError, TimeoutError)):
        hold_to_the_definition(tensors, problem)


@pytest.mark.usefixtures("late", "together")
@pytest.mark.parametrize("name", TURNS)
def test_a_fault_in_the_order_of_sums_is_seen(
    name: str, simulated: Any, rewritten: Callable[..., Any]
) -> None:
    function, old, new, values = TURNS[name]
    problem, tensors = made(values | {"deterministic": True})
    assert sums_are_the_same_each_time(tensors, problem)
    simulated.replace(function, partial(rewritten, old=old, new=new))
    # Once in a while blocks happen to add in their order. And a block that adds too late takes
    # turns back, so that others may wait for ever.
    with suppress(TimeoutError):
        assert not all(sums_are_the_same_each_time(tensors, problem) for _ in range(8))


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_for_a_block_that_begins_later_is_seen(
    name: str, simulated: Any, rewritten: Callable[..., Any]
) -> None:
    function, old, new, values = WAITS[name]
    problem, tensors = made(values)
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises(TimeoutError):
        run(tensors, problem).output.sum().backward()


def sums_are_the_same_each_time(tensors: Tensors, problem: AttentionProblem) -> bool:
    """Return whether gradients of queries are those of the first run in four more.

    All keys are one, so that a sum is near 0 beside what is added, and its rounding is seen.
    """
    key = tensors.key.detach()[:, :, :1].expand(tensors.key.shape).clone().requires_grad_()
    tensors = with_tensors(tensors, key=key)
    output = run(tensors, problem).output
    upstream = torch.randn_like(output)
    first, *more = (
        torch.autograd.grad(output, tensors.query, upstream, retain_graph=True)[0] for _ in range(5)
    )
    return all(torch.equal(first, other) for other in more)


def test_each_file_of_the_backward_pass_has_faults() -> None:
    broken = {function for function, *_ in FAULTS.values()}
    for stem in ("backward", "gradient_order", "gradient_rows", "gradient_scores"):
        text = Path(hopper.__file__).with_name(f"{stem}.py").read_text()
        assert any(f"\ndef {name}(" in text for name in broken), stem


def test_a_wrong_gradient_of_sinks_is_seen(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del simulated
    problem, tensors = made(SINKS)
    hold_to_the_definition(tensors, problem)
    right = hopper.gradients._of_sinks
    monkeypatch.setattr(hopper.gradients, "_of_sinks", lambda *given: 1.1 * right(*given))
    with pytest.raises(AssertionError, match="beyond their bound"):
        hold_to_the_definition(tensors, problem)
