"""Compares AdaAttn with ``F.scaled_dot_product_attention`` cell by cell; no time on a wrong result.

    python -m benchmarks.ops.run --device cpu

A result is right when its error against ``F.scaled_dot_product_attention`` in a wider dtype is at
most twice the error of ``F.scaled_dot_product_attention`` in its own, plus one rounding.
"""

from typing import Any

import torch

from benchmarks.ops.registry import Cell, cells, functions
from benchmarks.timing import arguments, interleaved, ratio_row, save


def compare(cell: Cell, device: str, rounds: int) -> dict[str, Any]:
    """Return the result row of one cell."""
    made, wide, chosen = functions(cell, device)
    reference = wide()
    errors = {name: _error(run(), reference) for name, run in made.items()}
    del reference
    allowed = 2 * errors["F.sdpa"] + torch.finfo(cell.dtype).eps
    wrong = {name: error for name, error in errors.items() if not error <= allowed}
    if wrong:
        raise SystemExit(f"{cell.name}: {wrong} is more than {allowed:.3g}; nothing was timed")
    timings = interleaved(made, device=device, rounds=rounds)
    row = ratio_row(
        cell.name,
        timings,
        "F.sdpa",
        shape=cell.shape,
        dtype=str(cell.dtype).removeprefix("torch."),
        chosen=chosen,
        relative_error=errors,
    )
    print(
        f"{cell.name:<46} {timings['F.sdpa'].median_ms:9.3f} ms "
        + " ".join(f"{name}={gain:.3f}x" for name, gain in row["speedup"].items())
        + f"  [{chosen}]",
        flush=True,
    )
    return row


def _error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((found.to(reference.dtype) - reference).norm() / reference.norm())


def main() -> None:
    """Run the cells and write the result."""
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    rows = []
    for cell in cells(options.device):
        if options.only in cell.name:
            rows.append(compare(cell, options.device, options.rounds))
            if options.device == "cuda":
                torch.cuda.empty_cache()
    print(save(f"ops_{options.device}", options, rows))


if __name__ == "__main__":
    main()
