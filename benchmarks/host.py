"""Host time: what a cached decision adds to a call, and what importing the library adds to torch.

python -m benchmarks.host
"""

import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import adaattn
from benchmarks.timing import arguments, save

_CALLS = 5000
_IMPORTS = {
    "torch": "import torch",
    "adaattn": "import torch, adaattn",
    "adaattn and its public call": "import torch; from adaattn import scaled_dot_product_attention",
}
_FORBIDDEN = ("triton", "transformers", "plotly")


def call_overhead(device: str, rounds: int) -> list[dict[str, Any]]:
    """Return host microseconds of calls on tiny tensors: PyTorch's, ours, and the difference."""
    tiny = torch.randn(1, 2, 16, 16, device=device)
    group = torch.randn(1, 1, 16, 16, device=device)
    bias = torch.zeros(16, 16, device=device)
    cases: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
        "plain": ((tiny, tiny, tiny), {}),
        "causal": ((tiny, tiny, tiny), {"is_causal": True}),
        "mask": ((tiny, tiny, tiny, bias), {}),
        "grouped heads": ((tiny, group, group), {"enable_gqa": True}),
    }
    rows = []
    for name, (inputs, keywords) in cases.items():
        peer = _bound(F.scaled_dot_product_attention, inputs, keywords)
        ours = _bound(adaattn.scaled_dot_product_attention, inputs, keywords)
        samples: dict[str, list[float]] = {"F.sdpa": [], "adaattn": []}
        ours()
        for _ in range(rounds):
            for key, function in (("F.sdpa", peer), ("adaattn", ours)):
                seconds = timeit.timeit(function, number=_CALLS)
                samples[key].append(1e6 * seconds / _CALLS)
        medians = {key: statistics.median(values) for key, values in samples.items()}
        added = medians["adaattn"] - medians["F.sdpa"]
        rows.append({"cell": f"call, {name}", "microseconds": medians, "added_us": added})
        print(f"{name:<16} F.sdpa {medians['F.sdpa']:6.2f} us, adaattn adds {added:5.2f} us")
    return rows


def import_overhead(rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of whole processes that import, interleaved, and what was imported."""
    samples: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for _ in range(rounds):
        for name, statement in _IMPORTS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            samples[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    probe = (
        "import sys, torch; before = set(sys.modules); import adaattn; "
        f"print([name for name in {_FORBIDDEN!r} if name in set(sys.modules) - before])"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True
    ).stdout.strip()
    rows: list[dict[str, Any]] = []
    for name in list(_IMPORTS)[1:]:
        added = medians[name] - medians["torch"]
        print(f"import {name}: adds {added:.1f} ms to torch's {medians['torch']:.0f} ms")
        rows.append({"cell": f"import {name}", "milliseconds": medians, "added_ms": added})
    print(f"of {', '.join(_FORBIDDEN)} importing adaattn brought in: {found}")
    return [*rows, {"cell": "modules brought in", "forbidden": _FORBIDDEN, "found": found}]


def _bound(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], keywords: dict[str, Any]
) -> Callable[[], Any]:
    """Return the call with its arguments in place."""
    return lambda: function(*inputs, **keywords)


def main() -> None:
    """Run both and write the result."""
    options = arguments(__doc__ or "").parse_args()
    rows = call_overhead(options.device, options.rounds)
    rows += import_overhead(options.rounds)
    print(save(f"host_{options.device}", options, rows))


if __name__ == "__main__":
    main()
