"""Faults put into the Hopper kernel one by one, as `conftest.py` runs it: each of them is seen.

Each is one text of a device function replaced by another. The same function made anew without a
change passes on the same tensors. Not here: faults of barriers and of asynchronous order, which
the simulation shows as deadlocks or not at all.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.interface import Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, HeadTerm, MaskKind, Precision
from adaattn.testing import (
    assert_executor_matches,
    make_problem,
    make_tensors,
    with_tensors,
)

ROW_MAX: dict[str, Any] = {"aux": Aux.ROW_MAX}
"""With it, as in fp16, the running maximum is the reference; else, in bf16, a fixed one."""

PLAIN: dict[str, Any] = {"len_q": 70, "len_k": 300}
SHORT: dict[str, Any] = {"len_q": 70, "len_k": 9}
CAUSAL: dict[str, Any] = {"len_q": 200, "is_causal": True}
TO_END: dict[str, Any] = CAUSAL | {"len_k": 333, "align": Align.BOTTOM_RIGHT}
WINDOW: dict[str, Any] = {"len_q": 300, "window": (70, 20)}
HEADS: dict[str, Any] = {"num_heads": 2, "len_q": 70}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "len_q": 70}
SINKS: dict[str, Any] = HEADS | {"has_sinks": True}
ALIBI: dict[str, Any] = HEADS | {"has_alibi": True}
SOFTCAP: dict[str, Any] = {"len_q": 70, "softcap": 1.5}
BOOLEAN: dict[str, Any] = HEADS | {"mask": MaskKind.BOOLEAN}
ADDED: dict[str, Any] = HEADS | {"mask": MaskKind.ADDITIVE}
STAGED: dict[str, Any] = {"batch": 2, "num_heads": 2, "len_q": 140, "len_k": 144,
                          "mask": MaskKind.ADDITIVE}  # fmt: skip
STAGED_BOOLEANS: dict[str, Any] = STAGED | {"mask": MaskKind.BOOLEAN}
PADDING: dict[str, Any] = BOOLEAN | {"batch": 2, "mask_shape": (2, 1, 1, 70)}
PACKED: dict[str, Any] = {"lengths_q": (40, 0, 170, 1), "is_causal": True}
OTHER_KEYS: dict[str, Any] = {"lengths_q": (40, 100), "lengths_k": (70, 180), "is_causal": True,
                              "align": Align.BOTTOM_RIGHT}  # fmt: skip
BLOCKS: dict[str, Any] = HEADS | {"len_q": 300, "len_k": 500, "block_size": (128, 128)}
EQUAL: dict[str, Any] = BLOCKS | {"aux": Aux.DROPPED_MASS, "scale": 1e-9}
"""Where all scores are equal the bound of the dropped mass is the mass itself."""
FP16: dict[str, Any] = {"precision": Precision.FP16}
SCALES: dict[str, Any] = GROUPS | {"head_terms": HeadTerm.SCALE}
CAPS: dict[str, Any] = GROUPS | {"head_terms": HeadTerm.SOFTCAP}
WINDOWS: dict[str, Any] = GROUPS | {"head_terms": HeadTerm.WINDOW, "len_q": 300}
LOUD: dict[str, Any] = {"len_q": 130, "len_k": 300, "loud_keys": 300.0}
"""So far above those of the last block that their weights are no numbers beside its maximum."""

Fault = tuple[str, str, str, dict[str, Any]]

SCORES: dict[str, Fault] = {
    "scale dropped in the first block": ("attend_tile", "else x.scale", "else 1.0", PLAIN),
    "scale dropped in the others": ("key_step", "else x.scale", "else 1.0", PLAIN),
    "scale dropped beside slopes": ("modify", " s = s * row_terms[3]\n", " s = s\n", ALIBI),
    "softcap skipped": ("modify", "s = cap * gl.inline_asm_elementwise(",
                        "s = cap * scaled + 0.0 * gl.inline_asm_elementwise(", SOFTCAP),
    "softcap of another base": ("modify", "- 2.0 * cap * inverse", "- cap * inverse",
                                SOFTCAP | FP16),
    "columns of another thread": ("split_columns", "columns & 6", "columns & 4", ALIBI),
    "sign of the slope": ("modify", "s - row_terms[0]", "s + row_terms[0]", ALIBI),
    "slope of the first head": ("terms_of", "x.slopes_stride + head)", "x.slopes_stride)", ALIBI),
    "slope of the first batch": ("terms_of", "batch * x.slopes_stride", "0 * x.slopes_stride",
                                 ALIBI | {"batch": 2}),
    "sink skipped": ("finish_tile", "extra = gl.exp2(", "extra = 0.0 * gl.exp2(", SINKS),
    "sink of the first head": ("finish_tile", "x.sinks + head % c.num_heads", "x.sinks", SINKS),
    "result not lowered by the sink": ("finish_tile", "gl.exp2(reference - maximum)", "1.0",
                                       SINKS | {"sinks": 6.0}),
    "keys of another group": ("produce", "head // c.group_size",
                              "head % (c.num_heads // c.group_size)", GROUPS),
    "sum not lowered": ("key_step", "row_sum = row_sum * scale_sums", "row_sum = row_sum",
                        PLAIN | FP16),
    "result not lowered": ("attend_blocks", "gl.convert_layout(scale, of_out)",
                           "gl.convert_layout(scale * 0.0 + 1.0, of_out)", PLAIN | FP16),
    "scores beyond the reference kept": ("finish_tile", "1 + slot + rows * 0, 1,",
                                         "1 + slot + rows * 0, 0,", LOUD),
}  # fmt: skip
KEYS: dict[str, Fault] = {
    "one key more to the right": ("hide", "<= gl.expand_dims(last", "- 1 <= gl.expand_dims(last",
                                  CAUSAL),
    "one key fewer to the right": ("hide", "<= gl.expand_dims(last", "< gl.expand_dims(last",
                                   CAUSAL),
    "one key more to the end": ("hide", "<= gl.expand_dims(last", "- 1 <= gl.expand_dims(last",
                                TO_END),
    "one key more to the left": ("hide", ">= gl.expand_dims(first", "+ 1 >= gl.expand_dims(first",
                                 WINDOW),
    "one key fewer to the left": ("hide", ">= gl.expand_dims(first", "> gl.expand_dims(first",
                                  WINDOW),
    "one key behind the last": ("hide", "sizes.len_k - 1", "sizes.len_k", SHORT),
    "last key lost": ("hide", "sizes.len_k - 1", "sizes.len_k - 2", SHORT),
    "last key of a tile lost": ("seen_blocks", "sizes.right + 1, 0)", "sizes.right, 0)",
                                CAUSAL | {"len_q": 193, "window": (5, -1)}),
    "first keys of a tile lost": (
        "seen_blocks", "sizes.offset - sizes.left", "sizes.offset", WINDOW),
    "blocks at the left edge unmasked": (
        "attend_tile", "hidden = gl.cdiv(", "hidden = 0 * gl.cdiv(", WINDOW),
    "sequence's keys from one too early": (
        "packed_tile", "len_q, start_k, len_k)", "len_q, gl.maximum(start_k - 1, 0), len_k)",
        PACKED),
    "sequence's rows from one too early": (
        "packed_tile", "start_q, len_q, start_k, len_k)",
        "gl.maximum(start_q - 1, 0), len_q, start_k, len_k)", PACKED),
    "last token of a sequence lost": (
        "bounds", "gl.load(starts + 1), start)", "gl.load(starts + 1) - 1, start)", PACKED),
    "sequence aligned at its start": ("sizes_of", "tile.len_k - tile.len_q", "0 * tile.len_k",
                                      OTHER_KEYS),
    "mask turned round": ("modify", "!= 0, s, NOTHING", "== 0, s, NOTHING", BOOLEAN),
    "mask of the first batch": ("terms_of", "batch.to(gl.int64) * x.mask_stride_b", "0", PADDING),
    "mask of the first head": ("terms_of", "head.to(gl.int64) * x.mask_stride_h", "0", ADDED),
    "added mask in another unit": ("terms_of", "else LOG2_E / x.scale", "else LOG2_E", ADDED),
    "added mask beside slopes": ("terms_of", "LOG2_E if x.IS_MODIFIED", "1.0 if x.IS_MODIFIED",
                                 ADDED | ALIBI),
    "staged mask of the first batch": ("produce", "stride_b != 0, batch", "stride_b != 0, 0",
                                       STAGED),
    "staged mask of the first head": ("produce", "stride_h != 0, head", "stride_h != 0, 0",
                                      STAGED),
    "staged mask of the warpgroup before": ("produce", "mask_row = start_q + first_row + w * 64",
                                            "mask_row = start_q + first_row", STAGED),
    "staged booleans one byte off": ("modify", "mask & 0xFF00", "mask & 0xFF", STAGED_BOOLEANS),
    "staged booleans of the first keys": ("produce", "column // 2", "column // 4",
                                          STAGED_BOOLEANS),
}  # fmt: skip
LISTS: dict[str, Fault] = {
    "next entry of a list": ("entry", "entries + place,",
                             "entries + gl.minimum(place + 1, num - 1),", BLOCKS),
    "list of the rows before": ("listed_tile", "first_row // lists.rows",
                                "gl.maximum(first_row // lists.rows - 1, 0)", BLOCKS),
    "list of the first batch": ("listed_tile", "batch * lists.stride_b", "0 * lists.stride_b",
                                BLOCKS | {"batch": 2}),
    "list of the first head": ("listed_tile", "head * lists.stride_h", "0 * lists.stride_h",
                               BLOCKS),
    "last listed block lost": ("listed_tile", "lists.num_blocks, num)",
                               "lists.num_blocks, num - 1)", BLOCKS),
    "whole list taken for empty": ("listed_tile", "counts + line), -1)", "counts + line), 0)",
                                   BLOCKS | {"num_heads": 6}),
    "block of another visit": ("listed_block", "tile.end - 1 - visit",
                               "gl.maximum(tile.end - 2 - visit, 0)", BLOCKS),
    "last blocks in causal order lost": ("listed_tile", "gl.cdiv(end, c.LIST_RATIO)",
                                         "gl.cdiv(end, c.LIST_RATIO) - 1",
                                         BLOCKS | {"is_causal": True}),
}  # fmt: skip
BY_HEAD: dict[str, Fault] = {
    "scale of the first head": ("terms_of", "x.head_scales + head", "x.head_scales", SCALES),
    "scale of the next head": ("terms_of", "x.head_scales + head",
                               "x.head_scales + (head + 1) % num_heads", SCALES | FP16),
    "scale of a head dropped": ("modify", "    elif x.IS_MODIFIED:\n        s = s * row_terms[3]\n",
                                "    elif x.IS_MODIFIED:\n        s = s * x.scale\n", SCALES),
    "softcap of the next head": ("terms_of", "x.head_softcaps + head",
                                 "x.head_softcaps + (head + 1) % num_heads", CAPS),
    "no softcap taken for one": ("modify", "gl.where(cap > 0.0, s, scaled)", "s", CAPS),
    "no softcap taken for one in half": ("modify", "gl.where(cap > 0.0, s, scaled)", "s",
                                         CAPS | FP16),
    "scale without a softcap in another unit": ("terms_of", "capped, scale * LOG2_E",
                                                "capped, scale", CAPS),
    "softcap in another unit": ("terms_of", "cap, 0.0) * LOG2_E", "cap, 0.0)", CAPS),
    "softcap before its scale": ("terms_of", "/ gl.where(cap > 0.0, cap, 1.0)", "/ 1.0", CAPS),
    "window of the next head": ("sizes_by_head", ") % c.num_heads", " + 1) % c.num_heads", WINDOWS),
    "window of the first head": ("sizes_by_head", ") % c.num_heads", ") * 0", WINDOWS),
    "left taken for right": ("sizes_by_head", "head * 2 + 1)", "head * 2)", WINDOWS),
    "right taken for left": ("sizes_by_head", "head * 2)\n", "head * 2 + 1)\n", WINDOWS),
    "all keys taken for none": ("sizes_by_head", "left < 0, sizes.left,", "left < 0, 0,", WINDOWS),
    "all keys behind taken for none": ("sizes_by_head", "right < 0, sizes.right,", "right < 0, 0,",
                                       WINDOWS),
    "causal order lost beside windows": ("sizes_by_head", "gl.minimum(right, sizes.right)", "right",
                                         WINDOWS | {"is_causal": True}),
    "blocks of another head's window listed": ("listed_tile", "sizes_by_head(c, number)",
                                               "sizes_by_head(c, 0 * number)",
                                               WINDOWS | {"block_size": (128, 128)}),
}  # fmt: skip
DROPPED: dict[str, Fault] = {
    "unlisted block taken for listed": ("is_listed", "(found == wanted)", "(found >= wanted)",
                                        EQUAL),
    "all blocks taken for listed": ("is_listed", "(found == wanted)", "(found == found)", EQUAL),
    "unlisted blocks weigh as one key": ("bound_block", "num_keys * gl.exp2", "gl.exp2", EQUAL),
    "blocks before dropped": ("bound_block", "total * gl.exp2(largest - base)", "total * 0.0",
                              EQUAL),
    "weight of what was dropped": ("bound_tiles", "1.0 + ratio", "1.0 + 2.0 * ratio", EQUAL),
    "share of another head": ("bound_tiles", "(tile.number >> c.tile_bits)",
                              "(1 - (tile.number >> c.tile_bits))", EQUAL),
}  # fmt: skip
WRITTEN: dict[str, Fault] = {
    "rows stored one too far": ("store_part", "start, first_row,", "start, first_row + 1,", PLAIN),
    "tile unwritten": ("store_part", "number >= 0", "number > 0", PLAIN),
    "last row of each sequence unwritten": (
        "store_part", "sizes_of(c, tile).len_q,", "sizes_of(c, tile).len_q - 1,", PACKED),
    "last row of statistics unwritten": (
        "finish_tile", "rows < sizes.len_q", "rows < sizes.len_q - 1", PLAIN),
    "LSE in units of log 2": ("finish_tile", "gl.log2(denominator)) * LN_2",
                              "gl.log2(denominator))", PLAIN),
    "LSE without its reference": ("finish_tile", "(maximum + gl.log2(", "(gl.log2(", PLAIN),
    "maximum in units of log 2": ("finish_tile", "reference * LN_2", "reference", PLAIN | ROW_MAX),
    "sign in the entropy": ("finish_tile", "- first / denominator", "+ first / denominator", PLAIN),
    "entropy's terms left out": ("moment_of", "p * t", "p", PLAIN),
    "tile of the list twice": ("own_tile", "+ 1 + slot", "+ 1 + gl.maximum(slot - 1, 0)",
                               CAUSAL | {"num_heads": 4}),
    "sum of one thread": ("sum_in_thread", "8, 8]), 1)", "8, 8])[:, :1], 1)", PLAIN),
    "halves of wide results swapped": ("store_parts", "store_parts(c, w, left, tile",
                                       "store_parts(c, w, right, tile",
                                       {"len_q": 70, "head_dim": 256}),
}  # fmt: skip
FAULTS: dict[str, Fault] = {
    f"{kind}: {name}": fault
    for kind, faults in (
        *(("scores", SCORES), ("keys", KEYS)),
        *(("lists", LISTS), ("by head", BY_HEAD), ("dropped", DROPPED), ("written", WRITTEN)),
    )
    for name, fault in faults.items()
}


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem, with statistics, and its tensors."""
    usual = {"precision": Precision.BF16, "head_dim": 32, "num_heads": 1}
    values = usual | {"aux": Aux.LSE | Aux.ENTROPY} | values
    loud, sinks = values.pop("loud_keys", None), values.pop("sinks", None)
    lengths = {key: values.pop(key) for key in ("lengths_q", "lengths_k") if key in values}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths)
    if loud is not None:
        key = tensors.key.clone()
        key[:, :, :50] *= loud
        tensors = with_tensors(tensors, key=key)
    if sinks is not None and tensors.sinks is not None:
        tensors = with_tensors(tensors, sinks=torch.full_like(tensors.sinks, sinks))
    if problem.has_alibi:
        slopes = torch.rand(problem.batch, problem.num_heads)
        tensors = with_tensors(tensors, alibi_slopes=slopes)
    return problem, tensors


def hold_to_the_definition(tensors: Tensors, problem: AttentionProblem) -> None:
    """Raise AssertionError unless the kernel's result is right; what nothing wrote is no number."""
    run = partial(hopper.run, group=HeadGroup(capability="hopper"))
    assert_executor_matches(run, tensors, problem)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_device_code_is_seen(
    name: str, simulated: Any, rewritten: Callable[..., Any], once: Callable[..., None]
) -> None:
    function, old, new, values = FAULTS[name]
    problem, tensors = made(values)
    once(values, partial(hold_to_the_definition, tensors, problem))
    simulated.replace(function, partial(rewritten, old=old, new=new))
    with pytest.raises(AssertionError, match="beyond their bound"):
        hold_to_the_definition(tensors, problem)


def test_each_file_of_device_code_that_is_simulated_has_faults() -> None:
    """Files beside this one have those of packed masks and of the backward pass."""
    broken = {function for function, *_ in FAULTS.values()}
    elsewhere = ("backward", "backward_keys", "backward_queries", "gradient_masks",
                 "gradient_order", "gradient_rows", "gradient_scores", "mask_bits")  # fmt: skip
    for path in Path(hopper.__file__).parent.glob("*.py"):
        text = path.read_text()
        if "@gluon.jit" in text and path.stem not in elsewhere:
            assert any(f"\ndef {name}(" in text for name in broken), path.name
