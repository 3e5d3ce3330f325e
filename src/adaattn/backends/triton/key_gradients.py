"""The gradients of a block of keys and values, from all heads and rows that see it."""

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

__all__ = ["key_gradients"]

_NUMBERS = (
    *("scale", "softcap", "natural", "dropout_p"),
    *("stride_qb", "stride_qh", "stride_qm", "stride_kb", "stride_kh", "stride_kn"),
    *("stride_vb", "stride_vh", "stride_vn", "stride_ob", "stride_oh", "stride_om"),
    *("stride_db", "stride_dh", "stride_dm", "stride_eb", "stride_eh", "stride_em"),
    *("stride_mb", "stride_mh", "stride_mm", "stride_mn", "stride_slope"),
    *("num_heads", "total_q", "total_k", "left", "right", "dilation", "num_sequences"),
    *("num_tiles", "stride_lb", "stride_lh", "most_blocks"),
)
"""No value of these makes another kernel."""


@triton.jit(do_not_specialize=_NUMBERS)
def key_gradients(
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
    key_gradient_ptr,
    value_gradient_ptr,
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
    stride_eb,
    stride_eh,
    stride_em,
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
    """Write the gradients of BLOCK_N keys and values of one key head.

    Args, beyond those of `forward`:
        gradient_ptr: of the output, [B, Hq, Sq, Dv], by the strides ``stride_o*``.
        lse_ptr: fp32 [B, Hq, Sq], natural, sinks included.
        delta_ptr: fp32 [B, Hq, Sq], of `row_sums`.
        counts_ptr: int32, blocks of rows that see a block of LIST_KEYS keys, LIST_ROWS rows each.
        indices_ptr: int32, their numbers, ascending, most_blocks for each count.
        *_low_ptr: where DOT is "halves" the low halves of q, k, v and the output's gradient, fp16;
            the high ones stand in their place.
        *_lifts_ptr: fp32, powers of two of their rows, as `halve` writes them.
        key_gradient_ptr: [B, Hkv, Sk, D], by the strides ``stride_d*``; or None.
        value_gradient_ptr: [B, Hkv, Sk, Dv], by the strides ``stride_e*``; or None.
        scale: factor of q k^T before the cap, in units of log 2 where there is none.
        natural: factor of q k^T that all heads share.
        num_tiles: tiles of keys of a head, all classes of a dilation together.
    """
    tile = tl.program_id(0) % num_tiles
    key_head = (tl.program_id(0) // num_tiles) % (num_heads // GROUP)
    batch = tl.program_id(0) // num_tiles // (num_heads // GROUP)
    tile, residue, start_q, start_k, len_q, len_k, offset, left, right = lengths_of(
        tile,
        starts_k_ptr,
        starts_q_ptr,
        starts_k_ptr,
        total_q,
        total_k,
        left,
        right,
        dilation,
        num_sequences,
        num_tiles,
        BLOCK_N,
        TO_END,
        IS_DILATED,
        IS_PACKED,
        False,
    )
    if (tile < 0) | (tile * BLOCK_N >= len_k):
        return

    first_key = tile * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, len_k) - 1
    within_keys = tl.arange(0, BLOCK_N)
    within = tl.arange(0, BLOCK_M)
    keys = first_key + within_keys
    is_key = keys < len_k
    query_step = step_of(stride_qm, dilation, ALIGN, WIDE)
    gradient_step = step_of(stride_om, dilation, ALIGN, WIDE)
    key_step = step_of(stride_kn, dilation, KEY_ALIGN, WIDE)
    value_step = step_of(stride_vn, dilation, KEY_ALIGN, WIDE)
    rows_within = within
    keys_within = within_keys
    if WIDE:
        rows_within = within.to(tl.int64)
        keys_within = within_keys.to(tl.int64)
    first_k_row = start_k + first_key * dilation
    key_start = times(batch, stride_kb, KEY_ALIGN) + times(key_head, stride_kh, KEY_ALIGN)
    key_start += times(first_k_row, stride_kn, KEY_ALIGN)
    value_start = times(batch, stride_vb, KEY_ALIGN) + times(key_head, stride_vh, KEY_ALIGN)
    value_start += times(first_k_row, stride_vn, KEY_ALIGN)
    key_of_all = (batch.to(tl.int64) * (num_heads // GROUP) + key_head) * total_k + first_k_row
    key_of_all += within_keys * dilation
    left_keys = len_k - first_key
    key_block, key_low, key_lift = load_parts(
        key_ptr, key_low_ptr, key_lifts_ptr, key_start, key_of_all,
        keys_within, key_step, left_keys, D, BLOCK_D, True,
    )  # fmt: skip
    value_block, value_low, value_lift = load_parts(
        value_ptr, value_low_ptr, value_lifts_ptr, value_start, key_of_all,
        keys_within, value_step, left_keys, DV, BLOCK_DV, True,
    )  # fmt: skip
    key_places = (start_k + keys * dilation).to(tl.int64) * stride_mn
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
        inverse = 1.0 / share_kept(dropout_p)
    key_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    start_of_rows = start_q + tile * 0  # a tensor, also where it is 0 for all
    for member in range(GROUP):
        head = key_head * GROUP + member
        query_start = times(batch, stride_qb, ALIGN) + times(head, stride_qh, ALIGN)
        query_start += times(start_of_rows, stride_qm, ALIGN)
        gradient_start = times(batch, stride_ob, ALIGN) + times(head, stride_oh, ALIGN)
        gradient_start += times(start_of_rows, stride_om, ALIGN)
        head_rows = (batch.to(tl.int64) * num_heads + head) * total_q + start_q
        own_scale, own_cap = head_factors(head_scales_ptr, head_softcaps_ptr, head, scale, softcap)
        own_left = left
        own_right = right
        if head_windows_ptr is not None:
            own_left, own_right = head_window(head_windows_ptr, head, dilation, left, right)
        slope = own_scale
        if HAS_ALIBI:
            slope = tl.load(slopes_ptr + batch * stride_slope + head).to(tl.float32) * LOG2_E
            slope *= dilation
        if MASK != 0:
            mask_base = mask_ptr + times(batch, stride_mb, 1) + times(head, stride_mh, 1)
        low, before, whole, after, high = key_ranges(
            first_key - offset,
            last_key - offset,
            0,
            len_q,
            own_right,
            own_right,
            own_left,
            own_left,
            HAS_RIGHT,
            HAS_LEFT,
            LIST_ROWS != 0,
            BLOCK_M,
        )
        if LIST_ROWS != 0:
            line = batch * stride_lb + head * stride_lh + first_key // LIST_KEYS
            list_ptr = indices_ptr + line.to(tl.int64) * most_blocks
            num_listed = tl.load(counts_ptr + line)
            is_dense = num_listed < 0
            first_piece, before, whole, after = listed_ranges(
                list_ptr,
                num_listed,
                is_dense,
                low,
                low + before * BLOCK_M,
                low + (before + whole) * BLOCK_M,
                high,
                LIST_ROWS,
                LIST_ROWS // BLOCK_M,
            )
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
                        (len_q - 1) // LIST_ROWS if PHASE != 0 else len_q // LIST_ROWS - 1,
                        LIST_ROWS,
                        BLOCK_M,
                    )
                else:
                    start = low + place_of(block, before, whole, PHASE != 0) * BLOCK_M
                rows = start + within
                inside = rows < len_q
                row_of_all = head_rows + rows * dilation
                query, query_low, query_lift = load_parts(
                    query_ptr, query_low_ptr, query_lifts_ptr,
                    query_start + start.to(tl.int64) * query_step, row_of_all,
                    rows_within, query_step, len_q - start, D, BLOCK_D, PHASE != 0,
                )  # fmt: skip
                gradient, gradient_low, gradient_lift = load_parts(
                    gradient_ptr, gradient_low_ptr, gradient_lifts_ptr,
                    gradient_start + start.to(tl.int64) * gradient_step, row_of_all,
                    rows_within, gradient_step, len_q - start, DV, BLOCK_DV, PHASE != 0,
                )  # fmt: skip
                lse = load_lse(lse_ptr, row_of_all, inside)
                rest = lse
                if lse_rest_ptr is not None:
                    rest = load_number(lse_rest_ptr, row_of_all, inside, 0.0)
                delta = load_number(delta_ptr, row_of_all, inside, 0.0)
                entries = keys
                if MASK != 0:
                    places = mask_base + key_places[:, None]
                    is_entry = is_key[:, None]
                    if MASK_ROWS:
                        q_rows = (start_q + rows * dilation).to(tl.int64) * stride_mm
                        places += q_rows[None, :]
                        is_entry = is_entry & inside[None, :]
                    entries = tl.load(places, mask=is_entry, other=0)
                raw = row_products(key_block, key_low, key_lift, query, query_low, query_lift, DOT)
                weights, tangent = weights_of(
                    raw,
                    lse[None, :],
                    rest[None, :],
                    (rows + offset)[None, :],
                    keys[:, None],
                    entries,
                    len_k,
                    own_scale,
                    own_cap,
                    slope,
                    own_left,
                    own_right,
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
                if key_gradient_ptr is not None:
                    change = row_products(
                        value_block, value_low, value_lift,
                        gradient, gradient_low, gradient_lift, DOT,
                    )  # fmt: skip
                dropped = weights
                if HAS_DROPOUT:
                    kept = is_kept(
                        seed, row_of_all[None, :], (keys * dilation + residue)[:, None], dropout_p
                    )
                    dropped = tl.where(kept, weights * inverse, 0.0)
                if value_gradient_ptr is not None:
                    value_sum = added_rows(
                        value_sum, dropped, gradient, gradient_low, gradient_lift, DOT
                    )
                if key_gradient_ptr is not None:
                    if HAS_DROPOUT:
                        change = tl.where(kept, change * inverse, 0.0)
                    change = weights * (change - delta[None, :])
                    if HAS_SOFTCAP:
                        change *= 1.0 - tangent * tangent
                    if head_scales_ptr is not None:
                        change *= tl.load(head_scales_ptr + head).to(tl.float32)
                    key_sum = added_rows(key_sum, change, query, query_low, query_lift, DOT)

    out_rows = start_k + tl.minimum(keys, len_k - 1) * dilation
    if key_gradient_ptr is not None:
        key_out = key_gradient_ptr + times(batch, stride_db, 1) + times(key_head, stride_dh, 1)
        store_rows(key_out + times(out_rows, stride_dm, 1), key_sum * natural, is_key, D)
    if value_gradient_ptr is not None:
        value_out = value_gradient_ptr + times(batch, stride_eb, 1) + times(key_head, stride_eh, 1)
        store_rows(value_out + times(out_rows, stride_em, 1), value_sum, is_key, DV)
