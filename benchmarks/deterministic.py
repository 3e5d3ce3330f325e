"""What gradients that are the same each time cost: our backward pass, and PyTorch's.

    python -m benchmarks.deterministic --device cuda
    python -m benchmarks.deterministic --device cuda --beside --dims 256 --lengths 512 4096 32768

Backward passes alone, in turns: of the `hopper` executor on a GPU, of the reference on a CPU, to
see that all runs. Deterministic gradients are compared with those of a second run, bit by bit.
``--beside`` times `F.scaled_dot_product_attention` as a user must call it, too, and both passes
together; ``--masks`` adds a boolean mask and a bias of all pairs, which want no gradients.
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
from adaattn.tuning.inputs import algorithms
from benchmarks.timing import arguments, interleaved, ratio_row, save

FAST, ORDERED, FLASH = "adaattn", "adaattn, deterministic", "F.sdpa/flash, deterministic"
SDPA: Final = "F.sdpa"
_TOKENS: Final = 16384
_COLUMNS: Final = 2048
_LONGEST_MASK: Final = 8192
"""Tokens up to which a window is a mask for PyTorch's function; beyond, it has gigabytes."""

Row = dict[str, Any]
Step = Callable[[], tuple[torch.Tensor, ...]]


def cells(
    options: argparse.Namespace,
) -> Iterator[tuple[str, int, int, int, dict[str, Any]]]:
    """Yield name, D, tokens, query heads of a key head and keywords of what is timed."""
    usual = (512, 1024, 2048, 4096, 8192, 16384) if options.device == "cuda" else (64, 128)
    lengths = options.lengths or usual
    for dim in options.dims:
        for length in lengths:
            for words in ({}, {"is_causal": True}):
                name = "causal" if words else "full"
                yield f"D{dim} S{length} {name}", dim, length, 1, words
        for length in options.lengths or usual[-3::2]:
            causal: dict[str, Any] = {"is_causal": True}
            yield f"D{dim} S{length} causal, groups of 4", dim, length, 4, causal
            window = {"window": (length // 8, 0)}
            yield f"D{dim} S{length} window {length // 8}", dim, length, 1, window
        for length in lengths if options.masks else ():
            if length <= _LONGEST_MASK:
                yield f"D{dim} S{length} mask", dim, length, 1, {"attn_mask": torch.bool}
                yield f"D{dim} S{length} bias", dim, length, 1, {"attn_mask": torch.bfloat16}


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


def both(
    function: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    upstream: torch.Tensor,
) -> Step:
    """Return a function that runs forward and backward pass."""
    return lambda: torch.autograd.grad(function(*inputs), inputs, upstream)


def mask_of(length: int, dtype: torch.dtype, query: torch.Tensor) -> torch.Tensor:
    """Return a mask of all pairs, for all heads: booleans that hide a third, or a bias."""
    drawn = torch.rand(1, 1, length, length, device=query.device)
    return drawn > 1 / 3 if dtype is torch.bool else (4 * drawn).to(query.dtype)


def peer(length: int, group: int, words: dict[str, Any], device: str) -> Callable[..., Any]:
    """Return PyTorch's function as its user must call it."""
    given: dict[str, Any] = {"enable_gqa": group > 1}
    if "window" in words:
        place = torch.arange(length, device=device)
        distance = place[:, None] - place
        given["attn_mask"] = (distance >= 0) & (distance <= words["window"][0])
    else:
        given |= words
    return partial(F.scaled_dot_product_attention, **given)


def rows(
    cell: tuple[str, int, int, int, dict[str, Any]], options: argparse.Namespace
) -> Iterator[Row]:
    """Yield the times of one cell; gradients are compared before."""
    name, dim, length, group, words = cell
    on_gpu = options.device == "cuda"
    tokens, heads = (_TOKENS, _COLUMNS // dim) if on_gpu else (length, group)
    kind: dict[str, Any] = {"device": options.device, "requires_grad": True}
    kind["dtype"] = torch.bfloat16 if on_gpu else torch.float32
    batch = max(tokens // length, 1)
    query = torch.randn(batch, heads, length, dim, **kind)
    key, value = (torch.randn(batch, heads // group, length, dim, **kind) for _ in range(2))
    inputs, upstream = (query, key, value), torch.randn_like(query)
    if "attn_mask" in words:
        words = {"attn_mask": mask_of(length, words["attn_mask"], query)}
    ours = partial(attend, enable_gqa=True, backend="hopper" if on_gpu else "reference", **words)
    steps = {FAST: backward(ours, inputs, upstream, False)}
    steps[ORDERED] = backward(ours, inputs, upstream, True)
    found, again = steps[ORDERED](), steps[ORDERED]()
    assert all(map(torch.equal, found, again)), f"{name}: not the same each time"
    if length * length * heads * batch <= 1 << 28:
        _hold(inputs, upstream, found, {"enable_gqa": True, **words}, length * group + dim)
    if "window" not in words and "attn_mask" not in words and on_gpu:

        def flash(*given: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*given, enable_gqa=group > 1, **words)

        steps[FLASH] = backward(flash, inputs, upstream, True)
    functions = {FAST: ours}
    if options.beside and ("window" not in words or length <= _LONGEST_MASK):
        functions[SDPA] = peer(length, group, words, options.device)
        steps[SDPA] = backward(functions[SDPA], inputs, upstream, False)
    timed = {name: steps}
    if options.beside:
        together = {way: both(function, inputs, upstream) for way, function in functions.items()}
        timed[f"{name}, both passes"] = together
    for part, these in timed.items():
        times = interleaved(these, device=options.device, rounds=options.rounds)
        made = ratio_row(part, times, FAST)
        print(f"{part:<50} {made['speedup']}", flush=True)
        yield made


def _hold(
    inputs: tuple[torch.Tensor, ...],
    upstream: torch.Tensor,
    found: tuple[torch.Tensor, ...],
    words: dict[str, Any],
    summands: int,
) -> None:
    """Raise AssertionError unless gradients are right."""
    wide = [item.detach().double().requires_grad_() for item in inputs]
    exact = attend(*wide, backend="reference", **words)
    eager = attend(*inputs, backend="reference", **words)
    sums = torch.autograd.grad(exact, wide, upstream.double())
    rounded = torch.autograd.grad(eager, inputs, upstream)
    for which in zip(found, sums, rounded, strict=True):
        assert_matches(*which, summands=summands)


def main(given: list[str] | None = None) -> int:
    """Time all cells; return 0."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="columns")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; else the usual ones")
    parser.add_argument(
        "--beside", action="store_true", help="time F.sdpa too, and both passes together"
    )
    parser.add_argument("--masks", action="store_true", help="masks of all pairs, too")
    options = parser.parse_args(given)
    wanted = (cell for cell in cells(options) if options.only in cell[0])
    found = [made for cell in wanted for made in rows(cell, options)]
    name = "backward" if options.beside else "deterministic"
    columns = "_".join(str(dim) for dim in options.dims)
    usual = options.dims == [64, 128]
    name = f"{name}_{options.device}" if usual else f"{name}_d{columns}_{options.device}"
    print(save(name, options, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
