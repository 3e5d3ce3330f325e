"""Faults put into the portable kernels one by one: the one comparison sees each of them.

Each is one text of a device function replaced by another. The same function made anew without a
change passes on the same tensors. Dropout is random, and has its own test in `test_interpreted.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn.spec import Align, Aux, MaskKind, Precision

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="functions are replaced where Triton's interpreter looks"
    ),
]

FILES = {"forward", "primitives", "listed", "combine", "halving", "rows", "scores"}
ELSEWHERE = {"key_gradients", "row_gradients", "mask_gradients", "mask_tiles"}
"""Those of `test_gradient_faults.py`, and of `hopper/test_mask_lists.py`."""


RAGGED: dict[str, Any] = {"len_q": 40, "len_k": 131}
CAUSAL: dict[str, Any] = {"len_q": 130, "is_causal": True, "num_heads": 1}
TO_END: dict[str, Any] = CAUSAL | {"len_q": 50, "len_k": 171, "align": Align.BOTTOM_RIGHT}
WINDOW: dict[str, Any] = {"len_q": 200, "window": (5, 3), "num_heads": 1}
WIDE_WINDOW: dict[str, Any] = {"len_q": 300, "window": (150, 140), "num_heads": 1}
GROUPS: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2}
DECODE: dict[str, Any] = GROUPS | {"len_q": 1, "len_k": 1500}
SPLIT_SINKS: dict[str, Any] = DECODE | {"has_sinks": True, "precision": Precision.FP32}
DILATED: dict[str, Any] = {"len_q": 70, "len_k": 131, "dilation": 3, "window": (9, 6)}
PACKED: dict[str, Any] = {"lengths_q": (9, 0, 70, 1), "is_causal": True}
SOFTCAP: dict[str, Any] = {"len_q": 40, "softcap": 1.5}
SINKS: dict[str, Any] = {"len_q": 40, "has_sinks": True}
ALIBI: dict[str, Any] = {"len_q": 100, "has_alibi": True}
ADDED: dict[str, Any] = {"len_q": 70, "mask": MaskKind.ADDITIVE}
PADDING: dict[str, Any] = {"batch": 2, "len_q": 20, "len_k": 133, "mask": MaskKind.BOOLEAN,
                           "mask_shape": (2, 1, 1, 133)}  # fmt: skip
BLOCKS: dict[str, Any] = {"len_q": 130, "len_k": 200, "block_size": (32, 32)}
DROPPED: dict[str, Any] = BLOCKS | {"aux": Aux.DROPPED_MASS, "scale": 0.0}
"""Where all scores are equal the bound of the dropped mass is the mass itself."""

HALVED: dict[str, Any] = {"len_q": 130, "len_k": 70, "num_heads": 1, "precision": Precision.FP32}
UNEVEN: dict[str, Any] = HALVED | {"small_rows": 1e-4}
"""Every other key and value is so much smaller: they share no power of two."""

Fault = tuple[str, str, str, dict[str, Any]]

SCORES: dict[str, Fault] = {
    "scale dropped": ("forward", "DOT) * scale", "DOT)", RAGGED),
    "scale dropped, halves": ("forward", "scores *= row_scale", "pass",
                              HALVED | {"num_heads": 2}),
    "softcap skipped": (
        "forward", "soft_capped(scores, softcap, FAST_TANH, head_softcaps_ptr is not None)",
        "scores * softcap", SOFTCAP),
    "series of the cap where it ends": (
        "soft_capped", "tl.abs(scores) < 0.25", "tl.abs(scores) < 2.5", SOFTCAP),
    "sign of the slope": ("add_bias", "scores - slope", "scores + slope", ALIBI),
    "slope of the first head": ("forward", "stride_slope + heads", "stride_slope", ALIBI),
    "slope of the first batch": ("forward", "slopes_ptr + batch *", "slopes_ptr + 0 *",
                                 ALIBI | {"batch": 2}),
    "sink skipped": ("with_sink", "total * decay + weight", "total * decay", SINKS),
    "sink of the first head": ("forward", "sinks_ptr + heads", "sinks_ptr + 0 * heads", SINKS),
    "result not lowered by the sink": ("forward", "factor *= decay", "factor *= 1.0",
                                       SINKS | {"sinks": 30.0}),
    "keys of another group": ("forward", "head_slot * PACK // GROUP",
                              "head_slot * PACK % (num_heads // GROUP)",
                              GROUPS | {"len_q": 130}),
    "sum not lowered": ("forward", "running_sum * decay + total", "running_sum + total",
                        RAGGED),
    "result not lowered": ("forward", "accumulator * decay[:, None]", "accumulator", RAGGED),
    "reference of each block": ("exp2_sum", "scores - reference[:, None]",
                                "scores - tl.max(scores, 1)[:, None]", RAGGED),
}  # fmt: skip
KEYS: dict[str, Fault] = {
    "one key more to the right": ("seen", "ahead <= right", "ahead <= right + 1", CAUSAL),
    "one key fewer to the right": ("seen", "ahead <= right", "ahead < right", CAUSAL),
    "one key more to the end": ("seen", "ahead <= right", "ahead <= right + 1", TO_END),
    "aligned at the start": ("lengths_of", "offset = len_k - len_q", "offset = 0", TO_END),
    "one key more to the left": ("seen", "ahead >= -left", "ahead >= -left - 1", WINDOW),
    "one key fewer to the left": ("seen", "ahead >= -left", "ahead > -left", WINDOW),
    "one key behind the last": ("seen", "keys < high", "keys <= high", RAGGED),
    "last key lost": ("seen", "keys < high", "keys < high - 1", RAGGED),
    "last key of a tile lost": (
        "key_ranges", "last_position + right + 1", "last_position + right", CAUSAL),
    "first key of a tile lost": (
        "key_ranges", "first_position - left", "first_position - left + 1", WINDOW),
    "blocks at the left edge unmasked": (
        "key_ranges", "last_position - least_left", "first_position - least_left", WIDE_WINDOW),
    "blocks at the right edge unmasked": (
        "key_ranges", "first_position + least_right", "last_position + least_right", WIDE_WINDOW),
    "one block at the right edge too few": (
        "key_ranges", "whole * BLOCK_N, 0)", "whole * BLOCK_N - BLOCK_N, 0)", RAGGED),
    "a block at the edge twice": ("place_of", "block < before, 0, whole", "block < before, 0, 0",
                                  RAGGED),
    "class of a dilation": ("lengths_of", "residue - offset)", "residue - offset + 1)", DILATED),
    "window not divided by the dilation": ("lengths_of", "left // dilation", "left", DILATED),
    "neighbouring keys of a dilation": ("forward", "key_step *= dilation", "key_step *= 1",
                                        DILATED),
    "sequence's keys from one too early": ("forward", "times(start_k, stride_kn",
                                           "times(tl.maximum(start_k - 1, 0), stride_kn", PACKED),
    "sequence's values from one too early": ("forward", "times(start_k, stride_vn",
                                             "times(tl.maximum(start_k - 1, 0), stride_vn", PACKED),
    "sequence's rows from one too early": (
        "forward", "q_rows = start_q +", "q_rows = tl.maximum(start_q - 1, 0) +", PACKED),
    "sequence from one too late": ("bounds", "tl.load(starts_ptr), 0)",
                                   "tl.load(starts_ptr) + 1, 0)", PACKED),
    "last token of a sequence lost": (
        "bounds", "tl.load(starts_ptr + 1), start)", "tl.load(starts_ptr + 1) - 1, start)", PACKED),
    "sequence of the tile before": ("find_sequence", "return low, tile", "return low, tile - 1",
                                    PACKED),
    "mask turned round": ("forward", "entries != 0", "entries == 0", PADDING),
    "mask of the first batch": ("forward", "mask_ptr + times(batch,", "mask_ptr + times(batch * 0,",
                                PADDING),
    "mask of the first head": (
        "forward", "times(head_slot * PACK, stride_mh", "times(head_slot * 0, stride_mh", ADDED),
    "mask one key off": (
        "load_entries", "start.to(tl.int64)", "tl.maximum(start - 1, 0).to(tl.int64)", PADDING),
    "added mask in units of log 2": (
        "forward", "entries.to(tl.float32) * LOG2_E", "entries.to(tl.float32)", ADDED),
}  # fmt: skip
LISTS: dict[str, Fault] = {
    "block behind the listed": ("listed_start", "is_dense), last_block",
                                "is_dense) + 1, last_block", BLOCKS),
    "next entry of a list": ("_number", "list_ptr + place,", "list_ptr + place + 1,", BLOCKS),
    "list of the rows before": (
        "forward", "first_slot // LIST_ROWS", "tl.maximum(first_slot // LIST_ROWS - 1, 0)", BLOCKS),
    "list of the first batch": ("forward", "batch * stride_lb", "0 * stride_lb",
                                BLOCKS | {"batch": 2}),
    "list of the first head": ("forward", "head_slot * stride_lh", "0 * stride_lh", BLOCKS),
    "last listed block lost": ("forward", "tl.minimum(num_listed, most_blocks)",
                               "tl.minimum(num_listed - 1, most_blocks)", BLOCKS),
    "whole list taken for short": (
        "forward", "is_dense = num_listed < 0", "is_dense = num_listed < -1", BLOCKS),
    "last block of a list unmasked": ("listed_ranges", "LIST_KEYS <= whole_high",
                                      "LIST_KEYS <= whole_high + LIST_KEYS", BLOCKS),
    "blocks behind the order": ("listed_ranges", "end - whole_end, 0", "end - whole_end - 1, 0",
                                BLOCKS | {"is_causal": True}),
    "unlisted blocks taken for listed": (
        "is_listed", "(found == block)", "(found == found)", DROPPED),
    "weight of what was dropped": (
        "dropped_share", "1.0 + kept / ", "1.0 + 2.0 * kept / ", DROPPED),
    "unlisted blocks weigh as one key": ("forward", "tl.minimum(high - start, BLOCK_N) *", "1.0 *",
                                         DROPPED),
}  # fmt: skip
WRITTEN: dict[str, Fault] = {
    "row unwritten": ("store_rows", "is_row[:, None] &",
                      "(is_row & (tl.arange(0, numbers.shape[0]) != 7))[:, None] &", RAGGED),
    "last row unwritten": ("forward", "is_row = rows < len_q", "is_row = rows < len_q - 1", RAGGED),
    "last column unwritten": ("store_rows", "(columns < COLUMNS)", "(columns < COLUMNS - 1)",
                              RAGGED),
    "tile unwritten": ("forward", "(tile < 0)", "(tile < 1)", RAGGED),
    "last column of a row unread": ("load_rows", "COLUMNS != BLOCK:\n        inside",
                                    "COLUMNS != BLOCK:\n        COLUMNS -= 1\n        inside",
                                    RAGGED | {"head_dim": 20}),
    "LSE unwritten in a row": ("forward", "lse, mask=is_row", "lse, mask=is_row & (rows != 3)",
                               RAGGED),
    "LSE in units of log 2": ("forward", "running_max) / LOG2_E", "running_max)", RAGGED),
    "LSE without its reference": (
        "log2_or_nothing", "1.0, total)) + reference", "1.0, total))", RAGGED),
    "maximum in units of log 2": ("forward", "largest / LOG2_E", "largest", RAGGED),
    "sign in the entropy": ("forward", "- running_product * inverse", "+ running_product * inverse",
                            RAGGED),
    "entropy's sum not moved": ("forward", "running_product + running_sum * moved",
                                "running_product", RAGGED),
}  # fmt: skip
SPLITS: dict[str, Fault] = {
    "last key of a split lost": ("forward", "begin + split_keys)", "begin + split_keys - 1)",
                                 DECODE),
    "first split for all": ("forward", "tl.program_id(1) * (split_keys", "0 * (split_keys", DECODE),
    "weights of parts dropped": ("combine", "parts * factors[:, None]", "parts", DECODE),
    "weights of sums dropped": ("combine", "sums * factors", "sums", DECODE),
    "last split lost": ("combine", "splits < num_splits", "splits < num_splits - 1", DECODE),
    "sink skipped": ("combine", "with_sink(largest, total, product, sink)",
                     "reference, total, product, total * 0.0 + 1.0", SPLIT_SINKS),
    "result not lowered by the sink": ("combine", "output = output * decay", "output = output",
                                       SPLIT_SINKS | {"sinks": 30.0}),
    "sink of another head": ("combine", "sinks_ptr + (row // len_q) % num_heads", "sinks_ptr",
                             SPLIT_SINKS),
    "row unwritten": ("combine", "mask=columns < DV", "mask=(columns < DV) & (row != 5)", DECODE),
    "heads in another order": ("combine", "(row // len_q) % num_heads * stride_oh",
                               "(row // len_q + 1) % num_heads * stride_oh", DECODE),
    "LSE in units of log 2": ("combine", "reference) / LOG2_E", "reference)", DECODE),
    "maximum in units of log 2": ("combine", "largest / LOG2_E", "largest", DECODE),
    "entropy's sums not moved": ("combine", "products + sums * moved", "products", DECODE),
}  # fmt: skip
HALVES: dict[str, Fault] = {
    "low half of q dropped": ("forward", "query, query_low, tl.trans(key_block)",
                              "query, query_low * 0.0, tl.trans(key_block)", HALVED),
    "low half of k dropped": ("forward", "tl.trans(key_low)", "tl.trans(key_low * 0.0)", HALVED),
    "low half of v dropped": ("halved_product", "high, low)", "high, low * 0.0)", HALVED),
    "low half of the weights dropped": ("halved_product", "(weights, weights_low,",
                                        "(weights, weights_low * 0.0,", HALVED),
    "low halves dropped": ("halves", "numbers - high.to(tl.float32)", "numbers * 0.0", HALVED),
    "low halves unwritten": ("halve", "pointers + plane, low, mask=inside",
                             "pointers + plane, low, mask=inside & False", HALVED),
    "power of two left out": ("halve", "halves(tile * scale[:, None])", "halves(tile)", HALVED),
    "last row not taken apart": ("halve", "inside = (rows < left)", "inside = (rows < left - 1)",
                                 HALVED),
    "power of a row unwritten": ("halve", "lift, mask=rows < left", "lift, mask=rows < left - 1",
                                 UNEVEN),
    "powers of a block's rows taken for one": (
        "halve", "tl.program_id(0), least)", "tl.program_id(0), tl.max(lift, 0))", UNEVEN),
    "powers of all rows taken for one": ("level_of", "least >= most", "least <= most", UNEVEN),
    "power of a key left out": ("forward", "scores * tl.exp2(key_lifts)[None, :]", "scores",
                                UNEVEN),
    "power of a value left out": (
        "forward", "exponents + (value_lifts[None, :] - unit[:, None])",
        "exponents + (0.0 * value_lifts[None, :] - unit[:, None])", UNEVEN),
    "numbers too large for fp16": ("power_of_two", "127 + 14", "127 + 18", HALVED),
    "sign of the power": ("power_of_two", "scale, -shift", "scale, shift", HALVED),
    "scale of the weights left in": ("forward", "factor /= WEIGHT_SCALE", "factor /= 1.0", HALVED),
    "second part of wide values left out": (
        "forward", "out_rows + PART, others", "out_rows + PART, accumulator",
        HALVED | {"value_dim": 160}),
}  # fmt: skip
FAULTS: dict[str, Fault] = {
    f"{kind}: {name}": fault
    for kind, faults in (
        *(("scores", SCORES), ("keys", KEYS), ("lists", LISTS), ("written", WRITTEN)),
        *(("splits", SPLITS), ("halves", HALVES)),
    )
    for name, fault in faults.items()
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_device_code_is_seen(
    name: str, hold_fault_seen: Callable[[Fault], None]
) -> None:
    hold_fault_seen(FAULTS[name])


def test_each_file_of_device_code_has_faults(
    files_with_faults: Callable[[dict[str, Fault]], set[str]], device_files: set[str]
) -> None:
    assert device_files == FILES | ELSEWHERE
    assert files_with_faults(FAULTS) == FILES
