"""The gradients of a block of query rows of one head, from all keys that it sees."""

import triton
import triton.language as tl

from adaattn.backends.device.rows import load_lse, load_number, times
from adaattn.backends.device.scores import LOG2_E, is_kept, share_kept, weights_of
from adaattn.backends.triton.listed import listed_ranges, listed_start
from adaattn.backends.triton.primitives import (
    added_rows,
    head_factors,
    head_window,
    key_ranges,
    lengths_of,
    load_parts,
    place_of,
    row_products,
    step_of,
    store_rows,
)

__all__ = ["row_gradients"]

_NUMBERS = (
    *("scale", "softcap", "natural", "dropout_p"),
    *("stride_qb", "stride_qh", "stride_qm", "stride_kb", "stride_kh", "stride_kn"),
    *("stride_vb", "stride_vh", "stride_vn", "stride_ob", "stride_oh", "stride_om"),
    *("stride_db", "stride_dh", "stride_dm"),
    *("stride_mb", "stride_mh", "stride_mm", "stride_mn", "stride_slope"),
    *("num_heads", "total_q", "total_k", "left", "right", "dilation", "num_sequences"),
    *("num_tiles", "stride_lb", "stride_lh", "most_blocks"),
)
"""No value of these makes another kernel."""


@triton.jit(do_not_specialize=_NUMBERS)
def row_gradients(
    query_ptr,
    key_ptr,
    value_ptr,
    gradient_ptr,
    lse_ptr,
    delta_ptr,
    mask_ptr,
    slopes_ptr,
    starts_q_ptr,
    starts_k_ptr,
    seed_ptr,
    counts_ptr,
    indices_ptr,
    head_scales_ptr,
    head_windows_ptr,
    head_softcaps_ptr,
    lse_rest_ptr,
    query_low_ptr,
    key_low_ptr,
    value_low_ptr,
    gradient_low_ptr,
    query_lifts_ptr,
    key_lifts_ptr,
    value_lifts_ptr,
    gradient_lifts_ptr,
    query_gradient_ptr,
    slope_sums_ptr,
    scale_sums_ptr,
    cap_sums_ptr,
    lse_gradient_ptr,
    delta_out_ptr,
    scale,
    softcap,
    natural,
    dropout_p,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_db,
    stride_dh,
    stride_dm,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_slope,
    num_heads,
    total_q,
    total_k,
    left,
    right,
    dilation,
    num_sequences,
    num_tiles,
    stride_lb,
    stride_lh,
    most_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    TO_END: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_DILATED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    LIST_ROWS: tl.constexpr,
    LIST_KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Write the gradients of BLOCK_M query rows of one head, and their part of those of its terms.

    Args, beyond those of `forward` and `key_gradients`:
        counts_ptr: int32, blocks of keys that LIST_ROWS rows see, as `forward` takes them.
        query_gradient_ptr: [B, Hq, Sq, D], by the strides ``stride_d*``.
        slope_sums_ptr: fp32 [B, Hq, Sq], each row's part of the gradient of its head's ALiBi slope;
            None where nobody wants it.
        scale_sums_ptr: likewise of the scale, less the factor ``natural``.
        cap_sums_ptr: likewise of the softcap.
        lse_gradient_ptr: fp32 [B, Hq, Sq], or None; read where ``delta_out_ptr`` is given.
        delta_out_ptr: ``delta_ptr`` where it is to be replaced by sums of weights times their
            gradients, None else. The output's rounding is in what it holds, and where terms of
            many rows, or of a row of few keys, cancel, that would be most of what is left.
    """
    tile = tl.program_id(0) % num_tiles
    head = (tl.program_id(0) // num_tiles) % num_heads
    batch = tl.program_id(0) // num_tiles // num_heads
    key_head = head // GROUP
    tile, residue, start_q, start_k, len_q, len_k, offset, left, right = lengths_of(
        tile,
        starts_q_ptr,
        starts_q_ptr,
        starts_k_ptr,
        total_q,
        total_k,
        left,
        right,
        dilation,
        num_sequences,
        num_tiles,
        BLOCK_M,
        TO_END,
        IS_DILATED,
        IS_PACKED,
        HAS_RIGHT,
    )
    if (tile < 0) | (tile * BLOCK_M >= len_q):
        return

    first_slot = tile * BLOCK_M
    within_rows = tl.arange(0, BLOCK_M)
    within = tl.arange(0, BLOCK_N)
    rows = first_slot + within_rows
    is_row = rows < len_q
    query_step = step_of(stride_qm, dilation, ALIGN, WIDE)
    gradient_step = step_of(stride_om, dilation, ALIGN, WIDE)
    key_step = step_of(stride_kn, dilation, KEY_ALIGN, WIDE)
    value_step = step_of(stride_vn, dilation, KEY_ALIGN, WIDE)
    rows_within = within_rows
    keys_within = within
    if WIDE:
        rows_within = within_rows.to(tl.int64)
        keys_within = within.to(tl.int64)
    first_q_row = start_q + first_slot * dilation
    query_start = times(batch, stride_qb, ALIGN) + times(head, stride_qh, ALIGN)
    query_start += times(first_q_row, stride_qm, ALIGN)
    gradient_start = times(batch, stride_ob, ALIGN) + times(head, stride_oh, ALIGN)
    gradient_start += times(first_q_row, stride_om, ALIGN)
    left_rows = len_q - first_slot
    row_of_all = (batch.to(tl.int64) * num_heads + head) * total_q + start_q + rows * dilation
    query, query_low, query_lift = load_parts(
        query_ptr, query_low_ptr, query_lifts_ptr, query_start, row_of_all,
        rows_within, query_step, left_rows, D, BLOCK_D, True,
    )  # fmt: skip
    gradient, gradient_low, gradient_lift = load_parts(
        gradient_ptr, gradient_low_ptr, gradient_lifts_ptr, gradient_start, row_of_all,
        rows_within, gradient_step, left_rows, DV, BLOCK_DV, True,
    )  # fmt: skip
    start_of_keys = start_k + tile * 0  # a tensor, also where it is 0 for all
    key_start = times(batch, stride_kb, KEY_ALIGN) + times(key_head, stride_kh, KEY_ALIGN)
    key_start += times(start_of_keys, stride_kn, KEY_ALIGN)
    value_start = times(batch, stride_vb, KEY_ALIGN) + times(key_head, stride_vh, KEY_ALIGN)
    value_start += times(start_of_keys, stride_vn, KEY_ALIGN)
    head_keys = (batch.to(tl.int64) * (num_heads // GROUP) + key_head) * total_k + start_k
    lse = load_lse(lse_ptr, row_of_all, is_row)
    rest = lse
    if lse_rest_ptr is not None:
        rest = load_number(lse_rest_ptr, row_of_all, is_row, 0.0)
    delta = load_number(delta_ptr, row_of_all, is_row, 0.0)
    scale, softcap = head_factors(head_scales_ptr, head_softcaps_ptr, head, scale, softcap)
    if head_windows_ptr is not None:
        left, right = head_window(head_windows_ptr, head, dilation, left, right)
    slope = scale
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + batch * stride_slope + head).to(tl.float32) * LOG2_E
        slope *= dilation
    if MASK != 0:
        mask_base = mask_ptr + times(batch, stride_mb, 1) + times(head, stride_mh, 1)
        row_places = (start_q + rows * dilation).to(tl.int64) * stride_mm
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
        inverse = 1.0 / share_kept(dropout_p)
    positions = rows + offset
    low, before, whole, after, high = key_ranges(
        first_slot + offset,
        tl.minimum(first_slot + BLOCK_M, len_q) - 1 + offset,
        0,
        len_k,
        left,
        left,
        right,
        right,
        HAS_LEFT,
        HAS_RIGHT,
        LIST_ROWS != 0,
        BLOCK_N,
    )
    if LIST_ROWS != 0:
        line = batch * stride_lb + head * stride_lh + first_slot // LIST_ROWS
        list_ptr = indices_ptr + line.to(tl.int64) * most_blocks
        all_blocks = tl.cdiv(len_k, LIST_KEYS)
        num_listed = tl.load(counts_ptr + line)
        is_dense = num_listed < 0
        num_listed = tl.where(is_dense, all_blocks, tl.minimum(num_listed, most_blocks))
        first_piece, before, whole, after = listed_ranges(
            list_ptr,
            num_listed,
            is_dense,
            low,
            low + before * BLOCK_N,
            low + (before + whole) * BLOCK_N,
            high,
            LIST_KEYS,
            LIST_KEYS // BLOCK_N,
        )
    query_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slope_sum = tl.zeros([BLOCK_M], tl.float32)
    scale_sum = tl.zeros([BLOCK_M], tl.float32)
    cap_sum = tl.zeros([BLOCK_M], tl.float32)
    # The same with weights alone: what a change of delta adds to each.
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    change_sum = tl.zeros([BLOCK_M], tl.float32)
    slope_share = tl.zeros([BLOCK_M], tl.float32)
    scale_share = tl.zeros([BLOCK_M], tl.float32)
    cap_share = tl.zeros([BLOCK_M], tl.float32)
    for PHASE in tl.static_range(2):
        count = whole
        if PHASE == 1:
            count = before + after
        for block in range(count):
            if LIST_ROWS != 0:
                start = listed_start(
                    list_ptr,
                    first_piece + place_of(block, before, whole, PHASE != 0),
                    is_dense,
                    all_blocks - 1 if PHASE != 0 else len_k // LIST_KEYS - 1,
                    LIST_KEYS,
                    BLOCK_N,
                )
            else:
                start = low + place_of(block, before, whole, PHASE != 0) * BLOCK_N
            keys = start + within
            key_of_all = head_keys + keys * dilation
            key_block, key_low, key_lift = load_parts(
                key_ptr, key_low_ptr, key_lifts_ptr,
                key_start + start.to(tl.int64) * key_step, key_of_all,
                keys_within, key_step, len_k - start, D, BLOCK_D, PHASE != 0,
            )  # fmt: skip
            value_block, value_low, value_lift = load_parts(
                value_ptr, value_low_ptr, value_lifts_ptr,
                value_start + start.to(tl.int64) * value_step, key_of_all,
                keys_within, value_step, len_k - start, DV, BLOCK_DV, PHASE != 0,
            )  # fmt: skip
            entries = keys
            if MASK != 0:
                key_places = (start_k + keys * dilation).to(tl.int64) * stride_mn
                places = mask_base + key_places[None, :]
                is_entry = (keys < len_k)[None, :]
                if MASK_ROWS:
                    places += row_places[:, None]
                    is_entry = is_entry & is_row[:, None]
                entries = tl.load(places, mask=is_entry, other=0)
            raw = row_products(query, query_low, query_lift, key_block, key_low, key_lift, DOT)
            weights, tangent = weights_of(
                raw,
                lse[:, None],
                rest[:, None],
                positions[:, None],
                keys[None, :],
                entries,
                high,
                scale,
                softcap,
                slope,
                left,
                right,
                HAS_LEFT,
                HAS_RIGHT,
                MASK,
                HAS_ALIBI,
                HAS_SOFTCAP,
                FAST_TANH,
                head_softcaps_ptr is not None,
                PHASE != 0,
                lse_rest_ptr is not None,
            )
            change = row_products(
                gradient, gradient_low, gradient_lift, value_block, value_low, value_lift, DOT
            )
            if HAS_DROPOUT:
                kept = is_kept(
                    seed, row_of_all[:, None], (keys * dilation + residue)[None, :], dropout_p
                )
                change = tl.where(kept, change * inverse, 0.0)
            change = weights * (change - delta[:, None])
            if delta_out_ptr is not None:
                weight_sum += tl.sum(weights, 1)
                change_sum += tl.sum(change, 1)
            if slope_sums_ptr is not None:
                steps = (tl.abs(positions[:, None] - keys[None, :]) * dilation).to(tl.float32)
                slope_sum -= tl.sum(change * steps, 1)
                slope_share -= tl.sum(weights * steps, 1)
            if cap_sums_ptr is not None:
                inner = raw * scale
                grown = tangent - inner * (1.0 - tangent * tangent)
                cap_sum += tl.sum(change * grown, 1)
                cap_share += tl.sum(weights * grown, 1)
            if HAS_SOFTCAP:
                steepness = 1.0 - tangent * tangent
                change *= steepness
                weights *= steepness
            if scale_sums_ptr is not None:
                scale_sum += tl.sum(change * raw, 1)
                scale_share += tl.sum(weights * raw, 1)
            query_sum = added_rows(query_sum, change, key_block, key_low, key_lift, DOT)

    if head_scales_ptr is not None:
        query_sum *= tl.load(head_scales_ptr + head).to(tl.float32)
    out_rows = start_q + tl.minimum(rows, len_q - 1) * dilation
    query_out = query_gradient_ptr + times(batch, stride_db, 1) + times(head, stride_dh, 1)
    store_rows(query_out + times(out_rows, stride_dm, 1), query_sum * natural, is_row, D)
    if delta_out_ptr is not None:
        missing = change_sum - delta * (1.0 - weight_sum)
        if lse_gradient_ptr is not None:
            missing -= load_number(lse_gradient_ptr, row_of_all, is_row, 0.0)
        tl.store(delta_out_ptr + row_of_all, delta + missing, mask=is_row)
        slope_sum -= missing * slope_share
        scale_sum -= missing * scale_share
        cap_sum -= missing * cap_share
    if slope_sums_ptr is not None:
        tl.store(slope_sums_ptr + row_of_all, slope_sum, mask=is_row)
    if scale_sums_ptr is not None:
        tl.store(scale_sums_ptr + row_of_all, scale_sum * natural, mask=is_row)
    if cap_sums_ptr is not None:
        cap_sum = tl.where(softcap > 0.0, cap_sum, 0.0)  # 0 is none
        tl.store(cap_sums_ptr + row_of_all, cap_sum, mask=is_row)
