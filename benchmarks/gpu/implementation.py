"""Suite 1: every implementation of a self-attention layer in the same cells."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.clock import peak_bytes, timed
from benchmarks.gpu.rows import OK, WRONG, Row, Settings, guarded, line
from benchmarks.gpu.variants import (
    ModuleCell,
    Reference,
    Variant,
    joined_gradients,
    make_variants,
    module_flops,
    reference,
    upstream,
)

__all__ = ["cells", "run", "run_cell"]

_WARM_CALLS = 2
"""An adaptive module measures on its first call; kernels load on theirs."""


def cells(settings: Settings) -> list[ModuleCell]:
    """Return the cells that suit the device."""
    if settings.quick:
        return [
            ModuleCell(name="B2_S64", batch=2, length=64, embed_dim=64, num_heads=4),
            ModuleCell(
                name="B1_S256 rank 8", batch=1, length=256, embed_dim=128, num_heads=1, rank=8
            ),
        ]
    sizes = ((4, 128), (2, 512), (4, 512), (1, 1024))
    found = [
        ModuleCell(name=f"B{b}_S{s}", batch=b, length=s, embed_dim=512, num_heads=8)
        for b, s in sizes
    ]
    found.append(
        ModuleCell(
            name="B1_S2048 D512 rank 16", batch=1, length=2048, embed_dim=1024, num_heads=2, rank=16
        )
    )
    if settings.is_gpu:
        found += [
            ModuleCell(
                name=f"B{b}_S{s} E2048",
                batch=b,
                length=s,
                embed_dim=2048,
                num_heads=16,
                dtype=torch.bfloat16,
            )
            for b, s in ((8, 2048), (2, 8192), (1, 16384))
        ]
    return found


def run(settings: Settings) -> list[Row]:
    """Return the rows of the suite."""
    rows: list[Row] = []
    for cell in cells(settings):
        rows += run_cell("implementation", cell, settings)
    return rows


def run_cell(
    suite: str, cell: ModuleCell, settings: Settings, *, training: bool = False
) -> list[Row]:
    """Return the rows of one cell: checked first, then timed in turn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(cell.batch, cell.length, cell.embed_dim, generator=generator)
    x = x.to(settings.device)
    exact = reference(cell, x, training=training)
    variants = make_variants(cell, settings.device, training=training)
    given = x.to(cell.dtype)
    base = {
        "suite": suite,
        "cell": cell.name,
        "phase": "training" if training else "forward",
        "dtype": str(cell.dtype).removeprefix("torch."),
    }
    checked = _check(variants, given, exact, base)
    good = [v for v in variants if checked[v.name].status == OK]
    functions = {v.name: _function(v, given, training) for v in good}
    peaks = {
        name: guarded(partial(peak_bytes, run, settings.device)) for name, run in functions.items()
    }
    functions = {name: run for name, run in functions.items() if peaks[name][1] == OK}
    timings = timed(functions, settings)
    flops = module_flops(cell, training=training)
    rows = []
    for variant in variants:
        values = checked[variant.name].to_dict()
        if variant.name in timings:
            median = timings[variant.name]["median_ms"]
            values |= timings[variant.name] | {
                "peak_bytes": peaks[variant.name][0],
                "tokens_per_s": 1e3 * cell.tokens / median,
                "tflops": flops / median / 1e9,
                "utilisation_percent": settings.utilisation(functions[variant.name]),
                "speedup": _ratio(timings, "F.sdpa", median),
                "note": f"{variant.label}{_chosen(variant)}",
            }
        elif values["status"] == OK:
            values["status"] = peaks[variant.name][1]
        rows.append(Row(**values))
        settings.say(line(rows[-1]))
    return rows


def _check(
    variants: list[Variant], x: torch.Tensor, exact: Reference, base: dict[str, Any]
) -> dict[str, Row]:
    """Return a row for each variant: its errors, and whether it may be timed.

    The yardstick is the first variant that runs, eager PyTorch in the same dtype. An error
    budget allows what it may become in the output; gradients of an approximation have no
    stated bound and are only recorded.
    """
    found: dict[str, Row] = {}
    yardsticks: tuple[float, float] | None = None
    for variant in variants:
        errors, status = guarded(partial(_errors, variant, x, exact))
        if errors is None:
            found[variant.name] = Row(**base, variant=variant.name, status=status)
            continue
        error, mse, gradient_error = errors
        yardsticks = yardsticks or (error, gradient_error)
        one = torch.finfo(x.dtype).eps
        allowed = 2 * yardsticks[0] + one + variant.error_budget * exact.growth
        right = error <= allowed
        note = "" if right else f"relative error {error:.3g}, allowed {allowed:.3g}"
        if not variant.error_budget and not gradient_error <= 2 * yardsticks[1] + one:
            right = False
            note = f"relative error of gradients {gradient_error:.3g}, naive {yardsticks[1]:.3g}"
        found[variant.name] = Row(
            **base,
            variant=variant.name,
            status=OK if right else WRONG,
            mse=mse,
            relative_error=error,
            note=note,
            extra={"allowed_error": allowed, "gradient_error": gradient_error},
        )
    return found


def _errors(variant: Variant, x: torch.Tensor, exact: Reference) -> tuple[float, float, float]:
    """Return (relative error, mean squared error, relative error of the gradients or 0)."""
    output = _warm(variant, x)
    difference = output.to(exact.output.dtype) - exact.output
    error = float(difference.norm() / exact.output.norm())
    gradient_error = 0.0
    if exact.gradients is not None:
        found = joined_gradients(variant.module, variant.call, x, upstream(x)).to(
            exact.gradients.dtype
        )
        gradient_error = float((found - exact.gradients).norm() / exact.gradients.norm())
    return error, float(difference.square().mean()), gradient_error


def _warm(variant: Variant, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a call after others."""
    with torch.no_grad():
        for _ in range(_WARM_CALLS):
            variant.call(variant.module, x)
        return variant.call(variant.module, x)


def _function(variant: Variant, x: torch.Tensor, training: bool) -> Callable[[], Any]:
    """Return the call to be timed."""
    if not training:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return variant.call(variant.module, x)

        return forward

    return partial(joined_gradients, variant.module, variant.call, x, upstream(x))


def _ratio(timings: dict[str, dict[str, Any]], peer: str, median: float) -> float | None:
    """Return the speed-up over a peer of the same cell."""
    return timings[peer]["median_ms"] / median if peer in timings else None


def _chosen(variant: Variant) -> str:
    """Return the way that a module of this library took most often, as words."""
    statistics = getattr(variant.module, "get_statistics", None)
    if statistics is None:
        return ""
    ways = statistics()["calls_by_plan"]
    return f": {max(ways, key=ways.get)}" if ways else ""
