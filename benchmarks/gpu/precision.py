"""Suite 2: the number formats, each where the device computes in it, beside fp32."""

from dataclasses import replace
from functools import partial

import torch

from adaattn.attention.precision_mode import MODES, why_not
from adaattn.kernels.flash_attention import FlashAttentionConfig, flash_attention_forward
from benchmarks.gpu.rows import OK, UNAVAILABLE, WRONG, Row, Settings, line
from benchmarks.gpu.tensors import TensorCell, draw, run_tensors

__all__ = ["MSE_LIMITS", "run"]

MSE_LIMITS = {"fp16": 1e-3, "bf16": 1e-4}
"""What the mean squared error against fp32 must stay below."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(settings: Settings) -> list[Row]:
    """Return the rows of the suite: forward and training in each format."""
    shape = (4, 16, 4096, 128) if settings.is_gpu else (2, 8, 1024, 64)
    if settings.quick:
        shape = (1, 2, 128, 32)
    rows: list[Row] = []
    for training in (False, True):
        rows += _phase(shape, settings, training)
    return rows


def _phase(shape: tuple[int, int, int, int], settings: Settings, training: bool) -> list[Row]:
    """Return the rows of one phase, formats timed in turn on the same rounded numbers."""
    batch, heads, length, dim = shape
    name = f"B{batch}_H{heads}_S{length}_D{dim} causal"
    cell = TensorCell(name=name, shape=shape, dtype=torch.float32)
    base = {"suite": "precision"}
    functions, inputs, refused = {}, {}, []
    for mode, precision in MODES.items():
        if precision is None:
            continue
        if reason := why_not(precision, settings.device):
            phase = "training" if training else "forward"
            row = Row(**base, cell=name, variant=mode, phase=phase, status=UNAVAILABLE, note=reason)
            refused.append(row)
            settings.say(line(row))
            continue
        config = FlashAttentionConfig(is_causal=True, precision_mode=mode)
        functions[mode] = partial(flash_attention_forward, config=config)
        stored = replace(cell, dtype=_DTYPES[mode])
        inputs[mode] = draw(stored, settings.device, grad=training)
    rows = run_tensors(
        cell, functions, settings, base, inputs=inputs, training=training, peer="fp32"
    )
    return [_held(row) for row in rows] + refused


def _held(row: Row) -> Row:
    """Return a row held against the format's limit."""
    limit = MSE_LIMITS.get(row.variant)
    if limit is None or row.mse is None or row.status != OK:
        return row
    if row.mse < limit:
        return replace(row, extra=row.extra | {"mse_limit": limit}, note=f"MSE limit {limit:g}")
    return replace(
        row,
        status=WRONG,
        mean_ms=None,
        std_ms=None,
        median_ms=None,
        tokens_per_s=None,
        tflops=None,
        speedup=None,
        note=f"MSE {row.mse:.3g}, expected less than {limit:g}",
    )
