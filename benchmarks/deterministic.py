"""What gradients that are the same each time cost: our backward pass, and PyTorch's.

    python -m benchmarks.deterministic --device cuda

Backward passes alone, in turns: of the `hopper` executor on a GPU, of the reference on a CPU, to
see that all runs. Deterministic gradients are compared with those of a second run, bit by bit.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn import scaled_dot_product_attention as attend
from adaattn.testing import assert_matches
from adaattn.tuning_inputs import algorithms
from benchmarks.timing import arguments, interleaved, ratio_row, save

FAST, ORDERED, FLASH = "adaattn", "adaattn, deterministic", "F.sdpa/flash, deterministic"
_TOKENS: Final = 16384
_COLUMNS: Final = 2048

Row = dict[str, Any]
Step = Callable[[], tuple[torch.Tensor, ...]]


def cells(device: str) -> Iterator[tuple[str, int, int, int, dict[str, Any]]]:
    """Yield name, D, tokens, query heads of a key head and keywords of what is timed."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if device == "cuda" else (64, 128)
    for dim in (64, 128):
        for length in lengths:
            for words in ({}, {"is_causal": True}):
                name = "causal" if words else "full"
                yield f"D{dim} S{length} {name}", dim, length, 1, words
        for length in lengths[-3::2]:
            causal: dict[str, Any] = {"is_causal": True}
            yield f"D{dim} S{length} causal, groups of 4", dim, length, 4, causal
            window = {"window": (length // 8, 0)}
            yield f"D{dim} S{length} window {length // 8}", dim, length, 1, window


def backward(
    function: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    upstream: torch.Tensor,
    mode: bool,
) -> Step:
    """Return a function that runs the backward pass of one forward pass, in a mode."""
    with algorithms(deterministic=mode):
        output = function(*inputs)

    def step() -> tuple[torch.Tensor, ...]:
        with algorithms(deterministic=mode):
            return torch.autograd.grad(output, inputs, upstream, retain_graph=True)

    return step


def row(cell: tuple[str, int, int, int, dict[str, Any]], options: argparse.Namespace) -> Row:
    """Return the times of one cell; gradients are compared before."""
    name, dim, length, group, words = cell
    on_gpu = options.device == "cuda"
    tokens, heads = (_TOKENS, _COLUMNS // dim) if on_gpu else (length, group)
    kind: dict[str, Any] = {"device": options.device, "requires_grad": True}
    kind["dtype"] = torch.bfloat16 if on_gpu else torch.float32
    batch = max(tokens // length, 1)
    query = torch.randn(batch, heads, length, dim, **kind)
    key, value = (torch.randn(batch, heads // group, length, dim, **kind) for _ in range(2))
    inputs, upstream = (query, key, value), torch.randn_like(query)
    ours = partial(attend, enable_gqa=True, backend="hopper" if on_gpu else "reference", **words)
    steps = {FAST: backward(ours, inputs, upstream, False)}
    steps[ORDERED] = backward(ours, inputs, upstream, True)
    found, again = steps[ORDERED](), steps[ORDERED]()
    assert all(map(torch.equal, found, again)), f"{name}: not the same each time"
    wide = [item.detach().double().requires_grad_() for item in inputs]
    if length * length * heads * batch <= 1 << 28:
        exact = attend(*wide, backend="reference", enable_gqa=True, **words)
        eager = attend(*inputs, backend="reference", enable_gqa=True, **words)
        sums = torch.autograd.grad(exact, wide, upstream.double())
        rounded = torch.autograd.grad(eager, inputs, upstream)
        for which in zip(found, sums, rounded, strict=True):
            assert_matches(*which, summands=length * group + dim)
    if "window" not in words and on_gpu:

        def flash(*given: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*given, enable_gqa=group > 1, **words)

        steps[FLASH] = backward(flash, inputs, upstream, True)
    times = interleaved(steps, device=options.device, rounds=options.rounds)
    made = ratio_row(name, times, FAST)
    print(f"{name:<36} {made['speedup']}", flush=True)
    return made


def main(given: list[str] | None = None) -> int:
    """Time all cells; return 0."""
    options = arguments((__doc__ or "").splitlines()[0]).parse_args(given)
    rows = [row(cell, options) for cell in cells(options.device) if options.only in cell[0]]
    print(save(f"deterministic_{options.device}", options, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
