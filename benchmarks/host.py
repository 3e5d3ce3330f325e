"""Host time: what a cached decision adds to a call, and what importing the library adds to torch.

python -m benchmarks.host
"""

import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import adaattn
from benchmarks.timing import arguments, save

_CALLS = 5000
_IMPORTS = {
    "adaattn": "import adaattn",
    "adaattn and its public call": "from adaattn import scaled_dot_product_attention",
}
_TIMED = "import time, torch; s = time.perf_counter(); {}; print(1e3 * (time.perf_counter() - s))"
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
    """Return milliseconds that importing adds in fresh processes with torch, and what came in."""
    samples: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for _ in range(rounds):
        for name, statement in _IMPORTS.items():
            samples[name].append(float(_fresh(_TIMED.format(statement))))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    probe = (
        "import sys, torch; before = set(sys.modules); import adaattn; "
        f"print([name for name in {_FORBIDDEN!r} if name in set(sys.modules) - before])"
    )
    found = _fresh(probe)
    rows: list[dict[str, Any]] = []
    for name, added in medians.items():
        print(f"import {name}: adds {added:.1f} ms to import torch")
        rows.append({"cell": f"import {name}", "added_ms": added, "samples_ms": samples[name]})
    print(f"of {', '.join(_FORBIDDEN)} importing adaattn brought in: {found}")
    return [*rows, {"cell": "modules brought in", "forbidden": _FORBIDDEN, "found": found}]


def _fresh(code: str) -> str:
    """Return what a fresh interpreter prints."""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return run.stdout.strip()


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
