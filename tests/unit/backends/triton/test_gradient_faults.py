"""Faults put into the portable backward kernels: the one comparison sees each of them.

As `test_faults.py`. Dropout has its own test in `test_gradients.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn.spec import Align, Aux, HeadTerm, MaskKind, Precision

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="functions are replaced where Triton's interpreter looks"
    ),
]

FILES = {"rows", "primitives", "key_gradients", "row_gradients", "mask_gradients"}

Fault = tuple[str, str, str, dict[str, Any]]

TRAINED: dict[str, Any] = {"requires_grad": True, "num_heads": 2, "aux": Aux.NONE}
GROUPS: dict[str, Any] = TRAINED | {"num_heads": 4, "num_kv_heads": 2, "len_q": 20}
CAP: dict[str, Any] = TRAINED | {"len_q": 40, "softcap": 1.5}
MASK: dict[str, Any] = TRAINED | {"mask": MaskKind.ADDITIVE, "mask_requires_grad": True}
ALIBI: dict[str, Any] = TRAINED | {"has_alibi": True, "alibi_requires_grad": True}
BLOCKS: dict[str, Any] = TRAINED | {"len_q": 70, "len_k": 100, "block_size": (32, 32)}
HEADS: dict[str, Any] = TRAINED | {"head_terms": HeadTerm(7), "num_heads": 6, "len_q": 33,
                                           "head_terms_require_grad": True}  # fmt: skip
PACKED: dict[str, Any] = TRAINED | {"lengths_q": (9, 0, 30), "lengths_k": (7, 3, 40)}
PACKED_MASK: dict[str, Any] = MASK | {"lengths_q": (9, 0, 30), "is_causal": True}

DILATED: dict[str, Any] = TRAINED | {"len_q": 70, "len_k": 131, "dilation": 3, "window": (9, 6)}

HALVES: dict[str, Any] = TRAINED | {"precision": Precision.FP32, "len_q": 130, "len_k": 140,
                                    "num_heads": 1}  # fmt: skip
UNEVEN = HALVES | {"small_rows": 1e-3}

FAULTS: dict[str, Fault] = {
    "scale of keys dropped": ("key_gradients", "key_sum * natural", "key_sum", TRAINED),
    "scale of queries dropped": ("row_gradients", "query_sum * natural", "query_sum", TRAINED),
    "sums of rows left out of keys": ("key_gradients", "change - delta[None, :]", "change",
        TRAINED),
    "sums of rows left out of queries": (
        "row_gradients", "change - delta[:, None]", "change", TRAINED),
    "sums of another head": ("row_sums", "times(head, stride_gh, 1)",
        "times(head * 0, stride_gh, 1)",
                             TRAINED),
    "log-sum-exp in units of log 2": ("weights_of", "-lse, LOG2_E", "-lse, 1.0", TRAINED),
    "rounding of the log-sum-exp": (
        "weights_of", "exponents -= rest", "exponents += rest",
        TRAINED
        | {"precision": Precision.FP32, "scale": 29.7, "len_q": 40, "len_k": 90, "step": 0.125}),
    "product of the log-sum-exp rounded": (
        "weights_of", "tl.fma(-lse, LOG2_E, scores)", "scores - lse * LOG2_E",
        TRAINED
        | {"precision": Precision.FP32, "scale": 29.7, "len_q": 40, "len_k": 90, "step": 0.125}),
    "rows of a log-sum-exp that nothing wrote": (
        "forward", "rest, mask=is_row", "rest, mask=is_row & (rows != 3)",
        TRAINED | {"precision": Precision.FP32, "len_q": 20}),
    "slope of the cap, keys": ("key_gradients", "1.0 - tangent * tangent", "1.0 - tangent",
                               CAP),
    "slope of the cap, queries": ("row_gradients", "steepness = 1.0 - tangent * tangent",
                                  "steepness = 1.0 - tangent", CAP),
    "one head of a group": ("key_gradients", "key_head * GROUP + member", "key_head * GROUP",
                            GROUPS),
    "keys of another group": ("row_gradients", "head // GROUP", "head % (num_heads // GROUP)",
                              GROUPS),
    "order at the other end": (
        "key_gradients", "first_key - offset", "first_key + offset",
        TRAINED | {"len_q": 30, "len_k": 147, "is_causal": True, "align": Align.BOTTOM_RIGHT}),
    "windows of rows taken for those of keys": (
        "key_gradients", "own_right,\n            own_right,", "own_left,\n            own_left,",
        TRAINED | {"len_q": 200, "window": (5, 90), "num_heads": 1}),
    "class of a dilation": ("lengths_of", "residue - offset)", "residue - offset + 1)",
                            DILATED),
    "sequence's keys where its queries are": (
        "lengths_of", "bounds(starts_k_ptr", "bounds(starts_q_ptr", PACKED),
    "mask of the first head, keys": ("key_gradients", "times(head, stride_mh, 1)", "0", MASK),
    "mask of the first head, queries": ("row_gradients", "times(head, stride_mh, 1)", "0",
                                        MASK),
    "list of the first head": ("key_gradients", "head * stride_lh", "0 * stride_lh", BLOCKS),
    "list of the keys before": ("key_gradients", "first_key // LIST_KEYS",
                                "tl.maximum(first_key // LIST_KEYS - 1, 0)", BLOCKS),
    "slopes turned round": ("row_gradients", "slope_sum -= tl", "slope_sum += tl", ALIBI),
    "delta of rows whose sink has the rest": (
        "row_gradients", "delta * (1.0 - weight_sum)", "0.0",
        ALIBI | {"has_sinks": True, "len_q": 40}),
    "scale of the first head, keys": (
        "key_gradients", "change *= tl.load(head_scales_ptr + head)",
        "change *= tl.load(head_scales_ptr + head * 0)", HEADS),
    "scale of the first head, queries": (
        "row_gradients", "query_sum *= tl.load(head_scales_ptr + head)",
        "query_sum *= tl.load(head_scales_ptr + head * 0)", HEADS),
    "scale before the cap": ("row_gradients", "scale_sum += tl.sum(change * raw, 1)",
                             "scale_sum += tl.sum(change, 1)", HEADS),
    "cap without its slope": ("row_gradients", "tangent - inner * ", "tangent + inner * ",
                              HEADS),
    "cap of a head without one": ("row_gradients", "softcap > 0.0, cap_sum",
        "softcap >= 0.0, cap_sum",
                                  HEADS),
    "row of queries unwritten": ("row_gradients", "query_sum * natural, is_row",
                                 "query_sum * natural, is_row & (rows != 3)", TRAINED),
    "row of values unwritten": ("key_gradients", "value_sum, is_key",
        "value_sum, is_key & (keys != 3)",
                                TRAINED),
    "low halves of keys dropped": ("product_of_halves", "tl.dot(left_low, right)",
                                   "tl.dot(left_low * 0.0, right)", HALVES),
    "low halves of rows dropped": ("product_of_halves", "tl.dot(left, right_low, product)",
                                   "product", HALVES),
    "high halves taken for low ones": ("load_parts", "low_ptr + start", "base_ptr + start", HALVES),
    "power of the first row": ("load_parts", "lifts_ptr + row_of_all", "lifts_ptr + row_of_all * 0",
                               UNEVEN),
    "powers left out of scores": ("row_products", "found *= tl.exp2(lift)[:, None]", "pass",
                                  HALVES),
    "powers of others left out of scores": (
        "row_products", "found *= tl.exp2(others_lift)[None, :]", "pass", HALVES),
    "powers of rows left out of weights": ("added_rows", "weights *= tl.exp2(lift)[None, :]",
                                           "weights *= 1.0", HALVES),
    "powers of weights left out": ("added_rows", "found * tl.exp2(weights_lift)[:, None]", "found",
                                   HALVES),
    "sums not added to": ("added_rows", "total += found", "total = found", HALVES),
    "mask from one head": ("mask_gradients", "mask_heads == 1, num_heads, 1",
        "mask_heads == 1, 1, 1",
                           MASK | {"mask_shape": (1, 1, 5, 5), "len_q": 5}),
    "mask from one sequence": (
        "mask_gradients", "mask_batch == 1, num_batch, 1", "mask_batch == 1, 1, 1",
        MASK | {"mask_shape": (1, 1, 5, 5), "len_q": 5, "batch": 2}),
    "mask from one tile of rows": (
        "mask_gradients", "times_m = tl.where(mask_rows == 1,",
        "times_m = tl.where(mask_rows == 0,",
        MASK | {"mask_shape": (1, 1, 1, 9), "len_q": 140, "len_k": 9}),
    "mask from one tile of keys": (
        "mask_gradients", "times_n = tl.where(mask_keys == 1,",
        "times_n = tl.where(mask_keys == 0,",
        MASK | {"mask_shape": (1, 1, 9, 1), "len_q": 9, "len_k": 140}),
    "mask with keys of a dilation's others": (
        "mask_gradients", "% dilation == 0", "% dilation >= 0",
        MASK | {"len_q": 20, "dilation": 2}),
    "mask over another sequence": ("mask_gradients", "of_row[:, None] == of_key[None, :]",
                                   "of_row[:, None] != of_key[None, :] - 9", PACKED_MASK),
    "mask without the last token of a sequence": ("sequences_of", "start + length)",
                                                  "start + length - 1)", PACKED_MASK),
    "mask over blocks that are not listed": ("is_in_list", "(blocks == block)", "(blocks >= 0)",
                                             MASK | BLOCKS),
}  # fmt: skip


@pytest.mark.usefixtures("little_work")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_device_code_is_seen(
    name: str, hold_fault_seen: Callable[[Fault], None]
) -> None:
    hold_fault_seen(FAULTS[name])


def test_each_file_of_device_code_has_faults(
    files_with_faults: Callable[[dict[str, Fault]], set[str]],
) -> None:
    assert files_with_faults(FAULTS) >= FILES
