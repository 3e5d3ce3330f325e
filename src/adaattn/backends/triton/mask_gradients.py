"""The gradient of an added mask: of a tile of it, from all that it was broadcast to.

Positions are those of the tokens themselves: a dilation hides keys one by one here, and packed
sequences hide those of one another.
"""

import triton
import triton.language as tl

from adaattn.backends.device.rows import load_lse, load_number, load_rows, times
from adaattn.backends.device.scores import LOG2_E, is_kept, share_kept, weights_of
from adaattn.backends.triton.primitives import bounds, head_factors, head_window

__all__ = ["mask_gradients"]

_AT_ONCE = tl.constexpr(128)

_NUMBERS = (
    *("scale", "softcap", "dropout_p"),
    *("stride_qb", "stride_qh", "stride_qm", "stride_kb", "stride_kh", "stride_kn"),
    *("stride_vb", "stride_vh", "stride_vn", "stride_ob", "stride_oh", "stride_om"),
    *("stride_mb", "stride_mh", "stride_mm", "stride_mn", "stride_slope"),
    *("num_batch", "num_heads", "total_q", "total_k", "left", "right", "dilation"),
    *("num_sequences", "stride_lb", "stride_lh", "most_blocks"),
    *("mask_batch", "mask_heads", "mask_rows", "mask_keys"),
)
"""No value of these makes another kernel."""


@triton.jit
def sequences_of(tokens, starts_ptr, num_sequences, total, MISSING: tl.constexpr):
    """Return (packed sequence of tokens, MISSING of those in none; their first token; lengths)."""
    found = tl.full(tokens.shape, MISSING, tl.int32)
    first = tokens * 0
    lengths = tokens * 0
    for number in range(num_sequences):
        start, length = bounds(starts_ptr + number, total)
        inside = (tokens >= start) & (tokens < start + length)
        found = tl.where(inside, number, found)
        first = tl.where(inside, start, first)
        lengths = tl.where(inside, length, lengths)
    return found, first, lengths


@triton.jit
def is_in_list(list_ptr, num_listed, block):
    """Return whether a block of keys is listed; all are where the number is below 0."""
    found = (num_listed < 0).to(tl.int32)
    for start in range(0, num_listed, _AT_ONCE):
        places = start + tl.arange(0, _AT_ONCE)
        blocks = tl.load(list_ptr + places, mask=places < num_listed, other=-1)
        found = tl.maximum(found, tl.max((blocks == block).to(tl.int32), 0))
    return found != 0


@triton.jit(do_not_specialize=_NUMBERS)
def mask_gradients(
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
    mask_gradient_ptr,
    scale,
    softcap,
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
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_slope,
    num_batch,
    num_heads,
    total_q,
    total_k,
    left,
    right,
    dilation,
    num_sequences,
    stride_lb,
    stride_lh,
    most_blocks,
    mask_batch,
    mask_heads,
    mask_rows,
    mask_keys,
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
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    LIST_ROWS: tl.constexpr,
    LIST_KEYS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ONE_KEY: tl.constexpr,
    ALIGN: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    DOT: tl.constexpr,
):
    """Write the gradients of [BLOCK_M, BLOCK_N] numbers of a mask, or of a row or column of them.

    Args, beyond those of `forward` and `key_gradients`:
        mask_gradient_ptr: [mask_batch, mask_heads, mask_rows, mask_keys], contiguous.
        mask_batch: B, or 1 where one mask serves all.
        mask_heads: likewise of Hq, and so on.
        ONE_ROW: mask_rows is 1.
        ONE_KEY: mask_keys is 1.
    """
    tiles_m = tl.cdiv(mask_rows, BLOCK_M)
    tiles_n = tl.cdiv(mask_keys, BLOCK_N)
    tile_n = tl.program_id(0) % tiles_n
    tile_m = tl.program_id(0) // tiles_n % tiles_m
    own_head = tl.program_id(0) // tiles_n // tiles_m % mask_heads
    own_batch = tl.program_id(0) // tiles_n // tiles_m // mask_heads
    # What the numbers were broadcast to is gone through in order: sums are the same each time.
    times_n = tl.where(mask_keys == 1, tl.cdiv(total_k, BLOCK_N), 1)
    times_m = tl.where(mask_rows == 1, tl.cdiv(total_q, BLOCK_M), 1)
    times_h = tl.where(mask_heads == 1, num_heads, 1)
    times_b = tl.where(mask_batch == 1, num_batch, 1)
    within_m = tl.arange(0, BLOCK_M)
    within_n = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
        inverse = 1.0 / share_kept(dropout_p)
    for step in range(times_n * times_m * times_h * times_b):
        first_key = (tile_n + step % times_n) * BLOCK_N
        first_row = (tile_m + step // times_n % times_m) * BLOCK_M
        head = own_head + step // times_n // times_m % times_h
        batch = own_batch + step // times_n // times_m // times_h
        key_head = head // GROUP
        rows = first_row + within_m
        keys = first_key + within_n
        is_row = rows < total_q
        own_scale, own_cap = head_factors(head_scales_ptr, head_softcaps_ptr, head, scale, softcap)
        own_left = left
        own_right = right
        if head_windows_ptr is not None:
            own_left, own_right = head_window(head_windows_ptr, head, 1, left, right)
        slope = own_scale
        if HAS_ALIBI:
            slope = tl.load(slopes_ptr + batch * stride_slope + head).to(tl.float32) * LOG2_E
        positions = rows
        if TO_END:
            positions = rows + (total_k - total_q)
        is_seen = is_row[:, None] & (keys < total_k)[None, :]
        places = keys
        if IS_PACKED:
            of_row, start_q, len_q = sequences_of(rows, starts_q_ptr, num_sequences, total_q, -1)
            of_key, start_k, _ = sequences_of(keys, starts_k_ptr, num_sequences, total_k, -2)
            is_seen = is_seen & (of_row[:, None] == of_key[None, :])
            places = keys - start_k
            positions = rows - start_q
            if TO_END:
                sequence = tl.maximum(of_row, 0)
                begin = tl.load(starts_k_ptr + sequence)
                positions += tl.load(starts_k_ptr + sequence + 1) - begin - len_q
        if IS_DILATED:
            is_seen = is_seen & ((places[None, :] - positions[:, None]) % dilation == 0)
        if LIST_ROWS != 0:
            line = batch * stride_lb + head * stride_lh + first_row // LIST_ROWS
            list_ptr = indices_ptr + line.to(tl.int64) * most_blocks
            num_listed = tl.minimum(tl.load(counts_ptr + line), most_blocks)
            is_seen = is_seen & is_in_list(list_ptr, num_listed, first_key // LIST_KEYS)
        query_base = query_ptr + times(batch, stride_qb, ALIGN) + times(head, stride_qh, ALIGN)
        gradient_base = (
            gradient_ptr + times(batch, stride_ob, ALIGN) + times(head, stride_oh, ALIGN)
        )
        key_base = (
            key_ptr + times(batch, stride_kb, KEY_ALIGN) + times(key_head, stride_kh, KEY_ALIGN)
        )
        value_base = (
            value_ptr + times(batch, stride_vb, KEY_ALIGN) + times(key_head, stride_vh, KEY_ALIGN)
        )
        wide_rows = rows.to(tl.int64)
        wide_keys = keys.to(tl.int64)
        query = load_rows(
            query_base, wide_rows, stride_qm // ALIGN * ALIGN, total_q, D, BLOCK_D, True
        )
        gradient = load_rows(
            gradient_base, wide_rows, stride_om // ALIGN * ALIGN, total_q, DV, BLOCK_DV, True
        )
        key_block = load_rows(
            key_base, wide_keys, stride_kn // KEY_ALIGN * KEY_ALIGN, total_k, D, BLOCK_D, True
        )
        value_block = load_rows(
            value_base, wide_keys, stride_vn // KEY_ALIGN * KEY_ALIGN, total_k, DV, BLOCK_DV, True
        )
        mask_base = mask_ptr + times(batch, stride_mb, 1) + times(head, stride_mh, 1)
        mask_places = (wide_rows * stride_mm)[:, None] + (wide_keys * stride_mn)[None, :]
        inside = is_row[:, None] & (keys < total_k)[None, :]
        entries = tl.load(mask_base + mask_places, mask=inside, other=0)
        row_of_all = (batch.to(tl.int64) * num_heads + head) * total_q + rows
        lse = load_lse(lse_ptr, row_of_all, is_row)
        rest = lse
        if lse_rest_ptr is not None:
            rest = load_number(lse_rest_ptr, row_of_all, is_row, 0.0)
        delta = load_number(delta_ptr, row_of_all, is_row, 0.0)
        raw = tl.dot(query, tl.trans(key_block), input_precision=DOT)
        weights, _ = weights_of(
            raw,
            lse[:, None],
            rest[:, None],
            positions[:, None],
            places[None, :],
            entries,
            total_k,
            own_scale,
            own_cap,
            slope,
            own_left,
            own_right,
            HAS_LEFT,
            HAS_RIGHT,
            2,
            HAS_ALIBI,
            HAS_SOFTCAP,
            FAST_TANH,
            head_softcaps_ptr is not None,
            True,
            lse_rest_ptr is not None,
        )
        change = tl.dot(gradient, tl.trans(value_block), input_precision=DOT)
        if HAS_DROPOUT:
            kept = is_kept(seed, row_of_all[:, None], places[None, :], dropout_p)
            change = tl.where(kept, change * inverse, 0.0)
        total += tl.where(is_seen, weights * (change - delta[:, None]), 0.0)

    base = own_batch.to(tl.int64) * mask_heads + own_head
    own_rows = tile_m * BLOCK_M + within_m
    own_keys = tile_n * BLOCK_N + within_n
    out = mask_gradient_ptr + base * mask_rows * mask_keys
    if ONE_ROW and ONE_KEY:
        numbers = tl.sum(tl.sum(total, 1), 0)
        tl.store(out, numbers.to(out.dtype.element_ty))
    elif ONE_ROW:
        numbers = tl.sum(total, 0).to(out.dtype.element_ty)
        tl.store(out + own_keys, numbers, mask=own_keys < mask_keys)
    elif ONE_KEY:
        numbers = tl.sum(total, 1).to(out.dtype.element_ty)
        tl.store(out + own_rows, numbers, mask=own_rows < mask_rows)
    else:
        inside = (own_rows < mask_rows)[:, None] & (own_keys < mask_keys)[None, :]
        places = own_rows.to(tl.int64)[:, None] * mask_keys + own_keys[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)
