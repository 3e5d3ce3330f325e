"""Host time: what this library adds to a call, to the launch of its kernels, and to import torch.

python -m benchmarks.host
"""

import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

import adaattn
from adaattn.errors import UnsupportedError
from benchmarks.timing import arguments, save

_CALLS = 2000
_WARM_CALLS = 40
_QUEUED_CALLS = 300
_AUTOCAST = "bf16 under autocast"
_OWN_KERNELS = ("triton", "hopper")
_IMPORTS = {
    "adaattn": "import adaattn",
    "adaattn and its public call": "from adaattn import scaled_dot_product_attention",
}
_TIMED = "import time, torch; s = time.perf_counter(); {}; print(1e3 * (time.perf_counter() - s))"
_FORBIDDEN = ("triton", "transformers", "plotly")


def call_overhead(device: str, rounds: int) -> list[dict[str, Any]]:
    """Return host microseconds of calls on tiny tensors: PyTorch's, ours, and the difference."""
    rows = []
    for name, (ours, peer) in _cases(device).items():
        samples: dict[str, list[float]] = {"PyTorch": [], "adaattn": []}
        with torch.autocast(device, dtype=torch.bfloat16, enabled=name == _AUTOCAST):
            for _ in range(_WARM_CALLS):
                ours()
            functions, modules = crossed(ours)
            for _ in range(rounds):
                for key, function in (("PyTorch", peer), ("adaattn", ours)):
                    seconds = timeit.timeit(function, number=_CALLS)
                    samples[key].append(1e6 * seconds / _CALLS)
        medians = {key: statistics.median(values) for key, values in samples.items()}
        row: dict[str, Any] = {"cell": f"call, {name}", "microseconds": medians}
        row |= {"added_us": medians["adaattn"] - medians["PyTorch"]}
        rows.append(row | {"functions": functions, "modules": modules})
        print(
            f"{name:<32} PyTorch {medians['PyTorch']:6.2f} us, adaattn adds "
            f"{row['added_us']:6.2f} us through {functions} functions of {modules} modules"
        )
    return rows


def _cases(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return (ours, PyTorch's) by name; what PyTorch lacks a word for is a mask made before."""
    attend, sdpa = adaattn.scaled_dot_product_attention, F.scaled_dot_product_attention
    three = tuple(torch.randn(1, 2, 16, 16, device=device) for _ in range(3))
    x = three[0]
    grouped = (x, *(item[:, :1].clone() for item in three[1:]))
    decode = (x[:, :, :1].clone(), *(torch.randn(1, 2, 64, 16, device=device) for _ in range(2)))
    bias = torch.zeros(16, 16, device=device)
    seen = torch.ones(16, 16, device=device, dtype=torch.bool).tril()
    window = {"is_causal": True, "window": (3, 0)}
    slopes = torch.tensor([0.5, 0.25], device=device)
    starts = torch.tensor([0, 4, 10, 16], device=device, dtype=torch.int32)
    packed = {"is_causal": True, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    module = adaattn.AdaAttention(32, 2, batch_first=True, device=device)
    theirs = torch.nn.MultiheadAttention(32, 2, batch_first=True, device=device)
    rows = torch.randn(1, 16, 32, device=device)
    plain, masked = partial(sdpa, *three), partial(sdpa, *three, seen)
    half = tuple(item.bfloat16() for item in three)
    return {
        "plain": (partial(attend, *three), plain),
        "causal": (partial(attend, *three, is_causal=True), partial(sdpa, *three, is_causal=True)),
        _AUTOCAST: (partial(attend, *half), partial(sdpa, *half)),
        "mask": (partial(attend, *three, bias), partial(sdpa, *three, bias)),
        "grouped heads": (
            partial(attend, *grouped, enable_gqa=True),
            partial(sdpa, *grouped, enable_gqa=True),
        ),
        "decoding": (partial(attend, *decode), partial(sdpa, *decode)),
        "causal window": (partial(attend, *three, **window), masked),
        "ALiBi": (
            partial(attend, *three, is_causal=True, alibi_slopes=slopes),
            partial(sdpa, *three, bias),
        ),
        "packed": (partial(attend, *three, **packed), masked),
        "return_aux=True": (partial(attend, *three, return_aux=True), plain),
        'policy="balanced"': (partial(attend, *three, policy="balanced"), plain),
        "AdaAttention": (
            partial(module, rows, rows, rows),
            partial(theirs, rows, rows, rows, need_weights=False),
        ),
        "AdaAttention, MHA as it comes": (
            partial(module, rows, rows, rows),
            partial(theirs, rows, rows, rows),
        ),
    }


def launch_overhead(rounds: int) -> list[dict[str, Any]]:
    """Return host microseconds of bound calls of our kernels on a GPU, beside their bare launches.

    A bare launch is what Triton's launcher was given, with tensors that were allocated before.
    """
    rows = []
    square = [torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    sizes = (32, 1), (8, 32768), (8, 32768)
    decode = [torch.randn(1, *size, 128, device="cuda", dtype=torch.bfloat16) for size in sizes]
    for name in _OWN_KERNELS:
        for cell, tensors in (("causal", square), ("decoding", decode)):
            settings = {"is_causal": cell == "causal", "enable_gqa": True, "backend": name}
            bound = partial(adaattn.scaled_dot_product_attention, *tensors, **settings)
            try:
                bound()
            except UnsupportedError as error:
                print(f"{name} is not of this machine: {error}")
                break
            launches = _launches_of(bound)
            samples: dict[str, list[float]] = {"launch": [], "call": []}

            def bare(launches: list[Callable[[], Any]] = launches) -> None:
                for launch in launches:
                    launch()

            for _ in range(rounds):
                for key, function in (("launch", bare), ("call", bound)):
                    torch.cuda.synchronize()  # what is launched below fits the queue
                    seconds = timeit.timeit(function, number=_QUEUED_CALLS)
                    samples[key].append(1e6 * seconds / _QUEUED_CALLS)
            medians = {key: statistics.median(values) for key, values in samples.items()}
            added = medians["call"] - medians["launch"]
            row: dict[str, Any] = {"cell": f"launch, {name}, {cell}", "microseconds": medians}
            rows.append(row | {"added_us": added, "launches": len(launches)})
            print(
                f"{name + ', ' + cell:<32} {len(launches)} bare launches "
                f"{medians['launch']:6.2f} us, a call adds {added:6.2f} us"
            )
    return rows


def _launches_of(call: Callable[[], Any]) -> list[Callable[[], Any]]:
    """Return what a call of one of our kernels asks Triton's launcher for, to be asked again."""
    from triton.backends.nvidia.driver import CudaLauncher

    found: list[Callable[[], Any]] = []
    launched = CudaLauncher.__call__

    def noting(launcher: Any, *given: Any, **named: Any) -> Any:
        found.append(partial(launched, launcher, *given, **named))
        return launched(launcher, *given, **named)

    for _ in range(_WARM_CALLS):
        call()
    CudaLauncher.__call__ = noting
    try:
        call()
    finally:
        CudaLauncher.__call__ = launched
    return found


def crossed(function: Callable[[], Any]) -> tuple[int, int]:
    """Return how many Python functions of this package, in how many modules, one call runs."""
    package = str(Path(adaattn.__file__).parent)
    seen: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call" and frame.f_code.co_filename.startswith(package):
            seen.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(seen), len(set(seen))


def import_overhead(rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds that importing adds in fresh processes with torch, and what came in.

    The first import compiles, as installing does, and is not counted.
    """
    samples: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    with tempfile.TemporaryDirectory() as compiled:
        for number in range(rounds + 1):
            for name, statement in _IMPORTS.items():
                took = float(_fresh(_TIMED.format(statement), compiled))
                if number:
                    samples[name].append(took)
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


def _fresh(code: str, compiled: str | None = None) -> str:
    """Return what a fresh interpreter prints, which keeps compiled modules in a folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if compiled is not None:
        env["PYTHONPYCACHEPREFIX"] = compiled
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env
    )
    return run.stdout.strip()


def main() -> None:
    """Run them and write the result."""
    options = arguments(__doc__ or "").parse_args()
    rows = call_overhead(options.device, options.rounds)
    if options.device == "cuda":
        rows += launch_overhead(options.rounds)
    rows += import_overhead(options.rounds)
    print(save(f"host_{options.device}", options, rows))


if __name__ == "__main__":
    main()
