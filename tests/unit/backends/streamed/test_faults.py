"""Faults put into the device code of chunked scores one by one: the one comparison sees each.

As the faults of the portable kernels, whose device functions it shares. Dropout is random, and has
its own tests.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn.spec import Align, MaskKind, Precision
from adaattn.testing import Layout

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="functions are replaced where Triton's interpreter looks"
    ),
]

FILES = {"softmax", "score_changes", "split_products"}
SHARED = {"rows", "scores"}
"""Those of `backends/device/`, whose faults are with the portable kernels; some are here too."""

Fault = tuple[str, str, str, dict[str, Any]]

RAGGED: dict[str, Any] = {"len_q": 20, "len_k": 67, "chunk_rows": 7}
CAUSAL: dict[str, Any] = {"len_q": 40, "is_causal": True, "num_heads": 1}
TO_END: dict[str, Any] = CAUSAL | {"len_q": 20, "len_k": 71, "align": Align.BOTTOM_RIGHT}
WINDOW: dict[str, Any] = {"len_q": 60, "window": (5, 3), "num_heads": 1, "chunk_rows": 16}
GROUPS: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "batch": 2, "chunk_rows": 5}
LONG: dict[str, Any] = {"len_q": 3, "len_k": 9001, "head_dim": 16, "num_heads": 1}
SINKS: dict[str, Any] = {"len_q": 20, "has_sinks": True}
ALIBI: dict[str, Any] = {"len_q": 30, "has_alibi": True, "batch": 2}
MASK: dict[str, Any] = {"len_q": 20, "mask": MaskKind.ADDITIVE, "batch": 2}
DILATED: dict[str, Any] = {"len_q": 40, "dilation": 3, "num_heads": 1, "chunk_rows": 16}
CAP: dict[str, Any] = {"len_q": 20, "softcap": 1.5}
TRAINED: dict[str, Any] = {"requires_grad": True, "len_q": 20, "chunk_rows": 7}
REST: dict[str, Any] = TRAINED | {
    "precision": Precision.FP32,
    "scale": 29.7,
    "step": 0.125,  # of which sums are exact
    "len_k": 90,
}
SMALL: dict[str, Any] = {"executor": "small", "len_q": 20, "len_k": 35, "batch": 2,
                         "num_heads": 4, "num_kv_heads": 2}  # fmt: skip
SPLIT: dict[str, Any] = {"executor": "small", "len_q": 20, "len_k": 35, "num_heads": 1,
                         "head_dim": 600, "precision": Precision.FP32}  # fmt: skip
SMALL_TRAINED: dict[str, Any] = SMALL | {"requires_grad": True}
LSE: dict[str, Any] = {"len_q": 20, "chunk_rows": 7}

FAULTS: dict[str, Fault] = {
    "plane of another batch": ("lines_of", "plane // kv_heads", "plane % kv_heads", MASK),
    "head of another group": ("lines_of", "plane % kv_heads * GROUP", "plane % kv_heads",
                              GROUPS | {"has_sinks": True}),
    "member of a group": ("lines_of", "inside // num_rows % GROUP", "inside % GROUP",
                          GROUPS | {"has_sinks": True}),
    "row of the first chunk": ("lines_of", "first_row + inside % num_rows", "inside % num_rows",
                               CAUSAL | {"chunk_rows": 16}),
    "planes of the first chunk": ("lines_of", "first_plane + ", "0 * first_plane + ",
                                  GROUPS | {"has_sinks": True, "layout": Layout.TRANSPOSED}),
    "mask of the first head": ("entries_of", "times(head, stride_mh, MASK_ALIGN)", "0", MASK),
    "mask of the first batch": ("entries_of", "times(batch, stride_mb, MASK_ALIGN)", "0", MASK),
    "mask of the first row": ("entries_of", "starts += times(row, stride_mm, MASK_ALIGN)",
                              "starts += 0", MASK),
    "mask of the key before": ("entries_of", "steps = keys * MASK_STEP",
                               "steps = tl.maximum(keys - 1, 0) * MASK_STEP", MASK),
    "keys of another class": ("on_the_grid", "dilation == 0", "dilation == 1", DILATED),
    "keys of all classes": ("on_the_grid", "dilation == 0", "dilation >= 0", DILATED),
    "one key more to the right": ("seen", "ahead <= right", "ahead <= right + 1", CAUSAL),
    "one key fewer to the right": ("seen", "ahead <= right", "ahead < right", CAUSAL),
    "one key more to the left": ("seen", "ahead >= -left", "ahead >= -left - 1", WINDOW),
    "aligned at the start": ("block_of", "(row + offset)", "(row + 0 * offset)", TO_END),
    "keys of the first chunk": ("block_of", "first_key // 16 * 16 + columns", "columns", WINDOW),
    "last key lost": ("seen", "keys < high", "keys < high - 1", RAGGED),
    "one key behind the last": ("seen", "keys < high", "keys <= high", RAGGED),
    "scale dropped": ("scores_of", "raw * scale", "raw", RAGGED),
    "softcap skipped": (
        "scores_of", "soft_capped(scores, softcap, FAST_TANH, MAY_BE_UNCAPPED)",
        "scores * softcap", CAP),
    "sign of the slope": ("add_bias", "scores - slope", "scores + slope", ALIBI),
    "slope of the first head": ("softmax", "stride_slope + head", "stride_slope + 0 * head",
                                ALIBI),
    "slope of the first batch": ("softmax", "slopes_ptr + batch *", "slopes_ptr + 0 *", ALIBI),
    "sink of the first head": ("softmax", "sinks_ptr + head", "sinks_ptr + 0 * head", SINKS),
    "weights not lowered by the sink": (
        "softmax", "denominator, total, product, factor = with_sink",
        "denominator, total, product, _ = with_sink", SINKS | {"sinks": 30.0}),
    "sum of the last block": ("softmax", "total = total * decay + more", "total = more", LONG),
    "sum not lowered": ("softmax", "total * decay + more", "total + more", LONG),
    "entropy of the last block": (
        "softmax", "decay * (product + total * moved) + more_product", "more_product", LONG),
    "weights of each block": (
        "softmax", "tl.exp2(scores - reference[:, None]) * factor",
        "tl.exp2(scores - tl.max(scores, 1)[:, None]) * factor", LONG),
    "one row fewer": ("softmax", "is_line = lines < num_lines", "is_line = lines < num_lines - 1",
                      LSE),
    "scores of the first row": ("block_of", "starts[:, None] + columns[None, :]",
                                "0 * starts[:, None] + columns[None, :]", LSE),
    "weights of the next row": ("store_weights", "starts[:, None] + columns[None, :]",
                                "starts[:, None] * 0 + columns[None, :]", LSE),
    "maximum in units of log 2": ("softmax", "largest / LOG2_E", "largest", LSE),
    "log-sum-exp in units of log 2": ("softmax", "denominator) / LOG2_E", "denominator)", LSE),
    "entropy without its mean": ("softmax", "- product * inverse", "- product", LSE),
    "rest of the log-sum-exp unwritten": (
        "softmax", "lse_rest(total, denominator, lse), mask=is_line",
        "lse_rest(total, denominator, lse), mask=is_line & (row != 3)", REST),
    "sums of rows left out": ("score_changes", "weights * (change - delta[:, None])",
                              "weights * change", TRAINED),
    "slope of the cap": ("score_changes", "1.0 - tangent * tangent", "1.0 - tangent",
                         TRAINED | CAP),
    "order at the other end": ("score_changes", "(row + offset)", "(row - offset)",
                               TRAINED | TO_END),
    "keys of the first chunk, gradients": (
        "score_changes", "keys = (first_key // 16 * 16 + columns)",
        "keys = (0 * first_key + columns)",
        TRAINED | WINDOW),
    "classes of a dilation, gradients": (
        "score_changes",
        "tl.where(on_the_grid(positions, keys, dilation, IS_DILATED), weights, 0.0)", "weights",
        TRAINED | DILATED),
    "slope of the first head, gradients": (
        "score_changes", "stride_slope + head", "stride_slope + 0 * head", TRAINED | ALIBI),
    "rounding of the log-sum-exp": ("weights_of", "exponents -= rest", "exponents += rest", REST),
    "columns of scores twice": (
        "score_changes", "tl.program_id(0) % tiles * BLOCK_N", "tl.program_id(0) % tiles * 0",
        TRAINED | LONG | {"len_k": 600}),
    "rows of scores twice": (
        "score_changes", "tl.program_id(0) // tiles * BLOCK_M", "tl.program_id(0) // tiles * 0",
        TRAINED),
    "plane of another batch, products": ("row_starts", "times(plane // kv_heads, stride_b, ALIGN)",
                                         "times(plane % kv_heads * 0, stride_b, ALIGN)", SMALL),
    "head of another group, products": ("row_starts", "plane % kv_heads * GROUP",
                                        "plane % kv_heads", SMALL),
    "member of a group, products": ("row_starts", "+ rows // num_rows", "+ 0 * rows", SMALL),
    "row of another, products": ("row_starts", "rows % num_rows", "(rows + 1) % num_rows", SMALL),
    "columns behind the last": ("load_tile", "columns < num_columns // ALIGN * ALIGN",
                                "columns < num_columns // ALIGN * ALIGN - 8", SMALL),
    "columns of the first split": ("partial_products", "first = tl.program_id(1) *",
                                   "first = 0 * tl.program_id(1) *", SPLIT),
    "last columns of a split lost": ("partial_products", "first + split_columns, num_columns",
                                     "first + split_columns // 2, num_columns", SPLIT),
    "sums of the last columns": ("partial_products", "tl.fma(product, unit, total)",
                                 "product * unit", SPLIT | {"head_dim": 5000}),
    "parts over one another": ("partial_products", "split * num_lines + lines",
                               "plane * num_lines + lines", SPLIT),
    "lines of a block twice": ("partial_products", "% blocks * BLOCK_M + tl.arange",
                               "% blocks * 0 + tl.arange", SMALL),
    "one part left out": ("summed", "splits < SPLITS", "splits < SPLITS - 1", SPLIT),
    "parts of the first line": ("summed", "places[None, :, :]", "0 * places[None, :, :]", SPLIT),
    "scale of the result": ("slice_products", "input_precision=DOT) * scale",
                            "input_precision=DOT)", SMALL_TRAINED),
    "slices over one another": ("slice_products", "tl.program_id(1) * BLOCK_D +",
                                "tl.program_id(1) * 0 +", SPLIT),
    "weights of the first plane": ("slice_products", "plane * num_lines + rows", "rows", SMALL),
    "weights of the first plane, transposed": (
        "slice_products", "plane * num_lines + inner", "inner", SMALL_TRAINED),
    "row of a result unwritten": (
        "slice_products", "inside = is_row[:, None] & (columns",
        "inside = (is_row & (rows != 3))[:, None] & (columns", SMALL),
    "sums of rows without weights, sinks": (
        "score_changes", "delta = tl.sum(weights * change, 1)", "delta = tl.sum(change, 1)",
        SMALL_TRAINED | {"has_sinks": True, "sinks_require_grad": True}),
    "sums of another head": ("row_sums", "times(head, stride_gh, 1)",
                             "times(head * 0, stride_gh, 1)", TRAINED),
    "sums of the first columns": ("row_sums", "output_ptr + START", "output_ptr",
                                  TRAINED | {"head_dim": 600}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_device_code_is_seen(
    name: str, hold_fault_seen: Callable[[Fault], None]
) -> None:
    hold_fault_seen(FAULTS[name])


def test_each_file_of_device_code_has_faults(
    files_with_faults: Callable[[dict[str, Fault]], set[str]], device_files: set[str]
) -> None:
    elsewhere = {"division", "mask_tiles"}  # in `test_fused`, and in `hopper/test_mask_lists`
    assert device_files == FILES | SHARED | elsewhere
    assert files_with_faults(FAULTS) == FILES | SHARED
