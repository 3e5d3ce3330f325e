"""The portable forward kernel: one tile of query rows against all keys that it sees.

    s = q k^T * scale, capped, biased, masked;   o = softmax(s) v

Online softmax over blocks of keys, fp32 sums; q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and
v [B, Hkv, Sk, Dv] by strides, columns dense. fp32 is computed as three products of tf32 or fp16
numbers, which keeps fp32's accuracy, and the sums of blocks are added up in registers: those of
matrix units are cut off instead of rounded, which left 3e-6 after 4096 keys (H200). Rows of PACK
query heads that share a key head stand in one tile where rows are few. Dilation d splits rows and
keys into d classes that do not meet: each class is a problem of its own, of which nothing is masked
away.

Where blocks of keys are listed for blocks of rows the others are not read, unless a bound of what
they would weigh is asked for, which takes their scores.

Keys may be split over programs: each writes its unnormalised part, and `combine` adds them.
"""

import triton
import triton.language as tl

from adaattn.backends.device.rows import load_rows, times
from adaattn.backends.device.scores import (
    LOG2_E,
    add_bias,
    exp2_sum,
    is_kept,
    log2_or_nothing,
    lse_rest,
    seen,
    share_kept,
    soft_capped,
    with_sink,
)
from adaattn.backends.triton.listed import (
    dropped_share,
    is_listed,
    listed_ranges,
    listed_start,
)
from adaattn.backends.triton.primitives import (
    WEIGHT_SCALE,
    halved_product,
    halves,
    head_factors,
    head_window,
    key_ranges,
    least_and_most,
    lengths_of,
    level_of,
    load_entries,
    place_of,
    power_of_two,
    product_of_halves,
    store_rows,
)

__all__ = ["forward"]

_NOTHING = tl.constexpr(float("-inf"))

_NUMBERS = (
    *("scale", "softcap", "dropout_p"),
    *("stride_qb", "stride_qh", "stride_qm", "stride_kb", "stride_kh", "stride_kn"),
    *("stride_vb", "stride_vh", "stride_vn", "stride_ob", "stride_oh", "stride_om"),
    *("stride_mb", "stride_mh", "stride_mm", "stride_mn", "stride_slope"),
    *("num_heads", "total_q", "total_k", "left", "right", "dilation", "num_sequences"),
    *("num_tiles", "split_keys", "halved_heads"),
    *("stride_lb", "stride_lh", "most_blocks"),
)
"""No value of these makes another kernel."""


@triton.jit(do_not_specialize=_NUMBERS)
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    lse_ptr,
    row_max_ptr,
    entropy_ptr,
    mask_ptr,
    sinks_ptr,
    slopes_ptr,
    starts_q_ptr,
    starts_k_ptr,
    seed_ptr,
    lifts_ptr,
    counts_ptr,
    indices_ptr,
    dropped_ptr,
    head_scales_ptr,
    head_windows_ptr,
    head_softcaps_ptr,
    lse_rest_ptr,
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
    num_heads,
    total_q,
    total_k,
    left,
    right,
    dilation,
    num_sequences,
    num_tiles,
    split_keys,
    halved_heads,
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
    PACK: tl.constexpr,
    TO_END: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_DILATED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_STEP: tl.constexpr,
    MASK_ALIGN: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    LIST_ROWS: tl.constexpr,
    LIST_KEYS: tl.constexpr,
    HAS_DROPPED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FOLLOWED: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ROW_MAX: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    ALIGN: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    IS_HALVED: tl.constexpr,
    MAY_BE_LEVEL: tl.constexpr,
    HALVED_ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute BLOCK_M rows of one head, or of the PACK heads of a group.

    Args, beyond their names:
        output_ptr: [B, Hq, Sq, Dv]; where IS_SPLIT fp32 [splits, B, Hq, Sq, Dv], unnormalised.
        lse_ptr: fp32 [B, Hq, Sq], natural; where IS_SPLIT [splits, B, Hq, Sq] sums.
        row_max_ptr: fp32 likewise; where IS_SPLIT maxima in units of log 2.
        entropy_ptr: fp32 likewise, bits; where IS_SPLIT sums of weight times exponent.
        mask_ptr: bytes where MASK is 1, numbers to add where it is 2.
        key_ptr: where IS_HALVED fp16 [2, B, Hkv, Sk, KEY_COLUMNS], high halves and low ones;
            values likewise.
        lifts_ptr: where IS_HALVED fp32: by which power of two each key, and each value, is to be
            multiplied, [B, Hkv, Sk] both; then bounds of them, [2, B, Hkv, blocks] both.
        scale: factor of q k^T before the cap; the rest of the way to units of log 2 is in softcap.
        num_tiles: tiles of rows of a head, all classes of a dilation together.
        split_keys: keys of a split, a multiple of BLOCK_N.
        halved_heads: B * Hkv.
        counts_ptr: int32, blocks of keys listed for LIST_ROWS query rows; below 0 all of them.
        indices_ptr: int32, their numbers in blocks of LIST_KEYS, most_blocks for each count.
        dropped_ptr: fp32 [B, Hq, Sq]: a bound of the share of blocks that are not listed.
        head_scales_ptr: [Hq], the scale of each head, or None; the rest of its factor is in scale.
        head_windows_ptr: [Hq, 2], or None; left and right are the most that there is then.
        head_softcaps_ptr: [Hq], or None.
        lse_rest_ptr: fp32 [B, Hq, Sq], or None: what rounding the log-sum-exp took from it.
        stride_lb: of counts over batch, 0 where one serves all.
        stride_lh: of counts over heads, likewise.
        IS_FOLLOWED: what adds up the splits is launched while this still runs, and waits for it.
        MAY_BE_LEVEL: what all rows of the head's keys are like may choose the arithmetic.
        LIST_ROWS: a multiple of BLOCK_M; 0 where no blocks are listed.
        LIST_KEYS: a multiple of BLOCK_N.
        GROUP: query heads that share a key head.
        PACK: GROUP, or 1.
        MASK_ROWS: rows of a tile see different entries of the mask.
        MASK_STEP: its stride over keys where that is 0 or 1, else 2.
        ALIGN: strides of q and output are multiples of it, KEY_ALIGN those of k and v, MASK_ALIGN
            the mask's.
        WIDE: a tile of keys spans more than 2^31 elements.
    """
    # Rows of keys and values as they lie: those of halves end with zeros.
    KEY_COLUMNS: tl.constexpr = (D + 7) // 8 * 8 if IS_HALVED else D
    VALUE_COLUMNS: tl.constexpr = (DV + 7) // 8 * 8 if IS_HALVED else DV
    tile = tl.program_id(0) % num_tiles
    head_slot = (tl.program_id(0) // num_tiles) % (num_heads // PACK)
    batch = tl.program_id(0) // num_tiles // (num_heads // PACK)
    key_head = head_slot * PACK // GROUP

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
        BLOCK_M // PACK,
        TO_END,
        IS_DILATED,
        IS_PACKED,
        HAS_RIGHT,
    )
    if (tile < 0) | (tile * BLOCK_M >= len_q * PACK):
        return
    first_slot = tile * BLOCK_M
    slots = first_slot + tl.arange(0, BLOCK_M)
    heads = head_slot * PACK + slots % PACK
    rows = slots // PACK
    is_row = rows < len_q
    positions = rows + offset
    first_position = first_slot // PACK + offset
    last_position = tl.minimum((first_slot + BLOCK_M - 1) // PACK, len_q - 1) + offset

    q_rows = start_q + tl.minimum(rows, len_q - 1) * dilation
    starts = times(heads, stride_qh, ALIGN) + times(q_rows, stride_qm, ALIGN)
    columns = tl.arange(0, BLOCK_D)
    query_base = query_ptr + times(batch, stride_qb, ALIGN)
    inside = is_row[:, None] & (columns < D)[None, :]
    query = tl.load(query_base + starts[:, None] + columns[None, :], mask=inside, other=0.0)
    if IS_HALVED:
        query_scale, query_lift = power_of_two(tl.max(tl.abs(query), 1), 1)
        query, query_low = halves(query * query_scale[:, None])
        head_of_all = (batch * (num_heads // GROUP) + key_head).to(tl.int64)
        lifts_base = lifts_ptr + head_of_all * total_k
        # The low halves lie behind all of the high ones; lifts of values behind those of keys,
        # then the bounds of both, each at a multiple of four numbers.
        rows_of_all = total_k.to(tl.int64) * halved_heads
        num_lifts = tl.cdiv(rows_of_all, 4) * 4
        num_bounds = tl.cdiv(total_k, HALVED_ROWS)
        row_scale = scale * tl.exp2(query_lift)
        if MAY_BE_LEVEL:
            bounds_ptr = lifts_ptr + 2 * num_lifts + head_of_all * num_bounds
            plane = halved_heads * num_bounds
            keys_are_level, key_level = level_of(bounds_ptr, plane, num_bounds, 256)
            bounds_ptr += tl.cdiv(plane, 2) * 4
            values_are_level, value_level = level_of(bounds_ptr, plane, num_bounds, 256)
            row_scale *= tl.where(keys_are_level, tl.exp2(key_level), 1.0)
        else:
            keys_are_level = False
            values_are_level = False
            value_level = 0.0
        row_scale = row_scale[:, None]
    head = head_slot if PACK == 1 else heads[:, None]
    if head_scales_ptr is not None or head_softcaps_ptr is not None:
        factor = row_scale if IS_HALVED else scale
        scale, softcap = head_factors(head_scales_ptr, head_softcaps_ptr, head, factor, softcap)
        row_scale = scale
    key_base = key_ptr + times(batch, stride_kb, KEY_ALIGN) + times(key_head, stride_kh, KEY_ALIGN)
    value_base = (
        value_ptr + times(batch, stride_vb, KEY_ALIGN) + times(key_head, stride_vh, KEY_ALIGN)
    )
    key_step = stride_kn // KEY_ALIGN * KEY_ALIGN
    value_step = stride_vn // KEY_ALIGN * KEY_ALIGN
    if IS_PACKED or IS_DILATED:
        key_base += times(start_k, stride_kn, KEY_ALIGN)
        value_base += times(start_k, stride_vn, KEY_ALIGN)
    if IS_HALVED:
        key_plane = rows_of_all * (stride_kn // KEY_ALIGN * KEY_ALIGN)
        value_plane = rows_of_all * (stride_vn // KEY_ALIGN * KEY_ALIGN)
        if IS_PACKED or IS_DILATED:
            lifts_base += start_k
    within = tl.arange(0, BLOCK_N)
    if WIDE:
        within_wide = within.to(tl.int64)
        key_step = key_step.to(tl.int64)
        value_step = value_step.to(tl.int64)
    else:
        within_wide = within
    if IS_DILATED:
        key_step *= dilation
        value_step *= dilation
    row_of_all = (batch.to(tl.int64) * num_heads + heads) * total_q + q_rows
    if MASK != 0:
        mask_base = mask_ptr + times(batch, stride_mb, MASK_ALIGN)
        mask_base += times(head_slot * PACK, stride_mh, MASK_ALIGN)
        mask_step = MASK_STEP
        if MASK_STEP == 2 or (MASK_STEP == 1 and IS_DILATED):
            mask_step = stride_mn.to(tl.int64) * dilation
        if MASK_STEP != 0 and (IS_PACKED or IS_DILATED):
            mask_base += start_k.to(tl.int64) * stride_mn
        mask_columns = (within * mask_step)[None, :]
        if MASK_ROWS:
            mask_row = stride_mm // MASK_ALIGN * MASK_ALIGN
            first_q_row = start_q + first_slot // PACK * dilation
            mask_base += times(first_q_row, stride_mm, MASK_ALIGN)
            if WIDE:
                mask_row = mask_row.to(tl.int64)
            row_starts = (q_rows - first_q_row) * mask_row
            if PACK > 1:
                row_starts += times(heads - head_slot * PACK, stride_mh, MASK_ALIGN)
            mask_columns = row_starts[:, None] + mask_columns
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + batch * stride_slope + heads).to(tl.float32) * LOG2_E
        if IS_DILATED:
            slope *= dilation
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    if LIST_ROWS != 0:
        row_of_list = batch * stride_lb + head_slot * stride_lh + first_slot // LIST_ROWS
        list_ptr = indices_ptr + row_of_list.to(tl.int64) * most_blocks
        all_blocks = tl.cdiv(len_k, LIST_KEYS)
        num_listed = tl.load(counts_ptr + row_of_list)
        is_dense = num_listed < 0
        num_listed = tl.where(is_dense, all_blocks, tl.minimum(num_listed, most_blocks))

    if head_windows_ptr is not None:
        left, right = head_window(head_windows_ptr, head, dilation, left, right)
    least_left, most_left = least_and_most(left, head_windows_ptr is not None and PACK > 1)
    least_right, most_right = least_and_most(right, head_windows_ptr is not None and PACK > 1)
    begin = 0
    end = len_k
    if IS_SPLIT:
        if HAS_LEFT:
            begin = tl.maximum(first_position - most_left, 0) // BLOCK_N * BLOCK_N
        begin += tl.program_id(1) * (split_keys // BLOCK_N * BLOCK_N)
        end = tl.minimum(len_k, begin + split_keys)
    low, before, whole, after, high = key_ranges(
        first_position,
        last_position,
        begin,
        end,
        most_left,
        least_left,
        most_right,
        least_right,
        HAS_LEFT,
        HAS_RIGHT,
        MASK != 0 or LIST_ROWS != 0,
        BLOCK_N,
    )
    if LIST_ROWS != 0:
        # The same of the list: its blocks, in pieces of BLOCK_N keys.
        num_pieces = tl.cdiv(tl.maximum(high - low, 0), BLOCK_N)
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
        next_listed = first_piece // (LIST_KEYS // BLOCK_N)
    running_max = tl.full([BLOCK_M], _NOTHING, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    running_product = tl.zeros([BLOCK_M], tl.float32)
    running_lift = tl.full([BLOCK_M], _NOTHING, tl.float32)
    dropped_max = tl.full([BLOCK_M], _NOTHING, tl.float32)
    dropped_sum = tl.zeros([BLOCK_M], tl.float32)
    # A block's own sum beside that of all takes too many registers for 256 columns at once.
    PARTS: tl.constexpr = 2 if IS_HALVED and BLOCK_DV > 128 else 1
    PART: tl.constexpr = BLOCK_DV // PARTS
    accumulator = tl.zeros([BLOCK_M, PART], tl.float32)
    others = tl.zeros([BLOCK_M, PART], tl.float32)
    # First the blocks that all rows see whole, then those at the edges, then what is not listed.
    for PHASE in tl.static_range(3 if HAS_DROPPED else 2):
        count = whole
        if PHASE == 1:
            count = before + after
        elif PHASE == 2:
            count = tl.where(is_dense, 0, num_pieces)
        for block in range(count):
            if PHASE == 2:
                start = low + block * BLOCK_N
                is_kept_block, next_listed = is_listed(
                    list_ptr, next_listed, num_listed, is_dense, start // LIST_KEYS
                )
            elif LIST_ROWS != 0:
                last_block = all_blocks - 1 if PHASE != 0 else len_k // LIST_KEYS - 1
                start = listed_start(
                    list_ptr,
                    first_piece + place_of(block, before, whole, PHASE != 0),
                    is_dense,
                    last_block,
                    LIST_KEYS,
                    BLOCK_N,
                )
            else:
                start = low + place_of(block, before, whole, PHASE != 0) * BLOCK_N
            keys = start + within
            block_ptr = key_base + start.to(tl.int64) * key_step
            key_block = load_rows(
                block_ptr, within_wide, key_step, high - start, KEY_COLUMNS, BLOCK_D, PHASE != 0
            )
            if IS_HALVED:
                key_low = load_rows(
                    block_ptr + key_plane, within_wide, key_step, high - start, KEY_COLUMNS,
                    BLOCK_D, PHASE != 0,
                )  # fmt: skip
                scores = product_of_halves(query, query_low, tl.trans(key_block), tl.trans(key_low))
                scores *= row_scale
                if not keys_are_level:
                    key_lifts = tl.load(
                        lifts_base + keys.to(tl.int64) * dilation, mask=keys < high, other=0.0
                    )
                    scores = scores * tl.exp2(key_lifts)[None, :]
            else:
                scores = tl.dot(query, tl.trans(key_block), input_precision=DOT) * scale
            if HAS_SOFTCAP:
                scores = soft_capped(scores, softcap, FAST_TANH, head_softcaps_ptr is not None)
            if HAS_ALIBI:
                scores = add_bias(scores, slope[:, None], positions[:, None], keys[None, :])
            if MASK != 0:
                entries = load_entries(
                    mask_base,
                    start,
                    mask_step,
                    mask_columns,
                    within,
                    high,
                    PHASE != 0 and MASK_STEP != 0,
                )
                if MASK == 1:
                    scores = tl.where(entries != 0, scores, _NOTHING)
                else:
                    scores += entries.to(tl.float32) * LOG2_E
            if PHASE != 0:
                visible = seen(
                    positions[:, None], keys[None, :], high, left, right, HAS_LEFT, HAS_RIGHT
                )
                scores = tl.where(visible, scores, _NOTHING)

            if PHASE == 2:
                # Each of the keys weighs as much as the largest, at most.
                largest = tl.where(is_kept_block, _NOTHING, tl.max(scores, 1))
                new_max = tl.maximum(dropped_max, largest)
                reference = tl.where(new_max == _NOTHING, 0.0, new_max)
                bound = tl.minimum(high - start, BLOCK_N) * tl.exp2(largest - reference)
                dropped_sum = dropped_sum * tl.exp2(dropped_max - reference) + bound
                dropped_max = new_max
            else:
                new_max = tl.maximum(running_max, tl.max(scores, 1))
                reference = new_max
                if PHASE != 0 or MASK != 0:
                    reference = tl.where(new_max == _NOTHING, 0.0, new_max)
                weights, total, product = exp2_sum(scores, reference, HAS_ENTROPY)
                decay = tl.exp2(running_max - reference)
                if HAS_ENTROPY:
                    moved = tl.where(running_sum > 0.0, running_max - reference, 0.0)
                    running_product = decay * (running_product + running_sum * moved) + product
                running_sum = running_sum * decay + total
                if IS_HALVED:  # noqa: SIM102 this is compiled in, what follows decided on the device
                    if not values_are_level:
                        # Weights times lifted values are added up: the largest term is their unit.
                        value_lifts = tl.load(
                            lifts_base + num_lifts + keys.to(tl.int64) * dilation,
                            mask=keys < high,
                            other=0.0,
                        )
                        # Units are whole, so that powers far from 0 cost the exponents no bits.
                        exponents = scores - reference[:, None]
                        largest = tl.max(exponents + value_lifts[None, :], 1)
                        moved = running_max - reference
                        new_lift = tl.ceil(tl.maximum(running_lift + moved, largest))
                        unit = tl.where(new_lift == _NOTHING, 0.0, new_lift)
                        decay = tl.exp2(moved + (running_lift - unit))
                        weights = tl.exp2(exponents + (value_lifts[None, :] - unit[:, None]))
                        running_lift = new_lift
                running_max = new_max
                if HAS_DROPOUT:
                    places = (keys * dilation + residue)[None, :]
                    kept = is_kept(seed, row_of_all[:, None], places, dropout_p)
                    weights = tl.where(kept, weights, 0.0)
                block_ptr = value_base + start.to(tl.int64) * value_step
                if IS_HALVED:
                    weights, weights_low = halves(weights * WEIGHT_SCALE)
                    product = halved_product(
                        weights,
                        weights_low,
                        block_ptr,
                        value_plane,
                        within_wide,
                        value_step,
                        high - start,
                        VALUE_COLUMNS,
                        PART,
                        PHASE != 0,
                    )
                    accumulator = tl.fma(accumulator, decay[:, None], product)
                    if PARTS == 2:
                        product = halved_product(
                            weights,
                            weights_low,
                            block_ptr + PART,
                            value_plane,
                            within_wide,
                            value_step,
                            high - start,
                            VALUE_COLUMNS - PART,
                            PART,
                            PHASE != 0,
                        )
                        others = tl.fma(others, decay[:, None], product)
                else:
                    value_block = load_rows(
                        block_ptr, within_wide, value_step, high - start, DV, BLOCK_DV, PHASE != 0
                    )  # fmt: skip
                    if DOT == "tf32x3":
                        product = tl.dot(weights, value_block, input_precision=DOT)
                        accumulator = tl.fma(accumulator, decay[:, None], product)
                    else:
                        weights = weights.to(value_block.dtype)
                        accumulator = accumulator * decay[:, None]
                        accumulator = tl.dot(weights, value_block, accumulator)

    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_DROPOUT:
        factor /= share_kept(dropout_p)
    if IS_HALVED:
        unit = tl.where(running_lift == _NOTHING, 0.0, running_lift)
        unit = tl.where(values_are_level, value_level, unit)
        # Apart from the rest of the factor: together they would be too small for a number.
        accumulator *= tl.exp2(unit)[:, None]
        others *= tl.exp2(unit)[:, None]
        factor /= WEIGHT_SCALE
    if IS_SPLIT:
        if IS_FOLLOWED:
            tl.extra.cuda.gdc_launch_dependents()
        # B * Hq * Sq rows of each split.
        rows_of_split = (tl.num_programs(0) // num_tiles).to(tl.int64) * PACK * total_q
        row_of_all += tl.program_id(1) * rows_of_split
        out_rows = output_ptr + row_of_all * DV
        tl.store(row_max_ptr + row_of_all, running_max, mask=is_row)
        tl.store(lse_ptr + row_of_all, running_sum, mask=is_row)
        if HAS_ENTROPY:
            tl.store(entropy_ptr + row_of_all, running_product, mask=is_row)
    else:
        out_rows = output_ptr + times(batch, stride_ob, ALIGN)
        out_rows += times(heads, stride_oh, ALIGN) + times(q_rows, stride_om, ALIGN)
        largest = running_max
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
            running_max, running_sum, running_product, decay = with_sink(
                running_max, running_sum, running_product, sink
            )
            factor *= decay
        if HAS_DROPPED:
            share = dropped_share(dropped_max, dropped_sum, running_max, running_sum)
            tl.store(dropped_ptr + row_of_all, share, mask=is_row)
        inverse = 1.0 / tl.where(running_sum == 0.0, 1.0, running_sum)
        factor *= inverse
        if HAS_LSE:
            lse = log2_or_nothing(running_sum, running_max) / LOG2_E
            tl.store(lse_ptr + row_of_all, lse, mask=is_row)
            if lse_rest_ptr is not None:
                rest = lse_rest(running_sum, running_max, lse)
                tl.store(lse_rest_ptr + row_of_all, rest, mask=is_row)
        if HAS_ROW_MAX:
            tl.store(row_max_ptr + row_of_all, largest / LOG2_E, mask=is_row)
        if HAS_ENTROPY:
            bits = log2_or_nothing(running_sum, running_sum * 0.0) - running_product * inverse
            bits = tl.where(running_sum == 0.0, 0.0, bits)
            tl.store(entropy_ptr + row_of_all, bits, mask=is_row)
    store_rows(out_rows, accumulator * factor[:, None], is_row, DV)
    if PARTS == 2:
        store_rows(out_rows + PART, others * factor[:, None], is_row, DV - PART)
