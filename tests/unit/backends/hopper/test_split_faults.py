"""Faults put into the two kernels of a split backward pass, as `test_faults.py` does it."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.interface import Tensors
from adaattn.spec import Align, AttentionProblem, HeadGroup, MaskKind, Precision
from adaattn.testing import assert_training_matches, make_problem, make_tensors, with_tensors

PLAIN: dict[str, Any] = {"len_q": 70, "len_k": 140}
ROWS: dict[str, Any] = {"len_q": 300, "len_k": 70}
SQUARE: dict[str, Any] = {"len_q": 200}
CAUSAL: dict[str, Any] = {"len_q": 256, "is_causal": True}
TO_END: dict[str, Any] = {"len_q": 140, "len_k": 300, "is_causal": True,
                          "align": Align.BOTTOM_RIGHT}  # fmt: skip
WINDOW: dict[str, Any] = {"len_q": 400, "window": (70, 20)}
HEADS: dict[str, Any] = {"num_heads": 2, "len_q": 70}
BATCH: dict[str, Any] = HEADS | {"batch": 2}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "len_q": 140}
ALIBI: dict[str, Any] = GROUPS | {"has_alibi": True, "batch": 2, "is_causal": True}
SOFTCAP: dict[str, Any] = {"len_q": 140, "softcap": 1.5}
LOW: dict[str, Any] = {"len_q": 70, "len_k": 90, "scale": 1.0, "low_scores": True}
SEQUENCES: dict[str, Any] = {"lengths_q": (100, 30, 170)}
OTHER_KEYS: dict[str, Any] = SEQUENCES | {"lengths_k": (40, 150, 90), "is_causal": True,
                                          "align": Align.BOTTOM_RIGHT}  # fmt: skip

Fault = tuple[str, str, str, dict[str, Any]]

SCORES: dict[str, Fault] = {
    "rows of keys": ("beside", "1 - c.ROW_AXIS", "1", PLAIN),
    "keys of rows": ("positions", "ahead = -ahead", "pass", WINDOW),
    "keys behind the last": ("seen_part", "known < keys_left", "known < 64 + keys_left", LOW),
    "one key more to the right": (
        "seen_part", "known <= ahead + c.sizes.right", "known <= 1 + ahead + c.sizes.right",
        CAUSAL),
    "last key of some rows lost": ("seen_blocks", "sizes.right + 1, 0)", "sizes.right, 0)",
                                   TO_END | {"len_k": 141, "window": (10, -1)}),
    "first block of keys lost": ("seen_blocks", "sizes.offset - sizes.left", "sizes.offset",
                                 WINDOW),
}  # fmt: skip
KEYS: dict[str, Fault] = {
    "rows of the next tile": ("query_producer", "tile * c.ROWS", "(tile + 1) * c.ROWS", ROWS),
    "queries of the first batch": ("query_producer", "c.batch, head,", "0, head,", BATCH),
    "queries of the first head": ("query_producer", "c.batch, head,", "c.batch, 0,", HEADS),
    "log-sum-exps of the first tile": ("query_producer", "terms = slot", "terms = 0 * slot", ROWS),
    "upstream of the next tile": ("upstream_producer", "tile * c.ROWS", "(tile + 1) * c.ROWS",
                                  ROWS),
    "upstream of the first head": ("upstream_producer", "c.batch, head,", "c.batch, 0,", HEADS),
    "log-sum-exps for deltas": ("upstream_producer", "+ c.ROWS\n", "+ 0\n", PLAIN),
    "deltas of the first tile": ("upstream_producer", "terms = slot", "terms = 0 * slot", ROWS),
    "keys of the first head": ("block_corner", "c.key_head", "0", GROUPS),
    "keys of the first batch": ("block_corner", "c.batch", "0", BATCH),
    "keys one further": ("block_corner", "c.first_key", "c.first_key + 1", PLAIN),
    "terms of one tile": ("row_numbers", "visit & 3", "0 * visit", ROWS),
    "edge of each head's first tile": ("pass_weights", "c.IS_GROUPED or ", "",
                                       GROUPS | {"is_causal": True}),
    "edges of other tiles": ("pass_weights", "not c.IS_ALIGNED", "c.IS_ALIGNED", WINDOW),
    "softcap's derivative dropped": ("pass_weights", "1.0 - tangent * tangent",
                                     "1.0 + 0.0 * tangent", SOFTCAP),
    "softcap's derivative in values": ("pass_weights", "convert_layout(p.to(",
                                       "convert_layout(passed.to(", SOFTCAP),
    "weights of the next row": ("pass_weights", "store(passed", "store(passed.roll(1, 1)", PLAIN),
    "slopes of the first head": ("pass_weights", "slope_of(c, head)", "slope_of(c, 0 * head)",
                                 ALIBI),
    "edge of the first rows": ("value_gradients", "head, tile * c.ROWS, True", "head, 0, True",
                               TO_END | {"len_q": 300}),
    "edges of the first tile": ("value_gradients", "tile * c.ROWS, False", "0 * tile, False",
                                WINDOW),
    "sum of values begun anew": ("value_gradients", "c.o.index(stage), dv", "c.o.index(stage), "
                                 "dv * 0.0", ROWS),
    "values without the last tile": ("value_gradients", "(p, c.o.index(last & 1)",
                                     "(p * 0.0, c.o.index(last & 1)", ROWS),
    "gradients of values lost": ("value_gradients", "c.v, dv)", "c.v, dv * 0.0)", PLAIN),
    "delta dropped": ("score_gradients", "(dp - gl.expand_dims(delta, 0))", "dp", PLAIN),
    "delta of the next row": ("score_gradients", "gl.expand_dims(delta, 0)",
                              "gl.expand_dims(delta.roll(1), 0)", PLAIN),
    "sum of keys begun anew": ("key_gradients", "c.q.index(stage), dk", "c.q.index(stage), "
                               "dk * 0.0", ROWS),
    "keys without the last tile": ("key_gradients", "(ds, c.q.index(last & 1)",
                                   "(ds * 0.0, c.q.index(last & 1)", ROWS),
    "scale of keys dropped": ("key_gradients", "dk * c.natural", "dk", PLAIN),
    "gradients rounded away": ("store_gradient", "gradient.to(", "gradient.round().to(", PLAIN),
    "a query head of the group skipped": ("backward_keys", "visits = visits * group_size",
                                          "visits = visits * (group_size - 1)", GROUPS),
    "heads of the first group": ("backward_keys", "first_head = key_head * group_size",
                                 "first_head = key_head * 0", GROUPS),
    "terms of the first head": ("backward_keys", "- (behind - first)", "- (behind - first) - 1",
                                GROUPS),
    "slopes of the first batch": ("backward_keys", "batch * slopes_stride", "0", ALIBI),
    "one block of keys": ("backward_keys", "first_key = block * SPLIT_TILE",
                          "first_key = block * 0", PLAIN),
    "terms of the first sequence": ("backward_keys", "+ first_tile + first", "+ first", SEQUENCES),
    "aligned at the start": ("backward_keys", "own_k - own_q", "offset", OTHER_KEYS),
    "rows of all queries": ("backward_keys", "Sizes(own_q, own_k", "Sizes(len_q, own_k", SEQUENCES),
}  # fmt: skip
QUERIES: dict[str, Fault] = {
    "blocks of keys from the first": ("queries_producer", "(c.end - 1 - visit)",
                                      "(c.start + visit)", CAUSAL),
    "keys of the first head": ("queries_producer", "c.key_head", "0", GROUPS),
    "keys of the first batch": ("queries_producer", "c.batch, c.key_head", "0, c.key_head", BATCH),
    "rows of the first half": ("queries_producer", "c.first_row + w * c.ROWS", "c.first_row",
                               SQUARE),
    "queries of the first head": ("queries_producer", "c.batch, c.head,", "c.batch, 0,", HEADS),
    "upstream for queries": ("queries_producer", "copy(c.upstream", "copy(c.query", PLAIN),
    "keys for values": ("queries_producer", "copy(c.value", "copy(c.key", PLAIN),
    "edge of the first block": ("row_weights", "IS_FIRST or ", "", CAUSAL),
    "edges of other blocks": ("row_weights", "not c.IS_ALIGNED", "c.IS_ALIGNED", WINDOW),
    "softcap's derivative dropped": ("row_weights", "1.0 - tangent * tangent",
                                     "1.0 + 0.0 * tangent", SOFTCAP),
    "terms of the first half": ("query_gradients", "c.row_terms + w *", "c.row_terms + 0 *",
                                SQUARE),
    "log-sum-exps for deltas": ("query_gradients", "terms + c.ROWS", "terms", PLAIN),
    "terms behind the last row": ("query_gradients", "within < c.sizes.len_q", "within >= 0",
                                  {"len_q": 40}),
    "positions of the first half": ("query_gradients", "first_row = c.first_row + w * c.ROWS",
                                    "first_row = c.first_row + 0 * c.ROWS", SQUARE),
    "edge of the next block": ("query_gradients", "(end - 1) * c.KEYS", "end * c.KEYS", CAUSAL),
    "edges of the block before": ("query_gradients", "c.end - 1 - ahead", "c.end - ahead", WINDOW),
    "delta dropped at first": ("query_gradients", "(p * (dp - delta)).to(dtype), of_left)\n    for",
                               "(p * dp).to(dtype), of_left)\n    for", PLAIN),
    "delta dropped": ("query_gradients", "(p * (dp - delta)).to(dtype), of_left)\n    last",
                      "(p * dp).to(dtype), of_left)\n    last", PLAIN),
    "sum of queries begun anew": ("query_gradients", "c.k.index(stage), dq", "c.k.index(stage), "
                                  "dq * 0.0", PLAIN),
    "queries without the last block": ("query_gradients", "(ds, c.k.index(last & 1)",
                                       "(ds * 0.0, c.k.index(last & 1)", PLAIN),
    "scale of queries dropped": ("query_gradients", "dq * c.natural", "dq", PLAIN),
    "rows stored one too far": ("query_gradients", "c.start_q, first_row,",
                                "c.start_q, first_row + 1,", PLAIN),
    "one block of rows": ("backward_queries", "first_row = block *", "first_row = 0 * block *",
                          ROWS),
    "heads of the next group": ("backward_queries", "head // group_size", "0 * head", GROUPS),
    "terms of the first block": ("backward_queries", "+ first_row // SPLIT_TILE", "+ 0", ROWS),
    "terms of the first head": ("backward_queries", "(batch * num_heads + head)",
                                "(batch * num_heads)", HEADS),
    "slopes of the first batch": ("backward_queries", "batch * slopes_stride", "0", ALIBI),
    "slopes of the first head": ("query_gradients", "slope_of(c, c.head)",
                                 "slope_of(c, 0 * c.head)", ALIBI),
    "aligned at the start": ("backward_queries", "own_k - own_q", "offset", OTHER_KEYS),
    "keys of the next sequence": ("backward_queries", "bounds(starts_k + sequence",
                                  "bounds(starts_k", SEQUENCES),
    "terms of the sequence before": ("backward_queries", "start_q // SPLIT_TILE + sequence",
                                     "start_q // SPLIT_TILE", SEQUENCES),
    "keys of all sequences": ("backward_queries", "Sizes(own_q, own_k", "Sizes(own_q, len_k",
                              SEQUENCES),
    "rows of the next sequence": ("backward_queries", "Sizes(own_q, own_k",
                                  "Sizes(own_q + 8, own_k", SEQUENCES),
}  # fmt: skip
BIAS: dict[str, Any] = PLAIN | {"mask": MaskKind.ADDITIVE}
BOOLEAN: dict[str, Any] = PLAIN | {"mask": MaskKind.BOOLEAN}
MASKS: dict[str, Fault] = {
    "of the first head": ("mask_of", "head.to(gl.int64) * x.stride_h", "0", BIAS | HEADS),
    "of the first sequence": ("mask_of", "c.batch.to(gl.int64) * x.stride_b", "0",
                              BIAS | BATCH | {"mask_shape": (2, 1, 70, 140)}),
    "rows from the start of all": ("mask_of", "c.start_q.to(gl.int64)", "0", BIAS | SEQUENCES),
    "keys from the start of all": ("mask_of", "c.start_k.to(gl.int64)", "0", BIAS | SEQUENCES),
    "of the next row": ("load_tile", "rows = first_row", "rows = 1 + first_row", BIAS),
    "of the next key": ("load_tile", "keys = first_key", "keys = 1 + first_key", BIAS),
    "of rows behind the last": ("load_tile", "rows < c.sizes.len_q", "rows >= 0",
                                BIAS | {"lengths_q": (0, 70), "lengths_k": (80, 90)}),
    "of keys behind the last": ("load_tile", "keys < c.sizes.len_k", "keys >= 0", BIAS),
    "rows for keys": ("along_tile", "c.ROW_AXIS", "1 - c.ROW_AXIS",
                      BIAS | {"mask_shape": (1, 1, 1, 140)}),
    "turned round": ("base_of", "base - numbers", "base + numbers", BIAS),
    "in another unit": ("base_of", "* LOG2_E", "* 1.0", BIAS),
    "hidden for seen": ("kept", "tile(c, mask) != 0", "tile(c, mask) == 0", BOOLEAN),
    "booleans without effect on keys": ("pass_weights", "p = kept(c, p, mask)", "pass", BOOLEAN),
    "booleans without effect on queries": ("row_weights", "kept(c, p, mask)", "p", BOOLEAN),
    "queries of the first head": ("query_gradients", "mask_of(c, c.head)", "mask_of(c, 0 * c.head)",
                                  BIAS | HEADS),
}  # fmt: skip
LONG: dict[str, Any] = {"len_q": 400, "len_k": 320}
MANY: dict[str, Any] = {"len_q": 100, "len_k": 320, "num_heads": 4}
AWAIT_NEXT = "mbarrier.wait(c.{}_full.index(stage ^ 1), (({} + 1) >> 1) & 1)"
AWAIT_THIS = "mbarrier.wait(c.{}_full.index(stage), (visit >> 1) & 1)"
ORDER: dict[str, Fault] = {
    "queries not awaited": ("value_gradients", AWAIT_NEXT.format("q", "visit"), "pass", LONG),
    "upstream not awaited": ("value_gradients", AWAIT_THIS.format("o"), "pass", MANY),
    "upstream of the next tile not awaited": (
        "key_gradients", AWAIT_NEXT.format("o", "visit"), "pass", LONG),
    "weights not awaited": ("score_gradients", 'meet(PASSED_WEIGHTS + (visit & 1), "sync", 256)',
                            "pass", LONG),
    "one place for the weights of all tiles": ("score_gradients", "c.p.index(visit & 1)",
                                               "c.p.index(0)", LONG),
    "queries written over": ("query_producer", "if visit > 1:", "if visit > 2:", LONG),
    "upstream written over": ("upstream_producer", "if visit > 1:", "if visit > 2:", LONG),
    "values written over": ("value_gradients", 'meet(VALUES_READ, "sync", 256)', "pass", PLAIN),
    "keys not awaited": ("query_gradients",
                         "mbarrier.wait(c.k_full.index(stage ^ 1), (ahead >> 1) & 1)", "pass",
                         LONG),
    "values not awaited": ("query_gradients", "mbarrier.wait(c.v_full, ahead & 1)", "pass", LONG),
    "blocks of keys written over": ("queries_producer", "if visit > 1:", "if visit > 2:", LONG),
    "blocks of values written over": ("queries_producer", 'meet(VALUE_STAGE, "sync", FREED_BY)',
                                      "pass", LONG),
}  # fmt: skip
"""Seen where everything is as late as it may be, or by barriers at which too many arrive."""

FAULTS: dict[str, Fault] = {
    f"{kind}: {name}": fault
    for kind, faults in (
        *(("scores", SCORES), ("keys", KEYS), ("queries", QUERIES), ("masks", MASKS)),
    )
    for name, fault in faults.items()
}

run = partial(hopper.run, group=HeadGroup(capability="hopper"))


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem that wants gradients, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 136, "num_heads": 1, "requires_grad": True}
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


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_device_code_is_seen(
    name: str, simulated: Any, rewritten: Callable[..., Any], once: Callable[..., None]
) -> None:
    function, old, new, values = FAULTS[name]
    problem, tensors = made(values)
    once(values, partial(assert_training_matches, run, tensors, problem))
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises(AssertionError, match=r"beyond their bound|outside of a tensor"):
        assert_training_matches(run, tensors, problem)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", ORDER)
def test_a_fault_in_the_order_of_things_is_seen(
    name: str, simulated: Any, rewritten: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take longer than all else, so that which comes first is anybody's guess."""
    monkeypatch.setattr(sys.modules[type(simulated).__module__].World, "copy_s", 0.1)
    function, old, new, values = ORDER[name]
    problem, tensors = made(values)
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises((AssertionError, TimeoutError)):
        for _ in range(5):  # once in a while things happen in their order
            assert_training_matches(run, tensors, problem)


def test_blocks_that_one_warpgroup_does_not_see_are_freed_by_it(
    simulated: Any, rewritten: Callable[..., Any]
) -> None:
    """Else the producer waits for ever."""
    problem, tensors = made(CAUSAL)
    old = "range(first, last)"
    simulated.replace("pass_blocks", partial(rewritten, old=old, new="range(first, first)"))
    with pytest.raises(TimeoutError, match="wait for one another"):
        assert_training_matches(run, tensors, problem)


def test_each_file_of_these_kernels_has_faults() -> None:
    broken = {function for function, *_ in FAULTS.values()}
    for stem in ("gradient_scores", "gradient_masks", "backward_keys", "backward_queries"):
        text = Path(hopper.__file__).with_name(f"{stem}.py").read_text()
        assert any(f"\ndef {name}(" in text for name in broken), stem
