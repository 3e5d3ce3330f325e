"""Attention with sinks by PyTorch's flash kernel for CPUs, which knows none.

The output is the kernel's times sigmoid(lse - sink). No scores are written; masks, ALiBi and
repeated heads are, but for a single row without gradients. Not served: softcaps, dropout,
transforms, forward-mode derivatives, graphs.
"""

from dataclasses import replace
from typing import Any, Final

import torch

from adaattn.backends.common import (
    hides_nothing,
    multiplies_in_tiles,
    never_hides,
    with_dense_columns,
)
from adaattn.backends.interface import Direct, Tensors
from adaattn.backends.masked import (
    is_fused,
    is_in_order,
    is_plain,
    only_chunk,
    sdpa_mask,
    zero_rows,
)
from adaattn.backends.masks import additive_mask, may_keep
from adaattn.backends.sdpa_call import above_sinks, beside_sinks
from adaattn.backends.tiles import seen_tile
from adaattn.errors import UnsupportedError
from adaattn.spec import AttentionProblem, HeadGroup, MaskKind, Precision

__all__ = ["flash_sinks_tile", "has_flash_sinks", "whole_flash_sinks"]

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_FEWEST: Final = 512
_FEWEST_IN_WINDOWS: Final = 224
"""Rows and keys from which on the kernel is the faster one in fp32 and fp64: of all, and with
gradients of those in a window.

Scores written out take 0.99 to 1.12 times as long there, in training 0.99 to 2.4; of fewer tokens
0.76 to 1.5, windows, masks and training among them (AMD EPYC 9004 with 2 cores, 2 and 8 heads, 70
to 660 tokens, D 64 to 512, 2026-11). In bf16 0.43 to 0.85 where the CPU multiplies that by itself.

Of fewer tokens, without gradients, masks and windows, 0.99 to 3.2 times within the limits below
(1.45 in the median of 77 problems; the same CPU, 8 to 128 heads, 1 to 256 rows, 32 to 2048 keys);
beyond 0.68 to 1.6, and of several rows whose keys would be repeated down to 0.03.
"""

_MOST_HEADS: Final = 32
"""Heads of a single row, where each has keys of its own."""

_MOST_KEYS: Final = 1 << 20
"""Elements of the keys of these."""

_MOST_HALF_KEYS: Final = 1 << 18
"""Elements of the keys of a single bf16 row of grouped heads: written out takes 1.2 to 4.3 times as
long up to there, beyond 0.56 to 1.8. No CPU whose tiles multiply bf16 was asked."""

_MOST_COLUMNS: Final = 128
"""D of several rows."""


def has_flash_sinks(problem: AttentionProblem) -> bool:
    """Return whether a chunk is one call of the kernel but for its sinks, and faster by it."""
    if problem.device_type != "cpu" or not problem.has_sinks or problem.scale <= 0:
        return False
    if 0 in (problem.batch, problem.num_heads):
        return False
    is_trained_window = problem.requires_grad and problem.window[0] >= 0
    fewest = _FEWEST_IN_WINDOWS if is_trained_window else _FEWEST
    is_long = problem.precision.bits > 16 and min(problem.longest) >= fewest
    if not is_long and not _is_fast_of_few(problem):
        return False
    return is_fused(problem) and is_plain(replace(problem, has_sinks=False))


def _is_fast_of_few(problem: AttentionProblem) -> bool:
    """Return whether the kernel is the faster one of few tokens: without gradients and masks."""
    single = problem.len_q == 1  # a window's keys are a part of all
    given = problem.mask is not MaskKind.NONE or problem.has_alibi or problem.dilation > 1
    if given or problem.num_sequences or not (single or problem.window == (-1, -1)):
        return False
    if problem.wants_gradients or problem.offset < 0 or 0 in problem.longest:
        return False
    grouped = problem.group_size > 1
    if not single:
        narrow = problem.head_dim <= _MOST_COLUMNS
        return narrow and not grouped and problem.precision.bits > 16
    heads = problem.batch * problem.num_heads
    keys = problem.batch * problem.num_kv_heads * problem.len_k * problem.head_dim
    if problem.precision.bits > 16:
        return grouped or (heads <= _MOST_HEADS and keys <= _MOST_KEYS)
    half = problem.precision is Precision.BF16 and not multiplies_in_tiles(problem)
    return half and grouped and keys <= _MOST_HALF_KEYS


def flash_sinks_tile(
    tile: Tensors, problem: AttentionProblem, rows: range, cols: range, step: int
) -> tuple[torch.Tensor, ...]:
    """Return the output of some rows; see `adaattn.backends.masked.sdpa_tile`."""
    if not cols:
        return zero_rows(tile)
    whole = len(rows) == problem.len_q and tile.mask is None
    if whole and is_in_order(tile, problem, (len(rows), len(cols))):
        return (_attend(tile.query, tile.key, tile.value, None, tile.sinks, problem, True),)
    mask = additive_mask(sdpa_mask(tile, problem, rows, cols, step), tile.query.dtype)
    return (_attend(tile.query, tile.key, tile.value, mask, tile.sinks, problem, False),)


def whole_flash_sinks(problem: AttentionProblem, group: HeadGroup) -> Direct | None:
    """Return the function of a problem that is one chunk, without masks or ALiBi; None else.

    Its result is None for a call under a transform.
    """
    chunk = only_chunk(problem, group)
    if chunk is None or problem.has_alibi or not has_flash_sinks(problem):
        return None
    rows, cols = chunk
    part = slice(cols.start, cols.stop) if len(cols) < problem.len_k else None
    square = len(rows) == len(cols) and problem.window == (-1, -1) and problem.dilation == 1
    causal = problem.is_causal and square
    hidden = not causal and not hides_nothing(problem, rows, cols)
    is_free = never_hides(problem)

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None = None,
        sinks: torch.Tensor | None = None,
        *rest: None,
    ) -> Any:
        if not may_keep(query) or not (is_free or key.shape[2] == problem.len_k):
            return None
        if part is not None:
            key, value = key[:, :, part], value[:, :, part]
        tile = seen_tile(problem, rows, cols, query, query.dtype) if hidden else None
        return _attend(query, key, value, tile, sinks, problem, causal)

    return run


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    problem: AttentionProblem,
    is_causal: bool,
) -> torch.Tensor:
    """Return the output [B, Hq, R, Dv] of rows over keys; the mask is added, sinks are [Hq]."""
    folds = problem.len_q == 1 and problem.group_size > 1 and not problem.wants_gradients
    if problem.group_size > 1 and not folds:
        key, value = (item.repeat_interleave(problem.group_size, 1) for item in (key, value))
    query, key, value = (with_dense_columns(item) for item in (query, key, value))
    if not problem.wants_gradients:
        batch, heads = query.shape[:2]
        if folds:  # the heads of a group become rows
            query = query.reshape(batch, key.shape[1], problem.group_size, query.shape[3])
        plain, lse = _FLASH(query, key, value, 0.0, is_causal, attn_mask=mask, scale=problem.scale)
        if folds:
            plain = plain.reshape(batch, heads, 1, problem.value_dim)
            lse = lse.reshape(batch, heads, 1)
        assert sinks is not None
        return beside_sinks(plain, above_sinks(lse, sinks))
    given = (query, key, value, mask, sinks)
    output: torch.Tensor = _FlashWithSinks.apply(*given, is_causal, problem.scale)  # type: ignore[no-untyped-call]
    return output


class _FlashWithSinks(torch.autograd.Function):
    """The kernel's output times the share of a row that is not its sink's."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor,
        is_causal: bool,
        scale: float,
    ) -> torch.Tensor:
        plain, lse = _FLASH(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
        above = above_sinks(lse, sinks)
        output = beside_sinks(plain, above)
        ctx.save_for_backward(query, key, value, mask, sinks, output, lse, above)
        ctx.fixed = is_causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients."""
        wanted = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[4]
        found = _Gradients.apply(grad, *ctx.saved_tensors, *ctx.fixed, wanted)  # type: ignore[no-untyped-call]
        of_query, of_key, of_value, of_sinks = found
        return of_query, of_key, of_value, None, of_sinks, None, None


class _Gradients(torch.autograd.Function):
    """The gradients of such a call, which have none themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        above: torch.Tensor,
        is_causal: bool,
        scale: float,
        wanted: tuple[bool, bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """Return those of q, k, v and the sinks; the kernel takes sum(dP P) from an output.

        With the scaled one it is smaller by what the log-sum-exp passes on through the share.
        """
        grads: tuple[torch.Tensor | None, ...] = (None, None, None)
        if wanted[0]:
            inner = (grad * torch.sigmoid(above)).to(grad.dtype)
            given = inner, query, key, value, output, lse, 0.0, is_causal
            grads = _BACKWARD(*given, attn_mask=mask, scale=scale)
        of_sinks = None
        if wanted[1]:
            sums = (grad.to(lse.dtype) * output).sum(-1, keepdim=True) * torch.sigmoid(-above)
            of_sinks = -sums.sum((0, 2, 3)).to(sinks.dtype)
        return *grads, of_sinks

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Refuse."""
        del upstream
        raise UnsupportedError(
            "attention with sinks by the flash kernel of a CPU",
            ("its gradients have no derivatives themselves",),
            'Pass backend="reference" where second derivatives are wanted.',
        )
