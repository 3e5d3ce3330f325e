"""Small cases of our kernels, forward and backward, to be run below compute-sanitizer.

python -m tests.unit.backends.sanitized "causal, 128 columns"
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from adaattn import BlockList
from adaattn import scaled_dot_product_attention as attend

Given = dict[str, Any]


def _mask(rows: int) -> Callable[[], Given]:
    return lambda: {"attn_mask": torch.rand(rows, rows, device="cuda") < 0.7}


def _bias(rows: int, *, trains: bool) -> Callable[[], Given]:
    return lambda: {"attn_mask": torch.randn(rows, rows, device="cuda", requires_grad=trains)}


def _listed() -> Given:
    shown = torch.tensor([[True, False, True], [True, True, False], [False, False, True]])
    return {"blocks": BlockList.from_mask(shown.cuda())}


def _of_heads(*, trains: bool) -> Callable[[], Given]:
    """A scale, window and softcap of each of two heads, slopes and sinks beside them."""

    def made() -> Given:
        windows = torch.tensor([[50, 0], [-1, 0]], device="cuda", dtype=torch.int32)
        slopes = torch.tensor([0.5, 0.25], device="cuda")
        trained = {
            name: torch.tensor(pair, device="cuda", requires_grad=trains)
            for name, pair in {
                "scale": [0.1, 0.2],
                "softcap": [20.0, 0.0],
                "sinks": [0.5, -1.0],
            }.items()
        }
        return {"window": windows, "alibi_slopes": slopes, **trained}

    return made


def _packed() -> Given:
    starts = torch.tensor([0, 100, 130, 300], device="cuda", dtype=torch.int32)
    longest = {"max_seqlen_q": 170, "max_seqlen_k": 170}
    return {"is_causal": True, "cu_seqlens_q": starts, "cu_seqlens_k": starts, **longest}


def call(
    backend: str,
    shape: tuple[int, int, int],
    given: Given | Callable[[], Given] | None = None,
    *,
    kv: tuple[int, int] | None = None,
    trains: bool = True,
    deterministic: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Run a call, and its backward pass if it ``trains``.

    Args:
        backend: its name.
        shape: heads, rows and columns of queries.
        given: keywords of the call, or what makes them.
        kv: heads and rows of keys and values, else those of queries.
        trains: gradients are wanted.
        deterministic: sums have a fixed order.
        dtype: of all tensors.
    """
    heads, rows, columns = shape
    sizes = (heads, rows), kv or (heads, rows), kv or (heads, rows)
    query, key, value = (
        torch.randn(1, *size, columns, device="cuda", dtype=dtype, requires_grad=trains)
        for size in sizes
    )
    keywords = given() if callable(given) else given or {}
    torch.use_deterministic_algorithms(deterministic)
    output = attend(query, key, value, backend=backend, enable_gqa=kv is not None, **keywords)
    if trains:
        output.backward(torch.randn_like(output))
    torch.cuda.synchronize()


CAUSAL: Given = {"is_causal": True}
CASES: dict[str, Callable[[], None]] = {
    "full": partial(call, "hopper", (4, 256, 64)),
    "causal": partial(call, "hopper", (4, 256, 64), CAUSAL),
    "causal, fixed order": partial(call, "hopper", (4, 512, 64), CAUSAL, deterministic=True),
    "causal, 128 columns": partial(call, "hopper", (2, 256, 128), CAUSAL),
    "causal, 128 columns, fixed order": partial(
        call, "hopper", (2, 384, 128), CAUSAL, deterministic=True
    ),
    "causal, 256 columns": partial(call, "hopper", (2, 256, 256), CAUSAL),
    "grouped heads": partial(call, "hopper", (8, 200, 64), CAUSAL, kv=(2, 200)),
    "grouped heads, fixed order": partial(
        call, "hopper", (8, 200, 64), CAUSAL, kv=(2, 200), deterministic=True
    ),
    "grouped heads in turns": partial(call, "hopper", (264, 128, 64), CAUSAL, kv=(132, 128)),
    "window": partial(call, "hopper", (2, 333, 64), {"window": (50, 0)}),
    "softcap": partial(call, "hopper", (2, 256, 64), {"softcap": 20.0}),
    "mask": partial(call, "hopper", (2, 256, 64), _mask(256)),
    "packed mask": partial(call, "hopper", (2, 1024, 64), _mask(1024)),
    "bias": partial(call, "hopper", (2, 256, 64), _bias(256, trains=False)),
    "heads with terms of their own": partial(
        call, "hopper", (2, 256, 64), _of_heads(trains=False), trains=False
    ),
    "list of blocks": partial(call, "hopper", (2, 384, 128), _listed, trains=False),
    "packed sequences": partial(call, "hopper", (2, 300, 64), _packed),
    "decoding": partial(call, "hopper", (8, 1, 128), kv=(2, 4000), trains=False),
    "triton": partial(call, "triton", (2, 200, 64), CAUSAL),
    "triton, fp32": partial(call, "triton", (2, 130, 64), CAUSAL, dtype=torch.float32),
    "triton, mask": partial(call, "triton", (2, 130, 64), _mask(130)),
    "triton, bias": partial(call, "triton", (2, 130, 64), _bias(130, trains=True)),
    "triton, grouped heads": partial(call, "triton", (8, 200, 64), CAUSAL, kv=(2, 200)),
    "triton, heads with terms of their own": partial(
        call, "triton", (2, 200, 64), _of_heads(trains=True)
    ),
    "triton, list of blocks": partial(call, "triton", (2, 384, 64), _listed),
    "triton, packed sequences": partial(call, "triton", (2, 300, 64), _packed),
    "triton, dropout": partial(call, "triton", (2, 130, 64), {"dropout_p": 0.2}),
    "triton, decoding": partial(call, "triton", (8, 1, 128), kv=(2, 4000), trains=False),
    "512 columns": partial(call, "streamed", (2, 200, 512)),
    "512 columns, 1100 rows": partial(call, "streamed", (1, 1100, 512)),
    "320 columns, causal": partial(call, "streamed", (2, 300, 320), CAUSAL),
    "1024 columns, mask": partial(call, "streamed", (2, 130, 1024), _mask(130)),
    "few rows": partial(call, "streamed", (4, 16, 512), dtype=torch.float32),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        CASES[name]()
        sys.stdout.write(f"done: {name}\n")
